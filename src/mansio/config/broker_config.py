"""Settings of brokers that can be changed while they run (KIP-226): definitions and effective values.

They are set for one broker or for all, under the names of DescribeConfigs: Kafka's, or `mansio.<name>`. Precedence: the
broker's own dynamic value, the dynamic default of all brokers, the static value (file, environment, flag), the built-in
default. The defaults of topics can be changed as well, and apply to all topics without a value of their own.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from mansio.config import topic_config
from mansio.config.config_def import (
    INT64_MAX,
    ConfigDef,
    ConfigKey,
    ConfigType,
    choice_parser,
    integer_parser,
)
from mansio.config.settings import SPECIFICATIONS, Settings, default_of
from mansio.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

DYNAMIC_SETTINGS: Final = (
    "auto_create_topics_enable",
    "connections_max_idle_ms",
    "default_replication_factor",
    "group_share_delivery_count_limit",
    "group_share_partition_max_record_locks",
    "group_share_record_lock_duration_ms",
    "log_cleaner_backoff_ms",
    "log_cleaner_io_max_bytes_per_second",
    "log_level",
    "log_scrub_io_max_bytes_per_second",
    "max_connections",
    "max_connections_per_ip",
    "num_partitions",
    "partitions_max",
    "replica_throttle_bytes_per_second",
)
"""Fields of `Settings` that can be changed at run time. Their users read the effective value when they need it, or
`BrokerRuntime` calls them after a change."""

FOLLOWER_THROTTLE: Final = "follower.replication.throttled.rate"
_REPLICA_THROTTLE: Final = "replica_throttle_bytes_per_second"
_THROTTLE_MAX: Final = 1 << 40

_KINDS: Final = {bool: ConfigType.BOOLEAN, int: ConfigType.LONG, str: ConfigType.STRING}


def config_name(name: str) -> str:
    """Return the name that DescribeConfigs returns for a field of `Settings`: Kafka's, or `mansio.<name>`."""
    return SPECIFICATIONS[name].kafka_name or f"mansio.{name}"


def _field_key(name: str) -> ConfigKey:
    specification, default = SPECIFICATIONS[name], default_of(name)
    if isinstance(default, bool):
        parse: Any = choice_parser("true", "false", ignore_case=True)
    elif isinstance(default, int):
        assert specification.minimum is not None
        assert specification.maximum is not None
        parse = integer_parser(specification.minimum, specification.maximum)
    else:
        parse = choice_parser(*specification.choices, ignore_case=True)
    text = str(default).lower() if isinstance(default, bool) else str(default)
    shown = config_name(name)
    return ConfigKey(shown, _KINDS[type(default)], text, shown, specification.meaning, parse)


_FIELDS: Final = {config_name(name): name for name in DYNAMIC_SETTINGS}
_TOPIC_NAMES: Final = {key.broker_name: key.name for key in topic_config.SETTINGS.values() if key.broker_name}
THROTTLES: Final = (
    ConfigKey(
        FOLLOWER_THROTTLE, ConfigType.LONG, str(INT64_MAX), FOLLOWER_THROTTLE,
        "Maximum bytes per second that all replicas of this broker which are not in sync fetch together; it replaces"
        f" {config_name(_REPLICA_THROTTLE)} while it is set.",
        integer_parser(0, INT64_MAX),
    ),
    ConfigKey(
        "leader.replication.throttled.rate", ConfigType.LONG, str(INT64_MAX), "leader.replication.throttled.rate",
        "Maximum bytes per second that this broker sends to throttled replicas.",
        integer_parser(0, INT64_MAX), no_effect="replication is throttled on the followers",
    ),
    ConfigKey(
        "replica.alter.log.dirs.io.max.bytes.per.second", ConfigType.LONG, str(INT64_MAX),
        "replica.alter.log.dirs.io.max.bytes.per.second",
        "Maximum bytes per second that are moved between log directories.",
        integer_parser(0, INT64_MAX), no_effect="there is one log directory",
    ),
)  # fmt: skip
"""Kafka's replication throttles. They have dynamic values only; DescribeConfigs returns those that are set."""

BROKER_CONFIG: Final = ConfigDef(
    "broker",
    (
        *map(_field_key, DYNAMIC_SETTINGS),
        *(
            dataclasses.replace(key, name=key.broker_name)
            for key in topic_config.SETTINGS.values()
            if key.broker_name
        ),
        *THROTTLES,
    ),
    unsupported={
        config_name(
            name
        ): "it is read at the start: set it in the broker's file or environment and restart the broker"
        for name in SPECIFICATIONS
        if name not in DYNAMIC_SETTINGS
    },
)


class BrokerConfigSources(NamedTuple):
    """The sources of a broker's settings. `own_values`: dynamic values of this broker; `default_values`: dynamic values
    for all brokers."""

    static_settings: Settings
    own_values: Mapping[str, str] = {}
    default_values: Mapping[str, str] = {}

    def effective_settings(self) -> Settings:
        """Return the effective settings. Dynamic values that this version does not know are ignored. Raises
        `ConfigError` if values contradict each other."""
        if not self.own_values and not self.default_values:
            return self.static_settings
        topics = dict(self.static_settings.topic_defaults)
        values: dict[str, Any] = {}
        for layer in (self.default_values, self.own_values):
            for name, text in layer.items():
                key = BROKER_CONFIG.keys.get(name)
                if key is None or (key.no_effect and name not in _TOPIC_NAMES):
                    continue
                try:
                    value = key.parse(text)
                except ValueError:
                    continue  # accepted by another version
                if name in _TOPIC_NAMES:
                    topics[_TOPIC_NAMES[name]] = text
                elif name in _FIELDS:
                    field = _FIELDS[name]
                    values[field] = value == "true" if isinstance(default_of(field), bool) else value
        throttle = self.own_values.get(FOLLOWER_THROTTLE, self.default_values.get(FOLLOWER_THROTTLE))
        if throttle is not None:
            values[_REPLICA_THROTTLE] = max(int(throttle), 1) if int(throttle) <= _THROTTLE_MAX else 0
        return dataclasses.replace(self.static_settings, topic_defaults=topics, **values)

    def without_contradictions(self) -> tuple[BrokerConfigSources, dict[str, str]]:
        """Return (sources without the dynamic values that contradict others, name of a removed value -> reason).

        Such values exist because another broker accepts a default for all brokers that contradicts the static
        settings of this one. Values are added one after the other, those of this broker first, then the defaults, each
        in order of names; a value that contradicts those before it is removed.
        """
        try:
            self.effective_settings()
        except ConfigError:
            pass
        else:
            return self, {}
        own: dict[str, str] = {}
        default: dict[str, str] = {}
        refused: dict[str, str] = {}
        accepted = self._replace(own_values=own, default_values=default)
        for source, target in ((self.own_values, own), (self.default_values, default)):
            for name in sorted(source):
                target[name] = source[name]
                try:
                    accepted.effective_settings()
                except ConfigError as error:
                    del target[name]
                    refused[name] = str(error)
        return accepted, refused
