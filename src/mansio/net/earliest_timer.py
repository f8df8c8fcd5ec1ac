"""Timer that fires once, at the earliest of several requested times.

The producer's sender and the fetcher check their partitions again when the first of many delays has passed. The time of
a loop's timer handle cannot be read reliably: uvloop rounds it to milliseconds, and returns a handle without `when()`
for a delay of less than half a millisecond. So this class stores the time itself.

Invariant: at most one timer of the loop is set, and it fires no later than any time requested since the last callback.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable


class EarliestTimer:
    """Timer that calls `callback` once, at the earliest of the requested times (in seconds of the loop's clock)."""

    __slots__ = ("_callback", "_due", "_loop", "_timer")

    def __init__(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
        self._loop = loop
        self._callback = callback
        self._timer: asyncio.Handle | None = None
        self._due = math.inf

    def set(self, due: float) -> None:
        """Schedule the callback for the time `due`, unless the callback is already scheduled for an earlier time."""
        if due < self._due:
            self.cancel()
            self._due = due
            self._timer = self._loop.call_at(due, self._on_timer)

    def cancel(self) -> None:
        """Cancel the scheduled callback, if there is one."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._due = math.inf

    def _on_timer(self) -> None:
        self._timer = None
        self._due = math.inf
        self._callback()
