"""Apache Kafka's tool for delegation tokens, and a Java client that logs in with a token.

Nightly: needs Java and Maven, as test_admin_java.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

import pytest

from nightly.interop.test_admin_java import Java, fetch_tools
from support.sasl_broker import SaslBroker, sasl_broker

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TOOL: Final = "org.apache.kafka.tools.DelegationTokenCommand"
TOPICS: Final = "org.apache.kafka.tools.TopicCommand"
MODULE: Final = "org.apache.kafka.common.security.scram.ScramLoginModule"
MECHANISM: Final = "SCRAM-SHA-512"


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SaslBroker]:
    fetch_tools()
    directory = tmp_path_factory.mktemp("tokens")
    key = directory / "secrets.key"
    key.write_text("5a" * 32)
    key.chmod(0o600)
    with sasl_broker(directory / "data", secrets_key_file=str(key)) as started:
        started.set_user("alice", "secret")
        started.set_user("bob", "secret")
        yield started


def settings(path: Path, user: str, password: str, *, is_token: bool = False) -> str:
    extension = ' tokenauth="true"' if is_token else ""
    path.write_text(
        f"security.protocol=SASL_PLAINTEXT\nsasl.mechanism={MECHANISM}\n"
        f'sasl.jaas.config={MODULE} required username="{user}" password="{password}"{extension};\n'
    )
    return str(path)


def test_kafkas_tool_creates_describes_renews_and_expires_a_token_that_logs_in(
    broker: SaslBroker, tmp_path: Path
) -> None:
    java = Java(broker.address)
    alice = settings(tmp_path / "alice", "alice", "secret")
    options = ("--max-life-time-period", "-1", "--renewer-principal", "User:bob")
    created = java(TOOL, "--command-config", alice, "--create", *options)
    row = next(line for line in created.splitlines() if "User:alice" in line).split()
    token_id, hmac = row[0], row[1]
    described = java(TOOL, "--command-config", alice, "--describe", "--owner-principal", "User:alice")
    assert token_id in described
    assert "User:bob" in described
    bob = settings(tmp_path / "bob", "bob", "secret")
    renewed = java(TOOL, "--command-config", bob, "--renew", "--renew-time-period", "-1", "--hmac", hmac)
    assert re.search(r"expir", renewed, re.IGNORECASE), renewed
    by_token = settings(tmp_path / "token", token_id, hmac, is_token=True)
    java(TOPICS, "--command-config", by_token, "--create", "--topic", "by-token")
    assert "by-token" in java(TOPICS, "--command-config", by_token, "--list")
    refused = java(TOOL, "--command-config", by_token, "--describe", code=None)
    assert "DelegationTokenDisabled" in refused or "not allowed" in refused.lower(), refused
    expired = java(TOOL, "--command-config", alice, "--expire", "--expiry-time-period", "-1", "--hmac", hmac)
    assert re.search(r"expir", expired, re.IGNORECASE), expired
    failed = java(TOPICS, "--command-config", by_token, "--list", code=None)
    assert "Authentication failed" in failed, failed
