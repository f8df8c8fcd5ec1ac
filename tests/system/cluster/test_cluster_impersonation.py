"""Clients cannot impersonate a broker without the cluster secret: every request that only brokers send is forged over
sockets, with ids and registered epochs of running brokers.

All tests share one cluster; each has its own topic and restores every broker.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
import uuid
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from mansio.broker.coordinator.share.state_messages import RequestSender
from mansio.config.topic_names import TRACE_TOPIC
from mansio.state.broker_handshake import NONCE_BYTES, BrokerIdentity, ClusterSecret, Handshake
from mansio.wire.api_versions import ApiKey
from mansio.wire.apis import fetch
from mansio.wire.batch.record_batch import build_value_only_batch
from mansio.wire.internal_records.trace_records import VERSION, BlockHeader, encode_block
from support.cluster import CLUSTER_ID, cluster
from support.forged_requests import (
    ABSURD_EPOCHS,
    CLUSTER_AUTHORIZATION_FAILED,
    FORGERIES,
    INTER_BROKER,
    Target,
    check_refused,
    send_frame,
)
from support.machine import scaled
from support.raw_peer import RawPeer, batch_of, fetch_frame
from system.cluster.load import create_topic

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.cluster import Cluster

pytestmark = pytest.mark.full

INVALID_TOPIC_EXCEPTION = 17
STALE_BROKER_EPOCH = 77
GROUP = "forged"
START_OFFSET = 2
numbers = itertools.count()


@pytest.fixture(scope="module")
def joined(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Sessions and in-sync sets outlive a follower that a test pauses."""
    with cluster(
        tmp_path_factory.mktemp("impersonation"),
        http=True,
        broker_session_timeout_ms=60_000,
        replica_lag_time_max_ms=120_000,
    ) as one:
        yield one
        one.check_logs()


@pytest.fixture
def target(joined: Cluster) -> Target:
    """A topic with three replicas and five records on each of them, and a share group that begins within them."""
    topic = f"topic-{next(numbers)}"
    create_topic(joined, topic)
    joined.wait_in_sync(topic)
    with RawPeer(joined.brokers[joined.leader(topic)].kafka_port) as peer:
        assert peer.produce(topic, batch_of(*(b"v" for _ in range(5)))).error_code == 0
    topic_id = uuid.UUID(joined.entries("topics/")[topic]["uuid"])
    target = Target(topic, topic_id, 5, group=f"{GROUP}-{topic}")

    def begun() -> bool:
        partitions = [{"partition_index": 0, "start_offset": START_OFFSET}]
        fields = {"group_id": target.group, "topics": [{"topic_name": topic, "partitions": partitions}]}
        return any(
            call(joined, node_id, ApiKey.ALTER_SHARE_GROUP_OFFSETS, 0, fields).error_code == 0
            for node_id in joined.brokers
        )

    joined.wait(begun, "the share group has a start offset")
    assert share_start_offset(joined, target) == START_OFFSET
    return target


def call(one: Cluster, node_id: int, key: ApiKey, version: int, fields: dict[str, Any]) -> Any:
    with RawPeer(one.brokers[node_id].kafka_port) as peer:
        return peer.call(key, version, fields)


def share_start_offset(one: Cluster, target: Target) -> int:
    """As the coordinator of the group has it."""
    topics = [{"topic_name": target.topic, "partitions": [0]}]
    fields = {"groups": [{"group_id": target.group, "topics": topics}]}

    def found() -> list[int]:
        groups = [
            call(one, node_id, ApiKey.DESCRIBE_SHARE_GROUP_OFFSETS, 1, fields).groups[0]
            for node_id in one.brokers
        ]
        return [
            group.topics[0].partitions[0].start_offset
            for group in groups
            if group.error_code == 0 and group.topics[0].partitions[0].error_code == 0
        ]

    offsets: list[int] = one.wait(found, "the coordinator describes the group")
    return offsets[0]


