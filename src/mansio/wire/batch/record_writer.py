"""The records of a batch written column by column: what a producer does all day.

Most batches hold plain values: no key, no header. All that differs between two such records are the value, its length,
its place in the batch and perhaps a few milliseconds. So the bytes around the values come out of small tables, and one
join puts everything together, without a call or an object per record. `write_rows` is the general way, for any record.

Always true: `write_values` gives the bytes that `write_rows` gives for the same records.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import repeat
from typing import TYPE_CHECKING, Final

from mansio.wire.batch.varints import varint

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    Header = tuple[str, bytes | None]
    NewRecord = tuple[int, bytes | None, bytes | None, Sequence[Header]]

_NULL: Final = varint(-1)
_SPAN_ENDS: Final = (1 << 6, 1 << 13, 1 << 20, 1 << 27, 1 << 31)
"""Offset deltas below these take one byte, two bytes, and so on."""
_KEPT_LENGTHS_MAX: Final = 1 << 12
_TEMPLATE_RECORDS_MAX: Final = 1 << 13


def write_rows(records: Iterable[NewRecord]) -> bytearray:
    """Records of (timestamp_ms, key, value, headers), the first of which gives the base timestamp."""
    out = bytearray()
    base_timestamp_ms: int | None = None
    for delta, (timestamp_ms, key, value, headers) in enumerate(records):
        if base_timestamp_ms is None:
            base_timestamp_ms = timestamp_ms
        if key is None and value is not None and not headers:
            deltas = varint(timestamp_ms - base_timestamp_ms) + varint(delta) + _NULL + varint(len(value))
            out += b"%b\0%b%b\0" % (varint(len(deltas) + len(value) + 2), deltas, value)
        else:
            _write_row(out, delta, timestamp_ms - base_timestamp_ms, key, value, headers)
    return out


def write_values(stamps: Sequence[int], values: Sequence[bytes]) -> bytes | bytearray:
    """Records without key and headers, from their timestamps and values: as many of the one as of the other."""
    count, base = len(values), stamps[0]
    if count == 1:
        return b"%b%b\0" % (_fronts(len(values[0]), 1)[0], values[0])
    is_one_stamp = stamps[-1] == base and stamps.count(base) == count
    if not is_one_stamp and (max(stamps) - base > 0x3F or min(stamps) < base):
        return write_rows(zip(stamps, repeat(None), values, repeat(())))
    lengths = list(map(len, values))
    if is_one_stamp and lengths.count(lengths[0]) == count and count <= _TEMPLATE_RECORDS_MAX:
        parts: list[bytes] = [b""] * (2 * count)
        parts[0::2] = _fronts(lengths[0], 1 << (count - 1).bit_length())[:count]
        parts[1::2] = values
    else:
        parts = _five_columns([stamp - base for stamp in stamps], lengths, values)
    parts.append(b"\0")
    return b"".join(parts)


def _five_columns(stamp_deltas: list[int], lengths: list[int], values: Sequence[bytes]) -> list[bytes]:
    """For each record: its length, its timestamp delta behind the attributes, its place, its value's length, its value.
    The empty headers at the end of each stand before the next one's length."""
    parts: list[bytes] = [b""] * (5 * len(values))
    parts[1::5] = map(_STAMP_DELTAS.__getitem__, stamp_deltas)
    parts[3::5] = map(_VALUE_LENGTHS.__getitem__, lengths)
    parts[4::5] = values
    begin = 0
    for size, end in enumerate(_SPAN_ENDS, start=1):
        end = min(end, len(values))
        parts[5 * begin : 5 * end : 5] = map(_RECORD_LENGTHS[size].__getitem__, lengths[begin:end])
        parts[2 + 5 * begin : 2 + 5 * end : 5] = map(varint, range(begin, end))
        begin = end
        if begin == len(values):
            break
    parts[0] = parts[0][1:]  # nothing stands before the first
    return parts


class _VarintTable(dict[int, bytes]):
    """number -> bytes around its varint. Bounded: a full table is forgotten and learned again."""

    def __init__(self, before: bytes, more: int = 0, after: bytes = b"") -> None:
        super().__init__()
        self._before, self._more, self._after = before, more, after

    def __missing__(self, number: int) -> bytes:
        if len(self) >= _KEPT_LENGTHS_MAX:
            self.clear()
        made = self[number] = b"".join((self._before, varint(self._body(number)), self._after))
        return made

    def _body(self, number: int) -> int:
        return number


class _RecordLengths(_VarintTable):
    """Length of a value -> that of its record, whose place takes `more` bytes, behind the headers of the one before."""

    def _body(self, number: int) -> int:
        # attributes, timestamp delta, place, no key, the value's length, the value, no headers
        return 4 + self._more + len(varint(number)) + number


_STAMP_DELTAS: Final = _VarintTable(b"\0")
_VALUE_LENGTHS: Final = _VarintTable(_NULL)
_RECORD_LENGTHS: Final = [_RecordLengths(b"\0", more=size) for size in range(len(_SPAN_ENDS) + 1)]


@lru_cache(maxsize=64)
def _fronts(length: int, count: int) -> tuple[bytes, ...]:
    """What stands before each value when all are this long and have the first timestamp: the end of the record before,
    and the record's own fields up to its value."""
    fronts: list[bytes] = []
    tail = _VALUE_LENGTHS[length]
    for size, end in enumerate(_SPAN_ENDS, start=1):
        head = _RECORD_LENGTHS[size][length] + b"\0\0"
        fronts += [head + varint(delta) + tail for delta in range(len(fronts), min(end, count))]
    fronts[0] = fronts[0][1:]
    return tuple(fronts)


def _write_bytes(out: bytearray, value: bytes | None) -> None:
    if value is None:
        out += _NULL
    else:
        out += varint(len(value))
        out += value


def _write_row(
    out: bytearray,
    offset_delta: int,
    timestamp_delta_ms: int,
    key: bytes | None,
    value: bytes | None,
    headers: Sequence[Header],
) -> None:
    record = bytearray(1)
    record += varint(timestamp_delta_ms)
    record += varint(offset_delta)
    _write_bytes(record, key)
    _write_bytes(record, value)
    record += varint(len(headers))
    for name, content in headers:
        _write_bytes(record, name.encode())
        _write_bytes(record, content)
    out += varint(len(record))
    out += record
