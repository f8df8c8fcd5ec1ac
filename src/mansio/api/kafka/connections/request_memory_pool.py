"""Request memory pool: memory of requests while they are received, shared by all connections (Kafka `MemoryPool`).

A connection needs memory for the frame that it is receiving, and for complete frames that wait behind a request in
progress. The first `SMALL_FRAME_BYTES` do not count. Memory above them is acquired from the pool as the bytes arrive,
so that a frame that a peer announces and does not send uses none. When the pool is exhausted, a connection waits, and
is not read, until others have completed their frames.

Connections that have started a frame are served first, oldest first, and new ones are admitted only while half of the
pool is free: otherwise many partial frames could use up the pool, each waiting for the others to complete.

Invariants:
* Connections hold at most the size of the pool plus one frame. The one frame prevents a deadlock: when all holders of a
  partial frame wait for each other, the first in the queue is served.
* A connection that holds memory and sends hardly anything while others wait is stalled. The server closes it, the
  sooner the more connections wait, unless its requests wait for the broker's disk. When one connection after the other
  is served alone and then stalls, the oldest waiting holders are closed with it, twice as many each time, but never
  more than half of them: the newest may be well-behaved. So clients that stall in the middle of large frames are gone
  after a few times `STALL_S`.
* Connections that the broker itself blocks (throttled by a quota, or behind a request in progress) are exempt: the one
  that has held longest, and those after it while all of them hold at most half of the pool; each for at most
  `BLOCKED_BY_BROKER_S` without a new frame. So they can neither fill the pool nor block others forever.
"""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

SMALL_FRAME_BYTES = 64 * 1024
"""Frames up to this size need no memory of the pool."""

STALL_S = 2.0
PROGRESS_BYTES_MIN = 64 * 1024
"""While connections wait for memory, a holder of memory must send at least `PROGRESS_BYTES_MIN` in `STALL_S`; otherwise
its connection is closed. With n holders and m waiting connections, both values are multiplied by n / (n + m), but the
time is at least `STALL_S_MIN`."""

STALL_S_MIN = 0.5
"""Progress may take this long after a lost packet, or when reading from a distant peer resumes."""

BLOCKED_BY_BROKER_S = 30.0
"""Maximum time for which a connection that the broker blocks is not closed as stalled; at least the longest throttle
time."""


class MemoryHolder(Protocol):
    """The attributes of a connection that the pool uses."""

    received_bytes: int

    @property
    def is_waiting_for_disk(self) -> bool: ...

    @property
    def is_blocked_by_broker(self) -> bool: ...


C = TypeVar("C", bound=MemoryHolder)


