"""A share partition over time: what a loop that stands still, or a state that cannot be stored, may hold up."""

from __future__ import annotations

from contextlib import suppress
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from mansio.broker.coordinator.share.partition_leader import STALL_MS
from mansio.broker.coordinator.share.share_partition_manager import (
    DEAD_LETTER_RELOAD_MS,
    LOAD_RETRY_DELAY_MS,
    SharePartitionManager,
)
from mansio.errors import CoordinatorNotAvailable, NotCoordinator, NotLeaderOrFollower, StorageError
from mansio.state.share_partition.types import (
    ACCEPT,
    CAUSE_REJECTED,
    REJECT,
    RENEW,
    AcknowledgementBatch,
    Backoff,
    DeadLetterReservation,
    Producer,
    ShareKey,
    ShareSettings,
)
from support.present import present
from support.share_memory import MemoryPersister
from unit.broker.groups_fixtures import VirtualScheduler

if TYPE_CHECKING:
    from mansio.broker.coordinator.share.partition_leader import SharePartitionLeader
    from mansio.errors import MansioError

LOCK_MS = 5_000
SETTINGS = ShareSettings(
    lock_ms=LOCK_MS,
    delivery_limit=5,
    record_locks_max=100,
    in_flight_batches_max=100,
    lease_bound_step=200,
    is_ordered=False,
    renewal_enabled=True,
    dead_letters_enabled=True,
    backoff=Backoff(0, 1.0, 0, 0.0),
)
TOPIC = bytes(16)


class Clock:
    """`ahead_ms` of what timers know: as much as they are late."""

    def __init__(self, scheduler: VirtualScheduler) -> None:
        self.scheduler = scheduler
        self.ahead_ms = 0.0

    def monotonic(self) -> float:
        return (self.scheduler.now_ms + self.ahead_ms) / 1000

    def wall_ms(self) -> int:
        return round(self.scheduler.now_ms + self.ahead_ms)


class Desk:
    """Takes dead letters and writes none."""

    def __init__(self) -> None:
        self.opened_with: list[int] = []

    def on_loaded(self, share_partition: SharePartitionLeader, producer: Any) -> None:
        del producer
        self.opened_with.append(
            sum(each.last - each.first + 1 for each in share_partition.state_machine.archiving_ranges())
        )

    def add(self, share_partition: SharePartitionLeader, dead: Any) -> None: ...

    def on_closed(self, share_partition: SharePartitionLeader) -> None: ...


class SharePartitionBench:
    """One share partition of 100 records, led here, its state in memory."""

    def __init__(self) -> None:
        self.scheduler = VirtualScheduler()
        self.clock = Clock(self.scheduler)
        self.known_state = MemoryPersister(self.scheduler)
        self.desk = Desk()
        self.settings = SETTINGS
        self.partition: Any = SimpleNamespace(
            name="t-0",
            leader_epoch=0,
            is_leader=True,
            closed=False,
            is_leadership_uncertain=False,
            internal=False,
            priorities=None,
            trace=None,
        )
        self.partition.start_offset, self.partition.end_offset, self.partition.high_watermark = 0, 100, 100
        self.partition.ensure_high_watermark_known = lambda: None
        self.partition.readable_end = lambda isolation_level=0: self.partition.high_watermark
        self.partition.ensure_leader = self._check_leads
        self.shares = SharePartitionManager(
            find_partition=lambda *_: self.partition,
            persister=self.known_state,
            settings=lambda *_: self.settings,
            initial_offset=lambda *_: 0,
            clock=self.clock,
            scheduler=self.scheduler,
            random=SimpleNamespace(uniform=lambda *_: 0.5),
            sessions_max=10,
            dead_letters=self.desk,
        )

    def _check_leads(self) -> None:
        if not self.partition.is_leader:
            raise NotLeaderOrFollower

    def share_partition(self) -> SharePartitionLeader:
        share_partition = self.shares.find_one(ShareKey("g", TOPIC, 0))
        self.scheduler.run(share_partition.wait_until_loaded())
        return share_partition

    def lease(self, share_partition: SharePartitionLeader, last: int) -> None:
        share_partition.state_machine.acquirable_ranges("m", last + 1, 100, share_partition.now_ms())
        _, update = share_partition.call_machine_and_set_timer(
            share_partition.state_machine.acquire,
            "m",
            [(0, last)],
            last + 1,
            strict=True,
            batch_ends=(),
            now_ms=share_partition.now_ms(),
        )
        assert update is not None
        self.scheduler.run(share_partition.persist(update))

    def reject(self, share_partition: SharePartitionLeader, last: int) -> None:
        batches = [AcknowledgementBatch(0, last, bytes([REJECT]))]
        update = share_partition.call_machine_and_set_timer(
            share_partition.state_machine.acknowledge,
            "m",
            batches,
            share_partition.now_ms(),
            self.clock.wall_ms(),
            0.5,
        )
        assert update is not None
        self.scheduler.run(share_partition.persist(update))


