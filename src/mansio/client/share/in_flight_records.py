"""In-flight records of a share consumer: the state of each leased record in the client, and the time of its lease.

    fetched ──► ready ──► delivered ──► acknowledged
                  │            │
                  └── lost ◄───┘   the lease ended, the record was leased again, or the broker refused

Only this module changes a record's state; `ack_sender` and `share_fetcher` send the requests to brokers. The leases
that a broker granted over a connection end with that connection, unless the broker itself went down. The client cannot
know which of both happened: the leases are *suspect*, and their records are not delivered, until the broker has renewed
them.

Invariants:
* `InFlightRecords` holds a record once, until it is acknowledged or lost.
* No record is delivered after the client's estimate of the end of its lease.
* In a group with order no record that `pop` returns has passed an earlier one of its partition that is suspect or was
  lost before delivery: it waits for the renewal of a suspect one, and is released after the loss of one, so that the
  broker can lease both again in their order.
* The number of records fetched ahead is bounded by what the fetcher may request.
"""

from __future__ import annotations

import asyncio
import logging
from bisect import bisect_left, bisect_right
from collections import deque
from operator import itemgetter
from typing import TYPE_CHECKING, Final, NamedTuple

from mansio.client.share.leased import (
    ACKNOWLEDGED,
    ACKNOWLEDGING,
    GAP,
    HELD,
    LOST,
    NO_RENEWAL,
    REJECT,
    RELEASE,
    RENEWAL_QUEUED,
    Lease,
    Leased,
)
from mansio.net.earliest_timer import EarliestTimer
from mansio.wire.batch.compression import estimate_decompressed_bytes
from mansio.wire.batch.isolation_filter import visible_batches
from mansio.wire.batch.priority_header import PRIORITY_HEADER
from mansio.wire.batch.record_batch import HEADER_BYTES
from mansio.wire.batch.unreadable import UnreadableOffsets, read_or_skip

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from mansio.client.share.leased import AckTarget, ReceiveOptions
    from mansio.wire.batch.record_batch import BatchHeader
    from mansio.wire.topic_partition import TopicPartition

    Acquired = Sequence[tuple[int, int, int]]


logger = logging.getLogger(__name__)

_CHECKS_PER_LEASE_MAX: Final = 20

"""Maximum number of checks during the shortest lease. Rare checks find several leases that are due at about the same
time, so that one request renews them."""


_HEADERS = Leased._fields.index("headers")
_RANKS = {b"high": 0, b"low": 2}
_RANK_NORMAL = 1


def _rank(message: Leased) -> int:
    """Return the position of a record's priority in the order of delivery."""
    for name, value in message.headers:
        if name == PRIORITY_HEADER:
            return _RANKS.get(value or b"", _RANK_NORMAL)
    return _RANK_NORMAL


