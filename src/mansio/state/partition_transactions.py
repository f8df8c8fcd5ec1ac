"""Transactions of one partition: which are open, and which were aborted (KIP-98). A pure state machine without I/O.

    offset of the first record ---- more records ---- marker (commit or abort)

A transaction is *undecided* until its marker is committed: until then a reader of committed records does not know
whether it may read the records. The last stable offset is the first offset of the first undecided transaction, or the
high watermark if there is none.

Invariants:
* The state is a view of the log: the batches above an offset that are applied to the state at that offset give the
  state at the end of the log.
* A transaction takes the same memory whatever the number of its records: its first offset while it is open, four
  numbers after it was aborted, nothing after it was committed.
* The aborted transactions are ordered by the offset of their marker.
* A batch without records, as compaction leaves it, does not open a transaction: its marker may have been removed.
* If batches of the log are damaged, each transaction that was open there may have ended in them. It stays open, and no
  later marker of its producer decides it, because that may be the marker of a later transaction. The exception is an
  abort before any other batch or marker of the producer.
"""

from __future__ import annotations

import struct
import sys
from array import array
from bisect import bisect_left
from collections import deque
from operator import itemgetter
from typing import TYPE_CHECKING, Final, NamedTuple

from mansio.errors import CorruptLog

if TYPE_CHECKING:
    from collections.abc import Iterable

_HEAD: Final = struct.Struct(">IIQ")  # numbers of open, ended and aborted transactions
_PAIR: Final = struct.Struct(">qq")
_FIELDS: Final = 4
_FIRST: Final = 1
_LAST: Final = 2
_STABLE: Final = 3

BLOCK_TRANSACTIONS: Final = 256
"""Number of aborted transactions of a block. A question skips the blocks without a transaction in its range."""


class AbortedTransaction(NamedTuple):
    """An aborted transaction. `last_offset`: of its marker. `last_stable_offset`: the first offset of the transactions
    that were open at the marker, or the offset after the marker if there were none."""

    producer_id: int
    first_offset: int
    last_offset: int
    last_stable_offset: int


class _LostEnd:
    """State of a producer whose transaction may have ended in damaged batches.

    `damaged_offset`: all known batches of the transaction are below it. `later_offset`: the first offset of the batches
    after the damage and the last marker; None if there are none. `is_followed`: whether the damage is followed by a
    batch or commit marker of the producer."""

    __slots__ = ("damaged_offset", "is_followed", "later_offset")

    def __init__(self, damaged_offset: int) -> None:
        self.damaged_offset = damaged_offset
        self.later_offset: int | None = None
        self.is_followed = False


