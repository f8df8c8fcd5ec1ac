"""Acceptor of TLS connections: accepts the sockets of one listener and hands them to the runner of handshakes.

`loop.create_server` begins the handshake of every connection at once, with one context for ever. The acceptor has an
accept loop of its own: `HandshakeRunner` decides when a handshake begins, and each takes the context that is in use at
that moment (`CertificateReloader`).

Invariant: at most `ACCEPTS_PER_TURN` sockets are accepted in one turn of the event loop.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from mansio.logs import fields
from mansio.net.tls.handshake_failures import DISCONNECTED, FailureReason
from mansio.net.tls.handshakes import HandshakeRunner
from mansio.ports import DESCRIPTOR_ERRNOS

if TYPE_CHECKING:
    import asyncio
    import socket
    import ssl
    from collections.abc import Callable, Sequence

    from mansio.net.tls.handshake_failures import Failure

logger = logging.getLogger(__name__)

ACCEPTS_PER_TURN: Final = 64
"""Maximum number of sockets that are accepted before the event loop serves others; one takes about 20 us."""

DESCRIPTOR_PAUSE_S: Final = 1.0
"""Time for which nothing is accepted after the process had no file descriptor left."""


class TlsAcceptor:
    """Accepts the TLS connections of one listener. All methods are called on `loop`."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        new_protocol: Callable[[], asyncio.BaseProtocol],
        context: Callable[[], ssl.SSLContext],
        *,
        handshakes: HandshakeRunner | None = None,
    ) -> None:
        """`new_protocol`: creates the protocol of a connection. `context`: returns the context that is in use.
        `handshakes`: runs the handshakes of this listener and of others."""
        self._loop = loop
        self.new_protocol = new_protocol
        self.context = context
        self._handshakes = handshakes or HandshakeRunner(loop)
        self._listening: list[socket.socket] = []
        self._pause: asyncio.TimerHandle | None = None
        self.accepted = 0
        """Number of accepted sockets."""
        self.completed = 0
        """Number of handshakes that were complete."""
        self.failed: dict[FailureReason, int] = dict.fromkeys(FailureReason, 0)
        """Number of connections whose handshake failed, by reason."""

    def listen(self, sockets: Sequence[socket.socket]) -> None:
        """Start to accept the connections of sockets that listen. The acceptor closes them."""
        for listening in sockets:
            listening.setblocking(False)
        self._listening.extend(sockets)
        self._resume()

    def stop_listening(self) -> None:
        """Accept no more connections. What has been accepted goes on."""
        if self._pause is not None:
            self._pause.cancel()
            self._pause = None
        for listening in self._listening:
            self._loop.remove_reader(listening.fileno())
            listening.close()
        self._listening.clear()

    async def stop(self) -> None:
        """Accept no more connections, and close those whose handshake is not complete."""
        self.stop_listening()
        await self._handshakes.close_connections(self)

    # Accepting

    def _resume(self) -> None:
        self._pause = None
        for listening in self._listening:
            self._loop.add_reader(listening.fileno(), self._accept, listening)

    def _accept(self, listening: socket.socket) -> None:
        """Accept the connections of a socket that is readable."""
        for _ in range(ACCEPTS_PER_TURN):
            try:
                accepted, address = listening.accept()
            except (BlockingIOError, InterruptedError):
                break
            except OSError as error:
                if error.errno in DESCRIPTOR_ERRNOS:
                    self._pause_accepting(error)
                    break
                continue  # of this connection: its peer has reset it, or the firewall refuses it
            self.accepted += 1
            accepted.setblocking(False)
            self._handshakes.add(accepted, str(address[0]) if address else "", self)

    def _pause_accepting(self, error: OSError) -> None:
        """Accept nothing for a while: the connections wait in the kernel's queue."""
        logger.warning("accept_paused", extra=fields(reason=error.strerror, pause_s=DESCRIPTOR_PAUSE_S))
        for listening in self._listening:
            self._loop.remove_reader(listening.fileno())
        if self._pause is None:
            self._pause = self._loop.call_later(DESCRIPTOR_PAUSE_S, self._resume)

    # Handshakes

    def on_completed(self) -> None:
        """Count a complete handshake."""
        self.completed += 1

    def on_failed(self, peer: str, failure: Failure) -> None:
        """Count and log a connection whose handshake failed."""
        self.failed[failure.reason] += 1
        # A check whether the port is open, as load balancers make them, is no reason for a line.
        level = logging.DEBUG if failure is DISCONNECTED else logging.WARNING
        known = fields(peer=peer, reason=failure.reason, detail=failure.detail)
        logger.log(level, "tls_handshake_failed", extra=known)
