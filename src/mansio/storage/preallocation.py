"""Preallocation of the active segment: extends its file beyond the last batch (docs/adr/0007-preallocation.md).

A sync that overwrites only blocks that were written before does not use the file system's journal. If the batches of a
log are small and requests wait for their syncs, the file is therefore extended by writing zeros. Otherwise it is
extended by a hole, which takes no disk space.

Invariants:
* The file ends at `writable_bytes`, unless `limit` lowered that value, and never before its last batch.
* All bytes after the last batch are zeros. The thread that appends writes the zeros, so they never overwrite a batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mansio.ports import DISK_FULL_ERRNOS

if TYPE_CHECKING:
    from mansio.ports import Disk
    from mansio.storage.segment import Segment

PREALLOCATION_BYTES_MIN = 64 << 10  # a file is extended by its own size, between these bounds
PREALLOCATION_BYTES_MAX = 1 << 20
ZEROS_BYTES_MAX = 256 << 10
"""Maximum number of zeros written at a time. The next sync has to write them to disk, too."""
SYNC_BYTES_MIN = 2 << 10
"""Zeros are written only if an awaited sync covers at least this many bytes on average: smaller batches mostly share a
block that was written before."""
SYNC_BYTES_MAX = 64 << 10
"""Zeros are written only if an awaited sync covers at most this many bytes on average: for larger batches the time to
write the zeros exceeds the time that they save."""
SYNCS_MIN = 2
"""Number of awaited syncs since the last extension from which on zeros are written."""
FREE_BYTES_MIN = 1 << 30
"""With less free disk space no zeros are written, because a hole takes no disk space."""
_ZEROS = bytes(ZEROS_BYTES_MAX)


class Preallocation:
    """Preallocation of one log's active segment.

    An append that ends above `writable_bytes` has to call `extend` first. `awaited_syncs` is the number of syncs for
    which a request waited; `Log` updates it.
    """

    __slots__ = ("_awaited_syncs_before", "_file_bytes", "_size_before", "awaited_syncs", "writable_bytes")

    def __init__(self, file_bytes: int) -> None:
        self.awaited_syncs = 0
        self.switch_segment(file_bytes)

    def switch_segment(self, file_bytes: int) -> None:
        """Continue with another active segment, whose file has `file_bytes` bytes."""
        self._file_bytes = self.writable_bytes = self._size_before = file_bytes
        self._awaited_syncs_before = self.awaited_syncs

    def limit(self, writable_bytes: int) -> None:
        """Lower `writable_bytes` to this value, so that appends that end above it call `Log._prepare_append`."""
        self.writable_bytes = min(self.writable_bytes, writable_bytes)

    def extend(self, disk: Disk, segment: Segment, needed_bytes: int, segment_bytes: int) -> None:
        """Extend the file beyond `needed_bytes`, to at most `segment_bytes` or `needed_bytes`. Raises `OSError`."""
        if needed_bytes <= self.writable_bytes:
            return
        zeros = (
            self._should_write_zeros(segment.size) and disk.free_bytes(segment.directory) >= FREE_BYTES_MIN
        )
        ahead = min(
            max(needed_bytes, PREALLOCATION_BYTES_MIN), ZEROS_BYTES_MAX if zeros else PREALLOCATION_BYTES_MAX
        )
        grown = max(needed_bytes, min(needed_bytes + ahead, segment_bytes))
        if not (zeros and self._write_zeros(segment, needed_bytes, grown)):
            segment.file.truncate(grown)  # type: ignore[union-attr]  # an active segment holds its file
        self._file_bytes = self.writable_bytes = grown
        self._size_before, self._awaited_syncs_before = segment.size, self.awaited_syncs

    def _should_write_zeros(self, size: int) -> bool:
        """Whether, since the last extension, there were awaited syncs of a size that zeros make faster."""
        syncs = self.awaited_syncs - self._awaited_syncs_before
        written = size - self._size_before
        return syncs >= SYNCS_MIN and SYNC_BYTES_MIN * syncs <= written <= SYNC_BYTES_MAX * syncs

    def _write_zeros(self, segment: Segment, position: int, end: int) -> bool:
        """Write zeros from `position` to `end`; an append then writes the bytes before `position`.

        Returns False on a full disk; zeros that were written are removed, because records need the space.
        """
        try:
            segment.file.write_at([memoryview(_ZEROS)[: end - position]], position)  # type: ignore[union-attr]  # as above
        except OSError as error:
            if error.errno not in DISK_FULL_ERRNOS:
                raise
            segment.file.truncate(segment.size)  # type: ignore[union-attr]  # as above
            return False
        return True

    def release(self, segment: Segment) -> None:
        """Truncate the file to the end of its last batch. Raises `OSError`."""
        if self._file_bytes > segment.size:
            self.truncate(segment, segment.size)

    def truncate(self, segment: Segment, position: int) -> None:
        """Truncate the file to `position`. Raises `OSError`."""
        segment.file.truncate(position)  # type: ignore[union-attr]  # an active segment holds its file
        self._file_bytes = self.writable_bytes = position
