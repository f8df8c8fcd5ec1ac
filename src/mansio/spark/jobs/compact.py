"""Compact job: the latest record of each key of an archive, as a separate table.

Spark groups by key, sorting and spilling to disk, so memory does not depend on the number of keys or records. Its tasks
write files beside those of earlier runs; one commit replaces the files of the previous run, so readers see one or the
other. The table's properties hold the topic's offsets up to which it is complete.

Latest: within a partition the higher offset, regardless of timestamps, as in the log. For a key in several partitions
(added partitions, or explicit ones) the record with the later timestamp, then the one of the higher partition. A key
whose latest record has no value is deleted and not in the table; records without a key are not either.

Invariants:
* A run that fails leaves the table unchanged; its files are removed by later runs.
* A repeated run without new records gives the same rows.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from pyiceberg.exceptions import (
    CommitFailedException,
    CommitStateUnknownException,
    NoSuchTableError,
    TableAlreadyExistsError,
)
from pyiceberg.io.pyarrow import parquet_file_to_data_file
from pyspark.sql import Observation, functions

from mansio.spark.iceberg.catalog import ICEBERG_SCHEMA, NAMESPACE, ArchiveTable
from mansio.spark.iceberg.errors import CommitConflict, NotAnArchiveTable
from mansio.spark.iceberg.orphan_cleanup import remove_orphan_files
from mansio.spark.iceberg.table_format import (
    LANE_COLUMN,
    OFFSET_COLUMN,
    PARTITION_COLUMN,
    TABLE_PROPERTIES,
    TABLE_SCHEMA,
    TIMESTAMP_COLUMN,
    TIMESTAMP_TYPE_COLUMN,
    format_offsets,
)
from mansio.spark.jobs.compact_files import write_files
from mansio.spark.jobs.topic_table import ARCHIVE_SCHEMA

if TYPE_CHECKING:
    from pyiceberg.table import Table
    from pyspark.sql import DataFrame, SparkSession

SOURCE_PROPERTY: Final = "mansio.compacted-from"
OFFSETS_PROPERTY: Final = "mansio.compacted-offsets"
RUN_PROPERTY: Final = "mansio.compacted-run"
"""Id of the run that wrote the table's files: it shows whether a commit with an unknown result was applied."""
SNAPSHOTS_KEPT: Final = 2
GRACE_S: Final = 3600.0
"""Time for which files of earlier runs are retained for running readers."""
_CARRIED: Final = ("value", "headers", OFFSET_COLUMN, TIMESTAMP_COLUMN, TIMESTAMP_TYPE_COLUMN, LANE_COLUMN)


@dataclass(frozen=True, slots=True)
class CompactReport:
    """Result of a run. `offsets`: by partition the first offset that is not in the table yet."""

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
        NotAnArchiveTable: A table of that name was not created by compaction, or from another topic.
        CommitConflict: Another compaction into the same table was committed first.
        ArchiveError, OSError: The catalog or the files cannot be used.
    """
    source.refresh()
    committed = source.last_commit()
    offsets = {} if committed is None else committed.offsets
    files = source.live_files()
    with source.catalog_errors():
        target = open_target(source, to)
        table = ArchiveTable(target, source.topic, target.location())
    seen, kept = Observation("seen"), Observation("kept")
    rows = _read(spark, [file.path for file in files]).observe(
        seen, functions.count_if(functions.col("key").isNull()).alias("without_key")
    )
    latest = latest_by_key(rows).observe(
        kept, functions.count_if(functions.col("value").isNull()).alias("deleted_keys")
    )
    write = partial(write_files, table.data_location)
    written = (
        latest.where("value is not null")
        .select(*TABLE_SCHEMA.names)
        .mapInArrow(write, "path string, rows bigint")
        .collect()
    )
    paths = [row["path"] for row in written]
    exchange(table, paths, offsets)
    remove_orphan_files(table, snapshots_kept=SNAPSHOTS_KEPT, grace_s=GRACE_S)
    return CompactReport(
        table=table.name,
        records=sum(file.rows for file in files),
        without_key=seen.get["without_key"],
        deleted_keys=kept.get["deleted_keys"],
        keys=sum(row["rows"] for row in written),
        files=len(paths),
        offsets=dict(offsets),
    )


def latest_by_key(rows: DataFrame) -> DataFrame:
    """The latest record of every key of rows with the archive's columns, including deletions."""
    last = functions.max_by(functions.struct(*_CARRIED), functions.col(OFFSET_COLUMN)).alias("last")
    in_partitions = rows.where("key is not null").groupBy("key", PARTITION_COLUMN).agg(last)
    time = functions.coalesce(functions.unix_micros(f"last.{TIMESTAMP_COLUMN}"), functions.lit(-1))
    latest = functions.max_by(
        functions.struct("last", PARTITION_COLUMN), functions.struct(time, functions.col(PARTITION_COLUMN))
    ).alias("latest")
    found = in_partitions.groupBy("key").agg(latest)
    return found.select("key", f"latest.{PARTITION_COLUMN}", *(f"latest.last.{name}" for name in _CARRIED))


