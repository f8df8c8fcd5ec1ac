"""Retention holds: records that must be kept because a pipeline has not read them yet (ZFS hold / release).

A hold is a committed offset with a mark in its metadata (`mansio.wire.internal_records`), so this is a view of
`__consumer_offsets`: it receives every commit and deletion as it is applied, and all of them at a start.
`RetentionHoldHook` applies the holds to one partition; health checks and metrics show their state.

    start ---- may be deleted ---- floor ---- held ---- end        floor: the lowest of all holds, or what a limit of
                                                                   the topic leaves of it

Invariants:
* Until every group is loaded the holds are unknown, and nothing is deleted.
* Nothing at or above the floor is deleted by retention, compaction or DeleteRecords. A limit moves the floor by whole
  segments, the oldest first, and never further than required.
* A hold is released only by a limit of its topic or by a full disk. Each time that deletes records which a pipeline had
  not read there is one log line, one count, and a health warning until the pipeline has passed the offset.
* A hold moves as soon as a commit is in the log, before it is durable: a pipeline that commits 100 needs nothing below
  100, whether or not a power failure removes the commit.
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
    from mansio.broker.partition.partition_hook import AppendResult
    from mansio.ports import Background, Clock, Scheduler, Timer
    from mansio.storage.segment_list import SegmentInfo
    from mansio.wire.batch.record_batch import BatchHeader
    from mansio.wire.internal_records.offset_and_group_records import CommittedOffset


logger = logging.getLogger(__name__)

DISK_CHECK_INTERVAL_MS: Final = 5_000

BYTES: Final = "bytes"
TIME: Final = "time"
DISK: Final = "disk"
REASONS: Final = {
    BYTES: "mansio.hold.bytes.max",
    TIME: "mansio.hold.ms.max",
    DISK: "the disk is nearly full",
}
"""Reasons for a release: the two limits of its topic, and too little disk space."""


class RetentionHold(NamedTuple):
    """One partition of one pipeline: records from `offset` on are needed; `commit_ms` is the time of the commit."""

    pipeline: str
    offset: int
    commit_ms: int


class ReleasedHold(NamedTuple):
    """A released hold: the log starts (or is compacted up to) `start`, and the pipeline is at `offset`."""

    topic: str
    partition: int
    pipeline: str
    offset: int
    start: int
    reason: str


def is_hold(group_id: str, metadata: str) -> bool:
    """Whether a committed offset is a hold."""
    return pipeline_name_of(group_id) is not None and parse_hold_metadata(metadata) is not None


class RetentionHolds:
    """Retention holds of all pipelines on this broker. All methods run on the event loop."""

    def __init__(self) -> None:
        self._of: dict[tuple[str, int], dict[str, RetentionHold]] = {}
        self._broken: dict[tuple[str, int, str], ReleasedHold] = {}
        self._is_loaded: Callable[[], bool] = lambda: False
        self._unknown_logged = False
        self.disk_low = False
        """Too little disk space: holds are ignored until there is more."""
        self.released_counts = dict.fromkeys(REASONS, 0)

    # Holds

    def set_loaded_check(self, is_loaded: Callable[[], bool]) -> None:
        """Set the function that returns whether the offsets of all groups are loaded."""
        self._is_loaded = is_loaded

    def record_commit(
        self, group_id: str, topic: str, partition: int, committed: CommittedOffset | None
    ) -> None:
        """A committed offset of any group was stored, or deleted (None)."""
        pipeline = pipeline_name_of(group_id)
        if pipeline is None:
            return
        if committed is None or parse_hold_metadata(committed.metadata) is None:
            self._let_go(topic, partition, pipeline)
            return
        place = self._of.setdefault((topic, partition), {})
        place[pipeline] = RetentionHold(pipeline, committed.offset, committed.commit_ms)
        broken = self._broken.get((topic, partition, pipeline))
        if broken is not None and committed.offset >= broken.start:
            del self._broken[topic, partition, pipeline]
            known = fields(pipeline=pipeline, topic=topic, partition=partition, offset=committed.offset)
            logger.info("hold_restored", extra=known)

    def _let_go(self, topic: str, partition: int, pipeline: str) -> None:
        self._broken.pop((topic, partition, pipeline), None)
        place = self._of.get((topic, partition))
        if place is not None and place.pop(pipeline, None) is not None and not place:
            del self._of[topic, partition]

    def of(self, topic: str, partition: int) -> Collection[RetentionHold]:
        """The holds on one partition."""
        place = self._of.get((topic, partition))
        return () if place is None else place.values()

    @property
    def are_known(self) -> bool:
        """Whether all holds are known. Logged the first time that a caller has to wait for it."""
        known = self._is_loaded()
        if not known and not self._unknown_logged:
            self._unknown_logged = True
            logger.error("retention_blocked_offsets_not_loaded")
        return known

    @property
    def has_unknown(self) -> bool:
        """Whether records were kept because not all holds are known."""
        return self._unknown_logged and not self._is_loaded()

    def __len__(self) -> int:
        return sum(len(place) for place in self._of.values())

    # Released holds

    def on_released(self, held: RetentionHold, topic: str, partition: int, start: int, reason: str) -> None:
        """Records below `start` were deleted, and a pipeline had not read them."""
        key = (topic, partition, held.pipeline)
        if key not in self._broken:
            self.released_counts[reason] += 1
            logger.error(
                "hold_released",
                extra=fields(
                    pipeline=held.pipeline,
                    topic=topic,
                    partition=partition,
                    offset=held.offset,
                    start=start,
                    reason=reason,
                ),
            )
        self._broken[key] = ReleasedHold(topic, partition, held.pipeline, held.offset, start, reason)

    def released(self) -> Iterator[ReleasedHold]:
        """The holds that are released now."""
        yield from tuple(self._broken.values())


class HoldDiskLimit:
    """Disk-space limit of holds: with too little space holds are ignored until there is more.

    Checked on another thread, because a disk that hangs does not respond; the last result is used meanwhile. `on_low`
    is called when the space falls below `free_bytes_min` and records are held.
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
        """Start the checks; a minimum of 0 bytes needs none."""
        if self._free_bytes_min > 0:
            self._background.submit(self._free_bytes, self._seen)

    def stop(self) -> None:
        self._stopped = True
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        self._background.submit(self._free_bytes, self._seen)

    def _seen(self, free_bytes: int | None, error: BaseException | None) -> None:
        if self._stopped:
            return
        self._timer = self._scheduler.call_later(self._interval_ms, self._look)
        if error is not None or free_bytes is None:
            logger.warning("disk_free_space_unknown", extra=fields(reason=error))
            return
        low = free_bytes < self._free_bytes_min
        holds = self._holds
        if low == holds.disk_low:
            return
        holds.disk_low = low
        known = fields(free_bytes=free_bytes, least_bytes=self._free_bytes_min, holds=len(holds))
        if not low:
            logger.info("holds_enforced", extra=known)
        elif len(holds) or holds.has_unknown:
            logger.error("holds_ignored_disk_full", extra=known)
            self._on_low()


