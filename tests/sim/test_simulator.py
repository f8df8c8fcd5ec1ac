"""Tests of the simulator: a seed determines the history, and every fault has an effect."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from sim.checker import Broken, Checker
from sim.faults import FAULTS
from sim.run import run_seed
from sim.world import World
from support.paths import ROOT

SEED = 6
SEEDS = (0, 5, SEED, 200_002)
"""Histories in which clients are cut off and brokers end with several connections, which seed 6 alone has not; and one
with members of groups to which the broker assigns."""

FAULTS_OF_TEST = ("kill", "cut", "full disk", "etcd unreachable")
"""One fault each of processes, network, disk and etcd. The others are injected alone in `full` only."""


@pytest.mark.full
def test_the_same_seed_is_the_same_history_also_in_another_process() -> None:
    """With other hashes of strings, and other addresses of objects: a set of either has another order there."""
    first, second = run_seed(SEED), run_seed(SEED)
    assert first == second
    traces = [run_seed(seed).trace for seed in SEEDS]
    assert len(set(traces)) == len(SEEDS)
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT / 'tests'}",
        "PYTHONHASHSEED": "1",
        "PYTHONMALLOC": "malloc",
    }
    code = f"from sim.run import run_seed; print(*(run_seed(seed).trace for seed in {SEEDS}))"
    other = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert [int(trace) for trace in other.stdout.split()] == traces


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in FAULTS_OF_TEST else [pytest.mark.full]) for name in FAULTS],
)
def test_every_fault_of_the_menu_can_be_injected(name: str) -> None:
    """Each alone, several times, over a short history."""
    world = World(3, faults_ms=6000, only=name)
    world.run()
    assert world.faults == {name: world.faults.get(name, 0)}
    assert world.faults[name] > 0
    assert world.acknowledged > 0


def reported(checker: Checker) -> Checker:
    checker.sent(0, [b"a", b"b", b"c"], once=True)
    checker.acknowledged(0, 0, [b"a"], where=1)
    return checker


def test_the_checker_sees_a_lost_write() -> None:
    with pytest.raises(Broken, match="lost"):
        reported(Checker()).finish(0, [])


def test_the_checker_sees_two_records_at_one_offset() -> None:
    with pytest.raises(Broken, match="0/0"):
        reported(Checker()).read(0, 0, b"b", by="a reader")


def test_the_checker_sees_a_record_twice() -> None:
    with pytest.raises(Broken, match="at 0 and at 1"):
        reported(Checker()).read(0, 1, b"a", by="a reader")


def test_the_checker_sees_what_was_committed_being_taken_back() -> None:
    checker = reported(Checker())
    checker.high_watermark(0, 2)
    with pytest.raises(Broken, match="committed up to 2"):
        checker.finish(0, [b"a"])


def test_the_checker_sees_what_was_not_sent() -> None:
    with pytest.raises(Broken, match="nobody sent"):
        reported(Checker()).read(0, 1, b"x", by="a reader")
