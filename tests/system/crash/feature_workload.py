"""Random use of one partition with a feature, and a power failure after each of its disk changes.

A feature has a `FeatureWorkload`: its steps, and what must be true of what a power failure leaves. `run_with_crashes`
runs one; `test_crash_features` is the table of them.
"""

from __future__ import annotations

import contextlib
import errno
import random
from collections import Counter
from typing import TYPE_CHECKING, Any

from mansio.errors import DiskFull
from mansio.testing.disk import SimulatedDisk
from mansio.wire.batch.record_batch import build_batch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from support.partition_bench import PartitionBench

STEPS_SEED = 100_003


class FeatureWorkload:
    """Random use of one partition, and what must be true after a crash."""

    weights: Mapping[str, int]
    """How often each step is drawn; its method has the same name."""
    constants: Sequence[tuple[Any, str, int]] = ()
    """Bounds that a short workload would not reach: module, name, smaller value."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.live: Any = self.open(SimulatedDisk(can_sync_all=seed % 2 == 0), 1_000.0)
        self.counts: Counter[str] = Counter()
        """What there was of the feature; "refused": appends of two batches of which only the first was stored."""

    def open(self, disk: SimulatedDisk, seconds: float) -> PartitionBench:
        """Start the partition on a disk."""
        raise NotImplementedError

    def manager(self) -> Any:
        """What copies records of the feature before the log is trimmed."""
        raise NotImplementedError

    def check_crash(self, chance: random.Random) -> None:
        """Check what a power failure at this moment leaves."""
        raise NotImplementedError

    def before_step(self) -> None:
        """Called before each step."""

    def after_step(self) -> None:
        """Called after each step."""

    def step(self) -> None:
        """A random step."""
        name = self.chance.choices([*self.weights], [*self.weights.values()])[0]
        getattr(self, name)()

    def advance(self) -> None:
        self.live.clock.seconds += self.chance.random() / 2

    def flush(self) -> None:
        self.live.flush()

    def background(self) -> None:
        self.live.background.run_one()
        self.live.scheduler.fire()

    def delete_records(self) -> None:
        """Trim the log, mostly after records of the feature were copied behind its end."""
        chance, live = self.chance, self.live
        target = chance.randrange(live.partition.high_watermark + 1)
        if chance.random() < 0.7:
            copying = self.manager().partition.release_below(target)
            with contextlib.suppress(StopIteration):
                for _ in range(chance.randrange(1, 6)):  # fewer steps: some copies are not committed yet
                    copying.send(None)
                    if chance.random() < 0.5:
                        live.flush()
            copying.close()
        floor, high_watermark = live.partition.retention_floor(), live.partition.high_watermark
        start = min(target, high_watermark if floor is None else floor)
        if start > live.partition.start_offset:
            live.partition.trim(start)
            live.flush()

    def run_on_full_disk(self, work: Callable[[], object]) -> None:
        """Run `work` while the disk has space for one more batch only."""
        writes = 0

        def refuse_second(operation: str, path: str) -> int | None:
            nonlocal writes
            if operation != "write" or not path.endswith(".log"):
                return None
            writes += 1
            return errno.ENOSPC if writes > 1 else None

        self.live.disk.fail_when = refuse_second
        try:
            work()
        except DiskFull:
            self.counts["refused"] += 1
        finally:
            self.live.disk.fail_when = None

    def after_crash(self, chance: random.Random) -> Any:
        """The partition as a power failure at this moment leaves it, perhaps with one record more."""
        after = self.open(self.live.disk.crash(chance), self.live.clock.seconds)
        if chance.random() < 0.5:  # another record follows whatever is the last one
            after.partition.append(build_batch([(1000, None, b"after", ())]))
            after.flush()
            after = self.open(after.disk, after.clock.seconds)
        return after


def run_with_crashes(kind: type[FeatureWorkload], seed: int, steps: int, *, every: int) -> Counter[str]:
    """Run a workload, and check every so many disk changes. Returns the number of checks, and what there was."""
    workload = kind(seed)
    seen = 0
    found: list[AssertionError] = []

    def crash_here() -> None:
        nonlocal seen
        seen += 1
        if seen % every == 0:
            workload.counts["checks"] += 1
            workload.live.disk.on_change = None
            try:
                workload.check_crash(random.Random(seed * STEPS_SEED + seen))
            except AssertionError as error:  # the log would take it for an error of the disk
                found.append(error)
            workload.live.disk.on_change = crash_here

    workload.live.disk.on_change = crash_here
    for step in range(steps):
        workload.before_step()
        workload.step()
        workload.after_step()
        assert not found, f"seed {seed}, step {step}, change {seen}: {found[0]}"
    return workload.counts
