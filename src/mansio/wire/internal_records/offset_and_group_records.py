"""Codec of the records of committed offsets and classic groups in `__consumer_offsets`, in Kafka's formats.

A key is that of a committed offset (key version 0 or 1: group, topic, partition) or of a classic group (key version 2:
group); newer types of records are in `consumer_group_records`. A record without a value deletes the entry of its key.

Invariants:
* Decoding an encoded key or value returns an equal one. Version 3 of both values is written, because all recent Kafka
  tools read it; versions 0 to 4 are read.
* Decoding malformed bytes raises `CorruptLog` and nothing else, because they come from the broker's own log.

Source: OffsetCommitKey/Value.json and GroupMetadataKey/Value.json of Apache Kafka; version 4 is the flexible one
(KIP-915).
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

from mansio.wire.internal_records.flexible_codec import Reader

OFFSET_KEY_VERSION: Final = 1
GROUP_KEY_VERSION: Final = 2
VALUE_VERSION: Final = 3
_VALUE_VERSION_NEWEST: Final = 4
_FLEXIBLE: Final = 4


class OffsetKey(NamedTuple):
    """Key of a committed offset."""

    group: str
    topic: str
    partition: int


class GroupKey(NamedTuple):
    """Key of the record of a classic group."""

    group: str


class CommittedOffset(NamedTuple):
    """A committed offset: the next offset to read. `leader_epoch` is -1 if unknown; times are of the wall clock.
    `expire_ms` is -1 except in records of old Kafka brokers (value version 1)."""

    offset: int
    leader_epoch: int
    metadata: str
    commit_ms: int
    expire_ms: int = -1


class MemberMetadata(NamedTuple):
    """A member of a stored classic group. `subscription` and `assignment` are bytes that clients encoded."""

    member_id: str
    instance_id: str | None
    client_id: str
    client_host: str
    rebalance_timeout_ms: int
    session_timeout_ms: int
    subscription: bytes
    assignment: bytes


class GroupMetadata(NamedTuple):
    """A classic group after its last completed rebalance. `state_ms`: wall-clock time at which its state changed last,
    -1 if unknown."""

    protocol_type: str
    generation: int
    protocol: str | None
    leader: str | None
    state_ms: int
    members: tuple[MemberMetadata, ...]


def encode_offset_key(key: OffsetKey) -> bytes:
    return (
        OFFSET_KEY_VERSION.to_bytes(2, "big")
        + _encode_string(key.group)
        + _encode_string(key.topic)
        + struct.pack(">i", key.partition)
    )


def encode_group_key(key: GroupKey) -> bytes:
    return GROUP_KEY_VERSION.to_bytes(2, "big") + _encode_string(key.group)


def encode_offset_value(value: CommittedOffset) -> bytes:
    return b"".join(
        (
            struct.pack(">hqi", VALUE_VERSION, value.offset, value.leader_epoch),
            _encode_string(value.metadata),
            struct.pack(">q", value.commit_ms),
        )
    )


def encode_group_value(value: GroupMetadata) -> bytes:
    parts = [
        VALUE_VERSION.to_bytes(2, "big"),
        _encode_string(value.protocol_type),
        struct.pack(">i", value.generation),
        _encode_string(value.protocol),
        _encode_string(value.leader),
        struct.pack(">qi", value.state_ms, len(value.members)),
    ]
    for member in value.members:
        parts += (
            _encode_string(member.member_id),
            _encode_string(member.instance_id),
            _encode_string(member.client_id),
            _encode_string(member.client_host),
            struct.pack(">ii", member.rebalance_timeout_ms, member.session_timeout_ms),
            _encode_bytes(member.subscription),
            _encode_bytes(member.assignment),
        )
    return b"".join(parts)


def decode_key(data: bytes) -> OffsetKey | GroupKey | None:
    """Decode a key; None for an unknown key version, whose record callers skip, as in Kafka."""
    reader = Reader(data, is_flexible=False)
    version = reader.read_integer(2)
    if version in (0, OFFSET_KEY_VERSION):
        key: OffsetKey | GroupKey = OffsetKey(
            reader.read_string(), reader.read_string(), reader.read_integer(4)
        )
    elif version == GROUP_KEY_VERSION:
        key = GroupKey(reader.read_string())
    else:
        return None
    reader.check_end()
    return key


def decode_offset_value(data: bytes) -> CommittedOffset:
    reader, version = _value_reader(data)
    offset = reader.read_integer(8)
    leader_epoch = reader.read_integer(4) if version >= 3 else -1
    metadata = reader.read_string()
    commit_ms = reader.read_integer(8)
    expire_ms = reader.read_integer(8) if version == 1 else -1
    reader.read_tagged_fields()
    reader.check_end()
    return CommittedOffset(offset, leader_epoch, metadata, commit_ms, expire_ms)


def decode_group_value(data: bytes) -> GroupMetadata:
    reader, version = _value_reader(data)
    protocol_type = reader.read_string()
    generation = reader.read_integer(4)
    protocol = reader.read_nullable_string()
    leader = reader.read_nullable_string()
    state_ms = reader.read_integer(8) if version >= 2 else -1
    members = reader.read_array(lambda: _read_member(reader, version))
    reader.read_tagged_fields()
    reader.check_end()
    return GroupMetadata(protocol_type, generation, protocol, leader, state_ms, members)


def _value_reader(data: bytes) -> tuple[Reader, int]:
    """Return a reader of a value, behind its version, and the version."""
    reader = Reader(data, is_flexible=False)
    version = reader.read_integer(2)
    if not 0 <= version <= _VALUE_VERSION_NEWEST:
        reader.raise_corrupt_log(f"unknown value version {version}")
    reader.is_flexible = version >= _FLEXIBLE
    return reader, version


def _read_member(reader: Reader, version: int) -> MemberMetadata:
    member_id = reader.read_string()
    instance_id = reader.read_nullable_string() if version >= 3 else None
    client_id, client_host = reader.read_string(), reader.read_string()
    rebalance_timeout_ms = reader.read_integer(4) if version >= 1 else -1
    session_timeout_ms = reader.read_integer(4)
    member = MemberMetadata(
        member_id,
        instance_id,
        client_id,
        client_host,
        rebalance_timeout_ms if version >= 1 else session_timeout_ms,
        session_timeout_ms,
        reader.read_bytes(),
        reader.read_bytes(),
    )
    reader.read_tagged_fields()
    return member


def _encode_string(text: str | None) -> bytes:
    if text is None:
        return b"\xff\xff"
    data = text.encode()
    return len(data).to_bytes(2, "big", signed=True) + data


def _encode_bytes(data: bytes) -> bytes:
    return len(data).to_bytes(4, "big", signed=True) + data
