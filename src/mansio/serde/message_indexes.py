"""Indexes of the messages of a Protobuf file, with which encoded values begin.

The index of a message among the messages of the file, then among the nested messages of that one, and so on. The
messages that protoc makes of maps and groups count.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mansio.serde.errors import MalformedValue, UnsupportedSchema

if TYPE_CHECKING:
    from collections.abc import Sequence


def message_name(file: Any, indexes: Sequence[int]) -> str:
    """Return the full name of the message with these indexes in a file, a `FileDescriptor`. Raises `MalformedValue`."""
    messages = list(file.message_types_by_name.values())
    name = ""
    for index in indexes:
        if not 0 <= index < len(messages):
            raise MalformedValue(f"the Protobuf schema has no message with the indexes {list(indexes)}")
        name, messages = messages[index].full_name, list(messages[index].nested_types)
    if not name:
        raise MalformedValue("the indexes of a Protobuf message are missing")
    return name


def message_indexes(file: Any, name: str) -> tuple[int, ...]:
    """Return the indexes of the message with this full name in a file, a `FileDescriptor`.

    Raises `UnsupportedSchema` if it has no such message.
    """
    package = file.package + "." if file.package else ""
    if not name.startswith(package):
        raise UnsupportedSchema(f"the Protobuf schema has no message {name}")
    indexes = []
    messages = list(file.message_types_by_name.values())
    for part in name.removeprefix(package).split("."):
        position = next((index for index, one in enumerate(messages) if one.name == part), None)
        if position is None:
            raise UnsupportedSchema(f"the Protobuf schema has no message {name}")
        indexes.append(position)
        messages = list(messages[position].nested_types)
    return tuple(indexes)
