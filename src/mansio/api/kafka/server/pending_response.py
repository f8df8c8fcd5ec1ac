"""Pending response: the entry of one request in the response queue of its connection.

Invariant: it is completed once, or its connection ends; afterwards it no longer refers to the connection, so that a
late or missing response keeps no memory of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mansio.api.kafka.server.socket_writer import ResponsePart
    from mansio.errors import MansioError


class QueuedResponse(Protocol):
    """An entry of the response queue; `response` is None until the response is known."""

    response: Sequence[ResponsePart] | None


class ResponseQueue(Protocol):
    """What a pending response needs of its connection."""

    closed: bool

    def answered(self, response: QueuedResponse) -> None: ...

    def abort(self) -> None: ...

    def reject(self, error: MansioError) -> None: ...


class PendingResponse:
    """Entry of a request that is answered later. Belongs to one connection, on its event loop."""

    __slots__ = ("_connection", "on_lost", "response")

    def __init__(self, connection: ResponseQueue, response: Sequence[ResponsePart] | None = None) -> None:
        self._connection: ResponseQueue | None = connection
        self.response = response
        self.on_lost: Callable[[], None] | None = None
        """Called when the connection ends before the response."""

    def answer(self, parts: Sequence[ResponsePart]) -> None:
        """Complete the response; an empty sequence means that none is sent. Only the first call has an effect."""
        connection = self._connection
        if connection is None:
            return
        self._connection = self.on_lost = None  # the request's work refers to this object in turn
        self.response = parts
        connection.answered(self)

    def lost(self) -> None:
        """The connection ended before the response."""
        on_lost = self.on_lost
        self._connection = self.on_lost = None
        if on_lost is not None:
            on_lost()

    def abandon(self) -> None:
        """There will be no response: unless one was given, close the connection to inform the client."""
        if self._connection is not None:
            self._connection.abort()

    def reject(self, error: MansioError) -> None:
        """The bytes were not a valid request; see `Connection.reject`."""
        if self._connection is not None:
            self._connection.reject(error)

    @property
    def abandoned(self) -> bool:
        """The connection is closed, so the response is not needed."""
        return self._connection is None or self._connection.closed
