"""Users of a cluster: both brokers know a change; brokers authenticate each other on a listener where
clients have to; a broker that may have lost its session refuses log-ins."""

from __future__ import annotations

from contextlib import ExitStack
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple

import pytest
from confluent_kafka import Consumer, Producer

import mansio
import mansio.blocking
from mansio.config.security import SASL_MECHANISMS
from mansio.errors import SaslAuthenticationFailed
from mansio.wire.api_versions import ApiKey
from support.credentials import ScramPeer
from support.etcd import one_etcd
from support.machine import scaled
from support.raw_peer import RawPeer
from support.sasl_broker import SaslBroker, log_in, sasl_broker, send_token, shake
from support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.etcd import Etcd

pytestmark = pytest.mark.full

FAILED = SaslAuthenticationFailed.kafka_code
SCRAM = SASL_MECHANISMS[0]
SOON = timedelta(milliseconds=1)


class Joined(NamedTuple):
    """Two brokers of one cluster, and its etcd."""

    etcd: Etcd
    brokers: tuple[SaslBroker, SaslBroker]

    @property
    def addresses(self) -> str:
        return ",".join(broker.address for broker in self.brokers)


@pytest.fixture(scope="module")
def joined(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Joined]:
    directory = tmp_path_factory.mktemp("users")
    secrets_key = directory / "secrets.key"
    secrets_key.write_text("5a" * 32)
    secrets_key.chmod(0o600)
    with one_etcd() as etcd, ExitStack() as stack:
        first, second = (
            stack.enter_context(
                sasl_broker(
                    directory / f"broker-{node_id}",
                    node_id=node_id,
                    etcd_endpoints=etcd.url,
                    default_replication_factor=2,
                    broker_session_timeout_ms=6_000,
                    authorization_stale_max_ms=1_000,
                    secrets_key_file=str(secrets_key),
                    delegation_token_expiry_check_interval_ms=100,
                )
            )
            for node_id in (1, 2)
        )
        yield Joined(etcd, (first, second))


def code_of_log_in(broker: SaslBroker, user: str, password: str, mechanism: str = SCRAM) -> int:
    with RawPeer(broker.port) as peer:
        return int(log_in(peer, mechanism, user, password).error_code)


def test_a_user_logs_in_on_the_other_broker_and_its_deletion_ends_its_sessions_there(
    joined: Joined,
) -> None:
    here, there = joined.brokers
    for mechanism in SASL_MECHANISMS:
        here.set_user("alice", "secret")
        wait_until(lambda: "alice" in there.broker.service.users._state.users)
        with RawPeer(there.port) as peer, RawPeer(here.port) as other:
            assert log_in(peer, mechanism, "alice", "secret").error_code == 0
            assert log_in(other, mechanism, "alice", "secret").error_code == 0
            here.delete_user("alice")
            assert peer.closed()
            assert other.closed()
        assert code_of_log_in(there, "alice", "secret", mechanism) == FAILED


def log_in_with_token(peer: RawPeer, token: mansio.DelegationToken) -> int:
    assert not shake(peer, SCRAM).error_code
    scram = ScramPeer(token.token_id, token.password, extensions=",tokenauth=true")
    challenge = send_token(peer, scram.first())
    return int(send_token(peer, scram.final(challenge.auth_bytes)).error_code)


def test_a_token_and_an_access_key_are_known_to_the_other_broker_and_end_there(joined: Joined) -> None:
    here, there = joined.brokers
    here.set_user("tim", "secret")
    state = there.broker.service.users._state
    wait_until(lambda: "tim" in state.users)
    with mansio.blocking.connect(here.address, user="tim", password="secret") as client:
        for ends in (client.admin.tokens.expire, lambda hmac: client.admin.tokens.expire(hmac, after=SOON)):
            token = client.admin.tokens.create()
            wait_until(lambda token=token: token.token_id in state.tokens)
            with RawPeer(there.port) as peer:
                assert log_in_with_token(peer, token) == 0
                ends(token.hmac)
                assert peer.closed()
            with RawPeer(there.port) as peer:
                assert log_in_with_token(peer, token) == FAILED
        key = client.admin.users.create_sqs_key("tim")
        keys = there.broker.service.sqs_access_keys
        wait_until(lambda: there.call(keys.find, key.key_id) == ("tim", key.secret))
        client.admin.users.delete_sqs_key(key.key_id)
        wait_until(lambda: there.call(keys.find, key.key_id) is None)


