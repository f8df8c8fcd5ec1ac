"""Open files of the segments of all logs, and LRU cache of the loaded indexes of closed segments.

One `FileCache` serves all logs of a broker, so that descriptors and memory do not grow with the age or the number of
its logs. A log with nothing to flush can close the file of its active segment; its next append opens the file again.

Invariants:
* At most `files_max` files of closed segments, and `indexes_max` indexes with `index_entries_max` entries in total (or
  one index), are cached; a returned index matches its segment.
* The files of more than `active_files_max` active segments are open only while so many logs have something to flush. A
  file with unflushed bytes is never closed: an error of its writeback could be lost.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from typing import TYPE_CHECKING, Protocol

from mansio.errors import CorruptLog, StorageError
from mansio.logs import fields
from mansio.ports import DESCRIPTOR_ERRNOS
from mansio.storage.index import NO_TIMESTAMP, SparseIndex, load_index
from mansio.storage.segment import WALK_CHUNK_BYTES, walk

if TYPE_CHECKING:
    from collections.abc import Callable

    from mansio.ports import Disk, DiskFile
    from mansio.storage.segment import Segment

OPEN_FILES_MAX = 256
ACTIVE_FILES_MAX = 1 << 20
OPEN_INDEXES_MAX = 4096
INDEX_ENTRIES_MAX = 1 << 20  # of all indexes together: 16 MiB
REBUILD_INTERVAL_BYTES = 4096

EXAMINED_LOGS_MAX = 64
"""Maximum number of logs that are examined when the file of an active segment is opened."""

logger = logging.getLogger(__name__)


class ActiveLog(Protocol):
    """A log, as far as its active segment's file is concerned."""

    end_offset: int

    def close_active_file(self) -> bool:
        """Close the file of the active segment, unless it is in use or has unflushed bytes. Returns whether it did."""