class InFlightRecords:
    """Leased records of one receiver. All methods run on the event loop.

    `on_capacity` is called when fewer records are held, so that the receiver may fetch more. `on_order_needed` is
    called when a record was lost before delivery while it is unknown whether the group has an order; `set_order`
    answers.
    """

    def __init__(
        self, options: ReceiveOptions, on_capacity: Callable[[], None], on_order_needed: Callable[[], None]
    ) -> None:
        self._options = options
        self._on_capacity = on_capacity
        self._on_order_needed = on_order_needed
        self._has_order: bool | None = None
        self._loop = asyncio.get_running_loop()
        self._reader = AcquiredRecordReader(options.batch_bytes_max)
        self._held: dict[TopicPartition, dict[int, Leased]] = {}
        self._nodes: dict[TopicPartition, int] = {}
        self._ready: deque[Leased] = deque()
        self._suspect_partitions: dict[TopicPartition, int] = {}
        """Partition with suspect leases -> node id of the broker whose share session ended."""
        self._lost_undelivered: dict[tuple[str, int], int] = {}
        """Partition -> lowest offset lost before delivery. The later undelivered records are not released yet."""
        self._releasing: dict[tuple[str, int], list[Leased]] = {}
        """Partition -> records released by `release_after`, some of which may be acknowledged by now."""
        self._earliest_timer = EarliestTimer(self._loop, self._check_leases)
        self._ack_target: AckTarget | None = None
        self._is_stopped = False
        self.record_available = asyncio.Event()
        """Event that is set when records may be available or the receiver failed."""
        self.state_changed = asyncio.Event()
        """Event that is set when the state of a record changed."""
        self.lost_listeners: list[Callable[[Leased], None]] = []
        """Functions that are called with each record whose lease ended without acknowledgement."""
        self.held_count = 0
        """Number of records that are neither acknowledged nor lost."""
        self.acknowledging_count = 0
        """Number of held records whose acknowledgement has no result yet."""
        self.undelivered_count = 0
        """Number of held records that were not delivered to the application yet."""
        self.undelivered_bytes = 0.0
        self.lost_count = 0
        """Number of records lost since the start. If it is unchanged since an earlier time, no record was lost in
        between."""

    def acknowledge_with(self, target: AckTarget) -> None:
        """Renew leases with `target`, through which the application acknowledges the records, too."""
        self._ack_target = target

    @property
    def _target(self) -> AckTarget:
        assert self._ack_target is not None, "acknowledge_with is called before the first record"
        return self._ack_target

    # -- fetched records --------

    def add_acquired(
        self,
        partition: TopicPartition,
        node: int,
        records: memoryview,
        acquired: Sequence[tuple[int, int, int]],
        lease_s: float,
    ) -> list[WithoutRecords]:
        """Decode and add the records that broker `node` leased for `lease_s` seconds.

        Returns the acquired ranges without records and raises errors as `AcquiredRecordReader.read` does. If it raises,
        no record is added.
        """
        found, holes = self._reader.read(partition, records, acquired)
        if not found:
            return holes
        held = self._held.setdefault(partition, {})
        self._nodes[partition] = node
        offsets = [message[2] for message in found]
        if held:
            for offset in [offset for offset in offsets if offset in held]:
                self.mark_lost(
                    held[offset]
                )  # the broker leases a record again only after its lease has ended
        if self._lost_undelivered:
            self._release_after_lost()  # before the new leases, which it does not concern
        first_releasing = self._first_releasing(partition) if self._releasing else None
        now = self._loop.time()
        record_bytes = len(records) / len(found)
        extend_until = now + self._options.extend_max_ms / 1000
        is_chosen = self._options.lease_ms is not None
        lease = Lease(self._target, now + lease_s, lease_s, extend_until, record_bytes, is_chosen=is_chosen)
        for message in found:
            message._lease = lease
        held.update(zip(offsets, found, strict=True))
        self._ready += found
        if any(message[_HEADERS] for message in found):
            self._order_by_priority()
        self.held_count += len(found)
        self.undelivered_count += len(found)
        self.undelivered_bytes += len(records)
        self._set_timer(lease)
        self.record_available.set()
        if first_releasing is not None:  # the broker leased the new records before it handled the releases
            self.release_after(partition, first_releasing)
        return holes

    def _order_by_priority(self) -> None:
        """Order the records that were not delivered yet by priority: an answer has them in the order of their offsets,
        and earlier answers may have had records of lower priority."""
        ranks = [_rank(message) for message in self._ready]
        if len(set(ranks)) > 1:
            ranked = sorted(zip(ranks, range(len(ranks)), self._ready, strict=True))
            self._ready = deque(message for _, _, message in ranked)

    # -- delivery --------

    def pop(self, most: int | None = None) -> list[Leased]:
        """Remove and return the next messages for the application, at most `most` (None: all that are ready). Their
        leases are renewed for up to `extend_max_ms` from now on."""
        if self._lost_undelivered:
            self._release_after_lost()
        ready = self._ready
        if not ready:
            return []
        now = self._loop.time()
        extend_until = now + self._options.extend_max_ms / 1000
        found: list[Leased] = []
        kept: list[Leased] = []
        blocked: set[tuple[str, int]] = set(self._lost_undelivered)
        freed_bytes = 0.0
        while ready:
            message = ready.popleft()
            if message._state != HELD:
                continue
            if message._is_suspect or (blocked and message[:2] in blocked):
                kept.append(message)
                blocked.add(message[:2])
                continue
            lease = message._lease
            if lease.deadline_s <= now:
                self.mark_lost(message)
                blocked.add(message[:2])
                continue
            message._extend_until_s = extend_until
            freed_bytes += lease.record_bytes
            found.append(message)
            if len(found) == most:
                break
        ready.extendleft(reversed(kept))
        if found:
            self.undelivered_count -= len(found)
            self.undelivered_bytes -= freed_bytes
            self._on_capacity()
        return found

    def pop_undelivered(self) -> list[Leased]:
        """Remove and return all ready messages. The caller calls `deliver` for each of them later."""
        taken, self._ready = list(self._ready), deque()
        return [message for message in taken if message._state == HELD]

    def deliver(self, message: Leased) -> bool:
        """Mark the message as delivered to the application. Returns False if it is lost or acknowledged."""
        now = self._loop.time()
        if message._state != HELD:
            return False
        if message._lease.deadline_s <= now:
            self.mark_lost(message)
            return False
        is_first = message._extend_until_s is None
        message._extend_until_s = now + self._options.extend_max_ms / 1000
        if is_first:
            self._subtract_undelivered(message)
            self._on_capacity()
        return True

    async def deliver_when_verified(self, message: Leased) -> bool:
        """Wait until the lease of the message is not suspect, then mark the message as delivered. Returns False if the
        message is lost or acknowledged, or after `stop`."""
        while message._is_suspect and message._state == HELD and not self._is_stopped:
            await self._wait_state_change()
        return not self._is_stopped and self.deliver(message)

    def stop(self) -> None:
        """Stop delivering messages, and wake all waiters."""
        self._is_stopped = True
        self.record_available.set()
        self.state_changed.set()

    async def wait_acknowledged(self, message: Leased) -> None:
        """Wait until the acknowledgement of the message, if one is in flight, has a result."""
        while message._state == ACKNOWLEDGING:
            await self._wait_state_change()

    async def _wait_state_change(self) -> None:
        self.state_changed.clear()
        await self.state_changed.wait()

    # -- acknowledgement and loss --------

    @property
    def delivered_count(self) -> int:
        """Number of records that were delivered to the application and that it has not acknowledged yet."""
        return self.held_count - self.acknowledging_count - self.undelivered_count

    def start_acknowledging(self, messages: Sequence[Leased]) -> tuple[list[Leased], list[Leased]]:
        """Mark the held messages among `messages` as being acknowledged. Returns (the messages marked now, the other
        messages, which are lost or were acknowledged before)."""
        held: list[Leased] = []
        others: list[Leased] = []
        for message in messages:
            if message._state == HELD:
                message._state = ACKNOWLEDGING
                held.append(message)
            else:
                others.append(message)
        self.acknowledging_count += len(held)
        return held, others

    def on_acknowledged(self, partition: TopicPartition, messages: Sequence[Leased], ack_type: int) -> None:
        """Mark messages as acknowledged: the broker has stored their acknowledgement of type `ack_type`."""
        held = self._held.get(partition, {})
        for message in messages:
            offset = message[2]
            if message._state != ACKNOWLEDGING or message._is_suspect or held.get(offset) is not message:
                message._ack_type = ack_type
                self._remove(message, ACKNOWLEDGED)
                continue
            message._state, message._ack_type = ACKNOWLEDGED, ack_type
            del held[offset]
            self.held_count -= 1
            self.acknowledging_count -= 1
            if message._extend_until_s is None:
                self._subtract_undelivered(message)
        self.state_changed.set()
        self._on_capacity()

    def mark_lost(self, message: Leased) -> None:
        """Mark a message as lost, because its lease has ended, and call the lost listeners."""
        if message._state in (HELD, ACKNOWLEDGING):
            self.lost_count += 1
            if message._extend_until_s is None:
                self._note_lost_undelivered(message)
            self._remove(message, LOST)
            for listener in self.lost_listeners:
                listener(message)

    def _note_lost_undelivered(self, message: Leased) -> None:
        if self._has_order is False:
            return
        if not self._lost_undelivered:  # other records of the partition may be marked as lost with this one
            self._loop.call_soon(self._release_after_lost)
        partition, offset = message[:2], message[2]
        self._lost_undelivered[partition] = min(self._lost_undelivered.get(partition, offset), offset)

    def _release_after_lost(self) -> None:
        """Release the undelivered records behind those that were lost before delivery, which the application would
        otherwise get first. In a group without order they stay. While that is unknown, they are not delivered."""
        if self._has_order is None and self._lost_undelivered:
            self._on_order_needed()
            return
        lost, self._lost_undelivered = self._lost_undelivered, {}
        for partition, offset in lost.items():
            self.release_after(partition, offset)

    def set_order(self, *, has_order: bool) -> None:
        """Set whether the broker leases the records of this group in an order (`mansio.share.order`)."""
        self._has_order = has_order
        if not has_order:
            self._lost_undelivered.clear()
        self._release_after_lost()
        self.record_available.set()

    def release_after(self, partition: tuple[str, int], offset: int) -> None:
        """Release the undelivered records of a partition above an offset, and those that the broker leases before it
        has handled these releases."""
        held = self._held.get(partition, {})  # type: ignore[call-overload]  # a TopicPartition is such a tuple
        later = [
            each
            for each in held.values()
            if each[2] > offset and each._state == HELD and each._extend_until_s is None
        ]
        if later:
            self._releasing.setdefault(partition, []).extend(later)
            for message in later:
                self._target.release(message)
        self.record_available.set()

    def _first_releasing(self, partition: TopicPartition) -> int | None:
        """Return the lowest offset of the partition whose release is not acknowledged; None if there is none."""
        left = {
            place: [each for each in messages if each._state == ACKNOWLEDGING]
            for place, messages in self._releasing.items()
        }
        self._releasing = {place: messages for place, messages in left.items() if messages}
        return min((each[2] for each in left.get(partition, ())), default=None)

    def restore(self, message: Leased) -> None:
        """Mark a message as held again, because the broker refused its acknowledgement."""
        if message._state == ACKNOWLEDGING:
            message._state = HELD
            self.acknowledging_count -= 1
            self.state_changed.set()

    def on_renewed(self, message: Leased, lease_s: float, *, is_chosen: bool = False) -> None:
        """Record that the broker has renewed the lease of a message for `lease_s` seconds from now (0: for the same
        duration as before). `is_chosen`: this member has chosen that duration."""
        old = message._lease
        if not lease_s or (old.is_chosen and not is_chosen):
            lease_s = old.lease_s
        deadline = self._loop.time() + lease_s
        message._lease = Lease(
            old.ack_target,
            deadline,
            lease_s,
            old.extend_until_s,
            old.record_bytes,
            is_chosen=is_chosen or old.is_chosen,
        )
        self._end_renewal(message)
        self._set_timer(message._lease)

    def on_not_renewed(self, message: Leased) -> None:
        """Record that the lease of a message is not renewed. The application may still acknowledge a delivered message;
        an undelivered one is marked as lost."""
        if message._extend_until_s is None:
            self.mark_lost(message)
        message._extend_until_s = 0.0
        self._end_renewal(message)

    def set_renewal_state(self, message: Leased, renewal: int) -> None:
        """Set the renewal state of a message: `NO_RENEWAL`, `RENEWAL_QUEUED` or `RENEWAL_SENT`."""
        message._renewal_state = renewal

    def _end_renewal(self, message: Leased) -> None:
        message._renewal_state = NO_RENEWAL
        if message._is_suspect:
            message._is_suspect = False
            self.state_changed.set()
            self.record_available.set()

    def _remove(self, message: Leased, state: int) -> None:
        partition = message[0], message[1]
        held = self._held.get(partition)  # type: ignore[call-overload]  # a TopicPartition is such a tuple
        if message._state == ACKNOWLEDGING:
            self.acknowledging_count -= 1
        message._state = state
        if held is not None and held.get(message[2]) is message:
            del held[message[2]]
            self.held_count -= 1
            if message._extend_until_s is None:
                self._subtract_undelivered(message)
        if message._is_suspect:
            self._end_renewal(message)
        self.state_changed.set()
        self._on_capacity()

    def _subtract_undelivered(self, message: Leased) -> None:
        self.undelivered_count -= 1
        self.undelivered_bytes -= message._lease.record_bytes

    # -- ended sessions --------

    def on_session_ended(self, node: int) -> None:
        """Mark the leases that broker `node` granted as suspect, because the share session with it has ended."""
        for partition, held in self._held.items():
            if self._nodes[partition] == node and held:
                self._suspect_partitions[partition] = node
                for message in held.values():
                    message._is_suspect = message._state == HELD
        self.state_changed.set()

    @property
    def suspect_partitions(self) -> dict[TopicPartition, int]:
        """Partition with suspect leases -> node id of the broker whose share session ended."""
        return self._suspect_partitions

    def renew_suspect_leases(self, partition: TopicPartition, *, can_renew: bool) -> None:
        """Request the renewal of all suspect leases of a partition, to learn whether they still exist. If the broker
        cannot renew leases, undelivered records are marked as lost."""
        del self._suspect_partitions[partition]
        for message in list(self._held.get(partition, {}).values()):
            if not message._is_suspect:
                continue
            if not can_renew:
                self.on_not_renewed(message)
            elif message._renewal_state == NO_RENEWAL and message._state == HELD:
                message._renewal_state = RENEWAL_QUEUED
                self._target.renew_in_background(message)

    # -- time --------

    def seconds_left(self, message: Leased) -> float:
        """Return the estimated number of seconds until the lease of the message ends."""
        return message._lease.deadline_s - self._loop.time()

    def all_unfinished(self) -> Iterator[Leased]:
        """Yield all records that are neither acknowledged nor lost."""
        for held in self._held.values():
            yield from list(held.values())

    def close(self) -> None:
        """Mark all held records as lost."""
        self._earliest_timer.cancel()
        for message in list(self.all_unfinished()):
            self.mark_lost(message)
        self._lost_undelivered.clear()
        self._releasing.clear()
        self._ready.clear()
        self.record_available.set()
        self.state_changed.set()

    def _set_timer(self, lease: Lease) -> None:
        extends = self._options.auto_extend
        self._earliest_timer.set(lease.deadline_s - lease.lease_s / 2 if extends else lease.deadline_s)

    def _check_leases(self) -> None:
        """Request the renewal of leases of which half has passed, and mark records whose lease has ended as lost."""
        now = self._loop.time()
        next_time, step, over = float("inf"), float("inf"), 0
        for message in self.all_unfinished():
            if message._state != HELD:
                continue
            lease = message._lease
            due = lease.deadline_s
            if due <= now:
                over += 1
                self.mark_lost(message)
                continue
            half = due - lease.lease_s / 2
            extend_until = (
                lease.extend_until_s if message._extend_until_s is None else message._extend_until_s
            )
            if self._options.auto_extend and message._renewal_state == NO_RENEWAL and half < extend_until:
                due = half
                if due <= now and not message._is_suspect:
                    message._renewal_state = RENEWAL_QUEUED
                    self._target.renew_in_background(message)
                    due = lease.deadline_s
            next_time, step = min(next_time, due), min(step, lease.lease_s / _CHECKS_PER_LEASE_MAX)
        if over:
            logger.info("share group %s: %d leases ended", self._options.group, over)
        if next_time < float("inf"):
            self._earliest_timer.set(max(next_time, now + step))


