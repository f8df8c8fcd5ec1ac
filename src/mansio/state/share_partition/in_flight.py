"""The ranges of a share partition with what follows from them: counters, deadlines, and updates under way.

`put` is the one way in which a range changes its state; it keeps the counters right, and marks the range with the
token of the update that says so. `acknowledge` frees the ranges of an update that is stored.

Always true: `leased` and `done` are the numbers of offsets that are ACQUIRED and terminal; every stored range with a
deadline has an entry in the heap that is not later. Entries are one for each range of an update, not one a record, and
at most twice as many as there are ranges.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Final

from mansio.state.share_partition.batch_map import NEVER_MS, NOT_PENDING, TERMINAL, BatchMap, InFlightBatch
from mansio.state.share_partition.types import (
    ACKNOWLEDGED,
    ACQUIRED,
    ARCHIVED,
    ARCHIVING,
    AVAILABLE,
    WITHHELD,
    AcquiredRange,
    StateBatch,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mansio.state.share_partition.types import DeadLetterReservation

DELIVERIES_MAX: Final = 32_767
"""What a stored count can say; a record that was delivered so often is given up."""

TRANSITIONS: Final[dict[int, frozenset[int]]] = {
    AVAILABLE: frozenset({ACQUIRED, ARCHIVED}),  # archived: the log begins above it now
    ACQUIRED: frozenset({ACQUIRED, ACKNOWLEDGED, AVAILABLE, ARCHIVING, ARCHIVED}),  # acquired: renewed
    ACKNOWLEDGED: frozenset(),
    ARCHIVING: frozenset({ARCHIVING, ARCHIVED}),  # archiving: a place in the dead-letter topic was reserved
    ARCHIVED: frozenset({AVAILABLE}),  # offered again by an operator
    WITHHELD: frozenset({AVAILABLE, ACKNOWLEDGED, ARCHIVING, ARCHIVED}),
}
"""From a state to those that may follow it."""

_HEAP_SPARE: Final = 64


def changes_of(in_flight_batches: Iterable[InFlightBatch]) -> list[StateBatch]:
    """What is to be stored of them, neighbours that are stored alike in one."""
    found: list[StateBatch] = []
    for batch in in_flight_batches:
        state, holder = batch.state, batch.holder if batch.state == ACQUIRED else ""
        change = StateBatch(
            batch.first,
            batch.last,
            state,
            batch.deliveries,
            batch.uncounted_deliveries,
            holder,
            batch.due_ms,
            batch.reservation,
        )
        if found and found[-1].last + 1 == batch.first and _alike(found[-1], change):
            found[-1] = found[-1]._replace(last=batch.last)
        else:
            found.append(change)
    return found


def _alike(one: StateBatch, other: StateBatch) -> bool:
    reserved = one.reservation is not None and one.reservation.producer_id >= 0
    return one[2:] == other[2:] and not reserved


def acquired_of(in_flight_batches: Iterable[InFlightBatch]) -> list[AcquiredRange]:
    """What a member is told of them, neighbours of the same delivery in one."""
    told: list[AcquiredRange] = []
    for batch in in_flight_batches:
        if told and told[-1].last + 1 == batch.first and told[-1].deliveries == batch.deliveries:
            told[-1] = told[-1]._replace(last=batch.last)
        else:
            told.append(AcquiredRange(batch.first, batch.last, batch.deliveries))
    return told


class InFlightBatches:
    """See the module."""

    __slots__ = ("_deadlines", "_under_way", "done", "leased", "ranges", "tokens")

    def __init__(self, start: int) -> None:
        self.ranges = BatchMap(start)
        self.leased = 0
        self.done = 0
        self.tokens = 0
        self._deadlines: list[tuple[float, int, int]] = []
        self._under_way: dict[int, list[tuple[int, int]]] = {}

    @property
    def under_way(self) -> int:
        """How many updates are not stored yet."""
        return len(self._under_way)

    def begin(self) -> int:
        """A token for an update."""
        self.tokens += 1
        self._under_way[self.tokens] = []
        return self.tokens

    def put(
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
        reservation: DeadLetterReservation | None = None,
    ) -> None:
        """Change a whole span, which nothing under way touches. What is None stays as it is; `token` may be
        `NOT_PENDING` for what is never stored."""
        if batch.pending_token != NOT_PENDING or state not in TRANSITIONS[batch.state]:
            message = f"offsets {batch.first} to {batch.last} cannot go from {batch.state} to {state} now"
            raise AssertionError(message)
        was, batch.state = batch.state, state
        if was != state:
            self._moved(was, state, batch.last - batch.first + 1)
        if deliveries is not None:
            batch.deliveries = deliveries
        if uncounted_deliveries is not None:
            batch.uncounted_deliveries = uncounted_deliveries
        if holder is not None:
            batch.holder = holder
        batch.deadline_ms = deadline_ms
        batch.due_ms = due_ms
        batch.reservation = reservation
        batch.pending_token = token
        if token == NOT_PENDING:
            self._settled(batch)
            return
        covered = self._under_way[token]
        if covered and covered[-1][1] + 1 == batch.first:
            covered[-1] = (covered[-1][0], batch.last)
        else:
            covered.append((batch.first, batch.last))

    def _moved(self, was: int, state: int, size: int) -> None:
        if state == ACQUIRED:
            self.leased += size
        elif was == ACQUIRED:
            self.leased -= size
        if state in TERMINAL:
            self.done += size
        elif was in TERMINAL:
            self.done -= size

    def count(self, batch: InFlightBatch) -> None:
        """The span has come."""
        if batch.state == ACQUIRED:
            self.leased += batch.size
        elif batch.state in TERMINAL:
            self.done += batch.size

    def discount(self, batch: InFlightBatch) -> None:
        """The span goes."""
        if batch.state == ACQUIRED:
            self.leased -= batch.size
        elif batch.state in TERMINAL:
            self.done -= batch.size

    def acknowledge(self, token: int) -> list[InFlightBatch]:
        """The update is stored. Gives the spans it changed, as they were before neighbours were merged."""
        ranges, in_flight_batches = self.ranges, []
        covered = self._under_way.pop(token)
        for first, last in covered:
            for batch in ranges.within(first, last):
                if batch.pending_token == token:
                    batch.pending_token = NOT_PENDING
                    self._settled(batch)
                    in_flight_batches.append(batch)
        return in_flight_batches

    def merge(self, in_flight_batches: Iterable[InFlightBatch]) -> None:
        """Make one of what has become the same, and move the start over what is done."""
        low = high = -1
        for batch in in_flight_batches:
            if low >= 0 and batch.first > high + 1:
                self.ranges.merge_around(low, high)
                low = -1
            low, high = (batch.first if low < 0 else low), batch.last
        if low >= 0:
            self.ranges.merge_around(low, high)
        self.done -= self.ranges.advance_start()

    def start_with(self, token: int) -> tuple[int, int]:
        """Where the start will be when this update is stored, and how much at or above it will be done."""
        start = self.ranges.start
        for batch in self.ranges:
            if batch.state not in TERMINAL or batch.pending_token not in (NOT_PENDING, token):
                break
            start = batch.last + 1
        return start, self.done - (start - self.ranges.start)

    def unpark(self, batch: InFlightBatch) -> None:
        """It has rested long enough; nothing of that is stored."""
        batch.deadline_ms, batch.due_ms = NEVER_MS, -1
        self.ranges.free(batch.first)

    def _settled(self, batch: InFlightBatch) -> None:
        if batch.state != ACQUIRED:
            batch.holder = ""
        if batch.deadline_ms != NEVER_MS:
            self.watch(batch.deadline_ms, batch.first, batch.last)
        elif batch.state == AVAILABLE:
            self.ranges.free(batch.first)

    # Deadlines

    def watch(self, deadline_ms: float, first: int, last: int) -> None:
        """Some stored span in there has this deadline."""
        heap = self._deadlines
        if heap and heap[-1][0] == deadline_ms and heap[-1][2] + 1 == first:
            heap[-1] = (deadline_ms, heap[-1][1], last)
            return
        heappush(heap, (deadline_ms, first, last))
        if len(heap) > 2 * len(self.ranges) + _HEAP_SPARE:
            self._rebuild()

    @property
    def next_deadline_ms(self) -> float:
        return self._deadlines[0][0] if self._deadlines else NEVER_MS

    def due(self, now_ms: float) -> list[InFlightBatch]:
        """The stored spans whose deadline has come, ascending; each is given once, so all of them have to change."""
        heap = self._deadlines
        passed: list[tuple[int, int]] = []
        while heap and heap[0][0] <= now_ms:
            passed.append(heappop(heap)[1:])
        found: dict[int, InFlightBatch] = {}
        for first, last in passed:
            for batch in self.ranges.within(first, last):
                if batch.deadline_ms <= now_ms and batch.pending_token == NOT_PENDING:
                    found[batch.first] = batch
        return [found[first] for first in sorted(found)]

    def _rebuild(self) -> None:
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
