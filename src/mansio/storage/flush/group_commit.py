"""Group commit for all logs of a data directory: one sync covers every request that arrived before it started.

One job at a time runs on the background thread. All requests that arrive while it runs share the next job; a request
that arrives while none runs starts one at once, so an idle broker adds no latency and a busy one needs few syncs
(docs/adr/0003-syncing-many-partitions.md).

Invariants:
* A log's durable end moves only after a sync that started later than the append.
* A failed sync is never retried, because the kernel may have dropped the pages it failed on: every log it covered has
  failed. Work that found the disk full before anything could be lost (`LogDiskFull`) is repeated at the next
  maintenance interval.
* An exception in one log's listener never keeps the other logs of a job from being finished.
"""

from __future__ import annotations

import logging
from functools import partial
from itertools import chain, islice
from typing import TYPE_CHECKING, NamedTuple

from mansio.errors import StorageError
from mansio.logs import fields
from mansio.storage.flush.flush_state import FlushJob, LogDiskFull, MaintenanceJob, run_maintenance
from mansio.storage.recovery.batch_sync import SYNC_ALL_FILES_MIN

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from mansio.ports import Background, Clock, Disk, Scheduler, Timer
    from mansio.storage.log import Log

LOG_FLUSH_INTERVAL_MS = 100
LOG_FLUSH_OFFSET_CHECKPOINT_INTERVAL_MS = 1000
MAINTENANCE_BATCH_LOGS_MAX = 256  # logs of one maintenance job: a sync requested meanwhile waits for that job
CHECKPOINT_LAG_BYTES_MAX = 64 << 20
"""Maintenance starts at once when this much of a log lies above its checkpoint: recovery would have to read all of it,
and write it again."""
SYNCS_BEFORE_MAINTENANCE_MAX = 16
"""Number of syncs that may precede maintenance that is due; without a bound a busy broker would never do any."""

logger = logging.getLogger(__name__)


class JobOutcome(NamedTuple):
    """Result of the sync (or the maintenance) of one log."""

    log: Log
    work: FlushJob | MaintenanceJob
    error: BaseException | None