def high_watermark(one: Cluster, target: Target) -> int:
    """As the leader of the partition has it."""
    with RawPeer(one.brokers[one.leader(target.topic)].kafka_port) as peer:
        answer = send_frame(peer, fetch_frame(target.topic))
    return int(fetch.decode_response(12, answer).topics[0][2][0].high_watermark)


def test_forged_followers_move_nothing_and_the_real_ones_go_on(joined: Cluster, target: Target) -> None:
    """While the followers are paused, forged fetches at the end of the leader's log would confirm what only the leader
    has."""
    leader, followers = joined.leader(target.topic), joined.followers(target.topic)
    port = joined.brokers[leader].kafka_port
    epochs = {node_id: joined.epoch(node_id) for node_id in (leader, *followers)}
    in_sync = joined.place(target.topic).in_sync
    for node_id in followers:
        joined.pause(node_id)
    try:
        with RawPeer(port) as peer:
            assert peer.produce(target.topic, batch_of(*(b"w" for _ in range(5))), acks=1).error_code == 0
        ahead = target._replace(end_offset=10)
        for node_id, key in itertools.product(epochs, INTER_BROKER):
            registered = epochs[node_id]
            for epoch in (registered, registered - 1, registered + 1, *ABSURD_EPOCHS):
                check_refused(port, key, ahead, RequestSender(node_id, epoch))
        assert high_watermark(joined, target) == 5
        assert joined.place(target.topic).in_sync == in_sync
    finally:
        for node_id in followers:
            joined.resume(node_id)
    joined.wait(lambda: high_watermark(joined, target) == 10, "the real followers go on")
    assert set(joined.place(target.topic).in_sync) == set(in_sync)
    assert share_start_offset(joined, target) == START_OFFSET


def test_forged_requests_to_any_broker_do_not_change_the_state_of_share_groups(
    joined: Cluster, target: Target
) -> None:
    keys = [key for key in INTER_BROKER if "SHARE_GROUP_STATE" in key.name]
    assert len(keys) == 5
    for to, name, key in itertools.product(joined.brokers, joined.brokers, keys):
        for epoch in (joined.epoch(name), *ABSURD_EPOCHS):
            check_refused(joined.brokers[to].kafka_port, key, target, RequestSender(name, epoch))
    assert share_start_offset(joined, target) == START_OFFSET


def secret_of(one: Cluster) -> ClusterSecret:
    """What only brokers, and who reads etcd, know."""
    return ClusterSecret(bytes.fromhex(one.entries("secret")[""]["secret"]))


def authenticated(
    peer: RawPeer, identity: BrokerIdentity, listener_id: int, secret: ClusterSecret
) -> tuple[Any, dict[str, Any]]:
    """The answer to a proof, and the request with it."""
    nonce = os.urandom(NONCE_BYTES)
    challenge = peer.call(ApiKey.CHALLENGE_BROKER, 0, {"nonce": nonce})
    assert challenge.error_code == 0, "a challenge is given to anybody"
    handshake = Handshake(CLUSTER_ID, identity, listener_id, nonce, challenge.nonce)
    fields = {**identity._asdict(), "proof": handshake.dialler_proof(secret)}
    answer = peer.call(ApiKey.AUTHENTICATE_BROKER, 0, fields)
    if answer.error_code == 0:
        assert handshake.is_listener_proof(secret, answer.proof)
    return answer, fields


