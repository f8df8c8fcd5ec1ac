"""The ranges of a share partition with what follows from them: counters, deadlines, and updates under way.

`put` is the one way in which a range changes its state; it keeps the counters right, and marks the range with the
token of the update that says so. `settle` frees the ranges of an update that is stored.

Always true: `leased` and `done` are the numbers of offsets that are ACQUIRED and terminal; every stored range with a
deadline has an entry in the heap that is not later. Entries are one for each range of an update, not one a record, and
at most twice as many as there are ranges.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Final

from mansio.state.share_ranges import NEVER_MS, SETTLED, TERMINAL, Ranges, Span
from mansio.state.share_types import (
    ACKNOWLEDGED,
    ACQUIRED,
    ARCHIVED,
    ARCHIVING,
    AVAILABLE,
    WITHHELD,
    Acquired,
    Change,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mansio.state.share_types import Ticket

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


def changes_of(spans: Iterable[Span]) -> list[Change]:
    """What is to be stored of them, neighbours that are stored alike in one."""
    found: list[Change] = []
    for span in spans:
        state, holder = span.state, span.holder if span.state == ACQUIRED else ""
        change = Change(
            span.first,
            span.last,
            state,
            span.deliveries,
            span.forgiven,
            holder,
            span.due_ms,
            span.ticket,
        )
        if found and found[-1].last + 1 == span.first and _alike(found[-1], change):
            found[-1] = found[-1]._replace(last=span.last)
        else:
            found.append(change)
    return found


def _alike(one: Change, other: Change) -> bool:
    reserved = one.ticket is not None and one.ticket.producer_id >= 0
    return one[2:] == other[2:] and not reserved


def acquired_of(spans: Iterable[Span]) -> list[Acquired]:
    """What a member is told of them, neighbours of the same delivery in one."""
    told: list[Acquired] = []
    for span in spans:
        if told and told[-1].last + 1 == span.first and told[-1].deliveries == span.deliveries:
            told[-1] = told[-1]._replace(last=span.last)
        else:
            told.append(Acquired(span.first, span.last, span.deliveries))
    return told


class Window:
    """See the module."""

    __slots__ = ("_deadlines", "_under_way", "done", "leased", "ranges", "tokens")

    def __init__(self, start: int) -> None:
        self.ranges = Ranges(start)
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
        span: Span,
        state: int,
        token: int,
        *,
        deliveries: int | None = None,
        forgiven: int | None = None,
        holder: str | None = None,
        deadline_ms: float = NEVER_MS,
        due_ms: int = -1,
        ticket: Ticket | None = None,
    ) -> None:
        """Change a whole span, which nothing under way touches. What is None stays as it is; `token` may be `SETTLED`
        for what is never stored."""
        if span.unsettled != SETTLED or state not in TRANSITIONS[span.state]:
            message = f"offsets {span.first} to {span.last} cannot go from {span.state} to {state} now"
            raise AssertionError(message)
        was, span.state = span.state, state
        if was != state:
            self._moved(was, state, span.last - span.first + 1)
        if deliveries is not None:
            span.deliveries = deliveries
        if forgiven is not None:
            span.forgiven = forgiven
        if holder is not None:
            span.holder = holder
        span.deadline_ms = deadline_ms
        span.due_ms = due_ms
        span.ticket = ticket
        span.unsettled = token
        if token == SETTLED:
            self._settled(span)
            return
        covered = self._under_way[token]
        if covered and covered[-1][1] + 1 == span.first:
            covered[-1] = (covered[-1][0], span.last)
        else:
            covered.append((span.first, span.last))

    def _moved(self, was: int, state: int, size: int) -> None:
        if state == ACQUIRED:
            self.leased += size
        elif was == ACQUIRED:
            self.leased -= size
        if state in TERMINAL:
            self.done += size
        elif was in TERMINAL:
            self.done -= size

    def count(self, span: Span) -> None:
        """The span has come."""
        if span.state == ACQUIRED:
            self.leased += span.size
        elif span.state in TERMINAL:
            self.done += span.size

    def discount(self, span: Span) -> None:
        """The span goes."""
        if span.state == ACQUIRED:
            self.leased -= span.size
        elif span.state in TERMINAL:
            self.done -= span.size

    def settle(self, token: int) -> list[Span]:
        """The update is stored. Gives the spans it changed, as they were before neighbours were merged."""
        ranges, spans = self.ranges, []
        covered = self._under_way.pop(token)
        for first, last in covered:
            for span in ranges.within(first, last):
                if span.unsettled == token:
                    span.unsettled = SETTLED
                    self._settled(span)
                    spans.append(span)
        return spans

    def merge(self, spans: Iterable[Span]) -> None:
        """Make one of what has become the same, and move the start over what is done."""
        low = high = -1
        for span in spans:
            if low >= 0 and span.first > high + 1:
                self.ranges.merge_around(low, high)
                low = -1
            low, high = (span.first if low < 0 else low), span.last
        if low >= 0:
            self.ranges.merge_around(low, high)
        self.done -= self.ranges.advance_start()

    def start_with(self, token: int) -> tuple[int, int]:
        """Where the start will be when this update is stored, and how much at or above it will be done."""
        start = self.ranges.start
        for span in self.ranges:
            if span.state not in TERMINAL or span.unsettled not in (SETTLED, token):
                break
            start = span.last + 1
        return start, self.done - (start - self.ranges.start)

    def unpark(self, span: Span) -> None:
        """It has rested long enough; nothing of that is stored."""
        span.deadline_ms, span.due_ms = NEVER_MS, -1
        self.ranges.free(span.first)

    def _settled(self, span: Span) -> None:
        if span.state != ACQUIRED:
            span.holder = ""
        if span.deadline_ms != NEVER_MS:
            self.watch(span.deadline_ms, span.first, span.last)
        elif span.state == AVAILABLE:
            self.ranges.free(span.first)

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

    def due(self, now_ms: float) -> list[Span]:
        """The stored spans whose deadline has come, ascending; each is given once, so all of them have to change."""
        heap = self._deadlines
        passed: list[tuple[int, int]] = []
        while heap and heap[0][0] <= now_ms:
            passed.append(heappop(heap)[1:])
        found: dict[int, Span] = {}
        for first, last in passed:
            for span in self.ranges.within(first, last):
                if span.deadline_ms <= now_ms and span.unsettled == SETTLED:
                    found[span.first] = span
        return [found[first] for first in sorted(found)]

    def _rebuild(self) -> None:
        entries: list[tuple[float, int, int]] = []
        for span in self.ranges:
            if span.unsettled != SETTLED or span.deadline_ms == NEVER_MS:
                continue
            if entries and entries[-1][0] == span.deadline_ms:
                entries[-1] = (span.deadline_ms, entries[-1][1], span.last)
            else:
                entries.append((span.deadline_ms, span.first, span.last))
        heapify(entries)
        self._deadlines = entries
