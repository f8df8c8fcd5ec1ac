"""The headers of records as a column: a list of (key, value) for each, null where a record has none.

Exists apart because it costs more than all other columns together and is only made when it is asked for. Headers are
read round by round: the first of all records that have one, then the second of those that have two.

Always true: the last header of a record ends where the record ends, else `InvalidRecord`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from mansio.errors import InvalidRecord
from mansio.spark.arrow.binary import BinaryColumnBuilder, concatenate
from mansio.spark.arrow.schema import HEADERS_TYPE
from mansio.spark.arrow.varints import read_varints

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from mansio.spark.arrow.record_index import RecordIndex


def headers_column(batch_buffers: Sequence[RecordIndex]) -> pa.Array:
    """The headers of all records of these stretches. Raises `InvalidRecord`."""
    names, values = BinaryColumnBuilder(), BinaryColumnBuilder()
    counts: list[NDArray[np.int64]] = []
    for index in batch_buffers:
        try:
            counts.append(_add(index, names, values))
        except IndexError as error:
            raise InvalidRecord("a key, value or header is longer than its batch") from error
    count = concatenate(counts)
    if not count.any():
        return pa.nulls(len(count), HEADERS_TYPE)
    ends = np.zeros(len(count) + 1, np.int32)
    np.cumsum(count, out=ends[1:])
    try:
        keys = names.column(pa.string())
    except pa.ArrowInvalid as error:
        raise InvalidRecord("the name of a record header is not UTF-8") from error
    each = pa.StructArray.from_arrays([keys, values.column(pa.binary())], ["key", "value"])
    return pa.ListArray.from_arrays(pa.array(ends), each, type=HEADERS_TYPE, mask=pa.array(count == 0))


def _add(index: RecordIndex, names: BinaryColumnBuilder, values: BinaryColumnBuilder) -> NDArray[np.int64]:
    """How many headers each record has; they themselves are added to `names` and `values`, in order."""
    words, end = index.words, index.end
    count, position = read_varints(words, index.headers_start)
    if (count < 0).any() or (count > (end - position) >> 1).any():  # each takes two bytes at least
        raise InvalidRecord("more headers than fit in a record")
    if count.any():
        first = np.cumsum(count) - count
        total = int(count.sum())
        name_start, name_length = np.zeros(total, np.int64), np.zeros(total, np.int64)
        value_start, value_length = np.zeros(total, np.int64), np.zeros(total, np.int64)
        rows = np.flatnonzero(count)
        rank = 0
        while rows.size:
            at = first[rows] + rank
            name_length[at], name_start[at] = length, start = read_varints(words, position[rows])
            if (length < 0).any():
                raise InvalidRecord("a record header without a name")
            _check(start, length, end[rows])
            value_length[at], value_start[at] = length, start = read_varints(words, start + length)
            if (length < -1).any():
                raise InvalidRecord(f"a length of {length.min()} in a record")
            _check(start, length, end[rows])
            position[rows] = start + np.maximum(length, 0)
            rank += 1
            rows = rows[count[rows] > rank]
        names.add(index.raw, words, name_start, name_length)
        values.add(index.raw, words, value_start, value_length)
    if (position != end).any():
        raise InvalidRecord("a record's length does not match its content")
    return count


def _check(start: NDArray[np.int64], length: NDArray[np.int64], end: NDArray[np.int64]) -> None:
    if (start > end).any() or (length > end - start).any():
        raise InvalidRecord("a key, value or header is longer than its batch")
