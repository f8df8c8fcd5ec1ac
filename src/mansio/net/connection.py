"""One connection to one broker.

Owns the socket, the negotiation of versions (KIP-35, KIP-511), the pairing of requests and responses by correlation
id, and the bound on how many requests are under way. Requests are pipelined: they leave in the order of the calls.

Always true:
* Every waiter is answered: with its response, or `ConnectionLost` when the connection ends, or `RequestTimedOut`.
  A request that times out ends the connection, as the answers behind it would come later still.
* A waiter that is cancelled leaves its request under way; the answer is thrown away when it comes.
* However many wait, there is one timer: it looks after the request that has to be answered first.
* The response handed out is a copy, valid for as long as it is kept, unless `ConnectionOptions.borrowed` is set.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, cast

from mansio.errors import ConnectionLost, MansioError, RequestTimedOut, UnsupportedVersion, WireError
from mansio.net.earliest_timer import EarliestTimer
from mansio.net.retry import raise_for
from mansio.version import __version__
from mansio.wire import headers
from mansio.wire.api_versions import OFFERED, ApiKey
from mansio.wire.codec import messages
from mansio.wire.framing import FrameReader

if TYPE_CHECKING:
    import ssl
    from collections.abc import Mapping, Sequence

    from mansio.ports import Buffer

CORRELATION_ID_MAX = 0x7FFFFFFF
UNSUPPORTED_VERSION = 35
CLOCK_RESOLUTION_S = 0.001
"""How much too early a timer may ring."""


@dataclass(frozen=True, slots=True)
class ConnectionOptions:
    """How to connect and how long to wait."""

    client_id: str = "mansio"
    connect_timeout_ms: float = 10_000
    request_timeout_ms: float = 30_000
    in_flight_requests_max: int = 64
    frame_bytes_max: int = 256 << 20
    tls: ssl.SSLContext | None = None
    borrowed: bool = False
    """Responses are views of the receive buffer, valid until more bytes come: for who gets large ones, has one request
    under way at a time, and is done with its response before the next."""


DEFAULT_OPTIONS = ConnectionOptions()


class Waiter(Protocol):
    """Who waits for an answer: a future, or something with these four methods of one, to be spared the turn of the loop
    that a future takes. They are called on the loop's thread and raise nothing."""

    def done(self) -> bool:
        """Whether it waits no more, because it was told or gave up: what comes is thrown away."""

    def cancelled(self) -> bool:
        """Whether the request need not even be sent, if it was not yet."""

    def set_result(self, result: bytes, /) -> None:
        """The whole response frame, without its length."""

    def set_exception(self, exception: MansioError, /) -> None:
        """`ConnectionLost` or `RequestTimedOut`."""


