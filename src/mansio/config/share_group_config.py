"""Settings of single share groups: definitions (part of `group_config`) and effective values.

Source: KIP-932, KIP-1240 (limits and renewals by group), KIP-1191 (dead letters). Names with the prefix `mansio.` are
Mansio's own. Lock durations and session timeouts may be shorter than in Kafka.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from mansio.config.config_def import ConfigKey, ConfigType, choice_parser, decimal_parser, integer_parser
from mansio.errors import InvalidConfig

if TYPE_CHECKING:
    from collections.abc import Mapping

SHARE_SESSION_TIMEOUT: Final = "share.session.timeout.ms"
SHARE_HEARTBEAT_INTERVAL: Final = "share.heartbeat.interval.ms"
RECORD_LOCK_DURATION: Final = "share.record.lock.duration.ms"
DELIVERY_COUNT_LIMIT: Final = "share.delivery.count.limit"
DELIVERY_COUNT_MAX: Final = 32_767
"""Largest delivery count that Kafka's protocol can express. Kafka itself accepts limits from 2 to 10."""

RECORD_LOCKS_MAX: Final = "share.partition.max.record.locks"
AUTO_OFFSET_RESET: Final = "share.auto.offset.reset"
ISOLATION_LEVEL: Final = "share.isolation.level"
RENEW_ACKNOWLEDGE_ENABLE: Final = "share.renew.acknowledge.enable"
RANGE_LOCKS_MAX: Final = "mansio.share.range.locks.max"
SHARE_ORDER: Final = "mansio.share.order"
KEY_HEADER: Final = "mansio.share.key.header"
SHARE_FAIR: Final = "mansio.share.fair"
KEY_LEASES_MAX: Final = "mansio.share.key.leases.max"
KEY_RATE: Final = "mansio.share.key.rate"
KEY_BURST: Final = "mansio.share.key.rate.burst"
KEY_HEADER_BYTES_MAX: Final = 128
"""Maximum length of the name of a header with the group key, in bytes of UTF-8."""

KEY_RATE_MIN: Final = 0.001
"""Lowest rate that is not 0, in deliveries of a group key per second."""

DEAD_LETTERS_ENABLE: Final = "mansio.deadletterqueue.enable"
DEAD_LETTER_TOPIC: Final = "errors.deadletterqueue.topic.name"
DEAD_LETTER_OWNER: Final = "mansio.deadletterqueue.owner"
"""Name under which is stored, with the settings of a group, who has set `DEAD_LETTER_TOPIC`. It is no setting: clients
neither see nor set it."""

DEAD_LETTER_COPY_ENABLE: Final = "errors.deadletterqueue.copy.record.enable"
RETRY_BACKOFF: Final = "mansio.retry.backoff.ms"
RETRY_BACKOFF_MULTIPLIER: Final = "mansio.retry.backoff.multiplier"
RETRY_BACKOFF_MAX: Final = "mansio.retry.backoff.max.ms"
RETRY_JITTER: Final = "mansio.retry.jitter"


EARLIEST, LATEST, BY_DURATION = "earliest", "latest", "by_duration:"
_DAY_MS: Final = 24 * 3600 * 1000
_DURATION: Final = re.compile(
    r"p(?:(\d{1,5})d)?(?:t(?=\d)(?:(\d{1,7})h)?(?:(\d{1,8})m)?(?:(\d{1,10})(?:\.\d{1,9})?s)?)?", re.ASCII
)


def duration_ms(text: str) -> int:
    """Parse an ISO 8601 duration of days, hours, minutes and seconds, and return it in ms. Raises `ValueError`."""
    found = _DURATION.fullmatch(text.strip().lower())
    if found is None or not any(found.groups()):
        raise ValueError(f"{text!r} is not a duration such as P1D or PT30M")
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return (((days * 24 + hours) * 60 + minutes) * 60 + seconds) * 1000


def _offset_reset(text: str) -> str:
    value = text.strip().lower()
    if value.startswith(BY_DURATION):
        duration_ms(value.removeprefix(BY_DURATION))
    elif value not in (EARLIEST, LATEST):
        raise ValueError(f"{text!r} is not earliest, latest or by_duration:<duration>")
    return value


