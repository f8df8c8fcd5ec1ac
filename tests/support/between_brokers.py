"""What is between two brokers: it passes bytes on and keeps them, or ends their TLS and speaks to each for the other.

Owns one listening port of loopback and its connections, on a thread of its own. Always true: `seen` has everything that
was passed on, in the order in which it came; a relay has the bytes inside TLS, whoever only passes on those outside.
"""

from __future__ import annotations

import asyncio
import ssl
from contextlib import suppress
from typing import TYPE_CHECKING, Self

from mansio.net.blocking import LoopThread
from mansio.wire.api_versions import ApiKey

if TYPE_CHECKING:
    from collections.abc import Callable

    from support.certificates import Authority, Certificate

PIECE_BYTES = 1 << 16
STOP_S = 30.0
HOST = "127.0.0.1"


class BetweenBrokers:
    """Use as `with`. `port` is what the broker on `target_port` advertises."""

    def __init__(self, port: int, target_port: int) -> None:
        self.port = port
        self.target_port = target_port
        self.seen = bytearray()
        self.relayed: list[int] = []
        """API keys of the requests that a relay has passed on."""
        self._inject: Callable[[], bytes] | None = None
        self._server_context: ssl.SSLContext | None = None
        self._client_context: ssl.SSLContext | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._thread = LoopThread("between brokers")
        self._server: asyncio.Server | None = None

    def relay(
        self,
        authority: Authority,
        own: Certificate | None = None,
        inject: Callable[[], bytes] | None = None,
    ) -> None:
        """End TLS on all connections from now on, with the certificate `own`, by default a valid one of the authority
        of the brokers. `inject`: returns a request that is sent to the broker after that with which the dialler
        authenticates."""
        own = own or authority.issue("relay")
        self._server_context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._server_context.load_cert_chain(own.certificate, own.key)
        self._client_context = ssl.create_default_context(cafile=str(authority.certificate))
        self._client_context.load_cert_chain(own.certificate, own.key)
        self._inject = inject
        self.cut()

    def pass_on(self) -> None:
        """Only pass bytes on, on all connections from now on."""
        self._server_context = self._client_context = self._inject = None
        self.cut()

    def cut(self) -> None:
        """End all connections."""

        async def cut() -> None:
            for writer in self._writers:
                writer.transport.abort()
            if self._server is not None:
                await self._restart()

        self._thread.run(cut())

    def __enter__(self) -> Self:
        self._thread.run(self._restart())
        return self

    def __exit__(self, *_: object) -> None:
        async def stop() -> None:
            if self._server is not None:
                self._server.close()
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.sleep(0)

        self._thread.run(stop())
        self._thread.close()

    async def _restart(self) -> None:
        if self._server is not None:
            self._server.close()
        self._server = await asyncio.start_server(
            self._connection, HOST, self.port, ssl=self._server_context, reuse_address=True
        )

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        to_broker: asyncio.StreamWriter | None = None
        try:
            from_broker, to_broker = await asyncio.open_connection(
                HOST, self.target_port, ssl=self._client_context
            )
            self._writers.add(to_broker)
            requests = self._requests if self._client_context is not None else self._pass
            await asyncio.gather(requests(reader, to_broker), self._pass(from_broker, writer))
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            for each in (writer, to_broker):
                if each is not None:
                    self._writers.discard(each)
                    each.transport.abort()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while piece := await reader.read(PIECE_BYTES):
                self.seen += piece
                writer.write(piece)
                await writer.drain()
        writer.transport.abort()

    async def _requests(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            length = await reader.readexactly(4)
            frame = await reader.readexactly(int.from_bytes(length))
            self.relayed.append(int.from_bytes(frame[:2]))
            writer.write(length + frame)
            if self._inject is not None and self.relayed[-1] == ApiKey.AUTHENTICATE_BROKER:
                writer.write(self._inject())
            await writer.drain()
