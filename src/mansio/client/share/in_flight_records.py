"""In-flight records of a share consumer: the state of each leased record in the client, and the end of its lease.

    fetched ──► ready ──► delivered ──► acknowledged
                  │            │
                  └── lost ◄───┘   the lease ended, the record was leased again, or the broker refused

This is the only owner of a record's state; requests to brokers are sent by `ack_sender` and `share_fetcher`. Leases end
with the connection over which they were granted, unless the broker itself went down: such leases are *suspect* until
the broker has renewed them, and suspect records are not delivered.

Invariants:
* A record is in here once. It counts as held until it is acknowledged or lost.
* No record is delivered whose lease is over, as far as the client knows.
* The number of records fetched ahead is bounded by what the fetcher may request.
"""

from __future__ import annotations

import asyncio
import logging
from bisect import bisect_left, bisect_right
from collections import deque
from operator import itemgetter
from typing import TYPE_CHECKING, Final, NamedTuple

from mansio.client.consumer.batch_decoder import RECORD_BYTES
from mansio.client.share.leased import (
    ACKNOWLEDGED,
    ACKNOWLEDGING,
    GAP,
    HELD,
    LOST,
    NOT_RENEWING,
    RELEASE,
    RENEWAL_WAITS,
    Lease,
    Leased,
)
from mansio.errors import InvalidRecord
from mansio.net.earliest_timer import EarliestTimer
from mansio.wire.batch.isolation_filter import visible_batches
from mansio.wire.batch.record_reader import read_record_tuples

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from mansio.client.share.leased import AckTarget, ReceiveOptions
    from mansio.wire.batch.record_batch import BatchHeader
    from mansio.wire.topic_partition import TopicPartition

    Acquired = Sequence[tuple[int, int, int]]


logger = logging.getLogger(__name__)

_GATHER_PARTS: Final = 20

"""Leases are checked in steps of this fraction of their duration, so that one request renews those due at about the
same time."""


