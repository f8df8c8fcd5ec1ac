"""Record batches, format 2: header, checks and encoding.

A batch is opaque to the broker's hot path, which reads only the 61-byte header (`read_header`, `check_batch`,
`iterate_batches`, `with_log_append_time`), so its cost does not depend on the number of records. Producers and internal
topics encode batches with `build_batch`; `record_reader` decodes them.

Layout (big endian), KIP-98 and KIP-32. The CRC-32C covers everything from the attributes on, so that a broker can set
base offset and leader epoch without changing it:
   0 base offset 8 | 8 batch length 4 | 12 leader epoch 4 | 16 magic 1 | 17 CRC-32C 4 | 21 attributes 2
  23 last offset delta 4 | 27 base timestamp 8 | 35 max timestamp 8 | 43 producer id 8 | 51 producer epoch 2
  53 base sequence 4 | 57 record count 4 | 61 records (compressed according to the attributes)

Invariants:
* No reference to the caller's buffer is kept.
* `write_values` gives the bytes that `write_rows` gives for the same records.
"""

from __future__ import annotations

from enum import IntEnum
from functools import lru_cache, partial
from itertools import repeat
from struct import Struct
from typing import TYPE_CHECKING, Final, NamedTuple

from crc32c import crc32c

from mansio.errors import CorruptMessage, InvalidRecord, UnsupportedCompression, UnsupportedMessageFormat
from mansio.wire.batch.compression import Codec, compress

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from mansio.ports import Buffer

    Header = tuple[str, bytes | None]
    NewRecord = tuple[int, bytes | None, bytes | None, Sequence[Header]]

HEADER_BYTES: Final = 61
LENGTH_OFFSET: Final = 12
"""Bytes of a batch that its length field does not include."""
MAGIC: Final = 2
_MAGIC_POSITION: Final = 16
_ATTRIBUTES_POSITION: Final = 21
ATTRIBUTES_END: Final = 23
MIN_RECORD_BYTES: Final = 7
"""Size of a record without key, value and headers, including its length."""

_HEADER: Final = Struct(">qiibIhiqqqhii")
_CHECKED_FIELDS: Final = Struct(">hiqqqhii")
_START_FIELDS: Final = Struct(">qiibI")
_CRC: Final = Struct(">I")
_ATTRIBUTES: Final = Struct(">h")
_LONG: Final = Struct(">q")
_MAX_TIMESTAMP_POSITION: Final = 35
_CRC_POSITION: Final = 17

CODEC_MASK: Final = 0x07
"""The bits of the attributes that contain the codec."""

_LOG_APPEND_TIME: Final = 0x08
_TRANSACTIONAL: Final = 0x10
_CONTROL: Final = 0x20
DELETE_HORIZON: Final = 0x40
"""The base timestamp is the time from which compaction may remove the batch's tombstones (KIP-534)."""


_CODECS: Final = tuple(Codec)
_CODEC_COUNT: Final = len(_CODECS)
_GROWTH_MAX: Final = (1, 1032, 32, 256, 1 << 16)
"""Upper bound of each codec's decompression ratio (zstd: more than it reaches in practice)."""
_new_tuple: Final = tuple.__new__  # half the time of `BatchHeader._make`


class TimestampType(IntEnum):
    """Source of the timestamps (KIP-32)."""

    CREATE = 0
    LOG_APPEND = 1


class BatchHeader(NamedTuple):
    """Header of one batch. Timestamps are milliseconds since the epoch."""

    base_offset: int
    batch_length: int
    leader_epoch: int
    magic: int
    crc: int
    attributes: int
    last_offset_delta: int
    base_timestamp_ms: int
    max_timestamp_ms: int
    producer_id: int
    producer_epoch: int
    base_sequence: int
    record_count: int

    @property
    def size(self) -> int:
        """Size of the batch in bytes."""
        return self.batch_length + LENGTH_OFFSET

    @property
    def last_offset(self) -> int:
        return self.base_offset + self.last_offset_delta

    @property
    def codec(self) -> Codec:
        """The compression codec. Raises `UnsupportedCompression` for the three undefined values."""
        number = self.attributes & CODEC_MASK
        if number >= len(_CODECS):
            raise UnsupportedCompression(f"there is no compression codec {number}")
        return _CODECS[number]

    @property
    def timestamp_type(self) -> TimestampType:
        return TimestampType.LOG_APPEND if self.attributes & _LOG_APPEND_TIME else TimestampType.CREATE

    @property
    def is_transactional(self) -> bool:
        return bool(self.attributes & _TRANSACTIONAL)

    @property
    def is_control(self) -> bool:
        return bool(self.attributes & _CONTROL)


