"""Pending records of one partition, ordered by the time at which they are due.

A view of the control batches in the partition's log. It has where each record is stored, not its content, and takes 32
bytes per record: new records go to a small heap, and each time that has `RUN_RECORDS_MAX` of them, they become a *run*,
five arrays sorted by due time. The earliest record is the smallest first one of all runs and of the heap, so delivery
needs no merging; a run that has lost three quarters of its records is dissolved into the heap.

Invariants:
* Records with the same due time are ordered by id, which is the order in which they were accepted.
* An id is pending at most once.
* Memory is bounded by four times the pending records, plus one run: outdated heap entries are dropped when they are
  more than the others.
* A record that is postponed is pending like any other; only its delivery waits.
"""

from __future__ import annotations

import heapq
import struct
import sys
from array import array
from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING, Final, NamedTuple

from mansio.errors import CorruptLog

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

RUN_RECORDS_MAX: Final = 4096
_DISSOLVED_BELOW: Final = 4
"""A run is dissolved when less than this fraction (one in so many) of its records is still pending."""

_VERSION: Final = 1
_SNAPSHOT_HEAD: Final = struct.Struct(">HI")  # version, number of runs
_RUN_HEAD: Final = struct.Struct(">I")
_ROW_BYTES: Final = 32
_OUTDATED_MAX: Final = 64
"""Number of outdated heap entries that is always allowed."""

_BEFORE_ALL: Final = -(1 << 63)
_BEGIN: Final = (_BEFORE_ALL, _BEFORE_ALL)


class PendingRecord(NamedTuple):
    """One pending record.

    `due_ms`: since the Unix epoch; `id`: the offset at which it was accepted; `location`: the offset of the control
    batch that contains it; `position` and `size`: of the encoded record among the decompressed records there.
    """

    due_ms: int
    id: int
    location: int
    position: int
    size: int


