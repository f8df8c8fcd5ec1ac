"""Which share partition of a fair group has which offset of a topic partition.

Records wait in the share partition `BASE` in the order of the log, as in a group without fairness. When more than a few
records of one group key wait there, the key is *isolated*: its later records are in a *backlog queue*, a share
partition of its own (`types.BACKLOG_QUEUES`), so that those of other keys do not wait for them (`fair_order` divides
the deliveries). When all records of the key in the backlog queue are delivered, its next ones are in `BASE` again.

        start        delivered                end           readable end
          | done or leased | waiting in BASE    | keys not read: not offered
          |                | and in backlog queues       |

The leader reads the keys of the log in the order of the offsets (`add`). The numbers of offsets are not stored: the
isolations are, in the state of `BASE`, and the numbers follow from them and the log.

Invariants:
* Below `start` each record of a backlog queue was delivered: its state says which offsets are its own.
* No record is leased whose number is not decided (`end`), and no number changes once it is.
* A change of the isolations is stored before it takes effect: `add` stops at its offset and returns it, and `apply`
  continues. So a leader that loads the state finds the same numbers below `decided_end`.
* An isolation begins at or above each offset of its backlog queue that was leased or passed before.
* The records of a key that wait in `BASE` are at most `_backlog_max`, as long as a backlog queue may be added.
* At most `ISOLATIONS_MAX` isolations are stored.
"""

from __future__ import annotations

import hashlib
from collections import Counter, deque
from typing import TYPE_CHECKING, ClassVar, Final

from mansio.state.share_partition.dead_letters import intersection
from mansio.state.share_partition.fairness.fair_order import FairOrder
from mansio.state.share_partition.offset_numbers import NumberedOffsets, NumberedRange, OffsetNumbers
from mansio.state.share_partition.types import BACKLOG_QUEUES, BASE, OPEN_END, Isolation

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    Isolations = tuple[Isolation, ...]
    Keys = Sequence[tuple[int, bytes | None]]

BACKLOG_MAX: Final = 64
"""Number of records of a key that may wait in `BASE` while few keys are isolated."""

ISOLATED_KEYS_SCALE: Final = 16
"""The allowed backlog grows with the square of the number of isolated keys; with this number it is four times
`BACKLOG_MAX`. So keys with a large backlog find a backlog queue, even if many have a small one."""

ISOLATIONS_MAX: Final = 256

RECENT_RECORDS: Final = 2_000
"""Number of records among which the keys that are active in `BASE` are counted."""

COUNTED_ONE_BY_ONE_MAX: Final = 2_000
"""Number of waiting records above which several parts of the log are counted together, which takes less memory."""

COUNTED_TOGETHER: Final = 500
"""Number of records that are counted together."""

KEY_BYTES_MAX: Final = 64
"""Length up to which a key is stored as it is."""

_DIGEST_PREFIX: Final = b"\xff\x00sha256\x00"


class _IsolatedKey:
    """The isolations of one key, ascending; only the last one may be open. `last`: offset of its last record in a
    backlog queue."""

    __slots__ = ("isolations", "last")

    def __init__(self) -> None:
        self.isolations: list[Isolation] = []
        self.last = -1

    def number_at(self, offset: int) -> int:
        for isolation in self.isolations:
            if isolation.first <= offset < isolation.end:
                return isolation.number
        return BASE

    @property
    def is_open(self) -> bool:
        return self.isolations[-1].end == OPEN_END

    def see(self, offset: int) -> None:
        """Note a record of the key in a backlog queue."""
        self.last = offset


