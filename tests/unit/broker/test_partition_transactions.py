"""Transactions of a partition against a model, over random transactions, truncations, deletions and restarts; and the
rules for batches and markers."""

from __future__ import annotations

import asyncio
import random
from array import array
from contextlib import nullcontext
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from mansio.broker.log_view import snapshots
from mansio.broker.partition.batch_processing import BatchProcessor
from mansio.broker.services.produce import ProduceService
from mansio.broker.services.transactions.marker_service import TransactionMarkerService
from mansio.config.topic_names import OFFSETS_TOPIC
from mansio.errors import (
    InvalidProducerEpoch,
    InvalidTxnState,
    MansioError,
    OffsetOutOfRange,
    OutOfOrderSequence,
    TransactionalIdMissing,
    TransactionCoordinatorFenced,
)
from mansio.state import partition_transactions
from mansio.state.partition_transactions import AbortedTransaction, PartitionTransactions
from mansio.state.producers import ProducerTable
from mansio.testing.disk import SimulatedDisk
from mansio.wire.batch.compression import Codec
from mansio.wire.batch.end_marker import EndMarker, decode_end_marker, encode_end_marker
from mansio.wire.batch.isolation_filter import visible_batches
from mansio.wire.batch.recompress import Compression
from mansio.wire.batch.record_batch import build_batch, read_header
from mansio.wire.batch.record_reader import read_records
from mansio.wire.field_values import READ_COMMITTED
from support.partition_bench import DIRECTORY, PartitionBench, small_bench
from support.tiers import examples
from unit.broker.test_batch_processing import ManualThread, rules

if TYPE_CHECKING:
    from collections.abc import Callable

ROUNDS = 40
STEPS = 60
PRODUCERS = range(1, 5)


def batch(
    producer_id: int, sequence: int, *, epoch: int = 0, transactional: bool = True, count: int = 1
) -> bytes:
    return build_batch(
        [(1000, None, b"%d" % producer_id, ())] * count,
        producer_id=producer_id,
        producer_epoch=epoch,
        base_sequence=sequence,
        transactional=transactional,
    )


class Entry(NamedTuple):
    """What the model keeps of a batch."""

    offset: int
    end_offset: int
    producer_id: int
    kind: str
    """plain, data, commit or abort."""


