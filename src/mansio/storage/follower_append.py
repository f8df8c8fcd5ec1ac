"""What only a follower does to a log: append its leader's batches as they are, and begin the log anew elsewhere.

The leader gave out the offsets and stamped its epoch into each batch; both are kept. Where its log was compacted there
are gaps between its batches and within them, and there are the same ones here: they are allowed up to an end that is
written down first, so that an opening does not take them for damage. Between two segments there is none that an opening
has to believe in: what is missing there may have been lost with the power.

Always true: a batch is appended whole, checked and in line, or not at all; an epoch begins here no later than it began
on the leader; a crash while a log begins anew leaves one that opens, empty, before or at the new start.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from mansio.errors import ConcurrentChange, CorruptMessage, FencedLeaderEpoch, StorageError
from mansio.storage import maintenance, segment_roll
from mansio.storage.checkpoint import CHECKPOINT_NAME, Checkpoint, write_both_slots
from mansio.storage.checksummed_file import write_checksummed
from mansio.storage.cleaner.compaction_state import DirectoryNotSynced, write_state
from mansio.storage.flush.flush_jobs import NO_ROOM
from mansio.storage.index import SparseIndex
from mansio.storage.leader_epochs import LeaderEpochCache
from mansio.storage.recovery.recovery import EPOCHS_NAME, remove_segment_files
from mansio.storage.segment import Segment
from mansio.storage.segment_roll import RELATIVE_OFFSET_MAX
from mansio.storage.segment_timestamps import TIMESTAMPS_NAME
from mansio.wire.batch.record_batch import LENGTH_OFFSET

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mansio.storage.log import Log
    from mansio.wire.batch.record_batch import BatchHeader


def append_as_follower(
    log: Log, records: memoryview, headers: Sequence[BatchHeader], *, gaps_below: int
) -> int:
    """Append the leader's batches in `records`, each checked by `check_stored_batch`; how many were appended.

    Nothing is durable yet. What goes into one segment without a gap is written with one system call. `gaps_below`:
    below this offset the leader's log may have gaps. Raises `CorruptMessage` for a batch out of line,
    `FencedLeaderEpoch` for one of an epoch that is over, `ConcurrentChange` while compaction holds the log, and
    `StorageError` as `Log.append` does; `log.end_offset` says what was appended before.
    """
    done = position = 0
    while done < len(headers):
        count, size = _run(log, headers, done)
        run = headers if count == len(headers) else headers[done : done + count]
        _append_run(log, records[position : position + size], run, gaps_below)
        done += count
        position += size
    return done


def _run(log: Log, headers: Sequence[BatchHeader], first: int) -> tuple[int, int]:
    """(how many batches from `first` on can be written together, their bytes)."""
    header = headers[first]
    epoch, following, size = header.leader_epoch, header.last_offset + 1, header.size
    room = log.settings.segment_bytes - log.active.size
    highest = log.active.base_offset + RELATIVE_OFFSET_MAX
    count = 1
    for header in islice(headers, first + 1, None):
        base_offset = header.base_offset
        last_offset, grown = (
            base_offset + header.last_offset_delta,
            size + header.batch_length + LENGTH_OFFSET,
        )
        if base_offset != following or header.leader_epoch != epoch or grown > room or last_offset > highest:
            break
        following = last_offset + 1
        size = grown
        count += 1
    return count, size


def _append_run(log: Log, run: memoryview, headers: Sequence[BatchHeader], gaps_below: int) -> None:
    first, last = headers[0], headers[-1]
    end_before, base_offset, leader_epoch = log.end_offset, first.base_offset, first.leader_epoch
    if base_offset < end_before or (base_offset > end_before and base_offset > gaps_below):
        raise CorruptMessage(
            f"{log.directory} ends at {end_before}, a batch from its leader begins at {base_offset}"
        )
    if leader_epoch < log.leader_epochs.last and log.leader_epochs.truncate_to(end_before):
        # This broker led and wrote nothing: its epoch left no trace on the leader.
        log.flush_state.epochs_dirty = True
    if leader_epoch < log.leader_epochs.last:
        raise FencedLeaderEpoch(
            f"{log.directory}: a batch of leader epoch {leader_epoch} after one of {log.leader_epochs.last}"
        )
    sparse = [header for header in headers if header.record_count <= header.last_offset_delta]
    if sparse and sparse[-1].base_offset >= log.compaction.state.sparse_end_offset:
        _allow_gaps(log, max(gaps_below, sparse[-1].last_offset + 1))
    if base_offset > end_before:
        _allow_gaps(log, gaps_below)
        # Which epoch wrote what is missing is not known: the new one takes it. Were the old one believed to reach
        # further than it did, a replica with records of it that never counted could keep them.
        if log.leader_epochs.assign(leader_epoch, end_before):
            log.flush_state.epochs_dirty = True
    if last.last_offset - end_before > RELATIVE_OFFSET_MAX:
        _leap(log, base_offset)
    size = len(run)
    active = log.active
    position = active.size
    if (
        log.failure is not None
        or position + size > log.room.writable_bytes
        or leader_epoch != log.leader_epochs.last
        or log.clock.monotonic() >= log.roll_at
        or last.last_offset - active.base_offset > RELATIVE_OFFSET_MAX
    ):
        active = segment_roll.prepare_append(log, position, size, leader_epoch, first)
        position = active.size
    try:
        active.file.write_at([run], position)  # type: ignore[union-attr]  # an active segment holds its file
    except OSError as error:
        raise segment_roll.append_failed(log, error, position) from error
    index: SparseIndex = active.index  # type: ignore[assignment]  # an active segment holds its index
    segment_base = active.base_offset
    for header in headers:
        if position >= index.due_position or header.max_timestamp_ms > index.max_timestamp_ms:
            index.add(header.base_offset - segment_base, position, header.max_timestamp_ms)
        position += header.batch_length + LENGTH_OFFSET
    active.size = position
    log.end_offset = active.end_offset = last.last_offset + 1


def _allow_gaps(log: Log, below: int) -> None:
    """Write down, if it is not, that offsets below this one may be missing here. Durable on return; blocks."""
    if log.failure is not None:
        raise log.failure
    if below > log.compaction.state.sparse_end_offset:
        if log.compaction.busy:
            raise ConcurrentChange(f"{log.directory} is being compacted; append when that is done")
        state = log.compaction.state._replace(sparse_end_offset=below)
        try:
            write_state(log.disk, log.directory, state)
        except (OSError, DirectoryNotSynced) as error:
            message = f"cannot note the gaps of {log.directory}"
            if isinstance(error, OSError) and error.errno in NO_ROOM:
                # Nothing was appended; the next attempt may find room.
                raise StorageError(f"{message}: {error}") from error
            raise log.fail(error, message) from error
        log.compaction.state = state
    log.table.sparse_end_offset = max(log.table.sparse_end_offset, below)


def _leap(log: Log, offset: int) -> None:
    """Go on at `offset`, behind a gap wider than a segment may span, in a segment that begins there. Blocks.

    The checkpoint has to say so first: above it an opening takes what is missing between two segments for lost.
    """
    if log.busy or log.compaction.busy:
        raise ConcurrentChange(f"{log.directory} is being synced; append when that is done")
    log.end_offset = log.active.end_offset = offset
    maintenance.run_inline(log, log.prepare_sync(), log.finish_sync)
    maintenance.run_inline(log, log.prepare_maintenance(), log.finish_maintenance)
    if log.flush_state.checkpoint.durable_end_offset != offset:
        raise log.fail(StorageError("no room for the checkpoint"), f"cannot note the gaps of {log.directory}")
    segment_roll.begin_segment(log, log.clock.monotonic())


def reset_to(log: Log, offset: int) -> None:
    """Forget everything and go on at `offset`, empty. Durable on return; blocks.

    Not while a sync of this log runs (`busy`): `ConcurrentChange`. Raises `StorageError`; then the log has failed.
    """
    if log.failure is not None:
        raise log.failure
    if log.busy or log.compaction.busy:
        raise ConcurrentChange(f"{log.directory} is being synced; begin it anew when that is done")
    log.places.clear()
    try:
        _empty(log)
        _restart(log, offset)
    except (OSError, DirectoryNotSynced) as error:
        raise log.fail(error, f"cannot begin {log.directory} anew") from error


def _empty(log: Log) -> None:
    """Nothing is left but a checkpoint that says so: an opening makes a new log of it, that begins where this ended.

    The checkpoint first, or missing segments would be loss. Then the segments, in two steps: were the one that the
    checkpoint speaks of gone while one before it is not, an opening would miss what was between.
    """
    disk, directory, flush_state = log.disk, log.directory, log.flush_state
    flush_state.generation += 1
    flush_state.checkpoint = write_both_slots(
        disk, f"{directory}/{CHECKPOINT_NAME}", flush_state.next_checkpoint(flush_state.end_offset)
    )
    at = log.table.segments.index(flush_state.segment) if flush_state.segment in log.table.segments else 0
    older = [*flush_state.take_garbage(), *log.table.segments[:at]]
    for step in (older, log.table.segments[at:]):
        for segment in step:
            log.files.forget(segment)
            segment.file = None
            remove_segment_files(disk, segment)
        disk.sync_directory(directory)
    if disk.exists(f"{directory}/{TIMESTAMPS_NAME}"):
        disk.remove(f"{directory}/{TIMESTAMPS_NAME}")
    log.compaction.truncating(disk, 0)
    write_checksummed(disk, f"{directory}/{EPOCHS_NAME}", LeaderEpochCache().encode(), durable=True)


def _restart(log: Log, offset: int) -> None:
    """An empty log gets a new beginning: the checkpoint, then a segment, as when a log is made."""
    disk, flush_state = log.disk, log.flush_state
    checkpoint = Checkpoint(
        flush_state.checkpoint.sequence + 1, offset, offset, 0, offset, flush_state.epoch_due
    )
    flush_state.checkpoint = write_both_slots(disk, f"{log.directory}/{CHECKPOINT_NAME}", checkpoint)
    segment = Segment(log.directory, offset)
    segment.file = disk.open(segment.path, create=True)
    segment.file.truncate(0)
    segment.file.sync()
    disk.sync_directory(log.directory)
    segment.index = SparseIndex(log.settings.index_interval_bytes)
    log.leader_epochs.truncate_to(0)
    log.table.begin(segment)
    flush_state.begun_anew(segment)
    log.active = segment
    log.room.begin(0)
    log.start_offset = log.durable_start_offset = log.end_offset = log.durable_end_offset = offset
    log.roll_at = log.clock.monotonic() + log.settings.segment_ms / 1000
