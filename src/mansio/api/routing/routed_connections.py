"""Connections of routed clients: to this broker, where a request is a call of its handlers, and to another
one, to which it is forwarded. Neither has a socket of its own.

Invariants:
* Every waiter is completed: with its response, `RequestTimedOut`, or `ConnectionLost`.
* A waiter is called from the event loop, never within `begin_exchange`.
* After a response to a client over its quota, the next request of this client starts after the throttle time; other
  clients are not delayed.
"""

from __future__ import annotations

from abc import abstractmethod
from functools import partial
from typing import TYPE_CHECKING, Final

from mansio.api.kafka.server.direct_requests import DirectRequest
from mansio.broker.routing.caller import BROKER_SESSION
from mansio.errors import BrokerUnreachable, ConnectionLost, MansioError, RequestTimedOut
from mansio.net.connection import BrokerConnection
from mansio.ports import NO_CLIENT
from mansio.state.broker_handshake import BrokerIdentity
from mansio.tracebacks import without_traceback
from mansio.wire.api_versions import SUPPORTED_APIS
from mansio.wire.framing import LENGTH_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mansio.api.kafka.server.listener import KafkaServer
    from mansio.broker.routing.caller import Caller
    from mansio.net.connection import ConnectionOptions, Waiter
    from mansio.net.metadata import Node
    from mansio.ports import Buffer, Clock, ForwardingPeers, Scheduler, Timer


OWN_VERSIONS: Final = {int(api.key): (api.min_version, api.max_version) for api in SUPPORTED_APIS.values()}


class Throttle:
    """Throttle time of one client: until it ends, no request of the client starts (KIP-219)."""

    __slots__ = ("_clock", "_end_s", "_scheduler")

    def __init__(self, clock: Clock, scheduler: Scheduler) -> None:
        self._clock = clock
        self._scheduler = scheduler
        self._end_s = 0.0

    def add(self, throttle_ms: float) -> None:
        """Note the throttle time of a response; the one that ends last applies."""
        if throttle_ms:
            self._end_s = max(self._end_s, self._clock.monotonic() + throttle_ms / 1000)

    @property
    def left_ms(self) -> float:
        return max(self._end_s - self._clock.monotonic(), 0.0) * 1000 if self._end_s else 0.0

    async def wait(self) -> None:
        """Return after the throttle time."""
        if left_ms := self.left_ms:
            await self._scheduler.sleep(left_ms)


class _Exchange:
    """A request without a response. `timer`: its timeout, or that of its start."""

    __slots__ = ("cancel", "is_answered", "timer", "waiter")

    def __init__(self, waiter: Waiter) -> None:
        self.waiter = waiter
        self.timer: Timer | None = None
        self.is_answered = False
        self.cancel: Callable[[], object] | None = None
        """Ends the request."""


class RoutedConnection(BrokerConnection):
    """Base of the two kinds: keeps the requests that have no response."""

    _bounds_time = True
    """Whether this class ends a request after its timeout."""

    def __init__(
        self,
        address: tuple[str, int],
        options: ConnectionOptions,
        scheduler: Scheduler,
        throttle: Throttle,
    ) -> None:
        super().__init__(address, options)
        self._scheduler = scheduler
        self._throttle = throttle
        self._exchanges: dict[int, _Exchange] = {}

    @abstractmethod
    def _begin(self, correlation_id: int, frame: bytes, timeout_ms: float) -> Callable[[], object]:
        """Start the request `frame`, which has no length prefix, so that `_answer` is called later; return what ends
        it."""

    def begin_exchange(
        self,
        buffers: Sequence[Buffer],
        correlation_id: int,
        waiter: Waiter,
        *,
        timeout_ms: float | None = None,
        now: float | None = None,  # noqa: ARG002 - the timeout begins here
    ) -> None:
        if self.closed:
            raise ConnectionLost("the client is closed")
        if timeout_ms is None:
            timeout_ms = self.options.request_timeout_ms
        exchange = self._exchanges[correlation_id] = _Exchange(waiter)
        frame = b"".join(buffers)[LENGTH_BYTES:]
        if left_ms := self._throttle.left_ms:
            exchange.timer = self._scheduler.call_later(
                left_ms, self._start, correlation_id, exchange, frame, timeout_ms
            )
        else:
            self._start(correlation_id, exchange, frame, timeout_ms)

    def _start(self, correlation_id: int, exchange: _Exchange, frame: bytes, timeout_ms: float) -> None:
        if exchange.waiter.done():
            self._exchanges.pop(correlation_id, None)
            return
        cancel = self._begin(correlation_id, frame, timeout_ms)
        if exchange.is_answered:
            return
        exchange.cancel = cancel
        if self._bounds_time:
            exchange.timer = self._loop.call_later(timeout_ms / 1000, self._time_out, correlation_id)

    def send_one_way(self, buffers: Sequence[Buffer]) -> None:
        raise NotImplementedError("requests without a response are not routed")

    def abort(self, failure: MansioError | None = None) -> None:
        self.closed = True
        exchanges, self._exchanges = self._exchanges, {}
        for exchange in exchanges.values():
            self._end(exchange)
            if not exchange.waiter.done():
                exchange.waiter.set_exception(ConnectionLost(str(failure or "the client was closed")))

    async def close(self) -> None:
        self.abort()

    def _answer(self, correlation_id: int, response: bytes | MansioError, throttle_ms: float) -> None:
        """Complete a request in a later iteration of the event loop."""
        self._throttle.add(throttle_ms)
        exchange = self._exchanges.get(correlation_id)
        if exchange is None:
            return
        exchange.cancel, exchange.is_answered = None, True
        if exchange.timer is not None:
            exchange.timer.cancel()
        exchange.timer = self._loop.call_soon(self._complete, correlation_id, response)

    def _complete(self, correlation_id: int, response: bytes | MansioError) -> None:
        exchange = self._exchanges.pop(correlation_id, None)
        if exchange is None or exchange.waiter.done():
            return
        if isinstance(response, MansioError):
            exchange.waiter.set_exception(response)
        else:
            exchange.waiter.set_result(response)

    def _time_out(self, correlation_id: int) -> None:
        exchange = self._exchanges.pop(correlation_id)
        self._end(exchange)
        if not exchange.waiter.done():
            exchange.waiter.set_exception(RequestTimedOut(f"{self._name} did not respond in time"))

    @staticmethod
    def _end(exchange: _Exchange) -> None:
        if exchange.timer is not None:
            exchange.timer.cancel()
        if exchange.cancel is not None:
            exchange.cancel()


