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
from bisect import bisect_right
from collections import deque
from typing import TYPE_CHECKING, Final

from mansio.errors import InvalidRecord
from mansio.link.alarm import Alarm
from mansio.wire.record_rows import read_rows
from mansio.wire.visible import visible_batches

from .decode import RECORD_BYTES
from .leased_types import GAP, HELD, LOST, RELEASE, SETTLED, SETTLING, Leased

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from mansio.wire.topic_partition import TopicPartition

    from .leased_types import Keeper, ReceiveOptions

logger = logging.getLogger(__name__)

_GATHER_PARTS: Final = 20
"""Leases are looked at in steps of this part of how long they last, so that those due at about the same time are
renewed by one request."""


class LeaseBook:
    """Of one receiver. All methods belong to the loop's thread."""

    def __init__(self, options: ReceiveOptions, on_room: Callable[[], None]) -> None:
        self._options = options
        self._on_room = on_room
        self._loop = asyncio.get_running_loop()
        self._held: dict[TopicPartition, dict[int, Leased]] = {}
        self._nodes: dict[TopicPartition, int] = {}
        self._ready: deque[Leased] = deque()
        self._suspects: dict[TopicPartition, int] = {}
        """Partitions with leases that have to be renewed first -> the broker whose session ended."""
        self._alarm = Alarm(self._loop, self._look)
        self.keeper: Keeper
        self.renew: Callable[[Leased], None]
        self.arrival = asyncio.Event()
        """Set when there is something to look at for whoever waits for messages."""
        self.moved = asyncio.Event()
        """Set when something became of a lease: for whoever waits for the end of what is under way."""
        self.lost_listeners: list[Callable[[Leased], None]] = []
        self.held = 0
        """Records that are neither settled nor lost."""
        self.settling = 0
        """Of these, those that somebody is done with, and the broker has not said so."""
        self.ready_bytes = 0.0

    # -- what comes --------

    def take(
        self,
        partition: TopicPartition,
        node: int,
        records: memoryview,
        acquired: Sequence[tuple[int, int, int]],
        lock_s: float,
    ) -> list[tuple[int, int, int]]:
        """Put down what a broker leased. Gives the ranges of it that hold no record, each with what to say of it: `GAP`
        where the log has none (compaction leaves such), `RELEASE` where the bytes did not come.

        Raises `CorruptMessage`, `InvalidRecord` and has taken nothing then: the records cannot be read.
        """
        found, end = self._read(partition, records, acquired)
        held = self._held.setdefault(partition, {})
        self._nodes[partition] = node
        for message in found:
            if (older := held.get(message.offset)) is not None:
                self.lose(older)  # its lease ended, or it would not come anew
        now = self._loop.time()
        deadline, until = now + lock_s, now + self._options.extend_max_ms / 1000
        each_bytes = len(records) / max(len(found), 1)
        keeper = self.keeper
        for message in found:
            message._keeper = keeper
            message._deadline, message._lock_s, message._until = deadline, lock_s, until
            message._bytes = each_bytes
            held[message.offset] = message
        self._ready += found
        self.held += len(found)
        self.ready_bytes += each_bytes * len(found)
        if found:
            self._watch(deadline, lock_s)
            self.arrival.set()
        return _holes(found, acquired, end)

    def _read(
        self, partition: TopicPartition, records: memoryview, acquired: Sequence[tuple[int, int, int]]
    ) -> tuple[list[Leased], int]:
        """The records that were acquired, and the last offset of the last whole batch."""
        firsts = [first for first, _, _ in acquired]
        found: list[Leased] = []
        end = -1
        limit = self._options.batch_bytes_max
        for position, header, is_visible in visible_batches(
            records, partition, firsts[0], read_committed=False
        ):
            end = header.last_offset
            if not is_visible or header.base_offset > acquired[-1][1]:
                continue
            if header.codec and header.record_count * RECORD_BYTES > limit:
                raise InvalidRecord(
                    f"{partition.topic}-{partition.partition} at offset {header.base_offset}: {header.record_count}"
                    f" records in one batch are more than batch_bytes_max ({limit}) allows"
                )
            rows = read_rows(
                records[position : position + header.size],
                Leased,
                *partition,
                max_output_bytes=max(header.size, limit),
            )
            for message in rows:
                at = bisect_right(firsts, message.offset) - 1
                if at >= 0 and message.offset <= acquired[at][1]:
                    message.delivery_count = acquired[at][2]
                    found.append(message)
        return found, end

    # -- handing out --------

    def pop(self) -> Leased | None:
        """The next message for the application. Its lease is extended from now on for as long as that may last."""
        for _ in range(len(self._ready)):
            message = self._ready.popleft()
            if message._is_suspect:
                self._ready.append(message)
                continue
            self.ready_bytes -= message._bytes
            if message._state == HELD and self.begin(message):
                return message
        return None

    def pop_unbegun(self) -> list[Leased]:
        """All that is ready, for one who asks `begin` before each."""
        taken, self._ready = list(self._ready), deque()
        self.ready_bytes = 0.0
        return [message for message in taken if message._state == HELD]

    def begin(self, message: Leased) -> bool:
        """The application gets it now. False when it is not to be had any more."""
        now = self._loop.time()
        if message._state != HELD:
            return False
        if message._deadline <= now:
            self.lose(message)
            return False
        message._is_out = True
        message._until = now + self._options.extend_max_ms / 1000
        return True

    async def ready_to_begin(self, message: Leased) -> bool:
        """`begin`, once it is known whether the lease is still there."""
        while message._is_suspect and message._state == HELD:
            await self._move()
        return self.begin(message)

    async def known(self, message: Leased) -> None:
        """Wait until the broker has said what becomes of a message that is being settled."""
        while message._state == SETTLING:
            await self._move()

    async def _move(self) -> None:
        self.moved.clear()
        await self.moved.wait()

    # -- what becomes of leases --------

    def settled(self, message: Leased, kind: int) -> None:
        """The broker has stored what was said of it."""
        message._settled_as = kind
        self._leave(message, SETTLED)

    def lose(self, message: Leased) -> None:
        """The lease is over."""
        if message._state in (HELD, SETTLING):
            self._leave(message, LOST)
            for listener in self.lost_listeners:
                listener(message)

    def begins_to_settle(self, message: Leased) -> None:
        """Somebody is done with it."""
        if message._state == HELD:
            message._state = SETTLING
            self.settling += 1

    def stays(self, message: Leased) -> None:
        """It could not be settled as was asked, and is as it was."""
        if message._state == SETTLING:
            message._state = HELD
            self.settling -= 1
            self.moved.set()

    def renewed(self, message: Leased) -> None:
        """The broker has extended the lease just now."""
        message._deadline = self._loop.time() + message._lock_s
        self._believed(message)
        self._watch(message._deadline, message._lock_s)

    def not_renewed(self, message: Leased) -> None:
        """It would not. Who has begun with it may still try to settle it; nobody else gets it any more."""
        message._until = 0.0
        if not message._is_out:
            self.lose(message)
        self._believed(message)

    def _believed(self, message: Leased) -> None:
        message._is_renewing = False
        if message._is_suspect:
            message._is_suspect = False
            self.moved.set()
            self.arrival.set()

    def _leave(self, message: Leased, state: int) -> None:
        partition = message[0], message[1]
        held = self._held.get(partition)  # type: ignore[call-overload]  # a TopicPartition is such a tuple
        if message._state == SETTLING:
            self.settling -= 1
        message._state = state
        if held is not None and held.get(message[2]) is message:
            del held[message[2]]
            self.held -= 1
        if message._is_suspect:
            self._believed(message)
        self.moved.set()
        self._on_room()

    # -- sessions that end --------

    def session_ended(self, node: int) -> None:
        """The leases that this broker gave may be gone."""
        for partition, held in self._held.items():
            if self._nodes[partition] == node and held:
                self._suspects[partition] = node
                for message in held.values():
                    message._is_suspect = message._state == HELD
        self.moved.set()

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
            elif not message._is_renewing and message._state == HELD:
                message._is_renewing = True
                self.renew(message)

    # -- time --------

    def seconds_left(self, message: Leased) -> float:
        """Until its lease ends, as far as is known."""
        return message._deadline - self._loop.time()

    def all_held(self) -> Iterator[Leased]:
        """Whatever is neither settled nor lost."""
        for held in self._held.values():
            yield from list(held.values())

    def close(self) -> None:
        """Whatever is held is let go."""
        self._alarm.cancel()
        for message in list(self.all_held()):
            self.lose(message)
        self._ready.clear()
        self.arrival.set()
        self.moved.set()

    def _watch(self, deadline: float, lock_s: float) -> None:
        extends = self._options.auto_extend
        self._alarm.set(deadline - lock_s / 2 if extends else deadline)

    def _look(self) -> None:
        """Extend what is due, give up what is over."""
        now = self._loop.time()
        moment, step = float("inf"), float("inf")
        for message in self.all_held():
            if message._state != HELD:
                continue
            if message._deadline <= now:
                logger.info(
                    "the lease of offset %d of %s-%d is over",
                    message.offset,
                    message.topic,
                    message.partition,
                )
                self.lose(message)
                continue
            due = message._deadline
            half = due - message._lock_s / 2
            if self._options.auto_extend and not message._is_renewing and half < message._until:
                due = half
                if due <= now and not message._is_suspect:
                    message._is_renewing = True
                    self.renew(message)
                    due = message._deadline
            moment, step = min(moment, due), min(step, message._lock_s / _GATHER_PARTS)
        if moment < float("inf"):
            self._alarm.set(max(moment, now + step))


def _holes(
    found: Iterable[Leased], acquired: Sequence[tuple[int, int, int]], end: int
) -> list[tuple[int, int, int]]:
    """The ranges of what was acquired in which there is no record. `end`: the last offset that was read."""
    holes: list[tuple[int, int, int]] = []
    offsets = [message.offset for message in found]
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
        if (unread := max(expected, end + 1)) <= last:
            holes.append((unread, last, RELEASE))
    return holes
