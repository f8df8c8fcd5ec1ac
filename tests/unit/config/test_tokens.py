"""Settings of bearer tokens: a broker that accepts tokens has an issuer, an audience and keys for them."""

from __future__ import annotations

from typing import Any, Final

import pytest

from mansio.config.settings import Settings
from mansio.config.tokens import KeyLocation, parse_audiences, parse_key_location
from mansio.errors import ConfigError
from support.tokens import token_settings

NAME: Final = "sasl_oauthbearer_jwks_endpoint_url"
LISTENER: Final[dict[str, Any]] = {"listeners": "SASL_PLAINTEXT://127.0.0.1:0", "http_listener": ""}


def settings(**changes: Any) -> Settings:
    return Settings(**{**LISTENER, **token_settings("/keys.json"), **changes})


@pytest.mark.parametrize(
    "name", [NAME, "sasl_oauthbearer_expected_issuer", "sasl_oauthbearer_expected_audience"]
)
def test_broker_with_tokens_does_not_start_without_keys_issuer_and_audience(name: str) -> None:
    assert settings().sasl_mechanisms[-1] == "OAUTHBEARER"
    for value in ("", " , "):
        with pytest.raises(ConfigError, match=f"^{name}: OAUTHBEARER"):
            settings(**{name: value})
    with pytest.raises(ConfigError, match="it needs OAUTHBEARER"):
        Settings(**{**LISTENER, name: "https://issuer.example"})


def test_tokens_are_not_offered_by_default() -> None:
    assert "OAUTHBEARER" not in Settings().sasl_mechanisms


def test_tokens_alone_are_not_sent_unencrypted_by_other_machines() -> None:
    with pytest.raises(ConfigError, match="would send tokens unencrypted"):
        settings(listeners="SASL_PLAINTEXT://0.0.0.0:9092", sasl_enabled_mechanisms="OAUTHBEARER")


@pytest.mark.parametrize(
    ("text", "location"),
    [
        ("https://issuer.example/keys", KeyLocation(url="https://issuer.example/keys")),
        ("http://127.0.0.1:8080/keys", KeyLocation(url="http://127.0.0.1:8080/keys")),
        ("http://localhost/keys", KeyLocation(url="http://localhost/keys")),
        ("keys.json", KeyLocation(path="keys.json")),
        ("/etc/keys.json", KeyLocation(path="/etc/keys.json")),
        ("file:///etc/my%20keys.json", KeyLocation(path="/etc/my keys.json")),
    ],
)
def test_keys_are_at_a_url_or_in_a_file(text: str, location: KeyLocation) -> None:
    assert parse_key_location(NAME, text) == location


@pytest.mark.parametrize(
    "text",
    [
        "http://issuer.example/keys",
        "http://localhost.example/keys",
        "ftp://issuer.example/keys",
        "https://",
        "https://user:secret@issuer.example/keys",
        "https://issuer.example/keys#1",
        "https://issuer.example:x/keys",
        "https://issuer.example/a b",
        "https://issuer.example/a\r\nHost: b",
        "file://other.example/keys",
    ],
)
def test_other_locations_are_refused_without_their_secret(text: str) -> None:
    with pytest.raises(ConfigError, match=f"^{NAME}: ") as error:
        parse_key_location(NAME, text)
    assert "secret" not in str(error.value)


def test_audiences_are_separated_by_commas() -> None:
    assert parse_audiences(" a, b ,,a") == {"a", "b"}
