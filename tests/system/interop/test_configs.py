"""Settings as Kafka's tools and infrastructure code use them: what is accepted, what it means, how it is described."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    ConfigSource,
    NewTopic,
    ResourceType,
)

from mansio.wire.api_versions import ApiKey
from support.machine import scaled
from support.process import ServedBroker, served
from support.raw_peer import RawPeer, batch_of
from support.waiting import wait_until
from system.interop.clients import QUIET

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

TOPIC, BROKER = 2, 4
DEFAULT_SOURCE = 5
DYNAMIC_BROKER, DYNAMIC_DEFAULT, STATIC, BUILT_IN = 2, 3, 4, 5
SET, DELETE = 0, 1
MESSAGE_TOO_LARGE, INVALID_REQUEST = 10, 42
INT64_MAX = (1 << 63) - 1

TUNED = {
    "cleanup.policy": "compact,delete",
    "delete.retention.ms": "1",
    "errors.deadletterqueue.group.enable": "true",
    "file.delete.delay.ms": "1000",
    "flush.messages": "1",
    "flush.ms": "1",
    "follower.replication.throttled.replicas": "0:1,1:1",
    "index.interval.bytes": "100",
    "leader.replication.throttled.replicas": "*",
    "local.retention.bytes": "-2",
    "local.retention.ms": "1",
    "max.compaction.lag.ms": "5",
    "max.message.bytes": "100000",
    "message.timestamp.after.max.ms": "5",
    "message.timestamp.before.max.ms": "5",
    "message.timestamp.type": "LogAppendTime",
    "min.cleanable.dirty.ratio": "0.1",
    "min.compaction.lag.ms": "1",
    "min.insync.replicas": "1",
    "preallocate": "true",
    "remote.log.copy.disable": "true",
    "remote.log.delete.on.disable": "true",
    "remote.storage.enable": "false",
    "retention.bytes": "1000000",
    "retention.ms": "1000",
    "segment.bytes": "1048576",
    "segment.index.bytes": "4096",
    "segment.jitter.ms": "10",
    "segment.ms": "100000",
    "unclean.leader.election.enable": "false",
}
"""A value for each topic setting of Kafka 4."""

WITHOUT_EFFECT = {
    "file.delete.delay.ms",
    "flush.messages",
    "flush.ms",
    "follower.replication.throttled.replicas",
    "leader.replication.throttled.replicas",
    "local.retention.bytes",
    "local.retention.ms",
    "preallocate",
    "remote.log.copy.disable",
    "remote.log.delete.on.disable",
    "segment.index.bytes",
    "segment.jitter.ms",
}


@pytest.fixture
def admin(bootstrap_servers: str) -> AdminClient:
    return AdminClient({"bootstrap.servers": bootstrap_servers, **QUIET})


@pytest.fixture
def raw(bootstrap_servers: str) -> Iterator[RawPeer]:
    with RawPeer(int(bootstrap_servers.rpartition(":")[2])) as peer:
        yield peer


def described(admin: AdminClient, kind: ResourceType, name: str) -> dict[str, Any]:
    (future,) = admin.describe_configs([ConfigResource(kind, name)]).values()
    found: dict[str, Any] = future.result(scaled(15))
    return found


def alter(
    admin: AdminClient, kind: ResourceType, name: str, changes: dict[str, str | None], operation: str = "SET"
) -> None:
    """Change settings incrementally; None deletes one. Raises `KafkaException`."""
    if not name:  # confluent-kafka has no resource for all brokers
        alter_defaults(admin, changes)
        return
    entries = [
        ConfigEntry(
            key,
            value,
            incremental_operation=AlterConfigOpType.DELETE if value is None else AlterConfigOpType[operation],
        )
        for key, value in changes.items()
    ]
    resource = ConfigResource(kind, name, incremental_configs=entries)
    (future,) = admin.incremental_alter_configs([resource]).values()
    future.result(scaled(15))


def port_of(admin: AdminClient) -> int:
    (broker,) = admin.list_topics(timeout=scaled(15)).brokers.values()
    return int(broker.port)


def alter_defaults(admin: AdminClient, changes: dict[str, str | None]) -> None:
    """Change the dynamic defaults of all brokers."""
    configs = [
        {"name": key, "config_operation": DELETE if value is None else SET, "value": value}
        for key, value in changes.items()
    ]
    resource = {"resource_type": BROKER, "resource_name": "", "configs": configs}
    with RawPeer(port_of(admin)) as raw:
        (response,) = raw.call(ApiKey.INCREMENTAL_ALTER_CONFIGS, 1, {"resources": [resource]}).responses
    assert response.error_code == 0, response.error_message


def described_defaults(admin: AdminClient) -> dict[str, str]:
    """The dynamic defaults of all brokers."""
    resource = {"resource_type": BROKER, "resource_name": "", "configuration_keys": None}
    with RawPeer(port_of(admin)) as raw:
        (result,) = raw.call(ApiKey.DESCRIBE_CONFIGS, 4, {"resources": [resource]}).results
    assert {(each.config_source, each.read_only) for each in result.configs} <= {(DYNAMIC_DEFAULT, False)}
    return {each.name: each.value for each in result.configs}


def refusal(call: Callable[[], object]) -> tuple[int, str]:
    with pytest.raises(KafkaException) as caught:
        call()
    error = caught.value.args[0]
    return int(error.code()), str(error.str())


def documentation(raw: RawPeer, topic: str) -> dict[str, str]:
    fields = {
        "resources": [{"resource_type": TOPIC, "resource_name": topic, "configuration_keys": None}],
        "include_documentation": True,
    }
    (result,) = raw.call(ApiKey.DESCRIBE_CONFIGS, 4, fields).results
    return {each.name: each.documentation for each in result.configs}


# Settings of topics


def test_all_topic_settings_of_kafka_are_accepted_and_stored(
    admin: AdminClient, raw: RawPeer, broker: ServedBroker, unique: str
) -> None:
    created, altered = f"{unique}-created", f"{unique}-altered"
    admin.create_topics([NewTopic(created, 1, 1, config=TUNED)])[created].result(scaled(15))
    admin.create_topics([NewTopic(altered, 1, 1)])[altered].result(scaled(15))
    alter(admin, ResourceType.TOPIC, altered, dict(TUNED))
    for topic in (created, altered):
        configs = described(admin, ResourceType.TOPIC, topic)
        assert {name: configs[name].value for name in TUNED} == TUNED
        lines = [
            line
            for line in broker.text().splitlines()
            if "topic_settings_without_effect" in line and f"topic={topic} " in line
        ]
        assert len(lines) == 1, "one warning for all of them"
        assert all(name in lines[0] for name in WITHOUT_EFFECT)
    marked = {name for name, text in documentation(raw, created).items() if "Without effect" in text}
    assert marked == WITHOUT_EFFECT


def test_settings_without_effect_have_kafkas_defaults_and_are_validated(
    admin: AdminClient, make_topic: Callable[..., str]
) -> None:
    topic = make_topic()
    configs = described(admin, ResourceType.TOPIC, topic)
    defaults = {
        "file.delete.delay.ms": "60000",
        "flush.messages": str(INT64_MAX),
        "flush.ms": str(INT64_MAX),
        "leader.replication.throttled.replicas": "",
        "local.retention.ms": "-2",
        "preallocate": "false",
        "segment.index.bytes": "10485760",
        "segment.jitter.ms": "0",
    }
    assert {name: configs[name].value for name in defaults} == defaults
    for name, value in {
        "flush.messages": "0",
        "leader.replication.throttled.replicas": "0-1",
        "preallocate": "maybe",
        "remote.storage.enable": "true",
        "segment.index.bytes": "3",
    }.items():
        code, reason = refusal(partial(alter, admin, ResourceType.TOPIC, topic, {name: value}))
        assert code == KafkaError.INVALID_CONFIG
        assert name in reason


def test_deleting_a_setting_that_is_not_set_changes_nothing(
    admin: AdminClient, make_topic: Callable[..., str]
) -> None:
    """As `kafka-reassign-partitions --verify` does with the throttles of topics and brokers when it is done."""
    topic = make_topic(retention_ms="5")
    throttles = ("leader.replication.throttled.replicas", "follower.replication.throttled.replicas")
    alter(admin, ResourceType.TOPIC, topic, dict.fromkeys((*throttles, "no.such.setting")))
    assert described(admin, ResourceType.TOPIC, topic)["retention.ms"].value == "5"
    (broker_id,) = admin.list_topics(timeout=scaled(15)).brokers
    rates = (
        "leader.replication.throttled.rate",
        "follower.replication.throttled.rate",
        "replica.alter.log.dirs.io.max.bytes.per.second",
    )
    alter(admin, ResourceType.BROKER, str(broker_id), dict.fromkeys(rates))
    alter(admin, ResourceType.GROUP, f"{topic}-group", {"consumer.session.timeout.ms": None})


def test_a_topic_without_a_cleanup_policy_keeps_everything_until_it_is_deleted_on_request(
    tmp_path: Path,
) -> None:
    """KIP-1161."""
    arguments = ["--set", "log_retention_check_interval_ms=20", "--set", "log_cleaner_backoff_ms=20"]
    with served(tmp_path / "data", arguments=arguments, http=False) as broker:
        admin = AdminClient({"bootstrap.servers": broker.bootstrap_servers, **QUIET})
        limits = {"retention.ms": "1", "segment.ms": "1", "retention.bytes": "1", "segment.bytes": "1024"}
        names = ["kept", "emptied", "deleted"]
        config = {"kept": {"cleanup.policy": ""}}
        topics = [NewTopic(name, 1, 1, config=limits | config.get(name, {})) for name in names]
        # Created without records: nothing is deleted before the policy is removed.
        for future in admin.create_topics(topics).values():
            future.result(scaled(15))
        alter(admin, ResourceType.TOPIC, "emptied", {"cleanup.policy": "delete"}, "SUBTRACT")
        assert described(admin, ResourceType.TOPIC, "emptied")["cleanup.policy"].value == ""
        with RawPeer(int(broker.bootstrap_servers.rpartition(":")[2])) as raw:
            for _ in range(5):
                for name in names:
                    assert raw.produce(name, batch_of(b"v" * 900)).error_code == 0

            def start(name: str) -> int:
                asked = {"name": name, "partitions": [{"partition_index": 0, "timestamp": -2}]}
                fields = {"replica_id": -1, "topics": [asked]}
                return int(raw.call(ApiKey.LIST_OFFSETS, 5, fields).topics[0].partitions[0].offset)

            wait_until(lambda: start("deleted") >= 4, 30)
            assert (start("kept"), start("emptied")) == (0, 0)
            wanted = {"name": "kept", "partitions": [{"partition_index": 0, "offset": 3}]}
            answer = raw.call(ApiKey.DELETE_RECORDS, 2, {"topics": [wanted], "timeout_ms": 10_000})
            assert answer.topics[0].partitions[0].low_watermark == 3
            alter(admin, ResourceType.TOPIC, "emptied", {"cleanup.policy": "delete"}, "APPEND")
            wait_until(lambda: start("emptied") >= 4, 30)


# Descriptions


def test_synonyms_are_those_of_kafka(raw: RawPeer, unique: str) -> None:
    raw.create_topic(unique, remote_log_copy_disable="true")
    fields = {
        "resources": [{"resource_type": TOPIC, "resource_name": unique, "configuration_keys": None}],
        "include_synonyms": True,
    }
    (result,) = raw.call(ApiKey.DESCRIBE_CONFIGS, 4, fields).results
    found = {each.name: each for each in result.configs}
    synonyms = {name: [each.name for each in entry.synonyms] for name, entry in found.items()}
    for name in (
        "follower.replication.throttled.replicas",
        "leader.replication.throttled.replicas",
        "remote.log.delete.on.disable",
        "remote.storage.enable",
    ):
        assert synonyms[name] == [], "brokers have no such setting"
        assert found[name].config_source == DEFAULT_SOURCE
    assert synonyms["remote.log.copy.disable"] == ["remote.log.copy.disable"]
    assert synonyms["segment.ms"] == ["log.roll.ms"]
    assert synonyms["max.message.bytes"] == ["message.max.bytes"]
    assert synonyms["preallocate"] == ["log.preallocate"]
    for entry in found.values():
        assert not entry.synonyms or entry.synonyms[0].value == entry.value


def test_the_broker_is_described_with_the_defaults_of_all_topic_settings(admin: AdminClient) -> None:
    (broker_id,) = admin.list_topics(timeout=scaled(15)).brokers
    configs = described(admin, ResourceType.BROKER, str(broker_id))
    for name in ("log.preallocate", "log.segment.delete.delay.ms", "log.index.size.max.bytes"):
        assert configs[name].source == ConfigSource.DEFAULT_CONFIG.value
    assert "" not in configs


# Settings of brokers


def synonyms_of(raw: RawPeer, kind: int, name: str, setting: str) -> list[tuple[str, str, int]]:
    fields = {
        "resources": [{"resource_type": kind, "resource_name": name, "configuration_keys": [setting]}],
        "include_synonyms": True,
    }
    (result,) = raw.call(ApiKey.DESCRIBE_CONFIGS, 4, fields).results
    assert result.error_code == 0, result.error_message
    (entry,) = result.configs
    assert (entry.value, entry.config_source) == (entry.synonyms[0].value, entry.synonyms[0].source)
    return [(each.name, each.value, each.source) for each in entry.synonyms]


@pytest.mark.full
def test_settings_of_a_broker_have_kafkas_precedence_and_survive_a_restart(tmp_path: Path) -> None:
    """KIP-226: the broker's own value, the default of all brokers, the file, the built-in default."""
    arguments = ["--set", 'topic_defaults={"retention.ms": "4000"}', "--set", "num_partitions=4"]
    with served(tmp_path / "data", arguments=arguments, http=False) as broker:
        admin = AdminClient({"bootstrap.servers": broker.bootstrap_servers, **QUIET})
        port = int(broker.bootstrap_servers.rpartition(":")[2])
        admin.create_topics([NewTopic("t", 1, 1)])["t"].result(scaled(15))
        alter(admin, ResourceType.BROKER, "", {"log.retention.ms": "3000", "num.partitions": "3"})
        alter(admin, ResourceType.BROKER, "1", {"log.retention.ms": "2000"})
        expected = [
            ("log.retention.ms", "2000", DYNAMIC_BROKER),
            ("log.retention.ms", "3000", DYNAMIC_DEFAULT),
            ("log.retention.ms", "4000", STATIC),
            ("log.retention.ms", "604800000", BUILT_IN),
        ]
        for _ in range(2):
            with RawPeer(port) as raw:
                assert synonyms_of(raw, BROKER, "1", "log.retention.ms") == expected
                assert synonyms_of(raw, TOPIC, "t", "retention.ms") == expected
                assert synonyms_of(raw, BROKER, "1", "num.partitions") == [
                    ("num.partitions", "3", DYNAMIC_DEFAULT),
                    ("num.partitions", "4", STATIC),
                    ("num.partitions", "1", BUILT_IN),
                ]
                assert synonyms_of(raw, BROKER, "", "num.partitions") == [
                    ("num.partitions", "3", DYNAMIC_DEFAULT)
                ]
            broker.stop()
            broker.start()
            port = int(broker.bootstrap_servers.rpartition(":")[2])
            admin = AdminClient({"bootstrap.servers": broker.bootstrap_servers, **QUIET})
        assert described_defaults(admin) == {"log.retention.ms": "3000", "num.partitions": "3"}
        admin.create_topics([NewTopic("three", -1, 1)])["three"].result(scaled(15))
        assert len(admin.list_topics("three", timeout=scaled(15)).topics["three"].partitions) == 3
        alter(admin, ResourceType.BROKER, "1", {"log.retention.ms": None})
        alter(admin, ResourceType.BROKER, "", {"log.retention.ms": None, "num.partitions": None})
        with RawPeer(port) as raw:
            assert synonyms_of(raw, TOPIC, "t", "retention.ms") == expected[2:]
        assert described_defaults(admin) == {}


