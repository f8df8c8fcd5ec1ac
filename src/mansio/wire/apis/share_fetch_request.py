"""ShareFetch requests, by hand: what a member of a share group wants, and what it is done with.

Always true: bytes that are not a ShareFetch request raise `WireError` and nothing else; a request names at most
`MAX_ENTRIES` topics, partitions and batches. Versions: see `mansio.wire.apis.share_fetch`.
"""

from __future__ import annotations

from struct import Struct
from typing import TYPE_CHECKING, Final, NamedTuple

from mansio.errors import WireError
from mansio.wire.api_versions import ApiKey
from mansio.wire.apis.share_acknowledge import RENEWALS, pack_topics, read_topic_id, read_topics, skip_tags
from mansio.wire.headers import request_header
from mansio.wire.primitives import (
    DECODE_ERRORS,
    pack_compact_count,
    pack_compact_string,
    read_compact_count,
    read_compact_string,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mansio.wire.apis.share_acknowledge import Topic

    Forgotten = tuple[bytes, list[int]]

BATCH_OPTIMIZED: Final = 0
RECORD_LIMIT: Final = 1
"""Acquire modes (KIP-1206): batches are finished where that is cheap, or not one record more than asked for."""

_INT: Final = Struct(">i")
_WANTS: Final = Struct(">iiiiii")  # epoch, max wait, min bytes, max bytes, max records, batch size
_WANTS_MODE: Final = Struct(">iiiiiibb")  # and acquire mode, is renew ack


class ShareFetchRequest(NamedTuple):
    """`topics` are (id, [AckPartition]): partitions for the session, and what is acknowledged of each; `forgotten` are
    (id, [partition]) that leave the session. Times in ms. `batch_size`: how many records a batch had best have."""

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
    forgotten: list[Forgotten]


def decode_request(version: int, frame: memoryview, position: int) -> ShareFetchRequest:
    """The request whose body starts at `position` of `frame`. Raises `WireError`."""
    try:
        request, position = _decode_request(version, frame, position)
    except DECODE_ERRORS as error:
        raise WireError("not a ShareFetch request") from error
    if position != len(frame):
        raise WireError(f"{len(frame) - position} bytes after the end of a ShareFetch request")
    return request


def _decode_request(version: int, frame: memoryview, position: int) -> tuple[ShareFetchRequest, int]:
    group_id, position = read_compact_string(frame, position)
    member_id, position = read_compact_string(frame, position)
    if version >= RENEWALS:
        wants = _WANTS_MODE.unpack_from(frame, position)
        position += _WANTS_MODE.size
    else:
        wants = (*_WANTS.unpack_from(frame, position), BATCH_OPTIMIZED, 0)
        position += _WANTS.size
    epoch, wait_ms, min_bytes, max_bytes, max_records, batch_size, mode, renews = wants
    topics, position, room = read_topics(frame, position)
    forgotten: list[Forgotten] = []
    count, position = read_compact_count(frame, position, room)
    room -= count
    for _ in range(count):
        topic_id, position = read_topic_id(frame, position)
        partitions, position = read_compact_count(frame, position, room)
        room -= partitions
        end = position + 4 * partitions
        indexes = [index for (index,) in _INT.iter_unpack(frame[position:end])]
        if len(indexes) != partitions:
            raise WireError("the message ends within the forgotten partitions")
        position = skip_tags(frame, end)
        forgotten.append((topic_id, indexes))
    position = skip_tags(frame, position)
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
    )
    return request, position


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
    forgotten: Sequence[Forgotten] = (),
) -> bytes:
    """The whole request: frame length, header, body. Fields this version lacks are dropped."""
    wants = (session_epoch, max_wait_ms, min_bytes, max_bytes, max_records, batch_size)
    parts = [
        request_header(ApiKey.SHARE_FETCH, version, correlation_id, client_id),
        pack_compact_string(group_id),
        pack_compact_string(member_id),
        _WANTS_MODE.pack(*wants, acquire_mode, is_renew_ack) if version >= RENEWALS else _WANTS.pack(*wants),
    ]
    pack_topics(parts, topics)
    parts.append(pack_compact_count(len(forgotten)))
    for topic_id, indexes in forgotten:
        parts += (topic_id, pack_compact_count(len(indexes)))
        parts += [_INT.pack(index) for index in indexes]
        parts.append(b"\x00")
    parts.append(b"\x00")
    body = b"".join(parts)
    return _INT.pack(len(body)) + body
