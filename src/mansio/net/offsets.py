"""Requests about offsets of partitions: ListOffsets, OffsetFetch, OffsetCommit, DeleteRecords.

Used by the consumer, the admin client, the command line and Spark. `request_leaders` sends one request per leader in
parallel and retries only the partitions that failed.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from mansio.errors import (
    ConnectionLost,
    FencedLeaderEpoch,
    LeaderNotAvailable,
    NotLeaderOrFollower,
    OffsetOutOfRange,
    UnknownTopicOrPartition,
)
from mansio.net.cluster import Cluster, group_by_topic
from mansio.net.retry import error_for, raise_for
from mansio.wire.api_versions import ApiKey
from mansio.wire.topic_partition import TopicPartition

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping

    from mansio.errors import MansioError

LATEST: Final = -1
"""Requests the offset after the last readable record."""
EARLIEST: Final = -2
"""Requests the log start offset."""
MAX_TIMESTAMP: Final = -3
"""Requests the offset of the record with the greatest timestamp (KIP-734)."""

Request = TypeVar("Request")
Result = TypeVar("Result")

READ_UNCOMMITTED: Final = 0
READ_COMMITTED: Final = 1

STALE_METADATA = (
    NotLeaderOrFollower,
    LeaderNotAvailable,
    UnknownTopicOrPartition,
    FencedLeaderEpoch,
    ConnectionLost,
)


class ListedOffset(NamedTuple):
    """Result of ListOffsets. `offset` is -1 if no record has such a timestamp; `timestamp_ms` is -1 if unknown."""

    offset: int
    timestamp_ms: int
    leader_epoch: int


class CommittedOffset(NamedTuple):
    """Committed offset of a group, with its metadata."""

    offset: int
    metadata: str = ""
    leader_epoch: int = -1


async def request_leaders(
    cluster: Cluster,
    wanted: Mapping[TopicPartition, Request],
    send: Callable[[int, Mapping[TopicPartition, Request], dict[TopicPartition, Result]], Awaitable[None]],
) -> dict[TopicPartition, Result]:
    """Send one request per leader in parallel. `send(node id, its part of wanted, found)` stores results in `found` and
    raises the error of partitions that failed.

    Retriable failures are retried for the cluster's retry timeout, only for the partitions without a result.
    """
    found: dict[TopicPartition, Result] = {}

    async def attempt() -> None:
        missing = [partition for partition in wanted if partition not in found]
        try:
            grouped = await cluster.group_by_leader(missing)
            requests = [
                send(node, {partition: wanted[partition] for partition in partitions}, found)
                for node, partitions in grouped.items()
            ]
            for outcome in await asyncio.gather(*requests, return_exceptions=True):
                if isinstance(outcome, BaseException):
                    raise outcome
            if any(partition not in found for partition in missing):
                raise UnknownTopicOrPartition("the response has no result for the partition")
        except STALE_METADATA:
            cluster.mark_stale({partition.topic for partition in missing})
            raise

    await cluster.retry(attempt)
    return {partition: found[partition] for partition in wanted}


async def list_offsets(
    cluster: Cluster,
    wanted: Mapping[TopicPartition, int],
    *,
    isolation_level: int = READ_UNCOMMITTED,
) -> dict[TopicPartition, ListedOffset]:
    """For each partition the offset of `LATEST`, `EARLIEST`, `MAX_TIMESTAMP`, or of the first record with a timestamp
    of at least that many milliseconds since the epoch."""
    return await request_leaders(cluster, wanted, partial(_list_offsets_of_node, cluster, isolation_level))


async def _list_offsets_of_node(
    cluster: Cluster,
    isolation_level: int,
    node_id: int,
    wanted: Mapping[TopicPartition, int],
    found: dict[TopicPartition, ListedOffset],
) -> None:
    topics = [
        {
            "name": topic,
            "partitions": [
                {
                    "partition_index": index,
                    "current_leader_epoch": -1,
                    "timestamp": wanted[TopicPartition(topic, index)],
                }
                for index in indexes
            ],
        }
        for topic, indexes in group_by_topic(wanted).items()
    ]
    connection = await cluster.connection(node_id)
    response = await connection.request(
        ApiKey.LIST_OFFSETS, {"replica_id": -1, "isolation_level": isolation_level, "topics": topics}
    )
    failure: MansioError | None = None
    for topic in response.topics:
        for entry in topic.partitions:
            if entry.error_code:
                failure = error_for(entry.error_code)
            else:
                listed = ListedOffset(entry.offset, entry.timestamp, entry.leader_epoch)
                found[TopicPartition(topic.name, entry.partition_index)] = listed
    if failure is not None:
        raise failure


async def fetch_offsets(
    cluster: Cluster, group: str, partitions: Iterable[TopicPartition] | None = None
) -> dict[TopicPartition, CommittedOffset]:
    """Committed offsets of a group, in these partitions or in all. Partitions without a commit are absent."""
    topics = None
    if partitions is not None:
        topics = [
            {"name": topic, "partition_indexes": list(indexes)}
            for topic, indexes in group_by_topic(partitions).items()
        ]
    found: dict[TopicPartition, CommittedOffset] = {}

    def check(response: Any) -> None:
        found.clear()
        of_group = response.groups[0] if response.groups else response
        raise_for(of_group.error_code)
        for topic in of_group.topics:
            for entry in topic.partitions:
                raise_for(entry.error_code)
                if entry.committed_offset >= 0:
                    found[TopicPartition(topic.name, entry.partition_index)] = CommittedOffset(
                        entry.committed_offset, entry.metadata or "", entry.committed_leader_epoch
                    )

    fields = {
        "group_id": group,
        "topics": topics,
        "groups": [{"group_id": group, "topics": topics}],
        "require_stable": False,
    }
    await cluster.request_coordinator(group, ApiKey.OFFSET_FETCH, fields, check=check)
    return found


async def commit_offsets(
    cluster: Cluster,
    group: str,
    offsets: Mapping[TopicPartition, int | CommittedOffset],
    *,
    generation: int = -1,
    member_id: str = "",
    instance_id: str | None = None,
    retry_timeout_ms: float | None = None,
) -> None:
    """Commit offsets of a group. Without a member (generation -1) the group must have no members."""
    if not offsets:
        return
    topics = []
    for topic, indexes in group_by_topic(offsets).items():
        entries = []
        for index in indexes:
            given = offsets[TopicPartition(topic, index)]
            committed = given if isinstance(given, CommittedOffset) else CommittedOffset(given)
            entries.append(
                {
                    "partition_index": index,
                    "committed_offset": committed.offset,
                    "committed_leader_epoch": committed.leader_epoch,
                    "committed_metadata": committed.metadata,
                }
            )
        topics.append({"name": topic, "partitions": entries})

    def check(response: Any) -> None:
        for topic in response.topics:
            for entry in topic.partitions:
                raise_for(entry.error_code)

    fields = {
        "group_id": group,
        "generation_id_or_member_epoch": generation,
        "member_id": member_id,
        "group_instance_id": instance_id,
        "retention_time_ms": -1,
        "topics": topics,
    }
    await cluster.request_coordinator(
        group, ApiKey.OFFSET_COMMIT, fields, check=check, retry_timeout_ms=retry_timeout_ms
    )


async def delete_records(
    cluster: Cluster, before: Mapping[TopicPartition, int], *, timeout_ms: int
) -> dict[TopicPartition, int]:
    """Delete the records below an offset of each partition (-1: up to the high watermark; KIP-107). Returns the new
    start offsets.

    Idempotent, so retriable failures are retried. Raises `OffsetOutOfRange`, `InvalidTopic`, `PolicyViolation`; an
    error of one partition does not prevent the deletion in others.
    """
    return await request_leaders(cluster, before, partial(_delete_on_node, cluster, timeout_ms))


async def _delete_on_node(
    cluster: Cluster,
    timeout_ms: int,
    node_id: int,
    before: Mapping[TopicPartition, int],
    found: dict[TopicPartition, int],
) -> None:
    topics = [
        {
            "name": topic,
            "partitions": [
                {"partition_index": index, "offset": before[TopicPartition(topic, index)]}
                for index in indexes
            ],
        }
        for topic, indexes in group_by_topic(before).items()
    ]
    connection = await cluster.connection(node_id)
    response = await connection.request(ApiKey.DELETE_RECORDS, {"topics": topics, "timeout_ms": timeout_ms})
    failure: MansioError | None = None
    for topic in response.topics:
        for entry in topic.partitions:
            partition = TopicPartition(topic.name, entry.partition_index)
            if entry.error_code:
                failure = _deletion_error(entry.error_code, partition, before[partition])
            else:
                found[partition] = entry.low_watermark
    if failure is not None:
        raise failure


def _deletion_error(code: int, partition: TopicPartition, before_offset: int) -> MansioError:
    """The typed error of a partition; the response carries no text."""
    name = f"{partition.topic}-{partition.partition}"
    if code == OffsetOutOfRange.kafka_code:
        return OffsetOutOfRange(f"{name}: offset {before_offset} is beyond its end")
    return error_for(code, f"{name}: {error_for(code).message}")
