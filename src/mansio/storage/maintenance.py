"""What a log does beside taking and giving batches: housekeeping, and all of it here and now when there is no broker.

`Log` hands itself in. Always true: these run on the thread the log belongs to; the work they prepare runs anywhere.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from mansio.errors import ConcurrentChange, OffsetOutOfRange, StorageError
from mansio.logs import fields
from mansio.storage.cleaner.compaction_state import DirectoryNotSynced
from mansio.storage.flush.flush_jobs import FlushJob, LogDiskFull
from mansio.storage.recovery.recovery import verify_segment
from mansio.storage.truncation import take_back

if TYPE_CHECKING:
    from collections.abc import Callable

    from mansio.storage.flush.flush_jobs import MaintenanceJob
    from mansio.storage.log import Log

logger = logging.getLogger(__name__)


def nobody_listens(_: object) -> None:
    """Stands where a listener will be, or was."""


def prepare_maintenance(log: Log, *, closing: bool) -> MaintenanceJob | None:
    """See `Log.prepare_maintenance`."""
    if log.compaction.busy:
        return None
    if not log.needs_maintenance and not (
        closing and log.flush_state.needs_maintenance(log.start_offset, log.table.active)
    ):
        return None
    log.busy += 1
    log.maintenance_running = True
    snapshot_bytes = log.settings.index_snapshot_bytes
    return log.flush_state.prepare_maintenance(
        log.table.segments, log.start_offset, snapshot_bytes, closing=closing
    )


def finish_maintenance(log: Log, job: MaintenanceJob, error: BaseException | None) -> None:
    """See `Log.finish_maintenance`."""
    log.busy -= 1
    log.maintenance_running = False
    if isinstance(error, LogDiskFull):
        log.flush_state.retry_maintenance(job, checkpointed=error.checkpointed)
        log_disk_full(log, error)
        return
    if error is not None:
        log.fail(error, f"cannot keep house in {log.directory}")
        return
    log.disk_full_logged = False
    log.flush_state.checkpointed(job)
    log.durable_start_offset = max(log.durable_start_offset, job.checkpoint.start_offset)
    # Only now: had the epochs been forgotten first, a crash could bring back records without theirs.
    log.leader_epochs.trim_to(job.checkpoint.start_offset)
    for due in job.indexes:
        if due.closed:
            due.segment.max_timestamp_ms = due.sparse.max_timestamp_ms
            due.segment.index = None
    if log.flush_state.settling and log.on_maintenance_due is not None:
        log.on_maintenance_due()


def log_disk_full(log: Log, error: LogDiskFull) -> None:
    """One line per spell of a full disk."""
    if not log.disk_full_logged:
        logger.warning("log_disk_full", extra=fields(directory=log.directory, error=str(error)))
    log.disk_full_logged = True


def run_inline(log: Log, work: FlushJob | MaintenanceJob | None, finish: Callable[..., None]) -> None:
    """Run what was prepared here and now, blocking, and finish it. Raises `StorageError`."""
    if log.failure is not None:
        raise log.failure
    if work is None:
        return
    try:
        work.run(log.disk)
    except LogDiskFull as error:
        finish(work, error)
        if isinstance(work, FlushJob):  # the records are not durable; housekeeping can wait
            raise
        return
    except OSError as error:
        finish(work, error)
        raise log.failure or StorageError(str(error)) from error
    finish(work, None)


def save(log: Log) -> None:
    """Make everything durable, and the next opening quick. Raises `StorageError`."""
    run_inline(log, log.prepare_sync(), log.finish_sync)
    if not log.busy:
        run_inline(log, log.prepare_maintenance(closing=True), log.finish_maintenance)
    try:
        log.room.trim_to_size(log.active)
    except OSError as error:
        raise StorageError(f"cannot shorten {log.active.path}: {error}") from error


def verify(log: Log) -> int:
    """See `Log.verify`."""
    count = 0
    for segment in log.table.segments:
        file, end = log.files.file(segment), segment.end_offset
        sparse_end = max(log.table.sparse_end_offset, log.start_offset)  # below the start all may be gone
        count += verify_segment(file, segment.base_offset, segment.size, end, log.leader_epochs, sparse_end)
    return count


def truncate(log: Log, offset: int) -> None:
    """See `Log.truncate_to`."""
    if log.failure is not None:
        raise log.failure
    if offset >= log.end_offset:
        return
    if offset < log.start_offset:
        raise OffsetOutOfRange(f"cannot truncate to {offset}, the log starts at {log.start_offset}")
    if log.busy or log.compaction.busy:
        raise ConcurrentChange(f"{log.directory} is being synced; truncate when that is done")
    segment, position, end = log.table.truncation_point(offset)
    end = max(end, log.start_offset)
    log.places.clear()
    try:
        log.compaction.truncating(log.disk, end)
        take_back(
            log.disk,
            log.table,
            log.files,
            log.flush_state,
            log.leader_epochs,
            segment=segment,
            position=position,
            end_offset=end,
            start_offset=log.start_offset,
            index_interval_bytes=log.settings.index_interval_bytes,
        )
    except (OSError, DirectoryNotSynced) as error:
        raise log.fail(error, f"cannot truncate {log.directory}") from error
    log.active = segment
    log.room.begin(position)
    log.end_offset = log.durable_end_offset = end


def release(log: Log) -> None:
    """The log ends: it holds no file, and an append takes the rare path, which refuses."""
    log.closed = True
    log.room.limit(-1)
    log.places.clear()
    log.flush_state.release()
    # They refer back to the log: descriptors must not wait for the collector.
    log.on_durable = log.on_failure = nobody_listens
    for segment in log.table.segments:
        log.files.forget(segment)


def delete(log: Log) -> None:
    """See `Log.delete`."""
    if log.busy or log.compaction.busy:
        raise ConcurrentChange(f"{log.directory} is being synced; delete it when that is done")
    release(log)
    try:
        log.disk.remove_tree(log.directory)
    except OSError as error:
        raise StorageError(f"cannot remove {log.directory}: {error}") from error
