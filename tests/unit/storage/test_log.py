"""One log: appends, reads, rolls, trims and errors."""

from __future__ import annotations

import errno
import os
import random
from typing import TYPE_CHECKING

import pytest

from mansio.errors import ConcurrentChange, FencedLeaderEpoch, OffsetOutOfRange, StorageError
from mansio.host.clock import HostClock
from mansio.host.disk import HostDisk
from mansio.storage.file_cache import FileCache
from mansio.storage.log import Log, LogListener, LogSettings
from mansio.testing.disk import SimulatedDisk
from mansio.wire.batch.record_batch import TimestampType, check_batch, read_header, with_log_append_time
from support.logs import ManualClock, append, check_contents, make_batch

if TYPE_CHECKING:
    from pathlib import Path

SMALL = LogSettings(segment_bytes=500, index_interval_bytes=100)


def open_log(disk: SimulatedDisk | None = None, settings: LogSettings = SMALL) -> Log:
    return Log.open(disk or SimulatedDisk(), ManualClock(), "/data/p", settings)


def test_append_assigns_offsets_and_writes_them_into_the_batch() -> None:
    log = open_log()
    assert append(log, make_batch([1, 2, 3]), leader_epoch=4)[0] == 0
    base_offset, stored = append(log, make_batch([4]), leader_epoch=4)
    assert base_offset == 3
    piece = log.read(3, 1000, 4)
    assert piece is not None
    assert piece.read() == stored
    header = check_batch(piece.read())
    assert (header.base_offset, header.leader_epoch) == (3, 4)


def test_read_returns_whole_batches_below_the_limit_and_at_least_one() -> None:
    log = open_log(settings=LogSettings())
    stored = [append(log, make_batch([n, n], 100))[1] for n in range(5)]
    size = len(stored[0])
    for max_bytes, count in [(0, 1), (1, 1), (size, 1), (2 * size - 1, 1), (2 * size, 2), (1 << 20, 5)]:
        piece = log.read(0, max_bytes, log.end_offset)
        assert piece is not None
        assert piece.read() == b"".join(stored[:count]), max_bytes
        assert piece.next_offset == 2 * count
    inside = log.read(3, 1, log.end_offset)
    assert inside is not None
    assert inside.read() == stored[1]
    limited = log.read(0, 1 << 20, 7)
    assert limited is not None
    assert limited.next_offset == 6
    assert log.read(6, 1 << 20, 7) is None
    assert log.read(10, 1, 10) is None


def test_read_outside_the_log_is_an_error() -> None:
    log = open_log()
    append(log, make_batch([1, 2]))
    log.trim_to(1)
    for offset in (0, 3):
        with pytest.raises(OffsetOutOfRange):
            log.read(offset, 1, 2)


def test_a_segment_is_closed_by_bytes_and_by_age() -> None:
    clock = ManualClock()
    log = Log.open(SimulatedDisk(), clock, "/data/p", LogSettings(segment_bytes=10_000, segment_ms=5_000))
    append(log, make_batch([1], 100))
    clock.seconds += 4.9
    append(log, make_batch([1], 100))
    assert len(log.segments()) == 1
    clock.seconds += 0.2
    append(log, make_batch([1], 100))
    assert [info.base_offset for info in log.segments()] == [0, 2]
    log.update_settings(LogSettings(segment_bytes=350, segment_ms=5_000))
    append(log, make_batch([1], 100))
    append(log, make_batch([1], 100))
    assert len(log.segments()) == 3


@pytest.mark.parametrize("written", ["now", "long ago", "in the future", "at no time"])
def test_restart_keeps_the_age_of_a_segment(written: str) -> None:
    """Otherwise a broker that is restarted often would never close a segment, and never delete its records."""
    disk, clock, settings = SimulatedDisk(), ManualClock(), LogSettings(segment_ms=5_000)
    now_ms = clock.wall_ms()
    timestamp_ms = {"now": now_ms, "long ago": 7, "in the future": now_ms + 60_000, "at no time": -1}[written]
    for _ in range(3):
        log = Log.open(disk, clock, "/data/p", settings)
        append(log, make_batch([timestamp_ms]))
        log.close()
        clock.seconds += 2
    log = Log.open(disk, clock, "/data/p", settings)
    append(log, make_batch([timestamp_ms]))
    if written == "now":
        assert [info.base_offset for info in log.segments()] == [0, 3]
    elif written == "long ago":
        assert [info.base_offset for info in log.segments()] == [0, 1, 2, 3]
    else:
        assert len(log.segments()) == 1
        clock.seconds += 5.1
        append(log, make_batch([timestamp_ms]))
        assert [info.base_offset for info in log.segments()] == [0, 4]


