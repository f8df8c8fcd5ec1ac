"""A stretch of batches as a log holds them, read and checked in one pass: what a follower gets from its leader.

Always true: what is returned is what `records.iterate_batches` and `records.check_stored_batch` together would let
through, header by header.
"""

from __future__ import annotations

from struct import Struct
from typing import TYPE_CHECKING, Final

from crc32c import crc32c

from mansio.errors import CorruptMessage, InvalidRecord, UnsupportedCompression, UnsupportedMessageFormat
from mansio.wire.batch.compression import Codec
from mansio.wire.batch.record_batch import HEADER_BYTES, LENGTH_OFFSET, MAGIC, BatchHeader

if TYPE_CHECKING:
    from mansio.ports import Buffer

_HEADER: Final = Struct(">qiibIhiqqqhii")
_CHECKED_FROM: Final = 21
"""Where the attributes are: the CRC covers them and what is behind them."""
_CODEC_MASK: Final = 0x07
_CODEC_COUNT: Final = len(Codec)
_new_tuple: Final = tuple.__new__  # half the time of `BatchHeader._make`, which counts the fields again


def read_stored_batches(buffer: Buffer) -> tuple[list[BatchHeader], int]:
    """(the headers of all whole batches, their bytes); ends before a partial one, which fetches may have.

    Raises `CorruptMessage` (lengths, CRC), `UnsupportedMessageFormat`, `UnsupportedCompression`, `InvalidRecord`.
    """
    view = memoryview(buffer)
    size = len(view)
    headers: list[BatchHeader] = []
    position = 0
    while position + HEADER_BYTES <= size:
        fields = _HEADER.unpack_from(view, position)
        _, length, _, magic, crc, attributes, last_offset_delta, _, _, _, _, _, count = fields
        if magic != MAGIC:
            raise UnsupportedMessageFormat(f"message format {magic}; only {MAGIC} is kept")
        if length < HEADER_BYTES - LENGTH_OFFSET:
            raise CorruptMessage(f"a batch that claims {length} bytes")
        end = position + LENGTH_OFFSET + length
        if end > size:
            break
        if crc32c(view[position + _CHECKED_FROM : end]) != crc:
            raise CorruptMessage("the CRC-32C of the batch does not match")
        if attributes & _CODEC_MASK >= _CODEC_COUNT:
            raise UnsupportedCompression(f"there is no compression codec {attributes & _CODEC_MASK}")
        if not 0 <= count <= last_offset_delta + 1:
            raise InvalidRecord(f"a batch of {count} records that spans {last_offset_delta + 1} offsets")
        headers.append(_new_tuple(BatchHeader, fields))
        position = end
    return headers, position
