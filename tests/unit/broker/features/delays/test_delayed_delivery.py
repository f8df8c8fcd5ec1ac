"""`DelayedDelivery`: its memory does not grow with time, and it forgets closed partitions."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from mansio.broker.features.delays.delayed_delivery import (
    BATCH_RECORDS_MAX,
    OUTDATED_ENTRIES_MAX,
    TIMER_MS_MAX,
    DelayedDelivery,
)
from mansio.host.item_turns import ITEMS_PER_TURN, TURN_S, Work
from support.logs import BenchScheduler, ManualClock, ManualScheduler

if TYPE_CHECKING:
    from mansio.broker.features.delays.delay_manager import DelayManager

DISTANT_MS = 365 * 24 * 3_600_000
DAY_S = 86_400


class _Partition:
    """A partition that is led, and whose deliveries are committed."""

    def __init__(self) -> None:
        self.closed = False
        self.is_leader = True
        self.high_watermark = 0
        self.log = SimpleNamespace(failure=None)
        self.topic = "t"
        self.index = 0


class _Manager:
    """A partition with one record that is due in a year, and one that is always due soon."""

    def __init__(self, clock: ManualClock) -> None:
        self.clock = clock
        self.uncommitted_end = 0
        self.has_fired = False
        self.schedules = SimpleNamespace(retry_soon=lambda: None)
        self.soon_ms: int | None = None
        self.distant_ms = clock.wall_ms() + DISTANT_MS
        self.delivered = 0
        self.partition = _Partition()
        self.view: Any = self
        self.replay: Any = self
        self.is_complete = True

    @property
    def next_wake_ms(self) -> int:
        return self.distant_ms if self.soon_ms is None else self.soon_ms

    def deliver_due(self, records_max: int, bytes_max: int) -> int:
        del records_max, bytes_max
        if self.soon_ms is None or self.soon_ms > self.clock.wall_ms():
            return 0
        self.soon_ms = None
        self.delivered += 1
        return 1


def test_wake_ups_before_a_distant_due_time_leave_nothing_behind() -> None:
    clock, scheduler = ManualClock(), ManualScheduler()
    delivery = DelayedDelivery(clock, cast("Any", scheduler))
    manager = _Manager(clock)
    delivery.attach(cast("DelayManager", manager))
    for _ in range(2_000):
        manager.soon_ms = clock.wall_ms() + 10
        delivery.on_due_changed(cast("Any", manager.partition))
        clock.seconds += 0.02
        scheduler.fire()
    assert manager.delivered == 2_000
    assert len(delivery._queue) <= 2 + OUTDATED_ENTRIES_MAX + 1


def test_a_closed_partition_is_forgotten() -> None:
    clock, scheduler = ManualClock(), ManualScheduler()
    delivery = DelayedDelivery(clock, cast("Any", scheduler))
    manager = _Manager(clock)
    delivery.attach(cast("DelayManager", manager))
    delivery.detach(cast("DelayManager", manager))
    assert delivery._queue == []


def test_a_partition_that_is_tried_again_does_not_wait_for_a_clock_that_was_set_back() -> None:
    """A follower is looked at every second; when it becomes the leader, its records are due."""
    clock, scheduler = ManualClock(), ManualScheduler()
    delivery = DelayedDelivery(clock, cast("Any", scheduler))
    manager = _Manager(clock)
    clock.seconds += DAY_S
    manager.partition.is_leader = False
    manager.soon_ms = clock.wall_ms() - 1_000 * DAY_S
    delivery.attach(cast("DelayManager", manager))
    scheduler.fire()  # not the leader: it is tried again a second later
    clock.seconds -= DAY_S
    manager.partition.is_leader = True
    for _ in range(3):
        clock.seconds += TIMER_MS_MAX / 1000
        scheduler.fire()
    assert manager.delivered == 1


def test_firings_leave_the_number_of_delayed_records_in_a_batch() -> None:
    clock = ManualClock()
    scheduler = ManualScheduler(clock)
    delivery = DelayedDelivery(clock, cast("Any", scheduler))
    manager = _Manager(clock)

    def deliver_slowly(records_max: int, bytes_max: int) -> int:
        del bytes_max
        clock.seconds += 0.02
        manager.soon_ms = None
        return records_max

    manager.deliver_due = deliver_slowly
    delivery.attach(cast("DelayManager", manager))
    for has_fired in (True, False):
        before = delivery._batch_records
        manager.has_fired = has_fired
        manager.soon_ms = clock.wall_ms()
        delivery.on_due_changed(cast("Any", manager.partition))
        scheduler.fire()
        assert (delivery._batch_records == before) is has_fired


class _Backlog(_Manager):
    """A partition with many records that are due; each takes `record_s` to deliver."""

    def __init__(self, clock: ManualClock, count: int, record_s: float) -> None:
        super().__init__(clock)
        self.left = count
        self.record_s = record_s
        self.soon_ms = clock.wall_ms()

    def deliver_due(self, records_max: int, bytes_max: int) -> int:
        del bytes_max
        count = min(records_max, self.left)
        self.clock.seconds += count * self.record_s
        self.left -= count
        self.delivered += count
        if not self.left:
            self.soon_ms = None
        return count


@pytest.mark.parametrize("partition_count", [1, 1_000])
@pytest.mark.parametrize("record_us", [0.0, 1.0, 10.0, 40.0])
def test_a_million_records_that_are_due_at_once_are_delivered_in_turns_of_a_millisecond(
    partition_count: int, record_us: float
) -> None:
    """Between two turns the loop is free, for as long as `call_after_pause` takes."""
    clock = ManualClock()
    scheduler = BenchScheduler(clock)
    delivery = DelayedDelivery(clock, cast("Any", scheduler))
    count = 1_000_000 // partition_count
    managers = [_Backlog(clock, count, record_us / 1e6) for _ in range(partition_count)]
    for manager in managers:
        delivery.attach(cast("DelayManager", manager))
    pauses, longest_s, most = 0, 0.0, 0
    while delivery.delivered_count < count * partition_count:
        before, began = delivery.delivered_count, clock.seconds
        if pauses:
            scheduler.run_one()
        else:
            scheduler.fire()
        pauses += 1
        assert len(scheduler.soon) <= 1
        most = max(most, delivery.delivered_count - before)
        if pauses > 20:  # the size of a batch is found
            longest_s = max(longest_s, clock.seconds - began)
    assert most <= ITEMS_PER_TURN + BATCH_RECORDS_MAX
    assert longest_s <= 2 * TURN_S, "a turn and the last batch of it"
    assert scheduler.slices.longest_s.get(Work.DELAYED_DELIVERY, 0.0) >= longest_s * 0.99
    assert all(manager.delivered == count for manager in managers)
