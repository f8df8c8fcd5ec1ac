"""TLS writer of one connection: sends response bytes and file ranges in order through the transport, which encrypts
them.

The bytes on the socket are those of TLS records, so nothing may be written past the transport, as `SocketWriter` does.
The transport encrypts what it gets at once, and keeps what the peer does not accept. So it gets small pieces, and
nothing more while its buffer is full: the remainder of a file range waits as a position in the file.

Invariants:
* Bytes leave in the order of `send`.
* The transport holds at most `TRANSPORT_BYTES_MAX` and one piece, and what it has passed on to the socket's transport,
  which is bounded in the same way.
* `waiting_bytes` is the number of bytes that wait for the transport to resume; `held_bytes` of them are in memory.
* If the disk fails while a file range is read, the connection ends; `UnreadableSlice` names the range.
* No callback is called during `send` but `on_lost`.
"""

from __future__ import annotations

import socket
from collections import deque
from typing import TYPE_CHECKING

from mansio.api.kafka.connections.socket_writer import PUMP_BYTES_MAX, join_small_parts, read_slice_into

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Sequence

    from mansio.api.kafka.connections.socket_writer import ResponsePart
    from mansio.storage.log import LogSlice

PIECE_BYTES_MAX = 128 * 1024
"""Maximum number of bytes that the transport gets at a time, and that are read of a file range."""

TRANSPORT_BYTES_MAX = 64 * 1024
"""Number of encrypted bytes with which the transport pauses the writer."""


class TlsWriter:
    """Sends the responses of one connection. `on_writable` is called when all parts that had to wait have been passed
    on, `on_lost` when the disk fails. The protocol of the transport passes `pause_writing` and `resume_writing` on to
    `pause` and `resume`.

    `scratch` is the buffer for file ranges, shared by all connections of a loop. The transport has encrypted a piece
    when `write` returns, so that the buffer can be used again.
    """

    __slots__ = (
        "_held_bytes",
        "_is_congested",
        "_is_paused",
        "_is_pump_due",
        "_loop",
        "_on_lost",
        "_on_writable",
        "_queue",
        "_queued_bytes",
        "_scratch",
        "_slice_sent",
        "_transport",
    )

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        transport: asyncio.Transport,
        scratch: memoryview,
        on_writable: Callable[[], None],
        on_lost: Callable[[OSError], None],
    ) -> None:
        transport.set_write_buffer_limits(high=TRANSPORT_BYTES_MAX)
        self._loop = loop
        self._transport: asyncio.Transport | None = transport
        self._scratch = scratch[:PIECE_BYTES_MAX]
        self._queue: deque[memoryview | LogSlice] = deque()
        self._queued_bytes = 0
        self._held_bytes = 0
        self._slice_sent = 0
        self._is_paused = False
        self._is_congested = False
        """Whether parts have waited, so that `on_writable` has to be called."""
        self._is_pump_due = False
        self._on_writable = on_writable
        self._on_lost = on_lost

    @property
    def waiting_bytes(self) -> int:
        return self._queued_bytes + self._transport_bytes() if self._is_paused else self._queued_bytes

    @property
    def held_bytes(self) -> int:
        """Waiting bytes in memory: parts, and what the transport has encrypted."""
        return self._held_bytes + self._transport_bytes() if self._is_paused else self._held_bytes

    def _transport_bytes(self) -> int:
        """Bytes in the buffer of a transport that has paused the writer. What another one has counts as sent, because
        nothing is reported when it has passed them on."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    @property
    def waiting_parts(self) -> int:
        """Number of waiting parts; each uses memory, however small it is."""
        return len(self._queue)

    def take_socket_error(self) -> int:
        """Read and clear the pending error of the socket (SO_ERROR), such as ECONNRESET; 0 if there is none."""
        if self._transport is None:
            return 0
        peer: socket.socket = self._transport.get_extra_info("socket")
        return peer.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)

    def send(self, parts: Sequence[ResponsePart]) -> None:
        """Send `parts` in order: at once as far as the transport accepts them, the remainder when it resumes."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        if not (self._queue or self._is_paused) and len(parts) == 1:
            data = parts[0]
            if type(data) is bytes and len(data) <= PIECE_BYTES_MAX:
                transport.write(data)
                self._is_congested |= self._is_paused
                return
        for part in join_small_parts(parts, self._held_bytes):
            self._queue.append(part)
            if isinstance(part, memoryview):
                self._queued_bytes += len(part)
                self._held_bytes += len(part)
            else:
                self._queued_bytes += part.length
        if not (self._is_paused or self._is_pump_due):
            self._write_waiting_parts()

    def pause(self) -> None:
        self._is_paused = True

    def resume(self) -> None:
        self._is_paused = False
        if not self._is_pump_due:
            self._pump_soon()

    def close(self) -> None:
        """Discard the waiting parts; the transport is closed by the connection."""
        self._queue.clear()
        self._queued_bytes = self._held_bytes = 0
        self._transport = None

    def _pump_soon(self) -> None:
        """Continue in the next turn of the event loop: the transport is in the middle of its own work, or other
        connections are served first."""
        self._is_pump_due = True
        self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        self._is_pump_due = False
        if self._transport is None or self._is_paused:
            return
        if (
            self._transport.is_closing()
        ):  # what has not been passed on is lost, as with a plaintext connection
            self.close()
            return
        self._write_waiting_parts()
        if self._is_congested and not (self._queue or self._is_paused or self._is_pump_due):
            self._is_congested = False
            self._on_writable()

    def _write_waiting_parts(self) -> None:
        """Pass pieces on to the transport until it pauses the writer, or the connection is lost."""
        transport = self._transport
        assert transport is not None
        written = 0
        try:
            while self._queue and not self._is_paused:
                if written >= PUMP_BYTES_MAX:
                    self._pump_soon()
                    break
                piece = self._next_piece()
                written += len(piece)
                self._queued_bytes -= len(piece)
                transport.write(piece)
        except OSError as error:
            self._on_lost(error)
            return
        self._is_congested |= bool(self._queue) or self._is_paused

    def _next_piece(self) -> memoryview:
        """Take the next bytes from the queue: a part in memory as it is, or parts and file ranges in the scratch
        buffer."""
        queue = self._queue
        head = queue[0]
        if isinstance(head, memoryview) and (len(queue) == 1 or len(head) >= PIECE_BYTES_MAX):
            return self._take(head, PIECE_BYTES_MAX)
        scratch = self._scratch
        filled = 0
        while queue and filled < PIECE_BYTES_MAX:
            head = queue[0]
            free = scratch[filled:]
            if isinstance(head, memoryview):
                taken = self._take(head, len(free))
                free[: len(taken)] = taken
                filled += len(taken)
                continue
            count = read_slice_into(free[: head.length - self._slice_sent], head, self._slice_sent)
            filled += count
            self._slice_sent += count
            if self._slice_sent == head.length:
                self._slice_sent = 0
                queue.popleft()
        return scratch[:filled]

    def _take(self, head: memoryview, length: int) -> memoryview:
        """Take up to `length` bytes of the first part, which is in memory."""
        taken = head[:length]
        self._held_bytes -= len(taken)
        if len(taken) < len(head):
            self._queue[0] = head[len(taken) :]
        else:
            self._queue.popleft()
        return taken
