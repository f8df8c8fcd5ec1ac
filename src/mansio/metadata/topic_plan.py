"""Plans of topics: names, numbers of partitions, placement of replicas. Pure functions.

On a single node that node is the only replica of every partition. In a cluster the replicas are placed on brokers that
may lead (`ClusterBrokers`); all of them are in sync from the start, because a new partition is empty. If there are
fewer such brokers than replicas, the other replicas are placed on offline brokers, which catch up when they return.

Leaders are placed on the brokers in turn, alternating racks, so the numbers of partitions that brokers lead differ by
at most one. The distance from the leader to the other replicas increases with each round, so that the partitions of a
failed broker get new leaders on many brokers.

Invariants:
* The number of partitions is checked before memory for them is allocated; `creatable_partition_count` is the number of
  partitions that may be added.
* The replicas of a partition are on brokers of different hosts, and on as many racks as possible. Brokers without a
  rack count as one rack for each host.
* Equal arguments give equal results.
"""

from __future__ import annotations

import re
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, NamedTuple

from mansio.config.topic_names import AUDIT_TOPIC, TOPIC_NAME_CHARACTERS_MAX, TRACE_TOPIC, unified_name
from mansio.errors import (
    InvalidPartitions,
    InvalidReplicaAssignment,
    InvalidReplicationFactor,
    InvalidTopic,
    PolicyViolation,
)
from mansio.metadata.model import PartitionState, default_host

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

    from mansio.metadata.model import BrokerState

INTERNAL_TOPICS: Final = frozenset(
    {"__consumer_offsets", "__transaction_state", "__share_group_state", AUDIT_TOPIC, TRACE_TOPIC}
)
COMPACTED_TOPIC_CONFIGS: Final = {
    "cleanup.policy": "compact",
    "retention.ms": "-1",
    "retention.bytes": "-1",
    "segment.bytes": str(100 << 20),
}
"""Settings of internal topics that keep the latest record of each key. Segments are small, because only closed segments
are compacted, and each start reads the whole topic."""

PRUNED_TOPIC_CONFIGS: Final = {
    "cleanup.policy": "delete",
    "retention.ms": "-1",
    "retention.bytes": "-1",
    "segment.bytes": str(16 << 20),
}
"""Settings of the `PRUNED_TOPICS`. Segments are small, because only whole segments are deleted."""

PRUNED_TOPICS: Final = frozenset({"__share_group_state"})
"""Internal topics whose records refer to earlier ones. The broker itself determines the offset below which records are
deleted."""

AUDIT_TOPIC_CONFIGS: Final = {
    "cleanup.policy": "delete",
    "retention.ms": str(30 * 24 * 3600 * 1000),
    "retention.bytes": "-1",
    "segment.bytes": str(16 << 20),
}
"""Settings of the topic of the audit."""

TRACE_TOPIC_CONFIGS: Final = {
    "cleanup.policy": "delete",
    "retention.ms": str(7 * 24 * 3600 * 1000),
    "retention.bytes": "-1",
    "segment.bytes": str(16 << 20),
    "max.message.bytes": str(4 << 20),
}
"""Settings of the topic of the trace. Its size is also bounded by `RetentionManager`."""

Partitions = tuple[PartitionState, ...]


class NewTopic(NamedTuple):
    """A topic to be created. -1: the default number of partitions or replicas.

    `assignments` maps partition indexes to node ids; it determines both numbers, which then must be -1. `configs` are
    (name, value) pairs of topic settings.
    """

    name: str
    partitions: int = -1
    replication_factor: int = -1
    assignments: Mapping[int, Sequence[int]] | None = None
    configs: Sequence[tuple[str, str | None]] = ()


