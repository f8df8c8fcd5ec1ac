"""Parsed Avro schemas, as fastavro has them, with the named types of the schemas to which they refer."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

import fastavro

from mansio.serde.errors import UnsupportedSchema, reason

if TYPE_CHECKING:
    from collections.abc import Iterable

ROOT: Final = "MansioRoot"
"""Name of the record around a schema. It has no namespace, which the types in the schema would inherit."""


def parse_avro(
    text: str, references: Iterable[str] = (), *, root_field: str = ""
) -> tuple[Any, dict[str, Any]]:
    """Return a parsed schema, and its named types by their full names. `references`: texts of the schemas whose named
    types the schema uses, each after those that it uses itself. `root_field`: return a record with a field of this name
    that has the schema, which has the same encoding. fastavro knows the types of references in a record only.

    Raises `UnsupportedSchema`.
    """
    named: dict[str, Any] = {}
    try:
        for one in references:
            fastavro.parse_schema(json.loads(one), named_schemas=named)
        schema = json.loads(text)
        if root_field:
            schema = {"type": "record", "name": ROOT, "fields": [{"name": root_field, "type": schema}]}
        return fastavro.parse_schema(schema, named_schemas=named), named
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UnsupportedSchema(f"this is no Avro schema: {reason(error)}") from error
    except (fastavro.schema.SchemaParseException, fastavro.schema.UnknownType) as error:
        raise UnsupportedSchema(f"this is no Avro schema: {reason(error)}") from error
