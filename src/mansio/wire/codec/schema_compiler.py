"""Compiler from kio's schema classes to readers and writers of Kafka messages.

The package kio has the schema of every version of every message. Only its schemas are used: its own readers refuse
unknown tagged fields, which KIP-482 requires to be skipped, and unknown error codes, and its writers take tens of
microseconds per message. The tests compare both implementations.

A reader is `(body, position) -> (value, position after it)`. Readers raise `WireError`, or let `IndexError`,
`struct.error` and `UnicodeDecodeError` pass, for bytes that end too early or are not UTF-8; `messages` converts these
to `WireError` once per message. A writer is `(out, value) -> None` and appends to `out`; structs are mappings or
`Struct`s.

Invariants:
* Values are plain: int, str, bytes, bool, float, list, `Struct`. Times are ints in milliseconds, error codes ints,
  uuids 16 bytes (None for the zero uuid).
* A reader allocates at most a small multiple of the message's size: a count is compared with the remaining bytes, a
  message has at most `STRUCTS_MAX` structs, and a request, whose response has an entry per item, at most
  `Api.request_items_max` structs and other array items.
* A writer raises `TypeError` (unknown name, wrong type) or `ValueError` (a number or string that does not fit) with the
  name of the field.
"""

from __future__ import annotations

import dataclasses
import struct
from struct import Struct as Layout
from types import UnionType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, get_args, get_origin
from uuid import UUID

from mansio.errors import WireError
from mansio.wire.headers import read_tag_count, read_unsigned_varint, unsigned_varint

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    Reader = Callable[["MessageBytes", int], tuple[Any, int]]
    Writer = Callable[[bytearray, Any], None]

ZERO_UUID: Final = bytes(16)

SECRET_FIELDS: Final = frozenset({"auth_bytes", "password", "salt", "salted_password"})
"""Fields that `repr` hides."""


class Struct:
    """One struct of a message: its fields as attributes, with Kafka's names in snake case."""

    __slots__ = ("__dict__",)

    def __init__(self, values: dict[str, Any]) -> None:
        self.__dict__ = values

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Struct) and self.__dict__ == other.__dict__

    __hash__ = None  # type: ignore[assignment]  # mutable

    def __repr__(self) -> str:
        shown = (
            f"{name}={'hidden' if name in SECRET_FIELDS else repr(value)}"
            for name, value in self.__dict__.items()
        )
        return f"Struct({', '.join(shown)})"


@dataclasses.dataclass(frozen=True, slots=True)
class MergedSchema:
    """Fields that a struct has in any version: `defaults` maps each name to a function that returns the default,
    `children` the names of nested structs to their schemas."""

    defaults: Mapping[str, Callable[[], Any]]
    children: Mapping[str, MergedSchema]

    def default_struct(self) -> Struct:
        """Return a new struct in which every field has its default."""
        return Struct({name: make() for name, make in self.defaults.items()})


class Field(NamedTuple):
    """kio's description of one field of one version of a struct."""

    name: str
    kafka_type: str
    is_array: bool
    entity: Any
    """kio's class of the nested struct, or None."""
    is_nullable: bool
    tag: int | None
    default: Any
    """The default as a plain value; `NO_DEFAULT` if the field's type determines it (`_TYPE_DEFAULTS`)."""


NO_DEFAULT: Final = object()


def schema_fields(entity: Any) -> list[Field]:
    """Return the fields of a kio schema class, in wire order."""
    return [_field(raw) for raw in dataclasses.fields(entity)]


def _field(raw: Any) -> Field:
    kind = raw.type
    nullable = False
    if get_origin(kind) is UnionType:
        nullable = True
        (kind,) = (part for part in get_args(kind) if part is not type(None))
    is_array = get_origin(kind) is tuple
    if is_array:
        kind = get_args(kind)[0]
    kafka_type = raw.metadata.get("kafka_type", "struct")
    name = raw.name
    if kafka_type.startswith("timedelta") or (
        kafka_type == "datetime_i64" and not name.endswith("timestamp")
    ):
        name += "_ms"  # kio drops the unit
    default = NO_DEFAULT if raw.default is dataclasses.MISSING else _to_plain_value(raw.default, kafka_type)
    entity = kind if dataclasses.is_dataclass(kind) else None
    return Field(name, kafka_type, is_array, entity, nullable, raw.metadata.get("tag"), default)


