"""Connection of a client: reads requests and sends responses in the order of the requests.

Kafka processes the requests of one connection one at a time. So does this class, with one exception that no client can
observe: consecutive produce requests all start at once, and only their responses wait (for the flush). Any other
request that cannot be answered immediately, and a produce request while too many batches wait to be processed, holds
back the frames behind it; they are copied out of the receive buffer into the backlog.

A connection of another broker may be unordered: its requests start in their order, and each response is sent when it is
complete.

Owns the frame reader, the backlog, the response queue and the socket writer. The number of requests in progress, the
backlog, unsent responses and the share of the request memory pool are bounded; reading pauses at a bound.

Invariants:
* Responses are sent in request order, unless the connection is unordered.
* A frame's memory is not used after the loop iteration in which it was received.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections import deque
from typing import TYPE_CHECKING, Final, Protocol, cast

from mansio.api.kafka.connections.pending_response import PendingResponse
from mansio.api.kafka.connections.socket_writer import HAS_SENDFILE, SocketWriter, UnreadableSlice
from mansio.api.kafka.connections.tls_writer import TlsWriter
from mansio.broker.routing.caller import ANONYMOUS_SESSION, Caller
from mansio.broker.services.statistics import HOLD_S_MIN
from mansio.errors import MansioError, StorageError, WireError
from mansio.logs import fields
from mansio.wire.api_versions import SUPPORTED_APIS
from mansio.wire.framing import IDLE_BUFFER_BYTES_MAX, FrameReader

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mansio.api.kafka.connections.limits import ServerCounters, ServerLimits
    from mansio.api.kafka.connections.pending_response import QueuedResponse
    from mansio.api.kafka.connections.request_memory_pool import RequestMemoryPool
    from mansio.api.kafka.connections.response_writer import ResponseWriter
    from mansio.api.kafka.connections.socket_writer import ResponsePart
    from mansio.broker.routing.caller import ClientSession
    from mansio.broker.services.authorization import Grants
    from mansio.broker.services.broker_authenticator import BrokerChallenge
    from mansio.broker.services.cluster import ServedListener
    from mansio.broker.services.statistics import LoopHolds
    from mansio.state.broker_handshake import BrokerIdentity
    from mansio.storage.log import LogSlice
    from mansio.wire.apis.produce import ProduceTemplate

logger = logging.getLogger(__name__)

PRODUCE_KEY = b"\x00\x00"  # the first two bytes of a produce request

UNORDERED_REQUESTS_MAX = 1_000
"""Maximum number of requests in progress of an unordered connection; with more it is not read."""

UNADMITTED_BYTES_MAX = 64 * 1024
"""Maximum bytes of requests that wait on a connection whose client has not authenticated; with more it is not read."""

MUTE_MS_MAX = 30_000
"""Maximum time for which a connection starts no requests because its client exceeds a quota."""

ANSWER_MS_MAX = 250
"""Maximum time for which a connection whose client has lost its session stays open to answer requests in progress."""

UNSENT_PARTS_MAX = 1024
"""Maximum number of unsent parts of responses; many small parts use more memory than their bytes."""

CONGESTED_BYTES_MAX = 64 * 1024
"""Maximum unsent bytes of one connection while the unsent bytes of all connections exceed their limit."""

ANSWERS_PER_SEND = 64
"""Maximum number of responses per send, so that responses to many requests in one read do not accumulate."""


def is_loopback(host: str) -> bool:
    """Return whether `host` is a loopback address, or empty because the address of the peer is unknown."""
    return host.startswith("127.") or host in ("", "::1")


class RequestGate(Protocol):
    """What a connection asks instead of the server until its client has authenticated, and afterwards if the session
    has an end."""

    @property
    def frame_bytes_max(self) -> int:
        """Maximum size of a frame until then."""

    def on_connected(self, connection: Connection) -> None:
        """Begin to authenticate the client of the connection, whose address is known now."""

    def begin(self, connection: Connection, frame: memoryview) -> Sequence[ResponsePart] | None: ...

    def on_lost(self, connection: Connection) -> None:
        """Forget the connection."""


class ConnectionOwner(Protocol):
    """The attributes and methods of a server that its connections use."""

    limits: ServerLimits
    counters: ServerCounters
    memory: RequestMemoryPool[Connection]
    loop: asyncio.AbstractEventLoop
    scratch: memoryview
    receive_scratch: memoryview
    now: float
    holds: LoopHolds

    @property
    def has_unsent_pressure(self) -> bool: ...

    def begin(self, connection: Connection, frame: memoryview) -> Sequence[ResponsePart] | None: ...

    def closes_new(self, connection: Connection, transport: asyncio.BaseTransport) -> bool: ...

    def on_connected(self, connection: Connection) -> None: ...

    def on_disconnected(self, connection: Connection) -> None: ...

    def reject(self, connection: Connection, reason: str, detail: str) -> None: ...

    def flush_soon(self, connection: Connection) -> None: ...

    def on_partial_frame(self, connection: Connection, frame_bytes: int, buffered: int) -> None: ...

    def is_reading_paused(self, connection: Connection) -> bool: ...

    def set_unsent_bytes(self, connection: Connection, held_bytes: int) -> None: ...

    def report_unreadable(self, part: LogSlice, error: OSError) -> None: ...


class Connection(asyncio.BufferedProtocol):
    """One accepted connection; the asyncio protocol of its transport."""

    __slots__ = (
        "_backlog",
        "_begin_request",
        "_blocked_by",
        "_drain_due",
        "_flush_due",
        "_frames",
        "_is_admitted",
        "_muted",
        "_muted_until",
        "_out",
        "_paused",
        "_pending_responses",
        "_server",
        "_socket_writer",
        "_transport",
        "_unsent_before",
        "_unsent_since",
        "backlog_bytes",
        "challenge",
        "client_host",
        "client_id",
        "closed",
        "gate",
        "get_buffer",
        "grants",
        "is_confidential",
        "is_unordered",
        "last_active",
        "listener",
        "peer",
        "received_bytes",
        "session",
        "template",
        "template_misses",
        "template_revision",
    )

    is_forwarded: Final = False
    """Whether another broker has forwarded the request; see `DirectRequest`."""

    def __init__(
        self, server: ConnectionOwner, listener: ServedListener, gate: RequestGate | None = None
    ) -> None:
        """Create the protocol of a connection that `listener` has accepted. `gate`: lets requests pass once the client
        has authenticated; None if it need not."""
        self._server = server
        self.listener = listener
        frame_bytes_max = server.limits.socket_request_max_bytes
        if gate is not None:
            frame_bytes_max = min(frame_bytes_max, gate.frame_bytes_max)
        self._frames = FrameReader(frame_bytes_max, server.receive_scratch)
        self._begin_request = server.begin if gate is None else gate.begin
        self.get_buffer = self._frames.get_buffer  # type: ignore[assignment,method-assign]  # the transport's own call, no detour
        self._backlog: deque[bytes] = deque()
        self.backlog_bytes = 0
        self._pending_responses: deque[QueuedResponse] = deque()
        self._blocked_by: QueuedResponse | None = None
        self._out: list[ResponsePart] = []
        self._flush_due = False
        self._drain_due = False
        self._paused = False
        self._muted: asyncio.Handle | None = None
        self._muted_until = 0.0
        self._transport: asyncio.Transport | None = None
        self._socket_writer: ResponseWriter | None = None
        self._unsent_before = 0
        self._unsent_since = 0.0
        self.client_host = ""
        self.client_id = ""
        """The client id in the first Produce request, and in later ones that a template does not match."""
        self.gate = gate
        self._is_admitted = gate is None
        """Whether the client need not authenticate, or has."""
        self.session = ANONYMOUS_SESSION
        """Who the client is."""
        self.is_confidential = False
        """Whether nobody else can read the connection: it is encrypted, or comes from this machine."""
        self.closed = False
        self.last_active = 0.0
        self.received_bytes = 0
        self.template: ProduceTemplate | None = None
        """Common parts of this connection's produce requests, derived from an earlier one."""
        self.template_misses = 0
        self.template_revision = 0
        """Revision of the ACLs that allow the requests of the template; it is void when they have changed."""
        self.grants: Grants | None = None
        """What the client of the session may read and write; None before it is asked for, or without an authorizer."""
        self.peer: BrokerIdentity | None = None
        """The broker that has authenticated on this connection; set once."""
        self.is_unordered = False
        """Whether responses may overtake; set with `peer`."""
        self.challenge: BrokerChallenge | None = None
        """The challenge that a broker has to answer on this connection."""

    @property
    def trace_name(self) -> str:
        """The client in traces of records."""
        return Caller(self.session, self.client_id, self.client_host).trace_name

    # Transport callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if self._server.closes_new(self, transport):
            self.closed = True
            return
        self._transport = cast("asyncio.Transport", transport)  # uvloop's are not subclasses
        peer = transport.get_extra_info("peername")
        self.client_host = str(peer[0]) if peer else ""
        is_encrypted = transport.get_extra_info("ssl_object") is not None
        self.is_confidential = is_encrypted or is_loopback(self.client_host)
        self.last_active = self._server.now
        try:
            self._socket_writer = self._new_writer(self._transport)
        except OSError as error:  # no descriptor left
            self._server.reject(self, "descriptors", error.strerror or str(error))
            return
        self._server.on_connected(self)

    def _new_writer(self, transport: asyncio.Transport) -> ResponseWriter:
        server = self._server
        if transport.get_extra_info("ssl_object") is not None:
            return TlsWriter(server.loop, transport, server.scratch, self._on_drained, self._on_send_error)
        return SocketWriter(
            server.loop,
            transport.get_extra_info("socket").fileno(),
            server.scratch if is_loopback(self.client_host) or not HAS_SENDFILE else None,
            self._on_drained,
            self._on_send_error,
        )

    @property
    def client_certificate(self) -> bytes | None:
        """The verified certificate of the client in DER; None without TLS, or if the client has none."""
        tls = None if self._transport is None else self._transport.get_extra_info("ssl_object")
        return None if tls is None else cast("bytes | None", tls.getpeercert(binary_form=True))

    @property
    def certificate_expires_ms(self) -> int | None:
        """Unix time at which the verified certificate of the client expires; None if it has none."""
        tls = None if self._transport is None else self._transport.get_extra_info("ssl_object")
        subject = None if tls is None else tls.getpeercert()
        return int(ssl.cert_time_to_seconds(subject["notAfter"])) * 1000 if subject else None

    @property
    def tls_context(self) -> ssl.SSLContext | None:
        """The context with which TLS began; None without TLS."""
        tls = None if self._transport is None else self._transport.get_extra_info("ssl_object")
        return None if tls is None else cast("ssl.SSLContext", tls.context)

    def pause_writing(self) -> None:
        if self._socket_writer is not None:
            self._socket_writer.pause()

    def resume_writing(self) -> None:
        if self._socket_writer is not None:
            self._socket_writer.resume()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        self.closed = True
        if self._socket_writer is not None:
            self._socket_writer.close()
        self._socket_writer = None  # a reference cycle would keep the memory until garbage collection
        if self._muted is not None:
            self._muted.cancel()
            self._muted = None
        self._transport = None
        for response in self._pending_responses:
            if isinstance(response, PendingResponse):
                response.on_connection_lost()
        self._blocked_by = None
        self._pending_responses.clear()
        self._backlog.clear()
        self.backlog_bytes = 0
        self._out.clear()
        if self.gate is not None:
            self.gate.on_lost(self)
        self._server.on_disconnected(self)

    def buffer_updated(self, nbytes: int) -> None:
        server = self._server
        frames = self._frames
        self.last_active = server.now
        self.received_bytes += nbytes
        began = server.holds.now()
        frame: memoryview | bytes = b""
        try:
            for frame in frames.buffer_updated(nbytes):
                if not self._backlog and (
                    not (self._pending_responses or self._paused) or self._may_start(frame)
                ):
                    self._begin(frame)
                else:
                    self._add_to_backlog(frame)
        except MansioError as error:
            self.reject(error)
            return
        finally:
            if (held_s := server.holds.now() - began) >= HOLD_S_MIN:
                self._note_hold(held_s, frame)
        if self._out:
            self.flush()
        if frames.buffered_bytes or self.backlog_bytes or server.memory.held_bytes:
            self._report_buffered_bytes()
        if len(self._pending_responses) >= self._requests_max:
            self.pause_reading()

    def _note_hold(self, held_s: float, frame: memoryview | bytes) -> None:
        """Note that requests of this connection, the last of which is `frame`, kept others waiting."""
        key = int.from_bytes(frame[:2], "big")
        api = SUPPORTED_APIS.get(key)  # type: ignore[call-overload]  # an IntEnum's keys are ints
        name = f"API {key}" if api is None else api.key.name.lower()
        self._server.holds.note(held_s, "kafka", name, self.client_host)

    def _report_buffered_bytes(self) -> None:
        """Report to the server how much memory requests hold that have not started."""
        if self.closed:  # its memory is released, or soon will be; acquired again it would leak
            return
        frames = self._frames
        if frames.private_buffer_bytes > IDLE_BUFFER_BYTES_MAX and not frames.buffered_bytes:
            frames.release_memory()  # now, because there may be no further read
        self._server.on_partial_frame(self, frames.frame_bytes, frames.buffered_bytes)

    def eof_received(self) -> bool:
        return False

    # Requests

    def _add_to_backlog(self, frame: memoryview) -> None:
        """Copy the frame to the backlog until the request before it has been answered."""
        self._backlog.append(bytes(frame))
        self.backlog_bytes += len(frame)
        if not self._may_read():
            self.pause_reading()

    def _begin(self, frame: memoryview) -> None:
        parts = self._begin_request(self, frame)
        if parts is None:
            return
        if self._pending_responses and not self.is_unordered:
            self._pending_responses.append(PendingResponse(self, parts))
            return
        self._out.extend(parts)
        if len(self._out) >= ANSWERS_PER_SEND:
            self.flush()

    def admit(self, session: ClientSession, *, is_endless: bool) -> None:
        """Serve the requests of the connection as those of `session`, and accept frames of full size. `is_endless`:
        whether the session has no end, so that the gate need not look at its requests."""
        self.session = session
        self.template = self.grants = None  # of the session before
        self._is_admitted = True
        self._frames.allow(self._server.limits.socket_request_max_bytes)
        if is_endless:
            self._begin_request = self._server.begin
        elif self.gate is not None:
            self._begin_request = self.gate.begin

    def defer_response(self) -> PendingResponse:
        """Return the pending response of the current request, which is answered later. Requests behind it wait until
        then."""
        pending_response = PendingResponse(self)
        self.queue_exclusive_response(pending_response)
        return pending_response

    def hold_request(self, size: int) -> Callable[[], None]:
        """Count the bytes of the current request as waiting. Returns the function that is to be called when they are
        no longer held."""
        self.backlog_bytes += size

        def release() -> None:
            if self.closed:
                return
            self.backlog_bytes -= size
            if self._server.memory.held_bytes:
                self._report_buffered_bytes()
            self.resume_reading()

        return release

    def queue_response(self, response: QueuedResponse) -> None:
        """Queue the pending response of the current request, which is answered later. Requests behind it start
        meanwhile."""
        self._pending_responses.append(response)

    def queue_exclusive_response(self, response: QueuedResponse) -> None:
        """Like `queue_response`, but requests behind it wait until it is answered, unless the connection is
        unordered."""
        self._pending_responses.append(response)
        if not self.is_unordered:
            self._blocked_by = response

    def on_response_complete(self, pending_response: QueuedResponse) -> None:
        """Report that a queued response is complete: send all responses that are next in order, or this one if the
        connection is unordered; start requests that waited for it."""
        if self.closed:
            return
        pending = self._pending_responses
        out = self._out
        if self.is_unordered and pending_response in pending:
            pending.remove(pending_response)
            out.extend(pending_response.response or ())
        while pending and (parts := pending[0].response) is not None:
            out.extend(parts)
            pending.popleft()
        if out and not self._flush_due:
            self._flush_due = True
            self._server.flush_soon(self)
        if pending_response is self._blocked_by:
            self._blocked_by = None
        self._drain_soon()
        if self._paused:
            self.resume_reading()

    def _drain_soon(self) -> None:
        """Process the backlog if its first request may start; otherwise the response that blocks it calls again."""
        if self._backlog and not self._drain_due and self._may_start(self._backlog[0]):
            self._drain_due = True
            self._server.loop.call_soon(self._drain_backlog)

    def _drain_backlog(self) -> None:
        self._drain_due = False
        began = self._server.holds.now()
        frame = b""
        try:
            while self._backlog and self._may_start(self._backlog[0]):
                frame = self._backlog.popleft()
                self.backlog_bytes -= len(frame)
                self._begin(memoryview(frame))
        except MansioError as error:
            self.reject(error)
            return
        finally:
            if (held_s := self._server.holds.now() - began) >= HOLD_S_MIN:
                self._note_hold(held_s, frame)
        self.flush()
        if self._server.memory.held_bytes:
            self._report_buffered_bytes()
        self.resume_reading()

    def _may_start(self, frame: memoryview | bytes) -> bool:
        """Return whether the request may start now: the peer accepts its responses, and no request is in progress, or
        the request and all requests in progress are produce requests."""
        if self.closed or (self._paused and (self._muted is not None or not self._may_answer())):
            return False
        pending = self._pending_responses
        return not pending or (
            self._blocked_by is None
            and (self.is_unordered or frame[:2] == PRODUCE_KEY)
            and len(pending) < self._requests_max
        )

    @property
    def _requests_max(self) -> int:
        return UNORDERED_REQUESTS_MAX if self.is_unordered else self._server.limits.requests_max

    # Responses

    def flush(self) -> None:
        """Send the responses that are complete."""
        self._flush_due = False
        out = self._out
        socket_writer = self._socket_writer
        if not out or self.closed or socket_writer is None:
            return
        self._out = []
        if len(out) > 1 and all(type(part) is bytes for part in out):
            out = [b"".join(out)]  # type: ignore[arg-type]  # all are bytes
        try:
            socket_writer.send(out)
        except (
            OSError,
            StorageError,
        ) as error:  # of the disk: a small range of a file is read when it is sent
            self._on_send_error(error)
            return
        if socket_writer.waiting_bytes:
            self._server.set_unsent_bytes(self, socket_writer.held_bytes)
            if not self._may_answer():
                self.pause_reading()

    def _on_drained(self) -> None:
        """Resume reading and the backlog, because all responses have been sent."""
        self._server.set_unsent_bytes(self, 0)
        self.resume_reading()

    def _on_send_error(self, error: Exception) -> None:
        logger.warning("connection_send_failed", extra=fields(peer=self.client_host, error=str(error)))
        self._server.counters.count_closed("send_failed")
        if isinstance(error, UnreadableSlice):
            self._server.report_unreadable(error.part, error)
        self.abort()

    # Flow control

    @property
    def is_unread(self) -> bool:
        """Whether reading is paused, so that asyncio does not detect a disconnect."""
        return self._paused and not self.closed

    @property
    def is_reset(self) -> bool:
        """Whether the peer has reset the connection, or the network has reported an error, since the last call."""
        return self._socket_writer is not None and self._socket_writer.take_socket_error() != 0

    @property
    def is_busy(self) -> bool:
        """Whether a request is in progress, or a response has not been sent yet."""
        return bool(
            self._pending_responses
            or self._backlog
            or self._muted is not None
            or (self._socket_writer is not None and self._socket_writer.waiting_bytes)
        )

    def is_idle(self, now: float, oldest: float) -> bool:
        """Return whether the connection has been idle since `oldest`: nothing was received, and either nothing is
        unsent and no request is in progress, or the peer has accepted none of the unsent bytes. `now` and `oldest`:
        monotonic seconds.

        The caller must call this often: progress of sending is found by comparing the unsent bytes with those of the
        call before.
        """
        unsent = 0 if self._socket_writer is None else self._socket_writer.waiting_bytes
        if unsent != self._unsent_before:
            self._unsent_before, self._unsent_since = unsent, now
        if self.last_active >= oldest:
            return False
        return self._unsent_since < oldest if unsent else not self.is_busy

    @property
    def is_waiting_for_disk(self) -> bool:
        """Whether requests are in progress and all of them are produce requests, which wait for the broker's disk."""
        return bool(self._pending_responses) and self._blocked_by is None and not self.is_unordered

    @property
    def is_blocked_by_broker(self) -> bool:
        """Whether the broker, not the peer, blocks the connection: the client is throttled, or the backlog behind a
        request in progress is full."""
        if self._muted is not None:
            return True
        if self._blocked_by is None and not self.is_unordered:
            return False
        return self._may_answer() if self._paused else not self._frames.buffered_bytes

    def pause_reading(self) -> None:
        if not self._paused and self._transport is not None and not self.closed:
            self._paused = True
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Resume reading, unless another reason for the pause remains."""
        if self._paused and self._transport is not None and not self.closed and self._may_read():
            self._paused = False
            self.last_active = self._server.now
            self._transport.resume_reading()
        self._drain_soon()

    def pause_reading_ms(self, duration_ms: int) -> None:
        """Start no request for `duration_ms`, at most `MUTE_MS_MAX`, because the client is throttled (KIP-219).
        Responses are still sent. After several calls, the pause that ends last applies. No effect on an unordered
        connection, which several clients share."""
        if self.closed or duration_ms <= 0 or self.is_unordered:
            return
        until = self._server.loop.time() + min(duration_ms, MUTE_MS_MAX) / 1000
        if self._muted is not None:
            if self._muted_until >= until:
                return
            self._muted.cancel()
        self._muted_until = until
        self._muted = self._server.loop.call_at(until, self.end_pause)
        self.pause_reading()

    def end_pause(self) -> None:
        """End the pause of `pause_reading_ms`."""
        if self._muted is not None:
            self._muted.cancel()
            self._muted = None
            self.resume_reading()

    def _may_answer(self) -> bool:
        socket_writer = self._socket_writer
        return socket_writer is None or (
            socket_writer.waiting_bytes <= self._server.limits.unsent_bytes_max
            and socket_writer.waiting_parts <= UNSENT_PARTS_MAX
            and not (socket_writer.held_bytes > CONGESTED_BYTES_MAX and self._server.has_unsent_pressure)
        )

    def _may_read(self) -> bool:
        limits = self._server.limits
        return (
            len(self._pending_responses) + len(self._backlog) < self._requests_max
            and self.backlog_bytes
            <= (limits.backlog_bytes_max if self._is_admitted else UNADMITTED_BYTES_MAX)
            and self._muted is None
            and self._may_answer()
            and not self._server.is_reading_paused(self)
        )

    def shrink_receive_buffer(self) -> None:
        """Shrink the receive buffer of an idle connection to the bytes that were received of an incomplete frame."""
        self._frames.release_memory()

    def reject(self, error: MansioError) -> None:
        """Close the connection of a peer that violates the protocol or a limit, with one log line."""
        kind = "not the Kafka protocol" if type(error) is WireError else type(error).__name__
        logger.warning(
            "connection_closed", extra=fields(peer=self.client_host, reason=kind, detail=str(error))
        )
        self._server.counters.count_closed(type(error).__name__)
        self.abort()

    def abort(self) -> None:
        """Close the connection now; nothing more is sent."""
        if self._transport is not None and not self.closed:
            self.closed = True
            self._transport.abort()

    def abort_when_answered(self) -> None:
        """Close the connection now, or, while requests are in progress, within `ANSWER_MS_MAX`: no other request is
        started, and their responses are sent."""
        if self._pending_responses:
            self.pause_reading_ms(2 * ANSWER_MS_MAX)
            self._server.loop.call_later(ANSWER_MS_MAX / 1000, self.abort)
        else:
            self.abort()

    def close_after_response(self) -> None:
        """Close the connection after the response to the current request."""
        self._server.loop.call_soon(self.close)

    def close(self) -> None:
        """Close the connection; the operating system still delivers the bytes that the socket has accepted."""
        if self._transport is not None and not self.closed:
            self.flush()
            self._transport.close()
