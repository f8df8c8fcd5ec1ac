"""Settings of brokers that can be changed while they run (KIP-226): definitions and effective values.

They are set for one broker or for all, under the names of DescribeConfigs: Kafka's, or `mansio.<name>`. Precedence: the
broker's own dynamic value, the dynamic default of all brokers, the static value (file, environment, flag), the built-in
default. The defaults of topics can be changed as well, and apply to all topics without a value of their own.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from mansio.config import topic_config
from mansio.config.config_def import INT64_MAX, ConfigDef, ConfigKey, ConfigType, integer, one_of
from mansio.config.settings import SPECIFICATIONS, Settings, default_of
from mansio.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

DYNAMIC_SETTINGS: Final = (
    "auto_create_topics_enable",
    "connections_max_idle_ms",
    "default_replication_factor",
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
"""Fields of `Settings`. What uses them reads the effective value, or is told by `BrokerRuntime`."""

FOLLOWER_THROTTLE: Final = "follower.replication.throttled.rate"
_REPLICA_THROTTLE: Final = "replica_throttle_bytes_per_second"
_THROTTLE_MAX: Final = 1 << 40

_KINDS: Final = {bool: ConfigType.BOOLEAN, int: ConfigType.LONG, str: ConfigType.STRING}


def shown_name(name: str) -> str:
    """The name under which clients see a field of `Settings`."""
    return SPECIFICATIONS[name].kafka_name or f"mansio.{name}"


def _field_key(name: str) -> ConfigKey:
    specification, default = SPECIFICATIONS[name], default_of(name)
    if isinstance(default, bool):
        parse: Any = one_of("true", "false", ignore_case=True)
    elif isinstance(default, int):
        assert specification.minimum is not None
        assert specification.maximum is not None
        parse = integer(specification.minimum, specification.maximum)
    else:
        parse = one_of(*specification.choices, ignore_case=True)
    text = str(default).lower() if isinstance(default, bool) else str(default)
    shown = shown_name(name)
    return ConfigKey(shown, _KINDS[type(default)], text, shown, specification.meaning, parse)


_FIELDS: Final = {shown_name(name): name for name in DYNAMIC_SETTINGS}
_TOPIC_NAMES: Final = {key.broker_name: key.name for key in topic_config.SETTINGS.values() if key.broker_name}
THROTTLES: Final = (
    ConfigKey(
        FOLLOWER_THROTTLE, ConfigType.LONG, str(INT64_MAX), FOLLOWER_THROTTLE,
        "Maximum bytes per second that all replicas of this broker which are not in sync fetch together; it replaces"
        f" {shown_name(_REPLICA_THROTTLE)} while it is set.",
        integer(0, INT64_MAX),
    ),
    ConfigKey(
        "leader.replication.throttled.rate", ConfigType.LONG, str(INT64_MAX), "leader.replication.throttled.rate",
        "Maximum bytes per second that this broker sends to throttled replicas.",
        integer(0, INT64_MAX), no_effect="replication is throttled on the followers",
    ),
    ConfigKey(
        "replica.alter.log.dirs.io.max.bytes.per.second", ConfigType.LONG, str(INT64_MAX),
        "replica.alter.log.dirs.io.max.bytes.per.second",
        "Maximum bytes per second that are moved between log directories.",
        integer(0, INT64_MAX), no_effect="there is one log directory",
    ),
)  # fmt: skip
"""Kafka's throttles, which have dynamic values only and are shown only where they are set."""

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
    not_offered={
        shown_name(
            name
        ): "it is read at the start: set it in the broker's file or environment and restart the broker"
        for name in SPECIFICATIONS
        if name not in DYNAMIC_SETTINGS
    },
)


class BrokerLayers(NamedTuple):
    """The sources of a broker's values. `own` and `default` are the dynamic values of the broker and of all brokers."""

    static: Settings
    own: Mapping[str, str] = {}
    default: Mapping[str, str] = {}

    def effective(self) -> Settings:
        """The values in force. Values that this version does not know are ignored. Raises `ConfigError` if they
        contradict each other."""
        if not self.own and not self.default:
            return self.static
        topics = dict(self.static.topic_defaults)
        values: dict[str, Any] = {}
        for layer in (self.default, self.own):
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
        throttle = self.own.get(FOLLOWER_THROTTLE, self.default.get(FOLLOWER_THROTTLE))
        if throttle is not None:
            values[_REPLICA_THROTTLE] = max(int(throttle), 1) if int(throttle) <= _THROTTLE_MAX else 0
        return dataclasses.replace(self.static, topic_defaults=topics, **values)

    def without_contradictions(self) -> tuple[BrokerLayers, dict[str, str]]:
        """These sources without the dynamic values that contradict the others, and the reason for each of those.

        Another broker accepts a default that contradicts the static values of this one. The other values apply
        nevertheless, in this order: those of this broker, then the defaults, each by name.
        """
        try:
            self.effective()
        except ConfigError:
            pass
        else:
            return self, {}
        own: dict[str, str] = {}
        default: dict[str, str] = {}
        refused: dict[str, str] = {}
        accepted = self._replace(own=own, default=default)
        for source, target in ((self.own, own), (self.default, default)):
            for name in sorted(source):
                target[name] = source[name]
                try:
                    accepted.effective()
                except ConfigError as error:
                    del target[name]
                    refused[name] = str(error)
        return accepted, refused
