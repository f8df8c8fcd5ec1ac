"""The `range` assignor: each member gets one range of consecutive partitions of each topic.

Topics with the same subscribers are divided in the same order of members. If two such topics have equal numbers of
partitions, each member gets the same partition indexes of both, so that their records can be joined. The disadvantage
is the balance: the first members have one more partition of every topic that does not divide evenly.

The assignor is sticky where possible: members are ordered by their current partitions, and new members take the place
of members that left. So the replacement of one member moves no partitions of others, and the order does not depend on
names.

Source: KIP-848; the order is Mansio's (Kafka orders by name).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mansio.state.assignors import MemberSpec
    from mansio.wire.topic_partition import TopicIdPartition


class RangeAssignor:
    """Assignor that gives each member one range of consecutive partitions of each topic."""

    name = "range"

    def assign(
        self, members: Sequence[MemberSpec], partitions: Mapping[bytes, int]
    ) -> dict[str, list[TopicIdPartition]]:
        targets: dict[str, list[TopicIdPartition]] = {each.member_id: [] for each in sorted(members)}
        subscribers: dict[bytes, list[MemberSpec]] = {}
        for member in sorted(members):
            for topic in set(member.topics):
                subscribers.setdefault(topic, []).append(member)
        alike: dict[tuple[str, ...], list[bytes]] = {}  # subscribers -> topics
        for topic in sorted(subscribers):
            if partitions.get(topic, 0) > 0:
                alike.setdefault(tuple(each.member_id for each in subscribers[topic]), []).append(topic)
        for topics in alike.values():
            order = _order_members(subscribers[topics[0]], {topic: partitions[topic] for topic in topics})
            for topic in topics:
                _assign_ranges(targets, order, topic, partitions[topic])
        return {member_id: sorted(target) for member_id, target in targets.items()}


def _order_members(members: list[MemberSpec], counts: Mapping[bytes, int]) -> list[str]:
    """Return the member ids by the start of their current ranges of these topics; new members take the unassigned
    ranges of former members, or the end."""
    begins: dict[str, float] = {}
    for member in members:
        own = [index / counts[topic] for topic, index in member.assigned if index < counts.get(topic, 0)]
        if own:
            begins[member.member_id] = min(own)
    new_members = sorted(
        (each.instance_id or each.member_id, each.member_id)
        for each in members
        if each.member_id not in begins
    )
    gaps = _unassigned_range_starts(members, counts)
    for position, (_, member_id) in enumerate(new_members):
        begins[member_id] = gaps[position] if position < len(gaps) else 1.0
    names = {each.member_id: each.instance_id or each.member_id for each in members}
    return sorted(begins, key=lambda member_id: (begins[member_id], names[member_id], member_id))


def _unassigned_range_starts(members: list[MemberSpec], counts: Mapping[bytes, int]) -> list[float]:
    """Return the starts of the unassigned ranges of the topic with the most partitions, as fractions of its partition
    count."""
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
    targets: dict[str, list[TopicIdPartition]], order: list[str], topic: bytes, count: int
) -> None:
    share, one_more = divmod(count, len(order))
    begin = 0
    for position, member_id in enumerate(order):
        end = begin + share + (position < one_more)
        targets[member_id] += [(topic, index) for index in range(begin, end)]
        begin = end
