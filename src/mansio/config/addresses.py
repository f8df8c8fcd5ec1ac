"""Address on which a broker listens, or to which others connect: a host and a port, and its text form."""

from __future__ import annotations

from ipaddress import ip_address
from typing import Final, NamedTuple

from mansio.errors import ConfigError

WILDCARD_IPV4: Final = "0.0.0.0"  # noqa: S104  # refused as an address for clients of a cluster
WILDCARD_HOSTS: Final = ("", WILDCARD_IPV4, "::")
"""Hosts that mean all interfaces of a machine. The empty one is both IPv4 and IPv6."""


class Address(NamedTuple):
    """A host and a port. With port 0 the operating system assigns a free port."""

    host: str
    port: int

    @property
    def is_wildcard(self) -> bool:
        """Whether the host means all interfaces: an address to listen on, not one to connect to."""
        return self.host in WILDCARD_HOSTS

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


def parse_address(name: str, text: str) -> Address:
    """Parse `host:port` or `[ipv6]:port`. Raises `ConfigError` with the name of the setting."""
    found = find_address(text)
    if found is None or not found.host:
        raise ConfigError(f"{name}: {text!r} is not host:port")
    return found


def find_address(text: str) -> Address | None:
    """Parse `host:port`, `[ipv6]:port` or `:port`; return None for another text."""
    host, separator, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]") and len(host) > 2:
        host = host[1:-1]
    elif ":" in host or "[" in host or "]" in host:
        return None
    if not separator or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        return None
    return Address(host, int(port))


def is_loopback_host(host: str) -> bool:
    """Whether a listener on `host` accepts connections of this machine only. Other names than localhost may have any
    address, so they count as not."""
    if host == "localhost":
        return True
    try:
        return ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False
