"""Runs simulated histories: `python -m sim.run --seeds 0:150` (with `src` and `tests` on PYTHONPATH).

Prints what broke, seed by seed, and in the end what there was: seeds, faults by kind, acknowledged, lost, stalls with
their reasons, time. Ends with 1 when a promise was broken.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import signal
import sys
import traceback
from collections import Counter
from contextlib import closing, contextmanager
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from sim.world import Stalled, World
from support.nightly_counts import leave

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

HISTORIES: Final = "histories of clusters"
KEPT_TOGETHER: Final = 250
CPU_S_MAX = 60
"""A history that takes longer does not wait for anything, somewhere."""


class Outcome(NamedTuple):
    """What came of one seed. `failure`: one line; `report`: more of it."""

    seed: int
    trace: int
    acknowledged: int
    read: int
    committed: int
    topics: int
    faults: dict[str, int]
    network: dict[str, int]
    recovered_ms: float
    failure: str = ""
    stalled: bool = False
    report: str = ""
    more: dict[str, int] = {}  # noqa: RUF012 - never changed
    delivered: dict[str, int] = {}  # noqa: RUF012 - never changed
    moves: dict[str, int] = {}  # noqa: RUF012 - never changed
    early_ends: int = 0
    """Sessions of dead processes that ended early."""
    early_ends_of_living: int = 0


class Hangs(AssertionError):
    """The program goes round and round at one moment of simulated time."""


@contextmanager
def watched() -> Iterator[None]:
    """End what takes too much of the processor, where it is. In the main thread only."""

    def end(*_: object) -> None:
        raise Hangs(f"more than {CPU_S_MAX} s of the processor for one history")

    before = signal.signal(signal.SIGPROF, end)
    signal.setitimer(signal.ITIMER_PROF, CPU_S_MAX)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


@contextmanager
def quick_collections() -> Iterator[None]:
    """Each history begins with a collection, which need not look through all modules: what is there now stays."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def run_seed(seed: int, *, more: bool = False, has_moves: bool = False, hand_over: bool = False) -> Outcome:
    """One history from beginning to end. `more`: with the clients of `sim.more_faults`. `has_moves`: with partitions
    that are moved. `hand_over`: with early hand-overs."""
    logging.disable(logging.CRITICAL)
    world = World(seed, more=more, has_moves=has_moves, hand_over=hand_over)
    failure, stalled, report = "", False, ""
    try:
        with watched():
            world.run()
    except Exception as error:  # noqa: BLE001 - whatever ends a history is what this is for
        failure = f"{type(error).__name__}: {error}"
        stalled = isinstance(error, Stalled)
        report = "".join(traceback.format_exception(error))
    finally:
        logging.disable(logging.NOTSET)
    judge = world.delivery or world.scene
    return Outcome(
        seed,
        world.simulation.trace,
        world.acknowledged,
        world.checker.records_read,
        world.committed,
        world.administrator.made if hasattr(world, "administrator") else 0,
        world.faults,
        world.network.counts,
        world.recovered_ms,
        failure,
        stalled,
        report,
        {} if world.more is None else world.more.numbers(),
        {} if judge is None else judge.history.numbers(),
        {} if world.mover is None else world.mover.done_requests,
        0 if world.early_ends is None else world.early_ends.dead,
        0 if world.early_ends is None else world.early_ends.living,
    )


