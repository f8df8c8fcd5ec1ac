"""Delayed records with foreign clients: they delay by a header, read when due, and pass the control batches."""

from __future__ import annotations

import asyncio
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import pytest
from aiokafka import AIOKafkaConsumer
from aiokafka import TopicPartition as AiokafkaPartition
from confluent_kafka import Consumer, TopicPartition
from kafka import KafkaConsumer
from kafka import TopicPartition as KafkaPythonPartition

import mansio
from mansio.broker.features.delays.delay_control_records import encode_accepted
from mansio.testing import TestBroker
from mansio.wire.batch.delay_headers import DELAY_HEADER, DELIVER_AT_HEADER
from mansio.wire.batch.record_batch import build_batch, read_header
from support.machine import scaled
from support.present import present
from system.interop.clients import CODECS, PYTHON_CLIENTS, QUIET, READERS, WRITERS, Item

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

TOPIC: Final = "reminders"
PARTITION: Final = mansio.TopicPartition(TOPIC, 0)
DELAY_MS: Final = 900_000
IDEMPOTENCE: Final = {
    "confluent-kafka": "enable.idempotence",
    "kafka-python": "enable_idempotence",
    "aiokafka": "enable_idempotence",
}
CONTROL_BATCHES: Final = 100_000
CONTROL_BATCHES_PER_CALL: Final = 500
GROUP_DEADLINE_S: Final = 30.0


@pytest.fixture
def broker() -> Iterator[TestBroker]:
    with TestBroker() as running:
        running.client().admin.create_topic(TOPIC, partitions=1, config={"mansio.delay.enable": "true"})
        yield running


def items_of(writer: str, broker: TestBroker) -> list[Item]:
    """Records of which every second one is delayed, half of them by each header."""
    at_ms = broker.clock.time_ms() + DELAY_MS
    headers = ((), ((DELAY_HEADER, b"%d" % DELAY_MS),), (), ((DELIVER_AT_HEADER, b"%d" % at_ms),))
    return [Item(b"k", b"%s %d " % (writer.encode(), n) * 20, headers[n % 4]) for n in range(40)]


@pytest.mark.row("D6", "A1")
@pytest.mark.parametrize("idempotent", [True, pytest.param(False, marks=pytest.mark.full)])
@pytest.mark.parametrize(
    "codec", [codec if codec == "lz4" else pytest.param(codec, marks=pytest.mark.full) for codec in CODECS]
)
def test_clients_of_every_kind_read_records_of_mixed_batches_when_they_are_due(
    broker: TestBroker, codec: str, *, idempotent: bool
) -> None:
    now: list[bytes | None] = []
    later: list[bytes | None] = []
    offsets: list[int] = []
    for writer in PYTHON_CLIENTS:
        items = items_of(writer, broker)
        options = {IDEMPOTENCE[writer]: idempotent}
        offsets += WRITERS[writer](broker.bootstrap_servers, TOPIC, items, codec=codec, **options)
        now += [item.value for item in items if not item.headers]
        later += [item.value for item in items if item.headers]
    broker.client().publish(TOPIC, b"last")
    now.append(b"last")
    assert len({*offsets}) == len(now) + len(later) - 1
    for reader, read in READERS.items():
        found = read(broker.bootstrap_servers, TOPIC, len(now))
        assert [got.item.value for got in found] == now, reader
    broker.clock.advance(seconds=DELAY_MS / 1000 + 10)
    for reader, read in READERS.items():
        found = read(broker.bootstrap_servers, TOPIC, len(now) + len(later))
        assert [got.item.value for got in found[: len(now)]] == now, reader
        assert sorted(got.item.value or b"" for got in found[len(now) :]) == sorted(map(present, later)), (
            reader
        )
        ids = [int(dict(got.item.headers)["mansio-delayed-id"] or 0) for got in found[len(now) :]]
        assert {*ids} <= {*offsets}, reader


# Control batches at the end of the log


@contextmanager
def confluent_member(bootstrap_servers: str) -> Iterator[Callable[[], list[int]]]:
    settings = {"bootstrap.servers": bootstrap_servers, "group.id": "g", "auto.offset.reset": "earliest"}
    consumer = Consumer({**settings, "auto.commit.interval.ms": 100, **QUIET})
    consumer.subscribe([TOPIC])
    yield lambda: [present(message.offset()) for message in consumer.consume(10, 0.1)]
    consumer.close()


@contextmanager
def kafka_python_member(bootstrap_servers: str) -> Iterator[Callable[[], list[int]]]:
    consumer = KafkaConsumer(
        TOPIC,
        bootstrap_servers=bootstrap_servers,
        group_id="g",
        auto_offset_reset="earliest",
        auto_commit_interval_ms=100,
    )
    yield lambda: [one.offset for messages in consumer.poll(100).values() for one in messages]
    consumer.close()


