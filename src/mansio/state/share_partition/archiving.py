"""What of a share partition is on its way to the dead-letter topic: tickets given, places taken, copies made.

Always true: what is ARCHIVING has a ticket; it is ARCHIVED only from a place in the dead-letter topic that was
reserved, and is dead from then on, unless the log has lost it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from mansio.state.share_partition.batch_map import InFlightBatch, shifted
from mansio.state.share_partition.types import (
    ARCHIVED,
    ARCHIVING,
    ArchivingRange,
    DeadLetterReservation,
    DeadRange,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mansio.state.share_partition.dead_ranges import DeadRanges
    from mansio.state.share_partition.in_flight import InFlightBatches
    from mansio.state.share_partition.types import ShareKey

REASON_MAX: Final = 1_000
"""Characters that are kept of why a record was rejected."""

_NO_TOPIC: Final = bytes(16)


def new_reservation(cause: int, reason: str, consumer: str, wall_ms: int) -> DeadLetterReservation:
    """Of what is to go to the dead-letter topic and has no place reserved there yet."""
    return DeadLetterReservation(_NO_TOPIC, -1, -1, -1, -1, cause, reason[:REASON_MAX], consumer, wall_ms)


def archiving_range(key: ShareKey, batch: InFlightBatch) -> ArchivingRange:
    """What the dead-letter queue is told of a span."""
    if batch.reservation is None:
        message = f"offsets {batch.first} to {batch.last} are ARCHIVING without a ticket"
        raise AssertionError(message)
    return ArchivingRange(key, batch.first, batch.last, batch.deliveries, batch.reservation)


def reserve(
    in_flight: InFlightBatches, reservations: Sequence[tuple[int, int, DeadLetterReservation]], token: int
) -> list[InFlightBatch]:
    """Give these ranges their places; a ticket is that of the first record of its range."""
    in_flight_batches: list[InFlightBatch] = []
    for first, last, reservation in sorted(reservations, key=lambda each: each[0]):
        for batch in in_flight.ranges.split(first, last):
            in_flight.put(batch, ARCHIVING, token, reservation=shifted(reservation, batch.first - first))
            in_flight_batches.append(batch)
    return in_flight_batches


def archive(
    in_flight: InFlightBatches,
    dead: DeadRanges,
    reservations: Sequence[tuple[int, int, DeadLetterReservation]],
    log_start: int,
    token: int,
) -> tuple[list[InFlightBatch], tuple[DeadRange, ...]]:
    """These have their copies. Gives what of them is dead now, too."""
    in_flight_batches: list[InFlightBatch] = []
    added: list[DeadRange] = []
    for first, last, reservation in sorted(reservations, key=lambda each: each[0]):
        for batch in in_flight.ranges.split(first, last):
            place = shifted(reservation, batch.first - first)
            if place is None or place.producer_id < 0 or batch.reservation != place:
                message = f"offsets {batch.first} to {batch.last} have another place in the dead-letter topic"
                raise AssertionError(message)
            in_flight.put(batch, ARCHIVED, token)
            if batch.last >= log_start:
                added.append(
                    DeadRange(
                        max(batch.first, log_start), batch.last, batch.deliveries, batch.uncounted_deliveries
                    )
                )
                dead.add(added[-1])
            in_flight_batches.append(batch)
    return in_flight_batches, tuple(added)
