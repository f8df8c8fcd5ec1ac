"""The ranges of a batch as an offset of Spark, and their division into tasks."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mansio.errors import ConfigError
from mansio.net.range_leases import RangeLease
from mansio.spark.share.leased_ranges import (
    DEFAULT_TASKS,
    GAP_MAX,
    RANGES_MAX,
    LeasedBatch,
    first_ranges,
    missing_records,
    plan_tasks,
    spans,
    without,
)
from mansio.wire.field_values import READ_COMMITTED, READ_UNCOMMITTED
from mansio.wire.topic_partition import TopicPartition
from support.tiers import examples

PLACES = [TopicPartition(topic, partition) for topic in ("a", "b") for partition in (0, 3)]


@st.composite
def range_lists(draw: st.DrawFn) -> list[RangeLease]:
    begin, found = draw(st.integers(0, 2**62)), []
    for gap, size, count in draw(
        st.lists(st.tuples(st.integers(0, 3_000), st.integers(1, 50), st.integers(1, 4)), max_size=12)
    ):
        found.append(RangeLease(begin + gap, begin + gap + size - 1, count))
        begin += gap + size
    return found


RANGES = range_lists()
BATCHES = st.builds(
    LeasedBatch,
    st.just("spark-1"),
    st.dictionaries(st.sampled_from(PLACES), RANGES.filter(bool)),
    st.sampled_from(("none", "key", "partition")),
    st.sampled_from((READ_COMMITTED, READ_UNCOMMITTED)),
)


def records(ranges: list[RangeLease]) -> list[tuple[int, int]]:
    return [(o, each.delivery_count) for each in ranges for o in range(each.first, each.last + 1)]


@settings(max_examples=examples(60, 500))
@given(BATCHES)
def test_an_offset_comes_back_from_sparks_log(batch: LeasedBatch) -> None:
    text = json.dumps(batch.to_json())
    assert LeasedBatch.from_json(json.loads(text)) == batch
    assert json.dumps(LeasedBatch.from_json(json.loads(text)).to_json()) == text


def test_the_offset_before_the_first_batch_is_empty() -> None:
    assert LeasedBatch().to_json() == {}
    assert LeasedBatch.from_json({}) == LeasedBatch()


def test_an_offset_of_many_ranges_is_short_enough_for_sparks_log() -> None:
    ranges = [RangeLease(10**15 + 10_000 * at, 10**15 + 10_000 * at, 3) for at in range(RANGES_MAX)]
    text = json.dumps(LeasedBatch("spark-" + 32 * "0", {PLACES[0]: ranges}, "none").to_json())
    assert len(text) < 256 << 10


@pytest.mark.parametrize(
    "offset",
    [
        {"topic": {"0": 5}},
        {"member": "m", "isolation": 0, "order": "none", "topics": {"a": {"0": "1-2"}}},
        {"member": "m", "isolation": 0, "order": "none", "topics": {"a": {"0": "1+0"}}},
        {"member": "m", "isolation": 0, "order": "none", "topics": {"a": {"x": "1+1"}}},
    ],
)
def test_the_checkpoint_of_another_source_is_refused(offset: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="another source"):
        LeasedBatch.from_json(offset)


@settings(max_examples=examples(60, 500))
@given(BATCHES, st.none() | st.integers(1, 100))
def test_tasks_have_each_leased_record_once(batch: LeasedBatch, size: int | None) -> None:
    tasks = plan_tasks(batch, records_per_task=size, topic_ids={"a": b"x" * 16})
    found: dict[TopicPartition, list[tuple[int, int]]] = {}
    for task in tasks:
        assert (task.member, task.isolation) == (batch.member, batch.isolation)
        count = 0
        for part in task.parts:
            place = TopicPartition(part.topic, part.partition)
            found.setdefault(place, []).extend(records([*part.ranges]))
            count += sum(each.size for each in part.ranges)
        assert count
        if batch.order != "partition":
            assert count <= (size or -(-batch.records // DEFAULT_TASKS))
    assert found == {place: records([*ranges]) for place, ranges in batch.ranges.items()}
    if batch.order == "partition":
        assert len(tasks) == len(batch.ranges)


@settings(max_examples=examples(60, 500))
@given(RANGES, st.data())
def test_what_is_left_of_ranges(ranges: list[RangeLease], data: st.DataObject) -> None:
    taken = []
    for first, last, count in ranges:
        begin = data.draw(st.integers(first, last + 1))
        end = data.draw(st.integers(begin - 1, last))
        if begin <= end:
            taken.append(RangeLease(begin, end, count + data.draw(st.integers(0, 1))))
    left = without(ranges, taken)
    offsets = {o for o, _ in records(taken)}
    assert records(left) == [each for each in records(ranges) if each[0] not in offsets]
    assert missing_records(ranges, taken) == len(records(left))


@settings(max_examples=examples(60, 500))
@given(RANGES)
def test_ranges_that_are_read_together_are_near(ranges: list[RangeLease]) -> None:
    groups = [[*group] for group in spans(ranges)]
    assert [each for group in groups for each in group] == ranges
    for group in groups:
        assert all(after.first - before.last <= GAP_MAX for before, after in itertools.pairwise(group))
    for one, other in itertools.pairwise(groups):
        assert other[0].first - one[-1].last > GAP_MAX


@settings(max_examples=examples(60, 500))
@given(st.dictionaries(st.sampled_from(PLACES), RANGES), st.integers(1, 40))
def test_a_bounded_batch_has_the_first_ranges_of_each_partition(
    ranges: dict[TopicPartition, list[RangeLease]], most: int
) -> None:
    kept = first_ranges(ranges, most)
    assert sum(map(len, kept.values())) == min(most, sum(map(len, ranges.values())))
    assert all(own == ranges[place][: len(own)] for place, own in kept.items())
