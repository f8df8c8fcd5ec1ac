"""Recompression of a record batch with another codec (Kafka `LogValidator`, KIP-390).

Pure. The records are decompressed and compressed again as bytes; they are not decoded.

Invariant: everything but length, CRC and codec is unchanged: offsets, sequence, producer, timestamps, other attributes
and the records themselves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from mansio.wire.batch.compression import Codec, compress, decompress
from mansio.wire.batch.record_batch import CODEC_MASK, HEADER_BYTES, check_batch, encode_batch

if TYPE_CHECKING:
    from mansio.ports import Buffer


class Compression(NamedTuple):
    """A codec and its level; None for the codec's default."""

    codec: Codec
    level: int | None = None


def recompress(batch: Buffer, target: Compression, *, max_output_bytes: int) -> bytes:
    """The batch with its records compressed by `target`, also if they have that codec already.

    The batch is checked as by `check_batch`, whose errors are raised; `InvalidRecord` if the records take more than
    `max_output_bytes` when decompressed, `CorruptMessage` if they cannot be decompressed.
    """
    header = check_batch(batch)
    records = decompress(header.codec, memoryview(batch)[HEADER_BYTES:], max_output_bytes)
    attributes = header.attributes & ~CODEC_MASK | target.codec
    return encode_batch(
        header._replace(attributes=attributes), compress(target.codec, records, level=target.level)
    )
