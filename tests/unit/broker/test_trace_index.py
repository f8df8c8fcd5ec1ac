"""Index of the trace: look-ups find what is in the blocks, after changes of the leader, too, and a start reads few of
them."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest

from mansio.broker.trace import trace_index
from mansio.broker.trace.trace_index import TraceIndex
from mansio.errors import CorruptMessage, DamagedRange, NotLeaderOrFollower, VerificationPending
from mansio.host.asyncio_loop import AsyncioScheduler
from mansio.state.trace.coverage import Coverage, TracedRow
from mansio.wire.batch.record_batch import build_value_only_batch
from mansio.wire.batch.record_reader import read_records
from mansio.wire.internal_records.trace_index_records import is_index_record
from mansio.wire.internal_records.trace_records import (
    ENDED,
    NO_VALUE,
    PUBLISHED,
    REJECTED,
    ROW,
    VERSION,
    BlockHeader,
    PartitionRows,
    TraceBlock,
    encode_block,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

TOPICS = (b"a" * 16, b"b" * 16)
PARTITIONS = range(3)
OFFSETS = range(200)
GROUP = "billing"


@pytest.fixture(autouse=True)
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_index, "BLOCKS_PER_GROUP", 4)
    monkeypatch.setattr(trace_index, "TAIL_BATCHES", 6)
    monkeypatch.setattr(trace_index, "TAIL_BATCHES_MAX", 24)


class Part:
    """A part of the log, as `LogSlice`."""

    def __init__(self, log: Log, first: int, end: int) -> None:
        self._batches = log.batches[first:end]
        self._log = log
        self.next_offset = end

    def read(self) -> bytes:
        self._log.batches_read += len(self._batches)
        return b"".join(self._batches)


class Log:
    """A partition of the trace. Reads return at most three batches; some have to be repeated, as those of batches that
    are verified before, and some batches are damaged."""

    def __init__(self) -> None:
        self.batches: list[bytes] = []
        self.start_offset = 0
        self.batches_read = 0
        self.refuses = False
        self.damaged: set[int] = set()
        self._verified: set[int] = set()

    @property
    def end_offset(self) -> int:
        return len(self.batches)

    def read(self, offset: int, max_bytes: int) -> Part | None:
        assert self.start_offset <= offset <= self.end_offset
        if offset == self.end_offset:
            return None
        if offset in self.damaged:
            error = DamagedRange("damaged")
            error.first_offset, error.end_offset = offset, offset + 1
            raise error
        if offset % 5 == 0 and offset not in self._verified:
            self._verified.add(offset)
            raise VerificationPending("soon")
        end = min(
            offset + (1 if max_bytes == 1 else 3), self.end_offset, *(x for x in self.damaged if x > offset)
        )
        return Part(self, offset, end)

    def append(self, value: bytes) -> None:
        batch = bytearray(build_value_only_batch([0], [value]))
        batch[:8] = len(self.batches).to_bytes(8, "big")
        self.batches.append(bytes(batch))

    async def append_index(self, partition: Any, value: bytes) -> None:
        assert partition is self
        if self.refuses:
            raise NotLeaderOrFollower("refused")
        self.append(value)

    def blocks(self) -> Iterator[TraceBlock]:
        """All blocks that are there and can be read."""
        for offset, batch in enumerate(self.batches):
            if offset < self.start_offset or offset in self.damaged:
                continue
            (record,) = read_records(batch)
            value = record.value or b""
            if not is_index_record(value):
                with suppress(CorruptMessage):
                    yield TraceBlock(value)


class Thread:
    """Runs work at once."""

    def submit(self, work: Callable[[], Any], done: Callable[[Any, BaseException | None], None]) -> None:
        try:
            result = work()
        except BaseException as error:  # noqa: BLE001 - as a thread returns it
            done(None, error)
        else:
            done(result, None)


def new_index(log: Log) -> TraceIndex:
    loop = AsyncioScheduler(asyncio.get_running_loop())
    return TraceIndex(log, loop, Thread(), log.append_index)  # type: ignore[arg-type]


class Writers:
    """Broker processes that write blocks, some of which are lost, or written twice."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._sequences: dict[tuple[int, int], int] = {}
        self._last: dict[tuple[int, int], bytes] = {}
        self._now_ms = 1_000_000

    def block(self, processes: int = 3, losses: bool = True) -> bytes:
        chance = self._chance
        process = (chance.randrange(3), 1_000 + chance.randrange(processes))
        sequence = self._sequences.get(process, -1) + 1
        if losses and sequence and chance.random() < 0.1:
            if chance.random() < 0.3:
                return self._last[process]
            sequence += 1
        self._sequences[process] = sequence
        begin_ms, self._now_ms = self._now_ms, self._now_ms + 1_000
        keys = chance.sample(
            [(topic, number) for topic in TOPICS for number in PARTITIONS], chance.randrange(1, 4)
        )
        dropped = chance.choice([0, 0, 0, 0, 3])
        header = BlockHeader(VERSION, 0, *process, sequence, begin_ms, self._now_ms, dropped, 0, 0, 0, 0)
        self._last[process] = encode_block(header, [self._rows(*key) for key in keys], [GROUP])
        return self._last[process]

    def _rows(self, topic_id: bytes, partition: int) -> PartitionRows:
        chance = self._chance
        rows, first, end = bytearray(), OFFSETS.stop, 0
        for _ in range(chance.randrange(1, 4)):
            low, size = chance.choice(OFFSETS), chance.randrange(1, 4)
            kind = chance.choice([PUBLISHED, REJECTED, ENDED])
            rows += ROW.pack(kind, 0, 1, 1, 0, chance.randrange(1_000), low, size, NO_VALUE)
            first, end = min(first, low), max(end, low + size)
        return PartitionRows(topic_id, partition, 7, bytes(rows), first, end)


