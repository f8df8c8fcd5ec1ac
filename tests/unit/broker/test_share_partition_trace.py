"""A share partition reports what is stored to the trace, and reports where it does not know that."""

from __future__ import annotations

import pytest

from mansio.errors import CoordinatorNotAvailable
from mansio.state.trace.trace_buffer import NameTable, TraceBuffer
from mansio.wire.internal_records.trace_records import (
    DELIVERED,
    EXPIRED,
    LED,
    LOADED,
    ROW,
    UNKNOWN_OUTCOME,
)
from unit.broker.test_share_partition_leader import LOCK_MS, SharePartitionBench


def traced_bench() -> tuple[SharePartitionBench, TraceBuffer]:
    room, buffer = SharePartitionBench(), TraceBuffer()
    room.partition.trace = buffer.lead(bytes(16), 0, room.partition.leader_epoch, 0)
    return room, buffer


def kinds(buffer: TraceBuffer) -> list[tuple[int, int, int]]:
    """Kind, first offset and number of records of the rows that were reported."""
    (packed,) = buffer.seal().pack(NameTable(), 0, 0)
    return [(row[0], row[6], row[7]) for row in ROW.iter_unpack(packed.rows)]


def test_deliveries_and_their_ends_are_reported_when_they_are_stored() -> None:
    room, buffer = traced_bench()
    share_partition = room.share_partition()
    room.lease(share_partition, 4)
    room.scheduler.pass_time(LOCK_MS + 1)
    assert kinds(buffer) == [(LED, 0, 0), (DELIVERED, 0, 5), (EXPIRED, 0, 5)]


def test_a_write_that_fails_is_reported_as_unknown_and_the_loaded_state_follows() -> None:
    room, buffer = traced_bench()
    share_partition = room.share_partition()
    room.known_state.fail(1, CoordinatorNotAvailable("no leader"))
    with pytest.raises(CoordinatorNotAvailable):
        room.lease(share_partition, 4)
    room.scheduler.pass_time(LOCK_MS // 2)
    room.share_partition()
    found = kinds(buffer)
    assert found[:2] == [(LED, 0, 0), (UNKNOWN_OUTCOME, 0, 5)]
    assert {kind for kind, _, _ in found[2:]} <= {LOADED, UNKNOWN_OUTCOME}
    assert DELIVERED not in {kind for kind, _, _ in found}


def test_a_change_that_is_stored_after_the_leadership_has_ended_is_reported_in_its_epoch() -> None:
    room, buffer = traced_bench()
    share_partition = room.share_partition()
    trace = room.partition.trace
    trace.end(5)
    room.partition.trace = None
    room.lease(share_partition, 4)
    assert kinds(buffer)[-1] == (DELIVERED, 0, 5)
    room.partition.trace = buffer.lead(bytes(16), 0, room.partition.leader_epoch + 1, 6)
    room.reject(share_partition, 4)
    assert [each[0].leader_epoch for each in buffer.seal().events] == [1, 0]
