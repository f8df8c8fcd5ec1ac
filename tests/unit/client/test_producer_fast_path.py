"""Fast path for single records, without task and future: the same guarantees."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Any

import pytest

from mansio.client import OutgoingRecord, ProducerOptions
from mansio.client.producer.producer import Producer
from mansio.errors import ConnectionLost, InvalidRecord, MansioError, RequestTimedOut
from mansio.net.cluster import Cluster
from mansio.net.connection import ConnectionOptions
from mansio.ports import Backoff
from mansio.wire.api_versions import ApiKey
from mansio.wire.apis.produce import PartitionResult
from unit.client.model_log import ModelLog, serve_log
from unit.client.test_producer import producing, run, values
from unit.net.stub_broker import SAY_NOTHING, StubBroker

if TYPE_CHECKING:
    from collections.abc import Callable

FAST = Backoff(first_ms=1, longest_ms=10)


def produce_connection(producer: Producer) -> Any:
    connection = producer._cluster.existing_connection(1, "produce")
    assert connection is not None
    return connection


@pytest.mark.parametrize("seed", range(6))
def test_records_published_singly_are_stored_once_and_in_order_despite_losses(seed: int) -> None:
    chance = random.Random(seed)
    faults = [None, None, None, "lost before", "lost after", 6, 7]

    async def scenario() -> None:
        log = ModelLog(lambda number: chance.choice(faults) if number < 60 else None)
        async with producing(log) as (producer, _):
            stored = [await producer.publish("t", value) for value in values(60)]
            assert producer.buffered_bytes == 0
        assert log.values == values(60)
        assert [metadata.offset for metadata in stored] == list(range(60))

    run(scenario)


@pytest.mark.parametrize("seed", range(4))
def test_concurrent_publishers_lose_nothing_and_keep_their_order(seed: int) -> None:
    chance = random.Random(seed)
    faults = [None, None, None, None, "lost before", "lost after", 6]

    async def scenario() -> None:
        log = ModelLog(lambda number: chance.choice(faults) if number < 40 else None)

        async with producing(log) as (producer, _):

            async def publisher(name: bytes) -> None:
                for number in range(25):
                    await producer.publish("t", b"%s %d" % (name, number))
                    if chance.random() < 0.3:
                        await asyncio.sleep(0)

            await asyncio.gather(*(publisher(name) for name in (b"a", b"b", b"c", b"d")))
        assert len(log.values) == 100
        for name in (b"a", b"b", b"c", b"d"):
            own = [value for value in log.values if value and value.startswith(name)]
            assert own == [b"%s %d" % (name, number) for number in range(25)]

    run(scenario)


def test_record_after_a_single_one_is_sent_in_the_same_loop_iteration() -> None:
    async def scenario() -> None:
        async with producing(ModelLog()) as (producer, _):
            await producer.publish("t", b"first")
            publishing = producer.publish("t", b"second")
            publishing.send(None)  # as a task does, but the loop has no say here
            assert produce_connection(producer).in_flight == 1
            publishing.close()

    run(scenario)


def test_publishes_of_one_loop_iteration_share_a_request() -> None:
    async def scenario() -> None:
        log = ModelLog()
        async with producing(log) as (producer, _):
            await producer.publish("t", b"alone")
            before = log.batches
            for _ in range(5):
                await asyncio.gather(*(producer.publish("t", value) for value in values(100)))
            assert log.batches - before <= 1 + 5  # the first of all cannot know that others follow
        assert log.values[1:] == values(100) * 5

    run(scenario)


@pytest.mark.parametrize("acks", [1, 0])
def test_no_request_overtakes_one_that_waits_for_the_connection(acks: Any) -> None:
    """Without idempotence no broker would notice: the order is the producer's to keep."""

    async def scenario() -> None:
        log = ModelLog()
        async with StubBroker({"t": 1}) as broker:
            serve_log(broker, log)
            stored = broker.produce
            assert stored is not None
            broker.produce = lambda request: stored(request) if acks else (stored(request), SAY_NOTHING)[1]
            cluster = Cluster(broker.address, options=ConnectionOptions(), backoff=FAST)
            await cluster.topic("t")
            gate = asyncio.Event()

            async def late(request: Any) -> Any:
                await gate.wait()
                return broker.api_versions(request)

            broker.answers[ApiKey.API_VERSIONS] = late
            options = ProducerOptions(acks=acks, backoff=FAST, batch_bytes_max=100)
            async with Producer(cluster, options) as producer:
                deliveries = [await producer.send("t", value) for value in values(200)]
                asyncio.get_running_loop().call_later(0.01, gate.set)
                awaited = asyncio.ensure_future(producer.publish("t", b"last"))
                for delivery in deliveries:
                    await delivery
                await awaited
            while len(log.values) < 201:  # noqa: ASYNC110  # run() has the deadline
                await asyncio.sleep(0.001)
            await cluster.close()
        assert log.values == [*values(200), b"last"]

    run(scenario)


