"""The offsets of one share partition as ranges: what is equal and lies side by side is one `InFlightBatch`,
however long.

`BatchMap` covers the offsets from `start` to before `end` without a hole. Nothing below `start` is of interest any
more; everything from `end` on is AVAILABLE and was never delivered, so a backlog costs nothing.

Always true: spans are ascending and disjoint; two neighbours that are equal in all but their offsets are one, once
`merge_around` was called for what was changed; nothing that could be leased at once lies below `free_from`.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from typing import TYPE_CHECKING, Final

from mansio.state.share_partition.types import ACKNOWLEDGED, ARCHIVED, AVAILABLE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mansio.state.share_partition.types import DeadLetterReservation

TERMINAL: Final = frozenset({ACKNOWLEDGED, ARCHIVED})
"""What is settled for ever."""

NEVER_MS: Final = math.inf
NOT_PENDING: Final = 0

_SEQUENCE_MASK: Final = 2**31 - 1


def shifted(reservation: DeadLetterReservation | None, records: int) -> DeadLetterReservation | None:
    """The ticket of what comes so many records after the first of its range."""
    if reservation is None or reservation.producer_id < 0 or not records:
        return reservation
    return reservation._replace(sequence=(reservation.sequence + records) & _SEQUENCE_MASK)


class InFlightBatch:
    """Offsets `first` to `last`, both included, and what is known of each of them.

    `deadline_ms`: steady clock, when it changes by itself: a lease or a withholding ends, a parked range is due.
    `due_ms`: wall clock, until when it is parked, -1 if it is not. `pending_token`: the token of the update that
    makes it so and is not stored yet, else `NOT_PENDING`; `holder` then also says whose lease a settled range had.
    """

    __slots__ = (
        "deadline_ms",
        "deliveries",
        "due_ms",
        "first",
        "holder",
        "last",
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

    @property
    def size(self) -> int:
        return self.last - self.first + 1

    @property
    def is_free(self) -> bool:
        """May it be leased at once, by whoever the policy allows?"""
        return self.state == AVAILABLE and self.deadline_ms == NEVER_MS and self.pending_token == NOT_PENDING

    def same(self, other: InFlightBatch) -> bool:
        """Do both say the same of each of their offsets? A reserved ticket is of one range only."""
        return (
            self.state == other.state
            and self.deliveries == other.deliveries
            and self.holder == other.holder
            and self.pending_token == other.pending_token
            and self.deadline_ms == other.deadline_ms
            and self.uncounted_deliveries == other.uncounted_deliveries
            and self.due_ms == other.due_ms
            and (self.reservation == other.reservation)
            and (self.reservation is None or self.reservation.producer_id < 0)
        )

    def truncated(self, offset: int) -> InFlightBatch:
        """Keep what is below `offset`; give the rest."""
        rest = InFlightBatch(
            offset,
            self.last,
            self.state,
            self.deliveries,
            self.uncounted_deliveries,
            self.holder,
            self.deadline_ms,
            self.due_ms,
            shifted(self.reservation, offset - self.first),
            self.pending_token,
        )
        self.last = offset - 1
        return rest

    def drop_below(self, offset: int) -> None:
        """Forget what is below `offset`, which lies in the span."""
        self.reservation = shifted(self.reservation, offset - self.first)
        self.first = offset


class BatchMap:
    """See the module. Spans may be read freely; where they lie is changed only in here."""

    __slots__ = ("_firsts", "_spans", "end", "free_from", "start")

    def __init__(self, start: int) -> None:
        self.start = start
        self.end = start
        self.free_from = start
        self._firsts: list[int] = []
        self._spans: list[InFlightBatch] = []

    def __iter__(self) -> Iterator[InFlightBatch]:
        """In order; whoever changes the ranges meanwhile has to stop."""
        return iter(self._spans)

    def __len__(self) -> int:
        return len(self._spans)

    def at(self, offset: int) -> InFlightBatch | None:
        """The span this offset is in."""
        return self._spans[self._index(offset)] if self.start <= offset < self.end else None

    def within(self, first: int, last: int) -> list[InFlightBatch]:
        """The spans that have at least one offset of `first` to `last`."""
        if last < self.start or first >= self.end or first > last:
            return []
        low = self._index(first) if first > self.start else 0
        return self._spans[low : bisect_right(self._firsts, last, low)]

    def walk(self, first: int) -> Iterator[InFlightBatch]:
        """The spans from the one that has `first`, or from the lowest one."""
        in_flight_batches = self._spans
        position = self._index(first) if self.start <= first < self.end else 0
        if first >= self.end:
            return
        while position < len(in_flight_batches):
            yield in_flight_batches[position]
            position += 1

    def free_spans(self) -> Iterator[InFlightBatch]:
        """What may be leased at once. Remembers where it begins, so the next one need not look below."""
        found = False
        for batch in self.walk(self.free_from):
            if batch.is_free:
                if not found:
                    found, self.free_from = True, batch.first
                yield batch
        if not found:
            self.free_from = self.end

    def split(self, first: int, last: int) -> list[InFlightBatch]:
        """Spans that cover exactly `first` to `last`, made where there are none. `first` is not below `start`."""
        if first < self.start or last < first:
            message = f"offsets {first} to {last} are not in the ranges from {self.start} on"
            raise ValueError(message)
        if last >= self.end:
            self._extend(last + 1)
        low = self._truncated(first)
        return self._spans[low : self._truncated(last + 1) if last + 1 < self.end else len(self._spans)]

    def merge_around(self, first: int, last: int) -> None:
        """Make one of what is the same, among `first` to `last` and their neighbours."""
        low = max(self._index(first) - 1, 0)
        high = bisect_right(self._firsts, last, low) + 1
        if last < self.start or len(self._spans) < 2:
            return
        merged = [self._spans[low]]
        several = self._spans[low + 1 : high]
        for batch in several:
            if merged[-1].same(batch):
                merged[-1].last = batch.last
            else:
                merged.append(batch)
        if len(merged) <= len(several):
            self._spans[low:high] = merged
            self._firsts[low:high] = [batch.first for batch in merged]

    def advance_start(self) -> int:
        """Move `start` over what is terminal and stored. Says how many offsets that were."""
        before, count = self.start, 0
        for batch in self._spans:
            if batch.state not in TERMINAL or batch.pending_token != NOT_PENDING:
                break
            count += 1
            self.start = batch.last + 1
        if count:
            del self._spans[:count], self._firsts[:count]
        return self.start - before

    def drop_below(self, offset: int) -> list[InFlightBatch]:
        """Begin at `offset`, whatever is below it. Gives what was dropped, which nobody may use again."""
        if offset <= self.start:
            return []
        if offset >= self.end:
            dropped, self._spans, self._firsts = self._spans, [], []
            self.end = offset
        else:
            low = self._truncated(offset)
            dropped = self._spans[:low]
            del self._spans[:low], self._firsts[:low]
        self.start = offset
        self.free_from = max(self.free_from, offset)
        return dropped

    def lower_start(self, in_flight_batches: list[InFlightBatch]) -> None:
        """Begin with these, which end where the ranges began."""
        self._spans[:0] = in_flight_batches
        self._firsts[:0] = [batch.first for batch in in_flight_batches]
        self.start = in_flight_batches[0].first
        self.free_from = min(self.free_from, self.start)

    def free(self, offset: int) -> None:
        """What is at this offset may be leased from now on."""
        self.free_from = min(self.free_from, offset)

    def _index(self, offset: int) -> int:
        return bisect_right(self._firsts, offset) - 1

    def _truncated(self, offset: int) -> int:
        """Where a span begins at `offset`, after cutting the one that has it in its middle."""
        index = self._index(offset)
        batch = self._spans[index]
        if batch.first == offset:
            return index
        self._spans.insert(index + 1, batch.truncated(offset))
        self._firsts.insert(index + 1, offset)
        return index + 1

    def _extend(self, end: int) -> None:
        last = self._spans[-1] if self._spans else None
        if last is not None and last.is_free and not last.deliveries and not last.uncounted_deliveries:
            last.last = end - 1
        else:
            self._spans.append(InFlightBatch(self.end, end - 1))
            self._firsts.append(self.end)
        self.free(self.end)
        self.end = end
