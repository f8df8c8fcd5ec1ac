"""Reading of one range in a task, as Arrow batches of a bounded size.

Owns the batch sizes and the handling of unreadable records (`onUnreadable`): the query fails with their offset
(`suspend`), omits them (`skip`), or emits a row (`dead-letter`) whose column `error` has the reason: one row per
damaged batch, with the batch as its value, or one per invalid record.

Invariants:
* Rows are in offset order, each once.
* Memory is a few times `batchBytes`, independent of the length of the range.
* Without damage no batch is decoded twice.
"""

from __future__ import annotations

import logging
import re
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
from mansio.spark.options import ERROR_COLUMN, ON_UNREADABLE_DEAD_LETTER, ON_UNREADABLE_SUSPEND
from mansio.spark.source import data_loss
from mansio.spark.source.fetch import FetchedBatches, fetch_range
from mansio.spark.sync_client import sync_client
from mansio.wire.batch.record_batch import iterate_batches

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from mansio.errors import MansioError
    from mansio.spark.options import SourceOptions
    from mansio.spark.source.read_plan import TaskRange
    from mansio.wire.batch.record_batch import BatchHeader

    Decode = Callable[[Sequence[str], int, int], list[pa.RecordBatch]]
    """(columns, first offset, offset after the last) -> rows. Raises one of `UNREADABLE`."""

logger = logging.getLogger(__name__)

CERTAIN_COLUMNS: Final = ("key", "value", "offset")
"""Columns that can be decoded of a record with an invalid header or timestamp."""


def read_range(
    options: SourceOptions, names: Sequence[str], task_range: TaskRange
) -> Iterator[pa.RecordBatch]:
    """The records of a range, in batches with the columns `names`.

    Raises `DataLoss` and `UnreadableRecords` if the options require it, and the cluster's errors if it cannot be
    reached.
    """
    reader = _TaskReader(options, names, task_range)
    return _sized(reader.batches(), options.rows_per_batch, options.batch_bytes)


def _sized(batches: Iterable[pa.RecordBatch], rows_max: int, bytes_max: int) -> Iterator[pa.RecordBatch]:
    """The same rows in batches of at most `rows_max` rows and about `bytes_max` bytes. Batches are concatenated, which
    copies them, only if another one of the same size still fits.
    """
    waiting: list[pa.RecordBatch] = []
    rows = size = 0
    for batch in batches:
        waiting.append(batch)
        rows += batch.num_rows
        size += batch.nbytes
        if rows + batch.num_rows > rows_max or size + batch.nbytes > bytes_max:
            yield from _split(waiting, rows_max)
            waiting, rows, size = [], 0, 0
    if rows:
        yield from _split(waiting, rows_max)


