"""The memory that requests may take while they arrive, all connections together.

A frame up to `SMALL_FRAME_BYTES` is free: every connection may hold one. Beyond, a connection takes from the shared
budget what its buffer will hold, as the bytes come: what a peer announces and does not send costs nothing. When the
budget is used up a connection waits (it is not read), until others have ended their frames.

Always true: what is held is at most the budget plus one frame. That one frame is how it cannot come to a standstill:
when all that hold a part of a frame wait for each other, the first in line gets its room. A holder that sends hardly
anything while others wait is `stalled`, and the server closes it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mansio.broker.connection import Connection

SMALL_FRAME_BYTES = 256 * 1024

STALL_S = 2.0
PROGRESS_BYTES_MIN = 64 * 1024
"""Who keeps others from memory must send so much in that time, or its connection ends."""


class ReceiveMemory:
    """See the module. Sizes in bytes."""

    __slots__ = ("_budget", "_favoured", "_held", "_seen", "_total", "_waiting")

    def __init__(self, budget_bytes: int) -> None:
        self._budget = budget_bytes
        self._held: dict[Connection, int] = {}
        self._waiting: dict[Connection, int] = {}
        self._total = 0
        self._favoured: Connection | None = None
        self._seen: dict[Connection, tuple[int, float]] = {}  # holder -> (received bytes, since when)

    @property
    def held_bytes(self) -> int:
        """What large frames hold now."""
        return self._total

    def holds(self, connection: Connection) -> bool:
        """It has a part of the budget, or waits for one."""
        return connection in self._held or connection in self._waiting

    def waits(self, connection: Connection) -> bool:
        """There was no room for it yet; do not read from it."""
        return connection in self._waiting

    def take(self, connection: Connection, wanted: int) -> list[Connection]:
        """The connection's buffer is about to hold `wanted`. If there is no room it `waits` in line from now on.

        Returns those that got room by it (it may be the last that keeps the first in line waiting): read from them.
        """
        if self._grant(connection, wanted):
            return []
        self._waiting[connection] = wanted
        helped = self._help_the_first()
        return [] if helped is None or helped is connection else [helped]

    def release(self, connection: Connection) -> list[Connection]:
        """The connection holds no large frame any more. Those that got room by it: read from them again."""
        self._waiting.pop(connection, None)
        self._seen.pop(connection, None)
        if connection is self._favoured:
            self._favoured = None
        self._total -= self._held.pop(connection, 0)
        return self._serve_the_line()

    def stalled(self, now: float) -> list[Connection]:
        """Who holds a part, keeps others waiting, and sends too slowly. Look every second or so (`now`: monotonic)."""
        if not self._waiting:
            self._seen.clear()
            return []
        found = []
        for holder in self._held:
            if holder in self._waiting:
                self._seen.pop(holder, None)
                continue
            received, since = self._seen.setdefault(holder, (holder.received_bytes, now))
            if holder.received_bytes - received >= PROGRESS_BYTES_MIN:
                self._seen[holder] = (holder.received_bytes, now)
            elif now - since >= STALL_S:
                found.append(holder)
        return found

    def _grant(self, connection: Connection, wanted: int) -> bool:
        held = self._held.get(connection, 0)
        if wanted > held:
            if self._total - held + wanted > self._budget:
                return False
            self._held[connection] = wanted
            self._total += wanted - held
        return True

    def _serve_the_line(self) -> list[Connection]:
        served = []
        for connection, wanted in tuple(self._waiting.items()):
            if not self._grant(connection, wanted):
                break
            del self._waiting[connection]
            served.append(connection)
        if not served and (first := self._help_the_first()) is not None:
            served.append(first)
        return served

    def _help_the_first(self) -> Connection | None:
        """If everybody who holds a part waits, nobody will ever release: give the first in line its room, and again
        whenever it asks until its frame is whole; two of them could exceed the bound."""
        if not self._waiting or any(holder not in self._waiting for holder in self._held):
            return None
        if self._favoured not in self._waiting:
            self._favoured = next(iter(self._waiting))
        first = self._favoured
        wanted = self._waiting.pop(first)
        self._total += wanted - self._held.get(first, 0)
        self._held[first] = wanted
        return first