def _to_plain_value(value: Any, kafka_type: str) -> Any:
    """kio's default as a plain value: times in ms, error codes as numbers."""
    if value is None:
        return -1 if kafka_type == "datetime_i64" else None
    if kafka_type.startswith("timedelta"):
        return round(value.total_seconds() * 1000)
    if kafka_type == "datetime_i64":
        return round(value.timestamp() * 1000)
    if kafka_type == "error_code":
        return int(value.value)
    if isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    return value


_TYPE_DEFAULTS: Final[dict[str, Any]] = {
    "string": "",
    "bytes": b"",
    "records": None,
    "bool": False,
    "uuid": None,
    "float64": 0.0,
}


def default_factory(field: Field, child: MergedSchema | None) -> Callable[[], Any]:
    """Return a function that returns the default of a field: a new object on each call if it is mutable. The default of
    a nullable field is None unless the schema defines another. `child`: schema of the field's struct, or None."""
    if field.is_array:
        if field.default is None or (field.default is NO_DEFAULT and field.is_nullable):
            return _none
        return list
    if child is not None:
        return _none if field.is_nullable else child.default_struct
    if field.default is not NO_DEFAULT:
        value = field.default
    elif field.is_nullable and field.kafka_type != "datetime_i64":
        value = None
    else:
        value = _TYPE_DEFAULTS.get(field.kafka_type, 0)
    return lambda: value


def _none() -> None:
    return None


# -- readers --------

STRUCTS_MAX: Final = 500_000
"""Limit on the structs (topic, partition, member, ...) of one message, which then takes at most about 250 MB."""

_TOO_MANY_STRUCTS: Final = f"more than {STRUCTS_MAX} structs in one message"
_TOO_MANY_ITEMS: Final = "more items than one request of this API may have"


class MessageBytes(bytes):
    """The bytes of one message, with `items_left`: how many more structs (in a request: array items) may be decoded."""

    items_left: int
    is_request: bool


def struct_reader(entity: Any, schema: MergedSchema) -> Reader:
    """Compile the reader of `entity`, kio's class of a struct in one version. Fields of other versions get the defaults
    of `schema`."""
    flexible = bool(entity.__flexible__)
    plain: list[tuple[str, Reader]] = []
    tagged: dict[int, tuple[str, Reader]] = {}
    fields = schema_fields(entity)
    for field in fields:
        reader = _field_reader(field, flexible, schema.children.get(field.name))
        if field.tag is None:
            plain.append((field.name, reader))
        else:
            tagged[field.tag] = (field.name, reader)
    present = {name for name, _ in plain}
    absent = [(name, make) for name, make in schema.defaults.items() if name not in present]

    def read_struct(body: MessageBytes, position: int) -> tuple[Struct, int]:
        values = {}
        for name, read in plain:
            values[name], position = read(body, position)
        for name, make in absent:
            values[name] = make()
        if flexible:
            if body[position]:
                position = _read_tagged(body, position, tagged, values)
            else:
                position += 1
        return Struct(values), position

    return read_struct


def _read_tagged(
    body: MessageBytes, position: int, known: dict[int, tuple[str, Reader]], values: dict[str, Any]
) -> int:
    count, position = read_tag_count(body, position)
    body.items_left -= count
    if body.items_left < 0:
        raise WireError(_TOO_MANY_ITEMS if body.is_request else _TOO_MANY_STRUCTS)
    for _ in range(count):
        tag, position = read_unsigned_varint(body, position)
        length, position = read_unsigned_varint(body, position)
        end = position + length
        if end > len(body):
            raise WireError("a tagged field is longer than the message")
        if tag in known:
            name, read = known[tag]
            values[name], position = read(body, position)
            if position != end:
                raise WireError(f"the tagged field {name} does not fill its length")
        position = end
    return position


def _field_reader(field: Field, flexible: bool, child: MergedSchema | None) -> Reader:
    if child is not None:
        item = struct_reader(field.entity, child)
        if field.is_array:
            return _array_reader(item, flexible, field.is_nullable, structs=True)
        return _nullable_struct_reader(item) if field.is_nullable else item
    nullable = field.is_nullable and not field.is_array and field.tag is None
    item = _primitive_reader(field.kafka_type, flexible, nullable)
    return _array_reader(item, flexible, field.is_nullable, structs=False) if field.is_array else item


def _number_reader(layout: str) -> Reader:
    number = Layout(layout)
    unpack, size = number.unpack_from, number.size

    def read_number(body: MessageBytes, position: int) -> tuple[Any, int]:
        return unpack(body, position)[0], position + size

    return read_number


def _read_bool(body: MessageBytes, position: int) -> tuple[bool, int]:
    return body[position] != 0, position + 1


