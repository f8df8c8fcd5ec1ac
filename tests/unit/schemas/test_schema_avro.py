"""Avro schemas as column types, and values: what is encoded is decoded, and nothing else is accepted."""

from __future__ import annotations

import json
import string
from datetime import UTC, date, datetime
from decimal import Decimal
from io import BytesIO
from typing import Any

import fastavro
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mansio.schemas.avro import AvroSchema, schema_of_type
from mansio.schemas.column_types import arrow_type, spark_type
from mansio.schemas.decoding import decode_objects, to_column
from mansio.serde.errors import MalformedValue, UnsupportedSchema

NAMES = st.text(string.ascii_lowercase, min_size=1, max_size=6)
MICROSECONDS = st.integers(-(10**15), 10**15)
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

LEAVES: list[tuple[Any, st.SearchStrategy[Any]]] = [
    ("boolean", st.booleans()),
    ("int", st.integers(-(1 << 31), (1 << 31) - 1)),
    ("long", st.integers(-(1 << 63), (1 << 63) - 1)),
    ("float", st.floats(width=32, allow_nan=False)),
    ("double", st.floats(allow_nan=False)),
    ("bytes", st.binary(max_size=8)),
    ("string", st.text(max_size=8)),
    (
        {"type": "int", "logicalType": "date"},
        st.dates(date(1900, 1, 1), date(2200, 1, 1)),
    ),
    ({"type": "int", "logicalType": "time-millis"}, st.integers(0, 86_399_999)),
    ({"type": "long", "logicalType": "time-micros"}, st.integers(0, 86_399_999_999)),
    (
        {"type": "long", "logicalType": "timestamp-micros"},
        st.datetimes(datetime(1900, 1, 1), datetime(2200, 1, 1), timezones=st.just(UTC)),  # noqa: DTZ001
    ),
    (
        {"type": "long", "logicalType": "local-timestamp-micros"},
        st.datetimes(datetime(1900, 1, 1), datetime(2200, 1, 1)),  # noqa: DTZ001
    ),
    ({"type": "string", "logicalType": "uuid"}, st.uuids().map(str)),
    (
        {"type": "bytes", "logicalType": "decimal", "precision": 12, "scale": 3},
        st.integers(-(10**12) + 1, 10**12 - 1).map(lambda number: Decimal(number).scaleb(-3)),
    ),
]


@st.composite
def schemas(draw: st.DrawFn, depth: int = 3) -> tuple[Any, st.SearchStrategy[Any]]:
    """A schema, and a strategy for its values in the form in which Arrow returns them."""
    kind = draw(st.sampled_from(["leaf", "record", "array", "map", "union", "enum", "fixed", "several"]))
    if kind == "enum":
        name = draw(_type_names())
        return {"type": "enum", "name": name, "symbols": ["A", "B"]}, st.sampled_from(["A", "B"])
    if kind == "fixed":
        return {"type": "fixed", "name": draw(_type_names()), "size": 3}, st.binary(min_size=3, max_size=3)
    if kind == "leaf" or depth == 0:
        return draw(st.sampled_from(LEAVES))
    if kind == "record":
        names = draw(st.lists(NAMES, min_size=1, max_size=4, unique=True))
        inner = [draw(schemas(depth - 1)) for _ in names]
        fields = [{"name": name, "type": one[0]} for name, one in zip(names, inner, strict=True)]
        values = st.fixed_dictionaries({name: one[1] for name, one in zip(names, inner, strict=True)})
        return {"type": "record", "name": draw(_type_names()), "fields": fields}, values
    if kind == "several":
        members = draw(
            st.lists(st.sampled_from(LEAVES[5:7] + LEAVES[:1]), min_size=2, max_size=3, unique_by=str)
        )
        every = [f"member{number}" for number in range(len(members))]
        one_of = [
            one[1].map(lambda value, name=name: {**dict.fromkeys(every), name: value})
            for name, one in zip(every, members, strict=True)
        ]
        return ["null", *(one[0] for one in members)], st.none() | st.one_of(one_of)
    inner_schema, inner_values = draw(schemas(depth - 1))
    if kind == "array":
        return {"type": "array", "items": inner_schema}, st.lists(inner_values, max_size=3)
    if kind == "map":
        entries: Any = st.dictionaries(st.text(max_size=3), inner_values, max_size=3)
        return {"type": "map", "values": inner_schema}, entries.map(lambda one: list(one.items()))
    if isinstance(inner_schema, list):
        return inner_schema, inner_values
    return [inner_schema, "null"], st.none() | inner_values


_numbers = iter(range(10**9))


def _type_names() -> st.SearchStrategy[str]:
    """Names that no other type of the schema has, some with a namespace."""
    return st.sampled_from(["T", "a.T", "a.b.T"]).map(lambda name: f"{name}{next(_numbers)}")


@given(st.data())
def test_every_value_is_decoded_as_it_was_encoded(data: st.DataObject) -> None:
    schema, values = data.draw(schemas())
    parsed = AvroSchema(json.dumps(schema))
    value = data.draw(values)
    encoded = None if value is None else parsed.encode(value)
    if encoded is None:
        return
    column = to_column([parsed.decoder()(encoded)], parsed.type, {})
    assert not column.errors
    assert column.array.to_pylist() == pa.array([value], parsed.type).to_pylist()
    for other in (encoded + b"\0", encoded[:-1]):
        if other != encoded:
            with pytest.raises(MalformedValue):
                parsed.decoder()(other)


@given(st.data(), st.binary(max_size=40))
def test_any_bytes_are_decoded_or_malformed(data: st.DataObject, content: bytes) -> None:
    schema, _ = data.draw(schemas())
    parsed = AvroSchema(json.dumps(schema))
    objects, errors = decode_objects([content], parsed.decoder())
    column = to_column(objects, parsed.type, errors)
    assert column.array.type == parsed.type
    assert column.array.null_count >= len(column.errors)


