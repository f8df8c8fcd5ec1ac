"""Delegation tokens over real sockets (KIP-48): who gets and changes one, what it allows, and that sessions end with
it."""

from __future__ import annotations

import base64
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import pytest

import mansio.blocking
from mansio.errors import (
    ClusterAuthorizationFailed,
    ConfigError,
    DelegationTokenAuthDisabled,
    DelegationTokenAuthorizationFailed,
    DelegationTokenExpired,
    DelegationTokenNotFound,
    DelegationTokenOwnerMismatch,
    DelegationTokenRequestNotAllowed,
    InvalidPrincipalType,
    PolicyViolation,
    SaslAuthenticationFailed,
)
from mansio.state.authentication.credentials import ScramMechanism
from mansio.wire.api_versions import ApiKey
from support.credentials import ScramPeer
from support.machine import scaled
from support.raw_peer import RawPeer
from support.sasl_broker import SaslBroker, log_in, sasl_broker, send_token, shake
from support.waiting import wait_until
from system.e2e.test_cli import Shell

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from mansio.wire.codec.messages import Struct

SCRAM: Final = ScramMechanism.SHA_256.value
TIMEOUT_S: Final = 30
DAY_MS: Final = 24 * 60 * 60 * 1000
FAILED: Final = SaslAuthenticationFailed.kafka_code
NOT_ALLOWED: Final = DelegationTokenRequestNotAllowed.kafka_code


def key_file(directory: Path) -> str:
    path = directory / "secrets.key"
    path.write_text("5a" * 32)
    path.chmod(0o600)
    return str(path)


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SaslBroker]:
    directory = tmp_path_factory.mktemp("tokens")
    settings: dict[str, Any] = {
        "secrets_key_file": key_file(directory),
        "authorizer": "acl",
        "super_users": "User:root",
        "delegation_token_expiry_check_interval_ms": 50,
    }
    with sasl_broker(directory / "data", **settings) as started:
        for name in ("alice", "bob", "carol", "root"):
            started.set_user(name, name)
        yield started


def as_user(broker: SaslBroker, name: str) -> RawPeer:
    peer = RawPeer(broker.port)
    assert not log_in(peer, SCRAM, name, name).error_code
    return peer


def create(
    peer: RawPeer,
    *,
    renewers: tuple[str, ...] = (),
    owner: str | None = None,
    kind: str = "User",
    **more: Any,
) -> Struct:
    fields = {
        "owner_principal_type": None if owner is None else kind,
        "owner_principal_name": owner,
        "renewers": [{"principal_type": kind, "principal_name": name} for name in renewers],
        "max_lifetime_ms": -1,
        **more,
    }
    return peer.call(ApiKey.CREATE_DELEGATION_TOKEN, 3, fields)


def renew(peer: RawPeer, hmac: bytes, period_ms: int = -1) -> Struct:
    return peer.call(ApiKey.RENEW_DELEGATION_TOKEN, 2, {"hmac": hmac, "renew_period_ms": period_ms})


def expire(peer: RawPeer, hmac: bytes, period_ms: int = -1) -> Struct:
    return peer.call(ApiKey.EXPIRE_DELEGATION_TOKEN, 2, {"hmac": hmac, "expiry_time_period_ms": period_ms})


def described(peer: RawPeer, *owners: str, version: int = 3) -> list[str]:
    named = [{"principal_type": "User", "principal_name": name} for name in owners] or None
    answer = peer.call(ApiKey.DESCRIBE_DELEGATION_TOKEN, version, {"owners": named})
    assert not answer.error_code
    return [each.token_id for each in answer.tokens]


def log_in_with(peer: RawPeer, token: Struct, mechanism: str = SCRAM) -> Struct:
    """The last response of a log-in with a token."""
    assert not shake(peer, mechanism).error_code
    password = base64.b64encode(token.hmac).decode()
    scram = ScramPeer(token.token_id, password, ScramMechanism(mechanism), extensions=",tokenauth=true")
    challenge = send_token(peer, scram.first())
    assert not challenge.error_code
    last = send_token(peer, scram.final(challenge.auth_bytes))
    if not last.error_code:
        scram.verify(last.auth_bytes)
    return last


@pytest.mark.parametrize("mechanism", [each.value for each in ScramMechanism])
def test_a_client_with_a_token_is_its_owner(broker: SaslBroker, mechanism: str) -> None:
    with as_user(broker, "alice") as alice, RawPeer(broker.port) as peer:
        token = create(alice)
        assert token.error_code == 0
        assert (token.principal_name, token.token_requester_principal_name) == ("alice", "alice")
        assert token.expiry_timestamp - token.issue_timestamp == DAY_MS
        assert token.max_timestamp - token.issue_timestamp == 7 * DAY_MS
        last = log_in_with(peer, token, mechanism)
        assert last.error_code == 0
        assert 0 < last.session_lifetime_ms <= DAY_MS
        sessions = broker.broker.server.authentication._sessions
        (gate,) = [
            gate
            for gate in sessions["alice"].values()
            if (user := gate._session.user) is not None and user.credential_id == token.token_id
        ]
        assert gate._user == "alice"
        assert not expire(alice, token.hmac).error_code


