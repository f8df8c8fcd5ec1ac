"""Topics that a pipeline writes to: looked up, and made if they are not there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from mansio.errors import UnknownTopicOrPartition
from mansio.link.retry import raise_for
from mansio.wire.versions import ApiKey

if TYPE_CHECKING:
    from mansio.link.metadata import TopicView
    from mansio.spark.door import Door

CREATE_TIMEOUT_MS: Final = 30_000


def look_up(way: Door, topic: str) -> TopicView:
    """Asked anew: what this process knows may be of a topic that was deleted since. `UnknownTopicOrPartition`."""
    way.cluster.mark_stale((topic,))
    return way.run(way.cluster.topic(topic))


def ensure(way: Door, topic: str, partitions: int) -> None:
    """Create a topic if it is not there, with so many partitions. Raises what the broker says against it."""
    try:
        look_up(way, topic)
    except UnknownTopicOrPartition:
        wanted = {"name": topic, "num_partitions": partitions, "replication_factor": -1}
        asked = {"topics": [wanted], "timeout_ms": CREATE_TIMEOUT_MS, "validate_only": False}
        way.run(way.cluster.request_controller(ApiKey.CREATE_TOPICS, asked, check=_check_created))
        look_up(way, topic)


def _check_created(answer: Any) -> None:
    for topic in answer.topics:
        raise_for(topic.error_code, topic.error_message)
