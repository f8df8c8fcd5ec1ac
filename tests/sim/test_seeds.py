"""Histories of whole simulated clusters: nothing acknowledged is lost, no offset has two records, everything heals.

The seed of a history that fails is in the message; `python -m sim.run --seeds N --verbose` runs it alone.
"""

from __future__ import annotations

import os
from collections import Counter

import pytest

from sim.run import Summary, quick_collections, run_seed
from support.tiers import repetitions

SEEDS = int(os.environ.get("MANSIO_TEST_SEEDS", "1"))
SEEDS_OF_FULL = repetitions(61, 150)
MORE_SEEDS = int(os.environ.get("MANSIO_TEST_MORE_SEEDS", "10"))
TOGETHER = 5
"""Histories in one test at most, about 5 s of processor time."""


def ranges(first: int, end: int) -> list[tuple[int, int]]:
    """First seed and count of each test of these seeds."""
    return [(seed, min(TOGETHER, end - seed)) for seed in range(first, end, TOGETHER)]


RANGES = [
    *ranges(0, SEEDS),
    *(pytest.param(*each, marks=pytest.mark.full) for each in ranges(SEEDS, SEEDS_OF_FULL)),
]


def run(first: int, count: int) -> Summary:
    summary = Summary()
    with quick_collections():
        for seed in range(first, first + count):
            summary.add(run_seed(seed))
    print(*summary.lines(), sep="\n")
    assert not summary.failures, "\n".join(one.report for one in summary.failures[:3])
    return summary


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("first", "count"), RANGES)
def test_no_simulated_history_violates_a_guarantee(first: int, count: int) -> None:
    summary = run(first, count)
    assert summary.acknowledged > 20 * count
    assert summary.read > 200 * count


@pytest.mark.full
@pytest.mark.timeout(600)
def test_no_simulated_history_with_rare_operations_violates_a_guarantee() -> None:
    """Several partitions in a request, records deleted, partitions added, settings changed, while all is in use."""
    done: Counter[str] = Counter()
    for seed in range(3000, 3000 + MORE_SEEDS):
        outcome = run_seed(seed, more=True)
        assert not outcome.failure, f"seed {seed}: {outcome.report}"
        done.update(outcome.more)
    assert set(+done) == {"pairs", "deletions", "grown", "settings"}, done
