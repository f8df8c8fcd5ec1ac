"""Archive job: copies a topic to its Iceberg table, continuously or up to the current end, each record exactly once.

A streaming query plans the offsets; the tasks of its sink read and write the records. Each start resumes from the
offsets in the *table*: the query's checkpoint is in a temporary directory and is deleted with the query. If the
checkpoint, the machine or the committed offsets are lost, only the running batch is repeated. The offsets are also
committed for the group `mansio.pipeline.<name>`, which shows the lag and makes the broker retain unarchived records.

Invariants:
* All records below the committed offsets of the group are in the table, or listed there as lost.
* A record that was deleted before it was archived raises `DataLoss`, or is listed in the table if that is accepted.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
import time
import uuid
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import TYPE_CHECKING, Final

import pyarrow as pa
from pyspark.errors import StreamingQueryException

from mansio import errors
from mansio.errors import ConfigError, DataLoss, MansioError, UnreadableRecords
from mansio.iceberg import errors as archive_errors
from mansio.iceberg.archive.dead_letters import open_dead_letters
from mansio.iceberg.archive.table import open_table
from mansio.iceberg.archive.table_format import format_offsets
from mansio.iceberg.errors import ConcurrentArchive
from mansio.logs import fields
from mansio.net.offsets import commit_offsets, fetch_offsets
from mansio.pipelines.pipeline_progress import (
    NO_BATCH,
    REPORT_INTERVAL_S,
    BatchProgress,
    PipelineProgress,
    commits_with_holds,
    newest_progress,
    progress_of_batch,
)
from mansio.pipelines.restarts import run_with_restarts
from mansio.pipelines.run import lost_session_errors, stop_after_batch
from mansio.schemas.formats import open_decoder
from mansio.serde import errors as schema_errors
from mansio.spark.cluster.problems import local_path
from mansio.spark.options import (
    ON_UNREADABLE_DEAD_LETTER,
    ON_UNREADABLE_HINT,
    ON_UNREADABLE_SUSPEND,
    SourceOptions,
    decoded_columns,
)
from mansio.spark.session.addresses import is_connect
from mansio.spark.session.temp_dirs import make_directory, remove_directory
from mansio.spark.sink.iceberg_sink import IcebergSink, sink_options
from mansio.spark.source.offsets import earliest_offsets, find_partitions, latest_offsets
from mansio.spark.source.readers import RangeSource
from mansio.spark.spark_versions import start_available_now
from mansio.spark.sync_client import sync_client
from mansio.telemetry.jobs import add_batch
from mansio.wire.field_values import READ_COMMITTED
from mansio.wire.internal_records.hold_metadata import parse_hold_metadata, pipeline_group_id
from mansio.wire.topic_partition import TopicPartition

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

    from mansio.iceberg.archive.table import ArchiveTable

logger = logging.getLogger(__name__)

TRIGGER_INTERVAL_S: Final = 60.0
"""Default interval of batches. Every batch creates a file per partition, and many files slow down reads."""
RECORDS_PER_BATCH_MAX: Final = 2_000_000
"""Default maximum of records in a batch: so many may be read again after a crash."""
POLL_INTERVAL_S: Final = 0.5
PUBLISH_OFFSETS_TIMEOUT_MS: Final = 10_000
HOLD_OWNER_PREFIX: Final = "archive "
"""Prefix of the owner of the archive's retention holds; the id of the table follows."""
ARCHIVED_COLUMNS: Final = "key,value,partition,offset,timestamp,timestampType"

ACCEPT_LOSS_HINT: Final = (
    "Restore them, or continue without them (--accept-loss): the table then lists the missing offsets"
)
_MANSIO_ERROR = re.compile(r"mansio[\w.]*\.([A-Z]\w+): (.+)")


class ArchiveFailed(MansioError):
    """The archive's query ended with an error."""


