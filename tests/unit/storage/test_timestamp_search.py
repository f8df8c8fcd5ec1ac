"""Searches by timestamp: their cost in a log of many segments, and the effect of undecodable batches."""

from __future__ import annotations

import random

import pytest
from crc32c import crc32c

from mansio.errors import CorruptLog
from mansio.storage.flush_state import LogDiskFull
from mansio.storage.log import Log, LogSettings
from mansio.testing.disk import SimulatedDisk
from mansio.wire.batch.record_batch import HEADER_BYTES, check_batch
from support.logs import ManualClock, append, check_contents, check_times, make_batch

SEGMENTS = 200
SETTINGS = LogSettings(segment_bytes=150, index_interval_bytes=100)  # one batch each
DIRECTORY = "/data/p"


class CountingDisk(SimulatedDisk):
    """Records which index files were read."""

    indexes_read = 0

    def read_file(self, path: str) -> bytes:
        self.indexes_read += path.endswith(".index")
        return super().read_file(path)


def built(times: list[int], disk: SimulatedDisk | None = None) -> tuple[SimulatedDisk, list[bytes]]:
    disk = disk or CountingDisk()
    log = Log.open(disk, ManualClock(), DIRECTORY, SETTINGS)
    stored = [append(log, make_batch([time], 60, tag))[1] for tag, time in enumerate(times)]
    assert len(log.segments()) == len(times)
    log.close()
    return disk, stored


def opened(disk: SimulatedDisk) -> Log:
    return Log.open(disk, ManualClock(), DIRECTORY, SETTINGS)


@pytest.mark.parametrize("reverse", [False, True])
def test_search_after_a_restart_loads_a_few_indexes_only(reverse: bool) -> None:
    times = sorted(range(1000, 1000 + SEGMENTS), reverse=reverse)
    disk, _ = built(times)
    assert isinstance(disk, CountingDisk)
    log = opened(disk)
    disk.indexes_read, calls = 0, disk.calls
    for moment in (1000, 1050, 1198, 1199, 1200):
        first = next(((n, time, 0) for n, time in enumerate(times) if time >= moment), None)
        assert log.offset_for_time(moment, SEGMENTS) == first
    assert log.max_timestamp(SEGMENTS) == (times.index(1199), 1199, 0)
    assert log.max_timestamp(120) == (times.index(max(times[:120])), max(times[:120]), 0)
    log.segments()
    assert disk.indexes_read <= 10
    assert disk.calls - calls <= 60


def test_search_is_correct_for_any_order_of_timestamps() -> None:
    chance = random.Random(5)
    for _ in range(15):
        times = [1000 + chance.randint(0, 30) for _ in range(25)]
        disk, _ = built(times, SimulatedDisk())
        log = opened(disk)
        for start in sorted(chance.sample(range(25), 3)):
            log.trim_to(start)
            for limit in {start, chance.randint(start, 25), 25}:
                inside = [(n, times[n], 0) for n in range(start, limit)]
                for moment in range(999, 1033):
                    first = next((found for found in inside if found[1] >= moment), None)
                    assert log.offset_for_time(moment, limit) == first
                assert log.max_timestamp(limit) == max(inside, key=lambda found: found[1], default=None)


def test_timestamps_of_truncated_segments_are_dropped() -> None:
    """The new segments have the size of the old ones, only their timestamps differ."""
    disk, stored = built([2000 + n for n in range(6)], SimulatedDisk())
    disk.sync_all("/data")
    log = opened(disk)
    log.truncate_to(3)
    stored = stored[:3] + [append(log, make_batch([1000 + n], 60, n))[1] for n in range(4)]
    log._run_inline(log.prepare_flush(), log.finish_flush)
    job = log.prepare_maintenance()
    assert job is not None
    job.write_checkpoint(disk, sync=True)  # and nothing of what follows
    log.finish_maintenance(job, LogDiskFull("", checkpoint_written=True))
    for seed in range(30):
        image = disk.crash(random.Random(seed))
        check_times(opened(image), stored)  # first, and by itself: reads would load the indexes
    log.close()
    check_contents(opened(disk), stored)


