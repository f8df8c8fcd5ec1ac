"""Codec of AcknowledgeRecords (API key 20100), hand-written because consumers may send one request per record.

The schema is `mansio_apis.AcknowledgeRecordsRequest`. The client encodes a request with one range of one partition, and
decodes its successful response, as one struct of fixed size.

Invariants:
* Encoded bytes equal those of the codec that `messages` compiles from the schema, and both accept the same requests.
* Decoding malformed bytes raises `WireError` and nothing else.
* A message has at most `ENTRIES_MAX` topics, partitions and batches.
* Tagged fields are not written, and skipped when reading. Bytes after the end of a request are ignored.
"""

from __future__ import annotations

from functools import lru_cache
from struct import Struct
from typing import TYPE_CHECKING, Final, NamedTuple

from mansio.errors import WireError
from mansio.wire.api_versions import ApiKey
from mansio.wire.apis.share_acknowledge import read_topic_id, skip_tags
from mansio.wire.headers import framed_response, read_response_header, request_header
from mansio.wire.primitives import (
    DECODE_ERRORS,
    ENTRIES_MAX,
    pack_compact_count,
    pack_compact_string,
    read_compact_count,
    read_compact_string,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mansio.ports import Buffer

    Topic = tuple[bytes, Sequence[tuple[int, Sequence["AcknowledgeBatch"]]]]

    Batch = tuple[int, int, bytes, int, str, int]
    """First offset, last offset, acknowledge types, delay in ms, reason, delivery count: see
    `mansio_apis.AcknowledgeBatch`."""

VERSION: Final = 0

_INT: Final = Struct(">i")
_LONG: Final = Struct(">q")
_OFFSETS: Final = Struct(">qq")
_RANGE: Final = Struct(">qqBBq")  # offsets, length and value of the acknowledge types, delay
_DELIVERY_COUNT: Final = Struct(">iB")  # delivery count, no tagged fields
_RESULT: Final = Struct(">ih")  # partition, error code
_SUCCESS_RESULT: Final = Struct(">ihBB")  # partition, no error, no message, no tagged fields
_RESPONSE_START: Final = Struct(">ih")  # throttle time, error code
_SUCCESS_START: Final = Struct(">ihBi")  # throttle time, no error, no message, duration of a lease
_NO_TAGGED_FIELDS: Final = b"\x00"
_LENGTH_ONE: Final = 2  # compact length (KIP-482) of 1
_REQUEST_START: Final = Struct(">ihhi")  # frame length, API key, version, correlation id
_HEADER_START_BYTES: Final = 8  # API key, version, correlation id
_ONE_BATCH_BODY: Final = Struct(">B16sBiBqqBBqBiBBBB")
_ONE_PARTITION_SUCCESS: Final = Struct(">iBihBiB16sBihBBBB")
_NO_TAGGED_FIELDS_OF_LEVELS: Final = (0, 0, 0, 0)  # of the batch, the partition, the topic and the request
_ONE_PARTITION_SUCCESS_CONSTANTS: Final = (0, 0, 0, _LENGTH_ONE, _LENGTH_ONE, *(0, 0, 0, 0, 0))
"""The constant fields of a successful response with one partition."""


class AcknowledgeBatch(NamedTuple):
    """Acknowledgement of the offsets `first_offset` to `last_offset`, both included; see
    `mansio_apis.AcknowledgeBatch`."""

    first_offset: int
    last_offset: int
    acknowledge_type: int
    delay_ms: int
    reason: str
    delivery_count: int


class AcknowledgePartition(NamedTuple):
    """Acknowledgements of one partition in a decoded request."""

    topic_id: bytes
    partition: int
    batches: list[Batch]


class AcknowledgeRecordsRequest(NamedTuple):
    """Decoded request; `partitions` in the order of the request, not grouped by topic."""

    group_id: str
    member_id: str
    partitions: list[AcknowledgePartition]


class AcknowledgedPartition(NamedTuple):
    """Result of one partition in a response to encode. With an error none of its acknowledgements is applied."""

    partition: int
    error_code: int = 0
    error_message: str | None = None


class AcknowledgeResult(NamedTuple):
    """Result of one partition in a decoded response. With an error none of its acknowledgements is applied."""

    topic_id: bytes
    partition: int
    error_code: int
    error_message: str | None


class AcknowledgeRecordsResponse(NamedTuple):
    """Decoded response. `lock_ms`: duration of renewed leases, 0 if unknown."""

    throttle_ms: int
    error_code: int
    error_message: str | None
    lock_ms: int
    results: list[AcknowledgeResult]


def encode_request(
    correlation_id: int, client_id: str | None, group_id: str, member_id: str, topics: Sequence[Topic]
) -> bytes:
    """Encode a request frame: length, header, body. `topics`: (topic id, [(partition, [AcknowledgeBatch])])."""
    member = _encode_member(client_id, group_id, member_id)
    body = _encode_one_batch(topics) or _encode_body(topics)
    length = _HEADER_START_BYTES + len(member) + len(body)
    return _REQUEST_START.pack(length, ApiKey.ACKNOWLEDGE_RECORDS, VERSION, correlation_id) + member + body


@lru_cache(maxsize=64)
def _encode_member(client_id: str | None, group_id: str, member_id: str) -> bytes:
    """Encode what all requests of one member have after the correlation id: client id, group id, member id."""
    header = request_header(ApiKey.ACKNOWLEDGE_RECORDS, VERSION, 0, client_id)
    return header[_HEADER_START_BYTES:] + pack_compact_string(group_id) + pack_compact_string(member_id)


def _encode_one_batch(topics: Sequence[Topic]) -> bytes | None:
    """Encode the topics of a request that has one batch of one partition, without a reason; None for other requests."""
    if len(topics) != 1 or len(topics[0][1]) != 1:
        return None
    topic_id, ((index, batches),) = topics[0]
    if len(batches) != 1 or batches[0].reason:
        return None
    first, last, kind, delay_ms, _, count = batches[0]
    values = (first, last, _LENGTH_ONE, kind, delay_ms, 1, count)
    return _ONE_BATCH_BODY.pack(
        _LENGTH_ONE, topic_id, _LENGTH_ONE, index, _LENGTH_ONE, *values, *_NO_TAGGED_FIELDS_OF_LEVELS
    )


def _encode_body(topics: Sequence[Topic]) -> bytes:
    parts = [pack_compact_count(len(topics))]
    for topic_id, partitions in topics:
        parts += (topic_id, pack_compact_count(len(partitions)))
        for index, batches in partitions:
            parts += (_INT.pack(index), pack_compact_count(len(batches)))
            for first, last, kind, delay_ms, reason, delivery_count in batches:
                parts += (
                    _RANGE.pack(first, last, _LENGTH_ONE, kind, delay_ms),
                    pack_compact_string(reason),
                    _DELIVERY_COUNT.pack(delivery_count, 0),
                )
            parts.append(_NO_TAGGED_FIELDS)
        parts.append(_NO_TAGGED_FIELDS)
    parts.append(_NO_TAGGED_FIELDS)
    return b"".join(parts)


def decode_request(frame: memoryview, position: int = 0) -> AcknowledgeRecordsRequest:
    """Decode the request whose body starts at `position` of `frame`. Raises `WireError`."""
    try:
        return _decode_request(frame, position)
    except DECODE_ERRORS as error:
        raise WireError("not a AcknowledgeRecords request") from error


def _decode_request(frame: memoryview, position: int) -> AcknowledgeRecordsRequest:
    group_id, position = _read_text(frame, position)
    member_id, position = _read_text(frame, position)
    topic_count, position = read_compact_count(frame, position, ENTRIES_MAX)
    entries_left = ENTRIES_MAX - topic_count
    partitions: list[AcknowledgePartition] = []
    for _ in range(topic_count):
        topic_id, position = read_topic_id(frame, position)
        count, position = read_compact_count(frame, position, entries_left)
        entries_left -= count
        for _ in range(count):
            (index,) = _INT.unpack_from(frame, position)
            batches, position, entries_left = _read_batches(frame, position + _INT.size, entries_left)
            partitions.append(AcknowledgePartition(topic_id, index, batches))
        position = skip_tags(frame, position)
    skip_tags(frame, position)
    return AcknowledgeRecordsRequest(group_id, member_id, partitions)


def _read_batches(frame: memoryview, position: int, entries_left: int) -> tuple[list[Batch], int, int]:
    """(batches of a partition, position after the partition, number of entries the message may still have)."""
    count, position = read_compact_count(frame, position, entries_left)
    batches: list[Batch] = []
    for _ in range(count):
        first, last = _OFFSETS.unpack_from(frame, position)
        length, position = read_compact_count(frame, position + _OFFSETS.size, len(frame))
        types = bytes(frame[position : position + length])
        position += length
        (delay_ms,) = _LONG.unpack_from(frame, position)
        reason, position = _read_text(frame, position + _LONG.size)
        (deliveries,) = _INT.unpack_from(frame, position)
        position = skip_tags(frame, position + _INT.size)
        batches.append((first, last, types, delay_ms, reason, deliveries))
    return batches, skip_tags(frame, position), entries_left - count


def _read_text(frame: memoryview, position: int) -> tuple[str, int]:
    text, position = read_compact_string(frame, position)
    if text is None:
        raise WireError("a string is null")
    return text, position


def encode_response(
    correlation_id: int, topics: Mapping[bytes, Sequence[AcknowledgedPartition]], *, lock_ms: int
) -> bytes:
    """Encode a response frame: length, header, body. `topics`: topic id -> results; `lock_ms`: duration of renewed
    leases."""
    parts = [_SUCCESS_START.pack(0, 0, 0, lock_ms), pack_compact_count(len(topics))]
    for topic_id, partitions in topics.items():
        parts += (topic_id, pack_compact_count(len(partitions)))
        for index, code, message in partitions:
            if not code and message is None:
                parts.append(_SUCCESS_RESULT.pack(index, 0, 0, 0))
            else:
                parts += (_RESULT.pack(index, code), pack_compact_string(message), _NO_TAGGED_FIELDS)
        parts.append(_NO_TAGGED_FIELDS)
    parts.append(_NO_TAGGED_FIELDS)
    return framed_response(ApiKey.ACKNOWLEDGE_RECORDS, VERSION, correlation_id, b"".join(parts))


def decode_response(buffer: Buffer) -> AcknowledgeRecordsResponse:
    """Decode the response in `buffer`, a frame without its length. Raises `WireError`."""
    if len(buffer) == _ONE_PARTITION_SUCCESS.size:
        _, tags, throttle_ms, code, text, lock_ms, many, topic_id, each, index, *rest = (
            _ONE_PARTITION_SUCCESS.unpack(buffer)
        )
        if (tags, code, text, many, each, *rest) == _ONE_PARTITION_SUCCESS_CONSTANTS:
            result = AcknowledgeResult(topic_id, index, 0, None)
            return AcknowledgeRecordsResponse(throttle_ms, 0, None, lock_ms, [result])
    try:
        _, position = read_response_header(ApiKey.ACKNOWLEDGE_RECORDS, VERSION, buffer)
        response, position = _decode_response(memoryview(buffer), position)
    except DECODE_ERRORS as error:
        raise WireError("not a AcknowledgeRecords response") from error
    if position != len(buffer):
        raise WireError(f"{len(buffer) - position} bytes after the end of a AcknowledgeRecords response")
    return response


def _decode_response(frame: memoryview, position: int) -> tuple[AcknowledgeRecordsResponse, int]:
    throttle_ms, error_code = _RESPONSE_START.unpack_from(frame, position)
    message, position = read_compact_string(frame, position + _RESPONSE_START.size)
    (lock_ms,) = _INT.unpack_from(frame, position)
    topic_count, position = read_compact_count(frame, position + _INT.size, ENTRIES_MAX)
    entries_left = ENTRIES_MAX - topic_count
    results: list[AcknowledgeResult] = []
    for _ in range(topic_count):
        topic_id, position = read_topic_id(frame, position)
        count, position = read_compact_count(frame, position, entries_left)
        entries_left -= count
        for _ in range(count):
            index, code = _RESULT.unpack_from(frame, position)
            why, position = read_compact_string(frame, position + _RESULT.size)
            position = skip_tags(frame, position)
            results.append(AcknowledgeResult(topic_id, index, code, why))
        position = skip_tags(frame, position)
    position = skip_tags(frame, position)
    return AcknowledgeRecordsResponse(throttle_ms, error_code, message, lock_ms, results), position
