"""No client is taken for a broker: every request that only brokers send is forged over a socket and refused by a single
node, which has no other brokers, and changes nothing."""

from __future__ import annotations

import os
import uuid
from typing import TYPE_CHECKING

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from mansio.broker.coordinator.share.state_messages import RequestSender
from mansio.state.broker_handshake import NONCE_BYTES, BrokerIdentity, ClusterSecret, Handshake
from mansio.wire.api_versions import ApiKey
from support.forged_requests import (
    ABSURD_EPOCHS,
    CLUSTER_AUTHORIZATION_FAILED,
    INTER_BROKER,
    Target,
    check_refused,
)
from support.machine import scaled
from support.process import ServedBroker, served
from support.raw_peer import RawPeer, batch_of

if TYPE_CHECKING:
    from collections.abc import Iterator

RECORDS = 10
START_OFFSET = 4


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedBroker]:
    with served(tmp_path_factory.mktemp("impersonation") / "data") as running:
        yield running
        assert "Traceback" not in running.text()


@pytest.fixture(scope="module")
def target(broker: ServedBroker) -> Target:
    """A topic with records, and a share group that begins in the middle of it."""
    with RawPeer(broker.kafka_port) as peer:
        peer.create_topic("t")
        assert peer.produce("t", batch_of(*(b"v" for _ in range(RECORDS)))).error_code == 0
        (described,) = peer.call(ApiKey.METADATA, 12, {"topics": [{"name": "t"}]}).topics
        target = Target("t", uuid.UUID(bytes=described.topic_id), RECORDS)
        partitions = [{"partition_index": 0, "start_offset": START_OFFSET}]
        fields = {"group_id": target.group, "topics": [{"topic_name": "t", "partitions": partitions}]}
        assert peer.call(ApiKey.ALTER_SHARE_GROUP_OFFSETS, 0, fields).error_code == 0
    return target


def share_start_offset(peer: RawPeer, target: Target) -> int:
    topics = [{"topic_name": target.topic, "partitions": [0]}]
    fields = {"groups": [{"group_id": target.group, "topics": topics}]}
    (group,) = peer.call(ApiKey.DESCRIBE_SHARE_GROUP_OFFSETS, 1, fields).groups
    return int(group.topics[0].partitions[0].start_offset)


@pytest.mark.parametrize("key", INTER_BROKER, ids=lambda key: key.name)
def test_a_single_node_accepts_no_peer_as_a_broker(broker: ServedBroker, target: Target, key: ApiKey) -> None:
    for node_id in (0, 1, 7):  # 1 is the broker itself
        for epoch in (1, 2, *ABSURD_EPOCHS):
            check_refused(broker.kafka_port, key, target, RequestSender(node_id, epoch))
    with RawPeer(broker.kafka_port) as peer:
        assert peer.end_offset("t") == RECORDS
        assert share_start_offset(peer, target) == START_OFFSET


def test_a_single_node_begins_no_handshake_and_closes_the_connection(broker: ServedBroker) -> None:
    nonce = os.urandom(NONCE_BYTES)
    identity = BrokerIdentity(2, 5)
    proof = Handshake("cluster", identity, 1, nonce, nonce).dialler_proof(ClusterSecret(bytes(32)))
    for key, fields in (
        (ApiKey.CHALLENGE_BROKER, {"nonce": nonce}),
        (ApiKey.AUTHENTICATE_BROKER, {**identity._asdict(), "proof": proof}),
    ):
        with RawPeer(broker.kafka_port) as peer:
            assert peer.call(key, 0, fields).error_code == CLUSTER_AUTHORIZATION_FAILED
            assert peer.closed()


def test_the_handshake_is_not_advertised(broker: ServedBroker) -> None:
    with RawPeer(broker.kafka_port) as peer:
        offered = {api.api_key for api in peer.call(ApiKey.API_VERSIONS, 3).api_keys}
    assert not offered & {ApiKey.CHALLENGE_BROKER, ApiKey.AUTHENTICATE_BROKER}
    assert ApiKey.REDRIVE_RECORDS in offered


def test_consumers_with_negative_replica_ids_are_served(broker: ServedBroker, target: Target) -> None:
    """-1 is a consumer, -2 Kafka's debugging tools."""
    with RawPeer(broker.kafka_port) as peer:
        for replica_id in (-1, -2):
            partitions = [{"partition_index": 0, "timestamp": -1}]
            fields = {
                "replica_id": replica_id,
                "topics": [{"name": target.topic, "partitions": partitions}],
            }
            (found,) = peer.call(ApiKey.LIST_OFFSETS, 5, fields).topics[0].partitions
            assert (found.error_code, found.offset) == (0, RECORDS)


def test_an_impersonator_is_counted_and_logged_at_most_once_a_second(
    broker: ServedBroker, target: Target
) -> None:
    before = refusals(broker)
    lines = broker.text().count("inter_broker_request_refused")
    sent = 0
    for _ in range(10):
        sent += check_refused(broker.kafka_port, ApiKey.LIST_OFFSETS, target, RequestSender(3, 1))
    assert refusals(broker) - before == sent == 100
    assert broker.text().count("inter_broker_request_refused") - lines < sent / 2


def refusals(broker: ServedBroker) -> float:
    text = httpx.get(f"{broker.http_url}/metrics", timeout=scaled(10)).text
    return next(
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "mansio_inter_broker_requests_refused_total"
    )
