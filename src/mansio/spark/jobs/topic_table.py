"""A topic as one table: archive and log in one batch read.

The archive holds everything of a partition below some offset, which is read together with the list of files from one
state of the table. The log is read from that offset on, so there is neither gap nor overlap, however far the archive
advances concurrently. The end of the log is determined when the DataFrame is first evaluated.

Invariants:
* Files whose bounds exclude the selection are not opened, and only offsets of the log that may match are fetched; each
  row is checked against the selection.
* Records that are in neither part (deleted from the log before they were archived) are an error unless `failOnDataLoss`
  is false. A recreated topic is always an error, because offsets of the two parts would mean different records.

The source's filter pushdown is not used: Spark keeps the filters pushed down by one query for the next query of the
same DataFrame, which would then miss records. The files of a DataFrame stay readable for the grace time of maintenance:
call this function again for each piece of work.
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
ARCHIVED_AS: Final = {
    "partition": PARTITION_COLUMN,
    "offset": OFFSET_COLUMN,
    "timestamp": TIMESTAMP_COLUMN,
    "timestampType": TIMESTAMP_TYPE_COLUMN,
    "lane": LANE_COLUMN,
}
FIXED_OPTIONS: Final = ("subscribe", "subscribepattern", "assign", "topicids", "pushdown")
FILTER_COLUMNS: Final = ("partition", "offset", "timestamp")
"""Columns that a selection refers to."""


def read_topic_as_table(
    spark: SparkSession,
    topic: str,
    table: ArchiveTable,
    options: Mapping[str, str],
    selection: Selection = ALL_RECORDS,
) -> DataFrame:
    """Archive and log of a topic as one DataFrame, with the columns of `format("mansio")`.

    `options`: those of a batch read (`kafka.bootstrap.servers`, `columns`, `includeHeaders`, `failOnDataLoss`, ...),
    except what selects topics and offsets, which `selection` and the table determine. The selection is applied before
    anything is read; a filter on the DataFrame has to open each file.

    Raises:
        ConfigError: An option is invalid or fixed here; the topic does not exist.
        DataLoss: Records are in neither part. TopicRecreated: The table is of an earlier topic of this name.
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
    condition = _condition(selection)
    read = names if condition is None else tuple(dict.fromkeys((*names, *FILTER_COLUMNS)))
    unarchived = _unarchived_ranges(table, parsed, selection)
    paths = [file.path for file in selected_files(table, selection)]
    rows = spark.createDataFrame([], spark_schema(read)) if not paths and not unarchived else None
    if paths:
        rows = _archived(spark, topic, paths, read)
    if unarchived:
        newer = _unarchived(spark, table, {**options, "columns": ",".join(read)}, unarchived)
        rows = newer if rows is None else rows.unionByName(newer)
    assert rows is not None
    return rows if condition is None else rows.where(condition).select(*names)


def _check_options(options: Mapping[str, str]) -> None:
    for name in options:
        if name.lower() in FIXED_OPTIONS or name.lower().startswith(("starting", "ending")):
            raise ConfigError(
                f"option {name} is not for a read of archive and log: choose records by the selection"
            )


def _unarchived_ranges(
    table: ArchiveTable, options: SourceOptions, selection: Selection
) -> dict[int, OffsetRange]:
    """Offsets to read of the log of each partition: from the archive's end, or from a later start of the selection. A
    partition that was added since the last batch is read from its beginning, and so is everything before the first
    batch. An end of `LATEST` is the log end when rows are first read.
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
        wanted = selection.offsets(one.partition)
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


def _archived(spark: SparkSession, topic: str, paths: list[str], names: tuple[str, ...]) -> DataFrame:
    """The archive's files. The directory is never listed, because it also holds replaced files."""
    reader = (
        spark.read.schema(ARCHIVE_SCHEMA)
        .option("recursiveFileLookup", "true")
        .option("__globPaths__", "false")
    )
    rows = reader.parquet(*paths)
    columns = [
        (functions.lit(topic) if name == "topic" else functions.col(ARCHIVED_AS.get(name, name))).alias(name)
        for name in names
    ]
    return rows.select(*columns)


def _unarchived(
    spark: SparkSession, table: ArchiveTable, options: Mapping[str, str], ranges: dict[int, OffsetRange]
) -> DataFrame:
    """These offsets of the log."""
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


def _condition(selection: Selection) -> Column | None:
    """The selection as a filter that both parts can push down."""
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
