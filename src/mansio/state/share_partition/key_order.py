"""Order of records by key in a share partition (`mansio.share.order=key`).

While a record of a key is leased, in a backoff, withheld or being dead-lettered, no later record of that key is
offered; records of other keys are. One answer may contain several records of a key, in the order of their offsets. One
of them that is given back is offered again although the later ones are still leased.

The leader of the share partition adds the keys of the log in the order of the offsets (`add`). Nothing at or above
`scanned_end` is offered, so no record passes another one whose key is not known yet.

        start                     scanned_end                        log end
          | done, busy or free        | keys not known: not offered     |

The keys of records that are not done are kept, at most `UNDONE_RECORDS_MAX` of them, and those of the records that were
in flight when the state was loaded; beyond that, records wait until others are done. A key is represented by a hash:
two keys with the same hash wait for each other, which is correct and rare. Records without a key have no order, and
neither have offsets without a record.

Invariants:
* A *busy* offset can not be leased now: its record is leased, in a backoff, withheld or being dead-lettered, or its
  last change is not stored. `_busy` contains the scanned ones that are not done.
* A record is offered if no earlier record of its key is busy; with it, those before it that are not done. `_ready` and
  `_taken` together have an entry for the first undone record of each key that is offered; entries of other offsets are
  ignored.
"""

from __future__ import annotations

from bisect import bisect_right
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

UNDONE_RECORDS_MAX: Final = 100_000
"""Maximum number of records that are not done and whose keys are known; a batch of records may exceed it."""

_READY_SPARE: Final = 64
"""Number of outdated entries in `_ready` that is always allowed."""

RUN_RECORDS_MAX: Final = 256
"""Maximum number of offsets in a range that is offered, because a range is computed as a whole."""


