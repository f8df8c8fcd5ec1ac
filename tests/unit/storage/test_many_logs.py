"""Many logs of one broker: opened, maintained and closed with no more syncs than one log needs.

The tests assert numbers of disk calls, not times: `make bench` measures those.
"""

from __future__ import annotations

import errno
import random
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from mansio.errors import StorageError
from mansio.storage.file_cache import FileCache
from mansio.storage.group_commit import MAINTENANCE_BATCH_LOGS_MAX, GroupCommit, flush_on_shutdown
from mansio.storage.log import Log, LogSettings
from mansio.storage.parallel_recovery import OpenRequest, open_logs
from mansio.testing.disk import SimulatedDisk
from support.logs import ManualBackground, ManualClock, ManualScheduler, append, make_batch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

ROOT = "/data"
SYNCS = ("sync", "sync_directory", "sync_all")
WRITES = ("write", "truncate", "rename", "remove", "mkdir")
SETTINGS = LogSettings(index_interval_bytes=1, index_snapshot_bytes=1 << 20)


@contextmanager
def recorded(disk: SimulatedDisk) -> Iterator[list[tuple[str, str]]]:
    """Records the disk calls: (operation, path)."""
    calls: list[tuple[str, str]] = []

    def note(operation: str, path: str) -> None:
        calls.append((operation, path))

    disk.fail_when = note
    try:
        yield calls
    finally:
        disk.fail_when = None


def operations(calls: Sequence[tuple[str, str]], kinds: Sequence[str]) -> list[tuple[str, str]]:
    return [call for call in calls if call[0] in kinds]


def open_all(disk: SimulatedDisk, count: int, settings: LogSettings = SETTINGS) -> list[Log]:
    opened = open_some(disk, count, settings)
    logs = [log for log in opened if isinstance(log, Log)]
    assert len(logs) == count, opened
    return logs


def open_some(disk: SimulatedDisk, count: int, settings: LogSettings = SETTINGS) -> list[Log | StorageError]:
    disk.make_directory(ROOT)
    requests = [OpenRequest(f"{ROOT}/{number}", settings) for number in range(count)]
    return open_logs(disk, ManualClock(), ROOT, requests, FileCache(disk))


def crashed_with_tails(count: int, *, can_sync_all: bool = True) -> tuple[SimulatedDisk, list[list[bytes]]]:
    """`count` logs whose process was killed: none of their records was synced, all of them are still readable."""
    disk = SimulatedDisk(can_sync_all=can_sync_all)
    written = []
    for number, log in enumerate(open_all(disk, count)):
        written.append([append(log, make_batch([1000 + n], 40, number), 3)[1] for n in range(3)])
    return disk, written


class Syncing:
    """A `GroupCommit` and its worker, driven by the test."""

    def __init__(self, disk: SimulatedDisk, logs: Sequence[Log]) -> None:
        self.background = ManualBackground()
        self.scheduler = ManualScheduler()
        self.group_commit = GroupCommit(disk, self.background, ROOT, scheduler=self.scheduler)
        for log in logs:
            self.group_commit.register(log)

    def sync(self, logs: Sequence[Log]) -> None:
        for log in logs:
            self.group_commit.request_flush(log)
        self.background.run_all()

    def prune(self) -> None:
        self.scheduler.fire()
        self.background.run_all()


def test_creating_many_logs_takes_as_many_syncs_as_creating_two() -> None:
    counts = []
    for count in (2, 100):
        disk = SimulatedDisk()
        disk.make_directory(ROOT)
        with recorded(disk) as calls:
            open_all(disk, count)
        counts.append(len(operations(calls, SYNCS)))
    assert counts[1] <= counts[0]


def test_opening_many_logs_after_a_crash_takes_as_many_syncs_as_opening_two() -> None:
    counts = []
    for count in (2, 100):
        disk, written = crashed_with_tails(count)
        with recorded(disk) as calls:
            logs = open_all(disk, count)
        counts.append(len(operations(calls, SYNCS)))
        assert [list(log.batches(0)) for log in logs] == written
    assert counts[1] <= counts[0]


