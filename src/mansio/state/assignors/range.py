"""The `range` assignor: of each topic everybody gets one run of neighbouring partitions.

Topics that the same members subscribe to are cut for the same order of members, so that of two such topics with as many
partitions each member has the same indexes of both: their records can be joined. The price is balance: the first
members have one more of every topic that does not divide evenly.

Sticky where it can be: members stand in the order of what they have, and newcomers where somebody left a gap; so one
that is replaced moves nothing of the others, and nobody's place depends on a name.

Source: KIP-848; the order is our own (Kafka's is by name).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mansio.state.assignors import MemberSpec, TopicPartition


class RangeAssignor:
    """See the module."""

    name = "range"

    def assign(
        self, members: Sequence[MemberSpec], partitions: Mapping[bytes, int]
    ) -> dict[str, list[TopicPartition]]:
        targets: dict[str, list[TopicPartition]] = {each.member_id: [] for each in sorted(members)}
        subscribers: dict[bytes, list[MemberSpec]] = {}
        for member in sorted(members):
            for topic in set(member.topics):
                subscribers.setdefault(topic, []).append(member)
        alike: dict[tuple[str, ...], list[bytes]] = {}  # who subscribes -> to which topics
        for topic in sorted(subscribers):
            if partitions.get(topic, 0) > 0:
                alike.setdefault(tuple(each.member_id for each in subscribers[topic]), []).append(topic)
        for topics in alike.values():
            order = _order(subscribers[topics[0]], {topic: partitions[topic] for topic in topics})
            for topic in topics:
                _assign_ranges(targets, order, topic, partitions[topic])
        return {member_id: sorted(target) for member_id, target in targets.items()}


def _order(members: list[MemberSpec], counts: Mapping[bytes, int]) -> list[str]:
    """Members by where their part of these topics begins; newcomers in the gaps that others left, or at the end."""
    begins: dict[str, float] = {}
    for member in members:
        own = [index / counts[topic] for topic, index in member.assigned if index < counts.get(topic, 0)]
        if own:
            begins[member.member_id] = min(own)
    newcomers = sorted(
        (each.instance_id or each.member_id, each.member_id)
        for each in members
        if each.member_id not in begins
    )
    gaps = _gaps(members, counts)
    for position, (_, member_id) in enumerate(newcomers):
        begins[member_id] = gaps[position] if position < len(gaps) else 1.0
    names = {each.member_id: each.instance_id or each.member_id for each in members}
    return sorted(begins, key=lambda member_id: (begins[member_id], names[member_id], member_id))


def _gaps(members: list[MemberSpec], counts: Mapping[bytes, int]) -> list[float]:
    """Where parts that nobody has begin, by the topic with the most partitions."""
    topic, count = max(counts.items(), key=lambda each: (each[1], each[0]))
    share = max(count // len(members), 1)
    taken = {index for member in members for owned, index in member.assigned if owned == topic}
    gaps, index = [], 0
    while index < count:
        if index in taken:
            index += 1
        else:
            gaps.append(index / count)
            index += share
    return gaps


def _assign_ranges(
    targets: dict[str, list[TopicPartition]], order: list[str], topic: bytes, count: int
) -> None:
    share, one_more = divmod(count, len(order))
    begin = 0
    for position, member_id in enumerate(order):
        end = begin + share + (position < one_more)
        targets[member_id] += [(topic, index) for index in range(begin, end)]
        begin = end
