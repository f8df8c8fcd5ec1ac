"""The memory that requests may take while they arrive, all connections together.

What a connection holds is the frame it is receiving, and whole frames that wait behind a request being worked on.
Up to `SMALL_FRAME_BYTES` that is free. Beyond, it takes from the shared budget what its buffer will hold, as the bytes
come: what a peer announces and does not send costs nothing. When the budget is used up a connection waits (it is not
read), until others have ended their frames.

Who has begun goes first, the oldest before the others, and who is new is let in only while half of the budget is free:
else a crowd takes all of it in beginnings, and each of them waits for the others to end.

Always true: what is held is at most the budget plus one frame. That one frame is how it cannot come to a standstill:
when all that hold a part of a frame wait for each other, the first in line gets its room. A holder that sends hardly
anything while others wait is `stalled`, and the server closes it; unless it waits for our own disk. The more wait, the
sooner; and when one after the other is let on alone and then says nothing, the oldest go together with it, twice as
many each time, but never more than half of those that have begun and wait: who came last may well be innocent. So a
crowd that stops in the middle of its frames is gone after a few times `STALL_S`.

Whom we hold up ourselves (muted for a quota, or behind a request that waits) is no laggard, and is spared: the one that
has held longest, and those after it while all of them together hold at most half of the budget; and each for at most
`BLOCKED_BY_BROKER_S` in which none of its frames begins. Past that it is judged like any other. So they neither
add up to the whole budget nor keep anybody out for ever.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mansio.api.kafka.server.connection import Connection

SMALL_FRAME_BYTES = 64 * 1024

STALL_S = 2.0
PROGRESS_BYTES_MIN = 64 * 1024
"""Who keeps others from memory must send so much in that time, or its connection ends. If n hold and m wait, both are
multiplied by n / (n + m), down to `STALL_S_MIN`."""
STALL_S_MIN = 0.5
"""A lost packet, or a far peer that has just been told to go on, may take this long."""

BLOCKED_BY_BROKER_S = 30.0
"""Who is held up by ourselves is spared so long; not less than the longest pause for a quota."""


class RequestMemoryPool:
    """See the module. Sizes in bytes."""

    __slots__ = (
        "_budget",
        "_condemned",
        "_favoured",
        "_held",
        "_in_vain",
        "_looked",
        "_seen",
        "_spared_s",
        "_total",
        "_waiting",
    )

    def __init__(self, budget_bytes: int) -> None:
        self._budget = budget_bytes
        self._held: dict[Connection, int] = {}
        self._waiting: dict[Connection, int] = {}
        self._total = 0
        self._favoured: Connection | None = None
        self._condemned: set[Connection] = set()  # stalled, and not released yet
        self._in_vain = 0  # so many go together with the next one that is let on and stalls
        self._seen: dict[Connection, tuple[int, float]] = {}  # holder -> (received bytes, since when)
        self._spared_s: dict[Connection, float] = {}  # since a frame of it began
        self._looked: float | None = None  # when, if somebody waited then

    @property
    def held_bytes(self) -> int:
        """What large frames hold now."""
        return self._total

    def holds(self, connection: Connection) -> bool:
        """It has a part of the budget, or waits for one."""
        return connection in self._held or connection in self._waiting

    @property
    def crowded(self) -> bool:
        """Somebody waits for room."""
        return bool(self._waiting)

    def waits(self, connection: Connection) -> bool:
        """There was no room for it yet; do not read from it."""
        return connection in self._waiting

    def take(self, connection: Connection, wanted: int) -> list[Connection]:
        """The connection's buffer is about to hold `wanted`. If there is no room it `waits` in line from now on.

        Returns those that got room by it (it may be the last that keeps the first in line waiting): read from them.
        """
        if wanted <= self._held.get(connection, 0):
            return [] if self._waiting.pop(connection, None) is None else self._serve_the_line()
        if not self._waiting and self._grant(connection, wanted):
            return []
        self._waiting[connection] = wanted
        return [served for served in self._serve_the_line() if served is not connection]

    def give_back(self, connection: Connection, kept: int) -> list[Connection]:
        """The connection holds no more than `kept` now. Those that got room by it: read from them again."""
        held = self._held.get(connection, 0)
        if kept >= held:
            return []
        self._in_vain = 0
        self._spared_s.pop(connection, None)
        self._held[connection] = kept
        self._total -= held - kept
        return self._serve_the_line()

    def release(self, connection: Connection) -> list[Connection]:
        """The connection holds no large frame any more. Those that got room by it: read from them again."""
        self._waiting.pop(connection, None)
        self._seen.pop(connection, None)
        self._spared_s.pop(connection, None)
        if connection is self._favoured:
            self._favoured = None
        if connection in self._condemned:
            self._condemned.remove(connection)
        elif connection in self._held:
            self._in_vain = 0
        self._total -= self._held.pop(connection, 0)
        return self._serve_the_line()

    def stalled(self, now: float) -> list[Connection]:
        """Who holds a part, keeps others waiting, and sends too slowly. Look several times in `STALL_S_MIN` while it is
        `crowded`, and once after that (`now`: seconds that never go back)."""
        seen = self._seen
        if not self._waiting:
            seen.clear()
            self._spared_s.clear()
            self._looked = None
            self._in_vain = 0
            return []
        spared = self._spare(now)
        free = [
            holder
            for holder in self._held
            if holder not in self._waiting and holder not in spared and not holder.writing
        ]
        self._seen = {holder: seen.get(holder, (holder.received_bytes, now)) for holder in free}
        patience_s = max(STALL_S * len(free) / (len(free) + len(self._waiting)), STALL_S_MIN)
        progress_bytes = PROGRESS_BYTES_MIN * patience_s / STALL_S
        found = []
        for holder, (received, since) in self._seen.items():
            if holder.received_bytes - received >= progress_bytes:
                self._seen[holder] = (holder.received_bytes, now)
            elif now - since >= patience_s:
                found.append(holder)
        if found and len(found) == len(free):  # nobody who was let on has gone on
            next_ones = [holder for holder in self._held if holder in self._waiting and not holder.writing]
            found += next_ones[: min(self._in_vain, len(next_ones) // 2)]
            self._in_vain = 2 * self._in_vain or 1
        self._condemned.update(found)
        return found

    def _spare(self, now: float) -> set[Connection]:
        """Who is not judged now because we hold it up ourselves; see the module."""
        passed_s = 0.0 if self._looked is None else now - self._looked
        self._looked = now
        spared: set[Connection] = set()
        room = self._budget // 2
        for holder, held in self._held.items():
            if holder in self._waiting or holder.writing or not holder.is_blocked_by_broker:
                continue
            spared_s = self._spared_s.get(holder)
            spared_s = 0.0 if spared_s is None else spared_s + passed_s
            if spared_s > BLOCKED_BY_BROKER_S or (spared and held > room):
                continue
            self._spared_s[holder] = spared_s
            room -= held
            spared.add(holder)
        return spared

    def _grant(self, connection: Connection, wanted: int) -> bool:
        held = self._held.get(connection, 0)
        if wanted > held:
            if self._total - held + wanted > self._budget:
                return False
            if connection not in self._held and self._total > self._budget // 2:
                return False
            self._held[connection] = wanted
            self._total += wanted - held
        return True

    def _serve_the_line(self) -> list[Connection]:
        served = []
        for connection in self._line():
            if not self._grant(connection, self._waiting[connection]):
                break
            del self._waiting[connection]
            served.append(connection)
        if not served and (first := self._help_the_first()) is not None:
            served.append(first)
        return served

    def _line(self) -> list[Connection]:
        """Who waits, in the order they are served."""
        waiting = self._waiting
        if not waiting:
            return []
        begun = [holder for holder in self._held if holder in waiting]
        return begun + [connection for connection in waiting if connection not in self._held]

    def _help_the_first(self) -> Connection | None:
        """If everybody who holds a part waits, nobody will ever release: give the first in line its room, and again
        whenever it asks until its frame is whole; two of them could exceed the bound."""
        if not self._waiting or any(holder not in self._waiting for holder in self._held):
            return None
        if self._favoured not in self._waiting:
            self._favoured = self._line()[0]
        first = self._favoured
        wanted = self._waiting.pop(first)
        self._total += wanted - self._held.get(first, 0)
        self._held[first] = wanted
        return first
