"""Control channel: a pair of connected sockets between a broker process and its supervisor.

The supervisor asks for a path of the broker's HTTP API, such as `/metrics`, past the listeners of clients; the broker
ends when the supervisor has ended, which closes the channel. A request is a line, `NUMBER PATH`; a response is a line,
`NUMBER STATUS LENGTH`, and the body.

Invariants:
* At most one request for each path is in progress. Who asks for the path meanwhile gets the same response.
* Requests for different paths do not wait for each other.
* A timeout ends the wait of who asked, and neither the request nor the reading of its response.
* A body has at most `BODY_BYTES_MAX`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from mansio.api.http.authentication import SUPERVISOR
from mansio.errors import Unavailable
from mansio.logs import fields

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

logger = logging.getLogger(__name__)

BODY_BYTES_MAX: Final = 64 << 20
LINE_BYTES_MAX: Final = 4 << 10
STANDARD_INPUT: Final = 0
NOT_RUNNING: Final = "it does not run"
BROKEN_STREAM: Final = (asyncio.IncompleteReadError, asyncio.LimitOverrunError)


class ChannelResponse(NamedTuple):
    """Response of a broker: status of HTTP, and body."""

    status: int
    body: bytes


class SupervisorEnd:
    """The end of the supervisor. A new one is made for each start of the broker."""

    def __init__(self) -> None:
        self._socket, other = socket.socketpair()
        self._broker_end: socket.socket | None = other
        self._opening: asyncio.Task[asyncio.StreamWriter] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._pending: dict[str, _Request] = {}
        self._number = 0
        self._is_closed = False

    @property
    def broker_descriptor(self) -> int:
        """Descriptor that becomes the standard input of the broker."""
        assert self._broker_end is not None, "the broker has started"
        return self._broker_end.fileno()

    def broker_has_started(self) -> None:
        """Close this process's copy of the broker's end."""
        if self._broker_end is not None:
            self._broker_end.close()
            self._broker_end = None

    async def get(self, path: str, within_s: float) -> ChannelResponse:
        """Ask for a path. Raises `Unavailable` if there is no response within that time, or the broker has ended."""
        try:
            async with asyncio.timeout(within_s):
                if self._opening is None:
                    self._opening = asyncio.get_running_loop().create_task(self._open())
                writer = await asyncio.shield(self._opening)
                return await asyncio.shield(self._ask(writer, path))
        except TimeoutError:
            raise Unavailable(f"no answer within {within_s:g} s") from None
        except OSError as error:
            raise Unavailable(NOT_RUNNING) from error

    async def _open(self) -> asyncio.StreamWriter:
        self._socket.setblocking(False)
        reader, writer = await asyncio.open_connection(sock=self._socket, limit=LINE_BYTES_MAX)
        self._writer = writer
        self._reading = asyncio.get_running_loop().create_task(self._read(reader), name="control channel")
        if self._is_closed:
            writer.close()
        return writer

    def _ask(self, writer: asyncio.StreamWriter, path: str) -> asyncio.Future[ChannelResponse]:
        """Return the response to the request for a path, which is sent if none is in progress."""
        if (request := self._pending.get(path)) is not None:
            return request.response
        if self._reading is None or self._reading.done():
            raise Unavailable(NOT_RUNNING)
        self._number += 1
        response = asyncio.get_running_loop().create_future()
        self._pending[path] = _Request(self._number, response)
        writer.write(f"{self._number} {path}\n".encode())
        return response

    async def _read(self, reader: asyncio.StreamReader) -> None:
        """Complete requests until the channel is closed, or has something that is no response."""
        reason = NOT_RUNNING
        try:
            while True:
                number, status, length = map(int, (await reader.readuntil()).split())
                if not 0 <= length <= BODY_BYTES_MAX:
                    raise ValueError(f"a body of {length} bytes")
                self._complete(number, ChannelResponse(status, await reader.readexactly(length)))
        except (OSError, asyncio.IncompleteReadError):
            pass
        except (ValueError, asyncio.LimitOverrunError) as error:
            reason = "its answers cannot be read"
            logger.error("control_channel_broken", extra=fields(reason=error))
        finally:
            for request in self._pending.values():
                if not request.response.done():
                    request.response.set_exception(Unavailable(reason))
                    request.response.exception()  # nobody may wait for it any more
            self._pending.clear()

    def _complete(self, number: int, response: ChannelResponse) -> None:
        for path, request in self._pending.items():
            if request.number == number:
                del self._pending[path]
                request.response.set_result(response)
                return
        raise ValueError(f"a response to request {number}, which is not in progress")

    def close(self) -> None:
        """Close the channel, which ends the broker if it still runs."""
        self.broker_has_started()
        self._is_closed = True
        if self._writer is not None:
            self._writer.close()
        elif self._opening is None:
            self._socket.close()


class _Request(NamedTuple):
    """A request in progress."""

    number: int
    response: asyncio.Future[ChannelResponse]


class BrokerEnd:
    """The end of the broker: its standard input."""

    def __init__(self, app: Any, on_closed: Callable[[], object]) -> None:
        """`app`: the ASGI application that answers. `on_closed`: called when the supervisor has ended."""
        self._app = app
        self._on_closed = on_closed
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Answer requests until the channel is closed. Raises `OSError` if the standard input is no channel."""
        channel = socket.socket(fileno=os.dup(STANDARD_INPUT))
        channel.setblocking(False)
        self._task = asyncio.get_running_loop().create_task(self._serve(channel), name="control channel")

    def stop(self) -> None:
        """Stop answering, without calling `on_closed`."""
        if self._task is not None:
            self._task.cancel()
            self._task = None

    async def _serve(self, channel: socket.socket) -> None:
        reader, writer = await asyncio.open_connection(sock=channel, limit=LINE_BYTES_MAX)
        try:
            async with asyncio.TaskGroup() as answers:
                with contextlib.suppress(OSError, ValueError, *BROKEN_STREAM):
                    while True:
                        number, path = (await reader.readuntil()).decode().split()
                        answers.create_task(self._answer(writer, number, path))
                self._on_closed()
        finally:
            writer.close()

    async def _answer(self, writer: asyncio.StreamWriter, number: str, path: str) -> None:
        try:
            status, body = await asgi_get(self._app, path)
        except Exception as error:
            logger.exception("supervisor_request_failed", extra=fields(path=path, reason=error))
            status, body = 500, b""
        writer.write(f"{number} {status} {len(body)}\n".encode() + body)


async def asgi_get(app: Callable[..., Awaitable[object]], path: str) -> ChannelResponse:
    """Return the response of an ASGI application to a GET request for `path`."""
    status = 500
    parts: list[bytes] = []
    is_asked = False

    async def receive() -> dict[str, Any]:
        nonlocal is_asked
        if is_asked:
            await asyncio.Event().wait()  # a client that stays connected
        is_asked = True
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        elif message["type"] == "http.response.body":
            parts.append(message.get("body", b""))

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "GET",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(b"host", b"localhost"), (b"accept", b"text/plain")],
        "client": None,
        "server": None,
        SUPERVISOR: True,
    }
    await app(scope, receive, send)
    body = b"".join(parts)
    if len(body) > BODY_BYTES_MAX:
        return ChannelResponse(507, b"")
    return ChannelResponse(status, body)
