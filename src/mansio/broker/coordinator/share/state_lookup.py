"""Lookup of the partition of `__share_group_state` that keeps the state of a share partition, and of its leader.

Uses the metadata image only, so every broker answers for every share partition, whether or not it has a replica of the
topic. The partition is computed as in Apache Kafka.
"""

from __future__ import annotations

from base64 import urlsafe_b64encode
from typing import TYPE_CHECKING, Final, Protocol

from mansio.broker.coordinator.group.group_store import java_string_hash

if TYPE_CHECKING:
    from mansio.metadata.model import BrokerState
    from mansio.state.share_partition.types import ShareKey

_HASH_MASK: Final = 0x7FFFFFFF


def coordinator_key(key: ShareKey) -> str:
    """`group:topic id:partition`, with the id in Kafka's form: URL-safe base64 without padding."""
    topic_id = urlsafe_b64encode(key.topic_id).rstrip(b"=").decode()
    return f"{key.group}:{topic_id}:{key.partition}"


def index_of(text: str, partition_count: int) -> int:
    """The partition of the topic for a `coordinator_key`."""
    return (java_string_hash(text) & _HASH_MASK) % partition_count


class StateLookup(Protocol):
    """Metadata needed for the lookup."""

    def partition_count(self) -> int:
        """Of `__share_group_state`; 0 if it does not exist."""

    def leader(self, index: int) -> BrokerState | None:
        """The leader of a partition, if that broker is available."""
