"""Guarantees of the producer, with a partition that checks sequence numbers as Kafka does."""

from __future__ import annotations

import asyncio
import random
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from mansio.client import OutgoingRecord, ProducerOptions
from mansio.client.producer.producer import Producer
from mansio.errors import (
    ConnectionLost,
    InvalidRecord,
    InvalidTopic,
    MansioError,
    MessageTooLarge,
    OutOfOrderSequence,
    QueueFull,
    RequestTimedOut,
    UnknownTopicOrPartition,
)
from mansio.net.cluster import Cluster
from mansio.net.connection import ConnectionOptions
from mansio.ports import Backoff
from mansio.wire.api_versions import ApiKey
from mansio.wire.apis.produce import PartitionResult
from support.machine import scaled
from unit.client.model_log import ModelLog, serve_log
from unit.net.stub_broker import StubBroker

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

FAST = Backoff(first_ms=1, longest_ms=10)


@asynccontextmanager
async def producing(
    log: ModelLog, *, partitions: int = 1, **settings: Any
) -> AsyncIterator[tuple[Producer, StubBroker]]:
    async with StubBroker({"t": partitions}) as broker:
        serve_log(broker, log)
        cluster = Cluster(broker.address, options=ConnectionOptions(), backoff=FAST, topic_wait_ms=50)
        async with Producer(cluster, ProducerOptions(backoff=FAST, **settings)) as producer:
            yield producer, broker
        await cluster.close()


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(scenario(), scaled(30))

    asyncio.run(bounded())


def values(count: int) -> list[bytes]:
    return [b"%05d" % number for number in range(count)]


@pytest.mark.parametrize("seed", range(8))
def test_every_record_is_stored_once_and_in_order_despite_lost_requests_and_responses(seed: int) -> None:
    chance = random.Random(seed)
    faults = [
        None,
        None,
        None,
        "lost before",
        "lost after",
        6,
        7,
    ]  # NOT_LEADER_OR_FOLLOWER, REQUEST_TIMED_OUT

    async def scenario() -> None:
        log = ModelLog(lambda number: chance.choice(faults) if number < 150 else None)
        async with producing(log, batch_bytes_max=200) as (producer, _):
            stored = await producer.publish_many("t", values(300))
        assert log.values == values(300)
        assert [metadata.offset for metadata in stored] == list(range(300))

    run(scenario)


def test_without_idempotence_a_lost_response_may_duplicate_records() -> None:
    """The other side of the promise above: shows that the model and the fault do what they say."""

    async def scenario() -> None:
        log = ModelLog(lambda number: "lost after" if number == 1 else None)
        async with producing(log, idempotent=False) as (producer, broker):
            await producer.publish("t", b"x")
            assert not broker.asked(ApiKey.INIT_PRODUCER_ID)
        assert log.values == [b"x", b"x"]

    run(scenario)


def test_records_after_an_expired_batch_are_stored_once() -> None:
    async def scenario() -> None:
        log = ModelLog(lambda number: 87 if number == 2 else None)  # INVALID_RECORD
        async with producing(log, batch_bytes_max=100, in_flight_batches_max=5) as (producer, _):
            deliveries = [await producer.send("t", value) for value in values(60)]
            await producer.flush()
        refused = [index for index, delivery in enumerate(deliveries) if _error(delivery)]
        assert 0 < len(refused) < 60
        assert log.values == [value for index, value in enumerate(values(60)) if index not in refused]
        assert {type(_error(deliveries[index])) for index in refused} == {InvalidRecord}

    run(scenario)


def test_unexplained_sequence_error_is_reported_and_later_records_are_stored() -> None:
    async def scenario() -> None:
        log = ModelLog(lambda number: 45 if number == 2 else None)
        async with producing(log) as (producer, _):
            await producer.publish("t", b"a")
            with pytest.raises(OutOfOrderSequence):
                await producer.publish("t", b"b")
            await producer.publish("t", b"c")
            await producer.publish("t", b"d")
        assert log.values == [b"a", b"c", b"d"]

    run(scenario)


class StoresWhatItRefuses(ModelLog):
    """Answers one batch with an error although it is in the log, as a broker whose sync failed does."""

    def __init__(self, number: int, code: int) -> None:
        super().__init__()
        self.number, self.code = number, code

    def append(self, batch: memoryview) -> tuple[PartitionResult, bool]:
        result = super().append(batch)
        return (PartitionResult(0, error_code=self.code), False) if self.batches == self.number else result


