"""Logs that share few descriptors, against a model: random appends, flushes, rolls, reads, failed syncs and crashes.

The disk has a handful of descriptors and reports what a real one would hide: a file whose last descriptor is closed
while writes to it are not flushed, so that the error of their writeback would be lost.
"""

from __future__ import annotations

import errno
import os
import random
from functools import partial
from typing import TYPE_CHECKING

import pytest

from mansio.errors import ConcurrentChange, StorageError
from mansio.storage.active_files import INTERNAL_FILES_DIVISOR, ActiveFilesInUse
from mansio.storage.file_cache import FileCache
from mansio.storage.log import Log, LogListener, LogSettings
from mansio.storage.parallel_recovery import OpenRequest, open_logs
from mansio.testing.disk import SimulatedDisk, SimulatedFile
from support.logs import LogBench, ManualClock, append, as_stored, check_contents, last_offset, make_batch
from support.tiers import repetitions

if TYPE_CHECKING:
    from collections.abc import Callable

    from mansio.storage.segment_list import LogSlice
    from mansio.testing.disk import Inode

ROOT = "/data"
LOGS = 16
INTERNAL_LOGS = 3
ACTIVE_FILES_MAX = 8
CACHED_FILES_MAX = 2
HELD_SLICES_MAX = 2
JOBS_WAITED_MAX = 40
"""A batch must not wait for more jobs than this: a few for each partition that waits before it."""

RESERVE = 1
"""Descriptors for one epochs file, checkpoint or directory at a time, or a file that replaces a cached one."""

DESCRIPTORS = (
    ACTIVE_FILES_MAX
    + ACTIVE_FILES_MAX // INTERNAL_FILES_DIVISOR
    + CACHED_FILES_MAX
    + HELD_SLICES_MAX
    + RESERVE
)
SETTINGS = LogSettings(segment_bytes=900, index_interval_bytes=200, index_snapshot_bytes=500)
STEPS = 120


class LimitedFile(SimulatedFile):
    """An open file that counts as one descriptor until the last reference to it is dropped."""

    __slots__ = ()
    _disk: LimitedDisk

    @property
    def inode(self) -> Inode:
        return self._inode

    def __del__(self) -> None:
        self._disk.release(self)


class LimitedDisk(SimulatedDisk):
    """A disk for a process with `DESCRIPTORS` descriptors."""

    def __init__(self, *, can_sync_all: bool) -> None:
        super().__init__(can_sync_all=can_sync_all)
        self.open_files: dict[int, int] = {}
        """Number of open files by inode."""
        self.highest = 0
        self.refused: list[str] = []
        """Paths for which there was no descriptor."""
        self.on_unflushed: Callable[[str], object] = lambda _: None
        """Called with the path of a segment that is closed although writes to it are not flushed."""

    def open(self, path: str, *, create: bool = False) -> LimitedFile:
        self._check_limit(path)
        return self._hold(super().open(path, create=create), writable=True)

    def open_readonly(self, path: str) -> LimitedFile:
        self._check_limit(path)
        return self._hold(super().open_readonly(path), writable=False)

    def read_file(self, path: str) -> bytes:
        self._check_limit(path)
        return super().read_file(path)

    def sync_directory(self, path: str) -> None:
        self._check_limit(path)
        super().sync_directory(path)

    def release(self, file: LimitedFile) -> None:
        key = id(file.inode)
        self.open_files[key] -= 1
        if not self.open_files[key]:
            del self.open_files[key]
            lost = [*file.inode.pending, *file.inode.unsyncable]
            if file.path.endswith(".log") and any(change.data is not None for change in lost):
                self.on_unflushed(file.path)

    def _check_limit(self, path: str) -> None:
        if sum(self.open_files.values()) >= DESCRIPTORS:
            self.refused.append(path)
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), path)

    def _hold(self, file: SimulatedFile, *, writable: bool) -> LimitedFile:
        held = LimitedFile(self, file.path, file._inode, writable=writable)
        key = id(held.inode)
        self.open_files[key] = self.open_files.get(key, 0) + 1
        self.highest = max(self.highest, sum(self.open_files.values()))
        return held