class FileCache:
    """Open files of active segments, and LRU cache of open files and indexes of closed segments.

    An evicted file is closed only when no `LogSlice` that is still being sent refers to it.
    """

    def __init__(
        self,
        disk: Disk,
        *,
        files_max: int = OPEN_FILES_MAX,
        active_files_max: int = ACTIVE_FILES_MAX,
        indexes_max: int = OPEN_INDEXES_MAX,
        index_entries_max: int = INDEX_ENTRIES_MAX,
    ) -> None:
        self._disk = disk
        self._files: OrderedDict[Segment, DiskFile] = OrderedDict()
        self._indexes: OrderedDict[Segment, SparseIndex] = OrderedDict()
        self._files_max = files_max
        self.active_files_max = active_files_max
        self._active: OrderedDict[ActiveLog, int] = OrderedDict()
        """Logs whose active segment has an open file, least recently examined first, with their end offset then."""
        self._indexes_max = indexes_max
        self._index_entries_max = index_entries_max
        self._index_entries = 0

    def file(self, segment: Segment) -> DiskFile:
        """Return the open file of a segment. Raises `CorruptLog` if it is missing, `StorageError` if the disk fails."""
        if segment.file is not None:
            return segment.file
        file = self._files.get(segment)
        if file is None:
            try:
                file = self.open_file(lambda: self._disk.open_readonly(segment.path))
            except FileNotFoundError as error:
                raise CorruptLog(f"{segment.path} is missing") from error
            except OSError as error:
                raise StorageError(f"cannot open {segment.path}: {error}") from error
            self._files[segment] = file
            if len(self._files) > self._files_max:
                self._files.popitem(last=False)
        else:
            self._files.move_to_end(segment)
        return file

    def open_file(self, open_file: Callable[[], DiskFile], *, closes_active: bool = False) -> DiskFile:
        """Call `open_file`; without a free descriptor, close cached files, and call it once more.

        `closes_active`: close those of active segments, too, where possible; only on the thread that appends. Raises
        `OSError`.
        """
        try:
            return open_file()
        except OSError as error:
            if error.errno not in DESCRIPTOR_ERRNOS:
                raise
        self._files.clear()
        if closes_active:
            self._close_active_files(0)
        return open_file()

    def record_active(self, log: ActiveLog) -> None:
        """Record that a log has opened the file of its active segment; others close theirs if these are too many."""
        self._active[log] = log.end_offset
        if len(self._active) > self.active_files_max:
            self._close_active_files(self.active_files_max)

    def forget_active(self, log: ActiveLog) -> None:
        """Record that a log was closed."""
        self._active.pop(log, None)

    def _close_active_files(self, files_max: int) -> None:
        """Close files of logs that were not written to since they were last examined, until `files_max` are open."""
        for _ in range(min(len(self._active) - 1, EXAMINED_LOGS_MAX)):
            if len(self._active) <= files_max:
                return
            log, end_offset = self._active.popitem(last=False)
            if log.end_offset != end_offset or not log.close_active_file():
                self._active[log] = log.end_offset

    def index(self, segment: Segment) -> SparseIndex:
        """Return the index of a segment: from memory, from its index file, or rebuilt if that file is missing or
        invalid.

        Raises `StorageError`.
        """
        if segment.index is not None:
            return segment.index
        index = self._indexes.get(segment)
        if index is None:
            index = self._load_index(segment)
            segment.max_timestamp_ms = index.max_timestamp_ms
            self._indexes[segment] = index
            self._index_entries += len(index)
            while len(self._indexes) > self._indexes_max or (
                self._index_entries > self._index_entries_max and len(self._indexes) > 1
            ):
                self._index_entries -= len(self._indexes.popitem(last=False)[1])
        else:
            self._indexes.move_to_end(segment)
        return index

    def max_timestamp(self, segment: Segment) -> int:
        """Return the largest timestamp in a segment, in ms; `NO_TIMESTAMP` if the segment is empty."""
        if segment.index is not None:
            return segment.index.max_timestamp_ms
        if segment.max_timestamp_ms is None:
            segment.max_timestamp_ms = self.index(segment).max_timestamp_ms
        return segment.max_timestamp_ms if segment.max_timestamp_ms is not None else NO_TIMESTAMP

    def evict(self, segment: Segment) -> None:
        """Remove the file and the index of a segment from the cache, because the segment is removed or changed."""
        self._files.pop(segment, None)
        index = self._indexes.pop(segment, None)
        if index is not None:
            self._index_entries -= len(index)

    def _load_index(self, segment: Segment) -> SparseIndex:
        try:
            loaded = (
                None if segment.replaced else load_index(self._disk, segment.index_path, segment.base_offset)
            )
        except OSError as error:
            raise StorageError(f"cannot read {segment.index_path}: {error}") from error
        if loaded is not None and loaded.covered_bytes == segment.size:
            if loaded.end_offset < segment.end_offset:
                self._record_missing_segments(segment, loaded.end_offset)
            return loaded.index
        index = SparseIndex(REBUILD_INTERVAL_BYTES)
        last: tuple[int, int, int] | None = None
        try:
            for position, header in walk(
                self.file(segment), 0, segment.size, segment.base_offset, WALK_CHUNK_BYTES
            ):
                if (
                    last is not None
                ):  # added after its successor was read: a damaged offset contradicts that batch
                    index.add(*last)
                last = header.base_offset - segment.base_offset, position, header.max_timestamp_ms
            if last is not None:
                index.add(*last)
        except CorruptLog as error:
            # Batches before the damage can be read; a reader that reaches it gets the error.
            logger.error("segment_damaged", extra=fields(path=segment.path, reason=error.message))
        return index

    def _record_missing_segments(self, segment: Segment, recorded_end_offset: int) -> None:
        """Record and log that the segments between `recorded_end_offset` and the next segment are missing."""
        if segment.recorded_end_offset is None:
            logger.error(
                "segments_missing",
                extra=fields(
                    directory=segment.directory,
                    first_offset=recorded_end_offset,
                    last_offset=segment.end_offset - 1,
                ),
            )
        segment.recorded_end_offset = recorded_end_offset


def recorded_end_offset(disk: Disk, segment: Segment) -> int | None:
    """End offset of a closed segment that its index file contains; None without a valid index. Raises `OSError`."""
    loaded = load_index(disk, segment.index_path, segment.base_offset)
    return loaded.end_offset if loaded is not None and loaded.covered_bytes == segment.size else None
