"""Administrative clients of other projects: what they create, change and delete is visible to them and to others."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from confluent_kafka import (
    Consumer,
    ConsumerGroupState,
    ConsumerGroupTopicPartitions,
    KafkaError,
    KafkaException,
    TopicCollection,
    TopicPartition,
)
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewPartitions,
    NewTopic,
    OffsetSpec,
    ResourceType,
)
from kafka import KafkaAdminClient, OffsetAndMetadata
from kafka import TopicPartition as KafkaPythonPartition
from kafka.admin import ConfigResource as KafkaPythonResource
from kafka.errors import (
    InvalidConfigurationError,
    InvalidPartitionsError,
    InvalidTopicError,
    NoError,
    TopicAlreadyExistsError,
    UnknownTopicOrPartitionError,
)

from support.machine import scaled
from support.waiting import wait_until
from system.interop.clients import QUIET, Item, confluent_write, kcat
from system.interop.members import ConfluentMember, KafkaPythonMember, wait_for_shares

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

NEVER_COMMITTED = -1001


@pytest.fixture
def confluent(bootstrap_servers: str) -> AdminClient:
    return AdminClient({"bootstrap.servers": bootstrap_servers, **QUIET})


@pytest.fixture
def kafka_python(bootstrap_servers: str) -> Iterator[KafkaAdminClient]:
    admin = KafkaAdminClient(bootstrap_servers=bootstrap_servers)
    yield admin
    admin.close()


def failure(future: object) -> int:
    """The error code a confluent-kafka future ends with."""
    with pytest.raises(KafkaException) as caught:
        future.result(scaled(10))  # type: ignore[attr-defined]  # a Future
    return int(caught.value.args[0].code())


@pytest.mark.row("L1", "A1")
def test_topic_life_with_confluent_kafka(confluent: AdminClient, unique: str) -> None:
    admin = confluent
    new = NewTopic(unique, 3, 1, config={"retention.ms": "3600000"})
    assert admin.create_topics([new], validate_only=True)[unique].result(scaled(10)) is None
    assert unique not in admin.list_topics(timeout=scaled(10)).topics
    admin.create_topics([new])[unique].result(scaled(10))
    assert failure(admin.create_topics([new])[unique]) == KafkaError.TOPIC_ALREADY_EXISTS
    assert len(admin.list_topics(timeout=scaled(10)).topics[unique].partitions) == 3
    described = admin.describe_topics(TopicCollection([unique]))[unique].result(scaled(10))
    assert (described.name, len(described.partitions), described.is_internal) == (unique, 3, False)
    assert described.partitions[0].leader.id == described.partitions[0].isr[0].id
    topic_id = str(described.topic_id)

    admin.create_partitions([NewPartitions(unique, 5)])[unique].result(scaled(10))
    assert (
        failure(admin.create_partitions([NewPartitions(unique, 4)])[unique]) == KafkaError.INVALID_PARTITIONS
    )
    wait_until(lambda: len(admin.list_topics(unique, timeout=scaled(10)).topics[unique].partitions) == 5, 20)

    admin.delete_topics([unique])[unique].result(scaled(10))
    assert unique not in admin.list_topics(timeout=scaled(10)).topics
    assert failure(admin.delete_topics([unique])[unique]) == KafkaError.UNKNOWN_TOPIC_OR_PART
    gone = admin.describe_topics(TopicCollection([unique]))[unique]
    assert failure(gone) == KafkaError.UNKNOWN_TOPIC_OR_PART
    admin.create_topics([new])[unique].result(scaled(10))
    again = admin.describe_topics(TopicCollection([unique]))[unique].result(scaled(10))
    assert str(again.topic_id) != topic_id, "a topic created again is another topic"


@pytest.mark.row("L1", "A1")
def test_topic_life_with_kafka_python(kafka_python: KafkaAdminClient, unique: str) -> None:
    admin = kafka_python
    wanted = {unique: {"num_partitions": 2, "replication_factor": 1, "configs": {"segment.bytes": "1048576"}}}
    admin.create_topics(wanted, validate_only=True)
    assert unique not in admin.list_topics()
    admin.create_topics(wanted)
    assert unique in admin.list_topics()
    with pytest.raises(TopicAlreadyExistsError):
        admin.create_topics(wanted)
    assert len(admin.describe_topics([unique])[0]["partitions"]) == 2
    admin.create_partitions({unique: 4})
    assert len(admin.describe_topics([unique])[0]["partitions"]) == 4
    with pytest.raises(InvalidPartitionsError):
        admin.create_partitions({unique: 1})
    admin.delete_topics([unique])
    assert unique not in admin.list_topics()
    with pytest.raises(UnknownTopicOrPartitionError):
        admin.delete_topics([unique])


@pytest.mark.row("L1", "P5")
def test_impossible_topics_are_refused_with_their_own_errors(
    confluent: AdminClient, kafka_python: KafkaAdminClient, unique: str
) -> None:
    impossible = {
        "no such/name": (NewTopic("no such/name", 1, 1), KafkaError.TOPIC_EXCEPTION),
        "..": (NewTopic("..", 1, 1), KafkaError.TOPIC_EXCEPTION),
        "x" * 250: (NewTopic("x" * 250, 1, 1), KafkaError.TOPIC_EXCEPTION),
        f"{unique}-wide": (NewTopic(f"{unique}-wide", 1, 3), KafkaError.INVALID_REPLICATION_FACTOR),
        f"{unique}-odd": (
            NewTopic(f"{unique}-odd", 1, 1, config={"retention.ms": "soon"}),
            KafkaError.INVALID_CONFIG,
        ),
        f"{unique}-unknown": (
            NewTopic(f"{unique}-unknown", 1, 1, config={"no.such.setting": "1"}),
            KafkaError.INVALID_CONFIG,
        ),
    }
    futures = confluent.create_topics([topic for topic, _ in impossible.values()])
    for name, (_, code) in impossible.items():
        assert failure(futures[name]) == code, name
    with pytest.raises(InvalidTopicError):
        kafka_python.create_topics({"bad name": {"num_partitions": 1, "replication_factor": 1}})
    with pytest.raises(InvalidConfigurationError):
        kafka_python.create_topics(
            {f"{unique}-bad": {"num_partitions": 1, "configs": {"cleanup.policy": "burn"}}}
        )


@pytest.mark.row("L1", "A1")
def test_topic_settings_with_confluent_kafka(confluent: AdminClient, make_topic: Callable[..., str]) -> None:
    topic = make_topic(retention_ms="3600000")

    def described() -> dict[str, ConfigEntry]:
        resource = ConfigResource(ResourceType.TOPIC, topic)
        return dict(confluent.describe_configs([resource])[resource].result(scaled(10)))

    def alter(name: str, operation: AlterConfigOpType, value: str | None) -> object:
        entry = ConfigEntry(name, value, incremental_operation=operation)
        resource = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=[entry])
        return confluent.incremental_alter_configs([resource])[resource]

    before = described()
    assert (before["retention.ms"].value, before["retention.ms"].is_default) == ("3600000", False)
    assert (before["segment.bytes"].value, before["segment.bytes"].is_default) == ("1073741824", True)
    alter("retention.ms", AlterConfigOpType.SET, "7200000").result(scaled(10))  # type: ignore[attr-defined]  # a Future
    alter("max.message.bytes", AlterConfigOpType.SET, "5000").result(scaled(10))  # type: ignore[attr-defined]  # a Future
    after = described()
    assert (after["retention.ms"].value, after["max.message.bytes"].value) == ("7200000", "5000")
    with pytest.raises(KafkaException) as caught:
        confluent_write(confluent_bootstrap(confluent), topic, [Item(None, b"x" * 6000)])
    assert caught.value.args[0].code() == KafkaError.MSG_SIZE_TOO_LARGE, "in force at once"
    alter("max.message.bytes", AlterConfigOpType.DELETE, None).result(scaled(10))  # type: ignore[attr-defined]  # a Future
    assert described()["max.message.bytes"].is_default
    assert failure(alter("retention.ms", AlterConfigOpType.SET, "soon")) == KafkaError.INVALID_CONFIG
    assert described()["retention.ms"].value == "7200000"


def confluent_bootstrap(admin: AdminClient) -> str:
    broker = next(iter(admin.list_topics(timeout=scaled(10)).brokers.values()))
    return f"{broker.host}:{broker.port}"


@pytest.mark.row("L1", "A1")
def test_topic_settings_with_kafka_python(
    kafka_python: KafkaAdminClient, make_topic: Callable[..., str]
) -> None:
    topic = make_topic()

    def described(config_filter: str = "modified") -> dict[str, dict[str, object]]:
        resource = KafkaPythonResource("TOPIC", topic)
        found = kafka_python.describe_configs([resource], config_filter=config_filter)
        return dict(found["topic"].get(topic, {}))

    assert "segment.bytes" in described("all")
    kafka_python.alter_configs([KafkaPythonResource("TOPIC", topic, {"retention.ms": "60000"})])
    assert described()["retention.ms"]["value"] == "60000"
    kafka_python.alter_configs([KafkaPythonResource("TOPIC", topic, {"segment.bytes": ("SET", "2097152")})])
    assert {"retention.ms", "segment.bytes"} <= described().keys(), "what was not named stays"
    kafka_python.alter_configs([KafkaPythonResource("TOPIC", topic, {"retention.ms": ("DELETE", None)})])
    assert "retention.ms" not in described()


@pytest.mark.row("A1")
def test_cluster_is_described_alike_by_all(
    confluent: AdminClient, kafka_python: KafkaAdminClient, bootstrap_servers: str
) -> None:
    first = confluent.describe_cluster().result(scaled(10))
    second = kafka_python.describe_cluster()
    assert first.cluster_id == second["cluster_id"]
    assert first.controller.id == second["controller_id"]
    port = int(bootstrap_servers.rpartition(":")[2])
    assert [(one.host, one.port) for one in first.nodes] == [("127.0.0.1", port)]
    assert [(one["host"], one["port"]) for one in second["brokers"]] == [("127.0.0.1", port)]
    listing = kcat(bootstrap_servers, "-L").decode()
    assert f"127.0.0.1:{port}" in listing
    assert "1 brokers" in listing


@pytest.mark.row("A1")
def test_broker_settings_are_described(confluent: AdminClient) -> None:
    node = str(confluent.describe_cluster().result(scaled(10)).controller.id)
    resource = ConfigResource(ResourceType.BROKER, node)
    found = confluent.describe_configs([resource])[resource].result(scaled(10))
    assert found["node.id"].value == node


@pytest.mark.row("G4", "A1")
def test_group_life_with_confluent_kafka(
    confluent: AdminClient, bootstrap_servers: str, make_topic: Callable[..., str], unique: str
) -> None:
    topic = make_topic(2)
    member = ConfluentMember(
        bootstrap_servers, unique, topic, **{"partition.assignment.strategy": "range"}
    ).join()
    try:
        wait_for_shares([member], 2)
        listed = {one.group_id: one for one in confluent.list_consumer_groups().result(scaled(10)).valid}
        assert listed[unique].state == ConsumerGroupState.STABLE
        described = confluent.describe_consumer_groups([unique])[unique].result(scaled(10))
        assert described.state == ConsumerGroupState.STABLE
        assert described.partition_assignor == "range"
        assert [one.client_id for one in described.members] == ["rdkafka"]
        assigned = described.members[0].assignment.topic_partitions
        assert sorted(one.partition for one in assigned) == [0, 1]
        assert failure(confluent.delete_consumer_groups([unique])[unique]) == KafkaError.NON_EMPTY_GROUP
    finally:
        member.leave()
    emptied = confluent.describe_consumer_groups([unique])[unique].result(scaled(10))
    assert (emptied.state, emptied.members) == (ConsumerGroupState.EMPTY, [])

    wanted = [TopicPartition(topic, 0, 11), TopicPartition(topic, 1, 12)]
    altered = confluent.alter_consumer_group_offsets([ConsumerGroupTopicPartitions(unique, wanted)])[unique]
    assert all(one.error is None for one in altered.result(scaled(10)).topic_partitions)
    found = confluent.list_consumer_group_offsets([ConsumerGroupTopicPartitions(unique)])[unique].result(
        scaled(10)
    )
    assert {one.partition: one.offset for one in found.topic_partitions} == {0: 11, 1: 12}
    confluent.delete_consumer_groups([unique])[unique].result(scaled(10))
    assert unique not in {one.group_id for one in confluent.list_consumer_groups().result(scaled(10)).valid}
    assert failure(confluent.delete_consumer_groups([unique])[unique]) == KafkaError.GROUP_ID_NOT_FOUND
    reader = Consumer({"bootstrap.servers": bootstrap_servers, "group.id": unique, **QUIET})
    assert reader.committed([TopicPartition(topic, 0)], timeout=scaled(10))[0].offset == NEVER_COMMITTED
    reader.close()


@pytest.mark.row("G4", "A1")
def test_group_life_with_kafka_python(
    kafka_python: KafkaAdminClient, bootstrap_servers: str, make_topic: Callable[..., str], unique: str
) -> None:
    admin = kafka_python
    topic = make_topic(2)
    member = KafkaPythonMember(bootstrap_servers, unique, topic).join()
    try:
        wait_for_shares([member], 2)
        described = admin.describe_groups([unique])[unique]
        assert described["group_state"] == "Stable"
        assert len(described["members"]) == 1
        assert unique in {one["group_id"] for one in admin.list_groups()}
    finally:
        member.leave()
    places = [KafkaPythonPartition(topic, 0), KafkaPythonPartition(topic, 1)]
    altered = admin.alter_group_offsets(
        unique, {place: OffsetAndMetadata(21, "note", -1) for place in places}
    )
    assert set(altered.values()) == {NoError}
    found = admin.list_group_offsets({unique: None})[unique]
    assert {place: found[place].offset for place in places} == dict.fromkeys(places, 21)
    assert set(admin.delete_group_offsets(unique, places[:1]).values()) == {NoError}
    left = admin.list_group_offsets({unique: None})[unique]
    assert left.keys() == {places[1]}
    admin.delete_groups([unique])
    assert unique not in {one["group_id"] for one in admin.list_groups()}


@pytest.mark.row("A1")
def test_offsets_are_listed_by_their_special_names(
    confluent: AdminClient, bootstrap_servers: str, make_topic: Callable[..., str]
) -> None:
    topic = make_topic()
    times = [1_700_000_000_000, 1_700_000_009_000, 1_700_000_004_000]
    for at in times:
        confluent_write(bootstrap_servers, topic, [Item(None, b"v", (), at)])
    place = TopicPartition(topic, 0)
    for specification, offset in (
        (OffsetSpec.earliest(), 0),
        (OffsetSpec.latest(), 3),
        (OffsetSpec.max_timestamp(), 1),
        (OffsetSpec.for_timestamp(1_700_000_000_001), 1),
        (OffsetSpec.for_timestamp(1_800_000_000_000), -1),
    ):
        found = confluent.list_offsets({place: specification})[place].result(scaled(10))
        assert found.offset == offset, specification
