"""What people are shown of a share partition: records by state, and who has how many leased since when.

Reckoned when it is asked for, from the ranges, so that nothing has to be kept up to date for it.

Always true: nothing is changed in here; numbers are of records, not of ranges; what is in an update under way counts as
what it is about to be.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mansio.state.share_ranges import NEVER_MS
from mansio.state.share_types import ACQUIRED, ARCHIVING, AVAILABLE, WITHHELD, HolderCount, ShareCounts

if TYPE_CHECKING:
    from mansio.state.share_dead import Dead
    from mansio.state.share_window import Window


def counts(window: Window, dead: Dead, high_watermark: int, lock_ms: int, now_ms: float) -> ShareCounts:
    """How many records there are of each state, and who has had what since it was leased or renewed last."""
    sums = {ARCHIVING: 0, WITHHELD: 0}
    parked = 0
    held: dict[str, tuple[int, float]] = {}
    for span in window.ranges:
        if span.state in sums:
            sums[span.state] += span.size
        elif span.state == ACQUIRED:
            leased, until = held.get(span.holder, (0, NEVER_MS))
            held[span.holder] = (leased + span.size, min(until, span.deadline_ms))
        elif span.state == AVAILABLE and span.deadline_ms != NEVER_MS:
            parked += span.size
    return ShareCounts(
        start=window.ranges.start,
        end=window.ranges.end,
        open=max(high_watermark - window.ranges.start, 0) - window.done,
        leased=window.leased,
        parked=parked,
        withheld=sums[WITHHELD],
        archiving=sums[ARCHIVING],
        dead=dead.offsets,
        holders=tuple(
            HolderCount(member, leased, max(round(now_ms - until + lock_ms), 0))
            for member, (leased, until) in sorted(held.items())
        ),
    )
