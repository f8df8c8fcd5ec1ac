"""Time ranges of a backfilled table, kept in a table property.

The rows of each range are in files whose names begin with the id of the range, so a repeated backfill finds and
replaces the files of its range. Needs neither Spark nor pyiceberg.

Invariants:
* The ranges of a table do not overlap, so no record is in the table twice.
* A range has the same id in every run: it depends on the pipeline, its topics, and the two times only.
"""

from __future__ import annotations

import hashlib
import json
import posixpath
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final, NamedTuple

from mansio.errors import ConfigError, InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Sequence

RANGES_PROPERTY: Final = "mansio.backfill.ranges"
RUN_ID_PROPERTY: Final = "mansio.backfill.run"
RANGES_MAX: Final = 1_000
ID_CHARACTERS: Final = 16


@dataclass(frozen=True, slots=True, order=True)
class TimeRange:
    """Records with timestamps in [`from_ms`, `to_ms`), in milliseconds since the epoch."""

    from_ms: int
    to_ms: int

    def __post_init__(self) -> None:
        if self.from_ms >= self.to_ms:
            raise InvalidRequest("the end of the time range must be later than its begin")

    def __str__(self) -> str:
        return f"{_format_time(self.from_ms)} to {_format_time(self.to_ms)}"

    def overlaps(self, other: TimeRange) -> bool:
        return self.from_ms < other.to_ms and other.from_ms < self.to_ms

    def contains(self, other: TimeRange) -> bool:
        return self.from_ms <= other.from_ms and other.to_ms <= self.to_ms


@dataclass(frozen=True, slots=True)
class BackfilledRange:
    """A range of a table: its times, and the pipeline and topics whose records it has."""

    pipeline: str
    topics: tuple[str, ...]
    times: TimeRange

    @property
    def id(self) -> str:
        """Id of the range, a hash of its fields."""
        text = json.dumps([self.pipeline, sorted(self.topics), self.times.from_ms, self.times.to_ms])
        return hashlib.sha256(text.encode()).hexdigest()[:ID_CHARACTERS]

    @property
    def file_prefix(self) -> str:
        """Begin of the names of the range's files."""
        return f"backfill-{self.id}"

    def owns_file(self, path: str) -> bool:
        """Whether a file of the table holds rows of this range."""
        return posixpath.basename(path).startswith(f"{self.file_prefix}-")


def parse_ranges(text: str | None) -> tuple[BackfilledRange, ...]:
    """Decode the table property. Raises `ConfigError` if it is invalid."""
    try:
        return tuple(
            BackfilledRange(one["pipeline"], tuple(one["topics"]), TimeRange(one["from_ms"], one["to_ms"]))
            for one in json.loads(text or "[]")
        )
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"table property {RANGES_PROPERTY} cannot be read: {error}") from error


def format_ranges(ranges: Sequence[BackfilledRange]) -> str:
    """Encode ranges as a table property."""
    return json.dumps(
        [
            {
                "pipeline": one.pipeline,
                "topics": list(one.topics),
                "from_ms": one.times.from_ms,
                "to_ms": one.times.to_ms,
            }
            for one in ranges
        ],
        separators=(",", ":"),
    )


class RangeUpdate(NamedTuple):
    """What a backfill changes: the ranges of the table after it, in order of time, and those of them whose files it
    replaces, as they were before it.
    """

    ranges: tuple[BackfilledRange, ...]
    replaced: tuple[BackfilledRange, ...]

    def replaces_file(self, path: str) -> bool:
        """Whether a file of the table holds rows that the backfill replaces."""
        return any(one.owns_file(path) for one in self.replaced)


def with_range(
    known: Sequence[BackfilledRange], new: BackfilledRange, table: str, *, extends: bool = False
) -> RangeUpdate:
    """Return the change of a table by a backfill of `new`, which replaces the same range of an earlier run. `extends`:
    it also replaces the ranges that it contains.

    Raises `InvalidRequest` if `new` overlaps another range, is of another pipeline or of other topics, or if there are
    too many ranges.
    """
    for one in known:
        if (one.pipeline, set(one.topics)) != (new.pipeline, set(new.topics)):
            raise InvalidRequest(
                f"table {table} has rows of pipeline {one.pipeline} over {', '.join(one.topics)}, not of "
                f"{new.pipeline} over {', '.join(new.topics)}: choose another table"
            )
    replaced = [one for one in known if one.id == new.id or (extends and new.times.contains(one.times))]
    others = [one for one in known if one not in replaced]
    for one in others:
        if one.times.overlaps(new.times):
            extending = (
                ", --extend to replace them by those of the longer time"
                if new.times.contains(one.times)
                else ""
            )
            raise InvalidRequest(
                f"table {table} already has the records of {one.times}, which overlap {new.times}: choose times that"
                f" do not overlap, the same times again to replace them{extending}, or another table"
            )
    if len(others) >= RANGES_MAX:
        raise InvalidRequest(f"table {table} has {len(others)} ranges, the maximum: choose another table")
    return RangeUpdate(tuple(sorted([*others, new], key=lambda one: one.times)), (*replaced, new))


def _format_time(milliseconds: int) -> str:
    at = datetime.fromtimestamp(milliseconds / 1000, UTC)
    return at.isoformat(timespec="milliseconds" if milliseconds % 1000 else "seconds").replace("+00:00", "Z")
