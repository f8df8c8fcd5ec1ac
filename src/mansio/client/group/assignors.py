"""Assignors of classic consumer groups: range, round-robin, sticky, cooperative-sticky.

The leader of a classic group computes the assignment of all members. Each strategy is a pure function
`(members, partition counts) -> member id -> partitions`.

Invariants of a result:
* Every member has an entry.
* Every partition of a subscribed topic belongs to exactly one member that subscribes to it. Only the cooperative
  strategy leaves partitions out: one that moves between members is unassigned until its previous owner has revoked it
  (KIP-429), which takes a second rebalance.

Sources: Kafka's AbstractPartitionAssignor family, KIP-54 (sticky), KIP-341, KIP-429 (cooperative).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import cycle
from typing import TYPE_CHECKING, Protocol

from mansio.client.types import TopicPartition

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Assignments = dict[str, list[TopicPartition]]


@dataclass(frozen=True, slots=True)
class Member:
    """One member, as the leader receives it from JoinGroup."""

    member_id: str
    topics: tuple[str, ...]
    owned: tuple[TopicPartition, ...] = ()
    generation: int = -1
    instance_id: str | None = None


class Strategy(Protocol):
    """`partition_counts` has every existing topic; other topics are ignored."""

    def __call__(self, members: Sequence[Member], partition_counts: Mapping[str, int], /) -> Assignments: ...


@dataclass(frozen=True, slots=True)
class Assignor:
    """A strategy and its protocol name. Cooperative: members keep their partitions while they rejoin."""

    name: str
    assign: Strategy
    cooperative: bool = False


def assign_range(members: Sequence[Member], partition_counts: Mapping[str, int]) -> Assignments:
    """Per topic: contiguous ranges; the first members get one partition more if it does not divide evenly."""
    given: Assignments = {member.member_id: [] for member in members}
    for topic, subscribed in _subscribers(members, partition_counts).items():
        each, rest = divmod(partition_counts[topic], len(subscribed))
        first = 0
        for position, member in enumerate(subscribed):
            end = first + each + (position < rest)
            given[member.member_id] += [TopicPartition(topic, index) for index in range(first, end)]
            first = end
    return given


def assign_round_robin(members: Sequence[Member], partition_counts: Mapping[str, int]) -> Assignments:
    """All partitions of all topics in turn, skipping members that do not subscribe."""
    given: Assignments = {member.member_id: [] for member in members}
    turn = cycle(_in_order(members))
    for topic, subscribed in sorted(_subscribers(members, partition_counts).items()):
        wanted = {member.member_id for member in subscribed}
        for index in range(partition_counts[topic]):
            member = next(candidate for candidate in turn if candidate.member_id in wanted)
            given[member.member_id].append(TopicPartition(topic, index))
    return given


def assign_sticky(members: Sequence[Member], partition_counts: Mapping[str, int]) -> Assignments:
    """As balanced as the subscriptions allow, with the fewest moves."""
    subscribed = {
        topic: [member.member_id for member in found]
        for topic, found in _subscribers(members, partition_counts).items()
    }
    given: Assignments = {member.member_id: [] for member in members}
    for partition, owner in _claims(members, partition_counts).items():
        given[owner].append(partition)
    kept = {partition for partitions in given.values() for partition in partitions}
    loose = [
        TopicPartition(topic, index)
        for topic in sorted(subscribed, key=lambda topic: (len(subscribed[topic]), topic))
        for index in range(partition_counts[topic])
        if (topic, index) not in kept
    ]
    for partition in loose:
        given[_least_loaded(subscribed[partition.topic], given)].append(partition)
    _balance(given, subscribed)
    for partitions in given.values():
        partitions.sort()
    return given


def assign_cooperative_sticky(members: Sequence[Member], partition_counts: Mapping[str, int]) -> Assignments:
    """Sticky, without the partitions that another member still owns."""
    given = assign_sticky(members, partition_counts)
    holders = _holders(members)
    return {
        member: [partition for partition in partitions if member in holders.get(partition, {member})]
        for member, partitions in given.items()
    }


def _holders(members: Sequence[Member]) -> dict[TopicPartition, set[str]]:
    """Owners of each partition, according to the newest generation that claims it, subscribed or not."""
    newest: dict[TopicPartition, int] = {}
    holders: dict[TopicPartition, set[str]] = {}
    for member in members:
        for partition in member.owned:
            if member.generation > newest.get(partition, -2):
                newest[partition] = member.generation
                holders[partition] = set()
            if member.generation == newest[partition]:
                holders[partition].add(member.member_id)
    return holders


def _balance(given: Assignments, subscribed: Mapping[str, list[str]]) -> None:
    """Move partitions from the fuller to the emptier until no move makes two members more even.

    Always one move from the fullest that can give: taking more from one at once would leave it with less than its
    share, and what it lost would have moved for nothing. Ends because every move lowers the sum of the squares of
    the loads.
    """
    while _move_one(given, subscribed):
        pass


def _move_one(given: Assignments, subscribed: Mapping[str, list[str]]) -> bool:
    emptiest = {topic: _least_loaded(members, given) for topic, members in subscribed.items()}
    for member in sorted(given, key=lambda member: (-len(given[member]), member)):
        partitions = given[member]
        targets = {topic: emptiest[topic] for topic in {partition.topic for partition in partitions}}
        if not targets:
            return False
        topic, target = min(targets.items(), key=lambda item: (len(given[item[1]]), item))
        if len(given[target]) + 1 < len(partitions):
            moving = max(partition for partition in partitions if partition.topic == topic)
            partitions.remove(moving)
            given[target].append(moving)
            return True
    return False


def _least_loaded(candidates: Sequence[str], given: Assignments) -> str:
    return min(candidates, key=lambda member: (len(given[member]), member))


def _claims(members: Sequence[Member], partition_counts: Mapping[str, int]) -> dict[TopicPartition, str]:
    """Member that may keep each partition. Of two members that claim one partition, the one of the newer generation
    owned it last; if both have the same generation, the partition is reassigned."""
    newest: dict[TopicPartition, int] = {}
    claims: dict[TopicPartition, str] = {}
    rivals: Counter[tuple[TopicPartition, int]] = Counter()
    for member in members:
        wanted = set(member.topics)
        for partition in member.owned:
            if partition.topic not in wanted or partition.partition >= partition_counts.get(
                partition.topic, 0
            ):
                continue
            rivals[partition, member.generation] += 1
            if member.generation > newest.get(partition, -2):
                newest[partition] = member.generation
                claims[partition] = member.member_id
    return {
        partition: member for partition, member in claims.items() if rivals[partition, newest[partition]] == 1
    }


def _subscribers(members: Sequence[Member], partition_counts: Mapping[str, int]) -> dict[str, list[Member]]:
    """Members of each existing topic, in the order that all clients use."""
    found: dict[str, list[Member]] = {}
    for member in _in_order(members):
        for topic in dict.fromkeys(member.topics):
            if partition_counts.get(topic, 0) > 0:
                found.setdefault(topic, []).append(member)
    return found


def _in_order(members: Sequence[Member]) -> list[Member]:
    """Static members first, by instance id, so that their assignment survives a restart; then by member id."""
    return sorted(members, key=lambda m: (m.instance_id is None, m.instance_id or "", m.member_id))


RANGE = Assignor("range", assign_range)
ROUND_ROBIN = Assignor("roundrobin", assign_round_robin)
STICKY = Assignor("sticky", assign_sticky)
COOPERATIVE_STICKY = Assignor("cooperative-sticky", assign_cooperative_sticky, cooperative=True)

BY_NAME = {assignor.name: assignor for assignor in (COOPERATIVE_STICKY, RANGE, ROUND_ROBIN, STICKY)}
