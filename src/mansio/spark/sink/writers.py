"""Spark writers for topics: `df.write.format("mansio")` and `writeStream.format("mansio")`.

Spark creates a writer on the driver, pickles it, and calls `write` in every task with the rows of one partition of the
DataFrame, as Arrow batches. Then it calls `commit` or `abort` on the driver with the messages that the tasks returned.
For a streaming query it calls them on another object of the same class, so only these messages carry results.

Each task writes a transaction of its own and prepares it when all its records are acknowledged; `commit` lets the
brokers commit the transactions of all tasks, all or none. A batch of a streaming query that Spark repeats, after a
crash between this commit and its own checkpoint, has the same query id and batch id, so the brokers recognize it and
abort what was written again. Readers with `read_committed` see a batch when it is complete.

With `exactlyOnce=false`, the sink is at-least-once: readers see records as soon as a task has written them, and a batch
that Spark repeats is written again. Within one task attempt no record is written twice, and all records are
acknowledged, as `acks` requires, before the task ends.

Invariants:
* A pickled writer has what its tasks log in with (`task_login`). Spark pickles it for each batch.
* Options and columns are checked on the driver, before any task runs.
* `overwrite` is rejected: a topic can only be appended to.
"""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import pyarrow.compute as pc
from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)

from mansio.errors import ConfigError, InvalidRecord
from mansio.spark.arrow.headers import with_trace_context
from mansio.spark.options import SinkOptions
from mansio.spark.sink.sink_transaction import (
    ProducerEpoch,
    SinkTransaction,
    SinkTransactionOptions,
    abort_batch,
    commit_batch,
    open_transactions,
)
from mansio.spark.sink.task_sender import TaskReport, TaskSender, WriteLogger
from mansio.spark.sync_client import sync_client
from mansio.spark.task_login import options_for_tasks
from mansio.state.transactions.batch_decision import SINGLE_WRITE

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    import pyarrow as pa
    from pyspark.sql.types import StructType

QUERY_ID_PROPERTY = "sql.streaming.queryId"
ABORT_QUIET_S: Final = 2.0
"""How long no transaction of a failed query must be open before its abort ends."""
ABORT_WATCH_S_MAX: Final = 30.0
ABORT_POLL_S: Final = 0.25
ADDED_OPTIONS: Final = frozenset({"queryname"})
"""Options, in lower case, that Spark adds to those of the user."""


@dataclass(frozen=True)
class SinkCommitMessage(WriterCommitMessage):
    """Message of one task to the driver: the offsets that it has written, and the id of its query or write."""

    report: TaskReport
    query_id: str = ""


class BatchWriter(DataSourceArrowWriter):
    """Writer of a batch query (`DataFrame.write`)."""

    def __init__(self, options: Mapping[str, str], schema: StructType, overwrite: bool) -> None:
        """Raise `ConfigError` for invalid options, columns and modes."""
        self.options = checked_options(options, schema)
        self._write_id = uuid.uuid4().hex
        if overwrite:
            raise ConfigError("a topic cannot be overwritten, only appended to: use mode('append')")

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy for the tasks of one batch, with what they log in with."""
        return {**self.__dict__, "options": options_for_tasks(self.options)}

    def write(self, iterator: Iterator[pa.RecordBatch]) -> SinkCommitMessage:
        return write_task(self.options, iterator, self.options.query_id or self._write_id)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        batch_id = self.options.batch_id
        if not self.options.query_id:
            batch_id = SINGLE_WRITE
        commit_tasks(self.options, batch_id, messages)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        query_id = self.options.query_id or self._write_id
        abort_tasks(self.options, self.options.batch_id, messages, query_id)


class StreamWriter(DataSourceStreamArrowWriter):
    """Writer of a streaming query (`DataFrame.writeStream`)."""

    def __init__(self, options: Mapping[str, str], schema: StructType, overwrite: bool) -> None:
        """Raise `ConfigError` for invalid options, columns and output modes."""
        self.options = checked_options(options, schema)
        if overwrite:
            raise ConfigError(
                "a topic cannot be overwritten: use outputMode 'append' or 'update', not 'complete'"
            )

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy for the tasks of one batch, with what they log in with."""
        return {**self.__dict__, "options": options_for_tasks(self.options)}

    def write(self, iterator: Iterator[pa.RecordBatch]) -> SinkCommitMessage:
        context = TaskContext.get()
        query_id = None if context is None else context.getLocalProperty(QUERY_ID_PROPERTY)
        if not query_id and self.options.exactly_once:
            raise ConfigError(
                "Spark does not tell the id of the query to its tasks: set exactlyOnce to false"
            )
        return write_task(self.options, iterator, query_id or "")

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        commit_tasks(self.options, batchId, messages)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        abort_tasks(self.options, batchId, messages)


def checked_options(options: Mapping[str, str], schema: StructType) -> SinkOptions:
    """Parse the sink's options, and check them and the columns. Raises `ConfigError`."""
    parsed = SinkOptions.parse(
        {name: text for name, text in options.items() if name.lower() not in ADDED_OPTIONS}
    )
    if parsed.acks == 0:
        raise ConfigError(
            "option acks is 0: a task could not know whether its rows are stored; give all or 1"
        )
    check_columns({field.name: field.dataType.simpleString() for field in schema.fields}, parsed.topic)
    return parsed