def test_an_identity_needs_the_secret_and_the_registered_epoch(joined: Cluster) -> None:
    known = secret_of(joined)
    epoch = joined.epoch(2)
    for identity, listener_id, secret, code in (
        (BrokerIdentity(2, epoch), 1, known, 0),
        (BrokerIdentity(2, epoch), 1, ClusterSecret(bytes(32)), CLUSTER_AUTHORIZATION_FAILED),
        (BrokerIdentity(2, epoch), 3, known, CLUSTER_AUTHORIZATION_FAILED),
        (BrokerIdentity(1, joined.epoch(1)), 1, known, CLUSTER_AUTHORIZATION_FAILED),
        (BrokerIdentity(2, epoch - 1), 1, known, STALE_BROKER_EPOCH),
        (BrokerIdentity(2, epoch + 1), 1, known, STALE_BROKER_EPOCH),
        (BrokerIdentity(9, 1), 1, known, STALE_BROKER_EPOCH),
    ):
        with RawPeer(joined.brokers[1].kafka_port) as peer:
            answer, fields = authenticated(peer, identity, listener_id, secret)
            assert answer.error_code == code, identity
            if code:
                assert answer.proof == b""
                assert peer.closed()
        with RawPeer(joined.brokers[1].kafka_port) as peer:  # the same proof again
            assert peer.call(ApiKey.CHALLENGE_BROKER, 0, {"nonce": os.urandom(NONCE_BYTES)}).error_code == 0
            replayed = peer.call(ApiKey.AUTHENTICATE_BROKER, 0, fields)
            assert replayed.error_code == CLUSTER_AUTHORIZATION_FAILED
            assert peer.closed()


def test_an_identity_is_good_for_that_broker_in_that_epoch_only(joined: Cluster, target: Target) -> None:
    """With the first check the same requests are accepted: what is refused elsewhere is refused for its sender."""
    leader, followers = joined.leader(target.topic), joined.followers(target.topic)
    own, other = (BrokerIdentity(node_id, joined.epoch(node_id)) for node_id in followers)
    secret = secret_of(joined)
    keys = [key for key in FORGERIES if "BROKER" not in key.name]

    def codes(key: ApiKey, sender: RequestSender) -> set[int]:
        found: set[int] = set()
        for forged in FORGERIES[key](target._replace(group="nobody", end_offset=0), sender):
            with RawPeer(joined.brokers[leader].kafka_port) as peer:
                assert authenticated(peer, own, leader, secret)[0].error_code == 0
                found.update(forged.codes(send_frame(peer, forged.frame)))
        return found

    accepted = {key: codes(key, RequestSender(*own)) for key in keys if key != ApiKey.FETCH}
    assert all(CLUSTER_AUTHORIZATION_FAILED not in found for found in accepted.values()), accepted
    keys.remove(ApiKey.WRITE_TXN_MARKERS)  # it does not name its sender
    for key in keys:
        assert codes(key, RequestSender(*other)) == {CLUSTER_AUTHORIZATION_FAILED}, key
    for key in keys:
        if key not in (ApiKey.LIST_OFFSETS, ApiKey.OFFSET_FOR_LEADER_EPOCH):  # they contain no epoch
            wrong = RequestSender(own.node_id, own.broker_epoch + 1)
            assert codes(key, wrong) == {CLUSTER_AUTHORIZATION_FAILED}, key
    with RawPeer(joined.brokers[leader].kafka_port) as peer:  # and for good
        assert authenticated(peer, own, leader, secret)[0].error_code == 0
        answer = peer.call(ApiKey.CHALLENGE_BROKER, 0, {"nonce": os.urandom(NONCE_BYTES)})
        assert answer.error_code == CLUSTER_AUTHORIZATION_FAILED
        assert peer.closed()
    with RawPeer(joined.brokers[leader].kafka_port) as peer:  # a challenge is used up
        answer, fields = authenticated(peer, own, leader, secret)
        assert answer.error_code == 0
        again = peer.call(ApiKey.AUTHENTICATE_BROKER, 0, fields)
        assert again.error_code == CLUSTER_AUTHORIZATION_FAILED


