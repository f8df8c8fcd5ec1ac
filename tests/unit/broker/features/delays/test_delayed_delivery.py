"""`DelayedDelivery`: its memory does not grow with time, and it forgets closed partitions."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from mansio.broker.features.delays.delayed_delivery import OUTDATED_ENTRIES_MAX, TIMER_MS_MAX, DelayedDelivery
from support.logs import ManualClock, ManualScheduler

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


def test_slices_of_firings_leave_the_number_of_delayed_records_per_slice() -> None:
    clock, scheduler = ManualClock(), ManualScheduler()
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
        before = delivery._slice_records
        manager.has_fired = has_fired
        manager.soon_ms = clock.wall_ms()
        delivery.on_due_changed(cast("Any", manager.partition))
        scheduler.fire()
        assert (delivery._slice_records == before) is has_fired
