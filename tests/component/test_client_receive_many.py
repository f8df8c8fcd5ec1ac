"""Receiving many records: acknowledgements are sent together, and none is lost or sent for another record."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import pytest

from mansio.client.share import ack_sender, share_fetcher
from mansio.client.share.ack_sender import PendingAck, merge_contiguous
from mansio.errors import InvalidRequest
from support.client_fixtures import broker_in, connected, run, until
from support.receive_fixtures import group_of, publish, release_behind_its_back, running, start_of, taken

if TYPE_CHECKING:
    from collections.abc import Iterator

    import mansio


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[mansio.Broker]:
    with broker_in(tmp_path_factory.mktemp("receive-many")) as started:
        yield started


@pytest.fixture
def acknowledged_ranges(monkeypatch: pytest.MonkeyPatch) -> list[list[tuple[int, int]]]:
    """The ranges that requests named, each in one partition: requests of its own, or fetches that took them along."""
    requests: list[list[tuple[int, int]]] = []

    def noted(waiting: list[PendingAck]) -> list[list[PendingAck]]:
        runs = merge_contiguous(waiting)
        if runs:
            requests.append([(run[0].first_offset, run[-1].last_offset) for run in runs])
        return runs

    monkeypatch.setattr(ack_sender, "merge_contiguous", noted)
    monkeypatch.setattr(share_fetcher, "merge_contiguous", noted)
    return requests


@pytest.mark.row("D8")
def test_many_are_acknowledged_by_one_range_in_one_request(
    broker: mansio.Broker, acknowledged_ranges: list[list[tuple[int, int]]]
) -> None:
    async def scenario() -> None:
        async with connected(broker, range=1) as client:
            group = await group_of(client, "range")
            await client.publish_many("range", [b"%d" % number for number in range(100)])
            async with client.receive("range", group=group) as receiver:
                with pytest.raises(InvalidRequest, match="at least 1"):
                    await receiver.poll(max_records=0)
                messages = await taken(receiver, 100)
                left = messages.pop(60)
                await receiver.ack(messages)
                assert acknowledged_ranges == [[(0, 59), (61, 99)]]
                assert receiver.held_count == 1
                await left.ack()
            assert await start_of(client, group, "range") == 100

    run(scenario)


@pytest.mark.row("D8")
def test_what_several_tasks_say_in_one_turn_of_the_loop_goes_together(
    broker: mansio.Broker, acknowledged_ranges: list[list[tuple[int, int]]]
) -> None:
    async def scenario() -> None:
        async with connected(broker, turn=1) as client:
            group = await group_of(client, "turn")
            await publish(client, "turn", *[f"a:{number}" for number in range(5)])
            async with client.receive("turn", group=group) as receiver:
                messages = await taken(receiver, 5)
                await asyncio.gather(*(message.ack() for message in messages))
                assert acknowledged_ranges == [[(0, 4)]]

    run(scenario)


@pytest.mark.row("D8")
def test_of_many_that_were_handled_only_the_one_with_a_lost_lease_is_not_acknowledged(
    broker: mansio.Broker, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "mansio.client")

    async def scenario() -> None:
        async with connected(broker, handled=1) as client:
            group = await group_of(client, "handled")
            await publish(client, "handled", *[f"a:{number}" for number in range(20)])
            begun: list[mansio.client.Leased] = []
            may_end = asyncio.Event()

            async def handle(message: mansio.client.Leased) -> None:
                begun.append(message)
                await may_end.wait()

            receiver = client.receive("handled", group=group)
            async with running(receiver, handle, concurrency=20):
                await until(lambda: len(begun) == 20)
                await release_behind_its_back(client, group, begun[7], receiver.member_id)
                may_end.set()
                await until(lambda: receiver.held_count == 0)
                assert [message.offset for message in begun if not message.is_acknowledged] == [7]
                assert [message.offset for message in begun if message.is_lost] == [7]
            assert await start_of(client, group, "handled") == 7

    run(scenario)
    assert [
        record.getMessage() for record in caplog.records if "not acknowledged" in record.getMessage()
    ] == [
        "handled, but not acknowledged: offset 7 of handled-0 is not leased by this member any more: "
        "offset 7 is not leased by this member"
    ]


@pytest.mark.row("D8")
def test_handlers_that_never_wait_keep_no_task_from_the_loop_and_what_they_did_is_acknowledged(
    broker: mansio.Broker,
) -> None:
    async def scenario() -> None:
        async with connected(broker, busy=1) as client:
            group = await group_of(client, "busy")
            await client.publish_many("busy", [b"%d" % number for number in range(60)])
            turns = 0
            turns_at: list[int] = []

            async def turning() -> None:
                nonlocal turns
                while True:
                    turns += 1
                    await asyncio.sleep(0)

            def handle(message: mansio.client.Leased) -> None:
                turns_at.append(turns)
                time.sleep(0.001)
                if message.offset == 59:
                    receiver.stop()

            beside = asyncio.ensure_future(turning())
            receiver = client.receive("busy", group=group)
            await receiver.run(handle, concurrency=2)
            beside.cancel()
            assert len(set(turns_at)) > 10  # 60 ms of work in turns of two
            assert await start_of(client, group, "busy") == 60

    run(scenario)
