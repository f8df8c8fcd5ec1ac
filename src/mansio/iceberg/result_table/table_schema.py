"""Columns of a result table: changes of an existing table, and what tasks write.

Invariants:
* A change never makes existing rows unreadable: columns are added as optional, types are widened as Iceberg allows, and
  a column is renamed only by an explicit option.
* Any other difference is refused before a record is read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa
from pyiceberg.exceptions import ResolveError
from pyiceberg.io.pyarrow import schema_to_pyarrow
from pyiceberg.schema import Schema, promote
from pyiceberg.types import (
    BinaryType,
    ListType,
    MapType,
    PrimitiveType,
    StringType,
    StructType,
)

from mansio.iceberg.errors import IncompatibleSchema

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyiceberg.types import IcebergType


@dataclass(frozen=True, slots=True)
class SchemaChanges:
    """Changes of a table before a pipeline writes to it: columns to rename, old name to new name; names of columns to
    add, and of columns whose types are widened.
    """

    renamed: dict[str, str]
    added: tuple[str, ...] = ()
    widened: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.renamed or self.added or self.widened)

    def __str__(self) -> str:
        parts = [f"{old} renamed to {new}" for old, new in self.renamed.items()]
        parts += [f"{name} added" for name in self.added] + [f"{name} widened" for name in self.widened]
        return ", ".join(parts)


def plan_changes(table: Schema, result: Schema, renames: Mapping[str, str]) -> SchemaChanges:
    """Return the changes that make the table accept the rows of a result. A column that the result lacks is written as
    null, and a column of a narrower type than the table's is cast. `renames`: old name to new name; a rename that was
    applied already is ignored.

    Raises:
        IncompatibleSchema: A difference that is no addition, widening or given rename; the message has the remedy.
    """
    columns = {field.name: field for field in table.fields}
    renamed = {}
    for old, new in renames.items():
        if old in columns and new in columns:
            raise IncompatibleSchema(
                f"the table has columns {old} and {new}: {old} cannot be renamed to {new}"
            )
        if old not in columns and new not in columns:
            raise IncompatibleSchema(f"the table has no column {old} to rename to {new}")
        if old in columns:
            columns[new] = columns.pop(old)
            renamed[old] = new
    wanted = {field.name: field for field in result.fields}
    for name, column in columns.items():
        if column.required and name not in wanted:
            raise IncompatibleSchema(
                f"the table requires column {name}, which the result does not have: select it"
            )
    widened = [
        name
        for name, field in wanted.items()
        if name in columns and _is_widened(columns[name].field_type, field.field_type, name)
    ]
    return SchemaChanges(renamed, tuple(name for name in wanted if name not in columns), tuple(widened))


def _is_widened(table: IcebergType, result: IcebergType, column: str) -> bool:
    """Whether the table's type has to be widened. Raises `IncompatibleSchema` if neither type holds the other."""
    if isinstance(table, PrimitiveType) and isinstance(result, PrimitiveType):
        if table == result or _is_promotable(result, table):
            return False
        if _is_promotable(table, result):
            return True
    elif isinstance(table, StructType) and isinstance(result, StructType):
        fields = {field.name: field for field in table.fields}
        for field in table.fields:
            if field.required and all(one.name != field.name for one in result.fields):
                raise IncompatibleSchema(
                    f"the table requires column {column}.{field.name}, which the result does not have"
                )
        widened = [
            field.name not in fields
            or _is_widened(fields[field.name].field_type, field.field_type, f"{column}.{field.name}")
            for field in result.fields
        ]
        return any(widened)
    elif isinstance(table, ListType) and isinstance(result, ListType):
        return _is_widened(table.element_type, result.element_type, column)
    elif isinstance(table, MapType) and isinstance(result, MapType) and table.key_type == result.key_type:
        return _is_widened(table.value_type, result.value_type, column)
    raise IncompatibleSchema(
        f"column {column} is {table} in the table and {result} in the result: cast it in the function, or write it"
        " under another name"
    )


def difference(written: Schema, current: Schema) -> str | None:
    """Return why files that were written for one schema cannot be added to a table that has another one now, or None if
    they can: every column of the files is still there, under its name, with its type or a wider one, and new columns
    are optional.
    """
    names = {field_id: written.find_column_name(field_id) for field_id in written.field_ids}
    for field_id, name in names.items():
        if field_id not in current.field_ids:
            return f"column {name} was dropped"
        old, new = written.find_field(field_id), current.find_field(field_id)
        if current.find_column_name(field_id) != name:
            return f"column {name} was renamed to {current.find_column_name(field_id)}"
        if old.field_type == new.field_type or not isinstance(old.field_type, PrimitiveType):
            continue
        if not isinstance(new.field_type, PrimitiveType) or not _is_promotable(
            old.field_type, new.field_type
        ):
            return f"column {name} was changed from {old.field_type} to {new.field_type}"
    known = {"", *names.values()}
    for field_id in current.field_ids - names.keys():
        added = str(current.find_column_name(field_id))
        if current.find_field(field_id).required and added.rpartition(".")[0] in known:
            return f"column {added} was added, which requires a value"
    return None


def _is_promotable(narrow: PrimitiveType, wide: PrimitiveType) -> bool:
    try:
        return bool(promote(narrow, wide) == wide) and not (
            isinstance(narrow, StringType | BinaryType) and narrow != wide
        )
    except ResolveError:
        return False


def write_schema(schema: Schema) -> pa.Schema:
    """Return the Arrow schema with which tasks write the table's files: with field ids, and with the types of Spark's
    batches (`string`, not `large_string`).
    """
    return pa.schema([_small_field(field) for field in schema_to_pyarrow(schema)])


def _small_field(field: pa.Field) -> pa.Field:
    return field.with_type(_small_type(field.type))


def _small_type(found: pa.DataType) -> pa.DataType:
    if pa.types.is_large_string(found):
        return pa.string()
    if pa.types.is_large_binary(found):
        return pa.binary()
    if pa.types.is_large_list(found) or pa.types.is_list(found):
        return pa.list_(_small_field(found.value_field))
    if pa.types.is_map(found):
        return pa.map_(_small_field(found.key_field), _small_field(found.item_field))
    if pa.types.is_struct(found):
        return pa.struct([_small_field(found.field(index)) for index in range(found.num_fields)])
    return found
