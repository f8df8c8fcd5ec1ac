"""Settings of a protected start: TLS, log-ins and access control lists, with certificates that Mansio makes itself.

Of a broker alone (`mansio serve --secure`), and of the brokers of a cluster (`mansio dev-cluster --secure`). Pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from mansio.config.addresses import is_loopback_host, parse_address
from mansio.config.listeners import (
    DEFAULT_PROTOCOL_MAP,
    SecurityProtocol,
    parse_listeners,
    parse_protocol_map,
)
from mansio.config.settings import default_of
from mansio.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

SECURITY_DIRECTORY: Final = "security"
"""Directory below the data directory with what a protected start makes."""
CA_FILE: Final = "ca.pem"
CERTIFICATE_FILE: Final = "broker.pem"
SECRETS_KEY_FILE: Final = "secrets.key"

FIRST_USER: Final = "admin"
"""User that a protected start creates, and the only super user unless others are given."""

_AUTHORIZER: Final = "acl"
_MADE: Final = ("ssl_certificate_location", "ssl_key_location", "ssl_ca_location")
_MADE_OF_ETCD: Final = ("etcd_ca_file", "etcd_cert_file", "etcd_key_file")
_PROTOCOL: Final = SecurityProtocol.SASL_SSL


def protected_values(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that a protected start changes, by name; `given` are those that have a value.

    Listeners without a security protocol get SASL_SSL. HTTP stays open on loopback, unless `open_listeners` is given.
    Access control lists decide, and the first user may do everything, unless `authorizer` or `super_users` is given.

    Raises `ConfigError` for settings that contradict it: of a cluster, other certificates, and a listener on all
    interfaces without an advertised address, which the certificate has to contain.
    """
    for name in ("etcd_endpoints", "etcd_join"):
        if given.get(name):
            raise ConfigError(
                f"{name}: --secure protects a single broker; the brokers of a cluster need certificates of one "
                "authority (ssl_certificate_location, ssl_key_location, ssl_ca_location)"
            )
    _refuse_other_certificates(given, _MADE)
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
        **_certificate_values(directory, CERTIFICATE_FILE),
        **_authorization_values(given),
        **_secrets_key_value(given, directory),
    }
    if advertised:
        changed["advertised_listeners"] = advertised
    if "listener_security_protocol_map" not in given:
        others = [f"{name}:{_PROTOCOL}" for name in addresses if name not in SecurityProtocol.__members__]
        changed["listener_security_protocol_map"] = ",".join((DEFAULT_PROTOCOL_MAP, *others))
    protocols = parse_protocol_map(
        given.get("listener_security_protocol_map") or changed["listener_security_protocol_map"]
    )
    if not any(name in protocols and protocols[name].is_authenticated for name in addresses):
        raise ConfigError(
            f"listeners: with --secure, one of them has to authenticate its clients; write {_PROTOCOL}://HOST:PORT, or "
            "the address alone"
        )
    if _leaves_http_open(given):
        changed["open_listeners"] = "http"
    return changed


def protected_cluster_values(given: Mapping[str, Any], directory: str, certificate: str) -> dict[str, Any]:
    """Return the settings that a protected start of a cluster changes for one of its brokers, by name. The broker has
    one listener, for clients and other brokers. `directory` has all files; `certificate` names the one of this broker,
    which it presents to etcd, too. `given` are the settings that have a value.

    Raises `ConfigError` for other certificates and security protocols.
    """
    _refuse_other_certificates(given, (*_MADE, *_MADE_OF_ETCD))
    if given.get("listener_security_protocol_map"):
        raise ConfigError(f"listener_security_protocol_map: --secure makes all listeners {_PROTOCOL}")
    path = f"{directory}/{certificate}"
    return {
        "listeners": _named(given["listeners"]),
        "listener_security_protocol_map": DEFAULT_PROTOCOL_MAP,
        **_certificate_values(directory, certificate),
        **_secrets_key_value(given, directory),
        **dict(zip(_MADE_OF_ETCD, (f"{directory}/{CA_FILE}", path, path), strict=True)),
        **_authorization_values(given),
        **({"open_listeners": "http"} if _leaves_http_open(given) else {}),
    }


def _refuse_other_certificates(given: Mapping[str, Any], names: Iterable[str]) -> None:
    for name in names:
        if given.get(name):
            raise ConfigError(f"{name}: --secure makes a certificate of its own; leave out one of the two")


def _certificate_values(directory: str, certificate: str) -> dict[str, str]:
    path = f"{directory}/{certificate}"
    return dict(zip(_MADE, (path, path, f"{directory}/{CA_FILE}"), strict=True))


def _authorization_values(given: Mapping[str, Any]) -> dict[str, str]:
    """Let access control lists decide, and the first user do everything, as far as nothing else is given."""
    authorizer = given.get("authorizer", _AUTHORIZER)
    if authorizer != _AUTHORIZER:
        return {}
    return {
        "authorizer": authorizer,
        **({} if "super_users" in given else {"super_users": f"User:{FIRST_USER}"}),
    }


def _secrets_key_value(given: Mapping[str, Any], directory: str) -> dict[str, str]:
    return {} if given.get("secrets_key_file") else {"secrets_key_file": f"{directory}/{SECRETS_KEY_FILE}"}


def _leaves_http_open(given: Mapping[str, Any]) -> bool:
    """Whether HTTP stays open, for programs on the same machine."""
    http = given.get("http_listener", default_of("http_listener"))
    if "open_listeners" in given or not http:
        return False
    return is_loopback_host(parse_address("http_listener", http).host)


def _named(text: str) -> str:
    """Give the addresses of a list of listeners that have no name that of the protocol."""
    parts = (part.strip() for part in text.split(","))
    return ",".join(part if "://" in part else f"{_PROTOCOL}://{part}" for part in parts if part)
