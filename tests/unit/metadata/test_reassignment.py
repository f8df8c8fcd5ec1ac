"""Reassignments as a state machine: any requests, elections, losses and catch-ups in any order."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING
from uuid import UUID

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mansio.errors import InvalidReplicaAssignment, InvalidReplicationFactor, MansioError, Unavailable
from mansio.metadata import controller_plan, reassignment
from mansio.metadata.cluster_view import ClusterView, PartitionChange
from mansio.metadata.controller_plan import plan
from mansio.metadata.model import (
    BROKER_ACTIVE,
    BROKER_DRAINING,
    NO_LEADER,
    TOPIC_LIVE,
    BrokerState,
    PartitionState,
    Registration,
    Topic,
)
from support.tiers import examples

if TYPE_CHECKING:
    from collections.abc import Collection

NODES = range(1, 6)


def topic_of(partition: PartitionState, *, factor: int = 3, configs: dict[str, str] | None = None) -> Topic:
    return Topic("t", UUID(int=1), (partition,), factor, configs or {}, False, TOPIC_LIVE, 1)


def view_of(topic: Topic, online: dict[int, int], draining: Collection[int] = ()) -> ClusterView:
    """`online`: the broker epochs by node id."""
    brokers = {node: BrokerState(node, "h", 1, None, epoch) for node, epoch in online.items()}
    registrations = {
        node: Registration(BROKER_DRAINING if node in draining else BROKER_ACTIVE, 1) for node in NODES
    }
    return ClusterView(brokers, registrations, {"t": topic}, {})


class Moves(RuleBasedStateMachine):
    """One partition on some of five brokers. `copies`: the brokers that have all committed records."""

    def __init__(self) -> None:
        super().__init__()
        self.online = {node: 100 + node for node in NODES}
        self.draining: set[int] = set()
        self.next_epoch = 200
        state = PartitionState((1, 2, 3), 1, 0, (1, 2, 3), leader_broker_epoch=101)
        self.topic = topic_of(state)
        self.copies = {1, 2, 3}
        self.original: tuple[int, ...] = (1, 2, 3)

    @property
    def partition(self) -> PartitionState:
        return self.topic.partitions[0]

    def view(self) -> ClusterView:
        return view_of(self.topic, self.online, self.draining)

    def apply(self, change: PartitionChange | None) -> None:
        if change is None:
            return
        before, after = change.before, change.after
        assert before == self.partition
        for node, epoch in change.required_sessions.items():
            assert self.online.get(node, 0) == epoch
        removed = {*before.replicas} - {*after.replicas}
        assert {*after.isr} <= {*before.isr}, "only the leader adds to the in-sync set"
        assert after.partition_epoch == before.partition_epoch + 1
        moved = (before.leader, before.leader_broker_epoch) != (after.leader, after.leader_broker_epoch)
        assert after.leader_epoch == before.leader_epoch + (moved or bool(removed))
        self.topic = dataclasses.replace(self.topic, partitions=(after,))
        self.copies -= removed

    @rule(wanted=st.lists(st.sampled_from(NODES), min_size=1, max_size=4, unique=True))
    def reassign(self, wanted: list[int]) -> None:
        try:
            change = reassignment.begin(self.view(), self.topic, 0, wanted)
        except Unavailable:
            away = [node for node in NODES if node not in self.online or node in self.draining]
            assert {*away} & {*wanted} or self.partition.leader not in wanted
            return
        except InvalidReplicaAssignment:
            former = {*self.partition.adding} - {*wanted}
            assert {*self.partition.isr} <= former, "only added replicas that are dropped are in sync"
            return
        self.apply(change)
        assert change is None or change.required_sessions.keys() >= {*self.partition.adding}
        assert reassignment.target_of(self.partition) == tuple(wanted)
        assert {*reassignment.original_of(self.partition)} == {*self.original}

    @precondition(lambda self: reassignment.is_reassigned(self.partition))
    @rule()
    def cancel(self) -> None:
        try:
            change = reassignment.cancel(self.view(), self.topic, 0)
        except MansioError:
            assert not {*self.partition.isr} & {*self.original} & (self.online.keys() - self.draining)
            return
        self.apply(change)
        assert {*self.partition.replicas} == {*self.original}
        assert not reassignment.is_reassigned(self.partition)
        self.original = self.partition.replicas

    @rule(node=st.sampled_from(NODES))
    def end_session(self, node: int) -> None:
        self.online.pop(node, None)

    @rule(node=st.sampled_from(NODES))
    def begin_session(self, node: int) -> None:
        if node not in self.online:
            self.draining.discard(node)
            self.next_epoch += 1
            self.online[node] = self.next_epoch

    @rule(node=st.sampled_from(NODES))
    def drain(self, node: int) -> None:
        if node in self.online:
            self.draining.add(node)

    @rule()
    def catch_up_all(self) -> None:
        for node in NODES:
            self.catch_up(node)

    @rule(node=st.sampled_from(NODES))
    def catch_up(self, node: int) -> None:
        """The leader adds a replica to the in-sync set."""
        state = self.partition
        if (
            node in state.replicas
            and node not in state.isr
            and node in self.online
            and state.is_led_by(state.leader, self.online.get(state.leader, 0))
        ):
            self.copies.add(node)
            after = state._replace(isr=(*state.isr, node), partition_epoch=state.partition_epoch + 1)
            self.topic = dataclasses.replace(self.topic, partitions=(after,))

    @rule()
    def lose_followers_that_lag(self) -> None:
        """The leader removes all others from the in-sync set, and goes on alone."""
        state = self.partition
        if len(state.isr) > 1 and state.leader in state.isr:
            after = state._replace(isr=(state.leader,), partition_epoch=state.partition_epoch + 1)
            self.topic = dataclasses.replace(self.topic, partitions=(after,))
            self.copies = {state.leader}

    @rule(balance=st.booleans())
    def run_a_round(self, *, balance: bool = False) -> None:
        due = plan(self.view(), balance=balance)
        for change in due.changes:
            was_reassigned, adding = reassignment.is_reassigned(change.before), change.before.adding
            self.apply(change)
            if (leader := self.partition.leader) != change.before.leader and leader != NO_LEADER:
                assert leader in self.online
                is_move = was_reassigned and not reassignment.is_reassigned(self.partition)
                assert leader not in self.draining or not is_move
            if was_reassigned and not reassignment.is_reassigned(self.partition):
                in_sync, replicas = {*self.partition.isr}, self.partition.replicas
                assert in_sync.issuperset(adding)
                assert 2 * len(in_sync) > len(replicas)
                assert self.topic.replication_factor <= len(replicas)
                self.original = replicas
        for factor in due.factors:
            state = self.partition
            assert factor.replication_factor <= len(reassignment.original_of(state))
            assert factor.replication_factor <= len(reassignment.target_of(state))
            self.topic = dataclasses.replace(self.topic, replication_factor=factor.replication_factor)

    @invariant()
    def has_copies_of_all_committed_records(self) -> None:
        state = self.partition
        assert state.isr
        assert {*state.isr} <= {*state.replicas}
        assert {*state.isr} <= self.copies
        assert state.leader in (NO_LEADER, *state.isr)

    @invariant()
    def keeps_the_old_replicas_until_the_new_ones_are_in_sync(self) -> None:
        state = self.partition
        assert {*reassignment.original_of(state)} == {*self.original}
        assert len({*state.replicas}) == len(state.replicas)
        assert {*state.adding} | {*state.removing} <= {*state.replicas}

    def teardown(self) -> None:
        """With all brokers up and all replicas caught up, a reassignment finishes."""
        for node in NODES:
            if node in self.draining:
                self.end_session(node)
            self.begin_session(node)
        for _ in range(4):
            self.run_a_round()
            self.catch_up_all()
        self.run_a_round()
        self.run_a_round()
        assert not reassignment.is_reassigned(self.partition)
        assert self.topic.replication_factor == len(self.partition.replicas)
        assert not plan(self.view())


TestMoves = Moves.TestCase
TestMoves.settings = settings(max_examples=examples(60, 400, 3000), stateful_step_count=40)


STATE = PartitionState((1, 2, 3), 1, 0, (1, 2, 3), leader_broker_epoch=101)
ALL = {node: 100 + node for node in NODES}


@pytest.mark.parametrize(
    ("target", "error"),
    [
        ([], InvalidReplicaAssignment),
        ([1, 1], InvalidReplicaAssignment),
        ([1, 9], InvalidReplicaAssignment),
        ([-1], InvalidReplicaAssignment),
        ([4], InvalidReplicationFactor),
        ([1, 5], Unavailable),
    ],
)
def test_an_impossible_target_is_refused(target: list[int], error: type[MansioError]) -> None:
    topic = topic_of(STATE, configs={"min.insync.replicas": "2"})
    online = {node: epoch for node, epoch in ALL.items() if node != 5}
    with pytest.raises(error):
        reassignment.begin(view_of(topic, online), topic, 0, target)


def test_another_number_of_replicas_needs_permission() -> None:
    topic = topic_of(STATE)
    view = view_of(topic, ALL)
    with pytest.raises(InvalidReplicationFactor):
        reassignment.begin(view, topic, 0, [1, 2], may_change_factor=False)
    assert reassignment.begin(view, topic, 0, [1, 2, 4], may_change_factor=False) is not None


def test_the_same_replicas_in_another_order_are_another_preferred_leader_at_once() -> None:
    topic = topic_of(STATE)
    change = reassignment.begin(view_of(topic, ALL), topic, 0, [3, 1, 2])
    assert change is not None
    assert change.after.replicas == (3, 1, 2)
    assert not reassignment.is_reassigned(change.after)
    assert change.after.leader_epoch == STATE.leader_epoch
    assert reassignment.begin(view_of(topic, ALL), topic, 0, [1, 2, 3]) is None


def test_a_broker_that_is_stopping_does_not_lead_at_the_end_of_a_move() -> None:
    state = STATE._replace(replicas=(4, 5, 1, 2, 3), isr=(1, 2, 3, 4, 5), adding=(4, 5), removing=(1, 2, 3))
    topic = topic_of(state, factor=2)
    (change,) = plan(view_of(topic, ALL, {4})).changes
    assert (change.after.replicas, change.after.leader) == ((4, 5), 5)
    assert not plan(view_of(topic, ALL, {4, 5})).changes


def test_a_move_is_not_cancelled_if_only_added_replicas_are_in_sync() -> None:
    state = STATE._replace(
        replicas=(4, 1, 2, 3),
        leader=4,
        leader_broker_epoch=ALL[4],
        isr=(4,),
        adding=(4,),
        removing=(2, 3),
    )
    topic = topic_of(state)
    with pytest.raises(InvalidReplicaAssignment):
        reassignment.cancel(view_of(topic, ALL), topic, 0)
    with pytest.raises(InvalidReplicaAssignment):
        reassignment.begin(view_of(topic, ALL), topic, 0, [1, 2, 3])


def test_a_move_does_not_end_while_an_added_replica_is_away() -> None:
    """It is expected back, and still in the in-sync set; its disk may be what failed."""
    state = STATE._replace(replicas=(1, 4, 2, 3), isr=(1, 2, 3, 4), adding=(4,), removing=(2, 3))
    topic = topic_of(state, factor=2)
    online = {node: epoch for node, epoch in ALL.items() if node != 4}
    view = view_of(topic, online)._replace(expected_back=frozenset({4}))
    assert not plan(view).changes
    (change,) = plan(view_of(topic, ALL)).changes
    assert change.required_sessions == {4: ALL[4]}


def test_a_move_ends_when_as_many_are_in_sync_as_the_topic_requires() -> None:
    state = STATE._replace(replicas=(1, 3, 4, 2), isr=(1, 4), adding=(4,), removing=(2,))
    assert not plan(view_of(topic_of(state, configs={"min.insync.replicas": "3"}), ALL)).changes
    assert plan(view_of(topic_of(state), ALL)).changes


def test_a_plan_finishes_a_bounded_number_of_moves_and_all_elections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controller_plan, "FINISHES_MAX", 3)
    moved = PartitionState((1, 4, 2, 3), 1, 5, (1, 2, 3, 4), 7, (4,), (2, 3), 101)
    failed = PartitionState((5, 1, 2), 5, 5, (5, 1, 2), 7, (), (), 90)
    topic = topic_of(moved, factor=2)
    topic = dataclasses.replace(topic, partitions=(moved,) * 10 + (failed,))
    changes = plan(view_of(topic, ALL)).changes
    assert [change.partition for change in changes] == [10, 0, 1, 2]