class Model:
    """The batches of the log, from which all is computed again for each question."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.start_offset = 0

    def transactions(self, high_watermark: int) -> tuple[int | None, dict[int, tuple[int, ...]]]:
        """(first undecided offset, aborted transactions by marker: producer, first offset, last stable offset)."""
        open_at: dict[int, int] = {}
        undecided: list[int] = []
        aborted: dict[int, tuple[int, ...]] = {}
        for entry in self.entries:
            if entry.kind == "data":
                open_at.setdefault(entry.producer_id, entry.offset)
            elif entry.kind != "plain" and entry.producer_id in open_at:
                first = open_at.pop(entry.producer_id)
                if entry.offset >= high_watermark:
                    undecided.append(first)
                if entry.kind == "abort":
                    stable = min(open_at.values(), default=entry.end_offset)
                    aborted[entry.offset] = (entry.producer_id, first, stable)
        undecided += open_at.values()
        return min(undecided, default=None), aborted

    def committed_offsets(self, end_offset: int) -> list[int]:
        """Offsets of the records that a reader of committed records sees below an offset."""
        found, open_data = [], dict[int, list[int]]()
        for entry in self.entries:
            if entry.kind == "plain":
                found.append(entry.offset)
            elif entry.kind == "data":
                open_data.setdefault(entry.producer_id, []).append(entry.offset)
            else:
                data = open_data.pop(entry.producer_id, [])
                found += data if entry.kind == "commit" else []
        return sorted(offset for offset in found if self.start_offset <= offset < end_offset)


class CheckedPartition:
    """A partition and its model; a leader that may become a follower whose log is truncated."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.disk = SimulatedDisk()
        self.bench = small_bench(self.disk, "producers")
        self.model = Model()
        self.sequences: dict[int, int] = {}

    def append(self, kind: str, producer_id: int) -> None:
        partition = self.bench.partition
        if kind in ("commit", "abort"):
            marker = EndMarker(producer_id, 0, kind == "commit", 3)
            appended = partition.append_marker(marker)
        else:
            plain = kind == "plain"
            sent = (
                build_batch([(1000, None, b"p", ())])
                if plain
                else batch(producer_id, self.next_sequence(producer_id))
            )
            appended = partition.append(sent, transactional=True)
        self.model.entries.append(Entry(appended.base_offset, appended.end_offset, producer_id, kind))

    def next_sequence(self, producer_id: int) -> int:
        producer = self.bench.producers.table.get(producer_id)
        return producer.batches[-1].last_sequence + 1 if producer is not None and producer.batches else 0

    def restart(self, *, crash: bool, damage: bool) -> None:
        if crash:
            self.bench.flush()
            self.disk = self.disk.crash(self.random)
        else:
            self.bench.flush()
            self.bench.partition.close()
            self.bench.log.close()
        if damage:
            for name in self.disk.list_directory(DIRECTORY):
                if name.endswith(".producers"):
                    self.disk.put_file(f"{DIRECTORY}/{name}", self.disk.read_file(f"{DIRECTORY}/{name}")[:-3])
        self.bench = small_bench(self.disk, "producers")

    def lag(self) -> None:
        """Begin an epoch in which another replica has to flush, too, so that nothing more is committed."""
        partition = self.bench.partition
        self.bench.flush()
        partition.become_leader(partition.leader_epoch + 1, in_sync={1, 2}, replicas={1, 2})
        self.bench.flush()

    def truncate(self) -> None:
        """Follow another leader, whose log ends at the high watermark or later, and lead again."""
        partition = self.bench.partition
        self.bench.flush()
        ends = [e.offset for e in self.model.entries if e.offset >= partition.high_watermark]
        end = self.random.choice([*ends, partition.end_offset])
        epoch = partition.leader_epoch
        partition.become_follower(2, epoch + 1)
        self.bench.flush()
        if end < partition.end_offset:
            self.bench.log.truncate_to(end)
            partition._on_truncated()
            self.model.entries = [e for e in self.model.entries if e.offset < end]
        partition.become_leader(epoch + 2, in_sync={1}, replicas={1})
        self.bench.flush()

    def trim(self) -> None:
        partition = self.bench.partition
        stable = partition.last_stable_offset
        offset = self.random.choice(
            [e.offset for e in self.model.entries if self.model.start_offset < e.offset <= stable] or [0]
        )
        if offset:
            partition.delete_records(offset)
            self.model.start_offset = offset

    def check(self) -> None:
        partition = self.bench.partition
        high_watermark = partition.high_watermark
        first, aborted = self.model.transactions(high_watermark)
        stable = high_watermark if first is None else min(first, high_watermark)
        assert partition.last_stable_offset == stable
        start = self.model.start_offset
        known = {
            one.last_offset: (one.producer_id, one.first_offset, one.last_stable_offset)
            for one in self.bench.producers.transactions.aborted()
        }
        wanted = {offset: fields for offset, fields in aborted.items() if offset >= start}
        assert known.keys() == wanted.keys()
        for offset, (producer_id, first_offset, last_stable) in wanted.items():
            assert known[offset][0] == producer_id
            assert max(known[offset][1], start) == max(first_offset, start)
            assert known[offset][2] == last_stable
        assert self.seen() == self.model.committed_offsets(stable)

    def seen(self) -> list[int]:
        """Offsets that a reader of committed records gets, reading in small parts."""
        partition = self.bench.partition
        offset, found = partition.start_offset, []
        while (part := partition.read(offset, 200, READ_COMMITTED)) is not None:
            aborted = [
                (one.producer_id, one.first_offset)
                for one in self.bench.producers.aborted_between(offset, part.next_offset)
            ]
            data = memoryview(part.read())
            for position, header, visible in visible_batches(data, ("t", 0), offset, aborted):
                if visible:
                    records = read_records(data[position : position + header.size], output_bytes_max=1 << 20)
                    found += [record.offset for record in records if record.offset >= offset]
            offset = part.next_offset
        return found