def test_who_has_authenticated_with_a_token_manages_no_tokens(broker: SaslBroker) -> None:
    with as_user(broker, "alice") as alice, RawPeer(broker.port) as peer:
        token = create(alice)
        assert not log_in_with(peer, token).error_code
        assert create(peer).error_code == NOT_ALLOWED
        assert renew(peer, token.hmac).error_code == NOT_ALLOWED
        assert expire(peer, token.hmac).error_code == NOT_ALLOWED
        answer = peer.call(ApiKey.DESCRIBE_DELEGATION_TOKEN, 3, {"owners": None})
        assert (answer.error_code, len(answer.tokens)) == (NOT_ALLOWED, 0)
        assert not expire(alice, token.hmac).error_code


@pytest.mark.parametrize("version", [1, 2, 3])
def test_owner_requester_and_renewers_see_and_change_a_token_and_others_do_not(
    broker: SaslBroker, version: int
) -> None:
    with (
        as_user(broker, "alice") as alice,
        as_user(broker, "bob") as bob,
        as_user(broker, "carol") as carol,
        as_user(broker, "root") as root,
    ):
        token = create(alice, renewers=("bob",))
        for peer in (alice, bob, root):
            assert token.token_id in described(peer, version=version)
        assert token.token_id not in described(carol, version=version)
        assert described(root, "carol") == []
        assert token.token_id in described(root, "bob"), "as its renewer"
        assert renew(bob, token.hmac, 1_000_000).error_code == 0
        assert renew(carol, token.hmac).error_code == DelegationTokenOwnerMismatch.kafka_code
        assert expire(carol, token.hmac).error_code == DelegationTokenOwnerMismatch.kafka_code
        assert renew(carol, b"unknown").error_code == DelegationTokenNotFound.kafka_code
        assert expire(bob, token.hmac).error_code == 0
        assert renew(alice, token.hmac).error_code == DelegationTokenNotFound.kafka_code
        assert token.token_id not in described(root)


def test_a_token_of_another_owner_needs_a_right(broker: SaslBroker) -> None:
    refused = DelegationTokenAuthorizationFailed.kafka_code
    with as_user(broker, "alice") as alice, as_user(broker, "root") as root, RawPeer(broker.port) as peer:
        assert create(alice, owner="bob").error_code == refused
        assert create(alice, owner="absent").error_code == refused
        token = create(root, owner="bob")
        assert (token.principal_name, token.token_requester_principal_name) == ("bob", "root")
        assert not log_in_with(peer, token).error_code
        assert not expire(root, token.hmac).error_code
        wrong = create(alice, renewers=("bob",), kind="Group").error_code
        assert wrong == InvalidPrincipalType.kafka_code


def test_a_connection_ends_with_its_token_and_with_the_user_of_the_token(broker: SaslBroker) -> None:
    with as_user(broker, "alice") as alice, RawPeer(broker.port) as peer, RawPeer(broker.port) as other:
        token, kept = create(alice), create(alice)
        assert not log_in_with(peer, token).error_code
        assert not log_in_with(other, kept).error_code
        assert not expire(alice, token.hmac).error_code
        assert peer.closed()
        with RawPeer(broker.port) as again:
            assert log_in_with(again, token).error_code == FAILED
        assert other.call(ApiKey.METADATA, 12, {"topics": []}).cluster_id
        assert not expire(alice, kept.hmac).error_code
    broker.set_user("dave", "dave")
    with as_user(broker, "dave") as dave, RawPeer(broker.port) as peer:
        token = create(dave)
        assert not log_in_with(peer, token).error_code
        broker.delete_user("dave")
        assert peer.closed()
    broker.set_user("dave", "dave")
    with RawPeer(broker.port) as peer:
        assert log_in_with(peer, token).error_code == FAILED, "a new user has no tokens of one before"


def test_mansio_s_client_gets_a_token_and_another_one_acts_with_it(broker: SaslBroker) -> None:
    with mansio.blocking.connect(broker.address, user="root", password="root") as root:
        tokens = root.admin.tokens
        token = tokens.create(renewers=["bob"], max_lifetime=timedelta(hours=1))
        assert (token.owner, token.requester, token.renewers) == ("root", "root", ("bob",))
        assert token.expires == token.ends == token.issued + timedelta(hours=1)
        assert [each.token_id for each in tokens.list("bob")] == [token.token_id]
        assert token.password not in repr(token)
        other = mansio.blocking.connect(
            broker.address, user=token.token_id, password=token.password, delegation_token=True
        )
        with other as by_token:
            by_token.admin.create_topic("by-token")
            with pytest.raises(DelegationTokenRequestNotAllowed):
                by_token.admin.tokens.list()
            with pytest.raises(ClusterAuthorizationFailed):
                by_token.admin.users.create_sqs_key("root")
        assert tokens.renew(token.hmac, period=timedelta(minutes=1)) < token.ends
        tokens.expire(token.hmac)
        with pytest.raises(DelegationTokenNotFound):
            tokens.renew(token.hmac)
        assert not tokens.list("root")
    with (
        pytest.raises(SaslAuthenticationFailed),
        mansio.blocking.connect(
            broker.address, user=token.token_id, password=token.password, delegation_token=True
        ),
    ):
        pass
    with pytest.raises(ConfigError, match="PLAIN"):
        mansio.blocking.connect(
            broker.address, user="t", password="p", delegation_token=True, mechanism="PLAIN"
        )


