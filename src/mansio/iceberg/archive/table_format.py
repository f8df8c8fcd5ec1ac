"""Format of an archive table: columns, properties, and the values that planning, tasks and commit exchange.

There is one Iceberg table per topic. The committed offsets are stored in the *table's properties*, in the same
transaction as the files of the batch. They are not stored in snapshots alone, because maintenance expires snapshots.

Invariants:
* A table that only the module `commit` has written holds every record of a partition with offsets in
  [`Commit.first_offsets`, `Commit.offsets`), each exactly once, except for the ranges that are listed as lost.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pyarrow as pa

from mansio.iceberg.table_properties import (
    BATCH_PROPERTY,
    COMMIT_RETRIES_PROPERTY,
    COMMON_PROPERTIES,
    QUERY_PROPERTY,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from mansio.iceberg.data_files import WrittenFile

FORMAT_VERSION = "1"
HEADERS_COLUMN = "headers"
PARTITION_COLUMN = "__partition"
OFFSET_COLUMN = "__offset"
TIMESTAMP_COLUMN = "__timestamp"
TIMESTAMP_TYPE_COLUMN = "__timestamp_type"
LANE_COLUMN = "__lane"
LAST_OFFSET_COLUMN = "__last_offset"
DECODED_COLUMNS = ("decoded_key", "decoded_value")
"""Optional columns of an archive table, after those of `TABLE_SCHEMA`: keys and values, decoded. Their types grow with
the schemas of the topic.
"""

FORMAT_PROPERTY = "mansio.format"
TOPIC_PROPERTY = "mansio.topic"
TOPIC_ID_PROPERTY = "mansio.topic-id"
OFFSETS_PROPERTY = "mansio.offsets"
FIRST_OFFSETS_PROPERTY = "mansio.first-offsets"
HISTORY_PROPERTY = "mansio.progress"
LOST_RANGES_PROPERTY = "mansio.lost"
LOST_RANGES_MAX = 1_000
"""Maximum number of lost ranges that a table lists; the oldest are dropped."""

TABLE_SCHEMA = pa.schema(
    [
        pa.field("key", pa.binary()),
        pa.field("value", pa.binary()),
        pa.field(HEADERS_COLUMN, pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))),
        pa.field(PARTITION_COLUMN, pa.int32()),
        pa.field(OFFSET_COLUMN, pa.int64()),
        pa.field(TIMESTAMP_COLUMN, pa.timestamp("us", tz="UTC")),
        pa.field(TIMESTAMP_TYPE_COLUMN, pa.int32()),
        pa.field(LANE_COLUMN, pa.string()),
    ]
)
"""Columns of every archive table and of its Parquet files. All are nullable, as in the source."""

DEAD_LETTER_SCHEMA = pa.schema(
    [
        pa.field(PARTITION_COLUMN, pa.int32()),
        pa.field(OFFSET_COLUMN, pa.int64()),
        pa.field(LAST_OFFSET_COLUMN, pa.int64()),
        pa.field("kind", pa.string()),
        pa.field("reason", pa.string()),
        pa.field("key", pa.binary()),
        pa.field("value", pa.binary()),
    ]
)
"""Columns of a dead-letter table: first and last unreadable offset (inclusive) and the reason. If `kind` is `batch`,
`value` is the whole record batch as the broker stores it; if it is `record`, key and value are those of the record.
"""

COMPACTED_FROM_PROPERTY = "mansio.compacted-from"
"""Property of a table of latest records: the archived topic."""

TABLE_PROPERTIES = {
    **COMMON_PROPERTIES,
    COMMIT_RETRIES_PROPERTY: "0",
    # Bounds only of the columns used for pruning: manifests stay small regardless of the records.
    "write.metadata.metrics.default": "none",
    **{
        f"write.metadata.metrics.column.{name}": "full"
        for name in (PARTITION_COLUMN, OFFSET_COLUMN, TIMESTAMP_COLUMN)
    },
}


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """The records to archive in one batch: offsets [`start`, `end`) of each partition.

    `query` is Spark's query id, `batch` its batch id. A repeated batch has the same ids and the same offsets.
    """

    query: str
    batch: int
    start: dict[int, int]
    end: dict[int, int]


@dataclass(frozen=True, slots=True)
class WrittenRange:
    """Records of one partition in offset order, in a file that a task wrote for a batch; first and last offset,
    inclusive.
    """

    file: WrittenFile
    partition: int
    first_offset: int
    last_offset: int


@dataclass(frozen=True, slots=True)
class LiveFile:
    """A data file of a snapshot, with its first and last offset and timestamp (microseconds, UTC), all inclusive. The
    timestamps are None if no record has one, or if the metadata has no bounds.
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
    """State of a table after a commit: query id and batch id of the last batch, and for each partition the first offset
    that is not archived yet.
    """

    query: str
    batch: int
    offsets: dict[int, int]
    first_offsets: dict[int, int] = field(default_factory=dict)
    """The first archived offset of each partition."""


@dataclass(frozen=True, slots=True)
class LostRange:
    """Offsets [`start`, `end`) that are accepted as lost: the log deleted them before they were archived, or their
    records are unreadable.
    """

    partition: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class CommitOutcome:
    """Result of a commit."""

    added: bool
    """Whether the batch was added; if not, the table already had the batch, and the new files are orphans."""
    commit: Commit
    """The last commit of the table after the call."""
    snapshot_id: int | None = None
    attempts: int = 1


