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
from mansio.config.config_def import ConfigType
from mansio.config.group_config_key import GroupConfigKey, milliseconds
from mansio.config.topic_config import Operation
from mansio.errors import InvalidConfig, InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from mansio.config.topic_config import Change

CONSUMER_SESSION_TIMEOUT: Final = "consumer.session.timeout.ms"
CONSUMER_HEARTBEAT_INTERVAL: Final = "consumer.heartbeat.interval.ms"


_KEYS: Final = (
    GroupConfigKey(
        CONSUMER_SESSION_TIMEOUT,
        ConfigType.INT,
        "group_consumer_session_timeout_ms",
        "group.consumer.session.timeout.ms",
        "45000",
        "After this long without a heartbeat a member is removed (groups of the new protocol).",
        milliseconds(6_000, 60_000),
    ),
    GroupConfigKey(
        CONSUMER_HEARTBEAT_INTERVAL,
        ConfigType.INT,
        "group_consumer_heartbeat_interval_ms",
        "group.consumer.heartbeat.interval.ms",
        "500",
        "How often members are to be heard of (groups of the new protocol).",
        milliseconds(100, 15_000),
    ),
)

SETTINGS: Final[dict[str, GroupConfigKey]] = {row.name: row for row in (*_KEYS, *share_group_config.KEYS)}

NOT_OFFERED: Final[dict[str, str]] = {
    "consumer.assignment.interval.ms": "a target is computed at once, whenever it has to be",
    "consumer.assignor.offload.enable": "assignors run in the coordinator",
    "streams.heartbeat.interval.ms": "there are no streams groups",
    "streams.session.timeout.ms": "there are no streams groups",
    "streams.num.standby.replicas": "there are no streams groups",
}


def setting(name: str) -> GroupConfigKey:
    """The row of a setting. Raises `InvalidConfig`."""
    row = SETTINGS.get(name)
    if row is None:
        why = NOT_OFFERED.get(name)
        raise InvalidConfig(f"{name} is not offered: {why}" if why else f"{name}: no such group setting")
    return row


def value_of(name: str, configs: Mapping[str, str], default: int) -> int:
    """What is in force: the group's own value, else `default`. One this version cannot read is as good as none."""
    text = configs.get(name)
    if text is None:
        return default
    try:
        return int(SETTINGS[name].parse(text))
    except (KeyError, ValueError):
        return default


def apply_changes(configs: Mapping[str, str], changes: Iterable[Change]) -> dict[str, str]:
    """The settings of a group after incremental changes (KIP-339). Raises `InvalidConfig` for a bad setting or value,
    `InvalidRequest` for a request that makes no sense."""
    result = dict(configs)
    seen: set[str] = set()
    for name, operation, value in changes:
        if name in seen:
            raise InvalidRequest(f"{name} is changed twice in one request")
        seen.add(name)
        if operation == Operation.DELETE:
            if name not in result:
                setting(name)
            result.pop(name, None)
            continue
        if operation in (Operation.APPEND, Operation.SUBTRACT):
            raise InvalidConfig(f"{name}: append and subtract are for lists, and this is not one")
        if operation != Operation.SET or value is None:
            raise InvalidRequest(f"{name}: a value is needed")
        try:
            result[name] = str(setting(name).parse(value))
        except ValueError as error:
            raise InvalidConfig(f"{name}: {error}") from error
    return result


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