@pytest.mark.parametrize("can_sync_all", [True, False])
def test_logs_opened_in_a_batch_are_durable(can_sync_all: bool) -> None:
    disk, written = crashed_with_tails(20, can_sync_all=can_sync_all)
    open_all(disk, 20)
    for seed in range(20):
        again = open_all(disk.crash(random.Random(seed)), 20)
        assert [list(log.batches(0)) for log in again] == written
        assert [log.leader_epochs.entries() for log in again] == [[(3, 0)]] * 20
        assert not any(log.recovery.checked_bytes for log in again)


@pytest.mark.parametrize("closed_together", [True, False])
def test_opening_logs_that_were_closed_cleanly_reads_no_batch_and_writes_and_syncs_nothing(
    closed_together: bool,
) -> None:
    disk = SimulatedDisk()
    logs = open_all(disk, 30)
    syncing = Syncing(disk, logs)
    for log in logs[:20]:
        append(log, make_batch([5, 6], 100))
    syncing.sync(logs)
    with recorded(disk) as calls:
        if closed_together:
            flush_on_shutdown(disk, ROOT, logs)
        for log in logs:
            log.close()
    if closed_together:
        assert len(operations(calls, SYNCS)) == 1
    with recorded(disk) as calls:
        logs = open_all(disk, 30)
    assert operations(calls, SYNCS + WRITES) == []
    assert not [path for operation, path in calls if operation == "read" and path.endswith(".log")]
    assert [log.end_offset for log in logs] == [2] * 20 + [0] * 10


def test_failed_shared_sync_fails_only_the_affected_log() -> None:
    disk, written = crashed_with_tails(20)
    bad = f"{ROOT}/7/00000000000000000000.log"
    together = []

    def refuse(operation: str, path: str) -> int | None:
        if operation == "sync_all":
            together.append(path)
        return errno.EIO if operation == "sync_all" or (operation == "sync" and path == bad) else None

    disk.fail_when = refuse
    opened = open_some(disk, 20)
    disk.fail_when = None
    assert together
    assert [number for number, one in enumerate(opened) if isinstance(one, StorageError)] == [7]
    for seed in range(20):  # the others were written again, and that is what the disk has
        image = disk.crash(random.Random(seed))
        again = open_some(image, 20)
        held = [list(one.batches(0)) if isinstance(one, Log) else None for one in again]
        assert [held[number] for number in range(20) if number != 7] == written[:7] + written[8:]


def test_a_damaged_log_keeps_no_other_from_being_opened() -> None:
    disk = SimulatedDisk()
    logs = open_all(disk, 5)
    syncing = Syncing(disk, logs)
    for log in logs:
        append(log, make_batch([5, 6], 100))
    syncing.sync(logs)
    syncing.prune()
    disk.truncate_file(f"{ROOT}/3/00000000000000000000.log", 10)
    opened = open_some(disk, 5)
    assert [isinstance(one, Log) for one in opened] == [True, True, True, False, True]


def test_an_idle_log_costs_no_call_of_the_disk() -> None:
    disk = SimulatedDisk()
    logs = open_all(disk, 50)
    syncing = Syncing(disk, logs)
    syncing.sync(logs)
    syncing.prune()
    with recorded(disk) as calls:
        for _ in range(3):
            append(logs[4], make_batch([1], 50))
            syncing.sync(logs)
            syncing.prune()
    assert {path for _, path in calls} == {
        f"{ROOT}/4/00000000000000000000.log",
        f"{ROOT}/4/checkpoint",
        f"{ROOT}/4/epochs.tmp",
        f"{ROOT}/4",
    }


