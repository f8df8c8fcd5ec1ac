"""Compaction of one log (Kafka: Cleaner): plans it, reads segments and writes the compacted segments.

    start          cleaned end                    limit              active segment
      |---- clean ----|------- dirty, cleanable ----|-- uncleanable --|----

Clean segments are rewritten together with the dirty ones, because a dirty segment may contain newer values of their
keys. Segments are uncleanable if a checkpoint slot on disk refers to them or to earlier ones, if they contain
uncommitted records, or if they are younger than min.compaction.lag.ms. `plan_compaction` is a pure function; the active
segment is never part of a plan.

A `Compaction` runs on another thread. It first puts the newest offset of every key in the dirty segments into an offset
map of fixed size; if the map gets full, the run covers only the dirty records up to there. Then it reads all segments
from the start of the log up to that offset again, in groups of adjacent segments, and writes the records that are kept
to one new file per group. When such a file is on stable storage, the log replaces the group by it.

The work is divided into slices of about a millisecond (`run_slice`), because the thread shares the interpreter with the
event loop.

Invariants: a compaction changes no file that the log uses. It raises `CorruptLog` at a batch with a wrong CRC, which is
neither dropped nor copied, and at a segment after which others are missing, because the missing offsets could not be
distinguished from compacted ones afterwards.
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
from mansio.storage.cleaner.offset_map import ENTRY_BYTES, OffsetMap
from mansio.storage.compaction_state import UNSET_FIELD, PendingSwap, cleaned_path, sync_log_directory
from mansio.storage.file_cache import recorded_end_offset
from mansio.storage.index import SparseIndex
from mansio.storage.segment import PREFIX_BYTES, read_exactly
from mansio.storage.settings import RELATIVE_OFFSET_MAX
from mansio.wire.batch.record_batch import HEADER_BYTES, check_stored_batch, read_header

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Sequence

    from mansio.ports import Buffer, Disk, DiskFile
    from mansio.storage.compaction_state import CompactionState
    from mansio.storage.segment import Segment
    from mansio.storage.segment_list import SegmentInfo
    from mansio.wire.batch.record_batch import BatchHeader

SEGMENTS_PER_GROUP_MAX = 64
"""Maximum number of segments that one swap replaces; their files are kept open until they are removed together."""

UNLIMITED_MS = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class CompactionSettings:
    """The topic settings min.cleanable.dirty.ratio, min.compaction.lag.ms, max.compaction.lag.ms and
    delete.retention.ms, as in Kafka.
    """

    min_cleanable_dirty_ratio: float = 0.5
    min_compaction_lag_ms: int = 0
    max_compaction_lag_ms: int = UNLIMITED_MS
    delete_retention_ms: int = 24 * 3600 * 1000


class CompactionPlan(NamedTuple):
    """Plan of a compaction: it rewrites the first `segment_count` segments.

    The segments from the index `first_dirty_index` on are dirty. `dirty_bytes` is their size, `dirty_ratio` their share
    of all segments of the plan. `is_due`: the compaction should run now. `is_forced`: it is due
    whatever the dirty ratio is, because a record is older than max.compaction.lag.ms or a tombstone is past its delete
    horizon.
    """

    segment_count: int
    first_dirty_index: int
    dirty_bytes: int
    dirty_ratio: float
    is_forced: bool
    is_due: bool


NOTHING_TO_COMPACT = CompactionPlan(0, 0, 0, 0.0, is_forced=False, is_due=False)


def plan_compaction(
    segments: Sequence[SegmentInfo],
    state: CompactionState,
    settings: CompactionSettings,
    *,
    limit_offset: int,
    oldest_dirty_ms: int | None,
    now_ms: int,
) -> CompactionPlan:
    """Plan the compaction of a log. `segments` are all segments, oldest first.

    Segments that end above `limit_offset` are excluded. `oldest_dirty_ms` is the timestamp of the first dirty record,
    None if it is unknown.
    """
    clean_bytes = dirty_bytes = 0
    count = first_dirty_index = 0
    lag_ms = settings.min_compaction_lag_ms
    for segment in segments[:-1]:
        if segment.end_offset > limit_offset:
            break
        if segment.end_offset <= state.cleaned_end_offset:
            clean_bytes += segment.size_bytes
            first_dirty_index += 1
        elif lag_ms and segment.max_timestamp_ms > now_ms - lag_ms:
            break
        else:
            dirty_bytes += segment.size_bytes
        count += 1
    ratio = dirty_bytes / (clean_bytes + dirty_bytes) if dirty_bytes else 0.0
    too_old = (
        first_dirty_index < count
        and oldest_dirty_ms is not None
        and oldest_dirty_ms < now_ms - settings.max_compaction_lag_ms
    )
    tombstones = (
        count > 0 and state.last_delete_horizon_ms != UNSET_FIELD and state.last_delete_horizon_ms < now_ms
    )
    is_forced = too_old or tombstones
    is_due = is_forced or (first_dirty_index < count and ratio >= settings.min_cleanable_dirty_ratio)
    return CompactionPlan(count, first_dirty_index, dirty_bytes, ratio, is_forced, is_due)


def group_segments(segments: Sequence[SegmentInfo], segment_bytes: int) -> list[tuple[int, int]]:
    """Return groups of adjacent segments that are rewritten into one segment each, as (first, last + 1) indexes."""
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
"""A new file is synced each time this many bytes were written, so that no sync is long and delays other syncs."""

RECORDS_PER_BATCH = 12
"""Processing time of a batch without its records, expressed as a number of records."""

BYTES_PER_RECORD = 4096
"""Number of bytes whose check takes as long as the processing of one record."""

BYTES_PER_KEY_ESTIMATE = 16
"""Estimated minimum of log bytes per key, from which the size of the offset map of a small log is computed."""


class CompactionTask(NamedTuple):
    """Input of a compaction, copied from the log on the event loop.

    `segments` are the closed segments from the log's start on, `segment_infos` their descriptions. From the index
    `first_dirty_index` on they are dirty, beginning at `first_dirty_offset`. The compaction itself sets
    `rules.map_end_offset`. `map_bytes_max` is the maximum size of the offset map.
    """

    directory: str
    segments: tuple[Segment, ...]
    segment_infos: tuple[SegmentInfo, ...]
    first_dirty_index: int
    first_dirty_offset: int
    rules: CompactionRules
    segment_bytes: int
    index_interval_bytes: int
    map_bytes_max: int


class CompactionProgress(NamedTuple):
    """Numbers of bytes that a finished slice of work read and wrote."""

    bytes_read: int
    bytes_written: int


class CleanedSegment(NamedTuple):
    """A compacted file on stable storage that can replace the segments `old_segments`.

    `sparse_index` is its index, `delete_horizon_ms` the latest delete horizon in it. Below `sparse_end_offset` records
    may be missing in it.
    """

    swap: PendingSwap
    old_segments: tuple[Segment, ...]
    file: DiskFile
    sparse_index: SparseIndex
    delete_horizon_ms: int
    sparse_end_offset: int


class CompactionFinished(NamedTuple):
    """Last result of a compaction: below `cleaned_end_offset` no key has more than one value."""

    cleaned_end_offset: int
    last_delete_horizon_ms: int


class Compaction:
    """One compaction of one log, run on another thread slice by slice.

    The caller may raise `start_offset` while the compaction runs, after a trim: segments below it are skipped.
    """

    def __init__(self, disk: Disk, task: CompactionTask) -> None:
        self.task = task
        self.start_offset = 0
        self.records_dropped = 0
        self._disk = disk
        self._rules = task.rules
        self._records = 0
        self._bytes_read = 0
        self._bytes_written = 0
        self._unfinished_path = ""
        self._steps = self._run()

    def run_slice(self) -> CompactionProgress | CleanedSegment | CompactionFinished:
        """Run the next slice and return its result. After a `CleanedSegment` the next call starts the next group.

        Raises `CorruptLog`, `StorageError`, `OSError`. After an error, or to stop early, the caller calls `abandon`.
        """
        result = next(self._steps)
        if isinstance(result, CompactionFinished):
            # Its frame refers to this object. The cycle would keep the replaced segments with their files, and the map.
            self._steps.close()
        return result

    def abandon(self) -> None:
        """End the compaction and remove its unfinished file. Raises `OSError`; then recovery removes the file."""
        self._steps.close()
        if self._unfinished_path:
            path, self._unfinished_path = self._unfinished_path, ""
            if self._disk.exists(path):
                self._disk.remove(path)

    def release_file(self) -> None:
        """Pass the file of the last `CleanedSegment` to the log, so that `abandon` does not remove it."""
        self._unfinished_path = ""

    def _run(self) -> Generator[CompactionProgress | CleanedSegment | CompactionFinished, None, None]:
        task = self.task
        for segment in task.segments:
            self._check_no_segments_missing(segment)
            self._records += RECORDS_PER_BATCH
            if self._records >= RECORDS_PER_SLICE:
                yield self._take_progress()
        newest, map_end = yield from self._build_offset_map()
        self._rules = task.rules._replace(map_end_offset=map_end)
        count = sum(info.base_offset < map_end for info in task.segment_infos)
        last_delete_horizon_ms = NO_DELETE_HORIZON
        for first, last in group_segments(task.segment_infos[:count], task.segment_bytes):
            delete_horizon_ms = yield from self._rewrite(task.segments[first:last], newest)
            last_delete_horizon_ms = max(last_delete_horizon_ms, delete_horizon_ms)
        yield CompactionFinished(map_end, last_delete_horizon_ms)

    def _check_no_segments_missing(self, segment: Segment) -> None:
        """Raise `CorruptLog` if segments between `segment` and the next one are missing."""
        recorded = recorded_end_offset(self._disk, segment)
        if recorded is not None and recorded < segment.end_offset:
            raise CorruptLog(
                f"the segments after {segment.path} are missing: offsets {recorded} to {segment.end_offset - 1}"
            )

    # The map

    def _build_offset_map(self) -> Generator[CompactionProgress, None, tuple[OffsetMap, int]]:
        """Build the offset map of the dirty segments; returns it and the offset up to which it is complete."""
        task = self.task
        dirty = task.segments[task.first_dirty_index :]
        end = task.segments[-1].end_offset
        wanted = sum(segment.size for segment in dirty) // BYTES_PER_KEY_ESTIMATE
        newest = OffsetMap(task.map_bytes_max, entries_wanted=wanted)
        map_end = yield from self._fill_offset_map(newest, dirty, end)
        if map_end <= task.first_dirty_offset and dirty:  # not even the first batch fitted
            newest = OffsetMap(task.map_bytes_max)
            map_end = yield from self._fill_offset_map(newest, dirty, end)
        if map_end <= task.first_dirty_offset and dirty:
            raise StorageError(
                f"{dirty[0].path} has a batch at offset {map_end} with more keys than a map of "
                f"{newest.entries_max * ENTRY_BYTES} bytes can hold: raise log_cleaner_dedupe_buffer_size"
            )
        return newest, map_end

    def _fill_offset_map(
        self, newest: OffsetMap, dirty: Sequence[Segment], end: int
    ) -> Generator[CompactionProgress, None, int]:
        """Put the keys of the dirty segments into the map `newest`.

        Returns the offset of the first batch whose keys do not all fit, or `end` if all fit. Some keys of that batch
        may be in the map: their older values are removed and the batch itself is kept, so the result is correct.
        """
        rules, first_dirty_offset = self._rules, self.task.first_dirty_offset
        for _ in newest.prepare():
            yield self._take_progress()
        for segment in dirty:
            for header, batch in self._checked_batches(segment):
                if header.base_offset + header.last_offset_delta >= first_dirty_offset and not (
                    header.is_control or rules.is_aborted(header)
                ):
                    keys = yield from self._in_slices(key_digests(batch, header))
                    for digest, offset in keys:
                        if not newest.put(digest, offset):
                            return max(header.base_offset, first_dirty_offset)
                        self._records += 1
                        if self._records >= RECORDS_PER_SLICE:
                            yield self._take_progress()
                if self._records >= RECORDS_PER_SLICE:
                    yield self._take_progress()
        return end

    # The new segments

    def _rewrite(
        self, group: Sequence[Segment], newest: OffsetMap
    ) -> Generator[CompactionProgress | CleanedSegment, None, int]:
        """Write the kept records of a group of segments to a new file and yield it as `CleanedSegment`.

        Returns the latest delete horizon in the group. If nothing is removed, no file is yielded.
        """
        old = tuple(segment for segment in group if segment.end_offset > self.start_offset)
        if not old:
            return NO_DELETE_HORIZON
        path = cleaned_path(self.task.directory, old[0].base_offset)
        self._unfinished_path = path
        file = self._disk.open(path, create=True)
        file.truncate(0)
        index = SparseIndex(self.task.index_interval_bytes)
        waiting: list[Buffer] = []
        waiting_bytes = position = synced = 0
        changed = len(old) > 1
        delete_horizon_ms = NO_DELETE_HORIZON
        for segment in old:
            for header, batch in self._checked_batches(segment):
                kept = yield from self._in_slices(filter_batch(batch, header, newest, self._rules))
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
                    position += self._write_buffers(file, waiting, position)
                    waiting_bytes = 0
                    yield self._take_progress()
                    if position - synced >= SYNC_BYTES:
                        file.sync()
                        synced = position
                        yield self._take_progress()
                elif self._records >= RECORDS_PER_SLICE:
                    yield self._take_progress()
        position += self._write_buffers(file, waiting, position)
        if not changed:
            self._disk.remove(path)
            self._unfinished_path = ""
            return delete_horizon_ms
        file.sync()
        # The name is durable before any state refers to it.
        sync_log_directory(self._disk, self.task.directory)
        yield self._take_progress()
        end = old[-1].end_offset
        swap = PendingSwap(old[0].base_offset, end, position)
        yield CleanedSegment(swap, old, file, index, delete_horizon_ms, min(end, self._rules.map_end_offset))
        return delete_horizon_ms

    def _write_buffers(self, file: DiskFile, waiting: list[Buffer], position: int) -> int:
        if not waiting:
            return 0
        written = file.write_at(waiting, position)
        waiting.clear()
        self._bytes_written += written
        return written

    # Reading, in slices

    def _checked_batches(self, segment: Segment) -> Iterator[tuple[BatchHeader, memoryview]]:
        """Yield (header, bytes) of every batch of a segment, checked.

        Raises `CorruptLog` if a batch is damaged, or if the last batches of the segment are missing.
        """
        file = self._disk.open_readonly(segment.path)
        chunk = b""
        position = start = 0
        lowest = segment.base_offset
        while position < segment.size:
            at = position - start
            if at + HEADER_BYTES > len(chunk):
                chunk, start, at = self._read_chunk(file, position, segment.size, HEADER_BYTES), position, 0
            length = read_header(chunk, at).batch_length + PREFIX_BYTES
            if not HEADER_BYTES <= length <= segment.size - position:
                raise CorruptLog(f"{segment.path} has no batch at {position}, where one should begin")
            if at + length > len(chunk):
                chunk, start, at = self._read_chunk(file, position, segment.size, length), position, 0
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
        if lowest < segment.end_offset > max(self._rules.delete_horizon_end_offset, self.start_offset):
            raise CorruptLog(f"{segment.path} ends at offset {lowest}, not {segment.end_offset}")

    def _read_chunk(self, file: DiskFile, position: int, size: int, wanted: int) -> bytes:
        if wanted > size - position:
            raise CorruptLog(f"{file.path} has {size - position} stray bytes at {position}")
        data = read_exactly(file, min(max(READ_BYTES, wanted), size - position), position)
        self._bytes_read += len(data)
        return data

    def _in_slices(self, work: Generator[int, None, T]) -> Generator[CompactionProgress, None, T]:
        while True:
            try:
                self._records += next(work)
            except StopIteration as done:
                result: T = done.value
                return result
            if self._records >= RECORDS_PER_SLICE:
                yield self._take_progress()

    def _take_progress(self) -> CompactionProgress:
        done = CompactionProgress(self._bytes_read, self._bytes_written)
        self._records = self._bytes_read = self._bytes_written = 0
        return done
