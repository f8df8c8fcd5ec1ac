"""How leases end: what becomes of the records, by what their member said of them, or because it said nothing.

Always true: tries are deliveries that were not forgiven; a record that was tried as often as the group allows is given
up, whoever gave it back and why; what is given up goes to the dead-letter topic if the group has one. A record that was
withheld, and turns out to be in a member's hands, was delivered.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mansio.state.retry import delay_ms
from mansio.state.share_archiving import open_ticket
from mansio.state.share_ranges import NEVER_MS
from mansio.state.share_types import (
    ACCEPT,
    ACKNOWLEDGED,
    ARCHIVED,
    ARCHIVING,
    AVAILABLE,
    CAUSE_LIMIT,
    CAUSE_REJECTED,
    GAP,
    RELEASE,
    WITHHELD,
)
from mansio.state.share_window import DELIVERIES_MAX

if TYPE_CHECKING:
    from mansio.state.share_ranges import Span
    from mansio.state.share_settling import Run
    from mansio.state.share_types import ShareSettings
    from mansio.state.share_window import Window


class Ending:
    """What ends in one update, at one time. `chance`: 0 to below 1, for the jitter of rests."""

    __slots__ = ("_chance", "_now_ms", "_settings", "_wall_ms", "_window", "token")

    def __init__(
        self, window: Window, settings: ShareSettings, token: int, now_ms: float, wall_ms: int, chance: float
    ) -> None:
        self._window = window
        self._settings = settings
        self.token = token
        self._now_ms = now_ms
        self._wall_ms = wall_ms
        self._chance = chance

    def settle(self, span: Span, run: Run, member: str) -> None:
        """The member that has it says how it went."""
        if span.state == WITHHELD:
            span.forgiven = 0
        if run.type == ACCEPT:
            self._window.put(span, ACKNOWLEDGED, self.token, holder=member)
        elif run.type == GAP:
            self._window.put(span, ARCHIVED, self.token, holder=member)
        elif run.type == RELEASE:
            self.retry(span, run.said.delay_ms, member)
        else:
            self._give_up(span, CAUSE_REJECTED, run.said.reason, member)

    def expire(self, span: Span) -> None:
        """Its time is over, and nobody said anything."""
        if span.state == WITHHELD:
            self._window.put(span, AVAILABLE, self.token)
        else:
            self.retry(span, -1, span.holder)

    def retry(self, span: Span, asked_ms: int, consumer: str) -> None:
        """Offer it again after a rest (`asked_ms`: so long, -1 for the group's backoff), or give it up."""
        settings = self._settings
        tries = span.deliveries - span.forgiven
        if tries >= settings.delivery_limit or span.deliveries >= DELIVERIES_MAX:
            self._give_up(span, CAUSE_LIMIT, "", consumer)
            return
        in_order = settings.ordered and asked_ms < 0
        rest_ms = 0 if in_order else delay_ms(settings.backoff, tries, self._chance, asked_ms)
        self._window.put(
            span,
            AVAILABLE,
            self.token,
            deadline_ms=self._now_ms + rest_ms if rest_ms else NEVER_MS,
            due_ms=self._wall_ms + rest_ms if rest_ms else -1,
        )

    def _give_up(self, span: Span, cause: int, reason: str, consumer: str) -> None:
        if self._settings.dead_letters:
            ticket = open_ticket(cause, reason, consumer, self._wall_ms)
            self._window.put(span, ARCHIVING, self.token, holder=consumer, ticket=ticket)
        else:
            self._window.put(span, ARCHIVED, self.token, holder=consumer)
