"""Who is durable up to where: group commit for all logs of a data directory.

One job at a time runs on the background thread. Everything that asks while it runs shares the next one; somebody who
asks while none runs gets one at once, so an idle broker pays no waiting and a busy one few syncs
(docs/adr/0003-syncing-many-partitions.md).

Always true: a log's durable end moves only after a sync that started later than the append; a failed sync is never
tried again, because the kernel may have dropped the pages it failed on: every log it covered has failed. Work that
found no room before anything could be lost (`LogDiskFull`) is done again at the next tidy interval. What one log's
listener does never keeps the others of a job from being finished.
"""

from __future__ import annotations

import logging
from itertools import chain, islice
from typing import TYPE_CHECKING, NamedTuple

from mansio.errors import StorageError
from mansio.logs import fields
from mansio.storage.flush.flush_jobs import FlushJob, LogDiskFull, MaintenanceJob, run_maintenance

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from mansio.ports import Background, Clock, Disk, Scheduler, Timer
    from mansio.storage.log import Log

SYNC_ALL_FILES_MIN = 4  # from so many files on one syncfs is quicker than syncing each: see the ADR
LOG_FLUSH_INTERVAL_MS = 100
LOG_FLUSH_OFFSET_CHECKPOINT_INTERVAL_MS = 1000
MAINTENANCE_BATCH_LOGS_MAX = (
    256  # logs looked after in one job: so long a sync that is asked for meanwhile waits
)
CHECKPOINT_LAG_BYTES_MAX = 64 << 20
"""Housekeeping waits no longer when so much of a log lies above its checkpoint: recovery would have to read all of it,
and write it again."""
SYNCS_BEFORE_MAINTENANCE_MAX = 16
"""Housekeeping that is due lets so many syncs go first, or a busy broker never did any."""

logger = logging.getLogger(__name__)


class Outcome(NamedTuple):
    """How the sync (or the housekeeping) of one log ended."""

    log: Log
    work: FlushJob | MaintenanceJob
    error: BaseException | None


