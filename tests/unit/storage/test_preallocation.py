"""Preallocation: when zeros are written ahead, and that they never affect a record."""

from __future__ import annotations

import errno
import random

import pytest

from mansio.errors import StorageError
from mansio.storage.log import Log, LogSettings
from mansio.testing.disk import CAPACITY_BYTES, SimulatedDisk
from support.logs import (
    LogBench,
    ManualClock,
    append,
    check_contents,
    make_batch,
)

DIRECTORY = "/data/p"
SEGMENT = f"{DIRECTORY}/00000000000000000000.log"


class PreallocationBench(LogBench):
    """A log and its group commit, driven by the test; `stored` are the batches written so far."""

    def __init__(self, capacity_bytes: int = CAPACITY_BYTES) -> None:
        super().__init__(SimulatedDisk(capacity_bytes=capacity_bytes))
        self.open_log(DIRECTORY, registered=False).sync()
        self.stored: list[bytes] = []

    def write(self, value_bytes: int, *, batches: int = 1, awaited: bool = True) -> None:
        """Append and sync: at once for an awaited request, otherwise at the next flush interval."""
        for _ in range(batches):
            self.stored.append(append(self.log, make_batch([1], value_bytes, len(self.stored)))[1])
        self.group_commit.request_flush(self.log, urgent=awaited)
        self.scheduler.fire()
        self.background.run_all()
        assert self.log.durable_end_offset == self.log.end_offset

    @property
    def written_ahead_bytes(self) -> int:
        """Allocated bytes after the last batch."""
        taken = self.disk.capacity_bytes - self.disk.free_bytes("/")
        others = sum(len(data) for path, data in self.disk.files().items() if path != SEGMENT)
        return taken - others - self.log.size_bytes


def test_log_with_awaited_syncs_is_preallocated_with_zeros() -> None:
    bench = PreallocationBench()
    for _ in range(40):
        bench.write(5000)
    length = len(bench.disk.files()[SEGMENT])
    assert bench.written_ahead_bytes == length - bench.log.size_bytes > 0
    for _ in range(150):
        bench.write(5000)
        assert bench.written_ahead_bytes <= 256 << 10
    check_contents(bench.log, bench.stored, thorough=False)
    bench.log.close()
    assert len(bench.disk.files()[SEGMENT]) == sum(map(len, bench.stored))


@pytest.mark.parametrize(
    ("value_bytes", "batches", "awaited", "capacity_bytes"),
    [
        (5000, 1, False, CAPACITY_BYTES),
        (5000, 30, True, CAPACITY_BYTES),
        (100_000, 1, True, CAPACITY_BYTES),
        (500, 1, True, CAPACITY_BYTES),
        (5000, 1, True, 1 << 30),
    ],
    ids=[
        "nobody waits",
        "many batches a sync",
        "large batches",
        "batches smaller than a block",
        "little free",
    ],
)
def test_other_logs_are_preallocated_with_holes(
    value_bytes: int, batches: int, awaited: bool, capacity_bytes: int
) -> None:
    bench = PreallocationBench(capacity_bytes)
    while bench.log.size_bytes < 500_000:
        bench.write(value_bytes, batches=batches, awaited=awaited)
        assert bench.written_ahead_bytes == 0


def test_zeros_take_no_space_from_records_on_a_disk_that_others_fill() -> None:
    """Another program took the space after the free bytes were read."""
    bench = PreallocationBench()
    for _ in range(12):
        bench.write(5000)
    bench.disk.available_bytes = lambda wanted_bytes: min(wanted_bytes, 20_000)  # not for 256 KiB at once
    for _ in range(40):
        bench.write(5000)
        assert bench.written_ahead_bytes == 0
    check_contents(bench.log, bench.stored)


def test_a_failed_write_of_zeros_ends_the_service_and_loses_nothing() -> None:
    bench = PreallocationBench()
    while bench.log.size_bytes <= 64_000:  # the next one finds no room
        bench.write(5000)
    failures = [errno.EIO]  # of the zeros; the batch itself could be written
    bench.disk.fail_when = lambda operation, _: failures.pop() if operation == "write" and failures else None
    with pytest.raises(StorageError, match="cannot write"):
        bench.write(5000)
    assert bench.log.failure is not None
    durable = bench.stored[: bench.log.durable_end_offset]
    bench.disk.clear_failures()
    for seed in range(10):
        check_contents(_opened(bench.disk.crash(random.Random(seed))), durable, thorough=False)


@pytest.mark.parametrize("seed", range(3))
def test_power_failure_between_zeros_and_batches_loses_no_acknowledged_record(seed: int) -> None:
    """Crash images are taken after every change of the disk while the log is preallocated several times."""
    bench = PreallocationBench()
    chance = random.Random(seed)
    durable = 0
    crashes = 0

    def crash() -> None:
        nonlocal crashes
        crashes += 1
        if chance.random() < 0.2:
            log = _opened(bench.disk.crash(chance))
            assert log.end_offset >= durable
            assert list(log.batches(0)) == [*bench.stored, ahead][: log.end_offset]

    written = 0
    for step in range(70):
        batch = make_batch([step], chance.randint(2500, 9000), step)
        ahead = step.to_bytes(8, "big") + batch[8:12] + bytes(4) + batch[16:]
        bench.disk.on_change = crash
        assert append(bench.log, batch)[1] == ahead
        bench.stored.append(ahead)
        bench.group_commit.request_flush(bench.log)
        if chance.random() < 0.8:
            bench.background.run_all()
        durable = bench.log.durable_end_offset
        bench.disk.on_change = None
        written = max(written, bench.written_ahead_bytes)
    assert written > 100_000
    assert crashes > 140


def _opened(disk: SimulatedDisk) -> Log:
    return Log.open(disk, ManualClock(), DIRECTORY, LogSettings())


def test_awaited_syncs_are_counted_beside_those_of_the_background() -> None:
    bench = LogBench()
    log = bench.open_log(DIRECTORY)
    for number in range(5):
        append(log, make_batch([number], 80, number))
        bench.group_commit.request_flush(log, urgent=False)
        append(log, make_batch([number], 80, number))
        bench.group_commit.request_flush(log, urgent=True)
        bench.run_jobs()
    assert log._preallocation.awaited_syncs == 5
