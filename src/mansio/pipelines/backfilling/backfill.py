"""Backfill job: applies a user's function to the records of a time range, and writes the result to a table as a batch.

The input is the log, united with the archive of the topic if the warehouse has one. The tasks write files; one commit
adds them to the table, replaces the files of an earlier run over the same range, and records the range in a table
property.

Invariants:
* A killed run leaves the table unchanged. A repeated run replaces the rows of its range, so each record is in the table
  once.
* Records of the range that were deleted before the backfill are an error, unless that is accepted.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from typing import TYPE_CHECKING, Final

from pyspark.errors import PySparkException
from pyspark.sql import functions

from mansio.errors import ConfigError, DataLoss
from mansio.iceberg.archive.table import ArchiveTable, open_table
from mansio.iceberg.archive.table_scan import Selection
from mansio.iceberg.data_files import REPORT_SCHEMA, parse_written_file
from mansio.iceberg.errors import TableNotFound
from mansio.iceberg.replace_files import replace_files
from mansio.iceberg.result_table.backfill_ranges import (
    RANGES_PROPERTY,
    RUN_ID_PROPERTY,
    BackfilledRange,
    TimeRange,
    format_ranges,
    with_range,
)
from mansio.iceberg.result_table.data_file_writer import write_rows
from mansio.iceberg.result_table.table import open_result_table
from mansio.pipelines.backfilling.backfilled_table import known_ranges
from mansio.pipelines.pipeline_file import dataframe_builder, source_name
from mansio.pipelines.restarts import run_with_restarts
from mansio.pipelines.run import PipelineFailed, failure_reason
from mansio.spark.options import SourceOptions
from mansio.spark.session.addresses import spark_settings
from mansio.spark.sink.result_schema import to_iceberg_schema
from mansio.spark.source.offsets import (
    earliest_offsets,
    find_partitions,
    latest_offsets,
    offsets_for_times,
)
from mansio.spark.sync_client import find_topic, sync_client
from mansio.spark.topic_table import read_topic_as_table

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyspark.sql import DataFrame, SparkSession

    from mansio.iceberg.result_table.table import ResultTable, TableTarget
    from mansio.pipelines.pipeline_file import PipelineSource

STREAM_OPTION_PREFIXES: Final = ("starting", "ending", "maxoffsets", "minoffsets", "maxtrigger", "pipeline")
"""Options of `read` that belong to a stream; a backfill ignores them."""


@dataclass(frozen=True, slots=True)
class BackfillJob:
    """Options of one backfill. `file`: path of the pipeline file, or in its place its function. `warehouse`, `catalog`:
    where the archives of the topics are; without a warehouse only the log is read. `whole_topics`: topics that are read
    from their beginning instead of from the begin of the range, as for a table that is joined.
    """

    file: PipelineSource
    name: str
    bootstrap_servers: str
    times: TimeRange
    table: TableTarget
    warehouse: str | None = None
    catalog: str | None = None
    inputs: tuple[str, ...] = ()
    whole_topics: tuple[str, ...] = ()
    accept_loss: bool = False
    """Whether records of the range may have been deleted before the backfill."""
    extends: bool = False
    """Whether the rows of ranges that this one contains are replaced, as of the same range with an earlier end."""
    options: Mapping[str, str] = field(default_factory=dict)
    """Options of the source for all inputs, such as `valueFormat`; those that the user's function gives come first."""


@dataclass(frozen=True, slots=True)
class BackfillReport:
    """Result of a backfill. `sources`: for each topic `log`, or `archive and log`. `replaced_files`: number of files of
    earlier runs whose rows it replaced.
    """

    table: ResultTable
    range: BackfilledRange
    sources: dict[str, str]
    rows: int
    files: int
    replaced_files: int
    seconds: float


def backfill(spark: SparkSession, job: BackfillJob) -> BackfillReport:
    """Run a backfill. It starts again if a Python worker of Spark does not start in time (`run_with_restarts`).

    Raises:
        PipelineFileError, PipelineFailed: The user's file is invalid, or its function failed.
        UnknownTopicOrPartition: An input does not exist.
        InvalidRequest: The range overlaps another one of the table, or the table is of another pipeline.
        DataLoss: Records of the range may have been deleted.
        NotAnArchiveTable: The table has rows that no backfill has written.
        IncompatibleSchema: The columns of the result do not fit the table.
        CommitConflict: Another program changed the table during the run.
        ArchiveError, OSError: The catalog or the files cannot be used.
        WorkerStartTimeout: A Python worker of Spark was late after each restart.
    """
    return run_with_restarts(lambda: _backfill_once(spark, job), f"backfill {job.name}")


