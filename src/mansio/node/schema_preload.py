"""Schema preload: imports and compiles the message schemas in a thread, so that no first request waits for it.

The schemas take about half a second of CPU, the first of them a fifth of a second in one piece: on the loop of a busy
host this is a stall that health checks report. A thread shares the interpreter with the loop in steps of a few
milliseconds.

Invariant: what a request needs before it is preloaded is compiled by that request; compiling twice gives the same
result.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Final

from mansio.host.threads import BackgroundThread
from mansio.logs import fields
from mansio.wire.codec import messages

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)

PAUSE_S: Final = 0.001
"""Pause after each step of some milliseconds, for the event loop."""


class SchemaPreload:
    """One run. `stop` ends it within one step."""

    def __init__(self, call_from_thread: Callable[..., object]) -> None:
        self._stopped = False
        self._thread = BackgroundThread(call_from_thread, name="mansio-warm-up")
        self._thread.submit(self._run, _ended)

    def stop(self) -> None:
        self._stopped = True
        self._thread.close()

    def _run(self) -> None:
        for _ in messages.preload_schemas():
            if self._stopped:
                return
            time.sleep(PAUSE_S)


def _ended(result: None, error: BaseException | None) -> None:  # noqa: ARG001 - the port's signature
    if error is not None:  # requests compile what they need themselves
        logger.warning("schema_preload_failed", extra=fields(reason=repr(error)))
