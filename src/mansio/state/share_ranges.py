"""The offsets of one share partition as ranges: what is equal and lies side by side is one `Span`, however long.

`Ranges` covers the offsets from `start` to before `end` without a hole. Nothing below `start` is of interest any more;
everything from `end` on is AVAILABLE and was never delivered, so a backlog costs nothing.

Always true: spans are ascending and disjoint; two neighbours that are equal in all but their offsets are one, once
`merge_around` was called for what was changed; nothing that could be leased at once lies below `free_from`.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from typing import TYPE_CHECKING, Final

from mansio.state.share_types import ACKNOWLEDGED, ARCHIVED, AVAILABLE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mansio.state.share_types import Ticket

TERMINAL: Final = frozenset({ACKNOWLEDGED, ARCHIVED})
"""What is settled for ever."""

NEVER_MS: Final = math.inf
SETTLED: Final = 0

_SEQUENCE_MASK: Final = 2**31 - 1


def shifted(ticket: Ticket | None, records: int) -> Ticket | None:
    """The ticket of what comes so many records after the first of its range."""
    if ticket is None or ticket.producer_id < 0 or not records:
        return ticket
    return ticket._replace(sequence=(ticket.sequence + records) & _SEQUENCE_MASK)


class Span:
    """Offsets `first` to `last`, both included, and what is known of each of them.

    `deadline_ms`: steady clock, when it changes by itself: a lease or a withholding ends, a parked range is due.
    `due_ms`: wall clock, until when it is parked, -1 if it is not. `unsettled`: the token of the update that makes it
    so and is not stored yet, else `SETTLED`; `holder` then also says whose lease a settled range had.
    """

    __slots__ = (
        "deadline_ms",
        "deliveries",
        "due_ms",
        "first",
        "forgiven",
        "holder",
        "last",
        "state",
        "ticket",
        "unsettled",
    )

    def __init__(
        self,
        first: int,
        last: int,
        state: int = AVAILABLE,
        deliveries: int = 0,
        forgiven: int = 0,
        holder: str = "",
        deadline_ms: float = NEVER_MS,
        due_ms: int = -1,
        ticket: Ticket | None = None,
        unsettled: int = SETTLED,
    ) -> None:
        self.first = first
        self.last = last
        self.state = state
        self.deliveries = deliveries
        self.forgiven = forgiven
        self.holder = holder
        self.deadline_ms = deadline_ms
        self.due_ms = due_ms
        self.ticket = ticket
        self.unsettled = unsettled

    @property
    def size(self) -> int:
        return self.last - self.first + 1

    @property
    def is_free(self) -> bool:
        """May it be leased at once, by whoever the policy allows?"""
        return self.state == AVAILABLE and self.deadline_ms == NEVER_MS and self.unsettled == SETTLED

    def same(self, other: Span) -> bool:
        """Do both say the same of each of their offsets? A reserved ticket is of one range only."""
        return (
            self.state == other.state
            and self.deliveries == other.deliveries
            and self.holder == other.holder
            and self.unsettled == other.unsettled
            and self.deadline_ms == other.deadline_ms
            and self.forgiven == other.forgiven
            and self.due_ms == other.due_ms
            and (self.ticket == other.ticket)
            and (self.ticket is None or self.ticket.producer_id < 0)
        )

    def cut(self, offset: int) -> Span:
        """Keep what is below `offset`; give the rest."""
        rest = Span(
            offset,
            self.last,
            self.state,
            self.deliveries,
            self.forgiven,
            self.holder,
            self.deadline_ms,
            self.due_ms,
            shifted(self.ticket, offset - self.first),
            self.unsettled,
        )
        self.last = offset - 1
        return rest

    def drop_below(self, offset: int) -> None:
        """Forget what is below `offset`, which lies in the span."""
        self.ticket = shifted(self.ticket, offset - self.first)
        self.first = offset


class Ranges:
    """See the module. Spans may be read freely; where they lie is changed only in here."""

    __slots__ = ("_firsts", "_spans", "end", "free_from", "start")

    def __init__(self, start: int) -> None:
        self.start = start
        self.end = start
        self.free_from = start
        self._firsts: list[int] = []
        self._spans: list[Span] = []

    def __iter__(self) -> Iterator[Span]:
        """In order; whoever changes the ranges meanwhile has to stop."""
        return iter(self._spans)

    def __len__(self) -> int:
        return len(self._spans)

    def at(self, offset: int) -> Span | None:
        """The span this offset is in."""
        return self._spans[self._index(offset)] if self.start <= offset < self.end else None

    def within(self, first: int, last: int) -> list[Span]:
        """The spans that have at least one offset of `first` to `last`."""
        if last < self.start or first >= self.end or first > last:
            return []
        low = self._index(first) if first > self.start else 0
        return self._spans[low : bisect_right(self._firsts, last, low)]

    def walk(self, first: int) -> Iterator[Span]:
        """The spans from the one that has `first`, or from the lowest one."""
        spans = self._spans
        position = self._index(first) if self.start <= first < self.end else 0
        if first >= self.end:
            return
        while position < len(spans):
            yield spans[position]
            position += 1

    def free_spans(self) -> Iterator[Span]:
        """What may be leased at once. Remembers where it begins, so the next one need not look below."""
        found = False
        for span in self.walk(self.free_from):
            if span.is_free:
                if not found:
                    found, self.free_from = True, span.first
                yield span
        if not found:
            self.free_from = self.end

    def split(self, first: int, last: int) -> list[Span]:
        """Spans that cover exactly `first` to `last`, made where there are none. `first` is not below `start`."""
        if first < self.start or last < first:
            message = f"offsets {first} to {last} are not in the ranges from {self.start} on"
            raise ValueError(message)
        if last >= self.end:
            self._extend(last + 1)
        low = self._cut(first)
        return self._spans[low : self._cut(last + 1) if last + 1 < self.end else len(self._spans)]

    def merge_around(self, first: int, last: int) -> None:
        """Make one of what is the same, among `first` to `last` and their neighbours."""
        low = max(self._index(first) - 1, 0)
        high = bisect_right(self._firsts, last, low) + 1
        if last < self.start or len(self._spans) < 2:
            return
        merged = [self._spans[low]]
        several = self._spans[low + 1 : high]
        for span in several:
            if merged[-1].same(span):
                merged[-1].last = span.last
            else:
                merged.append(span)
        if len(merged) <= len(several):
            self._spans[low:high] = merged
            self._firsts[low:high] = [span.first for span in merged]

    def advance_start(self) -> int:
        """Move `start` over what is terminal and stored. Says how many offsets that were."""
        before, count = self.start, 0
        for span in self._spans:
            if span.state not in TERMINAL or span.unsettled != SETTLED:
                break
            count += 1
            self.start = span.last + 1
        if count:
            del self._spans[:count], self._firsts[:count]
        return self.start - before

    def drop_below(self, offset: int) -> list[Span]:
        """Begin at `offset`, whatever is below it. Gives what was dropped, which nobody may use again."""
        if offset <= self.start:
            return []
        if offset >= self.end:
            dropped, self._spans, self._firsts = self._spans, [], []
            self.end = offset
        else:
            low = self._cut(offset)
            dropped = self._spans[:low]
            del self._spans[:low], self._firsts[:low]
        self.start = offset
        self.free_from = max(self.free_from, offset)
        return dropped

    def lower_start(self, spans: list[Span]) -> None:
        """Begin with these, which end where the ranges began."""
        self._spans[:0] = spans
        self._firsts[:0] = [span.first for span in spans]
        self.start = spans[0].first
        self.free_from = min(self.free_from, self.start)

    def free(self, offset: int) -> None:
        """What is at this offset may be leased from now on."""
        self.free_from = min(self.free_from, offset)

    def _index(self, offset: int) -> int:
        return bisect_right(self._firsts, offset) - 1

    def _cut(self, offset: int) -> int:
        """Where a span begins at `offset`, after cutting the one that has it in its middle."""
        index = self._index(offset)
        span = self._spans[index]
        if span.first == offset:
            return index
        self._spans.insert(index + 1, span.cut(offset))
        self._firsts.insert(index + 1, offset)
        return index + 1

    def _extend(self, end: int) -> None:
        last = self._spans[-1] if self._spans else None
        if last is not None and last.is_free and not last.deliveries and not last.forgiven:
            last.last = end - 1
        else:
            self._spans.append(Span(self.end, end - 1))
            self._firsts.append(self.end)
        self.free(self.end)
        self.end = end
