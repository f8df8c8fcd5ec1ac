"""Encoder of Arrow columns to Kafka record batches, without a Python object per row.

First the partitions and batch boundaries are determined. Then the encoded fields of all records are built column by
column and joined once with the keys and values, so that the records of all batches are in one buffer. Each batch is a
slice of this buffer with a header.

Invariants:
* Rows of one partition keep their order.
* Decoding a batch returns the keys, values, timestamps (in ms) and headers of its rows.
* The encoded bytes equal those of `wire.batch.record_batch.build_batch` for the same records.
* `partitions_for_keys` equals the partitioner of Kafka's clients: Spark writes a key to the same partition as they do.
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
from mansio.spark.arrow.binary import binary_lengths, binary_offsets
from mansio.spark.arrow.schema import HEADERS_TYPE
from mansio.spark.arrow.varints import encode_varint_rows, zigzag_encode
from mansio.wire.batch.compression import Codec, compress
from mansio.wire.batch.record_batch import (
    HEADER_BYTES,
    MAGIC,
    TRANSACTIONAL_FLAG,
    BatchHeader,
    encode_batch,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    RowRange = tuple[int, int]
    """Half-open range of row numbers."""

BATCH_ROWS_MAX: Final = 8_000
ENCODE_STEP_BYTES_MAX: Final = 64 << 20
"""Maximum size of the records that are encoded at a time, which bounds the memory."""

_RECORD_OVERHEAD_BYTES: Final = 31
"""Maximum size of a record's other fields: record length, attributes, two deltas, lengths of key and value."""
_SEQUENCE_COUNT: Final = 1 << 31


@dataclass(slots=True)
class ProducerSequences:
    """Producer id, producer epoch, and the next sequence number of each partition (KIP-98). `is_transactional`: the
    batches are part of the producer's transaction."""

    producer_id: int
    epoch: int
    next_sequence: dict[int, int] = field(default_factory=dict)
    is_transactional: bool = False

    def take_sequence(self, partition: int, rows: int) -> int:
        """Reserve sequence numbers for a batch of `rows` records; returns the first one."""
        first = self.next_sequence.get(partition, 0)
        self.next_sequence[partition] = (first + rows) % _SEQUENCE_COUNT
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
    """Encode all rows as record batches; the rows of one partition keep their order.

    Columns: `value` (required), `key`, `partition`, `timestamp`, `headers`; key and value may be binary or string. A
    row goes to its `partition`, else to the partition of its key, else to `keyless_partition` (default: random). A row
    without a timestamp gets `now_ms` (default: the current time). A batch has at most `BATCH_ROWS_MAX` rows and at most
    `bytes_max` bytes before compression; a batch of a single row may be larger. `producer` assigns sequence numbers in
    the order in which batches are yielded. Raises `InvalidRequest` for columns of other types and nonexistent
    partitions, `InvalidRecord` for a header without a name.
    """
    columns = _Columns.from_rows(rows, int(time.time() * 1000) if now_ms is None else now_ms)
    keyless = random.randrange(partition_count) if keyless_partition is None else keyless_partition
    partitions = _partition_of_rows(rows, columns.key, partition_count, keyless)
    for begin, end in _split_rows(columns.sizes(), 0, rows.num_rows, ENCODE_STEP_BYTES_MAX, rows.num_rows):
        part, part_partitions = columns.slice(begin, end), partitions[begin:end]
        if (part_partitions != part_partitions[0]).any():
            order = np.argsort(part_partitions, kind="stable")
            part, part_partitions = part.take(order), part_partitions[order]
        yield from _encode_sorted(part, part_partitions, bytes_max - HEADER_BYTES, codec, producer)


@dataclass(frozen=True, slots=True)
class _Columns:
    """Rows as columns of record fields. A value of `headers` is a record's encoded headers, including their count."""

    key: pa.Array | None
    value: pa.Array
    timestamps_ms: NDArray[np.int64]
    headers: pa.Array | None

    @staticmethod
    def from_rows(rows: pa.RecordBatch, now_ms: int) -> _Columns:
        if "value" not in rows.schema.names:
            raise InvalidRequest("rows that are written to a topic need a column 'value'")
        key = _binary_column(rows, "key")
        value = _binary_column(rows, "value")
        assert value is not None
        timestamps_ms = np.full(rows.num_rows, now_ms, np.int64)
        if "timestamp" in rows.schema.names:
            given = _cast_column(rows, "timestamp", pa.timestamp("us", tz="UTC")).cast(pa.int64())
            micros = given.fill_null(0).to_numpy()
            timestamps_ms = np.where(
                given.is_valid().to_numpy(zero_copy_only=False), micros // 1000, timestamps_ms
            )
        headers = (
            _encode_headers(_cast_column(rows, "headers", HEADERS_TYPE))
            if "headers" in rows.schema.names
            else None
        )
        return _Columns(
            None if key is None or key.null_count == len(key) else key, value, timestamps_ms, headers
        )

    def sizes(self) -> NDArray[np.int64]:
        """Upper bound of the encoded size of each row, in bytes."""
        sizes = binary_lengths(self.value)[0] + _RECORD_OVERHEAD_BYTES
        for column in (self.key, self.headers):
            if column is not None:
                sizes += binary_lengths(column)[0]
        return sizes

    def slice(self, begin: int, end: int) -> _Columns:
        key, value, headers = (
            None if column is None else column.slice(begin, end - begin)
            for column in (self.key, self.value, self.headers)
        )
        return _Columns(key, value, self.timestamps_ms[begin:end], headers)

    def take(self, order: NDArray[np.int64]) -> _Columns:
        rows = pa.array(order)
        key, value, headers = (
            None if column is None else column.take(rows) for column in (self.key, self.value, self.headers)
        )
        return _Columns(key, value, self.timestamps_ms[order], headers)


