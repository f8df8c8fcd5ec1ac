"""The batch processor against a model, over random interleavings of arrivals, finished jobs, changed settings, changes
of the leader and unexpected exceptions; and on a replicated partition."""

from __future__ import annotations

import functools
import gzip
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from mansio.broker.features.priorities.priority_view import PRIORITY_READER
from mansio.broker.partition.append_validation import AppendRules
from mansio.broker.partition.batch_processing import (
    CLIENT_BYTES_MAX,
    INLINE_BYTES_MAX,
    OVERHEAD_BYTES,
    QUEUED_BYTES_MAX,
    BatchProcessor,
)
from mansio.broker.partition.partition_hook import AppendResult
from mansio.errors import (
    CorruptMessage,
    DescriptorsExhausted,
    InvalidRecord,
    MansioError,
    MessageTooLarge,
    NotLeaderOrFollower,
    OutOfOrderSequence,
    RequestTimedOut,
)
from mansio.state.producers import ProducerTable
from mansio.storage.active_files import ActiveFiles, ActiveFilesInUse
from mansio.wire.batch.compression import DECOMPRESSED_BYTES_MAX, Codec, compress
from mansio.wire.batch.recompress import Compression
from mansio.wire.batch.record_batch import (
    HEADER_BYTES,
    TimestampType,
    build_batch,
    check_batch,
    encode_batch,
    read_header,
)
from mansio.wire.batch.record_reader import read_records
from mansio.wire.field_values import ACKS_ALL
from support.logs import ManualClock
from support.replicas import TOPIC, Cluster
from support.tiers import repetitions

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from mansio.ports import Buffer

LIMIT = 64 << 20
BATCH_BYTES_MAX = 1 << 20


class ManualThread:
    """Runs the oldest job on the test's command."""

    def __init__(self) -> None:
        self.jobs: list[tuple[Callable[[], Any], Callable[..., None]]] = []

    def submit(self, work: Callable[[], Any], done: Callable[..., None]) -> None:
        self.jobs.append((work, done))

    @property
    def waiting(self) -> list[bytes]:
        """The batches of its jobs, oldest first."""
        return [work.args[0] for work, _ in self.jobs]  # type: ignore[attr-defined]  # partials

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


class FakeFlush:
    """Calls back after the flush, which the test runs. `is_idle`: there is nothing to flush."""

    def __init__(self) -> None:
        self.callbacks: list[Callable[[], None]] = []
        self.is_idle = False

    def call_after_job(self, callback: Callable[[], None]) -> bool:
        if not self.is_idle:
            self.callbacks.append(callback)
        return not self.is_idle

    def run(self) -> None:
        callbacks, self.callbacks = self.callbacks, []
        for callback in callbacks:
            callback()


class FakeFiles:
    """The open files of the partitions that share it."""

    def __init__(self) -> None:
        self.flush = FakeFlush()
        self.active = ActiveFiles()


@dataclass(eq=False)
class FakePartition:
    """Takes batches as a partition does: leader, size, sequences, open file, in that order."""

    name: str
    rules: AppendRules
    topic: str = "t"
    index: int = 0
    is_leader: bool = True
    batches: list[bytes] = field(default_factory=list)
    table: ProducerTable = field(default_factory=lambda: ProducerTable(expiration_ms=1 << 40))
    end: int = 0
    fails_unexpectedly: bool = False
    files: FakeFiles = field(default_factory=FakeFiles)
    may_open: bool = True
    """Whether the file of its log can be opened."""
    refused: int = 0

    def wait_for_file(self, waiter: Hashable, attempt: Callable[[], object]) -> bool:
        return self.files.active.wait(waiter, attempt, self.files.flush.call_after_job)

    def ensure_leader(self) -> None:
        if not self.is_leader:
            raise NotLeaderOrFollower(self.name)

    def append(
        self,
        batch: Buffer,
        *,
        urgent: bool = True,
        transactional: bool = False,
        is_intact: bool = False,
        is_checked: bool = False,
        inspected: object = None,
    ) -> AppendResult:
        del urgent, transactional, is_checked, inspected
        self.ensure_leader()
        if self.fails_unexpectedly:
            raise ValueError(self.name)
        header = read_header(batch) if is_intact else check_batch(batch)
        if len(batch) > self.rules.message_bytes_max:
            raise MessageTooLarge(self.name)
        if header.producer_id >= 0 and (known := self.table.check(header)) is not None:
            return AppendResult(known.base_offset, known.last_offset + 1, -1, True)
        if not self.may_open:
            self.refused += 1
            raise DescriptorsExhausted(self.name) from ActiveFilesInUse(self.name)
        base_offset = self.end
        self.end += header.record_count
        if header.producer_id >= 0:
            self.table.record(header, base_offset, 0)
        self.batches.append(bytes(batch))
        return AppendResult(base_offset, self.end, -1, False)


