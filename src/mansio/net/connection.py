"""One asyncio connection to one broker.

Negotiates API versions (KIP-35, KIP-511), authenticates (KIP-43, KIP-152), matches responses to requests by correlation
id, and bounds the requests in flight. Requests are pipelined in the order of the calls.

A broker may limit the time for which an authentication is valid (KIP-368). The connection authenticates again when 85
to 95 % of it have passed: requests that were sent before are answered, later ones are queued until it has succeeded.

Invariants:
* Every waiter is completed: with its response, with `ConnectionLost` when the connection ends, or with
  `RequestTimedOut`. A request that times out closes the connection, because responses arrive in order (except between
  brokers, see `peer_connections`) and those to later requests would be even later.
* When a waiter is cancelled, its request stays in flight and the response is discarded.
* There is one timer for all requests, set to the earliest deadline.
* Nothing but ApiVersions is sent before the client is authenticated, and nothing else during an authentication.
* The waiter owns a response frame, unless `ConnectionOptions.frames_are_views` is set.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import socket
import ssl
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Protocol, cast

from mansio.config.addresses import is_loopback_host
from mansio.errors import (
    ConnectionLost,
    MansioError,
    RequestTimedOut,
    TlsFailed,
    UnsupportedVersion,
    WireError,
)
from mansio.net.earliest_timer import EarliestTimer
from mansio.net.retry import raise_for_code
from mansio.net.sasl import authenticate
from mansio.net.tls_failures import (
    failure_in,
    no_tls_failure,
    speaks_plaintext,
    speaks_tls,
    tls_failure,
    tls_only_failure,
    unencrypted_password_failure,
)
from mansio.tracebacks import copied
from mansio.version import __version__
from mansio.wire import headers
from mansio.wire.api_versions import SUPPORTED_APIS, ApiKey
from mansio.wire.codec import messages
from mansio.wire.framing import ATTACHED_FRAME_BYTES_MAX, FrameReader

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from mansio.net.sasl import Credentials
    from mansio.ports import Buffer

CORRELATION_ID_MAX = 0x7FFFFFFF
CLOCK_RESOLUTION_S = 0.001
"""Time by which an event loop may run a timer early."""
REAUTHENTICATION_FRACTIONS = (0.85, 0.95)
"""Part of the validity of an authentication after which the connection authenticates again; random, so that the
connections of a program do not do so together (as in Kafka's clients)."""
ONE_WAY_BACKLOG_MAX = 1_000
"""Maximum number of requests without a response that wait for the end of an authentication."""
_ONE_WAY = -1
"""In place of the correlation id of a request without a response."""
_TRANSPORT_FULL, _AUTHENTICATING = 1, 2
"""Why requests are queued: bits of `Connection._pauses`."""


@dataclass(frozen=True, slots=True)
class ConnectionOptions:
    """Options of a connection. Times are in milliseconds, sizes in bytes."""

    client_id: str = "mansio"
    connect_timeout_ms: float = 10_000
    request_timeout_ms: float = 30_000
    in_flight_requests_max: int = 64
    frame_bytes_max: int = 256 << 20
    tls: ssl.SSLContext | None = None
    """With a context, the connection is encrypted, and the broker's certificate is verified as the context says."""
    sasl: Credentials | None = None
    """With credentials, the client logs in on each connection."""
    frames_are_views: bool = False
    """Whether response frames are views of the receive buffer, valid until the next read, instead of copies. For
    callers that receive large responses, have one request in flight, and finish with a response before they send the
    next request."""
    detaches_large_frames: bool = False
    """Whether a large response frame is a view of a buffer of its own instead of a copy; the waiter may keep it."""


DEFAULT_OPTIONS = ConnectionOptions()


class Waiter(Protocol):
    """Receiver of a response: an `asyncio.Future`, or another object with these four methods.

    The methods are called directly by the read callback, whereas the callbacks of a future run one loop iteration
    later. They are called on the loop's thread and must not raise.
    """

    def done(self) -> bool:
        """Whether the waiter is completed or cancelled; the connection then discards the response."""

    def cancelled(self) -> bool:
        """Whether the waiter is cancelled; the connection then does not send the request if it is still queued."""

    def set_result(self, result: bytes, /) -> None:
        """Receive the response frame, without its length prefix."""

    def set_exception(self, exception: MansioError, /) -> None:
        """Receive `ConnectionLost` or `RequestTimedOut` instead of a response."""


class BrokerConnection(ABC):
    """What a client has to one broker, over a socket or in the broker's process: it negotiates versions and exchanges
    requests."""

    def __init__(self, address: tuple[str, int], options: ConnectionOptions) -> None:
        self.address = address
        self.options = options
        self.versions: Mapping[int, tuple[int, int]] = {}
        """Versions supported by the broker: API key -> (lowest, highest)."""
        self.features: Mapping[str, int] = {}
        """Finalized features of the cluster: name -> level (KIP-584)."""
        self.closed: bool = False
        """Whether the connection was closed or lost."""
        self._loop = asyncio.get_running_loop()
        self._correlation_ids = itertools.count()

    def version_for(self, api_key: int, *, highest: int | None = None) -> int:
        """Return the highest version of an API, up to `highest`, that both the broker and this client support. Raises
        `UnsupportedVersion` if there is none."""
        ours = SUPPORTED_APIS[api_key]  # type: ignore[index]  # an IntEnum equals its number
        theirs = self.versions.get(api_key)
        if theirs is None:
            raise UnsupportedVersion(f"{self._name} does not support {ours.key.name}")
        version = min(ours.max_version, theirs[1], ours.max_version if highest is None else highest)
        if version < max(ours.min_version, theirs[0]):
            raise UnsupportedVersion(
                f"{self._name} supports {ours.key.name} {theirs[0]}-{theirs[1]}, "
                f"this client {ours.min_version}-{ours.max_version if highest is None else highest}"
            )
        return version

    async def request(
        self,
        api_key: int,
        fields: Mapping[str, Any],
        *,
        version: int | None = None,
        timeout_ms: float | None = None,
    ) -> Any:
        """Send one request and return its decoded response (a `messages.Struct`). Does not check the error codes in the
        response."""
        if version is None:
            version = self.version_for(api_key)
        correlation_id = self.next_correlation_id()
        framed = messages.encode_request(api_key, version, correlation_id, self.options.client_id, fields)
        frame = await self.exchange((framed,), correlation_id, timeout_ms=timeout_ms)
        _, position = headers.read_response_header(api_key, version, frame)
        return messages.decode_response(api_key, version, bytes(frame[position:]))

    def next_correlation_id(self) -> int:
        """Allocate the correlation id of the next request."""
        return next(self._correlation_ids) & CORRELATION_ID_MAX

    async def exchange(
        self, buffers: Sequence[Buffer], correlation_id: int, *, timeout_ms: float | None = None
    ) -> bytes:
        """Send an encoded request with its length prefix, and return the response frame without its length prefix."""
        waiter: asyncio.Future[bytes] = self._loop.create_future()
        self.begin_exchange(buffers, correlation_id, waiter, timeout_ms=timeout_ms)
        try:
            return await waiter
        finally:
            del waiter  # its error refers to this frame

    @abstractmethod
    def begin_exchange(
        self,
        buffers: Sequence[Buffer],
        correlation_id: int,
        waiter: Waiter,
        *,
        timeout_ms: float | None = None,
        now: float | None = None,
    ) -> None:
        """Send or queue an encoded request, in the order of the calls, and return; `waiter` receives the response
        frame. `now`: time of the event loop at which the timeout begins, if the caller has read it already."""

    @abstractmethod
    def send_one_way(self, buffers: Sequence[Buffer]) -> None:
        """Send an encoded request that has no response (Produce with acks=0)."""

    @abstractmethod
    def abort(self, failure: MansioError | None = None) -> None:
        """Close the connection immediately. Pending requests fail with `ConnectionLost` and the message of
        `failure`."""

    @abstractmethod
    async def close(self) -> None:
        """Close the connection and wait until it is closed."""

    @property
    def _name(self) -> str:
        return f"{self.address[0]}:{self.address[1]}"


class Connection(BrokerConnection, asyncio.BufferedProtocol):
    """Connection to one broker. `Connection.open` creates it; it belongs to the event loop on which it was opened."""

    def __init__(self, address: tuple[str, int], options: ConnectionOptions = DEFAULT_OPTIONS) -> None:
        super().__init__(address, options)
        self._transport: asyncio.Transport | None = None
        self._reader = FrameReader(
            options.frame_bytes_max, detaches_large_frames=options.detaches_large_frames
        )
        self._copied_bytes_max = options.frame_bytes_max
        """Size up to which a response frame is copied for its waiter."""
        if options.frames_are_views:
            self._copied_bytes_max = -1
        elif options.detaches_large_frames:
            self._copied_bytes_max = ATTACHED_FRAME_BYTES_MAX
        self._waiting: dict[int, tuple[Waiter, float]] = {}
        """Correlation id -> (waiter, deadline)."""
        self._earliest_timer = EarliestTimer(self._loop, self._check_deadlines)
        """Fires at or before the earliest deadline in `_waiting`."""
        self._backlog: deque[tuple[Sequence[Buffer], int]] = deque()
        self._pauses = 0
        self._reauthentication_timer: asyncio.TimerHandle | None = None
        self._reauthentication: asyncio.Task[None] | None = None
        self._in_flight = 0
        self.received_bytes = 0
        """Number of bytes received so far; a peer that is silent adds none."""
        self._negotiated_bytes = 0
        """Number of bytes received when the versions were negotiated."""
        self._failure: MansioError | None = None
        self._on_lost: Callable[[bool], None] | None = None
        self._closed = self._loop.create_future()

    @classmethod
    async def open(
        cls,
        host: str,
        port: int,
        options: ConnectionOptions = DEFAULT_OPTIONS,
        *,
        negotiated: BrokerConnection | None = None,
    ) -> Connection:
        """Open a connection, negotiate API versions, or take them from `negotiated`, an open connection to the same
        address, which saves a round trip, and authenticate.

        Raises `ConnectionLost` if the broker cannot be reached or does not respond within `connect_timeout_ms`;
        `TlsFailed`, also where only one side uses TLS, or a password would be sent without; and the other errors of
        `AuthenticationFailed`, which come again if the call is repeated.
        """
        loop = asyncio.get_running_loop()
        name = f"{host}:{port}"
        connection: Connection | None = None
        is_open = False
        try:
            async with asyncio.timeout(options.connect_timeout_ms / 1000):
                _, connection = await loop.create_connection(
                    lambda: cls((host, port), options), host, port, ssl=options.tls
                )
                connection._check_confidentiality()
                if negotiated is not None and not negotiated.closed:
                    connection.versions, connection.features = negotiated.versions, negotiated.features
                else:
                    await connection._negotiate()
                if options.sasl is not None:
                    token = await options.sasl.new_token()
                    await connection._authenticate(options.request_timeout_ms, token)
            is_open = True
        except TimeoutError as error:
            # What has no TLS may wait for the rest of what it takes for a request.
            if options.tls is not None and connection is None and await speaks_plaintext(host, port):
                raise no_tls_failure(name) from error
            raise ConnectionLost(f"{name} did not respond in time") from error
        except ssl.SSLError as error:
            raise tls_failure(error, name) or await _ended_handshake(host, port, str(error)) from error
        except OSError as error:
            if options.tls is not None and isinstance(error, ConnectionError) and _is_after_connect(error):
                raise await _ended_handshake(host, port, str(error)) from error
            reason = error.strerror or str(error)
            if error.errno and not isinstance(error, socket.gaierror):
                reason = os.strerror(error.errno)  # asyncio's own text is "Connect call failed"
            raise ConnectionLost(f"cannot connect to {name}: {reason}") from error
        except ConnectionLost as error:
            if connection is not None and isinstance(connection._failure, TlsFailed):
                raise copied(connection._failure) from error
            is_first = connection is None or not connection.versions
            if options.tls is None and is_first and await speaks_tls(host, port):
                raise tls_only_failure(name) from error
            raise
        finally:
            if connection is not None and not is_open:
                connection.abort()
        return connection

    def _check_confidentiality(self) -> None:
        """Raise `TlsFailed` if others could read the password of this client. The address counts that was connected to,
        whatever the name is: what reaches this machine only is not read by others."""
        sasl = self.options.sasl
        if sasl is None or not sasl.sends_password or self.options.tls is not None:
            return
        peer = None if self._transport is None else self._transport.get_extra_info("peername")
        if peer is None or not is_loopback_host(peer[0]):
            raise unencrypted_password_failure(self._name)

    @property
    def certificate_sha256(self) -> bytes:
        """SHA-256 of the certificate that the broker has shown, in DER; empty without TLS."""
        tls = None if self._transport is None else self._transport.get_extra_info("ssl_object")
        certificate = None if tls is None else tls.getpeercert(binary_form=True)
        return b"" if certificate is None else sha256(certificate).digest()

    def when_lost(self, callback: Callable[[bool], None]) -> None:
        """Call `callback` once when the connection has ended: with True if the other side or the network ended it, with
        False if this side did."""
        if self._closed.done():
            callback(False)
        else:
            self._on_lost = callback

    # -- requests --------

    @property
    def in_flight(self) -> int:
        """Number of requests that were sent and have no response yet."""
        return self._in_flight

    def begin_exchange(
        self,
        buffers: Sequence[Buffer],
        correlation_id: int,
        waiter: Waiter,
        *,
        timeout_ms: float | None = None,
        now: float | None = None,
    ) -> None:
        if self.closed:
            raise ConnectionLost(str(self._failure))
        deadline = (self._loop.time() if now is None else now) + (
            self.options.request_timeout_ms if timeout_ms is None else timeout_ms
        ) / 1000
        self._waiting[correlation_id] = (waiter, deadline)
        self._earliest_timer.set(deadline)
        if self._backlog or self._pauses or self._in_flight >= self.options.in_flight_requests_max:
            self._backlog.append((buffers, correlation_id))
            return
        self._in_flight += 1
        assert self._transport is not None  # `open` returns connected connections only
        self._transport.writelines(buffers)

    def is_queued(self, correlation_id: int) -> bool:
        """Whether a request waits to be sent, because the maximum number of requests is in flight."""
        return any(queued == correlation_id for _, queued in self._backlog)

    def send_one_way(self, buffers: Sequence[Buffer]) -> None:
        if self._failure is not None or self._transport is None:
            raise ConnectionLost(str(self._failure))
        if self._pauses & _AUTHENTICATING:
            if len(self._backlog) >= ONE_WAY_BACKLOG_MAX:
                raise ConnectionLost(f"too many requests wait for the authentication with {self._name}")
            self._backlog.append((buffers, _ONE_WAY))
            return
        self._transport.writelines(buffers)

    def abort(self, failure: MansioError | None = None) -> None:
        self._fail_requests(failure or ConnectionLost(f"the connection to {self._name} was closed"))

    async def close(self) -> None:
        self.abort()
        if self._transport is not None:
            await asyncio.shield(self._closed)

    # -- asyncio.BufferedProtocol --------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's are not subclasses

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._reader.get_buffer(sizehint)

    def buffer_updated(self, nbytes: int) -> None:
        self.received_bytes += nbytes
        try:
            for frame in self._reader.buffer_updated(nbytes):
                correlation_id = headers.read_correlation_id(frame)
                waiting = self._waiting.pop(correlation_id, None)
                if waiting is None:
                    raise ConnectionLost(f"a response without a request (correlation id {correlation_id})")
                self._in_flight -= 1
                waiter = waiting[0]
                if not waiter.done():
                    is_copied = len(frame) <= self._copied_bytes_max
                    waiter.set_result(bytes(frame) if is_copied else cast("bytes", frame))
        except MansioError as error:
            self._fail_requests(ConnectionLost(f"{self._name} violated the Kafka protocol: {error}"))
        if self._backlog:
            self._send_backlog()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        is_by_peer = self._failure is None
        self._fail_requests(failure_in(exc, self._name) or self._end(exc))
        if not self._closed.done():
            self._closed.set_result(None)
        if self._on_lost is not None:
            on_lost, self._on_lost = self._on_lost, None
            on_lost(is_by_peer)

    def pause_writing(self) -> None:
        self._pauses |= _TRANSPORT_FULL

    def resume_writing(self) -> None:
        self._pauses &= ~_TRANSPORT_FULL
        self._send_backlog()

    # -- internals --------

    async def _negotiate(self) -> None:
        """Learn the API versions of the broker.

        Sends ApiVersions in the newest version of this client. A broker that does not support this version responds in
        version 0 with UNSUPPORTED_VERSION, and the request is repeated in a version that the broker supports.
        """
        fields = {"client_software_name": "mansio", "client_software_version": __version__}
        version = SUPPORTED_APIS[ApiKey.API_VERSIONS].max_version
        while True:
            correlation_id = self.next_correlation_id()
            framed = messages.encode_request(
                ApiKey.API_VERSIONS,
                version,
                correlation_id,
                self.options.client_id,
                fields if version >= 3 else {},
            )
            frame = await self.exchange((framed,), correlation_id)
            if frame[4:6] == b"\x00\x23" and version:  # UNSUPPORTED_VERSION, always sent in version 0
                version = min(version - 1, _highest_api_versions(frame[4:], version))
                continue
            response = messages.decode_response(ApiKey.API_VERSIONS, version, frame[4:])
            raise_for_code(response.error_code)
            self.versions = {
                entry.api_key: (entry.min_version, entry.max_version) for entry in response.api_keys
            }
            if version >= 3:
                self.features = {entry.name: entry.max_version_level for entry in response.finalized_features}
            if not self.versions:
                raise UnsupportedVersion(f"{self._name} supports no API")
            self._negotiated_bytes = self.received_bytes
            return

    def _end(self, exc: Exception | None) -> ConnectionLost:
        """Return the failure of a connection that ended, with what may explain it."""
        text = f"the connection to {self._name} ended" + (f": {exc}" if exc else "")
        if not self.versions and self.options.tls is not None:
            text += " (it may require a certificate of the client, or not accept the one it got)"
        elif self.options.sasl is None and self._in_flight and self.received_bytes == self._negotiated_bytes:
            text += " at the first request (the listener may require a user and a password)"
        return ConnectionLost(text)

    async def _authenticate(self, timeout_ms: float, token: str) -> None:
        """Authenticate, or authenticate again, while other requests are queued. `timeout_ms`: of each request; `token`:
        of the credentials."""
        assert self.options.sasl is not None

        async def request(api_key: int, fields: Mapping[str, Any], version: int) -> Any:
            correlation_id = self.next_correlation_id()
            framed = messages.encode_request(api_key, version, correlation_id, self.options.client_id, fields)
            frame = await self._exchange_now(framed, correlation_id, timeout_ms)
            _, position = headers.read_response_header(api_key, version, frame)
            return messages.decode_response(api_key, version, bytes(frame[position:]))

        self._pauses |= _AUTHENTICATING
        lifetime_ms = await authenticate(request, self.options.sasl, self.versions, self._name, token)
        self._pauses &= ~_AUTHENTICATING
        if lifetime_ms and self.options.sasl.is_renewable:
            delay_s = lifetime_ms / 1000 * random.uniform(*REAUTHENTICATION_FRACTIONS)
            self._reauthentication_timer = self._loop.call_later(delay_s, self._begin_reauthentication)

    def _begin_reauthentication(self) -> None:
        if not self.closed:
            self._reauthentication = self._loop.create_task(self._reauthenticate(), name="reauthentication")

    async def _reauthenticate(self) -> None:
        assert self.options.sasl is not None
        try:
            token = await self.options.sasl.new_token()
        except MansioError:
            return  # the broker closes the connection, and the next one asks for a token again
        self._pauses |= _AUTHENTICATING
        # The responses to earlier requests come first, and each of them may take until its deadline.
        last = max((deadline for _, deadline in self._waiting.values()), default=0.0)
        timeout_ms = max(last - self._loop.time(), 0) * 1000 + self.options.request_timeout_ms
        try:
            await self._authenticate(timeout_ms, token)
        except MansioError as error:
            self._fail_requests(error)
        else:
            self._send_backlog()

    async def _exchange_now(self, framed: bytes, correlation_id: int, timeout_ms: float) -> bytes:
        """Exchange a request that is not queued. Raises `ConnectionLost`, `RequestTimedOut`."""
        if self.closed or self._transport is None:
            raise ConnectionLost(str(self._failure))
        waiter: asyncio.Future[bytes] = self._loop.create_future()
        deadline = self._loop.time() + timeout_ms / 1000
        self._waiting[correlation_id] = (waiter, deadline)
        self._earliest_timer.set(deadline)
        self._in_flight += 1
        self._transport.write(framed)
        try:
            return await waiter
        finally:
            del waiter  # its error refers to this frame

    def _send_backlog(self) -> None:
        backlog = self._backlog
        while backlog and not self._pauses and self._in_flight < self.options.in_flight_requests_max:
            buffers, correlation_id = backlog.popleft()
            if correlation_id == _ONE_WAY:
                assert self._transport is not None  # `open` returns connected connections only
                self._transport.writelines(buffers)
                continue
            if self._waiting[correlation_id][0].cancelled():
                del self._waiting[correlation_id]
                continue
            self._in_flight += 1
            assert self._transport is not None  # `open` returns connected connections only
            self._transport.writelines(buffers)

    def _check_deadlines(self) -> None:
        now = self._loop.time()
        expecting = [(waiter, deadline) for waiter, deadline in self._waiting.values() if not waiter.done()]
        late = [waiter for waiter, deadline in expecting if deadline <= now + CLOCK_RESOLUTION_S]
        if late:
            for waiter in late:
                waiter.set_exception(RequestTimedOut(f"{self._name} did not respond in time"))
            self._fail_requests(ConnectionLost(f"{self._name} stopped responding"))
        elif expecting:
            self._earliest_timer.set(min(deadline for _, deadline in expecting))

    def _fail_requests(self, failure: MansioError) -> None:
        if self._failure is not None:
            return
        self._failure, self.closed = copied(failure), True
        self._earliest_timer.cancel()
        if self._reauthentication_timer is not None:
            self._reauthentication_timer.cancel()
        if self._reauthentication is not None:
            self._reauthentication.cancel()
        waiting, self._waiting = self._waiting, {}
        self._backlog.clear()
        for waiter, _ in waiting.values():
            if not waiter.done():
                waiter.set_exception(ConnectionLost(str(failure)))
        if self._transport is not None:
            self._transport.abort()


def _is_after_connect(error: ConnectionError) -> bool:
    """Whether the connection was open before the error."""
    return not isinstance(error, ConnectionRefusedError)


async def _ended_handshake(host: str, port: int, reason: str) -> MansioError:
    """Return the failure of a TLS handshake that the peer has ended without a word."""
    name = f"{host}:{port}"
    if await speaks_plaintext(host, port):
        return no_tls_failure(name)
    text = f"{name} ended the TLS handshake" + (f": {reason}" if reason else "")
    return ConnectionLost(f"{text} (it may require a certificate of the client, or another version of TLS)")


def _highest_api_versions(body: bytes, requested: int) -> int:
    """Return the highest version of ApiVersions that the broker supports, from the body of its UNSUPPORTED_VERSION
    response.

    If the body cannot be decoded, returns `requested`, so that the caller tries the next lower version.
    """
    try:
        theirs = messages.decode_response(ApiKey.API_VERSIONS, 0, body)
    except WireError:
        return requested
    return next((int(api.max_version) for api in theirs.api_keys if api.api_key == ApiKey.API_VERSIONS), 0)