def read_header(buffer: Buffer, position: int = 0) -> BatchHeader:
    """The header at `position`, without checks. The buffer must have `HEADER_BYTES` bytes there."""
    return BatchHeader._make(_HEADER.unpack_from(buffer, position))


def check_batch(buffer: Buffer) -> BatchHeader:
    """The header of `buffer`, which must be exactly one valid batch as producers send it.

    Raises `CorruptMessage` (lengths, CRC), `UnsupportedMessageFormat` (magic is not 2), `UnsupportedCompression`,
    `InvalidRecord` (counts, sequence, a second batch). The caller decides whether control batches are accepted.
    """
    size = len(buffer)
    if size > _MAGIC_POSITION and buffer[_MAGIC_POSITION] != MAGIC:
        raise UnsupportedMessageFormat(f"message format {buffer[_MAGIC_POSITION]}; only 2 is accepted")
    if size < HEADER_BYTES:
        raise CorruptMessage(f"{size} bytes are too few for a record batch")
    fields = _HEADER.unpack_from(buffer)
    _, length, _, _, crc, attributes, last_offset_delta, _, _, producer_id, _, sequence, count = fields
    if length + LENGTH_OFFSET != size:
        if HEADER_BYTES <= length + LENGTH_OFFSET <= size - HEADER_BYTES:
            check_batch(memoryview(buffer)[: length + LENGTH_OFFSET])
            raise InvalidRecord("more than one batch for a partition")  # not retriable
        raise CorruptMessage(f"a batch of {length + LENGTH_OFFSET} bytes in {size} bytes")
    if crc32c(memoryview(buffer)[_ATTRIBUTES_POSITION:]) != crc:
        raise CorruptMessage("the CRC-32C of the batch does not match")
    if attributes & CODEC_MASK >= _CODEC_COUNT:
        raise UnsupportedCompression(f"there is no compression codec {attributes & CODEC_MASK}")
    if count <= 0 or last_offset_delta != count - 1:
        raise InvalidRecord(f"a batch of {count} records that spans {last_offset_delta + 1} offsets")
    if count * MIN_RECORD_BYTES > (size - HEADER_BYTES) * _GROWTH_MAX[attributes & CODEC_MASK]:
        raise InvalidRecord(f"{count} records cannot be in {size - HEADER_BYTES} bytes")
    if producer_id >= 0:
        if sequence < 0 and not attributes & _CONTROL:
            raise InvalidRecord("an idempotent batch without a sequence number")
    elif attributes & _TRANSACTIONAL:
        raise InvalidRecord("a transactional batch without a producer id")
    return _new_tuple(BatchHeader, fields)


def check_stored_batch(buffer: Buffer) -> BatchHeader:
    """The header of `buffer`, which must be exactly one valid batch as logs contain it.

    Compaction leaves batches with fewer records than offsets, down to none. Raises as `check_batch` does.
    """
    size = len(buffer)
    if size < HEADER_BYTES:
        raise CorruptMessage(f"{size} bytes are too few for a record batch")
    header = BatchHeader._make(_HEADER.unpack_from(buffer))
    if header.magic != MAGIC:
        raise UnsupportedMessageFormat(f"message format {header.magic}; only 2 is kept")
    if header.size != size:
        raise CorruptMessage(f"a batch of {header.size} bytes in {size} bytes")
    if crc32c(memoryview(buffer)[_ATTRIBUTES_POSITION:]) != header.crc:
        raise CorruptMessage("the CRC-32C of the batch does not match")
    if header.attributes & CODEC_MASK >= _CODEC_COUNT:
        raise UnsupportedCompression(f"there is no compression codec {header.attributes & CODEC_MASK}")
    if not 0 <= header.record_count <= header.last_offset_delta + 1:
        raise InvalidRecord(
            f"a batch of {header.record_count} records that spans {header.last_offset_delta + 1} offsets"
        )
    return header


