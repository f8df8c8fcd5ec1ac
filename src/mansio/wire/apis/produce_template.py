"""Produce requests that look like the last one: most of them do.

A producer's requests to one partition differ in the correlation id, the partition and the batch; client id, acks,
timeout and topic stay. A `ProduceTemplate` keeps those bytes, so that the next request is recognised by comparing
them, and its answer is a few fields between two constants. What is not recognised takes the long way through
`wire.apis.produce`.

Always true: `match_template` accepts only frames that `produce.decode_request` would read the same way, and
`answer` gives the bytes of `produce.encode_response` (property tests hold both).
"""

from __future__ import annotations

from struct import Struct
from typing import TYPE_CHECKING, Final, NamedTuple

from mansio.wire.headers import unsigned_varint
from mansio.wire.primitives import pack_compact_count, pack_count, pack_topic

if TYPE_CHECKING:
    from mansio.wire.apis.produce import ProduceRequest
    from mansio.wire.headers import RequestHeader

_FLEXIBLE: Final = 9
_TOPIC_IDS: Final = 13
_AFTER_CORRELATION_ID: Final = 8
_NO_TAGS: Final = b"\x00\x00\x00"  # of the partition, of the topic, of the request

_INT: Final = Struct(">i")
_INT_INT: Final = Struct(">ii")
_HEAD: Final = Struct(">ii")  # frame length, correlation id
_RESULT: Final = Struct(">ihqqq")  # index, error code, base offset, append time, log start offset
_RESULT_WITHOUT_START: Final = Struct(">ihqq")


class ProduceTemplate(NamedTuple):
    """What the requests have in common, and what their answers have."""

    version: int
    acks: int
    timeout_ms: int
    topic: str | None
    topic_id: bytes | None
    start: bytes
    """API key and version."""
    middle: bytes
    """From the client id to where the partition's index stands."""
    end: int
    """Where that is."""
    answer_head: bytes
    """From the response header's tags to the count of partitions."""
    answer_tail: bytes
    answer_bytes: int
    """Length of an answer, without the four bytes that say it."""


def learn_template(
    header: RequestHeader, frame: memoryview, request: ProduceRequest
) -> ProduceTemplate | None:
    """The pattern of a request with one topic and one partition's batch; None for any other."""
    if request.transactional_id is not None or len(request.topics) != 1:
        return None
    ((topic, topic_id, partitions),) = request.topics
    if len(partitions) != 1 or (records := partitions[0][1]) is None:
        return None
    version = header.api_version
    flexible = version >= _FLEXIBLE
    end = len(frame) - len(records) - 4
    if flexible:
        end -= len(unsigned_varint(len(records) + 1)) + len(_NO_TAGS)
    else:
        end -= 4
    if end < header.body:
        return None
    count = pack_compact_count if flexible else pack_count
    answer_head = (
        (b"\x00" if flexible else b"")
        + count(1)
        + pack_topic(topic, topic_id, flexible=flexible, by_id=version >= _TOPIC_IDS)
        + count(1)
    )
    result_bytes = _RESULT.size if version >= 5 else _RESULT_WITHOUT_START.size
    no_errors = b"" if version < 8 else b"\x01\x00" if flexible else b"\x00\x00\x00\x00\xff\xff"
    no_throttle = b"\x00\x00\x00\x00"
    answer_tail = no_errors + (b"\x00\x00" + no_throttle + b"\x00" if flexible else no_throttle)
    pattern = ProduceTemplate(
        version=version,
        acks=request.acks,
        timeout_ms=request.timeout_ms,
        topic=topic,
        topic_id=topic_id,
        start=bytes(frame[:4]),
        middle=bytes(frame[_AFTER_CORRELATION_ID:end]),
        end=end,
        answer_head=answer_head,
        answer_tail=answer_tail,
        answer_bytes=4 + len(answer_head) + result_bytes + len(answer_tail),
    )
    return pattern if match_template(pattern, frame) == (partitions[0][0], records) else None


def match_template(pattern: ProduceTemplate, frame: memoryview) -> tuple[int, memoryview] | None:
    """(partition, its record batch) if the frame is of this pattern."""
    end = pattern.end
    if frame[_AFTER_CORRELATION_ID:end] != pattern.middle or frame[:4] != pattern.start:
        return None
    size = len(frame)
    if pattern.version < _FLEXIBLE:
        if size < end + 8:
            return None
        index, length = _INT_INT.unpack_from(frame, end)
        position = end + 8
        if length <= 0 or position + length != size:
            return None
        return index, frame[position:]
    if size < end + 9:  # so that the longest varint is inside
        return None
    (index,) = _INT.unpack_from(frame, end)
    position = end + 4
    byte = frame[position]
    length = byte & 0x7F
    shift = 7
    while byte & 0x80 and shift < 35:
        position += 1
        byte = frame[position]
        length |= (byte & 0x7F) << shift
        shift += 7
    position += 1
    stop = position + length - 1
    if length <= 1 or byte & 0x80 or stop + 3 != size or bytes(frame[stop:]) != _NO_TAGS:
        return None
    return index, frame[position:stop]


def answer(
    pattern: ProduceTemplate,
    correlation_id: int,
    index: int,
    base_offset: int,
    append_time_ms: int,
    log_start_offset: int,
) -> bytes:
    """The whole answer that the batch was appended: frame length, header, body."""
    if pattern.version >= 5:
        result = _RESULT.pack(index, 0, base_offset, append_time_ms, log_start_offset)
    else:
        result = _RESULT_WITHOUT_START.pack(index, 0, base_offset, append_time_ms)
    return (
        _HEAD.pack(pattern.answer_bytes, correlation_id) + pattern.answer_head + result + pattern.answer_tail
    )
