"""Ranges of dead records when they are many and scattered."""

from __future__ import annotations

from typing import Any

from mansio.state.share_partition.dead_letters import DEAD_RANGES_MAX, difference


class Counted(list[tuple[int, int]]):
    """Counts what is taken out of it."""

    taken = 0

    def __getitem__(self, at: Any) -> Any:
        found = super().__getitem__(at)
        Counted.taken += len(found) if isinstance(at, slice) else 1
        return found


def test_what_is_left_of_much_that_is_scattered_is_found_without_looking_at_all_of_it_each_time() -> None:
    dead = [(at * 3, at * 3) for at in range(DEAD_RANGES_MAX)]
    assert difference(dead, Counted(dead[::2])) == dead[1::2]
    assert Counted.taken < 40 * DEAD_RANGES_MAX
