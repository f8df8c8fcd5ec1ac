"""Which part of a log is compacted next, and whether compaction is due: a pure function.

    start          cleaned end                     limit            active segment
      |---- clean ----|-------- cleanable -----------|-- not yet --|----

Clean segments are rewritten together with the cleanable ones, because a value in a clean one may be superseded in a
cleanable one. "Not yet" is what is not durable by two checkpoints, not committed, or younger than
min.compaction.lag.ms.

Invariants: the active segment is never part of it; the groups are whole adjacent segments, in order, and the result of
one group fits into one segment.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from mansio.storage.cleaner.compaction_state import UNSET

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mansio.storage.cleaner.compaction_state import CompactionState
    from mansio.storage.log_slice import SegmentInfo

RELATIVE_OFFSET_MAX = (1 << 31) - 1
SEGMENTS_PER_GROUP_MAX = 64
"""Maximum number of old files that one swap replaces: they are held open and removed together."""

UNLIMITED_MS = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class CompactionSettings:
    """Kafka's topic settings: min.cleanable.dirty.ratio, min.compaction.lag.ms, max.compaction.lag.ms,
    delete.retention.ms.
    """

    min_cleanable_dirty_ratio: float = 0.5
    min_compaction_lag_ms: int = 0
    max_compaction_lag_ms: int = UNLIMITED_MS
    delete_retention_ms: int = 24 * 3600 * 1000


class CompactionPlan(NamedTuple):
    """What a compaction of a log now would do.

    Segments [0, `segment_count`) of the log would be rewritten, of which [`first_dirty`, `segment_count`) are dirty.
    `due`: it should be done now; `forced`: regardless of the dirty ratio, because of the age of a record or of a
    tombstone.
    """

    segment_count: int
    first_dirty: int
    dirty_bytes: int
    dirty_ratio: float
    forced: bool
    due: bool


NOTHING_TO_COMPACT = CompactionPlan(0, 0, 0, 0.0, forced=False, due=False)


def plan_compaction(
    segments: Sequence[SegmentInfo],
    state: CompactionState,
    settings: CompactionSettings,
    *,
    limit_offset: int,
    oldest_dirty_ms: int | None,
    now_ms: int,
) -> CompactionPlan:
    """Plan the compaction of a log. `segments`: all, oldest first; nothing at or above `limit_offset` is included.

    `oldest_dirty_ms` is the timestamp of the first dirty record, None if it is unknown.
    """
    clean_bytes = dirty_bytes = 0
    count = first_dirty = 0
    lag_ms = settings.min_compaction_lag_ms
    for segment in segments[:-1]:
        if segment.end_offset > limit_offset:
            break
        if segment.end_offset <= state.cleaned_end_offset:
            clean_bytes += segment.size_bytes
            first_dirty += 1
        elif lag_ms and segment.max_timestamp_ms > now_ms - lag_ms:
            break
        else:
            dirty_bytes += segment.size_bytes
        count += 1
    ratio = dirty_bytes / (clean_bytes + dirty_bytes) if dirty_bytes else 0.0
    too_old = (
        first_dirty < count
        and oldest_dirty_ms is not None
        and oldest_dirty_ms < now_ms - settings.max_compaction_lag_ms
    )
    tombstones = count > 0 and state.last_horizon_ms != UNSET and state.last_horizon_ms < now_ms
    forced = too_old or tombstones
    due = forced or (first_dirty < count and ratio >= settings.min_cleanable_dirty_ratio)
    return CompactionPlan(count, first_dirty, dirty_bytes, ratio, forced, due)


def group_segments(segments: Sequence[SegmentInfo], segment_bytes: int) -> list[tuple[int, int]]:
    """Groups of adjacent segments to be rewritten into one segment each, as (first, last + 1) of `segments`."""
    groups: list[tuple[int, int]] = []
    first = size = 0
    for at, segment in enumerate(segments):
        if at > first and (
            size + segment.size_bytes > segment_bytes
            or segment.end_offset - segments[first].base_offset > RELATIVE_OFFSET_MAX
            or at - first >= SEGMENTS_PER_GROUP_MAX
        ):
            groups.append((first, at))
            first, size = at, 0
        size += segment.size_bytes
    if segments:
        groups.append((first, len(segments)))
    return groups
