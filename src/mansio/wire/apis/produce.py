"""Produce, by hand: the request that carries data in.

Every record enters through `decode_request`, so it looks only at lengths and hands out views into the frame:
its cost does not depend on how many records there are. The other directions are for the client and for the
tests.

Always true: record batches are neither copied nor looked into; bytes that are not a Produce message raise
`WireError` and nothing else; a request names at most `MAX_ENTRIES` topics and partitions.

Versions 3 to 13. Flexible (KIP-482) from 9, topic ids instead of names from 13 (KIP-516); log start offset
from 5, record errors from 8 (KIP-467). `current_leader` and `node_endpoints` (10, KIP-951) are tagged: left
out and skipped.
"""

from __future__ import annotations

from struct import Struct
from typing import TYPE_CHECKING, Final, NamedTuple

from mansio.errors import WireError
from mansio.wire.api_versions import ApiKey
from mansio.wire.headers import (
    framed_response,
    read_response_header,
    read_unsigned_varint,
    request_header,
    skip_tagged_fields,
)
from mansio.wire.primitives import (
    DECODE_ERRORS,
    MAX_ENTRIES,
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
    from collections.abc import Sequence

    from mansio.ports import Buffer

    Topic = tuple[str | None, bytes | None, list[tuple[int, memoryview | None]]]
    TopicResult = tuple[str | None, bytes | None, list["PartitionResult"]]

_FLEXIBLE: Final = 9
_TOPIC_IDS: Final = 13

_ACKS: Final = Struct(">hi")
_INT: Final = Struct(">i")
_INT_INT: Final = Struct(">ii")
_RESULT: Final = Struct(">ihqqq")  # index, error code, base offset, append time, log start offset
_RESULT_WITHOUT_START: Final = Struct(">ihqq")


class ProduceRequest(NamedTuple):
    """What a producer asks. `topics` are (name or None, id or None, [(partition, batches or None)])."""

    transactional_id: str | None
    acks: int
    timeout_ms: int
    topics: list[Topic]


class PartitionResult(NamedTuple):
    """What became of one partition's batch. Offsets and times are -1 where unknown."""

    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody needs here
    error_code: int = 0
    base_offset: int = -1
    log_append_time_ms: int = -1
    log_start_offset: int = -1
    error_message: str | None = None
    record_errors: tuple[tuple[int, str | None], ...] = ()
    """(index of the record in the batch, message or None)."""


class ProduceResponse(NamedTuple):
    """The answer: [(name or None, id or None, [PartitionResult])]."""

    topics: list[TopicResult]
    throttle_ms: int


def decode_request(version: int, frame: memoryview, position: int) -> ProduceRequest:
    """The request whose body starts at `position` of `frame`. Records are views of `frame`. Raises
    `WireError`."""
    try:
        read = _decode_flexible_request if version >= _FLEXIBLE else _decode_classic_request
        request, position = read(version, frame, position)
    except DECODE_ERRORS as error:
        raise WireError("not a Produce request") from error
    if position != len(frame):
        raise WireError(f"{len(frame) - position} bytes after the end of a Produce request")
    return request


def _decode_flexible_request(version: int, frame: memoryview, position: int) -> tuple[ProduceRequest, int]:
    transactional_id, position = read_compact_string(frame, position)
    acks, timeout_ms = _ACKS.unpack_from(frame, position)
    topic_count, position = read_compact_count(frame, position + 6, MAX_ENTRIES)
    room = MAX_ENTRIES - topic_count
    topics: list[Topic] = []
    size = len(frame)
    for _ in range(topic_count):
        name, topic_id, position = read_topic(frame, position, by_id=version >= _TOPIC_IDS, flexible=True)
        count, position = read_compact_count(frame, position, room)
        room -= count
        partitions: list[tuple[int, memoryview | None]] = []
        for _ in range(count):
            (index,) = _INT.unpack_from(frame, position)
            length, position = read_unsigned_varint(frame, position + 4)
            if length:
                end = position + length - 1
                if end >= size:
                    raise WireError("record batches are longer than the request")
                partitions.append((index, frame[position:end]))
                position = end
            else:
                partitions.append((index, None))
            position = position + 1 if frame[position] == 0 else skip_tagged_fields(frame, position)
        topics.append((name, topic_id, partitions))
        position = position + 1 if frame[position] == 0 else skip_tagged_fields(frame, position)
    position = position + 1 if frame[position] == 0 else skip_tagged_fields(frame, position)
    return ProduceRequest(transactional_id, acks, timeout_ms, topics), position


def _decode_classic_request(_version: int, frame: memoryview, position: int) -> tuple[ProduceRequest, int]:
    transactional_id, position = read_string(frame, position)
    acks, timeout_ms = _ACKS.unpack_from(frame, position)
    topic_count, position = read_count(frame, position + 6, MAX_ENTRIES)
    room = MAX_ENTRIES - topic_count
    topics: list[Topic] = []
    size = len(frame)
    for _ in range(topic_count):
        name, position = read_string(frame, position)
        if name is None:
            raise WireError("a topic without a name")
        count, position = read_count(frame, position, room)
        room -= count
        partitions: list[tuple[int, memoryview | None]] = []
        for _ in range(count):
            index, length = _INT_INT.unpack_from(frame, position)
            position += 8
            if length >= 0:
                end = position + length
                if end > size:
                    raise WireError("record batches are longer than the request")
                partitions.append((index, frame[position:end]))
                position = end
            elif length == -1:
                partitions.append((index, None))
            else:
                raise WireError(f"record batches of {length} bytes")
        topics.append((name, None, partitions))
    return ProduceRequest(transactional_id, acks, timeout_ms, topics), position


def encode_response(
    version: int, correlation_id: int, topics: Sequence[TopicResult], throttle_ms: int = 0
) -> bytes:
    """The whole response: frame length, header, body."""
    flexible = version >= _FLEXIBLE
    count = pack_compact_count if flexible else pack_count
    tags = b"\x00" if flexible else b""
    parts = [count(len(topics))]
    for name, topic_id, results in topics:
        parts.append(pack_topic(name, topic_id, flexible=flexible, by_id=version >= _TOPIC_IDS))
        parts.append(count(len(results)))
        for result in results:
            if version >= 5:
                parts.append(_RESULT.pack(*result[:5]))
            else:
                parts.append(_RESULT_WITHOUT_START.pack(*result[:4]))
            if version >= 8:
                parts.append(_pack_errors(result, flexible=flexible))
            parts.append(tags)
        parts.append(tags)
    parts += (_INT.pack(throttle_ms), tags)
    return framed_response(ApiKey.PRODUCE, version, correlation_id, b"".join(parts))


def _pack_errors(result: PartitionResult, *, flexible: bool) -> bytes:
    if not result.record_errors and result.error_message is None:
        return b"\x01\x00" if flexible else b"\x00\x00\x00\x00\xff\xff"
    count = pack_compact_count if flexible else pack_count
    text = pack_compact_string if flexible else pack_string
    parts = [count(len(result.record_errors))]
    for index, message in result.record_errors:
        parts += (_INT.pack(index), text(message), b"\x00" if flexible else b"")
    parts.append(text(result.error_message))
    return b"".join(parts)


def encode_request(
    version: int,
    correlation_id: int,
    client_id: str | None,
    acks: int,
    timeout_ms: int,
    topics: Sequence[tuple[str | None, bytes | None, Sequence[tuple[int, Buffer | None]]]],
    transactional_id: str | None = None,
) -> list[Buffer]:
    """The whole request as buffers to be sent one after the other; the batches among them are the caller's
    own."""
    flexible = version >= _FLEXIBLE
    count = pack_compact_count if flexible else pack_count
    text = pack_compact_string if flexible else pack_string
    tags = b"\x00" if flexible else b""
    head = [request_header(ApiKey.PRODUCE, version, correlation_id, client_id)]
    head += (text(transactional_id), _ACKS.pack(acks, timeout_ms), count(len(topics)))
    pieces: list[Buffer] = []
    for name, topic_id, partitions in topics:
        head.append(pack_topic(name, topic_id, flexible=flexible, by_id=version >= _TOPIC_IDS))
        head.append(count(len(partitions)))
        for index, records in partitions:
            head.append(_INT.pack(index))
            if records is None:
                head.append(count(-1))
            else:
                head.append(count(len(records)))
                pieces += (b"".join(head), records)
                head = []
            head.append(tags)
        head.append(tags)
    head.append(tags)
    pieces.append(b"".join(head))
    length = sum(map(len, pieces))
    pieces[0] = _INT.pack(length) + bytes(pieces[0])
    return pieces


def decode_response(version: int, buffer: Buffer) -> ProduceResponse:
    """The response in `buffer` (everything after the frame's length). Raises `WireError`."""
    try:
        _, position = read_response_header(ApiKey.PRODUCE, version, buffer)
        response, position = _decode_response(version, memoryview(buffer), position)
    except DECODE_ERRORS as error:
        raise WireError("not a Produce response") from error
    if position != len(buffer):
        raise WireError(f"{len(buffer) - position} bytes after the end of a Produce response")
    return response


def _decode_response(version: int, frame: memoryview, position: int) -> tuple[ProduceResponse, int]:
    flexible = version >= _FLEXIBLE
    read_length = read_compact_count if flexible else read_count
    topic_count, position = read_length(frame, position, MAX_ENTRIES)
    room = MAX_ENTRIES - topic_count
    topics: list[TopicResult] = []
    for _ in range(topic_count):
        name, topic_id, position = read_topic(frame, position, by_id=version >= _TOPIC_IDS, flexible=flexible)
        count, position = read_length(frame, position, room)
        room -= count
        results: list[PartitionResult] = []
        for _ in range(count):
            result, position, room = _read_result(version, frame, position, room)
            results.append(result)
        if flexible:
            position = skip_tagged_fields(frame, position)
        topics.append((name, topic_id, results))
    (throttle_ms,) = _INT.unpack_from(frame, position)
    position += 4
    if flexible:
        position = skip_tagged_fields(frame, position)
    return ProduceResponse(topics, throttle_ms), position


def _read_result(
    version: int, frame: memoryview, position: int, room: int
) -> tuple[PartitionResult, int, int]:
    flexible = version >= _FLEXIBLE
    layout = _RESULT if version >= 5 else _RESULT_WITHOUT_START
    fields = layout.unpack_from(frame, position)
    position += layout.size
    message: str | None = None
    errors: list[tuple[int, str | None]] = []
    if version >= 8:
        read_text = read_compact_string if flexible else read_string
        count, position = (read_compact_count if flexible else read_count)(frame, position, room)
        room -= count
        for _ in range(count):
            (index,) = _INT.unpack_from(frame, position)
            text, position = read_text(frame, position + 4)
            errors.append((index, text))
            if flexible:
                position = skip_tagged_fields(frame, position)
        message, position = read_text(frame, position)
    if flexible:
        position = skip_tagged_fields(frame, position)
    if version < 5:
        fields = (*fields, -1)
    return PartitionResult._make((*fields, message, tuple(errors))), position, room
