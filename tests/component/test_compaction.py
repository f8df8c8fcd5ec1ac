"""Compaction of a real broker with other clients: the latest record of each key stays, at its offset."""

from __future__ import annotations

import asyncio
import itertools
import time
import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from aiokafka import AIOKafkaConsumer
from aiokafka import TopicPartition as AiokafkaPartition
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

import mansio
from mansio.broker.partition.producer_hook import ProducerHook
from mansio.config.topic_names import OFFSETS_TOPIC
from mansio.wire.batch.compression import Codec
from mansio.wire.batch.record_batch import DELETE_HORIZON_FLAG, build_batch, iterate_batches
from support.machine import scaled
from support.present import present
from support.raw_peer import RawPeer
from support.waiting import wait_until

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", "(read|open)_text is deprecated", DeprecationWarning)
    from kafka import KafkaConsumer
    from kafka import TopicPartition as KafkaPythonPartition

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = pytest.mark.filterwarnings("ignore:(read|open)_text is deprecated:DeprecationWarning")

QUIET: dict[str, Any] = {"log_level": 0, "error_cb": lambda error: None}
TOMBSTONES_MS = 4_000
"""Two clients read everything while a tombstone is kept."""
CODECS = ("none", "gzip", "snappy", "lz4", "zstd")
_numbers = itertools.count(1)


class Seen(NamedTuple):
    offset: int
    key: bytes
    value: bytes | None


def broker_in(directory: Path, **settings: Any) -> mansio.Broker:
    quick = {
        "log_cleaner_backoff_ms": 20,
        "log_flush_offset_checkpoint_interval_ms": 20,
        "log_retention_check_interval_ms": 20,
        "group_initial_rebalance_delay_ms": 0,
    }
    return mansio.Broker(directory, **{**quick, **settings})


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[mansio.Broker]:
    with broker_in(tmp_path_factory.mktemp("compaction")) as started:
        yield started


class World:
    """One compacted topic of a broker, through confluent-kafka; `latest` is what each key was last set to."""

    def __init__(self, broker: mansio.Broker, **configs: str) -> None:
        self.topic = f"compacted-{next(_numbers)}"
        self.latest: dict[bytes, Seen] = {}
        self.producers: dict[str, Producer] = {}
        self.move_to(broker)
        config = {"cleanup.policy": "compact", "segment.bytes": "4096", "min.cleanable.dirty.ratio": "0.01"}
        config |= {name.replace("_", "."): value for name, value in configs.items()}
        admin = AdminClient({"bootstrap.servers": broker.address, **QUIET})
        admin.create_topics([NewTopic(self.topic, 1, 1, config=config)])[self.topic].result(scaled(10))

    def move_to(self, broker: mansio.Broker) -> None:
        self.broker = broker
        self.address = broker.address
        self.producers.clear()

    def producer(self, codec: str = "none") -> Producer:
        if codec not in self.producers:
            wanted = {"compression.type": codec, "linger.ms": 5, "enable.idempotence": True}
            self.producers[codec] = Producer({"bootstrap.servers": self.address, **wanted, **QUIET})
        return self.producers[codec]

    def write(self, producer: Producer, rows: list[tuple[bytes, bytes | None]]) -> None:
        """And note where each was stored."""

        def stored(error: object, message: Any) -> None:
            assert error is None, error
            known = self.latest.get(message.key())
            if known is None or known.offset < message.offset():
                self.latest[message.key()] = Seen(message.offset(), message.key(), message.value())

        for key, value in rows:
            producer.produce(self.topic, value, key, partition=0, on_delivery=stored)
        assert producer.flush(scaled(20)) == 0

    @property
    def partition(self) -> Any:
        return present(self.broker._broker).service.partitions.find(self.topic, None, 0)

    def expected(self) -> list[Seen]:
        return sorted(self.latest.values())

    def roll(self) -> None:
        """Close the segment that is written to, as its age would."""
        on_loop(self.broker, self.partition.roll)

    @property
    def dirty(self) -> bool:
        """Whether anything but the newest segment is still to be compacted."""
        log = self.partition.log
        return bool(log.compaction.state.cleaned_end_offset < log.active_segment().base_offset)

    def wait_compacted(self) -> None:
        wait_until(lambda: not self.dirty, what="compacted")

    def read(self) -> list[Seen]:
        """All records, through confluent-kafka, from the earliest on to the end of the partition."""
        consumer = Consumer(
            {
                "bootstrap.servers": self.address,
                "group.id": "reader",
                "enable.auto.commit": False,
                "auto.offset.reset": "earliest",
                "enable.partition.eof": True,
                **QUIET,
            }
        )
        try:
            consumer.assign([TopicPartition(self.topic, 0, 0)])
            seen = []
            while (message := consumer.poll(scaled(10))) is not None and message.error() is None:
                seen.append(Seen(present(message.offset()), present(message.key()), message.value()))
            assert message is not None, "the reader waits for an offset that does not come"
            return seen
        finally:
            consumer.close()

    def read_by_kafka_python(self) -> list[Seen]:
        consumer = KafkaConsumer(bootstrap_servers=self.address, enable_auto_commit=False)
        partition = KafkaPythonPartition(self.topic, 0)
        try:
            consumer.assign([partition])
            consumer.seek(partition, 0)
            end = consumer.end_offsets([partition])[partition]
            seen: list[Seen] = []
            deadline = time.monotonic() + scaled(10)
            while consumer.position(partition) < end and time.monotonic() < deadline:
                for records in consumer.poll(500).values():
                    seen += [Seen(r.offset, r.key, r.value) for r in records]
            assert consumer.position(partition) == end
            return seen
        finally:
            consumer.close()

    def read_by_aiokafka(self) -> list[Seen]:
        async def read() -> list[Seen]:
            consumer = AIOKafkaConsumer(bootstrap_servers=self.address, enable_auto_commit=False)
            await consumer.start()
            try:
                partition = AiokafkaPartition(self.topic, 0)
                consumer.assign([partition])
                consumer.seek(partition, 0)
                end = (await consumer.end_offsets([partition]))[partition]
                seen: list[Seen] = []
                async with asyncio.timeout(scaled(10)):
                    while await consumer.position(partition) < end:
                        for records in (await consumer.getmany(timeout_ms=200)).values():
                            seen += [Seen(r.offset, r.key, r.value) for r in records]
                return seen
            finally:
                await consumer.stop()

        return asyncio.run(read())

    def read_by_mansio(self) -> list[Seen]:
        with mansio.blocking.connect(self.address) as client:
            where = [mansio.TopicPartition(self.topic, 0)]
            count = len(self.latest)
            return [
                Seen(m.offset, present(m.key), m.value)
                for m in client.consume(where, from_="earliest", max_records=count)
            ]

    def files(self, directory: Path) -> list[Path]:
        (found,) = (directory / "topics").glob(f"{self.topic}.*")
        return sorted((found / "0").glob("*.log"))