def contiguous_runs(messages: Sequence[Leased]) -> list[list[Leased]]:
    """Group messages into lists of messages of one partition with consecutive offsets and equal delivery counts."""
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


UNREAD_BYTES_MAX: Final = 8 << 20
"""Maximum total size, in bytes, of the records that `AcquiredRecordReader` keeps, of all batches but one."""
OPEN_BATCHES_MAX: Final = 4
"""Maximum number of batches of a partition that are kept: each priority has one of which some records are leased."""


class WithoutRecords(NamedTuple):
    """Acquired offsets that have no message, both inclusive, and how to acknowledge them: `GAP` where the log has no
    record (after compaction), `RELEASE` where the response lacks the bytes of the record, `REJECT`, with the reason,
    where the record cannot be read."""

    first: int
    last: int
    ack_type: int
    reason: str = ""


class _OpenBatch:
    """A batch of which the broker has leased only some records to this member. Base offset and CRC identify it.

    `next_offset`: records below are not kept. `rows`: decoded records from there on; `parts` has those behind them.
    """

    __slots__ = (
        "base_offset",
        "crc",
        "next_offset",
        "parts",
        "remaining",
        "rows",
        "size_bytes",
        "unreadable",
    )

    def __init__(self, header: BatchHeader, parts: Iterator[list[Leased] | UnreadableOffsets]) -> None:
        self.base_offset = self.next_offset = header.base_offset
        self.crc = header.crc
        self.parts = parts
        self.remaining = header.record_count
        """Number of records that are not decoded: the decompressed batch is kept for them."""
        self.rows: list[Leased] = []
        self.size_bytes = 0
        self.unreadable: UnreadableOffsets | None = None

    def read(self, first: int, last: int) -> list[Leased]:
        """Return the records with offsets from `first` to `last`. The ones before `first` are forgotten."""
        self.rows = self.rows[bisect_left(self.rows, first, key=_get_offset) :]
        is_known = True
        while not self.rows or self.rows[-1].offset < last:
            part = next(self.parts, None)
            if part is None:
                break
            if isinstance(part, UnreadableOffsets):
                self.unreadable = part
                self.remaining = 0
                break
            is_known = False
            self.remaining -= len(part)
            self.rows += part[bisect_left(part, first, key=_get_offset) :]
        end = bisect_right(self.rows, last, key=_get_offset)
        found, self.rows = self.rows[:end], self.rows[end:]
        self.next_offset = last + 1
        if not is_known or not self.rows:
            self.size_bytes = _size_bytes(self.rows)
        return found


