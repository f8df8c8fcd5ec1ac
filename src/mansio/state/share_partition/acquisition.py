"""Choice of the offsets that a member reads and acquires: policies for the order, and limits.

A policy picks available offsets, in disjoint ranges, and changes nothing. Another order (priorities, delays) is a new
policy. The functions of this module apply the limits.

Invariants: chosen offsets were picked by the policy, were read, and lie below the offset at which leases end
(`LeaseBound.lease_end`). Their number never exceeds the number of free record locks, nor, in strict mode, the number
requested.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, Final, Protocol

from mansio.state.share_partition.dead_letters import difference, intersection
from mansio.state.share_partition.in_flight import TERMINAL
from mansio.state.share_partition.types import ACQUIRED, ARCHIVING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from mansio.state.share_partition.in_flight import BatchMap


READ_RANGES_MAX: Final = 8
"""Maximum number of offset ranges that are read for one request."""

_NO_STOP: Final = 2**63


def ranges_to_read(
    picked: Iterable[tuple[int, int]],
    space: int,
    stop: int,
    unreadable: Sequence[tuple[int, int]] = (),
    *,
    ranges_max: int = READ_RANGES_MAX,
) -> list[tuple[int, int]]:
    """Return the part of the picked ranges that is to be read: at most `space` offsets, all below `stop`, without the
    `unreadable` ranges (ascending), in at most `ranges_max` ranges. Adjacent ranges are merged."""
    if unreadable:
        picked = (part for each in picked for part in difference([each], unreadable))
    found: list[tuple[int, int]] = []
    for first, picked_last in picked:
        if space <= 0 or first >= stop:
            break
        last = min(picked_last, stop - 1, first + space - 1)
        if found and found[-1][1] + 1 == first:
            found[-1] = (found[-1][0], last)
        elif len(found) < ranges_max:
            found.append((first, last))
        else:
            break
        space -= last - first + 1
    return found


def restrict_to_read(
    picked: Iterable[tuple[int, int]], read: Sequence[tuple[int, int]], stop: int, *, may_skip: bool
) -> Iterator[tuple[int, int]]:
    """Yield the parts of the picked ranges that lie in the `read` ranges and below `stop`. Unless `may_skip`, the
    result ends before the first picked offset that was not read."""
    highest = max((last for _, last in read), default=-1)
    for first, last in picked:
        if first >= stop or first > highest:
            return
        if len(read) == 1 and read[0][0] <= first:  # the common case: the range was read from its start
            parts = [(first, min(last, stop - 1, highest))]
        else:
            parts = intersection([(first, min(last, stop - 1))], read)
        if may_skip:
            yield from parts
            continue
        if not parts or parts[0][0] != first:
            return
        yield parts[0]
        if parts[0][1] != last:
            return


def choose_offsets(
    ranges: Iterable[tuple[int, int]],
    records_max: int,
    free_locks: int,
    *,
    strict: bool,
    batch_ends: Sequence[int],
) -> list[tuple[int, int]]:
    """Return the first offsets of `ranges`: at most `records_max`, and at most as many as there are free record locks.

    If not `strict`, the batch of the last record is included as a whole, as in Kafka, even if this exceeds
    `records_max`: a response contains whole batches, and the same bytes would otherwise be sent to a second member for
    the remaining records. `batch_ends`: ascending last offsets of the record batches.
    """
    chosen: list[tuple[int, int]] = []
    stop = _NO_STOP
    space = min(records_max, free_locks)
    for begin, range_last in ranges:
        first = begin
        while first <= min(range_last, stop):
            if space <= 0:
                if strict or stop != _NO_STOP or not chosen:
                    return chosen
                stop = _batch_end(chosen[-1][1], batch_ends)
                space = min(stop - chosen[-1][1], free_locks)
                if space <= 0:
                    return chosen
                continue
            last = min(first + space - 1, range_last, stop)
            chosen.append((first, last))
            taken = last - first + 1
            space, free_locks, first = space - taken, free_locks - taken, last + 1
        if first > stop:
            break
    return chosen


def within_batches(
    chosen: Sequence[tuple[int, int]], ranges: BatchMap, batches_max: int
) -> list[tuple[int, int]]:
    """Return the first of the chosen offsets, as far as they lie in at most `batches_max` in-flight batches."""
    found: list[tuple[int, int]] = []
    for first, last in chosen:
        for batch in ranges.overlapping(first, last):
            if batches_max <= 0:
                return found
            found.append((max(first, batch.first), min(last, batch.last)))
            batches_max -= 1
        if last >= ranges.end and batches_max > 0:
            found.append((max(first, ranges.end), last))
            batches_max -= 1
    return found


def _batch_end(offset: int, batch_ends: Sequence[int]) -> int:
    at = bisect_left(batch_ends, offset)
    return batch_ends[at] if at < len(batch_ends) else offset


UNBOUNDED_LAST: Final = 2**63 - 1
"""Last offset of the range after the in-flight batches, of which nothing was ever delivered."""


class AcquisitionPolicy(Protocol):
    """Order in which members acquire offsets. `may_skip`: a range may be acquired before earlier picked ranges."""

    may_skip: bool

    def pick(self, ranges: BatchMap, member: str, now_ms: float) -> Iterator[tuple[int, int]]:
        """Yield available offset ranges (first, last) in the order in which the member acquires them."""


class LowestOffsetFirst:
    """Policy that offers all available records, lowest offset first, as in Kafka."""

    may_skip = True

    def pick(self, ranges: BatchMap, member: str, now_ms: float) -> Iterator[tuple[int, int]]:  # noqa: ARG002 - the signature of all policies
        for batch in ranges.free_batches():
            yield batch.first, batch.last
        yield ranges.end, UNBOUNDED_LAST


class OrderedAcquisition:
    """Policy that offers a record only if each one at a lower offset is done, ARCHIVING, or leased to the same member.

    A record whose acknowledgement is not stored yet counts as leased to the member that acknowledged it.
    """

    may_skip = False

    def pick(self, ranges: BatchMap, member: str, now_ms: float) -> Iterator[tuple[int, int]]:  # noqa: ARG002 - the signature of all policies
        for batch in ranges:
            if batch.is_free:
                yield batch.first, batch.last
            elif batch.state in TERMINAL or batch.state == ARCHIVING:
                if batch.pending_token and batch.holder != member:
                    return
            elif batch.state != ACQUIRED or batch.holder != member:
                return
        yield ranges.end, UNBOUNDED_LAST
