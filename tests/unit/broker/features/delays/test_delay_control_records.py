"""Control batches of delayed records, and the headers with which producers delay records."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mansio.broker.features.delays.delay_control_records import (
    DelayControlType,
    decode_delay_control,
    encode_accepted,
    encode_cancelled,
    encode_copied,
    encode_delivered,
    encode_moved,
)
from mansio.errors import CorruptMessage, InvalidRecord, RequestError
from mansio.wire.batch.compression import Codec
from mansio.wire.batch.delay_headers import (
    DELAY_HEADER,
    DELAY_MS_MAX,
    DELIVER_AT_HEADER,
    NOT_DELAYED_MS,
    delivered_record,
    read_delays,
)
from mansio.wire.batch.inspection import InspectedBatch
from mansio.wire.batch.record_batch import build_batch, check_batch
from mansio.wire.batch.record_reader import read_record_at, read_records

NOW_MS = 1_800_000_000_000
NUMBERS = st.lists(st.integers(0, 2**62), min_size=1, max_size=20)
CODECS = st.sampled_from(list(Codec))


@given(NUMBERS, st.integers(0, 2**32 - 1))
def test_lists_of_ids_are_decoded_as_they_were_encoded(ids: list[int], crc: int) -> None:
    delivered = decode_delay_control(encode_delivered(ids, crc))
    assert delivered is not None
    assert (delivered.type, [*delivered.ids], delivered.crc) == (DelayControlType.DELIVERED, ids, crc)
    cancelled = decode_delay_control(encode_cancelled(ids))
    assert cancelled is not None
    assert (cancelled.type, [*cancelled.ids]) == (DelayControlType.CANCELLED, ids)
    moved = decode_delay_control(encode_moved(ids, ids[::-1]))
    assert moved is not None
    assert (moved.type, [*moved.ids], [*moved.due_ms]) == (DelayControlType.MOVED, ids, ids[::-1])


@given(NUMBERS, CODECS)
def test_a_control_batch_takes_the_offsets_and_the_sequence_of_the_producers_batch(
    due_ms: list[int], codec: Codec
) -> None:
    batch = build_batch(
        [(NOW_MS, b"key", b"value", ())] * len(due_ms),
        codec=codec,
        producer_id=5,
        producer_epoch=1,
        base_sequence=7,
    )
    header = check_batch(batch)
    stored = check_batch(encode_accepted(batch, header, due_ms))
    assert stored.is_control
    assert stored.last_offset_delta == header.last_offset_delta
    assert (stored.producer_id, stored.producer_epoch, stored.base_sequence) == (5, 1, 7)
    assert stored.max_timestamp_ms == -1
    control = decode_delay_control(encode_accepted(batch, header, due_ms))
    assert control is not None
    assert ([*control.due_ms], bytes(control.batch)) == (due_ms, batch)
    copied = decode_delay_control(encode_copied(due_ms, due_ms, batch))
    assert copied is not None
    assert (copied.type, [*copied.ids], bytes(copied.batch)) == (DelayControlType.COPIED, due_ms, batch)


def test_control_batches_of_other_kinds_are_ignored() -> None:
    marker = build_batch([(0, b"\0\0\0\1", b"\0\0\0\0\0\0", ())], control=True)
    assert decode_delay_control(marker) is None


@given(st.binary(max_size=60), st.sampled_from(list(DelayControlType)))
def test_malformed_control_records_raise_one_error(value: bytes, kind: DelayControlType) -> None:
    batch = build_batch([(-1, b"\0\0" + int(kind).to_bytes(2, "big"), value, ())], control=True)
    try:
        decode_delay_control(batch)
    except CorruptMessage:
        return


@given(
    st.lists(
        st.one_of(
            st.none(),
            st.tuples(st.just(DELAY_HEADER), st.integers(0, DELAY_MS_MAX)),
            st.tuples(st.just(DELIVER_AT_HEADER), st.integers(0, NOW_MS + DELAY_MS_MAX)),
        ),
        min_size=1,
        max_size=20,
    ),
    CODECS,
)
def test_due_times_are_read_from_either_header(delays: list[tuple[str, int] | None], codec: Codec) -> None:
    records = [
        (
            NOW_MS + index,
            b"key%d" % index,
            b"mansio-de",
            () if delay is None else (("other", b"1"), (delay[0], b"%d" % delay[1])),
        )
        for index, delay in enumerate(delays)
    ]
    batch = build_batch(records, codec=codec)
    found = read_delays(InspectedBatch(batch), "t-0", NOW_MS)
    expected = [
        NOT_DELAYED_MS if delay is None else delay[1] + (NOW_MS if delay[0] == DELAY_HEADER else 0)
        for delay in delays
    ]
    if not any(delays):
        assert found is None
        return
    assert found is not None
    assert [*found.due_ms] == expected
    for index, record in enumerate(read_records(batch)):
        begin, end = found.bounds[index], found.bounds[index + 1]
        assert read_record_at(found.data, begin, end, found.header.base_timestamp_ms) == record[1:]


def test_a_delivered_record_is_not_delayed_again() -> None:
    headers = (("other", b"1"), (DELAY_HEADER, b"60000"))
    delivered = delivered_record((NOW_MS, b"key", b"value", headers), 17, NOW_MS + 60_000, NOW_MS + 60_005)
    assert delivered[:3] == (NOW_MS + 60_005, b"key", b"value")
    assert [*delivered[3]] == [
        ("other", b"1"),
        ("mansio-due-at-ms", b"%d" % (NOW_MS + 60_000)),
        ("mansio-original-timestamp-ms", b"%d" % NOW_MS),
        ("mansio-delayed-id", b"17"),
    ]
    assert read_delays(InspectedBatch(build_batch([delivered])), "t-0", NOW_MS) is None


@pytest.mark.parametrize(
    "headers",
    [
        ((DELAY_HEADER, b"abc"),),
        ((DELAY_HEADER, b"-5"),),
        ((DELAY_HEADER, b""),),
        ((DELAY_HEADER, None),),
        ((DELAY_HEADER, b"1.5"),),
        ((DELAY_HEADER, b"9" * 40),),
        ((DELAY_HEADER, b"%d" % (DELAY_MS_MAX + 1)),),
        ((DELIVER_AT_HEADER, b"%d" % (NOW_MS + DELAY_MS_MAX + 1)),),
        ((DELIVER_AT_HEADER, b"5"), (DELAY_HEADER, b"5")),
        ((DELAY_HEADER, b"5"), (DELAY_HEADER, b"5")),
    ],
)
def test_an_invalid_header_is_refused_with_the_index_of_its_record(headers: tuple) -> None:
    batch = build_batch([(NOW_MS, None, b"good", ()), (NOW_MS, None, b"bad", headers)])
    with pytest.raises(InvalidRecord) as caught:
        read_delays(InspectedBatch(batch), "t-0", NOW_MS)
    assert isinstance(caught.value, RequestError)
    assert [index for index, _ in caught.value.record_errors] == [1]
