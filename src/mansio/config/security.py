"""Rules about the security of a broker's listeners, and what its settings say of SASL. Pure.

A listener authenticates its clients with SASL, or with certificates that it requires. On the listeners of HTTP and
gRPC SASL means HTTP Basic. The SQS endpoint authenticates with access keys. As soon as one listener of any protocol
authenticates, all do, except those that `open_listeners` names, which must be on loopback: a forgotten open listener
would let everybody around the others. If none authenticates, all are on loopback, unless `insecure_listen` is set.

Each violation is a `ConfigError`, one line that begins with the setting.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from mansio.config.addresses import is_loopback_host
from mansio.config.listeners import SecurityProtocol
from mansio.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from mansio.config.addresses import Address
    from mansio.config.listeners import Listener

PLAIN: Final = "PLAIN"
SASL_MECHANISMS: Final = ("SCRAM-SHA-256", "SCRAM-SHA-512", PLAIN)
"""Names of the mechanisms with passwords, the preferred ones first. They are offered unless a setting says
otherwise."""
OAUTHBEARER: Final = "OAUTHBEARER"
ALL_MECHANISMS: Final = (*SASL_MECHANISMS, OAUTHBEARER)
"""Names of the mechanisms that are implemented."""
CONFIDENTIAL_MECHANISMS: Final = frozenset({PLAIN, OAUTHBEARER})
"""Mechanisms that send what is enough to log in, so that others must not be able to read the connection."""

CLIENT_CERTIFICATES: Final = ("none", "requested", "required")
"""Values of `ssl_client_auth`."""
REQUIRED: Final = "required"


class ServedListener(NamedTuple):
    """A listener of any protocol, as far as the rules need to know it.

    `name`: under which `open_listeners` has it. `setting`: the setting with its address. `address`: at which other
    machines reach it; one on loopback if none does. `remedy`: what makes it authenticate its clients.
    """

    name: str
    setting: str
    address: Address
    is_authenticated: bool
    remedy: str


def parse_principals(setting: str, text: str) -> tuple[str, ...]:
    """Parse a setting with principals, separated by semicolons, because names from certificates contain commas. Raises
    `ConfigError`."""
    found = tuple(dict.fromkeys(part for part in (piece.strip() for piece in text.split(";")) if part))
    for principal in found:
        kind, colon, name = principal.partition(":")
        if not (kind and colon and name):
            raise ConfigError(
                f"{setting}: {principal!r} is not a principal; write TYPE:NAME, for example User:alice"
            )
    return found


def parse_mechanisms(text: str) -> tuple[str, ...]:
    """Parse the setting `sasl_enabled_mechanisms`. Raises `ConfigError`."""
    found = tuple(
        dict.fromkeys(part for part in (piece.strip().upper() for piece in text.split(",")) if part)
    )
    for name in found:
        if name not in ALL_MECHANISMS:
            raise ConfigError(f"sasl_enabled_mechanisms: {name!r} is not one of {', '.join(ALL_MECHANISMS)}")
    if not found:
        raise ConfigError("sasl_enabled_mechanisms: it contains no mechanism")
    return found


def _reached_at(listener: Listener) -> Address:
    """Return an address at which other machines reach a listener: what it accepts, or what it advertises because
    something forwards connections to it; one on loopback if there is neither."""
    advertised = listener.advertised_address if listener.is_advertised else listener.address
    return advertised if is_loopback_host(listener.address.host) else listener.address


def is_on_loopback(listener: Listener) -> bool:
    """Whether only this machine reaches a listener, as far as its addresses tell."""
    return is_loopback_host(_reached_at(listener).host)


def check_mechanisms(listener: Listener, enabled: tuple[str, ...]) -> None:
    """Raise `ConfigError` if clients of other machines could log in to a listener only with PLAIN and OAUTHBEARER,
    which send passwords and tokens and are not offered to them without TLS."""
    protocol = listener.security_protocol
    if protocol.is_encrypted or not protocol.is_authenticated or is_on_loopback(listener):
        return
    if set(enabled) <= CONFIDENTIAL_MECHANISMS:
        sent = "PLAIN would send passwords" if PLAIN in enabled else "OAUTHBEARER would send tokens"
        raise ConfigError(
            f"sasl_enabled_mechanisms: {sent} unencrypted to the listener {listener.name}; add "
            "SCRAM-SHA-256, or use SASL_SSL"
        )


def served_by_kafka(listener: Listener, client_certificates: str) -> ServedListener:
    """Return what the rules need to know of a listener of the Kafka protocol. `client_certificates`: one of
    `CLIENT_CERTIFICATES`."""
    authenticates = is_protocol_authenticated(listener.security_protocol, client_certificates)
    address = _reached_at(listener)
    setting = "listeners" if address == listener.address else "advertised_listeners"
    return ServedListener(listener.name, setting, address, authenticates, "start with --secure")


def served_to_users(
    name: str,
    address: Address,
    protocol: SecurityProtocol,
    client_certificates: str,
    *,
    protocol_of: str = "",
) -> ServedListener:
    """Return what the rules need to know of the listener of HTTP or gRPC, whose users are those of the Kafka protocol.
    `name`: with which its settings begin. `client_certificates`: one of `CLIENT_CERTIFICATES`. `protocol_of`: name of
    the listener whose setting has the protocol, if it is another one."""
    authenticates = is_protocol_authenticated(protocol, client_certificates)
    remedy = f"start with --secure and {protocol_of or name}_security_protocol=SASL_SSL, use an address on loopback"
    return ServedListener(name, f"{name}_listener", address, authenticates, remedy)


def served_by_sqs(address: Address, *, has_keys: bool) -> ServedListener:
    """Return what the rules need to know of the SQS endpoint. `has_keys`: whether its clients have access keys."""
    remedy = "set secrets_key_file or sqs_access_keys_file, use an address on loopback"
    return ServedListener("sqs", "sqs_listener", address, has_keys, remedy)


def is_protocol_authenticated(protocol: SecurityProtocol, client_certificates: str) -> bool:
    """Whether a listener with this protocol accepts only clients that authenticate. `client_certificates`: one of
    `CLIENT_CERTIFICATES`."""
    return protocol.is_authenticated or (protocol is SecurityProtocol.SSL and client_certificates == REQUIRED)


def has_certificate_users(protocol: SecurityProtocol, client_certificates: str) -> bool:
    """Whether the certificate of a client is its identity on a listener with this protocol. Where clients log in, it is
    not. `client_certificates`: one of `CLIENT_CERTIFICATES`."""
    return protocol is SecurityProtocol.SSL and client_certificates != CLIENT_CERTIFICATES[0]


def check_passwords(setting: str, address: Address, protocol: SecurityProtocol) -> None:
    """Check that no other machine can read the passwords that clients send to a listener of HTTP. Raises
    `ConfigError` that begins with `setting`, which has the protocol."""
    if protocol is SecurityProtocol.SASL_PLAINTEXT and not is_loopback_host(address.host):
        raise ConfigError(
            f"{setting}: {protocol} would send passwords unencrypted to {address}; use SASL_SSL, or an address on "
            "loopback"
        )


def check_listeners(served: Sequence[ServedListener], open_listeners: str) -> bool:
    """Check that all listeners authenticate if one does, apart from the open ones; return whether one does. Raises
    `ConfigError`."""
    opened = _parse_open(open_listeners, [each.name for each in served])
    authenticating = [each.name for each in served if each.is_authenticated]
    if not authenticating:
        return False
    for name, setting, address, is_authenticated, _ in served:
        if is_authenticated:
            continue
        if not is_loopback_host(address.host):
            raise ConfigError(
                f"{setting}: {name} on {address} does not authenticate its clients, but {authenticating[0]} does; only "
                "a listener on loopback may be open"
            )
        if name not in opened:
            raise ConfigError(
                f"{setting}: {name} on {address} does not authenticate its clients, but {authenticating[0]} does; turn "
                f"it off, or set open_listeners={name}"
            )
    return True


def find_unprotected(served: Iterable[ServedListener]) -> tuple[ServedListener, ...]:
    """Return the listeners that other machines reach and that do not authenticate their clients."""
    return tuple(
        each for each in served if not each.is_authenticated and not is_loopback_host(each.address.host)
    )


def check_unprotected(unprotected: Iterable[ServedListener]) -> None:
    """Check that there are no listeners that other machines reach and that do not authenticate their clients. Raises
    `ConfigError`, which names the remedies."""
    for name, setting, address, _, remedy in unprotected:
        raise ConfigError(
            f"{setting}: {name} on {address} is reached by other machines, and does not authenticate its clients; "
            f"{remedy}, or set insecure_listen=true"
        )


def check_inter_broker(listener: Listener) -> None:
    """Check that no other machine can read what brokers send each other through their listener. Raises
    `ConfigError`."""
    if not (listener.security_protocol.is_encrypted or is_on_loopback(listener)):
        raise ConfigError(
            f"inter_broker_listener_name: brokers would send records unencrypted to {listener.name} on "
            f"{listener.address}; use a listener with SSL or SASL_SSL, or one on loopback"
        )


def _parse_open(text: str, known: Sequence[str]) -> frozenset[str]:
    by_lower = {name.lower(): name for name in known}
    opened = set()
    for name in filter(None, (piece.strip() for piece in text.split(","))):
        found = by_lower.get(name.lower())
        if found is None:
            raise ConfigError(f"open_listeners: {name} is not one of the listeners, {', '.join(known)}")
        opened.add(found)
    return frozenset(opened)