class AcquiredRecordReader:
    """Decodes the records of share fetches.

    A broker returns whole batches. If it has leased only some records of a batch, it returns the same batch again with
    the lease of the other records. The reader keeps decoded records that are not leased yet, so that it decodes a large
    batch once and not once per fetch. It keeps at most `OPEN_BATCHES_MAX` batches per partition: one of any size, of
    the others at most `UNREAD_BYTES_MAX` bytes in all.
    """

    def __init__(self, batch_bytes_max: int) -> None:
        self._batch_bytes_max = batch_bytes_max
        self._open_batches: dict[TopicPartition, dict[int, _OpenBatch]] = {}
        """By base offset, the one that was read last at the end."""
        self._large: tuple[TopicPartition, _OpenBatch] | None = None

    def read(
        self, partition: TopicPartition, records: memoryview, acquired: Acquired
    ) -> tuple[list[Leased], list[WithoutRecords]]:
        """Decode the acquired records of a response.

        `acquired`: ranges (first offset, last offset, delivery count). Returns the records, and the acquired ranges
        without records. Raises `CorruptMessage` for a wrong CRC or order of offsets.
        """
        firsts = [first for first, _, _ in acquired]
        found: list[Leased] = []
        unreadable: list[UnreadableOffsets] = []
        end = -1
        for position, header, is_visible in visible_batches(
            records, partition, firsts[0], read_committed=False
        ):
            end = header.last_offset
            begin = max(bisect_right(firsts, header.base_offset) - 1, 0)
            if acquired[begin][1] < header.base_offset:
                begin += 1
            behind = bisect_right(firsts, end, begin)
            if not is_visible or begin == behind:
                continue
            first = max(firsts[begin], header.base_offset)
            last = min(acquired[behind - 1][1], end)
            batch = self._take(partition, header, records[position : position + header.size], first)
            rows = batch.read(first, last)
            if rows:
                _append_acquired(rows, acquired[begin:behind], found)
            if batch.unreadable is not None:
                unreadable.append(batch.unreadable)
            if end > last:
                self._keep(partition, batch)
        if len(found) == sum(last - first + 1 for first, last, _ in acquired):
            return found, []
        holes = _ranges_without_records([message.offset for message in found], acquired, end)
        return found, _with_rejections(holes, unreadable)

    def _take(
        self, partition: TopicPartition, header: BatchHeader, batch: memoryview, first: int
    ) -> _OpenBatch:
        """Return a batch to read from offset `first` on, which is not kept any more."""
        known = None
        kept = self._open_batches.get(partition)
        if kept is not None:
            known = kept.pop(header.base_offset, None)
            if not kept:
                del self._open_batches[partition]
        if self._large is not None and self._large[0] == partition:
            if self._large[1].base_offset == header.base_offset:
                known = self._large[1]
            self._large = None
        if known is not None and known.crc == header.crc and known.next_offset <= first:
            return known
        if self._large is not None and (
            estimate_decompressed_bytes(header.codec, batch[HEADER_BYTES:], self._batch_bytes_max)
            > UNREAD_BYTES_MAX
        ):
            self._large = None  # two large batches are not in memory at a time
        limit = self._batch_bytes_max
        parts = read_or_skip(batch, header, Leased, *partition, output_bytes_max=limit)
        return _OpenBatch(header, parts)

    def _keep(self, partition: TopicPartition, batch: _OpenBatch) -> None:
        if batch.remaining or batch.size_bytes > UNREAD_BYTES_MAX:
            self._large = partition, batch
            return
        total = sum(each.size_bytes for kept in self._open_batches.values() for each in kept.values())
        if total + batch.size_bytes > UNREAD_BYTES_MAX:
            self._open_batches.clear()
        kept = self._open_batches.setdefault(partition, {})
        kept[batch.base_offset] = batch
        if len(kept) > OPEN_BATCHES_MAX:
            del kept[next(iter(kept))]


