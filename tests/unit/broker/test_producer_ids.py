"""Producer ids: no two producers of a cluster get the same one, whatever the number that asks at once."""

from __future__ import annotations

import asyncio
import random
from types import SimpleNamespace
from typing import Any

import pytest

from mansio.errors import Unavailable
from mansio.metadata.metadata_store import Keys, TransactionResult
from mansio.metadata.producer_ids import IDS_PER_BLOCK, ProducerIdAllocator
from mansio.testing.metadata import InMemoryStore
from unit.broker.groups_fixtures import VirtualScheduler


class Numbers:
    """`Random` with a fixed seed."""

    def __init__(self) -> None:
        self._random = random.Random(1)

    def bytes(self, count: int) -> bytes:
        return self._random.randbytes(count)


class Cluster:
    """Brokers that assign producer ids from one metadata store."""

    def __init__(self, brokers: int = 1) -> None:
        self.scheduler = VirtualScheduler()
        self.store = InMemoryStore(self.scheduler, self.scheduler)
        self.clients = [self.store.store_client() for _ in range(brokers)]
        numbers: Any = Numbers()
        self.allocators = [
            ProducerIdAllocator(client, Keys("test"), numbers, self.scheduler) for client in self.clients
        ]
        self.assigned: list[int] = []
        self.errors: list[Exception] = []

    def ask(self, broker: int, count: int) -> None:
        """Begin to ask for ids, all at once."""
        for _ in range(count):
            self.scheduler.spawn(self._ask(self.allocators[broker]), name="ask for a producer id")

    async def _ask(self, allocator: ProducerIdAllocator) -> None:
        try:
            self.assigned.append(await allocator.new_producer_id())
        except Unavailable as error:
            self.errors.append(error)


def test_many_producers_that_start_at_once_share_one_reservation() -> None:
    cluster = Cluster()
    cluster.ask(0, 500)
    cluster.scheduler.pass_time(1_000)
    assert cluster.errors == []
    assert sorted(cluster.assigned) == list(range(500))
    cluster.ask(0, 2 * IDS_PER_BLOCK)
    cluster.scheduler.pass_time(1_000)
    assert sorted(cluster.assigned) == list(range(500 + 2 * IDS_PER_BLOCK))


def test_brokers_never_assign_the_same_id() -> None:
    cluster = Cluster(3)
    for _ in range(3):
        for broker in range(3):
            cluster.ask(broker, 700)
        cluster.scheduler.pass_time(1_000)
    assert cluster.errors == []
    assert len(set(cluster.assigned)) == len(cluster.assigned) == 3 * 3 * 700


@pytest.mark.parametrize("waiting", [0, 20])
def test_a_failed_reservation_fails_those_that_wait_for_it_and_no_later_one(waiting: int) -> None:
    cluster = Cluster()
    cluster.clients[0].unreachable = True
    cluster.ask(0, 1 + waiting)
    cluster.scheduler.pass_time(60_000)
    assert len(cluster.errors) == 1 + waiting
    cluster.clients[0].unreachable = False
    cluster.ask(0, 5)
    cluster.scheduler.pass_time(1_000)
    assert sorted(cluster.assigned) == list(range(5))


def test_a_caller_that_is_cancelled_while_it_waits_fails_no_other_one() -> None:
    async def scenario() -> list[int | BaseException]:
        loop = asyncio.get_running_loop()
        scheduler: Any = SimpleNamespace(promise=loop.create_future)
        store: Any = SlowStore()
        numbers: Any = Numbers()
        allocator = ProducerIdAllocator(store, Keys("test"), numbers, scheduler)
        callers = [asyncio.create_task(allocator.new_producer_id()) for _ in range(4)]
        await store.asked.wait()
        callers[2].cancel()
        store.may_answer.set()
        return await asyncio.gather(*callers, return_exceptions=True)

    found = asyncio.run(scenario())
    assert isinstance(found.pop(2), asyncio.CancelledError)
    assert found == [0, 1, 2]


class SlowStore:
    """A metadata store without ids that answers on command."""

    def __init__(self) -> None:
        self.asked, self.may_answer = asyncio.Event(), asyncio.Event()

    async def get(self, key: str) -> None:
        del key
        self.asked.set()
        await self.may_answer.wait()

    async def transact(self, compares: object, operations: object) -> TransactionResult:
        del compares, operations
        return TransactionResult(True, 1)
