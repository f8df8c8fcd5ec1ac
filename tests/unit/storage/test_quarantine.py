"""Complete batches after a damaged position are quarantined when the end of a log is truncated."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

import pytest

from mansio.errors import StorageError
from mansio.logs import FIELDS
from mansio.storage.file_cache import FileCache
from mansio.storage.inspection import Severity, inspect_log
from mansio.storage.log import Log, LogSettings
from mansio.storage.parallel_recovery import OpenRequest, open_logs
from mansio.storage.recovery.quarantine import (
    QUARANTINE_FILES_MAX,
    FileRange,
    find_batches,
    parse_quarantine_name,
    quarantine_name,
)
from mansio.testing.disk import SimulatedDisk
from support.logs import ManualClock, append, check_contents, make_batch
from support.machine import scaled

if TYPE_CHECKING:
    from collections.abc import Sequence

DIRECTORY = "/data/p"
ONE_SEGMENT = LogSettings()
SMALL_SEGMENTS = LogSettings(segment_bytes=300)


def segment_path(base_offset: int, directory: str = DIRECTORY) -> str:
    return f"{directory}/{base_offset:020d}.log"


def killed(settings: LogSettings, batches: int = 6, *, synced: int = 2, directory: str = DIRECTORY) -> tuple:
    """The disk of a killed log whose checkpoint covers the first `synced` batches; and all batches."""
    disk = SimulatedDisk()
    return disk, write(disk, settings, batches, synced, directory)


def write(
    disk: SimulatedDisk, settings: LogSettings, batches: int, synced: int, directory: str
) -> list[bytes]:
    log = Log.open(disk, ManualClock(), directory, settings)
    stored = []
    for number in range(batches):
        stored.append(append(log, make_batch([number], 60, number))[1])
        if number + 1 == synced:
            log.sync()
    return stored


def damage(disk: SimulatedDisk, stored: Sequence[bytes], number: int, directory: str = DIRECTORY) -> None:
    """Flip a bit in the value of a batch."""
    for path, data in disk.files().items():
        at = data.find(stored[number])
        if path.startswith(directory) and path.endswith(".log") and at >= 0:
            disk.flip_bit(path, 8 * (at + 70))
            return
    raise AssertionError("no such batch")


def kept_files(disk: SimulatedDisk) -> dict[str, bytes]:
    return {
        path: data
        for path, data in disk.files().items()
        if parse_quarantine_name(path.rpartition("/")[2]) is not None
    }


@pytest.mark.parametrize("settings", [ONE_SEGMENT, SMALL_SEGMENTS], ids=["one segment", "many segments"])
def test_batches_after_damage_are_quarantined_and_the_truncation_is_logged(
    settings: LogSettings, caplog: pytest.LogCaptureFixture
) -> None:
    disk, stored = killed(settings)
    damage(disk, stored, 3)
    log = Log.open(disk, ManualClock(), DIRECTORY, settings)
    assert log.end_offset == 3
    check_contents(log, stored)
    cut = log.recovery.truncated_tail
    assert cut is not None
    assert (cut.offset, cut.batch_count, cut.first_offset, cut.last_offset) == (3, 2, 4, 5)
    assert cut.size_bytes == log.recovery.truncated_bytes >= sum(map(len, stored[3:]))
    ((path, data),) = kept_files(disk).items()
    assert cut.path == path == f"{DIRECTORY}/{quarantine_name(3, 1)}"
    assert all(batch in data for batch in stored[4:])
    (line,) = [record for record in caplog.records if record.message == "log_truncated"]
    assert line.levelno == logging.ERROR
    reported = getattr(line, FIELDS)
    assert (reported["batches"], reported["first_offset"], reported["last_offset"]) == (2, 4, 5)
    assert (reported["quarantine"], reported["directory"]) == (path, DIRECTORY)
    after = append(log, make_batch([50], 60, 50), leader_epoch=1)[1]
    log.close()
    log = Log.open(disk, ManualClock(), DIRECTORY, settings)
    assert log.recovery.truncated_tail is None
    check_contents(log, [*stored[:3], after])
    assert kept_files(disk) == {path: data}


def test_leader_epoch_is_due_until_it_is_started() -> None:
    disk, stored = killed(ONE_SEGMENT)
    damage(disk, stored, 5)
    for _ in range(3):
        log = Log.open(disk, ManualClock(), DIRECTORY, ONE_SEGMENT)
        assert log.needs_new_epoch
    append(log, make_batch([50], 60, 50), leader_epoch=1)
    log.sync()
    log = Log.open(disk, ManualClock(), DIRECTORY, ONE_SEGMENT)
    assert log.needs_new_epoch
    log.record_new_epoch()
    log.sync()
    assert not Log.open(disk, ManualClock(), DIRECTORY, ONE_SEGMENT).needs_new_epoch


def test_torn_tail_without_a_complete_batch_is_not_quarantined(caplog: pytest.LogCaptureFixture) -> None:
    disk, stored = killed(ONE_SEGMENT)
    damage(disk, stored, 5)
    log = Log.open(disk, ManualClock(), DIRECTORY, ONE_SEGMENT)
    cut = log.recovery.truncated_tail
    assert cut is not None
    assert (cut.offset, cut.batch_count, cut.path) == (5, 0, "")
    assert not kept_files(disk)
    assert [(record.message, record.levelname) for record in caplog.records] == [("log_truncated", "WARNING")]


def test_unreachable_segments_are_quarantined() -> None:
    disk, stored = killed(SMALL_SEGMENTS, synced=0)
    disk.remove(segment_path(0))
    bases = [int(path[-24:-4]) for path in disk.files() if path.endswith(".log")]
    log = Log.open(disk, ManualClock(), DIRECTORY, SMALL_SEGMENTS)
    assert log.end_offset == 0
    cut = log.recovery.truncated_tail
    assert cut is not None
    assert (cut.first_offset, cut.last_offset, cut.segment_count) == (min(bases), 5, len(bases))
    (data,) = kept_files(disk).values()
    assert all(batch in data for batch in stored[min(bases) :])


def test_later_truncation_at_the_same_offset_gets_another_file() -> None:
    disk, stored = killed(ONE_SEGMENT)
    damage(disk, stored, 3)
    for number in range(1, 4):
        log = Log.open(disk, ManualClock(), DIRECTORY, ONE_SEGMENT)
        assert log.end_offset == 3
        assert sorted(kept_files(disk)) == [
            f"{DIRECTORY}/{quarantine_name(3, n)}" for n in range(1, number + 1)
        ]
        again = [append(log, make_batch([n], 60, 100 * number + n))[1] for n in range(3)]
        damage(disk, again, 0)


@pytest.mark.parametrize(
    ("settings", "failing"), [(ONE_SEGMENT, ["truncate"]), (SMALL_SEGMENTS, ["remove", "truncate"])]
)
def test_interrupted_recoveries_create_one_quarantine_file(settings: LogSettings, failing: list[str]) -> None:
    disk, stored = killed(settings)
    damage(disk, stored, 3)
    for operation in failing:
        disk.fail_when = lambda wanted, path, operation=operation: (
            5 if wanted == operation and path.endswith(".log") else None
        )
        for _ in range(3):
            with pytest.raises(StorageError):
                Log.open(disk, ManualClock(), DIRECTORY, settings)
    disk.clear_failures()
    log = Log.open(disk, ManualClock(), DIRECTORY, settings)
    assert log.end_offset == 3
    ((path, data),) = kept_files(disk).items()
    assert path == f"{DIRECTORY}/{quarantine_name(3, 1)}"
    assert all(batch in data for batch in stored[4:])


def test_full_disk_refuses_the_partition_and_destroys_nothing() -> None:
    disk, stored = killed(SMALL_SEGMENTS, 40)
    damage(disk, stored, 3)
    room = disk.capacity_bytes
    before = {path: data for path, data in disk.files().items() if path.endswith(".log")}
    disk.capacity_bytes = room - disk.free_bytes("/") + 600
    for _ in range(2):
        with pytest.raises(StorageError, match=r"nothing was truncated.*No space left"):
            Log.open(disk, ManualClock(), DIRECTORY, SMALL_SEGMENTS)
        assert {path: data for path, data in disk.files().items() if path.endswith(".log")} == before
        assert not any(path.endswith(".tmp") for path in disk.files()), "it takes the room that others need"
    disk.capacity_bytes = room
    log = Log.open(disk, ManualClock(), DIRECTORY, SMALL_SEGMENTS)
    assert log.end_offset == 3
    assert log.recovery.truncated_tail is not None
    assert log.recovery.truncated_tail.batch_count == 36


def test_number_of_quarantine_files_is_bounded() -> None:
    disk, stored = killed(ONE_SEGMENT)
    damage(disk, stored, 3)
    for number in range(1, QUARANTINE_FILES_MAX + 1):
        disk.put_file(f"{DIRECTORY}/{quarantine_name(1, number)}", b"x")
    before = disk.files()
    with pytest.raises(StorageError, match="nothing was truncated"):
        Log.open(disk, ManualClock(), DIRECTORY, ONE_SEGMENT)
    assert disk.files() == before
    disk.remove(f"{DIRECTORY}/{quarantine_name(1, 7)}")
    log = Log.open(disk, ManualClock(), DIRECTORY, ONE_SEGMENT)
    assert log.recovery.truncated_tail is not None
    assert log.recovery.truncated_tail.path == f"{DIRECTORY}/{quarantine_name(3, QUARANTINE_FILES_MAX + 1)}"


def test_log_that_cannot_be_truncated_does_not_affect_others() -> None:
    disk = SimulatedDisk()
    names = [f"/data/{name}" for name in "abcdef"]
    stored = [write(disk, ONE_SEGMENT, 6, 2, name) for name in names]
    for number, name in enumerate(names[:4]):
        damage(disk, stored[number], 3, name)
    disk.fail_when = lambda operation, path: (
        28 if operation == "write" and ".cut-" in path and path.startswith("/data/a") else None
    )
    requests = [OpenRequest(name, ONE_SEGMENT) for name in names]
    opened = open_logs(disk, ManualClock(), "/data", requests, FileCache(disk))
    assert isinstance(opened[0], StorageError)
    for number, log in enumerate(opened[1:], 1):
        assert isinstance(log, Log)
        assert log.end_offset == (3 if number < 4 else 6)
        check_contents(log, stored[number])
    assert sorted(path[:7] for path in kept_files(disk)) == ["/data/b", "/data/c", "/data/d"]


def test_content_crafted_like_batches_cannot_prevent_recovery() -> None:
    """The search is bounded; bytes that were not searched are quarantined."""
    disk = SimulatedDisk()
    size = 8 << 20
    header = bytearray(make_batch([1], 0))[:61]
    header[8:12] = (size // 2).to_bytes(4, "big")
    disk.make_directory(DIRECTORY)
    disk.put_file(segment_path(0), b"\1" + bytes(header) * (size // 61))
    file = disk.open(segment_path(0))
    began = time.process_time()
    whole = find_batches([FileRange(file, 0, file.size())])
    assert (whole.batch_count, whole.is_complete) == (0, False)
    assert time.process_time() - began < scaled(5)


def test_data_check_reports_before_the_first_start_and_names_the_file_after_it() -> None:
    disk, stored = killed(ONE_SEGMENT)
    damage(disk, stored, 3)
    before = disk.files()
    report = inspect_log(disk, DIRECTORY)
    (finding,) = [one for one in report.findings if one.severity is Severity.DAMAGE]
    assert "2 complete batches, records 4 to 5" in finding.what
    assert "quarantine file" in finding.meaning
    assert disk.files() == before
    log = Log.open(disk, ManualClock(), DIRECTORY, ONE_SEGMENT)
    log.close()
    report = inspect_log(disk, DIRECTORY)
    (finding,) = [one for one in report.findings if parse_quarantine_name(one.path.rpartition("/")[2])]
    assert finding.severity is Severity.NOTE
    assert "2 complete batches, records 4 to 5" in finding.what
    assert not report.other_file_names


@pytest.mark.parametrize(
    "name", ["x.cut-1", f"{3:020d}.cut-", f"{3:020d}.cut-1.tmp", f"{3:020d}.log", f"{3:020d}.cut-x", "cut-1"]
)
def test_other_names_are_no_quarantine_files(name: str) -> None:
    assert parse_quarantine_name(name) is None
    assert parse_quarantine_name(quarantine_name(3, 17)) == (3, 17)
