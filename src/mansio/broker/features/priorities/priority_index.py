"""Index of the priorities of a partition's records: which offsets have high and low priority.

Offsets are divided into chunks of `CHUNK_OFFSETS`. A chunk whose records all have normal priority takes no memory; any
other one takes one byte per offset, which is searched at the speed of a byte string.

     start                                                 end
       | normal | high, low, normal | normal | high, normal |

Invariants:
* The index covers the offsets from `start` to below `end`. An offset without a record has normal priority.
* What was added for an offset stays until the offset is removed at one of the ends.
"""

from __future__ import annotations

import re
import struct
import zlib
from typing import TYPE_CHECKING, ClassVar, Final, NamedTuple

from mansio.broker.features.priorities.priority_shares import PriorityShares
from mansio.errors import CorruptLog
from mansio.wire.batch.priority_header import PRIORITIES, PRIORITY_NAMES, Priority

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

CHUNK_OFFSETS: Final = 1 << 14
"""Number of offsets in a chunk."""

_RUN: Final = {priority: re.compile(b"\\x%02x+" % priority, re.DOTALL) for priority in Priority}
_ANY_RUN: Final = re.compile(b"|".join(b"\\x%02x+" % priority for priority in Priority))
_BOUNDS: Final = struct.Struct(">qqi")
_CHUNK: Final = struct.Struct(">qi")


class PriorityRange(NamedTuple):
    """Offsets `first` to `last`, both included, with one priority."""

    first: int
    last: int
    priority: Priority


