"""Socket writer of one connection: sends response bytes and file ranges in order, without copying large ones.

The writer writes directly to a duplicate of the socket's file descriptor, not through the asyncio transport, so that
there is only one queue of unsent parts. A response of small parts is sent with one `send`. A large file range is sent
from the page cache: to other hosts with `sendfile`, to this host and on other systems than Linux through one scratch
buffer, together with the parts before and behind it (docs/adr/0004-sending-fetched-bytes.md). Parts that the peer does
not accept wait until the socket is writable.

Invariants:
* Bytes leave in the order of `send`.
* `waiting_bytes` is the number of bytes that the peer has not accepted yet; `held_bytes` of them are in memory. A
  waiting file range holds no memory, only its position in the file.
* If the disk fails while a file range is read, the connection ends; `UnreadableSlice` names the range.
"""

from __future__ import annotations

import os
import socket
import sys
from collections import deque
from typing import TYPE_CHECKING

from mansio.errors import StorageError
from mansio.ports import UNREADABLE_ERRNOS

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Sequence

    from mansio.storage.log import LogSlice

    ResponsePart = bytes | LogSlice

SLICE_BYTES_MIN = 64 * 1024
"""Smaller file ranges are read and sent together with other parts, which is cheaper than separate system calls."""

SCRATCH_BUFFER_BYTES = 512 * 1024
"""Maximum part of a file range that is read at a time; bytes that the peer does not accept are read again later."""

JOIN_BYTES_MAX = 256 * 1024
"""Small parts are joined into one `send` up to this size."""

EAGER_BYTES_MAX = 1024 * 1024
"""Small file ranges are read into memory when they are queued until this many bytes wait in memory; further ranges are
read when they are sent."""

PUMP_BYTES_MAX = 4 * 1024 * 1024
"""After sending this many bytes, the writer lets the event loop serve other connections."""

BUFFERS_MAX = 64
"""Maximum number of parts per system call."""

HAS_SENDFILE = sys.platform == "linux"
"""Whether file ranges may be sent with `sendfile`. macOS has it with other semantics (a length of 0 means all, and an
interrupted call has sent a part)."""

_MORE = getattr(socket, "MSG_MORE", 0)
_HAS_PREADV = hasattr(os, "preadv")  # macOS: since version 11


class UnreadableSlice(OSError):
    """The disk cannot read a part of the file range `part`, which was to be sent."""

    def __init__(self, part: LogSlice, error: OSError) -> None:
        super().__init__(error.errno, error.strerror, part.file.path)
        self.part = part


