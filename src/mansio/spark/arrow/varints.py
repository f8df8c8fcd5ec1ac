"""Zigzag varints of record batches (as in Protocol Buffers), read and written as numpy arrays.

Invariants:
* `read_varints` and `encode_varint_rows` use the same encoding as `mansio.wire.batch.record_batch`.
* A number of more than 64 bits raises `InvalidRecord`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa

from mansio.errors import InvalidRecord

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    ZigzagNumbers = tuple[NDArray[np.uint64], NDArray[np.int64]]
    """(zigzag-encoded numbers, width of each one as a varint in bytes)."""

_CONTINUATION_BIT: Final = np.uint32(0x80)
"""Set in every byte of a varint but the last."""
_SEVEN_BITS: Final = np.uint32(0x7F)


def read_varints(
    words: NDArray[np.uint32], position: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(number at each position, position after it). `words` is `unaligned_words` of the buffer.

    Raises `IndexError` for a position outside the buffer. Only numbers of more than four bytes, which are rare, need a
    loop.
    """
    word = words[position]
    more = word & _CONTINUATION_BIT
    if not more.any():
        word &= np.uint32(0x7F)
        return _zigzag_decode(word), position + 1
    value = word & np.uint32(0x7F)
    value |= word >> np.uint32(1) & more * _SEVEN_BITS  # of the second byte, if there is one
    width = more >> np.uint32(7)
    width += np.uint32(1)
    third = word & more << np.uint32(8)
    if not third.any():
        return _zigzag_decode(value), position + width
    fourth = word & third << np.uint32(8)
    value |= word >> np.uint32(2) & (third >> np.uint32(1)) * _SEVEN_BITS
    value |= word >> np.uint32(3) & (fourth >> np.uint32(2)) * _SEVEN_BITS
    width += third >> np.uint32(15)
    width += fourth >> np.uint32(23)
    longer = np.flatnonzero(word & fourth << np.uint32(8))
    if not longer.size:
        return _zigzag_decode(value), position + width
    numbers, widths = value.astype(np.uint64), width.astype(np.int64)
    _read_remaining_bytes(words, position, numbers, widths, longer)
    sign = -(numbers & np.uint64(1)).astype(np.int64)
    return (numbers >> np.uint64(1)).astype(np.int64) ^ sign, position + widths


def _zigzag_decode(value: NDArray[np.uint32]) -> NDArray[np.int64]:
    """Decode zigzag-encoded numbers of at most 28 bits."""
    signed = value.view(np.int32)
    sign = -(signed & np.int32(1))
    return ((signed >> np.int32(1)) ^ sign).astype(np.int64)


def _read_remaining_bytes(
    words: NDArray[np.uint32],
    position: NDArray[np.int64],
    value: NDArray[np.uint64],
    width: NDArray[np.int64],
    rows: NDArray[np.int64],
) -> None:
    """Read the fifth and later bytes of the numbers at the indexes `rows`, and update `value` and `width`."""
    shift = 28
    while rows.size:
        byte = (words[position[rows] + width[rows]] & np.uint32(0xFF)).astype(np.uint64)
        if shift > 63 or (shift == 63 and (byte > 1).any()):
            raise InvalidRecord("a number in a record has more than 64 bits")
        value[rows] |= (byte & np.uint64(0x7F)) << np.uint64(shift)
        width[rows] += 1
        rows = rows[byte >= 0x80]
        shift += 7


def zigzag_encode(values: NDArray[np.int64]) -> ZigzagNumbers:
    """Zigzag-encode the numbers and compute their widths, as `encode_varint_rows` expects them."""
    folded = ((values << 1) ^ (values >> 63)).view(np.uint64)
    width = np.ones(len(folded), np.int64)
    largest, limit = int(folded.max(initial=0)), 0x80
    while limit <= largest:
        width += folded >= limit
        limit <<= 7
    return folded, width


def encode_varint_rows(columns: Sequence[ZigzagNumbers]) -> pa.Array:
    """A binary array: row n is the concatenation of the varints of number n of each column."""
    count = len(columns[0][0])
    widest = [int(width.max(initial=1)) for _, width in columns]
    matrix = np.empty((count, sum(widest)), np.uint8)
    kept = np.empty(matrix.shape, np.bool_)
    at = 0
    for (folded, width), most in zip(columns, widest, strict=True):
        for byte_index in range(most):
            byte = (folded >> np.uint64(7 * byte_index)).astype(np.uint8) & np.uint8(0x7F)
            byte |= (width > byte_index + 1).view(np.uint8) << np.uint8(7)
            matrix[:, at] = byte
            kept[:, at] = width > byte_index
            at += 1
    offsets = np.zeros(count + 1, np.int32)
    np.cumsum(sum(width for _, width in columns), out=offsets[1:])
    return pa.Array.from_buffers(
        pa.binary(), count, [None, pa.py_buffer(offsets), pa.py_buffer(matrix[kept])]
    )