class PendingRecords:
    """The pending records of a partition."""

    __slots__ = ("_heads", "_postponed", "_recent", "_recent_order", "_runs", "count", "size_bytes")

    def __init__(self) -> None:
        self.count = 0
        self.size_bytes = 0
        """Size of the encoded pending records."""
        self._recent: dict[int, PendingRecord] = {}
        self._recent_order: list[tuple[int, int]] = []
        """Heap of (due_ms, id); entries that are not in `_recent` with this due time are ignored."""
        self._runs: dict[_Run, None] = {}
        self._heads: list[tuple[int, int, _Run]] = []
        """Heap of the first pending record of each run: due_ms, id, run. Outdated entries are ignored."""
        self._postponed: dict[int, tuple[int, PendingRecord]] = {}
        """Records by id that are in neither heap, with the time at which they are due again."""

    def __len__(self) -> int:
        return self.count

    # Changes

    def add(self, record: PendingRecord) -> None:
        """Add a record whose id is not pending."""
        self.count += 1
        self.size_bytes += record.size
        self._recent[record.id] = record
        heapq.heappush(self._recent_order, (record.due_ms, record.id))
        if len(self._recent) >= RUN_RECORDS_MAX:
            self._start_run()

    def replace(self, record: PendingRecord) -> None:
        """Add a record; it replaces one with the same id."""
        self.remove(record.id)
        self.add(record)

    def remove(self, record_id: int) -> PendingRecord | None:
        """Remove and return a record; None if the id is not pending."""
        record = self._recent.pop(record_id, None)
        if record is not None:
            self._drop_outdated_order()
        elif record_id in self._postponed:
            _, record = self._postponed.pop(record_id)
        else:
            for run in self._runs:
                record = run.remove(record_id)
                if record is not None:
                    self._on_removed_from(run)
                    break
            else:
                return None
        self._count_removed(record)
        return record

    def remove_delivered(self, ids: Sequence[int]) -> int:
        """Remove records that were delivered together; returns how many were pending. Fast if they are the earliest
        ones."""
        wanted = {*ids}
        removed = 0
        while wanted and (first := self._first()) is not None and first.id in wanted:
            self._pop_first(first)
            wanted.remove(first.id)
            removed += 1
        return removed + sum(self.remove(record_id) is not None for record_id in wanted)

    def postpone(self, record: PendingRecord, until_ms: int) -> None:
        """Add a record, or replace the one with its id, which `take_due` does not return before `until_ms`."""
        self.remove(record.id)
        self._postponed[record.id] = (until_ms, record)
        self.count += 1
        self.size_bytes += record.size

    def take_due(self, now_ms: int, records_max: int, bytes_max: int) -> list[PendingRecord]:
        """Remove and return the earliest records that are due, at least one of them, at most `records_max` and
        `bytes_max`."""
        for until_ms, record in [*self._postponed.values()]:
            if until_ms <= now_ms:
                self.replace(record)
        taken: list[PendingRecord] = []
        size = 0
        while len(taken) < records_max and (first := self._first()) is not None and first.due_ms <= now_ms:
            size += first.size
            if taken and size > bytes_max:
                break
            self._pop_first(first)
            taken.append(first)
        return taken

    # Queries

    @property
    def next_due_ms(self) -> int | None:
        """When the earliest record is due, or may be delivered again after it was postponed; None if none is
        pending."""
        first = self._first()
        times = [until_ms for until_ms, _ in self._postponed.values()]
        if first is not None:
            times.append(first.due_ms)
        return min(times, default=None)

    def find(self, record_id: int) -> PendingRecord | None:
        """Return a record by its id; None if it is not pending."""
        found = self._recent.get(record_id)
        if found is not None:
            return found
        if record_id in self._postponed:
            return self._postponed[record_id][1]
        return next((found for run in self._runs if (found := run.find(record_id)) is not None), None)

    def select(
        self, due_from_ms: int, due_to_ms: int, after: tuple[int, int] | None = None
    ) -> Iterator[PendingRecord]:
        """Yield the records that are due in [due_from_ms, due_to_ms), in order, from behind `after` (due_ms, id) on.

        The records must not change while the iterator is in use."""
        begin = (due_from_ms, _BEFORE_ALL)
        if after is not None and after >= begin:
            begin = (after[0], after[1] + 1)
        recent = sorted(record for record in self._unsorted() if record[:2] >= begin)
        for record in heapq.merge(recent, *(run.select(begin) for run in self._runs)):
            if record.due_ms >= due_to_ms:
                return
            yield record

    def lowest_location(self) -> int | None:
        """Return a lower bound of the locations of all records; None if none is pending."""
        bounds = [run.lowest_location for run in self._runs]
        bounds += [record.location for record in self._unsorted()]
        return min(bounds, default=None)

    def located_below(
        self, location: int, records_max: int, without: Collection[int] = ()
    ) -> list[PendingRecord]:
        """Return at most `records_max` records whose location is below an offset, without the ids `without`."""
        found = [
            record for record in self._unsorted() if record.location < location and record.id not in without
        ]
        for run in self._runs:
            if len(found) >= records_max:
                break
            if run.lowest_location < location:
                inside = [record for record in run.select(_BEGIN) if record.location < location]
                if inside:
                    found += [record for record in inside if record.id not in without]
                else:
                    run.lowest_location = min(record.location for record in run.select(_BEGIN))
        return found[:records_max]

    def _unsorted(self) -> Iterator[PendingRecord]:
        """Yield the records that are in no run."""
        yield from self._recent.values()
        for _, record in self._postponed.values():
            yield record

    # Snapshots

    def freeze(self) -> FrozenRecords:
        """Return the records as they are now. Takes time for the runs, not for the records in them."""
        return FrozenRecords([*self._unsorted()], [run.copy() for run in self._runs])

    @classmethod
    def from_bytes(cls, data: bytes) -> PendingRecords:
        """Load the records of `FrozenRecords.to_bytes`. Raises `CorruptLog`."""
        records = cls()
        try:
            version, count = _SNAPSHOT_HEAD.unpack_from(data)
            if version != _VERSION:
                raise CorruptLog(f"version {version} of a snapshot of pending records is unknown")
            position = _SNAPSHOT_HEAD.size
            for _ in range(count):
                (rows,) = _RUN_HEAD.unpack_from(data, position)
                position += _RUN_HEAD.size
                end = position + rows * _ROW_BYTES
                if not rows or end > len(data):
                    raise CorruptLog("a snapshot of pending records is incomplete")
                records._add_run(_Run.from_bytes(data[position:end], rows))
                position = end
        except struct.error as error:
            raise CorruptLog("a snapshot of pending records is incomplete") from error
        return records

    # Runs

    def _first(self) -> PendingRecord | None:
        """Return the earliest record."""
        order, heads = self._recent_order, self._heads
        recent: PendingRecord | None = None
        while order:
            due_ms, record_id = order[0]
            recent = self._recent.get(record_id)
            if recent is not None and recent.due_ms == due_ms:
                break
            recent = None
            heapq.heappop(order)
        while heads:
            due_ms, record_id, run = heads[0]
            if run.live_count and run.ids[run.head] == record_id:
                if recent is None or (due_ms, record_id) < (recent.due_ms, recent.id):
                    return run.row(run.head)
                break
            heapq.heappop(heads)
        return recent

    def _pop_first(self, first: PendingRecord) -> None:
        """Remove the record that `_first` has returned."""
        if self._recent.get(first.id) is first:
            del self._recent[first.id]
            heapq.heappop(self._recent_order)
        else:
            run = self._heads[0][2]
            run.remove_at(run.head)
            self._on_removed_from(run)
        self._count_removed(first)

    def _count_removed(self, record: PendingRecord) -> None:
        self.count -= 1
        self.size_bytes -= record.size

    def _start_run(self) -> None:
        """Make a run of the recent records."""
        run = _Run(sorted(self._recent.values()))
        self._recent.clear()
        self._recent_order.clear()
        self._runs[run] = None
        self._push_head(run)

    def _add_run(self, run: _Run) -> None:
        self.count += run.live_count
        self.size_bytes += sum(run.sizes)
        self._runs[run] = None
        self._push_head(run)

    def _push_head(self, run: _Run) -> None:
        heapq.heappush(self._heads, (run.due_ms[run.head], run.ids[run.head], run))
        if len(self._heads) > 2 * len(self._runs) + _OUTDATED_MAX:
            self._heads = [(each.due_ms[each.head], each.ids[each.head], each) for each in self._runs]
            heapq.heapify(self._heads)

    def _drop_outdated_order(self) -> None:
        if len(self._recent_order) > 2 * len(self._recent) + _OUTDATED_MAX:
            self._recent_order = [(record.due_ms, record.id) for record in self._recent.values()]
            heapq.heapify(self._recent_order)

    def _on_removed_from(self, run: _Run) -> None:
        """Drop a run that is empty, dissolve one that is mostly empty, and note another one's first record."""
        if not run.live_count:
            del self._runs[run]
        elif run.live_count * _DISSOLVED_BELOW < len(run.ids):
            del self._runs[run]
            rows = list(run.select(_BEGIN))
            run.live_count = 0
            for record in rows:
                self._count_removed(record)
                self.add(record)
        elif not self._heads or self._heads[0][2] is not run or self._heads[0][1] != run.ids[run.head]:
            self._push_head(run)


