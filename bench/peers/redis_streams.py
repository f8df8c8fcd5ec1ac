"""Redis: a stream with one consumer group, its append-only file synced before every reply or once a second.

Batches use a pipeline: one round trip, and one fsync for all replies of it.
"""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING, Any

from bench.peers.peer import TAKE_WAIT_S, Candidate, PeerUnavailableError, ServerLocation, find_program
from bench.peers.releases import of_debian
from bench.peers.server import Server

if TYPE_CHECKING:
    from collections.abc import Sequence

try:
    import redis
except ImportError:
    redis = None  # reported when it is measured

GROUP, FIELD = b"group", b"value"


def serve(place: ServerLocation, sync: str) -> Server:
    if redis is None:
        raise PeerUnavailableError("no Python package redis")
    server = Server(place)
    # fmt: off
    server.start([
        find_program("redis-server"), "--port", place.port, "--bind", "127.0.0.1", "--dir", place.directory,
        "--save", "", "--appendonly", "yes", "--appendfsync", sync, "--daemonize", "no",
    ])
    # fmt: on
    server.wait_for_port()
    return server


class Driver:
    def __init__(self, port: int) -> None:
        self.port = port

    def connect(self) -> Any:
        return redis.Redis(port=self.port, protocol=2)

    async def version(self) -> str:
        return f"{self.connect().info()['redis_version']}, redis-py {redis.__version__}"

    async def create(self, queue: str) -> None:
        self.connect().xgroup_create(queue, GROUP, id="0", mkstream=True)

    async def delete(self, queue: str) -> None:
        self.connect().delete(queue)

    async def producer(self, queue: str) -> Producer:
        return Producer(self.connect(), queue)

    async def consumer(self, queue: str, *, confirmed: bool) -> Consumer:
        return Consumer(self.connect(), queue, confirmed=confirmed)

    async def deliverer(self, queue: str, count: int) -> Deliverer:
        return Deliverer(Consumer(self.connect(), queue, confirmed=False), count)


class Producer:
    def __init__(self, connection: Any, queue: str) -> None:
        self.connection, self.queue = connection, queue

    async def publish(self, values: Sequence[bytes]) -> None:
        if len(values) == 1:
            self.connection.xadd(self.queue, {FIELD: values[0]})
            return
        pipeline = self.connection.pipeline(transaction=False)
        for value in values:
            pipeline.xadd(self.queue, {FIELD: value})
        pipeline.execute()

    async def close(self) -> None:
        self.connection.close()


class Consumer:
    """One XACK names many. An acknowledgement that need not be confirmed leaves with the next read, in one round
    trip."""

    def __init__(self, connection: Any, queue: str, *, confirmed: bool) -> None:
        self.connection, self.queue, self.confirmed = connection, queue, confirmed
        self.unacknowledged: list[bytes] = []
        self.member = f"member-{os.getpid()}"

    async def take(self, count: int) -> list[bytes]:
        pipeline = self.connection.pipeline(transaction=False)
        if self.unacknowledged:
            pipeline.xack(self.queue, GROUP, *self.unacknowledged)
        wait_ms = int(TAKE_WAIT_S * 1000)
        pipeline.xreadgroup(GROUP, self.member, {self.queue: ">"}, count=count, block=wait_ms)
        *acknowledged, found = pipeline.execute()
        self._check(acknowledged)
        messages = found[0][1] if found else []
        self.unacknowledged = [identity for identity, _ in messages]
        if self.confirmed and messages:
            self.acknowledge()
        return [fields[FIELD] for _, fields in messages]

    def acknowledge(self) -> None:
        self._check([self.connection.xack(self.queue, GROUP, *self.unacknowledged)])
        self.unacknowledged = []

    def _check(self, acknowledged: Sequence[int]) -> None:
        """Check the answers to XACK: the number of records that were pending until then."""
        if acknowledged and acknowledged[0] != len(self.unacknowledged):
            raise RuntimeError(f"{acknowledged[0]} of {len(self.unacknowledged)} records were acknowledged")

    async def close(self) -> None:
        self.connection.close()


class Deliverer:
    """XACK of the previous records and XREADGROUP of the next in one round trip, with one fsync."""

    def __init__(self, consumer: Consumer, count: int) -> None:
        self.consumer, self.count = consumer, count

    async def next(self) -> list[bytes]:
        return await self.consumer.take(self.count)

    async def acknowledge(self) -> None:
        if self.consumer.unacknowledged:
            self.consumer.acknowledge()

    async def close(self) -> None:
        await self.consumer.close()


def candidates() -> list[Candidate]:
    return [
        Candidate(
            name=f"redis-{sync}",
            title=f"Redis Streams, appendfsync {sync}",
            durability=durability,
            is_synced=sync == "always",
            server=f"redis-{sync}",
            serve=partial(serve, sync=sync),
            driver=Driver,
            confirmation="the answer to XACK, in one round trip with XREADGROUP",
            released=partial(of_debian, "redis-server"),
        )
        for sync, durability in (
            ("always", "fsync before every reply"),
            ("everysec", "fsync once a second"),
        )
    ]
