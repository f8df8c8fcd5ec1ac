"""The way to other brokers, over real sockets."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from mansio.errors import ConnectionLost, RequestTimedOut
from mansio.net.connection import ConnectionOptions
from mansio.net.peer_connections import PeerConnections
from mansio.wire.apis import fetch
from support.machine import scaled
from unit.net.stub_broker import SAY_NOTHING, TOPIC_ID, StubBroker

REQUEST = fetch.encode_request(
    17,
    0,
    "mansio-follower",
    [(None, TOPIC_ID, [fetch.FetchPartition(0, 4, 17, 3, 0, 1000)])],
    max_wait_ms=1,
    min_bytes=1,
    max_bytes=1000,
    replica_id=2,
    replica_epoch=77,
)


def answered(request: fetch.FetchRequest) -> Any:
    wanted = request.topics[0][2][0]
    part = fetch.FetchedPartition(0, high_watermark=wanted.fetch_offset, diverging=(3, request.replica_epoch))
    return [(None, request.topics[0][1], [part])]


@pytest.mark.parametrize("borrowed", [False, True], ids=["a copy", "borrowed"])
def test_a_follower_is_told_apart_and_learns_where_logs_part(borrowed: bool) -> None:
    async def run() -> None:
        async with StubBroker() as broker:
            broker.fetch = answered
            options = ConnectionOptions(borrowed=borrowed)
            peers = PeerConnections(lambda _: ("127.0.0.1", broker.port), options)
            for _ in range(3):
                frame = await peers.send(1, REQUEST, timeout_ms=5000)
                assert type(frame) is (memoryview if borrowed else bytes)
                response = fetch.decode_response(17, frame)
                (part,) = response.topics[0][2]
                assert (part.high_watermark, part.diverging) == (17, (3, 77))
            assert [request.replica_id for request in broker.asked(1)] == [2, 2, 2]
            assert broker.connections == 1
            await peers.close()

    asyncio.run(run())


def test_a_broker_that_is_gone_is_told_and_found_again_where_it_comes_back() -> None:
    async def run() -> None:
        at: list[tuple[str, int] | None] = [None]
        peers = PeerConnections(lambda _: at[0], ConnectionOptions(connect_timeout_ms=2000))
        with pytest.raises(ConnectionLost):
            await peers.send(1, REQUEST, timeout_ms=5000)
        async with StubBroker() as broker:
            broker.fetch = answered
            at[0] = ("127.0.0.1", broker.port)
            await peers.send(1, REQUEST, timeout_ms=5000)
        with pytest.raises(ConnectionLost):
            await peers.send(1, REQUEST, timeout_ms=5000)
        async with StubBroker() as broker:
            broker.fetch = answered
            at[0] = ("127.0.0.1", broker.port)
            await peers.send(1, REQUEST, timeout_ms=5000)
        await peers.close()

    asyncio.run(run())


def test_an_answer_that_comes_too_late_is_never_taken_for_the_next_one() -> None:
    async def run() -> None:
        async with StubBroker() as broker:
            asked = asyncio.Queue[int]()

            def silent(request: fetch.FetchRequest) -> str:
                asked.put_nowait(request.replica_id)
                return SAY_NOTHING

            broker.fetch = answered
            peers = PeerConnections(lambda _: ("127.0.0.1", broker.port))
            await peers.send(1, REQUEST, timeout_ms=5000)
            broker.fetch = silent
            with pytest.raises(RequestTimedOut):
                await peers.send(1, REQUEST, timeout_ms=300)
            cancelled = asyncio.ensure_future(peers.send(1, REQUEST, timeout_ms=60_000))
            async with asyncio.timeout(scaled(10)):
                assert [await asked.get(), await asked.get()] == [2, 2]
            cancelled.cancel()
            with pytest.raises(asyncio.CancelledError):
                await cancelled
            broker.fetch = answered
            await peers.send(1, REQUEST, timeout_ms=5000)
            assert broker.connections == 3, "each of the two took its connection with it"
            await peers.close()

    asyncio.run(run())
