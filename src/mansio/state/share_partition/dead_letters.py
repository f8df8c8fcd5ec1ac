"""Dead letters of one share partition: the queue that writes them exactly once, and the record of what is dead.

`DeadLetterQueue` writes the copies of records that were given up, one batch at a time:

    OPEN ──reserve──► RESERVING ──reserved──► READY ──next_batch──► SENDING ──written──► WRITTEN ──finished──► OPEN
                          ▲                     ▲                    │  │
                          │                     └───── failed ───────┘  │
                          └──────────────────────── fenced, moved ──────┘

A batch is a set of records reserved together: producer id, epoch, first sequence and target are stored with the records
before it is sent, and every attempt sends the same whole batch, so that the target recognises a repeat. After a load,
reserved records come first, as that one batch; those without a reservation follow.

`DeadRanges` has the offsets whose copies are in the dead-letter topic, and those offered again by each redrive.

Invariants:
* At most one batch is reserved. Nothing is sent before its reservation is stored. The next batch is reserved when the
  copies of the last one are known to be committed and that is stored.
* Sequences are contiguous per producer epoch and target partition. If a target lost the state of the producer, a higher
  epoch is stored first.
* An offset is dead from the time its copy is known to be committed until it is offered again; so no acknowledged record
  is ever delivered again. Under one redrive id each offset is offered once, even if the record died again since.
* Dead ranges and redrives are bounded; the oldest are dropped first.

Pure: the caller stores, sends, and reports the result. Source: KIP-1191, KIP-98.
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
"""Age of a batch from which its target may not recognise a repeat; targets keep producer state for twice as long."""

TARGETS_MAX: Final = 8
EPOCH_MAX: Final = 32_767
_SEQUENCE_MASK: Final = 2**31 - 1


Reservations = list[tuple[int, int, DeadLetterReservation]]
"""Offset ranges with the reservation of their first record, as for `SharePartition.reserve` and `archived`."""


class Phase(Enum):
    """Phase of the current batch; OPEN: there is none."""

    OPEN = auto()
    RESERVING = auto()
    READY = auto()
    SENDING = auto()
    WRITTEN = auto()


class Batch(NamedTuple):
    """Records to append in this order as one batch. `repeated`: it may be in the log already; `oldest_ms`: wall clock,
    when its first record was given up."""

    topic_id: bytes
    partition: int
    producer_id: int
    epoch: int
    base_sequence: int
    ranges: tuple[ArchivingRange, ...]
    repeated: bool
    oldest_ms: int

    @property
    def records(self) -> int:
        return sum(each.last - each.first + 1 for each in self.ranges)

    def may_be_unknown(self, wall_ms: int) -> bool:
        """Whether the target has to be searched for it before it is sent again."""
        return self.repeated and wall_ms - self.oldest_ms > UNKNOWN_AFTER_MS


class DeadLetterQueue:
    """Queue of one share partition; see the module."""

    def __init__(self, producer: Producer | None) -> None:
        """`producer`: as stored; None if there is none yet."""
        self.producer = producer
        self.phase = Phase.OPEN
        self.retry_at_ms = -math.inf
        self._open: deque[ArchivingRange] = deque()
        self._reserved: list[ArchivingRange] = []
        self._repeated = False
        self._rest_ms = RETRY_MS

    @property
    def waiting(self) -> int:
        """Number of records without a copy, as far as known."""
        return sum(each.last - each.first + 1 for each in (*self._open, *self._reserved))

    @property
    def needs_reservation(self) -> bool:
        """Whether `reserve` is the next step."""
        return self.phase is Phase.OPEN and bool(self._open)

    def add(self, archiving_range: ArchivingRange) -> None:
        """Add a range. Reserved ranges come from a load, of the batch that was current when the broker stopped."""
        if archiving_range.reservation.producer_id < 0:
            self._open.append(archiving_range)
            return
        if self.phase is not Phase.OPEN and not self._repeated:
            raise AssertionError("a reserved record was added during a batch")
        self._reserved.append(archiving_range)
        self.phase, self._repeated = Phase.READY, True

    # ------------------------------------------------------------------ reservation

    def set_producer(self, producer_id: int) -> None:
        """Use a new producer with epoch 0, which `reserve` stores."""
        self.producer = Producer(producer_id, 0, ())

    @property
    def needs_producer(self) -> bool:
        """Whether a new producer id is needed before the next reservation or epoch."""
        return self.producer is None or self.producer.epoch >= EPOCH_MAX

    def head(self, records_max: int) -> list[ArchivingRange]:
        """The next ranges without reservation, to determine the size of a batch."""
        found: list[ArchivingRange] = []
        for each in self._open:
            if records_max <= 0:
                break
            last = min(each.last, each.first + records_max - 1)
            found.append(each._replace(last=last))
            records_max -= last - each.first + 1
        return found

    def reserve(self, topic_id: bytes, partition: int, records: int) -> tuple[Producer, Reservations]:
        """Reserve the next `records` records as one batch. The result is to be stored; then `reserved` is called."""
        self._expect(Phase.OPEN)
        taken = self.head(records)
        for each in taken:
            whole = self._open.popleft()
            if whole.last > each.last:
                self._open.appendleft(whole._replace(first=each.last + 1))
        return self._reserve(taken, topic_id, partition, repeated=False)

    def _reserve(
        self, ranges: Iterable[ArchivingRange], topic_id: bytes, partition: int, *, repeated: bool
    ) -> tuple[Producer, Reservations]:
        producer = self.producer
        if producer is None:
            raise AssertionError("there is no producer for dead letters yet")
        sequence = first = next(
            (next_ for *target, next_ in producer.sequences if target == [topic_id, partition]), 0
        )
        self._reserved = []
        for each in ranges:
            reservation = each.reservation._replace(
                topic_id=topic_id,
                partition=partition,
                producer_id=producer.producer_id,
                epoch=producer.epoch,
                sequence=sequence,
            )
            self._reserved.append(each._replace(reservation=reservation))
            sequence = (sequence + each.last - each.first + 1) & _SEQUENCE_MASK
        if not self._reserved or sequence == first:
            raise AssertionError("nothing to reserve")
        others = [each for each in producer.sequences if each[:2] != (topic_id, partition)]
        self.producer = producer._replace(
            sequences=(*others[1 - TARGETS_MAX :], (topic_id, partition, sequence))
        )
        self.phase, self._repeated = Phase.RESERVING, repeated
        return self.producer, self._reservations()

    def reserved(self) -> None:
        """The reservation is stored."""
        self._expect(Phase.RESERVING)
        self.phase = Phase.READY

    # ------------------------------------------------------------------ sending

    def next_batch(self, now_ms: float) -> Batch | None:
        """The batch to send now; then one of `written`, `failed`, `fenced` and `moved` is called."""
        if self.phase is not Phase.READY or now_ms < self.retry_at_ms:
            return None
        ranges = self._reserved = self._in_order()
        reservation = ranges[0].reservation
        self.phase = Phase.SENDING
        return Batch(
            reservation.topic_id,
            reservation.partition,
            reservation.producer_id,
            reservation.epoch,
            reservation.sequence,
            tuple(ranges),
            self._repeated,
            min(each.reservation.first_ms for each in ranges),
        )

    def _in_order(self) -> list[ArchivingRange]:
        """Ascending by sequence, which wraps from 2**31 - 1 to 0."""
        base = self._reserved[0].reservation.sequence
        ranges = sorted(self._reserved, key=lambda each: (each.reservation.sequence - base) & _SEQUENCE_MASK)
        for at in range(1, len(ranges)):
            before = ranges[at - 1]
            after = (before.reservation.sequence + before.last - before.first + 1) & _SEQUENCE_MASK
            if after != ranges[at].reservation.sequence:
                return ranges[at:] + ranges[:at]
        return ranges

    def written(self) -> Reservations:
        """The copies are committed in the target. The result is to be stored; then `finished` is called."""
        self._expect(Phase.SENDING)
        self.phase = Phase.WRITTEN
        self.retry_at_ms, self._rest_ms = -math.inf, RETRY_MS
        return self._reservations()

    def finished(self) -> None:
        """The commit of the copies is stored."""
        self._expect(Phase.WRITTEN)
        self.phase, self._reserved = Phase.OPEN, []

    def failed(self, now_ms: float) -> float:
        """The append failed, or its outcome is unknown. Returns the time of the next attempt."""
        self._expect(Phase.SENDING)
        self.phase, self._repeated = Phase.READY, True
        self.retry_at_ms = now_ms + self._rest_ms
        self._rest_ms = min(2 * self._rest_ms, RETRY_MAX_MS)
        return self.retry_at_ms

    def retry_now(self) -> None:
        """Allow the next attempt at once: the cause of the failure may be gone."""
        self.retry_at_ms, self._rest_ms = -math.inf, RETRY_MS

    def fenced(self, producer_id: int = -1) -> tuple[Producer, Reservations]:
        """The target lost the state of the producer: it does not have the batch, and would refuse it in this epoch. A
        higher epoch, or another producer if its epochs are used up, is to be stored; then `reserved` is called."""
        self._expect(Phase.SENDING)
        producer = self.producer
        if producer is None or (producer_id < 0 and self.needs_producer):
            raise AssertionError("the producer for dead letters has no epoch left")
        epoch = producer.epoch + 1 if producer_id < 0 else 0
        self.producer = Producer(producer.producer_id if producer_id < 0 else producer_id, epoch, ())
        target = self._reserved[0].reservation
        return self._reserve(self._reserved, target.topic_id, target.partition, repeated=True)

    def moved(self, topic_id: bytes, partition: int) -> tuple[Producer, Reservations]:
        """The target was deleted with any copies in it: another one is to be stored; then `reserved` is called."""
        self._expect(Phase.SENDING)
        return self._reserve(self._reserved, topic_id, partition, repeated=False)

    def _reservations(self) -> Reservations:
        return [(each.first, each.last, each.reservation) for each in self._reserved]

    def _expect(self, phase: Phase) -> None:
        if self.phase is not phase:
            message = f"dead letters are {self.phase.name}, not {phase.name}"
            raise AssertionError(message)


DEAD_RANGES_MAX: Final = 20_000
REDRIVES_MAX: Final = 64
REDRIVE_RANGES_MAX: Final = 20_000


Intervals = list[tuple[int, int]]
"""Offset ranges (first, last): ascending, disjoint, not adjacent."""


def normalized(pieces: Iterable[tuple[int, int]]) -> Intervals:
    """Sorted and merged. Raises `InvalidRequest` for a range whose end is below its start."""
    joined: Intervals = []
    for first, last in sorted(pieces):
        if last < first:
            raise InvalidRequest(f"offsets {first} to {last} are not a range")
        if joined and first <= joined[-1][1] + 1:
            joined[-1] = (joined[-1][0], max(joined[-1][1], last))
        else:
            joined.append((first, last))
    return joined


def size(pieces: Iterable[tuple[int, int]]) -> int:
    return sum(last - first + 1 for first, last in pieces)


def intersection(one: Sequence[tuple[int, int]], other: Sequence[tuple[int, int]]) -> Intervals:
    """The offsets in both."""
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
    """The offsets of the first that are not in the second."""
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
    """Add a dead range. Returns the number of offsets dropped for it, the lowest ones."""
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
    dropped = 0
    while len(ranges) > DEAD_RANGES_MAX:
        lowest = ranges.pop(0)
        dropped += lowest.last - lowest.first + 1
    return dropped


class DeadRanges:
    """Dead offsets and redrives of one share partition; see the module."""

    __slots__ = ("_ranges", "_redrives", "offsets")

    def __init__(self, state: LoadedState) -> None:
        self._ranges = sorted(state.dead)
        self._redrives = {each.redrive_id: list(each.ranges) for each in state.redrives}
        self.offsets = size((each.first, each.last) for each in self._ranges)
        """Number of dead offsets."""

    def ranges(self) -> tuple[DeadRange, ...]:
        return tuple(self._ranges)

    def redrives(self) -> tuple[Redrive, ...]:
        return tuple(Redrive(name, tuple(ranges)) for name, ranges in self._redrives.items())

    def add(self, added: DeadRange) -> None:
        """Add a dead range."""
        self.offsets += added.last - added.first + 1 - insert(self._ranges, added)

    def intersect(self, wanted: Sequence[tuple[int, int]]) -> list[DeadRange]:
        """The dead parts of these ranges."""
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
        """Remove offsets. Returns whether any was dead."""
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
        """Offsets offered before under this id."""
        return self._redrives.get(redrive_id, [])

    def remember(self, redrive_id: str, offered: Iterable[tuple[int, int]]) -> None:
        """Record offered offsets. Raises `InvalidRequest` if the redrive has more ranges than can be recorded."""
        joined = normalized([*self.offered(redrive_id), *offered])
        if len(joined) > REDRIVE_RANGES_MAX:
            raise InvalidRequest(f"redrive {redrive_id} has too many offset ranges: continue with another id")
        self._redrives.pop(redrive_id, None)
        self._redrives[redrive_id] = joined
        with_known_state = sum(len(each) for each in self._redrives.values())
        while len(self._redrives) > REDRIVES_MAX or with_known_state > REDRIVE_RANGES_MAX:
            with_known_state -= len(self._redrives.pop(next(iter(self._redrives))))