def encode_batch(header: BatchHeader, body: Buffer) -> bytes:
    """The batch with this header and these (compressed) records. Its length and CRC are computed."""
    checked = _CHECKED_FIELDS.pack(
        header.attributes,
        header.last_offset_delta,
        header.base_timestamp_ms,
        header.max_timestamp_ms,
        header.producer_id,
        header.producer_epoch,
        header.base_sequence,
        header.record_count,
    )
    length = HEADER_BYTES - LENGTH_OFFSET + len(body)
    crc = crc32c(body, crc32c(checked))
    return b"".join(
        (_START_FIELDS.pack(header.base_offset, length, header.leader_epoch, MAGIC, crc), checked, body)
    )


def iterate_batches(buffer: Buffer, position: int = 0) -> Iterator[tuple[int, BatchHeader]]:
    """(position, header) of each complete batch from `position` on; ends before an incomplete one, as fetches may have.

    Raises `CorruptMessage` for an impossible length, `UnsupportedMessageFormat` for older formats.
    """
    size = len(buffer)
    while position + HEADER_BYTES <= size:
        header = BatchHeader._make(_HEADER.unpack_from(buffer, position))
        if header.magic != MAGIC:
            raise UnsupportedMessageFormat(f"message format {header.magic}; only 2 is accepted")
        end = position + LENGTH_OFFSET + header.batch_length
        if header.batch_length < HEADER_BYTES - LENGTH_OFFSET:
            raise CorruptMessage(f"a batch that claims {header.batch_length} bytes")
        if end > size:
            return
        yield position, header
        position = end


def read_stored_batches(buffer: Buffer) -> tuple[list[BatchHeader], int]:
    """(headers of all complete batches, their total size); ends before an incomplete one, as fetches may have.

    One pass with the checks of `iterate_batches` and `check_stored_batch`, for followers.

    Raises `CorruptMessage` (lengths, CRC), `UnsupportedMessageFormat`, `UnsupportedCompression`, `InvalidRecord`.
    """
    view = memoryview(buffer)
    size = len(view)
    headers: list[BatchHeader] = []
    position = 0
    while position + HEADER_BYTES <= size:
        fields = _HEADER.unpack_from(view, position)
        _, length, _, magic, crc, attributes, last_offset_delta, _, _, _, _, _, count = fields
        if magic != MAGIC:
            raise UnsupportedMessageFormat(f"message format {magic}; only {MAGIC} is kept")
        if length < HEADER_BYTES - LENGTH_OFFSET:
            raise CorruptMessage(f"a batch that claims {length} bytes")
        end = position + LENGTH_OFFSET + length
        if end > size:
            break
        if crc32c(view[position + _ATTRIBUTES_POSITION : end]) != crc:
            raise CorruptMessage("the CRC-32C of the batch does not match")
        if attributes & CODEC_MASK >= _CODEC_COUNT:
            raise UnsupportedCompression(f"there is no compression codec {attributes & CODEC_MASK}")
        if not 0 <= count <= last_offset_delta + 1:
            raise InvalidRecord(f"a batch of {count} records that spans {last_offset_delta + 1} offsets")
        headers.append(_new_tuple(BatchHeader, fields))
        position = end
    return headers, position


def with_log_append_time(buffer: Buffer, header: BatchHeader, now_ms: int) -> bytes:
    """The header of `buffer` rewritten for log-append time, to be followed by `buffer[HEADER_BYTES:]`.

    The records are unchanged: readers use the max timestamp for all of them (KIP-32).
    """
    header_bytes = bytearray(buffer[:HEADER_BYTES])
    _ATTRIBUTES.pack_into(header_bytes, _ATTRIBUTES_POSITION, header.attributes | _LOG_APPEND_TIME)
    _LONG.pack_into(header_bytes, _MAX_TIMESTAMP_POSITION, now_ms)
    crc = crc32c(memoryview(header_bytes)[_ATTRIBUTES_POSITION:])
    crc = crc32c(memoryview(buffer)[HEADER_BYTES : header.size], crc)
    _CRC.pack_into(header_bytes, _CRC_POSITION, crc)
    return bytes(header_bytes)


