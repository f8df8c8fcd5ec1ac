"""Recovery of a log: finds what is on disk, validates it and truncates what is incomplete.

Everything below the checkpoint was durable: it is accepted as it is, and damage in it is reported (`CorruptLog`), never
truncated. Above the checkpoint every batch is read and checked; the first one that is incomplete, out of order or fails
its CRC is where a crash tore the log, and the log is truncated there. Complete batches after that position are
quarantined first.

Invariants: nothing below the checkpoint is changed; the result is durable (recovery syncs what it kept); truncation is
done before anything new is written, and running recovery twice, or being killed in it, changes nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mansio.errors import CorruptLog
from mansio.storage.checkpoint import CHECKPOINT_NAME, Checkpoint, load_checkpoint
from mansio.storage.checksummed_file import TEMPORARY_SUFFIX
from mansio.storage.cleaner.swap_recovery import recover_compaction
from mansio.storage.index import SparseIndex
from mansio.storage.leader_epochs import EPOCHS_NAME, LeaderEpochCache, load_leader_epochs
from mansio.storage.recovery.batch_sync import run_single
from mansio.storage.recovery.quarantine import file_ranges_of, quarantine
from mansio.storage.recovery.recovery_scan import RecoveryScan, both_slots, one_slot
from mansio.storage.recovery.result import Recovered
from mansio.storage.segment import Segment, base_offset_of, remove_segment_files
from mansio.storage.segment_timestamps import apply_segment_timestamps

if TYPE_CHECKING:
    from mansio.ports import Disk
    from mansio.storage.recovery.batch_sync import SyncSteps
    from mansio.storage.recovery.quarantine import TruncatedTail
    from mansio.storage.settings import LogSettings


def recover(disk: Disk, directory: str, settings: LogSettings) -> Recovered:
    """Recover the log in `directory`, creating it if there is none. Raises `CorruptLog`, or `OSError` from the disk."""
    return run_single(disk, recovery_steps(disk, directory, settings))


def recovery_steps(disk: Disk, directory: str, settings: LogSettings) -> SyncSteps[Recovered]:
    """`recover` for `run_batch`: in steps that many logs make durable with one sync.

    A log that was closed cleanly needs none.
    """
    recovered = yield from _recover(disk, directory, settings)
    recovered.timestamps_due = not apply_segment_timestamps(disk, directory, recovered.segments)
    return recovered


def _recover(disk: Disk, directory: str, settings: LogSettings) -> SyncSteps[Recovered]:
    if not disk.exists(directory):
        disk.make_directory(directory.rpartition("/")[0] or "/")
        disk.make_directory(directory, durable=False)  # `_create` syncs it
    checkpoint = load_checkpoint(disk, f"{directory}/{CHECKPOINT_NAME}")
    compaction = recover_compaction(
        disk, directory, checkpoint.start_offset if checkpoint is not None else -1
    )
    bases = _clear_and_list(disk, directory)
    if (
        checkpoint is not None
        and bases
        and bases[0] > checkpoint.durable_end_offset == checkpoint.start_offset
    ):
        # The names of later segments survived a crash and that of the first one did not; nothing was durable yet.
        truncated = yield from _remove_unreachable(disk, directory, bases, checkpoint)
        checkpoint = checkpoint._replace(sequence=checkpoint.sequence + 1, epoch_due=True)
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
    return (yield from RecoveryScan(disk, directory, settings, segments, checkpoint, compaction).run())


def _remove_unreachable(
    disk: Disk, directory: str, bases: list[int], checkpoint: Checkpoint
) -> SyncSteps[TruncatedTail]:
    """Remove segments that do not follow a durable record; their content is quarantined."""
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
    due = checkpoint._replace(sequence=checkpoint.sequence + 1, epoch_due=True)
    yield lambda: one_slot(disk, directory, due)
    for segment in reversed(segments):
        remove_segment_files(disk, segment)
    disk.sync_directory(directory)
    return truncated


def _clear_and_list(disk: Disk, directory: str) -> list[int]:
    """Remove unfinished files; returns the base offsets of the segments, sorted."""
    bases = []
    for name in disk.list_directory(directory):
        base = base_offset_of(name)
        if base is not None:
            bases.append(base)
        elif name.endswith(TEMPORARY_SUFFIX):
            disk.remove(f"{directory}/{name}")
    return sorted(bases)


def _create(
    disk: Disk, directory: str, settings: LogSettings, checkpoint: Checkpoint | None
) -> SyncSteps[Recovered]:
    """Create a log, or one whose last trim removed everything below an active segment that never reached the disk."""
    start = checkpoint.start_offset if checkpoint is not None else 0
    if checkpoint is not None and checkpoint.durable_end_offset != start:
        raise CorruptLog(
            f"{directory} has no segment, but records {start} to {checkpoint.durable_end_offset} were durable"
        )
    sequence = checkpoint.sequence + 1 if checkpoint is not None else 1
    epoch_due = checkpoint is not None and checkpoint.epoch_due
    checkpoint = Checkpoint(sequence, start, start, 0, start, epoch_due)
    # A segment never exists without a checkpoint.
    checkpoint = yield from both_slots(disk, directory, checkpoint)
    segment = Segment(directory, start)
    segment.file = disk.open(segment.path, create=True)
    segment.index = SparseIndex(settings.index_interval_bytes)
    epochs = load_leader_epochs(disk, f"{directory}/{EPOCHS_NAME}") or LeaderEpochCache()
    epochs.truncate_to(start + 1)
    return Recovered([segment], start, start, epochs, checkpoint, created=True)


def _drop_trimmed(disk: Disk, directory: str, bases: list[int], checkpoint: Checkpoint | None) -> list[int]:
    """Complete a trim that a crash interrupted: segments wholly below the start are removed."""
    if checkpoint is None:
        return bases
    keep = 0
    while keep + 1 < len(bases) and bases[keep + 1] <= checkpoint.start_offset:
        remove_segment_files(disk, Segment(directory, bases[keep]))
        keep += 1
    return bases[keep:]