def _read(spark: SparkSession, paths: list[str]) -> DataFrame:
    """The archive's files by name: the directory also holds replaced ones."""
    if not paths:
        return spark.createDataFrame([], ARCHIVE_SCHEMA)
    reader = spark.read.schema(ARCHIVE_SCHEMA).option("recursiveFileLookup", "true")
    return reader.option("__globPaths__", "false").parquet(*paths)


def open_target(source: ArchiveTable, to: str) -> Table:
    """The table of latest records; created if it does not exist."""
    catalog, identifier = source.iceberg.catalog, (NAMESPACE, to)
    try:
        table = catalog.load_table(identifier)
    except NoSuchTableError:
        properties = {
            **TABLE_PROPERTIES,
            SOURCE_PROPERTY: source.topic,
            "schema.name-mapping.default": ICEBERG_SCHEMA.name_mapping.model_dump_json(),
        }
        try:
            return catalog.create_table(identifier, ICEBERG_SCHEMA, properties=properties)
        except TableAlreadyExistsError:
            table = catalog.load_table(identifier)
    made_from = table.properties.get(SOURCE_PROPERTY)
    if made_from != source.topic:
        known = (
            "was not made by `mansio pipeline compact`" if made_from is None else f"is of topic {made_from}"
        )
        raise NotAnArchiveTable(f"table {'.'.join(identifier)} {known}: choose another name with --to")
    return table


def exchange(table: ArchiveTable, paths: list[str], offsets: dict[int, int]) -> None:
    """One commit: replace all files by these, and set the end offsets.

    Raises:
        CommitConflict: Another commit was first, or the catalog's answer was lost and the commit was not applied.
    """
    iceberg, run = table.iceberg, uuid.uuid4().hex
    with table.catalog_errors():
        old = [task.file for task in iceberg.scan().plan_files()]
        new = [parquet_file_to_data_file(iceberg.io, iceberg.metadata, path) for path in paths]
        try:
            with table.transaction() as transaction:
                transaction.set_properties({OFFSETS_PROPERTY: format_offsets(offsets), RUN_PROPERTY: run})
                if old or new:
                    with transaction.update_snapshot().overwrite() as change:
                        for file in old:
                            change.delete_data_file(file)
                        for file in new:
                            change.append_data_file(file)
        except CommitFailedException as error:
            raise CommitConflict(
                f"{table.name} was changed by another program during this run; run it again"
            ) from error
        except CommitStateUnknownException as error:
            iceberg.refresh()
            if iceberg.properties.get(RUN_PROPERTY) != run:
                raise CommitConflict(
                    f"the catalog did not say what became of the change of {table.name}, and it is not there; run it "
                    "again"
                ) from error
