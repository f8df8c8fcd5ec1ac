"""Lookup of the partition of `__share_group_state` that keeps the state of a share partition, and of its leader.

Uses the metadata image only, so each broker can do the lookup, whether or not it has a replica of the topic. The
partition is computed as in Apache Kafka.
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
    """Return `group:topic id:partition`, with the topic id in URL-safe base64 without padding, as Kafka writes it."""
    topic_id = urlsafe_b64encode(key.topic_id).rstrip(b"=").decode()
    return f"{key.group}:{topic_id}:{key.partition}"


def partition_for(key_text: str, partition_count: int) -> int:
    """Return the partition of `__share_group_state` for a share partition; `key_text` is its `coordinator_key`."""
    return (java_string_hash(key_text) & _HASH_MASK) % partition_count


class StateLookup(Protocol):
    """The metadata of the topic `__share_group_state` that a lookup needs."""

    def partition_count(self) -> int:
        """Return the number of partitions of the topic, 0 if it does not exist."""

    def leader(self, index: int) -> BrokerState | None:
        """Return the leader of a partition of the topic; None if it has no leader that is available."""
