"""What people are shown of a share partition: records by state, and who has how many leased since when.

Reckoned when it is asked for, from the ranges, so that nothing has to be kept up to date for it.

Always true: nothing is changed in here; numbers are of records, not of ranges; what is in an update under way counts as
what it is about to be.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mansio.state.share_partition.batch_map import NEVER_MS
from mansio.state.share_partition.types import (
    ACQUIRED,
    ARCHIVING,
    AVAILABLE,
    WITHHELD,
    HolderCount,
    ShareCounts,
)

if TYPE_CHECKING:
    from mansio.state.share_partition.dead_ranges import DeadRanges
    from mansio.state.share_partition.in_flight import InFlightBatches


def counts(
    in_flight: InFlightBatches, dead: DeadRanges, high_watermark: int, lock_ms: int, now_ms: float
) -> ShareCounts:
    """How many records there are of each state, and who has had what since it was leased or renewed last."""
    sums = {ARCHIVING: 0, WITHHELD: 0}
    parked = 0
    held: dict[str, tuple[int, float]] = {}
    for batch in in_flight.ranges:
        if batch.state in sums:
            sums[batch.state] += batch.size
        elif batch.state == ACQUIRED:
            leased, until = held.get(batch.holder, (0, NEVER_MS))
            held[batch.holder] = (leased + batch.size, min(until, batch.deadline_ms))
        elif batch.state == AVAILABLE and batch.deadline_ms != NEVER_MS:
            parked += batch.size
    return ShareCounts(
        start=in_flight.ranges.start,
        end=in_flight.ranges.end,
        open=max(high_watermark - in_flight.ranges.start, 0) - in_flight.done,
        leased=in_flight.leased,
        parked=parked,
        withheld=sums[WITHHELD],
        archiving=sums[ARCHIVING],
        dead=dead.offsets,
        holders=tuple(
            HolderCount(member, leased, max(round(now_ms - until + lock_ms), 0))
            for member, (leased, until) in sorted(held.items())
        ),
    )