class SocketWriter:
    """Sends the responses of one connection. `on_writable` is called when all waiting parts have been sent, `on_lost`
    when the connection is lost.

    `scratch` is the buffer for file ranges, shared by all connections of a loop; None selects `sendfile`.
    """

    __slots__ = (
        "_loop",
        "_on_lost",
        "_on_writable",
        "_queue",
        "_scratch",
        "_slice_sent",
        "_socket",
        "_writing",
        "held_bytes",
        "waiting_bytes",
    )

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        descriptor: int,
        scratch: memoryview | None,
        on_writable: Callable[[], None],
        on_lost: Callable[[OSError], None],
    ) -> None:
        self._loop = loop
        self._socket: socket.socket | None = socket.socket(fileno=os.dup(descriptor))
        self._socket.setblocking(False)
        self._scratch = scratch
        self._queue: deque[memoryview | LogSlice] = deque()
        self._slice_sent = 0
        self._writing = False
        self._on_writable = on_writable
        self._on_lost = on_lost
        self.held_bytes = 0
        self.waiting_bytes = 0

    def take_socket_error(self) -> int:
        """Read and clear the pending error of the socket (SO_ERROR), such as ECONNRESET; 0 if there is none."""
        return 0 if self._socket is None else self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)

    @property
    def waiting_parts(self) -> int:
        """Number of waiting parts; each uses memory, however small it is."""
        return len(self._queue)

    def send(self, parts: Sequence[ResponsePart]) -> None:
        """Send `parts` in order: at once as far as the peer accepts them, the remainder when the socket is writable."""
        if self._socket is None:
            return
        if self._queue or len(parts) != 1 or type(data := parts[0]) is not bytes:
            self._enqueue(parts)
            if not self._writing:
                self._send_waiting_parts()
            return
        try:
            sent = self._socket.send(data)
        except (BlockingIOError, InterruptedError):
            sent = 0
        except OSError as error:
            self._on_lost(error)
            return
        if sent < len(data):
            self._queue.append(memoryview(data)[sent:])
            self.waiting_bytes += len(data) - sent
            self.held_bytes += len(data) - sent
            self._wait_until_writable()

    def pause(self) -> None:
        """Do nothing: the writer does not use the transport's buffer."""

    def resume(self) -> None:
        """Do nothing, as `pause`."""

    def close(self) -> None:
        """Discard the waiting parts and close the file descriptor."""
        if self._socket is None:
            return
        if self._writing:
            self._loop.remove_writer(self._socket.fileno())
            self._writing = False
        self._queue.clear()
        self.held_bytes = self.waiting_bytes = 0
        self._socket.close()
        self._socket = None

    def _enqueue(self, parts: Sequence[ResponsePart]) -> None:
        for part in join_small_parts(parts, self.held_bytes):
            self._queue.append(part)
            if isinstance(part, memoryview):
                self.waiting_bytes += len(part)
                self.held_bytes += len(part)
            else:
                self.waiting_bytes += part.length

    def _send_waiting_parts(self) -> None:
        assert self._socket is not None
        queue = self._queue
        enough = self.waiting_bytes - PUMP_BYTES_MAX
        try:
            while queue:
                if self.waiting_bytes <= enough:
                    self._wait_until_writable()
                    return
                head = queue[0]
                if self._scratch is not None and (len(queue) > 1 or not isinstance(head, memoryview)):
                    if not self._send_batch(self._scratch):
                        self._wait_until_writable()
                        return
                elif isinstance(head, memoryview):
                    self._remove_sent_bytes(self._socket.send(head, _MORE if len(queue) > 1 else 0))
                else:
                    self._send_file(head)
        except (BlockingIOError, InterruptedError):
            self._wait_until_writable()
            return
        except OSError as error:
            self._on_lost(error)
            return
        if self._writing:
            self._loop.remove_writer(self._socket.fileno())
            self._writing = False
            self._on_writable()

    def _send_batch(self, scratch: memoryview) -> bool:
        """Send waiting parts with one system call, up to the size of the scratch buffer; return False if the peer
        accepted less.

        A whole response is sent at once, so that the client is not woken by a partial one.
        """
        assert self._socket is not None
        queue = self._queue
        buffers: list[memoryview] = []
        total = filled = 0
        done = self._slice_sent
        for part in queue:
            if len(buffers) == BUFFERS_MAX:
                break
            if isinstance(part, memoryview):
                buffers.append(part)
                total += len(part)
                continue
            buffer = scratch[filled : filled + part.length - done]
            if not buffer:
                break
            count = read_slice_into(buffer, part, done)
            buffers.append(buffer[:count])
            filled += count
            total += count
            if done + count < part.length:
                break
            done = 0
        sent = self._socket.sendmsg(buffers, (), 0 if total == self.waiting_bytes else _MORE)
        self._remove_sent_bytes(sent)
        return sent == total

    def _send_file(self, part: LogSlice) -> None:
        assert self._socket is not None
        done = self._slice_sent
        try:
            sent = os.sendfile(
                self._socket.fileno(), part.file.fileno(), part.position + done, part.length - done
            )
        except OSError as error:
            if error.errno in UNREADABLE_ERRNOS:
                raise UnreadableSlice(part, error) from error
            raise
        if not sent:
            raise _ended_early_error(part)
        self._remove_sent_bytes(sent)

    def _remove_sent_bytes(self, count: int) -> None:
        """Remove `count` bytes, which the peer has accepted, from the waiting parts."""
        queue = self._queue
        self.waiting_bytes -= count
        while count:
            head = queue[0]
            if isinstance(head, memoryview):
                taken = min(count, len(head))
                self.held_bytes -= taken
                if taken < len(head):
                    queue[0] = head[taken:]
                    return
            else:
                taken = min(count, head.length - self._slice_sent)
                self._slice_sent += taken
                if self._slice_sent < head.length:
                    return
                self._slice_sent = 0
            queue.popleft()
            count -= taken

    def _wait_until_writable(self) -> None:
        if not self._writing:
            assert self._socket is not None
            self._loop.add_writer(self._socket.fileno(), self._send_waiting_parts)
            self._writing = True


def join_small_parts(parts: Sequence[ResponsePart], held_bytes: int) -> list[memoryview | LogSlice]:
    """Join adjacent small parts, reading small file ranges; keep large file ranges as they are. `held_bytes`: bytes
    that wait in memory already."""
    joined: list[memoryview | LogSlice] = []
    small: list[bytes] = []
    small_bytes = 0
    for part in parts:
        data: bytes | None = None
        if type(part) is bytes:
            data = part
        elif (
            part.length < SLICE_BYTES_MIN and held_bytes + small_bytes < EAGER_BYTES_MAX  # type: ignore[union-attr]  # not bytes
        ) or part.file.fileno() < 0:  # type: ignore[union-attr]  # not bytes
            data = _read_slice(part)  # type: ignore[arg-type]  # not bytes, as above
        if data is not None:
            small.append(data)
            small_bytes += len(data)
        if small_bytes and (data is None or small_bytes > JOIN_BYTES_MAX):
            joined.append(memoryview(small[0] if len(small) == 1 else b"".join(small)))
            held_bytes += small_bytes
            small, small_bytes = [], 0
        if data is None:
            joined.append(part)  # type: ignore[arg-type]  # not bytes, as above
    if small_bytes:
        joined.append(memoryview(small[0] if len(small) == 1 else b"".join(small)))
    return joined


def read_slice_into(buffer: memoryview, part: LogSlice, done: int) -> int:
    """Read bytes of a file range from its position `done` into `buffer`, with one system call; return their number.
    Raises `UnreadableSlice` if the disk cannot read them, `OSError` if the file is shorter than the range."""
    try:
        if _HAS_PREADV:
            count = os.preadv(part.file.fileno(), [buffer], part.position + done)
        else:
            data = os.pread(part.file.fileno(), len(buffer), part.position + done)
            count = len(data)
            buffer[:count] = data
    except OSError as error:
        if error.errno in UNREADABLE_ERRNOS:
            raise UnreadableSlice(part, error) from error
        raise
    if not count:
        raise _ended_early_error(part)
    return count


def _ended_early_error(part: LogSlice) -> OSError:
    return OSError(f"{part.file.path} ends before byte {part.position + part.length}")


def _read_slice(part: LogSlice) -> bytes:
    try:
        return part.read()
    except StorageError as error:
        cause = error.__cause__
        if isinstance(cause, OSError) and cause.errno in UNREADABLE_ERRNOS:
            raise UnreadableSlice(part, cause) from error
        raise
