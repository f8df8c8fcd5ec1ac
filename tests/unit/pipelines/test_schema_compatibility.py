"""Compatibility of schema versions: exactly the changes that break readers or writers are reported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mansio.errors import ConfigError
from mansio.pipelines.schema_compatibility import Compatibility, breaking_changes

SCHEMAS = Path(__file__).parent / "schemas"
BACKWARD, FORWARD = Compatibility.BACKWARD, Compatibility.FORWARD


def version(number: int) -> Any:
    return json.loads((SCHEMAS / f"v{number}.json").read_text())


def places(old: Any, new: Any, compatibility: Compatibility = Compatibility.FULL) -> list[tuple[str, str]]:
    return [(change.path, change.breaks.value) for change in breaking_changes(old, new, compatibility)]


def test_words_order_references_and_optional_fields_break_nothing() -> None:
    assert breaking_changes(version(1), version(2)) == []
    assert breaking_changes(version(1), version(1)) == []


def test_exactly_the_breaking_changes_between_the_second_and_the_third_version() -> None:
    assert places(version(2), version(3)) == [
        ("$.carrier", "forward"),  # longer codes, which readers in service refuse
        ("$.delay", "backward"),  # null is not taken any more
        ("$.flight", "forward"),  # any number, not only whole ones
        ("$.legs[*].to", "backward"),  # three letters at least
        ("$.origin", "backward"),  # LGA is gone
        ("$.origin", "forward"),  # and may be missing
        ("$.tail", "backward"),  # required
    ]


def test_exactly_the_breaking_changes_between_the_third_and_the_fourth_version() -> None:
    assert places(version(3), version(4)) == [
        ("$", "backward"),  # further fields are not taken
        ("$.delay", "backward"),  # nor is this one
        ("$.flight", "backward"),  # only numbers above zero
    ]


def test_one_direction_alone_can_be_asked_for() -> None:
    both = breaking_changes(version(2), version(3))
    for one in (BACKWARD, FORWARD):
        assert breaking_changes(version(2), version(3), one) == [
            change for change in both if change.breaks is one
        ]


def test_there_is_the_mirror_of_back() -> None:
    there = places(version(2), version(4))
    mirrored = {(path, "forward" if breaks == "backward" else "backward") for path, breaks in there}
    assert set(places(version(4), version(2))) == mirrored


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ({"type": "integer"}, {"type": "number"}, [("$", "forward")]),
        ({"minimum": 0}, {"exclusiveMinimum": 0}, [("$", "backward")]),
        ({"maximum": 5, "type": "number"}, {"maximum": 6, "type": "number"}, [("$", "forward")]),
        ({"const": 1}, {"enum": [1, 2]}, [("$", "forward")]),
        ({"type": ["string", "null"]}, {"anyOf": [{"type": "string"}, {"type": "null"}]}, []),
        ({"oneOf": [{"type": "string"}]}, {"type": "string"}, []),
        ({"anyOf": [{"type": "string"}, {"type": "array"}]}, {"type": "string"}, [("$", "backward")]),
        (True, {"type": "string"}, [("$", "backward")]),
        ({}, False, [("$", "backward")]),
        ({"not": {"const": 1}}, {"not": {"const": 2}}, [("$", "backward"), ("$", "forward")]),
        (
            {"type": "object", "additionalProperties": {"type": "string"}},
            {"type": "object", "additionalProperties": {"type": "integer"}},
            [("$.*", "backward"), ("$.*", "forward")],
        ),
        # Values that were listed are looked at one by one: some may be beyond the new bounds.
        ({"enum": [1, 200]}, {"enum": [1, 200], "type": "integer"}, []),
        ({"enum": [1, 200]}, {"maximum": 100, "type": "integer"}, [("$", "backward"), ("$", "forward")]),
        ({"enum": [1, 100]}, {"maximum": 100, "type": "integer"}, [("$", "forward")]),
        ({"const": 5}, {"exclusiveMinimum": 5, "type": "integer"}, [("$", "backward"), ("$", "forward")]),
        (
            {"enum": ["EWR", "LGA2"]},
            {"maxLength": 3, "type": "string"},
            [("$", "backward"), ("$", "forward")],
        ),
        ({"const": "abc"}, {"pattern": "^x", "type": "string"}, [("$", "backward"), ("$", "forward")]),
        ({"const": [1, 2]}, {"maxItems": 1, "type": "array"}, [("$", "backward"), ("$", "forward")]),
        ({"const": 3}, {"multipleOf": 2, "type": "integer"}, [("$", "backward"), ("$", "forward")]),
        # A limit of nothing is none.
        ({"type": "string"}, {"type": "string", "minLength": 0}, []),
        ({"type": "string"}, {"type": "string", "maxLength": 0}, [("$", "backward")]),
        ({"type": "array"}, {"type": "array", "minItems": 0, "uniqueItems": False}, []),
        ({"multipleOf": 4, "type": "integer"}, {"multipleOf": 2, "type": "integer"}, [("$", "forward")]),
    ],
)
def test_single_changes(old: Any, new: Any, expected: list[tuple[str, str]]) -> None:
    assert places(old, new) == expected


def test_change_behind_a_reference_of_the_same_name_is_found() -> None:
    inner = {"properties": {"a": {"$ref": "#/$defs/a"}}}
    old: dict[str, Any] = {"properties": {"o": inner}, "$defs": {"a": {"type": "string"}}}
    new = {**old, "$defs": {"a": {"type": "integer"}}}
    assert places(old, new) == [("$.o.a", "backward"), ("$.o.a", "forward")]


def test_schemas_that_refer_to_themselves_are_compared_and_end() -> None:
    def tree(leaf: str) -> Any:
        node = {"$ref": "#/$defs/node"}
        defined = {"type": "object", "properties": {"left": node, "right": node, "value": {"type": leaf}}}
        return {"$ref": "#/$defs/node", "$defs": {"node": defined}}

    assert breaking_changes(tree("string"), tree("string")) == []
    assert ("$.value", "backward") in places(tree("string"), tree("integer"))


@pytest.mark.parametrize("reference", ["https://example.com/x", "#/$defs/none"])
def test_reference_that_leads_nowhere_is_an_error_that_names_it(reference: str) -> None:
    with pytest.raises(ConfigError, match=r"leads (out|nowhere)"):
        breaking_changes(
            {"properties": {"a": {"$ref": reference}}}, {"properties": {"a": {"type": "string"}}}
        )
