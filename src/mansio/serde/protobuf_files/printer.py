"""Text of a .proto file for a descriptor, which compiles to the same descriptor.

Types are named in full, with a leading dot. Comments, and options that protoc keeps for its plugins only, are not in a
descriptor.

Invariants:
* The indexes of messages are kept. protoc gives a map and a group a message of their own, at the place where the field
  stands: fields are printed between the nested messages as their order demands.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from google.protobuf import descriptor_pb2, message_factory, text_encoding, text_format
from google.protobuf.descriptor import FieldDescriptor

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

FieldProto = descriptor_pb2.FieldDescriptorProto
_SCALARS: Final = {
    FieldProto.TYPE_DOUBLE: "double",
    FieldProto.TYPE_FLOAT: "float",
    FieldProto.TYPE_INT64: "int64",
    FieldProto.TYPE_UINT64: "uint64",
    FieldProto.TYPE_INT32: "int32",
    FieldProto.TYPE_FIXED64: "fixed64",
    FieldProto.TYPE_FIXED32: "fixed32",
    FieldProto.TYPE_BOOL: "bool",
    FieldProto.TYPE_STRING: "string",
    FieldProto.TYPE_BYTES: "bytes",
    FieldProto.TYPE_UINT32: "uint32",
    FieldProto.TYPE_SFIXED32: "sfixed32",
    FieldProto.TYPE_SFIXED64: "sfixed64",
    FieldProto.TYPE_SINT32: "sint32",
    FieldProto.TYPE_SINT64: "sint64",
}
_EXTENSION_END: Final = 1 << 29
"""End of the numbers of extensions that `max` stands for; of messages with `message_set_wire_format`, the next one."""
_MESSAGE_SET_END: Final = (1 << 31) - 1
_ENUM_MAX: Final = (1 << 31) - 1
_SOURCE_ONLY: Final = ("declaration", "verification")
"""Options of ranges of extensions that protoc does not keep."""


def file_text(file: Any) -> str:
    """Return the text of a `FileDescriptorProto` whose options are of classes that know their extensions.

    Raises `LookupError` or `ValueError` for a descriptor that protoc does not make. For others of these, the text is no
    valid one, or compiles to another descriptor.
    """
    return "\n".join(_FilePrinter(file).lines()) + "\n"


def default_json_name(name: str) -> str:
    """Return the name of a field in JSON if the file states none."""
    first, *others = name.split("_")
    return first + "".join(part[:1].upper() + part[1:] for part in others)


class _FilePrinter:
    """Printer of one file."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self._syntax = file.syntax or "proto2"
        self._owned: set[str] = set()

    def lines(self) -> Iterator[str]:
        file = self._file
        if self._syntax == "editions":
            edition = descriptor_pb2.Edition.Name(file.edition).removeprefix("EDITION_")
            yield f'edition = "{edition}";'
        else:
            yield f'syntax = "{self._syntax}";'
        if file.package:
            yield f"package {file.package};"
        for index, name in enumerate(file.dependency):
            kind = "public " if index in file.public_dependency else ""
            kind = "weak " if index in file.weak_dependency else kind
            yield f"import {kind}{quoted(name)};"
        yield from (f"import option {quoted(name)};" for name in file.option_dependency)
        yield from _options(file.options)
        yield from self._body(file, file.message_type, f".{file.package}" if file.package else "")
        for service in file.service:
            yield f"service {service.name} {{"
            yield from _indented(_options(service.options))
            for method in service.method:
                yield from _indented(self._method(method))
            yield "}"

    def _body(self, declaring: Any, messages: Sequence[Any], scope: str) -> Iterator[str]:
        """Print what a file or a message declares, in an order in which protoc gives each message its index. `scope`:
        full name of the message, or of the package, with a leading dot."""
        for enum in declaring.enum_type:
            yield from self._enum(enum)
        fields = [] if declaring is self._file else declaring.field
        extensions = declaring.extension
        by_name = {f"{scope}.{one.name}": one for one in messages}
        blocks = [
            *self._field_blocks(fields, by_name, declaring),
            *self._extension_blocks(extensions, by_name),
        ]
        owners = {owned: index for index, (names, _) in enumerate(blocks) for owned in names}
        printed = [False] * len(blocks)
        fields_end = len(blocks) - len(_extension_runs(extensions))
        for one in messages:
            name = f"{scope}.{one.name}"
            if name not in owners:
                yield from self._message(one, name)
                continue
            index = owners[name]
            for before in range(0 if index < fields_end else fields_end, index + 1):
                if not printed[before]:
                    printed[before] = True
                    yield from blocks[before][1]
        for index, (_, block) in enumerate(blocks):
            if not printed[index]:
                yield from block

    def _field_blocks(
        self, fields: Sequence[Any], by_name: Mapping[str, Any], message: Any
    ) -> Iterator[tuple[list[str], list[str]]]:
        """Print each field, or oneof with its fields, with the names of the messages that protoc makes of it."""
        done: set[int] = set()
        for field in fields:
            if not _in_oneof(field):
                owned = _owned_message(field, by_name)
                yield [owned] if owned else [], [*self._field(field, by_name)]
            elif field.oneof_index not in done:
                done.add(field.oneof_index)
                oneof = message.oneof_decl[field.oneof_index]
                members = [one for one in fields if _in_oneof(one) and one.oneof_index == field.oneof_index]
                lines = [f"oneof {oneof.name} {{", *_indented(_options(oneof.options))]
                for member in members:
                    lines += _indented(self._field(member, by_name))
                owned_names = (_owned_message(one, by_name) for one in members)
                yield [name for name in owned_names if name], [*lines, "}"]

    def _extension_blocks(
        self, extensions: Sequence[Any], by_name: Mapping[str, Any]
    ) -> Iterator[tuple[list[str], list[str]]]:
        for run in _extension_runs(extensions):
            lines = [f"extend {run[0].extendee} {{"]
            for field in run:
                lines += _indented(self._field(field, by_name))
            owned_names = (_owned_message(one, by_name) for one in run)
            yield [name for name in owned_names if name], [*lines, "}"]

    def _message(self, message: Any, name: str) -> Iterator[str]:
        yield f"{_visibility(message)}message {message.name} {{"
        yield from _indented(self._content(message, name))
        yield "}"

    def _content(self, message: Any, name: str) -> Iterator[str]:
        yield from _options(message.options)
        for span in message.reserved_range:
            yield f"reserved {_range(span.start, span.end - 1, _EXTENSION_END - 1)};"
        yield from self._reserved_names(message.reserved_name)
        for span in message.extension_range:
            highest = _EXTENSION_END - 1 if span.end <= _EXTENSION_END else _MESSAGE_SET_END - 1
            options = [one for one in _option_list(span.options) if not one.startswith(_SOURCE_ONLY)]
            bracket = f" [{', '.join(options)}]" if options else ""
            yield f"extensions {_range(span.start, span.end - 1, highest)}{bracket};"
        yield from self._body(message, message.nested_type, name)

    def _field(self, field: Any, by_name: Mapping[str, Any]) -> Iterator[str]:
        options = [f"default = {_default(field)}"] if field.HasField("default_value") else []
        if field.json_name and field.json_name != default_json_name(field.name):
            options.append(f"json_name = {quoted(field.json_name)}")
        options += _option_list(field.options)
        bracket = f" [{', '.join(options)}]" if options else ""
        owned = by_name.get(_owned_message(field, by_name) or "")
        if owned is not None:
            if field.type_name in self._owned:
                raise ValueError(f"two fields make the message {field.type_name}")
            self._owned.add(field.type_name)
        if owned is not None and field.type == FieldProto.TYPE_GROUP:
            yield f"{self._label(field)}group {owned.name} = {field.number}{bracket} {{"
            yield from _indented(self._content(owned, field.type_name))
            yield "}"
            return
        if owned is not None:
            key, value = sorted(owned.field, key=lambda one: one.number)
            yield f"map<{_type(key)}, {_type(value)}> {field.name} = {field.number}{bracket};"
            return
        yield f"{self._label(field)}{_type(field)} {field.name} = {field.number}{bracket};"

    def _label(self, field: Any) -> str:
        if field.label == FieldProto.LABEL_REPEATED:
            return "repeated "
        if _in_oneof(field):
            return ""
        if field.label == FieldProto.LABEL_REQUIRED:
            return "required "
        return "optional " if self._syntax == "proto2" or field.proto3_optional else ""

    def _enum(self, enum: Any) -> Iterator[str]:
        yield f"{_visibility(enum)}enum {enum.name} {{"
        yield from _indented(_options(enum.options))
        for value in enum.value:
            options = _option_list(value.options)
            bracket = f" [{', '.join(options)}]" if options else ""
            yield f"  {value.name} = {value.number}{bracket};"
        for span in enum.reserved_range:
            yield f"  reserved {_range(span.start, span.end, _ENUM_MAX)};"
        yield from _indented(self._reserved_names(enum.reserved_name))
        yield "}"

    def _reserved_names(self, names: Iterable[str]) -> Iterator[str]:
        for name in names:
            yield f"reserved {name if self._syntax == 'editions' else quoted(name)};"

    def _method(self, method: Any) -> Iterator[str]:
        asked = f"{'stream ' if method.client_streaming else ''}{method.input_type}"
        answered = f"{'stream ' if method.server_streaming else ''}{method.output_type}"
        options = [*_options(method.options)]
        yield f"rpc {method.name}({asked}) returns ({answered}){' {' if options else ';'}"
        if options:
            yield from _indented(options)
            yield "}"


