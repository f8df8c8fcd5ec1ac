"""Fast codec of Fetch between replicas: one version, no session, no rack, no aborted transactions.

The bytes are those of `mansio.wire.apis.fetch` in `VERSION`. Functions return None for messages of any other form,
which the caller passes to the general codec.

Invariant: what is decoded here is what `mansio.wire.apis.fetch` decodes.
"""

from __future__ import annotations

import struct
from struct import Struct
from typing import TYPE_CHECKING, Any, Final

from mansio.wire.api_versions import ApiKey
from mansio.wire.apis.fetch import FetchedPartition, FetchPartition, FetchRequest, FetchResponse
from mansio.wire.headers import read_unsigned_varint, unsigned_varint

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mansio.ports import Buffer
    from mansio.wire.apis.fetch import Topic, TopicData

VERSION: Final = 17
ONE_BYTE_COUNT_MAX: Final = 0x7E
"""Largest count whose compact encoding (count + 1) takes one byte."""

_FRAME_START: Final = Struct(">ihhih")
# Wait, min bytes, max bytes, isolation level, session id, session epoch, topics + 1.
_BODY_START: Final = Struct(">iiibiiB")
_TOPIC_START: Final = Struct(">16sB")  # id, partitions + 1
_PARTITION: Final = Struct(">iiqiqiB")  # as in `FetchPartition`, no tagged fields
# No forgotten topics, no rack; one tagged field of 13 bytes: replica id, broker epoch, no tagged fields of its own.
_BODY_END: Final = Struct(">BBBBBiqB")
_END_CONSTANTS: Final = (1, 1, 1, 1, 13)

_RESPONSE_START: Final = Struct(">iBihiB")  # correlation id, no tags, throttle, error, session, topics + 1
_FRAMED_RESPONSE_START: Final = Struct(">iiBihiB")
# Of a partition: index, error, high watermark, last stable offset, log start, no aborted transactions, no other
# replica.
_FETCHED: Final = Struct(">ihqqqBi")
_FETCHED_EMPTY: Final = Struct(">ihqqqBiBB")  # and no records, no tagged fields
_new_tuple: Final = tuple.__new__


def encode_request(
    client_id: bytes,
    topics: Mapping[bytes, Sequence[FetchPartition]],
    *,
    max_wait_ms: int,
    max_bytes: int,
    replica_id: int,
    replica_epoch: int,
) -> bytes:
    """The framed request with correlation id 0. `topics`: topic id -> requested partitions. The caller ensures at most
    `ONE_BYTE_COUNT_MAX` topics, and partitions of each."""
    start = _BODY_START.pack(max_wait_ms, 1, max_bytes, 0, 0, -1, len(topics) + 1)
    parts = [b"", client_id, b"\x00", start]
    for topic_id, partitions in topics.items():
        parts.append(_TOPIC_START.pack(topic_id, len(partitions) + 1))
        parts += [_PARTITION.pack(*wanted, 0) for wanted in partitions]
        parts.append(b"\x00")
    parts.append(_BODY_END.pack(*_END_CONSTANTS, replica_id, replica_epoch, 0))
    length = sum(map(len, parts)) + _FRAME_START.size - 4
    parts[0] = _FRAME_START.pack(length, ApiKey.FETCH, VERSION, 0, len(client_id))
    return b"".join(parts)


