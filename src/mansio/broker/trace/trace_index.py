"""Index of one partition of `__mansio_trace`: which blocks have rows of which partitions, and which blocks are missing.

`BLOCKS_PER_GROUP` blocks that follow one another are one entry of the index: the partitions in them, and the bounds of
their offsets. A look-up reads the blocks of the entries that may have something; in these, the index of each block
decides (`trace_records`). When the index would take more than `BYTES_MAX`, neighbours are joined: it gets smaller and
look-ups read more.

The entries are appended to the partition itself, as index records (`trace_index_records`). A broker that has just
started reads these, and only the blocks that no index record is about.

Invariants:
* A block that cannot be read is a missing block.
* Index records only save time: without some of them the index is the same, up to the bounds of the groups.
"""

from __future__ import annotations

import contextlib
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from mansio.broker.partition.verified_read import read_when_verified
from mansio.errors import DamagedRange, MansioError, MessageTooLarge
from mansio.host.item_turns import ItemTurns, Work
from mansio.host.run_in_thread import run_in_thread
from mansio.ports import complete
from mansio.state.trace.block_group import BlockGroup, OpenGroup, join_neighbours
from mansio.state.trace.coverage import Coverage, TracedRow
from mansio.wire.batch.record_batch import LOG_OVERHEAD_BYTES, read_header
from mansio.wire.batch.record_reader import read_records
from mansio.wire.internal_records.trace_index_records import (
    IndexRecord,
    decode_index_record,
    encode_index_record,
    is_index_record,
)
from mansio.wire.internal_records.trace_records import ATTEMPTS_USED_UP, REJECTED, TraceBlock

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Sequence

    from mansio.broker.partition.partition import Partition
    from mansio.ports import Background, Promise, Scheduler
    from mansio.storage.segment_list import LogSlice
    from mansio.wire.internal_records.trace_index_records import CoveredTime

T = TypeVar("T")

BLOCKS_PER_GROUP: Final = 128
BYTES_MAX: Final = 16 << 20
"""Size of the index at which neighbours are joined."""

READ_BYTES: Final = 1 << 20
ROWS_MAX: Final = 10_000
"""Maximum number of rows in the result of a look-up."""

UNSTORED_MAX: Final = 10_000
"""Maximum number of groups that wait for their index record; older ones get none."""

TAIL_BATCHES: Final = BLOCKS_PER_GROUP + 32
"""Number of the last batches in which the last index record is expected."""

TAIL_BATCHES_MAX: Final = 4 * TAIL_BATCHES
"""Number of the last batches in which it is looked for."""

FAILURES: Final = frozenset({REJECTED, ATTEMPTS_USED_UP})
"""Kinds of rows with which a record fails in a share group."""

PROCESSES_MAX: Final = 1_000
"""Maximum number of broker processes whose coverage is known; that of older ones is forgotten."""


class FailedRecord(NamedTuple):
    """A record that a share group has rejected, or used up the attempts of, at `time_ms`."""

    topic_id: bytes
    partition: int
    offset: int
    time_ms: int


class _Piece(NamedTuple):
    """Blocks that belong to one group: their part of it, and the offset after the last one."""

    group: OpenGroup
    next_offset: int


class _Scanned(NamedTuple):
    """What a part of the log has. `last_index`: offset of its last index record, -1 for none."""

    pieces: Sequence[_Piece]
    last_index: int


class _Unstored(NamedTuple):
    """A group without an index record, and what its blocks cover."""

    group: BlockGroup
    covered: Sequence[CoveredTime]


BlockNumber = tuple[int, int, int]
"""Broker, process and number of a block."""