class FairIndex(OffsetNumbers):
    """The `ShareIndex` of one topic partition for a fair group."""

    __slots__ = (
        "_batches",
        "_counts_of_keys",
        "_delivered",
        "_former_keys",
        "_isolated",
        "_keys_of_queues",
        "_order",
        "_pinned",
        "_queues",
        "_recent_count",
        "_recent_keys",
        "_undelivered",
        "decided_end",
        "header",
        "is_active",
        "isolations",
        "waiting_count",
    )

    names: ClassVar[Mapping[int, str]] = {}

    def __init__(self, start: int, isolations: Isolations, decided_end: int, header: str) -> None:
        """`start`: offset below which the backlog queues have delivered their records (`forget`). `isolations`: the
        stored ones. `decided_end`: offset below which records may have been leased or passed: their numbers follow from
        the isolations. `header`: the header that has the group key; empty if it is the record's key."""
        super().__init__(start)
        self.decided_end = decided_end
        self.header = header
        self.is_active = True
        """Whether keys may be isolated; otherwise records from the last end of an isolation on are in `BASE`."""
        self.waiting_count = 0
        """Number of records in `BASE` that are not delivered, as far as the log was read."""
        self._counts_of_keys: dict[bytes, int] = {}
        """The numbers of these records by key."""
        self._batches: deque[tuple[int, int, dict[bytes, int]]] = deque()
        """The same for each part of the log that was added at once: its end, number of records, and those by key."""
        self._recent_keys: set[bytes] = set()
        self._former_keys: set[bytes] = set()
        """The keys of the last records of `BASE` that were read, and of the `RECENT_RECORDS` before."""
        self._recent_count = 0
        self._delivered: dict[int, int] = {}
        """By backlog queue, the offset below which its records were delivered."""
        self._undelivered: dict[int, int] = {}
        """By share partition, the first offset that it may not have delivered yet."""
        self._pinned: dict[int, Sequence[tuple[int, int]]] = {}
        """By backlog queue, its offsets below `start` that are not done: ascending ranges."""
        self._queues: set[int] = set()
        self._keys_of_queues: Counter[int] = Counter()
        """By backlog queue, the number of keys that are isolated in it now."""
        self._isolated: dict[tuple[str, bytes], _IsolatedKey] = {}
        self._order = FairOrder(self._weight_of)
        self.isolations: Isolations = ()
        self.apply(isolations)
        self._queues = {each.number for each in isolations if each.end > start}

    # Queries

    @property
    def numbers(self) -> Sequence[int]:
        """`BASE` and the backlog queues in use, ascending."""
        return (BASE, *sorted(self._queues))

    @property
    def isolated_count(self) -> int:
        """Number of keys that are isolated now."""
        return self._keys_of_queues.total()

    def isolated_keys(self, keys_max: int) -> tuple[bytes, ...]:
        """Return some of the keys that are isolated now, at most so many; a long one as its digest."""
        return tuple(each.key for each in self.isolations if each.end == OPEN_END)[:keys_max]

    @property
    def has_open_isolation(self) -> bool:
        """Whether a key is isolated now."""
        return bool(self._keys_of_queues)

    def ranges(self, number: int, first: int, last: int) -> Iterator[tuple[int, int]]:
        """As in `OffsetNumbers`. Below `start`, all offsets are in `BASE`, which has passed those of others."""
        if first < self.start:
            low = (first, min(last, self.start - 1))
            yield from [low] if number == BASE else intersection(self._pinned.get(number, ()), [low])
        yield from super().ranges(number, first, last)

    def count(self, number: int, first: int, last: int) -> int:
        """As in `OffsetNumbers`, and as `ranges` below `start`."""
        found = super().count(number, first, last)
        if first < self.start:
            low = (first, min(last, self.start - 1))
            parts = [low] if number == BASE else intersection(self._pinned.get(number, ()), [low])
            found += sum(high - begin + 1 for begin, high in parts)
        return found

    def split(self, first: int, last: int) -> list[NumberedRange]:
        """As in `OffsetNumbers`. Below `start`, offsets that are not done have the numbers of their backlog queues."""
        if first >= self.start or not self._pinned:
            return super().split(first, last)
        low = (first, min(last, self.start - 1))
        pinned = sorted(
            NumberedRange(*part, number)
            for number, ranges in self._pinned.items()
            for part in intersection(ranges, [low])
        )
        found: list[NumberedRange] = []
        for part in pinned:
            if part.first > first:
                found += super().split(first, part.first - 1)
            found.append(part)
            first = part.last + 1
        return found + (super().split(first, last) if first <= last else [])

    def offsets_of(self, number: int) -> NumberedOffsets:
        """Return the offsets of one share partition."""
        return NumberedOffsets(self, number)

    def new_order(self) -> FairOrder:
        """Return the division of deliveries, which is the same object at each call."""
        return self._order

    def first_offset_of(self, number: int) -> int | None:
        """Return the offset at which a backlog queue without state begins; None if no key was isolated in it."""
        return min((each.first for each in self.isolations if each.number == number), default=None)

    def headers_at(self, offset: int) -> set[str]:
        """Return the headers with group keys of records at or above an offset."""
        found = {each.header for each in self.isolations if each.end > offset}
        return found | {self.header} if self.is_active else found

    def next_isolated_offset(self, offset: int) -> int:
        """Return the first offset from this one on that an isolation contains."""
        return min(
            (max(each.first, offset) for each in self.isolations if each.end > offset), default=OPEN_END
        )

    def _weight_of(self, number: int) -> int:
        """Return the number of keys of a share partition, at least 1: those that are isolated in it, or, of `BASE`,
        those of the last records that were read. A key with few records thus waits for none of one with a backlog,
        unless many others have as few: as in fair queueing of single keys, where the first record of each comes
        first."""
        if number == BASE:
            return max(len(self._recent_keys), len(self._former_keys), 1)
        return max(self._keys_of_queues.get(number, 0), 1)

    def _backlog_max(self) -> int:
        scale = 1 + self.isolated_count / ISOLATED_KEYS_SCALE
        return int(BACKLOG_MAX * scale * scale)

    # Progress of the share partitions

    def note_progress(self, number: int, delivered: int) -> None:
        """Note the offset below which the records of a share partition were delivered."""
        if number != BASE:
            self._delivered[number] = delivered
            return
        batches, counts = self._batches, self._counts_of_keys
        while batches and batches[0][0] <= delivered:
            _, records, keys = batches.popleft()
            self.waiting_count -= records
            for key, count in keys.items():
                if counts[key] == count:
                    del counts[key]
                else:
                    counts[key] -= count

    def note_undelivered(self, number: int, offset: int) -> None:
        """Note the first offset that a backlog queue may not have delivered yet; or that `BASE` has not passed, if it
        is one of others. According to updates that are stored."""
        self._undelivered[number] = offset

    def forget(self, pinned: Mapping[int, Sequence[tuple[int, int]]]) -> None:
        """Forget the numbers of offsets that all share partitions in use have delivered. `pinned`: by backlog queue,
        the ascending ranges of those that are not done, or dead-lettered; all others are done, also in `BASE`, which
        has passed them."""
        end = min(self._undelivered.get(number, 0) for number in self.numbers)
        self.drop_below(end)
        low = [(0, self.start - 1)]
        found = {number: intersection(ranges, low) for number, ranges in pinned.items()} if self.start else {}
        self._pinned = {number: ranges for number, ranges in found.items() if ranges}

    def pin(self, number: int, ranges: Sequence[tuple[int, int]]) -> None:
        """Set which offsets below `start` a backlog queue has, before the log is read; and those from there on that it
        has delivered, whatever their isolation was."""
        low = intersection(ranges, [(0, self.start - 1)]) if self.start else []
        if low:
            self._pinned[number] = low
        if ranges:
            self._queues.add(number)
        for first, last in ranges:
            if last >= self.start:
                self._set(max(first, self.start), last, number)

    def retire(self, number: int) -> None:
        """Remove a backlog queue whose records are all done, and that has no open isolation. It is added again with its
        next isolation."""
        self._queues.discard(number)

    def has_open_isolation_of(self, number: int) -> bool:
        """Whether a key is isolated in this backlog queue now."""
        return number in self._keys_of_queues

    # Changes of the isolations, which are to be stored

    def add(self, keys: Mapping[str, Keys], end: int) -> Isolations | None:
        """Add the offsets from `end` of the index to below the new end.

        `keys`: by each of `headers_at`, the ascending offsets of the records and their group keys. Returns None, or, if
        the records were only added up to one that begins or ends an isolation, the new isolations: after they are
        stored, the caller calls `apply`, and adds the rest."""
        ranges: list[NumberedRange] = []
        for header, found in keys.items():
            if header != self.header or not self.is_active:
                ranges += self._ranges_of_isolated(header, found, end)
        if not self.is_active:
            self.append(end, ranges)
            return None
        begin, decided, isolated, counts = self.end, self.decided_end, self._isolated, self._counts_of_keys
        header, backlog_max = self.header, self._backlog_max()
        added: dict[bytes, int] = {}
        records = 0
        base_end = begin  # end of the records in `BASE`
        first = last = -1  # offsets of the backlog queue `queue`, one after the other
        queue = BASE
        change: Isolations | None = None
        for offset, group_key in keys.get(header, ()):
            if offset < begin:
                continue
            if offset >= end:
                break
            if group_key is None:
                records += 1
                base_end = offset + 1
                continue
            key = group_key if len(group_key) <= KEY_BYTES_MAX else key_id(group_key)
            known = isolated.get((header, key)) if isolated else None
            if known is not None and (number := known.number_at(offset)):
                if offset >= decided and known.last < self._delivered.get(number, 0):
                    change = self._closed({(header, key): offset})
                    end = offset
                    break
                known.see(offset)
                if offset == last + 1 and number == queue:
                    last = offset
                    continue
                if queue:
                    ranges.append(NumberedRange(first, last, queue))
                first, last, queue = offset, offset, number
                continue
            count = counts.get(key, 0) + 1
            if (
                count > backlog_max
                and offset >= decided
                and (change := self._isolate(key, offset)) is not None
            ):
                end = offset
                break
            counts[key] = count
            added[key] = added.get(key, 0) + 1
            records += 1
            base_end = offset + 1
        if queue:
            ranges.append(NumberedRange(first, last, queue))
        self.append(end, ranges)
        if records:
            self._note_waiting(base_end, records, added)
        return change

    def _note_waiting(self, end: int, records: int, keys: dict[bytes, int]) -> None:
        """Add records to those that wait in `BASE`, of a long backlog many together."""
        self._recent_keys.update(keys)
        self._recent_count += records
        if self._recent_count >= RECENT_RECORDS:
            self._former_keys, self._recent_keys, self._recent_count = self._recent_keys, set(), 0
        is_long = self.waiting_count > COUNTED_ONE_BY_ONE_MAX
        self.waiting_count += records
        if is_long and self._batches[-1][1] < COUNTED_TOGETHER:
            _, before, counted = self._batches.pop()
            records += before
            for key, count in counted.items():
                keys[key] = keys.get(key, 0) + count
        self._batches.append((end, records, keys))

    def _ranges_of_isolated(self, header: str, keys: Keys, end: int) -> list[NumberedRange]:
        found = []
        for offset, group_key in keys:
            if group_key is None or not self.end <= offset < end:
                continue
            known = self._isolated.get((header, key_id(group_key)))
            if known is not None and (number := known.number_at(offset)):
                known.see(offset)
                found.append(NumberedRange(offset, offset, number))
        return found

    def _isolate(self, key: bytes, offset: int) -> Isolations | None:
        kept = self._kept_isolations()
        if len(kept) >= ISOLATIONS_MAX:
            return None
        keys_of = self._keys_of_queues
        number = min(BACKLOG_QUEUES, key=lambda each: (keys_of[each], each not in self._queues, each))
        return (*kept, Isolation(number, offset, OPEN_END, self.header, key))

    def _closed(self, ends: Mapping[tuple[str, bytes], int]) -> Isolations:
        """Return the isolations after the open ones of these keys end at these offsets."""
        return tuple(
            each._replace(end=max(ends[each.header, each.key], each.first))
            if each.end == OPEN_END and (each.header, each.key) in ends
            else each
            for each in self._kept_isolations()
        )

    def _kept_isolations(self) -> Isolations:
        """Return the isolations without those whose records are all delivered, but for the last one of each backlog
        queue, which shows that the backlog queue may have a state. Those that are kept begin where a record is not
        delivered, but not behind the last one of the key."""
        newest = {each.number: each for each in self.isolations}
        base_end, ends = self._undelivered.get(BASE, 0), self._undelivered
        delivered = {number: min(ends.get(number, 0), base_end) for number in newest}
        return tuple(
            each._replace(
                first=max(
                    each.first,
                    min(delivered[each.number], each.end, self._isolated[each.header, each.key].last),
                )
            )
            for each in self.isolations
            if each.end > delivered[each.number] or newest[each.number] is each
        )

    def close_drained(self) -> Isolations | None:
        """Return the isolations after those whose records are all delivered have ended; None if there are none."""
        ends = {
            name: key.last + 1
            for name, key in self._isolated.items()
            if key.is_open and key.last < self._delivered.get(key.isolations[-1].number, 0)
        }
        return self._closed(ends) if ends else None

    def close_all(self) -> Isolations | None:
        """Return the isolations after all have ended at the end of the index; None if none is open."""
        ends = {name: self.end for name, key in self._isolated.items() if key.is_open}
        return self._closed(ends) if ends else None

    def apply(self, isolations: Isolations) -> None:
        """Let isolations take effect, which are stored now."""
        last = {name: key.last for name, key in self._isolated.items()}
        self.isolations = isolations
        self._isolated = {}
        self._keys_of_queues = Counter(each.number for each in isolations if each.end == OPEN_END)
        for each in isolations:
            name = (each.header, each.key)
            key = self._isolated.setdefault(name, _IsolatedKey())
            key.isolations.append(each)
            key.see(max(last.get(name, -1), each.first))  # the isolation begins with a record of the key
            if each.end == OPEN_END:
                self._queues.add(each.number)

    def set_header(self, header: str) -> None:
        """Take the group keys of further records from another header. No isolation may be open."""
        self.header = header
        self._counts_of_keys.clear()
        self._batches = deque((end, records, {}) for end, records, _ in self._batches)

    def set_active(self, *, is_active: bool) -> None:
        """Set whether keys may be isolated. No isolation may be open when they may not any more."""
        self.is_active = is_active
        self._counts_of_keys.clear()
        self._batches.clear()
        self.waiting_count = 0


def key_id(group_key: bytes) -> bytes:
    """Return a group key as it is stored: a long one as a digest."""
    if len(group_key) <= KEY_BYTES_MAX:
        return group_key
    return _DIGEST_PREFIX + hashlib.sha256(group_key).digest()
