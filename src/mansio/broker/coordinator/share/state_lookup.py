"""Where the state of each share partition is kept: by the leader of the partition of `__share_group_state` it lives in.

Only reads the metadata's view, so every broker answers for every share partition, whether or not it has a copy of the
topic. Which partition that is, Kafka's brokers and tools reckon the same way.
"""

from __future__ import annotations

from base64 import urlsafe_b64encode
from typing import TYPE_CHECKING, Final, Protocol

from mansio.broker.coordinator.group.group_store import java_string_hash
from mansio.state.share_partition.state_records import TOPIC

if TYPE_CHECKING:
    from mansio.metadata.image import MetadataImage
    from mansio.metadata.model import BrokerState
    from mansio.state.share_partition.types import ShareKey

_HASH_MASK: Final = 0x7FFFFFFF


def coordinator_key(key: ShareKey) -> str:
    """`group:topic id:partition`, the id as Kafka writes it: base64 for URLs, without padding."""
    topic_id = urlsafe_b64encode(key.topic_id).rstrip(b"=").decode()
    return f"{key.group}:{topic_id}:{key.partition}"


def index_of(text: str, partition_count: int) -> int:
    """The partition of the topic that a `coordinator_key` lives in."""
    return (java_string_hash(text) & _HASH_MASK) % partition_count


class StateLookup(Protocol):
    """What has to be known of the cluster."""

    def partition_count(self) -> int:
        """Of `__share_group_state`; 0 while it is not there."""

    def leader(self, index: int) -> BrokerState | None:
        """Who leads one of its partitions, if that broker is there."""


class ClusterStateLookup:
    """`StateLookup` of the metadata's view."""

    def __init__(self, state: MetadataImage) -> None:
        self._state = state

    def partition_count(self) -> int:
        topic = self._state.topics.get(TOPIC)
        return 0 if topic is None else len(topic.partitions)

    def leader(self, index: int) -> BrokerState | None:
        topic = self._state.topics.get(TOPIC)
        if topic is None or index >= len(topic.partitions):
            return None
        partition = topic.partitions[index]
        broker = self._state.brokers.get(partition.leader)
        return broker if broker is not None and partition.led_by(broker.node_id, broker.epoch) else None
