"""Sink of a pipeline that reads a share group: writes the results of a batch, and releases or rejects the records that
failed.

A batch takes these steps. After a crash Spark calls the sink again for the same batch, and it continues:

1. The rows are processed, and the failures stored beside the checkpoint.
2. The results of the other rows are written. The target recognizes a batch that it has.
3. The stored failures are marked as those of a batch that is written.
4. The failures are released or rejected. The source accepts the other records when Spark has committed the batch.

Invariants:
* The failures that are sent are those of the attempt whose results the target has: a batch that is written is not
  processed again, although its function might fail for other rows then.
* No failure is sent before the results are written, and none is lost after that.
* The function is called once for each row of an attempt: the rows are kept between the steps. Spark may nevertheless
  process rows again in step 2, if it has lost an executor, or ran a task twice. A result of a row whose failure is
  stored is not written then, and a row that fails only now ends the attempt, after which both steps are repeated.
* A sink can be pickled before its first batch: with Spark Connect the server calls it, in a process of its own.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from pyspark.errors import PySparkException
from pyspark.sql import functions
from pyspark.sql.types import StructType

from mansio.errors import ConfigError, MansioError
from mansio.pipelines.checkpoint import checkpoint_directory, planned_sources, query_id
from mansio.spark.share import failures
from mansio.spark.share.failures import RecordFailure, failures_of
from mansio.spark.share.leased_ranges import LeasedBatch
from mansio.spark.sink.sink_transaction import last_batch
from mansio.spark.sync_client import sync_client
from mansio.spark.work.apply import ERROR, ERROR_TYPE, RESULT

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pyspark.sql import DataFrame, SparkSession

    from mansio.iceberg.result_table.commit import QueryBatch
    from mansio.iceberg.result_table.table import ResultTable
    from mansio.pipelines.checkpoint import CheckpointDirectory

FAILURES_FILES: Final = ("mansio-failures-0", "mansio-failures-1")
"""Files in the checkpoint with the failures of even and odd batches."""

EVALUATIONS_MAX: Final = 3
"""How often the rows of a batch are processed if some of them fail only while the results are written."""

FAILED_AGAIN: Final = "mansio: a row failed that had not failed before"
"""Message of Spark's error for such a row."""

_IS_FAILED: Final = "__mansio_is_failed"

BATCH_COLUMN: Final = "mansio_batch"
"""Column of a directory of files with the number of the batch, by which the files are partitioned."""


logger = logging.getLogger(__name__)


class WorkTarget(Protocol):
    """Where the results go."""

    def is_written(self, spark: SparkSession, batch_id: int) -> bool:
        """Whether the target has the batch."""

    def write(self, results: DataFrame, batch_id: int) -> None:
        """Write the results of a batch, once if the target can recognize it."""


@dataclass(frozen=True, slots=True)
class TopicTarget:
    """A topic. `options`: of the writer; `checkpoint`: where the identity of the query is; `exactly_once`: whether the
    brokers recognize a batch that is written again."""

    options: dict[str, str]
    bootstrap_servers: str
    checkpoint: str
    exactly_once: bool

    def is_written(self, spark: SparkSession, batch_id: int) -> bool:
        """Ask the brokers for the last batch of the query."""
        if not self.exactly_once:
            return False
        query = query_id(checkpoint_directory(spark, self.checkpoint))
        return last_batch(sync_client(self.bootstrap_servers), query) >= batch_id

    def write(self, results: DataFrame, batch_id: int) -> None:
        """Write the results in transactions that are committed together."""
        query = query_id(checkpoint_directory(results.sparkSession, self.checkpoint))
        identity = {"queryId": query, "batchId": str(batch_id)} if self.exactly_once else {}
        results.write.format("mansio").mode("append").options(**self.options, **identity).save()


@dataclass(frozen=True, slots=True)
class ResultTableTarget:
    """An Iceberg table, and its sink."""

    table: ResultTable
    sink: Callable[[DataFrame, int], None]
    identify: Callable[[SparkSession, int], QueryBatch]

    def is_written(self, spark: SparkSession, batch_id: int) -> bool:
        """Look into the snapshots of the table."""
        self.table.refresh()
        return self.table.is_committed(self.identify(spark, batch_id))

    def write(self, results: DataFrame, batch_id: int) -> None:
        """Append the results in one snapshot."""
        self.sink(results, batch_id)


@dataclass(frozen=True, slots=True)
class DirectoryTarget:
    """A directory with a directory of Parquet files for each batch, which a repeated batch replaces."""

    path: str

    def is_written(self, spark: SparkSession, batch_id: int) -> bool:  # noqa: ARG002  # the signature of all targets
        """Return False: a batch is written as a whole again, and its failures are not sent before."""
        return False

    def write(self, results: DataFrame, batch_id: int) -> None:
        """Replace the files of the batch."""
        results.write.mode("overwrite").parquet(f"{self.path.rstrip('/')}/{BATCH_COLUMN}={batch_id}")


