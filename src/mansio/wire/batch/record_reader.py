"""Decoder of the records in a batch.

`read_record_tuples` decodes a consumer's records into any type of named tuple, `read_records` into `Record`s;
`read_record_slices` decodes large batches a list at a time.
`scan_records` only locates records and their keys, for compaction, which keeps most of them unchanged.

Invariants:
* A returned record owns its bytes.
* Malformed records raise errors of `mansio.errors` and nothing else.
"""

from __future__ import annotations

from functools import lru_cache, partial
from itertools import repeat
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from mansio.errors import CorruptMessage, InvalidRecord, MessageTooLarge, UnsupportedMessageFormat
from mansio.wire.batch.compression import DECOMPRESSED_BYTES_MAX, decompress
from mansio.wire.batch.record_batch import (
    HEADER_BYTES,
    MAGIC,
    RECORD_BYTES_MIN,
    TimestampType,
    read_header,
    read_varint,
    varint,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from mansio.ports import Buffer
    from mansio.wire.batch.record_batch import BatchHeader, Header, NewRecord

    Row = TypeVar("Row", bound=tuple[Any, ...])

HEADERS_MAX: Final = 1_000_000
"""Maximum number of headers in a batch whose headers are read on append (`check_header_count`)."""

SLICE_RECORDS_MAX: Final = 16_384
"""Number of records of a batch that are decoded at a time."""

UNIFORM_RECORDS_MIN: Final = 16
_OFFSET_DELTA_LIMITS: Final = (1 << 6, 1 << 13)
"""An offset delta below the first limit takes one byte, below the second two bytes. Records with larger deltas are
decoded one by one."""
_LONG_RUN: Final = 8
"""Number of records of one length from which on `check_records` searches for the next run of them at once."""
_WALKED_RECORDS: Final = 32
"""Number of records that `check_records` reads one by one after a shorter run."""
_WINDOW_RECORDS: Final = 64
"""Number of records among which `check_records` searches for the end of a run; doubled after each run that long."""
CHECKED_RECORDS_MAX: Final = 1_000_000
"""Maximum number of records in a batch whose content is checked at produce. Their walk takes a fifth of a second; an
uncompressed batch of 1 MiB has at most 150,000."""
_SHORTEST_LENGTH: Final = 2 * (RECORD_BYTES_MIN - 1)
"""The length of the shortest record, as it is encoded."""
_NULL_KEY_LENGTH: Final = b"\x01"
_ZIGZAG_DECODED: Final = tuple((number >> 1) ^ -(number & 1) for number in range(0x80))


class Record(NamedTuple):
    """One decoded record. `timestamp_ms`: milliseconds since the Unix epoch."""

    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: tuple[Header, ...]


def decompress_batch(batch: Buffer, output_bytes_max: int | None = None) -> tuple[BatchHeader, bytes]:
    """(header, decompressed records) of one complete batch. The CRC is not checked. `output_bytes_max`: None for the
    limit up to which every reader reads (`DECOMPRESSED_BYTES_MAX`, or the size of an uncompressed batch).

    Raises `InvalidRecord` if the records take more than `output_bytes_max`, or too few bytes for the record count of
    the header; `CorruptMessage`, `UnsupportedMessageFormat`, `UnsupportedCompression`."""
    header, data = decompress_any_count(batch, output_bytes_max)
    if header.record_count * RECORD_BYTES_MIN > len(data):
        raise InvalidRecord(f"{header.record_count} records do not fit in {len(data)} bytes")
    return header, data


def decompress_any_count(batch: Buffer, output_bytes_max: int | None) -> tuple[BatchHeader, bytes]:
    """`decompress_batch` without the check of the record count: a batch with too few records can be read up to their
    end."""
    if len(batch) < HEADER_BYTES:
        raise CorruptMessage(f"{len(batch)} bytes are too few for a record batch")
    header = read_header(batch)
    if header.magic != MAGIC:
        raise UnsupportedMessageFormat(f"message format {header.magic}; only 2 is accepted")
    if not HEADER_BYTES <= header.size <= len(batch):
        raise CorruptMessage(f"a batch of {header.size} bytes in {len(batch)} bytes")
    if header.record_count < 0:
        raise InvalidRecord(f"a batch of {header.record_count} records")
    if output_bytes_max is None:
        output_bytes_max = max(DECOMPRESSED_BYTES_MAX, header.size)
    return header, decompress(header.codec, memoryview(batch)[HEADER_BYTES : header.size], output_bytes_max)


def check_content(
    batch: Buffer, header: BatchHeader, output_bytes_max: int, *, scratch: bytearray | None = None
) -> None:
    """Decompress the records of one complete batch, and check them with `check_records`. Nothing is kept.
    `scratch`: as in `decompress`.

    Raises `MessageTooLarge` for more than `CHECKED_RECORDS_MAX` records, `DecompressedTooLarge` if they take more than
    `output_bytes_max`, `DecompressionFailed`, `InvalidRecord`."""
    if header.record_count > CHECKED_RECORDS_MAX:
        raise MessageTooLarge(
            f"a compressed batch of {header.record_count} records; it may have at most {CHECKED_RECORDS_MAX}"
        )
    data = decompress(
        header.codec, memoryview(batch)[HEADER_BYTES : header.size], output_bytes_max, scratch=scratch
    )
    check_records(data, header.record_count)


def check_records(data: bytes, record_count: int) -> None:
    """Check that `data` is exactly so many records, by their lengths; what is in the records is not read.

    Raises `InvalidRecord`."""
    position, left = 0, record_count
    window = _WINDOW_RECORDS
    try:
        while left > 0:
            # Records of one length follow at the same distance: the bytes of their lengths are columns of equal bytes.
            # The window grows with the runs, so that the columns of all windows together have at most a few bytes for
            # each record.
            begin = position
            number, position = _read_number(data, begin)
            if number < _SHORTEST_LENGTH or number & 1:
                raise InvalidRecord(f"a record of {(number >> 1) ^ -(number & 1)} bytes")
            stride = position - begin + (number >> 1)
            count = min(left, window)
            end = begin + count * stride
            run = count
            for column in range(begin, position):
                found = data[column:end:stride]
                run = min(run, len(found) - len(found.lstrip(found[:1])))
            position, left = begin + run * stride, left - run
            window = 2 * window if run == count else _WINDOW_RECORDS
            if run >= _LONG_RUN:
                continue
            for _ in repeat(None, min(left, _WALKED_RECORDS)):
                number = data[position]
                if _SHORTEST_LENGTH <= number < 0x80:
                    position += 1
                elif number >= 0x80 > (second := data[position + 1]):
                    number = number & 0x7F | second << 7
                    position += 2
                else:
                    number, position = _read_number(data, position)
                if number < _SHORTEST_LENGTH or number & 1:
                    raise InvalidRecord(f"a record of {(number >> 1) ^ -(number & 1)} bytes")
                position += number >> 1
                left -= 1
    except IndexError as error:
        raise InvalidRecord("a record is longer than its batch") from error
    if position != len(data):
        raise InvalidRecord(f"{record_count} records do not take the {len(data)} bytes of the batch")


def read_records(
    batch: Buffer, *, output_bytes_max: int | None = None, decompressed: bytes | None = None
) -> list[Record]:
    """All records of one complete batch, which take at most `output_bytes_max` decompressed (None: as in
    `decompress_batch`), or are `decompressed` already. The CRC is not checked.

    Raises `InvalidRecord` or `CorruptMessage`.
    """
    slices = read_record_slices(
        batch, tuple, "", 0, output_bytes_max=output_bytes_max, decompressed=decompressed
    )
    new_record = tuple.__new__
    return [new_record(Record, row[2:]) for rows in slices for row in rows]


def read_record_tuples(
    batch: Buffer, kind: type[Row], topic: str, partition: int, *, output_bytes_max: int | None = None
) -> list[Row]:
    """`kind(topic, partition, offset, timestamp_ms, key, value, headers)` of every record of one complete batch.

    `kind` is a class of named tuples with these seven fields; creating its objects here saves a conversion per record.
    Raises the errors of `read_record_slices`.
    """
    slices = list(read_record_slices(batch, kind, topic, partition, output_bytes_max=output_bytes_max))
    return slices[0] if len(slices) == 1 else [row for rows in slices for row in rows]


def read_record_slices(
    batch: Buffer,
    kind: type[Row],
    topic: str,
    partition: int,
    *,
    output_bytes_max: int | None = None,
    records_max: int = SLICE_RECORDS_MAX,
    decompressed: bytes | None = None,
) -> Iterator[list[Row]]:
    """Yield the rows of `read_record_tuples` in lists of at most `records_max`, or one run of uniform records: the
    memory of a batch of many small records is that of its decompressed bytes and of one list.

    Records of identical layout are decoded many at a time (`read_uniform_records`); of the others, numbers of one or
    two bytes are decoded inline, and headers that equal those of the record before are decoded once. The CRC is not
    checked.

    Raises, after the last record that can be read, `InvalidRecord` if the records are inconsistent or take more than
    `output_bytes_max`, or an error of `decompress_batch`.
    """
    if decompressed is None:
        header, data = decompress_any_count(batch, output_bytes_max)
    else:
        header, data = read_header(batch), decompressed
    size, remaining = len(data), header.record_count
    base_offset, last_delta_max = header.base_offset, header.last_offset_delta
    base_ms, is_fixed = header.base_timestamp_ms, False
    if header.timestamp_type is TimestampType.LOG_APPEND:
        base_ms, is_fixed = header.max_timestamp_ms, True
    new_row = tuple.__new__  # half the time of the named tuple's own constructor
    rows: list[Row] = []
    encoded_headers: bytes | None = None
    last_headers: tuple[Header, ...] = ()
    position, last_delta = 0, -1
    while (run := read_uniform_records(data, position, last_delta + 1, remaining)) is not None:
        if last_delta + run.record_count > last_delta_max:
            break  # the loop below finds the invalid record
        offsets = range(base_offset + last_delta + 1, base_offset + last_delta + 1 + run.record_count)
        timestamps = repeat(base_ms) if is_fixed else map(base_ms.__add__, run.timestamp_deltas_ms)
        columns = zip(
            repeat(topic),
            repeat(partition),
            offsets,
            timestamps,
            repeat(None),
            run.values,
            repeat(()),
            strict=False,
        )
        rows += map(partial(new_row, kind), columns)
        position, last_delta = run.end, last_delta + run.record_count
        remaining -= run.record_count
    wrong = ""
    while not wrong:
        append = rows.append
        known = len(rows)
        try:
            for _ in range(min(remaining, max(records_max - known, 0))):
                number = data[position]
                if number < 0x80:
                    position += 1
                elif (second := data[position + 1]) < 0x80:
                    number = number & 0x7F | second << 7
                    position += 2
                else:
                    number, position = _read_number(data, position)
                end = position + ((number >> 1) ^ -(number & 1))
                if end - position < RECORD_BYTES_MIN - 1 or end > size:
                    raise InvalidRecord(
                        f"a record of {end - position} bytes with {size - position} left in the batch"
                    )
                number = data[position + 1]  # one byte of attributes, unused
                if number < 0x80:
                    position += 2
                else:
                    number, position = _read_number(data, position + 1)
                timestamp_ms = base_ms if is_fixed else base_ms + ((number >> 1) ^ -(number & 1))
                number = data[position]
                if number < 0x80:
                    position += 1
                elif (second := data[position + 1]) < 0x80:
                    number = number & 0x7F | second << 7
                    position += 2
                else:
                    number, position = _read_number(data, position)
                delta = (number >> 1) ^ -(number & 1)
                if data[position] == 1:
                    key, position = None, position + 1
                else:
                    key, position = _read_bytes(data, position)
                number = data[position]
                if number < 0x80:
                    start = position + 1
                elif (second := data[position + 1]) < 0x80:
                    number = number & 0x7F | second << 7
                    start = position + 2
                else:
                    number, start = _read_number(data, position)
                if number & 1:
                    value, position = _read_bytes(data, position)
                else:
                    position = start + (number >> 1)
                    if position > size:
                        raise InvalidRecord("a key, value or header is longer than its batch")
                    value = data[start:position]
                if data[position]:
                    start = position
                    if data[position:end] == encoded_headers:
                        headers, position = last_headers, end
                    else:
                        headers, position = _read_headers(data, position, end)
                        last_headers, encoded_headers = headers, data[start:position]
                else:
                    headers = ()
                    position += 1
                if position != end:
                    raise InvalidRecord("a record's length does not match its content")
                if not last_delta < delta <= last_delta_max:
                    raise InvalidRecord(f"offset delta {delta} after {last_delta} of {last_delta_max}")
                last_delta = delta
                append(
                    new_row(kind, (topic, partition, base_offset + delta, timestamp_ms, key, value, headers))
                )
        except InvalidRecord as error:
            wrong = error.message
        except IndexError:
            wrong = "a record is longer than its batch"
        except UnicodeDecodeError:
            wrong = "the name of a record header is not UTF-8"
        remaining -= len(rows) - known
        if not (remaining or wrong) and position != size:
            wrong = f"{size - position} bytes after the last record"
        if not remaining:
            data = b""  # a single large record: the caller has its value
        if rows or not (remaining or wrong):
            yield rows
        if not remaining:
            break
        rows = []
    if wrong:
        raise InvalidRecord(wrong)


def _read_number(data: bytes, position: int) -> tuple[int, int]:
    """Return (number, position after it) of a varint of at most 64 bits, still zigzag-encoded."""
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


def _read_bytes(data: bytes, position: int) -> tuple[bytes | None, int]:
    number, position = _read_number(data, position)
    if number & 1:
        if number != 1:
            raise InvalidRecord(f"a length of {-(number + 1 >> 1)} in a record")
        return None, position
    end = position + (number >> 1)
    if end > len(data):
        raise InvalidRecord("a key, value or header is longer than its batch")
    return data[position:end], end


def _read_headers(data: bytes, position: int, end: int) -> tuple[tuple[tuple[str, bytes | None], ...], int]:
    number, position = _read_number(data, position)
    count = (number >> 1) ^ -(number & 1)
    if count < 0 or count * 2 > end - position:
        raise InvalidRecord(f"{count} headers do not fit in {end - position} bytes")
    headers: list[tuple[str, bytes | None]] = []
    for _ in range(count):
        name, position = _read_bytes(data, position)
        if name is None:
            raise InvalidRecord("a record header without a name")
        value, position = _read_bytes(data, position)
        headers.append((str(name, "utf-8"), value))
    return tuple(headers), position


# -- single records --------


def read_record_at(data: bytes, position: int, end: int, base_timestamp_ms: int) -> NewRecord:
    """(timestamp_ms, key, value, headers) of the encoded record `data[position:end]`. Raises `InvalidRecord`."""
    try:
        length, position = read_varint(data, position)
        if length < 0 or position + length != end:
            raise InvalidRecord("a record's length does not match its location")
        timestamp_delta, position = read_varint(data, position + 1)
        _, position = read_varint(data, position)
        key, position = _read_bytes(data, position)
        value, position = _read_bytes(data, position)
        headers, position = _read_headers(data, position, end)
    except IndexError as error:
        raise InvalidRecord("a record is longer than its batch") from error
    if position != end:
        raise InvalidRecord("a record's length does not match its content")
    return base_timestamp_ms + timestamp_delta, key, value, headers


def record_bounds(data: bytes, record_count: int) -> list[int]:
    """Return the positions of the encoded records in `data`, and the end of the last one. Raises `InvalidRecord`."""
    bounds = [0]
    position = 0
    try:
        for _ in range(record_count):
            length, position = read_varint(data, position)
            position += length
            bounds.append(position)
    except IndexError as error:
        raise InvalidRecord("a record is longer than its batch") from error
    if position > len(data):
        raise InvalidRecord("a record is longer than its batch")
    return bounds


def check_header_count(data: bytes, bounds: Sequence[int], name: str) -> None:
    """Check that the encoded records between `bounds` have at most `HEADERS_MAX` headers: each takes two bytes in a
    batch, and fifty times as much when it is decoded. `name`: that of the partition, for errors.

    Raises `MessageTooLarge`, `InvalidRecord`."""
    total = 0
    try:
        for begin in bounds[:-1]:
            position = _skip_number(data, begin) + 1  # length and attributes
            position = _skip_number(data, _skip_number(data, position))  # timestamp and offset
            for _ in range(2):  # key and value
                length, position = read_varint(data, position)
                position += max(length, 0)
            total += max(read_varint(data, position)[0], 0)
    except IndexError as error:
        raise InvalidRecord("a record is longer than its batch") from error
    if total > HEADERS_MAX:
        raise MessageTooLarge(f"{name}: a batch with {total} record headers; it may have {HEADERS_MAX}")


def header_bounds(data: bytes, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield where each header of the encoded record `data[begin:end]` begins, and begin and end of its value; the value
    of a header without one begins at -1. Nothing else of the record is decoded. Raises `InvalidRecord`."""
    try:
        position = _skip_number(data, begin) + 1  # length and attributes
        position = _skip_number(data, _skip_number(data, position))  # timestamp and offset
        for _ in range(2):  # key and value
            length, position = read_varint(data, position)
            position += max(length, 0)
        count, position = read_varint(data, position)
        for _ in range(count):
            name_begin = position
            length, position = read_varint(data, position)
            position += length
            value_length, position = read_varint(data, position)
            value_end = position + max(value_length, 0)
            if length < 0 or value_end > end:
                raise InvalidRecord("a record's length does not match its content")
            yield name_begin, position if value_length >= 0 else -1, value_end
            position = value_end
    except IndexError as error:
        raise InvalidRecord("a record is longer than its batch") from error
    if position != end:
        raise InvalidRecord("a record's length does not match its content")


def _skip_number(data: bytes, position: int) -> int:
    while data[position] >= 0x80:
        position += 1
    return position + 1


# -- uniform records --------


class UniformRecords(NamedTuple):
    """Consecutive records of the same layout, without key and headers and with values of one length, read at once: so
    many records, up to position `end`. `timestamp_deltas_ms` are relative to the base timestamp."""

    record_count: int
    end: int
    values: list[bytes]
    timestamp_deltas_ms: Iterable[int]


def read_uniform_records(data: bytes, position: int, delta: int, count: int) -> UniformRecords | None:
    """At most `count` records of identical layout, the first at `position` with offset delta `delta`; None if there are
    fewer than `UNIFORM_RECORDS_MIN`, or if their layouts differ.

    Records without key and headers whose values have equal lengths have a fixed stride, so a field that is the same in
    all of them is a column of equal bytes. Comparing these columns replaces decoding each record.
    """
    size = next((size for size, end in enumerate(_OFFSET_DELTA_LIMITS, start=1) if delta < end), 0)
    if not size:
        return None
    count = min(count, _OFFSET_DELTA_LIMITS[size - 1] - delta)
    if count < UNIFORM_RECORDS_MIN:
        return None
    try:
        length, after_length = read_varint(data, position)
        before_value = after_length + 2 + size + 1  # attributes, timestamp delta, offset delta, no key
        value_length, begin = read_varint(data, before_value)
    except (IndexError, InvalidRecord):
        return None  # the single-record loop raises the error
    stride = after_length - position + length
    end = position + count * stride
    if (
        value_length < 0
        or begin + value_length + 1 != position + stride
        or end > len(data)
        or data[position:after_length] != data[end - stride : end - stride + after_length - position]
    ):
        return None
    timestamps = data[after_length + 1 : end : stride]
    delta_positions = range(after_length + 2, after_length + 2 + size)
    same = (*range(position, after_length), *range(before_value, begin))
    if (
        max(timestamps) >= 0x80
        or data[before_value - 1 : end : stride] != _NULL_KEY_LENGTH * count
        or data[position + stride - 1 : end : stride] != bytes(count)  # no headers
        or any(data[column:end:stride] != data[column : column + 1] * count for column in same)
        or tuple(data[column:end:stride] for column in delta_positions) != _offset_delta_columns(delta, count)
    ):
        return None
    values = [data[start : start + value_length] for start in range(begin, end, stride)]
    is_one_timestamp = timestamps == timestamps[:1] * count
    first = _ZIGZAG_DECODED[timestamps[0]]
    return UniformRecords(
        count,
        end,
        values,
        repeat(first, count) if is_one_timestamp else map(_ZIGZAG_DECODED.__getitem__, timestamps),
    )


@lru_cache(maxsize=32)
def _offset_delta_columns(delta: int, count: int) -> tuple[bytes, ...]:
    """Return the encoded offset deltas from `delta` on, whose varints have equal lengths: one byte string per byte
    position."""
    varints = b"".join(map(varint, range(delta, delta + count)))
    size = len(varints) // count
    return tuple(varints[byte::size] for byte in range(size))


# -- record locations --------


class RecordLocation(NamedTuple):
    """Location of one record in the decompressed records `data`: `data[start:end]`. The fields after the timestamp
    delta are `data[after_timestamp:end]`."""

    start: int
    after_timestamp: int
    end: int
    offset_delta: int
    timestamp_delta_ms: int
    key: bytes | None
    is_tombstone: bool


def scan_records(data: bytes, record_count: int, last_offset_delta: int) -> Iterator[RecordLocation]:
    """Locations of all records in the decompressed records `data`; values and headers are not decoded.

    The locations are contiguous and their offset deltas increase. Raises `InvalidRecord`.
    """
    position = 0
    last_delta = -1
    try:
        for _ in range(record_count):
            location = _read_location(data, position)
            if not last_delta < location.offset_delta <= last_offset_delta:
                raise InvalidRecord(
                    f"offset delta {location.offset_delta} after {last_delta} of {last_offset_delta}"
                )
            last_delta = location.offset_delta
            position = location.end
            yield location
    except IndexError as error:
        raise InvalidRecord("a record is longer than its batch") from error
    if position != len(data):
        raise InvalidRecord(f"{len(data) - position} bytes after the last record")


def read_keys(batch: Buffer, *, output_bytes_max: int | None = None) -> Iterator[tuple[int, bytes | None]]:
    """Yield offset and key of each record of one complete batch; values and headers are not decoded. The CRC is not
    checked.

    Raises `InvalidRecord` if the records are inconsistent or take more than `output_bytes_max`, `CorruptMessage`."""
    # A walk of its own: one over `scan_records` takes twice as long (medians of 25 pairs of ten batches with 1,000
    # records, in three layouts: 1.9 to 2.05), and needs values that can be read.
    header, data = decompress_batch(batch, output_bytes_max)
    base_offset, last_delta_max, size = header.base_offset, header.last_offset_delta, len(data)
    position, last_delta = 0, -1
    try:
        for _ in range(header.record_count):
            number = data[position]
            if number < 0x80:
                position += 1
            elif (second := data[position + 1]) < 0x80:
                number = number & 0x7F | second << 7
                position += 2
            else:
                number, position = _read_number(data, position)
            end = position + ((number >> 1) ^ -(number & 1))
            if end - position < RECORD_BYTES_MIN - 1 or end > size:
                raise InvalidRecord(
                    f"a record of {end - position} bytes with {size - position} left in the batch"
                )
            if data[position + 1] < 0x80:  # one byte of attributes, unused, and the timestamp delta
                position += 2
            else:
                _, position = _read_number(data, position + 1)
            number = data[position]
            if number < 0x80:
                position += 1
            elif (second := data[position + 1]) < 0x80:
                number = number & 0x7F | second << 7
                position += 2
            else:
                number, position = _read_number(data, position)
            delta = (number >> 1) ^ -(number & 1)
            if not last_delta < delta <= last_delta_max:
                raise InvalidRecord(f"offset delta {delta} after {last_delta} of {last_delta_max}")
            last_delta = delta
            number = data[position]
            if number < 0x80 and not number & 1:
                key: bytes | None = data[position + 1 : position + 1 + (number >> 1)]
            else:
                key = None if number == 1 else _read_bytes(data, position)[0]
            yield base_offset + delta, key
            position = end
    except IndexError as error:
        raise InvalidRecord("a record is longer than its batch") from error


def read_group_keys(
    batch: Buffer, header_name: str = "", *, output_bytes_max: int | None = None
) -> Iterator[tuple[int, bytes | None]]:
    """Yield offset and group key of each record of one complete batch: the value of its last header with this name, or,
    if the name is empty, the key of the record; None without one. The CRC is not checked.

    Raises the errors of `read_keys`."""
    if not header_name:
        yield from read_keys(batch, output_bytes_max=output_bytes_max)
        return
    header, data = decompress_batch(batch, output_bytes_max)
    name = header_name.encode()
    encoded_name = varint(len(name)) + name
    has_header = encoded_name in data
    for location in scan_records(data, header.record_count, header.last_offset_delta):
        key: bytes | None = None
        if has_header:
            for name_begin, begin, end in header_bounds(data, location.start, location.end):
                if data.startswith(encoded_name, name_begin):
                    key = data[begin:end] if begin >= 0 else None
        yield header.base_offset + location.offset_delta, key


def with_timestamp_delta(data: bytes, location: RecordLocation, timestamp_delta_ms: int) -> bytes:
    """Return the encoded record at `location` of `data`, with `timestamp_delta_ms` as timestamp delta."""
    delta = varint(timestamp_delta_ms)
    length = 1 + len(delta) + location.end - location.after_timestamp  # one byte of attributes, unused
    return b"".join((varint(length), b"\0", delta, data[location.after_timestamp : location.end]))


def _read_location(data: bytes, start: int) -> RecordLocation:
    length, position = read_varint(data, start)
    end = position + length
    if length < 0 or end > len(data):
        raise InvalidRecord(f"a record of {length} bytes with {len(data) - position} left in the batch")
    timestamp_delta, after_timestamp = read_varint(data, position + 1)
    offset_delta, position = read_varint(data, after_timestamp)
    key: bytes | None = None
    key_length = data[position]
    if key_length < 0x80 and not key_length & 1:  # most keys: one byte, not negative
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
    if value_length < -1 or position + max(value_length, 0) >= end:  # the header count follows
        raise InvalidRecord("a record's length does not match its content")
    return RecordLocation(start, after_timestamp, end, offset_delta, timestamp_delta, key, value_length == -1)
