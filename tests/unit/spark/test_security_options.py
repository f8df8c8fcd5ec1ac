"""Options for TLS and log-ins: those of Spark's Kafka source mean the same here, and nothing shows a password."""

from __future__ import annotations

import pickle
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mansio.errors import ConfigError
from mansio.net.sasl import SaslCredentials
from mansio.net.security_settings import VARIABLES, SecuritySettings
from mansio.spark.options import SinkOptions, SourceOptions
from mansio.spark.security_options import OWN_OPTIONS, parse_jaas_config

BASE = {"kafka.bootstrap.servers": "a:1", "subscribe": "t"}
PLAIN_MODULE = "org.apache.kafka.common.security.plain.PlainLoginModule"
SCRAM_MODULE = "org.apache.kafka.common.security.scram.ScramLoginModule"
REDACTION = re.compile(r"(?i)secret|password|token|access[.]?key")
"""Spark's default of spark.redaction.regex."""
SECRET = "se cret"
SASL = {
    "kafka.security.protocol": "SASL_SSL",
    "kafka.sasl.mechanism": "SCRAM-SHA-512",
    "kafka.sasl.jaas.config": f'{SCRAM_MODULE} required username="me" password="{SECRET}";',
}


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    for variable in VARIABLES.values():
        monkeypatch.delenv(variable, raising=False)


def security(**options: str) -> SecuritySettings:
    return SourceOptions.parse({**BASE, **options}).security


def test_options_of_sparks_kafka_source_mean_the_same_here() -> None:
    assert security() == SecuritySettings()
    assert security(**{"kafka.security.protocol": "PLAINTEXT"}) == SecuritySettings()
    assert security(**{"kafka.security.protocol": "ssl"}) == SecuritySettings(tls=True)
    assert security(**SASL) == SecuritySettings(True, "me", SECRET, "SCRAM-SHA-512")
    files = {
        "kafka.ssl.truststore.type": "PEM",
        "kafka.ssl.truststore.location": "ca.pem",
        "kafka.ssl.keystore.type": "PEM",
        "kafka.ssl.keystore.location": "me.pem",
        "kafka.ssl.key.password": SECRET,
        "kafka.ssl.endpoint.identification.algorithm": "",
    }
    assert security(**SASL, **files) == SecuritySettings(
        "ca.pem", "me", SECRET, "SCRAM-SHA-512", "me.pem", "", SECRET, checks_name=False
    )
    text = {"kafka.ssl.truststore.type": "PEM", "kafka.ssl.truststore.certificates": "-----BEGIN"}
    assert security(**{"kafka.security.protocol": "SSL"}, **text).authorities == "-----BEGIN"


def test_mansios_own_names_are_those_of_its_client() -> None:
    own = {
        "tls": "ca.pem",
        "user": "me",
        "password": SECRET,
        "mechanism": "PLAIN",
        "certificate": "c",
        "key": "k",
    }
    assert security(**own, keyPassword="x") == SecuritySettings(
        "ca.pem", "me", SECRET, "PLAIN", "c", "k", "x"
    )
    assert security(tls="true").tls is True
    assert security(tls="false").tls is False
    assert SinkOptions.parse({"kafka.bootstrap.servers": "a:1", **own}).security.user == "me"


def test_a_delegation_token_is_named_by_an_option_or_in_the_line_of_jaas() -> None:
    own = security(user="id", password=SECRET, delegationToken="true")
    assert own == SecuritySettings(user="id", password=SECRET, delegation_token=True)
    line = f'{SCRAM_MODULE} required username="id" password="{SECRET}" tokenauth="true";'
    assert security(**{**SASL, "kafka.sasl.jaas.config": line}).delegation_token is True
    assert security(**SASL).delegation_token is False
    credentials = own.credentials()
    assert isinstance(credentials, SaslCredentials)
    assert credentials.is_token


def test_the_token_of_the_driver_is_an_option_beside_those_of_either_kind() -> None:
    assert SourceOptions.parse({**BASE, **SASL}).creates_token is None
    assert SourceOptions.parse({**BASE, **SASL, "createDelegationToken": "false"}).creates_token is False
    own = {"kafka.bootstrap.servers": "a:1", "user": "me", "password": SECRET}
    assert SinkOptions.parse({**own, "createDelegationToken": "true"}).creates_token is True
    with pytest.raises(ConfigError, match="createDelegationToken"):
        SinkOptions.parse({**own, "createDelegationToken": "perhaps"})