def _read_uuid(body: MessageBytes, position: int) -> tuple[bytes | None, int]:
    end = position + 16
    value = body[position:end]
    if len(value) != 16:
        raise WireError("the message ends within a uuid")
    return (None if value == ZERO_UUID else value), end


_read_int16: Final = _number_reader(">h")
_read_int32: Final = _number_reader(">i")
_NUMBER_READERS: Final[dict[str, Reader]] = {
    "int8": _number_reader(">b"),
    "int16": _read_int16,
    "int32": _read_int32,
    "int64": _number_reader(">q"),
    "uint8": _number_reader(">B"),
    "uint16": _number_reader(">H"),
    "uint32": _number_reader(">I"),
    "uint64": _number_reader(">Q"),
    "float64": _number_reader(">d"),
    "error_code": _read_int16,
    "timedelta_i32": _read_int32,
    "timedelta_i64": _number_reader(">q"),
    "datetime_i64": _number_reader(">q"),
    "bool": _read_bool,
    "uuid": _read_uuid,
}


def _read_compact_length(body: MessageBytes, position: int) -> tuple[int, int]:
    """(length, position after it) of a compact length or count (KIP-482); -1 for null."""
    first = body[position]
    if first < 0x80:
        return first - 1, position + 1
    value, position = read_unsigned_varint(body, position)
    return value - 1, position


def _primitive_reader(kafka_type: str, flexible: bool, nullable: bool) -> Reader:
    number = _NUMBER_READERS.get(kafka_type)
    if number is not None:
        return number
    is_text = kafka_type == "string"
    read_length = _read_compact_length if flexible else _read_int16 if is_text else _read_int32

    def read_bytes(body: MessageBytes, position: int) -> tuple[Any, int]:
        length, position = read_length(body, position)
        if length < 0:
            if length != -1 or not nullable:
                raise WireError(f"a {kafka_type} of length {length}")
            return None, position
        end = position + length
        if end > len(body):
            raise WireError(f"a {kafka_type} is longer than the message")
        value = body[position:end]
        return (value.decode() if is_text else value), end

    return read_bytes


def _array_reader(item: Reader, flexible: bool, nullable: bool, *, structs: bool) -> Reader:
    read_length = _read_compact_length if flexible else _read_int32

    def read_array(body: MessageBytes, position: int) -> tuple[list[Any] | None, int]:
        count, position = read_length(body, position)
        if count < 0:
            if count != -1 or not nullable:
                raise WireError(f"an array of {count} items")
            return None, position
        if count > len(body) - position:  # every item takes at least one byte
            raise WireError(f"an array of {count} items in a message with {len(body) - position} bytes left")
        if structs or body.is_request:
            body.items_left -= count
            if body.items_left < 0:
                raise WireError(_TOO_MANY_ITEMS if body.is_request else _TOO_MANY_STRUCTS)
        items = []
        for _ in range(count):
            value, position = item(body, position)
            items.append(value)
        return items, position

    return read_array


def _nullable_struct_reader(item: Reader) -> Reader:
    def read_nullable(body: MessageBytes, position: int) -> tuple[Struct | None, int]:
        marker = body[position]  # KIP-893: an int8, negative for null
        return (None, position + 1) if marker >= 0x80 else item(body, position + 1)

    return read_nullable


# -- writers --------

_EMPTY_TAGS: Final = b"\x00"


def struct_writer(entity: Any, schema: MergedSchema) -> Writer:
    """Compile the writer of `entity`, kio's class of a struct in one version, for values that are mappings or
    `Struct`s.

    The writer sets missing fields to their default and drops fields of other versions. It raises `TypeError` for a name
    unknown to all versions and a value of the wrong type, `ValueError` for a number or string that does not fit.
    """
    flexible = bool(entity.__flexible__)
    plain: list[tuple[str, Writer, bytes]] = []
    tagged: list[tuple[int, str, Writer, bytes]] = []
    for field in schema_fields(entity):
        child = schema.children.get(field.name)
        write = _field_writer(field, flexible, child)
        default = bytearray()
        write(default, default_factory(field, child)())
        if field.tag is None:
            plain.append((field.name, write, bytes(default)))
        else:
            tagged.append((field.tag, field.name, write, bytes(default)))
    tagged.sort(key=lambda row: row[0])
    names = schema.defaults.keys()

    def write_struct(out: bytearray, fields_or_struct: Any) -> None:
        values: Mapping[str, Any] = (
            fields_or_struct.__dict__ if type(fields_or_struct) is Struct else fields_or_struct
        )
        if not values.keys() <= names:
            unknown = ", ".join(sorted(values.keys() - names))
            raise TypeError(f"{entity.__name__} has no field {unknown}")
        for name, write, default in plain:
            if name in values:
                _write_named(out, entity, name, write, values[name])
            else:
                out += default
        if tagged:
            _write_tagged(out, entity, tagged, values)
        elif flexible:
            out += _EMPTY_TAGS

    return write_struct


