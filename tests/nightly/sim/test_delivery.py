"""Share groups in thousands of simulated histories."""

from __future__ import annotations

import os

import pytest

from sim import fairness, key_limits, key_order, priorities
from sim.delivery import FIRST_SEED, LONG_LEASES_FIRST_SEED
from sim.test_delivery import run

NIGHTLY_SEEDS = int(os.environ.get("MANSIO_NIGHTLY_DELIVERY_SEEDS", "2000"))
TOGETHER = 100
NIGHTLY_FIRSTS = [
    first
    for kind in (
        FIRST_SEED,
        LONG_LEASES_FIRST_SEED,
        key_order.FIRST_SEED,
        priorities.FIRST_SEED,
        key_limits.FIRST_SEED,
        fairness.FIRST_SEED,
        fairness.LIMITED_FIRST_SEED,
    )
    for first in range(kind + 1000, kind + 1000 + NIGHTLY_SEEDS // 2, TOGETHER)
]


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("first", NIGHTLY_FIRSTS)
def test_no_history_of_many_undoes_loses_or_doubles_a_delivery(first: int) -> None:
    run(first, min(TOGETHER, NIGHTLY_SEEDS))