def values(batch: bytes) -> list[bytes | None]:
    return [record.value for record in read_records(batch, output_bytes_max=LIMIT)]


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
    raises: bool = False

    def on_appended(self, outcome: AppendResult | MansioError) -> None:
        self.outcomes.append(outcome)
        if self.raises:
            raise ValueError("a defect of the caller")


class Model:
    """Random arrivals of several producers at several partitions."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.thread = ManualThread()
        self.batch_processor = BatchProcessor(self.thread)
        self.files = FakeFiles()
        self.partitions: list[Any] = [
            FakePartition(f"t-{index}", rules(self.random.choice(COMPRESSIONS)), files=self.files)
            for index in range(6)
        ]
        self.sent: list[Sent] = []
        self.passed_by: dict[str, set[str]] = {}
        """Partitions of which a batch was recompressed since this one waits for its turn."""
        self.sequences: dict[tuple[str, int], int] = {}

    def step(self) -> None:
        chosen = self.random.random()
        partition = self.random.choice(self.partitions)
        if chosen < 0.6:
            self._arrive(partition)
        elif chosen < 0.85:
            if self.thread.jobs:
                self._run()
        elif chosen < 0.88:
            partition.may_open = not partition.may_open
        elif chosen < 0.91:
            self.files.flush.run()
        elif chosen < 0.95:
            partition.rules = rules(self.random.choice(COMPRESSIONS))
        elif chosen < 0.98:
            partition.is_leader = not partition.is_leader
        else:
            partition.fails_unexpectedly = not partition.fails_unexpectedly

    def _run(self) -> None:
        waiting = [
            sent.partition.name for batch in self.thread.waiting for sent in self.sent if sent.batch == batch
        ]
        assert len(waiting) == len(set(waiting)), "several batches of a partition are at the thread"
        first = waiting[0]
        self.passed_by = {name: self.passed_by.get(name, set()) for name in waiting[1:]}
        for name, passed_by in self.passed_by.items():
            assert first not in passed_by, f"{first} has two turns while {name} waits"
            passed_by.add(first)
        self.thread.run()

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
        # A caller's own exception reaches it if the outcome is immediate.
        sent.raises = partition in self.batch_processor.queues and self.random.random() < 0.1
        if self.random.random() < 0.05:
            sent.batch = batch[:-1] + bytes((batch[-1] ^ 1,))
            sent.must_fail = CorruptMessage
        elif producer_id >= 0:
            self.sequences[key] = sequence + count
        self.sent.append(sent)
        lent = bytearray(sent.batch)  # the memory of a frame, which is reused after the call
        urgent = self.random.random() < 0.5
        try:
            self.batch_processor.append(
                partition,
                lent,
                urgent=urgent,
                on_appended=sent.on_appended,
                client=self.random.choice("abc"),
            )
        except ValueError:
            assert sent.raises
        lent[:] = b"\xff" * len(lent)

    def check(self) -> None:
        for partition in self.partitions:
            partition.may_open = True
        while self.thread.jobs or self.files.flush.callbacks:
            if self.thread.jobs:
                self._run()
            self.files.flush.run()
        assert self.batch_processor.queued_bytes == 0
        assert not self.batch_processor.queues
        assert not self.batch_processor._client_bytes
        recompressed = 0
        for partition in self.partitions:
            accepted = []
            for sent in self.sent:
                if sent.partition is not partition:
                    continue
                (outcome,) = sent.outcomes
                if isinstance(outcome, MansioError):
                    assert type(outcome) in (
                        NotLeaderOrFollower,
                        OutOfOrderSequence,
                        CorruptMessage,
                        MansioError,
                    )
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
        assert self.batch_processor.recompressed_batch_count == recompressed


@pytest.mark.parametrize(
    "seeds",
    [range(25), pytest.param(range(25, repetitions(200, 500)), marks=pytest.mark.full)],
    ids=["few", "many"],
)
def test_batches_are_appended_in_their_order_of_arrival_each_answered_once(seeds: range) -> None:
    appended = queued = refused = 0
    for seed in seeds:
        model = Model(seed)
        for _ in range(60):
            model.step()
            waiting = [sent.batch for sent in model.sent if not sent.outcomes]
            assert model.batch_processor.queued_bytes >= sum(len(batch) + OVERHEAD_BYTES for batch in waiting)
            queued = max(queued, model.batch_processor.queued_bytes)
        model.check()
        appended += sum(len(partition.batches) for partition in model.partitions)
        refused += sum(partition.refused for partition in model.partitions)
    assert appended > 400
    assert refused > 10
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
        self.batch_processor = BatchProcessor(self.thread)
        self.partition: Any = FakePartition("t-0", rules(compression or Compression(Codec.ZSTD), bytes_max))
        self.outcomes: dict[int, AppendResult | MansioError] = {}

    def send(self, number: int, batch: bytes, client: object = None) -> None:
        def on_appended(outcome: AppendResult | MansioError) -> None:
            assert number not in self.outcomes
            self.outcomes[number] = outcome

        self.batch_processor.append(
            self.partition, batch, urgent=True, on_appended=on_appended, client=client
        )


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


def test_a_batch_whose_file_cannot_be_opened_waits_for_a_flush_and_later_ones_behind_it() -> None:
    one = One(Compression(Codec.NONE))
    one.partition.may_open = False
    for number in range(3):
        one.send(number, build_batch([(number, None, b"%d" % number, ())]))
    one.partition.files.flush.run()
    assert one.outcomes == {}
    assert len(one.partition.files.flush.callbacks) == 1
    one.partition.may_open = True
    one.send(3, build_batch([(3, None, b"3", ())]))
    assert one.outcomes == {}
    one.partition.files.flush.run()
    assert [values(batch) for batch in one.partition.batches] == [[b"0"], [b"1"], [b"2"], [b"3"]]
    assert list(one.outcomes) == [0, 1, 2, 3]
    assert not one.batch_processor.queues
    assert one.batch_processor.queued_bytes == 0


def test_a_batch_whose_file_cannot_be_opened_is_refused_if_there_is_nothing_to_flush() -> None:
    one = One(Compression(Codec.NONE))
    one.partition.may_open = False
    one.partition.files.flush.is_idle = True
    one.send(0, build_batch([(0, None, b"0", ())]))
    assert isinstance(one.outcomes[0], DescriptorsExhausted)
    assert not one.batch_processor.queues


def test_after_a_flush_no_partition_tries_again_behind_one_that_has_to_wait() -> None:
    one = One(Compression(Codec.NONE))
    others: list[Any] = [
        FakePartition(f"u-{number}", one.partition.rules, files=one.partition.files) for number in range(5)
    ]
    outcomes: list[AppendResult | MansioError] = []
    for partition in (one.partition, *others):
        partition.may_open = False
        one.batch_processor.append(
            partition, build_batch([(0, None, b"0", ())]), urgent=True, on_appended=outcomes.append
        )
        partition.refused = 0
    one.partition.may_open = True
    one.partition.files.flush.run()
    assert len(outcomes) == 1
    assert [partition.refused for partition in others] == [1, 0, 0, 0, 0]
    for partition in others:
        partition.may_open = True
    one.partition.files.flush.run()
    assert len(outcomes) == 6


def test_a_batch_that_cannot_be_recompressed_fails_alone() -> None:
    one = One()
    one.send(0, large(0)[:-1] + b"x")
    one.send(1, large(1))
    one.send(2, build_batch([(0, None, bytes(DECOMPRESSED_BYTES_MAX), ())], codec=Codec.ZSTD))  # a bomb
    one.send(3, large(3))
    while one.thread.jobs:
        one.thread.run()
    assert isinstance(one.outcomes[0], CorruptMessage)
    assert isinstance(one.outcomes[2], MessageTooLarge)
    assert f"max.decompressed.bytes={DECOMPRESSED_BYTES_MAX}" in str(one.outcomes[2])
    assert len(one.partition.batches) == 2
    assert not one.batch_processor.queues


def test_a_defect_of_the_thread_fails_one_batch(caplog: pytest.LogCaptureFixture) -> None:
    one = One()
    one.send(0, large(0))
    one.send(1, build_batch([(1, None, b"small", ())], codec=Codec.ZSTD))
    work, done = one.thread.jobs.pop()
    del work
    done(None, MemoryError())
    one.thread.run()
    assert isinstance(one.outcomes[0], InvalidRecord)
    assert isinstance(one.outcomes[1], AppendResult)
    assert "recompression_failed" in caplog.text


def test_an_unexpected_exception_ends_its_own_batch_only(caplog: pytest.LogCaptureFixture) -> None:
    """Each batch is answered with its own outcome, also if a callback before it raised, or the append."""
    one = One()
    as_it_is = [large(number, codec=Codec.ZSTD) for number in range(6)]
    one.send(0, large(0))

    def defective(outcome: AppendResult | MansioError) -> None:
        one.outcomes[1] = outcome
        raise ValueError("a defect of the caller")

    one.batch_processor.append(one.partition, as_it_is[1], urgent=True, on_appended=defective)
    one.send(2, as_it_is[2])
    one.send(3, large(3))
    one.send(4, as_it_is[4])
    for _ in range(3):
        one.thread.run()
    assert list(one.outcomes) == [0, 1, 2]
    one.partition.fails_unexpectedly = True
    for _ in range(2):
        one.thread.run()
    one.partition.fails_unexpectedly = False
    one.send(5, as_it_is[5])
    assert not one.thread.jobs
    assert [values(batch)[0][:1] for batch in one.partition.batches] == [b"0", b"1", b"2", b"5"]  # type: ignore[index]
    kinds = [type(one.outcomes[number]) for number in range(6)]
    assert kinds == [AppendResult, AppendResult, AppendResult, MansioError, MansioError, AppendResult]
    assert one.outcomes[3].kafka_code == -1  # type: ignore[union-attr]
    assert caplog.text.count("recompression_failed") == 3
    assert not one.batch_processor.queues


def test_a_partition_waits_for_one_batch_of_each_other_one() -> None:
    one = One()
    other: Any = FakePartition("u-0", rules(Compression(Codec.ZSTD)))
    for number in range(20):
        one.send(number, large(number))
    outcomes: list[AppendResult | MansioError] = []
    one.batch_processor.append(other, large(7), urgent=True, on_appended=outcomes.append)
    one.thread.run()
    one.thread.run()
    assert len(other.batches) == len(outcomes) == 1
    assert len(one.partition.batches) == 1


def test_a_closed_thread_fails_what_waits() -> None:
    one = One()
    for number in range(3):
        one.send(number, large(number))

    def submit(work: object, done: object) -> None:
        raise RuntimeError("the background worker is closed")

    one.thread.submit = submit
    one.thread.run()
    one.send(3, large(3))
    kinds = [type(one.outcomes[number]) for number in range(4)]
    assert kinds == [AppendResult, RequestTimedOut, RequestTimedOut, RequestTimedOut]
    assert one.batch_processor.queued_bytes == 0
    assert not one.batch_processor.queues


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
    while not one.outcomes and count < 60:
        one.send(count, batch, client=count % 3)
        count += 1
    assert one.batch_processor.queued_bytes <= QUEUED_BYTES_MAX
    assert one.batch_processor.is_congested("another")
    assert isinstance(one.outcomes[count - 1], RequestTimedOut), "a client tries again"
    one.thread.run()
    one.send(count, batch, client=count % 3)
    assert count not in one.outcomes
    while one.thread.jobs:
        one.thread.run()
    assert len(one.partition.batches) == count, "what was refused is not appended later"


@functools.cache
def decoded() -> bytes:
    """A batch of 31 MiB without compression."""
    return build_batch([(1, None, bytes(31 << 20), ())])


def bomb(codec: Codec, records: bytes | None = None) -> bytes:
    """The same batch, compressed to less than a hundredth."""
    if records is None:
        records = compress(codec, memoryview(decoded())[HEADER_BYTES:])
    return encode_batch(read_header(decoded())._replace(attributes=int(codec)), records)


@pytest.mark.parametrize("codec", [Codec.GZIP, Codec.SNAPPY, Codec.LZ4, Codec.ZSTD])
def test_a_batch_counts_as_decompressed(codec: Codec) -> None:
    """The work of recompression does not follow from the bytes that a client sends."""
    one = One(Compression(Codec.NONE), bytes_max=4 << 20)
    batch = bomb(codec)
    for number in range(50):
        one.send(number, batch, client="a")
    assert len(one.outcomes) == 50 - CLIENT_BYTES_MAX // len(decoded()), "refused at once"
    assert {type(outcome) for outcome in one.outcomes.values()} == {RequestTimedOut}
    assert one.batch_processor.queued_bytes >= (50 - len(one.outcomes)) * len(decoded())
    assert one.batch_processor.is_congested("a")
    one.send(50, large(50, codec=codec), client="b")
    assert 50 not in one.outcomes, "another client has a share of its own"


def test_a_client_has_a_share_of_the_queue() -> None:
    one = One(bytes_max=8 << 20)
    batch = build_batch([(0, None, bytes(7 << 20), ())])
    waiting = CLIENT_BYTES_MAX // len(batch)
    for number in range(waiting):
        one.send(number, batch, client="a")
    one.send(waiting, batch, client="a")
    assert isinstance(one.outcomes[waiting], RequestTimedOut)
    one.send(waiting + 1, batch, client="b")
    assert waiting + 1 not in one.outcomes


def understated(size: int) -> bytes:
    """gzip of two members: the length at the end of the stream is that of the second."""
    return bomb(Codec.GZIP, gzip.compress(decoded()[HEADER_BYTES:-size]) + gzip.compress(decoded()[-size:]))


@pytest.mark.full
def test_a_batch_that_is_longer_than_it_states_is_recompressed_if_there_is_room() -> None:
    one = One(bytes_max=4 << 20)
    batch = understated(100)
    small = build_batch([(1, None, b"small", ())])
    for number in range(6):
        one.send(number, batch, client="a")
    one.send(6, small, client="a")
    assert one.batch_processor.queued_bytes < 1 << 20
    one.thread.run()
    assert not one.outcomes
    assert one.batch_processor.queued_bytes >= DECOMPRESSED_BYTES_MAX
    while one.thread.jobs:
        one.thread.run()
    assert list(one.outcomes) == list(range(7))
    assert all(isinstance(outcome, AppendResult) for outcome in one.outcomes.values())
    assert values(one.partition.batches[0]) == values(decoded())


def test_a_batch_that_is_longer_than_it_states_is_not_inspected_before_it_counts() -> None:
    one = One(bytes_max=4 << 20)
    one.partition.rules = rules(None)._replace(
        checks_content=False, inspects_records=True, readers=(PRIORITY_READER,)
    )
    one.partition.clock = ManualClock()
    outcomes: list[AppendResult | MansioError] = []
    one.batch_processor.append(
        one.partition, understated(100), urgent=True, on_appended=outcomes.append, was_tried=True
    )
    assert one.batch_processor.queued_bytes < 1 << 20
    one.thread.run()
    assert not outcomes
    assert one.batch_processor.queued_bytes >= DECOMPRESSED_BYTES_MAX
    one.thread.run()
    (outcome,) = outcomes
    assert isinstance(outcome, AppendResult)


def test_a_batch_that_is_longer_than_it_states_is_refused_if_there_is_no_room() -> None:
    one = One(bytes_max=4 << 20)
    others: Any = [FakePartition(f"u-{number}", rules(Compression(Codec.NONE))) for number in range(10)]
    one.send(0, understated(100), client="a")
    for other in others:
        one.batch_processor.append(
            other, bomb(Codec.ZSTD), urgent=True, on_appended=lambda _: None, client=other
        )
    one.send(1, large(1), client="a")
    one.thread.run()
    assert isinstance(one.outcomes[0], RequestTimedOut)
    assert one.batch_processor.queued_bytes <= QUEUED_BYTES_MAX
    while one.thread.jobs:
        one.thread.run()
    assert isinstance(one.outcomes[1], AppendResult)
    assert len(one.partition.batches) == 1
    assert not one.batch_processor.queued_bytes
    assert not one.batch_processor._client_bytes


def test_a_follower_copies_what_its_leader_stored_whatever_its_own_setting() -> None:
    cluster = Cluster(partitions=1)
    cluster.run_for(1000)
    for node_id, codec in ((1, Codec.GZIP), (2, Codec.ZSTD), (3, Codec.SNAPPY)):
        partition = cluster[node_id].partitions[TOPIC.bytes, 0]
        partition.rules = partition.rules._replace(compression=Compression(codec))
    batches = [(0, large(number, sequence=number)) for number in range(5)]
    done: list[Any] = []
    for batch in batches:
        pending = cluster[1].service.produce.begin_produce(
            [(None, TOPIC.bytes, [batch])], grants=None, acks=ACKS_ALL
        )
        assert not pending.is_complete
        pending.wait(30_000, done.append)
    cluster.run_until(lambda: len(done) == 5, 20_000)
    assert all(
        entry.error is None for pending in done for _, _, entries in pending.results for entry in entries
    )
    copies = []
    for node_id in (1, 2, 3):
        partition = cluster[node_id].partitions[TOPIC.bytes, 0]
        cluster.run_until(lambda log=partition.log: log.end_offset == 5, 20_000)
        found = partition.log.read(0, 1 << 20, 5)
        assert found is not None
        copies.append(list(partition.log.batch_headers(0)))
    assert copies[0] == copies[1] == copies[2]
    assert [header.codec for header in copies[0]] == [Codec.GZIP] * 5
    assert [header.base_sequence for header in copies[0]] == [0, 1, 2, 3, 4]
    assert [cluster[node_id].batch_processor.recompressed_batch_count for node_id in (1, 2, 3)] == [5, 0, 0]