def _extension_runs(extensions: Sequence[Any]) -> list[list[Any]]:
    """Divide extensions into runs that extend the same message."""
    runs: list[list[Any]] = []
    for field in extensions:
        if not runs or runs[-1][0].extendee != field.extendee:
            runs.append([])
        runs[-1].append(field)
    return runs


def _owned_message(field: Any, by_name: Mapping[str, Any]) -> str | None:
    """Return the name of the message that protoc makes of a map or a group, if it is one of these."""
    found = by_name.get(field.type_name)
    if found is None or field.type not in (FieldProto.TYPE_MESSAGE, FieldProto.TYPE_GROUP):
        return None
    is_map = found.options.map_entry and len(found.field) == 2  # key and value
    return str(field.type_name) if field.type == FieldProto.TYPE_GROUP or is_map else None


def _in_oneof(field: Any) -> bool:
    return field.HasField("oneof_index") and not field.proto3_optional


def _type(field: Any) -> str:
    return field.type_name or _SCALARS[field.type]


def _range(first: int, last: int, highest: int) -> str:
    if first == last:
        return str(first)
    return f"{first} to {'max' if last == highest else last}"


def _visibility(declared: Any) -> str:
    visibility = descriptor_pb2.SymbolVisibility.Name(declared.visibility)
    return {"VISIBILITY_LOCAL": "local ", "VISIBILITY_EXPORT": "export "}.get(visibility, "")