class InFlightRecords:
    """Records of one receiver. All methods run on the event loop."""

    def __init__(self, options: ReceiveOptions, on_capacity: Callable[[], None]) -> None:
        self._options = options
        self._on_capacity = on_capacity
        self._loop = asyncio.get_running_loop()
        self._reader = AcquiredRecordReader(options.batch_bytes_max)
        self._held: dict[TopicPartition, dict[int, Leased]] = {}
        self._nodes: dict[TopicPartition, int] = {}
        self._ready: deque[Leased] = deque()
        self._suspects: dict[TopicPartition, int] = {}
        """Partitions whose leases have to be verified -> the broker whose session ended."""
        self._earliest_timer = EarliestTimer(self._loop, self._look)
        self.ack_target: AckTarget
        self.renew: Callable[[Leased], None]
        self._is_stopped = False
        self.record_available = asyncio.Event()
        """Set when records may be available or the receiver failed."""
        self.state_changed = asyncio.Event()
        """Set when the state of a record changed."""
        self.lost_listeners: list[Callable[[Leased], None]] = []
        self.held = 0
        """Records that are neither acknowledged nor lost."""
        self.acknowledging = 0
        """Of these, records whose acknowledgement has no result yet."""
        self.undelivered = 0
        """Of these, records not delivered to the application yet."""
        self.undelivered_bytes = 0.0
        self.lost_count = 0
        """Number of records lost so far; unchanged means that none was lost meanwhile."""

    # -- fetched records --------

    def take(
        self,
        partition: TopicPartition,
        node: int,
        records: memoryview,
        acquired: Sequence[tuple[int, int, int]],
        lock_s: float,
    ) -> list[tuple[int, int, int]]:
        """Put down what a broker leased. Gives and raises what `AcquiredRecordReader.read` does, and has taken
        nothing if it raises."""
        found, holes = self._reader.read(partition, records, acquired)
        if not found:
            return holes
        held = self._held.setdefault(partition, {})
        self._nodes[partition] = node
        offsets = [message[2] for message in found]
        if held:
            for offset in [offset for offset in offsets if offset in held]:
                self.mark_lost(held[offset])  # its lease ended, otherwise it would not be delivered again
        now = self._loop.time()
        each_bytes = len(records) / len(found)
        extend_until = now + self._options.extend_max_ms / 1000
        lease = Lease(self.ack_target, now + lock_s, lock_s, extend_until, each_bytes)
        for message in found:
            message._lease = lease
        held.update(zip(offsets, found, strict=True))
        self._ready += found
        self.held += len(found)
        self.undelivered += len(found)
        self.undelivered_bytes += len(records)
        self._watch(lease)
        self.record_available.set()
        return holes

    # -- delivery --------

    def pop(self, most: int | None = None) -> list[Leased]:
        """The next messages for the application, at most `most`. Their leases are renewed from now on for up to
        `extend_max_ms`."""
        ready = self._ready
        if not ready:
            return []
        now = self._loop.time()
        extend_until = now + self._options.extend_max_ms / 1000
        found: list[Leased] = []
        freed_bytes = 0.0
        for _ in range(len(ready)):
            message = ready.popleft()
            if message._state != HELD:
                continue
            if message._is_suspect:
                ready.append(message)
                continue
            lease = message._lease
            if lease.deadline <= now:
                self.mark_lost(message)
                continue
            message._extend_until = extend_until
            freed_bytes += lease.each_bytes
            found.append(message)
            if len(found) == most:
                break
        if found:
            self.undelivered -= len(found)
            self.undelivered_bytes -= freed_bytes
            self._on_capacity()
        return found

    def pop_undelivered(self) -> list[Leased]:
        """All ready messages, for a caller that calls `deliver` for each."""
        taken, self._ready = list(self._ready), deque()
        return [message for message in taken if message._state == HELD]

    def deliver(self, message: Leased) -> bool:
        """Mark the message as delivered. False if it is not available any more."""
        now = self._loop.time()
        if message._state != HELD:
            return False
        if message._lease.deadline <= now:
            self.mark_lost(message)
            return False
        is_first = message._extend_until is None
        message._extend_until = now + self._options.extend_max_ms / 1000
        if is_first:
            self._count_delivered(message)
            self._on_capacity()
        return True

    async def wait_deliverable(self, message: Leased) -> bool:
        """`deliver`, once a suspect lease is verified. False as well after `stop`."""
        while message._is_suspect and message._state == HELD and not self._is_stopped:
            await self._state_change()
        return not self._is_stopped and self.deliver(message)

    def stop(self) -> None:
        """Deliver nothing more."""
        self._is_stopped = True
        self.record_available.set()
        self.state_changed.set()

    async def wait_acknowledged(self, message: Leased) -> None:
        """Wait for the result of an acknowledgement in flight."""
        while message._state == ACKNOWLEDGING:
            await self._state_change()

    async def _state_change(self) -> None:
        self.state_changed.clear()
        await self.state_changed.wait()

    # -- acknowledgement and loss --------

    @property
    def delivered(self) -> int:
        """Records that the application has and did not acknowledge yet."""
        return self.held - self.acknowledging - self.undelivered

    def start_acknowledging(self, messages: Sequence[Leased]) -> tuple[list[Leased], list[Leased]]:
        """Mark the held messages as being acknowledged. Returns them and the others, which are lost or already
        marked."""
        held: list[Leased] = []
        others: list[Leased] = []
        for message in messages:
            if message._state == HELD:
                message._state = ACKNOWLEDGING
                held.append(message)
            else:
                others.append(message)
        self.acknowledging += len(held)
        return held, others

    def acknowledged(self, partition: TopicPartition, messages: Sequence[Leased], kind: int) -> None:
        """The broker has stored the acknowledgement of these messages."""
        held = self._held.get(partition, {})
        for message in messages:
            offset = message[2]
            if message._state != ACKNOWLEDGING or message._is_suspect or held.get(offset) is not message:
                message._ack_type = kind
                self._leave(message, ACKNOWLEDGED)
                continue
            message._state, message._ack_type = ACKNOWLEDGED, kind
            del held[offset]
            self.held -= 1
            self.acknowledging -= 1
            if message._extend_until is None:
                self._count_delivered(message)
        self.state_changed.set()
        self._on_capacity()

    def mark_lost(self, message: Leased) -> None:
        """The lease is over."""
        if message._state in (HELD, ACKNOWLEDGING):
            self.lost_count += 1
            self._leave(message, LOST)
            for listener in self.lost_listeners:
                listener(message)

    def restore(self, message: Leased) -> None:
        """The acknowledgement was refused; the message is held as before."""
        if message._state == ACKNOWLEDGING:
            message._state = HELD
            self.acknowledging -= 1
            self.state_changed.set()

    def renewed(self, message: Leased, lock_s: float) -> None:
        """The broker has renewed the lease now, for `lock_s` seconds (0: as long as before)."""
        old = message._lease
        lock_s = lock_s or old.lock_s
        deadline = self._loop.time() + lock_s
        message._lease = Lease(old.ack_target, deadline, lock_s, old.extend_until, old.each_bytes)
        self._verified(message)
        self._watch(message._lease)

    def not_renewed(self, message: Leased) -> None:
        """The renewal was refused. A delivered message may still be acknowledged; others are lost."""
        if message._extend_until is None:
            self.mark_lost(message)
        message._extend_until = 0.0
        self._verified(message)

    def set_renewal(self, message: Leased, renewal: int) -> None:
        """State of a renewal: `NOT_RENEWING`, `RENEWAL_WAITS` or `RENEWAL_SENT`."""
        message._renewal = renewal

    def _verified(self, message: Leased) -> None:
        message._renewal = NOT_RENEWING
        if message._is_suspect:
            message._is_suspect = False
            self.state_changed.set()
            self.record_available.set()

    def _leave(self, message: Leased, state: int) -> None:
        partition = message[0], message[1]
        held = self._held.get(partition)  # type: ignore[call-overload]  # a TopicPartition is such a tuple
        if message._state == ACKNOWLEDGING:
            self.acknowledging -= 1
        message._state = state
        if held is not None and held.get(message[2]) is message:
            del held[message[2]]
            self.held -= 1
            if message._extend_until is None:
                self._count_delivered(message)
        if message._is_suspect:
            self._verified(message)
        self.state_changed.set()
        self._on_capacity()

    def _count_delivered(self, message: Leased) -> None:
        self.undelivered -= 1
        self.undelivered_bytes -= message._lease.each_bytes

    # -- ended sessions --------

    def session_ended(self, node: int) -> None:
        """The leases granted by this broker may be gone."""
        for partition, held in self._held.items():
            if self._nodes[partition] == node and held:
                self._suspects[partition] = node
                for message in held.values():
                    message._is_suspect = message._state == HELD
        self.state_changed.set()

    @property
    def suspects(self) -> dict[TopicPartition, int]:
        """Partitions whose leases have to be verified -> the broker whose session ended."""
        return self._suspects

    def verify(self, partition: TopicPartition, *, can_renew: bool) -> None:
        """Verify suspect leases by renewing them; without renewals, records that were not delivered are lost."""
        del self._suspects[partition]
        for message in list(self._held.get(partition, {}).values()):
            if not message._is_suspect:
                continue
            if not can_renew:
                self.not_renewed(message)
            elif message._renewal == NOT_RENEWING and message._state == HELD:
                message._renewal = RENEWAL_WAITS
                self.renew(message)

    # -- time --------

    def seconds_left(self, message: Leased) -> float:
        """Seconds until the lease ends, as far as known."""
        return message._lease.deadline - self._loop.time()

    def all_held(self) -> Iterator[Leased]:
        """Records that are neither acknowledged nor lost."""
        for held in self._held.values():
            yield from list(held.values())

    def close(self) -> None:
        """Mark all held records as lost."""
        self._earliest_timer.cancel()
        for message in list(self.all_held()):
            self.mark_lost(message)
        self._ready.clear()
        self.record_available.set()
        self.state_changed.set()

    def _watch(self, lease: Lease) -> None:
        extends = self._options.auto_extend
        self._earliest_timer.set(lease.deadline - lease.lock_s / 2 if extends else lease.deadline)

    def _look(self) -> None:
        """Renew leases that are due, mark records with ended leases as lost."""
        now = self._loop.time()
        next_time, step, over = float("inf"), float("inf"), 0
        for message in self.all_held():
            if message._state != HELD:
                continue
            lease = message._lease
            due = lease.deadline
            if due <= now:
                over += 1
                self.mark_lost(message)
                continue
            half = due - lease.lock_s / 2
            extend_until = lease.extend_until if message._extend_until is None else message._extend_until
            if self._options.auto_extend and message._renewal == NOT_RENEWING and half < extend_until:
                due = half
                if due <= now and not message._is_suspect:
                    message._renewal = RENEWAL_WAITS
                    self.renew(message)
                    due = lease.deadline
            next_time, step = min(next_time, due), min(step, lease.lock_s / _GATHER_PARTS)
        if over:
            logger.info("share group %s: %d leases ended", self._options.group, over)
        if next_time < float("inf"):
            self._earliest_timer.set(max(next_time, now + step))


