"""What a receiver has on lease: where each record is on its way through the client, and when its lease ends.

    fetched ──► ready ──► handed out ──► settled
                  │            │
                  └── lost ◄───┘   the lease ended, came anew, or the broker says so

Owns the messages, their deadlines, and who is told when one is lost; what is said to brokers is `settles`'s business.
A connection that ends ends the leases that came over it, unless the broker went down with it: such leases are *suspect*
until the broker has renewed them, and nothing suspect is handed out.

Always true: a record is here once; it counts as held until it is settled or lost; nothing is handed out whose lease is
over, as far as is known here; what is fetched ahead is bounded by what the fetcher was allowed to ask for.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import TYPE_CHECKING, Final

from mansio.client.share.acquired_record_reader import AcquiredRecordReader
from mansio.client.share.leased import (
    ACKNOWLEDGED,
    ACKNOWLEDGING,
    HELD,
    LOST,
    NOT_RENEWING,
    RENEWAL_WAITS,
    Lease,
)
from mansio.net.earliest_timer import EarliestTimer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from mansio.client.share.leased import AckTarget, Leased, ReceiveOptions
    from mansio.wire.topic_partition import TopicPartition

logger = logging.getLogger(__name__)

_GATHER_PARTS: Final = 20
"""Leases are looked at in steps of this part of how long they last, so that those due at about the same time are
renewed by one request."""


class InFlightRecords:
    """Of one receiver. All methods belong to the loop's thread."""

    def __init__(self, options: ReceiveOptions, on_capacity: Callable[[], None]) -> None:
        self._options = options
        self._on_capacity = on_capacity
        self._loop = asyncio.get_running_loop()
        self._reader = AcquiredRecordReader(options.batch_bytes_max)
        self._held: dict[TopicPartition, dict[int, Leased]] = {}
        self._nodes: dict[TopicPartition, int] = {}
        self._ready: deque[Leased] = deque()
        self._suspects: dict[TopicPartition, int] = {}
        """Partitions with leases that have to be renewed first -> the broker whose session ended."""
        self._earliest_timer = EarliestTimer(self._loop, self._look)
        self.ack_target: AckTarget
        self.renew: Callable[[Leased], None]
        self._is_stopped = False
        self.record_available = asyncio.Event()
        """Set when there is something to look at for whoever waits for messages."""
        self.state_changed = asyncio.Event()
        """Set when something became of a lease: for whoever waits for the end of what is under way."""
        self.lost_listeners: list[Callable[[Leased], None]] = []
        self.held = 0
        """Records that are neither settled nor lost."""
        self.acknowledging = 0
        """Of these, those that somebody is done with, and the broker has not said so."""
        self.undelivered = 0
        """Of these, those that the application has not got."""
        self.undelivered_bytes = 0.0
        self.lost_count = 0
        """How many were lost so far: while it stays the same, nothing that was there is lost."""

    # -- what comes --------

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
                self.mark_lost(held[offset])  # its lease ended, or it would not come anew
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

    # -- handing out --------

    def pop(self, most: int | None = None) -> list[Leased]:
        """The next messages for the application, at most so many. Their leases are extended from now on for as long as
        that may last."""
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
        """All that is ready, for one who asks `deliver` before each."""
        taken, self._ready = list(self._ready), deque()
        return [message for message in taken if message._state == HELD]

    def deliver(self, message: Leased) -> bool:
        """The application gets it now. False when it is not to be had any more."""
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
        """`deliver`, once it is known whether the lease is still there. False as well when nothing is to begin."""
        while message._is_suspect and message._state == HELD and not self._is_stopped:
            await self._state_change()
        return not self._is_stopped and self.deliver(message)

    def stop(self) -> None:
        """Nothing is to begin any more."""
        self._is_stopped = True
        self.record_available.set()
        self.state_changed.set()

    async def known(self, message: Leased) -> None:
        """Wait until the broker has said what becomes of a message that is being settled."""
        while message._state == ACKNOWLEDGING:
            await self._state_change()

    async def _state_change(self) -> None:
        self.state_changed.clear()
        await self.state_changed.wait()

    # -- what becomes of leases --------

    @property
    def delivered(self) -> int:
        """Records that the application has got, and is not done with."""
        return self.held - self.acknowledging - self.undelivered

    def start_acknowledging(self, messages: Sequence[Leased]) -> tuple[list[Leased], list[Leased]]:
        """Somebody is done with them: with those that are held; the others are not, any more, or were named before."""
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
        """The broker has stored what was said of these."""
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
        """It could not be settled as was asked, and is as it was."""
        if message._state == ACKNOWLEDGING:
            message._state = HELD
            self.acknowledging -= 1
            self.state_changed.set()

    def renewed(self, message: Leased, lock_s: float) -> None:
        """The broker has extended the lease just now, by so many seconds (0: as long as it was)."""
        old = message._lease
        lock_s = lock_s or old.lock_s
        deadline = self._loop.time() + lock_s
        message._lease = Lease(old.ack_target, deadline, lock_s, old.extend_until, old.each_bytes)
        self._believed(message)
        self._watch(message._lease)

    def not_renewed(self, message: Leased) -> None:
        """It would not. Who has begun with it may still try to settle it; nobody else gets it any more."""
        if message._extend_until is None:
            self.mark_lost(message)
        message._extend_until = 0.0
        self._believed(message)

    def _believed(self, message: Leased) -> None:
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
            self._believed(message)
        self.state_changed.set()
        self._on_capacity()

    def _count_delivered(self, message: Leased) -> None:
        self.undelivered -= 1
        self.undelivered_bytes -= message._lease.each_bytes

    # -- sessions that end --------

    def session_ended(self, node: int) -> None:
        """The leases that this broker gave may be gone."""
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
        """The time to do so; without a way to ask, what nobody has begun with is given up."""
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
        """Until its lease ends, as far as is known."""
        return message._lease.deadline - self._loop.time()

    def all_held(self) -> Iterator[Leased]:
        """Whatever is neither settled nor lost."""
        for held in self._held.values():
            yield from list(held.values())

    def close(self) -> None:
        """Whatever is held is let go."""
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
        """Extend what is due, give up what is over."""
        now = self._loop.time()
        moment, step, over = float("inf"), float("inf"), 0
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
            moment, step = min(moment, due), min(step, lease.lock_s / _GATHER_PARTS)
        if over:
            logger.info("share group %s: %d leases are over", self._options.group, over)
        if moment < float("inf"):
            self._earliest_timer.set(max(moment, now + step))


def contiguous_runs(messages: Sequence[Leased]) -> list[list[Leased]]:
    """Runs of messages in the same delivery of which each is the next in the log."""
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
