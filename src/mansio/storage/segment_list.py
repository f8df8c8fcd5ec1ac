"""The segments of one log in offset order (Kafka: LogSegments), and the lookup of an offset's file position.

Invariants:
* There is at least one segment; the last one is active. The sizes and end offsets of the others are final, and each end
  offset is the next segment's base offset.
* `_max_timestamps[n]` is the largest timestamp in the closed segments with the indexes 1 to n + 1. Segment 0 is left
  out, because a trim may have deleted some of its records.
* Below `sparse_end_offset` compaction may have left gaps between batches, and segments without any batch. The lookup of
  an offset in a gap returns the next batch.
* A segment that is removed from the list keeps its files; the caller removes them.
* `LogSlice` (a byte range of a file) and `SegmentInfo` (the description of a segment) are immutable.
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
    from collections.abc import Callable, Iterator, Sequence

    from mansio.ports import Disk, DiskFile
    from mansio.storage.file_cache import FileCache
    from mansio.wire.batch.record_batch import BatchHeader


class LogSlice(NamedTuple):
    """A byte range of one file that contains whole batches: `length` bytes from `position`.

    The next read continues at `next_offset`. As long as the slice exists the file stays open, even if its segment is
    deleted.
    """

    file: DiskFile
    position: int
    length: int
    next_offset: int

    def read(self) -> bytes:
        """Read the bytes of the slice. Raises `CorruptLog` if the file is too short, otherwise `StorageError`."""
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
    """Description of one segment, as it was when the description was made.

    `max_timestamp_ms` is the largest timestamp of its records, or `NO_TIMESTAMP` if the segment is empty. If no record
    has a timestamp, it is the time of the file's last modification, as in Kafka.
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
    """The segments of one log in offset order; `active` is the last one. Only methods of this class change the list."""

    __slots__ = ("_bases", "_files", "_max_timestamps", "active", "segments", "sparse_end_offset")

    def __init__(self, segments: list[Segment], files: FileCache, sparse_end_offset: int = 0) -> None:
        self.segments = segments
        self.sparse_end_offset = sparse_end_offset
        self.active = segments[-1]
        self._bases = [segment.base_offset for segment in segments]
        self._files = files
        self._max_timestamps: list[int] = []

    def add(self, segment: Segment) -> None:
        """Append `segment` as the new active segment; the caller has closed the previous one."""
        self.segments.append(segment)
        self._bases.append(segment.base_offset)
        self.active = segment

    def drop_below(self, offset: int) -> list[Segment]:
        """Remove and return the closed segments that end at or below `offset`."""
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
        """Remove all segments after `segment`, which becomes the active one."""
        at = self.segments.index(segment) + 1
        for dropped in self.segments[at - 1 :]:
            self._files.evict(dropped)
        del self.segments[at:], self._bases[at:], self._max_timestamps[max(0, at - 2) :]
        self.active = segment
        segment.recorded_end_offset = None

    def reset(self, segment: Segment) -> None:
        """Replace all segments by `segment`."""
        for dropped in self.segments:
            self._files.evict(dropped)
        self.segments[:], self._bases[:] = [segment], [segment.base_offset]
        self._max_timestamps.clear()
        self.active = segment

    def contains(self, segments: Sequence[Segment]) -> bool:
        """Whether the adjacent `segments` are all in the list."""
        at = bisect_left(self._bases, segments[0].base_offset)
        return self.segments[at : at + len(segments)] == list(segments)

    def replace(self, old: Sequence[Segment], new: Segment) -> None:
        """Replace the adjacent closed segments `old` by `new`."""
        at = self.segments.index(old[0])
        for segment in old:
            self._files.evict(segment)
        self.segments[at : at + len(old)] = [new]
        self._bases[at : at + len(old)] = [new.base_offset]
        self._max_timestamps.clear()

    def segments_from(self, offset: int) -> list[Segment]:
        """Return the segment that contains `offset`, and all later ones."""
        return self.segments[max(0, bisect_right(self._bases, offset) - 1) :]

    def segment_containing(self, offset: int) -> Segment:
        """Return the segment that contains `offset`, which must not be below the log start offset."""
        return self.segments[bisect_right(self._bases, offset) - 1]

    def next_segment(self, segment: Segment) -> Segment:
        """Return the segment after the closed segment `segment`."""
        return self.segments[bisect_right(self._bases, segment.base_offset)]

    def locate(self, offset: int) -> tuple[Segment, int]:
        """(segment, position) of the batch that contains `offset`; if compaction removed it, of the next batch.

        If there is no next batch, the result is the active segment and its size. Raises `CorruptLog` if the batch is
        missing for another reason.
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
        """(segment, position, end offset) of the end of the log after `Log.truncate_to(offset)`.

        Raises `CorruptLog` if the batch that contains `offset` is missing.
        """
        segment = self.segments[bisect_right(self._bases, offset) - 1]
        position, base_offset = self.batch_position(segment, offset)
        if position >= segment.size:
            self._raise_if_missing(segment, offset, base_offset)
        return segment, position, min(base_offset, offset)

    def _raise_if_missing(self, segment: Segment, offset: int, end_offset: int) -> None:
        """Raise `CorruptLog` unless compaction may have removed the record at `offset`.

        The caller found neither a batch with `offset` nor a later one in `segment`, which ends at `end_offset`.
        """
        recorded = segment.recorded_end_offset if segment is not self.active else None
        if recorded is not None and offset >= recorded:
            raise CorruptLog(
                f"the segments after {segment.path} are missing: offsets {recorded} to {end_offset - 1}"
            )
        if offset >= self.sparse_end_offset:
            raise CorruptLog(f"{segment.path} does not contain offset {offset} (it ends at {end_offset})")

    def raise_if_segments_missing(self, segment: Segment, offset: int) -> None:
        """Raise `CorruptLog` unless compaction removed `offset`, which is above the last batch of `segment`."""
        self._raise_if_missing(segment, offset, segment.end_offset)

    def _running_max_timestamps(self) -> list[int]:
        highest = self._max_timestamps
        for segment in self.segments[len(highest) + 1 : -1]:
            largest = self._files.max_timestamp(segment)
            highest.append(max(largest, highest[-1]) if highest else largest)
        return highest

    def segments_reaching(self, timestamp_ms: int) -> Iterator[Segment]:
        """Yield, in offset order, the segments with a timestamp of at least `timestamp_ms`.

        Binary search skips older closed segments without loading their indexes.
        """
        if self._files.max_timestamp(self.segments[0]) >= timestamp_ms:
            yield self.segments[0]
        for at in range(1 + bisect_left(self._running_max_timestamps(), timestamp_ms), len(self.segments)):
            if self._files.max_timestamp(self.segments[at]) >= timestamp_ms:
                yield self.segments[at]

    def max_timestamp_candidates(self, limit: int) -> list[Segment]:
        """At most three segments, in offset order, one of which has the largest timestamp below the offset `limit`.

        They are the first segment, the segment that contains `limit`, and the first one with the largest timestamp of
        all segments between these two.
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
        """(position, base offset) of the first batch in `segment` that ends above `offset`.

        If there is none, the result is the end of the segment: (size, end offset).
        """
        start = self._files.index(segment).position_before_offset(offset - segment.base_offset)
        for position, header in walk(self._files.file(segment), start, segment.size, segment.base_offset):
            if header.base_offset + header.last_offset_delta >= offset:
                return position, header.base_offset
        return segment.size, segment.end_offset

    def batch_position_within(
        self, segment: Segment, offset: int, position: int, end: int, end_offset: int
    ) -> tuple[int, int]:
        """(position, base offset) of the first batch in the bytes [position, end) of `segment` that ends above `offset`

        If there is none, the result is (`end`, `end_offset`), where `end_offset` is the offset at `end`.
        """
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
        """(position, offset) of the end of a read that starts at `position` and has at most `max_bytes`.

        The read includes at least one batch. `stop` and `next_offset` are its end without the limit.
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
        self,
        from_offset: int,
        *,
        skip_damaged: bool = False,
        on_damage: Callable[[int], object] = lambda _: None,
    ) -> Iterator[tuple[DiskFile, int, BatchHeader]]:
        """Yield (file, position, header) of every batch from the one that contains `from_offset` up to the current end.

        With `skip_damaged`, damaged or missing batches in closed segments are logged and skipped, and `on_damage` is
        called between the batches before and after them with the end offset of the former. Otherwise, and always in
        the active segment, they raise `CorruptLog`. Offsets that are missing between two batches are only passed to
        `on_damage`.
        """
        snapshot = [
            (one, one.size, one.end_offset, one is self.active) for one in self.segments_from(from_offset)
        ]
        for segment, size, end_offset, active in snapshot:
            file = self._files.file(segment)
            start = self._files.index(segment).position_before_offset(
                max(0, from_offset - segment.base_offset)
            )
            end = max(from_offset, segment.base_offset)
            skipped: list[int] = []  # positions since the last batch
            for position, header in self._batches(
                segment, file, start, size, skipped if skip_damaged and not active else None
            ):
                if header.base_offset + header.last_offset_delta >= from_offset:
                    if header.base_offset > end and (skipped or header.base_offset > self.sparse_end_offset):
                        on_damage(end)
                    skipped.clear()
                    end = header.base_offset + header.last_offset_delta + 1
                    yield file, position, header
            if not active and end < end_offset:
                try:
                    self._raise_if_missing(segment, end_offset - 1, end_offset)
                except CorruptLog as error:
                    if not skip_damaged:
                        raise
                    self._log_damage(segment, error)
                    skipped.append(size)
            if skipped:
                on_damage(min(end, end_offset))

    def _log_damage(self, segment: Segment, error: CorruptLog) -> None:
        logger.error("segment_damaged", extra=fields(path=segment.path, reason=error.message))

    def _batches(
        self, segment: Segment, file: DiskFile, position: int, size: int, skipped: list[int] | None
    ) -> Iterator[tuple[int, BatchHeader]]:
        """Yield (position, header) of the batches of one segment. Damaged batches are skipped if there is a list
        `skipped`, to which their positions are added before the next batch is yielded."""
        lowest = segment.base_offset
        try:
            for at, header in walk(file, position, size, lowest, WALK_CHUNK_BYTES):
                yield at, header
                position, lowest = at + header.size, header.last_offset + 1
        except CorruptLog as error:
            if skipped is None:
                raise
            self._log_damage(segment, error)
            skipped.append(position)
            yield from self._intact_batches(file, position, size, lowest, segment.end_offset, skipped)

    def _intact_batches(
        self, file: DiskFile, position: int, size: int, lowest: int, end_offset: int, skipped: list[int]
    ) -> Iterator[tuple[int, BatchHeader]]:
        """Yield (position, header) of the batches with a valid CRC in a part of a file that may be damaged."""
        try:
            size = min(size, file.size())
            for scanned in scan(file, size, lowest, end_offset, position=position):
                if scanned.header is not None and lowest <= scanned.header.base_offset < end_offset:
                    lowest = scanned.header.last_offset + 1
                    yield scanned.position, scanned.header
                else:
                    skipped.append(scanned.position)
        except OSError as error:
            raise StorageError(f"cannot read {file.path}: {error}") from error
