"""Codec of ShareFetch (API key 78), versions 1 and 2, hand-written because all records of share groups pass through it.

Both versions are flexible (KIP-482), with topics by id (KIP-932); version 2 adds the acquire mode (KIP-1206) and
renewals (KIP-1222). As in `fetch`, a response is encoded as a list of buffers with the caller's log slices in between;
one partition may have several log slices.

Invariants:
* Records are not accessed; only their length is used.
* Decoding malformed bytes raises `WireError` and nothing else.
* A message has at most `ENTRIES_MAX` topics, partitions, ranges and endpoints.
* No tagged fields are written but `LEASE_TAG` and `KEEP_TAG`, and all others are skipped when reading.
"""

from __future__ import annotations

from functools import lru_cache
from struct import Struct
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from mansio.errors import WireError
from mansio.wire.api_versions import ApiKey
from mansio.wire.apis.share_acknowledge import (
    RENEWAL_VERSION_MIN,
    AckBatch,
    AckPartition,
    Endpoint,
    pack_endpoints,
    pack_topics,
    read_endpoints,
    read_leader,
    read_topic_id,
    read_topics,
    skip_tags,
)
from mansio.wire.headers import read_response_header, read_unsigned_varint, request_header, unsigned_varint
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

    TopicData = tuple[bytes, list["SharePartitionData"]]
    from mansio.wire.apis.share_acknowledge import Topic

    ForgottenTopic = tuple[bytes, list[int]]


__all__ = [
    "BATCH_OPTIMIZED",
    "RECORD_LIMIT",
    "AckBatch",
    "AckPartition",
    "Endpoint",
    "ShareFetchRequest",
    "ShareFetchResponse",
    "SharePartitionData",
    "decode_request",
    "decode_response",
    "encode_request",
    "encode_response",
    "encode_usual_response",
]

_FRAME_START: Final = Struct(">iiB")
_REQUEST_START: Final = Struct(">hhi")  # API key, version, correlation id
_ERROR: Final = Struct(">ih")  # throttle time, error code
_INT: Final = Struct(">i")
_SHORT: Final = Struct(">h")
_ERROR_CODE: Final = Struct(">ih")  # partition, error code
_NO_ERROR: Final = Struct(
    ">ihBhBiiB"
)  # partition, two codes with null messages, a leader without tagged fields
_LEADER: Final = Struct(">ii")
_RANGE: Final = Struct(">qqhB")  # a range, its delivery count, no tagged fields
_RANGE_READ: Final = Struct(">qqh")


class SharePartitionData(NamedTuple):
    """Result of one partition. `acquired` are (first offset, last offset, delivery count), both offsets included.

    `records`: when encoding, any buffers that the caller can send, `records_bytes` long in total; after decoding, at
    most one view of the response. Leader and epoch are -1 unless the error names another leader.
    """

    index: int  # type: ignore[assignment]  # hides tuple.index, which is not needed
    error_code: int = 0
    error_message: str | None = None
    acknowledge_error_code: int = 0
    acknowledge_error_message: str | None = None
    leader_id: int = -1
    leader_epoch: int = -1
    records_bytes: int = 0
    records: Sequence[Any] = ()
    acquired: Sequence[tuple[int, int, int]] = ()


class ShareFetchResponse(NamedTuple):
    """Response. `topics` are (topic id, [SharePartitionData]); `lock_ms`: duration of the leases."""

    throttle_ms: int
    error_code: int
    error_message: str | None
    lock_ms: int
    topics: list[TopicData]
    endpoints: list[Endpoint]