def on_loop(broker: mansio.Broker, work: Callable[[], object]) -> None:
    """Run something on the broker's own thread."""

    async def call() -> None:
        work()

    broker._call(call(), 10)


@pytest.mark.row("L7")
def test_of_each_key_the_latest_stays_at_its_offset_for_every_client_and_codec(broker: mansio.Broker) -> None:
    world = World(broker)
    for turn, codec in enumerate(CODECS * 3):
        rows: list[tuple[bytes, bytes | None]] = [
            (b"key-%d" % n, b"%d-%d" % (turn, n) * 5) for n in range(turn % 5, 60, 1 + turn % 3)
        ]
        world.write(world.producer(codec), rows)
    world.roll()
    world.wait_compacted()
    expected = world.expected()
    assert world.read() == expected
    assert world.read_by_kafka_python() == expected
    assert world.read_by_aiokafka() == expected
    assert world.read_by_mansio() == expected
    counts = broker._broker.service.log_cleaner.counts  # type: ignore[union-attr]  # the broker runs
    assert counts.records_dropped > 0
    assert counts.failed == 0


@pytest.mark.row("L7")
def test_a_tombstone_is_seen_for_its_time_and_then_goes_for_good(broker: mansio.Broker) -> None:
    world = World(broker, delete_retention_ms=str(int(scaled(TOMBSTONES_MS))))
    producer = world.producer("lz4")
    world.write(producer, [(b"a", b"1"), (b"b", b"1"), (b"c", b"1")])
    world.write(producer, [(b"a", None), (b"b", b"2"), (b"d", None)])
    world.roll()
    world.wait_compacted()
    with_tombstones = world.expected()
    assert [seen.key for seen in with_tombstones] == [b"c", b"a", b"b", b"d"]
    assert world.read() == with_tombstones
    piece = world.partition.log.read(0, 1 << 20, 6).read()
    assert any(header.attributes & DELETE_HORIZON_FLAG for _, header in iterate_batches(piece))
    assert world.read_by_kafka_python() == with_tombstones
    without = [seen for seen in with_tombstones if seen.value is not None]
    wait_until(lambda: world.read() == without, what="the tombstones go although nothing is written")
    assert world.read_by_kafka_python() == without
    assert world.read_by_aiokafka() == without


