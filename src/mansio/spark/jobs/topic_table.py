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

from mansio.errors import ConfigError, InvalidRequest, TopicRecreated
from mansio.net.metadata import NO_TOPIC_ID
from mansio.net.offsets import EARLIEST, LATEST
from mansio.spark.arrow.schema import select_columns, spark_schema
from mansio.spark.iceberg.table_format import (
    LANE_COLUMN,
    OFFSET_COLUMN,
    PARTITION_COLUMN,
    TIMESTAMP_COLUMN,
    TIMESTAMP_TYPE_COLUMN,
)
from mansio.spark.iceberg.table_scan import ALL_RECORDS, Selection, selected_files
from mansio.spark.iceberg.time_travel import is_archive_of
from mansio.spark.options import ON_UNREADABLE_DEAD_LETTER, SourceOptions
from mansio.spark.source.offsets import earliest_offsets, find_partitions, latest_offsets, offsets_for_times
from mansio.spark.source.read_plan import OffsetRange
from mansio.spark.sync_client import sync_client

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyspark.sql import Column, DataFrame, SparkSession

    from mansio.spark.iceberg.catalog import ArchiveTable
    from mansio.wire.topic_partition import TopicPartition

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
    names = select_columns(parsed.columns)
    condition = _selection_filter(selection)
    read = names if condition is None else tuple(dict.fromkeys((*names, *FILTER_COLUMNS)))
    unarchived = _unarchived_ranges(table, parsed, selection)
    paths = [file.path for file in selected_files(table, selection)]
    rows = spark.createDataFrame([], spark_schema(read)) if not paths and not unarchived else None
    if paths:
        rows = _read_archive_files(spark, topic, paths, read)
    if unarchived:
        newer = _read_log(spark, table, {**options, "columns": ",".join(read)}, unarchived)
        rows = newer if rows is None else rows.unionByName(newer)
    assert rows is not None
    return rows if condition is None else rows.where(condition).select(*names)


def _check_options(options: Mapping[str, str]) -> None:
    for name in options:
        if name.lower() in UNSUPPORTED_OPTIONS or name.lower().startswith(("starting", "ending")):
            raise ConfigError(
                f"option {name} is not for a read of archive and log: choose records by the selection"
            )


def _unarchived_ranges(
    table: ArchiveTable, options: SourceOptions, selection: Selection
) -> dict[int, OffsetRange]:
    """The offsets to read from the log of each partition: from the end of the archive, or from a later start of the
    selection. A partition that was added since the last commit is read from its beginning; before the first commit, all
    partitions are. An end of `LATEST` is resolved when the DataFrame is evaluated.
    """
    committed = table.last_commit()
    client = sync_client(options.bootstrap_servers)
    found = find_partitions(client, options)
    if not is_archive_of(table, found.topic_ids.get(table.topic, NO_TOPIC_ID)):
        raise TopicRecreated(
            f"topic {table.topic} was deleted and recreated since table {table.name} was created: its log does not"
            " continue where the table ends. Archive it into another warehouse, or read the two separately"
        )
    partitions = found.partitions
    earliest = earliest_offsets(client, partitions)
    latest = latest_offsets(client, partitions, options.isolation_level)
    first: dict[TopicPartition, int] = {}
    if selection.from_us is not None and selection.from_us > 0:
        first = offsets_for_times(
            client, dict.fromkeys(partitions, selection.from_us // 1000), options.isolation_level
        )
    ranges = {}
    for one in partitions:
        wanted = selection.offset_range(one.partition)
        if wanted is None:
            continue
        archive_end = EARLIEST if committed is None else committed.offsets.get(one.partition, 0)
        # Later records are not part of this read; if the archive ends beyond the log, the source reports it.
        begin = archive_end if wanted[0] == 0 else max(archive_end, min(wanted[0], latest[one]))
        since = latest[one] if first.get(one, 0) < 0 else min(first.get(one, 0), latest[one])
        # The timestamps of records in neither part are unknown, so the source reports that they are missing.
        is_deleted = 0 <= begin < earliest[one]
        start = begin if is_deleted or not since else max(begin, since)
        end = wanted[1] if wanted[1] <= latest[one] else LATEST
        if end == LATEST or start < end:
            ranges[one.partition] = OffsetRange(start, end)
    return ranges


def _read_archive_files(
    spark: SparkSession, topic: str, paths: list[str], names: tuple[str, ...]
) -> DataFrame:
    """The rows of these files. The directory of the archive is not listed, because it also holds replaced files."""
    reader = (
        spark.read.schema(ARCHIVE_SCHEMA)
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
    spark: SparkSession, table: ArchiveTable, options: Mapping[str, str], ranges: dict[int, OffsetRange]
) -> DataFrame:
    """The records of these offset ranges of the log, by partition."""
    topic, chosen = table.topic, sorted(ranges)
    reader = (
        spark.read.format("mansio")
        .options(**options)
        .option("assign", json.dumps({topic: chosen}))
        .option("startingOffsets", json.dumps({topic: {str(one): ranges[one].start for one in chosen}}))
        .option("endingOffsets", json.dumps({topic: {str(one): ranges[one].end for one in chosen}}))
    )
    if table.topic_id:
        reader = reader.option("topicIds", json.dumps({topic: table.topic_id}))
    return reader.load()


def _selection_filter(selection: Selection) -> Column | None:
    """The selection as a filter of the DataFrame; None if all records are selected."""
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
