"""Compatibility levels: which versions are compared, and in which directions."""

from __future__ import annotations

import json

import pytest

from mansio.serde.compatibility.levels import EarlierVersion, level_messages
from mansio.serde.definition import SchemaType
from mansio.serde.formats import avro, json_schema
from mansio.state.registry.schema import Compatibility


def version(number: int, *fields: str) -> EarlierVersion:
    """A version of a record. A field that ends with `?` has a default."""
    parts = [
        {"name": name.removesuffix("?"), "type": "int"} | ({"default": 0} if name.endswith("?") else {})
        for name in fields
    ]
    text = json.dumps({"type": "record", "name": "R", "fields": parts})
    return EarlierVersion(number, SchemaType.AVRO, avro.parse(text))


NEW = version(3, "a", "c")
EARLIER = [version(1, "a", "b"), version(2, "a", "c", "b")]
"""The new version needs c, which version 1 does not have. Both earlier ones need b, which the new one does not have."""


@pytest.mark.parametrize(
    ("level", "compared"),
    [
        ("NONE", []),
        ("BACKWARD", []),
        ("BACKWARD_TRANSITIVE", ["new reads 1"]),
        ("FORWARD", ["2 reads new"]),
        ("FORWARD_TRANSITIVE", ["2 reads new", "1 reads new"]),
        ("FULL", ["2 reads new"]),
        ("FULL_TRANSITIVE", ["2 reads new", "new reads 1", "1 reads new"]),
    ],
)
def test_level_compares_its_versions_in_its_directions(level: str, compared: list[str]) -> None:
    found = level_messages(Compatibility(level), NEW.kind, NEW.schema, EARLIER)
    texts = {
        "new reads 1": "the new schema cannot read what version 1 wrote",
        "1 reads new": "version 1 cannot read what the new schema writes",
        "2 reads new": "version 2 cannot read what the new schema writes",
    }
    assert len(found) == len(compared)
    for message, one in zip(found, compared, strict=True):
        assert message.startswith("READER_FIELD_MISSING_DEFAULT_VALUE at /fields/")
        assert texts[one] in message
        assert "\n" not in message


@pytest.mark.parametrize("level", [level for level in Compatibility if level is not Compatibility.NONE])
def test_version_of_another_format_is_incompatible_with_each_level_but_none(
    level: Compatibility,
) -> None:
    other = json_schema.parse("{}")
    (message,) = level_messages(level, SchemaType.JSON, other, EARLIER[1:])
    assert "JSON" in message
    assert "AVRO" in message
    assert level_messages(Compatibility.NONE, SchemaType.JSON, other, EARLIER) == []


def test_first_version_is_compatible_and_json_schemas_are_compared_too() -> None:
    text, number = (json_schema.parse(f'{{"type":"{kind}"}}') for kind in ("string", "number"))
    level = Compatibility.FULL
    assert level_messages(level, SchemaType.JSON, text, []) == []
    found = level_messages(level, SchemaType.JSON, text, [EarlierVersion(7, SchemaType.JSON, number)])
    assert [one.partition(" ")[0] for one in found] == ["TYPE_CHANGED", "TYPE_CHANGED"]