@pytest.mark.row("L7")
def test_a_record_is_compacted_at_its_age_although_its_segment_is_not_full(broker: mansio.Broker) -> None:
    world = World(broker, max_compaction_lag_ms="300", segment_bytes="1000000")
    for turn in range(3):
        world.write(world.producer(), [(b"a", b"%d" % turn)])
    wait_until(lambda: len(world.read()) == 1)
    assert world.read() == world.expected()
    assert len(world.partition.log.segments()) == 2, "what is written next is not closed before its time"


@pytest.mark.row("L6", "L7")
def test_a_topic_may_be_compacted_and_forget_what_is_old(broker: mansio.Broker) -> None:
    world = World(broker, cleanup_policy="compact,delete", retention_ms="3600000")
    old = int(time.time() * 1000) - 7_200_000
    producer = world.producer()
    for n in range(40):
        producer.produce(world.topic, bytes(900), b"old-%d" % n, partition=0, timestamp=old)
        assert producer.flush(scaled(10)) == 0
    for turn in range(4):
        world.write(producer, [(b"new-%d" % n, b"%d" % turn * 200) for n in range(20)])
    world.roll()
    world.wait_compacted()
    log = world.partition.log
    wait_until(lambda: log.start_offset > 30)
    seen = [one for one in world.read() if not one.key.startswith(b"old")]
    assert seen == world.expected()


@pytest.mark.row("L7")
def test_a_restart_keeps_what_was_compacted_and_the_producers_sequences(tmp_path: Path) -> None:
    def batch(sequence: int, key: bytes) -> bytes:
        return build_batch(
            [(1_700_000_000_000 + sequence, key, b"%d" % sequence, ())],
            codec=Codec.ZSTD, producer_id=4711, producer_epoch=0, base_sequence=sequence,
        )  # fmt: skip

    with broker_in(tmp_path) as broker:
        world = World(broker)
        with RawPeer(int(broker.address.rpartition(":")[2])) as peer:
            offsets = [peer.produce(world.topic, batch(n, b"p")).base_offset for n in range(8)]
        for _ in range(3):
            world.write(world.producer(), [(b"%d" % n, bytes(100)) for n in range(40)])
        world.write(world.producer(), [(b"p", b"other")])
        world.roll()
        world.wait_compacted()
        expected = world.expected()
        assert world.read() == expected
        end = world.partition.end_offset
    for snapshot in tmp_path.rglob("*.producers"):
        snapshot.unlink()
    with broker_in(tmp_path) as broker:
        world.move_to(broker)
        assert world.partition.end_offset == end
        assert world.read() == expected
        known = world.partition.find_hook(ProducerHook).table.get(4711)
        assert [one.base_offset for one in known.batches] == offsets[-5:]
        with RawPeer(int(broker.address.rpartition(":")[2])) as peer:
            for n in range(3, 8):  # sent twice, stored once, although their records are gone
                assert peer.produce(world.topic, batch(n, b"p")).base_offset == offsets[n]
            assert peer.produce(world.topic, batch(8, b"p")).base_offset == end
    with broker_in(tmp_path, listeners=world.address) as broker:
        world.move_to(broker)
        producer = world.producer()
        for turn in range(3):
            world.write(producer, [(b"%d" % n, b"%d" % turn * 50) for n in range(40)])
        world.latest[b"p"] = Seen(end, b"p", b"8")
        world.roll()
        world.wait_compacted()
        assert world.read() == world.expected()
        broker.close()
        broker.start()  # the producer goes on where it was
        world.write(producer, [(b"%d" % n, b"after") for n in range(40)])
        assert world.read()[-40:] == world.expected()[-40:]


