"""Open files of the segments of all logs, and LRU cache of the loaded indexes of closed segments.

One `FileCache` serves all logs of a broker, so that descriptors and memory do not grow with the age or the number of
its logs. `ActiveFiles` bounds the files of active segments.

Invariants:
* At most `files_max` files of closed segments are open: three quarters of them are cached, and the others are files
  that are not used any more, but to which a `LogSlice` that is being sent refers. If these are too many (`is_limited`),
  files are opened without being cached, and a reader copies the records.
* At most `indexes_max` indexes with `index_entries_max` entries in total (or one index) are cached; a returned index
  matches its segment.
"""

from __future__ import annotations

import logging
import weakref
from collections import OrderedDict
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from mansio.errors import CorruptLog, StorageError
from mansio.logs import fields
from mansio.ports import DESCRIPTOR_ERRNOS
from mansio.storage.active_files import ACTIVE_FILES_MAX, EXAMINED_LOGS_MAX, ActiveFiles
from mansio.storage.index import NO_TIMESTAMP, SparseIndex, load_index
from mansio.storage.segment import WALK_CHUNK_BYTES, walk

if TYPE_CHECKING:
    from collections.abc import Callable

    from mansio.ports import Disk, DiskFile
    from mansio.storage.active_files import ActiveLog
    from mansio.storage.segment import Segment

OPEN_FILES_MAX = 256
SENT_FILES_DIVISOR: Final = 4
"""Files of closed segments that only responses refer to may be this part of all."""

OPEN_INDEXES_MAX = 4096
INDEX_ENTRIES_MAX = 1 << 20  # of all indexes together: 16 MiB
REBUILD_INTERVAL_BYTES = 4096

logger = logging.getLogger(__name__)


class FileCache:
    """LRU cache of open files and indexes of closed segments, and the open files of active segments (`active`).

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
        self._sent_files_max = max(files_max // SENT_FILES_DIVISOR, 1)
        self.cached_files_max = max(files_max - self._sent_files_max, 1)
        self.sent_files: dict[int, weakref.ref[Any]] = {}
        """Open files that are not used any more, except by responses that are being sent."""
        self.active = ActiveFiles(active_files_max)
        self._indexes_max = indexes_max
        self._index_entries_max = index_entries_max
        self._index_entries = 0

    @property
    def is_limited(self) -> bool:
        """Whether a reader that does not read at once has to copy what it reads instead of keeping a file open."""
        return len(self.sent_files) >= self._sent_files_max

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
            if len(self._files) >= self.cached_files_max:
                if self.sent_files and self.is_limited:
                    return file
                self.record_sent(self._files.popitem(last=False)[1])
            self._files[segment] = file
        else:
            self._files.move_to_end(segment)
        return file

    def open_file(self, open_file: Callable[[], DiskFile], *, appending: ActiveLog | None = None) -> DiskFile:
        """Call `open_file`; without a free descriptor, close cached files, and call it once more.

        `appending`: the log that needs the file for an append; close those of other logs' active segments, too, where
        possible. Raises `OSError`.
        """
        try:
            return open_file()
        except OSError as error:
            if error.errno not in DESCRIPTOR_ERRNOS:
                raise
        while self._files:
            self.record_sent(self._files.popitem()[1])
        if appending is not None:
            self.active.close_some(EXAMINED_LOGS_MAX, keep=appending)
        return open_file()

    def record_sent(self, file: DiskFile) -> None:
        """Count a file that is not used any more, as long as it is open: until no response refers to it."""
        key = id(file)
        self.sent_files[key] = weakref.ref(file, partial(_forget_sent, self.sent_files, key))

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
        file = self._files.pop(segment, None)
        if file is not None:
            self.record_sent(file)
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


def _forget_sent(sent_files: dict[int, weakref.ref[Any]], key: int, _: weakref.ref[Any]) -> None:
    sent_files.pop(key, None)


def recorded_end_offset(disk: Disk, segment: Segment) -> int | None:
    """End offset of a closed segment that its index file contains; None without a valid index. Raises `OSError`."""
    loaded = load_index(disk, segment.index_path, segment.base_offset)
    return loaded.end_offset if loaded is not None and loaded.covered_bytes == segment.size else None
