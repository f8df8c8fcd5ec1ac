"""What helps against a hot partition: each remedy where it does, none where it would do harm, and moves that gain."""

from __future__ import annotations

from random import Random

from mansio.state.hot_partitions.frequent_keys import KeyCount, KeySample
from mansio.state.hot_partitions.remedies import (
    COOL_DOWN_S,
    GAIN_MIN,
    BrokerLoad,
    HotPartitionFacts,
    LeaderMove,
    RemedyKind,
    choose_remedies,
    plan_leader_moves,
)
from support.tiers import examples

LOADS = (BrokerLoad(1, 1_000, 0.9), BrokerLoad(2, 100, 0.1), BrokerLoad(3, 200, 0.2))
FACTS = HotPartitionFacts(
    leader=1,
    rate=500,
    led_s=COOL_DOWN_S,
    replicas=(1, 2, 3),
    in_sync_replicas=(1, 2, 3),
    partition_count=6,
    is_compacted=False,
)
MANY_KEYS = KeySample(1_000, 0, 4, (KeyCount(b"a", 30),), 10)
ONE_KEY = KeySample(1_000, 0, 4, (KeyCount(b"a", 700), KeyCount(b"b", 10)), 10)


def kinds(
    facts: HotPartitionFacts, move: LeaderMove | None = None, *, is_full: bool = False
) -> list[RemedyKind]:
    return [each.kind for each in choose_remedies(facts, move, is_full=is_full)]


def test_a_group_that_is_behind_needs_parallel_consumers_and_no_move() -> None:
    behind = FACTS._replace(lags=(("fast", 10), ("slow", 500 * 60)), sample=MANY_KEYS)
    found = choose_remedies(behind, None, is_full=False)
    assert [each.kind for each in found] == [RemedyKind.PARALLEL_CONSUMERS, RemedyKind.GROW_TOPIC]
    assert found[0].group == "slow"
    assert kinds(FACTS._replace(lags=(("fast", 500 * 29),))) == []


def test_a_full_broker_needs_a_move_first_even_if_groups_are_behind() -> None:
    (move,) = plan_leader_moves([FACTS], LOADS)
    assert move is not None
    behind = FACTS._replace(lags=(("slow", 500 * 60),))
    assert kinds(behind, move, is_full=True) == [RemedyKind.MOVE_LEADER]


def test_one_key_is_isolated_and_many_are_divided_but_not_in_a_compacted_topic() -> None:
    found = choose_remedies(FACTS._replace(sample=ONE_KEY), None, is_full=False)
    assert [(each.kind, each.key) for each in found] == [(RemedyKind.ISOLATE_KEY, b"a")]
    found = choose_remedies(FACTS._replace(sample=MANY_KEYS), None, is_full=False)
    assert [(each.kind, each.partitions) for each in found] == [(RemedyKind.GROW_TOPIC, 12)]
    assert kinds(FACTS._replace(sample=MANY_KEYS, is_compacted=True)) == []


def test_a_small_or_unclear_sample_is_no_reason_and_records_without_key_are_the_producers() -> None:
    assert kinds(FACTS._replace(sample=KeySample(99, 0, 0, (KeyCount(b"a", 99),), 10))) == []
    one_batch_each = KeySample(400, 0, 0, (KeyCount(b"a", 400),), 4)
    assert kinds(FACTS._replace(sample=one_batch_each)) == []
    unclear = KeySample(1_000, 0, 100, (KeyCount(b"a", 450),), 10)
    assert kinds(FACTS._replace(sample=unclear)) == []
    assert kinds(FACTS._replace(sample=KeySample(1_000, 900, 0, (), 10))) == [RemedyKind.SPREAD_RECORDS]
    assert kinds(FACTS) == []


def test_a_leader_moves_to_the_least_loaded_in_sync_replica_and_the_gain_is_known() -> None:
    assert plan_leader_moves([FACTS], LOADS) == [LeaderMove(1, 2, 0.9, 0.1 + 0.45)]
    lagging = FACTS._replace(in_sync_replicas=(1, 3))
    assert plan_leader_moves([lagging], LOADS) == [LeaderMove(1, 3, 0.9, 0.2 + 0.45)]


def test_no_leader_moves_without_gain_or_within_the_cool_down() -> None:
    alone = [
        (FACTS._replace(rate=1_000), LOADS),  # all of the load would move
        (FACTS, (LOADS[0], BrokerLoad(2, 900, 0.8), BrokerLoad(3, 900, 0.7))),  # others are full, too
        (FACTS, (BrokerLoad(1, 1_000, 0.6), *LOADS[1:])),  # not full
        (FACTS, LOADS[:1]),  # the others did not answer
        (FACTS._replace(led_s=COOL_DOWN_S - 1), LOADS),
        (FACTS._replace(in_sync_replicas=(1,)), LOADS),
    ]
    for facts, loads in alone:
        assert plan_leader_moves([facts], loads) == [None]


def test_a_second_move_counts_on_the_first() -> None:
    """Broker 2 is idle, but has no room for both."""
    loads = (BrokerLoad(1, 1_000, 2.0), BrokerLoad(2, 0, 0.0), BrokerLoad(3, 0, 0.3))
    facts = FACTS._replace(rate=400)
    first, second = plan_leader_moves([facts._replace(rate=350), facts], loads)
    assert second == LeaderMove(1, 2, 2.0, 1.2)
    assert first == LeaderMove(1, 3, 1.2, 0.3 + 0.7)


def test_no_plan_of_a_random_cluster_makes_the_highest_load_higher() -> None:
    for seed in range(examples(200, 2_000)):
        random = Random(seed)
        loads = [
            BrokerLoad(node_id, random.uniform(0, 1_000), random.uniform(0, 1.2)) for node_id in range(1, 6)
        ]
        facts = []
        for _ in range(random.randrange(1, 8)):
            replicas = tuple(random.sample(range(1, 6), 3))
            facts.append(
                FACTS._replace(
                    leader=replicas[0],
                    rate=random.uniform(0, 500),
                    replicas=replicas,
                    in_sync_replicas=replicas[: random.randrange(1, 4)],
                )
            )
        busy = {each.node_id: each.busy for each in loads}
        rates = {each.node_id: each.rate for each in loads}
        before = max(busy.values())
        for each, move in zip(facts, plan_leader_moves(facts, loads), strict=True):
            if move is None:
                continue
            assert move.gain >= GAIN_MIN
            assert move.source == each.leader
            assert move.target in each.in_sync_replicas
            share = min(1.0, each.rate / rates[move.source])
            part = share * next(load.busy for load in loads if load.node_id == move.source)
            busy[move.source] -= part
            busy[move.target] += part
        assert max(busy.values()) <= before + 1e-9
