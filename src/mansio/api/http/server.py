"""Serves an ASGI application on a loop that belongs to somebody else.

uvicorn does the HTTP; it gets no loop of its own, no signals, no logging set-up and no right to end the process. What
it would leave open for ever ends here: connections that send no request, or half of one, or do not take their answer.

Always true: after `start` returned the port accepts; after `stop` returned nothing of it is left. A port that cannot be
had raises `OSError` from `start`, with the address in its message. A probe gets its answer however many connections
others keep open: there are at most `CONNECTIONS_MAX`, and when another comes, the one answered longest ago ends.
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
UNANSWERED_S_MAX = 40.0
"""A connection without a whole answer for so long ends, whatever it waits for."""
DRAIN_S_MAX = 2
HEADER_BYTES_MAX = 64 * 1024
BACKLOG = 128


class _Uvicorn(uvicorn.Server):
    """uvicorn without signal handlers: SIGTERM belongs to `mansio serve`, or to the program that embeds
    us.
    """

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _HttpConnection(H11Protocol):
    """One connection. `doors` are all of a server, the one that was answered longest ago first."""

    def __init__(self, doors: dict[_HttpConnection, None], **uvicorns: Any) -> None:
        super().__init__(**uvicorns)
        self._connections = doors
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        if len(self._connections) >= CONNECTIONS_MAX:
            quietest = next(iter(self._connections))
            self.logger.warning("Too many connections: the one that was answered longest ago ends.")
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
        """Now; what the peer has not taken yet is thrown away."""
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
    """One listening socket and what answers on it. Every method on the loop."""

    def __init__(self, app: Any, host: str, port: int) -> None:
        """`app` is any ASGI 3 application; port 0 takes a free one."""
        self._host = host
        self._port = port
        self._server = _Uvicorn(_config(app))
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> tuple[str, int]:
        """Listen. Returns the (host, port) that accepts now. Raises `OSError` when the address cannot
        be had.
        """
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
        """Stop listening, let answers in progress finish for at most `DRAIN_S_MAX` seconds, close
        everything.
        """
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
