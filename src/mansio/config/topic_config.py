"""Settings of topics: Kafka's names, types, defaults and rules; effective values (`TopicSettings`)."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from mansio.config.config_def import (
    INT32_MAX,
    INT64_MAX,
    Change,
    ConfigDef,
    ConfigKey,
    ConfigType,
    choice_parser,
    decimal_parser,
    integer_parser,
)
from mansio.errors import InvalidConfig, InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

DELETE: Final = "delete"
COMPACT: Final = "compact"
DELAY_ENABLE: Final = "mansio.delay.enable"
DEDUP_MS: Final = "mansio.dedup.ms"
DEDUP_MS_MAX: Final = 7 * 24 * 3600 * 1000
"""Longest deduplication window, in ms."""
PRIORITY_ENABLE: Final = "mansio.priority.enable"
TRACE_ENABLE: Final = "mansio.trace.enable"
HOT_KEYS_ENABLE: Final = "mansio.hot.keys.enable"
KEY_SCHEMA_VALIDATION: Final = "mansio.key.schema.validation"
VALUE_SCHEMA_VALIDATION: Final = "mansio.value.schema.validation"
KEY_SUBJECT_STRATEGY: Final = "mansio.key.subject.name.strategy"
VALUE_SUBJECT_STRATEGY: Final = "mansio.value.subject.name.strategy"
SUBJECT_BY_TOPIC: Final = "topic"
SUBJECT_BY_RECORD: Final = "record"
SUBJECT_BY_TOPIC_AND_RECORD: Final = "topic-record"
QUEUE_ATTRIBUTES: Final = "mansio.queue.attributes"
QUEUE_ATTRIBUTES_BYTES_MAX: Final = 65_536
DEAD_LETTER_TOPIC_ENABLE: Final = "errors.deadletterqueue.group.enable"


def _cleanup_policy(text: str) -> tuple[str, ...]:
    """Parse a cleanup policy: delete, compact, both or none; without duplicates, in the order of the text."""
    policies = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    for policy in policies:
        if policy not in (COMPACT, DELETE):
            raise ValueError(f"{policy!r} is not a cleanup policy: delete, compact or compact,delete")
    return policies


def _replica_list(text: str) -> tuple[str, ...]:
    """Parse a list of replicas: `*` for all, or PARTITION:BROKER separated by commas."""
    items = tuple(part.strip() for part in text.split(",") if part.strip())
    for item in items:
        if item != "*" and not re.fullmatch(r"\d{1,10}:\d{1,10}", item, re.ASCII):
            raise ValueError(f"{item!r} is not PARTITION:BROKER or *")
    if "*" in items and len(items) > 1:
        raise ValueError("* stands for all replicas and excludes others")
    return items


PRODUCER: Final = "producer"
_GZIP_DEFAULT_LEVEL: Final = -1
_LZ4_DEFAULT_LEVEL: Final = 9
_ZSTD_LEVEL_MIN: Final = -131_072


def _queue_attributes(text: str) -> str:
    if text and (len(text.encode()) > QUEUE_ATTRIBUTES_BYTES_MAX or not isinstance(json.loads(text), dict)):
        raise ValueError(f"not a JSON object of at most {QUEUE_ATTRIBUTES_BYTES_MAX} bytes")
    return text


def _gzip_level(text: str) -> int:
    level = integer_parser(_GZIP_DEFAULT_LEVEL, 9)(text)
    if level == 0:
        raise ValueError("0 is no level: 1 to 9, or -1 for the default")
    return level


_ALWAYS_FLUSHED: Final = (
    "acks=all is flushed before the response; log_flush_interval_ms applies to other records"
)
_ONE_THROTTLE: Final = "a broker has one throttle: replica_throttle_bytes_per_second"
_NOT_TIERED: Final = "there is no tiered storage"

_KEYS: Final = (
    ConfigKey(
        "cleanup.policy", ConfigType.LIST, "delete", "log.cleanup.policy",
        "Cleanup of old records. delete: whole segments are deleted by time and size. compact: the latest record"
        " of each key is kept. compact,delete: both. Empty: records are kept until they are deleted on request.",
        _cleanup_policy,
    ),
    ConfigKey(
        "compression.gzip.level", ConfigType.INT, str(_GZIP_DEFAULT_LEVEL), "compression.gzip.level",
        "Level for compression.type=gzip, 1 to 9. -1: the codec's default.",
        _gzip_level,
    ),
    ConfigKey(
        "compression.lz4.level", ConfigType.INT, str(_LZ4_DEFAULT_LEVEL), "compression.lz4.level",
        "Level for compression.type=lz4, 1 to 17; 12 and higher are the same. As in Kafka 9 is the fast compressor.",
        integer_parser(1, 17),
    ),
    ConfigKey(
        "compression.type", ConfigType.STRING, PRODUCER, "compression.type",
        "Codec of stored batches: producer (as sent), uncompressed, gzip, snappy, lz4 or zstd. With another codec than"
        " producer the leader recompresses batches that were sent with a different one, on append.",
        choice_parser(PRODUCER, "uncompressed", "gzip", "snappy", "lz4", "zstd"),
    ),
    ConfigKey(
        "compression.zstd.level", ConfigType.INT, "3", "compression.zstd.level",
        "Level for compression.type=zstd, -131072 to 22; 19 and higher are the same.",
        integer_parser(_ZSTD_LEVEL_MIN, 22),
    ),
    ConfigKey(
        "delete.retention.ms", ConfigType.LONG, "86400000", "log.cleaner.delete.retention.ms",
        "Time in ms for which compaction keeps a tombstone (a record without value), so that readers receive it.",
        integer_parser(0, INT64_MAX),
    ),
    ConfigKey(
        DEAD_LETTER_TOPIC_ENABLE, ConfigType.BOOLEAN, "false", DEAD_LETTER_TOPIC_ENABLE,
        "Whether share groups may write dead-lettered records to this topic (KIP-1191). Its own records are not"
        " dead-lettered: if rejected or delivered too often, they are only marked as done.",
        choice_parser("true", "false"),
    ),
    ConfigKey(
        "file.delete.delay.ms", ConfigType.LONG, "60000", "log.segment.delete.delay.ms",
        "Time in ms between the deletion of a segment and the removal of its files.",
        integer_parser(0, INT64_MAX), no_effect="files are deleted at once; reads in progress finish",
    ),
    ConfigKey(
        "flush.messages", ConfigType.LONG, str(INT64_MAX), "log.flush.interval.messages",
        "Number of records after which the log is flushed.",
        integer_parser(1, INT64_MAX), no_effect=_ALWAYS_FLUSHED,
    ),
    ConfigKey(
        "flush.ms", ConfigType.LONG, str(INT64_MAX), "log.flush.scheduler.interval.ms",
        "Time in ms after which the log is flushed.",
        integer_parser(0, INT64_MAX), no_effect=_ALWAYS_FLUSHED,
    ),
    ConfigKey(
        "follower.replication.throttled.replicas", ConfigType.LIST, "", "",
        "Replicas whose copying is throttled on the follower: PARTITION:BROKER with commas, or * for all.",
        _replica_list, no_effect=_ONE_THROTTLE,
    ),
    ConfigKey(
        "index.interval.bytes", ConfigType.INT, "4096", "log.index.interval.bytes",
        "Bytes of log between two entries of the offset index.",
        integer_parser(0, INT32_MAX),
    ),
    ConfigKey(
        "leader.replication.throttled.replicas", ConfigType.LIST, "", "",
        "Replicas whose copying is throttled on the leader: PARTITION:BROKER with commas, or * for all.",
        _replica_list, no_effect=_ONE_THROTTLE,
    ),
    ConfigKey(
        "local.retention.bytes", ConfigType.LONG, "-2", "log.local.retention.bytes",
        "Size in bytes of a partition that is kept on local disks. -2: retention.bytes.",
        integer_parser(-2, INT64_MAX), no_effect=_NOT_TIERED,
    ),
    ConfigKey(
        "local.retention.ms", ConfigType.LONG, "-2", "log.local.retention.ms",
        "Time in ms for which records are kept on local disks. -2: retention.ms.",
        integer_parser(-2, INT64_MAX), no_effect=_NOT_TIERED,
    ),
    ConfigKey(
        "mansio.dedup.ids.max", ConfigType.INT, "1000000", "mansio.dedup.ids.max",
        "Maximum number of ids of a partition that are remembered; a producer that would exceed it gets a retriable"
        " error.",
        integer_parser(1, INT32_MAX),
    ),
    ConfigKey(
        DEDUP_MS, ConfigType.LONG, "0", DEDUP_MS,
        "Deduplication window of each partition in ms: a record is not stored again if one with the same id, in the"
        " header mansio-dedup-id, was accepted in this time before. Not with compaction. 0: none.",
        integer_parser(0, DEDUP_MS_MAX),
    ),
    ConfigKey(
        DELAY_ENABLE, ConfigType.BOOLEAN, "false", DELAY_ENABLE,
        "Whether records with the header mansio-deliver-at-ms or mansio-delay-ms are delivered when they are due. Not"
        " with compaction. After it was turned off, records that were accepted before are still delivered.",
        choice_parser("true", "false"),
    ),
    ConfigKey(
        "mansio.delay.pending.bytes.max", ConfigType.LONG, str(10 << 30), "mansio.delay.pending.bytes.max",
        "Maximum size in bytes of the records of a partition that are not due yet; a producer that would exceed it gets"
        " a retriable error.",
        integer_parser(0, INT64_MAX),
    ),
    ConfigKey(
        "mansio.delay.pending.records.max", ConfigType.LONG, "10000000", "mansio.delay.pending.records.max",
        "Maximum number of records of a partition that are not due yet; a producer that would exceed it gets a"
        " retriable error.",
        integer_parser(0, INT32_MAX),
    ),
    ConfigKey(
        "mansio.hold.bytes.max", ConfigType.LONG, str(10 << 30), "mansio.hold.bytes.max",
        "Maximum size in bytes of the newest segments of a partition that retention holds of pipelines protect from"
        " deletion and compaction. -1: no limit.",
        integer_parser(-1, INT64_MAX),
    ),
    ConfigKey(
        KEY_SCHEMA_VALIDATION, ConfigType.BOOLEAN, "false", "",
        "Whether every key that is published must begin with the id of a schema, or have it in the header"
        " __key_schema_id, and whether the schema registry must have this schema under a subject that"
        " mansio.key.subject.name.strategy allows. Not for a topic of dead letters.",
        choice_parser("true", "false"),
    ),
    ConfigKey(
        KEY_SUBJECT_STRATEGY, ConfigType.STRING, SUBJECT_BY_TOPIC, "",
        "Subject that must have the schemas of keys. topic: TOPIC-key. record: the full name of the record that the"
        " schema describes. topic-record: TOPIC-NAME with this name.",
        choice_parser(SUBJECT_BY_TOPIC, SUBJECT_BY_RECORD, SUBJECT_BY_TOPIC_AND_RECORD),
    ),
    ConfigKey(
        VALUE_SCHEMA_VALIDATION, ConfigType.BOOLEAN, "false", "",
        "Whether every value that is published must begin with the id of a schema, or have it in the header"
        " __value_schema_id, and whether the schema registry must have this schema under a subject that"
        " mansio.value.subject.name.strategy allows. Records without value pass. Not for a topic of dead letters.",
        choice_parser("true", "false"),
    ),
    ConfigKey(
        VALUE_SUBJECT_STRATEGY, ConfigType.STRING, SUBJECT_BY_TOPIC, "",
        "Subject that must have the schemas of values. topic: TOPIC-value. record: the full name of the record that the"
        " schema describes. topic-record: TOPIC-NAME with this name.",
        choice_parser(SUBJECT_BY_TOPIC, SUBJECT_BY_RECORD, SUBJECT_BY_TOPIC_AND_RECORD),
    ),
    ConfigKey(
        PRIORITY_ENABLE, ConfigType.BOOLEAN, "false", "",
        "Whether share groups receive records with the header mansio-priority by their priority: high, normal or low;"
        " records without it, and those that were published before, have normal priority. Cannot be turned off.",
        choice_parser("true", "false"),
    ),
    ConfigKey(
        "mansio.hold.enable", ConfigType.BOOLEAN, "true", "mansio.hold.enable",
        "Whether records that a named pipeline has not read yet are protected from deletion and compaction.",
        choice_parser("true", "false"),
    ),
    ConfigKey(
        "mansio.hold.ms.max", ConfigType.LONG, str(7 * 24 * 3600 * 1000), "mansio.hold.ms.max",
        "A pipeline that has not committed for this time in ms protects only records that are younger."
        " -1: no limit.",
        integer_parser(-1, INT64_MAX),
    ),
    ConfigKey(
        TRACE_ENABLE, ConfigType.BOOLEAN, "true", TRACE_ENABLE,
        "Whether the brokers write down what happens to the records of the topic: publications, deliveries, the ends of"
        " leases, committed positions.",
        choice_parser("true", "false"),
    ),
    ConfigKey(
        HOT_KEYS_ENABLE, ConfigType.BOOLEAN, "true", HOT_KEYS_ENABLE,
        "Whether keys of the records of hot partitions are sampled, so that clients which may read the topic can ask"
        " for the most frequent ones.",
        choice_parser("true", "false"),
    ),
    ConfigKey(
        QUEUE_ATTRIBUTES, ConfigType.STRING, "", "",
        "Attributes and tags of the SQS queue that this topic is, as JSON. Empty: it is no queue.",
        _queue_attributes,
    ),
    ConfigKey(
        "max.compaction.lag.ms", ConfigType.LONG, str(INT64_MAX), "log.cleaner.max.compaction.lag.ms",
        "Age in ms at which a record is compacted even if little else is to be cleaned.",
        integer_parser(1, INT64_MAX),
    ),
    ConfigKey(
        "max.message.bytes", ConfigType.INT, "1048588", "message.max.bytes",
        "Largest record batch accepted in bytes, as sent (after compression) and as stored.",
        integer_parser(0, INT32_MAX),
    ),
    ConfigKey(
        "message.timestamp.after.max.ms", ConfigType.LONG, "3600000", "log.message.timestamp.after.max.ms",
        "How far in the future a record's create time may be before the batch is rejected.",
        integer_parser(0, INT64_MAX),
    ),
    ConfigKey(
        "message.timestamp.before.max.ms", ConfigType.LONG, str(INT64_MAX), "log.message.timestamp.before.max.ms",
        "How far in the past a record's create time may be before the batch is rejected.",
        integer_parser(0, INT64_MAX),
    ),
    ConfigKey(
        "message.timestamp.type", ConfigType.STRING, "CreateTime", "log.message.timestamp.type",
        "Source of record timestamps: the producer (CreateTime) or the broker on append (LogAppendTime).",
        choice_parser("CreateTime", "LogAppendTime"),
    ),
    ConfigKey(
        "min.cleanable.dirty.ratio", ConfigType.DOUBLE, "0.5", "log.cleaner.min.cleanable.ratio",
        "Part of the log (0 to 1) that must be new since the last compaction before the next one.",
        decimal_parser(0, 1),
    ),
    ConfigKey(
        "min.compaction.lag.ms", ConfigType.LONG, "0", "log.cleaner.min.compaction.lag.ms",
        "Age in ms before which a record is not compacted away.",
        integer_parser(0, INT64_MAX),
    ),
    ConfigKey(
        "min.insync.replicas", ConfigType.INT, "", "min.insync.replicas",
        "In-sync replicas that must have flushed a batch before acks=all is acknowledged. Default: a majority.",
        integer_parser(1, INT32_MAX),
    ),
    ConfigKey(
        "preallocate", ConfigType.BOOLEAN, "false", "log.preallocate",
        "Whether the file of a new segment is created with its full size.",
        choice_parser("true", "false", ignore_case=True), no_effect="files grow in steps ahead of their batches",
    ),
    ConfigKey(
        "remote.log.copy.disable", ConfigType.BOOLEAN, "false", "",
        "Whether copying to remote storage is stopped.",
        choice_parser("true", "false", ignore_case=True), no_effect=_NOT_TIERED,
    ),
    ConfigKey(
        "remote.log.delete.on.disable", ConfigType.BOOLEAN, "false", "",
        "Whether remote data is deleted when remote.storage.enable is set to false.",
        choice_parser("true", "false", ignore_case=True), no_effect=_NOT_TIERED,
    ),
    ConfigKey(
        "remote.storage.enable", ConfigType.BOOLEAN, "false", "",
        "Tiered storage. Only 'false', as in Kafka where the broker has no remote storage.",
        choice_parser("false", refused={"true": f"{_NOT_TIERED}: only 'false'"}, ignore_case=True),
    ),
    ConfigKey(
        "retention.bytes", ConfigType.LONG, "-1", "log.retention.bytes",
        "Size in bytes of a partition at which its oldest segments are deleted. -1: no limit."
        " Whole segments are deleted, so up to one segment.bytes more remains.",
        integer_parser(-1, INT64_MAX),
    ),
    ConfigKey(
        "retention.ms", ConfigType.LONG, "604800000", "log.retention.ms",
        "Age in ms after which records are deleted. -1: never. A segment is deleted when its newest record"
        " has this age.",
        integer_parser(-1, INT64_MAX),
    ),
    ConfigKey(
        "segment.bytes", ConfigType.INT, "1073741824", "log.segment.bytes",
        "Size in bytes at which a new segment is started.",
        integer_parser(1024, INT32_MAX),
    ),
    ConfigKey(
        "segment.index.bytes", ConfigType.INT, "10485760", "log.index.size.max.bytes",
        "Maximum size in bytes of a segment's index.",
        integer_parser(4, INT32_MAX), no_effect="indexes grow with their segment",
    ),
    ConfigKey(
        "segment.jitter.ms", ConfigType.LONG, "0", "log.roll.jitter.ms",
        "Maximum random time in ms by which segment.ms is shortened.",
        integer_parser(0, INT64_MAX), no_effect="segments are started without jitter",
    ),
    ConfigKey(
        "segment.ms", ConfigType.LONG, "604800000", "log.roll.ms",
        "Age in ms at which a new segment is started even if the last one is not full.",
        integer_parser(1, INT64_MAX),
    ),
    ConfigKey(
        "unclean.leader.election.enable", ConfigType.BOOLEAN, "false", "unclean.leader.election.enable",
        "Only 'false': electing a leader that may lack records takes an administrator's explicit command.",
        choice_parser(
            "false", refused={"true": "records could be lost without a decision of an administrator: only 'false'"}
        ),
    ),
)  # fmt: skip
UNSUPPORTED_SETTINGS: Final[dict[str, str]] = {
    "message.downconversion.enable": "only record batch format 2 is served",
    "message.format.version": "only record batch format 2 is stored",
    "message.timestamp.difference.max.ms": "use message.timestamp.before.max.ms and .after.max.ms",
}
"""Settings that Kafka 4 removed."""


TOPIC_CONFIG: Final = ConfigDef("topic", _KEYS, unsupported=UNSUPPORTED_SETTINGS)
SETTINGS: Final = TOPIC_CONFIG.keys
WITHOUT_EFFECT: Final[dict[str, str]] = {key.name: key.no_effect for key in _KEYS if key.no_effect}
"""Names of settings that are stored, so that tools can set them, but have no effect -> reason."""


@dataclass(frozen=True, slots=True)
class TopicSettings:
    """Effective settings of one topic. A limit of -1 means no limit."""

    retention_ms: int
    retention_bytes: int
    segment_bytes: int
    segment_ms: int
    index_interval_bytes: int
    max_message_bytes: int
    timestamp_type: str
    timestamp_before_max_ms: int
    timestamp_after_max_ms: int
    min_insync_replicas: int
    cleanup_policy: tuple[str, ...]
    delete_retention_ms: int
    min_cleanable_dirty_ratio: float
    min_compaction_lag_ms: int
    max_compaction_lag_ms: int
    hold_enabled: bool
    hold_bytes_max: int
    hold_ms_max: int
    is_dead_letter_topic: bool
    accepts_delays: bool
    delayed_bytes_max: int
    delayed_records_max: int
    dedup_ms: int
    dedup_ids_max: int
    has_priorities: bool
    is_traced: bool
    compression_type: str = PRODUCER
    compression_level: int | None = None
    """None: the default of the codec, or the codec has none."""
    hot_keys_enabled: bool = True
    validates_keys: bool = False
    """Whether the schemas of keys are checked at publish."""
    validates_values: bool = False
    """Whether the schemas of values are checked at publish."""
    key_subject_strategy: str = SUBJECT_BY_TOPIC
    value_subject_strategy: str = SUBJECT_BY_TOPIC

    @property
    def deletes(self) -> bool:
        """Whether old segments are deleted by time and size."""
        return DELETE in self.cleanup_policy

    @property
    def compacts(self) -> bool:
        """Whether the topic is compacted: only the latest record of each key is kept, and every record needs a key."""
        return COMPACT in self.cleanup_policy

    @property
    def log_append_time(self) -> bool:
        """Whether the broker's clock sets the timestamps of records."""
        return self.timestamp_type == "LogAppendTime"


