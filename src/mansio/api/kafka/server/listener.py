"""The Kafka port: accepts connections, hands requests to their handlers, and keeps everybody within bounds.

Some requests are hot and have handlers that see the raw frame (`handlers.produce`, `fetch`, `share_fetch`).
Every other one is decoded by `wire.codec.messages` and runs as a coroutine; its module is imported on first use.

Owns the listening sockets, the set of connections and the memory they share.

Always true: what a peer sends can end its own connection, never anybody else's; a request is answered or its
connection closed; requests that arrive or wait their turn hold at most `queued_max_request_bytes` of memory, one
frame, and
`SMALL_FRAME_BYTES` a connection; answers that peers do not take as much again and one answer a connection.
"""

from __future__ import annotations

import asyncio
import logging
import select
from typing import TYPE_CHECKING, NamedTuple

from mansio.api.kafka.handlers import fetch, produce, share_acknowledge, share_fetch
from mansio.api.kafka.server.connection import Connection
from mansio.api.kafka.server.request_context import RequestContext
from mansio.api.kafka.server.request_memory_pool import SMALL_FRAME_BYTES, RequestMemoryPool
from mansio.api.kafka.server.request_router import RequestRouter
from mansio.api.kafka.server.socket_writer import SCRATCH_BYTES
from mansio.errors import FrameStalled, UnsupportedVersion
from mansio.logs import fields
from mansio.wire.api_versions import OFFERED, ApiKey
from mansio.wire.apis.produce import match_template
from mansio.wire.codec import messages
from mansio.wire.framing import new_scratch
from mansio.wire.headers import read_request_header

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mansio.api.kafka.server.socket_writer import ResponsePart
    from mansio.broker.services.broker_services import BrokerServices
    from mansio.ports import Clock, Timer
    from mansio.wire.headers import RequestHeader

logger = logging.getLogger(__name__)

PRODUCE = int(ApiKey.PRODUCE)

BUFFER_IDLE_S = 2.0
"""A connection that sent nothing for so long gives back what its receive buffer has grown."""

SWEEP_INTERVAL_MS = 1000

STALL_INTERVAL_MS = 100
"""So often the server looks who keeps others from memory, while somebody waits for it."""

ACCEPT_BACKLOG = 1024
"""Connections that the kernel has and we have not looked at yet; further ones wait for theirs to be answered."""

DRAIN_POLL_S = 0.005


class ServerLimits(NamedTuple):
    """The bounds of the Kafka port. Bytes and milliseconds."""

    socket_request_max_bytes: int
    requests_max: int
    backlog_bytes_max: int
    unsent_bytes_max: int
    queued_max_request_bytes: int
    max_connections: int
    max_connections_per_ip: int
    """0: no bound but `max_connections`."""
    idle_ms_max: int


REJECTION_REASONS = ("max_connections", "max_connections_per_ip", "descriptors", "stopping")
"""Why a connection was not taken: a setting's name, no file descriptor left, or the broker stops."""


class ServerCounters:
    """What `/metrics` tells about the Kafka port; bumped per request or per connection, never per record."""

    __slots__ = ("closed_by_reason", "connections_accepted", "errors", "refused_by_reason", "requests")

    def __init__(self) -> None:
        self.connections_accepted = 0
        self.refused_by_reason = dict.fromkeys(REJECTION_REASONS, 0)
        self.closed_by_reason: dict[str, int] = {"idle": 0, "send_failed": 0}
        """What this broker ended: idle, sending failed, or the name of the error that the peer made."""
        self.requests: dict[int, int] = dict.fromkeys(map(int, OFFERED), 0)
        self.errors = 0

    @property
    def connections_rejected(self) -> int:
        return sum(self.refused_by_reason.values())

    def closed(self, reason: str) -> None:
        """A connection is ended by this broker; `reason` is a word of the program, never of a peer."""
        self.closed_by_reason[reason] = self.closed_by_reason.get(reason, 0) + 1


