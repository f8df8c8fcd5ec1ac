"""Histories of whole simulated clusters: nothing acknowledged is lost, no offset has two records, everything heals.

The seed of a history that fails is in the message; `python -m sim.run --seeds N --verbose` runs it alone.
"""

from __future__ import annotations

import json
import os

import pytest

from sim.faults import FAULTS
from sim.run import Summary, run_seed
from support.places import ROOT

SEEDS = int(os.environ.get("MANSIO_SIM_SEEDS", "150"))
NIGHTLY_SEEDS = int(os.environ.get("MANSIO_SIM_NIGHTLY_SEEDS", "20000"))
TOGETHER = 10
NIGHTLY_TOGETHER = 250


def run(first: int, count: int) -> Summary:
    summary = Summary()
    for seed in range(first, first + count):
        summary.add(run_seed(seed))
    print(*summary.lines(), sep="\n")
    assert not summary.failures, "\n".join(one.report for one in summary.failures[:3])
    return summary


@pytest.mark.timeout(600)
@pytest.mark.parametrize("first", range(0, SEEDS, TOGETHER))
def test_no_history_breaks_a_promise(first: int) -> None:
    summary = run(first, min(TOGETHER, SEEDS - first))
    assert summary.acknowledged > 100
    assert summary.read > 1000


@pytest.mark.nightly
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("first", range(1000, 1000 + NIGHTLY_SEEDS, NIGHTLY_TOGETHER))
def test_no_history_of_many_breaks_a_promise(first: int) -> None:
    summary = run(first, min(NIGHTLY_TOGETHER, 1000 + NIGHTLY_SEEDS - first))
    if (kept := ROOT / ".nightly").is_dir():
        numbers = {
            "seeds": summary.seeds,
            "acknowledged": summary.acknowledged,
            "read": summary.read,
            "commits": summary.committed,
            "longest_recovery_ms": max(summary.recovered_ms),
            "faults": summary.faults,
        }
        with (kept / "sim").open("a") as file:
            file.write(json.dumps(numbers) + "\n")
    if summary.seeds == NIGHTLY_TOGETHER:
        assert summary.faults.keys() >= FAULTS.keys(), "every fault of the menu was injected"
