"""Waiting until the start offset of a log is on disk: after that trimmed records never reappear."""

from __future__ import annotations

import errno
from random import Random
from typing import TYPE_CHECKING

import pytest

from mansio.storage.group_commit import SYNCS_BEFORE_MAINTENANCE_MAX, GroupCommit
from mansio.storage.log import Log
from mansio.storage.settings import LogSettings
from mansio.testing.disk import SimulatedDisk
from support.logs import ManualBackground, ManualClock, ManualScheduler, append, make_batch

if TYPE_CHECKING:
    from mansio.errors import StorageError

SETTINGS = LogSettings(segment_bytes=300)


class World:
    def __init__(self, logs: int = 1) -> None:
        self.disk = SimulatedDisk()
        self.background = ManualBackground()
        self.scheduler = ManualScheduler()
        self.group_commit = GroupCommit(self.disk, self.background, "/data", scheduler=self.scheduler)
        self.logs = [Log.open(self.disk, ManualClock(), f"/data/{n}", SETTINGS) for n in range(logs)]
        self.reported: list[StorageError | None] = []
        for log in self.logs:
            self.group_commit.register(log)

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
    world = World(logs)
    for index in range(logs):
        world.fill(index=index)
    world.background.run_all()
    for index in range(logs):
        world.trim(4, index)
    assert world.reported == []
    world.background.run_all()
    assert world.reported == [None] * logs, "at once, not at the next checkpoint interval"
    for seed in range(50):
        assert world.start_after_crash(seed, logs - 1) == 4


def test_trim_during_a_swap_is_reported_when_it_is_on_disk() -> None:
    world = World()
    world.fill()
    world.background.run_all()
    world.logs[0].compaction.is_busy = True
    world.trim(4)
    world.background.run_all()
    world.scheduler.fire()
    world.background.run_all()
    assert world.reported == []
    world.logs[0].resume_after_compaction()
    world.scheduler.fire()
    world.background.run_all()
    assert world.reported == [None]
    assert all(world.start_after_crash(seed) == 4 for seed in range(20))


def test_second_trim_during_the_first_is_reported_separately() -> None:
    world = World()
    world.fill()
    world.background.run_all()
    world.trim(2)
    world.trim(4)
    world.background.run_one()
    assert world.reported == [None], "the job was prepared before the second"
    assert all(world.start_after_crash(seed) in (2, 4) for seed in range(20))
    world.background.run_all()
    assert world.reported == [None, None]
    assert all(world.start_after_crash(seed) == 4 for seed in range(20))


def test_start_offset_already_on_disk_is_reported_at_once() -> None:
    world = World()
    world.fill()
    world.background.run_all()
    world.trim(4)
    world.background.run_all()
    world.group_commit.persist_start_offset(world.logs[0], world.reported.append)
    assert world.reported == [None, None]


def test_full_disk_is_reported_and_retried() -> None:
    world = World()
    world.fill()
    world.background.run_all()
    world.disk.fail_when = lambda operation, path: (
        errno.ENOSPC if operation == "write" and path.endswith("checkpoint") else None
    )
    world.trim(4)
    world.background.run_all()
    assert [type(error).__name__ for error in world.reported] == ["StorageError"]
    assert world.logs[0].failure is None
    world.disk.fail_when = None
    world.scheduler.fire()
    world.background.run_all()
    assert world.start_after_crash(1) == 4


def test_failed_disk_and_closed_log_are_reported() -> None:
    world = World(2)
    for index in range(2):
        world.fill(index=index)
    world.background.run_all()
    world.disk.fail_when = lambda operation, path: (
        errno.EIO if operation in ("write", "sync") and path.endswith("0/checkpoint") else None
    )
    world.trim(4, 0)
    world.background.run_all()
    assert world.reported == [world.logs[0].failure]
    world.group_commit.persist_start_offset(world.logs[0], world.reported.append)
    assert world.reported == [world.logs[0].failure] * 2
    world.trim(4, 1)
    world.group_commit.unregister(world.logs[1])
    assert "closed" in str(world.reported[2])


def test_busy_broker_still_runs_maintenance() -> None:
    world = World()
    checkpoints: list[str] = []
    world.disk.fail_when = lambda operation, path: (
        checkpoints.append(path) if operation == "write" and path.endswith("checkpoint") else None
    )
    world.fill(1)
    world.background.run_all()
    world.scheduler.fire()
    world.background.run_all()
    checkpoints.clear()
    jobs = 0
    world.fill(1)
    while not checkpoints:
        world.fill(1)  # somebody always asks before the job before has ended
        world.scheduler.fire()
        assert world.background.run_one()
        jobs += 1
        assert jobs <= SYNCS_BEFORE_MAINTENANCE_MAX + 3, "two before it is due, and its own"
