"""Readers of Kafka messages, one made from each of kio's schema classes.

A reader is `(body, position) -> (value, position after it)`. Readers raise `WireError`, or let `IndexError`,
`struct.error` and `UnicodeDecodeError` through where the bytes end too early or are not text: `messages` turns
those into `WireError` once for the whole message.

Always true: a reader never allocates more than a small multiple of the bytes it was given: a count is
compared with the bytes that are left, one message holds at most `MAX_STRUCTS` structures, and a request, for which its
sender is answered item by item, at most `MAX_REQUEST_ITEMS` structures and other items of arrays.
"""

from __future__ import annotations

from struct import Struct as Layout
from typing import TYPE_CHECKING, Any, Final

from mansio.errors import WireError
from mansio.wire.codec.schemas import ZERO_UUID, Field, Shape, Struct, fields_of
from mansio.wire.headers import read_unsigned_varint

if TYPE_CHECKING:
    from collections.abc import Callable

    Reader = Callable[["Body", int], tuple[Any, int]]

MAX_STRUCTS: Final = 500_000
"""Structures (a topic, a partition, a member, ...) in one message; about 250 MB of Python objects at the very
worst."""

MAX_REQUEST_ITEMS: Final = 100_000
"""The same for a request, numbers and texts in its arrays included: a group's name takes one byte of a request, and a
thousand times that in what is made of it to answer. As many as a fetch may name."""


_TOO_MANY_STRUCTS: Final = f"more than {MAX_STRUCTS} structures in one message"
_TOO_MANY_ITEMS: Final = f"more than {MAX_REQUEST_ITEMS} items in one request"


class Body(bytes):
    """The bytes of one message, and how many structures (of a request: items of any kind) it may still hold."""

    room: int
    is_request: bool


def struct_reader(entity: Any, shape: Shape) -> Reader:
    """Reads one structure of this version; fields of other versions get their defaults."""
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
    """A length or count as KIP-482 writes it: one more than it is, 0 for null (here -1)."""
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
        if count > len(body) - position:  # every item takes one byte at least
            raise WireError(f"an array of {count} items in a message with {len(body) - position} bytes left")
        if structs or body.is_request:
            body.room -= count
            if body.room < 0:
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
