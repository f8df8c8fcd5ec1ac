"""Settings as Kafka's tools and infrastructure code use them: what is accepted, what it means, how it is described."""

from __future__ import annotations

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
        code, reason = refusal(
            lambda name=name, value=value: alter(admin, ResourceType.TOPIC, topic, {name: value})
        )
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
