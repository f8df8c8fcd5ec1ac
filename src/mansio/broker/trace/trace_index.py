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
from itertools import pairwise
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
    from collections.abc import Iterator, Mapping, Sequence

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

INTERVALS_MAX: Final = 8
"""Maximum number of intervals of offsets of a partition in an entry of the index; the closest ones are joined."""

KEY_BYTES: Final = 20


class FailedRecord(NamedTuple):
    """A record that a share group has rejected, or used up the attempts of, at `time_ms`."""

    topic_id: bytes
    partition: int
    offset: int
    time_ms: int


Intervals = list[tuple[int, int]]
"""Ascending, disjoint ranges of offsets, each from the first to below the second one; at most `INTERVALS_MAX`."""


class _Group(NamedTuple):
    """Blocks that follow one another, in the batches from the offset `first` to below `end`. `keys`: sorted, 20 bytes
    each; `starts`: for each of them, and once more at the end, the position in `bounds` of its intervals."""

    first: int
    end: int
    keys: bytes
    starts: array[int]
    bounds: array[int]

    def may_have(self, key: bytes, offset: int) -> bool:
        """Whether a block may have a row about a partition and an offset."""
        low, high = 0, len(self.keys) // KEY_BYTES
        keys = self.keys
        while low < high:
            middle = (low + high) // 2
            if keys[middle * KEY_BYTES : (middle + 1) * KEY_BYTES] < key:
                low = middle + 1
            else:
                high = middle
        if keys[low * KEY_BYTES : (low + 1) * KEY_BYTES] != key:
            return False
        found = self.bounds[self.starts[low] : self.starts[low + 1]]
        return any(found[at] <= offset < found[at + 1] for at in range(0, len(found), 2))

    def entries(self) -> Iterator[tuple[bytes, Intervals]]:
        """Yield each partition with its intervals."""
        for number in range(len(self.keys) // KEY_BYTES):
            found = self.bounds[self.starts[number] : self.starts[number + 1]]
            key = self.keys[number * KEY_BYTES : (number + 1) * KEY_BYTES]
            yield key, list(zip(found[::2], found[1::2], strict=True))

    @property
    def size_bytes(self) -> int:
        """Size in memory."""
        return len(self.keys) + 4 * len(self.starts) + 8 * len(self.bounds)


def _add_interval(intervals: Intervals, first: int, end: int) -> None:
    """Add a range of offsets, and join the two closest intervals if there are too many."""
    intervals.append((first, end))
    intervals.sort()
    joined = [intervals[0]]
    for low, high in intervals[1:]:
        if low <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], high))
        else:
            joined.append((low, high))
    if len(joined) > INTERVALS_MAX:
        gaps = [second[0] - first_one[1] for first_one, second in pairwise(joined)]
        at = gaps.index(min(gaps))
        joined[at : at + 2] = [(joined[at][0], joined[at + 1][1])]
    intervals[:] = joined


class TraceIndex:
    """The index of one partition of the topic, which this broker leads. All methods run on the event loop."""

    def __init__(self, partition: Partition, scheduler: Scheduler, thread: Background) -> None:
        """`thread`: reads the blocks."""
        self.partition = partition
        self._thread = thread
        self._scheduler = scheduler
        self._groups: deque[_Group] = deque()
        self._open: dict[bytes, Intervals] = {}
        self._open_first = self._open_blocks = 0
        self._size_bytes = 0
        self._next_offset = -1
        self._coverage: dict[tuple[int, int], Coverage] = {}
        self._updated: Promise[None] | None = None
        """Completes when the blocks have been read that are being read."""

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
            self._open, self._open_blocks = {}, 0
        while self._groups and self._groups[0].end <= start:
            self._size_bytes -= self._groups.popleft().size_bytes
        while (part := partition.read(self._next_offset, READ_BYTES)) is not None:
            for offset, block in await self._blocks_of(part):
                with contextlib.suppress(MansioError):  # it is missing, as one that cannot be decoded
                    self._add(offset, block)
                self._next_offset = offset + 1
                await turns.next(1 + (0 if block is None else block.header.entries // 16))
            self._next_offset = part.next_offset
        turns.end()

    async def _blocks_of(self, part: LogSlice) -> list[tuple[int, TraceBlock | None]]:
        return await run_in_thread(self._scheduler, self._thread, partial(_read_blocks, part))

    def _add(self, offset: int, block: TraceBlock | None) -> None:
        if block is None:
            return
        header = block.header
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
            _add_interval(known.setdefault(key, []), entry.first, entry.end)
        self._open_blocks += 1
        if self._open_blocks >= BLOCKS_PER_GROUP:
            self._append(_new_group(self._open_first, offset + 1, known))
            self._open, self._open_first, self._open_blocks = {}, offset + 1, 0

    def _append(self, group: _Group) -> None:
        self._groups.append(group)
        self._size_bytes += group.size_bytes
        if self._size_bytes > BYTES_MAX:
            joined: deque[_Group] = deque()
            groups = tuple(self._groups)
            for first, second in zip(groups[::2], groups[1::2], strict=False):
                joined.append(_joined(first, second))
            if len(groups) % 2:
                joined.append(groups[-1])
            self._groups = joined
            self._size_bytes = sum(each.size_bytes for each in joined)

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
        bounds = self._open.get(key, [])
        if any(low <= each < high for low, high in bounds for each in offsets):
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
                            with contextlib.suppress(MansioError):
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


def _new_group(first: int, end: int, known: Mapping[bytes, Intervals]) -> _Group:
    starts, bounds = array("I", [0]), array("q")
    keys = sorted(known)
    for key in keys:
        for interval in known[key]:
            bounds.extend(interval)
        starts.append(len(bounds))
    return _Group(first, end, b"".join(keys), starts, bounds)


def _joined(first: _Group, second: _Group) -> _Group:
    known = dict(first.entries())
    for key, intervals in second.entries():
        mine = known.setdefault(key, [])
        for interval in intervals:
            _add_interval(mine, *interval)
    return _new_group(first.first, second.end, known)


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
