"""TLS between brokers: nothing between them reads, relays or adds anything, and clients with a password are no brokers.

Two brokers of this process over a real etcd. What the listener INTERNAL advertises is the port of something in between,
which passes bytes on until a test lets it do something else.
"""

from __future__ import annotations

import itertools
import os
import shutil
import uuid
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import pytest

import mansio
from mansio.broker.coordinator.share.state_messages import RequestSender
from mansio.net.tls.contexts import load_client_context
from mansio.state.broker_handshake import NONCE_BYTES, BrokerIdentity, Handshake
from mansio.wire.api_versions import ApiKey
from mansio.wire.codec import messages
from support.between_brokers import BetweenBrokers
from support.certificates import Authority, Certificate
from support.etcd import one_etcd
from support.forged_requests import CLUSTER_AUTHORIZATION_FAILED, FORGERIES, INTER_BROKER, Target, send_frame
from support.paths import free_port
from support.present import present
from support.raw_peer import RawPeer
from support.sasl_broker import log_in
from support.tiers import smoke_first
from support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NODES = (1, 2)
WAIT_S = 45
TOPIC = "cleartext-topic"
PAYLOAD = b"cleartext-payload"
USER, PASSWORD = "alice", "secret of alice"
INJECTED_ID = 0x7A6B5C4D
"""Correlation id of a request that a broker must not answer."""


class Pair:
    """See the module. `protocol`: of the listener between brokers. LOCAL is an open listener of the test."""

    def __init__(self, directory: Path, etcd_url: str, stack: ExitStack, protocol: str) -> None:
        self.directory = directory
        self.authority = Authority(directory / "authority")
        self.brokers: dict[int, mansio.Broker] = {}
        self.between: dict[int, BetweenBrokers] = {}
        self.local = {node_id: free_port() for node_id in NODES}
        self.clients = {node_id: free_port() for node_id in NODES}
        self.internal = {node_id: free_port() for node_id in NODES}
        self._etcd_url = etcd_url
        self._stack = stack
        self._protocol = protocol
        for node_id in NODES:
            between = BetweenBrokers(free_port(), self.internal[node_id])
            self.between[node_id] = stack.enter_context(between)
            self.install(node_id, self.authority.issue(f"broker-{node_id}"))

    def files(self, node_id: int) -> Certificate:
        return Certificate(self.directory / f"{node_id}.pem", self.directory / f"{node_id}.key")

    def install(self, node_id: int, issued: Certificate) -> None:
        for source, target in zip(issued, self.files(node_id), strict=True):
            shutil.copy(source, target)

    def start(self, node_id: int) -> None:
        """Start a broker, or start it again."""
        if node_id in self.brokers:
            self.brokers[node_id].close()
        bound = {"LOCAL": self.local, "CLIENTS": self.clients, "INTERNAL": self.internal}
        advertised = bound | {"INTERNAL": {each: one.port for each, one in self.between.items()}}

        def texts(ports: dict[str, dict[int, int]]) -> str:
            return ",".join(f"{name}://127.0.0.1:{each[node_id]}" for name, each in ports.items())

        settings: dict[str, Any] = {
            "listeners": texts(bound),
            "advertised_listeners": texts(advertised),
            "listener_security_protocol_map": f"LOCAL:PLAINTEXT,CLIENTS:SASL_SSL,INTERNAL:{self._protocol}",
            "inter_broker_listener_name": "INTERNAL",
            "open_listeners": "LOCAL" if self._protocol == "SASL_SSL" else "LOCAL,INTERNAL",
            "ssl_certificate_location": str(self.files(node_id).certificate),
            "ssl_key_location": str(self.files(node_id).key),
            "ssl_ca_location": str(self.authority.certificate),
            "ssl_client_auth": "none" if self._protocol == "SASL_SSL" else "requested",
            "default_replication_factor": 2,
            "group_initial_rebalance_delay_ms": 0,
            "replica_lag_time_max_ms": 2_000,
        }
        broker = mansio.Broker(
            self.directory / f"data-{node_id}", etcd_endpoints=self._etcd_url, node_id=node_id, **settings
        )
        self.brokers[node_id] = self._stack.enter_context(broker)

    def node(self, node_id: int) -> Any:
        """The broker behind the public class."""
        return present(self.brokers[node_id]._broker)

    def renew(self, node_id: int) -> None:
        """Let a broker read its files again, and wait until it uses them."""
        certificates = self.node(node_id)._security.certificates
        before = certificates.reloads

        async def reload() -> None:
            self.node(node_id).reload_certificates()

        self.brokers[node_id]._call(reload(), WAIT_S)
        wait_until(lambda: certificates.reloads > before, WAIT_S, "the new certificates")

    def refused(self, node_id: int) -> int:
        """Number of wrong proofs that a broker got."""
        return int(self.node(node_id).service.authenticator.failure_counts["proof"])

    def inside(self, node_id: int) -> mansio.blocking.Client:
        """A client of the test's own listener."""
        return mansio.blocking.connect(f"127.0.0.1:{self.local[node_id]}")

    def client(self, node_id: int) -> mansio.blocking.Client:
        """A client with a password."""
        return mansio.blocking.connect(
            f"127.0.0.1:{self.clients[node_id]}",
            tls=str(self.authority.certificate),
            user=USER,
            password=PASSWORD,
        )

    @contextmanager
    def raw_client(self, port: int) -> Iterator[RawPeer]:
        """A connection with TLS to a port."""
        with RawPeer(port) as peer:
            context = load_client_context(str(self.authority.certificate))
            peer.socket = context.wrap_socket(peer.socket, server_hostname="127.0.0.1")
            yield peer


