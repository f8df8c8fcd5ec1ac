"""Repair of a closed segment: a copy in which damaged batches are replaced by those of another replica.

The copy is written beside the segment, verified as a whole, flushed, and renamed over the segment, so that a crash
leaves either the old or the new file. Intact batches are copied from the segment; missing and damaged ones come from
another replica. The length of the file may change, its offsets do not.

Only segments without gaps between offsets are repaired this way. Replicas are compacted independently, and a mixture of
two compacted segments may contain a deleted key again.

Invariant: no file that the log uses is changed before `SegmentCopy.swap`. All methods except the constructor do
blocking I/O on at most one slice (`SLICE_BYTES`, `SLICE_BATCHES`) and may run on any thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from mansio.errors import StorageError
from mansio.storage.checksummed_file import TEMPORARY_SUFFIX
from mansio.storage.index import SparseIndex
from mansio.storage.segment import WALK_CHUNK_BYTES, read_exactly, walk
from mansio.storage.verification import CheckTask, check_batches

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mansio.ports import Buffer, Disk, DiskFile
    from mansio.storage.segment import Segment
    from mansio.storage.verification import CheckResult

SLICE_BYTES: Final = 1 << 20
SLICE_BATCHES: Final = 512
SYNC_BYTES: Final = 4 << 20
"""The copy is flushed each time this many bytes were written, so that no flush blocks the thread for long."""

SEGMENT_BYTES_MAX: Final = (1 << 31) - 1
"""Maximum size of a repaired segment. It may exceed segment.bytes, because it also replaces lost segments that followed
it."""


class SegmentCopy:
    """The repaired copy of one segment: `size` bytes were written; `index` describes the part that was verified."""

    def __init__(self, disk: Disk, segment: Segment, *, index_interval_bytes: int) -> None:
        self.size = 0
        self.index = SparseIndex(index_interval_bytes)
        self._disk = disk
        self._segment = segment
        self._path = segment.path + TEMPORARY_SUFFIX
        self._file: DiskFile | None = None
        self._synced_size = 0
        self._checked_position = 0
        self._checked_offset = segment.base_offset

    def copy_intact(self, source: DiskFile, task: CheckTask, *, delimit: bool) -> CheckResult:
        """Copy the intact batches of `source` from the start position of `task` on, at most one slice.

        Returns the result of the check, which shows where to continue: see `check_batches`. Raises `StorageError`."""
        result = check_batches(
            source, task, bytes_max=SLICE_BYTES, batches_max=SLICE_BATCHES, delimit=delimit
        )
        size = self.size
        try:
            for found in result.ranges:
                if not found.damage:
                    for at in range(found.position, found.end_position, SLICE_BYTES):
                        self.add(read_exactly(source, min(SLICE_BYTES, found.end_position - at), at))
        except StorageError:
            self.size = size  # a slice is copied as a whole or not at all
            raise
        return result

    def add(self, batches: Buffer) -> None:
        """Append whole batches to the copy. Raises `StorageError`."""
        if self.size + len(batches) > SEGMENT_BYTES_MAX:
            raise StorageError(f"{self._segment.path} would have more than {SEGMENT_BYTES_MAX} bytes")
        try:
            if self._file is None:
                self._file = self._disk.open(self._path, create=True)
                self._file.truncate(0)  # left over from an attempt before
            self._file.write_at([batches], self.size)
            if self.size + len(batches) - self._synced_size >= SYNC_BYTES:
                self._file.sync()
                self._synced_size = self.size + len(batches)
        except OSError as error:
            raise StorageError(f"cannot write {self._path}: {error}") from error
        self.size += len(batches)

    def verify(self, epochs: Sequence[tuple[int, int]], start_offset: int) -> bool:
        """Verify the next slice of the copy. Returns True when the whole copy is verified.

        Raises `StorageError` if a batch is damaged, or if an offset at or above the log start offset `start_offset` is
        missing."""
        file, segment, begin = self._file, self._segment, self._checked_position
        if file is None:
            raise StorageError(f"{segment.path} has no batch to repair it with")
        task = CheckTask(
            begin, self._checked_offset, self.size, segment.end_offset, self.size, start_offset, epochs
        )
        result = check_batches(file, task, bytes_max=SLICE_BYTES, batches_max=SLICE_BATCHES, delimit=False)
        if result.problem:
            raise StorageError(f"{self._path}: {result.problem}")
        for at, header in walk(file, begin, result.position, segment.base_offset, WALK_CHUNK_BYTES):
            self.index.add(header.base_offset - segment.base_offset, at, header.max_timestamp_ms)
        self._checked_position, self._checked_offset = result.position, result.offset
        return result.done

    def is_name_missing(self) -> bool:
        """Whether the segment's file was removed from the directory, so that only an open descriptor still reads it."""
        return not self._disk.exists(self._segment.path)

    def swap(self) -> None:
        """Rename the copy over the segment, durably. Raises `OSError`.

        The index file of the old segment is removed first, because it may not match the copy."""
        assert self._file is not None, "verify comes first"
        disk, segment = self._disk, self._segment
        self._file.truncate(self.size)
        self._file.sync()
        if disk.exists(segment.index_path):
            disk.remove(segment.index_path)
        disk.rename(self._path, segment.path)
        disk.sync_directory(segment.directory)

    def abandon(self) -> None:
        """Remove the file of the copy, if there is one. Raises `OSError`."""
        self._file = None
        if self._disk.exists(self._path):
            self._disk.remove(self._path)