class StoredFailures(NamedTuple):
    """Failures of a batch, and whether its results are written."""

    batch: int
    is_written: bool
    failures: tuple[RecordFailure, ...]

    def to_text(self) -> str:
        """Return the content of the file."""
        content = {"batch": self.batch, "written": self.is_written, "failures": self.failures}
        return json.dumps(content, separators=(",", ":"))

    @classmethod
    def of_batch(cls, checkpoint: CheckpointDirectory, batch: int) -> StoredFailures | None:
        """Read the failures of a batch; None if they are not stored."""
        text = checkpoint.read(_file_of(batch))
        if not text:
            return None
        content = json.loads(text)
        if content["batch"] != batch:
            return None
        return cls(batch, content["written"], tuple(RecordFailure(*each) for each in content["failures"]))

    def store(self, checkpoint: CheckpointDirectory) -> None:
        """Write the file, completely or not at all."""
        checkpoint.replace(_file_of(self.batch), self.to_text())


def _file_of(batch: int) -> str:
    return FAILURES_FILES[batch % len(FAILURES_FILES)]


class WorkSink:
    """Writes each micro-batch of a pipeline that reads a share group. `keeps_key`: a result without a field `key` gets
    the key of its record."""

    def __init__(
        self,
        target: WorkTarget,
        *,
        group: str,
        bootstrap_servers: str,
        checkpoint: str,
        keeps_key: bool,
        to_columns: Callable[[DataFrame], DataFrame],
    ) -> None:
        """`to_columns`: returns the results with the columns that the target needs."""
        self._target = target
        self._group = group
        self._bootstrap_servers = bootstrap_servers
        self._checkpoint = checkpoint
        self._keeps_key = keeps_key
        self._to_columns = to_columns

    def __call__(self, frame: DataFrame, batch_id: int) -> None:
        """Write one batch. Called by Spark on the driver."""
        spark = frame.sparkSession
        checkpoint = checkpoint_directory(spark, self._checkpoint)
        stored = StoredFailures.of_batch(checkpoint, batch_id)
        if stored is None or not stored.is_written:
            if stored is None or not self._target.is_written(spark, batch_id):
                stored = self._write(frame, batch_id, checkpoint)
            stored = stored._replace(is_written=True)
            stored.store(checkpoint)
        if stored.failures:
            member = _member_of(checkpoint, batch_id)
            failures.send_failures(sync_client(self._bootstrap_servers), self._group, member, stored.failures)

    def _write(self, frame: DataFrame, batch_id: int, checkpoint: CheckpointDirectory) -> StoredFailures:
        """Process the rows, and write the results."""
        if ERROR not in frame.columns:
            stored = StoredFailures(batch_id, False, ())
            stored.store(checkpoint)
            self._target.write(self._to_columns(frame), batch_id)
            return stored
        for number in range(1, EVALUATIONS_MAX + 1):
            done = frame.persist()
            try:
                stored = StoredFailures(batch_id, False, tuple(failures_of(done)))
                stored.store(checkpoint)
                results = results_of(done, stored.failures, keeps_key=self._keeps_key)
                self._target.write(self._to_columns(results), batch_id)
                break
            except (PySparkException, MansioError) as error:
                if FAILED_AGAIN not in str(error) or number == EVALUATIONS_MAX:
                    raise
                logger.warning(
                    "batch %d is processed again: Spark has lost results, and other rows fail now", batch_id
                )
            finally:
                done.unpersist()
        return stored


def results_of(done: DataFrame, failed: Sequence[RecordFailure], *, keeps_key: bool) -> DataFrame:
    """Return the results of the rows that have not failed, with the fields of `result` as columns. `failed`: the rows
    that have. A row that is not one of them, and has an error nevertheless, is an error of Spark's job with the message
    `FAILED_AGAIN`."""
    fields: Any = done.schema[RESULT].dataType
    kept = ["key"] if keeps_key and "key" in done.columns and "key" not in fields.names else []
    if failed:
        places = done.sparkSession.createDataFrame(
            [(each.topic, each.partition, each.offset, True) for each in failed],
            f"topic string, partition int, offset bigint, {_IS_FAILED} boolean",
        )
        rows = done.join(functions.broadcast(places), ["topic", "partition", "offset"], "left")
    else:
        rows = done.withColumn(_IS_FAILED, functions.lit(None).cast("boolean"))
    has_result = (
        functions.when(functions.col(_IS_FAILED), False)
        .when(functions.col(ERROR).isNull(), True)
        .otherwise(functions.raise_error(functions.lit(FAILED_AGAIN)).cast("boolean"))
    )
    return rows.where(has_result).select(*kept, f"{RESULT}.*")


def result_schema(frame: DataFrame) -> StructType:
    """Return the schema of the results of a pipeline that reads a share group."""
    if ERROR not in frame.columns:
        return frame.schema
    fields: Any = frame.schema[RESULT].dataType
    return StructType(fields.fields)


def check_result_columns(frame: DataFrame) -> None:
    """Check the columns of a pipeline that reads a share group. Raises `ConfigError`."""
    if ERROR not in frame.columns:
        return
    missing = [name for name in (RESULT, "topic", "partition", "offset") if name not in frame.columns]
    if missing or frame.schema[ERROR].dataType != ERROR_TYPE:
        what = (
            f"it has no column {missing[0]}" if missing else f"{ERROR} is not that of mansio.spark.work.apply"
        )
        raise ConfigError(
            f"the result of the pipeline has a column {ERROR}, but {what}: return what mansio.spark.work.apply returns,"
            " with the columns of the source"
        )


def _member_of(checkpoint: CheckpointDirectory, batch_id: int) -> str:
    """Return the member that has leased the records of a batch."""
    for text in planned_sources(checkpoint, batch_id):
        return LeasedBatch.from_json(json.loads(text)).member
    raise ConfigError(f"the checkpoint does not have the offsets of batch {batch_id}")
