"""What a client knows about a cluster: brokers, topics, who leads what.

Immutable views made from Metadata answers. Always true: the partitions of a topic stand at their own index, with no
gap; `leader` is -1 where a partition has none.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from mansio.errors import LeaderNotAvailable, UnknownTopicOrPartition

NO_TOPIC_ID = bytes(16)


class Node(NamedTuple):
    """One broker's address."""

    node_id: int
    host: str
    port: int
    rack: str | None = None


class PartitionView(NamedTuple):
    """One partition and who holds it (node ids)."""

    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody needs here
    leader: int
    leader_epoch: int
    replicas: tuple[int, ...]
    in_sync_replicas: tuple[int, ...]


class TopicView(NamedTuple):
    """One topic. `topic_id` is 16 bytes, all zero where the broker has no ids."""

    name: str
    topic_id: bytes
    partitions: tuple[PartitionView, ...]
    is_internal: bool = False

    def leader(self, partition: int) -> int:
        """The node that leads a partition. `UnknownTopicOrPartition`, `LeaderNotAvailable`."""
        if not 0 <= partition < len(self.partitions):
            raise UnknownTopicOrPartition(f"topic {self.name} has no partition {partition}")
        leader = self.partitions[partition].leader
        if leader < 0:
            raise LeaderNotAvailable(f"partition {partition} of topic {self.name} has no leader now")
        return leader


def topic_view(answer: Any) -> TopicView:
    """One topic of a Metadata answer."""
    found = sorted(answer.partitions, key=lambda partition: int(partition.partition_index))
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
        raise LeaderNotAvailable(f"the broker's view of topic {answer.name} has gaps")
    return TopicView(answer.name, _id_bytes(answer.topic_id), partitions, answer.is_internal)


def _id_bytes(topic_id: Any) -> bytes:
    """A topic id as 16 bytes, whichever way it was decoded."""
    return NO_TOPIC_ID if topic_id is None else getattr(topic_id, "bytes", topic_id)
