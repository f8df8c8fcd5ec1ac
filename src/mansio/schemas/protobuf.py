"""Protobuf: message types as Arrow types, and decoder of messages (Protocol Buffers, binary encoding).

* message -> struct; repeated -> array; map -> map; enum -> string (its number as text, if it has no name)
* uint32, fixed32 -> bigint; uint64, fixed64 -> decimal(20,0): the unsigned values fit
* google.protobuf.Timestamp -> timestamp, truncated to microseconds; all other messages are structs
* a field without presence that is not in the encoding has its default value, as in every Protobuf library; a field with
  presence (`optional`, `oneof`, messages) is null
* a field of a message without fields has no column
"""

from __future__ import annotations

import base64
import binascii
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
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
from mansio.schemas.decoding import reason
from mansio.serde import message_indexes
from mansio.serde.errors import MalformedValue, UnsupportedSchema

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Convert = Callable[[Any], Any]

TIMESTAMP_MESSAGE: Final = "google.protobuf.Timestamp"
WELL_KNOWN_PREFIX: Final = "google/protobuf/"

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


def pool_of_descriptor_set(content: bytes) -> descriptor_pool.DescriptorPool:
    """Return the message types of a serialized `FileDescriptorSet`, as `protoc --include_imports --descriptor_set_out`
    writes it.

    Raises `UnsupportedSchema`.
    """
    files = descriptor_pb2.FileDescriptorSet()
    try:
        files.ParseFromString(content)
    except DecodeError as error:
        raise UnsupportedSchema(
            "this is no FileDescriptorSet: make one with `protoc --include_imports --descriptor_set_out=FILE`"
        ) from error
    return _pool(files.file)


def descriptor_set_of_files(files: Sequence[str]) -> bytes:
    """Return a serialized `FileDescriptorSet` of files as the schema registry returns them. Raises
    `UnsupportedSchema`.
    """
    return bytes(descriptor_pb2.FileDescriptorSet(file=_parse_files(files)).SerializeToString())


def pool_of_files(files: Sequence[str]) -> tuple[descriptor_pool.DescriptorPool, str]:
    """Return the message types of files as the schema registry returns them with `format=serialized` (base64 of a
    `FileDescriptorProto`), each after those that it imports, and the name of the last file.

    Raises `UnsupportedSchema`.
    """
    parsed = _parse_files(files)
    return _pool(parsed), parsed[-1].name


def _parse_files(files: Sequence[str]) -> list[Any]:
    parsed = []
    for text in files:
        one = descriptor_pb2.FileDescriptorProto()
        try:
            one.ParseFromString(base64.b64decode(text, validate=True))
        except (DecodeError, binascii.Error, ValueError) as error:
            raise UnsupportedSchema(
                "the schema registry has returned no serialized Protobuf schema: it must support format=serialized"
            ) from error
        parsed.append(one)
    return parsed


def message_name(pool: descriptor_pool.DescriptorPool, file: str, indexes: Sequence[int]) -> str:
    """Return the full name of the message with these indexes in a file, as in Confluent's wire format: the index among
    the file's messages, then among the nested messages of that one, and so on. Raises `MalformedValue`.
    """
    return message_indexes.message_name(pool.FindFileByName(file), indexes)


def first_message(pool: descriptor_pool.DescriptorPool, file: str) -> str:
    """Return the full name of the first message of a file. Raises `UnsupportedSchema` if it has none."""
    try:
        return message_name(pool, file, (0,))
    except MalformedValue:
        raise UnsupportedSchema(f"the Protobuf file {file} has no message") from None


def default_message(content: bytes, *, takes_first: bool = False) -> str:
    """Return the name of the only message of the last file of a `FileDescriptorSet`, or of the first one if
    `takes_first`. Nested messages do not count. Raises `UnsupportedSchema` if there is none, or several without
    `takes_first`.
    """
    files = descriptor_pb2.FileDescriptorSet()
    try:
        files.ParseFromString(content)
    except DecodeError as error:
        raise UnsupportedSchema("this is no FileDescriptorSet") from error
    last = files.file[-1] if files.file else descriptor_pb2.FileDescriptorProto()
    if not last.message_type or (len(last.message_type) > 1 and not takes_first):
        names = ", ".join(one.name for one in last.message_type) or "none"
        raise UnsupportedSchema(f"name the message of the value: {last.name or 'the file'} has {names}")
    name = last.message_type[0].name
    return f"{last.package}.{name}" if last.package else name


def _pool(files: Sequence[Any]) -> descriptor_pool.DescriptorPool:
    pool = descriptor_pool.DescriptorPool()
    known = {one.name for one in files}
    default = descriptor_pool.Default()
    try:
        for one in files:
            for name in one.dependency:
                if name.startswith(WELL_KNOWN_PREFIX) and name not in known:
                    _add_well_known(pool, default, name, known)
        for one in files:
            pool.AddSerializedFile(one.SerializeToString())
        for one in files:
            pool.FindFileByName(one.name)
    except (TypeError, KeyError, ValueError) as error:
        raise UnsupportedSchema(
            f"the Protobuf descriptors are incomplete (protoc --include_imports): {reason(error)}"
        ) from error
    return pool


def _add_well_known(
    pool: descriptor_pool.DescriptorPool, default: descriptor_pool.DescriptorPool, name: str, known: set[str]
) -> None:
    """Add a file that the Protobuf package itself brings."""
    import importlib

    try:
        importlib.import_module(name.removesuffix(".proto").replace("/", ".") + "_pb2")
    except ImportError:
        raise KeyError(name) from None
    found = descriptor_pb2.FileDescriptorProto()
    default.FindFileByName(name).CopyToProto(found)
    known.add(name)
    for one in found.dependency:
        if one not in known:
            _add_well_known(pool, default, one, known)
    pool.AddSerializedFile(found.SerializeToString())


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
