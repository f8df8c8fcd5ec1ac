"""Importing and compiling the message schemas beside the loop, so that no first request pays for it.

The schemas cost about half a second of CPU, the first of them a fifth of a second in one piece: on a loop of a busy
machine that is a stall that health reports. A thread shares the interpreter with the loop a few milliseconds at a time.

Always true: what a request needs before it is warm is compiled by that request; compiling twice gives the same.
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
"""After each step of some milliseconds: the loop has work to do."""


class SchemaPreload:
    """One run of it. `stop` ends it, wherever it is, within one step."""

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
