"""Compaction of one log (Kafka: Cleaner): plans it, reads segments and writes their replacements.

    start          cleaned end                     limit            active segment
      |---- clean ----|-------- cleanable -----------|-- not yet --|----

Clean segments are rewritten together with the cleanable ones, because a value in a clean one may be superseded in a
cleanable one. "Not yet" is what is not durable by two checkpoints, not committed, or younger than
min.compaction.lag.ms. The plan is a pure function; the active segment is never part of it.

A `Compaction` runs on another thread. First the newest offset of every key in the dirty part is put into a map of fixed
size; where the map is full, the dirty part ends for this run. Then every segment from the start of the log up to there
is read again, adjacent segments in groups, and the records that are kept are written to a new file. When such a file is
on stable storage, the log swaps it in.

The work is done in slices of about a millisecond (`step`), because the interpreter is shared with the loop.

Invariants: nothing here changes a file that the log uses. A batch with a wrong CRC ends the compaction with
`CorruptLog`, it is neither dropped nor copied; so does a segment after which others are missing, because the missing
offsets could not be distinguished from compacted ones afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from mansio.errors import CorruptLog, RequestError, StorageError
from mansio.storage.cleaner.batch_filter import (
    NO_DELETE_HORIZON,
    RECORDS_PER_SLICE,
    CompactionRules,
    filter_batch,
    key_digests,
)
from mansio.storage.cleaner.compaction_state import UNSET_FIELD, PendingSwap, cleaned_path, sync_log_directory
from mansio.storage.cleaner.offset_map import ENTRY_BYTES, OffsetMap
from mansio.storage.file_cache import recorded_end_offset
from mansio.storage.index import SparseIndex
from mansio.storage.segment import PREFIX_BYTES, read_exactly
from mansio.wire.batch.record_batch import HEADER_BYTES, check_stored_batch, read_header

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Sequence

    from mansio.ports import Buffer, Disk, DiskFile
    from mansio.storage.cleaner.compaction_state import CompactionState
    from mansio.storage.segment import Segment
    from mansio.storage.segment_list import SegmentInfo
    from mansio.wire.batch.record_batch import BatchHeader

RELATIVE_OFFSET_MAX = (1 << 31) - 1
SEGMENTS_PER_GROUP_MAX = 64
"""Maximum number of old files that one swap replaces: they are held open and removed together."""

UNLIMITED_MS = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class CompactionSettings:
    """Kafka's topic settings: min.cleanable.dirty.ratio, min.compaction.lag.ms, max.compaction.lag.ms,
    delete.retention.ms.
    """

    min_cleanable_dirty_ratio: float = 0.5
    min_compaction_lag_ms: int = 0
    max_compaction_lag_ms: int = UNLIMITED_MS
    delete_retention_ms: int = 24 * 3600 * 1000


class CompactionPlan(NamedTuple):
    """What a compaction of a log now would do.

    Segments [0, `segment_count`) of the log would be rewritten, of which [`first_dirty`, `segment_count`) are dirty.
    `due`: it should be done now; `forced`: regardless of the dirty ratio, because of the age of a record or of a
    tombstone.
    """

    segment_count: int
    first_dirty: int
    dirty_bytes: int
    dirty_ratio: float
    forced: bool
    due: bool


NOTHING_TO_COMPACT = CompactionPlan(0, 0, 0, 0.0, forced=False, due=False)


def plan_compaction(
    segments: Sequence[SegmentInfo],
    state: CompactionState,
    settings: CompactionSettings,
    *,
    limit_offset: int,
    oldest_dirty_ms: int | None,
    now_ms: int,
) -> CompactionPlan:
    """Plan the compaction of a log. `segments`: all, oldest first; nothing at or above `limit_offset` is included.

    `oldest_dirty_ms` is the timestamp of the first dirty record, None if it is unknown.
    """
    clean_bytes = dirty_bytes = 0
    count = first_dirty = 0
    lag_ms = settings.min_compaction_lag_ms
    for segment in segments[:-1]:
        if segment.end_offset > limit_offset:
            break
        if segment.end_offset <= state.cleaned_end_offset:
            clean_bytes += segment.size_bytes
            first_dirty += 1
        elif lag_ms and segment.max_timestamp_ms > now_ms - lag_ms:
            break
        else:
            dirty_bytes += segment.size_bytes
        count += 1
    ratio = dirty_bytes / (clean_bytes + dirty_bytes) if dirty_bytes else 0.0
    too_old = (
        first_dirty < count
        and oldest_dirty_ms is not None
        and oldest_dirty_ms < now_ms - settings.max_compaction_lag_ms
    )
    tombstones = (
        count > 0 and state.last_delete_horizon_ms != UNSET_FIELD and state.last_delete_horizon_ms < now_ms
    )
    forced = too_old or tombstones
    due = forced or (first_dirty < count and ratio >= settings.min_cleanable_dirty_ratio)
    return CompactionPlan(count, first_dirty, dirty_bytes, ratio, forced, due)


def group_segments(segments: Sequence[SegmentInfo], segment_bytes: int) -> list[tuple[int, int]]:
    """Groups of adjacent segments to be rewritten into one segment each, as (first, last + 1) of `segments`."""
    groups: list[tuple[int, int]] = []
    first = size = 0
    for at, segment in enumerate(segments):
        if at > first and (
            size + segment.size_bytes > segment_bytes
            or segment.end_offset - segments[first].base_offset > RELATIVE_OFFSET_MAX
            or at - first >= SEGMENTS_PER_GROUP_MAX
        ):
            groups.append((first, at))
            first, size = at, 0
        size += segment.size_bytes
    if segments:
        groups.append((first, len(segments)))
    return groups


T = TypeVar("T")

READ_BYTES = 256 << 10
WRITE_BYTES = 256 << 10
WRITE_BUFFERS = 512
SYNC_BYTES = 8 << 20
"""A new file is synced this often, so that the last sync is short and does not delay other syncs."""

RECORDS_PER_BATCH = 12
"""The cost of a batch, as a number of records."""

BYTES_PER_RECORD = 4096
"""Checking this number of bytes costs as much as one record."""

BYTES_PER_ENTRY_GUESS = 16
"""Estimated minimum of log bytes per key, which keeps the map of a small log small."""


class CompactionTask(NamedTuple):
    """Input of a compaction, taken on the loop.

    `segments` are whole, closed segments from the log's start on; [`first_dirty`:] of them are dirty, from
    `dirty_offset` on. `rules.map_end_offset` is computed by the compaction.
    """

    directory: str
    segments: tuple[Segment, ...]
    segment_infos: tuple[SegmentInfo, ...]
    first_dirty: int
    dirty_offset: int
    rules: CompactionRules
    segment_bytes: int
    index_interval_bytes: int
    map_bytes_max: int


class CompactionProgress(NamedTuple):
    """Bytes that a finished slice of work read and wrote."""

    bytes_read: int
    bytes_written: int


class CleanedSegment(NamedTuple):
    """A file on stable storage that can replace the segments `old_segments`."""

    swap: PendingSwap
    old_segments: tuple[Segment, ...]
    file: DiskFile
    sparse_index: SparseIndex
    delete_horizon_ms: int
    sparse_end_offset: int


class CompactionFinished(NamedTuple):
    """The compaction is complete: below `cleaned_end_offset` no key has two values."""

    cleaned_end_offset: int
    last_delete_horizon_ms: int


class Compaction:
    """`start_offset` may be raised while it runs: segments below are skipped."""

    def __init__(self, disk: Disk, task: CompactionTask) -> None:
        self.task = task
        self.start_offset = 0
        self.records_dropped = 0
        self._disk = disk
        self._rules = task.rules
        self._records = 0
        self._bytes_read = 0
        self._bytes_written = 0
        self._unfinished = ""
        self._work = self._run()

    def step(self) -> CompactionProgress | CleanedSegment | CompactionFinished:
        """Run the next slice. After a `CleanedSegment` the next step continues with the next group.

        Raises `CorruptLog`, `StorageError`, `OSError`; then, and to stop before the end, call `abandon`.
        """
        return next(self._work)

    def abandon(self) -> None:
        """Remove the unfinished file. Raises `OSError`; recovery would remove it, too."""
        self._work.close()
        if self._unfinished:
            path, self._unfinished = self._unfinished, ""
            if self._disk.exists(path):
                self._disk.remove(path)

    def release_file(self) -> None:
        """Pass the last `CleanedSegment`'s file to the log: `abandon` does not remove it any more."""
        self._unfinished = ""

    def _run(self) -> Generator[CompactionProgress | CleanedSegment | CompactionFinished, None, None]:
        task = self.task
        for segment in task.segments:
            self._check_end(segment)
            self._records += RECORDS_PER_BATCH
            if self._records >= RECORDS_PER_SLICE:
                yield self._slice()
        newest, map_end = yield from self._build_map()
        self._rules = task.rules._replace(map_end_offset=map_end)
        count = sum(info.base_offset < map_end for info in task.segment_infos)
        last_delete_horizon_ms = NO_DELETE_HORIZON
        for first, last in group_segments(task.segment_infos[:count], task.segment_bytes):
            delete_horizon_ms = yield from self._rewrite(task.segments[first:last], newest)
            last_delete_horizon_ms = max(last_delete_horizon_ms, delete_horizon_ms)
        yield CompactionFinished(map_end, last_delete_horizon_ms)

    def _check_end(self, segment: Segment) -> None:
        """Raise `CorruptLog` if the next segment does not begin where this one ended when it was closed."""
        recorded = recorded_end_offset(self._disk, segment)
        if recorded is not None and recorded < segment.end_offset:
            raise CorruptLog(
                f"the segments after {segment.path} are missing: offsets {recorded} to {segment.end_offset - 1}"
            )

    # The map

    def _build_map(self) -> Generator[CompactionProgress, None, tuple[OffsetMap, int]]:
        """The map, and the offset up to which it is complete."""
        task = self.task
        dirty = task.segments[task.first_dirty :]
        end = task.segments[-1].end_offset
        wanted = sum(segment.size for segment in dirty) // BYTES_PER_ENTRY_GUESS
        newest = OffsetMap(task.map_bytes_max, entries_wanted=wanted)
        map_end = yield from self._fill(newest, dirty, end)
        if map_end <= task.dirty_offset and dirty:  # not even the first batch fitted
            newest = OffsetMap(task.map_bytes_max)
            map_end = yield from self._fill(newest, dirty, end)
        if map_end <= task.dirty_offset and dirty:
            raise StorageError(
                f"{dirty[0].path} has a batch at offset {map_end} with more keys than a map of "
                f"{newest.entries_max * ENTRY_BYTES} bytes can hold: raise log_cleaner_dedupe_buffer_size"
            )
        return newest, map_end

    def _fill(
        self, newest: OffsetMap, dirty: Sequence[Segment], end: int
    ) -> Generator[CompactionProgress, None, int]:
        """Put the dirty part into the map. Returns the offset of the first batch that does not fit completely, or
        `end`.

        Some keys of that batch may be in the map. Their older values are removed and the batch is kept, which is
        correct, too.
        """
        rules, dirty_offset = self._rules, self.task.dirty_offset
        for _ in newest.prepare():
            yield self._slice()
        for segment in dirty:
            for header, batch in self._batches(segment):
                if header.base_offset + header.last_offset_delta >= dirty_offset and not (
                    header.is_control or rules.is_aborted(header)
                ):
                    keys = yield from self._sliced(key_digests(batch, header, rules.output_bytes_max))
                    for digest, offset in keys:
                        if not newest.put(digest, offset):
                            return max(header.base_offset, dirty_offset)
                        self._records += 1
                        if self._records >= RECORDS_PER_SLICE:
                            yield self._slice()
                if self._records >= RECORDS_PER_SLICE:
                    yield self._slice()
        return end

    # The new segments

    def _rewrite(
        self, group: Sequence[Segment], newest: OffsetMap
    ) -> Generator[CompactionProgress | CleanedSegment, None, int]:
        """Write the kept records of some segments and yield the new file. Returns the latest delete horizon in it."""
        old = tuple(segment for segment in group if segment.end_offset > self.start_offset)
        if not old:
            return NO_DELETE_HORIZON
        path = cleaned_path(self.task.directory, old[0].base_offset)
        self._unfinished = path
        file = self._disk.open(path, create=True)
        file.truncate(0)
        index = SparseIndex(self.task.index_interval_bytes)
        waiting: list[Buffer] = []
        waiting_bytes = position = synced = 0
        changed = len(old) > 1
        delete_horizon_ms = NO_DELETE_HORIZON
        for segment in old:
            for header, batch in self._batches(segment):
                kept = yield from self._sliced(filter_batch(batch, header, newest, self._rules))
                if kept.is_unfiltered:  # the tombstones after it delete values that may be in it
                    floor = min(self._rules.tombstone_floor, header.base_offset)
                    self._rules = self._rules._replace(tombstone_floor=floor)
                changed |= kept.batch is not batch
                delete_horizon_ms = max(delete_horizon_ms, kept.delete_horizon_ms)
                if kept.batch is not None and kept.header is not None:
                    index.add(
                        header.base_offset - old[0].base_offset,
                        position + waiting_bytes,
                        kept.header.max_timestamp_ms,
                    )
                    waiting.append(kept.batch)
                    waiting_bytes += len(kept.batch)
                    self.records_dropped += header.record_count - kept.header.record_count
                else:
                    self.records_dropped += header.record_count
                if waiting_bytes >= WRITE_BYTES or len(waiting) >= WRITE_BUFFERS:
                    position += self._write(file, waiting, position)
                    waiting_bytes = 0
                    yield self._slice()
                    if position - synced >= SYNC_BYTES:
                        file.sync()
                        synced = position
                        yield self._slice()
                elif self._records >= RECORDS_PER_SLICE:
                    yield self._slice()
        position += self._write(file, waiting, position)
        if not changed:
            self._disk.remove(path)
            self._unfinished = ""
            return delete_horizon_ms
        file.sync()
        # The name is durable before any state refers to it.
        sync_log_directory(self._disk, self.task.directory)
        yield self._slice()
        end = old[-1].end_offset
        swap = PendingSwap(old[0].base_offset, end, position)
        yield CleanedSegment(swap, old, file, index, delete_horizon_ms, min(end, self._rules.map_end_offset))
        return delete_horizon_ms

    def _write(self, file: DiskFile, waiting: list[Buffer], position: int) -> int:
        if not waiting:
            return 0
        written = file.write_at(waiting, position)
        waiting.clear()
        self._bytes_written += written
        return written

    # Reading, in slices

    def _batches(self, segment: Segment) -> Iterator[tuple[BatchHeader, memoryview]]:
        """Every batch of a segment, checked. Raises `CorruptLog`, also if it ends before the offset it should."""
        file = self._disk.open_readonly(segment.path)
        chunk = b""
        position = start = 0
        lowest = segment.base_offset
        while position < segment.size:
            at = position - start
            if at + HEADER_BYTES > len(chunk):
                chunk, start, at = self._read(file, position, segment.size, HEADER_BYTES), position, 0
            length = read_header(chunk, at).batch_length + PREFIX_BYTES
            if not HEADER_BYTES <= length <= segment.size - position:
                raise CorruptLog(f"{segment.path} has no batch at {position}, where one should begin")
            if at + length > len(chunk):
                chunk, start, at = self._read(file, position, segment.size, length), position, 0
            batch = memoryview(chunk)[at : at + length]
            try:
                header = check_stored_batch(batch)
            except RequestError as error:
                raise CorruptLog(f"{segment.path} is damaged at {position}: {error}") from error
            end = header.base_offset + header.last_offset_delta + 1
            if header.base_offset < lowest or end > segment.end_offset:
                raise CorruptLog(f"{segment.path} has offsets {header.base_offset} to {end} at {position}")
            lowest = end
            self._records += RECORDS_PER_BATCH + length // BYTES_PER_RECORD
            yield header, batch
            position += length
        if lowest < segment.end_offset > max(self._rules.delete_horizon_below, self.start_offset):
            raise CorruptLog(f"{segment.path} ends at offset {lowest}, not {segment.end_offset}")

    def _read(self, file: DiskFile, position: int, size: int, wanted: int) -> bytes:
        if wanted > size - position:
            raise CorruptLog(f"{file.path} has {size - position} stray bytes at {position}")
        data = read_exactly(file, min(max(READ_BYTES, wanted), size - position), position)
        self._bytes_read += len(data)
        return data

    def _sliced(self, work: Generator[int, None, T]) -> Generator[CompactionProgress, None, T]:
        while True:
            try:
                self._records += next(work)
            except StopIteration as done:
                result: T = done.value
                return result
            if self._records >= RECORDS_PER_SLICE:
                yield self._slice()

    def _slice(self) -> CompactionProgress:
        done = CompactionProgress(self._bytes_read, self._bytes_written)
        self._records = self._bytes_read = self._bytes_written = 0
        return done
