"""Authentication over real sockets: nothing is served to a client before it has authenticated, whatever it sends and
however its bytes are split; failures have one answer; a session ends when its time or its credential does."""

from __future__ import annotations

import contextlib
import itertools
import socket
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from mansio.config.security import PLAIN, SASL_MECHANISMS
from mansio.errors import (
    IllegalSaslState,
    SaslAuthenticationFailed,
    UnsupportedSaslMechanism,
    UnsupportedVersion,
)
from mansio.state.authentication.credentials import ScramMechanism
from mansio.state.quota import QuotaEntity
from mansio.wire.api_versions import SUPPORTED_APIS, ApiKey
from mansio.wire.codec import messages
from mansio.wire.headers import request_header
from support.certificates import Authority
from support.credentials import ScramPeer
from support.machine import scaled
from support.raw_peer import RawPeer, batch_of, produce_frame
from support.sasl_broker import (
    SaslBroker,
    log_in,
    sasl_broker,
    send_token,
    shake,
)
from support.tls_listener import client_context
from support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from mansio.wire.codec.messages import Struct

SCRAM, SCRAM_512 = (mechanism.value for mechanism in ScramMechanism)
PASSWORD = "correct horse"
FAILED = SaslAuthenticationFailed.kafka_code
ILLEGAL = IllegalSaslState.kafka_code
FRAME_BYTES_MAX = 65_536
TIMEOUT_S = 30
DELAY_MS = 100

_numbers = itertools.count(1)


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SaslBroker]:
    with sasl_broker(tmp_path_factory.mktemp("sasl") / "data") as started:
        started.set_user("alice", PASSWORD)
        started.set_user("bob", "bobs")
        yield started


@pytest.fixture
def peer(broker: SaslBroker) -> Iterator[RawPeer]:
    with RawPeer(broker.port) as connected:
        yield connected


def framed(body: bytes) -> bytes:
    return len(body).to_bytes(4, "big") + body


def versions(peer: RawPeer) -> Struct:
    fields = {"client_software_name": "test", "client_software_version": "1"}
    return peer.call(ApiKey.API_VERSIONS, 4, fields)


def test_each_mechanism_logs_in_and_requests_are_served_afterwards(broker: SaslBroker) -> None:
    for mechanism in SASL_MECHANISMS:
        with RawPeer(broker.port) as peer:
            assert {api.api_key for api in versions(peer).api_keys} >= {17, 36, 50, 51}
            last = log_in(peer, mechanism, "alice", PASSWORD)
            assert (last.error_code, last.session_lifetime_ms) == (0, 0)
            topic = f"t{next(_numbers)}"
            peer.create_topic(topic)
            assert [peer.produce(topic, batch_of(b"v")).error_code for _ in range(3)] == [0, 0, 0]
            assert peer.end_offset(topic) == 3
            again = peer.call(ApiKey.SASL_HANDSHAKE, 1, {"mechanism": mechanism})
            assert again.error_code == ILLEGAL, "refused; the connection stays open"
            assert send_token(peer, b"").error_code == ILLEGAL
            assert peer.end_offset(topic) == 3
    with RawPeer(broker.port) as peer:
        assert log_in(peer, SCRAM, "alice", "wrong").error_code == FAILED
        assert peer.closed()


# The gate


def fresh(_peer: RawPeer) -> None:
    pass


def versioned(peer: RawPeer) -> None:
    versions(peer)


def tokens(peer: RawPeer) -> None:
    versions(peer)
    shake(peer, SCRAM)


def challenged(peer: RawPeer) -> None:
    tokens(peer)
    send_token(peer, ScramPeer("alice", PASSWORD).first())


ADMITTED: dict[Callable[[RawPeer], None], set[int]] = {
    fresh: {ApiKey.API_VERSIONS, ApiKey.SASL_HANDSHAKE, ApiKey.CHALLENGE_BROKER, ApiKey.AUTHENTICATE_BROKER},
    versioned: {ApiKey.SASL_HANDSHAKE, ApiKey.CHALLENGE_BROKER, ApiKey.AUTHENTICATE_BROKER},
    tokens: {ApiKey.SASL_AUTHENTICATE},
    challenged: {ApiKey.SASL_AUTHENTICATE},
}


