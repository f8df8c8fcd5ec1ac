"""How the partitions of a group are shared out among its members.

In a classic group one member, the leader, does this for all, so each strategy is a pure function
`(members, partition counts) -> member id -> partitions`. Owns range, round-robin and (cooperative-)sticky.

Always true of a result: every member has an entry; every partition of a topic that someone subscribes to belongs
to exactly one member that subscribes to it. Only the cooperative strategy may leave a partition out: one that moves
between members is given to nobody until its old owner has let go (KIP-429), which takes a second rebalance.

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
    """One member as the leader sees it."""

    member_id: str
    topics: tuple[str, ...]
    owned: tuple[TopicPartition, ...] = ()
    generation: int = -1
    instance_id: str | None = None


class Strategy(Protocol):
    """`partition_counts` has every topic that exists; topics that do not exist are passed over."""

    def __call__(self, members: Sequence[Member], partition_counts: Mapping[str, int], /) -> Assignments: ...


@dataclass(frozen=True, slots=True)
class Assignor:
    """A strategy under the name that groups agree on. Cooperative: members keep what they have while rejoining."""

    name: str
    assign: Strategy
    cooperative: bool = False


def assign_range(members: Sequence[Member], partition_counts: Mapping[str, int]) -> Assignments:
    """Topic by topic: contiguous runs, the first members get one more where it does not divide evenly."""
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
    """All partitions of all topics dealt out in turn, passing over members that do not subscribe."""
    given: Assignments = {member.member_id: [] for member in members}
    turn = cycle(_in_order(members))
    for topic, subscribed in sorted(_subscribers(members, partition_counts).items()):
        wanted = {member.member_id for member in subscribed}
        for index in range(partition_counts[topic]):
            member = next(candidate for candidate in turn if candidate.member_id in wanted)
            given[member.member_id].append(TopicPartition(topic, index))
    return given


def assign_sticky(members: Sequence[Member], partition_counts: Mapping[str, int]) -> Assignments:
    """As even as the subscriptions allow, moving as little as that takes."""
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
    """Sticky, but a partition that someone else still has is left out this time."""
    given = assign_sticky(members, partition_counts)
    holders = _holders(members)
    return {
        member: [partition for partition in partitions if member in holders.get(partition, {member})]
        for member, partitions in given.items()
    }


def _holders(members: Sequence[Member]) -> dict[TopicPartition, set[str]]:
    """Who has what, as far as the newest generation that claims it knows, wanted or not."""
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
    """Who may keep what. Of two members that claim one partition, the one of the newer generation had it last;
    of two of the same generation, neither is believed, and the partition is given anew."""
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
    """The members of each topic that exists, in the order all clients use."""
    found: dict[str, list[Member]] = {}
    for member in _in_order(members):
        for topic in dict.fromkeys(member.topics):
            if partition_counts.get(topic, 0) > 0:
                found.setdefault(topic, []).append(member)
    return found


def _in_order(members: Sequence[Member]) -> list[Member]:
    """Static members first, by instance id, so that their share survives a restart; then by member id."""
    return sorted(members, key=lambda m: (m.instance_id is None, m.instance_id or "", m.member_id))


RANGE = Assignor("range", assign_range)
ROUND_ROBIN = Assignor("roundrobin", assign_round_robin)
STICKY = Assignor("sticky", assign_sticky)
COOPERATIVE_STICKY = Assignor("cooperative-sticky", assign_cooperative_sticky, cooperative=True)

BY_NAME = {assignor.name: assignor for assignor in (COOPERATIVE_STICKY, RANGE, ROUND_ROBIN, STICKY)}
