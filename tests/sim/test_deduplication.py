"""Deduplication in simulated histories: no id is in a log twice within a window, none that was acknowledged is lost,
whatever happens to brokers, disks, clocks, the network and etcd.

`python -m sim.run --seeds 2000000:2000100` runs more of them.
"""

from __future__ import annotations

import os

import pytest

from sim.deduplication import FIRST_SEED
from sim.run import quick_collections, run_seed
from support.nightly_counts import leave

SEEDS = int(os.environ.get("MANSIO_TEST_DEDUPLICATION_SEEDS", "4"))


def run(first: int, count: int) -> None:
    ids = repeats = 0
    with quick_collections():
        for seed in range(first, first + count):
            outcome = run_seed(seed)
            assert not outcome.failure, f"seed {seed}: {outcome.report}"
            ids += outcome.delivered["ids"]
            repeats += outcome.delivered["repeats"]
            leave(
                "histories of deduplication",
                seeds=1,
                faults=outcome.faults,
                **outcome.delivered,
            )
    assert ids > 100
    assert repeats > 20


@pytest.mark.timeout(600)
def test_no_history_stores_an_id_twice_or_loses_one() -> None:
    run(FIRST_SEED, SEEDS)


@pytest.mark.full
@pytest.mark.timeout(600)
def test_no_history_of_several_stores_an_id_twice_or_loses_one() -> None:
    run(FIRST_SEED + 100, 10 * SEEDS)
