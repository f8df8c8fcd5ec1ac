"""Acknowledgements that a broker refuses or that cannot be sent: they are reported, retried with growing backoff, or
dropped; no call hangs."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import pytest

from mansio.broker.coordinator.share.partition_leader import SharePartitionLeader
from mansio.client.share import ack_sender, share_fetcher
from mansio.client.share.leased import RELEASE
from mansio.errors import ClientFailed, InvalidRequest, MansioError, NotLeaderOrFollower
from support.client_fixtures import broker_in, connected, run, until
from support.machine import scaled
from support.receive_fixtures import group_of, publish, running, taken

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import mansio


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[mansio.Broker]:
    with broker_in(tmp_path_factory.mktemp("receive-refused")) as started:
        yield started


def refuse_by(monkeypatch: pytest.MonkeyPatch, acknowledge: Callable[..., Any]) -> None:
    """Replace the function by which the broker acknowledges records, for requests of both protocols."""
    monkeypatch.setattr(SharePartitionLeader, "acknowledge", acknowledge)
    monkeypatch.setattr(SharePartitionLeader, "plan_exchange", lambda *_, **__: None)


@pytest.mark.row("D8")
def test_a_reason_with_half_a_character_is_reported_and_holds_up_nothing(broker: mansio.Broker) -> None:
    async def scenario() -> None:
        async with connected(broker, half=1) as client:
            group = await group_of(client, "half")
            await publish(client, "half", "a:1", "a:2")
            async with client.receive("half", group=group) as receiver, asyncio.timeout(scaled(20)):
                first, second = await taken(receiver, 2)
                await asyncio.gather(first.reject("no such file: \udcff"), second.ack())
                assert first.is_acknowledged
                assert second.is_acknowledged

    run(scenario)


@pytest.mark.row("D8")
def test_a_mistake_in_encoding_a_message_is_reported_and_the_next_is_sent(
    broker: mansio.Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with connected(broker, mistake=1) as client:
            group = await group_of(client, "mistake")
            await publish(client, "mistake", *[f"a:{number}" for number in range(6)])
            async with client.receive("mistake", group=group) as receiver, asyncio.timeout(scaled(20)):
                *wrong, right = await taken(receiver, 6)
                with monkeypatch.context() as planted:
                    planted.setattr(ack_sender, "merge_contiguous", lambda _: 1 // 0)
                    planted.setattr(share_fetcher, "merge_contiguous", lambda _: 1 // 0)
                    for message in wrong:  # more than may be under way at a time
                        with pytest.raises(ClientFailed):
                            await message.ack()
                await right.ack()

    run(scenario)


@pytest.mark.row("D8")
def test_who_is_refused_for_a_while_asks_less_and_less_often(
    broker: mansio.Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusals = 4
    asked: list[float] = []
    acknowledge = SharePartitionLeader.acknowledge

    def refusing(*given: Any) -> Any:
        asked.append(time.monotonic())
        if len(asked) <= refusals:
            raise NotLeaderOrFollower("not yet")
        return acknowledge(*given)

    async def scenario() -> None:
        async with connected(broker, moving=1) as client:
            group = await group_of(client, "moving")
            await publish(client, "moving", "a:1")
            async with client.receive("moving", group=group) as receiver:
                (message,) = await taken(receiver, 1)
                refuse_by(monkeypatch, refusing)
                await message.ack()

    run(scenario)
    assert len(asked) == refusals + 1
    shortest_s = sum(0.05 * 2**number for number in range(refusals)) * 0.8
    assert asked[-1] - asked[0] >= shortest_s


@pytest.mark.row("D8")
def test_what_could_not_be_given_back_unbegun_is_let_go_and_not_kept_for_ever(
    broker: mansio.Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    acknowledge = SharePartitionLeader.acknowledge

    def refusing(leader: Any, member: str, batches: Any) -> Any:
        if any(each.types == bytes([RELEASE]) and each.delay_ms < 0 for each in batches):
            raise InvalidRequest("planted")
        return acknowledge(leader, member, batches)

    async def scenario() -> None:
        async with connected(broker, kept=1) as client:
            group = await group_of(client, "kept", order="partition")
            await publish(client, "kept", "a:1", "a:2", "a:3")
            refuse_by(monkeypatch, refusing)
            begun: list[int] = []

            async def handle(message: mansio.client.Leased) -> None:
                begun.append(message.offset)
                await until(lambda: receiver.held_count == 3)
                await message.retry(after=600)

            receiver = client.receive("kept", group=group)
            async with running(receiver, handle, mode="fifo"), asyncio.timeout(scaled(10)):
                await until(lambda: bool(begun) and receiver.held_count == 0)
            assert begun == [0]

    run(scenario)


@pytest.mark.row("D8")
def test_a_run_ends_when_the_broker_refuses_whatever_the_handlers_return(
    broker: mansio.Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusing(*_: Any) -> Any:
        raise MansioError("planted")

    async def scenario() -> None:
        async with connected(broker, refused=1) as client:
            group = await group_of(client, "refused")
            await client.publish_many("refused", [b"%d" % number for number in range(100)])
            refuse_by(monkeypatch, refusing)

            async def handle(message: mansio.client.Leased) -> None:
                await message.ack()

            with pytest.raises(MansioError, match="planted"):
                await client.receive("refused", group=group).run(handle, concurrency=2)

    run(scenario)
