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
    reader = _Reader(data)
    version = reader.int16()
    if version < 0:
        raise WireError(f"subscription version {version} is negative")
    topics = tuple(reader.string() for _ in reader.count(2))
    user_data = reader.nullable_bytes()
    owned = reader.partitions() if version >= 1 else ()
    generation = reader.int32() if version >= 2 else -1
    rack = reader.nullable_string() if version >= 3 else None
    return Subscription(topics, owned, generation, user_data, rack, min(version, CONSUMER_PROTOCOL_VERSION))


def decode_subscribed_topics(data: bytes) -> tuple[str, ...]:
    """The topics of a subscription; only the fields of version 0 are decoded, because some clients send no others
    although they state a later version. Raises `WireError`."""
    reader = _Reader(data)
    version = reader.int16()
    if version < 0:
        raise WireError(f"subscription version {version} is negative")
    topics = tuple(reader.string() for _ in reader.count(2))
    reader.nullable_bytes()
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
    reader = _Reader(data)
    version = reader.int16()
    if version < 0:
        raise WireError(f"assignment version {version} is negative")
    return Assignment(reader.partitions(), reader.nullable_bytes())


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


class _Reader:
    """Decoder of one message, which raises `WireError` for a read past the end."""

    __slots__ = ("_data", "_position")

    def __init__(self, data: bytes) -> None:
        self._data = bytes(data)
        self._position = 0

    def take(self, length: int) -> bytes:
        end = self._position + length
        if length < 0 or end > len(self._data):
            raise WireError("a member's subscription or assignment ends too early")
        taken = self._data[self._position : end]
        self._position = end
        return taken

    def int16(self) -> int:
        return int(_INT16.unpack(self.take(2))[0])

    def int32(self) -> int:
        return int(_INT32.unpack(self.take(4))[0])

    def count(self, item_bytes_min: int) -> range:
        """The indexes of an array's items. Raises `WireError` if the remaining bytes cannot hold that many."""
        count = self.int32()
        if count < 0 or count * item_bytes_min > len(self._data) - self._position:
            raise WireError(f"an array announces {count} items, more than there are bytes")
        return range(count)

    def string(self) -> str:
        try:
            return self.take(self.int16()).decode()
        except UnicodeDecodeError as error:
            raise WireError("a topic name is not UTF-8") from error

    def nullable_string(self) -> str | None:
        if self._data[self._position : self._position + 2] == b"\xff\xff":
            self._position += 2
            return None
        return self.string()

    def nullable_bytes(self) -> bytes | None:
        length = self.int32()
        return None if length == -1 else self.take(length)

    def partitions(self) -> tuple[TopicPartition, ...]:
        found = []
        for _ in self.count(6):
            topic = self.string()
            found += [TopicPartition(topic, self.int32()) for _ in self.count(4)]
        return tuple(found)
