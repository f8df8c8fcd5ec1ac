"""Topics that a pipeline writes to: looked up, and made if they are not there."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from mansio.errors import TopicAlreadyExists, UnknownTopicOrPartition
from mansio.net.retry import raise_for
from mansio.wire.api_versions import ApiKey

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mansio.net.metadata import TopicView
    from mansio.spark.sync_client import SyncClient

CREATE_TIMEOUT_MS: Final = 30_000
KEEP_FOR_EVER: Final = {"retention.ms": "-1", "retention.bytes": "-1"}
"""For records that come with old timestamps: an ordinary retention time would delete them minutes later."""


def find_topic(client: SyncClient, topic: str) -> TopicView:
    """Asked anew: what this process knows may be of a topic that was deleted since. `UnknownTopicOrPartition`."""
    client.cluster.mark_stale((topic,))
    return client.run(client.cluster.topic(topic))


def ensure_topic(
    client: SyncClient, topic: str, partitions: int, settings: Mapping[str, str] | None = None
) -> TopicView:
    """A topic as it is, or made with so many partitions and these settings. Raises what the broker says against it."""
    client.cluster.mark_stale((topic,))
    try:
        return client.run(client.cluster.topic(topic, wait_ms=0))
    except UnknownTopicOrPartition:
        configs = [{"name": name, "value": value} for name, value in (settings or {}).items()]
        wanted = {"name": topic, "num_partitions": partitions, "replication_factor": -1, "configs": configs}
        request = {"topics": [wanted], "timeout_ms": CREATE_TIMEOUT_MS, "validate_only": False}
        with suppress(
            TopicAlreadyExists
        ):  # somebody else made it just now; it is used as any other that is there
            client.run(
                client.cluster.request_controller(ApiKey.CREATE_TOPICS, request, check=_raise_create_error)
            )
        return find_topic(client, topic)


def _raise_create_error(answer: Any) -> None:
    for topic in answer.topics:
        raise_for(topic.error_code, topic.error_message)
