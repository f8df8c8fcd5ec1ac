"""Search of segments for the records that have a key, or a header with a value.

    mapped file -> headers of batches -> `find` in runs of uncompressed batches -> records of the batches that were hit
                                      -> decompressed records of a compressed batch -> the same

No index has the keys of records, so a search reads everything in its range. Bytes are compared by `find` of the mapped
file, which costs no work per record; only the records of batches with a hit are decoded, after a check of their CRC.
The code has no I/O of its own. A broker runs it in another process (`mansio.node.search_process`), because `find` holds
the interpreter.

Invariants:
* A match is a record of an intact batch. What cannot be read is skipped and named in the result.
* A search ends at the first of: its last offset, `matches_max` matches, `SKIPPED_MAX` skipped ranges, the end of its
  budget. The budget ends between two chunks, so each call advances by one at least.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from struct import Struct
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from mansio.errors import UNREADABLE_OR_DAMAGED, RequestError
from mansio.wire.batch.compression import DECOMPRESSED_BYTES_MAX, Codec, decompress
from mansio.wire.batch.record_batch import (
    CODEC_MASK,
    CONTROL_FLAG,
    HEADER_BYTES,
    LOG_OVERHEAD_BYTES,
    MAGIC,
    TimestampType,
    check_stored_batch,
    varint,
)
from mansio.wire.batch.record_reader import header_bounds, scan_records

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from mansio.wire.batch.record_batch import BatchHeader
    from mansio.wire.batch.record_reader import RecordLocation

CHUNK_BYTES: Final = 128 << 10
"""Bytes after which the budget is checked, and other processes go first."""

SKIPPED_MAX: Final = 100
"""Ranges of offsets that one call skips at most."""

SCRATCH_BYTES: Final = 1 << 20

DAMAGED: Final = "no batch begins where one should"

_HEADER_START: Final = Struct(">qi4xb4xhi8xq")
"""Base offset, length, magic, attributes, last offset delta, maximum timestamp of a batch."""


class Searchable(Protocol):
    """A mapped file, or bytes."""

    def find(self, sub: bytes, start: int, end: int, /) -> int: ...

    def __getitem__(self, index: slice, /) -> bytes: ...


class SearchTask(NamedTuple):
    """What is searched for: records with `key` or, if that is None, with a header, whose offset is from `start_offset`
    to below `end_offset`, and whose timestamp is from `since_ms` to `until_ms`, both included."""

    key: bytes | None
    header_name: bytes
    header_value: bytes
    start_offset: int
    end_offset: int
    since_ms: int
    until_ms: int
    matches_max: int
    budget_ms: int

    @property
    def encoded(self) -> bytes:
        """The bytes that each record to find contains."""
        if self.key is not None:
            return varint(len(self.key)) + self.key
        name, value = self.header_name, self.header_value
        return varint(len(name)) + name + varint(len(value)) + value


class SearchedFile(NamedTuple):
    """The bytes [`position`, `size`) of a segment, which begin with a batch. Its records have offsets from
    `first_offset` to below `end_offset`."""

    position: int
    size: int
    first_offset: int
    end_offset: int


class SkippedOffsets(NamedTuple):
    """Offsets that were not searched: from `first_offset` to below `end_offset`."""

    first_offset: int
    end_offset: int
    reason: str


class SearchResult(NamedTuple):
    """Everything below `next_offset` is searched or skipped. `matches`: (offset, timestamp in ms). `searched_bytes`: of
    the batches that were read, as they are stored."""

    next_offset: int
    matches: list[tuple[int, int]]
    skipped: list[SkippedOffsets]
    searched_bytes: int


def search_files(
    task: SearchTask,
    files: Sequence[SearchedFile],
    open_file: Callable[[int, int], Searchable],
    monotonic: Callable[[], float],
) -> SearchResult:
    """Search consecutive segments. `open_file(number, size)` returns the first `size` bytes of a file. Raises its
    `OSError`."""
    search = _Search(task, monotonic)
    for number, each in enumerate(files):
        if each.position < each.size and not search.search(open_file(number, each.size), each):
            break
        search.pass_to(each.end_offset)
        if search.is_over:
            break
    return search.result


class _Search:
    """State of one call."""

    def __init__(self, task: SearchTask, monotonic: Callable[[], float]) -> None:
        self._task = task
        self._encoded = task.encoded
        self._monotonic = monotonic
        self._end_s = monotonic() + task.budget_ms / 1000
        self._next_offset = task.start_offset
        self._matches: list[tuple[int, int]] = []
        self._skipped: list[SkippedOffsets] = []
        self._searched_bytes = 0
        self._scratch = bytearray(SCRATCH_BYTES)

    @property
    def is_over(self) -> bool:
        """Whether the call has to end."""
        return (
            self._next_offset >= self._task.end_offset
            or len(self._matches) >= self._task.matches_max
            or len(self._skipped) >= SKIPPED_MAX
            or self._monotonic() >= self._end_s
        )

    @property
    def result(self) -> SearchResult:
        return SearchResult(
            min(self._next_offset, self._task.end_offset), self._matches, self._skipped, self._searched_bytes
        )

    def pass_to(self, offset: int) -> None:
        """Everything below an offset is done."""
        self._next_offset = max(self._next_offset, offset)

    def search(self, buffer: Searchable, file: SearchedFile) -> bool:
        """Search a file. Return whether it is done, and the search goes on behind it."""
        task = self._task
        position, size, lowest = file.position, file.size, file.first_offset
        checked = position
        run: list[int] = []
        """Positions of uncompressed batches that follow each other, and are to be searched together."""
        while position < size:
            if size - position < HEADER_BYTES:
                break
            base, length, magic, attributes, last_delta, max_ms = _HEADER_START.unpack_from(
                buffer,  # type: ignore[arg-type]  # a buffer, which Python 3.11 has no protocol for
                position,
            )
            end = position + length + LOG_OVERHEAD_BYTES
            if (
                magic != MAGIC
                or length < HEADER_BYTES - LOG_OVERHEAD_BYTES
                or end > size
                or base < lowest
                or last_delta < 0
            ):
                break
            if base >= task.end_offset:
                if self._search_run(buffer, run, position, lowest):
                    self.pass_to(task.end_offset)
                return False
            is_wanted = (
                max_ms >= task.since_ms
                and base + last_delta >= task.start_offset
                and not attributes & CONTROL_FLAG
            )
            if is_wanted and not attributes & CODEC_MASK:
                run.append(position)
            else:
                if run and not self._search_run(buffer, run, position, lowest):
                    return False
                if is_wanted:
                    self._searched_bytes += end - position
                    if not self._search_batch(buffer[position:end], base, base + last_delta):
                        return False
                self.pass_to(base + last_delta + 1)
                if is_wanted and self.is_over:
                    return False
            lowest = base + last_delta + 1
            if end - checked >= CHUNK_BYTES:
                checked = end
                if not self._search_run(buffer, run, end, lowest) or self.is_over:
                    return False
            position = end
        if not self._search_run(buffer, run, position, lowest):
            return False
        if position < size:
            self._skip(max(lowest, self._next_offset), file.end_offset, DAMAGED)
        return True

    def _search_run(self, buffer: Searchable, run: list[int], end: int, next_offset: int) -> bool:
        """Search the uncompressed batches at the positions of `run`, the last of which ends at `end`. Return False if
        the search has to end within it."""
        if run:
            self._searched_bytes += end - run[0]
            encoded = self._encoded
            hit = buffer.find(encoded, run[0], end)
            while hit >= 0:
                index = bisect_right(run, hit)
                begin, stop = run[index - 1], run[index] if index < len(run) else end
                base, _, _, _, last_delta, _ = _HEADER_START.unpack_from(buffer, begin)  # type: ignore[arg-type]
                if not self._search_batch(buffer[begin:stop], base, base + last_delta):
                    self._searched_bytes -= end - stop
                    return False
                if index < len(run) and self._monotonic() >= self._end_s:
                    self._searched_bytes -= end - stop
                    self.pass_to(base + last_delta + 1)
                    return False
                hit = buffer.find(encoded, stop, end)
            run.clear()
        self.pass_to(next_offset)
        return True

    def _search_batch(self, batch: bytes, base: int, last_offset: int) -> bool:
        """Search the records of one batch. Return False if the search has to end before its end."""
        try:
            header = check_stored_batch(batch)
            if header.codec is Codec.NONE:
                data = batch[HEADER_BYTES:]
            else:
                data = decompress(
                    header.codec,
                    memoryview(batch)[HEADER_BYTES:],
                    DECOMPRESSED_BYTES_MAX,
                    scratch=self._scratch,
                )
                if data.find(self._encoded) < 0:
                    return True
            for match in self._matches_in(header, data):
                self._matches.append(match)
                if len(self._matches) >= self._task.matches_max:
                    self.pass_to(match[0] + 1)
                    return False
        except RequestError as error:
            if not isinstance(error, UNREADABLE_OR_DAMAGED):
                raise
            self._skip(base, last_offset + 1, error.message)
            if len(self._skipped) >= SKIPPED_MAX:
                self.pass_to(last_offset + 1)
                return False
        return True

    def _matches_in(self, header: BatchHeader, data: bytes) -> Iterator[tuple[int, int]]:
        task = self._task
        has_append_time = header.timestamp_type is TimestampType.LOG_APPEND
        for location in scan_records(data, header.record_count, header.last_offset_delta):
            if task.key is not None:
                if location.key != task.key:
                    continue
            elif not self._has_header(data, location):
                continue
            offset = header.base_offset + location.offset_delta
            timestamp_ms = (
                header.max_timestamp_ms
                if has_append_time
                else header.base_timestamp_ms + location.timestamp_delta_ms
            )
            if (
                task.start_offset <= offset < task.end_offset
                and task.since_ms <= timestamp_ms <= task.until_ms
            ):
                yield offset, timestamp_ms

    def _has_header(self, data: bytes, location: RecordLocation) -> bool:
        if data.find(self._encoded, location.start, location.end) < 0:
            return False
        encoded_name = varint(len(self._task.header_name)) + self._task.header_name
        return any(
            begin >= 0
            and data.startswith(encoded_name, name_begin)
            and data[begin:end] == self._task.header_value
            for name_begin, begin, end in header_bounds(data, location.start, location.end)
        )

    def _skip(self, first_offset: int, end_offset: int, reason: str) -> None:
        first_offset = max(first_offset, self._task.start_offset)
        end_offset = min(end_offset, self._task.end_offset)
        if first_offset < end_offset:
            self._skipped.append(SkippedOffsets(first_offset, end_offset, reason))


# -- encoding for another process --------


def encode_job(task: SearchTask, files: Sequence[SearchedFile]) -> bytes:
    """Encode the arguments of `search_files`."""
    fields = task._replace(
        key=None if task.key is None else task.key.hex(),  # type: ignore[arg-type]  # text in JSON
        header_name=task.header_name.hex(),  # type: ignore[arg-type]
        header_value=task.header_value.hex(),  # type: ignore[arg-type]
    )
    return json.dumps([fields, files]).encode()


def decode_job(job: bytes) -> tuple[SearchTask, list[SearchedFile]]:
    """Decode what `encode_job` has encoded."""
    (key, name, value, *numbers), files = json.loads(job)
    task = SearchTask(
        None if key is None else bytes.fromhex(key), bytes.fromhex(name), bytes.fromhex(value), *numbers
    )
    return task, [SearchedFile(*each) for each in files]


def encode_result(result: SearchResult) -> bytes:
    """Encode the result of `search_files`."""
    return json.dumps(result).encode()


def decode_result(data: bytes) -> SearchResult:
    """Decode what `encode_result` has encoded."""
    next_offset, matches, skipped, searched_bytes = json.loads(data)
    return SearchResult(
        next_offset,
        [(offset, timestamp_ms) for offset, timestamp_ms in matches],
        [SkippedOffsets(*each) for each in skipped],
        searched_bytes,
    )
