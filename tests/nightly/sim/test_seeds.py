"""Thousands of histories of whole simulated clusters."""

from __future__ import annotations

import os
import time

import pytest

from sim.faults import FAULTS
from sim.run import HISTORIES
from sim.test_seeds import run
from support.nightly_counts import leave

NIGHTLY_SEEDS = int(os.environ.get("MANSIO_NIGHTLY_SEEDS", "20000"))
FIRST_OF_THE_DAY = 1_000 + time.time_ns() // 86_400_000_000_000 % 9 * 20_000
"""Other seeds each day, all below those of histories with consumer groups."""
FIRST_NIGHTLY_SEED = int(os.environ.get("MANSIO_NIGHTLY_FIRST_SEED", FIRST_OF_THE_DAY))
BEHIND_NIGHTLY_SEEDS = FIRST_NIGHTLY_SEED + NIGHTLY_SEEDS
NIGHTLY_TOGETHER = 250


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("first", range(FIRST_NIGHTLY_SEED, BEHIND_NIGHTLY_SEEDS, NIGHTLY_TOGETHER))
def test_no_simulated_history_of_many_violates_a_guarantee(first: int) -> None:
    summary = run(first, min(NIGHTLY_TOGETHER, BEHIND_NIGHTLY_SEEDS - first))
    leave(HISTORIES, **summary.numbers())
    if summary.seeds == NIGHTLY_TOGETHER:
        assert summary.faults.keys() >= FAULTS.keys(), "every fault of the menu was injected"
