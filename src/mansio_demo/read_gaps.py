"""Gaps in the reading of partitions: computation and text chart. Pure.

Invariants:
* Times are seconds on one monotonic clock; a record counts with its first delivery.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

NO_READER: Final = "."
COLUMNS: Final = 60


class Read(NamedTuple):
    """Delivery of a record. `worker` is one letter."""

    at: float
    partition: int
    offset: int
    worker: str


class Gap(NamedTuple):
    """No record of a partition was delivered from `begin` to `end`."""

    partition: int
    begin: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.begin


def first_reads(reads: Iterable[Read]) -> list[Read]:
    """Return the first delivery of each record, sorted by time."""
    seen: set[tuple[int, int]] = set()
    found = []
    for read in sorted(reads):
        if (read.partition, read.offset) not in seen:
            seen.add((read.partition, read.offset))
            found.append(read)
    return found


def gaps(reads: Sequence[Read], begin: float, end: float) -> list[Gap]:
    """Gaps that ended in (`begin`, `end`], of the result of `first_reads`."""
    last: dict[int, float] = {}
    found = []
    for read in reads:
        if read.partition in last and begin < read.at <= end:
            found.append(Gap(read.partition, last[read.partition], read.at))
        last[read.partition] = read.at
    return found


def longest_s(found: Iterable[Gap], partitions: Iterable[int]) -> float:
    """Return the longest gap of these partitions; 0 if there is none."""
    wanted = set(partitions)
    return max((gap.seconds for gap in found if gap.partition in wanted), default=0.0)


def moved(reads: Sequence[Read], since: float) -> set[int]:
    """Partitions that were read by another worker after `since` than before."""
    before: dict[int, str] = {}
    after: dict[int, set[str]] = defaultdict(set)
    for read in reads:
        if read.at <= since:
            before[read.partition] = read.worker
        else:
            after[read.partition].add(read.worker)
    return {partition for partition, workers in after.items() if workers != {before.get(partition)}}


def chart_lines(reads: Sequence[Read], begin: float, end: float, *, columns: int = COLUMNS) -> list[str]:
    """Chart with time to the right, a line per partition: in each column the last reader, a dot without a delivery."""
    step = (end - begin) / columns
    cells: dict[int, list[str]] = {}
    for read in reads:
        if begin <= read.at < end:
            row = cells.setdefault(read.partition, [NO_READER] * columns)
            row[min(columns - 1, int((read.at - begin) / step))] = read.worker
    return [f"{partition:>3}  {''.join(row)}" for partition, row in sorted(cells.items())]


def column(at: float, begin: float, end: float, *, columns: int = COLUMNS) -> int:
    """Column of a time in the chart."""
    return min(columns - 1, max(0, int((at - begin) / (end - begin) * columns)))
