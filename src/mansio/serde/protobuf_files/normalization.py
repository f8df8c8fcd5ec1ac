"""Canonical and normalized forms of file descriptors.

Canonical: what two compilers may write differently is left out, so that equal files have equal bytes.
Normalized: what has no meaning for messages is put into one order, as `normalize` of a schema registry demands: imports
by name, fields and options by number, values of an enum by number behind the first one, reserved numbers and names.
The order of messages stays: encoded messages begin with their indexes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from google.protobuf import descriptor_pb2

from mansio.serde.protobuf_files.printer import default_json_name

if TYPE_CHECKING:
    from collections.abc import Iterator

FieldProto = descriptor_pb2.FieldDescriptorProto


def canonical(file: Any) -> Any:
    """Return a copy of a `FileDescriptorProto` without its name, the places of its source, names in JSON that are the
    default, empty options, and those that protoc does not keep."""
    found = type(file)()
    found.CopyFrom(file)
    found.ClearField("name")
    found.ClearField("source_code_info")
    if found.syntax == "proto2":
        found.ClearField("syntax")
    for field in _fields(found):
        if field.json_name == default_json_name(field.name):
            field.ClearField("json_name")
    for _, message in _messages(found):
        for span in message.extension_range:
            span.options.ClearField("declaration")
            span.options.ClearField("verification")
    _clear_empty_options(found)
    return found


def normalized(file: Any) -> Any:
    """Return a copy of a canonical `FileDescriptorProto` in the normalized order."""
    found = type(file)()
    found.CopyFrom(file)
    _sort_imports(found)
    _sort_extensions(found.extension)
    for name, message in _messages(found):
        _sort_fields(message, name)
        _sort_extensions(message.extension)
        _sort(message.reserved_range, lambda one: one.start)
        _sort(message.extension_range, lambda one: one.start)
        message.reserved_name[:] = sorted(message.reserved_name)
        _sort_enums(message.enum_type)
    _sort_enums(found.enum_type)
    return found


def _clear_empty_options(file: Any) -> None:
    rest = [file]
    while rest:
        declared = rest.pop()
        for field, value in declared.ListFields():
            if field.name == "options":
                if not value.ByteSize():
                    declared.ClearField("options")
            elif field.message_type is not None:
                rest.extend(value)  # all others are lists of declarations


def _messages(file: Any) -> Iterator[tuple[str, Any]]:
    """Iterate over all messages with their full names, which begin with a dot as in the types of fields."""
    package = f".{file.package}" if file.package else ""
    rest = [(f"{package}.{one.name}", one) for one in file.message_type]
    while rest:
        name, message = rest.pop()
        yield name, message
        rest.extend((f"{name}.{one.name}", one) for one in message.nested_type)


def _fields(file: Any) -> Iterator[Any]:
    yield from file.extension
    for _, message in _messages(file):
        yield from message.field
        yield from message.extension


def _sort(repeated: Any, key: Any) -> None:
    """Sort a repeated field of messages. Their order is stable."""
    ordered = []
    for one in sorted(repeated, key=key):
        ordered.append(type(one)())
        ordered[-1].CopyFrom(one)
    del repeated[:]
    repeated.extend(ordered)


def _sort_imports(file: Any) -> None:
    public = {file.dependency[index] for index in file.public_dependency}
    weak = {file.dependency[index] for index in file.weak_dependency}
    file.dependency[:] = sorted(file.dependency)
    file.option_dependency[:] = sorted(file.option_dependency)
    file.public_dependency[:] = [index for index, name in enumerate(file.dependency) if name in public]
    file.weak_dependency[:] = [index for index, name in enumerate(file.dependency) if name in weak]


def _sort_extensions(extensions: Any) -> None:
    if not any(one.type == FieldProto.TYPE_GROUP for one in extensions):  # a group is a message with an index
        _sort(extensions, lambda one: (one.extendee, one.number))


def _sort_enums(enums: Any) -> None:
    for enum in enums:
        # The first value is the default one; of several names of a number, the first one is the name of the value.
        if enum.value:
            first = enum.value[0].name
            _sort(enum.value, lambda one, first=first: (one.name != first, one.number))
        _sort(enum.reserved_range, lambda one: one.start)
        enum.reserved_name[:] = sorted(enum.reserved_name)


def _sort_fields(message: Any, name: str) -> None:
    """Sort fields by number; those of a oneof stay together, in the place of the lowest one."""
    if message.options.map_entry:
        return
    lowest: dict[int, int] = {}
    for field in message.field:
        if field.HasField("oneof_index"):
            lowest[field.oneof_index] = min(field.number, lowest.get(field.oneof_index, field.number))

    def place(field: Any) -> tuple[int, int]:
        if field.HasField("oneof_index"):
            return lowest[field.oneof_index], field.number
        return field.number, field.number

    _sort(message.field, place)
    _renumber_oneofs(message)
    _sort_made_messages(message, name)


def _renumber_oneofs(message: Any) -> None:
    """Give the oneofs numbers in the order of their fields, those of `optional` fields last, as protoc does."""
    order: list[int] = []
    for is_optional in (False, True):
        for field in message.field:
            if (
                field.HasField("oneof_index")
                and field.proto3_optional == is_optional
                and field.oneof_index not in order
            ):
                order.append(field.oneof_index)
    declared = [_copy(message.oneof_decl[index]) for index in order]
    new = {index: position for position, index in enumerate(order)}
    for field in message.field:
        if field.HasField("oneof_index"):
            field.oneof_index = new[field.oneof_index]
    del message.oneof_decl[:]
    message.oneof_decl.extend(declared)


def _sort_made_messages(message: Any, name: str) -> None:
    """Put the messages of maps and groups into the order of their fields. The indexes of all other messages stay."""
    nested = {f"{name}.{one.name}": _copy(one) for one in message.nested_type}
    made = [
        field.type_name
        for field in message.field
        if field.type_name in nested
        and (field.type == FieldProto.TYPE_GROUP or nested[field.type_name].options.map_entry)
    ]
    places = [index for index, one in enumerate(message.nested_type) if f"{name}.{one.name}" in made]
    for index, type_name in zip(places, made, strict=True):
        message.nested_type[index].CopyFrom(nested[type_name])


def _copy(one: Any) -> Any:
    """Return a copy of a message."""
    copied = type(one)()
    copied.CopyFrom(one)
    return copied
