"""Decoders of columns: versions of a subject merge to one type, and every process accepts the same versions."""

from __future__ import annotations

import base64
import json
import pickle
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mansio.errors import ConfigError
from mansio.schemas.avro import AvroSchema
from mansio.schemas.column_types import (
    IncompatibleTypes,
    check_readable,
    conform,
    list_type,
    map_type,
    merge_types,
    spark_type,
    struct_type,
)
from mansio.schemas.formats import ColumnFormat, SubjectDecoder, open_decoder
from mansio.serde.errors import SchemaRegistryError, UnsupportedSchema
from mansio.serde.frames import schema_key_bytes
from mansio.serde.http_registry import SchemaRegistry
from support.protobuf_files import FLIGHT_PROTO, descriptor_set, flight_class, serialized_file
from support.schema_registry import RegistryServer

if TYPE_CHECKING:
    from collections.abc import Iterator

TYPES = st.recursive(
    st.sampled_from([pa.int32(), pa.int64(), pa.float32(), pa.float64(), pa.string(), pa.decimal128(9, 2)]),
    lambda inner: st.one_of(
        inner.map(list_type),
        inner.map(lambda one: map_type(pa.string(), one)),
        st.dictionaries(st.sampled_from("abcd"), inner, min_size=1).map(
            lambda one: struct_type(list(one.items()))
        ),
    ),
    max_leaves=6,
)


def record(**fields: Any) -> dict[str, Any]:
    return {
        "type": "record",
        "name": "Flight",
        "fields": [{"name": name, "type": kind} for name, kind in fields.items()],
    }


def encoded(schema_id: int, schema: Any, value: Any) -> bytes:
    return schema_key_bytes(schema_id) + AvroSchema(json.dumps(schema)).encode(value)


@pytest.fixture
def server() -> Iterator[RegistryServer]:
    with RegistryServer() as running:
        yield running


def column(server: RegistryServer, **more: Any) -> ColumnFormat:
    return ColumnFormat("avro", registry=server.url, subject="s", **more)


@given(TYPES, TYPES)
def test_merged_type_reads_both_and_is_merged_with_itself(one: pa.DataType, other: pa.DataType) -> None:
    assert merge_types(one, one) == one
    try:
        merged = merge_types(one, other)
    except IncompatibleTypes:
        return
    check_readable(one, merged)
    check_readable(other, merged)
    assert merge_types(merged, other) == merge_types(merged, one) == merged


@given(TYPES, TYPES)
def test_values_of_a_readable_type_fit_into_the_column(kind: pa.DataType, target: pa.DataType) -> None:
    try:
        check_readable(kind, target)
    except IncompatibleTypes:
        return
    assert merge_types(target, kind) == target or spark_type(kind) != spark_type(target)


def test_versions_of_a_subject_add_and_widen_fields(server: RegistryServer) -> None:
    one, two = record(a="int", gone="string"), record(a="long", b=["null", "string"])
    ids = server.register("s", one), server.register("s", two)
    decoder = open_decoder(column(server))
    assert spark_type(decoder.type) == "struct<`a`: bigint, `gone`: string, `b`: string>"
    found = decoder.decode(
        [encoded(ids[0], one, {"a": 1, "gone": "g"}), None, encoded(ids[1], two, {"a": 1 << 40, "b": "b"})]
    )
    assert found.array.to_pylist() == [
        {"a": 1, "gone": "g", "b": None},
        None,
        {"a": 1 << 40, "gone": None, "b": "b"},
    ]
    assert not found.errors


def test_version_that_is_registered_while_the_decoder_runs_is_found_with_one_request(
    server: RegistryServer,
) -> None:
    one, two = record(a="int"), record(a="int", b="double")
    first = server.register("s", one)
    decoder = open_decoder(column(server))
    second = server.register("s", two)
    before = len(server.requests)
    values: list[Any] = [encoded(second, two, {"a": 1, "b": 2.0})] * 3 + [encoded(first, one, {"a": 2})]
    unknown: list[bytes | None] = [schema_key_bytes(number) + b"\x02" for number in range(50, 60)]
    found = decoder.decode(values + unknown)
    assert found.array.to_pylist()[:4] == [{"a": 1, "b": 2.0}] * 3 + [{"a": 2, "b": None}]
    assert found.errors == {row: f"schema id {46 + row} is not of subject s" for row in range(4, 14)}
    assert len(server.requests) - before == 2  # the versions, and the new one


