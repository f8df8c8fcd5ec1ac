"""Members of the classic protocol in a consumer group, and the change-over of a whole group, both ways.

A client that is replaced one instance at a time leaves a group with members of both kinds. The broker assigns to all of
them; a classic member sees a rebalance as it knows it: a heartbeat tells it to join, the join (answered at once; nobody
leads) says what it still owns, the sync tells it what it has. What it owns when it joins is all it owns, so joining is
its way to give partitions up. Its generation is its member epoch.

    classic group ── first member of the new protocol joins ──► consumer group ── the last one leaves ──► classic group

Always true: * A classic member is made to join again only if its target differs from what it has, and what it misses is
free, or if the classic group was about to rebalance or had assigned it what cannot be taken over, as a partition of a
deleted topic. It has its rebalance timeout to join, and as long again to sync.
* Taking over a classic group changes nothing in it; what its members have there they have here.
* The classic group that takes over has a generation that none of its members has: they all join it, also if a crash
makes it begin from its record. Until they do, each goes on in its own.

Source: KIP-848, "online migration"; Apache Kafka's GroupMetadataManager. Ours: a member whose assignment does not
change is not made to join for the sake of a newer epoch.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from mansio.errors import (
    IllegalGeneration,
    InconsistentGroupProtocol,
    RebalanceInProgress,
    UnknownMember,
    WireError,
)
from mansio.state.classic_group.group import PREPARING, ClassicGroup
from mansio.state.classic_group.types import JoinResponse, Response, SyncResponse
from mansio.state.consumer_group.member import ConsumerMember
from mansio.state.consumer_group.records import ClassicMetadata, CurrentAssignment, MemberMetadata
from mansio.state.consumer_group.requests import find_member_or_static
from mansio.state.consumer_group.target_assignment import all_subscribed, metadata_hash
from mansio.state.consumer_group.types import CLASSIC_PROTOCOL_TYPE, MemberState
from mansio.wire.internal_records.offset_and_group_records import (
    GroupKey,
    GroupMetadata,
    encode_group_key,
    encode_group_value,
)
from mansio.wire.internal_records.offset_and_group_records import MemberMetadata as ClassicMember

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mansio.state.classic_group.types import Join, Sync
    from mansio.state.consumer_group.group import ConsumerGroup
    from mansio.state.consumer_group.types import (
        ClassicCodec,
        ClassicSubscription,
        Records,
        TopicPartition,
        Topics,
    )


def join(
    group: ConsumerGroup, request: Join, new_member_id: str, topics: Topics, now_ms: float
) -> tuple[JoinResponse, Records]:
    """See `ConsumerGroup.join`."""
    group.check_alive()
    stored = group.stored
    subscription = _checked(group, request)
    if request.member_id and request.instance_id is not None:
        stored.validated(request.member_id, request.instance_id)
    member_id = request.member_id or new_member_id
    existing = find_member_or_static(stored, member_id, request.instance_id)
    group.check_capacity(existing)
    if not request.member_id and request.instance_id is None and request.must_know_member_id:
        return JoinResponse(new_member_id, must_rejoin=True), []
    metadata = MemberMetadata(
        request.instance_id,
        subscription.rack_id,
        request.client_id,
        request.client_host,
        tuple(sorted(set(subscription.topics))),
        None,
        request.rebalance_timeout_ms,
        None,
        ClassicMetadata(
            request.session_timeout_ms, tuple((each.name, each.metadata) for each in request.protocols)
        ),
    )
    member = group.add_or_replace_member(existing, member_id, metadata, topics)
    member.extend_session(group.settings, now_ms)
    group.reconcile(member, _by_id(subscription.owned, topics), topics, now_ms)
    member.rejoin_deadline_ms = now_ms + request.rebalance_timeout_ms
    member.is_awaiting_sync = True
    protocol = _protocol(group, member)
    answer = JoinResponse(member_id, member.current.epoch, CLASSIC_PROTOCOL_TYPE, protocol)
    return answer, stored.take_changes()


def sync(group: ConsumerGroup, request: Sync, topics: Topics, now_ms: float) -> SyncResponse:
    """See `ConsumerGroup.sync`."""
    group.check_alive()
    member = _classic_member(group, request.member_id, request.instance_id, request.generation)
    classic = member.metadata.classic
    names = () if classic is None else [name for name, _ in classic.protocols]
    if request.protocol_type not in (None, CLASSIC_PROTOCOL_TYPE):
        raise InconsistentGroupProtocol(f"the group does {CLASSIC_PROTOCOL_TYPE}")
    if request.protocol is not None and request.protocol not in names:
        raise InconsistentGroupProtocol(f"the member has not joined with {request.protocol}")
    if member.current.state != MemberState.UNREVOKED and _must_rejoin(group, member):
        raise RebalanceInProgress
    member.extend_session(group.settings, now_ms)
    member.rejoin_deadline_ms = math.inf
    member.is_awaiting_sync = False
    assignment = group.codec.assignment(_by_name(member.current.assigned, topics))
    return SyncResponse(assignment, CLASSIC_PROTOCOL_TYPE, _protocol(group, member))


def heartbeat(
    group: ConsumerGroup, member_id: str, instance_id: str | None, generation: int, now_ms: float
) -> None:
    """See `ConsumerGroup.classic_heartbeat`."""
    group.check_alive()
    member = _classic_member(group, member_id, instance_id, generation)
    member.extend_session(group.settings, now_ms)
    if _must_rejoin(group, member):
        if member.rejoin_deadline_ms == math.inf:
            member.rejoin_deadline_ms = now_ms + member.metadata.rebalance_timeout_ms
        raise RebalanceInProgress
    if not member.is_awaiting_sync:
        member.rejoin_deadline_ms = math.inf


# ---------------------------------------------------------------------- the change-over


def convert_from_classic(
    group: ConsumerGroup, classic: ClassicGroup, topics: Topics, now_ms: float
) -> tuple[Records, list[Response]]:
    """Fill a new group with the members of a classic one. See `ConsumerGroup.from_classic`."""
    stored = group.stored
    if classic.protocol_type != CLASSIC_PROTOCOL_TYPE:
        raise InconsistentGroupProtocol(f"group {classic.group_id} does {classic.protocol_type}")
    answers: list[Response] = []
    for each in classic.roster:
        protocol = classic.protocol or each.protocols[0].name
        subscription = _read_subscription(group.codec, each.metadata_for(protocol))
        protocols = tuple((known.name, known.metadata) for known in each.protocols)
        metadata = MemberMetadata(
            each.instance_id,
            subscription.rack_id,
            each.client_id,
            each.client_host,
            tuple(sorted(set(subscription.topics))),
            None,
            each.rebalance_timeout_ms,
            None,
            ClassicMetadata(each.session_timeout_ms, protocols),
        )
        member = ConsumerMember(each.member_id, metadata)
        stored.set_metadata(member, metadata)
        named = _read_assigned(group.codec, each.assignment)
        assigned = _by_id(named, topics).difference(stored.owners)
        stored.set_target(member, assigned)
        epoch = classic.generation_of(each)
        # A partition of a deleted topic has no id to be pending by, and a group that was given back has dropped it:
        # if a member were not made to join, it would read that partition of a new topic of the same name, too.
        is_known = len(assigned) == len(named) and classic.state is not PREPARING
        state = MemberState.STABLE if is_known else MemberState.UNREVOKED
        stored.set_current(member, CurrentAssignment(epoch, epoch, state, assigned))
        member.extend_session(group.settings, now_ms)
        waiters = (each.join_waiter, each.sync_waiter)
        answers += [Response(waiter, RebalanceInProgress()) for waiter in waiters if waiter is not None]
    stored.set_epoch(classic.generation, metadata_hash(all_subscribed(stored, topics), topics))
    stored.set_assignment_epoch(classic.generation)
    tombstone = (encode_group_key(GroupKey(classic.group_id)), None)
    return [tombstone, *stored.take_changes()], answers


def convert_to_classic_group(
    group: ConsumerGroup,
    topics: Topics,
    now_ms: float,
    *,
    wall_ms: int,
    initial_delay_ms: float,
    size_max: int,
) -> tuple[ClassicGroup, Records] | None:
    """The classic group of those who are left. See `ConsumerGroup.to_classic`."""
    members = list(group.members.values())
    if not members or not all(each.is_classic for each in members):
        return None
    protocol = _protocol(group, members[0])
    metadata = GroupMetadata(
        CLASSIC_PROTOCOL_TYPE,
        group.group_epoch + 1,  # no member has it
        protocol,
        members[0].member_id,
        wall_ms,
        tuple(_classic_record(group, each, protocol, topics) for each in members),
    )
    classic = ClassicGroup(group.group_id, initial_delay_ms=initial_delay_ms, size_max=size_max)
    classic.restore_converted(metadata, {each.member_id: each.current.epoch for each in members}, now_ms)
    record = (encode_group_key(GroupKey(group.group_id)), encode_group_value(metadata))
    return classic, [*group.stored.tombstones(), record]


def _classic_record(
    group: ConsumerGroup, member: ConsumerMember, protocol: str, topics: Topics
) -> ClassicMember:
    metadata = member.metadata
    assert metadata.classic is not None
    return ClassicMember(
        member.member_id,
        metadata.instance_id,
        metadata.client_id,
        metadata.client_host,
        metadata.rebalance_timeout_ms,
        metadata.classic.session_timeout_ms,
        dict(metadata.classic.protocols).get(protocol, b""),
        group.codec.assignment(_by_name(member.current.assigned, topics)),
    )


# ---------------------------------------------------------------------- parts


def _checked(group: ConsumerGroup, request: Join) -> ClassicSubscription:
    """What a classic member subscribes to, if it fits: the others must be able to go back with it."""
    if request.protocol_type != CLASSIC_PROTOCOL_TYPE or not request.protocols:
        raise InconsistentGroupProtocol(f"group {group.group_id} does {CLASSIC_PROTOCOL_TYPE}")
    common = {each.name for each in request.protocols}
    for member in group.members.values():
        if member.metadata.classic is not None and member.member_id != request.member_id:
            common &= {name for name, _ in member.metadata.classic.protocols}
    if not common:
        raise InconsistentGroupProtocol(f"the member's protocols do not fit those of {group.group_id}")
    return _read_subscription(group.codec, request.protocols[0].metadata)


def _classic_member(
    group: ConsumerGroup, member_id: str, instance_id: str | None, generation: int
) -> ConsumerMember:
    member = group.stored.validated(member_id, instance_id)
    if not member.is_classic:
        raise UnknownMember(f"member {member_id} does not speak the classic protocol")
    if generation != member.current.epoch:
        raise IllegalGeneration(
            f"member {member_id} is at generation {member.current.epoch}, not {generation}"
        )
    return member


def _must_rejoin(group: ConsumerGroup, member: ConsumerMember) -> bool:
    """It has something to revoke, or can have all that it is still to get."""
    current, target = member.current, member.target
    if current.state == MemberState.UNREVOKED or not current.assigned <= target:
        return True
    missing = target - current.assigned
    return bool(missing) and group.stored.all_unowned(missing)


def _protocol(group: ConsumerGroup, member: ConsumerMember) -> str:
    """The first of the member's protocols that all classic members can do."""
    known = [
        {name for name, _ in each.metadata.classic.protocols}
        for each in group.members.values()
        if each.metadata.classic is not None
    ]
    assert member.metadata.classic is not None
    names = [name for name, _ in member.metadata.classic.protocols]
    return next((name for name in names if all(name in each for each in known)), names[0])


def _read_subscription(codec: ClassicCodec, metadata: bytes) -> ClassicSubscription:
    try:
        return codec.subscription(metadata)
    except WireError as error:
        raise InconsistentGroupProtocol(f"a member's subscription cannot be read: {error}") from error


def _read_assigned(codec: ClassicCodec, assignment: bytes) -> frozenset[tuple[str, int]]:
    try:
        return frozenset((name, index) for name, index in codec.assigned(assignment))
    except WireError as error:
        raise InconsistentGroupProtocol(f"a member's assignment cannot be read: {error}") from error


def _by_id(partitions: Iterable[tuple[str, int]], topics: Topics) -> frozenset[TopicPartition]:
    return frozenset((topics.ids[name], index) for name, index in partitions if name in topics.ids)


def _by_name(partitions: Iterable[TopicPartition], topics: Topics) -> list[tuple[str, int]]:
    names = {topic_id: name for name, topic_id in topics.ids.items()}
    return sorted((names[topic_id], index) for topic_id, index in partitions if topic_id in names)
