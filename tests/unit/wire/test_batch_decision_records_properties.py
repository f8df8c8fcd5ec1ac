"""Records of decisions about batches: nothing but CorruptLog for malformed bytes, and skipped by Kafka's decoder."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mansio.errors import CorruptLog
from mansio.wire.internal_records.batch_decision_records import (
    ABORTING_TAG,
    DecisionValue,
    decode_decision_key,
    decode_decision_value,
    encode_decision_key,
    encode_decision_value,
)
from mansio.wire.internal_records.flexible_codec import Reader
from mansio.wire.internal_records.transaction_records import decode_key, encode_key

INT64 = st.integers(-(2**63), 2**63 - 1)
TRANSACTIONS = st.lists(
    st.tuples(st.text(max_size=8), INT64, st.integers(-(2**15), 2**15 - 1)), max_size=4
).map(tuple)
VALUES = st.builds(DecisionValue, INT64, INT64, TRANSACTIONS, TRANSACTIONS)


@given(st.text(max_size=40))
def test_a_key_is_decoded_as_it_was_encoded_and_only_by_its_own_decoder(name: str) -> None:
    assert decode_decision_key(encode_decision_key(name)) == name
    assert decode_key(encode_decision_key(name)) is None
    assert decode_decision_key(encode_key(name)) is None


@given(VALUES)
def test_a_value_is_decoded_as_it_was_encoded(value: DecisionValue) -> None:
    assert decode_decision_value(encode_decision_value(value)) == value


def test_values_without_aborted_transactions_are_read_and_written_as_before_there_were_any() -> None:
    before = bytes.fromhex("4e9100000000000000040000000000000007020261000000000000000900030000")
    value = DecisionValue(4, 7, (("a", 9, 3),))
    assert decode_decision_value(before) == value
    assert encode_decision_value(value) == before


def test_aborted_transactions_are_a_tagged_field_which_brokers_before_it_skip() -> None:
    value = DecisionValue(4, 7, (("a", 9, 3),))
    encoded = encode_decision_value(value._replace(aborting=(("b", 1, 2),)))
    head = encode_decision_value(value)[:-1]
    assert encoded.startswith(head)
    reader = Reader(encoded[len(head) :])
    assert list(reader.read_tagged_fields()) == [ABORTING_TAG]
    reader.check_end()


def test_an_unknown_version_is_an_error() -> None:
    with pytest.raises(CorruptLog, match="unknown version 1"):
        decode_decision_value(b"\x00\x01" + bytes(20))


@given(VALUES, st.data())
def test_malformed_bytes_raise_corrupt_log_and_nothing_else(
    value: DecisionValue, data: st.DataObject
) -> None:
    encoded = bytearray(encode_decision_value(value))
    position = data.draw(st.integers(0, len(encoded) - 1))
    encoded[position] = data.draw(st.integers(0, 255))
    for damaged in (bytes(encoded), bytes(encoded[:position])):
        with suppress(CorruptLog):
            decode_decision_value(damaged)