def wanted_rows(log: Log, topic_id: bytes, partition: int, offset: int) -> list[TracedRow]:
    seen, found = set(), []
    for block in log.blocks():
        header = block.header
        number = (header.broker_id, header.incarnation, header.sequence)
        if number in seen:
            continue
        seen.add(number)
        for entry in block.entries_of(topic_id, partition):
            if entry.first <= offset < entry.end:
                found += [
                    TracedRow(row, header.broker_id, header.incarnation, entry.leader_epoch)
                    for row in block.rows(entry, [offset])
                ]
    return found


def coverage_of(found: Sequence[Coverage]) -> set[tuple[Any, ...]]:
    return {
        (each.broker_id, each.incarnation, each.begin_ms, each.end_ms, tuple(each.gaps)) for each in found
    }


def wanted_coverage(log: Log) -> set[tuple[Any, ...]]:
    known: dict[tuple[int, int], Coverage] = {}
    for block in log.blocks():
        process = (block.header.broker_id, block.header.incarnation)
        known.setdefault(process, Coverage(*process)).add(block.header)
    return coverage_of(list(known.values()))


async def check(index: TraceIndex, log: Log, chance: random.Random) -> None:
    await index.update()
    for _ in range(5):
        topic_id, partition, offset = chance.choice(TOPICS), chance.choice(PARTITIONS), chance.choice(OFFSETS)
        rows, is_complete = await index.find(topic_id, partition, [offset])
        assert is_complete
        assert rows == wanted_rows(log, topic_id, partition, offset)
    if not log.start_offset:
        assert coverage_of(index.coverage) == wanted_coverage(log)


@pytest.mark.parametrize("seed", range(12))
def test_look_ups_find_what_is_in_the_blocks_also_after_changes_of_the_leader(seed: int) -> None:
    async def run() -> None:
        chance = random.Random(seed)
        log, writers = Log(), Writers(chance)
        index = new_index(log)
        for _ in range(60):
            step = chance.randrange(12)
            if step < 6:
                for _ in range(chance.randrange(1, 6)):
                    log.append(writers.block())
            elif step == 6:
                log.append(chance.choice([b"", b"\x07broken", bytes(60), b"\x80broken"]))
                if seed % 3 == 0:
                    log.damaged.add(log.end_offset - 1)
            elif step == 7:
                index = new_index(log)
            elif step == 8:
                log.refuses = True
                with suppress(NotLeaderOrFollower):
                    await index.store()
                log.refuses = False
            elif step == 9 and seed % 2 and log.end_offset > 20:
                log.start_offset = chance.randrange(log.start_offset, log.end_offset - 10)
            elif step == 10:
                await check(index, log, chance)
            else:
                await index.store()
        await check(index, log, chance)
        await check(new_index(log), log, chance)

    asyncio.run(run())


def test_a_broker_that_has_just_started_reads_the_index_records_and_few_blocks() -> None:
    async def run() -> None:
        chance = random.Random(1)
        log, writers = Log(), Writers(chance)
        index = new_index(log)
        for _ in range(200):
            for _ in range(4):
                log.append(writers.block())
            await index.store()
        assert log.end_offset == 1_000
        log.batches_read = 0
        started = new_index(log)
        await started.update()
        assert log.batches_read <= 200 + 2 * 6 + 3
        await check(started, log, chance)

    asyncio.run(run())


def test_a_gap_between_index_records_is_indexed_by_the_next_leader() -> None:
    async def run() -> None:
        chance = random.Random(2)
        log, writers = Log(), Writers(chance)
        index = new_index(log)
        for number in range(40):
            log.append(writers.block(processes=1, losses=False))
            if number in {10, 30, 35}:
                await index.store()
            if number == 20:  # what the first leader has not stored is read by the next one
                index = new_index(log)
        await check(index, log, chance)
        log.batches_read = 0
        await new_index(log).update()
        assert log.batches_read <= 24

    asyncio.run(run())


def test_the_record_that_failed_last_is_found_in_blocks_with_and_without_an_index_record() -> None:
    async def run() -> None:
        chance = random.Random(3)
        log, writers = Log(), Writers(chance)
        index = new_index(log)
        for _ in range(5):
            for _ in range(7):
                log.append(writers.block())
            await index.store()
        started = new_index(log)
        await started.update()
        found = await started.last_failed(GROUP, 1_000)
        rows = [row for block in log.blocks() for _, row in block.rows_of_group(GROUP, trace_index.FAILURES)]
        assert found is not None
        assert found.time_ms in {row.time_ms for row in rows}
        assert await started.last_failed("another", 1_000) is None

    asyncio.run(run())


def test_a_look_up_finds_the_last_blocks_while_another_one_closes_their_group() -> None:
    async def run() -> None:
        chance = random.Random(4)
        log, writers = Log(), Writers(chance)
        index = new_index(log)
        for _ in range(6_003):  # many groups, so that the look-up has several turns
            log.append(writers.block(processes=1, losses=False))
        await index.update()
        last = [*log.blocks()][-1]
        entry = next(last.entries())
        place = entry.topic_id, entry.partition, entry.first
        wanted = wanted_rows(log, *place)
        log.append(writers.block(processes=1, losses=False))  # closes the last group
        topic_id, partition, offset = place
        (rows, is_complete), _ = await asyncio.gather(
            index.find(topic_id, partition, [offset]), index.update()
        )
        assert is_complete
        assert rows[: len(wanted)] == wanted

    asyncio.run(run())
