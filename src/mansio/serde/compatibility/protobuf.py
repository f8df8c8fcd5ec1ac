"""Compatibility of Protobuf schemas, by the binary encoding of messages.

Rules: "Updating a message type" of the language guide (https://protobuf.dev/programming-guides/proto3/#updating), with
the names of Confluent's public documentation where it has one. `RULES` lists them.

* Messages of a file are matched by their names without the package, which may change; fields by their numbers.
* A field whose type is a message must keep the name of this message. Messages of imported files are compared, too.
* int32, uint32, int64, uint64, bool and enums are one kind, as are sint32 and sint64, string and bytes, fixed32 and
  sfixed32, fixed64 and sfixed64. A map is none of the messages that it is encoded as.
* Names of fields and enums, values of enums, defaults, packing, options, reserved numbers, extensions and services do
  not count.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, Final

from google.protobuf import descriptor_pb2
from google.protobuf.descriptor import FieldDescriptor

from mansio.serde.definition import Incompatibility

if TYPE_CHECKING:
    from mansio.serde.formats.protobuf import ProtobufSchema

RULES: Final = {
    "MESSAGE_REMOVED": "a message of the writer is missing",
    "FIELD_KIND_CHANGED": "the field is a message, a group, a map or a scalar, and was another one of these",
    "FIELD_SCALAR_KIND_CHANGED": "the scalar type of the field has another encoding",
    "FIELD_NAMED_TYPE_CHANGED": "the field is of another message",
    "FIELD_NUMERIC_LABEL_CHANGED": "a field of numbers is repeated, and was not, or the other way round",
    "FIELD_NUMBER_CHANGED": "a field has another number",
    "REQUIRED_FIELD_ADDED": "a field is required, and was not",
    "REQUIRED_FIELD_REMOVED": "a required field is missing",
    "ONEOF_FIELD_REMOVED": "a field is no longer in its oneof",
    "FIELD_MOVED_TO_EXISTING_ONEOF": "a field is now in a oneof that had others",
    "MULTIPLE_FIELDS_MOVED_TO_ONEOF": "fields that could be set together are now in one oneof",
}

_INTEGER, _ZIGZAG, _LENGTH, _FIXED32, _FIXED64, _FLOAT, _DOUBLE = range(7)
_ENCODING: Final = {
    FieldDescriptor.TYPE_INT32: _INTEGER,
    FieldDescriptor.TYPE_UINT32: _INTEGER,
    FieldDescriptor.TYPE_INT64: _INTEGER,
    FieldDescriptor.TYPE_UINT64: _INTEGER,
    FieldDescriptor.TYPE_BOOL: _INTEGER,
    FieldDescriptor.TYPE_ENUM: _INTEGER,
    FieldDescriptor.TYPE_SINT32: _ZIGZAG,
    FieldDescriptor.TYPE_SINT64: _ZIGZAG,
    FieldDescriptor.TYPE_STRING: _LENGTH,
    FieldDescriptor.TYPE_BYTES: _LENGTH,
    FieldDescriptor.TYPE_FIXED32: _FIXED32,
    FieldDescriptor.TYPE_SFIXED32: _FIXED32,
    FieldDescriptor.TYPE_FIXED64: _FIXED64,
    FieldDescriptor.TYPE_SFIXED64: _FIXED64,
    FieldDescriptor.TYPE_FLOAT: _FLOAT,
    FieldDescriptor.TYPE_DOUBLE: _DOUBLE,
}


def incompatibilities(reader: ProtobufSchema, writer: ProtobufSchema) -> list[Incompatibility]:
    """Return why `reader` cannot read what `writer` wrote; an empty list if it can."""
    comparison = _Comparison(reader.file, writer.file)
    comparison.compare_files()
    return comparison.found


class _Comparison:
    """Comparison of two files. Pairs of messages wait in a queue, and each pair is compared once: messages that contain
    each other end it."""

    def __init__(self, reader: Any, writer: Any) -> None:
        self.found: list[Incompatibility] = []
        self._reader = reader
        self._writer = writer
        self._waiting: deque[tuple[Any, Any]] = deque()
        self._known: set[tuple[str, str]] = set()

    def compare_files(self) -> None:
        levels = deque([(self._reader.message_types_by_name, self._writer.message_types_by_name)])
        made = _made_messages(self._reader) | _made_messages(self._writer)
        while levels:
            kept, messages = levels.popleft()
            for name, message in messages.items():
                other = kept.get(name)
                if message.full_name in made:
                    continue
                if other is None or other.full_name in made:
                    self._report("MESSAGE_REMOVED", self._path(message, self._writer), message.full_name)
                    continue
                self._enqueue(other, message)
                levels.append((other.nested_types_by_name, message.nested_types_by_name))
        while self._waiting:
            self._compare_messages(*self._waiting.popleft())

    def _enqueue(self, reader: Any, writer: Any) -> None:
        pair = (reader.full_name, writer.full_name)
        if pair not in self._known:
            self._known.add(pair)
            self._waiting.append((reader, writer))

    def _compare_messages(self, reader: Any, writer: Any) -> None:
        path = self._path(reader, self._reader)
        names = reader.fields_by_name
        numbers = reader.fields_by_number
        for field in writer.fields:
            place = f"{path}/{field.number}"
            other = numbers.get(field.number)
            if other is None and field.is_required:
                self._report("REQUIRED_FIELD_REMOVED", place, field.name)
            elif other is not None:
                self._compare_fields(other, field, place)
            namesake = names.get(field.name)
            if namesake is not None and namesake.number != field.number:
                self._report("FIELD_NUMBER_CHANGED", f"{path}/{namesake.number}", field.name)
        for field in reader.fields:
            if field.is_required and field.number not in writer.fields_by_number:
                self._report("REQUIRED_FIELD_ADDED", f"{path}/{field.number}", field.name)
        self._compare_oneofs(reader, writer, path)

    def _compare_fields(self, reader: Any, writer: Any, place: str) -> None:
        if reader.is_required and not writer.is_required:
            self._report("REQUIRED_FIELD_ADDED", place, reader.name)
        kind = _kind(reader)
        if kind != _kind(writer):
            self._report("FIELD_KIND_CHANGED", place, reader.name)
        elif kind == "map":
            for part in ("key", "value"):
                fields = [one.message_type.fields_by_name[part] for one in (reader, writer)]
                self._compare_fields(fields[0], fields[1], place)
        elif kind != "scalar":
            self._compare_named_types(reader, writer, place)
        elif _ENCODING[reader.type] != _ENCODING[writer.type]:
            self._report("FIELD_SCALAR_KIND_CHANGED", place, reader.name)
        elif reader.is_repeated != writer.is_repeated and _ENCODING[reader.type] != _LENGTH:
            self._report("FIELD_NUMERIC_LABEL_CHANGED", place, reader.name)

    def _compare_named_types(self, reader: Any, writer: Any, place: str) -> None:
        if (_is_group_of(reader) and _is_group_of(writer)) or self._name(
            reader.message_type, self._reader
        ) == self._name(writer.message_type, self._writer):
            self._enqueue(reader.message_type, writer.message_type)
        else:
            self._report("FIELD_NAMED_TYPE_CHANGED", place, reader.name)

    def _compare_oneofs(self, reader: Any, writer: Any, path: str) -> None:
        reader_oneofs, writer_oneofs = _oneofs(reader), _oneofs(writer)
        for name, members in writer_oneofs.items():
            if name in reader_oneofs:
                for number in sorted(members - reader_oneofs[name]):
                    self._report("ONEOF_FIELD_REMOVED", f"{path}/{name}/{number}", name)
        in_oneofs = {number: name for name, members in writer_oneofs.items() for number in members}
        for name, members in reader_oneofs.items():
            written = sorted(number for number in members if number in writer.fields_by_number)
            moved = [number for number in written if number not in in_oneofs]
            earlier = {in_oneofs[number] for number in written if number in in_oneofs}
            if moved and earlier:
                for number in moved:
                    self._report("FIELD_MOVED_TO_EXISTING_ONEOF", f"{path}/{name}/{number}", name)
            elif len(moved) > 1 or len(earlier) > 1:
                self._report("MULTIPLE_FIELDS_MOVED_TO_ONEOF", f"{path}/{name}", name)

    def _report(self, rule: str, path: str, name: str) -> None:
        self.found.append(Incompatibility(rule, path, f"{name} at {path}: {RULES[rule]}"))

    def _name(self, message: Any, file: Any) -> tuple[bool, str]:
        """Return whether a message is of the package of the schema, and its name without this package."""
        if message.file.package != file.package:
            return False, message.full_name
        return True, message.full_name.removeprefix(f"{file.package}.") if file.package else message.full_name

    def _path(self, message: Any, file: Any) -> str:
        is_own, name = self._name(message, file)
        return f"#/{name.replace('.', '/') if is_own else name}"


def _kind(field: Any) -> str:
    if field.message_type is None:
        return "scalar"
    if field.type == FieldDescriptor.TYPE_GROUP:
        return "group"
    return "map" if field.message_type.GetOptions().map_entry else "message"


def _is_group_of(field: Any) -> bool:
    """Whether protoc makes the message of the field, a group of proto2."""
    message = field.message_type
    scope = field.extension_scope if field.is_extension else field.containing_type
    return (
        field.type == FieldDescriptor.TYPE_GROUP
        and field.name == message.name.lower()
        and (message.containing_type.full_name if message.containing_type else "")
        == (scope.full_name if scope else "")
    )


def _made_messages(file: Any) -> set[str]:
    """Return the full names of the messages that protoc makes of maps and groups."""
    made = set()
    fields = [*file.extensions_by_name.values()]
    messages = [*file.message_types_by_name.values()]
    while messages:
        message = messages.pop()
        if message.GetOptions().map_entry:
            made.add(message.full_name)
        messages.extend(message.nested_types)
        fields.extend(message.fields)
        fields.extend(message.extensions)
    made.update(
        field.message_type.full_name
        for field in fields
        if field.type == FieldDescriptor.TYPE_GROUP and _is_group_of(field)
    )
    return made


def _oneofs(message: Any) -> dict[str, set[int]]:
    """Return the numbers of the fields of each oneof. protoc makes one of each `optional` field of proto3: these do not
    count."""
    if not message.oneofs:
        return {}
    proto = descriptor_pb2.DescriptorProto()
    message.CopyToProto(proto)
    optional = {field.oneof_index for field in proto.field if field.proto3_optional}
    return {
        oneof.name: {field.number for field in oneof.fields}
        for oneof in message.oneofs
        if oneof.index not in optional
    }
