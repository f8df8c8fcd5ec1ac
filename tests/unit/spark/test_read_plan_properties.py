"""Read plans of tasks and micro-batches: no offset is read twice and none is left out."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mansio.spark.source.read_plan import OffsetRange, limit_offsets, plan_ranges
from mansio.wire.topic_partition import TopicPartition

partitions = st.builds(TopicPartition, st.sampled_from(["a", "b"]), st.integers(0, 5))
offset_ranges = st.tuples(st.integers(0, 1 << 40), st.integers(0, 2_000)).map(
    lambda s: OffsetRange(s[0], s[0] + s[1])
)
plans = st.dictionaries(partitions, offset_ranges, max_size=8)


@given(plans, st.none() | st.integers(1, 300), st.none() | st.integers(1, 500))
def test_tasks_are_exactly_what_was_to_be_read(
    wanted: dict[TopicPartition, OffsetRange], partitions_min: int | None, records_max: int | None
) -> None:
    ranges = plan_ranges(wanted, partitions_min=partitions_min, records_max=records_max)
    joined: dict[TopicPartition, OffsetRange] = {}
    for one in ranges:
        assert one.start < one.end
        before = joined.get(one.topic_partition)
        assert before is None or before.end == one.start
        joined[one.topic_partition] = OffsetRange(one.start if before is None else before.start, one.end)
    assert joined == {partition: one for partition, one in wanted.items() if one.start < one.end}
    sizes = [one.end - one.start for one in ranges]
    assert records_max is None or all(size <= records_max for size in sizes)
    records = sum(one.end - one.start for one in wanted.values())
    assert len(ranges) >= min(partitions_min or 0, records)
    if partitions_min is None and records_max is None:
        assert len(ranges) == len(joined)


@given(plans, st.integers(1, 300))
def test_splitting_cuts_the_largest_first(
    wanted: dict[TopicPartition, OffsetRange], partitions_min: int
) -> None:
    """No task could be made smaller by taking a piece from a partition with smaller ones."""
    ranges = plan_ranges(wanted, partitions_min=partitions_min)
    pieces: dict[TopicPartition, int] = {}
    for one in ranges:
        pieces[one.topic_partition] = pieces.get(one.topic_partition, 0) + 1
    size = {partition: one.end - one.start for partition, one in wanted.items()}
    largest = max((size[partition] / count for partition, count in pieces.items()), default=0)
    for partition, count in pieces.items():
        if count > 1:
            assert size[partition] / (count - 1) >= largest


backlogs = st.dictionaries(
    partitions, st.tuples(st.integers(0, 1 << 40), st.integers(-5, 100_000)), min_size=1
)


@given(backlogs, st.integers(1, 50_000))
def test_a_micro_batch_is_as_large_as_allowed_and_starves_no_partition(
    given_: dict[TopicPartition, tuple[int, int]], offsets_max: int
) -> None:
    start = {partition: first for partition, (first, _) in given_.items()}
    latest = {partition: first + size for partition, (first, size) in given_.items()}
    end = limit_offsets(start, latest, offsets_max)
    assert set(end) == set(latest)
    moved = {partition: end[partition] - start[partition] for partition in end}
    behind = {partition: max(0, latest[partition] - start[partition]) for partition in latest}
    waiting = [partition for partition in behind if behind[partition]]
    assert all(0 <= moved[partition] <= behind[partition] for partition in moved)
    assert all(moved[partition] >= 1 for partition in waiting)
    assert sum(moved.values()) == min(sum(behind.values()), max(offsets_max, len(waiting)))


@given(st.dictionaries(partitions, st.integers(1, 50_000), min_size=1), st.integers(20, 5_000))
def test_shares_follow_the_backlog_until_all_is_read(
    behind: dict[TopicPartition, int], offsets_max: int
) -> None:
    """All partitions come to their end within as many batches as the whole backlog takes, and a few."""
    start = dict.fromkeys(behind, 0)
    batches = 0
    while start != behind:
        start = limit_offsets(start, behind, offsets_max)
        batches += 1
    assert batches <= -(-sum(behind.values()) // offsets_max) + 1
