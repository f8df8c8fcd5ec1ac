"""Where the records of many opened batches lie, and where their fields: numbers only, for all of them at once.

A record's place is known when the one before it is read, which is work for a loop over records. Most batches of a
topic have the shape of the one before them, though, or records that look like some. So the first of each shape is
walked, and the same places are guessed for the others; where there are many shapes, places are guessed by how records
begin (`find_record_boundaries`). The guess is checked where every record's length is read anyway: each has to end
where the next begins, from the first to the end of the batch. A guess that passes is exact, and what does not pass
is walked.

Always true: every place that is handed out lies within its batch; whatever breaks that is `InvalidRecord`, and nothing
is ever read beyond the buffer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import pyarrow as pa

from mansio.errors import InvalidRecord
from mansio.spark.arrow.binary import unaligned_words
from mansio.spark.arrow.varints import read_varints
from mansio.wire.batch.record_batch import MIN_RECORD_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from mansio.wire.batch.record_batch import BatchHeader

PADDING_BYTES: Final = 16
"""How far the bytes of a stretch go on after its last record, so that words at its end can be read whole."""

_EQUAL_RUN_MIN: Final = 24
"""Fewer records of one length are walked one by one."""
_WALK_RECORDS: Final = 512
"""So many records are walked before equal ones are looked for again."""
_LARGE_RECORD_BYTES: Final = 400
_SCANNED_BYTES_PER_WALK: Final = 250
"""So many bytes are looked over for marks while one record is walked."""
_OFFSET_DELTA_MAX: Final = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class BatchBuffer:
    """Opened batches in one buffer: the header of each, and where its records begin and end. Each has some."""

    data: bytes | memoryview
    spans: Sequence[tuple[int, int]]
    headers: Sequence[BatchHeader]


class RecordIndex(NamedTuple):
    """One row a record: its number and the places of its fields in `words`, which are the bytes of `raw`. A length of
    -1 is null. The headers are `data[headers_start:end]`, with their count before them."""

    raw: pa.Buffer
    words: NDArray[np.uint32]
    offset: NDArray[np.int64]
    stamp_delta: NDArray[np.int64]
    batch: NDArray[np.int64]
    """Which of the stretch's batches the record is from."""
    key_start: NDArray[np.int64]
    key_length: NDArray[np.int64]
    value_start: NDArray[np.int64]
    value_length: NDArray[np.int64]
    headers_start: NDArray[np.int64]
    end: NDArray[np.int64]

    def rows(self, begin: int, end: int) -> RecordIndex:
        """Some of the rows."""
        return RecordIndex(self.raw, self.words, *(column[begin:end] for column in self[2:]))


def build_record_index(batches: BatchBuffer) -> RecordIndex:
    """The places of all records of a stretch. Raises `InvalidRecord`."""
    words = unaligned_words(batches.data)
    try:
        return _build_record_index(batches, words)
    except IndexError as error:
        raise InvalidRecord("a record is longer than its batch") from error


def _build_record_index(batches: BatchBuffer, words: NDArray[np.uint32]) -> RecordIndex:
    size = len(batches.data)
    counts = np.array([header.record_count for header in batches.headers], np.int64)
    last = np.cumsum(counts) - 1
    body, end = _find_records(batches, words, counts, last)
    stamp_delta, position = read_varints(words, body + 1)  # one byte of attributes, unused
    offset_delta, position = read_varints(words, position)
    key_length, key_start = read_varints(words, position)
    value_length, value_start = read_varints(words, key_start + np.maximum(key_length, 0))
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
    # Batches follow each other by their headers; so inside them it is enough that offsets grow and both ends are right.
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
        words,
        offset,
        stamp_delta,
        batch,
        key_start,
        key_length,
        value_start,
        value_length,
        headers_start,
        end,
    )