class KeyOrder:
    """Which records of a share partition its members can acquire, by key."""

    __slots__ = (
        "_busy",
        "_first",
        "_following",
        "_keys",
        "_last",
        "_ready",
        "_taken",
        "change_count",
        "scanned_end",
    )

    def __init__(self, start: int) -> None:
        self.scanned_end = start
        """Offset below which the keys of all records that are not done are known."""
        self._keys: dict[int, int | None] = {}
        """Hash of the key of each scanned offset that is not done; None without a key."""
        self._first: dict[int, int] = {}
        """The first offset of each key that is not done."""
        self._last: dict[int, int] = {}
        self._following: dict[int, int] = {}
        """The next scanned offset with the same key."""
        self._busy: set[int] = set()
        self._ready: list[int] = []
        self._taken: list[int] = []
        """Offsets that the last iterator of `pick` has removed from `_ready`."""
        self.change_count = 0
        """Number of changes so far. What was picked is still right while it is the same."""

    @property
    def is_full(self) -> bool:
        """Whether no more keys can be added now."""
        return len(self._keys) >= UNDONE_RECORDS_MAX

    @property
    def free_count(self) -> int:
        """Number of records that are not busy: an upper bound of the number that is offered."""
        return len(self._keys) - len(self._busy)

    # Changes

    def add(self, end: int, keys: Mapping[int, int], undone: Iterable[tuple[int, int, bool]]) -> None:
        """Add the keys of the offsets from `scanned_end` to below `end`.

        `keys`: hashes by offset, without the records that have no key. `undone`: ascending ranges (first, last) of the
        offsets that are not done, and whether they can be leased now."""
        self.scanned_end = end
        self.change_count += 1
        for first, last, is_free in undone:
            for offset in range(first, last + 1):
                key = self._keys[offset] = keys.get(offset)
                if key is not None and key in self._first:
                    self._following[self._last[key]] = offset
                    self._last[key] = offset
                else:
                    if key is not None:
                        self._first[key] = self._last[key] = offset
                    if is_free:
                        heappush(self._ready, offset)
                if not is_free:
                    self._busy.add(offset)

    def on_changed(self, first: int, last: int, *, is_free: bool, is_done: bool) -> None:
        """Apply a change of the state of offsets. `is_done`: the change is stored."""
        last = min(last, self.scanned_end - 1)
        self.change_count += 1
        if is_free:
            self._mark_free(first, last)
        elif is_done:
            self._mark_done(first, last)
        else:
            keys, busy = self._keys, self._busy
            for offset in range(first, last + 1):
                if offset in keys:
                    busy.add(offset)

    def _mark_done(self, first: int, last: int) -> None:
        for offset in range(first, last + 1):
            if offset not in self._keys:
                continue
            key = self._keys.pop(offset)
            self._busy.discard(offset)
            if key is None or self._first[key] != offset:
                continue
            self._advance_first(key, offset)
            if key in self._first and self._first[key] not in self._busy:
                self._push_ready(self._first[key])

    def drop_below(self, offset: int, log_start: int) -> None:
        """Forget the offsets below `offset`, and add no keys below the start of the log."""
        for known in [known for known in self._keys if known < offset]:
            self._mark_done(known, known)
        self.scanned_end = max(self.scanned_end, log_start)
        self.change_count += 1

    def _advance_first(self, key: int, offset: int) -> None:
        """Set the first undone offset of a key, after the one at `offset` is done."""
        following, keys = self._following, self._keys
        at: int | None = offset
        while at is not None and at not in keys:
            at = following.pop(at, None)
        if at is None:
            del self._first[key], self._last[key]
        else:
            self._first[key] = at

    def _mark_free(self, first: int, last: int) -> None:
        for offset in range(first, last + 1):
            if offset not in self._busy:
                continue
            self._busy.remove(offset)
            key = self._keys[offset]
            if key is None or self._first[key] == offset:
                self._push_ready(offset)

    def _push_ready(self, offset: int) -> None:
        ready = self._ready
        heappush(ready, offset)
        if len(ready) > 2 * len(self._keys) + _READY_SPARE:
            self._ready = sorted(each for each in {*ready} if self._is_offered(each))

    # Queries

    def pick(self, read: Sequence[tuple[int, int]] | None = None) -> Iterator[tuple[int, int]]:
        """Yield the ranges of offsets that can be acquired together, ascending. The caller takes them from the first
        one on, without leaving out an offset.

        `read`: only offsets in these ascending ranges; None for all. Records of a key behind one that is not in the
        ranges are not offered. The state must not change while the iterator is in use."""
        self._return_taken()
        ready, taken, keys = self._ready, self._taken, self._keys
        firsts, following, busy = self._first, self._following, self._busy
        starts = None if read is None else [first for first, _ in read]
        next_of_keys: list[int] = []  # heap of the next offsets of keys whose first one was picked
        first = last = before = -1
        while True:
            if next_of_keys and (not ready or next_of_keys[0] < ready[0]):
                offset = heappop(next_of_keys)
                key = keys[offset]
            elif ready:
                offset = heappop(ready)
                if offset == before or offset not in keys:
                    continue
                key = keys[offset]
                if offset in busy or (key is not None and firsts[key] != offset):
                    continue
                before = offset
                taken.append(offset)
            else:
                break
            if read is not None and starts is not None and not _is_within(offset, read, starts):
                continue
            if offset == last + 1 and offset - first < RUN_RECORDS_MAX and first >= 0:
                last = offset
            else:
                if first >= 0:
                    yield first, last
                first = last = offset
            if key is not None:
                next_offset = following.get(offset)
                while next_offset is not None and next_offset not in keys:
                    next_offset = following.get(next_offset)
                if next_offset is not None and next_offset not in busy:
                    heappush(next_of_keys, next_offset)
        if first >= 0:
            yield first, last

    def _return_taken(self) -> None:
        """Add the offsets that the last iterator has removed from `_ready` and that are still offered."""
        for offset in self._taken:
            if self._is_offered(offset):
                heappush(self._ready, offset)
        self._taken.clear()

    def _is_offered(self, offset: int) -> bool:
        if offset not in self._keys or offset in self._busy:
            return False
        key = self._keys[offset]
        return key is None or self._first[key] == offset


def _is_within(offset: int, ranges: Sequence[tuple[int, int]], starts: Sequence[int]) -> bool:
    index = bisect_right(starts, offset) - 1
    return index >= 0 and offset <= ranges[index][1]
