"""Named listeners of the Kafka protocol: the settings `listeners`, `advertised_listeners`,
`listener_security_protocol_map` and `inter_broker_listener_name`, as Kafka reads them (KIP-103, KIP-291, KIP-797).

A listener is an address on which a broker accepts connections. Its name connects the settings; clients of a listener
get the addresses that brokers advertise for it. `listeners` and `advertised_listeners` are lists, separated by commas,
of `NAME://host:port`, or of `host:port` for the listener PLAINTEXT. An empty host means all interfaces, IPv4 and IPv6.

Invariants of the result of `resolve_listeners`, of which each violation is a `ConfigError`, one line that begins with
the setting:
* Names are distinct, in capitals. Ports are distinct, but for port 0, and for one IPv4 and one IPv6 address.
* An advertised address is one that others can connect to: neither a wildcard host nor port 0.
* The inter-broker listener is one of the listeners, and is advertised.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from mansio.config.addresses import Address, find_address
from mansio.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

LISTENERS_MAX: Final = 16
DEFAULT_LISTENER: Final = "PLAINTEXT"
"""Name of a listener without a name, and of the inter-broker listener if no other one is set."""

_NAME: Final = re.compile(r"[A-Za-z0-9_-]+")
_HOST: Final = re.compile(r"[A-Za-z0-9._:%-]*")


class SecurityProtocol(StrEnum):
    """Security protocol of a listener: how its connections are encrypted, and how their clients authenticate."""

    PLAINTEXT = "PLAINTEXT"
    SSL = "SSL"
    SASL_PLAINTEXT = "SASL_PLAINTEXT"
    SASL_SSL = "SASL_SSL"

    @property
    def is_encrypted(self) -> bool:
        """Whether connections use TLS."""
        return self in (SecurityProtocol.SSL, SecurityProtocol.SASL_SSL)

    @property
    def is_authenticated(self) -> bool:
        """Whether clients authenticate with SASL."""
        return self in (SecurityProtocol.SASL_PLAINTEXT, SecurityProtocol.SASL_SSL)


DEFAULT_PROTOCOL_MAP: Final = ",".join(f"{each}:{each}" for each in SecurityProtocol)
"""As in Kafka: the names of the protocols are listeners with that protocol."""


@dataclass(frozen=True, slots=True)
class Listener:
    """One listener. `address`: where it accepts connections. `advertised`: the address that `advertised_listeners` has
    for it; None: its own address. `is_advertised`: whether brokers and clients get an address of it at all."""

    name: str
    address: Address
    advertised: Address | None = None
    security_protocol: SecurityProtocol = SecurityProtocol.PLAINTEXT
    is_advertised: bool = True

    @property
    def advertised_address(self) -> Address:
        """Address for clients and other brokers; its port is 0 if the operating system assigns one."""
        return self.advertised or self.address


@dataclass(frozen=True, slots=True)
class Listeners:
    """The listeners of a broker, in the order of the setting, and that through which brokers reach each other."""

    all: tuple[Listener, ...]
    inter_broker: Listener


def parse_listeners(setting: str, text: str) -> dict[str, Address]:
    """Parse a list of listeners: addresses by name, in order. Raises `ConfigError` that begins with `setting`."""
    found: dict[str, Address] = {}
    for part in _parts(text) or [text]:
        name, address = _parse_listener(setting, part)
        if name in found:
            raise ConfigError(f"{setting}: two listeners have the name {name}")
        found[name] = address
    if len(found) > LISTENERS_MAX:
        raise ConfigError(f"{setting}: {len(found)} listeners; the maximum is {LISTENERS_MAX}")
    return found


def format_listeners(addresses: Mapping[str, Address]) -> str:
    """Return the text form of listeners, which `parse_listeners` reads."""
    return ",".join(f"{name}://{address}" for name, address in addresses.items())


def parse_protocol_map(text: str) -> dict[str, SecurityProtocol]:
    """Parse the setting `listener_security_protocol_map`: protocols by name of a listener. Raises `ConfigError`."""
    found: dict[str, SecurityProtocol] = {}
    for part in _parts(text):
        name, _, protocol = part.partition(":")
        name, protocol = name.strip().upper(), protocol.strip().upper()
        if _NAME.fullmatch(name) is None:
            raise ConfigError(f"listener_security_protocol_map: {part!r} is not NAME:PROTOCOL")
        if protocol not in SecurityProtocol.__members__:
            known = ", ".join(SecurityProtocol)
            raise ConfigError(f"listener_security_protocol_map: {part!r}: the protocol is not one of {known}")
        if name in found:
            raise ConfigError(f"listener_security_protocol_map: it contains {name} twice")
        found[name] = SecurityProtocol(protocol)
    return found


def resolve_listeners(
    listeners: str, advertised_listeners: str, protocol_map: str, inter_broker_name: str
) -> Listeners:
    """Return the listeners that the four settings define. Raises `ConfigError`."""
    addresses = parse_listeners("listeners", listeners)
    _check_ports(addresses)
    advertised = _parse_advertised(advertised_listeners, addresses)
    protocols = parse_protocol_map(protocol_map)
    found = tuple(
        Listener(
            name,
            address,
            advertised.get(name),
            _protocol_of(name, protocols),
            is_advertised=not advertised or name in advertised,
        )
        for name, address in addresses.items()
    )
    return Listeners(found, _inter_broker_listener(found, inter_broker_name))


def _parse_listener(setting: str, text: str) -> tuple[str, Address]:
    name, separator, rest = text.partition("://")
    address = find_address(rest if separator else text)
    if not separator:
        if address is None or not address.host or not _HOST.fullmatch(address.host):
            raise ConfigError(f"{setting}: {text!r} is not host:port")
        return DEFAULT_LISTENER, address
    if address is None or not _HOST.fullmatch(address.host):
        raise ConfigError(f"{setting}: {text!r} is not NAME://host:port")
    if _NAME.fullmatch(name) is None:
        raise ConfigError(f"{setting}: {name!r} is not a name of letters, digits, '_' and '-'")
    return name.upper(), address


def _parts(text: str) -> list[str]:
    return [part for part in (piece.strip() for piece in text.split(",")) if part]


def _check_ports(addresses: Mapping[str, Address]) -> None:
    by_port: defaultdict[int, list[Address]] = defaultdict(list)
    for address in addresses.values():
        if address.port:
            by_port[address.port].append(address)
    for port, same in by_port.items():
        if len(same) > 1 and sorted(map(_ip_version, same)) != [4, 6]:
            raise ConfigError(
                f"listeners: {len(same)} listeners have port {port}; only an IPv4 and an IPv6 address can share one"
            )


def _ip_version(address: Address) -> int:
    """Return 4 or 6 for an IP address, 0 for a name and the empty host."""
    import ipaddress  # only for listeners with the same port

    try:
        return ipaddress.ip_address(address.host).version
    except ValueError:
        return 0


def _parse_advertised(text: str, addresses: Mapping[str, Address]) -> dict[str, Address]:
    if not text:
        return {}
    advertised = parse_listeners("advertised_listeners", text)
    for name, address in advertised.items():
        if name not in addresses:
            raise ConfigError(
                f"advertised_listeners: {name} is not in listeners, which has {', '.join(addresses)}"
            )
        if address.is_wildcard:
            raise ConfigError(
                f"advertised_listeners: {address.host or 'an empty host'} is no address to connect to; set the address "
                "of this broker that clients and other brokers can reach"
            )
        if address.port == 0:
            raise ConfigError("advertised_listeners: port 0 is no port to connect to")
    return advertised


def _protocol_of(name: str, protocols: Mapping[str, SecurityProtocol]) -> SecurityProtocol:
    protocol = protocols.get(name)
    if protocol is None:
        raise ConfigError(
            f"listener_security_protocol_map: it has no protocol for the listener {name}; add {name}:PLAINTEXT"
        )
    return protocol


def _inter_broker_listener(listeners: Sequence[Listener], name: str) -> Listener:
    advertised = {each.name: each for each in listeners if each.is_advertised}
    if not name:
        return advertised.get(DEFAULT_LISTENER) or next(iter(advertised.values()))
    if (found := advertised.get(name.upper())) is not None:
        return found
    raise ConfigError(f"inter_broker_listener_name: {name} is not {_one_of(advertised)}")


def _one_of(names: Iterable[str]) -> str:
    found = list(names)
    return found[0] if len(found) == 1 else f"one of the advertised listeners, {', '.join(found)}"