@pytest.mark.full
@pytest.mark.parametrize("state", ADMITTED, ids=lambda state: state.__name__)
def test_no_api_is_served_in_any_state_before_authentication(
    broker: SaslBroker, state: Callable[[RawPeer], None]
) -> None:
    """The bodies are not valid, which a broker that decodes them would notice."""
    served_before = dict(broker.broker.server.counters.requests)
    for api in SUPPORTED_APIS.values():
        if api.key in ADMITTED[state]:
            continue
        for version in {api.min_version, api.max_version}:
            with RawPeer(broker.port) as peer:
                state(peer)
                peer.send(framed(request_header(api.key, version, 7, "x") + b"\xff" * 40))
                answer = peer.frame()
                if answer is not None:
                    _, response = messages.decode_response_frame(api.key, version, answer)
                    assert response.error_code == ILLEGAL, api.key.name
                    assert peer.closed()
    served = broker.broker.server.counters.requests
    assert served[ApiKey.PRODUCE] - served_before[ApiKey.PRODUCE] == 2, "counted, not served"


@pytest.mark.full
def test_a_produce_request_before_authentication_appends_nothing(broker: SaslBroker) -> None:
    """Also behind the other requests of the dialogue, sent at once with them."""
    topic = f"t{next(_numbers)}"
    with RawPeer(broker.port) as admin:
        log_in(admin, PLAIN, "alice", PASSWORD)
        admin.create_topic(topic)
        produce = produce_frame([(topic, None, [(0, batch_of(b"v"))])])
        shaken = messages.encode_request(ApiKey.SASL_HANDSHAKE, 1, 1, "x", {"mechanism": PLAIN})
        token = messages.encode_request(
            ApiKey.SASL_AUTHENTICATE, 2, 2, "x", {"auth_bytes": b"\0alice\0wrong"}
        )
        for sent in (produce, shaken + produce, shaken + token + produce, shaken + token + shaken + produce):
            with RawPeer(broker.port) as peer:
                peer.send(sent)
                while peer.frame() is not None:
                    pass
        assert admin.end_offset(topic) == 0


@pytest.mark.full
def test_the_dialogue_does_not_depend_on_how_its_bytes_are_split(broker: SaslBroker) -> None:
    shaken = messages.encode_request(ApiKey.SASL_HANDSHAKE, 1, 1, "x", {"mechanism": PLAIN})
    for password, code in ((PASSWORD, 0), ("wrong", FAILED)):
        token = messages.encode_request(
            ApiKey.SASL_AUTHENTICATE, 2, 2, "x", {"auth_bytes": f"\0alice\0{password}".encode()}
        )
        metadata = messages.encode_request(ApiKey.DESCRIBE_CLUSTER, 0, 3, "x", {})
        sent = shaken + token + metadata
        # wrong passwords are limited to a number in a second
        for position in range(0, len(sent), 1 if code == 0 else 40):
            with RawPeer(broker.port) as peer:
                peer.send(sent[:position])
                peer.send(sent[position:])
                answers = [peer.frame() for _ in range(3)]
                assert answers[0] is not None
                if answers[1] is None:  # not checked: too many wrong ones from this address
                    assert code
                    continue
                _, response = messages.decode_response_frame(ApiKey.SASL_AUTHENTICATE, 2, answers[1])
                assert response.error_code == code, position
                assert (answers[2] is None) == (code != 0)


@pytest.mark.full
def test_a_frame_above_the_limit_is_not_read_before_authentication(broker: SaslBroker, peer: RawPeer) -> None:
    shake(peer, PLAIN)
    peer.send((1 << 20).to_bytes(4, "big") + b"\0\x24\0\0")
    assert peer.closed()
    with RawPeer(broker.port) as other:
        shake(other, SCRAM)
        assert send_token(other, b"x" * (FRAME_BYTES_MAX - 100)).error_code == FAILED
        assert other.closed()
    with RawPeer(broker.port) as large:
        log_in(large, SCRAM, "alice", PASSWORD)
        topic = f"t{next(_numbers)}"
        large.create_topic(topic)
        assert large.produce(topic, batch_of(b"x" * 900_000)).error_code == 0


