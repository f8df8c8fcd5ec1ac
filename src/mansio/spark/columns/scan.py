"""Where the records of many opened batches lie, and where their fields: numbers only, for all of them at once.

A record's place is known when the one before it is read, which is work for a loop over records. Most batches of a
topic have the shape of the one before them, though, or records that look like some. So the first of each shape is
walked, and the same places are guessed for the others; where there are many shapes, places are guessed by how records
begin (`marks`). The guess is checked where every record's length is read anyway: each has to end where the next begins,
from the first to the end of the batch. A guess that passes is exact, and what does not pass is walked.

Always true: every place that is handed out lies within its batch; whatever breaks that is `InvalidRecord`, and nothing
is ever read beyond the buffer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import pyarrow as pa

from mansio.errors import InvalidRecord
from mansio.spark.columns.binary import unaligned_words
from mansio.spark.columns.marks import marks
from mansio.spark.columns.varints import read_varints
from mansio.wire.records import MIN_RECORD_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from mansio.wire.records import BatchHeader

ROOM_BYTES: Final = 16
"""How far the bytes of a stretch go on after its last record, so that words at its end can be read whole."""

_RUN_MIN: Final = 24
"""Fewer records of one length are walked one by one."""
_WALK: Final = 512
"""So many records are walked before equal ones are looked for again."""
_LARGE_RECORD_BYTES: Final = 400
_LOOKED_OVER_BYTES: Final = 250
"""So many bytes are looked over for marks while one record is walked."""
_OFFSET_DELTA_MAX: Final = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class Stretch:
    """Opened batches in one buffer: the header of each, and where its records begin and end. Each has some."""

    data: bytes | memoryview
    spans: Sequence[tuple[int, int]]
    headers: Sequence[BatchHeader]


class Places(NamedTuple):
    """One row a record: its number and the places of its fields in `words`, which are the bytes of `raw`. A length of
    -1 is null. The headers are `data[tail:end]`, with their count before them."""

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
    tail: NDArray[np.int64]
    end: NDArray[np.int64]

    def rows(self, begin: int, end: int) -> Places:
        """Some of the rows."""
        return Places(self.raw, self.words, *(column[begin:end] for column in self[2:]))


def find_places(stretch: Stretch) -> Places:
    """The places of all records of a stretch. Raises `InvalidRecord`."""
    words = unaligned_words(stretch.data)
    try:
        return _find_places(stretch, words)
    except IndexError as error:
        raise InvalidRecord("a record is longer than its batch") from error


def _find_places(stretch: Stretch, words: NDArray[np.uint32]) -> Places:
    size = len(stretch.data)
    counts = np.array([header.record_count for header in stretch.headers], np.int64)
    last = np.cumsum(counts) - 1
    body, end = _find_records(stretch, words, counts, last)
    stamp_delta, position = read_varints(words, body + 1)  # one byte of attributes, unused
    offset_delta, position = read_varints(words, position)
    key_length, key_start = read_varints(words, position)
    value_length, value_start = read_varints(words, key_start + np.maximum(key_length, 0))
    tail = value_start + np.maximum(value_length, 0)
    for length in (key_length, value_length):
        if length.min() < -1:
            raise InvalidRecord(f"a length of {length.min()} in a record")
        if length.max() > size:
            raise InvalidRecord("a key, value or header is longer than its batch")
    if (tail >= end).any():
        raise InvalidRecord("a record's length does not match its content")
    batch = np.repeat(np.arange(len(counts)), counts)
    base = np.array([header.base_offset for header in stretch.headers], np.int64)
    last_delta = np.array([header.last_offset_delta for header in stretch.headers], np.int64)
    offset = base[batch] + offset_delta
    # Batches follow each other by their headers; so inside them it is enough that offsets grow and both ends are right.
    if (
        offset_delta.max() > _OFFSET_DELTA_MAX
        or (offset_delta[last - counts + 1] < 0).any()
        or (offset_delta[last] > last_delta).any()
        or (offset[1:] <= offset[:-1]).any()
    ):
        raise InvalidRecord("the offset deltas of a batch do not grow, or leave it")
    raw = pa.py_buffer(stretch.data)
    return Places(
        raw, words, offset, stamp_delta, batch, key_start, key_length, value_start, value_length, tail, end
    )


def _find_records(
    stretch: Stretch, words: NDArray[np.uint32], counts: NDArray[np.int64], last: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(where each record begins, behind its length; where it ends)."""
    spans = stretch.spans
    parts = _guesses(stretch, words)
    starts = np.concatenate(parts)
    starts += np.repeat(np.array([begin for begin, _ in spans], np.int64), counts)
    stops = np.array([stop for _, stop in spans], np.int64)
    try:
        body, end, wrong = _ends(words, starts, last, stops)
    except (InvalidRecord, IndexError):  # what stands at a wrong guess need not be a number at all
        wrong = np.arange(len(starts))
    if wrong.size:
        for batch in np.unique(np.searchsorted(last, wrong)).tolist():
            begin, stop = spans[batch]
            rows = slice(int(last[batch] - counts[batch]) + 1, int(last[batch]) + 1)
            starts[rows] = walk(memoryview(stretch.data)[begin:stop], int(counts[batch])) + begin
        body, end, wrong = _ends(words, starts, last, stops)
        if wrong.size:
            raise InvalidRecord("a record of a negative length")
    return body, end


