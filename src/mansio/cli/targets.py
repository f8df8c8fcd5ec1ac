"""Where a group's offsets are to be moved: reads `--to`. Pure."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Any, Literal, NamedTuple

from mansio.cli.common import parse_time

TARGET_HELP = (
    "earliest, latest, an offset (42), relative (+10, -10), or a time (2013-11-21, -15m, @MILLISECONDS)."
)


class Target(NamedTuple):
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


def parse_target(text: str) -> Target:
    """Read `--to`. Raises `ValueError`."""
    if text == "earliest":
        return Target("earliest")
    if text == "latest":
        return Target("latest")
    if re.fullmatch(r"[0-9]+", text):
        return Target("offset", int(text))
    if re.fullmatch(r"[+-][0-9]+", text):
        return Target("relative", int(text))
    return Target("time", parse_time(text.removeprefix("@")))