def _find_records(
    batches: BatchBuffer, words: NDArray[np.uint32], counts: NDArray[np.int64], last: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(where each record begins, behind its length; where it ends)."""
    spans = batches.spans
    parts = _candidate_starts(batches, words)
    starts = np.concatenate(parts)
    starts += np.repeat(np.array([begin for begin, _ in spans], np.int64), counts)
    stops = np.array([stop for _, stop in spans], np.int64)
    try:
        body, end, mismatched = _record_ends(words, starts, last, stops)
    except (InvalidRecord, IndexError):  # what stands at a wrong guess need not be a number at all
        mismatched = np.arange(len(starts))
    if mismatched.size:
        for batch in np.unique(np.searchsorted(last, mismatched)).tolist():
            begin, stop = spans[batch]
            rows = slice(int(last[batch] - counts[batch]) + 1, int(last[batch]) + 1)
            starts[rows] = walk_records(memoryview(batches.data)[begin:stop], int(counts[batch])) + begin
        body, end, mismatched = _record_ends(words, starts, last, stops)
        if mismatched.size:
            raise InvalidRecord("a record of a negative length")
    return body, end


def _candidate_starts(batches: BatchBuffer, words: NDArray[np.uint32]) -> list[NDArray[np.int64]]:
    """For each batch, where in it each of its records begins, or may begin: there is one place for each."""
    view = memoryview(batches.data)
    shapes = [
        (stop - begin, header.record_count)
        for (begin, stop), header in zip(batches.spans, batches.headers, strict=True)
    ]
    known: dict[tuple[int, int], NDArray[np.int64]] = {}
    to_walk = sum(count for _, count in set(shapes))
    boundaries = None
    if to_walk * _SCANNED_BYTES_PER_WALK > len(view) and not _begins_with_equal_lengths(
        view, batches.spans[0], shapes[0][1]
    ):
        boundaries = find_record_boundaries(view, words)
    if boundaries is not None:
        edges = np.searchsorted(
            boundaries, np.array([(begin + 1, stop) for begin, stop in batches.spans])
        ).tolist()
    parts = []
    for number, (shape, (begin, stop)) in enumerate(zip(shapes, batches.spans, strict=True)):
        positions = known.get(shape)
        if positions is None and boundaries is not None:
            positions = _select_starts(words, boundaries[slice(*edges[number])], (begin, stop), shape[1])
        if positions is None:
            positions = known[shape] = walk_records(view[begin:stop], shape[1])
        parts.append(positions)
    return parts


def _begins_with_equal_lengths(view: memoryview, span: tuple[int, int], count: int) -> bool:
    """Whether a batch begins with many records of one length, which are walked in no time."""
    data = view[span[0] : span[1]]
    try:
        return _equal_length_run(data, np.frombuffer(data, np.uint8), 0, count)[1] > 0
    except (IndexError, ZeroDivisionError):
        return False


def _select_starts(
    words: NDArray[np.uint32], boundaries: NDArray[np.int64], span: tuple[int, int], count: int
) -> NDArray[np.int64] | None:
    """The places of `count` records, from the marks behind the first; None if they cannot be told."""
    begin, stop = span
    positions = np.concatenate((np.array([begin]), boundaries))
    if len(positions) > count:  # a mark that is none leads to no other
        try:
            length, body = read_varints(words, positions)
        except InvalidRecord:
            return None
        follows = np.append(positions[1:], stop)
        after = body + length
        positions = positions[follows[np.minimum(np.searchsorted(follows, after), len(follows) - 1)] == after]
    return positions - begin if len(positions) == count else None


def _record_ends(
    words: NDArray[np.uint32],
    starts: NDArray[np.int64],
    last: NDArray[np.int64],
    stops: NDArray[np.int64],
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """(place behind each record's length, place where the next record has to begin, the rows where it does not)."""
    length, body = read_varints(words, starts)
    end = np.empty_like(starts)
    end[:-1] = starts[1:]
    end[last] = stops
    return body, end, np.flatnonzero(body + length != end)


def walk_records(body: memoryview, count: int) -> NDArray[np.int64]:
    """Where each record of one opened batch begins. Raises `InvalidRecord`.

    Records of one length behind each other are found at once: if the length at every such place is the same, the first
    of them is where it should be, and so, one by one, are all.
    """
    if count < 0 or count * MIN_RECORD_BYTES > len(body):
        raise InvalidRecord(f"{count} records do not fit in {len(body)} bytes")
    # A byte of `bytes` is had faster, which is worth a copy while records are small.
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
            walked, position = _walk_chunk(data, position, min(_WALK_RECORDS, count - done))
            starts[done : done + len(walked)] = walked
            done += len(walked)
    except IndexError as error:
        raise InvalidRecord("a record is longer than its batch") from error
    if position != len(data):
        raise InvalidRecord("the records of a batch do not end where it ends")
    return starts


def _equal_length_run(
    data: bytes | memoryview, array: NDArray[np.uint8], position: int, remaining: int
) -> tuple[int, int]:
    """(bytes of each, how many) records of one length from `position` on; none if they are few."""
    byte, width = data[position], 1
    number = byte & 0x7F
    while byte >= 0x80:
        byte = data[position + width]
        number |= (byte & 0x7F) << 7 * width
        width += 1
    size = width + (number >> 1)
    fits = min(remaining, (len(data) - position) // size)
    if (
        fits < _EQUAL_RUN_MIN
        or (array[position : position + _EQUAL_RUN_MIN * size : size] != array[position]).any()
    ):
        return size, 0
    stop = position + size * fits
    equal = array[position:stop:size] == array[position]
    for byte_index in range(1, width):
        equal &= array[position + byte_index : stop : size] == array[position + byte_index]
    equal_count = fits if equal.all() else int(equal.argmin())
    return size, equal_count if equal_count >= _EQUAL_RUN_MIN else 0


def _walk_chunk(data: bytes | memoryview, position: int, count: int) -> tuple[list[int], int]:
    """(where each of `count` records begins, where the last one ends). The loop over records; nothing else is one."""
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


_CHUNK_BYTES: Final = 1 << 18
"""So much is looked over at once, to stay in the processor's cache."""
_LENGTH_MIN: Final = np.uint32(12)
"""A record without key, value and headers is of six bytes; the sign is folded into the lowest bit, and is not set."""
_BYTES_PER_CANDIDATE: Final = 8
"""Bytes with zeros in that distance at more places than one in so many hold much that is no mark."""


def find_record_boundaries(data: bytes | memoryview, words: NDArray[np.uint32]) -> NDArray[np.int64] | None:
    """The places in `data` where a record of less than 8 KiB without headers seems to begin, behind one like it.

    `words` is `unaligned_words` of the same bytes. None where too much looks so.
    """
    array = np.frombuffer(data, np.uint8)[: len(words)]
    found: list[NDArray[np.int64]] = [np.zeros(0, np.int64)]
    remaining = len(array) // _BYTES_PER_CANDIDATE
    for begin in range(0, len(array), _CHUNK_BYTES):
        positions = np.flatnonzero(_zeros(array[begin : begin + _CHUNK_BYTES + 3]))
        remaining -= len(positions)
        if remaining < 0:
            return None
        positions += begin
        found.append(positions)
    positions = np.concatenate(found)
    word = words[positions]  # its last byte is the zero of the attributes
    length = word >> np.uint32(16) & np.uint32(0xFF)
    is_of_one = (word & np.uint32(0x0081FF00) == 0) & (length >= _LENGTH_MIN)
    is_of_two = (word & np.uint32(0x000081FF) == np.uint32(0x00008000)) & (length < 0x80) & (length > 0)
    positions += is_of_one
    positions += 1
    starts: NDArray[np.int64] = positions[is_of_one | is_of_two]
    return starts


def _zeros(array: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Where a byte is zero, or the one behind it is, and the third behind it is too."""
    zero: NDArray[np.bool_] = array == 0
    found = zero[:-3] | zero[1:-2]
    found &= zero[3:]
    return found
