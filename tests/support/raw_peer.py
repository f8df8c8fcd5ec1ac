"""A Kafka client of a few lines over a plain socket, for tests that send what no client library would.

Owns one socket. Always true: nothing is sent but what the caller hands over; every wait has a deadline; a
connection the broker has closed shows as None from `frame`, however it was closed.
"""

from __future__ import annotations

import itertools
import socket
import struct
import time
from typing import TYPE_CHECKING, Any, Self

from mansio.wire.api_versions import ApiKey
from mansio.wire.apis import fetch, produce
from mansio.wire.batch.record_batch import build_batch
from mansio.wire.codec import messages
from support.machine import scaled

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mansio.wire.codec.messages import Struct

DEADLINE_S = 30.0
CLIENT_ID = "raw"


class RawPeer:
    """One connection to the broker on a port of loopback. `host`: another loopback address."""

    def __init__(self, port: int, *, host: str = "127.0.0.1", receive_buffer_bytes: int = 0) -> None:
        self.socket = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        if receive_buffer_bytes:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
        self.socket.settimeout(scaled(DEADLINE_S))
        try:
            self.socket.connect((host, port))
        except OSError:
            self.socket.close()
            raise
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._correlation_ids = itertools.count(1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def vanish(self) -> None:
        """Close with a reset, as a machine that lost power and came back would answer."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def frame(self, deadline_s: float = DEADLINE_S) -> bytes | None:
        """The next whole response without its length; None when the broker has closed the connection."""
        end = time.monotonic() + deadline_s
        head = self._exactly(4, end)
        return None if head is None else self._exactly(struct.unpack(">i", head)[0], end)

    def closed(self, deadline_s: float = DEADLINE_S) -> bool:
        """Whether the broker closes the connection in time without having sent anything more."""
        try:
            return self.frame(deadline_s) is None
        except TimeoutError:
            return False

    def call(self, api: ApiKey, version: int, fields: Mapping[str, Any] | None = None) -> Struct:
        """Send a request, return its decoded answer."""
        wanted = next(self._correlation_ids)
        self.send(messages.encode_request(api, version, wanted, CLIENT_ID, fields or {}))
        answer = self.frame()
        assert answer is not None, f"the broker closed the connection instead of answering {api.name}"
        correlation_id, response = messages.decode_response_frame(api, version, answer)
        assert correlation_id == wanted
        return response

    def produce(
        self, topic: str, batch: bytes | None, *, partition: int = 0, acks: int = -1, version: int = 9
    ) -> produce.PartitionResult:
        """Produce one batch to one partition; what became of it."""
        topics = [(topic, None, [(partition, batch)])]
        self.send(
            produce_frame(topics, acks=acks, version=version, correlation_id=next(self._correlation_ids))
        )
        answer = self.frame()
        assert answer is not None, "the broker closed the connection instead of answering a produce request"
        return produce.decode_response(version, answer).topics[0][2][0]

    def end_offset(self, topic: str, partition: int = 0) -> int:
        """Where the partition's readable records end."""
        fields = {"partition_index": partition, "timestamp": -1}
        wanted = {"replica_id": -1, "topics": [{"name": topic, "partitions": [fields]}]}
        found = self.call(ApiKey.LIST_OFFSETS, 5, wanted).topics[0].partitions[0]
        assert found.error_code == 0, found
        return int(found.offset)

    def create_topic(self, name: str, partitions: int = 1, **configs: str) -> None:
        """Create a topic; `max_message_bytes="1000"` sets max.message.bytes."""
        topic = {
            "name": name,
            "num_partitions": partitions,
            "replication_factor": 1,
            "configs": [{"name": key.replace("_", "."), "value": value} for key, value in configs.items()],
        }
        fields = {"topics": [topic], "timeout_ms": 10_000}
        created = self.call(ApiKey.CREATE_TOPICS, 5, fields).topics[0]
        assert created.error_code == 0, created

    def _exactly(self, length: int, end: float) -> bytes | None:
        got = bytearray()
        while len(got) < length:
            self.socket.settimeout(max(end - time.monotonic(), 0.001))
            try:
                piece = self.socket.recv(min(length - len(got), 1 << 20))
            except (ConnectionResetError, BrokenPipeError):
                return None
            if not piece:
                return None
            got += piece
        return bytes(got)


def produce_frame(
    topics: Sequence[tuple[str, None, Sequence[tuple[int, bytes | memoryview | None]]]],
    *,
    acks: int = -1,
    version: int = 9,
    correlation_id: int = 1,
    timeout_ms: int = 10_000,
) -> bytes:
    """A whole produce request."""
    return b"".join(produce.encode_request(version, correlation_id, CLIENT_ID, acks, timeout_ms, topics))


def fetch_frame(
    topic: str,
    *,
    offset: int = 0,
    wait_ms: int = 0,
    min_bytes: int = 1,
    max_bytes: int = 1 << 20,
    number: int = 1,
) -> bytes:
    """A whole fetch request for partition 0, in the newest version that names topics."""
    wanted = [(topic, None, [fetch.FetchPartition(0, -1, offset, -1, -1, max_bytes)])]
    return fetch.encode_request(
        12, number, CLIENT_ID, wanted, max_wait_ms=wait_ms, min_bytes=min_bytes, max_bytes=max_bytes
    )


def batch_of(*values: bytes, **fields: Any) -> bytes:
    """A sound record batch of these values."""
    now_ms = int(time.time() * 1000)  # old records would expire while a test looks at them
    return build_batch([(now_ms, None, value, ()) for value in values], **fields)


def length_prefixed(body: bytes) -> bytes:
    return struct.pack(">i", len(body)) + body