def test_searches_use_log_append_time() -> None:
    log = open_log()
    batch = make_batch([5, 6])
    header = check_batch(batch)
    log.append(batch, header, 0, rewritten_header=with_log_append_time(batch, header, 9_000))
    piece = log.read(0, 1000, 2)
    assert piece is not None
    assert check_batch(piece.read()).timestamp_type is TimestampType.LOG_APPEND
    assert log.offset_for_time(8_000, 2) == (0, 9_000, 0)
    assert log.offset_for_time(9_001, 2) is None


def test_an_older_leader_cannot_append() -> None:
    log = open_log()
    append(log, make_batch([1]), leader_epoch=3)
    with pytest.raises(FencedLeaderEpoch):
        append(log, make_batch([2]), leader_epoch=2)
    assert log.end_offset == 1


def test_append_on_a_full_disk_is_undone_and_succeeds_when_there_is_space() -> None:
    disk = SimulatedDisk()
    log = open_log(disk, LogSettings())
    stored = [append(log, make_batch([1], 100))[1]]
    disk.capacity_bytes -= disk.free_bytes("/") - 50
    with pytest.raises(StorageError, match="No space left"):
        append(log, make_batch([2], 100))
    assert log.failure is None
    assert log.end_offset == 1
    assert disk.files()["/data/p/" + "0" * 20 + ".log"] == stored[0]
    disk.capacity_bytes = 1 << 30
    stored.append(append(log, make_batch([3], 100))[1])
    log.sync()
    check_contents(Log.open(disk, ManualClock(), "/data/p", SMALL), stored)


def test_failed_write_fails_the_log_for_appends_but_not_for_reads() -> None:
    disk = SimulatedDisk()
    log = open_log(disk)
    _, stored = append(log, make_batch([1]))
    disk.fail_when = lambda operation, path: errno.EIO if operation == "write" else None
    reported: list[StorageError] = []
    log.listen(LogListener(on_failure=reported.append))
    with pytest.raises(StorageError, match="Input/output error"):
        append(log, make_batch([2]))
    disk.fail_when = None
    with pytest.raises(StorageError):
        append(log, make_batch([2]))
    assert reported == [log.failure]
    piece = log.read(0, 1, 1)
    assert piece is not None
    assert piece.read() == stored


def test_a_closed_log_refuses_appends() -> None:
    log = open_log()
    append(log, make_batch([1]))
    log.close()
    log.close()
    with pytest.raises(StorageError, match="closed"):
        append(log, make_batch([1]))


def test_opening_and_closing_an_unchanged_log_writes_nothing() -> None:
    disk = SimulatedDisk()
    log = open_log(disk)
    for n in range(5):
        append(log, make_batch([n], 100))
    log.close()
    changes: list[int] = []
    disk.on_change = lambda: changes.append(disk.calls)
    open_log(disk).close()
    assert changes == []


def test_truncating_and_deleting_wait_for_a_sync_that_runs() -> None:
    log = open_log()
    append(log, make_batch([1]))
    work = log.prepare_flush()
    assert work is not None
    for change in (lambda: log.truncate_to(0), log.delete):
        with pytest.raises(ConcurrentChange):
            change()
    log.finish_flush(work, None)
    log.truncate_to(0)
    assert (log.end_offset, log.durable_end_offset) == (0, 0)


def test_the_durable_end_is_the_end_at_which_the_sync_started() -> None:
    log = open_log()
    append(log, make_batch([1]))
    work = log.prepare_flush()
    assert work is not None
    append(log, make_batch([2]))
    reported: list[int] = []
    log.listen(LogListener(on_durable=reported.append))
    log.finish_flush(work, None)
    assert log.durable_end_offset == 1
    assert reported == [1]


