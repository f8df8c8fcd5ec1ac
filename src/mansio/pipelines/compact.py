"""Compact job: writes the latest record of each key of an archive to a separate table.

Spark groups the records by key and spills to disk, so memory does not depend on the number of keys or records. Its
tasks write new files; one commit replaces the files of the previous run, so readers see either the old or the new rows.
The table's properties hold the offsets of the topic up to which the table is complete.

Within a partition, the latest record of a key is the one with the highest offset, regardless of timestamps, as in the
log. If a key is in several partitions (partitions were added, or producers chose them), it is the one with the latest
timestamp; for equal timestamps the one in the highest partition. The table does not contain keys whose latest record
has no value, nor records without a key.

Invariants:
* A run that fails leaves the table unchanged. Later runs remove its files.
* A repeated run without new records writes the same rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from pyiceberg.exceptions import NoSuchTableError
from pyspark.sql import Observation, functions

from mansio.iceberg.archive.table import ICEBERG_SCHEMA, NAMESPACE, ArchiveTable
from mansio.iceberg.archive.table_format import (
    COMPACTED_FROM_PROPERTY,
    LANE_COLUMN,
    OFFSET_COLUMN,
    PARTITION_COLUMN,
    TABLE_PROPERTIES,
    TABLE_SCHEMA,
    TIMESTAMP_COLUMN,
    TIMESTAMP_TYPE_COLUMN,
    format_offsets,
)
from mansio.iceberg.archive.task_files import write_files
from mansio.iceberg.catalog import create_table
from mansio.iceberg.data_files import REPORT_SCHEMA, parse_written_file
from mansio.iceberg.errors import NotAnArchiveTable
from mansio.iceberg.orphan_cleanup import remove_orphan_files
from mansio.iceberg.replace_files import replace_files
from mansio.spark.topic_table import ARCHIVE_SCHEMA

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyiceberg.table import Table
    from pyspark.sql import DataFrame, SparkSession

    from mansio.iceberg.data_files import WrittenFile

COMPACTED_OFFSETS_PROPERTY: Final = "mansio.compacted-offsets"
RUN_ID_PROPERTY: Final = "mansio.compacted-run"
"""Table property with the id of the run that wrote the files: it shows whether a commit was applied whose result the
catalog did not return.
"""
SNAPSHOTS_RETAINED: Final = 2
GRACE_S: Final = 3600.0
"""Time for which files of earlier runs are retained for running readers."""
_LATEST_COLUMNS: Final = (
    "value",
    "headers",
    OFFSET_COLUMN,
    TIMESTAMP_COLUMN,
    TIMESTAMP_TYPE_COLUMN,
    LANE_COLUMN,
)


@dataclass(frozen=True, slots=True)
class CompactReport:
    """Result of a run. `offsets`: for each partition the first offset that the table does not include yet."""

    table: str
    records: int
    without_key: int
    deleted_keys: int
    keys: int
    files: int
    offsets: dict[int, int]


def compact(spark: SparkSession, source: ArchiveTable, to: str) -> CompactReport:
    """Write the latest record of every key of the archive `source` to the table `to` in the same catalog.

    Raises:
        NotAnArchiveTable: The table `to` was not created by this job, or from another topic.
        CommitConflict: Another run of this job changed the table first.
        ArchiveError, OSError: The catalog or the files cannot be used.
    """
    source.refresh()
    committed = source.last_commit()
    offsets = {} if committed is None else committed.offsets
    files = source.live_files()
    with source.catalog_errors():
        target = open_target_table(source, to)
        table = ArchiveTable(target, source.topic, target.location())
    seen, kept = Observation("seen"), Observation("kept")
    rows = _read_files(spark, [file.path for file in files]).observe(
        seen, functions.count_if(functions.col("key").isNull()).alias("without_key")
    )
    latest = latest_by_key(rows).observe(
        kept, functions.count_if(functions.col("value").isNull()).alias("deleted_keys")
    )
    write = partial(write_files, table.data_location, "compact", TABLE_SCHEMA)
    written = (
        latest.where("value is not null")
        .select(*TABLE_SCHEMA.names)
        .mapInArrow(write, REPORT_SCHEMA)
        .collect()
    )
    new = [parse_written_file(row["file"]) for row in written]
    replace_rows(table, new, offsets)
    remove_orphan_files(table, snapshots_kept=SNAPSHOTS_RETAINED, grace_s=GRACE_S)
    return CompactReport(
        table=table.name,
        records=sum(file.rows for file in files),
        without_key=seen.get["without_key"],
        deleted_keys=kept.get["deleted_keys"],
        keys=sum(file.rows for file in new),
        files=len(new),
        offsets=dict(offsets),
    )


def latest_by_key(rows: DataFrame) -> DataFrame:
    """Return the latest record of every key. `rows` has the columns of an archive. Records without a value are
    included.
    """
    last = functions.max_by(functions.struct(*_LATEST_COLUMNS), functions.col(OFFSET_COLUMN)).alias("last")
    in_partitions = rows.where("key is not null").groupBy("key", PARTITION_COLUMN).agg(last)
    time = functions.coalesce(functions.unix_micros(f"last.{TIMESTAMP_COLUMN}"), functions.lit(-1))
    latest = functions.max_by(
        functions.struct("last", PARTITION_COLUMN), functions.struct(time, functions.col(PARTITION_COLUMN))
    ).alias("latest")
    found = in_partitions.groupBy("key").agg(latest)
    return found.select(
        "key", f"latest.{PARTITION_COLUMN}", *(f"latest.last.{name}" for name in _LATEST_COLUMNS)
    )


def _read_files(spark: SparkSession, paths: list[str]) -> DataFrame:
    """Return the rows of these files of the archive. Its directory is not read as a whole, because it also holds
    replaced files.
    """
    if not paths:
        return spark.createDataFrame([], ARCHIVE_SCHEMA)
    reader = spark.read.schema(ARCHIVE_SCHEMA).option("recursiveFileLookup", "true")
    return reader.option("__globPaths__", "false").parquet(*paths)


def open_target_table(source: ArchiveTable, to: str) -> Table:
    """Open the table of latest records, or create it. Raises `NotAnArchiveTable` for another kind of table."""
    catalog, identifier = source.iceberg.catalog, (NAMESPACE, to)
    try:
        table = catalog.load_table(identifier)
    except NoSuchTableError:
        properties = {
            **TABLE_PROPERTIES,
            COMPACTED_FROM_PROPERTY: source.topic,
            "schema.name-mapping.default": ICEBERG_SCHEMA.name_mapping.model_dump_json(),
        }
        table = create_table(catalog, identifier, ICEBERG_SCHEMA, properties=properties)
    made_from = table.properties.get(COMPACTED_FROM_PROPERTY)
    if made_from != source.topic:
        known = (
            "was not made by `mansio pipeline compact`" if made_from is None else f"is of topic {made_from}"
        )
        raise NotAnArchiveTable(f"table {'.'.join(identifier)} {known}: choose another name with --to")
    return table


def replace_rows(table: ArchiveTable, new: Sequence[WrittenFile], offsets: dict[int, int]) -> None:
    """Replace all files of the table by these and set its offsets, in one commit. Raises `CommitConflict`."""
    replace_files(
        table, new, {COMPACTED_OFFSETS_PROPERTY: format_offsets(offsets)}, run_property=RUN_ID_PROPERTY
    )
