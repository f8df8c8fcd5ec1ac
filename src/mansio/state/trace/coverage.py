"""Which times the trace log covers, for each broker process that has written to it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from mansio.wire.internal_records.trace_index_records import CoveredTime

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mansio.wire.internal_records.trace_records import BlockHeader, TraceRow

GAPS_MAX: Final = 100
"""Maximum number of gaps of a process that are kept; later ones extend the last one."""


class TracedRow(NamedTuple):
    """A row, and the process and the leader epoch in which it was made. `leader_epoch`: -1 for a committed position,
    which the coordinator of the group reports."""

    row: TraceRow
    broker_id: int
    incarnation: int
    leader_epoch: int


class Gap(NamedTuple):
    """A time in which rows of a process are missing: `dropped` of them, -1 for an unknown number."""

    begin_ms: int
    end_ms: int
    dropped: int


class Coverage:
    """The blocks of one process: the time that they cover, and the gaps in it."""

    __slots__ = (
        "_next_sequence",
        "begin_ms",
        "broker_id",
        "end_ms",
        "first_sequence",
        "gaps",
        "incarnation",
        "is_live",
    )

    def __init__(self, broker_id: int, incarnation: int) -> None:
        self.broker_id = broker_id
        self.incarnation = incarnation
        self.first_sequence = self._next_sequence = -1
        self.begin_ms = -1
        """Begin of the first block that is known."""
        self.end_ms = -1
        """Time up to which everything is written."""
        self.gaps: list[Gap] = []
        self.is_live = False
        """Whether the process runs, and has written everything up to now."""

    def add(self, header: BlockHeader) -> bool:
        """Add the next block, or one that was written twice. Return whether it is a new one."""
        if header.sequence < self._next_sequence:
            return False
        self._follow(header.sequence, header.begin_ms)
        if header.dropped:
            self.add_gap(Gap(header.begin_ms, header.end_ms, header.dropped))
        self._next_sequence = header.sequence + 1
        self.end_ms = header.end_ms
        return True

    def extend(self, covered: CoveredTime) -> None:
        """Add the next blocks, of which the first ones may be known already."""
        if covered.next_sequence <= self._next_sequence:
            return
        self._follow(covered.first_sequence, covered.begin_ms)
        for gap in covered.gaps:
            self.add_gap(Gap(*gap))
        self._next_sequence = covered.next_sequence
        self.end_ms = covered.end_ms

    def summary(self) -> CoveredTime:
        """Return what `extend` of another object adds."""
        return CoveredTime(
            self.broker_id,
            self.incarnation,
            self.first_sequence,
            self._next_sequence,
            self.begin_ms,
            self.end_ms,
            self.gaps,
        )

    def _follow(self, sequence: int, begin_ms: int) -> None:
        if self._next_sequence < 0:
            self.first_sequence, self.begin_ms = sequence, begin_ms
        elif sequence > self._next_sequence:
            self.add_gap(Gap(self.end_ms, begin_ms, -1))

    def add_gap(self, gap: Gap) -> None:
        """Add a gap; beyond `GAPS_MAX`, extend the last one."""
        if len(self.gaps) < GAPS_MAX:
            self.gaps.append(gap)
            return
        last = self.gaps[-1]
        self.gaps[-1] = Gap(last.begin_ms, gap.end_ms, -1)

    def gaps_between(self, begin_ms: int, end_ms: int) -> Iterator[Gap]:
        """Yield the gaps that touch a time."""
        return (gap for gap in self.gaps if gap.begin_ms <= end_ms and gap.end_ms >= begin_ms)
