"""Columns of decoded keys and values of a task, beside the columns of the records.

A key or value that cannot be decoded makes its record unreadable. The option `onUnreadable` applies to it as to damaged
records: `suspend` fails the query with the offset, `skip` omits the record, `dead-letter` returns it as a row whose
column `error` has the reason, and whose key and value are as they were written.

Invariants:
* A record without a key or value has a null in the decoded column; it is not unreadable.
* If the schema registry cannot be used, the task fails: no record is unreadable for this reason.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

import pyarrow as pa
import pyarrow.compute as pc

from mansio.errors import UnreadableRecords
from mansio.schemas.formats import cached_decoder
from mansio.spark.options import (
    DECODED_COLUMNS,
    ERROR_COLUMN,
    ON_UNREADABLE_DEAD_LETTER,
    ON_UNREADABLE_HINT,
    ON_UNREADABLE_SUSPEND,
)
from mansio.spark.source.error_column import unreadable_offsets_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from mansio.spark.options import SourceOptions
    from mansio.spark.source.read_plan import TaskRange

logger = logging.getLogger(__name__)

OFFSET_COLUMN: Final = "offset"


class DecodedColumns:
    """Adds the decoded columns to the batches of one range, and handles records that cannot be decoded."""

    def __init__(self, options: SourceOptions, names: Sequence[str], task_range: TaskRange) -> None:
        """`names`: the columns of the result. Raises the errors of `open_decoder`."""
        self._options = options
        self._names = tuple(names)
        self._range = task_range
        self._decoders = {
            one.name: cached_decoder(one.format, one.type, is_fixed=one.is_fixed)
            for one in options.decoded
            if one.name in names
        }
        needed = [DECODED_COLUMNS[name] for name in self._decoders]
        self.source_names: tuple[str, ...] = tuple(
            dict.fromkeys([*(name for name in names if name not in DECODED_COLUMNS), *needed, OFFSET_COLUMN])
        )
        """The columns to read."""

    def decode(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield the batches with the decoded columns. Raises `UnreadableRecords` and `SchemaRegistryError`."""
        for batch in batches:
            found = self._decode_batch(batch)
            if found.num_rows:
                yield found

    def _decode_batch(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        damaged = batch.column(ERROR_COLUMN) if ERROR_COLUMN in self.source_names else None
        is_damaged = [False] * batch.num_rows if damaged is None else pc.is_valid(damaged).to_pylist()
        reasons: dict[int, str] = {}
        decoded: dict[str, pa.Array] = {}
        for name, decoder in self._decoders.items():
            side = DECODED_COLUMNS[name]
            values = batch.column(side).to_pylist()
            found = decoder.decode(
                [None if skipped else value for value, skipped in zip(values, is_damaged, strict=True)]
            )
            decoded[name] = found.array
            for row, text in found.errors.items():
                reasons.setdefault(row, f"{side}: {text}")
        if reasons:
            self._report(batch, reasons)
        columns = {**{name: batch.column(name) for name in self.source_names}, **decoded}
        if reasons and ERROR_COLUMN in columns:
            columns[ERROR_COLUMN] = self._errors(batch, columns[ERROR_COLUMN], reasons)
        rows = pa.RecordBatch.from_arrays([columns[name] for name in self._names], list(self._names))
        if reasons and self._options.on_unreadable != ON_UNREADABLE_DEAD_LETTER:
            return rows.take(
                pa.array([row for row in range(batch.num_rows) if row not in reasons], pa.int64())
            )
        return rows

    def _errors(self, batch: pa.RecordBatch, errors: pa.Array, reasons: dict[int, str]) -> pa.Array:
        offsets = batch.column(OFFSET_COLUMN)
        texts = errors.to_pylist()
        for row, text in reasons.items():
            offset = offsets[row].as_py()
            texts[row] = unreadable_offsets_text(offset, offset, text)
        return pa.array(texts, pa.string())

    def _report(self, batch: pa.RecordBatch, reasons: dict[int, str]) -> None:
        """Raise `UnreadableRecords` with `onUnreadable=suspend`; otherwise log the number and the first reason."""
        first = min(reasons)
        task_range, mode = self._range, self._options.on_unreadable
        offset = batch.column(OFFSET_COLUMN)[first].as_py()
        where = (
            f"offsets {offset} to {offset} of partition {task_range.partition} of topic {task_range.topic}"
        )
        if mode == ON_UNREADABLE_SUSPEND:
            raise UnreadableRecords(f"{where} cannot be read: {reasons[first]}. {ON_UNREADABLE_HINT}")
        logger.warning(
            "%d records cannot be decoded (onUnreadable is %s), first %s: %s",
            len(reasons),
            mode,
            where,
            reasons[first],
        )
