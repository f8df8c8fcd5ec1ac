"""Frames: Mansio and confluent-kafka read what the other one writes, and hostile bytes are typed errors."""

from __future__ import annotations

import io
from typing import Any
from uuid import UUID

import pytest
from confluent_kafka.schema_registry import (
    dual_schema_id_deserializer,
    header_schema_id_serializer,
    prefix_schema_id_serializer,
)
from confluent_kafka.schema_registry.serde import SchemaId
from confluent_kafka.serialization import MessageField, SerializationContext
from hypothesis import given
from hypothesis import strategies as st

from mansio.serde.errors import MalformedValue, NotFramed
from mansio.serde.frames import (
    KEY_HEADER,
    MESSAGE_INDEXES_MAX,
    VALUE_HEADER,
    find_frame,
    message_indexes_bytes,
    schema_key_bytes,
    split_message_indexes,
    split_schema_key,
)

IDS = st.integers(0, (1 << 32) - 1)
INDEXES = st.lists(st.integers(0, 1 << 30), min_size=1, max_size=8)


def context(*, is_key: bool) -> SerializationContext:
    return SerializationContext("orders", MessageField.KEY if is_key else MessageField.VALUE, [])


@given(IDS | st.uuids(), st.binary())
def test_a_frame_is_split_as_it_is_joined(schema: int | UUID, value: bytes) -> None:
    assert split_schema_key(schema_key_bytes(schema) + value) == (schema, value)


@given(INDEXES, st.binary())
def test_message_indexes_are_split_as_they_are_joined(indexes: list[int], value: bytes) -> None:
    assert split_message_indexes(message_indexes_bytes(indexes) + value) == (tuple(indexes), value)


@given(IDS, INDEXES, st.binary(), st.booleans())
def test_confluents_client_reads_a_frame_in_the_value(
    number: int, indexes: list[int], value: bytes, is_key: bool
) -> None:
    data = schema_key_bytes(number) + message_indexes_bytes(indexes) + value
    found = SchemaId("PROTOBUF")
    rest = dual_schema_id_deserializer(data, context(is_key=is_key), found)
    assert (found.id, found.message_indexes, rest.read()) == (number, indexes, value)


@given(IDS, st.uuids(), INDEXES, st.binary(), st.booleans())
def test_both_frames_of_confluents_client_are_read(
    number: int, guid: UUID, indexes: list[int], value: bytes, is_key: bool
) -> None:
    written = SchemaId("PROTOBUF", number, str(guid), indexes)
    in_value = find_frame(prefix_schema_id_serializer(value, None, written), (), is_key=is_key)
    assert (in_value.schema, in_value.message()) == (number, (tuple(indexes), value))
    where = context(is_key=is_key)
    payload = header_schema_id_serializer(value, where, written)
    headers: Any = where.headers
    assert headers[0] == (
        KEY_HEADER if is_key else VALUE_HEADER,
        schema_key_bytes(guid) + message_indexes_bytes(indexes),
    )
    in_header = find_frame(payload, headers, is_key=is_key)
    assert (in_header.schema, in_header.message()) == (guid, (tuple(indexes), value))


def test_the_header_of_a_key_does_not_count_for_the_value() -> None:
    headers = [(KEY_HEADER, schema_key_bytes(UUID(int=1)))]
    assert find_frame(b"k", headers, is_key=True).schema == UUID(int=1)
    with pytest.raises(NotFramed):
        find_frame(b"v", headers, is_key=False)


def test_the_first_header_counts_and_one_without_content_does_not() -> None:
    headers = [(VALUE_HEADER, None), (VALUE_HEADER, schema_key_bytes(7)), (VALUE_HEADER, schema_key_bytes(8))]
    assert find_frame(b"v", headers, is_key=False).schema == 7


@pytest.mark.parametrize("data", [b"", b"\0", b"\0\0\0\0", b"\1" + b"x" * 15, b"\2" * 20, b'{"a": 1}'])
def test_what_is_not_framed_is_a_typed_error(data: bytes) -> None:
    with pytest.raises(NotFramed):
        find_frame(data, (), is_key=False)
    with pytest.raises(NotFramed):
        find_frame(b"v", [(VALUE_HEADER, data)], is_key=False)


@given(st.binary(max_size=40))
def test_any_bytes_are_split_or_malformed(data: bytes) -> None:
    for split in (split_schema_key, split_message_indexes):
        try:
            found = split(data)
        except MalformedValue:
            continue
        assert data.endswith(found[1])


def test_a_header_with_more_than_the_schema_is_malformed() -> None:
    header = schema_key_bytes(UUID(int=1)) + b"\0\0"
    frame = find_frame(b"v", [(VALUE_HEADER, header)], is_key=False)
    with pytest.raises(MalformedValue):
        frame.payload()
    with pytest.raises(MalformedValue):
        frame.message()


def test_message_indexes_are_bounded() -> None:
    many = SchemaId("PROTOBUF", 1, None, [0] * (MESSAGE_INDEXES_MAX + 1)).id_to_bytes()
    with pytest.raises(MalformedValue, match="65 Protobuf message indexes"):
        find_frame(many, (), is_key=False).message()
    for indexes in ([], [0] * (MESSAGE_INDEXES_MAX + 1)):
        with pytest.raises(ValueError, match="no indexes"):
            message_indexes_bytes(indexes)


def test_first_message_takes_one_byte() -> None:
    assert message_indexes_bytes([0]) == b"\0"
    buffer = io.BytesIO(b"\0rest")
    assert SchemaId._read_index_array(buffer) == [0]
    assert buffer.read() == b"rest"
