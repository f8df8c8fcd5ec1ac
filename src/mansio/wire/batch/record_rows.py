"""Many records out of one batch, as rows of the caller's own kind: what a consumer does all day.

`record_reader.read_records` makes a `Record` of each, which a consumer would have to turn into something else right
away. Here the row is made at once. Records that are laid out alike are read many at a time (see `record_runs`); of the
others the numbers of one or two bytes, which nearly all are, are read where they stand.

Always true: accepts what `record_reader.read_records` accepts, gives the same fields, and raises the same errors.
"""

from __future__ import annotations

from functools import partial
from itertools import repeat
from typing import TYPE_CHECKING, Any, TypeVar

from mansio.errors import InvalidRecord
from mansio.wire.batch.record_batch import MIN_RECORD_BYTES, TimestampType
from mansio.wire.batch.record_reader import open_batch
from mansio.wire.batch.record_runs import read_run

if TYPE_CHECKING:
    from mansio.ports import Buffer

    Row = TypeVar("Row", bound=tuple[Any, ...])


def read_rows(
    batch: Buffer, kind: type[Row], topic: str, partition: int, *, max_output_bytes: int
) -> list[Row]:
    """A `kind(topic, partition, offset, timestamp_ms, key, value, headers)` of every record of one whole batch,
    decompressed to at most `max_output_bytes`. `kind` is a named tuple of these seven. The CRC is not checked here.

    Raises `InvalidRecord` or `CorruptMessage` on any inconsistency.
    """
    header, data = open_batch(batch, max_output_bytes)
    size, count = len(data), header.record_count
    base_offset, last_delta_max = header.base_offset, header.last_offset_delta
    start_ms, is_fixed = header.base_timestamp_ms, False
    if header.timestamp_type is TimestampType.LOG_APPEND:
        start_ms, is_fixed = header.max_timestamp_ms, True
    new_row = tuple.__new__  # half the time of the named tuple's own, which counts the fields again
    rows: list[Row] = []
    append = rows.append
    position, last_delta = 0, -1
    while (run := read_run(data, position, last_delta + 1, count - len(rows))) is not None:
        if last_delta + run.length > last_delta_max:
            break  # which record is wrong is for the loop below to say
        offsets = range(base_offset + last_delta + 1, base_offset + last_delta + 1 + run.length)
        stamps = repeat(start_ms) if is_fixed else map(start_ms.__add__, run.stamp_deltas)
        columns = zip(
            repeat(topic),
            repeat(partition),
            offsets,
            stamps,
            repeat(None),
            run.values,
            repeat(()),
            strict=False,
        )
        rows += map(partial(new_row, kind), columns)
        position, last_delta = run.end, last_delta + run.length
    try:
        for _ in range(count - len(rows)):
            number = data[position]
            if number < 0x80:
                position += 1
            elif (second := data[position + 1]) < 0x80:
                number = number & 0x7F | second << 7
                position += 2
            else:
                number, position = _long_number(data, position)
            end = position + ((number >> 1) ^ -(number & 1))
            if end - position < MIN_RECORD_BYTES - 1 or end > size:
                raise InvalidRecord(
                    f"a record of {end - position} bytes with {size - position} left in the batch"
                )
            number = data[position + 1]  # one byte of attributes, unused
            if number < 0x80:
                position += 2
            else:
                number, position = _long_number(data, position + 1)
            timestamp_ms = start_ms if is_fixed else start_ms + ((number >> 1) ^ -(number & 1))
            number = data[position]
            if number < 0x80:
                position += 1
            elif (second := data[position + 1]) < 0x80:
                number = number & 0x7F | second << 7
                position += 2
            else:
                number, position = _long_number(data, position)
            delta = (number >> 1) ^ -(number & 1)
            if data[position] == 1:
                key, position = None, position + 1
            else:
                key, position = _bytes(data, position)
            number = data[position]
            if number < 0x80:
                begin = position + 1
            elif (second := data[position + 1]) < 0x80:
                number = number & 0x7F | second << 7
                begin = position + 2
            else:
                number, begin = _long_number(data, position)
            if number & 1:
                value, position = _bytes(data, position)
            else:
                position = begin + (number >> 1)
                if position > size:
                    raise InvalidRecord("a key, value or header is longer than its batch")
                value = data[begin:position]
            if data[position]:
                headers, position = _headers(data, position, end)
            else:
                headers = ()
                position += 1
            if position != end:
                raise InvalidRecord("a record's length does not match its content")
            if not last_delta < delta <= last_delta_max:
                raise InvalidRecord(f"offset delta {delta} after {last_delta} of {last_delta_max}")
            last_delta = delta
            append(new_row(kind, (topic, partition, base_offset + delta, timestamp_ms, key, value, headers)))
    except IndexError as error:
        raise InvalidRecord("a record is longer than its batch") from error
    except UnicodeDecodeError as error:
        raise InvalidRecord("the name of a record header is not UTF-8") from error
    if position != size:
        raise InvalidRecord(f"{size - position} bytes after the last record")
    return rows


def _long_number(data: bytes, position: int) -> tuple[int, int]:
    """(number, position after it) of a varint of at most 64 bits, its sign still folded in."""
    value = shift = 0
    while True:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
        if shift > 63:
            raise InvalidRecord("a number in a record has more than 64 bits")


def _bytes(data: bytes, position: int) -> tuple[bytes | None, int]:
    number, position = _long_number(data, position)
    if number & 1:
        if number != 1:
            raise InvalidRecord(f"a length of {-(number + 1 >> 1)} in a record")
        return None, position
    end = position + (number >> 1)
    if end > len(data):
        raise InvalidRecord("a key, value or header is longer than its batch")
    return data[position:end], end


def _headers(data: bytes, position: int, end: int) -> tuple[tuple[tuple[str, bytes | None], ...], int]:
    number, position = _long_number(data, position)
    count = (number >> 1) ^ -(number & 1)
    if count < 0 or count * 2 > end - position:
        raise InvalidRecord(f"{count} headers do not fit in {end - position} bytes")
    headers: list[tuple[str, bytes | None]] = []
    for _ in range(count):
        name, position = _bytes(data, position)
        if name is None:
            raise InvalidRecord("a record header without a name")
        value, position = _bytes(data, position)
        headers.append((str(name, "utf-8"), value))
    return tuple(headers), position
