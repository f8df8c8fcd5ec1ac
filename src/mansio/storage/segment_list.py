"""The ordered segments of one log (Kafka: LogSegments), and the position of an offset in them.

Invariants:
* There is at least one segment; the last is the active one. The others' sizes and ends are final, and each end offset
  is the next segment's base offset.
* `_max_timestamps[n]` is the largest timestamp in the closed segments with the indexes 1 to n + 1. Segment 0 is left
  out, because a trim may have deleted some of its records.
* Below `sparse_end_offset` compaction may have left gaps between batches, and segments without any batch; an offset in
  a gap leads to the next batch.
* Segments that are removed from the list keep their files; the caller removes those.
* `LogSlice` (a byte range of a file) and `SegmentInfo` (the description of a segment) never change, even if the log
  does.
"""

from __future__ import annotations

import logging
from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING, NamedTuple

from mansio.errors import CorruptLog, StorageError
from mansio.logs import fields
from mansio.storage.scan import scan
from mansio.storage.segment import WALK_CHUNK_BYTES, Segment, read_exactly, walk

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mansio.ports import Disk, DiskFile
    from mansio.storage.file_cache import FileCache
    from mansio.wire.batch.record_batch import BatchHeader


class LogSlice(NamedTuple):
    """Whole batches as a byte range of one file: `length` bytes from `position`. The next read begins at `next_offset`.

    Holding the slice keeps the file's descriptor valid, even when its segment is deleted meanwhile.
    """

    file: DiskFile
    position: int
    length: int
    next_offset: int

    def read(self) -> bytes:
        """The bytes. Raises `StorageError` when the disk fails, `CorruptLog` when the file is shorter than it was."""
        return read_exactly(self.file, self.length, self.position)


class BatchPosition(NamedTuple):
    """One batch: its segment, position and length there, its first offset, and the offset after its last one."""

    segment: Segment
    position: int
    length: int
    first_offset: int
    next_offset: int


class ReadPositions(dict[int, tuple[Segment, int]]):
    """Where readers are expected to continue: for an offset, the segment and the position of its batch.

    `partly_read` is the batch of which one of the last reads wanted only some records, as share groups do that lease
    few records at a time: the next read is likely to want others of it.
    """

    __slots__ = ("partly_read",)

    def __init__(self) -> None:
        super().__init__()
        self.partly_read: BatchPosition | None = None

    def clear(self) -> None:
        """Forget all positions: segments were replaced, removed or shortened."""
        super().clear()
        self.partly_read = None


class SegmentInfo(NamedTuple):
    """Description of one segment. `max_timestamp_ms` is the largest timestamp in it (`NO_TIMESTAMP`: empty).

    If no record has a timestamp it is the time of the file's last modification, as in Kafka.
    """

    base_offset: int
    end_offset: int
    size_bytes: int
    max_timestamp_ms: int


def segment_info(segment: Segment, disk: Disk, files: FileCache) -> SegmentInfo:
    """Describe a segment. Raises `StorageError` when the disk fails."""
    timestamp = files.max_timestamp(segment)
    if timestamp < 0 and segment.size:
        try:
            timestamp = disk.modified_ms(segment.path)
        except OSError as error:
            raise StorageError(f"cannot read the modification time of {segment.path}: {error}") from error
    return SegmentInfo(segment.base_offset, segment.end_offset, segment.size, timestamp)


logger = logging.getLogger(__name__)


