"""Rules about the security of a broker's listeners, and what its settings say of SASL. Pure.

A listener authenticates its clients with SASL, or with certificates that it requires. On the listeners of HTTP and
gRPC SASL means HTTP Basic. The SQS endpoint authenticates with access keys. As soon as one listener of any protocol
authenticates, all do, except those that `open_listeners` names, which must be on loopback: a forgotten open listener
would let everybody around the others. If none authenticates, Kafka's listeners are on loopback, unless
`insecure_listen` is set.

Each violation is a `ConfigError`, one line that begins with the setting.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from mansio.config.addresses import is_loopback_host
from mansio.config.listeners import SecurityProtocol
from mansio.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mansio.config.addresses import Address
    from mansio.config.listeners import Listener, Listeners

PLAIN: Final = "PLAIN"
SASL_MECHANISMS: Final = ("SCRAM-SHA-256", "SCRAM-SHA-512", PLAIN)
"""Names of the mechanisms that are implemented, the preferred ones first."""

CLIENT_CERTIFICATES: Final = ("none", "requested", "required")
"""Values of `ssl_client_auth`."""
REQUIRED: Final = "required"


def parse_mechanisms(text: str) -> tuple[str, ...]:
    """Parse the setting `sasl_enabled_mechanisms`. Raises `ConfigError`."""
    found = tuple(
        dict.fromkeys(part for part in (piece.strip().upper() for piece in text.split(",")) if part)
    )
    for name in found:
        if name not in SASL_MECHANISMS:
            raise ConfigError(f"sasl_enabled_mechanisms: {name!r} is not one of {', '.join(SASL_MECHANISMS)}")
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
    """Raise `ConfigError` if clients of other machines could log in to a listener with PLAIN only, which sends
    passwords and is not offered to them without TLS."""
    protocol = listener.security_protocol
    if protocol.is_encrypted or not protocol.is_authenticated or is_on_loopback(listener):
        return
    if set(enabled) <= {PLAIN}:
        raise ConfigError(
            f"sasl_enabled_mechanisms: PLAIN would send passwords unencrypted to the listener {listener.name}; add "
            "SCRAM-SHA-256, or use SASL_SSL"
        )


def is_authenticated(listener: Listener, client_certificates: str) -> bool:
    """Whether a listener accepts only clients that authenticate. `client_certificates`: one of
    `CLIENT_CERTIFICATES`."""
    return is_protocol_authenticated(listener.security_protocol, client_certificates)


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


def check_listeners(
    listeners: Listeners,
    others: Mapping[str, tuple[Address, bool]],
    open_listeners: str,
    client_certificates: str,
) -> bool:
    """Check that all listeners authenticate if one does, apart from the open ones; return whether one does.

    `others`: the listeners of other protocols by the name under which `open_listeners` has them: address, and whether
    they authenticate. Raises `ConfigError`.
    """
    known = {
        each.name: (_reached_at(each), is_authenticated(each, client_certificates)) for each in listeners.all
    } | dict(others)
    opened = _parse_open(open_listeners, known)
    authenticating = [name for name, (_, authenticates) in known.items() if authenticates]
    if not authenticating:
        return False
    for name, (address, authenticates) in known.items():
        if authenticates:
            continue
        if not is_loopback_host(address.host):
            raise ConfigError(
                f"{_setting_of(name, others)}: {name} on {address} does not authenticate its clients, but "
                f"{authenticating[0]} does; only a listener on loopback may be open"
            )
        if name not in opened:
            raise ConfigError(
                f"{_setting_of(name, others)}: {name} on {address} does not authenticate its clients, but "
                f"{authenticating[0]} does; turn it off, or set open_listeners={name}"
            )
    return True


def check_unprotected(unprotected: Sequence[Listener]) -> None:
    """Check that there are no listeners that other machines reach and that do not authenticate their clients. Raises
    `ConfigError`, which names both remedies."""
    for each in unprotected:
        raise ConfigError(
            f"listeners: {each.name} on {each.address} is reached by other machines, and does not authenticate its "
            "clients; start with --secure, or set insecure_listen=true"
        )


def check_inter_broker(listener: Listener) -> None:
    """Check that no other machine can read what brokers send each other through their listener. Raises
    `ConfigError`."""
    if not (listener.security_protocol.is_encrypted or is_on_loopback(listener)):
        raise ConfigError(
            f"inter_broker_listener_name: brokers would send records unencrypted to {listener.name} on "
            f"{listener.address}; use a listener with SSL or SASL_SSL, or one on loopback"
        )


def _parse_open(text: str, known: Mapping[str, object]) -> frozenset[str]:
    by_lower = {name.lower(): name for name in known}
    opened = set()
    for name in filter(None, (piece.strip() for piece in text.split(","))):
        found = by_lower.get(name.lower())
        if found is None:
            raise ConfigError(f"open_listeners: {name} is not one of the listeners, {', '.join(known)}")
        opened.add(found)
    return frozenset(opened)


def _setting_of(name: str, others: Mapping[str, object]) -> str:
    return f"{name}_listener" if name in others else "listeners"
