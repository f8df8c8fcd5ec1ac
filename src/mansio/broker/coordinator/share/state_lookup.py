"""Lookup of the leader of the partition of `__share_group_state` that keeps the state of a share partition.

Uses the metadata image only, so each broker can do the lookup, whether or not it has a replica of the topic.
"""

from __future__ import annotations

from base64 import urlsafe_b64encode
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from mansio.metadata.model import BrokerState
    from mansio.state.share_partition.types import ShareKey


def coordinator_key(key: ShareKey) -> str:
    """Return `group:topic id:partition`, with the topic id in URL-safe base64 without padding, as Kafka writes it."""
    topic_id = urlsafe_b64encode(key.topic_id).rstrip(b"=").decode()
    return f"{key.group}:{topic_id}:{key.partition}"


class StateLookup(Protocol):
    """The metadata of the topic `__share_group_state` that a lookup needs."""

    def partition_count(self) -> int:
        """Return the number of partitions of the topic, 0 if it does not exist."""

    def leader(self, index: int) -> BrokerState | None:
        """Return the leader of a partition of the topic; None if it has no leader that is available."""