class PriorityIndex:
    """The priorities of the offsets from `start` to below `end`. It is the `ShareIndex` of a topic with priorities: the
    number of a share partition is the priority of its records."""

    __slots__ = ("_chunks", "_counts", "end", "start")

    numbers: ClassVar[Sequence[int]] = PRIORITIES
    names: ClassVar[Mapping[int, str]] = {priority: name for name, priority in PRIORITY_NAMES.items()}

    def __init__(self, start: int) -> None:
        self.start = start
        self.end = start
        self._chunks: dict[int, bytearray] = {}
        """By number, the chunks in which an offset has high or low priority: per offset its priority."""
        self._counts: dict[tuple[int, Priority], int] = {}
        """By number and priority, how many offsets of a chunk have this priority, where it was counted. Only a
        truncation changes a chunk that the index covers as a whole."""

    # Changes

    def append(self, end: int, ranges: Iterable[PriorityRange] = ()) -> None:
        """Add the offsets from `end` of the index to below the new end: those in `ranges` with their priorities, the
        others with normal priority."""
        for first, last, priority in ranges:
            if priority is not Priority.NORMAL:
                self._set(max(first, self.end), min(last, end - 1), priority)
        self.end = max(self.end, end)

    def truncate(self, end: int) -> None:
        """Remove the offsets from `end` on."""
        if end >= self.end:
            return
        number, position = divmod(end, CHUNK_OFFSETS)
        for each in [each for each in self._chunks if each > number]:
            del self._chunks[each]
        self._counts.clear()
        if (chunk := self._chunks.pop(number, None)) is not None:
            kept = chunk[:position] + bytes(
                CHUNK_OFFSETS - position
            )  # a new object: a copy may have the other one
            if any(kept):
                self._chunks[number] = kept
        self.end = end
        self.start = min(self.start, end)

    def drop_below(self, offset: int) -> None:
        """Remove the offsets below `offset`."""
        if offset <= self.start:
            return
        for each in [each for each in self._chunks if (each + 1) * CHUNK_OFFSETS <= offset]:
            del self._chunks[each]
            for priority in Priority:
                self._counts.pop((each, priority), None)
        self.start = offset
        self.end = max(self.end, offset)

    def _set(self, first: int, last: int, priority: Priority) -> None:
        while first <= last:
            number, position = divmod(first, CHUNK_OFFSETS)
            count = min(last - first + 1, CHUNK_OFFSETS - position)
            chunk = self._chunks.get(number)
            if chunk is None:
                chunk = self._chunks[number] = bytearray(CHUNK_OFFSETS)
            chunk[position : position + count] = bytes((priority,)) * count
            first += count

    # Queries

    @property
    def mixed_chunk_count(self) -> int:
        """Number of chunks that take memory."""
        return len(self._chunks)

    def ranges(self, priority: Priority, first: int, last: int) -> Iterator[tuple[int, int]]:
        """Yield the ranges of the offsets `first` to `last` that have this priority, ascending, as far as the index
        reaches. Adjacent ranges are not merged, so that a range takes the time of a chunk at most. The index must not
        change while the iterator is in use."""
        first, last = max(first, self.start), min(last, self.end - 1)
        byte, run, is_normal = bytes((priority,)), _RUN[priority], priority is Priority.NORMAL
        position = first
        for number in self._numbers(first, last) if first <= last else ():
            begin = number * CHUNK_OFFSETS
            if is_normal and position < begin:
                yield position, begin - 1
            chunk = self._chunks[number]
            stop = min(last - begin, CHUNK_OFFSETS - 1) + 1
            low = chunk.find(byte, max(first - begin, 0), stop)
            while low >= 0:
                found = run.match(chunk, low, stop)
                high = stop if found is None else found.end()
                yield begin + low, begin + high - 1
                low = chunk.find(byte, high, stop)
            position = begin + stop
        if is_normal and position <= last:
            yield position, last

    def split(self, first: int, last: int) -> list[PriorityRange]:
        """Return the offsets `first` to `last` as ranges of one priority each, ascending. Offsets that the index does
        not cover have normal priority."""
        found: list[PriorityRange] = []
        position = first
        for part in (*self._parts(first, last), PriorityRange(last + 1, last, Priority.NORMAL)):
            if part.first > position:  # not covered
                _extend(found, PriorityRange(position, part.first - 1, Priority.NORMAL))
            if part.first <= part.last:
                _extend(found, part)
            position = part.last + 1
        return found

    def offsets_of(self, number: int) -> PriorityOffsets:
        """Return the offsets of one priority."""
        return PriorityOffsets(self, Priority(number))

    @staticmethod
    def new_order() -> PriorityShares:
        """Return the division of deliveries among the priorities for a group."""
        return PriorityShares()

    def count(self, priority: Priority, first: int, last: int) -> int:
        """Return how many of the offsets `first` to `last` have this priority."""
        first, last = max(first, self.start), min(last, self.end - 1)
        if first > last:
            return 0
        if priority is Priority.NORMAL:
            others = sum(self.count(each, first, last) for each in (Priority.HIGH, Priority.LOW))
            return last - first + 1 - others
        found = 0
        for number in self._numbers(first, last):
            begin = number * CHUNK_OFFSETS
            if first <= begin and last >= begin + CHUNK_OFFSETS - 1:
                found += self._count_chunk(number, priority)
            else:
                stop = min(last - begin, CHUNK_OFFSETS - 1) + 1
                found += self._chunks[number].count(priority, max(first - begin, 0), stop)
        return found

    def _count_chunk(self, number: int, priority: Priority) -> int:
        known = self._counts.get((number, priority))
        if known is None:
            known = self._counts[number, priority] = self._chunks[number].count(priority)
        return known

    def _numbers(self, first: int, last: int) -> Iterator[int]:
        """Yield the numbers of the mixed chunks that overlap the offsets `first` to `last`, ascending."""
        low, high = first // CHUNK_OFFSETS, last // CHUNK_OFFSETS
        if high - low <= 2 * len(self._chunks):
            return filter(self._chunks.__contains__, range(low, high + 1))
        return iter(sorted(number for number in self._chunks if low <= number <= high))

    def _parts(self, first: int, last: int) -> Iterator[PriorityRange]:
        """Yield the covered offsets from `first` to `last` in ranges of one priority; none reaches over a chunk with
        other priorities than normal."""
        first, last = max(first, self.start), min(last, self.end - 1)
        position = first
        for number in self._numbers(first, last) if first <= last else ():
            begin = number * CHUNK_OFFSETS
            if position < begin:
                yield PriorityRange(position, begin - 1, Priority.NORMAL)
            chunk = self._chunks[number]
            stop = min(last - begin, CHUNK_OFFSETS - 1) + 1
            for match in _ANY_RUN.finditer(chunk, max(first - begin, 0), stop):
                low, high = match.span()
                yield PriorityRange(begin + low, begin + high - 1, Priority(chunk[low]))
            position = begin + stop
        if position <= last:
            yield PriorityRange(position, last, Priority.NORMAL)

    # Snapshots

    def freeze(self) -> PriorityIndex:
        """Return a copy that later changes of this index do not affect. Takes time per chunk, not per offset."""
        copy = PriorityIndex(self.start)
        copy.end = self.end
        copy._chunks = dict(self._chunks)
        last = self.end // CHUNK_OFFSETS  # the only chunk that is changed in place
        if last in copy._chunks:
            copy._chunks[last] = bytearray(copy._chunks[last])
        return copy

    def to_bytes(self) -> bytes:
        """Encode the index."""
        parts = [_BOUNDS.pack(self.start, self.end, len(self._chunks))]
        for number in sorted(self._chunks):
            packed = zlib.compress(self._chunks[number], 1)
            parts += (_CHUNK.pack(number, len(packed)), packed)
        return b"".join(parts)

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> PriorityIndex:
        """Decode what `to_bytes` returned. Raises `CorruptLog`."""
        try:
            start, end, count = _BOUNDS.unpack_from(data)
            index = cls(start)
            index.end = end
            position = _BOUNDS.size
            for _ in range(count):
                number, size = _CHUNK.unpack_from(data, position)
                position += _CHUNK.size
                inflater = zlib.decompressobj()
                chunk = bytearray(inflater.decompress(data[position : position + size], CHUNK_OFFSETS + 1))
                if len(chunk) != CHUNK_OFFSETS or not inflater.eof:
                    raise CorruptLog(f"a chunk of priorities has not {CHUNK_OFFSETS} bytes")
                index._chunks[number] = chunk
                position += size
        except (struct.error, zlib.error) as error:
            raise CorruptLog(f"an index of priorities cannot be decoded: {error}") from error
        return index


