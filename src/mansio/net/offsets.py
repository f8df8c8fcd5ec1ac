"""Requests about offsets of partitions: ListOffsets, OffsetFetch, OffsetCommit, DeleteRecords.

Used by the consumer, the admin client, the command line and Spark. `request_leaders` sends one request per leader in
parallel and retries only the partitions that failed.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from mansio.errors import (
    ConnectionLost,
    FencedLeaderEpoch,
    LeaderNotAvailable,
    NotLeaderOrFollower,
    OffsetOutOfRange,
    UnknownTopicOrPartition,
)
from mansio.net.cluster import Cluster, group_by_topic
from mansio.net.retry import client_error_for_code, raise_for_code, topic_error_for_code
from mansio.tracebacks import copied
from mansio.wire.api_versions import ApiKey
from mansio.wire.field_values import READ_UNCOMMITTED
from mansio.wire.topic_partition import TopicPartition

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping

    from mansio.errors import MansioError


PartitionRequest = TypeVar("PartitionRequest")
PartitionResult = TypeVar("PartitionResult")


STALE_METADATA_ERRORS = (
    NotLeaderOrFollower,
    LeaderNotAvailable,
    UnknownTopicOrPartition,
    FencedLeaderEpoch,
    ConnectionLost,
)
"""Errors after which cached metadata of the requested topics must be fetched again."""


class ListedOffset(NamedTuple):
    """Result of ListOffsets for one partition. `offset` is -1 if no record has a timestamp as requested; `timestamp_ms`
    is the record's timestamp, -1 if unknown."""

    offset: int
    timestamp_ms: int
    leader_epoch: int


class CommittedOffset(NamedTuple):
    """Committed offset of a group in one partition, with the metadata string of the commit. `leader_epoch` is that of
    the last processed record, -1 if unknown."""

    offset: int
    metadata: str = ""
    leader_epoch: int = -1


async def request_leaders(
    cluster: Cluster,
    requests: Mapping[TopicPartition, PartitionRequest],
    send: Callable[
        [int, Mapping[TopicPartition, PartitionRequest], dict[TopicPartition, PartitionResult]],
        Awaitable[None],
    ],
) -> dict[TopicPartition, PartitionResult]:
    """Send one request per partition leader in parallel, and return the results by partition.

    `send(node_id, requests, results)` sends the requests of the partitions that broker `node_id` leads, stores results
    in `results`, and raises an error if a partition failed. Retriable errors are retried for the cluster's retry
    timeout, only for the partitions without a result.
    """
    results: dict[TopicPartition, PartitionResult] = {}

    async def attempt() -> None:
        missing = [partition for partition in requests if partition not in results]
        try:
            grouped = await cluster.group_by_leader(missing)
            sends = [
                send(node, {partition: requests[partition] for partition in partitions}, results)
                for node, partitions in grouped.items()
            ]
            for outcome in await asyncio.gather(*sends, return_exceptions=True):
                if isinstance(outcome, BaseException):
                    raise copied(outcome)
            if any(partition not in results for partition in missing):
                raise UnknownTopicOrPartition("the response has no result for the partition")
        except STALE_METADATA_ERRORS:
            cluster.mark_stale({partition.topic for partition in missing})
            raise

    await cluster.retry(attempt)
    return {partition: results[partition] for partition in requests}


async def list_offsets(
    cluster: Cluster,
    timestamps: Mapping[TopicPartition, int],
    *,
    isolation_level: int = READ_UNCOMMITTED,
) -> dict[TopicPartition, ListedOffset]:
    """Return the offset of the requested timestamp in each partition of `timestamps`.

    A timestamp is `LATEST_TIMESTAMP`, `EARLIEST_TIMESTAMP` or `MAX_TIMESTAMP`, or a time in milliseconds since the Unix
    epoch, which requests the offset of the first record whose timestamp is equal or greater.
    """
    return await request_leaders(
        cluster, timestamps, partial(_list_offsets_of_node, cluster, isolation_level)
    )


