"""Delayed publishing: the header of a delayed record, and whether a topic accepts delays.

A broker that does not know delays, or a topic without the setting, would store the header and deliver the record at
once. So the setting is read before the first delayed record of a topic, and again after `CHECK_INTERVAL_S`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Final

from mansio.errors import DelaysNotEnabled
from mansio.net.retry import raise_for_code
from mansio.wire.api_versions import ApiKey
from mansio.wire.batch.delay_headers import DELAY_HEADER, DELAY_MS_MAX, DELIVER_AT_HEADER

if TYPE_CHECKING:
    from mansio.client.types import HeadersLike
    from mansio.net.cluster import Cluster
    from mansio.wire.codec.messages import Struct

CHECK_INTERVAL_S: Final = 60.0
TOPICS_MAX: Final = 10_000
"""Number of topics whose setting is remembered."""

_SETTING: Final = "mansio.delay.enable"
_TOPIC_RESOURCE: Final = 2


class DelayCheck:
    """Knows which topics accept delayed records."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._checked_s: dict[str, float] = {}
        """Topics that accept delays, with the monotonic time in seconds at which that was read."""

    async def ensure_enabled(self, topic: str) -> None:
        """Raise `DelaysNotEnabled` if a topic accepts no delays, `UnknownTopicOrPartition` if it does not exist."""
        checked_s = self._checked_s.get(topic)
        if checked_s is not None and time.monotonic() < checked_s + CHECK_INTERVAL_S:
            return
        resource = {
            "resource_type": _TOPIC_RESOURCE,
            "resource_name": topic,
            "configuration_keys": [_SETTING],
        }
        fields = {"resources": [resource], "include_synonyms": False, "include_documentation": False}
        response = await self._cluster.request(
            ApiKey.DESCRIBE_CONFIGS, fields, check=_check, retry_unknown_topic=False
        )
        if not any(entry.name == _SETTING and entry.value == "true" for entry in response.results[0].configs):
            self._checked_s.pop(topic, None)
            raise DelaysNotEnabled(
                f"topic {topic!r} does not accept delays: mansio topic alter {topic} -c {_SETTING}=true"
            )
        if len(self._checked_s) >= TOPICS_MAX:
            self._checked_s.clear()
        self._checked_s[topic] = time.monotonic()


def with_delay_header(
    headers: HeadersLike | None, delay: timedelta | float | None, at: datetime | None
) -> list[tuple[str, bytes | str | None]]:
    """Return the headers with the one that delays the record.

    `delay` is a duration or a number of seconds, `at` a moment with time zone; give one. Raises `ValueError`."""
    if delay is not None and at is not None:
        raise ValueError("give delay or at, not both")
    if at is not None:
        if at.tzinfo is None:
            raise ValueError(
                "at: a datetime without time zone is ambiguous; use datetime.now(UTC) or .astimezone()"
            )
        name, value_ms = DELIVER_AT_HEADER, max(0, round(at.timestamp() * 1000))
        if value_ms > time.time() * 1000 + DELAY_MS_MAX:
            raise ValueError("at: more than 365 days from now")
    else:
        assert delay is not None
        seconds = delay.total_seconds() if isinstance(delay, timedelta) else delay
        if not 0 <= seconds * 1000 <= DELAY_MS_MAX:
            raise ValueError("delay: not between 0 and 365 days")
        name, value_ms = DELAY_HEADER, round(seconds * 1000)
    if headers is None:
        pairs: list[tuple[str, bytes | str | None]] = []
    else:
        pairs = [*(headers.items() if isinstance(headers, Mapping) else headers)]
    return [*pairs, (name, b"%d" % value_ms)]


def _check(response: Struct) -> None:
    for result in response.results:
        raise_for_code(result.error_code, result.error_message)
