"""Pipeline runner: applies a user's function to DataFrames of topics, and writes the result to a topic, an Iceberg
table or a directory, continuously or until the current end of the topics.

A killed run resumes from Spark's checkpoint with the same command. Progress is reported to the caller after each batch.
The offsets are also committed for the group `mansio.pipeline.<name>`, which makes the broker retain unread records.
Output is exactly-once: to a topic, of which readers with `read_committed` see a batch when it is complete, to an
Iceberg table, and to a directory of Parquet files (with Spark's log of them).

Invariants:
* Topics, pipeline file and checkpoint are checked before any record is read.
* A run that is stopped completes its running batch first.
"""

from __future__ import annotations

import json
import logging
import re
import time
import warnings
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Final

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException, StreamingQueryException

from mansio.errors import ConfigError, MansioError
from mansio.logs import fields
from mansio.pipelines.batch_watch import BatchWatch
from mansio.pipelines.checkpoint import (
    CheckpointBinding,
    bind_checkpoint,
    checkpoint_directory,
    completed_batch,
    query_id,
    start_of_first_batch,
)
from mansio.pipelines.pipeline_file import dataframe_builder, source_name
from mansio.pipelines.pipeline_progress import BatchProgress, PipelineProgress, progress_of_batch
from mansio.pipelines.progress_listener import ProgressListener, offsets_in
from mansio.pipelines.restarts import run_with_restarts
from mansio.spark.options import format_aligned_inputs, parse_count
from mansio.spark.session.addresses import is_connect, spark_settings
from mansio.spark.source.offsets import latest_offsets
from mansio.spark.spark_versions import PROGRESS_HAS_LATEST_OFFSETS, start_available_now
from mansio.spark.sync_client import ensure_topic, find_topic, sync_client
from mansio.telemetry.jobs import add_batch, job_traceparent
from mansio.wire.field_values import READ_COMMITTED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.listener import StreamingQueryProgress
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamWriter

    from mansio.iceberg.result_table.table import ResultTable, TableTarget
    from mansio.pipelines.batch_watch import RunningBatch
    from mansio.pipelines.checkpoint import CheckpointDirectory
    from mansio.pipelines.pipeline_file import PipelineSource
    from mansio.pipelines.pipeline_metrics import PipelineMetrics
    from mansio.pipelines.work_sink import WorkSink
    from mansio.spark.source.offsets import Offsets
    from mansio.spark.sync_client import SyncClient
    from mansio.wire.topic_partition import TopicPartition

    LatestOffsets = Callable[[Iterable[TopicPartition]], Offsets]

logger = logging.getLogger(__name__)

TRIGGER_INTERVAL_S: Final = 1.0
APPEND_MODE: Final = "append"
LIMIT_OPTION: Final = "maxOffsetsPerTrigger"
POLL_INTERVAL_S: Final = 0.2
STOP_WAIT_S_MAX: Final = 60.0
"""Maximum wait for the running batch when the run is stopped."""
REASON_CHARACTERS_MAX: Final = 500
_MANSIO_ERROR: Final = re.compile(r"mansio[\w.]*\.[A-Z]\w+: .+")
_ANY_ERROR: Final = re.compile(r"^(?:[\w.]+\.)?[A-Z]\w*(?:Error|Exception): .+", re.MULTILINE)


class PipelineFailed(MansioError):
    """The query of a pipeline ended with an error."""


@dataclass(frozen=True, slots=True)
class PipelineJob:
    """Options of one pipeline run. Exactly one target is given: `topic`, `table` (Iceberg) or `path` (a directory).

    `file`: path of the pipeline file, or in its place the function `transform(frame)` or `pipeline(spark, read)`.
    `checkpoint`: directory of Spark's checkpoint.
    """

    file: PipelineSource
    name: str
    bootstrap_servers: str
    checkpoint: str
    inputs: tuple[str, ...] = ()
    topic: str | None = None
    table: TableTarget | None = None
    path: str | None = None
    stops_when_caught_up: bool = False
    """Whether the run ends when the records that exist at its start are processed; otherwise it runs until stopped."""
    trigger_s: float = TRIGGER_INTERVAL_S
    starting_offsets: str = "earliest"
    records_max: int | None = None
    """Maximum number of records of a batch, of all inputs together; None: no limit. The inputs advance together in the
    time of their records, so that a batch has the oldest ones."""
    output_mode: str = APPEND_MODE
    options: dict[str, str] = field(default_factory=dict)
    """Additional options of the source."""
    share_group: str | None = None
    """Share group whose records are processed: one topic, whose failed rows are retried and dead-lettered. None: the
    records of the topics, in the order of their offsets."""
    exactly_once: bool = True
    """Whether a batch into a topic is written once, and visible to `read_committed` when it is complete. Otherwise its
    records are visible at once, and those of a repeated batch are there again."""

    @property
    def target(self) -> str:
        """Description of the target for messages, such as `topic flights`."""
        if self.topic is not None:
            return f"topic {self.topic}"
        return f"path {self.path}" if self.table is None else f"table {self.table.name}"


