"""Invariants of every assignor, for random groups."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mansio.client.group.assignors import (
    ASSIGNORS,
    Assignments,
    Member,
    assign_cooperative_sticky,
    assign_range,
    assign_round_robin,
    assign_sticky,
)
from mansio.client.types import TopicPartition

TOPICS = ("a", "b", "c", "d")
counts = st.dictionaries(st.sampled_from(TOPICS), st.integers(0, 9))
subscribed = st.lists(st.sampled_from(TOPICS), unique=True, min_size=1).map(tuple)
owned = st.lists(
    st.builds(TopicPartition, st.sampled_from(TOPICS), st.integers(0, 9)), unique=True, max_size=8
).map(tuple)


@st.composite
def groups(draw: Any) -> list[Member]:
    size = draw(st.integers(1, 6))
    return [
        Member(
            f"m{number}",
            draw(subscribed),
            draw(owned),
            draw(st.integers(-1, 3)),
            draw(st.none() | st.just(f"i{number}")),
        )
        for number in range(size)
    ]


def owners(given_to: Assignments) -> dict[TopicPartition, str]:
    found: dict[TopicPartition, str] = {}
    for member, partitions in given_to.items():
        for partition in partitions:
            assert partition not in found, f"{partition} was given twice"
            found[partition] = member
    return found


def wanted(members: list[Member], partition_counts: dict[str, int]) -> set[TopicPartition]:
    topics = {topic for member in members for topic in member.topics}
    return {TopicPartition(t, index) for t in topics for index in range(partition_counts.get(t, 0))}


@given(groups(), counts)
@pytest.mark.parametrize("name", ["range", "roundrobin", "sticky"])
def test_every_partition_is_assigned_to_one_subscribed_member(
    name: str, members: list[Member], partition_counts: dict[str, int]
) -> None:
    given_to = ASSIGNORS[name].assign(members, partition_counts)
    assert set(given_to) == {member.member_id for member in members}
    found = owners(given_to)
    assert set(found) == wanted(members, partition_counts)
    topics = {member.member_id: member.topics for member in members}
    assert all(partition.topic in topics[member] for partition, member in found.items())


@given(groups(), counts)
def test_sticky_is_as_balanced_as_single_moves_allow(
    members: list[Member], partition_counts: dict[str, int]
) -> None:
    given_to = assign_sticky(members, partition_counts)
    topics = {member.member_id: member.topics for member in members}
    for fuller, partitions in given_to.items():
        for partition in partitions:
            for emptier in given_to:
                if partition.topic in topics[emptier]:
                    assert len(given_to[emptier]) + 1 >= len(given_to[fuller])


@given(st.integers(1, 6), st.integers(0, 30), st.data())
def test_sticky_moves_no_more_than_balance_requires(size: int, partitions: int, data: Any) -> None:
    """With one topic and unique owners, what a member may keep is its share, and that it keeps."""
    owner = [data.draw(st.integers(0, size - 1)) for _ in range(partitions)]
    members = [
        Member(f"m{n}", ("a",), tuple(TopicPartition("a", i) for i in range(partitions) if owner[i] == n), 1)
        for n in range(size)
    ]
    given_to = assign_sticky(members, {"a": partitions})
    kept = sum(len(set(given_to[member.member_id]) & set(member.owned_partitions)) for member in members)
    least, larger_shares = divmod(partitions, size)
    loads = sorted((len(member.owned_partitions) for member in members), reverse=True)
    best = sum(min(load, least + (rank < larger_shares)) for rank, load in enumerate(loads))
    assert kept == best
    assert sorted(map(len, given_to.values()), reverse=True) == [
        least + (n < larger_shares) for n in range(size)
    ]


@given(groups(), counts)
def test_cooperative_never_assigns_a_partition_that_another_member_owns(
    members: list[Member], partition_counts: dict[str, int]
) -> None:
    found = owners(assign_cooperative_sticky(members, partition_counts))
    newest: dict[TopicPartition, int] = {}
    for member in members:
        for partition in member.owned_partitions:
            newest[partition] = max(newest.get(partition, -2), member.generation)
    for partition, given_to in found.items():
        holders = [
            m.member_id
            for m in members
            if partition in m.owned_partitions and m.generation == newest[partition]
        ]
        assert not holders or given_to in holders


@given(groups(), counts)
def test_cooperative_rounds_end_with_every_partition_assigned(
    members: list[Member], partition_counts: dict[str, int]
) -> None:
    """Each round members give back what they were not given; then everything they have is theirs."""
    for generation in range(4, 8):
        given_to = assign_cooperative_sticky(members, partition_counts)
        members = [
            Member(m.member_id, m.topics, tuple(given_to[m.member_id]), generation, m.instance_id)
            for m in members
        ]
    assert set(owners({m.member_id: list(m.owned_partitions) for m in members})) == wanted(
        members, partition_counts
    )


def test_range_assigns_contiguous_ranges_and_the_remainder_to_the_first_members() -> None:
    members = [Member("b", ("t",)), Member("a", ("t",)), Member("z", ("t",), instance_id="static")]
    given_to = assign_range(members, {"t": 7})
    assert {m: [p.partition for p in found] for m, found in given_to.items()} == {
        "z": [0, 1, 2],
        "a": [3, 4],
        "b": [5, 6],
    }


def test_round_robin_continues_across_topics() -> None:
    given_to = assign_round_robin([Member("a", ("t", "u")), Member("b", ("t", "u"))], {"t": 3, "u": 3})
    assert [len(found) for found in given_to.values()] == [3, 3]
