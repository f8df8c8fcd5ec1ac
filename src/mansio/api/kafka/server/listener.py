"""Kafka listeners: accept connections, route requests to handlers and enforce limits.

Produce, Fetch, ShareFetch and ShareAcknowledge have handlers that receive the raw frame. Every other request is decoded
by `wire.codec.messages` and runs as a coroutine (`RequestRouter`). Owns the listening sockets, the connections and the
memory that they share.

Invariants:
* What a peer sends can close its own connection, never another one.
* A request is answered, or its connection is closed.
* Requests that are being received or wait hold at most `queued_max_request_bytes`, one frame, and `SMALL_FRAME_BYTES`
  per connection; unsent responses hold at most as much again, and one response per connection.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING

from mansio.api.kafka.connections.connection import Connection
from mansio.api.kafka.connections.limits import ServerCounters
from mansio.api.kafka.connections.request_context import RequestContext
from mansio.api.kafka.connections.request_memory_pool import SMALL_FRAME_BYTES, RequestMemoryPool
from mansio.api.kafka.connections.socket_writer import SCRATCH_BUFFER_BYTES
from mansio.api.kafka.handlers import fetch, produce
from mansio.api.kafka.handlers.share import share_fetch
from mansio.api.kafka.large_requests import LARGE_REQUEST_BYTES
from mansio.api.kafka.server.broker_handshake import HANDSHAKE_KEYS, handshake
from mansio.api.kafka.server.forwarded_requests import forward
from mansio.api.kafka.server.listener_security import OPEN
from mansio.api.kafka.server.request_router import RequestRouter
from mansio.api.kafka.server.sasl_gate import Authentication
from mansio.api.required_rights import KAFKA, check_rows
from mansio.broker.services.cluster import ServedListener
from mansio.broker.services.log_ins import CUT_OFF
from mansio.broker.services.produce import TIMEOUT_CHECK_INTERVAL_MS
from mansio.config.addresses import WILDCARD_IPV4
from mansio.errors import FrameStalled, UnsupportedVersion
from mansio.host.listening_sockets import listening_sockets
from mansio.logs import fields
from mansio.metadata.model import BrokerEndpoint
from mansio.net.tls.acceptor import TlsAcceptor
from mansio.net.tls.handshakes import HandshakeRunner
from mansio.state.authentication.certificate_names import InvalidSubject
from mansio.state.authentication.der import InvalidDer
from mansio.wire.api_versions import SUPPORTED_APIS, ApiKey
from mansio.wire.apis.produce import match_template
from mansio.wire.codec import messages
from mansio.wire.framing import new_scratch_buffer
from mansio.wire.headers import read_request_header

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Mapping, Sequence

    from mansio.api.kafka.connections.limits import ServerLimits
    from mansio.api.kafka.connections.socket_writer import ResponsePart
    from mansio.api.kafka.server.listener_security import ListenerSecurity
    from mansio.broker.services.broker_services import BrokerServices
    from mansio.config.addresses import Address
    from mansio.config.listeners import Listener, Listeners
    from mansio.net.connection_throttle import ConnectionThrottle
    from mansio.ports import Clock, Timer
    from mansio.state.authentication.revocation import RevocationLists
    from mansio.storage.log import LogSlice
    from mansio.wire.headers import RequestHeader

    BeginRequest = Callable[[Connection, memoryview], Sequence[ResponsePart] | None]
    Intercept = Callable[[BeginRequest], BeginRequest]

logger = logging.getLogger(__name__)

PRODUCE = int(ApiKey.PRODUCE)

ENDS_WITH_CONNECTION = frozenset({ApiKey.CREATE_TOPICS, ApiKey.DELETE_TOPICS, ApiKey.CREATE_PARTITIONS})
"""APIs whose requests end, after the item in progress, when their connection is lost."""

BUFFER_IDLE_S = 2.0
"""The receive buffer of a connection is shrunk after this time without received bytes."""

SWEEP_INTERVAL_MS = TIMEOUT_CHECK_INTERVAL_MS
"""Interval of the check for idle connections and for produce requests whose timeout has expired."""

STALL_INTERVAL_MS = 100
"""Interval of the check for stalled connections while connections wait for memory."""

ACCEPT_BACKLOG = 1024
"""Accept queue of the kernel; connections beyond it wait for their SYN to be answered."""

DRAIN_POLL_S = 0.005
"""Interval at which `KafkaServer.stop` checks whether all requests are answered."""


class KafkaServer:
    """Kafka listeners of one broker: accept connections and own the memory that they share."""

    def __init__(
        self,
        service: BrokerServices,
        limits: ServerLimits,
        loop: asyncio.AbstractEventLoop,
        intercept: Intercept | None = None,
        security: Mapping[str, ListenerSecurity] | None = None,
        handshakes: HandshakeRunner | None = None,
        throttle: ConnectionThrottle | None = None,
    ) -> None:
        """`intercept` returns a replacement of the function that starts a request, for a test broker. `security`: of
        the listeners that have TLS or authenticate their clients, by name. `handshakes`: runs the TLS handshakes of all
        listeners of the broker. `throttle`: closes connections of addresses that connect too often."""
        self.begin: BeginRequest = self._begin if intercept is None else intercept(self._begin)
        """Starts a request. Returns the response, or None if it is sent later."""
        self.service = service
        self._rules = service.authorization.rules
        self.limits = limits
        self.loop = loop
        self.clock: Clock = service.clock
        self.holds = service.statistics.holds
        self.scratch = memoryview(bytearray(SCRATCH_BUFFER_BYTES))
        self.receive_scratch = new_scratch_buffer()
        self.now = self.clock.monotonic()
        """Monotonic seconds as of the last sweep; precise enough for idle timeouts."""
        self.counters = ServerCounters()
        self.authentication = Authentication(self)
        service.users.on_change(self.authentication.handle_user_change)
        self._security = security or {}
        self.listeners: dict[str, ServedListener] = {}
        """The listeners by name."""
        self.addresses: dict[str, Address] = {}
        """Addresses on which the listeners accept connections, by name, with the ports that free ones became."""
        self._inter_broker_name = ""
        self._listening: list[asyncio.Server] = []
        self.acceptors: list[TlsAcceptor] = []
        """Acceptors of the connections with TLS."""
        self._throttle = throttle
        self._handshakes = handshakes or HandshakeRunner(loop)
        check_rows("Kafka", KAFKA, SUPPORTED_APIS)
        self._router = RequestRouter(service)
        self._connections: dict[
            Connection, None
        ] = {}  # in order of arrival; the order of a set differs by process
        self._hosts: dict[str, int] = {}  # client address -> open connections
        self._unsent: dict[Connection, int] = {}
        self.unsent_bytes = 0
        """Responses in memory that peers have not accepted yet."""
        self._flush_due: list[Connection] = []
        self.memory = RequestMemoryPool[Connection](limits.queued_max_request_bytes)
        self._checked_revocations: dict[str, RevocationLists | None] = {}
        """Listener -> the revocation lists with which its connections were compared."""
        self._sweep: Timer | None = None
        self._stall_timer: Timer | None = None
        self._stall_time_s = 0.0
        service.produce.time_out_requests(self.now)
        self._draining = False
        self.direct_requests = 0
        """Number of requests in progress that have no connection."""

    # Start and stop

    async def listen(self, listeners: Listeners) -> None:
        """Start to accept connections on all listeners; port 0 selects a free port. Raises `ListenError`, and accepts
        none then."""
        opened: list[tuple[Listener, list[socket.socket]]] = []
        try:
            for listener in listeners.all:
                sockets = await listening_sockets(*listener.address, ACCEPT_BACKLOG)
                opened.append((listener, sockets))
        except OSError:
            for _, sockets in opened:
                for each in sockets:
                    each.close()
            raise
        self.addresses = {
            listener.name: listener.address._replace(port=sockets[0].getsockname()[1])
            for listener, sockets in opened
        }
        self.use_listeners(
            [self._served(each) for each in listeners.all], inter_broker_name=listeners.inter_broker.name
        )
        for listener, sockets in opened:
            security = self._security.get(listener.name, OPEN)
            accept = partial(self._new_connection, self.listeners[listener.name], security)
            if security.context is not None:
                acceptor = TlsAcceptor(self.loop, accept, security.context, handshakes=self._handshakes)
                acceptor.listen(sockets)
                self.acceptors.append(acceptor)
                continue
            for each in sockets:
                self._listening.append(
                    await self.loop.create_server(accept, sock=each, backlog=ACCEPT_BACKLOG)
                )
        self._sweep = self.loop.call_later(SWEEP_INTERVAL_MS / 1000, self._sweep_idle)

    def use_listeners(self, listeners: Sequence[ServedListener], *, inter_broker_name: str) -> None:
        """Set the listeners, one of which is that for other brokers. Called once, before the first connection."""
        self.listeners = {each.name: each for each in listeners}
        self._inter_broker_name = inter_broker_name

    def _served(self, listener: Listener) -> ServedListener:
        settings = self.service.settings
        endpoint = None
        if listener.is_advertised:
            host, port = listener.advertised or self.addresses[listener.name]
            endpoint = BrokerEndpoint(
                settings.node_id,
                host or WILDCARD_IPV4,
                port,
                settings.broker_rack or None,
                listener.security_protocol,
            )
        return ServedListener(listener.name, listener.security_protocol, endpoint)

    @property
    def inter_broker_listener(self) -> ServedListener:
        """The listener through which other brokers reach this one; requests without a connection belong to it."""
        return self.listeners[self._inter_broker_name]

    @property
    def endpoints(self) -> dict[str, BrokerEndpoint]:
        """What this broker advertises, by name of the listener."""
        return {name: each.endpoint for name, each in self.listeners.items() if each.endpoint is not None}

    def _new_connection(self, listener: ServedListener, security: ListenerSecurity) -> Connection:
        gate = None if security.sasl is None else self.authentication.new_gate(security.sasl)
        return Connection(self, listener, gate)

    async def stop(self, drain_ms: int) -> None:
        """Stop accepting connections, wait at most `drain_ms` for requests in progress, and close all connections."""
        self._draining = True
        for timer in (self._sweep, self._stall_timer):
            if timer is not None:
                timer.cancel()
        for listening in self._listening:
            listening.close()
        for acceptor in self.acceptors:
            await acceptor.stop()
        for connection in tuple(self._connections):
            connection.end_pause()
            connection.pause_reading()
        self.service.fetch.stop()
        share_fetch.answer_parked_requests(self.service)
        deadline = self.clock.monotonic() + drain_ms / 1000
        await _poll_until(
            lambda: not self.direct_requests and not any(each.is_busy for each in self._connections),
            self.clock,
            deadline,
        )
        for connection in tuple(self._connections):
            connection.close()
        await _poll_until(lambda: not self._connections, self.clock, deadline)
        self.abort_connections()

    def abort_connections(self) -> None:
        """Close all connections at once, without the responses to their requests."""
        for connection in tuple(self._connections):
            connection.abort()

    def use_limits(self, limits: ServerLimits) -> None:
        """Use new limits. Open connections stay open, even if there are more than the new limit."""
        self.limits = limits

    @property
    def is_stopping(self) -> bool:
        """Whether no request may start any more."""
        return self._draining

    @property
    def throttled_connection_count(self) -> int:
        """Number of connections of all listeners of the broker that were over the quota of their address."""
        return 0 if self._throttle is None else self._throttle.throttled

    @property
    def waiting_handshake_count(self) -> int:
        """Number of connections of all listeners of the broker that wait for their TLS handshake."""
        return self._handshakes.waiting_count

    @property
    def connection_count(self) -> int:
        return len(self._connections)

    # Connections

    def closes_new(self, connection: Connection, transport: asyncio.BaseTransport) -> bool:
        """Whether a new connection is closed because its address connects too often. One with TLS has passed the
        throttle before its handshake."""
        if self._throttle is None or self._security.get(connection.listener.name, OPEN).context is not None:
            return False
        return self._throttle.closes(transport)

    def on_connected(self, connection: Connection) -> None:
        limits = self.limits
        host = connection.client_host
        from_host = self._hosts.get(host, 0)
        if self._draining:
            self.reject(connection, "stopping", "the broker is stopping")
        elif from_host >= limits.max_connections_per_ip > 0:
            self.reject(connection, "max_connections_per_ip", f"{from_host} from there are open")
        elif len(self._connections) >= limits.max_connections and not self._make_room():
            self.reject(connection, "max_connections", f"{len(self._connections)} are open")
        elif self._has_valid_certificate(connection):
            self._connections[connection] = None
            self._hosts[host] = from_host + 1
            if connection.gate is not None:
                connection.gate.on_connected(connection)
            self.counters.connections_accepted += 1

    def _make_room(self) -> bool:
        """Close a connection whose client has not authenticated, for a new one. Return False if there is none: clients
        that never authenticate must not keep out the others until their time ends."""
        closed = self.authentication.take_one_that_gives_way()
        if closed is None:
            return False
        self.reject(
            closed, "max_connections", f"{len(self._connections)} are open, and it has not authenticated"
        )
        return True

    def _has_valid_certificate(self, connection: Connection) -> bool:
        """Make the user of the client's certificate that of the connection, where it is the client's identity. Reject
        the connection and return False if the rules make no user of it."""
        security = self._security.get(connection.listener.name, OPEN)
        if _is_revoked(connection, security.revocations()):  # meanwhile, since its handshake began
            self.reject(connection, "certificate", "the certificate was revoked")
            return False
        if security.mapping is None:
            return True
        try:
            session = security.session_of_certificate(
                connection.client_certificate, connection.certificate_expires_ms, connection.listener.name
            )
        except InvalidSubject as error:
            self.reject(connection, "certificate", str(error))
            return False
        if session is not None:
            connection.admit(session, is_endless=True)
        return True

    def _certificate_sha256(self, connection: Connection) -> bytes:
        """Return the digest of the certificate with which a connection began, which may have been renewed since; empty
        without TLS."""
        digest_of = self._security.get(connection.listener.name, OPEN).certificate_sha256
        if digest_of is None:
            return b""
        context = connection.tls_context
        return b"" if context is None else digest_of(context)

    def reject(self, connection: Connection, reason: str, detail: str) -> None:
        """Reject a connection that is new or has not authenticated; `reason` is one of `REJECTION_REASONS`."""
        self.counters.rejected_by_reason[reason] += 1
        peer = connection.client_host
        logger.warning("connection_rejected", extra=fields(peer=peer, reason=reason, detail=detail))
        connection.abort()

    def on_disconnected(self, connection: Connection) -> None:
        if connection not in self._connections:
            return
        del self._connections[connection]
        host = connection.client_host
        if self._hosts[host] > 1:
            self._hosts[host] -= 1
        else:
            del self._hosts[host]
        self.set_unsent_bytes(connection, 0)
        self._release(connection)
        self.service.share_partition_manager.release_leases_of_connection(connection)

    def _sweep_idle(self) -> None:
        now = self.now = self.clock.monotonic()
        oldest = now - self.limits.idle_ms_max / 1000
        for connection in self._connections:
            if connection.last_active < now - BUFFER_IDLE_S:
                connection.shrink_receive_buffer()
        self._close_disconnected()
        for connection in [c for c in self._connections if c.is_idle(now, oldest)]:
            logger.info("idle_connection_closed", extra=fields(peer=connection.client_host))
            self.counters.count_closed("idle")
            connection.close()
        self.authentication.close_late(now)
        self.service.log_ins.end_stale()
        if self._security:
            self._close_ended_sessions()
        self._close_revoked()
        self.service.produce.time_out_requests(now)
        self._sweep = self.loop.call_later(SWEEP_INTERVAL_MS / 1000, self._sweep_idle)

    def _close_ended_sessions(self) -> None:
        """Close the connections of clients whose certificate has expired; and, once this broker has been cut off from
        the cluster for too long to know whether users still exist, those of all users."""
        is_stale = self.service.log_ins.is_stale()
        now_ms = self.clock.wall_ms()
        for connection in tuple(self._connections):
            security = self._security.get(connection.listener.name, OPEN)
            session = connection.session
            if connection.peer is not None or (security.sasl is None and security.mapping is None):
                continue
            if is_stale:
                self.authentication.fail(connection, "stale", CUT_OFF, session.user)
            elif connection.gate is None and session.expires_ms is not None and session.expires_ms < now_ms:
                self.authentication.fail(connection, "expired", "the certificate has expired", session.user)
            else:
                continue
            connection.abort()

    def _close_revoked(self) -> None:
        """Close the connections of clients and brokers whose certificate was revoked, once for each version of the
        revocation lists."""
        for name, security in self._security.items():
            revocations = security.revocations()
            if revocations is self._checked_revocations.get(name):
                continue
            self._checked_revocations[name] = revocations
            for connection in tuple(self._connections):
                if connection.listener.name == name and _is_revoked(connection, revocations):
                    reason = "the certificate was revoked"
                    self.authentication.fail(connection, "revoked", reason, connection.session.user)
                    connection.abort()

    def _close_stalled(self) -> None:
        """Close stalled connections. Repeats while connections wait for memory."""
        self._stall_timer = None
        self._stall_time_s += (
            STALL_INTERVAL_MS / 1000
        )  # not the clock: while the broker itself was blocked, no peer was slow
        for connection in self.memory.find_stalled(self._stall_time_s):
            connection.reject(
                FrameStalled("a large frame arrives too slowly while other connections wait for memory")
            )
        if self.memory.has_waiters:
            self._watch_for_stalled()

    def _watch_for_stalled(self) -> None:
        if self._stall_timer is None and not self._draining:
            self._stall_timer = self.loop.call_later(STALL_INTERVAL_MS / 1000, self._close_stalled)

    def _close_disconnected(self) -> None:
        """Close connections whose peer has reset them while reading is paused; without a read, asyncio does not report
        it.

        A connection whose peer has only shut down its sending side stays open, because it may wait for responses.
        """
        for connection in [c for c in self._connections if c.is_unread and c.is_reset]:
            connection.abort()

    # Memory

    def on_partial_frame(self, connection: Connection, frame_bytes: int, buffered: int) -> None:
        """Account for the memory of a connection: its backlog, and `buffered` bytes of an incomplete frame of
        `frame_bytes`; both are 0 between frames."""
        # The buffer of a frame doubles until it is large enough.
        wanted = connection.backlog_bytes + min(frame_bytes, 2 * buffered)
        memory = self.memory
        if wanted > SMALL_FRAME_BYTES:
            served = memory.shrink(connection, wanted) or memory.acquire(connection, wanted)
            if memory.is_waiting(connection):
                connection.pause_reading()
                self._watch_for_stalled()
            for other in served:
                other.resume_reading()
        elif memory.is_holder(connection):
            self._release(connection)

    def is_reading_paused(self, connection: Connection) -> bool:
        """Return whether the connection must not be read: the broker is stopping, or the connection waits for
        memory."""
        return self._draining or self.memory.is_waiting(connection)

    def report_unreadable(self, part: LogSlice, error: OSError) -> None:
        """Report damage to the partition, because the disk cannot read batches that were to be sent."""
        self.service.partitions.report_unreadable(part, error)

    def set_unsent_bytes(self, connection: Connection, held_bytes: int) -> None:
        """Set the bytes of responses in memory that the peer of `connection` has not accepted."""
        self.unsent_bytes += held_bytes - self._unsent.pop(connection, 0)
        if held_bytes and not connection.closed:
            self._unsent[connection] = held_bytes
        elif held_bytes:
            self.unsent_bytes -= held_bytes

    @property
    def has_unsent_pressure(self) -> bool:
        """Whether the unsent responses of all connections exceed their memory limit."""
        return self.unsent_bytes > self.limits.queued_max_request_bytes

    def _release(self, connection: Connection) -> None:
        for served in self.memory.release(connection):
            served.resume_reading()

    # Requests

    def _begin(self, connection: Connection, frame: memoryview) -> Sequence[ResponsePart] | None:
        template = connection.template
        if (
            template is not None
            and connection.template_revision == self._rules.revision
            and self.service.quotas.active is None  # the prepared response has no throttle time
            and (found := match_template(template, frame)) is not None
        ):
            self.counters.requests[PRODUCE] += 1
            return produce.produce_by_template(self.service, connection, template, frame, *found)
        return self._dispatch(connection, read_request_header(frame), frame)

    def _dispatch(
        self, connection: Connection, header: RequestHeader, frame: memoryview
    ) -> Sequence[ResponsePart] | None:
        key = header.api_key
        api = SUPPORTED_APIS.get(key)  # type: ignore[call-overload]  # an IntEnum's keys are ints
        if api is None or not api.min_version <= header.api_version <= api.max_version:
            return self._unsupported_version(connection, header)
        self.counters.requests[key] += 1
        if key == ApiKey.PRODUCE:
            return produce.produce(self.service, connection, header, frame)
        if key == ApiKey.FETCH:
            return fetch.fetch(self.service, connection, header, frame)
        if key == ApiKey.SHARE_FETCH:
            return share_fetch.share_fetch(self.service, connection, header, frame)
        if key == ApiKey.SHARE_ACKNOWLEDGE:
            return share_fetch.share_acknowledge(self.service, connection, header, frame)
        if key in HANDSHAKE_KEYS:
            certificate_sha256 = self._certificate_sha256(connection)
            return handshake(self.service, connection, header, frame, certificate_sha256)
        if key == ApiKey.FORWARD_REQUEST:
            return forward(self, connection, header, frame)
        body = bytes(frame[header.body_position :])
        is_large = len(body) > LARGE_REQUEST_BYTES
        request = (
            body
            if is_large or api.is_decoded_by_handler
            else messages.decode_request(key, header.api_version, body)
        )
        pending_response = connection.defer_response()
        context = RequestContext(
            key,
            header.api_version,
            header.correlation_id,
            header.client_id,
            connection.client_host,
            connection.listener,
            connection.peer,
            self.service.authenticator.session_of(connection.session, connection.peer),
            connection.is_confidential,
            pending_response.throttle,
            connection.session,
        )
        name = api.key.name.lower()
        if is_large:
            release = connection.hold_request(len(body))
            run = partial(self._router.run_large, body, context, pending_response, release)
        else:
            run = partial(self._router.run, request, context, pending_response)
        peer = connection.client_host
        task = self.service.scheduler.spawn(
            self.holds.measured(run, "kafka", lambda: (name, peer)), name=f"{name} request"
        )
        if key in ENDS_WITH_CONNECTION:
            pending_response.on_lost(task.cancel)
        return None

    def _unsupported_version(
        self, connection: Connection, header: RequestHeader
    ) -> Sequence[ResponsePart] | None:
        """Answer ApiVersions in an unknown version in version 0 (KIP-511); for any other API, close the connection."""
        if header.api_key == ApiKey.API_VERSIONS:
            pending_response = connection.defer_response()
            self._router.unsupported_api_versions(header, pending_response)
            return None
        self.counters.errors += 1
        raise UnsupportedVersion(f"API {header.api_key} version {header.api_version} is not offered")

    # Flush once per loop iteration

    def flush_soon(self, connection: Connection) -> None:
        """Flush the connection at the end of this iteration of the event loop, so that all its responses are sent
        together."""
        if not self._flush_due:
            self.loop.call_soon(self._flush_all)
        self._flush_due.append(connection)

    def _flush_all(self) -> None:
        due, self._flush_due = self._flush_due, []
        for connection in due:
            connection.flush()


def _is_revoked(connection: Connection, revocations: RevocationLists | None) -> bool:
    """Whether the client of a connection has presented a certificate that is revoked."""
    if revocations is None or (certificate := connection.client_certificate) is None:
        return False
    try:
        return revocations.is_revoked(certificate)
    except InvalidDer:  # OpenSSL has verified it
        return True


async def _poll_until(condition: Callable[[], bool], clock: Clock, deadline: float) -> None:
    """Poll until `condition` is true or `deadline` (monotonic seconds) has passed."""
    while not condition() and clock.monotonic() < deadline:  # noqa: ASYNC110 - only while the broker stops
        await asyncio.sleep(DRAIN_POLL_S)
