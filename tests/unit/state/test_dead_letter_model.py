"""Dead-letter queue compared with a list: one copy of each dead-lettered record, wherever a crash happens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mansio.errors import OutOfOrderSequence
from mansio.state.producers import ProducerTable
from mansio.state.share_partition.dead_letters import DeadLetterBatch, DeadLetterQueue, Phase
from mansio.state.share_partition.machine import SharePartition, new_reservation
from mansio.state.share_partition.types import (
    REJECT,
    AcknowledgementBatch,
    ArchivingRange,
    Backoff,
    Producer,
    ShareKey,
    ShareSettings,
    Update,
)
from mansio.wire.batch.record_batch import BatchHeader
from support.present import present
from support.share_store import Store
from support.tiers import examples, repetitions

if TYPE_CHECKING:
    from collections.abc import Iterator

KEY = ShareKey("g", b"s" * 16, 0)
SETTINGS = ShareSettings(100, 3, 50, 100, 100, False, True, True, Backoff(0, 1.0, 0, 0.0))
TARGET, OTHER = b"t" * 16, b"u" * 16
HOURS_13 = 13 * 60 * 60 * 1000


class Target:
    """A partition of the dead-letter topic."""

    def __init__(self) -> None:
        self.offsets: list[int] = []
        self.table = ProducerTable()

    def append(self, batch: DeadLetterBatch) -> None:
        """Raises `OutOfOrderSequence`; a repeat changes nothing."""
        header = self.header(batch, batch.base_sequence)
        if self.table.check(header) is None:
            self.table.record(header, len(self.offsets), 0)
            self.offsets += offsets_of(batch)

    @staticmethod
    def header(batch: DeadLetterBatch, sequence: int) -> BatchHeader:
        last = batch.record_count - 1
        return BatchHeader(0, 61, 0, 2, 0, 0, last, 5, 5, batch.producer_id, batch.epoch, sequence, last + 1)


def offsets_of(batch: DeadLetterBatch) -> list[int]:
    return [o for each in batch.ranges for o in range(each.first, each.last + 1)]


class DeadLetterModel(RuleBasedStateMachine):
    """`work` is what the broker does, arrow by arrow; a crash leaves what is stored and what the target has."""

    def __init__(self) -> None:
        super().__init__()
        self.store, self.targets = Store(), {TARGET: Target(), OTHER: Target()}
        self.now, self.next_offset, self.producers, self.confused = 0.0, 0, 0, False
        self.given_up: set[int] = set()
        self.where = TARGET
        self.load()

    def load(self) -> None:
        state = self.store.fold()
        self.state_machine = SharePartition(
            KEY, SETTINGS, state, leader_epoch=1, log_start=0, log_end=10_000, high_watermark=10_000,
            now_ms=self.now, wall_ms=round(self.now),
        )  # fmt: skip
        self.queue = DeadLetterQueue(state.producer)
        for archiving_range in sorted(
            self.state_machine.archiving_ranges(), key=lambda each: each.reservation.producer_id < 0
        ):
            self.queue.add(archiving_range)
        self.working = self.work()

    def write(self, update: Update) -> Iterator[None]:
        """Arrow: it may never come to be stored, or be stored without anybody knowing."""
        yield
        self.store.append(update)
        yield
        for archiving_range in self.state_machine.mark_persisted(update.token):
            self.queue.add(archiving_range)

    def work(self) -> Iterator[None]:
        while True:
            yield
            if self.queue.needs_reservation:
                if self.queue.needs_producer:
                    self.producers += 1
                    self.queue.set_producer(self.producers)
                yield from self.write(
                    self.state_machine.reserve(*self.queue.reserve(self.where, 0, self.batch_max))
                )
                self.queue.mark_reserved()
            self.now = max(self.now, self.queue.retry_at_ms)
            batch = self.queue.next_batch(self.now)
            if batch is not None:
                yield from self.send(batch)

    def send(self, batch: DeadLetterBatch) -> Iterator[None]:
        target = self.targets[batch.topic_id]
        yield
        there = batch.may_be_unrecognized(round(self.now)) and set(offsets_of(batch)) <= set(target.offsets)
        if not there:
            try:
                target.append(batch)
            except OutOfOrderSequence:
                if not set(offsets_of(batch)) <= set(target.offsets):
                    yield from self.write(self.state_machine.reserve(*self.queue.reserve_in_new_epoch()))
                    self.queue.mark_reserved()
                    return
            yield
            if self.answer_lost:
                self.answer_lost = False
                self.queue.mark_failed(self.now)
                return
        yield from self.write(self.state_machine.mark_archived(self.queue.mark_written()))
        self.queue.mark_finished()

    def put(self, update: Update | None) -> None:
        for _ in self.write(update) if update else ():
            pass

    batch_max = 5
    answer_lost = False

    @rule(size=st.integers(1, 7), skip=st.integers(0, 2))
    def give_up(self, size: int, skip: int) -> None:
        first = self.next_offset + skip
        self.next_offset = last = first + size
        state_machine, now, wall = self.state_machine, self.now, round(self.now)
        self.put(state_machine.tick(now, wall, 0.5))
        read = [(first, last - 1)]
        self.put(state_machine.acquire("m", read, size, strict=True, batch_ends=(), now_ms=now)[1])
        self.put(
            state_machine.acknowledge(
                "m", [AcknowledgementBatch(first, last - 1, bytes([REJECT]))], now, wall, 0.5
            )
        )
        self.given_up.update(range(first, last))

    @rule(arrows=st.integers(1, 9))
    def apply_update(self, arrows: int) -> None:
        for _ in range(arrows):
            next(self.working)

    @rule()
    def crash(self) -> None:
        self.load()

    @rule(most=st.integers(1, 9))
    def batches_are_cut_otherwise(self, most: int) -> None:
        self.batch_max = most

    @rule()
    def lose_an_answer(self) -> None:
        self.answer_lost = True

    @rule()
    def target_is_another_from_now_on(self) -> None:
        self.where = OTHER if self.where == TARGET else TARGET

    @rule()
    def target_forgets(self) -> None:
        """After a day it knows its producers no more."""
        self.now += HOURS_13
        for target in self.targets.values():
            target.table = ProducerTable()

    @precondition(lambda self: self.state_machine.archiving_ranges())
    @rule()
    def target_is_confused(self) -> None:
        """It takes the producer's next batch for one out of order."""
        for each in self.state_machine.archiving_ranges():
            reservation = each.reservation
            if reservation.producer_id >= 0:
                last = each.last - each.first
                header = BatchHeader(
                    0,
                    61,
                    0,
                    2,
                    0,
                    0,
                    last,
                    5,
                    5,
                    reservation.producer_id,
                    reservation.epoch,
                    reservation.sequence + 1_000,
                    last + 1,
                )
                self.targets[reservation.topic_id].table.record(header, 0, 0)

    @invariant()
    def one_copy_each_and_none_is_archived_without(self) -> None:
        copies = [o for target in self.targets.values() for o in target.offsets]
        assert len(copies) == len(set(copies))
        assert set(copies) <= self.given_up
        open_ = {
            o for each in self.state_machine.archiving_ranges() for o in range(each.first, each.last + 1)
        }
        busy = {o for s in self.state_machine.ranges if s.pending_token for o in range(s.first, s.last + 1)}
        assert self.given_up - open_ - busy <= set(copies)

    def teardown(self) -> None:
        """Left alone, all of them get there."""
        self.load()
        for _ in range(2_000):
            if self.queue.phase is Phase.OPEN and not self.queue.waiting_record_count:
                break
            next(self.working)
        assert self.queue.waiting_record_count == 0
        assert sorted(o for target in self.targets.values() for o in target.offsets) == sorted(self.given_up)
        assert not self.state_machine.archiving_ranges()
        assert self.state_machine.counts(self.now).dead == len(self.given_up)


EXAMPLES = examples(20, repetitions(100, 300), 5_000)
DeadLetterModel.TestCase.settings = settings(max_examples=EXAMPLES, stateful_step_count=50)
TestDeadLetterModel = DeadLetterModel.TestCase


def test_sequence_goes_round_in_the_middle_of_a_batch() -> None:
    queue = DeadLetterQueue(Producer(1, 0, ((TARGET, 0, 2**31 - 2),)))
    for first in (30, 10, 20):
        queue.add(ArchivingRange(KEY, first, first + 1, 1, new_reservation(1, "", "m", 5)))
    producer, places = queue.reserve(TARGET, 0, 6)
    assert [reservation.sequence for _, _, reservation in places] == [2**31 - 2, 0, 2]
    assert producer.sequences == ((TARGET, 0, 4),)
    again = DeadLetterQueue(producer)
    for first, last, reservation in sorted(places):
        again.add(ArchivingRange(KEY, first, last, 1, reservation))
    batch = present(again.next_batch(0))
    assert (batch.base_sequence, offsets_of(batch)) == (2**31 - 2, [30, 31, 10, 11, 20, 21])
    assert batch.is_repeat
