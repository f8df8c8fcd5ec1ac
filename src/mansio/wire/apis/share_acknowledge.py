"""Hand-written codec of ShareAcknowledge (API key 79), versions 1 and 2 (KIP-932).

Both versions are flexible (KIP-482); version 2 adds renewals (KIP-1222). The module `share_fetch` uses the functions
for acknowledgements, leaders and endpoints, which have the same layout in ShareFetch.

Invariants:
* Decoding malformed bytes raises `WireError` and nothing else.
* A decoded message has at most `ENTRIES_MAX` topics, partitions, batches and endpoints.
* Tagged fields are not written, and skipped when reading.
"""

from __future__ import annotations

from struct import Struct
from typing import TYPE_CHECKING, Final, NamedTuple

from mansio.errors import WireError
from mansio.wire.api_versions import ApiKey
from mansio.wire.headers import framed_response, read_response_header, request_header, skip_tagged_fields
from mansio.wire.primitives import (
    DECODE_ERRORS,
    ENTRIES_MAX,
    pack_compact_count,
    pack_compact_string,
    read_compact_count,
    read_compact_string,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mansio.ports import Buffer

    Topic = tuple[bytes, list["AckPartition"]]

RENEWAL_VERSION_MIN: Final = 2
"""The first version with renewals, of ShareAcknowledge and of ShareFetch."""

_INT: Final = Struct(">i")
_RANGE: Final = Struct(">qq")
_RESULT: Final = Struct(">ih")
_LEADER: Final = Struct(">ii")
_ERROR: Final = Struct(">ih")  # throttle time, error code
_NO_TAGGED_FIELDS: Final = b"\x00"


class AckBatch(NamedTuple):
    """Acknowledgement of the offsets `first_offset` to `last_offset`, both included. `acknowledge_types`: one byte for
    all offsets, or one for each."""

    first_offset: int
    last_offset: int
    acknowledge_types: bytes


class AckPartition(NamedTuple):
    """Acknowledgements of one partition in a request."""

    index: int  # type: ignore[assignment]  # hides tuple.index, which is not needed
    batches: list[AckBatch]


class ShareAcknowledgeRequest(NamedTuple):
    """Request. `topics` are (topic id, [AckPartition]); `is_renew_ack`: the acknowledgements may be renewals."""

    group_id: str | None
    member_id: str | None
    session_epoch: int
    is_renew_ack: bool
    topics: list[Topic]


class Endpoint(NamedTuple):
    """Address of the broker that leads a partition."""

    node_id: int
    host: str
    port: int
    rack: str | None = None


class AckResult(NamedTuple):
    """Result of one partition. Leader and epoch are -1 unless the error names another leader."""

    index: int  # type: ignore[assignment]  # hides tuple.index, which is not needed
    error_code: int = 0
    error_message: str | None = None
    leader_id: int = -1
    leader_epoch: int = -1


class ShareAcknowledgeResponse(NamedTuple):
    """Response. `topics` are (topic id, [AckResult]); `lock_ms`: duration of renewed leases, 0 in version 1."""

    throttle_ms: int
    error_code: int
    error_message: str | None
    lock_ms: int
    topics: list[tuple[bytes, list[AckResult]]]
    endpoints: list[Endpoint]


def decode_request(version: int, frame: memoryview, position: int) -> ShareAcknowledgeRequest:
    """Decode the request whose body starts at `position` of `frame`. Raises `WireError`."""
    try:
        group_id, position = read_compact_string(frame, position)
        member_id, position = read_compact_string(frame, position)
        (epoch,) = _INT.unpack_from(frame, position)
        position += 4
        renews = False
        if version >= RENEWAL_VERSION_MIN:
            renews = frame[position] != 0
            position += 1
        topics, position, _ = read_topics(frame, position)
        position = skip_tags(frame, position)
    except DECODE_ERRORS as error:
        raise WireError("not a ShareAcknowledge request") from error
    if position != len(frame):
        raise WireError(f"{len(frame) - position} bytes after the end of a ShareAcknowledge request")
    return ShareAcknowledgeRequest(group_id, member_id, epoch, renews, topics)


def encode_request(
    version: int,
    correlation_id: int,
    client_id: str | None,
    group_id: str,
    member_id: str,
    session_epoch: int,
    topics: Sequence[Topic],
    *,
    is_renew_ack: bool = False,
) -> bytes:
    """Encode a request frame: length, header, body."""
    parts = [
        request_header(ApiKey.SHARE_ACKNOWLEDGE, version, correlation_id, client_id),
        pack_compact_string(group_id),
        pack_compact_string(member_id),
        _INT.pack(session_epoch),
    ]
    if version >= RENEWAL_VERSION_MIN:
        parts.append(b"\x01" if is_renew_ack else b"\x00")
    pack_topics(parts, topics)
    parts.append(_NO_TAGGED_FIELDS)
    body = b"".join(parts)
    return _INT.pack(len(body)) + body


def encode_response(version: int, correlation_id: int, response: ShareAcknowledgeResponse) -> bytes:
    """Encode a response frame: length, header, body."""
    parts = [
        _ERROR.pack(response.throttle_ms, response.error_code),
        pack_compact_string(response.error_message),
    ]
    if version >= RENEWAL_VERSION_MIN:
        parts.append(_INT.pack(response.lock_ms))
    parts.append(pack_compact_count(len(response.topics)))
    for topic_id, results in response.topics:
        parts += (topic_id, pack_compact_count(len(results)))
        for result in results:
            parts += (
                _RESULT.pack(result.index, result.error_code),
                pack_compact_string(result.error_message),
                _LEADER.pack(result.leader_id, result.leader_epoch),
                b"\x00\x00",  # no tagged fields of the leader, none of the partition
            )
        parts.append(_NO_TAGGED_FIELDS)
    pack_endpoints(parts, response.endpoints)
    parts.append(_NO_TAGGED_FIELDS)
    return framed_response(ApiKey.SHARE_ACKNOWLEDGE, version, correlation_id, b"".join(parts))


def decode_response(version: int, buffer: Buffer) -> ShareAcknowledgeResponse:
    """Decode the response in `buffer`, a frame without its length. Raises `WireError`."""
    try:
        _, position = read_response_header(ApiKey.SHARE_ACKNOWLEDGE, version, buffer)
        response, position = _decode_response(version, memoryview(buffer), position)
    except DECODE_ERRORS as error:
        raise WireError("not a ShareAcknowledge response") from error
    if position != len(buffer):
        raise WireError(f"{len(buffer) - position} bytes after the end of a ShareAcknowledge response")
    return response


def _decode_response(version: int, frame: memoryview, position: int) -> tuple[ShareAcknowledgeResponse, int]:
    throttle_ms, error_code = _ERROR.unpack_from(frame, position)
    message, position = read_compact_string(frame, position + _ERROR.size)
    lock_ms = 0
    if version >= RENEWAL_VERSION_MIN:
        (lock_ms,) = _INT.unpack_from(frame, position)
        position += 4
    topic_count, position = read_compact_count(frame, position, ENTRIES_MAX)
    entries_left = ENTRIES_MAX - topic_count
    topics: list[tuple[bytes, list[AckResult]]] = []
    for _ in range(topic_count):
        topic_id, position = read_topic_id(frame, position)
        count, position = read_compact_count(frame, position, entries_left)
        entries_left -= count
        results: list[AckResult] = []
        for _ in range(count):
            index, code = _RESULT.unpack_from(frame, position)
            why, position = read_compact_string(frame, position + _RESULT.size)
            leader_id, leader_epoch, position = read_leader(frame, position)
            position = skip_tags(frame, position)
            results.append(AckResult(index, code, why, leader_id, leader_epoch))
        position = skip_tags(frame, position)
        topics.append((topic_id, results))
    endpoints, position = read_endpoints(frame, position, entries_left)
    position = skip_tags(frame, position)
    return ShareAcknowledgeResponse(throttle_ms, error_code, message, lock_ms, topics, endpoints), position


# -- shared with ShareFetch --------


def skip_tags(frame: memoryview, position: int) -> int:
    """Return the position after the tagged fields that begin at `position`; fast if there are none."""
    return position + 1 if frame[position] == 0 else skip_tagged_fields(frame, position)


def read_topic_id(frame: memoryview, position: int) -> tuple[bytes, int]:
    """(topic id, position after it)."""
    end = position + 16
    topic_id = bytes(frame[position:end])
    if len(topic_id) != 16:
        raise WireError("the message ends within a topic id")
    return topic_id, end


def read_topics(frame: memoryview, position: int) -> tuple[list[Topic], int, int]:
    """(topics with acknowledgements, position after them, number of entries the message may still have)."""
    topic_count, position = read_compact_count(frame, position, ENTRIES_MAX)
    entries_left = ENTRIES_MAX - topic_count
    topics: list[Topic] = []
    for _ in range(topic_count):
        topic_id, position = read_topic_id(frame, position)
        count, position = read_compact_count(frame, position, entries_left)
        entries_left -= count
        partitions: list[AckPartition] = []
        for _ in range(count):
            (index,) = _INT.unpack_from(frame, position)
            batches, position, entries_left = _read_batches(frame, position + 4, entries_left)
            position = skip_tags(frame, position)
            partitions.append(AckPartition(index, batches))
        position = skip_tags(frame, position)
        topics.append((topic_id, partitions))
    return topics, position, entries_left


def _read_batches(frame: memoryview, position: int, entries_left: int) -> tuple[list[AckBatch], int, int]:
    count, position = read_compact_count(frame, position, entries_left)
    batches: list[AckBatch] = []
    for _ in range(count):
        first, last = _RANGE.unpack_from(frame, position)
        types, position = read_compact_count(frame, position + _RANGE.size, len(frame))
        end = position + types
        batches.append(AckBatch(first, last, bytes(frame[position:end])))
        position = skip_tags(frame, end)
    return batches, position, entries_left - count


def pack_topics(parts: list[bytes], topics: Sequence[Topic]) -> None:
    """Encode topics with acknowledgements and append the bytes to `parts`."""
    parts.append(pack_compact_count(len(topics)))
    for topic_id, partitions in topics:
        parts += (topic_id, pack_compact_count(len(partitions)))
        for partition in partitions:
            parts += (_INT.pack(partition.index), pack_compact_count(len(partition.batches)))
            for first, last, types in partition.batches:
                parts += (_RANGE.pack(first, last), pack_compact_count(len(types)), types, _NO_TAGGED_FIELDS)
            parts.append(_NO_TAGGED_FIELDS)
        parts.append(_NO_TAGGED_FIELDS)


def read_leader(frame: memoryview, position: int) -> tuple[int, int, int]:
    """(leader id, leader epoch, position after them)."""
    leader_id, leader_epoch = _LEADER.unpack_from(frame, position)
    return leader_id, leader_epoch, skip_tags(frame, position + _LEADER.size)


def pack_endpoints(parts: list[bytes], endpoints: Sequence[Endpoint]) -> None:
    """Encode the endpoints and append the bytes to `parts`."""
    parts.append(pack_compact_count(len(endpoints)))
    for node_id, host, port, rack in endpoints:
        parts += (
            _INT.pack(node_id),
            pack_compact_string(host),
            _INT.pack(port),
            pack_compact_string(rack),
            _NO_TAGGED_FIELDS,
        )


def read_endpoints(frame: memoryview, position: int, entries_left: int) -> tuple[list[Endpoint], int]:
    """(endpoints, position after them)."""
    count, position = read_compact_count(frame, position, entries_left)
    endpoints: list[Endpoint] = []
    for _ in range(count):
        (node_id,) = _INT.unpack_from(frame, position)
        host, position = read_compact_string(frame, position + 4)
        (port,) = _INT.unpack_from(frame, position)
        rack, position = read_compact_string(frame, position + 4)
        position = skip_tags(frame, position)
        if host is None:
            raise WireError("an endpoint without a host")
        endpoints.append(Endpoint(node_id, host, port, rack))
    return endpoints, position
