"""A whole broker with one topic, and members of share groups that speak to it over sockets of their own, by the codecs
alone."""

from __future__ import annotations

import asyncio
import itertools
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from mansio.broker.coordinator.share.share_partition_manager import (
    SharePartitionManager,
    initial_offset,
    share_settings,
)
from mansio.config.settings import Settings
from mansio.metadata.topic_plan import NewTopic
from mansio.node.broker import Broker
from mansio.wire.apis import share_acknowledge, share_fetch
from mansio.wire.apis.share_acknowledge import AckBatch, AckPartition
from mansio.wire.batch.record_batch import build_batch, iterate_batches
from mansio.wire.batch.record_reader import read_records
from mansio.wire.codec import messages
from support.machine import scaled
from support.share_memory import MemoryPersister

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
    from pathlib import Path

    from mansio.broker.partition.partition import Partition
    from mansio.wire.apis.share_acknowledge import ShareAcknowledgeResponse
    from mansio.wire.apis.share_fetch import ShareFetchResponse, SharePartitionData
    from mansio.wire.batch.record_batch import NewRecord

DEADLINE_S = 20.0
CONFIGS = {
    "share.auto.offset.reset": "earliest",
    "share.record.lock.duration.ms": "30000",
    "mansio.retry.backoff.ms": "0",
    "mansio.deadletterqueue.enable": "false",
}


class Peer:
    """One connection, and one member of a share group on it."""

    def __init__(self, room: ShareBench, member: str, group: str, version: int) -> None:
        self.room = room
        self.member = member
        self.group = group
        self.version = version
        self.epoch = 0
        self._correlation = itertools.count(1)
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter

    async def open(self) -> Peer:
        self._reader, self._writer = await asyncio.open_connection(*self.room.address)
        return self

    def close(self) -> None:
        self._writer.close()

    async def send(self, frame: bytes) -> bytes:
        self._writer.write(frame)
        length = int.from_bytes(await self._reader.readexactly(4), "big")
        return await self._reader.readexactly(length)

    async def fetch(
        self,
        most: int = 100,
        *,
        acks: Sequence[AckBatch] = (),
        wait_ms: int = 0,
        epoch: int | None = None,
        named: bool = True,
        max_bytes: int = 1 << 20,
        **more: Any,
    ) -> ShareFetchResponse:
        topics = [(self.room.topic_id, [AckPartition(0, list(acks))])] if named else []
        frame = share_fetch.encode_request(
            self.version,
            next(self._correlation),
            "peer",
            self.group,
            self.member,
            self.epoch if epoch is None else epoch,
            topics,
            max_wait_ms=wait_ms,
            min_bytes=0 if more.get("is_renew_ack") else 1,
            max_bytes=max_bytes,
            max_records=most,
            batch_size=most,
            **more,
        )
        answer = share_fetch.decode_response(self.version, await self.send(frame))
        self._count(answer.error_code, epoch)
        return answer

    async def acknowledge(
        self, *acks: AckBatch, epoch: int | None = None, **more: Any
    ) -> ShareAcknowledgeResponse:
        frame = share_acknowledge.encode_request(
            self.version,
            next(self._correlation),
            "peer",
            self.group,
            self.member,
            self.epoch if epoch is None else epoch,
            [(self.room.topic_id, [AckPartition(0, list(acks))])],
            **more,
        )
        answer = share_acknowledge.decode_response(self.version, await self.send(frame))
        self._count(answer.error_code, epoch)
        return answer

    def _count(self, error_code: int, epoch: int | None) -> None:
        if not error_code and epoch is None:
            self.epoch += 1

    async def call_and_rearm(self, key: int, version: int, fields: dict[str, Any]) -> Any:
        """Any other API."""
        frame = messages.encode_request(key, version, next(self._correlation), "peer", fields)
        return messages.decode_response_frame(key, version, await self.send(frame))[1]


class ShareBench:
    """See the module."""

    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        self.service = broker.service
        self.address = broker.listener_address
        self.peers: list[Peer] = []
        self.known_state: MemoryPersister

    @property
    def topic_id(self) -> bytes:
        return self.service.topics.find("t").topic_id.bytes

    @property
    def partition(self) -> Partition:
        return self.service.partitions.find("t", None, 0)

    def remember(self, *, sessions_max: int = 100, lock_ms: int = 30_000, **configs: str) -> MemoryPersister:
        """Keep the state of share partitions in memory from now on, where it can be made to fail."""
        service = self.service
        configs = {**CONFIGS, **configs}
        self.known_state = MemoryPersister(service.scheduler)
        shares = SharePartitionManager(
            find_partition=service.partitions.find,
            persister=self.known_state,
            settings=lambda _group, _partition: share_settings(configs, is_dead_letter_topic=False)._replace(
                lock_ms=lock_ms
            ),
            initial_offset=lambda _, partition: initial_offset(configs, partition, service.clock),
            clock=service.clock,
            scheduler=service.scheduler,
            random=self.broker.machine.random if hasattr(self.broker, "machine") else _Even(),
            sessions_max=sessions_max,
        )
        object.__setattr__(service, "share_partition_manager", shares)  # the broker uses it, too
        service.share_service.share_partition_manager = shares
        return self.known_state

    async def peer(self, member: str = "m1", group: str = "g", version: int = 2) -> Peer:
        one = await Peer(self, member, group, version).open()
        self.peers.append(one)
        return one

    async def write(self, *sizes: int) -> None:
        """One batch of so many records after the other."""
        for size in sizes:
            rows: list[NewRecord] = [
                (self.service.clock.wall_ms(), None, b"v%d" % n, []) for n in range(size)
            ]
            await self.partition.commit_promise(self.partition.append(build_batch(rows)).end_offset)


class _Even:
    """No chance at all."""

    def bytes(self, length: int) -> bytes:
        return bytes(length)

    def uniform(self, low: float, high: float) -> float:
        return (low + high) / 2


def part_of(answer: ShareFetchResponse) -> SharePartitionData:
    """The answer's one partition, checked: each acquired offset has its record in it."""
    ((_, (part,)),) = answer.topics
    there: set[int] = set()
    for piece in part.records:
        for at, header in iterate_batches(piece):
            batch = piece[at : at + header.size]
            there.update(each.offset for each in read_records(batch, output_bytes_max=1 << 24))
    assert set(offsets(part)) <= there, "an offset was leased whose bytes did not come"
    return part


def offsets(part: SharePartitionData) -> list[int]:
    return [offset for first, last, _ in part.acquired for offset in range(first, last + 1)]


@asynccontextmanager
async def room_in(directory: Path) -> AsyncIterator[ShareBench]:
    broker = Broker(Settings(listeners="127.0.0.1:0", http_listener="", data_dir=str(directory)))
    await broker.start()
    room = ShareBench(broker)
    try:
        if "t" not in broker.service.topics.state.topics:
            await broker.service.topics.create(NewTopic("t", 1, 1))
        yield room
    finally:
        for peer in room.peers:
            peer.close()
        await broker.stop()


def run(check: Callable[[ShareBench], Awaitable[None]], directory: Path) -> None:
    async def main() -> None:
        async with asyncio.timeout(scaled(DEADLINE_S)), room_in(directory) as room:
            await check(room)

    asyncio.run(main())
