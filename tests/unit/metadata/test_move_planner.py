"""Plans of moves: even loads, racks, drains and replacements, on any cluster."""

from __future__ import annotations

import random
import sys
from collections import Counter
from itertools import combinations
from typing import TYPE_CHECKING

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from mansio.errors import InvalidReplicaAssignment, InvalidReplicationFactor, InvalidRequest
from mansio.metadata.move_planner import (
    Drain,
    Move,
    PlannedBroker,
    PlannedPartition,
    Rebalance,
    Replace,
    copy_seconds,
    incoming_bytes,
    plan_moves,
    startable_moves,
)
from mansio.metadata.topic_plan import UsableBroker, place_replicas

if TYPE_CHECKING:
    from collections.abc import Sequence


NOT_REGISTERED = 99
SIZES = st.sampled_from([0, 1, 7, 100, 100, 100, 1_000, 50_000])


@st.composite
def brokers_of(draw: st.DrawFn, racks: Sequence[str | None] = ("a", "b", "c", None)) -> list[PlannedBroker]:
    given_racks = draw(st.lists(st.sampled_from(racks), min_size=1, max_size=7))
    return [PlannedBroker(node_id, rack) for node_id, rack in enumerate(given_racks, 1)]


def partitions_on(node_ids: Sequence[int], *, calm: bool = True) -> st.SearchStrategy[list[PlannedPartition]]:
    """Up to 40 partitions with replicas anywhere; unless `calm`, some without a leader and some that are moving."""
    replicas = st.lists(st.sampled_from(node_ids), min_size=1, max_size=4, unique=True).map(tuple)
    return st.lists(
        st.tuples(replicas, SIZES, st.just(1) if calm else st.sampled_from([1, 1, 1, 0, 2])), max_size=40
    ).map(
        lambda drawn: [
            PlannedPartition(
                f"topic-{number % 3}",
                number // 3,
                placed,
                size_bytes,
                -1 if not calm and state == 0 else placed[0],
                is_moving=not calm and state == 2,
            )
            for number, (placed, size_bytes, state) in enumerate(drawn)
        ]
    )


@st.composite
def clusters(draw: st.DrawFn) -> tuple[list[PlannedBroker], list[PlannedPartition]]:
    """Any cluster: brokers that are down or gone, partitions that cannot be moved, replicas in the wrong racks."""
    brokers = [
        one._replace(is_usable=draw(st.sampled_from([True, True, False]))) for one in draw(brokers_of())
    ]
    node_ids = [one.node_id for one in brokers]
    return brokers, draw(partitions_on([*node_ids, *node_ids, NOT_REGISTERED], calm=False))


@st.composite
def healthy_clusters(draw: st.DrawFn) -> tuple[list[PlannedBroker], list[PlannedPartition]]:
    brokers = draw(brokers_of())
    return brokers, draw(partitions_on([one.node_id for one in brokers]))


def applied(partitions: Sequence[PlannedPartition], moves: Sequence[Move]) -> list[PlannedPartition]:
    after = {(move.topic, move.partition): move.after for move in moves}
    assert len(after) == len(moves), "a partition moves once"
    return [one._replace(replicas=after.get((one.topic, one.partition), one.replicas)) for one in partitions]


def check_moves(
    brokers: Sequence[PlannedBroker],
    partitions: Sequence[PlannedPartition],
    moves: Sequence[Move],
    *,
    leaving: int | None = None,
) -> None:
    """Check what is true of all moves."""
    usable = {one.node_id for one in brokers if one.is_usable and one.node_id != leaving}
    known = {(one.topic, one.partition): one for one in partitions}
    for move in moves:
        partition = known[move.topic, move.partition]
        assert move.before == partition.replicas != move.after
        assert len(set(move.after)) == len(move.after) == len(move.before)
        assert set(move.added) == set(move.after) - set(move.before) <= usable
        assert move.leader == partition.leader >= 0
        assert not partition.is_moving
        assert move.copied_bytes == partition.size_bytes * len(move.added)
    assert moves == sorted(moves, key=lambda move: (-move.copied_bytes, move.topic, move.partition))


