"""Parsed Avro schemas, as fastavro has them, with the named types of the schemas to which they refer."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import fastavro

from mansio.serde.errors import UnsupportedSchema, reason

if TYPE_CHECKING:
    from collections.abc import Iterable


def parse_avro(text: str, references: Iterable[str] = ()) -> tuple[Any, dict[str, Any]]:
    """Return a parsed schema, and its named types by their full names. `references`: texts of the schemas whose named
    types the schema uses, each after those that it uses itself.

    Raises `UnsupportedSchema`.
    """
    named: dict[str, Any] = {}
    try:
        for one in references:
            fastavro.parse_schema(json.loads(one), named_schemas=named)
        return fastavro.parse_schema(json.loads(text), named_schemas=named), named
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UnsupportedSchema(f"this is no Avro schema: {reason(error)}") from error
    except (fastavro.schema.SchemaParseException, fastavro.schema.UnknownType) as error:
        raise UnsupportedSchema(f"this is no Avro schema: {reason(error)}") from error
