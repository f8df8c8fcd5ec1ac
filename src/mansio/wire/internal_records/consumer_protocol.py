"""Codec of the embedded protocol "consumer": subscriptions and assignments in JoinGroup and SyncGroup of classic
groups.

A subscription has a member's topics and owned partitions, an assignment the partitions that the group leader assigned
to a member. Versions 0-3; none is flexible. Decoding a newer version reads the fields of version 3 and ignores the
bytes after them.

Sources: ConsumerProtocolSubscription.json and ConsumerProtocolAssignment.json; KIP-429 (owned partitions, v1),
KIP-792 (generation, v2), KIP-881 (rack, v3).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mansio.errors import WireError
from mansio.wire.internal_records.flexible_codec import Reader
from mansio.wire.topic_partition import TopicPartition

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

CONSUMER_PROTOCOL_VERSION = 3

_INT16 = struct.Struct(">h")
_INT32 = struct.Struct(">i")


@dataclass(frozen=True, slots=True)
class Subscription:
    """Topics of a member, and the partitions that it owned in generation `generation_id` (-1: it was in none)."""

    topics: tuple[str, ...]
    owned_partitions: tuple[TopicPartition, ...] = ()
    generation_id: int = -1
    user_data: bytes | None = None
    rack_id: str | None = None
    version: int = CONSUMER_PROTOCOL_VERSION


@dataclass(frozen=True, slots=True)
class Assignment:
    """Partitions that the group leader assigned to one member."""

    partitions: tuple[TopicPartition, ...] = ()
    user_data: bytes | None = field(default=None)


def encode_subscription(subscription: Subscription) -> bytes:
    """Encode a subscription as metadata of a JoinGroup protocol. Fields that `subscription.version` lacks are
    dropped."""
    parts = [_INT16.pack(subscription.version), _INT32.pack(len(subscription.topics))]
    parts += [_encode_string(topic) for topic in subscription.topics]
    parts.append(_encode_nullable_bytes(subscription.user_data))
    if subscription.version >= 1:
        parts.append(_encode_partitions(subscription.owned_partitions))
    if subscription.version >= 2:
        parts.append(_INT32.pack(subscription.generation_id))
    if subscription.version >= 3:
        parts.append(
            _INT16.pack(-1) if subscription.rack_id is None else _encode_string(subscription.rack_id)
        )
    return b"".join(parts)


def decode_subscription(data: bytes) -> Subscription:
    """Decode a subscription. Raises `WireError`."""
    reader, version = _reader(data)
    topics = reader.read_array(reader.read_string, 2)
    user_data = reader.read_nullable_bytes()
    owned = _read_partitions(reader) if version >= 1 else ()
    generation = reader.read_integer(4) if version >= 2 else -1
    rack = reader.read_nullable_string() if version >= 3 else None
    return Subscription(topics, owned, generation, user_data, rack, min(version, CONSUMER_PROTOCOL_VERSION))


def decode_subscribed_topics(data: bytes) -> tuple[str, ...]:
    """Return the topics of a subscription; only the fields of version 0 are decoded, because some clients send no
    others although they state a later version. Raises `WireError`."""
    reader, _ = _reader(data)
    topics = reader.read_array(reader.read_string, 2)
    reader.read_nullable_bytes()
    return topics


def encode_assignment(assignment: Assignment, *, version: int = CONSUMER_PROTOCOL_VERSION) -> bytes:
    """Encode the assignment of one member for SyncGroup. All versions have the same layout."""
    user_data = _encode_nullable_bytes(assignment.user_data)
    return _INT16.pack(version) + _encode_partitions(assignment.partitions) + user_data


def decode_assignment(data: bytes) -> Assignment:
    """Decode an assignment. Empty bytes, which a member gets that joined too late, are an assignment without
    partitions. Raises `WireError`."""
    if not data:
        return Assignment()
    reader, _ = _reader(data)
    return Assignment(_read_partitions(reader), reader.read_nullable_bytes())


def group_by_topic(partitions: Iterable[TopicPartition]) -> Mapping[str, list[int]]:
    """Topic -> sorted partition indexes; the topics are in order of first appearance."""
    grouped: dict[str, list[int]] = {}
    for topic, partition in partitions:
        grouped.setdefault(topic, []).append(partition)
    for indexes in grouped.values():
        indexes.sort()
    return grouped


def _encode_string(text: str) -> bytes:
    encoded = text.encode()
    return _INT16.pack(len(encoded)) + encoded


def _encode_nullable_bytes(data: bytes | None) -> bytes:
    return _INT32.pack(-1) if data is None else _INT32.pack(len(data)) + data


def _encode_partitions(partitions: Iterable[TopicPartition]) -> bytes:
    grouped = group_by_topic(partitions)
    parts = [_INT32.pack(len(grouped))]
    for topic, indexes in grouped.items():
        parts.append(_encode_string(topic))
        parts.append(struct.pack(f">i{len(indexes)}i", len(indexes), *indexes))
    return b"".join(parts)


def _reader(data: bytes) -> tuple[Reader, int]:
    """Return a reader of a subscription or assignment, behind its version, and the version. Raises `WireError`."""
    reader = Reader(bytes(data), "a member's subscription or assignment", is_flexible=False, error=WireError)
    version = reader.read_integer(2)
    if version < 0:
        reader.raise_corrupt_log(f"version {version} is negative")
    return reader, version


def _read_partitions(reader: Reader) -> tuple[TopicPartition, ...]:
    def topic() -> list[TopicPartition]:
        name = reader.read_string()
        return [TopicPartition(name, index) for index in reader.read_int32_array()]

    return tuple([each for found in reader.read_array(topic, 6) for each in found])
