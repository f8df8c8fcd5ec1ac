"""Delayed records in thousands of simulated histories."""

from __future__ import annotations

import os

import pytest

from sim.delays import FIRST_SEED
from sim.test_delays import run

NIGHTLY_SEEDS = int(os.environ.get("MANSIO_NIGHTLY_DELAY_SEEDS", "5000"))
TOGETHER = 250
NIGHTLY_FIRSTS = range(FIRST_SEED + 1000, FIRST_SEED + 1000 + NIGHTLY_SEEDS, TOGETHER)


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("first", NIGHTLY_FIRSTS)
def test_no_history_of_many_loses_doubles_or_hurries_a_delayed_record(first: int) -> None:
    run(first, min(TOGETHER, NIGHTLY_SEEDS))
