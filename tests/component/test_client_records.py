"""Publishing and consuming with a real broker: content, positions, limits."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest

import mansio  # noqa: TC001  # fixtures are annotated with it
from mansio.client import OutgoingRecord, ProducerOptions, TopicPartition
from mansio.errors import (
    InvalidRequest,
    MessageTooLarge,
    OffsetOutOfRange,
    UnknownTopicOrPartition,
)
from mansio.wire.murmur2 import partition_for_key
from support.client_fixtures import broker_in, connected, run, until
from support.machine import scaled

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[mansio.Broker]:
    with broker_in(tmp_path_factory.mktemp("records")) as started:
        yield started


async def read_all(client: mansio.Client, topic: str, **how: Any) -> list[mansio.Message]:
    return [message async for message in client.consume(topic, **{"to_end": True, **how})]


@pytest.mark.row("L2", "L8", "P2")
@pytest.mark.parametrize("codec", ["none", "gzip", "snappy", "lz4", "zstd"])
def test_records_round_trip_with_every_codec(broker: mansio.Broker, codec: Any) -> None:
    records = [
        OutgoingRecord(b"value", b"key", (("a", b"1"), ("a", None), ("\u00e9", b"")), 0, 1_700_000_000_000),
        OutgoingRecord(None, b"tombstone", (), 0, 1_700_000_000_001),
        OutgoingRecord(b"", b"", (), 0, 1_700_000_000_002),
        OutgoingRecord(bytes(range(256)) * 400, None, (), 0, 1_700_000_000_003),
    ]

    async def scenario() -> None:
        async with connected(broker, **{f"parts-{codec}": 1}) as client:
            async with client.producer(ProducerOptions(codec=codec)) as producer:
                await producer.publish_many(f"parts-{codec}", records)
            found = await read_all(client, f"parts-{codec}")
            assert [
                OutgoingRecord(m.value, m.key, m.headers, m.partition, m.timestamp_ms) for m in found
            ] == records
            assert [message.offset for message in found] == [0, 1, 2, 3]

    run(scenario)


@pytest.mark.row("P1", "P3")
def test_keys_keep_their_partition_and_their_order(broker: mansio.Broker) -> None:
    async def scenario() -> None:
        async with connected(broker, keyed=5) as client:
            given = [OutgoingRecord(b"%d" % number, b"key-%d" % (number % 17)) for number in range(3_000)]
            stored = await client.publish_many("keyed", given)
            assert all(
                m.partition == partition_for_key(r.key or b"", 5) for m, r in zip(stored, given, strict=True)
            )
            by_key: dict[bytes | None, list[int]] = {}
            for message in await read_all(client, "keyed"):
                by_key.setdefault(message.key, []).append(int(message.value or b""))
            assert sum(map(len, by_key.values())) == 3_000
            assert all(values == sorted(values) for values in by_key.values())

    run(scenario)


def test_records_without_key_use_every_partition_in_large_batches(broker: mansio.Broker) -> None:
    async def scenario() -> None:
        async with connected(broker, keyless=3) as client:
            async with client.producer(ProducerOptions(batch_bytes_max=2_000)) as producer:
                stored = await producer.publish_many("keyless", [bytes(100)] * 1_000)
            assert {metadata.partition for metadata in stored} == {0, 1, 2}
            switches = sum(a.partition != b.partition for a, b in pairwise(stored))
            assert switches < 1_000 / 10

    run(scenario)


def test_publish_returns_partition_and_offset(broker: mansio.Broker) -> None:
    async def scenario() -> None:
        async with connected(broker, one=1) as client:
            first = await client.publish("one", "text", key="k")
            second = await client.publish("one", b"x", timestamp_ms=datetime(2024, 1, 2, tzinfo=UTC))
            assert (first.topic, first.partition, first.offset) == ("one", 0, 0)
            assert (second.offset, second.timestamp_ms) == (1, 1_704_153_600_000)

    run(scenario)


@pytest.mark.row("T3", "G4")
def test_reading_between_two_times_returns_exactly_that_range(broker: mansio.Broker) -> None:
    base = 1_600_000_000_000

    async def scenario() -> None:
        async with connected(broker, timed=2) as client:
            for partition in (0, 1):
                await client.publish_many(
                    "timed", [OutgoingRecord(b"%d" % n, None, (), partition, base + n) for n in range(100)]
                )
            start = datetime.fromtimestamp((base + 20) / 1000, UTC)
            found = await read_all(client, "timed", from_=start, to_time=base + 50, to_end=False)
            assert sorted(message.timestamp_ms - base for message in found) == sorted([*range(20, 50)] * 2)
            late = await read_all(client, "timed", from_=datetime.now(UTC))
            assert late == []

    run(scenario)


def test_reading_from_offset_latest_and_single_partitions(broker: mansio.Broker) -> None:
    async def scenario() -> None:
        async with connected(broker, places=2) as client:
            for partition in (0, 1):
                values = [OutgoingRecord(b"%d" % n, None, (), partition) for n in range(10)]
                await client.publish_many("places", values)
            chosen = TopicPartition("places", 1)
            found = [m async for m in client.consume(chosen, from_=7, max_records=3)]
            assert [(m.partition, m.offset) for m in found] == [(1, 7), (1, 8), (1, 9)]
            mapped = await read_all(client, "places", from_={chosen: 9})
            assert sorted((m.partition, m.offset) for m in mapped) == [*((0, n) for n in range(10)), (1, 9)]
            async with client.consume("places", from_="latest") as consumer:
                await client.publish("places", b"new", partition=0)
                assert (await anext(consumer)).value == b"new"
                await consumer.seek(chosen, 5)
                assert (await anext(consumer)).offset == 5
                consumer.pause(chosen)
                consumer.resume(chosen)
                assert consumer.assignment() == {chosen, TopicPartition("places", 0)}

    run(scenario)


def test_out_of_range_offset_follows_the_policy(broker: mansio.Broker) -> None:
    async def scenario() -> None:
        async with connected(broker, gone=1) as client:
            await client.publish_many("gone", [b"a", b"b"])
            first = [m async for m in client.consume("gone", from_=99, max_records=1)]
            assert first[0].offset == 0
            async with client.consume("gone", from_=99, on_out_of_range="latest") as consumer:
                assert await consumer.poll(300) == []
                await client.publish("gone", b"c")
                assert (await anext(consumer)).offset == 2
            with pytest.raises(OffsetOutOfRange, match="99"):
                await anext(client.consume("gone", from_=99, on_out_of_range="error"))

    run(scenario)


def test_invalid_arguments_are_refused_with_typed_errors(broker: mansio.Broker) -> None:
    async def scenario() -> None:
        async with connected(broker, small=1) as client:
            with pytest.raises(UnknownTopicOrPartition):
                await client.publish("nowhere", b"x")
            with pytest.raises(UnknownTopicOrPartition):
                await anext(client.consume("nowhere"))
            with pytest.raises(InvalidRequest):
                client.consume([])
            with pytest.raises(InvalidRequest, match="in the future"):
                await anext(client.consume("small", to_time=2**50))
            with pytest.raises(ValueError, match="time zone"):
                await anext(client.consume("small", from_=datetime(2024, 1, 1)))  # noqa: DTZ001  # the point
            await client.admin.alter_topic_config("small", {"max.message.bytes": "1000"})
            with pytest.raises(MessageTooLarge):
                await client.publish("small", bytes(2_000))
            assert (await client.publish("small", bytes(500))).offset == 0

    run(scenario)


def test_small_prefetch_limit_and_large_records_return_everything(broker: mansio.Broker) -> None:
    async def scenario() -> None:
        async with connected(broker, large=3) as client:
            given = [OutgoingRecord(bytes([number]) * 300_000, None, (), number % 3) for number in range(24)]
            await client.publish_many("large", given)
            consumer = client.consume("large", to_end=True, prefetch_bytes_max=100_000)
            found = [message async for message in consumer]
            assert sorted((m.value or b"")[0] for m in found) == list(range(24))

    run(scenario)


def test_client_works_on_uvloop_too(broker: mansio.Broker) -> None:
    uvloop = pytest.importorskip("uvloop")  # there is none on Windows

    async def scenario() -> None:
        async with connected(broker, uvloop=1) as client:
            await client.publish_many("uvloop", [b"a", b"b"])
            assert [message.value for message in await read_all(client, "uvloop")] == [b"a", b"b"]

    uvloop.run(asyncio.wait_for(scenario(), scaled(30)))


def test_added_partition_is_read(broker: mansio.Broker) -> None:
    async def scenario() -> None:
        async with (
            connected(broker, growing=1) as client,
            client.consume("growing", metadata_interval_ms=50) as c,
        ):
            await client.admin.create_partitions("growing", 2)
            await client.publish("growing", b"new", partition=1)
            message = await anext(c)
            assert (message.partition, message.value) == (1, b"new")

    run(scenario)


def test_cancelled_read_loses_nothing(broker: mansio.Broker) -> None:
    async def scenario() -> None:
        async with connected(broker, cancelled=1) as client, client.consume("cancelled", from_=0) as consumer:
            reading = asyncio.ensure_future(anext(consumer))
            await asyncio.sleep(0.05)
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            await client.publish_many("cancelled", [b"%d" % n for n in range(10)])
            found = [(await anext(consumer)).offset for _ in range(10)]
            assert found == list(range(10))

    run(scenario)


@pytest.mark.row("P3", "L5")
def test_broker_restart_loses_and_duplicates_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
        broker = broker_in(tmp_path / "data").start()
        try:
            async with connected(broker, lasting=2) as client:
                stored: list[int] = []

                async def publish() -> None:
                    for number in range(400):
                        await client.publish("lasting", b"%d" % number, key=b"%d" % (number % 7))
                        stored.append(number)

                reader = client.consume("lasting", max_records=400)
                publishing = asyncio.ensure_future(publish())
                reading = asyncio.ensure_future(_collect(reader))
                for halfway in (100, 250):
                    await until(lambda least=halfway: len(stored) >= least)
                    await asyncio.to_thread(broker.close)
                    await asyncio.to_thread(broker.start)
                await publishing
                found = await reading
                assert sorted(int(message.value or b"") for message in found) == list(range(400))
                again = await read_all(client, "lasting")
                assert sorted(int(message.value or b"") for message in again) == list(range(400))
        finally:
            broker.close()

    run(scenario)


async def _collect(consumer: Any) -> list[mansio.Message]:
    return [message async for message in consumer]


@pytest.mark.parametrize("as_topic", [True, False])
def test_deleted_topic_is_an_error_for_a_consumer_without_group(
    broker: mansio.Broker, as_topic: bool
) -> None:
    name = f"gone-{as_topic}"

    async def scenario() -> None:
        async with connected(broker, **{name: 1}) as client:
            await client.publish(name, b"last words")
            source = name if as_topic else TopicPartition(name, 0)
            consumer = client.consume(source, unknown_topic_ms_max=300, fetch_wait_ms_max=50)
            assert [message.value for message in await consumer.poll()] == [b"last words"]
            await client.admin.delete_topic(name)
            with pytest.raises(UnknownTopicOrPartition, match="there is no such topic"):
                await consumer.poll()

    run(scenario)
