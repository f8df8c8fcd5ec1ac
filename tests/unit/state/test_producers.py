"""Idempotent producers: duplicates, gaps and expiration."""

from __future__ import annotations

import pytest

from mansio.errors import CorruptLog, InvalidProducerEpoch, InvalidRecord, OutOfOrderSequence
from mansio.state.producers import Duplicate, ProducerTable
from mansio.wire.batch.record_batch import BatchHeader
from mansio.wire.field_values import SEQUENCE_MAX


def header(
    sequence: int,
    count: int = 1,
    *,
    producer: int = 7,
    epoch: int = 0,
    base_offset: int = 0,
    attributes: int = 0,
) -> BatchHeader:
    return BatchHeader(
        base_offset, 61, 0, 2, 0, attributes, count - 1, 1000, 1000, producer, epoch, sequence, count
    )


def appended(table: ProducerTable, *sequences: int, now_ms: int = 0) -> None:
    for sequence in sequences:
        assert table.check(header(sequence)) is None
        table.record(header(sequence), 100 + sequence, now_ms)


def test_each_of_the_last_five_batches_is_recognised_when_it_comes_again() -> None:
    table = ProducerTable()
    appended(table, 0, 1, 2, 3, 4, 5)
    for sequence in (1, 2, 3, 4, 5):
        assert table.check(header(sequence)) == Duplicate(100 + sequence, 100 + sequence, 1000)
    with pytest.raises(OutOfOrderSequence):
        table.check(header(0))  # the sixth last: too old to be told from a mistake


def test_a_batch_that_overlaps_a_stored_one_is_not_taken_for_it() -> None:
    table = ProducerTable()
    table.record(header(0, 10), 0, 0)
    with pytest.raises(OutOfOrderSequence):
        table.check(header(0, 5))
    assert table.check(header(0, 10)) == Duplicate(0, 9, 1000)


def test_a_gap_is_refused_and_changes_nothing() -> None:
    table = ProducerTable()
    appended(table, 0)
    with pytest.raises(OutOfOrderSequence, match="sent sequence 2, expected 1"):
        table.check(header(2))
    assert table.check(header(1)) is None


def test_sequences_go_from_the_largest_to_zero() -> None:
    table = ProducerTable()
    table.record(header(SEQUENCE_MAX - 1, 3), 0, 0)  # MAX-1, MAX, 0
    assert table.check(header(1)) is None
    assert table.check(header(SEQUENCE_MAX - 1, 3)) == Duplicate(0, 2, 1000)
    with pytest.raises(OutOfOrderSequence):
        table.check(header(0))


def test_an_older_epoch_is_fenced_and_a_newer_one_begins_at_zero() -> None:
    table = ProducerTable()
    table.record(header(0, epoch=3), 0, 0)
    with pytest.raises(InvalidProducerEpoch):
        table.check(header(1, epoch=2))
    with pytest.raises(OutOfOrderSequence):
        table.check(header(1, epoch=4))
    assert table.check(header(0, epoch=4)) is None
    table.record(header(0, epoch=4), 1, 0)
    assert table.check(header(0, epoch=4)) == Duplicate(1, 1, 1000)


def test_a_producer_that_retention_made_us_forget_may_go_on_anywhere() -> None:
    assert ProducerTable().check(header(42)) is None


def test_batches_without_producer_are_none_of_our_business() -> None:
    table = ProducerTable()
    plain = header(-1, producer=-1, epoch=-1)
    assert table.check(plain) is None
    table.record(plain, 0, 0)
    assert len(table) == 0


@pytest.mark.parametrize(("sequence", "epoch"), [(-1, 0), (0, -1)])
def test_a_producer_id_without_epoch_or_sequence_is_refused(sequence: int, epoch: int) -> None:
    with pytest.raises(InvalidRecord):
        ProducerTable().check(header(sequence, epoch=epoch))


def test_a_marker_raises_the_epoch_without_counting_as_a_batch() -> None:
    table = ProducerTable()
    appended(table, 0)
    table.record(header(-1, epoch=1, attributes=0x30), 1, 0)
    assert table.check(header(0, epoch=1)) is None
    with pytest.raises(InvalidProducerEpoch):
        table.check(header(1, epoch=0))


def test_expiry_forgets_exactly_the_producers_that_have_been_silent() -> None:
    table = ProducerTable(expiration_ms=100)
    table.record(header(0, producer=1), 0, 0)
    table.record(header(0, producer=2), 1, 50)
    table.record(header(1, producer=1), 2, 90)
    assert table.expire(149) == 0
    assert table.expire(150) == 1
    assert table.get(2) is None
    assert table.get(1) is not None


def test_the_oldest_producer_makes_room_when_there_are_too_many() -> None:
    table = ProducerTable(producers_max=2)
    for producer in (1, 2, 1, 3):
        table.record(header(0, producer=producer), 0, 0)
    assert [table.get(each) is not None for each in (1, 2, 3)] == [True, False, True]
    assert table.evicted_count == 1


def test_damaged_snapshots_are_reported() -> None:
    table = ProducerTable()
    appended(table, 0, 1, 2)
    data = table.to_bytes(103)
    for position in range(len(data)):
        damaged = bytearray(data)
        damaged[position] ^= 0x40
        with pytest.raises(CorruptLog):
            ProducerTable.from_bytes(bytes(damaged))
    for length in range(len(data)):
        with pytest.raises(CorruptLog):
            ProducerTable.from_bytes(data[:length])


def test_batches_of_the_broker_itself_are_checked_by_epoch_only() -> None:
    table = ProducerTable()
    for number in range(3):
        table.check_epoch(7, 2)
        table.record(header(sequence=-1, epoch=2), 10 * number, 0)
    assert table.retained_batch_offsets() == frozenset()
    table.check_epoch(7, 3)
    table.check_epoch(8, 0)
    with pytest.raises(InvalidProducerEpoch):
        table.check_epoch(7, 1)
