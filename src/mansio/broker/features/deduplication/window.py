"""Deduplication window of one partition: the ids of records that were accepted lately, each with the offset of the
first record that had it.

A view of the control batches in the partition's log. An id is stored as its *key*, a hash of 16 bytes, together with
the offset and the time of its acceptance: 32 bytes, in the columns of a *shard*. A shard is sorted by time, so expired
ids are removed from its beginning, and it has about `SHARD_IDS` ids, among which a key is searched at the speed of
`memmem`. The shards are those of linear hashing: one is split at a time, so no addition takes long.

Invariants:
* An id is found as long as its time is later than what was given to `expire` or `make_room`; whether it still counts
  decides the caller.
* The times of acceptances never decrease. If a later acceptance has an earlier time, because the clock was set back,
  all times after it are reduced to it: no id is kept for less than the window after the clock was set back.
* The result depends only on what was applied, not on a clock, so all replicas have the same window.
"""

from __future__ import annotations

import struct
import sys
from array import array
from bisect import bisect_right
from itertools import count
from typing import TYPE_CHECKING, Final, NamedTuple

from mansio.errors import CorruptLog
from mansio.wire.batch.dedup_header import KEY_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mansio.ports import Buffer

SHARD_IDS: Final = 128
"""Average number of ids of a shard above which one shard is split."""

EXPIRED_SHARDS: Final = 2
"""Number of shards from which one addition removes expired ids."""

MARK_MS: Final = 60_000
"""Acceptances of one such interval have one mark: how much longer than necessary retention may keep a control batch."""

_VERSION: Final = 1
_SNAPSHOT_HEAD: Final = struct.Struct(
    ">HqqqII"
)  # version, latest time, copies, number of marks and of shards
_MARK: Final = struct.Struct(">qq")
_SHARD_HEAD: Final = struct.Struct(">I")
_ROW_BYTES: Final = KEY_BYTES + 16


class KnownId(NamedTuple):
    """Offset of the first record with an id, and when it was accepted, ms since the Unix epoch."""

    offset: int
    accepted_ms: int


class AcceptedId(NamedTuple):
    """One id of the window."""

    key: bytes
    offset: int
    accepted_ms: int


class Mark(NamedTuple):
    """Control batches with ids from offset `location` on, up to the next mark: none of these ids was accepted after
    `last_ms`."""

    location: int
    last_ms: int


class Copies(NamedTuple):
    """Control batches from offset `location` on have all ids that were accepted at or before `until_ms`, because copies
    were made."""

    location: int
    until_ms: int


NO_COPIES: Final = Copies(-1, -1)


