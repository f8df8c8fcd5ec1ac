"""Many alike records of a batch read at once: plain values of the same length, one behind the other.

Where all records are laid out the same way, what stands in the same place of each is a column of bytes with a fixed
distance. A run is recognised by comparing those columns with what they must hold, so no record is looked at alone.

Always true: a run holds what `record_rows` would read from the same bytes, record by record; whatever is not exactly
so laid out is no run.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import repeat
from typing import TYPE_CHECKING, Final, NamedTuple

from mansio.errors import InvalidRecord
from mansio.wire.batch.varints import read_varint, varint

if TYPE_CHECKING:
    from collections.abc import Iterable

UNIFORM_RECORDS_MIN: Final = 16
_SPAN_ENDS: Final = (1 << 6, 1 << 13)
"""Offset deltas below these take one byte, and two. Batches with more records are read one by one from there on."""
_NO_KEY: Final = b"\x01"
_SIGNED: Final = tuple((number >> 1) ^ -(number & 1) for number in range(0x80))


class Run(NamedTuple):
    """`length` records that end before `end`; their timestamps as differences to the batch's first, in ms."""

    length: int
    end: int
    values: list[bytes]
    stamp_deltas: Iterable[int]


def read_run(data: bytes, position: int, delta: int, count: int) -> Run | None:
    """The run of at most `count` records that begins at `position` with offset delta `delta`, if there is one."""
    size = next((size for size, end in enumerate(_SPAN_ENDS, start=1) if delta < end), 0)
    if not size:
        return None
    count = min(count, _SPAN_ENDS[size - 1] - delta)
    if count < UNIFORM_RECORDS_MIN:
        return None
    try:
        length, after_length = read_varint(data, position)
        before_value = after_length + 2 + size + 1  # attributes, timestamp, place, no key
        value_length, begin = read_varint(data, before_value)
    except (IndexError, InvalidRecord):
        return None  # for the reader of single records to name
    stride = after_length - position + length
    end = position + count * stride
    if (
        value_length < 0
        or begin + value_length + 1 != position + stride
        or end > len(data)
        or data[position:after_length] != data[end - stride : end - stride + after_length - position]
    ):
        return None
    stamps = data[after_length + 1 : end : stride]
    places = range(after_length + 2, after_length + 2 + size)
    same = (*range(position, after_length), *range(before_value, begin))
    if (
        max(stamps) >= 0x80
        or data[before_value - 1 : end : stride] != _NO_KEY * count
        or data[position + stride - 1 : end : stride] != bytes(count)  # no headers
        or any(data[place:end:stride] != data[place : place + 1] * count for place in same)
        or tuple(data[place:end:stride] for place in places) != _place_columns(delta, count)
    ):
        return None
    values = [data[start : start + value_length] for start in range(begin, end, stride)]
    is_one_stamp = stamps == stamps[:1] * count
    first = _SIGNED[stamps[0]]
    return Run(count, end, values, repeat(first, count) if is_one_stamp else map(_SIGNED.__getitem__, stamps))


@lru_cache(maxsize=32)
def _place_columns(delta: int, count: int) -> tuple[bytes, ...]:
    """The varints of `count` offset deltas of the same size, byte by byte."""
    places = b"".join(map(varint, range(delta, delta + count)))
    size = len(places) // count
    return tuple(places[byte::size] for byte in range(size))
