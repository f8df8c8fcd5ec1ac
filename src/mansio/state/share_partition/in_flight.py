"""In-flight batches of a share partition (Kafka's cachedState): counters, deadlines, pending updates.

An `InFlightBatch` is a range of offsets with equal delivery state, however long. `BatchMap` covers the offsets from
`start` to below `end` without gaps. Offsets below `start` are done; offsets from `end` on are AVAILABLE and were never
delivered, so a backlog takes no memory. `InFlightBatches` adds the counters and deadlines. Only its method
`change_state` changes the state of a batch; it maintains the counters and marks the batch with the token of the update
that stores the change. `complete` clears the marks of an update that is stored.

Invariants:
* Batches are ascending and disjoint. After `merge_around`, adjacent batches with equal state are one batch.
* All batches that can be leased at once lie at or above `free_from`.
* `leased_count` and `done_count` are the numbers of offsets that are ACQUIRED and terminal, `range_count` is the number
  of those in range leases.
* Every stored batch with a deadline has an entry in the heap of deadlines that is not later. The heap has one entry per
  range of an update, not per record, and at most about twice as many entries as there are batches.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Final

from mansio.state.share_partition.key_index import DONE, FREE, LEASED, RESTING
from mansio.state.share_partition.types import (
    ACKNOWLEDGED,
    ACQUIRED,
    ARCHIVED,
    ARCHIVING,
    AVAILABLE,
    REQUESTED_DELAY_MS_MAX,
    WITHHELD,
    AcquiredRange,
    StateBatch,
)
from mansio.wire.field_values import SEQUENCE_MAX

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from mansio.state.share_partition.key_index import KeyIndex
    from mansio.state.share_partition.types import DeadLetterReservation

DELIVERIES_MAX: Final = 32_767
"""Largest delivery count that can be stored; a record that reaches it is not delivered again."""

TRANSITIONS: Final[dict[int, frozenset[int]]] = {
    # archived: below the log start offset; acknowledged: an offset of another share partition
    AVAILABLE: frozenset({ACQUIRED, ARCHIVED, ACKNOWLEDGED}),
    ACQUIRED: frozenset({ACQUIRED, ACKNOWLEDGED, AVAILABLE, ARCHIVING, ARCHIVED}),  # acquired: renewed
    ACKNOWLEDGED: frozenset(),
    ARCHIVING: frozenset({ARCHIVING, ARCHIVED}),  # archiving: a dead-letter position was reserved
    ARCHIVED: frozenset({AVAILABLE}),  # available: a redrive
    WITHHELD: frozenset({AVAILABLE, ACKNOWLEDGED, ARCHIVING, ARCHIVED}),
}
"""The states that may follow each state."""

TERMINAL: Final = frozenset({ACKNOWLEDGED, ARCHIVED})
"""States of records that are done."""

NEVER_MS: Final = math.inf
"""Deadline of a batch without a deadline."""
NOT_PENDING: Final = 0
"""Update token of a batch whose state is stored."""

_HEAP_SPARE: Final = 64


class InFlightBatch:
    """Delivery state of the offsets `first` to `last`, both included.

    `deadline_ms`: time of the steady clock at which a lease, withholding period or backoff ends. `due_ms`: wall-clock
    time at which a backoff ends, -1 for none. `lease_ms`: duration of the lease if its member has chosen it, -1 for the
    group's. `pending_token`: token of the update that stores the current state, `NOT_PENDING` once it is stored.
    `holder`: member that has leased the batch or, until the update is stored, that has acknowledged it. `is_range`: the
    batch is ACQUIRED by a range lease.
    """

    __slots__ = (
        "deadline_ms",
        "deliveries",
        "due_ms",
        "first",
        "holder",
        "is_range",
        "last",
        "lease_ms",
        "pending_token",
        "reservation",
        "state",
        "uncounted_deliveries",
    )

    def __init__(
        self,
        first: int,
        last: int,
        state: int = AVAILABLE,
        deliveries: int = 0,
        uncounted_deliveries: int = 0,
        holder: str = "",
        deadline_ms: float = NEVER_MS,
        due_ms: int = -1,
        reservation: DeadLetterReservation | None = None,
        pending_token: int = NOT_PENDING,
        lease_ms: int = -1,
        is_range: bool = False,
    ) -> None:
        self.first = first
        self.last = last
        self.state = state
        self.deliveries = deliveries
        self.uncounted_deliveries = uncounted_deliveries
        self.holder = holder
        self.deadline_ms = deadline_ms
        self.due_ms = due_ms
        self.reservation = reservation
        self.pending_token = pending_token
        self.lease_ms = lease_ms
        self.is_range = is_range

    @property
    def size(self) -> int:
        """Number of offsets."""
        return self.last - self.first + 1

    @property
    def is_free(self) -> bool:
        """Whether the batch can be leased at once: it is AVAILABLE, stored and not in a backoff."""
        return self.state == AVAILABLE and self.deadline_ms == NEVER_MS and self.pending_token == NOT_PENDING

    @property
    def key_state(self) -> int:
        """State of the records for order and limits by key (`key_index`).

        A record with a pending update counts as leased: its lease may end with that update. So does one that was
        withheld when its state was stored: no attempt of it is counted, and it is not offered yet."""
        if self.pending_token != NOT_PENDING or self.state in (ACQUIRED, WITHHELD):
            return LEASED
        if self.state == AVAILABLE:
            if self.deadline_ms == NEVER_MS:
                return FREE
            return LEASED if self.deliveries == self.uncounted_deliveries else RESTING
        return RESTING if self.state == ARCHIVING else DONE

    def has_same_state(self, other: InFlightBatch) -> bool:
        """Whether the batches have equal state and can be merged. Batches with a reserved sequence are never equal."""
        return (
            self.state == other.state
            and self.deliveries == other.deliveries
            and self.holder == other.holder
            and self.pending_token == other.pending_token
            and self.deadline_ms == other.deadline_ms
            and self.lease_ms == other.lease_ms
            and self.is_range == other.is_range
            and self.uncounted_deliveries == other.uncounted_deliveries
            and self.due_ms == other.due_ms
            and (self.reservation == other.reservation)
            and (self.reservation is None or self.reservation.producer_id < 0)
        )

    def restore(self, stored: StateBatch, *, lock_ms: int, now_ms: float, wall_ms: int) -> None:
        """Set the state to a stored one. A lease runs for its whole duration (`lock_ms`, unless the member has chosen
        another) again."""
        self.state = stored.state
        self.deliveries = stored.deliveries
        self.uncounted_deliveries = stored.uncounted_deliveries
        self.reservation = stored.reservation
        if stored.state == ACQUIRED:
            self.holder, self.lease_ms, self.is_range = stored.holder, stored.lease_ms, stored.is_range
            self.deadline_ms = now_ms + self.duration_ms(lock_ms)
        elif stored.state == AVAILABLE and stored.due_ms > wall_ms:
            delay_ms = min(stored.due_ms - wall_ms, REQUESTED_DELAY_MS_MAX)
            self.due_ms, self.deadline_ms = wall_ms + delay_ms, now_ms + delay_ms

    def duration_ms(self, lock_ms: int) -> int:
        """Return the duration of the lease, given that of leases whose members have chosen none."""
        return lock_ms if self.lease_ms < 0 else self.lease_ms

    def split_off(self, offset: int) -> InFlightBatch:
        """Truncate this batch to the offsets below `offset`; returns a new batch with the rest."""
        upper = InFlightBatch(
            offset,
            self.last,
            self.state,
            self.deliveries,
            self.uncounted_deliveries,
            self.holder,
            self.deadline_ms,
            self.due_ms,
            shift_reservation(self.reservation, offset - self.first),
            self.pending_token,
            self.lease_ms,
            self.is_range,
        )
        self.last = offset - 1
        return upper

    def drop_below(self, offset: int) -> None:
        """Remove the offsets below `offset`, which must lie in the batch."""
        self.reservation = shift_reservation(self.reservation, offset - self.first)
        self.first = offset


class BatchMap:
    """In-flight batches in offset order. Only the methods of this class change the offsets of the batches.

    `start` and `end`: bounds of the covered offsets. `free_from`: no batch below this offset can be leased at once.
    """

    __slots__ = ("_batches", "_firsts", "end", "free_from", "start")

    def __init__(self, start: int) -> None:
        self.start = start
        self.end = start
        self.free_from = start
        self._firsts: list[int] = []
        self._batches: list[InFlightBatch] = []

    def __iter__(self) -> Iterator[InFlightBatch]:
        """Iterate over the batches in ascending order; the iterator is invalid after a change of the map."""
        return iter(self._batches)

    def __len__(self) -> int:
        return len(self._batches)

    def overlapping(self, first: int, last: int) -> list[InFlightBatch]:
        """Return the batches that overlap the offsets `first` to `last`."""
        if last < self.start or first >= self.end or first > last:
            return []
        low = self._index(first) if first > self.start else 0
        return self._batches[low : bisect_right(self._firsts, last, low)]

    def batches_from(self, first: int) -> Iterator[InFlightBatch]:
        """Yield the batch that contains `first` and all later ones; all batches if `first` is below `start`."""
        batches = self._batches
        position = self._index(first) if self.start <= first < self.end else 0
        if first >= self.end:
            return
        while position < len(batches):
            yield batches[position]
            position += 1

    def free_batches(self) -> Iterator[InFlightBatch]:
        """Yield the batches that can be leased at once, and advance `free_from` to the first of them."""
        found = False
        for batch in self.batches_from(self.free_from):
            if batch.is_free:
                if not found:
                    found, self.free_from = True, batch.first
                yield batch
        if not found:
            self.free_from = self.end

    def first_free(self) -> tuple[int, int] | None:
        """Return the first offsets (first, last) that can be leased at once, and advance `free_from` to them; None if
        those are the offsets from `end` on. As the first result of `free_batches`, in one call."""
        if self.free_from < self.end:
            batches = self._batches
            for position in range(max(self._index(self.free_from), 0), len(batches)):
                batch = batches[position]
                if (
                    batch.state == AVAILABLE
                    and batch.deadline_ms == NEVER_MS
                    and batch.pending_token == NOT_PENDING
                ):
                    self.free_from = batch.first
                    return batch.first, batch.last
            self.free_from = self.end
        return None

    def append(self, batch: InFlightBatch) -> None:
        """Add a batch that begins at `end`."""
        if batch.first != self.end:
            message = f"a batch from {batch.first} on does not follow those below {self.end}"
            raise ValueError(message)
        self._batches.append(batch)
        self._firsts.append(batch.first)
        self.end = batch.last + 1

    def split(self, first: int, last: int) -> list[InFlightBatch]:
        """Split batches so that some cover exactly the offsets `first` to `last`, and return those. Offsets from `end`
        on get a new AVAILABLE batch. Raises `ValueError` if `first` is below `start`."""
        if first < self.start or last < first:
            message = f"offsets {first} to {last} are not in the ranges from {self.start} on"
            raise ValueError(message)
        if last >= self.end:
            self._extend(last + 1)
        low = self._split_at(first)
        return self._batches[low : self._split_at(last + 1) if last + 1 < self.end else len(self._batches)]

    def merge_around(self, first: int, last: int) -> None:
        """Merge adjacent batches with equal state, among those that overlap `first` to `last` and their neighbours."""
        low = max(self._index(first) - 1, 0)
        high = bisect_right(self._firsts, last, low) + 1
        if last < self.start or len(self._batches) < 2:
            return
        merged = [self._batches[low]]
        following = self._batches[low + 1 : high]
        for batch in following:
            if merged[-1].has_same_state(batch):
                merged[-1].last = batch.last
            else:
                merged.append(batch)
        if len(merged) <= len(following):
            self._batches[low:high] = merged
            self._firsts[low:high] = [batch.first for batch in merged]

    def advance_start(self) -> int:
        """Advance `start` over batches whose terminal state is stored; returns the number of offsets passed."""
        before, count = self.start, 0
        for batch in self._batches:
            if batch.state not in TERMINAL or batch.pending_token != NOT_PENDING:
                break
            count += 1
            self.start = batch.last + 1
        if count:
            del self._batches[:count], self._firsts[:count]
        return self.start - before

    def drop_below(self, offset: int) -> list[InFlightBatch]:
        """Advance `start` to `offset` and return the removed batches."""
        if offset <= self.start:
            return []
        if offset >= self.end:
            dropped, self._batches, self._firsts = self._batches, [], []
            self.end = offset
        else:
            low = self._split_at(offset)
            dropped = self._batches[:low]
            del self._batches[:low], self._firsts[:low]
        self.start = offset
        self.free_from = max(self.free_from, offset)
        return dropped

    def lower_start(self, batches: list[InFlightBatch]) -> None:
        """Prepend batches that end directly below the current `start`."""
        self._batches[:0] = batches
        self._firsts[:0] = [batch.first for batch in batches]
        self.start = batches[0].first
        self.free_from = min(self.free_from, self.start)

    def mark_free(self, offset: int) -> None:
        """Lower `free_from`, because the batch at this offset can be leased again."""
        self.free_from = min(self.free_from, offset)

    def _index(self, offset: int) -> int:
        return bisect_right(self._firsts, offset) - 1

    def _split_at(self, offset: int) -> int:
        """Index of the batch that starts at `offset`, after splitting the batch that contains it."""
        index = self._index(offset)
        batch = self._batches[index]
        if batch.first == offset:
            return index
        self._batches.insert(index + 1, batch.split_off(offset))
        self._firsts.insert(index + 1, offset)
        return index + 1

    def _extend(self, end: int) -> None:
        """Add AVAILABLE offsets up to the new end."""
        last = self._batches[-1] if self._batches else None
        if last is not None and last.is_free and not last.deliveries and not last.uncounted_deliveries:
            last.last = end - 1
        else:
            self._batches.append(InFlightBatch(self.end, end - 1))
            self._firsts.append(self.end)
        self.mark_free(self.end)
        self.end = end


class InFlightBatches:
    """In-flight batches of one share partition with counters, deadlines and updates that are not stored yet.

    `leased_count`, `range_count`, `done_count`: number of offsets that are ACQUIRED, ACQUIRED by range leases, and in a
    terminal state. `last_token`: token of the last update. `key_index`: is told about each change; None without order
    and limits by key.
    """

    __slots__ = (
        "_deadlines",
        "_pending_ranges",
        "done_count",
        "key_index",
        "last_token",
        "leased_count",
        "range_count",
        "ranges",
    )

    def __init__(self, start: int) -> None:
        self.ranges = BatchMap(start)
        self.leased_count = 0
        self.range_count = 0
        self.done_count = 0
        self.last_token = 0
        self.key_index: KeyIndex | None = None
        self._deadlines: list[tuple[float, int, int]] = []
        self._pending_ranges: dict[int, list[tuple[int, int]]] = {}

    @property
    def pending_update_count(self) -> int:
        """Number of updates that are not stored yet."""
        return len(self._pending_ranges)

    def begin_update(self) -> int:
        """Start a new update; returns its token."""
        self.last_token += 1
        self._pending_ranges[self.last_token] = []
        return self.last_token

    def change_state(
        self,
        batch: InFlightBatch,
        state: int,
        token: int,
        *,
        deliveries: int | None = None,
        uncounted_deliveries: int | None = None,
        holder: str | None = None,
        deadline_ms: float = NEVER_MS,
        due_ms: int = -1,
        lease_ms: int = -1,
        is_range: bool = False,
        reservation: DeadLetterReservation | None = None,
    ) -> None:
        """Change the state of a batch that no pending update concerns. Arguments that are None leave the value
        unchanged; `token` is `NOT_PENDING` for a change that needs no update.

        Raises `AssertionError` if an update is pending or the transition is not in `TRANSITIONS`.
        """
        if batch.pending_token != NOT_PENDING or state not in TRANSITIONS[batch.state]:
            message = f"offsets {batch.first} to {batch.last} cannot go from {batch.state} to {state} now"
            raise AssertionError(message)
        was, batch.state = batch.state, state
        if was != state:
            self._count_transition(was, state, batch.last - batch.first + 1)
        if is_range is not batch.is_range:
            self.range_count += batch.size if is_range else -batch.size
            batch.is_range = is_range
        if deliveries is not None:
            batch.deliveries = deliveries
        if uncounted_deliveries is not None:
            batch.uncounted_deliveries = uncounted_deliveries
        if holder is not None:
            batch.holder = holder
        batch.deadline_ms = deadline_ms
        batch.due_ms = due_ms
        batch.lease_ms = lease_ms
        batch.reservation = reservation
        batch.pending_token = token
        if token == NOT_PENDING:
            self._mark_stored(batch)
            return
        if self.key_index is not None:
            _report_change(self.key_index, batch)
        covered = self._pending_ranges[token]
        if covered and covered[-1][1] + 1 == batch.first:
            covered[-1] = (covered[-1][0], batch.last)
        else:
            covered.append((batch.first, batch.last))

    def are_leased(self, member: str, first: int, last: int) -> bool:
        """Whether all these offsets are leased to the member by other leases than range leases, and no update of them
        is pending."""
        ranges = self.ranges
        if not ranges.start <= first <= last < ranges.end:
            return False
        for batch in ranges.overlapping(first, last):
            if (
                batch.state != ACQUIRED
                or batch.holder != member
                or batch.pending_token != NOT_PENDING
                or batch.is_range
            ):
                return False
        return True

    def lease_new(
        self, first: int, last: int, token: int, member: str, deadline_ms: float, lease_ms: int
    ) -> InFlightBatch:
        """Lease offsets that were never delivered and begin at the end of the batches. Returns the new batch."""
        batch = InFlightBatch(
            first,
            last,
            ACQUIRED,
            1,
            holder=member,
            deadline_ms=deadline_ms,
            pending_token=token,
            lease_ms=lease_ms,
        )
        self.ranges.append(batch)
        self.leased_count += last - first + 1
        self._pending_ranges[token].append((first, last))
        return batch

    def _count_transition(self, was: int, state: int, size: int) -> None:
        if state == ACQUIRED:
            self.leased_count += size
        elif was == ACQUIRED:
            self.leased_count -= size
        if state in TERMINAL:
            self.done_count += size
        elif was in TERMINAL:
            self.done_count -= size

    def add_to_counters(self, batch: InFlightBatch) -> None:
        """Add a batch to the counters."""
        if batch.state == ACQUIRED:
            self.leased_count += batch.size
            self.range_count += batch.size if batch.is_range else 0
        elif batch.state in TERMINAL:
            self.done_count += batch.size

    def remove_from_counters(self, batch: InFlightBatch) -> None:
        """Remove a batch from the counters."""
        if batch.state == ACQUIRED:
            self.leased_count -= batch.size
            self.range_count -= batch.size if batch.is_range else 0
        elif batch.state in TERMINAL:
            self.done_count -= batch.size

    def complete_update(self, token: int) -> list[InFlightBatch]:
        """Mark the batches of an update as stored. Returns them; adjacent batches with equal state are not merged."""
        ranges, batches = self.ranges, []
        covered = self._pending_ranges.pop(token)
        for first, last in covered:
            for batch in ranges.overlapping(first, last):
                if batch.pending_token == token:
                    batch.pending_token = NOT_PENDING
                    self._mark_stored(batch)
                    batches.append(batch)
        return batches

    def merge(self, batches: Iterable[InFlightBatch]) -> None:
        """Merge these batches with adjacent ones of equal state, and advance the start over batches that are done."""
        low = high = -1
        for batch in batches:
            if low >= 0 and batch.first > high + 1:
                self.ranges.merge_around(low, high)
                low = -1
            low, high = (batch.first if low < 0 else low), batch.last
        if low >= 0:
            self.ranges.merge_around(low, high)
        self.done_count -= self.ranges.advance_start()

    def progress_after(self, token: int) -> tuple[int, int]:
        """Return the start offset after this update is stored, and the number of offsets at or above it that will be
        done."""
        start = self.ranges.start
        for batch in self.ranges:
            if batch.state not in TERMINAL or batch.pending_token not in (NOT_PENDING, token):
                break
            start = batch.last + 1
        return start, self.done_count - (start - self.ranges.start)

    def end_delay(self, batch: InFlightBatch) -> None:
        """End the backoff of a batch, so that it can be leased at once. This needs no update."""
        batch.deadline_ms, batch.due_ms = NEVER_MS, -1
        self.ranges.mark_free(batch.first)
        if self.key_index is not None:
            _report_change(self.key_index, batch)

    def _mark_stored(self, batch: InFlightBatch) -> None:
        if batch.state != ACQUIRED:
            batch.holder = ""
        if batch.deadline_ms != NEVER_MS:
            self.add_deadline(batch.deadline_ms, batch.first, batch.last)
        elif batch.state == AVAILABLE:
            self.ranges.mark_free(batch.first)
        if self.key_index is not None:
            _report_change(self.key_index, batch)

    def restore_counts(self) -> None:
        """Compute the counters and deadlines of batches that were loaded, and merge adjacent ones with equal state."""
        ranges = self.ranges
        for batch in ranges:
            self.add_to_counters(batch)
            if batch.deadline_ms != NEVER_MS:
                self.add_deadline(batch.deadline_ms, batch.first, batch.last)
        ranges.merge_around(ranges.start, ranges.end - 1)
        self.done_count -= ranges.advance_start()

    def lower_start(self, batches: list[InFlightBatch]) -> None:
        """Prepend batches that end directly below the current start, and add them to the counters."""
        start = self.ranges.start
        self.ranges.lower_start(batches)
        for batch in batches:
            self.add_to_counters(batch)
        self.ranges.merge_around(start - 1, start)

    # ------------------------------------------------------------------ start of the log

    def drop_below_log_start(self, log_start: int, count: Callable[[int, int], int]) -> int:
        """Remove the offsets below the log start offset, up to the first ARCHIVING batch. `count` returns the number of
        records of the share partition between two offsets.

        Returns how many of the removed records were not done.
        """
        ranges = self.ranges
        waiting = next((batch.first for batch in ranges if batch.state == ARCHIVING), log_start)
        below = min(waiting, log_start)
        aged_out = 0 if below <= ranges.end else count(max(ranges.start, ranges.end), below - 1)
        if self.key_index is not None:
            self.key_index.drop_below(below, log_start)
        for batch in ranges.drop_below(below):
            self.remove_from_counters(batch)
            aged_out += 0 if batch.state in TERMINAL else count(batch.first, batch.last)
        self.done_count -= ranges.advance_start()
        if ranges.start < log_start > ranges.end:
            ranges.split(
                ranges.end, log_start - 1
            )  # offsets that were never delivered and cannot be delivered now
        return aged_out

    def batches_below_log_start(self, log_start: int) -> list[InFlightBatch]:
        """Return the stored batches below the log start offset that are AVAILABLE, ACQUIRED or WITHHELD."""
        ranges = self.ranges
        if ranges.start >= log_start:
            return []
        return [
            batch
            for batch in ranges.overlapping(ranges.start, log_start - 1)
            if batch.pending_token == NOT_PENDING and batch.state in (AVAILABLE, ACQUIRED, WITHHELD)
        ]

    def archive_below_log_start(self, log_start: int, token: int) -> list[InFlightBatch]:
        """Archive the batches of `batches_below_log_start`, because their records are deleted from the log. Returns the
        changed batches."""
        changed = []
        for found in self.batches_below_log_start(log_start):
            for batch in self.ranges.split(found.first, min(found.last, log_start - 1)):
                self.change_state(batch, ARCHIVED, token)
                changed.append(batch)
        return changed

    # ------------------------------------------------------------------ deadlines

    def add_deadline(self, deadline_ms: float, first: int, last: int) -> None:
        """Add a deadline for the stored batches within the offsets `first` to `last`."""
        heap = self._deadlines
        if heap and heap[-1][0] == deadline_ms and heap[-1][2] + 1 == first:
            heap[-1] = (deadline_ms, heap[-1][1], last)
            return
        heappush(heap, (deadline_ms, first, last))
        if len(heap) > 2 * len(self.ranges) + _HEAP_SPARE:
            self._rebuild_deadlines()

    @property
    def next_deadline_ms(self) -> float:
        """Time of the steady clock at which the next batch may be due, in ms; `NEVER_MS` if there is none."""
        return self._deadlines[0][0] if self._deadlines else NEVER_MS

    def take_due_batches(self, now_ms: float) -> list[InFlightBatch]:
        """Return the stored batches whose deadline has passed, ascending, and remove their deadlines. The caller has to
        change the state of each, because none is returned again."""
        heap = self._deadlines
        passed: list[tuple[int, int]] = []
        while heap and heap[0][0] <= now_ms:
            passed.append(heappop(heap)[1:])
        found: dict[int, InFlightBatch] = {}
        for first, last in passed:
            for batch in self.ranges.overlapping(first, last):
                if batch.deadline_ms <= now_ms and batch.pending_token == NOT_PENDING:
                    found[batch.first] = batch
        return [found[first] for first in sorted(found)]

    def _rebuild_deadlines(self) -> None:
        entries: list[tuple[float, int, int]] = []
        for batch in self.ranges:
            if batch.pending_token != NOT_PENDING or batch.deadline_ms == NEVER_MS:
                continue
            if entries and entries[-1][0] == batch.deadline_ms:
                entries[-1] = (batch.deadline_ms, entries[-1][1], batch.last)
            else:
                entries.append((batch.deadline_ms, batch.first, batch.last))
        heapify(entries)
        self._deadlines = entries


def _report_change(key_index: KeyIndex, batch: InFlightBatch) -> None:
    key_index.on_changed(batch.first, batch.last, batch.key_state)


def state_batches(batches: Iterable[InFlightBatch]) -> list[StateBatch]:
    """Convert in-flight batches into the ranges that are stored. Adjacent ranges with equal state are merged."""
    found: list[StateBatch] = []
    for batch in batches:
        state, holder = batch.state, batch.holder if batch.state == ACQUIRED else ""
        change = StateBatch(
            batch.first,
            batch.last,
            state,
            batch.deliveries,
            batch.uncounted_deliveries,
            holder,
            batch.due_ms,
            batch.lease_ms,
            batch.is_range,
            batch.reservation,
        )
        if found and found[-1].last + 1 == batch.first and _is_mergeable(found[-1], change):
            found[-1] = found[-1]._replace(last=batch.last)
        else:
            found.append(change)
    return found


def _is_mergeable(one: StateBatch, other: StateBatch) -> bool:
    is_reserved = one.reservation is not None and one.reservation.producer_id >= 0
    return one[2:] == other[2:] and not is_reserved


def acquired_ranges(batches: Iterable[InFlightBatch]) -> list[AcquiredRange]:
    """Convert in-flight batches into the ranges that a member receives. Batches in another state are left out."""
    return delivered_ranges(batch for batch in batches if batch.state == ACQUIRED)


def delivered_ranges(batches: Iterable[InFlightBatch]) -> list[AcquiredRange]:
    """Convert in-flight batches into ranges with their delivery counts. Adjacent ones with equal counts are merged."""
    found: list[AcquiredRange] = []
    for batch in batches:
        if found and found[-1].last + 1 == batch.first and found[-1].deliveries == batch.deliveries:
            found[-1] = found[-1]._replace(last=batch.last)
        else:
            found.append(AcquiredRange(batch.first, batch.last, batch.deliveries))
    return found


def shift_reservation(
    reservation: DeadLetterReservation | None, records: int
) -> DeadLetterReservation | None:
    """Return the reservation of the record that is `records` records after the first one of the range."""
    if reservation is None or reservation.producer_id < 0 or not records:
        return reservation
    return reservation._replace(sequence=(reservation.sequence + records) & SEQUENCE_MAX)
