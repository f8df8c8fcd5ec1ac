"""Positions of records and their fields in decompressed batches, computed for all records together with numpy.

The position of a record depends on the length of the record before it. To find the records exactly, a batch is walked:
a loop reads one length after the other. To avoid this loop for most batches, positions are first guessed and then
verified:
* Many batches of a topic have the same shape (size and record count). The first batch of each shape is walked, and its
  positions are the candidates for the other batches of this shape.
* If there are many shapes, the candidates are the positions at which the bytes look like the start of a record
  (`find_record_boundaries`).
* The lengths at all candidates are read together. The candidates of a batch are correct if each record ends where the
  next one begins, and the last one at the end of the batch. Any other batch is walked.

Invariants:
* Every returned position is inside its batch; otherwise `InvalidRecord` is raised.
* Nothing is read beyond the buffer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import pyarrow as pa

from mansio.errors import InvalidRecord
from mansio.spark.arrow.varints import read_varints
from mansio.wire.batch.record_batch import RECORD_BYTES_MIN

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from mansio.wire.batch.record_batch import BatchHeader

PADDING_BYTES: Final = 1
"""Minimum padding after the last record of a buffer, because `read_varints` reads a byte more than it needs."""

_EQUAL_RUN_RECORDS_MIN: Final = 24
"""Minimum number of consecutive records of equal length that are located without a loop."""
_WALK_RECORDS_MAX: Final = 512
"""Number of records that are walked before the next search for records of equal length."""
_LARGE_RECORD_BYTES: Final = 400
"""Mean record size above which a batch is not copied to `bytes` before it is walked."""
_SCANNED_BYTES_PER_WALKED_RECORD: Final = 250
"""Number of bytes that can be scanned for boundaries in the time of walking one record."""
_OFFSET_DELTA_MAX: Final = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class BatchBuffer:
    """Decompressed batches in one buffer, each with at least one record.

    `headers` are those of the batches, `spans` the (begin, end) of their records in the buffer.
    """

    data: bytes | memoryview
    spans: Sequence[tuple[int, int]]
    headers: Sequence[BatchHeader]


class RecordIndex(NamedTuple):
    """Arrays with one element per record: its offset, and the positions of its fields in the buffer.

    `raw` is the buffer, `data` its bytes. A length of -1 is null. The encoded headers, including
    their count, are in [`headers_start`, `end`).
    """

    raw: pa.Buffer
    data: NDArray[np.uint8]
    offset: NDArray[np.int64]
    timestamp_delta_ms: NDArray[np.int64]
    batch: NDArray[np.int64]
    """Index of the batch that contains the record."""
    key_start: NDArray[np.int64]
    key_length: NDArray[np.int64]
    value_start: NDArray[np.int64]
    value_length: NDArray[np.int64]
    headers_start: NDArray[np.int64]
    end: NDArray[np.int64]

    def rows(self, begin: int, end: int) -> RecordIndex:
        """Return the index of the records [begin, end)."""
        return RecordIndex(self.raw, self.data, *(column[begin:end] for column in self[2:]))


def build_record_index(batches: BatchBuffer) -> RecordIndex:
    """Locate all records of the batches. Raises `InvalidRecord` for invalid lengths, positions or offsets."""
    data = np.frombuffer(batches.data, np.uint8)
    try:
        return _build_record_index(batches, data)
    except IndexError as error:
        raise InvalidRecord("a record is longer than its batch") from error


def _build_record_index(batches: BatchBuffer, data: NDArray[np.uint8]) -> RecordIndex:
    size = len(data)
    counts = np.array([header.record_count for header in batches.headers], np.int64)
    last = np.cumsum(counts) - 1
    body, end = _find_records(batches, data, counts, last)
    timestamp_delta_ms, position = read_varints(data, body + 1)  # one byte of attributes, unused
    offset_delta, position = read_varints(data, position)
    key_length, key_start = read_varints(data, position)
    value_length, value_start = read_varints(data, key_start + np.maximum(key_length, 0))
    headers_start = value_start + np.maximum(value_length, 0)
    for length in (key_length, value_length):
        if length.min() < -1:
            raise InvalidRecord(f"a length of {length.min()} in a record")
        if length.max() > size:
            raise InvalidRecord("a key, value or header is longer than its batch")
    if (headers_start >= end).any():
        raise InvalidRecord("a record's length does not match its content")
    batch = np.repeat(np.arange(len(counts)), counts)
    base = np.array([header.base_offset for header in batches.headers], np.int64)
    last_delta = np.array([header.last_offset_delta for header in batches.headers], np.int64)
    offset = base[batch] + offset_delta
    # Offsets of consecutive batches are checked by their headers, so here growing deltas and both bounds suffice.
    if (
        offset_delta.max() > _OFFSET_DELTA_MAX
        or (offset_delta[last - counts + 1] < 0).any()
        or (offset_delta[last] > last_delta).any()
        or (offset[1:] <= offset[:-1]).any()
    ):
        raise InvalidRecord("the offset deltas of a batch do not grow, or leave it")
    raw = pa.py_buffer(batches.data)
    return RecordIndex(
        raw,
        data,
        offset,
        timestamp_delta_ms,
        batch,
        key_start,
        key_length,
        value_start,
        value_length,
        headers_start,
        end,
    )


def _find_records(
    batches: BatchBuffer, data: NDArray[np.uint8], counts: NDArray[np.int64], last: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(position after the length field of each record, end of each record)."""
    spans = batches.spans
    parts = _candidate_starts(batches, data)
    starts = np.concatenate(parts)
    begins, stops = np.array(spans, np.int64).T
    starts += np.repeat(begins, counts)
    first = last - counts + 1
    try:
        body, end, mismatched = _record_ends(data, starts, last, stops)
        # Bytes before the first candidate belong to a record, too.
        mismatched = np.append(mismatched, first[starts[first] != begins])
    except (InvalidRecord, IndexError):  # a wrong candidate need not be a valid varint
        mismatched = np.arange(len(starts))
    if mismatched.size:
        for batch in np.unique(np.searchsorted(last, mismatched)).tolist():
            begin, stop = spans[batch]
            rows = slice(int(last[batch] - counts[batch]) + 1, int(last[batch]) + 1)
            starts[rows] = walk_records(memoryview(batches.data)[begin:stop], int(counts[batch])) + begin
        body, end, mismatched = _record_ends(data, starts, last, stops)
        if mismatched.size:
            raise InvalidRecord("a record of a negative length")
    return body, end