@given(schemas())
def test_types_are_those_that_spark_reads_from_the_sql_text(schema: tuple[Any, Any]) -> None:
    from pyspark.sql.pandas.types import from_arrow_type

    kind = AvroSchema(json.dumps(schema[0])).type
    found = from_arrow_type(kind)
    assert found.simpleString() == spark_type(kind).replace("`", "").replace(": ", ":").replace(", ", ",")
    assert arrow_type(found) == kind


@given(st.data())
def test_schema_of_a_column_encodes_its_values(data: st.DataObject) -> None:
    schema, values = data.draw(schemas())
    kind = AvroSchema(json.dumps(schema)).type
    derived = AvroSchema(schema_of_type(kind))
    assert derived.type == kind
    value = data.draw(values)
    if value is not None:
        value = pa.array([value], kind).to_pylist()[0]
        again = pa.array([derived.decoder()(derived.encode(value))], kind)
        assert again.to_pylist() == [value]


def test_union_of_several_types_is_a_struct_of_members() -> None:
    schema = ["null", "string", {"type": "array", "items": "long"}, {"type": "map", "values": "int"}]
    parsed = AvroSchema(json.dumps(schema))
    stream = BytesIO()
    fastavro.schemaless_writer(stream, fastavro.parse_schema(schema), [1, 2])
    assert pa.array([parsed.decoder()(stream.getvalue())], parsed.type).to_pylist() == [
        {"member0": None, "member1": [1, 2], "member2": None}
    ]
    assert spark_type(AvroSchema('["int", "null", "long"]').type) == "bigint"
    assert spark_type(AvroSchema('["float", "double"]').type) == "double"


def test_reader_schema_adds_defaults_promotes_and_follows_aliases() -> None:
    writer = {
        "type": "record",
        "name": "a.R",
        "fields": [{"name": "x", "type": "int"}, {"name": "old", "type": "string"}],
    }
    reader = {
        "type": "record",
        "name": "a.R",
        "fields": [
            {"name": "x", "type": "long"},
            {"name": "new", "type": "string", "aliases": ["old"]},
            {"name": "u", "type": ["int", "string"], "default": 7},
        ],
    }
    written, read = AvroSchema(json.dumps(writer)), AvroSchema(json.dumps(reader))
    assert written.decoder(read)(written.encode({"x": 1, "old": "o"})) == {
        "x": 1,
        "new": "o",
        "u": {"member0": 7},
    }
    incompatible = AvroSchema(json.dumps({**reader, "fields": [{"name": "x", "type": "string"}]}))
    with pytest.raises(MalformedValue):
        written.decoder(incompatible)(written.encode({"x": 1, "old": "o"}))


def test_milliseconds_of_the_writer_are_microseconds_of_the_reader() -> None:
    def at(unit: str) -> AvroSchema:
        return AvroSchema(json.dumps({"type": "long", "logicalType": f"timestamp-{unit}"}))

    value = datetime(2026, 1, 31, 12, tzinfo=UTC)
    assert at("millis").decoder(at("micros"))(at("millis").encode(value)) == value


def test_named_types_of_other_documents_and_without_namespace() -> None:
    place = {"type": "record", "name": "Place", "fields": [{"name": "city", "type": "string"}]}
    flight = {
        "type": "record",
        "name": "Flight",
        "fields": [{"name": "a", "type": "Place"}, {"name": "b", "type": ["null", "Place"]}],
    }
    parsed = AvroSchema(json.dumps(flight), [json.dumps(place)])
    value = {"a": {"city": "X"}, "b": {"city": "Y"}}
    assert parsed.decoder()(parsed.encode(value)) == value


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        (
            '{"type": "record", "name": "N", "fields": [{"name": "n", "type": ["null", "N"]}]}',
            "contains itself",
        ),
        ('{"type": "record", "name": "N", "fields": []}', "no value"),
        ('{"type": "array", "items": "null"}', "array of nulls"),
        (
            '{"type": "record", "name": "N", "fields": [{"name": "a", "type": "int"}, {"name": "A", "type": "int"}]}',
            "same name",
        ),
        ('{"type": "bytes", "logicalType": "decimal", "precision": 39, "scale": 0}', "39 digits"),
        ('"unknown"', "no Avro schema"),
        ("{", "no Avro schema"),
        ("[]", "no value"),
        ("7", "no Avro schema"),
    ],
)
def test_schema_that_no_column_can_hold_is_refused_with_the_reason(schema: str, reason: str) -> None:
    with pytest.raises(UnsupportedSchema, match=reason):
        AvroSchema(schema)


def test_schema_that_multiplies_its_fields_is_refused() -> None:
    fields: Any = [{"name": "x", "type": "int"}]
    text: Any = {"type": "record", "name": "R0", "fields": fields}
    for number in range(1, 14):
        text = {
            "type": "record",
            "name": f"R{number}",
            "fields": [{"name": "l", "type": text}, {"name": "r", "type": f"R{number - 1}"}],
        }
    with pytest.raises(UnsupportedSchema, match="more than 2000 fields"):
        AvroSchema(json.dumps(text))


def test_values_with_claimed_lengths_cost_no_memory() -> None:
    parsed = AvroSchema('{"type": "array", "items": "long"}')
    for content in (b"\xfe\xff\xff\xff\xff\xff\xff\xff\xff\x01", b"\xff\xff\xff\xff\x0f"):
        with pytest.raises(MalformedValue):
            parsed.decoder()(content)
    with pytest.raises(MalformedValue):
        AvroSchema('"bytes"').decoder()(b"\xfe\xff\xff\xff\xff\xff\xff\xff\x7f" + b"x")