@dataclass(frozen=True, slots=True)
class ArchiveJob:
    """Options of one run of the archive job. `name`: the pipeline's name; its group is `mansio.pipeline.<name>`."""

    topic: str
    warehouse: str
    bootstrap_servers: str
    name: str
    catalog: str | None = None
    stops_when_caught_up: bool = False
    """Whether the run ends when the records that exist at its start are archived; otherwise it runs until stopped."""
    trigger_s: float = TRIGGER_INTERVAL_S
    records_max: int = RECORDS_PER_BATCH_MAX
    accept_loss: bool = False
    """Whether to continue at the log start offset if the log has deleted unarchived records; the table then lists the
    missing ranges.
    """
    on_unreadable: str = ON_UNREADABLE_SUSPEND
    """What to do with unreadable records. `suspend`: end with an error. `skip`: continue without them, and list their
    offsets in the table. `dead-letter`: also store them in the dead-letter table.
    """
    decode: dict[str, str] = field(default_factory=dict)
    """Options of `format("mansio")` that decode keys and values (`valueFormat`, `schemaRegistry`, ...). The table then
    has the columns `decoded_key` and `decoded_value`; later versions of the schemas add fields while the job runs.
    """


@dataclass(frozen=True, slots=True)
class ArchiveResult:
    """Result of a run. `offsets`: for each partition the first offset that is not archived."""

    table: str
    records: int
    batches: int
    offsets: dict[int, int]


def archive(
    spark: SparkSession,
    job: ArchiveJob,
    report: Callable[[BatchProgress], None] | None = None,
    is_stopping: Callable[[], bool] | None = None,
) -> ArchiveResult:
    """Archive a topic until it is up to date (`ArchiveJob.stops_when_caught_up`) or `is_stopping` returns true, which
    is called twice a second. `report` is called after every batch.

    The query restarts from the table's offsets after a concurrent commit of another archive (a killed one may end with
    a delay), and if Spark's Python workers did not start in time (`run_with_restarts`).

    Raises:
        DataLoss: Records were deleted before they were archived, and `accept_loss` is false.
        UnreadableRecords: Records are damaged or invalid, and `on_unreadable` is `suspend`.
        NotAnArchiveTable, CatalogLocked, CatalogUnavailable: The table cannot be used.
        ConfigError: An archive into another table has the same name.
        ConcurrentArchive: Another archive keeps committing.
        WorkerStartTimeout: A Python worker of Spark was late after each restart.
        ArchiveFailed: The query ended with another error; the message has the reason in one line.
    """
    run = _ArchiveRun(spark, job, report or _ignore_progress, is_stopping or _never_stops)
    try:
        result = run_with_restarts(run.run_query, f"archive {job.name}", repeated=(ConcurrentArchive,))
    except MansioError as error:
        run.publish_end(error.message)
        raise
    run.publish_end()
    return result


