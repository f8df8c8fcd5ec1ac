"""Record batches, format 2: the closed parcel that travels from socket to disk to socket.

Two worlds meet here. The broker's hot path looks only at the 61-byte header (`read_header`, `check_batch`,
`iterate_batches`, `with_log_append_time`) and costs the same for one record as for a thousand. Whoever has records
(the client, internal topics) makes a batch of them with `build_batch`, and opens one with `record_reader`.

Layout (big endian), KIP-98 and KIP-32; the CRC-32C covers everything from the attributes on, so that a broker
can set base offset and leader epoch without touching it:
   0 base offset 8 | 8 batch length 4 | 12 leader epoch 4 | 16 magic 1 | 17 CRC-32C 4 | 21 attributes 2
  23 last offset delta 4 | 27 base timestamp 8 | 35 max timestamp 8 | 43 producer id 8 | 51 producer epoch 2
  53 base sequence 4 | 57 record count 4 | 61 records (compressed as the attributes say)

Always true: nothing here keeps a reference to the caller's buffer.
"""

from __future__ import annotations

from enum import IntEnum
from struct import Struct
from typing import TYPE_CHECKING, Final, NamedTuple

from crc32c import crc32c

from mansio.errors import CorruptMessage, InvalidRecord, UnsupportedCompression, UnsupportedMessageFormat
from mansio.wire.batch.compression import Codec, compress
from mansio.wire.batch.record_writer import write_rows, write_values

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mansio.ports import Buffer

    Header = tuple[str, bytes | None]
    NewRecord = tuple[int, bytes | None, bytes | None, Sequence[Header]]

HEADER_BYTES: Final = 61
LENGTH_OFFSET: Final = 12
"""Bytes of a batch that its own length field does not count."""
MAGIC: Final = 2
_MAGIC_POSITION: Final = 16
_ATTRIBUTES_POSITION: Final = 21
MIN_RECORD_BYTES: Final = 7
"""Of a record with neither key, value nor headers, with its length."""

_HEADER: Final = Struct(">qiibIhiqqqhii")
_CHECKED_FIELDS: Final = Struct(">hiqqqhii")
_FRONT: Final = Struct(">qiibI")
_CRC: Final = Struct(">I")
_ATTRIBUTES: Final = Struct(">h")
_LONG: Final = Struct(">q")
_MAX_TIMESTAMP_POSITION: Final = 35
_CRC_POSITION: Final = 17

_CODEC_MASK: Final = 0x07
_LOG_APPEND_TIME: Final = 0x08
_TRANSACTIONAL: Final = 0x10
_CONTROL: Final = 0x20
DELETE_HORIZON: Final = 0x40
"""The base timestamp is the moment from which on compaction removes the batch's tombstones (KIP-534)."""


_CODECS: Final = tuple(Codec)
_CODEC_COUNT: Final = len(_CODECS)
_GROWTH_MAX: Final = (1, 1032, 32, 256, 1 << 16)
"""By codec, how many times its input a decompressor can give (of zstd: more than it gives in practice)."""
_new_tuple: Final = tuple.__new__  # half the time of `BatchHeader._make`, which counts the fields again


class TimestampType(IntEnum):
    """Whose clock the timestamps come from (KIP-32)."""

    CREATE = 0
    LOG_APPEND = 1


class BatchHeader(NamedTuple):
    """The header of one batch, as it stands in the bytes. Timestamps are milliseconds since the epoch."""

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
        """Bytes of the whole batch."""
        return self.batch_length + LENGTH_OFFSET

    @property
    def last_offset(self) -> int:
        return self.base_offset + self.last_offset_delta

    @property
    def codec(self) -> Codec:
        """Raises `UnsupportedCompression` for the three bit patterns that name no codec."""
        number = self.attributes & _CODEC_MASK
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
    """The header at `position`, unchecked. There must be `HEADER_BYTES` bytes."""
    return BatchHeader._make(_HEADER.unpack_from(buffer, position))