def test_leases_end_though_every_timer_is_late() -> None:
    """Who stood still gives members a while to use what they have; who always does gives it back in the end."""
    room = SharePartitionBench()
    share_partition = room.share_partition()
    room.lease(share_partition, 4)
    late_ms = 2 * STALL_MS
    call_later = room.scheduler.call_later
    room.scheduler.call_later = lambda delay_ms, *work: call_later(delay_ms + late_ms, *work)
    room.clock.ahead_ms = late_ms  # the timer that is set already is late, too
    room.scheduler.pass_time(LOCK_MS)
    assert share_partition.state_machine.leased_count == 5, "a while is left"
    room.scheduler.pass_time(2 * (STALL_MS + late_ms))
    assert share_partition.state_machine.leased_count == 0


def test_the_lease_bound_moves_at_once_also_after_a_stall() -> None:
    room = SharePartitionBench()
    share_partition = room.share_partition()
    room.lease(share_partition, 4)
    room.clock.ahead_ms = 2 * STALL_MS
    room.scheduler.pass_time(LOCK_MS + STALL_MS)
    assert share_partition.state_machine.leased_count == 0
    room.scheduler.pass_time(10 * STALL_MS)
    before = share_partition.state_machine.lease_bound
    room.settings = SETTINGS._replace(lease_bound_step=10 * SETTINGS.lease_bound_step)
    share_partition.reconfigure()
    room.scheduler.pass_time(1)
    assert share_partition.state_machine.lease_bound > before