@pytest.mark.parametrize("seed", range(ROUNDS))
def test_readers_of_committed_records_see_exactly_those(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "SNAPSHOT_INTERVAL_BYTES", 400)
    checked = CheckedPartition(seed)
    for _ in range(STEPS):
        kind = checked.random.choices(
            ("data", "plain", "commit", "abort", "flush", "trim", "lag", "truncate", "restart"),
            (12, 3, 4, 4, 6, 1, 2, 3, 1),
        )[0]
        if kind == "flush":
            checked.bench.flush()
        elif kind == "trim":
            checked.trim()
        elif kind == "lag":
            checked.lag()
        elif kind == "truncate":
            checked.truncate()
        elif kind == "restart":
            checked.restart(crash=checked.random.random() < 0.5, damage=checked.random.random() < 0.3)
        else:
            checked.append(kind, checked.random.choice(PRODUCERS))
        checked.check()


def test_a_follower_knows_open_and_aborted_transactions() -> None:
    leader = small_bench(None, "producers")
    for producer_id in (1, 2, 3):
        leader.partition.append(batch(producer_id, 0), transactional=True)
    leader.partition.append_marker(EndMarker(1, 0, False, 5))
    leader.partition.append_marker(EndMarker(2, 0, True, 5))
    leader.flush()
    follower = small_bench(None, "producers", is_follower=True)
    follower.partition.become_follower(2, leader.partition.leader_epoch)
    data = b"".join(leader.log.batches(0))
    follower.partition.append_from_leader(memoryview(data), 0)
    for one in (leader, follower):
        assert one.producers.transactions.open == {3: 2}
        assert [tuple(each) for each in one.producers.transactions.aborted()] == [(1, 0, 3, 1)]
    assert follower.producers.table.to_bytes(5) == leader.producers.table.to_bytes(5)


def test_readers_of_committed_records_are_woken_only_when_they_can_read_more() -> None:
    bench = small_bench(None, "producers")
    woken: list[str] = []
    bench.partition.append(batch(2, 0, transactional=False))
    bench.flush()
    bench.partition.park(lambda: woken.append("uncommitted"))
    bench.partition.park(lambda: woken.append("committed"), READ_COMMITTED)

    def woken_by_flush() -> set[str]:
        woken.clear()
        bench.flush()
        return set(woken)

    for sequence in range(3):
        bench.partition.append(batch(1, sequence), transactional=True)
        bench.partition.append(batch(2, sequence + 1, transactional=False))
        assert woken_by_flush() == {"uncommitted"}
    bench.partition.append(batch(3, 0), transactional=True)
    bench.partition.append_marker(EndMarker(1, 0, True, 7))  # the transaction of producer 3 stays open
    assert woken_by_flush() == {"uncommitted", "committed"}
    bench.partition.append(batch(3, 1), transactional=True)
    assert woken_by_flush() == {"uncommitted"}
    bench.partition.append_marker(EndMarker(3, 0, True, 7))
    assert woken_by_flush() == {"uncommitted", "committed"}
    bench.partition.append(batch(2, 4, transactional=False))
    assert woken_by_flush() == {"uncommitted", "committed"}


def test_a_marker_of_an_older_epoch_or_coordinator_is_fenced() -> None:
    bench = small_bench(None, "producers")
    bench.partition.append(batch(1, 0, epoch=4), transactional=True)
    with pytest.raises(InvalidProducerEpoch):
        bench.partition.append_marker(EndMarker(1, 3, True, 7))
    bench.partition.append_marker(EndMarker(1, 4, True, 7))
    with pytest.raises(TransactionCoordinatorFenced):
        bench.partition.append_marker(EndMarker(1, 4, False, 6))
    assert bench.log.end_offset == 2


def test_a_repeated_marker_does_not_end_the_next_transaction_of_its_producer() -> None:
    bench = small_bench(None, "producers")
    bench.partition.append(batch(1, 0, epoch=4), transactional=True)
    marker = EndMarker(1, 5, False, 7, bumps_epoch=True)
    bench.partition.append_marker(marker)
    bench.partition.append_marker(marker)  # nothing is open: a repeat is accepted
    bench.partition.append(batch(1, 0, epoch=5), transactional=True)
    with pytest.raises(InvalidProducerEpoch, match="an earlier one"):
        bench.partition.append_marker(marker)
    bench.partition.append_marker(EndMarker(1, 6, True, 7, bumps_epoch=True))
    bench.flush()
    assert [one.first_offset for one in bench.producers.transactions.aborted()] == [0]


