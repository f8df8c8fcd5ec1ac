"""Control batches with deduplication ids, and the header with which producers give a record an id."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mansio.broker.features.deduplication.dedup_control_records import (
    AcceptedIds,
    CopiedIds,
    DedupControlType,
    decode_dedup_control,
    encode_copied_ids,
    encode_ids,
    encode_repeated,
)
from mansio.broker.features.delays.delay_control_records import encode_cancelled
from mansio.errors import CorruptMessage, InvalidRecord, MessageTooLarge, RequestError
from mansio.wire.batch import dedup_header
from mansio.wire.batch.compression import Codec
from mansio.wire.batch.control_records import control_key, encode_control_batch
from mansio.wire.batch.dedup_header import DEDUP_ID_HEADER, DEDUP_ID_NAME, key_of, read_ids
from mansio.wire.batch.inspection import InspectedBatch
from mansio.wire.batch.record_batch import build_batch, check_batch, read_header

if TYPE_CHECKING:
    from mansio.wire.batch.record_batch import NewRecord

KEYS = st.lists(st.binary(min_size=16, max_size=16), min_size=1, max_size=20)
CODECS = st.sampled_from(list(Codec))
NOW_MS = 1_800_000_000_000


@given(KEYS, st.integers(0, 2**62), st.integers(0, 2**32 - 1))
def test_ids_are_decoded_as_they_were_encoded(keys: list[bytes], time_ms: int, crc: int) -> None:
    accepted = decode_dedup_control(encode_ids(AcceptedIds(keys, range(len(keys)), time_ms, crc)))
    assert isinstance(accepted, AcceptedIds)
    assert accepted[2:] == (time_ms, crc)
    assert ([*accepted.keys], [*accepted.positions]) == (keys, [*range(len(keys))])
    offsets, times_ms = [time_ms + at for at in range(len(keys))], [time_ms - at for at in range(len(keys))]
    copied = decode_dedup_control(encode_copied_ids(CopiedIds(keys, offsets, times_ms, time_ms, crc)))
    assert isinstance(copied, CopiedIds)
    assert ([*copied.keys], [*copied.offsets], [*copied.accepted_ms]) == (keys, offsets, times_ms)
    assert (copied.first_copy, copied.until_ms) == (time_ms, crc)


def test_repeats_end_with_the_sequence_of_the_producers_batch() -> None:
    batch = build_batch(
        [(NOW_MS, None, b"x", ())] * 5, producer_id=7, producer_epoch=3, base_sequence=2**31 - 3
    )
    control = encode_repeated(read_header(batch))
    header = check_batch(control)
    assert header.is_control
    assert (header.producer_id, header.producer_epoch, header.base_sequence) == (7, 3, 1)
    assert decode_dedup_control(control) is None


def test_control_batches_of_other_kinds_are_ignored() -> None:
    assert decode_dedup_control(encode_cancelled([1, 2])) is None
    assert {*DedupControlType} == {20011, 20012, 20013}, "stored in logs"


@given(st.data(), KEYS)
def test_damaged_content_raises_a_typed_error(data: st.DataObject, keys: list[bytes]) -> None:
    batch = bytearray(encode_ids(AcceptedIds(keys, range(len(keys)), NOW_MS, 5)))
    for _ in range(data.draw(st.integers(1, 3))):
        batch[data.draw(st.integers(61, len(batch) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(CorruptMessage):
        decode_dedup_control(bytes(batch[: data.draw(st.integers(61, len(batch)))]))


def record(value: bytes, *ids: bytes | None) -> NewRecord:
    return NOW_MS, b"key", value, [("other", b"x"), *((DEDUP_ID_HEADER, one) for one in ids)]


@given(st.lists(st.none() | st.binary(min_size=1, max_size=128), min_size=1, max_size=30), CODECS)
def test_ids_are_read_from_batches_of_any_codec(ids: list[bytes | None], codec: Codec) -> None:
    records = [
        record(DEDUP_ID_HEADER.encode(), *(() if one is None else (one,))) for one in ids
    ]  # the name of the header may be in a value, too
    found = read_ids(InspectedBatch(build_batch(records, codec=codec), (DEDUP_ID_NAME,)), "t-0")
    expected = [None if one is None else key_of(one) for one in ids]
    assert (None if found is None else [*found.keys]) == (expected if any(expected) else None)


def test_invalid_ids_are_reported_by_their_records() -> None:
    records = [record(b"", b"x"), record(b"", b""), record(b""), record(b"", b"y", b"z"), record(b"", None)]
    with pytest.raises(InvalidRecord, match="record 1 of the batch") as raised:
        read_ids(InspectedBatch(build_batch(records), (DEDUP_ID_NAME,)), "t-0")
    assert [index for index, _ in raised.value.record_errors] == [1, 3, 4]
    with pytest.raises(InvalidRecord, match="1 to 128 bytes"):
        read_ids(InspectedBatch(build_batch([record(b"", bytes(129))]), (DEDUP_ID_NAME,)), "t-0")


def test_too_many_records_with_ids_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dedup_header, "DEDUP_BATCH_RECORDS_MAX", 2)
    assert read_ids(InspectedBatch(build_batch([record(b"")] * 3), (DEDUP_ID_NAME,)), "t-0") is None
    with pytest.raises(MessageTooLarge):
        read_ids(
            InspectedBatch(
                build_batch([record(b"", b"1"), record(b"", b"2"), record(b"", b"3")]), (DEDUP_ID_NAME,)
            ),
            "t-0",
        )


@given(st.data(), CODECS)
def test_malformed_batches_are_refused_by_a_request_error(data: st.DataObject, codec: Codec) -> None:
    batch = bytearray(build_batch([record(b"value", b"%d" % number) for number in range(3)], codec=codec))
    for _ in range(data.draw(st.integers(1, 4))):
        batch[data.draw(st.integers(61, len(batch) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(RequestError):
        read_ids(InspectedBatch(bytes(batch), (DEDUP_ID_NAME,)), "t-0")


@given(st.integers(0, 32767), st.binary(max_size=300))
def test_control_batch_is_encoded_as_other_batches(record_type: int, value: bytes) -> None:
    expected = build_batch([(-1, control_key(record_type), value, ())], control=True)
    assert encode_control_batch(record_type, value) == expected
