"""What becomes of a share partition when its log loses its oldest records.

Always true: what nobody settled is done with, as it cannot be read again; what waits for its dead letter still gets
one, without the record, and holds the start of the ranges until then; what is in an update under way is left alone
until it is stored.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mansio.state.share_ranges import SETTLED, TERMINAL, Span
from mansio.state.share_types import ACQUIRED, ARCHIVED, ARCHIVING, AVAILABLE, WITHHELD

if TYPE_CHECKING:
    from mansio.state.share_window import Window


def drop(window: Window, log_start: int) -> int:
    """Forget what is below, up to the first record that waits for its dead letter. Says how many nobody had settled."""
    ranges = window.ranges
    waiting = next((span.first for span in ranges if span.state == ARCHIVING), log_start)
    below = min(waiting, log_start)
    aged = max(below - max(ranges.start, ranges.end), 0)
    for span in ranges.drop_below(below):
        window.discount(span)
        aged += 0 if span.state in TERMINAL else span.size
    window.done -= ranges.advance_start()
    if ranges.start < log_start > ranges.end:
        ranges.split(ranges.end, log_start - 1)  # nobody was given it, and nobody is to be
    return aged


def late(window: Window, log_start: int) -> list[Span]:
    """What lies below and neither is done, nor waits for its dead letter, nor is in an update under way."""
    ranges = window.ranges
    if ranges.start >= log_start:
        return []
    return [
        span
        for span in ranges.within(ranges.start, log_start - 1)
        if span.unsettled == SETTLED and span.state in (AVAILABLE, ACQUIRED, WITHHELD)
    ]


def age(window: Window, log_start: int, token: int) -> list[Span]:
    """End what is `late`."""
    changed = []
    for found in late(window, log_start):
        for span in window.ranges.split(found.first, min(found.last, log_start - 1)):
            window.put(span, ARCHIVED, token)
            changed.append(span)
    return changed
