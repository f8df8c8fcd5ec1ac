"""Frames: how a record names the schema of its key or value.

A frame is one of two:

* in the value: a byte 0 and the id of the schema (4 bytes, big endian), or a byte 1 and its GUID (16 bytes); the
  encoded value follows;
* in a header of the record, `__key_schema_id` or `__value_schema_id`: the same bytes; the value is the encoded value
  alone. Clients write a GUID there.

For Protobuf the indexes of the message follow the id or the GUID: their number and each of them as zigzag varints. A
single 0 stands for the first message of the file.

Source: Confluent's documentation of the wire format, and the serializers of confluent-kafka.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple
from uuid import UUID

from mansio.serde.errors import MalformedValue, NotFramed
from mansio.wire.batch.schema_frames import (
    GUID_FRAME_BYTES,
    GUID_MAGIC,
    ID_FRAME_BYTES,
    ID_MAGIC,
    KEY_SCHEMA_ID_NAME,
    VALUE_SCHEMA_ID_NAME,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

KEY_HEADER: Final = KEY_SCHEMA_ID_NAME.decode()
VALUE_HEADER: Final = VALUE_SCHEMA_ID_NAME.decode()
MESSAGE_INDEXES_MAX: Final = 64
"""Maximum depth of a nested Protobuf message."""
_VARINT_SHIFT_MAX: Final = 35

SchemaKey = int | UUID
"""What a frame names a schema by: its id, or its GUID."""


class Frame(NamedTuple):
    """The schema of a key or value, and its encoding. `in_header`: what follows the schema in the header of the record;
    None if the frame is in the value. `rest`: the value, without the frame if that is in the value."""

    schema: SchemaKey
    rest: bytes
    in_header: bytes | None = None

    def payload(self) -> bytes:
        """Return the encoded value of a format without message indexes: Avro or JSON. Raises `MalformedValue`."""
        if self.in_header:
            raise MalformedValue(
                "the header with the schema of the value has more bytes than a GUID or an id"
            )
        return self.rest

    def message(self) -> tuple[tuple[int, ...], bytes]:
        """Return the indexes of a Protobuf message, and its encoding. Raises `MalformedValue`."""
        if self.in_header is None:
            return split_message_indexes(self.rest)
        indexes, after = split_message_indexes(self.in_header)
        if after:
            raise MalformedValue(
                "the header with the schema of the value has bytes after the message indexes"
            )
        return indexes, self.rest


def header_name(*, is_key: bool) -> str:
    """Return the name of the header with the schema of the key or the value."""
    return KEY_HEADER if is_key else VALUE_HEADER


def find_frame(value: bytes, headers: Iterable[tuple[str, bytes | None]], *, is_key: bool) -> Frame:
    """Return the frame of a key or value: that of its header, if the record has one (the first counts), otherwise that
    in the value. Raises `NotFramed`, `MalformedValue`.
    """
    wanted = header_name(is_key=is_key)
    for name, content in headers:
        if name == wanted and content is not None:
            schema, after = split_schema_key(content)
            return Frame(schema, value, after)
    return Frame(*split_schema_key(value))


def split_schema_key(data: bytes) -> tuple[SchemaKey, bytes]:
    """Return the id or the GUID at the begin of a framed value or of a header, and what follows. Raises `NotFramed`."""
    magic = data[0] if data else None
    if magic == ID_MAGIC and len(data) >= ID_FRAME_BYTES:
        return int.from_bytes(data[1:ID_FRAME_BYTES], "big"), data[ID_FRAME_BYTES:]
    if magic == GUID_MAGIC and len(data) >= GUID_FRAME_BYTES:
        return UUID(bytes=bytes(data[1:GUID_FRAME_BYTES])), data[GUID_FRAME_BYTES:]
    raise NotFramed("the value is not in the schema registry's wire format (byte 0 and a schema id)")


def schema_key_bytes(schema: SchemaKey) -> bytes:
    """Return the frame that names a schema by its id or GUID. Raises `ValueError` for an id that is none."""
    if isinstance(schema, UUID):
        return bytes((GUID_MAGIC,)) + schema.bytes
    if not 0 <= schema < 1 << 32:
        raise ValueError(f"{schema} is no id of a schema")
    return bytes((ID_MAGIC,)) + schema.to_bytes(4, "big")


# -- indexes of a Protobuf message --------


def split_message_indexes(data: bytes) -> tuple[tuple[int, ...], bytes]:
    """Return the indexes of a Protobuf message in its file, and what follows. Raises `MalformedValue`."""
    count, position = _read_varint(data, 0)
    if count == 0:
        return (0,), data[position:]
    if not 0 < count <= MESSAGE_INDEXES_MAX:
        raise MalformedValue(f"the value has {count} Protobuf message indexes")
    indexes = []
    for _ in range(count):
        one, position = _read_varint(data, position)
        indexes.append(one)
    return tuple(indexes), data[position:]


def message_indexes_bytes(indexes: Sequence[int]) -> bytes:
    """Return the encoded indexes of a Protobuf message. Raises `ValueError` if there are none, or too many."""
    if not 0 < len(indexes) <= MESSAGE_INDEXES_MAX:
        raise ValueError(f"{len(indexes)} are no indexes of a Protobuf message")
    if tuple(indexes) == (0,):
        return b"\0"
    return b"".join(map(_varint, (len(indexes), *indexes)))


def _read_varint(data: bytes, position: int) -> tuple[int, int]:
    number = shift = 0
    while True:
        if position >= len(data) or shift > _VARINT_SHIFT_MAX:
            raise MalformedValue("the value ends in the indexes of its Protobuf message")
        byte = data[position]
        position += 1
        number |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return (number >> 1) ^ -(number & 1), position


def _varint(number: int) -> bytes:
    left = number << 1 if number >= 0 else ~(number << 1)
    found = bytearray()
    while left > 0x7F:
        found.append(left & 0x7F | 0x80)
        left >>= 7
    found.append(left)
    return bytes(found)
