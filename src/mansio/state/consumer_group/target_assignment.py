"""Who is to have what in a consumer group: what its members subscribe to, and the target an assignor makes of it.

Everything here is computed from what is stored (`StoredGroup`) and the topics there are, and stored in turn; so a group
that was loaded anew computes the same target.
"""

from __future__ import annotations

from collections import Counter
from hashlib import blake2b
from typing import TYPE_CHECKING

from mansio.state.assignors import MemberSpec
from mansio.state.assignors.partition_sets import all_partitions

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from mansio.state.assignors import Assignor
    from mansio.state.consumer_group.records import MemberMetadata
    from mansio.state.consumer_group.stored_state import StoredGroup
    from mansio.state.consumer_group.types import TopicPartition, Topics

    Subscriptions = Mapping[str, frozenset[bytes]]
    """Topic ids by member."""


def preferred_server_assignor(stored: StoredGroup, default: str) -> str:
    """The assignor most members ask for, of equals the first by name; without any wish the default."""
    wishes = Counter(each.metadata.assignor for each in stored.members.values() if each.metadata.assignor)
    return min(wishes, key=lambda name: (-wishes[name], name), default=default)


def subscribed(stored: StoredGroup, metadata: MemberMetadata, topics: Topics) -> frozenset[bytes]:
    """The ids of the topics that a member with these metadata reads: those that are there, of those it wants."""
    names = metadata.topic_names
    if metadata.topic_regex and (expression := stored.resolved_regexes.get(metadata.topic_regex)) is not None:
        names += expression.topics
    return frozenset(topics.ids[name] for name in names if name in topics.ids)


def resolve_regexes(stored: StoredGroup, topics: Topics) -> None:
    """Store what the members' expressions match now. One that is not resolved yet matches what it did before."""
    in_use = {
        each.metadata.topic_regex: None for each in stored.members.values() if each.metadata.topic_regex
    }
    for pattern in in_use:
        matched = topics.matches.get(pattern)
        known = stored.resolved_regexes.get(pattern)
        if matched is not None and (known is None or known.topics != tuple(sorted(matched))):
            stored.set_resolved_regex(pattern, tuple(sorted(matched)))
    for pattern in [each for each in stored.resolved_regexes if each not in in_use]:
        stored.remove_resolved_regex(pattern)


def metadata_hash(subscriptions: Subscriptions, topics: Topics) -> int:
    """64 bits that change when a topic the group reads comes, goes, is made anew, or grows; 0 for no topics."""
    wanted = _union(subscriptions)
    if not wanted:
        return 0
    digest = blake2b(digest_size=8)
    for topic_id in sorted(wanted):
        digest.update(topic_id + topics.partitions.get(topic_id, 0).to_bytes(4, "big"))
    return int.from_bytes(digest.digest(), "big", signed=True)


def compute_target(
    stored: StoredGroup, assignor: Assignor, subscriptions: Subscriptions, topics: Topics
) -> None:
    """Compute the target of the group's epoch, and store what of it is new."""
    in_order = {each: tuple(sorted(each)) for each in dict.fromkeys(subscriptions.values())}
    specs = [
        MemberSpec(
            each.member_id, each.metadata.instance_id, in_order[subscriptions[each.member_id]], each.target
        )
        for each in stored.members.values()
    ]
    assignment = assignor.assign(specs, topics.partitions) if specs else {}
    targets = _checked(stored.group_id, assignor.name, subscriptions, assignment, topics)
    for member in stored.members.values():
        target = targets[member.member_id]
        if target is not member.target and target != member.target:  # equal sets are compared one by one
            stored.set_target(member, target)
        if (
            member.is_static_offline and not member.current.assigned <= target
        ):  # it has nothing in hand, so it is free at once
            stored.set_current(member, member.current._replace(assigned=member.current.assigned & target))
    stored.set_assignment_epoch(stored.group_epoch)


def all_subscribed(stored: StoredGroup, topics: Topics) -> Subscriptions:
    """What each member reads; members that want the same share one set."""
    known: dict[tuple[tuple[str, ...], str | None], frozenset[bytes]] = {}
    found = {}
    for member in stored.members.values():
        wants = (member.metadata.topic_names, member.metadata.topic_regex)
        if wants not in known:
            known[wants] = subscribed(stored, member.metadata, topics)
        found[member.member_id] = known[wants]
    return found


def _union(subscriptions: Subscriptions) -> frozenset[bytes]:
    """What anybody reads."""
    return frozenset().union(*dict.fromkeys(subscriptions.values()))


def _checked(
    group_id: str,
    name: str,
    subscriptions: Subscriptions,
    assignment: Mapping[str, Collection[TopicPartition]],
    topics: Topics,
) -> dict[str, frozenset[TopicPartition]]:
    """The targets. An assignor may be anybody's: what it says is believed only if it can be."""
    wanted = _union(subscriptions)
    free = set(all_partitions(wanted, topics.partitions))
    targets = {}
    for member_id, subscription in subscriptions.items():
        target = targets[member_id] = frozenset(assignment.get(member_id, ()))
        sound = member_id in assignment and len(target) == len(assignment[member_id]) and target <= free
        if not sound or not (subscription == wanted or all(each[0] in subscription for each in target)):
            message = f"assignor {name} gave member {member_id} of group {group_id} what it may not have"
            raise AssertionError(message)
        free -= target
    return targets
