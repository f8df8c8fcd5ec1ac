"""Record accumulator of a producer: batches, and one queue per partition (Kafka's RecordAccumulator).

A record is appended to the open batch of its partition. A batch is closed when it is full or when it is sent. A closed
batch keeps its position and, with idempotence, its sequence numbers through every retry, so that the records of a
partition are stored in the order of the calls.

Invariants:
* A batch is completed once.
* Sequence numbers of a queue are assigned in order, without a gap that the queue does not record (`gap`).
* A sequence number that the broker may have stored is not assigned to other records.
"""

from __future__ import annotations

import asyncio
from collections import deque
from functools import partial
from itertools import repeat
from typing import TYPE_CHECKING, NamedTuple, Protocol

from mansio.client.types import RecordMetadata
from mansio.errors import InvalidRecord, MansioError

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping, Sequence

    from mansio.client.types import Headers
    from mansio.net.connection import Connection
    from mansio.net.metadata import TopicView
    from mansio.wire.apis.produce import SinglePartitionProduce

    Stamped = tuple[int, bytes | None, bytes | None, Headers]

RECORD_OVERHEAD_BYTES = 24
"""Upper estimate of the encoding overhead of one record: lengths, deltas, attributes."""

_new_metadata = partial(tuple.__new__, RecordMetadata)


class Waiter(Protocol):
    """Waits for a batch to be completed: a future, or an object with these two methods of one."""

    def done(self) -> bool:
        """Whether the waiter is completed or cancelled."""

    def set_result(self, result: None, /) -> None:
        """The batch is completed, or was split; then wait for its halves."""


