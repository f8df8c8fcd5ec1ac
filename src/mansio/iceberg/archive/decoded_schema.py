"""Types of the decoded columns of an archive table, and their evolution in the transaction that adds the data.

Data files are written with the types that were known to their task; the table has the merged types of all files.
Readers of Iceberg convert narrower files while they read (Iceberg specification, Schema Evolution).

Invariants:
* The columns of the record keep their names, types and places: what reads records ignores decoded columns.
* A column is never removed, renamed or narrowed.
"""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING

import pyarrow as pa

from mansio.iceberg.archive.table_format import DECODED_COLUMNS, TABLE_SCHEMA
from mansio.iceberg.errors import InvalidDataFiles
from mansio.schemas.column_types import conform, merge_types, normalized
from mansio.serde.errors import UnsupportedSchema

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pyiceberg.table import Table, Transaction

NO_DECODED_COLUMNS = pa.schema([])


def decoded_schema(table: Table) -> pa.Schema:
    """Return the decoded columns of a table."""
    columns = table.schema().as_arrow()
    found = [name for name in DECODED_COLUMNS if name in columns.names]
    return pa.schema([pa.field(name, normalized(columns.field(name).type)) for name in found])


def archive_schema(decoded: pa.Schema) -> pa.Schema:
    """All columns of an archive table with these decoded columns."""
    return pa.schema([*TABLE_SCHEMA, *decoded])


def merge_decoded(schemas: Iterable[pa.Schema]) -> pa.Schema:
    """Return a schema with the decoded columns of all schemas, each with a type that has the values of all. Other
    columns are left out.

    Raises:
        InvalidDataFiles: They cannot be merged.
    """
    merged: dict[str, pa.DataType] = {}
    for schema in schemas:
        for column in schema:
            try:
                before = merged.get(column.name)
                merged[column.name] = (
                    column.type if before is None else merge_types(before, column.type, column.name)
                )
            except UnsupportedSchema as error:
                raise InvalidDataFiles(
                    f"the table and the schemas of the batch do not agree: {error.message}. Archive into another table"
                ) from error
    return pa.schema([(name, merged[name]) for name in DECODED_COLUMNS if name in merged])


def evolve_table(transaction: Transaction, table: Table, decoded: pa.Schema) -> None:
    """Add and widen the decoded columns of a table as part of a transaction; nothing if the table has them already.

    Raises:
        InvalidDataFiles: A column of the table has another type.
    """
    current = decoded_schema(table)
    merged = merge_decoded((current, decoded))
    if merged != current:
        with transaction.update_schema() as update:
            update.union_by_name(merged)


def conform_batch(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Return the rows of a data file with the columns of a table; columns and fields that the file lacks are null."""
    columns = [
        conform(batch.column(one.name), one.type)
        if batch.schema.get_field_index(one.name) >= 0
        else pa.nulls(batch.num_rows, one.type)
        for one in schema
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def encode_schema(schema: pa.Schema) -> str:
    """Return an Arrow schema as text."""
    return base64.b64encode(schema.serialize().to_pybytes()).decode()


def decode_schema(text: str) -> pa.Schema:
    """Parse the result of `encode_schema`."""
    return pa.ipc.read_schema(pa.py_buffer(base64.b64decode(text)))