@dataclass(frozen=True, slots=True)
class PipelineResult:
    """Result of a run."""

    name: str
    target: str
    batches: int
    records: int
    lag: int | None
    table: ResultTable | None = None
    late_rows: int = 0
    """Rows that stateful operators have dropped in this run, because they were older than the watermark."""


def run_pipeline(
    spark: SparkSession,
    job: PipelineJob,
    report: Callable[[BatchProgress], None] = lambda _progress: None,
    is_stopping: Callable[[], bool] = lambda: False,
    metrics: PipelineMetrics | None = None,
    report_running: Callable[[RunningBatch], None] = lambda _running: None,
) -> PipelineResult:
    """Run a pipeline until it is up to date (`stops_when_caught_up`) or `is_stopping` returns true; `report` is called
    for every batch, `report_running` for one that runs for long, every half minute, and `metrics` observes them.

    If a Python worker of Spark does not start in time, the query restarts from its checkpoint (`run_with_restarts`).

    Raises:
        PipelineFileError: The user's file is missing, invalid, or failed while it built the DataFrame.
        UnknownTopicOrPartition: An input does not exist.
        CheckpointMismatch, TopicRecreated: The checkpoint belongs to another pipeline, topic or table.
        IncompatibleSchema, CatalogUnavailable, CatalogLocked: The table cannot be used.
        PipelineFailed: The query ended with an error; the message has the reason in one line.
        WorkerStartTimeout: A Python worker of Spark was late after each restart.
    """
    if sum(one is not None for one in (job.topic, job.table, job.path)) != 1:
        raise ConfigError("say where the result goes: into one topic, table or path")
    is_update = job.output_mode != APPEND_MODE
    if job.table is not None and is_update != bool(job.table.key):
        raise ConfigError("update mode into a table needs the columns of its key, and append mode has none")
    if job.path is not None and is_update:
        raise ConfigError("files cannot be updated: write to a topic or table, or use append mode")
    if job.share_group is not None and is_update and job.table is None:
        raise ConfigError("records of a share group are processed one by one: use append mode")
    restarting = partial(
        run_with_restarts,
        job=f"pipeline {job.name}",
        on_restart=(lambda: None) if metrics is None else metrics.observe_restart,
    )
    inputs, result = restarting(lambda: _build_result(spark, job))
    if job.topic is not None:
        ensure_topic(sync_client(job.bootstrap_servers), job.topic, inputs.partitions)
    checkpoint = checkpoint_directory(spark, job.checkpoint)
    output = _PipelineOutput(spark, job, result)
    bind_checkpoint(checkpoint, CheckpointBinding(job.name, inputs.ids, output.target))
    listener = ProgressListener(job.name, job.bootstrap_servers, metrics)
    _publish_completed_batch(checkpoint, listener)
    spark.streams.addListener(listener)
    reporter = _ProgressReporter(report, _latest_offsets_of(sync_client(job.bootstrap_servers)), metrics)
    try:
        watch = BatchWatch(spark, report_running)
        done = restarting(
            lambda: _report_until_end(output.start(), job, listener, reporter, is_stopping, watch)
        )
        return replace(done, table=output.current_table())
    except MansioError as error:
        _publish_start(checkpoint, listener)
        listener.publish_end(error.message)
        raise
    finally:
        _remove_listener(spark, listener)
        listener.close()


