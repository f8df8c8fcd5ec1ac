"""Peer connections: `mansio.ports.Peers` over the Kafka listeners of other brokers.

One connection per broker, opened when first needed, and again after it was lost or this broker has a new session. It
begins with a handshake in which both brokers authenticate. Requests on it are answered in order; a caller that sends
some requests which wait (a follower's fetch) and some that must not uses two objects.

Invariants:
* A caller that is cancelled, or whose request times out, closes its connection, so that no response is ever taken for
  that of another request.
* Nothing is sent on a connection before both brokers have authenticated, nor in another session than the one in which
  this broker has.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from mansio.errors import ConnectionLost
from mansio.net.broker_handshake import authenticate
from mansio.net.connection import DEFAULT_OPTIONS, Connection, ConnectionOptions

if TYPE_CHECKING:
    from collections.abc import Callable

    from mansio.net.broker_handshake import BrokerCredentials

CORRELATION_ID_AT = 8  # in a request with its length: after the API key and the version


class _Peer(NamedTuple):
    """An open connection, and the epoch in which this broker has authenticated on it (0: it has not to)."""

    connection: Connection
    broker_epoch: int


class PeerConnections:
    """Belongs to the event loop on which it is used."""

    def __init__(
        self,
        address_of: Callable[[int], tuple[str, int] | None],
        options: ConnectionOptions = DEFAULT_OPTIONS,
        credentials: BrokerCredentials | None = None,
    ) -> None:
        """`address_of` returns the current address of a broker; None if it is not registered. Without `credentials`
        there is no handshake, and only requests that any client may send are accepted."""
        self._address_of = address_of
        self._options = options
        self._credentials = credentials
        self._peers: dict[int, _Peer] = {}
        self._opening: dict[int, asyncio.Lock] = {}

    async def send(self, node_id: int, request: bytes, *, timeout_ms: float) -> bytes:
        known = self._peers.get(node_id)
        if known is not None and self._is_usable(known, self._address_of(node_id)):
            connection = known.connection
        else:
            connection = await self._connection(node_id, timeout_ms)
        correlation_id = connection.next_correlation_id()
        numbered = bytearray(request)
        numbered[CORRELATION_ID_AT : CORRELATION_ID_AT + 4] = correlation_id.to_bytes(4, "big")
        try:
            return await connection.exchange((numbered,), correlation_id, timeout_ms=timeout_ms)
        except asyncio.CancelledError:
            connection.abort()
            raise

    def _is_usable(self, known: _Peer, address: tuple[str, int] | None) -> bool:
        connection, credentials = known.connection, self._credentials
        return (
            not connection.closed
            and connection.address == address
            and (credentials is None or known.broker_epoch == credentials.broker_epoch())
        )

    async def _connection(self, node_id: int, timeout_ms: float) -> Connection:
        async with self._opening.setdefault(node_id, asyncio.Lock()):
            address = self._address_of(node_id)
            if address is None:
                raise ConnectionLost(f"broker {node_id} is not there")
            known = self._peers.get(node_id)
            if known is not None:
                if self._is_usable(known, address):
                    return known.connection
                known.connection.abort()
            try:
                async with asyncio.timeout(timeout_ms / 1000):
                    opened = self._peers[node_id] = await self._open(node_id, address)
            except TimeoutError as error:
                raise ConnectionLost(
                    f"broker {node_id} at {address[0]}:{address[1]} does not answer"
                ) from error
            return opened.connection

    async def _open(self, node_id: int, address: tuple[str, int]) -> _Peer:
        credentials = self._credentials
        if credentials is None:
            return _Peer(await Connection.open(*address, self._options), 0)
        identity = credentials.identity()
        connection = await Connection.open(*address, self._options)
        try:
            await authenticate(partial(connection.request, version=0), credentials, identity, node_id)
        except BaseException:
            connection.abort()
            raise
        return _Peer(connection, identity.broker_epoch)

    async def close(self) -> None:
        """Close all connections; waiting requests fail with `ConnectionLost`."""
        peers = list(self._peers.values())
        self._peers.clear()
        for known in peers:
            await known.connection.close()
