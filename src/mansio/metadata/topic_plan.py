"""Plans of topics: names, numbers of partitions, placement of replicas. Pure functions without effects.

On a single node every partition is placed on it; in a cluster on the brokers that may lead (`ClusterBrokers`), with all
of them in sync from the start, because nothing has been written yet. If there are fewer of these than replicas, the
others are placed on offline brokers, which catch up when they return.

Leaders are placed on all brokers in turn, alternating racks, so each broker leads the same number of partitions plus or
minus one. The distance of the other replicas grows with each round, so that the partitions of a failed broker get
leaders on many brokers.

Invariants:
* A plan is checked before anything of its size is allocated; `partitions_available` is the number of partitions
  that may be added.
* The replicas of a partition are on different brokers, and on as many racks as possible. A broker without a rack counts
  as a rack of its own.
* Equal arguments give equal results.
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
from mansio.metadata.model import PartitionState

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Mapping, Sequence

    from mansio.metadata.model import BrokerState

TOPIC_NAME_CHARACTERS_MAX: Final = 249
INTERNAL_TOPICS: Final = frozenset({"__consumer_offsets", "__transaction_state", "__share_group_state"})
INTERNAL_CONFIGS: Final = {
    "cleanup.policy": "compact",
    "retention.ms": "-1",
    "retention.bytes": "-1",
    "segment.bytes": str(100 << 20),
}
"""Settings of internal topics, which hold the latest record of each key. Small segments: only closed segments are
compacted, and the next start reads everything."""

INTERNAL_CONFIGS_PRUNED: Final = {
    "cleanup.policy": "delete",
    "retention.ms": "-1",
    "retention.bytes": "-1",
    "segment.bytes": str(16 << 20),
}
"""Settings of an internal topic whose records refer to earlier ones: the broker determines from which offset on its
log is kept. Small segments: only whole segments are deleted."""

PRUNED_TOPICS: Final = frozenset({"__share_group_state"})

Partitions = tuple[PartitionState, ...]


class NewTopic(NamedTuple):
    """A topic to be created. -1: the default. `assignments` (partition -> brokers) determine both numbers."""

    name: str
    partitions: int = -1
    replication_factor: int = -1
    assignments: Mapping[int, Sequence[int]] | None = None
    configs: Sequence[tuple[str, str | None]] = ()


class ClusterBrokers(NamedTuple):
    """The brokers of a cluster on which replicas can be placed."""

    brokers: Mapping[int, BrokerState]
    """Those that may lead."""
    known: frozenset[int]
    """All registered brokers, online or not."""
    replication_factor: int
    """Default of a new topic."""
    start: int
    """Number of the first broker in the round: any number, preferably different for each topic."""


def check_topic_name(name: str | None) -> None:
    """Check a topic name: 1 to 249 characters of `[a-zA-Z0-9._-]`, not `.` or `..`. Raises `InvalidTopic`."""
    if not name:
        raise InvalidTopic("a topic name is required")
    if name in (".", ".."):
        raise InvalidTopic(f"a topic cannot be named {name!r}")
    if len(name) > TOPIC_NAME_CHARACTERS_MAX:
        raise InvalidTopic(f"a topic name of {len(name)} characters; {TOPIC_NAME_CHARACTERS_MAX} are allowed")
    if not re.fullmatch(r"[a-zA-Z0-9._-]+", name):
        raise InvalidTopic(f"topic name {name!r}: only letters, digits, '.', '_' and '-' are allowed")


def colliding(name: str, others: Iterable[str]) -> str | None:
    """A topic whose name differs only in `.` and `_`, so that Kafka's metrics of the two collide."""
    if "." not in name and "_" not in name:
        return None
    folded = name.replace(".", "_")
    return next((other for other in others if other != name and other.replace(".", "_") == folded), None)


