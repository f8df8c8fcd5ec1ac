"""Entries of DescribeConfigs responses for topics, groups and brokers.

Maps Mansio's settings to Kafka's broker names and units. A setting without a Kafka name is returned as `mansio.<name>`.
Broker settings that cannot be changed while the broker runs (`broker_config`) are read-only.

Invariant: the value of an entry is that of its first synonym (KIP-226), if it has any.
"""

from __future__ import annotations

from enum import IntEnum
from math import ceil
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from mansio.config import group_config, topic_config
from mansio.config.broker_config import BROKER_CONFIG, DYNAMIC_SETTINGS, THROTTLES, config_name
from mansio.config.config_def import ConfigKey, ConfigType
from mansio.config.listeners import format_listeners, parse_listeners
from mansio.config.settings import SPECIFICATIONS, Origin, default_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mansio.config.broker_config import BrokerConfigSources
    from mansio.config.settings import Specification


class Source(IntEnum):
    """Where the value of a setting is set, with Kafka's numbers of config sources."""

    TOPIC = 1
    DYNAMIC_BROKER = 2
    DYNAMIC_DEFAULT_BROKER = 3
    STATIC_BROKER = 4
    DEFAULT = 5
    GROUP = 8


class Synonym(NamedTuple):
    """One of the settings that can determine a value (KIP-226)."""

    name: str
    value: str
    source: Source


class ConfigEntry(NamedTuple):
    """One entry of a DescribeConfigs response. `synonyms` are in order of precedence."""

    name: str
    value: str
    source: Source
    kind: ConfigType
    read_only: bool
    synonyms: tuple[Synonym, ...]
    documentation: str


def topic_entries(
    configs: Mapping[str, str], config_sources: BrokerConfigSources, replication_factor: int
) -> list[ConfigEntry]:
    """Return the entries of all settings of a topic. `configs`: overrides of the topic; `config_sources`: those of the
    broker's settings."""
    return [
        _topic_entry(row, configs, config_sources, replication_factor)
        for row in topic_config.SETTINGS.values()
    ]


def group_entries(configs: Mapping[str, str], config_sources: BrokerConfigSources) -> list[ConfigEntry]:
    """Return the entries of all settings of a group. `configs`: overrides of the group; `config_sources`: those of the
    broker's settings."""
    settings = config_sources.static_settings
    entries = []
    for row in group_config.SETTINGS.values():
        synonyms: tuple[Synonym, ...] = (Synonym(row.broker_name or row.name, row.default, Source.DEFAULT),)
        if row.broker_setting and settings.origin(row.broker_setting) is not Origin.DEFAULT:
            value = str(getattr(settings, row.broker_setting))
            synonyms = (Synonym(row.broker_name, value, Source.STATIC_BROKER), *synonyms)
        synonyms = (*_dynamic_synonyms(row.broker_name, config_sources), *synonyms)
        if row.name in configs:
            synonyms = (Synonym(row.name, configs[row.name], Source.GROUP), *synonyms)
        entries.append(_entry(row.name, row.kind, synonyms, row.meaning, read_only=False))
    return entries


def broker_entries(config_sources: BrokerConfigSources) -> list[ConfigEntry]:
    """Return the entries of all settings of a broker, including the defaults of topics."""
    entries = [_broker_entry(config_sources, name) for name in SPECIFICATIONS if name != "topic_defaults"]
    for row in topic_config.SETTINGS.values():
        if row.broker_name:
            synonyms = _default_synonyms(row, config_sources, 1)
            entries.append(_entry(row.broker_name, row.kind, synonyms, documentation(row), read_only=False))
    entries += [
        _entry(row.name, row.kind, synonyms, documentation(row), read_only=False)
        for row in THROTTLES
        if (synonyms := _dynamic_synonyms(row.name, config_sources))
    ]
    return entries


def default_broker_entries(configs: Mapping[str, str]) -> list[ConfigEntry]:
    """Return the entries of the dynamic defaults for all brokers; as in Kafka only those that are set."""
    entries = []
    for name, value in sorted(configs.items()):
        row = BROKER_CONFIG.keys.get(name)
        if row is not None:
            synonyms = (Synonym(name, value, Source.DYNAMIC_DEFAULT_BROKER),)
            entries.append(_entry(name, row.kind, synonyms, documentation(row), read_only=False))
    return entries


