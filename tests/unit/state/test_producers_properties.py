"""Idempotence against a small model: the log holds each (epoch, sequence) once, and replaying rebuilds the table."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mansio.errors import InvalidProducerEpoch, OutOfOrderSequence
from mansio.state.producers import Duplicate, ProducerTable
from mansio.wire.batch.record_batch import BatchHeader

SENDS = st.lists(
    st.tuples(
        st.integers(1, 2),  # producer
        st.integers(0, 2),  # epoch
        st.one_of(st.none(), st.integers(0, 12)),  # sequence; None: the one that should come next
        st.integers(1, 3),  # records
    ),
    max_size=40,
)


def header(producer: int, epoch: int, sequence: int, count: int, base_offset: int = 0) -> BatchHeader:
    return BatchHeader(base_offset, 61, 0, 2, 0, 0, count - 1, 5, 5, producer, epoch, sequence, count)


@given(SENDS)
def test_nothing_is_stored_twice_or_out_of_order_and_a_replay_rebuilds_the_table(sends: list) -> None:
    table = ProducerTable()
    log: list[BatchHeader] = []
    end_offset = 0
    for producer, epoch, wanted, count in sends:
        known = [each for each in log if each.producer_id == producer]
        newest = known[-1] if known else None
        upcoming = 0
        if newest is not None and newest.producer_epoch == epoch:
            upcoming = newest.base_sequence + newest.record_count
        sequence = upcoming if wanted is None else wanted
        batch = header(producer, epoch, sequence, count, end_offset)
        same = [each for each in known if each[10:] == batch[10:]]
        recent = [each for each in known if newest and each.producer_epoch == newest.producer_epoch][-5:]
        try:
            outcome = table.check(batch)
        except InvalidProducerEpoch:
            assert newest is not None
            assert epoch < newest.producer_epoch
            continue
        except OutOfOrderSequence:
            assert newest is not None
            assert sequence != upcoming
            assert not any(each in recent for each in same)
            continue
        if isinstance(outcome, Duplicate):
            assert outcome.base_offset == same[-1].base_offset
            assert same[-1] in recent
            continue
        assert newest is None or (sequence == upcoming and epoch >= newest.producer_epoch)
        table.record(batch, end_offset, 9)
        log.append(batch)
        end_offset += count

    replayed = ProducerTable()
    replayed.replay(log, 9)
    snapshot = table.to_bytes(end_offset)
    assert replayed.to_bytes(end_offset) == snapshot
    read, read_end = ProducerTable.from_bytes(snapshot)
    assert read_end == end_offset
    assert read.to_bytes(end_offset) == snapshot


@given(st.integers(0, 2**31 - 1), st.integers(1, 6), st.data())
def test_a_batch_that_was_stored_without_its_first_records_is_recognized(
    sequence: int, count: int, data: st.DataObject
) -> None:
    kept = data.draw(st.integers(1, count))
    sent = header(1, 0, sequence, count)
    stored = header(1, 0, (sequence + count - kept) % 2**31, kept)
    table = ProducerTable()
    table.record(stored, 5, 9)
    assert table.check(sent, may_be_shorter=True) == Duplicate(5, 5 + kept - 1, 5)
    upcoming = header(1, 0, (sequence + count) % 2**31, count)
    assert table.check(upcoming, may_be_shorter=True) is None
    for other in (
        header(1, 0, (sequence + count - kept + 1) % 2**31, kept),
        header(1, 0, sequence, count + 1),
    ):
        try:
            assert table.check(other, may_be_shorter=True) is None
            assert other.base_sequence == upcoming.base_sequence
        except OutOfOrderSequence:
            pass
