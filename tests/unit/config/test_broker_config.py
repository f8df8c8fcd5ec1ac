"""Dynamic settings of brokers: definitions, precedence, and values of other versions."""

from __future__ import annotations

import pytest

from mansio.config.broker_config import (
    BROKER_CONFIG,
    DYNAMIC_SETTINGS,
    FOLLOWER_THROTTLE,
    BrokerConfigSources,
    config_name,
)
from mansio.config.config_entries import Source, broker_entries
from mansio.config.settings import SPECIFICATIONS, Settings, default_of
from mansio.errors import ConfigError, InvalidConfig

LONG_MAX = str((1 << 63) - 1)


@pytest.mark.parametrize("name", DYNAMIC_SETTINGS)
def test_a_dynamic_setting_has_the_bounds_and_the_type_of_the_static_one(name: str) -> None:
    specification, default, shown = SPECIFICATIONS[name], default_of(name), config_name(name)
    assert specification.kafka_unit == 1, "the value would need a conversion"
    if isinstance(default, bool):
        texts, refused = ["true", "False"], "1"
    elif isinstance(default, int):
        texts, refused = [str(specification.minimum), str(specification.maximum)], str(1 << 62)
    else:
        texts, refused = list(specification.choices), "other"
    for text in texts:
        effective = BrokerConfigSources(Settings(), own_values={shown: text}).effective_settings()
        value = getattr(effective, name)
        assert type(value) is type(default)
        assert str(value).lower() == text.lower()
    with pytest.raises(InvalidConfig):
        BROKER_CONFIG.normalize(shown, refused)


def test_a_broker_precedes_all_brokers_and_both_precede_its_file() -> None:
    static = Settings(num_partitions=2, topic_defaults={"retention.ms": "2", "segment.ms": "2"})
    default = {"num.partitions": "3", "log.retention.ms": "3", "log.roll.ms": "3"}
    own = {"num.partitions": "4", "log.retention.ms": "4"}
    config_sources = BrokerConfigSources(static, own_values=own, default_values=default)
    effective = config_sources.effective_settings()
    assert effective.num_partitions == 4
    assert effective.topic_defaults == {"retention.ms": "4", "segment.ms": "3"}
    entries = {entry.name: entry for entry in broker_entries(config_sources)}
    assert [(one.value, one.source) for one in entries["num.partitions"].synonyms] == [
        ("4", Source.DYNAMIC_BROKER),
        ("3", Source.DYNAMIC_DEFAULT_BROKER),
        ("2", Source.STATIC_BROKER),
        ("1", Source.DEFAULT),
    ]
    assert BrokerConfigSources(static).effective_settings() is static


def test_values_of_another_version_are_ignored_and_contradictions_are_not() -> None:
    config_sources = BrokerConfigSources(
        Settings(), own_values={"gone.setting": "1", "num.partitions": "many", "log.roll.ms": "7"}
    )
    effective = config_sources.effective_settings()
    assert (effective.num_partitions, effective.topic_defaults) == (1, {"segment.ms": "7"})
    contradiction = {"log.cleaner.min.compaction.lag.ms": "5", "log.cleaner.max.compaction.lag.ms": "4"}
    with pytest.raises(ConfigError, match="5 is more than max"):
        BrokerConfigSources(Settings(), own_values=contradiction).effective_settings()


@pytest.mark.parametrize(("rate", "expected"), [("1000", 1000), ("0", 1), (LONG_MAX, 0)])
def test_kafkas_throttle_of_followers_replaces_the_brokers_own(rate: str, expected: int) -> None:
    static = Settings(replica_throttle_bytes_per_second=7)
    config_sources = BrokerConfigSources(
        static, own_values={FOLLOWER_THROTTLE: rate}, default_values={FOLLOWER_THROTTLE: "5"}
    )
    assert config_sources.effective_settings().replica_throttle_bytes_per_second == expected
    names = {entry.name for entry in broker_entries(BrokerConfigSources(static))}
    assert FOLLOWER_THROTTLE not in names, "shown only where it is set, as in Kafka"


def test_settings_are_either_dynamic_or_refused_with_the_reason() -> None:
    for name in SPECIFICATIONS.keys() - set(DYNAMIC_SETTINGS) - {"topic_defaults"}:
        with pytest.raises(InvalidConfig, match="read at the start"):
            BROKER_CONFIG.key(config_name(name))


def test_a_contradictory_value_does_not_keep_the_others_from_being_applied() -> None:
    static = Settings(topic_defaults={"max.compaction.lag.ms": "1000"})
    default = {"max.connections.per.ip": "7", "log.cleaner.min.compaction.lag.ms": "5000"}
    config_sources, refused = BrokerConfigSources(
        static, own_values={"num.partitions": "9"}, default_values=default
    ).without_contradictions()
    assert list(refused) == ["log.cleaner.min.compaction.lag.ms"]
    effective = config_sources.effective_settings()
    assert (effective.num_partitions, effective.max_connections_per_ip) == (9, 7)
    assert effective.topic_defaults == static.topic_defaults
