"""Read plans: offset ranges become tasks, without a broker."""

from __future__ import annotations

import pickle

import pytest

from mansio.errors import ConfigError
from mansio.spark.source.read_plan import (
    GROUPED_OFFSETS_MAX,
    OffsetRange,
    TaskRange,
    group_short_ranges,
    plan_ranges,
)
from mansio.wire.topic_partition import TopicPartition

A0 = TopicPartition("a", 0)


def test_a_plan_of_too_many_tasks_is_refused() -> None:
    with pytest.raises(ConfigError, match="raise maxRecordsPerPartition"):
        plan_ranges({A0: OffsetRange(0, 1 << 40)}, records_max=1)


def test_a_range_travels_to_its_task() -> None:
    one = plan_ranges({A0: OffsetRange(3, 9, b"x" * 16)})[0]
    assert pickle.loads(pickle.dumps(one)) == one == TaskRange("a", 0, 3, 9, b"x" * 16)


def test_short_ranges_share_a_task_and_long_ones_have_their_own() -> None:
    sizes = [1, 2, GROUPED_OFFSETS_MAX - 3, 1, 5_000, 7, 8, GROUPED_OFFSETS_MAX, GROUPED_OFFSETS_MAX + 1]
    ranges = [TaskRange("a", number, 10, 10 + size) for number, size in enumerate(sizes)]
    groups = [task.ranges for task in group_short_ranges(ranges)]
    assert [one for group in groups for one in group] == ranges
    assert [len(group) for group in groups] == [3, 1, 1, 2, 1, 1]
    assert group_short_ranges([]) == []
