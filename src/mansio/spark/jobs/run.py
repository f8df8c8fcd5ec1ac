"""Pipeline runner: a user's function on DataFrames from topics to a topic or a table, continuously or until the
current end of the topics.

Spark's checkpoint is the source of truth: a killed run resumes from it with the same command. Progress is reported to
the caller per batch, in the query's progress, and as the group `mansio.pipeline.<name>`, which makes the broker retain
unread records. Output to a topic is at-least-once (see `mansio.spark.sink.task_sender`): the running batch of a killed
process is written again. Output to a table, a directory of Parquet files with Spark's log, is exactly-once.

Invariants:
* Topics, file and checkpoint are checked before anything is read.
* A stop lets the running batch complete.
"""

from __future__ import annotations

import json
import logging
import re
import time
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Final

from pyspark.errors import PySparkException, StreamingQueryException

from mansio.errors import ConfigError, MansioError, TopicRecreated
from mansio.logs import fields
from mansio.spark.jobs.pipeline_file import builder
from mansio.spark.jobs.progress_listener import ProgressListener, offsets_in
from mansio.spark.sync_client import ensure_topic, find_topic, sync_client

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.listener import StreamingQueryProgress
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamWriter

    from mansio.spark.sync_client import SyncClient

logger = logging.getLogger(__name__)

TRIGGER_S: Final = 1.0
POLL_S: Final = 0.2
STOP_S_MAX: Final = 60.0
"""Maximum wait for the running batch when the run is stopped."""
REASON_CHARACTERS_MAX: Final = 500
RESTARTS_MAX: Final = 3
WORKERS_LATE: Final = "Python worker failed to connect back"
_OUR_ERROR: Final = re.compile(r"mansio[\w.]*\.[A-Z]\w+: .+")
_ANY_ERROR: Final = re.compile(r"^(?:[\w.]+\.)?[A-Z]\w*(?:Error|Exception): .+", re.MULTILINE)


class PipelineFailed(MansioError):
    """The query of a pipeline ended with an error."""


class WorkersLate(PipelineFailed):
    """Spark gives its Python workers ten seconds to start, which was too short on this busy machine: try again."""


@dataclass(frozen=True, slots=True)
class PipelineJob:
    """A pipeline run. Exactly one of `topic` and `table` (a directory) is the target."""

    file: str
    name: str
    bootstrap_servers: str
    checkpoint: str
    inputs: tuple[str, ...] = ()
    topic: str | None = None
    table: str | None = None
    is_once: bool = False
    """Process what exists now, then end; otherwise run until it is stopped."""
    trigger_s: float = TRIGGER_S
    starting_offsets: str = "earliest"
    records_max: int | None = None
    """Per batch."""
    output_mode: str = "append"
    options: dict[str, str] = field(default_factory=dict)
    """Additional options of the source."""

    @property
    def target(self) -> str:
        """The target for messages."""
        return f"topic {self.topic}" if self.topic is not None else f"table {self.table}"


@dataclass(frozen=True, slots=True)
class Progress:
    """One completed batch. `lag`: records in the topics that were not read yet; None if unknown."""

    batch: int
    records: int
    seconds: float
    lag: int | None


@dataclass(frozen=True, slots=True)
class PipelineResult:
    """Result of a run."""

    name: str
    target: str
    batches: int
    records: int
    lag: int | None


def run(
    spark: SparkSession,
    job: PipelineJob,
    report: Callable[[Progress], None] = lambda _progress: None,
    is_stopping: Callable[[], bool] = lambda: False,
) -> PipelineResult:
    """Run a pipeline until it is up to date (`is_once`) or `is_stopping` returns true; `report` is called for every
    batch.

    If Spark's Python workers were late, the query restarts from its checkpoint, up to `RESTARTS_MAX` times.

    Raises:
        PipelineFileError: The user's file is missing, invalid, or failed while it built the DataFrame.
        UnknownTopicOrPartition: An input does not exist.
        CheckpointMismatch, TopicRecreated: The checkpoint belongs to another pipeline or topic.
        PipelineFailed: The query ended with an error; its reason in one line.
    """
    if (job.topic is None) == (job.table is None):
        raise ConfigError("say where the result goes: either into a topic or into a table")
    build = builder(job.file, job.inputs)
    inputs = _PipelineInputs(spark, job, sync_client(job.bootstrap_servers))
    try:
        result = build(spark, inputs.read)
    except PySparkException as error:
        raise PipelineFailed(reason(str(error))) from error
    if not inputs.ids:
        raise ConfigError(f"{job.file} reads no topic: use the function read that it is given")
    if job.topic is not None:
        ensure_topic(sync_client(job.bootstrap_servers), job.topic, inputs.partitions)
    bind(spark, job.checkpoint, CheckpointBinding(job.name, inputs.ids, job.target))
    listener = ProgressListener(job.name, job.bootstrap_servers)
    spark.streams.addListener(listener)
    reporter = _ProgressReporter(report)
    try:
        for _ in range(RESTARTS_MAX):
            try:
                return _follow(_start(job, result), job, listener, reporter, is_stopping)
            except WorkersLate as error:
                logger.warning("pipeline_restarted", extra=fields(pipeline=job.name, error=error.message))
        return _follow(_start(job, result), job, listener, reporter, is_stopping)
    finally:
        spark.streams.removeListener(listener)
        listener.close()


