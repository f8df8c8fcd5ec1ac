"""Delayed publishing: the header of a delayed record, and whether a topic accepts delays.

A broker that does not know delays, or a topic without the setting, would store the header and deliver the record at
once. So the setting is read before the first delayed record of a topic, and again after `CHECK_INTERVAL_S`.

Invariants:
* A delay is rounded up to milliseconds: no record is due before the given time.
* Calls that wait for the setting of one topic share one request. A refusal is not remembered.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final

from mansio.errors import DelaysNotEnabled, MansioError
from mansio.net.retry import raise_for_code
from mansio.wire.api_versions import ApiKey
from mansio.wire.batch.delay_headers import DELAY_HEADER, DELAY_MS_MAX, DELIVER_AT_HEADER

if TYPE_CHECKING:
    from mansio.client.types import HeadersLike
    from mansio.net.cluster import Cluster
    from mansio.wire.codec.messages import Struct

CHECK_INTERVAL_S: Final = 10.0
"""How long a topic that accepted delays is expected to accept them. If the setting is turned off, records that are
published in this time are not delayed."""

TOPICS_MAX: Final = 10_000
"""Number of topics whose setting is remembered."""

_SETTING: Final = "mansio.delay.enable"
_TOPIC_RESOURCE: Final = 2
_MILLISECOND: Final = timedelta(milliseconds=1)
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


class DelayCheck:
    """Knows which topics accept delayed records. All methods run on the event loop's thread."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._checked_s: dict[str, float] = {}
        """Topics that accept delays, with the monotonic time in seconds at which that was read."""
        self._requests: dict[str, asyncio.Task[bool]] = {}

    def is_enabled(self, topic: str) -> bool:
        """Whether a topic is known to accept delays; False if that has to be read."""
        checked_s = self._checked_s.get(topic)
        return checked_s is not None and time.monotonic() < checked_s + CHECK_INTERVAL_S

    async def ensure_enabled(self, topic: str) -> None:
        """Raise `DelaysNotEnabled` if a topic accepts no delays, `UnknownTopicOrPartition` if it does not exist."""
        if self.is_enabled(topic):
            return
        request = self._requests.get(topic)
        if request is None:
            request = asyncio.get_running_loop().create_task(self._read_setting(topic))
            self._requests[topic] = request
            request.add_done_callback(lambda _: self._requests.pop(topic, None))
        try:
            is_enabled = await asyncio.shield(request)
        except MansioError as error:
            raise type(error)(error.message) from error  # each call raises its own error object
        if not is_enabled:
            raise DelaysNotEnabled(
                f"topic '{topic}' does not accept delays: mansio topic alter {topic} -c {_SETTING}=true"
            )

    async def close(self) -> None:
        """Cancel the requests in progress."""
        requests = [*self._requests.values()]
        for request in requests:
            request.cancel()
        await asyncio.gather(*requests, return_exceptions=True)

    async def _read_setting(self, topic: str) -> bool:
        now_s = time.monotonic()
        resource = {
            "resource_type": _TOPIC_RESOURCE,
            "resource_name": topic,
            "configuration_keys": [_SETTING],
        }
        fields = {"resources": [resource], "include_synonyms": False, "include_documentation": False}
        response = await self._cluster.request(
            ApiKey.DESCRIBE_CONFIGS, fields, check=_check, retry_unknown_topic=False
        )
        self._checked_s.pop(topic, None)
        if not any(entry.name == _SETTING and entry.value == "true" for entry in response.results[0].configs):
            return False
        if len(self._checked_s) >= TOPICS_MAX:
            self._checked_s.clear()
        self._checked_s[topic] = now_s
        return True


def with_delay_header(
    headers: HeadersLike | None, delay: timedelta | float | None, at: datetime | None
) -> list[tuple[str, bytes | str | None]]:
    """Return the headers with the one that delays the record.

    `delay` is a duration or a number of seconds, `at` a moment with time zone; give one. Raises `ValueError`, also if
    one of the headers is such a header already."""
    if delay is not None and at is not None:
        raise ValueError("give delay or at, not both")
    if delay is not None:
        name, value_ms = DELAY_HEADER, parse_delay_ms(delay)
    else:
        name, value_ms = DELIVER_AT_HEADER, parse_moment_ms(at)
    if headers is None:
        pairs: list[tuple[str, bytes | str | None]] = []
    else:
        pairs = [*(headers.items() if isinstance(headers, Mapping) else headers)]
    for pair in pairs:
        if pair[0] in (DELAY_HEADER, DELIVER_AT_HEADER):
            raise ValueError(f"give the delay as an argument or as the header {pair[0]}, not both")
    return [*pairs, (name, b"%d" % value_ms)]


def parse_delay_ms(delay: timedelta | float) -> int:
    """Return a delay, a duration or a number of seconds, in ms. Raises `ValueError`."""
    if isinstance(delay, timedelta):
        if timedelta() <= delay <= DELAY_MS_MAX * _MILLISECOND:
            return -(-delay // _MILLISECOND)
    elif not isinstance(delay, int | float) or isinstance(delay, bool):
        raise ValueError(f"delay: not a timedelta or a number of seconds: {delay!r}")
    elif 0 <= delay * 1000 <= DELAY_MS_MAX:
        return math.ceil(delay * 1000)
    raise ValueError(f"delay: not between 0 and 365 days: {delay}")


def parse_moment_ms(at: datetime | None, name: str = "at") -> int:
    """Return a moment in ms since the Unix epoch, 0 for one before. `name`: of the argument, for errors. Raises
    `ValueError` for a naive datetime and for one that is more than 365 days from now."""
    due_ms = milliseconds_of(at, name)
    if at is not None and due_ms > time.time() * 1000 + DELAY_MS_MAX:
        raise ValueError(f"{name}: more than 365 days from now: {at.isoformat()}")
    return due_ms


def milliseconds_of(moment: datetime | None, name: str) -> int:
    """Return a moment in ms since the Unix epoch, rounded up, 0 for one before. Raises `ValueError` for a naive
    datetime; `name`: of the argument."""
    if not isinstance(moment, datetime):
        raise ValueError(f"{name}: not a datetime: {moment!r}")
    if moment.utcoffset() is None:
        raise ValueError(
            f"{name}: a datetime without time zone is ambiguous; use datetime.now(UTC) or .astimezone()"
        )
    return max(0, -((_EPOCH - moment) // _MILLISECOND))


def _check(response: Struct) -> None:
    for result in response.results:
        raise_for_code(result.error_code, result.error_message)
