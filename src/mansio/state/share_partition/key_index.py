"""Records of a share partition by group key: which of them are offered in order by key, and within limits by key.

In order by key (`mansio.share.order=key`), while a record of a key is leased, in a backoff, withheld or being
dead-lettered, no later record of that key is offered; records of other keys are. One answer may contain several records
of a key, in the order of their offsets. One of them that is given back is offered again although the later ones are
still leased. Without order, all records of a key that can be leased are offered, lowest offset first. With limits
(`key_limits`), no more of them at once than the key has places.

The leader of the share partition adds the keys of the log in the order of the offsets (`add`). Nothing at or above
`scanned_end` is offered, so no record passes another one whose key is not known yet.

        start                     scanned_end                        log end
          | done, busy or free        | keys not known: not offered     |

The keys of records that are not done are kept, at most `UNDONE_RECORDS_MAX` of them, and those of the records that were
in flight when the state was loaded; beyond that, records wait until others are done. A key is represented by a hash:
two keys with the same hash wait for each other, which is correct and rare. Records without a key have no order and no
limit, and neither have offsets without a record.

Invariants:
* A *busy* offset can not be leased now: its state is not `FREE`. `_busy` contains the scanned ones that are not done.
* `_leased` contains the busy offsets with a key that are counted in the limits.
* In order by key, the scanned offsets of a key that are not done are a list, linked by `_following` and `_preceding`.
* Without order, `_free` contains the scanned offsets with a key that are neither busy nor done.
* `_ready` and `_taken` together have an entry for the candidate of each key that has a place: the first record of the
  key that can be leased; in order by key, it is the first one that is not done. Other entries are ignored. A key whose
  candidate waits for the rate is in `_waiting`.
"""

from __future__ import annotations

from bisect import bisect_right
from heapq import heapify, heappop, heappush
from operator import itemgetter
from typing import TYPE_CHECKING, Final, NamedTuple

from mansio.state.share_partition.free_offsets import FreeOffsets

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from mansio.state.share_partition.key_limits import KeyLimits

FREE: Final = 0
"""The record can be leased at once."""
LEASED: Final = 1
"""The record is or may be leased, or its last change is not stored."""
RESTING: Final = 2
"""The record is in a backoff or being dead-lettered."""
DONE: Final = 3
"""The record is accepted or archived, and that is stored."""

UNDONE_RECORDS_MAX: Final = 100_000
"""Maximum number of records that are not done and whose keys are known; a batch of records may exceed it."""

_READY_SPARE: Final = 64
"""Number of outdated entries in `_ready` that is always allowed."""

RUN_RECORDS_MAX: Final = 256
"""Maximum number of offsets in a range that is picked, because a range is computed as a whole."""

DUE_KEYS_MAX: Final = 1_000
"""Maximum number of keys for which a call of `advance` asks whether the rate allows a delivery."""

LISTED_KEYS_MAX: Final = 10
"""Maximum number of keys in `LimitedKeys`."""

COUNTED_RECORDS_MAX: Final = 10_000
"""Maximum number of records that one call of `held_back` counts."""

_RETRY_MS: Final = 1.0
"""Time after which a key asks again for a bucket."""


class LimitedKeys(NamedTuple):
    """Keys of a share partition with records that a limit by key holds back.

    `at_lease_limit`: number of keys whose records wait for the end of a lease. `at_rate_limit`: number of keys whose
    records wait for the rate, including those for which nothing waits any more until their time has come. `offsets`:
    the first waiting record of some of them."""

    at_lease_limit: int
    at_rate_limit: int
    offsets: tuple[int, ...]


class HeldBack(NamedTuple):
    """Records that wait for an earlier one in order: `offset`: the record for which most of them wait, `waiting`: how
    many these are, `total`: number of records that wait for any. `is_complete`: whether all were counted."""

    offset: int
    waiting: int
    total: int
    is_complete: bool


