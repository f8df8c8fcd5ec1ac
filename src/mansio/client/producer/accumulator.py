"""Record accumulator of a producer: batches, and one queue per partition (Kafka's RecordAccumulator).

The producer appends a record to the open batch of its partition, and closes a batch when it is full or when it is sent.
A closed batch keeps its position and, with idempotence, its sequence numbers through every retry, so that the records
of a partition are stored in the order of the calls.

Invariants:
* A batch is completed once.
* A queue assigns sequence numbers in ascending order. If a batch that had sequence numbers failed, so that the broker
  may lack these numbers, the queue records that in `gap_sequence`.
* A sequence number that the broker may have stored is not assigned to other records.
"""

from __future__ import annotations

import asyncio
from collections import deque
from functools import partial
from itertools import repeat
from typing import TYPE_CHECKING, NamedTuple, Protocol, cast

from mansio.client.types import RecordMetadata
from mansio.errors import InvalidRecord, MansioError
from mansio.wire.batch.record_id_header import find_record_id
from mansio.wire.field_values import SEQUENCE_MAX

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping, Sequence

    from mansio.client.types import Headers
    from mansio.net.connection import BrokerConnection
    from mansio.net.metadata import TopicMetadata
    from mansio.wire.apis.produce import SinglePartitionProduceCodec

    StampedRecord = tuple[int, bytes | None, bytes | None, Headers]

RECORD_OVERHEAD_BYTES = 24
"""Upper estimate of what the encoding of one record adds to its key, value and headers: lengths, deltas, attributes."""

_new_metadata = partial(tuple.__new__, RecordMetadata)


class Waiter(Protocol):
    """A future, or an object with the methods `done` and `set_result` of one, which a batch completes."""

    def done(self) -> bool:
        """Whether the waiter is completed or cancelled."""

    def set_result(self, result: None, /) -> None:
        """Note the outcome. The batch calls this method when it is completed or split. After a split the caller waits
        for both halves."""


class CompletionListener:
    """Waiter that calls a function with the batch; no caller waits with it."""

    __slots__ = ("_batch", "_on_completed")

    def __init__(self, batch: Batch, on_completed: Callable[[Batch], None]) -> None:
        self._batch = batch
        self._on_completed = on_completed

    def done(self) -> bool:
        """Return False: the listener is called once."""
        return False

    def set_result(self, _: None, /) -> None:
        """Call the function."""
        self._on_completed(self._batch)


