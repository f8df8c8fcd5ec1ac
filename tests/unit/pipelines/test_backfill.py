"""Time ranges of a backfilled table, and its columns, without Spark and a broker."""

from __future__ import annotations

from itertools import permutations

import pytest

from mansio.errors import ConfigError, InvalidRequest
from mansio.iceberg.result_table.backfill_ranges import (
    BackfilledRange,
    TimeRange,
    format_ranges,
    parse_ranges,
    with_range,
)
from mansio.pipelines.backfilling.backfill import may_lack_records

DAY_MS = 86_400_000


def of_day(
    day: int, days: int = 1, pipeline: str = "p", topics: tuple[str, ...] = ("a", "b")
) -> BackfilledRange:
    return BackfilledRange(pipeline, topics, TimeRange(day * DAY_MS, (day + days) * DAY_MS))


def test_ranges_are_kept_in_order_whatever_the_order_of_runs_and_a_repeat_adds_nothing() -> None:
    days = [of_day(1), of_day(2), of_day(4, 2)]
    for order in permutations(days):
        known: tuple[BackfilledRange, ...] = ()
        for one in (*order, *order):
            known = with_range(known, one, "t").ranges
        assert known == tuple(days)
        assert parse_ranges(format_ranges(known)) == known
    assert parse_ranges(None) == ()


def test_range_that_overlaps_another_or_is_of_another_pipeline_is_refused() -> None:
    known = (of_day(1), of_day(3))
    for wrong in (of_day(0, 2), of_day(1, 2), of_day(3, 2), of_day(0, 9)):
        with pytest.raises(InvalidRequest, match="table t already has the records of 1970-01-0"):
            with_range(known, wrong, "t")
    for other in (of_day(5, pipeline="q"), of_day(5, topics=("a",))):
        with pytest.raises(InvalidRequest, match="has rows of pipeline p over a, b, not of"):
            with_range(known, other, "t")
    with pytest.raises(InvalidRequest, match="later than its begin"):
        TimeRange(5, 5)
    with pytest.raises(InvalidRequest, match="the maximum"):
        with_range([of_day(day) for day in range(1_000)], of_day(1_001), "t")
    with pytest.raises(ConfigError, match=r"mansio\.backfill\.ranges cannot be read"):
        parse_ranges('[{"pipeline": 1}]')


def test_extended_range_replaces_the_ranges_that_it_contains_and_no_others() -> None:
    known = (of_day(1), of_day(3), of_day(5))
    longer = of_day(3, 2)
    with pytest.raises(InvalidRequest, match="--extend to replace them by those of the longer time"):
        with_range(known, longer, "t")
    update = with_range(known, longer, "t", extends=True)
    assert update.ranges == (of_day(1), longer, of_day(5))
    assert set(update.replaced) == {of_day(3), longer}
    for one, is_replaced in ((of_day(3), True), (longer, True), (of_day(1), False), (of_day(5), False)):
        assert update.replaces_file(f"file:///t/{one.file_prefix}-0.parquet") is is_replaced
    assert with_range(update.ranges, longer, "t", extends=True).ranges == update.ranges, "again"
    assert with_range(known, of_day(0, 9), "t", extends=True).ranges == (of_day(0, 9),)
    for partly in (of_day(1, 3).times, of_day(4, 2).times):
        wrong = BackfilledRange("p", ("a", "b"), TimeRange(partly.from_ms + 1, partly.to_ms - 1))
        with pytest.raises(InvalidRequest, match="overlap") as refused:
            with_range(known, wrong, "t", extends=True)
        assert "--extend" not in refused.value.message


def test_files_are_found_by_the_id_of_their_range_and_the_id_is_stable() -> None:
    one, other = of_day(1), of_day(2)
    path = f"file:///lake/mansio/t/data/{one.file_prefix}-0123.parquet"
    assert one.owns_file(path)
    assert not other.owns_file(path)
    assert one.id == of_day(1, topics=("b", "a")).id == "547a313878460dd7"
    assert str(one.times) == "1970-01-02T00:00:00Z to 1970-01-03T00:00:00Z"


@pytest.mark.parametrize(
    ("start", "end", "first", "lacks"),
    [
        (0, 10, 0, False),  # nothing was deleted
        (5, 10, 5, True),  # the range may begin before what is left
        (5, 10, 7, False),  # an older record is left
        (5, 10, -1, False),  # all that is left is older
        (5, 5, -1, True),  # nothing is left
        (0, 0, -1, False),
    ],
)
def test_deleted_records_are_noticed_if_they_may_belong_to_the_range(
    start: int, end: int, first: int, lacks: bool
) -> None:
    assert may_lack_records(start, end, first) is lacks
