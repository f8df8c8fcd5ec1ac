"""Description and listing of groups.

Classic groups and consumer groups (KIP-848) have different Describe requests; callers need not know the type of a
group.

A broker lists only the groups of the `__consumer_offsets` partitions that it leads, so a listing sends ListGroups to
all brokers. While a partition has no leader, or its leader has not learned yet that it was elected, no broker lists the
groups of that partition, and none returns an error. So a listing also requests the partitions that each broker leads,
before and after the broker's groups.

Invariants of a listing:
* The groups of a partition are listed if one broker led the partition, in one leader epoch, before and after it listed
  its groups.
* A broker that does not respond does not delay the responses of others.
* While groups are missing, because a partition moved or a broker did not respond, the requests to all brokers are
  repeated until the deadline. Then the listing reports the brokers and partitions whose groups are missing.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from mansio.client.types import TopicPartition
from mansio.errors import GroupIdNotFound, MansioError, UnsupportedVersion, WireError
from mansio.net.retry import raise_for_code
from mansio.wire.api_versions import ApiKey
from mansio.wire.internal_records.consumer_protocol import decode_assignment

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from mansio.net.cluster import Cluster
    from mansio.net.connection import Connection

CLASSIC_TYPE: Final = "classic"
CONSUMER_TYPE: Final = "consumer"
DEAD_STATE: Final = "Dead"
"""State of a group that does not exist."""
CLASSIC_MEMBER_TYPE: Final = 0
"""`member_type` of a member with the classic protocol in a ConsumerGroupDescribe response."""
BROKER_TIMEOUT_MS_MAX: Final = 1000.0
"""Time limit for the requests to one broker, including retries, before the metadata is refreshed."""

RETRY_INTERVAL_S: Final = 0.2
"""Pause before an incomplete listing is requested again."""

OFFSETS_TOPIC: Final = "__consumer_offsets"


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


class _BrokerListing(NamedTuple):
    """Groups that one broker listed. `partitions` are the partitions of `__consumer_offsets` that the broker knows,
    `listed_partitions` those whose groups it listed."""

    groups: list[GroupListing]
    partitions: frozenset[int]
    listed_partitions: frozenset[int]


async def list_groups(cluster: Cluster, timeout_ms: float | None = None) -> GroupListings:
    """The groups of all brokers, sorted by id. See `Admin.list_groups`."""
    now = asyncio.get_running_loop().time
    deadline = now() + (cluster.retry_timeout_ms if timeout_ms is None else timeout_ms) / 1000
    while True:
        remaining_ms = max(1.0, (deadline - now()) * 1000)
        await cluster.retry(lambda: cluster.refresh_metadata(()), timeout_ms=remaining_ms)
        nodes = sorted(cluster.nodes)
        requests = (
            _list_groups_of_broker(cluster, node_id, min(BROKER_TIMEOUT_MS_MAX, remaining_ms))
            for node_id in nodes
        )
        outcomes = dict(zip(nodes, await asyncio.gather(*requests), strict=True))
        failed = {
            node_id: outcome for node_id, outcome in outcomes.items() if isinstance(outcome, MansioError)
        }
        is_last = now() + RETRY_INTERVAL_S >= deadline
        for error in failed.values():
            if not error.retriable or (is_last and len(failed) == len(nodes)):
                raise error
        results = [outcome for outcome in outcomes.values() if not isinstance(outcome, MansioError)]
        listing = _combine_listings(results, failed)
        if listing.is_complete or is_last:
            return listing
        await asyncio.sleep(RETRY_INTERVAL_S)


def _combine_listings(results: Sequence[_BrokerListing], unreachable: Iterable[int]) -> GroupListings:
    found = {group.group_id: group for result in results for group in result.groups}
    partitions = frozenset[int]().union(*(result.partitions for result in results))
    listed = frozenset[int]().union(*(result.listed_partitions for result in results))
    groups = [found[group_id] for group_id in sorted(found)]
    return GroupListings(groups, unreachable, sorted(partitions - listed))


async def _list_groups_of_broker(
    cluster: Cluster, node_id: int, wait_ms: float
) -> _BrokerListing | MansioError:
    """List the groups of one broker. Returns an error of the broker instead of raising it."""

    async def attempt() -> _BrokerListing:
        connection = await cluster.connection(node_id)
        before = await _leader_epochs(connection, node_id)
        response = await connection.request(ApiKey.LIST_GROUPS, {"states_filter": [], "types_filter": []})
        raise_for_code(response.error_code)
        after = await _leader_epochs(connection, node_id)
        listed = {index for index, epoch in after.items() if epoch is not None and epoch == before.get(index)}
        return _BrokerListing(_group_listings(response), frozenset(after), frozenset(listed))

    try:
        return await cluster.retry(attempt, timeout_ms=wait_ms)
    except MansioError as error:
        return error


async def _leader_epochs(connection: Connection, node_id: int) -> dict[int, int | None]:
    """Leader epoch of each partition of `__consumer_offsets` that a broker knows and leads; None for a partition that
    it does not lead. Empty if the topic does not exist or the client is not authorized."""
    fields = {"topics": [{"name": OFFSETS_TOPIC}], "allow_auto_topic_creation": False}
    response = await connection.request(ApiKey.METADATA, fields)
    return {
        partition.partition_index: partition.leader_epoch if partition.leader_id == node_id else None
        for topic in response.topics
        if not topic.error_code
        for partition in topic.partitions
    }


def _group_listings(response: Any) -> list[GroupListing]:
    return [
        GroupListing(group.group_id, group.protocol_type, group.group_state, group.group_type)
        for group in response.groups
    ]
