"""Readable rows of a Fetch response, and the offsets between them that cannot be read.

Invariants:
* Every visible record with an offset in [start, end) is in a returned row or in a returned range, in offset order.
* A batch is decoded twice only if its response contains unreadable records.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from mansio.errors import UNREADABLE_OR_DAMAGED
from mansio.spark.arrow.decode import RESULT_BYTES_MAX, decode_batches
from mansio.wire.batch.record_batch import iterate_batches

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import pyarrow as pa

    Decode = Callable[[Sequence[str], int, int], list[pa.RecordBatch]]
    """Function (columns, start offset, end offset (exclusive)) -> rows. Raises one of `UNREADABLE_OR_DAMAGED`."""

ISOLATION_ATTEMPTS_MAX: Final = 512
"""Maximum number of times a batch is decoded to find its invalid records: enough for thirty among a thousand."""


class UnreadableRows(NamedTuple):
    """First and last offset of unreadable records, both inclusive, and the reason. `is_whole_batch`: the batch itself
    is invalid, so none of its records at these offsets can be decoded. `batch`: the batch that contains them."""

    first: int
    last: int
    reason: str
    is_whole_batch: bool
    batch: memoryview = memoryview(b"")


class ReadableRows:
    """Decodes the responses of one partition: offsets below `end` and the selected columns. `decompressed_bytes` is the
    argument `decompressed_bytes_max` of `decode_batches`."""

    def __init__(
        self,
        topic: str,
        partition: int,
        end: int,
        columns: Sequence[str],
        *,
        read_committed: bool = True,
        decompressed_bytes: int = RESULT_BYTES_MAX,
    ) -> None:
        self._topic = topic
        self._partition = partition
        self._end = end
        self._columns = columns
        self._read_committed = read_committed
        self._decompressed_bytes = decompressed_bytes

    def read(
        self, records: memoryview, aborted: Sequence[tuple[int, int]], start: int
    ) -> Iterator[pa.RecordBatch | UnreadableRows]:
        """Yield the rows of a response and its unreadable ranges. `aborted`: aborted transactions of the response."""
        rows_done = 0
        try:
            for rows in self._decode(records, aborted, self._columns, start, self._end):
                rows_done += rows.num_rows
                yield rows
                del rows  # its memory is not needed while the next batch is decompressed
        except UNREADABLE_OR_DAMAGED:
            pass
        else:
            return
        yield from self._read_batch_by_batch(records, list(aborted), start, rows_done)

    def decode(
        self, batch: memoryview, columns: Sequence[str], first: int, last: int
    ) -> list[pa.RecordBatch]:
        """Return the rows of a visible batch with offsets from `first` to `last`, in these columns."""
        return list(self._decode(batch, (), columns, first, last + 1))

    def _decode(
        self,
        records: memoryview,
        aborted: Sequence[tuple[int, int]],
        columns: Sequence[str],
        start: int,
        end: int,
    ) -> Iterator[pa.RecordBatch]:
        return decode_batches(
            records,
            self._topic,
            self._partition,
            start,
            end,
            columns,
            aborted=aborted,
            read_committed=self._read_committed,
            decompressed_bytes_max=self._decompressed_bytes,
        )

    def _read_batch_by_batch(
        self, records: memoryview, aborted: list[tuple[int, int]], start: int, rows_done: int
    ) -> Iterator[pa.RecordBatch | UnreadableRows]:
        """Decode a response with unreadable records batch by batch, without its first `rows_done` rows."""
        for position, header in iterate_batches(records):
            batch = records[position : position + header.size]
            decoded = 0
            try:
                for rows in self._decode(batch, aborted, self._columns, start, self._end):
                    decoded += rows.num_rows
                    skipped = min(rows_done, rows.num_rows)
                    rows_done -= skipped
                    if skipped < rows.num_rows:
                        yield rows.slice(skipped)
                    del rows
                continue
            except UNREADABLE_OR_DAMAGED:
                pass
            finally:
                if header.is_control:  # the marker ended its transaction (KIP-98)
                    aborted = [
                        (producer, first)
                        for producer, first in aborted
                        if producer != header.producer_id or first > header.last_offset
                    ]
            first = self._offset_after(batch, max(header.base_offset, start), decoded)
            last = min(header.last_offset, self._end - 1)

            def decode(
                columns: Sequence[str], begin: int, end: int, batch: memoryview = batch
            ) -> list[pa.RecordBatch]:
                return list(self._decode(batch, (), columns, begin, end))

            for piece in isolate_unreadable_records(decode, self._columns, first, last + 1):
                yield piece._replace(batch=batch) if isinstance(piece, UnreadableRows) else piece

    def _offset_after(self, batch: memoryview, start: int, rows_done: int) -> int:
        """Return the offset after the first `rows_done` rows of a batch, which were decoded before."""
        if rows_done:
            for rows in self._decode(batch, (), ("offset",), start, self._end):
                if rows.num_rows >= rows_done:
                    return int(rows.column(0)[rows_done - 1].as_py()) + 1
                rows_done -= rows.num_rows
        return start


def isolate_unreadable_records(
    decode: Decode, columns: Sequence[str], start: int, end: int
) -> Iterator[pa.RecordBatch | UnreadableRows]:
    """Yield the readable rows and unreadable ranges of one batch with offsets in [start, end), in offset order.

    If the batch itself is invalid (CRC, lengths, compression), all its records are unreadable. If only the content of
    records is invalid (a header name, a timestamp out of range), the invalid records are found by bisection. After
    `ISOLATION_ATTEMPTS_MAX` decodings, every range that fails counts as unreadable as a whole.
    """
    try:
        found = decode(("offset",), start, end)
    except UNREADABLE_OR_DAMAGED as error:
        yield UnreadableRows(start, max(end - 1, start), error.message, is_whole_batch=True)
        return
    offsets = (
        np.concatenate([rows.column(0).to_numpy() for rows in found]) if found else np.zeros(0, np.int64)
    )
    pending = [(0, len(offsets))] if len(offsets) else []
    attempts = ISOLATION_ATTEMPTS_MAX
    while pending:
        low, high = pending.pop()
        first, last = int(offsets[low]), int(offsets[high - 1])
        attempts -= 1
        try:
            yield from decode(columns, first, last + 1)
        except UNREADABLE_OR_DAMAGED as error:
            if high - low == 1 or attempts <= 0:
                yield UnreadableRows(first, last, error.message, is_whole_batch=False)
            else:
                middle = (low + high) // 2
                pending += [(middle, high), (low, middle)]