def markers_of(
    partitions: Any, on_offsets_marker: Callable[[int, EndMarker], None] = lambda *_: None
) -> TransactionMarkerService:
    return TransactionMarkerService(
        partitions, before_offsets_marker=lambda *_: None, on_offsets_marker=on_offsets_marker
    )


def test_no_marker_of_a_request_waits_for_the_commit_of_another_one() -> None:
    slow, fast = (small_bench(None, "producers") for _ in range(2))
    for bench in (slow, fast):
        bench.partition.append(batch(1, 0, epoch=4), transactional=True)
        bench.flush()
    found: Any = SimpleNamespace(
        find=lambda topic, _, __: {"slow": slow, "fast": fast}[topic].partition, one_flush=nullcontext
    )
    marker = EndMarker(1, 4, False, 7)

    async def write() -> None:
        service = markers_of(found)
        task = asyncio.create_task(service.write_all([(marker, [("slow", 0)]), (marker, [("fast", 0)])]))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert (slow.log.end_offset, fast.log.end_offset) == (2, 2)
        task.cancel()
        await asyncio.wait([task])

    asyncio.run(write())


@pytest.mark.parametrize("is_commit", [False, True])
def test_a_transaction_is_undecided_until_all_replicas_have_its_marker(is_commit: bool) -> None:
    bench = small_bench(None, "producers")
    partition, epoch = bench.partition, bench.partition.leader_epoch + 1
    partition.become_leader(epoch, in_sync={1, 2}, replicas={1, 2})
    partition.append(batch(1, 0), transactional=True)
    partition.append(build_batch([(1000, None, b"plain", ())]))
    partition.append_marker(EndMarker(1, 0, is_commit, 3))
    bench.flush()
    known = []
    for fetch_offset in (1, 2, 3):
        wanted: Any = SimpleNamespace(
            current_leader_epoch=epoch, fetch_offset=fetch_offset, last_fetched_epoch=-1, log_start_offset=0
        )
        partition.read_for_follower(2, 1, wanted, 0, first=True)
        known.append((partition.high_watermark, partition.last_stable_offset))
    assert known == [(1, 0), (2, 0), (3, 3)]


def test_a_marker_is_answered_and_ends_the_transaction_of_offsets_only_after_its_commit() -> None:
    bench = small_bench(None, "producers")
    bench.partition.append(batch(1, 0, epoch=4), transactional=True)
    bench.flush()
    found: Any = SimpleNamespace(find=lambda *_: bench.partition, one_flush=nullcontext)
    ended: list[int] = []

    async def write() -> None:
        service = markers_of(found, lambda index, _: ended.append(index))
        task = asyncio.create_task(service.write(EndMarker(1, 4, True, 7), [(OFFSETS_TOPIC, 0)]))
        for _ in range(5):
            await asyncio.sleep(0)
        assert (bench.log.end_offset, bench.partition.high_watermark) == (2, 1)
        assert (task.done(), ended) == (False, [])
        bench.flush()
        assert await task == [None]
        assert ended == [0]

    asyncio.run(write())


@pytest.mark.parametrize("restarts", [False, True])
def test_a_marker_with_a_bumped_epoch_fences_older_batches_and_sequences_start_again(restarts: bool) -> None:
    disk = SimulatedDisk()
    bench = small_bench(disk, "producers")
    bench.partition.append(batch(1, 0, epoch=4), transactional=True)
    bench.partition.append_marker(EndMarker(1, 5, False, 7))
    if restarts:
        bench.flush()
        bench.partition.close()
        bench.log.close()
        bench = small_bench(disk, "producers")
        with pytest.raises(TransactionCoordinatorFenced):
            bench.partition.append_marker(EndMarker(1, 5, False, 6))
    with pytest.raises(InvalidProducerEpoch):
        bench.partition.append(batch(1, 1, epoch=4), transactional=True)
    with pytest.raises(OutOfOrderSequence):
        bench.partition.append(batch(1, 1, epoch=5), transactional=True)
    bench.partition.append(batch(1, 0, epoch=5), transactional=True)


def test_a_batch_outside_of_the_open_transaction_of_its_producer_is_refused() -> None:
    bench = small_bench(None, "producers")
    with pytest.raises(TransactionalIdMissing):
        bench.partition.append(batch(1, 0))
    bench.partition.append(batch(1, 0), transactional=True)
    with pytest.raises(InvalidTxnState):
        bench.partition.append(batch(1, 1, transactional=False))


