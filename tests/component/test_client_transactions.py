"""Transactions of Mansio's client with a real broker: records and offsets are visible together or not at all."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

import mansio
from mansio.errors import InvalidRequest, InvalidTxnState, ProducerFenced
from support.client_fixtures import QUICK_MEMBER, broker_in, connected, run

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.row("P4")


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[mansio.Broker]:
    with broker_in(tmp_path_factory.mktemp("transactions")) as started:
        yield started


async def read(client: mansio.Client, topic: str, isolation: Any = "read_committed") -> list[str]:
    """The values of a topic, once no transaction is open in it."""
    async with client.consume(topic, isolation=isolation, to_end=True) as consumer:
        return [(message.value or b"").decode() async for message in consumer]


async def settled(client: mansio.Client, topic: str, count: int) -> list[str]:
    """The committed values, once there are so many: markers are written after the answer to a commit."""
    while len(found := await read(client, topic)) < count:  # noqa: ASYNC110 - nothing signals it
        await asyncio.sleep(0.02)
    return found


def test_ten_thousand_records_over_eight_partitions_are_committed_or_aborted_as_a_whole(
    broker: mansio.Broker,
) -> None:
    async def scenario() -> None:
        async with connected(broker, many=8) as client:
            values = [b"%d" % number for number in range(10_000)]
            with pytest.raises(ZeroDivisionError):  # noqa: PT012 - the end of the block raises
                async with client.transaction("many-1") as txn:
                    await txn.publish_many("many", values)
                    raise ZeroDivisionError
            assert await read(client, "many") == []
            async with client.transaction("many-1") as txn:
                await txn.publish_many("many", values)
                assert await read(client, "many") == []
            found = await settled(client, "many", len(values))
            assert Counter(found) == Counter(value.decode() for value in values)

    run(scenario)


def test_an_abort_while_the_producer_connects_keeps_the_records_out_of_the_next_transaction(
    broker: mansio.Broker,
) -> None:
    async def scenario() -> None:
        async with connected(broker, connecting=1) as client:
            for number in range(3):
                with pytest.raises(ZeroDivisionError):  # noqa: PT012 - the end of the block raises
                    async with client.transaction(f"connecting-{number}") as txn:
                        await txn.publish("connecting", "no")
                        raise ZeroDivisionError
                async with client.transaction(f"connecting-{number}") as txn:
                    await txn.publish("connecting", f"{number}")
            assert await settled(client, "connecting", 3) == ["0", "1", "2"]

    run(scenario)


def test_a_cancelled_block_leaves_nothing(broker: mansio.Broker) -> None:
    async def scenario() -> None:
        async with connected(broker, cancelled=1) as client:
            is_open = asyncio.Event()

            async def never_ends() -> None:
                async with client.transaction("cancelled-1") as txn:
                    await (await txn.publish("cancelled", "no"))
                    is_open.set()
                    await asyncio.Event().wait()

            task = asyncio.create_task(never_ends())
            await is_open.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            async with client.transaction("cancelled-1") as txn:
                await txn.publish("cancelled", "yes")
            assert await settled(client, "cancelled", 1) == ["yes"]

    run(scenario)


def test_a_second_client_with_the_id_takes_over_and_the_first_one_can_do_nothing(
    broker: mansio.Broker,
) -> None:
    async def scenario() -> None:
        async with connected(broker, fenced=1) as first, connected(broker) as second:
            with pytest.raises(ProducerFenced, match="another producer"):  # noqa: PT012 - the end of the block raises
                async with first.transaction("fenced-1") as txn:
                    await (await txn.publish("fenced", "of the first"))
                    async with second.transaction("fenced-1") as other:
                        await other.publish("fenced", "of the second")
            with pytest.raises(ProducerFenced):
                async with first.transaction("fenced-1") as txn:
                    await txn.publish("fenced", "of the first")
            assert await settled(second, "fenced", 1) == ["of the second"]

    run(scenario)


def test_what_a_transaction_cannot_have_is_refused_before_it_is_sent(broker: mansio.Broker) -> None:
    async def scenario() -> None:
        async with connected(broker, refused=1) as client:
            async with client.transaction("refused-1") as txn:
                with pytest.raises(InvalidRequest, match="delayed"):
                    await txn.publish("refused", "a", headers={"mansio-delay-ms": b"5"})
                with pytest.raises(InvalidRequest, match="deduplication"):
                    await txn.publish_many("refused", [mansio.OutgoingRecord(b"a", dedup_id="x")])
                with pytest.raises(InvalidTxnState, match="open transaction"):
                    async with client.transaction("refused-1"):
                        pass
                consumer = client.consume("refused", group="refused")
                with pytest.raises(InvalidRequest, match="auto_commit"):
                    await txn.send_offsets(consumer)
            with pytest.raises(InvalidTxnState):
                await txn.publish("refused", "late")
            assert await read(client, "refused", "read_uncommitted") == []

    run(scenario)


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_offsets_are_committed_with_the_records_or_not_at_all(broker: mansio.Broker, protocol: str) -> None:
    source, target, group = f"{protocol}-in", f"{protocol}-out", f"{protocol}-group"

    async def scenario() -> None:
        async with connected(broker, **{source: 1, target: 1}) as client:
            await client.publish_many(source, [b"a", b"b"])
            options: dict[str, Any] = {"group": group, "auto_commit": False, "group_protocol": protocol}
            async with client.consume(source, **options, **QUICK_MEMBER) as consumer:
                for is_commit in (False, True):
                    messages = await consumer.poll()
                    while len(messages) < 2:
                        messages += await consumer.poll()
                    try:
                        async with client.transaction(f"{group}-1") as txn:
                            await txn.publish_many(target, [message.value or b"" for message in messages])
                            await txn.send_offsets(consumer)
                            if not is_commit:
                                raise ZeroDivisionError
                    except ZeroDivisionError:
                        assert await client.admin.group_offsets(group) == {}
                        await consumer.seek_to_committed()
            assert await settled(client, target, 2) == ["a", "b"]
            while not (offsets := await client.admin.group_offsets(group)):  # noqa: ASYNC110 - nothing signals it
                await asyncio.sleep(0.02)
            assert [each.offset for each in offsets.values()] == [2]

    run(scenario)


def test_a_worker_that_starts_again_ends_the_transaction_of_the_one_that_died(broker: mansio.Broker) -> None:
    """It does not wait for the timeout of the transaction, which has offsets of its group."""

    async def echo(messages: list[mansio.Message]) -> list[bytes]:
        return [message.value or b"" for message in messages]

    async def scenario() -> None:
        options: dict[str, Any] = {"group": "left", "auto_commit": False, **QUICK_MEMBER}
        async with connected(broker, left=1, taken=1) as dead, connected(broker) as started:
            await dead.publish_many("left", [b"a", b"b"])
            with pytest.raises(ProducerFenced):  # noqa: PT012 - the end of the block raises
                async with dead.transaction("left-1", timeout_ms=600_000) as txn:
                    async with dead.consume("left", **options) as consumer:
                        await txn.publish_many("taken", await echo(await consumer.poll()))
                        await txn.send_offsets(consumer)
                    async with started.consume("left", to_end=True, **options) as consumer:
                        count = await started.process(consumer, echo, transactional_id="left-1", to="taken")
            assert count == 2
            assert await settled(started, "taken", 2) == ["a", "b"]

    run(scenario)


def test_messages_of_a_partition_that_is_being_revoked_at_an_abort_are_not_committed_later(
    broker: mansio.Broker,
) -> None:
    async def scenario() -> None:
        is_revoking, goes_on = asyncio.Event(), asyncio.Event()

        async def wait(_partitions: object) -> None:
            is_revoking.set()
            await goes_on.wait()

        options: dict[str, Any] = {"group": "moving", "auto_commit": False, **QUICK_MEMBER}
        async with connected(broker, moving=2, moved=1) as client, connected(broker) as other:
            for partition in range(2):
                await client.publish("moving", b"%d" % partition, partition=partition)
            async with client.consume(
                "moving", on_revoked=wait, revoke_timeout_ms=1, group_protocol="consumer", **options
            ) as consumer:
                while sum(consumer.positions().values()) < 2:
                    await consumer.poll()
                await consumer.poll(1)  # both are processed
                async with other.consume("moving", group_protocol="consumer", **options) as second:
                    poll = asyncio.create_task(second.poll())
                    await is_revoking.wait()
                    await consumer.seek_to_committed()  # as after a transaction that was aborted
                    async with client.transaction("moving-1") as txn:
                        await txn.publish("moved", b"x")
                        await txn.send_offsets(consumer)
                    while not (offsets := await client.admin.group_offsets("moving")):  # noqa: ASYNC110 - nothing signals it
                        await asyncio.sleep(0.02)
                    assert [each.offset for each in offsets.values()] == [0, 0]
                    goes_on.set()
                    (message,) = await poll
                    assert message.offset == 0

    run(scenario)


@pytest.mark.full
def test_workers_that_die_and_rebalance_process_each_message_once(broker: mansio.Broker) -> None:
    count = 600

    async def scenario() -> None:
        async with connected(broker, jobs=4, results=2) as client:
            for first in range(
                0, count, 10
            ):  # each call is a stored batch, which a transaction takes as a whole
                await client.publish_many("jobs", [b"%d" % number for number in range(first, first + 10)])

            async def work(name: str, fails_at: int) -> None:
                seen = 0

                async def handle(messages: list[mansio.Message]) -> list[bytes]:
                    nonlocal seen
                    seen += 1
                    await asyncio.sleep(0.005)
                    if seen == fails_at:
                        raise ZeroDivisionError
                    return [message.value or b"" for message in messages]

                async with (
                    connected(broker) as own,
                    own.consume("jobs", group="workers", auto_commit=False, **QUICK_MEMBER) as consumer,
                ):
                    await own.process(consumer, handle, transactional_id=name, to="results", records_max=10)

            workers = [asyncio.create_task(work(f"worker-{number}", 4 + number)) for number in range(3)]
            for worker in workers:
                with pytest.raises(ZeroDivisionError):
                    await worker
            last = asyncio.create_task(work("worker-0", 0))  # the id of one that has ended
            try:
                found = await settled(client, "results", count)
            finally:
                last.cancel()
                await asyncio.wait([last])
            assert Counter(found) == Counter(str(number) for number in range(count))

    run(scenario)


@pytest.mark.full
def test_a_broker_that_is_killed_before_the_commit_leaves_the_transaction_whole(tmp_path: Path) -> None:
    async def scenario() -> None:
        with broker_in(tmp_path / "data") as restarted:
            async with connected(restarted, killed=2) as client:
                committed: list[str] = []
                for number in range(6):
                    try:
                        async with client.transaction("killed-1") as txn:
                            for part in range(4):
                                await txn.publish("killed", f"{number}.{part}")
                            if number % 2:
                                await asyncio.to_thread(restarted.close)
                                await asyncio.to_thread(restarted.start)
                    except mansio.MansioError:
                        continue
                    committed += [f"{number}.{part}" for part in range(4)]
                found = await settled(client, "killed", len(committed))
                assert Counter(found) == Counter(committed)
                assert len(committed) >= 12

    run(scenario)


def test_the_blocking_client_commits_and_aborts_without_await(broker: mansio.Broker) -> None:
    with mansio.blocking.connect(broker.address) as client:
        client.admin.create_topic("blocking", partitions=1)
        client.admin.create_topic("doubled", partitions=1)
        with pytest.raises(ZeroDivisionError), client.transaction("blocking-1") as txn:  # noqa: PT012 - the end of the block raises
            txn.publish("blocking", "no")
            raise ZeroDivisionError
        with client.transaction("blocking-1") as txn:
            txn.publish_many("blocking", [b"1", b"2", b"3"])
        with client.consume("blocking", max_records=3) as consumer:
            assert [message.value for message in consumer] == [b"1", b"2", b"3"]
        with client.consume("blocking", group="blocking", auto_commit=False, to_end=True) as consumer:
            count = client.process(
                consumer,
                lambda messages: [2 * (message.value or b"") for message in messages],
                transactional_id="blocking-1",
                to="doubled",
            )
        assert count == 3
        with client.consume("doubled", max_records=3) as consumer:
            assert [message.value for message in consumer] == [b"11", b"22", b"33"]
