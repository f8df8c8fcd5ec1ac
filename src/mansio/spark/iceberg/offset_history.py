"""Which offsets the table had at which time: what `--from-snapshot DATE` goes by.

Snapshots are expired after a few dozen commits, because a commit's cost grows with their number. The table only ever
gains records, so a time needs no snapshot: the offsets it had then are enough. They are kept as marks in one property
of the table: how it stood when the first commit came, and then at every full hour after a change; of days gone by only
the last, which is how the table stood at midnight (UTC).

Always true: marks are in the order of time, offsets never fall from one to the next, and their number is bounded, also
for topics of many partitions (a property travels with every commit).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mansio.spark.iceberg.table_format import offsets_text, parse_offsets

if TYPE_CHECKING:
    from collections.abc import Sequence

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
