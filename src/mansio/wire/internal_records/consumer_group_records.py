"""Records of consumer and share groups in `__consumer_offsets`, in Kafka's formats.

Record kinds 3 to 8 and 16 (consumer groups, KIP-848) and 10 to 15 (share groups, KIP-932); the older kinds are in
`offset_and_group_records`. A key begins with its kind, 16 bits, and is not flexible; a value begins with its version,
always 0, and is flexible. A record without a value deletes the entry of its key.

Invariants:
* `decode_*` returns what `encode_*` was given; unknown tagged fields are skipped.
* Malformed bytes raise `CorruptLog` and nothing else.
* Partitions are written in order of topic id and index, so equal values have equal bytes.

Source: the ConsumerGroup*Key/Value.json and ShareGroup*Key/Value.json message definitions of Apache Kafka 4.3.
"""

from __future__ import annotations

from struct import pack
from typing import TYPE_CHECKING, Final, NamedTuple

from mansio.errors import CorruptLog
from mansio.wire.headers import unsigned_varint as varint
from mansio.wire.internal_records.flexible_codec import (
    NO_TAGS,
    Reader,
    array,
    data,
    fail,
    integer,
    tags,
    text,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

TopicPartition = tuple[bytes, int]
"""A partition: the 16 bytes of the topic id, and the partition index."""

GROUP_EPOCH: Final = 3
PARTITION_METADATA: Final = 4  # read by its key only: brokers before 4.1 wrote it
MEMBER: Final = 5
TARGET_EPOCH: Final = 6
TARGET: Final = 7
CURRENT: Final = 8
SHARE_MEMBER: Final = 10
SHARE_GROUP_EPOCH: Final = 11
SHARE_TARGET_EPOCH: Final = 12
SHARE_TARGET: Final = 13
SHARE_CURRENT: Final = 14
SHARE_STATE_PARTITIONS: Final = 15
REGEX: Final = 16

CONSUMER_KINDS: Final = frozenset(
    {GROUP_EPOCH, PARTITION_METADATA, MEMBER, TARGET_EPOCH, TARGET, CURRENT, REGEX}
)
SHARE_KINDS: Final = frozenset(range(SHARE_MEMBER, SHARE_STATE_PARTITIONS + 1))
_KINDS_WITH_ITEM: Final = frozenset(
    {MEMBER, TARGET, CURRENT, SHARE_MEMBER, SHARE_TARGET, SHARE_CURRENT, REGEX}
)

_VERSION: Final = b"\x00\x00"
_ID_BYTES: Final = 16


class GroupRecordKey(NamedTuple):
    """Key of a record. `item`: a member id, the expression of kind 16, or "" for kinds of the whole group."""

    kind: int
    group: str
    item: str = ""


class GroupEpoch(NamedTuple):
    """Kinds 3 and 11. `metadata_hash`: hash of the subscribed topics; 0 if unknown."""

    epoch: int
    metadata_hash: int = 0


class ClassicMetadata(NamedTuple):
    """Classic protocol of a member of a consumer group: (name, metadata) of each embedded protocol."""

    session_timeout_ms: int
    protocols: tuple[tuple[str, bytes], ...]


class MemberMetadata(NamedTuple):
    """Kind 5. `topic_regex` is None or "" without one."""

    instance_id: str | None
    rack_id: str | None
    client_id: str
    client_host: str
    topic_names: tuple[str, ...]
    topic_regex: str | None
    rebalance_timeout_ms: int
    assignor: str | None
    classic: ClassicMetadata | None = None


class TargetEpoch(NamedTuple):
    """Kinds 6 and 12. `timestamp_ms`: wall-clock time at which it was computed; 0 if unknown."""

    epoch: int
    timestamp_ms: int = 0


class CurrentAssignment(NamedTuple):
    """Kinds 8 and 14 (which has no `pending`). `state`: the numbers of `MemberState`."""

    epoch: int
    previous_epoch: int
    state: int
    assigned: frozenset[TopicPartition]
    pending: frozenset[TopicPartition] = frozenset()


class ResolvedRegex(NamedTuple):
    """Kind 16: the topics that a regular expression matched, the metadata version and the wall-clock time (ms)."""

    topics: tuple[str, ...]
    version: int
    timestamp_ms: int


class ShareMember(NamedTuple):
    """Value of a record of kind 10."""

    rack_id: str | None
    client_id: str
    client_host: str
    topic_names: tuple[str, ...]


class StateTopic(NamedTuple):
    """A topic of kind 15."""

    topic_id: bytes
    name: str
    partitions: tuple[int, ...] = ()


class StatePartitions(NamedTuple):
    """Kind 15: share partitions with state or being initialized; topics whose state is being deleted."""

    initializing: tuple[StateTopic, ...]
    initialized: tuple[StateTopic, ...]
    deleting: tuple[StateTopic, ...]


# ---------------------------------------------------------------------- keys


def encode_group_record_key(key: GroupRecordKey) -> bytes:
    strings = (key.group, key.item) if key.kind in _KINDS_WITH_ITEM else (key.group,)
    encoded = [each.encode() for each in strings]
    return integer(key.kind, 2) + b"".join(integer(len(each), 2) + each for each in encoded)


def decode_group_record_key(raw: bytes) -> GroupRecordKey | None:
    """Decode a key; None for a kind that belongs to neither consumer nor share groups."""
    reader = Reader(raw)
    kind = reader.integer(2)
    if kind not in CONSUMER_KINDS and kind not in SHARE_KINDS:
        return None
    key = GroupRecordKey(kind, reader.short_text(), reader.short_text() if kind in _KINDS_WITH_ITEM else "")
    reader.end()
    return key


# ---------------------------------------------------------------------- values of consumer groups


def encode_group_epoch(value: GroupEpoch) -> bytes:
    """Value of a record of kind 3."""
    tagged = {0: integer(value.metadata_hash, 8)} if value.metadata_hash else {}
    return _VERSION + integer(value.epoch, 4) + tags(tagged)


def decode_group_epoch(raw: bytes) -> GroupEpoch:
    reader = _value(raw)
    epoch = reader.integer(4)
    tagged = reader.tags()
    reader.end()
    return GroupEpoch(epoch, _tagged_integer(tagged.get(0)))


def encode_member(value: MemberMetadata) -> bytes:
    """Value of a record of kind 5."""
    tagged = {} if value.classic is None else {0: _classic(value.classic)}
    return b"".join(
        (
            _VERSION,
            text(value.instance_id),
            text(value.rack_id),
            text(value.client_id),
            text(value.client_host),
            array(text(each) for each in value.topic_names),
            text(value.topic_regex),
            integer(value.rebalance_timeout_ms, 4),
            text(value.assignor),
            tags(tagged),
        )
    )


def decode_member(raw: bytes) -> MemberMetadata:
    reader = _value(raw)
    instance_id, rack_id = reader.nullable_text(), reader.nullable_text()
    client_id, client_host = reader.text(), reader.text()
    topic_names = reader.array(reader.text)
    topic_regex = reader.nullable_text()
    rebalance_timeout_ms = reader.integer(4)
    assignor = reader.nullable_text()
    classic = reader.tags().get(0)
    reader.end()
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
    """Value of a record of kind 6 or 12."""
    tagged = {0: integer(value.timestamp_ms, 8)} if value.timestamp_ms else {}
    return _VERSION + integer(value.epoch, 4) + tags(tagged)


def decode_target_epoch(raw: bytes) -> TargetEpoch:
    reader = _value(raw)
    epoch = reader.integer(4)
    tagged = reader.tags()
    reader.end()
    return TargetEpoch(epoch, _tagged_integer(tagged.get(0)))


def encode_target(partitions: Iterable[TopicPartition]) -> bytes:
    """Value of a record of kind 7 or 13."""
    return _VERSION + _partitions(partitions) + NO_TAGS


def decode_target(raw: bytes) -> frozenset[TopicPartition]:
    reader = _value(raw)
    partitions = _read_partitions(reader)
    reader.tags()
    reader.end()
    return partitions


def encode_current(value: CurrentAssignment) -> bytes:
    """Value of a record of kind 8."""
    return _current(value) + _partitions(value.pending) + NO_TAGS


def decode_current(raw: bytes) -> CurrentAssignment:
    return _read_current(raw, with_pending=True)


def encode_resolved_regex(value: ResolvedRegex) -> bytes:
    """Value of a record of kind 16."""
    topics = array(text(each) for each in value.topics)
    return _VERSION + topics + integer(value.version, 8) + integer(value.timestamp_ms, 8) + NO_TAGS


def decode_resolved_regex(raw: bytes) -> ResolvedRegex:
    reader = _value(raw)
    expression = ResolvedRegex(reader.array(reader.text), reader.integer(8), reader.integer(8))
    reader.tags()
    reader.end()
    return expression


# ---------------------------------------------------------------------- values of share groups


def encode_share_member(value: ShareMember) -> bytes:
    """Value of a record of kind 10."""
    names = array(text(each) for each in value.topic_names)
    return _VERSION + text(value.rack_id) + text(value.client_id) + text(value.client_host) + names + NO_TAGS


def decode_share_member(raw: bytes) -> ShareMember:
    reader = _value(raw)
    member = ShareMember(reader.nullable_text(), reader.text(), reader.text(), reader.array(reader.text))
    reader.tags()
    reader.end()
    return member


def encode_share_group_epoch(value: GroupEpoch) -> bytes:
    """Value of a record of kind 11."""
    return _VERSION + integer(value.epoch, 4) + integer(value.metadata_hash, 8) + NO_TAGS


def decode_share_group_epoch(raw: bytes) -> GroupEpoch:
    reader = _value(raw)
    value = GroupEpoch(reader.integer(4), reader.integer(8))
    reader.tags()
    reader.end()
    return value


def encode_share_current(value: CurrentAssignment) -> bytes:
    """Value of a record of kind 14."""
    return _current(value) + NO_TAGS


def decode_share_current(raw: bytes) -> CurrentAssignment:
    return _read_current(raw, with_pending=False)


def encode_state_partitions(value: StatePartitions) -> bytes:
    """Value of a record of kind 15."""
    with_partitions = [
        array(
            each.topic_id + text(each.name) + array(integer(index, 4) for index in each.partitions) + NO_TAGS
            for each in topics
        )
        for topics in (value.initializing, value.initialized)
    ]
    deleting = array(each.topic_id + text(each.name) + NO_TAGS for each in value.deleting)
    return _VERSION + with_partitions[0] + with_partitions[1] + deleting + NO_TAGS


def decode_state_partitions(raw: bytes) -> StatePartitions:
    reader = _value(raw)

    def topic() -> StateTopic:
        read = StateTopic(reader.take(_ID_BYTES), reader.text(), reader.array(lambda: reader.integer(4)))
        reader.tags()
        return read

    def topic_alone() -> StateTopic:
        read = StateTopic(reader.take(_ID_BYTES), reader.text())
        reader.tags()
        return read

    value = StatePartitions(reader.array(topic), reader.array(topic), reader.array(topic_alone))
    reader.tags()
    reader.end()
    return value


# ---------------------------------------------------------------------- parts


def _value(raw: bytes) -> Reader:
    reader = Reader(raw)
    if (version := reader.integer(2)) != 0:
        fail(f"unknown value version {version}")
    return reader


def _tagged_integer(raw: bytes | None) -> int:
    if raw is not None and len(raw) != 8:
        raise CorruptLog("__consumer_offsets: a tagged field has a wrong length")
    return 0 if raw is None else int.from_bytes(raw, "big", signed=True)


def _partitions(partitions: Iterable[TopicPartition]) -> bytes:
    by_topic: dict[bytes, list[int]] = {}
    for topic_id, index in partitions:
        by_topic.setdefault(topic_id, []).append(index)
    return array(
        topic_id + varint(len(indexes) + 1) + pack(f">{len(indexes)}i", *sorted(indexes)) + NO_TAGS
        for topic_id, indexes in sorted(by_topic.items())
    )


def _read_partitions(reader: Reader) -> frozenset[TopicPartition]:
    def topic() -> list[TopicPartition]:
        topic_id = reader.take(_ID_BYTES)
        found = [(topic_id, index) for index in reader.array(lambda: reader.integer(4))]
        reader.tags()
        return found

    return frozenset(each for topic in reader.array(topic) for each in topic)


def _current(value: CurrentAssignment) -> bytes:
    epochs = integer(value.epoch, 4) + integer(value.previous_epoch, 4)
    return _VERSION + epochs + integer(value.state, 1) + _partitions(value.assigned)


def _read_current(raw: bytes, *, with_pending: bool) -> CurrentAssignment:
    reader = _value(raw)
    epoch, previous_epoch, state = reader.integer(4), reader.integer(4), reader.integer(1)
    assigned = _read_partitions(reader)
    pending = _read_partitions(reader) if with_pending else frozenset()
    reader.tags()
    reader.end()
    return CurrentAssignment(epoch, previous_epoch, state, assigned, pending)


def _classic(value: ClassicMetadata) -> bytes:
    protocols = array(text(name) + data(metadata) + NO_TAGS for name, metadata in value.protocols)
    return integer(value.session_timeout_ms, 4) + protocols + NO_TAGS


def _read_classic(raw: bytes) -> ClassicMetadata:
    reader = Reader(raw)

    def protocol() -> tuple[str, bytes]:
        read = (reader.text(), reader.data())
        reader.tags()
        return read

    value = ClassicMetadata(reader.integer(4), reader.array(protocol))
    reader.tags()
    reader.end()
    return value
