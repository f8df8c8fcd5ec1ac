"""Settings of single groups (KIP-848, KIP-932): definitions and effective values.

A group without an override uses the broker's setting.

Differences from Kafka: session timeouts and heartbeat intervals may be shorter, because the partitions of a member that
fails without leaving are not read until its session times out; and the default heartbeat interval is half a second
instead of five seconds. Members receive assignments only in responses to heartbeats, so a revoked partition is not read
until the next heartbeat of its new owner, up to one interval later. A heartbeat costs about 80 us of CPU time: 1,000
members use a sixth of a core.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from mansio.config import share_group_config
from mansio.config.config_def import ConfigDef, ConfigKey, ConfigType, integer_parser
from mansio.errors import InvalidConfig

if TYPE_CHECKING:
    from collections.abc import Mapping

CONSUMER_SESSION_TIMEOUT: Final = "consumer.session.timeout.ms"
CONSUMER_HEARTBEAT_INTERVAL: Final = "consumer.heartbeat.interval.ms"


_KEYS: Final = (
    ConfigKey(
        CONSUMER_SESSION_TIMEOUT,
        ConfigType.INT,
        "45000",
        "group.consumer.session.timeout.ms",
        "Time without a heartbeat in ms after which a member is removed (groups of the consumer protocol).",
        integer_parser(6_000, 60_000),
        broker_setting="group_consumer_session_timeout_ms",
    ),
    ConfigKey(
        CONSUMER_HEARTBEAT_INTERVAL,
        ConfigType.INT,
        "500",
        "group.consumer.heartbeat.interval.ms",
        "Interval of the heartbeats of members in ms (groups of the consumer protocol).",
        integer_parser(100, 15_000),
        broker_setting="group_consumer_heartbeat_interval_ms",
    ),
)

UNSUPPORTED_SETTINGS: Final[dict[str, str]] = {
    "consumer.assignment.interval.ms": "a target assignment is computed at once",
    "consumer.assignor.offload.enable": "assignors run in the coordinator",
    "streams.heartbeat.interval.ms": "there are no streams groups",
    "streams.session.timeout.ms": "there are no streams groups",
    "streams.num.standby.replicas": "there are no streams groups",
}

GROUP_CONFIG: Final = ConfigDef(
    "group", (*_KEYS, *share_group_config.SHARE_CONFIG_KEYS), unsupported=UNSUPPORTED_SETTINGS
)
SETTINGS: Final = GROUP_CONFIG.keys


def effective_int_value(name: str, configs: Mapping[str, str], default: int) -> int:
    """Return the effective value of the setting `name`: the group's override, otherwise `default`. An override that
    this version cannot parse is ignored."""
    text = configs.get(name)
    if text is None:
        return default
    try:
        return int(SETTINGS[name].parse(text))
    except (KeyError, ValueError):
        return default


def check_combination(configs: Mapping[str, str], defaults: Mapping[str, int]) -> None:
    """Check that each heartbeat interval is less than the session timeout, and that limits by key go with the order.
    `defaults`: the broker's values by name. Raises `InvalidConfig`."""
    share_group_config.check_key_limits(configs)
    for session, interval in (
        (CONSUMER_SESSION_TIMEOUT, CONSUMER_HEARTBEAT_INTERVAL),
        (share_group_config.SHARE_SESSION_TIMEOUT, share_group_config.SHARE_HEARTBEAT_INTERVAL),
    ):
        session_ms = effective_int_value(session, configs, defaults[session])
        interval_ms = effective_int_value(interval, configs, defaults[interval])
        if interval_ms >= session_ms:
            raise InvalidConfig(f"{interval}: {interval_ms} is not less than {session}, {session_ms}")
