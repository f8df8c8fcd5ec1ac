"""Offering dead records again: which of them, and how the window takes them back in.

An operator does that when what was wrong is repaired, perhaps twice because an answer was lost.

Always true: only what is dead, is still in the log, and was not offered under the same id before; nothing that was
acknowledged. What lies below the start of the window comes back into it, with what lies between as what it is: done.
Deliveries stay as they are, and all of them are forgiven.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mansio.state.share_dead import common, intervals, size, without
from mansio.state.share_ranges import Span
from mansio.state.share_types import ACKNOWLEDGED, ARCHIVED, AVAILABLE, DeadRange, RedriveResult
from mansio.state.share_window import DELIVERIES_MAX

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mansio.state.share_dead import Dead
    from mansio.state.share_ranges import Ranges
    from mansio.state.share_window import Window


def plan(
    dead: Dead,
    ranges: Ranges,
    log_start: int,
    redrive_id: str,
    offsets: Sequence[tuple[int, int]] | None,
    most: int,
) -> tuple[list[DeadRange], RedriveResult]:
    """What to offer again, the lowest `most` offsets of what is wanted (None: all that is dead); changes nothing.

    Raises `InvalidRequest` for offsets that are no ranges.
    """
    wanted = intervals([(each.first, each.last) for each in dead.ranges()] if offsets is None else offsets)
    lost = common(wanted, [(0, log_start - 1)]) if log_start > 0 else []
    before = common(wanted, dead.offered(redrive_id))
    left, chosen = most, []
    for each in dead.among(without(without(wanted, before), lost)):
        for part in _stored(each, ranges):
            if left > 0 and part.deliveries < DELIVERIES_MAX:
                taken = part._replace(last=min(part.last, part.first + left - 1))
                chosen.append(taken)
                left -= taken.last - taken.first + 1
    return chosen, RedriveResult(most - left, size(before), size(without(lost, before)))


def _stored(each: DeadRange, ranges: Ranges) -> Iterator[DeadRange]:
    """What of it is in no update under way."""
    busy = [(span.first, span.last) for span in ranges.within(each.first, each.last) if span.unsettled]
    for first, last in without([(each.first, each.last)], busy):
        yield each._replace(first=first, last=last)


def take_back(window: Window, dead: Dead, first: int) -> None:
    """Let the window begin at `first`, below where it began: what is dead there is ARCHIVED, the rest is done."""
    ranges, start = window.ranges, window.ranges.start
    spans: list[Span] = []
    begin = first
    for each in dead.among([(first, start - 1)]):
        if each.first > begin:
            spans.append(Span(begin, each.first - 1, ACKNOWLEDGED))
        spans.append(Span(each.first, each.last, ARCHIVED, each.deliveries, each.forgiven))
        begin = each.last + 1
    if begin < start:
        spans.append(Span(begin, start - 1, ACKNOWLEDGED))
    ranges.lower_start(spans)
    for span in spans:
        window.count(span)
    ranges.merge_around(start - 1, start)


def offer(window: Window, chosen: Sequence[DeadRange], token: int) -> list[Span]:
    """All their tries are forgiven, none of their deliveries."""
    changed = []
    for each in chosen:
        for span in window.ranges.split(each.first, each.last):
            window.put(span, AVAILABLE, token, forgiven=span.deliveries)
            changed.append(span)
    return changed
