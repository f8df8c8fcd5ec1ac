"""Read plans: offset ranges become tasks, without a broker."""

from __future__ import annotations

import pickle

import pytest

from mansio.errors import ConfigError
from mansio.spark.source.read_plan import OffsetRange, TaskRange, plan_ranges
from mansio.wire.topic_partition import TopicPartition

A0 = TopicPartition("a", 0)


def test_a_plan_of_too_many_tasks_is_refused() -> None:
    with pytest.raises(ConfigError, match="raise maxRecordsPerPartition"):
        plan_ranges({A0: OffsetRange(0, 1 << 40)}, records_max=1)


def test_a_range_travels_to_its_task() -> None:
    one = plan_ranges({A0: OffsetRange(3, 9, b"x" * 16)})[0]
    assert pickle.loads(pickle.dumps(one)) == one == TaskRange("a", 0, 3, 9, b"x" * 16)
