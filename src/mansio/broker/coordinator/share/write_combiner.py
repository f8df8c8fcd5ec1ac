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

from mansio.state.share_partition.types import Update

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mansio.errors import MansioError
    from mansio.ports import Scheduler
    from mansio.state.share_partition.types import DeadRange, StateBatch

    OnStored = Callable[[MansioError | None], None]

COMBINED_RANGES_MAX: Final = 2_000
"""Maximum number of offset ranges in a combined write."""


class CombinedWrite:
    """Updates stored as one write, and the functions to call with its outcome."""

    __slots__ = ("callbacks", "durable", "is_snapshot", "range_count", "updates")

    def __init__(self, updates: Sequence[Update], on_stored: OnStored) -> None:
        self.updates = list(updates)
        self.callbacks = [on_stored]
        self.is_snapshot = self.durable = False
        self.range_count = 0
        for each in updates:
            self.is_snapshot |= each.is_snapshot
            self.durable |= each.durable
            self.range_count += len(each.changes)

    def take_callbacks(self) -> list[OnStored]:
        """Return the functions to call, the first time only."""
        callbacks, self.callbacks = self.callbacks, []
        return callbacks


class WriteCombiner:
    """Order of the writes of one share partition."""

    __slots__ = (
        "_arrived_counts",
        "_begin",
        "_durable_in_flight",
        "_in_flight_count",
        "_is_combining",
        "_is_iteration_end_scheduled",
        "_is_starting",
        "_joinable_writes",
        "_queue",
        "_scheduler",
        "_snapshot_in_flight",
    )

    def __init__(self, scheduler: Scheduler, begin: Callable[[CombinedWrite], None]) -> None:
        """`begin`: begins a write. It calls `finish` once when the write has ended, possibly before it returns."""
        self._scheduler = scheduler
        self._begin = begin
        self._queue: deque[CombinedWrite] = deque()
        self._in_flight_count = 0
        self._snapshot_in_flight = False  # a write of a whole state is in flight
        self._durable_in_flight = False  # a durable write is in flight
        self._is_iteration_end_scheduled = False
        self._is_starting = False  # queued writes are being started
        # Values for non-durable and for durable updates:
        self._arrived_counts = [0, 0]  # updates in this iteration of the event loop
        self._is_combining = [False, False]  # several updates arrived in the last iteration
        self._joinable_writes: list[CombinedWrite | None] = [None, None]

    def __bool__(self) -> bool:
        """Whether a write is in flight or waiting."""
        return bool(self._in_flight_count or self._queue or any(self._joinable_writes))

    def add(self, updates: Sequence[Update], on_stored: OnStored) -> None:
        """Store updates, together with others if they have to wait. `on_stored` is called once with None, or with the
        error of the write, possibly before this returns."""
        write = CombinedWrite(updates, on_stored)
        durable = write.durable
        if write.is_snapshot:
            self._close_joinable_writes()
            self._start_or_queue(write)
            return
        self._arrived_counts[durable] += 1
        found = self._joinable_writes[durable]
        if found is None and durable and self._queue:
            found = self._queue[-1]
        if (
            found is not None
            and not found.is_snapshot
            and found.durable == durable
            and found.range_count + write.range_count <= COMBINED_RANGES_MAX
        ):
            found.updates += updates
            found.range_count += write.range_count
            found.callbacks.append(on_stored)
            return
        if not self._is_iteration_end_scheduled:
            self._is_iteration_end_scheduled = True
            self._scheduler.call_soon(self._on_iteration_end)
        if self._joinable_writes[durable] is not None:  # it is full
            self._close_joinable_writes()
        if self._is_combining[durable]:
            self._joinable_writes[durable] = write
        else:
            self._start_or_queue(write)

    def finish(self, write: CombinedWrite) -> list[OnStored]:
        """Remove a write that was stored or has failed, and start the next ones. Returns the functions to call with the
        outcome."""
        callbacks = write.take_callbacks()
        self._in_flight_count -= 1
        if write.is_snapshot:
            self._snapshot_in_flight = False
        elif write.durable:
            self._durable_in_flight = False
        if self._queue:
            self._start_queued_writes()
        return callbacks

    def end(self) -> None:
        """Begin all waiting writes after the share partition's leader has ended, so that they fail with its error."""
        self._close_joinable_writes()
        queue, self._queue = self._queue, deque()
        for write in queue:
            self._in_flight_count += 1
            self._begin(write)

    def _on_iteration_end(self) -> None:
        self._is_iteration_end_scheduled = False
        if any(self._joinable_writes):
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
        if not self._queue and self._may_start(write):
            self._start(write)
            return
        self._queue.append(write)
        if not write.durable:
            self._start_queued_writes()

    def _start_queued_writes(self) -> None:
        """Start all queued writes that may start. A write may end before `_start` returns: those that may start then
        are started by the same loop, because a call for each would nest as deep as the queue is long."""
        if self._is_starting:
            return
        self._is_starting = True
        try:
            while (write := self._next_write()) is not None:
                self._queue.remove(write)
                self._start(write)
        finally:
            self._is_starting = False

    def _next_write(self) -> CombinedWrite | None:
        """Return the first queued write that may start; a non-durable one may pass durable ones, but not a whole
        state."""
        for write in self._queue:
            if self._may_start(write):
                return write
            if write.is_snapshot:
                return None
        return None

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
        self._begin(write)


def combine_updates(updates: Sequence[Update]) -> Update:
    """Return one update with the changes of pending updates of different offsets, none of which is a whole state."""
    if len(updates) == 1:
        return updates[0]
    changes: list[StateBatch] = []
    durable = False
    furthest = last = updates[-1]
    lease_bound = last.lease_bound
    dead = redrives = producer = isolations = None
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
        if each.isolations is not None:
            isolations = each.isolations
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
        isolations=isolations,
    )


_get_first: Final = attrgetter("first")
