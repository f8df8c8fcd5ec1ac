"""Settings of a protected start (`mansio serve --secure`): a broker alone, with TLS and log-ins on its Kafka listeners,
and with certificates that it makes itself. Pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from mansio.config.addresses import is_loopback_host, parse_address
from mansio.config.listeners import DEFAULT_PROTOCOL_MAP, SecurityProtocol, parse_listeners
from mansio.config.settings import default_of
from mansio.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

SECURITY_DIRECTORY: Final = "security"
"""Directory below the data directory with what a protected start makes."""
CA_FILE: Final = "ca.pem"
CERTIFICATE_FILE: Final = "broker.pem"

_MADE: Final = ("ssl_certificate_location", "ssl_key_location", "ssl_ca_location")
_PROTOCOL: Final = SecurityProtocol.SASL_SSL


def protected_values(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that a protected start changes, by name; `given` are those that have a value.

    Listeners without a security protocol get SASL_SSL. HTTP stays open on loopback, unless `open_listeners` is given.
    Raises `ConfigError` for settings that contradict it: of a cluster, other certificates, and a listener on all
    interfaces without an advertised address, which the certificate has to contain.
    """
    for name in ("etcd_endpoints", "etcd_join"):
        if given.get(name):
            raise ConfigError(
                f"{name}: --secure protects a single broker; the brokers of a cluster need certificates of one "
                "authority (ssl_certificate_location, ssl_key_location, ssl_ca_location)"
            )
    for name in _MADE:
        if given.get(name):
            raise ConfigError(f"{name}: --secure makes a certificate of its own; leave out one of the two")
    listeners = _named(given.get("listeners", default_of("listeners")))
    advertised = _named(given.get("advertised_listeners", ""))
    addresses = parse_listeners("listeners", listeners)
    for name, address in addresses.items():
        if address.is_wildcard and not advertised:
            raise ConfigError(
                f"advertised_listeners: {name} listens on all interfaces, and its certificate needs the address that "
                "clients connect to; use --advertise"
            )
    directory = f"{given.get('data_dir', default_of('data_dir'))}/{SECURITY_DIRECTORY}"
    changed = {
        "listeners": listeners,
        "ssl_certificate_location": f"{directory}/{CERTIFICATE_FILE}",
        "ssl_key_location": f"{directory}/{CERTIFICATE_FILE}",
        "ssl_ca_location": f"{directory}/{CA_FILE}",
    }
    if advertised:
        changed["advertised_listeners"] = advertised
    if "listener_security_protocol_map" not in given:
        others = [f"{name}:{_PROTOCOL}" for name in addresses if name not in SecurityProtocol.__members__]
        changed["listener_security_protocol_map"] = ",".join((DEFAULT_PROTOCOL_MAP, *others))
    http = given.get("http_listener", default_of("http_listener"))
    if "open_listeners" not in given and http and is_loopback_host(parse_address("http_listener", http).host):
        changed["open_listeners"] = "http"
    return changed


def _named(text: str) -> str:
    """Give the addresses of a list of listeners that have no name that of the protocol."""
    parts = (part.strip() for part in text.split(","))
    return ",".join(part if "://" in part else f"{_PROTOCOL}://{part}" for part in parts if part)
