"""Coordinator lookup: the leader of the partition of an internal topic that stores a group or a share partition.

The lookup reads only the metadata image, so every broker can answer for every group, whether or not it has a replica of
the topic.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from mansio.broker.coordinator.view import CoordinatorPartition
from mansio.config.topic_names import OFFSETS_TOPIC

if TYPE_CHECKING:
    from mansio.metadata.image import MetadataImage
    from mansio.metadata.model import BrokerState


class CoordinatorReplica(CoordinatorPartition, Protocol):
    """This broker's replica of a partition of an internal topic, with its role; implemented by
    `mansio.broker.partition.partition.Partition`."""

    @property
    def index(self) -> int: ...

    @property
    def is_leader(self) -> bool: ...

    @property
    def closed(self) -> bool: ...

    @property
    def leader_epoch(self) -> int: ...


class CoordinatorLookup(Protocol):
    """Cluster metadata that a coordinator needs."""

    def partition_count(self) -> int:
        """Return the number of partitions of the internal topic; 0 while it does not exist."""

    def leader(self, index: int) -> BrokerState | None:
        """Return the leader of a partition of the internal topic; None if there is none or it is offline."""

    def leader_id(self, index: int) -> int:
        """Return the node id of a partition's leader as in Metadata responses, -1 for none. Also returns a broker that
        was restarted after its election and cannot lead before it is elected again."""

    def has_topic(self, topic: str) -> bool:
        """Whether a topic exists."""

    def has_partition(self, topic: str, index: int) -> bool:
        """Whether a partition of a topic exists, on any broker."""


class ClusterCoordinatorLookup:
    """`CoordinatorLookup` for one internal topic, by the metadata image."""

    def __init__(self, state: MetadataImage, topic: str = OFFSETS_TOPIC) -> None:
        self._state = state
        self._topic = topic

    def partition_count(self) -> int:
        topic = self._state.topics.get(self._topic)
        return 0 if topic is None else len(topic.partitions)

    def leader(self, index: int) -> BrokerState | None:
        topic = self._state.topics.get(self._topic)
        if topic is None or index >= len(topic.partitions):
            return None
        partition = topic.partitions[index]
        broker = self._state.brokers.get(partition.leader)
        return broker if broker is not None and partition.is_led_by(broker.node_id, broker.epoch) else None

    def leader_id(self, index: int) -> int:
        topic = self._state.topics.get(self._topic)
        return -1 if topic is None or index >= len(topic.partitions) else topic.partitions[index].leader

    def has_topic(self, topic: str) -> bool:
        return topic in self._state.topics

    def has_partition(self, topic: str, index: int) -> bool:
        found = self._state.topics.get(topic)
        return found is not None and 0 <= index < len(found.partitions)
