"""One fetch request to one broker: what was asked, as bytes, and the answer by partition.

Owns the way from partitions to bytes and back, which `fetcher` need not know. Always true: an answer is read by what
was asked for: the offsets of that moment, the version and the topics' names of that request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from mansio.net.cluster import group_by_topic
from mansio.net.metadata import NO_TOPIC_ID
from mansio.net.retry import error_for
from mansio.wire.api_versions import ApiKey
from mansio.wire.apis import fetch
from mansio.wire.topic_partition import TopicPartition

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mansio.client.consumer.partition_state import PartitionState
    from mansio.net.cluster import Cluster
    from mansio.net.connection import Connection

HIGHEST_VERSION_WITH_NAMES = 12


class FetchLimits(NamedTuple):
    """How much a request asks for (bytes), and how long the broker may wait for it (ms)."""

    wait_ms: int
    bytes_min: int
    request_bytes: int
    partition_bytes: int
    isolation_level: int


class FetchRequest:
    """What one broker is asked for at a time."""

    __slots__ = ("_asked", "_names", "_version", "may_wait", "node", "states")

    def __init__(self, node: int, states: Sequence[PartitionState], *, may_wait: bool) -> None:
        self.node = node
        self.states = states
        self.may_wait = may_wait
        """Whether the broker may wait for more to come."""
        self._asked: dict[TopicPartition, tuple[PartitionState, int]] = {}
        self._names: dict[bytes, str] = {}
        self._version = 0

    def encode(
        self, cluster: Cluster, connection: Connection, correlation_id: int, limits: FetchLimits
    ) -> bytes:
        """The whole request, from where each partition is now. `UnsupportedVersion`."""
        self._asked = {state.partition: (state, state.fetch_offset) for state in self.states}
        topics = []
        for topic, indexes in group_by_topic(self._asked).items():
            view = cluster.cached_topic(topic)
            topic_id = NO_TOPIC_ID if view is None else view.topic_id
            self._names[topic_id] = topic
            wanted = [
                fetch.FetchPartition(
                    index, -1, self._asked[TopicPartition(topic, index)][1], -1, -1, limits.partition_bytes
                )
                for index in indexes
            ]
            topics.append((topic, topic_id, wanted))
        highest = HIGHEST_VERSION_WITH_NAMES if NO_TOPIC_ID in self._names else None
        self._version = connection.version_for(ApiKey.FETCH, highest=highest)
        return fetch.encode_request(
            self._version,
            correlation_id,
            connection.options.client_id,
            topics,
            max_wait_ms=limits.wait_ms,
            min_bytes=limits.bytes_min,
            max_bytes=limits.request_bytes,
            isolation_level=limits.isolation_level,
        )

    def read(self, frame: bytes) -> Iterator[tuple[PartitionState, int, fetch.FetchedPartition]]:
        """(partition, the offset it was asked from, its part of the answer). Raises the error of the whole answer, or
        `WireError`."""
        response = fetch.decode_response(self._version, frame)
        if response.error_code:
            raise error_for(response.error_code)
        for name, topic_id, partitions in response.topics:
            topic = name or self._names[bytes(topic_id or b"")]
            for answer in partitions:
                yield *self._asked[TopicPartition(topic, answer.index)], answer
