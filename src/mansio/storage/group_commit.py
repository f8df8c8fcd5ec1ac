"""Group commit for all logs of a data directory: one sync covers every flush request that arrived before it started.

One job at a time runs on the background thread. All requests that arrive while it runs share the next job; a request
that arrives while no job runs starts one immediately. So an idle broker adds no latency, and a busy one needs few syncs
(docs/adr/0003-syncing-many-partitions.md).

Logs of replicas that copy what they lack are flushed by jobs of their own, because no producer waits for them: a job of
other logs neither writes their bytes nor becomes a syncfs because of them.

Invariants:
* The durable end offset of a log increases only after a sync that started later than the append.
* A failed sync is never retried, because the kernel may have dropped the pages that could not be written: every log in
  that sync has failed. Jobs that stopped on a full disk before any data could be lost (`LogDiskFull`) are repeated at
  the next maintenance interval.
* An exception of one log's listener does not prevent the other logs of a job from being finished.
"""

from __future__ import annotations

import logging
from contextlib import contextmanager
from functools import partial
from itertools import chain, islice
from typing import TYPE_CHECKING, NamedTuple

from mansio.errors import StorageError
from mansio.logs import fields
from mansio.storage.flush_state import FlushJob, LogDiskFull, MaintenanceJob, run_maintenance
from mansio.storage.recovery.batch_sync import SYNC_ALL_FILES_MIN
from mansio.tracebacks import without_traceback

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from mansio.ports import Background, Clock, Disk, Timer, Timers
    from mansio.storage.log import Log

LOG_FLUSH_INTERVAL_MS = 100
LOG_FLUSH_OFFSET_CHECKPOINT_INTERVAL_MS = 1000
MAINTENANCE_BATCH_LOGS_MAX = 256
"""Maximum number of logs per background job of maintenance; a sync that is requested meanwhile waits for that job."""
CHECKPOINT_LAG_BYTES_MAX = 64 << 20
"""Number of bytes above the checkpoint of a log from which on its maintenance starts immediately; recovery reads these
bytes and writes them again."""
SYNCS_BEFORE_MAINTENANCE_MAX = 16
"""Maximum number of syncs that are started before maintenance that is due; otherwise a busy broker would do none."""

logger = logging.getLogger(__name__)


SYNCS_BEFORE_COPIES_MAX = 4
"""Maximum number of syncs that are started before that of logs of replicas that copy what they lack."""


class JobOutcome(NamedTuple):
    """Result of the flush or maintenance job `work` of one log; `error` is None if it succeeded."""

    log: Log
    work: FlushJob | MaintenanceJob
    error: BaseException | None