def test_without_options_the_environment_of_the_driver_applies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MANSIO_TLS", "true")
    monkeypatch.setenv("MANSIO_USER", "me")
    monkeypatch.setenv("MANSIO_PASSWORD", SECRET)
    assert security() == SecuritySettings(True, "me", SECRET)
    assert security(tls="false").user == "me"
    assert security(**{"kafka.security.protocol": "SSL"}) == SecuritySettings(True)


@pytest.mark.parametrize(
    "options",
    [
        {"kafka.sasl.jaas.config": SASL["kafka.sasl.jaas.config"]},
        {**SASL, "kafka.sasl.mechanism": "GSSAPI"},
        {**SASL, "kafka.sasl.mechanism": "PLAIN"},
        {**SASL, "kafka.security.protocol": "SSL"},
        {**SASL, "kafka.security.protocol": "SASL"},
        {**SASL, "kafka.sasl.jaas.config": SASL["kafka.sasl.jaas.config"].replace(";", "")},
        {
            **SASL,
            "kafka.sasl.jaas.config": SASL["kafka.sasl.jaas.config"].replace("scram.Scram", "oauth.OAuth"),
        },
        {**SASL, "kafka.sasl.jaas.config": f'{SCRAM_MODULE} required password="{SECRET}";'},
        {
            **SASL,
            "kafka.sasl.jaas.config": f'{SCRAM_MODULE} required username="a" password="{SECRET}" other="true";',
        },
        {
            **SASL,
            "kafka.sasl.mechanism": "PLAIN",
            "kafka.sasl.jaas.config": f'{PLAIN_MODULE} required username="a" password="{SECRET}" tokenauth="true";',
        },
        {"user": "a", "password": SECRET, "delegationToken": SECRET},
        {"delegationToken": "true"},
        {**SASL, "kafka.ssl.truststore.location": "ca.jks"},
        {**SASL, "kafka.ssl.truststore.location": "ca.jks", "kafka.ssl.truststore.type": "JKS"},
        {**SASL, "kafka.ssl.keystore.location": "me.pem"},
        {**SASL, "kafka.ssl.truststore.password": SECRET},
        {**SASL, "kafka.ssl.endpoint.identification.algorithm": "http"},
        {**SASL, "user": "me", "password": SECRET},
        {"password": SECRET},
        {"user": "me", "key": "k", "password": SECRET},
    ],
)
def test_options_that_do_not_fit_are_refused_without_showing_the_password(options: dict[str, str]) -> None:
    for parse in (
        lambda: SourceOptions.parse({**BASE, **options}),
        lambda: SinkOptions.parse({"kafka.bootstrap.servers": "a:1", **options}),
    ):
        with pytest.raises(ConfigError) as caught:
            parse()
        assert SECRET not in str(caught.value)
        assert "\n" not in str(caught.value)


VALUES = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), min_size=1, max_size=30)


@given(user=VALUES, password=VALUES, quote=st.sampled_from("\"'"))
def test_a_line_of_jaas_gives_any_user_and_password(user: str, password: str, quote: str) -> None:
    def quoted(value: str) -> str:
        return quote + value.replace("\\", "\\\\").replace(quote, "\\" + quote) + quote

    line = f"{PLAIN_MODULE} required\n  username={quoted(user)} password = {quoted(password)} ;"
    assert parse_jaas_config(line) == (user, password, ("PLAIN",), False)
    shaded = f"kafkashaded.{PLAIN_MODULE} required username=me password=secret;"
    assert parse_jaas_config(shaded)[:2] == ("me", "secret")


@given(st.text(max_size=100) | st.text("PlainLoginModule required=\"\\' ;\t", max_size=60))
def test_any_other_line_is_refused_in_one_line(line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_jaas_config(line)
    assert "\n" not in str(caught.value)


def test_spark_hides_each_option_that_contains_a_secret() -> None:
    for name, setting in OWN_OPTIONS.items():
        assert ("password" in setting or setting == "delegation_token") == bool(REDACTION.search(name)), name
    assert REDACTION.search("kafka.ssl.key.password")
    assert REDACTION.search(SASL["kafka.sasl.jaas.config"])  # its name is not hidden, each valid value is


def test_parsed_options_show_no_password_and_reach_the_executors() -> None:
    options = SourceOptions.parse({**BASE, **SASL})
    assert SECRET not in repr(options)
    assert pickle.loads(pickle.dumps(options)).security == options.security
    sink = SinkOptions.parse({"kafka.bootstrap.servers": "a:1", **SASL})
    assert SECRET not in repr(sink)