def _build_result(spark: SparkSession, job: PipelineJob) -> tuple[_PipelineInputs, DataFrame]:
    """Return the inputs of the pipeline, and its DataFrame.

    If several inputs share a limit, the user's function is called twice: the reader of each input needs the options of
    all of them, which are known after the first call.
    """
    build = dataframe_builder(job.file, job.inputs)
    client = sync_client(job.bootstrap_servers)
    inputs = _PipelineInputs(spark, job, client)
    try:
        result = build(spark, inputs.read)
        if inputs.limit is not None and len(inputs.read_options) > 1:
            first, inputs = inputs, _PipelineInputs(spark, job, client, inputs)
            result = build(spark, inputs.read)
            if inputs.read_options != first.read_options:
                raise ConfigError(
                    f"{source_name(job.file)} reads other inputs when its function is called again: with a limit of"
                    " records the function has to read the same ones each time"
                )
    except PySparkException as error:
        raise PipelineFailed(failure_reason(str(error))) from error
    if job.share_group is not None:
        from mansio.pipelines.work_sink import check_result_columns

        check_result_columns(result)
    if not inputs.ids:
        raise ConfigError(f"{source_name(job.file)} reads no topic: use the function read that it is given")
    return inputs, result


def _publish_completed_batch(checkpoint: CheckpointDirectory, listener: ProgressListener) -> None:
    """Commit the offsets of the last complete batch for the pipeline's group: a run that was killed between the end of
    this batch and its commit left the group behind. Without records to process, Spark reports no progress that would
    correct it.
    """
    batch = completed_batch(checkpoint)
    if batch is not None:
        listener.publish_completed(batch.batch, batch.sources, batch.query)


def _publish_start(checkpoint: CheckpointDirectory, listener: ProgressListener) -> None:
    """Commit the start offsets of a run that failed in the first batch of its checkpoint, so that `mansio pipeline lag`
    shows the error, and the broker retains the records until the run is repeated.
    """
    if listener.committed:
        return
    with suppress(PySparkException, Py4JError, OSError):  # the session may have ended
        start = start_of_first_batch(checkpoint)
        if start is not None:
            progress = PipelineProgress(start.batch, int(time.time() * 1000))
            listener.publish_offsets(start.sources, start.query, progress)


class _PipelineInputs:
    """The input topics of a pipeline, checked before they are read. `known`: the inputs of an earlier call of the
    user's function, with which each input that is read now advances together.
    """

    def __init__(
        self, spark: SparkSession, job: PipelineJob, client: SyncClient, known: _PipelineInputs | None = None
    ) -> None:
        self.ids: dict[str, str] = {}
        self.partitions = 1
        """Number of partitions of the largest input."""
        self.read_options: list[dict[str, str]] = []
        """Options of each input, without those of the limit."""
        self.limit: int | None = job.records_max if known is None else known.limit
        """The maximum number of records of a batch, of all inputs together: the smallest of the given limits."""
        self._spark = spark
        self._job = job
        self._client = client
        self._known = known

    def read(self, topic: str, **options: str) -> DataFrame:
        """Return the records of a topic, or of several separated by commas, as a stream."""
        for name in (one.strip() for one in topic.split(",")):
            view = find_topic(self._client, name)
            self.ids[name] = view.topic_id.hex()
            self.partitions = max(self.partitions, len(view.partitions))
        job = self._job
        chosen = {"kafka.bootstrap.servers": job.bootstrap_servers, "subscribe": topic}
        if job.share_group is not None:
            return self._read_leased(job.share_group, chosen | options)
        chosen |= {"startingOffsets": job.starting_offsets, "pipeline": job.name}
        if job.stops_when_caught_up:
            chosen["stopAtLatest"] = "true"
        for given in (job.options, options):
            for name, value in given.items():
                if name.lower() == LIMIT_OPTION.lower():
                    limit = parse_count(LIMIT_OPTION, str(value))
                    self.limit = limit if self.limit is None else min(self.limit, limit)
                else:
                    chosen[name] = str(value)
        number = len(self.read_options)
        self.read_options.append(dict(chosen))
        if self.limit is not None:
            inputs = [chosen] if self._known is None else self._known.read_options
            own = 0 if self._known is None else min(number, len(inputs) - 1)
            chosen |= {
                LIMIT_OPTION: str(self.limit),
                "alignedInputs": format_aligned_inputs(own, inputs),
            }
        return self._spark.readStream.format("mansio").options(**chosen).load()

    def _read_leased(self, group: str, chosen: dict[str, str]) -> DataFrame:
        """Return the records of a share group as a stream. Raises `ConfigError` for a second input."""
        if self.read_options:
            raise ConfigError(
                "a pipeline reads a share group once: each input would lease other records. Name several topics in one"
                " call of read, separated by commas"
            )
        job = self._job
        chosen = {"shareGroup": group, **job.options, **chosen}
        if job.records_max is not None:
            chosen["maxRecordsPerTrigger"] = str(job.records_max)
        if job.stops_when_caught_up:
            chosen["stopAtLatest"] = "true"
        self.read_options.append(chosen)
        return self._spark.readStream.format("mansio").options(**chosen).load()


