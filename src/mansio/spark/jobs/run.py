"""Run: the user's function on DataFrames, from topics to a topic or a table, for as long as it runs or up to now.

Spark's checkpoint is the truth: a run that was killed goes on from there with the same command. What is done is shown
three ways: to the caller batch by batch, in the query's progress, and as the group `mansio.pipeline.<name>`, which
holds back deletion of what was not read yet.

Into a topic each record is written at least once (see `mansio.spark.sink.task_sender`): the batch under way
when the process died is written again. Into a table, a directory of Parquet files that Spark keeps a log of,
exactly once.

Always true: topics, file and checkpoint are looked at before anything is read; a stop lets the batch under way end.
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
"""So long a batch under way is waited for when the run is to end."""
REASON_CHARACTERS_MAX: Final = 500
RESTARTS_MAX: Final = 3
WORKERS_LATE: Final = "Python worker failed to connect back"
_OUR_ERROR: Final = re.compile(r"mansio[\w.]*\.[A-Z]\w+: .+")
_ANY_ERROR: Final = re.compile(r"^(?:[\w.]+\.)?[A-Z]\w*(?:Error|Exception): .+", re.MULTILINE)


class PipelineFailed(MansioError):
    """The query of a pipeline ended with an error."""


class WorkersLate(PipelineFailed):
    """Spark gives its Python workers ten seconds to start, and this machine is too busy for that: try again."""


@dataclass(frozen=True, slots=True)
class PipelineJob:
    """What to run. Exactly one of `topic` and `table` (a directory) says where the result goes."""

    file: str
    name: str
    bootstrap_servers: str
    checkpoint: str
    inputs: tuple[str, ...] = ()
    topic: str | None = None
    table: str | None = None
    is_once: bool = False
    """Up to what is there now, then end; otherwise until it is stopped."""
    trigger_s: float = TRIGGER_S
    starting: str = "earliest"
    records_max: int | None = None
    """Of one batch."""
    output_mode: str = "append"
    options: dict[str, str] = field(default_factory=dict)
    """More options of the source."""

    @property
    def target(self) -> str:
        """Where the result goes, as people name it."""
        return f"topic {self.topic}" if self.topic is not None else f"table {self.table}"


@dataclass(frozen=True, slots=True)
class Progress:
    """One batch that is written. `lag`: records that are in the topics and were not read yet; None where unknown."""

    batch: int
    records: int
    seconds: float
    lag: int | None


@dataclass(frozen=True, slots=True)
class PipelineResult:
    """What a run came to."""

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
    """Run a pipeline until it is up to date (`is_once`) or `is_stopping` says so; `report` hears of every batch.

    Where Spark's Python workers were late, the query starts again from its checkpoint, `RESTARTS_MAX` times.

    Raises:
        PipelineFileError: The user's file is not there, is wrong, or failed while it built the DataFrame.
        UnknownTopicOrPartition: An input is not there.
        CheckpointMismatch, TopicRecreated: The checkpoint belongs to something else.
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
                logger.warning("pipeline restarts", extra=fields(pipeline=job.name, error=error.message))
        return _follow(_start(job, result), job, listener, reporter, is_stopping)
    finally:
        spark.streams.removeListener(listener)
        listener.close()


class _PipelineInputs:
    """The topics a pipeline reads: looked up before they are read."""

    def __init__(self, spark: SparkSession, job: PipelineJob, client: SyncClient) -> None:
        self.ids: dict[str, str] = {}
        self.partitions = 1
        """Of the largest input."""
        self._spark = spark
        self._job = job
        self._client = client

    def read(self, topic: str, **options: str) -> DataFrame:
        """The records of a topic, or of several with commas between, as a stream."""
        for name in (one.strip() for one in topic.split(",")):
            view = find_topic(self._client, name)
            self.ids[name] = view.topic_id.hex()
            self.partitions = max(self.partitions, len(view.partitions))
        job = self._job
        chosen = {
            "kafka.bootstrap.servers": job.bootstrap_servers,
            "subscribe": topic,
            "startingOffsets": job.starting,
            "pipeline": job.name,
        }
        if job.records_max is not None:
            chosen["maxOffsetsPerTrigger"] = str(job.records_max)
        chosen |= job.options | {name: str(value) for name, value in options.items()}
        return self._spark.readStream.format("mansio").options(**chosen).load()


def as_records(frame: DataFrame) -> DataFrame:
    """A DataFrame as the sink takes it: one without a column `value` becomes JSON, all columns but `key` and what else
    has a place of its own in a record."""
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
    """Tell of every batch until the query ends or is to end."""
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
        listener.publish(reporter.last)  # Spark's own call may still be on its way
    return PipelineResult(job.name, job.target, reporter.batches, reporter.records, reporter.lag)


def end_between_batches(query: StreamingQuery) -> None:
    """End a query when the batch under way is through, as far as that can be seen. One that is behind begins the next
    at once: that is cut off before it has written much, and is done again."""
    end = time.monotonic() + STOP_S_MAX
    before = query.lastProgress
    while query.isActive and query.status["isTriggerActive"] and time.monotonic() < end:
        newest = query.lastProgress
        if newest is not None and (before is None or newest.timestamp != before.timestamp):
            break
        time.sleep(POLL_S / 10)
    query.stop()


class _ProgressReporter:
    """What was reported of a query."""

    def __init__(self, report: Callable[[Progress], None]) -> None:
        self.batches = 0
        self.records = 0
        self.lag: int | None = None
        self.last: StreamingQueryProgress | None = None
        self._report = report
        self._batch = -1

    def report_new(self, query: StreamingQuery) -> None:
        """Report what is new."""
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
    """How many records were there and not read when a batch was planned; None where no source tells."""
    lag: int | None = None
    for source in progress.sources:
        done, latest = offsets_in(source.endOffset), offsets_in(source.latestOffset)
        if latest:
            lag = (lag or 0) + sum(max(0, end - done.get(partition, 0)) for partition, end in latest.items())
    return lag


def reason(text: str) -> str:
    """Why something failed: our own line out of the traceback that Spark wraps it in, else the innermost error's."""
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
    """`topics`: topic -> id in hex. `target`: what is written, as people name it."""

    name: str
    topics: dict[str, str]
    target: str


def check(bound: CheckpointBinding, wanted: CheckpointBinding, checkpoint: str) -> None:
    """Whether a pipeline may go on from this checkpoint. Raises `CheckpointMismatch` and `TopicRecreated`."""
    restart_hint = "give another checkpoint, or remove this one to begin anew"
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
    """Compare with what the checkpoint belongs to, or write it down there if it is new."""
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
    """A directory of any file system that Spark knows, by Hadoop's classes."""

    def __init__(self, spark: SparkSession, location: str) -> None:
        assert spark._jvm is not None
        self._jvm: Any = spark._jvm
        self._path = self._jvm.org.apache.hadoop.fs.Path(location)
        self._files = self._path.getFileSystem(spark._jsparkSession.sessionState().newHadoopConf())

    def has_entries(self) -> bool:
        """Whether there is more than what an earlier start of ours left when it was killed while it wrote."""
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
        """Whole or not at all: under another name first."""
        partial = self._jvm.org.apache.hadoop.fs.Path(self._path, f".{name}{PARTIAL}")
        stream = self._files.create(partial, True)
        try:
            stream.write(bytearray(text.encode()))
        finally:
            stream.close()
        self._files.rename(partial, self._jvm.org.apache.hadoop.fs.Path(self._path, name))
