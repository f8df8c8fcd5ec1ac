"""Division of deliveries and record locks among the priorities of one topic partition in a share group.

Records of a higher priority are delivered first. To avoid starvation, each lower priority with available records gets
at least one of `SHARE_RECORDS` deliveries, so that of any `WINDOW_RECORDS` deliveries it gets at least one in 16. Each
priority has a reserved part of the record locks, so that slow members with records of one priority do not keep all
others from being delivered.

A lower priority that waits while records of others are delivered accumulates one *due* part for each of them. A record
of it is owed for every `SHARE_RECORDS` parts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from mansio.wire.batch.priority_header import PRIORITIES, Priority

if TYPE_CHECKING:
    from collections.abc import Mapping

SHARE_RECORDS: Final = 15
"""A lower priority with available records gets one of so many deliveries. With 16, two lower priorities whose records
are owed at the same time could miss the guarantee by one."""

WINDOW_RECORDS: Final = 256
"""Number of consecutive deliveries for which the guarantee holds."""

RESERVED_LOCKS_DIVISOR: Final = 16
"""Each priority has this fraction of the record locks for itself."""


class PriorityLimit(NamedTuple):
    """The maximum number of records of one priority to deliver now."""

    priority: Priority
    records: int


class PriorityShares:
    """How many records of each priority are delivered next: the `AcquisitionOrder` of a topic with priorities."""

    __slots__ = ("_due",)

    may_exceed = True
    measures_leases = False

    def __init__(self) -> None:
        self._due: dict[Priority, int] = dict.fromkeys(PRIORITIES[1:], 0)

    def divide(self, records_max: int, available: Mapping[int, int]) -> list[PriorityLimit]:
        """Divide at most `records_max` deliveries, in the order in which the records are to be acquired.

        `available`: number of records of each priority that can be acquired now; it may be less than there are, but not
        0. A priority whose owed records did not fit into earlier responses comes first."""
        left = records_max
        limits = dict.fromkeys(PRIORITIES, 0)
        for priority in sorted(self._due, key=self._due.__getitem__, reverse=True):
            if any(available[higher] for higher in PRIORITIES[: PRIORITIES.index(priority)]):
                owed = (self._due[priority] + records_max) // SHARE_RECORDS
                limits[priority] = min(owed, available[priority], left)
                left -= limits[priority]
        for priority in PRIORITIES:
            added = min(available[priority] - limits[priority], left)
            limits[priority] += added
            left -= added
        order = sorted(
            PRIORITIES, key=lambda each: self._due.get(each, 0) < 2 * SHARE_RECORDS
        )  # stable: otherwise by priority
        return [PriorityLimit(priority, limits[priority]) for priority in order if limits[priority]]

    def record(self, delivered: Mapping[int, int], available: Mapping[int, int]) -> None:
        """Record deliveries. `available`: as in `divide`, before these deliveries."""
        total = sum(delivered.values())
        for priority, due in self._due.items():
            own = delivered.get(priority, 0)
            is_waiting = available[priority] > own
            due += total - own - (SHARE_RECORDS - 1) * own
            self._due[priority] = max(due, 0) if is_waiting else 0

    def record_end(self, number: int, records: int, held_ms: float) -> None:
        """Do nothing: deliveries are divided by their number."""

    @staticmethod
    def free_locks(number: int, leased: Mapping[int, int], locks_max: int) -> int:
        """Return how many more records of a priority may be leased, if `leased` are now, and at most `locks_max` in
        all."""
        reserved = max(locks_max // RESERVED_LOCKS_DIVISOR, 1)
        kept = sum(max(reserved - leased[other], 0) for other in PRIORITIES if other != number)
        return locks_max - sum(leased.values()) - kept
