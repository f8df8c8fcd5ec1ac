"""Key index and limits by key: each guarantee by the shortest scenario that fails without it."""

from __future__ import annotations

import sys
from random import Random
from typing import TYPE_CHECKING

import pytest

from mansio.state.share_partition.free_offsets import FreeOffsets
from mansio.state.share_partition.key_index import (
    COUNTED_RECORDS_MAX,
    DONE,
    FREE,
    LEASED,
    RESTING,
    KeyIndex,
)
from mansio.state.share_partition.key_limits import KeyLimits

if TYPE_CHECKING:
    from types import FrameType

    from _typeshed import TraceFunction

KEY = 7


def index_of(limits: KeyLimits, number: int, start: int = 0, needed_until: int = 0) -> KeyIndex:
    """A new index of the share partition with this number."""
    index = KeyIndex(start, needed_until, is_ordered=False, limits=limits)
    limits.attach(number, index)
    return index


def one_of_two_leased() -> tuple[KeyLimits, KeyIndex, KeyIndex]:
    """Two share partitions with one record of a key each; one is leased, which is the limit."""
    limits = KeyLimits(0.0)
    limits.configure(1, 0.0, 1, 0.0)
    one, other = index_of(limits, 0), index_of(limits, 1)
    one.add(10, {0: KEY}, [(0, 0, FREE)])
    one.on_changed(0, 0, LEASED)
    other.add(10, {5: KEY}, [(5, 5, FREE)])
    assert [*other.pick()] == []
    return limits, one, other


def test_a_lease_that_ended_with_its_share_partition_makes_a_place_for_the_others() -> None:
    """The last change of a share partition was stored, and it is loaded again."""
    limits, _, other = one_of_two_leased()
    limits.detach(0)
    index_of(limits, 0, start=10)
    assert [*other.pick()] == [(5, 5)]


def test_a_lease_that_ends_before_its_key_is_read_again_makes_a_place_for_the_others() -> None:
    """A redrive replaces the index; the acknowledgement comes before the keys are read again."""
    limits, _, other = one_of_two_leased()
    replaced = index_of(limits, 0, needed_until=1)
    assert not limits.are_leases_known, "the lease may exist"
    replaced.on_changed(0, 0, DONE)
    replaced.add(10, {0: KEY}, [])
    assert other.is_offering
    assert [*other.pick()] == [(5, 5)]


def test_a_lease_that_is_counted_again_keeps_its_place() -> None:
    limits, _, other = one_of_two_leased()
    replaced = index_of(limits, 0, needed_until=1)
    replaced.add(10, {0: KEY}, [(0, 0, LEASED)])
    assert other.is_offering
    assert [*other.pick()] == []
    replaced.on_changed(0, 0, DONE)
    assert [*other.pick()] == [(5, 5)]


def lines_of_a_request(resting: int) -> int:
    """How many lines of code a lease and a release of the first record of a key execute, behind which so many rest."""
    limits = KeyLimits(0.0)
    limits.configure(5, 0.0, 1, 0.0)
    index = index_of(limits, 0)
    index.add(resting + 2, dict.fromkeys(range(resting + 2), KEY), [(0, resting + 1, FREE)])
    for offset in range(1, resting + 1):
        index.on_changed(offset, offset, LEASED)
        index.on_changed(offset, offset, RESTING)
    lines = 0

    def count(frame: FrameType, event: str, _: object) -> TraceFunction:
        nonlocal lines
        lines += event == "line"
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        picked = [*index.pick()]
        index.on_changed(0, 0, LEASED)
        others = [*index.pick()]
        index.on_changed(0, 0, FREE)
    finally:
        sys.settrace(before)
    assert picked == [(0, 0), (resting + 1, resting + 1)]
    assert others == [(resting + 1, resting + 1)]
    return lines


def test_a_request_costs_no_more_if_many_records_of_a_key_are_in_a_backoff() -> None:
    assert lines_of_a_request(3_000) < 1_000


@pytest.mark.parametrize("seed", range(4))
def test_free_offsets_are_those_that_were_added_and_not_removed(seed: int) -> None:
    """Most removals are of an offset that is not the lowest one."""
    random, outdated = Random(seed), set[int]()
    sides = [(FreeOffsets(outdated), set[int]()) for _ in range(2)]
    for _ in range(600):
        side = random.randrange(2)
        free, model = sides[side]
        offset = 2 * random.randrange(60) + side
        if offset in model:
            free.remove(offset)
            model.remove(offset)
        else:
            free.add(offset)
            model.add(offset)
        first = min(model, default=None)
        assert free.first == first
        assert [*free.after_first()] == sorted(model - {first})


@pytest.mark.parametrize("seed", range(4))
def test_the_record_that_holds_back_most_others_is_found(seed: int) -> None:
    """Compared with all records of each key, in order; keys have random numbers of records in random states."""
    random = Random(seed)
    for _ in range(60):
        end = random.randrange(1, 40)
        keys = {offset: random.randrange(4) for offset in range(end) if random.random() < 0.9}
        states = {offset: random.choice([FREE, LEASED, RESTING, DONE]) for offset in range(end)}
        index = KeyIndex(0)
        index.add(end, keys, [(offset, offset, FREE) for offset in range(end)])
        for offset, state in states.items():
            if state != FREE:
                index.on_changed(offset, offset, state)
        waiting: dict[int, int] = {}
        for key in set(keys.values()):
            left = [each for each in range(end) if keys.get(each) == key and states[each] != DONE]
            if left and states[left[0]] != FREE:
                waiting[left[0]] = sum(states[each] == FREE for each in left)
        most = max(waiting.values(), default=0)
        found = index.held_back()
        if not most:
            assert found is None
            continue
        assert found is not None
        assert (waiting[found.offset], found.waiting, found.total) == (most, most, sum(waiting.values()))
        assert found.is_complete


def test_the_search_for_what_holds_back_others_is_bounded() -> None:
    index = KeyIndex(0)
    count = 3 * COUNTED_RECORDS_MAX
    index.add(count, dict.fromkeys(range(count), KEY), [(0, count - 1, FREE)])
    index.on_changed(0, 0, LEASED)
    found = index.held_back()
    assert found is not None
    assert (found.offset, found.is_complete) == (0, False)
    assert COUNTED_RECORDS_MAX - 2 <= found.waiting <= COUNTED_RECORDS_MAX
