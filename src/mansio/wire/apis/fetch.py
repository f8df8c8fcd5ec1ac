"""Codec of Fetch (API key 1), versions 4-18, hand-written because all consumed data passes through it.

First versions of the fields: log start offset 5, sessions 7 (KIP-227), leader epoch 9 (KIP-320), rack and preferred
replica 11 (KIP-392), flexible encoding (KIP-482), last fetched epoch and diverging epoch (KIP-595) 12, topic ids 13
(KIP-516), replica id and broker epoch as a tagged field 15 (KIP-903), a follower's high watermark as a tagged field of
a partition 18 (KIP-1166), which only the leader of a replicated metadata log uses: it is skipped. A tagged field of
Mansio marks a read for repair: a replica reads batches that are damaged in its own log, from a replica that need not be
the leader, and reports no position. Other tagged fields are not written, and skipped when reading.

A response is encoded as a list of buffers with the caller's log slices in between, so that the server can send these
directly from the file.

Followers use one version, without rack and aborted transactions, and seldom forget partitions of their session. The
`*_replica_*` functions are a faster codec of such messages, with the same bytes; they return None for other messages,
which the caller passes to the general codec.

Invariants:
* Records are not accessed; only their length is used.
* Decoding malformed bytes raises `WireError` and nothing else.
* A message has at most `ENTRIES_MAX` topics, partitions and aborted transactions.
"""

from __future__ import annotations

