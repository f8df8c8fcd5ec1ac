"""Histories of whole simulated clusters whose partitions are moved, with clients of every kind: nothing acknowledged is
lost, no offset has two records, no lease is held twice, and every move ends."""

from __future__ import annotations

from collections import Counter

import pytest

from sim import deduplication, delays, delivery, fairness, key_limits, key_order, transactions
from sim.features import feature_of
from sim.run import quick_collections, run_seed
from support.tiers import repetitions, smoke_first

FIRST_SEED = 40_000
"""Of histories with members of the classic group protocol."""


FIRST_SEEDS = {
    "records and groups": FIRST_SEED,
    "share groups": delivery.FIRST_SEED + FIRST_SEED,
    "order by key": key_order.FIRST_SEED + FIRST_SEED,
    "limits": key_limits.FIRST_SEED + FIRST_SEED,
    "fairness": fairness.FIRST_SEED + FIRST_SEED,
    "delays": delays.FIRST_SEED + FIRST_SEED,
    "deduplication": deduplication.FIRST_SEED + FIRST_SEED,
    "transactions": transactions.FIRST_SEED + FIRST_SEED + 1,  # with some moves
}
"""By kind of clients."""

HISTORIES = repetitions(3, 20)
"""Of each kind."""


def seeds_of(first: int) -> list[int]:
    """Those that are not of a single node."""
    features = ((seed, feature_of(seed)) for seed in range(first, first + 10 * HISTORIES))
    clustered = [seed for seed, found in features if found is None or not found.is_single_node(seed)]
    return clustered[:HISTORIES]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", smoke_first(*FIRST_SEEDS))
def test_no_history_with_moves_violates_a_guarantee(kind: str) -> None:
    done: Counter[str] = Counter()
    with quick_collections():
        for seed in seeds_of(FIRST_SEEDS[kind]):
            outcome = run_seed(seed, has_moves=True)
            assert not outcome.failure, outcome.report
            done.update(outcome.moves)
    assert done["move"] > HISTORIES, done
