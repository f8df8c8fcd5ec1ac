"""Assignors on random groups: every partition is assigned once, evenly, deterministically, and with few moves."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mansio.state.assignors import MemberSpec
from mansio.state.assignors.range import RangeAssignor
from mansio.state.assignors.uniform import UniformAssignor
from support.machine import scaled

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

UNIFORM, RANGE = UniformAssignor(), RangeAssignor()
TOPICS = [bytes([number]) * 16 for number in range(4)]
COUNTS = st.fixed_dictionaries(
    {topic: st.integers(0, 7) for topic in TOPICS[:3]}
)  # the fourth does not exist
PARTITIONS = st.tuples(st.sampled_from(TOPICS), st.integers(0, 8))


@st.composite
def groups(draw: st.DrawFn, *, alike: bool = False) -> list[MemberSpec]:
    """Members with any subscriptions (or all the same), and anything as what they had, also what they cannot have."""
    number = draw(st.integers(1, 6))
    subscriptions = st.lists(st.sampled_from(TOPICS), unique=True).map(tuple)
    same = draw(subscriptions)
    return [
        MemberSpec(
            f"m{each}",
            draw(st.none() | st.just(f"i{each}")),
            same if alike else draw(subscriptions),
            draw(st.frozensets(PARTITIONS, max_size=8)),
        )
        for each in draw(st.permutations(range(number)))
    ]


def after(members: list[MemberSpec], target: Mapping[str, Iterable[tuple[bytes, int]]]) -> list[MemberSpec]:
    return [each._replace(assigned=frozenset(target[each.member_id])) for each in members]


@pytest.mark.parametrize("assignor", [UNIFORM, RANGE], ids=["uniform", "range"])
@given(members=groups(), counts=COUNTS)
def test_every_partition_goes_to_one_subscriber_and_again_to_the_same(
    assignor: UniformAssignor | RangeAssignor, members: list[MemberSpec], counts: dict[bytes, int]
) -> None:
    target = assignor.assign(members, counts)
    assert list(target) == sorted(each.member_id for each in members)
    given_out = [each for owned in target.values() for each in owned]
    wanted = {topic for member in members for topic in member.topics}
    assert sorted(given_out) == sorted(
        (topic, index) for topic in wanted for index in range(counts.get(topic, 0))
    )
    for member in members:
        assert {topic for topic, _ in target[member.member_id]} <= set(member.topics)
    assert assignor.assign(members[::-1], dict(reversed(counts.items()))) == target, "the order decides"
    assert assignor.assign(after(members, target), counts) == target, "it moves what it has just placed"


@given(groups(alike=True), COUNTS)
def test_uniform_is_even_and_moves_no_more_than_evenness_needs(
    members: list[MemberSpec], counts: dict[bytes, int]
) -> None:
    target = UNIFORM.assign(members, counts)
    sizes = Counter({each: len(owned) for each, owned in target.items()})
    assert max(sizes.values()) - min(sizes.values()) <= 1
    total = sizes.total()
    valid = {
        each.member_id: {
            (topic, index)
            for topic, index in each.assigned
            if topic in each.topics and index < counts.get(topic, 0)
        }
        for each in members
    }
    first_come = claims_of(members, valid)
    share, one_more = divmod(total, len(members))
    over = sum(len(owned) > share for owned in first_come.values())
    kept_at_most = sum(min(len(owned), share) for owned in first_come.values()) + min(one_more, over)
    kept = sum(len(set(target[each]) & owned) for each, owned in first_come.items())
    assert kept == kept_at_most
    for each in members:  # who compares it to what it was does not look at its partitions
        owned = target[each.member_id]
        assert owned is each.assigned or set(owned) != each.assigned, "a copy of what it had"


def claims_of(
    members: list[MemberSpec], valid: dict[str, set[tuple[bytes, int]]]
) -> dict[str, set[tuple[bytes, int]]]:
    """Of a partition that two say they had, the first by name had it."""
    seen: set[tuple[bytes, int]] = set()
    claims = {}
    for member_id in sorted(each.member_id for each in members):
        claims[member_id] = valid[member_id] - seen
        seen |= valid[member_id]
    return claims


@given(groups(), COUNTS)
def test_uniform_is_as_even_as_subscriptions_allow(
    members: list[MemberSpec], counts: dict[bytes, int]
) -> None:
    """No chain of hand-overs could make it more even, as all ways to hand over say."""
    target = UNIFORM.assign(members, counts)
    loads = {each: len(owned) for each, owned in target.items()}
    can_take = {each.member_id: set(each.topics) for each in members}
    reach = {
        giver: {taker for taker in loads if any(topic in can_take[taker] for topic, _ in target[giver])}
        for giver in loads
    }
    for middle, giver, taker in itertools.product(loads, repeat=3):
        if middle in reach[giver] and taker in reach[middle]:
            reach[giver].add(taker)
    assert all(loads[giver] - loads[taker] <= 1 for giver in loads for taker in reach[giver])


def test_uniform_finds_the_chain_where_no_single_hand_over_helps() -> None:
    """3, 2 and 1 partitions: the first cannot give to the third, but to the second, and that one can."""
    x, y = TOPICS[:2]
    members = [
        MemberSpec("first", None, (x,), frozenset((x, index) for index in range(3))),
        MemberSpec("second", None, (x, y), frozenset({(y, 0), (y, 1)})),
        MemberSpec("third", None, (y,), frozenset({(y, 2)})),
    ]
    target = UNIFORM.assign(members, {x: 3, y: 3})
    assert [len(target[each.member_id]) for each in members] == [2, 2, 2]
    assert sum(len(set(target[each.member_id]) - each.assigned) for each in members) == 2


@given(groups(), COUNTS)
def test_uniform_moves_nothing_of_a_group_that_is_even(
    members: list[MemberSpec], counts: dict[bytes, int]
) -> None:
    members = after(members, UNIFORM.assign(members, counts))
    gone = members.pop()
    if not members:
        return
    target = UNIFORM.assign(members, counts)
    moved = sum(len(set(target[each.member_id]) - each.assigned) for each in members)
    if all(set(each.topics) == set(gone.topics) for each in members):
        assert moved == len(gone.assigned)


@given(st.integers(1, 6), st.integers(1, 9), st.integers(0, 5))
def test_range_gives_runs_that_align_and_a_replacement_takes_the_gap(
    size: int, count: int, replaced: int
) -> None:
    counts = {TOPICS[0]: count, TOPICS[1]: count}
    members = [MemberSpec(f"m{each}", None, tuple(TOPICS[:2]), frozenset()) for each in range(size)]
    target = RANGE.assign(members, counts)
    for owned in target.values():
        runs = [[index for topic, index in owned if topic == each] for each in TOPICS[:2]]
        assert runs[0] == runs[1], "topics with as many partitions do not align"
        assert runs[0] == list(range(runs[0][0], runs[0][-1] + 1)) if runs[0] else True
    members = after(members, target)
    old = members[replaced % size]
    members[replaced % size] = MemberSpec("a-new-one", None, old.topics, frozenset())
    again = RANGE.assign(members, counts)
    if count % size == 0:
        assert again["a-new-one"] == sorted(old.assigned)
    for each in members:
        if each.member_id != "a-new-one" and count % size == 0:
            assert again[each.member_id] == sorted(each.assigned)


@pytest.mark.parametrize("subscriptions", ["alike", "two kinds", "each its own"])
def test_a_thousand_members_share_ten_thousand_partitions_in_a_second(subscriptions: str) -> None:
    topics = [number.to_bytes(16, "big") for number in range(100)]
    counts = dict.fromkeys(topics, 100)

    def wants(number: int) -> tuple[bytes, ...]:
        if subscriptions == "each its own":
            return tuple(topics[(number + step) % 100] for step in range(10))
        return tuple(topics[:50] if subscriptions == "two kinds" and number % 2 else topics)

    for assignor in (UNIFORM, RANGE):
        half = [MemberSpec(f"m{each:04}", None, wants(each), frozenset()) for each in range(500)]
        half = after(half, assignor.assign(half, counts))
        whole = half + [
            MemberSpec(f"m{each:04}", None, wants(each), frozenset()) for each in range(500, 1000)
        ]
        before = time.process_time()
        target = assignor.assign(whole, counts)
        assert time.process_time() - before < scaled(1.0)
        assert sum(len(owned) for owned in target.values()) == 10_000
