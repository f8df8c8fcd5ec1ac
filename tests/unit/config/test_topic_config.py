"""Topic settings: what is accepted, what is refused and why, what is in force."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mansio.config import topic_config
from mansio.config.broker_config import BrokerConfigSources
from mansio.config.config_def import Change, ConfigType, Operation
from mansio.config.config_entries import Source, broker_entries, topic_entries
from mansio.config.settings import Settings
from mansio.config.topic_config import SETTINGS, UNSUPPORTED_SETTINGS
from mansio.errors import ConfigError, InvalidConfig, InvalidRequest


def test_defaults_obey_their_own_rules() -> None:
    for name, row in SETTINGS.items():
        text = topic_config.effective_value(name, {}, {}, 1)
        assert topic_config.TOPIC_CONFIG.normalize(name, text) == (
            text if row.kind is not ConfigType.BOOLEAN else text.lower()
        ), name


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("cleanup.policy", "delete,shred", "not a cleanup policy"),
        ("min.cleanable.dirty.ratio", "1.01", "above the maximum of 1"),
        ("min.cleanable.dirty.ratio", "-0.1", "below the minimum of 0"),
        ("min.cleanable.dirty.ratio", "1e999", "above the maximum of 1"),
        ("min.cleanable.dirty.ratio", "nan", "not a number"),
        ("min.cleanable.dirty.ratio", "half", "not a number"),
        ("min.compaction.lag.ms", "-1", "below the minimum"),
        ("max.compaction.lag.ms", "0", "below the minimum of 1"),
        ("segment.jitter.ms", "-1", "below the minimum"),
        ("remote.storage.enable", "true", "no tiered storage"),
        ("leader.replication.throttled.replicas", "1", "not PARTITION:BROKER"),
        ("leader.replication.throttled.replicas", "0:1,*", "excludes others"),
        ("cleanup.policy", "shred", "not a cleanup policy"),
        ("compression.gzip.level", "0", "0 is no level"),
        ("compression.gzip.level", "10", "above the maximum of 9"),
        ("compression.lz4.level", "18", "above the maximum of 17"),
        ("compression.zstd.level", "23", "above the maximum of 22"),
        ("compression.type", "none", "not one of"),
        ("unclean.leader.election.enable", "true", "could be lost"),
        ("message.timestamp.type", "createtime", "not one of CreateTime"),
        ("retention.ms", "-2", "below the minimum of -1"),
        ("retention.ms", str(1 << 63), "above the maximum"),
        ("retention.ms", "9" * 5000, "not a whole number"),
        ("retention.ms", "7d", "not a whole number"),
        ("retention.ms", "1.5", "not a whole number"),
        ("retention.ms", "", "not a whole number"),
        ("retention.ms", "\N{ARABIC-INDIC DIGIT ONE}", "not a whole number"),
        ("retention.ms", None, "value is required"),
        ("segment.bytes", "1", "below the minimum"),
        ("min.insync.replicas", "0", "below the minimum of 1"),
        ("flush.messages", "0", "below the minimum"),
        ("message.format.version", "2.8", "not supported: only record batch format 2"),
        ("retention.msec", "1", "did you mean retention.ms?"),
        ("xyzzy", "1", "no such topic setting"),
    ],
)
def test_refused_with_the_reason(name: str, value: str | None, reason: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        topic_config.TOPIC_CONFIG.normalize(name, value)
    assert reason in str(caught.value)
    assert str(caught.value).startswith(name)
    assert "\n" not in str(caught.value)


def test_nothing_is_both_offered_and_not() -> None:
    assert not SETTINGS.keys() & UNSUPPORTED_SETTINGS.keys()


def test_setting_twice_is_refused() -> None:
    with pytest.raises(InvalidRequest):
        topic_config.validated_overrides([("retention.ms", "1"), ("retention.ms", "2")], 1)


def test_null_at_creation_means_the_default() -> None:
    assert topic_config.validated_overrides([("retention.ms", None), ("segment.ms", " 5 ")], 1) == {
        "segment.ms": "5"
    }


def test_more_in_sync_replicas_than_replicas_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="replication factor, 1"):
        topic_config.validated_overrides([("min.insync.replicas", "2")], 1)
    assert topic_config.validated_overrides([("min.insync.replicas", "2")], 3) == {"min.insync.replicas": "2"}


@pytest.mark.parametrize(("replicas", "expected"), [(1, 1), (2, 2), (3, 2), (4, 3), (5, 3)])
def test_min_insync_replicas_defaults_to_a_majority(replicas: int, expected: int) -> None:
    assert topic_config.resolve_topic_settings({}, {}, replicas).min_insync_replicas == expected


def test_broker_wide_min_insync_replicas_never_locks_a_small_topic() -> None:
    defaults = {"min.insync.replicas": "2"}
    assert topic_config.resolve_topic_settings({}, defaults, 1).min_insync_replicas == 1
    assert topic_config.resolve_topic_settings({}, defaults, 3).min_insync_replicas == 2


def test_topic_wins_over_broker_default_wins_over_built_in() -> None:
    assert topic_config.resolve_topic_settings({}, {}, 1).retention_ms == 604_800_000
    assert topic_config.resolve_topic_settings({}, {"retention.ms": "5"}, 1).retention_ms == 5
    assert (
        topic_config.resolve_topic_settings({"retention.ms": "6"}, {"retention.ms": "5"}, 1).retention_ms == 6
    )


def test_leftover_of_another_version_does_not_keep_a_topic_from_opening() -> None:
    settings = topic_config.resolve_topic_settings({"cleanup.policy": "shred", "gone.setting": "1"}, {}, 1)
    assert settings.cleanup_policy == ("delete",)
    assert topic_config.apply_changes({"gone.setting": "1"}, {}, [Change("gone.setting", 1, None)]) == {}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ([Change("retention.ms", Operation.SET, "7")], {"retention.ms": "7", "segment.ms": "9"}),
        ([Change("segment.ms", Operation.DELETE, None)], {}),
        ([Change("retention.ms", Operation.DELETE, None)], {"segment.ms": "9"}),
        ([Change("no.such.setting", Operation.DELETE, None)], {"segment.ms": "9"}),
        (
            [Change("cleanup.policy", Operation.SUBTRACT, "delete")],
            {"segment.ms": "9", "cleanup.policy": ""},
        ),
        (
            [Change("cleanup.policy", Operation.APPEND, "delete")],
            {"segment.ms": "9", "cleanup.policy": "delete"},
        ),
        (
            [Change("cleanup.policy", Operation.APPEND, "compact")],
            {"segment.ms": "9", "cleanup.policy": "delete,compact"},
        ),
    ],
)
def test_incremental_changes_leave_the_rest_alone(changes: list[Change], expected: dict[str, str]) -> None:
    before = {"segment.ms": "9"}
    assert topic_config.apply_changes(before, {}, changes) == expected
    assert before == {"segment.ms": "9"}


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (Change("retention.ms", Operation.SET, None), InvalidRequest),
        (Change("retention.ms", 4, "1"), InvalidRequest),
        (Change("retention.ms", Operation.APPEND, "1"), InvalidConfig),
        (Change("retention.ms", Operation.SUBTRACT, "1"), InvalidConfig),
        (Change("cleanup.policy", Operation.APPEND, "shred"), InvalidConfig),
        (Change("nope", Operation.SET, "1"), InvalidConfig),
    ],
)
def test_incremental_changes_refused(change: Change, error: type[Exception]) -> None:
    with pytest.raises(error):
        topic_config.apply_changes({}, {}, [change])


def test_changing_a_setting_twice_in_a_request_is_refused() -> None:
    change = Change("retention.ms", Operation.SET, "1")
    with pytest.raises(InvalidRequest, match="twice"):
        topic_config.apply_changes({}, {}, [change, change])


@pytest.mark.parametrize(
    ("text", "deletes", "compacts"),
    [
        ("delete", True, False),
        ("compact", False, True),
        ("", False, False),
        (" compact , delete ", True, True),
        ("delete,compact", True, True),
    ],
)
def test_cleanup_policy_deletes_compacts_or_both(text: str, *, deletes: bool, compacts: bool) -> None:
    settings = topic_config.resolve_topic_settings(
        {"cleanup.policy": topic_config.TOPIC_CONFIG.normalize("cleanup.policy", text)}, {}, 1
    )
    assert (settings.deletes, settings.compacts) == (deletes, compacts)


def test_compaction_settings_are_numbers_when_in_force() -> None:
    settings = topic_config.resolve_topic_settings(
        {"min.cleanable.dirty.ratio": "0.25", "min.compaction.lag.ms": "3", "max.compaction.lag.ms": "4"},
        {},
        1,
    )
    assert (
        settings.min_cleanable_dirty_ratio,
        settings.min_compaction_lag_ms,
        settings.max_compaction_lag_ms,
        settings.delete_retention_ms,
    ) == (0.25, 3, 4, 86_400_000)


def test_a_compaction_lag_that_contradicts_itself_is_refused_wherever_the_halves_come_from() -> None:
    least, most = ("min.compaction.lag.ms", "5"), ("max.compaction.lag.ms", "4")
    with pytest.raises(InvalidConfig, match="5 is more than max"):
        topic_config.validated_overrides([least, most], 1)
    with pytest.raises(InvalidConfig, match="5 is more than max"):
        topic_config.validated_overrides([least], 1, dict([most]))
    with pytest.raises(InvalidConfig, match="5 is more than max"):
        topic_config.check_combination(dict([most]), 1, dict([least]))
    with pytest.raises(ConfigError, match="topic_defaults: min"):
        Settings(topic_defaults=dict([least, most]))
    assert topic_config.validated_overrides([least, ("max.compaction.lag.ms", "5")], 1, dict([most]))


@given(st.sampled_from(sorted(SETTINGS)), st.text(max_size=30))
def test_any_text_is_taken_or_refused_and_taken_text_is_stable(name: str, text: str) -> None:
    try:
        normal = topic_config.TOPIC_CONFIG.normalize(name, text)
    except InvalidConfig:
        return
    assert topic_config.TOPIC_CONFIG.normalize(name, normal) == normal


def test_entries_of_a_topic_show_where_values_come_from() -> None:
    entries = {
        entry.name: entry
        for entry in topic_entries(
            {"retention.ms": "6"},
            BrokerConfigSources(Settings(topic_defaults={"retention.ms": "5", "segment.ms": "4"})),
            1,
        )
    }
    retention = entries["retention.ms"]
    assert (retention.value, retention.source) == ("6", Source.TOPIC)
    assert retention.synonyms == (
        ("retention.ms", "6", Source.TOPIC),
        ("log.retention.ms", "5", Source.STATIC_BROKER),
        ("log.retention.ms", "604800000", Source.DEFAULT),
    )
    assert (entries["segment.ms"].value, entries["segment.ms"].source) == ("4", Source.STATIC_BROKER)
    assert (entries["segment.bytes"].value, entries["segment.bytes"].source) == ("1073741824", Source.DEFAULT)
    assert retention.documentation.startswith("Age in ms after which records are deleted")
    assert not retention.read_only


def test_entries_of_the_broker_use_kafka_names_once_each() -> None:
    settings = Settings(num_partitions=3, listeners="127.0.0.1:19092", topic_defaults={"retention.ms": "5"})
    entries = broker_entries(BrokerConfigSources(settings))
    names = [entry.name for entry in entries]
    assert len(names) == len(set(names))
    by_name = {entry.name: entry for entry in entries}
    assert (by_name["num.partitions"].value, by_name["num.partitions"].source) == ("3", Source.STATIC_BROKER)
    assert by_name["listeners"].value == "PLAINTEXT://127.0.0.1:19092"
    assert by_name["auto.create.topics.enable"].value == "false"
    assert by_name["auto.create.topics.enable"].source == Source.DEFAULT
    assert by_name["message.max.bytes"].value == "1048588"
    assert by_name["offsets.retention.minutes"].value == str(7 * 24 * 60), "in Kafka's unit, as its name says"
    assert by_name["log.retention.ms"].source == Source.STATIC_BROKER
    assert by_name["mansio.fetch_wait_ms_max"].read_only
