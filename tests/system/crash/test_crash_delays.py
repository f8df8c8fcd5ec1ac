"""Delayed records and schedules over damage, truncation, a full disk, and a clock that is set back.
`test_crash_features` cuts the power."""

from __future__ import annotations

import errno
from uuid import UUID

import pytest

from mansio.wire.batch.delay_headers import DELAY_HEADER
from mansio.wire.batch.record_batch import build_batch
from mansio.wire.batch.schedule_control_records import CatchUpMode, Schedule
from support.partition_bench import DIRECTORY
from system.crash.delay_workload import DelayedPartition


@pytest.mark.row("D6")
@pytest.mark.parametrize("position", [8, 90], ids=["length", "content"])
def test_a_damaged_batch_delays_only_its_own_records(position: int) -> None:
    live = DelayedPartition()
    for value in (b"damaged", b"intact"):
        live.partition.append(build_batch([(1000, None, value, ((DELAY_HEADER, b"50"),))]))
    live.flush()
    live.disk.flip_bit(f"{DIRECTORY}/{0:020d}.log", 8 * position)
    live.clock.seconds += 1
    assert live.delay_manager.deliver_due(10, 1 << 20) == 2
    later = [record.id for record in live.delayed_records.view.pending.select(0, 1 << 62)]
    assert later == [0], "it is tried again later"
    assert live.partition.storage_health.damaged
    live.disk.flip_bit(f"{DIRECTORY}/{0:020d}.log", 8 * position)  # as a repair does
    live.clock.seconds += 11
    assert live.delay_manager.deliver_due(10, 1 << 20) == 1
    assert [*live.visible().values()] == [b"intact", b"damaged"]


@pytest.mark.row("D6")
def test_a_clock_that_is_set_back_makes_no_record_early() -> None:
    live = DelayedPartition()
    live.partition.append(build_batch([(1000, None, b"later", ((DELAY_HEADER, b"50"),))]))
    live.clock.seconds -= 100
    live.clock.seconds += 1
    assert live.delay_manager.deliver_due(10, 1 << 20) == 0
    live.clock.seconds += 99.1
    assert live.delay_manager.deliver_due(10, 1 << 20) == 1


@pytest.mark.row("D6")
def test_deliveries_that_were_truncated_do_not_hold_up_later_ones() -> None:
    live = DelayedPartition()
    for value in (b"one", b"two"):
        live.partition.append(build_batch([(1000, None, value, ((DELAY_HEADER, b"50"),))]))
    live.flush()
    end = live.log.end_offset
    live.clock.seconds += 1
    assert live.delay_manager.deliver_due(1, 1 << 20) == 1
    live.flush()
    live.log.truncate_to(end)
    live.delayed_records.on_truncate(end)
    live.scheduler.run()
    assert live.delay_manager.uncommitted_end == end, "what was truncated is not waited for"
    assert [*live.pending().values()] == [b"one", b"two"]


@pytest.mark.row("D6")
def test_a_record_without_delay_cannot_be_cancelled_while_its_delivery_fails() -> None:
    live = DelayedPartition()
    writes = 0

    def refuse_later(operation: str, path: str) -> int | None:
        nonlocal writes
        writes += operation == "write" and path.endswith(".log")
        return errno.ENOSPC if writes > 1 and operation == "write" else None

    live.disk.fail_when = refuse_later
    live.partition.append(
        build_batch([(1000, None, b"now", ()), (1000, None, b"later", ((DELAY_HEADER, b"50"),))])
    )
    live.disk.fail_when = None
    assert sorted(live.pending()) == [0, 1]
    assert live.delay_manager.cancel([0, 1])[0] == [1]
    assert live.delay_manager.reschedule([0], 1 << 40)[0] == []
    live.deliver_all()
    assert [*live.visible().values()] == [b"now"]


@pytest.mark.row("D6")
def test_a_clock_that_is_set_back_makes_no_schedule_fire_early_or_twice() -> None:
    live = DelayedPartition()
    new = Schedule(UUID(int=1), "s", "", 1_000, "", CatchUpMode.ALL, None, b"v", (), 0, 0)
    live.delay_manager.schedules.create(new)
    live.clock.seconds += 1
    assert live.delay_manager.deliver_due(10, 1 << 20) == 1
    live.clock.seconds -= 100
    for _ in range(101):
        assert live.delay_manager.deliver_due(10, 1 << 20) == 0
        live.clock.seconds += 1
    assert live.delay_manager.deliver_due(10, 1 << 20) == 1
    (one, other) = live.fired()["s"]
    assert (one.number, other.number, other.due_ms - one.due_ms) == (1, 2, 1_000)
