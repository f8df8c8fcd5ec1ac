"""Deduplication in thousands of simulated histories."""

from __future__ import annotations

import os

import pytest

from sim.deduplication import FIRST_SEED
from sim.test_deduplication import run

NIGHTLY_SEEDS = int(os.environ.get("MANSIO_NIGHTLY_DEDUPLICATION_SEEDS", "1000"))
TOGETHER = 100


@pytest.mark.timeout(7200)
@pytest.mark.parametrize(
    "first", range(FIRST_SEED + 1000, FIRST_SEED + 1000 + max(NIGHTLY_SEEDS, TOGETHER), TOGETHER)
)
def test_no_history_of_many_stores_an_id_twice_or_loses_one(first: int) -> None:
    run(first, TOGETHER)
