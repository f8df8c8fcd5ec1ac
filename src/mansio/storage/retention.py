"""Retention policy of one log (retention.ms, retention.bytes): a pure function over its segments.

Invariants: retention deletes whole segments, oldest first, and nothing at or above the floor offset. The active segment
is deleted only if all of its records are older than retention.ms, never because of its size. Only the expired segments
and the first one that has not expired are examined.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mansio.storage.segment_list import SegmentInfo

UNLIMITED = -1


class ExpiredSegments(NamedTuple):
    """The first `segment_count` segments of a log, which have expired: `size_bytes` in total, ending at `end_offset`.

    If none has expired, `segment_count` is 0 and `end_offset` is -1. `exceeds_retention_ms`: a segment expired because
    it is older than retention.ms; `exceeds_retention_bytes`: a segment expired only because the log is larger than
    retention.bytes. `includes_active`: the active segment has expired, too, so the log has to be rolled before the
    deletion.
    """

    end_offset: int = -1
    segment_count: int = 0
    size_bytes: int = 0
    exceeds_retention_ms: bool = False
    exceeds_retention_bytes: bool = False
    includes_active: bool = False

    @property
    def reason(self) -> str:
        """Why segments expired: "time", "size" or "time and size"; empty if none has."""
        return " and ".join(["time"] * self.exceeds_retention_ms + ["size"] * self.exceeds_retention_bytes)


def find_expired(
    closed: Iterable[SegmentInfo],
    active: SegmentInfo,
    *,
    size_bytes: int,
    now_ms: int,
    retention_ms: int = UNLIMITED,
    retention_bytes: int = UNLIMITED,
    floor_offset: int,
) -> ExpiredSegments:
    """Find the expired segments among the `closed` ones, oldest first, and the `active` one.

    A segment expires when its largest timestamp is more than `retention_ms` ago (so a segment with a timestamp in the
    future is kept), or when the log without that segment still has `retention_bytes`. `size_bytes` is the size of all
    segments, used only with `retention_bytes`. No segment that ends above `floor_offset` expires: readers or the high
    watermark still need it.
    """
    excess_bytes = size_bytes - retention_bytes
    found = ExpiredSegments()
    for segment in closed:
        by_time = _is_older_than(segment, now_ms, retention_ms)
        by_size = retention_bytes != UNLIMITED and excess_bytes >= segment.size_bytes
        if not (by_time or by_size) or segment.end_offset > floor_offset:
            return found
        excess_bytes -= segment.size_bytes
        found = _add_segment(found, segment, by_time=by_time, includes_active=False)
    if (
        active.size_bytes
        and active.end_offset <= floor_offset
        and _is_older_than(active, now_ms, retention_ms)
    ):
        return _add_segment(found, active, by_time=True, includes_active=True)
    return found


def _is_older_than(segment: SegmentInfo, now_ms: int, retention_ms: int) -> bool:
    return retention_ms != UNLIMITED and now_ms - segment.max_timestamp_ms > retention_ms


def _add_segment(
    found: ExpiredSegments, segment: SegmentInfo, *, by_time: bool, includes_active: bool
) -> ExpiredSegments:
    return ExpiredSegments(
        segment.end_offset,
        found.segment_count + 1,
        found.size_bytes + segment.size_bytes,
        found.exceeds_retention_ms or by_time,
        found.exceeds_retention_bytes or not by_time,
        includes_active,
    )
