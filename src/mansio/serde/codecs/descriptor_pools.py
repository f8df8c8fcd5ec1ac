"""Pools of Protobuf descriptors: the message types of files as registries and protoc have them."""

from __future__ import annotations

import base64
import binascii
from typing import TYPE_CHECKING, Any, Final

from google.protobuf import descriptor_pb2, descriptor_pool
from google.protobuf.message import DecodeError

from mansio.serde.errors import MalformedValue, UnsupportedSchema, reason
from mansio.serde.message_indexes import message_name as name_of_indexes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mansio.serde.definition import ReferencedSchema

WELL_KNOWN_PREFIX: Final = "google/protobuf/"
UNNAMED_FILE: Final = "schema.proto"
"""Name of a registered file that has none."""


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


def descriptor_set_of_files(text: str, references: Sequence[ReferencedSchema] = ()) -> bytes:
    """Return a serialized `FileDescriptorSet` of a file and those that it imports, as the schema registry returns them.
    Raises `UnsupportedSchema`.
    """
    files = _parse_files(text, references)
    return bytes(descriptor_pb2.FileDescriptorSet(file=files).SerializeToString())


def pool_of_files(
    text: str, references: Sequence[ReferencedSchema] = ()
) -> tuple[descriptor_pool.DescriptorPool, str]:
    """Return the message types of a file and of those that it imports, each after those that it imports itself, and
    the name of the file. Texts are as the schema registry returns them with `format=serialized`: base64 of a
    `FileDescriptorProto`.

    Raises `UnsupportedSchema`.
    """
    files = _parse_files(text, references)
    return _pool(files), files[-1].name


def _parse_files(text: str, references: Sequence[ReferencedSchema]) -> list[Any]:
    """Return the descriptors of files. An import names a file as the reference does, not as its descriptor."""
    named = {one.name: _parse_file(one.text, one.name) for one in references}
    file = _parse_file(text)
    if not file.name or file.name in named:
        file.name = UNNAMED_FILE
    return [*named.values(), file]


def _parse_file(text: str, name: str = "") -> Any:
    found = descriptor_pb2.FileDescriptorProto()
    try:
        found.ParseFromString(base64.b64decode(text, validate=True))
    except (DecodeError, binascii.Error, ValueError) as error:
        raise UnsupportedSchema(
            "the schema registry has returned no serialized Protobuf schema: it must support format=serialized"
        ) from error
    if name:
        found.name = name
    return found


def message_name(pool: descriptor_pool.DescriptorPool, file: str, indexes: Sequence[int]) -> str:
    """Return the full name of the message with these indexes in a file. Raises `MalformedValue`."""
    return name_of_indexes(pool.FindFileByName(file), indexes)


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
