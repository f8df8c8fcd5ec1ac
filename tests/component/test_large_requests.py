"""Large Kafka requests, which are decoded on a thread: they count in the request memory, and concern their connection
only."""

from __future__ import annotations

import logging
import struct
import threading
from typing import TYPE_CHECKING, Any

import pytest

import mansio
from mansio.node.embedded import EmbeddedBroker
from mansio.wire.api_versions import SUPPORTED_APIS, ApiKey
from mansio.wire.codec import messages
from mansio.wire.headers import request_header
from support.machine import scaled
from support.present import present
from support.raw_peer import RawPeer
from support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from mansio.api.kafka.server.listener import KafkaServer

WAIT_S = 20
TOPICS = 10_000
LARGE_BYTES = 100_000


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[EmbeddedBroker]:
    with EmbeddedBroker(tmp_path) as started:
        yield started


@pytest.fixture
def may_decode(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Large requests are decoded once this is set."""
    allowed = threading.Event()
    decode = messages.decode_request

    def delayed(key: int, version: int, body: bytes) -> Any:
        if len(body) > LARGE_BYTES:
            allowed.wait(scaled(60))
        return decode(key, version, body)

    monkeypatch.setattr(messages, "decode_request", delayed)
    yield allowed
    allowed.set()


def connected(broker: EmbeddedBroker) -> RawPeer:
    return RawPeer(int(broker.address.rpartition(":")[2]))


def server_of(broker: EmbeddedBroker) -> KafkaServer:
    server = present(broker._broker).server
    assert server is not None
    return server


def large_request() -> bytes:
    version = SUPPORTED_APIS[ApiKey.METADATA].max_version
    topics = [{"name": f"topic {number}"} for number in range(TOPICS)]
    return messages.encode_request(ApiKey.METADATA, version, 7, "c", {"topics": topics})


def is_served(peer: RawPeer) -> bool:
    return bool(peer.call(ApiKey.API_VERSIONS, 3).error_code == 0)


def test_a_large_request_counts_in_the_request_memory_until_it_is_decoded(
    broker: EmbeddedBroker, may_decode: threading.Event
) -> None:
    memory = server_of(broker).memory
    frame = large_request()
    with connected(broker) as peer, connected(broker) as other:
        peer.send(frame)
        wait_until(lambda: memory.held_bytes > LARGE_BYTES, WAIT_S, "the request counts")
        assert is_served(other)
        assert memory.held_bytes > LARGE_BYTES
        may_decode.set()
        assert peer.frame() is not None
        wait_until(lambda: not memory.held_bytes, WAIT_S, "the memory is free")
        assert is_served(peer)


def test_a_connection_may_end_while_its_large_request_is_decoded(
    broker: EmbeddedBroker, may_decode: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    server = server_of(broker)
    with connected(broker) as other:
        with connected(broker) as peer:
            peer.send(large_request())
            wait_until(lambda: server.memory.held_bytes > LARGE_BYTES, WAIT_S, "the request counts")
            peer.vanish()
        wait_until(lambda: len(server._connections) == 1, WAIT_S, "the connection has ended")
        wait_until(lambda: not server.memory.held_bytes, WAIT_S, "the memory is free")
        may_decode.set()
        with connected(broker) as another:
            another.send(large_request())
            assert another.frame() is not None
        assert is_served(other)
        wait_until(lambda: not server.memory.held_bytes, WAIT_S, "the memory is free")
    assert not [each for each in caplog.records if each.levelno >= logging.ERROR], caplog.text


@pytest.mark.parametrize(
    "key",
    [ApiKey.METADATA, ApiKey.ACKNOWLEDGE_RECORDS, ApiKey.WRITE_SHARE_GROUP_STATE],
    ids=lambda key: key.name,
)
def test_many_bytes_that_are_no_request_close_their_connection_only(
    broker: EmbeddedBroker, key: ApiKey
) -> None:
    server = server_of(broker)
    body = request_header(key, SUPPORTED_APIS[key].max_version, 7, "c") + b"\x7f" * LARGE_BYTES
    with connected(broker) as other, connected(broker) as peer:
        peer.send(struct.pack(">i", len(body)) + body)
        assert peer.closed()
        wait_until(lambda: not server.memory.held_bytes, WAIT_S, "the memory is free")
        assert is_served(other)


def test_a_large_request_does_not_wait_for_batches_that_are_processed(broker: EmbeddedBroker) -> None:
    is_busy, may_end = threading.Event(), threading.Event()

    def work() -> None:
        is_busy.set()
        may_end.wait(scaled(60))

    processor = server_of(broker).service.partitions.batch_processor
    processor.background.submit(work, lambda *_: None)
    assert is_busy.wait(scaled(WAIT_S))
    try:
        with connected(broker) as peer:
            peer.send(large_request())
            assert peer.frame() is not None
    finally:
        may_end.set()


def test_offsets_of_a_large_commit_do_not_replace_those_of_a_later_one(broker: EmbeddedBroker) -> None:
    """The first commit's client ends before it is answered."""
    version = 8
    partitions = 12_000

    def commit(indexes: range, offset: int) -> bytes:
        each = [{"partition_index": index, "committed_offset": offset} for index in indexes]
        topics = [{"name": "large", "partitions": each}]
        return messages.encode_request(
            ApiKey.OFFSET_COMMIT,
            version,
            7,
            "c",
            {"group_id": "g", "generation_id_or_member_epoch": -1, "topics": topics},
        )

    with mansio.blocking.connect(broker.address) as client:
        client.admin.create_topic("large", partitions=50)
    with connected(broker) as first:
        first.send(commit(range(partitions), 1_001))
        wait_until(
            lambda: server_of(broker).counters.requests[ApiKey.OFFSET_COMMIT] == 1, WAIT_S, "it has arrived"
        )
        first.vanish()
    with connected(broker) as second:
        second.send(commit(range(49, 50), 1_002))
        assert second.frame() is not None
        for _ in range(20):
            assert is_served(second)
        asked = {"group_id": "g", "topics": [{"name": "large", "partition_indexes": [49]}]}
        found = second.call(ApiKey.OFFSET_FETCH, 7, asked)
        assert found.topics[0].partitions[0].committed_offset == 1_002