@pytest.mark.full
def test_a_handshake_for_no_mechanism_or_in_version_0_names_the_reason_and_closes(broker: SaslBroker) -> None:
    for mechanism in ("GSSAPI", "", "scram-sha-256"):
        with RawPeer(broker.port) as peer:
            answer = shake(peer, mechanism)
            assert answer.error_code == UnsupportedSaslMechanism.kafka_code
            assert tuple(answer.mechanisms) == SASL_MECHANISMS
            assert peer.closed()
    with RawPeer(broker.port) as peer:
        shaken = messages.encode_request(ApiKey.SASL_HANDSHAKE, 1, 1, "x", {"mechanism": "GSSAPI"})
        peer.send(shaken + shaken)
        assert peer.frame() is not None, "what follows the end does not take the answer away"
        assert peer.frame() is None
    with RawPeer(broker.port) as peer:
        assert shake(peer, SCRAM, version=0).error_code == UnsupportedVersion.kafka_code
        assert peer.closed()


# Attacks on the exchange


@pytest.mark.full
def test_wrong_password_unknown_user_and_other_authorization_id_have_one_answer(broker: SaslBroker) -> None:
    for mechanism in SASL_MECHANISMS:
        answers = set()
        for user, password in (("alice", "wrong"), ("nobody", PASSWORD), ("bob", PASSWORD)):
            with RawPeer(broker.port) as peer:
                last = log_in(peer, mechanism, user, password)
                answers.add((last.error_code, last.error_message, last.auth_bytes, last.session_lifetime_ms))
                assert peer.closed()
        with RawPeer(broker.port) as peer:
            shake(peer, mechanism)
            if mechanism == PLAIN:
                last = send_token(peer, f"bob\0alice\0{PASSWORD}".encode())
            else:
                scram = ScramPeer("alice", PASSWORD, ScramMechanism(mechanism), header="n,a=bob,")
                last = send_token(peer, scram.first())
            answers.add((last.error_code, last.error_message, last.auth_bytes, last.session_lifetime_ms))
            assert peer.closed()
        text = "Authentication failed during authentication due to invalid credentials with SASL mechanism "
        assert answers == {(FAILED, text + mechanism, b"", 0)}


@pytest.mark.full
def test_a_recorded_exchange_does_not_log_in_again(broker: SaslBroker, peer: RawPeer) -> None:
    shake(peer, SCRAM)
    scram = ScramPeer("alice", PASSWORD)
    first = scram.first()
    final = scram.final(send_token(peer, first).auth_bytes)
    assert send_token(peer, final).error_code == 0
    with RawPeer(broker.port) as other:
        shake(other, SCRAM)
        assert send_token(other, first).error_code == 0
        assert send_token(other, final).error_code == FAILED, "the server's nonce is another one"
        assert other.closed()
    with RawPeer(broker.port) as other:
        shake(other, SCRAM)
        assert send_token(other, final).error_code == FAILED


@pytest.mark.full
def test_a_failed_log_in_waits_before_its_answer_and_a_successful_one_does_not(broker: SaslBroker) -> None:
    for mechanism in SASL_MECHANISMS:
        with RawPeer(broker.port) as peer:
            began = time.monotonic()
            assert log_in(peer, mechanism, "alice", "wrong").error_code == FAILED
            assert time.monotonic() - began >= 0.9 * DELAY_MS / 1000


@pytest.mark.full
def test_a_client_that_does_not_authenticate_in_time_is_closed(tmp_path: Path) -> None:
    with sasl_broker(tmp_path / "data", authentication_timeout_ms=100) as broker:
        for state in ADMITTED:
            with RawPeer(broker.port) as peer:
                try:
                    state(peer)
                except (AssertionError, OSError):  # closed already
                    continue
                assert peer.closed()
        assert broker.failures["timeout"] >= 1
        assert broker.call(lambda: broker.broker.server.authentication.waiting_count) == 0


