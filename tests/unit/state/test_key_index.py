"""Key index and limits by key: each guarantee by the shortest scenario that fails without it."""

from __future__ import annotations

from mansio.state.share_partition.key_index import DONE, FREE, LEASED, KeyIndex
from mansio.state.share_partition.key_limits import KeyLimits

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
    assert not other.is_offering, "the lease may exist"
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