class _ArchiveRun:
    """State of one call of `archive`: the table, and the batches reported so far."""

    def __init__(
        self,
        spark: SparkSession,
        job: ArchiveJob,
        report: Callable[[BatchProgress], None],
        is_stopping: Callable[[], bool],
    ) -> None:
        self._spark = spark
        self._job = job
        self._report = report
        self._is_stopping = is_stopping
        self._client = sync_client(job.bootstrap_servers)
        self._topic_id = self._find_topic()[1]
        self._table: ArchiveTable = open_table(
            job.catalog, job.warehouse, job.topic, create=True, topic_id=self._topic_id
        )
        self._hold_owner = f"{HOLD_OWNER_PREFIX}{self._table.iceberg.metadata.table_uuid}"
        self._records = 0
        self._batches = 0
        self._progress: PipelineProgress | None = None
        """Progress of the last batch, of this run or of an earlier one."""
        self._published_at = time.monotonic()

    def run_query(self) -> ArchiveResult:
        """Run one streaming query from the table's offsets until it ends or is stopped."""
        self._table.refresh()
        start = self._start_offsets()
        self._check_pipeline_name(start)
        self._publish(start)
        with _temporary_checkpoint(self._spark, self._job.warehouse) as checkpoint:
            query = self._start_query(start, checkpoint)
            with lost_session_errors(ArchiveFailed):
                try:
                    self._report_until_end(query)
                finally:
                    query.stop()
        return ArchiveResult(self._table.name, self._records, self._batches, self._archived_offsets())

    def _find_topic(self) -> tuple[list[TopicPartition], str]:
        """Return the topic's partitions and its id (hex)."""
        options = SourceOptions.parse(
            {"kafka.bootstrap.servers": self._job.bootstrap_servers, "subscribe": self._job.topic}
        )
        found = find_partitions(self._client, options)
        return list(found.partitions), found.topic_ids[self._job.topic].hex()

    def _start_offsets(self) -> dict[int, int]:
        """Start offsets of the query: the table's offsets, and 0 for partitions that were added since the last commit.
        Before the first commit they are the log start offsets.
        """
        earliest = {
            p.partition: offset for p, offset in earliest_offsets(self._client, self._find_topic()[0]).items()
        }
        if self._job.accept_loss:
            for lost in self._table.skip_to_log_start(earliest):
                logger.warning(
                    "records_deleted_before_archive",
                    extra=fields(
                        topic=self._job.topic, partition=lost.partition, start=lost.start, end=lost.end
                    ),
                )
        archived_offsets = self._archived_offsets()
        unknown_partitions = sorted(archived_offsets.keys() - earliest.keys())
        if unknown_partitions:
            raise ConfigError(
                f"the table has records of partition {unknown_partitions[0]}, "
                f"which topic {self._job.topic} does not have"
            )
        for partition, first in earliest.items():
            wanted = archived_offsets.get(partition, 0) if archived_offsets else first
            if wanted < first:
                raise DataLoss(
                    f"records {wanted} to {first - 1} of partition {partition} of topic {self._job.topic} were"
                    f" deleted before they were archived. {ACCEPT_LOSS_HINT}"
                )
        return earliest | archived_offsets

    def _check_pipeline_name(self, start: Iterable[int]) -> None:
        """Check that no archive into another table uses the pipeline's name. Two such archives would share their
        committed offsets, and the broker would delete records that the slower one has not archived yet.
        """
        partitions = [TopicPartition(self._job.topic, partition) for partition in start]
        try:
            found = self._client.run(
                fetch_offsets(self._client.cluster, pipeline_group_id(self._job.name), partitions)
            )
        except MansioError as error:
            logger.warning(
                "archive_name_not_checked", extra=fields(pipeline=self._job.name, error=error.message)
            )
            return
        stored = newest_progress(committed.metadata for committed in found.values())
        if self._progress is None and stored is not None:
            self._progress = replace(stored, ended=None, error=None, reported_ms=int(time.time() * 1000))
        for committed in found.values():
            hold = parse_hold_metadata(committed.metadata)
            if (
                hold is not None
                and hold.query.startswith(HOLD_OWNER_PREFIX)
                and hold.query != self._hold_owner
            ):
                raise ConfigError(
                    f"pipeline {self._job.name} archives topic {self._job.topic} into another table: give this one"
                    f" another name (--name), or, if the other will not run again, `mansio pipeline release"
                    f" {self._job.name}`"
                )

    def _archived_offsets(self) -> dict[int, int]:
        committed = self._table.last_commit()
        return {} if committed is None else committed.offsets

    def _start_query(self, start: dict[int, int], checkpoint: str) -> StreamingQuery:
        job = self._job
        self._spark.dataSource.register(RangeSource)
        self._spark.dataSource.register(IcebergSink)
        dead_letter_table = None
        if job.on_unreadable == ON_UNREADABLE_DEAD_LETTER:
            dead_letter_table = open_dead_letters(self._table, create=True)
        source = {
            "kafka.bootstrap.servers": job.bootstrap_servers,
            "subscribe": job.topic,
            "startingOffsets": f'{{"{job.topic}":{format_offsets(start)}}}',
            "topicIds": json.dumps({job.topic: self._topic_id}),
            "includeHeaders": "true",
            "maxOffsetsPerTrigger": str(job.records_max),
            "stopAtLatest": str(job.stops_when_caught_up),
            "onUnreadable": ON_UNREADABLE_SUSPEND
            if job.on_unreadable == ON_UNREADABLE_SUSPEND
            else ON_UNREADABLE_DEAD_LETTER,
        }
        source |= job.decode
        decoded = self._decoded_columns(source)
        source["columns"] = ",".join((ARCHIVED_COLUMNS, *decoded.names))
        ranges = self._spark.readStream.format(RangeSource.name()).options(**source).load()
        writer = (
            ranges.writeStream.format(IcebergSink.name())
            .queryName(f"archive {job.name}")
            .outputMode("append")
            .option("checkpointLocation", checkpoint)
            .options(
                **sink_options(
                    self._table, job.warehouse, job.catalog, start, source, dead_letter_table, decoded
                )
            )
        )
        if job.stops_when_caught_up:
            return start_available_now(writer)
        return writer.trigger(processingTime=f"{job.trigger_s} seconds").start()

    def _decoded_columns(self, source: dict[str, str]) -> pa.Schema:
        """Return the decoded columns with the types of the table and of the schemas that are known now.

        Raises `ConfigError` if the table has records without these columns, or the schemas do not agree with the table.
        """
        existing = self._table.decoded_columns()
        wanted = decoded_columns(source)
        if self._table.last_commit() is not None and existing.names != [one.name for one in wanted]:
            has = " and ".join(existing.names) or "no decoded columns"
            raise ConfigError(
                f"table {self._table.name} has records with {has}: archive with the same formats of keys and values as"
                " before, or into another warehouse or catalog"
            )
        bases = {one.name: one.type for one in existing}
        return pa.schema([(one.name, open_decoder(one.format, bases.get(one.name)).type) for one in wanted])

    def _report_until_end(self, query: StreamingQuery) -> None:
        """Report every batch until the query ends or is stopped."""
        seen = -1
        is_over = False
        while not is_over and not self._is_stopping():
            try:
                is_over = bool(query.awaitTermination(POLL_INTERVAL_S))  # type: ignore[arg-type]  # seconds may be a fraction
            except StreamingQueryException as error:
                seen = self._report_batches(query, seen)
                raise _error_of_query(error) from error
            seen = self._report_batches(query, seen)
            self._publish_running()
        if not is_over:
            stop_after_batch(query)
            self._report_batches(query, seen)

    def _report_batches(self, query: StreamingQuery, seen: int) -> int:
        """Commit the table's offsets for the group, and report the new batches; returns the id of the last batch."""
        new = [one for one in query.recentProgress if one.batchId > seen and one.numInputRows > 0]
        if not new:
            return seen
        self._table.refresh()
        added = self._table.added_records(str(query.id))
        last = progress_of_batch(json.loads(new[-1].json), int(time.time() * 1000))
        self._progress = replace(last, records=added.get(last.batch, 0), input_per_s=0.0, processed_per_s=0.0)
        if last.seconds:
            self._progress = replace(
                self._progress, processed_per_s=round(self._progress.records / last.seconds, 2)
            )
        lag = self._publish(self._archived_offsets())
        for one in new:
            records = added.get(one.batchId, 0)
            self._records += records
            self._batches += 1
            seconds = one.durationMs.get("triggerExecution", 0) / 1000
            begun_s = datetime.fromisoformat(one.timestamp).timestamp()
            add_batch(self._job.name, one.batchId, records, begun_s=begun_s, seconds=seconds)
            self._report(BatchProgress(one.batchId, records, seconds, lag if one is new[-1] else None))
        return int(new[-1].batchId)

    def _publish_running(self) -> None:
        """Commit the table's offsets again, with the time, if `REPORT_INTERVAL_S` has passed since the last commit."""
        if self._progress is not None and time.monotonic() - self._published_at >= REPORT_INTERVAL_S:
            self._progress = replace(self._progress, reported_ms=int(time.time() * 1000))
            self._publish(self._archived_offsets())

    def publish_end(self, error: str | None = None) -> None:
        """Commit the table's offsets again, with the progress that the archive was stopped, or failed with an error."""
        offsets = self._archived_offsets()
        if offsets:
            progress = self._progress or PipelineProgress(NO_BATCH, int(time.time() * 1000))
            self._progress = progress.with_end(error)
            self._publish(offsets)

    def _publish(self, offsets: dict[int, int]) -> int | None:
        """Commit the offsets for the pipeline's group; returns the lag, None after a failure. A failure is only logged:
        the next batch commits again, and until then the broker retains more records than necessary.
        """
        topic = self._job.topic
        self._published_at = time.monotonic()
        commits = commits_with_holds(
            {TopicPartition(topic, p): offset for p, offset in offsets.items()},
            self._hold_owner,
            self._progress,
        )
        try:
            self._client.run(
                commit_offsets(
                    self._client.cluster,
                    pipeline_group_id(self._job.name),
                    commits,
                    retry_timeout_ms=PUBLISH_OFFSETS_TIMEOUT_MS,
                )
            )
            latest = latest_offsets(self._client, commits, READ_COMMITTED)
        except MansioError as error:
            logger.warning(
                "pipeline_progress_not_published", extra=fields(pipeline=self._job.name, error=error.message)
            )
            return None
        return sum(latest[partition] - commits[partition].offset for partition in commits)


