"""Vectorized zigzag varints of record batches (as in Protocol Buffers).

Invariants:
* `read_varints` and `varint_rows` agree with `mansio.wire.batch.record_batch`.
* A number of more than 64 bits is `InvalidRecord`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa

from mansio.errors import InvalidRecord

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Varints = tuple[NDArray[np.uint64], NDArray[np.int64]]
    """Zigzag-encoded numbers and their widths in bytes."""

_CONTINUATION_BIT: Final = np.uint32(0x80)
"""Set in every byte of a varint but the last."""
_SEVEN_BITS: Final = np.uint32(0x7F)


def read_varints(
    words: NDArray[np.uint32], position: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(number at each position, position after it). `words` are the bytes as `unaligned_words`.

    Raises `IndexError` for a position outside. Numbers of up to four bytes, which nearly all are, need no loop.
    """
    word = words[position]
    more = word & _CONTINUATION_BIT
    if not more.any():
        word &= np.uint32(0x7F)
        return _zigzag_decoded(word), position + 1
    value = word & np.uint32(0x7F)
    value |= word >> np.uint32(1) & more * _SEVEN_BITS  # of the second byte, if there is one
    width = more >> np.uint32(7)
    width += np.uint32(1)
    third = word & more << np.uint32(8)
    if not third.any():
        return _zigzag_decoded(value), position + width
    fourth = word & third << np.uint32(8)
    value |= word >> np.uint32(2) & (third >> np.uint32(1)) * _SEVEN_BITS
    value |= word >> np.uint32(3) & (fourth >> np.uint32(2)) * _SEVEN_BITS
    width += third >> np.uint32(15)
    width += fourth >> np.uint32(23)
    longer = np.flatnonzero(word & fourth << np.uint32(8))
    if not longer.size:
        return _zigzag_decoded(value), position + width
    numbers, widths = value.astype(np.uint64), width.astype(np.int64)
    _read_long(words, position, numbers, widths, longer)
    sign = -(numbers & np.uint64(1)).astype(np.int64)
    return (numbers >> np.uint64(1)).astype(np.int64) ^ sign, position + widths


def _zigzag_decoded(value: NDArray[np.uint32]) -> NDArray[np.int64]:
    """Signed numbers of at most 28 bits."""
    signed = value.view(np.int32)
    sign = -(signed & np.int32(1))
    return ((signed >> np.int32(1)) ^ sign).astype(np.int64)


def _read_long(
    words: NDArray[np.uint32],
    position: NDArray[np.int64],
    value: NDArray[np.uint64],
    width: NDArray[np.int64],
    rows: NDArray[np.int64],
) -> None:
    """Add the fifth and later bytes of the numbers of `rows` to `value` and `width`."""
    shift = 28
    while rows.size:
        byte = (words[position[rows] + width[rows]] & np.uint32(0xFF)).astype(np.uint64)
        if shift > 63 or (shift == 63 and (byte > 1).any()):
            raise InvalidRecord("a number in a record has more than 64 bits")
        value[rows] |= (byte & np.uint64(0x7F)) << np.uint64(shift)
        width[rows] += 1
        rows = rows[byte >= 0x80]
        shift += 7


def varints_of(values: NDArray[np.int64]) -> Varints:
    """The encoding that `varint_rows` writes for these numbers."""
    folded = ((values << 1) ^ (values >> 63)).view(np.uint64)
    width = np.ones(len(folded), np.int64)
    largest, limit = int(folded.max(initial=0)), 0x80
    while limit <= largest:
        width += folded >= limit
        limit <<= 7
    return folded, width


def varint_rows(columns: Sequence[Varints]) -> pa.Array:
    """A binary array whose rows are the concatenated varints of each column."""
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