@contextmanager
def pair(directory: Path, protocol: str = "SASL_SSL") -> Iterator[Pair]:
    with one_etcd() as etcd, ExitStack() as stack:
        found = Pair(directory, etcd.url, stack, protocol)
        for node_id in NODES:
            found.start(node_id)
        with found.inside(1) as client:
            client.admin.users.create(USER, PASSWORD)
        yield found


def in_sync(client: mansio.blocking.Client, topic: str = TOPIC) -> bool:
    return all(len(each.in_sync_replicas) == 2 for each in client.admin.cluster.partitions([topic]))


def check_not_replicated(client: mansio.blocking.Client) -> None:
    """Publish a record to the partition that broker 1 leads, and wait until it has only one copy."""
    (partition,) = (each.partition for each in client.admin.cluster.partitions([TOPIC]) if each.leader == 1)
    client.publish(TOPIC, PAYLOAD, partition=partition)
    wait_until(
        lambda: set(client.admin.cluster.partitions([TOPIC])[partition].in_sync_replicas) == {1},
        WAIT_S,
        "the follower gets nothing",
    )


def create_topic(one: Pair, topic: str = TOPIC) -> None:
    """One partition for each broker, with a copy on the other one, without which it accepts records."""
    with one.inside(1) as client:
        client.admin.create_topic(topic, partitions=2, config={"min.insync.replicas": "1"})
        wait_until(lambda: in_sync(client, topic), WAIT_S, "both replicas are in sync")
        assert {each.leader for each in client.admin.cluster.partitions([topic])} == set(NODES)


@pytest.mark.row("C6")
@pytest.mark.parametrize("protocol", smoke_first("SASL_SSL", "SSL"))
def test_brokers_replicate_and_forward_over_tls_without_a_byte_in_cleartext(
    tmp_path: Path, protocol: str
) -> None:
    with pair(tmp_path, protocol) as one:
        create_topic(one)
        with one.client(1) as client:
            for partition in (0, 1):
                client.publish(TOPIC, PAYLOAD, partition=partition)
            wait_until(lambda: in_sync(client), WAIT_S, "both have a copy")
        for node_id in NODES:  # each forwards the reads of the partition that the other one leads
            with one.client(node_id) as client:
                found = client.consume(TOPIC, group=f"g{node_id}", max_records=2)
                assert [each.value for each in found] == [PAYLOAD] * 2
        for node_id, between in one.between.items():
            assert len(between.seen) > 2_000, f"broker {node_id} was asked"
            for cleartext in (TOPIC.encode(), PAYLOAD, b"mansio", USER.encode()):
                assert cleartext not in between.seen
        assert [one.refused(node_id) for node_id in NODES] == [0, 0]


