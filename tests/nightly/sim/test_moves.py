"""Thousands of histories whose partitions are moved, half of them with early hand-overs, with clients of every kind."""

from __future__ import annotations

import os

import pytest

from sim import hand_over
from sim.features import feature_of
from sim.run import quick_collections, run_seed
from sim.test_moves import FIRST_SEEDS
from sim.test_seeds import run

SEEDS = int(os.environ.get("MANSIO_NIGHTLY_MOVE_SEEDS", "10000"))
HAND_OVER_SEEDS = int(os.environ.get("MANSIO_NIGHTLY_HAND_OVER_SEEDS", "2000"))
TOGETHER = 50
BEHIND_THOSE_OF_FULL = 1_000


@pytest.mark.timeout(7200)
@pytest.mark.parametrize(
    "first",
    [
        kind + BEHIND_THOSE_OF_FULL + first
        for kind in FIRST_SEEDS.values()
        for first in range(0, SEEDS // len(FIRST_SEEDS), TOGETHER)
    ],
)
def test_no_history_of_many_with_moves_violates_a_guarantee(first: int) -> None:
    with quick_collections():
        for seed in range(first, first + TOGETHER):
            feature = feature_of(seed)
            if feature is None or not feature.is_single_node(seed):
                outcome = run_seed(seed, has_moves=True, hand_over=bool(seed % 2))
                assert not outcome.failure, outcome.report


@pytest.mark.timeout(7200)
@pytest.mark.parametrize(
    "first",
    range(
        hand_over.FIRST_SEED + BEHIND_THOSE_OF_FULL,
        hand_over.FIRST_SEED + BEHIND_THOSE_OF_FULL + HAND_OVER_SEEDS,
        TOGETHER,
    ),
)
def test_no_history_of_many_with_early_hand_overs_violates_a_guarantee(first: int) -> None:
    run(first, TOGETHER)
