"""Turns of the event loop: other work runs in time, the clock is asked rarely, and the longest slice is kept."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mansio.host.item_turns import ITEMS_PER_LOOK, ITEMS_PER_TURN, TURN_S, ItemTurns, Work
from mansio.ports import SliceTimes
from unit.broker.groups_fixtures import VirtualScheduler

if TYPE_CHECKING:
    from collections.abc import Callable


class CountedClock:
    """Time that only a test advances; the number of looks at it is counted."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.looks = 0

    def __call__(self) -> float:
        self.looks += 1
        return self.seconds


def scheduler_of(clock: Callable[[], float]) -> VirtualScheduler:
    scheduler = VirtualScheduler()
    scheduler.slices = SliceTimes(clock)
    return scheduler


def test_other_work_runs_when_the_time_of_a_turn_is_over() -> None:
    """An item takes a tenth of a turn: a turn ends at the first look at the clock after ten of them."""
    clock = CountedClock()
    scheduler = scheduler_of(clock)
    slices = [0]
    has_ended = False

    def others() -> None:
        slices.append(0)
        if not has_ended:
            scheduler.call_soon(others)

    async def work() -> None:
        nonlocal has_ended
        turns = ItemTurns(scheduler, Work.CHECKPOINT)
        for _ in range(1_000):
            clock.seconds += TURN_S / 10
            slices[-1] += 1
            await turns.next()
        has_ended = True

    scheduler.spawn(work(), name="work")
    scheduler.call_soon(others)
    scheduler.turn()
    assert has_ended
    assert max(slices) <= 10 + ITEMS_PER_LOOK
    assert scheduler.slices.longest_s[Work.CHECKPOINT] <= (10 + ITEMS_PER_LOOK) * TURN_S / 10


def test_a_turn_has_a_bounded_number_of_items_even_if_no_time_passes() -> None:
    turns = ItemTurns(scheduler_of(lambda: 0.0))
    assert sum(turns.is_over() for _ in range(ITEMS_PER_TURN)) == 1
    turns.begin()
    assert turns.is_over(ITEMS_PER_TURN), "items that are counted together"


def test_an_item_that_takes_long_ends_the_turn_where_the_clock_is_asked_after_each() -> None:
    clock = CountedClock()
    turns = ItemTurns(scheduler_of(clock), items_per_look=1)
    assert not turns.is_over()
    clock.seconds += TURN_S
    assert turns.is_over()
    turns.begin()
    assert not turns.is_over()


def test_the_clock_is_asked_once_for_several_items() -> None:
    clock = CountedClock()
    turns = ItemTurns(scheduler_of(clock))
    for _ in range(ITEMS_PER_TURN - 1):
        assert not turns.is_over()
    assert clock.looks <= 1 + ITEMS_PER_TURN // ITEMS_PER_LOOK


def test_the_longest_slice_of_each_kind_of_work_is_kept() -> None:
    clock = CountedClock()
    scheduler = scheduler_of(clock)
    for work, seconds in (
        (Work.RETENTION, 0.25),
        (Work.RETENTION, 0.125),
        (Work.CHECKPOINT, 0.5),
        (None, 2.0),
    ):
        turns = ItemTurns(scheduler, work)
        clock.seconds += seconds
        assert turns.end() == seconds
    assert scheduler.slices.longest_s == {Work.RETENTION: 0.25, Work.CHECKPOINT: 0.5}