def racks_of(brokers: Sequence[PlannedBroker]) -> dict[int, object]:
    return {one.node_id: one.rack if one.rack is not None else (one.node_id,) for one in brokers}


def counts(partitions: Sequence[PlannedPartition]) -> Counter[int]:
    return Counter(node_id for one in partitions for node_id in one.replicas)


def sizes(partitions: Sequence[PlannedPartition]) -> Counter[int]:
    found: Counter[int] = Counter()
    for one in partitions:
        for node_id in one.replicas:
            found[node_id] += one.size_bytes
    return found


def leads(partitions: Sequence[PlannedPartition]) -> Counter[int]:
    return Counter(one.replicas[0] for one in partitions)


def placed_cluster(
    brokers: int, partitions: int, *, racks: int = 0, seed: int = 1, replication_factor: int = 3
) -> tuple[list[PlannedBroker], list[PlannedPartition]]:
    """A cluster as topics of 50 partitions of different sizes make it."""
    chance = random.Random(seed)
    there = [UsableBroker(one, f"rack-{one % racks}" if racks else None) for one in range(1, brokers + 1)]
    found = []
    for topic in range(partitions // 50):
        placed = place_replicas(50, replication_factor, there, start=chance.randrange(1 << 30))
        for index, replicas in enumerate(placed):
            size_bytes = int(chance.lognormvariate(18, 1.2))
            found.append(PlannedPartition(f"topic-{topic}", index, replicas, size_bytes, replicas[0]))
    return [PlannedBroker(one.node_id, one.rack) for one in there], found


# -- any cluster --------


@given(cluster=clusters(), chance=st.randoms(use_true_random=False))
def test_a_rebalanced_cluster_needs_no_rebalance_and_no_order_of_arguments_matters(
    cluster: tuple[list[PlannedBroker], list[PlannedPartition]], chance: random.Random
) -> None:
    brokers, partitions = cluster
    moves = plan_moves(brokers, partitions, Rebalance())
    check_moves(brokers, partitions, moves)
    assert plan_moves(brokers, applied(partitions, moves), Rebalance()) == []
    shuffled = chance.sample(partitions, len(partitions))
    assert plan_moves(brokers[::-1], shuffled, Rebalance()) == moves


@given(cluster=healthy_clusters())
def test_a_rebalance_leaves_no_two_replicas_in_a_rack_where_there_are_enough_racks(
    cluster: tuple[list[PlannedBroker], list[PlannedPartition]],
) -> None:
    brokers, partitions = cluster
    racks = racks_of(brokers)
    for one in applied(partitions, plan_moves(brokers, partitions, Rebalance())):
        used = Counter(racks[node_id] for node_id in one.replicas)
        assert len(used) == min(len(one.replicas), len(set(racks.values())))
        for full, other in combinations(set(racks.values()), 2):
            room = min(
                sum(rack == full for rack in racks.values()), sum(rack == other for rack in racks.values())
            )
            assert abs(used[full] - used[other]) <= 1 or min(used[full], used[other]) >= room


@given(data=st.data(), brokers=brokers_of(racks=[None]))
def test_without_racks_the_numbers_of_replicas_differ_by_one_at_most(
    data: st.DataObject, brokers: list[PlannedBroker]
) -> None:
    partitions = data.draw(partitions_on([one.node_id for one in brokers]))
    after = applied(partitions, plan_moves(brokers, partitions, Rebalance()))
    numbers = [counts(after)[one.node_id] for one in brokers]
    assert max(numbers) - min(numbers) <= 1


@given(data=st.data(), brokers=brokers_of(racks=[None]))
def test_no_leadership_can_go_from_a_broker_with_many_to_one_with_few(
    data: st.DataObject, brokers: list[PlannedBroker]
) -> None:
    partitions = data.draw(partitions_on([one.node_id for one in brokers]))
    partitions = [one for one in partitions if len(one.replicas) > 1]
    after = applied(partitions, plan_moves(brokers, partitions, Rebalance()))
    led = leads(after)
    mean = len(after) / len(brokers)
    for one in after:
        for other in one.replicas[1:]:
            is_far = led[one.replicas[0]] >= mean + 1 or led[other] <= mean - 1
            assert not is_far or led[one.replicas[0]] - led[other] <= 1


@given(cluster=clusters(), data=st.data())
def test_a_drained_broker_has_nothing_and_others_exchange_nothing(
    cluster: tuple[list[PlannedBroker], list[PlannedPartition]], data: st.DataObject
) -> None:
    brokers, partitions = cluster
    leaving = data.draw(st.sampled_from([one.node_id for one in brokers]))
    free = {one.node_id for one in brokers if one.is_usable and one.node_id != leaving}
    movable = [one for one in partitions if one.leader >= 0 and not one.is_moving and leaving in one.replicas]
    try:
        moves = plan_moves(brokers, partitions, Drain(leaving))
    except InvalidReplicationFactor:
        assert any(free <= set(one.replicas) for one in movable)
        return
    assert not any(free <= set(one.replicas) for one in movable), "there is no broker for it"
    check_moves(brokers, partitions, moves, leaving=leaving)
    assert {(move.topic, move.partition) for move in moves} == {(one.topic, one.partition) for one in movable}
    for move in moves:
        assert set(move.before) - set(move.after) == {leaving}
    assert plan_moves(brokers, applied(partitions, moves), Drain(leaving)) == []


@given(cluster=clusters(), data=st.data())
def test_a_replacement_has_the_positions_of_the_one_that_left(
    cluster: tuple[list[PlannedBroker], list[PlannedPartition]], data: st.DataObject
) -> None:
    brokers, partitions = cluster
    node_ids = [one.node_id for one in brokers]
    old = data.draw(st.sampled_from(node_ids))
    usable = [one.node_id for one in brokers if one.node_id != old and one.is_usable]
    assume(usable)
    new = data.draw(st.sampled_from(usable))
    try:
        moves = plan_moves(brokers, partitions, Replace(old, new))
    except (InvalidReplicaAssignment, InvalidReplicationFactor):
        return
    check_moves(brokers, partitions, moves, leaving=old)
    for move in moves:
        if new not in move.before:
            assert move.after == tuple(new if one == old else one for one in move.before)
    after = applied(partitions, moves)
    assert not any(old in one.replicas for one in after if one.leader >= 0 and not one.is_moving)
    assert plan_moves(brokers, after, Replace(old, new)) == []


def misplaced(brokers: Sequence[PlannedBroker], partitions: Sequence[PlannedPartition]) -> int:
    """Number of replicas that are in a rack with another one of their partition, beyond what the racks make
    necessary."""
    racks = racks_of(brokers)
    number = len(set(racks.values()))
    return sum(
        min(len(one.replicas), number) - len({racks[node_id] for node_id in one.replicas})
        for one in partitions
    )


@pytest.mark.parametrize("seed", range(60))
def test_larger_clusters_are_balanced_once_and_for_all(seed: int) -> None:
    """A new plan counts everything afresh, and the first one kept its numbers while it changed."""
    chance = random.Random(seed)
    size, rack_count = chance.randint(4, 9), chance.randint(1, 4)
    names = [f"rack-{number}" if rack_count > 1 else None for number in range(rack_count)]
    brokers = [PlannedBroker(number + 1, chance.choice(names)) for number in range(size)]
    partitions = []
    for index in range(80):
        replicas = tuple(chance.sample(range(1, size + 1), chance.randint(1, 4)))
        size_bytes = int(1_000 * chance.paretovariate(0.7))
        partitions.append(PlannedPartition(f"topic-{index % 4}", index, replicas, size_bytes, replicas[0]))
    after = applied(partitions, plan_moves(brokers, partitions, Rebalance()))
    assert misplaced(brokers, after) == 0
    assert plan_moves(brokers, after, Rebalance()) == []


# -- certain clusters --------


def test_a_fourth_broker_gets_a_quarter_of_everything() -> None:
    brokers, partitions = placed_cluster(3, 1_000)
    brokers.append(PlannedBroker(4, None))
    moves = plan_moves(brokers, partitions, Rebalance())
    after = applied(partitions, moves)
    total_bytes = sum(sizes(partitions).values())
    assert 0.22 <= sum(move.copied_bytes for move in moves) / total_bytes <= 0.28
    for node_id in range(1, 5):
        assert counts(after)[node_id] == pytest.approx(750, rel=0.021)
        assert sizes(after)[node_id] == pytest.approx(total_bytes / 4, rel=0.051)
        assert leads(after)[node_id] == pytest.approx(250, rel=0.025)
    assert plan_moves(brokers, partitions[:0], Rebalance()) == []


def test_with_three_racks_a_fourth_broker_relieves_its_rack_mate_only() -> None:
    brokers, partitions = placed_cluster(3, 300, racks=3)
    brokers.append(PlannedBroker(4, brokers[0].rack))
    after = applied(partitions, plan_moves(brokers, partitions, Rebalance()))
    assert [counts(after)[node_id] for node_id in (2, 3)] == [300, 300]
    assert {counts(after)[node_id] for node_id in (1, 4)} <= set(range(147, 154))
    assert leads(after)[4] == pytest.approx(75, abs=2)


def test_empty_partitions_of_each_topic_are_spread() -> None:
    brokers, partitions = placed_cluster(3, 300)
    partitions = [one._replace(size_bytes=0) for one in partitions]
    brokers.append(PlannedBroker(4, None))
    after = applied(partitions, plan_moves(brokers, partitions, Rebalance()))
    for topic in {one.topic for one in partitions}:
        assert 25 <= counts([one for one in after if one.topic == topic])[4] <= 50


def test_large_partitions_are_spread_although_the_numbers_are_even() -> None:
    brokers = [PlannedBroker(node_id, None) for node_id in (1, 2, 3)]
    partitions = [
        PlannedPartition("t", index, (index % 3 + 1,), 1_000 if index % 3 == 0 else 10, index % 3 + 1)
        for index in range(30)
    ]
    moves = plan_moves(brokers, partitions, Rebalance())
    after = applied(partitions, moves)
    assert max(sizes(after).values()) <= 4_100
    assert set(counts(after).values()) == {10}
    assert sum(move.copied_bytes for move in moves) <= 7_000


def test_one_partition_larger_than_the_mean_moves_nothing_to_and_fro() -> None:
    brokers = [PlannedBroker(1, None), PlannedBroker(2, None)]
    partitions = [PlannedPartition("t", 0, (1,), 1_000_000, 1), PlannedPartition("t", 1, (2,), 5, 2)]
    assert plan_moves(brokers, partitions, Rebalance()) == []


def test_a_broker_that_is_down_keeps_its_replicas_and_gets_none() -> None:
    brokers = [PlannedBroker(1, None), PlannedBroker(2, None, is_usable=False), PlannedBroker(3, None)]
    partitions = [PlannedPartition("t", index, (1, 2), 10, 1) for index in range(10)]
    after = applied(partitions, plan_moves(brokers, partitions, Rebalance()))
    assert counts(after) == {1: 5, 2: 10, 3: 5}


def test_goals_that_cannot_be_reached_are_refused() -> None:
    brokers = [
        PlannedBroker(1, "a"),
        PlannedBroker(2, "b"),
        PlannedBroker(3, "a"),
        PlannedBroker(4, "c", False),
    ]
    partitions = [PlannedPartition("t", 0, (1, 2), 10, 1)]
    with pytest.raises(InvalidRequest, match="no broker 9"):
        plan_moves(brokers, partitions, Drain(9))
    with pytest.raises(InvalidRequest, match="broker 4 is not there, or may not"):
        plan_moves(brokers, partitions, Replace(1, 4))
    with pytest.raises(InvalidRequest, match="broker 1 is not there, or may not"):
        plan_moves(brokers, partitions, Replace(1, 1))
    with pytest.raises(InvalidReplicationFactor, match="t-0 has 2 replica"):
        plan_moves(brokers[:2], partitions, Drain(1))
    with pytest.raises(InvalidReplicaAssignment, match="rack of broker 3"):
        plan_moves([*brokers, PlannedBroker(5, "b")], partitions, Replace(2, 3))
    (move,) = plan_moves(brokers, partitions, Replace(1, 3))
    assert move.after == (3, 2)


def test_a_replica_that_the_replacement_has_already_goes_elsewhere() -> None:
    brokers = [PlannedBroker(node_id, None) for node_id in (1, 2, 3)]
    partitions = [PlannedPartition("t", 0, (1, 2), 10, 1), PlannedPartition("t", 1, (2, 3), 10, 2)]
    moves = plan_moves(brokers, partitions, Replace(2, 3))
    assert {move.partition: move.after for move in moves} == {0: (1, 3), 1: (1, 3)}


def test_a_broker_that_is_gone_is_drained() -> None:
    brokers = [PlannedBroker(node_id, None) for node_id in (1, 2)]
    partitions = [PlannedPartition("t", index, (1, NOT_REGISTERED), 10, 1) for index in range(4)]
    moves = plan_moves(brokers, partitions, Drain(NOT_REGISTERED))
    assert {move.partition for move in moves if set(move.after) == {1, 2}} == {0, 1, 2, 3}


# -- execution --------


def test_moves_start_while_brokers_have_room_and_all_end() -> None:
    brokers, partitions = placed_cluster(4, 400)
    brokers += [PlannedBroker(5, None), PlannedBroker(6, None)]
    pending = plan_moves(brokers, partitions, Rebalance())
    running: list[Move] = []
    waves = 0
    while pending:
        started = startable_moves(pending, running)
        assert started, "a wave that starts nothing would never end"
        into = Counter(node_id for move in (*running, *started) for node_id in move.added)
        out: Counter[int] = Counter()
        for move in (*running, *started):
            out[move.leader] += len(move.added)
        assert max(into.values(), default=0) <= 5
        assert max(out.values(), default=0) <= 5
        pending = [move for move in pending if move not in started]
        running = [*running, *started][3:]  # those that began first end first
        waves += 1
    assert waves > 10


def test_a_move_of_many_replicas_starts_alone_and_reorders_start_at_once() -> None:
    large = Move("t", 0, (1, 2, 3, 4, 5, 6), (7, 8, 9, 10, 11, 12), 1, 60)
    small = Move("t", 1, (1,), (7,), 1, 10)
    reordered = Move("t", 2, (1, 2), (2, 1), 1, 0)
    assert startable_moves([large, small, reordered], []) == [large, reordered]
    assert startable_moves([large], [small]) == []


def test_time_and_bytes_are_those_of_the_broker_that_copies_most() -> None:
    moves = [Move("t", 0, (1,), (3,), 1, 600), Move("t", 1, (1, 2), (3, 4), 1, 400)]
    assert incoming_bytes(moves) == {3: 800, 4: 200}
    assert copy_seconds(moves, 100) == 8
    assert copy_seconds([], 100) == 0


@pytest.mark.full
def test_the_effort_of_a_plan_grows_little_faster_than_the_number_of_partitions() -> None:
    def calls(partitions: int) -> int:
        brokers, placed = placed_cluster(20, partitions, racks=5)
        brokers.append(PlannedBroker(21, brokers[0].rack))
        counted = 0

        def count(_frame: object, event: str, _argument: object) -> None:
            nonlocal counted
            counted += event == "call"

        sys.setprofile(count)
        try:
            assert plan_moves(brokers, placed, Rebalance())
        finally:
            sys.setprofile(None)
        return counted

    assert calls(20_000) <= 2.5 * calls(10_000)
