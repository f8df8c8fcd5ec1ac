"""Which offsets: of a partition's ends, of a moment, and of a group.

The questions about offsets that the consumer, the admin client, the command line and Spark all ask. Each goes to
many brokers at once, and asks again only for the partitions that failed in a way that may pass.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from mansio.net.cluster import Cluster, group_by_topic
from mansio.net.leader_requests import request_leaders
from mansio.net.retry import error_for, raise_for
from mansio.wire.api_versions import ApiKey
from mansio.wire.topic_partition import TopicPartition

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from mansio.errors import MansioError

LATEST: Final = -1
"""Asks for the offset after the last readable record."""
EARLIEST: Final = -2
"""Asks for the first offset that is still there."""
MAX_TIMESTAMP: Final = -3
"""Asks for the record with the greatest timestamp (KIP-734)."""

READ_UNCOMMITTED: Final = 0
READ_COMMITTED: Final = 1


class ListedOffset(NamedTuple):
    """An answer of ListOffsets. `offset` is -1 where no record is that young; `timestamp_ms` -1 where unknown."""

    offset: int
    timestamp_ms: int
    leader_epoch: int


class CommittedOffset(NamedTuple):
    """What a group committed: the next offset to read, and the note beside it."""

    offset: int
    metadata: str = ""
    leader_epoch: int = -1


async def list_offsets(
    cluster: Cluster,
    wanted: Mapping[TopicPartition, int],
    *,
    isolation_level: int = READ_UNCOMMITTED,
) -> dict[TopicPartition, ListedOffset]:
    """For each partition the offset of `LATEST`, `EARLIEST`, `MAX_TIMESTAMP`, or of the first record whose timestamp
    is at least that many milliseconds since the epoch."""
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
    answer = await connection.request(
        ApiKey.LIST_OFFSETS, {"replica_id": -1, "isolation_level": isolation_level, "topics": topics}
    )
    failure: MansioError | None = None
    for topic in answer.topics:
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
    """What a group has committed, for these partitions or for all it knows. Partitions without a commit are absent."""
    topics = None
    if partitions is not None:
        topics = [
            {"name": topic, "partition_indexes": list(indexes)}
            for topic, indexes in group_by_topic(partitions).items()
        ]
    found: dict[TopicPartition, CommittedOffset] = {}

    def check(answer: Any) -> None:
        found.clear()
        of_group = answer.groups[0] if answer.groups else answer
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
    """Store a group's next offsets. Without a member (generation -1) the group must have none."""
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

    def check(answer: Any) -> None:
        for topic in answer.topics:
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
