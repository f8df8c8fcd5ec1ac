"""What the archive's table looks like: its columns, its properties, and the small values that travel between steps.

One Iceberg table per topic. What a batch has archived stands in the *table's properties*, written in the same
transaction as the batch's files: a snapshot's summary would vanish with maintenance.

Always true of a table that `commit` alone has written: it holds every record of a partition from
`Commit.first_offsets` up to, not including, `Commit.offsets`, each exactly once; but for the ranges that somebody has
accepted as lost, which are listed.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pyarrow as pa

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

FORMAT = "1"
HEADERS = "headers"
PARTITION = "__partition"
OFFSET = "__offset"
TIMESTAMP = "__timestamp"
TIMESTAMP_TYPE = "__timestamp_type"
LANE = "__lane"
LAST_OFFSET = "__last_offset"

FORMAT_PROPERTY = "mansio.format"
TOPIC_PROPERTY = "mansio.topic"
TOPIC_ID_PROPERTY = "mansio.topic-id"
QUERY_PROPERTY = "mansio.query-id"
BATCH_PROPERTY = "mansio.batch-id"
OFFSETS_PROPERTY = "mansio.offsets"
FIRST_OFFSETS_PROPERTY = "mansio.first-offsets"
HISTORY_PROPERTY = "mansio.marks"
LOST_PROPERTY = "mansio.lost"
LOST_MAX = 1_000
"""Of the lost ranges so many are listed, the newest."""

RETRIES_PROPERTY = "commit.retry.num-retries"

TABLE_SCHEMA = pa.schema(
    [
        pa.field("key", pa.binary()),
        pa.field("value", pa.binary()),
        pa.field(HEADERS, pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))),
        pa.field(PARTITION, pa.int32()),
        pa.field(OFFSET, pa.int64()),
        pa.field(TIMESTAMP, pa.timestamp("us", tz="UTC")),
        pa.field(TIMESTAMP_TYPE, pa.int32()),
        pa.field(LANE, pa.string()),
    ]
)
"""Columns of every archive table, as its Parquet files have them. All nullable, as the source's are."""

DEAD_LETTER_SCHEMA = pa.schema(
    [
        pa.field(PARTITION, pa.int32()),
        pa.field(OFFSET, pa.int64()),
        pa.field(LAST_OFFSET, pa.int64()),
        pa.field("kind", pa.string()),
        pa.field("reason", pa.string()),
        pa.field("key", pa.binary()),
        pa.field("value", pa.binary()),
    ]
)
"""Columns of a table of dead letters: which offsets, the last one inclusive, cannot be read and why. `kind` is
`batch`, and then `value` is the whole record batch as the broker has it, or `record`, and then key and value are the
record's."""

TABLE_PROPERTIES = {
    # The library's own retry applies the append again without looking whether it is already in.
    RETRIES_PROPERTY: "0",
    "commit.manifest-merge.enabled": "true",
    "commit.manifest.min-count-to-merge": "20",
    "write.metadata.previous-versions-max": "5",
    "write.metadata.delete-after-commit.enabled": "true",
    # Bounds only of what reads prune by: manifests stay small whatever the records hold.
    "write.metadata.metrics.default": "none",
    **{f"write.metadata.metrics.column.{name}": "full" for name in (PARTITION, OFFSET, TIMESTAMP)},
}


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """What one batch is to archive: of every partition the records from `start` up to, not including, `end`.

    `query` and `batch` name it: a repeat after a crash carries the same names and the same offsets.
    """

    query: str
    batch: int
    start: dict[int, int]
    end: dict[int, int]


@dataclass(frozen=True, slots=True)
class WrittenDataFile:
    """One Parquet file a task has written for a batch. It holds records of one partition, in the order of offsets."""

    path: str
    rows: int
    bytes: int
    partition: int
    first_offset: int
    last_offset: int


@dataclass(frozen=True, slots=True)
class LiveFile:
    """One data file that a snapshot of the table refers to. Offsets and times (microseconds, UTC) are both inclusive.

    The times are None where the file has no record with a timestamp, or no bounds were kept.
    """

    path: str
    rows: int
    bytes: int
    partition: int
    first_offset: int
    last_offset: int
    first_us: int | None
    last_us: int | None


@dataclass(frozen=True, slots=True)
class Commit:
    """How far the table has come: the last batch, and per partition the first offset that is not archived yet."""

    query: str
    batch: int
    offsets: dict[int, int]
    first_offsets: dict[int, int] = field(default_factory=dict)
    """Where the archive of each partition began."""