class Server:
    """See the module. One per broker."""

    def __init__(
        self, service: BrokerServices, limits: ServerLimits, loop: asyncio.AbstractEventLoop
    ) -> None:
        self.service = service
        self.limits = limits
        self.loop = loop
        self.clock: Clock = service.clock
        self.scratch = memoryview(bytearray(SCRATCH_BYTES))
        self.receive_scratch = new_scratch()
        self.now = self.clock.monotonic()
        """Monotonic seconds, as of the last sweep: good enough to tell who is idle."""
        self.counters = ServerCounters()
        self.listener = ("", 0)
        self._listening: asyncio.Server | None = None
        self._router = RequestRouter(service)
        self._connections: dict[Connection, None] = {}  # in the order they came; a set's differs by process
        self._hosts: dict[str, int] = {}  # client address -> open connections
        self._unsent: dict[Connection, int] = {}
        self.unsent_bytes = 0
        """Answers that wait in memory because their peers do not take them."""
        self._flush_due: list[Connection] = []
        self.memory = RequestMemoryPool(limits.queued_max_request_bytes)
        self._sweep: Timer | None = None
        self._stall_watch: Timer | None = None
        self._stall_time_s = 0.0
        service.records.now = self.now
        service.records.timeout_check_interval_s = SWEEP_INTERVAL_MS / 1000
        self._draining = False

    # Life

    async def start(
        self, host: str, port: int, *, advertised: tuple[str, int] | None = None
    ) -> tuple[str, int]:
        """Listen. Port 0 takes a free one. Returns the (host, port) that is bound."""
        self._listening = await self.loop.create_server(
            lambda: Connection(self), host, port, backlog=ACCEPT_BACKLOG
        )
        bound = self._listening.sockets[0].getsockname()[:2]
        self.listener = advertised or (host, bound[1])
        self._sweep = self.loop.call_later(SWEEP_INTERVAL_MS / 1000, self._sweep_idle)
        return host, bound[1]

    async def stop(self, drain_ms: int) -> None:
        """Accept no more, let requests that are being worked on be answered, then close every connection."""
        self._draining = True
        for timer in (self._sweep, self._stall_watch):
            if timer is not None:
                timer.cancel()
        if self._listening is not None:
            self._listening.close()
        for connection in tuple(self._connections):
            connection.end_pause()
            connection.pause_reading()
        fetch.answer_parked(self.service)
        share_fetch.answer_parked(self.service)
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
        limits = self.limits
        host = connection.client_host
        from_host = self._hosts.get(host, 0)
        if self._draining:
            self.refuse(connection, "stopping", "the broker stops")
        elif len(self._connections) >= limits.max_connections:
            self.refuse(connection, "max_connections", f"{len(self._connections)} are open")
        elif from_host >= limits.max_connections_per_ip > 0:
            self.refuse(connection, "max_connections_per_ip", f"{from_host} from there are open")
        else:
            self._connections[connection] = None
            self._hosts[host] = from_host + 1
            self.counters.connections_accepted += 1

    def refuse(self, connection: Connection, reason: str, detail: str) -> None:
        """Do not take a new connection; `reason` is one of `REJECTION_REASONS`."""
        self.counters.refused_by_reason[reason] += 1
        peer = connection.client_host
        logger.warning("connection_rejected", extra=fields(peer=peer, reason=reason, detail=detail))
        connection.abort()

    def disconnected(self, connection: Connection) -> None:
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
        self.service.shares.connection_lost(connection)

    def _sweep_idle(self) -> None:
        now = self.now = self.service.records.now = self.clock.monotonic()
        oldest = now - self.limits.idle_ms_max / 1000
        for connection in self._connections:
            if connection.last_active < now - BUFFER_IDLE_S:
                connection.shrink_receive_buffer()
        self._close_disconnected()
        for connection in [c for c in self._connections if c.is_idle(now, oldest)]:
            logger.info("idle_connection_closed", extra=fields(peer=connection.client_host))
            self.counters.closed("idle")
            connection.close()
        produce.time_out(self.service, now)
        self._sweep = self.loop.call_later(SWEEP_INTERVAL_MS / 1000, self._sweep_idle)

    def _close_stalled(self) -> None:
        """As long as somebody waits for memory, and once more."""
        self._stall_watch = None
        self._stall_time_s += (
            STALL_INTERVAL_MS / 1000
        )  # not by the clock: when we were held up, no peer was slow
        for connection in self.memory.stalled(self._stall_time_s):
            connection.refuse(FrameStalled("a large frame comes too slowly while others wait for memory"))
        if self.memory.crowded:
            self._watch_for_stalled()

    def _watch_for_stalled(self) -> None:
        if self._stall_watch is None and not self._draining:
            self._stall_watch = self.loop.call_later(STALL_INTERVAL_MS / 1000, self._close_stalled)

    def _close_disconnected(self) -> None:
        """End connections that were reset while nothing is read from them: only a read would tell.

        One that was closed in order may still have requests for us, and waits until they are answered.
        """
        unread = {c.descriptor: c for c in self._connections if c.unread and c.descriptor >= 0}
        if not unread:
            return
        poll = select.poll()
        for descriptor in unread:
            poll.register(descriptor, 0)  # errors and hang-ups are reported in any case
        for descriptor, _ in poll.poll(0):
            unread[descriptor].abort()

    # Memory

    def on_partial_frame(self, connection: Connection, frame_bytes: int, buffered: int) -> None:
        """`connection` holds its backlog, and `buffered` bytes of a frame of `frame_bytes` (0: it is between
        frames)."""
        # The buffer of a frame doubles until it is large enough.
        wanted = connection.backlog_bytes + min(frame_bytes, 2 * buffered)
        memory = self.memory
        if wanted > SMALL_FRAME_BYTES:
            served = memory.give_back(connection, wanted) or memory.take(connection, wanted)
            if memory.waits(connection):
                connection.pause_reading()
                self._watch_for_stalled()
            for other in served:
                other.resume_reading()
        elif memory.holds(connection):
            self._release(connection)

    def is_reading_paused(self, connection: Connection) -> bool:
        """The broker stops, or there is no room for the connection's frame yet."""
        return self._draining or self.memory.waits(connection)

    def set_unsent_bytes(self, connection: Connection, held_bytes: int) -> None:
        """So many bytes of answers wait in memory because the peer of `connection` does not take them."""
        self.unsent_bytes += held_bytes - self._unsent.pop(connection, 0)
        if held_bytes and not connection.closed:
            self._unsent[connection] = held_bytes
        elif held_bytes:
            self.unsent_bytes -= held_bytes

    @property
    def crowded(self) -> bool:
        """Answers that peers do not take fill the memory there is for them."""
        return self.unsent_bytes > self.limits.queued_max_request_bytes

    def _release(self, connection: Connection) -> None:
        for served in self.memory.release(connection):
            served.resume_reading()

    # Requests

    def begin(self, connection: Connection, frame: memoryview) -> Sequence[ResponsePart] | None:
        """Begin a request. The answer, if it is there at once; None if it comes later."""
        pattern = connection.pattern
        if (
            pattern is not None
            and self.service.quotas.active is None  # the short way has no room for a pause
            and (found := match_template(pattern, frame)) is not None
        ):
            self.counters.requests[PRODUCE] += 1
            return produce.produce_by_pattern(self.service, connection, pattern, frame, *found)
        return self._dispatch(connection, read_request_header(frame), frame)

    def _dispatch(
        self, connection: Connection, header: RequestHeader, frame: memoryview
    ) -> Sequence[ResponsePart] | None:
        key = header.api_key
        api = OFFERED.get(key)  # type: ignore[call-overload]  # an IntEnum's keys are ints
        if api is None or not api.lowest <= header.api_version <= api.highest:
            return self._unsupported_version(connection, header)
        self.counters.requests[key] += 1
        if key == ApiKey.PRODUCE:
            return produce.produce(self.service, connection, header, frame)
        if key == ApiKey.FETCH:
            return fetch.fetch(self.service, connection, header, frame)
        if key == ApiKey.SHARE_FETCH:
            share_fetch.share_fetch(self.service, connection, header, frame)
            return None
        if key == ApiKey.SHARE_ACKNOWLEDGE:
            share_acknowledge.share_acknowledge(self.service, connection, header, frame)
            return None
        body = bytes(frame[header.body :])
        request = body if api.raw else messages.decode_request(key, header.api_version, body)
        context = RequestContext(
            key,
            header.api_version,
            header.correlation_id,
            header.client_id,
            connection.client_host,
            self.listener,
        )
        pending_response = connection.defer()
        self.service.scheduler.spawn(
            self._router.run(request, context, pending_response), name=f"{api.key.name.lower()} request"
        )
        return None

    def _unsupported_version(
        self, connection: Connection, header: RequestHeader
    ) -> Sequence[ResponsePart] | None:
        """ApiVersions in a version we do not know is answered in version 0 (KIP-511); the rest is refused."""
        if header.api_key == ApiKey.API_VERSIONS:
            pending_response = connection.defer()
            self._router.unsupported_api_versions(header, pending_response)
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
