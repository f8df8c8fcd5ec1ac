"""`receive_next` accepts one record and leases the next with one request, and `prefetch=0` leases nothing else."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

import mansio
from mansio.client.share.leased import ReceiveOptions
from mansio.errors import InvalidRecordState, InvalidRequest, LeaseLost
from mansio.wire.api_versions import ApiKey
from mansio.wire.topic_partition import TopicPartition
from support.client_fixtures import broker_in, connected, run
from support.machine import scaled
from support.receive_fixtures import group_of, publish, release_behind_its_back, values

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[mansio.Broker]:
    with broker_in(tmp_path_factory.mktemp("receive-next")) as started:
        yield started


def requests_of(broker: mansio.Broker, *keys: ApiKey) -> int:
    started = broker._broker
    assert started is not None
    counted = started.server.counters.requests
    return sum(counted[int(key)] for key in keys)


async def leased_count(client: mansio.Client, group: str, topic: str) -> int:
    found = (await client.admin.shares.leases(group, [TopicPartition(topic, 0)])).values()
    return sum(each.leased for each in found if each is not None)


@pytest.mark.row("D1")
def test_one_request_accepts_a_record_and_leases_the_next(broker: mansio.Broker) -> None:
    async def scenario() -> None:
        async with connected(broker, next=1) as client:
            group = await group_of(client, "next")
            await publish(client, "next", *(f"k:{number}" for number in range(12)))
            async with client.receive("next", group=group, prefetch=0) as receiver:
                message = await receiver.receive_next()
                message = await receiver.receive_next(message)
                before = requests_of(
                    broker, ApiKey.SHARE_FETCH, ApiKey.SHARE_ACKNOWLEDGE, ApiKey.ACKNOWLEDGE_RECORDS
                )
                for number in range(2, 12):
                    done = message
                    message = await receiver.receive_next(done)
                    assert message is not None
                    assert values([message]) == [f"k:{number}"]
                    assert done is not None
                    assert done.is_acknowledged
                    assert receiver.held_count == 1
                after = requests_of(
                    broker, ApiKey.SHARE_FETCH, ApiKey.SHARE_ACKNOWLEDGE, ApiKey.ACKNOWLEDGE_RECORDS
                )
                assert after - before == 10
                assert await receiver.receive_next(message, timeout_ms=100) is None
                assert message is not None
                assert message.is_acknowledged
                with pytest.raises(InvalidRecordState):
                    await receiver.receive_next(message)

    run(scenario)


@pytest.mark.row("D1")
def test_without_prefetch_nothing_is_leased_that_the_application_has_not_asked_for(
    broker: mansio.Broker,
) -> None:
    async def scenario() -> None:
        async with connected(broker, unasked=1) as client:
            group = await group_of(client, "unasked")
            await publish(client, "unasked", *("k:v" for _ in range(40)))
            async with client.receive("unasked", group=group, prefetch=0) as receiver:
                for wanted in (1, 3):
                    held = [await receiver.receive_next() for _ in range(wanted)]
                    assert receiver.held_count == len(held)
                    assert await leased_count(client, group, "unasked") == len(held)
                    for each in held:
                        assert each is not None
                        await each.ack()
                async with client.receive("unasked", group=group) as other:  # the other member gets the rest
                    found: list[mansio.client.Leased] = []
                    while len(found) < 36:
                        found += await other.poll()
            assert len(found) == 36

    run(scenario)


@pytest.mark.row("D1")
def test_without_prefetch_a_handler_holds_no_more_records_than_it_handles(broker: mansio.Broker) -> None:
    async def scenario() -> None:
        async with connected(broker, handled=1) as client:
            group = await group_of(client, "handled")
            await publish(client, "handled", *("k:v" for _ in range(30)))
            async with client.receive("handled", group=group, prefetch=0) as receiver:
                most = handled = 0

                async def handle(message: mansio.client.Leased) -> None:
                    nonlocal most, handled
                    del message
                    most = max(most, receiver.held_count)
                    await asyncio.sleep(0)
                    handled += 1
                    if handled == 30:
                        receiver.stop()

                await receiver.run(handle, concurrency=3)
            assert handled == 30
            assert most <= 2 * 3, "those in work, and those that are being acknowledged"

    run(scenario)


@pytest.mark.row("D8")
def test_a_refused_acknowledgement_is_raised_and_the_next_record_comes_with_the_next_call(
    broker: mansio.Broker,
) -> None:
    async def scenario() -> None:
        async with connected(broker, refused=1) as client:
            group = await group_of(client, "refused")
            await publish(client, "refused", "k:0", "k:1")
            async with client.receive("refused", group=group, prefetch=0) as receiver:
                first = await receiver.receive_next()
                assert first is not None
                await release_behind_its_back(client, group, first, receiver.member_id, delay_ms=0)
                with pytest.raises(LeaseLost):
                    await receiver.receive_next(first)
                second = await receiver.receive_next()
                third = await receiver.receive_next(second)
                assert second is not None
                assert third is not None
                assert sorted(values([second, third])) == ["k:0", "k:1"]
                await third.ack()
                assert await leased_count(client, group, "refused") == 0

    run(scenario)


@pytest.mark.row("D1")
def test_callers_that_wait_at_the_same_time_get_a_record_each(broker: mansio.Broker) -> None:
    async def scenario() -> None:
        async with connected(broker, together=1) as client:
            group = await group_of(client, "together")
            async with client.receive("together", group=group, prefetch=0) as receiver:
                await receiver.start()
                cancelled = asyncio.ensure_future(receiver.receive_next())
                waiting = [asyncio.ensure_future(receiver.receive_next()) for _ in range(3)]
                await asyncio.sleep(0)
                cancelled.cancel()
                for number in range(3):
                    await publish(client, "together", f"k:{number}")
                found = [each for each in await asyncio.gather(*waiting) if each is not None]
                assert sorted(values(found)) == ["k:0", "k:1", "k:2"]
                await publish(client, "together", "k:3", "k:4", "k:5")
                following = await asyncio.gather(*(receiver.receive_next(each) for each in found))
                assert sorted(values([each for each in following if each is not None])) == [
                    "k:3",
                    "k:4",
                    "k:5",
                ]

    run(scenario)


@pytest.mark.row("D1")
def test_threads_that_wait_at_the_same_time_get_a_record_each(broker: mansio.Broker) -> None:
    with mansio.blocking.connect(broker.address) as client:
        client.admin.create_topic("threads", partitions=1)
        client.admin.alter_group_config("threads", {"share.auto.offset.reset": "earliest"})
        for number in range(40):
            client.publish("threads", f"{number}")
        with (
            client.receive("threads", group="threads", prefetch=0) as receiver,
            ThreadPoolExecutor(4) as pool,
        ):

            def work() -> list[bytes]:
                found = []
                message = receiver.receive_next()
                while message is not None:
                    found.append(message.value or b"")
                    message = receiver.receive_next(message, timeout_ms=500)
                return found

            taken = [pool.submit(work) for _ in range(4)]
            values_ = sorted(value for one in taken for value in one.result(scaled(60)))
    assert values_ == sorted(f"{number}".encode() for number in range(40))


@pytest.mark.row("D1")
def test_a_call_returns_in_its_time_though_the_acknowledgement_takes_longer(
    broker: mansio.Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with connected(broker, late=1) as client:
            group = await group_of(client, "late")
            await publish(client, "late", "k:0", "k:1")
            async with client.receive("late", group=group, prefetch=0) as receiver:
                first = await receiver.receive_next()
                assert first is not None
                held: list[Any] = []
                started = broker._broker
                assert started is not None
                persister = started.service.share_partition_manager.persister
                begin_write = persister.begin_write
                monkeypatch.setattr(persister, "begin_write", lambda *arguments: held.append(arguments))
                assert await receiver.receive_next(first, timeout_ms=50) is None
                assert not first.is_acknowledged
                monkeypatch.undo()

                def store() -> None:
                    for arguments in held:
                        begin_write(*arguments)

                started.server.loop.call_soon_threadsafe(store)
                second = await receiver.receive_next()
                assert second is not None
                assert values([second]) == ["k:1"]
                assert first.is_acknowledged

    run(scenario)


@pytest.mark.row("D8")
def test_a_lost_answer_leaves_the_acknowledgement_unknown_and_the_next_record_comes_again(
    broker: mansio.Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with connected(broker, lost=1) as client:
            group = await group_of(client, "lost")
            await publish(client, "lost", "k:0", "k:1")
            async with client.receive("lost", group=group, prefetch=0) as receiver:
                first = await receiver.receive_next()
                assert first is not None
                session = next(iter(receiver._fetcher._sessions.by_node.values()))
                connection = session.connection
                assert connection is not None
                # The broker answers, and the connection ends before the client has read the answer.
                monkeypatch.setattr(connection, "buffer_updated", lambda _: connection.abort())
                with pytest.raises(LeaseLost):
                    await receiver.receive_next(first)
                monkeypatch.undo()
                second = await receiver.receive_next()
                assert second is not None
                assert values([second]) == ["k:1"], "the acknowledgement was stored"
                assert second.delivery_count == 2

    run(scenario)


def test_prefetch_is_checked() -> None:
    for prefetch in (-1, 501):
        with pytest.raises(InvalidRequest, match="prefetch"):
            ReceiveOptions(group="g", prefetch=prefetch)
