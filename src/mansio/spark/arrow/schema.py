"""The columns a topic has as a table: their names, their types in Arrow, and the same in Spark's words.

Spark compares types exactly, so there is one place that says them. Names and order are those of Spark's own Kafka
source, with `lane` behind: a query written for the one reads the other.

Always true: every column may be null as far as the types go (Spark wants it so), and `lane` is, of every record.
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
"""All columns there are. `timestampType` is 0 for the producer's clock and 1 for the broker's (KIP-32)."""

DEFAULT_COLUMNS: Final = ("key", "value", "topic", "partition", "offset", "timestamp", "timestampType")
"""What a reader gets that names no columns, as in Spark's Kafka source."""

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


NAME_CHARACTERS_MAX = 100  # of a name nobody knows, in an error


def select_columns(columns: Sequence[str] | None = None, include_headers: bool = False) -> tuple[str, ...]:
    """The columns of a reader, in its order: those it names, else Spark's own, and `headers` if it asks for them.

    Raises `InvalidRequest` for a name that is no column of ours, or is there twice, and for no name at all.
    """
    names = DEFAULT_COLUMNS if columns is None else tuple(columns)
    if not names:
        raise InvalidRequest(f"no columns are chosen; there are {', '.join(_SPARK_TYPES)}")
    for name in names:
        if name not in _SPARK_TYPES:
            shown = name if len(name) <= NAME_CHARACTERS_MAX else name[:NAME_CHARACTERS_MAX] + "..."
            raise InvalidRequest(f"a topic has no column {shown!r}; there are {', '.join(_SPARK_TYPES)}")
        if names.count(name) > 1:
            raise InvalidRequest(f"the column {name!r} is chosen twice")
    return (*names, "headers") if include_headers and "headers" not in names else names


def record_schema(columns: Sequence[str] | None = None, include_headers: bool = False) -> pa.Schema:
    """The Arrow schema of these columns (see `select_columns`)."""
    return pa.schema([RECORD_SCHEMA.field(name) for name in select_columns(columns, include_headers)])


def spark_schema(columns: Sequence[str] | None = None, include_headers: bool = False) -> str:
    """The same columns as Spark writes a schema: `key binary, value binary, ...`."""
    return ", ".join(f"{name} {_SPARK_TYPES[name]}" for name in select_columns(columns, include_headers))
