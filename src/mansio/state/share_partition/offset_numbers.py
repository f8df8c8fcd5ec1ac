"""Which share partition has which offset of a topic partition: a number for each offset, most often `BASE`.

Offsets are divided into chunks of `CHUNK_OFFSETS`. A chunk whose offsets all have the number `BASE` takes no memory;
any other one takes one byte per offset, which is searched at the speed of a byte string.

     start                                 end
       | BASE | 1, 2, BASE | BASE | 1, BASE |

Invariants:
* The offsets from `start` to below `end` are covered. An offset without a record has the number `BASE`.
* What was added for an offset stays until the offset is removed at one of the ends.
"""

from __future__ import annotations

import re
import struct
import zlib
from typing import TYPE_CHECKING, Final, NamedTuple, Self

from mansio.errors import CorruptLog
from mansio.state.share_partition.types import BASE, NUMBER_MAX

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

CHUNK_OFFSETS: Final = 1 << 14
"""Number of offsets in a chunk."""

_RUNS: Final = tuple(re.compile(b"\\x%02x+" % number) for number in range(NUMBER_MAX + 1))
"""By number, an expression for bytes of this value."""

_BOUNDS: Final = struct.Struct(">qqi")
_CHUNK: Final = struct.Struct(">qi")


class NumberedRange(NamedTuple):
    """Offsets `first` to `last`, both included, with one number."""

    first: int
    last: int
    number: int


class OffsetNumbers:
    """The numbers of the offsets from `start` to below `end`."""

    __slots__ = ("_chunks", "_counts", "end", "start")

    def __init__(self, start: int) -> None:
        self.start = start
        self.end = start
        self._chunks: dict[int, bytearray] = {}
        """The chunks in which an offset has another number than `BASE`: per offset its number."""
        self._counts: dict[int, dict[int, int]] = {}
        """By chunk and number, how many offsets of the chunk have this number, where it was counted. Only a truncation
        changes a chunk that is covered as a whole."""

    # Changes

    def append(self, end: int, ranges: Iterable[NumberedRange] = ()) -> None:
        """Add the offsets from the present end to below the new one: those in `ranges` with their numbers, the others
        with `BASE`."""
        for first, last, number in ranges:
            if number != BASE:
                self._set(max(first, self.end), min(last, end - 1), number)
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
        number, position = divmod(offset, CHUNK_OFFSETS)
        for each in [each for each in self._chunks if each <= number]:
            if each < number or not any(self._chunks[each][position:]):
                del self._chunks[each]
                self._counts.pop(each, None)
        self.start = offset
        self.end = max(self.end, offset)

    def _set(self, first: int, last: int, number: int) -> None:
        while first <= last:
            at, position = divmod(first, CHUNK_OFFSETS)
            count = min(last - first + 1, CHUNK_OFFSETS - position)
            chunk = self._chunks.get(at)
            if chunk is None:
                chunk = self._chunks[at] = bytearray(CHUNK_OFFSETS)
            chunk[position : position + count] = bytes((number,)) * count
            first += count

    # Queries

    @property
    def mixed_chunk_count(self) -> int:
        """Number of chunks that take memory."""
        return len(self._chunks)

    def ranges(self, number: int, first: int, last: int) -> Iterator[tuple[int, int]]:
        """Yield the ranges of the offsets `first` to `last` that have this number, ascending, as far as they are
        covered. Adjacent ranges are not merged, so that a range takes the time of a chunk at most. Nothing may change
        while the iterator is in use."""
        first, last = max(first, self.start), min(last, self.end - 1)
        byte = bytes((number,))
        position = first
        for at in self._mixed_chunks(first, last) if first <= last else ():
            begin = at * CHUNK_OFFSETS
            if number == BASE and position < begin:
                yield position, begin - 1
            chunk = self._chunks[at]
            stop = min(last - begin, CHUNK_OFFSETS - 1) + 1
            low = chunk.find(byte, max(first - begin, 0), stop)
            while low >= 0:
                high = _end_of_run(chunk, number, low, stop)
                yield begin + low, begin + high - 1
                low = chunk.find(byte, high, stop)
            position = begin + stop
        if number == BASE and position <= last:
            yield position, last

    def split(self, first: int, last: int) -> list[NumberedRange]:
        """Return the offsets `first` to `last` as ranges of one number each, ascending. Offsets that are not covered
        have the number `BASE`."""
        found: list[NumberedRange] = []
        position = first
        for part in (*self._parts(first, last), NumberedRange(last + 1, last, BASE)):
            if part.first > position:  # not covered
                _extend(found, NumberedRange(position, part.first - 1, BASE))
            if part.first <= part.last:
                _extend(found, part)
            position = part.last + 1
        return found

    def count(self, number: int, first: int, last: int) -> int:
        """Return how many of the offsets `first` to `last` have this number."""
        first, last = max(first, self.start), min(last, self.end - 1)
        if first > last:
            return 0
        found = 0
        others = last - first + 1
        for at in self._mixed_chunks(first, last):
            begin = at * CHUNK_OFFSETS
            low, stop = max(first - begin, 0), min(last - begin, CHUNK_OFFSETS - 1) + 1
            others -= stop - low
            if stop - low == CHUNK_OFFSETS:
                found += self._count_chunk(at, number)
            else:
                found += self._chunks[at].count(number, low, stop)
        return found + others if number == BASE else found

    def _count_chunk(self, at: int, number: int) -> int:
        known = self._counts.setdefault(at, {})
        if number not in known:
            known[number] = self._chunks[at].count(number)
        return known[number]

    def _mixed_chunks(self, first: int, last: int) -> Iterator[int]:
        """Yield the chunks with other numbers than `BASE` that overlap the offsets `first` to `last`, ascending."""
        low, high = first // CHUNK_OFFSETS, last // CHUNK_OFFSETS
        if high - low <= 2 * len(self._chunks):
            return filter(self._chunks.__contains__, range(low, high + 1))
        return iter(sorted(at for at in self._chunks if low <= at <= high))

    def _parts(self, first: int, last: int) -> Iterator[NumberedRange]:
        """Yield the covered offsets from `first` to `last` in ranges of one number; none reaches over a chunk with
        other numbers than `BASE`."""
        first, last = max(first, self.start), min(last, self.end - 1)
        position = first
        for at in self._mixed_chunks(first, last) if first <= last else ():
            begin = at * CHUNK_OFFSETS
            if position < begin:
                yield NumberedRange(position, begin - 1, BASE)
            chunk = self._chunks[at]
            low, stop = max(first - begin, 0), min(last - begin, CHUNK_OFFSETS - 1) + 1
            while low < stop:
                number = chunk[low]
                high = _end_of_run(chunk, number, low, stop)
                yield NumberedRange(begin + low, begin + high - 1, number)
                low = high
            position = begin + stop
        if position <= last:
            yield NumberedRange(position, last, BASE)

    # Snapshots

    def freeze(self) -> Self:
        """Return a copy that later changes do not affect. Takes time per chunk, not per offset."""
        copy = type(self)(self.start)
        copy.end = self.end
        copy._chunks = dict(self._chunks)
        last = self.end // CHUNK_OFFSETS  # the only chunk that is changed in place
        if last in copy._chunks:
            copy._chunks[last] = bytearray(copy._chunks[last])
        return copy

    def to_bytes(self) -> bytes:
        """Encode the numbers of all offsets."""
        parts = [_BOUNDS.pack(self.start, self.end, len(self._chunks))]
        for number in sorted(self._chunks):
            packed = zlib.compress(self._chunks[number], 1)
            parts += (_CHUNK.pack(number, len(packed)), packed)
        return b"".join(parts)

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> Self:
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
                    raise CorruptLog(f"a chunk of numbers has not {CHUNK_OFFSETS} bytes")
                index._chunks[number] = chunk
                position += size
        except (struct.error, zlib.error) as error:
            raise CorruptLog(f"numbers of offsets cannot be decoded: {error}") from error
        return index