class FrozenRecords(NamedTuple):
    """The pending records at one moment, for a snapshot that another thread writes."""

    recent: Sequence[PendingRecord]
    runs: Sequence[_Run]

    def to_bytes(self) -> bytes:
        """Encode the records for `PendingRecords.from_bytes`."""
        runs = [*self.runs]
        if self.recent:
            runs.append(_Run(sorted(self.recent)))
        parts = [_SNAPSHOT_HEAD.pack(_VERSION, len(runs))]
        for run in runs:
            parts += [_RUN_HEAD.pack(run.live_count), run.to_bytes()]
        return b"".join(parts)


class _Run:
    """Records sorted by due time and id, as arrays. Only `head`, `live` and the counts change.

    Comparable by identity, so that heap entries with equal due time and id can be compared."""

    __slots__ = (
        "due_ms",
        "head",
        "highest_id",
        "ids",
        "live",
        "live_count",
        "locations",
        "lowest_id",
        "lowest_location",
        "order_by_id",
        "positions",
        "sizes",
    )

    def __init__(self, records: Sequence[PendingRecord]) -> None:
        due_ms, ids, locations, positions, sizes = zip(*records, strict=True)
        self._set_columns(
            array("q", due_ms),
            array("q", ids),
            array("q", locations),
            array("I", positions),
            array("I", sizes),
        )

    def _set_columns(
        self,
        due_ms: array[int],
        ids: array[int],
        locations: array[int],
        positions: array[int],
        sizes: array[int],
    ) -> None:
        self.due_ms, self.ids, self.locations = due_ms, ids, locations
        self.positions, self.sizes = positions, sizes
        self.lowest_id, self.highest_id = min(ids), max(ids)
        self.order_by_id: array[int] | None = None
        """Indexes in the order of the ids; made when the run is first searched for an id."""
        self.lowest_location = min(locations)
        """A lower bound of the locations of the records that are still pending."""
        self.head = 0
        """Index of the first record that is still pending."""
        self.live_count = len(ids)
        self.live: bytearray | None = None
        """Per record whether it is still pending; None while exactly those from `head` on are."""

    def __lt__(self, other: _Run) -> bool:
        return id(self) < id(other)

    def row(self, index: int) -> PendingRecord:
        return PendingRecord(
            self.due_ms[index],
            self.ids[index],
            self.locations[index],
            self.positions[index],
            self.sizes[index],
        )

    def select(self, begin: tuple[int, int]) -> Iterator[PendingRecord]:
        """Yield the pending records from (due_ms, id) `begin` on."""
        due_ms, ids, live = self.due_ms, self.ids, self.live
        index = bisect_left(due_ms, begin[0], self.head)
        index = bisect_left(ids, begin[1], index, bisect_right(due_ms, begin[0], index))
        for at in range(index, len(ids)):
            if live is None or live[at]:
                yield self.row(at)

    def find(self, record_id: int) -> PendingRecord | None:
        index = self._index(record_id)
        return None if index is None else self.row(index)

    def remove(self, record_id: int) -> PendingRecord | None:
        index = self._index(record_id)
        if index is None:
            return None
        found = self.row(index)
        self.remove_at(index)
        return found

    def remove_at(self, index: int) -> None:
        self.live_count -= 1
        if index == self.head:
            index += 1
            live = self.live
            if live is not None:
                live[index - 1] = 0
                index = live.find(1, index) if self.live_count else len(live)
            self.head = index
            return
        if self.live is None:
            self.live = bytearray(self.head) + bytearray(b"\1") * (len(self.ids) - self.head)
        self.live[index] = 0

    def _index(self, record_id: int) -> int | None:
        """Return the index of a pending record; None if the run does not have it."""
        if not self.lowest_id <= record_id <= self.highest_id:
            return None
        order = self.order_by_id
        if order is None:
            order = self.order_by_id = array("I", sorted(range(len(self.ids)), key=self.ids.__getitem__))
        position = bisect_left(order, record_id, key=self.ids.__getitem__)
        index = order[position]
        if self.ids[index] != record_id:
            return None
        return index if index >= self.head and (self.live is None or self.live[index]) else None

    def copy(self) -> _Run:
        """Return a run whose records do not change when this one's do."""
        other = _Run.__new__(_Run)
        for name in _Run.__slots__:
            setattr(other, name, getattr(self, name))
        if self.live is not None:
            other.live = self.live[:]
        return other

    def to_bytes(self) -> bytes:
        """Encode the pending records in columns."""
        run = self if self.live_count == len(self.ids) else _Run([*self.select(_BEGIN)])
        columns = (run.due_ms, run.ids, run.locations, run.positions, run.sizes)
        return b"".join(map(_little_endian, columns))

    @classmethod
    def from_bytes(cls, data: bytes, count: int) -> _Run:
        run = cls.__new__(cls)
        columns = []
        position = 0
        for code, size in (("q", 8), ("q", 8), ("q", 8), ("I", 4), ("I", 4)):
            column = array(code, data[position : position + size * count])
            if sys.byteorder == "big":
                column.byteswap()
            columns.append(column)
            position += size * count
        run._set_columns(*columns)
        return run


def _little_endian(column: array[int]) -> bytes:
    if sys.byteorder == "big":
        column = column[:]
        column.byteswap()
    return column.tobytes()
