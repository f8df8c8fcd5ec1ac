"""The way to other brokers, over real sockets: both sides authenticate, and nothing is sent before."""

from __future__ import annotations

import asyncio
import socket
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from mansio.broker.services.broker_authenticator import BrokerAuthenticator
from mansio.errors import BrokerUnreachable, ConnectionLost, MansioError, RequestTimedOut, StaleBrokerEpoch
from mansio.host.clock import HostRandom
from mansio.net.broker_dialler import BrokerDialler, try_connect
from mansio.net.broker_handshake import BrokerCredentials
from mansio.net.connection import ConnectionOptions
from mansio.net.peer_connections import PeerConnectionClasses, PeerConnections
from mansio.ports import ConnectOutcome, ForwardedAnswer, ForwardedClient, LinkChange, RequestClass
from mansio.state.broker_handshake import BrokerIdentity, ClusterSecret
from mansio.wire.api_versions import UNADVERTISED_SINCE, ApiKey
from mansio.wire.apis import fetch
from mansio.wire.codec import messages
from mansio.wire.framing import LENGTH_BYTES
from support.machine import scaled
from unit.net.stub_broker import HANG_UP, SAY_NOTHING, TOPIC_ID, StubBroker

if TYPE_CHECKING:
    from collections.abc import Callable

SECRET = ClusterSecret(bytes(range(32)))

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
    part = fetch.FetchedPartition(
        0, high_watermark=wanted.fetch_offset, diverging_epoch=(3, request.replica_epoch)
    )
    return [(None, request.topics[0][1], [part])]


@pytest.mark.parametrize("borrowed", [False, True], ids=["a copy", "borrowed"])
def test_a_follower_is_distinguished_and_learns_where_logs_diverge(borrowed: bool) -> None:
    async def run() -> None:
        async with StubBroker() as broker:
            broker.fetch = answered
            options = ConnectionOptions(frames_are_views=borrowed)
            peers = PeerConnections(lambda _: ("127.0.0.1", broker.port), options)
            for _ in range(3):
                frame = await peers.send(1, REQUEST, timeout_ms=5000)
                assert type(frame) is (memoryview if borrowed else bytes)
                response = fetch.decode_response(17, frame)
                (part,) = response.topics[0][2]
                assert (part.high_watermark, part.diverging_epoch) == (17, (3, 77))
            assert [request.replica_id for request in broker.asked(1)] == [2, 2, 2]
            assert broker.connections == 1
            await peers.close()

    asyncio.run(run())


def test_a_broker_that_is_gone_is_reported_and_found_again_where_it_comes_back() -> None:
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


def test_a_late_response_is_never_taken_for_the_response_to_the_next_request() -> None:
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


def test_callers_that_wait_for_one_connection_end_at_their_own_deadlines() -> None:
    async def run() -> None:
        async with StubBroker() as broker:
            broker.answers[ApiKey.API_VERSIONS] = lambda _: SAY_NOTHING
            peers = PeerConnections(lambda _: ("127.0.0.1", broker.port), is_unordered=True)
            callers = [peers.send(1, REQUEST, timeout_ms=1000) for _ in range(20)]
            for ended in await asyncio.gather(*callers, return_exceptions=True):
                assert isinstance(ended, BrokerUnreachable)
            assert broker.connections < 10, "callers waited one after the other"
            await peers.close()

    asyncio.run(run())


def test_a_queued_request_whose_caller_was_cancelled_is_not_sent() -> None:
    async def run() -> None:
        async with StubBroker() as broker:
            received, answer = asyncio.Event(), asyncio.Event()

            async def hold(request: fetch.FetchRequest) -> Any:
                received.set()
                await answer.wait()
                return answered(request)

            broker.fetch = hold
            options = ConnectionOptions(in_flight_requests_max=1)
            peers = PeerConnections(lambda _: ("127.0.0.1", broker.port), options, is_unordered=True)
            first = asyncio.ensure_future(peers.send(1, REQUEST, timeout_ms=60_000))
            async with asyncio.timeout(scaled(10)):
                await received.wait()
            queued = asyncio.ensure_future(peers.send(1, REQUEST, timeout_ms=60_000))
            last = asyncio.ensure_future(peers.send(1, REQUEST, timeout_ms=60_000))
            await asyncio.sleep(0)
            queued.cancel()
            with pytest.raises(asyncio.CancelledError):
                await queued
            answer.set()
            async with asyncio.timeout(scaled(10)):
                await asyncio.gather(first, last)
            assert len(broker.asked(ApiKey.FETCH)) == 2
            await peers.close()

    asyncio.run(run())


