"""Bearer tokens of a broker, as its settings define them: the keys of the issuer, and what tokens have to say."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mansio.broker.services.token_checks import TokenChecker
from mansio.broker.services.wrong_credentials import WrongCredentials
from mansio.config.security import OAUTHBEARER
from mansio.config.tokens import KEYS_SETTING, parse_audiences, parse_key_location
from mansio.errors import ConfigError, MissingExtra
from mansio.host.extras import require_extra
from mansio.net.signing_keys import SigningKeys
from mansio.ports import Backoff
from mansio.state.authentication.bearer_tokens import TokenRules

if TYPE_CHECKING:
    from mansio.config.settings import Settings
    from mansio.host.host_ports import HostPorts
    from mansio.ports import Clock


def open_signing_keys(settings: Settings, host: HostPorts) -> SigningKeys | None:
    """Return the keys of the issuer, not started; None if tokens are not accepted. Raises `ConfigError` if a package is
    missing."""
    if OAUTHBEARER not in settings.sasl_mechanisms:
        return None
    try:
        require_extra("secure")
    except MissingExtra as error:
        raise ConfigError(f"sasl_enabled_mechanisms: {OAUTHBEARER}: {error.message}") from None
    first_ms = settings.sasl_oauthbearer_jwks_endpoint_retry_backoff_ms
    longest_ms = settings.sasl_oauthbearer_jwks_endpoint_retry_backoff_max_ms
    return SigningKeys(
        parse_key_location(KEYS_SETTING, settings.sasl_oauthbearer_jwks_endpoint_url),
        scheduler=host.scheduler,
        thread=host.file_thread,
        clock=host.clock,
        refresh_ms=settings.sasl_oauthbearer_jwks_endpoint_refresh_ms,
        backoff=Backoff(first_ms, max(first_ms, longest_ms), jitter=0),
    )


def new_token_checker(settings: Settings, keys: SigningKeys | None, clock: Clock) -> TokenChecker | None:
    """Return what verifies tokens with the keys of the issuer; None without keys."""
    if keys is None:
        return None
    rules = TokenRules(
        settings.sasl_oauthbearer_expected_issuer,
        parse_audiences(settings.sasl_oauthbearer_expected_audience),
        settings.sasl_oauthbearer_sub_claim_name,
        settings.sasl_oauthbearer_groups_claim_name,
        settings.sasl_oauthbearer_clock_skew_seconds * 1000,
    )
    return TokenChecker(rules, keys, WrongCredentials(clock))
