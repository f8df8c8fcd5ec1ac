"""Labels of hosts: no plan puts two replicas of a partition on one host, and each broker is a host of its own by
default."""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mansio.errors import InvalidReplicaAssignment, InvalidReplicationFactor, MansioError
from mansio.metadata import reassignment
from mansio.metadata.cluster_view import ClusterView
from mansio.metadata.feature_level import SUPPORTED
from mansio.metadata.model import (
    BROKER_ACTIVE,
    BROKER_FENCED,
    TOPIC_LIVE,
    BrokerEndpoint,
    BrokerState,
    InterBrokerListener,
    PartitionState,
    Registration,
    Topic,
    decode_registration,
    decode_session,
    host_of,
    registration_document,
    session_document,
)
from mansio.metadata.move_planner import (
    Drain,
    Goal,
    Move,
    PlannedBroker,
    PlannedPartition,
    Rebalance,
    Replace,
    plan_moves,
)
from mansio.metadata.topic_plan import (
    ClusterBrokers,
    NewTopic,
    UsableBroker,
    place_replicas,
    plan_growth,
    plan_partitions,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

HOSTS = ("h1", "h2", "h3", "")
"""An empty label: the broker is a host of its own."""


def host(node_id: int, labels: Mapping[int, str]) -> str:
    return labels.get(node_id) or str(node_id)


def brokers_on(labels: Mapping[int, str], away: Sequence[int] = (), *, factor: int = 3) -> ClusterBrokers:
    """Brokers with these labels; those that are `away` are registered only."""
    usable = {
        node_id: BrokerState(node_id, "a", 1, None, node_id, host_label=label)
        for node_id, label in labels.items()
        if node_id not in away
    }
    hosts = {node_id: host(node_id, labels) for node_id in labels}
    return ClusterBrokers(usable, frozenset(labels), factor, 7, hosts)


@given(
    labels=st.lists(st.sampled_from(HOSTS), min_size=1, max_size=8),
    racks=st.lists(st.sampled_from(["a", "b", None]), min_size=8, max_size=8),
    count=st.integers(1, 20),
    start=st.integers(0, 50),
    data=st.data(),
)
def test_placed_replicas_are_on_different_hosts(
    labels: list[str], racks: list[str | None], count: int, start: int, data: st.DataObject
) -> None:
    brokers = [UsableBroker(node_id, racks[node_id], label) for node_id, label in enumerate(labels)]
    known = dict(enumerate(labels))
    hosts = {host(one, known) for one in known}
    factor = data.draw(st.integers(1, len(hosts)))
    for replicas in place_replicas(count, factor, brokers, start=start):
        assert len(replicas) == factor
        assert len({host(one, known) for one in replicas}) == factor


@given(labels=st.lists(st.sampled_from(HOSTS), min_size=2, max_size=8), data=st.data())
def test_offline_brokers_get_replicas_on_other_hosts_only(labels: list[str], data: st.DataObject) -> None:
    known = dict(enumerate(labels, 1))
    hosts = {host(one, known) for one in known}
    away = data.draw(st.lists(st.sampled_from(sorted(known)), max_size=len(known) - 1, unique=True))
    factor = data.draw(st.integers(1, len(hosts)))
    partitions, _ = plan_partitions(NewTopic("t", 9, factor), 1, 1, 100, brokers_on(known, away))
    for partition in partitions:
        assert len(partition.replicas) == factor
        assert len({host(one, known) for one in partition.replicas}) == factor


def test_more_replicas_than_hosts_are_refused() -> None:
    cluster = brokers_on({1: "m", 2: "m", 3: "m"})
    for new in (NewTopic("t", 1, 2), NewTopic("t", 1)):
        with pytest.raises(InvalidReplicationFactor, match=r"3 broker\(s\) are registered on 1 host\(s\)"):
            plan_partitions(new, 1, 1, 100, cluster)
    assert plan_partitions(NewTopic("t", 4, 1), 1, 1, 100, cluster)[1] == 1


def test_assignments_with_two_brokers_of_one_host_are_refused() -> None:
    cluster = brokers_on({1: "m", 2: "m", 3: "n"})
    with pytest.raises(InvalidReplicaAssignment, match="brokers 1 and 2 are on the same host"):
        plan_partitions(NewTopic("t", assignments={0: [1, 2]}), 1, 1, 100, cluster)
    with pytest.raises(InvalidReplicaAssignment, match="same host"):
        plan_growth(
            1,
            2,
            [[2, 1]],
            node_id=1,
            replication_factor=2,
            creatable_partition_count=9,
            cluster_brokers=cluster,
        )
    assert plan_partitions(NewTopic("t", assignments={0: [1, 3]}), 1, 1, 100, cluster)[1] == 2


def view_on(labels: Mapping[int, str], partition: PartitionState) -> tuple[ClusterView, Topic]:
    topic = Topic("t", UUID(int=1), (partition,), len(partition.replicas), {}, False, TOPIC_LIVE, 1)
    brokers = {one: BrokerState(one, "h", 1, None, 100 + one, host_label=labels[one]) for one in labels}
    registrations = {one: Registration(BROKER_ACTIVE, 1, host_label=labels[one]) for one in labels}
    return ClusterView(brokers, registrations, {"t": topic}, {}), topic


@pytest.mark.parametrize(
    ("target", "error"),
    [
        ([1, 2], InvalidReplicaAssignment),
        ([2, 1], InvalidReplicaAssignment),
        ([3, 4], InvalidReplicaAssignment),
        ([1, 3, 4], InvalidReplicationFactor),
    ],
)
def test_a_reassignment_to_the_host_of_another_replica_is_refused(
    target: list[int], error: type[MansioError]
) -> None:
    partition = PartitionState((1,), 1, 0, (1,), leader_broker_epoch=101)
    view, topic = view_on({1: "m", 2: "m", 3: "n", 4: "n"}, partition)
    with pytest.raises(error):
        reassignment.begin(view, topic, 0, target)


def test_replicas_that_are_older_than_the_labels_may_stay_and_be_moved_apart() -> None:
    partition = PartitionState((1, 2), 1, 0, (1, 2), leader_broker_epoch=101)
    view, topic = view_on({1: "m", 2: "m", 3: "n"}, partition)
    assert reassignment.begin(view, topic, 0, [2, 1]) is not None
    moved = reassignment.begin(view, topic, 0, [1, 3])
    assert moved is not None
    assert moved.after.adding == (3,)


def goals(draw: st.DrawFn, node_ids: Sequence[int]) -> Goal:
    kind = draw(st.sampled_from(["rebalance", "drain", "replace"]))
    if kind == "rebalance" or len(node_ids) < 2:
        return Rebalance()
    if kind == "drain":
        return Drain(draw(st.sampled_from(node_ids)))
    return Replace(*draw(st.permutations(node_ids))[:2])


@st.composite
def plans(
    draw: st.DrawFn, *, is_labelled_later: bool = False
) -> tuple[list[PlannedBroker], list[PlannedPartition], Goal]:
    """Brokers on few hosts, with and without racks; partitions with replicas on different hosts, or anywhere if the
    labels are later than they."""
    labels = draw(st.lists(st.sampled_from(HOSTS), min_size=1, max_size=8))
    choices: list[list[str | None]] = [[None], ["a", "b"], ["a", None]]
    racks = draw(st.sampled_from(choices))
    brokers = [
        PlannedBroker(
            node_id, draw(st.sampled_from(racks)), draw(st.sampled_from([True, True, False])), label
        )
        for node_id, label in enumerate(labels, 1)
    ]
    known = dict(enumerate(labels, 1))
    node_ids = sorted(known)
    partitions = []
    for number in range(draw(st.integers(0, 25))):
        replicas: list[int] = []
        for node_id in draw(st.permutations(node_ids))[: draw(st.integers(1, 3))]:
            if is_labelled_later or all(host(node_id, known) != host(other, known) for other in replicas):
                replicas.append(node_id)
        size_bytes = draw(st.sampled_from([0, 1, 100, 5_000]))
        partitions.append(PlannedPartition("t", number, tuple(replicas), size_bytes, replicas[0]))
    return brokers, partitions, goals(draw, node_ids)


@given(plans())
def test_no_plan_puts_two_replicas_on_a_host_and_a_plan_for_its_outcome_is_empty(
    plan: tuple[list[PlannedBroker], list[PlannedPartition], Goal],
) -> None:
    brokers, partitions, goal = plan
    labels = {one.node_id: one.host for one in brokers}
    try:
        moves = plan_moves(brokers, partitions, goal)
    except MansioError:
        return
    for move in moves:
        for one, other in combinations(move.after, 2):
            assert host(one, labels) != host(other, labels), move
    after = {(move.topic, move.partition): move.after for move in moves}
    moved = [
        each._replace(replicas=after.get((each.topic, each.partition), each.replicas)) for each in partitions
    ]
    if isinstance(goal, Rebalance):
        assert plan_moves(brokers, moved, goal) == []


@given(plans(is_labelled_later=True))
def test_plans_for_replicas_that_are_older_than_the_labels_can_be_carried_out(
    plan: tuple[list[PlannedBroker], list[PlannedPartition], Goal],
) -> None:
    brokers, partitions, goal = plan
    labels = {one.node_id: one.host for one in brokers}
    try:
        moves = plan_moves(brokers, partitions, goal)
    except MansioError:
        return
    for move in moves:
        for added in move.added:
            others = [host(one, labels) for one in move.after if one != added]
            assert host(added, labels) not in others, move
    if isinstance(goal, Rebalance):
        after = {move.partition: move.after for move in moves}
        moved = [each._replace(replicas=after.get(each.partition, each.replicas)) for each in partitions]
        assert plan_moves(brokers, moved, goal) == []


@pytest.mark.parametrize("goal", [Drain(1), Replace(1, 5), Rebalance()])
def test_two_replicas_on_a_host_from_before_the_labels_are_moved_apart(goal: Goal) -> None:
    labels = {1: "A", 2: "A", 3: "B", 4: "B", 5: "A"}
    brokers = [PlannedBroker(node_id, "r", True, label) for node_id, label in labels.items()]
    (move,) = plan_moves(brokers, [PlannedPartition("t", 0, (1, 2), 10, 1)], goal)
    assert {labels[node_id] for node_id in move.after} == {"A", "B"}


def test_replicas_of_a_process_that_leaves_go_to_the_others_of_its_host() -> None:
    brokers = [PlannedBroker(node_id, None, True, "m") for node_id in (1, 2, 3)]
    partitions = [PlannedPartition("t", number, (1 + number % 3,), 10, 1 + number % 3) for number in range(9)]
    moves = plan_moves(brokers, partitions, Drain(3))
    assert [move.before for move in moves] == [(3,)] * 3
    assert {move.after for move in moves} == {(1,), (2,)}


def test_a_drain_refuses_to_put_a_second_replica_on_a_host() -> None:
    brokers = [PlannedBroker(1, None, True, "m"), PlannedBroker(2, None, True, "m"), PlannedBroker(3, None)]
    with pytest.raises(InvalidReplicationFactor):
        plan_moves(brokers, [PlannedPartition("t", 0, (1, 3), 10, 1)], Drain(3))
    assert plan_moves(brokers, [PlannedPartition("t", 0, (1, 3), 10, 1)], Drain(1)) == [
        Move("t", 0, (1, 3), (2, 3), 1, 10)
    ]


def test_documents_without_a_label_are_those_of_earlier_versions() -> None:
    endpoints = {"PLAINTEXT": BrokerEndpoint(2, "n", 9092, None)}
    assert "host_label" not in session_document(endpoints, "PLAINTEXT", None)
    assert "host_label" not in registration_document(BROKER_ACTIVE, SUPPORTED)
    assert decode_registration({"state": BROKER_FENCED}, 5) == Registration(BROKER_FENCED, 5)
    read = decode_session(2, session_document(endpoints, "PLAINTEXT", None, "m"), 7, InterBrokerListener())
    assert read.host_label == "m"


def test_the_label_of_a_session_comes_before_that_of_the_registration() -> None:
    online = {1: BrokerState(1, "h", 1, None, host_label="new"), 2: BrokerState(2, "h", 1, None)}
    known = {node_id: Registration(BROKER_ACTIVE, 1, host_label="old") for node_id in (1, 2, 3)}
    assert [host_of(node_id, online, known) for node_id in (1, 2, 3, 4)] == [
        "new",
        "broker 2",
        "old",
        "broker 4",
    ]


def test_a_number_as_label_is_not_the_host_of_the_broker_with_that_id() -> None:
    hosts = {host_of(1, {1: BrokerState(1, "h", 1, None, host_label="2")}, {}), host_of(2, {}, {})}
    assert len(hosts) == 2
    assert len(place_replicas(1, 2, [UsableBroker(1, None, "2"), UsableBroker(2, None)], start=0)[0]) == 2
    brokers = [PlannedBroker(1, None, True, "2"), PlannedBroker(2, None), PlannedBroker(3, None)]
    (move,) = plan_moves(brokers, [PlannedPartition("t", 0, (2, 3), 10, 2)], Replace(3, 1))
    assert move.after == (2, 1)


def test_hosts_are_kept_apart_within_a_rack_too() -> None:
    brokers = [
        PlannedBroker(1, "r", True, "m"),
        PlannedBroker(2, "r", True, "m"),
        PlannedBroker(3, "r", True, "n"),
        PlannedBroker(4, "r", True, "o"),
    ]
    busy = [PlannedPartition("busy", number, (4,), 1_000, 4) for number in range(9)]
    moves = plan_moves(brokers, [PlannedPartition("t", 0, (1, 3), 10, 1), *busy], Drain(3))
    assert [(move.topic, move.after) for move in moves] == [("t", (1, 4))], "although 2 has nothing"
    pairs = [PlannedPartition("t", number, (1, 3), 10, 1) for number in range(6)]
    for move in plan_moves(brokers[:3], pairs, Rebalance()):
        assert set(move.after) in ({1, 3}, {2, 3}), move
