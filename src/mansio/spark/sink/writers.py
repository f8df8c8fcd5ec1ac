"""Spark writers for topics: `df.write.format("mansio")` and `writeStream.format("mansio")`.

Spark creates a writer on the driver, pickles it, and calls `write` in every task with the rows of one partition as
Arrow batches; `commit` or `abort` is called on the driver with the results of the tasks. For a stream that is another
object of the same class, created from the options: results of `write` are passed only in its message.

The sink is at-least-once: a batch that Spark repeats is written again. Within one task attempt nothing is duplicated,
and all records are acknowledged by all in-sync replicas before the task ends.

Invariants:
* Options and columns are checked on the driver, before any task runs.
* `overwrite` is rejected: a topic can only be appended to.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import pyarrow.compute as pc
from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)

from mansio.errors import ConfigError, InvalidRecord
from mansio.spark.options import SinkOptions
from mansio.spark.sink.task_sender import BATCH_WRITE, SinkProtocol, TaskReport, TaskSender
from mansio.spark.sync_client import sync_client

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import pyarrow as pa
    from pyspark.sql.types import StructType

QUERY_ID_PROPERTY = "sql.streaming.queryId"
SPARKS_OWN = frozenset({"queryname"})
"""Options that Spark adds to those of a stream's writer."""


@dataclass(frozen=True)
class SinkCommitMessage(WriterCommitMessage):
    """Message of one task to the driver."""

    report: TaskReport
    query_id: str = ""


class BatchWriter(DataSourceArrowWriter):
    """Writer of one DataFrame."""

    def __init__(self, options: Mapping[str, str], schema: StructType, overwrite: bool) -> None:
        """Raises `ConfigError` for invalid options, columns and modes."""
        self.options = checked_options(options, schema)
        if overwrite:
            raise ConfigError("a topic cannot be overwritten, only added to: use mode('append')")

    def write(self, iterator: Iterator[pa.RecordBatch]) -> SinkCommitMessage:
        return write_task(self.options, iterator)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        SinkProtocol().commit("", BATCH_WRITE, _reports(messages))

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        SinkProtocol().abort("", BATCH_WRITE, _reports(messages))


class StreamWriter(DataSourceStreamArrowWriter):
    """Writer of the batches of one streaming query."""

    def __init__(self, options: Mapping[str, str], schema: StructType, overwrite: bool) -> None:
        """Raises `ConfigError` for invalid options, columns and output modes."""
        self.options = checked_options(options, schema)
        if overwrite:
            raise ConfigError(
                "a topic cannot be overwritten: use outputMode 'append' or 'update', not 'complete'"
            )

    def write(self, iterator: Iterator[pa.RecordBatch]) -> SinkCommitMessage:
        return write_task(self.options, iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        SinkProtocol().commit(_query_id(messages), batchId, _reports(messages))

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        SinkProtocol().abort(_query_id(messages), batchId, _reports(messages))


def checked_options(options: Mapping[str, str], schema: StructType) -> SinkOptions:
    """The sink's options, checked together with the columns."""
    parsed = SinkOptions.parse(
        {name: text for name, text in options.items() if name.lower() not in SPARKS_OWN}
    )
    if parsed.acks == 0:
        raise ConfigError(
            "option acks is 0: a task could not know whether its rows are stored; give all or 1"
        )
    check_columns({field.name: field.dataType.simpleString() for field in schema.fields}, parsed.topic)
    return parsed


def write_task(options: SinkOptions, batches: Iterator[pa.RecordBatch]) -> SinkCommitMessage:
    """The work of one task: write all rows and wait for acknowledgements."""
    sender = TaskSender(sync_client(options.bootstrap_servers), options)
    try:
        for batch in batches:
            for topic, rows in by_topic(batch, options.topic):
                sender.send(topic, rows)
    except BaseException:
        sender.abort()
        raise
    context = TaskContext.get()
    query_id = context.getLocalProperty(QUERY_ID_PROPERTY) if context is not None else None
    return SinkCommitMessage(sender.finish(), query_id or "")


def _reports(messages: Sequence[WriterCommitMessage | None]) -> list[TaskReport]:
    """A failed task has no message."""
    return [message.report for message in messages if isinstance(message, SinkCommitMessage)]


def _query_id(messages: Sequence[WriterCommitMessage | None]) -> str:
    return next((message.query_id for message in messages if isinstance(message, SinkCommitMessage)), "")


# -- columns --------


TEXT: Final = ("string", "binary")
HEADERS: Final = ("array<struct<key:string,value:binary>>",)
ACCEPTED: Final = {
    "value": TEXT,
    "key": TEXT,
    "topic": ("string",),
    "partition": ("int",),
    "headers": HEADERS,
    "timestamp": ("timestamp",),
}
"""Allowed Spark types of each column."""
BROKER_ASSIGNED_COLUMNS: Final = frozenset({"offset", "timestampType", "lane"})
WRITTEN: Final = ("key", "value", "partition", "timestamp", "headers")


def check_columns(types: Mapping[str, str], topic: str | None) -> None:
    """`types`: column -> Spark type. Raises `ConfigError` with the columns to select instead."""
    for name, found in types.items():
        if name in BROKER_ASSIGNED_COLUMNS:
            continue
        if name not in ACCEPTED:
            raise ConfigError(
                f"column {name!r} cannot be written into a topic: select {', '.join(ACCEPTED)}, and put the rest into "
                "value, for instance with to_json(struct(*))"
            )
        if found not in ACCEPTED[name]:
            raise ConfigError(
                f"column {name} is {found}, and has to be {' or '.join(ACCEPTED[name])}: cast it"
            )
    if "value" not in types:
        raise ConfigError(f"a topic needs the column value, and there are only {', '.join(types) or 'none'}")
    if topic is None and "topic" not in types:
        raise ConfigError("no target topic: give the option topic, or a column of that name")


def by_topic(batch: pa.RecordBatch, topic: str | None) -> Iterator[tuple[str, pa.RecordBatch]]:
    """The rows of a batch by topic, in order, as columns of records. `topic`, if given, applies to all rows. Raises
    `InvalidRecord` for a row without a topic.
    """
    if not batch.num_rows:
        return
    if topic is not None:
        yield topic, as_records(batch)
        return
    topics = batch.column(batch.schema.get_field_index("topic"))
    if topics.null_count:
        raise InvalidRecord(
            f"{topics.null_count} rows have no topic: the column is null, and the option is not given"
        )
    for one in pc.unique(topics):
        yield one.as_py(), as_records(batch.filter(pc.equal(topics, one)))


def as_records(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Only the columns that are written."""
    return batch.select([name for name in WRITTEN if name in batch.schema.names])
