"""Share groups in simulated histories: no acknowledgement is undone, no record is lost or had by two at a time, each
dead letter is there once, and counts never go back, whatever happens to brokers, disks, the network and etcd.

`python -m sim.run --seeds 300000:300040` runs more of them.
"""

from __future__ import annotations

import os

import pytest

from sim import fairness, key_limits, key_order, priorities
from sim.delivery import FIRST_SEED, LONG_LEASES_FIRST_SEED
from sim.run import quick_collections, run_seed
from sim.world import World
from support.nightly_counts import leave
from support.present import present
from support.tiers import examples, smoke_first

SEEDS = int(os.environ.get("MANSIO_TEST_DELIVERY_SEEDS", "3"))
KEY_ORDER_SEEDS = int(os.environ.get("MANSIO_TEST_DELIVERY_SEEDS", examples(10, 10, 30)))
BROKE_A_PROMISE = FIRST_SEED + 4
"""A late acknowledgement of what another member had settled was confirmed."""

FAIRNESS_SEEDS = int(os.environ.get("MANSIO_TEST_DELIVERY_SEEDS", examples(3, 3, 30)))
LIMITED_SEEDS = 6
LOST_A_RECORD = fairness.FIRST_SEED + 1013
"""A leader that did not know the high watermark yet removed a backlog queue with a record that was not done."""

BEGAN_TOO_LATE = fairness.FIRST_SEED + 5034
"""A new leader let an isolation begin before the first offset of its backlog queue."""

DOUBLED_A_DELIVERY = fairness.FIRST_SEED + 43
"""A request that created a state was repeated by the network, and the state was empty again."""


def run(first: int, count: int) -> None:
    with quick_collections():
        for seed in range(first, first + count):
            outcome = run_seed(seed)
            assert not outcome.failure, f"seed {seed}: {outcome.report}"
            leave("histories of deliveries", seeds=1, faults=outcome.faults, **outcome.delivered)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "seed",
    smoke_first(*range(FIRST_SEED, FIRST_SEED + SEEDS), BROKE_A_PROMISE, LONG_LEASES_FIRST_SEED),
)
def test_no_history_undoes_loses_or_doubles_a_delivery(seed: int) -> None:
    run(seed, 1)


@pytest.mark.parametrize("seed", smoke_first(key_order.FIRST_SEED, key_order.FIRST_SEED + 1))
def test_no_history_breaks_the_order_of_a_key_or_shortens_a_chosen_lease(seed: int) -> None:
    run(seed, 1)


@pytest.mark.full
@pytest.mark.timeout(600)
def test_no_history_of_some_tens_breaks_the_order_of_a_key_or_shortens_a_chosen_lease() -> None:
    run(key_order.FIRST_SEED + 2, KEY_ORDER_SEEDS)


@pytest.mark.full
def test_no_history_with_priorities_undoes_loses_or_doubles_a_delivery() -> None:
    run(priorities.FIRST_SEED, 1)


@pytest.mark.full
@pytest.mark.timeout(600)
def test_no_history_of_some_tens_with_priorities_undoes_loses_or_doubles_a_delivery() -> None:
    run(priorities.FIRST_SEED + 1, KEY_ORDER_SEEDS)


@pytest.mark.parametrize("seed", smoke_first(key_limits.FIRST_SEED, key_limits.FIRST_SEED + 6))
def test_no_history_exceeds_a_limit_by_key(seed: int) -> None:
    """The limits are set, changed, turned off and on while brokers fail."""
    world = World(seed)
    with quick_collections():
        world.run()
    assert world.delivery is not None
    limits = present(world.delivery.limits)
    assert world.delivery.changer.changes >= len(key_limits.TURNS)
    assert min(limits.checked_leases, limits.checked_rates) > 50


@pytest.mark.full
@pytest.mark.timeout(600)
def test_no_history_of_some_tens_exceeds_a_limit_by_key() -> None:
    run(key_limits.FIRST_SEED + 2, KEY_ORDER_SEEDS)


@pytest.mark.full
@pytest.mark.timeout(600)
def test_no_history_with_fairness_undoes_loses_or_doubles_a_delivery() -> None:
    run(fairness.FIRST_SEED, FAIRNESS_SEEDS)
    run(fairness.LIMITED_FIRST_SEED, LIMITED_SEEDS)
    for seed in (LOST_A_RECORD, BEGAN_TOO_LATE, DOUBLED_A_DELIVERY):
        run(seed, 1)


@pytest.mark.full
def test_one_seed_gives_one_history() -> None:
    traces = []
    for _ in range(2):
        world = World(FIRST_SEED + 6, faults_ms=3000)
        world.run()
        traces.append(world.simulation.trace)
        assert world.delivery is not None
        assert world.delivery.history.accepted > 0
    assert len(set(traces)) == 1
