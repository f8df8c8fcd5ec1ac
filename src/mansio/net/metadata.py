"""Client-side metadata of a cluster: brokers, topics, partition leaders.

The tuples hold the fields of Metadata responses that clients use.

Invariants:
* `TopicMetadata.partitions` is in order of the partition index, starts at 0 and has no gaps.
* `leader` is -1 for a partition without a leader.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from mansio.errors import LeaderNotAvailable, UnknownTopicOrPartition

NO_TOPIC_ID = bytes(16)
"""Topic id of a topic on a broker that does not support topic ids."""


class Node(NamedTuple):
    """Id and address of one broker. `rack` is None if the broker has no rack."""

    node_id: int
    host: str
    port: int
    rack: str | None = None


class PartitionMetadata(NamedTuple):
    """Index, leader and replicas of one partition; brokers are given by node id."""

    index: int  # type: ignore[assignment]  # hides tuple.index, which is not used here
    leader: int
    leader_epoch: int
    replicas: tuple[int, ...]
    in_sync_replicas: tuple[int, ...]


class TopicMetadata(NamedTuple):
    """Name, id and partitions of one topic. `topic_id` is 16 bytes, all zero if the broker does not support topic
    ids."""

    name: str
    topic_id: bytes
    partitions: tuple[PartitionMetadata, ...]
    is_internal: bool = False

    def leader(self, partition: int) -> int:
        """Node id of a partition's leader. Raises `UnknownTopicOrPartition`, or `LeaderNotAvailable` if the partition
        has no leader."""
        if not 0 <= partition < len(self.partitions):
            raise UnknownTopicOrPartition(f"topic {self.name} has no partition {partition}")
        leader = self.partitions[partition].leader
        if leader < 0:
            raise LeaderNotAvailable(f"partition {partition} of topic {self.name} has no leader")
        return leader


def topic_metadata(response: Any) -> TopicMetadata:
    """Return the metadata of one topic of a Metadata response. Raises `LeaderNotAvailable` if partitions are
    missing."""
    found = sorted(response.partitions, key=lambda partition: int(partition.partition_index))
    partitions = tuple(
        PartitionMetadata(
            partition.partition_index,
            partition.leader_id,
            partition.leader_epoch,
            tuple(partition.replica_nodes),
            tuple(partition.isr_nodes),
        )
        for partition in found
    )
    if any(partition.index != position for position, partition in enumerate(partitions)):
        raise LeaderNotAvailable(f"the metadata of topic {response.name} lacks partitions")
    return TopicMetadata(response.name, _id_bytes(response.topic_id), partitions, response.is_internal)


def _id_bytes(topic_id: Any) -> bytes:
    """Return the 16 bytes of a topic id given as bytes, UUID or None (no topic id: all zero)."""
    return NO_TOPIC_ID if topic_id is None else getattr(topic_id, "bytes", topic_id)
