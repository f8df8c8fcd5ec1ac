"""Where in a cluster each group is coordinated: by the leader of the partition of `__consumer_offsets` it lives in.

Only reads the metadata's view, so every broker answers for every group, whether or not it has a copy of the topic.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from mansio.broker.coordinator.group.settings import OFFSETS_TOPIC
from mansio.broker.coordinator.view import CoordinatorPartition

if TYPE_CHECKING:
    from mansio.metadata.image import MetadataImage
    from mansio.metadata.model import BrokerState


class OffsetsTopicPartition(CoordinatorPartition, Protocol):
    """A partition of the topic, with its role: `mansio.broker.partition.partition.Partition` has it."""

    @property
    def index(self) -> int: ...

    @property
    def is_leader(self) -> bool: ...

    @property
    def closed(self) -> bool: ...

    @property
    def leader_epoch(self) -> int: ...


class CoordinatorLookup(Protocol):
    """What a coordinator has to know of its cluster."""

    def partition_count(self) -> int:
        """Of `__consumer_offsets`; 0 while it is not there."""

    def leader(self, index: int) -> BrokerState | None:
        """Who leads one of its partitions, if that broker is there."""

    def leader_id(self, index: int) -> int:
        """Who leads one of its partitions as Metadata answers it, -1 for nobody: also a broker that was restarted since
        it was elected, and cannot lead before it is elected again."""

    def has_topic(self, topic: str) -> bool:
        """Whether there is a topic."""

    def has_partition(self, topic: str, index: int) -> bool:
        """Whether there is a partition, on whichever broker."""


class ClusterCoordinatorLookup:
    """`CoordinatorLookup` of the metadata's view."""

    def __init__(self, state: MetadataImage) -> None:
        self._state = state

    def partition_count(self) -> int:
        topic = self._state.topics.get(OFFSETS_TOPIC)
        return 0 if topic is None else len(topic.partitions)

    def leader(self, index: int) -> BrokerState | None:
        topic = self._state.topics.get(OFFSETS_TOPIC)
        if topic is None or index >= len(topic.partitions):
            return None
        partition = topic.partitions[index]
        broker = self._state.brokers.get(partition.leader)
        return broker if broker is not None and partition.led_by(broker.node_id, broker.epoch) else None

    def leader_id(self, index: int) -> int:
        topic = self._state.topics.get(OFFSETS_TOPIC)
        return -1 if topic is None or index >= len(topic.partitions) else topic.partitions[index].leader

    def has_topic(self, topic: str) -> bool:
        return topic in self._state.topics

    def has_partition(self, topic: str, index: int) -> bool:
        found = self._state.topics.get(topic)
        return found is not None and 0 <= index < len(found.partitions)