class TraceIndex:
    """The index of one partition of the topic, which this broker leads. All methods run on the event loop."""

    def __init__(
        self,
        partition: Partition,
        scheduler: Scheduler,
        thread: Background,
        append: Callable[[Partition, bytes], Awaitable[None]],
    ) -> None:
        """`thread`: reads the blocks; `append`: appends a record with this value to the partition, and returns when it
        is committed."""
        self.partition = partition
        self._thread = thread
        self._scheduler = scheduler
        self._append_value = append
        self._groups: deque[BlockGroup] = deque()
        self._open = OpenGroup(0)
        self._size_bytes = 0
        self._next_offset = -1
        self._coverage: dict[tuple[int, int], Coverage] = {}
        self._unstored: deque[_Unstored] = deque(maxlen=UNSTORED_MAX)
        self._last_index = -1
        """Offset of the last index record."""
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
            await self._read_new()
        finally:
            updated, self._updated = self._updated, None
            complete(updated, None)

    async def store(self) -> None:
        """Append an index record for each group that has none. Raises the errors of `update` and of the append."""
        await self.update()
        while self._unstored:
            group, covered = self._unstored[0]
            record = IndexRecord(
                group.first, group.end, self._last_index, covered, group.keys, group.starts, group.bounds
            )
            with contextlib.suppress(MessageTooLarge):  # it is indexed again after each start
                await self._append_value(self.partition, encode_index_record(record))
            if self._unstored and self._unstored[0].group is group:  # not deleted meanwhile
                self._unstored.popleft()
            await self.update()

    # ------------------------------------------------------------------ reading

    async def _read_new(self) -> None:
        start = self.partition.start_offset
        if self._next_offset < 0:
            await self._load(start)
        if self._next_offset < start:
            self._next_offset, self._open = start, OpenGroup(start)
        while self._groups and self._groups[0].end <= start:
            self._size_bytes -= self._groups.popleft().size_bytes
        while self._unstored and self._unstored[0].group.end <= start:
            self._unstored.popleft()
        await self._scan(self.partition.end_offset)

    async def _load(self, start: int) -> None:
        """Begin with the index records, and the blocks before the last one that none is about."""
        records = await self._read_index_records(start)
        self._next_offset, self._open = start, OpenGroup(start)
        for record in records:
            if record.first < self._next_offset:
                continue  # of a leader that did not know of the other one
            await self._scan(record.first)
            if self._open.block_count:
                await self._close_open(record.first)
            await self._add_group(
                BlockGroup(record.first, record.end, record.keys, record.starts, record.bounds)
            )
            for covered in record.covered:
                self._covered(covered)
            self._next_offset, self._open = record.end, OpenGroup(record.end)

    async def _read_index_records(self, start: int) -> list[IndexRecord]:
        """Return the index records, ordered by their blocks."""
        offset, end = await self._find_last_index(start), self.partition.end_offset
        self._last_index = offset
        found: list[IndexRecord] = []
        turns = ItemTurns(self._scheduler, Work.TRACE)
        while start <= offset < end and (part := await self._read(offset, 1)) is not None:
            record = await self._in_thread(partial(_read_index_record, part, offset))
            if record is None:
                break
            if record.end > start:
                found.append(record)
            offset, end = record.previous, offset
            await turns.next()
        turns.end()
        return sorted(found)

    async def _find_last_index(self, start: int) -> int:
        """Return the offset of the last index record, -1 if there is none among the last batches."""
        end, size = self.partition.end_offset, TAIL_BATCHES
        while True:
            offset, last = max(start, end - size), -1
            while offset < end and (part := await self._read(offset)) is not None:
                last = max(last, await self._in_thread(partial(_last_index_in, part, offset, end)))
                offset = part.next_offset
            if last >= 0 or size >= min(end - start, TAIL_BATCHES_MAX):
                return last
            size *= 4

    async def _scan(self, end: int) -> None:
        """Read the blocks up to below an offset."""
        turns = ItemTurns(self._scheduler, Work.TRACE)
        while self._next_offset < end and (part := await self._read(self._next_offset)) is not None:
            room = BLOCKS_PER_GROUP - self._open.block_count
            scanned = await self._in_thread(partial(_scan, part, self._next_offset, end, room))
            self._last_index = max(self._last_index, scanned.last_index)
            for piece in scanned.pieces:
                for key, intervals in piece.group.known.items():
                    for interval in intervals:
                        self._open.add(key, *interval)
                    await turns.next()
                for coverage in piece.group.coverage.values():
                    covered = coverage.summary()
                    self._open.add_covered(covered)
                    self._covered(covered)
                self._open.block_count += piece.group.block_count
                self._next_offset = piece.next_offset
                if self._open.block_count >= BLOCKS_PER_GROUP:
                    await self._close_open(piece.next_offset)
            self._next_offset = min(part.next_offset, end)
        turns.end()

    async def _close_open(self, end: int) -> None:
        group = self._open.close(end)
        covered = [each.summary() for each in self._open.coverage.values()]
        self._open = OpenGroup(end)
        self._unstored.append(_Unstored(group, covered))
        await self._add_group(group)

    def _covered(self, covered: CoveredTime) -> None:
        process = (covered.broker_id, covered.incarnation)
        coverage = self._coverage.get(process)
        if coverage is None:
            if len(self._coverage) >= PROCESSES_MAX:
                del self._coverage[next(iter(self._coverage))]
            coverage = self._coverage[process] = Coverage(*process)
        coverage.extend(covered)

    async def _add_group(self, group: BlockGroup) -> None:
        self._groups.append(group)
        self._size_bytes += group.size_bytes
        if self._size_bytes > BYTES_MAX:
            self._groups = deque(await self._in_thread(partial(join_neighbours, tuple(self._groups))))
            self._size_bytes = sum(each.size_bytes for each in self._groups)

    async def _read(self, offset: int, max_bytes: int = READ_BYTES) -> LogSlice | None:
        """Return batches from an offset on, or from the end of a damaged range on; None if there are none.

        Raises the errors of `Partition.read`."""
        while True:
            try:
                return await read_when_verified(
                    self._scheduler, partial(self.partition.read, offset, max_bytes)
                )
            except DamagedRange as error:
                offset = error.end_offset
                if offset >= self.partition.end_offset:
                    return None

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await run_in_thread(self._scheduler, self._thread, work)

    # ------------------------------------------------------------------ look-ups

    async def find(
        self, topic_id: bytes, partition: int, offsets: Sequence[int]
    ) -> tuple[list[TracedRow], bool]:
        """Return the rows about some offsets, and those about the partition, in the order in which
        they were written; and whether they are all: at most `ROWS_MAX` are returned, the oldest ones.

        Raises the errors of `Partition.read`."""
        key = topic_id + partition.to_bytes(4, "big")
        found: list[TracedRow] = []
        wanted: list[tuple[int, int]] = []
        last = (
            self._open.first,
            self._next_offset,
        )  # before another look-up closes this group, in the turns below
        is_in_last = any(
            low <= each < high for low, high in self._open.known.get(key, []) for each in offsets
        )
        turns = ItemTurns(self._scheduler, Work.TRACE)
        for group in tuple(self._groups):
            if group.may_have(key, offsets):
                wanted.append((group.first, group.end))
            await turns.next()
        turns.end()
        if is_in_last:
            wanted.append(last)
        seen: set[BlockNumber] = set()
        for first, end in wanted:
            offset = max(first, self.partition.start_offset)
            while offset < end and (part := await self._read(offset)) is not None:
                offset = part.next_offset
                work = partial(_find_rows, part, first, end, topic_id, partition, offsets)
                for number, rows in await self._in_thread(work):
                    if number not in seen:  # otherwise it was written again after an unknown outcome
                        seen.add(number)
                        found += rows
                if len(found) > ROWS_MAX:
                    return found[:ROWS_MAX], False
        return found, True

    async def last_failed(self, group: str, blocks_max: int) -> FailedRecord | None:
        """Return the record that a share group has rejected, or used up the attempts of, last, among the last blocks.

        Raises the errors of `Partition.read`."""
        older = ((each.first, each.end) for each in reversed(tuple(self._groups)))
        for first, end in [(self._open.first, self._next_offset), *older]:
            if blocks_max <= 0:
                break
            found: FailedRecord | None = None
            offset = max(first, self.partition.start_offset)
            while offset < end and (part := await self._read(offset)) is not None:
                offset = part.next_offset
                count, failed = await self._in_thread(partial(_last_failed, part, first, end, group))
                blocks_max -= count
                if failed is not None and (found is None or failed.time_ms >= found.time_ms):
                    found = failed
            if found is not None:
                return found
        return None