def _backfill_once(spark: SparkSession, job: BackfillJob) -> BackfillReport:
    began = time.monotonic()
    inputs = _BackfillInputs(spark, job)
    try:
        result = dataframe_builder(job.file, job.inputs, is_streaming=False)(spark, inputs.read)
    except PySparkException as error:
        raise PipelineFailed(failure_reason(str(error))) from error
    if not inputs.sources:
        raise ConfigError(f"{source_name(job.file)} reads no topic: use the function read that it is given")
    wanted = BackfilledRange(job.name, tuple(sorted(inputs.sources)), job.times)
    settings = spark_settings(spark)
    update = with_range(known_ranges(job.table, settings), wanted, job.table.name, extends=job.extends)
    table = open_result_table(job.table, to_iceberg_schema(result.schema), settings)
    order = [
        functions.desc(one.column) if one.descending else functions.asc(one.column) for one in table.sort_by
    ]
    rows = result.sortWithinPartitions(*order) if order else result
    write = partial(write_rows, table.layout(), wanted.file_prefix)
    try:
        reports = rows.mapInArrow(write, REPORT_SCHEMA).collect()
    except PySparkException as error:
        raise PipelineFailed(failure_reason(str(error))) from error
    files = [replace(parse_written_file(report["file"]), is_sorted=bool(order)) for report in reports]
    replaced = replace_files(
        table,
        files,
        {RANGES_PROPERTY: format_ranges(update.ranges)},
        run_property=RUN_ID_PROPERTY,
        is_replaced=update.replaces_file,
    )
    table.remove_orphan_files()
    return BackfillReport(
        table,
        wanted,
        dict(inputs.sources),
        rows=sum(file.rows for file in files),
        files=len(files),
        replaced_files=replaced,
        seconds=time.monotonic() - began,
    )


class _BackfillInputs:
    """The input topics of a backfill, and where their records are read from."""

    def __init__(self, spark: SparkSession, job: BackfillJob) -> None:
        self.sources: dict[str, str] = {}
        self._spark = spark
        self._job = job
        self._client = sync_client(job.bootstrap_servers)

    def read(self, topic: str, **options: str) -> DataFrame:
        """Return the records of a topic, or of several separated by commas, whose timestamps are in the range."""
        chosen = {
            name: str(value)
            for name, value in {**self._job.options, **options}.items()
            if not name.lower().startswith(STREAM_OPTION_PREFIXES)
        }
        chosen["kafka.bootstrap.servers"] = self._job.bootstrap_servers
        frames = [self._read_one(name.strip(), chosen) for name in topic.split(",")]
        return reduce(lambda one, other: one.unionByName(other), frames)

    def _read_one(self, topic: str, options: dict[str, str]) -> DataFrame:
        find_topic(self._client, topic)
        times = self._job.times
        from_ms = None if topic in self._job.whole_topics else times.from_ms
        selection = Selection(from_us=None if from_ms is None else from_ms * 1000, to_us=times.to_ms * 1000)
        archive = self._archive(topic)
        if archive is not None:
            self.sources[topic] = "archive and log"
            if self._job.accept_loss:
                options = {**options, "failOnDataLoss": "false"}
            return read_topic_as_table(self._spark, topic, archive, options, selection)
        self.sources[topic] = "log"
        if not self._job.accept_loss:
            self._check_not_deleted(topic, from_ms or 0)
        reader = self._spark.read.format("mansio").options(**options).option("subscribe", topic)
        if from_ms is not None:
            reader = reader.option("startingTimestamp", str(from_ms)).option(
                "startingOffsetsByTimestampStrategy", "latest"
            )
        # All later records are read: one with an earlier timestamp may follow one with a later timestamp.
        rows = reader.load().where(
            functions.col("timestamp") < functions.timestamp_millis(functions.lit(times.to_ms))
        )
        if from_ms is None:
            return rows
        return rows.where(functions.col("timestamp") >= functions.timestamp_millis(functions.lit(from_ms)))

    def _archive(self, topic: str) -> ArchiveTable | None:
        """Return the archive of the topic in the warehouse, if there is one."""
        if self._job.warehouse is None:
            return None
        with contextlib.suppress(TableNotFound):
            archive = open_table(self._job.catalog, self._job.warehouse, topic)
            if archive.last_commit() is not None:
                return archive
        return None

    def _check_not_deleted(self, topic: str, from_ms: int) -> None:
        """Raise `DataLoss` if the log has deleted records that may belong to the range: in some partition no
        record or the first one that remains is after the begin of the range.
        """
        options = SourceOptions.parse(
            {"kafka.bootstrap.servers": self._job.bootstrap_servers, "subscribe": topic}
        )
        partitions = find_partitions(self._client, options).partitions
        starts = earliest_offsets(self._client, partitions)
        ends = latest_offsets(self._client, partitions, options.isolation_level)
        first = offsets_for_times(self._client, dict.fromkeys(partitions, from_ms), options.isolation_level)
        for one in partitions:
            if may_lack_records(starts[one], ends[one], first.get(one, -1)):
                raise DataLoss(
                    f"the log of topic {topic} begins at offset {starts[one]} of partition {one.partition}: earlier "
                    "records were deleted, and may belong to the time range. Give the warehouse with the topic's"
                    " archive, or continue without them (--accept-loss)"
                )


def may_lack_records(start: int, end: int, first: int) -> bool:
    """Whether records of a time range may have been deleted from a partition with log start offset `start` and end
    offset `end`. `first`: offset of the first record that is not older than the begin of the range; -1 if none.
    """
    return start > 0 and (first == start or start == end)
