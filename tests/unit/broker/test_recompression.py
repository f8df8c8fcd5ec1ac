"""The recompressor against a model, over random interleavings of arrivals, finished jobs, changed settings and changes
of the leader; and on a replicated partition."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from mansio.broker.partition.append_validation import AppendRules
from mansio.broker.partition.partition_hook import AppendResult
from mansio.broker.partition.recompression import INLINE_BYTES_MAX, QUEUED_BYTES_MAX, Recompressor
from mansio.broker.services.produce import ACKS_ALL
from mansio.errors import (
    CorruptMessage,
    InvalidRecord,
    MansioError,
    MessageTooLarge,
    NotLeaderOrFollower,
    OutOfOrderSequence,
    RequestTimedOut,
)
from mansio.state.producers import ProducerTable
from mansio.wire.batch.compression import Codec
from mansio.wire.batch.recompress import Compression
from mansio.wire.batch.record_batch import TimestampType, build_batch, check_batch, read_header
from mansio.wire.batch.record_reader import read_records
from support.replicas import TOPIC, Cluster

if TYPE_CHECKING:
    from collections.abc import Callable

    from mansio.ports import Buffer

LIMIT = 64 << 20
BATCH_BYTES_MAX = 1 << 20


class ManualThread:
    """Runs the oldest job when the test says so."""

    def __init__(self) -> None:
        self.jobs: list[tuple[Callable[[], Any], Callable[..., None]]] = []

    def submit(self, work: Callable[[], Any], done: Callable[..., None]) -> None:
        self.jobs.append((work, done))

    def run(self) -> None:
        work, done = self.jobs.pop(0)
        result, error = None, None
        try:
            result = work()
        except Exception as caught:  # noqa: BLE001  # as the port requires
            error = caught
        done(result, error)

    def close(self) -> None:
        """Nothing to close."""


def rules(compression: Compression | None, bytes_max: int = BATCH_BYTES_MAX) -> AppendRules:
    return AppendRules(bytes_max, TimestampType.CREATE, 1 << 62, 1 << 62, compression=compression)


@dataclass(eq=False)
class FakePartition:
    """Takes batches as a partition does: leader, size, sequences, in that order."""

    name: str
    rules: AppendRules
    topic: str = "t"
    index: int = 0
    is_leader: bool = True
    is_recompressing: bool = False
    batches: list[bytes] = field(default_factory=list)
    table: ProducerTable = field(default_factory=lambda: ProducerTable(expiration_ms=1 << 40))
    end: int = 0

    def ensure_leader(self) -> None:
        if not self.is_leader:
            raise NotLeaderOrFollower(self.name)

    def append(self, batch: Buffer, *, urgent: bool = True) -> AppendResult:
        del urgent
        self.ensure_leader()
        header = check_batch(batch)
        if len(batch) > self.rules.message_bytes_max:
            raise MessageTooLarge(self.name)
        if header.producer_id >= 0 and (known := self.table.check(header)) is not None:
            return AppendResult(known.base_offset, known.last_offset + 1, -1, True)
        base_offset = self.end
        self.end += header.record_count
        if header.producer_id >= 0:
            self.table.record(header, base_offset, 0)
        self.batches.append(bytes(batch))
        return AppendResult(base_offset, self.end, -1, False)


def values(batch: bytes) -> list[bytes | None]:
    return [record.value for record in read_records(batch, max_output_bytes=LIMIT)]


COMPRESSIONS = [
    None,
    Compression(Codec.NONE),
    Compression(Codec.GZIP),
    Compression(Codec.SNAPPY),
    Compression(Codec.LZ4, 12),
    Compression(Codec.ZSTD, 3),
    Compression(Codec.ZSTD, 15),
]


@dataclass
class Sent:
    partition: FakePartition
    batch: bytes
    target: Compression | None
    outcomes: list[AppendResult | MansioError] = field(default_factory=list)
    must_fail: type[MansioError] | None = None


class Model:
    """Random arrivals of several producers at several partitions."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.thread = ManualThread()
        self.recompressor = Recompressor(self.thread)
        self.partitions: list[Any] = [
            FakePartition(f"t-{index}", rules(self.random.choice(COMPRESSIONS))) for index in range(3)
        ]
        self.sent: list[Sent] = []
        self.sequences: dict[tuple[str, int], int] = {}

    def step(self) -> None:
        chosen = self.random.random()
        partition = self.random.choice(self.partitions)
        if chosen < 0.6:
            self._arrive(partition)
        elif chosen < 0.9:
            if self.thread.jobs:
                self.thread.run()
        elif chosen < 0.96:
            partition.rules = rules(self.random.choice(COMPRESSIONS))
        else:
            partition.is_leader = not partition.is_leader

    def _arrive(self, partition: Any) -> None:
        count = self.random.choice((1, 2, 5))
        size = self.random.choice((10, 200, 5_000, 40_000))
        number = len(self.sent)
        unit = b"%d " % number
        rows = [(1000 + number, None, unit * (size // len(unit) + 1), ()) for _ in range(count)]
        producer_id, sequence = self.random.choice((-1, 1, 2)), -1
        key = (partition.name, producer_id)
        if producer_id >= 0:
            sequence = self.sequences.get(key, 0)
        codec = self.random.choice(list(Codec))
        epoch = 0 if producer_id >= 0 else -1
        batch = build_batch(
            rows, codec=codec, producer_id=producer_id, producer_epoch=epoch, base_sequence=sequence
        )
        sent = Sent(partition, batch, partition.rules.compression)
        if self.random.random() < 0.05:
            sent.batch = batch[:-1] + bytes((batch[-1] ^ 1,))
            sent.must_fail = CorruptMessage
        elif producer_id >= 0:
            self.sequences[key] = sequence + count
        self.sent.append(sent)
        lent = bytearray(sent.batch)  # the memory of a frame, which is reused after the call
        urgent = self.random.random() < 0.5
        self.recompressor.append(partition, lent, urgent=urgent, on_appended=sent.outcomes.append)
        lent[:] = b"\xff" * len(lent)

    def check(self) -> None:
        while self.thread.jobs:
            self.thread.run()
        assert self.recompressor.queued_bytes == 0
        assert not self.recompressor._queues
        assert not any(partition.is_recompressing for partition in self.partitions)
        recompressed = 0
        for partition in self.partitions:
            accepted = []
            for sent in self.sent:
                if sent.partition is not partition:
                    continue
                (outcome,) = sent.outcomes
                if isinstance(outcome, MansioError):
                    assert isinstance(outcome, (NotLeaderOrFollower, OutOfOrderSequence, CorruptMessage))
                else:
                    assert sent.must_fail is None
                    accepted.append((sent, outcome))
            assert len(accepted) == len(partition.batches)
            offset = 0
            for (sent, outcome), stored in zip(accepted, partition.batches, strict=True):
                assert values(stored) == values(sent.batch), "order of arrival"
                codec = read_header(sent.batch).codec if sent.target is None else sent.target.codec
                header = read_header(stored)
                assert header.codec is codec
                assert outcome.base_offset == offset
                offset = outcome.end_offset
                if sent.target is not None and read_header(sent.batch).codec is not codec:
                    recompressed += 1
                else:
                    assert stored == sent.batch
        assert self.recompressor.recompressed_batches == recompressed


@pytest.mark.parametrize(
    "seeds", [range(25), pytest.param(range(25, 500), marks=pytest.mark.full)], ids=["few", "many"]
)
def test_batches_are_appended_in_their_order_of_arrival_each_answered_once(seeds: range) -> None:
    appended = queued = 0
    for seed in seeds:
        model = Model(seed)
        for _ in range(60):
            model.step()
            waiting = [sent.batch for sent in model.sent if not sent.outcomes]
            assert model.recompressor.queued_bytes == sum(map(len, waiting))
            queued = max(queued, model.recompressor.queued_bytes)
        model.check()
        appended += sum(len(partition.batches) for partition in model.partitions)
    assert appended > 400
    assert queued > INLINE_BYTES_MAX, "nothing was ever waiting: the test shows nothing"


def large(number: int, *, sequence: int = -1, codec: Codec = Codec.NONE) -> bytes:
    producer_id, epoch = (9, 0) if sequence >= 0 else (-1, -1)
    rows = [(number, None, b"%d" % number * 30_000, ())]
    return build_batch(
        rows, codec=codec, producer_id=producer_id, producer_epoch=epoch, base_sequence=sequence
    )


class One:
    """One partition with compression.type=zstd."""

    def __init__(self, compression: Compression | None = None, bytes_max: int = BATCH_BYTES_MAX) -> None:
        self.thread = ManualThread()
        self.recompressor = Recompressor(self.thread)
        self.partition: Any = FakePartition("t-0", rules(compression or Compression(Codec.ZSTD), bytes_max))
        self.outcomes: dict[int, AppendResult | MansioError] = {}

    def send(self, number: int, batch: bytes) -> None:
        def on_appended(outcome: AppendResult | MansioError) -> None:
            assert number not in self.outcomes
            self.outcomes[number] = outcome

        self.recompressor.append(self.partition, batch, urgent=True, on_appended=on_appended)


def test_a_small_batch_does_not_pass_one_that_is_being_recompressed() -> None:
    one = One()
    one.send(0, large(0, sequence=0))
    one.send(1, build_batch([(1, None, b"small", ())], producer_id=9, producer_epoch=0, base_sequence=1))
    one.send(2, large(2, sequence=2, codec=Codec.ZSTD))
    assert one.outcomes == {}
    one.partition.rules = rules(None)
    one.send(3, large(3, sequence=3))
    while one.thread.jobs:
        one.thread.run()
    assert [values(batch)[0][:1] for batch in one.partition.batches] == [b"0", b"s", b"2", b"3"]  # type: ignore[index]
    assert [read_header(batch).codec for batch in one.partition.batches] == [
        Codec.ZSTD,
        Codec.ZSTD,
        Codec.ZSTD,
        Codec.NONE,
    ]
    assert list(one.outcomes) == [0, 1, 2, 3]


def test_a_batch_that_cannot_be_recompressed_fails_alone() -> None:
    one = One()
    one.send(0, large(0)[:-1] + b"x")
    one.send(1, large(1))
    one.send(2, build_batch([(0, None, bytes(LIMIT), ())], codec=Codec.GZIP))  # a bomb
    one.send(3, large(3))
    while one.thread.jobs:
        one.thread.run()
    assert isinstance(one.outcomes[0], CorruptMessage)
    assert isinstance(one.outcomes[2], InvalidRecord)
    assert len(one.partition.batches) == 2
    assert not one.partition.is_recompressing


def test_a_defect_of_the_thread_fails_one_batch(caplog: pytest.LogCaptureFixture) -> None:
    one = One()
    one.send(0, large(0))
    one.send(1, build_batch([(1, None, b"small", ())], codec=Codec.ZSTD))
    work, done = one.thread.jobs.pop()
    del work
    done(None, MemoryError())
    assert isinstance(one.outcomes[0], InvalidRecord)
    assert isinstance(one.outcomes[1], AppendResult)
    assert "recompression_failed" in caplog.text


def test_sizes_as_sent_and_as_stored_are_limited_as_in_kafka() -> None:
    one = One(Compression(Codec.NONE), bytes_max=20_000)
    one.send(0, large(0))
    assert isinstance(one.outcomes[0], MessageTooLarge), "as sent"
    one.send(1, large(1, codec=Codec.GZIP))
    one.thread.run()
    assert isinstance(one.outcomes[1], MessageTooLarge), "as stored"
    assert not one.partition.batches


def test_the_batches_that_wait_are_bounded() -> None:
    one = One(bytes_max=8 << 20)
    batch = build_batch([(0, None, random.Random(1).randbytes(7 << 20), ())])
    count = 0
    while not one.outcomes and count < 20:
        one.send(count, batch)
        count += 1
    assert one.recompressor.queued_bytes <= QUEUED_BYTES_MAX
    assert one.recompressor.is_congested
    assert isinstance(one.outcomes[count - 1], RequestTimedOut), "a client tries again"
    one.thread.run()
    one.send(count, batch)
    assert len(one.thread.jobs) == count - 1


def test_a_follower_copies_what_its_leader_stored_whatever_its_own_setting() -> None:
    cluster = Cluster(partitions=1)
    cluster.run_for(1000)
    for node_id, codec in ((1, Codec.GZIP), (2, Codec.ZSTD), (3, Codec.SNAPPY)):
        partition = cluster[node_id].partitions[TOPIC.bytes, 0]
        partition.rules = partition.rules._replace(compression=Compression(codec))
    batches = [(0, large(number, sequence=number)) for number in range(5)]
    done: list[Any] = []
    for batch in batches:
        pending = cluster[1].service.produce.begin([(None, TOPIC.bytes, [batch])], acks=ACKS_ALL)
        assert not pending.is_complete
        pending.wait(30_000, done.append)
    cluster.run_until(lambda: len(done) == 5, 20_000)
    assert all(
        entry.error is None for pending in done for _, _, entries in pending.results for entry in entries
    )
    copies = []
    for node_id in (1, 2, 3):
        partition = cluster[node_id].partitions[TOPIC.bytes, 0]
        cluster.run_until(lambda log=partition.log: log.end_offset == 5, 20_000)  # type: ignore[misc]
        found = partition.log.read(0, 1 << 20, 5)
        assert found is not None
        copies.append(list(partition.log.batch_headers(0)))
    assert copies[0] == copies[1] == copies[2]
    assert [header.codec for header in copies[0]] == [Codec.GZIP] * 5
    assert [header.base_sequence for header in copies[0]] == [0, 1, 2, 3, 4]
    assert [cluster[node_id].recompressor.recompressed_batches for node_id in (1, 2, 3)] == [5, 0, 0]
