"""Archive job: copies a topic to its Iceberg table, continuously or up to now, each record exactly once.

A query plans the offsets, and the table's sink reads and writes the records. Each start resumes from the offsets in the
*table*: the query's checkpoint is in a temporary directory for the life of the query. The table is the only source of
truth; losing the checkpoint, the machine or the broker's offsets costs the running batch only. The offsets are
published as those of the group `mansio.pipeline.<name>`, which shows the lag and makes the broker retain what is not
archived yet.

Invariants:
* Published offsets are in the table.
* A record that was deleted before it was archived is an error or, if accepted, listed in the table; never skipped
  silently.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from pyspark.errors import StreamingQueryException

from mansio import errors
from mansio.errors import ConfigError, DataLoss, MansioError, UnreadableRecords
from mansio.logs import fields
from mansio.net.offsets import READ_COMMITTED, CommittedOffset, commit_offsets, fetch_offsets
from mansio.spark.iceberg import errors as archive_errors
from mansio.spark.iceberg.catalog import open_table
from mansio.spark.iceberg.dead_letters import open_dead_letters
from mansio.spark.iceberg.errors import ConcurrentArchive
from mansio.spark.iceberg.table_format import format_offsets
from mansio.spark.jobs.run import WORKERS_LATE, WorkersLate, end_between_batches
from mansio.spark.options import ON_UNREADABLE_DEAD_LETTER, ON_UNREADABLE_SUSPEND, SourceOptions
from mansio.spark.session.temp_dirs import make_directory, remove_directory
from mansio.spark.sink.iceberg_sink import IcebergSink, sink_options
from mansio.spark.source.offsets import earliest_offsets, find_partitions, latest_offsets
from mansio.spark.source.readers import RangeSource
from mansio.spark.sync_client import sync_client
from mansio.wire.internal_records.hold_metadata import (
    encode_hold_metadata,
    parse_hold_metadata,
    pipeline_group_id,
)
from mansio.wire.topic_partition import TopicPartition

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

    from mansio.spark.iceberg.catalog import ArchiveTable

logger = logging.getLogger(__name__)

TRIGGER_S: Final = 60.0
"""Every batch creates a file per partition, and reads slow down with the number of files."""
RECORDS_MAX: Final = 2_000_000
"""Per batch: the amount that is read again after a crash."""
POLL_S: Final = 0.5
RESTARTS_MAX: Final = 3
PUBLISH_TIMEOUT_MS: Final = 10_000
HOLD_OWNER_PREFIX: Final = "archive "
"""Prefix of the owner in the archive's retention holds; the table's id follows."""
COLUMNS: Final = "key,value,partition,offset,timestamp,timestampType"

ACCEPT_LOSS_HINT: Final = (
    "Restore them, or continue without them (--accept-loss): the table then lists the missing offsets"
)
_OUR_ERROR = re.compile(r"mansio[\w.]*\.([A-Z]\w+): (.+)")


class ArchiveFailed(MansioError):
    """The archive's query ended with an error."""


@dataclass(frozen=True, slots=True)
class ArchiveJob:
    """An archive: topic, table and options. `name`: the pipeline's, in the group that shows its offsets."""

    topic: str
    warehouse: str
    bootstrap_servers: str
    name: str
    catalog: str | None = None
    is_once: bool = False
    """Archive what exists now, then end; otherwise run until it is stopped."""
    trigger_s: float = TRIGGER_S
    records_max: int = RECORDS_MAX
    accept_loss: bool = False
    """If the log has deleted unarchived records, continue at the log start; the table lists the missing ranges."""
    on_unreadable: str = ON_UNREADABLE_SUSPEND
    """Unreadable records: `suspend` ends with an error; `skip` continues without them, and the table lists their
    offsets;
    `dead-letter` also stores them in the table of dead letters.
    """


@dataclass(frozen=True, slots=True)
class Progress:
    """One committed batch. `lag`: records in the log that are not in the table yet, None if unknown."""

    batch: int
    records: int
    seconds: float
    lag: int | None


@dataclass(frozen=True, slots=True)
class ArchiveResult:
    """Result of a run. Offsets by partition: the first that is not archived."""

    table: str
    records: int
    batches: int
    offsets: dict[int, int]


