"""Mansio: with confluent-kafka, with its own client, and as a raw load without a client library.

The raw row shows the capacity of the broker; no program reaches it, and it is not compared with any peer.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from typing import TYPE_CHECKING, Any

import mansio
from bench.peers import kafka_client
from bench.peers.peer import ROOT, TAKE_WAIT_S, Candidate, ServerLocation
from bench.peers.server import Server
from mansio.version import __version__

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from pathlib import Path

    from mansio.client.share.leased import Leased
    from mansio.client.share.receiver import Receiver


PROGRAM = ("-m", "mansio.cli.main")


def serve(place: ServerLocation, program: Sequence[str | Path] = PROGRAM) -> Server:
    """Start a broker; `program`: what Python runs instead of Mansio's own command, of this repository."""
    server = Server(place)
    where: list[str | Path] = [
        "--data",
        place.directory / "data",
        "--kafka",
        f"127.0.0.1:{place.port}",
        "--http",
        "",
    ]
    # As for Apache Kafka: no delay for further members of a group with one member.
    environment = {"MANSIO_GROUP_INITIAL_REBALANCE_DELAY_MS": "0"}
    if program != PROGRAM:
        environment["PYTHONPATH"] = str(ROOT)
    server.start([sys.executable, *program, "serve", *where], environment=environment)
    server.wait_for_port()
    return server


class ConfluentDriver(kafka_client.Driver):
    async def version(self) -> str:
        return f"{__version__}, {await super().version()}"


class OwnDriver:
    """Mansio's asyncio client."""

    def __init__(self, port: int) -> None:
        self.address = f"127.0.0.1:{port}"

    @contextlib.asynccontextmanager
    async def connected(self) -> AsyncIterator[mansio.Client]:
        async with mansio.connect(self.address) as client:
            yield client

    async def version(self) -> str:
        return __version__

    async def create(self, queue: str) -> None:
        async with self.connected() as client:
            await client.admin.create_topic(queue, partitions=1)

    async def delete(self, queue: str) -> None:
        async with self.connected() as client:
            await client.admin.delete_topic(queue)

    async def producer(self, queue: str) -> OwnProducer:
        return OwnProducer(await mansio.connect(self.address).__aenter__(), queue)

    async def consumer(self, queue: str, *, confirmed: bool) -> OwnConsumer:
        client = await mansio.connect(self.address).__aenter__()
        assigned = asyncio.Event()
        consumer = client.consume(
            queue, group=f"group-{queue}", auto_commit=False, on_assigned=lambda _: assigned.set()
        )
        await consumer.start()
        await assigned.wait()
        return OwnConsumer(client, consumer, confirmed=confirmed)

    async def deliverer(self, queue: str, count: int) -> OwnDeliverer:
        group = f"share-{queue}"
        client = await mansio.connect(self.address).__aenter__()
        await client.admin.alter_group_config(group, {"share.auto.offset.reset": "earliest"})
        receiver = client.receive(queue, group=group, **({} if count > 1 else dict[str, Any](prefetch=0)))
        await receiver.start()
        return OwnDeliverer(client, receiver, count)


class OwnProducer:
    def __init__(self, client: mansio.Client, queue: str) -> None:
        self.client, self.queue = client, queue

    async def publish(self, values: Sequence[bytes]) -> None:
        if len(values) == 1:
            await self.client.publish(self.queue, values[0])
        else:
            await self.client.publish_many(self.queue, values)

    async def close(self) -> None:
        await self.client.close()


class OwnConsumer:
    """Polls whole batches and returns them in the requested sizes; an unconfirmed commit runs concurrently."""

    def __init__(self, client: mansio.Client, consumer: mansio.Consumer, *, confirmed: bool) -> None:
        self.client, self.consumer, self.confirmed = client, consumer, confirmed
        self.polled: list[mansio.Message] = []
        self.committing: asyncio.Future[None] | None = None

    async def take(self, count: int) -> list[bytes]:
        polled = self.polled or await self.consumer.poll(TAKE_WAIT_S * 1000)
        # A poll returns one stored batch; if latency does not matter, more polls follow while there is data.
        while self.confirmed and 0 < len(polled) < count and any(self.consumer.lag().values()):
            polled += await self.consumer.poll(TAKE_WAIT_S * 1000)
        taken, self.polled = polled[:count], polled[count:]
        if taken:
            last = taken[-1]
            done = {mansio.TopicPartition(last.topic, last.partition): last.offset + 1}
            if self.confirmed:
                await self.consumer.commit(done)
            elif self.committing is None or self.committing.done():
                self.committing = asyncio.ensure_future(self.consumer.commit(done))
        return [message.value or b"" for message in taken]

    async def close(self) -> None:
        if self.committing is not None:
            await self.committing
        await self.client.close()


class OwnDeliverer:
    """One record at a time: `receive_next`, which returns when the acknowledgement of the record before is stored.
    Several: `poll` and `ack` of many; the acknowledgement of the previous batch is in flight while the next is
    returned."""

    def __init__(self, client: mansio.Client, receiver: Receiver, count: int) -> None:
        self.client, self.receiver, self.count = client, receiver, count
        self.messages: list[Leased] = []
        self.acking: asyncio.Future[None] | None = None

    async def next(self) -> list[bytes]:
        if self.count == 1:
            done = self.messages[0] if self.messages else None
            following = await self.receiver.receive_next(done, TAKE_WAIT_S * 1000)
            self.messages = [] if following is None else [following]
        else:
            await self._acked()
            if self.messages:
                self.acking = asyncio.ensure_future(self.receiver.ack(self.messages))
            self.messages = await self.receiver.poll(TAKE_WAIT_S * 1000, max_records=self.count)
        return [message.value or b"" for message in self.messages]

    async def _acked(self) -> None:
        if self.acking is not None:
            await self.acking
            self.acking = None

    async def acknowledge(self) -> None:
        await self._acked()
        messages, self.messages = self.messages, []
        if messages:
            await self.receiver.ack(messages)

    async def close(self) -> None:
        await self.receiver.close()
        await self.client.close()


def candidates() -> list[Candidate]:
    shared: dict[str, Any] = {
        "durability": "acks=all: fdatasync before every answer",
        "is_synced": True,
        "server": "mansio",
        "serve": serve,
    }
    return [
        Candidate(
            name="mansio",
            title="Mansio, confluent-kafka",
            driver=ConfluentDriver,
            confirmation=kafka_client.CONFIRMATION,
            **shared,
        ),
        Candidate(
            name="mansio-own",
            title="Mansio, own client",
            driver=OwnDriver,
            confirmation="the answer to receive_next, one request with the lease of the next",
            **shared,
        ),
        Candidate(
            name="mansio-raw",
            title="Mansio, raw load (no client)",
            driver=OwnDriver,
            confirmation="the answer to ShareFetch, one request with the lease of the next",
            skips=frozenset({"consume100"}),
            is_raw=True,
            **shared,
        ),
    ]
