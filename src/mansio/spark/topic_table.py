"""Batch read of a whole topic: its archived records and the unarchived records of its log, in one DataFrame.

The archive holds all records of a partition below an offset. This offset and the list of files are read from one state
of the table, and the log is read from this offset on. So there is neither a gap nor an overlap, even if the archive job
commits at the same time. The end of the log is determined when the DataFrame is first evaluated.

Invariants:
* Files whose bounds exclude the selection are not opened, only offsets of the log that may match are fetched, and each
  row is checked against the selection.
* Records that were deleted from the log before they were archived raise `DataLoss` unless `failOnDataLoss` is false. A
  recreated topic raises `TopicRecreated`, because archive and log would have different records at the same offsets.

Filter pushdown of the source is not used: Spark keeps the filters of one query for the next query of the same
DataFrame, which would then miss records. The files of a DataFrame stay readable for the grace time of maintenance, so
call `read_topic_as_table` again for each query.
"""

from __future__ import annotations

import json
from functools import reduce
from typing import TYPE_CHECKING, Final

from pyspark.sql import functions

from mansio.errors import ConfigError, InvalidRequest
from mansio.iceberg.archive.table_format import (
    LANE_COLUMN,
    OFFSET_COLUMN,
    PARTITION_COLUMN,
    TIMESTAMP_COLUMN,
    TIMESTAMP_TYPE_COLUMN,
)
from mansio.iceberg.archive.table_scan import ALL_RECORDS, Selection, selected_files
from mansio.schemas.column_types import spark_type
from mansio.spark.arrow.schema import spark_schema
from mansio.spark.options import ON_UNREADABLE_DEAD_LETTER, SourceOptions
from mansio.spark.source.archived_topic import decoded_types, unarchived_ranges

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyspark.sql import Column, DataFrame, SparkSession

    from mansio.iceberg.archive.table import ArchiveTable
    from mansio.spark.source.read_plan import OffsetRange

ARCHIVE_SCHEMA: Final = (
    "key binary, value binary, headers array<struct<key: string, value: binary>>, "
    f"{PARTITION_COLUMN} int, {OFFSET_COLUMN} bigint, {TIMESTAMP_COLUMN} timestamp, "
    f"{TIMESTAMP_TYPE_COLUMN} int, {LANE_COLUMN} string"
)
ARCHIVE_COLUMN_NAMES: Final = {
    "partition": PARTITION_COLUMN,
    "offset": OFFSET_COLUMN,
    "timestamp": TIMESTAMP_COLUMN,
    "timestampType": TIMESTAMP_TYPE_COLUMN,
    "lane": LANE_COLUMN,
}
UNSUPPORTED_OPTIONS: Final = ("subscribe", "subscribepattern", "assign", "topicids", "pushdown")
FILTER_COLUMNS: Final = ("partition", "offset", "timestamp")
"""Columns that the filter of a selection needs."""


