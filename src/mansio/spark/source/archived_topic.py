"""Batch reader of a whole topic as a table: archived records from the table's files, the others from the log.

This is `format("mansio")` with the option `asTable`. Spark plans the source of a temporary view once and reuses the
plan for every later query, so what is read must not be part of the plan: each task determines files and offsets when it
runs. Tasks read the files without Spark's own Parquet reader, and only the selected columns.

Invariants:
* The files and the first offset of the log are of one state of the table: no partition has a gap or an overlap.
* A task reads some of the partitions that exist when it runs, and together the tasks read all of them, also partitions
  that were added after the view was created.
* Records that were deleted from the log before they were archived raise `DataLoss` unless `failOnDataLoss` is false. A
  recreated topic raises `TopicRecreated`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader

from mansio.errors import ConfigError, TopicRecreated
from mansio.iceberg.archive.parquet_writer import SOURCE_COLUMN_NAMES
from mansio.iceberg.archive.table_format import OFFSET_COLUMN
from mansio.iceberg.archive.table_scan import Selection, selected_files
from mansio.iceberg.archive.time_travel import is_archive_of
from mansio.net.metadata import NO_TOPIC_ID
from mansio.schemas.column_types import check_readable, conform
from mansio.schemas.formats import open_decoder
from mansio.serde.errors import UnsupportedSchema
from mansio.spark.arrow.schema import RECORD_SCHEMA
from mansio.spark.options import DECODED_COLUMNS, OffsetSpec, Subscription
from mansio.spark.source.offsets import (
    earliest_offsets,
    find_partitions,
    latest_offsets,
    offsets_for_times,
    resolve_ranges,
)
from mansio.spark.source.read_plan import OffsetRange, PartitionShare, plan_ranges
from mansio.spark.sync_client import sync_client
from mansio.wire.field_values import EARLIEST_TIMESTAMP, LATEST_TIMESTAMP

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pyspark.sql.datasource import InputPartition

    from mansio.iceberg.archive.table import ArchiveTable
    from mansio.spark.options import SourceOptions
    from mansio.wire.topic_partition import TopicPartition

_TABLE_COLUMN_NAMES: Final = {source: table for table, source in SOURCE_COLUMN_NAMES.items()}


def open_archive(options: SourceOptions) -> ArchiveTable:
    """Return the archive of the topic of these options. Raises the errors of `open_table`."""
    from mansio.iceberg.archive.table import open_table

    return open_table(options.catalog, options.warehouse, options.subscription.topics[0])


def decoded_types(table: ArchiveTable, options: SourceOptions) -> dict[str, pa.DataType]:
    """Return the types of the decoded columns: those of the table and of all versions of the schemas.

    Raises `ConfigError` if archived records have not been decoded, or the schemas do not agree with the table.
    """
    existing = {one.name: one.type for one in table.decoded_columns()}
    found = {}
    for one in options.decoded:
        if one.name not in existing and table.last_commit() is not None:
            raise ConfigError(
                f"table {table.name} has no column {one.name}: archive with --{DECODED_COLUMNS[one.name]}-format, or"
                " decode the result with mansio.spark.functions"
            )
        found[one.name] = open_decoder(one.format, existing.get(one.name)).type
    return found


class TopicTableReader(DataSourceReader):
    """Reader of a batch query with the option `asTable`."""

    def __init__(self, options: SourceOptions, columns: Sequence[str]) -> None:
        self._options = options
        self._columns = tuple(columns)

    def partitions(self) -> list[InputPartition]:
        """Return the input of each task: one per partition of the topic now."""
        found = find_partitions(
            sync_client(self._options.bootstrap_servers, self._options.security), self._options
        )
        count = len(found.partitions)
        return [PartitionShare(index, count) for index in range(count)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of one task, as Arrow batches.

        Raises the errors of `open_table`, `unarchived_ranges`, `resolve_ranges` and `read_range`.
        """
        if not isinstance(partition, PartitionShare):  # Spark's own type, if there is nothing to read
            return
        options = self._options
        found = find_partitions(sync_client(options.bootstrap_servers, options.security), options)
        table = open_archive(options) if options.warehouse else None
        if table is not None:
            self._check_types(table)
        for one in found.partitions:
            if one.partition % partition.count != partition.index:
                continue
            selection = Selection(partitions=frozenset((one.partition,)))
            unarchived = {one.partition: OffsetRange(EARLIEST_TIMESTAMP, LATEST_TIMESTAMP)}
            if table is not None:
                unarchived = unarchived_ranges(table, options, selection)
                for file in selected_files(table, selection):
                    yield from self._read_file(file.path)
            if one.partition in unarchived:
                yield from self._read_log(one, unarchived[one.partition], table)

    def _read_log(
        self, partition: TopicPartition, offsets: OffsetRange, table: ArchiveTable | None
    ) -> Iterator[pa.RecordBatch]:
        from mansio.spark.source.task_reader import read_range

        topic_id = "" if table is None else table.topic_id
        log = replace(
            self._options,
            subscription=Subscription(partitions=(partition,)),
            starting_offsets=OffsetSpec(offsets={partition: offsets.start}),
            ending_offsets=OffsetSpec(offsets={partition: offsets.end}),
            topic_ids={partition.topic: topic_id} if topic_id else {},
        )
        wanted = resolve_ranges(sync_client(log.bootstrap_servers, log.security), log)
        for task_range in plan_ranges(wanted):
            yield from read_range(log, self._columns, task_range)

    def _check_types(self, table: ArchiveTable) -> None:
        """Check that the table's decoded columns fit into those that the query was planned with."""
        types = {one.name: one.type for one in self._options.decoded}
        for column in table.decoded_columns():
            kind = types.get(column.name)
            if kind is not None and column.name in self._columns:
                try:
                    check_readable(column.type, kind)
                except UnsupportedSchema as error:
                    raise UnsupportedSchema(
                        f"column {column.name} of table {table.name} has changed: {error.message}. Create the DataFrame"
                        " or view again"
                    ) from error

    def _read_file(self, path: str) -> Iterator[pa.RecordBatch]:
        import pyarrow.parquet as pq

        wanted = [_TABLE_COLUMN_NAMES.get(name, name) for name in self._columns if name != "topic"]
        system, location = _file_system(path)
        with system.open_input_file(location) as stream:
            parquet = pq.ParquetFile(stream)
            stored = [name for name in wanted if name in parquet.schema_arrow.names]
            # A file has rows of one partition, and a column of them is needed to know their number.
            names = stored or [OFFSET_COLUMN]
            for batch in parquet.iter_batches(self._options.rows_per_batch, columns=names, use_threads=False):
                yield self._to_source_rows(batch)

    def _to_source_rows(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        types = {one.name: one.type for one in self._options.decoded}
        columns = []
        for name in self._columns:
            kind = types[name] if name in types else RECORD_SCHEMA.field(name).type
            stored = _TABLE_COLUMN_NAMES.get(name, name)
            if name == "topic":
                columns.append(
                    pa.repeat(pa.scalar(self._options.subscription.topics[0], kind), batch.num_rows)
                )
            elif batch.schema.get_field_index(stored) < 0:
                columns.append(pa.nulls(batch.num_rows, kind))
            elif name in types:
                columns.append(conform(batch.column(stored), kind))
            else:
                column = batch.column(stored)
                columns.append(column if column.type == kind else column.cast(kind))
        return pa.RecordBatch.from_arrays(columns, list(self._columns))


def _file_system(path: str) -> tuple[pa.fs.FileSystem, str]:
    from pyarrow import fs

    parts = urlsplit(path)
    if parts.scheme in ("", "file"):
        return fs.LocalFileSystem(), parts.path
    system, location = fs.FileSystem.from_uri(path)
    return system, str(location)


def unarchived_ranges(
    table: ArchiveTable, options: SourceOptions, selection: Selection
) -> dict[int, OffsetRange]:
    """Return the offsets to read from the log of each partition: from the end of the archive, or from a later start of
    the selection. A partition that was added since the last commit is read from its beginning; before the first commit,
    all partitions are. An end of `LATEST_TIMESTAMP` is resolved when the DataFrame is evaluated.
    """
    committed = table.last_commit()
    client = sync_client(options.bootstrap_servers, options.security)
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
        archive_end = EARLIEST_TIMESTAMP if committed is None else committed.offsets.get(one.partition, 0)
        # Later records are not part of this read; if the archive ends beyond the log, the source reports it.
        begin = archive_end if wanted[0] == 0 else max(archive_end, min(wanted[0], latest[one]))
        since = latest[one] if first.get(one, 0) < 0 else min(first.get(one, 0), latest[one])
        # The timestamps of records in neither part are unknown, so the source reports that they are missing.
        is_deleted = 0 <= begin < earliest[one]
        start = begin if is_deleted or not since else max(begin, since)
        end = wanted[1] if wanted[1] <= latest[one] else LATEST_TIMESTAMP
        if end == LATEST_TIMESTAMP or start < end:
            ranges[one.partition] = OffsetRange(start, end)
    return ranges
