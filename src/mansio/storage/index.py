"""Sparse index of one segment: maps offsets and timestamps to file positions.

There is one entry per few KiB of log. An entry describes one batch: its offset relative to the segment's base offset,
its position in the file, and the largest timestamp in the segment *before* it. All three only increase from entry to
entry, so each can be searched by bisection.

Invariants: the index holds no information that the segment does not (it is rebuilt when missing or damaged); it has at
most `ENTRIES_MAX` entries, because when it is full every second entry is dropped and the interval doubles.
"""

from __future__ import annotations

import struct
import sys
from array import array
from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING

from mansio.storage.checksummed_file import encode_checksummed, read_checksummed

if TYPE_CHECKING:
    from mansio.ports import Disk

ENTRIES_MAX = 1 << 14
NO_TIMESTAMP = -(1 << 63)
INDEX_MAGIC = b"MANSIOIX"
INDEX_VERSION = 1
_SUMMARY = struct.Struct(
    ">qqqIII"
)  # base offset, end offset, max timestamp, covered bytes, interval, entries
_NEEDS_BYTE_SWAP = sys.byteorder == "little"


class SparseIndex:
    """The index of one segment, in memory.

    `max_timestamp_ms` is the largest timestamp of all batches that were added. The next entry is created for the first
    batch at or above `next_entry_position`.
    """

    __slots__ = (
        "_offsets",
        "_positions",
        "_timestamps",
        "interval_bytes",
        "max_timestamp_ms",
        "next_entry_position",
    )

    def __init__(self, interval_bytes: int) -> None:
        self._offsets = array("I")
        self._positions = array("I")
        self._timestamps = array("q")
        self.interval_bytes = interval_bytes
        self.next_entry_position = 0
        self.max_timestamp_ms = NO_TIMESTAMP

    def __len__(self) -> int:
        return len(self._offsets)

    def add(self, relative_offset: int, position: int, max_timestamp_ms: int) -> None:
        """Add a batch; the caller adds batches in file order. `max_timestamp_ms` is the largest timestamp of the batch.

        An entry is created only if the last one is at least `interval_bytes` before `position`."""
        if position >= self.next_entry_position:
            self._offsets.append(relative_offset)
            self._positions.append(position)
            self._timestamps.append(self.max_timestamp_ms)
            if len(self._offsets) > ENTRIES_MAX:
                self._thin_out()
            self.next_entry_position = position + self.interval_bytes
        if max_timestamp_ms > self.max_timestamp_ms:
            self.max_timestamp_ms = max_timestamp_ms

    def _thin_out(self) -> None:
        self._offsets = self._offsets[::2]
        self._positions = self._positions[::2]
        self._timestamps = self._timestamps[::2]
        self.interval_bytes *= 2

    def position_before_offset(self, relative_offset: int) -> int:
        """Position of the last batch in the index that begins at or below `relative_offset`; 0 if there is none."""
        at = bisect_right(self._offsets, relative_offset)
        return self._positions[at - 1] if at else 0

    def entry_before_position(self, position: int) -> tuple[int, int]:
        """(relative offset, position) of the last batch in the index that begins at or below `position`."""
        at = bisect_right(self._positions, position)
        return (self._offsets[at - 1], self._positions[at - 1]) if at else (0, 0)

    def position_before_timestamp(self, timestamp_ms: int) -> int:
        """Position of a batch before which every timestamp is below `timestamp_ms`."""
        at = bisect_left(self._timestamps, timestamp_ms)
        return self._positions[at - 1] if at else 0

    def max_timestamp_before(self, position: int) -> tuple[int, int]:
        """(largest timestamp in ms before its batch, position of its batch) of the last entry up to `position`."""
        at = bisect_right(self._positions, position)
        return (self._timestamps[at - 1], self._positions[at - 1]) if at else (NO_TIMESTAMP, 0)

    def entries(self) -> list[tuple[int, int, int]]:
        """All entries in order: (relative offset, position, largest timestamp before that position)."""
        return list(zip(self._offsets, self._positions, self._timestamps, strict=True))

    def encode(self, base_offset: int, end_offset: int, covered_bytes: int) -> bytes:
        """Return the bytes of the index file of a segment (docs/internals/file-format.md).

        The index describes the first `covered_bytes` of the segment, which end at `end_offset`."""
        count = len(self._offsets)
        summary = _SUMMARY.pack(
            base_offset, end_offset, self.max_timestamp_ms, covered_bytes, self.interval_bytes, count
        )
        columns = (self._offsets, self._positions, self._timestamps)
        return encode_checksummed(
            INDEX_MAGIC, INDEX_VERSION, summary + b"".join(_big_endian(column) for column in columns)
        )

    def copy(self) -> SparseIndex:
        """Return a copy that later calls of `add` do not change, so that another thread can encode it."""
        copy = SparseIndex(self.interval_bytes)
        copy._offsets = self._offsets[:]
        copy._positions = self._positions[:]
        copy._timestamps = self._timestamps[:]
        copy.next_entry_position = self.next_entry_position
        copy.max_timestamp_ms = self.max_timestamp_ms
        return copy


class LoadedIndex:
    """Content of an index file. It describes the first `covered_bytes` of the segment, which end at `end_offset`."""

    __slots__ = ("covered_bytes", "end_offset", "index")

    def __init__(self, index: SparseIndex, end_offset: int, covered_bytes: int) -> None:
        self.index = index
        self.end_offset = end_offset
        self.covered_bytes = covered_bytes


def load_index(disk: Disk, path: str, base_offset: int) -> LoadedIndex | None:
    """Read the index file at `path`; None if it is missing, damaged or not that of the segment at `base_offset`."""
    payload = read_checksummed(disk, path, INDEX_MAGIC, INDEX_VERSION)
    if payload is None or len(payload) < _SUMMARY.size:
        return None
    found_base, end_offset, max_timestamp_ms, covered_bytes, interval, count = _SUMMARY.unpack_from(payload)
    if (
        found_base != base_offset
        or len(payload) != _SUMMARY.size + 16 * count
        or count > ENTRIES_MAX
        or not interval
    ):
        return None
    index = SparseIndex(interval)
    columns = memoryview(payload)[_SUMMARY.size :]
    index._offsets = _native("I", columns[: 4 * count])
    index._positions = _native("I", columns[4 * count : 8 * count])
    index._timestamps = _native("q", columns[8 * count :])
    index.max_timestamp_ms = max_timestamp_ms
    index.next_entry_position = index._positions[-1] + interval if count else 0
    return LoadedIndex(index, end_offset, covered_bytes)


def _big_endian(column: array[int]) -> bytes:
    if not _NEEDS_BYTE_SWAP:
        return column.tobytes()
    copy = column[:]
    copy.byteswap()
    return copy.tobytes()


def _native(kind: str, data: memoryview) -> array[int]:
    column = array(kind)
    column.frombytes(data)
    if _NEEDS_BYTE_SWAP:
        column.byteswap()
    return column