def _ignore_progress(_progress: BatchProgress) -> None:
    """Do nothing: the default of `report`."""


def _never_stops() -> bool:
    """Return False: by default the run is never stopped."""
    return False


def _error_of_query(error: StreamingQueryException) -> MansioError:
    """Return the error for a query that ended with an exception: Mansio's error in the traceback that Spark's exception
    holds, otherwise `ArchiveFailed`.
    """
    found = _MANSIO_ERROR.findall(str(error))
    if not found:
        line = str(error).partition("terminated with exception: ")[2] or str(error)
        return ArchiveFailed(
            f"the query ended: {' '.join(line.partition('=== Streaming Query')[0].split())[:400]}"
        )
    kind, line = found[-1]
    if kind == UnreadableRecords.__name__:
        line = (
            f"{line.partition(f'. {ON_UNREADABLE_HINT}')[0]}. --on-unreadable skip continues without them and lists"
            " them in the table; dead-letter also stores them"
        )
    if kind == DataLoss.__name__:  # the remedy in the message is for a reader, which has other options
        line, lost, _ = line.partition(". Begin later (")
        line = f"{line}. {ACCEPT_LOSS_HINT}" if lost else line
    known = next(
        (getattr(one, kind) for one in (archive_errors, errors, schema_errors) if hasattr(one, kind)), None
    )
    is_ours = isinstance(known, type) and issubclass(known, MansioError)
    return known(line.strip()) if known is not None and is_ours else ArchiveFailed(line.strip())


@contextlib.contextmanager
def _temporary_checkpoint(spark: SparkSession, warehouse: str) -> Iterator[str]:
    """Yield the address of a temporary directory for the checkpoint, which the driver writes and the sink's commit
    reads. Errors of its removal are ignored, because Spark may write to it while it stops.

    The driver of a Spark Connect session is the server: its checkpoint is in the warehouse if that is a directory, and
    else in the server's directory for temporary files, where it stays.
    """
    if not is_connect(spark):
        directory = make_directory("mansio-archive-")
        try:
            yield f"file://{directory}"
        finally:
            remove_directory(directory)
        return
    name, shared = f"mansio-archive-{uuid.uuid4().hex}", local_path(warehouse)
    if "://" in shared:
        yield f"file:///tmp/{name}"
        return
    directory = os.path.join(shared, f".{name}")
    try:
        yield f"file://{directory}"
    finally:
        shutil.rmtree(directory, ignore_errors=True)
