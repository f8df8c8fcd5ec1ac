"""What of a share partition is on its way to the dead-letter topic: tickets given, places taken, copies made.

Always true: what is ARCHIVING has a ticket; it is ARCHIVED only from a place in the dead-letter topic that was
reserved, and is dead from then on, unless the log has lost it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from mansio.state.share_ranges import Span, shifted
from mansio.state.share_types import ARCHIVED, ARCHIVING, Archiving, DeadRange, Ticket

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mansio.state.share_dead import Dead
    from mansio.state.share_types import ShareKey
    from mansio.state.share_window import Window

REASON_MAX: Final = 1_000
"""Characters that are kept of why a record was rejected."""

_NO_TOPIC: Final = bytes(16)


def open_ticket(cause: int, reason: str, consumer: str, wall_ms: int) -> Ticket:
    """Of what is to go to the dead-letter topic and has no place reserved there yet."""
    return Ticket(_NO_TOPIC, -1, -1, -1, -1, cause, reason[:REASON_MAX], consumer, wall_ms)


def letter(key: ShareKey, span: Span) -> Archiving:
    """What the dead-letter queue is told of a span."""
    if span.ticket is None:
        message = f"offsets {span.first} to {span.last} are ARCHIVING without a ticket"
        raise AssertionError(message)
    return Archiving(key, span.first, span.last, span.deliveries, span.ticket)


def reserve(window: Window, tickets: Sequence[tuple[int, int, Ticket]], token: int) -> list[Span]:
    """Give these ranges their places; a ticket is that of the first record of its range."""
    spans: list[Span] = []
    for first, last, ticket in sorted(tickets, key=lambda each: each[0]):
        for span in window.ranges.split(first, last):
            window.put(span, ARCHIVING, token, ticket=shifted(ticket, span.first - first))
            spans.append(span)
    return spans


def archive(
    window: Window, dead: Dead, tickets: Sequence[tuple[int, int, Ticket]], log_start: int, token: int
) -> tuple[list[Span], tuple[DeadRange, ...]]:
    """These have their copies. Gives what of them is dead now, too."""
    spans: list[Span] = []
    added: list[DeadRange] = []
    for first, last, ticket in sorted(tickets, key=lambda each: each[0]):
        for span in window.ranges.split(first, last):
            place = shifted(ticket, span.first - first)
            if place is None or place.producer_id < 0 or span.ticket != place:
                message = f"offsets {span.first} to {span.last} have another place in the dead-letter topic"
                raise AssertionError(message)
            window.put(span, ARCHIVED, token)
            if span.last >= log_start:
                added.append(DeadRange(max(span.first, log_start), span.last, span.deliveries, span.forgiven))
                dead.add(added[-1])
            spans.append(span)
    return spans, tuple(added)
