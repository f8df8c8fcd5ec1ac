"""How the clients of a listener authenticate, from the settings of a broker."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mansio.api.kafka.server.sasl_gate import SaslSettings
from mansio.errors import ConfigError
from mansio.state.authentication.sasl_session import MECHANISMS

if TYPE_CHECKING:
    from mansio.config.settings import Settings
    from mansio.ports import Random


def sasl_settings(settings: Settings, listener: str, random: Random) -> SaslSettings:
    """Return how clients authenticate that connect to the listener with this name. Raises `ConfigError`."""
    named = [name.strip() for name in settings.sasl_enabled_mechanisms.split(",")]
    for name in named:
        if name not in MECHANISMS:
            raise ConfigError(
                f"sasl_enabled_mechanisms: {name!r} is not offered; there are {', '.join(MECHANISMS)}"
            )
    return SaslSettings(
        tuple(dict.fromkeys(named)),
        random.bytes,
        listener,
        settings.connections_max_reauth_ms,
        settings.connection_failed_authentication_delay_ms,
        settings.sasl_server_max_receive_size,
    )
