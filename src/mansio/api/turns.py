"""Turns of large requests: one is decoded at a time, in pieces, and other connections are served in between."""

from __future__ import annotations

import asyncio
import time
from typing import Final, Self

TURN_S: Final = 0.002
"""Time after which a large request lets other connections go first."""


class Turns:
    """The turns of the large requests of one listener. A request that waits for its turn is kept as bytes."""

    __slots__ = ("_lock", "_since")

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._since = 0.0

    async def __aenter__(self) -> Self:
        await self._lock.acquire()
        self._since = time.monotonic()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._lock.release()

    async def pause(self) -> None:
        """Serve other connections, if this request has been decoded for `TURN_S` since they were."""
        if time.monotonic() - self._since > TURN_S:
            await asyncio.sleep(0)
            self._since = time.monotonic()
