"""Log cleaner (Kafka `LogCleaner`): compaction of all partitions of a broker.

Every `interval_ms` each partition whose cleanup.policy contains `compact` is evaluated, and the one with the largest
dirty part that is due is compacted, one at a time, on a separate thread. The interpreter is shared with the event loop,
so the work is done in slices of about a millisecond with pauses in between: it takes a quarter of the time at most, and
reads and writes no more than `bytes_per_second`.

Invariants:
* The active segment is never changed, nor anything that readers of committed records may not see yet, or that a feature
  still needs as it was written (`Partition.retention_floor`).
* A partition whose compaction failed (a damaged batch, a disk error) is left unchanged and logged once. It continues to
  be served and is retried after a restart.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, NamedTuple

from mansio.broker.partition.partition import READ_COMMITTED
from mansio.broker.partition.producer_hook import ProducerHook
from mansio.broker.partition.retention_holds import RetentionHoldHook
from mansio.errors import MansioError
from mansio.logs import fields
from mansio.storage.cleaner.batch_filter import INT64_MAX
from mansio.storage.cleaner.compaction import CompactionSettings
from mansio.storage.cleaner.compaction_run import (
    CompactionOutcome,
    begin_compaction,
    is_transient,
    plan_log_compaction,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from uuid import UUID

    from mansio.broker.partition.partition import Partition
    from mansio.config.topic_config import TopicSettings
    from mansio.ports import Background, Clock, Disk, Promise, Scheduler, Timer
    from mansio.storage.cleaner.compaction import CompactionPlan
    from mansio.storage.cleaner.compaction_run import CompactionRun
    from mansio.storage.log import Log
    from mansio.wire.batch.record_batch import BatchHeader

logger = logging.getLogger(__name__)

WORK_SHARE_MAX = 0.25
"""Upper bound on the share of time in which the other thread works: while it computes, the event loop cannot."""

PAUSE_MS_MIN = 1.0
WAIT_MS = 20.0
"""Delay before a log whose maintenance is running is tried again."""

ROOM_WAIT_MS = 500.0
"""Delay before a segment swap that failed with disk full is retried."""

CANDIDATES_PER_SLICE = 16


class Counts(NamedTuple):
    """Counts since the broker started. `seconds` is time at work, without the pauses."""

    runs: int = 0
    given_up: int = 0
    failed: int = 0
    swaps: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    records_dropped: int = 0
    seconds: float = 0.0


class Candidate(NamedTuple):
    """A partition that is due; the largest is compacted first."""

    forced: bool
    dirty_ratio: float
    dirty_bytes: int
    name: str
    partition: Partition
    what: CompactionPlan


class _Current(NamedTuple):
    """The compaction in progress. `ended` completes when it ends."""

    partition: Partition
    run: CompactionRun
    ended: Promise[None]


class LogCleaner:
    """Compaction of all partitions of a broker. All methods run on the broker's event loop.

    `tombstone_floor(partition)` returns the offset from which a reader that knows older values will continue; None if
    there is none.
    """

    def __init__(
        self,
        partitions: Iterable[Partition],
        *,
        disk: Disk,
        clock: Clock,
        scheduler: Scheduler,
        background: Background,
        interval_ms: int,
        map_bytes_max: int,
        bytes_per_second: int,
        tombstone_floor: Callable[[Partition], int | None] = lambda _: None,
    ) -> None:
        self._partitions = partitions
        self._disk = disk
        self._clock = clock
        self._scheduler = scheduler
        self._background = background
        self.interval_ms = interval_ms
        self._map_bytes_max = map_bytes_max
        self.bytes_per_second = bytes_per_second
        self._tombstone_floor = tombstone_floor
        self._timer: Timer | None = None
        self._pausing: tuple[Timer, Promise[None]] | None = None
        self._busy: Promise[None] | None = None
        self._current: _Current | None = None
        self._stopped = False
        self._failed: dict[Log, tuple[str, str]] = {}
        self.counts = Counts()
        self.dirty_ratio_max = 0.0
        """Largest dirty ratio of all partitions at the last evaluation."""

    @property
    def uncleanable(self) -> dict[str, str]:
        """Every partition that is no longer compacted because it failed, by name, with the error."""
        return dict(self._failed.values())

    def start(self) -> None:
        """Start the periodic evaluation."""
        self._timer = self._scheduler.call_later(self.interval_ms, self._look)

    async def stop(self) -> None:
        """Abort the compaction in progress at the next slice; a swap that fails with disk full is left to the next
        start."""
        self._stopped = True
        if self._timer is not None:
            self._timer.cancel()
        if self._current is not None:
            self._current.run.stop()
        self._wake()
        while self._busy is not None:
            await self._busy

    async def leave(self, topic_id: UUID) -> None:
        """The topic is about to be deleted: on return its files are no longer used."""
        while (current := self._current) is not None and current.partition.topic_id == topic_id:
            current.run.stop()
            self._wake()
            await current.ended

    # Evaluation

    def _look(self) -> None:
        self._timer = None
        if not self._stopped and self._busy is None:
            self._scheduler.spawn(self._round(), name="compaction")

    async def _round(self) -> None:
        """Evaluate all partitions and compact the largest, until none is due. An aborted compaction waits for the next
        round."""
        self._busy = self._scheduler.promise()
        later: set[Log] = set()
        try:
            while not self._stopped and (candidate := await self._dirtiest(later)) is not None:
                if await self._compact(candidate) is not CompactionOutcome.DONE:
                    later.add(candidate.partition.log)
        finally:
            busy, self._busy = self._busy, None
            busy.set_result(None)
            if not self._stopped:
                self._timer = self._scheduler.call_later(self.interval_ms, self._look)

    async def _dirtiest(self, later: set[Log]) -> Candidate | None:
        best: Candidate | None = None
        highest = 0.0
        alive = set()
        for number, partition in enumerate(tuple(self._partitions), start=1):
            if number % CANDIDATES_PER_SLICE == 0:
                await self._pause(PAUSE_MS_MIN)
            alive.add(partition.log)
            if not partition.settings.compacts or partition.closed or partition.log.failure is not None:
                continue
            if partition.log in self._failed or partition.log in later:
                continue
            if partition.log.compaction.is_busy:  # a swap was left to the next opening
                continue
            try:
                found = self._judge(partition)
            except MansioError as error:
                if is_transient(error):
                    later.add(partition.log)
                    self._postpone(partition, error)
                else:
                    self._mark_uncleanable(partition, error)
                continue
            highest = max(highest, found.what.dirty_ratio)
            if found.what.due and (best is None or found[:4] > best[:4]):
                best = found
        self.dirty_ratio_max = highest
        self._failed = {log: why for log, why in self._failed.items() if log in alive}
        return best

    def _judge(self, partition: Partition) -> Candidate:
        settings = compaction_settings(partition.settings)
        now_ms = self._clock.wall_ms()
        desk = partition.log.compaction
        oldest_ms = desk.first_dirty_timestamp()
        if (
            oldest_ms is not None
            and oldest_ms < now_ms - settings.max_compaction_lag_ms
            and desk.only_active_is_dirty
        ):
            partition.roll()  # only a closed segment can be compacted
        limit_offset = partition.readable_end(READ_COMMITTED)
        if (floor := partition.retention_floor()) is not None:
            limit_offset = min(limit_offset, floor)
        what = plan_log_compaction(partition.log, settings, limit_offset=limit_offset, now_ms=now_ms)
        return Candidate(what.forced, what.dirty_ratio, what.dirty_bytes, partition.name, partition, what)

    def _postpone(self, partition: Partition, error: BaseException) -> None:
        logger.warning(
            "compaction_postponed",
            extra=fields(topic=partition.topic, partition=partition.index, reason=error),
        )

    def _mark_uncleanable(self, partition: Partition, error: BaseException) -> None:
        self._failed[partition.log] = (partition.name, str(error))
        self.counts = self.counts._replace(failed=self.counts.failed + 1)
        logger.error(
            "compaction_failed",
            extra=fields(topic=partition.topic, partition=partition.index, reason=error),
        )

    # Compaction

    async def _compact(self, candidate: Candidate) -> CompactionOutcome:
        partition = candidate.partition
        if partition.closed or partition.log.failure is not None:
            return CompactionOutcome.ABANDONED
        settings = partition.settings
        floor = self._tombstone_floor(partition)
        run = begin_compaction(
            self._disk,
            partition.log,
            candidate.what,
            compaction_settings(settings),
            now_ms=self._clock.wall_ms(),
            map_bytes_max=self._map_bytes_max,
            tombstone_floor=INT64_MAX if floor is None else floor,
            is_last_of_producer=_last_batches(partition),
        )
        self._current = _Current(partition, run, self._scheduler.promise())
        before = partition.log.size_bytes
        began = self._clock.monotonic()
        try:
            while run.outcome is None:
                if self._stopped:
                    run.stop()
                elif not partition.settings.compacts:
                    run.pause()
                await self._slice(run)
        finally:
            ended, self._current = self._current.ended, None
            ended.set_result(None)
        self._ended(partition, run, before, self._clock.monotonic() - began)
        assert run.outcome is not None
        return run.outcome

    async def _slice(self, run: CompactionRun) -> None:
        """One slice of work, and the pause that follows from it."""
        work = run.advance()
        if work is None:
            if run.outcome is None:
                await self._pause(WAIT_MS)
            return
        seconds = 0.0
        moved = run.bytes_read + run.bytes_written
        while work is not None:
            result, error, took = await self._run_in_thread(work)
            seconds += took
            work = run.finish(result, error)
        moved = run.bytes_read + run.bytes_written - moved
        self.counts = self.counts._replace(seconds=self.counts.seconds + seconds)
        pause_s = max(seconds * (1 / WORK_SHARE_MAX - 1), moved / self.bytes_per_second - seconds)
        if run.outcome is None:
            await self._pause(max(ROOM_WAIT_MS if run.waits_for_disk_space else PAUSE_MS_MIN, pause_s * 1000))

    async def _run_in_thread(self, work: Callable[[], object]) -> tuple[Any, BaseException | None, float]:
        """(result, error, duration in s)."""
        promise: Promise[tuple[Any, BaseException | None]] = self._scheduler.promise()
        clock = self._clock
        took = 0.0

        def timed() -> object:
            nonlocal took
            began = clock.monotonic()
            try:
                return work()
            finally:
                took = clock.monotonic() - began

        self._background.submit(timed, lambda result, error: promise.set_result((result, error)))
        return *(await promise), took

    async def _pause(self, pause_ms: float) -> None:
        if self._stopped:
            return
        promise: Promise[None] = self._scheduler.promise()
        self._pausing = self._scheduler.call_later(pause_ms, self._wake), promise
        await promise

    def _wake(self) -> None:
        if self._pausing is not None:
            (timer, promise), self._pausing = self._pausing, None
            timer.cancel()
            if not promise.done():
                promise.set_result(None)

    def _ended(self, partition: Partition, run: CompactionRun, before: int, seconds: float) -> None:
        counts = self.counts
        self.counts = counts._replace(
            runs=counts.runs + 1,
            given_up=counts.given_up
            + (run.outcome in (CompactionOutcome.ABANDONED, CompactionOutcome.DISK_FULL)),
            swaps=counts.swaps + run.swaps,
            bytes_read=counts.bytes_read + run.bytes_read,
            bytes_written=counts.bytes_written + run.bytes_written,
            records_dropped=counts.records_dropped + run.records_dropped,
        )
        if run.outcome is CompactionOutcome.FAILED:
            self._mark_uncleanable(partition, run.error or MansioError("unknown"))
            return
        if run.swaps and (hold := partition.find_hook(RetentionHoldHook)) is not None:
            hold.passed(partition.log.compaction.state.cleaned_end_offset)
        level = logging.WARNING if run.outcome is CompactionOutcome.DISK_FULL else logging.INFO
        logger.log(
            level,
            "compacted" if run.outcome is CompactionOutcome.DONE else "compaction ended early",
            extra=fields(
                topic=partition.topic,
                partition=partition.index,
                segments=run.swaps,
                records_dropped=run.records_dropped,
                bytes_before=before,
                bytes_after=partition.log.size_bytes,
                seconds=round(seconds, 3),
                **(
                    {"reason": "disk full, or no file descriptor"}
                    if run.outcome is CompactionOutcome.DISK_FULL
                    else {}
                ),
            ),
        )


def compaction_settings(settings: TopicSettings) -> CompactionSettings:
    """The part of a topic's settings that concerns compaction."""
    return CompactionSettings(
        min_cleanable_dirty_ratio=settings.min_cleanable_dirty_ratio,
        min_compaction_lag_ms=settings.min_compaction_lag_ms,
        max_compaction_lag_ms=settings.max_compaction_lag_ms,
        delete_retention_ms=settings.delete_retention_ms,
    )


def _last_batches(partition: Partition) -> Callable[[BatchHeader], bool]:
    """Whether a batch is among the last batches of a producer that has not expired."""
    producers = partition.find_hook(ProducerHook)
    offsets = frozenset[int]() if producers is None else producers.table.retained_batch_offsets()
    return lambda header: header.base_offset in offsets
