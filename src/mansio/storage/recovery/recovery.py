"""Recovery of a log when it is opened: validates the batches above the checkpoint and truncates a torn tail.

Everything below the checkpoint was durable. Recovery does not check these batches, and never truncates them; if bytes
below the checkpoint are missing, it raises `CorruptLog`. Above the checkpoint every batch is read and checked. The log
is truncated at the first batch that is incomplete, out of order or fails its CRC. Complete batches after that position
are copied to a quarantine file first.

The steps: find the start position, check, quarantine, truncate, sync, write the checkpoint.

Invariants:
* Nothing below the checkpoint is changed. All records that recovery keeps are durable when it ends.
* The truncation ends before a new batch is appended. Bytes that may contain complete batches are on stable storage in a
  quarantine file before they are truncated, and the checkpoint on disk has `needs_new_epoch` set.
* A second recovery, also after one that was interrupted by a crash, leads to the same log.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from mansio.errors import CorruptLog
from mansio.logs import fields
from mansio.storage.checked_ranges import CheckedRange, CheckedRanges
from mansio.storage.checkpoint import CHECKPOINT_NAME, Checkpoint, load_checkpoint, write_slot
from mansio.storage.checksummed_file import TEMPORARY_SUFFIX, prepare_checksummed
from mansio.storage.compaction_state import NOT_COMPACTED, CompactionState, recover_compaction
from mansio.storage.index import SparseIndex, load_index
from mansio.storage.leader_epochs import EPOCHS_NAME, LeaderEpochCache, load_leader_epochs
from mansio.storage.recovery.batch_sync import PendingSync, run_single
from mansio.storage.recovery.quarantine import file_ranges_of, quarantine
from mansio.storage.scan import CHUNK_BYTES, checked_batches
from mansio.storage.segment import (
    INDEX_SUFFIX,
    PREFIX_BYTES,
    WALK_CHUNK_BYTES,
    Segment,
    base_offset_of,
    contains_only_zeros,
    read_exactly,
    remove_segment_files,
    walk,
)
from mansio.storage.segment_timestamps import apply_segment_timestamps

if TYPE_CHECKING:
    from mansio.ports import Disk, DiskFile
    from mansio.storage.compaction_state import CompactionState
    from mansio.storage.recovery.batch_sync import SyncSteps
    from mansio.storage.recovery.quarantine import TruncatedTail
    from mansio.storage.settings import LogSettings


@dataclass(slots=True)
class RecoveredLog:
    """Result of a recovery: the initial state of a `Log`. All of its records are durable.

    `created`: there was no segment, and a new one was created. `checked_bytes` is the number of bytes that were read
    and checked. `truncated_tail` describes the truncated bytes; None if there are none. `indexes_due` are the closed
    segments whose index files have to be written. The index file of the active segment covers its first
    `index_saved_bytes` bytes. `timestamps_due`: the timestamps file has to be written. `other_files` are the names of
    the files in the directory that are not of the log: snapshots of views.
    """

    segments: list[Segment]
    end_offset: int
    start_offset: int
    epochs: LeaderEpochCache
    checkpoint: Checkpoint
    created: bool = False
    checked_bytes: int = 0
    truncated_tail: TruncatedTail | None = None
    indexes_due: list[Segment] = field(default_factory=list)
    index_saved_bytes: int = 0
    timestamps_due: bool = False
    compaction: CompactionState = NOT_COMPACTED
    other_files: tuple[str, ...] = ()

    @property
    def truncated_bytes(self) -> int:
        """Number of truncated bytes. If it is not 0, the next records need a new leader epoch."""
        return self.truncated_tail.size_bytes if self.truncated_tail is not None else 0


def recover(disk: Disk, directory: str, settings: LogSettings) -> RecoveredLog:
    """Recover the log in `directory`, or create one. Raises `CorruptLog` or another `StorageError`, and `OSError`."""
    return run_single(disk, recovery_steps(disk, directory, settings))


def recovery_steps(disk: Disk, directory: str, settings: LogSettings) -> SyncSteps[RecoveredLog]:
    """`recover` as steps for `run_batch`, so that the recoveries of many logs share their syncs.

    The recovery of a log that was closed cleanly has no steps.
    """
    recovered = yield from _recover(disk, directory, settings)
    recovered.timestamps_due = not apply_segment_timestamps(disk, directory, recovered.segments)
    return recovered


def _recover(disk: Disk, directory: str, settings: LogSettings) -> SyncSteps[RecoveredLog]:
    if not disk.exists(directory):
        disk.make_directory(directory.rpartition("/")[0] or "/")
        disk.make_directory(directory, durable=False)  # `_create` syncs it
    checkpoint = load_checkpoint(disk, f"{directory}/{CHECKPOINT_NAME}")
    compaction = recover_compaction(
        disk, directory, checkpoint.start_offset if checkpoint is not None else -1
    )
    bases, other_files = _clear_and_list(disk, directory)
    recovered = yield from _recover_segments(disk, directory, settings, checkpoint, compaction, bases)
    recovered.other_files = other_files
    return recovered


def _recover_segments(
    disk: Disk,
    directory: str,
    settings: LogSettings,
    checkpoint: Checkpoint | None,
    compaction: CompactionState,
    bases: list[int],
) -> SyncSteps[RecoveredLog]:
    """Recover a log whose segments have these base offsets, or create one if there are none."""
    if (
        checkpoint is not None
        and bases
        and bases[0] > checkpoint.durable_end_offset == checkpoint.start_offset
    ):
        # The later segments survived a crash and the first one did not; no record was durable yet.
        truncated = yield from _remove_unreachable(disk, directory, bases, checkpoint)
        checkpoint = checkpoint._replace(sequence=checkpoint.sequence + 1, needs_new_epoch=True)
        recovered = yield from _create(disk, directory, settings, checkpoint)
        recovered.truncated_tail = truncated
        return recovered
    if not bases:
        return (yield from _create(disk, directory, settings, checkpoint))
    bases = _drop_trimmed(disk, directory, bases, checkpoint)
    segments = [Segment(directory, base) for base in bases]
    for segment, following in zip(segments, [*bases[1:], None], strict=True):
        file = disk.open(segment.path)
        segment.size = file.size()
        if following is not None:
            segment.end_offset = following
        segment.file = file if following is None else None
        segment.checked = CheckedRanges()
    return (yield from RecoveryScan(disk, directory, settings, segments, checkpoint, compaction).run())


def _remove_unreachable(
    disk: Disk, directory: str, bases: list[int], checkpoint: Checkpoint
) -> SyncSteps[TruncatedTail]:
    """Quarantine and remove the segments of a log whose first segment is missing and that had no durable record."""
    segments = [Segment(directory, base) for base in bases]
    for segment in segments:
        segment.size = disk.open_readonly(segment.path).size()
    truncated = yield from quarantine(
        disk,
        directory,
        checkpoint.start_offset,
        file_ranges_of(disk, [(segment, 0) for segment in segments]),
        reason=f"the first segment begins at offset {bases[0]} instead of {checkpoint.start_offset}",
        segments=len(segments),
    )
    due = checkpoint._replace(sequence=checkpoint.sequence + 1, needs_new_epoch=True)
    yield lambda: write_one_slot(disk, directory, due)
    for segment in reversed(segments):
        remove_segment_files(disk, segment)
    disk.sync_directory(directory)
    return truncated


def _clear_and_list(disk: Disk, directory: str) -> tuple[list[int], tuple[str, ...]]:
    """Remove the temporary files of interrupted writes; returns the sorted base offsets of the segments, and the names
    of files that are not of the log."""
    bases, others = [], []
    for name in disk.list_directory(directory):
        base = base_offset_of(name)
        if base is not None:
            bases.append(base)
        elif name.endswith(TEMPORARY_SUFFIX):
            disk.remove(f"{directory}/{name}")
        elif name.partition(".")[0].isdecimal() and not name.endswith(INDEX_SUFFIX):
            others.append(name)
    return sorted(bases), tuple(others)


def _create(
    disk: Disk, directory: str, settings: LogSettings, checkpoint: Checkpoint | None
) -> SyncSteps[RecoveredLog]:
    """Create the first segment of a new log, or of a log whose records were all trimmed or deleted before a crash.

    Raises `CorruptLog` if the checkpoint shows that records were durable.
    """
    start = checkpoint.start_offset if checkpoint is not None else 0
    if checkpoint is not None and checkpoint.durable_end_offset != start:
        raise CorruptLog(
            f"{directory} has no segment, but records {start} to {checkpoint.durable_end_offset} were durable"
        )
    sequence = checkpoint.sequence + 1 if checkpoint is not None else 1
    needs_new_epoch = checkpoint is not None and checkpoint.needs_new_epoch
    checkpoint = Checkpoint(sequence, start, start, 0, start, needs_new_epoch)
    # A segment never exists without a checkpoint.
    checkpoint = yield from write_both_slots_steps(disk, directory, checkpoint)
    segment = Segment(directory, start)
    segment.file = disk.open(segment.path, create=True)
    segment.index = SparseIndex(settings.index_interval_bytes)
    epochs = load_leader_epochs(disk, f"{directory}/{EPOCHS_NAME}") or LeaderEpochCache()
    epochs.truncate_to(start + 1)
    return RecoveredLog([segment], start, start, epochs, checkpoint, created=True)


def _drop_trimmed(disk: Disk, directory: str, bases: list[int], checkpoint: Checkpoint | None) -> list[int]:
    """Complete an interrupted trim: remove the segments wholly below the log start offset; returns the other bases."""
    if checkpoint is None:
        return bases
    keep = 0
    while keep + 1 < len(bases) and bases[keep + 1] <= checkpoint.start_offset:
        remove_segment_files(disk, Segment(directory, bases[keep]))
        keep += 1
    return bases[keep:]


logger = logging.getLogger(__name__)


def _verified_ranges(active: Segment, size: int, offset: int) -> CheckedRanges | None:
    """Return the verified part of the active segment: the batches that recovery checked, and those that are appended
    later."""
    checked = active.checked
    if checked is not None and checked.ranges and checked.ranges[0].end_position == size:
        size, offset = checked.ranges[0].position, checked.ranges[0].offset
    return CheckedRanges.for_active_segment(size, offset) if size else None


def write_one_slot(disk: Disk, directory: str, checkpoint: Checkpoint, *named_in: str) -> PendingSync:
    """Write one slot of the checkpoint file. `named_in`: the directories to be synced if the file may be new."""
    file = disk.open(f"{directory}/{CHECKPOINT_NAME}", create=True)
    write_slot(file, checkpoint)
    return PendingSync((file,), named_in)


def write_both_slots_steps(disk: Disk, directory: str, checkpoint: Checkpoint) -> SyncSteps[Checkpoint]:
    """Yield steps that write the checkpoint to both slots, one after the other; return the newer slot's checkpoint."""
    yield lambda: write_one_slot(disk, directory, checkpoint, directory, directory.rpartition("/")[0] or "/")
    second = checkpoint._replace(sequence=checkpoint.sequence + 1)
    yield lambda: write_one_slot(disk, directory, second)
    return second