def test_records_of_an_open_transaction_cannot_be_deleted() -> None:
    bench = small_bench(None, "producers")
    bench.partition.append(build_batch([(1000, None, b"p", ())]))
    bench.partition.append(batch(1, 0), transactional=True)
    bench.partition.append(build_batch([(1000, None, b"p", ())]))
    bench.flush()
    assert (bench.partition.high_watermark, bench.partition.last_stable_offset) == (3, 1)
    with pytest.raises(OffsetOutOfRange, match="last stable offset"):
        bench.partition.delete_records(2)
    bench.partition.delete_records(-1)
    assert bench.partition.start_offset == 1


def test_a_producer_with_an_open_transaction_neither_expires_nor_is_evicted() -> None:
    bench = small_bench(None, "producers")
    table = bench.producers.table
    table.producers_max = 2
    bench.partition.append(batch(1, 0), transactional=True)
    for producer_id in (2, 3, 4):
        bench.partition.append(batch(producer_id, 0, transactional=False))
    assert {producer_id for producer_id, _ in table.items()} == {1, 3, 4}
    table.expire(1 << 60)
    assert [producer_id for producer_id, _ in table.items()] == [1]


def test_an_open_transaction_takes_the_same_memory_for_any_number_of_records() -> None:
    bench = small_bench(None, "producers")
    bench.partition.append(batch(1, 0), transactional=True)
    size = len(bench.producers.transactions.to_bytes())
    for sequence in range(1, 201, 10):
        bench.partition.append(batch(1, sequence, count=10), transactional=True)
    assert len(bench.producers.transactions.to_bytes()) == size


def test_a_marker_has_kafkas_format() -> None:
    marker = EndMarker(4711, 3, False, 12)
    encoded = encode_end_marker(marker, 1234)
    header = read_header(encoded)
    assert (header.attributes, header.base_sequence, header.record_count) == (0x30, -1, 1)
    (record,) = read_records(encoded, output_bytes_max=1 << 10)
    assert (record.key, record.value) == (b"\0\0\0\0", b"\0\0\0\0\0\x0c")
    assert decode_end_marker(encoded) == marker
    assert decode_end_marker(build_batch([(0, b"\0\0\0\1", b"", ())], control=True)) is None


def test_only_the_aborted_transactions_of_a_range_are_found() -> None:
    transactions = PartitionTransactions()
    for number in range(100):
        transactions.begin(number, 2 * number)
        transactions.end(number, 2 * number + 1, is_commit=False)
    assert [one.producer_id for one in transactions.aborted(10, 20)] == [5, 6, 7, 8, 9]
    transactions.remove_aborted({11, 15})
    assert [one.producer_id for one in transactions.aborted(10, 20)] == [6, 8, 9]
    assert PartitionTransactions.from_bytes(transactions.to_bytes()).aborted() == transactions.aborted()


@pytest.mark.parametrize("seed", range(examples(4, 10)))
def test_the_index_of_aborted_transactions_gives_the_same_answers_as_a_list(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partition_transactions, "BLOCK_TRANSACTIONS", 4)
    source = random.Random(seed)
    transactions, listed = PartitionTransactions(), list[AbortedTransaction]()
    for offset in range(1, 600):
        producer_id = source.randrange(1, 7)
        step = source.random()
        if step < 0.5:
            transactions.begin(producer_id, offset)
        elif step < 0.9:
            first_offset = transactions.open.get(producer_id)
            is_commit = source.random() < 0.2
            transactions.end(producer_id, offset, is_commit=is_commit)
            if first_offset is not None and not is_commit:
                stable = next(iter(transactions.open.values()), offset + 1)
                listed.append(AbortedTransaction(producer_id, first_offset, offset, stable))
        elif step < 0.93:
            start = source.randrange(offset)
            transactions.trim(start)
            listed = [one for one in listed if one.last_offset >= start]
        elif step < 0.97:
            gone = {one.last_offset for one in listed if source.random() < 0.1} | {offset}
            transactions.remove_aborted(gone)
            listed = [one for one in listed if one.last_offset not in gone]
        else:
            transactions = PartitionTransactions.from_bytes(transactions.to_bytes())
        begin = source.randrange(offset)
        end = begin + source.randrange(1, 40)
        expected = [one for one in listed if one.last_offset >= begin and one.first_offset < end]
        assert transactions.aborted(begin, end) == expected
        assert transactions.aborted(begin) == [one for one in listed if one.last_offset >= begin]


