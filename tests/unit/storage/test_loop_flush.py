"""Flushes on the event loop: which ones run there, and that they promise what those on the thread do."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

import pytest

from mansio.storage.flush.group_commit import GroupCommit
from mansio.storage.flush.loop_flush import (
    BYTES_MAX,
    LOGS_MAX,
    PAUSE_S,
    PAUSE_S_MAX,
    QUICK_FLUSHES,
    SLOW_AVERAGE_S,
    SLOW_S,
    LoopFlushPolicy,
)
from mansio.storage.log import Log, LogSettings
from mansio.testing.disk import SimulatedDisk
from support.logs import ManualBackground, ManualClock, ManualScheduler, append, make_batch

if TYPE_CHECKING:
    from mansio.errors import StorageError


class Bench:
    """A `GroupCommit` that may flush on the loop, on a disk whose syncs take `sync_s`."""

    def __init__(self, logs: int = 1, settings: LogSettings | None = None) -> None:
        self.disk = SimulatedDisk()
        self.clock = ManualClock()
        self.sync_s = 0.0
        self.background = ManualBackground()
        self.scheduler = ManualScheduler()
        self.group_commit = GroupCommit(
            self.disk,
            self.background,
            "/data",
            scheduler=self.scheduler,  # type: ignore[arg-type]  # the methods that GroupCommit uses
            clock=self.clock,
            observe_s=lambda _: self._pass(),
            loop_flushes=LoopFlushPolicy(self.clock),
        )
        self.logs = [
            Log.open(self.disk, self.clock, f"/data/{n}", settings or LogSettings()) for n in range(logs)
        ]
        for log in self.logs:
            append(log, make_batch([1]))  # begins the leader epoch, which is written on the thread
            log.sync()
            self.group_commit.register(log)

    def _pass(self) -> None:
        self.clock.seconds += self.sync_s

    def write(self, number: int = 0, *, value_bytes: int = 20) -> Log:
        log = self.logs[number]
        append(log, make_batch([1], value_bytes))
        self.group_commit.request(log)
        return log

    def flush_on_loop(self) -> bool:
        """Write and end the iteration; whether the loop flushed. The thread's jobs are run."""
        before = self.group_commit.loop_syncs
        log = self.write()
        self.scheduler.run_iteration()
        on_loop = self.group_commit.loop_syncs > before
        assert on_loop == (log.durable_end_offset == log.end_offset)
        self.background.run_all()
        assert log.durable_end_offset == log.end_offset
        return on_loop


def test_one_flush_covers_all_requests_of_an_iteration_and_none_completes_within_its_request() -> None:
    bench = Bench(2)
    for number in (0, 1, 0):
        log = bench.write(number)
        assert log.durable_end_offset < log.end_offset
    bench.scheduler.run_iteration()
    assert [log.durable_end_offset for log in bench.logs] == [3, 2]
    assert (bench.group_commit.syncs, bench.group_commit.loop_syncs) == (1, 1)
    assert not bench.background.jobs
    assert bench.group_commit.idle


def test_request_of_a_listener_is_flushed_in_a_later_iteration() -> None:
    bench = Bench()

    def told(end: int) -> None:
        if end < 6:
            bench.write()

    bench.logs[0].on_durable = told
    bench.write()
    for expected in range(2, 7):
        bench.scheduler.run_iteration()
        assert bench.logs[0].durable_end_offset == expected
    assert bench.group_commit.loop_syncs == 5


def test_many_logs_or_bytes_are_flushed_on_the_thread() -> None:
    bench = Bench(LOGS_MAX + 1)
    for number in range(LOGS_MAX + 1):
        bench.write(number)
    bench.scheduler.run_iteration()
    assert len(bench.background.jobs) == 1
    bench.background.run_all()
    bench.write(value_bytes=BYTES_MAX)
    bench.scheduler.run_iteration()
    assert len(bench.background.jobs) == 1
    bench.background.run_all()
    assert bench.group_commit.loop_syncs == 0
    assert bench.flush_on_loop()


def test_new_segment_is_flushed_on_the_thread() -> None:
    bench = Bench(settings=LogSettings(segment_bytes=2000))
    assert bench.flush_on_loop()
    bench.write(value_bytes=900)
    bench.write(value_bytes=900)
    bench.scheduler.run_iteration()
    assert len(bench.background.jobs) == 1, "a segment is closed and the directory is dirty"
    bench.background.run_all()
    assert bench.flush_on_loop()


def test_sync_while_maintenance_is_due_runs_on_the_thread() -> None:
    bench = Bench()
    assert bench.flush_on_loop()
    bench.write()
    bench.scheduler.fire()  # the checkpoint is due
    bench.scheduler.run_iteration()
    assert bench.background.jobs
    assert bench.group_commit.loop_syncs == 1
    bench.background.run_all()
    assert bench.logs[0].durable_end_offset == 3


@pytest.mark.parametrize(
    ("sync_s", "flushes"), [(SLOW_S, 1), (2 * SLOW_AVERAGE_S, 6)], ids=["one", "average"]
)
def test_slow_disk_gets_its_flushes_on_the_thread_for_longer_each_time(sync_s: float, flushes: int) -> None:
    bench = Bench()
    pause_s = PAUSE_S
    for _ in range(9):
        bench.sync_s = sync_s
        for _ in range(flushes):
            assert bench.flush_on_loop()
        bench.sync_s = 0.0
        assert not bench.flush_on_loop()
        bench.clock.seconds += pause_s * 0.99
        assert not bench.flush_on_loop()
        bench.clock.seconds += pause_s * 0.02
        assert bench.flush_on_loop()
        pause_s = min(2 * pause_s, PAUSE_S_MAX)


def test_pause_is_short_again_after_many_quick_flushes() -> None:
    bench = Bench()
    for _ in range(5):
        bench.sync_s = SLOW_S
        assert bench.flush_on_loop()
        bench.clock.seconds += PAUSE_S_MAX
    bench.sync_s = 0.0
    for _ in range(QUICK_FLUSHES):
        assert bench.flush_on_loop()
    bench.sync_s = SLOW_S
    assert bench.flush_on_loop()
    bench.clock.seconds += PAUSE_S
    assert bench.flush_on_loop()


def test_failed_flush_on_the_loop_ends_the_log_and_is_not_retried() -> None:
    bench = Bench()
    failures: list[StorageError] = []
    log = bench.write()
    log.on_failure = failures.append
    bench.disk.fail_when = lambda operation, _: errno.EIO if operation == "sync" else None
    bench.scheduler.run_iteration()
    bench.disk.fail_when = None
    assert len(failures) == 1
    assert log.failure is not None
    assert log.durable_end_offset == 1
    bench.scheduler.run_iteration()
    bench.background.run_all()
    assert log.durable_end_offset == 1


def test_close_flushes_what_waited_for_the_end_of_the_iteration() -> None:
    bench = Bench()
    log = bench.write()
    bench.group_commit.close()
    bench.background.run_all()
    assert log.durable_end_offset == 2
    bench.scheduler.run_iteration()
    assert not bench.background.jobs