@pytest.mark.parametrize("code", [56, -1])  # KAFKA_STORAGE_ERROR, UNKNOWN_SERVER_ERROR
def test_record_after_a_failed_but_stored_one_is_not_deduplicated(code: int) -> None:
    """Were its sequence number given out again, the broker would acknowledge the next record and not store it."""

    async def scenario() -> None:
        log = StoresWhatItRefuses(2, code)
        async with producing(log) as (producer, _):
            await producer.publish("t", b"a")
            with pytest.raises(MansioError):
                await producer.publish("t", b"b")
            offsets = [(await producer.publish("t", value)).offset for value in (b"c", b"d")]
        assert log.values == [b"a", b"b", b"c", b"d"]
        assert offsets == [2, 3]

    run(scenario)


@pytest.mark.parametrize("code", [7, 20])  # REQUEST_TIMED_OUT, NOT_ENOUGH_REPLICAS_AFTER_APPEND
def test_record_after_an_expired_but_stored_one_is_not_deduplicated(code: int) -> None:
    async def scenario() -> None:
        log = StoresWhatItRefuses(2, code)
        async with producing(log, delivery_timeout_ms=0) as (producer, _):
            await producer.publish("t", b"a")
            with pytest.raises(MansioError):
                await producer.publish("t", b"b")
            assert (await producer.publish("t", b"c")).offset == 2
        assert log.values == [b"a", b"b", b"c"]

    run(scenario)


def test_sequence_gap_is_kept_when_an_earlier_batch_is_stored_late() -> None:
    """The first has to come again, the second is refused for good: the third and all later ones are stored."""

    async def scenario() -> None:
        log = ModelLog({1: 7, 2: 87}.get)
        async with producing(log, batch_bytes_max=30) as (producer, _):
            deliveries = [await producer.send("t", value) for value in values(3)]
            await producer.flush()
            assert [type(_error(delivery)) for delivery in deliveries] == [
                type(None),
                InvalidRecord,
                type(None),
            ]
            await producer.publish("t", b"after")
        assert log.values == [b"00000", b"00002", b"after"]

    run(scenario)


def test_producer_continues_after_the_broker_lost_its_sequence() -> None:
    """A log that was cut behind damage knows an older number: one record is refused with an error; not all for ever."""

    async def scenario() -> None:
        log = ModelLog()
        async with producing(log) as (producer, _):
            for value in (b"a", b"b", b"c"):
                await producer.publish("t", value)
            epoch, expected, recent = log._sequences[7]
            log._sequences[7] = epoch, expected - 2, recent[:1]
            with pytest.raises(OutOfOrderSequence):
                await producer.publish("t", b"d")
            await producer.publish("t", b"e")
            await producer.publish("t", b"f")
        assert log.values == [b"a", b"b", b"c", b"e", b"f"]

    run(scenario)


def test_exhausted_producer_epochs_request_a_new_producer_id() -> None:
    async def scenario() -> None:
        log = ModelLog({2: 45, 4: 45, 6: 45}.get)
        async with producing(log) as (producer, broker):
            ids = iter([(7, 32766), (8, 0)])

            def init(_: Any) -> dict[str, Any]:
                producer_id, epoch = next(ids)
                return {"error_code": 0, "producer_id": producer_id, "producer_epoch": epoch}

            broker.answers[ApiKey.INIT_PRODUCER_ID] = init
            for value in (b"a", b"c", b"e", b"g"):
                await producer.publish("t", value)
                if value != b"g":
                    with pytest.raises(OutOfOrderSequence):
                        await producer.publish("t", b"refused")
        assert log.values == [b"a", b"c", b"e", b"g"]
        assert {number: entry[0] for number, entry in log._sequences.items()} == {7: 32767, 8: 1}

    run(scenario)


def test_too_large_batch_is_split_until_it_is_accepted() -> None:
    async def scenario() -> None:
        log = ModelLog()
        log.batch_bytes_max = 300
        async with producing(log) as (producer, _):
            stored = await producer.publish_many("t", values(100))
            assert [metadata.offset for metadata in stored] == list(range(100))
            with pytest.raises(MessageTooLarge):
                await producer.publish("t", bytes(400))
            await producer.publish("t", b"last")
        assert log.values == [*values(100), b"last"]

    run(scenario)