class RequestMemoryPool(Generic[C]):
    """Limits the memory of the requests that the connections of one server are receiving. All sizes are in bytes."""

    __slots__ = (
        "_checked_at",
        "_deadlock_winner",
        "_exempt_s",
        "_extra_closes",
        "_held",
        "_progress",
        "_reported_stalled",
        "_size",
        "_total",
        "_waiting",
    )

    def __init__(self, size_bytes: int) -> None:
        self._size = size_bytes
        self._held: dict[C, int] = {}
        self._waiting: dict[C, int] = {}
        self._total = 0
        self._deadlock_winner: C | None = None
        self._reported_stalled: set[C] = set()  # reported as stalled, and not released yet
        self._extra_closes = 0  # so many more are closed with the next one that is served and stalls
        self._progress: dict[C, tuple[int, float]] = {}  # holder -> (received bytes, since when)
        self._exempt_s: dict[C, float] = {}  # exempt time since its last frame began
        self._checked_at: float | None = None  # time of the last check while connections waited

    @property
    def held_bytes(self) -> int:
        """Number of bytes that connections hold."""
        return self._total

    def is_holder(self, connection: C) -> bool:
        """Return whether the connection holds memory of the pool or waits for it."""
        return connection in self._held or connection in self._waiting

    @property
    def has_waiters(self) -> bool:
        """Whether any connection waits for memory."""
        return bool(self._waiting)

    def is_waiting(self, connection: C) -> bool:
        """Return whether the connection waits for memory and must not be read."""
        return connection in self._waiting

    def acquire(self, connection: C, wanted_bytes: int) -> list[C]:
        """Acquire memory for a connection whose buffer is going to hold `wanted_bytes` in total. If too little is free,
        the connection waits (`is_waiting`).

        Returns other connections that have received memory because of this call (it may have ended a deadlock); the
        caller must resume reading from them.
        """
        if wanted_bytes <= self._held.get(connection, 0):
            return [] if self._waiting.pop(connection, None) is None else self._serve_queue()
        if not self._waiting and self._grant(connection, wanted_bytes):
            return []
        self._waiting[connection] = wanted_bytes
        return [served for served in self._serve_queue() if served is not connection]

    def shrink(self, connection: C, kept_bytes: int) -> list[C]:
        """Reduce the memory of a connection to `kept_bytes`. Return the connections that received the released memory;
        the caller must resume reading from them."""
        held = self._held.get(connection, 0)
        if kept_bytes >= held:
            return []
        self._extra_closes = 0
        self._exempt_s.pop(connection, None)
        self._held[connection] = kept_bytes
        self._total -= held - kept_bytes
        return self._serve_queue()

    def release(self, connection: C) -> list[C]:
        """Release all memory of a connection. Return the connections that received it; the caller must resume reading
        from them."""
        self._waiting.pop(connection, None)
        self._progress.pop(connection, None)
        self._exempt_s.pop(connection, None)
        if connection is self._deadlock_winner:
            self._deadlock_winner = None
        if connection in self._reported_stalled:
            self._reported_stalled.remove(connection)
        elif connection in self._held:
            self._extra_closes = 0
        self._total -= self._held.pop(connection, 0)
        return self._serve_queue()

    def find_stalled(self, now: float) -> list[C]:
        """Return the connections that hold memory and send too slowly while others wait; the caller must close them. To
        be called several times per `STALL_S_MIN` while `has_waiters`, and once afterwards. `now`: monotonic seconds."""
        progress = self._progress
        if not self._waiting:
            progress.clear()
            self._exempt_s.clear()
            self._checked_at = None
            self._extra_closes = 0
            return []
        exempt = self._find_exempt(now)
        free = [
            holder
            for holder in self._held
            if holder not in self._waiting and holder not in exempt and not holder.is_waiting_for_disk
        ]
        self._progress = {holder: progress.get(holder, (holder.received_bytes, now)) for holder in free}
        limit_s = max(STALL_S * len(free) / (len(free) + len(self._waiting)), STALL_S_MIN)
        progress_bytes = PROGRESS_BYTES_MIN * limit_s / STALL_S
        found = []
        for holder, (received, since) in self._progress.items():
            if holder.received_bytes - received >= progress_bytes:
                self._progress[holder] = (holder.received_bytes, now)
            elif now - since >= limit_s:
                found.append(holder)
        if found and len(found) == len(free):  # none of the connections that were served has continued
            next_ones = [
                holder for holder in self._held if holder in self._waiting and not holder.is_waiting_for_disk
            ]
            found += next_ones[: min(self._extra_closes, len(next_ones) // 2)]
            self._extra_closes = 2 * self._extra_closes or 1
        self._reported_stalled.update(found)
        return found

    def _find_exempt(self, now: float) -> set[C]:
        """Return the holders of memory that do not count as stalled now, because the broker blocks them."""
        passed_s = 0.0 if self._checked_at is None else now - self._checked_at
        self._checked_at = now
        exempt: set[C] = set()
        remaining = self._size // 2
        for holder, held in self._held.items():
            if holder in self._waiting or holder.is_waiting_for_disk or not holder.is_blocked_by_broker:
                continue
            exempt_s = self._exempt_s.get(holder)
            exempt_s = 0.0 if exempt_s is None else exempt_s + passed_s
            if exempt_s > BLOCKED_BY_BROKER_S or (exempt and held > remaining):
                continue
            self._exempt_s[holder] = exempt_s
            remaining -= held
            exempt.add(holder)
        return exempt

    def _grant(self, connection: C, wanted: int) -> bool:
        held = self._held.get(connection, 0)
        if wanted > held:
            if self._total - held + wanted > self._size:
                return False
            if connection not in self._held and self._total > self._size // 2:
                return False
            self._held[connection] = wanted
            self._total += wanted - held
        return True

    def _serve_queue(self) -> list[C]:
        served = []
        for connection in self._waiting_in_order():
            if not self._grant(connection, self._waiting[connection]):
                break
            del self._waiting[connection]
            served.append(connection)
        if not served and (first := self._resolve_deadlock()) is not None:
            served.append(first)
        return served

    def _waiting_in_order(self) -> list[C]:
        """Return the waiting connections in the order in which they are served."""
        waiting = self._waiting
        if not waiting:
            return []
        begun = [holder for holder in self._held if holder in waiting]
        return begun + [connection for connection in waiting if connection not in self._held]

    def _resolve_deadlock(self) -> C | None:
        """Resolve a deadlock. If all holders wait for memory, none of them will release any: serve the first in the
        queue, and again whenever it requests memory, until its frame is complete. Serving two could exceed the
        bound."""
        if not self._waiting or any(holder not in self._waiting for holder in self._held):
            return None
        if self._deadlock_winner not in self._waiting:
            self._deadlock_winner = self._waiting_in_order()[0]
        first = self._deadlock_winner
        wanted = self._waiting.pop(first)
        self._total += wanted - self._held.get(first, 0)
        self._held[first] = wanted
        return first
