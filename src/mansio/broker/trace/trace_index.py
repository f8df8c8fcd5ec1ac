"""Index of one partition of `__mansio_trace`: which blocks have rows of which partitions, and which blocks are missing.

The blocks are read once, from the first to the last one, and when new ones were appended. `BLOCKS_PER_GROUP` blocks
that follow one another are one entry of the index: the partitions in them, and the bounds of their offsets. A look-up
reads the blocks of the entries that may have something; in these, the index of each block decides (`trace_records`).
When the index would take more than `BYTES_MAX`, neighbours are joined: it gets smaller and look-ups read more.

Invariant: a block that cannot be read is a missing block.
"""

from __future__ import annotations

import contextlib
from array import array
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

from mansio.errors import MansioError
from mansio.host.item_turns import ItemTurns, Work
from mansio.host.run_in_thread import run_in_thread
from mansio.ports import complete
from mansio.state.trace.coverage import Coverage, TracedRow
from mansio.wire.batch.record_batch import read_header
from mansio.wire.batch.record_reader import read_records
from mansio.wire.internal_records.trace_records import ATTEMPTS_USED_UP, REJECTED, TraceBlock

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mansio.broker.partition.partition import Partition
    from mansio.ports import Background, Promise, Scheduler
    from mansio.storage.segment_list import LogSlice

BLOCKS_PER_GROUP: Final = 128
BYTES_MAX: Final = 16 << 20
"""Size of the index at which neighbours are joined."""

READ_BYTES: Final = 1 << 20
ROWS_MAX: Final = 10_000
"""Maximum number of rows in the result of a look-up."""

FAILURES: Final = frozenset({REJECTED, ATTEMPTS_USED_UP})
"""Kinds of rows with which a record fails in a share group."""

PROCESSES_MAX: Final = 1_000
"""Maximum number of broker processes whose coverage is known; that of older ones is forgotten."""

_ENTRY_BYTES: Final = 20 + 16


class FailedRecord(NamedTuple):
    """A record that a share group has rejected, or used up the attempts of, at `time_ms`."""

    topic_id: bytes
    partition: int
    offset: int
    time_ms: int


