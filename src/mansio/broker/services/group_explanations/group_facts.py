"""Facts about a group that its coordinator knows: members, their partitions, and committed positions."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from mansio.errors import WireError
from mansio.state.blockage.facts import UNKNOWN, GroupType, MemberFacts, Place
from mansio.state.classic_group.group import ClassicGroup
from mansio.state.classic_group.types import GroupState
from mansio.state.consumer_group.group import ConsumerGroup
from mansio.state.share_group.group import ShareGroup
from mansio.wire.internal_records.consumer_protocol import decode_assignment

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from mansio.broker.coordinator.group.group_store import GroupEntry
    from mansio.state.classic_group.types import Member
    from mansio.wire.topic_partition import TopicIdPartition

    NameOf = Callable[[bytes], str | None]

DEAD_STATE: Final = "Dead"
"""Kafka's state of a group that does not exist."""


def type_of(entry: GroupEntry | None) -> GroupType:
    """Return the type of a group; classic if there is none."""
    if entry is None or isinstance(entry.group, ClassicGroup):
        return GroupType.CLASSIC
    return GroupType.CONSUMER if isinstance(entry.group, ConsumerGroup) else GroupType.SHARE


def members_of(entry: GroupEntry, name_of: NameOf, now_ms: float) -> tuple[MemberFacts, ...]:
    """Return the members of a group. `name_of`: returns the name of a topic with an id; `now_ms`: of the clock of the
    group."""
    group = entry.group
    if isinstance(group, ClassicGroup):
        return tuple(_classic_member(group, each, now_ms) for each in group.members)
    if isinstance(group, ConsumerGroup):
        return tuple(
            MemberFacts(
                each.member_id,
                each.metadata.client_id,
                each.metadata.client_host,
                _places(each.current.assigned, name_of),
                *_silence(
                    each.session_deadline_ms,
                    group.settings.session_timeout_ms
                    if each.metadata.classic is None
                    else each.metadata.classic.session_timeout_ms,
                    now_ms,
                ),
                is_awaited=min(each.revoke_deadline_ms, each.rejoin_deadline_ms) < math.inf,
            )
            for each in group.members.values()
        )
    return tuple(
        MemberFacts(
            each.member_id,
            each.metadata.client_id,
            each.metadata.client_host,
            _places(each.current.assigned, name_of),
            *_silence(each.session_deadline_ms, group.settings.session_timeout_ms, now_ms),
        )
        for each in group.members.values()
    )


def _classic_member(group: ClassicGroup, member: Member, now_ms: float) -> MemberFacts:
    is_parked = member.join_waiter is not None or member.sync_waiter is not None
    silent_ms, session_ms = _silence(member.deadline_ms, member.session_timeout_ms, now_ms)
    places: tuple[Place, ...] = ()
    if group.state is GroupState.STABLE:
        try:
            places = tuple(Place(*each[:2]) for each in decode_assignment(member.assignment).partitions)
        except WireError:
            places = ()  # the group does not use the consumer protocol
    return MemberFacts(
        member.member_id,
        member.client_id,
        member.client_host,
        places,
        UNKNOWN if is_parked else silent_ms,
        session_ms,
        is_awaited=(group.state is GroupState.PREPARING_REBALANCE and member.join_waiter is None)
        or (group.state is GroupState.COMPLETING_REBALANCE and member.sync_waiter is None),
    )


def _silence(deadline_ms: float, session_ms: int, now_ms: float) -> tuple[int, int]:
    """Return the time since the last heartbeat, by which the session was extended, and the session timeout."""
    if deadline_ms == math.inf:
        return UNKNOWN, session_ms
    return max(int(now_ms - (deadline_ms - session_ms)), 0), session_ms


def _places(partitions: Iterable[TopicIdPartition], name_of: NameOf) -> tuple[Place, ...]:
    named = ((name_of(topic_id), index) for topic_id, index in sorted(partitions))
    return tuple(Place(name, index) for name, index in named if name is not None)


def places_of(entry: GroupEntry, members: Iterable[MemberFacts], name_of: NameOf) -> list[Place]:
    """Return the partitions that a group reads, or has read, in order."""
    found = {place for member in members for place in member.places}
    group = entry.group
    if isinstance(group, ShareGroup):
        for topic in group.state_partitions.initialized:
            name = name_of(topic.topic_id)
            if name is not None:
                found.update(Place(name, index) for index in topic.partitions)
    else:
        found.update(Place(topic, index) for topic, index in entry.known_partitions())
    return sorted(found, key=lambda each: (each.topic, each.partition))


def rebalance_left_ms(entry: GroupEntry, now_ms: float) -> int:
    """Return how long a rebalance of a group still waits for its members; `UNKNOWN` if there is none."""
    group = entry.group
    deadline_ms = math.inf
    if isinstance(group, ClassicGroup):
        deadline_ms = min(group.join_phase.deadline_ms, group.sync_deadline_ms)
    elif isinstance(group, ConsumerGroup):
        deadline_ms = min(
            (min(each.revoke_deadline_ms, each.rejoin_deadline_ms) for each in group.members.values()),
            default=math.inf,
        )
    return UNKNOWN if deadline_ms == math.inf else max(int(deadline_ms - now_ms), 0)
