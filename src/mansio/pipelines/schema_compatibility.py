"""Breaking changes between two versions of a JSON Schema, as `mansio pipeline schema-check` reports them.

A change is breaking if one schema allows a value that the other schema rejects. Backward compatibility: new readers
accept all records of the old schema. Forward compatibility: current readers accept all records of the new schema.
Adding an optional field, or removing a field that is not required, breaks neither.

The comparison is that of schema registries (`mansio.serde.compatibility.json_schema`), under other assumptions: if a
schema allows additional properties, a field that it does not mention is considered unused, although records may contain
it, and a `format` is checked, as it decides the type of a column.

Invariants:
* Equal schemas have no changes.
* The backward changes from one schema to another are the forward changes in the opposite direction.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

from mansio.errors import ConfigError
from mansio.serde.compatibility.json_schema import Assumptions, incompatibilities
from mansio.serde.errors import InvalidSchema
from mansio.serde.formats.json_schema import DRAFT_2020, parse

if TYPE_CHECKING:
    from mansio.serde.formats.json_schema import ParsedJson

_ASSUMPTIONS: Final = Assumptions(unnamed_properties_unused=True, formats_are_checked=True)
_NAMES: Final = frozenset(("properties", "dependentRequired", "dependentSchemas"))
_ALTERNATIVES: Final = frozenset(("allOf", "anyOf", "oneOf"))


class Compatibility(StrEnum):
    """Required compatibility: new readers accept old records (backward), current readers accept new records (forward),
    or both (full).
    """

    BACKWARD = "backward"
    FORWARD = "forward"
    FULL = "full"


@dataclass(frozen=True, slots=True)
class Change:
    """One breaking change: JSON path (`$.flight.delay`, `$.legs[*]`), description, and the compatibility that it
    breaks.
    """

    path: str
    message: str
    breaks: Compatibility


def breaking_changes(old: Any, new: Any, compatibility: Compatibility = Compatibility.FULL) -> list[Change]:
    """Return the changes from `old` to `new` that break `compatibility`, sorted by path.

    Raises `ConfigError` for what is no JSON Schema.
    """
    try:
        old_schema, new_schema = (_parsed(schema) for schema in (old, new))
        found: list[Change] = []
        if compatibility is not Compatibility.FORWARD:
            found += _changes(new_schema, old_schema, Compatibility.BACKWARD)
        if compatibility is not Compatibility.BACKWARD:
            found += _changes(old_schema, new_schema, Compatibility.FORWARD)
    except InvalidSchema as error:
        raise ConfigError(str(error)) from error
    return sorted(found, key=lambda change: (change.path, change.breaks, change.message))


def _parsed(schema: Any) -> ParsedJson:
    return parse(json.dumps(schema), default_draft=DRAFT_2020)


def _changes(reader: ParsedJson, writer: ParsedJson, breaks: Compatibility) -> list[Change]:
    found = incompatibilities(reader, writer, _ASSUMPTIONS)
    return list(dict.fromkeys(Change(json_path(one.path), one.message, breaks) for one in found))


def json_path(pointer: str) -> str:
    """Return the JSON path of the values to which a place in a schema applies: `$.legs[*].to` for
    `/properties/legs/items/properties/to`."""
    steps = iter(pointer.split("/")[1:])
    found = "$"
    for step in steps:
        if step in _NAMES:
            found += f".{next(steps, '').replace('~1', '/').replace('~0', '~')}"
        elif step == "patternProperties":
            next(steps, "")
            found += ".*"
        elif step == "additionalProperties":
            found += ".*"
        elif step == "items":
            found += "[*]"
        elif step in _ALTERNATIVES or step.isdecimal():
            continue  # the same value
    return found