def test_incompatible_version_is_rejected_whenever_a_process_asks(server: RegistryServer) -> None:
    first, bad, last = record(a="int"), record(a="string"), record(a="long", c="int")
    ids = [server.register("s", one) for one in (first, bad, last)]
    values: list[bytes | None] = [
        encoded(ids[0], first, {"a": 1}),
        encoded(ids[1], bad, {"a": "x"}),
        encoded(ids[2], last, {"a": 2, "c": 3}),
    ]
    late = open_decoder(column(server))
    resumed = SubjectDecoder(column(server), SchemaRegistry(server.url), late.type)
    for decoder in (late, resumed):
        found = decoder.decode(values)
        assert [one and one["a"] for one in found.array.to_pylist()] == [1, None, 2]
        assert list(found.errors) == [1]
        assert "to string" in found.errors[1]
        assert decoder.type == late.type


def test_subject_that_is_incompatible_with_the_table_is_refused(server: RegistryServer) -> None:
    server.register("s", record(a="string"))
    with pytest.raises(
        UnsupportedSchema, match=r"no version of subject s can be used: .* from bigint to string"
    ):
        open_decoder(column(server), struct_type([("a", pa.int64())]))
    schema = json.dumps(record(a="string"))
    with pytest.raises(UnsupportedSchema, match="field a changes from bigint to string"):
        open_decoder(ColumnFormat("avro", schema=schema), struct_type([("a", pa.int64())]))


@given(st.data(), TYPES, TYPES)
def test_array_conforms_to_a_merged_type_without_other_changes(
    data: st.DataObject, kind: pa.DataType, other: pa.DataType
) -> None:
    try:
        merged = merge_types(kind, other)
    except IncompatibleTypes:
        return
    rows = data.draw(st.lists(st.none() | values_of(kind), max_size=4))
    array = pa.array(rows, kind)
    found = conform(array, merged)
    found.validate(full=True)
    assert found.type == merged
    assert found.to_pylist() == pa.array(rows, merged).to_pylist()
    assert conform(array[1:], merged).to_pylist() == found.to_pylist()[1:]


def values_of(kind: pa.DataType) -> st.SearchStrategy[Any]:
    if pa.types.is_struct(kind):
        return st.fixed_dictionaries({one.name: st.none() | values_of(one.type) for one in kind})
    if pa.types.is_list(kind):
        return st.lists(st.none() | values_of(kind.value_type), max_size=3)
    if pa.types.is_map(kind):
        return st.dictionaries(st.sampled_from("xyz"), st.none() | values_of(kind.item_type)).map(
            lambda one: list(one.items())
        )
    if pa.types.is_string(kind):
        return st.text(max_size=3)
    if pa.types.is_decimal(kind):
        return st.integers(-999, 999).map(lambda number: Decimal(number).scaleb(-2))
    return st.integers(-100, 100)


def test_fixed_type_ignores_later_fields_and_rejects_wider_ones(server: RegistryServer) -> None:
    first, more, wider = record(a="int"), record(a="int", b="int"), record(a="long")
    ids = [server.register("s", first)]
    planned = open_decoder(column(server)).type
    ids += [server.register("s", one) for one in (more, wider)]
    values: list[bytes | None] = [
        encoded(ids[1], more, {"a": 1, "b": 2}),
        encoded(ids[2], wider, {"a": 1}),
    ]
    started_before = open_decoder(column(server), planned, is_fixed=True)
    found = started_before.decode(values)
    assert found.array.to_pylist() == [{"a": 1}, None]
    assert "Start the query again" in found.errors[1]
    assert started_before.type == planned


