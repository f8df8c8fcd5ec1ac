"""Acceptor of TLS connections: accepts sockets, runs their handshakes and hands the connections to protocols.

`loop.create_server` begins the handshake of every connection at once, with one context for ever. The acceptor has an
accept loop of its own: `HandshakeAdmission` decides which connection begins, and each takes the context that is in use
at that moment (`CertificateReloader`).

Works on the event loops of asyncio and uvloop, both of which encrypt in memory. A protocol gets its `connection_made`
when the handshake is complete.

Invariants:
* An accepted socket is waiting, in a handshake, handed over, or closed.
* Work for one turn of the event loop is bounded: `ACCEPTS_PER_TURN` sockets, `BEGINS_PER_TURN` handshakes.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from mansio.logs import fields
from mansio.net.tls.handshake_failures import (
    DISCONNECTED,
    OVERLOADED,
    TIMED_OUT,
    FailureReason,
    failure_of,
)
from mansio.ports import DESCRIPTOR_ERRNOS
from mansio.state.handshake_admission import HandshakeAdmission, address_key

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Sequence

    from mansio.net.tls.handshake_failures import Failure

logger = logging.getLogger(__name__)

ACCEPTS_PER_TURN: Final = 64
"""Maximum number of sockets that are accepted before the event loop serves others; one takes about 20 us."""

BEGINS_PER_TURN: Final = 8
"""Maximum number of handshakes that begin before the event loop serves others; the first step of one takes about 0.5
ms."""

DESCRIPTOR_PAUSE_S: Final = 1.0
"""Time for which nothing is accepted after the process had no file descriptor left."""

SHUTDOWN_S: Final = 2.0
"""Time within which a client has to read what is left and confirm that a connection was closed; then it is aborted."""


class _Accepted:
    """An accepted socket whose handshake is not complete."""

    __slots__ = ("deadline", "peer", "socket")

    def __init__(self, accepted: socket.socket, peer: str, deadline: float) -> None:
        self.socket = accepted
        self.peer = peer
        self.deadline = deadline


class TlsAcceptor:
    """Accepts the TLS connections of one listener. All methods are called on `loop`."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        new_protocol: Callable[[], asyncio.BaseProtocol],
        context: Callable[[], ssl.SSLContext],
        *,
        admission: HandshakeAdmission[_Accepted] | None = None,
    ) -> None:
        """`new_protocol`: creates the protocol of a connection. `context`: returns the context that is in use."""
        self._loop = loop
        self._new_protocol = new_protocol
        self._context = context
        self._admission: HandshakeAdmission[_Accepted] = admission or HandshakeAdmission()
        self._listening: list[socket.socket] = []
        self._handshakes: dict[asyncio.Task[None], _Accepted] = {}
        self._begin_due = False
        self._expiry: asyncio.TimerHandle | None = None
        self._pause: asyncio.TimerHandle | None = None
        self.accepted = 0
        """Number of accepted sockets."""
        self.completed = 0
        """Number of handshakes that were complete."""
        self.failed: dict[FailureReason, int] = dict.fromkeys(FailureReason, 0)
        """Number of connections whose handshake failed, by reason."""

    @property
    def running_count(self) -> int:
        """Number of handshakes in progress."""
        return self._admission.running_count

    @property
    def waiting_count(self) -> int:
        """Number of connections whose handshake has not begun."""
        return self._admission.waiting_count

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
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None
        for waiting in self._admission.take_waiting():
            waiting.socket.close()
        handshakes = dict(self._handshakes)
        for handshake in handshakes:
            handshake.cancel()
        await asyncio.gather(*handshakes, return_exceptions=True)
        for handshake, connection in handshakes.items():
            if handshake.cancelled():  # perhaps before its first step, so that no transport has the socket
                connection.socket.close()

    # Accepting

    def _resume(self) -> None:
        self._pause = None
        for listening in self._listening:
            self._loop.add_reader(listening.fileno(), self._accept, listening)

    def _accept(self, listening: socket.socket) -> None:
        """Accept the connections of a socket that is readable."""
        now = self._loop.time()
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
            peer = str(address[0]) if address else ""
            connection = _Accepted(accepted, peer, self._admission.deadline_of(now))
            refused = self._admission.add(connection, address_key(peer), now)
            if refused is not None:
                self._close(refused, OVERLOADED)
        self._begin_handshakes()
        self._watch_deadlines()

    def _pause_accepting(self, error: OSError) -> None:
        """Accept nothing for a while: the connections wait in the kernel's queue."""
        logger.warning("accept_paused", extra=fields(reason=error.strerror, pause_s=DESCRIPTOR_PAUSE_S))
        for listening in self._listening:
            self._loop.remove_reader(listening.fileno())
        if self._pause is None:
            self._pause = self._loop.call_later(DESCRIPTOR_PAUSE_S, self._resume)

    # Handshakes

    def _begin_soon(self) -> None:
        if not self._begin_due:
            self._begin_due = True
            self._loop.call_soon(self._begin_again)

    def _begin_again(self) -> None:
        self._begin_due = False
        self._begin_handshakes()

    def _begin_handshakes(self) -> None:
        """Begin the handshakes that may run now; after some of them, the event loop serves others first."""
        if self._begin_due:
            return
        self._close_expired()
        for _ in range(BEGINS_PER_TURN):
            connection = self._admission.begin_next()
            if connection is None:
                return
            handshake = self._loop.create_task(self._run_handshake(connection))
            self._handshakes[handshake] = connection
            handshake.add_done_callback(self._handshakes.pop)
        self._begin_soon()

    async def _run_handshake(self, connection: _Accepted) -> None:
        try:
            with suppress(OSError):  # of another family than TCP
                connection.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await self._loop.connect_accepted_socket(
                self._new_protocol,
                connection.socket,
                ssl=self._context(),
                ssl_handshake_timeout=max(connection.deadline - self._loop.time(), 0.001),
                ssl_shutdown_timeout=SHUTDOWN_S,
            )
        except asyncio.CancelledError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever a peer causes ends its own connection only
            connection.socket.close()  # no effect if a transport has it, which is about to close it
            self._on_failed(connection, self._failure_of(connection, error))
        else:
            self.completed += 1
        finally:
            self._admission.end(connection)
            self._begin_soon()

    def _failure_of(self, connection: _Accepted, error: Exception) -> Failure:
        """Return why a handshake failed. Event loops report an expired handshake in different ways."""
        failure = failure_of(error)
        if failure is DISCONNECTED and self._loop.time() >= connection.deadline:
            return TIMED_OUT
        return failure

    # Deadlines

    def _watch_deadlines(self) -> None:
        """Arm the timer for the deadline of the oldest waiting connection."""
        deadline = self._admission.next_deadline
        if self._expiry is None and deadline is not None:
            self._expiry = self._loop.call_at(deadline, self._on_deadline)

    def _on_deadline(self) -> None:
        self._expiry = None
        self._close_expired()
        self._watch_deadlines()

    def _close_expired(self) -> None:
        for connection in self._admission.take_expired(self._loop.time()):
            self._close(connection, TIMED_OUT)

    def _close(self, connection: _Accepted, failure: Failure) -> None:
        connection.socket.close()
        self._on_failed(connection, failure)

    def _on_failed(self, connection: _Accepted, failure: Failure) -> None:
        self.failed[failure.reason] += 1
        # A check whether the port is open, as load balancers make them, is no reason for a line.
        level = logging.DEBUG if failure is DISCONNECTED else logging.WARNING
        known = fields(peer=connection.peer, reason=failure.reason, detail=failure.detail)
        logger.log(level, "tls_handshake_failed", extra=known)
