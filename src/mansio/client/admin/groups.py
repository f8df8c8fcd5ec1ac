"""Description and listing of groups.

Classic groups and groups whose partitions the broker assigns (KIP-848) have different Describe requests; callers need
not know the type of a group.

Each broker lists the groups that it coordinates, those of its partitions of `__consumer_offsets`, so all brokers are
asked. While a partition has no leader, or the leader does not know yet that it was elected, no broker lists its groups
and none reports an error. So the partitions that each broker leads are requested before and after its groups.

Invariants of a listing:
* The groups of a partition are complete if its leader listed them and led it in the same epoch before and after.
* A broker that does not respond does not delay the responses of others. Until the deadline all brokers are asked again
  while the listing is incomplete, because groups have moved; a listing that stays incomplete reports what is missing.
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

CLASSIC: Final = "classic"
CONSUMER: Final = "consumer"
DEAD: Final = "Dead"
"""State of a group that does not exist."""
CLASSIC_MEMBER: Final = 0
RESPONSE_MS_MAX: Final = 1000.0
"""Time limit for one broker, including retries, before the metadata is refreshed."""

PAUSE_S: Final = 0.2

OFFSETS_TOPIC: Final = "__consumer_offsets"


@dataclass(frozen=True, slots=True)
class GroupMember:
    """One member of a group and its assigned partitions.

    The other fields are those of members of a "consumer" group: `epoch` of the member; `target`, the target assignment;
    `topics` and `pattern`, the subscription; `protocol`, "classic" for a member with the classic protocol in such a
    group.
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

    `group_type`: "consumer" if the broker assigns the partitions, else "classic". Of the former, `epoch` is the group
    epoch and `target_epoch` the epoch of the target assignment.
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
    """State and members of a group of either type; a group that does not exist is in state "Dead"."""
    found = await _describe_classic_group(cluster, group)
    return await _describe_consumer_group(cluster, group) or found if found.state == DEAD else found


async def _describe_classic_group(cluster: Cluster, group: str) -> GroupDescription:
    fields = {"groups": [group], "include_authorized_operations": False}
    try:
        response = await cluster.request_coordinator(group, ApiKey.DESCRIBE_GROUPS, fields, check=_check)
    except GroupIdNotFound:
        return GroupDescription(group, DEAD, "", "")
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
        CONSUMER,
        found.assignor_name,
        tuple(_member(member) for member in found.members),
        CONSUMER,
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


# -- listing --------


@dataclass(frozen=True, slots=True)
class GroupListing:
    """One group of a listing. `group_type` is "" if the broker does not return it."""

    group_id: str
    protocol_type: str
    state: str
    group_type: str = ""


class GroupListings(list[GroupListing]):
    """Groups by id.

    `unreachable`: brokers that did not respond in time, whose groups are missing. `missing_partitions`: partitions of
    `__consumer_offsets` without a coordinator that responded, whose groups are missing.
    """

    def __init__(
        self,
        groups: Iterable[GroupListing] = (),
        unreachable: Iterable[int] = (),
        missing_partitions: Iterable[int] = (),
    ) -> None:
        super().__init__(groups)
        self.unreachable = tuple(unreachable)
        self.missing_partitions = tuple(missing_partitions)

    @property
    def is_complete(self) -> bool:
        """Whether every broker responded and every partition of `__consumer_offsets` has a coordinator."""
        return not self.unreachable and not self.missing_partitions


class _BrokerListing(NamedTuple):
    """`partitions` of `__consumer_offsets` that the broker knows; `listed`: those whose groups it listed."""

    groups: list[GroupListing]
    partitions: frozenset[int]
    listed: frozenset[int]


async def list_groups(cluster: Cluster, timeout_ms: float | None = None) -> GroupListings:
    """The groups of all brokers, by id; see `Admin.list_groups`."""
    now = asyncio.get_running_loop().time
    deadline = now() + (cluster.retry_timeout_ms if timeout_ms is None else timeout_ms) / 1000
    while True:
        left_ms = max(1.0, (deadline - now()) * 1000)
        await cluster.retry(lambda: cluster.refresh_metadata(()), timeout_ms=left_ms)
        nodes = sorted(cluster.nodes)
        requests = (_groups_of(cluster, node_id, min(RESPONSE_MS_MAX, left_ms)) for node_id in nodes)
        outcomes = dict(zip(nodes, await asyncio.gather(*requests), strict=True))
        failed = {
            node_id: outcome for node_id, outcome in outcomes.items() if isinstance(outcome, MansioError)
        }
        is_last = now() + PAUSE_S >= deadline
        for error in failed.values():
            if not error.retriable or (is_last and len(failed) == len(nodes)):
                raise error
        results = [outcome for outcome in outcomes.values() if not isinstance(outcome, MansioError)]
        listing = _combined(results, failed)
        if listing.is_complete or is_last:
            return listing
        await asyncio.sleep(PAUSE_S)


def _combined(results: Sequence[_BrokerListing], unreachable: Iterable[int]) -> GroupListings:
    found = {group.group_id: group for result in results for group in result.groups}
    partitions = frozenset[int]().union(*(result.partitions for result in results))
    listed = frozenset[int]().union(*(result.listed for result in results))
    groups = [found[group_id] for group_id in sorted(found)]
    return GroupListings(groups, unreachable, sorted(partitions - listed))


async def _groups_of(cluster: Cluster, node_id: int, wait_ms: float) -> _BrokerListing | MansioError:
    """The result of one broker, or its error."""

    async def attempt() -> _BrokerListing:
        connection = await cluster.connection(node_id)
        before = await _leader_epochs(connection, node_id)
        response = await connection.request(ApiKey.LIST_GROUPS, {"states_filter": [], "types_filter": []})
        raise_for_code(response.error_code)
        after = await _leader_epochs(connection, node_id)
        listed = {index for index, epoch in after.items() if epoch is not None and epoch == before.get(index)}
        return _BrokerListing(_listings(response), frozenset(after), frozenset(listed))

    try:
        return await cluster.retry(attempt, timeout_ms=wait_ms)
    except MansioError as error:
        return error


async def _leader_epochs(connection: Connection, node_id: int) -> dict[int, int | None]:
    """For each partition of `__consumer_offsets` known to a broker: the leader epoch if the broker leads it, else None.
    Empty while the topic does not exist or the client is not authorised."""
    fields = {"topics": [{"name": OFFSETS_TOPIC}], "allow_auto_topic_creation": False}
    response = await connection.request(ApiKey.METADATA, fields)
    return {
        partition.partition_index: partition.leader_epoch if partition.leader_id == node_id else None
        for topic in response.topics
        if not topic.error_code
        for partition in topic.partitions
    }


def _listings(response: Any) -> list[GroupListing]:
    return [
        GroupListing(group.group_id, group.protocol_type, group.group_state, group.group_type)
        for group in response.groups
    ]