def _candidate_starts(batches: BatchBuffer, data: NDArray[np.uint8]) -> list[NDArray[np.int64]]:
    """Return the positions of the records of each batch relative to its begin. They are candidates, which must be
    verified.
    """
    view = memoryview(batches.data)
    shapes = [
        (stop - begin, header.record_count)
        for (begin, stop), header in zip(batches.spans, batches.headers, strict=True)
    ]
    known: dict[tuple[int, int], NDArray[np.int64]] = {}
    to_walk = sum(count for _, count in set(shapes))
    boundaries = None
    if to_walk * _SCANNED_BYTES_PER_WALKED_RECORD > len(view) and not _begins_with_equal_lengths(
        view, batches.spans[0], shapes[0][1]
    ):
        boundaries = find_record_boundaries(data)
    if boundaries is not None:
        boundaries = _select_boundaries(data, boundaries, batches.spans)
    edges = None if boundaries is None else np.searchsorted(boundaries, np.array(batches.spans)).tolist()
    parts = []
    for number, (shape, (begin, stop)) in enumerate(zip(shapes, batches.spans, strict=True)):
        positions = known.get(shape)
        if positions is None and boundaries is not None and edges is not None:
            first, end = edges[number]
            if end - first == shape[1]:
                positions = boundaries[first:end] - begin
        if positions is None:
            positions = known[shape] = walk_records(view[begin:stop], shape[1])
        parts.append(positions)
    return parts