class GroupCommit:
    """Group commit and maintenance of all logs of a data directory. All methods run on the event loop.

    `log_flush_interval_ms`: how long a request that nothing waits for may be delayed.
    `log_flush_offset_checkpoint_interval_ms`: how old a checkpoint may get while its log moves. Both need a
    `scheduler`; without one every request is urgent and checkpoints are written after each sync.
    `observe_sync_s` is called on the thread with the seconds each sync took by `clock`.
    """

    def __init__(
        self,
        disk: Disk,
        background: Background,
        root: str,
        *,
        scheduler: Scheduler | None = None,
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
        self._dirty: dict[Log, None] = {}
        self._delayed: dict[Log, None] = {}
        self._with_followers: dict[Log, None] = {}  # all of them are in `_delayed`, too, or were
        self._maintenance_later: dict[Log, None] = {}  # due at the next maintenance interval
        self._maintenance_now: dict[Log, None] = {}  # the interval is over
        self._retry: dict[Log, None] = {}
        self._start_offset_waits: dict[Log, list[tuple[int, Callable[[StorageError | None], None]]]] = {}
        self._running = False
        self._flush_timer: Timer | None = None
        self._maintenance_timer: Timer | None = None
        self._syncs_before_maintenance = 0
        self._sync_all_trusted = True
        self.sync_count = 0
        self.file_system_sync_count = 0

    def register(self, log: Log) -> None:
        """Perform the log's maintenance from now on."""
        log.on_maintenance_due = lambda: self._schedule_maintenance(log)
        if log.needs_maintenance:
            self._schedule_maintenance(log)

    def unregister(self, log: Log) -> None:
        """Start no new sync for this log. A running one may still end after this."""
        log.on_maintenance_due = None
        for waiting in (
            self._dirty,
            self._delayed,
            self._with_followers,
            self._maintenance_later,
            self._maintenance_now,
            self._retry,
        ):
            waiting.pop(log, None)
        for _, done in self._start_offset_waits.pop(log, ()):
            done(StorageError(f"{log.directory} was closed"))

    def persist_start_offset(self, log: Log, done: Callable[[StorageError | None], None]) -> None:
        """Write the log's current start offset to disk soon, then call `done(None)`: trimmed records stay deleted after
        a crash.

        `done(error)` when it could not be written; on a full disk it is retried nevertheless.
        """
        self._start_offset_waits.setdefault(log, []).append((log.start_offset, done))
        self._maintenance_now[log] = None
        if not self._running:
            self._start()

    def request_flush(self, log: Log, *, urgent: bool = True) -> None:
        """Make what the log holds now durable: soon (`urgent`), or within `log_flush_interval_ms`."""
        if urgent or self._scheduler is None:
            self._dirty[log] = None
            self._delayed.pop(log, None)
            if not self._running:
                self._start()
        elif log not in self._dirty:
            self._delayed[log] = None
            if self._flush_timer is None:
                self._flush_timer = self._scheduler.call_later(
                    self._log_flush_interval_ms, self._flush_interval_elapsed
                )

    def request_flush_of_all(self, logs: Iterable[Log]) -> None:
        """Request an urgent flush of several logs together. They share a sync; with single requests the first log would
        be synced separately."""
        for log in logs:
            self._dirty[log] = None
            self._delayed.pop(log, None)
        if self._dirty and not self._running:
            self._start()

    def request_flush_with_followers(self, log: Log) -> None:
        """A request waits until the log is durable here and on followers: sync it when followers are sent its records
        (`sync_with_followers`), at the latest within `log_flush_interval_ms`. An earlier sync would be one more, and no
        request would complete earlier."""
        if log not in self._dirty:
            self._with_followers[log] = None
            self.request_flush(log, urgent=False)

    def sync_with_followers(self) -> None:
        """Sync the logs of `request_flush_with_followers` now: followers were sent what they are to make durable."""
        if self._with_followers:
            logs, self._with_followers = self._with_followers, {}
            self.request_flush_of_all(logs)

    @property
    def is_idle(self) -> bool:
        """Whether nothing runs and nothing is requested, except what waits for space on the disk."""
        return not (self._running or self._dirty or self._delayed)

    def close(self) -> None:
        """Cancel the timers and start the last sync. Close the background worker next, then the logs."""
        for timer in (self._flush_timer, self._maintenance_timer):
            if timer is not None:
                timer.cancel()
        self._scheduler = None
        self._dirty.update(self._delayed | self._retry)
        self._delayed.clear()
        self._retry.clear()
        if not self._running:
            self._start()

    def _flush_interval_elapsed(self) -> None:
        self._flush_timer = None
        for log in self._delayed:
            log.exclude_from_awaited_syncs()
        self._dirty.update(self._delayed)
        self._delayed.clear()
        if not self._running:
            self._start()

    def _start(self) -> None:
        """Pass the next job to the thread: a sync if any log is dirty, else maintenance if that is due.

        Maintenance comes first when a request waits for it, or when enough syncs have preceded it.
        """
        if (
            self._maintenance_now
            and (self._start_offset_waits or self._syncs_before_maintenance >= SYNCS_BEFORE_MAINTENANCE_MAX)
            and self._start_maintenance()
        ):
            return
        jobs = []
        for log in self._dirty:
            job = log.prepare_flush()
            if job is not None:
                jobs.append((log, job))
        self._dirty.clear()
        if jobs:
            self._running = True
            self._syncs_before_maintenance += bool(self._maintenance_now)
            self._background.submit(
                lambda: self._timed_sync(jobs), lambda done, error: self._finish_sync(jobs, done, error)
            )
            return
        if self._maintenance_now or (self._scheduler is None and self._maintenance_later):
            self._start_maintenance()

    def _start_maintenance(self) -> bool:
        """Pass the maintenance that is due to the thread, of a bounded number of logs, so that syncs requested
        meanwhile do not wait long; False when there is none."""
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
            ):  # afterwards it requests again
                nothing_due.append(log)
        if jobs:
            self._running = True
            self._background.submit(
                lambda: self._run_maintenance(jobs),
                lambda done, error: self._finish_maintenance(jobs, done, error),
            )
        for log in nothing_due:  # its start is on disk already, or it accepts no more writes
            self._start_offset_persisted(log, log.start_offset, log.failure)
        return bool(jobs)

    def _start_offset_persisted(self, log: Log, start_offset: int, error: StorageError | None) -> None:
        """Call the listeners that wait for a log's start offset: it is on disk, or writing it failed."""
        waits = self._start_offset_waits.pop(log, [])
        later = [wait for wait in waits if error is None and wait[0] > start_offset]
        if later:
            self._start_offset_waits[log] = later
        for wanted, done in waits:
            if error is not None or wanted <= start_offset:
                done(error)

    # On the thread

    def _timed_sync(self, jobs: Sequence[tuple[Log, FlushJob]]) -> list[JobOutcome]:
        """Sync, and report the duration in seconds: the time of the disk, without that of the loop."""
        if self._clock is None or self._observe_sync_s is None:
            return self._sync(jobs)
        began = self._clock.monotonic()
        outcomes = self._sync(jobs)
        self._observe_sync_s(self._clock.monotonic() - began)
        return outcomes

    def _sync(self, jobs: Sequence[tuple[Log, FlushJob]]) -> list[JobOutcome]:
        shared = self._use_sync_all(sum(job.file_count for _, job in jobs))
        outcomes = []
        ready = []
        for log, job in jobs:
            try:
                job.write_epochs(self._disk, durable=not shared)
            except (OSError, LogDiskFull) as error:
                outcomes.append(JobOutcome(log, job, error))
            else:
                ready.append((log, job))
        if shared and ready:
            try:
                synced = self._sync_all()
            except OSError as error:  # it does not name the file: all of them have failed
                return outcomes + [JobOutcome(log, job, error) for log, job in ready]
            if synced:
                self.file_system_sync_count += 1
                return outcomes + [JobOutcome(log, job, None) for log, job in ready]
        for log, job in ready:
            failed: BaseException | None = None
            try:
                if shared:  # there is no syncfs after all
                    job.write_epochs(self._disk, durable=True)
                job.sync(self._disk)
            except (OSError, LogDiskFull) as error:
                failed = error
            outcomes.append(JobOutcome(log, job, failed))
        return outcomes

    def _run_maintenance(self, jobs: Sequence[tuple[Log, MaintenanceJob]]) -> list[JobOutcome]:
        sync_all = self._sync_all if self._use_sync_all(len(jobs)) else None
        failed = run_maintenance(self._disk, [job for _, job in jobs], sync_all)
        return [JobOutcome(log, job, error) for (log, job), error in zip(jobs, failed, strict=True)]

    def _use_sync_all(self, files: int) -> bool:
        return self._sync_all_trusted and files >= self._sync_all_files_min

    def _sync_all(self) -> bool:
        """Sync the file system if the platform can. An error here may concern records of any log and is reported once.

        Therefore it is the last time: from then on each file is synced by itself, which shows whether its bytes were
        lost.
        """
        try:
            return self._disk.sync_all(self._root)
        except OSError:
            self._sync_all_trusted = False
            raise

    # Back on the loop

    def _finish_sync(
        self,
        jobs: Sequence[tuple[Log, FlushJob]],
        outcomes: Sequence[JobOutcome] | None,
        error: BaseException | None,
    ) -> None:
        self.sync_count += 1
        self._finish(outcomes if outcomes is not None else [JobOutcome(log, job, error) for log, job in jobs])

    def _finish_maintenance(
        self,
        jobs: Sequence[tuple[Log, MaintenanceJob]],
        outcomes: Sequence[JobOutcome] | None,
        error: BaseException | None,
    ) -> None:
        self._finish(outcomes if outcomes is not None else [JobOutcome(log, job, error) for log, job in jobs])

    def _finish(self, outcomes: Sequence[JobOutcome]) -> None:
        """Pass every log its result, then start the next job. An exception of a listener is raised last.

        `_running` stays set while listeners are called: a log's job is finished before its next one is prepared.
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
                self._start_offset_persisted(log, work.checkpoint.start_offset, refused)
            if log.on_maintenance_due is not None:
                disk_full = isinstance(failed, LogDiskFull)
                self._plan_maintenance(log, disk_full=disk_full, synced=isinstance(work, FlushJob))
        self._running = False
        if self._dirty or self._maintenance_now or (syncs and self._scheduler is None):
            self._start()
        if defect is not None:
            raise defect

    def _plan_maintenance(self, log: Log, *, disk_full: bool, synced: bool) -> None:
        """Schedule what a log needs after a job: maintenance, or a retry when there may be space again."""
        if disk_full:
            if synced:
                self._retry[log] = None
            self._schedule_maintenance(log)
        elif synced:
            if log.checkpoint_lag_bytes >= CHECKPOINT_LAG_BYTES_MAX:
                self._maintenance_later.pop(log, None)
                self._maintenance_now[log] = None
            elif (
                log not in self._maintenance_later and log.needs_maintenance
            ):  # most often it is there already
                self._schedule_maintenance(log)

    def _schedule_maintenance(self, log: Log) -> None:
        self._maintenance_later[log] = None
        if self._scheduler is not None and self._maintenance_timer is None:
            self._maintenance_timer = self._scheduler.call_later(
                self._log_flush_offset_checkpoint_interval_ms, self._maintenance_interval_elapsed
            )
        elif self._scheduler is None and not self._running:
            self._start()

    def _maintenance_interval_elapsed(self) -> None:
        self._maintenance_timer = None
        self._maintenance_now.update(self._maintenance_later)
        self._maintenance_later.clear()
        self._dirty.update(self._retry)
        self._retry.clear()
        if not self._running:
            self._start()


def flush_on_shutdown(disk: Disk, root: str, logs: Sequence[Log]) -> None:
    """Write the checkpoints and indexes of logs that are closed next, with one sync for all, as `Log.close` does one by
    one. Blocks.

    All logs are synced, and no sync or maintenance runs. `root`: see `open_logs`. Acknowledged records do not depend on
    it: a log for which it fails has failed (`Log.failure`), and its next recovery takes longer.
    """
    due = [(log, job) for log in logs if (job := log.prepare_maintenance(closing=True)) is not None]
    sync_all = partial(disk.sync_all, root) if len(due) >= SYNC_ALL_FILES_MIN else None
    errors = run_maintenance(disk, [job for _, job in due], sync_all)
    for (log, job), error in zip(due, errors, strict=True):
        log.finish_maintenance(job, error)
