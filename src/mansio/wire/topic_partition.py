"""Identifier of a partition: topic name and partition index."""

from __future__ import annotations

from typing import NamedTuple


class TopicPartition(NamedTuple):
    """Topic name and partition index (Kafka `TopicPartition`)."""

    topic: str
    partition: int