@pytest.mark.full
def test_clients_that_do_not_authenticate_keep_no_other_out(tmp_path: Path) -> None:
    """The address with the most of them loses its oldest connection. Authenticated ones stay open."""
    with sasl_broker(tmp_path / "data", max_connections=5) as broker:
        broker.set_user("alice", PASSWORD)
        server = broker.broker.server
        with RawPeer(broker.port) as slow:
            wait_until(lambda: server.connection_count == 1, TIMEOUT_S)
            silent = []
            for count in range(2, 6):
                silent.append(connect_from("127.0.0.2", broker.port))
                wait_until(lambda count=count: server.connection_count == count, TIMEOUT_S)
            admitted = []
            for _ in range(3):
                admitted.append(RawPeer(broker.port))
                assert log_in(admitted[-1], SCRAM, "alice", PASSWORD).error_code == 0
            assert log_in(slow, SCRAM, "alice", PASSWORD).error_code == 0
            for each in silent[:3]:
                with contextlib.suppress(ConnectionResetError):
                    assert each.recv(1) == b""
            wait_until(lambda: server.connection_count == 5, TIMEOUT_S)
            assert server.authentication.waiting_count == 1
            admitted.append(RawPeer(broker.port))
            assert log_in(admitted[-1], SCRAM, "alice", PASSWORD).error_code == 0
            with RawPeer(broker.port) as refused:
                assert refused.closed(), "all others have authenticated"
            assert all(versions(peer).api_keys for peer in (*admitted, slow))
        assert server.counters.rejected_by_reason["max_connections"] == 5
        for connection in (*silent, *(peer.socket for peer in admitted)):
            connection.close()


def connect_from(host: str, port: int) -> socket.socket:
    """Connect from another address of loopback."""
    return socket.create_connection(("127.0.0.1", port), scaled(TIMEOUT_S), source_address=(host, 0))


# Ends of sessions


def wait_for_the_end_of(broker: SaslBroker, session_ms: int) -> None:
    end_ms = broker.call(broker.broker.service.clock.wall_ms) + session_ms + 1
    wait_until(lambda: broker.call(broker.broker.service.clock.wall_ms) > end_ms)


@pytest.mark.full
@pytest.mark.parametrize("mechanism", SASL_MECHANISMS)
def test_the_template_of_a_producer_does_not_outlive_its_session(tmp_path: Path, mechanism: str) -> None:
    """NATS advisory 2026-16: a fast path that does not ask whether the client is still authenticated."""
    session_ms = 2_000
    with sasl_broker(tmp_path / "data", connections_max_reauth_ms=session_ms) as broker:
        broker.set_user("alice", PASSWORD)
        with RawPeer(broker.port) as peer:
            assert log_in(peer, mechanism, "alice", PASSWORD).session_lifetime_ms == session_ms
            peer.create_topic("t")
            for _ in range(3):
                assert peer.produce("t", batch_of(b"v")).error_code == 0
            (connection,) = broker.broker.server._connections
            assert connection.template is not None
            wait_for_the_end_of(broker, session_ms)
            peer.send(produce_frame([("t", None, [(0, batch_of(b"v"))])]))
            assert peer.frame() is None, "closed"
        with RawPeer(broker.port) as peer:
            log_in(peer, mechanism, "alice", PASSWORD)
            assert peer.end_offset("t") == 3
        assert broker.failures["expired"] == 1


@pytest.mark.full
@pytest.mark.parametrize("mechanism", SASL_MECHANISMS)
def test_reauthentication_continues_the_connection_after_the_end_of_its_session(
    tmp_path: Path, mechanism: str
) -> None:
    session_ms = 1_500
    with sasl_broker(tmp_path / "data", connections_max_reauth_ms=session_ms) as broker:
        broker.set_user("alice", PASSWORD)
        broker.set_user("bob", PASSWORD)
        with RawPeer(broker.port) as peer:
            log_in(peer, mechanism, "alice", PASSWORD)
            peer.create_topic("t")
            for _ in range(2):
                wait_for_the_end_of(broker, session_ms)
                assert log_in(peer, mechanism, "alice", PASSWORD).session_lifetime_ms == session_ms
                assert peer.produce("t", batch_of(b"v")).error_code == 0
            wait_for_the_end_of(broker, session_ms)
            last = log_in(peer, mechanism, "bob", PASSWORD)
            assert last.error_code == FAILED
            assert "re-authentication" in last.error_message
            assert peer.closed()