class DeduplicationWindow:
    """The ids of a partition's records. Keys have `KEY_BYTES`, times are ms since the Unix epoch."""

    __slots__ = (
        "_freezes",
        "_is_mark_closed",
        "_marks",
        "_next_expired",
        "_oldest_ms",
        "_shards",
        "copies",
        "count",
        "latest_ms",
    )

    def __init__(self) -> None:
        self.count = 0
        """Number of ids, including expired ones that are not removed yet."""
        self.latest_ms = 0
        """Time of the latest acceptance."""
        self._shards = [_Shard(0)]
        self._freezes = 0
        """Number of copies made by `freeze`. Shards from before the latest one are copied before they change."""
        self._next_expired = 0
        """Index of the shard from which expired ids are removed next."""
        self._oldest_ms = 0
        """A lower bound of the times of all ids."""
        self._marks: list[Mark] = []
        self._is_mark_closed = False
        self.copies = NO_COPIES
        """Of the last copies that were made."""

    def __len__(self) -> int:
        return self.count

    # Ids

    def find(self, key: bytes) -> KnownId | None:
        """Return the first record with an id; None if there is none. It may have expired."""
        shard = self._shards[self._index(key)]
        position = shard.find(key)
        return None if position < 0 else KnownId(shard.offsets[position], shard.times_ms[position])

    def accept(self, keys: Sequence[bytes], offsets: Sequence[int], now_ms: int, location: int) -> None:
        """Add ids that were accepted at `now_ms` by a control batch at offset `location`. An id that is there already
        had expired, and is replaced."""
        if now_ms < self.latest_ms:
            self._set_back(now_ms)
        self.latest_ms = now_ms
        for key, offset in zip(keys, offsets, strict=True):
            self._add(key, offset, now_ms)
        marks = self._marks
        if marks and not self._is_mark_closed and marks[-1].last_ms // MARK_MS == now_ms // MARK_MS:
            marks[-1] = Mark(marks[-1].location, max(marks[-1].last_ms, now_ms))
        else:
            self._is_mark_closed = False
            marks.append(Mark(location, now_ms))

    def restore(self, ids: Sequence[AcceptedId], location: int, copies: Copies = NO_COPIES) -> None:
        """Add copies of ids, which a control batch at offset `location` contains. Those that are there already stay as
        they are. `copies`: set in the last of several such batches."""
        if copies != NO_COPIES:
            self.copies = copies
        for key, offset, accepted_ms in ids:
            if self.find(key) is None:
                self._add(key, offset, accepted_ms)
                self._oldest_ms = min(self._oldest_ms, accepted_ms)
        last_ms = max((one.accepted_ms for one in ids), default=0)
        self.latest_ms = max(self.latest_ms, last_ms)
        self._marks.append(Mark(location, last_ms))
        self._is_mark_closed = True

    def _add(self, key: bytes, offset: int, accepted_ms: int) -> None:
        shard = self._own_shard(self._index(key))
        position = shard.find(key)
        if position >= 0:
            shard.remove(position)
        else:
            self.count += 1
        shard.insert(key, offset, accepted_ms)
        if self.count > SHARD_IDS * len(self._shards):
            self._split()

    def _set_back(self, now_ms: int) -> None:
        for index, shard in enumerate(self._shards):
            first, end = bisect_right(shard.times_ms, now_ms), len(shard.times_ms)
            if first < end:
                self._own_shard(index).times_ms[first:] = array("q", [now_ms]) * (end - first)
        self._marks = [Mark(mark.location, min(mark.last_ms, now_ms)) for mark in self._marks]
        self._oldest_ms = min(self._oldest_ms, now_ms)
        if self.copies.until_ms >= now_ms:  # ids that were not copied have this time now, too
            self.copies = self.copies._replace(until_ms=now_ms - 1)

    # Expiry

    def expire(self, until_ms: int) -> None:
        """Remove ids that were accepted at or before a time, from a few shards."""
        for _ in range(EXPIRED_SHARDS):
            self._expire_next(until_ms)
        while self._marks and self._marks[0].last_ms <= until_ms:
            del self._marks[0]

    def make_room(self, wanted: int, ids_max: int, until_ms: int) -> bool:
        """Return whether the window has at most `ids_max` ids after `wanted` more, if necessary after those that were
        accepted at or before `until_ms` are removed."""
        if self.count + wanted <= ids_max:
            return True
        if until_ms < self._oldest_ms:
            return False  # nothing has expired since the last search
        oldest_ms = self.latest_ms
        for _ in range(len(self._shards)):
            times_ms = self._shards[self._next_expired].times_ms
            self._expire_next(until_ms)
            if self.count + wanted <= ids_max:
                return True
            if times_ms:
                oldest_ms = min(oldest_ms, times_ms[0])
        self._oldest_ms = oldest_ms
        return False

    def _expire_next(self, until_ms: int) -> None:
        index = self._next_expired
        self._next_expired = index + 1 if index + 1 < len(self._shards) else 0
        times_ms = self._shards[index].times_ms
        if times_ms and times_ms[0] <= until_ms:
            self.count -= self._own_shard(index).expire(until_ms)
        if not self.count and len(self._shards) > 1:
            self._shards = [_Shard(self._freezes)]
            self._next_expired = 0

    # Locations of the control batches

    def lowest_location(self, until_ms: int) -> int | None:
        """Return the offset of the first control batch that may have an id which was accepted after `until_ms`; None if
        there is none."""
        return next((mark.location for mark in self._marks if mark.last_ms > until_ms), None)

    def uncopied_times(self, location: int, until_ms: int) -> tuple[int, int]:
        """Return (after_ms, last_ms): the ids that were accepted after `until_ms` and that only control batches below
        an offset have, were accepted after `after_ms`, and not after `last_ms`."""
        self._is_mark_closed = True  # later acceptances have a location of their own
        last_ms = max((mark.last_ms for mark in self._marks if mark.location < location), default=0)
        copied_ms = self.copies.until_ms if self.copies.location >= location else -1
        return max(until_ms, copied_ms), last_ms

    def select(self, after_ms: int, last_ms: int) -> Iterator[list[AcceptedId]]:
        """Yield the ids that were accepted after `after_ms`, and not after `last_ms`. The window may change between the
        lists, by additions and expiry."""
        if after_ms >= last_ms:
            return
        for index in count():
            if index >= len(self._shards):
                return
            found = self._shards[index].select(after_ms, last_ms)
            if found:
                yield found

    def release_below(self, location: int) -> None:
        """Forget the control batches below an offset, because a later one has copies of their ids."""
        self._marks = [mark for mark in self._marks if mark.location >= location]

    # Snapshots

    def freeze(self) -> FrozenWindow:
        """Return the window as it is now, for a snapshot that another thread writes. Takes time for the shards, not for
        the ids in them."""
        self._freezes += 1
        return FrozenWindow(self.latest_ms, self.copies, tuple(self._marks), tuple(self._shards))

    @classmethod
    def from_bytes(cls, data: Buffer) -> DeduplicationWindow:
        """Load what `FrozenWindow.to_bytes` has encoded. Raises `CorruptLog`."""
        window = cls()
        data = memoryview(data)
        try:
            version, window.latest_ms, *copies, mark_count, shard_count = _SNAPSHOT_HEAD.unpack_from(data)
            window.copies = Copies(*copies)
            if version != _VERSION or not shard_count:
                raise CorruptLog(f"version {version} of a snapshot of a deduplication window is unknown")
            position = _SNAPSHOT_HEAD.size
            for _ in range(mark_count):
                window._marks.append(Mark(*_MARK.unpack_from(data, position)))
                position += _MARK.size
            window._shards.clear()
            for _ in range(shard_count):
                (rows,) = _SHARD_HEAD.unpack_from(data, position)
                position += _SHARD_HEAD.size
                end = position + rows * _ROW_BYTES
                if end > len(data):
                    raise CorruptLog("a snapshot of a deduplication window is incomplete")
                window._shards.append(_Shard.from_bytes(data[position:end], rows))
                window.count += rows
                position = end
        except struct.error as error:
            raise CorruptLog("a snapshot of a deduplication window is incomplete") from error
        window._is_mark_closed = True
        return window

    # Shards

    def _index(self, key: bytes) -> int:
        """Return the index of the shard of a key. With n shards and 2**k <= n, the first n - 2**k shards and the ones
        from 2**k on are chosen by k + 1 bits, the others by k bits."""
        number = int.from_bytes(key[:4], "little")
        size = len(self._shards)
        bits = 1 << size.bit_length()
        index = number & (bits - 1)
        return index if index < size else index & ((bits >> 1) - 1)

    def _split(self) -> None:
        size = len(self._shards)
        half = 1 << size.bit_length() - 1
        source = self._shards[size - half]
        self._shards[size - half], other = source.split(half, self._freezes)
        self._shards.append(other)

    def _own_shard(self, index: int) -> _Shard:
        """Return a shard that may be changed, because no frozen window has it."""
        shard = self._shards[index]
        if shard.freezes != self._freezes:
            shard = self._shards[index] = shard.copy(self._freezes)
        return shard


