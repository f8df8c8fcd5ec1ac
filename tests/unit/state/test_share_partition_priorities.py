"""Share partition of one priority: its state stays small among records of others, and keys of others are not needed."""

from __future__ import annotations

from typing import Any

import pytest

from mansio.broker.features.priorities.priority_index import PriorityIndex
from mansio.state.share_partition.machine import SharePartition
from mansio.state.share_partition.offset_numbers import NumberedOffsets, NumberedRange
from mansio.state.share_partition.types import (
    ACCEPT,
    AcknowledgementBatch,
    Backoff,
    LoadedState,
    ShareKey,
    ShareSettings,
    Update,
)
from mansio.wire.batch.priority_header import Priority

LOG_END, STEP = 20_000, 200
SETTINGS = ShareSettings(30_000, 5, 100, 20_000, STEP, False, True, False, Backoff(0, 1.0, 0, 0.0))


def share_partition(priority: Priority, index: PriorityIndex, *, by_key: bool = False) -> SharePartition:
    state = LoadedState(0, 1, 0, 0, STEP, 0, (), (), (), None, True, 0)
    return SharePartition(
        ShareKey("g", bytes(16), 0, priority),
        SETTINGS._replace(is_ordered_by_key=by_key),
        state,
        leader_epoch=1,
        log_start=0,
        log_end=LOG_END,
        high_watermark=LOG_END,
        now_ms=0,
        wall_ms=0,
        own=NumberedOffsets(index, priority),
    )


def alternating() -> PriorityIndex:
    """Offsets of high and low priority in turn."""
    index = PriorityIndex(0)
    ranges = [NumberedRange(at, at, (Priority.HIGH, Priority.LOW)[at % 2]) for at in range(LOG_END)]
    index.append(LOG_END, ranges)
    return index


@pytest.mark.parametrize("priority", [Priority.HIGH, Priority.LOW])
def test_state_stays_small_while_records_of_others_in_between_wait(priority: Priority) -> None:
    machine = share_partition(priority, alternating())
    sizes: list[int] = []

    def store(update: Update | None) -> None:
        if update is not None:
            sizes.append(len(update.changes))
            machine.mark_persisted(update.token)

    delivered: list[Any] = []
    while ranges := machine.acquirable_ranges("m", 10, LOG_END, 0):
        ends = [last for _, last in ranges]
        acquired, update = machine.acquire("m", ranges, 10, strict=True, batch_ends=ends, now_ms=0)
        store(update)
        for first, last, _ in acquired:
            delivered += range(first, last + 1)
            batch = AcknowledgementBatch(first, last, bytes([ACCEPT]))
            store(machine.acknowledge("m", [batch], 0, 0, 0.5))
            assert len(list(machine.ranges)) <= 50
    assert delivered == [at for at in range(LOG_END) if at % 2 == (priority is Priority.LOW)]
    assert max(sizes) <= 30  # of ten records and what lies between them
    assert machine.counts(0).lag == 0


def test_keys_of_records_of_other_priorities_are_not_needed() -> None:
    index = PriorityIndex(0)
    index.append(LOG_END, [NumberedRange(0, 9_000, Priority.LOW), NumberedRange(9_001, 9_003, Priority.HIGH)])
    machine = share_partition(Priority.HIGH, index, by_key=True)
    assert machine.next_key_offset == 9_001
    machine.add_keys(9_002, {9_001: 1})
    assert machine.next_key_offset == 9_002
    machine.add_keys(9_010, {9_002: 1, 9_003: 2})
    following = machine.next_key_offset
    assert following is not None
    assert following >= LOG_END
    assert machine.acquirable_ranges("m", 10, LOG_END, 0) == []  # the lease bound is lower
    _, update = machine.acquire("m", [], 10, strict=True, batch_ends=[], now_ms=0)
    assert update is not None
    machine.mark_persisted(update.token)
    assert machine.acquirable_ranges("m", 10, LOG_END, 0) == [(9_001, 9_003)]
