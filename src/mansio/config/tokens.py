"""Settings of bearer tokens (OAUTHBEARER), as the settings of a broker state them, and their rules. Pure.

Each violation is a `ConfigError`, one line that begins with the setting.
"""

from __future__ import annotations

from typing import Final, NamedTuple, Protocol
from urllib.parse import unquote, urlsplit

from mansio.config.addresses import is_loopback_host
from mansio.config.security import OAUTHBEARER
from mansio.errors import ConfigError

KEYS_SETTING: Final = "sasl_oauthbearer_jwks_endpoint_url"


class TokenSettings(Protocol):
    """The settings of a broker that this module reads."""

    @property
    def sasl_mechanisms(self) -> tuple[str, ...]: ...

    @property
    def sasl_oauthbearer_jwks_endpoint_url(self) -> str: ...

    @property
    def sasl_oauthbearer_expected_issuer(self) -> str: ...

    @property
    def sasl_oauthbearer_expected_audience(self) -> str: ...


class KeyLocation(NamedTuple):
    """Where the keys of the issuer are: at a URL, or in a file. One of both is ""."""

    url: str = ""
    path: str = ""


def parse_key_location(setting: str, text: str) -> KeyLocation:
    """Parse a URL or the name of a file. Raises `ConfigError`."""
    if "://" not in text and not text.startswith("file:"):
        return KeyLocation(path=text)
    if text.startswith("file:"):
        parts = urlsplit(text)
        if parts.netloc not in ("", "localhost") or not parts.path:
            raise ConfigError(f"{setting}: {text} does not name a file of this machine")
        return KeyLocation(path=unquote(parts.path))
    check_url(setting, text)
    return KeyLocation(url=text)


def check_url(setting: str, url: str) -> None:
    """Raise `ConfigError` if others on the network could change or read what is fetched from a URL: it has to be https,
    or http on loopback."""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError:
        host, parts = None, urlsplit("")
    if not host or not url.isascii() or not url.isprintable() or " " in url or parts.fragment:
        raise ConfigError(f"{setting}: it is not a URL such as https://issuer.example/keys")
    if parts.username is not None or parts.password is not None:
        raise ConfigError(f"{setting}: a URL with a user or a password is not accepted")
    if parts.scheme != "https" and not (parts.scheme == "http" and is_loopback_host(host)):
        raise ConfigError(f"{setting}: {host} needs https; http is accepted on loopback only")


def check_tokens(settings: TokenSettings) -> None:
    """Check that tokens have an issuer, an audience and keys where they are accepted, and that these are not set where
    they have no effect. Raises `ConfigError`."""
    is_enabled = OAUTHBEARER in settings.sasl_mechanisms
    values = {
        KEYS_SETTING: settings.sasl_oauthbearer_jwks_endpoint_url,
        "sasl_oauthbearer_expected_issuer": settings.sasl_oauthbearer_expected_issuer,
        "sasl_oauthbearer_expected_audience": settings.sasl_oauthbearer_expected_audience,
    }
    for name, value in values.items():
        is_set = bool(value.strip(" ,"))
        if is_enabled and not is_set:
            raise ConfigError(f"{name}: {OAUTHBEARER} in sasl_enabled_mechanisms needs it")
        if is_set and not is_enabled:
            raise ConfigError(f"{name}: it needs {OAUTHBEARER} in sasl_enabled_mechanisms")
    if is_enabled:
        parse_key_location(KEYS_SETTING, values[KEYS_SETTING])


def parse_audiences(text: str) -> frozenset[str]:
    """Parse the audiences, separated by commas."""
    return frozenset(part for part in (piece.strip() for piece in text.split(",")) if part)