class Connection(asyncio.BufferedProtocol):
    """A live connection; make one with `Connection.open`. Belongs to the loop it was opened on."""

    def __init__(self, address: tuple[str, int], options: ConnectionOptions = DEFAULT_OPTIONS) -> None:
        self.address = address
        self.options = options
        self.versions: Mapping[int, tuple[int, int]] = {}
        """What the broker offers: API key -> (lowest, highest)."""
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._reader = FrameReader(options.frame_bytes_max)
        self._waiting: dict[int, tuple[Waiter, float]] = {}
        """By correlation id: who waits, and until when."""
        self._earliest_timer = EarliestTimer(self._loop, self._check_deadlines)
        """When it rings: at the earliest of those moments, or before."""
        self._backlog: deque[tuple[Sequence[Buffer], int]] = deque()
        self._correlation_ids = itertools.count()
        self._paused = False
        self._in_flight = 0
        self._failure: MansioError | None = None
        self._closed = self._loop.create_future()

    @classmethod
    async def open(cls, host: str, port: int, options: ConnectionOptions = DEFAULT_OPTIONS) -> Connection:
        """Connect and learn what the broker offers. `ConnectionLost` when it cannot be reached in time."""
        loop = asyncio.get_running_loop()
        connection: Connection | None = None
        try:
            async with asyncio.timeout(options.connect_timeout_ms / 1000):
                _, connection = await loop.create_connection(
                    lambda: cls((host, port), options), host, port, ssl=options.tls
                )
                await connection._negotiate()
        except TimeoutError as error:
            raise ConnectionLost(f"{host}:{port} did not answer in time") from error
        except OSError as error:
            raise ConnectionLost(f"cannot connect to {host}:{port}: {error.strerror or error}") from error
        finally:
            if connection is not None and not connection.versions:
                connection.abort()
        return connection

    # -- requests --------

    @property
    def closed(self) -> bool:
        """Whether the connection has ended, for whatever reason."""
        return self._failure is not None

    @property
    def in_flight(self) -> int:
        """Requests sent and not answered."""
        return self._in_flight

    def version_for(self, api_key: int, *, highest: int | None = None) -> int:
        """The highest version of an API that the broker, this library and `highest` allow. `UnsupportedVersion`."""
        ours = OFFERED[ApiKey(api_key)]
        theirs = self.versions.get(api_key)
        if theirs is None:
            raise UnsupportedVersion(f"{self._name} does not offer {ours.key.name}")
        version = min(ours.highest, theirs[1], ours.highest if highest is None else highest)
        if version < max(ours.lowest, theirs[0]):
            raise UnsupportedVersion(
                f"{self._name} offers {ours.key.name} {theirs[0]}-{theirs[1]}, "
                f"this client speaks {ours.lowest}-{ours.highest if highest is None else highest}"
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
        """Send one request and return its response (a `messages.Struct`). Error codes inside are the caller's."""
        if version is None:
            version = self.version_for(api_key)
        correlation_id = self.next_correlation_id()
        framed = messages.encode_request(api_key, version, correlation_id, self.options.client_id, fields)
        frame = await self.exchange((framed,), correlation_id, timeout_ms=timeout_ms)
        _, position = headers.read_response_header(api_key, version, frame)
        return messages.decode_response(api_key, version, frame[position:])

    def next_correlation_id(self) -> int:
        """The correlation id the next request has to carry."""
        return next(self._correlation_ids) & CORRELATION_ID_MAX

    async def exchange(
        self, buffers: Sequence[Buffer], correlation_id: int, *, timeout_ms: float | None = None
    ) -> bytes:
        """Send an encoded request (with its length) and return the whole response frame (without its length)."""
        waiter: asyncio.Future[bytes] = self._loop.create_future()
        self.begin(buffers, correlation_id, waiter, timeout_ms=timeout_ms)
        return await waiter

    def begin(
        self,
        buffers: Sequence[Buffer],
        correlation_id: int,
        waiter: Waiter,
        *,
        timeout_ms: float | None = None,
    ) -> None:
        """`exchange` without waiting: the request takes its place in the order of sending now."""
        if self._failure is not None:
            raise ConnectionLost(str(self._failure))
        deadline = (
            self._loop.time() + (self.options.request_timeout_ms if timeout_ms is None else timeout_ms) / 1000
        )
        self._waiting[correlation_id] = (waiter, deadline)
        self._earliest_timer.set(deadline)
        if self._backlog or self._paused or self._in_flight >= self.options.in_flight_requests_max:
            self._backlog.append((buffers, correlation_id))
            return
        self._in_flight += 1
        assert self._transport is not None  # nobody gets a connection before it is made
        self._transport.writelines(buffers)

    def send_one_way(self, buffers: Sequence[Buffer]) -> None:
        """Send a request that gets no response (produce with acks=0)."""
        if self._failure is not None or self._transport is None:
            raise ConnectionLost(str(self._failure))
        self._transport.writelines(buffers)

    def abort(self, failure: MansioError | None = None) -> None:
        """End the connection now; whoever waits gets `ConnectionLost`."""
        self._fail(failure or ConnectionLost(f"the connection to {self._name} was closed"))

    async def close(self) -> None:
        """End the connection and wait until the socket is closed."""
        self.abort()
        if self._transport is not None:
            await asyncio.shield(self._closed)

    # -- asyncio's side --------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's are not subclasses

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._reader.get_buffer(sizehint)

    def buffer_updated(self, nbytes: int) -> None:
        try:
            for frame in self._reader.received(nbytes):
                self._answer(headers.read_correlation_id(frame), frame)
        except MansioError as error:
            self._fail(ConnectionLost(f"{self._name} sent something that is not the Kafka protocol: {error}"))
        if self._backlog:
            self._send_backlog()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(ConnectionLost(f"the connection to {self._name} ended" + (f": {exc}" if exc else "")))
        if not self._closed.done():
            self._closed.set_result(None)

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        self._send_backlog()

    # -- inside --------

    @property
    def _name(self) -> str:
        return f"{self.address[0]}:{self.address[1]}"

    async def _negotiate(self) -> None:
        """Ask in our newest version; a broker that does not know it says so in version 0, and is asked again."""
        fields = {"client_software_name": "mansio", "client_software_version": __version__}
        version = OFFERED[ApiKey.API_VERSIONS].highest
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
            if frame[4:6] == b"\x00\x23" and version:  # UNSUPPORTED_VERSION, always said in version 0
                version = min(version - 1, _highest_api_versions(frame[4:], version))
                continue
            answer = messages.decode_response(ApiKey.API_VERSIONS, version, frame[4:])
            raise_for(answer.error_code)
            self.versions = {
                entry.api_key: (entry.min_version, entry.max_version) for entry in answer.api_keys
            }
            if not self.versions:
                raise UnsupportedVersion(f"{self._name} offers nothing")
            return

    def _send_backlog(self) -> None:
        backlog = self._backlog
        while backlog and not self._paused and self._in_flight < self.options.in_flight_requests_max:
            buffers, correlation_id = backlog.popleft()
            if self._waiting[correlation_id][0].cancelled():
                del self._waiting[correlation_id]
                continue
            self._in_flight += 1
            assert self._transport is not None  # nobody gets a connection before it is made
            self._transport.writelines(buffers)

    def _answer(self, correlation_id: int, frame: memoryview) -> None:
        waiting = self._waiting.pop(correlation_id, None)
        if waiting is None:
            raise ConnectionLost(f"an answer to a request nobody made (correlation id {correlation_id})")
        self._in_flight -= 1
        waiter = waiting[0]
        if not waiter.done():
            waiter.set_result(cast("bytes", frame) if self.options.borrowed else bytes(frame))

    def _check_deadlines(self) -> None:
        now = self._loop.time()
        expecting = [(waiter, deadline) for waiter, deadline in self._waiting.values() if not waiter.done()]
        late = [waiter for waiter, deadline in expecting if deadline <= now + CLOCK_RESOLUTION_S]
        if late:
            for waiter in late:
                waiter.set_exception(RequestTimedOut(f"{self._name} did not answer in time"))
            self._fail(ConnectionLost(f"{self._name} stopped answering"))
        elif expecting:
            self._earliest_timer.set(min(deadline for _, deadline in expecting))

    def _fail(self, failure: MansioError) -> None:
        if self._failure is not None:
            return
        self._failure = failure
        self._earliest_timer.cancel()
        waiting, self._waiting = self._waiting, {}
        self._backlog.clear()
        for waiter, _ in waiting.values():
            if not waiter.done():
                waiter.set_exception(ConnectionLost(str(failure)))
        if self._transport is not None:
            self._transport.abort()


def _highest_api_versions(body: bytes, asked: int) -> int:
    """Which version of ApiVersions to ask in, out of the refusal. A broker that words it badly is taken down to it
    step by step."""
    try:
        theirs = messages.decode_response(ApiKey.API_VERSIONS, 0, body)
    except WireError:
        return asked
    return next((int(api.max_version) for api in theirs.api_keys if api.api_key == ApiKey.API_VERSIONS), 0)
