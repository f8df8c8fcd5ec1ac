"""Delayed publishing: the header of a delayed record.

Invariant: a delay is rounded up to milliseconds: no record is due before the given time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Final

from mansio.client.producer.topic_setting_check import TopicSettingCheck
from mansio.errors import DelaysNotEnabled
from mansio.host.clock import UNIX_EPOCH
from mansio.wire.batch.delay_headers import DELAY_HEADER, DELAY_MS_MAX, DELIVER_AT_HEADER

if TYPE_CHECKING:
    from mansio.client.types import HeadersLike
    from mansio.net.cluster import Cluster

_SETTING: Final = "mansio.delay.enable"
_MILLISECOND: Final = timedelta(milliseconds=1)


def delay_check(cluster: Cluster) -> TopicSettingCheck:
    """Return what knows which topics accept delayed records; its error is `DelaysNotEnabled`."""
    return TopicSettingCheck(cluster, _SETTING, "false", _new_error)


def _new_error(topic: str) -> DelaysNotEnabled:
    return DelaysNotEnabled(
        f"topic '{topic}' does not accept delays: mansio topic alter {topic} -c {_SETTING}=true"
    )


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
    return max(0, -((UNIX_EPOCH - moment) // _MILLISECOND))
