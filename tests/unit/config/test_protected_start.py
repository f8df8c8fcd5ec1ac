"""Settings of a protected start: every Kafka listener gets TLS and log-ins, and what contradicts that is refused."""

from __future__ import annotations

from typing import Any

import pytest

from mansio.config.listeners import SecurityProtocol
from mansio.config.protected_start import protected_cluster_values
from mansio.config.settings import Origin
from mansio.config.sources import load_settings
from mansio.errors import ConfigError


def protected(**flags: Any) -> Any:
    return load_settings(None, flags, environment=False, is_protected=True)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, "SASL_SSL://127.0.0.1:9092"),
        ({"listeners": "10.0.0.1:9"}, "SASL_SSL://10.0.0.1:9"),
        ({"listeners": "0.0.0.0:9", "advertised_listeners": "h:9"}, "SASL_SSL://0.0.0.0:9"),
        (
            {"listeners": "A://[::1]:9, b://:8", "advertised_listeners": "A://h:9,B://i:8"},
            "A://[::1]:9,b://:8",
        ),
    ],
)
def test_every_listener_has_tls_and_log_ins(flags: dict[str, str], expected: str) -> None:
    settings = protected(data_dir="d", **flags)
    assert settings.listeners == expected
    assert {each.security_protocol for each in settings.kafka_listeners.all} == {SecurityProtocol.SASL_SSL}
    assert settings.ssl_certificate_location == settings.ssl_key_location == "d/security/broker.pem"
    assert settings.ssl_ca_location == "d/security/ca.pem"
    assert settings.origin("ssl_ca_location") is Origin.FLAG
    assert not settings.unprotected_listeners


def test_http_is_open_on_loopback_or_off_and_nowhere_else() -> None:
    assert protected().open_listeners == "http"
    assert protected(http_listener="").open_listeners == ""
    with pytest.raises(ConfigError, match=r"^http_listener: http on 0\.0\.0\.0:9080 does not authenticate"):
        protected(http_listener="0.0.0.0:9080")


@pytest.mark.parametrize(
    ("flags", "authorizer", "super_users"),
    [
        ({}, "acl", "User:admin"),
        ({"authorizer": "acl"}, "acl", "User:admin"),
        ({"super_users": "User:root"}, "acl", "User:root"),
        ({"authorizer": "none"}, "none", ""),
    ],
)
def test_users_need_rights_and_the_first_one_has_all_unless_it_is_given_otherwise(
    flags: dict[str, str], authorizer: str, super_users: str
) -> None:
    alone = protected(**flags)
    assert (alone.authorizer, alone.super_users) == (authorizer, super_users)
    in_cluster = {**flags, **protected_cluster_values({"listeners": "h:9", **flags}, "d", "c")}
    assert (in_cluster["authorizer"], in_cluster.get("super_users", "")) == (authorizer, super_users)
    assert load_settings(None, {}, environment=False).authorizer == "none"


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        ({"listeners": "0.0.0.0:9092"}, "advertised_listeners: SASL_SSL listens on all interfaces"),
        ({"listeners": "A://:9092"}, "advertised_listeners: A listens on all interfaces"),
        ({"etcd_endpoints": "http://127.0.0.1:2379"}, "etcd_endpoints: --secure protects a single broker"),
        ({"etcd_join": "127.0.0.1"}, "etcd_join: --secure protects a single broker"),
        (
            {"listeners": "PLAINTEXT://127.0.0.1:9092"},
            "listeners: with --secure, one of them has to authenticate its clients; write SASL_SSL",
        ),
        (
            {"listeners": "INSIDE://127.0.0.1:9092", "listener_security_protocol_map": "INSIDE:PLAINTEXT"},
            "listeners: with --secure, one of them has to authenticate its clients",
        ),
        (
            {"ssl_certificate_location": "c"},
            "ssl_certificate_location: --secure makes a certificate of its own",
        ),
        (
            {"listeners": "PLAINTEXT://127.0.0.1:1,SASL_SSL://h:2"},
            "listeners: PLAINTEXT on 127.0.0.1:1 does not",
        ),
    ],
)
def test_what_contradicts_it_ends_the_start_in_one_line(flags: dict[str, str], complaint: str) -> None:
    with pytest.raises(ConfigError) as raised:
        protected(**flags)
    assert raised.value.message.startswith(complaint)
    assert "\n" not in raised.value.message