class CountingArray(array):
    """Counts the numbers that are read."""

    read_count = 0

    def __getitem__(self, key: Any) -> Any:
        CountingArray.read_count += 1
        return super().__getitem__(key)


def test_a_read_beside_a_long_transaction_does_not_read_all_transactions_that_were_aborted_meanwhile() -> (
    None
):
    transactions = PartitionTransactions()
    transactions.begin(99, 0)
    for number in range(20_000):
        transactions.begin(7, 1 + 2 * number)
        transactions.end(7, 2 + 2 * number, is_commit=False)
    transactions.end(99, 40_001, is_commit=True)
    transactions._aborted = CountingArray("q", transactions._aborted)
    CountingArray.read_count = 0
    assert len(transactions.aborted(10, 20)) == 6
    assert CountingArray.read_count < 2_000


class CountingDict(dict[int, int]):
    """Counts the questions whether it has a key."""

    asked_count = 0

    def __contains__(self, key: object) -> bool:
        CountingDict.asked_count += 1
        return super().__contains__(key)


@pytest.mark.parametrize("others", [1, 40])
def test_producers_with_open_transactions_are_not_read_at_each_eviction(others: int) -> None:
    table = ProducerTable(producers_max=20)
    retained = CountingDict()
    table.retained = retained
    for producer_id in range(1000):
        retained[producer_id] = 0
        table.record(read_header(batch(producer_id, 0)), producer_id, 0)
    for producer_id in range(1000, 1000 + others):
        table.record(read_header(batch(producer_id, 0, transactional=False)), producer_id, 0)
    CountingDict.asked_count = 0
    for producer_id in range(2000, 2100):
        table.record(read_header(batch(producer_id, 0, transactional=False)), producer_id, 0)
    assert CountingDict.asked_count < 10_000
    assert [one for one, _ in table.items() if one >= 1000] == list(range(2080, 2100))
    assert len(table) == 1020


def damaged_and_restarted(bench: PartitionBench, damage: Callable[[bytearray], None]) -> PartitionBench:
    """Damage the first segment of a partition, which has others, and open it again without snapshots."""
    disk = bench.disk
    bench.flush()
    names = [name for name in disk.list_directory(DIRECTORY) if name.endswith(".log")]
    assert len(names) > 1
    bench.partition.close()
    bench.log.close()
    for name in disk.list_directory(DIRECTORY):
        if name.endswith(".producers"):
            disk.remove(f"{DIRECTORY}/{name}")
    path = f"{DIRECTORY}/{min(names)}"
    data = bytearray(disk.read_file(path))
    damage(data)
    disk.put_file(path, bytes(data))
    return small_bench(disk, "producers")


def append_plain(bench: PartitionBench) -> None:
    for _ in range(5):
        bench.partition.append(build_batch([(1000, None, b"x" * 900, ())]))


def test_a_damaged_marker_neither_commits_nor_aborts_its_transaction() -> None:
    bench = small_bench(None, "producers")
    bench.partition.append(batch(1, 0), transactional=True)
    marker_at = bench.log.size_bytes
    bench.partition.append_marker(EndMarker(1, 0, False, 7))
    append_plain(bench)

    def change_decision(data: bytearray) -> None:
        key_type_at = data.index(b"\0\0\0\0", marker_at + 61 + 5) + 3  # version and type: abort is 0
        data[key_type_at] ^= 1

    again = damaged_and_restarted(bench, change_decision)
    assert dict(again.producers.transactions.open) == {1: 0}
    assert again.partition.last_stable_offset == 0
    again.partition.append_marker(EndMarker(1, 0, False, 7))
    again.flush()
    assert [one.first_offset for one in again.producers.transactions.aborted()] == [0]
    assert again.partition.last_stable_offset == again.partition.high_watermark