@pytest.mark.full
def test_a_relay_with_a_certificate_of_the_same_authority_is_refused(tmp_path: Path) -> None:
    with pair(tmp_path) as one:
        create_topic(one)
        injected = messages.encode_request(ApiKey.METADATA, 9, INJECTED_ID, "mansio-follower", {"topics": []})
        relay = one.between[1]
        relay.relay(one.authority, inject=lambda: injected)
        with one.inside(1) as client:
            wait_until(lambda: one.refused(1) > 0, WAIT_S, "broker 1 refused what the relay passed on")
            check_not_replicated(client)
        assert set(relay.relayed) == {
            ApiKey.API_VERSIONS,
            ApiKey.CHALLENGE_BROKER,
            ApiKey.AUTHENTICATE_BROKER,
        }
        assert PAYLOAD not in relay.seen
        assert INJECTED_ID.to_bytes(4) not in relay.seen
        relay.pass_on()
        with one.inside(1) as client:
            wait_until(lambda: in_sync(client), WAIT_S, "the follower comes back without the relay")


@pytest.mark.full
def test_the_handshake_covers_the_certificate_with_which_the_connection_began(tmp_path: Path) -> None:
    with pair(tmp_path) as one:
        state = one.node(1).service.topics.state
        identity = BrokerIdentity(2, state.epoch_of(2))

        def code(peer: RawPeer, certificate_sha256: bytes) -> int:
            nonce = os.urandom(NONCE_BYTES)
            challenge = peer.call(ApiKey.CHALLENGE_BROKER, 0, {"nonce": nonce})
            handshake = Handshake(state.cluster_id, identity, 1, nonce, challenge.nonce, certificate_sha256)
            proof = handshake.dialler_proof(state.cluster_secret)
            fields = {**identity._asdict(), "proof": proof}
            return int(peer.call(ApiKey.AUTHENTICATE_BROKER, 0, fields).error_code)

        reloader = one.node(1)._security.certificates
        earlier = reloader.server_context.certificate_sha256
        with one.raw_client(one.internal[1]) as before, one.raw_client(one.internal[1]) as other:
            one.install(1, one.authority.issue("renewed"))
            one.renew(1)
            renewed = reloader.server_context.certificate_sha256
            assert renewed != earlier
            with one.raw_client(one.internal[1]) as after:
                assert code(after, renewed) == 0
            assert code(before, earlier) == 0
            assert code(other, renewed) == CLUSTER_AUTHORIZATION_FAILED
        with one.raw_client(one.internal[1]) as peer:
            assert code(peer, b"") == CLUSTER_AUTHORIZATION_FAILED, "the proof of a connection without TLS"


@pytest.mark.full
def test_a_client_with_a_password_is_no_broker(tmp_path: Path) -> None:
    with pair(tmp_path) as one:
        create_topic(one)
        state = one.node(1).service.topics.state
        target = Target(TOPIC, uuid.UUID(str(state.topics[TOPIC].topic_id)), 0)
        refused = 0
        for key, epoch in itertools.product(INTER_BROKER, (state.epoch_of(2), 1 << 62)):
            if key in (ApiKey.CHALLENGE_BROKER, ApiKey.AUTHENTICATE_BROKER):
                continue
            for forged in FORGERIES[key](target, RequestSender(2, epoch)):
                with one.raw_client(one.clients[1]) as peer:
                    assert log_in(peer, "SCRAM-SHA-256", USER, PASSWORD).error_code == 0
                    assert set(forged.codes(send_frame(peer, forged.frame))) == {CLUSTER_AUTHORIZATION_FAILED}
                refused += 1
        assert refused > 20
        with one.raw_client(one.clients[1]) as peer:
            log_in(peer, "SCRAM-SHA-256", USER, PASSWORD)
            answer = peer.call(ApiKey.CHALLENGE_BROKER, 0, {"nonce": os.urandom(NONCE_BYTES)})
            assert answer.error_code == 0, "a challenge is given to anybody"
            fields = {"node_id": 2, "broker_epoch": state.epoch_of(2), "proof": os.urandom(32)}
            assert peer.call(ApiKey.AUTHENTICATE_BROKER, 0, fields).error_code == CLUSTER_AUTHORIZATION_FAILED


@pytest.mark.full
def test_a_broker_with_a_certificate_of_another_authority_replicates_nothing(tmp_path: Path) -> None:
    with pair(tmp_path) as one:
        create_topic(one)
        stranger = Authority(tmp_path / "stranger", "Other CA").issue("relay")
        relay = one.between[1]
        relay.relay(one.authority, own=stranger)
        with one.inside(1) as client:
            check_not_replicated(client)
        assert relay.relayed == []
