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

OFFSET_32_BYTES_MAX: Final = (1 << 31) - 1
"""Size of the largest buffer of a `binary` array, whose offsets have 32 bits."""


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


class BinaryColumnBuilder:
    """Builder of a binary column from positions in several buffers. The values of a column are copied once if they are
    in one buffer, else twice."""

    def __init__(self) -> None:
        self._parts: list[pa.Array] = []

    def add(self, raw: pa.Buffer, start: NDArray[np.int64], length: NDArray[np.int64]) -> None:
        """Add one value for each element of `start` and `length`: its position in `raw` and its size in bytes, -1 for
        null. The values are in ascending order and do not overlap.

        The values and the bytes between them are the elements of one Arrow array without a copy; `take` copies every
        second one.
        """
        count = len(start)
        if not count:
            return
        is_small = raw.size <= OFFSET_32_BYTES_MAX
        edges = np.empty(2 * count, np.int32 if is_small else np.int64)
        edges[0::2] = start
        null = length < 0 if length.min() < 0 else None
        np.add(start, length if null is None else np.maximum(length, 0), out=edges[1::2], casting="unsafe")
        kind = pa.binary() if is_small else pa.large_binary()
        alternating = pa.Array.from_buffers(kind, 2 * count - 1, [None, pa.py_buffer(edges), raw])
        values = alternating.take(pa.array(np.arange(0, 2 * count, 2, dtype=np.int32)))
        if null is not None:
            validity = pa.py_buffer(np.packbits(~null, bitorder="little"))
            values = pa.Array.from_buffers(kind, count, [validity, *values.buffers()[1:]])
        self._parts.append(values if is_small else values.cast(pa.binary()))

    def column(self, kind: pa.DataType) -> pa.Array:
        """All added values as a column of type `binary` or `string` (`kind`). Raises `pa.ArrowInvalid` for a string
        that is not UTF-8.
        """
        if not self._parts:
            return pa.array([], kind)
        column = self._parts[0] if len(self._parts) == 1 else pa.concat_arrays(self._parts)
        return column if kind == pa.binary() else column.cast(kind)


def concatenate(parts: Sequence[NDArray[Element]]) -> NDArray[Element]:
    """Concatenate the arrays; a single array is returned without a copy."""
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
