"""Codec of Produce (API key 0), versions 3-13, hand-written because all produced data passes through it.

First versions of the fields: log start offset 5, record errors 8 (KIP-467), flexible encoding (KIP-482) 9, topic ids
instead of names 13 (KIP-516). `current_leader` and `node_endpoints` (10, KIP-951) are tagged fields, which are not
written, and skipped when reading.

Two fast paths for requests with one partition, which most are:
* In the broker: requests of a producer to one topic differ only in correlation id, partition and batch. A
  `ProduceTemplate` has the constant bytes, so that `match_template` recognizes the next request by comparing them, and
  `encode_template_response` inserts a few fields between two constants.
* In the client: `SinglePartitionProduceCodec` encodes requests and decodes responses in the same way.

Invariants:
* Record batches are neither copied nor decoded, so the cost does not depend on the number of records.
* Decoding malformed bytes raises `WireError` and nothing else.
* A request has at most `ENTRIES_MAX` topics and partitions.
* The fast paths accept only bytes that the general codec decodes to the same values, and encode the same bytes.
"""

from __future__ import annotations

from functools import partial
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
    from collections.abc import Sequence

    from mansio.ports import Buffer
    from mansio.wire.headers import RequestHeader

    Topic = tuple[str | None, bytes | None, list[tuple[int, memoryview | None]]]
    TopicResult = tuple[str | None, bytes | None, list["PartitionResult"]]

_FLEXIBLE_VERSION_MIN: Final = 9
_TOPIC_ID_VERSION_MIN: Final = 13
_AFTER_CORRELATION_ID: Final = 8
_NO_TAGS: Final = b"\x00\x00\x00"  # of the partition, the topic and the request
SINGLE_PARTITION_VERSION_MIN: Final = 8
"""The lowest version that `SinglePartitionProduceCodec` supports."""

_ACKS: Final = Struct(">hi")
_INT: Final = Struct(">i")
_INT_INT: Final = Struct(">ii")
_FRAME_START: Final = Struct(">ii")  # length, correlation id
_RESULT: Final = Struct(">ihqqq")  # index, error code, base offset, append time, log start offset
_RESULT_WITHOUT_START: Final = Struct(">ihqq")


class ProduceRequest(NamedTuple):
    """Request. `topics` are (name or None, id or None, [(partition, batches or None)])."""

    transactional_id: str | None
    acks: int
    timeout_ms: int
    topics: list[Topic]


class PartitionResult(NamedTuple):
    """Result of one partition. Offsets and times are -1 if they are unknown."""

    index: int  # type: ignore[assignment]  # hides tuple.index, which is not used here
    error_code: int = 0
    base_offset: int = -1
    log_append_time_ms: int = -1
    log_start_offset: int = -1
    error_message: str | None = None
    record_errors: tuple[tuple[int, str | None], ...] = ()
    """(index of the record in the batch, error message or None) of each invalid record."""


_new_result = partial(tuple.__new__, PartitionResult)


class ProduceResponse(NamedTuple):
    """Response. `topics` are (name or None, id or None, [PartitionResult])."""

    topics: list[TopicResult]
    throttle_ms: int


def decode_request(version: int, frame: memoryview, position: int) -> ProduceRequest:
    """Decode the request whose body starts at `position` of `frame`. Batches are views of `frame`. Raises
    `WireError`."""
    try:
        read = _decode_flexible_request if version >= _FLEXIBLE_VERSION_MIN else _decode_classic_request
        request, position = read(version, frame, position)
    except DECODE_ERRORS as error:
        raise WireError("not a Produce request") from error
    if position != len(frame):
        raise WireError(f"{len(frame) - position} bytes after the end of a Produce request")
    return request


def _decode_flexible_request(version: int, frame: memoryview, position: int) -> tuple[ProduceRequest, int]:
    transactional_id, position = read_compact_string(frame, position)
    acks, timeout_ms = _ACKS.unpack_from(frame, position)
    topic_count, position = read_compact_count(frame, position + 6, ENTRIES_MAX)
    remaining = ENTRIES_MAX - topic_count
    topics: list[Topic] = []
    size = len(frame)
    for _ in range(topic_count):
        name, topic_id, position = read_topic(
            frame, position, by_id=version >= _TOPIC_ID_VERSION_MIN, flexible=True
        )
        count, position = read_compact_count(frame, position, remaining)
        remaining -= count
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
    topic_count, position = read_count(frame, position + 6, ENTRIES_MAX)
    remaining = ENTRIES_MAX - topic_count
    topics: list[Topic] = []
    size = len(frame)
    for _ in range(topic_count):
        name, position = read_string(frame, position)
        if name is None:
            raise WireError("a topic without a name")
        count, position = read_count(frame, position, remaining)
        remaining -= count
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
    """Encode a response frame: length, header, body."""
    flexible = version >= _FLEXIBLE_VERSION_MIN
    count = pack_compact_count if flexible else pack_count
    tags = b"\x00" if flexible else b""
    parts = [count(len(topics))]
    for name, topic_id, results in topics:
        parts.append(pack_topic(name, topic_id, flexible=flexible, by_id=version >= _TOPIC_ID_VERSION_MIN))
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
    """Encode a request frame as buffers in order; the batches among them are the caller's objects, not copies."""
    flexible = version >= _FLEXIBLE_VERSION_MIN
    count = pack_compact_count if flexible else pack_count
    text = pack_compact_string if flexible else pack_string
    tags = b"\x00" if flexible else b""
    head = [request_header(ApiKey.PRODUCE, version, correlation_id, client_id)]
    head += (text(transactional_id), _ACKS.pack(acks, timeout_ms), count(len(topics)))
    pieces: list[Buffer] = []
    for name, topic_id, partitions in topics:
        head.append(pack_topic(name, topic_id, flexible=flexible, by_id=version >= _TOPIC_ID_VERSION_MIN))
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
    """Decode the response in `buffer`, a frame without its length. Raises `WireError`."""
    try:
        _, position = read_response_header(ApiKey.PRODUCE, version, buffer)
        response, position = _decode_response(version, memoryview(buffer), position)
    except DECODE_ERRORS as error:
        raise WireError("not a Produce response") from error
    if position != len(buffer):
        raise WireError(f"{len(buffer) - position} bytes after the end of a Produce response")
    return response