def test_a_broker_writes_to_the_trace_as_often_as_it_needs_to_and_a_client_never(
    joined: Cluster, target: Target
) -> None:
    joined.wait(lambda: joined.entries("topics/").get(TRACE_TOPIC), "the trace has begun")
    leader = joined.leader(TRACE_TOPIC)
    node_id = next(each for each in joined.brokers if each != leader)
    now_ms = int(time.time() * 1000)
    header = BlockHeader(VERSION, 0, node_id, now_ms, 0, now_ms, now_ms, 0, 0, 0, 0, 0)
    batch = build_value_only_batch([now_ms], [encode_block(header, (), ())])
    with RawPeer(joined.brokers[leader].kafka_port) as peer:
        own = BrokerIdentity(node_id, joined.epoch(node_id))
        assert authenticated(peer, own, leader, secret_of(joined))[0].error_code == 0
        assert [peer.produce(TRACE_TOPIC, batch).error_code for _ in range(3)] == [0, 0, 0]
    with RawPeer(joined.brokers[leader].kafka_port) as peer:
        assert [peer.produce(TRACE_TOPIC, batch).error_code for _ in range(3)] == [
            INVALID_TOPIC_EXCEPTION
        ] * 3


def test_a_broker_that_registered_again_replicates_and_its_earlier_session_counts_for_nothing(
    joined: Cluster, target: Target
) -> None:
    leader, follower = joined.leader(target.topic), joined.followers(target.topic)[0]
    earlier = BrokerIdentity(follower, joined.epoch(follower))
    secret = secret_of(joined)
    with RawPeer(joined.brokers[leader].kafka_port) as peer:
        assert authenticated(peer, earlier, leader, secret)[0].error_code == 0
        assert joined.brokers[follower].stop() == 0
        joined.start(follower)
        joined.wait_in_sync(target.topic)
        assert joined.epoch(follower) > earlier.broker_epoch
        for forged in FORGERIES[ApiKey.READ_SHARE_GROUP_STATE](target, RequestSender(*earlier)):
            assert forged.codes(send_frame(peer, forged.frame)) == [STALE_BROKER_EPOCH]
    with RawPeer(joined.brokers[leader].kafka_port) as peer:
        assert authenticated(peer, earlier, leader, secret)[0].error_code == STALE_BROKER_EPOCH
    with RawPeer(joined.brokers[joined.leader(target.topic)].kafka_port) as peer:
        assert peer.produce(target.topic, batch_of(b"x")).error_code == 0


def test_a_deleted_secret_is_replaced_by_the_next_start_and_replication_goes_on(
    joined: Cluster, target: Target
) -> None:
    before = joined.entries("secret")[""]["secret"]
    joined.delete_entry("secret")
    assert joined.brokers[3].stop() == 0
    joined.start(3)
    joined.wait_in_sync(target.topic)
    assert joined.entries("secret")[""]["secret"] != before
    with RawPeer(joined.brokers[joined.leader(target.topic)].kafka_port) as peer:
        assert peer.produce(target.topic, batch_of(b"x")).error_code == 0


def test_the_secret_is_made_once_and_shown_to_no_one(joined: Cluster) -> None:
    document = joined.entries("secret")[""]
    secret = document["secret"]
    assert len(bytes.fromhex(secret)) == 32
    assert joined.brokers[3].stop() == 0
    joined.start(3)
    assert joined.entries("secret")[""] == document
    resources = [{"resource_type": 4, "resource_name": str(node_id)} for node_id in joined.brokers]
    for node_id, broker in joined.brokers.items():
        (described,) = call(
            joined, node_id, ApiKey.DESCRIBE_CONFIGS, 4, {"resources": [resources[node_id - 1]]}
        ).results
        assert described.configs
        assert not any(secret in str(vars(config)) for config in described.configs)
        for path in ("/metrics", "/health/ready", "/health/live"):
            assert secret not in httpx.get(f"{broker.http_url}{path}", timeout=scaled(10)).text
        assert secret not in broker.text()
        for file in broker.data.rglob("*"):
            with contextlib.suppress(FileNotFoundError):  # the broker replaces and deletes files meanwhile
                assert not file.is_file() or secret.encode() not in file.read_bytes()
