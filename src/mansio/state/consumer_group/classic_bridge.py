"""Conversion between the classic and the consumer protocol: subscriptions, assignments and members.

A group can have members of both protocols while its clients are replaced one at a time. `ConsumerGroup` contains the
rules; the functions of this module convert requests and records of classic members.

    classic group ── first consumer-protocol member joins ──► consumer group ── last one leaves ──► classic group

Source: KIP-848, "online migration"; Apache Kafka's GroupMetadataManager.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mansio.errors import InconsistentGroupProtocol, WireError
from mansio.wire.internal_records.consumer_group_records import ClassicMemberMetadata, MemberMetadata
from mansio.wire.internal_records.offset_and_group_records import MemberMetadata as ClassicMemberRecord

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mansio.state.classic_group.types import Join
    from mansio.state.classic_group.types import Member as ClassicMember
    from mansio.state.consumer_group.stored_state import ConsumerMember
    from mansio.state.consumer_group.types import ClassicCodec, ClassicSubscription, Topics
    from mansio.wire.topic_partition import TopicIdPartition


def metadata_of_join(request: Join, subscription: ClassicSubscription) -> MemberMetadata:
    """Return the metadata of a classic member that joins a consumer group."""
    protocols = tuple((each.name, each.metadata) for each in request.protocols)
    return MemberMetadata(
        request.instance_id,
        subscription.rack_id,
        request.client_id,
        request.client_host,
        tuple(sorted(set(subscription.topics))),
        None,
        request.rebalance_timeout_ms,
        None,
        ClassicMemberMetadata(request.session_timeout_ms, protocols),
    )


def metadata_of_member(member: ClassicMember, subscription: ClassicSubscription) -> MemberMetadata:
    """Return the metadata with which a member of a classic group becomes a member of a consumer group."""
    protocols = tuple((each.name, each.metadata) for each in member.protocols)
    return MemberMetadata(
        member.instance_id,
        subscription.rack_id,
        member.client_id,
        member.client_host,
        tuple(sorted(set(subscription.topics))),
        None,
        member.rebalance_timeout_ms,
        None,
        ClassicMemberMetadata(member.session_timeout_ms, protocols),
    )


def to_classic_member_record(member: ConsumerMember, protocol: str, assignment: bytes) -> ClassicMemberRecord:
    """Convert a member of a consumer group into its part of a classic group's record."""
    metadata = member.metadata
    assert metadata.classic is not None
    return ClassicMemberRecord(
        member.member_id,
        metadata.instance_id,
        metadata.client_id,
        metadata.client_host,
        metadata.rebalance_timeout_ms,
        metadata.classic.session_timeout_ms,
        dict(metadata.classic.protocols).get(protocol, b""),
        assignment,
    )


def common_protocol(member: ConsumerMember, members: Iterable[ConsumerMember]) -> str:
    """Return the first protocol of a classic member that all classic members support."""
    supported = [
        {name for name, _ in each.metadata.classic.protocols}
        for each in members
        if each.metadata.classic is not None
    ]
    assert member.metadata.classic is not None
    names = [name for name, _ in member.metadata.classic.protocols]
    return next((name for name in names if all(name in each for each in supported)), names[0])


def read_subscription(codec: ClassicCodec, metadata: bytes) -> ClassicSubscription:
    """Decode the subscription of a classic member. Raises `InconsistentGroupProtocol` for malformed bytes."""
    try:
        return codec.decode_subscription(metadata)
    except WireError as error:
        raise InconsistentGroupProtocol(f"the subscription of a member is malformed: {error}") from error


def read_assignment(codec: ClassicCodec, assignment: bytes) -> frozenset[tuple[str, int]]:
    """Decode the assigned partitions (topic name, index) of a classic member. Raises `InconsistentGroupProtocol` for
    malformed bytes."""
    try:
        return frozenset((name, index) for name, index in codec.decode_assignment(assignment))
    except WireError as error:
        raise InconsistentGroupProtocol(f"the assignment of a member is malformed: {error}") from error


def encode_assignment(codec: ClassicCodec, partitions: Iterable[TopicIdPartition], topics: Topics) -> bytes:
    """Encode the assignment of a classic member; partitions of deleted topics are omitted."""
    names = {topic_id: name for name, topic_id in topics.ids.items()}
    return codec.encode_assignment(
        sorted((names[topic_id], index) for topic_id, index in partitions if topic_id in names)
    )


def partitions_by_id(partitions: Iterable[tuple[str, int]], topics: Topics) -> frozenset[TopicIdPartition]:
    """Convert partitions with topic names into partitions with topic ids; those of unknown topics are omitted."""
    return frozenset((topics.ids[name], index) for name, index in partitions if name in topics.ids)
