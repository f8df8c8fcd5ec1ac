"""Handlers of received records: records of finished handlers are acknowledged, others are delivered again, and the
promised order is kept."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

import mansio
from mansio.errors import InvalidConfig
from support.client_fixtures import broker_in, connected, run, until
from support.machine import scaled
from support.receive_fixtures import (
    group_of,
    publish,
    release_behind_its_back,
    running,
    start_of,
    taken,
    values,
)

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[mansio.Broker]:
    with broker_in(tmp_path_factory.mktemp("run")) as started:
        yield started


@pytest.mark.row("D8")
def test_in_parallel_a_failed_record_is_tried_again_and_holds_up_no_other(broker: mansio.Broker) -> None:
    async def scenario() -> None:
        async with connected(broker, parallel=1) as client:
            group = await group_of(client, "parallel")
            await publish(client, "parallel", *[f"a:{number}" for number in range(20)])
            tried: list[tuple[str, int]] = []
            done: list[str] = []
            at_work = at_most = 0

            async def handle(message: mansio.client.Leased) -> None:
                nonlocal at_work, at_most
                at_work += 1
                at_most = max(at_most, at_work)
                try:
                    (value,) = values([message])
                    tried.append((value, message.delivery_count))
                    await asyncio.sleep(0.005)
                    if value in ("a:3", "a:4") and message.delivery_count < 3:
                        raise RuntimeError("not yet")
                    done.append(value)
                finally:
                    at_work -= 1

            receiver = client.receive("parallel", group=group)
            async with running(receiver, handle, concurrency=4):
                await until(lambda: len(done) == 20)
            assert sorted(done) == sorted(f"a:{number}" for number in range(20))
            assert done.index("a:19") < done.index("a:3")
            assert [count for value, count in tried if value == "a:3"] == [1, 2, 3]
            assert at_most == 4
            assert await start_of(client, group, "parallel") == 20

    run(scenario)


@pytest.mark.row("D8")
def test_a_stop_lets_work_end_acknowledges_it_and_gives_back_the_rest_at_once(broker: mansio.Broker) -> None:
    async def scenario() -> None:
        async with connected(broker, stopping=1) as client:
            group = await group_of(client, "stopping", lock_ms=60_000, tries=2)
            await publish(client, "stopping", *[f"a:{number}" for number in range(8)])
            begun: list[str] = []
            ended: list[str] = []
            may_end = asyncio.Event()

            async def handle(message: mansio.client.Leased) -> None:
                begun.extend(values([message]))
                if message.offset == 2:
                    await asyncio.sleep(3_600)
                await may_end.wait()
                ended.extend(values([message]))

            receiver = client.receive("stopping", group=group)
            task = asyncio.ensure_future(receiver.run(handle, concurrency=3, drain_ms=scaled(1_500)))
            await until(lambda: len(begun) == 3)
            receiver.stop()
            await asyncio.sleep(0.05)
            assert not task.done()
            may_end.set()
            await task
            assert begun == ["a:0", "a:1", "a:2"]
            assert ended == ["a:0", "a:1"]
            assert receiver.is_closed
            async with client.receive("stopping", group=group) as other:
                async with asyncio.timeout(50):  # less than the leases had left
                    rest = await taken(other, 6)
                assert sorted(values(rest)) == [f"a:{number}" for number in range(2, 8)]
                # The group allows two tries: those that were taken back were none.
                for message in rest:
                    await message.retry(after=0)
                assert len(await taken(other, 6)) == 6

    run(scenario)


@pytest.mark.row("D8")
def test_fifo_passes_no_failed_record_and_rejects_it_after_the_last_try(broker: mansio.Broker) -> None:
    async def scenario() -> None:
        async with connected(broker, fifo=2) as client:
            group = await group_of(client, "fifo", tries=3, backoff_ms=30)
            for partition in (0, 1):
                await publish(client, "fifo", *[f"a:{number}" for number in range(6)], partition=partition)
            begun: dict[int, list[str]] = {0: [], 1: []}

            async def handle(message: mansio.client.Leased) -> None:
                begun[message.partition].extend(values([message]))
                if message.partition == 0 and message.offset == 2:
                    raise ValueError("poison")

            async with running(client.receive("fifo", group=group), handle, mode="fifo", concurrency=4):
                await until(lambda: len(begun[0]) == 8 and len(begun[1]) == 6)
            assert begun[1] == [f"a:{number}" for number in range(6)]
            assert begun[0] == ["a:0", "a:1", "a:2", "a:2", "a:2", "a:3", "a:4", "a:5"]
            settings = await client.admin.describe_config(group, kind="group")
            assert settings["mansio.share.order"].value == "partition"
            async with client.consume("dlq.fifo", max_records=1) as dead_letters:
                (letter,) = await dead_letters.poll()
            assert letter.header("mansio-dlq-reason") == b"ValueError: poison (3 attempts in this delivery)"

    run(scenario)


@pytest.mark.row("D8")
def test_an_order_is_not_promised_to_a_group_that_began_without_one(broker: mansio.Broker) -> None:
    async def scenario() -> None:
        async with connected(broker, used=1) as client:
            group = await group_of(client, "used")
            await publish(client, "used", "a:1")
            async with client.receive("used", group=group) as receiver:
                await taken(receiver, 1)
            with pytest.raises(InvalidConfig, match=r"mansio\.share\.order=none"):
                await client.receive("used", group=group).run(print, mode="fifo")
            await client.admin.alter_group_config(group, {"mansio.share.order": "partition"})
            begun: list[str] = []
            receiver = client.receive("used", group=group)
            async with running(receiver, lambda message: begun.extend(values([message])), mode="fifo"):
                await until(lambda: begun == ["a:1"])

    run(scenario)


@pytest.mark.row("D8")
def test_a_failing_key_blocks_itself_and_no_other(broker: mansio.Broker) -> None:
    async def scenario() -> None:
        async with connected(broker, keys=1) as client:
            group = await group_of(client, "keys", backoff_ms=30)
            await publish(client, "keys", "a:1", "b:1", "a:2", "b:2", "a:3", "b:3")
            done: list[str] = []
            heal = asyncio.Event()

            async def handle(message: mansio.client.Leased) -> None:
                (value,) = values([message])
                if value == "a:1" and not heal.is_set():
                    raise RuntimeError("not yet")
                done.append(value)
                if value == "b:3":
                    heal.set()

            receiver = client.receive("keys", group=group)
            async with running(receiver, handle, mode="by_key", concurrency=2):
                await until(lambda: len(done) == 6)
            assert done == ["b:1", "b:2", "b:3", "a:1", "a:2", "a:3"]

    run(scenario)


@pytest.mark.row("D8")
def test_a_record_that_went_to_another_member_is_not_passed_by_later_ones_of_its_key(
    broker: mansio.Broker,
) -> None:
    async def scenario() -> None:
        async with connected(broker, passing=1) as client:
            group = await group_of(client, "passing", order="partition")
            await publish(client, "passing", "a:1", "a:2", "b:1")
            begun: list[tuple[str, str]] = []
            taken_over: list[mansio.client.Leased] = []
            may_end = {"one": asyncio.Event(), "other": asyncio.Event()}

            def handler(name: str) -> Any:
                async def handle(message: mansio.client.Leased) -> None:
                    begun.extend((name, value) for value in values([message]))
                    taken_over.append(message)
                    await may_end[name].wait()

                return handle

            one = client.receive("passing", group=group, max_records=3)
            other = client.receive("passing", group=group)
            async with running(one, handler("one"), mode="by_key", concurrency=2):
                await until(lambda: len(begun) == 2)
                async with running(other, handler("other"), mode="by_key"):
                    await release_behind_its_back(client, group, taken_over[0], one.member_id, delay_ms=0)
                    await until(lambda: ("other", "a:1") in begun)
                    may_end["one"].set()
                    await until(lambda: one.held_count == 0)
                    assert begun == [("one", "a:1"), ("one", "b:1"), ("other", "a:1")]
                    may_end["other"].set()
                    await until(lambda: ("other", "a:2") in begun)

    run(scenario)


def test_what_makes_no_sense_is_refused(broker: mansio.Broker) -> None:
    async def scenario() -> None:
        async with connected(broker, nonsense=1) as client:

            def handle(message: mansio.client.Leased) -> Any:
                return message

            for options in ({"mode": "lifo"}, {"concurrency": 0}):
                with pytest.raises(mansio.MansioError):
                    await client.receive("nonsense", group="nonsense").run(handle, **options)
            with pytest.raises(mansio.MansioError):
                client.receive("nonsense", group="")
            with pytest.raises(mansio.MansioError):
                client.receive("nonsense", group="g", max_records=0)

    run(scenario)
