"""Order in which the updates of one share partition are written, and which of them are combined into one write.

If many members of a group fetch or acknowledge at the same time, their updates cost one record, not one each. A durable
update waits while another durable one is in flight, and all that wait are stored as one write after it: the disk or the
replicas would have delayed them anyway. After several updates of a kind arrived in one iteration of the event loop, the
next iterations are awaited to their ends, until one of them brings a single update again.

Updates may be combined, and an update that is not durable may be written before a durable one, because pending updates
concern different offsets: the result is the same in any order.

Invariants:
* A whole state is written alone, after all earlier and before all later updates.
* At most one durable write is in flight. Writes of a kind keep their order.
* A write has at most `COMBINED_RANGES_MAX` ranges, or is a single update.
* No update waits longer than for the iteration of the loop, or for the writes in flight.
"""

from __future__ import annotations

from collections import deque
from operator import attrgetter
from typing import TYPE_CHECKING, Final

from mansio.state.share_partition.types import Update

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mansio.ports import Promise, Scheduler
    from mansio.state.share_partition.types import DeadRange, StateBatch

COMBINED_RANGES_MAX: Final = 2_000


class CombinedWrite:
    """Updates stored as one write. The caller of the first one writes them; `complete` notifies `followers`."""

    __slots__ = ("durable", "followers", "is_snapshot", "promise", "ranges", "updates", "waits")

    def __init__(self, updates: Sequence[Update]) -> None:
        self.updates = list(updates)
        self.is_snapshot = self.durable = False
        self.ranges = 0
        for each in updates:
            self.is_snapshot |= each.is_snapshot
            self.durable |= each.durable
            self.ranges += len(each.changes)
        self.promise: Promise[None] | None = None
        """Resolved when the write may start; None if it may start at once."""
        self.waits = False
        self.followers: list[Promise[bool]] = []

    def complete(self, *, stored: bool) -> None:
        """The write succeeded or failed; it is not repeated."""
        followers, self.followers = self.followers, []
        for promise in followers:
            if not promise.done():  # otherwise its waiter was cancelled
                promise.set_result(stored)

    def start(self) -> None:
        """The write may start."""
        self.waits = False
        if self.promise is not None and not self.promise.done():
            self.promise.set_result(None)


class WriteCombiner:
    """Writes of one share partition. Pairs hold values for updates that are not durable and that are durable."""

    __slots__ = (
        "_arrived",
        "_combines",
        "_durable_in_flight",
        "_gathering",
        "_in_flight",
        "_is_end_due",
        "_queue",
        "_scheduler",
        "_snapshot_in_flight",
        "_snapshots",
    )

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._queue: deque[CombinedWrite] = deque()
        self._snapshots = 0  # in the queue
        self._in_flight = 0
        self._snapshot_in_flight = False  # a write of a whole state is in flight
        self._durable_in_flight = False  # a durable write is in flight
        self._is_end_due = False  # `_iteration_ends` is due
        self._arrived = [0, 0]  # in this iteration of the loop
        self._combines = [False, False]  # several arrived in one iteration
        self._gathering: list[CombinedWrite | None] = [None, None]

    def __bool__(self) -> bool:
        """Whether a write is in flight or waiting."""
        return bool(self._in_flight or self._queue or any(self._gathering))

    def join(self, updates: Sequence[Update]) -> Promise[bool] | None:
        """Add updates to a waiting write; the promise resolves to whether it was stored. None if there is no suitable
        write."""
        durable, ranges = False, 0
        for each in updates:
            if each.is_snapshot:
                return None
            durable |= each.durable
            ranges += len(each.changes)
        found = self._gathering[durable]
        if found is None and durable and self._queue:
            found = self._queue[-1]
        if (
            found is None
            or found.is_snapshot
            or found.durable != durable
            or found.ranges + ranges > COMBINED_RANGES_MAX
        ):
            return None
        self._arrived[durable] += 1
        found.updates += updates
        found.ranges += ranges
        promise: Promise[bool] = self._scheduler.promise()
        found.followers.append(promise)
        return promise

    def enqueue(self, updates: Sequence[Update]) -> CombinedWrite:
        """A new write with these updates: to be started when its promise resolves, and passed to `finish` in any
        case."""
        write = CombinedWrite(updates)
        durable = write.durable
        if write.is_snapshot:
            self._stop_gathering()
        else:
            self._arrived[durable] += 1
            if not self._is_end_due:
                self._is_end_due = True
                self._scheduler.call_soon(self._iteration_ends)
        if self._gathering[durable] is not None:  # it is full
            self._stop_gathering()
        if write.is_snapshot or not self._combines[durable]:
            self._start_or_queue(write)
        else:
            write.promise = self._scheduler.promise()
            write.waits = True
            self._gathering[durable] = write
        return write

    def finish(self, write: CombinedWrite, *, stored: bool) -> None:
        """The write succeeded, failed, or was cancelled before it started."""
        if write.waits:
            write.waits = False
            if write in self._queue:
                self._queue.remove(write)
                self._snapshots -= write.is_snapshot
            else:
                self._gathering[write.durable] = None
            write.complete(stored=False)
            return
        self._in_flight -= 1
        if write.is_snapshot:
            self._snapshot_in_flight = False
        elif write.durable:
            self._durable_in_flight = False
        write.complete(stored=stored)
        self._next()

    def end(self) -> None:
        """Start all waiting writes: they fail, because nothing is written any more."""
        self._stop_gathering()
        queue, self._queue, self._snapshots = self._queue, deque(), 0
        for write in queue:
            self._in_flight += 1
            write.start()

    def _iteration_ends(self) -> None:
        self._is_end_due = False
        self._stop_gathering()
        for durable in (False, True):
            self._combines[durable] = self._arrived[durable] > 1
            self._arrived[durable] = 0

    def _stop_gathering(self) -> None:
        for durable in (False, True):
            write, self._gathering[durable] = self._gathering[durable], None
            if write is not None:
                self._start_or_queue(write)

    def _start_or_queue(self, write: CombinedWrite) -> None:
        """Start the write now, or queue it."""
        if self._snapshots or (self._queue and write.durable) or not self._may_go(write):
            write.promise = write.promise or self._scheduler.promise()
            write.waits = True
            self._queue.append(write)
            self._snapshots += write.is_snapshot
        else:
            self._go(write)

    def _next(self) -> None:
        """Start all writes that may start; one that is not durable passes durable ones, but no whole state."""
        while self._queue and self._may_go(self._queue[0]):
            write = self._queue.popleft()
            self._snapshots -= write.is_snapshot
            self._go(write)
        if not self._queue or self._queue[0].is_snapshot or self._snapshot_in_flight:
            return
        for write in list(self._queue):
            if write.is_snapshot:
                return
            if not write.durable:
                self._queue.remove(write)
                self._go(write)

    def _may_go(self, write: CombinedWrite) -> bool:
        if self._snapshot_in_flight or (write.is_snapshot and self._in_flight):
            return False
        return write.is_snapshot or not write.durable or not self._durable_in_flight

    def _go(self, write: CombinedWrite) -> None:
        self._in_flight += 1
        if write.is_snapshot:
            self._snapshot_in_flight = True
        elif write.durable:
            self._durable_in_flight = True
        write.start()


def combine_updates(updates: Sequence[Update]) -> Update:
    """Combine pending updates, none of which is a whole state; they concern different offsets."""
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
    changes.sort(key=_first_of)
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


_first_of: Final = attrgetter("first")