class NumberedOffsets:
    """The offsets with one number: those that a share partition has.

    A part of the log without such offsets is searched once, so that a search does not take longer the more records of
    others wait. Offsets may be appended, but not truncated, as long as this object is in use."""

    __slots__ = ("_index", "_none_from", "_none_until", "number")

    def __init__(self, index: OffsetNumbers, number: int) -> None:
        self._index = index
        self.number = number
        self._none_from = self._none_until = 0
        """No offset from the first one to below the second one has this number."""

    @property
    def end(self) -> int:
        """Offset below which numbers are known."""
        return self._index.end

    @property
    def has_all(self) -> bool:
        """Whether all covered offsets have this number."""
        return self.number == BASE and not self._index._chunks

    def within(self, first: int, last: int) -> Iterator[tuple[int, int]]:
        """Yield the ranges with this number within the offsets `first` to `last`, ascending; adjacent ones are not
        merged."""
        begin = self._none_until if self._none_from <= first < self._none_until else first
        is_found = False
        for low, high in self._index.ranges(self.number, begin, last):
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
        """Return the first offset with this number that is not below `offset`; None if there is none."""
        return next((first for first, _ in self.within(offset, self._index.end - 1)), None)

    def count(self, first: int, last: int) -> int:
        """Return how many of the offsets `first` to `last` have this number."""
        return self._index.count(self.number, first, last)

    def bound_after(self, offset: int, records: int) -> int:
        """Return the offset after the next `records` offsets with this number from `offset` on. Beyond the covered
        offsets each one counts."""
        for first, last in self.within(offset, self._index.end - 1):
            size = last - first + 1
            if size >= records:
                return first + records
            records -= size
        return max(self._index.end, offset) + records


def _end_of_run(chunk: bytearray, number: int, begin: int, stop: int) -> int:
    """Return the end of the bytes with this value that begin at `begin`."""
    found = _RUNS[number].match(chunk, begin, stop)
    return stop if found is None else found.end()


def _extend(ranges: list[NumberedRange], part: NumberedRange) -> None:
    """Append a part that follows the last range directly."""
    if ranges and ranges[-1].number == part.number:
        ranges[-1] = NumberedRange(ranges[-1].first, part.last, part.number)
    else:
        ranges.append(part)