def _values(part: LogSlice, first: int, end: int) -> Iterator[tuple[int, bytes]]:
    """Yield offset and value of each record from the offset `first` to below `end`, "" for one that cannot be read."""
    data, position = memoryview(part.read()), 0
    while position < len(data):
        header = read_header(data, position)
        begin, position = position, position + header.batch_length + LOG_OVERHEAD_BYTES
        if header.base_offset >= end:
            return
        if header.base_offset >= first:
            value = b""
            with contextlib.suppress(MansioError, ValueError):
                (record,) = read_records(data[begin:position])
                value = record.value or b""
            yield header.base_offset, value


def _blocks(part: LogSlice, first: int, end: int) -> Iterator[tuple[int, TraceBlock]]:
    """Yield offset and block of each batch from the offset `first` to below `end` that is a block and can be read."""
    for offset, value in _values(part, first, end):
        if not is_index_record(value):
            with contextlib.suppress(MansioError):
                yield offset, TraceBlock(value)


def _scan(part: LogSlice, first: int, end: int, room: int) -> _Scanned:
    """Read the blocks from the offset `first` to below `end`. `room`: how many the first group still has room for."""
    pieces: list[_Piece] = []
    group, last_index = OpenGroup(first), -1
    for offset, value in _values(part, first, end):
        if is_index_record(value):
            last_index = offset
            continue
        with contextlib.suppress(MansioError):
            block = TraceBlock(value)
            for key, low, high in block.bounds():
                group.add(key, low, high)
            group.add_header(block.header)
        if group.block_count >= room:
            pieces.append(_Piece(group, offset + 1))
            group, room = OpenGroup(offset + 1), BLOCKS_PER_GROUP
    if group.block_count:
        pieces.append(_Piece(group, min(part.next_offset, end)))
    return _Scanned(pieces, last_index)


