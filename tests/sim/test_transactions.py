"""Transactions in simulated histories: none is read before its commit or after its abort, lost, doubled or visible in
part, offsets are committed with the records, and zombies are fenced, whatever happens to brokers, disks, clocks, the
network and etcd.

The seed of a history that fails is in the message; `python -m sim.run --seeds 3000007 --verbose` repeats it, with
`src` and `tests` on PYTHONPATH.
"""

from __future__ import annotations

from collections import Counter

import pytest

from sim.run import quick_collections, run_seed
from sim.transactions import FIRST_SEED
from sim.world import World
from support.nightly_counts import leave

SMOKE_SEEDS = 2
SEEDS_OF_FULL = 60


def run(first: int, count: int) -> Counter[str]:
    """Run histories, and return how much there was of all."""
    done: Counter[str] = Counter()
    with quick_collections():
        for seed in range(first, first + count):
            outcome = run_seed(seed)
            assert not outcome.failure, f"python -m sim.run --seeds {seed} --verbose\n{outcome.report}"
            leave(
                "histories of transactions",
                seeds=1,
                faults=outcome.faults,
                **outcome.delivered,
            )
            done.update(outcome.delivered)
    print(dict(done))
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
def test_no_history_reads_loses_doubles_or_breaks_a_transaction_against_its_outcome(
    first: int, count: int
) -> None:
    done = run(first, count)
    assert not [name for name, number in done.items() if number == 0]
    assert done["commits acknowledged"] > 10 * count


@pytest.mark.full
def test_one_seed_gives_one_history_of_transactions() -> None:
    traces = []
    for _ in range(2):
        world = World(FIRST_SEED + 1, faults_ms=3000)
        world.run()
        traces.append(world.simulation.trace)
    assert len(set(traces)) == 1
