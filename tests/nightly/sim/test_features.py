"""Features of partitions in thousands of simulated histories."""

from __future__ import annotations

import os

import pytest

from sim.test_features import run

SEEDS = {
    "delays": (int(os.environ.get("MANSIO_NIGHTLY_DELAY_SEEDS", "5000")), 250),
    "deduplication": (int(os.environ.get("MANSIO_NIGHTLY_DEDUPLICATION_SEEDS", "1000")), 100),
    "transactions": (int(os.environ.get("MANSIO_NIGHTLY_TRANSACTION_SEEDS", "3000")), 100),
}
"""Feature -> number of histories of a night, and how many of them are one test."""
FIRST_OFFSET = 1000


@pytest.mark.timeout(7200)
@pytest.mark.parametrize(
    ("feature", "offset", "count"),
    [
        (feature, FIRST_OFFSET + begun, min(together, seeds))
        for feature, (seeds, together) in SEEDS.items()
        for begun in range(0, max(seeds, 1), together)
    ],
)
def test_no_history_of_many_breaks_the_guarantees_of_a_feature(feature: str, offset: int, count: int) -> None:
    run(feature, offset, count)
