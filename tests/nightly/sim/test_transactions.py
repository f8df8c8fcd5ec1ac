"""Transactions in thousands of simulated histories."""

from __future__ import annotations

import os

import pytest

from sim.test_transactions import run
from sim.transactions import FIRST_SEED

NIGHTLY_SEEDS = int(os.environ.get("MANSIO_NIGHTLY_TRANSACTION_SEEDS", "3000"))
TOGETHER = 100


@pytest.mark.timeout(7200)
@pytest.mark.parametrize(
    "first", range(FIRST_SEED + 1000, FIRST_SEED + 1000 + max(NIGHTLY_SEEDS, TOGETHER), TOGETHER)
)
def test_no_history_of_many_breaks_a_transaction(first: int) -> None:
    run(first, TOGETHER)
