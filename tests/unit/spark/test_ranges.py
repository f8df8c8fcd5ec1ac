"""What filters leave out, and what they must not."""

from __future__ import annotations

import pickle
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
    Not,
    StringStartsWith,
)

from mansio.errors import ConfigError
from mansio.spark.filters import Span, prune, time_span_ms
from mansio.spark.ranges import OffsetRange, Range, plan_ranges
from mansio.wire.topic_partition import TopicPartition

A0, A1, B0 = TopicPartition("a", 0), TopicPartition("a", 1), TopicPartition("b", 0)
ALL = {A0: OffsetRange(0, 100), A1: OffsetRange(50, 200), B0: OffsetRange(0, 10)}


def on(column: str) -> tuple[str, ...]:
    return (column,)


CASES: list[tuple[list[Filter], dict[TopicPartition, tuple[int, int]]]] = [
    ([], {A0: (0, 100), A1: (50, 200), B0: (0, 10)}),
    ([EqualTo(on("partition"), 1)], {A1: (50, 200)}),
    ([EqualTo(on("topic"), "b"), IsNotNull(on("topic"))], {B0: (0, 10)}),
    ([In(on("partition"), (1, 7))], {A1: (50, 200)}),
    ([Not(EqualTo(on("partition"), 0))], {A1: (50, 200)}),
    ([Not(In(on("topic"), ("a",)))], {B0: (0, 10)}),
    ([GreaterThan(on("partition"), 0)], {A1: (50, 200)}),
    ([LessThanOrEqual(on("partition"), 0)], {A0: (0, 100), B0: (0, 10)}),
    ([EqualTo(on("offset"), 60)], {A0: (60, 61), A1: (60, 61)}),
    ([GreaterThan(on("offset"), 98)], {A0: (99, 100), A1: (99, 200)}),
    ([GreaterThanOrEqual(on("offset"), 99), LessThan(on("offset"), 101)], {A0: (99, 100), A1: (99, 101)}),
    ([LessThanOrEqual(on("offset"), 50)], {A0: (0, 51), A1: (50, 51), B0: (0, 10)}),
    ([In(on("offset"), (5, 70))], {A0: (5, 71), A1: (50, 71), B0: (5, 10)}),
    ([EqualNullSafe(on("partition"), 1)], {A1: (50, 200)}),
    # What is not understood leaves out nothing.
    (
        [Not(GreaterThan(on("offset"), 5)), Not(EqualTo(on("offset"), 5))],
        {A0: (0, 100), A1: (50, 200), B0: (0, 10)},
    ),
    ([EqualTo(on("partition"), None), In(on("offset"), ())], {A0: (0, 100), A1: (50, 200), B0: (0, 10)}),
    ([StringStartsWith(on("topic"), "b")], {A0: (0, 100), A1: (50, 200), B0: (0, 10)}),
    (
        [EqualTo(("headers", "offset"), 5), EqualTo(on("value"), b"1")],
        {A0: (0, 100), A1: (50, 200), B0: (0, 10)},
    ),
]


@pytest.mark.parametrize(("filters", "expected"), CASES, ids=[str(filters) for filters, _ in CASES])
def test_filters_leave_out_what_cannot_match_and_nothing_else(
    filters: list[Filter], expected: dict[TopicPartition, tuple[int, int]]
) -> None:
    assert {partition: (one.start, one.end) for partition, one in prune(ALL, filters).items()} == expected


def test_times_are_bounds_in_milliseconds_that_let_equal_ones_through() -> None:
    moment = datetime(2024, 1, 1, tzinfo=ZoneInfo("UTC"))
    ms = int(moment.timestamp() * 1000)
    later = moment + timedelta(microseconds=1_500)
    assert time_span_ms([GreaterThan(on("timestamp"), moment)]) == Span(ms, None)
    assert time_span_ms(
        [GreaterThanOrEqual(on("timestamp"), later), LessThan(on("timestamp"), later)]
    ) == Span(ms + 1, ms + 1)
    assert time_span_ms([EqualTo(on("timestamp"), moment.astimezone(ZoneInfo("Asia/Tokyo")))]) == Span(ms, ms)
    assert time_span_ms([EqualTo(on("timestamp"), datetime(2024, 1, 1))]) == Span()  # noqa: DTZ001  # of what zone?
    assert time_span_ms([LessThan(on("timestamp"), datetime(1960, 1, 1, tzinfo=UTC))]).high < 0


def test_a_plan_of_too_many_tasks_is_refused() -> None:
    with pytest.raises(ConfigError, match="raise maxRecordsPerPartition"):
        plan_ranges({A0: OffsetRange(0, 1 << 40)}, records_max=1)


def test_a_range_travels_to_its_task() -> None:
    one = plan_ranges({A0: OffsetRange(3, 9, b"x" * 16)})[0]
    assert pickle.loads(pickle.dumps(one)) == one == Range("a", 0, 3, 9, b"x" * 16)
