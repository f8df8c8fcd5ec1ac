"""Control records of Mansio: their keys, and batches that contain them.

The key of a control record is its version and type, 16 bits each (KIP-98). Kafka's clients skip control batches whose
type they do not know. Kafka's own types begin at 0, those of delayed records and schedules at 20001.

Invariant: control batches have the timestamp -1, so that searches by timestamp never find them.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final, NamedTuple

from mansio.errors import CorruptMessage, InvalidRecord
from mansio.wire.batch.record_batch import (
    HEADER_BYTES,
    build_batch,
    encode_batch,
    read_header,
    read_varint,
    varint,
)

if TYPE_CHECKING:
    from mansio.ports import Buffer

CONTROL_VERSION: Final = 0

_KEY: Final = struct.Struct(">hh")
_BEFORE_KEY: Final = b"\0\0\0" + varint(_KEY.size)  # attributes, timestamp and offset deltas
_NO_HEADERS: Final = b"\0"

NO_TIMESTAMP_MS: Final = -1
"""Timestamp of a record without one, as in Kafka."""

_HEADER: Final = read_header(build_batch([(NO_TIMESTAMP_MS, None, None, ())], control=True))


class ControlRecord(NamedTuple):
    """Type and value of a control record."""

    type: int
    value: memoryview


def control_key(record_type: int) -> bytes:
    """Return the key of a control record of this type."""
    return _KEY.pack(CONTROL_VERSION, record_type)


def encode_control_batch(record_type: int, value: bytes) -> bytes:
    """Encode a batch with one control record, as `build_batch` does but faster."""
    fields = b"".join((_BEFORE_KEY, control_key(record_type), varint(len(value)), value, _NO_HEADERS))
    return encode_batch(_HEADER, varint(len(fields)) + fields)


def read_control_record(batch: Buffer) -> ControlRecord | None:
    """Decode the first record of a control batch; None if its key has another version. The CRC is not checked.

    Raises `CorruptMessage`."""
    try:
        key, value = _read_first_record(memoryview(batch)[HEADER_BYTES:])
    except (IndexError, InvalidRecord) as error:
        raise CorruptMessage("the first record of a control batch cannot be decoded") from error
    if len(key) != _KEY.size:
        return None
    version, record_type = _KEY.unpack(key)
    return ControlRecord(record_type, value) if version == CONTROL_VERSION else None


def _read_first_record(data: memoryview) -> tuple[memoryview, memoryview]:
    """Key and value of the first of the uncompressed records `data`; empty if they are null."""
    _, position = read_varint(data, 0)
    position += 1  # attributes
    for _ in range(2):  # timestamp delta and offset delta
        _, position = read_varint(data, position)
    parts = []
    for _ in range(2):
        length, position = read_varint(data, position)
        end = position + max(length, 0)
        if end > len(data):
            raise InvalidRecord("a record is longer than its batch")
        parts.append(data[position:end])
        position = end
    return parts[0], parts[1]
