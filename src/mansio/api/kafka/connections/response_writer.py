"""What a connection needs of the writer of its responses, for plaintext (`SocketWriter`) and TLS (`TlsWriter`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mansio.api.kafka.connections.socket_writer import ResponsePart


class ResponseWriter(Protocol):
    """Sends the responses of one connection in the order of `send`."""

    @property
    def waiting_bytes(self) -> int:
        """Number of bytes that the peer has not accepted yet, as far as the writer knows."""

    @property
    def held_bytes(self) -> int:
        """Number of the waiting bytes that are in memory."""

    @property
    def waiting_parts(self) -> int:
        """Number of waiting parts; each uses memory, however small it is."""

    def send(self, parts: Sequence[ResponsePart]) -> None:
        """Send `parts`: at once as far as the peer accepts them, the remainder later."""

    def pause(self) -> None:
        """Send nothing more, because the transport's buffer is full."""

    def resume(self) -> None:
        """Continue, because the transport's buffer has space."""

    def take_socket_error(self) -> int:
        """Read and clear the pending error of the socket (SO_ERROR); 0 if there is none."""

    def close(self) -> None:
        """Discard the waiting parts."""