def test_a_changed_default_of_topics_takes_effect_on_open_partitions(tmp_path: Path) -> None:
    with served(tmp_path / "data", http=False) as broker:
        admin = AdminClient({"bootstrap.servers": broker.bootstrap_servers, **QUIET})
        admin.create_topics(
            [NewTopic("t", 1, 1), NewTopic("own", 1, 1, config={"max.message.bytes": "100000"})]
        )["own"].result(scaled(15))
        with RawPeer(int(broker.bootstrap_servers.rpartition(":")[2])) as raw:
            wait_until(lambda: raw.produce("t", batch_of(b"v" * 10_000)).error_code == 0, 15)
            alter(admin, ResourceType.BROKER, "", {"message.max.bytes": "1000", "compression.type": "gzip"})
            assert raw.produce("t", batch_of(b"v" * 10_000)).error_code == MESSAGE_TOO_LARGE
            assert raw.produce("own", batch_of(b"v" * 10_000)).error_code == 0
            alter(admin, ResourceType.BROKER, "", {"message.max.bytes": None})
            assert raw.produce("t", batch_of(b"v" * 10_000)).error_code == 0


def test_limits_and_topic_creation_change_while_the_broker_runs(tmp_path: Path) -> None:
    with served(tmp_path / "data", http=False) as broker:
        port = int(broker.bootstrap_servers.rpartition(":")[2])
        admin = AdminClient({"bootstrap.servers": broker.bootstrap_servers, **QUIET})
        alter(
            admin,
            ResourceType.BROKER,
            "1",
            {"auto.create.topics.enable": "TRUE", "mansio.log_level": "warning"},
        )
        with RawPeer(port) as raw:
            (topic,) = raw.call(ApiKey.METADATA, 12, {"topics": [{"name": "made"}]}).topics
            assert topic.error_code == 0
        assert described(admin, ResourceType.BROKER, "1")["auto.create.topics.enable"].value == "true"
        assert "topic_created topic=made" not in broker.text(), "an INFO line at the level WARNING"
        alter(admin, ResourceType.BROKER, "1", {"mansio.log_level": None, "max.connections.per.ip": "1"})
        with RawPeer(port) as refused:
            assert refused.closed()
        alter(admin, ResourceType.BROKER, "1", {"max.connections.per.ip": None})
        with RawPeer(port) as raw:
            assert raw.call(ApiKey.METADATA, 12, {"topics": []}).brokers