def _cast_column(rows: pa.RecordBatch, name: str, kind: pa.DataType) -> pa.Array:
    column = rows.column(name)
    try:
        return column.cast(kind)
    except pa.ArrowException as error:
        raise InvalidRequest(f"the column {name!r} is {column.type}, and cannot become {kind}") from error


def _binary_column(rows: pa.RecordBatch, name: str) -> pa.Array | None:
    if name not in rows.schema.names:
        return None
    kind = rows.schema.field(name).type
    if not (pa.types.is_null(kind) or pa.types.is_string(kind) or pa.types.is_binary(kind)):
        raise InvalidRequest(f"the column {name!r} is {kind}, and has to be binary or string")
    return _cast_column(rows, name, pa.binary())


def _encode_headers(column: pa.Array) -> pa.Array | None:
    """Return the encoded headers of each row, including their count; None if no row has headers."""
    flat = column.flatten()
    if not len(flat):
        return None
    names = pc.struct_field(flat, "key").cast(pa.binary())
    values = pc.struct_field(flat, "value")
    if names.null_count:
        raise InvalidRecord("a record header without a name")
    name_lengths = encode_varint_rows([zigzag_encode(binary_lengths(names)[0])])
    value_lengths = encode_varint_rows([zigzag_encode(_encoded_lengths(values))])
    each = _join_rows(name_lengths, names, value_lengths, values)
    count = pc.fill_null(pc.list_value_length(column), 0).to_numpy().astype(np.int64)
    ends = np.zeros(len(column) + 1, np.int32)
    np.cumsum(count, out=ends[1:])
    joined_headers = pc.binary_join(pa.ListArray.from_arrays(pa.array(ends), each), b"")
    return _join_rows(encode_varint_rows([zigzag_encode(count)]), joined_headers)


def _join_rows(*columns: pa.Array | pa.Scalar) -> pa.Array:
    """Concatenate the values of each row; null is treated as empty."""
    return pc.binary_join_element_wise(*columns, b"", null_handling="replace", null_replacement=b"")


def _encoded_lengths(column: pa.Array) -> NDArray[np.int64]:
    """Return the length of each value as a record encodes it: -1 for null."""
    lengths, null = binary_lengths(column)
    if null is not None:
        lengths[null] = -1
    return lengths


def _partition_of_rows(
    rows: pa.RecordBatch, key: pa.Array | None, partition_count: int, keyless: int
) -> NDArray[np.int32]:
    """Return the partition of each row."""
    partitions = np.full(rows.num_rows, keyless, np.int32)
    if key is not None:
        partitions = partitions_for_keys(key, partition_count)
        if key.null_count:
            partitions[key.is_null().to_numpy(zero_copy_only=False)] = keyless
    if "partition" in rows.schema.names:
        named = _cast_column(rows, "partition", pa.int32())
        valid = named.is_valid().to_numpy(zero_copy_only=False)
        partitions = np.where(valid, named.fill_null(0).to_numpy(), partitions)
    wrong = partitions[(partitions < 0) | (partitions >= partition_count)]
    if wrong.size:
        raise InvalidRequest(f"a row names partition {wrong[0]} of a topic that has {partition_count}")
    return partitions


def _split_rows(
    sizes: NDArray[np.int64], begin: int, end: int, bytes_max: int, rows_max: int
) -> Iterator[RowRange]:
    """Split rows [begin, end) into ranges of at most `rows_max` rows and `bytes_max` bytes. A range has at least one
    row, even if this row is larger.
    """
    after = np.cumsum(sizes[begin:end])
    done, at = 0, 0
    while at < len(after):
        fits = int(np.searchsorted(after, done + bytes_max, side="right"))
        stop = min(max(fits, at + 1), at + rows_max)
        yield begin + at, begin + stop
        done, at = int(after[stop - 1]), stop


