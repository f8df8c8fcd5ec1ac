"""Random Protobuf schemas, changes of them as people make them, and random messages."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message_factory import GetMessageClass

if TYPE_CHECKING:
    from random import Random

INTEGERS: Final = ("int32", "uint32", "int64", "uint64", "bool")
SCALARS: Final = (
    *INTEGERS,
    *("sint32", "sint64", "fixed32", "sfixed32", "fixed64", "sfixed64", "float", "double", "string", "bytes"),
)
KEYS: Final = ("int32", "uint64", "bool", "sint32", "fixed64", "string")
ENUM: Final = "State"
TEXTS: Final = ("", "a", "Zürich", "東京")
NUMBERS: Final = (0, 1, 7, 2**31 - 1)
DEPTH_MAX: Final = 3


@dataclass
class Field:
    number: int
    name: str
    type: str
    label: str = ""
    oneof: str = ""

    @property
    def text(self) -> str:
        label = f"{self.label} " if self.label and not self.oneof else ""
        return f"{label}{self.type} {self.name} = {self.number};"

    @property
    def is_map(self) -> bool:
        return self.type.startswith("map<")


@dataclass
class Message:
    name: str
    fields: list[Field] = field(default_factory=list)
    nested: list[Message] = field(default_factory=list)

    @property
    def text(self) -> str:
        lines = [message.text for message in self.nested]
        printed = set()
        for one in self.fields:
            if not one.oneof:
                lines.append(one.text)
            elif one.oneof not in printed:
                printed.add(one.oneof)
                members = " ".join(other.text for other in self.fields if other.oneof == one.oneof)
                lines.append(f"oneof {one.oneof} {{ {members} }}")
        return f"message {self.name} {{\n" + "\n".join(lines) + "\n}"


@dataclass
class File:
    syntax: str
    package: str
    messages: list[Message]
    enum_values: list[int]

    @property
    def text(self) -> str:
        values = " ".join(f"STATE_{number} = {number};" for number in self.enum_values)
        return "\n".join(
            [
                f'syntax = "{self.syntax}";',
                f"package {self.package};",
                f"enum {ENUM} {{ {values} }}",
                *(message.text for message in self.messages),
            ]
        )

    @property
    def names(self) -> list[str]:
        return [
            name
            for message in self.messages
            for name in (message.name, *(f"{message.name}.{one.name}" for one in message.nested))
        ]

    @property
    def all_messages(self) -> list[Message]:
        return [one for message in self.messages for one in (message, *message.nested)]


def random_file(random: Random) -> File:
    """A file with one to three messages."""
    found = File(random.choice(("proto2", "proto3")), "shop", [], [0, 1])
    for index in range(random.randint(1, 3)):
        nested = [Message("Inner")] if random.random() < 0.4 else []
        found.messages.append(Message(f"M{index}", [], nested))
    for message in found.all_messages:
        for number in random.sample(range(1, 8), random.randint(0, 5)):
            message.fields.append(_random_field(random, found, number))
        _repair(found, message)
    return found


def changed_file(random: Random, file: File) -> File:
    """A copy of a file with one to five changes."""
    found = copy.deepcopy(file)
    for _ in range(random.randint(1, 5)):
        random.choice(CHANGES)(random, found)
    for message in found.all_messages:
        _repair(found, message)
    return found


def random_message(random: Random, kind: Any, depth: int = 0) -> Any:
    """A message of a class made from a descriptor, with all required fields."""
    message = kind()
    for one in kind.DESCRIPTOR.fields:
        if one.is_required or random.random() < 0.7:
            _set_field(random, message, one, depth)
    return message


def _set_field(random: Random, message: Any, one: Any, depth: int) -> None:
    if one.message_type is not None and one.message_type.GetOptions().map_entry:
        key, value = (one.message_type.fields_by_name[part] for part in ("key", "value"))
        for _ in range(random.randint(0, 2) if depth < DEPTH_MAX else 0):
            drawn = _random_scalar(random, key)
            if value.message_type is None:
                getattr(message, one.name)[drawn] = _random_scalar(random, value)
            else:
                getattr(message, one.name)[drawn].CopyFrom(
                    random_message(random, GetMessageClass(value.message_type), depth + 1)
                )
    elif one.message_type is not None:
        if depth < DEPTH_MAX:
            drawn = random_message(random, GetMessageClass(one.message_type), depth + 1)
            if one.is_repeated:
                getattr(message, one.name).append(drawn)
            else:
                getattr(message, one.name).CopyFrom(drawn)
    elif one.is_repeated:
        getattr(message, one.name).extend(_random_scalar(random, one) for _ in range(random.randint(0, 3)))
    else:
        setattr(message, one.name, _random_scalar(random, one))


def _random_scalar(random: Random, one: Any) -> Any:
    """A value of a scalar field. One of a required field is a number that every enum has: for a reader whose closed
    enum does not have it, the field would be missing."""
    if one.type == FieldDescriptor.TYPE_STRING:
        return random.choice(TEXTS)
    if one.type == FieldDescriptor.TYPE_BYTES:
        return random.choice(TEXTS).encode()
    if one.type == FieldDescriptor.TYPE_ENUM:
        values = one.enum_type.values[:2] if one.is_required else one.enum_type.values
        return random.choice([value.number for value in values])
    if one.type == FieldDescriptor.TYPE_BOOL:
        return random.random() < 0.5
    numbers = NUMBERS[:3] if one.type == FieldDescriptor.TYPE_FLOAT else NUMBERS
    return random.choice(numbers[:2] if one.is_required else numbers)


def _random_type(random: Random, file: File) -> str:
    draw = random.random()
    if draw < 0.7:
        return random.choice(SCALARS)
    if draw < 0.8:
        return ENUM
    return random.choice(file.names)


def _random_field(random: Random, file: File, number: int) -> Field:
    draw = random.random()
    name = f"f{number}"
    if draw < 0.1:
        return Field(number, name, f"map<{random.choice(KEYS)}, {_random_type(random, file)}>")
    if draw < 0.3:
        return Field(number, name, _random_type(random, file), "repeated")
    if draw < 0.5:
        return Field(number, name, _random_type(random, file), oneof=random.choice(("choice", "pick")))
    label = random.choice(("optional", "required" if random.random() < 0.3 else "optional"))
    label = label if file.syntax == "proto2" else random.choice(("", "optional"))
    return Field(number, name, _random_type(random, file), label)


def _repair(file: File, message: Message) -> None:
    """Make the message valid after changes: types that are gone, and labels that a type cannot have."""
    by_name = {}
    for one in message.fields:
        wanted = one.type.rpartition(", ")[2].rstrip(">")
        if wanted not in SCALARS and wanted != ENUM and wanted not in file.names:
            one.type = one.type.replace(wanted, "int32")
        if one.is_map:
            one.label = one.oneof = ""
        elif file.syntax == "proto2" and not one.label:
            one.label = "optional"
        elif file.syntax == "proto3" and one.label == "required":
            one.label = ""
        if one.label == "required" and one.type in file.names:
            one.label = "optional"  # a message that requires itself has no value
        if one.oneof and one.label == "repeated":
            one.oneof = ""
        by_name[one.name] = one
    numbers = {one.number: one for one in by_name.values()}
    message.fields = [*numbers.values()]
    _sort_oneofs(message)


def _sort_oneofs(message: Message) -> None:
    message.fields.sort(key=lambda one: (one.oneof, one.number))


def _some_field(random: Random, file: File) -> tuple[Message, Field] | None:
    message = random.choice(file.all_messages)
    return (message, random.choice(message.fields)) if message.fields else None


def _change_type(random: Random, file: File) -> None:
    if found := _some_field(random, file):
        found[1].type = random.choice(SCALARS) if random.random() < 0.8 else _random_type(random, file)


def _change_integer(random: Random, file: File) -> None:
    found = _some_field(random, file)
    if found and found[1].type in (*INTEGERS, ENUM):
        found[1].type = random.choice((*INTEGERS, ENUM))


def _change_label(random: Random, file: File) -> None:
    if found := _some_field(random, file):
        found[1].label = random.choice(("", "optional", "repeated", "required"))


def _remove_field(random: Random, file: File) -> None:
    if found := _some_field(random, file):
        found[0].fields.remove(found[1])


def _add_field(random: Random, file: File) -> None:
    message = random.choice(file.all_messages)
    number = random.randint(8, 12)
    message.fields = [one for one in message.fields if one.number != number]
    message.fields.append(_random_field(random, file, number))


def _rename_field(random: Random, file: File) -> None:
    if found := _some_field(random, file):
        found[1].name = f"renamed{found[1].number}"


def _renumber_field(random: Random, file: File) -> None:
    found = _some_field(random, file)
    if found and random.random() < 0.3:
        found[1].number += 20


def _move_into_oneof(random: Random, file: File) -> None:
    if found := _some_field(random, file):
        found[1].oneof = random.choice(("choice", "pick", "fresh"))


def _move_out_of_oneof(random: Random, file: File) -> None:
    if found := _some_field(random, file):
        found[1].oneof = ""


def _rename_oneof(random: Random, file: File) -> None:
    for one in random.choice(file.all_messages).fields:
        one.oneof = "renamed" if one.oneof == "choice" else one.oneof


def _remove_message(random: Random, file: File) -> None:
    if len(file.messages) > 1 and random.random() < 0.3:
        file.messages.remove(random.choice(file.messages))


def _add_message(random: Random, file: File) -> None:
    if "Added" not in file.names:
        file.messages.append(Message("Added", [Field(1, "f1", "string", "optional")]))


def _change_package(random: Random, file: File) -> None:
    file.package = "store"


def _add_enum_value(random: Random, file: File) -> None:
    if 2 not in file.enum_values:
        file.enum_values.append(2)


CHANGES: Final = (
    _change_type,
    _change_integer,
    _change_integer,
    _change_label,
    _remove_field,
    _add_field,
    _add_field,
    _rename_field,
    _renumber_field,
    _move_into_oneof,
    _move_out_of_oneof,
    _rename_oneof,
    _remove_message,
    _add_message,
    _change_package,
    _add_enum_value,
)
