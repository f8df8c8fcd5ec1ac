"""An alarm that rings once, at the earliest moment anyone asked for.

Sender and fetcher look at their partitions again when the first of many waits is over. A loop's own timer cannot be
asked when it is due: uvloop rounds to milliseconds, and answers a moment less than half of one away with a handle that
has no `when()`. So the alarm remembers the moment itself.

Always true: at most one timer is set, and it is due no later than any moment asked for since the last ring.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable


class EarliestTimer:
    """Calls `ring` on the loop; every moment is one of the loop's clock, in seconds."""

    __slots__ = ("_loop", "_moment", "_ring", "_timer")

    def __init__(self, loop: asyncio.AbstractEventLoop, ring: Callable[[], None]) -> None:
        self._loop = loop
        self._ring = ring
        self._timer: asyncio.Handle | None = None
        self._moment = math.inf

    def set(self, moment: float) -> None:
        """Ring at this moment, or at an earlier one that is already set."""
        if moment < self._moment:
            self.cancel()
            self._moment = moment
            self._timer = self._loop.call_at(moment, self._on_timer)

    def cancel(self) -> None:
        """Ring no more, until a moment is set again."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._moment = math.inf

    def _on_timer(self) -> None:
        self._timer = None
        self._moment = math.inf
        self._ring()
