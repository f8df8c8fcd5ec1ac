"""Heartbeats of a consumer group member (KIP-848), with a simulated coordinator."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from mansio.client.group.classic_member import GroupOptions
from mansio.client.group.consumer_member import ConsumerMember
from mansio.errors import ConnectionLost, FencedInstanceId, FencedMemberEpoch, MansioError
from mansio.net.retry import DEFAULT_BACKOFF
from support.machine import scaled

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from mansio.wire.topic_partition import TopicPartition

TOPIC_ID = bytes(range(16))


class Coordinator:
    """In place of the cluster: hands each heartbeat to the test, and gives the member what the test answers."""

    def __init__(self) -> None:
        self.options = SimpleNamespace(request_timeout_ms=30_000)
        self.backoff = DEFAULT_BACKOFF
        self.has_metadata = asyncio.Event()
        self.has_metadata.set()
        self._asked: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._answers: asyncio.Queue[Any] = asyncio.Queue()

    async def request_coordinator(self, group: str, api_key: int, fields: dict[str, Any], **how: Any) -> Any:
        await self._asked.put(fields)
        answer = await self._answers.get()
        if isinstance(answer, MansioError):
            raise answer
        return answer

    def cached_topic(self, name: str) -> Any:
        return SimpleNamespace(topic_id=TOPIC_ID) if name == "t" and self.has_metadata.is_set() else None

    async def refresh_metadata(self, topics: object) -> None:
        await self.has_metadata.wait()

    async def close_channel(self, channel: str) -> None:
        """There is none."""

    async def next_request(self) -> dict[str, Any]:
        """The next heartbeat. It has to be answered."""
        async with asyncio.timeout(scaled(5)):
            return await self._asked.get()

    def answer(self, epoch: int, *assigned: int, assigns: bool = True, interval_ms: int = 10) -> None:
        topics = [SimpleNamespace(topic_id=TOPIC_ID, partitions=list(assigned))] if assigned else []
        self._answers.put_nowait(
            SimpleNamespace(
                member_id=None,
                member_epoch=epoch,
                heartbeat_interval_ms=interval_ms,
                assignment=SimpleNamespace(topic_partitions=topics) if assigns else None,
            )
        )

    def fail(self, error: MansioError) -> None:
        self._answers.put_nowait(error)

    async def until(self, epoch: int, *reported: int) -> dict[str, Any]:
        """Answer heartbeats until one reports exactly these; it is left unanswered."""
        for _ in range(100):
            request = await self.next_request()
            if request["topic_partitions"] is not None and reports(request) == list(reported):
                return request
            self.answer(epoch, assigns=False)
        raise AssertionError(f"{reported} are not reported")


class Reader:
    """Who reads; begins and stops when the test lets it."""

    def __init__(self) -> None:
        self.events: list[tuple[str, list[int]]] = []
        self.may_assign = asyncio.Event()
        self.may_revoke = asyncio.Event()
        self.may_assign.set()
        self.may_revoke.set()

    async def on_partitions_assigned(self, partitions: set[TopicPartition]) -> None:
        self._note("assigning", partitions)
        await self.may_assign.wait()
        self._note("assigned", partitions)

    async def on_partitions_revoked(self, partitions: set[TopicPartition]) -> None:
        self._note("revoking", partitions)
        await self.may_revoke.wait()
        self._note("revoked", partitions)

    async def on_partitions_lost(self, partitions: set[TopicPartition]) -> None:
        self._note("lost", partitions)

    def seconds_since_poll(self) -> float:
        return 0.0

    async def wait_for_poll(self) -> None:
        """It does all the time."""

    def _note(self, what: str, partitions: set[TopicPartition]) -> None:
        self.events.append((what, sorted(one.partition for one in partitions)))


def reports(request: dict[str, Any]) -> list[int]:
    return [index for topic in request["topic_partitions"] for index in topic["partitions"]]


@asynccontextmanager
async def member() -> AsyncIterator[tuple[Coordinator, Reader, ConsumerMember, asyncio.Task[None]]]:
    coordinator, reader = Coordinator(), Reader()
    options = GroupOptions(rebalance_timeout_ms=7_000)
    one = ConsumerMember(coordinator, "g", ["t"], reader, options)  # type: ignore[arg-type]  # plays the cluster
    task = asyncio.ensure_future(one.run())
    try:
        yield coordinator, reader, one, task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def test_heartbeat_after_a_lost_response_is_a_full_one() -> None:
    async def scenario() -> None:
        async with member() as (coordinator, _, one, _):
            request = await coordinator.next_request()
            assert (request["member_epoch"], request["topic_partitions"]) == (0, [])
            assert (request["subscribed_topic_names"], request["rebalance_timeout_ms"]) == (["t"], 7_000)
            coordinator.answer(3, 0, 1)
            request = await coordinator.until(3, 0, 1)
            assert "subscribed_topic_names" not in request
            coordinator.answer(3, assigns=False)
            request = await coordinator.next_request()
            assert request["topic_partitions"] is None  # nothing new
            coordinator.fail(ConnectionLost("the answer was lost"))
            request = await coordinator.next_request()
            assert (request["member_epoch"], request["member_id"], reports(request)) == (
                3,
                one.member_id,
                [0, 1],
            )
            assert (request["subscribed_topic_names"], request["rebalance_timeout_ms"]) == (["t"], 7_000)
            coordinator.answer(4, assigns=False)

    asyncio.run(scenario())


def test_partition_is_reported_from_assignment_until_revocation() -> None:
    async def scenario() -> None:
        async with member() as (coordinator, reader, _, _):
            await coordinator.next_request()
            reader.may_assign.clear()
            coordinator.has_metadata.clear()
            coordinator.answer(1, 0, 1)
            await coordinator.until(1, 0, 1)  # while it looks for the name of the topic
            assert reader.events == []
            coordinator.has_metadata.set()
            while not reader.events:
                coordinator.answer(1, assigns=False)
                assert (await coordinator.next_request())[
                    "topic_partitions"
                ] is None  # while it begins to read them
            assert reader.events == [("assigning", [0, 1])]
            reader.may_assign.set()
            reader.may_revoke.clear()
            coordinator.answer(1, 0, 2)
            assert reports(await coordinator.next_request()) == [0, 1, 2]
            for _ in range(5):  # heartbeats go on
                coordinator.answer(1, assigns=False)
                assert (await coordinator.next_request())["topic_partitions"] is None
            assert reader.events[1:] == [("assigned", [0, 1]), ("revoking", [1])]
            coordinator.answer(1, assigns=False, interval_ms=60_000)
            reader.may_assign.clear()
            reader.may_revoke.set()
            assert reports(await coordinator.next_request()) == [0, 2]  # said at once
            assert reader.events[3:] == [("revoked", [1]), ("assigning", [2])]
            coordinator.answer(2, assigns=False)

    asyncio.run(scenario())


def test_partition_revoked_before_it_was_started_is_released() -> None:
    async def scenario() -> None:
        async with member() as (coordinator, reader, _, _):
            await coordinator.next_request()
            reader.may_assign.clear()
            coordinator.answer(1, 0, 1)
            await coordinator.until(1, 0, 1)
            coordinator.answer(1, 0)
            await coordinator.next_request()
            assert reader.events == [("assigning", [0, 1])]
            reader.may_assign.set()
            coordinator.answer(1, assigns=False)
            await coordinator.until(1, 0)
            assert reader.events[1:] == [("assigned", [0, 1]), ("revoking", [1]), ("revoked", [1])]
            coordinator.answer(2, assigns=False)

    asyncio.run(scenario())


def test_fenced_member_loses_all_partitions_and_rejoins() -> None:
    async def scenario() -> None:
        async with member() as (coordinator, reader, one, task):
            name = one.member_id
            await coordinator.next_request()
            coordinator.answer(5, 0, 1)
            await coordinator.until(5, 0, 1)
            reader.may_revoke.clear()
            coordinator.answer(5, 0)
            await coordinator.next_request()
            coordinator.fail(FencedMemberEpoch())
            request = await coordinator.next_request()
            assert (request["member_epoch"], request["member_id"], request["topic_partitions"]) == (
                0,
                name,
                [],
            )
            reader.may_revoke.set()
            coordinator.fail(FencedInstanceId())
            with pytest.raises(FencedInstanceId):
                await task
            assert reader.events[1:] == [("assigned", [0, 1]), ("revoking", [1]), ("lost", [0, 1])]

    asyncio.run(scenario())
