"""The leased ranges of one batch as an offset of Spark, and their division into tasks. Does no I/O.

Spark stores the offset of a batch in its log before it runs the batch, and passes it again when it repeats the batch.
The ranges are the offset, so a repeated batch reads the same records. `{"member": "spark-...", "records": 20,
"isolation": 0, "order": "none", "topics": {"t": {"0": "0+20"}}}`: a range is the distance from the end of the one
before it, `+`, its size, and, unless it is 1, `*` and the delivery count.

Invariants:
* Equal ranges have equal texts, because Spark compares texts; a later batch has another member and so another text.
* A text has at most `RANGES_MAX` ranges.
* The tasks of a batch have each leased record once. In order by partition, one task has all records of a partition.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql.datasource import InputPartition

from mansio.errors import ConfigError
from mansio.net.metadata import NO_TOPIC_ID
from mansio.net.range_leases import RangeLease
from mansio.wire.field_values import READ_COMMITTED, READ_UNCOMMITTED
from mansio.wire.topic_partition import TopicPartition

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from mansio.net.security_settings import SecuritySettings

RANGES_MAX: Final = 4_096
"""Maximum number of ranges of a batch."""

DEFAULT_TASKS: Final = 32
"""Number of tasks of a batch without the option `recordsPerTask`, unless the batch has fewer records."""

TASKS_MAX: Final = 10_000
"""Maximum number of tasks of a batch."""

GAP_MAX: Final = 1_000
"""Two ranges of a task with at most so many offsets between them are read by the same requests."""

ORDER_PARTITION: Final = "partition"

_RANGE: Final = re.compile(r"(\d+)\+(\d+)(?:\*(\d+))?")


@dataclass(frozen=True)
class LeasedTask(InputPartition):
    """Input of one task: leased ranges, in order, of one member of the group."""

    parts: tuple[LeasedPart, ...]
    member: str
    isolation: int
    lost: int = 0
    """Number of records of the batch whose leases are lost, if that is an error."""
    login: SecuritySettings | None = field(default=None, compare=False)
    """What the task logs in with (`task_login`). None: nothing."""


@dataclass(frozen=True)
class LeasedPart:
    """Leased ranges of one partition, ascending."""

    topic: str
    partition: int
    topic_id: bytes
    ranges: tuple[RangeLease, ...]


@dataclass(frozen=True)
class LeasedBatch:
    """The leased ranges of one batch. `member`: the member that has leased them, empty if there are none; `order`: the
    order of the group, none, key or partition; `isolation`: the level with which its records are read."""

    member: str = ""
    ranges: Mapping[TopicPartition, Sequence[RangeLease]] = field(default_factory=dict)
    order: str = ""
    isolation: int = READ_UNCOMMITTED

    @property
    def records(self) -> int:
        """Number of leased offsets."""
        return sum(each.size for ranges in self.ranges.values() for each in ranges)

    def to_json(self) -> dict[str, Any]:
        """Return the offset that Spark stores."""
        if not self.member:
            return {}
        topics: dict[str, dict[str, str]] = {}
        for place in sorted(self.ranges):
            if self.ranges[place]:
                topics.setdefault(place.topic, {})[str(place.partition)] = _encode(self.ranges[place])
        return {
            "member": self.member,
            "records": self.records,
            "isolation": self.isolation,
            "order": self.order,
            "topics": topics,
        }

    @classmethod
    def from_json(cls, offset: Mapping[str, Any]) -> LeasedBatch:
        """Parse the result of `to_json`. Raises `ConfigError` for the offset of another source."""
        if not offset:
            return cls()
        try:
            ranges = {
                TopicPartition(topic, int(partition)): _decode(text)
                for topic, partitions in offset["topics"].items()
                for partition, text in partitions.items()
            }
            isolation = READ_COMMITTED if offset["isolation"] else READ_UNCOMMITTED
            return cls(str(offset["member"]), ranges, str(offset["order"]), isolation)
        except (AttributeError, KeyError, TypeError, ValueError):
            raise ConfigError(
                "the checkpoint does not hold leases of a share group, so it belongs to another source: use a new"
                " checkpointLocation"
            ) from None


def _encode(ranges: Sequence[RangeLease]) -> str:
    end, pieces = 0, []
    for first, last, delivery_count in ranges:
        count = "" if delivery_count == 1 else f"*{delivery_count}"
        pieces.append(f"{first - end}+{last - first + 1}{count}")
        end = last + 1
    return ",".join(pieces)


def _decode(text: str) -> list[RangeLease]:
    end = 0
    found: list[RangeLease] = []
    for piece in text.split(","):
        match = _RANGE.fullmatch(piece)
        if match is None:
            raise ValueError(piece)
        first = end + int(match[1])
        end = first + int(match[2])
        if end <= first or len(found) >= RANGES_MAX:
            raise ValueError(piece)
        found.append(RangeLease(first, end - 1, int(match[3] or 1)))
    return found


def first_ranges(
    ranges: Mapping[TopicPartition, Sequence[RangeLease]], ranges_max: int = RANGES_MAX
) -> dict[TopicPartition, list[RangeLease]]:
    """Return at most `ranges_max` of the ranges: as many of each partition."""
    left, kept = ranges_max, {}
    by_size = sorted(ranges, key=lambda place: (len(ranges[place]), place))
    for position, place in enumerate(by_size):
        share = left // (len(by_size) - position)
        kept[place] = [*ranges[place][:share]]
        left -= len(kept[place])
    return {place: found for place, found in kept.items() if found}


def missing_records(wanted: Iterable[RangeLease], *found: Iterable[RangeLease]) -> int:
    """Return how many records of `wanted` are in none of the other lists, which have only such records, each once."""
    return sum(each.size for each in wanted) - sum(each.size for ranges in found for each in ranges)


def without(wanted: Sequence[RangeLease], others: Sequence[RangeLease]) -> list[RangeLease]:
    """Return the parts of ascending ranges that are not in the others, which are ascending, too."""
    left: list[RangeLease] = []
    at = 0
    for first, last, delivery_count in wanted:
        begin = first
        while at < len(others) and others[at].last < begin:
            at += 1
        position = at
        while position < len(others) and others[position].first <= last:
            if others[position].first > begin:
                left.append(RangeLease(begin, others[position].first - 1, delivery_count))
            begin = max(begin, others[position].last + 1)
            position += 1
        if begin <= last:
            left.append(RangeLease(begin, last, delivery_count))
    return left


def plan_tasks(
    batch: LeasedBatch, *, records_per_task: int | None, topic_ids: Mapping[str, bytes]
) -> list[LeasedTask]:
    """Divide the records of a batch into tasks of at most `records_per_task` records; None: into `DEFAULT_TASKS`. In
    order by partition, into one task for each partition."""
    if batch.order == ORDER_PARTITION:
        return [
            LeasedTask((_part(place, ranges, topic_ids),), batch.member, batch.isolation)
            for place, ranges in sorted(batch.ranges.items())
            if ranges
        ]
    total = batch.records
    size = max(records_per_task or -(-total // DEFAULT_TASKS), -(-total // TASKS_MAX), 1)
    tasks: list[LeasedTask] = []
    parts: list[LeasedPart] = []
    left = size
    for place in sorted(batch.ranges):
        own: list[RangeLease] = []
        for first, last, delivery_count in batch.ranges[place]:
            begin = first
            while begin <= last:
                end = min(last, begin + left - 1)
                own.append(RangeLease(begin, end, delivery_count))
                left -= end - begin + 1
                begin = end + 1
                if not left:
                    parts.append(_part(place, own, topic_ids))
                    tasks.append(LeasedTask(tuple(parts), batch.member, batch.isolation))
                    parts, own, left = [], [], size
        if own:
            parts.append(_part(place, own, topic_ids))
    if parts:
        tasks.append(LeasedTask(tuple(parts), batch.member, batch.isolation))
    return tasks


def _part(place: TopicPartition, ranges: Sequence[RangeLease], topic_ids: Mapping[str, bytes]) -> LeasedPart:
    return LeasedPart(*place, topic_ids.get(place.topic, NO_TOPIC_ID), tuple(ranges))


def spans(ranges: Sequence[RangeLease]) -> Iterator[Sequence[RangeLease]]:
    """Yield the ranges in groups that are read together: with at most `GAP_MAX` offsets between two of them."""
    begin = 0
    for at in range(1, len(ranges)):
        if ranges[at].first - ranges[at - 1].last > GAP_MAX:
            yield ranges[begin:at]
            begin = at
    if ranges:
        yield ranges[begin:]