def test_sync_waits_for_the_maintenance_of_some_logs_and_not_of_all() -> None:
    disk = SimulatedDisk()
    count = 2 * MAINTENANCE_BATCH_LOGS_MAX + 10
    logs = open_all(disk, count)
    syncing = Syncing(disk, logs)
    for log in logs:
        append(log, make_batch([1], 50))
    syncing.sync(logs)
    syncing.scheduler.fire()  # the checkpoints of all of them are due, and begun
    append(logs[0], make_batch([2], 50))
    syncing.group_commit.request_flush(logs[0])
    with recorded(disk) as calls:
        jobs = 0
        while logs[0].durable_end_offset < 2:
            assert syncing.background.run_one()
            jobs += 1
    assert jobs <= 2
    assert len({path for operation, path in calls if operation == "write"}) <= MAINTENANCE_BATCH_LOGS_MAX + 1
    syncing.background.run_all()
    reopened = open_all(disk.crash(random.Random(1)), count)
    assert (
        sum(bool(log.recovery.checked_bytes) for log in reopened) <= 1
    )  # every other one has its checkpoint


def test_maintenance_of_many_logs_does_not_spin_on_a_full_disk() -> None:
    disk = SimulatedDisk()
    logs = open_all(disk, MAINTENANCE_BATCH_LOGS_MAX + 10)
    syncing = Syncing(disk, logs)
    for log in logs:
        append(log, make_batch([1], 50))
    syncing.sync(logs)
    disk.fail_when = lambda operation, path: (
        errno.ENOSPC if operation == "write" and "checkpoint" in path else None
    )
    syncing.scheduler.fire()
    jobs = 0
    while syncing.background.run_one():
        jobs += 1
        assert jobs < 10
    disk.fail_when = None
    syncing.prune()
    assert not any(log.needs_maintenance or log.failure for log in logs)


def cost(segments: int) -> list[str]:
    """Disk calls, by operation, for one more batch in a log with a given number of segments."""
    disk = SimulatedDisk()
    settings = LogSettings(segment_bytes=1000, index_interval_bytes=1)
    (log,) = open_all(disk, 1, settings)
    syncing = Syncing(disk, [log])
    number = 0
    while len(log.segments()) < segments or log.segments()[-1].size_bytes > 300:
        append(log, make_batch([number], 150))
        number += 1
        syncing.sync([log])
        syncing.prune()
    with recorded(disk) as calls:
        append(log, make_batch([number], 150))
        piece = log.read(log.end_offset - 1, 1 << 20, log.end_offset)
        assert piece is not None
        piece.read()
        syncing.sync([log])
        syncing.prune()
        assert log.offset_for_time(number, log.end_offset) is not None
    return [operation for operation, _ in calls]


def test_a_batch_costs_the_same_calls_of_the_disk_in_a_log_of_few_segments_and_of_many() -> None:
    assert cost(4) == cost(80)


def test_opening_a_log_of_many_segments_reads_no_index_of_a_closed_one() -> None:
    disk = SimulatedDisk()
    settings = LogSettings(segment_bytes=1000, index_interval_bytes=1)
    (log,) = open_all(disk, 1, settings)
    syncing = Syncing(disk, [log])
    for number in range(300):
        append(log, make_batch([number], 150))
        syncing.sync([log])
        syncing.prune()
    log.close()
    with recorded(disk) as calls:
        (log,) = open_all(disk, 1, settings)
    assert len(log.segments()) > 30
    read = {path for operation, path in calls if operation == "read"}
    assert [path for path in read if path.endswith(".log")] == []
    assert len([path for path in read if path.endswith(".index")]) == 1


def test_a_log_that_is_written_fast_gets_its_checkpoint_before_the_interval_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Bytes above a checkpoint are read and written again after a crash: their number is bounded, too."""
    monkeypatch.setattr("mansio.storage.group_commit.CHECKPOINT_LAG_BYTES_MAX", 3000)
    disk = SimulatedDisk()
    (log,) = open_all(disk, 1)
    syncing = Syncing(disk, [log])
    for number in range(50):
        append(log, make_batch([number], 300))
        syncing.sync([log])
        (again,) = open_all(disk.crash(random.Random(number)), 1)
        assert again.recovery.checked_bytes <= 3400
        assert again.end_offset == number + 1
