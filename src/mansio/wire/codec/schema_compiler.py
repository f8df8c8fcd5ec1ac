"""Compiler from kio's schema classes to readers and writers of Kafka messages.

kio knows every field of every version of every message. Its own readers refuse unknown tagged fields (KIP-482: skip
them) and unknown error codes, and its writers take tens of microseconds; so only its schemas are used. The tests
compare both implementations.

A reader is `(body, position) -> (value, position after it)`. Readers raise `WireError`, or let `IndexError`,
`struct.error` and `UnicodeDecodeError` pass for bytes that end too early or are not text; `messages` converts these
once per message. A writer is `(out, value) -> None` and appends to `out`; values are mappings or `Struct`s.

Invariants:
* Values are plain: int, str, bytes, bool, float, list, `Struct`. Times are ints in milliseconds, error codes ints,
  uuids 16 bytes (None for the zero uuid).
* A reader allocates at most a small multiple of the bytes it was given: a count is compared with the remaining bytes,
  a message has at most `MAX_STRUCTS` structs, and a request, which is answered item by item, at most
  `MAX_REQUEST_ITEMS` structs and other array items.
* A caller's mistake raises `TypeError` (unknown name, wrong type) or `ValueError` (a number or text that does not fit)
  with the name of the field.
"""

from __future__ import annotations

import dataclasses
import struct
from struct import Struct as Layout
from types import UnionType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, get_args, get_origin
from uuid import UUID

from mansio.errors import WireError
from mansio.wire.headers import read_unsigned_varint, unsigned_varint

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    Reader = Callable[["Body", int], tuple[Any, int]]
    Writer = Callable[[bytearray, Any], None]

ZERO_UUID: Final = bytes(16)


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
        return "Struct(" + ", ".join(f"{name}={value!r}" for name, value in self.__dict__.items()) + ")"


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """Fields of a struct in any version: name -> function returning the default, and the shapes of nested structs."""

    defaults: Mapping[str, Callable[[], Any]]
    children: Mapping[str, Shape]

    def empty(self) -> Struct:
        """A struct of this shape with default values."""
        return Struct({name: make() for name, make in self.defaults.items()})


class Field(NamedTuple):
    """kio's description of one field of one version of a struct."""

    name: str
    kafka_type: str
    is_array: bool
    entity: Any
    """kio's class of the nested struct, or None."""
    nullable: bool
    tag: int | None
    default: Any
    """A plain value; `MISSING` if the default is implied by the type."""


MISSING: Final = object()


def fields_of(entity: Any) -> list[Field]:
    """The fields of a kio schema class, in wire order."""
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
    default = MISSING if raw.default is dataclasses.MISSING else _plain(raw.default, kafka_type)
    entity = kind if dataclasses.is_dataclass(kind) else None
    return Field(name, kafka_type, is_array, entity, nullable, raw.metadata.get("tag"), default)


def _plain(value: Any, kafka_type: str) -> Any:
    """kio's default as a plain value."""
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


_IMPLIED: Final[dict[str, Any]] = {
    "string": "",
    "bytes": b"",
    "records": None,
    "bool": False,
    "uuid": None,
    "float64": 0.0,
}


def default_maker(field: Field, child: Shape | None) -> Callable[[], Any]:
    """Function that returns the default of a field, a new object if it is mutable. The default of a nullable field is
    None unless it has one."""
    if field.is_array:
        if field.default is None or (field.default is MISSING and field.nullable):
            return _none
        return list
    if child is not None:
        return _none if field.nullable else child.empty
    if field.default is not MISSING:
        value = field.default
    elif field.nullable and field.kafka_type != "datetime_i64":
        value = None
    else:
        value = _IMPLIED.get(field.kafka_type, 0)
    return lambda: value


def _none() -> None:
    return None


# -- readers --------

MAX_STRUCTS: Final = 500_000
"""Limit on the structs (topic, partition, member, ...) of one message; at most about 250 MB of Python objects."""

MAX_REQUEST_ITEMS: Final = 100_000
"""The same for a request, including numbers and texts in arrays: a group name takes one byte of a request, and a
thousand times that in the response. As many as a Fetch may have."""


_TOO_MANY_STRUCTS: Final = f"more than {MAX_STRUCTS} structs in one message"
_TOO_MANY_ITEMS: Final = f"more than {MAX_REQUEST_ITEMS} items in one request"


class Body(bytes):
    """Bytes of one message, and how many structs (of a request: items of any kind) it may still have."""

    remaining: int
    is_request: bool


