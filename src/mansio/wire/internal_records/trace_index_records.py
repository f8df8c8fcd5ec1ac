"""Codec of the index records of the internal topic `__mansio_trace`.

An index record states which partitions and offsets the blocks in a range of offsets of the trace concern, and what time
they cover. So a broker that has just started need not read all blocks to answer a question.

    header | covered times of each process, with its gaps | keys | starts | bounds

The index records of a partition of the trace are a list: each has the offset of the one that was appended before it.
Readers of blocks skip them by their version.
"""

from __future__ import annotations

import sys
from array import array
from struct import Struct, error
from typing import TYPE_CHECKING, Final, NamedTuple

from mansio.errors import CorruptMessage

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mansio.ports import Buffer

INDEX_VERSION: Final = 128
"""Version of index records. Those of blocks are below."""

KEY_BYTES: Final = 20
"""Size of the key of a partition: its topic id and its number."""

_VERSION_BYTE: Final = INDEX_VERSION.to_bytes(1, "big")
_HEADER: Final = Struct(">BxxxqqqIII")
_COVERED: Final = Struct(">iqqqqqI")
_GAP: Final = Struct(">qqq")


class CoveredTime(NamedTuple):
    """The blocks of a broker process from the number `first_sequence` to below `next_sequence`, and the time that they
    cover. `gaps`: begin and end of each time in which rows are missing, and how many, -1 for an unknown number."""

    broker_id: int
    incarnation: int
    first_sequence: int
    next_sequence: int
    begin_ms: int
    end_ms: int
    gaps: Sequence[tuple[int, int, int]]


class IndexRecord(NamedTuple):
    """Index of the blocks in the batches from the offset `first` to below `end`. `previous`: offset of the index record
    that was appended before, -1 for none. `keys`: of the partitions, ascending; `starts`: for each of them, and once
    more at the end, the position in `bounds` of its intervals of offsets."""

    first: int
    end: int
    previous: int
    covered: Sequence[CoveredTime]
    keys: bytes
    starts: array[int]
    bounds: array[int]


def encode_index_record(record: IndexRecord) -> bytes:
    """Return the value of an index record."""
    parts = [
        _HEADER.pack(
            INDEX_VERSION,
            record.first,
            record.end,
            record.previous,
            len(record.covered),
            len(record.keys) // KEY_BYTES,
            len(record.bounds),
        )
    ]
    for each in record.covered:
        parts.append(_COVERED.pack(*each[:-1], len(each.gaps)))
        parts += (_GAP.pack(*gap) for gap in each.gaps)
    parts += (record.keys, _big_endian(record.starts), _big_endian(record.bounds))
    return b"".join(parts)


def is_index_record(data: Buffer) -> bool:
    """Whether the value of a record of the trace has the version of index records."""
    return bytes(data[:1]) == _VERSION_BYTE


def decode_index_record(data: Buffer) -> IndexRecord:
    """Decode the value of an index record. Raises `CorruptMessage`."""
    try:
        version, first, end, previous, processes, keys, bounds = _HEADER.unpack_from(data)
        if version != INDEX_VERSION:
            raise CorruptMessage(f"an index record of the trace has the unknown version {version}")
        position = _HEADER.size
        covered = []
        for _ in range(processes):
            broker_id, process, low, high, begin_ms, end_ms, gap_count = _COVERED.unpack_from(data, position)
            position += _COVERED.size
            gaps = [_GAP.unpack_from(data, position + number * _GAP.size) for number in range(gap_count)]
            position += gap_count * _GAP.size
            covered.append(CoveredTime(broker_id, process, low, high, begin_ms, end_ms, gaps))
    except error as damage:
        raise CorruptMessage("an index record of the trace is too short") from damage
    rest = memoryview(data)[position:]
    keys_end = keys * KEY_BYTES
    starts_end = keys_end + (keys + 1) * 4
    if len(rest) != starts_end + bounds * 8:
        raise CorruptMessage("an index record of the trace does not have the size that its header states")
    starts = _numbers("I", rest[keys_end:starts_end])
    if (
        starts[0]
        or starts[-1] != bounds
        or list(starts) != sorted(starts)
        or any(each % 2 for each in starts)
    ):
        raise CorruptMessage("an index record of the trace has intervals of no partition")
    return IndexRecord(
        first, end, previous, covered, bytes(rest[:keys_end]), starts, _numbers("q", rest[starts_end:])
    )


def _big_endian(numbers: array[int]) -> bytes:
    if sys.byteorder == "little":
        numbers = numbers[:]
        numbers.byteswap()
    return numbers.tobytes()


def _numbers(typecode: str, data: memoryview) -> array[int]:
    found: array[int] = array(typecode, bytes(data))
    if sys.byteorder == "little":
        found.byteswap()
    return found
