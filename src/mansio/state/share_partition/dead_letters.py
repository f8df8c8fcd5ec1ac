"""The way of one share partition's given-up records to the dead-letter topic: one batch at a time, each exactly once.

    OPEN ──reserve──► RESERVING ──reserved──► READY ──next_batch──► SENDING ──written──► WRITTEN ──finished──► OPEN
                          ▲                     ▲                    │  │
                          │                     └───── failed ───────┘  │
                          └──────────────────────── fenced, moved ──────┘

A batch is what was reserved together: producer id, epoch, first sequence and target are stored with its records before
it is sent, and it is sent whole and alike however often. So the target recognises a repeat. After a load the records
with a place come first, as that one batch; those without one follow.

Always true: at most one batch has a place; nothing is sent before its place is stored; the next one gets a place only
when the copies of the last are known to be there and that is stored; sequences are contiguous for each producer epoch
and target partition. When a target does not know the producer's past any more, a higher epoch is stored first.

Pure: the caller stores, sends, and says what came of it. Source: KIP-1191, KIP-98.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import deque
from enum import Enum, auto
from typing import TYPE_CHECKING, Final, NamedTuple

from mansio.errors import InvalidRequest
from mansio.state.share_partition.types import (
    ArchivingRange,
    DeadLetterReservation,
    DeadRange,
    Producer,
    Redrive,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from mansio.state.share_partition.types import LoadedState


RETRY_MS: Final = 1_000
RETRY_MAX_MS: Final = 60_000
UNKNOWN_AFTER_MS: Final = 12 * 60 * 60 * 1000
"""A repeat of a batch older than that may be unknown to its target, which remembers producers for twice as long."""

TARGETS_MAX: Final = 8
EPOCH_MAX: Final = 32_767
_SEQUENCE_MASK: Final = 2**31 - 1


Reservations = list[tuple[int, int, DeadLetterReservation]]
"""Ranges of offsets with the ticket of their first record: what `SharePartition.reserve` and `archived` take."""


class Phase(Enum):
    """Where the batch in hand is; OPEN: there is none."""

    OPEN = auto()
    RESERVING = auto()
    READY = auto()
    SENDING = auto()
    WRITTEN = auto()


class Batch(NamedTuple):
    """What to append, in this order, as one batch. `repeated`: it may be there already; `oldest_ms`: wall clock, when
    the first of its records was given up."""

    topic_id: bytes
    partition: int
    producer_id: int
    epoch: int
    base_sequence: int
    letters: tuple[ArchivingRange, ...]
    repeated: bool
    oldest_ms: int

    @property
    def records(self) -> int:
        return sum(each.last - each.first + 1 for each in self.letters)

    def may_be_unknown(self, wall_ms: int) -> bool:
        """Is it to be looked for in the target before it is sent again?"""
        return self.repeated and wall_ms - self.oldest_ms > UNKNOWN_AFTER_MS


class DeadLetterQueue:
    """See the module."""

    def __init__(self, producer: Producer | None) -> None:
        """`producer`: as it is stored; None when none was made yet."""
        self.producer = producer
        self.phase = Phase.OPEN
        self.retry_at_ms = -math.inf
        self._open: deque[ArchivingRange] = deque()
        self._placed: list[ArchivingRange] = []
        self._repeated = False
        self._rest_ms = RETRY_MS

    @property
    def waiting(self) -> int:
        """Records that have no copy yet, as far as is known."""
        return sum(each.last - each.first + 1 for each in (*self._open, *self._placed))

    @property
    def needs_reservation(self) -> bool:
        """Is `reserve` the next thing to do?"""
        return self.phase is Phase.OPEN and bool(self._open)

    def add(self, archiving_range: ArchivingRange) -> None:
        """One more. What has a place is of the batch that was in hand when its broker stopped: it comes by a load."""
        if archiving_range.reservation.producer_id < 0:
            self._open.append(archiving_range)
            return
        if self.phase is not Phase.OPEN and not self._repeated:
            raise AssertionError(
                "a record with a place in the dead-letter topic came while a batch is in hand"
            )
        self._placed.append(archiving_range)
        self.phase, self._repeated = Phase.READY, True

    # Places

    def set_producer(self, producer_id: int) -> None:
        """A new producer, of epoch 0, which `reserve` stores."""
        self.producer = Producer(producer_id, 0, ())

    @property
    def needs_producer(self) -> bool:
        """Is a new producer id to be had before places can be reserved, or a higher epoch be taken?"""
        return self.producer is None or self.producer.epoch >= EPOCH_MAX

    def head(self, records_max: int) -> list[ArchivingRange]:
        """The next ones that need a place, to see how many make a batch."""
        found: list[ArchivingRange] = []
        for each in self._open:
            if records_max <= 0:
                break
            last = min(each.last, each.first + records_max - 1)
            found.append(each._replace(last=last))
            records_max -= last - each.first + 1
        return found

    def reserve(self, topic_id: bytes, partition: int, records: int) -> tuple[Producer, Reservations]:
        """Places for the next so many records, which will be one batch. To be stored; then `reserved`."""
        self._expect(Phase.OPEN)
        taken = self.head(records)
        for each in taken:
            whole = self._open.popleft()
            if whole.last > each.last:
                self._open.appendleft(whole._replace(first=each.last + 1))
        return self._place(taken, topic_id, partition, repeated=False)

    def _place(
        self, letters: Iterable[ArchivingRange], topic_id: bytes, partition: int, *, repeated: bool
    ) -> tuple[Producer, Reservations]:
        producer = self.producer
        if producer is None:
            raise AssertionError("there is no producer for dead letters yet")
        sequence = first = next(
            (next_ for *target, next_ in producer.sequences if target == [topic_id, partition]), 0
        )
        self._placed = []
        for each in letters:
            reservation = each.reservation._replace(
                topic_id=topic_id,
                partition=partition,
                producer_id=producer.producer_id,
                epoch=producer.epoch,
                sequence=sequence,
            )
            self._placed.append(each._replace(reservation=reservation))
            sequence = (sequence + each.last - each.first + 1) & _SEQUENCE_MASK
        if not self._placed or sequence == first:
            raise AssertionError("there is nothing to reserve a place for")
        others = [each for each in producer.sequences if each[:2] != (topic_id, partition)]
        self.producer = producer._replace(
            sequences=(*others[1 - TARGETS_MAX :], (topic_id, partition, sequence))
        )
        self.phase, self._repeated = Phase.RESERVING, repeated
        return self.producer, self._places()

    def reserved(self) -> None:
        """The places are stored."""
        self._expect(Phase.RESERVING)
        self.phase = Phase.READY

    # Sending

    def next_batch(self, now_ms: float) -> Batch | None:
        """What to send now; then one of `written`, `failed`, `fenced` and `moved` is to be said."""
        if self.phase is not Phase.READY or now_ms < self.retry_at_ms:
            return None
        letters = self._placed = self._in_order()
        reservation = letters[0].reservation
        self.phase = Phase.SENDING
        return Batch(
            reservation.topic_id,
            reservation.partition,
            reservation.producer_id,
            reservation.epoch,
            reservation.sequence,
            tuple(letters),
            self._repeated,
            min(each.reservation.first_ms for each in letters),
        )

    def _in_order(self) -> list[ArchivingRange]:
        """By sequence, which may go round from 2**31 - 1 to 0 in between."""
        base = self._placed[0].reservation.sequence
        letters = sorted(self._placed, key=lambda each: (each.reservation.sequence - base) & _SEQUENCE_MASK)
        for at in range(1, len(letters)):
            before = letters[at - 1]
            after = (before.reservation.sequence + before.last - before.first + 1) & _SEQUENCE_MASK
            if after != letters[at].reservation.sequence:
                return letters[at:] + letters[:at]
        return letters

    def written(self) -> Reservations:
        """The copies are in the target, committed. To be stored; then `finished`."""
        self._expect(Phase.SENDING)
        self.phase = Phase.WRITTEN
        self.retry_at_ms, self._rest_ms = -math.inf, RETRY_MS
        return self._places()

    def finished(self) -> None:
        """That they are there is stored."""
        self._expect(Phase.WRITTEN)
        self.phase, self._placed = Phase.OPEN, []

    def failed(self, now_ms: float) -> float:
        """The append failed, or nobody knows. Says when it is to be tried again."""
        self._expect(Phase.SENDING)
        self.phase, self._repeated = Phase.READY, True
        self.retry_at_ms = now_ms + self._rest_ms
        self._rest_ms = min(2 * self._rest_ms, RETRY_MAX_MS)
        return self.retry_at_ms

    def retry_now(self) -> None:
        """What was in the way may be gone: the next try may be now."""
        self.retry_at_ms, self._rest_ms = -math.inf, RETRY_MS

    def fenced(self, producer_id: int = -1) -> tuple[Producer, Reservations]:
        """The target does not have the batch, and would not take it in this epoch: it has lost what it knew of the
        producer. A higher epoch (or another producer, if its epochs are used up) is to be stored; then `reserved`."""
        self._expect(Phase.SENDING)
        producer = self.producer
        if producer is None or (producer_id < 0 and self.needs_producer):
            raise AssertionError("the producer for dead letters has no epoch left")
        epoch = producer.epoch + 1 if producer_id < 0 else 0
        self.producer = Producer(producer.producer_id if producer_id < 0 else producer_id, epoch, ())
        target = self._placed[0].reservation
        return self._place(self._placed, target.topic_id, target.partition, repeated=True)

    def moved(self, topic_id: bytes, partition: int) -> tuple[Producer, Reservations]:
        """The target is gone, and the copies in it, if there were any: another one is to be stored; then `reserved`."""
        self._expect(Phase.SENDING)
        return self._place(self._placed, topic_id, partition, repeated=False)

    def _places(self) -> Reservations:
        return [(each.first, each.last, each.reservation) for each in self._placed]

    def _expect(self, phase: Phase) -> None:
        if self.phase is not phase:
            message = f"dead letters are {self.phase.name}, not {phase.name}"
            raise AssertionError(message)


DEAD_RANGES_MAX: Final = 20_000
REDRIVES_MAX: Final = 64
REDRIVE_RANGES_MAX: Final = 20_000


Intervals = list[tuple[int, int]]
"""Offsets, first and last of each: ascending, disjoint, not side by side."""


def normalized(pieces: Iterable[tuple[int, int]]) -> Intervals:
    """In order and joined. Raises `InvalidRequest` for one that ends before it begins."""
    joined: Intervals = []
    for first, last in sorted(pieces):
        if last < first:
            raise InvalidRequest(f"offsets {first} to {last} are no range")
        if joined and first <= joined[-1][1] + 1:
            joined[-1] = (joined[-1][0], max(joined[-1][1], last))
        else:
            joined.append((first, last))
    return joined


def size(pieces: Iterable[tuple[int, int]]) -> int:
    return sum(last - first + 1 for first, last in pieces)


def intersection(one: Sequence[tuple[int, int]], other: Sequence[tuple[int, int]]) -> Intervals:
    """What is in both."""
    found: Intervals = []
    i = j = 0
    while i < len(one) and j < len(other):
        first, last = max(one[i][0], other[j][0]), min(one[i][1], other[j][1])
        if first <= last:
            found.append((first, last))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return found


def difference(one: Sequence[tuple[int, int]], other: Sequence[tuple[int, int]]) -> Intervals:
    """What of the first is not in the second."""
    left: Intervals = []
    for first, last in one:
        begin = first
        at = max(bisect_left(other, (first, 0)) - 1, 0)
        while at < len(other) and other[at][0] <= last:
            low, high = other[at]
            at += 1
            if high < begin:
                continue
            if low > begin:
                left.append((begin, low - 1))
            begin = high + 1
        if begin <= last:
            left.append((begin, last))
    return left


def insert(ranges: list[DeadRange], added: DeadRange) -> int:
    """These are dead, too. Gives how many offsets had to be forgotten for them, the lowest ones."""
    first, last = added.first, added.last
    at = bisect_left(ranges, added)
    before = ranges[at - 1] if at else None
    if before is not None and before.last + 1 == first and before[2:] == added[2:]:
        ranges[at - 1] = added = added._replace(first=before.first)
    else:
        ranges.insert(at, added)
        at += 1
    if at < len(ranges) and last + 1 == ranges[at].first and ranges[at][2:] == added[2:]:
        ranges[at - 1 : at + 1] = [added._replace(last=ranges[at].last)]
    forgotten = 0
    while len(ranges) > DEAD_RANGES_MAX:
        lowest = ranges.pop(0)
        forgotten += lowest.last - lowest.first + 1
    return forgotten


class DeadRanges:
    """See the module."""

    __slots__ = ("_ranges", "_redrives", "offsets")

    def __init__(self, state: LoadedState) -> None:
        self._ranges = sorted(state.dead)
        self._redrives = {each.redrive_id: list(each.ranges) for each in state.redrives}
        self.offsets = size((each.first, each.last) for each in self._ranges)
        """How many offsets are dead."""

    def ranges(self) -> tuple[DeadRange, ...]:
        return tuple(self._ranges)

    def redrives(self) -> tuple[Redrive, ...]:
        return tuple(Redrive(name, tuple(ranges)) for name, ranges in self._redrives.items())

    def add(self, added: DeadRange) -> None:
        """These are dead from now on."""
        self.offsets += added.last - added.first + 1 - insert(self._ranges, added)

    def intersect(self, wanted: Sequence[tuple[int, int]]) -> list[DeadRange]:
        """What of these is dead."""
        found = []
        for first, last in wanted:
            at = max(bisect_right(self._ranges, first, key=lambda each: each.first) - 1, 0)
            while at < len(self._ranges) and self._ranges[at].first <= last:
                each = self._ranges[at]
                if each.last >= first:
                    found.append(each._replace(first=max(each.first, first), last=min(each.last, last)))
                at += 1
        return found

    def remove(self, gone: Sequence[tuple[int, int]]) -> bool:
        """These are dead no more. Says whether any was."""
        before = self.offsets
        kept: list[DeadRange] = []
        for each in self._ranges:
            kept += [
                each._replace(first=first, last=last)
                for first, last in difference([(each.first, each.last)], gone)
            ]
        self._ranges = kept
        self.offsets = size((each.first, each.last) for each in kept)
        return self.offsets != before

    def offered(self, redrive_id: str) -> Intervals:
        """What this redrive has offered before."""
        return self._redrives.get(redrive_id, [])

    def remember(self, redrive_id: str, offered: Iterable[tuple[int, int]]) -> None:
        """Raises `InvalidRequest` when one redrive has offered so many ranges that they cannot be remembered."""
        joined = normalized([*self.offered(redrive_id), *offered])
        if len(joined) > REDRIVE_RANGES_MAX:
            raise InvalidRequest(
                f"redrive {redrive_id} has too many ranges of offsets: go on under another id"
            )
        self._redrives.pop(redrive_id, None)
        self._redrives[redrive_id] = joined
        with_known_state = sum(len(each) for each in self._redrives.values())
        while len(self._redrives) > REDRIVES_MAX or with_known_state > REDRIVE_RANGES_MAX:
            with_known_state -= len(self._redrives.pop(next(iter(self._redrives))))
