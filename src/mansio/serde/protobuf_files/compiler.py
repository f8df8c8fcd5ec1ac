"""Compiler of .proto texts: the parser of protoc, in this process.

The module that grpcio-tools brings for `grpc_tools.protoc` returns errors as objects and prints nothing. It reads
files: those of a directory that has the schema and its references only, and the files of google/protobuf.

Invariants:
* An import reaches no other file: names of references are checked before they are written, and protoc refuses
  absolute names and names with `..`.
* protoc recurses into options without limit, and for some texts its time is quadratic: nesting, number of types and
  number of declarations are bounded before it sees a text.
"""

from __future__ import annotations

import ast
import os
import re
import tempfile
import warnings
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from google.protobuf import descriptor_pb2
from google.protobuf.message import DecodeError

from mansio.host.extras import missing_extra
from mansio.serde.errors import InvalidSchema
from mansio.serde.protobuf_files.well_known import common_files, is_well_known, well_known_directory

if TYPE_CHECKING:
    from collections.abc import Mapping

TEXT_BYTES_MAX: Final = 1_000_000
ALL_TEXTS_BYTES_MAX: Final = 4_000_000
"""Of a schema together with its references."""
REFERENCES_MAX: Final = 100
NAME_BYTES_MAX: Final = 255
DEPTH_MAX: Final = 40
"""Of brackets of all kinds, and of names with dots."""
TYPES_MAX: Final = 2_000
"""Messages, enums, maps, oneofs, services and extensions of a schema together with its references."""
DECLARATIONS_MAX: Final = 10_000
"""Fields, values of enums, options and elements of lists, of a schema together with its references."""
BYTE_ORDER_MARK: Final = "\ufeff"
_PROTO2: Final = 'syntax = "proto2"; '
_MESSAGE_CHARACTERS_MAX: Final = 500

_TOKEN: Final = re.compile(
    r""""[^"\\\n]*(?:\\.[^"\\\n]*)*"?"""  # strings and comments: nothing in them counts
    r"""|'[^'\\\n]*(?:\\.[^'\\\n]*)*'?"""
    r"""|//[^\n]*"""
    r"""|/\*(?:.*?\*/|.*)"""
    r"""|[{}\[\]()<>;,.=]"""
    r"""|\b(?:message|enum|map|group|oneof|service|extend|syntax|edition)\b""",
    re.DOTALL,
)
_FILE_NAME: Final = re.compile(r"[A-Za-z0-9_.+@ -]+(?:/[A-Za-z0-9_.+@ -]+)*")
_CONTENT: Final = re.compile(rb"AddSerializedFile\((b'.*')\)$", re.MULTILINE)


def compile_file(text: str, references: Mapping[str, str]) -> list[Any]:
    """Compile the text of a .proto file. `references`: by name, the texts of the files that it may import.

    Returns a `FileDescriptorProto` of each imported file, each after those that it imports itself, and last the one of
    the text. None has the places of its source.

    Raises `InvalidSchema`, and `MissingExtra` without the extra `registry`.
    """
    try:
        from grpc_tools import _protoc_compiler
    except ImportError:
        raise missing_extra("registry", ("grpc_tools",)) from None

    for each in references:
        check_reference_name(each)
    name = main_name(references)
    _check_bounds({**references, name: text})
    texts = {each: _with_syntax(content) for each, content in {**references, name: text}.items()}
    with tempfile.TemporaryDirectory(prefix="mansio-proto-", dir=_memory_directory()) as directory:
        for each, content in (common_files([*texts.values()]) | texts).items():
            if not is_well_known(each):
                _write(directory, each, content)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", _protoc_compiler.ProtocWarning)
                generated = _protoc_compiler.get_protos(
                    name.encode(), [well_known_directory().encode(), directory.encode()]
                )
        except _protoc_compiler.ProtocErrors as error:
            shift = len(texts[name]) - len(text.removeprefix(BYTE_ORDER_MARK))
            raise InvalidSchema(_reason(error.errors(), name, shift)) from None
    return [_descriptor(code) for _, code in generated]


@cache
def _memory_directory() -> str | None:
    """Return a directory in memory, where the system has one: on a disk, a directory that comes and goes costs more
    than the compilation."""
    place = "/dev/shm"  # noqa: S108
    return place if os.access(place, os.W_OK | os.X_OK) else None


