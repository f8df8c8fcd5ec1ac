"""Group commit: which requests share a sync, which start one, and the effect of a failure."""

from __future__ import annotations

import errno
import random
from typing import TYPE_CHECKING

import pytest

from mansio.storage.group_commit import SYNCS_BEFORE_COPIES_MAX
from mansio.storage.index import load_index
from mansio.storage.log import Log, LogListener, LogSettings
from mansio.testing.disk import SimulatedDisk
from support.logs import LogBench, ManualClock, append, make_batch
from support.present import present

if TYPE_CHECKING:
    from mansio.errors import StorageError


class GroupCommitBench(LogBench):
    """A `GroupCommit` with logs, and a worker and timers that the test drives."""

    def __init__(self, logs: int = 1, *, can_sync_all: bool = True) -> None:
        super().__init__(
            SimulatedDisk(can_sync_all=can_sync_all), log_flush_offset_checkpoint_interval_ms=1000
        )
        for number in range(logs):
            self.open_log(f"/data/{number}").sync()

    def write(self, number: int = 0) -> Log:
        log = self.logs[number]
        append(log, make_batch([1]))
        return log


def test_first_request_starts_a_sync_and_later_ones_share_the_next() -> None:
    bench = GroupCommitBench()
    log = bench.write()
    bench.group_commit.request_flush(log)
    assert len(bench.background.jobs) == 1
    for _ in range(5):
        bench.group_commit.request_flush(bench.write())
    assert len(bench.background.jobs) == 1
    bench.background.run_one()
    assert log.durable_end_offset == 1
    assert len(bench.background.jobs) == 1
    bench.background.run_one()
    assert log.durable_end_offset == 6
    assert not bench.background.jobs
    assert bench.group_commit.sync_count == 2
    assert bench.group_commit.is_idle


def test_requests_of_one_block_share_one_sync() -> None:
    bench = GroupCommitBench(3)
    with bench.group_commit.one_job():
        for number in range(3):
            bench.group_commit.request_flush(bench.write(number))
        assert not bench.background.jobs
    bench.background.run_one()
    assert all(log.durable_end_offset == 1 for log in bench.logs)
    assert bench.group_commit.sync_count == 1
    with bench.group_commit.one_job():
        pass
    assert not bench.background.jobs


def test_a_block_of_requests_does_not_start_a_second_job_beside_a_running_one() -> None:
    bench = GroupCommitBench(2)
    bench.group_commit.request_flush(bench.write(0))
    with bench.group_commit.one_job():
        bench.group_commit.request_flush(bench.write(1))
    assert len(bench.background.jobs) == 1
    bench.background.run_one()
    bench.background.run_one()
    assert all(log.durable_end_offset == 1 for log in bench.logs)
    assert bench.group_commit.is_idle


def test_few_files_are_synced_one_by_one_and_many_by_one_call() -> None:
    for logs, file_system_sync_count in [(2, 0), (20, 1)]:
        bench = GroupCommitBench(logs)
        bench.group_commit.request_flush(bench.write(0))
        bench.background.run_one()
        for number in range(logs):
            bench.group_commit._dirty_logs[bench.write(number)] = None
        bench.group_commit.request_flush(bench.logs[0])
        bench.background.run_one()
        assert bench.group_commit.file_system_sync_count == file_system_sync_count
        assert all(log.durable_end_offset == log.end_offset for log in bench.logs)


def test_without_syncfs_every_file_is_synced() -> None:
    bench = GroupCommitBench(20, can_sync_all=False)
    for number in range(20):
        bench.group_commit._dirty_logs[bench.write(number)] = None
    bench.group_commit.request_flush(bench.logs[0])
    bench.background.run_one()
    assert all(log.durable_end_offset == 1 for log in bench.logs)


