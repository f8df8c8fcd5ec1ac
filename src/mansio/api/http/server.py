"""Serves an ASGI application on a loop that belongs to somebody else.

uvicorn does the HTTP; it gets no loop of its own, no signals, no logging set-up and no right to end the process.

Always true: after `start` returned the port accepts; after `stop` returned nothing of it is left. A port
that cannot be had raises `OSError` from `start`, with the address in its message.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import TYPE_CHECKING, Any

import uvicorn

if TYPE_CHECKING:
    from collections.abc import Iterator

CONNECTIONS_MAX = 1_000
KEEP_ALIVE_S = 30
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
        http="h11",
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        limit_concurrency=CONNECTIONS_MAX,
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
