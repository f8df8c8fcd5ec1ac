"""Unordered connections, as brokers have to each other: a response that is held delays no other one, each response
reaches the request that it belongs to, and a peer that answers nothing does not hold its callers forever."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Final

import pytest

from mansio.errors import BrokerUnreachable, ConnectionLost, MansioError, RequestTimedOut
from mansio.net import peer_connections
from mansio.net.connection import Connection, ConnectionOptions
from mansio.net.peer_connections import PeerConnectionClasses, PeerConnections
from mansio.ports import RequestClass
from mansio.testing.broker import TestBroker
from mansio.wire.api_versions import ApiKey
from mansio.wire.apis import fetch
from mansio.wire.codec import messages
from support.fault_proxy import fault_proxy
from support.machine import scaled
from support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mansio.api.kafka.connections.connection import Connection as ServerConnection

SEED: Final = 20240229
TOPICS: Final = 200
HELD_MS: Final = 600_000
TIMEOUT_S: Final = 60
WINDOW: Final = 20
"""Requests in flight in the tests of full windows."""
FETCH_VERSION: Final = 12


@pytest.fixture(scope="module")
def broker() -> Iterator[TestBroker]:
    with TestBroker(fetch_wait_ms_max=HELD_MS) as started:
        yield started


def port_of(broker: TestBroker) -> int:
    return int(broker.bootstrap_servers.rpartition(":")[2])


async def unordered(broker: TestBroker, known: set[ServerConnection]) -> None:
    """Make the connections that are not known yet unordered, as the handshake of a broker does."""
    for connection in broker._running().server._connections:
        if connection not in known:
            connection.is_unordered = True


async def open_unordered(broker: TestBroker) -> Connection:
    known = set(broker._running().server._connections)
    options = ConnectionOptions(in_flight_requests_max=2 * TOPICS)
    connection = await Connection.open("127.0.0.1", port_of(broker), options)
    broker._run_on_loop(unordered(broker, known))
    return connection


async def held_fetch(connection: Connection, topic: str) -> bytes:
    """Fetch the first record of an empty topic, and return its batch."""
    correlation_id = connection.next_correlation_id()
    wanted = [(topic, None, [fetch.FetchPartition(0, -1, 0, -1, -1, 1 << 20)])]
    frame = fetch.encode_request(
        FETCH_VERSION, correlation_id, "peer", wanted, max_wait_ms=HELD_MS, min_bytes=1, max_bytes=1 << 20
    )
    answer = await connection.exchange((frame,), correlation_id, timeout_ms=HELD_MS)
    ((name, _, (partition,)),) = fetch.decode_response(FETCH_VERSION, answer).topics
    assert name == topic
    assert partition.records is not None
    return bytes(partition.records)


@pytest.mark.row("C4")
def test_held_responses_delay_no_other_and_each_reaches_its_request(broker: TestBroker) -> None:
    client = broker.client()
    topics = [f"held-{number}" for number in range(TOPICS)]
    for topic in topics:
        client.admin.create_topic(topic)

    async def scenario() -> list[bytes]:
        connection = await open_unordered(broker)
        held = [asyncio.ensure_future(held_fetch(connection, topic)) for topic in topics]
        # Not behind the fetches, which are held until their topics have a record.
        found = await connection.request(ApiKey.METADATA, {"topics": []}, timeout_ms=TIMEOUT_S * 1000)
        assert found.brokers
        assert not any(each.done() for each in held)
        order = random.Random(SEED).sample(topics, TOPICS)
        for topic in order:
            await asyncio.to_thread(client.publish, topic, topic.encode())
        async with asyncio.timeout(scaled(TIMEOUT_S)):
            batches = await asyncio.gather(*held)
        await connection.close()
        return batches

    for topic, batch in zip(topics, asyncio.run(scenario()), strict=True):
        assert topic.encode() in batch


def test_requests_of_an_ordinary_connection_are_answered_in_order(broker: TestBroker) -> None:
    broker.client().admin.create_topic("ordered")

    async def scenario() -> None:
        connection = await Connection.open("127.0.0.1", port_of(broker))
        held = asyncio.ensure_future(held_fetch(connection, "ordered"))
        behind = asyncio.ensure_future(connection.request(ApiKey.METADATA, {"topics": []}))
        await asyncio.to_thread(
            wait_until, lambda: any(each.is_busy for each in broker._running().server._connections), TIMEOUT_S
        )
        assert not behind.done()
        await asyncio.to_thread(broker.client().publish, "ordered", b"first")
        await held
        await behind
        await connection.close()

    asyncio.run(scenario())


REQUEST: Final = messages.encode_request(ApiKey.METADATA, 9, 0, "peer", {"topics": []})


@pytest.mark.row("C4")
def test_a_silent_peer_fails_all_its_requests_and_is_connected_again(broker: TestBroker) -> None:
    async def scenario() -> None:
        async with fault_proxy(port_of(broker)) as proxy:
            peers = PeerConnections(lambda _: ("127.0.0.1", proxy.port), is_unordered=True)
            assert await peers.send(1, REQUEST, timeout_ms=scaled(TIMEOUT_S) * 1000)
            proxy.lose_answers()
            waiting = [
                asyncio.ensure_future(peers.send(1, REQUEST, timeout_ms=timeout_ms))
                for timeout_ms in (200, HELD_MS, HELD_MS)
            ]
            async with asyncio.timeout(scaled(TIMEOUT_S)):
                errors = await asyncio.gather(*waiting, return_exceptions=True)
            assert [type(each) for each in errors] == [RequestTimedOut, ConnectionLost, ConnectionLost]
            proxy.pass_on()
            assert await peers.send(1, REQUEST, timeout_ms=scaled(TIMEOUT_S) * 1000)
            await peers.close()

    asyncio.run(scenario())


def test_a_request_that_was_not_sent_is_reported_as_such_and_closes_nothing(broker: TestBroker) -> None:
    async def scenario() -> None:
        async with fault_proxy(port_of(broker)) as proxy:
            options = ConnectionOptions(in_flight_requests_max=1)
            peers = PeerConnections(lambda _: ("127.0.0.1", proxy.port), options, is_unordered=True)
            assert await peers.send(1, REQUEST, timeout_ms=scaled(TIMEOUT_S) * 1000)
            proxy.lose_answers()
            sent = asyncio.ensure_future(peers.send(1, REQUEST, timeout_ms=HELD_MS))
            await asyncio.sleep(0)
            with pytest.raises(BrokerUnreachable):
                await peers.send(1, REQUEST, timeout_ms=200)
            assert not sent.done()
            proxy.pass_on()
            with pytest.raises(ConnectionLost):
                await sent
            await peers.close()

    asyncio.run(scenario())


def test_a_cancelled_request_leaves_the_others_of_its_connection(broker: TestBroker) -> None:
    async def scenario() -> None:
        peers = PeerConnections(lambda _: ("127.0.0.1", port_of(broker)), is_unordered=True)
        timeout_ms = scaled(TIMEOUT_S) * 1000
        await peers.send(1, REQUEST, timeout_ms=timeout_ms)
        cancelled = asyncio.ensure_future(peers.send(1, REQUEST, timeout_ms=timeout_ms))
        kept = asyncio.ensure_future(peers.send(1, REQUEST, timeout_ms=timeout_ms))
        await asyncio.sleep(0)
        cancelled.cancel()
        assert await kept
        with pytest.raises((asyncio.CancelledError, MansioError)):
            await cancelled
        await peers.close()

    asyncio.run(scenario())


def held_fetches(topic: str) -> bytes:
    """A fetch of an empty topic, as `Peers.send` takes it."""
    wanted = [(topic, None, [fetch.FetchPartition(0, -1, 0, -1, -1, 1 << 20)])]
    return fetch.encode_request(
        FETCH_VERSION, 0, "peer", wanted, max_wait_ms=HELD_MS, min_bytes=1, max_bytes=1 << 20
    )


@pytest.mark.row("C4")
def test_a_class_of_requests_with_a_full_window_delays_no_other_class_in_either_direction(
    broker: TestBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_connections, "IN_FLIGHT_REQUESTS_MAX", WINDOW)
    unordered_classes = [each for each in RequestClass if each.is_unordered]
    timeout_ms = scaled(TIMEOUT_S) * 1000

    async def fill(target: TestBroker, classes: PeerConnectionClasses, full: RequestClass) -> list[bytes]:
        """Fill the window of one class, use all others, then let the requests end."""
        topic = f"full-{full.name.lower()}"
        await asyncio.to_thread(target.client().admin.create_topic, topic)
        peers = classes.peers(full)
        requests = [
            asyncio.ensure_future(peers.send(1, held_fetches(topic), timeout_ms=HELD_MS))
            for _ in range(2 * WINDOW)
        ]
        await asyncio.sleep(0)
        with pytest.raises(BrokerUnreachable):  # it waits for a place until its timeout
            await peers.send(1, REQUEST, timeout_ms=200)
        for other in unordered_classes:
            if other is not full:
                assert await classes.peers(other).send(1, REQUEST, timeout_ms=timeout_ms)
        assert not any(each.done() for each in requests)
        await asyncio.to_thread(target.client().publish, topic, b"first")
        async with asyncio.timeout(scaled(TIMEOUT_S)):
            return await asyncio.gather(*requests)

    async def use(target: TestBroker) -> None:
        known = set(target._running().server._connections)
        classes = PeerConnectionClasses(lambda _: ("127.0.0.1", port_of(target)))
        for each in unordered_classes:
            await classes.peers(each).send(1, REQUEST, timeout_ms=timeout_ms)
        await asyncio.to_thread(target._run_on_loop, unordered(target, known))
        for each in unordered_classes:
            assert len(await fill(target, classes, each)) == 2 * WINDOW
        await classes.close()

    async def scenario(other: TestBroker) -> None:
        await asyncio.gather(use(broker), use(other))

    with TestBroker(fetch_wait_ms_max=HELD_MS) as other:
        asyncio.run(scenario(other))
