"""Configuration of the etcd client: endpoints, certificates, user and password.

Invariants of an `EtcdConfig`: it has at least one endpoint, and all endpoints have the same scheme (http or https); its
text form (`repr`) contains no password.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from mansio.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

DEFAULT_PORT: Final = 2379
ENDPOINTS_MAX: Final = 32


@dataclass(frozen=True, slots=True)
class Certificates:
    """Certificates in PEM format. `ca` None: the certificate authorities of the system.

    `certificate` and `key` are those of the client; either both are set or none.
    """

    ca: bytes | None = None
    certificate: bytes | None = None
    key: bytes | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class EtcdConfig:
    """Configuration of an etcd client. `create` validates the settings and creates it."""

    endpoints: tuple[str, ...]
    """URLs of the form `http://host:port` or `https://host:port`."""
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    certificates: Certificates | None = None
    """Certificates for TLS; None: connections without TLS."""

    @classmethod
    def create(
        cls,
        endpoints: Sequence[str],
        *,
        user: str | None = None,
        password: str | None = None,
        ca_file: str | None = None,
        certificate_file: str | None = None,
        key_file: str | None = None,
    ) -> EtcdConfig:
        """Validate the settings and read the certificate files. Raises `ConfigError`."""
        if not 0 < len(endpoints) <= ENDPOINTS_MAX:
            raise ConfigError(f"1 to {ENDPOINTS_MAX} etcd endpoints are required, not {len(endpoints)}")
        if (user is None) != (password is None):
            raise ConfigError("etcd user and etcd password must be set together")
        if (certificate_file is None) != (key_file is None):
            raise ConfigError("the etcd client certificate and its key must be set together")
        checked = tuple(dict.fromkeys(_endpoint(text) for text in endpoints))
        schemes = {endpoint.partition(":")[0] for endpoint in checked}
        if len(schemes) > 1:
            raise ConfigError("the etcd endpoints must be either all http or all https")
        files = (ca_file, certificate_file, key_file)
        if schemes == {"http"}:
            if any(files):
                raise ConfigError("certificates require etcd endpoints with https")
            return cls(checked, user, password)
        return cls(checked, user, password, Certificates(*(_read(path) for path in files)))


def host_and_port(endpoint: str) -> str:
    """Return the `host:port` part of an endpoint's URL."""
    return endpoint.partition("://")[2]


def _endpoint(text: str) -> str:
    try:
        parts = urlsplit(text.strip())
        host, port = parts.hostname, parts.port or DEFAULT_PORT
    except ValueError as error:
        raise ConfigError(f"not an etcd endpoint: {text}: {error}") from error
    if parts.username is not None or parts.password is not None:
        raise ConfigError("an etcd endpoint must not contain a user or password; use the settings for them")
    if parts.scheme not in ("http", "https") or not host or parts.path.strip("/") or parts.query:
        raise ConfigError(f"not an etcd endpoint: {text} (expected http://host:port or https://host:port)")
    return f"{parts.scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def _read(path: str | None) -> bytes | None:
    if path is None:
        return None
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise ConfigError(f"cannot read {path}, a file in the etcd settings: {error.strerror}") from error
