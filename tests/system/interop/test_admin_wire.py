"""Requests of administrative tools beyond topics, settings and groups: each gets a response that the tool accepts, also
for features that do not exist.

The requests that web consoles make when they are opened are written down here as (API, version) and sent over a plain
socket; the clients that can make them are asked too.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import (
    Consumer,
    ElectionType,
    KafkaError,
    KafkaException,
    Producer,
    ThrottleEvent,
    TopicPartition,
)
from confluent_kafka.admin import (
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ConfigResource,
    ResourcePatternType,
    ResourceType,
)
from kafka import KafkaAdminClient
from kafka import TopicPartition as KafkaPythonPartition
from kafka.admin import (
    ACL,
    ACLFilter,
    ACLOperation,
    ACLPermissionType,
    ACLResourcePatternType,
    ResourcePattern,
    ResourcePatternFilter,
)
from kafka.admin import ConfigResource as KafkaPythonResource
from kafka.admin import ResourceType as KafkaPythonResourceType
from kafka.errors import (
    ElectionNotNeededError,
    InvalidUpdateVersionError,
    SecurityDisabledError,
    TransactionalIdNotFoundError,
    UnknownTopicOrPartitionError,
)

import mansio
from mansio.wire.api_versions import SUPPORTED_APIS, ApiKey
from support.machine import scaled
from support.raw_peer import RawPeer
from support.waiting import wait_until
from system.interop.clients import QUIET, Item, confluent_write, kafka_python_write, kcat

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

SECURITY_DISABLED = 54
RESOURCE_NOT_FOUND = 91
ELECTION_NOT_NEEDED = 84
UNKNOWN_TOPIC_OR_PARTITION = 3
TRANSACTIONAL_ID_NOT_FOUND = 105
INVALID_REPLICA_ASSIGNMENT = 39
NO_REASSIGNMENT_IN_PROGRESS = 85
LOG_DIR_NOT_FOUND = 57
INVALID_UPDATE_VERSION = 95


@pytest.fixture
def confluent(bootstrap_servers: str) -> AdminClient:
    return AdminClient({"bootstrap.servers": bootstrap_servers, **QUIET})


@pytest.fixture
def kafka_python(bootstrap_servers: str) -> Iterator[KafkaAdminClient]:
    admin = KafkaAdminClient(bootstrap_servers=bootstrap_servers)
    yield admin
    admin.close()


@pytest.fixture
def raw(bootstrap_servers: str) -> Iterator[RawPeer]:
    with RawPeer(int(bootstrap_servers.rpartition(":")[2])) as peer:
        yield peer


def code_of(future: Any) -> int:
    with pytest.raises(KafkaException) as caught:
        future.result(scaled(10))
    return int(caught.value.args[0].code())


# Access control: there is none, and that is said


@pytest.mark.row("A1")
def test_confluent_kafka_hears_that_there_is_no_access_control(confluent: AdminClient) -> None:
    names = ("topic", ResourcePatternType.LITERAL, "User:a", "*", AclOperation.READ, AclPermissionType.ALLOW)
    binding = AclBinding(ResourceType.TOPIC, *names)
    wanted = AclBindingFilter(ResourceType.TOPIC, *names)
    assert code_of(confluent.create_acls([binding])[binding]) == KafkaError.SECURITY_DISABLED
    assert (
        confluent.describe_acls(wanted).result(scaled(10)) == []
    )  # this client drops the error of this answer
    assert code_of(confluent.delete_acls([wanted])[wanted]) == KafkaError.SECURITY_DISABLED


@pytest.mark.row("A1")
def test_kafka_python_hears_that_there_is_no_access_control(kafka_python: KafkaAdminClient) -> None:
    one = ACL(
        "User:a",
        "*",
        ACLOperation.READ,
        ACLPermissionType.ALLOW,
        ResourcePattern(KafkaPythonResourceType.TOPIC, "t"),
    )
    pattern = ResourcePatternFilter(KafkaPythonResourceType.TOPIC, "t", ACLResourcePatternType.ANY)
    wanted = ACLFilter("User:a", "*", ACLOperation.ANY, ACLPermissionType.ANY, pattern)
    assert kafka_python.create_acls([one]) == {"succeeded": [], "failed": [SecurityDisabledError]}
    with pytest.raises(SecurityDisabledError, match="every operation is allowed"):
        kafka_python.describe_acls(wanted)
    assert [error for _, _, error in kafka_python.delete_acls([wanted])] == [SecurityDisabledError]


@pytest.mark.row("A1")
def test_no_user_has_credentials(confluent: AdminClient, kafka_python: KafkaAdminClient) -> None:
    every: Any = confluent.describe_user_scram_credentials()
    assert every.result(scaled(10)) == {}
    named: Any = confluent.describe_user_scram_credentials(["alice"])
    alone = named["alice"]
    assert code_of(alone) == RESOURCE_NOT_FOUND
    assert kafka_python.describe_user_scram_credentials() == {}


# Settings, replaced as a whole


@pytest.mark.row("A1")
@pytest.mark.filterwarnings("ignore:alter_configs has been deprecated:DeprecationWarning")
def test_legacy_alter_configs_replaces_all_settings(
    confluent: AdminClient, make_topic: Callable[..., str]
) -> None:
    topic = make_topic(retention_ms="1000000", max_message_bytes="5000")

    def effective_value() -> dict[str, str]:
        resource = ConfigResource(ResourceType.TOPIC, topic)
        entries = confluent.describe_configs([resource])[resource].result(scaled(10))
        return {name: entry.value for name, entry in entries.items() if not entry.is_default}

    changed = ConfigResource(ResourceType.TOPIC, topic, set_config={"segment.bytes": "1000000"})
    confluent.alter_configs([changed], validate_only=True)[changed].result(scaled(10))
    assert effective_value() == {"retention.ms": "1000000", "max.message.bytes": "5000"}
    confluent.alter_configs([changed])[changed].result(scaled(10))
    assert effective_value() == {"segment.bytes": "1000000"}
    bad = ConfigResource(ResourceType.TOPIC, topic, set_config={"segment.bytes": "many"})
    assert code_of(confluent.alter_configs([bad])[bad]) == KafkaError.INVALID_CONFIG
    missing = ConfigResource(ResourceType.TOPIC, f"no {topic}".replace(" ", "-"), set_config={})
    assert code_of(confluent.alter_configs([missing])[missing]) == KafkaError.UNKNOWN_TOPIC_OR_PART
    broker = ConfigResource(ResourceType.BROKER, "1", set_config={"node.id": "2"})
    assert code_of(confluent.alter_configs([broker])[broker]) == KafkaError.INVALID_CONFIG
    assert effective_value() == {"segment.bytes": "1000000"}


@pytest.mark.row("A1")
def test_legacy_alter_configs_of_kafka_python(
    kafka_python: KafkaAdminClient, make_topic: Callable[..., str]
) -> None:
    topic = make_topic(retention_ms="1000000")
    changed = KafkaPythonResource("TOPIC", topic, {"max.message.bytes": "6000"})
    kafka_python.alter_configs([changed], incremental=False)
    found = kafka_python.describe_configs([KafkaPythonResource("TOPIC", topic)])["topic"][topic]
    assert {name: entry["value"] for name, entry in found.items()} == {
        "retention.ms": "1000000",  # this client names what it wants to keep
        "max.message.bytes": "6000",
    }


# Replicas


@pytest.mark.row("A1")
@pytest.mark.parametrize("election", [ElectionType.PREFERRED, ElectionType.UNCLEAN])
def test_confluent_kafka_hears_that_no_election_is_needed(
    confluent: AdminClient, make_topic: Callable[..., str], election: ElectionType
) -> None:
    place, missing = TopicPartition(make_topic(), 0), TopicPartition("no-such-topic", 0)
    found = confluent.elect_leaders(election, [place, missing]).result(scaled(10))
    assert found[place].code() == ELECTION_NOT_NEEDED
    assert found[missing].code() == KafkaError.UNKNOWN_TOPIC_OR_PART
    assert confluent.elect_leaders(election, None).result(scaled(10)) == {}


@pytest.mark.row("A1")
def test_kafka_python_asks_for_elections_and_moves(
    kafka_python: KafkaAdminClient, make_topic: Callable[..., str]
) -> None:
    topic = make_topic(2)
    place = KafkaPythonPartition(topic, 0)
    answer = kafka_python.elect_leaders(0, {topic: [0, 1]})
    codes = [one.error_code for result in answer.replica_election_results for one in result.partition_result]
    assert codes == [ElectionNotNeededError.errno] * 2
    assert kafka_python.list_partition_reassignments() == {}
    moved = kafka_python.alter_partition_reassignments(
        {place: [7], KafkaPythonPartition(topic, 9): [1], KafkaPythonPartition(topic, 1): [1]}
    )
    assert moved[place].errno == INVALID_REPLICA_ASSIGNMENT
    assert moved[KafkaPythonPartition(topic, 9)] is UnknownTopicOrPartitionError
    assert moved[KafkaPythonPartition(topic, 1)] is None, "it is there already"
    assert (
        kafka_python.alter_partition_reassignments({place: None})[place].errno == NO_REASSIGNMENT_IN_PROGRESS
    )


# What is on the disk, and who writes


@pytest.mark.row("A1")
def test_log_directories_tell_the_size_of_every_partition(
    kafka_python: KafkaAdminClient, bootstrap_servers: str, make_topic: Callable[..., str]
) -> None:
    topic, other = make_topic(2), make_topic()
    confluent_write(bootstrap_servers, topic, [Item(None, b"x" * 10_000)], partition=1)

    def sizes(wanted: Any) -> dict[tuple[str, int], int]:
        (directory,) = kafka_python.describe_log_dirs(wanted)[0]["log_dirs"]
        assert directory["error_code"] == 0
        assert 0 < directory["usable_bytes"] <= directory["total_bytes"]
        return {
            (one["name"], partition["partition_index"]): partition["partition_size"]
            for one in directory["topics"]
            for partition in one["partitions"]
        }

    found = sizes(None)
    assert found[topic, 0] == found[other, 0] == 0
    assert 10_000 < found[topic, 1] < 11_000
    assert sizes({topic: [1]}) == {(topic, 1): found[topic, 1]}
    assert sizes({"no-such-topic": [0], topic: [9]}) == {}


@pytest.mark.row("A1")
def test_producers_are_described_by_id_epoch_and_sequence(
    kafka_python: KafkaAdminClient, bootstrap_servers: str, make_topic: Callable[..., str]
) -> None:
    topic = make_topic(2)
    kafka_python_write(
        bootstrap_servers, topic, [Item(None, b"%d" % n) for n in range(5)], enable_idempotence=True
    )
    places = [KafkaPythonPartition(topic, 0), KafkaPythonPartition(topic, 1)]
    found = kafka_python.describe_producers(places)
    (producer,) = found[places[0]].active_producers
    assert (producer.producer_epoch, producer.last_sequence) == (0, 4)
    assert producer.producer_id >= 0
    assert abs(producer.last_timestamp - time.time() * 1000) < 60_000
    assert found[places[1]].active_producers == []


@pytest.mark.row("A1")
def test_unknown_transactional_ids_are_not_found(kafka_python: KafkaAdminClient, raw: RawPeer) -> None:
    assert all(not found for found in kafka_python.list_transactions().values())
    assert all(not found for found in kafka_python.list_transactions(transactional_id_pattern="a.*").values())
    with pytest.raises(TransactionalIdNotFoundError):
        kafka_python.describe_transactions(["t"])
    for version in range(3):
        listed = raw.call(ApiKey.LIST_TRANSACTIONS, version, {"state_filters": ["Ongoing", "Asleep"]})
        assert (listed.error_code, listed.unknown_state_filters) == (0, ["Asleep"])
    described = raw.call(ApiKey.DESCRIBE_TRANSACTIONS, 0, {"transactional_ids": ["a", "b"]})
    assert [(one.transactional_id, one.error_code) for one in described.transaction_states] == [
        ("a", TRANSACTIONAL_ID_NOT_FOUND),
        ("b", TRANSACTIONAL_ID_NOT_FOUND),
    ]


# Topics, page by page


@pytest.mark.row("A1")
@pytest.mark.parametrize("limit", [1, 2, 3, 1000])
def test_pages_of_topics_together_show_every_partition_once(
    raw: RawPeer, make_topic: Callable[..., str], limit: int
) -> None:
    counts = {make_topic(count): count for count in (3, 1, 4)}
    wanted = [{"name": name} for name in (*counts, "no-such-topic")]
    cursor = None
    seen: list[tuple[str, int]] = []
    errors: dict[str, int] = {}
    while True:
        page = raw.call(
            ApiKey.DESCRIBE_TOPIC_PARTITIONS,
            0,
            {"topics": wanted, "response_partition_limit": limit, "cursor": cursor},
        )
        on_page = [(topic.name, one) for topic in page.topics for one in topic.partitions]
        assert len(on_page) <= limit
        for name, one in on_page:
            assert (one.error_code, one.leader_id, one.replica_nodes, one.isr_nodes) == (0, 1, [1], [1])
            assert (one.eligible_leader_replicas, one.last_known_elr, one.offline_replicas) == ([], [], [])
            seen.append((name, one.partition_index))
        errors |= {topic.name: topic.error_code for topic in page.topics}
        cursor = page.next_cursor
        if cursor is None:
            break
    assert seen == sorted((name, index) for name, count in counts.items() for index in range(count))
    assert errors == {**dict.fromkeys(counts, 0), "no-such-topic": UNKNOWN_TOPIC_OR_PARTITION}


def test_a_cursor_whose_topic_is_deleted_continues_with_the_next_topic(
    raw: RawPeer, make_topic: Callable[..., str]
) -> None:
    first, second = sorted([make_topic(2), make_topic(2)])
    fields = {
        "topics": [{"name": first}, {"name": second}],
        "response_partition_limit": 10,
        "cursor": {"topic_name": f"{first}-gone", "partition_index": 1},
    }
    page = raw.call(ApiKey.DESCRIBE_TOPIC_PARTITIONS, 0, fields)
    assert [(topic.name, len(topic.partitions)) for topic in page.topics] == [(second, 2)]


@pytest.mark.row("A1")
def test_kafka_python_describes_all_topics_in_pages(
    kafka_python: KafkaAdminClient, make_topic: Callable[..., str]
) -> None:
    topic = make_topic(3)
    found = kafka_python.describe_topic_partitions([topic], response_partition_limit=2)
    assert [len(one["partitions"]) for one in found["topics"]] == [2]
    assert (found["next_cursor"]["topic_name"], found["next_cursor"]["partition_index"]) == (topic, 2)


# What consoles ask when they are opened, in the versions their client libraries take at the most

EVERY_TOPIC = {"topics": None, "include_topic_authorized_operations": True}
ANY_ACL = {
    "resource_type_filter": 1,
    "resource_name_filter": None,
    "pattern_type_filter": 1,
    "principal_filter": None,
    "host_filter": None,
    "operation": 1,
    "permission_type": 1,
}
ALL_PAGES = {"topics": [], "response_partition_limit": 2000, "cursor": None}

KAFKA_UI = [  # kafka-ui and AKHQ: the Java AdminClient
    (
        ApiKey.API_VERSIONS,
        4,
        {"client_software_name": "apache-kafka-java", "client_software_version": "4.1.1"},
        0,
    ),
    (ApiKey.DESCRIBE_CLUSTER, 2, {"include_cluster_authorized_operations": True, "endpoint_type": 1}, 0),
    (ApiKey.METADATA, 13, EVERY_TOPIC, None),
    (ApiKey.DESCRIBE_TOPIC_PARTITIONS, 0, ALL_PAGES, None),
    (ApiKey.DESCRIBE_CONFIGS, 4, {"resources": [{"resource_type": 4, "resource_name": "1"}]}, None),
    (ApiKey.DESCRIBE_LOG_DIRS, 4, {"topics": None}, 0),
    (ApiKey.LIST_GROUPS, 5, {"states_filter": [], "types_filter": []}, 0),
    (ApiKey.DESCRIBE_ACLS, 3, ANY_ACL, SECURITY_DISABLED),
    (ApiKey.DESCRIBE_CLIENT_QUOTAS, 1, {"components": [], "strict": False}, 0),
    (ApiKey.LIST_PARTITION_REASSIGNMENTS, 0, {"timeout_ms": 1000, "topics": None}, 0),
]
REDPANDA_CONSOLE = [  # franz-go
    (ApiKey.API_VERSIONS, 3, {"client_software_name": "kgo", "client_software_version": "v1"}, 0),
    (ApiKey.METADATA, 12, EVERY_TOPIC, None),
    (ApiKey.DESCRIBE_CONFIGS, 4, {"resources": [{"resource_type": 4, "resource_name": "1"}]}, None),
    (ApiKey.DESCRIBE_LOG_DIRS, 4, {"topics": None}, 0),
    (ApiKey.LIST_GROUPS, 4, {"states_filter": []}, 0),
    (ApiKey.DESCRIBE_ACLS, 3, ANY_ACL, SECURITY_DISABLED),
    (ApiKey.DESCRIBE_CLIENT_QUOTAS, 1, {"components": [], "strict": False}, 0),
    (ApiKey.LIST_PARTITION_REASSIGNMENTS, 0, {"timeout_ms": 1000, "topics": None}, 0),
    (ApiKey.LIST_TRANSACTIONS, 1, {"state_filters": [], "producer_id_filters": [], "duration_filter": -1}, 0),
]


@pytest.mark.row("A1")
@pytest.mark.parametrize("opening", [KAFKA_UI, REDPANDA_CONSOLE], ids=["kafka-ui", "redpanda-console"])
def test_what_a_console_asks_when_it_opens_is_answered(
    raw: RawPeer,
    make_topic: Callable[..., str],
    opening: list[tuple[ApiKey, int, dict[str, Any], int | None]],
) -> None:
    topic = make_topic(2)
    for api, version, fields, code in opening:
        assert SUPPORTED_APIS[api].min_version <= version <= SUPPORTED_APIS[api].max_version, api
        answer = raw.call(api, version, fields)
        if code is not None:
            assert answer.error_code == code, api
        if api in (ApiKey.METADATA, ApiKey.DESCRIBE_TOPIC_PARTITIONS):
            (shown,) = [one for one in answer.topics if one.name == topic]
            assert (shown.error_code, len(shown.partitions)) == (0, 2)
        if api is ApiKey.DESCRIBE_LOG_DIRS:
            assert topic in {one.name for one in answer.results[0].topics}


@pytest.mark.row("A1")
def test_kcat_lists_and_queries(bootstrap_servers: str, make_topic: Callable[..., str]) -> None:
    topic = make_topic(2)
    confluent_write(bootstrap_servers, topic, [Item(None, b"v", (), 1_700_000_000_000)])
    listed = kcat(bootstrap_servers, "-L", "-t", topic, "-J").decode()
    assert f'"topic":"{topic}"' in listed
    assert listed.count('"leader":1') == 2
    assert "offset 1" in kcat(bootstrap_servers, "-Q", "-t", f"{topic}:0:-1").decode()
    assert "offset 0" in kcat(bootstrap_servers, "-Q", "-t", f"{topic}:0:1600000000000").decode()


# Quotas, measured with clients that know of pauses

RATE = 100_000
BURST_MS = 100
ITEMS = 15
ITEM_BYTES = 10_000
LEAST_S = ITEMS * ITEM_BYTES / RATE - BURST_MS / 1000 - ITEM_BYTES / RATE


@pytest.fixture(scope="module")
def limited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a broker that gives every client id RATE bytes/s each way."""
    directory: Path = tmp_path_factory.mktemp("limited") / "data"
    with (
        mansio.Broker(directory, listeners="127.0.0.1:0", quota_burst_ms=BURST_MS) as broker,
        mansio.blocking.connect(broker.address) as client,
    ):
        client.admin.create_topic("t")
        for _ in range(ITEMS):
            client.publish("t", b"x" * ITEM_BYTES)  # a batch each
        values = {"producer_byte_rate": RATE, "consumer_byte_rate": RATE}
        client.admin.quotas.set(client_id=mansio.client.admin.quotas.DEFAULT_ENTITY, values=values)
        yield broker.address


