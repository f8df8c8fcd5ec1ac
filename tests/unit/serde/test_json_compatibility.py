"""Compatibility of JSON Schemas: a table of cases, and readers that accept what they are found compatible with."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft7Validator

from mansio.serde.compatibility import json_schema as checker
from mansio.serde.compatibility.json_schema import Assumptions, incompatibilities
from mansio.serde.errors import InvalidSchema
from mansio.serde.formats.json_schema import parse
from support.json_schemas import pair, value
from support.tiers import examples

if TYPE_CHECKING:
    from mansio.serde.definition import Incompatibility

CASES = json.loads((Path(__file__).parent / "json_cases.json").read_text())
"""Cases whose verdicts were compared with Karapace's. `docs/reference/schema-compatibility.md` has the differences."""

PAIRS = examples(test=15, full=500)


def reasons(reader: Any, writer: Any, assumptions: Assumptions = checker.REGISTRY) -> list[Incompatibility]:
    return incompatibilities(parse(json.dumps(reader)), parse(json.dumps(writer)), assumptions)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["case"])
def test_verdict_of_a_case(case: dict[str, Any]) -> None:
    found = reasons(case["reader"], case["writer"])
    assert [f"{one.rule} {one.path}" for one in found] == case["faults"]
    assert all(one.message and "\n" not in one.message for one in found)


@settings(max_examples=PAIRS)
@given(st.integers(0, 1 << 30))
def test_reader_that_is_compatible_accepts_what_the_writer_wrote(seed: int) -> None:
    random = Random(seed)
    for _ in range(20):
        writer, reader = pair(random)
        if not reasons(reader, writer):
            break
    else:
        return
    written, read = Draft7Validator(writer), Draft7Validator(reader)
    for _ in range(20):
        one = value(random, random.choice((writer, reader)))
        if written.is_valid(one):
            assert read.is_valid(one), (one, writer, reader)


@settings(max_examples=PAIRS)
@given(st.integers(0, 1 << 30))
def test_schema_is_compatible_with_itself(seed: int) -> None:
    for schema in pair(Random(seed)):
        assert reasons(schema, schema) == []


def test_unnamed_properties_may_be_assumed_to_be_unused() -> None:
    old = {"type": "object", "properties": {"a": {"type": "string"}}}
    new = {"type": "object", "properties": {**old["properties"], "b": {"type": "string"}}}  # type: ignore[dict-item]
    assert [one.rule for one in reasons(new, old)] == ["PROPERTY_ADDED_TO_OPEN_CONTENT_MODEL"]
    assert reasons(new, old, Assumptions(unnamed_properties_unused=True)) == []


def test_formats_are_compared_if_they_are_checked() -> None:
    new, old = {"type": "string", "format": "date"}, {"type": "string"}
    assert reasons(new, old) == []
    assert [one.rule for one in reasons(new, old, Assumptions(formats_are_checked=True))] == ["FORMAT_ADDED"]


def test_alternatives_of_the_writer_are_not_lost_behind_each_other() -> None:
    """Each alternative stands for the choice that it was taken from, which must not come back."""
    narrow, wide = {"type": "string", "maxLength": 1}, {"type": "string"}
    for kind in ("anyOf", "oneOf"):
        assert reasons({kind: [{"type": "null"}, narrow]}, {kind: [{"type": "null"}, wide]})


@pytest.mark.full
def test_wide_schemas_are_compared_in_bounded_time() -> None:
    properties = {f"field{index}": {"type": "string", "maxLength": index} for index in range(8_000)}
    schema = {"type": "object", "properties": properties}
    assert reasons(schema, schema) == []
    closed = {"type": "object", "additionalProperties": False}
    assert len(reasons(closed, {**schema, "additionalProperties": False})) == checker.REPORTED_MAX


def test_large_enums_are_compared_in_bounded_time() -> None:
    values = [f"value {index}" for index in range(20_000)]
    assert reasons({"enum": values}, {"enum": values[:-1]}) == []
    assert [one.rule for one in reasons({"enum": values[:-1]}, {"enum": values})] == ["ENUM_ARRAY_NARROWED"]


def test_choices_that_multiply_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checker, "PAIRS_MAX", 5_000)
    many = {
        "allOf": [
            {"anyOf": [{"minLength": index, "maxLength": 9 + way} for way in range(12)]} for index in range(8)
        ]
    }
    with pytest.raises(InvalidSchema, match="too large"):
        reasons({"type": "string", "maxLength": 1}, {"type": "string", **many})


def test_recursive_schemas_are_compared_once_per_pair() -> None:
    def ring(length: int, leaf: str) -> Any:
        nodes = {
            f"n{index}": {
                "type": "object",
                "properties": {
                    "next": {"$ref": f"#/definitions/n{(index + 1) % length}"},
                    "value": {"type": leaf if index == 0 else "string"},
                },
            }
            for index in range(length)
        }
        return {"definitions": nodes, "$ref": "#/definitions/n0"}

    assert reasons(ring(30, "string"), ring(29, "string")) == []
    assert {one.rule for one in reasons(ring(30, "integer"), ring(29, "string"))} == {"TYPE_CHANGED"}
