"""Records on their way: gathered into batches, one queue per partition.

Owns the memory of the producer. A record enters the open batch of its partition; the batch is sealed when it is full
or when it is its turn; a sealed batch keeps its place and (with idempotence) its sequence numbers through every
retry, so that the order of a partition is the order of the calls.

Always true: `buffered_bytes` is the sum of the sizes of all batches that are not settled; a batch is settled once;
sequence numbers of a queue are handed out in order, without a gap that the queue does not know of (`gap`); a number
that the broker may have stored is not given to other records.
"""

from __future__ import annotations

import asyncio
from collections import deque
from functools import partial
from itertools import repeat
from typing import TYPE_CHECKING, Protocol

from mansio.client.types import RecordMetadata
from mansio.errors import InvalidRecord, MansioError

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping, Sequence

    from mansio.client.producer.produce_request import ProducerIdentity, Route
    from mansio.client.types import Headers

    Stamped = tuple[int, bytes | None, bytes | None, Headers]

RECORD_OVERHEAD_BYTES = 24
"""What a record's own lengths, deltas and bookkeeping cost at most, about."""


_new_metadata = partial(tuple.__new__, RecordMetadata)


class Waiter(Protocol):
    """Who waits for a batch to be settled: a future, or something with these two methods of one."""

    def done(self) -> bool:
        """Whether it waits no more."""

    def set_result(self, result: None, /) -> None:
        """The batch is settled, or was split: its halves are to be waited for then."""


class Batch:
    """Records of one partition that stand or fall together.

    Kept as columns, because most records are a value and nothing else: a million of them need no object each.
    """

    __slots__ = (
        "base_offset",
        "base_sequence",
        "created",
        "error",
        "halves",
        "is_completed",
        "log_append_time_ms",
        "may_be_stored",
        "producer_epoch",
        "queue",
        "record_errors",
        "rest",
        "size",
        "stamps",
        "values",
        "waiters",
    )

    def __init__(self, queue: PartitionQueue, created: float) -> None:
        self.queue = queue
        self.created = created
        self.stamps: list[int] = []
        """Of each record its timestamp, in ms."""
        self.values: list[bytes | None] = []
        """And its value."""
        self.rest: dict[int, tuple[bytes | None, Headers]] = {}
        """By index: the key and headers of those that are more than a value, or whose value is None."""
        self.size = 0
        self.base_sequence: int | None = None
        self.producer_epoch = -1
        self.may_be_stored = False
        """Whether an attempt ended without an answer, so that the broker may have the batch already."""
        self.halves: tuple[Batch, Batch] | None = None
        self.is_completed = False
        self.base_offset = -1
        self.log_append_time_ms = -1
        self.error: MansioError | None = None
        self.record_errors: Mapping[int, str] = {}
        self.waiters: list[Waiter] = []

    def add(self, stamp: int, key: bytes | None, value: bytes | None, headers: Headers) -> None:
        """Put a record at the end; its size is the caller's to count."""
        if key is not None or headers or value is None:
            self.rest[len(self.values)] = key, headers
        self.stamps.append(stamp)
        self.values.append(value)

    def add_values(self, stamp: int, values: Sequence[bytes]) -> None:
        """Put plain values at the end; their size is the caller's to count."""
        self.stamps += [stamp] * len(values)
        self.values += values

    def rows(self) -> list[Stamped]:
        """Each record as (timestamp_ms, key, value, headers)."""
        rest, nothing = self.rest, (None, ())
        stamped = enumerate(zip(self.stamps, self.values, strict=True))
        return [
            (stamp, (more := rest.get(index, nothing))[0], value, more[1])
            for index, (stamp, value) in stamped
        ]

    def complete(self) -> None:
        """Say the outcome to whoever waits. The outcome's fields are set already."""
        self.is_completed = True
        waiters, self.waiters = self.waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def wait_completed(self) -> None:
        """Wait for the outcome. Cancelling the wait does not take the records back."""
        while self.halves is not None or not self.is_completed:
            if self.halves is not None:
                await self.halves[0].wait_completed()
                await self.halves[1].wait_completed()
                return
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self.waiters.append(waiter)
            await waiter

    def outcome(self, index: int) -> RecordMetadata:
        """Where the record at `index` of a settled batch is; raises its error."""
        if self.halves is not None:
            left, right = self.halves
            return (
                left.outcome(index) if index < len(left.values) else right.outcome(index - len(left.values))
            )
        if self.error is not None:
            raise self._error_of(index)
        timestamp_ms = self.stamps[index] if self.log_append_time_ms < 0 else self.log_append_time_ms
        offset = self.base_offset + index if self.base_offset >= 0 else -1
        return _new_metadata((self.queue.topic, self.queue.partition, offset, timestamp_ms))

    def outcomes(self, begin: int, end: int) -> list[RecordMetadata]:
        """`outcome` of each record from `begin` to before `end`."""
        if self.halves is not None or self.error is not None or self.base_offset < 0:
            return [self.outcome(index) for index in range(begin, end)]
        stamps = self.stamps[begin:end] if self.log_append_time_ms < 0 else repeat(self.log_append_time_ms)
        offsets = range(self.base_offset + begin, self.base_offset + end)
        return list(
            map(_new_metadata, zip(repeat(self.queue.topic), repeat(self.queue.partition), offsets, stamps))
        )

    def _error_of(self, index: int) -> MansioError:
        """A fresh error per record, as several tasks may raise it; a broker may name the bad records (KIP-467)."""
        if self.error is None:
            raise AssertionError("a batch without an error has none to give")
        if not self.record_errors:
            return type(self.error)(str(self.error))
        if index in self.record_errors:
            return InvalidRecord(self.record_errors[index] or str(self.error))
        return InvalidRecord("another record of the same batch was refused")

    def split(self) -> tuple[Batch, Batch]:
        """Two halves that stand for this batch from now on, with its sequence numbers."""
        middle = len(self.values) // 2
        left, right = Batch(self.queue, self.created), Batch(self.queue, self.created)
        left.stamps, right.stamps = self.stamps[:middle], self.stamps[middle:]
        left.values, right.values = self.values[:middle], self.values[middle:]
        for index, more in self.rest.items():
            half, place = (left, index) if index < middle else (right, index - middle)
            half.rest[place] = more
        left.size, right.size = self.size // 2, self.size - self.size // 2
        left.producer_epoch = right.producer_epoch = self.producer_epoch
        if self.base_sequence is not None:
            left.base_sequence = self.base_sequence
            right.base_sequence = advance_sequence(self.base_sequence, middle)
        self.halves = (left, right)
        self.complete()
        return self.halves