class ClusterBrokers(NamedTuple):
    """The brokers of a cluster on which replicas can be placed, and how they are chosen."""

    brokers: Mapping[int, BrokerState]
    """The brokers that may lead, by node id."""
    known: frozenset[int]
    """The node ids of all registered brokers, online or offline."""
    replication_factor: int
    """Default replication factor of a new topic."""
    start: int
    """Position of the first leader in the round of brokers: any number, preferably different for each topic."""
    hosts: Mapping[int, str] = MappingProxyType({})
    """Labels of the hosts of brokers, by node id. A broker without one is a host of its own."""

    def host(self, node_id: int) -> str:
        """Return the label of the host of a broker."""
        return self.hosts.get(node_id) or default_host(node_id)


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


def check_internal_name(name: str) -> None:
    """Raise `InvalidTopic` for the name of an internal topic, or one that collides with it."""
    if name in INTERNAL_TOPICS:
        raise InvalidTopic(f"{name} is the broker's own name")
    if (unified := unified_name(name)) in INTERNAL_TOPICS:
        raise collision(name, unified)


def collision(name: str, other: str) -> InvalidTopic:
    """Return the error for a topic that differs from an existing one in `.` and `_` only, as Kafka refuses it: in the
    names of metrics they are the same."""
    return InvalidTopic(
        f"topic {name!r} collides with the existing topic {other!r}: '.' and '_' count as the same"
    )


def plan_partitions(
    new: NewTopic,
    node_id: int,
    default_count: int,
    creatable_partition_count: int,
    cluster_brokers: ClusterBrokers | None = None,
) -> tuple[Partitions, int]:
    """(partitions, replication factor) of a new topic. `cluster_brokers` is None on a single node.

    Raises `InvalidPartitions`, `InvalidReplicationFactor`, `InvalidReplicaAssignment`, `PolicyViolation`.
    """
    if new.assignments:
        return _plan_assigned(new, new.assignments, node_id, creatable_partition_count, cluster_brokers)
    count = default_count if new.partitions == -1 else new.partitions
    if cluster_brokers is None and new.replication_factor not in (-1, 1):
        raise InvalidReplicationFactor(
            f"replication factor {new.replication_factor} is larger than the number of brokers: 1"
        )
    if count < 1:
        raise InvalidPartitions(f"{count} partitions: at least 1 is required")
    _check_partition_limit(count, creatable_partition_count)
    if cluster_brokers is None:
        return _single_node_partitions(node_id, count), 1
    replication_factor = (
        cluster_brokers.replication_factor if new.replication_factor == -1 else new.replication_factor
    )
    return _place_partitions(
        count, replication_factor, cluster_brokers, cluster_brokers.start
    ), replication_factor


def plan_growth(
    current_count: int,
    count: int,
    assignments: Sequence[Sequence[int]] | None,
    *,
    node_id: int,
    replication_factor: int,
    creatable_partition_count: int,
    cluster_brokers: ClusterBrokers | None = None,
) -> Partitions:
    """Return the partitions to add to a topic that has `current_count` partitions, so that it has `count`.

    Raises the errors of `plan_partitions`.
    """
    added = count - current_count
    if added < 1:
        raise InvalidPartitions(
            f"{count} partitions: the topic has {current_count}; the number can only grow"
        )
    _check_partition_limit(added, creatable_partition_count)
    if assignments is not None:
        if len(assignments) != added:
            raise InvalidReplicaAssignment(f"{added} new partitions, but {len(assignments)} assignments")
        for index, replicas in enumerate(assignments, current_count):
            _check_replicas(index, replicas, replication_factor, node_id, cluster_brokers)
    if cluster_brokers is None:
        return _single_node_partitions(node_id, added)
    if assignments is not None:
        return tuple(
            _initial_partition(index, tuple(replicas), cluster_brokers)
            for index, replicas in enumerate(assignments, current_count)
        )
    return _place_partitions(
        added, replication_factor, cluster_brokers, cluster_brokers.start + current_count
    )