def test_cancelled_publish_keeps_its_record_in_flight_and_the_order() -> None:
    async def scenario() -> None:
        log = ModelLog()
        async with producing(log) as (producer, _):
            await producer.publish("t", b"a")
            task = asyncio.ensure_future(producer.publish("t", b"b"))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert (await producer.publish("t", b"c")).offset == 2
            assert producer.buffered_bytes == 0
            assert produce_connection(producer).in_flight == 0
        assert log.values == [b"a", b"b", b"c"]

    run(scenario)


@pytest.mark.parametrize("publish", ["one", "many"])
def test_unencodable_record_fails_alone_and_leaves_no_gap(publish: str) -> None:
    async def scenario() -> None:
        log = ModelLog()
        async with producing(log) as (producer, _):
            await producer.publish("t", b"a")
            publishing: Any = producer.publish("t", b"b", timestamp_ms=1 << 70)
            if publish == "many":
                publishing.close()
                publishing = producer.publish_many("t", [OutgoingRecord(b"b", timestamp_ms=1 << 70)])
            with pytest.raises(InvalidRecord, match="cannot be encoded"):
                await publishing
            assert (await producer.publish("t", b"c")).offset == 1
            assert producer.buffered_bytes == 0
        assert log.values == [b"a", b"c"]
        assert log.batches == 2  # no sequence number was skipped, so the broker refused none

    run(scenario)


@pytest.mark.parametrize(
    "answer",
    [
        lambda request: [],
        lambda request: [("t", bytes(15) + b"\x07", [PartitionResult(5)])],
        lambda request: [("t", bytes(15) + b"\x08", [PartitionResult(0)])],
    ],
    ids=["nothing", "another partition", "another topic"],
)
def test_response_without_a_result_is_no_acknowledgement(answer: Callable[[Any], Any]) -> None:
    async def scenario() -> None:
        async with producing(ModelLog(), delivery_timeout_ms=100) as (producer, broker):
            broker.produce = answer
            with pytest.raises(RequestTimedOut):
                await producer.publish("t", b"x")
            assert producer.buffered_bytes == 0

    run(scenario)


def test_responses_after_close_are_ignored() -> None:
    async def scenario() -> None:
        async with producing(ModelLog()) as (producer, broker):
            await producer.publish("t", b"a")
            answer, gate, arrived = broker.produce, asyncio.Event(), asyncio.Event()
            assert answer is not None

            async def late(request: Any) -> Any:
                arrived.set()
                await gate.wait()
                return answer(request)

            broker.produce = late
            task = asyncio.ensure_future(producer.publish("t", b"b"))
            await arrived.wait()
            connection = produce_connection(producer)
            await producer.close(flush=False)
            with pytest.raises(ConnectionLost, match="producer was closed"):
                await task
            gate.set()
            while connection.in_flight:  # noqa: ASYNC110  # run() has the deadline
                await asyncio.sleep(0.001)
            assert producer.buffered_bytes == 0
            assert not connection.closed

    run(scenario)


def test_broker_without_topic_ids_gets_names_and_old_versions() -> None:
    async def scenario() -> None:
        for newest in (3, 7, 8, 9, 12):
            log = ModelLog()
            async with producing(log) as (producer, broker):
                broker.offered[ApiKey.PRODUCE] = (3, newest)
                stored = [await producer.publish("t", value) for value in values(3)]
                assert [metadata.offset for metadata in stored] == [0, 1, 2]
                versions = {version for key, version, _ in broker.requests if key == ApiKey.PRODUCE}
                assert versions == {newest}
            assert log.values == values(3)

    run(scenario)


def test_every_record_completes_despite_repeated_disconnects() -> None:
    async def scenario() -> None:
        log = ModelLog()
        async with producing(log, delivery_timeout_ms=30_000) as (producer, broker):
            tasks = [asyncio.ensure_future(producer.publish("t", value)) for value in values(30)]
            for _ in range(15):
                await asyncio.sleep(0.002)
                broker.hang_up()
            outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert not [outcome for outcome in outcomes if isinstance(outcome, MansioError)]
        assert log.values == values(30)

    run(scenario)
