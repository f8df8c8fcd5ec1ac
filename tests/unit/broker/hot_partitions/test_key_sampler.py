"""Sampling of keys: what is read in a round, and that it is bounded."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

import pytest

from mansio.broker.hot_partitions.key_sampler import (
    BATCHES_PER_ROUND_MAX,
    KEYS_PER_BATCH_MAX,
    KeySampler,
)
from mansio.errors import CorruptLog
from mansio.host.asyncio_loop import AsyncioScheduler
from mansio.wire.batch.compression import Codec
from mansio.wire.batch.record_batch import build_batch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

RECORDS: Final = 10


class Replica:
    """What sampling uses of a partition: batches of `RECORDS` records, with the offset of their batch as key."""

    def __init__(self, codec: Codec = Codec.NONE, records: int = RECORDS) -> None:
        self.codec = codec
        self.records = records
        self.high_watermark = self.start_offset = 0
        self.closed = False
        self.settings = SimpleNamespace(hot_keys_enabled=True)
        self.log = self
        self.read: list[int] = []
        self.is_damaged = False

    def batches(self, offset: int) -> Iterator[bytes]:
        begin = offset - offset % self.records
        self.read.append(begin)
        if self.is_damaged:
            raise CorruptLog("damaged")
        rows = [(0, b"%d" % begin, b"v", ())] * self.records
        yield build_batch(rows, codec=self.codec, base_offset=begin)


class Thread:
    """A thread that runs its work at once."""

    def __init__(self) -> None:
        self.jobs = 0

    def submit(self, work: Callable[[], Any], done: Callable[[Any, Any], None]) -> None:
        self.jobs += 1
        done(work(), None)


class Bench:
    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = Thread()
        self.sampler = KeySampler(
            clock=SimpleNamespace(monotonic=self.loop.time),
            random=SimpleNamespace(uniform=lambda low, high: (low + high) / 2),
            scheduler=AsyncioScheduler(self.loop),
            batch_thread=self.thread,  # type: ignore[arg-type]
        )

    def follow(self, *replicas: Replica) -> None:
        """Follow partitions; rounds are run by the test."""

        async def work() -> None:
            self.sampler.follow(replicas)  # type: ignore[arg-type]
            if self.sampler._work is not None:
                self.sampler._work.cancel()

        self.loop.run_until_complete(work())

    def round(self) -> None:
        self.loop.run_until_complete(self.sampler.run_round())

    def keys(self, replica: Replica) -> dict[bytes, int]:
        found = self.sampler.sample(replica, 100)  # type: ignore[arg-type]
        assert found is not None
        return {each.key: each.records for each in found.keys}


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.loop.close()


def test_one_batch_of_what_is_new_is_read_in_a_round(bench: Bench) -> None:
    replica = Replica()
    replica.high_watermark = 100
    bench.follow(replica)
    bench.round()
    assert replica.read == [], "nothing is new"
    replica.high_watermark = 140
    bench.round()
    bench.round()
    assert replica.read == [120], "the batch of a random record, once"
    assert bench.keys(replica) == {b"120": RECORDS}


def test_with_more_hot_partitions_than_a_round_reads_they_take_turns(bench: Bench) -> None:
    replicas = [Replica() for _ in range(2 * BATCHES_PER_ROUND_MAX + 10)]
    bench.follow(*replicas)
    for number in range(1, 5):
        for replica in replicas:
            replica.high_watermark += RECORDS
        before = bench.sampler.batch_count
        bench.round()
        assert bench.sampler.batch_count - before == BATCHES_PER_ROUND_MAX, number
    assert {len(replica.read) for replica in replicas} == {1, 2}


def test_a_large_batch_is_read_in_part_and_a_compressed_one_on_the_thread(bench: Bench) -> None:
    plain, packed = Replica(records=1_000), Replica(Codec.ZSTD)
    bench.follow(plain, packed)
    plain.high_watermark, packed.high_watermark = 1_000, RECORDS
    bench.round()
    assert bench.keys(plain) == {b"0": KEYS_PER_BATCH_MAX}
    assert bench.keys(packed) == {b"0": RECORDS}
    assert bench.thread.jobs == 1


def test_a_batch_that_cannot_be_read_is_left_out(bench: Bench) -> None:
    damaged, intact = Replica(), Replica()
    bench.follow(damaged, intact)
    damaged.is_damaged = True
    damaged.high_watermark = intact.high_watermark = RECORDS
    bench.round()
    assert bench.keys(damaged) == {}
    assert bench.keys(intact) == {b"0": RECORDS}


def test_no_key_is_read_or_shown_where_the_topic_forbids_it(bench: Bench) -> None:
    replica = Replica()
    bench.follow(replica)
    replica.high_watermark = RECORDS
    bench.round()
    replica.settings.hot_keys_enabled = False
    assert bench.sampler.sample(replica, 10) is None  # type: ignore[arg-type]
    replica.high_watermark += RECORDS
    bench.round()
    assert replica.read == [0]
    replica.settings.hot_keys_enabled = True
    assert bench.keys(replica) == {}, "what was sampled before is gone"


def test_keys_of_a_partition_that_is_not_hot_any_more_are_forgotten(bench: Bench) -> None:
    first, second = Replica(), Replica()
    bench.follow(first, second)
    first.high_watermark = second.high_watermark = RECORDS
    bench.round()
    bench.follow(second)
    assert bench.sampler.sample(first, 10) is None  # type: ignore[arg-type]
    assert bench.keys(second) == {b"0": RECORDS}
    bench.follow(first, second)
    assert bench.keys(first) == {}
