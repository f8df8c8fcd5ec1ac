"""One produce request under way: what was asked, and what the answer says about each batch.

Owns the way from batches to bytes and back, which `sender` need not know. Most requests carry one batch and most
answers say "stored": those take the short way through `wire.apis.produce_single`, the others through
`wire.apis.produce`.

Always true: the sender hears of every request once, when its answer is there or known not to come, unless the sender
was closed before; nothing is awaited on the way, so requests leave in the order in which they were made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, cast

from mansio.errors import MansioError
from mansio.net.metadata import NO_TOPIC_ID
from mansio.wire.api_versions import ApiKey
from mansio.wire.apis import produce
from mansio.wire.apis.produce_single import LOWEST_VERSION, SinglePartitionProduce
from mansio.wire.batch.record_batch import build_batch, build_values_batch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mansio.client.producer.accumulator import Batch
    from mansio.net.cluster import Cluster
    from mansio.net.connection import Connection
    from mansio.net.metadata import TopicView
    from mansio.ports import Buffer
    from mansio.wire.batch.compression import Codec

    Outcomes = Sequence[tuple[Batch, produce.PartitionResult | None]]

HIGHEST_VERSION_WITH_NAMES = 12
PATTERNS_KEPT_MAX = 1_000
"""Topics whose request patterns are remembered; when there are more, all are forgotten and learned again."""


class ProducerIdentity(NamedTuple):
    """Who an idempotent producer is, to the brokers."""

    producer_id: int
    first_epoch: int


NO_IDENTITY = ProducerIdentity(-1, -1)


class Route(NamedTuple):
    """How the last request of a queue was made: as long as connection and metadata are these, the next one is too."""

    connection: Connection
    view: TopicView | None
    version: int
    single: SinglePartitionProduce
    names: dict[bytes, str]


class PendingRequest:
    """Waits for an answer as a `net.connection.Waiter`, without a future or a task.

    `on_end` gets what the broker said about each batch, None where it left one out; or the error that came instead.
    """

    __slots__ = ("_is_over", "_names", "_on_end", "_single", "_version", "batches", "node")

    def __init__(
        self,
        node: int,
        batches: list[Batch],
        on_end: Callable[[PendingRequest, Outcomes, MansioError | None], None],
    ) -> None:
        self.node = node
        self.batches = batches
        self._on_end = on_end
        self._is_over = False
        self._single: SinglePartitionProduce | None = None
        self._version = 0
        self._names: dict[bytes, str] = {}

    def expect(self, version: int, names: dict[bytes, str], single: SinglePartitionProduce | None) -> None:
        """What was sent, to read the answer by. `names`: topic id -> topic."""
        self._version, self._names, self._single = version, names, single

    def give_up(self) -> None:
        """Whatever comes, nobody wants to hear of it any more."""
        self._is_over = True

    def done(self) -> bool:
        """Whether it is over."""
        return self._is_over

    cancelled = done

    def set_result(self, frame: bytes, /) -> None:
        """The answer."""
        self._is_over = True
        if self._single is not None:
            batch = self.batches[0]
            stored = self._single.decode_stored(batch.queue.partition, frame)
            if stored is not None:
                result = produce.PartitionResult(batch.queue.partition, 0, *stored)
                self._on_end(self, ((batch, result),), None)
                return
        try:
            outcomes = self._read(frame)
        except MansioError as error:
            self._on_end(self, (), error)
            return
        self._on_end(self, outcomes, None)

    def set_exception(self, exception: MansioError, /) -> None:
        """There will be no answer."""
        self._is_over = True
        self._on_end(self, (), exception)

    def _read(self, frame: bytes) -> Outcomes:
        expected = {(batch.queue.topic, batch.queue.partition): batch for batch in self.batches}
        outcomes: list[tuple[Batch, produce.PartitionResult | None]] = []
        for name, topic_id, results in produce.decode_response(self._version, frame).topics:
            topic = name or self._names.get(bytes(topic_id or b""), "")
            for result in results:
                answered = expected.pop((topic, result.index), None)
                if answered is not None:
                    outcomes.append((answered, result))
        outcomes += [(batch, None) for batch in expected.values()]
        return outcomes


class RequestWriter:
    """Writes the requests of one producer."""

    def __init__(self, cluster: Cluster, *, acks: int, codec: Codec) -> None:
        self._cluster = cluster
        self._acks = acks
        self._codec = codec
        self._patterns: dict[tuple[int, str, bytes, float], SinglePartitionProduce] = {}

    def send(self, connection: Connection, pending: PendingRequest) -> None:
        """Give a request its place in the order of sending. With acks=0 nothing is waited for, and `pending` is not
        told. `ConnectionLost`, `UnsupportedVersion`."""
        batches = pending.batches
        if len(batches) == 1 and self._send_again(connection, pending, batches[0]):
            return
        ids = {batch.queue.topic: self._topic_id(batch.queue.topic) for batch in batches}
        highest = HIGHEST_VERSION_WITH_NAMES if NO_TOPIC_ID in ids.values() else None
        version = connection.version_for(ApiKey.PRODUCE, highest=highest)
        correlation_id = connection.next_correlation_id()
        single: SinglePartitionProduce | None = None
        buffers: Sequence[Buffer]
        if len(batches) == 1 and version >= LOWEST_VERSION:
            (batch,) = batches
            single = self._pattern(connection, version, batch.queue.topic, ids[batch.queue.topic])
            buffers = (single.encode(correlation_id, batch.queue.partition, self._encode(batch)),)
            names = {ids[batch.queue.topic]: batch.queue.topic}
            view = self._cluster.cached_topic(batch.queue.topic)
            batch.queue.route = Route(connection, view, version, single, names)
        else:
            buffers = self._encode_many(connection, version, correlation_id, batches, ids)
        if self._acks == 0:
            connection.send_one_way(buffers)
            return
        pending.expect(version, {topic_id: topic for topic, topic_id in ids.items()}, single)
        connection.begin(buffers, correlation_id, pending)

    def _send_again(self, connection: Connection, pending: PendingRequest, batch: Batch) -> bool:
        """`send` for a queue whose last request went the same way. False if it did not, and nothing was done."""
        queue = batch.queue
        route = queue.route
        if (
            route is None
            or route.connection is not connection
            or route.view is not self._cluster.cached_topic(queue.topic)
            or self._acks == 0
        ):
            return False
        correlation_id = connection.next_correlation_id()
        framed = route.single.encode(correlation_id, queue.partition, self._encode(batch))
        pending.expect(route.version, route.names, route.single)
        connection.begin((framed,), correlation_id, pending)
        return True

    def _pattern(
        self, connection: Connection, version: int, topic: str, topic_id: bytes
    ) -> SinglePartitionProduce:
        options = connection.options
        key = (version, topic, topic_id, options.request_timeout_ms)
        pattern = self._patterns.get(key)
        if pattern is None:
            if len(self._patterns) >= PATTERNS_KEPT_MAX:
                self._patterns.clear()
            timeout_ms = int(options.request_timeout_ms)
            pattern = self._patterns[key] = SinglePartitionProduce(
                version, options.client_id, self._acks, timeout_ms, topic, topic_id
            )
        return pattern

    def _encode_many(
        self,
        connection: Connection,
        version: int,
        correlation_id: int,
        batches: Sequence[Batch],
        ids: dict[str, bytes],
    ) -> list[Buffer]:
        topics: dict[str, list[tuple[int, bytes]]] = {}
        for batch in batches:
            topics.setdefault(batch.queue.topic, []).append((batch.queue.partition, self._encode(batch)))
        return produce.encode_request(
            version,
            correlation_id,
            connection.options.client_id,
            self._acks,
            int(connection.options.request_timeout_ms),
            [(topic, ids[topic], partitions) for topic, partitions in topics.items()],
        )

    def _encode(self, batch: Batch) -> bytes:
        who = batch.queue.identity
        producer_id = producer_epoch = base_sequence = -1
        if who is not None and who is not NO_IDENTITY:
            producer_id, producer_epoch = who.producer_id, who.first_epoch + batch.producer_epoch
            base_sequence = -1 if batch.base_sequence is None else batch.base_sequence
        if batch.rest:
            return build_batch(
                batch.rows(),
                codec=self._codec,
                producer_id=producer_id,
                producer_epoch=producer_epoch,
                base_sequence=base_sequence,
            )
        return build_values_batch(
            batch.stamps,
            cast("list[bytes]", batch.values),  # those without a value are among the rest
            codec=self._codec,
            producer_id=producer_id,
            producer_epoch=producer_epoch,
            base_sequence=base_sequence,
        )

    def _topic_id(self, topic: str) -> bytes:
        view = self._cluster.cached_topic(topic)
        return NO_TOPIC_ID if view is None else view.topic_id