class FrozenWindow(NamedTuple):
    """A window at one moment: latest time, copies, marks, and shards, which do not change any more."""

    latest_ms: int
    copies: Copies
    marks: Sequence[Mark]
    shards: Sequence[_Shard]

    def to_bytes(self, head: bytes = b"") -> bytes:
        """Encode the window for `DeduplicationWindow.from_bytes`, after other bytes."""
        parts = [
            head,
            _SNAPSHOT_HEAD.pack(_VERSION, self.latest_ms, *self.copies, len(self.marks), len(self.shards)),
        ]
        parts += [_MARK.pack(*mark) for mark in self.marks]
        for shard in self.shards:
            columns = (_little_endian(shard.offsets), _little_endian(shard.times_ms))
            parts += (_SHARD_HEAD.pack(len(shard.offsets)), bytes(shard.keys), *columns)
        return b"".join(parts)


class _Shard:
    """Ids sorted by time, in columns. `freezes`: how often its window had been frozen when it was made."""

    __slots__ = ("freezes", "keys", "offsets", "times_ms")

    def __init__(self, freezes: int) -> None:
        self.freezes = freezes
        self.keys = bytearray()
        self.offsets = array("q")
        self.times_ms = array("q")

    def find(self, key: bytes) -> int:
        """Return the position of a key; -1 if it is not there."""
        at = self.keys.find(key)
        while at >= 0 and at % KEY_BYTES:  # across two keys
            at = self.keys.find(key, at + 1)
        return at // KEY_BYTES if at >= 0 else -1

    def insert(self, key: bytes, offset: int, accepted_ms: int) -> None:
        times_ms = self.times_ms
        if not times_ms or times_ms[-1] <= accepted_ms:
            self.keys += key
            self.offsets.append(offset)
            times_ms.append(accepted_ms)
            return
        position = bisect_right(times_ms, accepted_ms)
        self.keys[position * KEY_BYTES : position * KEY_BYTES] = key
        self.offsets.insert(position, offset)
        times_ms.insert(position, accepted_ms)

    def remove(self, position: int) -> None:
        del self.keys[position * KEY_BYTES : (position + 1) * KEY_BYTES]
        del self.offsets[position], self.times_ms[position]

    def copy(self, freezes: int) -> _Shard:
        other = _Shard(freezes)
        other.keys += self.keys
        other.offsets, other.times_ms = self.offsets[:], self.times_ms[:]
        return other

    def expire(self, until_ms: int) -> int:
        """Remove the ids that were accepted at or before a time; return how many."""
        times_ms = self.times_ms
        expired = bisect_right(times_ms, until_ms)
        del self.keys[: expired * KEY_BYTES]
        del self.offsets[:expired], times_ms[:expired]
        return expired

    def select(self, after_ms: int, last_ms: int) -> list[AcceptedId]:
        """Return the ids that were accepted after `after_ms`, and not after `last_ms`."""
        keys = bytes(self.keys)
        positions = range(bisect_right(self.times_ms, after_ms), bisect_right(self.times_ms, last_ms))
        return [
            AcceptedId(keys[at * KEY_BYTES : (at + 1) * KEY_BYTES], self.offsets[at], self.times_ms[at])
            for at in positions
        ]

    def split(self, bit: int, freezes: int) -> tuple[_Shard, _Shard]:
        """Return the ids without and with this bit of their keys."""
        halves = (_Shard(freezes), _Shard(freezes))
        keys = bytes(self.keys)
        for position, offset in enumerate(self.offsets):
            key = keys[position * KEY_BYTES : (position + 1) * KEY_BYTES]
            half = halves[1 if int.from_bytes(key[:4], "little") & bit else 0]
            half.keys += key
            half.offsets.append(offset)
            half.times_ms.append(self.times_ms[position])
        return halves

    @classmethod
    def from_bytes(cls, data: memoryview, count: int) -> _Shard:
        shard = cls(0)
        end = count * KEY_BYTES
        shard.keys += data[:end]
        for column in (shard.offsets, shard.times_ms):
            column.frombytes(data[end : end + 8 * count])
            if sys.byteorder == "big":
                column.byteswap()
            end += 8 * count
        return shard


def _little_endian(column: array[int]) -> bytes:
    if sys.byteorder == "big":
        column = column[:]
        column.byteswap()
    return column.tobytes()
