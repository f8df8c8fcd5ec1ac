"""Immutable results of a log: byte ranges of its files (`LogSlice`) and descriptions of its segments
(`SegmentInfo`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from mansio.errors import StorageError
from mansio.storage.file_cache import max_timestamp_of
from mansio.storage.segment import read_exactly

if TYPE_CHECKING:
    from mansio.ports import Disk, DiskFile
    from mansio.storage.file_cache import FileCache
    from mansio.storage.segment import Segment


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
    timestamp = max_timestamp_of(segment, files)
    if timestamp < 0 and segment.size:
        try:
            timestamp = disk.modified_ms(segment.path)
        except OSError as error:
            raise StorageError(f"cannot read the modification time of {segment.path}: {error}") from error
    return SegmentInfo(segment.base_offset, segment.end_offset, segment.size, timestamp)
