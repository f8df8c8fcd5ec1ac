"""What a topic will look like: names, numbers of partitions, who keeps them. Pure planning, no effects.

Owns the rules for names, partition counts and replica assignments. On a single node every partition is placed on it;
in a cluster on the brokers that may lead (`ClusterBrokers`), all of them in sync from the start: nothing has been
written yet. Where these are fewer than the copies, some go to brokers that are away and catch up when they are back.

Always true: a plan is checked before anything of its size is allocated; `room` is how many partitions may be added.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, NamedTuple

from mansio.errors import (
    InvalidPartitions,
    InvalidReplicaAssignment,
    InvalidReplicationFactor,
    InvalidTopic,
    PolicyViolation,
)
from mansio.metadata.controller.placement import UsableBroker, place_replicas
from mansio.metadata.model import PartitionState

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from mansio.metadata.model import BrokerState

TOPIC_NAME_CHARACTERS_MAX: Final = 249
INTERNAL_TOPICS: Final = frozenset({"__consumer_offsets", "__transaction_state", "__share_group_state"})
INTERNAL_CONFIGS: Final = {
    "cleanup.policy": "compact",
    "retention.ms": "-1",
    "retention.bytes": "-1",
    "segment.bytes": str(100 << 20),
}
"""What the broker's own topics are made with: views of the latest record of each key. Small segments, because only
closed ones are compacted, and all that is left is read at the next start."""

INTERNAL_CONFIGS_PRUNED: Final = {
    "cleanup.policy": "delete",
    "retention.ms": "-1",
    "retention.bytes": "-1",
    "segment.bytes": str(16 << 20),
}
"""The same of a topic whose records change what those before them said: the broker itself says from where on its log is
kept. Small segments, because only whole ones leave the disk."""

PRUNED_TOPICS: Final = frozenset({"__share_group_state"})

Partitions = tuple[PartitionState, ...]


class NewTopic(NamedTuple):
    """A topic to be. -1: the default. `assignments` (partition -> brokers) tell both numbers."""

    name: str
    partitions: int = -1
    replication_factor: int = -1
    assignments: Mapping[int, Sequence[int]] | None = None
    configs: Sequence[tuple[str, str | None]] = ()


class ClusterBrokers(NamedTuple):
    """The brokers of a cluster, as a plan needs them."""

    brokers: Mapping[int, BrokerState]
    """Those that may lead."""
    known: frozenset[int]
    """All that are registered, whether or not they are there."""
    replication_factor: int
    """Of a topic that asks for none."""
    start: int
    """Where on the round over the brokers a new topic begins: anything, best another for each topic."""


def check_topic_name(name: str | None) -> None:
    """Kafka's rule: 1 to 249 letters, digits, `.`, `_` and `-`, not `.` or `..`. Raises `InvalidTopic`."""
    if not name:
        raise InvalidTopic("a topic needs a name")
    if name in (".", ".."):
        raise InvalidTopic(f"a topic cannot be named {name!r}")
    if len(name) > TOPIC_NAME_CHARACTERS_MAX:
        raise InvalidTopic(f"a topic name of {len(name)} characters; {TOPIC_NAME_CHARACTERS_MAX} are allowed")
    if not re.fullmatch(r"[a-zA-Z0-9._-]+", name):
        raise InvalidTopic(f"topic name {name!r}: only letters, digits, '.', '_' and '-' are allowed")


def colliding(name: str, others: Iterable[str]) -> str | None:
    """A topic whose name differs only in `.` and `_`: metrics cannot tell the two apart."""
    if "." not in name and "_" not in name:
        return None
    folded = name.replace(".", "_")
    return next((other for other in others if other != name and other.replace(".", "_") == folded), None)


def plan_partitions(
    new: NewTopic, node_id: int, default_count: int, room: int, hosts: ClusterBrokers | None = None
) -> tuple[Partitions, int]:
    """The partitions of a new topic and its replication factor. `hosts` is None on a single node.

    Raises `InvalidPartitions`, `InvalidReplicationFactor`, `InvalidReplicaAssignment`, `PolicyViolation`.
    """
    if new.assignments:
        return _assigned(new, new.assignments, node_id, room, hosts)
    count = default_count if new.partitions == -1 else new.partitions
    if hosts is None and new.replication_factor not in (-1, 1):
        raise InvalidReplicationFactor(
            f"replication factor {new.replication_factor} is larger than the number of brokers: 1"
        )
    if count < 1:
        raise InvalidPartitions(f"{count} partitions: at least 1 is needed")
    _check_room(count, room)
    if hosts is None:
        return _partitions(node_id, count), 1
    replication_factor = hosts.replication_factor if new.replication_factor == -1 else new.replication_factor
    return _placed(count, replication_factor, hosts, hosts.start), replication_factor


