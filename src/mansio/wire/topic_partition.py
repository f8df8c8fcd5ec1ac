"""Identifiers of a partition: the topic, by name or by id, and the partition index."""

from __future__ import annotations

from typing import NamedTuple


class TopicPartition(NamedTuple):
    """Topic name and partition index (Kafka `TopicPartition`)."""

    topic: str
    partition: int


PartitionKey = tuple[str, int]
"""Topic name and partition index: a `TopicPartition`, or the plain tuple that is equal to it."""

TopicIdPartition = tuple[bytes, int]
"""The 16 bytes of a topic id, and the partition index (Kafka `TopicIdPartition`). A plain tuple: assignors create one
for each partition of a group."""