def _write_named(out: bytearray, entity: Any, name: str, write: Writer, value: Any) -> None:
    try:
        write(out, value)
    except struct.error as error:
        raise ValueError(f"{entity.__name__}.{name}: {error}: {value!r}") from error
    except AttributeError as error:
        raise TypeError(f"{entity.__name__}.{name}: {error}") from error


def _write_tagged(
    out: bytearray, entity: Any, tagged: list[tuple[int, str, Writer, bytes]], values: Mapping[str, Any]
) -> None:
    section = bytearray()
    count = 0
    for tag, name, write, default in tagged:
        if name in values:
            content = bytearray()
            _write_named(content, entity, name, write, values[name])
            if content != default:
                count += 1
                section += unsigned_varint(tag) + unsigned_varint(len(content)) + content
    out += unsigned_varint(count)
    out += section


def _field_writer(field: Field, flexible: bool, child: MergedSchema | None) -> Writer:
    if child is not None:
        item = struct_writer(field.entity, child)
        if field.is_array:
            return _array_writer(item, flexible, field.is_nullable)
        return _nullable_struct_writer(item) if field.is_nullable else item
    nullable = field.is_nullable and not field.is_array
    item = _primitive_writer(field.kafka_type, flexible, nullable)
    return _array_writer(item, flexible, field.is_nullable) if field.is_array else item


def _number_writer(layout: str) -> Writer:
    pack = Layout(layout).pack

    def write_number(out: bytearray, value: Any) -> None:
        out += pack(value)

    return write_number


def _write_bool(out: bytearray, value: Any) -> None:
    out.append(1 if value else 0)


def _write_uuid(out: bytearray, value: Any) -> None:
    if value is None:
        out += ZERO_UUID
        return
    raw = value.bytes if isinstance(value, UUID) else value
    if len(raw) != 16:
        raise ValueError(f"a uuid of {len(raw)} bytes")
    out += raw


_NUMBER_WRITERS: Final[dict[str, Writer]] = {
    "int8": _number_writer(">b"),
    "int16": _number_writer(">h"),
    "int32": _number_writer(">i"),
    "int64": _number_writer(">q"),
    "uint8": _number_writer(">B"),
    "uint16": _number_writer(">H"),
    "uint32": _number_writer(">I"),
    "uint64": _number_writer(">Q"),
    "float64": _number_writer(">d"),
    "error_code": _number_writer(">h"),
    "timedelta_i32": _number_writer(">i"),
    "timedelta_i64": _number_writer(">q"),
    "datetime_i64": _number_writer(">q"),
    "bool": _write_bool,
    "uuid": _write_uuid,
}
_SHORT_LENGTH: Final = Layout(">h")
_LENGTH: Final = Layout(">i")


def _compact_length(length: int) -> bytes:
    return unsigned_varint(length + 1)


def _primitive_writer(kafka_type: str, flexible: bool, nullable: bool) -> Writer:
    number = _NUMBER_WRITERS.get(kafka_type)
    if number is not None:
        return number
    is_text = kafka_type == "string"
    pack_length = _compact_length if flexible else _SHORT_LENGTH.pack if is_text else _LENGTH.pack

    def write_bytes(out: bytearray, value: Any) -> None:
        if value is None:
            if not nullable:
                raise TypeError(f"None where a {kafka_type} is required")
            out += pack_length(-1)
            return
        raw = value.encode() if is_text else value
        out += pack_length(len(raw))
        out += raw

    return write_bytes


def _array_writer(item: Writer, flexible: bool, nullable: bool) -> Writer:
    pack_length = _compact_length if flexible else _LENGTH.pack

    def write_array(out: bytearray, values: Any) -> None:
        if values is None:
            if not nullable:
                raise TypeError("None where an array is required")
            out += pack_length(-1)
            return
        out += pack_length(len(values))
        for value in values:
            item(out, value)

    return write_array


def _nullable_struct_writer(item: Writer) -> Writer:
    def write_nullable(out: bytearray, value: Any) -> None:
        if value is None:
            out.append(0xFF)
        else:
            out.append(1)
            item(out, value)

    return write_nullable
