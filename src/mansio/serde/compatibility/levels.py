"""Compatibility levels of a registry: which earlier versions a new version is compared with, and in which directions.

Source: Confluent's documentation of schema evolution,
https://docs.confluent.io/platform/current/schema-registry/fundamentals/schema-evolution.html.

Invariants:
* FULL reports what BACKWARD and FORWARD report, and nothing else; a TRANSITIVE level reports at least what the level
  without it does.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from mansio.serde.definition import SchemaType
from mansio.state.registry.schema import Compatibility

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mansio.serde.definition import Incompatibility, ParsedSchema

_MODULES: Final = {SchemaType.AVRO: "avro", SchemaType.JSON: "json_schema", SchemaType.PROTOBUF: "protobuf"}
"""Module of `mansio.serde.compatibility` for each format."""


class EarlierVersion(NamedTuple):
    """A version of a subject, parsed."""

    version: int
    kind: SchemaType
    schema: ParsedSchema


def level_messages(
    level: Compatibility, kind: SchemaType, schema: ParsedSchema, earlier: Sequence[EarlierVersion]
) -> list[str]:
    """Return why a new schema does not have the level with the earlier versions of its subject, one line each; an empty
    list if it does. `earlier`: the versions in their order, without deleted ones.

    Raises `InvalidSchema` if two schemas are too large to be compared.
    """
    if level is Compatibility.NONE:
        return []
    found: list[str] = []
    for one in reversed(earlier if level.is_transitive else earlier[-1:]):
        if one.kind is not kind:
            found.append(f"TYPE_CHANGED: the new schema is {kind}, and version {one.version} is {one.kind}")
            continue
        compare = _comparison(kind)
        if level.is_backward:
            reason = f"the new schema cannot read what version {one.version} wrote"
            found += (_message(each, reason) for each in compare(schema, one.schema))
        if level.is_forward:
            reason = f"version {one.version} cannot read what the new schema writes"
            found += (_message(each, reason) for each in compare(one.schema, schema))
    return found


def _message(fault: Incompatibility, reason: str) -> str:
    return f"{fault.rule} at {fault.path}: {reason}: {fault.message}"


def _comparison(kind: SchemaType) -> Callable[[Any, Any], list[Incompatibility]]:
    """Return `incompatibilities` of a format. Its module is imported when it is needed, as it may need a library."""
    module = import_module(f"mansio.serde.compatibility.{_MODULES[kind]}")
    compare: Callable[[Any, Any], list[Incompatibility]] = module.incompatibilities
    return compare
