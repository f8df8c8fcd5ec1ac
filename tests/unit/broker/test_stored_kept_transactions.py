"""Records of transactions that an earlier version has stored for two-phase commit (KIP-939): open without a timeout, or
kept by a later producer than the one that began them. They are read, and none of them stays open or loses a decision.

The bytes are those that the earlier version wrote, for partitions "a" 0 and "b" 0 and the first producer (42, 3), or
(42, 32766) where the epochs are exhausted."""

from __future__ import annotations

from typing import Any

import pytest

from mansio.errors import InvalidProducerIdMapping, ProducerFenced
from mansio.wire.field_values import PRODUCER_EPOCH_MAX
from mansio.wire.internal_records.transaction_records import encode_key
from unit.broker.transactions_fixtures import CoordinatorRoom

PARTITIONS = bytes.fromhex("0302610200000000000262020000000000")
TIMES = bytes.fromhex("000000000000138800000000000003e8")

OPEN_WITHOUT_TIMEOUT = bytes.fromhex("0001000000000000002a00037fffffff01") + (
    PARTITIONS + TIMES + bytes.fromhex("0202020002849d01020002")
)
KEPT = bytes.fromhex("0001000000000000002a00037fffffff01") + (
    PARTITIONS + TIMES + bytes.fromhex("040108000000000000002a0202000203020005869d0104000003e8")
)
"""Kept by (42, 5), which has asked for a timeout of 1 s; the transaction has none."""
KEPT_WITH_TIMEOUT = bytes.fromhex("0001000000000000002a00030000ea6001") + (
    PARTITIONS + TIMES + bytes.fromhex("040108000000000000002a0202000203020005869d0104000003e8")
)
"""The same, with a timeout of 60 s of the transaction."""
KEPT_EXHAUSTED = bytes.fromhex("0001000000000000002a7ffe0000ea6001") + (
    PARTITIONS
    + TIMES
    + bytes.fromhex("050008000000000000002a0108000000000000004d0202000203020000869d0104000003e8")
)
"""Kept by (77, 0) with a timeout of 60 s, because the epochs of 42 are exhausted."""
KEPT_COMMITTED = bytes.fromhex("0001000000000000002a7fff000003e802") + (
    PARTITIONS
    + TIMES
    + bytes.fromhex("050008000000000000002a0108000000000000004d0202000203020001849d01020000")
)
"""The same after the commit by (77, 0): the next transaction was to be one of (77, 1)."""
EXHAUSTED_COMMITTED = bytes.fromhex("0001000000000000002a7fff000003e802") + (
    PARTITIONS
    + TIMES
    + bytes.fromhex("050008000000000000002a0108000000000000004d0202000203020000849d01027ffe")
)
"""Committed by its own producer (42, 32766); the next transaction is one of (77, 0)."""

FENCED = (ProducerFenced, InvalidProducerIdMapping)
TIMEOUT_MS_MAX = 600_000


def loaded(value: bytes) -> CoordinatorRoom:
    """A coordinator that has loaded this record, whose transaction began now."""
    room = CoordinatorRoom(timeout_ms_max=TIMEOUT_MS_MAX)
    room.begin("other")  # creates the topic
    now = room.scheduler.wall_ms().to_bytes(8, "big")

    async def store() -> None:
        await room.coordinator.topic.append(
            room.index(), [(encode_key("orders"), value.replace(TIMES, now + now))]
        )

    room.run(store())
    return room.restarted(timeout_ms_max=TIMEOUT_MS_MAX)


def results(room: CoordinatorRoom) -> dict[Any, list[bool]]:
    room.run_for()
    return room.markers.results()


@pytest.mark.parametrize(
    ("value", "timeout_ms"),
    [
        (OPEN_WITHOUT_TIMEOUT, TIMEOUT_MS_MAX),
        (KEPT, TIMEOUT_MS_MAX),
        (KEPT_WITH_TIMEOUT, 60_000),
        (KEPT_EXHAUSTED, 60_000),
    ],
)
def test_an_open_transaction_ends_by_its_timeout_or_without_one_by_the_highest(
    value: bytes, timeout_ms: int
) -> None:
    room = loaded(value)
    room.run_for(timeout_ms - 1_000)
    assert room.state() == "Ongoing"
    room = room.restarted(timeout_ms_max=TIMEOUT_MS_MAX)
    room.run_for(1_500)
    assert room.state() == "CompleteAbort"
    assert results(room) == {("a", 0): [False], ("b", 0): [False]}


@pytest.mark.parametrize(
    ("value", "marker", "following"),
    [
        (OPEN_WITHOUT_TIMEOUT, (42, 4), (42, 5)),
        (KEPT, (42, 6), (42, 7)),
        (KEPT_WITH_TIMEOUT, (42, 6), (42, 7)),
        (KEPT_EXHAUSTED, (42, PRODUCER_EPOCH_MAX), None),
    ],
)
def test_a_new_producer_aborts_an_open_transaction_and_goes_on(
    value: bytes, marker: tuple[int, int], following: tuple[int, int] | None
) -> None:
    room = loaded(value)
    producer = room.begin()
    assert results(room) == {("a", 0): [False], ("b", 0): [False]}
    assert {(each.producer_id, each.producer_epoch) for _, each in room.markers.stored} == {marker}
    assert producer == (following or (room.next_id, 0))
    room.add(producer)
    room.end(producer)


@pytest.mark.parametrize(
    ("value", "owner"), [(OPEN_WITHOUT_TIMEOUT, (42, 3)), (KEPT, (42, 5)), (KEPT_WITH_TIMEOUT, (42, 5))]
)
@pytest.mark.parametrize("is_commit", [True, False])
def test_the_last_producer_that_has_kept_a_transaction_can_still_end_it(
    value: bytes, owner: tuple[int, int], is_commit: bool
) -> None:
    room = loaded(value)
    if owner != (42, 3):
        with pytest.raises(ProducerFenced):
            room.end((42, 3), is_commit=not is_commit)
    room.end(owner, is_commit=is_commit)
    assert results(room) == {("a", 0): [is_commit], ("b", 0): [is_commit]}


def test_without_its_producer_id_a_transaction_cannot_be_committed() -> None:
    room = loaded(KEPT_EXHAUSTED)
    for producer in ((42, PRODUCER_EPOCH_MAX - 1), (42, PRODUCER_EPOCH_MAX), (77, 0)):
        with pytest.raises(FENCED):
            room.end(producer)
        with pytest.raises(FENCED):
            room.add(producer)


def test_a_decision_is_carried_out_and_no_epoch_is_given_twice() -> None:
    room = loaded(KEPT_COMMITTED)
    assert results(room) == {("a", 0): [True], ("b", 0): [True]}
    for producer in ((42, PRODUCER_EPOCH_MAX), (77, 0), (77, 1)):
        with pytest.raises(FENCED):
            room.add(producer)
    producer = room.begin()
    assert producer[0] not in (42, 77)
    room.add(producer)
    room.end(producer)


def test_the_next_producer_of_an_exhausted_epoch_is_that_of_the_record() -> None:
    room = loaded(EXHAUSTED_COMMITTED)
    assert results(room) == {("a", 0): [True], ("b", 0): [True]}
    assert room.end((42, PRODUCER_EPOCH_MAX - 1)) == (77, 0)
    room.add((77, 0))