@pytest.mark.row("L7")
def test_a_reader_meets_no_gap_in_order_and_no_error_while_segments_are_swapped(
    broker: mansio.Broker,
) -> None:
    world = World(broker)
    producer = world.producer()
    consumer = Consumer(
        {
            "bootstrap.servers": world.address,
            "group.id": "slow",
            "enable.auto.commit": False,
            "auto.offset.reset": "error",
            "fetch.message.max.bytes": 1000,
            "queued.min.messages": 1,
            **QUIET,
        }
    )
    swaps = broker._broker.service.log_cleaner.counts.swaps  # type: ignore[union-attr]  # the broker runs
    view: dict[bytes, Seen] = {}
    last = -1

    def read_some(timeout_s: float) -> None:
        nonlocal last
        for message in consumer.consume(50, timeout_s):
            assert message.error() is None, message.error()
            assert present(message.offset()) > last
            last, key = present(message.offset()), present(message.key())
            view[key] = Seen(last, key, message.value())

    try:
        consumer.assign([TopicPartition(world.topic, 0, 0)])
        for turn in range(30):
            world.write(producer, [(b"%d" % n, b"%d" % turn * 40) for n in range(50)])
            read_some(0.02)
        world.roll()
        world.wait_compacted()
        deadline = time.monotonic() + scaled(10)
        while last < world.expected()[-1].offset and time.monotonic() < deadline:
            read_some(0.1)
    finally:
        consumer.close()
    assert sorted(view.values()) == world.expected()
    assert broker._broker.service.log_cleaner.counts.swaps > swaps  # type: ignore[union-attr]  # the broker runs


@pytest.mark.row("L7")
def test_the_offsets_of_groups_are_compacted_and_read_the_same_after_it(tmp_path: Path) -> None:
    with broker_in(tmp_path, offsets_topic_num_partitions=1) as broker:
        world = World(broker)
        world.write(world.producer(), [(b"%d" % n, b"v") for n in range(50)])
        consumer = Consumer(
            {"bootstrap.servers": world.address, "group.id": "g", "enable.auto.commit": False, **QUIET}
        )
        try:
            for n in range(50):
                where = TopicPartition(world.topic, 0, n)
                consumer.commit(offsets=[where], asynchronous=False)
        finally:
            consumer.close()
        offsets = present(broker._broker).service.partitions.find(OFFSETS_TOPIC, None, 0)
        before = offsets.log.size_bytes
        on_loop(broker, offsets.roll)
        wait_until(lambda: offsets.log.compaction.state.cleaned_end_offset == offsets.log.end_offset)
        assert offsets.log.size_bytes < before / 10
    for checkpoint in tmp_path.rglob("*.checkpoint"):
        checkpoint.unlink()  # of the view: it has to come from the log
    with broker_in(tmp_path, offsets_topic_num_partitions=1) as broker:
        consumer = Consumer({"bootstrap.servers": broker.address, "group.id": "g", **QUIET})
        try:
            (committed,) = consumer.committed([TopicPartition(world.topic, 0)], 10)
            assert committed.offset == 49
        finally:
            consumer.close()


def test_a_damaged_batch_ends_the_compaction_of_its_log_and_of_no_other(tmp_path: Path) -> None:
    with broker_in(tmp_path, log_cleaner_backoff_ms=3_600_000) as broker:
        damaged, other = World(broker), World(broker)
        for world in (damaged, other):
            for turn in range(4):
                world.write(world.producer(), [(b"%d" % n, b"%d" % turn * 99) for n in range(30)])
        victim = damaged.files(tmp_path)[0]
        content = bytearray(victim.read_bytes())
        content[200] ^= 1
        victim.write_bytes(content)
        other.roll()
        damaged.roll()
        log_cleaner = present(broker._broker).service.log_cleaner
        assert log_cleaner is not None

        def both_judged() -> bool:
            on_loop(broker, log_cleaner._start_round)
            return bool(log_cleaner.uncleanable) and not other.dirty

        wait_until(both_judged)
        assert other.read() == other.expected()
        ((name, reason),) = log_cleaner.uncleanable.items()
        assert name == f"{damaged.topic}-0"
        assert "CRC" in reason
        assert victim.read_bytes() == content, "neither dropped nor carried over"
        damaged.write(damaged.producer(), [(b"still", b"served")])
        assert log_cleaner.counts.failed == 1


def test_a_topic_can_be_deleted_while_it_is_compacted(tmp_path: Path) -> None:
    with broker_in(tmp_path, log_cleaner_io_max_bytes_per_second=4096) as broker:
        world = World(broker)
        for turn in range(4):
            world.write(world.producer(), [(b"%d" % n, b"%d" % turn * 99) for n in range(50)])
        log_cleaner = present(broker._broker).service.log_cleaner
        assert log_cleaner is not None
        wait_until(lambda: log_cleaner._current)
        admin = AdminClient({"bootstrap.servers": broker.address, **QUIET})
        admin.delete_topics([world.topic])[world.topic].result(scaled(10))
        assert list((tmp_path / "topics").glob(f"{world.topic}.*")) == []
        assert log_cleaner.uncleanable == {}