def _topic_name(text: str) -> str:
    name = text.strip()
    if name and (name.startswith("__") or not re.fullmatch(r"[A-Za-z0-9._-]{1,249}", name, re.ASCII)):
        raise ValueError(f"{text!r} cannot be the name of a dead-letter topic")
    return name


_decimal_key_rate: Final = decimal_parser(0.0, 1_000_000.0)


def _key_rate(text: str) -> float:
    """Parse deliveries per second; 0 for no limit. It has a lower bound, so that no key waits longer than 1,000 s."""
    rate = _decimal_key_rate(text)
    if 0 < rate < KEY_RATE_MIN:
        raise ValueError(f"{rate} is below the minimum of {KEY_RATE_MIN}")
    return rate


def _header_name(text: str) -> str:
    name = text.strip()
    if len(name.encode()) > KEY_HEADER_BYTES_MAX or not name.isprintable():
        raise ValueError(
            f"{text[:200]!r} is not the name of a header with at most {KEY_HEADER_BYTES_MAX} bytes"
        )
    return name


def _share_key(
    name: str, kind: ConfigType, default: str, meaning: str, parse: Any, broker_name: str = ""
) -> ConfigKey:
    setting = broker_name.replace(".", "_")
    return ConfigKey(name, kind, default, broker_name, meaning, parse, broker_setting=setting)


