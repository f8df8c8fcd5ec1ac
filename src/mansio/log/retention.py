"""What a log may forget: the policy alone, as a pure function over its segments.

Always true: retention removes whole segments, oldest first, never the newest one, and never anything at or above the
floor it is given.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mansio.log.log import SegmentInfo

FOR_EVER = -1


def retention_offset(
    segments: Sequence[SegmentInfo],
    *,
    now_ms: int,
    retention_ms: int = FOR_EVER,
    retention_bytes: int = FOR_EVER,
    floor_offset: int,
) -> int:
    """The offset to `Log.trim_to`; the base of the first segment when everything stays.

    A segment goes when its largest timestamp is older than `retention_ms`, or when the log without it still has
    `retention_bytes`. `floor_offset` is what readers, and the high watermark, still need.
    """
    excess = sum(segment.size_bytes for segment in segments) - retention_bytes
    keep_from = segments[0].base_offset
    for segment in segments[:-1]:
        too_old = retention_ms != FOR_EVER and segment.max_timestamp_ms < now_ms - retention_ms
        too_much = retention_bytes != FOR_EVER and excess >= segment.size_bytes
        if not (too_old or too_much) or segment.end_offset > floor_offset:
            break
        excess -= segment.size_bytes
        keep_from = segment.end_offset
    return keep_from