def plan_growth(
    there: int,
    count: int,
    assignments: Sequence[Sequence[int]] | None,
    *,
    node_id: int,
    replication_factor: int,
    room: int,
    hosts: ClusterBrokers | None = None,
) -> Partitions:
    """The partitions to add to a topic that has `there`, so that it has `count`. Raises as `plan_partitions`."""
    added = count - there
    if added < 1:
        raise InvalidPartitions(f"{count} partitions: the topic has {there}, and it can only grow")
    _check_room(added, room)
    if assignments is not None:
        if len(assignments) != added:
            raise InvalidReplicaAssignment(f"{added} new partitions, but {len(assignments)} assignments")
        for index, replicas in enumerate(assignments, there):
            _check_replicas(index, replicas, replication_factor, _known(node_id, hosts))
    if hosts is None:
        return _partitions(node_id, added)
    if assignments is not None:
        return tuple(
            _initial_partition(index, tuple(replicas), hosts)
            for index, replicas in enumerate(assignments, there)
        )
    return _placed(added, replication_factor, hosts, hosts.start + there)


def _assigned(
    new: NewTopic,
    assignments: Mapping[int, Sequence[int]],
    node_id: int,
    room: int,
    hosts: ClusterBrokers | None,
) -> tuple[Partitions, int]:
    count = len(assignments)
    if new.partitions not in (-1, count):
        raise InvalidPartitions("assignments tell the number of partitions; leave it at -1")
    if new.replication_factor != -1:
        raise InvalidReplicationFactor("assignments tell the replication factor; leave it at -1")
    if sorted(assignments) != list(range(count)):
        raise InvalidReplicaAssignment("the assigned partitions must be numbered from 0 without a gap")
    replication_factor = 1 if hosts is None else len(assignments[0])
    for index, replicas in assignments.items():
        _check_replicas(index, replicas, replication_factor, _known(node_id, hosts))
    _check_room(count, room)
    if hosts is None:
        return _partitions(node_id, count), 1
    begun = tuple(_initial_partition(index, tuple(assignments[index]), hosts) for index in range(count))
    return begun, replication_factor


def _partitions(node_id: int, count: int) -> Partitions:
    here = (node_id,)
    return (PartitionState(replicas=here, leader=node_id, leader_epoch=0, isr=here),) * count


def _placed(count: int, replication_factor: int, hosts: ClusterBrokers, start: int) -> Partitions:
    if not 1 <= replication_factor <= len(hosts.known):
        raise InvalidReplicationFactor(
            f"replication factor {replication_factor}: {len(hosts.known)} broker(s) are registered; start more, or ask "
            "for fewer copies"
        )
    if not hosts.brokers:
        raise InvalidReplicationFactor("no broker is there that may lead a partition")
    places = [UsableBroker(broker.node_id, broker.rack) for broker in hosts.brokers.values()]
    placed = place_replicas(count, min(replication_factor, len(places)), places, start=start)
    away = sorted(hosts.known - hosts.brokers.keys())
    return tuple(
        _initial_partition(
            index, (*there, *_rotated(away, start + index)[: replication_factor - len(there)]), hosts
        )
        for index, there in enumerate(placed)
    )


def _rotated(items: list[int], by: int) -> list[int]:
    first = by % len(items) if items else 0
    return items[first:] + items[:first]


def _initial_partition(index: int, replicas: tuple[int, ...], hosts: ClusterBrokers) -> PartitionState:
    """A partition as it begins: led by the first of its brokers that may lead, those in sync."""
    in_sync = tuple(replica for replica in replicas if replica in hosts.brokers)
    if not in_sync:
        raise InvalidReplicaAssignment(
            f"partition {index}: none of brokers {list(replicas)} is there to lead"
        )
    leader = in_sync[0]
    return PartitionState(replicas, leader, 0, in_sync, leader_broker_epoch=hosts.brokers[leader].epoch)


def _known(node_id: int, hosts: ClusterBrokers | None) -> frozenset[int]:
    return frozenset((node_id,)) if hosts is None else hosts.known


def _check_room(more: int, room: int) -> None:
    if more > room:
        raise PolicyViolation(f"{more} partitions more: partitions_max leaves room for {room}")


def _check_replicas(index: int, replicas: Sequence[int], expected: int, known: frozenset[int]) -> None:
    if not replicas or len(replicas) != expected or len(set(replicas)) != len(replicas):
        raise InvalidReplicaAssignment(f"partition {index}: {expected} different broker(s) must be named")
    unknown = [replica for replica in replicas if replica not in known]
    if unknown:
        raise InvalidReplicaAssignment(f"partition {index}: there is no broker {unknown[0]}")
