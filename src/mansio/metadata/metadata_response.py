"""Hand-written encoder of Metadata responses, which clients request often and which may have thousands of partitions.

The encoded form of each topic is computed once per group of API versions and cached as long as the `Topic` object
exists (each change of a topic replaces that object). Each response only joins the cached parts. The form depends on the
brokers that the clients of a listener can reach; listeners through which the same ones are reached share the cache.

Invariants:
* The bytes are those that kio writes for the same values; the tests compare all versions.
* The setting `partitions_max` bounds the size of the cache of each listener.

Layout: https://kafka.apache.org/protocol.html#The_Messages_Metadata
"""

from __future__ import annotations

from struct import Struct
from typing import TYPE_CHECKING, Final
from weakref import WeakKeyDictionary

from mansio.wire.headers import unsigned_varint

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from mansio.metadata.model import BrokerEndpoint, PartitionState, Topic

_INT16: Final = Struct(">h")
_INT32: Final = Struct(">i")
_LEADER_NOT_AVAILABLE: Final = 5
_LISTENER_NOT_FOUND: Final = 72
_LISTENER_NOT_FOUND_VERSION_MIN: Final = 6
"""As in Kafka: older versions have LEADER_NOT_AVAILABLE for a leader without the listener."""
_NO_LEADER: Final = -1
_NO_UUID: Final = bytes(16)
_FLEXIBLE_VERSION_MIN: Final = 9
_FORMS: Final = (10, 9, 8, 7, 6, 5, 1, 0)  # the versions in which the encoding of a topic changed


class TopicEncoder:
    """Encoders of the topics of Metadata responses by listener. A broker has one."""

    __slots__ = ("_encoders",)

    def __init__(self) -> None:
        self._encoders: dict[str, ListenerTopicEncoder] = {}

    def for_listener(
        self, listener: str, alive: frozenset[int], without_listener: frozenset[int] = frozenset()
    ) -> ListenerTopicEncoder:
        """Return the encoder for clients of a listener. `alive`: node ids of the brokers that they can reach;
        `without_listener`: of those that are online and do not have the listener."""
        found = self._encoders.get(listener)
        if found is None or not found.is_for(alive, without_listener):
            others = (each for each in self._encoders.values() if each.is_for(alive, without_listener))
            found = next(others, None) or ListenerTopicEncoder(alive, without_listener)
            self._encoders[listener] = found
        return found


class ListenerTopicEncoder:
    """Encoder of the topics of Metadata responses for clients that reach the same brokers, with a cache."""

    __slots__ = ("_alive", "_cached_topics", "_without_listener")

    def __init__(self, alive: frozenset[int], without_listener: frozenset[int]) -> None:
        self._cached_topics: WeakKeyDictionary[Topic, dict[int, bytes]] = WeakKeyDictionary()
        self._alive = alive
        self._without_listener = without_listener

    def is_for(self, alive: frozenset[int], without_listener: frozenset[int]) -> bool:
        """Whether the encoder is for clients that reach exactly the brokers `alive`."""
        return self._alive == alive and self._without_listener == without_listener

    def encode(self, version: int, topic: Topic, operations: int) -> bytes:
        """Encode an existing topic. `operations`: the authorized operations.

        Replicas that clients cannot reach are marked as offline; such a leader is reported as missing.
        """
        forms = self._cached_topics.setdefault(topic, {})
        form = next(form for form in _FORMS if form <= version)
        body = forms.get(form)
        if body is None:
            body = forms[form] = _topic_body(
                form,
                0,
                topic.name,
                topic.topic_id.bytes,
                topic.internal,
                topic.partitions,
                self._alive,
                self._without_listener,
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
    brokers: Sequence[BrokerEndpoint],
    cluster_id: str,
    controller_id: int,
    topics: Sequence[bytes],
    cluster_operations: int,
    throttle_ms: int = 0,
) -> bytes:
    """Encode the whole response with its length and header. `topics` are the encoded topics."""
    flexible = version >= _FLEXIBLE_VERSION_MIN
    end = b"\0" if flexible else b""
    pieces = [_INT32.pack(correlation_id) + end]
    if version >= 3:
        pieces.append(_INT32.pack(throttle_ms))
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
    without_listener: frozenset[int] = frozenset(),
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
            has_error = version >= _LISTENER_NOT_FOUND_VERSION_MIN and leader in without_listener
            leader, error = _NO_LEADER, _LISTENER_NOT_FOUND if has_error else _LEADER_NOT_AVAILABLE
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
