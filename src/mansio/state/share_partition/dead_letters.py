"""Dead letters of one share partition: a queue that copies records to the dead-letter topic exactly once, and the
ranges of dead-lettered offsets.

`DeadLetterQueue` has the ranges in the state ARCHIVING and copies them one batch at a time. Its phases:

    OPEN ── reserve ──► RESERVING ── mark_reserved ──► READY ── next_batch ──► SENDING
    SENDING ── mark_written ──► WRITTEN ── mark_finished ──► OPEN
    SENDING ── mark_failed ──► READY
    SENDING ── reserve_in_new_epoch, reserve_in_new_target ──► RESERVING

All records of a batch are reserved together: producer id, epoch, first sequence and target partition are stored with
the records before the batch is sent. Every attempt sends the same whole batch, so that the target recognizes a repeat.
After a load, the records with a stored reservation are sent first, as one batch; those without a reservation follow.

`DeadRanges` has the offsets whose copies are in the dead-letter topic, and those that each redrive offered again.

Invariants:
* At most one batch is reserved. Nothing is sent before its reservation is stored. The next batch is reserved when the
  commit of the previous batch's copies is stored.
* Sequences are contiguous per producer epoch and target partition. If a target has lost the state of the producer, a
  higher epoch is stored first.
* An offset is in a dead range from the time its copy is known to be committed until a redrive offers it again, so no
  acknowledged record is ever delivered again. Redrives with the same id offer each offset once, even if its record was
  dead-lettered again in the meantime.
* Dead ranges and redrives are bounded; the oldest are dropped first.

The queue does no I/O: the caller stores, sends, and reports the result. Source: KIP-1191, KIP-98.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import deque
from enum import Enum, auto
from typing import TYPE_CHECKING, Final, NamedTuple

from mansio.backoff import grown_delay
from mansio.errors import InvalidRequest
from mansio.state.share_partition.types import (
    ArchivingRange,
    DeadLetterReservation,
    DeadRange,
    Producer,
    RedrivenRanges,
)
from mansio.wire.field_values import PRODUCER_EPOCH_MAX, SEQUENCE_MAX

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from mansio.state.share_partition.types import LoadedState


RETRY_MS_MIN: Final = 1_000
RETRY_MS_MAX: Final = 60_000
"""Backoff after a failed append: the first one, and the maximum of its doublings."""
REPEAT_RECOGNITION_MS: Final = 12 * 60 * 60 * 1000
"""Age of a batch up to which its target surely recognizes a repeat; targets keep producer state for twice as long."""

TARGETS_MAX: Final = 8
"""Maximum number of target partitions whose next sequence a producer keeps."""


Reservations = list[tuple[int, int, DeadLetterReservation]]
"""Offset ranges (first, last) with the reservation of their first record; arguments of `SharePartition.reserve` and
`SharePartition.mark_archived`."""


class Phase(Enum):
    """Phase of the current batch of a `DeadLetterQueue`; OPEN if there is no current batch."""

    OPEN = auto()
    RESERVING = auto()
    READY = auto()
    SENDING = auto()
    WRITTEN = auto()


class DeadLetterBatch(NamedTuple):
    """Records to append to a target partition, in this order, as one record batch.

    `is_repeat`: an earlier attempt may have appended the batch. `oldest_ms`: wall-clock time at which the first of the
    records entered the state ARCHIVING.
    """

    topic_id: bytes
    partition: int
    producer_id: int
    epoch: int
    base_sequence: int
    ranges: tuple[ArchivingRange, ...]
    is_repeat: bool
    oldest_ms: int

    @property
    def record_count(self) -> int:
        """Number of records in the batch."""
        return sum(each.last - each.first + 1 for each in self.ranges)

    def may_be_unrecognized(self, wall_ms: int) -> bool:
        """Whether the target may not recognize a repeat of the batch any more, so that it has to be searched for the
        records before the batch is sent again."""
        return self.is_repeat and wall_ms - self.oldest_ms > REPEAT_RECOGNITION_MS


class DeadLetterQueue:
    """Queue of the ARCHIVING records of one share partition, which are copied to the dead-letter topic in batches.

    `retry_at_ms`: time of the steady clock before which `next_batch` returns None. `unreserved_record_count`: number of
    records without a reservation.
    """

    def __init__(self, producer: Producer | None) -> None:
        """Create an empty queue. `producer`: the stored producer of dead letters, None if there is none."""
        self.producer = producer
        self.phase = Phase.OPEN
        self.retry_at_ms = -math.inf
        self.unreserved_record_count = 0
        self._unreserved: deque[ArchivingRange] = deque()
        self._reserved: list[ArchivingRange] = []
        self._is_repeat = False
        self._failure_count = 0

    @property
    def waiting_record_count(self) -> int:
        """Number of records in the queue, whose copies are not known to be committed."""
        return sum(each.last - each.first + 1 for each in (*self._unreserved, *self._reserved))

    @property
    def needs_reservation(self) -> bool:
        """Whether `reserve` has to be called: there are ranges without a reservation and there is no current batch."""
        return self.phase is Phase.OPEN and bool(self._unreserved)

    def add(self, archiving_range: ArchivingRange) -> None:
        """Add a range to the queue. A range that already has a reservation was loaded: it belongs to the batch that was
        current when the last leader stopped."""
        if archiving_range.reservation.producer_id < 0:
            self._unreserved.append(archiving_range)
            self.unreserved_record_count += archiving_range.last - archiving_range.first + 1
            return
        if self.phase is not Phase.OPEN and not self._is_repeat:
            raise AssertionError("a reserved record was added during a batch")
        self._reserved.append(archiving_range)
        self.phase, self._is_repeat = Phase.READY, True

    # ------------------------------------------------------------------ reservation

    def set_producer(self, producer_id: int) -> None:
        """Use a new producer with epoch 0, which becomes stored with the next reservation."""
        self.producer = Producer(producer_id, 0, ())

    @property
    def needs_producer(self) -> bool:
        """Whether a new producer id is needed before the next reservation or epoch."""
        return self.producer is None or self.producer.epoch >= PRODUCER_EPOCH_MAX

    def peek(self, records_max: int) -> list[ArchivingRange]:
        """Return the next ranges without a reservation, at most `records_max` records, without removing them."""
        found: list[ArchivingRange] = []
        for each in self._unreserved:
            if records_max <= 0:
                break
            last = min(each.last, each.first + records_max - 1)
            found.append(each._replace(last=last))
            records_max -= last - each.first + 1
        return found

    def reserve(self, topic_id: bytes, partition: int, records: int) -> tuple[Producer, Reservations]:
        """Reserve the next `records` records as one batch for this target partition. The caller stores the returned
        producer and reservations, and then calls `mark_reserved`."""
        self._check_phase(Phase.OPEN)
        taken = self.peek(records)
        for each in taken:
            whole = self._unreserved.popleft()
            self.unreserved_record_count -= each.last - each.first + 1
            if whole.last > each.last:
                self._unreserved.appendleft(whole._replace(first=each.last + 1))
        return self._reserve(taken, topic_id, partition, is_repeat=False)

    def _reserve(
        self, ranges: Iterable[ArchivingRange], topic_id: bytes, partition: int, *, is_repeat: bool
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
            sequence = (sequence + each.last - each.first + 1) & SEQUENCE_MAX
        if not self._reserved or sequence == first:
            raise AssertionError("nothing to reserve")
        others = [each for each in producer.sequences if each[:2] != (topic_id, partition)]
        self.producer = producer._replace(
            sequences=(*others[1 - TARGETS_MAX :], (topic_id, partition, sequence))
        )
        self.phase, self._is_repeat = Phase.RESERVING, is_repeat
        return self.producer, self._reservations()

    def mark_reserved(self) -> None:
        """Continue after the reservation was stored: the batch can be sent."""
        self._check_phase(Phase.RESERVING)
        self.phase = Phase.READY

    # ------------------------------------------------------------------ sending

    def next_batch(self, now_ms: float) -> DeadLetterBatch | None:
        """Return the batch to send now, or None. The caller reports the result by `mark_written`, `mark_failed`,
        `reserve_in_new_epoch` or `reserve_in_new_target`."""
        if self.phase is not Phase.READY or now_ms < self.retry_at_ms:
            return None
        ranges = self._reserved = self._reserved_in_sequence_order()
        reservation = ranges[0].reservation
        self.phase = Phase.SENDING
        return DeadLetterBatch(
            reservation.topic_id,
            reservation.partition,
            reservation.producer_id,
            reservation.epoch,
            reservation.sequence,
            tuple(ranges),
            self._is_repeat,
            min(each.reservation.archiving_since_ms for each in ranges),
        )

    def _reserved_in_sequence_order(self) -> list[ArchivingRange]:
        """Return the reserved ranges in the order of their sequences, which wrap from 2**31 - 1 to 0."""
        base = self._reserved[0].reservation.sequence
        ranges = sorted(self._reserved, key=lambda each: (each.reservation.sequence - base) & SEQUENCE_MAX)
        for at in range(1, len(ranges)):
            before = ranges[at - 1]
            after = (before.reservation.sequence + before.last - before.first + 1) & SEQUENCE_MAX
            if after != ranges[at].reservation.sequence:
                return ranges[at:] + ranges[:at]
        return ranges

    def mark_written(self) -> Reservations:
        """Continue after the copies were committed in the target. The caller stores that the returned ranges are
        archived, and then calls `mark_finished`."""
        self._check_phase(Phase.SENDING)
        self.phase = Phase.WRITTEN
        self.retry_at_ms, self._failure_count = -math.inf, 0
        return self._reservations()

    def mark_finished(self) -> None:
        """End the current batch after its ranges were stored as archived."""
        self._check_phase(Phase.WRITTEN)
        self.phase, self._reserved = Phase.OPEN, []

    def mark_failed(self, now_ms: float) -> float:
        """Schedule another attempt after an append that failed or whose outcome is unknown. Returns the time of the
        next attempt (steady clock, ms)."""
        self._check_phase(Phase.SENDING)
        self.phase, self._is_repeat = Phase.READY, True
        self._failure_count += 1
        self.retry_at_ms = now_ms + grown_delay(self._failure_count, RETRY_MS_MIN, RETRY_MS_MAX)
        return self.retry_at_ms

    def retry_now(self) -> None:
        """Allow the next attempt at once and reset the backoff."""
        self.retry_at_ms, self._failure_count = -math.inf, 0

    def reserve_in_new_epoch(self, producer_id: int = -1) -> tuple[Producer, Reservations]:
        """Reserve the current batch again with a higher producer epoch, because the target has lost the state of the
        producer: it does not have the batch and refuses it in this epoch. `producer_id`: id of a new producer, if the
        current one has no higher epoch. The caller stores the result, and then calls `mark_reserved`."""
        self._check_phase(Phase.SENDING)
        producer = self.producer
        if producer is None or (producer_id < 0 and self.needs_producer):
            raise AssertionError("the producer for dead letters has no epoch left")
        epoch = producer.epoch + 1 if producer_id < 0 else 0
        self.producer = Producer(producer.producer_id if producer_id < 0 else producer_id, epoch, ())
        target = self._reserved[0].reservation
        return self._reserve(self._reserved, target.topic_id, target.partition, is_repeat=True)

    def reserve_in_new_target(self, topic_id: bytes, partition: int) -> tuple[Producer, Reservations]:
        """Reserve the current batch again for another target partition, because the old one was deleted with its
        records. The caller stores the result, and then calls `mark_reserved`."""
        self._check_phase(Phase.SENDING)
        return self._reserve(self._reserved, topic_id, partition, is_repeat=False)

    def _reservations(self) -> Reservations:
        return [(each.first, each.last, each.reservation) for each in self._reserved]

    def _check_phase(self, phase: Phase) -> None:
        if self.phase is not phase:
            message = f"dead letters are {self.phase.name}, not {phase.name}"
            raise AssertionError(message)


DEAD_RANGES_MAX: Final = 20_000
REDRIVES_MAX: Final = 64
REDRIVE_RANGES_MAX: Final = 20_000
"""Maximum numbers, per share partition, of dead ranges, of redrives, and of the offset ranges of all redrives."""


Intervals = list[tuple[int, int]]
"""Offset ranges (first, last): ascending, disjoint, not adjacent."""


def merge_intervals(pieces: Iterable[tuple[int, int]]) -> Intervals:
    """Sort offset ranges (first, last) and merge those that overlap or are adjacent. Raises `InvalidRequest` for a
    range whose last offset is below its first."""
    joined: Intervals = []
    for first, last in sorted(pieces):
        if last < first:
            raise InvalidRequest(f"offsets {first} to {last} are not a range")
        if joined and first <= joined[-1][1] + 1:
            joined[-1] = (joined[-1][0], max(joined[-1][1], last))
        else:
            joined.append((first, last))
    return joined


def count_offsets(pieces: Iterable[tuple[int, int]]) -> int:
    """Return the number of offsets in disjoint ranges (first, last)."""
    return sum(last - first + 1 for first, last in pieces)


def intersection(one: Sequence[tuple[int, int]], other: Sequence[tuple[int, int]]) -> Intervals:
    """Return the offsets that are in both lists of ranges."""
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
    """Return the offsets of the first list of ranges that are not in the second."""
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


def insert_dead_range(ranges: list[DeadRange], added: DeadRange) -> int:
    """Insert a dead range into an ascending list. If there are more than `DEAD_RANGES_MAX`, the lowest ranges are
    dropped; returns the number of dropped offsets."""
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
    """Dead ranges and redrives of one share partition."""

    __slots__ = ("_ranges", "_redrives", "offset_count")

    def __init__(self, state: LoadedState) -> None:
        self._ranges = sorted(state.dead_ranges)
        self._redrives = {each.redrive_id: list(each.ranges) for each in state.redrives}
        self.offset_count = count_offsets((each.first, each.last) for each in self._ranges)
        """Number of offsets in the dead ranges."""

    def ranges(self) -> tuple[DeadRange, ...]:
        """Return the dead ranges, ascending."""
        return tuple(self._ranges)

    def redrives(self) -> tuple[RedrivenRanges, ...]:
        """Return the redrives with the offsets that each offered, oldest first."""
        return tuple(RedrivenRanges(name, tuple(ranges)) for name, ranges in self._redrives.items())

    def add(self, added: DeadRange) -> None:
        """Add a dead range."""
        self.offset_count += added.last - added.first + 1 - insert_dead_range(self._ranges, added)

    def intersect(self, wanted: Sequence[tuple[int, int]]) -> list[DeadRange]:
        """Return the parts of the dead ranges that lie in the `wanted` offset ranges."""
        found = []
        for first, last in wanted:
            at = max(bisect_right(self._ranges, first, key=lambda each: each.first) - 1, 0)
            while at < len(self._ranges) and self._ranges[at].first <= last:
                each = self._ranges[at]
                if each.last >= first:
                    found.append(each._replace(first=max(each.first, first), last=min(each.last, last)))
                at += 1
        return found

    def remove(self, removed: Sequence[tuple[int, int]]) -> bool:
        """Remove offset ranges from the dead ranges. Returns whether any of the offsets was dead."""
        before = self.offset_count
        kept: list[DeadRange] = []
        for each in self._ranges:
            kept += [
                each._replace(first=first, last=last)
                for first, last in difference([(each.first, each.last)], removed)
            ]
        self._ranges = kept
        self.offset_count = count_offsets((each.first, each.last) for each in kept)
        return self.offset_count != before

    def offered_offsets(self, redrive_id: str) -> Intervals:
        """Return the offset ranges that redrives with this id have offered."""
        return self._redrives.get(redrive_id, [])

    def record_offered(self, redrive_id: str, offered: Iterable[tuple[int, int]]) -> None:
        """Record that a redrive offers these offset ranges. Raises `InvalidRequest` if the redrive has more than
        `REDRIVE_RANGES_MAX` ranges. The oldest redrives are dropped if there are too many."""
        joined = merge_intervals([*self.offered_offsets(redrive_id), *offered])
        if len(joined) > REDRIVE_RANGES_MAX:
            raise InvalidRequest(f"redrive {redrive_id} has too many offset ranges: continue with another id")
        self._redrives.pop(redrive_id, None)
        self._redrives[redrive_id] = joined
        range_count = sum(len(each) for each in self._redrives.values())
        while len(self._redrives) > REDRIVES_MAX or range_count > REDRIVE_RANGES_MAX:
            range_count -= len(self._redrives.pop(next(iter(self._redrives))))
