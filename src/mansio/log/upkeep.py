"""What a log does beside taking and giving batches: housekeeping, and all of it here and now when there is no broker.

`Log` hands itself in. Always true: these run on the thread the log belongs to; the work they prepare runs anywhere.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from mansio.errors import ConcurrentChange, OffsetOutOfRange, StorageError
from mansio.log.compaction_state import NamesNotSynced
from mansio.log.recovery import verify_segment
from mansio.log.sync_work import NoRoom, SyncWork
from mansio.log.truncation import take_back
from mansio.logs import fields

if TYPE_CHECKING:
    from collections.abc import Callable

    from mansio.log.log import Log
    from mansio.log.sync_work import Chores

logger = logging.getLogger(__name__)


def nobody_listens(_: object) -> None:
    """Stands where a listener will be, or was."""


def prepare_chores(log: Log, *, closing: bool) -> Chores | None:
    """See `Log.prepare_chores`."""
    if log.compaction.busy:
        return None
    if not log.has_chores and not (closing and log.ledger.has_chores(log.start_offset, log.table.active)):
        return None
    log.busy += 1
    log.keeping_house = True
    snapshot_bytes = log.settings.index_snapshot_bytes
    return log.ledger.prepare_chores(log.table.segments, log.start_offset, snapshot_bytes, closing=closing)


def finish_chores(log: Log, chores: Chores, error: BaseException | None) -> None:
    """See `Log.finish_chores`."""
    log.busy -= 1
    log.keeping_house = False
    if isinstance(error, NoRoom):
        log.ledger.put_back_chores(chores, checkpointed=error.checkpointed)
        say_no_room(log, error)
        return
    if error is not None:
        log.fail(error, f"cannot keep house in {log.directory}")
        return
    log.no_room_said = False
    log.ledger.checkpointed(chores)
    log.durable_start_offset = max(log.durable_start_offset, chores.checkpoint.start_offset)
    # Only now: had the epochs been forgotten first, a crash could bring back records without theirs.
    log.leader_epochs.trim_to(chores.checkpoint.start_offset)
    for due in chores.indexes:
        if due.closed:
            due.segment.max_timestamp_ms = due.sparse.max_timestamp_ms
            due.segment.index = None
    if log.ledger.settling and log.on_chores is not None:
        log.on_chores()


def say_no_room(log: Log, error: NoRoom) -> None:
    """One line per spell of a full disk."""
    if not log.no_room_said:
        logger.warning("log_no_room", extra=fields(directory=log.directory, error=str(error)))
    log.no_room_said = True


def run_inline(log: Log, work: SyncWork | Chores | None, finish: Callable[..., None]) -> None:
    """Run what was prepared here and now, blocking, and finish it. Raises `StorageError`."""
    if log.failure is not None:
        raise log.failure
    if work is None:
        return
    try:
        work.run(log.disk)
    except NoRoom as error:
        finish(work, error)
        if isinstance(work, SyncWork):  # the records are not durable; housekeeping can wait
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
        run_inline(log, log.prepare_chores(closing=True), log.finish_chores)
    try:
        log.room.give_back(log.active)
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
    segment, position, end = log.table.cut_at(offset)
    end = max(end, log.start_offset)
    log.places.clear()
    try:
        log.compaction.truncating(log.disk, end)
        take_back(
            log.disk,
            log.table,
            log.files,
            log.ledger,
            log.leader_epochs,
            segment=segment,
            position=position,
            end_offset=end,
            start_offset=log.start_offset,
            index_interval_bytes=log.settings.index_interval_bytes,
        )
    except (OSError, NamesNotSynced) as error:
        raise log.fail(error, f"cannot truncate {log.directory}") from error
    log.active = segment
    log.room.begin(position)
    log.end_offset = log.durable_end_offset = end


def let_go(log: Log) -> None:
    """The log ends: it holds no file, and an append takes the rare path, which refuses."""
    log.closed = True
    log.room.limit(-1)
    log.places.clear()
    log.ledger.let_go()
    # They refer back to the log: descriptors must not wait for the collector.
    log.on_durable = log.on_failure = nobody_listens
    for segment in log.table.segments:
        log.files.forget(segment)


def delete(log: Log) -> None:
    """See `Log.delete`."""
    if log.busy or log.compaction.busy:
        raise ConcurrentChange(f"{log.directory} is being synced; delete it when that is done")
    let_go(log)
    try:
        log.disk.remove_tree(log.directory)
    except OSError as error:
        raise StorageError(f"cannot remove {log.directory}: {error}") from error
