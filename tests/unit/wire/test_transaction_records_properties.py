"""Records of `__transaction_state`: Kafka's formats, and nothing but CorruptLog for malformed bytes."""

from __future__ import annotations

import struct
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mansio.errors import CorruptLog
from mansio.wire.internal_records.transaction_records import (
    TransactionValue,
    decode_key,
    decode_value,
    encode_key,
    encode_value,
)

INT16 = st.integers(-(2**15), 2**15 - 1)
INT32 = st.integers(-(2**31), 2**31 - 1)
INT64 = st.integers(-(2**63), 2**63 - 1)
PARTITIONS = st.none() | st.lists(
    st.tuples(st.text(max_size=8), st.lists(INT32, max_size=4).map(tuple)), max_size=4
).map(tuple)
REQUIRED: dict[str, st.SearchStrategy[Any]] = {
    "producer_id": INT64,
    "producer_epoch": INT16,
    "timeout_ms": INT32,
    "status": st.integers(-128, 127),
    "partitions": PARTITIONS,
    "updated_ms": INT64,
    "started_ms": INT64,
}
TAGGED: dict[str, st.SearchStrategy[Any]] = {
    "previous_producer_id": INT64,
    "next_producer_id": INT64,
    "client_version": INT16,
    "next_producer_epoch": INT16,
    "last_producer_epoch": INT16,
    "held_ms": INT64,
}
BASE = st.fixed_dictionaries(REQUIRED).map(lambda fields: TransactionValue(**fields))
VALUES = st.fixed_dictionaries(REQUIRED, optional=TAGGED).map(lambda fields: TransactionValue(**fields))


@given(st.text(max_size=40))
def test_a_key_is_decoded_as_it_was_encoded(transactional_id: str) -> None:
    assert decode_key(encode_key(transactional_id)) == transactional_id


@given(VALUES)
def test_a_value_is_decoded_as_it_was_encoded(value: TransactionValue) -> None:
    assert decode_value(encode_value(value)) == value


@given(BASE)
def test_a_value_of_the_old_version_is_decoded_as_it_was_encoded(value: TransactionValue) -> None:
    assert decode_value(encode_value(value, 0)) == value


def test_the_old_version_has_the_bytes_of_kafka() -> None:
    value = TransactionValue(7, 3, 60_000, 1, (("t", (0, 5)),), 1_000, 900)
    assert encode_value(value, 0) == (
        struct.pack(">hqhib", 0, 7, 3, 60_000, 1)
        + struct.pack(">ih1siii", 1, 1, b"t", 2, 0, 5)
        + struct.pack(">qq", 1_000, 900)
    )
    assert encode_value(value._replace(partitions=None), 0)[-20:-16] == b"\xff\xff\xff\xff"


def test_the_flexible_version_has_the_bytes_of_kafka() -> None:
    value = TransactionValue(7, 3, 60_000, 4, (("t", (5,)),), 1_000, 900, 6, 8, 2)
    assert encode_value(value) == (
        struct.pack(">hqhib", 1, 7, 3, 60_000, 4)
        + b"\x02\x02t\x02"
        + struct.pack(">i", 5)
        + b"\x00"
        + struct.pack(">qq", 1_000, 900)
        + b"\x03\x00\x08"
        + struct.pack(">q", 6)
        + b"\x01\x08"
        + struct.pack(">q", 8)
        + b"\x02\x02\x00\x02"
    )


def test_an_unknown_key_version_is_skipped_and_an_unknown_value_version_is_not() -> None:
    assert decode_key(b"\x00\x01abc") is None
    with pytest.raises(CorruptLog, match="unknown value version 2"):
        decode_value(b"\x00\x02" + bytes(40))


def test_unknown_tagged_fields_are_skipped() -> None:
    value = TransactionValue(7, 3, 60_000, 0, None, 1_000, -1)
    encoded = encode_value(value)
    assert decode_value(encoded[:-1] + b"\x01\x63\x02ab") == value


@given(VALUES, st.data())
def test_malformed_bytes_raise_corrupt_log_and_nothing_else(
    value: TransactionValue, data: st.DataObject
) -> None:
    encoded = bytearray(encode_value(value, data.draw(st.sampled_from([0, 1]))))
    position = data.draw(st.integers(0, len(encoded) - 1))
    encoded[position] = data.draw(st.integers(0, 255))
    for damaged in (bytes(encoded), bytes(encoded[:position])):
        with suppress(CorruptLog):
            decode_value(damaged)