def encode_response(
    version: int,  # noqa: ARG001 - the two versions are alike; the signature is that of all codecs
    correlation_id: int,
    topics: Sequence[TopicData],
    *,
    lock_ms: int = 0,
    throttle_ms: int = 0,
    error_code: int = 0,
    error_message: str | None = None,
    endpoints: Sequence[Endpoint] = (),
) -> list[Any]:
    """Encode a response frame as buffers in order: bytes, then the `records` of a partition, bytes, and so on.

    The first buffer begins with the frame length.
    """
    head = [
        _ERROR.pack(throttle_ms, error_code),
        pack_compact_string(error_message),
        _INT.pack(lock_ms),
        pack_compact_count(len(topics)),
    ]
    pieces: list[Any] = []
    sent_bytes = 0
    for topic_id, partitions in topics:
        head += (topic_id, pack_compact_count(len(partitions)))
        for partition in partitions:
            head.append(_pack_partition(partition))
            if partition.records_bytes:
                before = b"".join(head)
                sent_bytes += len(before) + partition.records_bytes
                pieces += (before, *partition.records)
                head = []
            head.append(pack_compact_count(len(partition.acquired)))
            head += [_RANGE.pack(*acquired, 0) for acquired in partition.acquired]
            head.append(b"\x00")
        head.append(b"\x00")
    pack_endpoints(head, endpoints)
    head.append(b"\x00")
    pieces.append(b"".join(head))
    length = 5 + sent_bytes + len(pieces[-1])
    pieces[0] = _FRAME_START.pack(length, correlation_id, 0) + pieces[0]
    return pieces


_USUAL_RESPONSE: Final = Struct(">iiBihBiB16sBihBhBiiB")
"""Frame length, correlation id; throttle time, error code and message; duration of the leases; one topic; one partition
with two codes and null messages, and no leader."""
_USUAL_END: Final = Struct(">BqqhBBBBB")
"""One acquired range; ends of the range, the partition, and the topic; no endpoints; end of the response."""


def encode_usual_response(
    correlation_id: int,
    topic_id: bytes,
    index: int,
    lock_ms: int,
    records: Any,
    records_bytes: int,
    acquired: tuple[int, int, int],
) -> tuple[bytes, Any, bytes]:
    """As `encode_response`, for one partition with one acquired range and without an error."""
    count = unsigned_varint(records_bytes + 1)
    length = _USUAL_RESPONSE.size - 4 + len(count) + records_bytes + _USUAL_END.size
    return (
        _USUAL_RESPONSE.pack(
            length, correlation_id, 0, 0, 0, 0, lock_ms, 2, topic_id, 2, index, 0, 0, 0, 0, -1, -1, 0
        )
        + count,
        records,
        _USUAL_END.pack(2, *acquired, 0, 0, 0, 1, 0),
    )


def _pack_partition(partition: SharePartitionData) -> bytes:
    """Encode one partition up to and including the length of its records."""
    if partition.error_message is None and partition.acknowledge_error_message is None:
        start = _NO_ERROR.pack(
            partition.index,
            partition.error_code,
            0,
            partition.acknowledge_error_code,
            0,
            partition.leader_id,
            partition.leader_epoch,
            0,
        )
        return start + pack_compact_count(partition.records_bytes)
    return b"".join(
        (
            _ERROR_CODE.pack(partition.index, partition.error_code),
            pack_compact_string(partition.error_message),
            _SHORT.pack(partition.acknowledge_error_code),
            pack_compact_string(partition.acknowledge_error_message),
            _LEADER.pack(partition.leader_id, partition.leader_epoch),
            b"\x00",
            pack_compact_count(partition.records_bytes),
        )
    )


def decode_response(version: int, buffer: Buffer) -> ShareFetchResponse:
    """Decode the response in `buffer`, a frame without its length. Records are views of `buffer`. Raises
    `WireError`."""
    try:
        _, position = read_response_header(ApiKey.SHARE_FETCH, version, buffer)
        response, position = _decode_response(memoryview(buffer), position)
    except DECODE_ERRORS as error:
        raise WireError("not a ShareFetch response") from error
    if position != len(buffer):
        raise WireError(f"{len(buffer) - position} bytes after the end of a ShareFetch response")
    return response