def _default(field: Any) -> str:
    if field.type == FieldProto.TYPE_STRING:
        return quoted(field.default_value)
    if field.type == FieldProto.TYPE_BYTES:
        return f'"{field.default_value}"'  # the descriptor has it with escapes
    return str(field.default_value)


def quoted(text: str) -> str:
    """Return a literal."""
    return f'"{text_encoding.CEscape(text.encode(), as_utf8=True)}"'


def _options(options: Any) -> Iterator[str]:
    for one in _option_list(options):
        yield f"option {one};"


def _option_list(options: Any) -> list[str]:
    return [*_option_settings(options, "")]


def _option_settings(options: Any, prefix: str) -> Iterator[str]:
    for field, value in options.ListFields():
        if field.full_name == "google.protobuf.MessageOptions.map_entry":
            continue
        name = prefix + (f"(.{field.full_name})" if field.is_extension else field.name)
        if field.is_repeated:
            yield from (f"{name} = {_value(field, one)}" for one in _elements(field, value))
        elif field.message_type is not None and field.message_type.full_name == "google.protobuf.FeatureSet":
            yield from _option_settings(value, f"{name}.")
        else:
            yield f"{name} = {_value(field, value)}"


def _elements(field: Any, value: Any) -> Any:
    if field.message_type is None or not field.message_type.GetOptions().map_entry:
        return value
    # A map as an option is a list of its entries.
    entry = message_factory.GetMessageClass(field.message_type)
    return [entry(key=key, value=one) for key, one in sorted(value.items())]


def _value(field: Any, value: Any) -> str:
    if field.message_type is not None:
        return f"{{ {text_format.MessageToString(value, as_one_line=True, as_utf8=True)} }}"
    if field.enum_type is not None:
        found = field.enum_type.values_by_number.get(value)
        return found.name if found is not None else str(value)
    if field.type == FieldDescriptor.TYPE_STRING:
        return quoted(value)
    if field.type == FieldDescriptor.TYPE_BYTES:
        return f'"{text_encoding.CEscape(value, as_utf8=False)}"'
    if field.type == FieldDescriptor.TYPE_BOOL:
        return "true" if value else "false"
    return str(value)


def _indented(lines: Iterable[str]) -> list[str]:
    return [f"  {line}" for line in lines]
