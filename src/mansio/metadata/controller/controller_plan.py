"""Decisions of the controller: elections, removals from in-sync sets, fencing. Pure: a view in, a plan out.

All rules of leadership and in-sync sets are here. Nothing waits, writes or keeps state; a decision contains the
sessions on which it relies (`PartitionChange.required_sessions`), and its transaction fails when one of them has
changed.

Invariants of each decision on a partition:
* A new leader is a member of the in-sync set and has a session; only `unclean_election` violates this, on request.
* A member is removed from the set only when it is dead and another one stays: what all members had, one still has.
* When the leader changes, also to none, the leader epoch grows by one; with any change the partition epoch does.

A broker is *dead* when it has no session and is not expected back (`FailureDetector` decides that). A leader whose
session is not the one in which it was elected has failed, even if the broker is back: records that it had appended
without a flush may be lost, so it must not continue in the same leader epoch.

Sources: KIP-101, KIP-631, KIP-841, KIP-966.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from mansio.errors import InvalidRequest, Unavailable
from mansio.metadata.model import ACTIVE, CREATING, DELETING, DRAINING, FENCED, NO_LEADER

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from uuid import UUID

    from mansio.metadata.model import BrokerState, PartitionState, Registration, Topic


class ClusterView(NamedTuple):
    """Input of a plan; `MetadataImage` has all of it. `expected_back`: offline brokers that are not declared dead."""

    brokers: Mapping[int, BrokerState]
    registrations: Mapping[int, Registration]
    topics: Mapping[str, Topic]
    unfinished: Mapping[str, Topic]
    expected_back: frozenset[int] = frozenset()

    def epoch(self, node_id: int) -> int:
        """The epoch of a broker's session; 0 without a session."""
        broker = self.brokers.get(node_id)
        return 0 if broker is None else broker.epoch

    def is_dead(self, node_id: int) -> bool:
        return node_id not in self.brokers and node_id not in self.expected_back

    def may_lead(self, node_id: int) -> bool:
        registration = self.registrations.get(node_id)
        return node_id in self.brokers and registration is not None and registration.state == ACTIVE

    def has_leader(self, partition: PartitionState) -> bool:
        """Whether the leader has the session in which it was elected."""
        broker = self.brokers.get(partition.leader)
        return broker is not None and broker.epoch == partition.leader_broker_epoch


class PartitionChange(NamedTuple):
    """The next state of a partition, and the state on which the decision is based."""

    topic_id: UUID
    partition: int
    before: PartitionState
    after: PartitionState
    reason: str
    required_sessions: Mapping[int, int]
    """The epoch of the session (0: none) of each broker on which the decision relies."""


class FenceBroker(NamedTuple):
    """Fence a broker: it must register again."""

    node_id: int
    mod_revision: int


class CompleteDeletion(NamedTuple):
    """Complete the deletion of a topic whose creator failed: it was partly created or partly deleted."""

    topic: Topic


class Plan(NamedTuple):
    """Decisions, the most urgent ones first."""

    changes: Sequence[PartitionChange]
    fences: Sequence[FenceBroker]
    deletions: Sequence[CompleteDeletion]

    def __bool__(self) -> bool:
        return bool(self.changes or self.fences or self.deletions)


def plan(view: ClusterView, *, balance: bool = False) -> Plan:
    """All decisions that are due. With `balance`, leaderships also return to the preferred leaders."""
    elections: list[PartitionChange] = []
    removals: list[PartitionChange] = []
    for topic in view.topics.values():
        for index, partition in enumerate(topic.partitions):
            if (change := _decide(view, topic.topic_id, index, partition, balance=balance)) is not None:
                (removals if change.after.leader == partition.leader else elections).append(change)
    fences = [
        FenceBroker(node_id, registration.mod_revision)
        for node_id, registration in view.registrations.items()
        if registration.state != FENCED and view.is_dead(node_id)
    ]
    deletions = [
        CompleteDeletion(topic) for topic in view.unfinished.values() if _creator_is_gone(view, topic)
    ]
    return Plan(elections + removals, fences, deletions)


def transferable_leaderships(view: ClusterView, node_id: int) -> int:
    """Number of partitions that a stopping broker leads although another broker could."""
    return sum(
        1
        for partition in _live_partitions(view)
        if partition.leader == node_id
        and any(view.may_lead(member) for member in partition.isr if member != node_id)
    )


