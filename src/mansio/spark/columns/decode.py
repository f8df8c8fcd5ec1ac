"""A fetch answer -> Arrow columns, no object per record.

Batches are judged (`wire.visible`), opened where they are compressed, and laid out in stretches: many batches in one
buffer. All batches of a stretch are read at once (`scan`), and only the columns that were asked for are made. Plain
batches are read where they lie in the answer; keys and values are copied once, into their columns.

Always true: a record batch holds exactly the visible records with offsets from `start` to below `end`, in order, of the
columns that were asked for; it refers to nothing of the answer. Headers are looked at only if they are asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa

from mansio.errors import CorruptMessage, InvalidRecord
from mansio.spark.columns.binary import BinaryRows, joined
from mansio.spark.columns.headers import headers_column
from mansio.spark.columns.scan import ROOM_BYTES, Places, Stretch, find_places
from mansio.spark.columns.schema import DEFAULT_COLUMNS, RECORD_SCHEMA, TIMESTAMP_TYPE, record_schema
from mansio.wire.compression import decompress
from mansio.wire.records import HEADER_BYTES, TimestampType
from mansio.wire.visible import visible_batches

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from mansio.wire.records import BatchHeader

OFFSET_MAX: Final = (1 << 63) - 1
OPENED_BYTES_MAX: Final = 64 << 20
"""A compressed batch that is larger than this when opened is refused, unless the caller says otherwise."""

_RECORD_BYTES: Final = 64
"""What a record takes in memory beside its bytes."""
_TIMESTAMP_MS_MAX: Final = ((1 << 63) - 1) // 1000


def decode_parts(
    buffer: bytes | memoryview,
    topic: str,
    partition: int,
    start: int = 0,
    end: int = OFFSET_MAX,
    columns: Sequence[str] = DEFAULT_COLUMNS,
    *,
    aborted: Sequence[tuple[int, int]] = (),
    read_committed: bool = True,
    opened_bytes_max: int = OPENED_BYTES_MAX,
) -> Iterator[pa.RecordBatch]:
    """The records of one fetch answer with offsets from `start` to below `end`, as record batches of `columns`.

    For each not much more than `opened_bytes_max` bytes are opened: a small answer may hold very much when it is
    compressed. None when there are no rows. `aborted` are (producer id, first offset) as the answer says them. A batch
    that is cut off at the end of `buffer` is left for the next answer. Raises `CorruptMessage`, `InvalidRecord`,
    `UnsupportedCompression` and `UnsupportedMessageFormat`, with topic, partition and offset where they are known.
    """
    view = memoryview(buffer)
    layout = _Layout(view)
    for position, header, is_visible in visible_batches(
        view, (topic, partition), start, aborted, read_committed
    ):
        if header.base_offset >= end:
            break
        if not is_visible:
            continue
        try:
            layout.add(position, header, opened_bytes_max)
        except (InvalidRecord, CorruptMessage) as error:
            raise type(error)(f"{topic}-{partition} at offset {header.base_offset}: {error}") from error
        if layout.bytes >= opened_bytes_max:
            yield from _table(layout, topic, partition, start, end, columns)
            layout = _Layout(view)
    yield from _table(layout, topic, partition, start, end, columns)


class _Layout:
    """Batches on their way into stretches: those that can stay in the answer do, the others are put together."""

    def __init__(self, view: memoryview) -> None:
        self.bytes = 0
        """What was laid out so far, with what rows take beside their bytes."""
        self._view = view
        self._size = len(view)
        self._stretches: list[Stretch] = []
        self._spans: list[tuple[int, int]] = []
        self._headers: list[BatchHeader] = []
        self._bodies: list[bytes | memoryview] | None = None
        """Bodies that are not read in the answer; None while batches are."""

    def add(self, position: int, header: BatchHeader, opened_bytes_max: int) -> None:
        """One visible batch. Raises `InvalidRecord`, `CorruptMessage`, `UnsupportedCompression`."""
        begin, stop, count = position + HEADER_BYTES, position + header.size, header.record_count
        length, codec = stop - begin, header.codec
        body: bytes | memoryview | None = None
        is_in_place = not codec and stop + ROOM_BYTES <= self._size
        if not is_in_place:
            body = self._view[begin:stop]
            if codec:
                if count * _RECORD_BYTES > opened_bytes_max:
                    raise InvalidRecord(
                        f"{count} records in one batch are more than {opened_bytes_max} bytes of memory allow"
                    )
                body = decompress(codec, body, max(opened_bytes_max, header.size))
            length = len(body)
        if header.base_offset > OFFSET_MAX - header.last_offset_delta:
            raise CorruptMessage("an offset of more than 63 bits")
        if count <= 0:
            if count or length:
                raise InvalidRecord(f"{count} records in {length} bytes")
            return
        if is_in_place != (self._bodies is None):
            self._close()
            self._bodies = None if is_in_place else []
        if self._bodies is not None and body is not None:
            begin = self._spans[-1][1] if self._spans else 0
            stop = begin + length
            self._bodies.append(body)
        self._spans.append((begin, stop))
        self._headers.append(header)
        self.bytes += length + count * _RECORD_BYTES

    def stretches(self) -> list[Stretch]:
        """All that was added, in order."""
        self._close()
        return self._stretches

    def _close(self) -> None:
        if self._spans:
            data = self._view if self._bodies is None else b"".join((*self._bodies, bytes(ROOM_BYTES)))
            self._stretches.append(Stretch(data, self._spans, self._headers))
            self._spans, self._headers = [], []


def _table(
    layout: _Layout, topic: str, partition: int, start: int, end: int, columns: Sequence[str]
) -> Iterator[pa.RecordBatch]:
    """One record batch of what was laid out, or none if there is nothing in it."""
    parts: list[tuple[Stretch, Places]] = []
    for stretch in layout.stretches():
        try:
            places = find_places(stretch)
        except InvalidRecord as error:
            raise InvalidRecord(_where(topic, partition, stretch, error)) from error
        first, last = np.searchsorted(places.offset, [start, end]).tolist()
        if last > first:
            parts.append((stretch, places.rows(first, last)))
    if not parts:
        return
    try:
        arrays = [_column(name, parts, topic, partition) for name in columns]
    except InvalidRecord as error:
        raise InvalidRecord(_where(topic, partition, parts[0][0], error)) from error
    yield pa.RecordBatch.from_arrays(arrays, schema=record_schema(columns))


def _where(topic: str, partition: int, stretch: Stretch, error: InvalidRecord) -> str:
    first, last = stretch.headers[0].base_offset, stretch.headers[-1].last_offset
    return f"{topic}-{partition} from offset {first} to {last}: {error}"


def _column(name: str, parts: Sequence[tuple[Stretch, Places]], topic: str, partition: int) -> pa.Array:
    count = sum(len(places.offset) for _, places in parts)
    kind = RECORD_SCHEMA.field(name).type
    if name in ("key", "value"):
        rows = BinaryRows()
        for _, places in parts:
            start, length = (
                (places.key_start, places.key_length)
                if name == "key"
                else (places.value_start, places.value_length)
            )
            rows.add(places.raw, places.words, start, length)
        return rows.column(kind)
    if name == "offset":
        return pa.array(joined([places.offset for _, places in parts]))
    if name == "timestamp":
        micros = joined([_timestamps_us(stretch, places) for stretch, places in parts])
        return pa.Array.from_buffers(TIMESTAMP_TYPE, count, [None, pa.py_buffer(micros)])
    if name == "timestampType":
        kinds = [
            _per_batch(stretch, "timestamp_type")[places.batch].astype(np.int32) for stretch, places in parts
        ]
        return pa.array(joined(kinds))
    if name == "headers":
        return headers_column([places for _, places in parts])
    if name == "lane":
        return pa.nulls(count, kind)
    return pa.repeat(pa.scalar(topic if name == "topic" else partition, kind), count)


def _per_batch(stretch: Stretch, field: str) -> NDArray[np.int64]:
    return np.array([getattr(header, field) for header in stretch.headers], np.int64)


def _timestamps_us(stretch: Stretch, places: Places) -> NDArray[np.int64]:
    """The timestamp of each record, in microseconds: the broker's one for the whole batch, or the producer's own."""
    base, delta = _per_batch(stretch, "base_timestamp_ms"), places.stamp_delta
    by_broker = _per_batch(stretch, "timestamp_type") == TimestampType.LOG_APPEND
    if by_broker.any():
        base = np.where(by_broker, _per_batch(stretch, "max_timestamp_ms"), base)
        delta = np.where(by_broker[places.batch], 0, delta)
    latest, earliest = max(int(delta.max()), 0), min(int(delta.min()), 0)
    if int(base.max()) + latest > _TIMESTAMP_MS_MAX or int(base.min()) + earliest < -_TIMESTAMP_MS_MAX:
        raise InvalidRecord("a timestamp that no table can hold")
    micros = (base * 1000)[places.batch]
    micros += delta * 1000
    return micros
