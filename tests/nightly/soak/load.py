"""Clients of the soak test: one steady client that measures latency, and many that connect and disconnect.

Each is a thread; what goes wrong for good is in `failures`. Together they are paced to leave most of a core idle, so
that what is measured is the broker and not the lack of a processor.
"""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import suppress
from random import Random
from typing import TYPE_CHECKING

import mansio
from component.test_clumsy_clients import MOMENTS, end, live
from mansio.errors import MansioError
from mansio.wire.apis import fetch
from mansio.wire.batch.record_reader import read_records
from support.machine import scaled
from support.raw_peer import RawPeer, batch_of, fetch_frame

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from mansio.client.client import Client

STEADY_INTERVAL_S = 0.02
LIFE_INTERVAL_S = 0.15
CLUMSY_INTERVAL_S = 0.05
GROUPS = 12
PASSING_TOPICS = 4
MIB = 1 << 20


class Worker:
    """A thread that works until it is stopped."""

    def __init__(self, name: str) -> None:
        self.failures: list[BaseException] = []
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._guarded, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join(scaled(60))

    def work(self) -> None:
        raise NotImplementedError

    def pause(self, seconds: float) -> bool:
        """False when it is time to stop."""
        return not self._stopping.wait(seconds)

    def _guarded(self) -> None:
        try:
            self.work()
        except Exception as error:  # noqa: BLE001 - told by the test, whatever it is
            self.failures.append(error)


class Steady(Worker):
    """Writes one durable record after the other, reads each back, and notes how long both took."""

    def __init__(self, port: int) -> None:
        super().__init__("steady")
        self._port = port
        self.acknowledged = 0
        self.latencies_s: list[float] = []

    def work(self) -> None:
        with RawPeer(self._port) as peer:
            while self.pause(STEADY_INTERVAL_S):
                value = b"record %d" % self.acknowledged
                begin = time.perf_counter()
                written = peer.produce("steady", batch_of(value))
                assert (written.error_code, written.base_offset) == (0, self.acknowledged), written
                peer.send(fetch_frame("steady", offset=self.acknowledged, wait_ms=1000))
                answer = peer.frame()
                assert answer is not None
                found = fetch.decode_response(12, answer).topics[0][2][0]
                assert read_records(bytes(found.records), output_bytes_max=MIB)[0].value == value
                self.latencies_s.append(time.perf_counter() - begin)
                self.acknowledged += 1

    def taken(self) -> list[float]:
        """The latencies since the last call."""
        taken, self.latencies_s = self.latencies_s, []
        return taken


class Churn(Worker):
    """Clients of our library with short lives: they write, read in groups, administer, leave or just drop."""

    def __init__(self, bootstrap_servers: str, seed: int) -> None:
        super().__init__("churn")
        self._bootstrap = bootstrap_servers
        self._random = Random(seed)
        self.lives = 0
        self.refusals = 0

    def work(self) -> None:
        asyncio.run(self._work())

    async def _work(self) -> None:
        kinds: tuple[Callable[[Client], Awaitable[None]], ...] = (
            self._write,
            self._write,
            self._consume,
            self._consume,
            self._administer,
        )
        running: set[asyncio.Task[None]] = set()
        while not self._stopping.is_set():
            if len(running) < 8:
                running.add(asyncio.create_task(self._one(self._random.choice(kinds))))
            await asyncio.sleep(LIFE_INTERVAL_S * self._random.uniform(0.5, 1.5))
            for task in [task for task in running if task.done()]:
                running.discard(task)
                task.result()
        await asyncio.gather(*running)

    async def _one(self, life: Callable[[Client], Awaitable[None]]) -> None:
        try:
            async with asyncio.timeout(scaled(30)), mansio.connect(self._bootstrap) as client:
                await life(client)
        except MansioError:
            self.refusals += 1  # a topic deleted by another life, a rebalance: part of it
        self.lives += 1

    async def _write(self, client: Client) -> None:
        count = self._random.randrange(1, 300)
        await client.publish_many("churn", [b"x" * self._random.randrange(2000) for _ in range(count)])

    async def _consume(self, client: Client) -> None:
        group = f"group-{self._random.randrange(GROUPS)}"
        consumer = client.consume("churn", group=group, session_timeout_ms=6000)
        with suppress(TimeoutError):
            async with asyncio.timeout(self._random.uniform(0.2, 4)):
                async for _ in consumer:
                    if self._random.random() < 0.001:
                        break
        if self._random.random() < 0.7:
            await consumer.close()  # otherwise the member's session has to run out

    async def _administer(self, client: Client) -> None:
        name = f"passing-{self._random.randrange(PASSING_TOPICS)}"
        if self._random.random() < 0.5:
            await client.admin.create_topic(name, partitions=2)
        else:
            await client.admin.delete_topic(name)
        await client.admin.list_topics()


class Clumsy(Worker):
    """Clients that disappear in the middle of something (`component.test_clumsy_clients`)."""

    def __init__(self, port: int, seed: int) -> None:
        super().__init__("clumsy")
        self._port = port
        self._random = Random(seed)
        self.lives = 0

    def work(self) -> None:
        alive: list[RawPeer] = []
        while self.pause(CLUMSY_INTERVAL_S):
            alive.append(live(self._port, self._random, self._random.choice(MOMENTS)))
            self.lives += 1
            while len(alive) > self._random.randrange(12):
                end(alive.pop(self._random.randrange(len(alive))), self._random)
        for peer in alive:
            end(peer, self._random)