def to_record_columns(frame: DataFrame) -> DataFrame:
    """Return the DataFrame with the columns of a record. If it has no column `value`, its columns other than `key`,
    `topic`, `partition` and `headers` become a JSON object in `value`.
    """
    from pyspark.sql import functions

    if "value" in frame.columns:
        return frame
    kept = [name for name in ("key", "topic", "partition", "headers") if name in frame.columns]
    other_columns = [name for name in frame.columns if name not in kept]
    return frame.select(*kept, functions.to_json(functions.struct(*other_columns)).alias("value"))


class _PipelineOutput:
    """The target of a pipeline, and the query that writes to it."""

    def __init__(self, spark: SparkSession, job: PipelineJob, result: DataFrame) -> None:
        """Open the table, if the target is one. Raises the errors of `open_result_table`."""
        self._spark = spark
        self._job = job
        self._result = result
        self.table: ResultTable | None = None
        self.target = job.target
        """The target as the checkpoint stores it."""
        if job.table is not None:
            from mansio.iceberg.result_table.table import open_result_table
            from mansio.pipelines.work_sink import result_schema
            from mansio.spark.sink.result_schema import to_iceberg_schema

            schema = result.schema if job.share_group is None else result_schema(result)
            self.table = open_result_table(job.table, to_iceberg_schema(schema), spark_settings(spark))
            self.table.remove_orphan_files()
            self.target = f"table {self.table.name} ({self.table.iceberg.metadata.table_uuid})"

    def current_table(self) -> ResultTable | None:
        """Return the table as of the last batch, which with Spark Connect a copy on the server has committed."""
        if self.table is not None and is_connect(self._spark):
            self.table.refresh()
        return self.table

    def start(self) -> StreamingQuery:
        """Start the query. Raises `PipelineFailed`."""
        writer = self._writer()
        try:
            if self._job.stops_when_caught_up:
                return start_available_now(writer)
            interval_ms = round(self._job.trigger_s * 1000)
            return writer.trigger(processingTime=f"{interval_ms} milliseconds").start()
        except PySparkException as error:
            raise PipelineFailed(failure_reason(str(error))) from error

    def _writer(self) -> DataStreamWriter:
        job = self._job
        if job.share_group is not None:
            writer = self._result.writeStream.foreachBatch(self._work_sink(job.share_group))
        elif job.topic is not None:
            writer = _topic_writer(job, job.topic, to_record_columns(self._result))
        elif self.table is not None:
            writer = self._result.writeStream.foreachBatch(self._table_sink())
        else:
            writer = self._result.writeStream.format("parquet").option("path", job.path)
        return (
            writer.queryName(job.name)
            .outputMode(job.output_mode)
            .option("checkpointLocation", job.checkpoint)
        )

    def _work_sink(self, group: str) -> WorkSink:
        """Return the function that writes a batch of a share group. Raises `ConfigError`, and the errors of
        `open_result_table`."""
        from mansio.pipelines.work_sink import (
            DirectoryTarget,
            ResultTableTarget,
            TopicTarget,
            WorkSink,
            WorkTarget,
        )

        job = self._job
        target: WorkTarget
        if job.topic is not None:
            target = TopicTarget(
                _topic_options(job, job.topic), job.bootstrap_servers, job.checkpoint, job.exactly_once
            )
        elif self.table is not None:
            from mansio.pipelines.table_writer import identify_batch

            identify = partial(identify_batch, job.checkpoint)
            target = ResultTableTarget(self.table, self._table_sink(), identify)
        else:
            assert job.path is not None
            target = DirectoryTarget(job.path)
        return WorkSink(
            target,
            group=group,
            bootstrap_servers=job.bootstrap_servers,
            checkpoint=job.checkpoint,
            keeps_key=job.topic is not None,
            to_columns=to_record_columns if job.topic is not None else _same,
        )

    def _table_sink(self) -> Callable[[DataFrame, int], None]:
        """Return the function that writes a batch to the table. Raises the errors of `open_result_table`."""
        from mansio.pipelines.table_writer import table_sink

        assert self.table is not None
        assert self._job.table is not None
        return table_sink(self._spark, self.table, self._job.table, self._job.checkpoint)


