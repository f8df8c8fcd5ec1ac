"""Histories of whole simulated clusters: nothing acknowledged is lost, no offset has two records, everything heals.

The seed of a history that fails is in the message; `python -m sim.run --seeds N --verbose` runs it alone.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import pytest

from mansio.node.broker_runtime import FileLimits
from mansio.storage.active_files import ActiveFiles, ActiveFilesInUse
from sim import deduplication, delays
from sim.run import Summary, quick_collections, run_seed
from sim.world import World
from support.tiers import repetitions

SEEDS = int(os.environ.get("MANSIO_TEST_SEEDS", "1"))
SEEDS_OF_FULL = repetitions(61, 150)
MORE_SEEDS = int(os.environ.get("MANSIO_TEST_MORE_SEEDS", "10"))
TOGETHER = 5
"""Histories in one test at most, about 5 s of processor time."""


def ranges(first: int, end: int) -> list[tuple[int, int]]:
    """First seed and count of each test of these seeds."""
    return [(seed, min(TOGETHER, end - seed)) for seed in range(first, end, TOGETHER)]


FEW_FILES_SEEDS = int(os.environ.get("MANSIO_TEST_FEW_FILES_SEEDS", "4"))

RANGES = [
    *ranges(0, SEEDS),
    *(pytest.param(*each, marks=pytest.mark.full) for each in ranges(SEEDS, SEEDS_OF_FULL)),
]


def run(first: int, count: int) -> Summary:
    summary = Summary()
    with quick_collections():
        for seed in range(first, first + count):
            summary.add(run_seed(seed))
    print(*summary.lines(), sep="\n")
    assert not summary.failures, "\n".join(one.report for one in summary.failures[:3])
    return summary


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("first", "count"), RANGES)
def test_no_simulated_history_violates_a_guarantee(first: int, count: int) -> None:
    summary = run(first, count)
    assert summary.acknowledged > 20 * count
    assert summary.read > 200 * count


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("first", "count", "more"),
    [
        pytest.param(3000, 3 * FEW_FILES_SEEDS, True, id="rare operations"),
        pytest.param(delays.FIRST_SEED + 9, FEW_FILES_SEEDS, False, id="delays and retention"),  # some wait
        pytest.param(deduplication.FIRST_SEED, FEW_FILES_SEEDS, False, id="deduplication and retention"),
    ],
)
def test_no_simulated_history_with_few_open_files_violates_a_guarantee(
    monkeypatch: pytest.MonkeyPatch, first: int, count: int, more: bool
) -> None:
    """Logs close the files of their active segments for others all the time, and appends wait for slow flushes."""
    refused = waited = 0
    make_room, wait = ActiveFiles.make_room, ActiveFiles.wait

    def counted(files: ActiveFiles, *args: Any, **options: Any) -> None:
        nonlocal refused
        try:
            make_room(files, *args, **options)
        except ActiveFilesInUse:
            refused += 1
            raise

    def counted_wait(files: ActiveFiles, *args: Any) -> bool:
        nonlocal waited
        waited += 1
        return wait(files, *args)

    monkeypatch.setattr(ActiveFiles, "make_room", counted)
    monkeypatch.setattr(ActiveFiles, "wait", counted_wait)
    with quick_collections():
        for seed in range(first, first + count):
            World(
                seed,
                more=more,
                limits=FileLimits(active_files=2, cached_files=2),
                disk_ms=(20, 80),
            ).run()
    print(f"{refused} refused, {waited} waits")
    assert refused > count
    assert waited > (10 * count if more else 0)


@pytest.mark.full
@pytest.mark.timeout(600)
def test_no_simulated_history_with_rare_operations_violates_a_guarantee() -> None:
    """Several partitions in a request, records deleted, partitions added, settings changed, while all is in use."""
    done: Counter[str] = Counter()
    for seed in range(3000, 3000 + MORE_SEEDS):
        outcome = run_seed(seed, more=True)
        assert not outcome.failure, f"seed {seed}: {outcome.report}"
        done.update(outcome.more)
    assert set(+done) == {"pairs", "deletions", "grown", "settings"}, done