def test_both_brokers_send_the_same_salt_to_an_unknown_user(joined: Joined) -> None:
    secrets = {broker.broker.service.users._state.server_secret for broker in joined.brokers}
    assert len(secrets) == 1
    assert secrets != {None}


def test_a_client_with_a_password_writes_replicated_records_and_reads_them(joined: Joined) -> None:
    """The brokers replicate and coordinate over the listener on which clients have to authenticate."""
    joined.brokers[0].set_user("writer", "secret")
    settings = {
        "bootstrap.servers": joined.addresses,
        "security.protocol": "SASL_PLAINTEXT",
        "sasl.mechanism": "SCRAM-SHA-512",
        "sasl.username": "writer",
        "sasl.password": "secret",
        "log_level": 0,
    }
    wait_until(lambda: "writer" in joined.brokers[1].broker.service.users._state.users)
    producer = Producer({**settings, "acks": "all"})
    failed: list[object] = []

    def report(error: object, _message: object) -> None:
        if error is not None:
            failed.append(error)

    for number in range(100):
        producer.produce("t", b"%d" % number, on_delivery=report)
    assert producer.flush(scaled(30)) == 0
    assert failed == []
    state = joined.brokers[0].broker.service.topics.state
    wait_until(lambda: {len(one.isr) for one in state.topics["t"].partitions} == {2})
    assert any(one.broker.service.authenticator.authenticated_count for one in joined.brokers)
    consumer = Consumer({**settings, "group.id": "g", "auto.offset.reset": "earliest"})
    try:
        consumer.subscribe(["t"])
        found: set[bytes] = set()

        def all_found() -> bool:
            message = consumer.poll(0.1)
            if message is not None and message.error() is None:
                found.add(message.value() or b"")
            return len(found) == 100

        wait_until(all_found, 60)
    finally:
        consumer.close()


def test_an_authenticated_client_is_no_broker(joined: Joined) -> None:
    here, _ = joined.brokers
    here.set_user("mallory", "secret")
    with RawPeer(here.port) as peer:
        log_in(peer, SCRAM, "mallory", "secret")
        fields = {
            "node_id": 2,
            "broker_epoch": here.broker.service.topics.state.epoch_of(2),
            "is_own": True,
            "client_address": "",
            "user": "admin",
            "listener": "",
            "credential_revision": 0,
            "request": b"\0\x12\0\0\0\0\0\0\xff\xff",
        }
        assert peer.call(ApiKey.FORWARD_REQUEST, 0, fields).error_code == 31


def test_a_broker_cut_off_from_the_cluster_ends_the_connections_of_users_and_refuses_log_ins_without_an_answer(
    joined: Joined,
) -> None:
    here, _ = joined.brokers
    here.set_user("bob", "secret")
    with RawPeer(here.port) as before:
        assert log_in(before, SCRAM, "bob", "secret").error_code == 0
        joined.etcd.stop()
        try:
            cluster = here.broker.service.cluster
            assert cluster is not None
            wait_until(lambda: not here.call(cluster.is_session_valid), 60)
            wait_until(lambda: here.failures["stale"] > 0, 60)
            assert before.closed()
            refuse_log_in(here)
        finally:
            joined.etcd.start()
    wait_until(lambda: here.call(cluster.is_session_valid), 60)
    assert code_of_log_in(here, "bob", "secret") == 0


def refuse_log_in(here: SaslBroker) -> None:
    with RawPeer(here.port) as peer, pytest.raises(AssertionError, match="closed the connection"):
        log_in(peer, SCRAM, "bob", "secret")
    assert here.failures["unavailable"] >= 1
