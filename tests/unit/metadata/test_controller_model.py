"""A cluster's metadata under any order of faults: the shipped views, memberships, controllers and topics of four
brokers over one store in memory, on virtual time.

What must hold is read from the store's history, so it holds for every write whoever made it and whatever he was told
came of it. In the end everything is healed, and everything must be led again.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from mansio.broker.topics.topics import NewTopic
from mansio.errors import MansioError
from mansio.metadata.cluster_view import PartitionChange
from mansio.metadata.metadata_store import decode
from mansio.metadata.model import BROKER_ACTIVE, NO_LEADER, PartitionState
from mansio.metadata.transactions import commit_changes
from support.brokers import CLUSTER_ID, TTL_S, Cluster, Member
from support.tiers import examples
from support.virtual_time import VirtualLoop, close

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from mansio.metadata.metadata_store import Event

NODES = (1, 2, 3, 4)
HEALED_S = 6 * TTL_S
NAMES = ("a", "b")

nodes = st.sampled_from(NODES)


class History:
    """Reads the store's history once, event by event, and reports what was not right about it."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.read = 0
        self.sessions: dict[int, int] = {}
        self.partitions: dict[str, PartitionState] = {}
        self.shrunk_by_leader: set[int] = set()

    def check(self) -> None:
        events = self.cluster.store.history
        while self.read < len(events):
            end = self.read
            while end < len(events) and events[end].mod_revision == events[self.read].mod_revision:
                end += 1
            for event in events[self.read : end]:
                self._take(event)
            self.read = end

    def _take(self, event: Event) -> None:
        parts = event.key.split("/")[3:] or [""]
        if parts[0] == "brokers" and parts[2] == "session":
            assert event.value is None or int(parts[1]) not in self.sessions, "a session was taken over"
            self.sessions.pop(int(parts[1]), None)
            if event.value is not None:
                self.sessions[int(parts[1])] = event.create_revision
        elif parts[0] == "parts":
            before = self.partitions.pop(event.key, None)
            if event.value is not None:
                after = self.partitions[event.key] = parsed(decode(event.key, event.value))
                if before is not None and event.create_revision != event.mod_revision:
                    self._changed(event, before, after)

    def _changed(self, event: Event, before: PartitionState, after: PartitionState) -> None:
        reported = f"{event.mod_revision}: {before} -> {after}, sessions {self.sessions}"
        assert after.partition_epoch == before.partition_epoch + 1, reported
        moved = (after.leader, after.leader_broker_epoch) != (before.leader, before.leader_broker_epoch)
        assert after.leader_epoch == before.leader_epoch + moved, reported
        assert after.isr, reported
        assert set(after.isr) <= set(after.replicas), reported
        if moved and after.leader != NO_LEADER:
            assert after.leader in before.isr, reported
            assert self.sessions.get(after.leader) == after.leader_broker_epoch, reported
        if after.leader != NO_LEADER:
            assert after.leader in after.isr, reported
        else:
            assert after.isr == before.isr, reported
        if event.mod_revision not in self.shrunk_by_leader:
            assert set(after.isr) <= set(before.isr), reported
            assert not (set(before.isr) - set(after.isr)) & self.sessions.keys(), reported


def parsed(document: dict[str, Any]) -> PartitionState:
    return PartitionState(
        replicas=tuple(document["replicas"]),
        leader=document["leader"],
        leader_epoch=document["leader_epoch"],
        isr=tuple(document["isr"]),
        partition_epoch=document["part_epoch"],
        leader_broker_epoch=document.get("leader_broker_epoch", 0),
    )


class ClusterMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = VirtualLoop()
        self.leases_kept = True

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(work)

    @initialize(copies=st.integers(1, 3))
    def begin(self, copies: int) -> None:
        async def work() -> None:
            self.cluster = Cluster(balance_interval_ms=8000)
            await self.cluster.start(*NODES)
            for member in self.cluster.alive():
                await member.registered()
            await self.cluster.sleep(TTL_S)
            await self.cluster.brokers[1].create("a", 3, copies)

        self.run(work())
        self.history = History(self.cluster)
        self.history.check()

    def member(self, node_id: int) -> Member:
        return self.cluster.brokers[node_id]

    @rule(seconds=st.sampled_from([0.01, 0.3, 1.0, 3.0, 7.0]))
    def pass_time(self, seconds: float) -> None:
        for _ in range(10):
            self.run(self.cluster.sleep(seconds / 10))
            self.history.check()
            self.check_deadlines()

    def check_deadlines(self) -> None:
        """As long as the store ends no lease before its time: who may act as its session has it."""
        for member in self.cluster.alive() if self.leases_kept else ():
            if member.membership.is_session_valid():
                assert self.history.sessions.get(member.node_id) == member.membership.epoch

    @rule(node_id=nodes)
    def kill(self, node_id: int) -> None:
        if self.member(node_id).running:
            self.run(self.member(node_id).kill())

    @rule(node_id=nodes)
    def restart(self, node_id: int) -> None:
        if not self.member(node_id).running:
            self.run(self.cluster.start_one(node_id))

    @rule(node_id=nodes)
    def terminate(self, node_id: int) -> None:
        member = self.member(node_id)
        if member.running:
            self.run(member.terminate())
        self.history.check()

    @rule(node_id=nodes)
    def cut_off(self, node_id: int) -> None:
        self.member(node_id).store_client.unreachable = True

    @rule(node_id=nodes)
    def stall_watch(self, node_id: int) -> None:
        self.member(node_id).store_client.watch_stalls = True

    @rule(node_id=nodes, delay_ms=st.sampled_from([1, 40, 300, 900]))
    def slow_down(self, node_id: int, delay_ms: int) -> None:
        self.member(node_id).store_client.delay_ms = lambda: delay_ms

    @rule(node_id=nodes)
    def hang(self, node_id: int) -> None:
        self.member(node_id).keeps_alive = False

    @rule(node_id=nodes)
    def heal(self, node_id: int) -> None:
        self.member(node_id).store_client.heal()
        self.member(node_id).store_client.delay_ms = None
        self.member(node_id).keeps_alive = True

    @rule(node_id=nodes, lost=st.integers(1, 4), answers=st.booleans())
    def lose(self, node_id: int, lost: int, answers: bool) -> None:
        client = self.member(node_id).store_client
        if answers:
            client.lost_response_count = lost
        else:
            client.lost_request_count = lost

    @rule(node_id=nodes, later=st.booleans())
    def end_session(self, node_id: int, later: bool) -> None:
        """Now, or right before this broker's next transaction."""
        session = self.member(node_id).membership.session_to_renew
        if session is None:
            return
        self.leases_kept = False
        if later:
            self.member(node_id).store_client.before_transaction = lambda: self.cluster.store.end_lease(
                session.lease
            )
        else:
            self.cluster.store.end_lease(session.lease)

    @rule()
    def end_all_sessions(self) -> None:
        self.leases_kept = False
        self.cluster.store.end_all_leases()

    @rule()
    def renew_all_leases(self) -> None:
        self.cluster.store.renew_all_leases()

    @rule()
    def compact(self) -> None:
        self.cluster.store.compact()

    @rule(node_id=nodes, name=st.sampled_from(NAMES), partitions=st.integers(1, 3), copies=st.integers(1, 4))
    def create(self, node_id: int, name: str, partitions: int, copies: int) -> None:
        member = self.member(node_id)
        if member.running:
            self.begin_work(member, member.topics.create(NewTopic(name, partitions, copies)))

    @rule(node_id=nodes, name=st.sampled_from(NAMES))
    def delete(self, node_id: int, name: str) -> None:
        member = self.member(node_id)
        if member.running and (topic := member.state.topics.get(name)) is not None:
            self.begin_work(member, member.topics.delete(topic))

    def begin_work(self, member: Member, work: Coroutine[Any, Any, Any]) -> None:
        async def quietly() -> None:
            try:
                await work
            except MansioError:
                return

        async def begun() -> None:
            member.scheduler.spawn(quietly(), name="topics")
            await asyncio.sleep(0)

        self.run(begun())

    @precondition(lambda self: any(member.running for member in self.cluster.brokers.values()))
    @rule(node_id=nodes, name=st.sampled_from(NAMES), other=nodes)
    def leader_changes_in_sync_set(self, node_id: int, name: str, other: int) -> None:
        """What a leader does, in the way it has to: by its own session, and for each broker added by that one's."""
        member = self.member(node_id)
        topic = member.state.topics.get(name)
        if not member.running or topic is None:
            return
        partition = topic.partitions[0]
        if not partition.is_led_by(node_id, member.membership.epoch) or other == node_id:
            return
        if other not in partition.replicas:
            return
        required_sessions = {node_id: member.membership.epoch}
        if other in partition.isr:
            members = tuple(one for one in partition.isr if one != other)
        else:
            members = (*partition.isr, other)
            required_sessions[other] = member.state.epoch_of(other)
            if not required_sessions[other]:
                return
        after = partition._replace(isr=members, partition_epoch=partition.partition_epoch + 1)
        change = PartitionChange(topic.topic_id, 0, partition, after, "in-sync change", required_sessions)

        async def work() -> None:
            try:
                done = await commit_changes(
                    member.store_client, member.state.keys, [change], None, member.random
                )
            except MansioError:
                done = None
            key = member.state.keys.partition(topic.topic_id, 0)
            for event in self.cluster.store.history[-5:]:  # also when its answer was lost
                if event.key == key and event.value is not None and done is not None and done.succeeded:
                    self.history.shrunk_by_leader.add(done.revision)
            if done is None and self.cluster.store.history[-1].key == key:
                self.history.shrunk_by_leader.add(self.cluster.store.history[-1].mod_revision)

        self.run(work())
        self.history.check()

    def teardown(self) -> None:
        try:
            if hasattr(self, "cluster"):
                self.run(self.heal_all())
        finally:
            close(self.loop)

    async def heal_all(self) -> None:
        cluster = self.cluster
        for node_id in NODES:
            member = cluster.brokers[node_id]
            member.store_client.heal()
            member.store_client.delay_ms = None
            member.keeps_alive = True
            if not member.running:
                await cluster.start_one(node_id)
        await cluster.sleep(HEALED_S)
        self.history.check()
        assert len(cluster.controllers()) == 1
        for member in cluster.alive():
            state = member.state
            assert state.failure is None
            assert member.membership.is_session_valid()
            assert {n: state.epoch_of(n) for n in NODES} == self.history.sessions
            assert {one.state for one in state.registrations.values()} == {BROKER_ACTIVE}
            assert not state.unfinished_topics
            for topic in state.topics.values():
                for partition in topic.partitions:
                    assert partition.is_led_by(partition.leader, state.epoch_of(partition.leader)), partition
                    assert set(partition.isr) <= set(NODES)
                    first = partition.replicas[0]
                    assert partition.leader == first or first not in partition.isr, partition
        kept = cluster.store.list(f"/mansio/{CLUSTER_ID}/parts/").entries
        live = {str(topic.topic_id) for topic in cluster.brokers[1].state.topics.values()}
        assert {entry.key.split("/")[4] for entry in kept} == live, "nothing is left of topics that are gone"
        await cluster.stop()


ClusterMachine.TestCase.settings = settings(max_examples=examples(20, 25, 500), stateful_step_count=30)
TestClusterMachine = ClusterMachine.TestCase