SHARE_CONFIG_KEYS: Final = (
    ConfigKey(
        SHARE_SESSION_TIMEOUT,
        ConfigType.INT,
        "45000",
        "group.share.session.timeout.ms",
        "Time without a heartbeat in ms after which a member of a share group is removed.",
        integer_parser(6_000, 60_000),
        broker_setting="group_share_session_timeout_ms",
    ),
    ConfigKey(
        SHARE_HEARTBEAT_INTERVAL,
        ConfigType.INT,
        "5000",
        "group.share.heartbeat.interval.ms",
        "Interval of the heartbeats of members of a share group in ms.",
        integer_parser(100, 15_000),
        broker_setting="group_share_heartbeat_interval_ms",
    ),
    _share_key(
        RECORD_LOCK_DURATION,
        ConfigType.INT,
        "30000",
        "Duration in ms of the acquisition lock of a record; then it is available to other members.",
        integer_parser(1_000, 60_000),
        "group.share.record.lock.duration.ms",
    ),
    _share_key(
        DELIVERY_COUNT_LIMIT,
        ConfigType.INT,
        "5",
        "Maximum number of deliveries of a record before it is dead-lettered.",
        integer_parser(1, DELIVERY_COUNT_MAX),
        "group.share.delivery.count.limit",
    ),
    _share_key(
        RECORD_LOCKS_MAX,
        ConfigType.INT,
        "2000",
        "Maximum number of acquired records of one partition.",
        integer_parser(100, 4_000),
        "group.share.partition.max.record.locks",
    ),
    _share_key(
        RANGE_LOCKS_MAX,
        ConfigType.INT,
        "200000",
        "Maximum number of records of one partition in range leases, which Spark queries take. They do not count as "
        "acquired records.",
        integer_parser(1_000, 10_000_000),
    ),
    _share_key(
        AUTO_OFFSET_RESET,
        ConfigType.STRING,
        LATEST,
        "Start position of a share group in a new partition: earliest, latest, or by_duration:<ISO 8601 duration>.",
        _offset_reset,
    ),
    _share_key(
        ISOLATION_LEVEL,
        ConfigType.STRING,
        "read_uncommitted",
        "Isolation level: with read_committed, records of open and aborted transactions are not delivered.",
        choice_parser("read_uncommitted", "read_committed", ignore_case=True),
    ),
    _share_key(
        RENEW_ACKNOWLEDGE_ENABLE,
        ConfigType.BOOLEAN,
        "true",
        "Whether members of a share group may renew acquisition locks (KIP-1222).",
        choice_parser("true", "false", ignore_case=True),
    ),
    _share_key(
        SHARE_ORDER,
        ConfigType.STRING,
        "none",
        "key: no record is delivered while an earlier one of its key is leased, in a backoff or being dead-lettered. "
        "partition: no record is delivered while a lower one is unacknowledged, unless to the same member.",
        choice_parser("none", "key", "partition", ignore_case=True),
    ),
    _share_key(
        KEY_HEADER,
        ConfigType.STRING,
        "",
        "Name of the header with the group key of a record, for order, limits and fairness by key; empty: the record's "
        "key. A record without it has no group key, no order and no limit, and never waits as one with a backlog.",
        _header_name,
    ),
    _share_key(
        SHARE_FAIR,
        ConfigType.BOOLEAN,
        "false",
        "Whether records of a group key with a backlog wait without delaying those of others. Without effect on groups "
        "with an order and on topics with priorities.",
        choice_parser("true", "false", ignore_case=True),
    ),
    _share_key(
        KEY_LEASES_MAX,
        ConfigType.INT,
        "0",
        "Maximum number of records of one group key that are leased at once in a partition; 0: no limit.",
        integer_parser(0, 4_000),
    ),
    _share_key(
        KEY_RATE,
        ConfigType.DOUBLE,
        "0",
        "Maximum number of deliveries of one group key that start per second in a partition, redeliveries included; "
        "at least 0.001; 0: no limit.",
        _key_rate,
    ),
    _share_key(
        KEY_BURST,
        ConfigType.INT,
        "1",
        "Number of deliveries of one group key that may start at once after a pause, if it has a rate.",
        integer_parser(1, 1_000_000),
    ),
    _share_key(
        DEAD_LETTERS_ENABLE,
        ConfigType.BOOLEAN,
        "true",
        "Whether records that a share group rejects, or that exceed the delivery limit, go to a dead-letter topic.",
        choice_parser("true", "false", ignore_case=True),
    ),
    _share_key(
        DEAD_LETTER_TOPIC,
        ConfigType.STRING,
        "",
        "The dead-letter topic of a share group; empty: one for each topic, with the broker's prefix.",
        _topic_name,
    ),
    _share_key(
        DEAD_LETTER_COPY_ENABLE,
        ConfigType.BOOLEAN,
        "true",
        "Whether a dead-lettered record contains key, value and headers of the original record (KIP-1191).",
        choice_parser("true", "false", ignore_case=True),
    ),
    _share_key(
        RETRY_BACKOFF,
        ConfigType.INT,
        "1000",
        "Backoff in ms before the second delivery of a record; 0: none.",
        integer_parser(0, _DAY_MS),
    ),
    _share_key(
        RETRY_BACKOFF_MULTIPLIER,
        ConfigType.DOUBLE,
        "2.0",
        "Factor by which the backoff grows with each delivery.",
        decimal_parser(1.0, 100.0),
    ),
    _share_key(
        RETRY_BACKOFF_MAX, ConfigType.INT, "60000", "Maximum backoff in ms.", integer_parser(0, 7 * _DAY_MS)
    ),
    _share_key(
        RETRY_JITTER,
        ConfigType.DOUBLE,
        "0.1",
        "Maximum random deviation of a backoff, as a fraction of it.",
        decimal_parser(0.0, 1.0),
    ),
)
SHARE_CONFIG_KEYS_BY_NAME: Final = {row.name: row for row in SHARE_CONFIG_KEYS}


def check_key_limits(configs: Mapping[str, str]) -> None:
    """Check that a group with limits by key has no order by partition, which would have to stop at a key at its limit.
    Raises `InvalidConfig`."""
    if effective_value(SHARE_ORDER, configs) != "partition":
        return
    for name in (KEY_LEASES_MAX, KEY_RATE):
        if effective_value(name, configs):
            raise InvalidConfig(f"{name} cannot be used with {SHARE_ORDER}=partition; use none or key")


def effective_value(name: str, configs: Mapping[str, str]) -> Any:
    """Return the effective value of a setting: that in `configs`, the group's override or the broker's default;
    otherwise the built-in default. A value that this version cannot parse is ignored."""
    row = SHARE_CONFIG_KEYS_BY_NAME[name]
    try:
        return row.parse(configs[name])
    except (KeyError, ValueError):
        return row.parse(row.default)
