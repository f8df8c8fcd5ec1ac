"""State machine of one compaction run: `CompactionRun` selects the next job and handles its result.

The caller runs on the event loop. It gets the next job from `next_job`, runs it on another thread, and passes the
result to `finish_job`, at a rate that it chooses. Meanwhile the log is in use: if it is trimmed, closed or fails, the
run ends without any effect.

Stages of a segment swap: the new file is written; the intent to swap is recorded in the compaction state on disk;
readers see the new segment; the files are swapped; the end of the swap is recorded on disk. The swap can be abandoned
until the intent is on disk; after that it has to be completed, by recovery if necessary.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import TYPE_CHECKING, Any

from mansio.errors import StorageError
from mansio.ports import TRANSIENT_ERRNOS
from mansio.storage.active_files import ActiveFilesInUse
from mansio.storage.cleaner.batch_filter import INT64_MAX, CompactionRules, matches_no_batch
from mansio.storage.cleaner.compaction import (
    CleanedSegment,
    Compaction,
    CompactionFinished,
    CompactionProgress,
    CompactionTask,
    plan_compaction,
)
from mansio.storage.compaction_state import (
    CompactionState,
    DirectoryNotSynced,
    swap_files,
    write_state,
)
from mansio.tracebacks import without_traceback

if TYPE_CHECKING:
    from collections.abc import Callable

    from mansio.ports import Disk
    from mansio.storage.cleaner.compaction import CompactionPlan, CompactionSettings
    from mansio.storage.log import Log
    from mansio.wire.batch.record_batch import BatchHeader


"""Errors that mean a lack of disk space or of descriptors, which may be temporary: the log does not fail."""


def is_transient(error: BaseException) -> bool:
    """Whether `error`, or its cause, is one of `TRANSIENT_ERRNOS`, a lack of disk space or of descriptors, or the error
    of a roll that has to wait for a flush."""
    if isinstance(error, ActiveFilesInUse):
        return True
    cause = error if isinstance(error, OSError) else error.__cause__
    return isinstance(cause, OSError) and cause.errno in TRANSIENT_ERRNOS


class CompactionOutcome(Enum):
    """Outcome of a compaction run.

    `DONE`: complete. `ABANDONED`: stopped early. `DISK_FULL`: stopped by a lack of disk space or of descriptors; it can
    be retried, as can an abandoned run. `FAILED`: `CompactionRun.error` is the reason.
    """

    DONE = auto()
    ABANDONED = auto()
    DISK_FULL = auto()
    FAILED = auto()


class _Stage(Enum):
    """What a compaction run does now or next. `SEGMENT_WRITTEN`: a compacted file is complete, its swap can begin."""

    CLEAR_EARLIER_SWAP = auto()
    COMPACT = auto()
    SEGMENT_WRITTEN = auto()
    WRITE_PENDING_SWAP = auto()
    SWAP = auto()
    CLEAR_PENDING_SWAP = auto()
    WRITE_FINAL_STATE = auto()
    ABANDON = auto()


def plan_log_compaction(
    log: Log, settings: CompactionSettings, *, limit_offset: int, now_ms: int
) -> CompactionPlan:
    """Plan the compaction of a log; segments that end above `limit_offset` are excluded.

    The caller sets `limit_offset` to the first uncommitted offset, or that of an open transaction. Raises
    `StorageError` if a segment's timestamps cannot be read.
    """
    segment_swap = log.compaction
    segments = log.segments()
    limit_offset = min(limit_offset, log.durable_end_offset)
    if len(segments) > 1 and segment_swap.replaceable_end_offset < min(
        limit_offset, segments[-1].base_offset
    ):
        log.request_checkpoint()
    return plan_compaction(
        segments,
        segment_swap.state,
        settings,
        limit_offset=min(limit_offset, segment_swap.replaceable_end_offset),
        oldest_dirty_ms=segment_swap.first_dirty_timestamp(),
        now_ms=now_ms,
    )


def begin_compaction(
    disk: Disk,
    log: Log,
    plan: CompactionPlan,
    settings: CompactionSettings,
    *,
    now_ms: int,
    map_bytes_max: int,
    tombstone_floor: int = INT64_MAX,
    is_last_of_producer: Callable[[BatchHeader], bool] | None = None,
    is_aborted: Callable[[BatchHeader], bool] | None = None,
    is_obsolete_marker: Callable[[BatchHeader], bool] | None = None,
) -> CompactionRun:
    """Start a planned compaction. `map_bytes_max` is the maximum size of the offset map; the other parameters are
    those of `CompactionRules`. The predicates are called on another thread.
    """
    segment_swap = log.compaction
    rules = CompactionRules(
        now_ms=now_ms,
        delete_retention_ms=settings.delete_retention_ms,
        delete_horizon_end_offset=segment_swap.state.sparse_end_offset,
        map_end_offset=0,
        tombstone_floor=tombstone_floor,
        is_aborted=is_aborted or matches_no_batch,
        is_obsolete_marker=is_obsolete_marker or matches_no_batch,
        is_last_of_producer=is_last_of_producer or matches_no_batch,
    )
    task = CompactionTask(
        directory=log.directory,
        segments=segment_swap.first_segments(plan.segment_count),
        segment_infos=tuple(log.segments()[: plan.segment_count]),
        first_dirty_index=plan.first_dirty_index,
        first_dirty_offset=max(segment_swap.state.cleaned_end_offset, log.start_offset),
        rules=rules,
        segment_bytes=log.settings.segment_bytes,
        index_interval_bytes=log.settings.index_interval_bytes,
        map_bytes_max=map_bytes_max,
    )
    return CompactionRun(disk, log, Compaction(disk, task))


class CompactionRun:
    """One compaction run of a log; only one runs per log at a time. `outcome` is None until it has ended.

    `swaps` is the number of segment swaps, `error` the reason of `CompactionOutcome.FAILED`.
    """

    def __init__(self, disk: Disk, log: Log, compaction: Compaction) -> None:
        self.outcome: CompactionOutcome | None = None
        self.error: BaseException | None = None
        self.bytes_read = 0
        self.bytes_written = 0
        self.swaps = 0
        self._disk = disk
        self._log = log
        self._compaction = compaction
        self._generation = log.generation
        self._stage = _Stage.COMPACT if log.compaction.state.swap is None else _Stage.CLEAR_EARLIER_SWAP
        self._next_state = CompactionState()
        self._replacement: CleanedSegment | None = None
        self.waits_for_disk_space = False
        """Whether a swap stopped on a full disk; the caller calls `next_job` again, preferably after a delay."""
        self._stop_requested = False
        self._pause_requested = False
        self._outcome_if_abandoned = CompactionOutcome.ABANDONED
        self._delete_horizon_ms = log.compaction.state.last_delete_horizon_ms

    @property
    def records_dropped(self) -> int:
        """Number of records that are not in the new segments."""
        return self._compaction.records_dropped

    def stop(self) -> None:
        """End as soon as possible, because the log is about to be closed or removed.

        If a swap stopped on a full disk, the next recovery completes it. Until then readers see the new segment, and
        `SegmentSwap.is_busy` stays set: no maintenance, truncation or other run can start.
        """
        self._stop_requested = True

    def pause(self) -> None:
        """End as soon as possible, after the current swap if one has started. The log stays open."""
        self._pause_requested = True

    # On the loop

    def next_job(self) -> Callable[[], object] | None:
        """Return the next job, to be called on another thread; None if the run has to wait or has ended."""
        log, segment_swap = self._log, self._log.compaction
        stage = self._stage
        is_over = self._stop_requested or log.closed or log.failure is not None
        abandoned = is_over or self._pause_requested or log.generation != self._generation
        if stage is _Stage.SWAP and is_over:
            self.outcome = CompactionOutcome.ABANDONED
            return None
        if stage in (_Stage.CLEAR_EARLIER_SWAP, _Stage.COMPACT, _Stage.SEGMENT_WRITTEN) and abandoned:
            self._stage = stage = _Stage.ABANDON
        if stage is _Stage.ABANDON:
            return self._compaction.abandon
        if log.repairing:
            return None
        if stage is _Stage.COMPACT:
            self._compaction.start_offset = log.start_offset
            return self._compaction.run_slice
        if stage is _Stage.CLEAR_EARLIER_SWAP:
            return self._write_state(segment_swap.state._replace(swap=None))
        if stage is _Stage.SEGMENT_WRITTEN:
            return self._prepare_swap()
        replacement = self._replacement
        assert replacement is not None
        if stage is _Stage.SWAP:  # again, after the disk was full
            return lambda: swap_files(self._disk, log.directory, replacement.swap)
        raise AssertionError(stage)

    def finish_job(self, result: object, error: BaseException | None) -> Callable[[], object] | None:
        """Handle the result, or the error, of a job.

        Returns the next job if it must be run immediately, otherwise None.
        """
        if error is None:
            return self._handle_result(result)
        return self._handle_error(error)

    def _prepare_swap(self) -> Callable[[], object] | None:
        log, segment_swap, replacement = self._log, self._log.compaction, self._replacement
        assert replacement is not None
        if not segment_swap.contains(replacement.old_segments):  # trimmed meanwhile
            self._stage = _Stage.ABANDON
            return self._compaction.abandon
        if log.maintenance_running:
            return None
        try:
            segment_swap.open_old_files(replacement)
        except StorageError as failed:
            return self._abandon(failed)
        state = segment_swap.state
        self._delete_horizon_ms = max(self._delete_horizon_ms, replacement.delete_horizon_ms)
        self._stage = _Stage.WRITE_PENDING_SWAP
        return self._write_state(
            state._replace(
                sparse_end_offset=max(state.sparse_end_offset, replacement.sparse_end_offset),
                last_delete_horizon_ms=self._delete_horizon_ms,
                swap=replacement.swap,
            )
        )

    def _write_state(self, state: CompactionState) -> Callable[[], object]:
        self._log.compaction.is_busy = True
        self._next_state = state
        return lambda: write_state(self._disk, self._log.directory, state)

    def _handle_result(self, result: Any) -> Callable[[], object] | None:
        log, segment_swap = self._log, self._log.compaction
        stage = self._stage
        self.waits_for_disk_space = False
        if stage is _Stage.COMPACT:
            return self._handle_slice_result(result)
        if stage is _Stage.ABANDON:
            self.outcome = self._outcome_if_abandoned
            return None
        if stage is _Stage.SWAP:
            self.swaps += 1
            assert self._replacement is not None
            segment_swap.release_file(self._replacement.swap.base_offset)
            self._replacement = None
            self._stage = _Stage.CLEAR_PENDING_SWAP
            return self._write_state(segment_swap.state._replace(swap=None))
        segment_swap.state = self._next_state
        if stage is _Stage.WRITE_PENDING_SWAP:
            assert self._replacement is not None
            swap = self._replacement.swap
            self._compaction.release_file()
            if not log.closed:
                segment_swap.publish(self._replacement)
            self._stage = _Stage.SWAP
            return lambda: swap_files(self._disk, log.directory, swap)
        log.resume_after_compaction()
        if stage is _Stage.WRITE_FINAL_STATE:
            self.outcome = CompactionOutcome.DONE
            return None
        self._stage = _Stage.COMPACT
        return None

    def _handle_slice_result(self, result: Any) -> Callable[[], object] | None:
        if isinstance(result, CompactionProgress):
            self.bytes_read += result.bytes_read
            self.bytes_written += result.bytes_written
            return None
        if isinstance(result, CleanedSegment):
            self._replacement = result
            self._stage = _Stage.SEGMENT_WRITTEN
            return None
        assert isinstance(result, CompactionFinished)
        log, segment_swap = self._log, self._log.compaction
        if log.generation != self._generation or log.closed or log.failure is not None:
            self.outcome = CompactionOutcome.ABANDONED
            return None
        self._stage = _Stage.WRITE_FINAL_STATE
        return self._write_state(
            segment_swap.state._replace(
                cleaned_end_offset=max(result.cleaned_end_offset, segment_swap.state.cleaned_end_offset),
                last_delete_horizon_ms=result.last_delete_horizon_ms,
            )
        )

    def _handle_error(self, error: BaseException) -> Callable[[], object] | None:
        log, segment_swap, stage = self._log, self._log.compaction, self._stage
        transient = is_transient(error)
        if stage is _Stage.ABANDON:  # recovery removes the file
            self.outcome = self._outcome_if_abandoned
            return None
        if isinstance(error, DirectoryNotSynced) or (stage is _Stage.SWAP and not transient):
            log.fail(error, f"cannot compact {log.directory}")
            log.resume_after_compaction()
            self.error = without_traceback(error)
            self.outcome = CompactionOutcome.FAILED
            return None
        if stage is _Stage.SWAP:
            self.waits_for_disk_space = True
            return None  # the swap must be completed: `next_job` tries again
        if (
            stage is not _Stage.COMPACT
        ):  # the state was not written: the one on disk is older, and still valid
            log.resume_after_compaction()
        if transient:
            self._outcome_if_abandoned = CompactionOutcome.DISK_FULL
        elif not log.closed and not segment_swap.is_any_trimmed(self._compaction.task.segments):
            self.error = without_traceback(error)
            self._outcome_if_abandoned = CompactionOutcome.FAILED
        self._stage = _Stage.ABANDON
        return self._compaction.abandon

    def _abandon(self, error: BaseException) -> Callable[[], object]:
        if is_transient(error):
            self._outcome_if_abandoned = CompactionOutcome.DISK_FULL
        else:
            self.error, self._outcome_if_abandoned = without_traceback(error), CompactionOutcome.FAILED
        self._stage = _Stage.ABANDON
        return self._compaction.abandon
