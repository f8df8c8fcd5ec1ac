"""Hand-written encoder of Metadata responses, which clients request often and which may have thousands of partitions.

The encoded form of each topic is computed once per group of API versions and cached as long as the `Topic` object
exists (each change of a topic replaces that object). Each response only joins the cached parts.

Invariants:
* The bytes are those that kio writes for the same values; the tests compare all versions.
* The setting `partitions_max` bounds the size of the cache.

Layout: https://kafka.apache.org/protocol.html#The_Messages_Metadata
"""

from __future__ import annotations

from struct import Struct
from typing import TYPE_CHECKING, Final
from weakref import WeakKeyDictionary

from mansio.wire.headers import unsigned_varint

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from mansio.metadata.model import BrokerState, PartitionState, Topic

_INT16: Final = Struct(">h")
_INT32: Final = Struct(">i")
_LEADER_NOT_AVAILABLE: Final = 5
_NO_LEADER: Final = -1
_NO_UUID: Final = bytes(16)
_FLEXIBLE_VERSION_MIN: Final = 9
_FORMS: Final = (10, 9, 8, 7, 5, 1, 0)  # the versions in which the encoding of a topic changed


class TopicEncoder:
    """Encoder of the topics of Metadata responses, with a cache. A broker has one."""

    __slots__ = ("_alive", "_cached_topics")

    def __init__(self) -> None:
        self._cached_topics: WeakKeyDictionary[Topic, dict[int, bytes]] = WeakKeyDictionary()
        self._alive: frozenset[int] = frozenset()

    def encode(self, version: int, topic: Topic, alive: frozenset[int], operations: int) -> bytes:
        """Encode an existing topic. `alive` are the node ids of online brokers, `operations` the authorized operations.

        Other replicas are marked as offline; a leader that is not online is reported as missing.
        """
        if alive != self._alive:
            self._alive = alive
            self._cached_topics.clear()
        forms = self._cached_topics.setdefault(topic, {})
        form = next(form for form in _FORMS if form <= version)
        body = forms.get(form)
        if body is None:
            body = forms[form] = _topic_body(
                form, 0, topic.name, topic.topic_id.bytes, topic.internal, topic.partitions, alive
            )
        return body + _topic_end(version, operations)


def encode_missing_topic(
    version: int, error_code: int, name: str | None, topic_id: bytes | None, operations: int
) -> bytes:
    """Encode a topic with an error code. A missing name is empty before version 12, and null from version 12 on."""
    if name is None and version < 12:
        name = ""
    body = _topic_body(version, error_code, name, topic_id or _NO_UUID, False, (), frozenset())
    return body + _topic_end(version, operations)


def encode_metadata(
    version: int,
    correlation_id: int,
    *,
    brokers: Sequence[BrokerState],
    cluster_id: str,
    controller_id: int,
    topics: Sequence[bytes],
    cluster_operations: int,
) -> bytes:
    """Encode the whole response with its length and header. `topics` are the encoded topics."""
    flexible = version >= _FLEXIBLE_VERSION_MIN
    end = b"\0" if flexible else b""
    pieces = [_INT32.pack(correlation_id) + end]
    if version >= 3:
        pieces.append(_INT32.pack(0))
    pieces.append(_count(len(brokers), flexible))
    for broker in brokers:
        rack = _text(broker.rack, flexible) if version >= 1 else b""
        host = _text(broker.host, flexible)
        pieces.append(_INT32.pack(broker.node_id) + host + _INT32.pack(broker.port) + rack + end)
    if version >= 2:
        pieces.append(_text(cluster_id, flexible))
    if version >= 1:
        pieces.append(_INT32.pack(controller_id))
    pieces.append(_count(len(topics), flexible))
    pieces.extend(topics)
    if 8 <= version <= 10:
        pieces.append(_INT32.pack(cluster_operations))
    if version >= 13:
        pieces.append(_INT16.pack(0))
    pieces.append(end)
    return b"".join([_INT32.pack(sum(map(len, pieces))), *pieces])


def _topic_body(
    version: int,
    error_code: int,
    name: str | None,
    topic_id: bytes,
    internal: bool,
    partitions: Sequence[PartitionState],
    alive: frozenset[int],
) -> bytes:
    """Encode the fields of a topic that precede its authorized operations."""
    flexible = version >= _FLEXIBLE_VERSION_MIN
    pieces = [_INT16.pack(error_code), _text(name, flexible)]
    if version >= 10:
        pieces.append(topic_id)
    if version >= 1:
        pieces.append(b"\1" if internal else b"\0")
    pieces.append(_count(len(partitions), flexible))
    head = Struct(">hiii" if version >= 7 else ">hii")
    tails: dict[
        tuple[tuple[int, ...], tuple[int, ...]], bytes
    ] = {}  # many partitions of a topic have the same
    for index, partition in enumerate(partitions):
        replicas = partition.replicas, partition.isr
        tail = tails.get(replicas)
        if tail is None:
            tail = tails[replicas] = _partition_tail(version, partition, alive)
        leader, error = partition.leader, 0
        if leader not in alive:  # as Kafka: a client could not find it among the brokers
            leader, error = _NO_LEADER, _LEADER_NOT_AVAILABLE
        if version >= 7:
            pieces.append(head.pack(error, index, leader, partition.leader_epoch) + tail)
        else:
            pieces.append(head.pack(error, index, leader) + tail)
    return b"".join(pieces)


def _partition_tail(version: int, partition: PartitionState, alive: frozenset[int]) -> bytes:
    flexible = version >= _FLEXIBLE_VERSION_MIN
    tail = _numbers(partition.replicas, flexible) + _numbers(partition.isr, flexible)
    if version >= 5:
        tail += _numbers([replica for replica in partition.replicas if replica not in alive], flexible)
    return tail + b"\0" if flexible else tail


def _topic_end(version: int, operations: int) -> bytes:
    if version < 8:
        return b""
    return _INT32.pack(operations) + (b"\0" if version >= _FLEXIBLE_VERSION_MIN else b"")


def _count(count: int, flexible: bool) -> bytes:
    return unsigned_varint(count + 1) if flexible else _INT32.pack(count)


def _numbers(numbers: Iterable[int], flexible: bool) -> bytes:
    packed = [_INT32.pack(number) for number in numbers]
    return _count(len(packed), flexible) + b"".join(packed)


def _text(text: str | None, flexible: bool) -> bytes:
    if text is None:
        return b"\0" if flexible else _INT16.pack(-1)
    raw = text.encode()
    return (unsigned_varint(len(raw) + 1) if flexible else _INT16.pack(len(raw))) + raw
