"""An unexpected exception inside sender or fetcher reaches every waiting caller, and later calls work."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from mansio.client.consumer.fetcher import Fetcher, FetchOptions, FetchRequest, PartitionState
from mansio.client.leader_cache import LeaderCache
from mansio.client.producer.produce_request import RequestWriter
from mansio.client.producer.sender import Sender
from mansio.client.types import TopicPartition
from mansio.errors import ClientFailed, UnknownTopicOrPartition
from mansio.net.cluster import Cluster
from mansio.ports import Backoff
from mansio.wire.apis import fetch
from unit.client.model_log import ModelLog
from unit.client.test_producer import producing, run, values
from unit.net.stub_broker import StubBroker

if TYPE_CHECKING:
    from collections.abc import Callable

FAST = Backoff(first_ms=1, longest_ms=5)


def failing_once(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, on_call: int = 1
) -> Callable[[], bool]:
    """Plant an exception into one call of a method. Returns whether it was raised."""
    original = getattr(owner, name)
    calls = 0

    def planted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == on_call:
            raise ZeroDivisionError("planted")
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, planted)
    return lambda: calls >= on_call


PLACES = [
    (LeaderCache, "find"),
    (Sender, "_take_batch"),
    (Sender, "_start_request"),
    (RequestWriter, "existing_connection"),
    (RequestWriter, "send"),
    (Sender, "_handle_result"),
    (Sender, "_update_queue"),
    (Sender, "_connect_and_send"),
    (Sender, "_init_producer_id"),
]


@pytest.mark.parametrize(("owner", "name"), PLACES, ids=lambda place: str(getattr(place, "__name__", place)))
def test_unexpected_error_in_the_sender_fails_its_records_and_later_ones_are_stored(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str
) -> None:
    has_failed = failing_once(monkeypatch, owner, name)

    async def scenario() -> None:
        log = ModelLog()
        async with producing(log, batch_bytes_max=300) as (producer, _):
            deliveries = []
            failures: list[BaseException] = []
            for value in values(50):
                try:
                    deliveries.append(await producer.send("t", value, partition=0))
                except ClientFailed as error:  # before the record was accepted
                    failures.append(error)
            outcomes = await asyncio.gather(*deliveries, return_exceptions=True)
            assert has_failed()
            failures += [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
            assert failures
            assert {type(failure) for failure in failures} == {ClientFailed}
            assert "planted" in str(failures[0])
            assert producer.buffered_bytes == 0
            before = len(log.values)
            for value in (b"after 1", b"after 2"):
                await producer.publish("t", value, partition=0)
            assert [value for value in log.values if value and value.startswith(b"after")] == [
                b"after 1",
                b"after 2",
            ]
            assert len(log.values) >= before + 2
            await producer.flush()

    run(scenario)


def test_unexpected_error_in_a_topic_look_up_fails_all_waiters(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with producing(ModelLog()) as (producer, _):
            failing_once(monkeypatch, Cluster, "topic")
            tasks = [asyncio.ensure_future(producer.publish("t", value)) for value in values(3)]
            outcomes = await asyncio.gather(*tasks, return_exceptions=True)
            assert [type(outcome) for outcome in outcomes] == [ClientFailed] * 3
            assert (await producer.publish("t", b"after")).offset == 0

    run(scenario)


def reading(broker: StubBroker, **options: Any) -> tuple[Cluster, Fetcher]:
    cluster = Cluster(broker.address, backoff=FAST, topic_wait_ms=10)
    fetcher = Fetcher(cluster, FetchOptions(backoff=FAST, **options))
    fetcher.add([PartitionState(TopicPartition("t", 0), 0)])
    return cluster, fetcher


async def failure_of(fetcher: Fetcher) -> Exception:
    while True:
        try:
            fetcher.pop()
        except Exception as error:  # noqa: BLE001  # whatever it was: the test looks at it
            return error
        await fetcher.wait_for_change()


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (Fetcher, "_select_requests"),
        (Fetcher, "_start_request"),
        (FetchRequest, "encode"),
        (FetchRequest, "read"),
        (Fetcher, "_handle_result"),
        (Fetcher, "_is_fully_fetched"),
    ],
)
def test_unexpected_error_in_the_fetcher_is_raised_and_fetching_continues(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str
) -> None:
    failing_once(monkeypatch, owner, name)

    async def scenario() -> None:
        async with StubBroker({"t": 1}) as broker:
            asked = asyncio.Event()

            def answer(request: Any) -> Any:
                asked.set()
                topics = [(name, topic_id) for name, topic_id, *_ in request.topics]
                return [
                    (name, topic_id, [fetch.FetchedPartition(0, records=[])]) for name, topic_id in topics
                ]

            broker.fetch = answer
            cluster, fetcher = reading(broker)
            failure = await failure_of(fetcher)
            assert isinstance(failure, ClientFailed)
            asked.clear()
            await asked.wait()
            await fetcher.close()
            await cluster.close()

    run(scenario)


def test_unknown_partition_is_an_error_after_its_timeout_and_not_before() -> None:
    async def scenario() -> None:
        async with StubBroker({}) as broker:
            cluster, fetcher = reading(broker, unknown_topic_ms_max=200)
            began = asyncio.get_running_loop().time()
            assert isinstance(await failure_of(fetcher), UnknownTopicOrPartition)
            assert asyncio.get_running_loop().time() - began >= 0.2
            assert len(broker.asked(3)) >= 3  # metadata, each time anew
            await fetcher.close()
            await cluster.close()

    run(scenario)


def test_unknown_partition_of_a_group_never_times_out() -> None:
    async def scenario() -> None:
        async with StubBroker({}) as broker:
            cluster, fetcher = reading(broker, unknown_topic_ms_max=None)
            while len(broker.asked(3)) < 20:  # noqa: ASYNC110  # run() has the deadline
                await asyncio.sleep(0.001)
            assert fetcher.pop() is None
            await fetcher.close()
            await cluster.close()

    run(scenario)


def test_producer_closes_in_time_after_an_unexpected_error(monkeypatch: pytest.MonkeyPatch) -> None:
    failing_once(monkeypatch, Sender, "_complete")

    async def scenario() -> None:
        async with producing(ModelLog()) as (producer, _):
            delivery = await producer.send("t", b"a")
            with pytest.raises(ClientFailed, match="planted"):
                await delivery

    run(scenario)
