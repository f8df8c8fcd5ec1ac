"""Routes: which broker leads a partition, and which one coordinates a group, a transactional id or a share partition.

A route reads the metadata image only, so every broker can answer, whether or not it has a replica of the partition.
"""

from __future__ import annotations

from base64 import urlsafe_b64encode
from typing import TYPE_CHECKING, Final, Protocol

from mansio.config.topic_names import OFFSETS_TOPIC
from mansio.errors import CoordinatorNotAvailable

if TYPE_CHECKING:
    from mansio.metadata.image import MetadataImage
    from mansio.metadata.model import BrokerState, PartitionState
    from mansio.state.share_partition.types import ShareKey

_UNSIGNED: Final = 0xFFFFFFFF
_POSITIVE: Final = 0x7FFFFFFF


def java_string_hash(text: str) -> int:
    """Return Java's `String.hashCode` of a text, a 32-bit hash of its UTF-16 code units, as an unsigned number."""
    value = 0
    units = text.encode("utf-16-be", "surrogatepass")
    for position in range(0, len(units), 2):
        value = (31 * value + (units[position] << 8 | units[position + 1])) & _UNSIGNED
    return value


def partition_for(key: str, partition_count: int) -> int:
    """Return the partition of an internal topic that stores a group id, a transactional id, or the coordinator key of a
    share partition, as Apache Kafka chooses it."""
    return (java_string_hash(key) & _POSITIVE) % partition_count


def share_partition_key(key: ShareKey) -> str:
    """Return the coordinator key `group:topic id:partition` of a share partition, with the topic id in URL-safe base64
    without padding, as Apache Kafka writes it."""
    topic_id = urlsafe_b64encode(key.topic_id).rstrip(b"=").decode()
    return f"{key.group}:{topic_id}:{key.partition}"


class InternalTopicLeaders(Protocol):
    """Leaders of the partitions of an internal topic."""

    def partition_count(self) -> int:
        """Return the number of partitions of the internal topic; 0 while it does not exist."""

    def leader(self, index: int) -> BrokerState | None:
        """Return the leader of a partition of the internal topic; None if there is none or it is offline."""


class CoordinatorLookup(InternalTopicLeaders, Protocol):
    """Cluster metadata that a coordinator needs."""

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
        return available_leader(self._state, topic.partitions[index])

    def leader_id(self, index: int) -> int:
        topic = self._state.topics.get(self._topic)
        return -1 if topic is None or index >= len(topic.partitions) else topic.partitions[index].leader

    def has_topic(self, topic: str) -> bool:
        return topic in self._state.topics

    def has_partition(self, topic: str, index: int) -> bool:
        found = self._state.topics.get(topic)
        return found is not None and 0 <= index < len(found.partitions)


def coordinator_of(key: str, leaders: InternalTopicLeaders) -> BrokerState:
    """Return the coordinator of a group id, a transactional id or the key of a share partition. `leaders`: those of the
    internal topic. Raises `CoordinatorNotAvailable` if there is none now."""
    count = leaders.partition_count()
    broker = leaders.leader(partition_for(key, count)) if count else None
    if broker is None:
        raise CoordinatorNotAvailable(f"{key!r} has no coordinator now: its partition has no leader")
    return broker


def coordinator_node_id(key: str, node_id: int, leaders: InternalTopicLeaders | None) -> int:
    """Return the node id of the coordinator of a key; see `coordinator_of`. `node_id`: this broker, which coordinates
    all keys if `leaders` is None."""
    return node_id if leaders is None else coordinator_of(key, leaders).node_id


def available_leader(state: MetadataImage, partition: PartitionState) -> BrokerState | None:
    """Return the broker that leads a partition in its current session; None if there is none."""
    broker = state.brokers.get(partition.leader)
    return broker if broker is not None and partition.is_led_by(broker.node_id, broker.epoch) else None


class PartitionLeaders(Protocol):
    """Leaders of partitions, according to the metadata."""

    def leader_id(self, topic: str, index: int) -> int | None:
        """Return the node id of the leader, -1 if there is none now, None if there is no such partition."""


class MetadataPartitionLeaders:
    """`PartitionLeaders` by the metadata image. `single_node_id`: id of the only broker, None in a cluster."""

    def __init__(self, state: MetadataImage, single_node_id: int | None = None) -> None:
        self._state = state
        self._single_node_id = single_node_id

    def leader_id(self, topic: str, index: int) -> int | None:
        found = self._state.topics.get(topic)
        if found is None or not 0 <= index < len(found.partitions):
            return None
        return found.partitions[index].leader if self._single_node_id is None else self._single_node_id
