"""Dead-letter table: the unreadable records of an archive, one row per record or per damaged batch.

The dead-letter table and the archive cannot change in one transaction, so the dead-letter table is committed first.
After a crash before the archive's commit Spark repeats the batch, possibly with other boundaries. Therefore repeated
rows are recognized by their offsets: the table's properties hold the end offset of its rows in each partition, set in
the same transaction as the rows. Rows below this offset are not added again; a row that contains it is shortened to
begin there.

Invariants:
* Each offset that was accepted as lost while dead letters were enabled is in the range of exactly one row.
* Rows above the archive's offsets belong to a batch that will be repeated: its records are still unreadable then.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyiceberg.exceptions import NoSuchTableError
from pyiceberg.schema import Schema
from pyiceberg.types import BinaryType, IntegerType, LongType, NestedField, StringType

from mansio.iceberg.archive.commit import expired_snapshots
from mansio.iceberg.archive.parquet_writer import SOURCE_COLUMN_NAMES, PartitionFileWriter
from mansio.iceberg.archive.table_format import (
    DEAD_LETTER_SCHEMA,
    LAST_OFFSET_COLUMN,
    OFFSET_COLUMN,
    OFFSETS_PROPERTY,
    PARTITION_COLUMN,
    TABLE_PROPERTIES,
    TOPIC_ID_PROPERTY,
    TOPIC_PROPERTY,
    format_offsets,
    parse_offsets,
)
from mansio.iceberg.catalog import create_table
from mansio.iceberg.commit import COMMIT_RETRIES_MAX, commit_files, commit_with_retries
from mansio.iceberg.errors import NotAnArchiveTable
from mansio.iceberg.fanout_writer import file_system

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mansio.iceberg.archive.table import ArchiveTable
    from mansio.iceberg.archive.table_format import BatchPlan, WrittenRange

NAMESPACE: Final = "mansio_dead_letters"

_ICEBERG_SCHEMA: Final = Schema(
    NestedField(1, PARTITION_COLUMN, IntegerType()),
    NestedField(2, OFFSET_COLUMN, LongType()),
    NestedField(3, LAST_OFFSET_COLUMN, LongType()),
    NestedField(4, "kind", StringType()),
    NestedField(5, "reason", StringType()),
    NestedField(6, "key", BinaryType()),
    NestedField(7, "value", BinaryType()),
)
"""`table_format.DEAD_LETTER_SCHEMA` as an Iceberg schema."""


def open_dead_letters(archive: ArchiveTable, *, create: bool) -> ArchiveTable | None:
    """Open the dead-letter table of an archive, in the same catalog; None if there is none and `create` is false.

    Raises:
        NotAnArchiveTable: The table belongs to another topic, or to an earlier topic of the same name.
        CatalogLocked, CatalogUnavailable: The catalog cannot be used now.
    """
    catalog, identifier = archive.iceberg.catalog, (NAMESPACE, archive.topic)
    with archive.catalog_errors():
        try:
            table = catalog.load_table(identifier)
        except NoSuchTableError:
            if not create:
                return None
            properties = {
                **TABLE_PROPERTIES,
                TOPIC_PROPERTY: archive.topic,
                TOPIC_ID_PROPERTY: archive.topic_id,
                "schema.name-mapping.default": _ICEBERG_SCHEMA.name_mapping.model_dump_json(),
            }
            table = create_table(catalog, identifier, _ICEBERG_SCHEMA, properties=properties)
    found = table.properties.get(TOPIC_PROPERTY), table.properties.get(TOPIC_ID_PROPERTY)
    if found != (archive.topic, archive.topic_id):
        raise NotAnArchiveTable(
            f"table {'.'.join(identifier)} holds dead letters of another topic {found[0]} (id {found[1]}), not of "
            f"{archive.topic} (id {archive.topic_id}): drop it, or choose another warehouse"
        )
    return archive.sibling(table)


def append_dead_letters(table: ArchiveTable, plan: BatchPlan, parts: Sequence[WrittenRange]) -> int:
    """Add the dead letters of a batch that the table does not have yet. Call it before the batch itself is committed.
    Returns the number of files added.

    Raises:
        CommitConflict: In every attempt another commit changed the table first.
        CatalogLocked, CatalogUnavailable: The catalog cannot be used now; Spark will repeat the batch.
    """
    iceberg = table.iceberg

    def attempt(_number: int) -> int:
        known = parse_offsets(iceberg.properties.get(OFFSETS_PROPERTY, "{}"))
        new = [one for part in parts for one in _above_offset(table, part, known.get(part.partition, 0))]
        if new:
            ends = {partition: max(end, known.get(partition, 0)) for partition, end in plan.end.items()}
            commit_files(
                iceberg,
                [replace(part.file, partition=()) for part in new],  # the table has no partition spec
                properties={OFFSETS_PROPERTY: format_offsets(known | ends)},
                summary={},
                expired=expired_snapshots(iceberg.metadata),
            )
        return len(new)

    conflict = (
        f"other commits were first in {COMMIT_RETRIES_MAX + 1} attempts to add dead letters to {table.name}"
    )
    with table.catalog_errors():
        return commit_with_retries(iceberg, attempt, conflict)


def _above_offset(table: ArchiveTable, part: WrittenRange, known: int) -> list[WrittenRange]:
    """Return the rows of a task's file with offsets from `known` on: the file itself, a new file with a part of its
    rows, or nothing.
    """
    if part.first_offset >= known:
        return [part]
    location = table.data_location
    system, directory = file_system(location)
    rows = pq.read_table(directory + part.file.path[len(location) :], filesystem=system, partitioning=None)
    rest = rows.filter(pc.greater_equal(rows[LAST_OFFSET_COLUMN], known))
    if not rest.num_rows:
        return []
    first = pc.max_element_wise(rest[OFFSET_COLUMN], pa.scalar(known, pa.int64()))
    rest = rest.set_column(
        rest.schema.get_field_index(OFFSET_COLUMN), DEAD_LETTER_SCHEMA.field(OFFSET_COLUMN), first
    )
    writer = PartitionFileWriter(location, "rest", schema=DEAD_LETTER_SCHEMA)
    named = rest.rename_columns([SOURCE_COLUMN_NAMES.get(name, name) for name in rest.column_names])
    for batch in named.to_batches():
        writer.write(batch)
    return writer.close()