# Authentication


class AuthenticatingBroker(StubBroker):
    """Broker 1 of a cluster, for one connection at a time. `forge` replaces the proof that it answers with."""

    def __init__(self, epochs: dict[int, int], secret: ClusterSecret = SECRET) -> None:
        super().__init__()
        registry: Any = SimpleNamespace(
            cluster_id="c", cluster_secret=secret, epoch_of=lambda node_id: epochs.get(node_id, 0)
        )
        self.authenticator = BrokerAuthenticator(1, registry, HostRandom())
        self.forge: Callable[[Any, bytes], bytes] = lambda _, proof: proof
        self.fetch = answered
        self.offered |= {ApiKey.CHALLENGE_BROKER: (0, 0), ApiKey.AUTHENTICATE_BROKER: (0, 0)}
        self.answers |= {
            ApiKey.CHALLENGE_BROKER: self._challenge,
            ApiKey.AUTHENTICATE_BROKER: self._authenticate,
        }

    def _challenge(self, request: Any) -> dict[str, Any]:
        self._given = self.authenticator.begin_handshake(request.nonce, None, "")
        return {"nonce": self._given.listener_nonce}

    def _authenticate(self, request: Any) -> dict[str, Any]:
        identity = BrokerIdentity(request.node_id, request.broker_epoch)
        try:
            proof = self.authenticator.authenticate(self._given, identity, request.proof, "")
        except MansioError as error:
            return {"error_code": error.kafka_code, "proof": self.forge(request, b"")}
        return {"proof": self.forge(request, proof)}


def peers_of(
    broker: StubBroker, epochs: dict[int, int], secret: ClusterSecret | None = SECRET
) -> PeerConnections:
    """Those of broker 2."""
    credentials = BrokerCredentials(2, "c", lambda: secret, lambda: epochs.get(2, 0), HostRandom())
    return PeerConnections(lambda _: ("127.0.0.1", broker.port), dialler=BrokerDialler(credentials))


def test_a_broker_authenticates_once_per_connection_and_again_in_a_new_session() -> None:
    async def run() -> None:
        epochs = {2: 7}
        async with AuthenticatingBroker(epochs) as broker:
            peers = peers_of(broker, epochs)
            for _ in range(3):
                await peers.send(1, REQUEST, timeout_ms=5000)
            assert (broker.connections, broker.authenticator.authenticated_count) == (1, 1)
            epochs[2] = 9
            for _ in range(3):
                await peers.send(1, REQUEST, timeout_ms=5000)
            assert (broker.connections, broker.authenticator.authenticated_count) == (2, 2)
            epochs[2] = 0
            with pytest.raises(ConnectionLost, match="no session"):
                await peers.send(1, REQUEST, timeout_ms=5000)
            assert len(broker.asked(ApiKey.FETCH)) == 6
            await peers.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    "forge",
    [
        lambda request, _: request.proof,
        lambda _, __: b"",
        lambda _, __: bytes(32),
        lambda _, proof: proof[:-1],
    ],
    ids=["the dialler's own proof", "none", "zeros", "a byte too few"],
)
def test_nothing_is_sent_to_a_listener_that_does_not_prove_itself(
    forge: Callable[[Any, bytes], bytes],
) -> None:
    async def run() -> None:
        async with AuthenticatingBroker({2: 7}) as broker:
            broker.forge = forge
            peers = peers_of(broker, {2: 7})
            for _ in range(2):
                with pytest.raises(ConnectionLost, match="is not that broker"):
                    await peers.send(1, REQUEST, timeout_ms=5000)
            assert broker.asked(ApiKey.FETCH) == []
            assert broker.connections == 2
            await peers.close()

    asyncio.run(run())