class PartitionTransactions:
    """Open and aborted transactions of one partition."""

    __slots__ = ("_aborted", "_block_firsts", "_ended", "_lost_ends", "open")

    def __init__(self) -> None:
        self.open: dict[int, int] = {}
        """First offset of the open transaction by producer id, in the order of the offsets; callers do not change
        it."""
        self._ended: deque[tuple[int, int]] = deque()
        """(first offset, offset of the marker) of the transactions whose marker is not committed."""
        self._aborted = array("q")
        """The fields of all `AbortedTransaction`s one after the other."""
        self._block_firsts = array("q")
        """The lowest first offset of each block of aborted transactions."""
        self._lost_ends: dict[int, _LostEnd] = {}
        """By producer id, the open transactions that may have ended in damaged batches."""

    @property
    def aborted_count(self) -> int:
        """Number of aborted transactions in the index."""
        return len(self._aborted) // _FIELDS

    @property
    def is_empty(self) -> bool:
        """Whether there is no transaction that is open, undecided or aborted."""
        return not (self.open or self._ended or self._aborted)

    @property
    def has_uncommitted_markers(self) -> bool:
        """Whether a transaction is undecided only because its marker is not committed."""
        return bool(self._ended)

    @property
    def has_lost_ends(self) -> bool:
        """Whether an open transaction may have ended in damaged batches."""
        return bool(self._lost_ends)

    @property
    def first_undecided_offset(self) -> int | None:
        """The first offset of all transactions without a committed marker; None if there are none."""
        first = next(iter(self.open.values()), None)
        if self._ended:
            ended = min(offset for offset, _ in self._ended)
            return ended if first is None else min(first, ended)
        return first

    def begin(self, producer_id: int, offset: int) -> None:
        """Apply a transactional batch with records at an offset; it opens a transaction if the producer has none."""
        self.open.setdefault(producer_id, offset)
        if self._lost_ends:
            lost = self._lost_ends.get(producer_id)
            if lost is not None and lost.later_offset is None:
                lost.later_offset, lost.is_followed = offset, True

    def end(self, producer_id: int, marker_offset: int, *, is_commit: bool) -> None:
        """Apply a marker at an offset. Without an open transaction of the producer it has no effect."""
        if self._lost_ends and not self._decide_lost_end(producer_id, marker_offset, is_commit=is_commit):
            return
        first_offset = self.open.pop(producer_id, None)
        if first_offset is None:
            return
        self._ended.append((first_offset, marker_offset))
        if not is_commit:
            stable = next(iter(self.open.values()), marker_offset + 1)
            self._add_aborted(producer_id, first_offset, marker_offset, stable)

    def lose_ends(self, offset: int) -> int:
        """Apply damaged batches at an offset, in which any open transaction may have ended. Returns the number of open
        transactions."""
        for producer_id in self.open:
            lost = self._lost_ends.setdefault(producer_id, _LostEnd(offset))
            lost.damaged_offset, lost.later_offset = offset, None
        return len(self.open)

    def _decide_lost_end(self, producer_id: int, marker_offset: int, *, is_commit: bool) -> bool:
        """Apply a marker to a transaction that may have ended before it. Returns whether the marker decides the open
        transaction of the producer."""
        lost = self._lost_ends.get(producer_id)
        if lost is None:
            return True
        if is_commit or lost.is_followed:
            if not is_commit and lost.later_offset is not None:
                stable_offset = next(iter(self.open.values()))
                self._add_aborted(producer_id, lost.later_offset, marker_offset, stable_offset)
            lost.later_offset, lost.is_followed = None, True
            return False
        del self._lost_ends[producer_id]
        return True

    def _add_aborted(self, producer_id: int, first_offset: int, last_offset: int, stable_offset: int) -> None:
        if self.aborted_count % BLOCK_TRANSACTIONS == 0:
            self._block_firsts.append(first_offset)
        elif first_offset < self._block_firsts[-1]:
            self._block_firsts[-1] = first_offset
        self._aborted.extend((producer_id, first_offset, last_offset, stable_offset))

    def _replace_aborted(self, fields: array[int]) -> None:
        block = BLOCK_TRANSACTIONS * _FIELDS
        self._aborted = fields
        self._block_firsts = array(
            "q", (min(fields[at + _FIRST : at + block : _FIELDS]) for at in range(0, len(fields), block))
        )

    def on_committed(self, high_watermark: int) -> None:
        """Apply a new high watermark: the transactions whose marker is below it are decided."""
        ended = self._ended
        while ended and ended[0][1] < high_watermark:
            ended.popleft()

    def trim(self, start_offset: int) -> None:
        """Forget the aborted transactions that lie below the start of the log, and the records there of those that may
        have ended in damaged batches."""
        known = self._first_position(start_offset)
        if known:
            self._replace_aborted(self._aborted[known * _FIELDS :])
        gone = [one for one, lost in self._lost_ends.items() if lost.damaged_offset <= start_offset]
        if gone:
            for producer_id in gone:
                del self.open[producer_id]
                if (later_offset := self._lost_ends.pop(producer_id).later_offset) is not None:
                    self.open[producer_id] = later_offset
            in_order = sorted(self.open.items(), key=itemgetter(1))
            self.open.clear()
            self.open.update(in_order)

    def remove_aborted(self, marker_offsets: Iterable[int]) -> None:
        """Forget the aborted transactions with these markers, because the log has no record of them any more."""
        known, kept = self._aborted, array("q")
        last_offsets = known[_LAST::_FIELDS]
        position = kept_end = 0
        for offset in sorted(marker_offsets):
            position = bisect_left(last_offsets, offset, position)
            if position == len(last_offsets):
                break
            if last_offsets[position] == offset:
                kept += known[kept_end * _FIELDS : position * _FIELDS]
                kept_end = position + 1
        if kept_end:
            kept += known[kept_end * _FIELDS :]
            self._replace_aborted(kept)

    def aborted(self, from_offset: int = 0, end_offset: int | None = None) -> list[AbortedTransaction]:
        """Return the aborted transactions with offsets in [from_offset, end_offset), ordered by their markers."""
        fields, count = self._aborted, self.aborted_count
        position = self._first_position(from_offset)
        if end_offset is None:
            starts = range(position * _FIELDS, len(fields), _FIELDS)
            return [AbortedTransaction(*fields[at : at + _FIELDS]) for at in starts]
        found: list[AbortedTransaction] = []
        while position < count:
            block = position // BLOCK_TRANSACTIONS
            stop = min((block + 1) * BLOCK_TRANSACTIONS, count)
            if self._block_firsts[block] < end_offset:
                for at in range(position * _FIELDS, stop * _FIELDS, _FIELDS):
                    if fields[at + _FIRST] < end_offset:
                        found.append(AbortedTransaction(*fields[at : at + _FIELDS]))
                    if fields[at + _STABLE] >= end_offset:
                        return found
            elif fields[(stop - 1) * _FIELDS + _STABLE] >= end_offset:
                return found  # every later one begins at or above this offset
            position = stop
        return found

    def _first_position(self, from_offset: int) -> int:
        """Return the number of aborted transactions whose marker is below an offset."""
        fields = self._aborted
        return bisect_left(
            range(self.aborted_count), from_offset, key=lambda number: fields[number * _FIELDS + _LAST]
        )

    # Snapshots

    def to_bytes(self) -> bytes:
        """Encode a snapshot, without a checksum and without what damage may have lost: see `has_lost_ends`."""
        parts = [_HEAD.pack(len(self.open), len(self._ended), self.aborted_count)]
        parts += [_PAIR.pack(*one) for one in self.open.items()]
        parts += [_PAIR.pack(*one) for one in self._ended]
        parts.append(_big_endian(self._aborted).tobytes())
        return b"".join(parts)

    @classmethod
    def from_bytes(cls, data: bytes) -> PartitionTransactions:
        """Decode a snapshot. Raises `CorruptLog` if it has another length."""
        found = cls()
        view = memoryview(data)
        try:
            open_count, ended_count, aborted_count = _HEAD.unpack_from(view)
            ended_at = _HEAD.size + open_count * _PAIR.size
            aborted_at = ended_at + ended_count * _PAIR.size
            found.open = dict(_PAIR.iter_unpack(view[_HEAD.size : ended_at]))
            found._ended.extend(_PAIR.iter_unpack(view[ended_at:aborted_at]))
            stored = array("q", bytes(view[aborted_at:]))
        except (struct.error, ValueError) as error:
            raise CorruptLog("snapshot of transactions: wrong length") from error
        if len(stored) % _FIELDS:
            raise CorruptLog("snapshot of transactions: wrong length")
        found._replace_aborted(_big_endian(stored))
        if (len(found.open), len(found._ended), found.aborted_count) != (
            open_count,
            ended_count,
            aborted_count,
        ):
            raise CorruptLog("snapshot of transactions: wrong length")
        return found


def _big_endian(numbers: array[int]) -> array[int]:
    """Convert between the byte order of this machine and big-endian, in either direction; returns a copy, or the same
    array where both are the same."""
    if sys.byteorder == "big":
        return numbers
    swapped = numbers[:]
    swapped.byteswap()
    return swapped
