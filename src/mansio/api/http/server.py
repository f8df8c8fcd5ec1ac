"""HTTP server: runs an ASGI application on an existing event loop.

uvicorn implements HTTP. Its own event loop, signal handlers, logging and process exit are not used. Connections that
uvicorn would keep open forever are closed here: those that send no request, or an incomplete one, or do not accept
their response.

Invariants:
* After `start` returned the port accepts connections; after `stop` returned nothing of the server is left. If the port
  is not available `start` raises `OSError` with the address in its message.
* Health checks are answered however many connections clients keep open: there are at most `CONNECTIONS_MAX`, and a new
  one closes the one that was answered longest ago.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator

CONNECTIONS_MAX = 128
KEEP_ALIVE_S = 30
"""A connection that has been idle for this time after a response is closed."""

UNANSWERED_S_MAX = 40.0
"""A connection on which no response was completed for this time is closed, whatever the reason is."""

DRAIN_S_MAX = 2
"""Maximum time for which `HttpServer.stop` waits for responses in progress."""

HEADER_BYTES_MAX = 64 * 1024
BACKLOG = 128


class _Uvicorn(uvicorn.Server):
    """uvicorn without signal handlers: SIGTERM is handled by `mansio serve`, or by the embedding program."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _HttpConnection(H11Protocol):
    """One HTTP connection. `connections`: all connections of the server, in the order of their last response, oldest
    first."""

    def __init__(self, connections: dict[_HttpConnection, None], **uvicorns: Any) -> None:
        super().__init__(**uvicorns)
        self._connections = connections
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        if len(self._connections) >= CONNECTIONS_MAX:
            quietest = next(iter(self._connections))
            self.logger.warning("too_many_connections_closing_least_recent")
            quietest.end()
        self._begin_waiting()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.transport.is_closing():
            self._begin_waiting()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        super().connection_lost(exc)

    def end(self) -> None:
        """Close the connection now and discard unsent bytes of responses."""
        self._forget()
        self.transport.abort()

    def _begin_waiting(self) -> None:
        self._forget()
        self._connections[self] = None
        self._deadline = self.loop.call_later(UNANSWERED_S_MAX, self.end)

    def _forget(self) -> None:
        self._connections.pop(self, None)
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


class HttpServer:
    """One listening socket and its server. Every method runs on the event loop."""

    def __init__(self, app: Any, host: str, port: int) -> None:
        """`app` is any ASGI 3 application; port 0 selects a free port."""
        self._host = host
        self._port = port
        self._server = _Uvicorn(_config(app))
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> tuple[str, int]:
        """Start to accept connections. Return the bound (host, port). Raises `OSError` if the address is not
        available."""
        listener = await _listen(self._host, self._port)
        address = listener.getsockname()
        self._task = asyncio.get_running_loop().create_task(
            self._server.serve(sockets=[listener]), name="mansio-http"
        )
        while not self._server.started:
            if self._task.done():
                listener.close()
                self._task.result()
                raise RuntimeError("the HTTP server ended before it started")
            await asyncio.sleep(0)
        return address[0], address[1]

    async def stop(self) -> None:
        """Stop listening, wait at most `DRAIN_S_MAX` for responses in progress, and close all connections."""
        if self._task is not None:
            self._server.should_exit = True
            await self._task
            self._task = None


def _config(app: Any) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=cast("Any", partial(_HttpConnection, {})),
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=DRAIN_S_MAX,
        h11_max_incomplete_event_size=HEADER_BYTES_MAX,
    )


async def _listen(host: str, port: int) -> socket.socket:
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, kind, protocol, _, address = found[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise OSError(error.errno, f"cannot listen on {host}:{port}: {error.strerror}") from error
    return listener