@pytest.mark.row("A1")
def test_confluent_kafka_writes_at_its_quota_and_hears_of_the_pauses(limited: str) -> None:
    received: list[ThrottleEvent] = []
    producer = Producer(
        {
            **QUIET,
            "bootstrap.servers": limited,
            "client.id": "writer",
            "batch.num.messages": 1,
            "throttle_cb": received.append,
        }
    )
    begun = time.monotonic()
    for _ in range(ITEMS):
        producer.produce(
            "t", b"x" * ITEM_BYTES, on_delivery=lambda error, _: pytest.fail(str(error)) if error else None
        )
    assert producer.flush(scaled(20)) == 0
    took_s = time.monotonic() - begun
    wait_until(lambda: producer.poll(0) or received, 20)
    assert LEAST_S <= took_s < scaled(5 * LEAST_S)
    assert received[0].throttle_time > 0


@pytest.mark.row("A1")
def test_confluent_kafka_reads_at_its_quota(limited: str) -> None:
    consumer = Consumer({**QUIET, "bootstrap.servers": limited, "client.id": "reader", "group.id": "none"})
    consumer.assign([TopicPartition("t", 0, 0)])
    begun = time.monotonic()
    count = 0
    while count < ITEMS and time.monotonic() < begun + 20:
        count += len(consumer.consume(ITEMS - count, 0.2))
    took_s = time.monotonic() - begun
    consumer.close()
    assert count == ITEMS
    assert LEAST_S <= took_s < scaled(5 * LEAST_S)