class GroupCommit:
    """See the module. All methods belong to the loop.

    `log_flush_interval_ms`: how long a request that nobody waits for may be put off.
    `log_flush_offset_checkpoint_interval_ms`: how old a checkpoint may get while its log moves. Both need a
    `scheduler`; without one every request is urgent and checkpoints are written after each sync.
    `observe_s` is told, on the thread, how long each sync took by `clock`.
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
        observe_s: Callable[[float], None] | None = None,
    ) -> None:
        self._disk = disk
        self._clock = clock
        self._observe_s = observe_s
        self._background = background
        self._root = root
        self._scheduler = scheduler
        self._background_sync_interval_ms = log_flush_interval_ms
        self._checkpoint_interval_ms = log_flush_offset_checkpoint_interval_ms
        self._sync_all_files_min = sync_all_files_min
        self._dirty: dict[Log, None] = {}
        self._later: dict[Log, None] = {}
        self._with_followers: dict[Log, None] = {}  # all of them are in `_later`, too, or were
        self._maintenance_later: dict[Log, None] = {}  # to be looked after at the next tidy interval
        self._maintenance_now: dict[Log, None] = {}  # the interval is over
        self._put_back: dict[Log, None] = {}
        self._start_offset_waits: dict[Log, list[tuple[int, Callable[[StorageError | None], None]]]] = {}
        self._running = False
        self._later_timer: Timer | None = None
        self._maintenance_timer: Timer | None = None
        self._syncs_before_maintenance = 0
        self._sync_all_trusted = True
        self.syncs = 0
        self.file_system_syncs = 0

    def register(self, log: Log) -> None:
        """From now on this syncer looks after the log."""
        log.on_maintenance_due = lambda: self._schedule_maintenance(log)
        if log.needs_maintenance:
            self._schedule_maintenance(log)

    def forget(self, log: Log) -> None:
        """No new sync for this log. One that runs may still end after this."""
        log.on_maintenance_due = None
        waits = (
            self._dirty,
            self._later,
            self._with_followers,
            self._maintenance_later,
            self._maintenance_now,
            self._put_back,
        )
        for waiting in waits:
            waiting.pop(log, None)
        for _, done in self._start_offset_waits.pop(log, ()):
            done(StorageError(f"{log.directory} was closed"))

    def persist_start_offset(self, log: Log, done: Callable[[StorageError | None], None]) -> None:
        """Write down where the log starts now, soon; then `done(None)`: what was trimmed stays gone after a crash.

        `done(error)` when it could not be written; for want of room it is tried again nevertheless.
        """
        self._start_offset_waits.setdefault(log, []).append((log.start_offset, done))
        self._maintenance_now[log] = None
        if not self._running:
            self._start()

    def request(self, log: Log, *, urgent: bool = True) -> None:
        """Make what the log holds now durable: soon (`urgent`), or within `log_flush_interval_ms`."""
        if urgent or self._scheduler is None:
            self._dirty[log] = None
            self._later.pop(log, None)
            if not self._running:
                self._start()
        elif log not in self._dirty:
            self._later[log] = None
            if self._later_timer is None:
                self._later_timer = self._scheduler.call_later(
                    self._background_sync_interval_ms, self._flush_interval_elapsed
                )

    def request_all(self, logs: Iterable[Log]) -> None:
        """The same for several, urgently: they share a sync, where the first of single requests would have its own."""
        for log in logs:
            self._dirty[log] = None
            self._later.pop(log, None)
        if self._dirty and not self._running:
            self._start()

    def request_with_followers(self, log: Log) -> None:
        """Somebody waits for it to be durable here and elsewhere: sync it when copies of it leave
        (`sync_with_followers`), at the latest within `log_flush_interval_ms`. Sooner would be a sync more, and
        nobody served sooner."""
        if log not in self._dirty:
            self._with_followers[log] = None
            self.request(log, urgent=False)

    def sync_with_followers(self) -> None:
        """Others were sent what they are to make durable: do the same here meanwhile."""
        if self._with_followers:
            logs, self._with_followers = self._with_followers, {}
            self.request_all(logs)

    @property
    def idle(self) -> bool:
        """Nothing runs and nothing is asked for, but for what waits until there is room on the disk."""
        return not (self._running or self._dirty or self._later)

    def close(self) -> None:
        """Cancel the timers and begin the last sync. Close the background worker next, then the logs."""
        for timer in (self._later_timer, self._maintenance_timer):
            if timer is not None:
                timer.cancel()
        self._scheduler = None
        self._dirty.update(self._later | self._put_back)
        self._later.clear()
        self._put_back.clear()
        if not self._running:
            self._start()

    def _flush_interval_elapsed(self) -> None:
        self._later_timer = None
        for log in self._later:
            log.room.awaited_syncs -= 1  # counted when it has ended, as one that somebody waits for
        self._dirty.update(self._later)
        self._later.clear()
        if not self._running:
            self._start()

    def _start(self) -> None:
        """Hand the next job to the thread: a sync if any log is dirty, else housekeeping if that is due.

        Housekeeping comes first when somebody waits for it, or when it has let enough syncs go before.
        """
        if (
            self._maintenance_now
            and (self._start_offset_waits or self._syncs_before_maintenance >= SYNCS_BEFORE_MAINTENANCE_MAX)
            and self._start_maintenance()
        ):
            return
        works = []
        for log in self._dirty:
            work = log.prepare_sync()
            if work is not None:
                works.append((log, work))
        self._dirty.clear()
        if works:
            self._running = True
            self._syncs_before_maintenance += bool(self._maintenance_now)
            self._background.submit(
                lambda: self._timed_sync(works), lambda done, error: self._synced(works, done, error)
            )
            return
        if self._maintenance_now or (self._scheduler is None and self._maintenance_later):
            self._start_maintenance()

    def _start_maintenance(self) -> bool:
        """Hand the housekeeping that is due to the thread, of so many logs at a time that syncs which come meanwhile
        do not wait long; False when there is none."""
        self._syncs_before_maintenance = 0
        job = []
        nothing_due = []
        if self._scheduler is None and not self._maintenance_now:
            self._maintenance_now, self._maintenance_later = self._maintenance_later, {}
        awaited = (
            [log for log in self._maintenance_now if log in self._start_offset_waits]
            if self._start_offset_waits
            else []
        )
        for log in list(
            islice(dict.fromkeys(chain(awaited, self._maintenance_now)), MAINTENANCE_BATCH_LOGS_MAX)
        ):
            del self._maintenance_now[log]
            due = log.prepare_maintenance()
            if due is not None:
                job.append((log, due))
            elif log in self._start_offset_waits and not log.compaction.busy:  # when it rests, it asks again
                nothing_due.append(log)
        if job:
            self._running = True
            self._background.submit(
                lambda: self._run_maintenance(job),
                lambda done, error: self._maintenance_finished(job, done, error),
            )
        for log in nothing_due:  # its start is on disk already, or it takes no more writes
            self._start_offset_persisted(log, log.start_offset, log.failure)
        return bool(job)

    def _start_offset_persisted(self, log: Log, start_offset: int, error: StorageError | None) -> None:
        """The start of a log is on disk, or that failed: tell those who wait for it."""
        waits = self._start_offset_waits.pop(log, [])
        later = [wait for wait in waits if error is None and wait[0] > start_offset]
        if later:
            self._start_offset_waits[log] = later
        for wanted, done in waits:
            if error is not None or wanted <= start_offset:
                done(error)

    # On the thread

    def _timed_sync(self, works: Sequence[tuple[Log, FlushJob]]) -> list[Outcome]:
        """Sync, and tell how many seconds it took: the time of the disk, without that of the loop."""
        if self._clock is None or self._observe_s is None:
            return self._sync(works)
        began = self._clock.monotonic()
        outcomes = self._sync(works)
        self._observe_s(self._clock.monotonic() - began)
        return outcomes

    def _sync(self, works: Sequence[tuple[Log, FlushJob]]) -> list[Outcome]:
        together = self._together(sum(work.file_count for _, work in works))
        outcomes = []
        ready = []
        for log, work in works:
            try:
                work.write_epochs(self._disk, durable=not together)
            except (OSError, LogDiskFull) as error:
                outcomes.append(Outcome(log, work, error))
            else:
                ready.append((log, work))
        if together and ready:
            try:
                synced = self._sync_all()
            except OSError as error:  # it does not say which file: all of them have failed
                return outcomes + [Outcome(log, work, error) for log, work in ready]
            if synced:
                self.file_system_syncs += 1
                return outcomes + [Outcome(log, work, None) for log, work in ready]
        for log, work in ready:
            failed: BaseException | None = None
            try:
                if together:  # there is no syncfs after all
                    work.write_epochs(self._disk, durable=True)
                work.sync(self._disk)
            except (OSError, LogDiskFull) as error:
                failed = error
            outcomes.append(Outcome(log, work, failed))
        return outcomes

    def _run_maintenance(self, job: Sequence[tuple[Log, MaintenanceJob]]) -> list[Outcome]:
        together = self._sync_all if self._together(len(job)) else None
        failed = run_maintenance(self._disk, [work for _, work in job], together)
        return [Outcome(log, work, error) for (log, work), error in zip(job, failed, strict=True)]

    def _together(self, files: int) -> bool:
        return self._sync_all_trusted and files >= self._sync_all_files_min

    def _sync_all(self) -> bool:
        """Sync the file system, if it can be. An error here may be about records of any log, and is told only once.

        So it is the last time: from then on each file is synced by itself, and says whether bytes of it were lost.
        """
        try:
            return self._disk.sync_all(self._root)
        except OSError:
            self._sync_all_trusted = False
            raise

    # Back on the loop

    def _synced(
        self,
        works: Sequence[tuple[Log, FlushJob]],
        outcomes: Sequence[Outcome] | None,
        error: BaseException | None,
    ) -> None:
        self.syncs += 1
        self._finish(outcomes if outcomes is not None else [Outcome(log, work, error) for log, work in works])

    def _maintenance_finished(
        self,
        job: Sequence[tuple[Log, MaintenanceJob]],
        outcomes: Sequence[Outcome] | None,
        error: BaseException | None,
    ) -> None:
        self._finish(outcomes if outcomes is not None else [Outcome(log, work, error) for log, work in job])

    def _finish(self, outcomes: Sequence[Outcome]) -> None:
        """Tell every log how its work ended, then go on. A listener that raises is heard last, and only then.

        Still running while listeners are called: the work of a log is finished before its next is prepared.
        """
        defect: Exception | None = None
        syncs = False
        for log, work, failed in outcomes:
            try:
                if isinstance(work, FlushJob):
                    syncs = True
                    log.finish_sync(work, failed)
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
                self._plan_maintenance(
                    log, no_room=isinstance(failed, LogDiskFull), synced=isinstance(work, FlushJob)
                )
        self._running = False
        if self._dirty or self._maintenance_now or (syncs and self._scheduler is None):
            self._start()
        if defect is not None:
            raise defect

    def _plan_maintenance(self, log: Log, *, no_room: bool, synced: bool) -> None:
        """After a job: does the log need housekeeping, or the same once more when there may be room again?"""
        if no_room:
            if synced:
                self._put_back[log] = None
            self._schedule_maintenance(log)
        elif synced:
            if log.checkpoint_lag_bytes >= CHECKPOINT_LAG_BYTES_MAX:
                self._maintenance_later.pop(log, None)
                self._maintenance_now[log] = None
            elif (
                log not in self._maintenance_later and log.needs_maintenance
            ):  # most often it is known to need it
                self._schedule_maintenance(log)

    def _schedule_maintenance(self, log: Log) -> None:
        self._maintenance_later[log] = None
        if self._scheduler is not None and self._maintenance_timer is None:
            self._maintenance_timer = self._scheduler.call_later(
                self._checkpoint_interval_ms, self._maintenance_interval_elapsed
            )
        elif self._scheduler is None and not self._running:
            self._start()

    def _maintenance_interval_elapsed(self) -> None:
        self._maintenance_timer = None
        self._maintenance_now.update(self._maintenance_later)
        self._maintenance_later.clear()
        self._dirty.update(self._put_back)
        self._put_back.clear()
        if not self._running:
            self._start()
