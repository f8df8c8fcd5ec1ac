"""Pending response: the entry of one request in the response queue of its connection.

Invariant: a pending response is completed once, or its connection ends. Afterwards it no longer refers to the
connection, so that the memory of the connection is freed even if the response comes late or never.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mansio.api.kafka.connections.socket_writer import ResponsePart
    from mansio.errors import MansioError


class QueuedResponse(Protocol):
    """An entry of the response queue; `response` is None until the response is known."""

    response: Sequence[ResponsePart] | None


class ResponseQueue(Protocol):
    """The attributes and methods of a connection that a pending response uses."""

    closed: bool

    def on_response_complete(self, response: QueuedResponse) -> None: ...

    def pause_reading_ms(self, duration_ms: int) -> None: ...

    def abort(self) -> None: ...

    def reject(self, error: MansioError) -> None: ...


class PendingResponse:
    """Response to a request that is answered later. Belongs to one connection; all methods run on its event loop."""

    __slots__ = ("_connection", "_on_lost", "response")

    def __init__(self, connection: ResponseQueue, response: Sequence[ResponsePart] | None = None) -> None:
        self._connection: ResponseQueue | None = connection
        self.response = response
        self._on_lost: Callable[[], None] | None = None

    def on_lost(self, callback: Callable[[], None] | None) -> None:
        """Call `callback`, and no earlier one, if the connection ends before the response."""
        self._on_lost = callback

    def answer(self, parts: Sequence[ResponsePart]) -> None:
        """Complete the response with the bytes to send, or with an empty sequence to send none. Only the first call has
        an effect."""
        connection = self._connection
        if connection is None:
            return
        self._connection = self._on_lost = (
            None  # breaks a reference cycle: the task of the request refers to this object
        )
        self.response = parts
        connection.on_response_complete(self)

    def throttle(self, throttle_ms: int) -> None:
        """Start no later request of the client for `throttle_ms`, because it exceeds a quota (KIP-219). Called before
        `answer`."""
        if self._connection is not None:
            self._connection.pause_reading_ms(throttle_ms)

    def on_connection_lost(self) -> None:
        """Report that the connection ended before the response."""
        on_lost = self._on_lost
        self._connection = self._on_lost = None
        if on_lost is not None:
            on_lost()

    def abandon(self) -> None:
        """Close the connection unless the response is complete, because there will be no response."""
        if self._connection is not None:
            self._connection.abort()

    def reject(self, error: MansioError) -> None:
        """Close the connection because the bytes were not a valid request; see `Connection.reject`."""
        if self._connection is not None:
            self._connection.reject(error)

    @property
    def is_abandoned(self) -> bool:
        """Whether the response is complete or the connection is closed, so that no response can be sent any more."""
        return self._connection is None or self._connection.closed
