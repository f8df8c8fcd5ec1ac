"""AcknowledgeRecords (API 20100): hand-written codec, because consumers may send one request per record.

The schema is `mansio_apis.AcknowledgeRecordsRequest`. A request with one range of one partition, and its successful
response, are encoded and decoded by the client as one struct of fixed size.

Invariants: the bytes written equal those of the schema's writer; the requests accepted and refused equal those of the
schema's reader. Malformed bytes raise `WireError` and nothing else. A message has at most `MAX_ENTRIES` topics,
partitions and batches. Tagged fields are omitted and skipped; bytes after a request in its frame are ignored, as in
`messages`.
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
    MAX_ENTRIES,
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
    """First and last offset, types, delay, reason, delivery count: see `mansio_apis.AcknowledgeBatch`."""

VERSION: Final = 0

_INT: Final = Struct(">i")
_LONG: Final = Struct(">q")
_OFFSETS: Final = Struct(">qq")
_RANGE: Final = Struct(">qqBBq")  # offsets, one type behind its length, delay
_COUNT: Final = Struct(">iB")  # delivery count, no tagged fields
_RESULT: Final = Struct(">ih")  # partition, error code
_SETTLED: Final = Struct(">ihBB")  # partition, no error, no message, no tagged fields
_ERROR: Final = Struct(">ih")  # throttle time, error code
_ANSWER: Final = Struct(">ihBi")  # throttle time, no error, no message, duration of a lease
_TAGLESS: Final = b"\x00"
_ONE: Final = 2  # a length of one, as KIP-482 writes it
_START: Final = Struct(">ihhi")  # length, API, version, correlation id
_START_BYTES: Final = 8  # of the header, which the length is not part of
_SINGLE: Final = Struct(">B16sBiBqqBBqBiBBBB")
_SINGLE_DONE: Final = Struct(">iBihBiB16sBihBBBB")
_NO_TAGS: Final = (0, 0, 0, 0)  # behind the innermost, and behind all that it is in
_DONE: Final = (0, 0, 0, _ONE, _ONE, *(0, 0, 0, 0, 0))
"""A successful response of that size: no error, no message, one topic, one partition, no tagged
fields."""


class AcknowledgeBatch(NamedTuple):
    """Offsets `first` to `last`, both included, with one type of acknowledgement for all; see
    `mansio_apis.AcknowledgeBatch`."""

    first: int
    last: int
    kind: int
    delay_ms: int
    reason: str
    delivery_count: int


class AcknowledgePartition(NamedTuple):
    """Acknowledgements of one partition, as decoded by a broker."""

    topic_id: bytes
    partition: int
    batches: list[Batch]


class AcknowledgeRecordsRequest(NamedTuple):
    """Request with partitions in its order."""

    group_id: str
    member_id: str
    partitions: list[AcknowledgePartition]


class AcknowledgedPartition(NamedTuple):
    """Result of one partition, as encoded by a broker: code 0, or why nothing was applied."""

    partition: int
    error_code: int = 0
    error_message: str | None = None


class AcknowledgeResult(NamedTuple):
    """Result of one partition: all of its batches are applied, or none."""

    topic_id: bytes
    partition: int
    error_code: int
    error_message: str | None


class AcknowledgeRecordsResponse(NamedTuple):
    """The response. `lock_ms`: duration of renewed leases, 0 if unknown."""

    throttle_ms: int
    error_code: int
    error_message: str | None
    lock_ms: int
    results: list[AcknowledgeResult]


def encode_request(
    correlation_id: int, client_id: str | None, group_id: str, member_id: str, topics: Sequence[Topic]
) -> bytes:
    """The whole request: frame length, header, body. `topics`: (id, [(partition, [AcknowledgeBatch])])."""
    who = _common(client_id, group_id, member_id)
    body = _single(topics) or _body(topics)
    length = _START_BYTES + len(who) + len(body)
    return _START.pack(length, ApiKey.ACKNOWLEDGE_RECORDS, VERSION, correlation_id) + who + body


@lru_cache(maxsize=64)
def _common(client_id: str | None, group_id: str, member_id: str) -> bytes:
    """The bytes common to all requests of one member, after the correlation id."""
    header = request_header(ApiKey.ACKNOWLEDGE_RECORDS, VERSION, 0, client_id)
    return header[_START_BYTES:] + pack_compact_string(group_id) + pack_compact_string(member_id)


def _single(topics: Sequence[Topic]) -> bytes | None:
    """The body after the names, if it has one batch of one partition without a reason."""
    if len(topics) != 1 or len(topics[0][1]) != 1:
        return None
    topic_id, ((index, batches),) = topics[0]
    if len(batches) != 1 or batches[0].reason:
        return None
    first, last, kind, delay_ms, _, count = batches[0]
    values = (first, last, _ONE, kind, delay_ms, 1, count)
    return _SINGLE.pack(_ONE, topic_id, _ONE, index, _ONE, *values, *_NO_TAGS)


def _body(topics: Sequence[Topic]) -> bytes:
    parts = [pack_compact_count(len(topics))]
    for topic_id, partitions in topics:
        parts += (topic_id, pack_compact_count(len(partitions)))
        for index, batches in partitions:
            parts += (_INT.pack(index), pack_compact_count(len(batches)))
            for first, last, kind, delay_ms, reason, delivery_count in batches:
                parts += (
                    _RANGE.pack(first, last, _ONE, kind, delay_ms),
                    pack_compact_string(reason),
                    _COUNT.pack(delivery_count, 0),
                )
            parts.append(_TAGLESS)
        parts.append(_TAGLESS)
    parts.append(_TAGLESS)
    return b"".join(parts)


def decode_request(frame: memoryview, position: int = 0) -> AcknowledgeRecordsRequest:
    """The request whose body starts at `position` of `frame`. Raises `WireError`."""
    try:
        return _decode_request(frame, position)
    except DECODE_ERRORS as error:
        raise WireError("not a AcknowledgeRecords request") from error


def _decode_request(frame: memoryview, position: int) -> AcknowledgeRecordsRequest:
    group_id, position = _read_text(frame, position)
    member_id, position = _read_text(frame, position)
    topic_count, position = read_compact_count(frame, position, MAX_ENTRIES)
    entries_left = MAX_ENTRIES - topic_count
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
    """(batches of a partition, position after it, entries still allowed)."""
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
    """The whole response: frame length, header, body."""
    parts = [_ANSWER.pack(0, 0, 0, lock_ms), pack_compact_count(len(topics))]
    for topic_id, partitions in topics.items():
        parts += (topic_id, pack_compact_count(len(partitions)))
        for index, code, message in partitions:
            if not code and message is None:
                parts.append(_SETTLED.pack(index, 0, 0, 0))
            else:
                parts += (_RESULT.pack(index, code), pack_compact_string(message), _TAGLESS)
        parts.append(_TAGLESS)
    parts.append(_TAGLESS)
    return framed_response(ApiKey.ACKNOWLEDGE_RECORDS, VERSION, correlation_id, b"".join(parts))


def decode_response(buffer: Buffer) -> AcknowledgeRecordsResponse:
    """The response in `buffer` (everything after the frame's length). Raises `WireError`."""
    if len(buffer) == _SINGLE_DONE.size:
        _, tags, throttle_ms, code, text, lock_ms, many, topic_id, each, index, *rest = _SINGLE_DONE.unpack(
            buffer
        )
        if (tags, code, text, many, each, *rest) == _DONE:
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
    throttle_ms, error_code = _ERROR.unpack_from(frame, position)
    message, position = read_compact_string(frame, position + _ERROR.size)
    (lock_ms,) = _INT.unpack_from(frame, position)
    topic_count, position = read_compact_count(frame, position + _INT.size, MAX_ENTRIES)
    entries_left = MAX_ENTRIES - topic_count
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