def _guesses(stretch: Stretch, words: NDArray[np.uint32]) -> list[NDArray[np.int64]]:
    """For each batch, where in it each of its records begins, or may begin: there is one place for each."""
    view = memoryview(stretch.data)
    shapes = [
        (stop - begin, header.record_count)
        for (begin, stop), header in zip(stretch.spans, stretch.headers, strict=True)
    ]
    known: dict[tuple[int, int], NDArray[np.int64]] = {}
    to_walk = sum(count for _, count in set(shapes))
    found = None
    if to_walk * _LOOKED_OVER_BYTES > len(view) and not _begins_with_run(
        view, stretch.spans[0], shapes[0][1]
    ):
        found = marks(view, words)
    if found is not None:
        edges = np.searchsorted(
            found, np.array([(begin + 1, stop) for begin, stop in stretch.spans])
        ).tolist()
    parts = []
    for number, (shape, (begin, stop)) in enumerate(zip(shapes, stretch.spans, strict=True)):
        places = known.get(shape)
        if places is None and found is not None:
            places = _guess(words, found[slice(*edges[number])], (begin, stop), shape[1])
        if places is None:
            places = known[shape] = walk(view[begin:stop], shape[1])
        parts.append(places)
    return parts


def _begins_with_run(view: memoryview, span: tuple[int, int], count: int) -> bool:
    """Whether a batch begins with many records of one length, which are walked in no time."""
    data = view[span[0] : span[1]]
    try:
        return _run(data, np.frombuffer(data, np.uint8), 0, count)[1] > 0
    except (IndexError, ZeroDivisionError):
        return False


def _guess(
    words: NDArray[np.uint32], found: NDArray[np.int64], span: tuple[int, int], count: int
) -> NDArray[np.int64] | None:
    """The places of `count` records, from the marks behind the first; None if they cannot be told."""
    begin, stop = span
    places = np.concatenate((np.array([begin]), found))
    if len(places) > count:  # a mark that is none leads to no other
        try:
            length, body = read_varints(words, places)
        except InvalidRecord:
            return None
        follows = np.append(places[1:], stop)
        after = body + length
        places = places[follows[np.minimum(np.searchsorted(follows, after), len(follows) - 1)] == after]
    return places - begin if len(places) == count else None


def _ends(
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


def walk(body: memoryview, count: int) -> NDArray[np.int64]:
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
            size, same = _run(data, array, position, count - done)
            if same:
                starts[done : done + same] = np.arange(position, position + same * size, size)
                position += same * size
                done += same
                continue
            walked, position = _walk_some(data, position, min(_WALK, count - done))
            starts[done : done + len(walked)] = walked
            done += len(walked)
    except IndexError as error:
        raise InvalidRecord("a record is longer than its batch") from error
    if position != len(data):
        raise InvalidRecord("the records of a batch do not end where it ends")
    return starts


def _run(data: bytes | memoryview, array: NDArray[np.uint8], position: int, left: int) -> tuple[int, int]:
    """(bytes of each, how many) records of one length from `position` on; none if they are few."""
    byte, width = data[position], 1
    number = byte & 0x7F
    while byte >= 0x80:
        byte = data[position + width]
        number |= (byte & 0x7F) << 7 * width
        width += 1
    size = width + (number >> 1)
    fits = min(left, (len(data) - position) // size)
    if fits < _RUN_MIN or (array[position : position + _RUN_MIN * size : size] != array[position]).any():
        return size, 0
    stop = position + size * fits
    equal = array[position:stop:size] == array[position]
    for place in range(1, width):
        equal &= array[position + place : stop : size] == array[position + place]
    same = fits if equal.all() else int(equal.argmin())
    return size, same if same >= _RUN_MIN else 0


def _walk_some(data: bytes | memoryview, position: int, count: int) -> tuple[list[int], int]:
    """(where each of `count` records begins, where the last one ends). The loop over records; nothing else is one."""
    found: list[int] = []
    append = found.append
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
    return found, position