@pytest.mark.row("A1")
def test_kafka_python_writes_at_its_quota(limited: str) -> None:
    begun = time.monotonic()
    items = [Item(None, b"x" * ITEM_BYTES)] * ITEMS
    kafka_python_write(limited, "t", items, client_id="python", batch_size=1)
    assert LEAST_S <= time.monotonic() - begun < scaled(5 * LEAST_S)


# One directory, a metadata store instead of a quorum of brokers, no features


def test_a_replica_is_in_the_only_directory_already(
    kafka_python: KafkaAdminClient, raw: RawPeer, make_topic: Callable[..., str]
) -> None:
    topic = make_topic()
    ((broker_id, directory),) = [
        (one["broker"], each["log_dir"])
        for one in kafka_python.describe_log_dirs()
        for each in one["log_dirs"]
    ]
    moved = kafka_python.alter_replica_log_dirs({(topic, 0, broker_id): directory})
    assert [error.errno for error in moved.values()] == [0]
    moved = kafka_python.alter_replica_log_dirs({(topic, 0, broker_id): "/other"})
    assert [error.errno for error in moved.values()] == [LOG_DIR_NOT_FOUND]
    dirs = [{"path": directory, "topics": [{"name": f"{topic}-none", "partitions": [0, 1]}]}]
    for version in (1, 2):
        (found,) = raw.call(ApiKey.ALTER_REPLICA_LOG_DIRS, version, {"dirs": dirs}).results
        assert [each.error_code for each in found.partitions] == [UNKNOWN_TOPIC_OR_PARTITION] * 2


