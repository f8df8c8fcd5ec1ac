"""Connections to other brokers (ports `ForwardingPeers` and `PeerLinks`) through their Kafka listeners.

`PeerConnections` has one connection per broker, `PeerConnectionClasses` one of these for each `RequestClass`.
A connection is opened when first needed, and opened again after it was lost or after this broker has registered again.
`BrokerDialler` opens it: with TLS where brokers use it, and a handshake in which both brokers authenticate. A broker
answers the requests of an ordered connection in order, so one that it holds (a follower's fetch) delays those behind
it. On an unordered one, responses may overtake, and requests of many callers are in flight; a broker of version 0.1
answers in order nevertheless.

Invariants:
* A request that is cancelled or times out closes an ordered connection, because the responses behind it would be late.
  It closes an unordered one only if nothing has been received since it was sent.
* Nothing but the handshake is sent on a connection before both brokers have authenticated.
* Requests are sent only on a connection on which this broker has authenticated with its current broker epoch.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, NamedTuple

from mansio.errors import BrokerUnreachable, ConnectionLost, RequestTimedOut
from mansio.net.broker_dialler import BrokerDialler, try_connect
from mansio.net.connection import DEFAULT_OPTIONS, Connection, ConnectionOptions
from mansio.net.forwarded_requests import decode_forwarded, encode_forwarded
from mansio.ports import ConnectOutcome, ForwardedAnswer, LinkChange, RequestClass
from mansio.state.broker_handshake import BrokerIdentity
from mansio.wire.api_versions import UNADVERTISED_SINCE
from mansio.wire.framing import LENGTH_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

    from mansio.ports import ForwardedClient

CORRELATION_ID_POSITION = 8
"""Byte position of the correlation id in an encoded request: after the length prefix, API key and version."""

IN_FLIGHT_REQUESTS_MAX = 1_000
"""Maximum number of requests in flight on an unordered connection: with more, one waits to be sent."""

SILENCE_MS = 60_000
"""Time after the end of its timeout at which a request that was not answered closes an unordered connection."""


class PeerConnectionClasses:
    """Connections to other brokers by class of request; implements the port `PeerLinks`. All methods run on one event
    loop."""

    def __init__(
        self,
        broker_address: Callable[[int], tuple[str, int] | None],
        dialler: BrokerDialler | None = None,
    ) -> None:
        """See `PeerConnections`."""
        self._broker_address = broker_address
        self.dialler = dialler or BrokerDialler()
        self._opened: dict[RequestClass, PeerConnections] = {}
        self._link_callbacks: list[Callable[[int, LinkChange], None]] = []

    def peers(self, request_class: RequestClass) -> PeerConnections:
        """Return the connections for a class of requests, the same ones for each call."""
        found = self._opened.get(request_class)
        if found is None:
            found = self._opened[request_class] = PeerConnections(
                self._broker_address,
                _options(request_class),
                self.dialler,
                is_unordered=request_class.is_unordered,
                on_link_change=self._handle_link_change,
            )
        return found

    def on_link_change(self, callback: Callable[[int, LinkChange], None]) -> None:
        self._link_callbacks.append(callback)

    def _handle_link_change(self, node_id: int, change: LinkChange) -> None:
        for callback in self._link_callbacks:
            callback(node_id, change)

    def is_open(self, node_id: int) -> bool:
        return self.peers(RequestClass.HAND_OVER).is_open(node_id)

    async def open(self, node_id: int, *, timeout_ms: float) -> None:
        await self.peers(RequestClass.HAND_OVER).open(node_id, timeout_ms=timeout_ms)

    async def try_connect(self, node_id: int, *, timeout_ms: float) -> ConnectOutcome:
        address = self._broker_address(node_id)
        if address is None:
            return ConnectOutcome.UNKNOWN
        return await try_connect(*address, timeout_ms=timeout_ms)

    async def close(self) -> None:
        """Close all connections; waiting requests fail with `ConnectionLost`."""
        for opened in self._opened.values():
            await opened.close()


def _options(request_class: RequestClass) -> ConnectionOptions:
    if request_class.is_unordered:
        return ConnectionOptions(in_flight_requests_max=IN_FLIGHT_REQUESTS_MAX)
    # A follower has one request in flight for each leader and writes the response before it sends the next request, so
    # that it can borrow the received bytes from the read buffer.
    return ConnectionOptions(frames_are_views=request_class is not RequestClass.REPAIR)


class _Peer(NamedTuple):
    """An open connection, and the broker epoch with which this broker authenticated on it (0: without a handshake)."""

    connection: Connection
    broker_epoch: int


class PeerConnections:
    """One connection to each other broker; implements the port `ForwardingPeers`. All methods run on one event loop."""

    def __init__(
        self,
        broker_address: Callable[[int], tuple[str, int] | None],
        options: ConnectionOptions = DEFAULT_OPTIONS,
        dialler: BrokerDialler | None = None,
        *,
        is_unordered: bool = False,
        on_link_change: Callable[[int, LinkChange], None] = lambda _, __: None,
    ) -> None:
        """`broker_address` returns the current (host, port) of a broker, or None if the broker is not registered, or
        has no listener that this one can use. `dialler`: by default one without TLS and credentials. `on_link_change`:
        called with the node id and what happened to the connection to that broker."""
        self._is_unordered = is_unordered
        self._on_link_change = on_link_change
        self._broker_address = broker_address
        self._options = options
        self._dialler = dialler or BrokerDialler()
        self._peers: dict[int, _Peer] = {}
        self._opening: dict[int, asyncio.Lock] = {}

    async def send(self, node_id: int, request: bytes, *, timeout_ms: float) -> bytes:
        peer = self._usable(node_id)
        if peer is None:
            peer, timeout_ms = await self._opened(node_id, timeout_ms)
        return await self._send(peer.connection, request, timeout_ms)

    async def forward(
        self, node_id: int, request: bytes, *, client: ForwardedClient, is_own: bool, timeout_ms: float
    ) -> ForwardedAnswer:
        peer = self._usable(node_id)
        if peer is None:
            peer, timeout_ms = await self._opened(node_id, timeout_ms)
        credentials = self._dialler.credentials
        if credentials is None or UNADVERTISED_SINCE not in peer.connection.versions:
            framed = len(request).to_bytes(LENGTH_BYTES, "big") + request
            return ForwardedAnswer(await self._send(peer.connection, framed, timeout_ms))
        identity = BrokerIdentity(credentials.node_id, peer.broker_epoch)
        framed = encode_forwarded(identity, request, client=client, is_own=is_own)
        return decode_forwarded(await self._send(peer.connection, framed, timeout_ms), node_id)

    async def _send(self, connection: Connection, request: bytes, timeout_ms: float) -> bytes:
        correlation_id = connection.next_correlation_id()
        numbered = bytearray(request)
        numbered[CORRELATION_ID_POSITION : CORRELATION_ID_POSITION + 4] = correlation_id.to_bytes(4, "big")
        if self._is_unordered:
            return await _exchange(connection, numbered, correlation_id, timeout_ms)
        try:
            return await connection.exchange((numbered,), correlation_id, timeout_ms=timeout_ms)
        except asyncio.CancelledError:
            connection.abort()
            raise

    def is_open(self, node_id: int) -> bool:
        """Whether the connection to a broker is open and has the current epoch of this one."""
        return self._usable(node_id) is not None

    async def open(self, node_id: int, *, timeout_ms: float) -> None:
        """Open the connection to a broker, unless it is open. Raises `BrokerUnreachable`."""
        if self._usable(node_id) is None:
            await self._opened(node_id, timeout_ms)

    def _usable(self, node_id: int) -> _Peer | None:
        """Return the open connection to a broker, None if it has to be opened."""
        known = self._peers.get(node_id)
        if known is not None and self._is_usable(known, self._broker_address(node_id)):
            return known
        return None

    async def _opened(self, node_id: int, timeout_ms: float) -> tuple[_Peer, float]:
        """Open the connection to a broker. Returns the connection and the remaining part of `timeout_ms`."""
        loop = asyncio.get_running_loop()
        begin = loop.time()
        peer = await self._connect(node_id, timeout_ms)
        return peer, max(timeout_ms - (loop.time() - begin) * 1000, 0)

    def _is_usable(self, known: _Peer, address: tuple[str, int] | None) -> bool:
        connection, credentials = known.connection, self._dialler.credentials
        return (
            not connection.closed
            and connection.address == address
            and (credentials is None or known.broker_epoch == credentials.broker_epoch())
        )

    async def _connect(self, node_id: int, timeout_ms: float) -> _Peer:
        address = self._broker_address(node_id)
        try:
            # The deadline includes the wait for another caller that opens the connection.
            async with asyncio.timeout(timeout_ms / 1000), self._opening.setdefault(node_id, asyncio.Lock()):
                address = self._broker_address(node_id)
                if address is None:
                    raise BrokerUnreachable(
                        f"broker {node_id} is not registered, or has no listener with the security protocol of the "
                        "listener between brokers"
                    )
                known = self._peers.get(node_id)
                if known is not None:
                    if self._is_usable(known, address):
                        return known
                    known.connection.abort()
                opened = self._peers[node_id] = await self._open(node_id, address)
        except TimeoutError as error:
            place = "" if address is None else f" at {address[0]}:{address[1]}"
            raise BrokerUnreachable(f"broker {node_id}{place} does not answer") from error
        except ConnectionLost as error:
            raise BrokerUnreachable(error.message) from error
        return opened

    async def _open(self, node_id: int, address: tuple[str, int]) -> _Peer:
        connection = await self._dialler.connect(node_id, address, self._options)
        epoch = await self._dialler.authenticate(connection, node_id, is_unordered=self._is_unordered)
        self._on_link_change(node_id, LinkChange.OPENED)

        def lost(is_by_peer: bool) -> None:
            self._on_link_change(node_id, LinkChange.LOST if is_by_peer else LinkChange.CLOSED)

        connection.when_lost(lost)
        return _Peer(connection, epoch)

    async def close(self) -> None:
        """Close all connections; waiting requests fail with `ConnectionLost`."""
        peers = list(self._peers.values())
        self._peers.clear()
        for known in peers:
            await known.connection.close()


async def _exchange(
    connection: Connection, request: bytearray, correlation_id: int, timeout_ms: float
) -> bytes:
    """Exchange a request on an unordered connection. One that times out leaves the connection open, unless the peer has
    been silent since it was sent. Raises `RequestTimedOut`, `ConnectionLost`, and `BrokerUnreachable` if it was not
    sent."""
    received_bytes = connection.received_bytes
    response: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
    response.add_done_callback(_retrieve)
    connection.begin_exchange((request,), correlation_id, response, timeout_ms=timeout_ms + SILENCE_MS)
    try:
        async with asyncio.timeout(timeout_ms / 1000):
            return await asyncio.shield(response)
    except asyncio.CancelledError:
        if connection.is_queued(correlation_id):
            response.cancel()  # it is not sent any more
        raise
    except TimeoutError:
        if connection.is_queued(correlation_id):
            response.cancel()  # it is not sent any more
            raise BrokerUnreachable("the maximum number of requests is in flight") from None
        reason = f"{connection.address[0]}:{connection.address[1]} did not respond in time"
        if connection.received_bytes == received_bytes:
            connection.abort(ConnectionLost(reason))
        raise RequestTimedOut(reason) from None


def _retrieve(response: asyncio.Future[bytes]) -> None:
    """Retrieve the error of a response for which no caller waits any more."""
    if not response.cancelled():
        response.exception()