class GroupCommit:
    """Group commit and maintenance of all logs of a data directory. All methods run on the event loop.

    `root` is the data directory. `log_flush_interval_ms`: maximum delay of a flush request that is not urgent.
    `log_flush_offset_checkpoint_interval_ms`: maximum age of a checkpoint while its log grows. Both need a `scheduler`;
    without one every flush request is urgent and checkpoints are written after each sync. From `sync_all_files_min`
    files on a job uses one `syncfs` for all. `observe_sync_s` is called on the background thread with the duration of
    each sync in seconds, measured by `clock`. `sync_count` counts the flush jobs, `file_system_sync_count` those that
    used `syncfs`.
    """

    def __init__(
        self,
        disk: Disk,
        background: Background,
        root: str,
        *,
        scheduler: Timers | None = None,
        log_flush_interval_ms: int = LOG_FLUSH_INTERVAL_MS,
        log_flush_offset_checkpoint_interval_ms: int = LOG_FLUSH_OFFSET_CHECKPOINT_INTERVAL_MS,
        sync_all_files_min: int = SYNC_ALL_FILES_MIN,
        clock: Clock | None = None,
        observe_sync_s: Callable[[float], None] | None = None,
    ) -> None:
        self._disk = disk
        self._clock = clock
        self._observe_sync_s = observe_sync_s
        self._background = background
        self._root = root
        self._scheduler = scheduler
        self._log_flush_interval_ms = log_flush_interval_ms
        self._log_flush_offset_checkpoint_interval_ms = log_flush_offset_checkpoint_interval_ms
        self._sync_all_files_min = sync_all_files_min
        self._dirty_logs: dict[Log, None] = {}
        # Of replicas that copy what they lack; they may be in `_dirty_logs`, too.
        self._copied_logs: dict[Log, None] = {}
        self._delayed_logs: dict[Log, None] = {}
        self._logs_with_followers: dict[Log, None] = {}  # all of them are in `_delayed_logs`, too, or were
        self._maintenance_later: dict[Log, None] = {}  # due at the next maintenance interval
        self._maintenance_now: dict[Log, None] = {}  # due now
        self._disk_full_logs: dict[Log, None] = {}
        self._start_offset_waits: dict[Log, list[tuple[int, Callable[[StorageError | None], None]]]] = {}
        self._after_job: list[Callable[[], None]] = []
        self._is_job_running = False
        self._is_job_held = False
        """Whether no job runs although `_is_job_running` is set: the next one starts when a block of `one_job` ends."""
        self._flush_timer: Timer | None = None
        self._maintenance_timer: Timer | None = None
        self._syncs_before_maintenance = self._syncs_before_copies = 0
        self._is_sync_all_reliable = True
        self.sync_count = 0
        self.file_system_sync_count = 0

    def register(self, log: Log) -> None:
        """Start to perform the maintenance of `log`."""
        log.on_maintenance_due(lambda: self._schedule_maintenance(log))
        if log.needs_maintenance:
            self._schedule_maintenance(log)

    def unregister(self, log: Log) -> None:
        """Start no further job for `log`, which is about to be closed. A job that is running still ends normally."""
        log.on_maintenance_due(None)
        for waiting in (
            self._dirty_logs,
            self._copied_logs,
            self._delayed_logs,
            self._logs_with_followers,
            self._maintenance_later,
            self._maintenance_now,
            self._disk_full_logs,
        ):
            waiting.pop(log, None)
        for _, done in self._start_offset_waits.pop(log, ()):
            done(StorageError(f"{log.directory} was closed"))

    def persist_start_offset(self, log: Log, done: Callable[[StorageError | None], None]) -> None:
        """Write the log's current start offset to disk, then call `done(None)`: deleted records stay deleted then.

        `done(error)` is called if the write failed; after a full disk the write is retried, without another call.
        """
        self._start_offset_waits.setdefault(log, []).append((log.start_offset, done))
        self._maintenance_now[log] = None
        if not self._is_job_running:
            self._start_next_job()

    def request_flush(self, log: Log, *, urgent: bool = True, with_followers: bool = False) -> None:
        """Make all records that are in the log now durable: by the next job (`urgent`), or within
        `log_flush_interval_ms`.

        `with_followers`: followers have to store the records, too, before a producer gets its response. An urgent sync
        then starts when the records are sent to followers (`sync_with_followers`), at the latest after
        `log_flush_interval_ms`. An earlier sync would not complete any request earlier."""
        if with_followers and urgent:
            if log in self._dirty_logs:
                return
            self._logs_with_followers[log] = None
            urgent = False
        if urgent or self._scheduler is None:
            self._dirty_logs[log] = None
            self._delayed_logs.pop(log, None)
            if not self._is_job_running:
                self._start_next_job()
        elif log not in self._dirty_logs:
            self._delayed_logs[log] = None
            if self._flush_timer is None:
                self._flush_timer = self._scheduler.call_later(
                    self._log_flush_interval_ms, self._on_flush_interval
                )

    def request_flush_of_all(self, logs: Iterable[Log], *, are_copied: bool = False) -> None:
        """Request an urgent flush of several logs in one job; with single requests the first log would get its own.
        `are_copied`: the logs are of replicas that copy what they lack. Their job comes when no other log is to be
        flushed, at the latest after `SYNCS_BEFORE_COPIES_MAX` syncs."""
        waiting = self._copied_logs if are_copied else self._dirty_logs
        for log in logs:
            waiting[log] = None
            self._delayed_logs.pop(log, None)
        if waiting and not self._is_job_running:
            self._start_next_job()

    @contextmanager
    def one_job(self) -> Iterator[None]:
        """Start one job for all flushes that the block requests, when it ends; otherwise the first one would get a job
        of its own. The block must not await."""
        was_running, self._is_job_running = self._is_job_running, True
        was_held, self._is_job_held = self._is_job_held, self._is_job_held or not was_running
        try:
            yield
        finally:
            self._is_job_running, self._is_job_held = was_running, was_held
            if (self._dirty_logs or self._copied_logs) and not was_running:
                self._start_next_job()
            if self._after_job and not self._is_job_running:
                self._call_after_job()

    def sync_with_followers(self) -> None:
        """Start the sync of all logs that wait for it: their records were sent to followers."""
        if self._logs_with_followers:
            logs, self._logs_with_followers = self._logs_with_followers, {}
            self.request_flush_of_all(logs)

    def call_after_job(self, callback: Callable[[], None]) -> bool:
        """Call `callback` once, after the job that runs or starts now; all logs with something to flush are flushed now
        or by the next job. Returns False if there is nothing to flush, so that no job starts."""
        self._dirty_logs.update(self._copied_logs)
        self._copied_logs.clear()
        self._flush_delayed_logs()
        if not self._is_job_running or (self._is_job_held and not self._dirty_logs):
            return False
        self._after_job.append(callback)
        return True

    def _call_after_job(self) -> None:
        """Call what waits for a job, in the next iteration of the event loop: until then the job refers to its files,
        so that their descriptors are not free."""
        callbacks, self._after_job = self._after_job, []
        if self._scheduler is None:
            self._call_all(callbacks)
        else:
            self._scheduler.call_later(0, self._call_all, callbacks)

    def _call_all(self, callbacks: Iterable[Callable[[], None]]) -> None:
        with self.one_job():
            for callback in callbacks:
                callback()

    @property
    def is_idle(self) -> bool:
        """Whether no job runs and no flush is requested; logs that wait for disk space are ignored."""
        return not (self._is_job_running or self._dirty_logs or self._copied_logs or self._delayed_logs)

    def close(self) -> None:
        """Cancel the timers and start the last sync. The caller closes the background worker next, then the logs."""
        for timer in (self._flush_timer, self._maintenance_timer):
            if timer is not None:
                timer.cancel()
        self._scheduler = None
        self._dirty_logs.update(self._copied_logs | self._delayed_logs | self._disk_full_logs)
        self._copied_logs.clear()
        self._delayed_logs.clear()
        self._disk_full_logs.clear()
        if not self._is_job_running:
            self._start_next_job()

    def _on_flush_interval(self) -> None:
        self._flush_timer = None
        self._flush_delayed_logs()

    def _flush_delayed_logs(self) -> None:
        for log in self._delayed_logs:
            log.exclude_from_awaited_syncs()
        self._dirty_logs.update(self._delayed_logs)
        self._delayed_logs.clear()
        if not self._is_job_running:
            self._start_next_job()

    def _start_next_job(self) -> None:
        """Submit the next job to the background thread: a sync if any log is dirty, otherwise maintenance that is due.

        Maintenance has priority when a request waits for it, or after `SYNCS_BEFORE_MAINTENANCE_MAX` syncs.
        """
        if (
            self._maintenance_now
            and (self._start_offset_waits or self._syncs_before_maintenance >= SYNCS_BEFORE_MAINTENANCE_MAX)
            and self._start_maintenance()
        ):
            return
        jobs = self._prepare_sync()
        if jobs:
            self._is_job_running = True
            self._syncs_before_maintenance += bool(self._maintenance_now)
            self._background.submit(
                lambda: self._timed_sync(jobs), lambda done, error: self._finish_sync(jobs, done, error)
            )
            return
        if self._maintenance_now or (self._scheduler is None and self._maintenance_later):
            self._start_maintenance()

    def _prepare_sync(self) -> list[tuple[Log, FlushJob]]:
        """Return the flush jobs of the next sync: of all dirty logs, or of all logs that copy what they lack."""
        first, second = self._dirty_logs, self._copied_logs
        if self._syncs_before_copies >= SYNCS_BEFORE_COPIES_MAX:
            first, second = second, first
        for logs in (first, second):
            jobs = [(log, job) for log in logs if (job := log.prepare_flush()) is not None]
            logs.clear()
            if jobs:
                self._syncs_before_copies = self._syncs_before_copies + 1 if self._copied_logs else 0
                return jobs
        return []

    def _start_maintenance(self) -> bool:
        """Submit the maintenance that is due, of at most `MAINTENANCE_BATCH_LOGS_MAX` logs, to the background thread.

        Returns False if there is none.
        """
        self._syncs_before_maintenance = 0
        jobs = []
        nothing_due = []
        if self._scheduler is None and not self._maintenance_now:
            self._maintenance_now, self._maintenance_later = self._maintenance_later, {}
        awaited = (
            [log for log in self._maintenance_now if log in self._start_offset_waits]
            if self._start_offset_waits
            else []
        )
        ordered = dict.fromkeys(chain(awaited, self._maintenance_now))
        for log in list(islice(ordered, MAINTENANCE_BATCH_LOGS_MAX)):
            del self._maintenance_now[log]
            job = log.prepare_maintenance()
            if job is not None:
                jobs.append((log, job))
            elif log in self._start_offset_waits and not (
                log.compaction.is_busy or log.repairing
            ):  # the log calls `on_maintenance_due` after the swap or repair
                nothing_due.append(log)
        if jobs:
            self._is_job_running = True
            self._background.submit(
                lambda: self._run_maintenance(jobs),
                lambda done, error: self._finish_maintenance(jobs, done, error),
            )
        for log in nothing_due:  # its start offset is on disk already, or it accepts no more writes
            self._on_start_offset_persisted(log, log.start_offset, log.failure)
        return bool(jobs)

    def _on_start_offset_persisted(self, log: Log, start_offset: int, error: StorageError | None) -> None:
        """Call the listeners that wait until `start_offset` or a lower one is on disk; `error`: the write failed."""
        waits = self._start_offset_waits.pop(log, [])
        later = [wait for wait in waits if error is None and wait[0] > start_offset]
        if later:
            self._start_offset_waits[log] = later
        for wanted, done in waits:
            if error is not None or wanted <= start_offset:
                done(error)

    # On the thread

    def _timed_sync(self, jobs: Sequence[tuple[Log, FlushJob]]) -> list[JobOutcome]:
        """Run `_sync` and report its duration in seconds."""
        if self._clock is None or self._observe_sync_s is None:
            return self._sync(jobs)
        began = self._clock.monotonic()
        outcomes = self._sync(jobs)
        self._observe_sync_s(self._clock.monotonic() - began)
        return outcomes

    def _sync(self, jobs: Sequence[tuple[Log, FlushJob]]) -> list[JobOutcome]:
        shared = self._should_sync_all(sum(job.file_count for _, job in jobs))
        outcomes = []
        ready = []
        for log, job in jobs:
            try:
                job.write_epochs(self._disk, durable=not shared)
            except (OSError, LogDiskFull) as error:
                outcomes.append(JobOutcome(log, job, without_traceback(error)))
            else:
                ready.append((log, job))
        if shared and ready:
            try:
                synced = self._sync_all()
            except OSError as error:  # syncfs does not report the file: all logs have failed
                return outcomes + [JobOutcome(log, job, without_traceback(error)) for log, job in ready]
            if synced:
                self.file_system_sync_count += 1
                return outcomes + [JobOutcome(log, job, None) for log, job in ready]
        for log, job in ready:
            failed: BaseException | None = None
            try:
                if shared:  # the platform has no syncfs
                    job.write_epochs(self._disk, durable=True)
                job.sync(self._disk)
            except (OSError, LogDiskFull) as error:
                failed = without_traceback(error)
            outcomes.append(JobOutcome(log, job, failed))
        return outcomes

    def _run_maintenance(self, jobs: Sequence[tuple[Log, MaintenanceJob]]) -> list[JobOutcome]:
        sync_all = self._sync_all if self._should_sync_all(len(jobs)) else None
        failed = run_maintenance(self._disk, [job for _, job in jobs], sync_all)
        return [JobOutcome(log, job, error) for (log, job), error in zip(jobs, failed, strict=True)]

    def _should_sync_all(self, files: int) -> bool:
        return self._is_sync_all_reliable and files >= self._sync_all_files_min

    def _sync_all(self) -> bool:
        """Sync the file system. Returns False if the platform has no syncfs. Raises `OSError`.

        The kernel reports an error once, whichever file it concerns. After an error syncfs is therefore not used any
        more: syncing each file shows which files lost bytes.
        """
        try:
            return self._disk.sync_all(self._root)
        except OSError:
            self._is_sync_all_reliable = False
            raise

    # Back on the loop

    def _finish_sync(
        self,
        jobs: Sequence[tuple[Log, FlushJob]],
        outcomes: Sequence[JobOutcome] | None,
        error: BaseException | None,
    ) -> None:
        self.sync_count += 1
        self._finish_jobs(
            outcomes
            if outcomes is not None
            else [JobOutcome(log, job, without_traceback(error)) for log, job in jobs]
        )

    def _finish_maintenance(
        self,
        jobs: Sequence[tuple[Log, MaintenanceJob]],
        outcomes: Sequence[JobOutcome] | None,
        error: BaseException | None,
    ) -> None:
        self._finish_jobs(
            outcomes
            if outcomes is not None
            else [JobOutcome(log, job, without_traceback(error)) for log, job in jobs]
        )

    def _finish_jobs(self, outcomes: Sequence[JobOutcome]) -> None:
        """Report each result to its log, then start the next job. An exception of a listener is raised at the end.

        `_is_job_running` stays set while listeners are called, so a log's job is finished before the next is prepared.
        """
        defect: Exception | None = None
        syncs = False
        for log, work, failed in outcomes:
            try:
                if isinstance(work, FlushJob):
                    syncs = True
                    log.finish_flush(work, failed)
                else:
                    log.finish_maintenance(work, failed)
            except Exception as error:  # whatever a listener raises; raised again below
                if defect is not None:
                    logger.error("log_listener_failed", exc_info=error, extra=fields(directory=log.directory))
                defect = defect or error
            if isinstance(work, MaintenanceJob) and log in self._start_offset_waits:
                refused = None if failed is None else log.failure or StorageError(str(failed))
                self._on_start_offset_persisted(log, work.checkpoint.start_offset, refused)
            if log.is_maintained:
                disk_full = isinstance(failed, LogDiskFull)
                self._plan_maintenance(log, disk_full=disk_full, synced=isinstance(work, FlushJob))
        self._is_job_running = False
        if (
            self._dirty_logs
            or self._copied_logs
            or self._maintenance_now
            or (syncs and self._scheduler is None)
        ):
            self._start_next_job()
        if self._after_job:
            self._call_after_job()
        if defect is not None:
            try:
                raise defect  # with its traceback
            finally:
                del defect

    def _plan_maintenance(self, log: Log, *, disk_full: bool, synced: bool) -> None:
        """Schedule the maintenance of a log after a job, or a retry of a job that stopped on a full disk."""
        if disk_full:
            if synced:
                self._disk_full_logs[log] = None
            self._schedule_maintenance(log)
        elif synced:
            if log.checkpoint_lag_bytes >= CHECKPOINT_LAG_BYTES_MAX:
                self._maintenance_later.pop(log, None)
                self._maintenance_now[log] = None
            elif (
                log not in self._maintenance_later and log.needs_maintenance
            ):  # usually the first condition is false
                self._schedule_maintenance(log)

    def _schedule_maintenance(self, log: Log) -> None:
        self._maintenance_later[log] = None
        if self._scheduler is not None and self._maintenance_timer is None:
            self._maintenance_timer = self._scheduler.call_later(
                self._log_flush_offset_checkpoint_interval_ms, self._on_maintenance_interval
            )
        elif self._scheduler is None and not self._is_job_running:
            self._start_next_job()

    def _on_maintenance_interval(self) -> None:
        self._maintenance_timer = None
        self._maintenance_now.update(self._maintenance_later)
        self._maintenance_later.clear()
        self._dirty_logs.update(self._disk_full_logs)
        self._disk_full_logs.clear()
        if not self._is_job_running:
            self._start_next_job()


def flush_on_shutdown(disk: Disk, root: str, logs: Sequence[Log]) -> None:
    """Write the checkpoints and indexes of all logs before they are closed, with one sync for all. Blocks.

    All records must be durable, and no job may run. `root`: see `open_logs`. A log whose files cannot be written has
    failed (`Log.failure`); its records are durable nevertheless, but its next recovery takes longer.
    """
    due = [(log, job) for log in logs if (job := log.prepare_maintenance(closing=True)) is not None]
    sync_all = partial(disk.sync_all, root) if len(due) >= SYNC_ALL_FILES_MIN else None
    errors = run_maintenance(disk, [job for _, job in due], sync_all)
    for (log, job), error in zip(due, errors, strict=True):
        log.finish_maintenance(job, error)
