"""The log's own side of compaction: what of it may be compacted, and how a new segment comes into the table.

Belongs to one `Log` and to the loop. Always true: readers see either all of the old segments or the new one. They see
the new one from the moment on when the intent to swap is on stable storage, through a file that is already open; who
still holds an old segment goes on with its old file. While `busy`, no housekeeping touches the directory, no trimmed
segment leaves the table and no truncation begins.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mansio.storage.cleaner.compaction_state import CompactionState, write_state
from mansio.storage.segment import Segment, read_exactly
from mansio.wire.batch.record_batch import HEADER_BYTES, TimestampType, read_header

if TYPE_CHECKING:
    from mansio.ports import Disk
    from mansio.storage.cleaner.compaction import CleanedSegment
    from mansio.storage.file_cache import FileCache
    from mansio.storage.flush.flush_state import FlushState
    from mansio.storage.segment_list import SegmentList


class SegmentSwap:
    """See the module. `state` is what the file on disk says; `busy`: a swap, or a change of that file, is under way."""

    __slots__ = ("_files", "_flush_state", "_oldest", "_places", "_table", "busy", "state")

    def __init__(
        self,
        table: SegmentList,
        files: FileCache,
        flush_state: FlushState,
        places: dict[int, tuple[Segment, int]],
        state: CompactionState,
    ) -> None:
        self.state = state
        self.busy = False
        self._table = table
        self._files = files
        self._flush_state = flush_state
        self._places = places
        self._oldest: tuple[int, int | None] = (-1, None)

    @property
    def limit_offset(self) -> int:
        """Segments that end at or below are named by neither slot of the checkpoint on disk."""
        return self._flush_state.stable_offset

    def first_dirty_timestamp(self) -> int | None:
        """The timestamp (ms) of the first batch of the first segment that is not clean; None when there is none, or the
        segment is damaged and too short to have one: compacting it would say so.

        It reads one header, once per segment.
        """
        cleaned = self.state.cleaned_end_offset
        for segment in self._table.segments:
            if segment.end_offset > cleaned and segment.size:
                break
        else:
            return None
        if segment.size < HEADER_BYTES:
            return None
        if self._oldest[0] != segment.base_offset:
            header = read_header(read_exactly(self._files.file(segment), HEADER_BYTES, 0))
            stamped = header.timestamp_type is TimestampType.LOG_APPEND
            self._oldest = (
                segment.base_offset,
                header.max_timestamp_ms
                if stamped
                else min(header.base_timestamp_ms, header.max_timestamp_ms),
            )
        return self._oldest[1]

    @property
    def only_active_is_dirty(self) -> bool:
        """Are all closed segments clean?"""
        segments = self._table.segments
        return len(segments) == 1 or segments[-2].end_offset <= self.state.cleaned_end_offset

    def segments(self, count: int) -> tuple[Segment, ...]:
        """The first so many, which are closed."""
        return tuple(self._table.segments[:count])

    def holds(self, segments: tuple[Segment, ...]) -> bool:
        """Are all of them still in the log?"""
        return self._table.holds(segments)

    def trimmed(self, segments: tuple[Segment, ...]) -> bool:
        """Has any of them left the log otherwise than by being replaced?"""
        there = set(self._table.segments)
        return any(segment not in there and not segment.replaced for segment in segments)

    def pin(self, replacement: CleanedSegment) -> None:
        """Whoever reads an old segment must never meet the new file under its name. Raises `StorageError`."""
        for segment in replacement.old:
            segment.file = self._files.file(segment)

    def show(self, replacement: CleanedSegment) -> None:
        """From now on readers see the new segment; its file has still the name it was written under."""
        swap = replacement.swap
        new = Segment(replacement.old[0].directory, swap.base_offset, swap.size_bytes)
        new.end_offset = swap.end_offset
        new.file, new.index = replacement.file, replacement.sparse
        for segment in replacement.old:
            segment.replaced = True
        self._table.sparse_end_offset = max(self._table.sparse_end_offset, replacement.sparse_end_offset)
        self._table.replace(replacement.old, new)
        self._flush_state.segments_replaced(replacement.old, new)
        self._places.clear()
        self._oldest = (-1, None)

    def release(self, base_offset: int) -> None:
        """The new segment at `base_offset` has its final name."""
        for segment in self._table.segments:
            if segment.base_offset == base_offset and segment is not self._table.active:
                segment.file = None

    def truncating(self, disk: Disk, end_offset: int) -> None:
        """Before the log is cut back: it counts as compacted up to there at most. Raises `OSError`."""
        limited = self.state.limited(end_offset)._replace(swap=None)
        if limited != self.state:
            write_state(disk, self._table.segments[0].directory, limited)
            self.state = limited
            self._table.sparse_end_offset = limited.sparse_end_offset
        self._oldest = (-1, None)
