"""Prebuilt requests of the load generator: Produce 7 and Fetch 11, the last versions without flexible headers.

Both name their topic, so one builder serves Mansio, the baseline and any other broker. Written independently of
`mansio.wire`, so that an error there is not hidden by the same error here.
Layouts: https://kafka.apache.org/protocol.html and record batch format 2 of the Kafka documentation.
"""

from __future__ import annotations

import struct
import time

from crc32c import crc32c

PRODUCE, FETCH = 0, 1
PRODUCE_VERSION, FETCH_VERSION = 7, 11
CLIENT_ID = b"bench"
FETCH_BYTES_MAX = 50 << 20
TIMEOUT_MS = 30_000

PRODUCED_ERROR_POSITION = 20  # after the topic name: length, correlation, counts, name length, partition


def _varint(value: int) -> bytes:
    zigzag = (value << 1) ^ (value >> 63)
    out = bytearray()
    while zigzag >= 0x80:
        out.append(zigzag & 0x7F | 0x80)
        zigzag >>= 7
    out.append(zigzag)
    return bytes(out)


def batch(records: int, record_bytes: int) -> bytes:
    """An uncompressed batch of records with values of `record_bytes` bytes, without keys and headers."""
    body = bytearray()
    letters = bytes(97 + (7 * position) % 26 for position in range(26))
    for index in range(records):
        turned = letters[index % 26 :] + letters[: index % 26]
        value = (turned * (record_bytes // 26 + 1))[:record_bytes]
        record = b"\0\0" + _varint(index) + _varint(-1) + _varint(record_bytes) + value + b"\0"
        body += _varint(len(record)) + record
    now_ms = time.time_ns() // 1_000_000
    checked = struct.pack(">hiqqqhii", 0, records - 1, now_ms, now_ms, -1, -1, -1, records) + bytes(body)
    head = struct.pack(">qiibI", 0, len(checked) + 9, -1, 2, crc32c(checked))
    return head + checked


def _framed(api_key: int, api_version: int, body: bytes) -> bytes:
    header = struct.pack(">hhih", api_key, api_version, 1, len(CLIENT_ID)) + CLIENT_ID
    return struct.pack(">i", len(header) + len(body)) + header + body


def _topic(name: str) -> bytes:
    encoded = name.encode()
    return struct.pack(">ih", 1, len(encoded)) + encoded


def produce_request(topic: str, partition: int, acks: int, records: bytes) -> bytes:
    """A framed Produce request with one batch for one partition."""
    head = struct.pack(">hhi", -1, acks, TIMEOUT_MS) + _topic(topic)
    return _framed(PRODUCE, PRODUCE_VERSION, head + struct.pack(">iii", 1, partition, len(records)) + records)


def fetch_request(topic: str, partition: int, offset: int, max_bytes: int, max_wait_ms: int = 500) -> bytes:
    """A framed Fetch request for one partition, with min bytes 1."""
    head = struct.pack(">iiiibii", -1, max_wait_ms, 1, max(max_bytes, FETCH_BYTES_MAX), 0, 0, -1)
    ask = struct.pack(">iiiqqi", 1, partition, -1, offset, -1, max_bytes)
    return _framed(FETCH, FETCH_VERSION, head + _topic(topic) + ask + struct.pack(">ih", 0, 0))


def produce_error(response: bytes | memoryview, topic: str) -> int:
    """The error code in a framed Produce response for one partition."""
    return int(struct.unpack_from(">h", response, PRODUCED_ERROR_POSITION + 2 + len(topic.encode()))[0])


def fetch_error(response: bytes | bytearray | memoryview, topic: str) -> int:
    """The error code in the head of a framed Fetch response: top level, or of its partition."""
    whole = int(struct.unpack_from(">h", response, 12)[0])
    return whole or int(struct.unpack_from(">h", response, 32 + len(topic.encode()))[0])


def fetched_batches(response: bytes | memoryview, topic: str) -> list[tuple[int, int]]:
    """(base offset, record count) of the complete batches in a framed Fetch response for one partition."""
    position = 34 + len(topic.encode()) + 8 * 3
    aborted = struct.unpack_from(">i", response, position)[0]
    position += 4 + 16 * max(aborted, 0) + 4 + 4
    found = []
    while position + 61 <= len(response):
        base_offset, length = struct.unpack_from(">qi", response, position)
        if position + 12 + length > len(response):
            break
        found.append((base_offset, struct.unpack_from(">i", response, position + 57)[0]))
        position += 12 + length
    return found
