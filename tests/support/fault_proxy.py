"""Proxy on loopback with faults: lost bytes in one direction or both, closed or refused connections.

Owns one listening port and its connections; lives on the test's own loop. Always true: a connection that has lost bytes
is closed before bytes pass again, as on a network, where a stream has no holes.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

from support.paths import free_port

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

PIECE_BYTES = 1 << 16


class FaultProxy:
    """Passes everything on to `server_port` until it is set otherwise."""

    def __init__(self, server_port: int, source: str) -> None:
        self.port = free_port()
        self.server_port = server_port
        self._source = source
        self.connections = 0
        """How many there have been."""
        self._to_server = self._to_client = True
        self._refusing = False
        self._writers: set[asyncio.StreamWriter] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def silence(self) -> None:
        """Nothing comes through any more, and no connection ends."""
        self._to_server = self._to_client = False

    def lose_answers(self) -> None:
        """What clients send arrives; nothing comes back."""
        self._to_client = False

    def refuse(self) -> None:
        """All connections end, and new ones end at once."""
        self._refusing = True
        self.cut()

    def cut(self) -> None:
        """All connections end; new ones are passed on."""
        for writer in self._writers:
            writer.transport.abort()

    def pass_on(self) -> None:
        """All is well again, for new connections."""
        self._to_server = self._to_client = True
        self._refusing = False
        self.cut()

    async def connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        if self._refusing:
            writer.transport.abort()
            return
        from_server, to_server = await asyncio.open_connection(
            "127.0.0.1", self.server_port, local_addr=(self._source, 0)
        )
        both = {writer, to_server}
        self._writers |= both
        try:
            await asyncio.gather(
                self._pass(reader, to_server, "_to_server"), self._pass(from_server, writer, "_to_client")
            )
        finally:
            self._writers -= both
            for each in both:
                each.transport.abort()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, open_: str) -> None:
        with suppress(OSError):
            while piece := await reader.read(PIECE_BYTES):
                if getattr(self, open_):
                    writer.write(piece)
                    await writer.drain()
        writer.transport.abort()


@asynccontextmanager
async def fault_proxy(server_port: int, *, source: str = "127.0.0.1") -> AsyncIterator[FaultProxy]:
    """A running proxy, which connects to the server from `source`; all its connections end with it."""
    proxy = FaultProxy(server_port, source)
    tasks: set[asyncio.Task[None]] = set()

    def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(proxy.connection(reader, writer))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    server = await asyncio.start_server(accepted, "127.0.0.1", proxy.port)
    try:
        yield proxy
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)  # what was closed just now is let go in the loop's next turn
