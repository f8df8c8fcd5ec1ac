"""Protobuf: message types as Arrow types, and decoder of messages (Protocol Buffers, binary encoding).

* message -> struct; repeated -> array; map -> map; enum -> string (its number as text, if it has no name)
* uint32, fixed32 -> bigint; uint64, fixed64 -> decimal(20,0): the unsigned values fit
* google.protobuf.Timestamp -> timestamp, truncated to microseconds; all other messages are structs
* a field without presence that is not in the encoding has its default value, as in every Protobuf library; a field with
  presence (`optional`, `oneof`, messages) is null
* a field of a message without fields has no column
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
from google.protobuf import message_factory
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError

from mansio.host.clock import UNIX_EPOCH
from mansio.schemas.column_types import (
    DEPTH_MAX,
    FIELDS_MAX,
    TIMESTAMP,
    check_size,
    list_type,
    map_type,
    struct_type,
)
from mansio.serde.errors import MalformedValue, UnsupportedSchema, reason

if TYPE_CHECKING:
    from collections.abc import Callable

    from google.protobuf import descriptor_pool

    Convert = Callable[[Any], Any]

TIMESTAMP_MESSAGE: Final = "google.protobuf.Timestamp"

_TYPES: Final = {
    FieldDescriptor.TYPE_DOUBLE: pa.float64(),
    FieldDescriptor.TYPE_FLOAT: pa.float32(),
    FieldDescriptor.TYPE_INT64: pa.int64(),
    FieldDescriptor.TYPE_SINT64: pa.int64(),
    FieldDescriptor.TYPE_SFIXED64: pa.int64(),
    FieldDescriptor.TYPE_UINT64: pa.decimal128(20, 0),
    FieldDescriptor.TYPE_FIXED64: pa.decimal128(20, 0),
    FieldDescriptor.TYPE_INT32: pa.int32(),
    FieldDescriptor.TYPE_SINT32: pa.int32(),
    FieldDescriptor.TYPE_SFIXED32: pa.int32(),
    FieldDescriptor.TYPE_UINT32: pa.int64(),
    FieldDescriptor.TYPE_FIXED32: pa.int64(),
    FieldDescriptor.TYPE_BOOL: pa.bool_(),
    FieldDescriptor.TYPE_STRING: pa.string(),
    FieldDescriptor.TYPE_BYTES: pa.binary(),
    FieldDescriptor.TYPE_ENUM: pa.string(),
}


class ProtobufSchema:
    """A message type: its column type, and decoding of messages."""

    def __init__(self, pool: descriptor_pool.DescriptorPool, message_name: str) -> None:
        """Raise `UnsupportedSchema` if the pool does not have the message, or a column cannot represent it."""
        try:
            descriptor = pool.FindMessageTypeByName(message_name)
        except KeyError:
            raise UnsupportedSchema(f"the descriptors have no message {message_name}") from None
        self.message_name = message_name
        compiler = _Compiler()
        kind, convert = compiler.message(descriptor)
        if kind is None or convert is None:
            raise UnsupportedSchema(f"the message {message_name} has no fields")
        self.type: pa.DataType = check_size(kind)
        self._convert = convert
        self._class = message_factory.GetMessageClass(descriptor)

    def decode(self, value: bytes) -> Any:
        """Decode a message. Raises `MalformedValue`."""
        try:
            message = self._class.FromString(value)
        except (DecodeError, ValueError, TypeError) as error:
            raise MalformedValue(f"the value is no {self.message_name} message: {reason(error)}") from error
        try:
            return self._convert(message)
        except (OverflowError, ValueError) as error:
            raise MalformedValue(f"the {self.message_name} message is invalid: {reason(error)}") from error


class _Compiler:
    """Visitor of a message type: column types and conversions to Python objects."""

    def __init__(self) -> None:
        self._done: dict[str, tuple[pa.DataType | None, Convert | None]] = {}
        self._open: list[str] = []
        self._fields = 0

    def message(self, descriptor: Any) -> tuple[pa.DataType | None, Convert | None]:
        """Column type and conversion of a message; (None, None) if it has no fields."""
        name = descriptor.full_name
        if name == TIMESTAMP_MESSAGE:
            return TIMESTAMP, _to_timestamp
        if name in self._open:
            raise UnsupportedSchema(
                f"the message {name} contains itself, and a column type cannot: decode it in a function of your own"
            )
        if len(self._open) >= DEPTH_MAX:
            raise UnsupportedSchema(f"the schema is nested more than {DEPTH_MAX} levels deep")
        if name not in self._done:
            self._open.append(name)
            self._done[name] = self._message(descriptor)
            self._open.pop()
        return self._done[name]

    def _message(self, descriptor: Any) -> tuple[pa.DataType | None, Convert | None]:
        fields: list[tuple[str, pa.DataType]] = []
        getters: list[tuple[str, bool, Convert | None]] = []
        for one in descriptor.fields:
            self._fields += 1
            if self._fields > FIELDS_MAX:
                raise UnsupportedSchema(f"the schema has more than {FIELDS_MAX} fields")
            kind, convert = self._field(one)
            if kind is not None:
                fields.append((one.name, kind))
                getters.append((one.name, one.has_presence, convert))
        if not fields:
            return None, None

        def to_dict(message: Any) -> dict[str, Any]:
            found: dict[str, Any] = {}
            for name, has_presence, convert in getters:
                if not has_presence or message.HasField(name):
                    value = getattr(message, name)
                    found[name] = value if convert is None else convert(value)
            return found

        return struct_type(fields), to_dict

    def _field(self, one: Any) -> tuple[pa.DataType | None, Convert | None]:
        if _is_map(one):
            fields = one.message_type.fields_by_name
            key_kind, _ = self._single(fields["key"])
            kind, convert = self._single(fields["value"])
            if kind is None or key_kind is None:
                return None, None
            return map_type(key_kind, kind), _map_converter(convert)
        kind, convert = self._single(one)
        if kind is None or not _is_repeated(one):
            return kind, convert
        return list_type(kind), _list_converter(convert)

    def _single(self, one: Any) -> tuple[pa.DataType | None, Convert | None]:
        if one.message_type is not None:
            return self.message(one.message_type)
        if one.enum_type is not None:
            names = one.enum_type.values_by_number
            return pa.string(), lambda number: names[number].name if number in names else str(number)
        return _TYPES[one.type], None


def _is_repeated(one: Any) -> bool:
    return (
        bool(one.is_repeated) if hasattr(one, "is_repeated") else one.label == FieldDescriptor.LABEL_REPEATED
    )


def _is_map(one: Any) -> bool:
    return one.message_type is not None and bool(one.message_type.GetOptions().map_entry)


def _list_converter(convert: Convert | None) -> Convert:
    if convert is None:
        return list
    return lambda values: [convert(one) for one in values]


def _map_converter(convert: Convert | None) -> Convert:
    if convert is None:
        return lambda values: list(values.items())
    return lambda values: [(key, convert(one)) for key, one in values.items()]


def _to_timestamp(message: Any) -> datetime:
    """Convert a google.protobuf.Timestamp. Nanoseconds are cut to microseconds, the resolution of Spark's and Iceberg's
    timestamps. Raises `OverflowError`."""
    return UNIX_EPOCH + timedelta(seconds=message.seconds, microseconds=message.nanos // 1000)