class LocalConnection(RoutedConnection):
    """To this broker: requests run by the handlers of its Kafka listener."""

    def __init__(
        self,
        server: KafkaServer,
        caller: Caller | None,
        options: ConnectionOptions,
        throttle: Throttle,
        *,
        is_own: bool,
    ) -> None:
        """`caller`: the client, None for all of them; `is_own`: whether the requests are those of the broker."""
        own = server.inter_broker_listener.endpoint
        address = ("", 0) if own is None else (own.host, own.port)
        super().__init__(address, options, server.service.scheduler, throttle)
        self.versions = OWN_VERSIONS
        self._server = server
        self._address = "" if caller is None else caller.address
        self._session = BROKER_SESSION if caller is None else caller.session
        own_id = server.service.settings.node_id
        self._identity = BrokerIdentity(own_id, 0) if is_own else None

    def _begin(self, correlation_id: int, frame: bytes, timeout_ms: float) -> Callable[[], object]:  # noqa: ARG002
        direct = DirectRequest(
            self._address,
            self._session,
            self._identity,
            partial(self._on_done, correlation_id),
            self._server.inter_broker_listener,
        )
        direct.begin(self._server, memoryview(frame))
        return direct.cancel

    def _on_done(self, correlation_id: int, direct: DirectRequest) -> None:
        response = direct.response[LENGTH_BYTES:] if direct.error is None else direct.error
        direct.response = b""
        self._answer(correlation_id, response, direct.throttle_ms)


class ForwardedConnection(RoutedConnection):
    """To another broker: requests are forwarded with the identity of the client (ForwardRequest)."""

    _bounds_time = False  # the connection to the broker does, and learns from it that the broker is silent

    def __init__(
        self,
        node: Node,
        server: KafkaServer,
        peers: ForwardingPeers,
        caller: Caller | None,
        options: ConnectionOptions,
        negotiated: BrokerConnection,
        throttle: Throttle,
        *,
        is_own: bool,
    ) -> None:
        """`caller`, `is_own`: see `LocalConnection`; `negotiated`: has the API versions of the broker."""
        super().__init__((node.host, node.port), options, server.service.scheduler, throttle)
        self.versions, self.features = negotiated.versions, negotiated.features
        self._node_id = node.node_id
        self._peers = peers
        self._caller = caller
        self._is_own = is_own

    def _begin(self, correlation_id: int, frame: bytes, timeout_ms: float) -> Callable[[], object]:
        work = self._forward(correlation_id, frame, timeout_ms)
        return self._scheduler.spawn(work, name="forward request").cancel

    async def _forward(self, correlation_id: int, frame: bytes, timeout_ms: float) -> None:
        response: bytes | MansioError = ConnectionLost("interrupted by an unexpected error")
        throttle_ms = 0
        caller = self._caller
        try:
            response, throttle_ms = await self._peers.forward(
                self._node_id,
                frame,
                client=NO_CLIENT if caller is None else caller.forwarded,
                is_own=self._is_own,
                timeout_ms=timeout_ms,
            )
        except BrokerUnreachable as error:  # as a client that cannot connect
            response = ConnectionLost(error.message)
        except MansioError as error:
            response = without_traceback(error)
        finally:
            self._answer(correlation_id, response, throttle_ms)