def unclean_election(view: ClusterView, topic: Topic, index: int, node_id: int) -> PartitionChange:
    """Elect a leader that is not in sync, on request of an administrator: records that only others have are lost.

    Raises `InvalidRequest` where no loss is necessary or the broker is not a replica, `Unavailable` where it is
    offline.
    """
    partition = topic.partitions[index]
    name = f"{topic.name}-{index}"
    if node_id not in partition.replicas:
        raise InvalidRequest(
            f"{name}: broker {node_id} is not a replica; the replicas are {list(partition.replicas)}"
        )
    if view.has_leader(partition) or _candidate(view, partition) is not None:
        raise InvalidRequest(
            f"{name} has a leader, or an in-sync replica that can lead: no records have to be lost"
        )
    if not view.may_lead(node_id):
        raise Unavailable(f"{name}: broker {node_id} is offline or stopping")
    required_sessions = {
        member: view.epoch(member) for member in (*partition.isr, partition.leader) if member >= 0
    }
    required_sessions[node_id] = view.epoch(node_id)
    after = _led_by(view, partition, node_id, (node_id,))
    return PartitionChange(topic.topic_id, index, partition, after, "unclean election", required_sessions)


def preferred_election(view: ClusterView, topic: Topic, index: int) -> PartitionChange | None:
    """Elect the preferred leader; None if it already leads. Raises `Unavailable` where it cannot lead."""
    partition = topic.partitions[index]
    if view.has_leader(partition) and partition.leader == partition.replicas[0]:
        return None
    change = _decide(view, topic.topic_id, index, partition, balance=True)
    if change is None or change.after.leader != partition.replicas[0]:
        raise Unavailable(f"{topic.name}-{index}: broker {partition.replicas[0]} is not in sync or offline")
    return change


def without_replica(partition: PartitionState, node_id: int) -> PartitionState:
    """Remove a replica whose log is lost from the in-sync set, even if it is the last member. An empty set means
    that no replica is known to be complete; only an unclean election continues from there."""
    in_sync = tuple(member for member in partition.isr if member != node_id)
    led = partition.leader == node_id
    return partition._replace(
        isr=in_sync,
        leader=NO_LEADER if led else partition.leader,
        leader_epoch=partition.leader_epoch + led,
        leader_broker_epoch=0 if led else partition.leader_broker_epoch,
        partition_epoch=partition.partition_epoch + 1,
    )


def _live_partitions(view: ClusterView) -> Iterator[PartitionState]:
    for topic in view.topics.values():
        yield from topic.partitions


def _decide(
    view: ClusterView, topic_id: UUID, index: int, partition: PartitionState, *, balance: bool
) -> PartitionChange | None:
    """The change of one partition that is due, if any."""
    dead = [member for member in partition.isr if view.is_dead(member)]
    leader, reason = partition.leader, "in-sync member died"
    if view.has_leader(partition):
        if not view.may_lead(leader):
            leader, reason = _successor(view, partition), "leader is stopping"
        elif balance and _is_better(view, partition):
            leader, reason = partition.replicas[0], "preferred leader"
        if leader == partition.leader and not dead:
            return None
    elif leader in view.expected_back:
        return None
    else:
        candidate = _candidate(view, partition)
        if candidate is None and leader == NO_LEADER:
            return None
        leader = NO_LEADER if candidate is None else candidate
        reason = "no in-sync replica is available" if candidate is None else "leader failed"
    if leader == NO_LEADER:
        after, dead = _led_by(view, partition, NO_LEADER, partition.isr), []
    else:
        staying = tuple(member for member in partition.isr if member not in dead)
        after = _led_by(view, partition, leader, staying)
    required_sessions = {
        member: view.epoch(member) for member in {*dead, leader, partition.leader} if member >= 0
    }
    return PartitionChange(topic_id, index, partition, after, reason, required_sessions)


def _led_by(
    view: ClusterView, partition: PartitionState, leader: int, in_sync: tuple[int, ...]
) -> PartitionState:
    epoch = view.epoch(leader)
    moved = not partition.led_by(leader, epoch)
    return partition._replace(
        isr=in_sync,
        leader=leader,
        leader_epoch=partition.leader_epoch + moved,
        leader_broker_epoch=epoch,
        partition_epoch=partition.partition_epoch + 1,
    )


def _candidate(view: ClusterView, partition: PartitionState) -> int | None:
    """The next leader: the first in-sync replica that may lead; a stopping one is better than none."""
    online = [member for member in _in_order(partition) if member in view.brokers]
    for state in (ACTIVE, DRAINING):
        for member in online:
            registration = view.registrations.get(member)
            if registration is not None and registration.state == state:
                return member
    return None


def _successor(view: ClusterView, partition: PartitionState) -> int:
    """The successor of a stopping leader; the leader itself where no other replica can lead."""
    return next((one for one in _in_order(partition) if view.may_lead(one)), partition.leader)


def _is_better(view: ClusterView, partition: PartitionState) -> bool:
    first = partition.replicas[0]
    return first != partition.leader and first in partition.isr and view.may_lead(first)


def _in_order(partition: PartitionState) -> list[int]:
    """The in-sync replicas, the preferred leader first."""
    return [replica for replica in partition.replicas if replica in partition.isr]


def _creator_is_gone(view: ClusterView, topic: Topic) -> bool:
    assert topic.state in (CREATING, DELETING)
    created_by = topic.created_by
    if created_by is None:
        return True
    return created_by.node_id not in view.expected_back and view.epoch(created_by.node_id) != created_by.epoch
