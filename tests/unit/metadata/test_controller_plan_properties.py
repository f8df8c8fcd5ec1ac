"""The pure rules of a cluster: placement, and one plan at a time, on any view."""

from __future__ import annotations

from collections import Counter
from uuid import UUID

from hypothesis import assume, given
from hypothesis import strategies as st

from mansio.metadata.cluster_view import ClusterView, PartitionChange
from mansio.metadata.controller.failure_detector import FailureDetector
from mansio.metadata.controller_plan import plan, transferable_leaderships, without_replica
from mansio.metadata.model import (
    BROKER_ACTIVE,
    BROKER_DRAINING,
    BROKER_FENCED,
    NO_LEADER,
    TOPIC_LIVE,
    BrokerState,
    PartitionState,
    Registration,
    Topic,
)
from mansio.metadata.topic_plan import UsableBroker, place_replicas
from mansio.metadata.transactions import BATCH_CHANGES_MAX, split_into_transactions

NODES = st.integers(1, 6)


@st.composite
def rings(draw: st.DrawFn) -> list[UsableBroker]:
    racks = draw(st.lists(st.sampled_from(["a", "b", "c", None]), min_size=1, max_size=9))
    return [UsableBroker(node_id, rack) for node_id, rack in enumerate(racks)]


@given(ring=rings(), count=st.integers(1, 40), start=st.integers(0, 1 << 40), data=st.data())
def test_placement_spreads_leaders_copies_and_racks(
    ring: list[UsableBroker], count: int, start: int, data: st.DataObject
) -> None:
    copies = data.draw(st.integers(1, len(ring)))
    placed = place_replicas(count, copies, ring, start=start)
    racks = {one.node_id: one.rack if one.rack is not None else (one.node_id,) for one in ring}
    leaders = Counter({one.node_id: 0 for one in ring})
    for replicas in placed:
        assert len(set(replicas)) == len(replicas) == copies
        used = Counter(racks[node_id] for node_id in replicas)
        assert len(used) == min(copies, len(set(racks.values()))), "as many racks as there can be"
        leaders[replicas[0]] += 1
    assert max(leaders.values()) - min(leaders.values()) <= 1
    assert placed == place_replicas(count, copies, reversed(ring), start=start), (
        "the order they come in says nothing"
    )
    assert placed[1:] == place_replicas(count - 1, copies, ring, start=start + 1), (
        "growth goes on where it stopped"
    )


def test_followers_of_one_leader_are_many() -> None:
    placed = place_replicas(30, 2, [UsableBroker(node_id, None) for node_id in range(6)])
    assert {replicas[1] for replicas in placed if replicas[0] == 0} == {1, 2, 3, 4, 5}


@st.composite
def views(draw: st.DrawFn) -> ClusterView:
    """Any mix of brokers that are there, away, awaited, draining, and of partitions; leaders of an old session too."""
    states = draw(
        st.dictionaries(
            NODES, st.sampled_from([BROKER_ACTIVE, BROKER_ACTIVE, BROKER_DRAINING, BROKER_FENCED]), min_size=1
        )
    )
    there = {
        node_id: BrokerState(node_id, "h", 1, None, 100 + node_id)
        for node_id, state in states.items()
        if state != BROKER_FENCED and draw(st.booleans())
    }
    expected_back = frozenset(
        node_id
        for node_id, state in states.items()
        if state == BROKER_ACTIVE and node_id not in there and draw(st.booleans())
    )
    partitions = []
    for _ in range(draw(st.integers(1, 4))):
        replicas = tuple(draw(st.lists(NODES, min_size=1, max_size=4, unique=True)))
        isr = tuple(draw(st.lists(st.sampled_from(replicas), min_size=1, unique=True)))
        leader = draw(st.sampled_from([NO_LEADER, *isr]))
        epoch = 0 if leader == NO_LEADER else 100 + leader - draw(st.integers(0, 1))
        partitions.append(
            PartitionState(replicas, leader, 5, isr, 9, leader_broker_epoch=epoch, mod_revision=3)
        )
    topic = Topic("t", UUID(int=1), tuple(partitions), 1, {}, False, TOPIC_LIVE, 1)
    registrations = {node_id: Registration(state, 1) for node_id, state in states.items()}
    return ClusterView(there, registrations, {"t": topic}, {}, expected_back)


def applied(view: ClusterView, changes: list[PartitionChange]) -> ClusterView:
    topic = view.topics["t"]
    partitions = list(topic.partitions)
    for change in changes:
        assert change.before == partitions[change.partition]
        partitions[change.partition] = change.after
    after = Topic("t", topic.topic_id, tuple(partitions), 1, {}, False, TOPIC_LIVE, 1)
    return view._replace(topics={"t": after})