def _begins_with_equal_lengths(view: memoryview, span: tuple[int, int], count: int) -> bool:
    """Whether a batch begins with records of equal length, which `walk_records` locates without a loop."""
    data = view[span[0] : span[1]]
    try:
        return _equal_length_run(data, np.frombuffer(data, np.uint8), 0, count)[1] > 0
    except (IndexError, ZeroDivisionError):
        return False


def _select_boundaries(
    data: NDArray[np.uint8], boundaries: NDArray[np.int64], spans: Sequence[tuple[int, int]]
) -> NDArray[np.int64] | None:
    """Return the begins of the batches, and those boundaries whose record ends at another boundary or at the end of a
    batch: a false boundary does not lead to another one. None if a batch does not begin with a record.
    """
    begins, stops = np.array(spans, np.int64).T
    is_boundary = np.zeros(len(data) + 1, np.bool_)
    is_boundary[boundaries] = True
    missing = begins[~is_boundary[begins]]
    positions = np.insert(boundaries, np.searchsorted(boundaries, missing), missing)
    is_boundary[begins] = is_boundary[stops] = True
    try:
        length, after = read_varints(data, positions)
    except InvalidRecord:
        return None
    after += length
    np.clip(after, 0, len(data), out=after)
    return positions[is_boundary[after]]


