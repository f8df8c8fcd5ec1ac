"""Protobuf schemas: the text of a .proto file (proto2, proto3, or an edition that protoc knows).

* Clients register the text, or a serialized `FileDescriptorProto` in base64; the text is stored.
* Two schemas are the same if they compile to the same descriptor: comments and white space do not count, the order of
  messages does.
* A schema imports its references by their names, and the files of `mansio.serde.protobuf_files.well_known`.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from mansio.serde.errors import InvalidSchema
from mansio.serde.message_indexes import message_indexes, message_name
from mansio.serde.protobuf_files.compiler import REFERENCES_MAX, TEXT_BYTES_MAX, compile_file
from mansio.serde.protobuf_files.normalization import canonical, normalized
from mansio.serde.protobuf_files.printer import file_text, quoted

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mansio.serde.definition import ReferencedSchema

_BASE64: Final = re.compile(r"[A-Za-z0-9+/]+={0,2}")
_FILE_MESSAGE: Final = "google.protobuf.FileDescriptorProto"

_NOT_OF_PROTOC: Final = (
    "the serialized descriptor is none that protoc makes: register the text of the .proto file"
)


@dataclass(frozen=True, slots=True, eq=False)
class ProtobufSchema:
    """A compiled schema. `descriptor`: its `FileDescriptorProto`. `file`: its `FileDescriptor`, in a pool of its own
    that has the imported files, too."""

    text: str
    identity: str
    descriptor: Any
    file: Any

    def serialized(self, name: str | None = None) -> str:
        """Return the `FileDescriptorProto` in base64. `name`: the name by which other files import it."""
        found = descriptor_pb2.FileDescriptorProto()
        found.CopyFrom(self.descriptor)
        found.name = name if name is not None else found.name
        return base64.b64encode(found.SerializeToString(deterministic=True)).decode("ascii")

    @property
    def record_names(self) -> tuple[str, ...]:
        """The full names of the messages, nested ones included."""
        pending, found = list(self.file.message_types_by_name.values()), []
        while pending:
            message = pending.pop()
            found.append(message.full_name)
            pending += message.nested_types
        return tuple(sorted(found))

    def message_name(self, indexes: Sequence[int]) -> str:
        """Return the full name of the message with these indexes. Raises `MalformedValue`."""
        return message_name(self.file, indexes)

    def message_indexes(self, name: str) -> tuple[int, ...]:
        """Return the indexes of the message with this full name. Raises `UnsupportedSchema` if there is none."""
        return message_indexes(self.file, name)


def parse(
    text: str, references: Sequence[ReferencedSchema] = (), *, normalize: bool = False
) -> ProtobufSchema:
    """Compile a schema: the text of a .proto file, or a serialized `FileDescriptorProto` in base64. Other parameters:
    `mansio.serde.definition.SchemaParser`.

    Raises `InvalidSchema`, and `MissingExtra` without the extra `registry`.
    """
    if len(references) > REFERENCES_MAX:
        raise InvalidSchema(f"the schema has more than {REFERENCES_MAX} references")
    texts = _reference_texts(references)
    descriptor = _serialized_file(text)
    if descriptor is not None:
        text = _text_of_descriptor(descriptor, texts)
    files = compile_file(text, texts)
    if normalize:
        text = file_text(normalized(_canonical(files)))
        files = compile_file(text, texts)
    content = _canonical(files).SerializeToString(deterministic=True)
    if (
        descriptor is not None
        and not normalize
        and content != _canonical([*files[:-1], descriptor]).SerializeToString(deterministic=True)
    ):
        raise InvalidSchema(_NOT_OF_PROTOC)
    pool = _pool(files)
    return ProtobufSchema(
        text, hashlib.sha256(content).hexdigest(), files[-1], pool.FindFileByName(files[-1].name)
    )


def _reference_texts(references: Sequence[ReferencedSchema]) -> dict[str, str]:
    """Return the texts of the references by their names, also of those that are stored as descriptors."""
    texts: dict[str, str] = {}
    for name, text in references:
        descriptor = _serialized_file(text)
        found = text if descriptor is None else _text_of_descriptor(descriptor, texts)
        if texts.setdefault(name, found) != found:
            raise InvalidSchema(f"two references with different schemas have the name {name!r}")
    return texts


def _serialized_file(text: str) -> Any:
    """Return the `FileDescriptorProto` that a text in base64 has, or None."""
    packed = text.strip()
    if not packed or len(packed) > 2 * TEXT_BYTES_MAX or _BASE64.fullmatch(packed) is None:
        return None
    found = descriptor_pb2.FileDescriptorProto()
    try:
        found.ParseFromString(base64.b64decode(packed, validate=True))
    except (DecodeError, binascii.Error, ValueError):
        return None
    return found


def _text_of_descriptor(descriptor: Any, references: Mapping[str, str]) -> str:
    """Return the text of a descriptor. What it imports is compiled to know the extensions of its options."""
    names = {*descriptor.dependency, *descriptor.option_dependency}
    imports = "".join(f"import {quoted(name)};\n" for name in sorted(names))
    files = compile_file(f'edition = "2023";\n{imports}', references)
    try:
        return file_text(_canonical([*files[:-1], descriptor]))
    except (LookupError, ValueError):
        raise InvalidSchema(_NOT_OF_PROTOC) from None


def _canonical(files: Sequence[Any]) -> Any:
    """Return the canonical form of the last file, whose options are of classes that know their extensions."""
    *imported, file = files
    content = file.SerializeToString()
    found = descriptor_pb2.FileDescriptorProto
    if any(one.name == "google/protobuf/descriptor.proto" for one in imported):
        pool = _pool(files)
        found = message_factory.GetMessageClass(pool.FindMessageTypeByName(_FILE_MESSAGE))
    try:
        return canonical(found.FromString(content))
    except DecodeError as error:
        raise InvalidSchema(f"the Protobuf library cannot read the descriptor: {error}") from None


def _pool(files: Sequence[Any]) -> descriptor_pool.DescriptorPool:
    pool = descriptor_pool.DescriptorPool()
    try:
        for file in files:
            pool.AddSerializedFile(file.SerializeToString())
        pool.FindFileByName(files[-1].name)
    except (TypeError, KeyError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise InvalidSchema(f"the Protobuf library cannot use the descriptor: {reason}") from None
    return pool
