"""Reassignments: a partition gets other replicas while it is served. Pure functions of a `ClusterView`.

The *target* is the list of replicas that a partition is to have. From `begin` to `finish` its replicas are the target,
followed by the other ones that it had.

    step     replicas   adding   removing   target
             1 2 3                          1 2 3
    begin    1 4 2 3    4        2 3        1 4
    finish   1 4                            1 4

Added replicas follow the leader as any replica that is not in sync, and the leader adds them to the in-sync set. The
controller finishes a reassignment; brokers that have no replica any more then delete their copy.

Invariants:
* No replica that the partition had is removed before all added ones, and as many of the target as acks=all may need, at
  least a majority, are in sync.
* A replica is removed from the in-sync set only together with its removal from the replicas, and another one stays in
  the set.
* The leader epoch increases when a replica is removed, so that no late fetch request of a former replica is taken for
  one of a replica that was added again with an empty log (KIP-903 covers a restart of the broker only).
* The replication factor of a topic is at most the number of old and of new replicas of each of its partitions, so that
  the default of min.insync.replicas never exceeds them.

Sources: KIP-455, KIP-860.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from mansio.errors import (
    InvalidReplicaAssignment,
    InvalidReplicationFactor,
    NoReassignmentInProgress,
    Unavailable,
)
from mansio.metadata.cluster_view import PartitionChange, with_leader
from mansio.metadata.model import NO_LEADER

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mansio.metadata.cluster_view import ClusterView
    from mansio.metadata.model import PartitionState, Topic


class Reassignment(NamedTuple):
    """A request for a partition: its new replicas, the preferred leader first; None cancels a reassignment."""

    topic: str
    partition: int
    replicas: Sequence[int] | None


class FactorChange(NamedTuple):
    """Decision to store another replication factor of a topic."""

    topic: Topic
    replication_factor: int


def is_reassigned(partition: PartitionState) -> bool:
    """Whether a reassignment of the partition is in progress."""
    return bool(partition.adding or partition.removing)


def original_of(partition: PartitionState) -> tuple[int, ...]:
    """Return the replicas to which a cancellation returns."""
    return tuple(replica for replica in partition.replicas if replica not in partition.adding)


def target_of(partition: PartitionState) -> tuple[int, ...]:
    """Return the replicas that the partition is to have."""
    return tuple(replica for replica in partition.replicas if replica not in partition.removing)


def factor_of(partition: PartitionState) -> int:
    """Return the number of replicas of `original_of` or `target_of`, whichever has fewer."""
    return len(partition.replicas) - max(len(partition.adding), len(partition.removing))


def begin(
    view: ClusterView, topic: Topic, index: int, target: Sequence[int], *, may_change_factor: bool = True
) -> PartitionChange | None:
    """Begin to move a partition to the replicas `target`, the preferred leader first; None if it has exactly these.

    A reassignment in progress gets the new target; replicas that it was adding and that are not in the new target are
    removed. Raises `InvalidReplicaAssignment` if the target is not possible, or adds a replica on the host of another
    one, `InvalidReplicationFactor` if there are more replicas than hosts, if their number is another one, without
    `may_change_factor`, or below min.insync.replicas of the topic, and `Unavailable` if an added broker is not active,
    or no replica may lead.
    """
    partition = topic.partitions[index]
    original = original_of(partition)
    target = tuple(target)
    _check_target(view, topic, index, original, target, may_change_factor=may_change_factor)
    adding = tuple(replica for replica in target if replica not in original)
    removing = tuple(replica for replica in original if replica not in target)
    replicas = target + removing
    if (replicas, adding, removing) == (partition.replicas, partition.adding, partition.removing):
        return None
    name = f"{topic.name}-{index}"
    after = _with_replicas(view, name, partition, replicas)
    return _change(
        view, topic, index, after._replace(adding=adding, removing=removing), "reassignment begins", adding
    )


def _check_target(
    view: ClusterView,
    topic: Topic,
    index: int,
    original: tuple[int, ...],
    target: tuple[int, ...],
    *,
    may_change_factor: bool,
) -> None:
    name = f"{topic.name}-{index}"
    if not target or len({*target}) < len(target):
        raise InvalidReplicaAssignment(f"{name}: {list(target)} must name at least one broker, each once")
    if unknown := sorted(replica for replica in target if replica not in view.registrations):
        raise InvalidReplicaAssignment(f"{name}: there is no broker {unknown[0]}")
    if not may_change_factor and len(target) != len(original):
        raise InvalidReplicationFactor(
            f"{name} has {len(original)} replicas, not {len(target)}, and the request forbids another number"
        )
    in_sync_min = _in_sync_min(topic)
    if len(target) < min(in_sync_min, len(original)):
        raise InvalidReplicationFactor(
            f"{name}: {len(target)} replicas are fewer than min.insync.replicas={in_sync_min} of the topic"
        )
    _check_hosts(view, name, original, target)
    for replica in target:
        if replica not in original and not view.may_lead(replica):
            raise Unavailable(f"{name}: broker {replica} is offline or stopping")


def _check_hosts(view: ClusterView, name: str, original: tuple[int, ...], target: tuple[int, ...]) -> None:
    """Check that no added replica is on the host of another one. Those that a partition has may stay: they may be older
    than the labels of their hosts."""
    hosts = len({view.host(node_id) for node_id in view.registrations})
    if len(target) > max(hosts, len(original)):
        raise InvalidReplicationFactor(f"{name}: {len(target)} replicas are more than {hosts} host(s)")
    kept: dict[str, int] = {view.host(replica): replica for replica in target if replica in original}
    for replica in target:
        if replica not in original:
            other = kept.setdefault(view.host(replica), replica)
            if other != replica:
                raise InvalidReplicaAssignment(f"{name}: brokers {other} and {replica} are on the same host")


def cancel(view: ClusterView, topic: Topic, index: int) -> PartitionChange:
    """Return a partition to the replicas that it had before its reassignment.

    Raises `NoReassignmentInProgress`, `InvalidReplicaAssignment` if none of them is in sync, and `Unavailable` if none
    may lead.
    """
    partition = topic.partitions[index]
    name = f"{topic.name}-{index}"
    if not is_reassigned(partition):
        raise NoReassignmentInProgress(f"no reassignment of {name} is in progress")
    after = _with_replicas(view, name, partition, original_of(partition))
    return _change(view, topic, index, after._replace(adding=(), removing=()), "reassignment is cancelled")


def finish(view: ClusterView, topic: Topic, index: int) -> PartitionChange | None:
    """Finish the reassignment of a partition, which has a leader; None if this is not due yet."""
    partition = topic.partitions[index]
    if not is_reassigned(partition):
        return None
    target = target_of(partition)
    in_sync = {*partition.isr} & {*target}
    if not in_sync.issuperset(partition.adding) or len(in_sync) < _needed_in_sync(topic, len(target)):
        return None
    if not all(view.epoch(replica) for replica in partition.adding):
        return None  # one that is away may have lost its log
    if topic.replication_factor > len(target):
        return None  # it is reduced first, so that the default of min.insync.replicas can be met
    try:
        after = _with_replicas(view, f"{topic.name}-{index}", partition, target)
    except Unavailable:
        return None
    after = after._replace(adding=(), removing=())
    return _change(view, topic, index, after, "reassignment is finished", partition.adding)


def _needed_in_sync(topic: Topic, count: int) -> int:
    """Return how many of `count` new replicas must be in sync: a majority, or what acks=all needs if that is more."""
    return min(max(count // 2 + 1, _in_sync_min(topic)), count)


def _in_sync_min(topic: Topic) -> int:
    """Return min.insync.replicas of the topic, 1 if it has the default, a majority."""
    return int(topic.configs.get("min.insync.replicas", 1))


def factor_change(topic: Topic) -> FactorChange | None:
    """Return the replication factor that a topic should have, after a reassignment changed the numbers of replicas;
    None if it has it."""
    factor = min(map(factor_of, topic.partitions))
    return None if factor == topic.replication_factor else FactorChange(topic, factor)


def _with_replicas(
    view: ClusterView, name: str, partition: PartitionState, replicas: tuple[int, ...]
) -> PartitionState:
    """Return a partition with these replicas. If the leader is none of them, the first one in sync that may lead is
    elected. Raises `InvalidReplicaAssignment` if none is in sync, `Unavailable` if none may lead."""
    removed = {*partition.replicas} - {*replicas}
    in_sync = tuple(replica for replica in partition.isr if replica in replicas)
    if partition.isr and not in_sync:
        raise InvalidReplicaAssignment(f"{name}: none of the replicas {list(replicas)} is in sync")
    leader = partition.leader
    if leader in removed:
        leader = next((one for one in replicas if one in in_sync and view.may_lead(one)), NO_LEADER)
        if leader == NO_LEADER:
            raise Unavailable(f"{name}: no broker that is in sync may lead it")
    after = partition._replace(replicas=replicas, isr=in_sync, partition_epoch=partition.partition_epoch + 1)
    if leader != partition.leader:
        return with_leader(view, partition, leader, in_sync)._replace(replicas=replicas)
    return after._replace(leader_epoch=partition.leader_epoch + bool(removed))


def _change(
    view: ClusterView,
    topic: Topic,
    index: int,
    after: PartitionState,
    reason: str,
    adding: tuple[int, ...] = (),
) -> PartitionChange:
    before = topic.partitions[index]
    required = {*adding, *({after.leader, before.leader} if after.leader != before.leader else ())}
    sessions = {node_id: view.epoch(node_id) for node_id in required if node_id >= 0}
    return PartitionChange(topic.topic_id, index, before, after, reason, sessions)
