"""HTTP server: runs an ASGI application on an existing event loop.

uvicorn implements HTTP. Its own event loop, signal handlers, logging and process exit are not used. Connections that
uvicorn would keep open forever are closed by `HttpConnection`: those that send no request, or an incomplete one, or do
not accept their response. Connections with TLS are accepted by `TlsAcceptor`, so that handshakes are bounded and
certificates are renewed as on the Kafka listeners.

Invariants:
* After `start` returned the port accepts connections; after `stop` returned nothing of the server is left. If the port
  is not available `start` raises `OSError` with the address in its message.
* Health checks are answered however many connections clients keep open, because their number is bounded.
"""

from __future__ import annotations

import asyncio
import contextlib
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import uvicorn

from mansio.api.asgi.connection import HttpConnection
from mansio.host.listening_sockets import listening_sockets
from mansio.net.tls.acceptor import TlsAcceptor

if TYPE_CHECKING:
    import socket
    import ssl
    from collections.abc import Callable, Iterator

    from mansio.net.connection_throttle import ConnectionThrottle
    from mansio.net.tls.handshakes import HandshakeRunner

KEEP_ALIVE_S = 30
"""A connection that has been idle for this time after a response is closed."""

DRAIN_S_MAX = 2
"""Maximum time for which `HttpServer.stop` waits for responses in progress."""

BACKLOG = 128

END_TURNS_MAX = 100
"""Turns of the event loop within which the connections that `HttpServer.stop` aborts are closed."""


class _Uvicorn(uvicorn.Server):
    """uvicorn without signal handlers: SIGTERM is handled by `mansio serve`, or by the embedding program."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpServer:
    """The listening sockets of one address and their server. Every method runs on the event loop."""

    def __init__(
        self,
        app: Any,
        host: str,
        port: int,
        context: Callable[[], ssl.SSLContext] | None = None,
        handshakes: HandshakeRunner | None = None,
        throttle: ConnectionThrottle | None = None,
        *,
        is_shared: bool = False,
    ) -> None:
        """`app` is any ASGI 3 application; port 0 selects a free port. `context`: returns the TLS context for a new
        connection; None without TLS. `handshakes`: runs the TLS handshakes of all listeners of the broker. `throttle`:
        closes connections of addresses that connect too often. `is_shared`: other processes may serve the same
        port."""
        self._is_shared = is_shared
        self._host = host
        self._port = port
        self._context = context
        self._handshakes = handshakes
        self._acceptor: TlsAcceptor | None = None
        self._server = _Uvicorn(_config(app, throttle))
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> tuple[str, int]:
        """Start to accept connections. Return the bound (host, port). Raises `OSError` if the address is not
        available."""
        listening = await listening_sockets(self._host, self._port, BACKLOG, is_shared=self._is_shared)
        address = listening[0].getsockname()
        accepting = listening if self._context is None else []
        self._task = asyncio.get_running_loop().create_task(
            self._server.serve(sockets=accepting), name="mansio-http"
        )
        while not self._server.started:
            if self._task.done():
                for each in listening:
                    each.close()
                self._task.result()
                raise RuntimeError("the HTTP server ended before it started")
            await asyncio.sleep(0)
        if self._context is not None:
            self._accept(listening, self._context)
        return address[0], address[1]

    def _accept(self, listening: list[socket.socket], context: Callable[[], ssl.SSLContext]) -> None:
        """Accept connections with TLS."""
        server = self._server

        def new_connection() -> asyncio.BaseProtocol:
            protocol: asyncio.BaseProtocol = cast("Any", server.config.http_protocol_class)(
                config=server.config, server_state=server.server_state, app_state=server.lifespan.state
            )
            return protocol

        loop = asyncio.get_running_loop()
        self._acceptor = TlsAcceptor(loop, new_connection, context, handshakes=self._handshakes)
        self._acceptor.listen(listening)

    async def stop(self) -> None:
        """Stop listening, wait at most `DRAIN_S_MAX` for responses in progress, and close all connections."""
        if self._acceptor is not None:
            await self._acceptor.stop()
            self._acceptor = None
        if self._task is not None:
            self._server.should_exit = True
            await self._task
            self._task = None
            await self._end_connections()

    async def _end_connections(self) -> None:
        """Close the connections whose clients do not confirm the end of TLS, or do not accept their response."""
        connections = self._server.server_state.connections
        for connection in tuple(connections):
            cast("HttpConnection", connection).end()
        for _ in range(END_TURNS_MAX):
            if not connections:
                break
            await asyncio.sleep(0)


def _config(app: Any, throttle: ConnectionThrottle | None) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=cast("Any", partial(HttpConnection, {}, throttle)),
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,  # any program on this machine could claim another address
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=DRAIN_S_MAX,
    )
