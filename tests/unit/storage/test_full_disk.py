"""A full disk affects only operations that need space: no log fails because of it unless records may be lost."""

from __future__ import annotations

import errno
import random
from typing import TYPE_CHECKING

import pytest

from mansio.errors import StorageError
from mansio.storage.checkpoint import load_checkpoint
from mansio.storage.index import load_index
from mansio.storage.log import Log, LogSettings
from support.logs import (
    LogBench,
    ManualClock,
    append,
    check_contents,
    make_batch,
)

if TYPE_CHECKING:
    from collections.abc import Callable

SETTINGS = LogSettings(segment_bytes=300, index_interval_bytes=100)


class FullDiskBench(LogBench):
    """Logs, their group commit, and a disk that is full for the operations in `full`."""

    def __init__(self, logs: int = 1) -> None:
        super().__init__()
        for number in range(logs):
            self.open_log(f"/data/{number}", SETTINGS).sync()
        self.stored: list[list[bytes]] = [[] for _ in self.logs]

    def write(self, number: int = 0, leader_epoch: int = -1) -> Log:
        log = self.logs[number]
        tag = len(self.stored[number])
        leader_epoch = max(0, leader_epoch, log.leader_epochs.latest_epoch)
        self.stored[number].append(append(log, make_batch([1000 + tag], 100, tag), leader_epoch)[1])
        return log

    def full(self, refuses: Callable[[str, str], bool] | None, code: int = errno.ENOSPC) -> None:
        self.disk.fail_when = None
        if refuses is not None:
            self.disk.fail_when = lambda operation, path: code if refuses(operation, path) else None

    def sync(self) -> None:
        for log in self.logs:
            self.group_commit.request_flush(log)
        self.background.run_all()

    def prune(self) -> None:
        self.scheduler.fire()
        self.background.run_all()

    def check(self) -> None:
        for number, log in enumerate(self.logs):
            assert log.failure is None
            assert log.unfinished_job_count == 0
            for seed in range(10):
                image = self.disk.crash(random.Random(seed))
                again = Log.open(image, ManualClock(), f"/data/{number}", SETTINGS)
                assert again.end_offset >= log.durable_end_offset
                check_contents(again, self.stored[number])


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize(
    "refused", [("write", "checkpoint"), ("sync", "checkpoint"), ("write", ".tmp"), ("remove", ".log")]
)
@pytest.mark.parametrize("logs", [1, 5])
def test_maintenance_on_a_full_disk_is_retried(code: int, refused: tuple[str, str], logs: int) -> None:
    bench = FullDiskBench(logs)
    for _ in range(2):
        for number in range(logs):
            for _ in range(4):
                bench.write(number)
            bench.logs[number].trim_to(bench.logs[number].end_offset - 2)
        bench.sync()
        bench.full(lambda operation, path: operation == refused[0] and path.endswith(refused[1]), code)
        for _ in range(3):
            bench.prune()
            assert all(log.failure is None and log.unfinished_job_count == 0 for log in bench.logs)
            if refused[0] != "sync" or logs == 1:  # many are synced by another call
                assert all(log.needs_maintenance for log in bench.logs)
        if refused == ("write", "checkpoint"):  # what was not written does not count, nor does its slot
            for log in bench.logs:
                assert (
                    load_checkpoint(bench.disk, f"{log.directory}/checkpoint") == log._flush_state.checkpoint
                )
        bench.check()
        bench.write()
        bench.sync()
        assert bench.logs[0].durable_end_offset == bench.logs[0].end_offset
        bench.full(None)
        bench.prune()
        assert not any(log.needs_maintenance for log in bench.logs)
        bench.check()
    for number, log in enumerate(bench.logs):
        names = {path for path in bench.disk.files() if path.startswith(f"/data/{number}/")}
        segments = {f"/data/{number}/{info.base_offset:020d}.log" for info in log.segments()}
        assert {name for name in names if name.endswith(".log")} == segments
        for info in log.segments()[:-1]:
            assert load_index(bench.disk, f"/data/{number}/{info.base_offset:020d}.index", info.base_offset)
    assert not bench.scheduler.timers


def test_trimmed_segments_are_removed_on_a_full_disk() -> None:
    bench = FullDiskBench()
    for _ in range(8):
        bench.write()
    bench.sync()
    bench.full(lambda operation, path: operation in ("write", "truncate") and path.endswith(".tmp"))
    bench.logs[0].trim_to(6)
    bench.prune()
    left = {path for path in bench.disk.files() if path.endswith(".log")}
    assert left == {f"/data/0/{offset:020d}.log" for offset in (6, 7)}


def test_file_system_sync_that_fails_on_a_full_disk_is_the_last_one() -> None:
    """Its error may concern any log's records and is reported once: from then on every file is synced by itself."""
    bench = FullDiskBench(6)
    for number in range(6):
        bench.write(number)
    bench.sync()
    bench.full(lambda operation, path: operation == "sync_all")
    bench.prune()
    bench.check()
    bench.full(None)
    before = bench.group_commit.file_system_sync_count
    for number in range(6):
        bench.write(number)
    bench.sync()
    bench.prune()
    assert bench.group_commit.file_system_sync_count == before
    assert not any(log.needs_maintenance for log in bench.logs)
    bench.check()


@pytest.mark.parametrize("logs", [2, 6])
def test_no_end_is_durable_while_its_leader_epoch_cannot_be_written(logs: int) -> None:
    bench = FullDiskBench(logs)
    for number in range(logs):
        bench.write(number)
    bench.sync()
    for number in range(logs):
        bench.write(number, leader_epoch=3)
    bench.full(lambda operation, path: operation == "write" and path == "/data/0/epochs.tmp")
    for log in bench.logs:
        bench.group_commit._dirty_logs[log] = None
    bench.sync()
    assert [log.durable_end_offset for log in bench.logs] == [1] + [2] * (logs - 1)
    bench.check()
    bench.prune()
    assert bench.logs[0].durable_end_offset == 1
    assert bench.group_commit.is_idle  # a broker that stops does not wait for room
    bench.full(None)
    bench.prune()
    assert bench.logs[0].durable_end_offset == 2
    bench.check()


def test_sync_of_records_on_a_full_disk_fails_the_log() -> None:
    bench = FullDiskBench()
    log = bench.write()
    bench.full(lambda operation, path: operation == "sync" and path.endswith(".log"))
    bench.sync()
    assert log.failure is not None
    assert log.durable_end_offset == 0


def test_blocking_sync_and_close_on_a_full_disk(caplog: pytest.LogCaptureFixture) -> None:
    bench = FullDiskBench()
    log = bench.write(leader_epoch=1)
    bench.full(lambda operation, path: operation == "write" and not path.endswith(".log"))
    for _ in range(2):
        with pytest.raises(StorageError, match="no space for the leader epochs"):
            log.sync()
    assert (log.durable_end_offset, log.failure) == (0, None)
    assert len(caplog.records) == 1
    bench.full(lambda operation, path: operation == "write" and path.endswith("checkpoint"))
    log.sync()
    assert log.durable_end_offset == 1
    bench.check()
    log.close()
    bench.full(None)
    check_contents(Log.open(bench.disk, ManualClock(), "/data/0", SETTINGS), bench.stored[0])
