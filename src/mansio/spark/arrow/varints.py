"""Zigzag varints of record batches (as in Protocol Buffers), read and written as numpy arrays.

Invariants:
* `read_varints` and `encode_varint_rows` use the same encoding as `mansio.wire.batch.record_batch`.
* A number of more than 64 bits raises `InvalidRecord`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa

from mansio.errors import InvalidRecord

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    ZigzagNumbers = tuple[NDArray[np.uint64], NDArray[np.int64]]
    """(zigzag-encoded numbers, width of each one as a varint in bytes)."""

_MORE: Final = np.uint8(0x80)
"""Set in every byte of a varint but the last."""
_SEVEN_BITS: Final = np.uint8(0x7F)


def read_varints(
    data: NDArray[np.uint8], position: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return (number at each position, position after it). `data` has at least one byte after the last number.

    Raises `IndexError` for a position outside the buffer. Numbers of one or two bytes, which most are, are decoded in
    arrays of 8 or 16 bits.
    """
    first = data[position]
    if not len(first) or first.max() < _MORE:
        return _zigzag_decode(first, np.int8), position + 1
    second = data[position + 1]
    is_longer = first >= _MORE
    first &= _SEVEN_BITS
    if is_longer.all():
        after = position + 2
    else:
        second *= is_longer
        after = position + 1
        after += is_longer
    value = second.astype(np.uint16)
    value <<= np.uint16(7)
    value |= first
    if second.max() < _MORE:
        return _zigzag_decode(value, np.int16), after
    longer = np.flatnonzero(second >= _MORE)
    numbers = value.astype(np.uint64)
    numbers[longer] &= np.uint64(0x3FFF)  # the second byte's continuation bit is the 15th
    _read_remaining_bytes(data, numbers, after, longer)
    return _zigzag_decode(numbers, np.int64), after


def _zigzag_decode(
    value: NDArray[np.uint8] | NDArray[np.uint16] | NDArray[np.uint64], signed: type[np.signedinteger[Any]]
) -> NDArray[np.int64]:
    """Decode zigzag-encoded numbers. `signed`: the signed type of the same size."""
    one = value.dtype.type(1)
    sign = -(value & one).view(signed)
    sign ^= (value >> one).view(signed)
    return sign.astype(np.int64)


def _read_remaining_bytes(
    data: NDArray[np.uint8], value: NDArray[np.uint64], after: NDArray[np.int64], rows: NDArray[np.int64]
) -> None:
    """Read the third and later bytes of the numbers at the indexes `rows`, and update `value` and `after`, the
    positions after the bytes that were read."""
    shift = 14
    while rows.size:
        byte = data[after[rows]].astype(np.uint64)
        if shift > 63 or (shift == 63 and (byte > 1).any()):
            raise InvalidRecord("a number in a record has more than 64 bits")
        value[rows] |= (byte & np.uint64(0x7F)) << np.uint64(shift)
        after[rows] += 1
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
    """Return a binary array: row n is the concatenation of the varints of number n of each column."""
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