def test_a_failed_sync_fails_its_log_only_and_is_not_repeated() -> None:
    bench = GroupCommitBench(2)
    bench.group_commit.request_flush(bench.write(0))
    bench.disk.fail_when = lambda operation, path: (
        errno.EIO if operation == "sync" and path.startswith("/data/0/") else None
    )
    reported: list[StorageError] = []
    bench.logs[0].listen(LogListener(on_failure=reported.append))
    bench.group_commit.request_flush(bench.write(1))
    bench.background.run_all()
    bench.disk.fail_when = None
    assert reported == [bench.logs[0].failure]
    assert bench.logs[0].durable_end_offset == 0
    assert bench.logs[1].failure is None
    assert bench.logs[1].durable_end_offset == 1
    syncs = bench.disk.syncs
    bench.group_commit.request_flush(bench.logs[0])
    bench.background.run_all()
    bench.scheduler.fire()
    bench.background.run_all()
    assert bench.logs[0].durable_end_offset == 0
    assert bench.disk.syncs == syncs + 1  # the other log's checkpoint


def test_a_failed_syncfs_fails_every_log_it_covered() -> None:
    bench = GroupCommitBench(8)
    for number in range(8):
        bench.group_commit._dirty_logs[bench.write(number)] = None
    bench.disk.fail_when = lambda operation, path: errno.EIO if operation == "sync_all" else None
    bench.group_commit.request_flush(bench.logs[0])
    bench.background.run_all()
    assert all(log.failure is not None for log in bench.logs)
    assert all(log.durable_end_offset == 0 for log in bench.logs)


def test_defect_on_the_thread_fails_the_logs_and_is_reported() -> None:
    bench = GroupCommitBench()

    def defect(path: str) -> bool:
        raise ZeroDivisionError

    bench.group_commit._sync_all_files_min = 0
    bench.disk.sync_all = defect  # stands for any programming error
    bench.group_commit.request_flush(bench.write())
    bench.background.run_all()
    assert isinstance(present(bench.logs[0].failure).__cause__, ZeroDivisionError)


def test_background_request_is_delayed_and_shares_an_urgent_sync() -> None:
    bench = GroupCommitBench(2)
    bench.group_commit.request_flush(bench.write(0), urgent=False)
    bench.group_commit.request_flush(bench.write(1), urgent=False)
    assert not bench.background.jobs
    bench.scheduler.fire(up_to_ms=100)
    bench.background.run_one()
    assert [log.durable_end_offset for log in bench.logs] == [1, 1]
    assert bench.group_commit.sync_count == 1


def test_logs_that_copy_what_they_lack_are_not_in_the_sync_that_a_producer_waits_for() -> None:
    bench = GroupCommitBench(7)
    copied = [bench.write(number) for number in range(1, 7)]
    bench.group_commit.request_flush(bench.write(0))
    bench.group_commit.request_flush_of_all(copied, are_copied=True)
    bench.group_commit.request_flush(bench.write(0))
    bench.background.run_one()
    synced = bench.disk.syncs
    bench.background.run_one()
    assert [log.durable_end_offset for log in bench.logs] == [2, 0, 0, 0, 0, 0, 0]
    assert (bench.disk.syncs - synced, bench.group_commit.file_system_sync_count) == (1, 0)
    assert not bench.group_commit.is_idle
    bench.background.run_one()
    assert [log.durable_end_offset for log in bench.logs] == [2, 1, 1, 1, 1, 1, 1]
    assert bench.group_commit.file_system_sync_count == 1
    assert bench.group_commit.is_idle


def test_producers_delay_the_flush_of_copies_for_a_few_syncs_only() -> None:
    bench = GroupCommitBench(2)
    bench.group_commit.request_flush(bench.write(0))
    bench.group_commit.request_flush_of_all([bench.write(1)], are_copied=True)
    syncs = 0
    while not bench.logs[1].durable_end_offset:
        bench.group_commit.request_flush(bench.write(0))
        bench.background.run_one()
        syncs += 1
        assert syncs <= SYNCS_BEFORE_COPIES_MAX + 2
    bench.background.run_one()
    assert bench.logs[0].durable_end_offset == bench.logs[0].end_offset