def archive(
    spark: SparkSession,
    job: ArchiveJob,
    report: Callable[[Progress], None] | None = None,
    is_stopping: Callable[[], bool] | None = None,
) -> ArchiveResult:
    """Archive a topic until it is up to date (`is_once`), or until `is_stopping`, which is polled twice a second,
    returns true.

    `report` is called for every batch. After a concurrent commit of another archive (a killed one may end with a
    delay), or if Spark's Python workers were late, the query restarts from the table's offsets, up to `RESTARTS_MAX`
    times.

    Raises:
        DataLoss: Records were deleted before they were archived, and that was not accepted.
        UnreadableRecords: Records are damaged or invalid, and are not to be skipped.
        NotAnArchiveTable, CatalogLocked, CatalogUnavailable: The table cannot be used.
        ConfigError: An archive into another table has the same name.
        ConcurrentArchive: Another archive keeps committing.
        ArchiveFailed: The query ended with another error; its reason in one line.
    """
    run = _ArchiveRun(spark, job, report or _ignore_progress, is_stopping or _never)
    for _ in range(RESTARTS_MAX):
        try:
            return run.once()
        except (ConcurrentArchive, WorkersLate) as error:
            logger.warning("archive_restarted", extra=fields(topic=job.topic, error=error.message))
    return run.once()


