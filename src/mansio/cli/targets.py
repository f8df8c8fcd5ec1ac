"""Where a group's offsets are to be moved: reads `--to` and works out the new offset. Pure."""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

from mansio.cli.common import parse_time

TARGET_HELP = "earliest, latest, an offset (42), relative (+10, -10), or a time (2013-11-21, -15m, @MILLISECONDS)."


class Target(NamedTuple):
    """Where to go. `number` is an offset, a distance in records, or milliseconds since the epoch."""

    kind: Literal["earliest", "latest", "offset", "relative", "time"]
    number: int = 0


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


def new_offset(target: Target, *, committed: int | None, start: int, end: int, at_time: int | None) -> int:
    """The offset to commit, kept within what the log holds.

    A group without a commit moves relative to the start. `at_time` is the first offset at or after the time, None
    where all records are older: then the end.
    """
    wanted = {
        "earliest": start,
        "latest": end,
        "offset": target.number,
        "relative": (start if committed is None else committed) + target.number,
        "time": end if at_time is None else at_time,
    }[target.kind]
    return min(max(wanted, start), end)