def validated_overrides(
    configs: Iterable[tuple[str, str | None]],
    replication_factor: int,
    defaults: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Validate the settings of a new topic and return them as overrides; a setting with value None is left out.

    `defaults`: the broker's topic defaults. Raises `InvalidConfig` for an invalid setting or combination of settings,
    `InvalidRequest` if a name occurs twice.
    """
    result: dict[str, str] = {}
    seen: set[str] = set()
    for name, text in configs:
        if name in seen:
            raise InvalidRequest(f"{name} is set twice")
        seen.add(name)
        TOPIC_CONFIG.key(name)
        if text is not None:
            result[name] = TOPIC_CONFIG.normalize(name, text)
    check_combination(result, replication_factor, defaults)
    return result


def check_combination(
    overrides: Mapping[str, str], replication_factor: int, defaults: Mapping[str, str] | None = None
) -> None:
    """Check min.insync.replicas against the replication factor, the compaction lags against each other, delays and
    deduplication against compaction, and deduplication and the validation of schemas against dead letters. Raises
    `InvalidConfig`."""
    by_name = partial(
        effective_value, overrides=overrides, defaults=defaults or {}, replication_factor=replication_factor
    )
    if by_name(DELAY_ENABLE) == "true" and COMPACT in _cleanup_policy(by_name("cleanup.policy")):
        raise InvalidConfig(
            f"{DELAY_ENABLE}: a topic with cleanup.policy=compact cannot have delayed records, because compaction goes"
            " by the order of the log"
        )
    if by_name(DEDUP_MS) != "0" and by_name(DEAD_LETTER_TOPIC_ENABLE) == "true":
        raise InvalidConfig(
            f"{DEDUP_MS}: a topic for dead letters cannot have a deduplication window: dead letters keep the ids of"
            " their records"
        )
    for name in (KEY_SCHEMA_VALIDATION, VALUE_SCHEMA_VALIDATION):
        if by_name(name) == "true" and by_name(DEAD_LETTER_TOPIC_ENABLE) == "true":
            raise InvalidConfig(
                f"{name}: the schemas of a topic for dead letters cannot be checked: dead letters keep the schema ids"
                " of their records, which may be the reason why these were rejected"
            )
    if by_name(DEDUP_MS) != "0" and COMPACT in _cleanup_policy(by_name("cleanup.policy")):
        raise InvalidConfig(
            f"{DEDUP_MS}: a topic with cleanup.policy=compact cannot have a deduplication window, because compaction"
            " would remove first records that later ones refer to"
        )
    if "min.insync.replicas" in overrides and int(overrides["min.insync.replicas"]) > replication_factor:
        raise InvalidConfig(
            f"min.insync.replicas: {overrides['min.insync.replicas']} is more than the replication factor,"
            f" {replication_factor}: acks=all could never be acknowledged"
        )
    least, most = (int(by_name(name)) for name in ("min.compaction.lag.ms", "max.compaction.lag.ms"))
    if least > most:
        raise InvalidConfig(
            f"min.compaction.lag.ms: {least} is more than max.compaction.lag.ms, {most}: a record cannot be"
            " compacted before and after the same age"
        )


def check_change(before: Mapping[str, str], after: Mapping[str, str]) -> None:
    """Check a change of a topic's overrides. Raises `InvalidConfig` if it turns priorities off: share groups have a
    state of each priority, and what they passed as records of another one would be lost."""
    if before.get(PRIORITY_ENABLE) == "true" and after.get(PRIORITY_ENABLE) != "true":
        raise InvalidConfig(
            f"{PRIORITY_ENABLE}: cannot be turned off; records without the header mansio-priority have normal priority"
        )


def check_schema_registry(before: Mapping[str, str], after: Mapping[str, str], *, is_enabled: bool) -> None:
    """Check a change of a topic's overrides, or those of a new topic. Raises `InvalidConfig` if it turns on the
    validation of schemas, although the cluster has no schema registry to ask."""
    for name in (KEY_SCHEMA_VALIDATION, VALUE_SCHEMA_VALIDATION):
        if not is_enabled and after.get(name) == "true" != before.get(name):
            raise InvalidConfig(
                f"{name}: the brokers have no schema registry, because a client created its topic _schemas"
            )


def apply_changes(
    overrides: Mapping[str, str], defaults: Mapping[str, str], changes: Iterable[Change]
) -> dict[str, str]:
    """Return the overrides of a topic after incremental changes; see `ConfigDef.apply_changes`. `defaults`: the
    broker's topic defaults."""
    return TOPIC_CONFIG.apply_changes(overrides, changes, lambda key: _default_text(key, defaults))


def _default_text(row: ConfigKey, defaults: Mapping[str, str], replication_factor: int = 1) -> str:
    if row.name in defaults:
        return defaults[row.name]
    return row.default if row.name != "min.insync.replicas" else str(replication_factor // 2 + 1)


def effective_value(
    name: str, overrides: Mapping[str, str], defaults: Mapping[str, str], replication_factor: int
) -> str:
    """Return the effective value as text: the topic's override, else the broker's topic default, else the built-in
    default.

    A min.insync.replicas that is not an override is reduced to the number of replicas.
    """
    if name in overrides:
        return overrides[name]
    text = _default_text(SETTINGS[name], defaults, replication_factor)
    return str(min(int(text), replication_factor)) if name == "min.insync.replicas" else text


def resolve_topic_settings(
    overrides: Mapping[str, str], defaults: Mapping[str, str], replication_factor: int
) -> TopicSettings:
    """Return the effective settings of a topic.

    Stored values that this version does not accept, because another version stored them, are replaced by the built-in
    default, so that the topic can be opened.
    """
    value: dict[str, Any] = {}
    for name, row in SETTINGS.items():
        try:
            value[name] = row.parse(effective_value(name, overrides, defaults, replication_factor))
        except ValueError:
            value[name] = row.parse(_default_text(row, {}, replication_factor))
    return TopicSettings(
        retention_ms=value["retention.ms"],
        retention_bytes=value["retention.bytes"],
        segment_bytes=value["segment.bytes"],
        segment_ms=value["segment.ms"],
        index_interval_bytes=value["index.interval.bytes"],
        max_message_bytes=value["max.message.bytes"],
        timestamp_type=value["message.timestamp.type"],
        timestamp_before_max_ms=value["message.timestamp.before.max.ms"],
        timestamp_after_max_ms=value["message.timestamp.after.max.ms"],
        min_insync_replicas=value["min.insync.replicas"],
        cleanup_policy=value["cleanup.policy"],
        delete_retention_ms=value["delete.retention.ms"],
        min_cleanable_dirty_ratio=value["min.cleanable.dirty.ratio"],
        min_compaction_lag_ms=value["min.compaction.lag.ms"],
        max_compaction_lag_ms=value["max.compaction.lag.ms"],
        hold_enabled=value["mansio.hold.enable"] == "true",
        hold_bytes_max=value["mansio.hold.bytes.max"],
        hold_ms_max=value["mansio.hold.ms.max"],
        is_dead_letter_topic=value[DEAD_LETTER_TOPIC_ENABLE] == "true",
        accepts_delays=value[DELAY_ENABLE] == "true",
        delayed_bytes_max=value["mansio.delay.pending.bytes.max"],
        delayed_records_max=value["mansio.delay.pending.records.max"],
        dedup_ms=value[DEDUP_MS],
        dedup_ids_max=value["mansio.dedup.ids.max"],
        has_priorities=value[PRIORITY_ENABLE] == "true",
        is_traced=value[TRACE_ENABLE] == "true",
        compression_type=value["compression.type"],
        compression_level=_compression_level(value["compression.type"], value),
        hot_keys_enabled=value[HOT_KEYS_ENABLE] == "true",
        validates_keys=value[KEY_SCHEMA_VALIDATION] == "true",
        validates_values=value[VALUE_SCHEMA_VALIDATION] == "true",
        key_subject_strategy=value[KEY_SUBJECT_STRATEGY],
        value_subject_strategy=value[VALUE_SUBJECT_STRATEGY],
    )


def _compression_level(codec: str, value: Mapping[str, Any]) -> int | None:
    """Return the level of the topic's codec; None for its default (of lz4, that is the fast compressor)."""
    level: int | None = value.get(f"compression.{codec}.level")
    is_default = (codec, level) in (("gzip", _GZIP_DEFAULT_LEVEL), ("lz4", _LZ4_DEFAULT_LEVEL))
    return None if is_default else level
