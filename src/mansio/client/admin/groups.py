"""Description and listing of groups.

Classic groups and consumer groups (KIP-848) have different Describe requests; callers need not know the type of a
group.

A listing has the groups of all brokers: see `mansio.client.admin.coordinator_listing`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from mansio.client.admin.coordinator_listing import list_on_coordinators
from mansio.client.types import TopicPartition
from mansio.config.topic_names import OFFSETS_TOPIC
from mansio.errors import GroupIdNotFound, UnsupportedVersion, WireError
from mansio.net.retry import raise_for_code
from mansio.wire.api_versions import ApiKey
from mansio.wire.internal_records.consumer_protocol import decode_assignment

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mansio.net.cluster import Cluster
    from mansio.net.connection import BrokerConnection

CLASSIC_TYPE: Final = "classic"
CONSUMER_TYPE: Final = "consumer"
DEAD_STATE: Final = "Dead"
"""State of a group that does not exist."""
CLASSIC_MEMBER_TYPE: Final = 0
"""`member_type` of a member with the classic protocol in a ConsumerGroupDescribe response."""


@dataclass(frozen=True, slots=True)
class GroupMember:
    """One member of a group and its assigned partitions.

    The fields from `member_epoch` on are set for members of a consumer group: `target_partitions` is the target
    assignment, `topics` and `topic_regex` are the subscription, and `protocol` is "classic" for a member that uses the
    classic protocol.
    """

    member_id: str
    instance_id: str | None
    client_id: str
    client_host: str
    partitions: tuple[TopicPartition, ...]
    member_epoch: int | None = None
    target_partitions: tuple[TopicPartition, ...] | None = None
    topics: tuple[str, ...] = ()
    topic_regex: str | None = None
    protocol: str = CLASSIC_TYPE


@dataclass(frozen=True, slots=True)
class GroupDescription:
    """State and members of one group. `protocol` is the name of the assignor in use.

    `group_type` is "consumer" or "classic". A consumer group also has `group_epoch`, and `assignment_epoch`, the epoch
    of the target assignment.
    """

    group_id: str
    state: str
    protocol_type: str
    protocol: str
    members: tuple[GroupMember, ...] = field(default=())
    group_type: str = CLASSIC_TYPE
    group_epoch: int | None = None
    assignment_epoch: int | None = None


async def describe_group(cluster: Cluster, group: str) -> GroupDescription:
    """State and members of a classic group or consumer group. The state is "Dead" if the group does not exist."""
    found = await _describe_classic_group(cluster, group)
    return await _describe_consumer_group(cluster, group) or found if found.state == DEAD_STATE else found


async def _describe_classic_group(cluster: Cluster, group: str) -> GroupDescription:
    fields = {"groups": [group], "include_authorized_operations": False}
    try:
        response = await cluster.request_coordinator(group, ApiKey.DESCRIBE_GROUPS, fields, check=_check)
    except GroupIdNotFound:
        return GroupDescription(group, DEAD_STATE, "", "")
    found = response.groups[0]
    members = tuple(_classic_member(member) for member in found.members)
    return GroupDescription(group, found.group_state, found.protocol_type, found.protocol_data, members)


async def _describe_consumer_group(cluster: Cluster, group: str) -> GroupDescription | None:
    fields = {"group_ids": [group], "include_authorized_operations": False}
    try:
        response = await cluster.request_coordinator(
            group, ApiKey.CONSUMER_GROUP_DESCRIBE, fields, check=_check
        )
    except (GroupIdNotFound, UnsupportedVersion):
        return None
    found = response.groups[0]
    return GroupDescription(
        group,
        found.group_state,
        CONSUMER_TYPE,
        found.assignor_name,
        tuple(_consumer_member(member) for member in found.members),
        CONSUMER_TYPE,
        found.group_epoch,
        found.assignment_epoch,
    )


def _check(response: Any) -> None:
    for group in response.groups:
        raise_for_code(group.error_code, getattr(group, "error_message", None))


def _classic_member(member: Any) -> GroupMember:
    try:
        partitions = decode_assignment(bytes(member.member_assignment)).partitions
    except WireError:
        partitions = ()  # not a consumer: its metadata has another format
    return GroupMember(
        member.member_id, member.group_instance_id, member.client_id, member.client_host, partitions
    )


def _consumer_member(member: Any) -> GroupMember:
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
        CLASSIC_TYPE if member.member_type == CLASSIC_MEMBER_TYPE else CONSUMER_TYPE,
    )


def _partitions(topics: Iterable[Any]) -> tuple[TopicPartition, ...]:
    return tuple(
        sorted(TopicPartition(topic.topic_name, index) for topic in topics for index in topic.partitions)
    )


# -- listing --------


@dataclass(frozen=True, slots=True)
class GroupListing:
    """Id, type and state of one group. `group_type` is "" if the broker does not return the type."""

    group_id: str
    protocol_type: str
    state: str
    group_type: str = ""


class GroupListings(list[GroupListing]):
    """List of groups, sorted by id.

    Groups of the brokers in `unreachable` and of `missing_partitions` are missing in the list.
    """

    def __init__(
        self,
        groups: Iterable[GroupListing] = (),
        unreachable: Iterable[int] = (),
        missing_partitions: Iterable[int] = (),
    ) -> None:
        super().__init__(groups)
        self.unreachable: tuple[int, ...] = tuple(unreachable)
        """Brokers that did not respond in time, whose groups are missing."""
        self.missing_partitions: tuple[int, ...] = tuple(missing_partitions)
        """Partitions of `__consumer_offsets` without a coordinator that responded, whose groups are missing."""

    @property
    def is_complete(self) -> bool:
        """Whether every broker responded and the groups of every partition of `__consumer_offsets` were listed."""
        return not self.unreachable and not self.missing_partitions


async def list_groups(cluster: Cluster, timeout_ms: float | None = None) -> GroupListings:
    """Return the groups of all brokers, sorted by id. See `Admin.list_groups`."""
    listing = await list_on_coordinators(cluster, OFFSETS_TOPIC, _list_groups_of_broker, timeout_ms)
    found = {group.group_id: group for group in listing.items}
    groups = [found[group_id] for group_id in sorted(found)]
    return GroupListings(groups, listing.unreachable, listing.missing_partitions)


async def _list_groups_of_broker(connection: BrokerConnection, _node_id: int) -> list[GroupListing]:
    response = await connection.request(ApiKey.LIST_GROUPS, {"states_filter": [], "types_filter": []})
    raise_for_code(response.error_code)
    return [
        GroupListing(group.group_id, group.protocol_type, group.group_state, group.group_type)
        for group in response.groups
    ]
