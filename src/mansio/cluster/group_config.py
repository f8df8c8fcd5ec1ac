"""The settings a consumer group can have of its own, and what is in force for it.

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

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from mansio.cluster.topic_config import Kind, Operation
from mansio.errors import InvalidConfig, InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from mansio.cluster.topic_config import Change

CONSUMER_SESSION_TIMEOUT: Final = "consumer.session.timeout.ms"
CONSUMER_HEARTBEAT_INTERVAL: Final = "consumer.heartbeat.interval.ms"


@dataclass(frozen=True, slots=True)
class GroupSetting:
    """One row of the table. `broker_setting`: Mansio's setting that holds for groups which say nothing, under Kafka's
    `broker_name`; `default`: its text if it is not set either. `parse`: text to value, or `ValueError`."""

    name: str
    kind: Kind
    broker_setting: str
    broker_name: str
    default: str
    meaning: str
    parse: Callable[[str], Any]


def _milliseconds(minimum: int, maximum: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not re.fullmatch(r"\s*\d{1,10}\s*", text, re.ASCII):
            raise ValueError(f"{text!r} is not a number of milliseconds")
        value = int(text)
        if not minimum <= value <= maximum:
            raise ValueError(f"{value} is not within {minimum} and {maximum}")
        return value

    return parse


_ROWS: Final = (
    GroupSetting(
        CONSUMER_SESSION_TIMEOUT,
        Kind.INT,
        "group_consumer_session_timeout_ms",
        "group.consumer.session.timeout.ms",
        "45000",
        "After this long without a heartbeat a member is removed (groups of the new protocol).",
        _milliseconds(6_000, 60_000),
    ),
    GroupSetting(
        CONSUMER_HEARTBEAT_INTERVAL,
        Kind.INT,
        "group_consumer_heartbeat_interval_ms",
        "group.consumer.heartbeat.interval.ms",
        "500",
        "How often members are to be heard of (groups of the new protocol).",
        _milliseconds(100, 15_000),
    ),
)

SETTINGS: Final[dict[str, GroupSetting]] = {row.name: row for row in _ROWS}

NOT_OFFERED: Final[dict[str, str]] = {
    "consumer.assignment.interval.ms": "a target is computed at once, whenever it has to be",
    "consumer.assignor.offload.enable": "assignors run in the coordinator",
    "streams.heartbeat.interval.ms": "there are no streams groups",
    "streams.session.timeout.ms": "there are no streams groups",
    "streams.num.standby.replicas": "there are no streams groups",
}


def setting(name: str) -> GroupSetting:
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
    session_ms, interval_ms = (
        value_of(name, configs, defaults[name])
        for name in (CONSUMER_SESSION_TIMEOUT, CONSUMER_HEARTBEAT_INTERVAL)
    )
    if interval_ms >= session_ms:
        raise InvalidConfig(
            f"{CONSUMER_HEARTBEAT_INTERVAL}: {interval_ms} is not less than {CONSUMER_SESSION_TIMEOUT}, {session_ms}"
        )