def format_offsets(offsets: Mapping[int, int]) -> str:
    """Offsets by partition as JSON, sorted, so that equal offsets give equal texts."""
    return json.dumps(
        {str(partition): offsets[partition] for partition in sorted(offsets)}, separators=(",", ":")
    )


def parse_offsets(text: str) -> dict[int, int]:
    """Parse the result of `format_offsets`.

    Raises:
        ValueError: The text is not an object of integers.
    """
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError(f"offsets must be an object of partition to offset, not {text[:80]!r}")
    offsets = {int(partition): offset for partition, offset in value.items()}
    if any(type(offset) is not int or offset < 0 or partition < 0 for partition, offset in offsets.items()):
        raise ValueError(f"offsets must be whole numbers, not {text[:80]!r}")
    return offsets


def read_commit(properties: Mapping[str, str]) -> Commit | None:
    """Read the last commit from the properties of a table; None before the first batch.

    Raises:
        ValueError: The properties are not as written by `commit_properties`.
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
    """Return the table properties that store a commit; `read_commit` reads them."""
    return {
        QUERY_PROPERTY: commit.query,
        BATCH_PROPERTY: str(commit.batch),
        OFFSETS_PROPERTY: format_offsets(commit.offsets),
        FIRST_OFFSETS_PROPERTY: format_offsets(commit.first_offsets),
    }


def read_lost_ranges(properties: Mapping[str, str]) -> tuple[LostRange, ...]:
    """Read the ranges that are accepted as lost from the properties of a table, oldest first.

    Raises:
        ValueError: The property is not as written by `format_lost_ranges`.
    """
    return tuple(
        LostRange(*map(int, entry)) for entry in json.loads(properties.get(LOST_RANGES_PROPERTY, "[]"))
    )


def format_lost_ranges(lost: Iterable[LostRange]) -> str:
    """Return the value of the property of lost ranges: `[[partition, start, end], ...]`."""
    return json.dumps(
        [[one.partition, one.start, one.end] for one in lost][-LOST_RANGES_MAX:], separators=(",", ":")
    )


# -- offset history --------


HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS
HISTORY_ENTRIES_MAX = 400
HISTORY_OFFSETS_MAX = 20_000
"""Maximum number of offsets in all entries of a history; the oldest entries are dropped."""


@dataclass(frozen=True, slots=True)
class HistoryEntry:
    """At `at_ms` (milliseconds since the epoch, UTC) the table held everything below `offsets`.

    Snapshots expire after a few dozen commits, because the cost of a commit grows with their number. An archive only
    gains records, so its offsets at a time describe its content at that time. The history holds the offsets at the
    first commit and at every full hour after a change; for a past day only its last entry, the state at midnight (UTC).
    Entries are in time order, offsets never decrease, and the number of entries is bounded.
    """

    at_ms: int
    offsets: dict[int, int]


def add_offset_history_entry(
    history: Sequence[HistoryEntry], at_ms: int, offsets: dict[int, int], before: HistoryEntry | None = None
) -> tuple[HistoryEntry, ...]:
    """Return the history after a commit at `at_ms`. `before`: the time and offsets of the previous commit; None for the
    first commit. The first commit after a full hour adds the offsets of the previous commit, which were valid at that
    hour. If the clock was set back, nothing is added.
    """
    full_hour_ms = at_ms if before is None else (before.at_ms // HOUR_MS + 1) * HOUR_MS
    if full_hour_ms > at_ms or (history and full_hour_ms <= history[-1].at_ms):
        return tuple(history)
    kept: list[HistoryEntry] = []
    for entry in history:
        # Of a past day, midnight at its end included, the last entry is kept; and the first entry of all.
        is_recent = entry.at_ms > at_ms - DAY_MS
        if not is_recent and len(kept) > 1 and _day(kept[-1]) == _day(entry):
            kept[-1] = entry
        else:
            kept.append(entry)
    kept.append(HistoryEntry(full_hour_ms, dict(offsets if before is None else before.offsets)))
    count_max = max(1, min(HISTORY_ENTRIES_MAX, HISTORY_OFFSETS_MAX // max(1, len(offsets))))
    return tuple(kept[-count_max:])


def _day(entry: HistoryEntry) -> int:
    return (entry.at_ms - 1) // DAY_MS


def history_entry_at(history: Sequence[HistoryEntry], at_ms: int) -> HistoryEntry | None:
    """Return the last entry at or before `at_ms`; None if the history begins later."""
    found = None
    for entry in history:
        if entry.at_ms > at_ms:
            break
        found = entry
    return found


def format_history(history: Sequence[HistoryEntry]) -> str:
    """Return the value of the property of the history: `[[ms, {partition: offset}], ...]`."""
    return "[" + ",".join(f"[{entry.at_ms},{format_offsets(entry.offsets)}]" for entry in history) + "]"


def parse_history(text: str) -> tuple[HistoryEntry, ...]:
    """Parse the result of `format_history`.

    Raises:
        ValueError: The text has another format.
    """
    value = json.loads(text)
    if not isinstance(value, list):
        raise ValueError(f"the commit history must be a list, not {text[:80]!r}")
    return tuple(HistoryEntry(int(at_ms), parse_offsets(json.dumps(offsets))) for at_ms, offsets in value)
