"""Prebuilt requests of a share group member: ShareFetch 2 (KIP-932, KIP-1206) with piggybacked acknowledgements.

Written independently of `mansio.wire`, as `bench.frames`. A response is decoded up to the acquired ranges; its records
are skipped.
"""

from __future__ import annotations

import struct

SHARE_FETCH, VERSION = 78, 2
CLIENT_ID = b"bench"
RECORD_LIMIT = 1
"""Acquire mode: exactly the requested number of records."""
FETCH_BYTES_MAX = 8 << 20
ACCEPT = b"\x01"

_HEADER = struct.pack(">h", len(CLIENT_ID)) + CLIENT_ID + b"\0"
_ACK = struct.Struct(">qqB1sB")  # first, last, one type for all of them, no tagged fields
_RANGE = struct.Struct(">qqh")
_FRONT_BYTES = 57  # of a response without error messages, up to the length of its records


class ShareFetches:
    """Builds the requests of one member of one partition, in sending order."""

    def __init__(self, group: str, member: str, topic_id: bytes) -> None:
        names = b"".join(bytes((len(name) + 1,)) + name for name in (group.encode(), member.encode()))
        self.front = struct.pack(">hhi", SHARE_FETCH, VERSION, 1) + _HEADER + names
        self.topic = b"\2" + topic_id + b"\2" + struct.pack(">i", 0)  # one topic with partition 0
        self.epoch = 0

    def request(self, records: int, acks: list[tuple[int, int]], wait_ms: int = 500) -> bytes:
        """Acknowledge these inclusive ranges and acquire `records` more (0: none)."""
        bytes_max = FETCH_BYTES_MAX if records else 0
        wants = struct.pack(
            ">iiiiiibb", self.epoch, wait_ms, 1, bytes_max, records, records, RECORD_LIMIT, False
        )
        batches = b"".join(_ACK.pack(first, last, 2, ACCEPT, 0) for first, last in acks)
        body = b"".join(
            (self.front, wants, self.topic, bytes((len(acks) + 1,)), batches, b"\0\0", b"\1\0")
        )  # partition and topic end; nothing is forgotten
        self.epoch += 1
        return struct.pack(">i", len(body)) + body


def acquired(answer: memoryview) -> list[tuple[int, int]]:
    """The acquired offset ranges of a framed response. Raises `ValueError` for an error code."""
    (whole,) = struct.unpack_from(">h", answer, 13)
    if whole:
        raise ValueError(f"ShareFetch was answered with error code {whole}")
    if answer[20] < 2:
        return []
    error, ack_error = struct.unpack_from(">h", answer, 42)[0], struct.unpack_from(">h", answer, 45)[0]
    if error or ack_error:
        raise ValueError(f"the partition was answered with error codes {error}, {ack_error}")
    length, position = _varint(answer, _FRONT_BYTES)
    count, position = _varint(answer, position + max(length - 1, 0))
    found = []
    for _ in range(count - 1):
        first, last, _ = _RANGE.unpack_from(answer, position)
        found.append((first, last))
        position += _RANGE.size + 1
    return found


def _varint(frame: memoryview, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = frame[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
