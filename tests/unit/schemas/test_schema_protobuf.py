"""Protobuf messages as column types, and their values."""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from google.protobuf import descriptor_pb2
from google.protobuf.descriptor_pb2 import FieldDescriptorProto
from hypothesis import given
from hypothesis import strategies as st

from mansio.schemas.column_types import spark_type
from mansio.schemas.decoding import decode_objects, to_column
from mansio.schemas.protobuf import ProtobufSchema
from mansio.serde.codecs.descriptor_pools import (
    default_message,
    message_name,
    pool_of_descriptor_set,
    pool_of_files,
)
from mansio.serde.errors import MalformedValue, UnsupportedSchema
from support.protobuf_files import FLIGHT_PROTO, descriptor_set, flight_class, serialized_file

SCALARS: dict[int, tuple[str, st.SearchStrategy[Any]]] = {
    FieldDescriptorProto.TYPE_DOUBLE: ("double", st.floats(allow_nan=False)),
    FieldDescriptorProto.TYPE_FLOAT: ("float", st.floats(allow_nan=False, width=32)),
    FieldDescriptorProto.TYPE_INT64: ("bigint", st.integers(-(1 << 63), (1 << 63) - 1)),
    FieldDescriptorProto.TYPE_UINT64: ("decimal(20,0)", st.integers(0, (1 << 64) - 1)),
    FieldDescriptorProto.TYPE_INT32: ("int", st.integers(-(1 << 31), (1 << 31) - 1)),
    FieldDescriptorProto.TYPE_UINT32: ("bigint", st.integers(0, (1 << 32) - 1)),
    FieldDescriptorProto.TYPE_SINT32: ("int", st.integers(-(1 << 31), (1 << 31) - 1)),
    FieldDescriptorProto.TYPE_FIXED64: ("decimal(20,0)", st.integers(0, (1 << 64) - 1)),
    FieldDescriptorProto.TYPE_FIXED32: ("bigint", st.integers(0, (1 << 32) - 1)),
    FieldDescriptorProto.TYPE_BOOL: ("boolean", st.booleans()),
    FieldDescriptorProto.TYPE_STRING: ("string", st.text(max_size=5)),
    FieldDescriptorProto.TYPE_BYTES: ("binary", st.binary(max_size=5)),
}


def flight() -> ProtobufSchema:
    return ProtobufSchema(pool_of_descriptor_set(descriptor_set(FLIGHT_PROTO)), "example.Flight")


@given(
    st.lists(st.tuples(st.sampled_from(sorted(SCALARS)), st.booleans()), min_size=1, max_size=6), st.data()
)
def test_scalars_are_decoded_as_they_were_encoded(kinds: list[tuple[int, bool]], data: st.DataObject) -> None:
    file = descriptor_pb2.FileDescriptorProto(name="t.proto", syntax="proto3")
    message = file.message_type.add(name="T")
    values, types = {}, []
    for number, (kind, is_repeated) in enumerate(kinds, 1):
        label = FieldDescriptorProto.LABEL_REPEATED if is_repeated else FieldDescriptorProto.LABEL_OPTIONAL
        message.field.add(name=f"f{number}", number=number, type=kind, label=label)
        name, strategy = SCALARS[kind]
        values[f"f{number}"] = data.draw(st.lists(strategy, max_size=3) if is_repeated else strategy)
        types.append(f"array<{name}>" if is_repeated else name)
    pool = pool_of_descriptor_set(descriptor_pb2.FileDescriptorSet(file=[file]).SerializeToString())
    parsed = ProtobufSchema(pool, "T")
    assert [spark_type(one.type) for one in parsed.type] == types
    encoded = parsed._class(**values).SerializeToString()
    (found,) = pa.array([parsed.decode(encoded)], parsed.type).to_pylist()
    assert found == values


@given(st.binary(max_size=60))
def test_any_bytes_are_decoded_or_malformed(content: bytes) -> None:
    parsed = flight()
    objects, errors = decode_objects([content], parsed.decode)
    assert to_column(objects, parsed.type, errors).array.type == parsed.type


