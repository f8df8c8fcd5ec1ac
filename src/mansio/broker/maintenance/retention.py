"""Retention: deletes records by age and size, for all partitions of a broker.

Checks the partitions every `check_interval_ms` with the settings effective at that time, so that a change applies from
the next check. `mansio.storage.retention` decides what can be deleted; the log removes the files once its new start is
flushed.

Invariants:
* No record at or above the high watermark or at or above `Partition.retention_floor` is deleted.
* What features still need (pending records, schedules, deduplication ids that have not expired) is copied to the end of
  the log before its segment is deleted, and pending records and schedules do not count for retention.bytes. Only holds
  of pipelines and open transactions stop a deletion.
* Age and size delete records only if cleanup.policy contains `delete`, and of internal topics, which contain the state
  of groups, only those of `EVENT_TOPICS`. If a log has no records left, the files of its segments are removed in any
  case.
* A check examines the segments that it deletes and one more, and pauses for `SLICE_PAUSE_MS` after each `TURN_S`.
* A partition whose check fails is reported; the next ones are still checked. One that has to roll, but may not open the
  file of its next segment, is checked again after the next flush.
"""

from __future__ import annotations

import logging
from collections import deque
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from mansio.config.topic_names import EVENT_TOPICS, TRACE_TOPIC
from mansio.errors import MansioError, StorageError
from mansio.host.item_turns import ItemTurns, Work
from mansio.logs import fields
from mansio.storage.active_files import ActiveFilesInUse
from mansio.storage.retention import UNLIMITED, find_expired

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mansio.broker.partition.partition import Partition
    from mansio.ports import Clock, Scheduler, Timer
    from mansio.storage.retention import ExpiredSegments

logger = logging.getLogger(__name__)

FIRST_CHECK_MS = 30_000
"""Delay of the first check. Short, so that a broker that restarts often deletes records, too."""

TRACE_PERCENT_MAX = 5
"""Size to which the trace of records is limited, in percent of the logs that the broker leads, but for
`TRACE_BYTES_MIN`."""

TRACE_BYTES_MIN = 256 << 20

SLICE_PAUSE_MS = 5
"""Pause of a check of all partitions after each turn."""

CHECKS_PER_FLUSH_MAX = 64
"""Maximum number of partitions that roll after one flush before batches of clients that wait for files, too."""


class RetentionCounts(NamedTuple):
    """Counts since the broker started.

    `checks`: checks of all partitions; `failures`: failed checks of one partition; `segments`, `records`: deleted ones;
    `size_bytes`: size of the deleted segments.
    """

    checks: int = 0
    failures: int = 0
    segments: int = 0
    records: int = 0
    size_bytes: int = 0