class Batch:
    """Batch of records of one partition, which the broker stores or refuses as a whole.

    Timestamps and values are in separate lists, because most records have only a value: this avoids one object per
    record.
    """

    __slots__ = (
        "base_offset",
        "base_sequence",
        "created_s",
        "error",
        "halves",
        "has_record_ids",
        "is_completed",
        "keys_and_headers",
        "log_append_time_ms",
        "may_be_stored",
        "producer_epoch",
        "queue",
        "record_errors",
        "size",
        "timestamps_ms",
        "values",
        "waiters",
    )

    def __init__(self, queue: PartitionQueue, created_s: float, *, has_record_ids: bool = False) -> None:
        self.queue: PartitionQueue = queue
        self.has_record_ids: bool = has_record_ids
        """Whether each record has a header `mansio-id`."""
        self.created_s: float = created_s
        """Time of the event loop at which the batch got its first record, in seconds."""
        self.timestamps_ms: list[int] = []
        """Timestamp of each record, in ms."""
        self.values: list[bytes | None] = []
        """Value of each record."""
        self.keys_and_headers: dict[int, tuple[bytes | None, Headers]] = {}
        """Key and headers, by index in the batch, of the records that have a key or headers, or whose value is None."""
        self.size: int = 0
        """Upper estimate of the encoded size of the records before compression, in bytes."""
        self.base_sequence: int | None = None
        """Sequence number of the first record; None before the batch is first sent."""
        self.producer_epoch: int = -1
        """Number of the queue's epoch in which the sequence numbers were assigned, from 0 (see `PartitionQueue`)."""
        self.may_be_stored: bool = False
        """Whether an attempt ended without a definite result, so that the broker may have stored the batch."""
        self.halves: tuple[Batch, Batch] | None = None
        """The two batches that replace this batch after `split`."""
        self.is_completed: bool = False
        self.base_offset: int = -1
        self.log_append_time_ms: int = -1
        self.error: MansioError | None = None
        self.record_errors: Mapping[int, str] = {}
        self.waiters: list[Waiter] = []

    @property
    def is_open(self) -> bool:
        """Whether records are still appended to the batch."""
        queue = self.queue
        return queue.open_batch is self or self in queue.prioritized_batches.values()

    @property
    def is_awaited(self) -> bool:
        """Whether a caller waits for the result."""
        return any(not isinstance(waiter, CompletionListener) for waiter in self.waiters)

    def add(self, timestamp_ms: int, key: bytes | None, value: bytes | None, headers: Headers) -> None:
        """Append a record. The caller adds the record's size to `size`."""
        if key is not None or headers or value is None:
            self.keys_and_headers[len(self.values)] = key, headers
        self.timestamps_ms.append(timestamp_ms)
        self.values.append(value)

    def add_values(self, timestamp_ms: int, values: Sequence[bytes], headers: Headers = ()) -> None:
        """Append records that have a value, and all the same headers. The caller adds their sizes to `size`."""
        if headers:
            begin = len(self.values)
            shared = None, headers
            self.keys_and_headers |= dict.fromkeys(range(begin, begin + len(values)), shared)
        self.timestamps_ms += [timestamp_ms] * len(values)
        self.values += values

    def record_tuples(self) -> list[StampedRecord]:
        """Return each record as a tuple (timestamp_ms, key, value, headers)."""
        keys_and_headers, nothing = self.keys_and_headers, (None, ())
        stamped = enumerate(zip(self.timestamps_ms, self.values, strict=True))
        return [
            (timestamp_ms, (more := keys_and_headers.get(index, nothing))[0], value, more[1])
            for index, (timestamp_ms, value) in stamped
        ]

    def complete(self) -> None:
        """Complete all waiters. The caller has already set the fields of the outcome (`base_offset`, `error`)."""
        self.is_completed = True
        waiters, self.waiters = self.waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def wait_completed(self) -> None:
        """Wait until the batch is completed. If the wait is cancelled, the records are sent nevertheless."""
        while self.halves is not None or not self.is_completed:
            if self.halves is not None:
                await self.halves[0].wait_completed()
                await self.halves[1].wait_completed()
                return
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self.waiters.append(waiter)
            await waiter

    def outcome(self, index: int) -> RecordMetadata:
        """Return the metadata of the record at `index` of a completed batch, or raise the error of that record."""
        if self.halves is not None:
            left, right = self.halves
            return (
                left.outcome(index) if index < len(left.values) else right.outcome(index - len(left.values))
            )
        if self.error is not None:
            raise self._error_of_record(index)
        timestamp_ms = self.timestamps_ms[index] if self.log_append_time_ms < 0 else self.log_append_time_ms
        offset = self.base_offset + index if self.base_offset >= 0 else -1
        record_id = find_record_id(self.keys_and_headers[index][1]) if self.has_record_ids else None
        return _new_metadata((self.queue.topic, self.queue.partition, offset, timestamp_ms, record_id))

    def outcomes(self, begin: int, end: int) -> list[RecordMetadata]:
        """Return the metadata of the records at the indexes [begin, end), or raise the first error of one of them."""
        if self.halves is not None or self.error is not None or self.base_offset < 0 or self.has_record_ids:
            return [self.outcome(index) for index in range(begin, end)]
        timestamps_ms = (
            self.timestamps_ms[begin:end] if self.log_append_time_ms < 0 else repeat(self.log_append_time_ms)
        )
        offsets = range(self.base_offset + begin, self.base_offset + end)
        return list(
            map(
                _new_metadata,
                zip(
                    repeat(self.queue.topic),
                    repeat(self.queue.partition),
                    offsets,
                    timestamps_ms,
                    repeat(None),
                ),
            )
        )

    def first_error(self, begin: int, end: int) -> MansioError | None:
        """Return the first error of the records at the indexes [begin, end) of a completed batch; None without one."""
        if self.halves is None:
            return None if self.error is None or begin >= end else self._error_of_record(begin)
        left, right = self.halves
        middle = len(left.values)
        return left.first_error(begin, min(end, middle)) or right.first_error(
            max(begin - middle, 0), end - middle
        )

    def _error_of_record(self, index: int) -> MansioError:
        """Return a new error object for the record at `index`; each record has its own, because several tasks may raise
        the errors of one batch. The broker may have reported which records are invalid (KIP-467)."""
        if self.error is None:
            raise AssertionError("the batch has no error")
        if not self.record_errors:
            return type(self.error)(str(self.error))
        if index in self.record_errors:
            return InvalidRecord(self.record_errors[index] or str(self.error))
        return InvalidRecord("another record of the same batch was refused")

    def split(self) -> tuple[Batch, Batch]:
        """Split the batch into two halves, which replace it and keep its sequence numbers."""
        middle = len(self.values) // 2
        left, right = (
            Batch(self.queue, self.created_s, has_record_ids=self.has_record_ids) for _ in range(2)
        )
        left.timestamps_ms, right.timestamps_ms = self.timestamps_ms[:middle], self.timestamps_ms[middle:]
        left.values, right.values = self.values[:middle], self.values[middle:]
        for index, more in self.keys_and_headers.items():
            half, position = (left, index) if index < middle else (right, index - middle)
            half.keys_and_headers[position] = more
        left.size, right.size = self.size // 2, self.size - self.size // 2
        left.producer_epoch = right.producer_epoch = self.producer_epoch
        if self.base_sequence is not None:
            left.base_sequence = self.base_sequence
            right.base_sequence = advance_sequence(self.base_sequence, middle)
        self.halves = (left, right)
        self.complete()
        return self.halves


