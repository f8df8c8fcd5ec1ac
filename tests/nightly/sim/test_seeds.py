"""Thousands of histories of whole simulated clusters."""

from __future__ import annotations

import os

import pytest

from sim.faults import FAULTS
from sim.run import HISTORIES
from sim.test_seeds import run
from support.nightly_counts import leave

NIGHTLY_SEEDS = int(os.environ.get("MANSIO_NIGHTLY_SEEDS", "20000"))
FIRST_NIGHTLY_SEED = int(os.environ.get("MANSIO_NIGHTLY_FIRST_SEED", "1000"))
BEHIND_NIGHTLY_SEEDS = FIRST_NIGHTLY_SEED + NIGHTLY_SEEDS
NIGHTLY_TOGETHER = 250


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("first", range(FIRST_NIGHTLY_SEED, BEHIND_NIGHTLY_SEEDS, NIGHTLY_TOGETHER))
def test_no_history_of_many_breaks_a_promise(first: int) -> None:
    summary = run(first, min(NIGHTLY_TOGETHER, BEHIND_NIGHTLY_SEEDS - first))
    leave(HISTORIES, **summary.numbers())
    if summary.seeds == NIGHTLY_TOGETHER:
        assert summary.faults.keys() >= FAULTS.keys(), "every fault of the menu was injected"
