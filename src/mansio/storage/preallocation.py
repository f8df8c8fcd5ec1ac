"""The room ahead of the newest segment's batches: how far its file reaches beyond them, and with what it is filled
(docs/adr/0007-room-ahead-of-the-batches.md).

A sync that finds its blocks written before is spared the file system's journal. So a log whose batches are waited for,
few bytes at a time, gets its room as zeros written ahead; every other one as a hole, which costs nothing.

Always true: the file ends at `writable_bytes`, unless a limit lowered that, and never before its last batch. What lies
behind the last batch reads as zeros, and was written, if at all, by the thread that appends: zeros never meet a batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mansio.storage.flush.flush_jobs import NO_ROOM

if TYPE_CHECKING:
    from mansio.ports import Disk
    from mansio.storage.segment import Segment

PREALLOCATION_BYTES_MIN = 64 << 10  # how far a file grows ahead: by its own size, between these
PREALLOCATION_BYTES_MAX = 1 << 20
ZEROS_BYTES_MAX = 256 << 10
"""As many zeros are written ahead at a time at most; the sync after them carries them too."""
SYNC_BYTES_MIN = 2 << 10  # below, most batches go into a block that has been written before, zeros or not
SYNC_BYTES_MAX = 64 << 10  # above, the time of the bytes themselves counts, and zeros double them
SYNCS_MIN = 2
FREE_BYTES_MIN = 1 << 30
"""With less free on the disk no zeros are written: a hole takes no block."""
_ZEROS = bytes(ZEROS_BYTES_MAX)


class Preallocation:
    """See the module. `writable_bytes`: an append that ends above takes the rare path.

    `awaited_syncs` counts the syncs that somebody waited for: whoever runs them adds to it.
    """

    __slots__ = ("_awaited_syncs_before", "_file_bytes", "_size_before", "awaited_syncs", "writable_bytes")

    def __init__(self, file_bytes: int) -> None:
        self.awaited_syncs = 0
        self.begin(file_bytes)

    def begin(self, file_bytes: int) -> None:
        """Another segment is written from now on, whose file is so long."""
        self._file_bytes = self.writable_bytes = self._size_before = file_bytes
        self._awaited_syncs_before = self.awaited_syncs

    def limit(self, writable_bytes: int) -> None:
        """Let appends that end above take the rare path."""
        self.writable_bytes = min(self.writable_bytes, writable_bytes)

    def make(self, disk: Disk, segment: Segment, needed_bytes: int, segment_bytes: int) -> None:
        """Let the file grow to what is needed and some more, within the size of a segment. Raises `OSError`."""
        if needed_bytes <= self.writable_bytes:
            return
        zeros = self._pays(segment.size) and disk.free_bytes(segment.directory) >= FREE_BYTES_MIN
        ahead = min(
            max(needed_bytes, PREALLOCATION_BYTES_MIN), ZEROS_BYTES_MAX if zeros else PREALLOCATION_BYTES_MAX
        )
        grown = max(needed_bytes, min(needed_bytes + ahead, segment_bytes))
        if not (zeros and self._fill(segment, needed_bytes, grown)):
            segment.file.truncate(grown)  # type: ignore[union-attr]  # an active segment holds its file
        self._file_bytes = self.writable_bytes = grown
        self._size_before, self._awaited_syncs_before = segment.size, self.awaited_syncs

    def _pays(self, size: int) -> bool:
        """Were there, since there was room last, awaited syncs of a size that zeros make quicker?"""
        syncs = self.awaited_syncs - self._awaited_syncs_before
        written = size - self._size_before
        return syncs >= SYNCS_MIN and SYNC_BYTES_MIN * syncs <= written <= SYNC_BYTES_MAX * syncs

    def _fill(self, segment: Segment, position: int, end: int) -> bool:
        """Write zeros up to `end`, from `position`: what is before is about to be written. False when the disk is full.

        Zeros that were written are taken back then: records need what is left.
        """
        try:
            segment.file.write_at([memoryview(_ZEROS)[: end - position]], position)  # type: ignore[union-attr]  # as above
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            segment.file.truncate(segment.size)  # type: ignore[union-attr]  # as above
            return False
        return True

    def trim_to_size(self, segment: Segment) -> None:
        """End the file where its last batch ends. Raises `OSError`."""
        if self._file_bytes > segment.size:
            self.cut(segment, segment.size)

    def cut(self, segment: Segment, position: int) -> None:
        """End the file at `position`, whatever is behind it. Raises `OSError`."""
        segment.file.truncate(position)  # type: ignore[union-attr]  # an active segment holds its file
        self._file_bytes = self.writable_bytes = position
