"""The records of `__consumer_offsets`: round trips, Kafka's own bytes, and damage."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mansio.errors import CorruptLog
from mansio.wire.internal_records import offset_and_group_records as records

TEXT = st.text(max_size=20)
NULLABLE = st.none() | TEXT
INT32 = st.integers(-(2**31), 2**31 - 1)
INT64 = st.integers(-(2**63), 2**63 - 1)
MEMBERS = st.builds(
    records.MemberMetadata,
    TEXT,
    NULLABLE,
    TEXT,
    TEXT,
    INT32,
    INT32,
    st.binary(max_size=30),
    st.binary(max_size=30),
)
GROUPS = st.builds(
    records.GroupMetadata, TEXT, INT32, NULLABLE, NULLABLE, INT64, st.lists(MEMBERS, max_size=3).map(tuple)
)


@given(TEXT, TEXT, INT32, INT64, INT32, INT64)
def test_offsets_come_back_as_they_were(
    group: str, topic: str, partition: int, offset: int, epoch: int, commit_ms: int
) -> None:
    key = records.OffsetKey(group, topic, partition)
    assert records.decode_key(records.encode_offset_key(key)) == key
    value = records.CommittedOffset(offset, epoch, topic, commit_ms)
    assert records.decode_offset_value(records.encode_offset_value(value)) == value


@given(GROUPS)
def test_groups_come_back_as_they_were(group: records.GroupMetadata) -> None:
    assert records.decode_group_value(records.encode_group_value(group)) == group
    key = records.GroupKey(group.protocol_type)
    assert records.decode_key(records.encode_group_key(key)) == key


@given(st.binary(max_size=200), st.integers(0, 4))
def test_garbage_is_corrupt_log_and_nothing_else(body: bytes, version: int) -> None:
    data = version.to_bytes(2, "big") + body
    for decode in (records.decode_key, records.decode_offset_value, records.decode_group_value):
        try:
            decode(data)
        except CorruptLog:
            continue


@given(GROUPS, st.data())
def test_a_cut_value_is_never_a_shorter_group(group: records.GroupMetadata, data: st.DataObject) -> None:
    whole = records.encode_group_value(group)
    cut = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(CorruptLog):
        records.decode_group_value(whole[:cut])


def test_bytes_as_the_message_definitions_of_kafka_prescribe_them() -> None:
    """Written out by hand from OffsetCommitKey/Value.json and GroupMetadataKey/Value.json."""
    key = bytes.fromhex("0001 0001 67 0002 7431 00000003")
    assert records.decode_key(key) == records.OffsetKey("g", "t1", 3)
    assert records.encode_offset_key(records.OffsetKey("g", "t1", 3)) == key
    newest = bytes.fromhex("0003 000000000000002a 00000005 0001 6d 0000000000000064")
    assert records.decode_offset_value(newest) == records.CommittedOffset(42, 5, "m", 100)
    assert records.encode_offset_value(records.CommittedOffset(42, 5, "m", 100)) == newest
    with_expiry = bytes.fromhex("0001 000000000000002a 0000 0000000000000064 00000000000000c8")
    assert records.decode_offset_value(with_expiry) == records.CommittedOffset(42, -1, "", 100, 200)
    flexible = bytes.fromhex("0004 000000000000002a 00000005 02 6d 0000000000000064 01 00 10" + "ab" * 16)
    assert records.decode_offset_value(flexible) == records.CommittedOffset(42, 5, "m", 100)
    group = bytes.fromhex(
        "0003 0008 636f6e73756d6572 00000007 0005 72616e6765 0001 61 0000000000000064 00000001"
        "0001 61 ffff 0001 63 0002 2f68 00000bb8 00001770 00000001 01 00000002 0203"
    )
    member = records.MemberMetadata("a", None, "c", "/h", 3000, 6000, b"\x01", b"\x02\x03")
    expected = records.GroupMetadata("consumer", 7, "range", "a", 100, (member,))
    assert records.decode_group_value(group) == expected
    assert records.encode_group_value(expected) == group
    assert records.encode_group_key(records.GroupKey("g")) == bytes.fromhex("0002 0001 67")


def test_a_kind_of_key_from_the_future_is_left_alone() -> None:
    assert records.decode_key((3).to_bytes(2, "big") + b"whatever") is None
