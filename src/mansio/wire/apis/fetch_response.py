"""Fetch responses, by hand: laid out rather than built.

`encode_response` gives the small pieces of bytes between the caller's own slices of the log, so that the server can
send those straight from the file. Always true: records are never touched, only their length matters; bytes that are not
a Fetch response raise `WireError` and nothing else; a response names at most `MAX_ENTRIES` topics, partitions and
aborted transactions. Versions: see `mansio.wire.apis.fetch`.
"""

from __future__ import annotations

from struct import Struct
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from mansio.errors import WireError
from mansio.wire.api_versions import ApiKey
from mansio.wire.headers import (
    has_flexible_response_header,
    read_response_header,
    read_unsigned_varint,
    skip_tagged_fields,
)
from mansio.wire.primitives import (
    DECODE_ERRORS,
    MAX_ENTRIES,
    pack_compact_count,
    pack_count,
    pack_topic,
    read_compact_count,
    read_count,
    read_topic,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mansio.ports import Buffer

    TopicData = tuple[str | None, bytes | None, list["FetchedPartition"]]

_FLEXIBLE: Final = 12
_TOPIC_IDS: Final = 13
_NO_RECORDS: Final = b""

_INT: Final = Struct(">i")
_FRAME_START: Final = Struct(">ii")
_ERROR_SESSION: Final = Struct(">hi")
_ABORTED: Final = Struct(">qq")
# What stands before the aborted transactions: index, error code, high watermark, last stable offset, log
# start.
_FETCHED: Final = Struct(">ihqqq")
_FETCHED_WITHOUT_START: Final = Struct(">ihqq")
# The same, null for the aborted transactions, preferred read replica.
_FETCHED_NO_ABORTED: Final = Struct(">ihqqqBi")
_FETCHED_NO_ABORTED_CLASSIC: Final = Struct(">ihqqqii")
_DIVERGING_TAG: Final = 0
_DIVERGING: Final = Struct(">iq")  # leader epoch, end offset
# The tagged fields of a partition with a diverging epoch: one, its tag and length; and none inside it.
_DIVERGING_START: Final = bytes((1, _DIVERGING_TAG, _DIVERGING.size + 1))


class FetchedPartition(NamedTuple):
    """One partition's part of the answer. `aborted` are (producer id, first offset), or None.

    `diverging`: (leader epoch, end offset) where the asking follower's log leaves the leader's (KIP-595), or None.
    """

    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody needs here
    error_code: int = 0
    high_watermark: int = -1
    last_stable_offset: int = -1
    log_start_offset: int = -1
    aborted: Sequence[tuple[int, int]] | None = None
    preferred_read_replica: int = -1
    records_bytes: int = 0
    records: Any = None
    """When encoding: anything the caller can send, `records_bytes` long. When decoded: a view of the
    response."""
    diverging: tuple[int, int] | None = None


class FetchResponse(NamedTuple):
    """The answer: [(name or None, id or None, [FetchedPartition])]."""

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
    """The whole response as pieces to be sent in order: bytes, records, bytes, records, ..., [bytes].

    Partitions with `records_bytes` 0 have no piece of their own. The first piece begins with the frame's
    length.
    """
    flexible = version >= _FLEXIBLE
    by_id = version >= _TOPIC_IDS
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
                head.append(b"\x00" if partition.diverging is None else _pack_diverging(partition.diverging))
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
    """One partition up to and with the length of its records."""
    index, error_code, high_watermark, last_stable, log_start, aborted, preferred, records_bytes = partition[
        :8
    ]
    flexible = version >= _FLEXIBLE
    if version >= 11 and aborted is None:  # the answer to nearly every fetch, in one go
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
    """The response in `buffer` (everything after the frame's length). Records are views of it. Raises
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
    flexible = version >= _FLEXIBLE
    read_length = read_compact_count if flexible else read_count
    (throttle_ms,) = _INT.unpack_from(frame, position)
    position += 4
    error_code = session_id = 0
    if version >= 7:
        error_code, session_id = _ERROR_SESSION.unpack_from(frame, position)
        position += _ERROR_SESSION.size
    topic_count, position = read_length(frame, position, MAX_ENTRIES)
    room = MAX_ENTRIES - topic_count
    topics: list[TopicData] = []
    for _ in range(topic_count):
        name, topic_id, position = read_topic(frame, position, by_id=version >= _TOPIC_IDS, flexible=flexible)
        count, position = read_length(frame, position, room)
        room -= count
        partitions: list[FetchedPartition] = []
        for _ in range(count):
            partition, position, room = _read_fetched(version, frame, position, room)
            partitions.append(partition)
        if flexible:
            position = skip_tagged_fields(frame, position)
        topics.append((name, topic_id, partitions))
    if flexible:
        position = skip_tagged_fields(frame, position)
    return FetchResponse(topics, throttle_ms, error_code, session_id), position


def _read_fetched(
    version: int, frame: memoryview, position: int, room: int
) -> tuple[FetchedPartition, int, int]:
    flexible = version >= _FLEXIBLE
    layout = _FETCHED if version >= 5 else _FETCHED_WITHOUT_START
    fields = layout.unpack_from(frame, position)
    if version < 5:
        fields = (*fields, -1)
    aborted, position, room = _read_aborted(frame, position + layout.size, room, flexible=flexible)
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
    length = max(length, 0)  # null and empty mean the same here
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
    return partition, position, room


def _read_partition_tags(frame: memoryview, position: int) -> tuple[tuple[int, int] | None, int]:
    """(the diverging epoch, position after the tagged fields of a partition)."""
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
    frame: memoryview, position: int, room: int, *, flexible: bool
) -> tuple[list[tuple[int, int]] | None, int, int]:
    if flexible:
        count, position = read_unsigned_varint(frame, position)
        count -= 1
    else:
        (count,) = _INT.unpack_from(frame, position)
        position += 4
    if count == -1:
        return None, position, room
    if not 0 <= count <= room:
        raise WireError(f"{count} aborted transactions")
    aborted: list[tuple[int, int]] = []
    for _ in range(count):
        aborted.append(_ABORTED.unpack_from(frame, position))
        position += _ABORTED.size
        if flexible:
            position = skip_tagged_fields(frame, position)
    return aborted, position, room - count
