"""Topics that a pipeline writes to: looked up, and made if they are not there."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from mansio.errors import TopicAlreadyExists, UnknownTopicOrPartition
from mansio.link.retry import raise_for
from mansio.wire.versions import ApiKey

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mansio.link.metadata import TopicView
    from mansio.spark.door import Door

CREATE_TIMEOUT_MS: Final = 30_000
KEEP_FOR_EVER: Final = {"retention.ms": "-1", "retention.bytes": "-1"}
"""For records that come with old timestamps: an ordinary retention time would delete them minutes later."""


def look_up(way: Door, topic: str) -> TopicView:
    """Asked anew: what this process knows may be of a topic that was deleted since. `UnknownTopicOrPartition`."""
    way.cluster.mark_stale((topic,))
    return way.run(way.cluster.topic(topic))


def ensure(way: Door, topic: str, partitions: int, settings: Mapping[str, str] | None = None) -> TopicView:
    """A topic as it is, or made with so many partitions and these settings. Raises what the broker says against it."""
    way.cluster.mark_stale((topic,))
    try:
        return way.run(way.cluster.topic(topic, wait_ms=0))
    except UnknownTopicOrPartition:
        configs = [{"name": name, "value": value} for name, value in (settings or {}).items()]
        wanted = {"name": topic, "num_partitions": partitions, "replication_factor": -1, "configs": configs}
        asked = {"topics": [wanted], "timeout_ms": CREATE_TIMEOUT_MS, "validate_only": False}
        with suppress(
            TopicAlreadyExists
        ):  # somebody else made it just now; it is used as any other that is there
            way.run(way.cluster.request_controller(ApiKey.CREATE_TOPICS, asked, check=_check_created))
        return look_up(way, topic)


def _check_created(answer: Any) -> None:
    for topic in answer.topics:
        raise_for(topic.error_code, topic.error_message)