def test_brokers_with_different_secrets_or_views_of_an_epoch_do_not_accept_each_other() -> None:
    async def run() -> None:
        for secret, epochs, reason in (
            (ClusterSecret(bytes(32)), {2: 7}, "proof"),
            (SECRET, {2: 8}, "epoch"),
            (SECRET, {2: 6}, "epoch"),
            (SECRET, {}, "epoch"),
        ):
            async with AuthenticatingBroker(epochs, secret) as broker:
                peers = peers_of(broker, {2: 7})
                with pytest.raises(ConnectionLost, match="did not accept"):
                    await peers.send(1, REQUEST, timeout_ms=5000)
                assert broker.authenticator.failure_counts[reason] == 1
                assert broker.asked(ApiKey.FETCH) == []
                await peers.close()

    asyncio.run(run())


def test_a_listener_that_is_no_broker_of_this_version_gets_nothing() -> None:
    """It closes the connection at the unknown request, as every Kafka broker does."""

    async def run() -> None:
        async with StubBroker() as broker:
            broker.fetch = answered
            broker.offered[ApiKey.CHALLENGE_BROKER] = (0, 0)
            broker.answers[ApiKey.CHALLENGE_BROKER] = lambda _: HANG_UP
            peers = peers_of(broker, {2: 7})
            with pytest.raises(ConnectionLost):
                await peers.send(1, REQUEST, timeout_ms=5000)
            assert broker.asked(ApiKey.FETCH) == []
            without = peers_of(broker, {2: 7}, secret=None)
            with pytest.raises(ConnectionLost, match="no secret"):
                await without.send(1, REQUEST, timeout_ms=5000)
            for one in (peers, without):
                await one.close()

    asyncio.run(run())


# Requests for clients

LEASES = messages.encode_request(
    ApiKey.DESCRIBE_LEASES, 0, 0, "alice", {"group_id": "g", "topics": None, "ranges_max": 0}
)[LENGTH_BYTES:]


async def forward(broker: StubBroker, *, is_own: bool) -> ForwardedAnswer:
    peers = peers_of(broker, {2: 7})
    try:
        client = ForwardedClient("10.0.0.1", "alice")
        return await peers.forward(1, LEASES, client=client, is_own=is_own, timeout_ms=5000)
    finally:
        await peers.close()


@pytest.mark.parametrize("is_own", [False, True])
def test_a_request_for_a_client_is_forwarded_with_its_address(is_own: bool) -> None:
    async def run() -> None:
        async with AuthenticatingBroker({2: 7}) as broker:
            broker.offered[ApiKey.FORWARD_REQUEST] = (0, 0)
            broker.answers[ApiKey.FORWARD_REQUEST] = lambda _: {"throttle_time_ms": 9, "response": b"found"}
            assert await forward(broker, is_own=is_own) == ForwardedAnswer(b"found", 9)
            (request,) = broker.asked(ApiKey.FORWARD_REQUEST)
            assert (request.node_id, request.broker_epoch, request.is_own) == (2, 7, is_own)
            assert (request.client_address, request.user) == ("10.0.0.1", "alice")
            assert request.request == LEASES

    asyncio.run(run())


def test_a_refused_request_for_a_client_was_not_answered() -> None:
    async def run() -> None:
        async with AuthenticatingBroker({2: 7}) as broker:
            broker.offered[ApiKey.FORWARD_REQUEST] = (0, 0)
            broker.answers[ApiKey.FORWARD_REQUEST] = lambda _: {"error_code": StaleBrokerEpoch.kafka_code}
            with pytest.raises(ConnectionLost, match="broker 1 did not accept the request"):
                await forward(broker, is_own=False)

    asyncio.run(run())