def write_task(options: SinkOptions, batches: Iterator[pa.RecordBatch], query_id: str) -> SinkCommitMessage:
    """Write all rows of one task and wait until they are acknowledged. With `exactly_once`, their transaction is
    prepared then."""
    client, context = sync_client(options.bootstrap_servers, options.security), TaskContext.get()
    transaction = None
    if options.exactly_once:
        task, attempt = (0, 0) if context is None else (context.partitionId(), context.attemptNumber())
        transaction = SinkTransaction(
            client, SinkTransactionOptions(query_id, task, attempt, options.transaction_timeout_ms)
        )
    sender = TaskSender(client, options, transaction=transaction)
    try:
        for batch in batches:
            for topic, rows in split_by_topic(batch, options.topic):
                traced = (
                    rows if options.traceparent is None else with_trace_context(rows, options.traceparent)
                )
                sender.send(topic, traced)
        return SinkCommitMessage(sender.finish(), query_id)
    except BaseException:
        sender.abort()
        raise


def commit_tasks(options: SinkOptions, batch_id: int, messages: Sequence[WriterCommitMessage | None]) -> None:
    """Commit the transactions of all tasks of a batch, and abort all others of the query: those of repeated attempts
    and of an earlier run. Raises the brokers' errors."""
    reports, query_id = _task_reports(messages), _query_id(messages)
    if options.exactly_once and query_id:
        client, transactions = (
            sync_client(options.bootstrap_servers, options.security),
            _transactions(reports),
        )
        others = open_transactions(client, query_id, transactions)
        if transactions or others:
            commit_batch(client, query_id, batch_id, transactions, others)
    WriteLogger().commit(query_id, batch_id, reports)


def abort_tasks(
    options: SinkOptions, batch_id: int, messages: Sequence[WriterCommitMessage | None], query_id: str = ""
) -> None:
    """Abort all transactions of a query, unless the brokers have decided to commit them. Raises the brokers' errors.

    Spark calls this while tasks that it has cancelled may still begin or prepare a transaction, at which readers would
    wait: so it looks for them until there was none for `ABORT_QUIET_S`."""
    reports, query_id = _task_reports(messages), _query_id(messages) or query_id
    WriteLogger().abort(query_id, batch_id, reports)
    if options.exactly_once and query_id:
        client, transactions = (
            sync_client(options.bootstrap_servers, options.security),
            _transactions(reports),
        )
        quiet_s = time.monotonic()
        end_s = quiet_s + ABORT_WATCH_S_MAX
        while True:
            transactions += open_transactions(client, query_id, transactions)
            if transactions:
                abort_batch(client, query_id, transactions)
                transactions, quiet_s = [], time.monotonic()
            now_s = time.monotonic()
            if now_s - quiet_s >= ABORT_QUIET_S or now_s >= end_s:
                return
            time.sleep(ABORT_POLL_S)


def _transactions(reports: Iterable[TaskReport]) -> list[ProducerEpoch]:
    return [
        ProducerEpoch(one.transactional_id, one.producer_id, one.producer_epoch)
        for one in reports
        if one.transactional_id
    ]


def _task_reports(messages: Sequence[WriterCommitMessage | None]) -> list[TaskReport]:
    """Return the reports of the tasks that succeeded; the message of a failed task is None."""
    return [message.report for message in messages if isinstance(message, SinkCommitMessage)]


def _query_id(messages: Sequence[WriterCommitMessage | None]) -> str:
    return next((message.query_id for message in messages if isinstance(message, SinkCommitMessage)), "")


# -- columns --------


BYTES_TYPES: Final = ("string", "binary")
HEADERS_TYPES: Final = ("array<struct<key:string,value:binary>>",)
COLUMN_TYPES: Final = {
    "value": BYTES_TYPES,
    "key": BYTES_TYPES,
    "topic": ("string",),
    "partition": ("int",),
    "headers": HEADERS_TYPES,
    "timestamp": ("timestamp",),
}
"""Allowed Spark types of each column."""
BROKER_ASSIGNED_COLUMNS: Final = frozenset({"offset", "timestampType", "lane"})
WRITTEN_COLUMNS: Final = ("key", "value", "partition", "timestamp", "headers")


def check_columns(types: Mapping[str, str], topic: str | None) -> None:
    """Check the columns of a DataFrame. `types`: the Spark type of each column. Raises `ConfigError` with the
    remedy.
    """
    for name, found in types.items():
        if name in BROKER_ASSIGNED_COLUMNS:
            continue
        if name not in COLUMN_TYPES:
            raise ConfigError(
                f"column {name!r} cannot be written to a topic: select {', '.join(COLUMN_TYPES)}, and put the other"
                " columns into value, for instance with to_json(struct(*))"
            )
        if found not in COLUMN_TYPES[name]:
            raise ConfigError(
                f"column {name} is {found}, and has to be {' or '.join(COLUMN_TYPES[name])}: cast it"
            )
    if "value" not in types:
        raise ConfigError(f"a topic needs the column value, and there are only {', '.join(types) or 'none'}")
    if topic is None and "topic" not in types:
        raise ConfigError("no target topic: give the option topic, or a column of that name")


def split_by_topic(batch: pa.RecordBatch, topic: str | None) -> Iterator[tuple[str, pa.RecordBatch]]:
    """Split the rows by topic; yields (topic, rows with the columns of a record). With `topic` all rows go to that
    topic, otherwise each row to the one in its column `topic`. Raises `InvalidRecord` for a row without a topic.
    """
    if not batch.num_rows:
        return
    if topic is not None:
        yield topic, select_written_columns(batch)
        return
    topics = batch.column(batch.schema.get_field_index("topic"))
    if topics.null_count:
        raise InvalidRecord(
            f"{topics.null_count} rows have no topic: the column is null, and the option is not given"
        )
    for one in pc.unique(topics):
        yield one.as_py(), select_written_columns(batch.filter(pc.equal(topics, one)))


def select_written_columns(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Drop the columns that are not part of a record."""
    return batch.select([name for name in WRITTEN_COLUMNS if name in batch.schema.names])