def _record_ends(
    data: NDArray[np.uint8],
    starts: NDArray[np.int64],
    last: NDArray[np.int64],
    stops: NDArray[np.int64],
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """(position after the length field of each record, its expected end, indexes of records that do not end there)."""
    length, body = read_varints(data, starts)
    end = np.empty_like(starts)
    end[:-1] = starts[1:]
    end[last] = stops
    return body, end, np.flatnonzero(body + length != end)


def walk_records(body: memoryview, count: int) -> NDArray[np.int64]:
    """Start of each record of one decompressed batch, by reading one record length after the other. Raises
    `InvalidRecord`.

    A run of records of equal length is located without a loop: if the same length is found at every expected position,
    the positions are correct, because each record ends where the next one is expected.
    """
    if count < 0 or count * RECORD_BYTES_MIN > len(body):
        raise InvalidRecord(f"{count} records do not fit in {len(body)} bytes")
    # Indexing `bytes` is faster, which is worth a copy while records are small.
    data = body if len(body) > count * _LARGE_RECORD_BYTES else bytes(body)
    starts = np.empty(count, np.int64)
    array = np.frombuffer(data, np.uint8)
    position = done = 0
    try:
        while done < count:
            size, equal_count = _equal_length_run(data, array, position, count - done)
            if equal_count:
                starts[done : done + equal_count] = np.arange(position, position + equal_count * size, size)
                position += equal_count * size
                done += equal_count
                continue
            walked, position = _walk_chunk(data, position, min(_WALK_RECORDS_MAX, count - done))
            starts[done : done + len(walked)] = walked
            done += len(walked)
    except IndexError as error:
        raise InvalidRecord("a record is longer than its batch") from error
    if position != len(data):
        raise InvalidRecord("the records of a batch do not end where it ends")
    return starts


def record_end(data: bytes, position: int, count: int) -> int:
    """Return the end of the last of `count` records from `position`. Raises `IndexError` beyond the end of `data`, and
    `InvalidRecord`.
    """
    for begin in range(0, count, _WALK_RECORDS_MAX):
        _, position = _walk_chunk(data, position, min(_WALK_RECORDS_MAX, count - begin))
    if position > len(data):
        raise InvalidRecord("a record is longer than its batch")
    return position


def _equal_length_run(
    data: bytes | memoryview, array: NDArray[np.uint8], position: int, remaining: int
) -> tuple[int, int]:
    """(size of a record, number of consecutive records of this size from `position`). The number is 0 if there are
    fewer than `_EQUAL_RUN_RECORDS_MIN`.
    """
    byte, width = data[position], 1
    number = byte & 0x7F
    while byte >= 0x80:
        byte = data[position + width]
        number |= (byte & 0x7F) << 7 * width
        width += 1
    size = width + (number >> 1)
    fits = min(remaining, (len(data) - position) // size)
    if (
        fits < _EQUAL_RUN_RECORDS_MIN
        or (array[position : position + _EQUAL_RUN_RECORDS_MIN * size : size] != array[position]).any()
    ):
        return size, 0
    stop = position + size * fits
    equal = array[position:stop:size] == array[position]
    for byte_index in range(1, width):
        equal &= array[position + byte_index : stop : size] == array[position + byte_index]
    equal_count = fits if equal.all() else int(equal.argmin())
    return size, equal_count if equal_count >= _EQUAL_RUN_RECORDS_MIN else 0


def _walk_chunk(data: bytes | memoryview, position: int, count: int) -> tuple[list[int], int]:
    """(start of each of `count` records from `position`, end of the last one), in a loop over the records."""
    boundaries: list[int] = []
    append = boundaries.append
    for _ in range(count):
        append(position)
        byte = data[position]
        if byte < 0x80:
            position += 1 + (byte >> 1)
        elif (second := data[position + 1]) < 0x80:
            position += 2 + ((byte & 0x7F | second << 7) >> 1)
        else:
            number, width = byte & 0x7F | (second & 0x7F) << 7, 2
            while byte >= 0x80:
                byte = data[position + width]
                number |= (byte & 0x7F) << 7 * width
                width += 1
            position += width + (number >> 1)
    return boundaries, position


# -- candidate record boundaries --------


_SCAN_CHUNK_BYTES: Final = 1 << 18
"""Number of bytes scanned at a time: they fit in the processor's cache."""
_ENCODED_LENGTH_MIN: Final = np.uint32(12)
"""Minimum of a record's length field: six bytes (a record without key, value and headers), zigzag-encoded."""
_BYTES_PER_CANDIDATE_MIN: Final = 8
"""Minimum mean distance of candidates; data with more candidates contains too many false boundaries."""


def find_record_boundaries(data: NDArray[np.uint8]) -> NDArray[np.int64] | None:
    """Positions in `data` at which a record of less than 8 KiB seems to begin after a record without headers. The
    result must be verified. None if there are too many candidates.

    A record begins with its length in one or two bytes, followed by the attributes, which are zero. The byte before a
    record is the last one of the previous record: its header count, which is zero without headers. Two zero bytes with
    one or two bytes between them that can be a length are rare elsewhere, and do not occur in text.
    """
    words = _unaligned_words(data)
    array = data[: len(words)]
    found: list[NDArray[np.int64]] = [np.zeros(0, np.int64)]
    remaining = len(array) // _BYTES_PER_CANDIDATE_MIN
    for begin in range(0, len(array), _SCAN_CHUNK_BYTES):
        positions = np.flatnonzero(_zero_pair_positions(array[begin : begin + _SCAN_CHUNK_BYTES + 3]))
        remaining -= len(positions)
        if remaining < 0:
            return None
        positions += begin
        found.append(positions)
    positions = np.concatenate(found)
    word = words[positions]  # the last byte of the word is the zero of the attributes
    length = word >> np.uint32(16) & np.uint32(0xFF)
    is_of_one = (word & np.uint32(0x0081FF00) == 0) & (length >= _ENCODED_LENGTH_MIN)
    is_of_two = (word & np.uint32(0x000081FF) == np.uint32(0x00008000)) & (length < 0x80) & (length > 0)
    positions += is_of_one
    positions += 1
    starts: NDArray[np.int64] = positions[is_of_one | is_of_two]
    return starts


def _unaligned_words(data: NDArray[np.uint8]) -> NDArray[np.uint32]:
    """Return an array of little-endian 32-bit words. Element n starts at byte n of `data`, so one array access reads
    any four bytes. The words share the memory of `data`.
    """
    return np.ndarray((max(len(data) - 3, 0),), "<u4", buffer=data, strides=(1,))


def _zero_pair_positions(array: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """For each position n: whether byte n + 3 is zero, and byte n or byte n + 1 as well."""
    zero: NDArray[np.bool_] = array == 0
    found = zero[:-3] | zero[1:-2]
    found &= zero[3:]
    return found
