"""Order in which the updates of one share partition are written, and which of them are combined into one write.

If many members of a group fetch or acknowledge at the same time, their updates are stored as one record. A durable
update waits while another durable write is in flight; all updates that wait are then stored as one write. After several
durable (or several non-durable) updates arrived in one iteration of the event loop, those that arrive in one of the
next iterations are collected until the iteration ends and stored as one write, until an iteration has only one update.

Updates may be combined, and a non-durable update may be written before a durable one, because pending updates concern
different offsets: the result is the same in any order.

Invariants:
* A whole state is written alone, after all earlier and before all later updates.
* At most one durable write is in flight. Durable writes keep their order, and so do non-durable ones.
* A write has at most `COMBINED_RANGES_MAX` offset ranges, or is a single update.
* An update waits for the end of the iteration of the event loop and for the writes in flight, no longer.
"""

from __future__ import annotations

from collections import deque
from operator import attrgetter
from typing import TYPE_CHECKING, Final

from mansio.ports import complete
from mansio.state.share_partition.types import Update

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mansio.ports import Promise, Scheduler
    from mansio.state.share_partition.types import DeadRange, StateBatch

COMBINED_RANGES_MAX: Final = 2_000
"""Maximum number of offset ranges in a combined write."""


class CombinedWrite:
    """Updates stored as one write.

    The caller that enqueued the first update writes all of them; `joined_promises` tell the other callers the result.
    """

    __slots__ = (
        "durable",
        "is_snapshot",
        "is_waiting",
        "joined_promises",
        "promise",
        "range_count",
        "updates",
    )

    def __init__(self, updates: Sequence[Update]) -> None:
        self.updates = list(updates)
        self.is_snapshot = self.durable = False
        self.range_count = 0
        for each in updates:
            self.is_snapshot |= each.is_snapshot
            self.durable |= each.durable
            self.range_count += len(each.changes)
        self.promise: Promise[None] | None = None
        """Resolved when the write may start; None if it may start at once."""
        self.is_waiting = False
        self.joined_promises: list[Promise[bool]] = []

    def complete(self, *, stored: bool) -> None:
        """Resolve the promises of the other callers to `stored`: whether the write succeeded."""
        joined_promises, self.joined_promises = self.joined_promises, []
        for promise in joined_promises:
            complete(promise, stored)

    def start(self) -> None:
        """Resolve `promise`, so that the caller starts the write."""
        self.is_waiting = False
        if self.promise is not None and not self.promise.done():
            self.promise.set_result(None)