@contextmanager
def aiokafka_member(bootstrap_servers: str) -> Iterator[Callable[[], list[int]]]:
    with asyncio.Runner() as runner:

        async def start() -> AIOKafkaConsumer:
            consumer = AIOKafkaConsumer(
                TOPIC,
                bootstrap_servers=bootstrap_servers,
                group_id="g",
                auto_offset_reset="earliest",
                auto_commit_interval_ms=100,
            )
            await consumer.start()
            return consumer

        async def poll() -> list[int]:
            found = await consumer.getmany(timeout_ms=100)
            return [one.offset for messages in found.values() for one in messages]

        consumer = runner.run(start())
        yield lambda: runner.run(poll())
        runner.run(consumer.stop())


@contextmanager
def own_member(bootstrap_servers: str) -> Iterator[Callable[[], list[int]]]:
    with (
        mansio.blocking.connect(bootstrap_servers) as client,
        client.consume(TOPIC, group="g", auto_commit_interval_ms=100) as consumer,
    ):
        yield lambda: [message.offset for message in consumer.poll(100)]


@pytest.mark.row("G4")
@pytest.mark.parametrize("member", [confluent_member, kafka_python_member, aiokafka_member, own_member])
def test_the_lag_of_a_group_reaches_0_behind_control_batches(
    broker: TestBroker, member: Callable[[str], AbstractContextManager[Callable[[], list[int]]]]
) -> None:
    client = broker.client()
    client.publish(TOPIC, b"first")
    read: list[int] = []
    with member(broker.bootstrap_servers) as poll:
        end = time.monotonic() + scaled(GROUP_DEADLINE_S)
        while not read and time.monotonic() < end:
            read += poll()
        client.publish_many(TOPIC, [b"pending"] * 3, delay=3600)
        client.publish(TOPIC, b"pending", delay=3600)
        lag: int | None = None
        while lag != 0 and time.monotonic() < end:
            read += poll()
            found = client.admin.group_lag("g").get(PARTITION)
            lag = None if found is None or found.end_offset < 5 else found.lag
        assert (read, lag) == ([0], 0)


def append_control_batches(broker: TestBroker, count: int) -> None:
    """Append batches of one pending record each, without requests."""
    batch = build_batch([(broker.clock.time_ms(), None, b"pending", ())])
    due_ms = broker.clock.time_ms() + 10 * DELAY_MS
    control = encode_accepted(batch, read_header(batch), [due_ms])

    async def append() -> None:
        partition = broker._running().service.partitions.find(TOPIC, None, 0)
        for _ in range(count // CONTROL_BATCHES_PER_CALL):
            partition.append_unchanged([control] * CONTROL_BATCHES_PER_CALL)
            await asyncio.sleep(0)

    broker._run_on_loop(append())


# Offsets by time


def confluent_offset_at(bootstrap_servers: str, timestamp_ms: int) -> int:
    consumer = Consumer({"bootstrap.servers": bootstrap_servers, "group.id": "none", **QUIET})
    (found,) = consumer.offsets_for_times([TopicPartition(TOPIC, 0, timestamp_ms)], scaled(GROUP_DEADLINE_S))
    consumer.close()
    return int(found.offset)


def kafka_python_offset_at(bootstrap_servers: str, timestamp_ms: int) -> int:
    consumer = KafkaConsumer(bootstrap_servers=bootstrap_servers)
    partition = KafkaPythonPartition(TOPIC, 0)
    found = consumer.offsets_for_times({partition: timestamp_ms})[partition]
    consumer.close()
    return int(found.offset)


def aiokafka_offset_at(bootstrap_servers: str, timestamp_ms: int) -> int:
    async def ask() -> int:
        consumer = AIOKafkaConsumer(bootstrap_servers=bootstrap_servers)
        await consumer.start()
        try:
            partition = AiokafkaPartition(TOPIC, 0)
            found = await consumer.offsets_for_times({partition: timestamp_ms})
            return int(found[partition].offset)
        finally:
            await consumer.stop()

    return asyncio.run(ask())


@pytest.mark.parametrize("offset_at", [confluent_offset_at, kafka_python_offset_at, aiokafka_offset_at])
def test_offsets_by_time_are_those_of_records_and_never_of_control_batches(
    broker: TestBroker, offset_at: Callable[[str, int], int]
) -> None:
    client = broker.client()
    for minutes in range(1, 6):
        client.publish(TOPIC, b"%d" % minutes, delay=60 * minutes)
    for _ in range(5):
        broker.clock.advance(seconds=61)
        client.publish(TOPIC, b"pending", delay=86_400)
    with client.consume(PARTITION, to_end=True) as consumer:
        messages = list(consumer)
    assert len(messages) == 5
    earlier_ms = 0
    for message in messages:
        for timestamp_ms in (earlier_ms + 1, message.timestamp_ms):
            assert offset_at(broker.bootstrap_servers, timestamp_ms) == message.offset
        earlier_ms = message.timestamp_ms


@pytest.mark.full
def test_clients_of_every_kind_pass_100000_control_batches(broker: TestBroker) -> None:
    append_control_batches(broker, CONTROL_BATCHES)
    broker.client().publish(TOPIC, b"last")
    for reader, read in READERS.items():
        (found,) = read(broker.bootstrap_servers, TOPIC, 1)
        assert (found.offset, found.item.value) == (CONTROL_BATCHES, b"last"), reader
    with broker.client().consume(PARTITION, to_end=True) as consumer:
        assert [message.offset for message in consumer] == [CONTROL_BATCHES]
