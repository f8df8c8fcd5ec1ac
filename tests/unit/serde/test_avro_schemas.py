"""Parser of Avro schemas: what clients send, in the text that is stored; hostile schemas end with an error."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mansio.serde.definition import ReferencedSchema
from mansio.serde.errors import InvalidSchema
from mansio.serde.formats import avro, json_text
from mansio.serde.formats.avro import parse


def record(*fields: Any, **more: Any) -> dict[str, Any]:
    return {"type": "record", "name": "R", "fields": list(fields), **more}


def text_of(schema: Any) -> str:
    return json.dumps(schema)


@pytest.mark.parametrize("text", ["string", " string\n", '"string"', '  "string" '])
def test_name_of_a_primitive_type_is_a_schema_with_and_without_quotation_marks(text: str) -> None:
    assert parse(text).text == '"string"'


def test_stored_text_is_what_the_client_wrote_without_white_space() -> None:
    written = """{
      "type" : "record", "doc": "caf\\u00e9", "name" : "R", "aliases": ["Q"], "x": {"b": 1, "a": [1.50, null]},
      "fields" : [ { "order": "descending", "name" : "a", "type" : { "type": "string" }, "default": " x " } ] }"""
    assert parse(written).text == (
        '{"type":"record","doc":"café","name":"R","aliases":["Q"],"x":{"b":1,"a":[1.5,null]},'
        '"fields":[{"order":"descending","name":"a","type":{"type":"string"},"default":" x "}]}'
    )


def test_white_space_and_order_of_keys_do_not_make_another_schema() -> None:
    schema = record({"name": "a", "type": "int"}, doc="text")
    same = dict(reversed(schema.items()))
    assert parse(json.dumps(schema, indent=4)).identity == parse(text_of(same)).identity
    for other in (record({"name": "a", "type": "int"}), record({"name": "a", "type": "long"}, doc="text")):
        assert parse(text_of(other)).identity != parse(text_of(schema)).identity


def test_order_of_fields_and_symbols_makes_another_schema() -> None:
    fields = [{"name": "a", "type": "int"}, {"name": "b", "type": "int"}]
    assert parse(text_of(record(*fields))).identity != parse(text_of(record(*fields[::-1]))).identity


def test_normalized_schemas_are_the_same_if_names_and_properties_are() -> None:
    inner = {"type": "enum", "symbols": ["A"], "default": "A"}
    one = record(
        {"name": "e", "type": {**inner, "name": "E"}},
        {"type": {"type": "int"}, "name": "i", "z": {"b": 1, "a": 2}, "default": 0, "order": "ascending"},
        {"name": "again", "type": ["null", "E"]},
        namespace="a.b",
        aliases=["Old"],
    )
    other = {
        "aliases": ["a.b.Old"],
        "fields": [
            {"type": {"name": "a.b.E", **inner}, "name": "e"},
            {"default": 0, "z": {"a": 2, "b": 1}, "name": "i", "type": "int"},
            {"type": ["null", "a.b.E"], "name": "again"},
        ],
        "name": "a.b.R",
        "type": "record",
    }
    assert parse(text_of(one)).identity != parse(text_of(other)).identity
    normalized = parse(text_of(one), normalize=True)
    assert normalized.text == normalized.identity == parse(text_of(other), normalize=True).text
    assert parse(normalized.text, normalize=True).text == normalized.text
    assert '"z":{"a":2,"b":1}' in normalized.text


def test_types_of_references_can_be_used() -> None:
    money = ReferencedSchema("m.Money", '{"type":"fixed","name":"m.Money","size":8}')
    order = ReferencedSchema(
        "Order", text_of({**record({"name": "a", "type": "m.Money"}), "name": "m.Order"})
    )
    schema = record({"name": "o", "type": "m.Order"}, {"name": "p", "type": "Money"}, namespace="m")
    parsed = parse(text_of(schema), [money, order])
    assert parsed.text == json.dumps(schema, separators=(",", ":"))
    assert parsed.type.fields[1].type.size == 8
    assert parse("m.Order", [money, order]).type.fields[0].type is not None
    with pytest.raises(InvalidSchema, match=r"m\.Money"):
        parse(text_of(schema), [order])
    with pytest.raises(InvalidSchema, match="defined twice"):
        parse(money.text, [money])
    assert parse("int", [money, money]).text == '"int"'


def test_default_may_be_of_any_branch_and_may_lack_fields_with_a_default() -> None:
    inner = record({"name": "x", "type": "int"}, {"name": "y", "type": "int", "default": 1}) | {"name": "I"}
    for kind, default in (
        (["null", "int"], 5),
        (inner, {"x": 1}),
        ({"type": "map", "values": {"type": "array", "items": inner}}, {"k": [{"x": 1, "y": 2}]}),
        ("double", 1),
        ("bytes", "\u00ff"),
    ):
        parse(text_of(record({"name": "a", "type": kind, "default": default})))


RECURSIVE = record({"name": "next", "type": ["null", "R"], "default": {"next": {"next": None}}})


def test_recursive_type_with_a_recursive_default_ends() -> None:
    parse(text_of(RECURSIVE))
    parse(text_of(record({"name": "next", "type": "R", "default": {}})))


FIELD = {"name": "a", "type": "int"}


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        (record({**FIELD, "default": "x"}), 'default "x" is no int'),
        (record({**FIELD, "default": None}), "default null is no int"),
        (record({**FIELD, "default": True}), "default true is no int"),
        (record({**FIELD, "default": 1 << 31}), "is no int"),
        (record({"name": "a", "type": "long", "default": 1.0}), "is no long"),
        (record({"name": "a", "type": "bytes", "default": "\u0100"}), "is no bytes"),
        (record({"name": "a", "type": ["null", "int"], "default": "x"}), "is no union"),
        (record({"name": "a", "type": {"type": "fixed", "name": "F", "size": 2}, "default": "x"}), "is no F"),
        (
            record({"name": "a", "type": {"type": "enum", "name": "E", "symbols": ["A"]}, "default": "B"}),
            "is no E",
        ),
        (record({"name": "a", "type": record(FIELD) | {"name": "I"}, "default": {}}), "is no I"),
        (record(FIELD, FIELD), "two fields a"),
        (record({"name": "a"}), "`name` and `type`"),
        (record({"name": "a-b", "type": "int"}), '"a-b" is no valid name'),
        (record({"name": "é", "type": "int"}), "is no valid name"),
        (record({"name": "a\n", "type": "int"}), "is no valid name"),
        (record({**FIELD, "order": "up"}), "no order of a field"),
        (record({**FIELD, "aliases": "b"}), "no array of names"),
        (record(namespace="a..b"), "is no valid name"),
        (record(namespace=1), "is no namespace"),
        (record(aliases=["1"]), "is no valid name"),
        ({"type": "record", "name": "R"}, "no array `fields`"),
        ({"type": "record", "fields": []}, "no `name`"),
        ({"type": "record", "name": "int", "fields": []}, "primitive type int"),
        ({"type": "enum", "name": "E", "symbols": ["A", "A"]}, "symbol A twice"),
        ({"type": "enum", "name": "E", "symbols": ["A B"]}, "is no valid name"),
        ({"type": "enum", "name": "E", "symbols": ["A"], "default": "B"}, "no symbol of the enum"),
        ({"type": "fixed", "name": "F", "size": -1}, "valid `size`"),
        ({"type": "fixed", "name": "F", "size": True}, "valid `size`"),
        ({"type": "array"}, "lacks `items`"),
        ({"type": "map"}, "lacks `values`"),
        ({"type": {"type": "int"}}, "in `type`"),
        (["int", "int"], "int twice"),
        (["int", ["null"]], "union immediately inside a union"),
        ([{"type": "map", "values": "int"}, {"type": "map", "values": "long"}], "map twice"),
        ("Unknown", '"Unknown" is not defined'),
        ({"type": "Unknown"}, "is not defined"),
        (record({"name": "a", "type": "n.R"}), "is not defined"),
        (1, "1 is no type"),
    ],
)
def test_invalid_schema_is_refused_in_one_line_that_states_the_place(schema: Any, reason: str) -> None:
    with pytest.raises(InvalidSchema) as caught:
        parse(text_of(schema))
    assert reason in str(caught.value)
    assert " at /" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text", ["", "{", "a b", "true", '"\\ud800"', '{"type":"int","x":1e999}', '{"type":"int","x":NaN}']
)
def test_text_that_is_no_json_is_refused(text: str) -> None:
    with pytest.raises(InvalidSchema):
        parse(text)


def names(count: int) -> str:
    return ",".join(f'"N{index}"' for index in range(count))


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("[" * 400_000, id="arrays that contain each other"),
        pytest.param('{"type":"array","items":' * 30_000 + '"int"' + "}" * 30_000, id="arrays of arrays"),
        pytest.param('"' + "x" * json_text.TEXT_BYTES_MAX + '"', id="more than a megabyte"),
        pytest.param('"' + "é" * (json_text.TEXT_BYTES_MAX // 2) + '"', id="more than a megabyte in UTF-8"),
        pytest.param(f'{{"type":"enum","name":"E","symbols":[{names(60_000)}]}}', id="symbols"),
        pytest.param("[" + ",".join(["null"] * 100_000).replace("null", '"null"') + "]", id="branches"),
        pytest.param(
            "["
            + ",".join(
                f'{{"type":"fixed","name":"F{index}","size":1}}' for index in range(avro.NAMED_TYPES_MAX + 1)
            )
            + "]",
            id="named types",
        ),
        pytest.param(
            '{"type":"record","name":"R","fields":['
            + ",".join(f'{{"name":"f{index}","type":"int"}}' for index in range(avro.FIELDS_MAX + 1))
            + "]}",
            id="fields",
        ),
        pytest.param(
            text_of(
                record(
                    {
                        "name": "a",
                        "type": {
                            "type": "array",
                            "items": [
                                {"type": "fixed", "name": f"F{index}", "size": 2} for index in range(5_000)
                            ],
                        },
                        "default": ["xxx"] * 10_000,
                    }
                )
            ),
            id="a default of many values of many types",
        ),
    ],
)
def test_schema_beyond_a_bound_is_refused_in_bounded_time(text: str) -> None:
    with pytest.raises(InvalidSchema):
        parse(text)


def test_schema_of_almost_a_megabyte_is_accepted() -> None:
    fields = ",".join(
        f'{{"name":"f{index}","type":["null","int"],"default":null}}' for index in range(18_000)
    )
    assert len(parse(f'{{"type":"record","name":"R","fields":[{fields}]}}').type.fields) == 18_000


def test_references_are_bounded() -> None:
    many = [ReferencedSchema(str(index), '"int"') for index in range(json_text.REFERENCES_MAX + 1)]
    large = [ReferencedSchema(str(index), '"int"' + " " * 900_000) for index in range(5)]
    for references in (many, large):
        with pytest.raises(InvalidSchema):
            parse("int", references)
