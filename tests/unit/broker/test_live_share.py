"""A share partition over time: what a loop that stands still, or a state that cannot be stored, may hold up."""

from __future__ import annotations

from contextlib import suppress
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from mansio.broker.share.acknowledging import settle
from mansio.broker.share.live_share import STALL_MS
from mansio.broker.share.share_partitions import LETTERS_AGAIN_MS, RETRY_MS, SharePartitions
from mansio.errors import CoordinatorNotAvailable, NotCoordinator, NotLeaderOrFollower, StorageError
from mansio.state.share_types import (
    ACCEPT,
    CAUSE_REJECTED,
    REJECT,
    RENEW,
    Backoff,
    Producer,
    Settle,
    ShareKey,
    ShareSettings,
    Ticket,
)
from support.share_memory import MemoryPersister
from unit.broker.groups_room import VirtualScheduler

if TYPE_CHECKING:
    from mansio.broker.share.live_share import LiveShare
    from mansio.errors import MansioError

LOCK_MS = 5_000
SETTINGS = ShareSettings(
    lock_ms=LOCK_MS,
    delivery_limit=5,
    locks_max=100,
    ranges_max=100,
    horizon_step=200,
    ordered=False,
    renew=True,
    dead_letters=True,
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

    def opened(self, live: LiveShare, producer: Any) -> None:
        del producer
        self.opened_with.append(sum(each.last - each.first + 1 for each in live.core.archiving()))

    def add(self, live: LiveShare, letters: Any) -> None: ...

    def dropped(self, live: LiveShare) -> None: ...


class Room:
    """One share partition of 100 records, led here, its state in memory."""

    def __init__(self) -> None:
        self.scheduler = VirtualScheduler()
        self.clock = Clock(self.scheduler)
        self.memory = MemoryPersister(self.scheduler)  # type: ignore[arg-type]
        self.desk = Desk()
        self.settings = SETTINGS
        self.partition: Any = SimpleNamespace(
            name="t-0", leader_epoch=0, leads=True, closed=False, outdated=False, internal=False
        )
        self.partition.start_offset, self.partition.end_offset, self.partition.high_watermark = 0, 100, 100
        self.partition.check_complete = lambda: None
        self.partition.check_leads = self._check_leads
        self.shares = SharePartitions(
            find=lambda *_: self.partition,
            persister=self.memory,
            settings=lambda *_: self.settings,
            first_offset=lambda *_: 0,
            clock=self.clock,
            scheduler=self.scheduler,  # type: ignore[arg-type]
            random=SimpleNamespace(uniform=lambda *_: 0.5),  # type: ignore[arg-type]
            sessions_max=10,
            dead_letters=self.desk,  # type: ignore[arg-type]
        )

    def _check_leads(self) -> None:
        if not self.partition.leads:
            raise NotLeaderOrFollower

    def live(self) -> LiveShare:
        live = self.shares.find("g", TOPIC, 0)
        self.scheduler.run(live.loaded())
        return live

    def lease(self, live: LiveShare, last: int) -> None:
        live.core.wanted("m", last + 1, 100, live.now_ms())
        _, update = live.ask(
            live.core.acquire, "m", [(0, last)], last + 1, strict=True, batch_ends=(), now_ms=live.now_ms()
        )
        assert update is not None
        self.scheduler.run(live.perform(update))

    def reject(self, live: LiveShare, last: int) -> None:
        said = [Settle(0, last, bytes([REJECT]))]
        update = live.ask(live.core.settle, "m", said, live.now_ms(), live.wall_ms(), 0.5)
        assert update is not None
        self.scheduler.run(live.perform(update))


def test_leases_end_though_every_timer_is_late() -> None:
    """Who stood still gives members a while to use what they have; who always does gives it back in the end."""
    room = Room()
    live = room.live()
    room.lease(live, 4)
    late_ms = 2 * STALL_MS
    call_later = room.scheduler.call_later
    room.scheduler.call_later = lambda delay_ms, *work: call_later(delay_ms + late_ms, *work)  # type: ignore[method-assign]
    room.clock.ahead_ms = late_ms  # the timer that is set already is late, too
    room.scheduler.pass_time(LOCK_MS)
    assert live.core.leased == 5, "a while is left"
    room.scheduler.pass_time(2 * (STALL_MS + late_ms))
    assert live.core.leased == 0


def test_the_horizon_moves_at_once_also_after_a_stall() -> None:
    room = Room()
    live = room.live()
    room.lease(live, 4)
    room.clock.ahead_ms = 2 * STALL_MS
    room.scheduler.pass_time(LOCK_MS + STALL_MS)
    assert live.core.leased == 0
    room.scheduler.pass_time(10 * STALL_MS)
    before = live.core.horizon
    room.settings = SETTINGS._replace(horizon_step=10 * SETTINGS.horizon_step)
    live.reconfigure()
    room.scheduler.pass_time(1)
    assert live.core.horizon > before


def test_a_renewed_lease_ends_in_time_though_leases_are_shorter_by_now() -> None:
    room = Room()
    live = room.live()
    room.lease(live, 4)
    room.settings = SETTINGS._replace(lock_ms=LOCK_MS // 5)
    live.reconfigure()
    assert settle(live, "m", [Settle(0, 4, bytes([RENEW]))]) is None
    room.scheduler.pass_time(LOCK_MS // 5 + 1)
    assert live.core.leased == 0


def state_lost(room: Room, error: MansioError) -> ShareKey:
    """One member has a lease that the state loses on its way to another broker; the next write finds it gone."""
    live = room.live()
    room.lease(live, 4)
    room.memory.forget_leases(live.key)
    room.memory.uncertain(withheld_ms=LOCK_MS)
    room.memory.fail(1, error)
    acquire = live.core.acquire
    _, update = live.ask(acquire, "n", [(5, 9)], 5, strict=True, batch_ends=(), now_ms=live.now_ms())
    with pytest.raises(type(error)):
        room.scheduler.run(live.perform(update))
    return live.key


def test_a_leader_that_lived_on_stores_what_the_state_lost_before_it_hands_out_anything() -> None:
    room = Room()
    key = state_lost(room, CoordinatorNotAvailable("no leader"))
    for again in (False, True):
        room.scheduler.pass_time(2 * RETRY_MS)
        if not again:
            room.memory.fail(1, CoordinatorNotAvailable("still none"))
            with pytest.raises(CoordinatorNotAvailable):
                room.live()
    live, stored = room.live(), room.memory.state(key)
    counts = live.core.counts(live.now_ms())
    assert (counts.withheld, [each[:2] for each in counts.holders]) == (0, [("m", 5), ("n", 5)])
    assert stored is not None
    assert [(each.first, each.last, each.holder) for each in stored.changes] == [(0, 4, "m"), (5, 9, "n")]
    assert settle(live, "m", [Settle(0, 4, bytes([ACCEPT]))]) is not None


@pytest.mark.parametrize("why", ["a write that failed otherwise", "led in a later epoch", "made anew"])
def test_what_a_leader_knew_of_another_time_is_not_believed(why: str) -> None:
    room = Room()
    otherwise = why == "a write that failed otherwise"
    key = state_lost(room, StorageError("damaged") if otherwise else NotCoordinator("moved"))
    room.partition.leader_epoch += why == "led in a later epoch"
    if why == "made anew":
        room.scheduler.run(room.memory.initialize(key, 1, 0))
    room.scheduler.pass_time(2 * RETRY_MS)
    live = room.live()
    assert live.core.leased == 0
    assert live.core.counts(live.now_ms()).withheld == (0 if why == "made anew" else 100)
    if otherwise:
        room.memory.fail(1, NotCoordinator("moved"))
        with pytest.raises(NotCoordinator):
            room.scheduler.run(live.perform(live.ask(live.core.trimmed, 3)))
        room.scheduler.pass_time(2 * RETRY_MS)
        assert room.live().core.counts(live.now_ms()).withheld == 100, "while it withholds it knows no better"


def test_what_cannot_be_brought_together_is_forgotten_and_withheld(monkeypatch: pytest.MonkeyPatch) -> None:
    """A defect costs one lock's time, and not each load from then on."""

    def broken(*_: Any) -> Any:
        raise AssertionError("they do not fit")

    room = Room()
    state_lost(room, NotCoordinator("moved"))
    monkeypatch.setattr("mansio.broker.share.live_share.remembered", broken)
    room.scheduler.pass_time(2 * RETRY_MS)
    with pytest.raises(CoordinatorNotAvailable, match="they do not fit"):
        room.live()
    room.scheduler.pass_time(2 * RETRY_MS)
    live = room.live()
    assert live.core.counts(live.now_ms()).withheld == 100


@pytest.mark.parametrize("reads_fail", [False, True])
def test_dead_letters_go_on_though_nobody_uses_the_group_after_a_failed_write(reads_fail: bool) -> None:
    room = Room()
    live = room.live()
    room.lease(live, 9)
    room.reject(live, 4)
    assert room.desk.opened_with == [0]
    room.memory.fail(1, CoordinatorNotAvailable("the disk is full"))
    update = live.ask(live.core.release_member, "m", live.now_ms())
    assert update is not None
    live.store(update)
    if reads_fail:
        read = room.memory.read
        left = [3]

        async def reading(*arguments: Any) -> Any:
            left[0] -= 1
            if left[0] >= 0:
                raise CoordinatorNotAvailable("still full")
            return await read(*arguments)

        room.memory.read = reading  # type: ignore[method-assign]
    room.scheduler.turn()
    assert live.ended is not None
    room.scheduler.pass_time(5 * LETTERS_AGAIN_MS)
    assert room.desk.opened_with == [0, 5]


def test_dead_letters_are_taken_up_by_one_timer_however_often_the_state_cannot_be_read() -> None:
    room = Room()
    live = room.live()
    room.lease(live, 9)
    room.reject(live, 4)

    async def reading(*_: Any) -> Any:
        raise CoordinatorNotAvailable("the disk is gone")

    room.memory.read = reading  # type: ignore[method-assign]
    live.end(CoordinatorNotAvailable("the disk is gone"))
    for _ in range(10 * LETTERS_AGAIN_MS // RETRY_MS):  # members ask as soon as they may
        room.scheduler.pass_time(RETRY_MS)
        with suppress(CoordinatorNotAvailable):
            room.shares.find("g", TOPIC, 0)
        room.scheduler.turn()
    due = [call for *_, timer, call, _ in room.scheduler._timers if not timer.cancelled]
    assert due.count(room.shares._take_up) == 1


def test_dead_letters_of_what_is_led_elsewhere_are_left_to_its_leader() -> None:
    room = Room()
    live = room.live()
    room.lease(live, 9)
    room.reject(live, 4)
    live.end(CoordinatorNotAvailable("the disk is full"))
    room.partition.leads = False
    room.scheduler.pass_time(10 * LETTERS_AGAIN_MS)
    assert room.desk.opened_with == [0]
    assert not room.shares._owed


def test_what_is_offered_again_stays_so_though_the_log_lost_records_in_the_same_turn() -> None:
    room = Room()
    live = room.live()
    room.lease(live, 9)
    room.reject(live, 9)
    places = [(0, 9, Ticket(TOPIC, 0, 1, 0, 0, CAUSE_REJECTED, "", "m", 0))]
    room.scheduler.run(live.perform(live.core.reserve(Producer(1, 0, ((TOPIC, 0, 10),)), places)))
    room.scheduler.run(live.perform(live.core.archived(places)))
    room.partition.start_offset = 3
    assert live.look() is not None
    update, result = live.ask(live.core.redrive, "again", None, 100, live.now_ms())
    assert update is not None
    assert result.offered == 7
    room.scheduler.run(live.perform(update))
    room.scheduler.turn()
    stored = room.memory.state(live.key)
    assert stored is not None
    assert (stored.start_offset, stored.dead) == (3, ())