def _decode_response(frame: memoryview, position: int) -> tuple[ShareFetchResponse, int]:
    throttle_ms, error_code = _ERROR.unpack_from(frame, position)
    message, position = read_compact_string(frame, position + _ERROR.size)
    (lock_ms,) = _INT.unpack_from(frame, position)
    topic_count, position = read_compact_count(frame, position + 4, ENTRIES_MAX)
    entries_left = ENTRIES_MAX - topic_count
    topics: list[TopicData] = []
    for _ in range(topic_count):
        topic_id, position = read_topic_id(frame, position)
        count, position = read_compact_count(frame, position, entries_left)
        entries_left -= count
        partitions: list[SharePartitionData] = []
        for _ in range(count):
            partition, position, entries_left = _read_partition(frame, position, entries_left)
            partitions.append(partition)
        position = skip_tags(frame, position)
        topics.append((topic_id, partitions))
    endpoints, position = read_endpoints(frame, position, entries_left)
    position = skip_tags(frame, position)
    return ShareFetchResponse(throttle_ms, error_code, message, lock_ms, topics, endpoints), position


def _read_partition(
    frame: memoryview, position: int, entries_left: int
) -> tuple[SharePartitionData, int, int]:
    index, error_code = _ERROR_CODE.unpack_from(frame, position)
    message, position = read_compact_string(frame, position + _ERROR_CODE.size)
    (ack_code,) = _SHORT.unpack_from(frame, position)
    ack_message, position = read_compact_string(frame, position + 2)
    leader_id, leader_epoch, position = read_leader(frame, position)
    length, position = read_unsigned_varint(frame, position)
    length = max(length - 1, 0)  # null and empty mean the same here
    end = position + length
    if end > len(frame):
        raise WireError("record batches are longer than the response")
    records = (frame[position:end],) if length else ()
    count, position = read_compact_count(frame, end, entries_left)
    acquired: list[tuple[int, int, int]] = []
    for _ in range(count):
        acquired.append(_RANGE_READ.unpack_from(frame, position))
        position = skip_tags(frame, position + _RANGE_READ.size)
    position = skip_tags(frame, position)
    partition = SharePartitionData(
        index,
        error_code,
        message,
        ack_code,
        ack_message,
        leader_id,
        leader_epoch,
        length,
        records,
        acquired,
    )
    return partition, position, entries_left - count


BATCH_OPTIMIZED: Final = 0
RECORD_LIMIT: Final = 1
"""Acquire modes (KIP-1206): whole batches, even if they have more than `max_records`; or at most `max_records`
records."""
_FETCH_FIELDS: Final = Struct(">iiiiii")  # epoch, max wait, min bytes, max bytes, max records, batch size
_FETCH_FIELDS_AND_MODE: Final = Struct(">iiiiiibb")  # and acquire mode, is renew ack


LEASE_TAG: Final = 20000
"""Tag of Mansio's own field of a request: duration of the leases in ms, 64 bits. Kafka's brokers skip it."""

KEEP_TAG: Final = 20001
"""Tag of Mansio's own field of a request: a boolean, whether leases outlive the connection of the share session that a
request opens. Kafka's brokers skip it."""

_LONG: Final = Struct(">q")
_LEASE_FIELD_START: Final = b"\xa0\x9c\x01\x08"
"""Beginning of a tagged field with `LEASE_TAG`, of eight bytes."""
_KEEP_FIELD: Final = b"\xa1\x9c\x01\x01\x01"
"""Tagged field with `KEEP_TAG` and the value true."""

_USUAL_FIELDS: Final = Struct(">iiiiiibbB")  # as `_FETCH_FIELDS_AND_MODE`, and the number of topics
_USUAL_PARTITION: Final = Struct(">16sBiB")  # topic id, number of partitions, index, number of batches
_USUAL_BATCH: Final = Struct(">qqBcB")  # range, number of types, type, number of tagged fields
_NONE, _ONE, _LONGER = 1, 2, 0x80
"""First bytes of compact lengths: 0, 1, and one of several bytes."""


class ShareFetchRequest(NamedTuple):
    """Request. `topics` are (topic id, [AckPartition]): partitions to add to the share session, with acknowledgements;
    `forgotten_topics` are (topic id, [partition]) to remove from it. `batch_size`: preferred number of records in an
    acquired batch; `lease_ms`: duration of the leases, -1 for the group's; `keeps_leases`: whether they
    outlive the connection of the session."""

    group_id: str | None
    member_id: str | None
    session_epoch: int
    max_wait_ms: int
    min_bytes: int
    max_bytes: int
    max_records: int
    batch_size: int
    acquire_mode: int
    is_renew_ack: bool
    topics: list[Topic]
    forgotten_topics: list[ForgottenTopic]
    lease_ms: int = -1
    keeps_leases: bool = False


