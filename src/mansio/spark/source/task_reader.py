"""Reader of one offset range in a task, as Arrow batches of bounded size.

The option `onUnreadable` decides what happens to unreadable records. `suspend`: the query fails with an error that has
their offsets. `skip`: they are omitted. `dead-letter`: they become rows whose column `error` has the reason, one row
per invalid record, or one row per damaged batch with the whole batch as its value.

Invariants:
* Rows are in offset order, and no record is returned twice.
* Memory is a few times `batchBytes`, independent of the length of the range.
* A batch is decoded twice only if its response contains unreadable records.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import pyarrow as pa

from mansio.errors import (
    CorruptMessage,
    DataLoss,
    InvalidRecord,
    MansioError,
    UnreadableRecords,
    UnsupportedCompression,
    UnsupportedMessageFormat,
)
from mansio.net.offsets import READ_COMMITTED
from mansio.spark.arrow.decode import decode_batches
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
from mansio.tracebacks import without_traceback
from mansio.wire.batch.record_batch import iterate_batches

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from mansio.errors import MansioError
    from mansio.spark.options import SourceOptions
    from mansio.spark.source.read_plan import TaskRange
    from mansio.wire.batch.record_batch import BatchHeader

    Decode = Callable[[Sequence[str], int, int], list[pa.RecordBatch]]
    """Function (columns, start offset, end offset (exclusive)) -> rows. Raises one of `UNREADABLE_ERRORS`."""

logger = logging.getLogger(__name__)

DEAD_LETTER_COLUMNS: Final = ("key", "value", "offset")
"""Columns of the dead-letter row of a record: they can be decoded even if a header or the timestamp is invalid."""


def read_range(
    options: SourceOptions, names: Sequence[str], task_range: TaskRange
) -> Iterator[pa.RecordBatch]:
    """The records of a range, as Arrow batches with the columns `names`.

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
    """The same rows in batches of about `rows_max` rows and `bytes_max` bytes. Batches are concatenated, which copies
    them, until another one of the size of the last would not fit.
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
        for response in self._responses():
            rows = 0
            try:
                for batch in self._decode(response.records, response.aborted):
                    rows += batch.num_rows
                    yield self._with_error(batch)
            except UNREADABLE_ERRORS:
                yield from self._decode_batch_by_batch(response, rows)

    def _responses(self) -> Iterator[FetchedBatches]:
        """The batches of the range, by response. If records are lost and `failOnDataLoss` is off, the reader continues
        with the remaining range.
        """
        task_range = self._range
        while self._start < task_range.end:
            try:
                yield from fetch_range(
                    sync_client(self._options.bootstrap_servers),
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

    def _decode(
        self,
        records: memoryview,
        aborted: Sequence[tuple[int, int]],
        columns: Sequence[str] | None = None,
        start: int | None = None,
        end: int | None = None,
    ) -> Iterator[pa.RecordBatch]:
        task_range = self._range
        return decode_batches(
            records,
            task_range.topic,
            task_range.partition,
            self._start if start is None else start,
            task_range.end if end is None else end,
            self._columns if columns is None else columns,
            aborted=aborted,
            read_committed=self._options.isolation_level == READ_COMMITTED,
            decompressed_bytes_max=self._options.batch_bytes,
        )

    def _decode_batch_by_batch(self, response: FetchedBatches, rows_done: int) -> Iterator[pa.RecordBatch]:
        """Decode a response with unreadable records batch by batch, without its first `rows_done` rows."""
        aborted = list(response.aborted)
        for position, header in iterate_batches(response.records):
            batch = response.records[position : position + header.size]
            try:
                for rows in self._decode(batch, aborted):
                    skipped = min(rows_done, rows.num_rows)
                    rows_done -= skipped
                    if skipped < rows.num_rows:
                        yield self._with_error(rows.slice(skipped))
            except UNREADABLE_ERRORS:
                yield from self._isolate_damage(header, batch, aborted)
            if header.is_control:  # the marker ended its transaction (KIP-98)
                aborted = [
                    (producer, first)
                    for producer, first in aborted
                    if producer != header.producer_id or first > header.last_offset
                ]

    def _isolate_damage(
        self, header: BatchHeader, batch: memoryview, aborted: Sequence[tuple[int, int]]
    ) -> Iterator[pa.RecordBatch]:
        """The readable records of one batch; the others are raised, omitted or returned as `onUnreadable` requires."""

        def decode(columns: Sequence[str], start: int, end: int) -> list[pa.RecordBatch]:
            return list(self._decode(batch, aborted, columns, start, end))

        first, last = max(header.base_offset, self._start), min(header.last_offset, self._range.end - 1)
        for piece in isolate_unreadable_records(decode, self._columns, first, last + 1):
            if not isinstance(piece, DamagedRange):
                yield self._with_error(piece)
                continue
            self._report_damage(piece)
            if self._options.on_unreadable == ON_UNREADABLE_DEAD_LETTER:
                kept = (
                    [] if piece.is_whole_batch else decode(DEAD_LETTER_COLUMNS, piece.first, piece.last + 1)
                )
                for row in (row for rows in kept for row in rows.to_pylist()):
                    yield self._dead_letter(row, row["offset"], piece.error)
                if not kept:
                    yield self._dead_letter(
                        {"offset": piece.first, "value": bytes(batch)}, piece.last, piece.error
                    )

    def _report_damage(self, damaged: DamagedRange) -> None:
        """Raise `UnreadableRecords` with `onUnreadable=suspend`; otherwise log the offsets and the reason."""
        task_range, mode = self._range, self._options.on_unreadable
        where = (
            f"offsets {damaged.first} to {damaged.last} "
            f"of partition {task_range.partition} of topic {task_range.topic}"
        )
        if mode == ON_UNREADABLE_SUSPEND:
            raise UnreadableRecords(
                f"{where} cannot be read: {damaged.error.message}. {ON_UNREADABLE_HINT}"
            ) from damaged.error
        logger.warning("%s cannot be read (onUnreadable is %s): %s", where, mode, damaged.error.message)

    def _dead_letter(self, row: dict[str, Any], last: int, error: MansioError) -> pa.RecordBatch:
        """The dead-letter row of the offsets from `row["offset"]` to `last`."""
        error_message = unreadable_offsets_text(row["offset"], last, error)
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
    """The Arrow schema of these columns, including `error`."""
    known = [name for name in names if name != ERROR_COLUMN]
    fields = dict(zip(known, record_schema(known), strict=True)) if known else {}
    return pa.schema(
        [pa.field(ERROR_COLUMN, pa.string()) if name == ERROR_COLUMN else fields[name] for name in names]
    )


# -- unreadable records --------


UNREADABLE_ERRORS: Final = (CorruptMessage, InvalidRecord, UnsupportedCompression, UnsupportedMessageFormat)
"""Errors that decoding raises for unreadable records."""

ISOLATION_ATTEMPTS_MAX: Final = 512
"""Maximum number of times a batch is decoded to find its invalid records: enough for thirty among a thousand."""


class DamagedRange(NamedTuple):
    """First and last offset of unreadable records, both inclusive, and the reason. `is_whole_batch`: the batch itself
    is damaged, so none of its records can be decoded.
    """

    first: int
    last: int
    error: MansioError
    is_whole_batch: bool


def isolate_unreadable_records(
    decode: Decode, columns: Sequence[str], start: int, end: int
) -> Iterator[pa.RecordBatch | DamagedRange]:
    """The readable rows and damaged ranges of one batch with offsets in [start, end), in offset order.

    If the batch itself is damaged (CRC, lengths, compression), all its records are unreadable. If only the content of
    records is invalid (a header name, a timestamp out of range), the invalid records are found by bisection. After
    `ISOLATION_ATTEMPTS_MAX` decodings, every range that fails counts as damaged as a whole.
    """
    try:
        found = decode(("offset",), start, end)
    except UNREADABLE_ERRORS as error:
        yield DamagedRange(start, end - 1, without_traceback(error), is_whole_batch=True)
        return
    offsets = [offset for rows in found for offset in rows.column(0).to_pylist()]
    pending = [(0, len(offsets))] if offsets else []
    attempts = ISOLATION_ATTEMPTS_MAX
    while pending:
        low, high = pending.pop()
        attempts -= 1
        try:
            yield from decode(columns, offsets[low], offsets[high - 1] + 1)
        except UNREADABLE_ERRORS as error:
            if high - low == 1 or attempts <= 0:
                yield DamagedRange(
                    offsets[low], offsets[high - 1], without_traceback(error), is_whole_batch=False
                )
            else:
                middle = (low + high) // 2
                pending += [(middle, high), (low, middle)]
