"""Division of deliveries and record locks among the share partitions of a fair group: start-time fair queueing.

Each share partition has a virtual time, in milliseconds of leases for each key that waits in it. It advances by the mean
duration of a lease when a record is delivered, and by the difference to the real duration when the lease ends. The share
partition with the lowest virtual time is served next. One that had no record to deliver continues from the present
virtual time: it has no credit for the time in which it was idle. A lease that expires or is released counts as the mean,
so a worker that crashes costs a key nothing.

Deliveries are work conserving: what one share partition cannot use goes to the others.

Source: Goyal, Vin and Cheng, Start-time Fair Queueing (1996). Record locks: dynamic thresholds of Choudhury and Hahne
(1998), so that a backlog queue never takes all locks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from mansio.state.share_partition.types import BASE

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

TURN_DIVISOR: Final = 8
"""A share partition gets up to this part of a response at a time, because adjacent records are in the same batches."""

_MEAN_WEIGHT: Final = 0.1
"""Weight of the last lease in the mean duration."""

_LEASE_MS_MIN: Final = 1.0
"""Shorter leases count as this long: then the number of records decides."""

_LEASE_MEANS_MAX: Final = 10
"""A lease counts as at most so many times the mean: otherwise, after one long lease of one key, all keys of its share
partition would wait until the others had as much."""


class FairOrder:
    """The `AcquisitionOrder` of a fair group."""

    __slots__ = ("_mean_ms", "_mean_of_all_ms", "_now", "_times", "_weight_of")

    def __init__(self, weight_of: Callable[[int], int]) -> None:
        """`weight_of`: returns the number of keys that wait in a share partition, at least 1."""
        self._weight_of = weight_of
        self._now = 0.0
        """The present virtual time: that of the share partition that is served next."""
        self._times: dict[int, float] = {}
        self._mean_ms: dict[int, float] = {}
        """By share partition, the mean duration of its leases."""
        self._mean_of_all_ms = _LEASE_MS_MIN

    def divide(self, records_max: int, available: Mapping[int, int]) -> list[tuple[int, int]]:
        """Return (number, records) in the order of acquisition. See `AcquisitionOrder`."""
        waiting = {number: count for number, count in available.items() if count}
        if len(waiting) < 2:
            return [(number, min(count, records_max)) for number, count in waiting.items()]
        times = {number: self._time_of(number) for number in waiting}
        costs = {number: self._cost_of(number) for number in waiting}
        turn = max(records_max // TURN_DIVISOR, 1)
        found: list[tuple[int, int]] = []
        left = records_max
        while left > 0 and waiting:
            number = min(waiting, key=lambda each: (times[each], each))
            records = min(turn, left, waiting[number])
            if found and found[-1][0] == number:
                found[-1] = (number, found[-1][1] + records)
            else:
                found.append((number, records))
            times[number] += records * costs[number]
            waiting[number] -= records
            left -= records
            if not waiting[number]:
                del waiting[number]
        return found

    def record(self, delivered: Mapping[int, int], available: Mapping[int, int]) -> None:
        """Record deliveries. See `AcquisitionOrder`."""
        served = [number for number in delivered if delivered[number]]
        if not served:
            return
        times = self._times
        for number in served:
            times[number] = self._time_of(number) + delivered[number] * self._cost_of(number)
        waiting = [
            self._time_of(number) for number in available if available[number] > delivered.get(number, 0)
        ]
        self._now = max(self._now, min(waiting) if waiting else max(times[number] for number in served))

    def record_end(self, number: int, records: int, held_ms: float) -> None:
        """Record the end of leases that lasted `held_ms` together, for so many records that were acknowledged."""
        mean = self._mean_of(number)
        each_ms = min(max(held_ms / records, _LEASE_MS_MIN), mean * _LEASE_MEANS_MAX)
        if number in self._times:
            self._times[number] += records * (each_ms - mean) / self._weight_of(number)
        weight = min(records * _MEAN_WEIGHT, 1.0)
        self._mean_ms[number] = mean + (each_ms - mean) * weight
        self._mean_of_all_ms += (each_ms - self._mean_of_all_ms) * weight

    def free_locks(self, number: int, leased: Mapping[int, int], locks_max: int) -> int:
        """Return how many more records of a share partition may be leased: all free ones for `BASE`; for a backlog queue so many
        that it has no more than remain free."""
        free = locks_max - sum(leased.values())
        return free if number == BASE else max((free - leased[number] + 1) // 2, 0)

    def _time_of(self, number: int) -> float:
        return max(self._times.get(number, 0.0), self._now)

    def _cost_of(self, number: int) -> float:
        return self._mean_of(number) / self._weight_of(number)

    def _mean_of(self, number: int) -> float:
        """Return the mean duration of the leases of a share partition; that of all until one was acknowledged."""
        return self._mean_ms.get(number, self._mean_of_all_ms)
