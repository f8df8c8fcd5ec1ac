"""One compaction from its beginning to its end, as the loop sees it: what to do next, and what came of it.

`advance` gives the next piece of work for another thread, `finish` takes its result back on the loop; how fast the one
follows the other is the caller's business. In between the log goes on: it may be trimmed, closed, or fail, and the run
then ends without having done any harm.

The way of a swap:  written -> intent on disk -> shown to readers -> files swapped -> noted on disk -> go on
Up to the intent everything can be given up; after it the swap is carried through, by recovery if need be.
"""

from __future__ import annotations

import errno
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

from mansio.errors import StorageError
from mansio.storage.cleaner.batch_filter import INT64_MAX, CompactionRules, never
from mansio.storage.cleaner.compaction import CleanedSegment, Compaction, CompactionTask, Finished, Progress
from mansio.storage.cleaner.compaction_state import CompactionState, DirectoryNotSynced, write_state
from mansio.storage.cleaner.policy import worth
from mansio.storage.cleaner.swap_recovery import NO_ROOM, swap_files

if TYPE_CHECKING:
    from collections.abc import Callable

    from mansio.ports import Disk
    from mansio.storage.cleaner.policy import CompactionPlan, CompactionSettings
    from mansio.storage.log import Log
    from mansio.wire.batch.record_batch import BatchHeader


TRANSIENT_ERRNOS = NO_ROOM | {errno.EMFILE, errno.ENFILE}
"""What is missing then, room or descriptors, may be there later: no reason to give a log up."""


def passes(error: BaseException) -> bool:
    """Was it only for want of room or of descriptors?"""
    cause = error if isinstance(error, OSError) else error.__cause__
    return isinstance(cause, OSError) and cause.errno in TRANSIENT_ERRNOS


class End(Enum):
    """How a run ended. `NO_ROOM` (or no descriptor) and `GIVEN_UP` can be tried again; `FAILED` says why in
    `CompactionRun.error`.
    """

    DONE = auto()
    GIVEN_UP = auto()
    NO_ROOM = auto()
    FAILED = auto()


class _Stage(Enum):
    PREPARE = auto()
    WORK = auto()
    OFFERED = auto()
    INTENT = auto()
    SWAP = auto()
    NOTE = auto()
    LAST_NOTE = auto()
    ABANDON = auto()


def judge(log: Log, settings: CompactionSettings, *, limit_offset: int, now_ms: int) -> CompactionPlan:
    """What compacting a log now would mean. Nothing at or above `limit_offset` (not committed, not decided) is touched.

    Raises `StorageError` when a segment cannot be asked for its timestamps.
    """
    segment_swap = log.compaction
    segments = log.segments()
    limit_offset = min(limit_offset, log.durable_end_offset)
    if len(segments) > 1 and segment_swap.limit_offset < min(limit_offset, segments[-1].base_offset):
        log.request_checkpoint()
    return worth(
        segments,
        segment_swap.state,
        settings,
        limit_offset=min(limit_offset, segment_swap.limit_offset),
        oldest_dirty_ms=segment_swap.first_dirty_timestamp(),
        now_ms=now_ms,
    )