class KeyIndex:
    """Which records of a share partition its members can acquire, by group key."""

    __slots__ = (
        "_busy",
        "_due",
        "_first",
        "_following",
        "_free",
        "_is_ordered",
        "_keys",
        "_last",
        "_leased",
        "_limits",
        "_needed_until",
        "_now_ms",
        "_outdated",
        "_preceding",
        "_ready",
        "_taken",
        "_waiting",
        "change_count",
        "scanned_end",
    )

    def __init__(
        self,
        start: int,
        needed_until: int = 0,
        *,
        is_ordered: bool = True,
        limits: KeyLimits | None = None,
        now_ms: float = 0.0,
    ) -> None:
        """`needed_until`: offset below which all keys have to be known before a record is offered. `limits`: None for
        none."""
        self.scanned_end = start
        """Offset below which the keys of all records that are not done are known."""
        self._needed_until = needed_until
        self._is_ordered = is_ordered
        self._limits = limits
        self._now_ms = now_ms
        self._keys: dict[int, int | None] = {}
        """Hash of the key of each scanned offset that is not done; None without a key."""
        self._first: dict[int, int] = {}
        """The first offset of each key that is not done."""
        self._last: dict[int, int] = {}
        self._following: dict[int, int] = {}
        self._preceding: dict[int, int] = {}
        self._free: dict[int, FreeOffsets] = {}
        """Of each key that has free records. Without order only, as `_first` to `_preceding` are for order only."""
        self._outdated: set[int] = set()
        """See `FreeOffsets`."""
        self._busy: set[int] = set()
        self._leased: set[int] = set()
        self._ready: list[int] = []
        self._taken: list[int] = []
        """Offsets that the last iterator of `pick` has removed from `_ready`."""
        self._waiting: set[int] = set()
        self._due: list[tuple[float, int]] = []
        """Heap with the time at which the rate allows the next delivery, of each key in `_waiting`."""
        self.change_count = 0
        """Number of changes so far. What was picked is still right while it is the same, and that of the limits is."""

    @property
    def is_scanned(self) -> bool:
        """Whether the keys of all records are known that were in flight when the index was made."""
        return self.scanned_end >= self._needed_until

    @property
    def is_offering(self) -> bool:
        """Whether records are offered: all keys that may hold one of them are known."""
        if self.scanned_end < self._needed_until:
            return False
        return self._limits is None or self._limits.are_leases_known

    @property
    def is_full(self) -> bool:
        """Whether no more keys can be added now."""
        return len(self._keys) >= UNDONE_RECORDS_MAX and self.scanned_end >= self._needed_until

    @property
    def free_count(self) -> int:
        """Number of records that are not busy: an upper bound of the number that is offered."""
        return len(self._keys) - len(self._busy)

    @property
    def plan_id(self) -> int:
        """Number that changes with each change after which records that were picked may not be offered any more."""
        return self.change_count if self._limits is None else self.change_count + self._limits.change_count

    # Changes

    def add(self, end: int, keys: Mapping[int, int], undone: Iterable[tuple[int, int, int]]) -> None:
        """Add the keys of the offsets from `scanned_end` to below `end`.

        `keys`: hashes by offset, without the records that have no key. `undone`: ascending ranges (first, last, state)
        of the offsets that are not done."""
        self.scanned_end = end
        self.change_count += 1
        firsts, lasts = self._first, self._last
        for first, last, state in undone:
            for offset in range(first, last + 1):
                key = self._keys[offset] = keys.get(offset)
                if state != FREE:
                    self._busy.add(offset)
                    if state == LEASED and key is not None and self._limits is not None:
                        self._leased.add(offset)
                        self._limits.add_lease(key)
                if key is None:
                    if state == FREE:
                        heappush(self._ready, offset)
                elif not self._is_ordered:
                    if state == FREE:
                        self._add_free(key, offset)
                elif key in firsts:
                    before = lasts[key]
                    self._following[before], self._preceding[offset] = offset, before
                    lasts[key] = offset
                else:
                    firsts[key] = lasts[key] = offset
                    if state == FREE:
                        if self._limits is None:
                            heappush(self._ready, offset)
                        else:
                            self._offer(key)

    def on_changed(self, first: int, last: int, state: int) -> None:
        """Apply a change of the state of offsets."""
        last = min(last, self.scanned_end - 1)
        self.change_count += 1
        if state == FREE:
            self._mark_free(first, last)
        elif state == DONE:
            self._mark_done(first, last)
        elif self._limits is None:
            keys, busy = self._keys, self._busy
            for offset in range(first, last + 1):
                if offset in keys:
                    busy.add(offset)
        else:
            self._mark_busy(first, last, self._limits, is_leased=state == LEASED)

    def _mark_busy(self, first: int, last: int, limits: KeyLimits, *, is_leased: bool) -> None:
        keys, leased = self._keys, self._leased
        for offset in range(first, last + 1):
            if offset not in keys:
                continue
            key, was_free = keys[offset], offset not in self._busy
            self._busy.add(offset)
            if key is None:
                continue
            if is_leased and offset not in leased:
                leased.add(offset)
                limits.add_lease(key)
            if was_free and not self._is_ordered:
                self._remove_free(key, offset)
            if not is_leased and offset in leased:
                self._end_lease(offset, key)

    def _mark_free(self, first: int, last: int) -> None:
        for offset in range(first, last + 1):
            if offset not in self._busy:
                continue
            self._busy.remove(offset)
            key = self._keys[offset]
            if key is None:
                self._push_ready(offset)
                continue
            if offset in self._leased:
                self._end_lease(offset, key)
            if not self._is_ordered:
                self._add_free(key, offset)
            elif self._candidate(key) == offset:
                self._offer(key)

    def _mark_done(self, first: int, last: int) -> None:
        keys, firsts = self._keys, self._first
        for offset in range(first, last + 1):
            if offset not in keys:
                continue
            key, was_free = keys.pop(offset), offset not in self._busy
            self._busy.discard(offset)
            if key is None:
                continue
            if not self._is_ordered:
                if was_free:
                    self._remove_free(key, offset)
                elif offset in self._leased:
                    self._end_lease(offset, key)
                continue
            was_first = firsts[key] == offset
            self._unlink(key, offset)
            if offset in self._leased:
                self._end_lease(offset, key)
            if was_first and key in firsts:
                self._offer(key)

    def _unlink(self, key: int, offset: int) -> None:
        """Remove a record from the list of its key."""
        if self._first[key] == self._last[key]:
            del self._first[key], self._last[key]
            return
        following, preceding = self._following.pop(offset, None), self._preceding.pop(offset, None)
        if following is None:
            assert preceding is not None, "the only record of a key"
            self._last[key] = preceding
            del self._following[preceding]
        elif preceding is None:
            self._first[key] = following
            del self._preceding[following]
        else:
            self._following[preceding], self._preceding[following] = following, preceding

    def _add_free(self, key: int, offset: int) -> None:
        """Add a free record of a key without order."""
        free = self._free.get(key)
        if free is None:
            free = self._free[key] = FreeOffsets(self._outdated)
        free.add(offset)
        if free.first == offset:
            self._offer(key)

    def _remove_free(self, key: int, offset: int) -> None:
        """Remove a record of a key without order that is not free any more, and offer the next one."""
        free = self._free[key]
        was_first = free.first == offset
        free.remove(offset)
        if free.first is None:
            del self._free[key]
        elif was_first:
            self._offer(key)

    def _end_lease(self, offset: int, key: int) -> None:
        assert self._limits is not None, "leases are counted without limits"
        self._leased.remove(offset)
        self._limits.end_lease(key)

    def take_tokens(self, ranges: Iterable[tuple[int, int]], now_ms: float) -> None:
        """Take a token for each delivery that starts now, of records that were picked."""
        if self._limits is None:
            return
        for first, last in ranges:
            for offset in range(first, last + 1):
                key = self._keys.get(offset)
                if key is not None:
                    self._limits.take_token(key, now_ms)

    def drop_below(self, offset: int, log_start: int) -> None:
        """Forget the offsets below `offset`, and add no keys below the start of the log."""
        for known in [known for known in self._keys if known < offset]:
            self._mark_done(known, known)
        self.scanned_end = max(self.scanned_end, log_start)
        self.change_count += 1

    # Limits

    def advance(self, now_ms: float) -> None:
        """Offer records that the rate allows now. At most `DUE_KEYS_MAX` keys are asked; `next_due_ms` has come if
        there are more."""
        self._now_ms = now_ms
        due = self._due
        for _ in range(DUE_KEYS_MAX):
            if not due or due[0][0] > now_ms:
                return
            key = heappop(due)[1]
            self._waiting.remove(key)
            self._offer(key)

    @property
    def next_due_ms(self) -> float | None:
        """Time of the steady clock at which the rate may allow another record, in ms; None if no record waits for
        it."""
        return self._due[0][0] if self._due else None

    def on_place(self, key: int) -> None:
        """Offer a record of a key that has a free place again."""
        self._offer(key)

    def on_limits_changed(self, now_ms: float) -> None:
        """Ask for each key whether the new limits allow a record, in several calls of `advance`."""
        self.change_count += 1
        self._now_ms = now_ms
        self._waiting = {*(self._first if self._is_ordered else self._free)}
        self._due = [(now_ms, key) for key in self._waiting]
        heapify(self._due)

    def counted_keys(self) -> Iterable[int]:
        """Yield the key of each record that is counted as leased."""
        return (key for offset in self._leased if (key := self._keys[offset]) is not None)

    def limited_keys(self) -> LimitedKeys:
        """Return which keys have records that only a limit holds back."""
        if self._limits is None:
            return LimitedKeys(0, 0, ())
        waiting = [self._candidate(key) for key in self._limits.full_keys()]
        at_lease_limit = [offset for offset in waiting if offset is not None]
        offsets = at_lease_limit[:LISTED_KEYS_MAX]
        for _, key in self._due[:LISTED_KEYS_MAX]:
            offset = self._candidate(key)
            if offset is not None and len(offsets) < LISTED_KEYS_MAX:
                offsets.append(offset)
        return LimitedKeys(len(at_lease_limit), len(self._waiting), tuple(offsets))

    def held_back(self) -> HeldBack | None:
        """Return which record in flight holds back most later ones of its key; None if none does, or without order. The
        cost is bounded by `COUNTED_RECORDS_MAX`."""
        if not self._is_ordered:
            return None
        following, busy, left = self._following, self._busy, COUNTED_RECORDS_MAX
        worst, most, total = -1, 0, 0
        for first in self._first.values():
            left -= 1
            if left <= 0:
                break
            if first not in busy:
                continue
            waiting, offset = 0, following.get(first)
            while offset is not None and left > 0:
                waiting += offset not in busy
                offset = following.get(offset)
                left -= 1
            total += waiting
            if waiting > most:
                worst, most = first, waiting
        return HeldBack(worst, most, total, left > 0) if most else None

    # Candidates

    def _candidate(self, key: int) -> int | None:
        """Return the first record of a key that can be leased, as far as the limits allow it; None if there is none."""
        if self._is_ordered:
            first = self._first.get(key)
            return None if first in self._busy else first
        free = self._free.get(key)
        return None if free is None else free.first

    def _offer(self, key: int) -> None:
        """Add the candidate of a key to `_ready`; if the rate does not allow it yet, to those that wait."""
        offset = self._candidate(key)
        if offset is None:
            return
        limits = self._limits
        if limits is not None and limits.places(key, self._now_ms) <= 0:
            if key not in self._waiting and limits.has_place(key):
                due_ms = limits.due_ms(key)
                if due_ms <= self._now_ms:
                    due_ms = self._now_ms + _RETRY_MS
                self._waiting.add(key)
                heappush(self._due, (due_ms, key))
            return
        self._push_ready(offset)

    def _push_ready(self, offset: int) -> None:
        ready = self._ready
        heappush(ready, offset)
        if len(ready) > 2 * len(self._keys) + _READY_SPARE:
            self._ready = sorted(each for each in {*ready} if self._is_candidate(each))

    def _is_candidate(self, offset: int) -> bool:
        if offset not in self._keys or offset in self._busy:
            return False
        key = self._keys[offset]
        return key is None or self._candidate(key) == offset

    # Queries

    def pick(
        self,
        read: Sequence[tuple[int, int]] | None = None,
        unreadable: Sequence[tuple[int, int]] = (),
        run_max: int = RUN_RECORDS_MAX,
        *,
        one_per_key: bool = False,
    ) -> Iterator[tuple[int, int]]:
        """Yield the ranges of offsets that can be acquired together, ascending. The caller takes them from the first
        one on, without leaving out an offset.

        `read`: only offsets in these ascending ranges; None for all. `unreadable`: no offsets in these ascending
        ranges. In order by key, records of a key behind one that is left out are not offered. `run_max`: maximum number
        of offsets in a range. `one_per_key`: in order by key, only the first record of each key, because the records
        are processed in parallel. The state must not change while the iterator is in use."""
        self._return_taken()
        ready, taken, keys, limits = self._ready, self._taken, self._keys, self._limits
        following, busy, is_ordered = self._following, self._busy, self._is_ordered
        has_ranges = read is not None or bool(unreadable)
        places: dict[int, int] = {}  # of each key in `next_of_keys`, if there are limits
        walks: dict[int, Iterator[int]] = {}  # without order, over the further records of a key
        next_of_keys: list[int] = []  # heap of the next offsets of keys whose first one was picked
        first = last = before = -1
        while True:
            if next_of_keys and (not ready or next_of_keys[0] < ready[0]):
                offset = heappop(next_of_keys)
                key = keys[offset]
            elif ready:
                offset = heappop(ready)
                if offset == before or offset not in keys or offset in busy:
                    continue
                key = keys[offset]
                if key is not None:
                    if offset != self._candidate(key):
                        continue
                    if limits is not None:
                        places[key] = limits.places(key, self._now_ms)
                        if places[key] <= 0:
                            self._offer(key)  # waits
                            continue
                before = offset
                taken.append(offset)
            else:
                break
            is_left_out = has_ranges and (
                (read is not None and not _is_within(offset, read)) or _is_within(offset, unreadable)
            )
            if is_left_out:
                if is_ordered:
                    continue
            elif offset == last + 1 and offset - first < run_max and first >= 0:
                last = offset
            else:
                if first >= 0:
                    yield first, last
                first = last = offset
            if key is None or (one_per_key and is_ordered):
                continue
            if limits is not None and not is_left_out:
                places[key] -= 1
                if places[key] <= 0:
                    continue
            if is_ordered:
                next_offset = following.get(offset)
                if next_offset in busy:
                    continue
            else:
                if key not in walks:
                    walks[key] = self._free[key].after_first()
                next_offset = next(walks[key], None)
            if next_offset is not None:
                heappush(next_of_keys, next_offset)
        if first >= 0:
            yield first, last

    def _return_taken(self) -> None:
        """Add the offsets that the last iterator has removed from `_ready` and that are still candidates."""
        taken, self._taken = self._taken, []
        for offset in taken:
            if not self._is_candidate(offset):
                continue
            key = self._keys[offset]
            if key is None or self._limits is None:
                heappush(self._ready, offset)
            else:
                self._offer(key)


def _is_within(offset: int, ranges: Sequence[tuple[int, int]]) -> bool:
    """Whether an offset lies in one of these ascending ranges."""
    index = bisect_right(ranges, offset, key=itemgetter(0)) - 1
    return index >= 0 and offset <= ranges[index][1]
