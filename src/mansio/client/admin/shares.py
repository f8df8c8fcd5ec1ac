"""Administration of share groups: members, offsets, leases, dead-lettered records; available as `client.admin.shares`.

Requests for members and offsets go to the group's coordinator (KIP-932). Requests for leases and redrives are Mansio's
own and go to the leaders of the partitions.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from mansio.errors import GroupIdNotFound, MansioError
from mansio.net.cluster import group_by_topic
from mansio.net.offsets import request_leaders
from mansio.net.redrive import RedriveResult, redrive_records
from mansio.net.retry import client_error_for_code, raise_for_code
from mansio.tracebacks import copied
from mansio.wire.api_versions import ApiKey
from mansio.wire.batch.priority_header import Priority
from mansio.wire.topic_partition import TopicPartition

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from mansio.net.cluster import Cluster


@dataclass(frozen=True, slots=True)
class ShareMember:
    """One member of a share group, with its subscribed topics and assigned partitions."""

    member_id: str
    client_id: str
    client_host: str
    topics: tuple[str, ...]
    partitions: tuple[TopicPartition, ...]


@dataclass(frozen=True, slots=True)
class ShareGroupDescription:
    """State and members of one share group."""

    group_id: str
    state: str
    members: tuple[ShareMember, ...]


@dataclass(frozen=True, slots=True)
class ShareOffset:
    """Start offset of a share group in one partition (KIP-932's share-partition start offset), and the lag of the group
    in records (None if the broker does not know it)."""

    start_offset: int
    lag: int | None


@dataclass(frozen=True, slots=True)
class LeaseHolder:
    """A member that has acquired records of one partition. `leased` is the number of these records, `oldest_ms` the age
    of the oldest lease in milliseconds."""

    member_id: str
    leased: int
    oldest_ms: int


@dataclass(frozen=True, slots=True)
class LeasedRange:
    """Range of offsets (both inclusive) that one member has acquired, with the delivery count of the records, and the
    age and duration of the lease in milliseconds (`lease_ms` is -1 if the broker does not tell it)."""

    first_offset: int
    last_offset: int
    member_id: str
    delivery_count: int
    age_ms: int
    lease_ms: int = -1


@dataclass(frozen=True, slots=True)
class PriorityLeases:
    """Delivery state of the records with one `priority`, "high", "normal" or "low", in one partition for one share
    group. The other fields are those of `ShareLeases`."""

    priority: str
    start_offset: int
    end_offset: int
    lag: int
    leased: int
    in_backoff: int
    dead: int


@dataclass(frozen=True, slots=True)
class ShareLeases:
    """Delivery state of one partition for one share group.

    The group keeps a delivery state for the offsets from `start_offset` to `end_offset` (exclusive). `lag`, `leased`,
    `in_backoff`, `withheld`, `archiving` and `dead` are numbers of records: not processed yet; leased; released and not
    offered again yet; withheld; being copied to the dead-letter topic; dead-lettered and not redriven since.
    `dead_letter_error` is the reason why copies to the dead-letter topic are delayed, "" if none failed. `priorities`
    has the state of each priority, the highest first, on a topic with priorities. `keys_at_lease_limit` and
    `keys_at_rate_limit` are numbers of group keys with records that a limit by key holds back, `limited_keys` are some
    of them, at most ten. `isolated_key_count` is the number of group keys whose backlog a fair group keeps apart from
    the records of others, `isolated_keys` are at most ten of them; one of more than 64 bytes is replaced by a digest.
    """

    start_offset: int
    end_offset: int
    lag: int
    leased: int
    in_backoff: int
    withheld: int
    archiving: int
    dead: int
    dead_letter_error: str
    holders: tuple[LeaseHolder, ...]
    ranges: tuple[LeasedRange, ...]
    priorities: tuple[PriorityLeases, ...] = ()
    keys_at_lease_limit: int = 0
    keys_at_rate_limit: int = 0
    limited_keys: tuple[bytes, ...] = ()
    isolated_key_count: int = 0
    isolated_keys: tuple[bytes, ...] = ()


class ShareAdmin:
    """Administration of the share groups of one cluster; available as `client.admin.shares`."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    async def describe(self, group: str) -> ShareGroupDescription:
        """State and members of a share group. Raises `GroupIdNotFound`, also for a group of another type."""

        def check(response: Any) -> None:
            for one in response.groups:
                raise_for_code(one.error_code, one.error_message)

        response = await self._cluster.request_coordinator(
            group,
            ApiKey.SHARE_GROUP_DESCRIBE,
            {"group_ids": [group], "include_authorized_operations": False},
            check=check,
        )
        found = response.groups[0]
        return ShareGroupDescription(group, found.group_state, tuple(map(_member, found.members)))

    # Offsets

    async def offsets(
        self, group: str, partitions: Iterable[TopicPartition] | None = None
    ) -> dict[TopicPartition, ShareOffset]:
        """Start offset and lag of a group in `partitions` (None: in all partitions). Partitions without a start offset
        are absent. Raises `GroupIdNotFound`."""
        topics = None
        if partitions is not None:
            grouped = group_by_topic(list(partitions))
            topics = [{"topic_name": name, "partitions": indexes} for name, indexes in grouped.items()]

        def check(response: Any) -> None:
            for one in response.groups:
                raise_for_code(one.error_code, one.error_message)
                for topic in one.topics:
                    for entry in topic.partitions:
                        raise_for_code(entry.error_code, entry.error_message)

        response = await self._cluster.request_coordinator(
            group,
            ApiKey.DESCRIBE_SHARE_GROUP_OFFSETS,
            {"groups": [{"group_id": group, "topics": topics}]},
            check=check,
        )
        return {
            TopicPartition(topic.topic_name, entry.partition_index): ShareOffset(
                entry.start_offset, None if entry.lag < 0 else entry.lag
            )
            for topic in response.groups[0].topics
            for entry in topic.partitions
            if entry.start_offset >= 0
        }

    async def alter_offsets(self, group: str, offsets: Mapping[TopicPartition, int]) -> None:
        """Set the start offsets of a group without members. Raises `NonEmptyGroup` or `GroupIdNotFound`."""
        topics = [
            {
                "topic_name": name,
                "partitions": [
                    {"partition_index": index, "start_offset": offsets[TopicPartition(name, index)]}
                    for index in indexes
                ],
            }
            for name, indexes in group_by_topic(offsets).items()
        ]

        def check(response: Any) -> None:
            raise_for_code(response.error_code, response.error_message)
            for topic in response.responses:
                for entry in topic.partitions:
                    raise_for_code(entry.error_code, entry.error_message)

        await self._cluster.request_coordinator(
            group, ApiKey.ALTER_SHARE_GROUP_OFFSETS, {"group_id": group, "topics": topics}, check=check
        )

    async def delete_offsets(self, group: str, topics: Iterable[str]) -> None:
        """Delete the offsets and delivery state of a group without members in `topics`. Raises `NonEmptyGroup` or
        `GroupIdNotFound`."""

        def check(response: Any) -> None:
            raise_for_code(response.error_code, response.error_message)
            for topic in response.responses:
                raise_for_code(topic.error_code, topic.error_message)

        fields = {"group_id": group, "topics": [{"topic_name": name} for name in topics]}
        await self._cluster.request_coordinator(group, ApiKey.DELETE_SHARE_GROUP_OFFSETS, fields, check=check)

    # Leases and dead letters

    async def leases(
        self, group: str, partitions: Iterable[TopicPartition], *, ranges_max: int = 0
    ) -> dict[TopicPartition, ShareLeases | None]:
        """Delivery state and leases of a group in each partition; None for a partition that the group has not read yet.

        `ranges_max` bounds the number of acquired ranges that are returned per partition, lowest offsets first.
        """
        requests = dict.fromkeys(sorted(set(partitions)), ranges_max)
        return await request_leaders(self._cluster, requests, partial(self._describe_leases, group))

    async def _describe_leases(
        self,
        group: str,
        node_id: int,
        ranges_max: Mapping[TopicPartition, int],
        results: dict[TopicPartition, ShareLeases | None],
    ) -> None:
        ids, topics = {}, []
        for name, indexes in group_by_topic(ranges_max).items():
            topic_id = (await self._cluster.topic(name)).topic_id
            ids[topic_id] = name
            topics.append({"topic_id": topic_id, "partitions": indexes})
        fields = {"group_id": group, "topics": topics, "ranges_max": max(ranges_max.values())}
        connection = await self._cluster.connection(node_id)
        response = await connection.request(ApiKey.DESCRIBE_LEASES, fields)
        raise_for_code(response.error_code, response.error_message)
        failure: MansioError | None = None
        for topic in response.topics:
            for entry in topic.partitions:
                one = TopicPartition(ids[topic.topic_id], entry.partition_index)
                if entry.error_code == GroupIdNotFound.kafka_code:
                    results[one] = None
                elif entry.error_code:
                    failure = client_error_for_code(entry.error_code, entry.error_message)
                else:
                    results[one] = _leases(entry)
        if failure is not None:
            raise copied(failure)

    async def redrive(
        self,
        group: str,
        partition: TopicPartition,
        *,
        redrive_id: str,
        offsets: Sequence[tuple[int, int]] | None = None,
        records_max: int = 500,
    ) -> RedriveResult:
        """Make dead-lettered records of one partition available to their group again.

        The records are those in `offsets` (ranges, both ends inclusive), or all. One call redrives at most
        `records_max` records; repeat the call until it redrives none. A record is redriven once per `redrive_id`, so a
        call can be repeated with the same id after any failure. Raises `GroupIdNotFound` if the group has not read the
        partition yet.
        """

        return await redrive_records(
            self._cluster, group, partition, redrive_id=redrive_id, offsets=offsets, records_max=records_max
        )


def _member(member: Any) -> ShareMember:
    partitions = tuple(
        TopicPartition(topic.topic_name, index)
        for topic in member.assignment.topic_partitions
        for index in topic.partitions
    )
    return ShareMember(
        member.member_id,
        member.client_id,
        member.client_host,
        tuple(member.subscribed_topic_names),
        partitions,
    )


def _leases(entry: Any) -> ShareLeases:
    return ShareLeases(
        entry.start_offset,
        entry.end_offset,
        entry.lag,
        entry.leased,
        entry.in_backoff,
        entry.withheld,
        entry.archiving,
        entry.dead,
        entry.dead_letter_error,
        tuple(LeaseHolder(one.member_id, one.leased, one.oldest_ms) for one in entry.holders),
        tuple(
            LeasedRange(
                one.first_offset,
                one.last_offset,
                one.member_id,
                one.delivery_count,
                one.age_ms,
                one.lease_ms,
            )
            for one in entry.ranges
        ),
        tuple(
            PriorityLeases(
                Priority(one.priority).name.lower(),
                one.start_offset,
                one.end_offset,
                one.lag,
                one.leased,
                one.in_backoff,
                one.dead,
            )
            for one in entry.priorities
        ),
        entry.keys_at_lease_limit,
        entry.keys_at_rate_limit,
        tuple(one.key for one in entry.limited_keys),
        entry.isolated_key_count,
        tuple(one.key for one in entry.isolated_keys),
    )
