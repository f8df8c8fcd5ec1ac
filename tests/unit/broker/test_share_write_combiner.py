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

    from mansio.errors import MansioError


def update(
    token: int, *, durable: bool = True, whole: bool = False, ranges: int = 1, start: int = 0
) -> Update:
    changes = tuple(
        StateBatch(token * 100 + 2 * n, token * 100 + 2 * n, ACKNOWLEDGED, 1) for n in range(ranges)
    )
    return Update(token, durable, start, 0, 0, changes, whole)


class Desk:
    """Writes as `SharePartitionLeader` does: a write that has begun ends when the test calls `end`."""

    def __init__(self, *, ends_at_once: bool = False) -> None:
        self.writes = WriteCombiner(AsyncioScheduler(asyncio.get_running_loop()), self._begin)
        self.begun: dict[tuple[int, ...], CombinedWrite] = {}
        """Writes in flight, by the tokens of their updates."""
        self.stored: list[int] = []
        self.order: list[int] = []
        self._ends_at_once = ends_at_once

    def _begin(self, write: CombinedWrite) -> None:
        tokens = tuple(each.token for each in write.updates)
        self.begun[tokens] = write
        self.order += tokens
        if self._ends_at_once and not write.durable:
            self.end(*tokens)

    def add(self, *updates: Update) -> None:
        for each in updates:

            def on_stored(error: MansioError | None, token: int = each.token) -> None:
                assert error is None
                self.stored.append(token)

            self.writes.add([each], on_stored)

    def end(self, *tokens: int) -> None:
        """End the write of the updates with these tokens."""
        write = self.begun.pop(tokens)
        for on_stored in self.writes.finish(write):
            on_stored(None)


async def end_of_turn() -> None:
    await asyncio.sleep(0)


def run(check: Callable[[Desk], Awaitable[None]], *, ends_at_once: bool = False) -> None:
    async def main() -> None:
        await check(Desk(ends_at_once=ends_at_once))

    asyncio.run(main())


def test_what_comes_while_something_durable_is_under_way_is_stored_as_one_after_it() -> None:
    async def check(desk: Desk) -> None:
        desk.add(update(1))
        assert set(desk.begun) == {(1,)}
        await end_of_turn()
        desk.add(update(2), update(3))
        assert set(desk.begun) == {(1,)}
        desk.add(update(4, durable=False))
        assert set(desk.begun) == {(1,), (4,)}, "what need not be durable waits for nobody"
        await end_of_turn()
        assert set(desk.begun) == {(1,), (4,)}
        desk.end(1)
        assert set(desk.begun) == {(2, 3), (4,)}
        desk.end(2, 3)
        assert desk.stored == [1, 2, 3]

    run(check)


def test_once_several_come_in_one_turn_of_the_loop_the_next_are_stored_as_one() -> None:
    async def check(desk: Desk) -> None:
        desk.add(update(1, durable=False), update(2, durable=False))
        assert set(desk.begun) == {(1,), (2,)}
        desk.end(1)
        desk.end(2)
        await end_of_turn()
        for begin in (10, 20):
            desk.add(*(update(begin + n, durable=False) for n in range(3)))
            assert not desk.begun
            await end_of_turn()
            desk.end(begin, begin + 1, begin + 2)
        desk.add(update(30, durable=False))
        assert not desk.begun
        await end_of_turn()
        desk.end(30)
        desk.add(update(31, durable=False))
        assert set(desk.begun) == {(31,)}, "one that is alone again waits for nobody"

    run(check)


def test_a_whole_state_is_written_alone_after_what_came_before_and_before_what_comes_after() -> None:
    async def check(desk: Desk) -> None:
        desk.add(update(1), update(2, durable=False), update(3), update(4, whole=True))
        desk.add(update(5, durable=False), update(6))
        assert set(desk.begun) == {(1,), (2,)}
        desk.end(1)
        assert set(desk.begun) == {(2,), (3,)}
        desk.end(3)
        await end_of_turn()
        assert set(desk.begun) == {(2,)}
        desk.end(2)
        assert set(desk.begun) == {(4,)}
        desk.end(4)
        assert set(desk.begun) == {(5,), (6,)}

    run(check)


def test_behind_a_whole_state_what_need_not_be_durable_waits_for_nothing_durable() -> None:
    async def check(desk: Desk) -> None:
        desk.add(update(1), update(2, whole=True), update(3), update(4, ranges=COMBINED_RANGES_MAX))
        desk.add(update(5, durable=False))
        desk.end(1)
        desk.end(2)
        assert set(desk.begun) == {(3,), (5,)}, "or those that come now would be stored before it"

    run(check)


def test_what_is_too_much_for_one_record_is_not_joined() -> None:
    async def check(desk: Desk) -> None:
        desk.add(update(1), update(2, ranges=COMBINED_RANGES_MAX), update(3))
        desk.end(1)
        assert set(desk.begun) == {(2,)}
        desk.end(2)
        assert set(desk.begun) == {(3,)}

    run(check)


def test_writes_that_end_before_they_have_begun_for_their_caller_keep_their_order() -> None:
    async def check(desk: Desk) -> None:
        desk.add(
            update(1), update(2, whole=True), update(3, durable=False), update(4), update(5, durable=False)
        )
        desk.end(1)
        desk.end(2)
        desk.add(update(6, durable=False))
        assert set(desk.begun) == {(4,)}
        desk.end(4)
        assert not desk.writes
        assert desk.order == [1, 2, 3, 4, 5, 6]
        assert sorted(desk.stored) == [1, 2, 3, 4, 5, 6]

    run(check, ends_at_once=True)


def test_any_number_of_writes_that_end_at_once_may_wait_behind_a_whole_state() -> None:
    async def check(desk: Desk) -> None:
        desk.add(update(1), update(2, whole=True))
        for token in range(3, 1_203):
            desk.add(update(token, durable=False, ranges=COMBINED_RANGES_MAX))
        desk.end(1)
        desk.end(2)
        await end_of_turn()
        assert desk.order == list(range(1, 1_203))
        assert sorted(desk.stored) == desk.order
        assert not desk.writes

    run(check, ends_at_once=True)


def test_at_the_end_all_that_waits_has_its_turn() -> None:
    async def check(desk: Desk) -> None:
        desk.add(update(1), update(2), update(3, whole=True), update(4, durable=False))
        desk.writes.end()
        for tokens in tuple(desk.begun):
            desk.end(*tokens)
        assert sorted(desk.stored) == [1, 2, 3, 4]
        assert not desk.writes

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
