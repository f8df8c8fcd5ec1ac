"""Protobuf messages: as Protobuf's own classes, with the messages of a file and of those that it imports."""

from __future__ import annotations

import base64
import time
from typing import Any

import pytest
from google.protobuf import descriptor_pb2
from hypothesis import given
from hypothesis import strategies as st

from mansio.serde.codecs.protobuf import ProtobufCodec
from mansio.serde.definition import ReferencedSchema
from mansio.serde.errors import MalformedValue, UnsupportedSchema
from support.protobuf_files import FLIGHT_PROTO, flight_class, serialized_file

FLIGHTS = st.fixed_dictionaries(
    {},
    optional={
        "carrier": st.text(st.characters(exclude_categories=["Cs"]), min_size=1),
        "delay": st.integers(-(1 << 31), -1),
        "seats": st.integers(1, (1 << 64) - 1).map(str),
        "legs": st.lists(st.text("ab"), min_size=1, max_size=3),
        "gate": st.text("ab"),
        "leaves": st.just("2026-01-31T12:00:00.000001Z"),
        "fares": st.dictionaries(st.text("ab"), st.sampled_from([0.5, 2.0]), min_size=1, max_size=2),
        "state": st.just("BOARDING"),
        "plane": st.fixed_dictionaries({"tail": st.text("ab", min_size=1)}),
        "crew_id": st.integers(1, 9),
    },
)


@pytest.fixture(scope="module")
def codec() -> ProtobufCodec:
    return ProtobufCodec(serialized_file(FLIGHT_PROTO))


@given(FLIGHTS)
def test_protobufs_own_class_reads_what_is_written(value: dict[str, Any]) -> None:
    codec = ProtobufCodec(serialized_file(FLIGHT_PROTO))
    data = codec.encode(value)
    message = flight_class().FromString(data)
    assert message.carrier == value.get("carrier", "")
    assert message.SerializeToString(deterministic=True) == data == codec.encode(message)
    assert codec.decode(data) == codec.decode_json(data) == value


@pytest.mark.full
@given(st.binary(max_size=60))
def test_any_bytes_are_decoded_or_malformed(data: bytes) -> None:
    try:
        ProtobufCodec(serialized_file(FLIGHT_PROTO)).decode(data)
    except MalformedValue as error:
        message = str(error)
    else:
        return
    assert message.startswith("$")


def test_a_message_is_named_by_its_name_or_its_indexes(codec: ProtobufCodec) -> None:
    for name in ("example.Flight", "example.Flight.Plane", "example.Other"):
        assert codec.message(codec.indexes(name)) == name
    assert codec.name == "example.Flight"
    assert codec.decode(codec.encode({"id": 7}, "example.Other"), "example.Other") == {"id": 7}
    with pytest.raises(UnsupportedSchema, match=r"no message example\.Nothing"):
        codec.encode({}, "example.Nothing")
    with pytest.raises(UnsupportedSchema, match="no message google"):
        codec.indexes("google.protobuf.Timestamp")
    with pytest.raises(MalformedValue, match=r"is a example\.Flight message, not example\.Other"):
        codec.encode(flight_class()(), "example.Other")


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"delay": "a"}, r"\$\.delay "),
        ({"plane": {"x": 1}}, r"\$\.plane "),
        ({"plane": {"tail": 5}}, r"\$\.plane\.tail "),
        ({"fares": {"a": "z"}}, r"\$\.fares "),
        ({"nothing": 1}, r"\$ "),
        ({"delay": 1 << 40}, r"\$\.delay "),
        (5, r"\$ is of type int, not a message"),
    ],
)
def test_the_error_of_a_value_names_the_path(codec: ProtobufCodec, value: Any, path: str) -> None:
    with pytest.raises(MalformedValue, match=f"^{path}"):
        codec.encode(value)


def test_imports_are_found_by_the_name_of_the_reference() -> None:
    plane = 'syntax = "proto3"; package x; message Plane { string tail = 1; }'
    file = descriptor_pb2.FileDescriptorProto(name="f.proto", package="x", syntax="proto3")
    file.dependency.append("planes/plane.proto")
    message = file.message_type.add(name="Flight")
    message.field.add(name="plane", number=1, type=11, label=1, type_name=".x.Plane")
    text = base64.b64encode(file.SerializeToString()).decode()
    codec = ProtobufCodec(text, [ReferencedSchema("planes/plane.proto", serialized_file(plane))])
    assert codec.decode(codec.encode({"plane": {"tail": "N1"}})) == {"plane": {"tail": "N1"}}
    with pytest.raises(UnsupportedSchema, match="incomplete"):
        ProtobufCodec(text)


def test_hostile_bytes_cost_little_time(codec: ProtobufCodec) -> None:
    nested = 'syntax = "proto3"; message Node { Node next = 1; repeated Node more = 2; }'
    node = ProtobufCodec(serialized_file(nested))
    data, begin = b"", time.process_time()
    for _ in range(150):
        data = b"\x0a" + bytes((len(data) & 0x7F | 0x80, len(data) >> 7)) + data
    with pytest.raises(MalformedValue, match=r"^\$ is no Node message"):
        node.decode(data)
    assert len(node.decode(b"\x12\0" * 50_000)["more"]) == 50_000
    value: Any = {}
    for _ in range(150):
        value = {"next": value}
    with pytest.raises(MalformedValue):
        node.encode(value)
    assert time.process_time() - begin < 30


@pytest.mark.parametrize("text", ["", "?", "syntax", base64.b64encode(b"\xff" * 9).decode(), "A" * 2_000_000])
def test_a_schema_that_is_none_or_exceeds_a_bound_is_a_typed_error(text: str) -> None:
    with pytest.raises(UnsupportedSchema):
        ProtobufCodec(text)