def test_a_broker_that_supports_no_forwarded_requests_gets_the_request_of_the_client_itself() -> None:
    async def run() -> None:
        async with AuthenticatingBroker({2: 7}) as broker:
            del broker.offered[UNADVERTISED_SINCE]
            broker.answers[ApiKey.DESCRIBE_LEASES] = lambda _: {"topics": []}
            answer = await forward(broker, is_own=False)
            _, found = messages.decode_response_frame(ApiKey.DESCRIBE_LEASES, 0, answer.response)
            assert (found.error_code, found.topics, answer.throttle_ms) == (0, [], 0)
            assert [request.group_id for request in broker.asked(ApiKey.DESCRIBE_LEASES)] == ["g"]

    asyncio.run(run())


# The connections as evidence


def classes_of(broker: StubBroker, changes: list[tuple[int, LinkChange]]) -> PeerConnectionClasses:
    """Without credentials."""
    classes = PeerConnectionClasses(lambda _: ("127.0.0.1", broker.port))
    classes.on_link_change(lambda node_id, change: changes.append((node_id, change)))
    return classes


def test_connections_of_all_classes_are_reported_with_who_ended_them() -> None:
    async def run() -> None:
        changes: list[tuple[int, LinkChange]] = []
        async with StubBroker() as broker:
            broker.fetch = answered
            classes = classes_of(broker, changes)
            assert not classes.is_open(1)
            await classes.open(1, timeout_ms=5000)
            await classes.open(1, timeout_ms=5000)
            assert classes.is_open(1)
            await classes.peers(RequestClass.REPLICATION).send(1, REQUEST, timeout_ms=5000)
            assert changes == [(1, LinkChange.OPENED)] * 2
            broker.hang_up()
            async with asyncio.timeout(scaled(10)):
                while len(changes) < 4:  # noqa: ASYNC110 - the connections make it so
                    await asyncio.sleep(0.01)
            assert changes[2:] == [(1, LinkChange.LOST)] * 2
            assert not classes.is_open(1)
            await classes.open(1, timeout_ms=5000)
            await classes.close()
            assert changes[4:] == [(1, LinkChange.OPENED), (1, LinkChange.CLOSED)]

    asyncio.run(run())


def test_connect_is_refused_only_where_nothing_listens() -> None:
    """A process that is stopped still accepts, through its kernel; a name without an address refuses nothing."""

    async def run() -> None:
        async with StubBroker() as broker:
            assert await try_connect("127.0.0.1", broker.port, timeout_ms=5000) is ConnectOutcome.ACCEPTED
            assert await try_connect("localhost", broker.port, timeout_ms=5000) is ConnectOutcome.ACCEPTED
        assert await try_connect("127.0.0.1", broker.port, timeout_ms=5000) is ConnectOutcome.REFUSED
        assert await try_connect("localhost", broker.port, timeout_ms=5000) is ConnectOutcome.REFUSED
        assert await try_connect("name.invalid", 9092, timeout_ms=5000) is ConnectOutcome.UNKNOWN
        with socket.socket() as unread:
            unread.bind(("127.0.0.1", 0))
            unread.listen(8)
            port = unread.getsockname()[1]
            assert await try_connect("127.0.0.1", port, timeout_ms=5000) is ConnectOutcome.ACCEPTED

    asyncio.run(run())


def test_connect_that_is_not_answered_is_not_refused() -> None:
    """A full queue of connections, as of a broker that is cut off: nothing comes back."""

    async def run() -> None:
        with socket.socket() as full:
            full.bind(("127.0.0.1", 0))
            full.listen(0)
            address = full.getsockname()
            waiting = [socket.socket() for _ in range(8)]
            try:
                for each in waiting:
                    each.setblocking(False)
                    each.connect_ex(address)
                outcome = await try_connect(*address, timeout_ms=200)
                assert outcome is not ConnectOutcome.REFUSED
            finally:
                for each in waiting:
                    each.close()

    asyncio.run(run())


def test_broker_without_an_address_refuses_nothing() -> None:
    async def run() -> None:
        classes = PeerConnectionClasses(lambda _: None)
        assert await classes.try_connect(1, timeout_ms=1000) is ConnectOutcome.UNKNOWN
        with pytest.raises(BrokerUnreachable):
            await classes.open(1, timeout_ms=1000)

    asyncio.run(run())
