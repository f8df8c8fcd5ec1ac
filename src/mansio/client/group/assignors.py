"""Assignors of classic consumer groups: range, round-robin, sticky, cooperative-sticky.

The leader of a classic group computes the assignment of all members. An assignment function is a pure function of the
members and the partition counts of topics, and returns the assigned partitions by member id.

Invariants of an assignment:
* It has an entry for every member.
* Every partition of a subscribed topic is assigned to exactly one member that subscribes to the topic.
  Cooperative-sticky is the exception: a partition that moves between members is assigned only in the next rebalance,
  after its previous owner has revoked it (KIP-429).

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
    """One member of a classic group, as the leader receives it in the JoinGroup response. `generation` is the
    generation in which the member owned `owned_partitions`."""

    member_id: str
    topics: tuple[str, ...]
    owned_partitions: tuple[TopicPartition, ...] = ()
    generation: int = -1
    instance_id: str | None = None


class AssignmentFunction(Protocol):
    """Function that computes an assignment. Topics that are missing in `partition_counts` do not exist and are
    ignored."""

    def __call__(self, members: Sequence[Member], partition_counts: Mapping[str, int], /) -> Assignments: ...


@dataclass(frozen=True, slots=True)
class Assignor:
    """An assignment function and its protocol name. With a cooperative assignor, members keep their partitions while
    they rejoin the group."""

    name: str
    assign: AssignmentFunction
    is_cooperative: bool = False


def assign_range(members: Sequence[Member], partition_counts: Mapping[str, int]) -> Assignments:
    """Assign each member a contiguous range of each topic's partitions. The first members get one partition more if the
    partitions cannot be divided evenly."""
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
    """Assign all partitions of all topics to the members in turn, skipping members that do not subscribe to the
    topic."""
    given: Assignments = {member.member_id: [] for member in members}
    turn = cycle(_sorted_members(members))
    for topic, subscribed in sorted(_subscribers(members, partition_counts).items()):
        wanted = {member.member_id for member in subscribed}
        for index in range(partition_counts[topic]):
            member = next(candidate for candidate in turn if candidate.member_id in wanted)
            given[member.member_id].append(TopicPartition(topic, index))
    return given


def assign_sticky(members: Sequence[Member], partition_counts: Mapping[str, int]) -> Assignments:
    """Assign partitions as evenly as the subscriptions allow, and move as few partitions as possible between
    members."""
    subscribed = {
        topic: [member.member_id for member in found]
        for topic, found in _subscribers(members, partition_counts).items()
    }
    given: Assignments = {member.member_id: [] for member in members}
    for partition, owner in _kept_partitions(members, partition_counts).items():
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
    """Return the assignment of `assign_sticky` without the partitions that another member still owns."""
    given = assign_sticky(members, partition_counts)
    holders = _partition_owners(members)
    return {
        member: [partition for partition in partitions if member in holders.get(partition, {member})]
        for member, partitions in given.items()
    }


def _partition_owners(members: Sequence[Member]) -> dict[TopicPartition, set[str]]:
    """Members that report each partition as owned in the newest generation of all reports, even if they are no longer
    subscribed to the topic."""
    newest: dict[TopicPartition, int] = {}
    holders: dict[TopicPartition, set[str]] = {}
    for member in members:
        for partition in member.owned_partitions:
            if member.generation > newest.get(partition, -2):
                newest[partition] = member.generation
                holders[partition] = set()
            if member.generation == newest[partition]:
                holders[partition].add(member.member_id)
    return holders


def _balance(given: Assignments, subscribed: Mapping[str, list[str]]) -> None:
    """Move partitions between members until no move makes the assignment more even.

    Each step moves one partition from the member with the most partitions that can give one. Moving several at once
    could take more than necessary from one member. The loop ends because every move lowers the sum of the squares of
    the members' partition counts.
    """
    while _move_one_partition(given, subscribed):
        pass


def _move_one_partition(given: Assignments, subscribed: Mapping[str, list[str]]) -> bool:
    """Move one partition to a member with at least two partitions fewer. False if there is no such move."""
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


def _kept_partitions(
    members: Sequence[Member], partition_counts: Mapping[str, int]
) -> dict[TopicPartition, str]:
    """Member that keeps each partition it owned.

    If several members report a partition as owned, the member with the newest generation keeps it; if two members have
    that generation, the partition is assigned again.
    """
    newest: dict[TopicPartition, int] = {}
    claims: dict[TopicPartition, str] = {}
    rivals: Counter[tuple[TopicPartition, int]] = Counter()
    for member in members:
        wanted = set(member.topics)
        for partition in member.owned_partitions:
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
    """Members that subscribe to each existing topic, in the order of `_sorted_members`."""
    found: dict[str, list[Member]] = {}
    for member in _sorted_members(members):
        for topic in dict.fromkeys(member.topics):
            if partition_counts.get(topic, 0) > 0:
                found.setdefault(topic, []).append(member)
    return found


def _sorted_members(members: Sequence[Member]) -> list[Member]:
    """Return static members sorted by instance id, so that a restart does not change their assignment, then the other
    members sorted by member id."""
    return sorted(members, key=lambda m: (m.instance_id is None, m.instance_id or "", m.member_id))


RANGE = Assignor("range", assign_range)
ROUND_ROBIN = Assignor("roundrobin", assign_round_robin)
STICKY = Assignor("sticky", assign_sticky)
COOPERATIVE_STICKY = Assignor("cooperative-sticky", assign_cooperative_sticky, is_cooperative=True)

ASSIGNORS = {assignor.name: assignor for assignor in (COOPERATIVE_STICKY, RANGE, ROUND_ROBIN, STICKY)}
