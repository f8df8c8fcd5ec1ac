"""Decisions of the controller: elections, removals from in-sync sets, fencing. Pure functions of a `ClusterView`.

This module contains the rules of leadership and in-sync sets, and `reassignment` those of replicas. A decision lists
the sessions on which it relies (`PartitionChange.required_sessions`), and its transaction fails if one of them has
changed.

Invariants of each decision on a partition:
* A new leader is in sync and has a session; the exception is `unclean_election`, which an administrator requests.
* A replica is removed from the in-sync set only if it is dead, or is no replica any more, and another one stays in the
  set, so that at least one replica has all committed records.
* When the leader changes, also to none, or a replica is removed, the leader epoch increases by one. Each change
  increases the partition epoch.

A broker is *dead* when it has no session and is not expected back (`FailureDetector` decides that). A leader whose
session is not the one in which it was elected has failed, even if the broker is back: records that it had appended
without a flush may be lost, so it must not continue in the same leader epoch.

Sources: KIP-101, KIP-631, KIP-841, KIP-966.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from mansio.errors import InvalidRequest, Unavailable
from mansio.metadata import reassignment
from mansio.metadata.cluster_view import PartitionChange, with_leader
from mansio.metadata.model import (
    BROKER_ACTIVE,
    BROKER_DRAINING,
    BROKER_FENCED,
    NO_LEADER,
    TOPIC_CREATING,
    TOPIC_DELETING,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence
    from uuid import UUID

    from mansio.metadata.cluster_view import ClusterView
    from mansio.metadata.feature_level import LevelRange
    from mansio.metadata.model import PartitionState, Topic


FINISHES_MAX: Final = 2_000
"""Number of reassignments that one plan finishes; the next plan finishes others."""


class FenceBroker(NamedTuple):
    """Decision to fence a broker, which then must register again. `mod_revision` is that of its registration, which
    keeps `levels`."""

    node_id: int
    mod_revision: int
    levels: LevelRange


class CompleteDeletion(NamedTuple):
    """Decision to delete a topic that was partly created or partly deleted when its creator failed."""

    topic: Topic


class Plan(NamedTuple):
    """Decisions of one round. The partition changes begin with the elections, which are the most urgent ones."""

    changes: Sequence[PartitionChange]
    fences: Sequence[FenceBroker]
    deletions: Sequence[CompleteDeletion]
    factors: Sequence[reassignment.FactorChange]

    def __bool__(self) -> bool:
        return bool(self.changes or self.fences or self.deletions or self.factors)


def plan(view: ClusterView, *, balance: bool = False) -> Plan:
    """Return the decisions that are due now, made at once; see `PlanBuilder`."""
    builder = PlanBuilder(view, balance=balance)
    for _ in builder.steps():
        pass
    return builder.plan()


class PlanBuilder:
    """Makes the decisions that are due, partition by partition, so that other work can run in between.

    `wanted` has the partitions to decide about, as indexes by the name of their topic; all if it is None. With
    `balance`, leaderships also return to the preferred leaders. A plan finishes at most `FINISHES_MAX` reassignments,
    so that elections that become due meanwhile wait for few transactions; none without `may_finish`. The view may
    change between two steps: each decision is executed only if what it relies on is unchanged.
    """

    def __init__(
        self,
        view: ClusterView,
        *,
        wanted: Mapping[str, Collection[int]] | None = None,
        balance: bool = False,
        may_finish: bool = True,
    ) -> None:
        self._view = view
        self._wanted = wanted
        self._balance = balance
        self._elections: list[PartitionChange] = []
        self._others: list[PartitionChange] = []
        self._factors: list[reassignment.FactorChange] = []
        self._finishes_max = FINISHES_MAX if may_finish else 0
        self.finishes = 0
        """Number of reassignments that the plan finishes."""
        self.postponed: list[tuple[str, int]] = []
        """Topic name and index of the partitions whose reassignment another plan may have to finish."""

    def steps(self) -> Iterator[None]:
        """Decide about one partition after the other, one in each step."""
        topics, wanted = self._view.topics, self._wanted
        for name in tuple(topics if wanted is None else wanted):
            if (topic := topics.get(name)) is None:
                continue
            partitions = topic.partitions
            may_have_factor = False
            for index in range(len(partitions)) if wanted is None else wanted[name]:
                if index >= len(partitions):
                    continue
                partition = partitions[index]
                self._decide(topic, index, partition)
                if reassignment.factor_of(partition) != topic.replication_factor:
                    may_have_factor = True
                yield
            if may_have_factor and (factor := reassignment.factor_change(topic)) is not None:
                self._factors.append(factor)

    def _decide(self, topic: Topic, index: int, partition: PartitionState) -> None:
        view = self._view
        change = _decide(view, topic.topic_id, index, partition, balance=self._balance)
        if change is None and reassignment.is_reassigned(partition) and view.has_leader(partition):
            if self.finishes == self._finishes_max:
                self.postponed.append((topic.name, index))
            else:
                change = reassignment.finish(view, topic, index)
                self.finishes += change is not None
        if change is not None:
            is_election = not change.after.is_led_by(partition.leader, partition.leader_broker_epoch)
            (self._elections if is_election else self._others).append(change)

    def plan(self) -> Plan:
        """Return the decisions, after the last step."""
        view = self._view
        fences = [
            FenceBroker(node_id, registration.mod_revision, registration.levels)
            for node_id, registration in view.registrations.items()
            if registration.state != BROKER_FENCED and view.is_dead(node_id)
        ]
        deletions = [
            CompleteDeletion(topic)
            for topic in view.unfinished_topics.values()
            if _creator_is_gone(view, topic)
        ]
        return Plan(self._elections + self._others, fences, deletions, self._factors)


def transferable_leaderships(view: ClusterView, node_id: int) -> int:
    """Return the number of partitions that the broker `node_id` leads although another in-sync replica may lead."""
    return sum(
        1
        for partition in _live_partitions(view)
        if partition.leader == node_id
        and any(view.may_lead(member) for member in partition.isr if member != node_id)
    )


def unclean_election(view: ClusterView, topic: Topic, index: int, node_id: int) -> PartitionChange:
    """Elect the broker `node_id`, which is not in sync, as leader: records that only other replicas have are lost.

    Raises `InvalidRequest` if an in-sync replica can lead or the broker is not a replica, `Unavailable` if the broker
    is offline or stopping.
    """
    partition = topic.partitions[index]
    name = f"{topic.name}-{index}"
    if node_id not in partition.replicas:
        raise InvalidRequest(
            f"{name}: broker {node_id} is not a replica; the replicas are {list(partition.replicas)}"
        )
    if view.has_leader(partition) or _next_leader(view, partition) is not None:
        raise InvalidRequest(
            f"{name} has a leader, or an in-sync replica that can lead: no records have to be lost"
        )
    if not view.may_lead(node_id):
        raise Unavailable(f"{name}: broker {node_id} is offline or stopping")
    required_sessions = {
        member: view.epoch(member) for member in (*partition.isr, partition.leader) if member >= 0
    }
    required_sessions[node_id] = view.epoch(node_id)
    after = with_leader(view, partition, node_id, (node_id,))
    return PartitionChange(topic.topic_id, index, partition, after, "unclean election", required_sessions)


def preferred_election(view: ClusterView, topic: Topic, index: int) -> PartitionChange | None:
    """Elect the preferred leader of a partition; None if it already leads. Raises `Unavailable` if it cannot lead."""
    partition = topic.partitions[index]
    if view.has_leader(partition) and partition.leader == partition.replicas[0]:
        return None
    change = _decide(view, topic.topic_id, index, partition, balance=True)
    if change is None or change.after.leader != partition.replicas[0]:
        raise Unavailable(f"{topic.name}-{index}: broker {partition.replicas[0]} is not in sync or offline")
    return change


def without_replica(partition: PartitionState, node_id: int) -> PartitionState:
    """Return the state of a partition without the replica `node_id`, whose log is lost, in the in-sync set.

    The set may become empty: then no replica is known to be complete, and only an unclean election elects a leader.
    """
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
    """Return the change of one partition that is due now; None if there is none."""
    dead = [member for member in partition.isr if view.is_dead(member)]
    leader, reason = partition.leader, "in-sync member died"
    if view.has_leader(partition):
        if not view.may_lead(leader):
            leader, reason = _successor(view, partition), "leader is stopping"
        elif balance and _has_better_leader(view, partition):
            leader, reason = partition.replicas[0], "preferred leader"
        if leader == partition.leader and not dead:
            return None
    elif leader in view.expected_back:
        return None
    else:
        candidate = _next_leader(view, partition)
        if candidate is None and leader == NO_LEADER:
            return None
        leader = NO_LEADER if candidate is None else candidate
        reason = "no in-sync replica is available" if candidate is None else "leader failed"
    if leader == NO_LEADER:
        after, dead = with_leader(view, partition, NO_LEADER, partition.isr), []
    else:
        staying = tuple(member for member in partition.isr if member not in dead)
        after = with_leader(view, partition, leader, staying)
    required_sessions = {
        member: view.epoch(member) for member in {*dead, leader, partition.leader} if member >= 0
    }
    return PartitionChange(topic_id, index, partition, after, reason, required_sessions)


def _next_leader(view: ClusterView, partition: PartitionState) -> int | None:
    """Return the next leader: the first in-sync replica that is active, otherwise the first one that is draining, or
    None."""
    online = [member for member in _isr_in_order(partition) if member in view.brokers]
    for state in (BROKER_ACTIVE, BROKER_DRAINING):
        for member in online:
            registration = view.registrations.get(member)
            if registration is not None and registration.state == state:
                return member
    return None


def _successor(view: ClusterView, partition: PartitionState) -> int:
    """Return the successor of a stopping leader: the first in-sync replica that may lead, otherwise the leader
    itself."""
    return next((one for one in _isr_in_order(partition) if view.may_lead(one)), partition.leader)


def _has_better_leader(view: ClusterView, partition: PartitionState) -> bool:
    first = partition.replicas[0]
    return first != partition.leader and first in partition.isr and view.may_lead(first)


def _isr_in_order(partition: PartitionState) -> list[int]:
    """Return the in-sync replicas, the preferred leader first."""
    return [replica for replica in partition.replicas if replica in partition.isr]


def _creator_is_gone(view: ClusterView, topic: Topic) -> bool:
    assert topic.state in (TOPIC_CREATING, TOPIC_DELETING)
    created_by = topic.created_by
    if created_by is None:
        return True
    return created_by.node_id not in view.expected_back and view.epoch(created_by.node_id) != created_by.epoch