class RetentionManager:
    """Retention of all partitions of a broker. All methods run on the broker's event loop.

    `partitions` is iterated at the start of every check.
    """

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
        self._awaiting_file: dict[Partition, None] = {}
        """Partitions that are checked again when they may roll."""
        self._timer: Timer | None = None
        self._led_bytes: int | None = None
        """Size of the logs that this broker led in the last round of checks; None before the first one."""
        self._counted_bytes = 0
        self.counts = RetentionCounts()

    def start(self) -> None:
        """Start the periodic checks; the first one begins after `FIRST_CHECK_MS`."""
        first_ms = min(FIRST_CHECK_MS, self._check_interval_ms)
        self._timer = self._scheduler.call_later(first_ms, self._start_round)

    def check_now(self) -> None:
        """Check all partitions now, unless a check is in progress."""
        if self._timer is not None and not self._waiting:
            self._timer.cancel()
            self._timer = self._scheduler.call_later(0, self._start_round)

    def stop(self) -> None:
        """Stop the checks."""
        self._waiting.clear()
        self._awaiting_file.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _start_round(self) -> None:
        self._waiting = deque(self._partitions)
        self._run_slice()

    def _run_slice(self) -> None:
        """Check some partitions, at least one, and continue with the others later."""
        waiting = self._waiting
        turn = ItemTurns(self._scheduler, Work.RETENTION, items_per_look=1)
        while waiting:
            self._check(waiting.popleft())
            if turn.is_over():
                break
        turn.end()
        if waiting:
            self._timer = self._scheduler.call_later(SLICE_PAUSE_MS, self._run_slice)
            return
        self._led_bytes, self._counted_bytes = self._counted_bytes, 0
        self.counts = self.counts._replace(checks=self.counts.checks + 1)
        self._timer = self._scheduler.call_later(self._check_interval_ms, self._start_round)

    def _check_waiting_for_file(self) -> None:
        """Check again some of the partitions that could not roll, in their order. Others that wait for a file come
        between these and the next ones."""
        for partition in tuple(islice(self._awaiting_file, CHECKS_PER_FLUSH_MAX)):
            if partition in self._awaiting_file:
                if not self._check(partition):
                    return
                self._awaiting_file.pop(partition, None)
        if self._awaiting_file:
            self._scheduler.call_later(0, self._continue_after_flush)

    def _continue_after_flush(self) -> None:
        """Check the next partitions that could not roll, after the flush of those that have rolled."""
        if self._awaiting_file and not self._await_file():
            self._check_waiting_for_file()

    def _await_file(self) -> bool:
        """Check the partitions that could not roll after the next flush. Returns False if nothing is to be flushed."""
        return next(iter(self._awaiting_file)).wait_for_file(self, self._check_waiting_for_file)

    def _postpone(self) -> None:
        """Leave the partitions that cannot roll to the next check of all partitions."""
        logger.warning(
            "retention_postponed",
            extra=fields(
                partitions=len(self._awaiting_file),
                reason="no file can be opened for the next segments, and there is nothing to flush",
            ),
        )
        self._awaiting_file.clear()

    def _check(self, partition: Partition) -> bool:
        """Check a partition. Returns False if the check is repeated when the partition may roll."""
        if partition.closed or partition.log.failure is not None:
            return True
        try:
            self.check_partition(partition)
        except ActiveFilesInUse:
            self._awaiting_file[partition] = None
            is_waiting = self._await_file()
            if not is_waiting:
                self._postpone()
            return not is_waiting
        except MansioError as error:
            self._record_failure(partition, error.message)
        except Exception as error:  # a defect skips one check of one partition, not all retention
            self.counts = self.counts._replace(failures=self.counts.failures + 1)
            logger.error(
                "retention_failed",
                exc_info=error,
                extra=fields(topic=partition.topic, partition=partition.index, reason=repr(error)),
            )
        return True

    def _record_failure(self, partition: Partition, reason: str) -> None:
        self.counts = self.counts._replace(failures=self.counts.failures + 1)
        logger.error(
            "retention_failed",
            extra=fields(topic=partition.topic, partition=partition.index, reason=reason),
        )

    def check_partition(self, partition: Partition) -> None:
        """Delete the expired segments of a partition that this broker leads, by age or size. Those that features keep
        are deleted by a later check. Raises `ActiveFilesInUse` if the partition has to roll after the next flush, and
        `StorageError`."""
        log = partition.log
        if log.start_offset == log.end_offset == partition.high_watermark and log.active_segment().size_bytes:
            partition.roll()  # all records were deleted: free the space of the active segment as well
        settings = partition.settings
        if partition.is_leader and not partition.internal:
            self._counted_bytes += log.size_bytes
        if not partition.is_leader or not settings.deletes:
            return  # a follower's log starts where its leader's does
        if partition.internal and partition.topic not in EVENT_TOPICS:
            return
        bytes_max = settings.retention_bytes
        if partition.topic == TRACE_TOPIC:
            bytes_max = self._trace_bytes_max(bytes_max)
        by_size = bytes_max != UNLIMITED
        if not by_size and settings.retention_ms == UNLIMITED:
            return
        retention_bytes = bytes_max + (partition.kept_bytes if by_size else 0)

        def find(floor: int | None) -> ExpiredSegments:
            high_watermark = partition.high_watermark
            return find_expired(
                log.closed_segments(),
                log.active_segment(),
                size_bytes=log.size_bytes if by_size else 0,
                now_ms=self._clock.wall_ms(),
                retention_ms=settings.retention_ms,
                retention_bytes=retention_bytes,
                floor_offset=high_watermark if floor is None else min(floor, high_watermark),
            )

        floor = partition.retention_floor()
        found = find(floor)
        if found.end_offset > log.start_offset:
            self._delete_expired(partition, found)
        if floor is None:
            return
        # What only features keep is deleted by a later check, when they have copied what they need.
        expired = find(partition.retention_floor(after_release=True))
        if expired.end_offset > found.end_offset:
            if expired.includes_active:
                partition.roll()
            self._scheduler.spawn(
                self._release(partition, expired.end_offset), name="copies before retention"
            )

    def _trace_bytes_max(self, retention_bytes: int) -> int:
        """Return the size to which the trace is limited, whose topic has the setting `retention_bytes`."""
        if self._led_bytes is None:
            return retention_bytes
        quota = max(self._led_bytes * TRACE_PERCENT_MAX // 100, TRACE_BYTES_MIN)
        return quota if retention_bytes == UNLIMITED else min(quota, retention_bytes)

    async def _release(self, partition: Partition, offset: int) -> None:
        """Have the features of a partition copy what they need from below an offset to the end of the log."""
        try:
            await partition.release_below(offset)
        except MansioError as error:
            if not partition.closed and partition.is_leader:
                self._record_failure(partition, error.message)

    def _delete_expired(self, partition: Partition, found: ExpiredSegments) -> None:
        """Trim the log to the end of the expired segments.

        If they include the active segment and no new one can be created, all but the active one are deleted."""
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
