"""SettleLeases as a broker meets it, by hand: the request is read, the answer is written.

The schema is `native.SettleLeasesRequest`; the half of a client is `settle_leases`.

Always true: what is read, and what is refused, is what the schema's reader would read and refuse; bytes that are not
the request raise `WireError` and nothing else; a request names at most `MAX_ENTRIES` topics, partitions and batches.
Tagged fields are left out and skipped; what follows the request in its frame is let pass, as in `messages`.
"""

from __future__ import annotations

from struct import Struct
from typing import TYPE_CHECKING, Final, NamedTuple

from mansio.errors import WireError
from mansio.wire.headers import framed_response
from mansio.wire.hot import (
    GARBAGE,
    MAX_ENTRIES,
    pack_compact_count,
    pack_compact_string,
    read_compact_count,
    read_compact_string,
)
from mansio.wire.share_acknowledge import read_topic_id, skip_tags
from mansio.wire.versions import ApiKey

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    Batch = tuple[int, int, bytes, int, str, int]
    """First and last offset, types, delay, reason, delivery count: see `native.SettleBatch`."""

VERSION: Final = 0

_INT: Final = Struct(">i")
_RANGE: Final = Struct(">qq")
_LONG: Final = Struct(">q")
_RESULT: Final = Struct(">ihBB")  # partition, no error, no message, no tagged fields
_REFUSED: Final = Struct(">ih")
_START: Final = Struct(">ihBi")  # throttle time, no error, no message, duration of a lease
_NO_TAGS: Final = b"\x00"


class SettlePartition(NamedTuple):
    """What is said of one partition."""

    topic_id: bytes
    partition: int
    batches: list[Batch]


class SettleLeasesRequest(NamedTuple):
    """Partitions in the order in which they are named."""

    group_id: str
    member_id: str
    partitions: list[SettlePartition]


class SettledPartition(NamedTuple):
    """How it ended: code 0, or why nothing of it holds."""

    partition: int
    error_code: int = 0
    error_message: str | None = None


def decode_request(frame: memoryview, position: int = 0) -> SettleLeasesRequest:
    """The request whose body starts at `position` of `frame`. Raises `WireError`."""
    try:
        return _decode_request(frame, position)
    except GARBAGE as error:
        raise WireError("not a SettleLeases request") from error


def _decode_request(frame: memoryview, position: int) -> SettleLeasesRequest:
    group_id, position = _read_text(frame, position)
    member_id, position = _read_text(frame, position)
    topic_count, position = read_compact_count(frame, position, MAX_ENTRIES)
    room = MAX_ENTRIES - topic_count
    partitions: list[SettlePartition] = []
    for _ in range(topic_count):
        topic_id, position = read_topic_id(frame, position)
        count, position = read_compact_count(frame, position, room)
        room -= count
        for _ in range(count):
            (index,) = _INT.unpack_from(frame, position)
            batches, position, room = _read_batches(frame, position + _INT.size, room)
            partitions.append(SettlePartition(topic_id, index, batches))
        position = skip_tags(frame, position)
    skip_tags(frame, position)
    return SettleLeasesRequest(group_id, member_id, partitions)


def _read_batches(frame: memoryview, position: int, room: int) -> tuple[list[Batch], int, int]:
    """(batches of a partition, position after it, entries there may still be)."""
    count, position = read_compact_count(frame, position, room)
    batches: list[Batch] = []
    for _ in range(count):
        first, last = _RANGE.unpack_from(frame, position)
        length, position = read_compact_count(frame, position + _RANGE.size, len(frame))
        types = bytes(frame[position : position + length])
        position += length
        (delay_ms,) = _LONG.unpack_from(frame, position)
        reason, position = _read_text(frame, position + _LONG.size)
        (deliveries,) = _INT.unpack_from(frame, position)
        position = skip_tags(frame, position + _INT.size)
        batches.append((first, last, types, delay_ms, reason, deliveries))
    return batches, skip_tags(frame, position), room - count


def _read_text(frame: memoryview, position: int) -> tuple[str, int]:
    text, position = read_compact_string(frame, position)
    if text is None:
        raise WireError("a text is missing")
    return text, position


def encode_response(
    correlation_id: int, topics: Mapping[bytes, Sequence[SettledPartition]], *, lock_ms: int
) -> bytes:
    """The whole answer: frame length, header, body."""
    parts = [_START.pack(0, 0, 0, lock_ms), pack_compact_count(len(topics))]
    for topic_id, partitions in topics.items():
        parts += (topic_id, pack_compact_count(len(partitions)))
        for index, code, message in partitions:
            if not code and message is None:
                parts.append(_RESULT.pack(index, 0, 0, 0))
            else:
                parts += (_REFUSED.pack(index, code), pack_compact_string(message), _NO_TAGS)
        parts.append(_NO_TAGS)
    parts.append(_NO_TAGS)
    return framed_response(ApiKey.SETTLE_LEASES, VERSION, correlation_id, b"".join(parts))
