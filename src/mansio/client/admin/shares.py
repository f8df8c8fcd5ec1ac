"""Share group administration: members, offsets, leases, dead-lettered records; available as `client.admin.shares`.

Members and offsets come from the group's coordinator (KIP-932); leases and redrives use Mansio's own requests to the
partition leaders.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from mansio.errors import GroupIdNotFound, MansioError, UnknownTopicId
from mansio.net.cluster import group_by_topic
from mansio.net.offsets import request_leaders
from mansio.net.retry import client_error_for_code, raise_for_code
from mansio.wire.api_versions import ApiKey
from mansio.wire.topic_partition import TopicPartition

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from mansio.net.cluster import Cluster

REDRIVEN_MAX: Final = 10_000
"""Maximum number of records that one request redrives."""


@dataclass(frozen=True, slots=True)
class ShareMember:
    """One member of a share group, and the partitions assigned to it."""

    member_id: str
    client_id: str
    client_host: str
    topics: tuple[str, ...]
    partitions: tuple[TopicPartition, ...]


@dataclass(frozen=True, slots=True)
class ShareGroupDescription:
    """One share group."""

    group_id: str
    state: str
    members: tuple[ShareMember, ...]


@dataclass(frozen=True, slots=True)
class ShareOffset:
    """Start offset of a share group in a partition (its first offset that is not archived), and its lag in records
    (None: unknown to the broker)."""

    start_offset: int
    lag: int | None


@dataclass(frozen=True, slots=True)
class LeaseHolder:
    """Number of records that one member has acquired in a partition; `oldest_ms`: age of its oldest lease."""

    member_id: str
    leased: int
    oldest_ms: int


@dataclass(frozen=True, slots=True)
class LeasedRange:
    """Range of offsets that one member has acquired, both ends inclusive, and their delivery count."""

    first_offset: int
    last_offset: int
    member_id: str
    delivery_count: int
    age_ms: int


@dataclass(frozen=True, slots=True)
class ShareLeases:
    """State of one share partition, in records; the group's range is [`start_offset`, `end_offset`).

    `archiving`: being copied to the dead-letter topic; `dead_letter_error`: why that is delayed, "" if nothing failed.
    `dead`: dead-lettered and not redriven since.
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


@dataclass(frozen=True, slots=True)
class Redriven:
    """Result of one redrive request, in records: `redriven` now, `repeated` with the same id, `deleted` from the log;
    `dead` records remain that can be redriven."""

    redriven: int
    repeated: int
    deleted: int
    dead: int


class ShareAdmin:
    """Share groups of one cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    async def describe(self, group: str) -> ShareGroupDescription:
        """State and members of a group. Raises `GroupIdNotFound`, also for a group of another type."""

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
        """Start offset and lag in these partitions, or in all where the group has a start offset. Raises
        `GroupIdNotFound`."""
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
        """Reset the start offsets of these partitions. Raises `NonEmptyGroup`, `GroupIdNotFound`."""
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
        """Delete the group's state in these topics. Raises `NonEmptyGroup`, `GroupIdNotFound`."""

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
        """Leases in these partitions; None where the group has not read yet. `ranges_max`: number of acquired ranges
        returned per partition, lowest offsets first."""
        wanted = dict.fromkeys(sorted(set(partitions)), ranges_max)
        return await request_leaders(self._cluster, wanted, partial(self._leases_on, group))

    async def _leases_on(
        self,
        group: str,
        node_id: int,
        wanted: Mapping[TopicPartition, int],
        found: dict[TopicPartition, ShareLeases | None],
    ) -> None:
        ids, topics = {}, []
        for name, indexes in group_by_topic(wanted).items():
            topic_id = (await self._cluster.topic(name)).topic_id
            ids[topic_id] = name
            topics.append({"topic_id": topic_id, "partitions": indexes})
        fields = {"group_id": group, "topics": topics, "ranges_max": max(wanted.values())}
        connection = await self._cluster.connection(node_id)
        response = await connection.request(ApiKey.DESCRIBE_LEASES, fields)
        raise_for_code(response.error_code, response.error_message)
        failure: MansioError | None = None
        for topic in response.topics:
            for entry in topic.partitions:
                one = TopicPartition(ids[topic.topic_id], entry.partition_index)
                if entry.error_code == GroupIdNotFound.kafka_code:
                    found[one] = None
                elif entry.error_code:
                    failure = client_error_for_code(entry.error_code, entry.error_message)
                else:
                    found[one] = _leases(entry)
        if failure is not None:
            raise failure

    async def redrive(
        self,
        group: str,
        partition: TopicPartition,
        *,
        redrive_id: str,
        offsets: Sequence[tuple[int, int]] | None = None,
        most: int = 500,
    ) -> Redriven:
        """Make dead-lettered records of one partition available to their group again: those in `offsets` (inclusive
        ranges), or all. Idempotent per `redrive_id` and offset, so it can be repeated after any failure.

        Redrives at most `most` records; call it until none is redriven. Raises `GroupIdNotFound` where the group has
        not read yet.
        """

        async def ask(
            node_id: int, wanted: Mapping[TopicPartition, None], found: dict[TopicPartition, Redriven]
        ) -> None:
            (one,) = wanted
            topic_id = (await self._cluster.topic(one.topic)).topic_id
            ranges = None
            if offsets is not None:
                ranges = [{"first_offset": first, "last_offset": last} for first, last in offsets]
            fields = {
                "redrive_id": redrive_id,
                "group_id": group,
                "topic_id": topic_id,
                "partition_index": one.partition,
                "offsets": ranges,
                "most": min(most, REDRIVEN_MAX),
            }
            connection = await self._cluster.connection(node_id)
            response = await connection.request(ApiKey.REDRIVE_RECORDS, fields)
            if response.error_code == UnknownTopicId.kafka_code:
                self._cluster.mark_stale((one.topic,))
            raise_for_code(response.error_code, response.error_message)
            found[one] = Redriven(response.redriven, response.repeated, response.deleted, response.dead)

        return (await request_leaders(self._cluster, {partition: None}, ask))[partition]


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
            LeasedRange(one.first_offset, one.last_offset, one.member_id, one.delivery_count, one.age_ms)
            for one in entry.ranges
        ),
    )