def build_batch(
    records: Sequence[NewRecord],
    *,
    codec: Codec = Codec.NONE,
    base_offset: int = 0,
    leader_epoch: int = -1,
    producer_id: int = -1,
    producer_epoch: int = -1,
    base_sequence: int = -1,
    transactional: bool = False,
    control: bool = False,
) -> bytes:
    """One batch of (timestamp_ms, key, value, headers) records, at least one, at consecutive offsets."""
    if not records:
        raise ValueError("a batch needs at least one record")
    attributes = codec | (_TRANSACTIONAL if transactional else 0) | (_CONTROL if control else 0)
    base_timestamp_ms, max_timestamp_ms = records[0][0], max(record[0] for record in records)
    return _encode(
        write_rows(records),
        (
            attributes,
            len(records) - 1,
            base_timestamp_ms,
            max_timestamp_ms,
            producer_id,
            producer_epoch,
            base_sequence,
            len(records),
        ),
        codec,
        base_offset,
        leader_epoch,
    )


def build_values_batch(
    timestamps_ms: Sequence[int],
    values: Sequence[bytes],
    *,
    codec: Codec = Codec.NONE,
    producer_id: int = -1,
    producer_epoch: int = -1,
    base_sequence: int = -1,
) -> bytes:
    """Fast path of `build_batch` for records without key and headers; timestamps in ms."""
    count = len(values)
    latest = timestamps_ms[0] if count == 1 else max(timestamps_ms)
    fields = (codec, count - 1, timestamps_ms[0], latest, producer_id, producer_epoch, base_sequence, count)
    return _encode(write_values(timestamps_ms, values), fields, codec, 0, -1)


def _encode(
    records: Buffer, checked_fields: tuple[int, ...], codec: Codec, base_offset: int, leader_epoch: int
) -> bytes:
    body: Buffer = records if codec == Codec.NONE else compress(codec, records)
    checked = _CHECKED_FIELDS.pack(*checked_fields)
    length = HEADER_BYTES - LENGTH_OFFSET + len(body)
    start = _START_FIELDS.pack(base_offset, length, leader_epoch, MAGIC, crc32c(body, crc32c(checked)))
    return b"".join((start, checked, body))


# -- varints --------

_CACHED_VARINTS_MAX: Final = 1 << 14
_ONE_BYTE: Final = tuple(bytes((number,)) for number in range(0x80))


def read_varint(data: bytes, position: int) -> tuple[int, int]:
    """(value, position after it) of a signed varint (zigzag, as in Protocol Buffers); at most 64 bits.

    Raises `InvalidRecord`, or `IndexError` for bytes that end too early, which the caller converts.
    """
    byte = data[position]
    position += 1
    if byte < 0x80:
        return (byte >> 1) ^ -(byte & 1), position
    value = byte & 0x7F
    shift = 7
    while True:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return (value >> 1) ^ -(value & 1), position
        shift += 7
        if shift > 63:
            raise InvalidRecord("a number in a record has more than 64 bits")


@lru_cache(maxsize=_CACHED_VARINTS_MAX)
def varint(value: int) -> bytes:
    """Encoded number. Cached, because lengths and deltas are mostly the same small numbers."""
    number = value << 1 if value >= 0 else ~(value << 1)
    if number < 0x80:
        return _ONE_BYTE[number]
    out = bytearray()
    while number >= 0x80:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


# -- encoding of records --------

_NULL: Final = varint(-1)
_SPAN_ENDS: Final = (1 << 6, 1 << 13, 1 << 20, 1 << 27, 1 << 31)
"""Offset deltas below these take one byte, two bytes, and so on."""
_CACHED_LENGTHS_MAX: Final = 1 << 12
_TEMPLATE_RECORDS_MAX: Final = 1 << 13