def _decode_response(version: int, frame: memoryview, position: int) -> tuple[ProduceResponse, int]:
    flexible = version >= _FLEXIBLE_VERSION_MIN
    read_length = read_compact_count if flexible else read_count
    topic_count, position = read_length(frame, position, ENTRIES_MAX)
    remaining = ENTRIES_MAX - topic_count
    topics: list[TopicResult] = []
    for _ in range(topic_count):
        name, topic_id, position = read_topic(
            frame, position, by_id=version >= _TOPIC_ID_VERSION_MIN, flexible=flexible
        )
        count, position = read_length(frame, position, remaining)
        remaining -= count
        results: list[PartitionResult] = []
        for _ in range(count):
            result, position, remaining = _read_result(version, frame, position, remaining)
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
    version: int, frame: memoryview, position: int, remaining: int
) -> tuple[PartitionResult, int, int]:
    flexible = version >= _FLEXIBLE_VERSION_MIN
    layout = _RESULT if version >= 5 else _RESULT_WITHOUT_START
    fields = layout.unpack_from(frame, position)
    position += layout.size
    message: str | None = None
    errors: list[tuple[int, str | None]] = []
    if version >= 8:
        read_text = read_compact_string if flexible else read_string
        count, position = (read_compact_count if flexible else read_count)(frame, position, remaining)
        remaining -= count
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
    return PartitionResult._make((*fields, message, tuple(errors))), position, remaining


class ProduceTemplate(NamedTuple):
    """Constant bytes of the requests that a producer sends to one topic, and of their responses."""

    version: int
    acks: int
    timeout_ms: int
    topic: str | None
    topic_id: bytes | None
    is_transactional: bool
    """Whether the requests have a transactional id, which is among the constant bytes."""
    request_start: bytes
    """API key and version."""
    request_middle: bytes
    """The bytes from the client id up to the partition index."""
    partition_index_position: int
    """Position of the partition index in the frame."""
    response_head: bytes
    """The bytes from the tagged fields of the response header up to the partition count."""
    response_tail: bytes
    """The bytes after the result's log start offset or, in old versions, append time."""
    response_bytes: int
    """Length of a response, without the length field itself."""


def build_template(
    header: RequestHeader, frame: memoryview, request: ProduceRequest
) -> ProduceTemplate | None:
    """Return the template of `request`, which is decoded from `frame`; None unless it has one topic and one partition
    with records."""
    if len(request.topics) != 1:
        return None
    ((topic, topic_id, partitions),) = request.topics
    if len(partitions) != 1 or (records := partitions[0][1]) is None:
        return None
    version = header.api_version
    flexible = version >= _FLEXIBLE_VERSION_MIN
    end = len(frame) - len(records) - 4
    if flexible:
        end -= len(unsigned_varint(len(records) + 1)) + len(_NO_TAGS)
    else:
        end -= 4
    if end < header.body_position:
        return None
    count = pack_compact_count if flexible else pack_count
    response_head = (
        (b"\x00" if flexible else b"")
        + count(1)
        + pack_topic(topic, topic_id, flexible=flexible, by_id=version >= _TOPIC_ID_VERSION_MIN)
        + count(1)
    )
    result_bytes = _RESULT.size if version >= 5 else _RESULT_WITHOUT_START.size
    no_errors = b"" if version < 8 else b"\x01\x00" if flexible else b"\x00\x00\x00\x00\xff\xff"
    no_throttle = b"\x00\x00\x00\x00"
    response_tail = no_errors + (b"\x00\x00" + no_throttle + b"\x00" if flexible else no_throttle)
    template = ProduceTemplate(
        version=version,
        acks=request.acks,
        timeout_ms=request.timeout_ms,
        topic=topic,
        topic_id=topic_id,
        is_transactional=request.transactional_id is not None,
        request_start=bytes(frame[:4]),
        request_middle=bytes(frame[_AFTER_CORRELATION_ID:end]),
        partition_index_position=end,
        response_head=response_head,
        response_tail=response_tail,
        response_bytes=4 + len(response_head) + result_bytes + len(response_tail),
    )
    return template if match_template(template, frame) == (partitions[0][0], records) else None