def test_record_errors_are_raised_per_record() -> None:
    async def scenario() -> None:
        async with producing(ModelLog()) as (producer, broker):
            broker.produce = lambda request: [
                (name, topic_id, [PartitionResult(0, 87, record_errors=((1, "no key"),))])
                for name, topic_id, _ in request.topics
            ]
            sent = [await producer.send("t", value) for value in values(3)]
            await producer.flush()
            assert [str(_error(delivery)) for delivery in sent] == [
                "another record of the same batch was refused",
                "no key",
                "another record of the same batch was refused",
            ]

    run(scenario)


def test_delivery_timeout_fails_the_record_and_frees_buffer_space() -> None:
    async def scenario() -> None:
        async with producing(ModelLog(lambda number: 6), delivery_timeout_ms=200) as (producer, _):
            with pytest.raises(MansioError) as caught:
                await producer.publish("t", b"x")
            assert caught.value.retriable
            assert producer.buffered_bytes == 0

    run(scenario)


def test_unreachable_broker_fails_queued_records_after_the_delivery_timeout() -> None:
    async def scenario() -> None:
        async with producing(ModelLog(), delivery_timeout_ms=1_000) as (producer, broker):
            await producer.publish("t", b"first")
            broker._server.close()
            broker.hang_up()
            with pytest.raises((RequestTimedOut, ConnectionLost)):
                await producer.publish("t", b"second")

    run(scenario)


def test_full_buffer_raises_or_waits_as_configured() -> None:
    async def scenario() -> None:
        for when_full in ("raise", "wait"):
            settings: dict[str, Any] = {
                "buffer_bytes_max": 2_000,
                "batch_bytes_max": 1_000,
                "when_full": when_full,
            }
            async with producing(ModelLog(), **settings) as (producer, broker):
                answer, gate = broker.produce, asyncio.Event()

                async def late(request: Any, answer: Any = answer, gate: asyncio.Event = gate) -> Any:
                    await gate.wait()
                    return answer(request)

                broker.produce = late
                for _ in range(4):
                    await producer.send("t", bytes(400))
                if when_full == "raise":
                    with pytest.raises(QueueFull):
                        await producer.send("t", bytes(600))
                    gate.set()
                else:
                    fifth = asyncio.ensure_future(producer.send("t", bytes(600)))
                    await asyncio.sleep(0)
                    assert not fifth.done()
                    gate.set()
                    await (await fifth)
                assert producer.buffered_bytes <= 2_000

    run(scenario)


def test_cancelled_publish_does_not_affect_other_records_of_its_batch() -> None:
    async def scenario() -> None:
        log = ModelLog()
        async with producing(log, linger_ms=20) as (producer, _):
            await producer.publish("t", b"the topic is known now")
            tasks = [asyncio.ensure_future(producer.publish("t", value)) for value in values(3)]
            await asyncio.sleep(0)
            tasks[1].cancel()
            outcomes = await asyncio.gather(*tasks, return_exceptions=True)
            assert isinstance(outcomes[1], asyncio.CancelledError)
            assert [outcomes[0].offset, outcomes[2].offset] == [1, 3]  # type: ignore[union-attr]  # the test knows its own types

    run(scenario)


def test_concurrent_publishes_share_a_batch() -> None:
    async def scenario() -> None:
        log = ModelLog()
        async with producing(log) as (producer, _):
            await producer.publish("t", b"the topic is known now")
            await asyncio.gather(*(producer.publish("t", value) for value in values(500)))
        assert log.values[1:] == values(500)
        assert log.batches <= 3

    run(scenario)


@pytest.mark.parametrize("as_list", [True, False])
def test_mixed_records_keep_order_partitions_and_limits(as_list: bool) -> None:
    chance = random.Random(3)
    given: list[Any] = [
        chance.choice([value, value, value, value.decode(), OutgoingRecord(value, b"key")])
        for value in values(400)
    ]

    async def scenario() -> None:
        log = ModelLog()
        sizes = {"batch_bytes_max": 500, "buffer_bytes_max": 1_500}
        async with producing(log, **sizes) as (producer, _):
            publishing = asyncio.create_task(
                producer.publish_many("t", given if as_list else iter(given))  # a list is taken in runs
            )
            highest = 0
            while not publishing.done():
                highest = max(highest, producer.buffered_bytes)
                await asyncio.sleep(0)
            stored = await publishing
            assert producer.buffered_bytes == 0
        assert 1_000 < highest <= 1_500
        assert log.values == values(400)
        assert [metadata.offset for metadata in stored] == list(range(400))
        assert log.batches >= 400 * 29 / 500

    run(scenario)


