"""Retention policy of one log (retention.ms, retention.bytes): a pure function over its segments.

Invariants: retention deletes whole segments, oldest first, and nothing at or above the floor offset. The active segment
is deleted only when all of it has expired by time, never by size. Only the segments that expire, and the first one that
does not, are examined.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mansio.storage.segment_list import SegmentInfo

UNLIMITED = -1


class Expired(NamedTuple):
    """Expired segments: the first `segments`, `size_bytes` in total, which end at `end_offset` (-1 if there are none).

    `by_time` and `by_size` are the reasons; both may be true. `newest`: the active segment is one of them, so the log
    has to be rolled first.
    """

    end_offset: int = -1
    segments: int = 0
    size_bytes: int = 0
    by_time: bool = False
    by_size: bool = False
    newest: bool = False

    @property
    def reason(self) -> str:
        """The reasons as text."""
        return " and ".join(["time"] * self.by_time + ["size"] * self.by_size)


def expired(
    closed: Iterable[SegmentInfo],
    newest: SegmentInfo,
    *,
    size_bytes: int,
    now_ms: int,
    retention_ms: int = UNLIMITED,
    retention_bytes: int = UNLIMITED,
    floor_offset: int,
) -> Expired:
    """Which segments have expired. `size_bytes` is the size of all segments, used only with `retention_bytes`.

    A segment expires when its largest timestamp is more than `retention_ms` ago (so a segment with a timestamp in the
    future is kept), or when the log without it still has `retention_bytes`. `floor_offset` is the lowest offset that
    has to be kept, for readers and the high watermark.
    """
    excess_bytes = size_bytes - retention_bytes
    found = Expired()
    for segment in closed:
        by_time = _is_old(segment, now_ms, retention_ms)
        by_size = retention_bytes != UNLIMITED and excess_bytes >= segment.size_bytes
        if not (by_time or by_size) or segment.end_offset > floor_offset:
            return found
        excess_bytes -= segment.size_bytes
        found = _with(found, segment, by_time=by_time, newest=False)
    if newest.size_bytes and newest.end_offset <= floor_offset and _is_old(newest, now_ms, retention_ms):
        return _with(found, newest, by_time=True, newest=True)
    return found


def _is_old(segment: SegmentInfo, now_ms: int, retention_ms: int) -> bool:
    return retention_ms != UNLIMITED and now_ms - segment.max_timestamp_ms > retention_ms


def _with(found: Expired, segment: SegmentInfo, *, by_time: bool, newest: bool) -> Expired:
    return Expired(
        segment.end_offset,
        found.segments + 1,
        found.size_bytes + segment.size_bytes,
        found.by_time or by_time,
        found.by_size or not by_time,
        newest,
    )
