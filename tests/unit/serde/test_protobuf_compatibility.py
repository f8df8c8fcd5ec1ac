"""A Protobuf schema that counts as compatible reads what the other one wrote."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any

import pytest
from google.protobuf import message_factory
from google.protobuf.descriptor import FieldDescriptor
from hypothesis import given, settings
from hypothesis import strategies as st

from mansio.serde.compatibility.protobuf import RULES, incompatibilities
from mansio.serde.definition import ReferencedSchema
from mansio.serde.formats.protobuf import parse
from support.protobuf_evolution import changed_file, random_file, random_message
from support.tiers import examples
from unit.serde.protobuf_cases import CASES, Case, file_text

if TYPE_CHECKING:
    from collections.abc import Iterable

STRINGS = (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)


def rules(reader: str, writer: str) -> tuple[str, ...]:
    return tuple(one.rule for one in incompatibilities(parse(reader), parse(writer)))


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_verdict_is_that_of_the_table(case: Case) -> None:
    assert rules(file_text(case.reader), file_text(case.writer)) == case.rules


def test_table_has_each_rule() -> None:
    assert {rule for case in CASES for rule in case.rules} == RULES.keys()


def test_schema_is_compatible_with_itself() -> None:
    for case in CASES:
        assert rules(file_text(case.reader), file_text(case.reader)) == ()


def test_incompatibility_names_its_place() -> None:
    writer = (
        'syntax = "proto3"; package shop; message Order { message Line { int32 price = 3; } Line line = 1; }'
    )
    found = incompatibilities(parse(writer.replace("int32", "string")), parse(writer))
    assert [one.path for one in found] == ["#/Order/Line/3"]
    assert found[0].message == "price at #/Order/Line/3: the scalar type of the field has another encoding"


def test_messages_of_imports_are_compared() -> None:
    text = 'syntax = "proto3"; import "money.proto"; message Order { bank.Money price = 1; }'
    money = 'syntax = "proto3"; package bank; message Money { int64 units = 1; }'
    writer = parse(text, [ReferencedSchema("money.proto", money)])
    wider = parse(text, [ReferencedSchema("money.proto", money.replace("int64", "uint64"))])
    other = parse(text, [ReferencedSchema("money.proto", money.replace("int64", "double"))])
    moved = parse(
        text.replace("bank", "cash"), [ReferencedSchema("money.proto", money.replace("bank", "cash"))]
    )
    assert incompatibilities(wider, writer) == []
    assert [(one.rule, one.path) for one in incompatibilities(other, writer)] == [
        ("FIELD_SCALAR_KIND_CHANGED", "#/bank.Money/1")
    ]
    assert [one.rule for one in incompatibilities(moved, writer)] == ["FIELD_NAMED_TYPE_CHANGED"]


def test_messages_that_contain_each_other_end_the_comparison() -> None:
    names = [f"M{index}" for index in range(90)]
    fields = " ".join(f"{name} f{number} = {number};" for number, name in enumerate(names, 1))
    text = 'syntax = "proto3"; ' + " ".join(f"message {name} {{ {fields} int32 x = 200; }}" for name in names)
    assert rules(text, text) == ()
    found = rules(text.replace("int32", "float"), text)
    assert found == ("FIELD_SCALAR_KIND_CHANGED",) * 90


@settings(max_examples=examples(test=15, full=500))
@given(st.integers(0, 2**32))
def test_compatible_reader_reads_what_the_writer_wrote(seed: int) -> None:
    random = Random(seed)
    file = random_file(random)
    writer, reader = parse(file.text), parse(changed_file(random, file).text)
    pairs = ((reader, writer), (writer, reader))
    for one, other in pairs:
        if not incompatibilities(one, other):
            assert_reads(random, one, other)


def assert_reads(random: Random, reader: Any, writer: Any) -> None:
    messages = reader.file.message_types_by_name
    for name, descriptor in writer.file.message_types_by_name.items():
        for _ in range(3):
            written = random_message(random, message_factory.GetMessageClass(descriptor))
            read = message_factory.GetMessageClass(messages[name]).FromString(written.SerializeToString())
            assert read.IsInitialized()
            assert_survives(read, written)


def assert_survives(read: Any, written: Any) -> None:
    """Values of fields that both messages have are equal, as far as the type of the reader can have them."""
    fields = read.DESCRIPTOR.fields_by_number
    for field, value in written.ListFields():
        other = fields.get(field.number)
        if other is not None:
            assert_field_survives(getattr(read, other.name), other, value, field)


def assert_field_survives(found: Any, reader: Any, value: Any, writer: Any) -> None:
    if reader.message_type is not None and reader.message_type.GetOptions().map_entry:
        key_type, value_type = (reader.message_type.fields_by_name[part] for part in ("key", "value"))
        kept = {converted(key, key_type): one for key, one in value.items()}
        if len(kept) == len(value):  # no two keys have become one
            for key, one in kept.items():
                # An entry with a number that its closed enum does not have is an unknown field.
                if value_type.message_type is not None or converted(one, value_type) is not None:
                    assert_value_survives(found[key], value_type, one)
        return
    wanted = list(value) if writer.is_repeated else [value]
    if reader.is_repeated:
        known = [one for one in wanted if reader.message_type or converted(one, reader) is not None]
        for one, expected in zip(found, known, strict=True):
            assert_value_survives(one, reader, expected)
    elif reader.message_type is not None and len(wanted) > 1:
        pass  # the elements are merged
    else:
        assert_value_survives(found, reader, wanted[-1])


def assert_value_survives(found: Any, reader: Any, value: Any) -> None:
    if reader.message_type is not None:
        assert_survives(found, value)
        return
    expected = converted(value, reader)
    assert expected is None or found == expected


def converted(value: Any, reader: Any) -> Any:
    """The value in the type of the reader; None if it is a number that its closed enum does not have."""
    if reader.type == FieldDescriptor.TYPE_BOOL:
        return bool(value)
    if reader.type in STRINGS:
        text = value.encode() if isinstance(value, str) else value
        return text.decode() if reader.type == FieldDescriptor.TYPE_STRING else text
    if is_closed(reader) and value not in numbers(reader.enum_type.values):
        return None
    return value


def is_closed(field: Any) -> bool:
    return field.enum_type is not None and field.enum_type.is_closed


def numbers(values: Iterable[Any]) -> set[int]:
    return {value.number for value in values}
