"""Micro-batches in the order of time: where a batch of limited size ends in each partition, if several partitions, and
several inputs of a query, are to advance together. Does no I/O.

A query with a watermark drops rows that are older than the watermark. If a limited batch took a fixed share of each
input, the inputs would run apart in time, and the rows of the slower one would be dropped. A batch therefore ends, in
all partitions, at the same timestamp: whatever is older is read first.

The time of a record is the largest timestamp of its partition up to and including it: the order within a partition is
that of the offsets. ListOffsets finds the first record with a time of at least T, so the largest T with not too many
records before it is found by search, without reading a record.

Invariants:
* A batch has at most `offsets_max` offsets; at least one if there is a backlog.
* No record outside the batch has a smaller time than a record of the batch, except among the last few of the batch, if
  it has more than `SIMULTANEOUS_SHARE` offsets.
* Readers that plan the same batch independently of each other, as the inputs of a query do, find the same end; if they
  have not seen the same records, ends that differ by these records and the last few of the batch.
"""

from __future__ import annotations

from math import isqrt
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    Place = TypeVar("Place", bound=Any)
    """Key of a partition of an input; sortable."""

TIME_MS_MAX: Final = (1 << 48) - 1
"""Records with later timestamps (after the year 10,000) count as simultaneous."""
TIME_MS_MIN: Final = -1
"""Below the timestamps of all records. ListOffsets has no timestamps below zero."""


SIMULTANEOUS_SHARE: Final = 256
"""The search ends when the records between its two times are fewer than this share of a batch: each further request
costs the brokers as much as reading some hundred records. They count as simultaneous. That is safe, because Spark drops
rows that are older than the watermark of the batch before the previous one, a whole batch earlier.
"""


class TimeOrderedEnd(NamedTuple):
    """End of a batch. `time_ms`: all records with a smaller time are before the end."""

    offsets: dict[Any, int]
    time_ms: int


def end_in_time_order(
    begin: Mapping[Place, int],
    latest: Mapping[Place, int],
    offsets_max: int,
    offsets_at: Callable[[int, Collection[Place]], Mapping[Place, int]],
    *,
    after_ms: int = TIME_MS_MIN,
    guess_ms: int = TIME_MS_MIN,
) -> TimeOrderedEnd:
    """Return the end offset of each partition of `latest`, for a batch of at most `offsets_max` offsets from `begin`.

    `offsets_at(time_ms, places)` is the offset of the first record of each partition with at least this timestamp, any
    offset from the end offset on if there is none. `after_ms`: all older records are before `begin`, as after a batch
    with this `time_ms`. `guess_ms`: the time that is tried first, such as now.
    """
    low = {place: begin[place] for place in latest}
    high = {place: max(end, begin[place]) for place, end in latest.items()}
    low_count, high_count = 0, sum(high[place] - low[place] for place in low)
    if high_count <= offsets_max:
        return TimeOrderedEnd(high, after_ms)
    # The records before `low` are older than `low_ms` and not too many; those before `high`, older than `high_ms`, are.
    low_ms, high_ms = min(after_ms, TIME_MS_MAX - 1), TIME_MS_MAX
    steps = _search_steps(guess_ms)
    enough = offsets_max // SIMULTANEOUS_SHARE
    while low_count < offsets_max and high_ms - low_ms > 1 and high_count - low_count > enough:
        missing = offsets_max - low_count
        time_ms = steps(low_ms, high_ms, missing, high_count - low_count)
        unknown = [place for place in low if low[place] < high[place]]
        found = offsets_at(time_ms, unknown)
        middle = {place: min(max(found[place], low[place]), high[place]) for place in unknown}
        count = low_count + sum(offset - low[place] for place, offset in middle.items())
        if count <= offsets_max:
            low_ms, low_count = time_ms, count
            low |= middle
        else:
            high_ms, high_count = time_ms, count
            high |= middle
    simultaneous = {place: high[place] - low[place] for place in low}
    shares = _divide(simultaneous, offsets_max - low_count)
    return TimeOrderedEnd({place: low[place] + shares[place] for place in low}, low_ms)


def _search_steps(guess_ms: int) -> Callable[[int, int, int, int], int]:
    """Return the next time to try between two times, exclusively: given these, the number of records that the batch
    lacks at the first one, and the number of records between them.

    Of evenly distributed records the wanted time is where the share of the records is. Times a little later and a
    little earlier are tried in turn, so that it is between them. If two of these tries have not excluded three quarters
    of the records, the third halves the time, which bounds the search for all other records.
    """
    tries = 0
    size_before = 0

    def next_time(low_ms: int, high_ms: int, missing: int, size: int) -> int:
        nonlocal tries, size_before
        if tries == 0 and low_ms < guess_ms < high_ms:
            tries, size_before = 1, size
            return guess_ms
        tries += 1
        width = high_ms - low_ms
        if tries % 3 == 1 and size * 4 <= size_before:
            tries += 1
        if tries % 3 == 1:
            step = width // 2
            size_before = size
        else:
            if tries % 3 == 2:
                size_before = size
            margin = isqrt(size) // 2 * (1 if tries % 3 == 2 else -1)
            step = width * (2 * (missing + margin) + 1) // (2 * size)
        return low_ms + min(max(step, 1), width - 1)

    return next_time


def _divide(sizes: Mapping[Place, int], amount: int) -> dict[Place, int]:
    """Divide an amount, at most the sum of the sizes, in proportion to them."""
    total = sum(sizes.values())
    if not amount:
        return dict.fromkeys(sizes, 0)
    shares = {place: amount * size // total for place, size in sizes.items()}
    remainder = amount - sum(shares.values())
    for place in sorted(sizes, key=lambda place: (-sizes[place], place)):
        if remainder and shares[place] < sizes[place]:
            shares[place] += 1
            remainder -= 1
    return shares
