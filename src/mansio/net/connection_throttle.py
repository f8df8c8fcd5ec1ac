"""Throttle of new connections: closes those of addresses that connect more often than their quota allows (KIP-612).

A connection over the quota is not read. It is closed when the address may connect again, after one second at most, so
that a client which connects again at once is slowed down; Kafka does the same. What is held is bounded: with
`HELD_MAX` such connections, further ones are closed at once.

Invariant: a connection that is throttled does not count against the quota.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final, cast

from mansio.logs import fields

if TYPE_CHECKING:
    from collections.abc import Callable

    from mansio.state.connection_rates import ConnectionRates

logger = logging.getLogger(__name__)

HELD_MAX: Final = 64
"""Maximum number of throttled connections that are open; each one holds up to two file descriptors."""

HOLD_S_MAX: Final = 1.0


class _UnreadProtocol(asyncio.Protocol):
    """Protocol of a throttled connection: discards what one read returns, and reads no more. uvloop reads once, even if
    a protocol pauses its transport in `connection_made`."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        del data
        self._transport.pause_reading()


class ConnectionThrottle:
    """Throttle of the connections of all listeners of a broker but those of gRPC, which accepts its own."""

    def __init__(self, loop: asyncio.AbstractEventLoop, rates: Callable[[], ConnectionRates | None]) -> None:
        """`rates`: returns the rates that are in effect, None while there are none."""
        self._loop = loop
        self._rates = rates
        self._held: dict[Callable[[], None], asyncio.TimerHandle] = {}
        self.throttled = 0
        """Number of connections that were over the quota of their address."""

    @property
    def held_count(self) -> int:
        """Number of throttled connections that are open."""
        return len(self._held)

    def close_if_over_quota(self, host: str, close: Callable[[], None]) -> bool:
        """Count a new connection from the address `host`. If that is over its quota, return True, and call `close` now
        or later: the caller does not read from the connection."""
        rates = self._rates()
        if rates is None:
            return False
        throttle_ms = rates.take(host, self._loop.time())
        if not throttle_ms:
            return False
        self.throttled += 1
        logger.warning("connection_throttled", extra=fields(peer=host, reason="connection_creation_rate"))
        if len(self._held) >= HELD_MAX:
            close()
        else:
            delay_s = min(throttle_ms / 1000, HOLD_S_MAX)
            self._held[close] = self._loop.call_later(delay_s, self._end, close)
        return True

    def closes(self, transport: asyncio.BaseTransport) -> bool:
        """Count a new connection, in `connection_made` of its protocol. If its address is over the quota, return True:
        the throttle has the transport then, and no other method of the protocol is called."""
        peer = transport.get_extra_info("peername")
        accepted = cast("asyncio.Transport", transport)
        if not self.close_if_over_quota(str(peer[0]) if peer else "", accepted.abort):
            return False
        accepted.set_protocol(_UnreadProtocol(accepted))
        return True

    def stop(self) -> None:
        """Close the connections that are held."""
        for close, timer in tuple(self._held.items()):
            timer.cancel()
            self._end(close)

    def _end(self, close: Callable[[], None]) -> None:
        del self._held[close]
        close()
