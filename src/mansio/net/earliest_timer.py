"""Timer that fires once, at the earliest of several requested times.

Sender and fetcher check their partitions again when the first of many delays has passed. A loop's own timer handle
cannot be used to find out when it is due: uvloop rounds to milliseconds, and returns a handle without `when()` for a
delay of less than half a millisecond. So this class stores the time itself.

Invariant: at most one loop timer is set, and it is due no later than any time requested since the last call.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable


class EarliestTimer:
    """Calls `callback` on the loop. Times are those of the loop's clock, in seconds."""

    __slots__ = ("_callback", "_due", "_loop", "_timer")

    def __init__(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
        self._loop = loop
        self._callback = callback
        self._timer: asyncio.Handle | None = None
        self._due = math.inf

    def set(self, due: float) -> None:
        """Call back at this time, or at an earlier one that is already set."""
        if due < self._due:
            self.cancel()
            self._due = due
            self._timer = self._loop.call_at(due, self._on_timer)

    def cancel(self) -> None:
        """Do not call back until a time is set again."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._due = math.inf

    def _on_timer(self) -> None:
        self._timer = None
        self._due = math.inf
        self._callback()