def test_settings_that_are_read_at_the_start_are_refused_by_name(
    admin: AdminClient, raw: RawPeer, broker: ServedBroker
) -> None:
    (broker_id,) = map(str, admin.list_topics(timeout=scaled(15)).brokers)
    refused = {
        "listeners": ("PLAINTEXT://:1", "read at the start"),
        "log.dirs": ("/tmp/other", "read at the start"),
        "mansio.fetch_wait_ms_max": ("1", "read at the start"),
        "no.such.setting": ("1", "no such broker setting"),
        "num.partitions": ("0", "below the minimum"),
        "log.cleanup.policy": ("shred", "not a cleanup policy"),
        "log.cleaner.min.compaction.lag.ms": ("9223372036854775807", ""),
    }
    before = described(admin, ResourceType.BROKER, broker_id)
    for name, (value, reason) in refused.items():
        changes: dict[str, str | None] = {name: value}
        if name == "log.cleaner.min.compaction.lag.ms":
            changes["log.cleaner.max.compaction.lag.ms"] = "5"  # they contradict each other
        code, message = refusal(lambda changes=changes: alter(admin, ResourceType.BROKER, broker_id, changes))  # type: ignore[misc]
        assert code == KafkaError.INVALID_CONFIG, message
        assert reason in message
        assert name.removeprefix("log.cleaner.") in message
    unknown = {"resource_type": BROKER, "resource_name": "99", "configs": []}
    (response,) = raw.call(ApiKey.INCREMENTAL_ALTER_CONFIGS, 1, {"resources": [unknown]}).responses
    assert response.error_code == INVALID_REQUEST
    after = described(admin, ResourceType.BROKER, broker_id)
    assert {name: entry.value for name, entry in after.items()} == {
        name: entry.value for name, entry in before.items()
    }
    assert after["listeners"].is_read_only
    assert not after["num.partitions"].is_read_only
    assert "Traceback" not in broker.text()


