"""Writes of one share partition: many cost one record, a whole state is alone, and none waits for ever."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from mansio.broker.coordinator.share.write_combiner import (
    COMBINED_RANGES_MAX,
    CombinedWrite,
    WriteCombiner,
    combine_updates,
)
from mansio.host.asyncio_loop import AsyncioScheduler
from mansio.state.share_partition.types import ACKNOWLEDGED, DeadRange, StateBatch, Update

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from mansio.ports import Promise


def update(
    token: int, *, durable: bool = True, whole: bool = False, ranges: int = 1, start: int = 0
) -> Update:
    changes = tuple(
        StateBatch(token * 100 + 2 * n, token * 100 + 2 * n, ACKNOWLEDGED, 1) for n in range(ranges)
    )
    return Update(token, durable, start, 0, 0, changes, whole)


class Desk:
    """Asks for turns as `SharePartitionLeader` does."""

    def __init__(self) -> None:
        self.turns = WriteCombiner(AsyncioScheduler(asyncio.get_running_loop()))

    def call_and_rearm(self, one: Update) -> CombinedWrite | Promise[bool]:
        return self.turns.join([one]) or self.turns.enqueue([one])


def has_come(turn: CombinedWrite | Promise[bool]) -> bool:
    assert isinstance(turn, CombinedWrite), "it went with another"
    return turn.promise is None or turn.promise.done()


def tokens(turn: CombinedWrite | Promise[bool]) -> list[int]:
    assert isinstance(turn, CombinedWrite)
    return [each.token for each in turn.updates]


async def end_of_turn() -> None:
    await asyncio.sleep(0)


def run(check: Callable[[Desk], Awaitable[None]]) -> None:
    async def main() -> None:
        await check(Desk())

    asyncio.run(main())


def test_what_comes_while_something_durable_is_under_way_is_stored_as_one_after_it() -> None:
    async def check(desk: Desk) -> None:
        first = desk.call_and_rearm(update(1))
        assert has_come(first)
        await end_of_turn()
        second, third = desk.call_and_rearm(update(2)), desk.call_and_rearm(update(3))
        assert not has_come(second)
        assert not isinstance(third, CombinedWrite)
        assert has_come(desk.call_and_rearm(update(4, durable=False))), (
            "what need not be durable waits for nobody"
        )
        await end_of_turn()
        assert not has_come(second)
        desk.turns.finish(first, stored=True)  # type: ignore[arg-type]  # a turn, as was asserted
        assert has_come(second)
        assert tokens(second) == [2, 3]
        desk.turns.finish(second, stored=True)  # type: ignore[arg-type]  # the same
        assert await third

    run(check)


def test_once_several_come_in_one_turn_of_the_loop_the_next_are_stored_as_one() -> None:
    async def check(desk: Desk) -> None:
        alone = [desk.call_and_rearm(update(n, durable=False)) for n in (1, 2)]
        assert all(map(has_come, alone))
        for turn in alone:
            desk.turns.finish(turn, stored=True)  # type: ignore[arg-type]  # a turn
        await end_of_turn()
        for begin in (10, 20):
            first, *others = [desk.call_and_rearm(update(begin + n, durable=False)) for n in range(3)]
            assert not has_come(first)
            await end_of_turn()
            assert has_come(first)
            assert tokens(first) == [begin, begin + 1, begin + 2]
            desk.turns.finish(first, stored=False)  # type: ignore[arg-type]  # a turn
            assert [await each for each in others] == [False, False]  # type: ignore[misc]  # promises
        last = desk.call_and_rearm(update(30, durable=False))
        assert not has_come(last)
        await end_of_turn()
        desk.turns.finish(last, stored=True)  # type: ignore[arg-type]  # a turn
        assert has_come(desk.call_and_rearm(update(31, durable=False))), (
            "one that is alone again waits for nobody"
        )

    run(check)


def test_a_whole_state_is_written_alone_after_what_came_before_and_before_what_comes_after() -> None:
    async def check(desk: Desk) -> None:
        first, quick = desk.call_and_rearm(update(1)), desk.call_and_rearm(update(2, durable=False))
        held = desk.call_and_rearm(update(3))
        whole = desk.call_and_rearm(update(4, whole=True))
        late, later = desk.call_and_rearm(update(5, durable=False)), desk.call_and_rearm(update(6))
        assert not any(map(has_come, (held, whole, late, later)))
        desk.turns.finish(first, stored=True)  # type: ignore[arg-type]  # turns, all of them
        assert has_come(held)
        desk.turns.finish(held, stored=True)  # type: ignore[arg-type]  # the same
        await end_of_turn()
        assert not has_come(whole)
        desk.turns.finish(quick, stored=True)  # type: ignore[arg-type]  # the same
        assert has_come(whole)
        assert not has_come(late)
        assert not has_come(later)
        desk.turns.finish(whole, stored=True)  # type: ignore[arg-type]  # the same
        assert has_come(late)
        assert has_come(later)

    run(check)


def test_behind_a_whole_state_what_need_not_be_durable_waits_for_nothing_durable() -> None:
    async def check(desk: Desk) -> None:
        first = desk.call_and_rearm(update(1))
        whole = desk.call_and_rearm(update(2, whole=True))
        durable, more = (
            desk.call_and_rearm(update(3)),
            desk.call_and_rearm(update(4, ranges=COMBINED_RANGES_MAX)),
        )
        quick = desk.call_and_rearm(update(5, durable=False))
        desk.turns.finish(first, stored=True)  # type: ignore[arg-type]  # turns, all of them
        desk.turns.finish(whole, stored=True)  # type: ignore[arg-type]  # the same
        assert has_come(durable)
        assert not has_come(more)
        assert has_come(quick), "or those that come now would be stored before it"

    run(check)


def test_what_is_too_much_for_one_record_is_not_joined() -> None:
    async def check(desk: Desk) -> None:
        first = desk.call_and_rearm(update(1))
        second = desk.call_and_rearm(update(2, ranges=COMBINED_RANGES_MAX))
        third = desk.call_and_rearm(update(3))
        assert tokens(second) == [2]
        assert tokens(third) == [3]
        desk.turns.finish(first, stored=True)  # type: ignore[arg-type]  # a turn
        assert has_come(second)
        assert not has_come(third)

    run(check)


def test_a_client_that_is_broken_off_while_it_waits_holds_up_no_other() -> None:
    async def check(desk: Desk) -> None:
        first = desk.call_and_rearm(update(1))
        second, third = desk.call_and_rearm(update(2)), desk.call_and_rearm(update(3))
        desk.turns.finish(second, stored=False)  # type: ignore[arg-type]  # a turn that did not come
        assert await third is False  # type: ignore[misc]  # a promise
        desk.turns.finish(first, stored=True)  # type: ignore[arg-type]  # a turn
        assert not desk.turns
        assert has_come(desk.call_and_rearm(update(4)))

    run(check)


def test_at_the_end_all_that_waits_has_its_turn() -> None:
    async def check(desk: Desk) -> None:
        first = desk.call_and_rearm(update(1))
        waiting = [
            desk.call_and_rearm(update(2)),
            desk.call_and_rearm(update(3, whole=True)),
            desk.call_and_rearm(update(4, durable=False)),
        ]
        desk.turns.end()
        assert all(map(has_come, waiting))
        for turn in (first, *waiting):
            desk.turns.finish(turn, stored=False)  # type: ignore[arg-type]  # turns
        assert not desk.turns

    run(check)


def test_several_updates_as_one_say_what_the_last_would() -> None:
    dead = (DeadRange(1, 1, 2, 0),)
    one = combine_updates(
        [
            update(2)._replace(added_dead_ranges=(DeadRange(0, 0, 2, 0),)),
            update(3, start=10)._replace(lease_bound=50, dead_ranges=dead),
            update(4)._replace(added_dead_ranges=(DeadRange(2, 2, 2, 0),)),
            update(1, durable=False, start=30)._replace(done_count=4),
        ]
    )
    assert (one.durable, one.start_offset, one.done_count, one.lease_bound, one.dead_ranges) == (
        True,
        30,
        4,
        50,
        dead,
    )
    assert [change.first for change in one.changes] == [100, 200, 300, 400]
    assert one.added_dead_ranges == (DeadRange(2, 2, 2, 0),), (
        "what all that was dead says already is not said again"
    )
