"""Tokens of an identity provider and API keys through real sockets: what they open, and when they stop to do so."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final

import grpc
import httpx
import pytest

from mansio.api.grpc import mansio_pb2 as pb
from mansio.broker.routing.caller import ANONYMOUS, Caller, ClientSession
from mansio.broker.services.wrong_credentials import WRONG_PER_S_MAX
from mansio.config.security import OAUTHBEARER, PLAIN
from mansio.errors import ClusterAuthorizationFailed, SaslAuthenticationFailed
from mansio.net.signing_keys import REQUESTED_INTERVAL_MS
from mansio.state.authentication.bearer_tokens import GROUPS_MAX, TOKEN_CHARACTERS_MAX
from mansio.state.authentication.oauth_bearer import FAILURE_ANSWER, INVALID_TOKEN, bearer_message
from mansio.state.authorization.acls import (
    CLUSTER_NAME,
    WILDCARD,
    Acl,
    Operation,
    PatternType,
    Permission,
    ResourceType,
)
from mansio.wire.api_versions import ApiKey
from mansio.wire.codec import messages
from support.certificates import Authority
from support.event_stream import Follower
from support.machine import scaled
from support.raw_peer import RawPeer
from support.sasl_broker import SaslBroker, log_in, sasl_broker, send_token, shake
from support.secured_broker import delete_user, secured_broker, set_password
from support.tiers import smoke_first
from support.tls_listener import client_context
from support.tokens import Issuer, KeyServer, claims, token_settings
from support.waiting import wait_until

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from mansio.broker.services.api_keys import NewApiKey
    from mansio.testing.broker import TestBroker
    from mansio.wire.codec.messages import Struct

ONE: Final = Issuer()
TIMEOUT_S: Final = 30
DAY_MS: Final = 24 * 60 * 60 * 1000


@pytest.fixture(scope="module")
def keys_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("issuer") / "keys.json"
    path.write_bytes(ONE.jwks())
    return path


@pytest.fixture(scope="module")
def kafka(tmp_path_factory: pytest.TempPathFactory, keys_file: Path) -> Iterator[SaslBroker]:
    with sasl_broker(tmp_path_factory.mktemp("kafka") / "data", **token_settings(keys_file)) as started:
        yield started


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture
def context(authority: Authority) -> ssl.SSLContext:
    return client_context(authority.certificate)


@pytest.fixture
def broker(authority: Authority, keys_file: Path) -> Iterator[TestBroker]:
    settings = token_settings(keys_file, http_security_protocol="SASL_SSL", grpc_security_protocol="SASL_SSL")
    with secured_broker(authority, authority.issue(), **settings) as started:
        set_password(started, "alice", "secret")
        yield started


def token(now_s: float, **more: Any) -> str:
    return ONE.sign(claims(now_s, **more))


def log_in_with(peer: RawPeer, text: str) -> Struct:
    """The last response of a log-in with a token."""
    assert shake(peer, OAUTHBEARER).error_code == 0
    answer = send_token(peer, bearer_message(text))
    return send_token(peer, FAILURE_ANSWER) if bytes(answer.auth_bytes) == INVALID_TOKEN else answer


def log_in_frame(text: str) -> bytes:
    fields = {"auth_bytes": bearer_message(text)}
    return messages.encode_request(ApiKey.SASL_AUTHENTICATE, 2, 7, "test", fields)


def is_served(peer: RawPeer) -> bool:
    """Whether a request is answered; False if the broker closes the connection instead."""
    try:
        peer.send(messages.encode_request(ApiKey.METADATA, 9, 8, "test", {"topics": []}))
        return peer.frame() is not None
    except OSError:
        return False


# Kafka


def test_a_token_opens_a_kafka_connection_until_it_expires(kafka: SaslBroker) -> None:
    now_s = time.time()
    skew_s = kafka.broker.settings.sasl_oauthbearer_clock_skew_seconds
    with RawPeer(kafka.port) as peer:
        answer = log_in_with(peer, token(now_s, groups=["night shift"]))
        assert answer.error_code == 0
        assert answer.session_lifetime_ms <= (300 + skew_s) * 1000
        assert is_served(peer)
        sessions = kafka.call(lambda: kafka.broker.server.authentication._sessions["alice"])
        (gate,) = sessions.values()
        assert gate._session.user.groups == ("night shift",)
        fields = {"user": "alice", "description": "", "valid_ms": -1}
        created = peer.call(ApiKey.CREATE_API_KEY, 0, fields)
        assert created.error_code == ClusterAuthorizationFailed.kafka_code  # the key would outlive the token


@pytest.mark.full
def test_the_groups_of_a_token_decide_what_its_user_may_do(tmp_path: Path, keys_file: Path) -> None:
    settings = token_settings(keys_file, authorizer="acl", super_users="User:admin")
    with sasl_broker(tmp_path / "data", **settings) as started:
        allowed = Acl(
            ResourceType.CLUSTER,
            PatternType.LITERAL,
            CLUSTER_NAME,
            "Group:operators",
            WILDCARD,
            Operation.DESCRIBE,
            Permission.ALLOW,
        )
        admin = Caller(ClientSession("admin"))
        acls = started.broker.service.acls
        assert started.run(acls.create_each([allowed], caller=admin)) == [None]
        codes = []
        for groups in (["operators", "a"], ["a"], []):
            with RawPeer(started.port) as peer:
                assert log_in_with(peer, token(time.time(), groups=groups)).error_code == 0
                codes.append(peer.call(ApiKey.DESCRIBE_API_KEYS, 0, {"user": "bob"}).error_code)
        refused = ClusterAuthorizationFailed.kafka_code
        assert codes == [0, refused, refused]


@pytest.mark.full
def test_a_connection_is_closed_at_the_first_request_after_its_token_has_expired(kafka: SaslBroker) -> None:
    skew_s = kafka.broker.settings.sasl_oauthbearer_clock_skew_seconds
    left_s = scaled(1.5)
    with RawPeer(kafka.port) as peer:
        answer = log_in_with(peer, token(time.time(), exp=time.time() - skew_s + left_s))
        assert 0 < answer.session_lifetime_ms <= left_s * 1000
        before = kafka.failures["expired"]
        wait_until(lambda: not is_served(peer), scaled(TIMEOUT_S), "the end of the session")
        assert kafka.failures["expired"] == before + 1


def test_a_connection_continues_with_a_new_token_of_its_user_only(kafka: SaslBroker) -> None:
    with RawPeer(kafka.port) as peer:
        assert log_in_with(peer, token(time.time())).error_code == 0
        assert log_in_with(peer, token(time.time() + 1, exp=time.time() + 600)).session_lifetime_ms > 300_000
        assert is_served(peer)
    with RawPeer(kafka.port) as peer:
        assert log_in_with(peer, token(time.time())).error_code == 0
        refused = log_in_with(peer, token(time.time(), user="bob"))
        assert refused.error_code == SaslAuthenticationFailed.kafka_code


@pytest.mark.parametrize("text", ["x", "a" * 40_000, token(time.time(), iss="other"), token(1)])
def test_a_token_that_is_not_valid_is_refused_with_one_text(kafka: SaslBroker, text: str) -> None:
    with RawPeer(kafka.port) as peer:
        refused = log_in_with(peer, text)
    assert refused.error_code == SaslAuthenticationFailed.kafka_code
    assert refused.error_message == (
        "Authentication failed during authentication due to invalid credentials with SASL mechanism OAUTHBEARER"
    )


def test_a_broker_starts_without_keys_and_closes_log_ins_until_it_has_them(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    settings = token_settings(file, sasl_oauthbearer_jwks_endpoint_retry_backoff_max_ms=100)
    with sasl_broker(tmp_path / "data", **settings) as started:
        tokens = started.broker.service.tokens
        assert tokens is not None
        assert "cannot read" in started.call(lambda: tokens.keys_failure)
        with RawPeer(started.port) as peer:
            assert shake(peer, OAUTHBEARER).error_code == 0
            peer.send(log_in_frame(token(time.time())))
            assert peer.closed()
        assert started.failures["no_keys"] == 1
        file.write_bytes(ONE.jwks())
        wait_until(lambda: not started.call(lambda: tokens.keys_failure), scaled(TIMEOUT_S), "the keys")
        with RawPeer(started.port) as peer:
            assert log_in_with(peer, token(time.time())).error_code == 0


# The keys of the issuer


class KeyBroker:
    """A broker that fetches keys from a server."""

    def __init__(self, broker: SaslBroker) -> None:
        self.broker = broker
        keys = broker.broker._token_keys
        assert keys is not None
        self.keys = keys

    def logs_in(self, text: str) -> bool:
        with RawPeer(self.broker.port) as peer:
            return log_in_with(peer, text).error_code == 0

    def allow_refresh(self) -> None:
        """Let the time between two attempts pass."""
        self.keys._tried_at -= REQUESTED_INTERVAL_MS


def test_keys_are_replaced_after_a_token_with_an_unknown_key_and_kept_when_fetching_fails(
    tmp_path: Path,
) -> None:
    new = Issuer(1)
    new.keys = {"rsa-2": new.keys["rsa-1"]}
    with (
        KeyServer(ONE.jwks()) as server,
        sasl_broker(
            tmp_path / "data",
            **token_settings(server.url, sasl_oauthbearer_jwks_endpoint_retry_backoff_ms=60_000),
        ) as started,
    ):
        one = KeyBroker(started)
        old_token = token(time.time())
        new_token = new.sign(claims(time.time()), key_id="rsa-2")
        assert one.logs_in(old_token)
        server.document = new.jwks()
        for _ in range(5):  # not fetched for each of them
            assert not one.logs_in(new_token)
        assert server.answers == 1
        one.allow_refresh()
        assert not one.logs_in(new_token)
        wait_until(lambda: one.keys.loads == 2, scaled(TIMEOUT_S), "the new keys")
        assert one.logs_in(new_token)
        assert not one.logs_in(old_token)
        for status, document in ((500, b"{}"), (302, b""), (200, b"<html>"), (200, b"x" * (1 << 20))):
            server.status, server.document = status, document
            failures = one.keys.failures
            one.allow_refresh()
            assert not one.logs_in(old_token)
            wait_until(lambda: one.keys.failures == failures + 1, scaled(TIMEOUT_S), "the failure")  # noqa: B023
            assert one.logs_in(new_token)


# HTTP and gRPC


def client_of(broker: TestBroker, context: ssl.SSLContext, credential: str) -> httpx.Client:
    headers = {"authorization": f"Bearer {credential}"}
    return httpx.Client(
        base_url=broker.http_url, verify=context, headers=headers, timeout=scaled(TIMEOUT_S), trust_env=False
    )


def now_s(broker: TestBroker) -> float:
    return broker.clock.time_ms() / 1000


def grpc_code(broker: TestBroker, authority: Authority, credential: str) -> Any:
    credentials = grpc.ssl_channel_credentials(authority.certificate.read_bytes())
    port = broker.grpc_address.rpartition(":")[2]
    with grpc.secure_channel(f"localhost:{port}", credentials) as channel:
        call = channel.unary_unary("/mansio.v1.Mansio/ListTopics", pb.ListTopicsRequest.SerializeToString)
        try:
            metadata = (("authorization", f"Bearer {credential}"),)
            call(pb.ListTopicsRequest(), metadata=metadata, timeout=scaled(TIMEOUT_S))
        except grpc.RpcError as error:
            return error.code()
        return grpc.StatusCode.OK


def test_a_token_opens_http_and_grpc_until_it_expires(
    broker: TestBroker, authority: Authority, context: ssl.SSLContext
) -> None:
    tokens = broker._running().service.tokens
    assert tokens is not None
    valid = token(now_s(broker))
    with client_of(broker, context, valid) as client:
        assert client.post("/v1/topics", json={"name": "events"}).status_code == 201
        assert client.get("/v1/topics").status_code == 200
        assert tokens.verified_count == 1
        assert grpc_code(broker, authority, valid) is grpc.StatusCode.OK
        skew_s = broker._running().settings.sasl_oauthbearer_clock_skew_seconds
        broker.clock.advance(seconds=300 + skew_s + 1)
        refused = client.get("/v1/topics")
        assert refused.status_code == 401
        assert refused.headers.get_list("www-authenticate") == [
            'Basic realm="mansio", charset="UTF-8"',
            'Bearer realm="mansio", error="invalid_token"',
        ]
        assert "events" not in refused.text
        assert grpc_code(broker, authority, valid) is grpc.StatusCode.UNAUTHENTICATED
    with client_of(broker, context, ONE.sign(claims(now_s(broker), aud="other"))) as client:
        assert client.get("/v1/topics").status_code == 401
    with client_of(broker, context, "a" * 20_000) as client:
        assert client.get("/v1/topics").status_code == 401


@pytest.mark.full
def test_an_event_stream_ends_with_its_token(broker: TestBroker, context: ssl.SSLContext) -> None:
    skew_s = broker._running().settings.sasl_oauthbearer_clock_skew_seconds
    with client_of(broker, context, token(now_s(broker))) as client:
        client.post("/v1/topics", json={"name": "events"})
    with client_of(broker, context, token(now_s(broker), exp=now_s(broker) - skew_s + scaled(3))) as client:
        follower = Follower(client)
        follower.begin()
        assert follower.has_ended()


def http_outcome(broker: TestBroker, _: Authority, context: ssl.SSLContext, *, text: str) -> str:
    with client_of(broker, context, text) as client:
        status = client.get("/v1/topics").status_code
    return {200: "accepted", 401: "wrong", 429: "not checked"}[status]


def grpc_outcome(broker: TestBroker, authority: Authority, _: ssl.SSLContext, *, text: str) -> str:
    return {
        grpc.StatusCode.OK: "accepted",
        grpc.StatusCode.UNAUTHENTICATED: "wrong",
        grpc.StatusCode.RESOURCE_EXHAUSTED: "not checked",
    }[grpc_code(broker, authority, text)]


def kafka_outcome(broker: TestBroker, *_: object, text: str) -> str:
    with RawPeer(int(broker.bootstrap_servers.rpartition(":")[2])) as peer:
        assert shake(peer, OAUTHBEARER).error_code == 0
        peer.send(log_in_frame(text))
        frame = peer.frame()
    if frame is None:
        return "not checked"
    answer = messages.decode_response_frame(ApiKey.SASL_AUTHENTICATE, 2, frame)[1]
    return "wrong" if bytes(answer.auth_bytes) == INVALID_TOKEN else "accepted"


@pytest.mark.parametrize("outcome_of", smoke_first(http_outcome, grpc_outcome, kafka_outcome))
def test_wrong_tokens_of_an_address_are_limited_and_a_remembered_one_is_accepted(
    authority: Authority, context: ssl.SSLContext, keys_file: Path, outcome_of: Callable[..., str]
) -> None:
    settings = token_settings(
        keys_file,
        listeners="SASL_PLAINTEXT://127.0.0.1:0",
        http_security_protocol="SASL_SSL",
        grpc_security_protocol="SASL_SSL",
    )
    with secured_broker(authority, authority.issue(), **settings) as broker:
        tokens = broker._running().service.tokens
        assert tokens is not None

        def attempt(text: str) -> str:
            return outcome_of(broker, authority, context, text=text)

        now = now_s(broker)
        remembered, forged = token(now), Issuer(1).sign(claims(now))
        assert attempt(remembered) == "accepted"
        assert attempt(forged) == "wrong"
        assert tokens.verified_count == 2

        def is_limited() -> bool:
            with ThreadPoolExecutor(2 * WRONG_PER_S_MAX) as threads:
                found = [*threads.map(attempt, [forged] * (2 * WRONG_PER_S_MAX))]
            assert set(found) <= {"wrong", "not checked"}
            return "not checked" in found

        wait_until(is_limited, scaled(TIMEOUT_S), "a refusal")
        verified = tokens.verified_count
        assert attempt(remembered) == "accepted"
        assert tokens.verified_count == verified


def token_of(length: int, now: float) -> str:
    """A valid token with about this length, with as many groups as there may be."""
    groups = [f"{number:02d}" for number in range(GROUPS_MAX)]
    bare = len(token(now, groups=groups))
    found = token(now, groups=groups, padding="x" * ((length - bare) * 3 // 4 - 20))
    assert length - 20 < len(found) <= length
    return found


@pytest.mark.parametrize(
    ("length", "is_accepted"), smoke_first((12_000, True), (TOKEN_CHARACTERS_MAX, True), (17_000, False))
)
def test_a_long_token_is_accepted_by_each_protocol_up_to_the_limit(
    broker: TestBroker, authority: Authority, context: ssl.SSLContext, length: int, is_accepted: bool
) -> None:
    long = token_of(length, now_s(broker))
    expected = "accepted" if is_accepted else "wrong"
    assert http_outcome(broker, authority, context, text=long) == expected
    assert grpc_outcome(broker, authority, context, text=long) == expected


def test_a_call_with_two_credentials_is_refused(broker: TestBroker, authority: Authority) -> None:
    credentials = grpc.ssl_channel_credentials(authority.certificate.read_bytes())
    port = broker.grpc_address.rpartition(":")[2]
    value = f"Bearer {token(now_s(broker))}"
    with grpc.secure_channel(f"localhost:{port}", credentials) as channel:
        call = channel.unary_unary("/mansio.v1.Mansio/ListTopics")
        for first, second in ((value, "Bearer x"), ("Bearer x", value), (value, value)):
            metadata = (("authorization", first), ("authorization", second))
            with pytest.raises(grpc.RpcError) as error:
                call(b"", metadata=metadata, timeout=scaled(TIMEOUT_S))
            assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT


# API keys


def create_key(broker: TestBroker, user: str = "alice", valid_ms: int | None = None) -> NewApiKey:
    service = broker._running().service.api_keys
    work = service.create(user, "a test", valid_ms, is_confidential=True, caller=ANONYMOUS)
    return broker._call(work, scaled(TIMEOUT_S))


def delete_key(broker: TestBroker, key_id: str) -> None:
    broker._call(broker._running().service.api_keys.delete(key_id, caller=ANONYMOUS), scaled(TIMEOUT_S))


def kafka_log_in(broker: TestBroker, user: str, password: str) -> Struct:
    with RawPeer(int(broker.bootstrap_servers.rpartition(":")[2])) as peer:
        return log_in(peer, PLAIN, user, password)


def test_an_api_key_opens_http_and_grpc_until_it_is_deleted(
    broker: TestBroker, authority: Authority, context: ssl.SSLContext
) -> None:
    created, other = create_key(broker), create_key(broker)
    assert created.text not in repr(created)
    with client_of(broker, context, created.text) as client, client_of(broker, context, other.text) as second:
        assert client.post("/v1/topics", json={"name": "events"}).status_code == 201
        assert grpc_code(broker, authority, created.text) is grpc.StatusCode.OK
        basic = httpx.BasicAuth("alice", created.text)
        assert client.get("/v1/topics", auth=basic).status_code == 200
        assert client.get("/v1/topics", auth=httpx.BasicAuth("bob", created.text)).status_code == 401
        first, kept = Follower(client), Follower(second)
        first.begin()
        kept.begin()
        delete_key(broker, created.api_key.key_id)
        assert first.has_ended()
        assert kept.is_alive()
        assert client.get("/v1/topics").status_code == 401
        assert second.get("/v1/topics").status_code == 200
        assert grpc_code(broker, authority, created.text) is grpc.StatusCode.UNAUTHENTICATED
        delete_user(broker, "alice")
        assert kept.has_ended()
        set_password(broker, "alice", "another")
        assert second.get("/v1/topics").status_code == 401


def test_an_api_key_ends_when_its_time_has_passed(broker: TestBroker, context: ssl.SSLContext) -> None:
    created = create_key(broker, valid_ms=DAY_MS)
    with client_of(broker, context, created.text) as client:
        assert client.get("/v1/topics").status_code == 200
        broker.clock.advance(days=1)
        assert client.get("/v1/topics").status_code == 401


def test_a_key_that_was_altered_is_refused(broker: TestBroker, context: ssl.SSLContext) -> None:
    created, other = create_key(broker), create_key(broker)
    mixed = created.text[:23] + other.text[23:]
    for wrong in (mixed, created.text[:-1], created.text + "0", created.text.upper(), created.api_key.key_id):
        with client_of(broker, context, wrong) as client:
            assert client.get("/v1/topics").status_code == 401, wrong


def test_an_api_key_is_a_password_of_plain_with_its_id_or_its_user(kafka: SaslBroker) -> None:
    kafka.set_user("carol", "secret")
    keys = kafka.broker.service.api_keys
    created = kafka.run(keys.create("carol", "", None, is_confidential=True, caller=ANONYMOUS))
    for user in ("carol", created.api_key.key_id):
        with RawPeer(kafka.port) as peer:
            assert log_in(peer, PLAIN, user, created.text).error_code == 0
    with RawPeer(kafka.port) as peer:
        refused = log_in(peer, PLAIN, "alice", created.text)
        assert refused.error_code == SaslAuthenticationFailed.kafka_code
    with RawPeer(kafka.port) as peer:
        assert log_in(peer, PLAIN, "carol", created.text).error_code == 0
        before = kafka.failures["changed"]
        kafka.run(keys.delete(created.api_key.key_id, caller=ANONYMOUS))
        wait_until(lambda: not is_served(peer), scaled(TIMEOUT_S), "the end of the session")
        assert kafka.failures["changed"] == before + 1


def test_what_is_stored_and_listed_does_not_contain_the_key(broker: TestBroker) -> None:
    created = create_key(broker)
    secret = created.text.rpartition("_")[2]
    running = broker._running()
    (listed,) = running.service.api_keys.list("alice", caller=ANONYMOUS)
    assert listed == created.api_key
    assert secret not in repr(listed)
    stored = json.dumps([repr(each) for each in running.service.users._state.api_keys.values()])
    assert secret not in stored