def decode_request(version: int, frame: memoryview, position: int) -> ShareFetchRequest:
    """Decode the request whose body starts at `position` of `frame`. Raises `WireError`."""
    if version >= RENEWAL_VERSION_MIN:
        try:
            found = _decode_usual_request(frame, position)
        except (*DECODE_ERRORS, WireError):  # another form may be shorter
            found = None
        if found is not None:
            return found
    try:
        request, position = _decode_request(version, frame, position)
    except DECODE_ERRORS as error:
        raise WireError("not a ShareFetch request") from error
    if position != len(frame):
        raise WireError(f"{len(frame) - position} bytes after the end of a ShareFetch request")
    return request


def _decode_usual_request(frame: memoryview, position: int) -> ShareFetchRequest | None:
    """As `_decode_request`, with a fourth of the calls, for a request about at most one partition, with one type for
    each acknowledged range. Returns None, or raises `WireError` or one of `DECODE_ERRORS`, for any other request, and
    for an invalid one."""
    group_end = position + (frame[position] or 1)
    member_end = group_end + (frame[group_end] or 1)
    if frame[position] >= _LONGER or frame[group_end] >= _LONGER:
        return None
    group_id, member_id = _decode_member(bytes(frame[position:member_end]))
    epoch, wait_ms, min_bytes, max_bytes, max_records, batch_size, mode, renews, topic_count = (
        _USUAL_FIELDS.unpack_from(frame, member_end)
    )
    position = member_end + _USUAL_FIELDS.size
    topics: list[Topic] = []
    if topic_count == _ONE:
        topic_id, partition_count, index, batch_count = _USUAL_PARTITION.unpack_from(frame, position)
        position += _USUAL_PARTITION.size
        if partition_count != _ONE or not 0 < batch_count < _LONGER:
            return None
        batches: list[AckBatch] = []
        for _ in range(batch_count - 1):
            first, last, type_count, types, tag_count = _USUAL_BATCH.unpack_from(frame, position)
            if type_count != _ONE or tag_count:
                return None
            batches.append(AckBatch(first, last, types))
            position += _USUAL_BATCH.size
        if frame[position] or frame[position + 1]:  # tagged fields
            return None
        position += 2
        topics.append((topic_id, [AckPartition(index, batches)]))
    elif topic_count != _NONE:
        return None
    if frame[position] != _NONE:
        return None
    lease_ms, keeps_leases, position = _read_own_fields(frame, position + 1)
    if position != len(frame):
        return None
    return ShareFetchRequest(
        group_id,
        member_id,
        epoch,
        wait_ms,
        min_bytes,
        max_bytes,
        max_records,
        batch_size,
        mode,
        renews != 0,
        topics,
        [],
        lease_ms,
        keeps_leases,
    )


@lru_cache(maxsize=1024)
def _decode_member(names: bytes) -> tuple[str | None, str | None]:
    """Decode a group id and a member id."""
    view = memoryview(names)
    group_id, position = read_compact_string(view, 0)
    return group_id, read_compact_string(view, position)[0]