class WriteCombiner:
    """Order of the writes of one share partition."""

    __slots__ = (
        "_arrived_counts",
        "_durable_in_flight",
        "_in_flight_count",
        "_is_combining",
        "_is_iteration_end_scheduled",
        "_joinable_writes",
        "_queue",
        "_queued_snapshot_count",
        "_scheduler",
        "_snapshot_in_flight",
    )

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._queue: deque[CombinedWrite] = deque()
        self._queued_snapshot_count = 0
        self._in_flight_count = 0
        self._snapshot_in_flight = False  # a write of a whole state is in flight
        self._durable_in_flight = False  # a durable write is in flight
        self._is_iteration_end_scheduled = False
        # Values for non-durable and for durable updates:
        self._arrived_counts = [0, 0]  # updates in this iteration of the event loop
        self._is_combining = [False, False]  # several updates arrived in the last iteration
        self._joinable_writes: list[CombinedWrite | None] = [None, None]

    def __bool__(self) -> bool:
        """Whether a write is in flight or waiting."""
        return bool(self._in_flight_count or self._queue or any(self._joinable_writes))

    def join(self, updates: Sequence[Update]) -> Promise[bool] | None:
        """Add updates to a waiting write; return a promise of whether the write succeeded.

        Returns None if no write is waiting to which the updates can be added."""
        durable, range_count = False, 0
        for each in updates:
            if each.is_snapshot:
                return None
            durable |= each.durable
            range_count += len(each.changes)
        found = self._joinable_writes[durable]
        if found is None and durable and self._queue:
            found = self._queue[-1]
        if (
            found is None
            or found.is_snapshot
            or found.durable != durable
            or found.range_count + range_count > COMBINED_RANGES_MAX
        ):
            return None
        self._arrived_counts[durable] += 1
        found.updates += updates
        found.range_count += range_count
        promise: Promise[bool] = self._scheduler.promise()
        found.joined_promises.append(promise)
        return promise

    def enqueue(self, updates: Sequence[Update]) -> CombinedWrite:
        """Return a new write with these updates.

        The caller starts the write when its promise, if any, resolves, and passes it to `finish` in any case."""
        write = CombinedWrite(updates)
        durable = write.durable
        if write.is_snapshot:
            self._close_joinable_writes()
        else:
            self._arrived_counts[durable] += 1
            if not self._is_iteration_end_scheduled:
                self._is_iteration_end_scheduled = True
                self._scheduler.call_soon(self._on_iteration_end)
        if self._joinable_writes[durable] is not None:  # it is full
            self._close_joinable_writes()
        if write.is_snapshot or not self._is_combining[durable]:
            self._start_or_queue(write)
        else:
            write.promise = self._scheduler.promise()
            write.is_waiting = True
            self._joinable_writes[durable] = write
        return write

    def finish(self, write: CombinedWrite, *, stored: bool) -> None:
        """Remove a write that was stored, failed, or was cancelled before it started; start the next ones."""
        if write.is_waiting:
            write.is_waiting = False
            if write in self._queue:
                self._queue.remove(write)
                self._queued_snapshot_count -= write.is_snapshot
            else:
                self._joinable_writes[write.durable] = None
            write.complete(stored=False)
            return
        self._in_flight_count -= 1
        if write.is_snapshot:
            self._snapshot_in_flight = False
        elif write.durable:
            self._durable_in_flight = False
        write.complete(stored=stored)
        self._start_queued_writes()

    def end(self) -> None:
        """Start all waiting writes after the share partition's leader has ended; their callers raise its error."""
        self._close_joinable_writes()
        queue, self._queue, self._queued_snapshot_count = self._queue, deque(), 0
        for write in queue:
            self._in_flight_count += 1
            write.start()

    def _on_iteration_end(self) -> None:
        self._is_iteration_end_scheduled = False
        self._close_joinable_writes()
        for durable in (False, True):
            self._is_combining[durable] = self._arrived_counts[durable] > 1
            self._arrived_counts[durable] = 0

    def _close_joinable_writes(self) -> None:
        for durable in (False, True):
            write, self._joinable_writes[durable] = self._joinable_writes[durable], None
            if write is not None:
                self._start_or_queue(write)

    def _start_or_queue(self, write: CombinedWrite) -> None:
        """Start a write if the writes before it permit that, otherwise queue it."""
        if self._queued_snapshot_count or (self._queue and write.durable) or not self._may_start(write):
            write.promise = write.promise or self._scheduler.promise()
            write.is_waiting = True
            self._queue.append(write)
            self._queued_snapshot_count += write.is_snapshot
        else:
            self._start(write)

    def _start_queued_writes(self) -> None:
        """Start all queued writes that may start; a non-durable one may pass durable ones, but not a whole state."""
        while self._queue and self._may_start(self._queue[0]):
            write = self._queue.popleft()
            self._queued_snapshot_count -= write.is_snapshot
            self._start(write)
        if not self._queue or self._queue[0].is_snapshot or self._snapshot_in_flight:
            return
        for write in list(self._queue):
            if write.is_snapshot:
                return
            if not write.durable:
                self._queue.remove(write)
                self._start(write)

    def _may_start(self, write: CombinedWrite) -> bool:
        if self._snapshot_in_flight or (write.is_snapshot and self._in_flight_count):
            return False
        return write.is_snapshot or not write.durable or not self._durable_in_flight

    def _start(self, write: CombinedWrite) -> None:
        self._in_flight_count += 1
        if write.is_snapshot:
            self._snapshot_in_flight = True
        elif write.durable:
            self._durable_in_flight = True
        write.start()


def combine_updates(updates: Sequence[Update]) -> Update:
    """Return one update with the changes of pending updates of different offsets, none of which is a whole state."""
    if len(updates) == 1:
        return updates[0]
    changes: list[StateBatch] = []
    durable = False
    furthest = last = updates[-1]
    lease_bound = last.lease_bound
    dead = redrives = producer = None
    added_dead_ranges: tuple[DeadRange, ...] = ()  # since the last update with all dead ranges
    for each in updates:
        changes += each.changes
        durable |= each.durable
        if (each.start_offset, each.token) > (furthest.start_offset, furthest.token):
            furthest = each
        lease_bound = max(lease_bound, each.lease_bound)
        if each.dead_ranges is not None:
            dead, added_dead_ranges = each.dead_ranges, ()
        added_dead_ranges += each.added_dead_ranges
        if each.redrives is not None:
            redrives = each.redrives
        if each.producer is not None:
            producer = each.producer
    changes.sort(key=_get_first)
    return Update(
        last.token,
        durable,
        furthest.start_offset,
        lease_bound,
        furthest.done_count,
        tuple(changes),
        dead_ranges=dead,
        redrives=redrives,
        producer=producer,
        added_dead_ranges=added_dead_ranges,
    )


_get_first: Final = attrgetter("first")
