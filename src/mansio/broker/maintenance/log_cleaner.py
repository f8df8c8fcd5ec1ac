"""Log cleaner (Kafka `LogCleaner`): compaction of all partitions of a broker.

Every `interval_ms` the log cleaner evaluates each partition whose cleanup.policy contains `compact`, and compacts those
that are due on a separate thread, one at a time, the partition with the highest dirty ratio first. That thread and the
event loop share the interpreter lock, so the work is done in slices of about a millisecond with pauses in between. It
takes a quarter of the time at most, and reads and writes no more than `bytes_per_second`.

Invariants:
* The active segment is never changed, nor are records at or above the last stable offset or at or above
  `Partition.retention_floor`.
* A partition whose compaction failed (a damaged batch, a disk error) is left unchanged and logged once. It continues to
  be served and is retried after a restart.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from typing import TYPE_CHECKING, Any, NamedTuple

from mansio.broker.features.holds.retention_holds import RetentionHoldHook
from mansio.broker.partition.producer_hook import ProducerHook
from mansio.errors import MansioError
from mansio.host.item_turns import ItemTurns, Work
from mansio.logs import fields
from mansio.ports import complete
from mansio.storage.cleaner.batch_filter import INT64_MAX
from mansio.storage.cleaner.compaction import CompactionSettings
from mansio.storage.compaction_run import (
    CompactionOutcome,
    begin_compaction,
    is_transient,
    plan_log_compaction,
)
from mansio.wire.field_values import READ_COMMITTED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from uuid import UUID

    from mansio.broker.partition.partition import Partition
    from mansio.config.topic_config import TopicSettings
    from mansio.ports import Background, Clock, Disk, Promise, Scheduler, Timer
    from mansio.state.partition_transactions import AbortedTransaction
    from mansio.storage.cleaner.compaction import CompactionPlan
    from mansio.storage.compaction_run import CompactionRun
    from mansio.storage.log import Log
    from mansio.wire.batch.record_batch import BatchHeader

logger = logging.getLogger(__name__)

WORK_SHARE_MAX = 0.25
"""Maximum fraction of time in which the other thread works: while it runs Python code, the event loop cannot run."""

PAUSE_MS_MIN = 1.0
"""Minimum pause between two slices."""

BUSY_LOG_RETRY_MS = 20.0
"""Delay before compaction is tried again on a log with a maintenance job in progress."""

DISK_FULL_RETRY_MS = 500.0
"""Delay before a segment swap that failed with disk full is retried."""

PARTITIONS_PER_TURN = 16
"""Maximum number of partitions that are examined in one turn of the event loop."""


class CleanerCounts(NamedTuple):
    """Counts since the broker started.

    `runs`: finished compactions; `abandoned`: compactions that ended early; `failed`: partitions that failed; `swaps`:
    segment swaps; `work_seconds`: time spent on compaction, without pauses.
    """

    runs: int = 0
    abandoned: int = 0
    failed: int = 0
    swaps: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    records_dropped: int = 0
    work_seconds: float = 0.0


class Candidate(NamedTuple):
    """A partition that is due for compaction. The candidate with the largest tuple is compacted first.

    `is_forced`: compaction is due whatever the dirty ratio is; see `CompactionPlan`.
    """

    is_forced: bool
    dirty_ratio: float
    dirty_bytes: int
    name: str
    partition: Partition
    plan: CompactionPlan


class _CurrentCompaction(NamedTuple):
    """The compaction in progress. `ended` resolves when the compaction ends."""

    partition: Partition
    run: CompactionRun
    ended: Promise[None]


class LogCleaner:
    """Log cleaner of all partitions of a broker. All methods run on the broker's event loop.

    `tombstone_floor(partition)` returns the offset from which the coordinator replays the partition after loading its
    checkpoint; tombstones at or above it are kept, because the checkpoint may contain the values that they delete. None
    if the partition has no such coordinator.
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
        self._is_job_running: Promise[None] | None = None
        self._current: _CurrentCompaction | None = None
        self._stopped = False
        self._failed: dict[Log, tuple[str, str]] = {}
        self.counts = CleanerCounts()
        self.dirty_ratio_max = 0.0
        """Largest dirty ratio of all partitions at the last evaluation."""

    @property
    def uncleanable(self) -> dict[str, str]:
        """The partitions that are not compacted any more because their compaction failed: error message by name."""
        return dict(self._failed.values())

    def start(self) -> None:
        """Start the periodic evaluation."""
        self._timer = self._scheduler.call_later(self.interval_ms, self._start_round)

    async def stop(self) -> None:
        """Abort the compaction in progress at its next slice and wait for its end.

        A segment swap that fails because the disk is full is completed at the next start."""
        self._stopped = True
        if self._timer is not None:
            self._timer.cancel()
        if self._current is not None:
            self._current.run.stop()
        self._wake()
        while self._is_job_running is not None:
            await self._is_job_running

    async def abort(self, topic_id: UUID, index: int | None = None) -> None:
        """Abort the compaction of a topic, or of one of its partitions, that is about to be removed; on return its
        files are not in use."""
        while (
            (current := self._current) is not None
            and current.partition.topic_id == topic_id
            and index in (None, current.partition.index)
        ):
            current.run.stop()
            self._wake()
            await current.ended

    # Evaluation

    def _start_round(self) -> None:
        self._timer = None
        if not self._stopped and self._is_job_running is None:
            self._scheduler.spawn(self._run_round(), name="compaction")

    async def _run_round(self) -> None:
        """Evaluate all partitions and compact the dirtiest one, until none is due.

        A partition whose compaction was aborted is compacted in the next round."""
        self._is_job_running = self._scheduler.promise()
        later: set[Log] = set()
        try:
            while not self._stopped and (candidate := await self._find_dirtiest(later)) is not None:
                if await self._compact(candidate) is not CompactionOutcome.DONE:
                    later.add(candidate.partition.log)
        finally:
            busy, self._is_job_running = self._is_job_running, None
            busy.set_result(None)
            if not self._stopped:
                self._timer = self._scheduler.call_later(self.interval_ms, self._start_round)

    async def _find_dirtiest(self, later: set[Log]) -> Candidate | None:
        best: Candidate | None = None
        highest = 0.0
        alive = set()
        turns = ItemTurns(
            self._scheduler, Work.COMPACTION_CHOICE, items_max=PARTITIONS_PER_TURN, items_per_look=1
        )
        for partition in tuple(self._partitions):
            if turns.is_over():
                turns.end()
                await self._pause(PAUSE_MS_MIN)
                turns.begin()
            alive.add(partition.log)
            if not partition.settings.compacts or partition.closed or partition.log.failure is not None:
                continue
            if partition.log in self._failed or partition.log in later:
                continue
            if partition.log.compaction.is_busy:  # the next opening of the log completes a segment swap
                continue
            try:
                if self._must_roll(partition):
                    turns.end()
                    try:
                        await partition.roll_when_possible()  # only a closed segment can be compacted
                    finally:
                        turns.begin()
                found = self._evaluate(partition)
            except MansioError as error:
                if is_transient(error):
                    later.add(partition.log)
                    self._log_postponed(partition, error)
                elif not partition.log.closed:  # meanwhile, while it waited for the file of its next segment
                    self._mark_uncleanable(partition, error)
                continue
            highest = max(highest, found.plan.dirty_ratio)
            if found.plan.is_due and (best is None or found[:4] > best[:4]):
                best = found
        self.dirty_ratio_max = highest
        self._failed = {log: why for log, why in self._failed.items() if log in alive}
        return best

    def _must_roll(self, partition: Partition) -> bool:
        """Whether the dirty records of a partition must be compacted and are all in the active segment."""
        compaction = partition.log.compaction
        oldest_ms = compaction.first_dirty_timestamp()
        return (
            oldest_ms is not None
            and oldest_ms < self._clock.wall_ms() - partition.settings.max_compaction_lag_ms
            and compaction.only_active_is_dirty
        )

    def _evaluate(self, partition: Partition) -> Candidate:
        settings = compaction_settings(partition.settings)
        now_ms = self._clock.wall_ms()
        limit_offset = partition.readable_end(READ_COMMITTED)
        if (floor := partition.retention_floor()) is not None:
            limit_offset = min(limit_offset, floor)
        plan = plan_log_compaction(partition.log, settings, limit_offset=limit_offset, now_ms=now_ms)
        return Candidate(plan.is_forced, plan.dirty_ratio, plan.dirty_bytes, partition.name, partition, plan)

    def _log_postponed(self, partition: Partition, error: BaseException) -> None:
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
        transactions = None if partition.producers is None else _CleanedTransactions(partition.producers)
        run = begin_compaction(
            self._disk,
            partition.log,
            candidate.plan,
            compaction_settings(settings),
            now_ms=self._clock.wall_ms(),
            map_bytes_max=self._map_bytes_max,
            tombstone_floor=INT64_MAX if floor is None else floor,
            is_last_of_producer=_is_last_of_producer(partition),
            is_aborted=None if transactions is None else transactions.is_aborted,
            is_obsolete_marker=None if transactions is None else transactions.is_obsolete_marker,
        )
        self._current = _CurrentCompaction(partition, run, self._scheduler.promise())
        before = partition.log.size_bytes
        began = self._clock.monotonic()
        try:
            while run.outcome is None:
                if self._stopped:
                    run.stop()
                elif not partition.settings.compacts:
                    run.pause()
                if transactions is not None:
                    transactions.forget()  # before the next segments, which may lack the markers, replace others
                await self._run_slice(run)
        finally:
            if transactions is not None:
                transactions.forget()
            ended, self._current = self._current.ended, None
            ended.set_result(None)
        self._count_and_log(partition, run, before, self._clock.monotonic() - began)
        assert run.outcome is not None
        return run.outcome

    async def _run_slice(self, run: CompactionRun) -> None:
        """Run one slice of work, and pause according to its duration and the number of bytes read and written."""
        work = run.next_job()
        if work is None:
            if run.outcome is None:
                await self._pause(BUSY_LOG_RETRY_MS)
            return
        seconds = 0.0
        moved = run.bytes_read + run.bytes_written
        while work is not None:
            result, error, took = await self._run_in_thread(work)
            seconds += took
            work = run.finish_job(result, error)
        moved = run.bytes_read + run.bytes_written - moved
        self.counts = self.counts._replace(work_seconds=self.counts.work_seconds + seconds)
        pause_s = max(seconds * (1 / WORK_SHARE_MAX - 1), moved / self.bytes_per_second - seconds)
        if run.outcome is None:
            await self._pause(
                max(DISK_FULL_RETRY_MS if run.waits_for_disk_space else PAUSE_MS_MIN, pause_s * 1000)
            )

    async def _run_in_thread(self, work: Callable[[], object]) -> tuple[Any, BaseException | None, float]:
        """Run blocking work; return its result, its error and its duration in seconds."""
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
            complete(promise, None)

    def _count_and_log(self, partition: Partition, run: CompactionRun, before: int, seconds: float) -> None:
        counts = self.counts
        self.counts = counts._replace(
            runs=counts.runs + 1,
            abandoned=counts.abandoned
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
            hold.report_deleted(partition.log.compaction.state.cleaned_end_offset)
        level = logging.WARNING if run.outcome is CompactionOutcome.DISK_FULL else logging.INFO
        logger.log(
            level,
            "log_compacted" if run.outcome is CompactionOutcome.DONE else "compaction_ended_early",
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
    """Return the part of a topic's settings that concerns compaction."""
    return CompactionSettings(
        min_cleanable_dirty_ratio=settings.min_cleanable_dirty_ratio,
        min_compaction_lag_ms=settings.min_compaction_lag_ms,
        max_compaction_lag_ms=settings.max_compaction_lag_ms,
        delete_retention_ms=settings.delete_retention_ms,
    )


class _CleanedTransactions:
    """The transactions of a log that is being compacted: which batches are data of aborted ones, and which markers are
    obsolete.

    A marker is obsolete when the log had no data of its transaction at the begin of the compaction. The predicates are
    called on another thread with the batches in the order of their offsets, possibly in more than one pass."""

    __slots__ = ("_aborted", "_first_offsets", "_gone", "_last_offset", "_producers", "_with_data")

    def __init__(self, producers: ProducerHook) -> None:
        self._producers = producers
        self._aborted: dict[int, list[AbortedTransaction]] = {}
        for one in producers.transactions.aborted():
            self._aborted.setdefault(one.producer_id, []).append(one)
        self._first_offsets = {
            producer_id: [one.first_offset for one in found] for producer_id, found in self._aborted.items()
        }
        self._last_offset = -1
        self._with_data: set[int] = set()
        """Producers with data since their last marker."""
        self._gone: list[int] = []
        """Offsets of obsolete markers of aborted transactions."""

    def is_aborted(self, header: BatchHeader) -> bool:
        """Return whether a batch with records is data of an aborted transaction."""
        if not header.is_transactional:
            return False
        self._move_to(header)
        self._with_data.add(header.producer_id)
        found = self._find(header)
        return found is not None and header.base_offset < found.last_offset

    def is_obsolete_marker(self, header: BatchHeader) -> bool:
        """Return whether a control batch is the marker of a transaction without data."""
        if not header.is_transactional:
            return False
        self._move_to(header)
        if header.producer_id in self._with_data:
            self._with_data.discard(header.producer_id)
            return False
        found = self._find(header)
        if found is not None and found.last_offset == header.base_offset:
            self._gone.append(header.base_offset)
        return True

    def forget(self) -> None:
        """Remove the aborted transactions without data from the index. Called on the event loop."""
        gone, self._gone = self._gone, []
        self._producers.remove_aborted(frozenset(gone))

    def _find(self, header: BatchHeader) -> AbortedTransaction | None:
        """Return the last aborted transaction of the producer that begins at or below the batch."""
        offsets = self._first_offsets.get(header.producer_id)
        if offsets is None:
            return None
        position = bisect_right(offsets, header.base_offset) - 1
        return None if position < 0 else self._aborted[header.producer_id][position]

    def _move_to(self, header: BatchHeader) -> None:
        if header.base_offset <= self._last_offset:  # another pass
            self._with_data.clear()
        self._last_offset = header.base_offset


def _is_last_of_producer(partition: Partition) -> Callable[[BatchHeader], bool]:
    """Return a predicate: whether a batch is one of the last batches of a producer that has not expired."""
    producers = partition.find_hook(ProducerHook)
    offsets = frozenset[int]() if producers is None else producers.table.retained_batch_offsets()
    return lambda header: header.base_offset in offsets
