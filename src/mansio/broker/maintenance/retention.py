"""Retention: deletes records by age and size, for all partitions of a broker.

Checks the partitions every `check_interval_ms` with the settings effective at that time, so that a change applies from
the next check. `mansio.storage.retention` decides what can be deleted; the log removes the files once its new start is
flushed.

Invariants:
* Nothing at or above the high watermark is deleted, nor what a feature still needs (`Partition.retention_floor`).
* Time and size delete records only where cleanup.policy contains `delete`, and never of internal topics, which contain
  the state of groups; in those, only what lies below the log start is removed.
* A check reads the segments that are deleted and one more, and yields the event loop after `TURN_S` seconds.
* A partition that cannot be checked is reported; the next ones are still checked.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from mansio.errors import MansioError, StorageError
from mansio.logs import fields
from mansio.storage.retention import UNLIMITED, find_expired

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mansio.broker.partition.partition import Partition
    from mansio.ports import Clock, Scheduler, Timer
    from mansio.storage.retention import ExpiredSegments

logger = logging.getLogger(__name__)

FIRST_CHECK_MS = 30_000
"""Short, because a broker that restarts more often than it checks must delete records, too."""

TURN_S = 0.002
"""Time after which a round yields the event loop."""

TURN_PAUSE_MS = 5


class RetentionCounts(NamedTuple):
    """Counts since the broker started. Bytes are those of segments on disk."""

    checks: int = 0
    failures: int = 0
    segments: int = 0
    records: int = 0
    size_bytes: int = 0


class RetentionManager:
    """`partitions` is iterated at the start of every round. All methods run on the broker's event loop."""

    def __init__(
        self,
        partitions: Iterable[Partition],
        *,
        clock: Clock,
        scheduler: Scheduler,
        check_interval_ms: int,
    ) -> None:
        self._partitions = partitions
        self._clock = clock
        self._scheduler = scheduler
        self._check_interval_ms = check_interval_ms
        self._waiting: deque[Partition] = deque()
        self._timer: Timer | None = None
        self.counts = RetentionCounts()

    def start(self) -> None:
        """Start with a first round after `FIRST_CHECK_MS`."""
        first_ms = min(FIRST_CHECK_MS, self._check_interval_ms)
        self._timer = self._scheduler.call_later(first_ms, self._round)

    def check_soon(self) -> None:
        """Start the next round now."""
        if self._timer is not None and not self._waiting:
            self._timer.cancel()
            self._timer = self._scheduler.call_later(0, self._round)

    def stop(self) -> None:
        """Stop the checks."""
        self._waiting.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _round(self) -> None:
        self._waiting = deque(self._partitions)
        self._turn()

    def _turn(self) -> None:
        """Check some partitions, at least one, and continue with the others later."""
        clock, waiting = self._clock, self._waiting
        end = clock.monotonic() + TURN_S
        while waiting:
            self._check(waiting.popleft())
            if clock.monotonic() >= end:
                break
        if waiting:
            self._timer = self._scheduler.call_later(TURN_PAUSE_MS, self._turn)
            return
        self.counts = self.counts._replace(checks=self.counts.checks + 1)
        self._timer = self._scheduler.call_later(self._check_interval_ms, self._round)

    def _check(self, partition: Partition) -> None:
        if partition.closed or partition.log.failure is not None:
            return
        try:
            self.check(partition)
        except MansioError as error:
            self.counts = self.counts._replace(failures=self.counts.failures + 1)
            logger.error(
                "retention_failed",
                extra=fields(topic=partition.topic, partition=partition.index, reason=error.message),
            )
        except Exception as error:  # a defect skips one check of one partition, not all retention
            self.counts = self.counts._replace(failures=self.counts.failures + 1)
            logger.error(
                "retention_failed",
                exc_info=error,
                extra=fields(topic=partition.topic, partition=partition.index, reason=repr(error)),
            )

    def check(self, partition: Partition) -> None:
        """Delete what one partition may lose now. Raises `StorageError`."""
        log = partition.log
        if log.start_offset == log.end_offset == partition.high_watermark and log.active_segment().size_bytes:
            partition.roll()  # all records were deleted: free the space of the active segment as well
        settings = partition.settings
        if not partition.is_leader or partition.internal or not settings.deletes:
            return  # a follower's log starts where its leader's does
        by_size = settings.retention_bytes != UNLIMITED
        if not by_size and settings.retention_ms == UNLIMITED:
            return
        floor = partition.retention_floor()
        found = find_expired(
            log.closed_segments(),
            log.active_segment(),
            size_bytes=log.size_bytes if by_size else 0,
            now_ms=self._clock.wall_ms(),
            retention_ms=settings.retention_ms,
            retention_bytes=settings.retention_bytes,
            floor_offset=partition.high_watermark if floor is None else min(floor, partition.high_watermark),
        )
        if found.end_offset > log.start_offset:
            self._let_go(partition, found)

    def _let_go(self, partition: Partition, found: ExpiredSegments) -> None:
        """Trim to the offset that was found. If there is no space for a new segment, everything but the active
        segment is deleted."""
        if found.includes_active:
            active = partition.log.active_segment()
            try:
                partition.roll()
            except StorageError:
                if partition.log.failure is None and active.base_offset > partition.start_offset:
                    rest = found._replace(
                        end_offset=active.base_offset,
                        segment_count=found.segment_count - 1,
                        size_bytes=found.size_bytes - active.size_bytes,
                    )
                    self._trim(partition, rest)
                raise
        self._trim(partition, found)

    def _trim(self, partition: Partition, found: ExpiredSegments) -> None:
        start_offset = partition.start_offset
        partition.trim(found.end_offset)
        counts = self.counts
        self.counts = counts._replace(
            segments=counts.segments + found.segment_count,
            records=counts.records + found.end_offset - start_offset,
            size_bytes=counts.size_bytes + found.size_bytes,
        )
        logger.info(
            "records_expired",
            extra=fields(
                topic=partition.topic,
                partition=partition.index,
                start=start_offset,
                to=found.end_offset,
                segments=found.segment_count,
                bytes=found.size_bytes,
                reason=found.reason,
            ),
        )
