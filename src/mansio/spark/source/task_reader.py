"""Reader of one offset range in a task, as Arrow batches of bounded size.

The option `onUnreadable` decides what happens to unreadable records. `suspend`: the query fails with an error that has
their offsets. `skip`: they are omitted. `dead-letter`: they become rows whose column `error` has the reason, one row
per invalid record, or one row per damaged batch with the whole batch as its value.

Invariants:
* Rows are in offset order, and no record is returned twice.
* Memory is a few times `batchBytes`, or one decompressed batch if that is larger, independent of the length of the
  range.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from mansio.errors import DataLoss, UnreadableRecords
from mansio.spark.arrow.readable import ReadableRows, UnreadableRows
from mansio.spark.arrow.schema import record_schema
from mansio.spark.options import (
    ERROR_COLUMN,
    ON_UNREADABLE_DEAD_LETTER,
    ON_UNREADABLE_HINT,
    ON_UNREADABLE_SUSPEND,
)
from mansio.spark.source import data_loss
from mansio.spark.source.error_column import unreadable_offsets_text
from mansio.spark.source.fetch import FetchedBatches, fetch_range
from mansio.spark.sync_client import sync_client
from mansio.spark.task_memory import keep_freed_memory
from mansio.wire.field_values import READ_COMMITTED

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from mansio.spark.options import SourceOptions
    from mansio.spark.source.read_plan import TaskRange

logger = logging.getLogger(__name__)

DEAD_LETTER_COLUMNS: Final = ("key", "value", "offset")
"""Columns of the dead-letter row of a record: they can be decoded even if a header or the timestamp is invalid."""


def read_range(
    options: SourceOptions, names: Sequence[str], task_range: TaskRange
) -> Iterator[pa.RecordBatch]:
    """Return the records of a range, as Arrow batches with the columns `names`.

    Raises `DataLoss` with the option `failOnDataLoss`, `UnreadableRecords` with `onUnreadable=suspend`, and the
    connection's errors if the cluster cannot be reached.
    """
    keep_freed_memory()
    if not options.decoded:
        reader = _TaskReader(options, names, task_range)
        return _resize_batches(reader.batches(), options.rows_per_batch, options.batch_bytes)
    from mansio.spark.source.decoded_columns import DecodedColumns  # its packages are optional

    columns = DecodedColumns(options, names, task_range)
    reader = _TaskReader(options, columns.source_names, task_range)
    batches = _resize_batches(reader.batches(), options.rows_per_batch, options.batch_bytes)
    return columns.decode(batches)


def _resize_batches(
    batches: Iterable[pa.RecordBatch], rows_max: int, bytes_max: int
) -> Iterator[pa.RecordBatch]:
    """Yield the same rows in batches of about `rows_max` rows and `bytes_max` bytes. Batches are concatenated, which
    copies them, until another one of the size of the last would not fit.
    """
    waiting: list[pa.RecordBatch] = []
    rows = size = 0
    for batch in batches:
        waiting.append(batch)
        rows += batch.num_rows
        size += batch.nbytes
        if rows + batch.num_rows > rows_max or size + batch.nbytes > bytes_max:
            yield from _merge_and_split(waiting, rows_max)
            waiting, rows, size = [], 0, 0
    if rows:
        yield from _merge_and_split(waiting, rows_max)


def _merge_and_split(batches: Sequence[pa.RecordBatch], rows_max: int) -> Iterator[pa.RecordBatch]:
    """Concatenate the batches, and split the result evenly if it has more than 1.5 times `rows_max` rows."""
    combined = (
        batches[0] if len(batches) == 1 else pa.Table.from_batches(batches).combine_chunks().to_batches()[0]
    )
    pieces = max(1, round(combined.num_rows / rows_max))
    rows = -(-combined.num_rows // pieces)
    for begin in range(0, combined.num_rows, rows):
        yield combined.slice(begin, rows)


class _TaskReader:
    """Reads the records of one range, and handles unreadable records as `onUnreadable` requires."""

    def __init__(self, options: SourceOptions, names: Sequence[str], task_range: TaskRange) -> None:
        self._options = options
        self._range = task_range
        self._start = task_range.start
        self._columns = tuple(name for name in names if name != ERROR_COLUMN)
        self._names = tuple(names)

    def batches(self) -> Iterator[pa.RecordBatch]:
        task_range = self._range
        rows = ReadableRows(
            task_range.topic,
            task_range.partition,
            task_range.end,
            self._columns,
            read_committed=self._options.isolation_level == READ_COMMITTED,
            decompressed_bytes=self._options.batch_bytes,
        )
        for response in self._responses():
            for piece in rows.read(response.records, response.aborted, self._start):
                if isinstance(piece, UnreadableRows):
                    yield from self._unreadable(rows, piece)
                else:
                    yield self._with_error(piece)

    def _responses(self) -> Iterator[FetchedBatches]:
        """Yield the batches of the range, by response. If records are lost and `failOnDataLoss` is off, the reader
        continues with the remaining range.
        """
        task_range = self._range
        while self._start < task_range.end:
            try:
                yield from fetch_range(
                    sync_client(self._options.bootstrap_servers, self._options.security),
                    task_range.topic_partition,
                    self._start,
                    task_range.end,
                    fetch_bytes=self._options.fetch_bytes,
                    isolation=self._options.isolation_level,
                    topic_id=task_range.topic_id,
                )
            except DataLoss as loss:
                data_loss.raise_or_log(loss, fail=self._options.fail_on_data_loss)
                if loss.next_offset is None:
                    return
                self._start = loss.next_offset
            else:
                return

    def _unreadable(self, rows: ReadableRows, damaged: UnreadableRows) -> Iterator[pa.RecordBatch]:
        """Raise, omit or return unreadable records as `onUnreadable` requires."""
        self._report_damage(damaged)
        if self._options.on_unreadable != ON_UNREADABLE_DEAD_LETTER:
            return
        kept = (
            []
            if damaged.is_whole_batch
            else rows.decode(damaged.batch, DEAD_LETTER_COLUMNS, damaged.first, damaged.last)
        )
        for row in (row for batch in kept for row in batch.to_pylist()):
            yield self._dead_letter(row, row["offset"], damaged.reason)
        if not kept:
            yield self._dead_letter(
                {"offset": damaged.first, "value": bytes(damaged.batch)}, damaged.last, damaged.reason
            )

    def _report_damage(self, damaged: UnreadableRows) -> None:
        """Raise `UnreadableRecords` with `onUnreadable=suspend`; otherwise log the offsets and the reason."""
        task_range, mode = self._range, self._options.on_unreadable
        where = (
            f"offsets {damaged.first} to {damaged.last} "
            f"of partition {task_range.partition} of topic {task_range.topic}"
        )
        if mode == ON_UNREADABLE_SUSPEND:
            raise UnreadableRecords(f"{where} cannot be read: {damaged.reason}. {ON_UNREADABLE_HINT}")
        logger.warning("%s cannot be read (onUnreadable is %s): %s", where, mode, damaged.reason)

    def _dead_letter(self, row: dict[str, Any], last: int, reason: str) -> pa.RecordBatch:
        """Return the dead-letter row of the offsets from `row["offset"]` to `last`."""
        error_message = unreadable_offsets_text(row["offset"], last, reason)
        row |= {"topic": self._range.topic, "partition": self._range.partition, ERROR_COLUMN: error_message}
        return pa.RecordBatch.from_pylist([row], arrow_schema(self._names))

    def _with_error(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Add a column `error` in which all values are null, if that column is selected."""
        if ERROR_COLUMN not in self._names:
            return batch
        columns = {
            name: pa.nulls(batch.num_rows, pa.string()) if name == ERROR_COLUMN else batch.column(name)
            for name in self._names
        }
        return pa.RecordBatch.from_arrays(list(columns.values()), schema=arrow_schema(self._names))


def arrow_schema(names: Sequence[str]) -> pa.Schema:
    """Return the Arrow schema of these columns, including `error`."""
    known = [name for name in names if name != ERROR_COLUMN]
    fields = dict(zip(known, record_schema(known), strict=True)) if known else {}
    return pa.schema(
        [pa.field(ERROR_COLUMN, pa.string()) if name == ERROR_COLUMN else fields[name] for name in names]
    )