@dataclass(frozen=True, slots=True)
class LostRange:
    """Offsets from `start` up to, not including, `end` that the log had deleted before they were archived, or in which
    there are records that cannot be read; somebody has said that the archive goes on without them."""

    partition: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a batch."""

    added: bool
    """False: the table had it already, and its files are unreferenced."""
    commit: Commit
    """Where the table stands now."""
    snapshot_id: int | None = None
    attempts: int = 1


def offsets_text(offsets: Mapping[int, int]) -> str:
    """Offsets by partition as JSON, partitions in order: equal offsets are equal texts."""
    return json.dumps(
        {str(partition): offsets[partition] for partition in sorted(offsets)}, separators=(",", ":")
    )


def parse_offsets(text: str) -> dict[int, int]:
    """The inverse of `offsets_text`.

    Raises:
        ValueError: The text is not an object of whole numbers.
    """
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError(f"offsets must be an object of partition to offset, not {text[:80]!r}")
    offsets = {int(partition): offset for partition, offset in value.items()}
    if any(type(offset) is not int or offset < 0 or partition < 0 for partition, offset in offsets.items()):
        raise ValueError(f"offsets must be whole numbers, not {text[:80]!r}")
    return offsets


def read_commit(properties: Mapping[str, str]) -> Commit | None:
    """Where a table stands by its properties; None if no batch has been committed yet.

    Raises:
        ValueError: The properties are not as `commit_properties` writes them.
    """
    if OFFSETS_PROPERTY not in properties:
        return None
    return Commit(
        query=properties.get(QUERY_PROPERTY, ""),
        batch=int(properties.get(BATCH_PROPERTY, "-1")),
        offsets=parse_offsets(properties[OFFSETS_PROPERTY]),
        first_offsets=parse_offsets(properties.get(FIRST_OFFSETS_PROPERTY, "{}")),
    )


def commit_properties(commit: Commit) -> dict[str, str]:
    """The properties that say where a table stands."""
    return {
        QUERY_PROPERTY: commit.query,
        BATCH_PROPERTY: str(commit.batch),
        OFFSETS_PROPERTY: offsets_text(commit.offsets),
        FIRST_OFFSETS_PROPERTY: offsets_text(commit.first_offsets),
    }


def read_lost(properties: Mapping[str, str]) -> tuple[LostRange, ...]:
    """What was accepted as lost, oldest first.

    Raises:
        ValueError: The property is not as `lost_text` writes it.
    """
    return tuple(LostRange(*map(int, entry)) for entry in json.loads(properties.get(LOST_PROPERTY, "[]")))


def lost_text(lost: Iterable[LostRange]) -> str:
    """Lost ranges as their property has them: `[[partition, start, end], ...]`."""
    return json.dumps(
        [[one.partition, one.start, one.end] for one in lost][-LOST_MAX:], separators=(",", ":")
    )


# -- offset history --------


HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS
ENTRIES_MAX = 400
NUMBERS_MAX = 20_000
"""Offsets in all marks together; then the oldest go."""


@dataclass(frozen=True, slots=True)
class HistoryEntry:
    """At `at_ms` (milliseconds since the epoch, UTC) the table held everything below `offsets`."""

    at_ms: int
    offsets: dict[int, int]


def add_entry(
    history: Sequence[HistoryEntry], at_ms: int, offsets: dict[int, int], before: HistoryEntry | None = None
) -> tuple[HistoryEntry, ...]:
    """The marks after a commit at `at_ms`. `before`: the commit before it, since which the table stood so; None: there
    is none. The first commit of an hour makes a mark of how the hour began; a clock set back makes none."""
    full_hour_ms = at_ms if before is None else (before.at_ms // HOUR_MS + 1) * HOUR_MS
    if full_hour_ms > at_ms or (history and full_hour_ms <= history[-1].at_ms):
        return tuple(history)
    kept: list[HistoryEntry] = []
    for entry in history:
        # Of a day gone by, midnight at its end included, the last mark stays. So does the first of all.
        is_recent = entry.at_ms > at_ms - DAY_MS
        if not is_recent and len(kept) > 1 and _day(kept[-1]) == _day(entry):
            kept[-1] = entry
        else:
            kept.append(entry)
    kept.append(HistoryEntry(full_hour_ms, dict(offsets if before is None else before.offsets)))
    count_max = max(1, min(ENTRIES_MAX, NUMBERS_MAX // max(1, len(offsets))))
    return tuple(kept[-count_max:])


def _day(entry: HistoryEntry) -> int:
    return (entry.at_ms - 1) // DAY_MS


def entry_at(history: Sequence[HistoryEntry], at_ms: int) -> HistoryEntry | None:
    """The last mark at or before a time; None if the marks begin later."""
    found = None
    for entry in history:
        if entry.at_ms > at_ms:
            break
        found = entry
    return found


def history_text(history: Sequence[HistoryEntry]) -> str:
    """Marks as the property has them: `[[ms, {partition: offset}], ...]`."""
    return "[" + ",".join(f"[{entry.at_ms},{offsets_text(entry.offsets)}]" for entry in history) + "]"


def parse_history(text: str) -> tuple[HistoryEntry, ...]:
    """The inverse of `history_text`.

    Raises:
        ValueError: The text is something else.
    """
    value = json.loads(text)
    if not isinstance(value, list):
        raise ValueError(f"marks must be a list, not {text[:80]!r}")
    return tuple(HistoryEntry(int(at_ms), parse_offsets(json.dumps(offsets))) for at_ms, offsets in value)