def test_unknown_topic_and_partition_are_refused_before_anything_is_buffered() -> None:
    async def scenario() -> None:
        async with producing(ModelLog()) as (producer, _):
            with pytest.raises(UnknownTopicOrPartition):
                await producer.publish("missing", b"x")
            with pytest.raises(UnknownTopicOrPartition, match="no partition 9"):
                await producer.publish("t", b"x", partition=9)
            assert producer.buffered_bytes == 0

    run(scenario)


def test_acks_0_does_not_wait_for_a_response() -> None:
    async def scenario() -> None:
        async with producing(ModelLog(), acks=0) as (producer, broker):
            broker.produce = lambda request: "say nothing"
            stored = await producer.publish("t", b"x")
            assert stored.offset == -1

    run(scenario)


def test_close_without_flush_fails_queued_records_and_refuses_more() -> None:
    async def scenario() -> None:
        async with producing(ModelLog()) as (producer, broker):
            broker.produce = lambda request: "say nothing"
            delivery = await producer.send("t", b"x")
            await producer.close(flush=False)
            assert isinstance(_error(delivery), ConnectionLost)
            with pytest.raises(ConnectionLost):
                await producer.send("t", b"y")

    run(scenario)


def test_key_headers_text_null_and_timestamp_arrive_as_given() -> None:
    async def scenario() -> None:
        log = ModelLog()
        async with producing(log) as (producer, _):
            await producer.publish("t", "grüße", key="k", headers={"a": "b", "n": None}, timestamp_ms=5)
            await producer.publish("t", None, key=b"")
            await producer.publish_many("t", [OutgoingRecord(b"", b"k", (("h", b""),), 0, 9), "text", None])
        found = [(r.timestamp_ms, r.key, r.value, r.headers) for r in log.records]
        assert found[0] == (5, b"k", "grüße".encode(), (("a", b"b"), ("n", None)))
        assert found[1][1:3] == (b"", None)
        assert found[2] == (9, b"k", b"", (("h", b""),))
        assert [entry[2] for entry in found[3:]] == [b"text", None]

    run(scenario)


@pytest.mark.parametrize(
    "settings",
    [
        {"acks": 2},
        {"codec": "rar"},
        {"acks": 1, "idempotent": True},
        {"in_flight_batches_max": 6},
        {"batch_bytes_max": 1 << 30},
    ],
)
def test_contradictory_options_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"acks|codec|in_flight|batch"):
        ProducerOptions(**settings)


def _error(delivery: Any) -> MansioError | None:
    try:
        delivery.result()
    except MansioError as error:
        return error
    return None


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"value": 5}, "not int"),
        ({"value": b"x", "key": 5}, "not int"),
        ({"value": b"x", "headers": {"a": 1.5}}, "not float"),
        ({"value": b"x", "headers": [(b"a", b"1")]}, "header name must be text"),
        ({"value": b"x", "headers": 5}, "headers must be a mapping"),
        ({"value": b"x", "headers": "abc"}, "headers must be a mapping"),
    ],
)
def test_invalid_record_types_raise_typed_errors_without_side_effects(
    given: dict[str, Any], complaint: str
) -> None:
    async def scenario() -> None:
        log = ModelLog()
        async with producing(log) as (producer, _):
            with pytest.raises(InvalidRecord, match=complaint):
                await producer.publish("t", **given)
            with pytest.raises(InvalidRecord, match=complaint):
                await producer.publish_many("t", [OutgoingRecord(**given)])
            with pytest.raises(InvalidTopic, match="not int"):
                await producer.publish(5, b"x")  # type: ignore[arg-type]  # the mistake itself
            assert (await producer.publish("t", bytearray(b"good"))).offset == 0  # type: ignore[arg-type]  # taken too

    run(scenario)
