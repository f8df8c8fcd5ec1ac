"""Segment swap of one `Log`: replaces segments by a compacted one, and determines which segments may be replaced.

Used on the event loop only.

Invariants:
* Readers see either all of the old segments or the new one. They see the new one as soon as the intent to swap is on
  stable storage, through a file that is already open; a reader that still uses an old segment continues with its file.
* While `is_busy` is set, no maintenance job and no truncation starts, and trimmed segments stay in the segment list.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mansio.storage.checked_ranges import CheckedRanges
from mansio.storage.compaction_state import CompactionState, write_state
from mansio.storage.segment import Segment, read_exactly
from mansio.wire.batch.record_batch import HEADER_BYTES, TimestampType, read_header

if TYPE_CHECKING:
    from mansio.ports import Disk
    from mansio.storage.cleaner.compaction import CleanedSegment
    from mansio.storage.file_cache import FileCache
    from mansio.storage.flush_state import FlushState
    from mansio.storage.segment_list import ReadPositions, SegmentList


class SegmentSwap:
    """Segment swaps of one log. `state` is the compaction state on disk; `is_busy`: a swap or a change of it runs."""

    __slots__ = ("_files", "_first_dirty", "_flush_state", "_read_positions", "_segments", "is_busy", "state")

    def __init__(
        self,
        segments: SegmentList,
        files: FileCache,
        flush_state: FlushState,
        read_positions: ReadPositions,
        state: CompactionState,
    ) -> None:
        self.state = state
        self.is_busy = False
        self._segments = segments
        self._files = files
        self._flush_state = flush_state
        self._read_positions = read_positions
        self._first_dirty: tuple[int, int | None] = (-1, None)
        """Base offset of the first dirty segment and timestamp (ms) of its first batch, as last read."""

    @property
    def replaceable_end_offset(self) -> int:
        """Segments that end at or below this offset may be replaced: no checkpoint slot on disk refers to them."""
        return self._flush_state.lowest_checkpoint_base_offset

    def first_dirty_timestamp(self) -> int | None:
        """Timestamp (ms) of the first batch of the first dirty segment; reads one batch header once per segment.

        None if no segment is dirty, or if that segment is too short for a batch: its compaction reports the damage.
        """
        cleaned = self.state.cleaned_end_offset
        for segment in self._segments.segments:
            if segment.end_offset > cleaned and segment.size:
                break
        else:
            return None
        if segment.size < HEADER_BYTES:
            return None
        if self._first_dirty[0] != segment.base_offset:
            header = read_header(read_exactly(self._files.file(segment), HEADER_BYTES, 0))
            stamped = header.timestamp_type is TimestampType.LOG_APPEND
            self._first_dirty = (
                segment.base_offset,
                header.max_timestamp_ms
                if stamped
                else min(header.base_timestamp_ms, header.max_timestamp_ms),
            )
        return self._first_dirty[1]

    @property
    def only_active_is_dirty(self) -> bool:
        """Whether all closed segments are clean, so that only the active segment is dirty."""
        segments = self._segments.segments
        return len(segments) == 1 or segments[-2].end_offset <= self.state.cleaned_end_offset

    def first_segments(self, count: int) -> tuple[Segment, ...]:
        """Return the first `count` segments of the log; the caller includes only closed ones."""
        return tuple(self._segments.segments[:count])

    def contains(self, segments: tuple[Segment, ...]) -> bool:
        """Whether the adjacent `segments` are all still in the log."""
        return self._segments.contains(segments)

    def is_any_trimmed(self, segments: tuple[Segment, ...]) -> bool:
        """Whether any of `segments` was removed from the log by a trim."""
        current = set(self._segments.segments)
        return any(segment not in current and not segment.replaced for segment in segments)

    def open_old_files(self, replacement: CleanedSegment) -> None:
        """Open the files of the old segments, so that their readers do not open the new file, which gets the same name.

        Raises `StorageError`.
        """
        for segment in replacement.old_segments:
            segment.file = self._files.file(segment)

    def publish(self, replacement: CleanedSegment) -> None:
        """Replace the old segments by the new one in the log, whose file still has its temporary name."""
        swap = replacement.swap
        new = Segment(replacement.old_segments[0].directory, swap.base_offset, swap.size_bytes)
        new.end_offset = swap.end_offset
        new.file, new.index = replacement.file, replacement.sparse_index
        new.checked = CheckedRanges()
        for segment in replacement.old_segments:
            segment.replaced = True
        self._segments.sparse_end_offset = max(
            self._segments.sparse_end_offset, replacement.sparse_end_offset
        )
        self._segments.replace(replacement.old_segments, new)
        self._flush_state.record_replaced_segments(replacement.old_segments, new)
        self._read_positions.clear()
        self._first_dirty = (-1, None)

    def release_file(self, base_offset: int) -> None:
        """Release the open file of the new segment at `base_offset`, because the file has its final name now."""
        for segment in self._segments.segments:
            if segment.base_offset == base_offset and segment is not self._segments.active:
                segment.file = None

    def truncate_state(self, disk: Disk, end_offset: int) -> None:
        """Lower the offsets of the compaction state before the log is truncated to `end_offset`.

        Raises `OSError`, `DirectoryNotSynced`.
        """
        limited = self.state.truncated_to(end_offset)._replace(swap=None)
        if limited != self.state:
            write_state(disk, self._segments.segments[0].directory, limited)
            self.state = limited
            self._segments.sparse_end_offset = limited.sparse_end_offset
        self._first_dirty = (-1, None)
