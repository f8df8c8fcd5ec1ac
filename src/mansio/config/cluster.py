"""Settings of a cluster that are more than a word or a number: etcd's URLs, and the members brokers run themselves.

Owns how `etcd` and `etcd_join` are written, which entry of `etcd_join` is a broker's own, and what settings of a
cluster go together. Raises `ConfigError`, one line that begins with the setting, for whatever does not.

Always true: of an own member, everybody derives the same list of all members from the same text, in the same order.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from mansio.errors import ConfigError

if TYPE_CHECKING:
    from mansio.config.settings import Settings

PEER_PORT: Final = 2380
CLIENT_PORT: Final = 2379
MEMBERS_MAX: Final = 7
"""What etcd recommends: each member more makes every write slower."""

ENDPOINTS_MAX: Final = 16
WILDCARD_HOSTS: Final = ("0.0.0.0", "::")  # noqa: S104  # refused, not listened on
_ENTRY: Final = re.compile(
    r"(?P<host>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]+)(:(?P<peer>\d{1,5}))?(/(?P<client>\d{1,5}))?"
)


@dataclass(frozen=True, slots=True, order=True)
class MemberAddress:
    """Where one member of etcd is: for the other members, and for its clients."""

    host: str
    peer_port: int = PEER_PORT
    client_port: int = CLIENT_PORT

    @property
    def name(self) -> str:
        """What etcd calls it."""
        return re.sub(r"[^A-Za-z0-9.-]", "-", f"{self.host}-{self.peer_port}")

    def peer_url(self, scheme: str = "http") -> str:
        return f"{scheme}://{url_host(self.host)}:{self.peer_port}"

    def client_url(self, scheme: str = "http") -> str:
        return f"{scheme}://{url_host(self.host)}:{self.client_port}"

    def __str__(self) -> str:
        return f"{url_host(self.host)}:{self.peer_port}/{self.client_port}"


def url_host(host: str) -> str:
    """A host as it stands in a URL."""
    return f"[{host}]" if ":" in host else host


def parse_endpoints(text: str) -> tuple[str, ...]:
    """The URLs in the setting `etcd`, each once, without a slash at their ends."""
    found = []
    for part in _parts(text):
        try:
            url = urlsplit(part)
            port = url.port or CLIENT_PORT
        except ValueError:
            url, port = urlsplit(""), 0
        bare = url.path in ("", "/") and not (url.query or url.fragment or url.username or url.password)
        if url.scheme not in ("http", "https") or not url.hostname or not bare:
            raise ConfigError(f"etcd: {part!r} is not http://HOST:PORT or https://HOST:PORT")
        found.append(f"{url.scheme}://{url_host(url.hostname)}:{port}")
    if len({url.partition(":")[0] for url in found}) > 1:
        raise ConfigError("etcd: some URLs are http and some https")
    if len(found) > ENDPOINTS_MAX:
        raise ConfigError(f"etcd: {len(found)} URLs; {ENDPOINTS_MAX} are enough to reach any etcd")
    return tuple(dict.fromkeys(found))


def parse_members(text: str) -> tuple[MemberAddress, ...]:
    """The members in the setting `etcd_join`, in one order for everybody."""
    members = [_member("etcd_join", part) for part in _parts(text)]
    if len({member.name for member in members}) < len(members):
        raise ConfigError("etcd_join: two members have the same host and peer port")
    if len(members) > MEMBERS_MAX:
        raise ConfigError(f"etcd_join: {len(members)} members; etcd works with at most {MEMBERS_MAX}")
    return tuple(sorted(members))


def own_member(settings: Settings) -> MemberAddress:
    """The entry of `etcd_join` that this broker starts."""
    members = parse_members(settings.etcd_join)
    if settings.etcd_member:
        wanted = _member("etcd_member", settings.etcd_member)
        mine = [one for one in members if (one.host, one.peer_port) == (wanted.host, wanted.peer_port)]
        if not mine:
            raise ConfigError(f"etcd_member: {settings.etcd_member} is not in etcd_join")
        return mine[0]
    host = (settings.advertised_address or settings.listener_address).host.lower()
    mine = [one for one in members if one.host == host]
    if len(mine) == 1:
        return mine[0]
    if mine:
        raise ConfigError(
            f"etcd_join: {len(mine)} members are on {host}; say with etcd_member which is this one"
        )
    urls = ",".join(one.client_url() for one in members)
    raise ConfigError(
        f"etcd_join: none of its members is on {host}, which clients are told "
        f"(advertised_listeners); set etcd_member, or "
        f"etcd={urls} to use those members and run none here"
    )


def scheme(settings: Settings) -> str:
    """How the own member and its peers are spoken to: https as soon as there is a certificate."""
    return "https" if settings.etcd_cert_file else "http"


def endpoints(settings: Settings) -> tuple[str, ...]:
    """See `Settings.etcd_urls`."""
    if settings.etcd:
        return parse_endpoints(settings.etcd)
    if not settings.etcd_join:
        return ()
    own = own_member(settings)
    others = [one for one in parse_members(settings.etcd_join) if one != own]
    return tuple(one.client_url(scheme(settings)) for one in (own, *others))


def check(settings: Settings) -> None:
    """Raise what is wrong with the settings of a cluster taken together."""
    if not settings.clustered:
        _check_alone(settings)
        return
    if settings.etcd and settings.etcd_join:
        raise ConfigError(
            "etcd_join: etcd is given too; it is either an etcd of yours or one of the brokers' own"
        )
    _check_advertised(settings)
    if bool(settings.etcd_user) != bool(settings.etcd_password_file):
        raise ConfigError("etcd_user: give it together with etcd_password_file")
    if bool(settings.etcd_cert_file) != bool(settings.etcd_key_file):
        raise ConfigError("etcd_cert_file: give it together with etcd_key_file")
    if settings.etcd:
        _check_endpoints(settings)
    else:
        _check_own_member(settings)


def _check_alone(settings: Settings) -> None:
    for name in (
        "etcd_user",
        "etcd_password_file",
        "etcd_ca_file",
        "etcd_cert_file",
        "etcd_key_file",
        "etcd_member",
    ):
        if getattr(settings, name):
            raise ConfigError(f"{name}: it means something only with etcd or etcd_join")


def _check_advertised(settings: Settings) -> None:
    address = settings.advertised_address or settings.listener_address
    if address.host in WILDCARD_HOSTS:
        raise ConfigError(
            f"advertised_listeners: nobody can connect to {address.host}; "
            f"give the address of this broker that the others "
            "and the clients reach"
        )
    if settings.advertised_address is not None and address.port == 0:
        raise ConfigError("advertised_listeners: nobody can connect to port 0")


def _check_endpoints(settings: Settings) -> None:
    urls = parse_endpoints(settings.etcd)
    if not urls:
        raise ConfigError("etcd: no URL in it")
    if settings.etcd_member:
        raise ConfigError("etcd_member: it belongs to etcd_join")
    secure = urls[0].startswith("https:")
    for name in ("etcd_ca_file", "etcd_cert_file"):
        if getattr(settings, name) and not secure:
            raise ConfigError(f"{name}: the URLs of etcd are not https")
    if settings.etcd_user and not secure and not all(_is_loopback(url) for url in urls):
        raise ConfigError(
            "etcd_user: its password would cross the network in the clear; use https URLs in etcd"
        )


def _check_own_member(settings: Settings) -> None:
    own_member(settings)
    if settings.etcd_user:
        raise ConfigError("etcd_user: members that brokers run themselves know no users; use certificates")
    if bool(settings.etcd_ca_file) != bool(settings.etcd_cert_file):
        raise ConfigError(
            "etcd_ca_file: an own member needs etcd_cert_file, etcd_key_file and etcd_ca_file, or none"
        )


def _is_loopback(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    return host == "localhost" or host == "::1" or host.startswith("127.")


def _parts(text: str) -> list[str]:
    return [part for part in (piece.strip() for piece in text.split(",")) if part]


def _member(name: str, text: str) -> MemberAddress:
    found = _ENTRY.fullmatch(text)
    ports = (int(found["peer"] or PEER_PORT), int(found["client"] or CLIENT_PORT)) if found else (0, 0)
    if found is None or not all(0 < port < 65536 for port in ports) or ports[0] == ports[1]:
        raise ConfigError(f"{name}: {text!r} is not HOST, HOST:PEER_PORT or HOST:PEER_PORT/CLIENT_PORT")
    return MemberAddress(found["host"].strip("[]").lower(), *ports)
