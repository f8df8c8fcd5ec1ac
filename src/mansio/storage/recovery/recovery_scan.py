"""One run of recovery over the segments of a log: from the checkpoint on every batch is checked, and the end made sure.

Owns the order of it: find where to begin, check, set aside what may be worth something, cut, sync, checkpoint.

Always true: nothing below the checkpoint is changed; cutting is done before anything new is written; what may hold
whole batches is on stable storage elsewhere before it is cut, and the checkpoint says by then that a leader epoch is
due. Running it twice, or being killed in it, changes nothing.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING

from mansio.errors import CorruptLog
from mansio.logs import fields
from mansio.storage.checkpoint import CHECKPOINT_NAME, Checkpoint, write_slot
from mansio.storage.checksummed_file import TEMPORARY_SUFFIX, prepare_checksummed
from mansio.storage.flush.batch_sync import PendingSync
from mansio.storage.index import SparseIndex, load_index
from mansio.storage.leader_epochs import EPOCHS_NAME, LeaderEpochCache, load_leader_epochs
from mansio.storage.recovery.batch_check import CHECK_CHUNK_BYTES, checked_batches
from mansio.storage.recovery.quarantine import file_ranges_of, quarantine
from mansio.storage.recovery.result import Recovered
from mansio.storage.segment import (
    INDEX_SUFFIX,
    PREFIX_BYTES,
    WALK_CHUNK_BYTES,
    only_zeros,
    read_exactly,
    remove_segment_files,
    walk,
)

if TYPE_CHECKING:
    from mansio.ports import Disk, DiskFile
    from mansio.storage.cleaner.compaction_state import CompactionState
    from mansio.storage.flush.batch_sync import SyncSteps
    from mansio.storage.segment import Segment
    from mansio.storage.settings import LogSettings

logger = logging.getLogger(__name__)


def one_slot(disk: Disk, directory: str, checkpoint: Checkpoint, *named_in: str) -> PendingSync:
    """Write one slot. `named_in`: the directories whose names it needs, for a file that may be new."""
    file = disk.open(f"{directory}/{CHECKPOINT_NAME}", create=True)
    write_slot(file, checkpoint)
    return PendingSync((file,), named_in)


def both_slots(disk: Disk, directory: str, checkpoint: Checkpoint) -> SyncSteps[Checkpoint]:
    """Make the checkpoint the only one the file holds; the newer of the two slots."""
    yield lambda: one_slot(disk, directory, checkpoint, directory, directory.rpartition("/")[0] or "/")
    second = checkpoint._replace(sequence=checkpoint.sequence + 1)
    yield lambda: one_slot(disk, directory, second)
    return second


class RecoveryScan:
    """One run of recovery over existing segments."""

    def __init__(
        self,
        disk: Disk,
        directory: str,
        settings: LogSettings,
        segments: list[Segment],
        checkpoint: Checkpoint | None,
        compaction: CompactionState,
    ) -> None:
        self.compaction = compaction
        self.disk = disk
        self.directory = directory
        self.settings = settings
        self.segments = segments
        self.checkpoint = checkpoint
        self.epochs = LeaderEpochCache()
        self.epochs_changed = False
        self.checked_bytes = 0
        self.checked: list[tuple[Segment, int, int]] = []
        self.index_saved_bytes = 0
        self.indexes_due: list[Segment] = []
        self.uncertain_lengths: list[Segment] = []
        """Their files may still be longer than their batches, or may be so again after a crash."""

    def run(self) -> SyncSteps[Recovered]:
        first, position, offset = self._start_position()
        self._load_epochs(first, position, offset)
        durable_end = self.checkpoint.durable_end_offset if self.checkpoint is not None else offset
        cut = ""
        for at in range(first, len(self.segments)):
            segment = self.segments[at]
            if self.checkpoint is None and offset < segment.base_offset <= self.compaction.sparse_end_offset:
                offset = segment.base_offset  # compaction leaves such gaps, but below a checkpoint only
            if offset != segment.base_offset and at > first:
                cut = f"the next segment begins at offset {segment.base_offset} instead of {offset}"
                return (yield from self._finish(at, None, offset, durable_end, cut))
            position, offset, cut = self._check(segment, position if at == first else 0, offset)
            if cut:
                return (yield from self._finish(at, position, offset, durable_end, cut))
        return (yield from self._finish(len(self.segments) - 1, position, offset, durable_end, cut))

    def _start_position(self) -> tuple[int, int, int]:
        """(segment number, position in it, offset there) from which on everything has to be checked."""
        checkpoint = self.checkpoint
        if checkpoint is None:
            logger.warning(
                "log has no readable checkpoint: all of it is checked", extra=fields(directory=self.directory)
            )
            return 0, 0, self.segments[0].base_offset
        end = checkpoint.durable_end_offset
        if self.segments[0].base_offset > end or self.segments[0].base_offset > checkpoint.start_offset:
            raise CorruptLog(
                f"{self.directory} begins at {self.segments[0].base_offset}, it should hold "
                f"{checkpoint.start_offset} to {end}"
            )
        at = max(n for n, segment in enumerate(self.segments) if segment.base_offset <= end)
        segment = self.segments[at]
        if segment.base_offset == end:
            if at and self.segments[at - 1].base_offset == checkpoint.segment_base:
                if not self._exclude_preallocation(self.segments[at - 1], checkpoint.position):
                    return at - 1, checkpoint.position, end
                self.uncertain_lengths.append(self.segments[at - 1])
            return at, 0, end
        if segment.base_offset != checkpoint.segment_base:
            # The segment the checkpoint speaks of is gone, or the log was closed exactly at a segment's end.
            return at, 0, segment.base_offset
        if segment.size < checkpoint.position:
            raise CorruptLog(
                f"{segment.path} has {segment.size} bytes, {checkpoint.position} of it were durable"
            )
        return at, checkpoint.position, end

    def _load_epochs(self, first: int, position: int, offset: int) -> None:
        """The epochs below `offset`, from their file, or from the batches when the file is no good.

        `offset` is at `position` of segment number `first`: what follows there may be torn.
        """
        loaded = load_leader_epochs(self.disk, f"{self.directory}/{EPOCHS_NAME}")
        if loaded is not None:
            # Epochs above are read from the batches again: their records may not have survived as the file has.
            self.epochs_changed = loaded.truncate_to(offset + 1)
            self.epochs = loaded
            return
        for segment in self.segments[: first + 1]:
            file = segment.file or self.disk.open_readonly(segment.path)
            end = segment.size if segment is not self.segments[first] else position
            for _, header in walk(file, 0, end, segment.base_offset, WALK_CHUNK_BYTES):
                self.epochs.assign(header.leader_epoch, header.base_offset)
        self.epochs_changed = self.epochs.last >= 0  # a log that nobody has written to has no file

    def _check(self, segment: Segment, position: int, offset: int) -> tuple[int, int, str]:
        """Check a segment from `position` on; (where it stops, the offset there, why it stops early or "")."""
        file = segment.file or self.disk.open(segment.path)
        segment.file = file
        index = segment.index = self._index_below(segment, file, position)
        reason = ""
        began = position
        sparse_end = self.compaction.sparse_end_offset
        for batch_position, header in checked_batches(file, position, segment.size, sparse_end):
            if isinstance(header, str):
                reason = "" if self._exclude_preallocation(segment, position) else header
                break
            epoch_start = offset  # of a gap the later epoch has all: see `replicated`
            if offset < header.base_offset <= sparse_end:
                offset = header.base_offset
            if header.base_offset != offset:
                reason = f"a batch begins at offset {header.base_offset} instead of {offset}"
                break
            if header.leader_epoch < self.epochs.last:
                reason = f"a batch of the old leader epoch {header.leader_epoch}"
                break
            if self.epochs.assign(header.leader_epoch, epoch_start):
                self.epochs_changed = True
            index.add(offset - segment.base_offset, batch_position, header.max_timestamp_ms)
            position = batch_position + header.batch_length + PREFIX_BYTES
            self.checked_bytes += header.batch_length + PREFIX_BYTES
            offset += header.last_offset_delta + 1
        self.checked.append((segment, began, position))
        self.uncertain_lengths.append(segment)
        return position, offset, reason

    def _exclude_preallocation(self, segment: Segment, position: int) -> bool:
        """Does the segment end here, with only the room that was made ahead of its batches behind? Then that is left
        out from now on; the file is shortened once all is known to be well.
        """
        file = segment.file = segment.file or self.disk.open(segment.path)
        if not only_zeros(file, position, segment.size):
            return False
        segment.size = min(segment.size, position)
        return True

    def _index_below(self, segment: Segment, file: DiskFile, position: int) -> SparseIndex:
        """The index of a segment's first `position` bytes, from its file as far as that is good, then from headers."""
        index = SparseIndex(self.settings.index_interval_bytes)
        start, lowest = 0, segment.base_offset
        loaded = load_index(self.disk, segment.index_path, segment.base_offset) if position else None
        if loaded is not None and loaded.covered_bytes <= position:
            index, start, lowest = loaded.index, loaded.covered_bytes, loaded.end_offset
        self.index_saved_bytes = start
        for at, header in walk(file, start, position, lowest, WALK_CHUNK_BYTES):
            index.add(header.base_offset - segment.base_offset, at, header.max_timestamp_ms)
        return index

    def _finish(
        self, last: int, position: int | None, offset: int, durable_end: int, cut: str
    ) -> SyncSteps[Recovered]:
        """Cut what is torn, sync what stays, write the checkpoint. `position` None: segment `last` goes as a whole."""
        if cut and (offset < durable_end or (self.checkpoint is None and last < len(self.segments) - 1)):
            raise CorruptLog(f"{self.segments[last].path} is damaged below its durable end: {cut}")
        if offset < durable_end:
            raise CorruptLog(f"{self.directory} ends at offset {offset}, {durable_end} was durable")
        kept = self.segments[: last + 1] if position is not None else self.segments[:last]
        torn = self.segments[len(kept) :]
        active = kept[-1]
        size = position if position is not None else active.size
        found, previous = None, self.checkpoint
        if cut:
            pieces = file_ranges_of(self.disk, [(active, size), *((segment, 0) for segment in torn)])
            found = yield from quarantine(
                self.disk, self.directory, offset, pieces, reason=cut, segments=len(torn)
            )
            if previous is not None and not previous.epoch_due:
                previous = previous._replace(sequence=previous.sequence + 1, epoch_due=True)
                yield partial(one_slot, self.disk, self.directory, previous)
        self._cut(active, size, torn)
        self._truncate_files(kept[-1:], anew=False)
        rolled = any(segment is not active for segment in self.uncertain_lengths)
        if self.checked_bytes or cut or previous is None or self.epochs_changed or rolled:
            yield from self._make_durable(kept, offset)
        start_offset = previous.start_offset if previous is not None else kept[0].base_offset
        sequence = previous.sequence + 1 if previous is not None else 1
        epoch_due = previous.epoch_due if previous is not None else bool(cut)
        checkpoint = Checkpoint(sequence, offset, active.base_offset, size, start_offset, epoch_due)
        if previous is None:
            checkpoint = yield from both_slots(self.disk, self.directory, checkpoint)
        elif checkpoint != previous._replace(sequence=sequence):
            yield lambda: one_slot(self.disk, self.directory, checkpoint)
        else:
            checkpoint = previous
        for segment in kept[:-1]:
            if segment.index is not None:
                self.indexes_due.append(segment)
        return Recovered(
            kept,
            offset,
            start_offset,
            self.epochs,
            checkpoint,
            checked_bytes=self.checked_bytes,
            cut=found,
            indexes_due=self.indexes_due,
            index_saved_bytes=self.index_saved_bytes,
            compaction=self.compaction,
        )

    def _cut(self, active: Segment, size: int, torn: list[Segment]) -> None:
        """Remove the torn segments, newest first; the last kept one ends at `size` (see `_truncate_files`)."""
        for segment in reversed(torn):
            segment.file = None
            remove_segment_files(self.disk, segment)
        file = active.file or self.disk.open(active.path)
        active.file = file
        if active.index is None:
            active.index = self._index_below(active, file, size)
        active.size = size
        if self._drop_stale_indexes(active, size) or torn:
            # An index or segment that came back would describe bytes that will have been written anew by then.
            self.disk.sync_directory(self.directory)

    def _truncate_files(self, kept: list[Segment], *, anew: bool) -> None:
        """End each file where its batches end.

        `anew`: each gets a new length to be synced, also the one that seems right: its sync may have failed before.
        """
        for segment in self.uncertain_lengths:
            if segment not in kept or segment.file is None:
                continue
            if anew:
                segment.file.truncate(segment.size + 1)
            if segment.file.size() > segment.size:
                segment.file.truncate(segment.size)

    def _drop_stale_indexes(self, active: Segment, size: int) -> bool:
        """Remove index files that no longer, or not yet, belong to what is on the disk. True when there were any."""
        removed = False
        kept = {segment.base_offset for segment in self.segments}
        for name in self.disk.list_directory(self.directory):
            stem = name.removesuffix(INDEX_SUFFIX)
            if stem == name or not (stem.isascii() and stem.isdigit()):
                continue  # somebody's own file
            base = int(stem)
            path = f"{self.directory}/{name}"
            if base == active.base_offset:
                loaded = load_index(self.disk, path, base)
                stale = loaded is None or loaded.covered_bytes > size
            else:
                stale = base not in kept or base > active.base_offset
            if stale:
                self.disk.remove(path)
                removed = True
        return removed

    def _make_durable(self, kept: list[Segment], offset: int) -> SyncSteps[None]:
        """What was checked, durable; then the leader epochs.

        The epochs are durable before their file takes the place of the one before: a crash leaves either.
        """
        self.epochs.truncate_to(offset + 1)
        path = f"{self.directory}/{EPOCHS_NAME}"

        def write_again() -> PendingSync:
            self._truncate_files(
                kept, anew=True
            )  # here, so that it is done again when a sync of many logs fails
            return PendingSync((*self._write_again(kept), self._epochs_file(path)))

        def rename() -> PendingSync:
            if self.disk.exists(path + TEMPORARY_SUFFIX):
                self.disk.rename(path + TEMPORARY_SUFFIX, path)
            return PendingSync((), (self.directory,))

        yield write_again
        yield rename

    def _epochs_file(self, path: str) -> DiskFile:
        """The epochs, written; over the same bytes where they are, for on a full disk there is no room for others."""
        data = self.epochs.encode()
        if not self.disk.exists(path) or self.disk.read_file(path) != data:
            return prepare_checksummed(self.disk, path, data)
        file = self.disk.open(path)
        file.write_at([data], 0)
        return file

    def _write_again(self, kept: list[Segment]) -> list[DiskFile]:
        """Write what was checked once more; the files.

        Were these bytes left over from a sync that failed before a restart, the page cache would hold them as clean
        although the disk never got them: syncing alone would succeed and do nothing.
        """
        written = []
        for segment, position, end in self.checked:
            file = segment.file
            if file is None or segment not in kept:
                continue
            while position < end:
                data = read_exactly(file, min(CHECK_CHUNK_BYTES, end - position), position)
                file.write_at([data], position)
                position += len(data)
            written.append(file)
        for segment in self.uncertain_lengths:
            if segment in kept and segment.file is not None and segment.file not in written:
                written.append(segment.file)
        return written