class Delivery:
    """Future result of one published record. `await` on it returns the `RecordMetadata` or raises the typed error."""

    __slots__ = ("_batch", "_index")

    def __init__(self, batch: Batch, index: int) -> None:
        self._batch = batch
        self._index = index

    def __await__(self) -> Generator[object, None, RecordMetadata]:
        if not self.done():
            yield from self._batch.wait_completed().__await__()
        return self._batch.outcome(self._index)

    def _add_waiter(self, waiter: Waiter) -> None:
        """Call `waiter.set_result` when the batch is completed or split. The delivery must not be done yet."""
        self._batch.waiters.append(waiter)

    def done(self) -> bool:
        """Whether the record is acknowledged or has failed."""
        return _is_done(self._batch)

    def result(self) -> RecordMetadata:
        """Return the metadata of the stored record, or raise the typed error of a failed one. Raises `RuntimeError` if
        the delivery is not done."""
        if not self.done():
            raise RuntimeError("the record is not acknowledged yet")
        return self._batch.outcome(self._index)


def _is_done(batch: Batch) -> bool:
    if batch.halves is not None:
        return all(_is_done(half) for half in batch.halves)
    return batch.is_completed


class ProducerIdentity(NamedTuple):
    """Producer id of an idempotent producer, and the epoch that the broker returned with the id."""

    producer_id: int
    first_epoch: int


NO_IDENTITY = ProducerIdentity(-1, -1)


class RequestEncoding(NamedTuple):
    """Encoding of a Produce request: connection, version and template. The next request of the partition uses it again
    while the connection is open and the topic's metadata is the same object, and therefore names the same leader."""

    connection: BrokerConnection
    topic_view: TopicMetadata | None
    version: int
    template: SinglePartitionProduceCodec | None
    """None if the general codec encodes the request."""
    topic_names: dict[bytes, str]
    """Topic id -> topic name, for decoding the response."""


