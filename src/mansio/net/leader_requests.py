"""One question about many partitions, asked of their leaders at the same time.

Always true: a partition that was answered is not asked again; the call ends with an answer for each, or with an error.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, TypeVar

from mansio.errors import (
    ConnectionLost,
    FencedLeaderEpoch,
    LeaderNotAvailable,
    NotLeaderOrFollower,
    UnknownTopicOrPartition,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from mansio.net.cluster import Cluster
    from mansio.wire.topic_partition import TopicPartition

Question = TypeVar("Question")
Answer = TypeVar("Answer")

STALE_METADATA = (
    NotLeaderOrFollower,
    LeaderNotAvailable,
    UnknownTopicOrPartition,
    FencedLeaderEpoch,
    ConnectionLost,
)


async def request_leaders(
    cluster: Cluster,
    wanted: Mapping[TopicPartition, Question],
    ask: Callable[[int, Mapping[TopicPartition, Question], dict[TopicPartition, Answer]], Awaitable[None]],
) -> dict[TopicPartition, Answer]:
    """`ask(node id, its part of wanted, found)` puts answers into `found`, and raises for those that failed.

    Failures that may pass are tried again, as long as the cluster's retries last.
    """
    found: dict[TopicPartition, Answer] = {}

    async def attempt() -> None:
        missing = [partition for partition in wanted if partition not in found]
        try:
            grouped = await cluster.by_leader(missing)
            asked = [
                ask(node, {partition: wanted[partition] for partition in partitions}, found)
                for node, partitions in grouped.items()
            ]
            for outcome in await asyncio.gather(*asked, return_exceptions=True):
                if isinstance(outcome, BaseException):
                    raise outcome
            if any(partition not in found for partition in missing):
                raise UnknownTopicOrPartition("the broker left a partition out of its answer")
        except STALE_METADATA:
            cluster.mark_stale({partition.topic for partition in missing})
            raise

    await cluster.retry(attempt)
    return {partition: found[partition] for partition in wanted}
