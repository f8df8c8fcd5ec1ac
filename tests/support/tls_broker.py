"""A broker in this process that clients reach through a TLS listener, whose certificates the test may renew."""

from __future__ import annotations

import socket
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from mansio.api.kafka.connections.connection import Connection
from mansio.net.tls.acceptor import TlsAcceptor
from mansio.net.tls.contexts import load_server_context
from mansio.node.embedded import EmbeddedBroker
from support.paths import free_port
from support.present import present

if TYPE_CHECKING:
    import ssl
    from collections.abc import Iterator
    from pathlib import Path

    from mansio.net.tls.contexts import TlsFiles


class TlsBroker:
    """An embedded broker with the acceptor in front of its Kafka server, which advertises the acceptor's address."""

    def __init__(self, broker: EmbeddedBroker, files: TlsFiles, port: int) -> None:
        self.broker = broker
        self.port = port
        self.context: ssl.SSLContext = load_server_context(files).context
        self.server = present(broker._broker).server
        self.acceptor = TlsAcceptor(
            present(broker._loop), lambda: Connection(self.server), lambda: self.context
        )

    @property
    def address(self) -> str:
        return f"localhost:{self.port}"

    @property
    def plaintext_port(self) -> int:
        return int(present(self.broker._broker).server._listening.sockets[0].getsockname()[1])  # type: ignore[union-attr]

    async def listen(self) -> None:
        self.acceptor.listen([socket.create_server(("127.0.0.1", self.port), backlog=1024)])


@contextmanager
def tls_broker(directory: Path, files: TlsFiles, **settings: Any) -> Iterator[TlsBroker]:
    port = free_port()
    with EmbeddedBroker(directory, advertised_listeners=f"localhost:{port}", **settings) as broker:
        tls = TlsBroker(broker, files, port)
        broker._call(tls.listen(), 30)
        try:
            yield tls
        finally:
            broker._call(tls.acceptor.stop(), 30)