@pytest.mark.parametrize("is_commit", [True, False])
@pytest.mark.parametrize("damage", ["header", "decision", "cut"])
def test_no_later_marker_decides_a_transaction_whose_own_marker_is_damaged(
    damage: str, is_commit: bool, caplog: pytest.LogCaptureFixture
) -> None:
    bench = small_bench(None, "producers")
    bench.partition.append(batch(1, 0), transactional=True)
    marker_at = bench.log.size_bytes
    bench.partition.append_marker(EndMarker(1, 0, not is_commit, 7))
    marker_end = bench.log.size_bytes
    append_plain(bench)
    bench.partition.append(batch(1, 1), transactional=True)
    bench.partition.append_marker(EndMarker(1, 0, is_commit, 7))
    later_offset = bench.log.end_offset - 2

    def change(data: bytearray) -> None:
        if damage == "header":
            data[marker_at + 16] ^= 1  # the format of the batch
        elif damage == "decision":
            data[marker_at + 61 + 8] ^= 1  # the type in the key of the record
        else:
            del data[marker_at:marker_end]

    again = damaged_and_restarted(bench, change)
    again.scheduler.run()
    assert again.partition.storage_health.damaged["t", 0].offset == 1
    assert any(record.getMessage() == "transaction_ends_lost" for record in caplog.records)
    later = [] if is_commit else [later_offset]
    for sequence in (2, 3):  # also after another start
        transactions = again.producers.transactions
        assert again.partition.last_stable_offset == 0
        assert [one.first_offset for one in transactions.aborted()] == later
        again.partition.append(batch(1, sequence), transactional=True)
        again.partition.append_marker(EndMarker(1, 0, False, 7))
        later.append(again.log.end_offset - 2)
        again.partition.append_marker(EndMarker(1, 0, False, 7))
        again.partition.append_marker(EndMarker(1, 0, True, 7))
        again.flush()
        assert [one.first_offset for one in transactions.aborted()] == later
        assert again.partition.last_stable_offset == 0
        assert again.partition.read(0, 1 << 20, READ_COMMITTED) is None
        again.partition.close()
        again.log.close()
        again = small_bench(again.disk, "producers")


def test_a_transaction_that_may_have_ended_in_damage_is_forgotten_with_its_records() -> None:
    transactions = PartitionTransactions()
    transactions.begin(1, 10)
    transactions.begin(2, 11)
    assert transactions.lose_ends(20) == 2
    transactions.begin(3, 21)
    transactions.begin(2, 22)
    transactions.trim(19)
    assert transactions.first_undecided_offset == 10
    transactions.trim(20)
    assert list(transactions.open.items()) == [(3, 21), (2, 22)]
    assert not transactions.has_lost_ends
    transactions.end(2, 23, is_commit=False)
    transactions.end(3, 24, is_commit=True)
    assert transactions.aborted() == [(2, 22, 23, 21)]


def test_a_batch_that_is_recompressed_while_its_transaction_ends_does_not_open_another_one() -> None:
    bench = small_bench(None, "producers", rules=rules(Compression(Codec.GZIP, 9)))
    thread = ManualThread()
    started: list[Any] = []
    found: Any = SimpleNamespace(find=lambda *_: bench.partition, batch_processor=BatchProcessor(thread))
    scheduler: Any = SimpleNamespace(spawn=lambda work, name: started.append(work))
    statistics: Any = None

    class Accepting:
        async def verify(self, *_: Any, **__: Any) -> list[MansioError | None]:
            return [None]

    service = ProduceService(
        found,
        clock=bench.clock,
        scheduler=scheduler,
        statistics=statistics,
        verifier=Accepting(),
        wait_ms_max=1000,
    )
    value = random.Random(1).randbytes(200_000)
    for sequence in (0, 1):  # a first batch is verified, a later one belongs to an open transaction
        large = build_batch(
            [(1000, None, value, ())],
            producer_id=1,
            producer_epoch=0,
            base_sequence=sequence,
            transactional=True,
        )
        pending = service.begin_transactional(
            [("t", None, [(0, large)])], "x", grants=None, acks=-1, adds=False
        )
        for work in started:
            with pytest.raises(StopIteration):
                work.send(None)
        started.clear()
        assert bench.partition in found.batch_processor.queues
        bench.partition.append_marker(EndMarker(1, 0, False, 7))
        while thread.jobs:
            thread.run()
        ((_, _, (result,)),) = pending.results
        assert isinstance(result.error, InvalidTxnState)
        bench.flush()
        assert not bench.producers.transactions.open
        assert bench.partition.last_stable_offset == bench.partition.high_watermark
        bench.partition.append(batch(1, 0), transactional=True)
