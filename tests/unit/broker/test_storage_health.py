"""What was met on the disk is remembered within bounds, and logged seldom."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from mansio.broker.partition.storage_health import (
    DISK_FULL_EXPIRY_S,
    LOG_INTERVAL_S,
    OTHER_PARTITIONS,
    PARTITIONS_MAX,
    StorageHealth,
)
from mansio.errors import CorruptLog, DecompressionFailed, DiskFull
from support.logs import ManualClock

if TYPE_CHECKING:
    import pytest


def test_damage_of_a_partition_is_one_line_a_minute_however_often_it_is_met(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = ManualClock()
    storage_health = StorageHealth(clock)
    for _ in range(100):
        for partition in (0, 1):
            storage_health.record_damage("t", partition, 5, CorruptLog("damaged"))
    assert [record.getMessage() for record in caplog.records] == ["corrupt_batch"] * 2
    clock.seconds += LOG_INTERVAL_S
    storage_health.record_damage("t", 0, 5, CorruptLog("damaged"))
    assert len(caplog.records) == 3
    assert storage_health.corrupt_batches == 201
    assert storage_health.damaged["t", 0].found_count == 101


def test_an_unreadable_batch_is_not_damage_and_starts_no_repair(caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock()
    storage_health = StorageHealth(clock)
    repairs: list[object] = []
    storage_health.on_damage(lambda *damage: repairs.append(damage))
    for _ in range(100):
        storage_health.record_unreadable("t", 0, 5, DecompressionFailed("garbage"))
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("WARNING", "unreadable_batch")
    ]
    assert (storage_health.unreadable_batches, storage_health.corrupt_batches) == (100, 0)
    assert storage_health.unreadable["t", 0].found_count == 100
    assert not storage_health.damaged
    assert not repairs
    storage_health.remove_partition("t", 0)
    assert not storage_health.unreadable


def test_number_of_recorded_damaged_ranges_and_of_their_log_lines_is_bounded(
    caplog: pytest.LogCaptureFixture,
) -> None:
    storage_health = StorageHealth(ManualClock())
    for partition in range(PARTITIONS_MAX + 500):
        storage_health.record_damage("t", partition, 0, CorruptLog("damaged"))
    assert len(storage_health.damaged) == PARTITIONS_MAX + 1
    assert storage_health.damaged[OTHER_PARTITIONS].found_count == 500
    assert len(caplog.records) == PARTITIONS_MAX + 1


def test_full_disk_is_reported_when_it_begins_and_when_it_ends_and_forgotten_without_writers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    clock = ManualClock()
    storage_health = StorageHealth(clock)
    reported: list[int] = []
    storage_health.on_disk_full_change(lambda: reported.append(len(storage_health.disk_full_partitions())))
    for _ in range(10):
        storage_health.record_disk_full("t", 0, DiskFull())
        storage_health.record_disk_full("t", 1, DiskFull())
    storage_health.record_disk_space_available("t", 0)
    assert storage_health.disk_full_partitions() == (("t", 1),)
    storage_health.record_disk_space_available("t", 1)
    storage_health.record_disk_space_available("t", 1)
    assert reported == [1, 0]
    assert [record.getMessage() for record in caplog.records] == ["disk_full", "disk_space_available"]
    storage_health.record_disk_full("t", 2, DiskFull())
    clock.seconds += DISK_FULL_EXPIRY_S + 1
    assert storage_health.disk_full_partitions() == ()
    for partition in range(2 * PARTITIONS_MAX):
        storage_health.record_disk_full("t", partition, DiskFull())
    assert len(storage_health.disk_full_partitions()) == PARTITIONS_MAX
