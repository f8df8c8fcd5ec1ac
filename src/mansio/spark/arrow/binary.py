"""Buffers of binary Arrow columns: offsets and lengths of values, and columns built from positions in bytes.

Invariants:
* `BinaryColumnBuilder` receives only positions that were checked to be inside their buffer; Arrow does not check them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeVar

import numpy as np
import pyarrow as pa

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

Number = TypeVar("Number", bound=np.generic)

INLINE_BYTES_MAX: Final = 12
"""A value of a binary view of at most this length is stored in the view itself (Arrow's columnar format)."""

_WORD: Final = np.uint64(32)
_FIRST_MASKS: Final = np.array([(1 << 8 * min(size, 4)) - 1 for size in range(13)], np.uint32)
_SECOND_MASKS: Final = np.array([(1 << 8 * max(size - 4, 0)) - 1 for size in range(13)], np.uint64)
"""Masks by value length: the bits of the first four bytes, and of the next eight, that belong to an inline value."""


def offsets_of(column: pa.Array) -> NDArray[np.int32]:
    """Start of each value of a binary or list column in the column's data, and the end of the last one."""
    if not len(column):
        return np.zeros(1, np.int32)
    return np.frombuffer(column.buffers()[1], np.int32)[column.offset : column.offset + len(column) + 1]


def lengths_of(column: pa.Array) -> tuple[NDArray[np.int64], NDArray[np.bool_] | None]:
    """(length of each value, null mask or None) of a binary column. A null has length 0."""
    lengths = np.diff(offsets_of(column)).astype(np.int64)
    if not column.null_count:
        return lengths, None
    null = column.is_null().to_numpy(zero_copy_only=False)
    lengths[null] = 0
    return lengths, null


def unaligned_words(buffer: bytes | memoryview) -> NDArray[np.uint32]:
    """`buffer` as little-endian words, one starting at every byte: any four bytes are one array access."""
    return np.ndarray((max(len(buffer) - 3, 0),), "<u4", buffer=buffer, strides=(1,))


class BinaryColumnBuilder:
    """Builder of a binary column from positions in several buffers.

    The rows are views (Arrow's `binary_view`) into the original bytes; the only copy is the cast at the end.
    """

    def __init__(self) -> None:
        self._views: list[NDArray[np.uint64]] = []
        self._nulls: list[NDArray[np.bool_] | None] = []
        self._buffers: list[pa.Buffer] = []

    def add(
        self,
        raw: pa.Buffer,
        words: NDArray[np.uint32],
        start: NDArray[np.int64],
        length: NDArray[np.int64],
    ) -> None:
        """Add values at `start` of `raw`, of `length` bytes, -1 for null. `words` is `unaligned_words` of the same
        bytes, which continue for 12 bytes after the last value.
        """
        shortest, longest = int(length.min(initial=0)), int(length.max(initial=0))
        null = length < 0 if shortest < 0 else None
        size = length if null is None else np.maximum(length, 0)
        views = np.empty((len(start), 2), np.uint64)
        first, second_half = words[start], start.view(np.uint64) << _WORD
        second_half |= np.uint64(len(self._buffers))
        if longest <= INLINE_BYTES_MAX or (size <= INLINE_BYTES_MAX).any():
            row = (
                min(longest, INLINE_BYTES_MAX) if shortest == longest else np.minimum(size, INLINE_BYTES_MAX)
            )
            first &= _FIRST_MASKS[row]
            inline = words[start + 4].astype(np.uint64)
            if longest > 8:
                inline |= words[start + 8].astype(np.uint64) << _WORD
            inline &= _SECOND_MASKS[row]
            second_half = (
                inline
                if longest <= INLINE_BYTES_MAX
                else np.where(size <= INLINE_BYTES_MAX, inline, second_half)
            )
        views[:, 0] = size.view(np.uint64) | first.astype(np.uint64) << _WORD
        views[:, 1] = second_half
        self._views.append(views)
        self._nulls.append(null)
        self._buffers.append(raw)

    def column(self, kind: pa.DataType) -> pa.Array:
        """All rows as `binary`, or as `string`: raises `pa.ArrowInvalid` for a value that is not UTF-8."""
        views, validity = concatenate(self._views), None
        if any(null is not None for null in self._nulls):
            valid = [
                np.ones(len(part), np.bool_) if null is None else ~null
                for part, null in zip(self._views, self._nulls, strict=True)
            ]
            validity = pa.py_buffer(np.packbits(concatenate(valid), bitorder="little"))
        rows = pa.Array.from_buffers(
            pa.binary_view(), len(views), [validity, pa.py_buffer(views), *self._buffers]
        )
        column = rows.cast(pa.binary())
        return column if kind == pa.binary() else column.cast(kind)


def concatenate(parts: Sequence[NDArray[Number]]) -> NDArray[Number]:
    """The concatenated arrays; copies only if there are several."""
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