class _ArchiveRun:
    """State of one call of `archive`: the table, and the batches reported so far."""

    def __init__(
        self,
        spark: SparkSession,
        job: ArchiveJob,
        report: Callable[[Progress], None],
        is_stopping: Callable[[], bool],
    ) -> None:
        self._spark = spark
        self._job = job
        self._report = report
        self._is_stopping = is_stopping
        self._client = sync_client(job.bootstrap_servers)
        self._topic_id = self._find()[1]
        self._table: ArchiveTable = open_table(
            job.catalog, job.warehouse, job.topic, create=True, topic_id=self._topic_id
        )
        self._hold_owner = f"{HOLD_OWNER_PREFIX}{self._table.iceberg.metadata.table_uuid}"
        self._records = 0
        self._batches = 0

    def once(self) -> ArchiveResult:
        """Run one query, from the table's offsets to its end."""
        self._table.refresh()
        start = self._start()
        self._check_pipeline_name(start)
        self._publish(start)
        with _temporary_directory() as checkpoint:
            query = self._begin(start, checkpoint)
            try:
                self._follow(query)
            finally:
                query.stop()
        return ArchiveResult(self._table.name, self._records, self._batches, self._archived_offsets())

    def _find(self) -> tuple[list[TopicPartition], str]:
        """The topic's partitions and its id (hex)."""
        options = SourceOptions.parse(
            {"kafka.bootstrap.servers": self._job.bootstrap_servers, "subscribe": self._job.topic}
        )
        found = find_partitions(self._client, options)
        return list(found.partitions), found.topic_ids[self._job.topic].hex()

    def _start(self) -> dict[int, int]:
        """Start offsets of the query: the table's offsets, and the log start of partitions it does not have. The first
        commit has all partitions of that time, so a partition that is missing later was added, and is archived from 0.
        """
        earliest = {
            p.partition: offset for p, offset in earliest_offsets(self._client, self._find()[0]).items()
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
        """Check that no archive into another table uses the pipeline's name: of two archives with the same offsets, the
        slower would lose what the other has archived.
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

    def _begin(self, start: dict[int, int], checkpoint: str) -> StreamingQuery:
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
            "columns": COLUMNS,
            "includeHeaders": "true",
            "maxOffsetsPerTrigger": str(job.records_max),
            "onUnreadable": ON_UNREADABLE_SUSPEND
            if job.on_unreadable == ON_UNREADABLE_SUSPEND
            else ON_UNREADABLE_DEAD_LETTER,
        }
        ranges = self._spark.readStream.format(RangeSource.name()).options(**source).load()
        writer = (
            ranges.writeStream.format(IcebergSink.name())
            .queryName(f"archive {job.name}")
            .outputMode("append")
            .option("checkpointLocation", f"file://{checkpoint}")
            .options(
                **sink_options(self._table, job.warehouse, job.catalog, start, source, dead_letter_table)
            )
        )
        if job.is_once:
            return writer.trigger(availableNow=True).start()
        return writer.trigger(processingTime=f"{job.trigger_s} seconds").start()

    def _follow(self, query: StreamingQuery) -> None:
        """Report every batch until the query ends or is stopped."""
        seen = -1
        is_over = False
        while not is_over and not self._is_stopping():
            try:
                is_over = bool(query.awaitTermination(POLL_S))  # type: ignore[arg-type]  # seconds may be a fraction
            except StreamingQueryException as error:
                seen = self._report_batches(query, seen)
                raise _query_error(error) from error
            seen = self._report_batches(query, seen)
        if not is_over:
            end_between_batches(query)
            self._report_batches(query, seen)

    def _report_batches(self, query: StreamingQuery, seen: int) -> int:
        """Publish and report new batches; returns the last one reported."""
        new = [one for one in query.recentProgress if one["batchId"] > seen and one["numInputRows"] > 0]
        if not new:
            return seen
        self._table.refresh()
        lag = self._publish(self._archived_offsets())
        added = self._table.added_records(str(query.id))
        for one in new:
            records = added.get(one["batchId"], 0)
            self._records += records
            self._batches += 1
            seconds = one["durationMs"].get("triggerExecution", 0) / 1000
            self._report(Progress(one["batchId"], records, seconds, lag if one is new[-1] else None))
        return int(new[-1]["batchId"])

    def _publish(self, offsets: dict[int, int]) -> int | None:
        """Commit the group's offsets; returns the lag. A failure is logged: the next batch commits again, and until
        then the broker retains more than necessary.
        """
        topic = self._job.topic
        metadata = encode_hold_metadata(self._hold_owner)
        commits = {
            TopicPartition(topic, p): CommittedOffset(offset, metadata) for p, offset in offsets.items()
        }
        try:
            self._client.run(
                commit_offsets(
                    self._client.cluster,
                    pipeline_group_id(self._job.name),
                    commits,
                    retry_timeout_ms=PUBLISH_TIMEOUT_MS,
                )
            )
            latest = latest_offsets(self._client, commits, READ_COMMITTED)
        except MansioError as error:
            logger.warning(
                "pipeline_progress_not_published", extra=fields(pipeline=self._job.name, error=error.message)
            )
            return None
        return sum(latest[partition] - commits[partition].offset for partition in commits)


def _ignore_progress(_progress: Progress) -> None:
    """Default of `report`."""


def _never() -> bool:
    """Default of `is_stopping`."""
    return False


def _query_error(error: StreamingQueryException) -> MansioError:
    """The reason why a query ended: Mansio's error line in the traceback that Spark wraps."""
    if WORKERS_LATE in str(error):
        return WorkersLate()
    found = _OUR_ERROR.findall(str(error))
    if not found:
        line = str(error).partition("terminated with exception: ")[2] or str(error)
        return ArchiveFailed(
            f"the query ended: {' '.join(line.partition('=== Streaming Query')[0].split())[:400]}"
        )
    kind, line = found[-1]
    if kind == UnreadableRecords.__name__:
        line = (
            f"{line.partition('. Set onUnreadable')[0]}. --on-unreadable skip continues without them and lists"
            " them in the table; dead-letter also stores them"
        )
    if kind == DataLoss.__name__:  # the remedy in the message is for a reader, which has other options
        line, lost, _ = line.partition(". Begin later (")
        line = f"{line}. {ACCEPT_LOSS_HINT}" if lost else line
    known = getattr(archive_errors, kind, None) or getattr(errors, kind, None)
    is_ours = isinstance(known, type) and issubclass(known, MansioError)
    return known(line.strip()) if known is not None and is_ours else ArchiveFailed(line.strip())


@contextlib.contextmanager
def _temporary_directory() -> Iterator[str]:
    """A temporary directory; errors of its removal are ignored, because Spark may write to it while it stops."""
    directory = make_directory("mansio-archive-")
    try:
        yield directory
    finally:
        remove_directory(directory)