def plan_partitions(
    new: NewTopic,
    node_id: int,
    default_count: int,
    partitions_available: int,
    hosts: ClusterBrokers | None = None,
) -> tuple[Partitions, int]:
    """The partitions of a new topic and its replication factor. `hosts` is None on a single node.

    Raises `InvalidPartitions`, `InvalidReplicationFactor`, `InvalidReplicaAssignment`, `PolicyViolation`.
    """
    if new.assignments:
        return _assigned(new, new.assignments, node_id, partitions_available, hosts)
    count = default_count if new.partitions == -1 else new.partitions
    if hosts is None and new.replication_factor not in (-1, 1):
        raise InvalidReplicationFactor(
            f"replication factor {new.replication_factor} is larger than the number of brokers: 1"
        )
    if count < 1:
        raise InvalidPartitions(f"{count} partitions: at least 1 is required")
    _check_partition_limit(count, partitions_available)
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
    partitions_available: int,
    hosts: ClusterBrokers | None = None,
) -> Partitions:
    """The partitions to add to a topic that has `there`, so that it has `count`. Raises as `plan_partitions`."""
    added = count - there
    if added < 1:
        raise InvalidPartitions(f"{count} partitions: the topic has {there}; the number can only grow")
    _check_partition_limit(added, partitions_available)
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
    partitions_available: int,
    hosts: ClusterBrokers | None,
) -> tuple[Partitions, int]:
    count = len(assignments)
    if new.partitions not in (-1, count):
        raise InvalidPartitions("assignments determine the number of partitions; leave it at -1")
    if new.replication_factor != -1:
        raise InvalidReplicationFactor("assignments determine the replication factor; leave it at -1")
    if sorted(assignments) != list(range(count)):
        raise InvalidReplicaAssignment("the assigned partitions must be numbered from 0 without a gap")
    replication_factor = 1 if hosts is None else len(assignments[0])
    for index, replicas in assignments.items():
        _check_replicas(index, replicas, replication_factor, _known(node_id, hosts))
    _check_partition_limit(count, partitions_available)
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
        raise InvalidReplicationFactor("no broker may lead a partition")
    usable = [UsableBroker(broker.node_id, broker.rack) for broker in hosts.brokers.values()]
    placed = place_replicas(count, min(replication_factor, len(usable)), usable, start=start)
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
    """A new partition: the first of its brokers that may lead is the leader; those that may lead are in sync."""
    in_sync = tuple(replica for replica in replicas if replica in hosts.brokers)
    if not in_sync:
        raise InvalidReplicaAssignment(f"partition {index}: none of the brokers {list(replicas)} may lead")
    leader = in_sync[0]
    return PartitionState(replicas, leader, 0, in_sync, leader_broker_epoch=hosts.brokers[leader].epoch)


def _known(node_id: int, hosts: ClusterBrokers | None) -> frozenset[int]:
    return frozenset((node_id,)) if hosts is None else hosts.known


def _check_partition_limit(more: int, partitions_available: int) -> None:
    if more > partitions_available:
        raise PolicyViolation(f"{more} more partitions: partitions_max allows {partitions_available} more")


def _check_replicas(index: int, replicas: Sequence[int], expected: int, known: frozenset[int]) -> None:
    if not replicas or len(replicas) != expected or len(set(replicas)) != len(replicas):
        raise InvalidReplicaAssignment(f"partition {index}: {expected} different broker(s) are required")
    unknown = [replica for replica in replicas if replica not in known]
    if unknown:
        raise InvalidReplicaAssignment(f"partition {index}: unknown broker {unknown[0]}")


# ---------------------------------------------------------------------- placement of replicas


class UsableBroker(NamedTuple):
    """A broker on which replicas can be placed."""

    node_id: int
    rack: str | None


def place_replicas(
    count: int, replication_factor: int, brokers: Iterable[UsableBroker], *, start: int = 0
) -> list[tuple[int, ...]]:
    """The replicas of `count` partitions, the preferred leader first. `start`: number of the first broker in the round,
    that is, the number of existing partitions of the topic plus an arbitrary offset.

    1 <= `replication_factor` <= number of brokers.
    """
    ring = _alternate_racks(brokers)
    size = len(ring)
    assert 1 <= replication_factor <= size, "the caller checks the number of brokers"
    placed = []
    for number in range(start, start + count):
        leader, distance = number % size, number // size
        others = [ring[(leader + 1 + (distance + step) % (size - 1)) % size] for step in range(size - 1)]
        placed.append(_spread(ring[leader], others, replication_factor))
    return placed


def _spread(leader: UsableBroker, others: Sequence[UsableBroker], replication_factor: int) -> tuple[int, ...]:
    chosen = [leader]
    taken = {_rack(leader): 1}
    candidates = list(others)
    while len(chosen) < replication_factor:
        following = min(candidates, key=lambda one: taken.get(_rack(one), 0))  # the first one among equals
        candidates.remove(following)
        chosen.append(following)
        taken[_rack(following)] = taken.get(_rack(following), 0) + 1
    return tuple(one.node_id for one in chosen)


def _alternate_racks(brokers: Iterable[UsableBroker]) -> list[UsableBroker]:
    """One broker of each rack, then the next one of each rack."""
    racks: dict[Hashable, list[UsableBroker]] = {}
    for one in sorted(brokers, key=lambda one: one.node_id):
        racks.setdefault(_rack(one), []).append(one)
    ring = []
    while racks:
        for rack in list(racks):
            ring.append(racks[rack].pop(0))
            if not racks[rack]:
                del racks[rack]
    return ring


def _rack(one: UsableBroker) -> Hashable:
    return one.rack if one.rack is not None else (one.node_id,)
