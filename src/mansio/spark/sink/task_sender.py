"""Sends what one Spark task writes: columns into record batches, those to the leaders of their partitions.

Owns one idempotent producer for the life of one task (InitProducerId, sequence numbers for each partition) and the
requests under way. A round takes the next batch of every partition. It is put on the wire and its answers are looked at
when the next round is ready, so the brokers write while the task encodes.

Always true: a partition has one batch under way, so order survives every retry without further care; a batch is sent
again as it was, with its sequence number, so that the broker takes it once; when `send` returns nothing is under way,
because nobody looks after it while the task waits for its next rows; memory is a round and what waits for the next.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mansio.errors import MansioError, RequestTimedOut
from mansio.logs import fields
from mansio.net.cluster import check_top_level
from mansio.net.offsets import STALE_METADATA
from mansio.net.retry import error_for
from mansio.spark.arrow.encode import EncodedBatch, ProducerSequences, encode_batches
from mansio.wire.api_versions import ApiKey
from mansio.wire.apis import produce
from mansio.wire.batch.compression import Codec
from mansio.wire.topic_partition import TopicPartition

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import pyarrow as pa

    from mansio.ports import Buffer
    from mansio.spark.options import SinkOptions
    from mansio.spark.sync_client import SyncClient

    Batches = dict[TopicPartition, EncodedBatch]
    Results = Mapping[TopicPartition, produce.PartitionResult]

ACKS_ALL = -1
CHANNEL = "produce spark"
DELIVERY_TIMEOUT_MS = 120_000
BROKER_TIMEOUT_MS = 30_000
QUEUED_BYTES_MAX = 8 << 20
"""So much is encoded before a round leaves."""
HIGHEST_VERSION_WITH_NAMES = 12
DUPLICATE_SEQUENCE_NUMBER = 46


class TaskSender:
    """The producer of one task: `send` as often as need be, then `finish`; `abort` when the task fails."""

    def __init__(
        self,
        sync_client: SyncClient,
        options: SinkOptions,
        *,
        delivery_timeout_ms: float = DELIVERY_TIMEOUT_MS,
    ) -> None:
        self._client = sync_client
        self._acks = options.acks
        self._codec = Codec[options.compression.upper()]
        self._batch_bytes = options.batch_bytes
        self._delivery_timeout_ms = delivery_timeout_ms
        self._identity: tuple[int, int] | None = None
        self._counts: dict[str, int] = {}
        """How many partitions each topic has: the same for the whole task, so that a key stays where it is."""
        self._producers: dict[str, ProducerSequences] = {}
        self._queued: dict[TopicPartition, deque[EncodedBatch]] = {}
        self._queued_bytes = 0
        self._in_flight: asyncio.Task[None] | None = None
        self._written: dict[TopicPartition, WrittenRange] = {}

    def send(self, topic: str, rows: pa.RecordBatch) -> None:
        """Write these rows (see `encode_batches` for the columns); they are acknowledged when this returns.

        Raises what the brokers said, or what came instead of an answer for longer than the delivery timeout.
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
            if self._queued_bytes >= QUEUED_BYTES_MAX:
                self._send_round()
        while self._queued:
            self._send_round()
        self._await_in_flight()

    def finish(self) -> TaskReport:
        """What was written where."""
        if not self._written:
            return NOTHING_WRITTEN
        producer_id, epoch = self._identity or (-1, -1)
        return TaskReport(producer_id, epoch, tuple(self._written[one] for one in sorted(self._written)))

    def abort(self) -> None:
        """Let go of what is under way; it may be stored or not."""
        self._queued.clear()
        if self._in_flight is not None:
            task, self._in_flight = self._in_flight, None
            task.cancel()
            self._client.run(_finished(task))

    def _partition_count(self, topic: str) -> int:
        """Asked anew by every task: the door is older than it, and the topic may have been made anew since."""
        cluster = self._client.cluster
        cluster.mark_stale((topic,))
        count = self._counts[topic] = len(self._client.run(cluster.topic(topic)).partitions)
        return count

    # -- the producer --------

    def _producer(self, topic: str) -> ProducerSequences | None:
        """The numbers this task gives to batches of a topic; none where not all brokers have to acknowledge, because a
        batch that only the leader had would leave a gap in them."""
        if self._acks != ACKS_ALL:
            return None
        if self._identity is None:
            self._identity = self._client.run(self._init_producer_id())
        return self._producers.setdefault(topic, ProducerSequences(*self._identity))

    async def _init_producer_id(self) -> tuple[int, int]:
        request = {
            "transactional_id": None,
            "transaction_timeout_ms": 60_000,
            "producer_id": -1,
            "producer_epoch": -1,
        }
        response = await self._client.cluster.request(ApiKey.INIT_PRODUCER_ID, request, check=check_top_level)
        return response.producer_id, response.producer_epoch

    # -- rounds --------

    def _send_round(self) -> None:
        """Put the next batch of every partition on the wire, when the round before is through."""
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
        """Send batches, again where that may help, until all are stored."""
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
            except STALE_METADATA:
                cluster.mark_stale({partition.topic for partition in unacknowledged})
                raise

        await cluster.retry(attempt, timeout_ms=self._delivery_timeout_ms)

    async def _request(self, node: int, batches: Batches) -> Results:
        connection = await self._client.cluster.connection(node, CHANNEL)
        version = connection.version_for(ApiKey.PRODUCE, highest=HIGHEST_VERSION_WITH_NAMES)
        correlation_id = connection.next_correlation_id()
        topics: dict[str, list[tuple[int, Buffer | None]]] = {}
        for (topic, index), batch in batches.items():
            topics.setdefault(topic, []).append((index, batch.data))
        buffers = produce.encode_request(
            version,
            correlation_id,
            connection.options.client_id,
            self._acks,
            BROKER_TIMEOUT_MS,
            [(topic, None, partitions) for topic, partitions in topics.items()],
        )
        response = produce.decode_response(version, await connection.exchange(buffers, correlation_id))
        return {
            TopicPartition(topic or "", result.index): result
            for topic, _, results in response.topics
            for result in results
        }

    # -- answers --------

    def _process_responses(
        self, unacknowledged: Batches, responses: Sequence[Results | BaseException]
    ) -> None:
        """Note what is stored, and raise for what is not: first of all what no retry can cure."""
        failures: list[MansioError] = []
        for response in responses:
            if isinstance(response, MansioError):
                failures.append(response)
            elif isinstance(response, BaseException):
                raise response
            else:
                for partition, result in response.items():
                    failures += self._record_result(unacknowledged, partition, result)
        if unacknowledged and not failures:
            failures.append(RequestTimedOut("the broker left a partition out of its answer"))
        if failures:
            raise next((one for one in failures if not one.retriable), failures[0])

    def _record_result(
        self, unacknowledged: Batches, partition: TopicPartition, result: produce.PartitionResult
    ) -> list[MansioError]:
        if result.error_code not in (0, DUPLICATE_SEQUENCE_NUMBER):
            failure = error_for(result.error_code)
            message = result.error_message or failure.message
            return [type(failure)(f"topic {partition.topic}, partition {partition.partition}: {message}")]
        batch = unacknowledged.pop(partition, None)
        if batch is not None:
            before = self._written.get(partition)
            known = result.base_offset >= 0
            last = result.base_offset + batch.rows - 1 if known else -1
            first, rows = (result.base_offset, 0) if before is None else (before.first_offset, before.rows)
            self._written[partition] = WrittenRange(*partition, first, last, rows + batch.rows)
        return []


