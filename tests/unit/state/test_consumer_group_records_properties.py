"""The records of consumer and share groups: Kafka's own bytes, round trips, and damage."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mansio.errors import CorruptLog
from mansio.wire.internal_records import consumer_group_records as records
from mansio.wire.internal_records import offset_and_group_records

if TYPE_CHECKING:
    from collections.abc import Callable

TEXT = st.text(max_size=12)
NULLABLE = st.none() | TEXT
INT32 = st.integers(-(2**31), 2**31 - 1)
INT64 = st.integers(-(2**63), 2**63 - 1)
NAMES = st.lists(TEXT, max_size=3).map(tuple)
TOPIC_IDS = st.binary(min_size=16, max_size=16)
PARTITIONS = st.frozensets(st.tuples(TOPIC_IDS, INT32), max_size=4)
PROTOCOLS = st.lists(st.tuples(TEXT, st.binary(max_size=9)), max_size=2).map(tuple)
CLASSIC = st.none() | st.builds(records.ClassicMemberMetadata, INT32, PROTOCOLS)
STATE_TOPICS = st.lists(
    st.builds(records.ShareStateTopic, TOPIC_IDS, TEXT, st.lists(INT32, max_size=3).map(tuple)), max_size=2
).map(tuple)
DELETING = st.lists(
    st.tuples(TOPIC_IDS, TEXT).map(lambda each: records.ShareStateTopic(*each)), max_size=2
).map(tuple)
MEMBERS = st.builds(
    records.MemberMetadata, NULLABLE, NULLABLE, TEXT, TEXT, NAMES, NULLABLE, INT32, NULLABLE, CLASSIC
)
CURRENT = st.builds(records.CurrentAssignment, INT32, INT32, st.integers(-128, 127), PARTITIONS, PARTITIONS)

Case = tuple[Any, Any, Any]
VALUES: dict[str, Case] = {
    "group epoch": (
        st.builds(records.GroupEpoch, INT32, INT64),
        records.encode_group_epoch,
        records.decode_group_epoch,
    ),
    "member": (MEMBERS, records.encode_member_metadata, records.decode_member_metadata),
    "target epoch": (
        st.builds(records.TargetEpoch, INT32, INT64),
        records.encode_target_epoch,
        records.decode_target_epoch,
    ),
    "target": (PARTITIONS, records.encode_target_assignment, records.decode_target_assignment),
    "current": (CURRENT, records.encode_current_assignment, records.decode_current_assignment),
    "expression": (
        st.builds(records.ResolvedRegex, NAMES, INT64, INT64),
        records.encode_resolved_regex,
        records.decode_resolved_regex,
    ),
    "share member": (
        st.builds(records.ShareMember, NULLABLE, TEXT, TEXT, NAMES),
        records.encode_share_member_metadata,
        records.decode_share_member_metadata,
    ),
    "share group epoch": (
        st.builds(records.GroupEpoch, INT32, INT64),
        records.encode_share_group_epoch,
        records.decode_share_group_epoch,
    ),
    "share current": (
        CURRENT.map(lambda each: each._replace(pending=frozenset())),
        records.encode_share_current_assignment,
        records.decode_share_current_assignment,
    ),
    "state partitions": (
        st.builds(records.ShareStatePartitions, STATE_TOPICS, STATE_TOPICS, DELETING),
        records.encode_state_partitions,
        records.decode_state_partitions,
    ),
}
KINDS = sorted(records.CONSUMER_GROUP_RECORD_TYPES | records.SHARE_GROUP_RECORD_TYPES)
OF_MEMBERS = {5, 7, 8, 10, 13, 14, 16}


@pytest.mark.parametrize("case", VALUES.values(), ids=VALUES)
@given(data=st.data())
def test_values_come_back_as_they_were_and_a_cut_one_never_is_a_shorter_one(
    case: Case, data: st.DataObject
) -> None:
    values, encode, decode = case
    value = data.draw(values)
    whole = encode(value)
    assert decode(whole) == value
    with pytest.raises(CorruptLog):
        decode(whole[: data.draw(st.integers(0, len(whole) - 1))])
    with pytest.raises(CorruptLog):
        decode(whole + b"\x00")


@given(st.sampled_from(KINDS), TEXT, TEXT)
def test_keys_come_back_as_they_were(kind: int, group: str, item: str) -> None:
    key = records.GroupRecordKey(kind, group, item if kind in OF_MEMBERS else "")
    raw = records.encode_group_record_key(key)
    assert records.decode_group_record_key(raw) == key
    assert offset_and_group_records.decode_key(raw) is None, "the older kinds claim it, too"
    for cut in (2, len(raw) // 2, len(raw) - 1):
        with pytest.raises(CorruptLog):
            records.decode_group_record_key(raw[:cut])


@given(st.binary(max_size=120), st.booleans())
def test_garbage_is_corrupt_log_and_nothing_else(body: bytes, versioned: bool) -> None:
    decoders: list[Callable[[bytes], Any]] = [each[2] for each in VALUES.values()]
    for decode in [*decoders, records.decode_group_record_key]:
        try:
            decode(b"\x00\x00" + body if versioned else body)
        except CorruptLog:
            continue


@pytest.mark.parametrize("kind", [0, 1, 2, 9, 17, 999])
def test_keys_of_other_kinds_are_left_alone(kind: int) -> None:
    assert records.decode_group_record_key(kind.to_bytes(2, "big") + b"whatever") is None


A, B = bytes(15) + b"\x0a", bytes(15) + b"\x0b"
HEX_A, HEX_B = "00" * 15 + "0a", "00" * 15 + "0b"

GOLDEN: list[tuple[str, Any, Any]] = [
    # version, epoch, no tags: a hash of 0 is left out
    ("0000 00000007 00", records.GroupEpoch(7), "group epoch"),
    # one tagged field: tag 0, 8 bytes
    ("0000 00000007 01 00 08 00000000000000ff", records.GroupEpoch(7, 255), "group epoch"),
    (
        "0000 02 69 00 02 63 03 2f68 03 02 61 02 62 00 00001388 08 756e69666f726d 00",
        records.MemberMetadata("i", None, "c", "/h", ("a", "b"), None, 5000, "uniform"),
        "member",
    ),
    # the tagged field holds: session timeout, one protocol (name, bytes, tags), tags
    (
        "0000 00 02 72 02 63 03 2f68 01 03 5e61 ffffffff 00 01 00 0c 00001770 02 02 70 03 0102 00 00",
        records.MemberMetadata(
            None,
            "r",
            "c",
            "/h",
            (),
            "^a",
            -1,
            None,
            records.ClassicMemberMetadata(6000, (("p", b"\x01\x02"),)),
        ),
        "member",
    ),
    ("0000 00000003 00", records.TargetEpoch(3), "target epoch"),
    ("0000 00000003 01 00 08 0000000000000064", records.TargetEpoch(3, 100), "target epoch"),
    (
        f"0000 03 {HEX_A} 03 00000000 00000002 00 {HEX_B} 02 00000001 00 00",
        frozenset({(A, 0), (A, 2), (B, 1)}),
        "target",
    ),
    ("0000 01 00", frozenset(), "target"),
    (
        f"0000 00000005 00000004 01 02 {HEX_A} 02 00000000 00 02 {HEX_B} 02 00000001 00 00",
        records.CurrentAssignment(5, 4, 1, frozenset({(A, 0)}), frozenset({(B, 1)})),
        "current",
    ),
    (
        "0000 02 02 61 0000000000000009 0000000000000064 00",
        records.ResolvedRegex(("a",), 9, 100),
        "expression",
    ),
    ("0000 00 02 63 03 2f68 02 02 61 00", records.ShareMember(None, "c", "/h", ("a",)), "share member"),
    # here the hash is an ordinary field
    ("0000 00000007 00000000000000ff 00", records.GroupEpoch(7, 255), "share group epoch"),
    (
        f"0000 00000005 00000004 00 02 {HEX_A} 02 00000000 00 00",
        records.CurrentAssignment(5, 4, 0, frozenset({(A, 0)})),
        "share current",
    ),
    (
        f"0000 02 {HEX_A} 02 61 02 00000001 00 01 02 {HEX_B} 02 62 00 00",
        records.ShareStatePartitions(
            (records.ShareStateTopic(A, "a", (1,)),), (), (records.ShareStateTopic(B, "b"),)
        ),
        "state partitions",
    ),
]


@pytest.mark.parametrize(("golden", "value", "case"), GOLDEN)
def test_bytes_as_the_message_definitions_of_kafka_prescribe_them(golden: str, value: Any, case: str) -> None:
    _, encode, decode = VALUES[case]
    raw = bytes.fromhex(golden)
    assert decode(raw) == value
    assert encode(value) == raw
    for cut in range(len(raw)):
        with pytest.raises(CorruptLog):
            decode(raw[:cut])


def test_keys_as_the_message_definitions_of_kafka_prescribe_them() -> None:
    of_group = bytes.fromhex("0003 0001 67")
    assert records.encode_group_record_key(records.GroupRecordKey(3, "g")) == of_group
    of_member = bytes.fromhex("0008 0001 67 0002 6d31")
    assert records.encode_group_record_key(records.GroupRecordKey(8, "g", "m1")) == of_member
    assert records.decode_group_record_key(of_member) == records.GroupRecordKey(8, "g", "m1")


def test_what_newer_brokers_add_is_skipped() -> None:
    """Assignment epochs (tag 0 of a topic in kind 8), and an unknown field."""
    raw = bytes.fromhex(
        f"0000 00000005 00000004 00 02 {HEX_A} 02 00000000 01 00 05 02 00000005 01 01 63 02 abcd"
    )
    assert records.decode_current_assignment(raw) == records.CurrentAssignment(5, 4, 0, frozenset({(A, 0)}))


@pytest.mark.parametrize(
    "damaged",
    [
        "0001 00000007 00",  # a version from the future
        "0000 00000007 02 00 08 00000000000000ff 00 08 00000000000000ff",  # a tag twice
        "0000 00000007 01 00 04 000000ff",  # a hash of four bytes
        "0000 00000007 01 00 ffffffffffff",  # a length without an end
    ],
)
def test_damage_is_named(damaged: str) -> None:
    with pytest.raises(CorruptLog, match="__consumer_offsets"):
        records.decode_group_epoch(bytes.fromhex(damaged))
