"""Who is durable up to where: group commit for all logs of a data directory.

One job at a time runs on the background thread. Everything that asks while it runs shares the next one; somebody who
asks while none runs gets one at once, so an idle broker pays no waiting and a busy one few syncs
(docs/adr/0003-syncing-many-partitions.md).

Always true: a log's durable end moves only after a sync that started later than the append; a failed sync is never
tried again, because the kernel may have dropped the pages it failed on: every log it covered has failed. Work that
found no room before anything could be lost (`NoRoom`) is done again at the next tidy interval. What one log's listener
does never keeps the others of a job from being finished.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, NamedTuple

from mansio.log.sync_work import Chores, NoRoom, SyncWork, telling_no_room

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mansio.log.log import Log
    from mansio.ports import Background, Disk, Scheduler, Timer

SYNC_ALL_FILES_MIN = 4  # from so many files on one syncfs is quicker than syncing each: see the ADR
BACKGROUND_SYNC_INTERVAL_MS = 100
CHECKPOINT_INTERVAL_MS = 1000

logger = logging.getLogger(__name__)


class Outcome(NamedTuple):
    """How the sync (or the housekeeping) of one log ended."""

    log: Log
    work: SyncWork | Chores
    error: BaseException | None


class Syncer:
    """See the module. All methods belong to the loop.

    `background_sync_interval_ms`: how long a request that nobody waits for may be put off.
    `checkpoint_interval_ms`: how old a checkpoint may get while its log moves. Both need a `scheduler`; without one
    every request is urgent and checkpoints are written after each sync.
    """

    def __init__(
        self,
        disk: Disk,
        background: Background,
        root: str,
        *,
        scheduler: Scheduler | None = None,
        background_sync_interval_ms: int = BACKGROUND_SYNC_INTERVAL_MS,
        checkpoint_interval_ms: int = CHECKPOINT_INTERVAL_MS,
        sync_all_files_min: int = SYNC_ALL_FILES_MIN,
    ) -> None:
        self._disk = disk
        self._background = background
        self._root = root
        self._scheduler = scheduler
        self._background_sync_interval_ms = background_sync_interval_ms
        self._checkpoint_interval_ms = checkpoint_interval_ms
        self._sync_all_files_min = sync_all_files_min
        self._dirty: dict[Log, None] = {}
        self._later: dict[Log, None] = {}
        self._untidy: dict[Log, None] = {}
        self._put_back: dict[Log, None] = {}
        self._running = False
        self._later_timer: Timer | None = None
        self._tidy_timer: Timer | None = None
        self._tidy_due = False
        self._sync_all_trusted = True
        self.syncs = 0
        self.sync_alls = 0

    def register(self, log: Log) -> None:
        """From now on this syncer looks after the log."""
        log.on_chores = lambda: self._untidy_log(log)
        if log.has_chores:
            self._untidy_log(log)

    def forget(self, log: Log) -> None:
        """No new sync for this log. One that runs may still end after this."""
        log.on_chores = None
        for waiting in (self._dirty, self._later, self._untidy, self._put_back):
            waiting.pop(log, None)

    def request(self, log: Log, *, urgent: bool = True) -> None:
        """Make what the log holds now durable: soon (`urgent`), or within `background_sync_interval_ms`."""
        if urgent or self._scheduler is None:
            self._dirty[log] = None
            if not self._running:
                self._start()
        elif log not in self._dirty:
            self._later[log] = None
            if self._later_timer is None:
                self._later_timer = self._scheduler.call_later(
                    self._background_sync_interval_ms, self._later_is_now
                )

    @property
    def idle(self) -> bool:
        """Nothing runs and nothing is asked for, but for what waits until there is room on the disk."""
        return not (self._running or self._dirty or self._later)

    def close(self) -> None:
        """Cancel the timers and begin the last sync. Close the background worker next, then the logs."""
        for timer in (self._later_timer, self._tidy_timer):
            if timer is not None:
                timer.cancel()
        self._scheduler = None
        self._dirty.update(self._later | self._put_back)
        self._later.clear()
        self._put_back.clear()
        if not self._running:
            self._start()

    def _later_is_now(self) -> None:
        self._later_timer = None
        self._dirty.update(self._later)
        self._later.clear()
        if not self._running:
            self._start()

    def _start(self) -> None:
        """Hand the next job to the thread: a sync if any log is dirty, else housekeeping if that is due."""
        works = []
        for log in self._dirty:
            work = log.prepare_sync()
            if work is not None:
                works.append((log, work))
        self._dirty.clear()
        if works:
            self._running = True
            self._background.submit(
                lambda: self._sync(works), lambda done, error: self._synced(works, done, error)
            )
            return
        if self._tidy_due or (self._scheduler is None and self._untidy):
            self._start_chores()

    def _start_chores(self) -> None:
        self._tidy_due = False
        chores = []
        for log in self._untidy:
            due = log.prepare_chores()
            if due is not None:
                chores.append((log, due))
        self._untidy.clear()
        if chores:
            self._running = True
            self._background.submit(
                lambda: self._tidy(chores), lambda done, error: self._tidied(chores, done, error)
            )

    # On the thread

    def _sync(self, works: Sequence[tuple[Log, SyncWork]]) -> list[Outcome]:
        together = self._together(sum(work.file_count for _, work in works))
        outcomes = []
        ready = []
        for log, work in works:
            try:
                work.write_epochs(self._disk, durable=not together)
            except (OSError, NoRoom) as error:
                outcomes.append(Outcome(log, work, error))
            else:
                ready.append((log, work))
        if together and ready:
            try:
                synced = self._sync_all()
            except OSError as error:  # it does not say which file: all of them have failed
                return outcomes + [Outcome(log, work, error) for log, work in ready]
            if synced:
                self.sync_alls += 1
                return outcomes + [Outcome(log, work, None) for log, work in ready]
        for log, work in ready:
            failed: BaseException | None = None
            try:
                if together:  # there is no syncfs after all
                    work.write_epochs(self._disk, durable=True)
                work.sync(self._disk)
            except (OSError, NoRoom) as error:
                failed = error
            outcomes.append(Outcome(log, work, failed))
        return outcomes

    def _tidy(self, chores: Sequence[tuple[Log, Chores]]) -> list[Outcome]:
        together = self._together(len(chores))
        outcomes = []
        ready = []
        for log, work in chores:
            try:
                work.write_checkpoint(self._disk, sync=not together)
            except (OSError, NoRoom) as error:
                outcomes.append(Outcome(log, work, error))
            else:
                ready.append((log, work))
        if together and ready:
            try:
                with telling_no_room("checkpoints"):
                    if not self._sync_all():
                        for _, work in ready:
                            self._disk.open(work.checkpoint_path).sync()
            except (OSError, NoRoom) as error:
                return outcomes + [Outcome(log, work, error) for log, work in ready]
        for log, work in ready:
            failed: BaseException | None = None
            try:
                work.follow(self._disk)
            except (OSError, NoRoom) as error:
                failed = error
            outcomes.append(Outcome(log, work, failed))
        return outcomes

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
        works: Sequence[tuple[Log, SyncWork]],
        outcomes: Sequence[Outcome] | None,
        error: BaseException | None,
    ) -> None:
        self.syncs += 1
        self._finish(outcomes if outcomes is not None else [Outcome(log, work, error) for log, work in works])

    def _tidied(
        self,
        chores: Sequence[tuple[Log, Chores]],
        outcomes: Sequence[Outcome] | None,
        error: BaseException | None,
    ) -> None:
        self._finish(
            outcomes if outcomes is not None else [Outcome(log, work, error) for log, work in chores]
        )

    def _finish(self, outcomes: Sequence[Outcome]) -> None:
        """Tell every log how its work ended, then go on. A listener that raises is heard last, and only then.

        Still running while listeners are called: the work of a log is finished before its next is prepared.
        """
        defect: Exception | None = None
        syncs = False
        for log, work, failed in outcomes:
            try:
                if isinstance(work, SyncWork):
                    syncs = True
                    log.finish_sync(work, failed)
                else:
                    log.finish_chores(work, failed)
            except Exception as error:  # whatever a listener raises; raised again below
                if defect is not None:
                    logger.error("a listener of %s failed", log.directory, exc_info=error)
                defect = defect or error
            if log.on_chores is not None:
                self._look_after(log, no_room=isinstance(failed, NoRoom), synced=isinstance(work, SyncWork))
        self._running = False
        if self._dirty or self._tidy_due or (syncs and self._scheduler is None):
            self._start()
        if defect is not None:
            raise defect

    def _look_after(self, log: Log, *, no_room: bool, synced: bool) -> None:
        """After a job: does the log need housekeeping, or the same once more when there may be room again?"""
        if no_room and synced:
            self._put_back[log] = None
        if no_room or (synced and log.has_chores):
            self._untidy_log(log)

    def _untidy_log(self, log: Log) -> None:
        self._untidy[log] = None
        if self._scheduler is not None and self._tidy_timer is None:
            self._tidy_timer = self._scheduler.call_later(self._checkpoint_interval_ms, self._tidy_is_due)
        elif self._scheduler is None and not self._running:
            self._start()

    def _tidy_is_due(self) -> None:
        self._tidy_timer = None
        self._tidy_due = True
        self._dirty.update(self._put_back)
        self._put_back.clear()
        if not self._running:
            self._start()