def documentation(row: ConfigKey | Specification) -> str:
    """Documentation of a setting, followed by when a change becomes effective, or why the setting has no effect."""
    if row.no_effect:
        return f"{row.meaning} (Without effect: {row.no_effect}.)"
    return f"{row.meaning} ({row.effect}.)" if isinstance(row, ConfigKey) and row.effect else row.meaning


def _topic_entry(
    row: ConfigKey, configs: Mapping[str, str], config_sources: BrokerConfigSources, replication_factor: int
) -> ConfigEntry:
    synonyms = _default_synonyms(row, config_sources, replication_factor)
    if row.name in configs:
        synonyms = (Synonym(row.name, configs[row.name], Source.TOPIC), *synonyms)
    if not synonyms:
        value = topic_config.effective_value(row.name, {}, {}, replication_factor)
        return ConfigEntry(row.name, value, Source.DEFAULT, row.kind, False, (), documentation(row))
    return _entry(row.name, row.kind, synonyms, documentation(row), read_only=False)


def _dynamic_synonyms(name: str, config_sources: BrokerConfigSources) -> tuple[Synonym, ...]:
    found = (
        (config_sources.own_values, Source.DYNAMIC_BROKER),
        (config_sources.default_values, Source.DYNAMIC_DEFAULT_BROKER),
    )
    return tuple(Synonym(name, values[name], source) for values, source in found if name in values)


def _default_synonyms(
    row: ConfigKey, config_sources: BrokerConfigSources, replication_factor: int
) -> tuple[Synonym, ...]:
    """Return the broker's values for a topic setting. Empty for a setting that Kafka's brokers do not have, unless
    `topic_defaults` sets it."""
    synonyms: tuple[Synonym, ...] = ()
    if row.broker_name:
        built_in = topic_config.effective_value(row.name, {}, {}, replication_factor)
        synonyms = (Synonym(row.broker_name, built_in, Source.DEFAULT),)
    defaults = config_sources.static_settings.topic_defaults
    if row.name in defaults:
        value = topic_config.effective_value(row.name, {}, defaults, replication_factor)
        synonyms = (Synonym(row.broker_name or row.name, value, Source.STATIC_BROKER), *synonyms)
    for dynamic in reversed(_dynamic_synonyms(row.broker_name, config_sources)):
        value = topic_config.effective_value(row.name, {}, {row.name: dynamic.value}, replication_factor)
        synonyms = (dynamic._replace(value=value), *synonyms)
    return synonyms


def _entry(
    name: str, kind: ConfigType, synonyms: tuple[Synonym, ...], meaning: str, *, read_only: bool
) -> ConfigEntry:
    return ConfigEntry(name, synonyms[0].value, synonyms[0].source, kind, read_only, synonyms, meaning)


_KINDS: Final = {bool: ConfigType.BOOLEAN, int: ConfigType.LONG, str: ConfigType.STRING}


def _broker_entry(config_sources: BrokerConfigSources, name: str) -> ConfigEntry:
    settings, specification = config_sources.static_settings, SPECIFICATIONS[name]
    shown = config_name(name)
    default = default_of(name)
    default_shown = Synonym(shown, _format_setting(name, default, specification), Source.DEFAULT)
    synonyms: tuple[Synonym, ...] = (default_shown,)
    if settings.origin(name) is not Origin.DEFAULT:
        value = _format_setting(name, getattr(settings, name), specification)
        synonyms = (Synonym(shown, value, Source.STATIC_BROKER), default_shown)
    synonyms = (*_dynamic_synonyms(shown, config_sources), *synonyms)
    read_only = name not in DYNAMIC_SETTINGS
    return _entry(shown, _KINDS[type(default)], synonyms, documentation(specification), read_only=read_only)


def _format_setting(name: str, value: Any, specification: Specification) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if specification.kafka_unit > 1:
        return str(ceil(value / specification.kafka_unit))
    if name in ("listeners", "advertised_listeners") and value:
        return format_listeners(parse_listeners(name, value))
    return str(value)