def contiguous_runs(messages: Sequence[Leased]) -> list[list[Leased]]:
    """Runs of messages with consecutive offsets and equal delivery counts."""
    runs: list[list[Leased]] = []
    run: list[Leased] = []
    topic, partition, expected, count = "", -1, -1, 0
    for message in messages:
        offset = message[2]
        if (
            offset != expected
            or message.delivery_count != count
            or message[1] != partition
            or message[0] != topic
        ):
            run = []
            runs.append(run)
            topic, partition, count = message[0], message[1], message.delivery_count
        run.append(message)
        expected = offset + 1
    return runs


KEPT_BYTES_MAX: Final = 8 << 20


class _UnreadBatch(NamedTuple):
    """Ascending decoded records of one batch that were not leased yet. The CRC identifies the batch."""

    base_offset: int
    crc: int
    size: int
    rows: list[Leased]


class AcquiredRecordReader:
    """Decodes the records of share fetches.

    A broker returns whole batches, of which only some records may be leased, and returns the same batch again for the
    next ones. The decoded, not yet leased records are kept, so that a large batch is decoded once and not per fetch:
    one batch per partition, and `KEPT_BYTES_MAX` of batches in all.
    """

    def __init__(self, batch_bytes_max: int) -> None:
        self._batch_bytes_max = batch_bytes_max
        self._unread_batches: dict[TopicPartition, _UnreadBatch] = {}
        self._kept_bytes = 0

    def read(
        self, partition: TopicPartition, records: memoryview, acquired: Acquired
    ) -> tuple[list[Leased], list[tuple[int, int, int]]]:
        """The acquired records (first offset, last, delivery count), and the ranges without record, each with its
        acknowledgement: `GAP` where the log has no record (after compaction), `RELEASE` where the bytes are missing.

        Raises `CorruptMessage`, `InvalidRecord`, `UnsupportedCompression` for records that cannot be decoded.
        """
        firsts = [first for first, _, _ in acquired]
        last_acquired = acquired[-1][1]
        found: list[Leased] = []
        end = -1
        for position, header, is_visible in visible_batches(
            records, partition, firsts[0], read_committed=False
        ):
            end = header.last_offset
            if not is_visible or header.base_offset > last_acquired:
                continue
            rows = self._rows(partition, header, records[position : position + header.size], firsts[0])
            if rows:
                begin = max(bisect_right(firsts, rows[0].offset) - 1, 0)
                _pick(rows, acquired[begin : bisect_right(firsts, header.last_offset)], found)
            self._keep(partition, header, rows, last_acquired)
        if len(found) == sum(last - first + 1 for first, last, _ in acquired):
            return found, []
        return found, _holes([message.offset for message in found], acquired, end)

    def _rows(
        self, partition: TopicPartition, header: BatchHeader, batch: memoryview, first: int
    ) -> list[Leased]:
        """Ascending records of a batch from `first` on; earlier ones may be included."""
        unread = self._unread_batches.get(partition)
        is_kept = unread is not None and (unread.base_offset, unread.crc) == (header.base_offset, header.crc)
        if unread is not None and is_kept and unread.rows[0].offset <= first:
            return unread.rows[bisect_left(unread.rows, first, key=_offset) :]
        if header.codec and header.record_count * RECORD_BYTES > self._batch_bytes_max:
            raise InvalidRecord(
                f"{partition.topic}-{partition.partition} at offset {header.base_offset}: {header.record_count} records"
                f" in one batch are more than batch_bytes_max ({self._batch_bytes_max}) allows"
            )
        limit = max(header.size, self._batch_bytes_max)
        return read_record_tuples(batch, Leased, *partition, output_bytes_max=limit)

    def _keep(
        self, partition: TopicPartition, header: BatchHeader, rows: list[Leased], last_acquired: int
    ) -> None:
        old = self._unread_batches.pop(partition, None)
        if old is not None:
            self._kept_bytes -= old.size
        unread = rows[bisect_right(rows, last_acquired, key=_offset) :]
        if not unread or header.size > KEPT_BYTES_MAX:
            return
        if self._kept_bytes + header.size > KEPT_BYTES_MAX:
            self._unread_batches.clear()
            self._kept_bytes = 0
        self._unread_batches[partition] = _UnreadBatch(header.base_offset, header.crc, header.size, unread)
        self._kept_bytes += header.size


_offset = itemgetter(2)


def _pick(rows: list[Leased], acquired: Acquired, found: list[Leased]) -> None:
    """Add the acquired rows, each with the delivery count of its range."""
    at = 0
    for first, last, count in acquired:
        at = bisect_left(rows, first, at, key=_offset)
        end = bisect_right(rows, last, at, key=_offset)
        picked = rows[at:end]
        if count != 1:
            for message in picked:
                message.delivery_count = count
        found += picked
        at = end


def _holes(offsets: Sequence[int], acquired: Acquired, end: int) -> list[tuple[int, int, int]]:
    """The acquired ranges without records. `end`: the last offset read."""
    holes: list[tuple[int, int, int]] = []
    at = 0
    for first, last, _ in acquired:
        expected = first
        while at < len(offsets) and offsets[at] <= last:
            if offsets[at] > expected:
                holes.append((expected, offsets[at] - 1, GAP))
            expected = offsets[at] + 1
            at += 1
        if expected <= min(last, end):
            holes.append((expected, min(last, end), GAP))
        if (missing := max(expected, end + 1)) <= last:
            holes.append((missing, last, RELEASE))
    return holes
