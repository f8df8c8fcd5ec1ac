"""Produce requests: encoding the batches of a request, and decoding the results in its response.

Most requests carry one batch, and most responses report success: `SinglePartitionProduceCodec` encodes and decodes
these; the general codec encodes and decodes the others.

Invariants:
* `on_end` is called once per request, with the results or with an error, unless the sender was closed before.
* Encoding does not wait for anything, so requests are written in the order in which they were created.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mansio.client.producer.accumulator import NO_IDENTITY, RequestEncoding
from mansio.errors import MansioError
from mansio.net.metadata import NO_TOPIC_ID
from mansio.wire.api_versions import ApiKey
from mansio.wire.apis import produce
from mansio.wire.apis.produce import SINGLE_PARTITION_VERSION_MIN, SinglePartitionProduceCodec
from mansio.wire.batch.record_batch import build_batch, build_value_only_batch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mansio.client.producer.accumulator import Batch
    from mansio.client.producer.transaction_manager import TransactionManager
    from mansio.net.cluster import Cluster
    from mansio.net.connection import BrokerConnection
    from mansio.ports import Buffer
    from mansio.wire.batch.compression import Codec

    Outcomes = Sequence[tuple[Batch, produce.PartitionResult | None]]

TOPIC_NAME_VERSION_MAX = 12
"""Highest version of Produce that identifies topics by name; later versions use topic ids (KIP-516)."""
ADDING_VERSION_MIN = 12
"""From this version on a transactional batch adds its partition to the transaction (KIP-890)."""
PRODUCE_CHANNEL = "produce"
"""Channel of the connections that send Produce requests."""
TEMPLATES_MAX = 1_000
"""Maximum number of cached request templates, one per topic; a full cache is cleared."""


class PendingRequest:
    """Produce request that waits for its response: a `net.connection.Waiter` that needs no future and no task.

    When the request ends, `on_end` is called with the broker's result for each batch (None if the response has no
    result for it), or with an error. `selected_s`: time of the event loop at which the request was selected to be sent,
    where its timeout begins.
    """

    __slots__ = ("_is_over", "_on_end", "batches", "encoding", "node", "selected_s")

    def __init__(
        self,
        node: int,
        batches: list[Batch],
        selected_s: float,
        on_end: Callable[[PendingRequest, Outcomes, MansioError | None], None],
    ) -> None:
        self.node = node
        self.batches = batches
        self.selected_s = selected_s
        self._on_end = on_end
        self._is_over = False
        self.encoding: RequestEncoding | None = None
        """How the request is encoded; None until that is decided."""

    def ignore_response(self) -> None:
        """End the request; its response is ignored and `on_end` is not called."""
        self._is_over = True

    def done(self) -> bool:
        """Whether the request has ended, so that its response is ignored."""
        return self._is_over

    cancelled = done

    def set_result(self, frame: bytes, /) -> None:
        """Decode the response frame and call `on_end`."""
        self._is_over = True
        encoding = self.encoding
        if encoding is not None and encoding.template is not None:
            batch = self.batches[0]
            result = encoding.template.decode_success(batch.queue.partition, frame)
            if result is not None:
                self._on_end(self, ((batch, result),), None)
                return
        try:
            outcomes = self._decode_outcomes(frame)
        except MansioError as error:
            self._on_end(self, (), error)
            return
        self._on_end(self, outcomes, None)

    def set_exception(self, exception: MansioError, /) -> None:
        """Call `on_end` with the error that ended the request without a response."""
        self._is_over = True
        self._on_end(self, (), exception)

    def _decode_outcomes(self, frame: bytes) -> Outcomes:
        assert self.encoding is not None  # a request is encoded before it is sent
        _, _, version, _, topic_names = self.encoding
        expected = {(batch.queue.topic, batch.queue.partition): batch for batch in self.batches}
        outcomes: list[tuple[Batch, produce.PartitionResult | None]] = []
        for name, topic_id, results in produce.decode_response(version, frame).topics:
            topic = name or topic_names.get(bytes(topic_id or b""), "")
            for result in results:
                answered = expected.pop((topic, result.index), None)
                if answered is not None:
                    outcomes.append((answered, result))
        outcomes += [(batch, None) for batch in expected.values()]
        return outcomes


class RequestWriter:
    """Encodes the Produce requests of one producer and writes them to connections."""

    def __init__(
        self, cluster: Cluster, *, acks: int, codec: Codec, transaction: TransactionManager | None = None
    ) -> None:
        self._cluster = cluster
        self._transaction = transaction
        self._transactional_id = None if transaction is None else transaction.transactional_id
        self._acks = acks
        self._codec = codec
        self._templates: dict[tuple[int, str, bytes, float], SinglePartitionProduceCodec] = {}

    def existing_connection(self, pending: PendingRequest) -> BrokerConnection | None:
        """Return the open connection to the broker of a request, or None. If it is the connection of the partition's
        last request, and the metadata of the topic is the same, the request gets the encoding of that request."""
        queue = pending.batches[0].queue
        last = queue.last_encoding
        if (
            last is not None
            and len(pending.batches) == 1
            and not last.connection.closed
            and last.topic_view is self._cluster.cached_topic(queue.topic)
        ):
            pending.encoding = last
            return last.connection
        return self._cluster.existing_connection(pending.node, PRODUCE_CHANNEL)

    def send(self, connection: BrokerConnection, pending: PendingRequest) -> None:
        """Encode a request and write it to the connection; `pending` receives the response. With acks=0 there is no
        response. Raises `ConnectionLost`, `UnsupportedVersion`."""
        encoding = pending.encoding
        if encoding is None:
            encoding = self._choose_encoding(connection, pending)
        correlation_id = connection.next_correlation_id()
        buffers: Sequence[Buffer]
        if encoding.template is not None:
            batch = pending.batches[0]
            buffers = (encoding.template.encode(correlation_id, batch.queue.partition, self._encode(batch)),)
        else:
            buffers = self._encode_many(connection, encoding, correlation_id, pending.batches)
        if self._acks == 0:
            connection.send_one_way(buffers)
            return
        connection.begin_exchange(buffers, correlation_id, pending, now=pending.selected_s)

    def _choose_encoding(self, connection: BrokerConnection, pending: PendingRequest) -> RequestEncoding:
        """Choose how a request is encoded. The next request of the partition uses the same encoding if possible."""
        ids = {batch.queue.topic: self._topic_id(batch.queue.topic) for batch in pending.batches}
        names = {topic_id: topic for topic, topic_id in ids.items()}
        highest = TOPIC_NAME_VERSION_MAX if NO_TOPIC_ID in names else None
        if self._transaction is not None and not self._transaction.bumps_epoch:
            highest = ADDING_VERSION_MIN - 1
        version = connection.version_for(ApiKey.PRODUCE, highest=highest)
        queue = pending.batches[0].queue
        view = self._cluster.cached_topic(queue.topic)
        template: SinglePartitionProduceCodec | None = None
        if len(pending.batches) == 1 and version >= SINGLE_PARTITION_VERSION_MIN:
            template = self._cached_template(connection, version, queue.topic, ids[queue.topic])
        encoding = pending.encoding = RequestEncoding(connection, view, version, template, names)
        if template is not None:
            queue.last_encoding = encoding
        return encoding

    def _cached_template(
        self, connection: BrokerConnection, version: int, topic: str, topic_id: bytes
    ) -> SinglePartitionProduceCodec:
        options = connection.options
        key = (version, topic, topic_id, options.request_timeout_ms)
        template = self._templates.get(key)
        if template is None:
            if len(self._templates) >= TEMPLATES_MAX:
                self._templates.clear()
            timeout_ms = int(options.request_timeout_ms)
            template = self._templates[key] = SinglePartitionProduceCodec(
                version, options.client_id, self._acks, timeout_ms, topic, topic_id, self._transactional_id
            )
        return template

    def _encode_many(
        self,
        connection: BrokerConnection,
        encoding: RequestEncoding,
        correlation_id: int,
        batches: Sequence[Batch],
    ) -> list[Buffer]:
        topics: dict[str, list[tuple[int, bytes]]] = {}
        for batch in batches:
            topics.setdefault(batch.queue.topic, []).append((batch.queue.partition, self._encode(batch)))
        return produce.encode_request(
            encoding.version,
            correlation_id,
            connection.options.client_id,
            self._acks,
            int(connection.options.request_timeout_ms),
            [(topic, self._topic_id(topic), partitions) for topic, partitions in topics.items()],
            self._transactional_id,
        )

    def _encode(self, batch: Batch) -> bytes:
        identity = batch.queue.identity
        producer_id = producer_epoch = base_sequence = -1
        if identity is not None and identity is not NO_IDENTITY:
            producer_id, producer_epoch = identity.producer_id, identity.first_epoch + batch.producer_epoch
            base_sequence = -1 if batch.base_sequence is None else batch.base_sequence
        if batch.keys_and_headers:
            return build_batch(
                batch.record_tuples(),
                codec=self._codec,
                producer_id=producer_id,
                producer_epoch=producer_epoch,
                base_sequence=base_sequence,
                transactional=self._transactional_id is not None,
            )
        return build_value_only_batch(
            batch.timestamps_ms,
            batch.values,  # type: ignore[arg-type]  # records without a value are in keys_and_headers
            codec=self._codec,
            producer_id=producer_id,
            producer_epoch=producer_epoch,
            base_sequence=base_sequence,
            transactional=self._transactional_id is not None,
        )

    def _topic_id(self, topic: str) -> bytes:
        view = self._cluster.cached_topic(topic)
        return NO_TOPIC_ID if view is None else view.topic_id
