"""Encoder of Arrow columns to record batches, without an object per row.

The bytes around keys and values are built column by column and joined with them once; the data of the result is the
bodies of all batches, one after the other. Partitions and batch boundaries are determined before.

Invariants:
* Rows of one partition keep their order.
* A decoded batch gives the keys, values, timestamps (in ms) and headers of its rows.
* The bytes equal those of `wire.batch.record_batch.build_batch` for the same records.
* `partition_for_keys` equals the client's partitioner, so that a key written by Spark is in the partition of every
  Kafka client.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from mansio.errors import InvalidRecord, InvalidRequest
from mansio.spark.arrow.binary import lengths_of, offsets_of
from mansio.spark.arrow.schema import HEADERS_TYPE
from mansio.spark.arrow.varints import varint_rows, varints_of
from mansio.wire.batch.compression import Codec, compress
from mansio.wire.batch.record_batch import HEADER_BYTES, MAGIC, BatchHeader, encode_batch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    RowRange = tuple[int, int]
    """Half-open range of row numbers."""

BATCH_ROWS_MAX: Final = 8_000
WORK_BYTES_MAX: Final = 64 << 20
"""Maximum size of one encoding step, which bounds its memory."""

_RECORD_OVERHEAD_BYTES: Final = 31
"""Maximum size of a record in addition to key, value and headers: length, attributes, two deltas, two lengths."""
_SEQUENCES: Final = 1 << 31


@dataclass(slots=True)
class ProducerSequences:
    """Producer id, epoch, and the next sequence number of each partition (KIP-98). `encode_batches` assigns numbers in
    the order in which it yields batches.
    """

    producer_id: int
    epoch: int
    next_sequence: dict[int, int] = field(default_factory=dict)

    def take_sequence(self, partition: int, rows: int) -> int:
        first = self.next_sequence.get(partition, 0)
        self.next_sequence[partition] = (first + rows) % _SEQUENCES
        return first


class EncodedBatch(NamedTuple):
    """One encoded record batch of `rows` records for a partition."""

    partition: int
    data: bytes
    rows: int


def encode_batches(
    rows: pa.RecordBatch,
    *,
    partition_count: int,
    bytes_max: int,
    codec: Codec = Codec.NONE,
    producer: ProducerSequences | None = None,
    keyless_partition: int | None = None,
    now_ms: int | None = None,
) -> Iterator[EncodedBatch]:
    """Record batches of all rows; the rows of one partition keep their order.

    Columns: `value` (required), `key`, `partition`, `timestamp`, `headers`; key and value may be binary or string. A
    row goes to its `partition`, else to the partition of its key, else to `keyless_partition` (default: random). A row
    without a timestamp gets `now_ms` (default: the current time). A batch has at most `bytes_max` bytes before
    compression, unless it has one row, and at most 8,000 rows. Raises `InvalidRequest` for columns of other types and
    nonexistent partitions, `InvalidRecord` for a header without a name.
    """
    columns = _Columns.of(rows, int(time.time() * 1000) if now_ms is None else now_ms)
    keyless = random.randrange(partition_count) if keyless_partition is None else keyless_partition
    partitions = _partitions(rows, columns.key, partition_count, keyless)
    for begin, end in _split_rows(columns.sizes(), 0, rows.num_rows, WORK_BYTES_MAX, rows.num_rows):
        part, part_partitions = columns.slice(begin, end), partitions[begin:end]
        if (part_partitions != part_partitions[0]).any():
            order = np.argsort(part_partitions, kind="stable")
            part, part_partitions = part.take(order), part_partitions[order]
        yield from _encode(part, part_partitions, bytes_max - HEADER_BYTES, codec, producer)


@dataclass(frozen=True, slots=True)
class _Columns:
    """Columns of some rows as record fields. `headers`: their encoded bytes, count included."""

    key: pa.Array | None
    value: pa.Array
    stamps: NDArray[np.int64]
    headers: pa.Array | None

    @staticmethod
    def of(rows: pa.RecordBatch, now_ms: int) -> _Columns:
        if "value" not in rows.schema.names:
            raise InvalidRequest("rows that become records need a column 'value'")
        key = _binary(rows, "key")
        value = _binary(rows, "value")
        assert value is not None
        stamps = np.full(rows.num_rows, now_ms, np.int64)
        if "timestamp" in rows.schema.names:
            given = _cast(rows, "timestamp", pa.timestamp("us", tz="UTC")).cast(pa.int64())
            micros = given.fill_null(0).to_numpy()
            stamps = np.where(given.is_valid().to_numpy(zero_copy_only=False), micros // 1000, stamps)
        headers = (
            _header_bytes(_cast(rows, "headers", HEADERS_TYPE)) if "headers" in rows.schema.names else None
        )
        return _Columns(None if key is None or key.null_count == len(key) else key, value, stamps, headers)

    def sizes(self) -> NDArray[np.int64]:
        """Maximum size in bytes of the record of each row."""
        sizes = lengths_of(self.value)[0] + _RECORD_OVERHEAD_BYTES
        for column in (self.key, self.headers):
            if column is not None:
                sizes += lengths_of(column)[0]
        return sizes

    def slice(self, begin: int, end: int) -> _Columns:
        key, value, headers = (
            None if column is None else column.slice(begin, end - begin)
            for column in (self.key, self.value, self.headers)
        )
        return _Columns(key, value, self.stamps[begin:end], headers)

    def take(self, order: NDArray[np.int64]) -> _Columns:
        rows = pa.array(order)
        key, value, headers = (
            None if column is None else column.take(rows) for column in (self.key, self.value, self.headers)
        )
        return _Columns(key, value, self.stamps[order], headers)


def _cast(rows: pa.RecordBatch, name: str, kind: pa.DataType) -> pa.Array:
    column = rows.column(name)
    try:
        return column.cast(kind)
    except pa.ArrowException as error:
        raise InvalidRequest(f"the column {name!r} is {column.type}, and cannot become {kind}") from error


def _binary(rows: pa.RecordBatch, name: str) -> pa.Array | None:
    if name not in rows.schema.names:
        return None
    kind = rows.schema.field(name).type
    if not (pa.types.is_null(kind) or pa.types.is_string(kind) or pa.types.is_binary(kind)):
        raise InvalidRequest(f"the column {name!r} is {kind}, and has to be binary or string")
    return _cast(rows, name, pa.binary())


def _header_bytes(column: pa.Array) -> pa.Array | None:
    """The encoded headers of each row, count included; None if no row has any."""
    flat = column.flatten()
    if not len(flat):
        return None
    names = pc.struct_field(flat, "key").cast(pa.binary())
    values = pc.struct_field(flat, "value")
    if names.null_count:
        raise InvalidRecord("a record header without a name")
    name_lengths = varint_rows([varints_of(lengths_of(names)[0])])
    value_lengths = varint_rows([varints_of(_encoded_lengths(values))])
    each = _join(name_lengths, names, value_lengths, values)
    count = pc.fill_null(pc.list_value_length(column), 0).to_numpy().astype(np.int64)
    ends = np.zeros(len(column) + 1, np.int32)
    np.cumsum(count, out=ends[1:])
    joined_headers = pc.binary_join(pa.ListArray.from_arrays(pa.array(ends), each), b"")
    return _join(varint_rows([varints_of(count)]), joined_headers)


def _join(*columns: pa.Array | pa.Scalar) -> pa.Array:
    """The values of each row concatenated; a null adds nothing."""
    return pc.binary_join_element_wise(*columns, b"", null_handling="replace", null_replacement=b"")


def _encoded_lengths(column: pa.Array) -> NDArray[np.int64]:
    """The encoded lengths: -1 for null."""
    lengths, null = lengths_of(column)
    if null is not None:
        lengths[null] = -1
    return lengths


def _partitions(
    rows: pa.RecordBatch, key: pa.Array | None, partition_count: int, keyless: int
) -> NDArray[np.int32]:
    """The partition of each row."""
    partitions = np.full(rows.num_rows, keyless, np.int32)
    if key is not None:
        partitions = partition_for_keys(key, partition_count)
        if key.null_count:
            partitions[key.is_null().to_numpy(zero_copy_only=False)] = keyless
    if "partition" in rows.schema.names:
        named = _cast(rows, "partition", pa.int32())
        valid = named.is_valid().to_numpy(zero_copy_only=False)
        partitions = np.where(valid, named.fill_null(0).to_numpy(), partitions)
    wrong = partitions[(partitions < 0) | (partitions >= partition_count)]
    if wrong.size:
        raise InvalidRequest(f"a row names partition {wrong[0]} of a topic that has {partition_count}")
    return partitions


def _split_rows(
    sizes: NDArray[np.int64], begin: int, end: int, bytes_max: int, rows_max: int
) -> Iterator[RowRange]:
    """Rows [begin, end) as ranges of at most `bytes_max` bytes and `rows_max` rows, each of at least one row."""
    after = np.cumsum(sizes[begin:end])
    done, at = 0, 0
    while at < len(after):
        fits = int(np.searchsorted(after, done + bytes_max, side="right"))
        stop = min(max(fits, at + 1), at + rows_max)
        yield begin + at, begin + stop
        done, at = int(after[stop - 1]), stop


def _encode(
    columns: _Columns,
    partitions: NDArray[np.int32],
    bytes_max: int,
    codec: Codec,
    producer: ProducerSequences | None,
) -> Iterator[EncodedBatch]:
    """Batches of rows that are sorted by partition."""
    sizes, stamps = columns.sizes(), columns.stamps
    edges = [0, *(np.flatnonzero(np.diff(partitions)) + 1).tolist(), len(partitions)]
    row_ranges = [
        row_range
        for begin, end in pairwise(edges)
        for row_range in _split_rows(sizes, begin, end, bytes_max, BATCH_ROWS_MAX)
    ]
    first = np.repeat([begin for begin, _ in row_ranges], [end - begin for begin, end in row_ranges])
    bodies = _record_bodies(columns, np.arange(len(stamps)) - first, stamps - stamps[first])
    ends, data = offsets_of(bodies).tolist(), memoryview(bodies.buffers()[2])
    for begin, end in row_ranges:
        partition, count = int(partitions[begin]), end - begin
        body = data[ends[begin] : ends[end]]
        producer_id, epoch, sequence = -1, -1, -1
        if producer is not None:
            producer_id, epoch = producer.producer_id, producer.epoch
            sequence = producer.take_sequence(partition, count)
        header = BatchHeader(
            0,
            0,
            -1,
            MAGIC,
            0,
            int(codec),
            count - 1,
            int(stamps[begin]),
            int(stamps[begin:end].max()),
            producer_id,
            epoch,
            sequence,
            count,
        )
        yield EncodedBatch(partition, encode_batch(header, compress(codec, body) if codec else body), count)


def _record_bodies(
    columns: _Columns, offset_delta: NDArray[np.int64], stamp_delta: NDArray[np.int64]
) -> pa.Array:
    """The encoded record of each row."""
    value_lengths = _encoded_lengths(columns.value)
    overhead = [varints_of(np.zeros_like(offset_delta)), varints_of(stamp_delta), varints_of(offset_delta)]
    size = np.maximum(value_lengths, 0)
    size += 1 if columns.headers is None else lengths_of(columns.headers)[0]
    tail = pa.scalar(b"\0", pa.binary()) if columns.headers is None else columns.headers
    of_value = varints_of(value_lengths)
    if columns.key is None:
        overhead += [varints_of(np.full_like(offset_delta, -1)), of_value]
        middle = [columns.value, tail]
    else:
        key_lengths = _encoded_lengths(columns.key)
        size += np.maximum(key_lengths, 0) + of_value[1]
        overhead.append(varints_of(key_lengths))
        middle = [columns.key, varint_rows([of_value]), columns.value, tail]
    size += sum(width for _, width in overhead)
    return _join(varint_rows([varints_of(size), *overhead]), *middle)


# -- partitioner --------


SEED: Final = np.uint32(0x9747B28C)
MULTIPLIER: Final = np.uint32(0x5BD1E995)
_TAIL_MASKS: Final = np.array([0, 0xFF, 0xFFFF, 0xFFFFFF], np.uint32)
_PADDING_BYTES: Final = 8
"""Padding after the last key, so that its last word can be read."""


def partition_for_keys(keys: pa.Array, count: int) -> NDArray[np.int32]:
    """Partition of each key (binary or string) among `count` partitions, as Kafka's default partitioner (murmur2). Null
    counts as empty.
    """
    hashed = _murmur2(keys.cast(pa.binary()).fill_null(b"")) & np.uint32(0x7FFFFFFF)
    return (hashed % np.uint32(count)).astype(np.int32)


def _murmur2(keys: pa.Array) -> NDArray[np.uint32]:
    offsets = offsets_of(keys).astype(np.int64)
    first, data = int(offsets[0]), keys.buffers()[2]
    key_bytes = b"" if data is None else memoryview(data)[first : int(offsets[-1])]
    padded = b"".join((key_bytes, bytes(_PADDING_BYTES)))
    words: NDArray[np.uint32] = np.ndarray((len(padded) - 3,), "<u4", buffer=padded, strides=(1,))
    start, length = offsets[:-1] - first, np.diff(offsets)
    hashed = SEED ^ length.astype(np.uint32)
    rows = np.arange(len(start))
    position = 0
    while (rows := rows[length[rows] >= position + 4]).size:
        mixed = words[start[rows] + position] * MULTIPLIER
        mixed ^= mixed >> np.uint32(24)
        mixed *= MULTIPLIER
        hashed[rows] = hashed[rows] * MULTIPLIER ^ mixed
        position += 4
    remainder = length & 3
    with_remainder = np.flatnonzero(remainder)
    tail = (
        words[start[with_remainder] + (length[with_remainder] & ~3)] & _TAIL_MASKS[remainder[with_remainder]]
    )
    hashed[with_remainder] = (hashed[with_remainder] ^ tail) * MULTIPLIER
    hashed ^= hashed >> np.uint32(13)
    hashed *= MULTIPLIER
    return hashed ^ hashed >> np.uint32(15)
