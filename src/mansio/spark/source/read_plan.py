"""Assignment of offset ranges to Spark tasks, and admission control (the size limit of a micro-batch). Does no I/O.

A task costs Spark about as much processor time as reading ten thousand records, so a batch query reads several short
ranges in one task.

Invariants:
* The ranges of a plan do not overlap, none is empty, and together they are exactly the requested offsets.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Final, NamedTuple

from pyspark.sql.datasource import InputPartition

from mansio.errors import ConfigError
from mansio.net.metadata import NO_TOPIC_ID
from mansio.wire.topic_partition import TopicPartition

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mansio.net.security_settings import SecuritySettings

RANGES_MAX: Final = 100_000
"""Maximum number of tasks of a plan. More tasks are the result of a wrong option, and would exhaust the driver's
memory.
"""

GROUPED_OFFSETS_MAX: Final = 1_000
"""Maximum number of offsets in a task of several ranges: so few that parallel tasks would not be faster, unless the
query itself takes long for each record. Then the option `minPartitions` requires more tasks.
"""


class OffsetRange(NamedTuple):
    """The offsets [start, end) of one partition, and its topic id."""

    start: int
    end: int
    topic_id: bytes = NO_TOPIC_ID


@dataclass(frozen=True)
class TaskRange(InputPartition):
    """Input of one task: the offsets [start, end) of one partition."""

    topic: str
    partition: int
    start: int
    end: int
    topic_id: bytes = NO_TOPIC_ID
    login: SecuritySettings | None = field(default=None, compare=False)
    """What the task logs in with (`task_login`). None: nothing."""

    @property
    def topic_partition(self) -> TopicPartition:
        return TopicPartition(self.topic, self.partition)


@dataclass(frozen=True)
class TaskRanges(InputPartition):
    """Input of one task of a batch query: several ranges, in the order of the plan."""

    ranges: tuple[TaskRange, ...]
    login: SecuritySettings | None = field(default=None, compare=False)
    """As of `TaskRange`, for all ranges."""


@dataclass(frozen=True)
class PartitionShare(InputPartition):
    """Input of one task that determines what it reads when it runs: the partitions whose index has the remainder
    `index` when divided by `count`."""

    index: int
    count: int


def group_short_ranges(ranges: Sequence[TaskRange]) -> list[TaskRanges]:
    """Group consecutive ranges of a plan into tasks of at most `GROUPED_OFFSETS_MAX` offsets. A longer range is a task
    of its own."""
    groups: list[list[TaskRange]] = []
    size = GROUPED_OFFSETS_MAX + 1
    for one in ranges:
        size += one.end - one.start
        if size > GROUPED_OFFSETS_MAX:
            groups.append([])
            size = one.end - one.start
        groups[-1].append(one)
    return [TaskRanges(tuple(group)) for group in groups]


def plan_ranges(
    offset_ranges: Mapping[TopicPartition, OffsetRange],
    *,
    partitions_min: int | None = None,
    records_max: int | None = None,
) -> list[TaskRange]:
    """Plan one task per partition, or several for a partition with more than `records_max` offsets. If these are fewer
    than `partitions_min` tasks, the largest ranges are split further. Sorted by topic, partition and offset.

    Raises `ConfigError` if there would be more than `RANGES_MAX` tasks.
    """
    sizes = {
        partition: one.end - one.start for partition, one in offset_ranges.items() if one.end > one.start
    }
    pieces = {
        partition: 1 if records_max is None else -(-size // records_max) for partition, size in sizes.items()
    }
    total = sum(pieces.values())
    if max(total, partitions_min or 0) > RANGES_MAX:
        raise ConfigError(
            f"that would be {max(total, partitions_min or 0)} tasks, and {RANGES_MAX} is the limit: raise"
            " maxRecordsPerPartition, or lower minPartitions"
        )
    _split_largest(sizes, pieces, (partitions_min or 0) - total)
    return [
        TaskRange(*partition, start, end, offset_ranges[partition].topic_id)
        for partition in sorted(sizes)
        for start, end in _split(offset_ranges[partition], pieces[partition])
    ]


def _split_largest(
    sizes: Mapping[TopicPartition, int], pieces: dict[TopicPartition, int], missing: int
) -> None:
    """Add `missing` tasks, each by splitting the partition with the largest ranges."""
    heap = [
        (-sizes[partition] / count, partition)
        for partition, count in pieces.items()
        if count < sizes[partition]
    ]
    heapq.heapify(heap)
    while missing > 0 and heap:
        _, partition = heap[0]
        pieces[partition] += 1
        missing -= 1
        if pieces[partition] < sizes[partition]:
            heapq.heapreplace(heap, (-sizes[partition] / pieces[partition], partition))
        else:
            heapq.heappop(heap)


def _split(one: OffsetRange, pieces: int) -> list[tuple[int, int]]:
    """Split the range into `pieces` ranges whose sizes differ by at most one."""
    size = one.end - one.start
    edges = [one.start + size * number // pieces for number in range(pieces + 1)]
    return list(pairwise(edges))


def limit_offsets(
    start: Mapping[TopicPartition, int], latest: Mapping[TopicPartition, int], offsets_max: int
) -> dict[TopicPartition, int]:
    """Return the end offset of each partition of `latest`, for a micro-batch of at most `offsets_max` offsets from
    `start`.

    The limit is divided in proportion to the backlog of each partition, so that all partitions are caught up at the
    same time. Each partition with a backlog advances by at least one offset, even if the total exceeds `offsets_max`.
    """
    backlog = {
        partition: end - start[partition] for partition, end in latest.items() if end > start[partition]
    }
    total = sum(backlog.values())
    if total <= offsets_max:
        return {partition: max(end, start[partition]) for partition, end in latest.items()}
    shares = {partition: max(1, offsets_max * size // total) for partition, size in backlog.items()}
    remainder = offsets_max - sum(shares.values())
    by_size = sorted(backlog, key=lambda partition: (-backlog[partition], partition))
    while remainder > 0:  # rounding down left less than one per partition
        for partition in by_size:
            if remainder > 0 and shares[partition] < backlog[partition]:
                shares[partition] += 1
                remainder -= 1
    for partition in by_size:  # small partitions got up to one more than their share
        returned = min(-remainder, shares[partition] - 1) if remainder < 0 else 0
        shares[partition] -= returned
        remainder += returned
    return {partition: start[partition] + shares.get(partition, 0) for partition in latest}