@pytest.mark.full
def test_the_command_line_creates_lists_renews_and_deletes_tokens(
    broker: SaslBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MANSIO_USER", "carol")
    monkeypatch.setenv("MANSIO_PASSWORD", "carol")
    shell = Shell(broker.address)
    (created,) = shell.json("token", "create", "--renewer", "bob", "--max-lifetime", "2h")
    token_id, password = created["token_id"], created["password"]
    with mansio.blocking.connect(broker.address, user=token_id, password=password, delegation_token=True):
        pass
    (listed,) = shell.json("token", "list", "carol")
    assert (listed["token_id"], listed["owner"], listed["renewers"]) == (token_id, "carol", "bob")
    assert password not in shell("token", "list")
    shell("token", "renew", token_id, "--for", "1m")
    (renewed,) = shell.json("token", "list")
    assert renewed["expires"] < listed["expires"] == renewed["ends"]
    shell("token", "delete", token_id)
    assert shell.json("token", "list") == []
    shell("token", "delete", token_id, code=1)
    assert token_id in shell.errors


def test_an_expired_token_ends_its_connections_and_is_deleted(broker: SaslBroker) -> None:
    with as_user(broker, "alice") as alice, RawPeer(broker.port) as peer:
        token = create(alice, max_lifetime_ms=1_000_000)
        assert token.expiry_timestamp == token.max_timestamp
        assert not log_in_with(peer, token).error_code
        later = renew(alice, token.hmac, 1 << 50)
        assert later.expiry_timestamp == token.max_timestamp, "not past its maximum"
        soon = expire(alice, token.hmac, 0)
        assert soon.expiry_timestamp <= later.expiry_timestamp - 900_000
        assert renew(alice, token.hmac).error_code in (
            DelegationTokenExpired.kafka_code,
            DelegationTokenNotFound.kafka_code,
        )
        assert peer.closed()
        wait_until(lambda: token.token_id not in described(alice), scaled(TIMEOUT_S), "its deletion")
        with RawPeer(broker.port) as again:
            assert log_in_with(again, token).error_code == FAILED


def test_an_owner_has_a_bounded_number_of_tokens(broker: SaslBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    from mansio.broker.services import delegation_tokens

    monkeypatch.setattr(delegation_tokens, "TOKENS_PER_OWNER_MAX", 2)
    with as_user(broker, "carol") as carol:
        made = [create(carol) for _ in range(3)]
        assert [each.error_code for each in made] == [0, 0, PolicyViolation.kafka_code]
        for each in made[:2]:
            assert not expire(carol, each.hmac).error_code


def test_tokens_outlive_a_restart_and_their_secrets_are_not_stored(tmp_path: Path) -> None:
    settings = {"secrets_key_file": key_file(tmp_path)}
    with sasl_broker(tmp_path / "data", **settings) as first:
        first.set_user("alice", "alice")
        with as_user(first, "alice") as alice:
            token = create(alice)
    with sasl_broker(tmp_path / "data", **settings) as again:
        with RawPeer(again.port) as peer:
            assert not log_in_with(peer, token).error_code
        with as_user(again, "alice") as alice:
            answer = alice.call(ApiKey.DESCRIBE_DELEGATION_TOKEN, 3, {"owners": None})
            assert [each.hmac for each in answer.tokens] == [token.hmac]
    with sasl_broker(tmp_path / "data") as without, as_user(without, "alice") as alice:
        for answer in (create(alice), renew(alice, token.hmac), expire(alice, token.hmac)):
            assert answer.error_code == DelegationTokenAuthDisabled.kafka_code
    secrets = (token.hmac, token.hmac.hex().encode(), base64.b64encode(token.hmac))
    for path in (tmp_path / "data").rglob("*"):
        if path.is_file():
            content = path.read_bytes()
            assert not any(each in content for each in secrets), path


def test_a_client_without_authentication_gets_no_token(tmp_path: Path) -> None:
    settings = {"listeners": "127.0.0.1:0", "secrets_key_file": key_file(tmp_path)}
    with sasl_broker(tmp_path / "data", **settings) as open_broker, RawPeer(open_broker.port) as peer:
        assert create(peer).error_code == NOT_ALLOWED
        assert renew(peer, b"").error_code == NOT_ALLOWED
        answer = peer.call(ApiKey.DESCRIBE_DELEGATION_TOKEN, 3, {"owners": None})
        assert answer.error_code == NOT_ALLOWED
