"""Client as member of share groups: leases are renewed, released and lost as documented, also when the share session
ends."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

import mansio
from mansio.client.share import ack_sender
from mansio.errors import DelayNotOffered, InvalidRecordState, LeaseLost
from mansio.net.connection import Connection
from support.client_fixtures import broker_in, connected, run, run_by_the_clock, until
from support.machine import scaled
from support.process import served
from support.receive_fixtures import (
    LOCK_MS,
    end_session,
    group_of,
    publish,
    release_behind_its_back,
    start_of,
    take_over_session,
    taken,
    values,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[mansio.Broker]:
    with broker_in(tmp_path_factory.mktemp("receive")) as started:
        yield started


@pytest.mark.row("D8")
def test_every_record_goes_to_one_of_two_members_and_none_comes_again(broker: mansio.Broker) -> None:
    async def scenario() -> None:
        async with connected(broker, shared=2) as client:
            group = await group_of(client, "two-members")
            async with (
                client.receive("shared", group=group, max_records=10) as one,
                client.receive("shared", group=group, max_records=10) as other,
            ):
                await asyncio.gather(one.start(), other.start())
                for number in range(60):
                    await publish(client, "shared", f"k:{number}", partition=number % 2)
                seen: dict[str, list[str]] = {"one": [], "other": []}

                async def work(receiver: mansio.client.Receiver, name: str) -> None:
                    async for message in receiver:
                        await message.ack()
                        seen[name] += values([message])
                        assert receiver.held_count <= 10

                workers = [
                    asyncio.ensure_future(work(one, "one")),
                    asyncio.ensure_future(work(other, "other")),
                ]
                await until(lambda: len(seen["one"]) + len(seen["other"]) >= 60)
                one.stop()
                other.stop()
                await asyncio.gather(*workers)
            assert sorted(seen["one"] + seen["other"]) == sorted(f"k:{number}" for number in range(60))
            assert seen["one"]
            assert seen["other"]
            async with client.receive("shared", group=group) as late:
                assert await late.poll(300) == []

    run(scenario)


@pytest.mark.row("D8")
def test_two_groups_have_each_record_for_themselves(broker: mansio.Broker) -> None:
    async def scenario() -> None:
        async with connected(broker, apart=1) as client:
            groups = [await group_of(client, "left"), await group_of(client, "right")]
            await publish(client, "apart", "a:1", "a:2")
            async with (
                client.receive("apart", group=groups[0]) as left,
                client.receive("apart", group=groups[1]) as right,
            ):
                of_left, of_right = await taken(left, 2), await taken(right, 2)
                await of_left[0].ack()
                await of_left[1].reject()
                await right.ack(of_right)
                assert values(of_left) == values(of_right) == ["a:1", "a:2"]
                assert [message.delivery_count for message in of_right] == [1, 1]

    run(scenario)


@pytest.mark.row("D3", "D8")
def test_a_record_given_back_comes_after_its_delay_and_holds_up_no_other(broker: mansio.Broker) -> None:
    async def scenario() -> None:
        async with connected(broker, later=1) as client:
            group = await group_of(client, "later")
            await publish(client, "later", "a:1", "a:2", "a:3")
            async with client.receive("later", group=group) as receiver:
                first, second, third = await taken(receiver, 3)
                await first.retry(after=3_600)
                loop = asyncio.get_running_loop()
                given_back = loop.time()
                await second.retry(after=0.3)
                await third.ack()
                await publish(client, "later", "a:4")
                came: dict[str, tuple[float, int]] = {}
                while len(came) < 2:
                    (message,) = await taken(receiver, 1)
                    came[message.value.decode()] = (loop.time() - given_back, message.delivery_count)
                    await message.ack()
                    with pytest.raises(InvalidRecordState, match="acknowledged already"):
                        await message.ack()
                assert came.keys() == {"a:2", "a:4"}
                after_s, count = came["a:2"]
                assert after_s >= 0.3
                assert count == 2

    run(scenario)


@pytest.mark.row("D4", "D8")
def test_what_is_rejected_is_in_the_dead_letter_topic_with_its_reason(broker: mansio.Broker) -> None:
    async def scenario() -> None:
        async with connected(broker, poison=1) as client:
            group = await group_of(client, "poisoned")
            await publish(client, "poison", "a:bad")
            async with client.receive("poison", group=group) as receiver:
                (message,) = await taken(receiver, 1)
                await message.reject("no such flight")
                await until(lambda: receiver.held_count == 0)
            async with client.consume("dlq.poison", max_records=1) as dead_letters:
                (letter,) = await dead_letters.poll()
            assert letter.value == b"a:bad"
            assert letter.header("mansio-dlq-reason") == b"no such flight"
            assert letter.header("mansio-dlq-consumer") == receiver.member_id.encode()

    run(scenario)


@pytest.mark.row("D1", "D8")
def test_a_lease_is_extended_for_a_slow_handler_until_that_has_lasted_too_long(broker: mansio.Broker) -> None:
    async def scenario(name: str) -> None:
        async with connected(broker, **{name: 1}) as client:
            group = await group_of(client, name, lock_ms=LOCK_MS, tries=10)
            await publish(client, name, "a:1")
            async with (
                # It has no room for more, or the record could be its own again.
                client.receive(name, group=group, max_records=1, extend_max_ms=1_200) as slow,
                client.receive(name, group=group) as other,
            ):
                (message,) = await taken(slow, 1)
                until_first = message.lease_until
                assert await other.poll(1.5 * LOCK_MS) == []
                assert message.lease_until > until_first
                assert not message.is_lost
                (again,) = await taken(other, 1)
                assert again.delivery_count > 1
                with pytest.raises(LeaseLost):
                    await message.ack()
                await again.extend()
                await again.ack()

    run_by_the_clock("slow", scenario)


@pytest.mark.row("D1", "D8")
def test_without_extension_a_lease_ends_and_its_record_is_not_acknowledged(broker: mansio.Broker) -> None:
    async def scenario(name: str) -> None:
        async with connected(broker, **{name: 1}) as client:
            group = await group_of(client, name, lock_ms=LOCK_MS)
            await publish(client, name, "a:1", "a:2")
            async with client.receive(name, group=group, auto_extend=False) as receiver:
                first, second = await taken(receiver, 2)
                await asyncio.sleep(0.6 * LOCK_MS / 1000)
                await second.extend()
                (again,) = await taken(receiver, 1)
                assert again == first
                with pytest.raises(LeaseLost):
                    await receiver.ack([first, second])
                assert second.is_acknowledged
                await again.ack()

    run_by_the_clock("short", scenario)


@pytest.mark.row("D1", "D8")
def test_leases_that_are_settled_while_others_are_extended_disturb_neither(broker: mansio.Broker) -> None:
    async def scenario(name: str) -> None:
        async with connected(broker, **{name: 1}) as client:
            group = await group_of(client, name, lock_ms=LOCK_MS)
            await client.publish_many(name, [b"%d" % number for number in range(120)])
            async with client.receive(name, group=group) as receiver:
                for message in await taken(receiver, 120):
                    await asyncio.sleep(0.012)
                    await message.ack()
                    assert message.delivery_count == 1
                assert receiver.held_count == 0
                assert await receiver.poll(200) == []

    run_by_the_clock("busy", scenario)


@pytest.mark.row("D2", "D8")
def test_one_lost_lease_among_many_does_not_take_the_others_along(broker: mansio.Broker) -> None:
    async def scenario() -> None:
        async with connected(broker, many=1) as client:
            group = await group_of(client, "many")
            await publish(client, "many", *[f"a:{number}" for number in range(20)])
            async with client.receive("many", group=group) as receiver:
                messages = await taken(receiver, 20)
                await release_behind_its_back(client, group, messages[7], receiver.member_id)
                with pytest.raises(LeaseLost):
                    await receiver.ack(messages)
                assert [message.offset for message in messages if not message.is_acknowledged] == [7]
                assert receiver.held_count == 0

    run(scenario)


@pytest.mark.row("D2", "D8")
def test_closing_gives_back_at_once_what_is_not_settled(broker: mansio.Broker) -> None:
    async def scenario() -> None:
        async with connected(broker, closing=1) as client:
            group = await group_of(client, "closing", lock_ms=60_000)
            await publish(client, "closing", "a:1", "a:2", "a:3")
            async with client.receive("closing", group=group) as leaving:
                first, second, _ = await taken(leaving, 3)
                acking = asyncio.ensure_future(first.ack())
                await asyncio.sleep(0)
            await acking
            assert second.is_lost
            with pytest.raises(LeaseLost):
                await second.ack()
            async with client.receive("closing", group=group) as staying:
                async with asyncio.timeout(50):  # less than the leases had left
                    rest = await taken(staying, 2)
                assert values(rest) == ["a:2", "a:3"]
                assert all(message.delivery_count > 1 for message in rest)

    run(scenario)


@pytest.mark.row("D8")
@pytest.mark.parametrize("break_it", [end_session, take_over_session])
def test_a_session_that_ends_is_opened_again_and_what_it_leased_is_not_acknowledged(
    broker: mansio.Broker, break_it: object
) -> None:
    name = getattr(break_it, "__name__", "")

    async def scenario() -> None:
        async with connected(broker, **{name: 1}) as client:
            group = await group_of(client, name)
            await publish(client, name, "a:1", "a:2")
            async with client.receive(name, group=group, max_records=2) as receiver:
                (first,) = await taken(receiver, 1)  # the second is fetched ahead
                await break_it(client, group, receiver.member_id)  # type: ignore[operator]
                await publish(client, name, "a:3")
                with pytest.raises(LeaseLost):
                    await first.ack()
                done: list[mansio.client.Leased] = []
                while len(done) < 3:
                    for message in await receiver.poll():
                        with suppress(LeaseLost):  # fetched ahead before
                            await message.ack()
                            done.append(message)
                assert sorted(values(done)) == ["a:1", "a:2", "a:3"]
                assert receiver.held_count == 0

    run(scenario)


@pytest.mark.row("D8")
def test_a_broker_without_our_own_requests_is_served_by_kafkas(
    broker: mansio.Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    negotiate = Connection._negotiate

    async def without_ours(self: Connection) -> None:
        await negotiate(self)
        self.versions = {key: value for key, value in self.versions.items() if key < 20_000}

    monkeypatch.setattr(Connection, "_negotiate", without_ours)

    async def scenario(name: str) -> None:
        async with connected(broker, **{name: 1}) as client:
            group = await group_of(client, name, lock_ms=LOCK_MS)
            await publish(client, name, *[f"a:{number}" for number in range(6)])
            async with client.receive(name, group=group) as receiver:
                first, second, third, *rest = await taken(receiver, 6)
                with pytest.raises(DelayNotOffered):
                    await first.retry(after=1)
                await asyncio.gather(first.retry(), second.ack(), third.extend(), receiver.ack(rest))
                await asyncio.sleep(1.5 * LOCK_MS / 1000)  # the third is extended by itself
                await third.ack()
                (again,) = await taken(receiver, 1)
                assert again == first
                await again.reject("unheard")
                assert receiver.held_count == 0

    run_by_the_clock("plain", scenario)


@pytest.mark.row("D5", "D8")
def test_leases_outlive_a_broker_that_is_killed_and_are_settled_when_it_is_back(tmp_path: Path) -> None:
    async def scenario() -> None:
        with served(tmp_path / "data") as server:
            async with mansio.connect(server.bootstrap_servers) as client:
                await client.admin.create_topic("killed", partitions=1)
                group = await group_of(client, "killed", lock_ms=30_000)
                await publish(client, "killed", *[f"a:{number}" for number in range(10)])
                async with client.receive("killed", group=group) as receiver:
                    (in_hand,) = await taken(receiver, 1)
                    server.kill()
                    acking = asyncio.ensure_future(in_hand.ack())
                    await asyncio.to_thread(server.start)
                    await acking
                    seen = [in_hand]
                    await publish(client, "killed", "a:10")
                    while len(seen) < 11:
                        for message in await receiver.poll():
                            await message.ack()
                            seen.append(message)
                    assert sorted(message.offset for message in seen) == list(range(11))
                    assert {message.delivery_count for message in seen} == {1}
                assert await start_of(client, group, "killed") == 11

    run(scenario)


@pytest.mark.row("D8")
def test_no_caller_waits_for_ever_for_a_broker_that_is_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ack_sender, "ACK_EXPIRY_S_MIN", 0.3)

    async def scenario() -> None:
        with broker_in(tmp_path) as going:
            async with connected(going, gone=1) as client:
                group = await group_of(client, "gone", lock_ms=LOCK_MS)
                await publish(client, "gone", "a:1", "a:2")
                receiver = client.receive("gone", group=group)
                first, second = await taken(receiver, 2)
                await asyncio.to_thread(going.close)
                async with asyncio.timeout(scaled(30)):
                    with pytest.raises(LeaseLost):
                        await first.ack()
                    await until(lambda: second.is_lost)
                    assert receiver.held_count == 0
                    await receiver.close()

    run(scenario)