class _PipelineInputs:
    """The input topics of a pipeline, checked before they are read."""

    def __init__(self, spark: SparkSession, job: PipelineJob, client: SyncClient) -> None:
        self.ids: dict[str, str] = {}
        self.partitions = 1
        """Number of partitions of the largest input."""
        self._spark = spark
        self._job = job
        self._client = client

    def read(self, topic: str, **options: str) -> DataFrame:
        """The records of a topic, or of several separated by commas, as a stream."""
        for name in (one.strip() for one in topic.split(",")):
            view = find_topic(self._client, name)
            self.ids[name] = view.topic_id.hex()
            self.partitions = max(self.partitions, len(view.partitions))
        job = self._job
        chosen = {
            "kafka.bootstrap.servers": job.bootstrap_servers,
            "subscribe": topic,
            "startingOffsets": job.starting_offsets,
            "pipeline": job.name,
        }
        if job.records_max is not None:
            chosen["maxOffsetsPerTrigger"] = str(job.records_max)
        chosen |= job.options | {name: str(value) for name, value in options.items()}
        return self._spark.readStream.format("mansio").options(**chosen).load()


def as_records(frame: DataFrame) -> DataFrame:
    """A DataFrame in the sink's columns: without a column `value`, all columns except `key` and other record fields
    become JSON.
    """
    from pyspark.sql import functions

    if "value" in frame.columns:
        return frame
    kept = [name for name in ("key", "topic", "partition", "headers") if name in frame.columns]
    other_columns = [name for name in frame.columns if name not in kept]
    return frame.select(*kept, functions.to_json(functions.struct(*other_columns)).alias("value"))


def _start(job: PipelineJob, result: DataFrame) -> StreamingQuery:
    try:
        return _writer(job, result).start()
    except PySparkException as error:
        raise PipelineFailed(reason(str(error))) from error


def _writer(job: PipelineJob, result: DataFrame) -> DataStreamWriter:
    if job.topic is not None:
        writer = (
            as_records(result)
            .writeStream.format("mansio")
            .options(**{"kafka.bootstrap.servers": job.bootstrap_servers}, topic=job.topic)
        )
    else:
        writer = result.writeStream.format("parquet").option("path", job.table)
    writer = (
        writer.queryName(job.name).outputMode(job.output_mode).option("checkpointLocation", job.checkpoint)
    )
    if job.is_once:
        return writer.trigger(availableNow=True)
    return writer.trigger(processingTime=f"{round(job.trigger_s * 1000)} milliseconds")


def _follow(
    query: StreamingQuery,
    job: PipelineJob,
    listener: ProgressListener,
    reporter: _ProgressReporter,
    is_stopping: Callable[[], bool],
) -> PipelineResult:
    """Report every batch until the query ends or is stopped."""
    try:
        while not query.awaitTermination(POLL_S):  # type: ignore[arg-type]  # seconds may be a fraction
            reporter.report_new(query)
            if is_stopping():
                end_between_batches(query)
                break
    except StreamingQueryException as error:
        raise (WorkersLate() if WORKERS_LATE in str(error) else PipelineFailed(reason(str(error)))) from error
    finally:
        reporter.report_new(query)
        if query.isActive:
            query.stop()
    if reporter.last is not None:
        listener.publish(reporter.last)  # Spark's own event may still be queued
    return PipelineResult(job.name, job.target, reporter.batches, reporter.records, reporter.lag)


def end_between_batches(query: StreamingQuery) -> None:
    """End a query after its running batch, as far as that can be observed. A query with a backlog starts the next batch
    immediately: that one is aborted early and repeated later.
    """
    end = time.monotonic() + STOP_S_MAX
    before = query.lastProgress
    while query.isActive and query.status["isTriggerActive"] and time.monotonic() < end:
        newest = query.lastProgress
        if newest is not None and (before is None or newest.timestamp != before.timestamp):
            break
        time.sleep(POLL_S / 10)
    query.stop()


class _ProgressReporter:
    """The batches of a query that were reported."""

    def __init__(self, report: Callable[[Progress], None]) -> None:
        self.batches = 0
        self.records = 0
        self.lag: int | None = None
        self.last: StreamingQueryProgress | None = None
        self._report = report
        self._batch = -1

    def report_new(self, query: StreamingQuery) -> None:
        """Report new batches."""
        newest = query.lastProgress
        if newest is None or (self.last is not None and newest.timestamp == self.last.timestamp):
            return
        for one in query.recentProgress:
            if one.batchId <= self._batch and (self.last is None or one.timestamp <= self.last.timestamp):
                continue
            is_batch = one.batchId > self._batch and "addBatch" in one.durationMs
            self.last, self.lag = one, lag_of(one)
            if is_batch:
                self._batch = one.batchId
                self.batches += 1
                self.records += one.numInputRows
                seconds = one.durationMs.get("triggerExecution", 0) / 1000
                self._report(Progress(one.batchId, one.numInputRows, seconds, self.lag))