class Delivery:
    """One record's way to the broker. Await it for the `RecordMetadata`; its typed error is raised there."""

    __slots__ = ("_index", "batch")

    def __init__(self, batch: Batch, index: int) -> None:
        self.batch = batch
        self._index = index

    def __await__(self) -> Generator[object, None, RecordMetadata]:
        if not self.done():
            yield from self.batch.wait_completed().__await__()
        return self.batch.outcome(self._index)

    def add_waiter(self, waiter: Waiter) -> None:
        """Let `waiter.set_result` know when the outcome is known, or the batch was split; for a delivery that is not
        done."""
        self.batch.waiters.append(waiter)

    def done(self) -> bool:
        """Whether the outcome is known."""
        return _is_done(self.batch)

    def result(self) -> RecordMetadata:
        """The outcome of a delivery that is done; raises its typed error, or `RuntimeError` if it is not done."""
        if not self.done():
            raise RuntimeError("the record is still on its way")
        return self.batch.outcome(self._index)


def _is_done(batch: Batch) -> bool:
    if batch.halves is not None:
        return all(_is_done(half) for half in batch.halves)
    return batch.is_completed


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
        """How many waited for the last batch that was settled."""
        self.route: Route | None = None
        """How its last request was made; its writer's own."""
        self.is_recovering = False
        """After a failure: one batch at a time, until those that were under way are through."""
        self.blocked_until = 0.0
        self.failures = 0
        self.refusal: MansioError | None = None
        """Why its last batch was sent back, until one is stored: for whoever has waited in vain."""
        self.identity: ProducerIdentity | None = None
        """Whose numbers these are: what was numbered goes again under the same producer id."""
        self.producer_epoch = 0
        self.next_sequence = 0
        self.gap: int | None = None
        """The number of the last batch that was given up; the broker may not accept those behind it in this epoch."""

        self.needs_epoch = False
        """The broker did not accept them: a new epoch begins as soon as nothing is in flight."""

    def seal(self) -> None:
        """Close the open batch: it waits for its turn."""
        if self.open is not None:
            self.ready.append(self.open)
            self.open = None

    def number(self, batch: Batch) -> None:
        """Give a batch its sequence numbers, the first time it is sent."""
        if batch.base_sequence is None:
            batch.base_sequence = self.next_sequence
            batch.producer_epoch = self.producer_epoch
            self.next_sequence = advance_sequence(self.next_sequence, len(batch.values))

    def requeue(self, batch: Batch) -> None:
        """A batch that has to be sent again: before all that was numbered after it."""
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
        """Whether a batch numbered before this one waits to be sent again."""
        return any(
            other.base_sequence is not None
            and batch.base_sequence is not None
            and _is_before(other.base_sequence, batch.base_sequence)
            for other in self.ready
        )

    def give_up(self, batch: Batch) -> None:
        """A batch will not be sent again. If it is known not to be stored and was the last to be numbered, its
        numbers are free again; otherwise there is a gap, perhaps."""
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
        """The broker has a batch, and so all that were numbered before it."""
        self.failures = 0
        self.refusal = None
        sequence = batch.base_sequence
        if self.gap is not None and sequence is not None and _is_before(self.gap, sequence):
            self.gap = None

    def abandon(self) -> None:
        """Forget all that waits or is in flight, which its sender fails; what comes next begins a new epoch."""
        self.ready.clear()
        self.open = None
        self.in_flight = self.failures = 0
        self.is_recovering = False
        self.blocked_until = 0.0
        self.begin_epoch()

    def begin_epoch(self) -> None:
        """Number all that waits anew, in a new producer epoch (KIP-360). Nothing may be in flight."""
        self.producer_epoch += 1
        self.next_sequence = 0
        self.gap, self.needs_epoch = None, False
        for batch in self.ready:
            batch.base_sequence = None


def advance_sequence(sequence: int, count: int) -> int:
    """Sequence numbers are 31 bits and begin again at 0."""
    return (sequence + count) & 0x7FFFFFFF


def _is_before(first: int, second: int) -> bool:
    return 0 < (second - first) & 0x7FFFFFFF < 0x40000000
