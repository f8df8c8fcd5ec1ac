"""Schema preload: imports and compiles the message schemas on a thread, so that first requests do not wait for it.

The schemas take about half a second of CPU time, the first one a fifth of a second without interruption. On the event
loop of a busy host this would be a stall that health checks report. The thread shares the interpreter with the event
loop in steps of a few milliseconds.

Invariant: a request compiles the schemas that it needs and that are not preloaded yet; a schema that is compiled twice
is the same.
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
"""Pause after each step of a few milliseconds, in which the event loop can run."""


class SchemaPreload:
    """One run of the schema preload, which the constructor starts. `stop` ends it after the current step."""

    def __init__(self, call_from_thread: Callable[..., object]) -> None:
        self._stopped = False
        self._thread = BackgroundThread(call_from_thread, name="mansio-warm-up")
        self._thread.submit(self._run, _on_ended)

    def stop(self) -> None:
        self._stopped = True
        self._thread.close()

    def _run(self) -> None:
        for _ in messages.preload_schemas():
            if self._stopped:
                return
            time.sleep(PAUSE_S)


def _on_ended(result: None, error: BaseException | None) -> None:  # noqa: ARG001 - the port's signature
    if error is not None:  # requests compile what they need themselves
        logger.warning("schema_preload_failed", extra=fields(reason=repr(error)))