def write_rows(records: Iterable[NewRecord]) -> bytearray:
    """Encoded (timestamp_ms, key, value, headers) records; the first one has the base timestamp."""
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


def write_values(timestamps_ms: Sequence[int], values: Sequence[bytes]) -> bytes | bytearray:
    """Encoded records without key and headers, from equally many timestamps and values.

    Such records differ only in the value, its length, the offset delta and a few milliseconds, so the bytes around the
    values come from small tables, and one join builds the result without a call or an object per record.
    """
    count, base = len(values), timestamps_ms[0]
    if count == 1:
        return b"%b%b\0" % (_value_prefixes(len(values[0]), 1)[0], values[0])
    is_one_timestamp = timestamps_ms[-1] == base and timestamps_ms.count(base) == count
    if not is_one_timestamp and (max(timestamps_ms) - base > 0x3F or min(timestamps_ms) < base):
        return write_rows(zip(timestamps_ms, repeat(None), values, repeat(())))
    lengths = list(map(len, values))
    if is_one_timestamp and lengths.count(lengths[0]) == count and count <= _TEMPLATE_RECORDS_MAX:
        parts: list[bytes] = [b""] * (2 * count)
        parts[0::2] = _value_prefixes(lengths[0], 1 << (count - 1).bit_length())[:count]
        parts[1::2] = values
    else:
        parts = _interleave_fields([timestamp_ms - base for timestamp_ms in timestamps_ms], lengths, values)
    parts.append(b"\0")
    return b"".join(parts)


def _interleave_fields(
    timestamp_deltas_ms: list[int], lengths: list[int], values: Sequence[bytes]
) -> list[bytes]:
    """Five parts per record: its length, attributes and timestamp delta, offset delta, value length, value. The empty
    headers at the end of each record are a prefix of the next record's length."""
    parts: list[bytes] = [b""] * (5 * len(values))
    parts[1::5] = map(_TIMESTAMP_DELTAS.__getitem__, timestamp_deltas_ms)
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
    parts[0] = parts[0][1:]  # the first record has no predecessor
    return parts


class _VarintTable(dict[int, bytes]):
    """Cache of number -> prefix and varint of the number, or of `encoded(number)`. Bounded: a full table is cleared."""

    def __init__(self, prefix: bytes, encoded: Callable[[int], int] | None = None) -> None:
        super().__init__()
        self._prefix, self._encoded = prefix, encoded

    def __missing__(self, number: int) -> bytes:
        if len(self) >= _CACHED_LENGTHS_MAX:
            self.clear()
        value = number if self._encoded is None else self._encoded(number)
        self[number] = found = self._prefix + varint(value)
        return found


def _record_length(offset_delta_bytes: int, value_length: int) -> int:
    """Length of a record: attributes, timestamp delta, offset delta, no key, value length, value, no headers."""
    return 4 + offset_delta_bytes + len(varint(value_length)) + value_length


_TIMESTAMP_DELTAS: Final = _VarintTable(b"\0")
_VALUE_LENGTHS: Final = _VarintTable(_NULL)
_RECORD_LENGTHS: Final = [
    _VarintTable(b"\0", partial(_record_length, size)) for size in range(len(_SPAN_ENDS) + 1)
]
"""By size of the offset delta: value length -> empty headers of the previous record and the record's length."""


@lru_cache(maxsize=64)
def _value_prefixes(length: int, count: int) -> tuple[bytes, ...]:
    """Bytes before each value if all values have this length and all records the base timestamp: the end of the
    previous record, and the record's own fields up to its value."""
    prefixes: list[bytes] = []
    tail = _VALUE_LENGTHS[length]
    for size, end in enumerate(_SPAN_ENDS, start=1):
        head = _RECORD_LENGTHS[size][length] + b"\0\0"
        prefixes += [head + varint(delta) + tail for delta in range(len(prefixes), min(end, count))]
    prefixes[0] = prefixes[0][1:]
    return tuple(prefixes)


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
