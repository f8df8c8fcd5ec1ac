"""Log scrubber: reads the closed segments of all partitions again and compares them with their checksums.

A disk may change bytes long after they were verified. Each round reads every closed segment once, in slices of
`SLICE_BYTES`, at no more than `bytes_per_second` and with a quarter of one thread's time at most; the next round begins
`interval_ms` after the last one began. The scrubber opens the files separately and adds no data to the page cache.
Damage is recorded in the log, whose readers then get CORRUPT_MESSAGE, and reported like damage that a reader finds.

In addition, every `verify_again_ms` the scrubber marks the verified batches of each partition as unverified, so that
their next read verifies them again. The partitions are divided into `VERIFY_AGAIN_SHARES` shares with different times.

Invariant: a result is recorded only if the segment is still in the log as it was when its check began.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from mansio.errors import CorruptLog, StorageError
from mansio.logs import fields
from mansio.ports import complete
from mansio.storage.verification import check_batches
from mansio.tracebacks import copied, without_traceback

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from mansio.broker.partition.partition import Partition
    from mansio.ports import Background, Clock, Disk, DiskFile, Promise, Scheduler, Timer
    from mansio.storage.segment import Segment
    from mansio.storage.verification import CheckResult, CheckTask

logger = logging.getLogger(__name__)

SLICE_BYTES: Final = 1 << 20
SLICE_BATCHES: Final = 512
WORK_SHARE_MAX: Final = 0.25
"""Maximum fraction of time in which the other thread works."""

PAUSE_MS_MIN: Final = 1.0
"""Minimum pause between two slices."""

VERIFY_AGAIN_SHARES: Final = 24
"""Number of shares into which the partitions are divided; the checks of one share are forgotten every
`verify_again_ms / VERIFY_AGAIN_SHARES`."""


class ScrubCounts(NamedTuple):
    """Counts since the broker started."""

    rounds: int = 0
    read_bytes: int = 0
    damaged_ranges: int = 0
    unreadable_segments: int = 0


class LogScrubber:
    """Scrubber of all partitions of a broker. All methods run on the broker's event loop.

    If `bytes_per_second` is 0, there are no rounds.
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
        bytes_per_second: int,
        verify_again_ms: int,
    ) -> None:
        self._partitions = partitions
        self._disk = disk
        self._clock = clock
        self._scheduler = scheduler
        self._background = background
        self._interval_ms = interval_ms
        self._bytes_per_second = bytes_per_second
        self._verify_again_ms = verify_again_ms
        self._timers: list[Timer | None] = [None, None]
        self._pausing: tuple[Timer, Promise[None]] | None = None
        self._is_job_running: Promise[None] | None = None
        self._started = self._stopped = False
        self._next_share = 0
        self.counts = ScrubCounts()

    def start(self) -> None:
        """Start the rounds; the first one begins after `interval_ms`."""
        self._started = True
        if self._bytes_per_second:
            self._timers[0] = self._scheduler.call_later(self._interval_ms, self._start_round)
        self._timers[1] = self._scheduler.call_later(
            self._verify_again_ms / VERIFY_AGAIN_SHARES, self._forget_checks_of_next_share
        )

    def set_bytes_per_second(self, bytes_per_second: int) -> None:
        """Change the rate from the next slice on; 0 ends the round in progress."""
        self._bytes_per_second = bytes_per_second
        if bytes_per_second and self._started and self._timers[0] is None and self._is_job_running is None:
            self._timers[0] = self._scheduler.call_later(self._interval_ms, self._start_round)

    async def stop(self) -> None:
        """End the round in progress after its current slice."""
        self._stopped = True
        for timer in self._timers:
            if timer is not None:
                timer.cancel()
        self._wake()
        while self._is_job_running is not None:
            await self._is_job_running

    def _forget_checks_of_next_share(self) -> None:
        for number, partition in enumerate(tuple(self._partitions)):
            if number % VERIFY_AGAIN_SHARES == self._next_share and not partition.closed:
                partition.log.forget_checks()
        self._next_share = (self._next_share + 1) % VERIFY_AGAIN_SHARES
        self._timers[1] = self._scheduler.call_later(
            self._verify_again_ms / VERIFY_AGAIN_SHARES, self._forget_checks_of_next_share
        )

    def _start_round(self) -> None:
        self._timers[0] = None
        if not self._stopped and self._is_job_running is None and self._bytes_per_second:
            self._scheduler.spawn(self.run_round(), name="scrub")

    async def run_round(self) -> None:
        """Scrub all closed segments of all partitions once; return at once if a round is in progress."""
        if self._is_job_running is not None:
            return
        self._is_job_running = self._scheduler.promise()
        began, before = self._clock.monotonic(), self.counts
        try:
            for partition in tuple(self._partitions):
                for segment in partition.log.closed_segments_to_check():
                    if self._stopped or not self._bytes_per_second:
                        return
                    await self._scrub(partition, segment)
            self.counts = self.counts._replace(rounds=self.counts.rounds + 1)
            logger.info(
                "logs_scrubbed",
                extra=fields(
                    read_bytes=self.counts.read_bytes - before.read_bytes,
                    damaged_ranges=self.counts.damaged_ranges - before.damaged_ranges,
                    seconds=round(self._clock.monotonic() - began, 1),
                ),
            )
        finally:
            busy, self._is_job_running = self._is_job_running, None
            busy.set_result(None)
            if not self._stopped and self._bytes_per_second:
                left_ms = self._interval_ms - (self._clock.monotonic() - began) * 1000
                self._timers[0] = self._scheduler.call_later(max(left_ms, PAUSE_MS_MIN), self._start_round)

    async def _scrub(self, partition: Partition, segment: Segment) -> None:
        log, generation = partition.log, partition.log.generation

        def is_current() -> bool:
            return not log.closed and log.generation == generation and log.has_segment(segment)

        position, offset = 0, segment.base_offset
        file: DiskFile | None = None
        delimit = done = False
        try:
            while not done and not self._stopped and (rate := self._bytes_per_second) and is_current():
                task = log.scrub_task(segment, position, offset, with_index=delimit)
                (file, result), took = await self._run_in_thread(
                    partial(self._check_slice, file, segment.path, task, delimit=delimit)
                )
                if not is_current():
                    return
                log.record_scrub(segment, result)
                damaged = sum(1 for each in result.ranges if each.damage)
                self.counts = self.counts._replace(
                    read_bytes=self.counts.read_bytes + result.read_bytes,
                    damaged_ranges=self.counts.damaged_ranges + damaged,
                )
                delimit = bool(result.problem) and not delimit
                done = result.done or (not result.ranges and not delimit)
                position, offset = result.position, result.offset
                pause_s = max(took * (1 / WORK_SHARE_MAX - 1), result.read_bytes / rate - took)
                await self._pause(max(PAUSE_MS_MIN, pause_s * 1000))
        except FileNotFoundError:
            if is_current():
                missing = CorruptLog(f"{segment.path} is missing")
                partition.storage_health.record_damage(
                    partition.topic, partition.index, segment.base_offset, missing
                )
        except (OSError, StorageError) as error:
            if is_current():
                self.counts = self.counts._replace(unreadable_segments=self.counts.unreadable_segments + 1)
                failed = (
                    without_traceback(error)
                    if isinstance(error, StorageError)
                    else StorageError(f"{segment.path}: {error}")
                )
                log.on_check_failed(segment, failed)
                logger.error(
                    "segment_not_scrubbed",
                    extra=fields(topic=partition.topic, partition=partition.index, reason=error),
                )

    def _check_slice(
        self, file: DiskFile | None, path: str, task: CheckTask, *, delimit: bool
    ) -> tuple[DiskFile, CheckResult]:
        """Check one slice; open the file if `file` is None. Runs on the other thread."""
        file = file or self._disk.open_readonly(path)
        return file, check_batches(
            file,
            task,
            bytes_max=SLICE_BYTES,
            batches_max=SLICE_BATCHES,
            delimit=delimit,
            read_at=file.read_uncached,
        )

    async def _run_in_thread(self, work: Callable[[], Any]) -> tuple[Any, float]:
        """Run blocking work; return its result and its duration in seconds. Raises the exception that `work` raises."""
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
        result, error = await promise
        if error is not None:
            raise copied(error)
        return result, took

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
