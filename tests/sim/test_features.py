"""Features of partitions in simulated histories: whatever happens to brokers, disks, clocks, the network and etcd,

* delayed records are delivered once, never early, and not after a cancellation;
* no id is in a log twice within its deduplication window, and none that was acknowledged is lost;
* no record of a transaction is read before its commit or after its abort, none is lost, doubled or visible in part,
  offsets are committed with the records, and zombies are fenced.

The seed of a history that fails is in the message; `python -m sim.run --seeds 3000007 --verbose` repeats it, with
`src` and `tests` on PYTHONPATH.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import NamedTuple

import pytest

from sim import deduplication, delays, transactions
from sim.run import quick_collections, run_seed
from sim.world import World
from support.nightly_counts import leave
from support.tiers import repetitions

DEDUPLICATION_SEEDS = int(os.environ.get("MANSIO_TEST_DEDUPLICATION_SEEDS", "2"))


class Histories(NamedTuple):
    """The histories of one feature, and what there must be of it at least in so many of them."""

    name: str
    first_seed: int
    smoke: int
    full: int
    least: dict[str, int]
    least_by_history: dict[str, int] = {}  # noqa: RUF012 - never changed


HISTORIES = {
    "delays": Histories(
        "delayed records",
        delays.FIRST_SEED,
        smoke=1,
        full=repetitions(16, 36),
        least=dict.fromkeys(
            (
                "delayed records accepted",
                "delayed records delivered",
                "cancelled",
                "moved",
                "firings",
            ),
            1,
        ),
    ),
    "deduplication": Histories(
        "deduplication",
        deduplication.FIRST_SEED + 3,  # with repeats in the first two
        smoke=DEDUPLICATION_SEEDS,
        full=repetitions(10, 22) * DEDUPLICATION_SEEDS,
        least={"ids": 101, "repeats": 21},
    ),
    "transactions": Histories(
        "transactions",
        transactions.FIRST_SEED + 1,  # with a commit of a zombie
        smoke=1,
        full=repetitions(20, 60),
        least={},
        least_by_history={"commits acknowledged": 10},
    ),
}
"""By feature."""

SMOKE = [pytest.param(name, 0, one.smoke, id=f"{name}-smoke") for name, one in HISTORIES.items()]
MORE = [
    pytest.param(name, one.smoke, one.full - one.smoke, id=f"{name}-more", marks=pytest.mark.full)
    for name, one in HISTORIES.items()
]


def run(feature: str, offset: int, count: int) -> Counter[str]:
    """Run histories from an offset behind the first seed on, check that there was enough of the feature, and return
    how much there was of all."""
    histories = HISTORIES[feature]
    first = histories.first_seed + offset
    done: Counter[str] = Counter()
    with quick_collections():
        for seed in range(first, first + count):
            outcome = run_seed(seed)
            assert not outcome.failure, f"python -m sim.run --seeds {seed} --verbose\n{outcome.report}"
            leave(f"histories of {histories.name}", seeds=1, faults=outcome.faults, **outcome.delivered)
            done.update(outcome.delivered)
    assert done >= Counter(histories.least), dict(done)
    assert all(done[name] > least * count for name, least in histories.least_by_history.items()), dict(done)
    return done


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("feature", "offset", "count"), [*SMOKE, *MORE])
def test_no_history_of_a_feature_breaks_its_guarantees(feature: str, offset: int, count: int) -> None:
    done = run(feature, offset, count)
    assert [name for name, number in done.items() if number == 0] == [], "everything happens"


@pytest.mark.parametrize(
    "feature",
    [
        "delays",
        pytest.param("deduplication", marks=pytest.mark.full),
        pytest.param("transactions", marks=pytest.mark.full),
    ],
)
def test_one_seed_gives_one_history_of_a_feature(feature: str) -> None:
    traces = []
    for _ in range(2):
        world = World(HISTORIES[feature].first_seed + 1, faults_ms=3000)
        world.run()
        traces.append(world.simulation.trace)
    assert len(set(traces)) == 1
