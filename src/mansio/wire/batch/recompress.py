"""Recompression of a record batch with another codec (Kafka `LogValidator`, KIP-390).

The records are decompressed and compressed again as bytes; they are not decoded. No state is kept.

Invariant: only the length, the CRC and the codec change. Offsets, sequence, producer, timestamps, other attributes and
the decompressed records stay the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from mansio.wire.batch.compression import Codec, compress, decompress
from mansio.wire.batch.record_batch import CODEC_MASK, HEADER_BYTES, check_batch, encode_batch
from mansio.wire.batch.record_reader import check_records

if TYPE_CHECKING:
    from mansio.ports import Buffer


class Compression(NamedTuple):
    """A compression codec and its level; `level` None: the codec's default."""

    codec: Codec
    level: int | None = None


def recompress(batch: Buffer, target: Compression, *, output_bytes_max: int) -> bytes:
    """Return the batch with its records compressed with the codec and level of `target`, even if they have that codec
    already.

    Raises the errors of `check_batch` and `check_content`.
    """
    header = check_batch(batch)
    records = decompress(header.codec, memoryview(batch)[HEADER_BYTES:], output_bytes_max)
    check_records(records, header.record_count)
    attributes = header.attributes & ~CODEC_MASK | target.codec
    return encode_batch(
        header._replace(attributes=attributes), compress(target.codec, records, level=target.level)
    )
