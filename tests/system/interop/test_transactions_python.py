"""Transactions as kafka-python and aiokafka use them: both with transaction version 1, aiokafka with the oldest
versions of the requests, which name a group without its generation (before KIP-447)."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING, Any

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka import TopicPartition as AiokafkaPartition
from aiokafka.errors import ProducerFenced
from kafka import KafkaConsumer, KafkaProducer
from kafka import TopicPartition as KafkaPythonPartition
from kafka.errors import KafkaError
from kafka.structs import OffsetAndMetadata

from support.machine import scaled
from support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

PARTITIONS = 2
CALL_S = 30


def python_consumer(servers: str, **settings: Any) -> KafkaConsumer:
    return KafkaConsumer(
        bootstrap_servers=servers,
        auto_offset_reset="earliest",
        enable_auto_commit=False,
        fetch_max_wait_ms=50,
        **settings,
    )


def python_read(servers: str, topic: str, isolation: str = "read_committed") -> list[str]:
    """All values of a topic up to where a consumer of this isolation level reads."""
    with contextlib.closing(python_consumer(servers, isolation_level=isolation)) as consumer:
        partitions = [KafkaPythonPartition(topic, index) for index in range(PARTITIONS)]
        consumer.assign(partitions)
        ends = consumer.end_offsets(partitions)
        found: list[str] = []
        end = time.monotonic() + scaled(CALL_S)
        while any(consumer.position(each) < ends[each] for each in partitions):
            assert time.monotonic() < end, "no end of the partitions"
            for records in consumer.poll(200).values():
                found += [each.value.decode() for each in records]
        return sorted(found)


def check_python_reads(servers: str, topic: str, values: list[str]) -> None:
    """Check what readers see when the markers are written, which may be after the answer to the producer."""
    wait_until(lambda: len(python_read(servers, topic)) >= len(values), CALL_S)
    assert python_read(servers, topic) == values


@contextlib.contextmanager
def python_producer(servers: str, transactional_id: str, **settings: Any) -> Iterator[KafkaProducer]:
    one = KafkaProducer(
        bootstrap_servers=servers, transactional_id=transactional_id, max_block_ms=CALL_S * 1000, **settings
    )
    try:
        one.init_transactions()
        yield one
    finally:
        one.close(timeout=1)


def python_send(one: KafkaProducer, topic: str, *values: str) -> None:
    for position, value in enumerate(values):
        one.send(topic, value.encode(), partition=position % PARTITIONS)
    one.flush(scaled(CALL_S))


@pytest.mark.full
@pytest.mark.row("P4")
def test_kafka_python_reads_what_is_committed_and_nothing_that_is_aborted(
    bootstrap_servers: str, make_topic: Callable[..., str]
) -> None:
    topic = make_topic(PARTITIONS)
    with python_producer(bootstrap_servers, topic) as one:
        one.begin_transaction()
        python_send(one, topic, "a", "b", "c")
        assert python_read(bootstrap_servers, topic) == []
        assert python_read(bootstrap_servers, topic, "read_uncommitted") == ["a", "b", "c"]
        one.commit_transaction()
        one.begin_transaction()
        python_send(one, topic, "x", "y")
        one.abort_transaction()
        one.begin_transaction()
        python_send(one, topic, "d")
        one.commit_transaction()
    check_python_reads(bootstrap_servers, topic, ["a", "b", "c", "d"])


@pytest.mark.row("P4")
def test_kafka_python_is_fenced_by_a_second_producer(
    bootstrap_servers: str, make_topic: Callable[..., str]
) -> None:
    topic = make_topic(PARTITIONS)
    with python_producer(bootstrap_servers, topic) as zombie:
        zombie.begin_transaction()
        python_send(zombie, topic, "zombie")
        with python_producer(bootstrap_servers, topic) as successor:
            with pytest.raises(KafkaError):
                zombie.commit_transaction()
            successor.begin_transaction()
            python_send(successor, topic, "successor")
            successor.commit_transaction()
    check_python_reads(bootstrap_servers, topic, ["successor"])


@pytest.mark.row("P4")
def test_kafka_python_commits_offsets_with_the_records_and_drops_them_with_an_abort(
    bootstrap_servers: str, make_topic: Callable[..., str]
) -> None:
    source, target = make_topic(PARTITIONS), make_topic(PARTITIONS)
    group = f"{source}-group"
    partitions = [KafkaPythonPartition(source, index) for index in range(PARTITIONS)]
    with (
        python_producer(bootstrap_servers, group) as one,
        contextlib.closing(python_consumer(bootstrap_servers, group_id=group)) as consumer,
    ):
        one.begin_transaction()
        python_send(one, source, *"abcd")
        one.commit_transaction()
        consumer.subscribe([source])
        values: list[str] = []
        end = time.monotonic() + scaled(
            3 * CALL_S
        )  # a member that was too slow joins again after its session
        while len(values) < 4:
            assert time.monotonic() < end
            for records in consumer.poll(200).values():
                values += [each.value.decode() for each in records]

        def committed() -> list[int | None]:
            return [consumer.committed(each) for each in partitions]

        def move(ending: Callable[[], None]) -> None:
            one.begin_transaction()
            python_send(one, target, *values)
            offsets = {each: OffsetAndMetadata(consumer.position(each), "", -1) for each in partitions}
            one.send_offsets_to_transaction(offsets, consumer.group_metadata())
            ending()

        move(one.abort_transaction)
        assert committed() == [None, None]
        assert python_read(bootstrap_servers, target) == []
        move(one.commit_transaction)
        # This client does not ask for stable offsets: it may see those from before the transaction for a moment.
        wait_until(lambda: all(offset is not None and offset >= 2 for offset in committed()), CALL_S)
        check_python_reads(bootstrap_servers, target, [*"abcd"])


@contextlib.asynccontextmanager
async def aio_producer(
    servers: str, transactional_id: str, **settings: Any
) -> AsyncIterator[AIOKafkaProducer]:
    one = AIOKafkaProducer(bootstrap_servers=servers, transactional_id=transactional_id, **settings)
    await one.start()
    try:
        yield one
    finally:
        await one.stop()


async def aio_send(one: AIOKafkaProducer, topic: str, *values: str) -> None:
    for position, value in enumerate(values):
        await one.send(topic, value.encode(), partition=position % PARTITIONS)
    await one.flush()


async def aio_read(servers: str, topic: str, isolation: str = "read_committed") -> list[str]:
    """All values of a topic up to where a consumer of this isolation level reads."""
    consumer = AIOKafkaConsumer(
        bootstrap_servers=servers,
        isolation_level=isolation,
        auto_offset_reset="earliest",
        fetch_max_wait_ms=50,
    )
    await consumer.start()
    try:
        partitions = [AiokafkaPartition(topic, index) for index in range(PARTITIONS)]
        consumer.assign(partitions)
        ends = await consumer.end_offsets(partitions)
        found: list[str] = []
        while any([await consumer.position(each) < ends[each] for each in partitions]):
            for records in (await consumer.getmany(timeout_ms=200)).values():
                found += [(each.value or b"").decode() for each in records]
        return sorted(found)
    finally:
        await consumer.stop()


async def check_aio_reads(servers: str, topic: str, values: list[str]) -> None:
    """Check what readers see when the markers are written, which may be after the answer to the producer."""
    while len(found := await aio_read(servers, topic)) < len(values):
        pass
    assert found == values


def run(coroutine: Any) -> None:
    asyncio.run(asyncio.wait_for(coroutine, scaled(CALL_S)))


@pytest.mark.row("P4")
def test_aiokafka_reads_what_is_committed_and_nothing_that_is_aborted(
    bootstrap_servers: str, make_topic: Callable[..., str]
) -> None:
    topic = make_topic(PARTITIONS)

    async def transactions() -> None:
        async with aio_producer(bootstrap_servers, topic) as one:
            async with one.transaction():
                await aio_send(one, topic, "a", "b", "c")
                assert await aio_read(bootstrap_servers, topic) == []
                assert await aio_read(bootstrap_servers, topic, "read_uncommitted") == ["a", "b", "c"]
            await one.begin_transaction()
            await aio_send(one, topic, "x", "y")
            await one.abort_transaction()
            async with one.transaction():
                await aio_send(one, topic, "d")
        await check_aio_reads(bootstrap_servers, topic, ["a", "b", "c", "d"])

    run(transactions())


@pytest.mark.row("P4")
def test_aiokafka_is_fenced_by_a_second_producer(
    bootstrap_servers: str, make_topic: Callable[..., str]
) -> None:
    topic = make_topic(PARTITIONS)

    async def transactions() -> None:
        async with aio_producer(bootstrap_servers, topic) as zombie:
            await zombie.begin_transaction()
            await aio_send(zombie, topic, "zombie")
            async with aio_producer(bootstrap_servers, topic) as successor:
                with pytest.raises(ProducerFenced):
                    await zombie.commit_transaction()
                async with successor.transaction():
                    await aio_send(successor, topic, "successor")
        await check_aio_reads(bootstrap_servers, topic, ["successor"])

    run(transactions())


@pytest.mark.row("P4")
def test_aiokafka_commits_offsets_with_the_records_and_drops_them_with_an_abort(
    bootstrap_servers: str, make_topic: Callable[..., str]
) -> None:
    source, target = make_topic(PARTITIONS), make_topic(PARTITIONS)
    group = f"{source}-group"
    partitions = [AiokafkaPartition(source, index) for index in range(PARTITIONS)]

    async def committed() -> list[int | None]:
        reader = AIOKafkaConsumer(
            bootstrap_servers=bootstrap_servers, group_id=group, enable_auto_commit=False
        )
        await reader.start()
        try:
            reader.assign(partitions)
            return [await reader.committed(each) for each in partitions]
        finally:
            await reader.stop()

    async def transactions() -> None:
        async with aio_producer(bootstrap_servers, group) as one:
            await one.begin_transaction()
            await aio_send(one, target, *"abcd")
            await one.send_offsets_to_transaction(dict.fromkeys(partitions, 2), group)
            await one.abort_transaction()
            assert await committed() == [None, None]
            async with one.transaction():
                await aio_send(one, target, *"abcd")
                await one.send_offsets_to_transaction(dict.fromkeys(partitions, 2), group)
            async with asyncio.timeout(scaled(CALL_S)):  # it does not ask for stable offsets
                while await committed() != [2, 2]:
                    pass
        await check_aio_reads(bootstrap_servers, target, [*"abcd"])

    run(transactions())
