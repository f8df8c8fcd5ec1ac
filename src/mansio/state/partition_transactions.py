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
"""

from __future__ import annotations

import struct
import sys
from array import array
from bisect import bisect_left
from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple

from mansio.errors import CorruptLog

if TYPE_CHECKING:
    from collections.abc import Container

_HEAD: Final = struct.Struct(">IIQ")  # numbers of open, ended and aborted transactions
_PAIR: Final = struct.Struct(">qq")
_FIELDS: Final = 4
_LAST: Final = 2


class AbortedTransaction(NamedTuple):
    """An aborted transaction. `last_offset`: of its marker. `last_stable_offset`: the first offset of the transactions
    that were open at the marker, or the offset after the marker if there were none."""

    producer_id: int
    first_offset: int
    last_offset: int
    last_stable_offset: int


class PartitionTransactions:
    """Open and aborted transactions of one partition."""

    __slots__ = ("_aborted", "_ended", "open")

    def __init__(self) -> None:
        self.open: dict[int, int] = {}
        """First offset of the open transaction by producer id, in the order of the offsets; callers do not change
        it."""
        self._ended: deque[tuple[int, int]] = deque()
        """(first offset, offset of the marker) of the transactions whose marker is not committed."""
        self._aborted = array("q")
        """The fields of all `AbortedTransaction`s one after the other."""

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

    def end(self, producer_id: int, marker_offset: int, *, is_commit: bool) -> None:
        """Apply a marker at an offset. Without an open transaction of the producer it has no effect."""
        first_offset = self.open.pop(producer_id, None)
        if first_offset is None:
            return
        self._ended.append((first_offset, marker_offset))
        if not is_commit:
            stable = next(iter(self.open.values()), marker_offset + 1)
            self._aborted.extend((producer_id, first_offset, marker_offset, stable))

    def on_committed(self, high_watermark: int) -> None:
        """Apply a new high watermark: the transactions whose marker is below it are decided."""
        ended = self._ended
        while ended and ended[0][1] < high_watermark:
            ended.popleft()

    def trim(self, start_offset: int) -> None:
        """Forget the aborted transactions that lie below the start of the log."""
        known = self._first_position(start_offset)
        if known:
            del self._aborted[: known * _FIELDS]

    def remove_aborted(self, marker_offsets: Container[int]) -> None:
        """Forget the aborted transactions with these markers, because the log has no record of them any more."""
        known, kept = self._aborted, array("q")
        for position, last_offset in enumerate(known[_LAST::_FIELDS]):
            if last_offset not in marker_offsets:
                kept += known[position * _FIELDS : (position + 1) * _FIELDS]
        self._aborted = kept

    def aborted(self, from_offset: int = 0, end_offset: int | None = None) -> list[AbortedTransaction]:
        """Return the aborted transactions with offsets in [from_offset, end_offset), ordered by their markers."""
        found = []
        fields = self._aborted
        for position in range(self._first_position(from_offset) * _FIELDS, len(fields), _FIELDS):
            one = AbortedTransaction(*fields[position : position + _FIELDS])
            if end_offset is None or one.first_offset < end_offset:
                found.append(one)
            if end_offset is not None and one.last_stable_offset >= end_offset:
                break  # every later one begins at or above this offset
        return found

    def _first_position(self, from_offset: int) -> int:
        """The number of aborted transactions whose marker is below an offset."""
        fields = self._aborted
        return bisect_left(
            range(self.aborted_count), from_offset, key=lambda number: fields[number * _FIELDS + _LAST]
        )

    # Snapshots

    def to_bytes(self) -> bytes:
        """Encode a snapshot, without a checksum."""
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
            found._aborted = _big_endian(stored)
        except (struct.error, ValueError) as error:
            raise CorruptLog("snapshot of transactions: wrong length") from error
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