class Batch:
    """Batch of records of one partition, stored or refused as a whole.

    Stored as columns, because most records have only a value: this avoids one object per record.
    """

    __slots__ = (
        "base_offset",
        "base_sequence",
        "created",
        "error",
        "halves",
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

    def __init__(self, queue: PartitionQueue, created: float) -> None:
        self.queue = queue
        self.created = created
        self.timestamps_ms: list[int] = []
        """Timestamp of each record, in ms."""
        self.values: list[bytes | None] = []
        """Value of each record."""
        self.keys_and_headers: dict[int, tuple[bytes | None, Headers]] = {}
        """By index: key and headers of the records that have either, or whose value is None."""
        self.size = 0
        self.base_sequence: int | None = None
        self.producer_epoch = -1
        self.may_be_stored = False
        """Whether an attempt ended without a response, so that the broker may have stored the batch."""
        self.halves: tuple[Batch, Batch] | None = None
        self.is_completed = False
        self.base_offset = -1
        self.log_append_time_ms = -1
        self.error: MansioError | None = None
        self.record_errors: Mapping[int, str] = {}
        self.waiters: list[Waiter] = []

    def add(self, timestamp_ms: int, key: bytes | None, value: bytes | None, headers: Headers) -> None:
        """Append a record. The caller adds its size to `size`."""
        if key is not None or headers or value is None:
            self.keys_and_headers[len(self.values)] = key, headers
        self.timestamps_ms.append(timestamp_ms)
        self.values.append(value)

    def add_values(self, timestamp_ms: int, values: Sequence[bytes]) -> None:
        """Append records that have only a value. The caller adds their size to `size`."""
        self.timestamps_ms += [timestamp_ms] * len(values)
        self.values += values

    def rows(self) -> list[Stamped]:
        """Each record as (timestamp_ms, key, value, headers)."""
        keys_and_headers, nothing = self.keys_and_headers, (None, ())
        stamped = enumerate(zip(self.timestamps_ms, self.values, strict=True))
        return [
            (timestamp_ms, (more := keys_and_headers.get(index, nothing))[0], value, more[1])
            for index, (timestamp_ms, value) in stamped
        ]

    def complete(self) -> None:
        """Complete all waiters. The fields of the outcome are already set."""
        self.is_completed = True
        waiters, self.waiters = self.waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def wait_completed(self) -> None:
        """Wait until the batch is completed. Cancelling the wait does not withdraw the records."""
        while self.halves is not None or not self.is_completed:
            if self.halves is not None:
                await self.halves[0].wait_completed()
                await self.halves[1].wait_completed()
                return
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self.waiters.append(waiter)
            await waiter

    def outcome(self, index: int) -> RecordMetadata:
        """Metadata of the record at `index` of a completed batch; raises its error."""
        if self.halves is not None:
            left, right = self.halves
            return (
                left.outcome(index) if index < len(left.values) else right.outcome(index - len(left.values))
            )
        if self.error is not None:
            raise self._error_of(index)
        timestamp_ms = self.timestamps_ms[index] if self.log_append_time_ms < 0 else self.log_append_time_ms
        offset = self.base_offset + index if self.base_offset >= 0 else -1
        return _new_metadata((self.queue.topic, self.queue.partition, offset, timestamp_ms))

    def outcomes(self, begin: int, end: int) -> list[RecordMetadata]:
        """`outcome` of each record in [begin, end)."""
        if self.halves is not None or self.error is not None or self.base_offset < 0:
            return [self.outcome(index) for index in range(begin, end)]
        timestamps_ms = (
            self.timestamps_ms[begin:end] if self.log_append_time_ms < 0 else repeat(self.log_append_time_ms)
        )
        offsets = range(self.base_offset + begin, self.base_offset + end)
        return list(
            map(
                _new_metadata,
                zip(repeat(self.queue.topic), repeat(self.queue.partition), offsets, timestamps_ms),
            )
        )

    def _error_of(self, index: int) -> MansioError:
        """A new error object per record, because several tasks may raise it. The broker may name the invalid records
        (KIP-467)."""
        if self.error is None:
            raise AssertionError("the batch has no error")
        if not self.record_errors:
            return type(self.error)(str(self.error))
        if index in self.record_errors:
            return InvalidRecord(self.record_errors[index] or str(self.error))
        return InvalidRecord("another record of the same batch was refused")

    def split(self) -> tuple[Batch, Batch]:
        """Split into two halves that replace this batch and keep its sequence numbers."""
        middle = len(self.values) // 2
        left, right = Batch(self.queue, self.created), Batch(self.queue, self.created)
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
    """Future result of one published record. Awaiting it returns the `RecordMetadata` or raises the typed error."""

    __slots__ = ("_index", "batch")

    def __init__(self, batch: Batch, index: int) -> None:
        self.batch = batch
        self._index = index

    def __await__(self) -> Generator[object, None, RecordMetadata]:
        if not self.done():
            yield from self.batch.wait_completed().__await__()
        return self.batch.outcome(self._index)

    def add_waiter(self, waiter: Waiter) -> None:
        """Call `waiter.set_result` when the batch is completed or split. Only for a delivery that is not done."""
        self.batch.waiters.append(waiter)

    def done(self) -> bool:
        """Whether the outcome is known."""
        return _is_done(self.batch)

    def result(self) -> RecordMetadata:
        """The outcome of a delivery that is done; raises its typed error, or `RuntimeError` if it is not done."""
        if not self.done():
            raise RuntimeError("the record is not acknowledged yet")
        return self.batch.outcome(self._index)


def _is_done(batch: Batch) -> bool:
    if batch.halves is not None:
        return all(_is_done(half) for half in batch.halves)
    return batch.is_completed


class ProducerIdentity(NamedTuple):
    """Producer id and first epoch of an idempotent producer."""

    producer_id: int
    first_epoch: int


NO_IDENTITY = ProducerIdentity(-1, -1)


class Route(NamedTuple):
    """Encoding of the last request of a queue, valid while connection and metadata are unchanged."""

    connection: Connection
    view: TopicView | None
    version: int
    single: SinglePartitionProduce
    names: dict[bytes, str]


class PartitionQueue:
    """The batches of one partition, oldest first, and its sequence numbers."""

    __slots__ = (
        "blocked_until",
        "failures",
        "gap",
        "identity",
        "in_flight",
        "is_recovering",
        "last_waiter_count",
        "needs_epoch",
        "next_sequence",
        "open",
        "partition",
        "producer_epoch",
        "ready",
        "refusal",
        "route",
        "topic",
    )

    def __init__(self, topic: str, partition: int) -> None:
        self.topic = topic
        self.partition = partition
        self.open: Batch | None = None
        self.ready: deque[Batch] = deque()
        self.in_flight = 0
        self.last_waiter_count = 0
        """Number of waiters of the last completed batch."""
        self.route: Route | None = None
        """Encoding of the last request; owned by the request writer."""
        self.is_recovering = False
        """After a failure: one batch at a time, until the batches that were in flight are stored."""
        self.blocked_until = 0.0
        self.failures = 0
        self.refusal: MansioError | None = None
        """Error of the last retried batch, until one is stored; named in the error of expired batches."""
        self.identity: ProducerIdentity | None = None
        """Producer id of the assigned sequence numbers; a retry uses the same id."""
        self.producer_epoch = 0
        self.next_sequence = 0
        self.gap: int | None = None
        """Sequence number of the last batch that was given up; in this epoch the broker may refuse those after it."""
        self.needs_epoch = False
        """The broker refused them: a new epoch starts as soon as nothing is in flight."""

    def seal(self) -> None:
        """Close the open batch and queue it."""
        if self.open is not None:
            self.ready.append(self.open)
            self.open = None

    def number(self, batch: Batch) -> None:
        """Assign the sequence numbers of a batch when it is first sent."""
        if batch.base_sequence is None:
            batch.base_sequence = self.next_sequence
            batch.producer_epoch = self.producer_epoch
            self.next_sequence = advance_sequence(self.next_sequence, len(batch.values))

    def requeue(self, batch: Batch) -> None:
        """Queue a batch for a retry, before all batches with later sequence numbers."""
        self.is_recovering = True
        if batch.base_sequence is None:
            self.ready.appendleft(batch)
            return
        position = 0
        for other in self.ready:
            if other.base_sequence is None or not _is_before(other.base_sequence, batch.base_sequence):
                break
            position += 1
        self.ready.insert(position, batch)

    def waits_before(self, batch: Batch) -> bool:
        """Whether a batch with an earlier sequence number is queued for a retry."""
        return any(
            other.base_sequence is not None
            and batch.base_sequence is not None
            and _is_before(other.base_sequence, batch.base_sequence)
            for other in self.ready
        )

    def give_up(self, batch: Batch) -> None:
        """Record that a batch is not retried. If it is known not to be stored and has the latest sequence numbers,
        they are reused; otherwise there may be a gap."""
        if batch.base_sequence is None:
            return
        after = advance_sequence(batch.base_sequence, len(batch.values))
        if (
            after == self.next_sequence
            and not batch.may_be_stored
            and batch.producer_epoch == self.producer_epoch
        ):
            self.next_sequence = batch.base_sequence
        elif self.gap is None or _is_before(self.gap, batch.base_sequence):
            self.gap = batch.base_sequence

    def stored(self, batch: Batch) -> None:
        """Record that the broker stored a batch, and so all batches with earlier sequence numbers."""
        self.failures = 0
        self.refusal = None
        sequence = batch.base_sequence
        if self.gap is not None and sequence is not None and _is_before(self.gap, sequence):
            self.gap = None

    def abandon(self) -> None:
        """Drop all batches, which the sender fails; later records start a new producer epoch."""
        self.ready.clear()
        self.open = None
        self.in_flight = self.failures = 0
        self.is_recovering = False
        self.blocked_until = 0.0
        self.begin_epoch()

    def begin_epoch(self) -> None:
        """Start a new producer epoch and renumber all queued batches (KIP-360). Nothing may be in flight."""
        self.producer_epoch += 1
        self.next_sequence = 0
        self.gap, self.needs_epoch = None, False
        for batch in self.ready:
            batch.base_sequence = None


def advance_sequence(sequence: int, count: int) -> int:
    """The sequence number `count` records later; 31 bits, wraps around to 0."""
    return (sequence + count) & 0x7FFFFFFF


def _is_before(first: int, second: int) -> bool:
    return 0 < (second - first) & 0x7FFFFFFF < 0x40000000
