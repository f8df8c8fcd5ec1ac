"""Access control lists of a cluster: a change is in force for clients that are connected to any broker."""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from component.authorization.matrix import PASSWORD
from component.authorization.requests import error_codes
from mansio.errors import TopicAuthorizationFailed
from mansio.wire.api_versions import ApiKey
from support.etcd import one_etcd
from support.raw_peer import RawPeer
from support.sasl_broker import SaslBroker, log_in, sasl_broker
from support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.full

BROKERS = 3
CHANGES = 10
"""Pairs of changes. 50 give the figure of docs/reference/performance.md."""
SCRAM = "SCRAM-SHA-256"


@pytest.fixture(scope="module")
def brokers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[SaslBroker]]:
    directory = tmp_path_factory.mktemp("authorization")
    with one_etcd() as etcd, ExitStack() as stack:
        yield [
            stack.enter_context(
                sasl_broker(
                    directory / f"broker-{node_id}",
                    node_id=node_id,
                    etcd_endpoints=etcd.url,
                    authorizer="acl",
                    super_users="User:admin",
                )
            )
            for node_id in range(1, BROKERS + 1)
        ]


def connect(stack: ExitStack, broker: SaslBroker, user: str) -> RawPeer:
    peer = stack.enter_context(RawPeer(broker.port))
    assert log_in(peer, SCRAM, user, PASSWORD).error_code == 0
    return peer


def is_refused(peer: RawPeer) -> bool:
    asked = {"topics": [{"topic_id": None, "name": "orders"}], "allow_auto_topic_creation": False}
    return TopicAuthorizationFailed.kafka_code in error_codes(peer.call(ApiKey.METADATA, 12, asked))


def test_a_change_of_acls_is_in_force_for_clients_connected_to_each_broker(
    brokers: list[SaslBroker],
) -> None:
    for user in ("alice", "admin"):
        brokers[0].set_user(user, PASSWORD)
    for broker in brokers:
        users = broker.broker.service.users._state.users
        wait_until(lambda known=users: {"alice", "admin"} <= known.keys())
    acl = {
        "resource_type": 2,
        "resource_name": "orders",
        "resource_pattern_type": 3,
        "principal": "User:alice",
        "host": "*",
        "operation": 8,
        "permission_type": 3,
    }
    selected = {
        "resource_type_filter": 2,
        "resource_name_filter": "orders",
        "pattern_type_filter": 3,
        "principal_filter": "User:alice",
        "host_filter": None,
        "operation": 8,
        "permission_type": 3,
    }
    seconds = []
    with ExitStack() as stack:
        admins = [connect(stack, broker, "admin") for broker in brokers]
        clients = [connect(stack, broker, "alice") for broker in brokers]
        assert all(map(is_refused, clients))
        for number in range(CHANGES):
            admin = admins[number % BROKERS]
            for key, fields, refused in (
                (ApiKey.CREATE_ACLS, {"creations": [acl]}, False),
                (ApiKey.DELETE_ACLS, {"filters": [selected]}, True),
            ):
                assert not error_codes(admin.call(key, 2, fields))
                answered = time.monotonic()
                assert is_refused(clients[number % BROKERS]) is refused, (
                    "the broker that has answered knows it"
                )
                for client in clients:
                    wait_until(lambda c=client, r=refused: is_refused(c) is r)
                seconds.append(time.monotonic() - answered)
    seconds.sort()
    print(f"{len(seconds)} changes: median {seconds[len(seconds) // 2]:.4f} s, longest {seconds[-1]:.4f} s")