def test_throttles_as_kafkas_reassignment_tool_sets_them(admin: AdminClient, broker: ServedBroker) -> None:
    (broker_id,) = map(str, admin.list_topics(timeout=scaled(15)).brokers)
    rates = ("leader.replication.throttled.rate", "follower.replication.throttled.rate")
    alter(admin, ResourceType.BROKER, broker_id, dict.fromkeys(rates, "1000000"))
    configs = described(admin, ResourceType.BROKER, broker_id)
    assert {configs[name].value for name in rates} == {"1000000"}
    lines = [line for line in broker.text().splitlines() if "broker_settings_without_effect" in line]
    assert len(lines) == 1
    assert "leader.replication.throttled.rate" in lines[0]
    alter(admin, ResourceType.BROKER, broker_id, dict.fromkeys(rates))
    assert not set(rates) & set(described(admin, ResourceType.BROKER, broker_id))


def test_replacing_all_settings_of_a_broker(raw: RawPeer, admin: AdminClient) -> None:
    (broker_id,) = map(str, admin.list_topics(timeout=scaled(15)).brokers)

    def replace(**values: str) -> None:
        configs = [{"name": name.replace("_", "."), "value": value} for name, value in values.items()]
        resource = {"resource_type": BROKER, "resource_name": broker_id, "configs": configs}
        (response,) = raw.call(ApiKey.ALTER_CONFIGS, 2, {"resources": [resource]}).responses
        assert response.error_code == 0, response.error_message

    replace(num_partitions="2", log_cleaner_backoff_ms="1000")
    assert synonyms_of(raw, BROKER, broker_id, "log.cleaner.backoff.ms")[0][2] == DYNAMIC_BROKER
    replace(num_partitions="2")
    assert synonyms_of(raw, BROKER, broker_id, "log.cleaner.backoff.ms")[0][2] == BUILT_IN
    assert synonyms_of(raw, BROKER, broker_id, "num.partitions")[0][1] == "2"
    replace()
    assert synonyms_of(raw, BROKER, broker_id, "num.partitions")[0][2] == BUILT_IN
