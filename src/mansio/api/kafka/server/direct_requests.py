"""Requests without a connection: those that this broker makes for clients of its other protocols, and those that
another broker forwards.

A direct request runs as one of a connection would, with the same handlers. It has no place in a queue of responses, so
nothing waits behind it, and a client over its quota delays nobody else: the throttle time is in the result.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final, Protocol

from mansio.api.kafka.connections.connection import MUTE_MS_MAX
from mansio.api.kafka.connections.pending_response import PendingResponse
from mansio.broker.routing.caller import Caller
from mansio.errors import ConnectionLost, MansioError, StorageError, UnsupportedVersion
from mansio.logs import fields
from mansio.ports import UNREADABLE_ERRNOS
from mansio.storage.segment_list import LogSlice
from mansio.tracebacks import without_traceback
from mansio.wire.api_versions import ApiKey

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mansio.api.kafka.connections.pending_response import QueuedResponse
    from mansio.api.kafka.connections.socket_writer import ResponsePart
    from mansio.broker.routing.caller import ClientSession
    from mansio.broker.services.authorization import Grants
    from mansio.broker.services.broker_services import BrokerServices
    from mansio.broker.services.cluster import ServedListener
    from mansio.state.broker_handshake import BrokerIdentity

logger = logging.getLogger(__name__)

CONNECTED_ONLY: Final = frozenset(
    {
        ApiKey.CHALLENGE_BROKER,
        ApiKey.AUTHENTICATE_BROKER,
        ApiKey.FORWARD_REQUEST,
        ApiKey.SHARE_FETCH,
        ApiKey.SHARE_ACKNOWLEDGE,
    }
)
"""APIs whose handlers belong to a connection: its authentication, its share sessions. A forwarded request is not
forwarded again."""

TEMPLATE_MISSES: Final = 1
"""Value with which the handler of Produce builds no template: there is no next request of the connection."""


class RequestServer(Protocol):
    """The part of `KafkaServer` that requests without a connection use."""

    service: BrokerServices
    direct_requests: int
    """Number of direct requests in progress."""
    begin: Callable[[Any, memoryview], Sequence[ResponsePart] | None]
    """Starts a request. Its first argument takes the place of the connection."""

    @property
    def is_stopping(self) -> bool: ...

    def report_unreadable(self, part: LogSlice, error: OSError) -> None: ...


class DirectRequest:
    """One request, in the place of its connection. `on_done` is called once, unless `cancel` was called before."""

    __slots__ = (
        "_on_done",
        "_response",
        "_server",
        "client_host",
        "client_id",
        "closed",
        "error",
        "grants",
        "is_confidential",
        "is_forwarded",
        "listener",
        "peer",
        "response",
        "session",
        "template",
        "template_misses",
        "template_revision",
        "throttle_ms",
    )

    def __init__(
        self,
        client_host: str,
        session: ClientSession,
        peer: BrokerIdentity | None,
        on_done: Callable[[DirectRequest], None],
        listener: ServedListener,
        *,
        is_forwarded: bool = False,
    ) -> None:
        """`client_host`, `session`: address of the client, and who it is; `peer`: the broker that makes the request,
        for itself or for the client, None for a client's; `listener`: the one through which the sender reaches
        brokers."""
        self.listener = listener
        self.client_host = client_host
        self.client_id = ""
        self.session = session
        self.is_confidential = False
        self.is_forwarded = is_forwarded
        """Whether another broker has forwarded the request for the client of `session`."""
        self.peer = peer
        self.closed = False
        self.template = None
        self.template_misses = TEMPLATE_MISSES
        self.template_revision = 0
        self.grants: Grants | None = None
        self.throttle_ms = 0
        """Time for which the client has to pause."""
        self.response: bytes = b""
        """The response frame with its length prefix, empty for a request that has none."""
        self.error: MansioError | None = None
        """Why there is no response."""
        self._response: QueuedResponse | None = None
        self._on_done: Callable[[DirectRequest], None] | None = on_done

    @property
    def trace_name(self) -> str:
        """As that of a connection."""
        return Caller(self.session, self.client_id, self.client_host).trace_name

    def begin(self, server: RequestServer, frame: memoryview) -> None:
        """Start the request `frame`, which has no length prefix."""
        self._server = server
        server.direct_requests += 1
        try:
            if server.is_stopping:
                raise ConnectionLost("the broker is stopping")
            if (key := int.from_bytes(frame[:2], "big")) in CONNECTED_ONLY:
                raise UnsupportedVersion(f"API {key} needs a connection")
            parts = server.begin(self, frame)
        except MansioError as error:
            self.reject(error)
            return
        if parts is not None:
            self._complete(parts)

    def cancel(self) -> None:
        """End the wait for the response; the request ends as one whose connection is lost."""
        self._leave()
        response, self._response, self._on_done = self._response, None, None
        if isinstance(response, PendingResponse):
            response.on_connection_lost()

    # What handlers call

    def defer_response(self) -> PendingResponse:
        self._response = response = PendingResponse(self)
        return response

    def queue_response(self, response: QueuedResponse) -> None:
        self._response = response

    def queue_exclusive_response(self, response: QueuedResponse) -> None:
        self._response = response

    def on_response_complete(self, response: QueuedResponse) -> None:
        parts = response.response
        self._complete(() if parts is None else parts)

    def hold_request(self, _size: int) -> Callable[[], None]:
        """Let the caller account for the memory of the request."""
        return _do_nothing

    def pause_reading_ms(self, duration_ms: int) -> None:
        self.throttle_ms = max(self.throttle_ms, min(duration_ms, MUTE_MS_MAX))

    def reject(self, error: MansioError) -> None:
        self._end(error)

    def abort(self) -> None:
        self._end(ConnectionLost("the broker ended the request without a response"))

    def _leave(self) -> None:
        if not self.closed:
            self.closed = True
            self._server.direct_requests -= 1

    def _complete(self, parts: Sequence[ResponsePart]) -> None:
        pieces: list[bytes] = []
        for part in parts:
            if not isinstance(part, LogSlice):
                pieces.append(part)
                continue
            try:
                pieces.append(part.read())
            except StorageError as error:
                logger.warning(
                    "direct_request_failed", extra=fields(client=self.client_host, error=error.message)
                )
                cause = error.__cause__
                if isinstance(cause, OSError) and cause.errno in UNREADABLE_ERRNOS:
                    self._server.report_unreadable(part, cause)
                self._end(ConnectionLost(f"records cannot be read: {error}"))
                return
        self.response = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        self._end(None)

    def _end(self, error: MansioError | None) -> None:
        on_done, self._on_done, self._response = self._on_done, None, None
        self._leave()
        self.error = None if error is None else without_traceback(error)
        if on_done is not None:
            on_done(self)


def _do_nothing() -> None:
    pass
