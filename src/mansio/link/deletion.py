"""Deleting records: asks the leaders of partitions to begin their logs later (KIP-107).

Always true: a partition that has answered is not asked again; the call ends with an answer for each, or with an error.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from mansio.errors import UnknownTopicOrPartition
from mansio.wire.topic_partition import TopicPartition
from mansio.wire.versions import ApiKey

from .cluster import Cluster, group_by_topic
from .offsets import STALE_METADATA
from .retry import error_for

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mansio.errors import MansioError


async def delete_records(
    cluster: Cluster, before: Mapping[TopicPartition, int], *, timeout_ms: int
) -> dict[TopicPartition, int]:
    """Delete what lies below an offset in each partition (-1: all that is committed); where each begins now.

    Asked again, it answers the same, so failures that may pass are tried again. `OffsetOutOfRange`, `InvalidTopic`,
    `PolicyViolation`; those of some partitions do not keep the records of others.
    """
    found: dict[TopicPartition, int] = {}

    async def attempt() -> None:
        missing = [partition for partition in before if partition not in found]
        try:
            grouped = await cluster.by_leader(missing)
            asked = [
                _delete_on_node(cluster, node, {p: before[p] for p in partitions}, timeout_ms, found)
                for node, partitions in grouped.items()
            ]
            for outcome in await asyncio.gather(*asked, return_exceptions=True):
                if isinstance(outcome, BaseException):
                    raise outcome
        except STALE_METADATA:
            cluster.mark_stale({partition.topic for partition in missing})
            raise

    await cluster.retry(attempt)
    return {partition: found[partition] for partition in before}


async def _delete_on_node(
    cluster: Cluster,
    node_id: int,
    before: Mapping[TopicPartition, int],
    timeout_ms: int,
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
                message = error_for(entry.error_code).message
                failure = error_for(entry.error_code, f"{topic.name}-{entry.partition_index}: {message}")
            else:
                found[partition] = entry.low_watermark
    if failure is not None:
        raise failure
    if any(partition not in found for partition in before):
        raise UnknownTopicOrPartition("the broker left a partition out of its answer")