def test_end_offset_for_epoch_follows_kip_279() -> None:
    log = open_log()
    for epoch, count in [(1, 2), (3, 3), (6, 1)]:
        for _ in range(count):
            append(log, make_batch([1]), leader_epoch=epoch)
    assert log.leader_epochs.entries() == [(1, 0), (3, 2), (6, 5)]
    answers = {epoch: log.end_offset_for_epoch(epoch) for epoch in range(8)}
    assert answers == {
        0: (0, 0),
        1: (1, 2),
        2: (1, 2),
        3: (3, 5),
        4: (3, 5),
        5: (3, 5),
        6: (6, 6),
        7: (-1, -1),
    }
    log.truncate_to(5)
    assert log.leader_epochs.entries() == [(1, 0), (3, 2)]


def test_slice_can_be_read_after_its_segment_is_removed(tmp_path: Path) -> None:
    log = Log.open(HostDisk(), HostClock(), str(tmp_path / "p"), SMALL)
    stored = [append(log, make_batch([n], 300))[1] for n in range(4)]
    piece = log.read(0, 1, log.end_offset)
    assert piece is not None
    log.trim_to(3)
    log.sync()
    assert not os.path.exists(piece.file.path)
    assert piece.read() == stored[0]
    log.delete()
    assert piece.read() == stored[0]
    assert os.listdir(tmp_path) == []


def test_descriptors_do_not_grow_with_the_age_of_the_log(tmp_path: Path) -> None:
    disk = HostDisk()
    log = Log.open(
        disk, HostClock(), str(tmp_path / "p"), SMALL, files=FileCache(disk, files_max=3, indexes_max=2)
    )
    for n in range(40):
        append(log, make_batch([n], 300))
    log.sync()
    before = len(os.listdir("/proc/self/fd"))
    for offset in range(40):
        piece = log.read(offset, 1, log.end_offset)
        assert piece is not None
        assert read_header(piece.read()).base_offset == offset
    del piece
    assert len(os.listdir("/proc/self/fd")) - before <= 3
    log.close()


def test_sequential_readers_are_remembered_but_not_without_bound() -> None:
    log = open_log(settings=LogSettings())
    for n in range(200):
        append(log, make_batch([n]))
    for offset in range(200):
        assert log.read(offset, 1, 200) is not None
    assert len(log._read_positions) <= 64


def test_ranges_read_record_by_record_are_those_of_the_current_batches() -> None:
    """A log remembers the batch that a reader wants record by record. Truncation, DeleteRecords, rolls and readers at
    other places must not make it return a batch that is not there any more, or one that is not asked for."""
    rng = random.Random(17)
    for _ in range(20):
        log = open_log(settings=LogSettings(segment_bytes=1500, index_interval_bytes=200))
        batches: list[tuple[int, int, bytes]] = []  # first offset, next offset, bytes
        position = 0
        for step in range(150):
            end = log.end_offset
            action = rng.choice(["append", "read", "read", "read", "jump", "truncate", "trim"])
            if action == "append" or not batches:
                base, stored = append(log, make_batch([step] * rng.randint(1, 9), rng.randint(1, 60)))
                batches.append((base, log.end_offset, stored))
            elif action == "truncate" and rng.random() < 0.2:
                cut = rng.choice(batches)[0]
                log.truncate_to(max(cut, log.start_offset))
                batches = [each for each in batches if each[1] <= log.end_offset]
            elif action == "trim" and rng.random() < 0.2:
                log.trim_to(rng.randint(log.start_offset, end))
                batches = [each for each in batches if each[1] > log.start_offset]
            elif action == "jump":
                position = rng.randint(log.start_offset, end)
            else:
                position = max(position, log.start_offset)
                limit = rng.choice([end, end, rng.choice(batches)[1]])
                last, space = position + rng.randint(0, 3), rng.choice([0, 200, 10_000])
                if position > end:
                    position = log.start_offset
                    continue
                found = log.read_range(position, last, space, limit)
                visible = [each for each in batches if each[1] <= limit and each[1] > position]
                if not visible:
                    assert found is None
                    continue
                assert found is not None
                expected = b""
                for first, following, stored in visible:
                    if len(expected) == found.length:
                        assert first > last or len(expected) + len(stored) > space or found.length < 1500
                        break
                    assert not expected or (first <= last and len(expected) + len(stored) <= space)
                    expected += stored
                    next_offset = following
                assert found.read() == expected
                assert found.next_offset == next_offset
                position += rng.randint(0, 2)
