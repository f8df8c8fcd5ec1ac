"""JSON values: what jsonschema accepts is accepted, and hostile schemas and values are typed errors in little time."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mansio.serde.codecs.json_schema import JsonSchemaCodec
from mansio.serde.codecs.linear_regex import compile_regex
from mansio.serde.definition import ReferencedSchema
from mansio.serde.errors import MalformedValue, UnsupportedSchema

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.sampled_from([1.0, 0.5]) | st.text("ab1", max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc1"), inner, max_size=3),
    max_leaves=8,
)


def schema_keywords(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.fixed_dictionaries(
        {},
        optional={
            "type": st.sampled_from(["object", "array", "string", "integer", "number", "null"]),
            "properties": st.dictionaries(st.sampled_from("abc"), inner, max_size=2),
            "patternProperties": st.dictionaries(st.sampled_from(["^a", "[0-9]$", "b|c"]), inner, max_size=2),
            "additionalProperties": inner,
            "required": st.lists(st.sampled_from("abc"), unique=True, max_size=2),
            "items": inner,
            "uniqueItems": st.booleans(),
            "pattern": st.sampled_from(["^a+$", "b", "[^ab]", r"\d"]),
            "enum": st.lists(VALUES, min_size=1, max_size=3),
            "anyOf": st.lists(inner, min_size=1, max_size=2),
            "not": inner,
            "$ref": st.just("#/definitions/d"),
        },
    )


SCHEMAS = st.recursive(st.booleans(), schema_keywords, max_leaves=5)


def codec(schema: Any, **references: Any) -> JsonSchemaCodec:
    named = [ReferencedSchema(name, json.dumps(one)) for name, one in references.items()]
    return JsonSchemaCodec(json.dumps(schema), named)


@given(SCHEMAS, VALUES)
def test_verdicts_are_those_of_jsonschema(schema: Any, value: Any) -> None:
    if isinstance(schema, dict):
        schema = {**schema, "definitions": {"d": {"type": ["object", "array", "string"]}}}
    one = codec(schema)
    if jsonschema.Draft7Validator(schema).is_valid(value):
        assert one.decode(one.encode(value)) == value
    else:
        for check in (lambda: one.encode(value), lambda: one.decode(json.dumps(value).encode())):
            with pytest.raises(MalformedValue, match=r"^\$"):
                check()


@given(st.text("ab1_ é-]", max_size=6))
def test_expressions_match_as_in_javascript(text: str) -> None:
    for pattern in (
        r"^\d+$",
        r"[\w-]+_",
        r"a{1,2}b",
        r"[^a-b\d]$",
        r"a]",
        r"\u00e9|\x2d",
        r"^(?:a|b)*$",
        r"[[a]",
    ):
        flags = 0 if "u00e9" in pattern else re.ASCII
        assert compile_regex(pattern)(text) == bool(re.search(pattern.replace("[[", r"[\["), text, flags)), (
            pattern
        )


def test_the_error_of_a_value_names_the_path() -> None:
    one = codec({"properties": {"a": {"items": {"properties": {"b": {"type": "integer"}}}}}})
    with pytest.raises(
        MalformedValue, match=r"^\$\.a\[1\]\.b does not match its JSON Schema: 'x' is not of type"
    ):
        one.decode(b'{"a": [{}, {"b": "x"}]}')
    with pytest.raises(MalformedValue, match=r"^\$\.a\[0\] is of type bytes, which JSON does not have"):
        one.encode({"a": [b"x"]})
    for data in (b"", b"{", b"NaN", b"\xff", b"[" * 100_000):
        with pytest.raises(MalformedValue, match=r"^\$ is"):
            one.decode(data)


def test_references_are_found_by_their_name_and_nothing_is_fetched() -> None:
    customer = {"$id": "http://example.com/c.json", "type": "object", "required": ["name"]}
    order = {
        "$id": "http://example.com/order.json",
        "title": "Order",
        "properties": {"customer": {"$ref": "customer.json"}},
    }
    one = JsonSchemaCodec(json.dumps(order), [ReferencedSchema("customer.json", json.dumps(customer))])
    assert one.name == "Order"
    assert one.encode({"customer": {"name": "Ada"}})
    with pytest.raises(MalformedValue, match=r"^\$\.customer does not match"):
        one.encode({"customer": {}})
    for reference in ("http://127.0.0.1:1/other.json", "file:///etc/passwd", "#/nowhere"):
        with pytest.raises(UnsupportedSchema, match="refers to what neither"):
            codec({"$ref": reference}).encode(1)


def chain(length: int) -> Any:
    """A schema that refers twice to one that refers twice to another one, and so on."""
    schemas: dict[str, Any] = {f"d{length}": True}
    for one in range(length):
        schemas[f"d{one}"] = {"allOf": [{"$ref": f"#/definitions/d{one + 1}"}] * 2}
    return {"definitions": schemas, "$ref": "#/definitions/d0"}


HOSTILE = [
    ({"pattern": "^(a+)+$"}, "a" * 5_000 + "b"),
    ({"pattern": "(x+x+)+y"}, "x" * 5_000),
    ({"patternProperties": {"^(a+)+$": False}, "additionalProperties": False}, {"a" * 5_000 + "b": 1}),
    ({"$ref": "#"}, 1),
    ({"anyOf": [{"$ref": "#"}, {"$ref": "#"}]}, 1),
    (chain(40), 1),
    ({"uniqueItems": True}, [{"a": one % 4_999} for one in range(5_000)]),
    ({}, json.loads("[" * 150 + "]" * 150)),
]


@pytest.mark.full
@pytest.mark.parametrize(("schema", "value"), HOSTILE)
def test_hostile_schemas_and_values_cost_little_time(schema: Any, value: Any) -> None:
    begin = time.process_time()
    with pytest.raises(MalformedValue, match=r"^\$"):
        codec(schema).encode(value)
    assert time.process_time() - begin < 30


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "nonsense"},
        {"pattern": "("},
        {"pattern": "(?=a)b"},
        {"pattern": r"(a)\1"},
        {"pattern": "((a{1000}){1000}){1000}"},
        {"patternProperties": {"a" * 5_000: True}},
        {"unevaluatedProperties": False, "patternProperties": {"a": True}},
        {**chain(40), "unevaluatedProperties": False},
        [1],
    ],
)
def test_a_schema_that_is_none_or_exceeds_a_bound_is_a_typed_error(schema: Any) -> None:
    with pytest.raises(UnsupportedSchema):
        codec(schema)
    with pytest.raises(UnsupportedSchema):
        JsonSchemaCodec('{"a": ' * 200 + "1" + "}" * 200)