@pytest.mark.full
@pytest.mark.parametrize("mechanism", SASL_MECHANISMS)
@pytest.mark.parametrize("change", ["change", "delete"])
def test_a_changed_or_deleted_credential_ends_the_sessions_of_its_user_only(
    broker: SaslBroker, mechanism: str, change: str
) -> None:
    user = f"user-{next(_numbers)}"
    broker.set_user(user, "first")
    with RawPeer(broker.port) as peer, RawPeer(broker.port) as other:
        log_in(peer, mechanism, user, "first")
        log_in(other, mechanism, "alice", PASSWORD)
        if change == "change":
            broker.set_user(user, "second")
        else:
            broker.delete_user(user)
        assert peer.closed()
        assert other.call(ApiKey.DESCRIBE_CLUSTER, 0).error_code == 0
    with RawPeer(broker.port) as peer:
        assert log_in(peer, mechanism, user, "first").error_code == FAILED
    if change == "change":
        with RawPeer(broker.port) as peer:
            assert log_in(peer, mechanism, user, "second").error_code == 0


def set_password(peer: RawPeer, user: str, password: str, previous_valid_ms: int = 0) -> Struct:
    fields = {"user": user, "password": password.encode(), "previous_valid_ms": previous_valid_ms}
    return peer.call(ApiKey.SET_PASSWORD, 0, fields)


@pytest.mark.full
@pytest.mark.parametrize("mechanism", SASL_MECHANISMS)
def test_a_user_who_changes_the_own_password_is_answered_before_the_session_ends(
    broker: SaslBroker, mechanism: str
) -> None:
    user = f"user-{next(_numbers)}"
    broker.set_user(user, "first")
    with RawPeer(broker.port) as peer:
        log_in(peer, mechanism, user, "first")
        assert set_password(peer, user, "second").error_code == 0
        peer.send(messages.encode_request(ApiKey.DESCRIBE_CLUSTER, 0, 1, "x", {}))
        assert peer.closed(), "no request is served after the change"
    with RawPeer(broker.port) as peer:
        assert log_in(peer, mechanism, user, "second").error_code == 0


@pytest.mark.full
@pytest.mark.parametrize("mechanism", SASL_MECHANISMS)
def test_a_previous_password_logs_in_and_its_sessions_go_on_until_its_end(
    broker: SaslBroker, mechanism: str
) -> None:
    user, valid_ms = f"user-{next(_numbers)}", 3_000
    broker.set_user(user, "first")
    with RawPeer(broker.port) as admin, RawPeer(broker.port) as peer:
        log_in(admin, mechanism, "alice", PASSWORD)
        assert log_in(peer, mechanism, user, "first").session_lifetime_ms == 0
        assert set_password(admin, user, "second", valid_ms).error_code == 0
        for password in ("first", "second"):
            with RawPeer(broker.port) as other:
                last = log_in(other, mechanism, user, password)
                assert last.error_code == 0
                assert (last.session_lifetime_ms > 0) == (password == "first")
        assert peer.call(ApiKey.DESCRIBE_CLUSTER, 0).error_code == 0, "its session goes on"
        wait_for_the_end_of(broker, valid_ms)
        peer.send(messages.encode_request(ApiKey.DESCRIBE_CLUSTER, 0, 1, "x", {}))
        assert peer.closed()
        with RawPeer(broker.port) as other:
            assert log_in(other, mechanism, user, "first").error_code == FAILED
        assert set_password(admin, user, "third").error_code == 0
        with RawPeer(broker.port) as other:
            assert log_in(other, mechanism, user, "second").error_code == FAILED


# Restart


@pytest.mark.full
def test_users_survive_a_restart(tmp_path: Path) -> None:
    with sasl_broker(tmp_path / "data") as broker:
        broker.set_user("alice", PASSWORD)
        secret = broker.broker.service.users._state.server_secret
    with sasl_broker(tmp_path / "data") as broker:
        assert broker.broker.service.users._state.server_secret == secret
        for mechanism in SASL_MECHANISMS:
            with RawPeer(broker.port) as peer:
                assert log_in(peer, mechanism, "alice", PASSWORD).error_code == 0


# The user of a request


