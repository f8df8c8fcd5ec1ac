"""Times and durations in requests: RFC 3339 times, and durations such as `10s`, `5m`, `2h` or milliseconds."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Final

from mansio.api.asgi.problems import InvalidField
from mansio.host.clock import UNIX_EPOCH

_DURATION: Final = re.compile(r"([0-9]{1,15})(?:\.([0-9]{1,3}))?(ms|s|m|h|d|)")
_UNITS_MS: Final = {"": 1, "ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}


def parse_duration_ms(text: str, name: str) -> int:
    """Return a duration such as `10s`, `1.5h` or `250` (milliseconds) in milliseconds. Raises `InvalidField`."""
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise InvalidField(name, f"{text[:40]!r} is no duration such as 250ms, 10s, 5m, 2h or 7d")
    whole, fraction, unit = match.groups()
    unit_ms = _UNITS_MS[unit]
    return int(whole) * unit_ms + int((fraction or "0").ljust(3, "0")) * unit_ms // 1000


def parse_time(text: str, name: str) -> datetime:
    """Return the moment of an RFC 3339 time. Raises `InvalidField`."""
    try:
        found = datetime.fromisoformat(text.strip().replace(" ", "+") if "T" in text else text)
        if found.tzinfo is None:
            raise ValueError(text)
        found.astimezone(UTC)
    except (ValueError, OverflowError) as error:
        raise InvalidField(
            name, f"{text[:40]!r} is no time with zone such as 2026-01-31T08:30:00Z"
        ) from error
    return found


def parse_time_ms(text: str, name: str) -> int:
    """Return an RFC 3339 time in milliseconds since the Unix epoch, rounded up. Raises `InvalidField`."""
    return -((UNIX_EPOCH - parse_time(text, name)) // timedelta(milliseconds=1))


def format_time(moment: datetime | None) -> str | None:
    """Return a moment as an RFC 3339 time in UTC with milliseconds."""
    if moment is None:
        return None
    return moment.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def format_time_ms(time_ms: int | None) -> str | None:
    """Return milliseconds since the Unix epoch as an RFC 3339 time."""
    if time_ms is None or not 0 <= time_ms < 253_402_300_800_000:
        return None
    return format_time(UNIX_EPOCH + timedelta(milliseconds=time_ms))