def test_nested_types_presence_enums_maps_and_timestamps() -> None:
    parsed, kind = flight(), flight_class()
    assert spark_type(parsed.type).replace("`", "") == (
        "struct<carrier: string, delay: int, seats: decimal(20,0), legs: array<string>, gate: string,"
        " leaves: timestamp, fares: map<string, double>, state: string, plane: struct<tail: string>, crew_id: int,"
        " crew_name: string>"
    )
    message = kind(carrier="UA", seats=1, state=1, fares={"Y": 1.5}, crew_name="", plane={"tail": "N1"})
    message.leaves.FromDatetime(datetime(2026, 1, 31, 12, 0, 0, 5))  # noqa: DTZ001
    message.leaves.nanos += 999
    empty, full = (
        pa.array([parsed.decode(one.SerializeToString())], parsed.type).to_pylist()[0]
        for one in (kind(), message)
    )
    assert empty == {
        "carrier": "",
        "delay": 0,
        "seats": Decimal(0),
        "legs": [],
        "gate": None,
        "leaves": None,
        "fares": [],
        "state": "UNKNOWN",
        "plane": None,
        "crew_id": None,
        "crew_name": None,
    }
    assert full["leaves"] == datetime(2026, 1, 31, 12, 0, 0, 5, tzinfo=UTC)
    assert (full["fares"], full["state"], full["plane"]) == ([("Y", 1.5)], "BOARDING", {"tail": "N1"})
    assert full["crew_name"] == ""
    assert parsed.decode(kind(state=7).SerializeToString())["state"] == "7"


def test_timestamp_out_of_range_is_malformed() -> None:
    message = flight_class()()
    message.leaves.seconds = 1 << 62
    with pytest.raises(MalformedValue, match="is invalid"):
        flight().decode(message.SerializeToString())


def test_message_indexes_lead_to_the_message() -> None:
    pool, file = pool_of_files(serialized_file(FLIGHT_PROTO))
    assert message_name(pool, file, (0,)) == "example.Flight"
    assert message_name(pool, file, (0, 1)) == "example.Flight.Plane" or "Fares" in message_name(
        pool, file, (0, 0)
    )
    assert message_name(pool, file, (2,)) == "example.Other"
    with pytest.raises(MalformedValue, match="no message with the indexes"):
        message_name(pool, file, (9,))


def test_schemas_that_no_column_can_hold_are_refused() -> None:
    tree = 'syntax = "proto3"; message Tree { repeated Tree children = 1; }'
    with pytest.raises(UnsupportedSchema, match="Tree contains itself"):
        ProtobufSchema(pool_of_descriptor_set(descriptor_set(tree)), "Tree")
    struct = 'syntax = "proto3"; import "google/protobuf/struct.proto"; message T { google.protobuf.Struct s = 1; }'
    with pytest.raises(UnsupportedSchema, match=r"google\.protobuf\.\w+ contains itself"):
        ProtobufSchema(pool_of_descriptor_set(descriptor_set(struct)), "T")
    with pytest.raises(UnsupportedSchema, match=r"no message example\.None"):
        ProtobufSchema(pool_of_descriptor_set(descriptor_set(FLIGHT_PROTO)), "example.None")
    with pytest.raises(UnsupportedSchema, match=r"example\.Empty has no fields"):
        ProtobufSchema(pool_of_descriptor_set(descriptor_set(FLIGHT_PROTO)), "example.Empty")
    with pytest.raises(UnsupportedSchema, match="no FileDescriptorSet"):
        pool_of_descriptor_set(b"\xff\xff")
    alone = descriptor_pb2.FileDescriptorSet.FromString(descriptor_set(FLIGHT_PROTO))
    alone.file[-1].dependency.append("missing.proto")
    with pytest.raises(UnsupportedSchema, match="include_imports"):
        pool_of_descriptor_set(alone.SerializeToString())


def test_only_message_of_a_file_needs_no_name() -> None:
    assert (
        default_message(descriptor_set('syntax = "proto3"; package a; message One { int32 x = 1; }'))
        == "a.One"
    )
    with pytest.raises(UnsupportedSchema, match="Flight, Empty, Other"):
        default_message(descriptor_set(FLIGHT_PROTO))
    assert default_message(descriptor_set(FLIGHT_PROTO), takes_first=True) == "example.Flight"