class World:
    """`written[n]` and `promised[n]`: what was appended to log n, and the end offset that it reported as durable."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.disk = LimitedDisk(can_sync_all=seed % 3 != 0)
        self.clock = ManualClock()
        self.disk.make_directory(ROOT)
        bench = LogBench(
            self.disk, root=ROOT, clock=self.clock, sync_all_files_min=self.random.choice([3, 100])
        )
        self.background, self.timers, self.group_commit = (
            bench.background,
            bench.scheduler,
            bench.group_commit,
        )
        self.files = FileCache(
            self.disk, files_max=CACHED_FILES_MAX, active_files_max=ACTIVE_FILES_MAX, indexes_max=4
        )
        self.written: list[list[bytes]] = [[] for _ in range(LOGS)]
        self.promised = [0] * LOGS
        self.failed: set[int] = set()
        self.waiting: dict[int, list[bytes]] = {}
        """Batches that wait for the flush of others, by log, in their order."""
        self.waiting_since: dict[int, int] = {}
        """Number of syncs when the first of them began to wait, by log."""
        self.waited = 0
        self.held: list[LogSlice] = []
        self.tag = 0
        self.wrong: list[str] = []
        self.logs = self.opened(self.disk, self.files)
        for number, log in enumerate(self.logs):
            log.record_active_file(is_internal=number < INTERNAL_LOGS)
            log.listen(
                LogListener(
                    on_durable=partial(self.promised.__setitem__, number),
                    on_failure=partial(self.on_failure, number),
                )
            )
            self.group_commit.register(log)
        self.disk.on_unflushed = self.on_unflushed

    def opened(self, disk: SimulatedDisk, files: FileCache) -> list[Log]:
        requests = [OpenRequest(f"{ROOT}/{number}", SETTINGS) for number in range(LOGS)]
        logs = open_logs(disk, self.clock, ROOT, requests, files)
        assert all(isinstance(log, Log) for log in logs), logs
        return [log for log in logs if isinstance(log, Log)]

    def on_failure(self, number: int, _: StorageError) -> None:
        self.failed.add(number)

    def on_unflushed(self, path: str) -> None:
        if int(path.split("/")[2]) not in self.failed:
            self.wrong.append(f"{path} was closed with writes that are not flushed")

    def step(self) -> None:
        actions = [
            self.write,
            self.write_to_all,
            self.sync,
            self.background.run_one,
            self.timers.fire,
            self.read,
            self.roll,
            self.truncate,
            self.reset,
            self.fail_sync,
            self.crash,
            self.write_as_broker,
        ]
        self.random.choices(actions, [10, 1, 4, 8, 2, 5, 1, 0.5, 0.2, 0.4, 0.3, 1])[0]()
        assert not self.wrong, self.wrong
        assert not self.disk.refused, self.disk.refused
        for number, since in self.waiting_since.items():
            assert self.group_commit.sync_count - since <= JOBS_WAITED_MAX, f"log {number} waits for ever"

    def write(self) -> None:
        self.arrive(self.random.randrange(LOGS))

    def write_to_all(self) -> None:
        """A request with a batch for each partition."""
        for number in self.random.sample(range(LOGS), LOGS):
            self.arrive(number)

    def arrive(self, number: int) -> None:
        self.tag += 1
        batch = make_batch([1000 + self.tag], self.random.choice([20, 150, 400]), self.tag)
        if number in self.waiting:
            self.waiting[number].append(batch)
        elif not self.appended(number, batch):
            self.waiting[number] = [batch]
            self.waiting_since[number] = self.group_commit.sync_count
            self.waited += 1
            self.wait(number)

    def wait(self, number: int) -> None:
        log = self.logs[number]
        assert log.wait_for_file(number, partial(self.on_file_free, number), self.group_commit.call_after_job)

    def on_file_free(self, number: int) -> None:
        while self.waiting[number]:
            if not self.appended(number, self.waiting[number][0]):
                self.wait(number)
                return
            self.waiting[number].pop(0)
        del self.waiting[number], self.waiting_since[number]

    def write_as_broker(self) -> None:
        """A marker of a transaction: it cannot wait, and the broker tries it again later."""
        self.tag += 1
        number = self.random.randrange(LOGS)
        if number not in self.waiting:
            self.appended(number, make_batch([1000 + self.tag], 20, self.tag), uses_reserve=True)

    def appended(self, number: int, batch: bytes, *, uses_reserve: bool = False) -> bool:
        """Append a batch; False if it has to wait for a flush."""
        log, epoch = self.logs[number], self.tag // 30
        if number in self.failed:
            with pytest.raises(StorageError):
                append(log, batch, epoch)
            return True
        stored = as_stored(batch, log.end_offset, epoch)
        try:
            append(log, batch, epoch, uses_reserve=uses_reserve)
        except ActiveFilesInUse:
            assert number >= INTERNAL_LOGS or self.active_files() > ACTIVE_FILES_MAX
            return False
        self.written[number].append(stored)
        self.group_commit.request_flush(log, urgent=self.random.random() < 0.5)
        return True

    def active_files(self) -> int:
        return sum(log._active.file is not None for log in self.logs) + sum(
            log._flush_state.unflushed_closed_count for log in self.logs
        )

    def sync(self) -> None:
        self.group_commit.request_flush_of_all(self.random.sample(self.logs, 4))

    def read(self) -> None:
        number = self.random.randrange(LOGS)
        log = self.logs[number]
        if log.end_offset > log.start_offset:
            offset = self.random.randrange(log.start_offset, log.end_offset)
            found = log.read(offset, 600, log.end_offset)
            assert found is not None
            self.held = [*self.held, found][-HELD_SLICES_MAX:]
            del found
        for each in self.held:  # also after their file was closed for others, or their log has failed
            assert each.read()

    def roll(self) -> None:
        log = self.random.choice(self.logs)
        if log.failure is None:
            try:
                log.roll()
            except ActiveFilesInUse:
                return
            self.group_commit.request_flush(log, urgent=False)

    def truncate(self) -> None:
        number = self.random.randrange(LOGS)
        log = self.logs[number]
        if number in self.failed:
            return
        end = self.random.randint(log.durable_end_offset, log.end_offset)
        try:
            self.delete_records(lambda: log.truncate_to(end))
        except ConcurrentChange:
            return
        self.written[number] = [each for each in self.written[number] if last_offset(each) < log.end_offset]
        self.promised[number] = log.durable_end_offset

    def reset(self) -> None:
        number = self.random.randrange(LOGS)
        log = self.logs[number]
        if number in self.failed:
            return
        try:
            self.delete_records(lambda: log.reset_to(log.end_offset + self.random.randrange(1, 5)))
        except ConcurrentChange:
            return
        self.written[number] = []
        self.promised[number] = log.durable_end_offset

    def delete_records(self, delete: Callable[[], None]) -> None:
        """Call `delete`; only files that it removes need not be flushed."""
        self.held.clear()
        closed: list[str] = []
        self.disk.on_unflushed = closed.append
        try:
            delete()
        finally:
            self.disk.on_unflushed = self.on_unflushed
        for path in closed:
            if self.disk.exists(path):
                self.on_unflushed(path)

    def fail_sync(self) -> None:
        """The next job fails to sync the segments of some logs."""
        bad = {f"{ROOT}/{number}" for number in self.random.sample(range(LOGS), 6)}

        def refuse(operation: str, path: str) -> int | None:
            is_bad = operation == "sync" and path.endswith(".log") and path.rpartition("/")[0] in bad
            return errno.EIO if is_bad else None

        self.disk.fail_when = refuse
        self.background.run_one()
        self.disk.fail_when = None

    def crash(self) -> None:
        """Every log has what it reported as durable, and of the rest the first batches, if any."""
        image = self.disk.crash(self.random)
        logs = self.opened(image, FileCache(image))
        for number, log in enumerate(logs):
            if number not in self.failed:
                assert log.end_offset >= self.promised[number], log.directory
                check_contents(log, self.written[number], thorough=False)
            elif self.promised[number]:
                assert log.end_offset >= self.promised[number], log.directory

    def finish(self) -> None:
        """Without further errors every waiting batch is appended and flushed."""
        self.held.clear()
        while self.background.jobs or self.timers.timers:
            self.background.run_all()
            self.timers.fire()
        assert not self.waiting
        assert not self.wrong
        assert not self.disk.refused
        for number, log in enumerate(self.logs):
            if number in self.failed:
                assert log.failure is not None
            else:
                assert log.durable_end_offset == log.end_offset
                check_contents(log, self.written[number], thorough=False)
        self.disk.on_unflushed = lambda _: None
        for log in self.logs:
            log.close()
        assert not self.files.active._open
        assert not self.files.active._unflushed_closed_count


@pytest.mark.parametrize(
    "seeds",
    [range(10), pytest.param(range(10, repetitions(100, 1000)), marks=pytest.mark.full)],
    ids=["few", "many"],
)
def test_logs_with_few_descriptors_lose_nothing_and_never_wait_forever(seeds: range) -> None:
    waited = failed = 0
    for seed in seeds:
        world = World(seed)
        for _ in range(STEPS):
            world.step()
        world.finish()
        assert world.disk.highest <= DESCRIPTORS
        waited += world.waited
        failed += len(world.failed)
    assert waited > 10
    assert failed
