"""What becomes of a share partition when its log loses its oldest records.

Always true: what nobody settled is done with, as it cannot be read again; what waits for its dead letter still gets
one, without the record, and holds the start of the ranges until then; what is in an update under way is left alone
until it is stored.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mansio.state.share_partition.batch_map import NOT_PENDING, TERMINAL, InFlightBatch
from mansio.state.share_partition.types import ACQUIRED, ARCHIVED, ARCHIVING, AVAILABLE, WITHHELD

if TYPE_CHECKING:
    from mansio.state.share_partition.in_flight import InFlightBatches


def drop(in_flight: InFlightBatches, log_start: int) -> int:
    """Forget what is below, up to the first record that waits for its dead letter. Says how many nobody had settled."""
    ranges = in_flight.ranges
    waiting = next((batch.first for batch in ranges if batch.state == ARCHIVING), log_start)
    below = min(waiting, log_start)
    aged = max(below - max(ranges.start, ranges.end), 0)
    for batch in ranges.drop_below(below):
        in_flight.discount(batch)
        aged += 0 if batch.state in TERMINAL else batch.size
    in_flight.done -= ranges.advance_start()
    if ranges.start < log_start > ranges.end:
        ranges.split(ranges.end, log_start - 1)  # nobody was given it, and nobody is to be
    return aged


def late(in_flight: InFlightBatches, log_start: int) -> list[InFlightBatch]:
    """What lies below and neither is done, nor waits for its dead letter, nor is in an update under way."""
    ranges = in_flight.ranges
    if ranges.start >= log_start:
        return []
    return [
        batch
        for batch in ranges.within(ranges.start, log_start - 1)
        if batch.pending_token == NOT_PENDING and batch.state in (AVAILABLE, ACQUIRED, WITHHELD)
    ]


def age(in_flight: InFlightBatches, log_start: int, token: int) -> list[InFlightBatch]:
    """End what is `late`."""
    changed = []
    for found in late(in_flight, log_start):
        for batch in in_flight.ranges.split(found.first, min(found.last, log_start - 1)):
            in_flight.put(batch, ARCHIVED, token)
            changed.append(batch)
    return changed