def test_a_call_after_a_job_flushes_copies_too() -> None:
    bench = GroupCommitBench(2)
    bench.group_commit.request_flush(bench.write(0))
    bench.group_commit.request_flush_of_all([bench.write(1)], are_copied=True)
    bench.group_commit.request_flush(bench.write(0))
    assert bench.group_commit.call_after_job(lambda: None)
    bench.background.run_one()
    bench.background.run_one()
    assert [log.durable_end_offset for log in bench.logs] == [2, 1]


def test_checkpoint_is_written_within_its_interval_after_writes_stop() -> None:
    bench = GroupCommitBench()
    bench.group_commit.request_flush(bench.write())
    bench.background.run_all()
    needs_maintenance = bench.logs[0].needs_maintenance
    assert needs_maintenance
    bench.scheduler.fire(up_to_ms=1000)
    bench.background.run_all()
    assert not bench.logs[0].needs_maintenance
    again = Log.open(bench.disk, ManualClock(), "/data/0", LogSettings())
    assert again.recovery.checked_bytes == 0
    assert again.end_offset == 1
    assert not bench.scheduler.timers  # an idle log wakes nobody


def test_a_forgotten_log_is_not_synced_again() -> None:
    bench = GroupCommitBench()
    log = bench.write()
    bench.group_commit.request_flush(log)
    bench.group_commit.request_flush(bench.write())
    bench.group_commit.unregister(log)
    log.close(save=False)
    bench.background.run_all()
    bench.scheduler.fire()
    assert log.durable_end_offset == 0
    assert not bench.background.jobs


def test_trimmed_segments_are_removed_by_the_next_maintenance() -> None:
    bench = GroupCommitBench()
    log = bench.logs[0]
    log.update_settings(LogSettings(segment_bytes=100))
    for _ in range(4):
        bench.write()
    bench.group_commit.request_flush(log)
    bench.background.run_all()
    log.trim_to(2)
    bench.scheduler.fire()
    bench.background.run_all()
    names = [path.rpartition("/")[2] for path in bench.disk.files() if path.endswith(".log")]
    assert sorted(names) == [f"{n:020d}.log" for n in (2, 3)]


def test_a_segment_that_is_closed_while_its_index_is_saved_still_gets_its_whole_index() -> None:
    bench = GroupCommitBench()
    log = bench.logs[0]
    log.update_settings(LogSettings(segment_bytes=400, index_snapshot_bytes=1))
    bench.group_commit.request_flush(bench.write())
    bench.background.run_all()
    bench.scheduler.fire()  # maintenance, with a snapshot of the active segment's index, has started
    assert bench.background.jobs
    for _ in range(8):
        bench.write()
    bench.background.run_all()
    bench.group_commit.request_flush(log)
    bench.background.run_all()
    bench.scheduler.fire()
    bench.background.run_all()
    assert log.failure is None
    for info in log.segments()[:-1]:
        loaded = load_index(bench.disk, f"/data/0/{info.base_offset:020d}.index", info.base_offset)
        assert loaded is not None
        assert (loaded.covered_bytes, loaded.end_offset) == (info.size_bytes, info.end_offset)


