"""Retention holds: records that must be kept because a pipeline has not read them yet (ZFS hold / release).

A hold is a committed offset with hold metadata (`mansio.wire.internal_records.hold_metadata`). `RetentionHolds` is a
view of `__consumer_offsets`: it is called for every commit and deletion. `RetentionHoldHook` applies the holds to one
partition; health checks and metrics report their state.

    log start ---- may be deleted ---- floor ---- held ---- log end

The floor is the lowest offset of all holds, or a higher one if a limit of the topic or a full disk releases a hold.

Invariants:
* Until the offsets of all groups are loaded, the holds are unknown, and no record is deleted.
* No record at or above the floor is deleted by retention, compaction or DeleteRecords. A limit raises the floor by
  whole segments, and no further than required.
* A hold is released only by a limit of its topic or by a full disk. When records are deleted that a pipeline has not
  read, this is logged once, counted once, and reported as a health warning until the pipeline commits an offset at or
  above the deleted records.
* A hold moves when a commit is appended, before it is durable: a pipeline that has committed 100 needs no record below
  100, even if a power failure removes the commit.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final, NamedTuple

from mansio.broker.partition.partition import HIGH_WATERMARK
from mansio.errors import PolicyViolation
from mansio.logs import fields
from mansio.wire.internal_records.hold_metadata import parse_hold_metadata, pipeline_name_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator

    from mansio.broker.partition.partition import Partition
    from mansio.broker.partition.partition_hook import AppendResult, Contents
    from mansio.ports import Background, Clock, Scheduler, Timer
    from mansio.storage.segment_list import SegmentInfo
    from mansio.wire.batch.record_batch import BatchHeader
    from mansio.wire.internal_records.offset_and_group_records import CommittedOffset


logger = logging.getLogger(__name__)

NEARLY_LOW_FACTOR: Final = 2
DISK_CHECK_INTERVAL_MS: Final = 5_000

RELEASED_BY_BYTES: Final = "bytes"
RELEASED_BY_TIME: Final = "time"
RELEASED_BY_DISK: Final = "disk"
RELEASE_REASONS: Final = {
    RELEASED_BY_BYTES: "mansio.hold.bytes.max",
    RELEASED_BY_TIME: "mansio.hold.ms.max",
    RELEASED_BY_DISK: "the disk is nearly full",
}
"""Descriptions of the reasons for which holds are released: two limits of the topic, and too little disk space."""


class RetentionHold(NamedTuple):
    """Hold of one pipeline on one partition.

    `offset`: the first offset that the pipeline needs; `commit_ms`: the time at which it committed the offset.
    """

    pipeline: str
    offset: int
    commit_ms: int


class ReleasedHold(NamedTuple):
    """A hold whose records were deleted before the pipeline read them.

    `offset`: the committed offset of the pipeline; `start`: the offset below which records were deleted or compacted;
    `reason`: a key of `RELEASE_REASONS`.
    """

    topic: str
    partition: int
    pipeline: str
    offset: int
    start: int
    reason: str


def is_hold(group_id: str, metadata: str) -> bool:
    """Return whether a committed offset of a group, with this metadata, is a hold."""
    return pipeline_name_of(group_id) is not None and parse_hold_metadata(metadata) is not None


class RetentionHolds:
    """Retention holds of all pipelines on this broker. All methods run on the event loop."""

    def __init__(self) -> None:
        self._by_partition: dict[tuple[str, int], dict[str, RetentionHold]] = {}
        self._released: dict[tuple[str, int, str], ReleasedHold] = {}
        self._is_loaded: Callable[[], bool] = lambda: False
        self._is_blocked_logged = False
        self.is_disk_low = False
        """Whether there is too little disk space, so that holds are ignored."""
        self.is_disk_nearly_low = False
        """Whether the free disk space is less than `NEARLY_LOW_FACTOR` of that limit."""
        self.released_counts = dict.fromkeys(RELEASE_REASONS, 0)

    # Holds

    def set_loaded_check(self, is_loaded: Callable[[], bool]) -> None:
        """Set the function that returns whether the offsets of all groups are loaded."""
        self._is_loaded = is_loaded

    def record_commit(
        self, group_id: str, topic: str, partition: int, committed: CommittedOffset | None
    ) -> None:
        """Apply a committed offset of any group to the holds; `committed` is None if the offset was deleted."""
        pipeline = pipeline_name_of(group_id)
        if pipeline is None:
            return
        if committed is None or parse_hold_metadata(committed.metadata) is None:
            self._remove_hold(topic, partition, pipeline)
            return
        place = self._by_partition.setdefault((topic, partition), {})
        place[pipeline] = RetentionHold(pipeline, committed.offset, committed.commit_ms)
        released = self._released.get((topic, partition, pipeline))
        if released is not None and committed.offset >= released.start:
            del self._released[topic, partition, pipeline]
            known = fields(pipeline=pipeline, topic=topic, partition=partition, offset=committed.offset)
            logger.info("hold_restored", extra=known)

    def _remove_hold(self, topic: str, partition: int, pipeline: str) -> None:
        self._released.pop((topic, partition, pipeline), None)
        place = self._by_partition.get((topic, partition))
        if place is not None and place.pop(pipeline, None) is not None and not place:
            del self._by_partition[topic, partition]

    def holds_on(self, topic: str, partition: int) -> Collection[RetentionHold]:
        """Return the holds on one partition."""
        place = self._by_partition.get((topic, partition))
        return () if place is None else place.values()

    @property
    def are_loaded(self) -> bool:
        """Whether all holds are loaded. The first use of this property before that is logged."""
        known = self._is_loaded()
        if not known and not self._is_blocked_logged:
            self._is_blocked_logged = True
            logger.error("retention_blocked_offsets_not_loaded")
        return known

    @property
    def has_blocked_retention(self) -> bool:
        """Whether a check for deletion was refused because the holds are not loaded yet."""
        return self._is_blocked_logged and not self._is_loaded()

    def __len__(self) -> int:
        return sum(len(place) for place in self._by_partition.values())

    # Released holds

    def record_release(
        self, hold: RetentionHold, topic: str, partition: int, start: int, reason: str
    ) -> None:
        """Record that records below `start` were deleted or compacted before a pipeline read them."""
        key = (topic, partition, hold.pipeline)
        if key not in self._released:
            self.released_counts[reason] += 1
            logger.error(
                "hold_released",
                extra=fields(
                    pipeline=hold.pipeline,
                    topic=topic,
                    partition=partition,
                    offset=hold.offset,
                    start=start,
                    reason=reason,
                ),
            )
        self._released[key] = ReleasedHold(topic, partition, hold.pipeline, hold.offset, start, reason)

    def released_holds(self) -> Iterator[ReleasedHold]:
        """Yield the released holds whose pipeline has not committed an offset above the deleted records yet."""
        yield from tuple(self._released.values())


class UnsupportedHolds:
    """Retention holds in a cluster. They have no effect, because the coordinator of a pipeline's group may not lead the
    partition; the first one is logged."""

    def __init__(self) -> None:
        self._is_logged = False

    def record_commit(
        self, group_id: str, topic: str, partition: int, committed: CommittedOffset | None
    ) -> None:
        """Log the first committed offset that is a hold."""
        if self._is_logged or committed is None or not is_hold(group_id, committed.metadata):
            return
        self._is_logged = True
        reason = "in a cluster, retention does not wait for pipelines"
        known = fields(pipeline=pipeline_name_of(group_id), topic=topic, partition=partition, reason=reason)
        logger.warning("retention_holds_without_effect", extra=known)


class HoldDiskLimit:
    """Disk-space limit of holds: while less than `free_bytes_min` is free, holds are ignored.

    The free space is checked on another thread, because a disk that hangs would block the event loop. `on_low` is
    called when the space falls below `free_bytes_min` and there are holds.
    """

    def __init__(
        self,
        holds: RetentionHolds,
        *,
        scheduler: Scheduler,
        background: Background,
        free_bytes: Callable[[], int],
        free_bytes_min: int,
        on_low: Callable[[], None],
        interval_ms: float = DISK_CHECK_INTERVAL_MS,
    ) -> None:
        self._holds = holds
        self._scheduler = scheduler
        self._background = background
        self._free_bytes = free_bytes
        self._free_bytes_min = free_bytes_min
        self._on_low = on_low
        self._interval_ms = interval_ms
        self._timer: Timer | None = None
        self._stopped = False

    def start(self) -> None:
        """Start the periodic checks, unless `free_bytes_min` is 0."""
        if self._free_bytes_min > 0:
            self._background.submit(self._free_bytes, self._on_free_bytes)

    def stop(self) -> None:
        self._stopped = True
        if self._timer is not None:
            self._timer.cancel()

    def _check(self) -> None:
        self._background.submit(self._free_bytes, self._on_free_bytes)

    def _on_free_bytes(self, free_bytes: int | None, error: BaseException | None) -> None:
        if self._stopped:
            return
        self._timer = self._scheduler.call_later(self._interval_ms, self._check)
        if error is not None or free_bytes is None:
            logger.warning("disk_free_space_unknown", extra=fields(reason=error))
            return
        low = free_bytes < self._free_bytes_min
        holds = self._holds
        holds.is_disk_nearly_low = free_bytes < NEARLY_LOW_FACTOR * self._free_bytes_min
        if low == holds.is_disk_low:
            return
        holds.is_disk_low = low
        known = fields(free_bytes=free_bytes, least_bytes=self._free_bytes_min, holds=len(holds))
        if not low:
            logger.info("holds_enforced", extra=known)
        elif len(holds) or holds.has_blocked_retention:
            logger.error("holds_ignored_disk_full", extra=known)
            self._on_low()


NO_LIMIT = -1


class HoldFloor(NamedTuple):
    """The offset from which a hold keeps records.

    `reason`: the limit because of which the offset is higher than the committed one, "" if no limit applies.
    """

    offset: int
    reason: str = ""


def find_hold_floor(
    hold: RetentionHold,
    segments: Iterable[SegmentInfo],
    *,
    size_bytes: int,
    bytes_max: int,
    ms_max: int,
    now_ms: int,
) -> HoldFloor:
    """Return the offset from which a hold keeps records under the limits of the topic.

    `segments`: all segments of the log, oldest first, of `size_bytes` in total. `bytes_max`: only the newest segments
    that fit into this size are held. `ms_max`: if the pipeline has not committed for this time, only segments with a
    record younger than this time are held. -1 means no limit.
    """
    excess_bytes = size_bytes - bytes_max if bytes_max != NO_LIMIT else 0
    oldest_ms = now_ms - ms_max if ms_max != NO_LIMIT and now_ms - hold.commit_ms > ms_max else None
    if excess_bytes <= 0 and oldest_ms is None:
        return HoldFloor(hold.offset)
    found = HoldFloor(hold.offset)
    for segment in segments:
        too_large = excess_bytes > 0
        if not too_large and (oldest_ms is None or segment.max_timestamp_ms >= oldest_ms):
            break
        excess_bytes -= segment.size_bytes
        if segment.end_offset > found.offset:
            found = HoldFloor(segment.end_offset, RELEASED_BY_BYTES if too_large else RELEASED_BY_TIME)
    return found


class RetentionHoldHook:
    """`PartitionHook` for retention holds; not called by appends and reads."""

    def __init__(self, partition: Partition, holds: RetentionHolds, clock: Clock) -> None:
        self._partition = partition
        self._holds = holds
        self._clock = clock
        self._limited: dict[str, str] = {}  # pipeline -> limit that reduced its hold at the last check

    def retention_floor(self) -> int | None:
        if not self._partition.settings.hold_enabled:
            return None
        if self._holds.is_disk_low:
            self._limited = {one.pipeline: RELEASED_BY_DISK for one in self._partition_holds()}
            return None
        if not self._holds.are_loaded:
            return self._partition.start_offset
        self._limited.clear()
        return min((self._find_floor(one) for one in self._partition_holds()), default=None)

    def on_trim(self, start_offset: int) -> None:
        self.report_deleted(start_offset)

    def report_deleted(self, offset: int) -> None:
        """Report the holds of which records below `offset` were deleted or compacted as released."""
        for one in tuple(self._partition_holds()):
            if one.offset < offset and (reason := self._limited.get(one.pipeline)):
                self._holds.record_release(one, self._partition.topic, self._partition.index, offset, reason)

    def check_deletion(self, before_offset: int) -> None:
        """Check a request to delete the records below an offset (-1: below the high watermark).

        Raises `PolicyViolation` if a pipeline has not read some of them, or if the holds are not loaded yet."""
        partition = self._partition
        floor = self.retention_floor()
        wanted = partition.high_watermark if before_offset == HIGH_WATERMARK else before_offset
        if floor is None or wanted <= floor:
            return
        if not self._holds.are_loaded:
            raise PolicyViolation(
                f"{partition.name}: it is not known yet which pipelines still need its records"
            )
        first = min(self._partition_holds(), key=self._find_floor)
        raise PolicyViolation(
            f"{partition.name}: pipeline {first.pipeline!r} still needs the records from offset {floor} on; "
            f"`mansio pipeline release {first.pipeline}` gives them up"
        )

    def _partition_holds(self) -> Iterable[RetentionHold]:
        return self._holds.holds_on(self._partition.topic, self._partition.index)

    def _find_floor(self, hold: RetentionHold) -> int:
        settings, log = self._partition.settings, self._partition.log
        found = find_hold_floor(
            hold,
            self._segments(),
            size_bytes=log.size_bytes,
            bytes_max=settings.hold_bytes_max,
            ms_max=settings.hold_ms_max,
            now_ms=self._clock.wall_ms(),
        )
        if found.reason:
            self._limited[hold.pipeline] = found.reason
        return found.offset

    def _segments(self) -> Iterator[SegmentInfo]:
        log = self._partition.log
        yield from log.closed_segments()
        yield log.active_segment()

    # Hook methods without effect

    def before_append(self, header: BatchHeader) -> AppendResult | None: ...

    def on_append(self, header: BatchHeader, base_offset: int, contents: Contents | None = None) -> None: ...

    def on_committed(self, high_watermark: int) -> None: ...

    def on_truncate(self, end_offset: int) -> None: ...

    def readable_end(self, isolation_level: int) -> int | None: ...

    def close(self, *, save: bool) -> None: ...
