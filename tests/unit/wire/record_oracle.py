"""Reference reader of record batches for the tests: one record at a time, without fast paths."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from mansio.errors import InvalidRecord
from mansio.wire.batch.record_batch import RECORD_BYTES_MIN, TimestampType, read_varint
from mansio.wire.batch.record_reader import Record, decompress_any_count

if TYPE_CHECKING:
    from mansio.wire.batch.record_batch import BatchHeader, Header

_TOO_LONG: Final = "a key, value or header is longer than its batch"


def read_records(batch: bytes, *, output_bytes_max: int) -> list[Record]:
    """Every record of one whole batch, decompressed to at most `output_bytes_max`. The CRC is not checked here.

    Raises `InvalidRecord` or `CorruptMessage` on any inconsistency.
    """
    header, data = decompress_any_count(batch, output_bytes_max)
    fixed_timestamp_ms = (
        header.max_timestamp_ms if header.timestamp_type is TimestampType.LOG_APPEND else None
    )
    records: list[Record] = []
    position = 0
    last_delta = -1
    try:
        for _ in range(header.record_count):
            record, delta, position = _read_record(data, position, header, fixed_timestamp_ms)
            if not last_delta < delta <= header.last_offset_delta:
                raise InvalidRecord(f"offset delta {delta} after {last_delta} of {header.last_offset_delta}")
            last_delta = delta
            records.append(record)
    except IndexError as error:
        raise InvalidRecord("a record is longer than its batch") from error
    except UnicodeDecodeError as error:
        raise InvalidRecord("the name of a record header is not UTF-8") from error
    if position != len(data):
        raise InvalidRecord(f"{len(data) - position} bytes after the last record")
    return records


def _read_bytes(data: bytes, position: int) -> tuple[bytes | None, int]:
    length, position = read_varint(data, position)
    if length < 0:
        if length != -1:
            raise InvalidRecord(f"a length of {length} in a record")
        return None, position
    end = position + length
    if end > len(data):
        raise InvalidRecord(_TOO_LONG)
    return data[position:end], end


def _read_record(
    data: bytes, position: int, batch: BatchHeader, fixed_timestamp_ms: int | None
) -> tuple[Record, int, int]:
    """(record, its offset delta, position after it). Numbers of one byte, which most are, are read in place."""
    length = data[position]
    if length < 0x80:
        length, position = (length >> 1) ^ -(length & 1), position + 1
    else:
        length, position = read_varint(data, position)
    end = position + length
    if length < RECORD_BYTES_MIN - 1 or end > len(data):
        raise InvalidRecord(f"a record of {length} bytes with {len(data) - position} left in the batch")
    timestamp_delta, position = read_varint(data, position + 1)  # one byte of attributes, unused
    offset_delta, position = read_varint(data, position)
    key_length = data[position]
    if key_length == 1:
        key, position = None, position + 1
    elif key_length < 0x80 and not key_length & 1:
        start = position + 1
        position = start + (key_length >> 1)
        if position > len(data):
            raise InvalidRecord(_TOO_LONG)
        key = data[start:position]
    else:
        key, position = _read_bytes(data, position)
    value_length = data[position]
    if value_length < 0x80 and not value_length & 1:
        start = position + 1
        position = start + (value_length >> 1)
        if position > len(data):
            raise InvalidRecord(_TOO_LONG)
        value: bytes | None = data[start:position]
    else:
        value, position = _read_bytes(data, position)
    headers: tuple[Header, ...] = ()
    if data[position]:
        count, position = read_varint(data, position)
        headers, position = _read_headers(data, position, count, end)
    else:
        position += 1
    if position != end:
        raise InvalidRecord("a record's length does not match its content")
    timestamp_ms = (
        batch.base_timestamp_ms + timestamp_delta if fixed_timestamp_ms is None else fixed_timestamp_ms
    )
    return Record(batch.base_offset + offset_delta, timestamp_ms, key, value, headers), offset_delta, position


def _read_headers(data: bytes, position: int, count: int, end: int) -> tuple[tuple[Header, ...], int]:
    if count < 0 or count * 2 > end - position:
        raise InvalidRecord(f"{count} headers do not fit in {end - position} bytes")
    headers: list[Header] = []
    for _ in range(count):
        name, position = _read_bytes(data, position)
        if name is None:
            raise InvalidRecord("a record header without a name")
        value, position = _read_bytes(data, position)
        headers.append((str(name, "utf-8"), value))
    return tuple(headers), position
