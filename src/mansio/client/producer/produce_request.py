"""One produce request in flight: encoding of its batches, and the results of its response.

Most requests carry one batch and most responses report success: those use `SinglePartitionProduce`, the others the
general codec.

Invariants:
* The sender is called back once per request, with its response or its error, unless the sender was closed before.
* Encoding awaits nothing, so requests are written in the order in which they were created.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from mansio.client.producer.accumulator import NO_IDENTITY, Route
from mansio.errors import MansioError
from mansio.net.metadata import NO_TOPIC_ID
from mansio.wire.api_versions import ApiKey
from mansio.wire.apis import produce
from mansio.wire.apis.produce import SINGLE_PARTITION_VERSION_MIN, SinglePartitionProduce
from mansio.wire.batch.record_batch import build_batch, build_values_batch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mansio.client.producer.accumulator import Batch
    from mansio.net.cluster import Cluster
    from mansio.net.connection import Connection
    from mansio.ports import Buffer
    from mansio.wire.batch.compression import Codec

    Outcomes = Sequence[tuple[Batch, produce.PartitionResult | None]]

HIGHEST_VERSION_WITH_NAMES = 12
TEMPLATES_MAX = 1_000
"""Bound on the cached request templates, one per topic; a full cache is cleared."""


class PendingRequest:
    """A `net.connection.Waiter` for the response, without a future or a task.

    `on_end` is called with the broker's result for each batch (None if the response lacks one), or with the error.
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
        """Set what was sent, for decoding the response. `names`: topic id -> topic."""
        self._version, self._names, self._single = version, names, single

    def give_up(self) -> None:
        """Ignore the response."""
        self._is_over = True

    def done(self) -> bool:
        """Whether the request has ended."""
        return self._is_over

    cancelled = done

    def set_result(self, frame: bytes, /) -> None:
        """Handle the response frame."""
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
        """Handle the end of the request without a response."""
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
    """Encodes and writes the requests of one producer."""

    def __init__(self, cluster: Cluster, *, acks: int, codec: Codec) -> None:
        self._cluster = cluster
        self._acks = acks
        self._codec = codec
        self._templates: dict[tuple[int, str, bytes, float], SinglePartitionProduce] = {}

    def send(self, connection: Connection, pending: PendingRequest) -> None:
        """Write a request. With acks=0 there is no response, and `pending` is not called back. Raises
        `ConnectionLost`, `UnsupportedVersion`."""
        batches = pending.batches
        if len(batches) == 1 and self._send_like_last(connection, pending, batches[0]):
            return
        ids = {batch.queue.topic: self._topic_id(batch.queue.topic) for batch in batches}
        highest = HIGHEST_VERSION_WITH_NAMES if NO_TOPIC_ID in ids.values() else None
        version = connection.version_for(ApiKey.PRODUCE, highest=highest)
        correlation_id = connection.next_correlation_id()
        single: SinglePartitionProduce | None = None
        buffers: Sequence[Buffer]
        if len(batches) == 1 and version >= SINGLE_PARTITION_VERSION_MIN:
            (batch,) = batches
            single = self._template(connection, version, batch.queue.topic, ids[batch.queue.topic])
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

    def _send_like_last(self, connection: Connection, pending: PendingRequest, batch: Batch) -> bool:
        """Fast path of `send` for a queue whose last request had the same encoding. False, with no effect, if it does
        not apply."""
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

    def _template(
        self, connection: Connection, version: int, topic: str, topic_id: bytes
    ) -> SinglePartitionProduce:
        options = connection.options
        key = (version, topic, topic_id, options.request_timeout_ms)
        template = self._templates.get(key)
        if template is None:
            if len(self._templates) >= TEMPLATES_MAX:
                self._templates.clear()
            timeout_ms = int(options.request_timeout_ms)
            template = self._templates[key] = SinglePartitionProduce(
                version, options.client_id, self._acks, timeout_ms, topic, topic_id
            )
        return template

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
        identity = batch.queue.identity
        producer_id = producer_epoch = base_sequence = -1
        if identity is not None and identity is not NO_IDENTITY:
            producer_id, producer_epoch = identity.producer_id, identity.first_epoch + batch.producer_epoch
            base_sequence = -1 if batch.base_sequence is None else batch.base_sequence
        if batch.keys_and_headers:
            return build_batch(
                batch.rows(),
                codec=self._codec,
                producer_id=producer_id,
                producer_epoch=producer_epoch,
                base_sequence=base_sequence,
            )
        return build_values_batch(
            batch.timestamps_ms,
            cast("list[bytes]", batch.values),  # records without a value are in keys_and_headers
            codec=self._codec,
            producer_id=producer_id,
            producer_epoch=producer_epoch,
            base_sequence=base_sequence,
        )

    def _topic_id(self, topic: str) -> bytes:
        view = self._cluster.cached_topic(topic)
        return NO_TOPIC_ID if view is None else view.topic_id