def _decode_request(version: int, frame: memoryview, position: int) -> tuple[ShareFetchRequest, int]:
    group_id, position = read_compact_string(frame, position)
    member_id, position = read_compact_string(frame, position)
    if version >= RENEWAL_VERSION_MIN:
        limits = _FETCH_FIELDS_AND_MODE.unpack_from(frame, position)
        position += _FETCH_FIELDS_AND_MODE.size
    else:
        limits = (*_FETCH_FIELDS.unpack_from(frame, position), BATCH_OPTIMIZED, 0)
        position += _FETCH_FIELDS.size
    epoch, wait_ms, min_bytes, max_bytes, max_records, batch_size, mode, renews = limits
    topics, position, entries_left = read_topics(frame, position)
    forgotten: list[ForgottenTopic] = []
    count, position = read_compact_count(frame, position, entries_left)
    entries_left -= count
    for _ in range(count):
        topic_id, position = read_topic_id(frame, position)
        partitions, position = read_compact_count(frame, position, entries_left)
        entries_left -= partitions
        end = position + 4 * partitions
        indexes = [index for (index,) in _INT.iter_unpack(frame[position:end])]
        if len(indexes) != partitions:
            raise WireError("the message ends within the forgotten partitions")
        position = skip_tags(frame, end)
        forgotten.append((topic_id, indexes))
    lease_ms, keeps_leases, position = _read_own_fields(frame, position)
    request = ShareFetchRequest(
        group_id,
        member_id,
        epoch,
        wait_ms,
        min_bytes,
        max_bytes,
        max_records,
        batch_size,
        mode,
        renews != 0,
        topics,
        forgotten,
        lease_ms,
        keeps_leases,
    )
    return request, position


def _read_own_fields(frame: memoryview, position: int) -> tuple[int, bool, int]:
    """Return the values of the fields `LEASE_TAG` (-1 if it is missing) and `KEEP_TAG`, and the position after all
    tagged fields."""
    if frame[position] == 0:
        return -1, False, position + 1
    count, position = read_unsigned_varint(frame, position)
    lease_ms, keeps_leases = -1, False
    for _ in range(count):
        tag, position = read_unsigned_varint(frame, position)
        length, position = read_unsigned_varint(frame, position)
        end = position + length
        if end > len(frame):
            raise WireError("a tagged field is longer than the message")
        if tag == LEASE_TAG:
            if length != _LONG.size:
                raise WireError("the duration of a lease has 8 bytes")
            (lease_ms,) = _LONG.unpack_from(frame, position)
        elif tag == KEEP_TAG:
            if length != 1:
                raise WireError("whether leases are kept has 1 byte")
            keeps_leases = frame[position] != 0
        position = end
    return lease_ms, keeps_leases, position


def encode_request(
    version: int,
    correlation_id: int,
    client_id: str | None,
    group_id: str,
    member_id: str,
    session_epoch: int,
    topics: Sequence[Topic],
    *,
    max_wait_ms: int,
    min_bytes: int,
    max_bytes: int,
    max_records: int,
    batch_size: int,
    acquire_mode: int = BATCH_OPTIMIZED,
    is_renew_ack: bool = False,
    forgotten_topics: Sequence[ForgottenTopic] = (),
    lease_ms: int = -1,
    keeps_leases: bool = False,
) -> bytes:
    """Encode a request frame: length, header, body. Fields that `version` lacks are dropped."""
    limits = (session_epoch, max_wait_ms, min_bytes, max_bytes, max_records, batch_size)
    parts = [
        _REQUEST_START.pack(ApiKey.SHARE_FETCH, version, correlation_id),
        _encode_member(version, client_id, group_id, member_id),
        _FETCH_FIELDS_AND_MODE.pack(*limits, acquire_mode, is_renew_ack)
        if version >= RENEWAL_VERSION_MIN
        else _FETCH_FIELDS.pack(*limits),
    ]
    pack_topics(parts, topics)
    parts.append(pack_compact_count(len(forgotten_topics)))
    for topic_id, indexes in forgotten_topics:
        parts += (topic_id, pack_compact_count(len(indexes)))
        parts += [_INT.pack(index) for index in indexes]
        parts.append(b"\x00")
    parts.append(bytes(((lease_ms >= 0) + keeps_leases,)))
    if lease_ms >= 0:
        parts.append(_LEASE_FIELD_START + _LONG.pack(lease_ms))
    if keeps_leases:
        parts.append(_KEEP_FIELD)
    body = b"".join(parts)
    return _INT.pack(len(body)) + body


@lru_cache(maxsize=64)
def _encode_member(version: int, client_id: str | None, group_id: str, member_id: str) -> bytes:
    """Encode what all requests of one member have after the correlation id: client id, group id, member id."""
    header = request_header(ApiKey.SHARE_FETCH, version, 0, client_id)
    return header[_REQUEST_START.size :] + pack_compact_string(group_id) + pack_compact_string(member_id)
