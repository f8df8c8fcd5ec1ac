"""Runner of TLS handshakes: those of all listeners of a broker, within one set of limits.

`HandshakeAdmission` decides which accepted socket begins its handshake, and which handshake gives way to others. The
event loop watches the waiting sockets and reads nothing from them; one that becomes readable may begin. The event loops
of asyncio and uvloop encrypt in memory. A protocol gets its `connection_made` when the handshake is complete.

Invariants:
* An accepted socket is waiting, in a handshake, handed over, or closed.
* At most `BEGINS_PER_TURN` handshakes begin in one turn of the event loop.
"""

from __future__ import annotations

import asyncio
import select
import socket
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol

from mansio.net.tls.handshake_failures import (
    DISCONNECTED,
    OVERLOADED,
    TIMED_OUT,
    TOO_SLOW,
    failure_of,
)
from mansio.state.handshake_admission import HandshakeAdmission, address_key

if TYPE_CHECKING:
    import ssl

    from mansio.net.connection_throttle import ConnectionThrottle
    from mansio.net.tls.handshake_failures import Failure

BEGINS_PER_TURN: Final = 8
"""Maximum number of handshakes that begin before the event loop serves others; the first step of one takes about 0.5
ms."""

SHUTDOWN_S: Final = 2.0
"""Time within which a client has to read what is left and confirm that a connection was closed; then it is aborted."""


class TlsListener(Protocol):
    """The listener that has accepted a connection."""

    def new_protocol(self) -> asyncio.BaseProtocol:
        """Create the protocol of a connection."""

    def context(self) -> ssl.SSLContext:
        """Return the context that is in use."""

    def on_completed(self) -> None:
        """Count a complete handshake."""

    def on_failed(self, peer: str, failure: Failure) -> None:
        """Count and log a connection whose handshake failed."""


class AcceptedConnection:
    """An accepted socket whose handshake is not complete."""

    __slots__ = ("_was_renewed", "deadline", "listener", "peer", "socket")

    def __init__(self, accepted: socket.socket, peer: str, listener: TlsListener, deadline: float) -> None:
        self.socket = accepted
        self.peer = peer
        self.listener = listener
        self.deadline = deadline
        self._was_renewed = False

    @property
    def has_ended(self) -> bool:
        """Whether its transport has closed the socket. The event loop reports the end of the handshake a turn later."""
        return self.socket.fileno() < 0

    @property
    def is_readable(self) -> bool:
        """Whether the event loop has not read everything that has arrived."""
        poll = select.poll()
        poll.register(self.socket.fileno(), select.POLLIN)
        return bool(poll.poll(0))

    def take_renewal(self) -> bool:
        """Return whether the connection keeps its place because the event loop was late, not the peer. True once: a
        peer that always sends more would keep the place otherwise."""
        if self._was_renewed:
            return False
        self._was_renewed = self.is_readable
        return self._was_renewed