class RecoveryScan:
    """Recovery of one log that has segments.

    `checked` lists the (segment, start position, end position) of the bytes that were checked.
    """

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
        self.segments_of_uncertain_length: list[Segment] = []
        """Segments whose files may be longer than their batches, now or after another crash."""

    def run(self) -> SyncSteps[RecoveredLog]:
        first, position, offset = self._start_position()
        self._load_epochs(first, position, offset)
        durable_end = self.checkpoint.durable_end_offset if self.checkpoint is not None else offset
        problem = ""
        for at in range(first, len(self.segments)):
            segment = self.segments[at]
            if self.checkpoint is None and offset < segment.base_offset <= self.compaction.sparse_end_offset:
                offset = (
                    segment.base_offset
                )  # a gap that compaction left; with a checkpoint it would be below that
            if offset != segment.base_offset and at > first:
                problem = f"the next segment begins at offset {segment.base_offset} instead of {offset}"
                return (yield from self._finish_recovery(at, None, offset, durable_end, problem))
            position, offset, problem = self._check_batches(segment, position if at == first else 0, offset)
            if problem:
                return (yield from self._finish_recovery(at, position, offset, durable_end, problem))
        return (
            yield from self._finish_recovery(len(self.segments) - 1, position, offset, durable_end, problem)
        )

    def _start_position(self) -> tuple[int, int, int]:
        """(segment index, position, offset) at which the check starts: the checkpoint, or the start of the log."""
        checkpoint = self.checkpoint
        if checkpoint is None:
            logger.warning("checkpoint_unreadable_checking_whole_log", extra=fields(directory=self.directory))
            return 0, 0, self.segments[0].base_offset
        end = checkpoint.durable_end_offset
        if self.segments[0].base_offset > end or self.segments[0].base_offset > checkpoint.start_offset:
            raise CorruptLog(
                f"{self.directory} begins at offset {self.segments[0].base_offset}, but records "
                f"{checkpoint.start_offset} to {end} were durable"
            )
        at = max(n for n, segment in enumerate(self.segments) if segment.base_offset <= end)
        segment = self.segments[at]
        if segment.base_offset == end:
            if at and self.segments[at - 1].base_offset == checkpoint.segment_base:
                if not self._exclude_preallocation(self.segments[at - 1], checkpoint.position):
                    return at - 1, checkpoint.position, end
                self.segments_of_uncertain_length.append(self.segments[at - 1])
            return at, 0, end
        if segment.base_offset != checkpoint.segment_base:
            # The segment to which the checkpoint refers is missing, or the log was closed at the end of a segment.
            return at, 0, segment.base_offset
        if segment.size < checkpoint.position:
            raise CorruptLog(
                f"{segment.path} has {segment.size} bytes, but {checkpoint.position} bytes were durable"
            )
        return at, checkpoint.position, end

    def _load_epochs(self, first: int, position: int, offset: int) -> None:
        """Load the leader epochs below `offset` from the epochs file, or from the batches if the file is invalid.

        `offset` is at `position` of the segment with the index `first`; the bytes after it may be torn.
        """
        loaded = load_leader_epochs(self.disk, f"{self.directory}/{EPOCHS_NAME}")
        if loaded is not None:
            # Epochs above `offset` are read from the batches again, because their records may be lost.
            self.epochs_changed = loaded.truncate_to(offset + 1)
            self.epochs = loaded
            return
        for segment in self.segments[: first + 1]:
            file = segment.file or self.disk.open_readonly(segment.path)
            end = segment.size if segment is not self.segments[first] else position
            for _, header in walk(file, 0, end, segment.base_offset, WALK_CHUNK_BYTES):
                self.epochs.assign(header.leader_epoch, header.base_offset)
        self.epochs_changed = self.epochs.latest_epoch >= 0  # an empty log has no file

    def _check_batches(self, segment: Segment, position: int, offset: int) -> tuple[int, int, str]:
        """Check the batches of a segment from `position` on, where `offset` is expected.

        Returns (end position, end offset, problem at which the check stopped early or "").
        """
        file = segment.file or self.disk.open(segment.path)
        segment.file = file
        index = segment.index = self._index_below(segment, file, position)
        reason = ""
        began, began_offset = position, offset
        sparse_end = self.compaction.sparse_end_offset
        for batch_position, header in checked_batches(file, position, segment.size, sparse_end):
            if isinstance(header, str):
                reason = "" if self._exclude_preallocation(segment, position) else header
                break
            epoch_start = offset  # a gap belongs to the later epoch: see `Log.append_as_follower`
            if offset < header.base_offset <= sparse_end:
                offset = header.base_offset
            if header.base_offset != offset:
                reason = f"a batch begins at offset {header.base_offset} instead of {offset}"
                break
            if header.leader_epoch < self.epochs.latest_epoch:
                reason = f"a batch of the old leader epoch {header.leader_epoch}"
                break
            if self.epochs.assign(header.leader_epoch, epoch_start):
                self.epochs_changed = True
            index.add(offset - segment.base_offset, batch_position, header.max_timestamp_ms)
            position = batch_position + header.batch_length + PREFIX_BYTES
            self.checked_bytes += header.batch_length + PREFIX_BYTES
            offset += header.last_offset_delta + 1
        self.checked.append((segment, began, position))
        found = CheckedRange(began, position, began_offset, offset)
        segment.checked = CheckedRanges([found] if offset > began_offset else ())
        self.segments_of_uncertain_length.append(segment)
        return position, offset, reason

    def _exclude_preallocation(self, segment: Segment, position: int) -> bool:
        """Whether only preallocated zeros follow `position`. If so, the segment's size is set to `position`.

        The file itself is truncated after the whole log was checked.
        """
        file = segment.file = segment.file or self.disk.open(segment.path)
        if not contains_only_zeros(file, position, segment.size):
            return False
        segment.size = min(segment.size, position)
        return True

    def _index_below(self, segment: Segment, file: DiskFile, position: int) -> SparseIndex:
        """Return the index of a segment's first `position` bytes, from its index file and the batch headers after
        that."""
        index = SparseIndex(self.settings.index_interval_bytes)
        start, lowest = 0, segment.base_offset
        loaded = load_index(self.disk, segment.index_path, segment.base_offset) if position else None
        if loaded is not None and loaded.covered_bytes <= position:
            index, start, lowest = loaded.index, loaded.covered_bytes, loaded.end_offset
        self.index_saved_bytes = start
        for at, header in walk(file, start, position, lowest, WALK_CHUNK_BYTES):
            index.add(header.base_offset - segment.base_offset, at, header.max_timestamp_ms)
        return index

    def _finish_recovery(
        self, last: int, position: int | None, offset: int, durable_end: int, problem: str
    ) -> SyncSteps[RecoveredLog]:
        """Truncate the log at `offset` if there is a `problem`, sync the rest, and write the checkpoint.

        The log then ends at `position` of the segment with the index `last`; `position` None: before that segment.
        Raises `CorruptLog` if durable records would be lost.
        """
        if problem and (offset < durable_end or (self.checkpoint is None and last < len(self.segments) - 1)):
            raise CorruptLog(f"{self.segments[last].path} is damaged below its durable end: {problem}")
        if offset < durable_end:
            raise CorruptLog(f"{self.directory} ends at offset {offset} instead of {durable_end}")
        kept = self.segments[: last + 1] if position is not None else self.segments[:last]
        torn = self.segments[len(kept) :]
        active = kept[-1]
        size = position if position is not None else active.size
        truncated, previous = None, self.checkpoint
        if problem:
            ranges = file_ranges_of(self.disk, [(active, size), *((segment, 0) for segment in torn)])
            truncated = yield from quarantine(
                self.disk, self.directory, offset, ranges, reason=problem, segments=len(torn)
            )
            if previous is not None and not previous.needs_new_epoch:
                previous = previous._replace(sequence=previous.sequence + 1, needs_new_epoch=True)
                yield partial(write_one_slot, self.disk, self.directory, previous)
        self._truncate(active, size, torn)
        self._truncate_files(kept[-1:], rewrite_lengths=False)
        rolled = any(segment is not active for segment in self.segments_of_uncertain_length)
        if self.checked_bytes or problem or previous is None or self.epochs_changed or rolled:
            yield from self._make_durable(kept, offset)
        for segment in kept[:-1]:
            if segment.checked is not None and segment.checked.is_complete(segment.size, segment.end_offset):
                segment.checked = None
        active.checked = _verified_ranges(active, size, offset)
        start_offset = previous.start_offset if previous is not None else kept[0].base_offset
        sequence = previous.sequence + 1 if previous is not None else 1
        needs_new_epoch = previous.needs_new_epoch if previous is not None else bool(problem)
        checkpoint = Checkpoint(sequence, offset, active.base_offset, size, start_offset, needs_new_epoch)
        if previous is None:
            checkpoint = yield from write_both_slots_steps(self.disk, self.directory, checkpoint)
        elif checkpoint != previous._replace(sequence=sequence):
            yield lambda: write_one_slot(self.disk, self.directory, checkpoint)
        else:
            checkpoint = previous
        for segment in kept[:-1]:
            if segment.index is not None:
                self.indexes_due.append(segment)
        return RecoveredLog(
            kept,
            offset,
            start_offset,
            self.epochs,
            checkpoint,
            checked_bytes=self.checked_bytes,
            truncated_tail=truncated,
            indexes_due=self.indexes_due,
            index_saved_bytes=self.index_saved_bytes,
            compaction=self.compaction,
        )

    def _truncate(self, active: Segment, size: int, torn: list[Segment]) -> None:
        """Remove the segments `torn`, newest first, and set the size of the `active` one to `size`.

        `_truncate_files` truncates the file of the active segment.
        """
        for segment in reversed(torn):
            segment.file = None
            remove_segment_files(self.disk, segment)
        file = active.file or self.disk.open(active.path)
        active.file = file
        if active.index is None:
            active.index = self._index_below(active, file, size)
        active.size = size
        if self._drop_stale_indexes(active, size) or torn:
            # Without the sync a crash could restore an index or segment that does not match the appended batches.
            self.disk.sync_directory(self.directory)

    def _truncate_files(self, kept: list[Segment], *, rewrite_lengths: bool) -> None:
        """Truncate the files of the `kept` segments to the end of their batches.

        `rewrite_lengths`: change the length of each file even if it is correct, so that the next sync writes it: the
        sync of an earlier change may have failed.
        """
        for segment in self.segments_of_uncertain_length:
            if segment not in kept or segment.file is None:
                continue
            if rewrite_lengths:
                segment.file.truncate(segment.size + 1)
            if segment.file.size() > segment.size:
                segment.file.truncate(segment.size)

    def _drop_stale_indexes(self, active: Segment, size: int) -> bool:
        """Remove the index files that do not match a segment. Returns whether there were any."""
        removed = False
        kept = {segment.base_offset for segment in self.segments}
        for name in self.disk.list_directory(self.directory):
            stem = name.removesuffix(INDEX_SUFFIX)
            if stem == name or not (stem.isascii() and stem.isdigit()):
                continue  # not an index file
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
        """Yield steps that make the checked batches and the leader epochs durable.

        The new epochs file is durable before it replaces the old one, so a crash leaves one of the two.
        """
        self.epochs.truncate_to(offset + 1)
        path = f"{self.directory}/{EPOCHS_NAME}"

        def write_again() -> PendingSync:
            # Part of the step, so that it is repeated if a batch sync fails.
            self._truncate_files(kept, rewrite_lengths=True)
            return PendingSync((*self._write_again(kept), self._epochs_file(path)))

        def rename() -> PendingSync:
            if self.disk.exists(path + TEMPORARY_SUFFIX):
                self.disk.rename(path + TEMPORARY_SUFFIX, path)
            return PendingSync((), (self.directory,))

        yield write_again
        yield rename

    def _epochs_file(self, path: str) -> DiskFile:
        """Write the temporary epochs file; or, if the content is unchanged, overwrite the existing file in place.

        Overwriting needs no space, so that recovery succeeds on a full disk.
        """
        data = self.epochs.encode()
        if not self.disk.exists(path) or self.disk.read_file(path) != data:
            return prepare_checksummed(self.disk, path, data)
        file = self.disk.open(path)
        file.write_at([data], 0)
        return file

    def _write_again(self, kept: list[Segment]) -> list[DiskFile]:
        """Write the checked bytes again; returns the files to be synced.

        If a sync failed before the restart, the page cache may contain these bytes as clean pages although they are not
        on disk; a sync without new writes would succeed and do nothing.
        """
        written = []
        for segment, position, end in self.checked:
            file = segment.file
            if file is None or segment not in kept:
                continue
            while position < end:
                data = read_exactly(file, min(CHUNK_BYTES, end - position), position)
                file.write_at([data], position)
                position += len(data)
            written.append(file)
        for segment in self.segments_of_uncertain_length:
            if segment in kept and segment.file is not None and segment.file not in written:
                written.append(segment.file)
        return written
