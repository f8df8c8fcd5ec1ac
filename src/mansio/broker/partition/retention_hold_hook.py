"""The hold of pipelines, plugged into a partition: what a pipeline has not read yet is not deleted or compacted.

Owns no state but why the last look found less held than pipelines asked for; which holds there are
`RetentionHolds` knows.

    start ---- may go ---- floor ---- held ---- end            floor: the lowest of all holds, or what a limit
                                                               of the topic leaves of it

Always true: nothing at or above the floor leaves by retention, compaction or DeleteRecords; a limit moves the floor by
whole segments, the oldest first, and never further than it says.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from mansio.broker.partition.partition import HIGH_WATERMARK
from mansio.broker.partition.retention_holds import BYTES, DISK, TIME
from mansio.errors import PolicyViolation

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from mansio.broker.partition.partition import Partition
    from mansio.broker.partition.partition_hook import AppendResult
    from mansio.broker.partition.retention_holds import RetentionHold, RetentionHolds
    from mansio.ports import Clock
    from mansio.storage.log_slice import SegmentInfo
    from mansio.wire.batch.record_batch import BatchHeader

NO_LIMIT = -1


class Floor(NamedTuple):
    """From which offset on a hold keeps records; `reason`: which limit keeps it from keeping more, "" for none."""

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
    """What the limits leave of a hold. `segments`: all, oldest first, of `size_bytes` together.

    `bytes_max`: only the newest segments that fit into so many bytes are held. `ms_max`: a pipeline that has not
    committed for so long holds only segments with a record younger than that; one that commits is never too slow.
    -1: no limit.
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
    """`PartitionHook` for the holds of pipelines; not on the path of appends and reads."""

    def __init__(self, partition: Partition, holds: RetentionHolds, clock: Clock) -> None:
        self._partition = partition
        self._holds = holds
        self._clock = clock
        self._limited: dict[
            str, str
        ] = {}  # pipeline -> what kept its hold from counting in full, at the last look

    def retention_floor(self) -> int | None:
        if not self._partition.settings.hold_enabled:
            return None
        if self._holds.disk_low:
            self._limited = {one.pipeline: DISK for one in self._held()}
            return None
        if not self._holds.known:
            return self._partition.start_offset
        self._limited.clear()
        return min((self._floor(one) for one in self._held()), default=None)

    def on_trim(self, start_offset: int) -> None:
        self.passed(start_offset)

    def passed(self, offset: int) -> None:
        """Records below are gone, or only the latest of each key is left of them."""
        for one in tuple(self._held()):
            if one.offset < offset and (reason := self._limited.get(one.pipeline)):
                self._holds.on_released(one, self._partition.topic, self._partition.index, offset, reason)

    def check_deletion(self, before_offset: int) -> None:
        """Somebody wants the records below an offset deleted (-1: all that are committed). Raises `PolicyViolation`,
        which names the pipeline that still needs some of them."""
        partition = self._partition
        floor = self.retention_floor()
        wanted = partition.high_watermark if before_offset == HIGH_WATERMARK else before_offset
        if floor is None or wanted <= floor:
            return
        if not self._holds.known:
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

    # Nothing to see or to steer in these

    def before_append(self, header: BatchHeader) -> AppendResult | None: ...

    def on_append(self, header: BatchHeader, base_offset: int) -> None: ...

    def on_committed(self, high_watermark: int) -> None: ...

    def on_truncate(self, end_offset: int) -> None: ...

    def readable_end(self, isolation_level: int) -> int | None: ...

    def close(self) -> None: ...
