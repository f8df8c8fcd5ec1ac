"""One group as it is now: its members, and what each of them reads.

Groups whose members share the partitions out themselves and groups whose partitions the broker assigns (KIP-848) are
asked for by different requests; whoever asks need not know which it is.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from mansio.client.types import TopicPartition
from mansio.errors import GroupIdNotFound, UnsupportedVersion, WireError
from mansio.net.retry import raise_for
from mansio.wire.api_versions import ApiKey
from mansio.wire.internal_records.consumer_protocol import decode_assignment

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mansio.net.cluster import Cluster

CLASSIC: Final = "classic"
CONSUMER: Final = "consumer"
DEAD: Final = "Dead"
"""The state of a group that is not there."""
CLASSIC_MEMBER: Final = 0


@dataclass(frozen=True, slots=True)
class GroupMember:
    """One member of a group and what it reads.

    The rest is known of members of a "consumer" group: `epoch`, by which the group has heard of it last; `target`, what
    it is to read when all have given up what is not theirs any more; `topics` and `pattern`, what it subscribes to;
    `protocol`, "classic" for one that speaks the old protocol in such a group.
    """

    member_id: str
    instance_id: str | None
    client_id: str
    client_host: str
    partitions: tuple[TopicPartition, ...]
    epoch: int | None = None
    target: tuple[TopicPartition, ...] | None = None
    topics: tuple[str, ...] = ()
    pattern: str | None = None
    protocol: str = CLASSIC


@dataclass(frozen=True, slots=True)
class GroupDescription:
    """One group. `protocol` is the name of the assignor in use.

    `group_type`: "consumer" where the broker assigns the partitions, else "classic". Of the former, `epoch` counts
    what changed in the group, and `target_epoch` says up to which change the partitions have been assigned.
    """

    group_id: str
    state: str
    protocol_type: str
    protocol: str
    members: tuple[GroupMember, ...] = field(default=())
    group_type: str = CLASSIC
    epoch: int | None = None
    target_epoch: int | None = None


async def describe_group(cluster: Cluster, group: str) -> GroupDescription:
    """As `Admin.describe_group`."""
    found = await _classic(cluster, group)
    return await _describe_consumer_group(cluster, group) or found if found.state == DEAD else found


async def _classic(cluster: Cluster, group: str) -> GroupDescription:
    fields = {"groups": [group], "include_authorized_operations": False}
    try:
        answer = await cluster.request_coordinator(group, ApiKey.DESCRIBE_GROUPS, fields, check=_check)
    except GroupIdNotFound:
        return GroupDescription(group, DEAD, "", "")
    found = answer.groups[0]
    members = tuple(_classic_member(member) for member in found.members)
    return GroupDescription(group, found.group_state, found.protocol_type, found.protocol_data, members)


async def _describe_consumer_group(cluster: Cluster, group: str) -> GroupDescription | None:
    fields = {"group_ids": [group], "include_authorized_operations": False}
    try:
        answer = await cluster.request_coordinator(
            group, ApiKey.CONSUMER_GROUP_DESCRIBE, fields, check=_check
        )
    except (GroupIdNotFound, UnsupportedVersion):
        return None
    found = answer.groups[0]
    return GroupDescription(
        group,
        found.group_state,
        CONSUMER,
        found.assignor_name,
        tuple(_member(member) for member in found.members),
        CONSUMER,
        found.group_epoch,
        found.assignment_epoch,
    )


def _check(answer: Any) -> None:
    for group in answer.groups:
        raise_for(group.error_code, getattr(group, "error_message", None))


def _classic_member(member: Any) -> GroupMember:
    try:
        partitions = decode_assignment(bytes(member.member_assignment)).partitions
    except WireError:
        partitions = ()  # not a consumer: its bytes mean something else
    return GroupMember(
        member.member_id, member.group_instance_id, member.client_id, member.client_host, partitions
    )


def _member(member: Any) -> GroupMember:
    return GroupMember(
        member.member_id,
        member.instance_id,
        member.client_id,
        member.client_host,
        _partitions(member.assignment.topic_partitions),
        member.member_epoch,
        _partitions(member.target_assignment.topic_partitions),
        tuple(member.subscribed_topic_names),
        member.subscribed_topic_regex or None,
        CLASSIC if member.member_type == CLASSIC_MEMBER else CONSUMER,
    )


def _partitions(topics: Iterable[Any]) -> tuple[TopicPartition, ...]:
    return tuple(
        sorted(TopicPartition(topic.topic_name, index) for topic in topics for index in topic.partitions)
    )
