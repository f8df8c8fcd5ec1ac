"""Configuration of the etcd client: endpoints, certificates, user and password.

Invariants of an `EtcdConfig`: it has at least one endpoint and all of them are of one kind (http or https); no
password is ever in its text form.
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
    """PEM. `ca` None: the certificate authorities of the system. `certificate` and `key` are given both or not at
    all."""

    ca: bytes | None = None
    certificate: bytes | None = None
    key: bytes | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class EtcdConfig:
    """Configuration of a client. Create it with `of`, which validates it."""

    endpoints: tuple[str, ...]
    """`http://host:port` or `https://host:port`, as shown to users."""
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    certificates: Certificates | None = None
    """None: without TLS."""

    @classmethod
    def of(
        cls,
        endpoints: Sequence[str],
        *,
        user: str | None = None,
        password: str | None = None,
        ca_file: str | None = None,
        certificate_file: str | None = None,
        key_file: str | None = None,
    ) -> EtcdConfig:
        """Validate the settings and read the files. Raises `ConfigError`."""
        if not 0 < len(endpoints) <= ENDPOINTS_MAX:
            raise ConfigError(f"etcd wants between 1 and {ENDPOINTS_MAX} endpoints, not {len(endpoints)}")
        if (user is None) != (password is None):
            raise ConfigError("etcd's user and password come together")
        if (certificate_file is None) != (key_file is None):
            raise ConfigError("etcd's client certificate and its key come together")
        checked = tuple(dict.fromkeys(_endpoint(text) for text in endpoints))
        schemes = {endpoint.partition(":")[0] for endpoint in checked}
        if len(schemes) > 1:
            raise ConfigError("etcd's endpoints are either all http or all https")
        files = (ca_file, certificate_file, key_file)
        if schemes == {"http"}:
            if any(files):
                raise ConfigError("certificates are for etcd endpoints with https")
            return cls(checked, user, password)
        return cls(checked, user, password, Certificates(*(_read(path) for path in files)))


def target(endpoint: str) -> str:
    """`host:port` of an endpoint."""
    return endpoint.partition("://")[2]


def _endpoint(text: str) -> str:
    try:
        parts = urlsplit(text.strip())
        host, port = parts.hostname, parts.port or DEFAULT_PORT
    except ValueError as error:
        raise ConfigError(f"not an etcd endpoint: {text}: {error}") from error
    if parts.username is not None or parts.password is not None:
        raise ConfigError("an etcd endpoint holds no user and no password; they are settings of their own")
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
        raise ConfigError(f"cannot read {path}, which etcd's settings name: {error.strerror}") from error
