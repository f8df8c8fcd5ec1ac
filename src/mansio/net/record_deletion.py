"""Deleting records: asks the leaders of partitions to begin their logs later (KIP-107)."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from mansio.errors import OffsetOutOfRange
from mansio.net.cluster import group_by_topic
from mansio.net.leader_requests import request_leaders
from mansio.net.retry import error_for
from mansio.wire.api_versions import ApiKey
from mansio.wire.topic_partition import TopicPartition

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mansio.errors import MansioError
    from mansio.net.cluster import Cluster


async def delete_records(
    cluster: Cluster, before: Mapping[TopicPartition, int], *, timeout_ms: int
) -> dict[TopicPartition, int]:
    """Delete what lies below an offset in each partition (-1: all that is committed); where each begins now.

    Asked again, it answers the same, so failures that may pass are tried again. `OffsetOutOfRange`, `InvalidTopic`,
    `PolicyViolation`; those of some partitions do not keep the records of others.
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
    answer = await connection.request(ApiKey.DELETE_RECORDS, {"topics": topics, "timeout_ms": timeout_ms})
    failure: MansioError | None = None
    for topic in answer.topics:
        for entry in topic.partitions:
            partition = TopicPartition(topic.name, entry.partition_index)
            if entry.error_code:
                failure = _failure(entry.error_code, partition, before[partition])
            else:
                found[partition] = entry.low_watermark
    if failure is not None:
        raise failure


def _failure(code: int, partition: TopicPartition, before_offset: int) -> MansioError:
    """The answer carries no text."""
    name = f"{partition.topic}-{partition.partition}"
    if code == OffsetOutOfRange.kafka_code:
        return OffsetOutOfRange(f"{name}: offset {before_offset} is beyond its end")
    return error_for(code, f"{name}: {error_for(code).message}")
