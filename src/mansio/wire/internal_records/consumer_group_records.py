"""Codec of the records of consumer and share groups in `__consumer_offsets`, in Kafka's formats.

Record types 3 to 8 and 16 (consumer groups, KIP-848) and 10 to 15 (share groups, KIP-932), with the names of Kafka's
`CoordinatorRecordType`; older types are in `offset_and_group_records`. A key begins with its record type, 16 bits, and
is not flexible; a value begins with its version, always 0, and is flexible (KIP-482). A record without a value deletes
the entry of its key.

Invariants:
* Decoding an encoded value returns an equal value; unknown tagged fields are skipped.
* Decoding malformed bytes raises `CorruptLog` and nothing else.
* Partitions are written in order of topic id and index, so equal values have equal bytes.

Source: the ConsumerGroup*Key/Value.json and ShareGroup*Key/Value.json message definitions of Apache Kafka 4.3.
"""

from __future__ import annotations

from struct import pack
from typing import TYPE_CHECKING, Final, NamedTuple

from mansio.errors import CorruptLog
from mansio.wire.headers import unsigned_varint as varint
from mansio.wire.internal_records.flexible_codec import (
    NO_TAGGED_FIELDS,
    Reader,
    encode_array,
    encode_bytes,
    encode_integer,
    encode_string,
    encode_tagged_fields,
    raise_corrupt_log,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mansio.wire.topic_partition import TopicIdPartition


CONSUMER_GROUP_METADATA: Final = 3
CONSUMER_GROUP_PARTITION_METADATA: Final = 4  # read by its key only: brokers before 4.1 wrote it
CONSUMER_GROUP_MEMBER_METADATA: Final = 5
CONSUMER_GROUP_TARGET_ASSIGNMENT_METADATA: Final = 6
CONSUMER_GROUP_TARGET_ASSIGNMENT_MEMBER: Final = 7
CONSUMER_GROUP_CURRENT_MEMBER_ASSIGNMENT: Final = 8
SHARE_GROUP_MEMBER_METADATA: Final = 10
SHARE_GROUP_METADATA: Final = 11
SHARE_GROUP_TARGET_ASSIGNMENT_METADATA: Final = 12
SHARE_GROUP_TARGET_ASSIGNMENT_MEMBER: Final = 13
SHARE_GROUP_CURRENT_MEMBER_ASSIGNMENT: Final = 14
SHARE_GROUP_STATE_PARTITION_METADATA: Final = 15
CONSUMER_GROUP_REGULAR_EXPRESSION: Final = 16

CONSUMER_GROUP_RECORD_TYPES: Final = frozenset(
    {
        CONSUMER_GROUP_METADATA,
        CONSUMER_GROUP_PARTITION_METADATA,
        CONSUMER_GROUP_MEMBER_METADATA,
        CONSUMER_GROUP_TARGET_ASSIGNMENT_METADATA,
        CONSUMER_GROUP_TARGET_ASSIGNMENT_MEMBER,
        CONSUMER_GROUP_CURRENT_MEMBER_ASSIGNMENT,
        CONSUMER_GROUP_REGULAR_EXPRESSION,
    }
)
SHARE_GROUP_RECORD_TYPES: Final = frozenset(
    range(SHARE_GROUP_MEMBER_METADATA, SHARE_GROUP_STATE_PARTITION_METADATA + 1)
)
_RECORD_TYPES_WITH_ITEM: Final = frozenset(
    {
        CONSUMER_GROUP_MEMBER_METADATA,
        CONSUMER_GROUP_TARGET_ASSIGNMENT_MEMBER,
        CONSUMER_GROUP_CURRENT_MEMBER_ASSIGNMENT,
        SHARE_GROUP_MEMBER_METADATA,
        SHARE_GROUP_TARGET_ASSIGNMENT_MEMBER,
        SHARE_GROUP_CURRENT_MEMBER_ASSIGNMENT,
        CONSUMER_GROUP_REGULAR_EXPRESSION,
    }
)

_VERSION: Final = b"\x00\x00"
_ID_BYTES: Final = 16


class GroupRecordKey(NamedTuple):
    """Key of a record. `member_or_regex`: a member id, in type 16 a regular expression, "" in types with one record per
    group."""

    record_type: int
    group: str
    member_or_regex: str = ""


class GroupEpoch(NamedTuple):
    """Group epoch (value of types 3 and 11). `metadata_hash`: hash of the metadata of the subscribed topics; 0 if
    unknown."""

    epoch: int
    metadata_hash: int = 0


class ClassicMemberMetadata(NamedTuple):
    """What a consumer group stores about a member that uses the classic protocol. `protocols`: (name, metadata) of each
    embedded protocol."""

    session_timeout_ms: int
    protocols: tuple[tuple[str, bytes], ...]


class MemberMetadata(NamedTuple):
    """Member of a consumer group (value of type 5). `topic_regex`: None or "" if it has no regular expression."""

    instance_id: str | None
    rack_id: str | None
    client_id: str
    client_host: str
    topic_names: tuple[str, ...]
    topic_regex: str | None
    rebalance_timeout_ms: int
    assignor: str | None
    classic: ClassicMemberMetadata | None = None


class TargetEpoch(NamedTuple):
    """Epoch of the target assignment (value of types 6 and 12). `timestamp_ms`: wall-clock time at which the assignment
    was computed; 0 if unknown."""

    epoch: int
    timestamp_ms: int = 0


class CurrentAssignment(NamedTuple):
    """Current assignment of a member (value of types 8 and 14). `state`: number of its `MemberState`; `pending`:
    partitions that it has to revoke, not in type 14."""

    epoch: int
    previous_epoch: int
    state: int
    assigned: frozenset[TopicIdPartition]
    pending: frozenset[TopicIdPartition] = frozenset()


class ResolvedRegex(NamedTuple):
    """The topics that a regular expression matched (value of type 16), with the metadata version and the wall-clock
    time at which it was resolved."""

    topics: tuple[str, ...]
    version: int
    timestamp_ms: int


class ShareMember(NamedTuple):
    """Member of a share group (value of type 10)."""

    rack_id: str | None
    client_id: str
    client_host: str
    topic_names: tuple[str, ...]


class ShareStateTopic(NamedTuple):
    """A topic in `ShareStatePartitions`."""

    topic_id: bytes
    name: str
    partitions: tuple[int, ...] = ()


class ShareStatePartitions(NamedTuple):
    """State of a share group's partitions (value of type 15): partitions whose share state is being initialized or
    exists, and topics whose share state is being deleted."""

    initializing: tuple[ShareStateTopic, ...]
    initialized: tuple[ShareStateTopic, ...]
    deleting: tuple[ShareStateTopic, ...]


# ---------------------------------------------------------------------- keys


def encode_group_record_key(key: GroupRecordKey) -> bytes:
    strings = (key.group, key.member_or_regex) if key.record_type in _RECORD_TYPES_WITH_ITEM else (key.group,)
    encoded = [each.encode() for each in strings]
    return encode_integer(key.record_type, 2) + b"".join(
        encode_integer(len(each), 2) + each for each in encoded
    )


def decode_group_record_key(raw: bytes) -> GroupRecordKey | None:
    """Decode a key; None for a record type of neither consumer nor share groups."""
    reader = Reader(raw)
    kind = reader.read_integer(2)
    if kind not in CONSUMER_GROUP_RECORD_TYPES and kind not in SHARE_GROUP_RECORD_TYPES:
        return None
    key = GroupRecordKey(
        kind,
        reader.read_int16_string(),
        reader.read_int16_string() if kind in _RECORD_TYPES_WITH_ITEM else "",
    )
    reader.check_end()
    return key


# ---------------------------------------------------------------------- values of consumer groups


def encode_group_epoch(value: GroupEpoch) -> bytes:
    """Encode the value of a ConsumerGroupMetadata record (type 3)."""
    tagged = {0: encode_integer(value.metadata_hash, 8)} if value.metadata_hash else {}
    return _VERSION + encode_integer(value.epoch, 4) + encode_tagged_fields(tagged)


def decode_group_epoch(raw: bytes) -> GroupEpoch:
    reader = _value(raw)
    epoch = reader.read_integer(4)
    tagged = reader.read_tagged_fields()
    reader.check_end()
    return GroupEpoch(epoch, _tagged_integer(tagged.get(0)))


def encode_member_metadata(value: MemberMetadata) -> bytes:
    """Encode the value of a ConsumerGroupMemberMetadata record (type 5)."""
    tagged = {} if value.classic is None else {0: _classic(value.classic)}
    return b"".join(
        (
            _VERSION,
            encode_string(value.instance_id),
            encode_string(value.rack_id),
            encode_string(value.client_id),
            encode_string(value.client_host),
            encode_array(encode_string(each) for each in value.topic_names),
            encode_string(value.topic_regex),
            encode_integer(value.rebalance_timeout_ms, 4),
            encode_string(value.assignor),
            encode_tagged_fields(tagged),
        )
    )


def decode_member_metadata(raw: bytes) -> MemberMetadata:
    reader = _value(raw)
    instance_id, rack_id = reader.read_nullable_string(), reader.read_nullable_string()
    client_id, client_host = reader.read_string(), reader.read_string()
    topic_names = reader.read_array(reader.read_string)
    topic_regex = reader.read_nullable_string()
    rebalance_timeout_ms = reader.read_integer(4)
    assignor = reader.read_nullable_string()
    classic = reader.read_tagged_fields().get(0)
    reader.check_end()
    return MemberMetadata(
        instance_id,
        rack_id,
        client_id,
        client_host,
        topic_names,
        topic_regex,
        rebalance_timeout_ms,
        assignor,
        None if classic is None else _read_classic(classic),
    )


def encode_target_epoch(value: TargetEpoch) -> bytes:
    """Encode a value of type 6 or 12."""
    tagged = {0: encode_integer(value.timestamp_ms, 8)} if value.timestamp_ms else {}
    return _VERSION + encode_integer(value.epoch, 4) + encode_tagged_fields(tagged)


def decode_target_epoch(raw: bytes) -> TargetEpoch:
    reader = _value(raw)
    epoch = reader.read_integer(4)
    tagged = reader.read_tagged_fields()
    reader.check_end()
    return TargetEpoch(epoch, _tagged_integer(tagged.get(0)))


def encode_target_assignment(partitions: Iterable[TopicIdPartition]) -> bytes:
    """Encode a value of type 7 or 13: the partitions that a member should own."""
    return _VERSION + _partitions(partitions) + NO_TAGGED_FIELDS


def decode_target_assignment(raw: bytes) -> frozenset[TopicIdPartition]:
    reader = _value(raw)
    partitions = _read_partitions(reader)
    reader.read_tagged_fields()
    reader.check_end()
    return partitions


def encode_current_assignment(value: CurrentAssignment) -> bytes:
    """Encode the value of a ConsumerGroupCurrentMemberAssignment record (type 8)."""
    return _current(value) + _partitions(value.pending) + NO_TAGGED_FIELDS


def decode_current_assignment(raw: bytes) -> CurrentAssignment:
    return _read_current_assignment(raw, with_pending=True)


def encode_resolved_regex(value: ResolvedRegex) -> bytes:
    """Encode the value of a ConsumerGroupRegularExpression record (type 16)."""
    topics = encode_array(encode_string(each) for each in value.topics)
    return (
        _VERSION
        + topics
        + encode_integer(value.version, 8)
        + encode_integer(value.timestamp_ms, 8)
        + NO_TAGGED_FIELDS
    )


def decode_resolved_regex(raw: bytes) -> ResolvedRegex:
    reader = _value(raw)
    expression = ResolvedRegex(
        reader.read_array(reader.read_string), reader.read_integer(8), reader.read_integer(8)
    )
    reader.read_tagged_fields()
    reader.check_end()
    return expression


# ---------------------------------------------------------------------- values of share groups


def encode_share_member_metadata(value: ShareMember) -> bytes:
    """Encode the value of a ShareGroupMemberMetadata record (type 10)."""
    names = encode_array(encode_string(each) for each in value.topic_names)
    return (
        _VERSION
        + encode_string(value.rack_id)
        + encode_string(value.client_id)
        + encode_string(value.client_host)
        + names
        + NO_TAGGED_FIELDS
    )


def decode_share_member_metadata(raw: bytes) -> ShareMember:
    reader = _value(raw)
    member = ShareMember(
        reader.read_nullable_string(),
        reader.read_string(),
        reader.read_string(),
        reader.read_array(reader.read_string),
    )
    reader.read_tagged_fields()
    reader.check_end()
    return member


def encode_share_group_epoch(value: GroupEpoch) -> bytes:
    """Encode the value of a ShareGroupMetadata record (type 11)."""
    return (
        _VERSION + encode_integer(value.epoch, 4) + encode_integer(value.metadata_hash, 8) + NO_TAGGED_FIELDS
    )


def decode_share_group_epoch(raw: bytes) -> GroupEpoch:
    reader = _value(raw)
    value = GroupEpoch(reader.read_integer(4), reader.read_integer(8))
    reader.read_tagged_fields()
    reader.check_end()
    return value


def encode_share_current_assignment(value: CurrentAssignment) -> bytes:
    """Encode the value of a ShareGroupCurrentMemberAssignment record (type 14); `pending` is left out."""
    return _current(value) + NO_TAGGED_FIELDS


def decode_share_current_assignment(raw: bytes) -> CurrentAssignment:
    return _read_current_assignment(raw, with_pending=False)


def encode_state_partitions(value: ShareStatePartitions) -> bytes:
    """Encode the value of a ShareGroupStatePartitionMetadata record (type 15)."""
    with_partitions = [
        encode_array(
            each.topic_id
            + encode_string(each.name)
            + encode_array(encode_integer(index, 4) for index in each.partitions)
            + NO_TAGGED_FIELDS
            for each in topics
        )
        for topics in (value.initializing, value.initialized)
    ]
    deleting = encode_array(
        each.topic_id + encode_string(each.name) + NO_TAGGED_FIELDS for each in value.deleting
    )
    return _VERSION + with_partitions[0] + with_partitions[1] + deleting + NO_TAGGED_FIELDS


def decode_state_partitions(raw: bytes) -> ShareStatePartitions:
    reader = _value(raw)

    def topic() -> ShareStateTopic:
        read = ShareStateTopic(reader.take(_ID_BYTES), reader.read_string(), reader.read_int32_array())
        reader.read_tagged_fields()
        return read

    def topic_alone() -> ShareStateTopic:
        read = ShareStateTopic(reader.take(_ID_BYTES), reader.read_string())
        reader.read_tagged_fields()
        return read

    value = ShareStatePartitions(
        reader.read_array(topic), reader.read_array(topic), reader.read_array(topic_alone)
    )
    reader.read_tagged_fields()
    reader.check_end()
    return value


# ---------------------------------------------------------------------- parts


def _value(raw: bytes) -> Reader:
    reader = Reader(raw)
    if (version := reader.read_integer(2)) != 0:
        raise_corrupt_log(f"unknown value version {version}")
    return reader


def _tagged_integer(raw: bytes | None) -> int:
    if raw is not None and len(raw) != 8:
        raise CorruptLog("__consumer_offsets: a tagged field has a wrong length")
    return 0 if raw is None else int.from_bytes(raw, "big", signed=True)


def _partitions(partitions: Iterable[TopicIdPartition]) -> bytes:
    by_topic: dict[bytes, list[int]] = {}
    for topic_id, index in partitions:
        by_topic.setdefault(topic_id, []).append(index)
    return encode_array(
        topic_id + varint(len(indexes) + 1) + pack(f">{len(indexes)}i", *sorted(indexes)) + NO_TAGGED_FIELDS
        for topic_id, indexes in sorted(by_topic.items())
    )


def _read_partitions(reader: Reader) -> frozenset[TopicIdPartition]:
    def topic() -> list[TopicIdPartition]:
        topic_id = reader.take(_ID_BYTES)
        found = [(topic_id, index) for index in reader.read_int32_array()]
        reader.read_tagged_fields()
        return found

    return frozenset(each for topic in reader.read_array(topic) for each in topic)


def _current(value: CurrentAssignment) -> bytes:
    epochs = encode_integer(value.epoch, 4) + encode_integer(value.previous_epoch, 4)
    return _VERSION + epochs + encode_integer(value.state, 1) + _partitions(value.assigned)


def _read_current_assignment(raw: bytes, *, with_pending: bool) -> CurrentAssignment:
    reader = _value(raw)
    epoch, previous_epoch, state = reader.read_integer(4), reader.read_integer(4), reader.read_integer(1)
    assigned = _read_partitions(reader)
    pending = _read_partitions(reader) if with_pending else frozenset()
    reader.read_tagged_fields()
    reader.check_end()
    return CurrentAssignment(epoch, previous_epoch, state, assigned, pending)


def _classic(value: ClassicMemberMetadata) -> bytes:
    protocols = encode_array(
        encode_string(name) + encode_bytes(metadata) + NO_TAGGED_FIELDS for name, metadata in value.protocols
    )
    return encode_integer(value.session_timeout_ms, 4) + protocols + NO_TAGGED_FIELDS


def _read_classic(raw: bytes) -> ClassicMemberMetadata:
    reader = Reader(raw)

    def protocol() -> tuple[str, bytes]:
        read = (reader.read_string(), reader.read_bytes())
        reader.read_tagged_fields()
        return read

    value = ClassicMemberMetadata(reader.read_integer(4), reader.read_array(protocol))
    reader.read_tagged_fields()
    reader.check_end()
    return value