class PriorityOffsets:
    """The offsets of one priority in an index: those that a share partition of this priority has.

    A part of the log without such offsets is searched once, so that a search does not take longer the more records of
    other priorities wait. The index may be appended to, but not truncated, as long as this object is in use."""

    __slots__ = ("_index", "_none_from", "_none_until", "priority")

    def __init__(self, index: PriorityIndex, priority: Priority) -> None:
        self._index = index
        self.priority = priority
        self._none_from = self._none_until = 0
        """No offset from the first one to below the second one has this priority."""

    @property
    def end(self) -> int:
        """Offset below which priorities are known."""
        return self._index.end

    def within(self, first: int, last: int) -> Iterator[tuple[int, int]]:
        """Yield the ranges of this priority within the offsets `first` to `last`, ascending; adjacent ones are not
        merged."""
        begin = self._none_until if self._none_from <= first < self._none_until else first
        is_found = False
        for low, high in self._index.ranges(self.priority, begin, last):
            if not is_found:
                is_found = True
                self._note_none(first, low)
            yield low, high
        if not is_found:
            self._note_none(first, min(last + 1, self._index.end))

    def _note_none(self, first: int, until: int) -> None:
        if self._none_from <= first <= self._none_until:
            self._none_until = max(self._none_until, until)
        elif until - first > CHUNK_OFFSETS:
            self._none_from, self._none_until = first, until

    def first_at_or_above(self, offset: int) -> int | None:
        """Return the first offset of this priority that is not below `offset`; None if there is none."""
        return next((first for first, _ in self.within(offset, self._index.end - 1)), None)

    def count(self, first: int, last: int) -> int:
        """Return how many of the offsets `first` to `last` have this priority."""
        return self._index.count(self.priority, first, last)

    def bound_after(self, offset: int, records: int) -> int:
        """Return the offset after the next `records` offsets of this priority from `offset` on. Beyond the end of the
        index each offset counts as one of this priority."""
        for first, last in self.within(offset, self._index.end - 1):
            size = last - first + 1
            if size >= records:
                return first + records
            records -= size
        return max(self._index.end, offset) + records


def _extend(ranges: list[PriorityRange], part: PriorityRange) -> None:
    """Append a part that follows the last range directly."""
    if ranges and ranges[-1].priority is part.priority:
        ranges[-1] = PriorityRange(ranges[-1].first, part.last, part.priority)
    else:
        ranges.append(part)
