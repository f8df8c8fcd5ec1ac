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
from mansio.storage.active_files import ActiveFilesInUse
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
            batch = make_batch([len(stored[number])], chosen.randrange(400))
            try:
                stored[number].append(append(log, batch)[1])
            except ActiveFilesInUse:
                for each in logs:
                    each.sync()
                stored[number].append(append(log, batch)[1])
            assert open_active_files(logs) <= ACTIVE_FILES_MAX
            if chosen.random() < 0.8:
                log.sync()
            if chosen.random() < 0.05:
                for each in logs:
                    each.sync()
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
        assert not files.active._open


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
    del file, job
    assert log.close_active_file()
    append(log, make_batch([2]))
    log.close()


def test_files_with_unflushed_batches_leave_the_descriptors_that_their_flush_needs(tmp_path: Path) -> None:
    """A file of each of many logs is dirty: appends that need another one are refused, the flush of these is not."""
    disk = HostDisk()
    files = FileCache(disk, files_max=4, active_files_max=ACTIVE_FILES_MAX)
    logs = opened_logs(disk, tmp_path, files)
    stored = [append(log, make_batch([1]))[1] for log in logs[:ACTIVE_FILES_MAX]]
    for log in logs[ACTIVE_FILES_MAX:]:
        with pytest.raises(ActiveFilesInUse) as refused:
            append(log, make_batch([1]))
        answer = new_append_error("p-0", refused.value)
        assert isinstance(answer, DescriptorsExhausted)
        assert log.failure is None
        assert not log.end_offset
    assert open_active_files(logs) == ACTIVE_FILES_MAX
    logs[0].sync()
    stored.append(append(logs[-1], make_batch([1]))[1])
    assert open_active_files(logs) == ACTIVE_FILES_MAX
    assert logs[0]._active.file is None
    for log, batch in zip([*logs[:ACTIVE_FILES_MAX], logs[-1]], stored, strict=True):
        check_contents(log, [batch])
    for log in logs:
        log.close()


def test_rolled_segments_that_are_not_flushed_count_as_open_files(tmp_path: Path) -> None:
    """Small segments of one partition: their files must not take the descriptors that their flush needs."""
    disk = HostDisk()
    files = FileCache(disk, active_files_max=ACTIVE_FILES_MAX)
    log = Log.open(disk, ManualClock(), str(tmp_path / "p"), SETTINGS, files=files)
    log.record_active_file()
    stored = [append(log, make_batch([1], 1500))[1] for _ in range(ACTIVE_FILES_MAX)]
    with pytest.raises(ActiveFilesInUse):
        append(log, make_batch([1], 1500))
    assert log.failure is None
    log.sync()
    stored.append(append(log, make_batch([1], 1500))[1])
    check_contents(log, stored)
    log.close()
    assert not files.active._unflushed_closed_count


@pytest.mark.parametrize("how", ["reset", "truncate"])
def test_logs_that_are_reset_or_truncated_open_no_more_files_than_may_be_open(
    tmp_path: Path, how: str
) -> None:
    disk = HostDisk()
    files = FileCache(disk, files_max=4, active_files_max=ACTIVE_FILES_MAX)
    logs = opened_logs(disk, tmp_path, files)
    for log in logs:
        stored = [append(log, make_batch([number]))[1] for number in range(2)]
        log.sync()
    for log in logs[:ACTIVE_FILES_MAX]:
        append(log, make_batch([2]))  # its file cannot be closed
    others = logs[ACTIVE_FILES_MAX:]
    for log in others:
        if how == "reset":
            log.reset_to(100)
            stored = []
        else:
            log.truncate_to(1)
        assert open_active_files(logs) <= ACTIVE_FILES_MAX
        assert files.active.open_files <= ACTIVE_FILES_MAX
    for log in logs:
        log.sync()
    for log in others:
        check_contents(log, stored[:1])
        append(log, make_batch([1]))
        log.sync()
    for log in logs:
        log.close()


def test_few_files_are_closed_to_which_responses_refer(tmp_path: Path) -> None:
    """Their descriptors stay open until the responses are sent, and others would be opened for their logs."""
    disk = HostDisk()
    files = FileCache(disk, files_max=8)
    logs = opened_logs(disk, tmp_path, files)[:5]
    for log in logs:
        append(log, make_batch([1]))
        log.sync()
    responses = [log.read(0, 1000, 1) for log in logs]
    assert [log.close_active_file() for log in logs] == [True, True, False, False, False]
    assert all(found is not None and found.read() for found in responses)
    responses.clear()
    assert all(log.close_active_file() for log in logs)
    assert not files.sent_files
    for log in logs:
        log.close()


def test_the_file_of_a_failed_log_is_closed_for_others_and_the_log_stays_failed(tmp_path: Path) -> None:
    disk = HostDisk()
    log = Log.open(disk, ManualClock(), str(tmp_path / "p"), SETTINGS)
    stored = [append(log, make_batch([1]))[1]]
    job = log.prepare_flush()
    assert job is not None
    log.finish_flush(job, OSError(errno.EIO, os.strerror(errno.EIO)))
    assert log.close_active_file()
    assert log._active.file is None
    check_contents(log, stored)
    with pytest.raises(StorageError, match="Input/output error"):
        append(log, make_batch([2]))
    with pytest.raises(StorageError, match="Input/output error"):
        log.sync()
    log.close()


def test_a_file_that_was_shortened_while_it_was_closed_is_the_end_of_the_log(tmp_path: Path) -> None:
    """A batch that is appended behind the missing bytes would be lost, too."""
    log = Log.open(HostDisk(), ManualClock(), str(tmp_path / "p"), SETTINGS)
    append(log, make_batch([1]))
    log.sync()
    assert log.close_active_file()
    path = log._active.path
    os.truncate(path, os.stat(path).st_size - 1)
    with pytest.raises(StorageError, match="bytes instead of"):
        append(log, make_batch([2]))
    assert log.failure is not None
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