def _plan_assigned(
    new: NewTopic,
    assignments: Mapping[int, Sequence[int]],
    node_id: int,
    creatable_partition_count: int,
    cluster_brokers: ClusterBrokers | None,
) -> tuple[Partitions, int]:
    count = len(assignments)
    if new.partitions not in (-1, count):
        raise InvalidPartitions("assignments determine the number of partitions; leave it at -1")
    if new.replication_factor != -1:
        raise InvalidReplicationFactor("assignments determine the replication factor; leave it at -1")
    if sorted(assignments) != list(range(count)):
        raise InvalidReplicaAssignment("the assigned partitions must be numbered from 0 without a gap")
    replication_factor = 1 if cluster_brokers is None else len(assignments[0])
    for index, replicas in assignments.items():
        _check_replicas(index, replicas, replication_factor, node_id, cluster_brokers)
    _check_partition_limit(count, creatable_partition_count)
    if cluster_brokers is None:
        return _single_node_partitions(node_id, count), 1
    begun = tuple(
        _initial_partition(index, tuple(assignments[index]), cluster_brokers) for index in range(count)
    )
    return begun, replication_factor


def _single_node_partitions(node_id: int, count: int) -> Partitions:
    here = (node_id,)
    return (PartitionState(replicas=here, leader=node_id, leader_epoch=0, isr=here),) * count


def _place_partitions(
    count: int, replication_factor: int, cluster_brokers: ClusterBrokers, start: int
) -> Partitions:
    _check_factor(replication_factor, cluster_brokers)
    if not cluster_brokers.brokers:
        raise InvalidReplicationFactor("no broker may lead a partition")
    usable = [
        UsableBroker(broker.node_id, broker.rack, cluster_brokers.host(broker.node_id))
        for broker in cluster_brokers.brokers.values()
    ]
    usable_hosts = len({one.host for one in usable})
    placed = place_replicas(count, min(replication_factor, usable_hosts), usable, start=start)
    away = sorted(cluster_brokers.known - cluster_brokers.brokers.keys())
    return tuple(
        _initial_partition(
            index,
            _add_offline(there, _rotate(away, start + index), replication_factor, cluster_brokers),
            cluster_brokers,
        )
        for index, there in enumerate(placed)
    )


def _check_factor(replication_factor: int, cluster_brokers: ClusterBrokers) -> None:
    brokers = len(cluster_brokers.known)
    hosts = len({cluster_brokers.host(node_id) for node_id in cluster_brokers.known})
    if 1 <= replication_factor <= hosts:
        return
    where = "" if hosts == brokers else f" on {hosts} host(s)"
    what = "brokers" if hosts == brokers else "brokers on other hosts"
    raise InvalidReplicationFactor(
        f"replication factor {replication_factor}: {brokers} broker(s) are registered{where}; start more {what}, or "
        "use a lower replication factor"
    )


def _add_offline(
    replicas: tuple[int, ...], away: list[int], replication_factor: int, cluster_brokers: ClusterBrokers
) -> tuple[int, ...]:
    """Return replicas with offline brokers, each on another host, until there are `replication_factor`."""
    found = list(replicas)
    hosts = {cluster_brokers.host(node_id) for node_id in found}
    for node_id in away:
        if len(found) == replication_factor:
            break
        if (host := cluster_brokers.host(node_id)) not in hosts:
            found.append(node_id)
            hosts.add(host)
    return tuple(found)


def _rotate(items: list[int], by: int) -> list[int]:
    first = by % len(items) if items else 0
    return items[first:] + items[:first]


def _initial_partition(
    index: int, replicas: tuple[int, ...], cluster_brokers: ClusterBrokers
) -> PartitionState:
    """Return a new partition: its in-sync replicas are those that may lead, and the first of them is the leader."""
    in_sync = tuple(replica for replica in replicas if replica in cluster_brokers.brokers)
    if not in_sync:
        raise InvalidReplicaAssignment(f"partition {index}: none of the brokers {list(replicas)} may lead")
    leader = in_sync[0]
    return PartitionState(
        replicas, leader, 0, in_sync, leader_broker_epoch=cluster_brokers.brokers[leader].epoch
    )