def _topic_writer(job: PipelineJob, topic: str, records: DataFrame) -> DataStreamWriter:
    """Return the writer to a topic. In update mode the batches are written by `foreachBatch`: Spark refuses update mode
    for a sink in Python.
    """
    options = _topic_options(job, topic)
    location = job.checkpoint
    if job.output_mode == APPEND_MODE:
        return records.writeStream.format("mansio").options(**options)

    def write_batch(frame: DataFrame, batch_id: int) -> None:
        # The identity of the batch, with which a repeated one is recognized.
        query = query_id(checkpoint_directory(frame.sparkSession, location))
        frame.write.format("mansio").mode("append").options(
            **options, queryId=query, batchId=str(batch_id)
        ).save()

    return records.writeStream.foreachBatch(write_batch)


def _topic_options(job: PipelineJob, topic: str) -> dict[str, str]:
    """Return the options of the writer to a topic."""
    options = {"kafka.bootstrap.servers": job.bootstrap_servers, "topic": topic}
    if not job.exactly_once:
        options["exactlyOnce"] = "false"
    if (context := job_traceparent()) is not None:
        options["traceparent"] = context
    return options


def _same(frame: DataFrame) -> DataFrame:
    return frame


def _report_until_end(
    query: StreamingQuery,
    job: PipelineJob,
    listener: ProgressListener,
    reporter: _ProgressReporter,
    is_stopping: Callable[[], bool],
    watch: BatchWatch,
) -> PipelineResult:
    """Report every batch until the query ends or is stopped."""
    with lost_session_errors(PipelineFailed):
        _report_batches(query, listener, reporter, is_stopping, watch)
    if reporter.last is not None:
        listener.publish(reporter.last)  # Spark's own event may still be queued
    listener.publish_end()
    return PipelineResult(
        job.name,
        job.target,
        reporter.batches,
        reporter.records,
        reporter.final_lag(listener.committed),
        late_rows=reporter.late_rows,
    )


def _report_batches(
    query: StreamingQuery,
    listener: ProgressListener,
    reporter: _ProgressReporter,
    is_stopping: Callable[[], bool],
    watch: BatchWatch,
) -> None:
    try:
        while not query.awaitTermination(POLL_INTERVAL_S):  # type: ignore[arg-type]  # seconds may be a fraction
            reporter.report_new(query)
            listener.publish_running()
            watch.look(reporter.last_batch, is_active=query.isActive and query.status["isTriggerActive"])
            if is_stopping():
                stop_after_batch(query)
                break
    except StreamingQueryException as error:
        raise PipelineFailed(failure_reason(str(error))) from error
    finally:
        reporter.report_new(query)
        if query.isActive:
            query.stop()


@contextmanager
def lost_session_errors(kind: type[MansioError]) -> Iterator[None]:
    """Raise an error of this kind instead of those of a session whose Spark Connect server has ended."""
    try:
        yield
    except PySparkException as error:
        reason = failure_reason(str(error)).rstrip(".")
        raise kind(f"Spark's session has ended: {reason}. The same command continues where it was") from error


def _remove_listener(spark: SparkSession, listener: ProgressListener) -> None:
    """Remove the listener from a session that may have ended."""
    with warnings.catch_warnings(), suppress(PySparkException):
        warnings.simplefilter("ignore", UserWarning)
        spark.streams.removeListener(listener)


def stop_after_batch(query: StreamingQuery) -> None:
    """Stop a query after its running batch, which may take up to `STOP_WAIT_S_MAX`. A query with a backlog starts the
    next batch immediately; that batch is aborted, and repeated in the next run.
    """
    end = time.monotonic() + STOP_WAIT_S_MAX
    before = query.lastProgress
    while query.isActive and query.status["isTriggerActive"] and time.monotonic() < end:
        newest = query.lastProgress
        if newest is not None and (before is None or newest.timestamp != before.timestamp):
            break
        time.sleep(POLL_INTERVAL_S / 10)
    query.stop()


