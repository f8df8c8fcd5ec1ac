"""Division of deliveries and record locks of a fair group."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mansio.state.share_partition.fairness.fair_order import TURN_DIVISOR, FairOrder
from mansio.state.share_partition.types import BACKLOG_QUEUES, BASE
from support.tiers import examples

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from random import Random

NUMBERS = (BASE, *BACKLOG_QUEUES)
WEIGHTS = st.dictionaries(st.sampled_from(NUMBERS), st.integers(1, 20), min_size=2, max_size=6)
REQUESTS = st.lists(st.integers(1, 500), min_size=1, max_size=40)
BACKLOG = 10**9
POLLS = 200


def order_of(weights: Mapping[int, int]) -> FairOrder:
    return FairOrder(lambda number: weights.get(number, 1))


def deliver(order: FairOrder, records: int, available: Mapping[int, int]) -> dict[int, int]:
    """Deliver as `SharePartitions.acquire` does."""
    delivered: dict[int, int] = {}
    for number, count in order.divide(records, available):
        delivered[number] = delivered.get(number, 0) + count
    order.record(delivered, available)
    return delivered


def add(totals: dict[int, int], delivered: Mapping[int, int]) -> None:
    for number, count in delivered.items():
        totals[number] = totals.get(number, 0) + count


def turn_of(requests: Iterable[int]) -> int:
    return max(max(each // TURN_DIVISOR, 1) for each in requests)


@settings(max_examples=examples(50, 500))
@given(WEIGHTS, REQUESTS)
def test_deliveries_of_backlogs_divide_by_weight_within_one_turn(
    weights: dict[int, int], requests: list[int]
) -> None:
    order, totals = order_of(weights), dict.fromkeys(weights, 0)
    turn = turn_of(requests)
    for records in requests:
        add(totals, deliver(order, records, dict.fromkeys(weights, BACKLOG)))
        for one, weight in weights.items():
            for other, other_weight in weights.items():
                difference = totals[one] / weight - totals[other] / other_weight
                assert difference <= turn / weight + turn / other_weight + 1e-6


@settings(max_examples=examples(50, 500))
@given(WEIGHTS, REQUESTS, st.integers(1, 2_000))
def test_a_share_partition_that_was_idle_has_no_credit(
    weights: dict[int, int], requests: list[int], before: int
) -> None:
    idle = max(weights)
    order, totals = order_of(weights), dict.fromkeys(weights, 0)
    backlogs = dict.fromkeys(weights, BACKLOG)
    deliver(order, before, backlogs)  # it was served once
    for _ in range(20):
        deliver(order, before, {**backlogs, idle: 0})
    turn = turn_of((before, *requests))
    for records in requests:
        add(totals, deliver(order, records, backlogs))
        for other, weight in weights.items():
            credit = totals[idle] / weights[idle] - totals[other] / weight
            assert credit <= turn / weights[idle] + turn / weight + 1e-6


@settings(max_examples=examples(100, 1_000))
@given(
    st.lists(
        st.tuples(st.integers(1, 500), st.dictionaries(st.sampled_from(NUMBERS), st.integers(0, 300))),
        max_size=10,
    )
)
def test_what_one_share_partition_cannot_use_goes_to_the_others(
    requests: list[tuple[int, dict[int, int]]],
) -> None:
    order = order_of({})
    for records, available in requests:
        delivered = deliver(order, records, available)
        assert sum(delivered.values()) == min(records, sum(available.values()))
        assert all(count <= available[number] for number, count in delivered.items())


@settings(max_examples=examples(20, 200))
@given(st.integers(1, 50), st.floats(0, 1), st.randoms(use_true_random=False), st.booleans())
def test_leases_that_expire_count_as_the_mean(
    held_ms: int, expired: float, chance: Random, is_known: bool
) -> None:
    one, other = BACKLOG_QUEUES[0], BACKLOG_QUEUES[1]
    order, totals = order_of({}), {one: 0, other: 0}
    for number in (one, other) if is_known else (one,):
        for _ in range(100):
            order.record_end(number, 1, held_ms)
    for _ in range(POLLS):
        delivered = deliver(order, 1, dict.fromkeys(totals, BACKLOG))
        add(totals, delivered)
        for number, records in delivered.items():
            if number == one or chance.random() >= expired:
                order.record_end(number, records, records * held_ms)
    assert abs(totals[one] - totals[other]) <= 2


def test_durations_of_leases_are_divided_and_not_their_number() -> None:
    slow, quick = BACKLOG_QUEUES[0], BACKLOG_QUEUES[1]
    order, totals = order_of({}), {slow: 0, quick: 0}
    for _ in range(2_000):
        delivered = deliver(order, 1, dict.fromkeys(totals, BACKLOG))
        add(totals, delivered)
        for number, records in delivered.items():
            order.record_end(number, records, records * (40 if number == slow else 10))
    assert totals[quick] / totals[slow] == pytest.approx(4, rel=0.1)


@settings(max_examples=examples(30, 300))
@given(WEIGHTS, st.sampled_from([0, 1, 60_000, 12 * 3_600_000]))
def test_a_new_record_waits_for_one_turn_of_each_other_also_after_a_long_lease(
    weights: dict[int, int], held_ms: int
) -> None:
    weights = {**weights, BASE: 1}
    others = {number: BACKLOG for number in weights if number != BASE}
    order = order_of(weights)
    for number in weights:
        order.record_end(number, 10, 10)  # then the means are known
    deliver(order, 8, {**others, BASE: 8})
    order.record_end(BASE, 1, held_ms)
    debt = 10 + 8  # of the long lease, and of the first deliveries
    before, before_max = 0, sum(weights[number] * debt + 1 for number in others) + 8
    while not (delivered := deliver(order, 8, {**others, BASE: 1})).get(BASE):
        before += sum(delivered.values())
        assert before <= before_max


@settings(max_examples=examples(100, 1_000))
@given(
    st.integers(1, 40), st.lists(st.tuples(st.sampled_from(NUMBERS[:4]), st.integers(-20, 40)), max_size=60)
)
def test_a_backlog_queue_never_has_more_than_half_of_the_locks(
    locks_max: int, steps: list[tuple[int, int]]
) -> None:
    order, leased = order_of({}), dict.fromkeys(NUMBERS[:4], 0)
    for number, records in steps:
        if records < 0:
            leased[number] = max(leased[number] + records, 0)
            continue
        leased[number] += min(records, max(order.free_locks(number, leased, locks_max), 0))
        assert sum(leased.values()) <= locks_max
        assert number == BASE or leased[number] <= (locks_max + 1) // 2
    assert order.free_locks(BASE, leased, locks_max) == locks_max - sum(leased.values())
