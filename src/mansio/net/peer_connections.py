"""Peer connections: `mansio.ports.Peers` over the Kafka listeners of other brokers.

One connection per broker, opened when first needed and again after it was lost. Requests on it are answered in order; a
caller that sends some requests which wait (a follower's fetch) and some that must not uses two objects.

Invariant: a caller that is cancelled, or whose request times out, closes its connection, so that no response is ever
taken for that of another request.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from mansio.errors import ConnectionLost
from mansio.net.connection import DEFAULT_OPTIONS, Connection, ConnectionOptions

if TYPE_CHECKING:
    from collections.abc import Callable

CORRELATION_ID_AT = 8  # in a request with its length: after the API key and the version


class PeerConnections:
    """Belongs to the event loop on which it is used."""

    def __init__(
        self,
        address_of: Callable[[int], tuple[str, int] | None],
        options: ConnectionOptions = DEFAULT_OPTIONS,
    ) -> None:
        """`address_of` returns the current address of a broker; None if it is not registered."""
        self._address_of = address_of
        self._options = options
        self._connections: dict[int, Connection] = {}
        self._opening: dict[int, asyncio.Lock] = {}

    async def send(self, node_id: int, request: bytes, *, timeout_ms: float) -> bytes:
        connection = self._connections.get(node_id)
        if connection is None or connection.closed or connection.address != self._address_of(node_id):
            connection = await self._connection(node_id, timeout_ms)
        correlation_id = connection.next_correlation_id()
        numbered = bytearray(request)
        numbered[CORRELATION_ID_AT : CORRELATION_ID_AT + 4] = correlation_id.to_bytes(4, "big")
        try:
            return await connection.exchange((numbered,), correlation_id, timeout_ms=timeout_ms)
        except asyncio.CancelledError:
            connection.abort()
            raise

    async def _connection(self, node_id: int, timeout_ms: float) -> Connection:
        async with self._opening.setdefault(node_id, asyncio.Lock()):
            address = self._address_of(node_id)
            if address is None:
                raise ConnectionLost(f"broker {node_id} is not there")
            known = self._connections.get(node_id)
            if known is not None and not known.closed and known.address == address:
                return known
            if known is not None:
                known.abort()
            try:
                async with asyncio.timeout(timeout_ms / 1000):
                    connection = await Connection.open(*address, self._options)
            except TimeoutError as error:
                raise ConnectionLost(
                    f"broker {node_id} at {address[0]}:{address[1]} does not answer"
                ) from error
            self._connections[node_id] = connection
            return connection

    async def close(self) -> None:
        """Close all connections; waiting requests fail with `ConnectionLost`."""
        connections = list(self._connections.values())
        self._connections.clear()
        for connection in connections:
            await connection.close()
