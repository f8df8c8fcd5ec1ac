"""Parsers of the structured cluster settings: the URLs of etcd, and the members of an etcd that brokers run themselves.

Errors are `ConfigError`, one line that begins with the setting. Invariant: all brokers derive the same list of etcd
members from the same text, in the same order.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from mansio.config.addresses import is_loopback_host
from mansio.errors import ConfigError

PEER_PORT: Final = 2380
CLIENT_PORT: Final = 2379
MEMBERS_MAX: Final = 7
"""Limit on the etcd members of a cluster, as etcd recommends: each additional member makes writes slower."""

ENDPOINTS_MAX: Final = 16
_ENTRY: Final = re.compile(
    r"(?P<host>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]+)(:(?P<peer>\d{1,5}))?(/(?P<client>\d{1,5}))?"
)


@dataclass(frozen=True, slots=True, order=True)
class MemberAddress:
    """Host of one etcd member, with the port for the other members and the port for its clients."""

    host: str
    peer_port: int = PEER_PORT
    client_port: int = CLIENT_PORT

    @property
    def name(self) -> str:
        """The name under which the member is registered in etcd."""
        return re.sub(r"[^A-Za-z0-9.-]", "-", f"{self.host}-{self.peer_port}")

    def peer_url(self, scheme: str = "http") -> str:
        return f"{scheme}://{url_host(self.host)}:{self.peer_port}"

    def client_url(self, scheme: str = "http") -> str:
        return f"{scheme}://{url_host(self.host)}:{self.client_port}"

    def __str__(self) -> str:
        return f"{url_host(self.host)}:{self.peer_port}/{self.client_port}"


def url_host(host: str) -> str:
    """Return the host part of a URL: an IPv6 address gets brackets."""
    return f"[{host}]" if ":" in host else host


def parse_endpoints(text: str) -> tuple[str, ...]:
    """Parse the setting `etcd_endpoints`: URLs, without duplicates and trailing slashes. Raises `ConfigError`."""
    found = []
    for part in _parts(text):
        try:
            url = urlsplit(part)
            port = url.port or CLIENT_PORT
        except ValueError:
            url, port = urlsplit(""), 0
        bare = url.path in ("", "/") and not (url.query or url.fragment or url.username or url.password)
        if url.scheme not in ("http", "https") or not url.hostname or not bare:
            raise ConfigError(f"etcd_endpoints: {part!r} is not http://HOST:PORT or https://HOST:PORT")
        found.append(f"{url.scheme}://{url_host(url.hostname)}:{port}")
    if len({url.partition(":")[0] for url in found}) > 1:
        raise ConfigError("etcd_endpoints: some URLs are http and some https")
    if len(found) > ENDPOINTS_MAX:
        raise ConfigError(f"etcd_endpoints: {len(found)} URLs; the maximum is {ENDPOINTS_MAX}")
    return tuple(dict.fromkeys(found))


def parse_members(text: str) -> tuple[MemberAddress, ...]:
    """Parse the setting `etcd_join`: members, sorted. Raises `ConfigError`."""
    members = [parse_member("etcd_join", part) for part in _parts(text)]
    if len({member.name for member in members}) < len(members):
        raise ConfigError("etcd_join: two members have the same host and peer port")
    if len(members) > MEMBERS_MAX:
        raise ConfigError(f"etcd_join: {len(members)} members; the maximum is {MEMBERS_MAX}")
    return tuple(sorted(members))


def is_loopback(url: str) -> bool:
    """Whether the host of a URL is a loopback address."""
    return is_loopback_host(urlsplit(url).hostname or "")


def _parts(text: str) -> list[str]:
    return [part for part in (piece.strip() for piece in text.split(",")) if part]


def parse_member(name: str, text: str) -> MemberAddress:
    """Parse `text`, one etcd member in the setting `name`. Raises `ConfigError`."""
    found = _ENTRY.fullmatch(text)
    ports = (int(found["peer"] or PEER_PORT), int(found["client"] or CLIENT_PORT)) if found else (0, 0)
    if found is None or not all(0 < port < 65536 for port in ports) or ports[0] == ports[1]:
        raise ConfigError(f"{name}: {text!r} is not HOST, HOST:PEER_PORT or HOST:PEER_PORT/CLIENT_PORT")
    return MemberAddress(found["host"].strip("[]").lower(), *ports)
