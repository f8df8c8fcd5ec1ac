"""Turns of large requests: one is decoded at a time, in pieces, and other connections are served in between."""

from __future__ import annotations

import asyncio
from typing import Self

from mansio.host.asyncio_loop import RunningLoop
from mansio.host.item_turns import ItemTurns


class Turns:
    """The turns of the large requests of one listener. A request that waits for its turn is kept as bytes."""

    __slots__ = ("_items", "_lock")

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._items = ItemTurns(RunningLoop(), items_per_look=1)

    async def __aenter__(self) -> Self:
        await self._lock.acquire()
        self._items.begin()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._lock.release()

    async def pause(self) -> None:
        """Serve other connections, if this request has been decoded for `mansio.host.item_turns.TURN_S` since they
        were."""
        await self._items.next()