@pytest.mark.full
def test_the_quota_of_a_user_applies_to_its_connections_by_every_mechanism(tmp_path: Path) -> None:
    with sasl_broker(tmp_path / "data", quota_burst_ms=100) as broker:
        broker.set_user("slow", PASSWORD)
        broker.set_user("fast", PASSWORD)
        quotas = broker.broker.service.quotas
        for mechanism in SASL_MECHANISMS:
            with RawPeer(broker.port) as slow, RawPeer(broker.port) as fast:
                log_in(slow, mechanism, "slow", PASSWORD)
                log_in(fast, mechanism, "fast", PASSWORD)
                topic = f"t{next(_numbers)}"
                fast.create_topic(topic)
                broker.run(quotas.alter(QuotaEntity(user="slow"), {"producer_byte_rate": 100_000}))
                before = quotas.counters.produce_throttled
                assert fast.produce(topic, batch_of(b"x" * 20_000)).error_code == 0
                assert quotas.counters.produce_throttled == before
                assert slow.produce(topic, batch_of(b"x" * 20_000)).error_code == 0
                assert quotas.counters.produce_throttled == before + 1
                broker.run(quotas.alter(QuotaEntity(user="slow"), {"producer_byte_rate": None}))


@pytest.mark.full
def test_a_rejected_request_is_logged_with_its_user(
    broker: SaslBroker, peer: RawPeer, caplog: pytest.LogCaptureFixture
) -> None:
    log_in(peer, SCRAM, "alice", PASSWORD)
    assert set_password(peer, "nobody", "p").error_code != 0
    (rejected,) = [vars(one)["mansio_fields"] for one in caplog.records if one.msg == "request_rejected"]
    assert (rejected["user"], rejected["api"]) == ("alice", "set_password")


# Logs


@pytest.mark.full
def test_no_log_line_has_a_secret_and_a_failure_names_user_and_reason(
    broker: SaslBroker, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    user, password, later = f"user-{next(_numbers)}", "pass-word-1", "pass-word-2"
    broker.set_user(user, password)
    with RawPeer(broker.port) as admin:
        log_in(admin, PLAIN, user, password)
        set_password(admin, "nobody", later)
        upsertion = {
            "name": "",
            "mechanism": 1,
            "iterations": 1,
            "salt": b"salt-1",
            "salted_password": b"salted-1",
        }
        fields: dict[str, Any] = {"deletions": [], "upsertions": [upsertion]}
        answer = admin.call(ApiKey.ALTER_USER_SCRAM_CREDENTIALS, 0, fields)
        assert answer.results[0].error_code != 0
    for mechanism in SASL_MECHANISMS:
        with RawPeer(broker.port) as peer:
            log_in(peer, mechanism, user, later)
    secret = broker.broker.service.users._state.server_secret
    assert secret is not None
    text = "\n".join(str(vars(record)) for record in caplog.records)
    for hidden in (password, later, "salt-1", "salted-1", secret.hex()):
        assert hidden not in text
    failed = [
        vars(record)["mansio_fields"]
        for record in caplog.records
        if record.msg == "authentication_failed" and "mansio_fields" in vars(record)
    ]
    assert {"user": user, "reason": "wrong password", "peer": "127.0.0.1"} in failed
    assert secret.hex() not in repr(broker.broker.service.users._state)


@pytest.mark.full
def test_a_connection_ends_with_the_certificate_that_was_its_identity(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "authority")
    issued, client = authority.issue(), authority.issue("alice", names=())
    files = {
        "ssl_certificate_location": str(issued.certificate),
        "ssl_key_location": str(issued.key),
        "ssl_ca_location": str(authority.certificate),
    }
    listener = {"listeners": "SSL://127.0.0.1:0", "ssl_client_auth": "required"}
    with sasl_broker(tmp_path / "data", **listener, **files) as broker:
        context = client_context(authority.certificate, client)
        plain = socket.create_connection(("127.0.0.1", broker.port), scaled(TIMEOUT_S))
        with context.wrap_socket(plain, server_hostname="127.0.0.1") as encrypted:
            wait_until(lambda: broker.broker.server.connection_count == 1, TIMEOUT_S)
            (connection,) = broker.broker.server._connections
            assert connection.session.user == "CN=alice"
            expires_ms = connection.session.expires_ms
            assert expires_ms is not None
            assert expires_ms > time.time() * 1000
            ended = replace(connection.session, expires_ms=1)
            broker.call(lambda: connection.admit(ended, is_endless=True))
            assert encrypted.recv(1) == b""
        assert broker.failures["expired"] == 1
