"""Turns of requests with many items: other work runs on the event loop in between."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from mansio.ports import Scheduler

ITEMS_PER_TURN: Final = 500
"""Number of items after which other work runs; they take less than 10 ms."""

EVENT_LOOP_SLICE_S: Final = 0.01
"""Time after which a request whose items may take long lets other work run."""


class ItemTurns:
    """The turns of one request. Items must be independent of each other, as other requests run between them."""

    __slots__ = ("_left", "_scheduler")

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._left = ITEMS_PER_TURN

    async def next(self, items: int = 1) -> None:
        """Begin the next item, or the next `items`; let other work run first if `ITEMS_PER_TURN` items have been
        processed since it did."""
        self._left -= items
        if self._left <= 0:
            self._left = ITEMS_PER_TURN
            await self._scheduler.sleep(0)
