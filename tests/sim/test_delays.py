"""Delayed records in simulated histories: delivered once, never early, and not after a cancellation, whatever happens
to brokers, disks, clocks, the network and etcd.

`python -m sim.run --seeds 1000000:1000040` runs more of them.
"""

from __future__ import annotations

from collections import Counter

import pytest

from sim.delays import FIRST_SEED
from sim.run import quick_collections, run_seed
from sim.world import World
from support.nightly_counts import leave

SMOKE_SEEDS = 4
SEEDS_OF_FULL = 36


def run(first: int, count: int) -> Counter[str]:
    """Run histories, and return how much there was of all."""
    done: Counter[str] = Counter()
    with quick_collections():
        for seed in range(first, first + count):
            outcome = run_seed(seed)
            assert not outcome.failure, f"seed {seed}: {outcome.report}"
            leave(
                "histories of delayed records",
                seeds=1,
                faults=outcome.faults,
                **outcome.delivered,
            )
            done.update(outcome.delivered)
    return done


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("first", "count"),
    [
        pytest.param(FIRST_SEED, SMOKE_SEEDS, id="smoke"),
        pytest.param(
            FIRST_SEED + SMOKE_SEEDS, SEEDS_OF_FULL - SMOKE_SEEDS, id="more", marks=pytest.mark.full
        ),
    ],
)
def test_no_history_loses_doubles_or_hurries_a_delayed_record(first: int, count: int) -> None:
    done = run(first, count)
    assert set(+done) == {
        "delayed records accepted",
        "delayed records delivered",
        "cancelled",
        "moved",
        "firings",
    }


def test_one_seed_gives_one_history_of_delayed_records() -> None:
    traces = []
    for _ in range(2):
        world = World(FIRST_SEED + 1, faults_ms=3000)
        world.run()
        traces.append(world.simulation.trace)
    assert len(set(traces)) == 1
