"""What tests of Spark put into topics and find in them, through Mansio's own client."""

from __future__ import annotations

from typing import TYPE_CHECKING

import mansio
from mansio.client.types import OutgoingRecord
from support.markers import wait_for_markers_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mansio.client.types import Message


def create(bootstrap_servers: str, topic: str, partitions: int = 1, **config: str) -> str:
    """Create a topic and return its name; settings with `_` for `.`: `retention_ms="1000"`."""
    settings = {name.replace("_", "."): value for name, value in config.items()}
    with mansio.blocking.connect(bootstrap_servers) as client:
        client.admin.create_topic(topic, partitions=partitions, config=settings)
    return topic


def publish(
    bootstrap_servers: str,
    topic: str,
    records: Iterable[tuple[bytes | None, bytes | None]],
    partition: int | None = None,
    timestamp_ms: int | None = None,
) -> None:
    """Publish (key, value) pairs; they are acknowledged when this returns."""
    with mansio.blocking.connect(bootstrap_servers) as client:
        client.publish_many(
            topic,
            [
                OutgoingRecord(value, key=key, partition=partition, timestamp_ms=timestamp_ms)
                for key, value in records
            ],
        )


def contents(bootstrap_servers: str, topic: str) -> list[Message]:
    """All committed records of a topic, by partition and offset. Waits for the markers of decided transactions."""
    with mansio.blocking.connect(bootstrap_servers) as client:
        wait_for_markers_of(client)
        with client.consume(topic, to_end=True) as consumer:
            return sorted(consumer, key=lambda message: (message.partition, message.offset))