@given(view=views(), balance=st.booleans())
def test_one_plan_decides_everything_and_never_loses_a_copy(view: ClusterView, balance: bool) -> None:
    changes = list(plan(view, balance=balance).changes)
    for change in changes:
        before, after = change.before, change.after
        assert after.isr
        assert set(after.isr) <= set(before.isr)
        assert all(view.is_dead(member) for member in set(before.isr) - set(after.isr))
        moved = (before.leader, before.leader_broker_epoch) != (after.leader, after.leader_broker_epoch)
        assert after.leader_epoch == before.leader_epoch + moved
        assert after.partition_epoch == before.partition_epoch + 1
        if after.leader == NO_LEADER:
            assert after.isr == before.isr
            assert not any(member in view.brokers for member in after.isr)
        else:
            assert after.leader in after.isr
            assert after.is_led_by(after.leader, view.epoch(after.leader))
            assert change.required_sessions[after.leader] == view.epoch(after.leader)
        for member in set(before.isr) - set(after.isr):
            assert change.required_sessions[member] == 0
    settled = applied(view, changes)
    assert not plan(settled, balance=balance).changes, "a plan that goes on by itself never ends"
    for partition in settled.topics["t"].partitions:
        if not any(member in view.expected_back for member in (partition.leader,)):
            there = [member for member in partition.isr if member in view.brokers]
            assert (partition.leader in there) == bool(there)
    for node_id, registration in view.registrations.items():
        if registration.state == BROKER_DRAINING:
            assert transferable_leaderships(settled, node_id) == 0


@given(view=views())
def test_lost_copy_is_never_chosen_to_lead(view: ClusterView) -> None:
    topic = view.topics["t"]
    node_id = topic.partitions[0].isr[0]
    lost = without_replica(topic.partitions[0], node_id)
    assert lost.leader_epoch == topic.partitions[0].leader_epoch + (topic.partitions[0].leader == node_id)
    after = Topic("t", topic.topic_id, (lost,), 1, {}, False, TOPIC_LIVE, 1)
    for change in plan(view._replace(topics={"t": after})).changes:
        assert change.after.leader != node_id
        assert node_id not in change.after.isr


@given(
    required_sessions=st.lists(st.dictionaries(st.integers(1, 90), st.just(0), max_size=4), max_size=200),
    size=st.integers(1, BATCH_CHANGES_MAX),
)
def test_batches_stay_within_what_a_transaction_holds(
    required_sessions: list[dict[int, int]], size: int
) -> None:
    partition = PartitionState((1,), 1, 0, (1,))
    changes = [
        PartitionChange(UUID(int=1), n, partition, partition, "", one)
        for n, one in enumerate(required_sessions)
    ]
    made = list(split_into_transactions(changes, 60, size))
    assert [change for batch in made for change in batch] == changes
    for batch in made:
        brokers = {node_id for change in batch for node_id in change.required_sessions}
        assert len(batch) <= size
        assert len(batch) + len(brokers) + 1 <= 60


@given(
    there=st.dictionaries(NODES, st.floats(0, 20), min_size=1),
    away=st.dictionaries(NODES, st.floats(0, 20)),
    elected=st.floats(0, 20),
)
def test_no_broker_is_awaited_longer_than_a_lease_and_all_are_when_most_sessions_are_new(
    there: dict[int, float], away: dict[int, float], elected: float
) -> None:
    away = {node_id: since for node_id, since in away.items() if node_id not in there}
    assume(away)
    detector = FailureDetector(6.0)
    registrations = {node_id: Registration(BROKER_ACTIVE, 1) for node_id in (*there, *away)}
    everybody = {node_id: BrokerState(node_id, "h", 1, None, 1) for node_id in (*there, *away)}
    moments = sorted({*there.values(), *away.values()})
    for now in moments:
        brokers = {
            node_id: broker._replace(epoch=2) if now >= there.get(node_id, 99) else broker
            for node_id, broker in everybody.items()
            if now < away.get(node_id, 99)
        }
        detector.update(brokers, registrations, now)
    detector.record_election(elected)
    now = max(*moments, elected)
    steady = sum(1 for since in there.values() if now - since >= 6.0)
    expected = frozenset(node_id for node_id, since in away.items() if now < max(since, elected) + 6.0)
    if 2 * steady >= len(registrations):
        expected = frozenset()
    assert detector.expected_back(now) == expected
    began = now
    for _ in range(20):
        following = detector.next_change_at(now)
        if following is None:
            break
        assert following > now
        now = following
    assert detector.expected_back(now) == frozenset()
    assert now <= max(began, max(away.values()) + 6.0, elected + 6.0)
