"""Producer: publishes records and returns the result of each record.

The producer chooses the partition of a record, appends the record to a batch, closes full batches and bounds the
buffered bytes. `sender` sends the closed batches.

Invariants:
* Records of one partition are stored in the order of the calls.
* With idempotence (the default) each record is stored at most once, also if requests are retried.
* At most `buffer_bytes_max` bytes are unacknowledged.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Mapping
from itertools import accumulate
from typing import TYPE_CHECKING, Self, cast

from mansio.client.producer.accumulator import RECORD_OVERHEAD_BYTES, Batch, Delivery, PartitionQueue
from mansio.client.producer.dedup_ids import deduplication_check, encode_dedup_id, with_dedup_header
from mansio.client.producer.delays import delay_check, with_delay_header
from mansio.client.producer.metadata_waiters import MetadataWaiters
from mansio.client.producer.partitioner import next_sticky_partition
from mansio.client.producer.priorities import NORMAL, priority_check, with_priority_header
from mansio.client.producer.producer_options import ProducerOptions
from mansio.client.producer.record_ids import RecordIds
from mansio.client.producer.sender import Sender
from mansio.client.producer.traced_sends import TracedSends
from mansio.client.types import OutgoingRecord, milliseconds
from mansio.errors import ConnectionLost, InvalidRecord, InvalidTopic, QueueFull, UnknownTopicOrPartition
from mansio.telemetry.context_headers import has_context
from mansio.wire.murmur2 import partition_for_key

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from datetime import datetime, timedelta
    from types import TracebackType

    from mansio.client.producer.accumulator import ProducerIdentity
    from mansio.client.producer.topic_setting_check import TopicSettingCheck
    from mansio.client.producer.transaction_requests import TransactionRequests
    from mansio.client.types import Headers, HeadersLike, Publishable, RecordMetadata
    from mansio.errors import MansioError
    from mansio.net.cluster import Cluster
    from mansio.net.metadata import TopicMetadata
    from mansio.telemetry.client_telemetry import ClientTelemetry

__all__ = ["Producer", "ProducerOptions"]

VALUES_PER_STEP_MAX = 512
"""Maximum number of values that `publish_many` adds to a batch in one step, without executing bytecode per value."""


class _TopicQueues:
    """Partition queues of one topic, and the partition that records without a key go to until it has got as many bytes
    as a full batch has."""

    __slots__ = ("_sticky_batch", "_sticky_bytes", "queues", "sticky_partition", "topic")

    def __init__(self, topic: str) -> None:
        self.topic = topic
        self.queues: dict[int, PartitionQueue] = {}
        self.sticky_partition: int | None = None
        self._sticky_batch: Batch | None = None
        """The last batch with records without a key, since the partition was chosen."""
        self._sticky_bytes = 0
        """Size of the batches before it, since then."""

    def needs_other_partition(self, bytes_max: int) -> bool:
        """Whether the next batch with records without a key belongs to another partition (KIP-794): the batches may be
        sent long before they are full."""
        last = self._sticky_batch
        return last is not None and self._sticky_bytes + last.size >= bytes_max

    def on_batch_without_keys(self, batch: Batch) -> None:
        """Count a new batch of the sticky partition."""
        if self._sticky_batch is not None:
            self._sticky_bytes += self._sticky_batch.size
        self._sticky_batch = batch

    def choose_sticky_partition(self, view: TopicMetadata) -> int:
        self._sticky_batch, self._sticky_bytes = None, 0
        led = [partition.index for partition in view.partitions if partition.leader >= 0]
        self.sticky_partition = next_sticky_partition(
            led or range(len(view.partitions)), self.sticky_partition
        )
        return self.sticky_partition


class Producer:
    """Publishes records to any topic of one cluster. Close it by `async with` or `close()`."""

    def __init__(
        self,
        cluster: Cluster,
        options: ProducerOptions | None = None,
        *,
        transaction: TransactionRequests | None = None,
        telemetry: ClientTelemetry | None = None,
    ) -> None:
        self._options = options or ProducerOptions()
        self._cluster = cluster
        self._metadata_waiters = MetadataWaiters(cluster, asyncio.get_running_loop())
        self._loop = asyncio.get_running_loop()
        self._topics: dict[str, _TopicQueues] = {}
        self._space_waiters: deque[asyncio.Event] = deque()
        """Callers that wait for buffer space, in the order of the calls; only the first is woken."""
        self._delay_check = delay_check(cluster)
        self._deduplication_check = deduplication_check(cluster)
        self._priority_check = priority_check(cluster)
        self._sender = Sender(cluster, self._options, self._wake_space_waiter, transaction)
        self._traced = None if telemetry is None else TracedSends(telemetry, self._append_many)
        self._record_ids = RecordIds() if self._options.record_ids else None
        self._is_closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close(flush=error is None)

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._is_closed

    @property
    def buffered_bytes(self) -> int:
        """Approximate size of the records that are not acknowledged yet, in bytes."""
        return self._sender.buffered_bytes

    async def publish(
        self,
        topic: str,
        value: bytes | str | None,
        *,
        key: bytes | str | None = None,
        headers: HeadersLike | None = None,
        partition: int | None = None,
        timestamp_ms: int | datetime | None = None,
        delay: timedelta | float | None = None,
        at: datetime | None = None,
        dedup_id: bytes | str | None = None,
        priority: str | None = None,
    ) -> RecordMetadata:
        """Publish one record and wait until it is acknowledged; text is sent as UTF-8.

        The record is delivered after `delay` (a duration, or seconds), or at the moment `at`; the offset in the result
        is then its id while it is pending. With `dedup_id` the record is not stored again if one with the same id was
        accepted lately; without key and partition, the id chooses the partition. Share groups receive records with the
        `priority` "high" before those with "normal", the default, and those with "low".

        Raises the broker's typed error, `InvalidRecord` for a value that is neither bytes nor text, `ValueError` for an
        impossible delay, id or priority, `DelaysNotEnabled`, `DeduplicationNotEnabled` or `PrioritiesNotEnabled` if the
        topic does not have the setting, and `RequestTimedOut` after the delivery timeout. If the call is cancelled, the
        record may still be published.
        """
        if self._traced is not None:
            record = _outgoing(value, key, headers, partition, timestamp_ms, delay, at, dedup_id, priority)
            return await (await self._traced.append_one(topic, record))
        if delay is not None or at is not None:
            headers = with_delay_header(headers, delay, at)
            await self._ensure_setting(self._delay_check, topic)
        if dedup_id is not None:
            dedup_id = encode_dedup_id(dedup_id)
            headers = with_dedup_header(headers, dedup_id)
            await self._ensure_setting(self._deduplication_check, topic)
        if priority is not None:
            headers = with_priority_header(headers, priority)
            await self._ensure_setting(self._priority_check, topic)
        batch = None
        if key is None and headers is None and partition is None and timestamp_ms is None:
            batch = self._append_value(topic, value, is_awaited=True)
        if batch is None:
            record = serialize_fields(value, key, headers, partition, timestamp_ms, dedup_id, priority)
            batch = self._append_nowait(topic, record) or (await self._wait_and_append(topic, record))[1]
        index = len(batch.values) - 1
        if not batch.is_completed:
            waiter: asyncio.Future[None] = self._loop.create_future()
            batch.waiters.append(waiter)
            await waiter
        if batch.halves is not None:
            await batch.wait_completed()
        return batch.outcome(index)

    def _publish_nowait(
        self,
        topic: str,
        value: bytes | str | None,
        *,
        key: bytes | str | None = None,
        headers: HeadersLike | None = None,
        partition: int | None = None,
        timestamp_ms: int | datetime | None = None,
        delay: timedelta | float | None = None,
        at: datetime | None = None,
        dedup_id: bytes | str | None = None,
        priority: str | None = None,
    ) -> Delivery | None:
        """Queue one record for publishing and return its delivery, without waiting. Returns None and queues nothing if
        the call would have to wait for metadata or buffer space. The blocking client uses it, because it needs no
        task. A record with a delay, an id or a priority may have to wait, too, and one that is traced."""
        if self._traced is not None:
            return None
        if delay is not None or at is not None:
            headers = with_delay_header(headers, delay, at)
            if not self._delay_check.is_enabled(topic):
                return None
        if dedup_id is not None:
            dedup_id = encode_dedup_id(dedup_id)
            headers = with_dedup_header(headers, dedup_id)
            if not self._deduplication_check.is_enabled(topic):
                return None
        if priority is not None:
            headers = with_priority_header(headers, priority)
            if not self._priority_check.is_enabled(topic):
                return None
        batch = self._append_nowait(
            topic, serialize_fields(value, key, headers, partition, timestamp_ms, dedup_id, priority)
        )
        return None if batch is None else Delivery(batch, len(batch.values) - 1)

    async def send(
        self,
        topic: str,
        value: bytes | str | None,
        *,
        key: bytes | str | None = None,
        headers: HeadersLike | None = None,
        partition: int | None = None,
        timestamp_ms: int | datetime | None = None,
        delay: timedelta | float | None = None,
        at: datetime | None = None,
        dedup_id: bytes | str | None = None,
        priority: str | None = None,
    ) -> Delivery:
        """Queue one record for publishing and return its delivery. The call waits only for the topic's metadata or for
        buffer space. `delay`, `at`, `dedup_id`, `priority`: see `publish`."""
        if self._traced is not None:
            record = _outgoing(value, key, headers, partition, timestamp_ms, delay, at, dedup_id, priority)
            return await self._traced.append_one(topic, record)
        if delay is not None or at is not None:
            headers = with_delay_header(headers, delay, at)
            await self._ensure_setting(self._delay_check, topic)
        if dedup_id is not None:
            dedup_id = encode_dedup_id(dedup_id)
            headers = with_dedup_header(headers, dedup_id)
            await self._ensure_setting(self._deduplication_check, topic)
        if priority is not None:
            headers = with_priority_header(headers, priority)
            await self._ensure_setting(self._priority_check, topic)
        if key is None and headers is None and partition is None and timestamp_ms is None:
            put = self._append_value(topic, value)
            if put is not None:
                return Delivery(put, len(put.values) - 1)
        record = serialize_fields(value, key, headers, partition, timestamp_ms, dedup_id, priority)
        was_batch_closed, batch = await self._wait_and_append(topic, record)
        delivery = Delivery(batch, len(batch.values) - 1)
        if was_batch_closed:
            await asyncio.sleep(
                0
            )  # lets the sender run once per batch, also in a loop that only calls `send`
        return delivery

    async def publish_many(
        self,
        topic: str,
        records: Iterable[Publishable],
        *,
        delay: timedelta | float | None = None,
        at: datetime | None = None,
    ) -> list[RecordMetadata]:
        """Publish values (or `OutgoingRecord`s) in order and wait until all are acknowledged.

        `delay`, `at`: see `publish`; they apply to the records that have none of their own. Each `OutgoingRecord` may
        have a `dedup_id` and a `priority`.
        If a record fails, raises the first error after the results of all records are known; the other records may be
        stored.
        """
        if delay is not None or at is not None:
            with_delay_header(None, delay, at)
            records = (_delayed(record, delay, at) for record in records)
        append_many = self._append_many if self._traced is None else self._traced.append_many
        spans = await append_many(topic, records)
        await self._flush_batches({batch for batch, _, _ in spans})
        if len(spans) == 1:
            ((batch, begin, end),) = spans
            return batch.outcomes(begin, end)
        return [outcome for batch, begin, end in spans for outcome in batch.outcomes(begin, end)]

    async def _append_many(
        self, topic: str, records: Iterable[Publishable], context: Headers = ()
    ) -> list[tuple[Batch, int, int]]:
        """Append records in order, waiting for metadata and buffer space. Returns (batch, first index, end index) of
        each range of records in a batch. `context`: headers for all records that have no trace context."""
        spans: list[tuple[Batch, int, int]] = []
        for run in (records,) if isinstance(records, list | tuple) else zip(records):
            position = 0
            while position < len(run):
                record = run[position]
                if isinstance(record, OutgoingRecord) and (record.delay is not None or record.at is not None):
                    headers = with_delay_header(record.headers, record.delay, record.at)
                    record = record._replace(headers=_headers(headers), delay=None, at=None)
                    await self._ensure_setting(self._delay_check, topic)
                if isinstance(record, OutgoingRecord) and record.dedup_id is not None:
                    dedup_id = encode_dedup_id(record.dedup_id)
                    headers = with_dedup_header(record.headers, dedup_id)
                    record = record._replace(headers=_headers(headers), dedup_id=dedup_id)
                    await self._ensure_setting(self._deduplication_check, topic)
                if isinstance(record, OutgoingRecord) and record.priority is not None:
                    headers = with_priority_header(record.headers, record.priority)
                    record = record._replace(headers=_headers(headers))
                    await self._ensure_setting(self._priority_check, topic)
                outgoing = serialize_record(record)
                if context and not has_context(outgoing.headers):
                    outgoing = outgoing._replace(headers=outgoing.headers + context)
                was_batch_closed, batch = await self._wait_and_append(topic, outgoing)
                begin = len(batch.values) - 1
                position += 1
                if type(record) is bytes and self._record_ids is None:
                    position += self._append_values(batch, run, position, context)
                spans.append((batch, begin, len(batch.values)))
                if was_batch_closed:
                    await asyncio.sleep(0)
        return spans

    async def flush(self) -> None:
        """Send all records that are buffered now and wait until each is acknowledged or has failed. Raises no error of
        a record; `publish` and the deliveries do."""
        await self._flush_batches(set(self._sender.incomplete_batches))

    async def close(self, *, flush: bool = True) -> None:
        """Flush and stop; with `flush=False` fail all buffered records instead of sending them. May be called twice."""
        self._is_closed = True
        try:
            if flush:
                await self.flush()
        finally:
            for waiter in self._space_waiters:
                waiter.set()
            await self._delay_check.close()
            await self._deduplication_check.close()
            await self._priority_check.close()
            await self._metadata_waiters.close()
            await self._sender.close()

    # -- called by the transactional producer --------

    def _start_identity(self, identity: ProducerIdentity) -> None:
        """Use this producer id and epoch for the next transaction."""
        self._sender.start_identity(identity)

    async def _queue_many(self, topic: str, records: Iterable[Publishable]) -> None:
        """Queue records of one call for publishing, in order; the call waits only for metadata and buffer space."""
        append_many = self._append_many if self._traced is None else self._traced.append_many
        await append_many(topic, records)

    def _fail_all(self, error: MansioError) -> None:
        """Fail all buffered records, also those in flight, which the broker will refuse."""
        self._sender.fail_all(error)

    async def _fail_unsent(self, error: MansioError) -> None:
        """Fail all buffered records except those in flight, and wait for the results of these."""
        self._sender.fail_unsent(error)
        await self.flush()

    # -- appending to batches --------

    def _append_nowait(self, topic: str, record: OutgoingRecord) -> Batch | None:
        """Append a record whose caller waits for the acknowledgement. Returns its batch; None, with no effect, if the
        call would have to wait for metadata or buffer space."""
        view = self._metadata_waiters.cached_topic(topic)
        if view is None or (record.partition is not None and record.partition >= len(view.partitions)):
            return None
        if self._record_ids is not None:
            record = self._record_ids.with_id(record)
        size = estimate_size_bytes(record)
        if self._space_waiters or self._sender.buffered_bytes + size > self._options.buffer_bytes_max:
            return None
        return self._append(topic, view, record, size, is_awaited=True)[1]

    async def _wait_and_append(self, topic: str, record: OutgoingRecord) -> tuple[bool, Batch]:
        """Wait until the topic's metadata is known and there is buffer space, then append the record. Returns what
        `_append` returns."""
        view = self._metadata_waiters.cached_topic(topic)
        if view is None or (record.partition is not None and record.partition >= len(view.partitions)):
            view = await self._request_topic(topic)
        if self._record_ids is not None:
            record = self._record_ids.with_id(record)
        size = estimate_size_bytes(record)
        if self._space_waiters or self._sender.buffered_bytes + size > self._options.buffer_bytes_max:
            await self._wait_for_space(size)
        return self._append(topic, view, record, size)

    def _append(
        self, topic: str, view: TopicMetadata, record: OutgoingRecord, size: int, *, is_awaited: bool = False
    ) -> tuple[bool, Batch]:
        """Append a record to the open batch of its partition. Returns (whether a full batch was closed before, the
        batch with the record)."""
        if self._is_closed:
            raise ConnectionLost("the producer is closed")
        queues = self._topics.get(topic)
        if queues is None:
            queues = self._topics[topic] = _TopicQueues(topic)
        value, key, headers, partition, timestamp_ms, _, _, dedup_id, priority = record
        keyless = False
        if partition is None:
            if key is not None:
                partition = partition_for_key(key, len(view.partitions))
            elif type(dedup_id) is bytes:  # a repeat is recognized in the same partition only
                partition = partition_for_key(dedup_id, len(view.partitions))
            else:
                keyless = True
                partition = (
                    queues.choose_sticky_partition(view)
                    if queues.sticky_partition is None
                    else queues.sticky_partition
                )
        queue = queues.queues.get(partition)
        if (
            keyless
            and queue is not None
            and queue.open_batch is None
            and queues.needs_other_partition(self._options.batch_bytes_max)
        ):
            partition = queues.choose_sticky_partition(view)
            queue = queues.queues.get(partition)
        if queue is None:
            if not 0 <= partition < len(view.partitions):
                raise UnknownTopicOrPartition(f"topic {topic} has no partition {partition}")
            queue = queues.queues[partition] = PartitionQueue(topic, partition)
        is_normal = priority is None or priority == NORMAL
        batch = queue.open_batch if is_normal else queue.prioritized_batches.get(priority or NORMAL)
        was_batch_closed = batch is not None and batch.size + size > self._options.batch_bytes_max
        if batch is not None and was_batch_closed:
            self._sender.close_batch(batch)
            batch = None
            if keyless:
                queues.choose_sticky_partition(view)  # for the next records
        is_new = batch is None
        if batch is None:
            batch = Batch(queue, self._loop.time(), has_record_ids=self._record_ids is not None)
            if is_normal:
                queue.open_batch = batch
                if partition == queues.sticky_partition:
                    queues.on_batch_without_keys(batch)
            else:
                queue.prioritized_batches[priority or NORMAL] = batch
        if timestamp_ms is None:
            timestamp_ms = int(time.time() * 1000)
        batch.add(timestamp_ms, key, value, headers)
        batch.size += size
        self._sender.buffered_bytes += size
        if is_new:
            self._sender.on_batch_opened(batch, is_awaited=is_awaited)
        return was_batch_closed, batch

    def _append_value(self, topic: str, value: object, *, is_awaited: bool = False) -> Batch | None:
        """Append a bytes value without key and headers; faster than `_append`. Returns the batch; None, with no effect,
        if the value is not bytes, does not fit into the open batch, or the call would have to wait."""
        queues = self._topics.get(topic)
        if (
            queues is None
            or queues.sticky_partition is None
            or type(value) is not bytes
            or self._is_closed
            or self._space_waiters
            or self._record_ids is not None
        ):
            return None
        queue = queues.queues.get(queues.sticky_partition)
        if queue is None or self._metadata_waiters.cached_topic(topic) is None:
            return None
        sender, options = self._sender, self._options
        size = len(value) + RECORD_OVERHEAD_BYTES
        if sender.buffered_bytes + size > options.buffer_bytes_max:
            return None
        batch = queue.open_batch
        is_new = batch is None
        if batch is None:
            if queues.needs_other_partition(options.batch_bytes_max):
                return None
            batch = queue.open_batch = Batch(queue, self._loop.time())
            queues.on_batch_without_keys(batch)
        elif batch.size + size > options.batch_bytes_max:
            return None
        batch.timestamps_ms.append(int(time.time() * 1000))
        batch.values.append(value)
        batch.size += size
        sender.buffered_bytes += size
        if is_new:
            sender.on_batch_opened(batch, is_awaited=is_awaited)
        return batch

    def _append_values(
        self, batch: Batch, run: Sequence[Publishable], position: int, headers: Headers
    ) -> int:
        """Append the elements of `run` from `position` on to `batch`, as long as they are bytes and fit into the batch
        and the buffer, with the same headers. Returns the number of appended values. Executes no bytecode per value.
        """
        if self._space_waiters:
            return 0
        timestamp_ms, begin = batch.timestamps_ms[-1], position
        space = min(
            self._options.batch_bytes_max - batch.size,
            self._options.buffer_bytes_max - self._sender.buffered_bytes,
        )
        overhead = RECORD_OVERHEAD_BYTES + (headers_size_bytes(headers) if headers else 0)
        wanted = VALUES_PER_STEP_MAX
        while wanted == VALUES_PER_STEP_MAX:
            values = run[position : position + wanted]
            plain = _count_leading_bytes(values)
            ends = list(accumulate(map(len, cast("Sequence[bytes]", values[:plain]))))
            fitting = bisect_right(
                range(plain), space, key=lambda index: ends[index] + overhead * (index + 1)
            )
            if not fitting:
                break
            batch.add_values(timestamp_ms, cast("Sequence[bytes]", values[:fitting]), headers)
            size = ends[fitting - 1] + overhead * fitting
            batch.size += size
            self._sender.buffered_bytes += size
            space -= size
            position += fitting
            wanted = fitting
        return position - begin

    async def _request_topic(self, topic: str) -> TopicMetadata:
        """Request the metadata of a topic that is not cached or may have new partitions."""
        if not isinstance(topic, str):
            raise InvalidTopic(f"a topic name must be text, not {type(topic).__name__}")
        self._sender.prepare()
        return await self._metadata_waiters.request_topic(topic)

    async def _ensure_setting(self, check: TopicSettingCheck, topic: str) -> None:
        """Raise the error of a check if the topic does not have the setting."""
        if not check.is_enabled(topic):
            if self._is_closed:
                raise ConnectionLost("the producer is closed")
            if self._metadata_waiters.cached_topic(topic) is None:
                await self._request_topic(topic)  # creates it where topics are created on first use
            await check.ensure_enabled(topic)

    async def _wait_for_space(self, size: int) -> None:
        waiter = asyncio.Event()
        self._space_waiters.append(waiter)
        try:
            while self._space_waiters[0] is not waiter or self._lacks_space(size):
                if self._options.when_full == "raise":
                    raise QueueFull(f"{self._sender.buffered_bytes} bytes are not acknowledged yet")
                await waiter.wait()
                waiter.clear()
                if self._is_closed:
                    raise ConnectionLost("the producer is closed")
        finally:
            self._space_waiters.remove(waiter)
            self._wake_space_waiter()  # the next caller checks after this caller has appended its record

    def _lacks_space(self, size: int) -> bool:
        buffered = self._sender.buffered_bytes  # a record larger than the buffer is accepted when it is empty
        return bool(buffered) and buffered + size > self._options.buffer_bytes_max

    def _wake_space_waiter(self) -> None:
        """Wake the first caller that waits for buffer space."""
        if self._space_waiters:
            self._space_waiters[0].set()

    async def _flush_batches(self, batches: set[Batch]) -> None:
        """Send the given batches without waiting for more records, and wait until all are completed."""
        for batch in batches:
            if batch.is_open:
                self._sender.close_batch(batch)
        for batch in batches:
            await batch.wait_completed()


def _count_leading_bytes(values: Sequence[Publishable]) -> int:
    """Return how many values at the beginning of the list are bytes objects, up to the first other one."""
    kinds = list(map(type, values))
    if kinds.count(bytes) == len(kinds):
        return len(kinds)
    return next(index for index, kind in enumerate(kinds) if kind is not bytes)


# -- serialization --------


def serialize_fields(
    value: bytes | str | None,
    key: bytes | str | None,
    headers: HeadersLike | None,
    partition: int | None,
    timestamp_ms: int | datetime | None,
    dedup_id: bytes | None = None,
    priority: str | None = None,
) -> OutgoingRecord:
    """Return a record with key, value and headers as bytes and the timestamp in milliseconds. Raises `InvalidRecord`
    for a wrong type."""
    return OutgoingRecord(
        _bytes(value),
        _bytes(key),
        () if headers is None else _headers(headers),
        partition,
        None if timestamp_ms is None else milliseconds(timestamp_ms),
        dedup_id=dedup_id,
        priority=priority,
    )


def _outgoing(
    value: bytes | str | None,
    key: bytes | str | None,
    headers: HeadersLike | None,
    partition: int | None,
    timestamp_ms: int | datetime | None,
    delay: timedelta | float | None,
    at: datetime | None,
    dedup_id: bytes | str | None,
    priority: str | None,
) -> OutgoingRecord:
    """Return the record of a call of `publish` or `send`, serialized. Raises `InvalidRecord` for a wrong type."""
    record = serialize_fields(value, key, headers, partition, timestamp_ms, None, priority)
    return record._replace(delay=delay, at=at, dedup_id=dedup_id)


def serialize_record(record: Publishable) -> OutgoingRecord:
    """Return a record, made from a value or an `OutgoingRecord`, with key, value and headers as bytes. Raises
    `InvalidRecord` for a wrong type."""
    if not isinstance(record, OutgoingRecord):
        return OutgoingRecord(_bytes(record))
    value, key, headers = record.value, record.key, record.headers
    if (
        (value is None or isinstance(value, bytes))
        and (key is None or isinstance(key, bytes))
        and not headers
    ):
        return record
    return record._replace(value=_bytes(value), key=_bytes(key), headers=_headers(headers) if headers else ())


def _delayed(record: Publishable, delay: timedelta | float | None, at: datetime | None) -> OutgoingRecord:
    """Return a record with this delay, unless it has one of its own."""
    if not isinstance(record, OutgoingRecord):
        return OutgoingRecord(_bytes(record), delay=delay, at=at)
    return (
        record if record.delay is not None or record.at is not None else record._replace(delay=delay, at=at)
    )


def estimate_size_bytes(record: OutgoingRecord) -> int:
    """Return the approximate size of a record in its batch before compression, in bytes."""
    size = RECORD_OVERHEAD_BYTES
    if record.value is not None:
        size += len(record.value)
    if record.key is not None:
        size += len(record.key)
    if record.headers:
        size += headers_size_bytes(record.headers)
    return size


def headers_size_bytes(headers: Headers) -> int:
    """Return the approximate size of the headers of a record, in bytes."""
    return sum(10 + len(name) + (len(content) if content else 0) for name, content in headers)


def _bytes(content: object) -> bytes | None:
    """Return a key, value or header as bytes; text is encoded as UTF-8. Raises `InvalidRecord` for any other type."""
    if content is None or isinstance(content, bytes):
        return content
    if isinstance(content, str):
        return content.encode()
    if isinstance(content, bytearray | memoryview):
        return bytes(content)
    raise InvalidRecord(f"keys, values and headers must be bytes, text or None, not {type(content).__name__}")


def _headers(headers: HeadersLike) -> Headers:
    pairs = headers.items() if isinstance(headers, Mapping) else headers
    try:
        found = tuple((name, _bytes(content)) for name, content in pairs)
    except (TypeError, ValueError):
        raise InvalidRecord("headers must be a mapping or an iterable of (name, value) pairs") from None
    for name, _ in found:
        if not isinstance(name, str):
            raise InvalidRecord(f"a header name must be text, not {type(name).__name__}")
    return found
