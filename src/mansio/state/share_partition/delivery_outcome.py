"""How leases end: what becomes of the records, by what their member said of them, or because it said nothing.

Always true: tries are deliveries that were not forgiven; a record that was tried as often as the group allows is given
up, whoever gave it back and why; what is given up goes to the dead-letter topic if the group has one. A record that was
withheld, and turns out to be in a member's hands, was delivered.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mansio.state.share_partition.archiving import new_reservation
from mansio.state.share_partition.batch_map import NEVER_MS
from mansio.state.share_partition.in_flight import DELIVERIES_MAX
from mansio.state.share_partition.retry_backoff import delay_ms
from mansio.state.share_partition.types import (
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

if TYPE_CHECKING:
    from mansio.state.share_partition.acknowledgement_check import AcknowledgementRun
    from mansio.state.share_partition.batch_map import InFlightBatch
    from mansio.state.share_partition.in_flight import InFlightBatches
    from mansio.state.share_partition.types import ShareSettings


class DeliveryOutcome:
    """What ends in one update, at one time. `random_fraction`: 0 to below 1, for the jitter of rests."""

    __slots__ = ("_chance", "_in_flight", "_now_ms", "_settings", "_wall_ms", "token")

    def __init__(
        self,
        in_flight: InFlightBatches,
        settings: ShareSettings,
        token: int,
        now_ms: float,
        wall_ms: int,
        random_fraction: float,
    ) -> None:
        self._in_flight = in_flight
        self._settings = settings
        self.token = token
        self._now_ms = now_ms
        self._wall_ms = wall_ms
        self._chance = random_fraction

    def acknowledge(self, batch: InFlightBatch, run: AcknowledgementRun, member: str) -> None:
        """The member that has it says how it went."""
        if batch.state == WITHHELD:
            batch.uncounted_deliveries = 0
        if run.type == ACCEPT:
            self._in_flight.put(batch, ACKNOWLEDGED, self.token, holder=member)
        elif run.type == GAP:
            self._in_flight.put(batch, ARCHIVED, self.token, holder=member)
        elif run.type == RELEASE:
            self.retry(batch, run.said.delay_ms, member)
        else:
            self._give_up(batch, CAUSE_REJECTED, run.said.reason, member)

    def expire(self, batch: InFlightBatch) -> None:
        """Its time is over, and nobody said anything."""
        if batch.state == WITHHELD:
            self._in_flight.put(batch, AVAILABLE, self.token)
        else:
            self.retry(batch, -1, batch.holder)

    def retry(self, batch: InFlightBatch, requested_ms: int, consumer: str) -> None:
        """Offer it again after a rest (`requested_ms`: so long, -1 for the group's backoff), or give it up."""
        settings = self._settings
        attempts = batch.deliveries - batch.uncounted_deliveries
        if attempts >= settings.delivery_limit or batch.deliveries >= DELIVERIES_MAX:
            self._give_up(batch, CAUSE_LIMIT, "", consumer)
            return
        in_order = settings.ordered and requested_ms < 0
        backoff_ms = 0 if in_order else delay_ms(settings.backoff, attempts, self._chance, requested_ms)
        self._in_flight.put(
            batch,
            AVAILABLE,
            self.token,
            deadline_ms=self._now_ms + backoff_ms if backoff_ms else NEVER_MS,
            due_ms=self._wall_ms + backoff_ms if backoff_ms else -1,
        )

    def _give_up(self, batch: InFlightBatch, cause: int, reason: str, consumer: str) -> None:
        if self._settings.dead_letters:
            reservation = new_reservation(cause, reason, consumer, self._wall_ms)
            self._in_flight.put(batch, ARCHIVING, self.token, holder=consumer, reservation=reservation)
        else:
            self._in_flight.put(batch, ARCHIVED, self.token, holder=consumer)