def _find_rows(
    part: LogSlice, first: int, end: int, topic_id: bytes, partition: int, offsets: Sequence[int]
) -> list[tuple[BlockNumber, list[TracedRow]]]:
    found = []
    for _, block in _blocks(part, first, end):
        header = block.header
        rows: list[TracedRow] = []
        for entry in block.entries_of(topic_id, partition):
            if any(entry.first <= each < entry.end for each in offsets):
                with contextlib.suppress(MansioError):
                    rows += [
                        TracedRow(row, header.broker_id, header.incarnation, entry.leader_epoch)
                        for row in block.rows(entry, offsets)
                    ]
        if rows:
            found.append(((header.broker_id, header.incarnation, header.sequence), rows))
    return found


def _last_failed(part: LogSlice, first: int, end: int, group: str) -> tuple[int, FailedRecord | None]:
    """Return the number of blocks, and the record of a group that failed last in them."""
    count, found = 0, None
    for _, block in _blocks(part, first, end):
        count += 1
        with contextlib.suppress(MansioError):
            for entry, row in block.rows_of_group(group, FAILURES):
                if found is None or row.time_ms >= found.time_ms:
                    last = row.first + row.size - 1
                    found = FailedRecord(entry.topic_id, entry.partition, last, row.time_ms)
    return count, found


def _last_index_in(part: LogSlice, first: int, end: int) -> int:
    """Return the offset of the last index record, -1 if there is none."""
    return max((offset for offset, value in _values(part, first, end) if is_index_record(value)), default=-1)


def _read_index_record(part: LogSlice, offset: int) -> IndexRecord | None:
    """Return the index record at an offset, None if it cannot be read."""
    value = next((value for _, value in _values(part, offset, offset + 1)), b"")
    try:
        return decode_index_record(value)
    except MansioError:
        return None
