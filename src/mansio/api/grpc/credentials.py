"""Credentials of the gRPC listener with TLS, which gRPC asks for at each handshake.

gRPC has a TLS implementation of its own and takes PEM files, not contexts. It gets the files with which the broker's
other listeners have a context now: after they were checked, and only while they are the same.

Invariant: the certificate that clients get is one that `CertificateReloader` has accepted.
"""

from __future__ import annotations

import logging
import ssl
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc

from mansio.errors import ConfigError
from mansio.logs import fields
from mansio.net.tls.contexts import ClientAuthentication

if TYPE_CHECKING:
    from mansio.net.tls.certificate_reloader import CertificateReloader
    from mansio.net.tls.contexts import ServerContext

logger = logging.getLogger(__name__)

_END = "-----END CERTIFICATE-----"


class CertificateSource:
    """Certificates for the handshakes of one listener. `__call__` runs on threads of gRPC."""

    def __init__(self, certificates: CertificateReloader, *, log_ins: bool) -> None:
        """`log_ins`: whether clients log in; they are not asked for certificates then (KIP-684)."""
        self._certificates = certificates
        self._log_ins = log_ins
        self._used: ServerContext | None = None

    def credentials(self) -> Any:
        """Return the credentials of a server. Raises `ConfigError` if the files have changed meanwhile."""
        first = self()
        if first is None:
            raise ConfigError(f"{self._certificates.files.certificate} is being changed; start again")
        asked = self._certificates.files.client_authentication
        is_required = asked is ClientAuthentication.REQUIRED and not self._log_ins
        return grpc.dynamic_ssl_server_credentials(first, self, is_required)

    def __call__(self) -> Any:
        """Return the certificates for a handshake; None: those of the one before."""
        present = self._certificates.server_context
        if present is self._used:
            return None
        files = self._certificates.files
        try:
            chain, key = Path(files.certificate).read_bytes(), Path(files.key).read_bytes()
            authorities = Path(files.ca).read_bytes() if files.ca else None
        except OSError as error:
            logger.warning("tls_certificate_not_renewed", extra=fields(reason=error.strerror))
            return None
        if _digest(chain) != present.certificate_sha256:
            return None  # newer than what was checked
        self._used = present
        return grpc.ssl_server_certificate_configuration([(key, chain)], authorities)


def _digest(chain: bytes) -> bytes:
    """Return the SHA-256 of the first certificate of a PEM file."""
    text = chain.decode("ascii", "replace")
    first = text[max(text.find("-----BEGIN CERTIFICATE-----"), 0) :].partition(_END)[0] + _END
    try:
        return sha256(ssl.PEM_cert_to_DER_cert(first)).digest()
    except ValueError:
        return b""