class _Group(NamedTuple):
    """Blocks that follow one another, in the batches from the offset `first` to below `end`. `keys`: sorted, 20 bytes
    each; `bounds`: two offsets for each of them. `begin_ms`: begin of the first block."""

    first: int
    end: int
    begin_ms: int
    keys: bytes
    bounds: array[int]

    def may_have(self, key: bytes, offset: int) -> bool:
        low, high = 0, len(self.keys) // 20
        keys = self.keys
        while low < high:
            middle = (low + high) // 2
            if keys[middle * 20 : middle * 20 + 20] < key:
                low = middle + 1
            else:
                high = middle
        if keys[low * 20 : low * 20 + 20] != key:
            return False
        return self.bounds[2 * low] <= offset < self.bounds[2 * low + 1]

    def entries(self) -> Iterator[tuple[bytes, int, int]]:
        for number in range(len(self.keys) // 20):
            key = self.keys[number * 20 : number * 20 + 20]
            yield key, self.bounds[2 * number], self.bounds[2 * number + 1]


class TraceIndex:
    """The index of one partition of the topic, which this broker leads. All methods run on the event loop."""

    def __init__(self, partition: Partition, scheduler: Scheduler, thread: Background) -> None:
        """`thread`: reads the blocks."""
        self.partition = partition
        self._thread = thread
        self._scheduler = scheduler
        self._groups: deque[_Group] = deque()
        self._open: dict[bytes, tuple[int, int]] = {}
        self._open_first = self._open_blocks = 0
        self._open_begin_ms = -1
        self._size_bytes = 0
        self._next_offset = -1
        self._coverage: dict[tuple[int, int], Coverage] = {}
        self._updated: Promise[None] | None = None
        """Completes when the blocks have been read that are being read."""
        self.begin_ms = -1
        """Time from which blocks are known, -1 if there are none."""

    @property
    def coverage(self) -> Sequence[Coverage]:
        """What is known of the processes that have written here."""
        return tuple(self._coverage.values())

    async def update(self) -> None:
        """Read the blocks that were appended since the last call. Raises the errors of `Partition.read`."""
        while self._updated is not None:  # by another look-up, which may have begun before the last blocks
            await self._updated
        self._updated = self._scheduler.promise()
        try:
            await self._read_new_blocks()
        finally:
            updated, self._updated = self._updated, None
            complete(updated, None)

    async def _read_new_blocks(self) -> None:
        partition, turns = self.partition, ItemTurns(self._scheduler, Work.TRACE)
        start = partition.start_offset
        if self._next_offset < start:
            self._next_offset = self._open_first = start
            self._open, self._open_blocks, self._open_begin_ms = {}, 0, -1
            self.begin_ms = -1
        while self._groups and self._groups[0].end <= start:
            self._remove_bytes(self._groups.popleft())
            self.begin_ms = self._groups[0].begin_ms if self._groups else self._open_begin_ms
        while (part := partition.read(self._next_offset, READ_BYTES)) is not None:
            for offset, block in await self._blocks_of(part):
                self._add(offset, block)
                await turns.next(1 + (0 if block is None else block.header.entries // 16))
            self._next_offset = part.next_offset
        turns.end()

    async def _blocks_of(self, part: LogSlice) -> list[tuple[int, TraceBlock | None]]:
        return await run_in_thread(self._scheduler, self._thread, partial(_read_blocks, part))

    def _add(self, offset: int, block: TraceBlock | None) -> None:
        if block is None:
            return
        header = block.header
        if self.begin_ms < 0:
            self.begin_ms = header.begin_ms
        if not self._open_blocks:
            self._open_begin_ms = header.begin_ms
        process = (header.broker_id, header.incarnation)
        coverage = self._coverage.get(process)
        if coverage is None:
            if len(self._coverage) >= PROCESSES_MAX:
                del self._coverage[next(iter(self._coverage))]
            coverage = self._coverage[process] = Coverage(*process)
        coverage.add(header)
        known = self._open
        for entry in block.entries():
            key = entry.topic_id + entry.partition.to_bytes(4, "big")
            before = known.get(key)
            known[key] = (
                (entry.first, entry.end)
                if before is None
                else (min(before[0], entry.first), max(before[1], entry.end))
            )
        self._open_blocks += 1
        if self._open_blocks >= BLOCKS_PER_GROUP:
            self._append(_new_group(self._open_first, offset + 1, self._open_begin_ms, known))
            self._open, self._open_first, self._open_blocks = {}, offset + 1, 0

    def _append(self, group: _Group) -> None:
        self._groups.append(group)
        self._size_bytes += len(group.keys) // 20 * _ENTRY_BYTES
        if self._size_bytes > BYTES_MAX:
            joined: deque[_Group] = deque()
            groups = tuple(self._groups)
            for first, second in zip(groups[::2], groups[1::2], strict=False):
                joined.append(_joined(first, second))
            if len(groups) % 2:
                joined.append(groups[-1])
            self._groups = joined
            self._size_bytes = sum(len(each.keys) // 20 * _ENTRY_BYTES for each in joined)

    def _remove_bytes(self, group: _Group) -> None:
        self._size_bytes -= len(group.keys) // 20 * _ENTRY_BYTES

    async def find(
        self, topic_id: bytes, partition: int, offsets: Sequence[int]
    ) -> tuple[list[TracedRow], bool]:
        """Return the rows about some offsets, and those about the partition, in the order in which
        they were written; and whether they are all: at most `ROWS_MAX` are returned, the oldest ones.

        Raises the errors of `Partition.read`."""
        key = topic_id + partition.to_bytes(4, "big")
        found: list[TracedRow] = []
        turns = ItemTurns(self._scheduler, Work.TRACE)
        wanted = [
            (group.first, group.end)
            for group in self._groups
            if any(group.may_have(key, each) for each in offsets)
        ]
        bounds = self._open.get(key)
        if bounds is not None and any(bounds[0] <= each < bounds[1] for each in offsets):
            wanted.append((self._open_first, self._next_offset))
        seen: set[tuple[int, int, int]] = set()
        for first, end in wanted:
            offset = max(first, self.partition.start_offset)
            while offset < end and (part := self.partition.read(offset, READ_BYTES)) is not None:
                for at, block in await self._blocks_of(part):
                    if block is None or not offset <= at < end:
                        continue
                    header = block.header
                    number = (header.broker_id, header.incarnation, header.sequence)
                    if number in seen:
                        continue  # written again after an unknown outcome
                    seen.add(number)
                    for entry in block.entries_of(topic_id, partition):
                        if any(entry.first <= each < entry.end for each in offsets):
                            found += [
                                TracedRow(row, header.broker_id, header.incarnation, entry.leader_epoch)
                                for row in block.rows(entry, offsets)
                            ]
                    if len(found) > ROWS_MAX:
                        return found[:ROWS_MAX], False
                    await turns.next()
                offset = part.next_offset
        turns.end()
        return found, True

    async def last_failed(self, group: str, blocks_max: int) -> FailedRecord | None:
        """Return the record that a share group has rejected, or used up the attempts of, last, among the last blocks.

        Raises the errors of `Partition.read`."""
        turns = ItemTurns(self._scheduler, Work.TRACE, items_per_look=1)
        older = ((each.first, each.end) for each in reversed(tuple(self._groups)))
        for first, end in [(self._open_first, self._next_offset), *older]:
            if blocks_max <= 0:
                break
            found: FailedRecord | None = None
            offset = max(first, self.partition.start_offset)
            while offset < end and (part := self.partition.read(offset, READ_BYTES)) is not None:
                for at, block in await self._blocks_of(part):
                    if block is None or not offset <= at < end:
                        continue
                    blocks_max -= 1
                    for entry, row in block.rows_of_group(group, FAILURES):
                        if found is None or row.time_ms >= found.time_ms:
                            last = row.first + row.size - 1
                            found = FailedRecord(entry.topic_id, entry.partition, last, row.time_ms)
                    await turns.next()
                offset = part.next_offset
            if found is not None:
                turns.end()
                return found
        turns.end()
        return None


def _new_group(first: int, end: int, begin_ms: int, known: dict[bytes, tuple[int, int]]) -> _Group:
    keys = sorted(known)
    bounds = array("q", [bound for key in keys for bound in known[key]])
    return _Group(first, end, begin_ms, b"".join(keys), bounds)


def _joined(first: _Group, second: _Group) -> _Group:
    known = {key: (low, high) for key, low, high in first.entries()}
    for key, low, high in second.entries():
        before = known.get(key, (low, high))
        known[key] = (min(before[0], low), max(before[1], high))
    return _new_group(first.first, second.end, first.begin_ms, known)


def _read_blocks(part: LogSlice) -> list[tuple[int, TraceBlock | None]]:
    """Return the offset and the block of each batch; None for one that cannot be read."""
    data, position = memoryview(part.read()), 0
    found: list[tuple[int, TraceBlock | None]] = []
    while position < len(data):
        header = read_header(data[position:])
        end = position + header.batch_length + 12
        block: TraceBlock | None = None
        with contextlib.suppress(MansioError):
            (record,) = read_records(data[position:end])
            block = TraceBlock(record.value or b"")
        found.append((header.base_offset, block))
        position = end
    return found