def lag_of(progress: StreamingQueryProgress) -> int | None:
    """Records that existed but were not read when a batch was planned; None if no source reports it."""
    lag: int | None = None
    for source in progress.sources:
        done, latest = offsets_in(source.endOffset), offsets_in(source.latestOffset)
        if latest:
            lag = (lag or 0) + sum(max(0, end - done.get(partition, 0)) for partition, end in latest.items())
    return lag


def reason(text: str) -> str:
    """The reason of a failure: Mansio's error line in the traceback that Spark wraps, else the innermost error's."""
    ours = _OUR_ERROR.findall(text)
    if ours:
        return str(ours[-1]).partition(": ")[2].strip()
    others = _ANY_ERROR.findall(text.partition("\n\nJVM stacktrace")[0])
    return " ".join((others[-1] if others else text).split())[:REASON_CHARACTERS_MAX]


# -- checkpoint binding --------


FILE = "mansio.json"
PARTIAL = ".partial"


class CheckpointMismatch(MansioError):
    """The checkpoint belongs to another pipeline."""


@dataclass(frozen=True, slots=True)
class CheckpointBinding:
    """Identity of a checkpoint. `topics`: topic -> id in hex. `target`: the output, for messages."""

    name: str
    topics: dict[str, str]
    target: str


def check(bound: CheckpointBinding, wanted: CheckpointBinding, checkpoint: str) -> None:
    """Check that a pipeline may resume from this checkpoint. Raises `CheckpointMismatch` and `TopicRecreated`."""
    restart_hint = "give another checkpoint, or remove this one to start again"
    if bound.topics.keys() != wanted.topics.keys():
        raise CheckpointMismatch(
            f"checkpoint {checkpoint} is of {', '.join(sorted(bound.topics))}, not of "
            f"{', '.join(sorted(wanted.topics))}: {restart_hint}"
        )
    for topic, found in sorted(wanted.topics.items()):
        if bound.topics[topic] != found:
            raise TopicRecreated(
                f"topic {topic} was deleted and created again since checkpoint {checkpoint} was begun, so its offsets "
                f"mean other records now: {restart_hint}"
            )
    if bound.target != wanted.target:
        raise CheckpointMismatch(
            f"checkpoint {checkpoint} is of writing {bound.target}, not {wanted.target}: {restart_hint}"
        )


def bind(spark: SparkSession, checkpoint: str, wanted: CheckpointBinding) -> None:
    """Compare with the checkpoint's identity, or store it in a new checkpoint."""
    files = _Directory(spark, checkpoint)
    text = files.read(FILE)
    if text is None:
        if files.has_entries():
            raise CheckpointMismatch(
                f"{checkpoint} holds something, but nothing that `mansio pipeline run` has written: give another "
                "checkpoint, or remove this one"
            )
        files.write(FILE, json.dumps(asdict(wanted), indent=1, sort_keys=True))
        return
    check(_parse(text, checkpoint), wanted, checkpoint)


def _parse(text: str, checkpoint: str) -> CheckpointBinding:
    try:
        found = json.loads(text)
        return CheckpointBinding(found["name"], dict(found["topics"]), found["target"])
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointMismatch(
            f"{checkpoint}/{FILE} cannot be read ({error}): remove the checkpoint"
        ) from error


class _Directory:
    """A directory on any file system that Spark supports, through Hadoop's classes."""

    def __init__(self, spark: SparkSession, location: str) -> None:
        assert spark._jvm is not None
        self._jvm: Any = spark._jvm
        self._path = self._jvm.org.apache.hadoop.fs.Path(location)
        self._files = self._path.getFileSystem(spark._jsparkSession.sessionState().newHadoopConf())

    def has_entries(self) -> bool:
        """Whether there are files other than those of an interrupted write."""
        if not self._files.exists(self._path):
            return False
        names = [str(one.getPath().getName()) for one in self._files.listStatus(self._path)]
        return any(PARTIAL not in name for name in names)

    def read(self, name: str) -> str | None:
        path = self._jvm.org.apache.hadoop.fs.Path(self._path, name)
        if not self._files.exists(path):
            return None
        stream = self._files.open(path)
        try:
            return str(self._jvm.org.apache.commons.io.IOUtils.toString(stream, "UTF-8"))
        finally:
            stream.close()

    def write(self, name: str, text: str) -> None:
        """Atomic: written under another name first."""
        partial = self._jvm.org.apache.hadoop.fs.Path(self._path, f".{name}{PARTIAL}")
        stream = self._files.create(partial, True)
        try:
            stream.write(bytearray(text.encode()))
        finally:
            stream.close()
        self._files.rename(partial, self._jvm.org.apache.hadoop.fs.Path(self._path, name))