def test_timestamps_file_that_reappears_after_a_crash_is_removed() -> None:
    disk, stored = built([2000 + n for n in range(6)], SimulatedDisk())
    old = disk.files()[f"{DIRECTORY}/times"]
    log = opened(disk)
    log.truncate_to(3)
    log.close()
    disk.open(f"{DIRECTORY}/times", create=True).write_at([old], 0)
    disk.sync_all("/data")
    log = opened(disk)
    assert not disk.exists(f"{DIRECTORY}/times")
    stored = stored[:3] + [append(log, make_batch([1000 + n], 60, n))[1] for n in range(4)]
    log._run_inline(log.prepare_flush(), log.finish_flush)
    for seed in range(30):
        check_times(opened(disk.crash(random.Random(seed))), stored)
    log.sync()
    assert disk.exists(f"{DIRECTORY}/times")


def sealed_again(batch: bytearray) -> bytes:
    batch[17:21] = crc32c(bytes(batch[21:])).to_bytes(4, "big")
    return bytes(batch)


def nonsense(timestamps: list[int]) -> bytes:
    """A batch with a valid CRC and valid counts, and invalid records."""
    batch = bytearray(make_batch(timestamps))
    batch[HEADER_BYTES:] = b"\xff" * (len(batch) - HEADER_BYTES)
    return sealed_again(batch)


def miscounted(timestamps: list[int]) -> bytes:
    """A batch whose count is one above its number of records."""
    batch = bytearray(make_batch(timestamps))
    batch[23:27] = len(timestamps).to_bytes(4, "big")
    batch[57:61] = (len(timestamps) + 1).to_bytes(4, "big")
    return sealed_again(batch)


@pytest.mark.parametrize("make", [nonsense, miscounted])
def test_undecodable_batch_is_searched_by_its_header(make) -> None:  # type: ignore[no-untyped-def]  # one of two functions
    log = Log.open(SimulatedDisk(), ManualClock(), DIRECTORY, LogSettings())
    append(log, make_batch([1000, 1010]))
    poisoned = make([1020, 1040, 1030])
    check_batch(poisoned)  # a broker takes it
    append(log, poisoned)
    end = append(log, make_batch([1035]))[0] + 1
    assert log.offset_for_time(1005, end) == (1, 1010, 0)
    assert log.offset_for_time(1015, end) == (2, 1040, 0)
    assert log.offset_for_time(1040, end) == (2, 1040, 0)
    assert log.offset_for_time(1041, end) is None
    assert log.max_timestamp(end) == (2, 1040, 0)
    log.trim_to(3)
    assert log.offset_for_time(1015, end) == (3, 1040, 0)
    assert log.max_timestamp(end) == (3, 1040, 0)


def test_header_with_a_later_timestamp_than_its_records() -> None:
    log = Log.open(SimulatedDisk(), ManualClock(), DIRECTORY, LogSettings())
    batch = bytearray(make_batch([1000]))
    batch[35:43] = (5000).to_bytes(8, "big")
    append(log, sealed_again(batch))
    append(log, make_batch([2000]))
    assert log.offset_for_time(1500, 2) == (1, 2000, 0)
    assert log.max_timestamp(2) == (0, 5000, 0)


def test_batch_with_a_wrong_crc_is_reported_as_damage() -> None:
    disk = SimulatedDisk()
    log = Log.open(disk, ManualClock(), DIRECTORY, LogSettings())
    append(log, make_batch([1000]))
    disk.flip_bit(f"{DIRECTORY}/{0:020d}.log", 8 * HEADER_BYTES)  # the length of the first record
    for look in (lambda: log.offset_for_time(900, 1), lambda: log.max_timestamp(1)):
        with pytest.raises(CorruptLog, match="CRC"):
            look()
