"""Compression codecs of record batches: gzip, snappy, lz4, zstd, with bounded decompression.

A batch of a few bytes can decompress to gigabytes. `decompress` therefore computes an upper bound of the output size
from the compressed bytes (lengths and block headers) before it allocates, or decompresses in steps (gzip), and raises
`DecompressedTooLarge` above the caller's limit. Bytes that cannot be decompressed raise `DecompressionFailed`.

Formats, as Kafka's clients use them:
  gzip    RFC 1952; several members are allowed.
  snappy  written as by the Java client ("xerial": a header, then raw blocks of 32 KiB, each with its length); read in
          that format and as one raw block (librdkafka).
  lz4     one LZ4 frame, written with independent blocks and without content size, because the Java client supports
          nothing else; read with and without content size, checksums and linked blocks.
  zstd    frames with or without content size, skippable frames between them.

Invariant: the result of `decompress` is at most `output_bytes_max` long, and nothing much longer was allocated.
"""

from __future__ import annotations

import struct
import zlib
from enum import IntEnum
from itertools import repeat
from struct import Struct
from typing import TYPE_CHECKING, Final

import cramjam

from mansio.errors import (
    CorruptMessage,
    DecompressedTooLarge,
    DecompressionFailed,
    InvalidRecord,
    UnsupportedCompression,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from mansio.ports import Buffer


class Codec(IntEnum):
    """Compression codec of a record batch: the value of the three low bits of its attributes."""

    NONE = 0
    GZIP = 1
    SNAPPY = 2
    LZ4 = 3
    ZSTD = 4


DECOMPRESSED_BYTES_MAX: Final = 128 << 20
"""Upper bound of the decompressed size of a batch: brokers refuse larger ones at produce, every reader reads up to it.
"""

_LITTLE_16: Final = Struct("<H")
_LITTLE_32: Final = Struct("<I")
_LITTLE_64: Final = Struct("<Q")
_BIG_32: Final = Struct(">I")

GZIP_RATIO_MAX: Final = 1032
"""Upper bound of the decompressed size of one byte of a gzip stream."""
_GZIP_PIECE_BYTES: Final = 64 * 1024
"""Input of one call of zlib, which copies all bytes after the end of a member."""
_GZIP_MEMBERS_MAX: Final = 10_000
"""Limit on the gzip members of one batch. Clients write one; even an empty one takes some microseconds to read."""

_XERIAL_MAGIC: Final = b"\x82SNAPPY\x00"
_XERIAL_HEADER: Final = _XERIAL_MAGIC + b"\x00\x00\x00\x01\x00\x00\x00\x01"
_XERIAL_BLOCK_BYTES: Final = 32 * 1024

_LZ4_MAGIC: Final = b"\x04\x22\x4d\x18"
# Version 1, independent blocks, no checksums, no content size; blocks of at most 64 KiB; header checksum.
_LZ4_HEADER: Final = _LZ4_MAGIC + b"\x60\x40\x82"
_LZ4_BLOCK_BYTES: Final = 64 * 1024
_LZ4_UNCOMPRESSED: Final = 0x8000_0000
_LZ4_BLOCK_SIZES: Final = {4: 64 << 10, 5: 256 << 10, 6: 1 << 20, 7: 4 << 20}
_LZ4_RATIO_MAX: Final = 255
_LZ4_LEVEL_MAX: Final = 12
"""Highest level of the library cramjam; Kafka's levels go up to 17."""

_ZSTD_MAGIC: Final = 0xFD2FB528
_ZSTD_SKIPPABLE_MAGIC: Final = 0x184D2A50
_ZSTD_BLOCK_BYTES: Final = 128 * 1024
_ZSTD_LEVEL: Final = 3
_ZSTD_LEVEL_MAX: Final = 19
"""Highest level in use: levels above it take a second and hundreds of megabytes even for a small batch."""

_ESTIMATED_BLOCKS_MAX: Final = 1000
"""Number of blocks that `estimate_decompressed_bytes` reads at most, which takes less than a millisecond."""


def compress(codec: Codec, data: Buffer, *, level: int | None = None) -> bytes:
    """Compress `data` with `codec`, in the format that every Kafka client reads.

    `level`: compression level (KIP-390), None for the codec's default: gzip 1 to 9; lz4 1 to 17, the same from 12 on
    (high compression; None is the fast mode); zstd up to 22, the same from 19 on; ignored by snappy."""
    if codec == Codec.NONE:
        return bytes(data)
    if codec == Codec.GZIP:
        return bytes(cramjam.gzip.compress(data, level=level))
    if codec == Codec.SNAPPY:
        return _compress_xerial(data)
    if codec == Codec.LZ4:
        return _compress_lz4(data, level)
    level = _ZSTD_LEVEL if level is None else min(level, _ZSTD_LEVEL_MAX)
    return bytes(cramjam.zstd.compress(data, level=level))


def decompress(codec: int, data: Buffer, output_bytes_max: int, *, scratch: bytearray | None = None) -> bytes:
    """Decompressed `data`, at most `output_bytes_max` long. `scratch`: a buffer that is used instead of a new one if it
    is large enough; its content is undefined afterwards.

    Raises `DecompressedTooLarge` if it would be longer, `DecompressionFailed` if it cannot be decompressed,
    `UnsupportedCompression` for an unknown codec, and `InvalidRecord` for too many gzip members.
    """
    decompressor = _DECOMPRESSORS.get(codec)
    if decompressor is None:
        raise UnsupportedCompression(f"there is no compression codec {codec}")
    try:
        if codec == Codec.LZ4:
            return _decompress_lz4(data, output_bytes_max, scratch)
        if codec == Codec.ZSTD:
            return _decompress_zstd(data, output_bytes_max, scratch)
        return decompressor(data, output_bytes_max)
    except (CorruptMessage, cramjam.DecompressionError, zlib.error, struct.error, IndexError) as error:
        raise DecompressionFailed(
            f"the records cannot be decompressed ({Codec(codec).name.lower()}): {error}"
        ) from error


def estimate_decompressed_bytes(codec: int, data: Buffer, bytes_max: int) -> int:
    """Upper bound of the size of `data` when decompressed, computed in less than a millisecond; at most `bytes_max`.

    With gzip the result may be too low: it is the length that the stream states for its last member. For bytes that
    cannot be decompressed it is the size of `data`.
    """
    view = memoryview(data)
    stated: int | None = None
    bound = len(view)
    steps = repeat(None, _ESTIMATED_BLOCKS_MAX)
    try:
        if codec == Codec.GZIP:
            bound = min(int(_LITTLE_32.unpack(view[-4:])[0]), len(view) * GZIP_RATIO_MAX)
        elif codec == Codec.SNAPPY:
            bound = _snappy_output_bytes(view, steps)
        elif codec == Codec.LZ4:
            stated, bound = _lz4_output_bytes(view, steps)
        elif codec == Codec.ZSTD:
            stated, bound = _zstd_output_bytes(view, steps)
    except StopIteration:
        return bytes_max
    except (CorruptMessage, cramjam.DecompressionError, struct.error, IndexError):
        return min(len(view), bytes_max)
    return min(bound if stated is None else min(stated, bound), bytes_max)


def _too_long(output_bytes_max: int) -> DecompressedTooLarge:
    return DecompressedTooLarge(f"the records take more than {output_bytes_max} bytes when decompressed")


def _decompress_none(data: Buffer, output_bytes_max: int) -> bytes:
    if len(data) > output_bytes_max:
        raise _too_long(output_bytes_max)
    return bytes(data)


def _decompress_gzip(data: Buffer, output_bytes_max: int) -> bytes:
    view = memoryview(data)
    parts: list[bytes] = []
    members = position = 0
    remaining = output_bytes_max
    while position < len(view):
        members += 1
        if members > _GZIP_MEMBERS_MAX:
            raise InvalidRecord(f"the records are in more than {_GZIP_MEMBERS_MAX} gzip members")
        member = zlib.decompressobj(wbits=31)
        while not member.eof:
            piece = view[position : position + _GZIP_PIECE_BYTES]
            if not piece:
                raise CorruptMessage("the gzip stream ends too early")
            # One byte more than allowed distinguishes "exactly full" from "too long".
            part = member.decompress(piece, remaining + 1)
            remaining -= len(part)
            if remaining < 0:
                raise _too_long(output_bytes_max)
            parts.append(part)
            position += len(piece) - len(member.unused_data)
    if not members:
        raise CorruptMessage("the gzip stream is empty")
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _decompress_snappy(data: Buffer, output_bytes_max: int) -> bytes:
    if bytes(data[:8]) != _XERIAL_MAGIC:
        if cramjam.snappy.decompress_raw_len(data) > output_bytes_max:
            raise _too_long(output_bytes_max)
        return bytes(cramjam.snappy.decompress_raw(data))
    view = memoryview(data)
    parts: list[bytes] = []
    remaining = output_bytes_max
    position = len(_XERIAL_HEADER)
    if len(view) < position:
        raise CorruptMessage("the snappy header is incomplete")
    while position < len(view):
        (length,) = _BIG_32.unpack_from(view, position)
        position += 4
        block = view[position : position + length]
        if len(block) < length or not length:
            raise CorruptMessage("a snappy block is longer than the batch, or empty")
        position += length
        remaining -= cramjam.snappy.decompress_raw_len(block)
        if remaining < 0:
            raise _too_long(output_bytes_max)
        parts.append(bytes(cramjam.snappy.decompress_raw(block)))
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _snappy_output_bytes(view: memoryview, steps: Iterator[None]) -> int:
    """Decompressed size of `view`. Takes one item of `steps` per block, and raises `StopIteration` after the last."""
    if bytes(view[:8]) != _XERIAL_MAGIC:
        return int(cramjam.snappy.decompress_raw_len(view))
    total = 0
    position = len(_XERIAL_HEADER)
    while position < len(view):
        next(steps)
        (length,) = _BIG_32.unpack_from(view, position)
        position += 4
        # The length is at the beginning of the block, in at most five bytes.
        total += cramjam.snappy.decompress_raw_len(view[position : position + min(length, 5)])
        position += length
    return total


def _decompress_lz4(data: Buffer, output_bytes_max: int, scratch: bytearray | None = None) -> bytes:
    stated, bound = _lz4_output_bytes(memoryview(data), repeat(None))
    return _decompress_into(cramjam.lz4.decompress_into, data, stated, bound, output_bytes_max, scratch)


def _decompress_zstd(data: Buffer, output_bytes_max: int, scratch: bytearray | None = None) -> bytes:
    stated, bound = _zstd_output_bytes(memoryview(data), repeat(None))
    return _decompress_into(cramjam.zstd.decompress_into, data, stated, bound, output_bytes_max, scratch)


def _decompress_into(
    decompress_into: Callable[[Buffer, Buffer], int],
    data: Buffer,
    stated: int | None,
    bound: int,
    output_bytes_max: int,
    scratch: bytearray | None,
) -> bytes:
    """Decompress `data` into a buffer of the size that the frame states, or else of the upper bound."""
    if stated is not None and stated > output_bytes_max:
        raise _too_long(output_bytes_max)
    size = min(bound if stated is None else stated, bound, output_bytes_max)
    out = memoryview(scratch)[:size] if scratch is not None and size <= len(scratch) else bytearray(size)
    try:
        length = decompress_into(data, out)
    except cramjam.DecompressionError as error:
        if stated is None and bound > output_bytes_max and "whole buffer" in str(error):
            raise _too_long(output_bytes_max) from error
        raise
    return bytes(memoryview(out)[:length])


def _lz4_output_bytes(view: memoryview, steps: Iterator[None]) -> tuple[int | None, int]:
    """(stated content size or None, upper bound) of the single LZ4 frame in `view`. Takes one item of `steps` per
    block."""
    if bytes(view[:4]) != _LZ4_MAGIC:
        raise CorruptMessage("the records do not begin with an LZ4 frame")
    flags, descriptor = view[4], view[5]
    block_bytes = _LZ4_BLOCK_SIZES.get(descriptor >> 4 & 7)
    if flags >> 6 != 1 or flags & 1 or block_bytes is None:
        raise CorruptMessage(
            "an LZ4 frame of another version, with a dictionary, or of an unknown block size"
        )
    position = 7
    stated: int | None = None
    if flags & 0x08:
        (stated,) = _LITTLE_64.unpack_from(view, 6)
        position += 8
    checksum_bytes = 4 if flags & 0x10 else 0
    bound = 0
    while True:
        next(steps)
        (word,) = _LITTLE_32.unpack_from(view, position)
        position += 4
        if word == 0:
            break
        length = word & ~_LZ4_UNCOMPRESSED
        bound += length if word & _LZ4_UNCOMPRESSED else min(block_bytes, length * _LZ4_RATIO_MAX)
        position += length + checksum_bytes
    position += 4 if flags & 0x04 else 0
    if position != len(view):
        raise CorruptMessage("the LZ4 frame does not end with the batch")
    return stated, bound


def _zstd_output_bytes(view: memoryview, steps: Iterator[None]) -> tuple[int | None, int]:
    """(stated content size or None, upper bound) of the zstd frames in `view`. Takes one item of `steps` per frame and
    block."""
    position = 0
    stated: int | None = 0
    bound = 0
    while position < len(view):
        next(steps)
        (magic,) = _LITTLE_32.unpack_from(view, position)
        position += 4
        if magic & 0xFFFF_FFF0 == _ZSTD_SKIPPABLE_MAGIC:
            (length,) = _LITTLE_32.unpack_from(view, position)
            position += 4 + length
            continue
        if magic != _ZSTD_MAGIC:
            raise CorruptMessage("the records do not begin with a zstd frame")
        frame_stated, position, has_checksum = _zstd_frame_header(view, position)
        frame_bound, position = _zstd_blocks(view, position, steps)
        position += 4 if has_checksum else 0
        stated = None if stated is None or frame_stated is None else stated + frame_stated
        bound += frame_bound
    if position != len(view) or not position:
        raise CorruptMessage("the zstd frames do not end with the batch")
    return stated, bound


def _zstd_frame_header(view: memoryview, position: int) -> tuple[int | None, int, bool]:
    """(content size or None, position of the first block, whether a checksum follows the blocks); RFC 8878, 3.1."""
    descriptor = view[position]
    single_segment = descriptor & 0x20
    position += 1 + (0 if single_segment else 1) + (0, 1, 2, 4)[descriptor & 3]
    has_checksum = bool(descriptor & 0x04)
    size_flag = descriptor >> 6
    if size_flag == 0:
        return (
            (view[position], position + 1, has_checksum) if single_segment else (None, position, has_checksum)
        )
    if size_flag == 1:
        return int(_LITTLE_16.unpack_from(view, position)[0]) + 256, position + 2, has_checksum
    if size_flag == 2:
        return int(_LITTLE_32.unpack_from(view, position)[0]), position + 4, has_checksum
    return int(_LITTLE_64.unpack_from(view, position)[0]), position + 8, has_checksum


def _zstd_blocks(view: memoryview, position: int, steps: Iterator[None]) -> tuple[int, int]:
    """(upper bound of the content of one frame's blocks, position after the last block)."""
    bound = 0
    while True:
        next(steps)
        header = view[position] | view[position + 1] << 8 | view[position + 2] << 16
        kind, length = header >> 1 & 3, header >> 3
        position += 3
        if kind == 3 or position > len(view):
            raise CorruptMessage("a zstd block of an unknown kind")
        if kind == 2:  # compressed: at most a full block
            bound += _ZSTD_BLOCK_BYTES
            position += length
        else:  # raw, or one byte repeated `length` times
            bound += length
            position += length if kind == 0 else 1
        if header & 1:
            return bound, position


def _compress_xerial(data: Buffer) -> bytes:
    view = memoryview(data)
    parts = [_XERIAL_HEADER]
    # Empty data is written as one empty block, because readers do not recognize a header without a block.
    for start in range(0, max(len(view), 1), _XERIAL_BLOCK_BYTES):
        block = bytes(cramjam.snappy.compress_raw(view[start : start + _XERIAL_BLOCK_BYTES]))
        parts += (_BIG_32.pack(len(block)), block)
    return b"".join(parts)


def _compress_lz4(data: Buffer, level: int | None) -> bytes:
    view = memoryview(data)
    parts: list[Buffer] = [_LZ4_HEADER]
    for start in range(0, len(view), _LZ4_BLOCK_BYTES):
        plain = view[start : start + _LZ4_BLOCK_BYTES]
        if level is None:
            block = bytes(cramjam.lz4.compress_block(plain, store_size=False))
        else:
            block = _compress_lz4_block(plain, level)
        if len(block) < len(plain):
            parts += (_LITTLE_32.pack(len(block)), block)
        else:
            parts += (_LITTLE_32.pack(len(plain) | _LZ4_UNCOMPRESSED), plain)
    parts.append(b"\x00\x00\x00\x00")
    return b"".join(parts)


def _compress_lz4_block(plain: Buffer, level: int) -> bytes:
    """One LZ4 block with high compression, taken from a frame: the library has levels for frames only, and writes these
    few bytes as one block."""
    frame = bytes(cramjam.lz4.compress(plain, level=min(level, _LZ4_LEVEL_MAX)))
    start = 15 if frame[4] & 0x08 else 7
    (word,) = _LITTLE_32.unpack_from(frame, start)
    return bytes(plain) if word & _LZ4_UNCOMPRESSED else frame[start + 4 : start + 4 + word]


_DECOMPRESSORS: Final[dict[int, Callable[[Buffer, int], bytes]]] = {
    Codec.NONE: _decompress_none,
    Codec.GZIP: _decompress_gzip,
    Codec.SNAPPY: _decompress_snappy,
    Codec.LZ4: _decompress_lz4,
    Codec.ZSTD: _decompress_zstd,
}
