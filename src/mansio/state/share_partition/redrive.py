"""Offering dead records again: which of them, and how the window takes them back in.

An operator does that when what was wrong is repaired, perhaps twice because an answer was lost.

Always true: only what is dead, is still in the log, and was not offered under the same id before; nothing that was
acknowledged. What lies below the start of the window comes back into it, with what lies between as what it is: done.
Deliveries stay as they are, and all of them are forgiven.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mansio.state.share_partition.batch_map import InFlightBatch
from mansio.state.share_partition.dead_ranges import difference, intersection, normalized, size
from mansio.state.share_partition.in_flight import DELIVERIES_MAX
from mansio.state.share_partition.types import ACKNOWLEDGED, ARCHIVED, AVAILABLE, DeadRange, RedriveResult

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mansio.state.share_partition.batch_map import BatchMap
    from mansio.state.share_partition.dead_ranges import DeadRanges
    from mansio.state.share_partition.in_flight import InFlightBatches


def plan(
    dead: DeadRanges,
    ranges: BatchMap,
    log_start: int,
    redrive_id: str,
    offsets: Sequence[tuple[int, int]] | None,
    most: int,
) -> tuple[list[DeadRange], RedriveResult]:
    """What to offer again, the lowest `most` offsets of what is wanted (None: all that is dead); changes nothing.

    Raises `InvalidRequest` for offsets that are no ranges.
    """
    acquirable_ranges = normalized(
        [(each.first, each.last) for each in dead.ranges()] if offsets is None else offsets
    )
    lost = intersection(acquirable_ranges, [(0, log_start - 1)]) if log_start > 0 else []
    before = intersection(acquirable_ranges, dead.offered(redrive_id))
    left, chosen = most, []
    for each in dead.intersect(difference(difference(acquirable_ranges, before), lost)):
        for part in _stored(each, ranges):
            if left > 0 and part.deliveries < DELIVERIES_MAX:
                taken = part._replace(last=min(part.last, part.first + left - 1))
                chosen.append(taken)
                left -= taken.last - taken.first + 1
    return chosen, RedriveResult(most - left, size(before), size(difference(lost, before)))


def _stored(each: DeadRange, ranges: BatchMap) -> Iterator[DeadRange]:
    """What of it is in no update under way."""
    busy = [
        (batch.first, batch.last) for batch in ranges.within(each.first, each.last) if batch.pending_token
    ]
    for first, last in difference([(each.first, each.last)], busy):
        yield each._replace(first=first, last=last)


def take_back(in_flight: InFlightBatches, dead: DeadRanges, first: int) -> None:
    """Let the window begin at `first`, below where it began: what is dead there is ARCHIVED, the rest is done."""
    ranges, start = in_flight.ranges, in_flight.ranges.start
    in_flight_batches: list[InFlightBatch] = []
    begin = first
    for each in dead.intersect([(first, start - 1)]):
        if each.first > begin:
            in_flight_batches.append(InFlightBatch(begin, each.first - 1, ACKNOWLEDGED))
        in_flight_batches.append(
            InFlightBatch(each.first, each.last, ARCHIVED, each.deliveries, each.uncounted_deliveries)
        )
        begin = each.last + 1
    if begin < start:
        in_flight_batches.append(InFlightBatch(begin, start - 1, ACKNOWLEDGED))
    ranges.lower_start(in_flight_batches)
    for batch in in_flight_batches:
        in_flight.count(batch)
    ranges.merge_around(start - 1, start)


def offer(in_flight: InFlightBatches, chosen: Sequence[DeadRange], token: int) -> list[InFlightBatch]:
    """All their tries are forgiven, none of their deliveries."""
    changed = []
    for each in chosen:
        for batch in in_flight.ranges.split(each.first, each.last):
            in_flight.put(batch, AVAILABLE, token, uncounted_deliveries=batch.deliveries)
            changed.append(batch)
    return changed
