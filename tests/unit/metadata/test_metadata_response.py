"""The hand-written Metadata answer against kio's, in every version."""

from __future__ import annotations

from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mansio.metadata.metadata_response import TopicEncoder, encode_metadata, encode_missing_topic
from mansio.metadata.model import BrokerEndpoint, PartitionState, Topic
from mansio.wire.api_versions import SUPPORTED_APIS, ApiKey
from mansio.wire.codec import messages
from support.tiers import examples

API = SUPPORTED_APIS[ApiKey.METADATA]
INT32 = st.integers(-(1 << 31), (1 << 31) - 1)
NODES = st.integers(0, 5)
LISTS = st.lists(NODES, max_size=4).map(tuple)
PARTITIONS = st.builds(
    PartitionState,
    replicas=LISTS,
    leader=st.integers(-1, 5),
    leader_epoch=st.integers(0, 9),
    isr=LISTS,
)
NAMES = st.text(st.characters(codec="utf-8"), min_size=1, max_size=300)
TOPICS = st.builds(
    Topic,
    name=NAMES,
    topic_id=st.uuids(),
    partitions=st.lists(PARTITIONS, max_size=150).map(tuple) | st.lists(PARTITIONS, max_size=3).map(tuple),
    replication_factor=st.just(1),
    configs=st.just({}),
    internal=st.booleans(),
    state=st.just("live"),
    mod_revision=st.just(1),
)
MISSING = st.tuples(
    st.sampled_from([3, 17, 29, 100]), st.none() | NAMES, st.none() | st.uuids().map(lambda one: one.bytes)
)
BROKERS = st.builds(
    BrokerEndpoint, node_id=NODES, host=st.text(max_size=40), port=INT32, rack=st.none() | st.text(max_size=9)
)


def shown_topic(topic: Topic, alive: set[int], operations: int) -> dict[str, object]:
    return {
        "error_code": 0,
        "name": topic.name,
        "topic_id": topic.topic_id,
        "is_internal": topic.internal,
        "partitions": [
            {
                "error_code": 0 if partition.leader in alive else 5,
                "partition_index": index,
                "leader_id": partition.leader if partition.leader in alive else -1,
                "leader_epoch": partition.leader_epoch,
                "replica_nodes": list(partition.replicas),
                "isr_nodes": list(partition.isr),
                "offline_replicas": [one for one in partition.replicas if one not in alive],
            }
            for index, partition in enumerate(topic.partitions)
        ],
        "topic_authorized_operations": operations,
    }


@settings(max_examples=examples(30, 150))
@given(
    version=st.integers(API.min_version, API.max_version),
    correlation_id=INT32,
    brokers=st.lists(BROKERS, max_size=5),
    cluster_id=st.text(max_size=40),
    controller_id=INT32,
    topics=st.lists(TOPICS, max_size=4),
    missing=st.lists(MISSING, max_size=3),
    operations=INT32,
)
def test_same_bytes_as_kio(
    version: int,
    correlation_id: int,
    brokers: list[BrokerEndpoint],
    cluster_id: str,
    controller_id: int,
    topics: list[Topic],
    missing: list[tuple[int, str | None, bytes | None]],
    operations: int,
) -> None:
    alive = {broker.node_id for broker in brokers}
    encoder = TopicEncoder()
    for _ in range(2):  # the second time from what was kept
        encoded = [
            encoder.for_listener("A", frozenset(alive)).encode(version, topic, operations) for topic in topics
        ]
        encoded += [encode_missing_topic(version, *one, operations) for one in missing]
        ours = encode_metadata(
            version,
            correlation_id,
            brokers=brokers,
            cluster_id=cluster_id,
            controller_id=controller_id,
            topics=encoded,
            cluster_operations=operations,
        )
        fields = {
            "brokers": [
                {name: getattr(broker, name) for name in ("node_id", "host", "port", "rack")}
                for broker in brokers
            ],
            "cluster_id": cluster_id,
            "controller_id": controller_id,
            "topics": [shown_topic(topic, alive, operations) for topic in topics]
            + [
                {
                    "error_code": code,
                    "name": name if name is not None or version >= 12 else "",
                    "topic_id": topic_id,
                    "topic_authorized_operations": operations,
                }
                for code, name, topic_id in missing
            ],
            "cluster_authorized_operations": operations,
        }
        assert ours == messages.encode_response(ApiKey.METADATA, version, correlation_id, fields)


def make_topic(partitions: int) -> Topic:
    return Topic(
        name="t",
        topic_id=UUID(int=7),
        partitions=(PartitionState((1,), 1, 0, (1,)),) * partitions,
        replication_factor=1,
        configs={},
        internal=False,
        state="live",
        mod_revision=1,
    )


def test_a_changed_topic_is_encoded_again_and_an_old_one_is_dropped() -> None:
    encoder = TopicEncoder()
    small, large = make_topic(1), make_topic(2)
    topics = encoder.for_listener("A", frozenset({1}))
    assert topics.encode(12, small, 0) != topics.encode(12, large, 0)
    assert topics.encode(12, small, 0) is not None
    del small
    assert len(topics._cached_topics) == 1


def test_listeners_that_reach_the_same_brokers_share_the_cache_and_others_keep_theirs() -> None:
    encoder = TopicEncoder()
    topic = make_topic(1)
    inside, outside = frozenset({1, 2}), frozenset({2})
    first = encoder.for_listener("INSIDE", inside)
    assert encoder.for_listener("ALSO_INSIDE", frozenset({2, 1})) is first
    second = encoder.for_listener("OUTSIDE", outside, frozenset({1}))
    encoded = first.encode(12, topic, 0), second.encode(12, topic, 0)
    assert encoded[0] != encoded[1]
    for _ in range(2):  # requests through both take turns
        assert encoder.for_listener("INSIDE", inside) is first
        assert encoder.for_listener("OUTSIDE", outside, frozenset({1})) is second
    assert encoder.for_listener("OUTSIDE", inside) is first
    assert {id(each) for each in encoder._encoders.values()} == {id(first)}, "nothing is kept of those before"


@pytest.mark.parametrize(("version", "code"), [(5, 5), (6, 72), (9, 72), (13, 72)])
def test_a_leader_without_the_listener_is_reported_as_kafka_does(version: int, code: int) -> None:
    encoder = TopicEncoder().for_listener("OUTSIDE", frozenset({2}), frozenset({1}))
    answer = encode_metadata(
        version,
        1,
        brokers=[],
        cluster_id="c",
        controller_id=1,
        topics=[encoder.encode(version, make_topic(1), 0)],
        cluster_operations=0,
    )
    (topic,) = messages.decode_response_frame(ApiKey.METADATA, version, answer[4:])[1].topics
    assert [(each.error_code, each.leader_id) for each in topic.partitions] == [(code, -1)]


def test_a_broker_that_goes_away_makes_its_replicas_offline() -> None:
    encoder = TopicEncoder()
    topic = make_topic(1)
    there = encoder.for_listener("A", frozenset({1})).encode(12, topic, 0)
    gone = encoder.for_listener("A", frozenset({2})).encode(12, topic, 0)
    assert there != gone
    assert encoder.for_listener("A", frozenset({1})).encode(12, topic, 0) == there