def test_the_metadata_of_a_single_broker_are_described_as_its_own(
    kafka_python: KafkaAdminClient, raw: RawPeer, make_topic: Callable[..., str]
) -> None:
    """What `kafka-metadata-quorum describe` requests."""
    (broker_id,) = (one["broker_id"] for one in kafka_python.describe_cluster()["brokers"])

    def described() -> dict[str, Any]:
        ((topic,),) = (kafka_python.describe_metadata_quorum()["topics"],)
        (partition,) = topic["partitions"]
        return dict(partition)

    before = described()
    assert before["error"] is None
    assert before["leader_id"] == broker_id
    assert [each["replica_id"] for each in before["current_voters"]] == [broker_id]
    assert before["current_voters"][0]["log_end_offset"] == before["high_watermark"]
    assert before["observers"] == []
    make_topic()
    assert described()["high_watermark"] > before["high_watermark"]
    asked = [{"topic_name": "other", "partitions": [{"partition_index": 0}]}]
    for version in (0, 1, 2):
        (topic,) = raw.call(ApiKey.DESCRIBE_QUORUM, version, {"topics": asked}).topics
        assert topic.partitions[0].error_code == UNKNOWN_TOPIC_OR_PARTITION


def test_a_single_broker_has_the_features_of_its_version_and_no_others(
    kafka_python: KafkaAdminClient, raw: RawPeer
) -> None:
    """What `kafka-features` requests."""
    features = kafka_python.describe_features()
    assert set(features) == {"transaction.version", "mansio.version"}
    kafka_python.update_features({"mansio.version": 2})
    with pytest.raises(InvalidUpdateVersionError):
        kafka_python.update_features({"metadata.version": 17})
    update = {"feature": "metadata.version", "max_version_level": 17}
    for version in (0, 1, 2):
        answer = raw.call(ApiKey.UPDATE_FEATURES, version, {"feature_updates": [update], "timeout_ms": 1000})
        assert answer.error_code == INVALID_UPDATE_VERSION
        assert "only mansio.version can be changed" in str(answer.error_message)
        assert not getattr(answer, "results", ())
        nothing = raw.call(ApiKey.UPDATE_FEATURES, version, {"feature_updates": [], "timeout_ms": 1000})
        assert nothing.error_code == 0
