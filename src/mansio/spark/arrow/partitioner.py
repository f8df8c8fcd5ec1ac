"""Which partition each key of a column belongs to, as Kafka's default partitioner says: murmur2, all rows at once.

Always true: the same answer as `mansio.client.producer.partitioner.partition_for_key`, so that a key written by
Spark lands where every Kafka client writes it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa

from mansio.spark.arrow.binary import offsets_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

SEED: Final = np.uint32(0x9747B28C)
MULTIPLIER: Final = np.uint32(0x5BD1E995)
_TAIL_MASKS: Final = np.array([0, 0xFF, 0xFFFF, 0xFFFFFF], np.uint32)
_PADDING_BYTES: Final = 8
"""Beyond the last key, so that the word at its end can be read whole."""


def partition_for_keys(keys: pa.Array, count: int) -> NDArray[np.int32]:
    """The partition of each key (binary or string) in a topic of `count` partitions. Null counts as empty."""
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
