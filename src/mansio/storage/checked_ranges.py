"""Checked ranges of a segment: the byte ranges that are known to be intact or damaged.

Invariant: `CheckedRanges.ranges` are in order, do not overlap and begin and end at batch boundaries. At most
`RANGES_MAX` ranges are kept per segment; the batches of a range that is dropped are checked again when they are read.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING, Final, NamedTuple

from mansio.errors import DamagedRange

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mansio.errors import StorageError

RANGES_MAX: Final = 32
OPEN_RANGE_END: Final = (1 << 63) - 1
"""End position and end offset of the range that grows with each append to the active segment."""


class CheckedRange(NamedTuple):
    """A range of a segment that was checked: bytes [position, end_position), offsets [offset, end_offset).

    `damage` describes the first problem in the range; it is "" if all batches are intact."""

    position: int
    end_position: int
    offset: int
    end_offset: int
    damage: str = ""


class CheckedRanges:
    """The checked ranges of one segment. `Segment.checked` is None once all batches of the segment are verified."""

    __slots__ = ("_offsets", "error", "ranges")

    def __init__(self, ranges: Sequence[CheckedRange] = ()) -> None:
        self.ranges = list(ranges)
        self.error: StorageError | None = None
        """The disk error of the last check. It is raised to the next reader whose batches are not checked."""
        self._offsets = [each.offset for each in self.ranges]

    @classmethod
    def for_active_segment(cls, position: int, offset: int) -> CheckedRanges:
        """Return the checked ranges of an active segment: all batches that this process appends are intact.

        `position` and `offset` are the end of the segment before the first of these appends."""
        return cls([CheckedRange(position, OPEN_RANGE_END, offset, OPEN_RANGE_END)])

    def find(self, offset: int) -> CheckedRange | None:
        """Return the range that contains `offset`; None if the batch with that offset was not checked."""
        at = bisect_right(self._offsets, offset) - 1
        if at >= 0 and offset < (found := self.ranges[at]).end_offset:
            return found
        return None

    def range_before(self, offset: int) -> CheckedRange | None:
        """Return the last range that ends at or below `offset`."""
        at = bisect_right(self._offsets, offset) - 1
        if at >= 0 and self.ranges[at].end_offset > offset:
            at -= 1
        return self.ranges[at] if at >= 0 else None

    def range_after(self, offset: int) -> CheckedRange | None:
        """Return the first range that begins at or above `offset`."""
        at = bisect_right(self._offsets, offset - 1)
        return self.ranges[at] if at < len(self.ranges) else None

    def damaged_ranges(self) -> list[CheckedRange]:
        """Return the damaged ranges."""
        return [each for each in self.ranges if each.damage]

    def is_complete(self, size: int, end_offset: int) -> bool:
        """Whether a segment of `size` bytes is intact as a whole, and contains all offsets below `end_offset`."""
        return (
            len(self.ranges) == 1
            and not self.ranges[0].position
            and self.ranges[0].end_position >= size
            and self.ranges[0].end_offset >= end_offset
            and not self.ranges[0].damage
        )

    def add(self, new: CheckedRange) -> None:
        """Add a range that was just checked. The new result replaces older results for the same offsets."""
        kept: list[CheckedRange] = []
        for old in self.ranges:
            if old.end_offset <= new.offset or old.offset >= new.end_offset:
                kept.append(old)
                continue
            if old.damage:
                continue  # the two checks disagree on its boundaries: it is checked again when it is read
            if old.offset < new.offset and old.position < new.position:
                kept.append(old._replace(end_position=new.position, end_offset=new.offset))
            if old.end_offset > new.end_offset and old.end_position > new.end_position:
                kept.append(old._replace(position=new.end_position, offset=new.end_offset))
        kept.append(new)
        kept.sort(key=_first_offset_of)
        joined: list[CheckedRange] = []
        for each in kept:
            last = joined[-1] if joined else None
            if (
                last is not None
                and not last.damage
                and not each.damage
                and (last.end_position, last.end_offset) == (each.position, each.offset)
            ):
                joined[-1] = last._replace(end_position=each.end_position, end_offset=each.end_offset)
            else:
                joined.append(each)
        while len(joined) > RANGES_MAX:
            joined.remove(min((each for each in joined if each.offset != new.offset), key=_position_of))
        self.ranges = joined
        self._offsets = [each.offset for each in joined]


def _first_offset_of(one: CheckedRange) -> int:
    return one.offset


def _position_of(one: CheckedRange) -> int:
    return one.end_position - one.position


def damaged_range_error(path: str, found: CheckedRange) -> DamagedRange:
    """Return the error that a reader of a damaged range gets, with the first and last damaged offset."""
    last = found.end_offset - 1
    error = DamagedRange(f"{path}: offsets {found.offset} to {last} are damaged: {found.damage}")
    error.first_offset, error.end_offset = found.offset, found.end_offset
    return error
