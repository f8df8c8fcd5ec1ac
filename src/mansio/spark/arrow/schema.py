"""Columns of the records of a topic: names, Arrow types and Spark types.

Spark compares types exactly, so they are defined only in this module. Names and order are those of Spark's Kafka
source, so a query written for one source works with the other. The last column, `lane`, is reserved.

Invariants:
* Every column is nullable, as Spark requires. The reserved column `lane` is always null.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pyarrow as pa

from mansio.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Sequence

HEADERS_TYPE: Final = pa.list_(pa.field("element", pa.struct([("key", pa.string()), ("value", pa.binary())])))
TIMESTAMP_TYPE: Final = pa.timestamp("us", tz="UTC")

RECORD_SCHEMA: Final = pa.schema(
    [
        ("key", pa.binary()),
        ("value", pa.binary()),
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("timestamp", TIMESTAMP_TYPE),
        ("timestampType", pa.int32()),
        ("headers", HEADERS_TYPE),
        ("lane", pa.string()),
    ]
)
"""All columns. `timestampType` is 0 for CreateTime and 1 for LogAppendTime (KIP-32)."""

DEFAULT_COLUMNS: Final = ("key", "value", "topic", "partition", "offset", "timestamp", "timestampType")
"""The default columns, as in Spark's Kafka source."""

_SPARK_TYPES: Final = {
    "key": "binary",
    "value": "binary",
    "topic": "string",
    "partition": "int",
    "offset": "bigint",
    "timestamp": "timestamp",
    "timestampType": "int",
    "headers": "array<struct<key: string, value: binary>>",
    "lane": "string",
}


SHOWN_NAME_CHARACTERS_MAX = 100
"""Maximum number of characters of an unknown column name that the error shows."""


def select_columns(columns: Sequence[str] | None = None, include_headers: bool = False) -> tuple[str, ...]:
    """Return the columns of a reader, in order: `columns`, or the default columns if it is None. `include_headers` adds
    `headers` at the end.

    Raises `InvalidRequest` for an unknown or duplicate name, and for an empty selection.
    """
    names = DEFAULT_COLUMNS if columns is None else tuple(columns)
    if not names:
        raise InvalidRequest(f"no columns are chosen; there are {', '.join(_SPARK_TYPES)}")
    for name in names:
        if name not in _SPARK_TYPES:
            shown = (
                name if len(name) <= SHOWN_NAME_CHARACTERS_MAX else name[:SHOWN_NAME_CHARACTERS_MAX] + "..."
            )
            raise InvalidRequest(f"a topic has no column {shown!r}; there are {', '.join(_SPARK_TYPES)}")
        if names.count(name) > 1:
            raise InvalidRequest(f"the column {name!r} is chosen twice")
    return (*names, "headers") if include_headers and "headers" not in names else names


def record_schema(columns: Sequence[str] | None = None, include_headers: bool = False) -> pa.Schema:
    """Return the Arrow schema of the columns that `select_columns` returns for the same arguments."""
    return pa.schema([RECORD_SCHEMA.field(name) for name in select_columns(columns, include_headers)])


def spark_schema(columns: Sequence[str] | None = None, include_headers: bool = False) -> str:
    """Return the Spark schema (`key binary, value binary, ...`) of the columns that `select_columns` returns."""
    return ", ".join(f"{name} {_SPARK_TYPES[name]}" for name in select_columns(columns, include_headers))
