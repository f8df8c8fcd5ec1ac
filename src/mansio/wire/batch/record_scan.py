"""Where the records of an opened batch lie: offset, key, tombstone or not, without making an object of each.

Compaction looks at every record of a log and keeps most of them as they are, so it wants places in the bytes, not
values. Only what it needs is read: of a record's value only whether there is one, of its headers nothing.

Always true: a place that is handed out lies within the bytes, places follow each other without a gap and their offset
deltas grow; whatever breaks that is `InvalidRecord`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from mansio.errors import InvalidRecord
from mansio.wire.batch.varints import read_varint, varint

if TYPE_CHECKING:
    from collections.abc import Iterator


class RecordLocation(NamedTuple):
    """One record: `data[start:end]`, of which `data[rest:end]` begins after the timestamp delta.

    `key` is None for a record without one.
    """

    start: int
    rest: int
    end: int
    offset_delta: int
    timestamp_delta_ms: int
    key: bytes | None
    is_tombstone: bool


def scan_records(data: bytes, record_count: int, last_offset_delta: int) -> Iterator[RecordLocation]:
    """The places of all records of one opened batch. Raises `InvalidRecord`."""
    position = 0
    last_delta = -1
    try:
        for _ in range(record_count):
            place = _place(data, position)
            if not last_delta < place.offset_delta <= last_offset_delta:
                raise InvalidRecord(
                    f"offset delta {place.offset_delta} after {last_delta} of {last_offset_delta}"
                )
            last_delta = place.offset_delta
            position = place.end
            yield place
    except IndexError as error:
        raise InvalidRecord("a record is longer than its batch") from error
    if position != len(data):
        raise InvalidRecord(f"{len(data) - position} bytes after the last record")


def with_timestamp_delta(data: bytes, place: RecordLocation, timestamp_delta_ms: int) -> bytes:
    """The same record with another timestamp delta."""
    delta = varint(timestamp_delta_ms)
    length = 1 + len(delta) + place.end - place.rest  # one byte of attributes, unused
    return b"".join((varint(length), b"\0", delta, data[place.rest : place.end]))


def _place(data: bytes, start: int) -> RecordLocation:
    length, position = read_varint(data, start)
    end = position + length
    if length < 0 or end > len(data):
        raise InvalidRecord(f"a record of {length} bytes with {len(data) - position} left in the batch")
    timestamp_delta, rest = read_varint(data, position + 1)
    offset_delta, position = read_varint(data, rest)
    key: bytes | None = None
    key_length = data[position]
    if key_length < 0x80 and not key_length & 1:  # one byte, not negative: most keys
        position += 1
        key = data[position : position + (key_length >> 1)]
        position += key_length >> 1
    else:
        key_length, position = read_varint(data, position)
        if key_length >= 0:
            key = data[position : position + key_length]
            position += key_length
        elif key_length != -1:
            raise InvalidRecord(f"a length of {key_length} in a record")
    value_length, position = read_varint(data, position)
    if value_length < -1 or position + max(value_length, 0) >= end:  # the count of headers follows
        raise InvalidRecord("a record's length does not match its content")
    return RecordLocation(start, rest, end, offset_delta, timestamp_delta, key, value_length == -1)