def struct_reader(entity: Any, shape: Shape) -> Reader:
    """A reader of this version of a struct; fields of other versions get their defaults."""
    flexible = bool(entity.__flexible__)
    plain: list[tuple[str, Reader]] = []
    tagged: dict[int, tuple[str, Reader]] = {}
    fields = fields_of(entity)
    for field in fields:
        reader = _field_reader(field, flexible, shape.children.get(field.name))
        if field.tag is None:
            plain.append((field.name, reader))
        else:
            tagged[field.tag] = (field.name, reader)
    present = {name for name, _ in plain}
    absent = [(name, make) for name, make in shape.defaults.items() if name not in present]

    def read_struct(body: Body, position: int) -> tuple[Struct, int]:
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
    body: Body, position: int, known: dict[int, tuple[str, Reader]], values: dict[str, Any]
) -> int:
    count, position = read_unsigned_varint(body, position)
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


def _field_reader(field: Field, flexible: bool, child: Shape | None) -> Reader:
    if child is not None:
        item = struct_reader(field.entity, child)
        if field.is_array:
            return _array_reader(item, flexible, field.nullable, structs=True)
        return _nullable_struct_reader(item) if field.nullable else item
    nullable = field.nullable and not field.is_array and field.tag is None
    item = _primitive_reader(field.kafka_type, flexible, nullable)
    return _array_reader(item, flexible, field.nullable, structs=False) if field.is_array else item


def _number_reader(layout: str) -> Reader:
    number = Layout(layout)
    unpack, size = number.unpack_from, number.size

    def read_number(body: Body, position: int) -> tuple[Any, int]:
        return unpack(body, position)[0], position + size

    return read_number


def _read_bool(body: Body, position: int) -> tuple[bool, int]:
    return body[position] != 0, position + 1


def _read_uuid(body: Body, position: int) -> tuple[bytes | None, int]:
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


def _read_compact_length(body: Body, position: int) -> tuple[int, int]:
    """A compact length or count (KIP-482): the value plus one, 0 for null (returned as -1)."""
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

    def read_bytes(body: Body, position: int) -> tuple[Any, int]:
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

    def read_array(body: Body, position: int) -> tuple[list[Any] | None, int]:
        count, position = read_length(body, position)
        if count < 0:
            if count != -1 or not nullable:
                raise WireError(f"an array of {count} items")
            return None, position
        if count > len(body) - position:  # every item takes at least one byte
            raise WireError(f"an array of {count} items in a message with {len(body) - position} bytes left")
        if structs or body.is_request:
            body.remaining -= count
            if body.remaining < 0:
                raise WireError(_TOO_MANY_ITEMS if body.is_request else _TOO_MANY_STRUCTS)
        items = []
        for _ in range(count):
            value, position = item(body, position)
            items.append(value)
        return items, position

    return read_array


def _nullable_struct_reader(item: Reader) -> Reader:
    def read_nullable(body: Body, position: int) -> tuple[Struct | None, int]:
        marker = body[position]  # KIP-893: an int8, negative for null
        return (None, position + 1) if marker >= 0x80 else item(body, position + 1)

    return read_nullable


# -- writers --------

_EMPTY_TAGS: Final = b"\x00"


def struct_writer(entity: Any, shape: Shape) -> Writer:
    """A writer of this version of a struct, from a mapping or `Struct`.

    Missing fields get their default; fields of other versions are dropped. A name unknown to all versions and a value
    of the wrong type raise `TypeError`; a number or text that does not fit raises `ValueError`.
    """
    flexible = bool(entity.__flexible__)
    plain: list[tuple[str, Writer, bytes]] = []
    tagged: list[tuple[int, str, Writer, bytes]] = []
    for field in fields_of(entity):
        child = shape.children.get(field.name)
        write = _field_writer(field, flexible, child)
        default = bytearray()
        write(default, default_maker(field, child)())
        if field.tag is None:
            plain.append((field.name, write, bytes(default)))
        else:
            tagged.append((field.tag, field.name, write, bytes(default)))
    tagged.sort(key=lambda row: row[0])
    names = shape.defaults.keys()

    def write_struct(out: bytearray, given: Any) -> None:
        values: Mapping[str, Any] = given.__dict__ if type(given) is Struct else given
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


def _field_writer(field: Field, flexible: bool, child: Shape | None) -> Writer:
    if child is not None:
        item = struct_writer(field.entity, child)
        if field.is_array:
            return _array_writer(item, flexible, field.nullable)
        return _nullable_struct_writer(item) if field.nullable else item
    nullable = field.nullable and not field.is_array
    item = _primitive_writer(field.kafka_type, flexible, nullable)
    return _array_writer(item, flexible, field.nullable) if field.is_array else item


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