class Summary:
    """Of many seeds."""

    def __init__(self) -> None:
        self.seeds = self.acknowledged = self.read = self.committed = self.topics = 0
        self.faults: Counter[str] = Counter()
        self.failures: list[Outcome] = []
        self.recovered_ms: list[float] = []
        self.early_ends = self.early_ends_of_living = 0

    def add(self, outcome: Outcome) -> None:
        self.seeds += 1
        self.acknowledged += outcome.acknowledged
        self.read += outcome.read
        self.committed += outcome.committed
        self.topics += outcome.topics
        self.early_ends += outcome.early_ends
        self.early_ends_of_living += outcome.early_ends_of_living
        self.faults.update(outcome.faults)
        self.faults.update({f"frames: {name}": count for name, count in outcome.network.items()})
        if outcome.failure:
            self.failures.append(outcome)
        else:
            self.recovered_ms.append(outcome.recovered_ms)

    def numbers(self) -> dict[str, Any]:
        """What a night leaves behind of them."""
        return {
            "seeds": self.seeds,
            "acknowledged": self.acknowledged,
            "read": self.read,
            "commits": self.committed,
            "failures": len(self.failures),
            "longest_recovery_ms": max(self.recovered_ms, default=0.0),
            "faults": self.faults,
        }

    def lines(self) -> list[str]:
        stalls = [one for one in self.failures if one.stalled]
        healed = sorted(self.recovered_ms) or [0.0]
        return [
            f"seeds {self.seeds}, acknowledged {self.acknowledged}, read {self.read}, commits {self.committed}, "
            f"topics made again {self.topics}",
            f"broken promises (lost, taken back, conflicting, doubled): {len(self.failures) - len(stalls)}",
            f"stalls: {len(stalls)}",
            f"sessions that ended early: {self.early_ends} of dead processes, {self.early_ends_of_living} of others",
            f"well again after {healed[len(healed) // 2]:.0f} ms (median), {healed[-1]:.0f} ms (longest)",
            "faults: " + ", ".join(f"{name} {count}" for name, count in sorted(self.faults.items())),
            *(f"seed {one.seed}: {one.failure}" for one in self.failures),
        ]


def outcomes_of(seeds: range, jobs: int, work: Callable[[int], Outcome]) -> Generator[Outcome]:
    """In the order of the seeds, by so many processes."""
    if jobs == 1:
        yield from map(work, seeds)
        return
    with get_context("fork").Pool(jobs) as pool:
        yield from pool.imap(work, seeds)
        pool.close()
        pool.join()


def run_many(
    seeds: range,
    keep_going: bool,
    verbose: bool,
    kept: str | None,
    *,
    jobs: int = 1,
    work: Callable[[int], Outcome] = run_seed,
) -> Summary:
    """Tell what broke; leave numbers in `kept`."""
    whole, part = Summary(), Summary()
    with closing(outcomes_of(seeds, jobs, work)) as outcomes:
        for outcome in outcomes:
            whole.add(outcome)
            part.add(outcome)
            _tell(outcome, verbose)
            if kept is not None and (part.seeds == KEPT_TOGETHER or outcome.seed == seeds[-1]):
                leave(HISTORIES, Path(kept), **part.numbers())
                part = Summary()
            if outcome.failure and not keep_going:
                break
    return whole


def _tell(outcome: Outcome, verbose: bool) -> None:
    if outcome.failure:
        print(outcome.report if verbose else f"seed {outcome.seed}: {outcome.failure}", flush=True)
    elif verbose:
        known = ", ".join(
            f"{count} {name}"
            for name, count in {"acknowledged": outcome.acknowledged, **outcome.delivered}.items()
        )
        print(f"seed {outcome.seed}: trace {outcome.trace:x}, {known}", flush=True)


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--seeds", default="0:10", help="first:end")
    arguments.add_argument("--keep-going", action="store_true", help="go on after a seed that failed")
    arguments.add_argument("--verbose", action="store_true")
    arguments.add_argument("--more", action="store_true", help="also clients that do rarer things")
    arguments.add_argument("--moves", action="store_true", help="also move partitions")
    arguments.add_argument("--hand-over", action="store_true", help="with early hand-overs, and proxies")
    arguments.add_argument(
        "--kept",
        help="append counts to this file for `python -m support.nightly_counts FILE`, "
        f"one line per {KEPT_TOGETHER} seeds",
    )
    arguments.add_argument("--jobs", type=int, default=1, help="so many processes at a time")
    chosen = arguments.parse_args()
    first, _, end = chosen.seeds.partition(":")
    seeds = range(int(first), int(end or int(first) + 1))
    with quick_collections():
        summary = run_many(
            seeds,
            chosen.keep_going,
            chosen.verbose,
            chosen.kept,
            jobs=chosen.jobs,
            work=partial(run_seed, more=chosen.more, has_moves=chosen.moves, hand_over=chosen.hand_over),
        )
    for line in summary.lines():
        print(line)
    print(f"{sum(os.times()[:4]):.1f} s of the processor")
    return 1 if summary.failures else 0


if __name__ == "__main__":
    sys.exit(main())