async def _list_offsets_of_node(
    cluster: Cluster,
    isolation_level: int,
    node_id: int,
    timestamps: Mapping[TopicPartition, int],
    results: dict[TopicPartition, ListedOffset],
) -> None:
    topics = [
        {
            "name": topic,
            "partitions": [
                {
                    "partition_index": index,
                    "current_leader_epoch": -1,
                    "timestamp": timestamps[TopicPartition(topic, index)],
                }
                for index in indexes
            ],
        }
        for topic, indexes in group_by_topic(timestamps).items()
    ]
    connection = await cluster.connection(node_id)
    response = await connection.request(
        ApiKey.LIST_OFFSETS, {"replica_id": -1, "isolation_level": isolation_level, "topics": topics}
    )
    failure: MansioError | None = None
    for topic in response.topics:
        for entry in topic.partitions:
            if entry.error_code:
                failure = topic_error_for_code(entry.error_code, topic.name, "DESCRIBE")
            else:
                listed = ListedOffset(entry.offset, entry.timestamp, entry.leader_epoch)
                results[TopicPartition(topic.name, entry.partition_index)] = listed
    if failure is not None:
        raise copied(failure)


async def fetch_offsets(
    cluster: Cluster,
    group: str,
    partitions: Iterable[TopicPartition] | None = None,
    *,
    require_stable: bool = False,
) -> dict[TopicPartition, CommittedOffset]:
    """Return the committed offsets of a group in `partitions` (None: in all). Partitions without a committed offset are
    absent.

    With `require_stable`, the request is repeated until no transaction that is still open has committed an offset of
    these partitions; raises `UnstableOffsetCommit` after the cluster's retry timeout (KIP-447)."""
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
        raise_for_code(of_group.error_code)
        for topic in of_group.topics:
            for entry in topic.partitions:
                raise_for_code(entry.error_code)
                if entry.committed_offset >= 0:
                    found[TopicPartition(topic.name, entry.partition_index)] = CommittedOffset(
                        entry.committed_offset, entry.metadata or "", entry.committed_leader_epoch
                    )

    fields = {
        "group_id": group,
        "topics": topics,
        "groups": [{"group_id": group, "topics": topics}],
        "require_stable": require_stable,
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
    """Commit offsets of a group, as a member of it or, with the default arguments, for a group without members."""
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
                raise_for_code(entry.error_code)

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
    cluster: Cluster, before_offsets: Mapping[TopicPartition, int], *, timeout_ms: int
) -> dict[TopicPartition, int]:
    """Delete the records below the given offset of each partition (-1: below the high watermark; KIP-107), and return
    the new log start offsets.

    Retriable errors are retried; deleting again does no harm. Raises `OffsetOutOfRange`, `InvalidTopic` or
    `PolicyViolation`; an error of one partition does not prevent the deletion in others.
    """
    return await request_leaders(cluster, before_offsets, partial(_delete_on_node, cluster, timeout_ms))


async def _delete_on_node(
    cluster: Cluster,
    timeout_ms: int,
    node_id: int,
    before_offsets: Mapping[TopicPartition, int],
    results: dict[TopicPartition, int],
) -> None:
    topics = [
        {
            "name": topic,
            "partitions": [
                {"partition_index": index, "offset": before_offsets[TopicPartition(topic, index)]}
                for index in indexes
            ],
        }
        for topic, indexes in group_by_topic(before_offsets).items()
    ]
    connection = await cluster.connection(node_id)
    response = await connection.request(ApiKey.DELETE_RECORDS, {"topics": topics, "timeout_ms": timeout_ms})
    failure: MansioError | None = None
    for topic in response.topics:
        for entry in topic.partitions:
            partition = TopicPartition(topic.name, entry.partition_index)
            if entry.error_code:
                failure = _deletion_error(entry.error_code, partition, before_offsets[partition])
            else:
                results[partition] = entry.low_watermark
    if failure is not None:
        raise copied(failure)


def _deletion_error(code: int, partition: TopicPartition, before_offset: int) -> MansioError:
    """Return the typed error of a partition's error code; a DeleteRecords response has codes without messages."""
    name = f"{partition.topic}-{partition.partition}"
    if code == OffsetOutOfRange.kafka_code:
        return OffsetOutOfRange(f"{name}: offset {before_offset} is beyond its end")
    return client_error_for_code(code, f"{name}: {client_error_for_code(code).message}")
