"""Fetch requests, by hand: what a consumer asks, read by the broker and written by the client.

Always true: bytes that are not a Fetch request raise `WireError` and nothing else; a request names at most
`MAX_ENTRIES` topics and partitions. Versions: see `mansio.wire.apis.fetch`.
"""

from __future__ import annotations

from struct import Struct
from typing import TYPE_CHECKING, Final, NamedTuple

from mansio.errors import WireError
from mansio.wire.api_versions import ApiKey
from mansio.wire.headers import (
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

    Topic = tuple[str | None, bytes | None, list["FetchPartition"]]
    Forgotten = tuple[str | None, bytes | None, list[int]]

_FLEXIBLE: Final = 12
_TOPIC_IDS: Final = 13
_REPLICA_STATE: Final = 15
_REPLICA_STATE_TAG: Final = 1

_INT: Final = Struct(">i")
_REPLICA: Final = Struct(">iq")
_WAIT: Final = Struct(">iiib")  # max wait, min bytes, max bytes, isolation level
_WAIT_SESSION: Final = Struct(">iiibii")  # and session id, session epoch


class FetchPartition(NamedTuple):
    """What a consumer wants of one partition. Epochs and the log start offset are -1 where unknown."""

    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody needs here
    current_leader_epoch: int
    fetch_offset: int
    last_fetched_epoch: int
    log_start_offset: int
    max_bytes: int


class FetchRequest(NamedTuple):
    """What a consumer (replica_id -1) or a follower asks. `topics` are (name or None, id or None, [FetchPartition]);
    `forgotten` are (name or None, id or None, [partition]). `replica_epoch`: the session of the follower's broker."""

    replica_id: int
    max_wait_ms: int
    min_bytes: int
    max_bytes: int
    isolation_level: int
    session_id: int
    session_epoch: int
    topics: list[Topic]
    forgotten: list[Forgotten]
    rack_id: str
    replica_epoch: int = -1


def _partition_layout(version: int) -> Struct:
    """index, [leader epoch], fetch offset, [last fetched epoch], [log start offset], max bytes."""
    return Struct(
        ">i"
        + ("i" if version >= 9 else "")
        + "q"
        + ("i" if version >= 12 else "")
        + ("q" if version >= 5 else "")
        + "i"
    )


_PARTITION_LAYOUTS: Final = {version: _partition_layout(version) for version in range(4, 18)}


def decode_request(version: int, frame: memoryview, position: int) -> FetchRequest:
    """The request whose body starts at `position` of `frame`. Raises `WireError`."""
    try:
        request, position = _decode_request(version, frame, position)
    except DECODE_ERRORS as error:
        raise WireError("not a Fetch request") from error
    if position != len(frame):
        raise WireError(f"{len(frame) - position} bytes after the end of a Fetch request")
    return request


def _decode_request(version: int, frame: memoryview, position: int) -> tuple[FetchRequest, int]:
    flexible = version >= _FLEXIBLE
    replica_id, session_id, session_epoch, replica_epoch = -1, 0, -1, -1
    if version < _REPLICA_STATE:
        (replica_id,) = _INT.unpack_from(frame, position)
        position += 4
    if version >= 7:
        wait = _WAIT_SESSION.unpack_from(frame, position)
        position += _WAIT_SESSION.size
        session_id, session_epoch = wait[4:]
    else:
        wait = _WAIT.unpack_from(frame, position)
        position += _WAIT.size
    topics, position, room = _read_topics(version, frame, position)
    forgotten: list[Forgotten] = []
    if version >= 7:
        forgotten, position = _read_forgotten(version, frame, position, room)
    rack_id = ""
    if version >= 11:
        text, position = (read_compact_string if flexible else read_string)(frame, position)
        if text is None:
            raise WireError("a null rack id")
        rack_id = text
    if flexible:
        if frame[position] == 0:
            position += 1
        else:
            replica_id, replica_epoch, position = _read_request_tags(version, frame, position, replica_id)
    wait_ms, min_bytes, max_bytes, isolation_level = wait[:4]
    request = FetchRequest(
        replica_id,
        wait_ms,
        min_bytes,
        max_bytes,
        isolation_level,
        session_id,
        session_epoch,
        topics,
        forgotten,
        rack_id,
        replica_epoch,
    )
    return request, position


def _read_topics(version: int, frame: memoryview, position: int) -> tuple[list[Topic], int, int]:
    """(topics, position after them, how many entries the message may still hold)."""
    flexible = version >= _FLEXIBLE
    layout = _PARTITION_LAYOUTS[version]
    read_length = read_compact_count if flexible else read_count
    topic_count, position = read_length(frame, position, MAX_ENTRIES)
    room = MAX_ENTRIES - topic_count
    topics: list[Topic] = []
    for _ in range(topic_count):
        name, topic_id, position = read_topic(frame, position, by_id=version >= _TOPIC_IDS, flexible=flexible)
        count, position = read_length(frame, position, room)
        room -= count
        partitions: list[FetchPartition] = []
        for _ in range(count):
            fields = layout.unpack_from(frame, position)
            position += layout.size
            if version >= 12:
                partitions.append(FetchPartition._make(fields))
                position = position + 1 if frame[position] == 0 else skip_tagged_fields(frame, position)
            else:
                partitions.append(_older_partition(version, fields))
        if flexible:
            position = position + 1 if frame[position] == 0 else skip_tagged_fields(frame, position)
        topics.append((name, topic_id, partitions))
    return topics, position, room


def _older_partition(version: int, fields: tuple[int, ...]) -> FetchPartition:
    if version >= 9:
        index, epoch, offset, start, max_bytes = fields
        return FetchPartition(index, epoch, offset, -1, start, max_bytes)
    if version >= 5:
        index, offset, start, max_bytes = fields
        return FetchPartition(index, -1, offset, -1, start, max_bytes)
    index, offset, max_bytes = fields
    return FetchPartition(index, -1, offset, -1, -1, max_bytes)


def _read_forgotten(version: int, frame: memoryview, position: int, room: int) -> tuple[list[Forgotten], int]:
    flexible = version >= _FLEXIBLE
    read_length = read_compact_count if flexible else read_count
    topic_count, position = read_length(frame, position, room)
    room -= topic_count
    forgotten: list[Forgotten] = []
    for _ in range(topic_count):
        name, topic_id, position = read_topic(frame, position, by_id=version >= _TOPIC_IDS, flexible=flexible)
        count, position = read_length(frame, position, room)
        room -= count
        end = position + 4 * count
        partitions = [index for (index,) in _INT.iter_unpack(frame[position:end])]
        if len(partitions) != count:
            raise WireError("the message ends within the forgotten partitions")
        position = end
        if flexible:
            position = skip_tagged_fields(frame, position)
        forgotten.append((name, topic_id, partitions))
    return forgotten, position


def _read_request_tags(
    version: int, frame: memoryview, position: int, replica_id: int
) -> tuple[int, int, int]:
    """(the replica's id, its broker's epoch, position after the tagged fields of the request)."""
    replica_epoch = -1
    count, position = read_unsigned_varint(frame, position)
    for _ in range(count):
        tag, position = read_unsigned_varint(frame, position)
        length, position = read_unsigned_varint(frame, position)
        end = position + length
        if end > len(frame):
            raise WireError("a tagged field is longer than the message")
        if tag == _REPLICA_STATE_TAG and version >= _REPLICA_STATE:
            if length < _REPLICA.size:
                raise WireError("a replica state that is too short")
            replica_id, replica_epoch = _REPLICA.unpack_from(frame, position)
        position = end
    return replica_id, replica_epoch, position


def encode_request(
    version: int,
    correlation_id: int,
    client_id: str | None,
    topics: Sequence[Topic],
    *,
    max_wait_ms: int,
    min_bytes: int,
    max_bytes: int,
    isolation_level: int = 0,
    session_id: int = 0,
    session_epoch: int = -1,
    forgotten: Sequence[Forgotten] = (),
    rack_id: str = "",
    replica_id: int = -1,
    replica_epoch: int = -1,
) -> bytes:
    """The whole request: frame length, header, body. Fields this version lacks are dropped."""
    flexible = version >= _FLEXIBLE
    by_id = version >= _TOPIC_IDS
    count = pack_compact_count if flexible else pack_count
    tags = b"\x00" if flexible else b""
    parts = [request_header(ApiKey.FETCH, version, correlation_id, client_id)]
    if version < _REPLICA_STATE:
        parts.append(_INT.pack(replica_id))
    wait = (max_wait_ms, min_bytes, max_bytes, isolation_level)
    parts.append(_WAIT_SESSION.pack(*wait, session_id, session_epoch) if version >= 7 else _WAIT.pack(*wait))
    parts.append(count(len(topics)))
    for name, topic_id, partitions in topics:
        parts += (pack_topic(name, topic_id, by_id=by_id, flexible=flexible), count(len(partitions)))
        for partition in partitions:
            parts += (_pack_fetch_partition(version, partition), tags)
        parts.append(tags)
    if version >= 7:
        parts.append(count(len(forgotten)))
        for name, topic_id, indexes in forgotten:
            parts += (pack_topic(name, topic_id, by_id=by_id, flexible=flexible), count(len(indexes)))
            parts += [_INT.pack(index) for index in indexes]
            parts.append(tags)
    if version >= 11:
        parts.append(pack_compact_string(rack_id) if flexible else pack_string(rack_id))
    if version >= _REPLICA_STATE and (replica_id, replica_epoch) != (-1, -1):
        # One tagged field of 13 bytes: replica id, its broker's epoch, no tagged fields inside.
        state = _REPLICA.pack(replica_id, replica_epoch)
        parts.append(bytes((1, _REPLICA_STATE_TAG, _REPLICA.size + 1)) + state + tags)
    else:
        parts.append(tags)
    body = b"".join(parts)
    return _INT.pack(len(body)) + body


def _pack_fetch_partition(version: int, partition: FetchPartition) -> bytes:
    index, epoch, offset, last_epoch, start, max_bytes = partition
    pack = _PARTITION_LAYOUTS[version].pack
    if version >= 12:
        return pack(index, epoch, offset, last_epoch, start, max_bytes)
    if version >= 9:
        return pack(index, epoch, offset, start, max_bytes)
    if version >= 5:
        return pack(index, offset, start, max_bytes)
    return pack(index, offset, max_bytes)
