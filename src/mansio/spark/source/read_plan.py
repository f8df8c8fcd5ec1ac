"""Which offsets go to which task: splitting, admission, and leaving out what a filter does not want. Pure.

Always true of every plan: its stretches do not overlap, none is empty, and together they are exactly what was to be
read. Numbers only: nobody is asked anything here.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Final, NamedTuple

from pyspark.sql.datasource import InputPartition

from mansio.errors import ConfigError
from mansio.net.metadata import NO_TOPIC_ID
from mansio.wire.topic_partition import TopicPartition

if TYPE_CHECKING:
    from collections.abc import Mapping

RANGES_MAX: Final = 100_000
"""More tasks than that are a mistake in an option, and would fill the driver's memory."""


class OffsetRange(NamedTuple):
    """The offsets of one partition from `start` up to, not including, `end`; and the id of its topic."""

    start: int
    end: int
    topic_id: bytes = NO_TOPIC_ID


@dataclass(frozen=True)
class TaskRange(InputPartition):
    """What one task reads: one stretch of one partition."""

    topic: str
    partition: int
    start: int
    end: int
    topic_id: bytes = NO_TOPIC_ID

    @property
    def topic_partition(self) -> TopicPartition:
        return TopicPartition(self.topic, self.partition)


def plan_ranges(
    wanted: Mapping[TopicPartition, OffsetRange],
    *,
    partitions_min: int | None = None,
    records_max: int | None = None,
) -> list[TaskRange]:
    """One task for each partition; more where a partition has more than `records_max` offsets, or where that makes
    fewer than `partitions_min` tasks: then the largest are cut first. In the order of topic, partition and offset.

    Raises `ConfigError` when that makes more than `RANGES_MAX` tasks.
    """
    sizes = {partition: one.end - one.start for partition, one in wanted.items() if one.end > one.start}
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
        TaskRange(*partition, start, end, wanted[partition].topic_id)
        for partition in sorted(sizes)
        for start, end in _split(wanted[partition], pieces[partition])
    ]


def _split_largest(
    sizes: Mapping[TopicPartition, int], pieces: dict[TopicPartition, int], missing: int
) -> None:
    """Make `missing` pieces more, each time out of the partition whose pieces are the largest."""
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
    """Cut into pieces whose sizes differ by one at most."""
    size = one.end - one.start
    edges = [one.start + size * number // pieces for number in range(pieces + 1)]
    return list(pairwise(edges))


def admit(
    start: Mapping[TopicPartition, int], latest: Mapping[TopicPartition, int], offsets_max: int
) -> dict[TopicPartition, int]:
    """Where a micro-batch of at most `offsets_max` offsets ends, for each partition of `latest`.

    What is there is shared out by how much each partition has: then all of them have been read at the same time,
    however uneven they are. Each moves by one offset at least, even where that is more than `offsets_max` in all.
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
    while remainder > 0:  # rounding took less than one from each
        for partition in by_size:
            if remainder > 0 and shares[partition] < backlog[partition]:
                shares[partition] += 1
                remainder -= 1
    for partition in by_size:  # and gave up to one to each of the small
        returned = min(-remainder, shares[partition] - 1) if remainder < 0 else 0
        shares[partition] -= returned
        remainder += returned
    return {partition: start[partition] + shares.get(partition, 0) for partition in latest}
