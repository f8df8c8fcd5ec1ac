"""Record batches, format 2: header, checks and encoding.

On the produce and fetch paths a broker reads only the 61-byte header of a batch (`read_header`, `check_batch`,
`iterate_batches`, `with_log_append_time`), so the cost does not depend on the number of records. Producers and internal
topics encode batches with `build_batch`; `record_reader` decodes them.

Layout (big endian), KIP-98 and KIP-32. The CRC-32C covers everything from the attributes on, so that a broker can set
base offset and leader epoch without changing it:
   0 base offset 8 | 8 batch length 4 | 12 leader epoch 4 | 16 magic 1 | 17 CRC-32C 4 | 21 attributes 2
  23 last offset delta 4 | 27 base timestamp 8 | 35 max timestamp 8 | 43 producer id 8 | 51 producer epoch 2
  53 base sequence 4 | 57 record count 4 | 61 records (compressed according to the attributes)

Invariants:
* Results keep no reference to the caller's buffer.
* `encode_value_only_records` and `encode_records` return the same bytes for the same records.
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
LOG_OVERHEAD_BYTES: Final = 12
"""Bytes of a batch that its length field does not count: base offset and length (Kafka `LOG_OVERHEAD`)."""
MAGIC: Final = 2
_MAGIC_POSITION: Final = 16
_ATTRIBUTES_POSITION: Final = 21
ATTRIBUTES_END_POSITION: Final = 23
RECORD_BYTES_MIN: Final = 7
"""Size of a record without key, value and headers, including its length field."""

_HEADER: Final = Struct(">qiibIhiqqqhii")
_FIELDS_IN_CRC_RANGE: Final = Struct(">hiqqqhii")
_FIELDS_BEFORE_CRC_RANGE: Final = Struct(">qiibI")
_CRC: Final = Struct(">I")
_ATTRIBUTES: Final = Struct(">h")
_LONG: Final = Struct(">q")
_MAX_TIMESTAMP_POSITION: Final = 35
_CRC_POSITION: Final = 17

CODEC_MASK: Final = 0x07
"""The bits of the batch attributes that contain the codec."""

_LOG_APPEND_TIME_FLAG: Final = 0x08
TRANSACTIONAL_FLAG: Final = 0x10
CONTROL_FLAG: Final = 0x20
DELETE_HORIZON_FLAG: Final = 0x40
"""Bit of the batch attributes: the base timestamp is the time from which compaction may remove the batch's tombstones
(KIP-534)."""


_CODECS: Final = tuple(Codec)
_CODEC_COUNT: Final = len(_CODECS)
_DECOMPRESSION_RATIO_MAX: Final = (1, 1032, 32, 256, 1 << 16)
"""Upper bound of the decompression ratio by codec number; the value of zstd is more than it reaches in practice."""
_new_tuple: Final = tuple.__new__  # half the time of `BatchHeader._make`


class TimestampType(IntEnum):
    """Who set the timestamps of a batch: the producer, or the leader when it appended the batch (KIP-32)."""

    CREATE = 0
    LOG_APPEND = 1


class BatchHeader(NamedTuple):
    """Decoded header of one batch. Timestamps are in milliseconds since the Unix epoch."""

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
        return self.batch_length + LOG_OVERHEAD_BYTES

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
        return TimestampType.LOG_APPEND if self.attributes & _LOG_APPEND_TIME_FLAG else TimestampType.CREATE

    @property
    def is_transactional(self) -> bool:
        return bool(self.attributes & TRANSACTIONAL_FLAG)

    @property
    def is_control(self) -> bool:
        return bool(self.attributes & CONTROL_FLAG)


def read_header(buffer: Buffer, position: int = 0) -> BatchHeader:
    """Decode the batch header at `position`, where the buffer must have `HEADER_BYTES` bytes. Nothing is checked."""
    return BatchHeader._make(_HEADER.unpack_from(buffer, position))


def check_batch(buffer: Buffer) -> BatchHeader:
    """Check that `buffer` is exactly one valid batch as producers send it, and return its header.

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
    if length + LOG_OVERHEAD_BYTES != size:
        if HEADER_BYTES <= length + LOG_OVERHEAD_BYTES <= size - HEADER_BYTES:
            check_batch(memoryview(buffer)[: length + LOG_OVERHEAD_BYTES])
            raise InvalidRecord("more than one batch for a partition")  # not retriable
        raise CorruptMessage(f"a batch of {length + LOG_OVERHEAD_BYTES} bytes in {size} bytes")
    if crc32c(memoryview(buffer)[_ATTRIBUTES_POSITION:]) != crc:
        raise CorruptMessage("the CRC-32C of the batch does not match")
    if attributes & CODEC_MASK >= _CODEC_COUNT:
        raise UnsupportedCompression(f"there is no compression codec {attributes & CODEC_MASK}")
    if count <= 0 or last_offset_delta != count - 1:
        raise InvalidRecord(f"a batch of {count} records that spans {last_offset_delta + 1} offsets")
    if count * RECORD_BYTES_MIN > (size - HEADER_BYTES) * _DECOMPRESSION_RATIO_MAX[attributes & CODEC_MASK]:
        raise InvalidRecord(f"{count} records cannot be in {size - HEADER_BYTES} bytes")
    if producer_id >= 0:
        if sequence < 0 and not attributes & CONTROL_FLAG:
            raise InvalidRecord("an idempotent batch without a sequence number")
    elif attributes & TRANSACTIONAL_FLAG:
        raise InvalidRecord("a transactional batch without a producer id")
    return _new_tuple(BatchHeader, fields)