class PartitionQueue:
    """Batches of one partition, oldest first, and the sequence numbers of the partition's records.

    `producer_epoch` counts the epochs of this queue from 0; the epoch that is sent is `identity.first_epoch` plus it.
    """

    __slots__ = (
        "blocked_until_s",
        "failure_count",
        "gap_sequence",
        "identity",
        "in_flight_count",
        "is_recovering",
        "last_encoding",
        "last_error",
        "last_waiter_count",
        "needs_new_epoch",
        "next_sequence",
        "open_batch",
        "partition",
        "prioritized_batches",
        "producer_epoch",
        "ready_batches",
        "topic",
    )

    def __init__(self, topic: str, partition: int) -> None:
        self.topic: str = topic
        self.partition: int = partition
        self.open_batch: Batch | None = None
        """The batch to which records of normal priority are appended."""
        self.prioritized_batches: dict[str, Batch] = {}
        """The batches to which records of high and low priority are appended: a consumer of some priorities then gets
        no bytes of others."""
        self.ready_batches: deque[Batch] = deque()
        """Closed batches that wait to be sent or sent again."""
        self.in_flight_count: int = 0
        """Number of batches in flight."""
        self.last_waiter_count: int = 0
        """Number of waiters of the last completed batch."""
        self.last_encoding: RequestEncoding | None = None
        """Encoding of the last request; only the request writer uses it."""
        self.is_recovering: bool = False
        """Whether batches are sent one at a time, after a failure, until the batches that were in flight are stored."""
        self.blocked_until_s: float = 0.0
        """Time of the event loop before which nothing is sent, in seconds."""
        self.failure_count: int = 0
        """Number of failed attempts since a batch was last stored."""
        self.last_error: MansioError | None = None
        """Error of the last attempt that failed; None once a batch is stored. Errors of expired batches quote it."""
        self.identity: ProducerIdentity | None = None
        """Producer id of the assigned sequence numbers; a retry uses the same id."""
        self.producer_epoch: int = 0
        self.next_sequence: int = 0
        self.gap_sequence: int | None = None
        """Base sequence number of the last failed batch. The broker may lack that batch, and then refuses later batches
        of the same producer epoch."""
        self.needs_new_epoch: bool = False
        """Whether the broker refused a sequence number, so that a new epoch starts as soon as no batch is in flight."""

    @property
    def next_open_batch(self) -> Batch | None:
        """The open batch that is sent next, which is the oldest one."""
        if not self.prioritized_batches:
            return self.open_batch
        others = self.prioritized_batches.values()
        opened = others if self.open_batch is None else (self.open_batch, *others)
        return min(opened, key=lambda batch: batch.created_s)

    def close_batch(self, batch: Batch) -> None:
        """Close an open batch and queue it for sending."""
        self.ready_batches.append(batch)
        self._remove_open(batch)

    def close_open_batches(self) -> None:
        """Close all open batches and queue them for sending."""
        while (batch := self.next_open_batch) is not None:
            self.close_batch(batch)

    def _remove_open(self, batch: Batch) -> None:
        if self.open_batch is batch:
            self.open_batch = None
        else:
            others = self.prioritized_batches
            del others[next(priority for priority in others if others[priority] is batch)]

    def take_batch(self) -> Batch:
        """Remove the next batch, the open one if no other is queued, and return it with its sequence numbers. The queue
        must not be empty."""
        if self.ready_batches:
            batch = self.ready_batches.popleft()
        else:
            batch = cast("Batch", self.next_open_batch)
            self._remove_open(batch)
        if batch.base_sequence is None:
            batch.base_sequence = self.next_sequence
            batch.producer_epoch = self.producer_epoch
            self.next_sequence = advance_sequence(self.next_sequence, len(batch.values))
        return batch

    def requeue(self, batch: Batch) -> None:
        """Queue a batch to be sent again, before all batches with later sequence numbers."""
        self.is_recovering = True
        if batch.base_sequence is None:
            self.ready_batches.appendleft(batch)
            return
        position = 0
        for other in self.ready_batches:
            if other.base_sequence is None or not _is_earlier_sequence(
                other.base_sequence, batch.base_sequence
            ):
                break
            position += 1
        self.ready_batches.insert(position, batch)

    def has_earlier_retry(self, batch: Batch) -> bool:
        """Whether a batch with earlier sequence numbers than `batch` is queued to be sent again."""
        return any(
            other.base_sequence is not None
            and batch.base_sequence is not None
            and _is_earlier_sequence(other.base_sequence, batch.base_sequence)
            for other in self.ready_batches
        )

    def on_batch_failed(self, batch: Batch) -> None:
        """Record that a batch failed and is not retried. If the batch is certainly not stored and has the latest
        sequence numbers, the next batch gets these numbers; otherwise the broker may lack them."""
        if batch.base_sequence is None:
            return
        after = advance_sequence(batch.base_sequence, len(batch.values))
        if (
            after == self.next_sequence
            and not batch.may_be_stored
            and batch.producer_epoch == self.producer_epoch
        ):
            self.next_sequence = batch.base_sequence
        elif self.gap_sequence is None or _is_earlier_sequence(self.gap_sequence, batch.base_sequence):
            self.gap_sequence = batch.base_sequence

    def on_batch_stored(self, batch: Batch) -> None:
        """Record that the broker stored a batch, which implies that it stored all batches with earlier sequence
        numbers."""
        self.failure_count = 0
        self.last_error = None
        sequence = batch.base_sequence
        if (
            self.gap_sequence is not None
            and sequence is not None
            and _is_earlier_sequence(self.gap_sequence, sequence)
        ):
            self.gap_sequence = None

    def drop_batches(self) -> None:
        """Remove all batches and start a new producer epoch. The caller fails the removed batches."""
        self.ready_batches.clear()
        self.open_batch = None
        self.prioritized_batches.clear()
        self.in_flight_count = self.failure_count = 0
        self.is_recovering = False
        self.blocked_until_s = 0.0
        self.start_epoch()

    def start_identity(self, identity: ProducerIdentity) -> None:
        """Begin with the sequence numbers of another producer id or epoch, for a transaction. The queue must be
        empty, except for batches without sequence numbers."""
        self.identity, self.producer_epoch, self.next_sequence = identity, 0, 0
        self.gap_sequence, self.needs_new_epoch, self.is_recovering = None, False, False
        self.last_encoding = None

    def start_epoch(self) -> None:
        """Start a new producer epoch, in which all queued batches get new sequence numbers (KIP-360). No batch may be
        in flight."""
        self.producer_epoch += 1
        self.next_sequence = 0
        self.gap_sequence, self.needs_new_epoch = None, False
        for batch in self.ready_batches:
            batch.base_sequence = None


def advance_sequence(sequence: int, count: int) -> int:
    """Return the sequence number `count` records after `sequence`. Sequence numbers have 31 bits and continue with 0
    after the highest one."""
    return (sequence + count) & SEQUENCE_MAX


def _is_earlier_sequence(first: int, second: int) -> bool:
    return 0 < (second - first) & SEQUENCE_MAX < 0x40000000