import struct
from struct import Struct
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from mansio.errors import WireError
from mansio.wire.api_versions import ApiKey
from mansio.wire.headers import (
    has_flexible_response_header,
    read_response_header,
    read_tag_count,
    read_unsigned_varint,
    request_header,
    skip_tagged_fields,
    unsigned_varint,
)
from mansio.wire.primitives import (
    DECODE_ERRORS,
    ENTRIES_MAX,
    pack_compact_count,
    pack_compact_string,
    pack_count,
    pack_string,
    pack_topic,
    read_compact_count,
    read_compact_string,
    read_count,
    read_string,
    read_topic,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from mansio.ports import Buffer

    Topic = tuple[str | None, bytes | None, list["FetchPartition"]]
    ForgottenTopic = tuple[str | None, bytes | None, list[int]]
    TopicData = tuple[str | None, bytes | None, list["FetchedPartition"]]

_FLEXIBLE_VERSION_MIN: Final = 12
_TOPIC_ID_VERSION_MIN: Final = 13
_REPLICA_STATE_VERSION_MIN: Final = 15
_REPLICA_STATE_TAG: Final = 1
_REPAIR_TAG: Final = 10_000
"""Tag of Mansio's own tagged field, without content, in the request of a replica that reads for a repair."""
_REPAIR_FIELD: Final = unsigned_varint(_REPAIR_TAG) + b"\x00"

_INT: Final = Struct(">i")
_REPLICA: Final = Struct(">iq")
_FETCH_FIELDS: Final = Struct(">iiib")  # max wait, min bytes, max bytes, isolation level
_FETCH_FIELDS_AND_SESSION: Final = Struct(">iiibii")  # and session id, session epoch

_FRAME_START: Final = Struct(">ii")
_ERROR_SESSION: Final = Struct(">hi")
_ABORTED: Final = Struct(">qq")
# Before the aborted transactions: index, error code, high watermark, last stable offset, log start offset.
_FETCHED: Final = Struct(">ihqqq")
_FETCHED_WITHOUT_START: Final = Struct(">ihqq")
# The same, null for the aborted transactions, preferred read replica.
_FETCHED_NO_ABORTED: Final = Struct(">ihqqqBi")
_FETCHED_NO_ABORTED_CLASSIC: Final = Struct(">ihqqqii")
_DIVERGING_TAG: Final = 0
_DIVERGING: Final = Struct(">iq")  # leader epoch, end offset
# Tagged fields of a partition with a diverging epoch: count 1, tag, length; the struct has none of its own.
_DIVERGING_START: Final = bytes((1, _DIVERGING_TAG, _DIVERGING.size + 1))


class FetchPartition(NamedTuple):
    """Partition of a request. Epochs and the log start offset are -1 if unknown."""

    index: int  # type: ignore[assignment]  # hides tuple.index, which is not used here
    current_leader_epoch: int
    fetch_offset: int
    last_fetched_epoch: int
    log_start_offset: int
    max_bytes: int


class FetchRequest(NamedTuple):
    """Request of a consumer (`replica_id` -1) or a follower. `topics` are (name or None, id or None, [FetchPartition]);
    `forgotten_topics` are (name or None, id or None, [partition]). `replica_epoch`: broker epoch of the follower, or
    -1. `is_repair_read`: the replica reads batches that are damaged in its own log."""

    replica_id: int
    max_wait_ms: int
    min_bytes: int
    max_bytes: int
    isolation_level: int
    session_id: int
    session_epoch: int
    topics: list[Topic]
    forgotten_topics: list[ForgottenTopic]
    rack_id: str
    replica_epoch: int = -1
    is_repair_read: bool = False


def _partition_layout(version: int) -> Struct:
    """Layout of a partition in this version: index, [leader epoch], fetch offset, [last fetched epoch], [log start
    offset], max bytes."""
    return Struct(
        ">i"
        + ("i" if version >= 9 else "")
        + "q"
        + ("i" if version >= 12 else "")
        + ("q" if version >= 5 else "")
        + "i"
    )


_PARTITION_LAYOUTS: Final = {version: _partition_layout(version) for version in range(4, 19)}


def decode_request(version: int, frame: memoryview, position: int) -> FetchRequest:
    """Decode the request whose body starts at `position` of `frame`. Raises `WireError`."""
    try:
        request, position = _decode_request(version, frame, position)
    except DECODE_ERRORS as error:
        raise WireError("not a Fetch request") from error
    if position != len(frame):
        raise WireError(f"{len(frame) - position} bytes after the end of a Fetch request")
    return request


def _decode_request(version: int, frame: memoryview, position: int) -> tuple[FetchRequest, int]:
    flexible = version >= _FLEXIBLE_VERSION_MIN
    replica_id, session_id, session_epoch, replica_epoch = -1, 0, -1, -1
    if version < _REPLICA_STATE_VERSION_MIN:
        (replica_id,) = _INT.unpack_from(frame, position)
        position += 4
    if version >= 7:
        limits = _FETCH_FIELDS_AND_SESSION.unpack_from(frame, position)
        position += _FETCH_FIELDS_AND_SESSION.size
        session_id, session_epoch = limits[4:]
    else:
        limits = _FETCH_FIELDS.unpack_from(frame, position)
        position += _FETCH_FIELDS.size
    topics, position, remaining = _read_topics(version, frame, position)
    forgotten: list[ForgottenTopic] = []
    if version >= 7:
        forgotten, position = _read_forgotten(version, frame, position, remaining)
    rack_id, is_repair_read = "", False
    if version >= 11:
        text, position = (read_compact_string if flexible else read_string)(frame, position)
        if text is None:
            raise WireError("a null rack id")
        rack_id = text
    if flexible:
        if frame[position] == 0:
            position += 1
        else:
            replica_id, replica_epoch, is_repair_read, position = _read_request_tags(
                version, frame, position, replica_id
            )
    wait_ms, min_bytes, max_bytes, isolation_level = limits[:4]
    request = FetchRequest(
        replica_id,
        wait_ms,
        min_bytes,
        max_bytes,
        isolation_level,
        session_id,
        session_epoch,
        topics,
        forgotten,
        rack_id,
        replica_epoch,
        is_repair_read,
    )
    return request, position


def _read_topics(version: int, frame: memoryview, position: int) -> tuple[list[Topic], int, int]:
    """(topics, position after them, number of entries the message may still have)."""
    flexible = version >= _FLEXIBLE_VERSION_MIN
    layout = _PARTITION_LAYOUTS[version]
    read_length = read_compact_count if flexible else read_count
    topic_count, position = read_length(frame, position, ENTRIES_MAX)
    remaining = ENTRIES_MAX - topic_count
    topics: list[Topic] = []
    for _ in range(topic_count):
        name, topic_id, position = read_topic(
            frame, position, by_id=version >= _TOPIC_ID_VERSION_MIN, flexible=flexible
        )
        count, position = read_length(frame, position, remaining)
        remaining -= count
        partitions: list[FetchPartition] = []
        for _ in range(count):
            fields = layout.unpack_from(frame, position)
            position += layout.size
            if version >= 12:
                partitions.append(FetchPartition._make(fields))
                position = position + 1 if frame[position] == 0 else skip_tagged_fields(frame, position)
            else:
                partitions.append(_partition_of_older_version(version, fields))
        if flexible:
            position = position + 1 if frame[position] == 0 else skip_tagged_fields(frame, position)
        topics.append((name, topic_id, partitions))
    return topics, position, remaining


def _partition_of_older_version(version: int, fields: tuple[int, ...]) -> FetchPartition:
    if version >= 9:
        index, epoch, offset, start, max_bytes = fields
        return FetchPartition(index, epoch, offset, -1, start, max_bytes)
    if version >= 5:
        index, offset, start, max_bytes = fields
        return FetchPartition(index, -1, offset, -1, start, max_bytes)
    index, offset, max_bytes = fields
    return FetchPartition(index, -1, offset, -1, -1, max_bytes)


def _read_forgotten(
    version: int, frame: memoryview, position: int, remaining: int
) -> tuple[list[ForgottenTopic], int]:
    flexible = version >= _FLEXIBLE_VERSION_MIN
    read_length = read_compact_count if flexible else read_count
    topic_count, position = read_length(frame, position, remaining)
    remaining -= topic_count
    forgotten: list[ForgottenTopic] = []
    for _ in range(topic_count):
        name, topic_id, position = read_topic(
            frame, position, by_id=version >= _TOPIC_ID_VERSION_MIN, flexible=flexible
        )
        count, position = read_length(frame, position, remaining)
        remaining -= count
        end = position + 4 * count
        partitions = [index for (index,) in _INT.iter_unpack(frame[position:end])]
        if len(partitions) != count:
            raise WireError("the message ends within the forgotten partitions")
        position = end
        if flexible:
            position = skip_tagged_fields(frame, position)
        forgotten.append((name, topic_id, partitions))
    return forgotten, position


def _read_request_tags(
    version: int, frame: memoryview, position: int, replica_id: int
) -> tuple[int, int, bool, int]:
    """(replica id, broker epoch, is repair read, position after the tagged fields of the request)."""
    replica_epoch, is_repair_read = -1, False
    count, position = read_tag_count(frame, position)
    for _ in range(count):
        tag, position = read_unsigned_varint(frame, position)
        length, position = read_unsigned_varint(frame, position)
        end = position + length
        if end > len(frame):
            raise WireError("a tagged field is longer than the message")
        if tag == _REPLICA_STATE_TAG and version >= _REPLICA_STATE_VERSION_MIN:
            if length < _REPLICA.size:
                raise WireError("a replica state that is too short")
            replica_id, replica_epoch = _REPLICA.unpack_from(frame, position)
        elif tag == _REPAIR_TAG and version >= _REPLICA_STATE_VERSION_MIN:
            is_repair_read = True
        position = end
    return replica_id, replica_epoch, is_repair_read, position


def encode_request(
    version: int,
    correlation_id: int,
    client_id: str | None,
    topics: Sequence[Topic],
    *,
    max_wait_ms: int,
    min_bytes: int,
    max_bytes: int,
    isolation_level: int = 0,
    session_id: int = 0,
    session_epoch: int = -1,
    forgotten_topics: Sequence[ForgottenTopic] = (),
    rack_id: str = "",
    replica_id: int = -1,
    replica_epoch: int = -1,
    is_repair_read: bool = False,
) -> bytes:
    """Encode a request frame: length, header, body. Fields that `version` lacks are dropped."""
    flexible = version >= _FLEXIBLE_VERSION_MIN
    by_id = version >= _TOPIC_ID_VERSION_MIN
    count = pack_compact_count if flexible else pack_count
    tags = b"\x00" if flexible else b""
    parts = [request_header(ApiKey.FETCH, version, correlation_id, client_id)]
    if version < _REPLICA_STATE_VERSION_MIN:
        parts.append(_INT.pack(replica_id))
    limits = (max_wait_ms, min_bytes, max_bytes, isolation_level)
    parts.append(
        _FETCH_FIELDS_AND_SESSION.pack(*limits, session_id, session_epoch)
        if version >= 7
        else _FETCH_FIELDS.pack(*limits)
    )
    parts.append(count(len(topics)))
    for name, topic_id, partitions in topics:
        parts += (pack_topic(name, topic_id, by_id=by_id, flexible=flexible), count(len(partitions)))
        for partition in partitions:
            parts += (_pack_fetch_partition(version, partition), tags)
        parts.append(tags)
    if version >= 7:
        parts.append(count(len(forgotten_topics)))
        for name, topic_id, indexes in forgotten_topics:
            parts += (pack_topic(name, topic_id, by_id=by_id, flexible=flexible), count(len(indexes)))
            parts += [_INT.pack(index) for index in indexes]
            parts.append(tags)
    if version >= 11:
        parts.append(pack_compact_string(rack_id) if flexible else pack_string(rack_id))
    if version >= _REPLICA_STATE_VERSION_MIN and (replica_id, replica_epoch) != (-1, -1):
        # One tagged field of 13 bytes: replica id, broker epoch, no tagged fields of its own.
        state = _REPLICA.pack(replica_id, replica_epoch)
        parts.append(bytes((1 + is_repair_read, _REPLICA_STATE_TAG, _REPLICA.size + 1)) + state + tags)
        if is_repair_read:
            parts.append(_REPAIR_FIELD)
    else:
        parts.append(tags)
    body = b"".join(parts)
    return _INT.pack(len(body)) + body


def _pack_fetch_partition(version: int, partition: FetchPartition) -> bytes:
    index, epoch, offset, last_epoch, start, max_bytes = partition
    pack = _PARTITION_LAYOUTS[version].pack
    if version >= 12:
        return pack(index, epoch, offset, last_epoch, start, max_bytes)
    if version >= 9:
        return pack(index, epoch, offset, start, max_bytes)
    if version >= 5:
        return pack(index, offset, start, max_bytes)
    return pack(index, offset, max_bytes)


class FetchedPartition(NamedTuple):
    """Result of one partition. `aborted_transactions` are (producer id, first offset), or None.

    `diverging_epoch`: (leader epoch, its end offset) up to which the follower's log agrees with the leader's (KIP-595);
    None unless the logs diverge before the fetch offset.
    """

    index: int  # type: ignore[assignment]  # hides tuple.index, which is not used here
    error_code: int = 0
    high_watermark: int = -1
    last_stable_offset: int = -1
    log_start_offset: int = -1
    aborted_transactions: Sequence[tuple[int, int]] | None = None
    preferred_read_replica: int = -1
    records_bytes: int = 0
    records: Any = None
    """To encode: any object that the caller can send, `records_bytes` long. Decoded: a view of the response."""
    diverging_epoch: tuple[int, int] | None = None


class FetchResponse(NamedTuple):
    """Response. `topics` are (name or None, id or None, [FetchedPartition])."""

    topics: list[TopicData]
    throttle_ms: int
    error_code: int
    session_id: int


def encode_response(
    version: int,
    correlation_id: int,
    topics: Sequence[TopicData],
    throttle_ms: int = 0,
    error_code: int = 0,
    session_id: int = 0,
) -> list[Any]:
    """Encode a response frame as buffers in order: bytes, records, bytes, records, ..., [bytes].

    Partitions with `records_bytes` 0 have no buffer for records. The first buffer begins with the frame length.
    """
    flexible = version >= _FLEXIBLE_VERSION_MIN
    by_id = version >= _TOPIC_ID_VERSION_MIN
    count = pack_compact_count if flexible else pack_count
    head = [_INT.pack(throttle_ms)]
    if version >= 7:
        head.append(_ERROR_SESSION.pack(error_code, session_id))
    head.append(count(len(topics)))
    pieces: list[Any] = []
    records_bytes = 0
    for name, topic_id, partitions in topics:
        head += (pack_topic(name, topic_id, by_id=by_id, flexible=flexible), count(len(partitions)))
        for partition in partitions:
            head.append(_pack_partition(version, partition, count))
            if partition.records_bytes:
                records_bytes += partition.records_bytes
                pieces += (b"".join(head), partition.records)
                head = []
            if flexible:
                head.append(
                    b"\x00"
                    if partition.diverging_epoch is None
                    else _pack_diverging(partition.diverging_epoch)
                )
        if flexible:
            head.append(b"\x00")
    if flexible:
        head.append(b"\x00")
    if head:
        pieces.append(b"".join(head))
    header_tags = b"\x00" if has_flexible_response_header(ApiKey.FETCH, version) else b""
    length = 4 + len(header_tags) + sum(map(len, pieces[::2])) + records_bytes
    pieces[0] = _FRAME_START.pack(length, correlation_id) + header_tags + pieces[0]
    return pieces


def _pack_partition(version: int, partition: FetchedPartition, count: Callable[[int], bytes]) -> bytes:
    """Encode one partition up to and including the length of its records."""
    index, error_code, high_watermark, last_stable, log_start, aborted, preferred, records_bytes = partition[
        :8
    ]
    flexible = version >= _FLEXIBLE_VERSION_MIN
    if version >= 11 and aborted is None:  # nearly every response: one pack call
        layout, null = (_FETCHED_NO_ABORTED, 0) if flexible else (_FETCHED_NO_ABORTED_CLASSIC, -1)
        start = layout.pack(index, error_code, high_watermark, last_stable, log_start, null, preferred)
        return start + count(records_bytes)
    if version >= 5:
        start = _FETCHED.pack(index, error_code, high_watermark, last_stable, log_start)
    else:
        start = _FETCHED_WITHOUT_START.pack(index, error_code, high_watermark, last_stable)
    if aborted is None:
        start += count(-1)
    else:
        tags = b"\x00" if flexible else b""
        start += count(len(aborted)) + b"".join([_ABORTED.pack(*pair) + tags for pair in aborted])
    if version >= 11:
        start += _INT.pack(preferred)
    return start + count(records_bytes)


def _pack_diverging(diverging: tuple[int, int]) -> bytes:
    return _DIVERGING_START + _DIVERGING.pack(*diverging) + b"\x00"


def decode_response(version: int, buffer: Buffer) -> FetchResponse:
    """Decode the response in `buffer`, a frame without its length. Records are views of `buffer`. Raises
    `WireError`."""
    try:
        _, position = read_response_header(ApiKey.FETCH, version, buffer)
        response, position = _decode_response(version, memoryview(buffer), position)
    except DECODE_ERRORS as error:
        raise WireError("not a Fetch response") from error
    if position != len(buffer):
        raise WireError(f"{len(buffer) - position} bytes after the end of a Fetch response")
    return response


def _decode_response(version: int, frame: memoryview, position: int) -> tuple[FetchResponse, int]:
    flexible = version >= _FLEXIBLE_VERSION_MIN
    read_length = read_compact_count if flexible else read_count
    (throttle_ms,) = _INT.unpack_from(frame, position)
    position += 4
    error_code = session_id = 0
    if version >= 7:
        error_code, session_id = _ERROR_SESSION.unpack_from(frame, position)
        position += _ERROR_SESSION.size
    topic_count, position = read_length(frame, position, ENTRIES_MAX)
    remaining = ENTRIES_MAX - topic_count
    topics: list[TopicData] = []
    for _ in range(topic_count):
        name, topic_id, position = read_topic(
            frame, position, by_id=version >= _TOPIC_ID_VERSION_MIN, flexible=flexible
        )
        count, position = read_length(frame, position, remaining)
        remaining -= count
        partitions: list[FetchedPartition] = []
        for _ in range(count):
            partition, position, remaining = _read_fetched(version, frame, position, remaining)
            partitions.append(partition)
        if flexible:
            position = skip_tagged_fields(frame, position)
        topics.append((name, topic_id, partitions))
    if flexible:
        position = skip_tagged_fields(frame, position)
    return FetchResponse(topics, throttle_ms, error_code, session_id), position


def _read_fetched(
    version: int, frame: memoryview, position: int, remaining: int
) -> tuple[FetchedPartition, int, int]:
    flexible = version >= _FLEXIBLE_VERSION_MIN
    layout = _FETCHED if version >= 5 else _FETCHED_WITHOUT_START
    fields = layout.unpack_from(frame, position)
    if version < 5:
        fields = (*fields, -1)
    aborted, position, remaining = _read_aborted(frame, position + layout.size, remaining, flexible=flexible)
    preferred_read_replica = -1
    if version >= 11:
        (preferred_read_replica,) = _INT.unpack_from(frame, position)
        position += 4
    if flexible:
        length, position = read_unsigned_varint(frame, position)
        length -= 1
    else:
        (length,) = _INT.unpack_from(frame, position)
        position += 4
    length = max(length, 0)  # null and empty are equivalent
    end = position + length
    if end > len(frame):
        raise WireError("record batches are longer than the response")
    records = frame[position:end]
    diverging = None
    position = end
    if flexible:
        if frame[end] == 0:
            position = end + 1
        else:
            diverging, position = _read_partition_tags(frame, end)
    partition = FetchedPartition._make((*fields, aborted, preferred_read_replica, length, records, diverging))
    return partition, position, remaining


def _read_partition_tags(frame: memoryview, position: int) -> tuple[tuple[int, int] | None, int]:
    """(diverging epoch or None, position after the tagged fields of a partition)."""
    diverging = None
    count, position = read_unsigned_varint(frame, position)
    for _ in range(count):
        tag, position = read_unsigned_varint(frame, position)
        length, position = read_unsigned_varint(frame, position)
        end = position + length
        if end > len(frame):
            raise WireError("a tagged field is longer than the message")
        if tag == _DIVERGING_TAG:
            if length < _DIVERGING.size:
                raise WireError("a diverging epoch that is too short")
            epoch, end_offset = _DIVERGING.unpack_from(frame, position)
            diverging = epoch, end_offset
        position = end
    return diverging, position


def _read_aborted(
    frame: memoryview, position: int, remaining: int, *, flexible: bool
) -> tuple[list[tuple[int, int]] | None, int, int]:
    if flexible:
        count, position = read_unsigned_varint(frame, position)
        count -= 1
    else:
        (count,) = _INT.unpack_from(frame, position)
        position += 4
    if count == -1:
        return None, position, remaining
    if not 0 <= count <= remaining:
        raise WireError(f"{count} aborted transactions")
    aborted: list[tuple[int, int]] = []
    for _ in range(count):
        aborted.append(_ABORTED.unpack_from(frame, position))
        position += _ABORTED.size
        if flexible:
            position = skip_tagged_fields(frame, position)
    return aborted, position, remaining - count


# -- messages of followers --------

REPLICA_FETCH_VERSION: Final = 17
ONE_BYTE_COUNT_MAX: Final = 0x7E
"""Largest count whose compact encoding takes one byte."""

_REPLICA_REQUEST_START: Final = Struct(">ihhih")
# Wait, min bytes, max bytes, isolation level, session id, session epoch, topics + 1.
_REPLICA_BODY_START: Final = Struct(">iiibiiB")
_REPLICA_TOPIC_START: Final = Struct(">16sB")  # id, partitions + 1
_REPLICA_PARTITION: Final = Struct(">iiqiqiB")  # as in `FetchPartition`, no tagged fields
# No forgotten topics, no rack; one tagged field of 13 bytes: replica id, broker epoch, no tagged fields of its own.
_REPLICA_BODY_END: Final = Struct(">BBBBBiqB")
_REPLICA_END_CONSTANTS: Final = (1, 1, 1, 1, 13)

_REPLICA_RESPONSE_START: Final = Struct(
    ">iBihiB"
)  # correlation id, no tags, throttle, error, session, topics + 1
_REPLICA_FRAMED_RESPONSE_START: Final = Struct(">iiBihiB")
# Of a partition: index, error, high watermark, last stable offset, log start, no aborted transactions, no other
# replica.
_REPLICA_FETCHED: Final = Struct(">ihqqqBi")
_REPLICA_FETCHED_EMPTY: Final = Struct(">ihqqqBiBB")  # and no records, no tagged fields
_new_tuple: Final = tuple.__new__


def encode_replica_request(
    client_id: bytes,
    topics: Mapping[bytes, Sequence[FetchPartition]],
    *,
    max_wait_ms: int,
    max_bytes: int,
    replica_id: int,
    replica_epoch: int,
    session_id: int = 0,
    session_epoch: int = -1,
) -> bytes:
    """Encode a request frame of a follower, with correlation id 0. `topics`: topic id -> requested partitions; at most
    `ONE_BYTE_COUNT_MAX` topics, and as many partitions of each, which the caller ensures."""
    start = _REPLICA_BODY_START.pack(max_wait_ms, 1, max_bytes, 0, session_id, session_epoch, len(topics) + 1)
    parts = [b"", client_id, b"\x00", start]
    for topic_id, partitions in topics.items():
        parts.append(_REPLICA_TOPIC_START.pack(topic_id, len(partitions) + 1))
        parts += [_REPLICA_PARTITION.pack(*wanted, 0) for wanted in partitions]
        parts.append(b"\x00")
    parts.append(_REPLICA_BODY_END.pack(*_REPLICA_END_CONSTANTS, replica_id, replica_epoch, 0))
    length = sum(map(len, parts)) + _REPLICA_REQUEST_START.size - 4
    parts[0] = _REPLICA_REQUEST_START.pack(length, ApiKey.FETCH, REPLICA_FETCH_VERSION, 0, len(client_id))
    return b"".join(parts)


def decode_replica_request(frame: memoryview, position: int) -> FetchRequest | None:
    """Decode a follower's request in `REPLICA_FETCH_VERSION`, whose body starts at `position` of `frame`. None for
    requests that only the general codec decodes."""
    end = len(frame) - _REPLICA_BODY_END.size
    try:
        wait_ms, min_bytes, max_bytes, isolation, session, epoch, topic_count = (
            _REPLICA_BODY_START.unpack_from(frame, position)
        )
        if not 0 < topic_count <= ONE_BYTE_COUNT_MAX + 1:
            return None
        *constants, replica_id, replica_epoch, tags = _REPLICA_BODY_END.unpack_from(frame, end)
        if tags or tuple(constants) != _REPLICA_END_CONSTANTS:
            return None
        position += _REPLICA_BODY_START.size
        topics: list[Topic] = []
        for _ in range(topic_count - 1):
            topic_id, count = _REPLICA_TOPIC_START.unpack_from(frame, position)
            if not 0 < count <= ONE_BYTE_COUNT_MAX + 1:
                return None
            position += _REPLICA_TOPIC_START.size
            partitions = []
            for _ in range(count - 1):
                fields = _REPLICA_PARTITION.unpack_from(frame, position)
                if fields[6]:
                    return None
                partitions.append(_new_tuple(FetchPartition, fields[:6]))
                position += _REPLICA_PARTITION.size
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


def encode_replica_response(
    correlation_id: int, topics: Sequence[TopicData], error_code: int = 0, session_id: int = 0
) -> list[Any] | None:
    """Encode the response frame to a follower as buffers in order, as `encode_response` does. None for responses that
    only the general codec encodes."""
    if len(topics) > ONE_BYTE_COUNT_MAX:
        return None
    head = [b""]
    pieces: list[Any] = []
    records_bytes = 0
    for _, topic_id, partitions in topics:
        if topic_id is None or len(partitions) > ONE_BYTE_COUNT_MAX:
            return None
        head.append(_REPLICA_TOPIC_START.pack(topic_id, len(partitions) + 1))
        for partition in partitions:
            index, code, high_watermark, stable, start, aborted, preferred, size, records, parts = partition
            if aborted is not None or parts is not None:
                return None
            if not size:
                head.append(
                    _REPLICA_FETCHED_EMPTY.pack(
                        index, code, high_watermark, stable, start, 0, preferred, 1, 0
                    )
                )
                continue
            head.append(_REPLICA_FETCHED.pack(index, code, high_watermark, stable, start, 0, preferred))
            head.append(unsigned_varint(size + 1))
            pieces += (b"".join(head), records)
            records_bytes += size
            head = [b"\x00"]
        head.append(b"\x00")
    head.append(b"\x00")
    pieces.append(b"".join(head))
    length = sum(map(len, pieces[::2])) + records_bytes + _REPLICA_RESPONSE_START.size
    pieces[0] = (
        _REPLICA_FRAMED_RESPONSE_START.pack(
            length, correlation_id, 0, 0, error_code, session_id, len(topics) + 1
        )
        + pieces[0]
    )
    return pieces


def decode_replica_response(frame: Buffer) -> FetchResponse | None:
    """Decode the response to a follower in `REPLICA_FETCH_VERSION` in `frame`, a frame without its length. None for
    responses that only the general codec decodes. Records are views of `frame`. Raises `WireError` for an invalid
    length."""
    view = memoryview(frame)
    size = len(view)
    try:
        _, tags, throttle_ms, error_code, session_id, topic_count = _REPLICA_RESPONSE_START.unpack_from(view)
        if tags or not 0 < topic_count <= ONE_BYTE_COUNT_MAX + 1:
            return None
        position = _REPLICA_RESPONSE_START.size
        topics: list[TopicData] = []
        for _ in range(topic_count - 1):
            topic_id, count = _REPLICA_TOPIC_START.unpack_from(view, position)
            if not 0 < count <= ONE_BYTE_COUNT_MAX + 1:
                return None
            position += _REPLICA_TOPIC_START.size
            partitions: list[FetchedPartition] = []
            for _ in range(count - 1):
                index, code, high_watermark, stable, start, aborted, preferred = _REPLICA_FETCHED.unpack_from(
                    view, position
                )
                if aborted:
                    return None
                position += _REPLICA_FETCHED.size
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