def read_topic_as_table(
    spark: SparkSession,
    topic: str,
    table: ArchiveTable,
    options: Mapping[str, str],
    selection: Selection = ALL_RECORDS,
) -> DataFrame:
    """All archived and unarchived records of a topic as one DataFrame, with the columns of `format("mansio")`.

    `options`: options of a batch read (`kafka.bootstrap.servers`, `columns`, `includeHeaders`, `failOnDataLoss`, ...),
    except those that select topics and offsets. `selection`: the records to read. It excludes files before they are
    opened, unlike a filter on the DataFrame.

    Raises:
        ConfigError: An option is invalid or fixed here; the topic does not exist.
        DataLoss: Records were deleted from the log before they were archived.
        TopicRecreated: The table is the archive of an earlier topic of this name.
        ArchiveError: The table is not this topic's, or its catalog cannot be used.
    """
    if topic != table.topic:
        raise InvalidRequest(f"table {table.name} is the archive of {table.topic}, not of {topic}")
    _check_options(options)
    table.refresh()
    parsed = SourceOptions.parse({**options, "subscribe": topic})
    if parsed.on_unreadable == ON_UNREADABLE_DEAD_LETTER:
        raise ConfigError(
            "option onUnreadable cannot be dead-letter here: what is archived was readable; use skip"
        )
    names = parsed.columns
    types = {name: spark_type(kind) for name, kind in decoded_types(table, parsed).items()}
    condition = _selection_filter(selection)
    read = names if condition is None else tuple(dict.fromkeys((*names, *FILTER_COLUMNS)))
    schema = ", ".join(f"{name} {types[name]}" if name in types else spark_schema((name,)) for name in read)
    unarchived = unarchived_ranges(table, parsed, selection)
    paths = [file.path for file in selected_files(table, selection)]
    rows = spark.createDataFrame([], schema) if not paths and not unarchived else None
    if paths:
        rows = _read_archive_files(spark, topic, paths, read, types)
    if unarchived:
        newer = _read_log(spark, table, {**options, "columns": ",".join(read)}, unarchived, schema)
        rows = newer if rows is None else rows.unionByName(newer)
    assert rows is not None
    return rows if condition is None else rows.where(condition).select(*names)


def _check_options(options: Mapping[str, str]) -> None:
    for name in options:
        if name.lower() in UNSUPPORTED_OPTIONS or name.lower().startswith(("starting", "ending")):
            raise ConfigError(
                f"option {name} is not for a read of archive and log: choose records by the selection"
            )


def _read_archive_files(
    spark: SparkSession, topic: str, paths: list[str], names: tuple[str, ...], decoded: Mapping[str, str]
) -> DataFrame:
    """Return the rows of these files. The directory of the archive is not listed, because it also holds replaced
    files.
    """
    columns_in_files = [ARCHIVE_SCHEMA, *(f"{name} {kind}" for name, kind in decoded.items())]
    reader = (
        spark.read.schema(", ".join(columns_in_files))
        .option("recursiveFileLookup", "true")
        .option("__globPaths__", "false")
    )
    rows = reader.parquet(*paths)
    columns = [
        (
            functions.lit(topic) if name == "topic" else functions.col(ARCHIVE_COLUMN_NAMES.get(name, name))
        ).alias(name)
        for name in names
    ]
    return rows.select(*columns)


def _read_log(
    spark: SparkSession,
    table: ArchiveTable,
    options: Mapping[str, str],
    ranges: dict[int, OffsetRange],
    schema: str,
) -> DataFrame:
    """Return the records of these offset ranges of the log, by partition."""
    topic, chosen = table.topic, sorted(ranges)
    reader = (
        spark.read.format("mansio")
        .schema(schema)
        .options(**options)
        .option("assign", json.dumps({topic: chosen}))
        .option("startingOffsets", json.dumps({topic: {str(one): ranges[one].start for one in chosen}}))
        .option("endingOffsets", json.dumps({topic: {str(one): ranges[one].end for one in chosen}}))
    )
    if table.topic_id:
        reader = reader.option("topicIds", json.dumps({topic: table.topic_id}))
    return reader.load()


def _selection_filter(selection: Selection) -> Column | None:
    """Return the selection as a filter of the DataFrame; None if all records are selected."""
    col, lit = functions.col, functions.lit
    parts: list[Column] = []
    if selection.partitions is not None:
        parts.append(col("partition").isin(sorted(selection.partitions)))
    for partition, start in sorted(selection.starts.items()):
        parts.append((col("partition") != partition) | (col("offset") >= start))
    if selection.ends is not None:
        parts.append(col("partition").isin(sorted(selection.ends)))
        for partition, end in sorted(selection.ends.items()):
            parts.append((col("partition") != partition) | (col("offset") < end))
    if selection.from_us is not None:
        parts.append(col("timestamp") >= functions.timestamp_micros(lit(selection.from_us)))
    if selection.to_us is not None:
        parts.append(col("timestamp") < functions.timestamp_micros(lit(selection.to_us)))
    return reduce(lambda one, other: one & other, parts) if parts else None
