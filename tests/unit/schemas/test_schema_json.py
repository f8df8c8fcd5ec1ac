"""JSON Schema as column types, and JSON values: typed, or malformed with the path."""

from __future__ import annotations

import json
from datetime import UTC, date, datetime
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mansio.schemas.column_types import spark_type
from mansio.schemas.decoding import decode_objects, to_column
from mansio.schemas.json_schema import JsonSchema
from mansio.serde.errors import MalformedValue, UnsupportedSchema

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=10,
)
SCHEMAS = st.recursive(
    st.sampled_from(
        [
            {"type": "string"},
            {"type": ["integer", "null"]},
            {"type": "number"},
            {"type": "boolean"},
            {"type": "string", "format": "date"},
            {"type": "string", "format": "date-time"},
            {"enum": [1, 2]},
            {},
            {"type": ["string", "integer"]},
        ]
    ),
    lambda inner: st.one_of(
        inner.map(lambda one: {"type": "array", "items": one}),
        inner.map(lambda one: {"type": "object", "additionalProperties": one}),
        inner.map(lambda one: {"anyOf": [{"type": "null"}, one]}),
        st.dictionaries(st.sampled_from("abc"), inner, min_size=1).map(
            lambda one: {"type": "object", "properties": one}
        ),
    ),
    max_leaves=6,
)


def decoded(schema: Any, *values: Any) -> list[Any]:
    parsed = JsonSchema(json.dumps(schema))
    return pa.array([parsed.decode(json.dumps(one).encode()) for one in values], parsed.type).to_pylist()


@given(SCHEMAS, JSON_VALUES)
def test_any_value_is_decoded_or_malformed(schema: Any, value: Any) -> None:
    parsed = JsonSchema(json.dumps(schema))
    objects, errors = decode_objects([json.dumps(value).encode()], parsed.decode)
    column = to_column(objects, parsed.type, errors)
    assert column.array.type == parsed.type
    assert column.array.null_count == (1 if value is None or column.errors else 0)


@given(st.binary(max_size=30))
def test_any_bytes_are_decoded_or_malformed(content: bytes) -> None:
    objects, errors = decode_objects([content], JsonSchema('{"type": "object"}').decode)
    assert len(objects) == 1
    assert set(errors) <= {0}


@given(st.lists(st.integers(-(1 << 63), (1 << 63) - 1) | st.none()))
def test_integers_of_64_bits_are_exact(numbers: list[int | None]) -> None:
    assert decoded({"type": "array", "items": {"type": "integer"}}, numbers) == [numbers]


def test_types_of_columns() -> None:
    schema = {
        "type": "object",
        "$defs": {"money": {"type": "object", "properties": {"amount": {"type": "number"}}}},
        "properties": {
            "id": {"type": "integer"},
            "price": {"$ref": "#/$defs/money"},
            "tags": {"type": "array", "items": {"type": "string"}},
            "by": {"type": "object", "additionalProperties": {"type": "boolean"}},
            "day": {"type": "string", "format": "date"},
            "at": {"anyOf": [{"type": "string", "format": "date-time"}, {"type": "null"}]},
            "any": {"type": ["string", "number"]},
            "all": {"allOf": [{"type": "string"}]},
            "free": {"type": "object"},
        },
    }
    assert spark_type(JsonSchema(json.dumps(schema)).type).replace("`", "") == (
        "struct<id: bigint, price: struct<amount: double>, tags: array<string>, by: map<string, boolean>, day: date,"
        " at: timestamp, any: string, all: string, free: string>"
    )
    value = {
        "id": 1.0,
        "price": {"amount": 2},
        "by": {"x": True, "y": None},
        "day": "2026-01-31",
        "at": "2026-01-31T13:00:00+01:00",
        "any": 1,
        "all": "text",
        "free": {"a": [1]},
        "unknown": 1,
    }
    assert decoded(schema, value) == [
        {
            "id": 1,
            "price": {"amount": 2.0},
            "tags": None,
            "by": [("x", True), ("y", None)],
            "day": date(2026, 1, 31),
            "at": datetime(2026, 1, 31, 12, tzinfo=UTC),
            "any": "1",
            "all": "text",
            "free": '{"a":[1]}',
        }
    ]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"{", "not JSON"),
        (b'{"id": NaN}', "not JSON"),
        (b"\xff", "not JSON"),
        (b"[" * 100_000, "nested too deep"),
        (b"[]", r"\$ is \[\], not an object"),
        (b'{"at": null}', "no property 'id'"),
        (b'{"id": "1"}', r'\$\.id is "1", not an integer'),
        (b'{"id": true}', "not an integer"),
        (b'{"id": 1.5}', "not an integer"),
        (b'{"id": 9223372036854775808}', "64 bits"),
        (b'{"id": 1, "list": [1, "x"]}', r"\$\.list\[1\]"),
        (b'{"id": 1, "at": "yesterday"}', "not a timestamp"),
        (b'{"id": 1, "at": "2026-01-31T12:00:00"}', "with a zone"),
        (b'{"id": 1, "size": 1e999}', "fit into a double"),
    ],
)
def test_malformed_value_names_the_place(content: bytes, reason: str) -> None:
    schema = {
        "type": "object",
        "required": ["id"],
        "properties": {
            "id": {"type": "integer"},
            "at": {"type": "string", "format": "date-time"},
            "list": {"type": "array", "items": {"type": "number"}},
            "size": {"type": "number"},
        },
    }
    with pytest.raises(MalformedValue, match=reason):
        JsonSchema(json.dumps(schema)).decode(content)


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        (
            '{"$ref": "#/$defs/a", "$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/a"}}}}',
            "contains itself",
        ),
        ('{"type": "object", "properties": {"child": {"$ref": "#"}}}', "contains itself"),
        ('{"$ref": "other.json"}', "leads out"),
        ('{"$ref": "#/$defs/none"}', "leads to nothing"),
        ('{"type": "object", "properties": {"a": {}, "A": {}}}', "same name"),
        ("[1]", "must be an object"),
        ("{", "no JSON Schema"),
    ],
)
def test_schema_that_no_column_can_hold_is_refused(schema: str, reason: str) -> None:
    with pytest.raises(UnsupportedSchema, match=reason):
        JsonSchema(schema)
