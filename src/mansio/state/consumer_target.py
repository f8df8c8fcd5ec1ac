"""Who is to have what in a consumer group: what its members subscribe to, and the target an assignor makes of it.

Everything here is computed from what is stored (`StoredGroup`) and the topics there are, and stored in turn; so a group
that was loaded anew computes the same target.
"""

from __future__ import annotations

from collections import Counter
from hashlib import blake2b
from typing import TYPE_CHECKING

from mansio.state.assignors import MemberSpec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mansio.state.assignors import Assignor
    from mansio.state.consumer_stored import StoredGroup
    from mansio.state.modern_records import MemberMetadata
    from mansio.state.modern_types import TopicPartition, Topics


def chosen_assignor(stored: StoredGroup, default: str) -> str:
    """The assignor most members ask for, of equals the first by name; without any wish the default."""
    wishes = Counter(each.metadata.assignor for each in stored.members.values() if each.metadata.assignor)
    return min(wishes, key=lambda name: (-wishes[name], name), default=default)


def subscribed(stored: StoredGroup, metadata: MemberMetadata, topics: Topics) -> frozenset[bytes]:
    """The ids of the topics that a member with these metadata reads: those that are there, of those it wants."""
    names = metadata.topic_names
    if metadata.topic_regex and (expression := stored.expressions.get(metadata.topic_regex)) is not None:
        names += expression.topics
    return frozenset(topics.ids[name] for name in names if name in topics.ids)


def resolve_expressions(stored: StoredGroup, topics: Topics) -> None:
    """Store what the members' expressions match now. One that is not resolved yet matches what it did before."""
    in_use = {
        each.metadata.topic_regex: None for each in stored.members.values() if each.metadata.topic_regex
    }
    for pattern in in_use:
        matched = topics.matches.get(pattern)
        known = stored.expressions.get(pattern)
        if matched is not None and (known is None or known.topics != tuple(sorted(matched))):
            stored.set_expression(pattern, tuple(sorted(matched)))
    for pattern in [each for each in stored.expressions if each not in in_use]:
        stored.remove_expression(pattern)


def metadata_hash(stored: StoredGroup, topics: Topics) -> int:
    """64 bits that change when a topic the group reads comes, goes, is made anew, or grows; 0 for no topics."""
    wanted = {each for member in _subscriptions(stored, topics).values() for each in member}
    if not wanted:
        return 0
    digest = blake2b(digest_size=8)
    for topic_id in sorted(wanted):
        digest.update(topic_id + topics.partitions.get(topic_id, 0).to_bytes(4, "big"))
    return int.from_bytes(digest.digest(), "big", signed=True)


def retarget(stored: StoredGroup, assignor: Assignor, topics: Topics) -> None:
    """Compute the target of the group's epoch, and store what of it is new."""
    subscriptions = _subscriptions(stored, topics)
    specs = [
        MemberSpec(
            each.member_id,
            each.metadata.instance_id,
            tuple(sorted(subscriptions[each.member_id])),
            each.target,
        )
        for each in stored.members.values()
    ]
    targets = assignor.assign(specs, topics.partitions) if specs else {}
    _check(stored.group_id, assignor.name, subscriptions, targets, topics)
    for member in stored.members.values():
        target = frozenset(targets[member.member_id])
        if target != member.target:
            stored.set_target(member, target)
        if (
            member.is_away and not member.current.assigned <= target
        ):  # it has nothing in hand, so it is free at once
            stored.set_current(member, member.current._replace(assigned=member.current.assigned & target))
    stored.set_assignment_epoch(stored.group_epoch)


def _subscriptions(stored: StoredGroup, topics: Topics) -> dict[str, frozenset[bytes]]:
    """Of each member; members that want the same share one set."""
    known: dict[tuple[tuple[str, ...], str | None], frozenset[bytes]] = {}
    found = {}
    for member in stored.members.values():
        wants = (member.metadata.topic_names, member.metadata.topic_regex)
        if wants not in known:
            known[wants] = subscribed(stored, member.metadata, topics)
        found[member.member_id] = known[wants]
    return found


def _check(
    group_id: str,
    name: str,
    subscriptions: Mapping[str, frozenset[bytes]],
    targets: Mapping[str, list[TopicPartition]],
    topics: Topics,
) -> None:
    """An assignor may be anybody's: what it says is believed only if it can be."""
    seen: set[TopicPartition] = set()
    for member_id, subscription in subscriptions.items():
        target = targets.get(member_id)
        sound = target is not None and seen.isdisjoint(target) and len(set(target)) == len(target)
        if target is None or not sound or not all(_is_there(each, subscription, topics) for each in target):
            message = f"assignor {name} gave member {member_id} of group {group_id} what it may not have"
            raise AssertionError(message)
        seen.update(target)


def _is_there(partition: TopicPartition, subscription: frozenset[bytes], topics: Topics) -> bool:
    return partition[0] in subscription and 0 <= partition[1] < topics.partitions.get(partition[0], 0)
