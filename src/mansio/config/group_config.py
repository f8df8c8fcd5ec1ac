"""The settings a group can have of its own, and what is in force for it.

Owns the one table (`SETTINGS`), as `topic_config` does for topics. A group that says nothing of a setting has the
broker's.

Always true: a setting that would do nothing is not accepted; it is refused with the reason (`NOT_OFFERED`).

Source: KIP-848 (dynamic group configurations). Ours: shorter sessions and heartbeat intervals than Kafka allows, for a
member that dies without a word costs a session timeout; and half a second between heartbeats instead of five. Nobody
can be told anything but in the answer to its heartbeat, so what a member leaves behind is read by nobody until the one
that is to have it is heard of again: a pause of up to one interval, which is to be well below a second. It costs about
80 us of a processor for each heartbeat: 1,000 members take a sixth of a core.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from mansio.config import share_group_config
from mansio.config.config_def import ConfigDef, ConfigKey, ConfigType, integer
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
        "After this long without a heartbeat a member is removed (groups of the new protocol).",
        integer(6_000, 60_000),
        broker_setting="group_consumer_session_timeout_ms",
    ),
    ConfigKey(
        CONSUMER_HEARTBEAT_INTERVAL,
        ConfigType.INT,
        "500",
        "group.consumer.heartbeat.interval.ms",
        "How often members are to be heard of (groups of the new protocol).",
        integer(100, 15_000),
        broker_setting="group_consumer_heartbeat_interval_ms",
    ),
)

NOT_OFFERED: Final[dict[str, str]] = {
    "consumer.assignment.interval.ms": "a target is computed at once, whenever it has to be",
    "consumer.assignor.offload.enable": "assignors run in the coordinator",
    "streams.heartbeat.interval.ms": "there are no streams groups",
    "streams.session.timeout.ms": "there are no streams groups",
    "streams.num.standby.replicas": "there are no streams groups",
}

GROUP_CONFIG: Final = ConfigDef("group", (*_KEYS, *share_group_config.KEYS), not_offered=NOT_OFFERED)
SETTINGS: Final = GROUP_CONFIG.keys


def value_of(name: str, configs: Mapping[str, str], default: int) -> int:
    """What is in force: the group's own value, else `default`. One this version cannot read is as good as none."""
    text = configs.get(name)
    if text is None:
        return default
    try:
        return int(SETTINGS[name].parse(text))
    except (KeyError, ValueError):
        return default


def check_together(configs: Mapping[str, str], defaults: Mapping[str, int]) -> None:
    """Rules that need more than one value, of those in force; `defaults` are the broker's. Raises `InvalidConfig`."""
    for session, interval in (
        (CONSUMER_SESSION_TIMEOUT, CONSUMER_HEARTBEAT_INTERVAL),
        (share_group_config.SESSION_TIMEOUT, share_group_config.HEARTBEAT_INTERVAL),
    ):
        session_ms = value_of(session, configs, defaults[session])
        interval_ms = value_of(interval, configs, defaults[interval])
        if interval_ms >= session_ms:
            raise InvalidConfig(f"{interval}: {interval_ms} is not less than {session}, {session_ms}")
