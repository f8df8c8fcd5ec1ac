"""What was met on the disk is remembered within bounds, and said seldom."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from mansio.broker.trouble import LINE_INTERVAL_S, NO_ROOM_MEMORY_S, OTHERS, PLACES_MAX, Trouble
from mansio.errors import CorruptLog, DiskFull
from support.logs import ManualClock

if TYPE_CHECKING:
    import pytest


def test_damage_of_a_partition_is_one_line_a_minute_however_often_it_is_met(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = ManualClock()
    trouble = Trouble(clock)
    for _ in range(100):
        for partition in (0, 1):
            trouble.corrupt("t", partition, 5, CorruptLog("damaged"))
    assert [record.getMessage() for record in caplog.records] == ["corrupt batch"] * 2
    clock.seconds += LINE_INTERVAL_S
    trouble.corrupt("t", 0, 5, CorruptLog("damaged"))
    assert len(caplog.records) == 3
    assert trouble.corrupt_batches == 201
    assert trouble.damaged["t", 0].times == 101


def test_damage_everywhere_is_remembered_up_to_a_bound_and_said_no_more_often(
    caplog: pytest.LogCaptureFixture,
) -> None:
    trouble = Trouble(ManualClock())
    for partition in range(PLACES_MAX + 500):
        trouble.corrupt("t", partition, 0, CorruptLog("damaged"))
    assert len(trouble.damaged) == PLACES_MAX + 1
    assert trouble.damaged[OTHERS].times == 500
    assert len(caplog.records) == PLACES_MAX + 1


def test_full_disk_is_told_when_it_begins_and_when_it_ends_and_forgotten_when_nobody_writes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    clock = ManualClock()
    trouble = Trouble(clock)
    told: list[int] = []
    trouble.on_room_change(lambda: told.append(len(trouble.without_room())))
    for _ in range(10):
        trouble.no_room("t", 0, DiskFull())
        trouble.no_room("t", 1, DiskFull())
    trouble.room("t", 0)
    assert trouble.without_room() == (("t", 1),)
    trouble.room("t", 1)
    trouble.room("t", 1)
    assert told == [1, 0]
    assert [record.getMessage() for record in caplog.records] == ["disk full", "disk has room again"]
    trouble.no_room("t", 2, DiskFull())
    clock.seconds += NO_ROOM_MEMORY_S + 1
    assert trouble.without_room() == ()
    for partition in range(2 * PLACES_MAX):
        trouble.no_room("t", partition, DiskFull())
    assert len(trouble.without_room()) == PLACES_MAX
