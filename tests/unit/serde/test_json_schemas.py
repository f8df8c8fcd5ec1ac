"""Parser of JSON Schemas: what clients send, in the text that is stored; hostile schemas end with an error."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mansio.serde.definition import ReferencedSchema
from mansio.serde.errors import InvalidSchema
from mansio.serde.formats import json_schema
from mansio.serde.formats.json_schema import FALSE, TRUE, parse
from mansio.serde.formats.patterns import CHARACTERS_MAX, matcher

DRAFT_4, DRAFT_6, DRAFT_7 = (f"http://json-schema.org/draft-0{number}/schema#" for number in (4, 6, 7))
DRAFT_2019, DRAFT_2020 = (f"https://json-schema.org/draft/{name}/schema" for name in ("2019-09", "2020-12"))


def text_of(schema: Any) -> str:
    return json.dumps(schema)


def test_stored_text_is_what_the_client_wrote_without_white_space() -> None:
    written = '{ "type" : "object",\n "properties": {"b": {"type": "integer"}, "a": {"x": "caf\\u00e9"}} }'
    parsed = parse(written)
    assert parsed.text == '{"type":"object","properties":{"b":{"type":"integer"},"a":{"x":"café"}}}'
    assert parsed.identity == parse(written.replace("\n", "")).identity


def test_order_of_properties_matters_unless_the_schema_is_normalized() -> None:
    one, other = {"type": "string", "maxLength": 1}, {"maxLength": 1, "type": "string"}
    assert parse(text_of(one)).identity != parse(text_of(other)).identity
    normalized = parse(text_of(one), normalize=True)
    assert normalized.text == normalized.identity == parse(text_of(other), normalize=True).text


@pytest.mark.parametrize("draft", [DRAFT_4, DRAFT_6, DRAFT_7, DRAFT_2019, DRAFT_2020])
def test_each_draft_is_accepted_and_references_lead_to_places_in_the_document(draft: str) -> None:
    schema = {
        "$schema": draft,
        "definitions": {"text": {"type": "string"}},
        "properties": {"a": {"$ref": "#/definitions/text"}, "b": {"items": {"$ref": "#"}}},
    }
    root = parse(text_of(schema)).root
    assert root.properties["a"].conjuncts[0][1].types == frozenset(("string",))
    items = root.properties["b"].items
    assert items is not None
    assert items.conjuncts[0][1] is root


def test_keywords_have_the_meaning_of_their_draft() -> None:
    bounds = {"minimum": 1, "exclusiveMinimum": True}
    assert parse(text_of({"$schema": DRAFT_4, **bounds})).root.keywords == {"exclusiveMinimum": 1}
    beside = {"$defs": {"a": {}}, "$ref": "#/$defs/a", "maxLength": 3}
    assert parse(text_of({"$schema": DRAFT_7, **beside})).root.keywords == {}
    assert parse(text_of({"$schema": DRAFT_2019, **beside})).root.keywords == {"maxLength": 3}
    assert len(parse(text_of({"$schema": DRAFT_2020, "prefixItems": [True]})).root.prefix) == 1
    assert parse("true").root is TRUE
    assert parse("false").root is FALSE


def test_references_by_name_identifier_and_anchor_are_found() -> None:
    money = ReferencedSchema("money.json", text_of({"$id": "https://x.org/money", "type": "integer"}))
    other = ReferencedSchema("other.json", text_of({"definitions": {"a": {"type": "null"}}}))
    schema = {
        "$schema": DRAFT_2020,
        "$id": "https://x.org/order",
        "$defs": {"here": {"$anchor": "here", "type": "array"}, "b": {"$id": "inner", "type": "boolean"}},
        "properties": {
            "by name": {"$ref": "money.json"},
            "by identifier": {"$ref": "https://x.org/money"},
            "by relative identifier": {"$ref": "money"},
            "in another document": {"$ref": "other.json#/definitions/a"},
            "by anchor": {"$ref": "#here"},
            "inner": {"$ref": "inner"},
        },
    }
    root = parse(text_of(schema), [money, other]).root
    found = {name: node.conjuncts[0][1].types for name, node in root.properties.items()}
    expected = {"by name": "integer", "by identifier": "integer", "by relative identifier": "integer"}
    expected |= {"in another document": "null", "by anchor": "array", "inner": "boolean"}
    assert found == {name: frozenset((kind,)) for name, kind in expected.items()}


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"$ref": "https://example.com/x"}, "leads out of the schema"),
        ({"$ref": "file:///etc/passwd"}, "leads out of the schema"),
        ({"$ref": "other.json"}, "leads out of the schema"),
        ({"$ref": "http://[x"}, "leads out of the schema"),
        ({"$id": "http://x.org/a", "$ref": "http://[x"}, "leads"),
        ({"$ref": "#/definitions/none"}, "leads nowhere"),
        ({"$ref": "#none"}, "leads nowhere"),
        ({"$ref": "#/required/0", "required": ["a"]}, "leads nowhere"),
        ({"$ref": "#"}, "circle"),
        ({"anyOf": [{"type": "null"}, {"$ref": "#"}]}, "circle"),
        ({"not": {"$ref": "#"}}, "circle"),
        ({"definitions": {"a": {"$ref": "#/definitions/b"}, "b": {"$ref": "#/definitions/a"}}}, "circle"),
        ({"type": "text"}, "/type"),
        ({"type": []}, "/type"),
        ({"type": ["null", "null"]}, "/type"),
        ({"minLength": -1}, "/minLength"),
        ({"maxLength": "1"}, "/maxLength"),
        ({"multipleOf": 0}, "/multipleOf"),
        ({"minimum": True}, "/minimum"),
        ({"required": ["a", "a"]}, "/required"),
        ({"required": "a"}, "/required"),
        ({"properties": []}, "/properties"),
        ({"properties": {"a": 1}}, "/properties/a"),
        ({"allOf": []}, "/allOf"),
        ({"items": 3}, "3 is no schema"),
        ({"pattern": "("}, "no regular expression"),
        ({"patternProperties": {"[": {}}}, "no regular expression"),
        ({"pattern": "a" * (CHARACTERS_MAX + 1)}, "longer than"),
        ({"enum": "a"}, "/enum"),
        ({"dependencies": {"a": [1]}}, "/dependencies"),
        ({"$schema": "http://json-schema.org/draft-03/schema#"}, "none of the drafts"),
        ({"$schema": 1}, "none of the drafts"),
        ({"$schema": DRAFT_4, "additionalItems": True, "not": True}, "true is no schema"),
        ({"$schema": DRAFT_2020, "items": [True]}, "/items"),
        ("a", "is no schema"),
        (None, "is no schema"),
    ],
)
def test_invalid_schema_is_refused_in_one_line(schema: Any, reason: str) -> None:
    with pytest.raises(InvalidSchema) as caught:
        parse(text_of(schema))
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


def test_loop_of_references_between_documents_is_refused() -> None:
    loop = [ReferencedSchema("a", '{"$ref":"b"}'), ReferencedSchema("b", '{"$ref":"a"}')]
    with pytest.raises(InvalidSchema, match="circle"):
        parse('{"$ref":"a"}', loop)


@pytest.mark.parametrize(
    "text",
    [
        pytest.param('{"not":' * 100_000, id="schemas that contain each other"),
        pytest.param('{"not":' * 1_000 + "{}" + "}" * 1_000, id="valid, but nested"),
        pytest.param(
            '{"allOf":[' + ",".join(["{}"] * json_schema.NODES_MAX) + "]}",
            id="schemas",
            marks=pytest.mark.full,
        ),
        pytest.param(
            text_of({"anyOf": [{"pattern": f"a{index}"} for index in range(300)]}), id="expressions"
        ),
        pytest.param('{"const":' + "9" * 10_000 + "}", id="a number of thousands of digits"),
    ],
)
def test_schema_beyond_a_bound_is_refused_in_bounded_time(text: str) -> None:
    with pytest.raises(InvalidSchema):
        parse(text)


@pytest.mark.full
def test_large_schemas_are_accepted() -> None:
    wide = {
        "properties": {f"field{index}": {"type": "string", "maxLength": index} for index in range(15_000)}
    }
    assert len(parse(text_of(wide)).root.properties) == 15_000
    chain = {f"d{index}": {"$ref": f"#/definitions/d{index + 1}"} for index in range(10_000)}
    assert parse(text_of({"definitions": {**chain, "d10000": {}}})).root.kind == "all"
    parse(text_of({"enum": [{"a": index} for index in range(50_000)]}))


@pytest.mark.parametrize("pattern", ["(a+)+$", "(a|a)*b", "^(([a-z])+.)+[A-Z]([a-z])+$", "(x+x+)+y"])
def test_catastrophic_expression_is_matched_in_linear_time(pattern: str) -> None:
    parse(text_of({"pattern": pattern, "patternProperties": {pattern: {}}}))
    finds = matcher(pattern)
    assert finds is not None
    assert not finds("a" * 100_000 + "!") or pattern == "(a|a)*b"


@pytest.mark.parametrize(
    "pattern", [r"^(?!x)y", r"(a)\1", "(a{1000}){1000}", r"\w{999}", r"(?<name>a)(?=\p{L})"]
)
def test_expression_that_the_engine_does_not_have_is_valid_and_never_matched(pattern: str) -> None:
    parse(text_of({"pattern": pattern}))
    assert matcher(pattern) is None
