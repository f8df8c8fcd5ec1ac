"""Recurring schedules of one partition, ordered by the time at which they are due.

A view of the control batches in the partition's log. It has the whole schedules, which are bounded in number and size
when they are created, and the offset of the control batch with the latest definition of each.

Invariants:
* Schedules with the same due time are ordered by name.
* A schedule changes only with the log; `postpone` changes when it is looked at again, not when it is due.
"""

from __future__ import annotations

import heapq
import struct
from typing import TYPE_CHECKING, Final, NamedTuple

from mansio.errors import CorruptLog, CorruptMessage
from mansio.wire.batch.schedule_control_records import NOT_DUE_MS, decode_schedules, encode_schedules

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from uuid import UUID

    from mansio.wire.batch.schedule_control_records import Firing, Schedule

OUTDATED_ENTRIES_MAX: Final = 64

_COUNT: Final = struct.Struct(">I")
_LOCATION: Final = struct.Struct(">q")


class Schedules:
    """The schedules of a partition."""

    __slots__ = ("_entries", "_order", "size_bytes")

    def __init__(self) -> None:
        self._entries: dict[UUID, _Entry] = {}
        self._order: list[tuple[int, str, UUID]] = []
        """Heap of (wake-up in ms, name, id); entries that differ from `_entries` are ignored."""
        self.size_bytes = 0
        """Size of the records of all schedules: keys, values and headers."""

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, schedule_id: UUID) -> bool:
        return schedule_id in self._entries

    def __iter__(self) -> Iterator[Schedule]:
        return (entry.schedule for entry in self._entries.values())

    # Changes

    def put(self, schedule: Schedule, location: int) -> None:
        """Add a schedule, or replace the one with its id. `location`: offset of the control batch that defines it."""
        self.remove(schedule.id)
        self.size_bytes += record_bytes(schedule)
        self._set(_Entry(schedule, location, schedule.next_due_ms))

    def remove(self, schedule_id: UUID) -> None:
        """Remove a schedule, if it exists."""
        entry = self._entries.pop(schedule_id, None)
        if entry is not None:
            self.size_bytes -= record_bytes(entry.schedule)

    def apply_firings(self, firings: Sequence[Firing]) -> None:
        """Apply firings whose records are in the log."""
        for firing in firings:
            entry = self._entries.get(firing.schedule_id)
            if entry is not None:
                schedule = entry.schedule._replace(firings=firing.number, next_due_ms=firing.next_due_ms)
                self._set(_Entry(schedule, entry.location, schedule.next_due_ms))

    def postpone(self, schedule_id: UUID, wake_ms: int) -> None:
        """Look at a schedule again at this time, because it cannot fire now. Its due time stays the same."""
        self._set(self._entries[schedule_id]._replace(wake_ms=wake_ms))

    def limit_postponed(self, wake_ms: int) -> None:
        """Look at each postponed schedule again at this time, or earlier."""
        for entry in [*self._entries.values()]:
            earliest_ms = max(wake_ms, entry.schedule.next_due_ms)
            if entry.wake_ms > earliest_ms:
                self._set(entry._replace(wake_ms=earliest_ms))

    # Queries

    @property
    def next_wake_ms(self) -> int | None:
        """When the earliest schedule is due; None if none is."""
        order = self._order
        while order:
            wake_ms, _, schedule_id = order[0]
            entry = self._entries.get(schedule_id)
            if entry is not None and entry.wake_ms == wake_ms:
                return wake_ms
            heapq.heappop(order)
        return None

    def find(self, name: str) -> Schedule | None:
        """Return a schedule by its name."""
        return next((one for one in self if one.name == name), None)

    def due(self, now_ms: int, count_max: int) -> list[Schedule]:
        """Return the first schedules that are due, in order."""
        due = (
            (entry.schedule.next_due_ms, entry.schedule.name, entry.schedule)
            for entry in self._entries.values()
            if entry.wake_ms != NOT_DUE_MS and entry.wake_ms <= now_ms
        )
        return [schedule for _, _, schedule in heapq.nsmallest(count_max, due)]

    def lowest_location(self) -> int | None:
        """Return the lowest location; None if there is no schedule."""
        return min((entry.location for entry in self._entries.values()), default=None)

    def located_below(self, location: int) -> list[Schedule]:
        """Return the schedules whose location is below an offset."""
        return [entry.schedule for entry in self._entries.values() if entry.location < location]

    # Snapshots

    def freeze(self) -> FrozenSchedules:
        """Return the schedules as they are now."""
        return FrozenSchedules([(entry.schedule, entry.location) for entry in self._entries.values()])

    @classmethod
    def from_bytes(cls, data: bytes) -> Schedules:
        """Load the schedules of `FrozenSchedules.to_bytes`. Raises `CorruptLog`."""
        schedules = cls()
        try:
            (count,) = _COUNT.unpack_from(data)
            begin = _COUNT.size + count * _LOCATION.size
            locations = [location for (location,) in _LOCATION.iter_unpack(data[_COUNT.size : begin])]
            if count:
                for schedule, location in zip(
                    decode_schedules(memoryview(data)[begin:]), locations, strict=True
                ):
                    schedules.put(schedule, location)
        except (struct.error, ValueError, CorruptMessage) as error:
            raise CorruptLog("a snapshot of schedules is incomplete") from error
        return schedules

    def _set(self, entry: _Entry) -> None:
        schedule = entry.schedule
        self._entries[schedule.id] = entry
        if entry.wake_ms == NOT_DUE_MS:
            return
        heapq.heappush(self._order, (entry.wake_ms, schedule.name, schedule.id))
        if len(self._order) > 2 * len(self._entries) + OUTDATED_ENTRIES_MAX:
            self._order = [
                (one.wake_ms, one.schedule.name, one.schedule.id)
                for one in self._entries.values()
                if one.wake_ms != NOT_DUE_MS
            ]
            heapq.heapify(self._order)


class FrozenSchedules(NamedTuple):
    """The schedules at one moment, with their locations, for a snapshot that another thread writes."""

    entries: Sequence[tuple[Schedule, int]]

    def to_bytes(self) -> bytes:
        """Encode the schedules for `Schedules.from_bytes`."""
        if not self.entries:
            return _COUNT.pack(0)
        schedules, locations = zip(*self.entries, strict=True)
        return b"".join(
            (_COUNT.pack(len(schedules)), *map(_LOCATION.pack, locations), encode_schedules(schedules))
        )


class _Entry(NamedTuple):
    schedule: Schedule
    location: int
    wake_ms: int


def record_bytes(schedule: Schedule) -> int:
    """Return the size of the key, value and headers of a schedule's record."""
    headers = [part for header in schedule.headers for part in header]
    parts: Iterable[bytes | str | None] = (
        schedule.key,
        schedule.value,
        *headers,
    )
    return sum(len(part) for part in parts if part)
