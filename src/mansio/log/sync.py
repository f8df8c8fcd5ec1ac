"""Who is durable up to where: group commit for all logs of a data directory.

One job at a time runs on the background thread. Everything that asks while it runs shares the next one; somebody who
asks while none runs gets one at once, so an idle broker pays no waiting and a busy one few syncs
(docs/adr/0003-syncing-many-partitions.md).

Always true: a log's durable end moves only after a sync that started later than the append; a failed sync is never
tried again, because the kernel may have dropped the pages it failed on: every log it covered has failed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mansio.log.log import Log
    from mansio.log.sync_work import Chores, SyncWork
    from mansio.ports import Background, Disk, Scheduler, Timer

SYNC_ALL_FILES_MIN = 4  # from so many files on one syncfs is quicker than syncing each: see the ADR
BACKGROUND_SYNC_INTERVAL_MS = 100
CHECKPOINT_INTERVAL_MS = 1000


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
        self._running = False
        self._later_timer: Timer | None = None
        self._tidy_timer: Timer | None = None
        self._tidy_due = False
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
        for waiting in (self._dirty, self._later, self._untidy):
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
        """Nothing runs and nothing is asked for."""
        return not (self._running or self._dirty or self._later)

    def close(self) -> None:
        """Cancel the timers and begin the last sync. Close the background worker next, then the logs."""
        for timer in (self._later_timer, self._tidy_timer):
            if timer is not None:
                timer.cancel()
        self._scheduler = None
        self._dirty.update(self._later)
        self._later.clear()
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
        if sum(work.file_count for _, work in works) >= self._sync_all_files_min:
            try:
                for _, work in works:
                    work.write_epochs(self._disk, durable=False)
                if self._disk.sync_all(self._root):
                    self.sync_alls += 1
                    return [Outcome(log, work, None) for log, work in works]
            except OSError as error:  # it does not say which file: all of them have failed
                return [Outcome(log, work, error) for log, work in works]
        outcomes = []
        for log, work in works:
            failed = None
            try:
                work.run(self._disk)
            except OSError as error:
                failed = error
            outcomes.append(Outcome(log, work, failed))
        return outcomes

    def _tidy(self, chores: Sequence[tuple[Log, Chores]]) -> list[Outcome]:
        outcomes = []
        together = len(chores) >= self._sync_all_files_min
        for log, work in chores:
            failed = None
            try:
                work.write(self._disk, sync=not together)
            except OSError as error:
                failed = error
            outcomes.append(Outcome(log, work, failed))
        try:
            if together and not self._disk.sync_all(self._root):
                for _, work in chores:
                    self._disk.open(work.checkpoint_path).sync()
            for outcome, (_, work) in zip(outcomes, chores, strict=True):
                if outcome.error is None:
                    work.remove(self._disk)
        except OSError as error:
            return [Outcome(log, work, error) for log, work in chores]
        return outcomes

    # Back on the loop

    def _synced(
        self,
        works: Sequence[tuple[Log, SyncWork]],
        outcomes: Sequence[Outcome] | None,
        error: BaseException | None,
    ) -> None:
        self._running = False
        self.syncs += 1
        if outcomes is None:
            outcomes = [Outcome(log, work, error) for log, work in works]
        for log, work, failed in outcomes:
            log.finish_sync(work, failed)  # type: ignore[arg-type]  # outcomes of a sync hold its works
            if log.has_chores and log.on_chores is not None:
                self._untidy_log(log)
        if not self._running and (self._dirty or self._tidy_due or self._scheduler is None):
            self._start()

    def _tidied(
        self,
        chores: Sequence[tuple[Log, Chores]],
        outcomes: Sequence[Outcome] | None,
        error: BaseException | None,
    ) -> None:
        self._running = False
        if outcomes is None:
            outcomes = [Outcome(log, work, error) for log, work in chores]
        for log, work, failed in outcomes:
            log.finish_chores(work, failed)  # type: ignore[arg-type]  # outcomes of housekeeping hold its chores
        if not self._running and (self._dirty or self._tidy_due):
            self._start()

    def _untidy_log(self, log: Log) -> None:
        self._untidy[log] = None
        if self._scheduler is not None and self._tidy_timer is None:
            self._tidy_timer = self._scheduler.call_later(self._checkpoint_interval_ms, self._tidy_is_due)
        elif self._scheduler is None and not self._running:
            self._start()

    def _tidy_is_due(self) -> None:
        self._tidy_timer = None
        self._tidy_due = True
        if not self._running:
            self._start()