def _known_brokers(node_id: int, cluster_brokers: ClusterBrokers | None) -> frozenset[int]:
    return frozenset((node_id,)) if cluster_brokers is None else cluster_brokers.known


def _check_partition_limit(more: int, creatable_partition_count: int) -> None:
    if more > creatable_partition_count:
        raise PolicyViolation(
            f"{more} more partitions: partitions_max allows {creatable_partition_count} more"
        )


def _check_replicas(
    index: int, replicas: Sequence[int], expected: int, node_id: int, cluster_brokers: ClusterBrokers | None
) -> None:
    known = _known_brokers(node_id, cluster_brokers)
    if not replicas or len(replicas) != expected or len(set(replicas)) != len(replicas):
        raise InvalidReplicaAssignment(f"partition {index}: {expected} different broker(s) are required")
    unknown = [replica for replica in replicas if replica not in known]
    if unknown:
        raise InvalidReplicaAssignment(f"partition {index}: unknown broker {unknown[0]}")
    if cluster_brokers is not None and (pair := same_host(replicas, cluster_brokers.host)) is not None:
        raise InvalidReplicaAssignment(
            f"partition {index}: brokers {pair[0]} and {pair[1]} are on the same host"
        )


def same_host(replicas: Iterable[int], host: Callable[[int], str]) -> tuple[int, int] | None:
    """Return two of the brokers that are on the same host, as `host` returns it; None if there are none."""
    seen: dict[str, int] = {}
    for node_id in replicas:
        other = seen.setdefault(host(node_id), node_id)
        if other != node_id:
            return other, node_id
    return None


# ---------------------------------------------------------------------- placement of replicas


class UsableBroker(NamedTuple):
    """A broker on which replicas can be placed. `host`: the label of its host; empty: it is a host of its own."""

    node_id: int
    rack: str | None
    host: str = ""


def place_replicas(
    count: int, replication_factor: int, brokers: Iterable[UsableBroker], *, start: int = 0
) -> list[tuple[int, ...]]:
    """Return the replicas of `count` partitions, each with its preferred leader first.

    `start` is the position of the first leader in the round of brokers: the number of existing partitions of the topic
    plus an arbitrary number. `replication_factor` is at least 1 and at most the number of hosts.
    """
    ring = _alternate_racks(brokers)
    racks, hosts = [_rack(one) for one in ring], [_host(one) for one in ring]
    assert 1 <= replication_factor <= len({*hosts}), "the caller checks the number of hosts"
    return [
        tuple(
            ring[position].node_id for position in _choose_positions(racks, hosts, number, replication_factor)
        )
        for number in range(start, start + count)
    ]


def _choose_positions(
    racks: Sequence[Hashable], hosts: Sequence[Hashable], number: int, replication_factor: int
) -> list[int]:
    """Return the positions, in the round of brokers, of the replicas of one partition: one after the other the nearest
    broker behind the leader, at the distance of this round, on a host without one, whose rack has the fewest of them.
    `racks`, `hosts`: those of the brokers in the round."""
    size = len(racks)
    leader, distance = number % size, number // size
    chosen, used, taken = [leader], {hosts[leader]}, {racks[leader]: 1}
    level = 0
    while len(chosen) < replication_factor:
        # In each pass the racks that have `level` replicas get another one.
        for step in range(size - 1):
            position = (leader + 1 + (distance + step) % (size - 1)) % size
            rack, host = racks[position], hosts[position]
            if taken.get(rack, 0) == level and host not in used:
                chosen.append(position)
                if len(chosen) == replication_factor:
                    break
                used.add(host)
                taken[rack] = level + 1
        level += 1
    return chosen


def _alternate_racks(brokers: Iterable[UsableBroker]) -> list[UsableBroker]:
    """Return the brokers ordered by turns: one broker of each rack, then the next broker of each rack."""
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
    return one.rack if one.rack is not None else (_host(one),)


def _host(one: UsableBroker) -> str:
    return one.host or default_host(one.node_id)
