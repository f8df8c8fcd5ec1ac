"""Rules about the security of listeners: one that authenticates allows no forgotten open one."""

from __future__ import annotations

from typing import Any

import pytest

from mansio.config.addresses import is_loopback_host
from mansio.config.settings import Settings
from mansio.errors import ConfigError

FILES = {"ssl_certificate_location": "c.pem", "ssl_key_location": "k.pem", "ssl_ca_location": "ca.pem"}
CLUSTER = {**FILES, "etcd_endpoints": "http://127.0.0.1:2379"}


@pytest.mark.parametrize(
    "given_settings",
    [
        {"http_listener": "[::1]:9080", "grpc_listener": "localhost:9", "sqs_listener": "127.0.0.1:9324"},
        {"listeners": "127.0.0.1:9092", "advertised_listeners": "localhost:19092"},
        {"http_listener": "0.0.0.0:9080", "insecure_listen": True},
        {"listeners": "PLAINTEXT://0.0.0.0:9092", "insecure_listen": True},
        {"listeners": "SSL://[::]:9092", "insecure_listen": True, **FILES},
        {"listeners": "SSL://[::1]:9092", **FILES},
        {"listeners": "SASL_SSL://0.0.0.0:9092", "http_listener": "", **FILES},
        {"listeners": "SASL_SSL://:9092", "open_listeners": "HTTP", **FILES},
        {"listeners": "SASL_PLAINTEXT://127.0.0.1:9092", "http_listener": ""},
        {"listeners": "SASL_PLAINTEXT://h:9092", "http_listener": ""},
        {
            "listeners": "SASL_SSL://h:9092,PLAINTEXT://localhost:9093",
            "http_listener": "[::1]:9080",
            "open_listeners": "http, plaintext",
            **FILES,
        },
        {"listeners": "SSL://h:9092", "http_listener": "", "ssl_client_auth": "required", **FILES},
        {
            "listeners": "SASL_SSL://h:9092",
            "http_listener": "",
            "sqs_listener": "0.0.0.0:9324",
            "sqs_access_keys_file": "keys",
            **FILES,
        },
        {"listeners": "SASL_SSL://h:9092", "http_listener": "", **CLUSTER},
        {
            "listeners": "SASL_SSL://h:9092",
            "http_listener": "0.0.0.0:9080",
            "http_security_protocol": "SASL_SSL",
            **FILES,
        },
        {
            "listeners": "SASL_PLAINTEXT://127.0.0.1:9092",
            "http_security_protocol": "SASL_PLAINTEXT",
        },
        {
            "listeners": "SSL://h:1",
            "http_listener": "h:2",
            "http_security_protocol": "SSL",
            "ssl_client_auth": "required",
            **FILES,
        },
        {
            "http_listener": "0.0.0.0:9080",
            "http_security_protocol": "SSL",
            "insecure_listen": True,
            **FILES,
        },
        {
            "listeners": "SASL_SSL://h:9092",
            "http_listener": "",
            "grpc_listener": "0.0.0.0:9",
            "grpc_security_protocol": "SASL_SSL",
            **FILES,
        },
    ],
)
def test_listeners_that_protect_what_they_serve_are_accepted(given_settings: dict[str, Any]) -> None:
    Settings(**given_settings)