class HandshakeRunner:
    """Runs the TLS handshakes of all listeners of a broker. All methods are called on `loop`."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        admission: HandshakeAdmission[AcceptedConnection] | None = None,
        throttle: ConnectionThrottle | None = None,
    ) -> None:
        """`throttle`: closes connections of addresses that connect too often, before their handshake."""
        self._loop = loop
        self._admission: HandshakeAdmission[AcceptedConnection] = admission or HandshakeAdmission()
        self._throttle = throttle
        self._running: dict[AcceptedConnection, asyncio.Task[None]] = {}
        self._begin_due = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0

    @property
    def running_count(self) -> int:
        """Number of handshakes in progress."""
        return self._admission.running_count

    @property
    def waiting_count(self) -> int:
        """Number of connections whose handshake has not begun."""
        return self._admission.waiting_count

    def add(self, accepted: socket.socket, peer: str, listener: TlsListener) -> None:
        """Run the handshake of a socket that `listener` has accepted from the address `peer`, as soon as the socket is
        readable and has its turn."""
        if self._throttle is not None and self._throttle.close_if_over_quota(peer, accepted.close):
            return
        now = self._loop.time()
        connection = AcceptedConnection(accepted, peer, listener, self._admission.deadline_of(now))
        refused = self._admission.add(connection, address_key(peer), now)
        self._loop.add_reader(accepted.fileno(), self._on_readable, connection)
        if refused is not None:
            self._close(refused, OVERLOADED)
        if (expires_at := self._admission.next_expiry) is not None:
            self._call_at(expires_at)

    async def close_connections(self, listener: TlsListener) -> None:
        """Close the connections of a listener whose handshake is not complete."""
        for connection in [each for each in self._admission.waiting if each.listener is listener]:
            self._admission.discard(connection)
            self._loop.remove_reader(connection.socket.fileno())
            connection.socket.close()
        tasks = [task for connection, task in self._running.items() if connection.listener is listener]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._timer is not None and not self._admission.waiting_count:
            self._timer.cancel()
            self._timer = None

    # Waiting connections

    def _on_readable(self, connection: AcceptedConnection) -> None:
        """Let a connection that has sent something take part in the turns; close one that its peer has closed."""
        try:
            is_open = bool(connection.socket.recv(1, socket.MSG_PEEK))
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            is_open = False
        if is_open:
            self._loop.remove_reader(connection.socket.fileno())
            self._admission.mark_readable(connection)
            self._begin_soon()
        else:
            self._admission.discard(connection)
            self._close(connection, DISCONNECTED)

    def _close_expired(self, now: float) -> None:
        for connection in self._admission.take_expired(now):
            self._close(connection, TIMED_OUT)

    def _close(self, connection: AcceptedConnection, failure: Failure) -> None:
        """Close a connection that has waited."""
        self._loop.remove_reader(connection.socket.fileno())
        connection.socket.close()
        connection.listener.on_failed(connection.peer, failure)

    # Handshakes

    def _begin_soon(self) -> None:
        if not self._begin_due:
            self._begin_due = True
            self._loop.call_soon(self._begin_handshakes)

    def _begin_handshakes(self) -> None:
        """Begin the handshakes that may run now; after some of them, the event loop serves others first."""
        self._begin_due = False
        now = self._loop.time()
        self._close_expired(now)
        for _ in range(BEGINS_PER_TURN):
            connection = self._admission.begin_next(now)
            if connection is not None:
                task = self._loop.create_task(self._run_handshake(connection))
                self._running[connection] = task
                task.add_done_callback(partial(self._on_ended, connection))
            elif not self._make_way(now):
                break
        else:
            self._begin_soon()
        if (expires_at := self._admission.next_expiry) is not None:
            self._call_at(expires_at)

    def _make_way(self, now: float) -> bool:
        """End a handshake that has to give way to a waiting connection. Returns whether others may begin or give way
        now; otherwise the timer is set for the next one."""
        slowest = self._admission.next_to_give_way()
        if slowest is None:
            return False
        connection, gives_way_at = slowest
        if gives_way_at > now:
            self._call_at(gives_way_at)
            return False
        if connection.has_ended:  # `_on_ended` is about to free its place
            return False
        if connection.take_renewal():
            self._admission.renew_place(connection, now)
            return True
        self._admission.end(connection)
        self._running.pop(connection).cancel()
        connection.listener.on_failed(connection.peer, TOO_SLOW)
        return True

    async def _run_handshake(self, connection: AcceptedConnection) -> None:
        with suppress(OSError):  # of another family than TCP
            connection.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await self._loop.connect_accepted_socket(
            connection.listener.new_protocol,
            connection.socket,
            ssl=connection.listener.context(),
            ssl_handshake_timeout=max(connection.deadline - self._loop.time(), 0.001),
            ssl_shutdown_timeout=SHUTDOWN_S,
        )

    def _on_ended(self, connection: AcceptedConnection, task: asyncio.Task[None]) -> None:
        """Account for a handshake that is complete, has failed, or was cancelled, perhaps before its first step."""
        if self._running.pop(connection, None) is not None:
            self._admission.end(connection)
            self._begin_soon()
        if not task.cancelled() and (error := task.exception()) is None:
            connection.listener.on_completed()
            return
        connection.socket.close()  # no effect if a transport has it, which is about to close it
        if not task.cancelled():
            assert error is not None
            connection.listener.on_failed(connection.peer, self._failure_of(connection, error))

    def _failure_of(self, connection: AcceptedConnection, error: BaseException) -> Failure:
        """Return why a handshake failed. Event loops report an expired handshake in different ways."""
        failure = failure_of(error)
        if failure is DISCONNECTED and self._loop.time() >= connection.deadline:
            return TIMED_OUT
        return failure

    # Timer

    def _call_at(self, time: float) -> None:
        """Look at the connections again at `time` at the latest."""
        if self._timer is not None:
            if self._timer_at <= time:
                return
            self._timer.cancel()
        self._timer = self._loop.call_at(time, self._on_time)
        self._timer_at = time

    def _on_time(self) -> None:
        self._timer = None
        self._begin_soon()
