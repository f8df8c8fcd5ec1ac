"""Decoder of Fetch responses to Arrow columns, without a Python object per record.

Batches are filtered by isolation level (`wire.batch.isolation_filter`), decompressed, and grouped into buffers of many
batches. The records of a buffer are located together (`record_index`), and only the selected columns are built.
Uncompressed batches are decoded in the response's own buffer; keys and values are copied once, into their columns.
Headers are decoded only if they are selected, because decoding them costs more than all other columns together.

Invariants:
* A result holds exactly the visible records with offsets in [start, end), in offset order, in the selected columns.
* A result does not refer to the memory of the response.
* The last header of a record ends where the record ends, else `InvalidRecord`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa

from mansio.errors import CorruptMessage, InvalidRecord
from mansio.spark.arrow.binary import BinaryColumnBuilder, concatenate
from mansio.spark.arrow.record_index import (
    PADDING_BYTES,
    BatchBuffer,
    RecordIndex,
    build_record_index,
    record_end,
)
from mansio.spark.arrow.schema import (
    DEFAULT_COLUMNS,
    HEADERS_TYPE,
    RECORD_SCHEMA,
    TIMESTAMP_TYPE,
    record_schema,
)
from mansio.spark.arrow.varints import read_varints
from mansio.wire.batch.compression import DECOMPRESSED_BYTES_MAX, decompress
from mansio.wire.batch.isolation_filter import visible_batches
from mansio.wire.batch.record_batch import HEADER_BYTES, RECORD_BYTES_MIN, TimestampType

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from mansio.spark.arrow.record_index import RecordIndex
    from mansio.wire.batch.record_batch import BatchHeader

OFFSET_MAX: Final = (1 << 63) - 1
RESULT_BYTES_MAX: Final = 64 << 20
"""Default of the decompressed size at which a result is complete."""

_RECORD_OVERHEAD_BYTES: Final = 64
"""Memory that decoding needs for a record in addition to its encoded size."""
_TIMESTAMP_MS_MAX: Final = ((1 << 63) - 1) // 1000


def decode_batches(
    buffer: bytes | memoryview,
    topic: str,
    partition: int,
    start: int = 0,
    end: int = OFFSET_MAX,
    columns: Sequence[str] = DEFAULT_COLUMNS,
    *,
    aborted: Sequence[tuple[int, int]] = (),
    read_committed: bool = True,
    decompressed_bytes_max: int = RESULT_BYTES_MAX,
) -> Iterator[pa.RecordBatch]:
    """Yield the records of one Fetch response with offsets in [start, end), as Arrow record batches of `columns`.

    A small response may decompress to a large one: a result is yielded as soon as its batches have
    `decompressed_bytes_max` bytes, decompressed; a batch of many small records is yielded in several. Yields nothing if
    there are no rows. `aborted`: (producer id, first offset) of the aborted transactions in the response. An incomplete
    batch at the end of `buffer` is ignored. Raises `CorruptMessage`, `InvalidRecord`, `UnsupportedCompression` and
    `UnsupportedMessageFormat`, with topic, partition and offset where they are known.
    """
    view = memoryview(buffer)
    # Only the last field of a record, its headers, is read up to the end of the record.
    padding_bytes = PADDING_BYTES if "headers" in columns else 0
    layout = _BatchLayout(view, padding_bytes)
    for position, header, is_visible in visible_batches(
        view, (topic, partition), start, aborted, read_committed
    ):
        if header.base_offset >= end:
            break
        if not is_visible:
            continue
        try:
            if header.codec and header.record_count * _RECORD_OVERHEAD_BYTES > decompressed_bytes_max:
                yield from _build_record_batch(layout, topic, partition, start, end, columns)
                layout = _BatchLayout(view, padding_bytes)
                records_max = decompressed_bytes_max // _RECORD_OVERHEAD_BYTES
                for body, part in _split(_decompressed(view, position, header), header, records_max):
                    layout.add_body(body, part)
                    yield from _build_record_batch(layout, topic, partition, start, end, columns)
                    layout = _BatchLayout(view, padding_bytes)
            else:
                layout.add(position, header)
        except (InvalidRecord, CorruptMessage) as error:
            raise type(error)(f"{topic}-{partition} at offset {header.base_offset}: {error}") from error
        if layout.bytes >= decompressed_bytes_max:
            yield from _build_record_batch(layout, topic, partition, start, end, columns)
            layout = _BatchLayout(view, padding_bytes)
    yield from _build_record_batch(layout, topic, partition, start, end, columns)


class _BatchLayout:
    """Groups batches into buffers: uncompressed batches stay in the response, decompressed ones are concatenated."""

    def __init__(self, view: memoryview, padding_bytes: int) -> None:
        self.bytes = 0
        """Memory of the added batches: their decompressed size, and `_RECORD_OVERHEAD_BYTES` per record."""
        self._view = view
        self._in_place_end = len(view) - padding_bytes
        self._batch_buffers: list[BatchBuffer] = []
        self._spans: list[tuple[int, int]] = []
        self._headers: list[BatchHeader] = []
        self._bodies: list[bytes | memoryview] | None = None
        """Batch bodies for the next concatenated buffer; None while batches are decoded in the response."""

    def add(self, position: int, header: BatchHeader) -> None:
        """Add one visible batch, decompressed. Raises `InvalidRecord`, `CorruptMessage`, `UnsupportedCompression`."""
        begin, stop = position + HEADER_BYTES, position + header.size
        if header.codec:
            self.add_body(_decompressed(self._view, position, header), header)
        elif stop <= self._in_place_end:
            self._add(None, header, begin, stop)
        else:
            self.add_body(self._view[begin:stop], header)

    def add_body(self, body: bytes | memoryview, header: BatchHeader) -> None:
        """Add the decompressed records of one visible batch. Raises `InvalidRecord`, `CorruptMessage`."""
        self._add(body, header, 0, len(body))

    def _add(self, body: bytes | memoryview | None, header: BatchHeader, begin: int, stop: int) -> None:
        """Add the records [begin, stop) of `body`; None: of the response."""
        count, length, is_in_place = header.record_count, stop - begin, body is None
        if header.base_offset > OFFSET_MAX - header.last_offset_delta:
            raise CorruptMessage("an offset of more than 63 bits")
        if count <= 0:
            if count or length:
                raise InvalidRecord(f"{count} records in {length} bytes")
            return
        if is_in_place != (self._bodies is None):
            self._finish_buffer()
            self._bodies = None if is_in_place else []
        if self._bodies is not None and body is not None:
            begin = self._spans[-1][1] if self._spans else 0
            stop = begin + length
            self._bodies.append(body)
        self._spans.append((begin, stop))
        self._headers.append(header)
        self.bytes += length + count * _RECORD_OVERHEAD_BYTES

    def batch_buffers(self) -> list[BatchBuffer]:
        """Return the buffers of all added batches, in order."""
        self._finish_buffer()
        return self._batch_buffers

    def _finish_buffer(self) -> None:
        if self._spans:
            data = self._view if self._bodies is None else b"".join((*self._bodies, bytes(PADDING_BYTES)))
            self._batch_buffers.append(BatchBuffer(data, self._spans, self._headers))
            self._spans, self._headers = [], []
            self._bodies = None if self._bodies is None else []


def _decompressed(view: memoryview, position: int, header: BatchHeader) -> bytes:
    """Return the decompressed records of the batch at `position`."""
    body = view[position + HEADER_BYTES : position + header.size]
    return decompress(header.codec, body, max(DECOMPRESSED_BYTES_MAX, header.size))


def _split(body: bytes, header: BatchHeader, records_max: int) -> Iterator[tuple[bytes, BatchHeader]]:
    """Yield the records of a batch in parts of at most `records_max`, each with a header that has their number."""
    begin, remaining = 0, header.record_count
    if remaining * RECORD_BYTES_MIN > len(body):
        raise InvalidRecord(f"{remaining} records do not fit in {len(body)} bytes")
    while remaining:
        count = min(records_max, remaining)
        remaining -= count
        try:
            stop = record_end(body, begin, count) if remaining else len(body)
        except IndexError as error:
            raise InvalidRecord("a record is longer than its batch") from error
        yield body[begin:stop], header._replace(record_count=count)
        begin = stop


def _build_record_batch(
    layout: _BatchLayout, topic: str, partition: int, start: int, end: int, columns: Sequence[str]
) -> Iterator[pa.RecordBatch]:
    """Build one Arrow record batch from the grouped batches; yields nothing if there are no rows."""
    parts: list[tuple[BatchBuffer, RecordIndex]] = []
    for batches in layout.batch_buffers():
        try:
            index = build_record_index(batches)
        except InvalidRecord as error:
            raise InvalidRecord(_error_message(topic, partition, batches, error)) from error
        first, last = np.searchsorted(index.offset, [start, end]).tolist()
        if last > first:
            parts.append((batches, index.rows(first, last)))
    if not parts:
        return
    try:
        arrays = [_build_column(name, parts, topic, partition) for name in columns]
    except InvalidRecord as error:
        raise InvalidRecord(_error_message(topic, partition, parts[0][0], error)) from error
    yield pa.RecordBatch.from_arrays(arrays, schema=record_schema(columns))


def _error_message(topic: str, partition: int, batches: BatchBuffer, error: InvalidRecord) -> str:
    first, last = batches.headers[0].base_offset, batches.headers[-1].last_offset
    return f"{topic}-{partition} from offset {first} to {last}: {error}"


def _build_column(
    name: str, parts: Sequence[tuple[BatchBuffer, RecordIndex]], topic: str, partition: int
) -> pa.Array:
    count = sum(len(index.offset) for _, index in parts)
    kind = RECORD_SCHEMA.field(name).type
    if name in ("key", "value"):
        rows = BinaryColumnBuilder()
        for _, index in parts:
            start, length = (
                (index.key_start, index.key_length)
                if name == "key"
                else (index.value_start, index.value_length)
            )
            rows.add(index.raw, start, length)
        return rows.column(kind)
    if name == "offset":
        return pa.array(concatenate([index.offset for _, index in parts]))
    if name == "timestamp":
        micros = concatenate([_timestamps_us(batches, index) for batches, index in parts])
        return pa.Array.from_buffers(TIMESTAMP_TYPE, count, [None, pa.py_buffer(micros)])
    if name == "timestampType":
        kinds = [
            _header_fields(batches, "timestamp_type")[index.batch].astype(np.int32)
            for batches, index in parts
        ]
        return pa.array(concatenate(kinds))
    if name == "headers":
        return headers_column([index for _, index in parts])
    if name == "lane":
        return pa.nulls(count, kind)
    return pa.repeat(pa.scalar(topic if name == "topic" else partition, kind), count)


def _header_fields(batches: BatchBuffer, field: str) -> NDArray[np.int64]:
    return np.array([getattr(header, field) for header in batches.headers], np.int64)


def _timestamps_us(batches: BatchBuffer, index: RecordIndex) -> NDArray[np.int64]:
    """Timestamp of each record in microseconds: that of its batch (LogAppendTime) or its own (CreateTime)."""
    base, delta = _header_fields(batches, "base_timestamp_ms"), index.timestamp_delta_ms
    by_broker = _header_fields(batches, "timestamp_type") == TimestampType.LOG_APPEND
    if by_broker.any():
        base = np.where(by_broker, _header_fields(batches, "max_timestamp_ms"), base)
        delta = np.where(by_broker[index.batch], 0, delta)
    latest, earliest = max(int(delta.max()), 0), min(int(delta.min()), 0)
    if int(base.max()) + latest > _TIMESTAMP_MS_MAX or int(base.min()) + earliest < -_TIMESTAMP_MS_MAX:
        raise InvalidRecord("a timestamp that does not fit in 64 bits of microseconds")
    micros = (base * 1000)[index.batch]
    micros += delta * 1000
    return micros


# -- headers --------


def headers_column(indexes: Sequence[RecordIndex]) -> pa.Array:
    """Build the column `headers` of all records: lists of (key, value), null for a record without headers. Raises
    `InvalidRecord`.

    Headers are read in rounds: first the first header of every record, then the second one, and so on.
    """
    names, values = BinaryColumnBuilder(), BinaryColumnBuilder()
    counts: list[NDArray[np.int64]] = []
    for index in indexes:
        try:
            counts.append(_add_headers(index, names, values))
        except IndexError as error:
            raise InvalidRecord("a key, value or header is longer than its batch") from error
    count = concatenate(counts)
    if not count.any():
        return pa.nulls(len(count), HEADERS_TYPE)
    ends = np.zeros(len(count) + 1, np.int32)
    np.cumsum(count, out=ends[1:])
    try:
        keys = names.column(pa.string())
    except pa.ArrowInvalid as error:
        raise InvalidRecord("the name of a record header is not UTF-8") from error
    each = pa.StructArray.from_arrays([keys, values.column(pa.binary())], ["key", "value"])
    return pa.ListArray.from_arrays(pa.array(ends), each, type=HEADERS_TYPE, mask=pa.array(count == 0))


def _add_headers(
    index: RecordIndex, names: BinaryColumnBuilder, values: BinaryColumnBuilder
) -> NDArray[np.int64]:
    """Add the names and values of all headers to the builders; returns the number of headers of each record."""
    data, end = index.data, index.end
    count, position = read_varints(data, index.headers_start)
    if (count < 0).any() or (count > (end - position) >> 1).any():  # a header takes at least two bytes
        raise InvalidRecord("more headers than fit in a record")
    if count.any():
        first = np.cumsum(count) - count
        total = int(count.sum())
        name_start, name_length = np.zeros(total, np.int64), np.zeros(total, np.int64)
        value_start, value_length = np.zeros(total, np.int64), np.zeros(total, np.int64)
        rows = np.flatnonzero(count)
        rank = 0
        while rows.size:
            at = first[rows] + rank
            name_length[at], name_start[at] = length, start = read_varints(data, position[rows])
            if (length < 0).any():
                raise InvalidRecord("a record header without a name")
            _check_bounds(start, length, end[rows])
            value_length[at], value_start[at] = length, start = read_varints(data, start + length)
            if (length < -1).any():
                raise InvalidRecord(f"a length of {length.min()} in a record")
            _check_bounds(start, length, end[rows])
            position[rows] = start + np.maximum(length, 0)
            rank += 1
            rows = rows[count[rows] > rank]
        names.add(index.raw, name_start, name_length)
        values.add(index.raw, value_start, value_length)
    if (position != end).any():
        raise InvalidRecord("a record's length does not match its content")
    return count


def _check_bounds(start: NDArray[np.int64], length: NDArray[np.int64], end: NDArray[np.int64]) -> None:
    if (start > end).any() or (length > end - start).any():
        raise InvalidRecord("a key, value or header is longer than its batch")