NO_LIMIT = -1


class Floor(NamedTuple):
    """The offset from which a hold keeps records. `reason` is the limit that prevents it from keeping more, "" for
    none."""

    offset: int
    reason: str = ""


def floor_of(
    held: RetentionHold,
    segments: Iterable[SegmentInfo],
    *,
    size_bytes: int,
    bytes_max: int,
    ms_max: int,
    now_ms: int,
) -> Floor:
    """What the limits leave of a hold. `segments` are all segments, oldest first, of `size_bytes` in total.

    `bytes_max`: only the newest segments that fit into this size are held. `ms_max`: a pipeline without a commit for
    this time holds only segments with a younger record; one that commits is never too slow. -1: no limit.
    """
    excess_bytes = size_bytes - bytes_max if bytes_max != NO_LIMIT else 0
    oldest_ms = now_ms - ms_max if ms_max != NO_LIMIT and now_ms - held.commit_ms > ms_max else None
    if excess_bytes <= 0 and oldest_ms is None:
        return Floor(held.offset)
    found = Floor(held.offset)
    for segment in segments:
        too_large = excess_bytes > 0
        if not too_large and (oldest_ms is None or segment.max_timestamp_ms >= oldest_ms):
            break
        excess_bytes -= segment.size_bytes
        if segment.end_offset > found.offset:
            found = Floor(segment.end_offset, BYTES if too_large else TIME)
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
        if self._holds.disk_low:
            self._limited = {one.pipeline: DISK for one in self._held()}
            return None
        if not self._holds.are_known:
            return self._partition.start_offset
        self._limited.clear()
        return min((self._floor(one) for one in self._held()), default=None)

    def on_trim(self, start_offset: int) -> None:
        self.passed(start_offset)

    def passed(self, offset: int) -> None:
        """Records below were deleted, or compacted."""
        for one in tuple(self._held()):
            if one.offset < offset and (reason := self._limited.get(one.pipeline)):
                self._holds.on_released(one, self._partition.topic, self._partition.index, offset, reason)

    def check_deletion(self, before_offset: int) -> None:
        """Check a request to delete the records below an offset (-1: all committed ones). Raises `PolicyViolation` if a
        pipeline still needs some of them, or if it is not known yet which pipelines do."""
        partition = self._partition
        floor = self.retention_floor()
        wanted = partition.high_watermark if before_offset == HIGH_WATERMARK else before_offset
        if floor is None or wanted <= floor:
            return
        if not self._holds.are_known:
            raise PolicyViolation(
                f"{partition.name}: it is not known yet which pipelines still need its records"
            )
        first = min(self._held(), key=self._floor)
        raise PolicyViolation(
            f"{partition.name}: pipeline {first.pipeline!r} still needs the records from offset {floor} on; "
            f"`mansio pipeline release {first.pipeline}` gives them up"
        )

    def _held(self) -> Iterable[RetentionHold]:
        return self._holds.of(self._partition.topic, self._partition.index)

    def _floor(self, held: RetentionHold) -> int:
        settings, log = self._partition.settings, self._partition.log
        found = floor_of(
            held,
            self._segments(),
            size_bytes=log.size_bytes,
            bytes_max=settings.hold_bytes_max,
            ms_max=settings.hold_ms_max,
            now_ms=self._clock.wall_ms(),
        )
        if found.reason:
            self._limited[held.pipeline] = found.reason
        return found.offset

    def _segments(self) -> Iterator[SegmentInfo]:
        log = self._partition.log
        yield from log.closed_segments()
        yield log.active_segment()

    # Hook methods without effect

    def before_append(self, header: BatchHeader) -> AppendResult | None: ...

    def on_append(self, header: BatchHeader, base_offset: int) -> None: ...

    def on_committed(self, high_watermark: int) -> None: ...

    def on_truncate(self, end_offset: int) -> None: ...

    def readable_end(self, isolation_level: int) -> int | None: ...

    def close(self) -> None: ...
