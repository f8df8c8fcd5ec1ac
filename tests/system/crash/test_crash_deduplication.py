"""The deduplication window over damage, and over a clock that is set back. `test_crash_features` cuts the power."""

from __future__ import annotations

import pytest

from mansio.wire.batch.dedup_header import DEDUP_ID_HEADER
from mansio.wire.batch.record_batch import build_batch
from support.partition_bench import DIRECTORY, WINDOW_MS, deduplicated


@pytest.mark.row("P3")
def test_a_damaged_control_batch_is_read_again_after_its_repair() -> None:
    live = deduplicated()
    batch = build_batch([(1000, None, b"x", [(DEDUP_ID_HEADER, b"id")])])
    first = live.partition.append(batch).base_offset
    live.flush()
    position = 8 * 90
    live.disk.flip_bit(f"{DIRECTORY}/{0:020d}.log", position)
    live.deduplication.on_truncate(live.log.end_offset)  # the view is loaded again
    live.scheduler.run()
    is_complete = live.deduplication.is_complete
    assert not is_complete
    assert live.partition.storage_health.damaged or live.deduplication.retention_floor() == 0
    live.disk.flip_bit(f"{DIRECTORY}/{0:020d}.log", position)  # as a repair does
    for _ in range(3):
        live.scheduler.fire()
        live.scheduler.run()
    assert live.deduplication.is_complete
    assert live.partition.append(batch).base_offset == first


@pytest.mark.row("P3")
def test_a_clock_that_is_set_back_shortens_no_window() -> None:
    live = deduplicated()

    def append(dedup_id: bytes) -> int:
        return live.partition.append(
            build_batch([(1000, None, b"x", [(DEDUP_ID_HEADER, dedup_id)])])
        ).base_offset

    live.clock.seconds += 500
    wrong = append(b"wrong clock")
    live.clock.seconds -= 500
    right = append(b"right clock")
    live.clock.seconds += WINDOW_MS / 1000 - 0.1
    assert (append(b"wrong clock"), append(b"right clock")) == (wrong, right)
    live.clock.seconds += 0.2
    assert append(b"wrong clock") > right, "it counts from when the clock was right again"
    assert append(b"right clock") > right
