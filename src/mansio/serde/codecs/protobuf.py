"""Protobuf: messages of a registered file as bytes, and as plain JSON (the JSON mapping of Protocol Buffers).

Python values are those of the JSON mapping, with the names of the fields as in the file: 64-bit numbers and Timestamps
are strings, bytes are base64, enums their names, and a field without presence that has its default is left out. A
message object of Protobuf is encoded, too.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final, Literal

from google.protobuf import json_format, message_factory
from google.protobuf.message import DecodeError, EncodeError, Message

from mansio.serde.codecs.descriptor_pools import (
    first_message,
    message_name,
    pool_of_files,
)
from mansio.serde.codecs.paths import VALUE_DEPTH_MAX, fault, shown_type
from mansio.serde.definition import SchemaType
from mansio.serde.errors import MalformedValue, UnsupportedSchema, reason
from mansio.serde.message_indexes import message_indexes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from google.protobuf.descriptor import Descriptor

    from mansio.serde.definition import ReferencedSchema

SCHEMA_BYTES_MAX: Final = 1_000_000
_PLACE: Final = re.compile(r' at "?[A-Za-z_]\w*((?:\.\w+|\[\d+\])*)"?')
_FIELD: Final = re.compile(r"Failed to parse (\w+) field: ")
"""Where json_format says that a fault is: the name of the message, and the path."""


class ProtobufCodec:
    """Codec of the messages of a Protobuf file. `name`: full name of the first message."""

    kind: Literal[SchemaType.PROTOBUF] = SchemaType.PROTOBUF

    def __init__(self, text: str, references: Sequence[ReferencedSchema] = ()) -> None:
        """`text`, and those of `references`: a serialized `FileDescriptorProto` in base64. Raises
        `UnsupportedSchema`."""
        if len(text) + sum(len(one.text) for one in references) > SCHEMA_BYTES_MAX:
            raise UnsupportedSchema(f"the Protobuf files are longer than {SCHEMA_BYTES_MAX} characters")
        self._pool, self._file = pool_of_files(text, references)
        self.name: str = first_message(self._pool, self._file)
        self._classes: dict[str, type[Message]] = {}

    def message(self, indexes: Sequence[int]) -> str:
        """Return the full name of the message with these indexes. Raises `MalformedValue`."""
        return message_name(self._pool, self._file, indexes)

    def indexes(self, message: str = "") -> tuple[int, ...]:
        """Return the indexes of a message of the file; by default the first. Raises `UnsupportedSchema`."""
        descriptor = self._descriptor(message or self.name)
        return message_indexes(descriptor.file, descriptor.full_name)

    def encode(self, value: Any, message: str = "") -> bytes:
        """Encode a message object or plain JSON, as `message`; by default the first of the file. Raises
        `MalformedValue` with the path of what does not match, `UnsupportedSchema` if there is no such message."""
        wanted = message or self.name
        if isinstance(value, Message):
            if value.DESCRIPTOR.full_name != wanted:
                raise fault(None, f"is a {value.DESCRIPTOR.full_name} message, not {wanted}")
            return self._serialized(value)
        return self.encode_json(value, wanted)

    def decode(self, data: bytes, message: str = "") -> Any:
        """Decode a message to plain JSON. Raises `MalformedValue`, `UnsupportedSchema`."""
        return self.decode_json(data, message)

    def encode_json(self, value: Any, message: str = "") -> bytes:
        """Encode plain JSON as a message; by default the first of the file. Raises `MalformedValue` with the path of
        what does not match, `UnsupportedSchema` if there is no such message."""
        kind = self._class(message or self.name)
        try:
            return self._serialized(
                json_format.ParseDict(
                    value, kind(), descriptor_pool=self._pool, max_recursion_depth=VALUE_DEPTH_MAX
                )
            )
        except json_format.ParseError as error:
            raise _fault_of(error) from error
        except (AttributeError, TypeError, ValueError, RecursionError) as error:
            if not isinstance(value, dict):
                raise fault(None, f"is {shown_type(value)}, not a message {message or self.name}") from error
            raise fault(None, f"is no {message or self.name} message: {reason(error)}") from error

    def decode_json(self, data: bytes, message: str = "") -> Any:
        """Decode a message to plain JSON. Raises `MalformedValue`, `UnsupportedSchema`."""
        kind = self._class(message or self.name)
        try:
            found = kind.FromString(data)
        except (DecodeError, ValueError, TypeError) as error:
            raise fault(None, f"is no {message or self.name} message: {reason(error)}") from error
        try:
            return json_format.MessageToDict(
                found, preserving_proto_field_name=True, descriptor_pool=self._pool
            )
        except (json_format.Error, TypeError, ValueError, OverflowError, RecursionError) as error:
            raise fault(None, f"has no JSON: {reason(error)}") from error

    def _serialized(self, message: Message) -> bytes:
        try:
            return bytes(message.SerializeToString(deterministic=True))
        except (EncodeError, ValueError) as error:
            raise fault(None, f"cannot be encoded: {reason(error)}") from error

    def _class(self, message: str) -> type[Message]:
        found = self._classes.get(message)
        if found is None:
            found = self._classes[message] = message_factory.GetMessageClass(self._descriptor(message))
        return found

    def _descriptor(self, message: str) -> Descriptor:
        try:
            found = self._pool.FindMessageTypeByName(message)
        except KeyError:
            found = None
        if found is None or found.file.name != self._file:
            raise UnsupportedSchema(f"the Protobuf file has no message {message}")
        return found


def _fault_of(error: Exception) -> MalformedValue:
    """Return the error of json_format with the path as `mansio.serde.codecs.paths` writes it."""
    text = str(error)
    found = _PLACE.search(text)
    path = "" if found is None else found.group(1)
    if found is not None:
        text = text[: found.start()] + text[found.end() :]
    fields = _FIELD.findall(text)
    text = _FIELD.sub("", text)
    if fields and found is None:
        path = "".join(f".{one}" for one in fields)
    elif fields and path.rpartition(".")[2].partition("[")[0] != fields[-1]:
        path += f".{fields[-1]}"
    return MalformedValue(reason(f"${path} does not match its message: {text}"))