@pytest.mark.parametrize(
    ("given_settings", "complaint"),
    [
        (
            {"listeners": "SASL_SSL://h:9092", **FILES},
            "http_listener: http on 127.0.0.1:9080 does not authenticate its clients, but SASL_SSL does; turn it off, "
            "or set open_listeners=http",
        ),
        (
            {
                "listeners": "SASL_SSL://h:1,PLAINTEXT://0.0.0.0:2",
                "http_listener": "",
                "open_listeners": "PLAINTEXT",
                **FILES,
            },
            "listeners: PLAINTEXT on 0.0.0.0:2 does not authenticate its clients, but SASL_SSL does; only a listener "
            "on loopback may be open",
        ),
        (
            {"listeners": "SSL://h:1", "http_listener": "h:2", "ssl_client_auth": "required", **FILES},
            "http_listener: http on h:2 does not authenticate",
        ),
        (
            {"listeners": "SSL://h:1,SASL_SSL://h:2", "http_listener": "", **FILES},
            "listeners: SSL on h:1 does not authenticate",
        ),
        (
            {"listeners": "SASL_SSL://h:9092", "http_listener": "", "grpc_listener": "h:9", **FILES},
            "grpc_listener: grpc on h:9 does not authenticate",
        ),
        (
            {"listeners": "SASL_SSL://h:9092", "http_security_protocol": "SSL", **FILES},
            "http_listener: http on 127.0.0.1:9080 does not authenticate",
        ),
        (
            {"http_security_protocol": "SASL_PLAINTEXT"},
            "listeners: PLAINTEXT on 127.0.0.1:9092 does not authenticate its clients, but http does",
        ),
        (
            {"http_listener": "0.0.0.0:9080", "http_security_protocol": "SASL_PLAINTEXT"},
            "http_security_protocol: SASL_PLAINTEXT would send passwords unencrypted to 0.0.0.0:9080",
        ),
        (
            {"grpc_listener": "0.0.0.0:9", "grpc_security_protocol": "SASL_PLAINTEXT"},
            "grpc_security_protocol: SASL_PLAINTEXT would send passwords unencrypted to 0.0.0.0:9",
        ),
        ({"http_security_protocol": "SSL"}, "ssl_certificate_location: listeners with TLS need it"),
        (
            {"sqs_security_protocol": "SASL_SSL"},
            "sqs_security_protocol: 'SASL_SSL' is not one of PLAINTEXT, SSL",
        ),
        (
            {
                "listeners": "SASL_SSL://h:1,PLAINTEXT://127.0.0.1:2",
                "advertised_listeners": "SASL_SSL://h:1,PLAINTEXT://10.0.0.5:2",
                "http_listener": "",
                "open_listeners": "PLAINTEXT",
                **FILES,
            },
            "advertised_listeners: PLAINTEXT on 10.0.0.5:2 does not authenticate its clients, but SASL_SSL does; only "
            "a listener on loopback",
        ),
        (
            {
                "listeners": "SASL_PLAINTEXT://127.0.0.1:1",
                "advertised_listeners": "SASL_PLAINTEXT://10.0.0.5:1",
                "http_listener": "",
                **CLUSTER,
            },
            "inter_broker_listener_name: brokers would send records unencrypted",
        ),
        (
            {
                "listeners": "SASL_SSL://h:1",
                "http_listener": "",
                **FILES,
                "etcd_endpoints": "http://127.example.com:2379",
            },
            "etcd_endpoints: listeners authenticate their clients",
        ),
        ({"open_listeners": "htp"}, "open_listeners: htp is not one of the listeners, PLAINTEXT, http"),
        *(
            (
                {"listeners": f"PLAINTEXT://127.0.0.1:9,{listener}", **FILES},
                f"listeners: {listener.replace('://', ' on ')} is reached by other machines, and does not authenticate "
                "its clients; start with --secure, or set insecure_listen=true",
            )
            for listener in ("SSL://0.0.0.0:1", "SSL://:1", "SSL://[::]:1", "SSL://h:1", "SSL://10.0.0.1:1")
        ),
        (
            {"listeners": "SSL://h:1", "ssl_client_auth": "requested", "ssl_ca_location": "a", **FILES},
            "listeners: SSL on h:1 is reached by other machines",
        ),
        (
            {
                "listeners": "PLAINTEXT://h:1,SASL_SSL://h:2",
                "http_listener": "",
                "insecure_listen": True,
                **FILES,
            },
            "listeners: PLAINTEXT on h:1 does not authenticate",
        ),
        ({"listeners": "SSL://h:1", "ssl_certificate_location": "c"}, "ssl_key_location: "),
        (
            {
                "listeners": "SSL://h:1",
                "ssl_client_auth": "requested",
                "ssl_certificate_location": "c",
                "ssl_key_location": "k",
            },
            "ssl_ca_location: ssl_client_auth=requested needs it",
        ),
        (
            {"sasl_enabled_mechanisms": "GSSAPI"},
            "sasl_enabled_mechanisms: 'GSSAPI' is not one of SCRAM-SHA-256",
        ),
        ({"sasl_enabled_mechanisms": " ,"}, "sasl_enabled_mechanisms: it contains no mechanism"),
        (
            {
                "listeners": "SASL_PLAINTEXT://0.0.0.0:1",
                "http_listener": "",
                "sasl_enabled_mechanisms": "plain",
            },
            "sasl_enabled_mechanisms: PLAIN would send passwords unencrypted",
        ),
        (
            {"listeners": "SASL_PLAINTEXT://h:1", "http_listener": "", **CLUSTER},
            "inter_broker_listener_name: brokers would send records unencrypted",
        ),
        (
            {
                "listeners": "SASL_SSL://h:1",
                "http_listener": "",
                **FILES,
                "etcd_endpoints": "http://etcd:2379",
            },
            "etcd_endpoints: listeners authenticate their clients, so etcd must be on loopback or have https",
        ),
        (
            {"listeners": "SASL_SSL://h:1", "http_listener": "", **FILES, "etcd_join": "h,i,j"},
            "etcd_join: listeners authenticate their clients, so its members must be on loopback",
        ),
    ],
)
def test_a_listener_or_store_without_protection_beside_protected_ones_is_refused_in_one_line(
    given_settings: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ConfigError) as error:
        Settings(**given_settings)
    assert str(error.value).startswith(complaint)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("given_settings", "name", "complaint"),
    [
        (
            {"http_listener": "0.0.0.0:9080"},
            "http",
            "http_listener: http on 0.0.0.0:9080 is reached by other machines, and does not authenticate its clients; "
            "start with --secure and http_security_protocol=SASL_SSL, use an address on loopback, or set "
            "insecure_listen=true",
        ),
        (
            {"http_listener": "h:9080", "http_security_protocol": "SSL", **FILES},
            "http",
            "http_listener: http on h:9080 is reached by other machines",
        ),
        (
            {"grpc_listener": "[::]:9"},
            "grpc",
            "grpc_listener: grpc on [::]:9 is reached by other machines, and does not authenticate its clients; start "
            "with --secure and grpc_security_protocol=SASL_SSL, use an address on loopback, or set "
            "insecure_listen=true",
        ),
        (
            {"sqs_listener": "0.0.0.0:9324", "sqs_security_protocol": "SSL", **FILES},
            "sqs",
            "sqs_listener: sqs on 0.0.0.0:9324 is reached by other machines, and does not authenticate its clients; "
            "set secrets_key_file or sqs_access_keys_file, use an address on loopback, or set insecure_listen=true",
        ),
        (
            {"advertised_listeners": "broker.example:9092"},
            "PLAINTEXT",
            "advertised_listeners: PLAINTEXT on broker.example:9092 is reached by other machines",
        ),
    ],
)
def test_a_listener_beyond_loopback_without_authentication_is_refused_or_counted_in_every_protocol(
    given_settings: dict[str, Any], name: str, complaint: str
) -> None:
    with pytest.raises(ConfigError) as error:
        Settings(**given_settings)
    assert str(error.value).startswith(complaint)
    assert "\n" not in str(error.value)
    (unprotected,) = Settings(insecure_listen=True, **given_settings).unprotected_listeners
    assert unprotected.name == name


def test_only_addresses_of_this_machine_are_loopback() -> None:
    assert all(map(is_loopback_host, ("127.0.0.1", "127.8.9.1", "::1", "localhost")))
    others = ("", "0.0.0.0", "::", "127.example.com", "localhost.example", "10.0.0.1", "fe80::1%lo")
    assert not any(map(is_loopback_host, others))