class _ProgressReporter:
    """Reports each batch of a query once, and counts batches and records."""

    def __init__(
        self,
        report: Callable[[BatchProgress], None],
        latest: LatestOffsets,
        metrics: PipelineMetrics | None = None,
    ) -> None:
        self.batches = 0
        self.records = 0
        self.late_rows = 0
        self.lag: int | None = None
        self.last: StreamingQueryProgress | None = None
        self._report = report
        self._latest = latest
        self._metrics = metrics
        self._batch = -1

    @property
    def last_batch(self) -> int:
        """The last batch that was reported in this run, -1 before the first."""
        return self._batch

    def final_lag(self, committed: Offsets) -> int | None:
        """Return the lag after the run: of the last batch, or of the committed offsets if this run has completed
        none.
        """
        if self.lag is not None or not committed:
            return self.lag
        ends = self._latest(committed)
        return sum(max(0, end - committed[place]) for place, end in ends.items()) if ends else None

    def report_new(self, query: StreamingQuery) -> None:
        """Report the batches that were completed since the last call."""
        newest = query.lastProgress
        if newest is None or (self.last is not None and newest.timestamp == self.last.timestamp):
            return
        for one in query.recentProgress:
            if one.batchId <= self._batch and (self.last is None or one.timestamp <= self.last.timestamp):
                continue
            is_batch = one.batchId > self._batch and "addBatch" in one.durationMs
            lags = topic_lags(one, self._latest)
            self.last, self.lag = one, None if lags is None else sum(lags.values())
            if is_batch:
                self._batch = one.batchId
                self.batches += 1
                self.records += one.numInputRows
                seconds = one.durationMs.get("triggerExecution", 0) / 1000
                found = progress_of_batch(json.loads(one.json), int(time.time() * 1000))
                self.late_rows += found.late_rows
                if self._metrics is not None:
                    self._metrics.observe_batch(found, lags)
                begun_s = datetime.fromisoformat(one.timestamp).timestamp()
                add_batch(one.name or "", one.batchId, one.numInputRows, begun_s=begun_s, seconds=seconds)
                self._report(BatchProgress(one.batchId, one.numInputRows, seconds, self.lag))


def batch_lag(progress: StreamingQueryProgress, latest: LatestOffsets) -> int | None:
    """Return the number of records that exist and that are not read yet; None if it is unknown. `latest` is called if
    the progress does not contain the end offsets that the source saw when it planned the batch, as of a repeated batch.
    """
    lag = topic_lags(progress, latest)
    return None if lag is None else sum(lag.values())


def topic_lags(progress: StreamingQueryProgress, latest: LatestOffsets) -> dict[str, int] | None:
    """`batch_lag` by topic."""
    lags: dict[str, int] | None = None
    for source in progress.sources:
        done = offsets_in(source.endOffset)
        # Of a batch that is repeated after a restart Spark has not asked the source for its end.
        ends = offsets_in(source.latestOffset) if PROGRESS_HAS_LATEST_OFFSETS else {}
        if done and not ends:
            ends = latest(done)
        for partition, end in ends.items():
            lags = {} if lags is None else lags
            lags[partition.topic] = lags.get(partition.topic, 0) + max(0, end - done.get(partition, 0))
    return lags


def _latest_offsets_of(client: SyncClient) -> LatestOffsets:
    """Return the function that requests end offsets; it returns nothing if the brokers do not answer."""

    def latest(partitions: Iterable[TopicPartition]) -> Offsets:
        try:
            return latest_offsets(client, partitions, READ_COMMITTED)
        except MansioError as error:
            logger.warning("pipeline_lag_unknown", extra=fields(error=error.message))
            return {}

    return latest


def failure_reason(text: str) -> str:
    """Return the reason of a failure in one line: the last Mansio error in the traceback of Spark's exception or,
    without one, the last error of any kind.
    """
    ours = _MANSIO_ERROR.findall(text)
    if ours:
        return str(ours[-1]).partition(": ")[2].strip()
    others = _ANY_ERROR.findall(text.partition("\n\nJVM stacktrace")[0])
    return " ".join((others[-1] if others else text).split())[:REASON_CHARACTERS_MAX]
