"""Writers of Kafka messages, one made from each of kio's schema classes.

A writer is `(out, value) -> None` and appends to `out`. Values may be mappings or `Struct`s.

Always true: what a caller gets wrong is a `TypeError` (a name no version knows, a value of the wrong type) or a
`ValueError` (a number or text that does not fit) that names the field; nothing is written in silence.
"""

from __future__ import annotations

import struct
from struct import Struct as Layout
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

from mansio.wire.codec.schemas import ZERO_UUID, Field, Shape, Struct, default_maker, fields_of
from mansio.wire.headers import unsigned_varint

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    Writer = Callable[[bytearray, Any], None]

_EMPTY_TAGS: Final = b"\x00"


def struct_writer(entity: Any, shape: Shape) -> Writer:
    """Writes a mapping or `Struct` as this version of a structure.

    Fields left out take their default; fields of other versions are dropped; a name that no version knows,
    and a value of the wrong type, raise `TypeError`; a number or text that does not fit raises `ValueError`.
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
                raise TypeError(f"None where a {kafka_type} must be")
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
                raise TypeError("None where an array must be")
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
