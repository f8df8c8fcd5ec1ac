"""The producer: records in, batches out, an acknowledgement for each record.

Owns the public face of publishing: which partition, how much is buffered, when a batch is full. What happens to
sealed batches is `sender`'s business.

Always true: records of one partition are stored in the order of the calls; with idempotence (the default) each is
stored at most once, whatever is retried; at most `buffer_bytes_max` bytes are on their way.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Literal, Self

from mansio.errors import ConnectionLost, InvalidRecord, InvalidTopic, QueueFull, UnknownTopicOrPartition
from mansio.link.retry import DEFAULT_BACKOFF, Backoff
from mansio.wire.compression import Codec

from .accumulator import RECORD_OVERHEAD_BYTES, Batch, Delivery, PartitionQueue
from .partitioner import next_sticky_partition, partition_for_key
from .sender import Sender
from .types import OutgoingRecord, milliseconds

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from datetime import datetime
    from types import TracebackType

    from mansio.link.cluster import Cluster
    from mansio.link.metadata import TopicView

    from .types import Headers, RecordMetadata

    HeadersLike = Mapping[str, bytes | str | None] | Iterable[tuple[str, bytes | str | None]]
    Publishable = bytes | str | OutgoingRecord | None

CODECS = {codec.name.lower(): codec for codec in Codec}


@dataclass(frozen=True, slots=True)
class ProducerOptions:
    """How to publish. Sizes in bytes, times in milliseconds.

    `acks`: "all" (on disk, and on every in-sync replica), 1 (in the leader's page cache), 0 (no answer awaited).
    `idempotent`: None means yes with acks "all". `when_full`: wait for room, or raise `QueueFull`.
    """

    acks: Literal["all", 1, 0] = "all"
    idempotent: bool | None = None
    codec: Literal["none", "gzip", "snappy", "lz4", "zstd"] = "none"
    batch_bytes_max: int = 128 << 10
    request_bytes_max: int = 1 << 20
    linger_ms: float = 0
    buffer_bytes_max: int = 32 << 20
    when_full: Literal["wait", "raise"] = "wait"
    delivery_timeout_ms: float = 120_000
    in_flight_batches_max: int = 5
    backoff: Backoff = DEFAULT_BACKOFF

    def __post_init__(self) -> None:
        if self.acks not in ("all", 1, 0):
            raise ValueError(f"acks must be 'all', 1 or 0, not {self.acks!r}")
        if self.codec not in CODECS:
            raise ValueError(f"codec must be one of {', '.join(CODECS)}, not {self.codec!r}")
        if self.idempotent and self.acks != "all":
            raise ValueError("an idempotent producer needs acks='all'")
        if not 1 <= self.in_flight_batches_max <= (5 if self.is_idempotent else 1_000):
            raise ValueError("in_flight_batches_max must be 1 to 5 for an idempotent producer")
        if self.batch_bytes_max > self.buffer_bytes_max:
            raise ValueError("batch_bytes_max must fit into buffer_bytes_max")

    @property
    def is_idempotent(self) -> bool:
        return self.acks == "all" if self.idempotent is None else self.idempotent


class _TopicQueues:
    """The queues of one topic and where records without key go now."""

    __slots__ = ("queues", "sticky", "topic")

    def __init__(self, topic: str) -> None:
        self.topic = topic
        self.queues: dict[int, PartitionQueue] = {}
        self.sticky: int | None = None

    def choose_sticky(self, view: TopicView) -> int:
        led = [partition.index for partition in view.partitions if partition.leader >= 0]
        self.sticky = next_sticky_partition(led or range(len(view.partitions)), self.sticky)
        return self.sticky


class Producer:
    """Publishes to any topic of one cluster. Use as `async with`, or call `close()`."""

    def __init__(self, cluster: Cluster, options: ProducerOptions | None = None) -> None:
        self.options = options or ProducerOptions()
        self._cluster = cluster
        self._loop = asyncio.get_running_loop()
        self._topics: dict[str, _TopicQueues] = {}
        self._room: deque[asyncio.Future[None]] = deque()
        self._sender = Sender(cluster, self.options, self._give_room)
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
        """Bytes of records that are not acknowledged yet, about."""
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
    ) -> RecordMetadata:
        """Publish one record and wait until it is acknowledged; text is sent as UTF-8.

        Raises the broker's typed error, `InvalidRecord` for what is neither bytes nor text, `RequestTimedOut` after the
        delivery timeout. A cancelled call may still publish its record.
        """
        record = _record(value, key, headers, partition, timestamp_ms)
        batch = self._put_at_once(topic, record)
        if batch is None:
            batch = (await self._put(topic, record))[1]
        index = len(batch.records) - 1
        if not batch.is_settled:
            waiter: asyncio.Future[None] = self._loop.create_future()
            batch.waiters.append(waiter)
            await waiter
        if batch.halves is not None:
            await batch.settled()
        return batch.outcome(index)

    def hand_over(
        self,
        topic: str,
        value: bytes | str | None,
        *,
        key: bytes | str | None = None,
        headers: HeadersLike | None = None,
        partition: int | None = None,
        timestamp_ms: int | datetime | None = None,
    ) -> Delivery | None:
        """`publish` for a caller that waits for the delivery without a task of its own, as the blocking twin does;
        None when metadata or room has to be waited for first, and nothing was done."""
        batch = self._put_at_once(topic, _record(value, key, headers, partition, timestamp_ms))
        return None if batch is None else Delivery(batch, len(batch.records) - 1)

    async def send(
        self,
        topic: str,
        value: bytes | str | None,
        *,
        key: bytes | str | None = None,
        headers: HeadersLike | None = None,
        partition: int | None = None,
        timestamp_ms: int | datetime | None = None,
    ) -> Delivery:
        """Hand one record over and go on; waits only for the topic's metadata or for room in the buffer."""
        sealed, batch = await self._put(topic, _record(value, key, headers, partition, timestamp_ms))
        delivery = Delivery(batch, len(batch.records) - 1)
        if sealed:
            await asyncio.sleep(0)  # a tight loop of sends lets the sender work once per batch
        return delivery

    async def publish_many(self, topic: str, records: Iterable[Publishable]) -> list[RecordMetadata]:
        """Publish values (or `OutgoingRecord`s) in order and wait until all are acknowledged.

        Raises the first error after all outcomes are known; the records before and after it may be stored.
        """
        spans: list[tuple[Batch, int, int]] = []
        for run in (records,) if isinstance(records, list | tuple) else zip(records):
            position = 0
            while position < len(run):
                given = run[position]
                record = (
                    _checked(given) if isinstance(given, OutgoingRecord) else OutgoingRecord(_bytes(given))
                )
                sealed, batch = await self._put(topic, record)
                begin = len(batch.records) - 1
                position += 1
                if type(given) is bytes:
                    position += self._extend(batch, run, position)
                spans.append((batch, begin, len(batch.records)))
                if sealed:
                    await asyncio.sleep(0)
        await self._settled({batch for batch, _, _ in spans})
        return [outcome for batch, begin, end in spans for outcome in batch.outcomes(begin, end)]

    async def flush(self) -> None:
        """Send what is buffered now and wait until its outcome is known. Errors are raised by the deliveries."""
        await self._settled(set(self._sender.unsettled))

    async def close(self, *, flush: bool = True) -> None:
        """Flush (or give up what is buffered) and stop. Closing twice is harmless."""
        self._is_closed = True
        try:
            if flush:
                await self.flush()
        finally:
            for waiter in self._room:
                if not waiter.done():
                    waiter.set_exception(ConnectionLost("the producer is closed"))
            await self._sender.close()

    # -- inside --------

    def _put_at_once(self, topic: str, record: OutgoingRecord) -> Batch | None:
        """Put a record that is waited for at the end of its batch, if nothing has to be awaited for that."""
        view = self._cluster.cached_topic(topic)
        if view is None or (record.partition is not None and record.partition >= len(view.partitions)):
            return None
        size = _size(record)
        if self._sender.buffered_bytes + size > self.options.buffer_bytes_max:
            return None
        return self._append(topic, view, record, size, is_awaited=True)[1]

    async def _put(self, topic: str, record: OutgoingRecord) -> tuple[bool, Batch]:
        """Put a record at the end of its batch, as soon as its topic is known and there is room. See `_append`."""
        view = self._cluster.cached_topic(topic)
        if view is None or (record.partition is not None and record.partition >= len(view.partitions)):
            view = await self._look_up(topic)
        size = _size(record)
        if self._sender.buffered_bytes + size > self.options.buffer_bytes_max:
            await self._wait_for_room(size)
        return self._append(topic, view, record, size)

    def _append(
        self, topic: str, view: TopicView, record: OutgoingRecord, size: int, *, is_awaited: bool = False
    ) -> tuple[bool, Batch]:
        """Put a record at the end of its batch. Says whether that sealed another."""
        if self._is_closed:
            raise ConnectionLost("the producer is closed")
        queues = self._topics.get(topic)
        if queues is None:
            queues = self._topics[topic] = _TopicQueues(topic)
        value, key, headers, partition, timestamp_ms = record
        keyless = False
        if partition is None:
            if key is not None:
                partition = partition_for_key(key, len(view.partitions))
            else:
                keyless = True
                partition = queues.choose_sticky(view) if queues.sticky is None else queues.sticky
        queue = queues.queues.get(partition)
        if queue is None:
            if not 0 <= partition < len(view.partitions):
                raise UnknownTopicOrPartition(f"topic {topic} has no partition {partition}")
            queue = queues.queues[partition] = PartitionQueue(topic, partition)
        batch = queue.open
        sealed = batch is not None and batch.size + size > self.options.batch_bytes_max
        if sealed:
            self._sender.seal(queue)
            batch = None
            if keyless:
                queues.choose_sticky(view)  # for the records after this one
        is_new = batch is None
        if batch is None:
            batch = queue.open = Batch(queue, self._loop.time())
        if timestamp_ms is None:
            timestamp_ms = int(time.time() * 1000)
        batch.records.append((timestamp_ms, key, value, headers))
        batch.size += size
        self._sender.buffered_bytes += size
        if is_new:
            self._sender.opened(batch, is_awaited=is_awaited)
        return sealed, batch

    def _extend(self, batch: Batch, run: Sequence[Publishable], position: int) -> int:
        """Put the values from `position` on behind the one that was just put into an open batch; how many.

        Only plain values, which go wherever that one went, and only as long as there is room in the batch and in the
        buffer: it does for many what `_append` does for one, at a fraction of the cost.
        """
        buffered_bytes, size = self._sender.buffered_bytes, batch.size
        size_max = min(self.options.batch_bytes_max, size + self.options.buffer_bytes_max - buffered_bytes)
        stamp = batch.records[-1][0]
        records = batch.records
        before = len(records)
        for value in islice(run, position, None):
            if type(value) is not bytes or size + len(value) + RECORD_OVERHEAD_BYTES > size_max:
                break
            size += len(value) + RECORD_OVERHEAD_BYTES
            records.append((stamp, None, value, ()))
        self._sender.buffered_bytes = buffered_bytes + size - batch.size
        batch.size = size
        return len(records) - before

    async def _look_up(self, topic: str) -> TopicView:
        """A topic that is not known, or has grown perhaps."""
        if not isinstance(topic, str):
            raise InvalidTopic(f"a topic's name is text, not {type(topic).__name__}")
        self._cluster.mark_stale((topic,))
        return await self._cluster.topic(topic)

    async def _wait_for_room(self, size: int) -> None:
        while (
            self._sender.buffered_bytes and self._sender.buffered_bytes + size > self.options.buffer_bytes_max
        ):
            if self.options.when_full == "raise":
                raise QueueFull(f"{self._sender.buffered_bytes} bytes wait for acknowledgement")
            waiter: asyncio.Future[None] = self._loop.create_future()
            self._room.append(waiter)
            try:
                await waiter
            finally:
                if waiter in self._room:
                    self._room.remove(waiter)

    def _give_room(self) -> None:
        """Wake all that wait for room; those that find none wait again, in their order."""
        for waiter in self._room:
            if not waiter.done():
                waiter.set_result(None)

    async def _settled(self, batches: set[Batch]) -> None:
        """Send these batches without waiting for more records, and wait for their outcomes."""
        for batch in batches:
            if batch.queue.open is batch:
                self._sender.seal(batch.queue)
        for batch in batches:
            await batch.settled()


def _record(
    value: bytes | str | None,
    key: bytes | str | None,
    headers: HeadersLike | None,
    partition: int | None,
    timestamp_ms: int | datetime | None,
) -> OutgoingRecord:
    """What the caller gave, as bytes and numbers. `InvalidRecord`."""
    return OutgoingRecord(
        _bytes(value),
        _bytes(key),
        () if headers is None else _headers(headers),
        partition,
        None if timestamp_ms is None else milliseconds(timestamp_ms),
    )


def _size(record: OutgoingRecord) -> int:
    size = RECORD_OVERHEAD_BYTES
    if record.value is not None:
        size += len(record.value)
    if record.key is not None:
        size += len(record.key)
    for name, content in record.headers:
        size += 10 + len(name) + (len(content) if content else 0)
    return size


def _bytes(given: object) -> bytes | None:
    """What the caller gave, whatever its types promised; text as UTF-8."""
    if given is None or isinstance(given, bytes):
        return given
    if isinstance(given, str):
        return given.encode()
    if isinstance(given, bytearray | memoryview):
        return bytes(given)
    raise InvalidRecord(f"keys, values and headers are bytes, text or None, not {type(given).__name__}")


def _checked(record: OutgoingRecord) -> OutgoingRecord:
    """A record as it came, or with its parts as bytes."""
    value, key, headers = record.value, record.key, record.headers
    if (
        (value is None or isinstance(value, bytes))
        and (key is None or isinstance(key, bytes))
        and not headers
    ):
        return record
    return record._replace(value=_bytes(value), key=_bytes(key), headers=_headers(headers) if headers else ())


def _headers(headers: HeadersLike) -> Headers:
    pairs = headers.items() if isinstance(headers, Mapping) else headers
    try:
        found = tuple((name, _bytes(content)) for name, content in pairs)
    except (TypeError, ValueError):
        raise InvalidRecord("headers are a mapping, or pairs of a name and its value") from None
    for name, _ in found:
        if not isinstance(name, str):
            raise InvalidRecord(f"the name of a header is text, not {type(name).__name__}")
    return found