def decode_request(frame: memoryview, position: int) -> FetchRequest | None:
    """The request in `VERSION` whose body starts at `position` of `frame`; None if it has another form."""
    end = len(frame) - _BODY_END.size
    try:
        wait_ms, min_bytes, max_bytes, isolation, session, epoch, topic_count = _BODY_START.unpack_from(
            frame, position
        )
        if not 0 < topic_count <= ONE_BYTE_COUNT_MAX + 1:
            return None
        *constants, replica_id, replica_epoch, tags = _BODY_END.unpack_from(frame, end)
        if tags or tuple(constants) != _END_CONSTANTS:
            return None
        position += _BODY_START.size
        topics: list[Topic] = []
        for _ in range(topic_count - 1):
            topic_id, count = _TOPIC_START.unpack_from(frame, position)
            if not 0 < count <= ONE_BYTE_COUNT_MAX + 1:
                return None
            position += _TOPIC_START.size
            partitions = []
            for _ in range(count - 1):
                fields = _PARTITION.unpack_from(frame, position)
                if fields[6]:
                    return None
                partitions.append(_new_tuple(FetchPartition, fields[:6]))
                position += _PARTITION.size
            if frame[position]:
                return None
            position += 1
            topics.append((None, topic_id, partitions))
    except (struct.error, IndexError):
        return None
    if position != end:
        return None
    return FetchRequest(
        replica_id,
        wait_ms,
        min_bytes,
        max_bytes,
        isolation,
        session,
        epoch,
        topics,
        [],
        "",
        replica_epoch,
    )


def encode_response(
    correlation_id: int, topics: Sequence[TopicData], error_code: int = 0
) -> list[Any] | None:
    """The framed response as buffers, as of `mansio.wire.apis.fetch`; None if it has another form."""
    if len(topics) > ONE_BYTE_COUNT_MAX:
        return None
    head = [b""]
    pieces: list[Any] = []
    records_bytes = 0
    for _, topic_id, partitions in topics:
        if topic_id is None or len(partitions) > ONE_BYTE_COUNT_MAX:
            return None
        head.append(_TOPIC_START.pack(topic_id, len(partitions) + 1))
        for partition in partitions:
            index, code, high_watermark, stable, start, aborted, preferred, size, records, parts = partition
            if aborted is not None or parts is not None:
                return None
            if not size:
                head.append(
                    _FETCHED_EMPTY.pack(index, code, high_watermark, stable, start, 0, preferred, 1, 0)
                )
                continue
            head.append(_FETCHED.pack(index, code, high_watermark, stable, start, 0, preferred))
            head.append(unsigned_varint(size + 1))
            pieces += (b"".join(head), records)
            records_bytes += size
            head = [b"\x00"]
        head.append(b"\x00")
    head.append(b"\x00")
    pieces.append(b"".join(head))
    length = sum(map(len, pieces[::2])) + records_bytes + _RESPONSE_START.size
    pieces[0] = (
        _FRAMED_RESPONSE_START.pack(length, correlation_id, 0, 0, error_code, 0, len(topics) + 1) + pieces[0]
    )
    return pieces


def decode_response(frame: Buffer) -> FetchResponse | None:
    """The response in `VERSION` in `frame` (without its length); None if it has another form. Records are views of
    `frame`. Raises `WireError` for an invalid length."""
    view = memoryview(frame)
    size = len(view)
    try:
        _, tags, throttle_ms, error_code, session_id, topic_count = _RESPONSE_START.unpack_from(view)
        if tags or not 0 < topic_count <= ONE_BYTE_COUNT_MAX + 1:
            return None
        position = _RESPONSE_START.size
        topics: list[TopicData] = []
        for _ in range(topic_count - 1):
            topic_id, count = _TOPIC_START.unpack_from(view, position)
            if not 0 < count <= ONE_BYTE_COUNT_MAX + 1:
                return None
            position += _TOPIC_START.size
            partitions: list[FetchedPartition] = []
            for _ in range(count - 1):
                index, code, high_watermark, stable, start, aborted, preferred = _FETCHED.unpack_from(
                    view, position
                )
                if aborted:
                    return None
                position += _FETCHED.size
                length, position = read_unsigned_varint(view, position)
                length = max(length - 1, 0)
                end = position + length
                if end >= size or view[end]:
                    return None
                partitions.append(
                    FetchedPartition(
                        index,
                        code,
                        high_watermark,
                        stable,
                        start,
                        None,
                        preferred,
                        length,
                        view[position:end],
                    )
                )
                position = end + 1
            if view[position]:
                return None
            position += 1
            topics.append((None, topic_id, partitions))
        if view[position] or position + 1 != size:
            return None
    except (struct.error, IndexError):
        return None
    return FetchResponse(topics, throttle_ms, error_code, session_id)
