"""Client-side metadata of a cluster: brokers, topics, partition leaders.

Immutable views of Metadata responses.

Invariants:
* A partition's position in its topic's tuple is its index, without gaps.
* `leader` is -1 for a partition without a leader.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from mansio.errors import LeaderNotAvailable, UnknownTopicOrPartition

NO_TOPIC_ID = bytes(16)


class Node(NamedTuple):
    """Address of one broker."""

    node_id: int
    host: str
    port: int
    rack: str | None = None


class PartitionView(NamedTuple):
    """One partition with its leader and replicas (node ids)."""

    index: int  # type: ignore[assignment]  # hides tuple.index, which is not used here
    leader: int
    leader_epoch: int
    replicas: tuple[int, ...]
    in_sync_replicas: tuple[int, ...]


class TopicView(NamedTuple):
    """One topic. `topic_id` is 16 bytes, all zero if the broker has no topic ids."""

    name: str
    topic_id: bytes
    partitions: tuple[PartitionView, ...]
    is_internal: bool = False

    def leader(self, partition: int) -> int:
        """Node id of a partition's leader. Raises `UnknownTopicOrPartition`, `LeaderNotAvailable`."""
        if not 0 <= partition < len(self.partitions):
            raise UnknownTopicOrPartition(f"topic {self.name} has no partition {partition}")
        leader = self.partitions[partition].leader
        if leader < 0:
            raise LeaderNotAvailable(f"partition {partition} of topic {self.name} has no leader")
        return leader


def topic_view(response: Any) -> TopicView:
    """The view of one topic of a Metadata response."""
    found = sorted(response.partitions, key=lambda partition: int(partition.partition_index))
    partitions = tuple(
        PartitionView(
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
    return TopicView(response.name, _id_bytes(response.topic_id), partitions, response.is_internal)


def _id_bytes(topic_id: Any) -> bytes:
    """A topic id as 16 bytes, from bytes, UUID or None."""
    return NO_TOPIC_ID if topic_id is None else getattr(topic_id, "bytes", topic_id)