def check_batch(buffer: Buffer) -> BatchHeader:
    """The header of `buffer`, which must be exactly one sound batch as a producer may send it.

    Raises `CorruptMessage` (lengths, CRC), `UnsupportedMessageFormat` (magic is not 2),
    `UnsupportedCompression`, `InvalidRecord` (counts, sequence, another batch behind the first). Whether a control
    batch is welcome here is the caller's business.
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
            raise InvalidRecord("more than one batch for a partition")  # sent again it would be no better
        raise CorruptMessage(f"a batch of {length + LENGTH_OFFSET} bytes in {size} bytes")
    if crc32c(memoryview(buffer)[_ATTRIBUTES_POSITION:]) != crc:
        raise CorruptMessage("the CRC-32C of the batch does not match")
    if attributes & _CODEC_MASK >= _CODEC_COUNT:
        raise UnsupportedCompression(f"there is no compression codec {attributes & _CODEC_MASK}")
    if count <= 0 or last_offset_delta != count - 1:
        raise InvalidRecord(f"a batch of {count} records that spans {last_offset_delta + 1} offsets")
    if count * MIN_RECORD_BYTES > (size - HEADER_BYTES) * _GROWTH_MAX[attributes & _CODEC_MASK]:
        raise InvalidRecord(f"{count} records cannot be in {size - HEADER_BYTES} bytes")
    if producer_id >= 0:
        if sequence < 0 and not attributes & _CONTROL:
            raise InvalidRecord("an idempotent batch without a sequence number")
    elif attributes & _TRANSACTIONAL:
        raise InvalidRecord("a transactional batch without a producer id")
    return _new_tuple(BatchHeader, fields)


def check_stored_batch(buffer: Buffer) -> BatchHeader:
    """The header of `buffer`, which must be exactly one sound batch as a log may hold it.

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
    if header.attributes & _CODEC_MASK >= _CODEC_COUNT:
        raise UnsupportedCompression(f"there is no compression codec {header.attributes & _CODEC_MASK}")
    if not 0 <= header.record_count <= header.last_offset_delta + 1:
        raise InvalidRecord(
            f"a batch of {header.record_count} records that spans {header.last_offset_delta + 1} offsets"
        )
    return header


def encode_batch(header: BatchHeader, body: Buffer) -> bytes:
    """The batch with this header and these (compressed) records. Its length and CRC are worked out here."""
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
    return b"".join((_FRONT.pack(header.base_offset, length, header.leader_epoch, MAGIC, crc), checked, body))


def iterate_batches(buffer: Buffer, position: int = 0) -> Iterator[tuple[int, BatchHeader]]:
    """(position, header) of each whole batch from `position` on; ends before a partial one, which fetches may
    have.

    Raises `CorruptMessage` when a length is impossible, `UnsupportedMessageFormat` for older formats.
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


def with_log_append_time(buffer: Buffer, header: BatchHeader, now_ms: int) -> bytes:
    """The header of `buffer` re-written for log-append time, to be followed by `buffer[HEADER_BYTES:]`.

    The records stay as they are: readers take the max timestamp for every one of them (KIP-32).
    """
    front = bytearray(buffer[:HEADER_BYTES])
    _ATTRIBUTES.pack_into(front, _ATTRIBUTES_POSITION, header.attributes | _LOG_APPEND_TIME)
    _LONG.pack_into(front, _MAX_TIMESTAMP_POSITION, now_ms)
    crc = crc32c(memoryview(front)[_ATTRIBUTES_POSITION:])
    crc = crc32c(memoryview(buffer)[HEADER_BYTES : header.size], crc)
    _CRC.pack_into(front, _CRC_POSITION, crc)
    return bytes(front)


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
    return _sealed(
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
    stamps: Sequence[int],
    values: Sequence[bytes],
    *,
    codec: Codec = Codec.NONE,
    producer_id: int = -1,
    producer_epoch: int = -1,
    base_sequence: int = -1,
) -> bytes:
    """`build_batch` for values without keys and headers, and the timestamp of each, in ms."""
    count = len(values)
    latest = stamps[0] if count == 1 else max(stamps)
    fields = (codec, count - 1, stamps[0], latest, producer_id, producer_epoch, base_sequence, count)
    return _sealed(write_values(stamps, values), fields, codec, 0, -1)


def _sealed(
    records: Buffer, checked_fields: tuple[int, ...], codec: Codec, base_offset: int, leader_epoch: int
) -> bytes:
    body: Buffer = records if codec == Codec.NONE else compress(codec, records)
    checked = _CHECKED_FIELDS.pack(*checked_fields)
    length = HEADER_BYTES - LENGTH_OFFSET + len(body)
    start = _FRONT.pack(base_offset, length, leader_epoch, MAGIC, crc32c(body, crc32c(checked)))
    return b"".join((start, checked, body))