def match_template(template: ProduceTemplate, frame: memoryview) -> tuple[int, memoryview] | None:
    """(partition index, record batch) if the request in `frame` has the constant bytes of the template, else None."""
    end = template.partition_index_position
    if frame[_AFTER_CORRELATION_ID:end] != template.request_middle or frame[:4] != template.request_start:
        return None
    size = len(frame)
    if template.version < _FLEXIBLE_VERSION_MIN:
        if size < end + 8:
            return None
        index, length = _INT_INT.unpack_from(frame, end)
        position = end + 8
        if length <= 0 or position + length != size:
            return None
        return index, frame[position:]
    if size < end + 9:  # so that the longest varint is within the frame
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


def encode_template_response(
    template: ProduceTemplate,
    correlation_id: int,
    index: int,
    base_offset: int,
    append_time_ms: int,
    log_start_offset: int,
) -> bytes:
    """Encode the response frame for a batch that was appended, at `base_offset` of partition `index`."""
    if template.version >= 5:
        result = _RESULT.pack(index, 0, base_offset, append_time_ms, log_start_offset)
    else:
        result = _RESULT_WITHOUT_START.pack(index, 0, base_offset, append_time_ms)
    return (
        _FRAME_START.pack(template.response_bytes, correlation_id)
        + template.response_head
        + result
        + template.response_tail
    )


class SinglePartitionProduceCodec:
    """Encoder of one client's Produce requests for one partition of one topic, and decoder of their responses.

    `version`: `SINGLE_PARTITION_VERSION_MIN` or higher.
    """

    __slots__ = (
        "_constant_bytes",
        "_head",
        "_is_flexible",
        "_middle",
        "_pack_start",
        "_response_bytes",
        "_response_tail",
        "_result_end",
        "_result_start",
        "_tags",
        "_unpack",
    )

    def __init__(
        self,
        version: int,
        client_id: str | None,
        acks: int,
        timeout_ms: int,
        topic: str,
        topic_id: bytes,
        transactional_id: str | None = None,
    ) -> None:
        flexible = version >= _FLEXIBLE_VERSION_MIN
        count = pack_compact_count if flexible else pack_count
        text = pack_compact_string if flexible else pack_string
        one_topic = count(1) + pack_topic(
            topic, topic_id, flexible=flexible, by_id=version >= _TOPIC_ID_VERSION_MIN
        )
        one_partition = one_topic + count(1)
        header = request_header(ApiKey.PRODUCE, version, 0, client_id)
        self._is_flexible = flexible
        self._head = header[: _AFTER_CORRELATION_ID - 4]
        self._middle = (
            header[_AFTER_CORRELATION_ID:]
            + text(transactional_id)
            + _ACKS.pack(acks, timeout_ms)
            + one_partition
        )
        # Frame length; constant bytes around the correlation id; index of the partition.
        start = Struct(f">i{len(self._head)}si{len(self._middle)}si")
        self._pack_start = start.pack
        self._tags = _NO_TAGS if flexible else b""
        self._constant_bytes = start.size - 4 + len(self._tags)
        self._result_start = (b"\x00" if flexible else b"") + one_partition
        # No record errors, no message; then the throttle time, which is ignored, and the tags around it.
        self._result_end = b"\x01\x00\x00\x00" if flexible else b"\x00\x00\x00\x00\xff\xff"
        starts, ends, tails = len(self._result_start), len(self._result_end), 1 if flexible else 0
        # Correlation id; index, error code, base offset, append time, log start offset; throttle time.
        response = Struct(f">4x{starts}sihqq8x{ends}s4x{tails}s")
        self._unpack, self._response_bytes = response.unpack, response.size
        self._response_tail = bytes(tails)

    def encode(self, correlation_id: int, partition: int, records: bytes) -> bytes:
        """Encode the request frame for one batch."""
        size = len(records)
        length = unsigned_varint(size + 1) if self._is_flexible else _INT.pack(size)
        total = self._constant_bytes + len(length) + size
        start = self._pack_start(total, self._head, correlation_id, self._middle, partition)
        return b"".join((start, length, records, self._tags))

    def decode_success(self, partition: int, frame: Buffer) -> PartitionResult | None:
        """Return the result if the response in `frame` reports success for `partition`; None for other responses, which
        the caller passes to `decode_response`. The log start offset is not decoded."""
        if len(frame) != self._response_bytes:
            return None
        start, index, error_code, base_offset, log_append_time_ms, end, tail = self._unpack(frame)
        if (
            error_code
            or index != partition
            or start != self._result_start
            or end != self._result_end
            or tail != self._response_tail
        ):
            return None
        return _new_result((partition, 0, base_offset, log_append_time_ms, -1, None, ()))
