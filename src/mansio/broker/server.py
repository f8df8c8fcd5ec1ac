"""The Kafka port: accepts connections, hands requests to their handlers, and keeps everybody within bounds.

Two requests are hot and have synchronous handlers that see the raw frame (`handlers.produce`, `handlers.fetch`).
Every other one is decoded by `wire.messages` and runs as a coroutine; its module is imported on first use.

Owns the listening sockets, the set of connections and their shared receive memory.

Always true: what a peer sends can end its own connection, never anybody else's; a request is answered or its
connection closed; large frames together never hold more than `in_flight_bytes_max` of memory.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, NamedTuple

from mansio.broker.connection import Connection
from mansio.broker.context import RequestContext
from mansio.broker.dispatch import Dispatcher
from mansio.broker.egress import SCRATCH_BYTES
from mansio.broker.handlers import fetch, produce
from mansio.broker.receive_memory import SMALL_FRAME_BYTES, ReceiveMemory
from mansio.errors import FrameStalled, UnsupportedVersion
from mansio.wire import messages
from mansio.wire.headers import read_request_header
from mansio.wire.produce_pattern import recognise
from mansio.wire.versions import OFFERED, ApiKey

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mansio.broker.egress import Piece
    from mansio.broker.service import Service
    from mansio.ports import Clock, Timer
    from mansio.wire.headers import RequestHeader

logger = logging.getLogger(__name__)

PRODUCE = int(ApiKey.PRODUCE)

QUIET_S = 2.0
"""A connection that sent nothing for so long gives back what its receive buffer has grown."""

SWEEP_INTERVAL_MS = 1000
DRAIN_POLL_S = 0.005


class Limits(NamedTuple):
    """The bounds of the Kafka port. Bytes and milliseconds."""

    frame_bytes_max: int
    requests_max: int
    backlog_bytes_max: int
    unsent_bytes_max: int
    in_flight_bytes_max: int
    connections_max: int
    idle_ms_max: int


class Counters:
    """What `/metrics` tells about the Kafka port; bumped per request or per connection, never per record."""

    __slots__ = ("connections_accepted", "connections_refused", "errors", "requests")

    def __init__(self) -> None:
        self.connections_accepted = 0
        self.connections_refused = 0
        self.requests: dict[int, int] = dict.fromkeys(map(int, OFFERED), 0)
        self.errors = 0


class Server:
    """See the module. One per broker."""

    def __init__(self, service: Service, limits: Limits, loop: asyncio.AbstractEventLoop) -> None:
        self.service = service
        self.limits = limits
        self.loop = loop
        self.clock: Clock = service.clock
        self.scratch = memoryview(bytearray(SCRATCH_BYTES))
        self.now = self.clock.monotonic()
        """Monotonic seconds, as of the last sweep: good enough to tell who is idle."""
        self.counters = Counters()
        self.listener = ("", 0)
        self._listening: asyncio.Server | None = None
        self._dispatcher = Dispatcher(service)
        self._connections: set[Connection] = set()
        self._flush_due: list[Connection] = []
        self.memory = ReceiveMemory(limits.in_flight_bytes_max)
        self._sweep: Timer | None = None
        service.records.now = self.now
        service.records.look_interval_s = SWEEP_INTERVAL_MS / 1000
        self._draining = False

    # Life

    async def start(
        self, host: str, port: int, *, advertised: tuple[str, int] | None = None
    ) -> tuple[str, int]:
        """Listen. Port 0 takes a free one. Returns the (host, port) that is bound."""
        self._listening = await self.loop.create_server(lambda: Connection(self), host, port, backlog=1024)
        bound = self._listening.sockets[0].getsockname()[:2]
        self.listener = advertised or (host, bound[1])
        self._sweep = self.loop.call_later(SWEEP_INTERVAL_MS / 1000, self._sweep_idle)
        return host, bound[1]

    async def stop(self, drain_ms: int) -> None:
        """Accept no more, let requests that are being worked on be answered, then close every connection."""
        self._draining = True
        if self._sweep is not None:
            self._sweep.cancel()
        if self._listening is not None:
            self._listening.close()
        for connection in tuple(self._connections):
            connection.pause_reading()
        fetch.answer_parked(self.service)
        deadline = self.clock.monotonic() + drain_ms / 1000
        await _until(
            lambda: not any(connection.busy for connection in self._connections), self.clock, deadline
        )
        for connection in tuple(self._connections):
            connection.close()
        await _until(lambda: not self._connections, self.clock, deadline)
        for connection in tuple(self._connections):
            connection.abort()

    @property
    def connection_count(self) -> int:
        return len(self._connections)

    # Connections

    def connected(self, connection: Connection) -> None:
        if len(self._connections) >= self.limits.connections_max or self._draining:
            self.counters.connections_refused += 1
            logger.warning(
                "refused connection from %s: %d are open", connection.client_host, len(self._connections)
            )
            connection.abort()
            return
        self._connections.add(connection)
        self.counters.connections_accepted += 1

    def disconnected(self, connection: Connection) -> None:
        self._connections.discard(connection)
        self._release(connection)

    def _sweep_idle(self) -> None:
        now = self.now = self.service.records.now = self.clock.monotonic()
        oldest = now - self.limits.idle_ms_max / 1000
        for connection in self.memory.stalled(now):
            connection.refuse(FrameStalled("a large frame comes too slowly while others wait for memory"))
        for connection in self._connections:
            if connection.last_active < now - QUIET_S:
                connection.let_go_of_memory()
        for connection in [c for c in self._connections if c.last_active < oldest and not c.busy]:
            logger.info("closed idle connection from %s", connection.client_host)
            connection.close()
        produce.time_out(self.service, now)
        self._sweep = self.loop.call_later(SWEEP_INTERVAL_MS / 1000, self._sweep_idle)

    # Receive memory

    def received_part(self, connection: Connection, frame_bytes: int, buffered: int) -> None:
        """`connection` holds `buffered` bytes of a frame of `frame_bytes` (0: it is between frames)."""
        wanted = min(frame_bytes, 2 * buffered)  # what its buffer, which doubles, is going to be
        if wanted > SMALL_FRAME_BYTES:
            helped = self.memory.take(connection, wanted)
            if self.memory.waits(connection):
                connection.pause_reading()
            for other in helped:
                other.resume_reading()
        elif self.memory.holds(connection):
            self._release(connection)

    def reading_stopped(self, connection: Connection) -> bool:
        """The broker stops, or there is no room for the connection's frame yet."""
        return self._draining or self.memory.waits(connection)

    def _release(self, connection: Connection) -> None:
        for served in self.memory.release(connection):
            served.resume_reading()

    # Requests

    def begin(self, connection: Connection, frame: memoryview) -> Sequence[Piece] | None:
        """Begin a request. The answer, if it is there at once; None if it comes later."""
        pattern = connection.pattern
        if pattern is not None and (found := recognise(pattern, frame)) is not None:
            self.counters.requests[PRODUCE] += 1
            return produce.produce_alike(self.service, connection, pattern, frame, *found)
        return self._dispatch(connection, read_request_header(frame), frame)

    def _dispatch(
        self, connection: Connection, header: RequestHeader, frame: memoryview
    ) -> Sequence[Piece] | None:
        key = header.api_key
        api = OFFERED.get(key)  # type: ignore[call-overload]  # an IntEnum's keys are ints
        if api is None or not api.lowest <= header.api_version <= api.highest:
            return self._not_offered(connection, header)
        self.counters.requests[key] += 1
        if key == ApiKey.PRODUCE:
            return produce.produce(self.service, connection, header, frame)
        if key == ApiKey.FETCH:
            return fetch.fetch(self.service, connection, header, frame)
        request = messages.decode_request(key, header.api_version, bytes(frame[header.body :]))
        context = RequestContext(
            key,
            header.api_version,
            header.correlation_id,
            header.client_id,
            connection.client_host,
            self.listener,
        )
        slot = connection.defer()
        self.service.scheduler.spawn(
            self._dispatcher.run(request, context, slot), name=f"{api.key.name.lower()} request"
        )
        return None

    def _not_offered(self, connection: Connection, header: RequestHeader) -> Sequence[Piece] | None:
        """ApiVersions in a version we do not know is answered in version 0 (KIP-511); the rest is refused."""
        if header.api_key == ApiKey.API_VERSIONS:
            slot = connection.defer()
            self._dispatcher.unsupported_api_versions(header, slot)
            return None
        self.counters.errors += 1
        raise UnsupportedVersion(f"API {header.api_key} version {header.api_version} is not offered")

    # Flushing once per turn of the loop

    def flush_soon(self, connection: Connection) -> None:
        """Several answers of one turn leave in one send."""
        if not self._flush_due:
            self.loop.call_soon(self._flush_all)
        self._flush_due.append(connection)

    def _flush_all(self) -> None:
        due, self._flush_due = self._flush_due, []
        for connection in due:
            connection.flush()


async def _until(condition: Callable[[], bool], clock: Clock, deadline: float) -> None:
    """Look now and then whether `condition` holds; give up at `deadline` (monotonic seconds)."""
    while not condition() and clock.monotonic() < deadline:  # noqa: ASYNC110 - only while the broker stops
        await asyncio.sleep(DRAIN_POLL_S)
