"""The place of one answer in the queue of its connection, held by whoever works on the request.

Always true: a place is filled once, or its connection ends; then it knows the connection no more, so that an answer
that comes late, or never, keeps no memory of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mansio.api.kafka.server.connection import Connection
    from mansio.api.kafka.server.socket_writer import ResponsePart
    from mansio.errors import MansioError


class QueuedResponse(Protocol):
    """An answer's place in the queue of its connection: `pieces` is None until the answer is there."""

    pieces: Sequence[ResponsePart] | None


class PendingResponse:
    """See the module. Of one connection, on its loop."""

    __slots__ = ("_connection", "on_lost", "pieces")

    def __init__(self, connection: Connection, pieces: Sequence[ResponsePart] | None = None) -> None:
        self._connection: Connection | None = connection
        self.pieces = pieces
        self.on_lost: Callable[[], None] | None = None
        """Called when the connection ends before the answer."""

    def answer(self, pieces: Sequence[ResponsePart]) -> None:
        """Fill the place; an empty sequence means that this request gets no answer. Only the first call counts."""
        connection = self._connection
        if connection is None:
            return
        self._connection = self.on_lost = None  # whoever works on it refers to this place in turn
        self.pieces = pieces
        connection.answered(self)

    def lost(self) -> None:
        """The connection ended before the answer."""
        on_lost = self.on_lost
        self._connection = self.on_lost = None
        if on_lost is not None:
            on_lost()

    def abandon(self) -> None:
        """There will be no answer; unless there was one, the connection ends, so that the client knows."""
        if self._connection is not None:
            self._connection.abort()

    def refuse(self, error: MansioError) -> None:
        """It was no request: see `Connection.refuse`."""
        if self._connection is not None:
            self._connection.refuse(error)

    @property
    def abandoned(self) -> bool:
        """The connection is gone; nobody wants the answer."""
        return self._connection is None or self._connection.closed
