"""Files of active segments: more logs than open files, and no descriptor at the moment of an append."""

from __future__ import annotations

import errno
import os
import random
from typing import TYPE_CHECKING, Any

import pytest

from mansio.broker.partition.append_validation import new_append_error
from mansio.errors import DescriptorsExhausted, StorageError
from mansio.host.disk import HostDisk
from mansio.storage.file_cache import FileCache
from mansio.storage.log import Log, LogSettings
from mansio.storage.parallel_recovery import OpenRequest, open_logs
from support.logs import ManualClock, append, check_contents, make_batch

if TYPE_CHECKING:
    from pathlib import Path

    from mansio.ports import DiskFile

LOGS = 30
ACTIVE_FILES_MAX = 8
SETTINGS = LogSettings(segment_bytes=2000, index_interval_bytes=200)


class DiskWithoutDescriptors(HostDisk):
    """A disk on which no file can be opened while `exhausted` is set."""

    exhausted = False
    sync_errno = 0
    """Error of the sync of a directory, after it was opened; 0: none."""

    def open(self, path: str, *, create: bool = False) -> Any:
        self._refuse()
        return super().open(path, create=create)

    def open_readonly(self, path: str) -> Any:
        self._refuse()
        return super().open_readonly(path)

    def sync_directory(self, path: str) -> None:
        self._refuse()
        if self.sync_errno:
            raise OSError(self.sync_errno, os.strerror(self.sync_errno))
        super().sync_directory(path)

    def _refuse(self) -> None:
        if self.exhausted:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def opened_logs(disk: HostDisk, directory: Path, files: FileCache) -> list[Log]:
    requests = [OpenRequest(str(directory / str(number)), SETTINGS) for number in range(LOGS)]
    for request in requests:
        disk.make_directory(request.directory)
    logs = []
    for log in open_logs(disk, ManualClock(), str(directory), requests, files):
        assert isinstance(log, Log)
        log.record_active_file()
        logs.append(log)
    return logs


def open_active_files(logs: list[Log]) -> int:
    return sum(log._active.file is not None for log in logs)


@pytest.mark.full
def test_logs_beyond_the_number_of_open_files_are_written_and_read_as_before(tmp_path: Path) -> None:
    disk = HostDisk()
    files = FileCache(disk, files_max=4, active_files_max=ACTIVE_FILES_MAX)
    stored: list[list[bytes]] = [[] for _ in range(LOGS)]
    chosen = random.Random(3)
    for _ in range(2):
        logs = opened_logs(disk, tmp_path, files)
        assert open_active_files(logs) <= ACTIVE_FILES_MAX
        for _ in range(400):
            number = chosen.randrange(LOGS)
            log = logs[number]
            stored[number].append(append(log, make_batch([len(stored[number])], chosen.randrange(400)))[1])
            if chosen.random() < 0.8:
                log.sync()
            if chosen.random() < 0.05:
                log.roll()
        for number, log in enumerate(logs):
            check_contents(log, stored[number])
            log.sync()
        for log in logs:
            append(log, make_batch([1]))
            stored[logs.index(log)].append(log.read(log.end_offset - 1, 1, log.end_offset).read())  # type: ignore[union-attr]
            log.sync()
        assert open_active_files(logs) <= ACTIVE_FILES_MAX
        for log in logs:
            log.close()
        assert not files._active


def test_a_file_with_unflushed_batches_stays_open(tmp_path: Path) -> None:
    """Closed, it could lose the error of its writeback: a later fsync would report success."""
    log = Log.open(HostDisk(), ManualClock(), str(tmp_path / "p"), SETTINGS)
    append(log, make_batch([1]))
    file: DiskFile | None = log._active.file
    assert not log.close_active_file()
    assert log._active.file is file
    job = log.prepare_flush()
    assert job is not None
    assert not log.close_active_file()
    job.run(HostDisk())
    log.finish_flush(job, None)
    assert log.close_active_file()
    append(log, make_batch([2]))
    log.close()


def test_an_append_without_a_descriptor_is_refused_and_the_next_one_succeeds(tmp_path: Path) -> None:
    disk = DiskWithoutDescriptors()
    log = Log.open(disk, ManualClock(), str(tmp_path / "p"), SETTINGS)
    stored = [append(log, make_batch([1]))[1]]
    log.sync()
    assert log.close_active_file()
    disk.exhausted = True
    with pytest.raises(StorageError) as refused:
        append(log, make_batch([2]))
    answer = new_append_error("p-0", refused.value)
    assert isinstance(answer, DescriptorsExhausted)
    assert answer.retriable
    assert log.failure is None
    disk.exhausted = False
    stored.append(append(log, make_batch([3]))[1])
    check_contents(log, stored)
    log.close()


def test_a_flush_without_a_descriptor_for_the_directory_is_repeated(tmp_path: Path) -> None:
    disk = DiskWithoutDescriptors()
    log = Log.open(disk, ManualClock(), str(tmp_path / "p"), SETTINGS)
    append(log, make_batch([1]), leader_epoch=1)
    disk.exhausted = True
    with pytest.raises(StorageError, match="Too many open files"):
        log.sync()
    assert log.failure is None
    assert log.durable_end_offset == 0
    disk.exhausted = False
    log.sync()
    assert log.durable_end_offset == 1
    log.close()
    reopened = Log.open(HostDisk(), ManualClock(), str(tmp_path / "p"), SETTINGS)
    assert reopened.end_offset == 1
    reopened.close()


def test_a_roll_without_a_descriptor_is_repeated(tmp_path: Path) -> None:
    disk = DiskWithoutDescriptors()
    log = Log.open(disk, ManualClock(), str(tmp_path / "p"), SETTINGS)
    stored = [append(log, make_batch([1], 1500))[1]]
    disk.exhausted = True
    with pytest.raises(StorageError, match="Too many open files"):
        append(log, make_batch([2], 1500))
    disk.exhausted = False
    stored.append(append(log, make_batch([3], 1500))[1])
    assert log.failure is None
    check_contents(log, stored)
    log.close()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_failed_sync_of_the_directory_is_the_end_of_the_log(tmp_path: Path, number: int) -> None:
    """Also for want of space: the kernel reports the error once, and a repeated sync would succeed."""
    disk = DiskWithoutDescriptors()
    log = Log.open(disk, ManualClock(), str(tmp_path / "p"), SETTINGS)
    append(log, make_batch([1]))
    job = log.prepare_flush()
    assert job is not None
    job = job._replace(directory_dirty=True, epochs=None)
    disk.sync_errno = number
    with pytest.raises(OSError, match=os.strerror(number)) as failed:
        job.run(disk)
    log.finish_flush(job, failed.value)
    assert log.failure is not None