def _encode_sorted(
    columns: _Columns,
    partitions: NDArray[np.int32],
    bytes_max: int,
    codec: Codec,
    producer: ProducerSequences | None,
) -> Iterator[EncodedBatch]:
    """Encode rows that are sorted by partition as record batches."""
    sizes, timestamps_ms = columns.sizes(), columns.timestamps_ms
    edges = [0, *(np.flatnonzero(np.diff(partitions)) + 1).tolist(), len(partitions)]
    row_ranges = [
        row_range
        for begin, end in pairwise(edges)
        for row_range in _split_rows(sizes, begin, end, bytes_max, BATCH_ROWS_MAX)
    ]
    first = np.repeat([begin for begin, _ in row_ranges], [end - begin for begin, end in row_ranges])
    bodies = _encode_records(
        columns, np.arange(len(timestamps_ms)) - first, timestamps_ms - timestamps_ms[first]
    )
    ends, data = binary_offsets(bodies).tolist(), memoryview(bodies.buffers()[2])
    for begin, end in row_ranges:
        partition, count = int(partitions[begin]), end - begin
        body = data[ends[begin] : ends[end]]
        producer_id, epoch, sequence, attributes = -1, -1, -1, int(codec)
        if producer is not None:
            producer_id, epoch = producer.producer_id, producer.epoch
            attributes |= TRANSACTIONAL_FLAG if producer.is_transactional else 0
            sequence = producer.take_sequence(partition, count)
        header = BatchHeader(
            0,
            0,
            -1,
            MAGIC,
            0,
            attributes,
            count - 1,
            int(timestamps_ms[begin]),
            int(timestamps_ms[begin:end].max()),
            producer_id,
            epoch,
            sequence,
            count,
        )
        yield EncodedBatch(partition, encode_batch(header, compress(codec, body) if codec else body), count)


def _encode_records(
    columns: _Columns, offset_deltas: NDArray[np.int64], timestamp_deltas_ms: NDArray[np.int64]
) -> pa.Array:
    """Encode the record of each row."""
    value_lengths = _encoded_lengths(columns.value)
    overhead = [
        zigzag_encode(np.zeros_like(offset_deltas)),
        zigzag_encode(timestamp_deltas_ms),
        zigzag_encode(offset_deltas),
    ]
    size = np.maximum(value_lengths, 0)
    size += 1 if columns.headers is None else binary_lengths(columns.headers)[0]
    tail = pa.scalar(b"\0", pa.binary()) if columns.headers is None else columns.headers
    of_value = zigzag_encode(value_lengths)
    if columns.key is None:
        overhead += [zigzag_encode(np.full_like(offset_deltas, -1)), of_value]
        middle = [columns.value, tail]
    else:
        key_lengths = _encoded_lengths(columns.key)
        size += np.maximum(key_lengths, 0) + of_value[1]
        overhead.append(zigzag_encode(key_lengths))
        middle = [columns.key, encode_varint_rows([of_value]), columns.value, tail]
    size += sum(width for _, width in overhead)
    return _join_rows(encode_varint_rows([zigzag_encode(size), *overhead]), *middle)


# -- partitioner --------


MURMUR2_SEED: Final = np.uint32(0x9747B28C)
MURMUR2_MULTIPLIER: Final = np.uint32(0x5BD1E995)
_TAIL_MASKS: Final = np.array([0, 0xFF, 0xFFFF, 0xFFFFFF], np.uint32)
_PADDING_BYTES: Final = 8
"""Padding after the last key, so that four bytes can be read at each of its bytes."""


def partitions_for_keys(keys: pa.Array, count: int) -> NDArray[np.int32]:
    """Return the partition of each key (binary or string) in a topic with `count` partitions, as Kafka's default
    partitioner computes it (murmur2). Null is treated as an empty key.
    """
    hashed = _murmur2(keys.cast(pa.binary()).fill_null(b"")) & np.uint32(0x7FFFFFFF)
    return (hashed % np.uint32(count)).astype(np.int32)


def _murmur2(keys: pa.Array) -> NDArray[np.uint32]:
    """Return the murmur2 hash of each key; null keys are not allowed."""
    offsets = binary_offsets(keys).astype(np.int64)
    first, data = int(offsets[0]), keys.buffers()[2]
    key_bytes = b"" if data is None else memoryview(data)[first : int(offsets[-1])]
    padded = b"".join((key_bytes, bytes(_PADDING_BYTES)))
    words: NDArray[np.uint32] = np.ndarray((len(padded) - 3,), "<u4", buffer=padded, strides=(1,))
    start, length = offsets[:-1] - first, np.diff(offsets)
    hashed = MURMUR2_SEED ^ length.astype(np.uint32)
    rows = np.arange(len(start))
    position = 0
    while (rows := rows[length[rows] >= position + 4]).size:
        mixed = words[start[rows] + position] * MURMUR2_MULTIPLIER
        mixed ^= mixed >> np.uint32(24)
        mixed *= MURMUR2_MULTIPLIER
        hashed[rows] = hashed[rows] * MURMUR2_MULTIPLIER ^ mixed
        position += 4
    remainder = length & 3
    with_remainder = np.flatnonzero(remainder)
    tail = (
        words[start[with_remainder] + (length[with_remainder] & ~3)] & _TAIL_MASKS[remainder[with_remainder]]
    )
    hashed[with_remainder] = (hashed[with_remainder] ^ tail) * MURMUR2_MULTIPLIER
    hashed ^= hashed >> np.uint32(13)
    hashed *= MURMUR2_MULTIPLIER
    return hashed ^ hashed >> np.uint32(15)