def _split(batches: Sequence[pa.RecordBatch], rows_max: int) -> Iterator[pa.RecordBatch]:
    """As few batches as `rows_max` allows; a batch of more than 1.5 times that is split evenly."""
    combined = (
        batches[0] if len(batches) == 1 else pa.Table.from_batches(batches).combine_chunks().to_batches()[0]
    )
    pieces = max(1, round(combined.num_rows / rows_max))
    rows = -(-combined.num_rows // pieces)
    for begin in range(0, combined.num_rows, rows):
        yield combined.slice(begin, rows)


class _TaskReader:
    """Reads one range of offsets."""

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
                for batch in self._decoded(response.records, response.aborted):
                    rows += batch.num_rows
                    yield self._with_error(batch)
            except UNREADABLE:
                yield from self._decode_batch_by_batch(response, rows)

    def _responses(self) -> Iterator[FetchedBatches]:
        """The broker's responses; after a permitted loss, those of the remaining range."""
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
                data_loss.report(loss, fail=self._options.fail_on_data_loss)
                if loss.next_offset is None:
                    return
                self._start = loss.next_offset
            else:
                return

    def _decoded(
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
        """A response with damage, batch by batch; rows that were already emitted are omitted."""
        aborted = list(response.aborted)
        for position, header in iterate_batches(response.records):
            batch = response.records[position : position + header.size]
            try:
                for rows in self._decoded(batch, aborted):
                    skipped = min(rows_done, rows.num_rows)
                    rows_done -= skipped
                    if skipped < rows.num_rows:
                        yield self._with_error(rows.slice(skipped))
            except UNREADABLE:
                yield from self._isolated(header, batch, aborted)
            if header.is_control:  # the marker ended its transaction (KIP-98)
                aborted = [
                    (producer, first)
                    for producer, first in aborted
                    if producer != header.producer_id or first > header.last_offset
                ]

    def _isolated(
        self, header: BatchHeader, batch: memoryview, aborted: Sequence[tuple[int, int]]
    ) -> Iterator[pa.RecordBatch]:
        """One damaged batch: its readable records, and the configured result for the others."""

        def decode(columns: Sequence[str], start: int, end: int) -> list[pa.RecordBatch]:
            return list(self._decoded(batch, aborted, columns, start, end))

        first, last = max(header.base_offset, self._start), min(header.last_offset, self._range.end - 1)
        for piece in isolate_bad_records(decode, self._columns, first, last + 1):
            if not isinstance(piece, DamagedRange):
                yield self._with_error(piece)
                continue
            self._report_damage(piece)
            if self._options.on_unreadable == ON_UNREADABLE_DEAD_LETTER:
                kept = [] if piece.is_frame else decode(CERTAIN_COLUMNS, piece.first, piece.last + 1)
                for row in (row for rows in kept for row in rows.to_pylist()):
                    yield self._dead_letter(row, row["offset"], piece.error)
                if not kept:
                    yield self._dead_letter(
                        {"offset": piece.first, "value": bytes(batch)}, piece.last, piece.error
                    )

    def _report_damage(self, damaged: DamagedRange) -> None:
        """Raise, or log what is omitted."""
        task_range, mode = self._range, self._options.on_unreadable
        where = (
            f"offsets {damaged.first} to {damaged.last} "
            f"of partition {task_range.partition} of topic {task_range.topic}"
        )
        if mode == ON_UNREADABLE_SUSPEND:
            raise UnreadableRecords(
                f"{where} cannot be read: {damaged.error.message}. "
                f"Set onUnreadable to skip to continue without them, or to"
                " dead-letter to get them as rows with an error"
            ) from damaged.error
        logger.warning("%s cannot be read (onUnreadable is %s): %s", where, mode, damaged.error.message)

    def _dead_letter(self, row: dict[str, Any], last: int, error: MansioError) -> pa.RecordBatch:
        """The dead-letter row of an unreadable record, or of all offsets up to `last`."""
        error_message = error_text(row["offset"], last, error)
        row |= {"topic": self._range.topic, "partition": self._range.partition, ERROR_COLUMN: error_message}
        return pa.RecordBatch.from_pylist([row], arrow_schema(self._names))

    def _with_error(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The batch with an all-null column `error`, if that column is selected."""
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


# -- bad records --------


UNREADABLE: Final = (CorruptMessage, InvalidRecord, UnsupportedCompression, UnsupportedMessageFormat)
"""Errors of decoding that mean unreadable records."""

ATTEMPTS_MAX: Final = 512
"""Maximum number of decodings of one batch: enough for about thirty bad records in a thousand."""


_ERROR_TEXT: Final = re.compile(r"offsets (\d+) to (\d+) cannot be read: ")


def error_text(first: int, last: int, error: MansioError) -> str:
    """The text of the column `error`: the offsets, both inclusive, and the reason."""
    return f"offsets {first} to {last} cannot be read: {error.message}"


def parse_error_offsets(text: str) -> tuple[int, int] | None:
    """The offsets in an `error_text`, both inclusive; None for any other text."""
    found = _ERROR_TEXT.match(text)
    return None if found is None else (int(found[1]), int(found[2]))


def parse_error_reason(text: str) -> str:
    """The reason in an `error_text`; any other text unchanged."""
    found = _ERROR_TEXT.match(text)
    return text if found is None else text[found.end() :]


class DamagedRange(NamedTuple):
    """Offsets of unreadable records, both inclusive, and the reason. `is_frame`: the whole batch is unreadable."""

    first: int
    last: int
    error: MansioError
    is_frame: bool


def isolate_bad_records(
    decode: Decode, columns: Sequence[str], start: int, end: int
) -> Iterator[pa.RecordBatch | DamagedRange]:
    """The parts of one batch with offsets in [start, end): readable rows and damaged ranges, in offset order.

    If the frame is damaged (CRC, lengths, compression), the whole batch is lost. If only the content of records is
    invalid (a header name, a timestamp out of range), the bad records are found by bisection, with at most
    `ATTEMPTS_MAX` decodings; what is not isolated by then counts as damaged.
    """
    try:
        found = decode(("offset",), start, end)
    except UNREADABLE as error:
        yield DamagedRange(start, end - 1, error, is_frame=True)
        return
    offsets = [offset for rows in found for offset in rows.column(0).to_pylist()]
    pending = [(0, len(offsets))] if offsets else []
    attempts = ATTEMPTS_MAX
    while pending:
        low, high = pending.pop()
        attempts -= 1
        try:
            yield from decode(columns, offsets[low], offsets[high - 1] + 1)
        except UNREADABLE as error:
            if high - low == 1 or attempts <= 0:
                yield DamagedRange(offsets[low], offsets[high - 1], error, is_frame=False)
            else:
                middle = (low + high) // 2
                pending += [(middle, high), (low, middle)]