@pytest.mark.parametrize("logs", [3, 8])
def test_listener_that_raises_does_not_affect_other_logs(logs: int, caplog: pytest.LogCaptureFixture) -> None:
    bench = GroupCommitBench(logs)
    received: list[int] = []

    def raising(_: object) -> None:
        received.append(1)
        raise ZeroDivisionError("a listener's defect")

    for log in bench.logs[:2]:
        log.listen(LogListener(on_durable=raising, on_failure=raising))
    for number in range(logs):
        bench.group_commit._dirty_logs[bench.write(number)] = None
    bench.group_commit.request_flush(bench.logs[0])
    with pytest.raises(ZeroDivisionError):
        bench.background.run_one()
    assert len(received) == 2
    assert [record.levelname for record in caplog.records] == ["ERROR"]  # the second; the first was raised
    assert [log.durable_end_offset for log in bench.logs] == [1] * logs
    assert [log.unfinished_job_count for log in bench.logs] == [0] * logs
    bench.scheduler.fire()
    bench.background.run_all()
    assert not any(log.needs_maintenance for log in bench.logs)
    bench.group_commit.request_flush(bench.write(2))  # the group commit continues
    bench.background.run_all()
    assert bench.logs[2].durable_end_offset == 2

    for number in range(logs):
        bench.group_commit._dirty_logs[bench.write(number)] = None
    bench.disk.fail_when = lambda operation, path: errno.EIO if operation.startswith("sync") else None
    bench.group_commit.request_flush(bench.logs[0])
    with pytest.raises(ZeroDivisionError):
        bench.background.run_one()
    assert all(log.failure is not None and log.unfinished_job_count == 0 for log in bench.logs)


def test_listener_that_requests_a_sync_does_not_overtake_the_current_one() -> None:
    """If the next job of a log were prepared before this one is finished, a closed segment could stay unsynced."""
    bench = GroupCommitBench(2, can_sync_all=False)
    first, second = bench.logs
    second.update_settings(LogSettings(segment_bytes=200))  # two batches each
    for _ in range(3):
        bench.write(1)
    first.listen(LogListener(on_durable=lambda _: bench.group_commit.request_flush(second)))
    bench.group_commit._dirty_logs[bench.write(0)] = None
    bench.group_commit.request_flush(second)
    for _ in range(2):
        bench.write(1)
    bench.background.run_one()
    assert len(bench.background.jobs) == 1
    for _ in range(2):
        bench.write(1)  # one more into the segment that is being synced, one into the next
    bench.background.run_one()
    bench.group_commit.request_flush(second)
    bench.background.run_all()
    assert len(second.segments()) == 4
    assert second.durable_end_offset == 7
    for seed in range(20):
        image = bench.disk.crash(random.Random(seed))
        assert Log.open(image, ManualClock(), "/data/1", LogSettings()).end_offset == 7


def test_a_call_after_a_job_flushes_delayed_requests_now_and_comes_once_all_are_flushed() -> None:
    """A caller that waits for files must not wait for the flush interval, nor be called while a job holds them."""
    bench = GroupCommitBench(3)
    for number in range(3):
        bench.group_commit.request_flush(bench.write(number), urgent=False)
    assert not bench.background.jobs
    ends: list[list[int]] = []
    assert bench.group_commit.call_after_job(
        lambda: ends.append([log.durable_end_offset for log in bench.logs])
    )
    assert len(bench.background.jobs) == 1
    bench.background.run_all()
    assert not ends
    bench.scheduler.fire(0)
    assert ends == [[1, 1, 1]]
    bench.run_jobs()
    assert len(ends) == 1


def test_there_is_no_call_after_a_job_if_nothing_is_to_be_flushed() -> None:
    bench = GroupCommitBench()
    assert not bench.group_commit.call_after_job(lambda: None)
    with bench.group_commit.one_job():
        assert not bench.group_commit.call_after_job(lambda: None)
        bench.group_commit.request_flush(bench.write())
        assert bench.group_commit.call_after_job(lambda: None)


def test_requests_of_one_call_after_a_job_share_one_sync() -> None:
    bench = GroupCommitBench(4)

    def write_others() -> None:
        for number in (1, 2, 3):
            bench.group_commit.request_flush(bench.write(number))
        raise ValueError("a defect of the caller")

    bench.group_commit.request_flush(bench.write())
    assert bench.group_commit.call_after_job(write_others)
    bench.background.run_all()
    syncs = bench.group_commit.sync_count
    with pytest.raises(ValueError, match="a defect"):
        bench.scheduler.fire(0)
    bench.background.run_all()
    assert bench.group_commit.sync_count == syncs + 1
    assert [log.durable_end_offset for log in bench.logs] == [1, 1, 1, 1]
