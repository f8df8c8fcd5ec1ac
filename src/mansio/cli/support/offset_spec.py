"""Places in a log as the command line names them: reads `--to` and `--before`. Pure."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Any, Literal, NamedTuple

from mansio.cli.support.common import TIME_MS_MAX, parse_time

TIME_HELP = (
    "a time (2013-11-21, -15m, or milliseconds since the epoch with an @ before them: @1384992000000)."
)
OFFSET_SPEC_HELP = f"earliest, latest, an offset (42), relative (+10, -10), or {TIME_HELP}"
OFFSET_MAX = (1 << 63) - 1
TIME_LIKE_MIN = 10**12
"""As milliseconds a moment after 2001; offsets seldom come so far."""


class OffsetSpec(NamedTuple):
    """Where to go. `number` is an offset, a distance in records, or milliseconds since the epoch."""

    kind: Literal["earliest", "latest", "offset", "relative", "time"]
    number: int = 0

    def arguments(self) -> dict[str, Any]:
        """For `Admin.reset_offsets`."""
        if self.kind == "relative":
            return {"shift": self.number}
        if self.kind == "time":
            return {"to": datetime.fromtimestamp(self.number / 1000, UTC)}
        return {"to": self.number if self.kind == "offset" else self.kind}


def parse_offset_spec(text: str) -> OffsetSpec:
    """Read one. A plain number is an offset, one after `@` milliseconds since the epoch. Raises `ValueError`."""
    if text == "earliest":
        return OffsetSpec("earliest")
    if text == "latest":
        return OffsetSpec("latest")
    if re.fullmatch(r"[0-9]+", text):
        if int(text) > OFFSET_MAX:
            raise ValueError("no log is that long")
        return OffsetSpec("offset", int(text))
    if re.fullmatch(r"[+-][0-9]+", text):
        return OffsetSpec("relative", int(text))
    return OffsetSpec("time", parse_time(text.removeprefix("@")))


def timestamp_hint(target: OffsetSpec) -> str | None:
    """What to say when an offset was read that may have been meant as a time, the `@` forgotten."""
    if target.kind != "offset" or not TIME_LIKE_MIN <= target.number <= TIME_MS_MAX:
        return None
    return f"{target.number} is taken as an offset; milliseconds since the epoch are written @{target.number}"
