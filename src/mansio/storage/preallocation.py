"""Preallocation of the active segment: how far its file extends beyond the last batch, and what fills that space
(docs/adr/0007-preallocation.md).

A sync that only overwrites blocks which were written before does not use the file system's journal. A log whose batches
are small and waited for is therefore extended with zeros written ahead; every other log with a hole, which costs
nothing.

Invariants:
* The file ends at `writable_bytes`, unless a limit lowered that, and never before its last batch.
* Everything after the last batch reads as zeros. Zeros are written by the thread that appends, so they never overwrite
  a batch.
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
"""Maximum number of zeros written ahead at a time; the next sync carries them, too."""
SYNC_BYTES_MIN = 2 << 10  # below, most batches go into a block that has been written before, zeros or not
SYNC_BYTES_MAX = 64 << 10  # above, the bytes themselves take most of the time, and zeros double them
SYNCS_MIN = 2
FREE_BYTES_MIN = 1 << 30
"""With less free space on the disk no zeros are written: a hole takes no block."""
_ZEROS = bytes(ZEROS_BYTES_MAX)


class Preallocation:
    """Preallocated end of one log's active segment.

    `writable_bytes`: an append that ends above it takes the slow path. `awaited_syncs` counts the syncs that a request
    waited for; the code that runs them increments it.
    """

    __slots__ = ("_awaited_syncs_before", "_file_bytes", "_size_before", "awaited_syncs", "writable_bytes")

    def __init__(self, file_bytes: int) -> None:
        self.awaited_syncs = 0
        self.switch_segment(file_bytes)

    def switch_segment(self, file_bytes: int) -> None:
        """Switch to another segment, whose file has `file_bytes` bytes."""
        self._file_bytes = self.writable_bytes = self._size_before = file_bytes
        self._awaited_syncs_before = self.awaited_syncs

    def limit(self, writable_bytes: int) -> None:
        """Lower `writable_bytes`, so that appends that end above it go through `Log._prepare_append`."""
        self.writable_bytes = min(self.writable_bytes, writable_bytes)

    def extend(self, disk: Disk, segment: Segment, needed_bytes: int, segment_bytes: int) -> None:
        """Extend the file to `needed_bytes` and some more, up to the size of a segment. Raises `OSError`."""
        if needed_bytes <= self.writable_bytes:
            return
        zeros = self._zeros_are_faster(segment.size) and disk.free_bytes(segment.directory) >= FREE_BYTES_MIN
        ahead = min(
            max(needed_bytes, PREALLOCATION_BYTES_MIN), ZEROS_BYTES_MAX if zeros else PREALLOCATION_BYTES_MAX
        )
        grown = max(needed_bytes, min(needed_bytes + ahead, segment_bytes))
        if not (zeros and self._write_zeros(segment, needed_bytes, grown)):
            segment.file.truncate(grown)  # type: ignore[union-attr]  # an active segment holds its file
        self._file_bytes = self.writable_bytes = grown
        self._size_before, self._awaited_syncs_before = segment.size, self.awaited_syncs

    def _zeros_are_faster(self, size: int) -> bool:
        """Whether, since the last extension, there were awaited syncs of a size that zeros make faster."""
        syncs = self.awaited_syncs - self._awaited_syncs_before
        written = size - self._size_before
        return syncs >= SYNCS_MIN and SYNC_BYTES_MIN * syncs <= written <= SYNC_BYTES_MAX * syncs

    def _write_zeros(self, segment: Segment, position: int, end: int) -> bool:
        """Write zeros from `position` (the bytes before it are about to be written) to `end`. False on a full disk.

        Zeros that were written are removed then: records need the remaining space.
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
        """End the file where its last batch ends. Raises `OSError`."""
        if self._file_bytes > segment.size:
            self.truncate(segment, segment.size)

    def truncate(self, segment: Segment, position: int) -> None:
        """End the file at `position`, whatever follows it. Raises `OSError`."""
        segment.file.truncate(position)  # type: ignore[union-attr]  # an active segment holds its file
        self._file_bytes = self.writable_bytes = position
