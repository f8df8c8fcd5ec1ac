"""Recovery of a log whose small files and newest bytes a crash damaged at the same time."""

from __future__ import annotations

import contextlib
import errno
import random

import pytest

from mansio.errors import StorageError
from mansio.storage.file_cache import FileCache
from mansio.storage.log import Log, LogSettings
from mansio.storage.parallel_recovery import OpenRequest, open_logs
from mansio.testing.disk import SimulatedDisk
from mansio.wire.batch.record_batch import build_batch
from support.logs import ManualClock, append, check_contents, make_batch

DIRECTORY = "/p"
SEGMENT = "/p/00000000000000000000.log"


@pytest.mark.parametrize("torn", [b"\xff" * 30, b"\xff" * 200, make_batch([7], 200)[:100]])
def test_torn_tail_is_truncated_when_leader_epochs_are_read_from_the_batches(torn: bytes) -> None:
    """With a shared sync a crash may damage the epochs file together with the records."""
    disk = SimulatedDisk()
    log = Log.open(disk, ManualClock(), DIRECTORY, LogSettings())
    kept = [append(log, make_batch([5], 20, epoch), epoch)[1] for epoch in (0, 3)]
    log.sync()
    size = log.size_bytes  # behind it the file has room
    disk.open(SEGMENT).write_at([torn], size)
    disk.truncate_file(f"{DIRECTORY}/epochs", 9)
    log = Log.open(disk, ManualClock(), DIRECTORY, LogSettings())
    check_contents(log, kept)
    assert log.recovery.truncated_bytes >= len(torn)
    assert len(disk.files()[SEGMENT]) == size
    assert log.leader_epochs.entries() == [(0, 0), (3, 1)]


def test_preallocated_space_is_no_torn_tail(caplog: pytest.LogCaptureFixture) -> None:
    """A log that was not closed has a longer file; that is not reported, and the log ends where its batches do."""
    disk = SimulatedDisk()
    settings = LogSettings(segment_bytes=400)
    log = Log.open(disk, ManualClock(), DIRECTORY, settings)
    kept = [append(log, make_batch([n], 60))[1] for n in range(8)]
    log.sync()
    assert any(not data.strip(b"\0") or data.endswith(b"\0" * 20) for data in disk.files().values())
    again = Log.open(disk, ManualClock(), DIRECTORY, settings)
    check_contents(again, kept)
    assert again.recovery.truncated_bytes == 0
    assert not caplog.records
    assert sum(len(data) for path, data in disk.files().items() if path.endswith(".log")) == again.size_bytes


def test_batches_of_transactions_that_a_coordinator_wrote_survive_a_crash() -> None:
    """They have a producer id without a sequence number, which is refused of clients."""
    disk = SimulatedDisk()
    log = Log.open(disk, ManualClock(), DIRECTORY, LogSettings())
    batch = build_batch([(5, b"key", b"offset", ())], producer_id=7, producer_epoch=2, transactional=True)
    kept = [append(log, one)[1] for one in (make_batch([1]), batch, make_batch([9]))]
    again = Log.open(disk, ManualClock(), DIRECTORY, LogSettings())
    check_contents(again, kept)
    assert again.recovery.truncated_bytes == 0


def test_closed_log_has_no_preallocated_space() -> None:
    disk = SimulatedDisk()
    log = Log.open(disk, ManualClock(), DIRECTORY, LogSettings())
    kept = [append(log, make_batch([n], 60))[1] for n in range(3)]
    log.close()
    assert len(disk.files()[SEGMENT]) == sum(map(len, kept))


def test_appends_within_preallocated_space_keep_the_file_length() -> None:
    """A sync that has to record a new length takes a third longer."""
    disk = SimulatedDisk()
    log = Log.open(disk, ManualClock(), DIRECTORY, LogSettings())
    append(log, make_batch([0], 60))
    length = len(disk.files()[SEGMENT])
    for n in range(1, 100):
        append(log, make_batch([n], 60))
        assert len(disk.files()[SEGMENT]) == length


@pytest.mark.parametrize("failing", [f"{0:020d}.log", f"{5:020d}.log"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_failed_roll_loses_no_batch_acknowledged_later(failing: str, code: int) -> None:
    """The file of a segment that was never used must not become the active one."""
    disk = SimulatedDisk()
    settings = LogSettings(segment_bytes=1000)
    log = Log.open(disk, ManualClock(), DIRECTORY, settings)
    kept = [append(log, make_batch([n], 60))[1] for n in range(5)]
    log.sync()
    disk.fail_when = lambda operation, path: (
        code if operation == "truncate" and path.endswith(failing) else None
    )
    with pytest.raises(StorageError):
        append(log, make_batch([5], 600))
    disk.clear_failures()
    disk.fail_when = None
    with contextlib.suppress(StorageError):
        kept.extend(append(log, make_batch([n], 60))[1] for n in range(2))
        log.sync()
    again = Log.open(disk, ManualClock(), DIRECTORY, settings)
    check_contents(again, kept)
    again.verify()


def test_lengths_of_closed_segments_survive_a_failed_shared_sync() -> None:
    """After it each log is synced by itself, and the lengths of the first attempt are set again."""
    for seed in range(30):
        disk = SimulatedDisk(can_sync_all=True)
        settings = LogSettings(segment_bytes=400)
        stored = []
        for name in "abcde":
            log = Log.open(disk, ManualClock(), f"/d/{name}", settings)
            stored.append([append(log, make_batch([n], 60))[1] for n in range(7)])
        failed = iter([errno.EIO])
        disk.fail_when = lambda operation, path, failed=failed: (
            next(failed, None) if operation == "sync_all" else None
        )
        requests = [OpenRequest(f"/d/{name}", settings) for name in "abcde"]
        opened = open_logs(disk, ManualClock(), "/d", requests, files=FileCache(disk))
        assert next(failed, None) is None, "no sync of many logs was asked for"
        disk.fail_when = None
        assert all(isinstance(log, Log) for log in opened)
        after = disk.crash(random.Random(seed))
        for name, batches in zip("abcde", stored, strict=True):
            again = Log.open(after, ManualClock(), f"/d/{name}", settings)
            check_contents(again, batches)
            again.verify()


def test_foreign_file_with_the_suffix_of_an_index_is_ignored() -> None:
    disk = SimulatedDisk()
    log = Log.open(disk, ManualClock(), "/data/p")
    log.close()
    disk.put_file("/data/p/backup.index", b"mine")
    Log.open(disk, ManualClock(), "/data/p")
    assert disk.files()["/data/p/backup.index"] == b"mine"
