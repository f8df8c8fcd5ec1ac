"""Dialler: opens connections to the listeners of other brokers, with TLS where the listener between brokers has it,
and with the handshake in which both brokers authenticate.

The certificate of the other broker has to be of an authority that this broker trusts, and to have the host that the
other one advertises. The handshake covers this certificate. A failure of TLS is logged with what is wrong and where to
change it, once in `LOG_INTERVAL_S` for each broker, and raised as `ConnectionLost`: requests to brokers are repeated.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from mansio.errors import ConnectionLost, TlsFailed
from mansio.logs import fields
from mansio.net.broker_handshake import authenticate
from mansio.net.connection import DEFAULT_OPTIONS, Connection, ConnectionOptions
from mansio.ports import ConnectOutcome
from mansio.wire.api_versions import UNADVERTISED_SINCE, ApiKey

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Mapping

    from mansio.net.broker_handshake import BrokerCredentials

logger = logging.getLogger(__name__)

UNORDERED_VERSION: Final = 1
"""Version of AuthenticateBroker that makes a connection unordered."""

LOG_INTERVAL_S: Final = 30.0

REMEDIES: Final = {
    "name": "issue the certificate for the host that the broker advertises on the listener between brokers",
    "certificate": "add the authority of that certificate to ssl_ca_location, or renew the certificate",
    "client certificate": "ssl_ca_location of that broker has to have the authority of this broker's certificate, and "
    "ssl_client_auth has to be the same on all brokers",
    "protocol": "the listener between brokers has to have the same security protocol on all brokers",
}
"""`TlsFailed.wrong` -> what to change."""

_NO_IPV6: Final = frozenset({errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, errno.ENETUNREACH})
"""`OSError.errno` of a connect to an IPv6 address from a host without IPv6. Of IPv4, EADDRNOTAVAIL also tells that all
ports are in use, and ENETUNREACH that a route is missing."""


class BrokerDialler:
    """Opens connections from one broker to others. All methods run on one event loop."""

    def __init__(
        self,
        credentials: BrokerCredentials | None = None,
        tls_context: Callable[[], ssl.SSLContext] | None = None,
    ) -> None:
        """Without `credentials` there is no handshake, and brokers accept only requests that any client may send.
        `tls_context` returns the context for a new connection; without it connections are not encrypted."""
        self.credentials = credentials
        self._tls_context = tls_context
        self._log_due: dict[int, float] = {}
        """Time of the event loop before which no failure of a broker is logged."""

    async def connect(
        self,
        node_id: int,
        address: tuple[str, int],
        options: ConnectionOptions = DEFAULT_OPTIONS,
        *,
        negotiated: Connection | None = None,
    ) -> Connection:
        """Open a connection to a broker on which neither has authenticated. `negotiated`: see `Connection.open`. Raises
        `ConnectionLost`."""
        if self._tls_context is not None:
            options = replace(options, tls=self._tls_context())
        try:
            return await Connection.open(*address, options, negotiated=negotiated)
        except TlsFailed as error:
            remedy = REMEDIES[error.wrong]
            self._log(node_id, address, error, remedy)
            raise ConnectionLost(f"broker {node_id}: {error.reason}; {remedy}") from error

    async def authenticate(self, connection: Connection, node_id: int, *, is_unordered: bool = False) -> int:
        """Authenticate with the broker at the other end; return the broker epoch with which this one did (0 without
        credentials). `is_unordered`: let responses overtake, if the broker supports it. Raises `ConnectionLost`, and
        closes the connection then."""
        if self.credentials is None:
            return 0
        is_unordered = is_unordered and UNADVERTISED_SINCE in connection.versions

        async def exchange(key: ApiKey, fields: Mapping[str, Any]) -> Any:
            version = UNORDERED_VERSION if is_unordered and key == ApiKey.AUTHENTICATE_BROKER else 0
            return await connection.request(key, fields, version=version)

        try:
            identity = self.credentials.identity()
            await authenticate(exchange, self.credentials, identity, node_id, connection.certificate_sha256)
        except BaseException:
            connection.abort()
            raise
        return identity.broker_epoch

    def _log(self, node_id: int, address: tuple[str, int], error: TlsFailed, remedy: str) -> None:
        now = asyncio.get_running_loop().time()
        if now < self._log_due.get(node_id, now):
            return
        self._log_due[node_id] = now + LOG_INTERVAL_S
        known = fields(
            broker=node_id,
            address=f"{address[0]}:{address[1]}",
            wrong=error.wrong,
            reason=error.reason,
            remedy=remedy,
        )
        logger.warning("broker_tls_failed", extra=known)


async def try_connect(host: str, port: int, *, timeout_ms: float) -> ConnectOutcome:
    """Connect to `host`, send nothing, and close the connection if it was accepted. A name with several addresses has
    refused if one of them has, and all others that this host can use."""
    loop = asyncio.get_running_loop()
    refused = False
    try:
        async with asyncio.timeout(timeout_ms / 1000):
            for family, kind, protocol, _, address in await loop.getaddrinfo(
                host, port, type=socket.SOCK_STREAM
            ):
                try:
                    with socket.socket(family, kind, protocol) as tried:
                        tried.setblocking(False)
                        await loop.sock_connect(tried, address)
                except ConnectionRefusedError:
                    refused = True
                except OSError as error:
                    if family != socket.AF_INET6 or error.errno not in _NO_IPV6:
                        return ConnectOutcome.UNKNOWN
                else:
                    return ConnectOutcome.ACCEPTED
    except OSError:  # also a timeout, and a name without an address
        return ConnectOutcome.UNKNOWN
    return ConnectOutcome.REFUSED if refused else ConnectOutcome.UNKNOWN