def check_stored_batch(buffer: Buffer) -> BatchHeader:
    """Check that `buffer` is exactly one valid batch as logs contain it, and return its header.

    After compaction a batch may have fewer records than offsets, even none. Raises the same errors as `check_batch`.
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
    """Encode a batch of `header` and `body`, the compressed records. Length and CRC of the header are computed."""
    checked = _FIELDS_IN_CRC_RANGE.pack(
        header.attributes,
        header.last_offset_delta,
        header.base_timestamp_ms,
        header.max_timestamp_ms,
        header.producer_id,
        header.producer_epoch,
        header.base_sequence,
        header.record_count,
    )
    length = HEADER_BYTES - LOG_OVERHEAD_BYTES + len(body)
    crc = crc32c(body, crc32c(checked))
    return b"".join(
        (
            _FIELDS_BEFORE_CRC_RANGE.pack(header.base_offset, length, header.leader_epoch, MAGIC, crc),
            checked,
            body,
        )
    )


def iterate_batches(buffer: Buffer, position: int = 0) -> Iterator[tuple[int, BatchHeader]]:
    """(position, header) of each complete batch from `position` on; an incomplete last batch, as fetches may have, is
    left out.

    Raises `CorruptMessage` for an impossible length, `UnsupportedMessageFormat` for older formats.
    """
    size = len(buffer)
    while position + HEADER_BYTES <= size:
        header = BatchHeader._make(_HEADER.unpack_from(buffer, position))
        if header.magic != MAGIC:
            raise UnsupportedMessageFormat(f"message format {header.magic}; only 2 is accepted")
        end = position + LOG_OVERHEAD_BYTES + header.batch_length
        if header.batch_length < HEADER_BYTES - LOG_OVERHEAD_BYTES:
            raise CorruptMessage(f"a batch that claims {header.batch_length} bytes")
        if end > size:
            return
        yield position, header
        position = end


def read_stored_batches(buffer: Buffer) -> tuple[list[BatchHeader], int]:
    """(headers of all complete batches, their total size in bytes); an incomplete last batch, as fetches may have, is
    left out.

    Does the checks of `iterate_batches` and `check_stored_batch` in one pass, for followers.

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
        if length < HEADER_BYTES - LOG_OVERHEAD_BYTES:
            raise CorruptMessage(f"a batch that claims {length} bytes")
        end = position + LOG_OVERHEAD_BYTES + length
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
    """Return the header of the batch in `buffer`, changed to timestamp type LogAppendTime with `now_ms` as timestamp.

    The records stay as they are: readers use the header's max timestamp for all of them (KIP-32).
    """
    header_bytes = bytearray(buffer[:HEADER_BYTES])
    _ATTRIBUTES.pack_into(header_bytes, _ATTRIBUTES_POSITION, header.attributes | _LOG_APPEND_TIME_FLAG)
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
    encoded: Buffer | None = None,
) -> bytes:
    """Encode one batch of (timestamp_ms, key, value, headers) records, at least one, with consecutive offsets.

    `encoded`: what `encode_records` returns for the records, if it was called before."""
    if not records:
        raise ValueError("a batch needs at least one record")
    attributes = codec | (TRANSACTIONAL_FLAG if transactional else 0) | (CONTROL_FLAG if control else 0)
    base_timestamp_ms, max_timestamp_ms = records[0][0], max(record[0] for record in records)
    return _encode(
        encode_records(records) if encoded is None else encoded,
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


def build_single_record_batch(timestamp_ms: int, key: bytes | None, value: bytes | None) -> bytes:
    """Encode one uncompressed batch of one record without headers, as `build_batch` does but faster."""
    parts = (
        _NULL_LENGTH if key is None else varint(len(key)) + key,
        _NULL_LENGTH if value is None else varint(len(value)) + value,
    )
    record = b"\0\0\0%b%b\0" % parts  # attributes, timestamp and offset deltas; no headers
    fields = (0, 0, timestamp_ms, timestamp_ms, -1, -1, -1, 1)
    return _encode(varint(len(record)) + record, fields, Codec.NONE, 0, -1)


def build_value_only_batch(
    timestamps_ms: Sequence[int],
    values: Sequence[bytes],
    *,
    codec: Codec = Codec.NONE,
    producer_id: int = -1,
    producer_epoch: int = -1,
    base_sequence: int = -1,
    transactional: bool = False,
) -> bytes:
    """Encode one batch of records without key and headers, as `build_batch` does but faster."""
    count = len(values)
    latest = timestamps_ms[0] if count == 1 else max(timestamps_ms)
    attributes = codec | (TRANSACTIONAL_FLAG if transactional else 0)
    fields = (
        attributes,
        count - 1,
        timestamps_ms[0],
        latest,
        producer_id,
        producer_epoch,
        base_sequence,
        count,
    )
    return _encode(encode_value_only_records(timestamps_ms, values), fields, codec, 0, -1)


def _encode(
    records: Buffer, fields_in_crc_range: tuple[int, ...], codec: Codec, base_offset: int, leader_epoch: int
) -> bytes:
    body: Buffer = records if codec == Codec.NONE else compress(codec, records)
    checked = _FIELDS_IN_CRC_RANGE.pack(*fields_in_crc_range)
    length = HEADER_BYTES - LOG_OVERHEAD_BYTES + len(body)
    start = _FIELDS_BEFORE_CRC_RANGE.pack(
        base_offset, length, leader_epoch, MAGIC, crc32c(body, crc32c(checked))
    )
    return b"".join((start, checked, body))


# -- varints --------

_CACHED_VARINTS_MAX: Final = 1 << 14
_ONE_BYTE: Final = tuple(bytes((number,)) for number in range(0x80))


def read_varint(data: Buffer, position: int) -> tuple[int, int]:
    """(value, position after it) of a signed varint of at most 64 bits (zigzag, as in Protocol Buffers).

    Raises `InvalidRecord` for more than 64 bits, and `IndexError`, which callers convert, for bytes that end too early.
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
    """Encode `value` as a signed varint (zigzag). Results are cached, because most lengths and deltas are small
    numbers."""
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

_NULL_LENGTH: Final = varint(-1)
_OFFSET_DELTA_LIMITS: Final = (1 << 6, 1 << 13, 1 << 20, 1 << 27, 1 << 31)
"""An offset delta takes one byte if it is below the first limit, two bytes if it is below the second, and so on."""
_CACHED_LENGTHS_MAX: Final = 1 << 12
_UNIFORM_RECORDS_MAX: Final = 1 << 13
"""Uniform records of a batch whose bytes around the values come from a cached table."""


def encode_records(
    records: Iterable[NewRecord], first: int = 0, base_timestamp_ms: int | None = None
) -> bytearray:
    """Encode (timestamp_ms, key, value, headers) records. The first record's timestamp is the base timestamp.

    A batch may be encoded in parts: `first` is the position of the first record of a part in the batch, and
    `base_timestamp_ms` the base timestamp. Headers that consecutive records share (one object) are encoded once."""
    out = bytearray()
    encoded_headers: Sequence[Header] | None = None
    tail = b""
    for delta, (timestamp_ms, key, value, headers) in enumerate(records, first):
        if base_timestamp_ms is None:
            base_timestamp_ms = timestamp_ms
        if key is None and value is not None and not headers:
            deltas = (
                varint(timestamp_ms - base_timestamp_ms) + varint(delta) + _NULL_LENGTH + varint(len(value))
            )
            out += b"%b\0%b%b\0" % (varint(len(deltas) + len(value) + 2), deltas, value)
            continue
        if headers is not encoded_headers:
            encoded_headers, tail = headers, _encode_headers(headers)
        if key is None and value is not None:
            deltas = (
                varint(timestamp_ms - base_timestamp_ms) + varint(delta) + _NULL_LENGTH + varint(len(value))
            )
            out += b"%b\0%b%b%b" % (varint(len(deltas) + len(value) + 1 + len(tail)), deltas, value, tail)
        else:
            _encode_record(out, delta, timestamp_ms - base_timestamp_ms, key, value, tail)
    return out


def encode_value_only_records(timestamps_ms: Sequence[int], values: Sequence[bytes]) -> bytes | bytearray:
    """Encode records without key and headers. `timestamps_ms` and `values` have the same length.

    The bytes between the values have few different forms, so they come from small tables, and one join builds the
    result without a call or an object per record.
    """
    count, base = len(values), timestamps_ms[0]
    if count == 1:
        return b"%b%b\0" % (_value_prefixes(len(values[0]), 1)[0], values[0])
    is_one_timestamp = timestamps_ms[-1] == base and timestamps_ms.count(base) == count
    if not is_one_timestamp and (max(timestamps_ms) - base > 0x3F or min(timestamps_ms) < base):
        return encode_records(zip(timestamps_ms, repeat(None), values, repeat(())))
    lengths = list(map(len, values))
    if is_one_timestamp and lengths.count(lengths[0]) == count and count <= _UNIFORM_RECORDS_MAX:
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
    """Return the encoded records in five parts each: length, attributes and timestamp delta, offset delta, value
    length, value. The count of headers, 0, at the end of a record is in the same part as the next record's length."""
    parts: list[bytes] = [b""] * (5 * len(values))
    parts[1::5] = map(_TIMESTAMP_DELTAS.__getitem__, timestamp_deltas_ms)
    parts[3::5] = map(_VALUE_LENGTHS.__getitem__, lengths)
    parts[4::5] = values
    begin = 0
    for size, end in enumerate(_OFFSET_DELTA_LIMITS, start=1):
        end = min(end, len(values))
        parts[5 * begin : 5 * end : 5] = map(_RECORD_LENGTHS[size].__getitem__, lengths[begin:end])
        parts[2 + 5 * begin : 2 + 5 * end : 5] = map(varint, range(begin, end))
        begin = end
        if begin == len(values):
            break
    parts[0] = parts[0][1:]  # the first record has no predecessor
    return parts


class _VarintTable(dict[int, bytes]):
    """Cache: number -> `prefix`, then the varint of the number, or of `encoded(number)` if given. A full cache is
    cleared."""

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
    """Length of a record without key and headers, whose timestamp delta takes one byte."""
    return 4 + offset_delta_bytes + len(varint(value_length)) + value_length


_TIMESTAMP_DELTAS: Final = _VarintTable(b"\0")
_VALUE_LENGTHS: Final = _VarintTable(_NULL_LENGTH)
_RECORD_LENGTHS: Final = [
    _VarintTable(b"\0", partial(_record_length, size)) for size in range(len(_OFFSET_DELTA_LIMITS) + 1)
]
"""By size of the offset delta in bytes: value length -> header count 0 of the previous record, and the record's
length."""


@lru_cache(maxsize=64)
def _value_prefixes(length: int, count: int) -> tuple[bytes, ...]:
    """Return the bytes before each of `count` values, if all values have this length and all records the base
    timestamp: the last byte of the previous record, and the record's fields before its value."""
    prefixes: list[bytes] = []
    tail = _VALUE_LENGTHS[length]
    for size, end in enumerate(_OFFSET_DELTA_LIMITS, start=1):
        head = _RECORD_LENGTHS[size][length] + b"\0\0"
        prefixes += [head + varint(delta) + tail for delta in range(len(prefixes), min(end, count))]
    prefixes[0] = prefixes[0][1:]
    return tuple(prefixes)


def _append_bytes(out: bytearray, value: bytes | None) -> None:
    if value is None:
        out += _NULL_LENGTH
    else:
        out += varint(len(value))
        out += value


def _encode_record(
    out: bytearray,
    offset_delta: int,
    timestamp_delta_ms: int,
    key: bytes | None,
    value: bytes | None,
    tail: bytes,
) -> None:
    """Append a record. `tail`: its encoded headers."""
    record = bytearray(1)
    record += varint(timestamp_delta_ms)
    record += varint(offset_delta)
    _append_bytes(record, key)
    _append_bytes(record, value)
    record += tail
    out += varint(len(record))
    out += record


def _encode_headers(headers: Sequence[Header]) -> bytes:
    """Return the headers of a record with their count."""
    out = bytearray(varint(len(headers)))
    for name, content in headers:
        _append_bytes(out, name.encode())
        _append_bytes(out, content)
    return bytes(out)