def main_name(references: Mapping[str, str]) -> str:
    """Return the name of the file that imports the references: one that none of them has."""
    name = "schema.proto"
    while name in references:
        name = f"_{name}"
    return name


def check_reference_name(name: str) -> None:
    """Raise `InvalidSchema` if a file cannot be imported by this name."""
    parts = name.split("/")
    if (
        len(name.encode("utf-8", "replace")) > NAME_BYTES_MAX
        or _FILE_NAME.fullmatch(name) is None
        or any(part in (".", "..") for part in parts)
    ):
        raise InvalidSchema(
            f"the name of the reference {name[:NAME_BYTES_MAX]!r} is no name of an imported file"
        )


def _check_bounds(texts: Mapping[str, str]) -> None:
    """Raise `InvalidSchema` if a text, or all together, would take protoc too long or nest too deep for it."""
    if len(texts) - 1 > REFERENCES_MAX:
        raise InvalidSchema(f"the schema has more than {REFERENCES_MAX} references")
    sizes = {name: _size(name, text) for name, text in texts.items()}
    for name, size in sizes.items():
        if size > TEXT_BYTES_MAX:
            raise InvalidSchema(f"{name} has more than {TEXT_BYTES_MAX} bytes")
    if sum(sizes.values()) > ALL_TEXTS_BYTES_MAX:
        raise InvalidSchema(f"the schema and its references have more than {ALL_TEXTS_BYTES_MAX} bytes")
    types = declarations = 0
    for name, text in texts.items():
        depth = dots = 0
        for match in _TOKEN.finditer(text):
            found = match[0]
            if len(found) > 1 and not found.isalpha():
                continue  # a string or a comment
            if found in "{[(<":
                depth += 1
            elif found in "}])>":
                depth = max(0, depth - 1)
            if found == ".":
                dots += 1
            elif found in "{}[]<>;,=":
                dots = 0
            if depth > DEPTH_MAX or dots > DEPTH_MAX:
                raise InvalidSchema(f"{name} is nested more than {DEPTH_MAX} levels deep")
            declarations += found in ";,{<"
            types += found[0].isalpha()
        if types > TYPES_MAX:
            raise InvalidSchema(f"the schema and its references have more than {TYPES_MAX} types")
        if declarations > DECLARATIONS_MAX:
            raise InvalidSchema(
                f"the schema and its references have more than {DECLARATIONS_MAX} declarations"
            )


def _size(name: str, text: str) -> int:
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        raise InvalidSchema(f"{name} is no valid Unicode text") from None


def _with_syntax(text: str) -> str:
    """Return the text with the syntax that protoc assumes where a file states none. It would print a warning."""
    text = text.removeprefix(BYTE_ORDER_MARK)
    position = 0
    for match in _TOKEN.finditer(text):
        if text[position : match.start()].strip() or not match[0].startswith(("/", "syntax", "edition")):
            break
        if not match[0].startswith("/"):
            return text
        position = match.end()
    return _PROTO2 + text


def _write(directory: str, name: str, text: str) -> None:
    path = Path(directory, name)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode())
    except (FileExistsError, NotADirectoryError, IsADirectoryError):
        raise InvalidSchema(f"the reference {name!r} has the name of the directory of another one") from None


def _descriptor(code: bytes) -> Any:
    """Return the descriptor in a Python module that protoc has generated."""
    found = _CONTENT.search(code)
    assert found is not None, "protoc generates modules of another form"
    try:
        return descriptor_pb2.FileDescriptorProto.FromString(ast.literal_eval(found[1].decode("ascii")))
    except DecodeError as error:  # nested deeper than the Protobuf library reads
        raise InvalidSchema(f"the Protobuf library cannot read the descriptor: {error}") from None


def _reason(errors: list[Any], name: str, shift: int) -> str:
    """Return one line for the first error that has a place. `shift`: characters added to the first line of the text."""
    first = next((error for error in errors if error.line >= 0), errors[0])
    file = first.filename.decode("utf-8", "replace")
    line, column = max(0, first.line), max(0, first.column)
    if file == name and line == 0:
        column = max(0, column - shift)
    place = f"{line + 1}:{column + 1}" if file == name else f"{file}:{line + 1}:{column + 1}"
    message = " ".join(first.message.decode("utf-8", "replace").split())
    return f"{place}: {message}"[:_MESSAGE_CHARACTERS_MAX]
