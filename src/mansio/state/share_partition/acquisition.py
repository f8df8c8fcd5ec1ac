"""Choice of the offsets that a member reads and acquires: policies for the order, and limits.

Policies are the extension point for other orders (priorities, delays). They pick available offsets only, in disjoint
ranges, and change nothing; `machine` applies the limits.

Invariants: chosen offsets were picked by the policy, were read, and lie below the end of leases. Their number never
exceeds the remaining locks, nor, in strict mode, the number requested.
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
"""Offset ranges read for one member at a time."""

_NO_STOP: Final = 2**63


def read_ranges(
    picked: Iterable[tuple[int, int]], space: int, stop: int, unreadable: Sequence[tuple[int, int]] = ()
) -> list[tuple[int, int]]:
    """The picked ranges to read: at most `space` offsets, below `stop`, without the `unreadable` ranges (ascending),
    adjacent ranges merged."""
    if unreadable:
        picked = (part for each in picked for part in difference([each], unreadable))
    found: list[tuple[int, int]] = []
    for first, picked_last in picked:
        if space <= 0 or first >= stop:
            break
        last = min(picked_last, stop - 1, first + space - 1)
        if found and found[-1][1] + 1 == first:
            found[-1] = (found[-1][0], last)
        elif len(found) < READ_RANGES_MAX:
            found.append((first, last))
        else:
            break
        space -= last - first + 1
    return found


def readable(
    picked: Iterable[tuple[int, int]], read: Sequence[tuple[int, int]], stop: int, *, may_skip: bool
) -> Iterator[tuple[int, int]]:
    """The picked ranges that were read, below `stop`. Without `may_skip` they end at the first gap."""
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


def choose(
    pieces: Iterable[tuple[int, int]], most: int, locks: int, *, strict: bool, batch_ends: Sequence[int]
) -> list[tuple[int, int]]:
    """The first offsets of `pieces`: at most `most`, and at most `locks`, the number of free record locks.

    If not `strict`, the batch of the last record is included as a whole, as in Kafka, even if this exceeds `most`. A
    response contains whole batches, so the same bytes would otherwise be sent to a second member for the other records.
    """
    chosen: list[tuple[int, int]] = []
    stop = _NO_STOP
    space = min(most, locks)
    for begin, piece_last in pieces:
        first = begin
        while first <= min(piece_last, stop):
            if space <= 0:
                if strict or stop != _NO_STOP or not chosen:
                    return chosen
                stop = _batch_end(chosen[-1][1], batch_ends)
                space = min(stop - chosen[-1][1], locks)
                if space <= 0:
                    return chosen
                continue
            last = min(first + space - 1, piece_last, stop)
            chosen.append((first, last))
            taken = last - first + 1
            space, locks, first = space - taken, locks - taken, last + 1
        if first > stop:
            break
    return chosen


def _batch_end(offset: int, batch_ends: Sequence[int]) -> int:
    at = bisect_left(batch_ends, offset)
    return batch_ends[at] if at < len(batch_ends) else offset


OPEN_END: Final = 2**63 - 1
"""Last offset of the open range at the end, of which nothing was delivered yet."""


class Policy(Protocol):
    """Order of acquisition. `may_skip`: a later range may be acquired without all of the earlier ones."""

    may_skip: bool

    def pick(self, ranges: BatchMap, member: str, now_ms: float) -> Iterator[tuple[int, int]]:
        """Offset ranges (first, last) in the order in which the member acquires them."""


class LowestFirst:
    """Available records, lowest offset first, as in Kafka."""

    may_skip = True

    def pick(self, ranges: BatchMap, member: str, now_ms: float) -> Iterator[tuple[int, int]]:  # noqa: ARG002 - the signature of all policies
        for batch in ranges.free_batches():
            yield batch.first, batch.last
        yield ranges.end, OPEN_END


class InOrder:
    """No record is acquired before a lower one that is not done, unless the same member has leased that one.

    Pending acknowledgements of a member block other members only.
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
        yield ranges.end, OPEN_END
