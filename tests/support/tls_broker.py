"""A broker in this process with a listener that has TLS, whose certificates the test may renew, and one without."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from mansio.node.embedded import EmbeddedBroker
from support.present import present
from support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from mansio.net.tls.certificate_reloader import CertificateReloader
    from mansio.net.tls.contexts import TlsFiles

RENEWAL_S = 30


class TlsBroker:
    """An embedded broker with the listeners SSL and PLAINTEXT."""

    def __init__(self, broker: EmbeddedBroker) -> None:
        self.broker = broker
        self._node = present(broker._broker)
        self.server = self._node.server
        (self.acceptor,) = self.server.acceptors
        addresses = self._node.listener_addresses
        self.port = addresses["SSL"].port
        self.plaintext_port = addresses["PLAINTEXT"].port

    @property
    def address(self) -> str:
        return f"localhost:{self.port}"

    @property
    def certificates(self) -> CertificateReloader:
        return present(self._node.certificates)

    async def reload(self) -> None:
        """Let the broker read the files again. Runs on its event loop."""
        self._node.reload_certificates()

    def renew(self) -> None:
        """Let the broker read the files again, and wait until it uses them."""
        certificates = self.certificates
        before = certificates.reloads
        self.broker._call(self.reload(), RENEWAL_S)
        wait_until(lambda: certificates.reloads > before, RENEWAL_S, "the new certificates")


@contextmanager
def tls_broker(directory: Path, files: TlsFiles, **settings: Any) -> Iterator[TlsBroker]:
    security = {
        "ssl_certificate_location": files.certificate,
        "ssl_key_location": files.key,
        "ssl_ca_location": files.ca,
        "ssl_client_auth": files.client_authentication.value,
    }
    listeners = {
        "listeners": "SSL://localhost:0,PLAINTEXT://127.0.0.1:0",
        "inter_broker_listener_name": "SSL",
        "open_listeners": "PLAINTEXT",
    }
    with EmbeddedBroker(directory, **{**listeners, **security, **settings}) as broker:
        yield TlsBroker(broker)