_get_offset = itemgetter(2)


def _size_bytes(rows: Sequence[Leased]) -> int:
    return sum(len(row.key or b"") + len(row.value or b"") for row in rows)


def _append_acquired(rows: list[Leased], acquired: Acquired, found: list[Leased]) -> None:
    """Append the acquired records among `rows` to `found`, each with the delivery count of its range."""
    at = 0
    for first, last, count in acquired:
        at = bisect_left(rows, first, at, key=_get_offset)
        end = bisect_right(rows, last, at, key=_get_offset)
        picked = rows[at:end]
        if count != 1:
            for message in picked:
                message.delivery_count = count
        found += picked
        at = end


def _ranges_without_records(offsets: Sequence[int], acquired: Acquired, end: int) -> list[WithoutRecords]:
    """Return the acquired ranges without records, each with its type of acknowledgement. `end`: last offset of the
    response."""
    holes: list[WithoutRecords] = []
    at = 0
    for first, last, _ in acquired:
        expected = first
        while at < len(offsets) and offsets[at] <= last:
            if offsets[at] > expected:
                holes.append(WithoutRecords(expected, offsets[at] - 1, GAP))
            expected = offsets[at] + 1
            at += 1
        if expected <= min(last, end):
            holes.append(WithoutRecords(expected, min(last, end), GAP))
        if (missing := max(expected, end + 1)) <= last:
            holes.append(WithoutRecords(missing, last, RELEASE))
    return holes


def _with_rejections(
    holes: list[WithoutRecords], unreadable: Sequence[UnreadableOffsets]
) -> list[WithoutRecords]:
    """Return `holes`, split so that the unreadable offsets in gaps are rejected. Both are in ascending order."""
    if not unreadable:
        return holes
    found: list[WithoutRecords] = []
    for hole in holes:
        if hole.ack_type != GAP:
            found.append(hole)
            continue
        first = hole.first
        for each in unreadable:
            part = each.within(first, hole.last + 1)
            if part is None:
                continue
            if first < part.first:
                found.append(WithoutRecords(first, part.first - 1, GAP))
            found.append(WithoutRecords(part.first, part.last, REJECT, part.reason))
            first = part.last + 1
        if first <= hole.last:
            found.append(WithoutRecords(first, hole.last, GAP))
    return found
