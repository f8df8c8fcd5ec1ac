"""Producer of one Spark task: encodes columns to record batches and sends them to the partition leaders.

A task has one idempotent producer (InitProducerId, sequence numbers by partition), with or without a transaction. It
sends in rounds: a round is the next batch of every partition. The task encodes the next round while the brokers write
the current one. The transaction begins with the first batch, which adds its partition (KIP-890).

Invariants:
* A partition has at most one batch in flight, so retries keep the order.
* A batch is resent unchanged, with its sequence number, so that the broker appends it once.
* No request is in flight when `send` returns: no code could process its response while the task waits for rows.
* The transaction is prepared when all batches are acknowledged.
* Memory is bounded by one round in flight and the batches that are queued for the next round.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mansio.errors import MansioError, RequestTimedOut, UnsupportedVersion
from mansio.logs import fields
from mansio.net.cluster import check_new_producer_id
from mansio.net.offsets import STALE_METADATA_ERRORS
from mansio.net.retry import client_error_for_code
from mansio.spark.arrow.encode import EncodedBatch, ProducerSequences, encode_batches
from mansio.spark.sink.sink_transaction import NEEDS_MANSIO, DirectTransaction, SinkTransaction
from mansio.tracebacks import copied
from mansio.wire.api_versions import ApiKey
from mansio.wire.apis import produce
from mansio.wire.batch.compression import Codec
from mansio.wire.field_values import ACKS_ALL
from mansio.wire.topic_partition import TopicPartition

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import pyarrow as pa

    from mansio.ports import Buffer
    from mansio.spark.options import SinkOptions
    from mansio.spark.sync_client import SyncClient

    Batches = dict[TopicPartition, EncodedBatch]
    Results = Mapping[TopicPartition, produce.PartitionResult]

PRODUCE_CHANNEL = "produce spark"
DELIVERY_TIMEOUT_MS = 120_000
"""Time for which a round is retried."""
PRODUCE_TIMEOUT_MS = 30_000
ROUND_BYTES = 8 << 20
"""Size of the queued batches at which the next round is sent."""
PRODUCE_VERSION_WITH_TOPIC_NAMES_MAX = 12
PRODUCE_VERSION_THAT_ADDS_PARTITIONS = 12
"""Version from which a batch adds its partition to the transaction (KIP-890)."""
DUPLICATE_SEQUENCE_NUMBER_CODE = 46


class TaskSender:
    """The producer of one task: call `send` for each Arrow batch, then `finish`, or `abort` if the task fails."""

    def __init__(
        self,
        sync_client: SyncClient,
        options: SinkOptions,
        *,
        delivery_timeout_ms: float = DELIVERY_TIMEOUT_MS,
        transaction: SinkTransaction | DirectTransaction | None = None,
        on_appended: Callable[[TopicPartition, int, int], None] | None = None,
    ) -> None:
        """`transaction`: the one in which the task writes; needs acks=all. `on_appended` is called with partition,
        first offset and number of records of each acknowledged batch, in order for each partition; the offset is -1 if
        the broker did not return it."""
        self._on_appended = on_appended
        self._transaction = transaction
        self._client = sync_client
        self._acks = options.acks
        self._codec = Codec[options.compression.upper()]
        self._batch_bytes = options.batch_bytes
        self._delivery_timeout_ms = delivery_timeout_ms
        self._identity: tuple[int, int] | None = None
        self._counts: dict[str, int] = {}
        """Number of partitions of each topic. It is constant for the task, so that a key stays in its partition."""
        self._producers: dict[str, ProducerSequences] = {}
        self._queued: dict[TopicPartition, deque[EncodedBatch]] = {}
        self._queued_bytes = 0
        self._in_flight: asyncio.Task[None] | None = None
        self._written: dict[TopicPartition, WrittenRange] = {}

    def send(self, topic: str, rows: pa.RecordBatch) -> None:
        """Write these rows and wait until all are acknowledged. See `encode_batches` for the columns.

        Raises the brokers' errors; after the delivery timeout also those of the connection.
        """
        count = self._counts.get(topic) or self._partition_count(topic)
        for batch in encode_batches(
            rows,
            partition_count=count,
            bytes_max=self._batch_bytes,
            codec=self._codec,
            producer=self._producer(topic),
        ):
            self._queued.setdefault(TopicPartition(topic, batch.partition), deque()).append(batch)
            self._queued_bytes += len(batch.data)
            if self._queued_bytes >= ROUND_BYTES:
                self._send_round()
        while self._queued:
            self._send_round()
        self._await_in_flight()

    def finish(self) -> TaskReport:
        """Prepare the transaction and return what the task has written. Call `finish` after the last `send`. Raises the
        brokers' errors.
        """
        if not self._written:
            return EMPTY_TASK_REPORT
        producer_id, epoch = self._identity or (-1, -1)
        ranges = tuple(self._written[one] for one in sorted(self._written))
        if not isinstance(self._transaction, SinkTransaction):
            return TaskReport(producer_id, epoch, ranges)
        prepared = self._transaction.prepare()
        return TaskReport(producer_id, epoch, ranges, prepared.transactional_id)

    def commit(self) -> None:
        """Commit the `DirectTransaction` with everything that was sent. The next `send` begins another one."""
        assert isinstance(self._transaction, DirectTransaction)
        if self._identity is not None:
            self._transaction.commit()
            self._identity = None
            self._producers.clear()

    def abort(self) -> None:
        """Cancel the requests in flight, and abort the transaction. Without one, the brokers may have stored the
        batches.
        """
        self._queued.clear()
        if self._in_flight is not None:
            task, self._in_flight = self._in_flight, None
            task.cancel()
            self._client.run(_wait_until_done(task))
        if self._transaction is not None:
            self._transaction.abort()

    def _partition_count(self, topic: str) -> int:
        """Return the number of partitions of a topic, from fresh metadata: the topic may have been recreated since the
        client cached its metadata.
        """
        cluster = self._client.cluster
        cluster.mark_stale((topic,))
        count = self._counts[topic] = len(self._client.run(cluster.topic(topic)).partitions)
        return count

    # -- the producer --------

    def _producer(self, topic: str) -> ProducerSequences | None:
        """Return the sequence numbers for a topic; None without acks=all. With acks=1 a new leader may lack an
        acknowledged batch, and would reject the following sequence numbers.
        """
        if self._acks != ACKS_ALL:
            return None
        transaction = self._transaction
        if self._identity is None and transaction is not None:
            begun = transaction.begin()
            self._identity = begun.producer_id, begun.producer_epoch
        elif self._identity is None:
            self._identity = self._client.run(self._init_producer_id())
        sequences = ProducerSequences(*self._identity, is_transactional=transaction is not None)
        return self._producers.setdefault(topic, sequences)

    async def _init_producer_id(self) -> tuple[int, int]:
        request = {
            "transactional_id": None,
            "transaction_timeout_ms": 60_000,
            "producer_id": -1,
            "producer_epoch": -1,
        }
        response = await self._client.cluster.request(
            ApiKey.INIT_PRODUCER_ID, request, check=check_new_producer_id
        )
        return response.producer_id, response.producer_epoch

    # -- rounds --------

    def _send_round(self) -> None:
        """Wait for the previous round, then send the next batch of every partition."""
        self._await_in_flight()
        batches = {partition: queue.popleft() for partition, queue in self._queued.items()}
        self._queued = {partition: queue for partition, queue in self._queued.items() if queue}
        self._queued_bytes -= sum(len(batch.data) for batch in batches.values())
        self._in_flight = self._client.begin(self._deliver(batches))

    def _await_in_flight(self) -> None:
        if self._in_flight is not None:
            task, self._in_flight = self._in_flight, None
            self._client.wait(task)

    async def _deliver(self, unacknowledged: Batches) -> None:
        """Send batches, with retries, until all are acknowledged."""
        cluster = self._client.cluster

        async def attempt() -> None:
            try:
                by_leader = await cluster.group_by_leader(unacknowledged)
                requests = [
                    self._request(node, {partition: unacknowledged[partition] for partition in partitions})
                    for node, partitions in by_leader.items()
                ]
                self._process_responses(
                    unacknowledged, await asyncio.gather(*requests, return_exceptions=True)
                )
            except STALE_METADATA_ERRORS:
                cluster.mark_stale({partition.topic for partition in unacknowledged})
                raise

        await cluster.retry(attempt, timeout_ms=self._delivery_timeout_ms)

    async def _request(self, node: int, batches: Batches) -> Results:
        connection = await self._client.cluster.connection(node, PRODUCE_CHANNEL)
        version = connection.version_for(ApiKey.PRODUCE, highest=PRODUCE_VERSION_WITH_TOPIC_NAMES_MAX)
        transactional_id = None
        if self._transaction is not None:
            if version < PRODUCE_VERSION_THAT_ADDS_PARTITIONS:
                raise UnsupportedVersion(NEEDS_MANSIO)
            producer = self._transaction.producer
            transactional_id = None if producer is None else producer.transactional_id
        correlation_id = connection.next_correlation_id()
        topics: dict[str, list[tuple[int, Buffer | None]]] = {}
        for (topic, index), batch in batches.items():
            topics.setdefault(topic, []).append((index, batch.data))
        buffers = produce.encode_request(
            version,
            correlation_id,
            connection.options.client_id,
            self._acks,
            PRODUCE_TIMEOUT_MS,
            [(topic, None, partitions) for topic, partitions in topics.items()],
            transactional_id,
        )
        response = produce.decode_response(version, await connection.exchange(buffers, correlation_id))
        return {
            TopicPartition(topic or "", result.index): result
            for topic, _, results in response.topics
            for result in results
        }

    # -- responses --------

    def _process_responses(
        self, unacknowledged: Batches, responses: Sequence[Results | BaseException]
    ) -> None:
        """Remove the acknowledged batches from `unacknowledged`. Raises an error if a batch is left: a permanent error
        has precedence over one that can be retried.
        """
        failures: list[MansioError] = []
        for response in responses:
            if isinstance(response, MansioError):
                failures.append(response)
            elif isinstance(response, BaseException):
                raise copied(response)
            else:
                for partition, result in response.items():
                    failures += self._record_result(unacknowledged, partition, result)
        if unacknowledged and not failures:
            failures.append(RequestTimedOut("the broker's response lacks a partition"))
        if failures:
            raise next((one for one in failures if not one.retriable), failures[0])

    def _record_result(
        self, unacknowledged: Batches, partition: TopicPartition, result: produce.PartitionResult
    ) -> list[MansioError]:
        if result.error_code not in (0, DUPLICATE_SEQUENCE_NUMBER_CODE):
            failure = client_error_for_code(result.error_code)
            message = result.error_message or failure.message
            return [type(failure)(f"topic {partition.topic}, partition {partition.partition}: {message}")]
        batch = unacknowledged.pop(partition, None)
        if batch is not None:
            before = self._written.get(partition)
            known = result.base_offset >= 0
            last = result.base_offset + batch.rows - 1 if known else -1
            first, rows = (result.base_offset, 0) if before is None else (before.first_offset, before.rows)
            self._written[partition] = WrittenRange(*partition, first, last, rows + batch.rows)
            if self._on_appended is not None:
                self._on_appended(partition, result.base_offset, batch.rows)
        return []


async def _wait_until_done(task: asyncio.Task[None]) -> None:
    await asyncio.wait((task,))


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WrittenRange:
    """Offsets that one task has written in one partition. `rows` is the number of its records; between them may be
    records of other producers. An offset is -1 if the broker did not return it, because it recognized a repeated batch.
    """

    topic: str
    partition: int
    first_offset: int
    last_offset: int
    rows: int


@dataclass(frozen=True, slots=True)
class TaskReport:
    """Result of one task attempt whose records are all acknowledged. `producer_id` is -1 without idempotence, and if
    nothing was written. `transactional_id`: that of the prepared transaction, empty without one.
    """

    producer_id: int
    producer_epoch: int
    ranges: tuple[WrittenRange, ...]
    transactional_id: str = ""

    @property
    def rows(self) -> int:
        return sum(written.rows for written in self.ranges)


EMPTY_TASK_REPORT = TaskReport(-1, -1, ())


class WriteLogger:
    """Logs the result of a batch on the driver."""

    def commit(self, query_id: str, batch_id: int, reports: Sequence[TaskReport]) -> None:
        """Log a batch of which all tasks have ended."""
        logger.debug(
            "sink_batch_written",
            extra=fields(
                query=query_id, batch=batch_id, tasks=len(reports), rows=sum(one.rows for one in reports)
            ),
        )

    def abort(self, query_id: str, batch_id: int, reports: Sequence[TaskReport]) -> None:
        """Warn if a batch that failed has written records without transactions: they remain, and a later attempt writes
        them again.
        """
        rows = sum(one.rows for one in reports if not one.transactional_id)
        if rows:
            logger.warning(
                "sink_batch_failed_after_writes",
                extra=fields(query=query_id, batch=batch_id, tasks=len(reports), rows=rows),
            )
