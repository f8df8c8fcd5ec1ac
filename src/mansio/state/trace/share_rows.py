"""Rows of the trace log for the updates of a share partition.

The state of an offset range and the cause of its update say what has happened; the member of a lease that ended is that
of the delivery with the same attempt.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from mansio.state.share_partition.types import (
    ACKNOWLEDGED,
    ACQUIRED,
    ARCHIVED,
    ARCHIVING,
    AVAILABLE,
    BY_ACKNOWLEDGEMENT,
    BY_ACQUISITION,
    BY_CLAIM,
    BY_COPY,
    BY_DEADLINE,
    BY_LOG_START,
    BY_MEMBER_END,
    BY_REDRIVE,
    CAUSE_REJECTED,
)
from mansio.wire.internal_records import trace_records as rows

if TYPE_CHECKING:
    from mansio.state.share_partition.types import StateBatch

NO_ROW: Final = 0

_ENDED: Final = {
    BY_ACKNOWLEDGEMENT: (rows.RELEASED, rows.BY_MEMBER),
    BY_CLAIM: (rows.RELEASED, rows.BY_MEMBER),
    BY_MEMBER_END: (rows.RELEASED, rows.MEMBER_LEFT),
    BY_DEADLINE: (rows.EXPIRED, 0),
    BY_REDRIVE: (rows.REDRIVEN, 0),
}
"""Kind and cause of a range that became available."""


def kind_of(change: StateBatch, cause: int) -> tuple[int, int]:
    """Return the kind and the cause of the row for a change; `NO_ROW` if the change concerns no delivery. `cause`: that
    of the update."""
    state = change.state
    if not cause:
        return NO_ROW, 0
    if state == ACQUIRED:
        return (rows.RENEWED if cause == BY_ACKNOWLEDGEMENT else rows.DELIVERED), 0
    if state == ACKNOWLEDGED:
        # An acquisition passes records that are not for the group: of aborted transactions, or of its other queues.
        return (NO_ROW if cause == BY_ACQUISITION else rows.ACKNOWLEDGED), 0
    if state == AVAILABLE:
        return _ENDED.get(cause, (NO_ROW, 0))
    if state == ARCHIVING:
        reservation = change.reservation
        if reservation is None or reservation.cause == CAUSE_REJECTED:
            return rows.REJECTED, 0
        return rows.ATTEMPTS_USED_UP, _ENDED.get(cause, (0, 0))[1]
    if state == ARCHIVED:
        if cause == BY_COPY:
            return rows.DEAD_LETTERED, 0
        return (rows.DELETED if cause == BY_LOG_START else rows.DISCARDED), 0
    return NO_ROW, 0
