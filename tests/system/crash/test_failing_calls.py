"""The n-th disk call fails, for every n, in each operation of a log: no durable record is lost.

A call may be any write, sync, open, removal or rename. A failing operation raises `StorageError`; afterwards the log
is opened from crash images, and accepts new records.
"""

from __future__ import annotations

import errno
import random
from typing import TYPE_CHECKING

import pytest

from mansio.errors import MansioError, StorageError
from mansio.storage.log import Log, LogListener, LogSettings
from mansio.testing.disk import SimulatedDisk
from support.logs import (
    LogBench,
    ManualClock,
    append,
    as_stored,
    check_contents,
    make_batch,
)
from support.tiers import examples, smoke_first

if TYPE_CHECKING:
    from collections.abc import Callable

DIRECTORY = "/data/p"
SETTINGS = LogSettings(segment_bytes=400, index_interval_bytes=1, index_snapshot_bytes=200)
CODES = (errno.EIO, errno.ENOSPC)
PAIR_DISTANCE_MAX = 12


class Bench:
    """One log with a `GroupCommit`, and the results that it reported."""

    def __init__(self, disk: SimulatedDisk) -> None:
        self.disk = disk
        self.clock = ManualClock()
        self.stored: list[bytes] = []
        self.promised = 0
        self.start_asked = 0
        self.log: Log | None = None

    def open(self) -> None:
        life = LogBench(self.disk, clock=self.clock)
        self.background, self.scheduler, self.group_commit = (
            life.background,
            life.scheduler,
            life.group_commit,
        )
        self.log = life.open_log(DIRECTORY, SETTINGS, registered=False)
        self.promised = max(self.promised, self.log.durable_end_offset)
        self.log.listen(LogListener(on_durable=self.reported))
        self.group_commit.register(self.log)

    def reported(self, end_offset: int) -> None:
        self.promised = max(self.promised, end_offset)

    def write(self, count: int, *, epoch: int = 0) -> None:
        assert self.log is not None
        for _ in range(count):
            tag = len(self.stored)
            batch = make_batch([1000 + tag], 90, tag)
            self.stored.append(as_stored(batch, self.log.end_offset, epoch))
            try:
                append(self.log, batch, epoch)
            except StorageError:
                self.stored.pop()
                raise
            self.group_commit.request_flush(self.log)

    def run_all_jobs(self) -> None:
        self.background.run_all()
        self.scheduler.fire()
        self.background.run_all()


def roll(bench: Bench) -> None:
    bench.open()
    bench.write(9)
    bench.run_all_jobs()
    assert bench.log is not None
    bench.log.roll()
    bench.group_commit.request_flush(bench.log)
    bench.write(2, epoch=3)
    bench.run_all_jobs()


def trim(bench: Bench) -> None:
    roll(bench)
    assert bench.log is not None
    for offset in (4, 7, bench.log.end_offset):
        bench.start_asked = offset
        bench.log.trim_to(offset)
        bench.run_all_jobs()
    bench.write(3, epoch=3)
    bench.run_all_jobs()


def restart(bench: Bench) -> None:
    roll(bench)
    for _ in range(2):
        assert bench.log is not None
        bench.log.close()
        bench.open()
        bench.write(3, epoch=3)
        bench.run_all_jobs()


def recover(bench: Bench) -> None:
    """A recovery after a crash, with a tail to be checked and one to be truncated."""
    roll(bench)
    bench.write(2, epoch=3)
    assert bench.log is not None
    active = bench.log.active_segment()
    path = f"{DIRECTORY}/{active.base_offset:020d}.log"
    bench.disk.put_file(path, bench.disk.files()[path] + make_batch([1], 90)[:70])
    bench.open()
    bench.write(1, epoch=3)
    bench.run_all_jobs()


def delete(bench: Bench) -> None:
    roll(bench)
    assert bench.log is not None
    bench.group_commit.unregister(bench.log)
    bench.stored, bench.promised = [], 0
    log, bench.log = bench.log, None
    log.delete()
    bench.open()
    bench.write(2)
    bench.run_all_jobs()


WORKLOADS: dict[str, Callable[[Bench], None]] = {
    "roll": roll,
    "trim": trim,
    "restart": restart,
    "recover": recover,
    "delete": delete,
}


def run(workload: Callable[[Bench], None], failing: dict[int, int], seed: int) -> int:
    """Run it with those calls failing, then check; returns the number of calls."""
    disk = SimulatedDisk(can_sync_all=seed % 2 == 0)
    for number, code in failing.items():
        disk.fail_call(number, code)
    bench = Bench(disk)
    deleted = False
    try:
        workload(bench)
    except StorageError:  # anything else fails the test, above all an OSError
        deleted = bench.log is None
    calls = disk.calls
    disk.clear_failures()
    if deleted:
        return calls  # half a deletion: the metadata say that the rest goes, too
    chance = random.Random(seed)
    for image in (disk.crash(chance), disk.crash(chance)):
        log = Log.open(image, bench.clock, DIRECTORY, SETTINGS)
        assert log.end_offset >= bench.promised
        assert log.start_offset <= bench.start_asked
        check_contents(log, bench.stored, thorough=False)
        append(log, make_batch([9000], 30, 999), 1000)
        log.sync()
    return calls


@pytest.mark.parametrize("name", smoke_first(*WORKLOADS))
def test_any_one_failing_call_is_a_storage_error_and_loses_nothing_durable(name: str) -> None:
    points = 0
    for seed in (0, 1):
        calls = run(WORKLOADS[name], {}, seed)
        for number in range(1, calls + 1, examples(3, 1, 1)):
            for code in CODES[: 1 + seed]:
                try:
                    run(WORKLOADS[name], {number: code}, seed)
                except (AssertionError, MansioError, OSError) as error:
                    raise AssertionError(
                        f"seed {seed}, call {number}, {errno.errorcode[code]}: {error}"
                    ) from error
        points += calls
    assert points > 60


def test_log_trimmed_to_its_end_keeps_the_active_segment() -> None:
    bench = Bench(SimulatedDisk())
    bench.open()
    bench.write(7)
    bench.run_all_jobs()
    assert bench.log is not None
    for _ in range(3):
        bench.log.trim_to(bench.log.end_offset)
        bench.run_all_jobs()
        assert len(bench.log.segments()) == 1
        assert bench.disk.exists(f"{DIRECTORY}/{bench.log.active_segment().base_offset:020d}.log")
        bench.write(5)
        bench.run_all_jobs()
        check_contents(bench.log, bench.stored)
        check_contents(
            Log.open(bench.disk.crash(random.Random(1)), bench.clock, DIRECTORY, SETTINGS), bench.stored
        )