class SegmentList:
    """`segments` is changed only here."""

    __slots__ = ("_bases", "_files", "_max_timestamps", "active", "segments", "sparse_end_offset")

    def __init__(self, segments: list[Segment], files: FileCache, sparse_end_offset: int = 0) -> None:
        self.segments = segments
        self.sparse_end_offset = sparse_end_offset
        self.active = segments[-1]
        self._bases = [segment.base_offset for segment in segments]
        self._files = files
        self._max_timestamps: list[int] = []

    def add(self, segment: Segment) -> None:
        """Append a new active segment; the previous one is closed."""
        self.segments.append(segment)
        self._bases.append(segment.base_offset)
        self.active = segment

    def drop_below(self, offset: int) -> list[Segment]:
        """Remove the closed segments that end at or below `offset`; returns them."""
        keep = 0
        while keep < len(self.segments) - 1 and self.segments[keep].end_offset <= offset:
            self._files.evict(self.segments[keep])
            keep += 1
        if not keep:
            return []
        self._max_timestamps.clear()
        dropped = self.segments[:keep]
        del self.segments[:keep], self._bases[:keep]
        return dropped

    def drop_after(self, segment: Segment) -> None:
        """Remove everything after a segment, which becomes the active one."""
        at = self.segments.index(segment) + 1
        for dropped in self.segments[at - 1 :]:
            self._files.evict(dropped)
        del self.segments[at:], self._bases[at:], self._max_timestamps[max(0, at - 2) :]
        self.active = segment
        segment.recorded_end_offset = None

    def reset(self, segment: Segment) -> None:
        """Replace all segments by this one."""
        for dropped in self.segments:
            self._files.evict(dropped)
        self.segments[:], self._bases[:] = [segment], [segment.base_offset]
        self._max_timestamps.clear()
        self.active = segment

    def contains(self, segments: Sequence[Segment]) -> bool:
        """Whether these adjacent segments are in the log."""
        at = bisect_left(self._bases, segments[0].base_offset)
        return self.segments[at : at + len(segments)] == list(segments)

    def replace(self, old: Sequence[Segment], new: Segment) -> None:
        """Replace some adjacent closed segments by `new`."""
        at = self.segments.index(old[0])
        for segment in old:
            self._files.evict(segment)
        self.segments[at : at + len(old)] = [new]
        self._bases[at : at + len(old)] = [new.base_offset]
        self._max_timestamps.clear()

    def segments_from(self, offset: int) -> list[Segment]:
        """The segments from the one that contains `offset` on."""
        return self.segments[max(0, bisect_right(self._bases, offset) - 1) :]

    def segment_containing(self, offset: int) -> Segment:
        """The segment that contains `offset`, which is in the log."""
        return self.segments[bisect_right(self._bases, offset) - 1]

    def next_segment(self, segment: Segment) -> Segment:
        """The segment after a closed one."""
        return self.segments[bisect_right(self._bases, segment.base_offset)]

    def locate(self, offset: int) -> tuple[Segment, int]:
        """The segment that contains `offset` (which is in the log) and the position of its batch, or of the next one.

        The end of the last segment when compaction left nothing from there on.
        """
        at = bisect_right(self._bases, offset) - 1
        segment = self.segments[at]
        position, base_offset = self.batch_position(segment, offset)
        if position >= segment.size:
            self._raise_if_missing(segment, offset, base_offset)
        while position >= segment.size and segment is not self.active:
            at, position = at + 1, 0
            segment = self.segments[at]
        return segment, position

    def truncation_point(self, offset: int) -> tuple[Segment, int, int]:
        """(segment, position, end offset) of a log without the batches that reach to `offset` (in it) or beyond."""
        segment = self.segments[bisect_right(self._bases, offset) - 1]
        position, base_offset = self.batch_position(segment, offset)
        if position >= segment.size:
            self._raise_if_missing(segment, offset, base_offset)
        return segment, position, min(base_offset, offset)

    def _raise_if_missing(self, segment: Segment, offset: int, end_offset: int) -> None:
        """Raise `CorruptLog` unless compaction may have removed `offset`, which no batch of its segment contains or
        follows."""
        recorded = segment.recorded_end_offset if segment is not self.active else None
        if recorded is not None and offset >= recorded:
            raise CorruptLog(
                f"the segments after {segment.path} are missing: offsets {recorded} to {end_offset - 1}"
            )
        if offset >= self.sparse_end_offset:
            raise CorruptLog(f"{segment.path} does not contain offset {offset} (it ends at {end_offset})")

    def raise_if_segments_missing(self, segment: Segment, offset: int) -> None:
        """Raise `CorruptLog` if segments with `offset`, which follows the last batch of `segment`, are missing."""
        self._raise_if_missing(segment, offset, segment.end_offset)

    def _running_max_timestamps(self) -> list[int]:
        highest = self._max_timestamps
        for segment in self.segments[len(highest) + 1 : -1]:
            largest = self._files.max_timestamp(segment)
            highest.append(max(largest, highest[-1]) if highest else largest)
        return highest

    def segments_reaching(self, timestamp_ms: int) -> Iterator[Segment]:
        """The segments, in order, with a largest timestamp of at least `timestamp_ms`; the second by binary search."""
        if self._files.max_timestamp(self.segments[0]) >= timestamp_ms:
            yield self.segments[0]
        for at in range(1 + bisect_left(self._running_max_timestamps(), timestamp_ms), len(self.segments)):
            if self._files.max_timestamp(self.segments[at]) >= timestamp_ms:
                yield self.segments[at]

    def max_timestamp_candidates(self, limit: int) -> list[Segment]:
        """The segments, in order, one of which has the largest timestamp below the offset `limit`: three at most.

        The first one, the one that contains `limit`, and between them the first with the largest timestamp.
        """
        last = max(0, bisect_right(self._bases, limit) - 1)
        found = [self.segments[0]]
        if last > 1:
            highest = self._running_max_timestamps()
            found.append(self.segments[1 + bisect_left(highest, highest[last - 2])])
        if last:
            found.append(self.segments[last])
        return found

    def batch_position(self, segment: Segment, offset: int) -> tuple[int, int]:
        """(position, base offset) of the batch of a segment that contains `offset`; the segment's end when none
        does.
        """
        start = self._files.index(segment).position_before_offset(offset - segment.base_offset)
        for position, header in walk(self._files.file(segment), start, segment.size, segment.base_offset):
            if header.base_offset + header.last_offset_delta >= offset:
                return position, header.base_offset
        return segment.size, segment.end_offset

    def batch_position_within(
        self, segment: Segment, offset: int, position: int, end: int, end_offset: int
    ) -> tuple[int, int]:
        """`batch_position` in a part of a segment, [position, end), at the end of which `end_offset` is next."""
        start = max(position, self._files.index(segment).position_before_offset(offset - segment.base_offset))
        for at, header in walk(self._files.file(segment), start, end, segment.base_offset):
            if header.base_offset + header.last_offset_delta >= offset:
                return at, header.base_offset
        return end, end_offset

    def batch_boundary(
        self,
        segment: Segment,
        file: DiskFile,
        position: int,
        stop: int,
        max_bytes: int,
        next_offset: int,
    ) -> tuple[int, int]:
        """(position, offset) of a batch boundary at most `max_bytes` after `position`, but at least one batch after it.

        `stop` and `next_offset` are the boundary for a large `max_bytes`.
        """
        relative_offset, boundary = self._files.index(segment).entry_before_position(position + max_bytes)
        if boundary > position:
            return boundary, segment.base_offset + relative_offset
        for at, header in walk(file, position, stop, segment.base_offset):
            if at > position and at + header.batch_length + 12 > position + max_bytes:
                return at, header.base_offset
            if at == position and header.batch_length + 12 >= max_bytes:
                following = at + header.batch_length + 12
                return following, header.base_offset + header.last_offset_delta + 1
        return stop, next_offset

    def walk(
        self, from_offset: int, *, skip_damaged: bool = False
    ) -> Iterator[tuple[DiskFile, int, BatchHeader]]:
        """(file, position, header) of every batch from the one that contains `from_offset` to the current end.

        With `skip_damaged` damaged or missing batches in closed segments are logged and skipped. Otherwise, and in the
        active segment always, they raise `CorruptLog`.
        """
        snapshot = [
            (one, one.size, one.end_offset, one is self.active) for one in self.segments_from(from_offset)
        ]
        for segment, size, end_offset, active in snapshot:
            file = self._files.file(segment)
            start = self._files.index(segment).position_before_offset(
                max(0, from_offset - segment.base_offset)
            )
            end = from_offset
            for position, header in self._batches(
                segment, file, start, size, skip_damaged=skip_damaged and not active
            ):
                if header.base_offset + header.last_offset_delta >= from_offset:
                    end = header.base_offset + header.last_offset_delta + 1
                    yield file, position, header
            if not active and end < end_offset:
                try:
                    self._raise_if_missing(segment, end_offset - 1, end_offset)
                except CorruptLog as error:
                    if not skip_damaged:
                        raise
                    self._log_damage(segment, error)

    def _log_damage(self, segment: Segment, error: CorruptLog) -> None:
        logger.error("segment_damaged", extra=fields(path=segment.path, reason=error.message))

    def _batches(
        self, segment: Segment, file: DiskFile, position: int, size: int, *, skip_damaged: bool
    ) -> Iterator[tuple[int, BatchHeader]]:
        """(position, header) of the batches of one segment; with `skip_damaged` of the intact ones."""
        lowest = segment.base_offset
        try:
            for at, header in walk(file, position, size, lowest, WALK_CHUNK_BYTES):
                yield at, header
                position, lowest = at + header.size, header.last_offset + 1
        except CorruptLog as error:
            if not skip_damaged:
                raise
            self._log_damage(segment, error)
            yield from self._intact_batches(file, position, size, lowest, segment.end_offset)

    def _intact_batches(
        self, file: DiskFile, position: int, size: int, lowest: int, end_offset: int
    ) -> Iterator[tuple[int, BatchHeader]]:
        """(position, header) of the batches with a valid CRC in a part of a file that may be damaged."""
        try:
            size = min(size, file.size())
            for scanned in scan(file, size, lowest, end_offset, position=position):
                if scanned.header is not None and lowest <= scanned.header.base_offset < end_offset:
                    lowest = scanned.header.last_offset + 1
                    yield scanned.position, scanned.header
        except OSError as error:
            raise StorageError(f"cannot read {file.path}: {error}") from error