async def _finished(task: asyncio.Task[None]) -> None:
    await asyncio.wait((task,))


logger = logging.getLogger(__name__)

BATCH_WRITE = -1
"""The batch id of a write that is no stream."""


@dataclass(frozen=True, slots=True)
class WrittenRange:
    """Where records of one task lie in one partition. Others may have written in between: `rows` counts this task's.

    The offsets are -1 where the broker did not say, because it knew a batch of a retry already.
    """

    topic: str
    partition: int
    first_offset: int
    last_offset: int
    rows: int


@dataclass(frozen=True, slots=True)
class TaskReport:
    """What one attempt of one task wrote, all of it acknowledged. `producer_id` is -1 where the producer was not
    idempotent, or had nothing to write."""

    producer_id: int
    producer_epoch: int
    ranges: tuple[WrittenRange, ...]

    @property
    def rows(self) -> int:
        return sum(written.rows for written in self.ranges)


NOTHING_WRITTEN = TaskReport(-1, -1, ())


class SinkProtocol:
    """The driver's side of one write."""

    def commit(self, query_id: str, batch_id: int, reports: Sequence[TaskReport]) -> None:
        """All tasks of a batch have reported. May be called again with the same batch: tasks that Spark ran again after
        a crash have reported anew, and what the first ones wrote is there as well."""
        logger.debug(
            "sink batch written",
            extra=fields(
                query=query_id, batch=batch_id, tasks=len(reports), rows=sum(one.rows for one in reports)
            ),
        )

    def abort(self, query_id: str, batch_id: int, reports: Sequence[TaskReport]) -> None:
        """The batch failed. What its tasks had written stays; a later attempt writes it again."""
        rows = sum(one.rows for one in reports)
        if rows:
            logger.warning(
                "sink batch failed after records were written",
                extra=fields(query=query_id, batch=batch_id, tasks=len(reports), rows=rows),
            )
