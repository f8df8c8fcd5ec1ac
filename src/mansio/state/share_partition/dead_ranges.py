"""What of a share partition is dead, and what was offered again by which redrive.

Always true: an offset is dead from when its copy is known to be in the dead-letter topic until it is offered again; so
nothing that was acknowledged ever comes back. Offering under one id happens once for each offset, also when the
record died again since. Both are bounded: the oldest are forgotten first.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING, Final

from mansio.errors import InvalidRequest
from mansio.state.share_partition.types import DeadRange, Redrive

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from mansio.state.share_partition.types import LoadedState

DEAD_RANGES_MAX: Final = 20_000
REDRIVES_MAX: Final = 64
REDRIVE_RANGES_MAX: Final = 20_000

Intervals = list[tuple[int, int]]
"""Offsets, first and last of each: ascending, disjoint, not side by side."""


def normalized(pieces: Iterable[tuple[int, int]]) -> Intervals:
    """In order and joined. Raises `InvalidRequest` for one that ends before it begins."""
    joined: Intervals = []
    for first, last in sorted(pieces):
        if last < first:
            raise InvalidRequest(f"offsets {first} to {last} are no range")
        if joined and first <= joined[-1][1] + 1:
            joined[-1] = (joined[-1][0], max(joined[-1][1], last))
        else:
            joined.append((first, last))
    return joined


def size(pieces: Iterable[tuple[int, int]]) -> int:
    return sum(last - first + 1 for first, last in pieces)


def intersection(one: Sequence[tuple[int, int]], other: Sequence[tuple[int, int]]) -> Intervals:
    """What is in both."""
    found: Intervals = []
    i = j = 0
    while i < len(one) and j < len(other):
        first, last = max(one[i][0], other[j][0]), min(one[i][1], other[j][1])
        if first <= last:
            found.append((first, last))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return found


def difference(one: Sequence[tuple[int, int]], other: Sequence[tuple[int, int]]) -> Intervals:
    """What of the first is not in the second."""
    left: Intervals = []
    for first, last in one:
        begin = first
        at = max(bisect_left(other, (first, 0)) - 1, 0)
        while at < len(other) and other[at][0] <= last:
            low, high = other[at]
            at += 1
            if high < begin:
                continue
            if low > begin:
                left.append((begin, low - 1))
            begin = high + 1
        if begin <= last:
            left.append((begin, last))
    return left


def insert(ranges: list[DeadRange], added: DeadRange) -> int:
    """These are dead, too. Gives how many offsets had to be forgotten for them, the lowest ones."""
    first, last = added.first, added.last
    at = bisect_left(ranges, added)
    before = ranges[at - 1] if at else None
    if before is not None and before.last + 1 == first and before[2:] == added[2:]:
        ranges[at - 1] = added = added._replace(first=before.first)
    else:
        ranges.insert(at, added)
        at += 1
    if at < len(ranges) and last + 1 == ranges[at].first and ranges[at][2:] == added[2:]:
        ranges[at - 1 : at + 1] = [added._replace(last=ranges[at].last)]
    forgotten = 0
    while len(ranges) > DEAD_RANGES_MAX:
        lowest = ranges.pop(0)
        forgotten += lowest.last - lowest.first + 1
    return forgotten


class DeadRanges:
    """See the module."""

    __slots__ = ("_ranges", "_redrives", "offsets")

    def __init__(self, state: LoadedState) -> None:
        self._ranges = sorted(state.dead)
        self._redrives = {each.redrive_id: list(each.ranges) for each in state.redrives}
        self.offsets = size((each.first, each.last) for each in self._ranges)
        """How many offsets are dead."""

    def ranges(self) -> tuple[DeadRange, ...]:
        return tuple(self._ranges)

    def redrives(self) -> tuple[Redrive, ...]:
        return tuple(Redrive(name, tuple(ranges)) for name, ranges in self._redrives.items())

    def add(self, added: DeadRange) -> None:
        """These are dead from now on."""
        self.offsets += added.last - added.first + 1 - insert(self._ranges, added)

    def intersect(self, wanted: Sequence[tuple[int, int]]) -> list[DeadRange]:
        """What of these is dead."""
        found = []
        for first, last in wanted:
            at = max(bisect_right(self._ranges, first, key=lambda each: each.first) - 1, 0)
            while at < len(self._ranges) and self._ranges[at].first <= last:
                each = self._ranges[at]
                if each.last >= first:
                    found.append(each._replace(first=max(each.first, first), last=min(each.last, last)))
                at += 1
        return found

    def remove(self, gone: Sequence[tuple[int, int]]) -> bool:
        """These are dead no more. Says whether any was."""
        before = self.offsets
        kept: list[DeadRange] = []
        for each in self._ranges:
            kept += [
                each._replace(first=first, last=last)
                for first, last in difference([(each.first, each.last)], gone)
            ]
        self._ranges = kept
        self.offsets = size((each.first, each.last) for each in kept)
        return self.offsets != before

    def offered(self, redrive_id: str) -> Intervals:
        """What this redrive has offered before."""
        return self._redrives.get(redrive_id, [])

    def remember(self, redrive_id: str, offered: Iterable[tuple[int, int]]) -> None:
        """Raises `InvalidRequest` when one redrive has offered so many ranges that they cannot be remembered."""
        joined = normalized([*self.offered(redrive_id), *offered])
        if len(joined) > REDRIVE_RANGES_MAX:
            raise InvalidRequest(
                f"redrive {redrive_id} has too many ranges of offsets: go on under another id"
            )
        self._redrives.pop(redrive_id, None)
        self._redrives[redrive_id] = joined
        with_known_state = sum(len(each) for each in self._redrives.values())
        while len(self._redrives) > REDRIVES_MAX or with_known_state > REDRIVE_RANGES_MAX:
            with_known_state -= len(self._redrives.pop(next(iter(self._redrives))))