def begin(
    disk: Disk,
    log: Log,
    what: CompactionPlan,
    settings: CompactionSettings,
    *,
    now_ms: int,
    map_bytes_max: int,
    tombstone_floor: int = INT64_MAX,
    is_last_of_producer: Callable[[BatchHeader], bool] | None = None,
    is_aborted: Callable[[BatchHeader], bool] | None = None,
    is_obsolete_marker: Callable[[BatchHeader], bool] | None = None,
) -> CompactionRun:
    """Begin to compact what `judge` found. The functions are called on the other thread: see `CompactionRules`."""
    segment_swap = log.compaction
    rules = CompactionRules(
        now_ms=now_ms,
        delete_retention_ms=settings.delete_retention_ms,
        stamped_below=segment_swap.state.sparse_end_offset,
        map_end_offset=0,
        output_bytes_max=log.settings.open_batch_bytes_max,
        tombstone_floor=tombstone_floor,
        is_aborted=is_aborted or never,
        is_obsolete_marker=is_obsolete_marker or never,
        is_last_of_producer=is_last_of_producer or never,
    )
    order = CompactionTask(
        directory=log.directory,
        segments=segment_swap.segments(what.segment_count),
        infos=tuple(log.segments()[: what.segment_count]),
        first_dirty=what.first_dirty,
        dirty_offset=max(segment_swap.state.cleaned_end_offset, log.start_offset),
        rules=rules,
        segment_bytes=log.settings.segment_bytes,
        index_interval_bytes=log.settings.index_interval_bytes,
        map_bytes_max=map_bytes_max,
    )
    return CompactionRun(disk, log, Compaction(disk, order))


