"""Access to the buffers of binary Arrow columns, and a builder of such columns.

Invariants:
* Callers of `BinaryColumnBuilder` check that all positions are inside their buffer: Arrow does not check them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeVar

import numpy as np
import pyarrow as pa

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

Element = TypeVar("Element", bound=np.generic)

INLINE_BYTES_MAX: Final = 12
"""Maximum length of a value that is stored in the binary view itself (Arrow's columnar format)."""

_WORD_BITS: Final = np.uint64(32)
_FIRST_MASKS: Final = np.array([(1 << 8 * min(size, 4)) - 1 for size in range(13)], np.uint32)
_SECOND_MASKS: Final = np.array([(1 << 8 * max(size - 4, 0)) - 1 for size in range(13)], np.uint64)
"""By length of an inline value: masks of the bits that it uses in the first four bytes and in the next eight."""


def binary_offsets(column: pa.Array) -> NDArray[np.int32]:
    """Start of each value of a binary or list column in its data buffer; the last element is the last value's end."""
    if not len(column):
        return np.zeros(1, np.int32)
    return np.frombuffer(column.buffers()[1], np.int32)[column.offset : column.offset + len(column) + 1]


def binary_lengths(column: pa.Array) -> tuple[NDArray[np.int64], NDArray[np.bool_] | None]:
    """(length of each value, null mask) of a binary column. A null has length 0; the mask is None without nulls."""
    lengths = np.diff(binary_offsets(column)).astype(np.int64)
    if not column.null_count:
        return lengths, None
    null = column.is_null().to_numpy(zero_copy_only=False)
    lengths[null] = 0
    return lengths, null


def unaligned_words(buffer: bytes | memoryview) -> NDArray[np.uint32]:
    """An array of little-endian 32-bit words. Element n starts at byte n of `buffer`, so one array access reads any
    four bytes. The words share the memory of the buffer.
    """
    return np.ndarray((max(len(buffer) - 3, 0),), "<u4", buffer=buffer, strides=(1,))


class BinaryColumnBuilder:
    """Builder of a binary column from positions in several buffers.

    Values are added as views (Arrow's `binary_view`) of the original bytes; `column` copies them once.
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
        """Add one value for each element of `start` and `length`: its position in `raw` and its size in bytes, -1 for
        null. `words` is `unaligned_words(raw)`. `raw` must have at least 12 bytes after the start of the last value.
        """
        shortest, longest = int(length.min(initial=0)), int(length.max(initial=0))
        null = length < 0 if shortest < 0 else None
        size = length if null is None else np.maximum(length, 0)
        views = np.empty((len(start), 2), np.uint64)
        first, second_half = words[start], start.view(np.uint64) << _WORD_BITS
        second_half |= np.uint64(len(self._buffers))
        if longest <= INLINE_BYTES_MAX or (size <= INLINE_BYTES_MAX).any():
            row = (
                min(longest, INLINE_BYTES_MAX) if shortest == longest else np.minimum(size, INLINE_BYTES_MAX)
            )
            first &= _FIRST_MASKS[row]
            inline = words[start + 4].astype(np.uint64)
            if longest > 8:
                inline |= words[start + 8].astype(np.uint64) << _WORD_BITS
            inline &= _SECOND_MASKS[row]
            second_half = (
                inline
                if longest <= INLINE_BYTES_MAX
                else np.where(size <= INLINE_BYTES_MAX, inline, second_half)
            )
        views[:, 0] = size.view(np.uint64) | first.astype(np.uint64) << _WORD_BITS
        views[:, 1] = second_half
        self._views.append(views)
        self._nulls.append(null)
        self._buffers.append(raw)

    def column(self, kind: pa.DataType) -> pa.Array:
        """All added values as a column of type `binary` or `string` (`kind`). Raises `pa.ArrowInvalid` for a string
        that is not UTF-8.
        """
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


def concatenate(parts: Sequence[NDArray[Element]]) -> NDArray[Element]:
    """Concatenate the arrays; a single array is returned without a copy."""
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
