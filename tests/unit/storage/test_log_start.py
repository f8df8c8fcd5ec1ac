"""Waiting until the start offset of a log is on disk: after that trimmed records never reappear."""

from __future__ import annotations

import errno
from random import Random
from typing import TYPE_CHECKING

import pytest

from mansio.storage.group_commit import SYNCS_BEFORE_MAINTENANCE_MAX
from mansio.storage.log import Log
from mansio.storage.settings import LogSettings
from support.logs import LogBench, ManualClock, append, make_batch

if TYPE_CHECKING:
    from mansio.errors import StorageError

SETTINGS = LogSettings(segment_bytes=300)


class StartBench(LogBench):
    """Logs whose start offsets move, and the outcomes of the waits for that."""

    def __init__(self, logs: int = 1) -> None:
        super().__init__()
        for number in range(logs):
            self.open_log(f"/data/{number}", SETTINGS)
        self.reported: list[StorageError | None] = []

    def fill(self, batches: int = 6, index: int = 0) -> None:
        for _ in range(batches):
            append(self.logs[index], make_batch([1]))
        self.group_commit.request_flush(self.logs[index])

    def trim(self, offset: int, index: int = 0) -> None:
        self.logs[index].trim_to(offset)
        self.group_commit.persist_start_offset(self.logs[index], self.reported.append)

    def start_after_crash(self, seed: int, index: int = 0) -> int:
        return Log.open(self.disk.crash(Random(seed)), ManualClock(), f"/data/{index}", SETTINGS).start_offset


@pytest.mark.parametrize("logs", [1, 6])
def test_trimmed_records_stay_deleted_after_any_crash_once_reported(logs: int) -> None:
    bench = StartBench(logs)
    for index in range(logs):
        bench.fill(index=index)
    bench.background.run_all()
    for index in range(logs):
        bench.trim(4, index)
    assert bench.reported == []
    bench.background.run_all()
    assert bench.reported == [None] * logs, "at once, not at the next checkpoint interval"
    for seed in range(50):
        assert bench.start_after_crash(seed, logs - 1) == 4


def test_trim_during_a_swap_is_reported_when_it_is_on_disk() -> None:
    bench = StartBench()
    bench.fill()
    bench.background.run_all()
    bench.logs[0].compaction.is_busy = True
    bench.trim(4)
    bench.background.run_all()
    bench.scheduler.fire()
    bench.background.run_all()
    assert bench.reported == []
    bench.logs[0].resume_after_compaction()
    bench.scheduler.fire()
    bench.background.run_all()
    assert bench.reported == [None]
    assert all(bench.start_after_crash(seed) == 4 for seed in range(20))


def test_second_trim_during_the_first_is_reported_separately() -> None:
    bench = StartBench()
    bench.fill()
    bench.background.run_all()
    bench.trim(2)
    bench.trim(4)
    bench.background.run_one()
    assert bench.reported == [None], "the job was prepared before the second"
    assert all(bench.start_after_crash(seed) in (2, 4) for seed in range(20))
    bench.background.run_all()
    assert bench.reported == [None, None]
    assert all(bench.start_after_crash(seed) == 4 for seed in range(20))


def test_start_offset_already_on_disk_is_reported_at_once() -> None:
    bench = StartBench()
    bench.fill()
    bench.background.run_all()
    bench.trim(4)
    bench.background.run_all()
    bench.group_commit.persist_start_offset(bench.logs[0], bench.reported.append)
    assert bench.reported == [None, None]


def test_full_disk_is_reported_and_retried() -> None:
    bench = StartBench()
    bench.fill()
    bench.background.run_all()
    bench.disk.fail_when = lambda operation, path: (
        errno.ENOSPC if operation == "write" and path.endswith("checkpoint") else None
    )
    bench.trim(4)
    bench.background.run_all()
    assert [type(error).__name__ for error in bench.reported] == ["StorageError"]
    assert bench.logs[0].failure is None
    bench.disk.fail_when = None
    bench.scheduler.fire()
    bench.background.run_all()
    assert bench.start_after_crash(1) == 4


def test_failed_disk_and_closed_log_are_reported() -> None:
    bench = StartBench(2)
    for index in range(2):
        bench.fill(index=index)
    bench.background.run_all()
    bench.disk.fail_when = lambda operation, path: (
        errno.EIO if operation in ("write", "sync") and path.endswith("0/checkpoint") else None
    )
    bench.trim(4, 0)
    bench.background.run_all()
    assert bench.reported == [bench.logs[0].failure]
    bench.group_commit.persist_start_offset(bench.logs[0], bench.reported.append)
    assert bench.reported == [bench.logs[0].failure] * 2
    bench.trim(4, 1)
    bench.group_commit.unregister(bench.logs[1])
    assert "closed" in str(bench.reported[2])


def test_busy_broker_still_runs_maintenance() -> None:
    bench = StartBench()
    checkpoints: list[str] = []
    bench.disk.fail_when = lambda operation, path: (
        checkpoints.append(path) if operation == "write" and path.endswith("checkpoint") else None
    )
    bench.fill(1)
    bench.background.run_all()
    bench.scheduler.fire()
    bench.background.run_all()
    checkpoints.clear()
    jobs = 0
    bench.fill(1)
    while not checkpoints:
        bench.fill(1)  # somebody always asks before the job before has ended
        bench.scheduler.fire()
        assert bench.background.run_one()
        jobs += 1
        assert jobs <= SYNCS_BEFORE_MAINTENANCE_MAX + 3, "two before it is due, and its own"
