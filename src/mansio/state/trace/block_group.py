"""Entry of the index of the trace: which partitions some blocks that follow one another concern, and which offsets.

The offsets of a partition are a few intervals, with all offsets that the blocks have rows about, and maybe others.
"""

from __future__ import annotations

from array import array
from itertools import pairwise
from typing import TYPE_CHECKING, Final, NamedTuple

from mansio.state.trace.coverage import Coverage
from mansio.wire.internal_records.trace_index_records import KEY_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from mansio.wire.internal_records.trace_index_records import CoveredTime
    from mansio.wire.internal_records.trace_records import BlockHeader

INTERVALS_MAX: Final = 8
"""Maximum number of intervals of offsets of a partition; the closest ones are joined."""

Intervals = list[tuple[int, int]]
"""Ascending, disjoint ranges of offsets, each from the first to below the second one; at most `INTERVALS_MAX`."""


class BlockGroup(NamedTuple):
    """The blocks in the batches from the offset `first` to below `end`. `keys`: of the partitions, ascending; `starts`:
    for each of them, and once more at the end, the position in `bounds` of its intervals."""

    first: int
    end: int
    keys: bytes
    starts: array[int]
    bounds: array[int]

    def may_have(self, key: bytes, offsets: Sequence[int]) -> bool:
        """Whether a block may have a row about a partition and one of the offsets."""
        low, high = 0, len(self.keys) // KEY_BYTES
        keys = self.keys
        while low < high:
            middle = (low + high) // 2
            if keys[middle * KEY_BYTES : (middle + 1) * KEY_BYTES] < key:
                low = middle + 1
            else:
                high = middle
        if keys[low * KEY_BYTES : (low + 1) * KEY_BYTES] != key:
            return False
        found = self.bounds[self.starts[low] : self.starts[low + 1]]
        return any(
            low <= each < end for low, end in zip(found[::2], found[1::2], strict=True) for each in offsets
        )

    def entries(self) -> Iterator[tuple[bytes, Intervals]]:
        """Yield each partition with its intervals."""
        for number in range(len(self.keys) // KEY_BYTES):
            found = self.bounds[self.starts[number] : self.starts[number + 1]]
            key = self.keys[number * KEY_BYTES : (number + 1) * KEY_BYTES]
            yield key, list(zip(found[::2], found[1::2], strict=True))

    @property
    def size_bytes(self) -> int:
        """Size in memory."""
        return len(self.keys) + 4 * len(self.starts) + 8 * len(self.bounds)


class OpenGroup:
    """A group to which blocks are added. `first`: offset of the first block."""

    __slots__ = ("block_count", "coverage", "first", "known")

    def __init__(self, first: int) -> None:
        self.first = first
        self.block_count = 0
        self.known: dict[bytes, Intervals] = {}
        self.coverage: dict[tuple[int, int], Coverage] = {}
        """What the blocks cover, for each broker process."""

    def add_header(self, header: BlockHeader) -> None:
        """Count a block, and add what it covers."""
        self.block_count += 1
        self._coverage_of(header.broker_id, header.incarnation).add(header)

    def add_covered(self, covered: CoveredTime) -> None:
        """Add what blocks cover."""
        self._coverage_of(covered.broker_id, covered.incarnation).extend(covered)

    def _coverage_of(self, broker_id: int, incarnation: int) -> Coverage:
        process = (broker_id, incarnation)
        found = self.coverage.get(process)
        if found is None:
            found = self.coverage[process] = Coverage(*process)
        return found

    def add(self, key: bytes, first: int, end: int) -> None:
        """Add the offsets of a partition in a block."""
        intervals = self.known.get(key)
        if intervals is None:
            self.known[key] = [(first, end)]
        else:
            add_interval(intervals, first, end)

    def close(self, end: int) -> BlockGroup:
        """Return the group of the blocks up to below the offset `end`."""
        return _new_group(self.first, end, self.known)


def add_interval(intervals: Intervals, first: int, end: int) -> None:
    """Add a range of offsets, and join the two closest intervals if there are too many."""
    last_first, last_end = intervals[-1]
    if last_first <= first <= last_end:  # what almost all are that follow
        if end > last_end:
            intervals[-1] = (last_first, end)
        return
    intervals.append((first, end))
    intervals.sort()
    joined = [intervals[0]]
    for low, high in intervals[1:]:
        if low <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], high))
        else:
            joined.append((low, high))
    if len(joined) > INTERVALS_MAX:
        gaps = [second[0] - first_one[1] for first_one, second in pairwise(joined)]
        at = gaps.index(min(gaps))
        joined[at : at + 2] = [(joined[at][0], joined[at + 1][1])]
    intervals[:] = joined


def join_neighbours(groups: Sequence[BlockGroup]) -> list[BlockGroup]:
    """Return half as many groups, each of two that follow one another."""
    joined = [_joined(first, second) for first, second in zip(groups[::2], groups[1::2], strict=False)]
    return [*joined, groups[-1]] if len(groups) % 2 else joined


def _joined(first: BlockGroup, second: BlockGroup) -> BlockGroup:
    known = dict(first.entries())
    for key, intervals in second.entries():
        mine = known.get(key)
        if mine is None:
            known[key] = intervals
        else:
            for interval in intervals:
                add_interval(mine, *interval)
    return _new_group(first.first, second.end, known)


def _new_group(first: int, end: int, known: Mapping[bytes, Intervals]) -> BlockGroup:
    starts, bounds = array("I", [0]), array("q")
    keys = sorted(known)
    for key in keys:
        for interval in known[key]:
            bounds.extend(interval)
        starts.append(len(bounds))
    return BlockGroup(first, end, b"".join(keys), starts, bounds)