def test_a_renewed_lease_ends_in_time_though_leases_are_shorter_by_now() -> None:
    room = SharePartitionBench()
    share_partition = room.share_partition()
    room.lease(share_partition, 4)
    room.settings = SETTINGS._replace(lock_ms=LOCK_MS // 5)
    share_partition.reconfigure()
    share_partition.acknowledge("m", [AcknowledgementBatch(0, 4, bytes([RENEW]))])
    room.scheduler.pass_time(LOCK_MS // 5 + 1)
    assert share_partition.state_machine.leased_count == 0


def state_lost(room: SharePartitionBench, error: MansioError) -> ShareKey:
    """One member has a lease that the state loses on its way to another broker; the next write finds it gone."""
    share_partition = room.share_partition()
    room.lease(share_partition, 4)
    room.known_state.forget_leases(share_partition.key)
    room.known_state.uncertain(withheld_ms=LOCK_MS)
    room.known_state.fail(1, error)
    acquire = share_partition.state_machine.acquire
    _, update = share_partition.call_machine_and_set_timer(
        acquire, "n", [(5, 9)], 5, strict=True, batch_ends=(), now_ms=share_partition.now_ms()
    )
    with pytest.raises(type(error)):
        room.scheduler.run(share_partition.persist(present(update)))
    return share_partition.key


def test_a_leader_that_lived_on_stores_what_the_state_lost_before_it_hands_out_anything() -> None:
    room = SharePartitionBench()
    key = state_lost(room, CoordinatorNotAvailable("no leader"))
    for again in (False, True):
        room.scheduler.pass_time(2 * LOAD_RETRY_DELAY_MS)
        if not again:
            room.known_state.fail(1, CoordinatorNotAvailable("still none"))
            with pytest.raises(CoordinatorNotAvailable):
                room.share_partition()
    share_partition, stored = room.share_partition(), room.known_state.state(key)
    counts = share_partition.state_machine.counts(share_partition.now_ms())
    assert (counts.withheld, [each[:2] for each in counts.holders]) == (0, [("m", 5), ("n", 5)])
    assert stored is not None
    assert [(each.first, each.last, each.holder) for each in stored.changes] == [(0, 4, "m"), (5, 9, "n")]
    assert share_partition.acknowledge("m", [AcknowledgementBatch(0, 4, bytes([ACCEPT]))]) is not None


@pytest.mark.parametrize("why", ["a write that failed otherwise", "led in a later epoch", "made anew"])
def test_what_a_leader_knew_of_another_time_is_not_believed(why: str) -> None:
    room = SharePartitionBench()
    otherwise = why == "a write that failed otherwise"
    key = state_lost(room, StorageError("damaged") if otherwise else NotCoordinator("moved"))
    room.partition.leader_epoch += why == "led in a later epoch"
    if why == "made anew":
        room.scheduler.run(room.known_state.initialize(key, 1, 0))
    room.scheduler.pass_time(2 * LOAD_RETRY_DELAY_MS)
    share_partition = room.share_partition()
    assert share_partition.state_machine.leased_count == 0
    assert share_partition.state_machine.counts(share_partition.now_ms()).withheld == (
        0 if why == "made anew" else 100
    )
    if otherwise:
        room.known_state.fail(1, NotCoordinator("moved"))
        with pytest.raises(NotCoordinator):
            room.scheduler.run(
                share_partition.persist(
                    present(
                        share_partition.call_machine_and_set_timer(
                            share_partition.state_machine.advance_log_start, 3
                        )
                    )
                )
            )
        room.scheduler.pass_time(2 * LOAD_RETRY_DELAY_MS)
        assert room.share_partition().state_machine.counts(share_partition.now_ms()).withheld == 100, (
            "while it withholds it knows no better"
        )


def test_what_cannot_be_brought_together_is_forgotten_and_withheld(monkeypatch: pytest.MonkeyPatch) -> None:
    """A defect costs one lock's time, and not each load from then on."""

    def broken(*_: Any) -> Any:
        raise AssertionError("they do not fit")

    room = SharePartitionBench()
    state_lost(room, NotCoordinator("moved"))
    monkeypatch.setattr("mansio.broker.coordinator.share.partition_leader.with_known_state", broken)
    room.scheduler.pass_time(2 * LOAD_RETRY_DELAY_MS)
    with pytest.raises(CoordinatorNotAvailable, match="they do not fit"):
        room.share_partition()
    room.scheduler.pass_time(2 * LOAD_RETRY_DELAY_MS)
    share_partition = room.share_partition()
    assert share_partition.state_machine.counts(share_partition.now_ms()).withheld == 100


@pytest.mark.parametrize("reads_fail", [False, True])
def test_dead_letters_go_on_though_no_client_uses_the_group_after_a_failed_write(reads_fail: bool) -> None:
    room = SharePartitionBench()
    share_partition = room.share_partition()
    room.lease(share_partition, 9)
    room.reject(share_partition, 4)
    assert room.desk.opened_with == [0]
    room.known_state.fail(1, CoordinatorNotAvailable("the disk is full"))
    update = share_partition.call_machine_and_set_timer(
        share_partition.state_machine.release_member, "m", share_partition.now_ms()
    )
    assert update is not None
    share_partition.persist_in_background(update)
    if reads_fail:
        read = room.known_state.read
        left = [3]

        async def read_session(*arguments: Any, **_: Any) -> Any:
            left[0] -= 1
            if left[0] >= 0:
                raise CoordinatorNotAvailable("still full")
            return await read(*arguments)

        room.known_state.read = read_session
    room.scheduler.turn()
    assert share_partition.end_error is not None
    room.scheduler.pass_time(5 * DEAD_LETTER_RELOAD_MS)
    assert room.desk.opened_with == [0, 5]


def test_dead_letters_are_taken_up_by_one_timer_however_often_the_state_cannot_be_read() -> None:
    room = SharePartitionBench()
    share_partition = room.share_partition()
    room.lease(share_partition, 9)
    room.reject(share_partition, 4)

    async def read_session(*_: Any, **__: Any) -> Any:
        raise CoordinatorNotAvailable("the disk is gone")

    room.known_state.read = read_session
    share_partition.end(CoordinatorNotAvailable("the disk is gone"))
    for _ in range(10 * DEAD_LETTER_RELOAD_MS // LOAD_RETRY_DELAY_MS):  # members ask as soon as they may
        room.scheduler.pass_time(LOAD_RETRY_DELAY_MS)
        with suppress(CoordinatorNotAvailable):
            room.shares.find_one(ShareKey("g", TOPIC, 0))
        room.scheduler.turn()
    due = [call for *_, timer, call, _ in room.scheduler._timers if not timer.cancelled]
    assert due.count(room.shares._resume_dead_letters) == 1


def test_dead_letters_of_what_is_led_elsewhere_are_left_to_its_leader() -> None:
    room = SharePartitionBench()
    share_partition = room.share_partition()
    room.lease(share_partition, 9)
    room.reject(share_partition, 4)
    share_partition.end(CoordinatorNotAvailable("the disk is full"))
    room.partition.is_leader = False
    room.scheduler.pass_time(10 * DEAD_LETTER_RELOAD_MS)
    assert room.desk.opened_with == [0]
    assert not room.shares._dead_letter_timers


def test_what_is_offered_again_stays_so_though_the_log_lost_records_in_the_same_turn() -> None:
    room = SharePartitionBench()
    share_partition = room.share_partition()
    room.lease(share_partition, 9)
    room.reject(share_partition, 9)
    places = [(0, 9, DeadLetterReservation(TOPIC, 0, 1, 0, 0, CAUSE_REJECTED, "", "m", 0))]
    room.scheduler.run(
        share_partition.persist(
            share_partition.state_machine.reserve(Producer(1, 0, ((TOPIC, 0, 10),)), places)
        )
    )
    room.scheduler.run(share_partition.persist(share_partition.state_machine.mark_archived(places)))
    room.partition.start_offset = 3
    assert share_partition.ready_state_machine() is not None
    update, result = share_partition.call_machine_and_set_timer(
        share_partition.state_machine.redrive, "again", None, 100, share_partition.now_ms()
    )
    assert update is not None
    assert result.redriven == 7
    room.scheduler.run(share_partition.persist(update))
    room.scheduler.turn()
    stored = room.known_state.state(share_partition.key)
    assert stored is not None
    assert (stored.start_offset, stored.dead_ranges) == (3, ())