def test_values_of_other_subjects_and_plain_values_are_malformed(server: RegistryServer) -> None:
    schema = record(a="int")
    server.register("s", schema)
    other = server.register("other", record(z="int"))
    found = open_decoder(column(server)).decode([encoded(other, schema, {"a": 1}), b"", b"\x01plain"])
    assert found.errors[0] == f"schema id {other} is not of subject s"
    assert "wire format" in found.errors[1]
    assert "wire format" in found.errors[2]


def test_unavailable_registry_is_an_error_and_not_a_malformed_value(
    server: RegistryServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mansio.serde.http_registry.RETRY_PAUSE_S", 0.001)
    server.register("s", record(a="int"))
    decoder = open_decoder(column(server))
    server.failures += [503] * 4
    with pytest.raises(SchemaRegistryError, match="does not answer"):
        decoder.decode([schema_key_bytes(9) + b"\x02"])


def test_reader_schema_decides_about_columns_and_defaults(server: RegistryServer) -> None:
    writer = record(a="int", dropped="string")
    reader = record(a="long")
    reader["fields"].append({"name": "b", "type": "string", "default": "d"})
    schema_id = server.register("other", writer)
    decoder = open_decoder(column(server, schema=json.dumps(reader)))
    found = decoder.decode([encoded(schema_id, writer, {"a": 1, "dropped": "x"}), schema_key_bytes(77)])
    assert found.array.to_pylist() == [{"a": 1, "b": "d"}, None]
    assert "Schema not found" in found.errors[1]


def test_protobuf_values_of_a_subject(server: RegistryServer) -> None:
    schema_id = server.register("s", serialized_file(FLIGHT_PROTO), "PROTOBUF")
    content = flight_class()(carrier="UA").SerializeToString()
    values: list[bytes | None] = [
        schema_key_bytes(schema_id) + b"\x00" + content,
        schema_key_bytes(schema_id) + b"\x02\x04" + content,
    ]
    descriptors = base64.b64encode(descriptor_set(FLIGHT_PROTO)).decode()
    named: dict[str, Any] = {"schema": descriptors, "message": "example.Flight"}
    for more in ({}, named):
        decoder = open_decoder(ColumnFormat("protobuf", registry=server.url, subject="s", **more))
        found = decoder.decode(values)
        assert found.array[0]["carrier"].as_py() == "UA"
        assert found.errors[1] == "the value is a example.Other message, not example.Flight"


def test_json_values_of_a_subject(server: RegistryServer) -> None:
    schemas = [
        {"type": "object", "properties": {name: {"type": "integer"} for name in names}}
        for names in ("a", "ab")
    ]
    ids = [server.register("s", one, "JSON") for one in schemas]
    decoder = open_decoder(ColumnFormat("json", registry=server.url, subject="s"))
    found = decoder.decode([schema_key_bytes(one) + b'{"a": 1, "b": 2}' for one in ids])
    assert found.array.to_pylist() == [{"a": 1, "b": None}, {"a": 1, "b": 2}]


def test_subject_of_another_format_is_refused(server: RegistryServer) -> None:
    server.register("s", '{"type": "object"}', "JSON")
    with pytest.raises(
        UnsupportedSchema, match=r"no version of subject s can be used: .*type JSON, not AVRO"
    ):
        open_decoder(column(server))


def test_incomplete_formats_are_refused() -> None:
    for wrong, match in (
        (ColumnFormat("xml", schema="x"), "no format 'xml'"),
        (ColumnFormat("avro"), "needs a schema"),
        (ColumnFormat("avro", schema='"int"', message="M"), "message name is for protobuf"),
        (ColumnFormat("avro", registry="http://u:p@h", subject="s"), "credentials"),
    ):
        with pytest.raises(ConfigError, match=match):
            open_decoder(wrong)


def test_format_is_sent_to_tasks_with_credentials_that_it_does_not_show() -> None:
    from mansio.serde.http_registry import RegistryCredentials

    wanted = ColumnFormat("avro", schema='"int"', credentials=RegistryCredentials("u", "s3cret"))
    assert pickle.loads(pickle.dumps(wanted)) == wanted
    assert "s3cret" not in repr(wanted)