class CompactionRun:
    """See the module. One run of a log at a time."""

    def __init__(self, disk: Disk, log: Log, compaction: Compaction) -> None:
        self.end: End | None = None
        self.error: BaseException | None = None
        self.bytes_read = 0
        self.bytes_written = 0
        self.swaps = 0
        self._disk = disk
        self._log = log
        self._compaction = compaction
        self._generation = log.generation
        self._stage = _Stage.WORK if log.compaction.state.swap is None else _Stage.PREPARE
        self._next = CompactionState()
        self._replacement: CleanedSegment | None = None
        self.waits_for_disk_space = False
        """A swap found no room: it is tried again, better not at once."""
        self._stop_requested = False
        self._pause_requested = False
        self._outcome = End.GIVEN_UP
        self._horizon_ms = log.compaction.state.last_horizon_ms

    @property
    def records_dropped(self) -> int:
        """Records that are not in the new segments."""
        return self._compaction.records_dropped

    def stop(self) -> None:
        """End at the next occasion, because the log is about to be closed or removed.

        A swap that finds no room is left to the next opening. Until then readers see the new segment and the log stays
        `busy`: no housekeeping, no truncation and no other run comes in between.
        """
        self._stop_requested = True

    def rest(self) -> None:
        """End at the next occasion, but only after a swap that has begun: the log lives on."""
        self._pause_requested = True

    # On the loop

    def advance(self) -> Callable[[], object] | None:
        """The next piece of work. None: nothing can be done just now (or the run has ended: see `end`)."""
        log, segment_swap = self._log, self._log.compaction
        stage = self._stage
        is_over = self._stop_requested or log.closed or log.failure is not None
        given_up = is_over or self._pause_requested or log.generation != self._generation
        if stage is _Stage.SWAP and is_over:
            self.end = End.GIVEN_UP
            return None
        if stage in (_Stage.PREPARE, _Stage.WORK, _Stage.OFFERED) and given_up:
            self._stage = stage = _Stage.ABANDON
        if stage is _Stage.ABANDON:
            return self._compaction.abandon
        if stage is _Stage.WORK:
            self._compaction.start_offset = log.start_offset
            return self._compaction.step
        if stage is _Stage.PREPARE:
            return self._write(segment_swap.state._replace(swap=None))
        if stage is _Stage.OFFERED:
            return self._begin_swap()
        replacement = self._replacement
        assert replacement is not None
        if stage is _Stage.SWAP:  # again, after there was no room for it
            return lambda: swap_files(self._disk, log.directory, replacement.swap)
        raise AssertionError(stage)

    def finish(self, result: object, error: BaseException | None) -> Callable[[], object] | None:
        """What came of it. Gives the next piece of work where nothing may come between, otherwise None."""
        if error is None:
            return self._succeeded(result)
        return self._failed(error)

    def _begin_swap(self) -> Callable[[], object] | None:
        log, segment_swap, replacement = self._log, self._log.compaction, self._replacement
        assert replacement is not None
        if not segment_swap.holds(replacement.old):  # trimmed meanwhile
            self._stage = _Stage.ABANDON
            return self._compaction.abandon
        if log.maintenance_running:
            return None
        try:
            segment_swap.pin(replacement)
        except StorageError as failed:
            return self._give_up(failed)
        state = segment_swap.state
        self._horizon_ms = max(self._horizon_ms, replacement.horizon_ms)
        self._stage = _Stage.INTENT
        return self._write(
            state._replace(
                sparse_end_offset=max(state.sparse_end_offset, replacement.sparse_end_offset),
                last_horizon_ms=self._horizon_ms,
                swap=replacement.swap,
            )
        )

    def _write(self, state: CompactionState) -> Callable[[], object]:
        self._log.compaction.busy = True
        self._next = state
        return lambda: write_state(self._disk, self._log.directory, state)

    def _succeeded(self, result: Any) -> Callable[[], object] | None:
        log, segment_swap = self._log, self._log.compaction
        stage = self._stage
        self.waits_for_disk_space = False
        if stage is _Stage.WORK:
            return self._step_finished(result)
        if stage is _Stage.ABANDON:
            self.end = self._outcome
            return None
        if stage is _Stage.SWAP:
            self.swaps += 1
            assert self._replacement is not None
            segment_swap.release(self._replacement.swap.base_offset)
            self._replacement = None
            self._stage = _Stage.NOTE
            return self._write(segment_swap.state._replace(swap=None))
        segment_swap.state = self._next
        if stage is _Stage.INTENT:
            assert self._replacement is not None
            swap = self._replacement.swap
            self._compaction.taken()
            if not log.closed:
                segment_swap.show(self._replacement)
            self._stage = _Stage.SWAP
            return lambda: swap_files(self._disk, log.directory, swap)
        log.resume_after_compaction()
        if stage is _Stage.LAST_NOTE:
            self.end = End.DONE
            return None
        self._stage = _Stage.WORK
        return None

    def _step_finished(self, result: Any) -> Callable[[], object] | None:
        if isinstance(result, Progress):
            self.bytes_read += result.bytes_read
            self.bytes_written += result.bytes_written
            return None
        if isinstance(result, CleanedSegment):
            self._replacement = result
            self._stage = _Stage.OFFERED
            return None
        assert isinstance(result, Finished)
        log, segment_swap = self._log, self._log.compaction
        if log.generation != self._generation or log.closed or log.failure is not None:
            self.end = End.GIVEN_UP
            return None
        self._stage = _Stage.LAST_NOTE
        return self._write(
            segment_swap.state._replace(
                cleaned_end_offset=max(result.cleaned_end_offset, segment_swap.state.cleaned_end_offset),
                last_horizon_ms=result.last_horizon_ms,
            )
        )

    def _failed(self, error: BaseException) -> Callable[[], object] | None:
        log, segment_swap, stage = self._log, self._log.compaction, self._stage
        no_room = passes(error)
        if stage is _Stage.ABANDON:  # recovery removes the file
            self.end = self._outcome
            return None
        if isinstance(error, DirectoryNotSynced) or (stage is _Stage.SWAP and not no_room):
            log.fail(error, f"cannot compact {log.directory}")
            log.resume_after_compaction()
            self.error = error
            self.end = End.FAILED
            return None
        if stage is _Stage.SWAP:
            self.waits_for_disk_space = True
            return None  # there is no way back: `advance` tries again
        if stage is not _Stage.WORK:  # a note was not written: the one on disk is older, and still true
            log.resume_after_compaction()
        if no_room:
            self._outcome = End.NO_ROOM
        elif not log.closed and not segment_swap.trimmed(self._compaction.order.segments):
            self.error = error
            self._outcome = End.FAILED
        self._stage = _Stage.ABANDON
        return self._compaction.abandon

    def _give_up(self, error: BaseException) -> Callable[[], object]:
        if passes(error):
            self._outcome = End.NO_ROOM
        else:
            self.error, self._outcome = error, End.FAILED
        self._stage = _Stage.ABANDON
        return self._compaction.abandon
