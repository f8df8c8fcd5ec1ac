"""What a topic will look like: names, numbers of partitions, who keeps them. Pure planning, no effects.

Owns the rules for names, partition counts and replica assignments. With one broker every partition is placed on it.

Always true: a plan is checked before anything of its size is allocated; `room` is how many partitions may be added.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, NamedTuple

from mansio.cluster.state import PartitionState
from mansio.errors import (
    InvalidPartitions,
    InvalidReplicaAssignment,
    InvalidReplicationFactor,
    InvalidTopic,
    PolicyViolation,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

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

Partitions = tuple[PartitionState, ...]


class NewTopic(NamedTuple):
    """A topic to be. -1: the default. `assignments` (partition -> brokers) tell both numbers."""

    name: str
    partitions: int = -1
    replication_factor: int = -1
    assignments: Mapping[int, Sequence[int]] | None = None
    configs: Sequence[tuple[str, str | None]] = ()


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


def plan_partitions(new: NewTopic, node_id: int, default_count: int, room: int) -> tuple[Partitions, int]:
    """The partitions of a new topic and its replication factor.

    Raises `InvalidPartitions`, `InvalidReplicationFactor`, `InvalidReplicaAssignment`, `PolicyViolation`.
    """
    if new.assignments:
        count = len(new.assignments)
        if new.partitions not in (-1, count):
            raise InvalidPartitions("assignments tell the number of partitions; leave it at -1")
        if new.replication_factor != -1:
            raise InvalidReplicationFactor("assignments tell the replication factor; leave it at -1")
        if sorted(new.assignments) != list(range(count)):
            raise InvalidReplicaAssignment("the assigned partitions must be numbered from 0 without a gap")
        for index, replicas in new.assignments.items():
            _check_replicas(index, replicas, 1, node_id)
    else:
        count = default_count if new.partitions == -1 else new.partitions
        if new.replication_factor not in (-1, 1):
            raise InvalidReplicationFactor(
                f"replication factor {new.replication_factor}: there is one broker, so 1 (or -1)"
            )
    if count < 1:
        raise InvalidPartitions(f"{count} partitions: at least 1 is needed")
    _check_room(count, room)
    return _partitions(node_id, count), 1


def plan_growth(
    there: int,
    count: int,
    assignments: Sequence[Sequence[int]] | None,
    *,
    node_id: int,
    replication_factor: int,
    room: int,
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
            _check_replicas(index, replicas, replication_factor, node_id)
    return _partitions(node_id, added)


def _partitions(node_id: int, count: int) -> Partitions:
    here = (node_id,)
    return (PartitionState(replicas=here, leader=node_id, leader_epoch=0, isr=here),) * count


def _check_room(more: int, room: int) -> None:
    if more > room:
        raise PolicyViolation(f"{more} partitions more: partitions_max leaves room for {room}")


def _check_replicas(index: int, replicas: Sequence[int], expected: int, node_id: int) -> None:
    if len(replicas) != expected or len(set(replicas)) != len(replicas):
        raise InvalidReplicaAssignment(f"partition {index}: {expected} different broker(s) must be named")
    unknown = [replica for replica in replicas if replica != node_id]
    if unknown:
        raise InvalidReplicaAssignment(f"partition {index}: there is no broker {unknown[0]}")
