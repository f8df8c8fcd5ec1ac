"""A TLS listener of its own event loop and thread, whose connections echo what they receive, and blocking clients."""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
from typing import TYPE_CHECKING, Any, Final, Self, cast

from mansio.host.asyncio_loop import new_event_loop
from mansio.net.tls.acceptor import TlsAcceptor
from mansio.net.tls.contexts import ClientAuthentication, TlsFiles, load_client_context, load_server_context
from mansio.net.tls.handshakes import HandshakeRunner
from support.machine import scaled

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from mansio.state.handshake_admission import HandshakeAdmission
    from support.certificates import Authority, Certificate

LOOPS: Final = {"uvloop": new_event_loop, "asyncio": asyncio.SelectorEventLoop}
CLIENT_TIMEOUT_S: Final = 30


def tls_files(
    issued: Certificate, authority: Authority | None = None, client_authentication: str = "none"
) -> TlsFiles:
    ca = "" if authority is None else str(authority.certificate)
    return TlsFiles(str(issued.certificate), str(issued.key), ca, ClientAuthentication(client_authentication))


def server_context(
    issued: Certificate, authority: Authority | None = None, client_authentication: str = "none"
) -> ssl.SSLContext:
    return load_server_context(tls_files(issued, authority, client_authentication)).context


def client_context(ca: Path, issued: Certificate | None = None) -> ssl.SSLContext:
    if issued is None:
        return load_client_context(str(ca))
    return load_client_context(str(ca), str(issued.certificate), str(issued.key))


class EchoProtocol(asyncio.Protocol):
    """Sends back what it receives."""

    def __init__(self, listener: TlsListener) -> None:
        self._listener = listener

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self._listener.open.add(self)

    def data_received(self, data: bytes) -> None:
        self.transport.write(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._listener.open.discard(self)


class TlsListener:
    """The acceptor with echoing connections. `context` may be assigned while it runs."""

    def __init__(
        self,
        context: ssl.SSLContext,
        *,
        loop: str = "uvloop",
        new_admission: Callable[[], HandshakeAdmission[Any]] | None = None,
    ) -> None:
        self.context = context
        self.open: set[EchoProtocol] = set()
        self.loop = LOOPS[loop]()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.handshakes = HandshakeRunner(
            self.loop, admission=None if new_admission is None else new_admission()
        )
        self.acceptor = TlsAcceptor(
            self.loop, lambda: EchoProtocol(self), lambda: self.context, handshakes=self.handshakes
        )
        self.port = 0

    def __enter__(self) -> Self:
        self._thread.start()
        listening = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.port = listening.getsockname()[1]
        self.run(self._listen(listening))
        return self

    def __exit__(self, *_: object) -> None:
        self.run(self._stop())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    def run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(scaled(60))

    async def _listen(self, listening: socket.socket) -> None:
        self.acceptor.listen([listening])

    async def _stop(self) -> None:
        await self.acceptor.stop()
        for connection in tuple(self.open):
            connection.transport.abort()
        while self.open:  # noqa: ASYNC110 - two turns of the loop
            await asyncio.sleep(0)

    def failures(self) -> dict[str, int]:
        """Failed handshakes by reason."""
        return {str(reason): count for reason, count in self.acceptor.failed.items() if count}

    def connect_plain(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=scaled(CLIENT_TIMEOUT_S))

    def connect_from(self, host: str) -> socket.socket:
        """Connect from another address of loopback."""
        address = ("127.0.0.1", self.port)
        return socket.create_connection(address, timeout=scaled(CLIENT_TIMEOUT_S), source_address=(host, 0))

    def connect(self, context: ssl.SSLContext, *, session: ssl.SSLSession | None = None) -> ssl.SSLSocket:
        """Connect as the name `localhost`. Raises `ssl.SSLError`, `OSError`."""
        plain = self.connect_plain()
        try:
            return context.wrap_socket(plain, server_hostname="localhost", session=session)
        except BaseException:
            plain.close()
            raise


def echoes(client: socket.socket, data: bytes = b"hello") -> bool:
    """Whether the listener answers with the same bytes."""
    client.sendall(data)
    received = b""
    while len(received) < len(data):
        piece = client.recv(1 << 16)
        if not piece:
            return False
        received += piece
    return received == data


def is_refused(listener: TlsListener, context: ssl.SSLContext) -> bool:
    """Whether the listener ends the connection of a client, at its handshake or, under TLS 1.3, after it."""
    try:
        with listener.connect(context) as client:
            return not echoes(client)
    except (ssl.SSLError, ConnectionError):
        return True
