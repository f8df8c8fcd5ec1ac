"""What of a share partition a member is to read, and what of that it is given.

The policy says in which order; the limits are kept in here: records, stretches, and where a batch may be cut.

Always true: nothing is changed; what is chosen was picked by the policy, was read, and lies below where leases end; it
is never more than there are locks left, nor, if that is asked for, one record more than was asked for.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, Final

from mansio.state.share_partition.dead_ranges import intersection

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

READ_RANGES_MAX: Final = 8
"""How many stretches one member is to read at a time."""

_NOWHERE: Final = 2**63


def read_ranges(picked: Iterable[tuple[int, int]], room: int, stop: int) -> list[tuple[int, int]]:
    """What to read of what the policy picks: at most `room` offsets, below `stop`, joined where they touch."""
    found: list[tuple[int, int]] = []
    for first, picked_last in picked:
        if room <= 0 or first >= stop:
            break
        last = min(picked_last, stop - 1, first + room - 1)
        if found and found[-1][1] + 1 == first:
            found[-1] = (found[-1][0], last)
        elif len(found) < READ_RANGES_MAX:
            found.append((first, last))
        else:
            break
        room -= last - first + 1
    return found


def readable(
    picked: Iterable[tuple[int, int]], read: Sequence[tuple[int, int]], stop: int, *, may_skip: bool
) -> Iterator[tuple[int, int]]:
    """What the policy picks, as far as it was read and lies below `stop`. Without `may_skip` it ends where something
    is left out."""
    highest = max((last for _, last in read), default=-1)
    for first, last in picked:
        if first >= stop or first > highest:
            return
        if len(read) == 1 and read[0][0] <= first:  # nearly always: what was picked was read from its start
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
    """The first `most` offsets of these, and never more than `locks`.

    If not `strict`, the batch in which the last one lies is finished when that takes at most `most` more, because
    nobody has to open it then.
    """
    chosen: list[tuple[int, int]] = []
    stop = _NOWHERE
    room = min(most, locks)
    for begin, piece_last in pieces:
        first = begin
        while first <= min(piece_last, stop):
            if room <= 0:
                if strict or stop != _NOWHERE or not chosen:
                    return chosen
                stop = _batch_end(chosen[-1][1], batch_ends)
                rest = stop - chosen[-1][1]
                if not 0 < rest <= most:
                    return chosen
                room = min(rest, locks)
                if not room:
                    return chosen
                continue
            last = min(first + room - 1, piece_last, stop)
            chosen.append((first, last))
            taken = last - first + 1
            room, locks, first = room - taken, locks - taken, last + 1
        if first > stop:
            break
    return chosen


def _batch_end(offset: int, batch_ends: Sequence[int]) -> int:
    at = bisect_left(batch_ends, offset)
    return batch_ends[at] if at < len(batch_ends) else offset
