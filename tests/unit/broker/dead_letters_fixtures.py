"""Share partitions on a real broker whose records are given up, their state in memory: what dead letters are tested in.

`Live` does what the shell of a share partition does with an update: write, settle, hand over what was given up. Nothing
of it survives a crash but the persister and the broker's own disk.
"""

from __future__ import annotations

import base64
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from mansio.broker.coordinator.share.dead_letter_manager import DeadLetterManager
from mansio.broker.coordinator.share.dead_letter_topics import DeadLetterTopics
from mansio.config.settings import Settings
from mansio.errors import MansioError
from mansio.metadata.topic_plan import NewTopic
from mansio.node.broker import Broker
from mansio.state.share_partition.machine import SharePartition
from mansio.state.share_partition.types import REJECT, AcknowledgementBatch, Backoff, ShareKey, ShareSettings
from mansio.wire.batch.record_batch import build_batch, iterate_batches
from mansio.wire.batch.record_reader import read_records
from support.share_memory import MemoryPersister

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from pathlib import Path

    from mansio.broker.partition.partition import Partition
    from mansio.state.share_partition.types import Update
    from mansio.wire.batch.record_reader import Record

MEMBER = "member-7"
SETTINGS = ShareSettings(
    lock_ms=60_000,
    delivery_limit=5,
    record_locks_max=10_000,
    in_flight_batches_max=10_000,
    lease_bound_step=20_000,
    is_ordered=False,
    renewal_enabled=True,
    dead_letters_enabled=True,
    backoff=Backoff(0, 1.0, 0, 0.0),
)


class Live:
    """One share partition that is led here."""

    def __init__(self, room: DeadLetterBench, key: ShareKey) -> None:
        self.room = room
        self.key = key
        self.state_machine: SharePartition
        self.is_dropped = False

    async def load(self) -> Live:
        room = self.room
        if room.persister.state(self.key) is None:
            await room.persister.initialize(self.key, 0, 0)
        state = await room.persister.read(self.key, 0)
        assert state is not None
        partition = room.partition_by_id(self.key)
        self.state_machine = SharePartition(
            self.key,
            SETTINGS,
            state,
            leader_epoch=0,
            log_start=partition.start_offset,
            log_end=partition.end_offset,
            high_watermark=partition.high_watermark,
            now_ms=0.0,
            wall_ms=room.wall_ms(),
        )
        room.share_partitions[self.key] = self
        room.dead_letters.on_loaded(self, state.producer)
        return self

    async def persist(self, update: Update) -> None:
        try:
            await self.room.persister.write(self.key, 0, 0, update)
        except MansioError:
            self.drop()
            raise
        if self.is_dropped:
            return
        stored_dead_letters = self.state_machine.mark_persisted(update.token)
        if stored_dead_letters:
            self.room.dead_letters.add(self, stored_dead_letters)

    def end(self, error: MansioError) -> None:
        del error
        self.drop()

    def drop(self) -> None:
        self.is_dropped = True
        self.room.share_partitions.pop(self.key, None)
        self.room.dead_letters.on_closed(self)

    async def lease(self, first: int, last: int) -> None:
        """Until they are leased: the lease bound may have to move first."""
        for _ in range(3):
            tick = self.state_machine.tick(0.0, self.room.wall_ms(), 0.5)
            if tick is not None:
                await self.persist(tick)
        self.state_machine.acquirable_ranges(MEMBER, 10_000, last + 1, 0.0)
        got, update = self.state_machine.acquire(
            MEMBER, [(first, last)], 10_000, strict=True, batch_ends=(), now_ms=0.0
        )
        assert update is not None, got
        await self.persist(update)

    async def reject(self, first: int, last: int, reason: str = "it is poison") -> None:
        """Lease these and reject them."""
        await self.lease(first, last)
        rejections = [AcknowledgementBatch(first, last, bytes([REJECT]), reason=reason)]
        update = self.state_machine.acknowledge(MEMBER, rejections, 0.0, self.room.wall_ms(), 0.5)
        assert update is not None
        await self.persist(update)


class DeadLetterBench:
    """A running broker with a topic "t" and what looks after its dead letters."""

    def __init__(self, broker: Broker, persister: MemoryPersister) -> None:
        self.broker = broker
        self.service = broker.service
        self.persister = persister
        self.configs: dict[str, str] = {}  # of every group
        self.share_partitions: dict[ShareKey, Live] = {}
        self.made: list[int] = []
        self.appended: list[bytes] = []
        self.renew()

    def renew(self) -> None:
        """As after a crash of the process, but for the logs."""
        for share_partition in list(self.share_partitions.values()):
            share_partition.drop()
        service = self.service
        self.targets = DeadLetterTopics(
            node_id=service.settings.node_id,
            topics=service.topics,
            partitions=service.partitions,
            scheduler=service.scheduler,
            overrides=lambda _: self.configs,
            topic_name_prefix="dlq.",
            may_write=lambda _owner, _topic: True,
        )
        self.dead_letters = DeadLetterManager(
            targets=self.targets,
            topics=service.topics,
            partitions=service.partitions,
            new_producer_id=service.producer_ids.new_producer_id,
            clock=service.clock,
            scheduler=service.scheduler,
        )

    def wall_ms(self) -> int:
        return self.service.clock.wall_ms()

    async def topic(self, name: str = "t", partitions: int = 1, **configs: str) -> None:
        texts = [(name.replace("_", "."), value) for name, value in configs.items()]
        await self.service.topics.create(NewTopic(name, partitions, 1, configs=texts))

    def key(self, group: str = "g", topic: str = "t", index: int = 0) -> ShareKey:
        return ShareKey(group, self.service.topics.find(topic).topic_id.bytes, index)

    async def share_partition(self, group: str = "g", topic: str = "t", index: int = 0) -> Live:
        return await Live(self, self.key(group, topic, index)).load()

    def partition(self, topic: str = "t", index: int = 0) -> Partition:
        return self.service.partitions.find(topic, None, index)

    def partition_by_id(self, key: ShareKey) -> Partition:
        return self.service.partitions.find(None, key.topic_id, key.partition)

    async def write(self, *records: Any, topic: str = "t", index: int = 0, **options: Any) -> None:
        """Records as (key, value, headers), one batch."""
        now_ms = self.wall_ms()
        partition = self.partition(topic, index)
        batch = build_batch([(now_ms, *record) for record in records], **options)
        await partition.commit_promise(partition.append(batch).end_offset)

    def stored_dead_letters(self, topic: str = "dlq.t", index: int = 0) -> list[Record]:
        """All dead letters of one partition."""
        partition = self.service.partitions.get(topic, index)
        if partition is None:
            return []
        found: list[Record] = []
        for batch in partition.log.batches(partition.start_offset):
            for at, _ in iterate_batches(batch):
                assert at == 0
            found += read_records(batch, output_bytes_max=1 << 26)
        return found

    def dead(self, key: ShareKey) -> list[tuple[int, int]]:
        state = self.persister.state(key)
        return [] if state is None else [(each.first, each.last) for each in state.dead_ranges]


def headers(record: Record) -> dict[str, str]:
    return {name: (value or b"").decode() for name, value in record.headers}


def ids(records: Sequence[Record]) -> list[str]:
    return [headers(record)["mansio-dlq-id"] for record in records]


def expected_ids(key: ShareKey, offsets: Sequence[int], deliveries: int = 1) -> list[str]:
    uuid = base64.urlsafe_b64encode(key.topic_id).decode().rstrip("=")
    return [f"{key.group}/{uuid}/{key.partition}/{offset}/{deliveries}" for offset in offsets]


@asynccontextmanager
async def room_in(
    directory: Path, persister: MemoryPersister | None = None
) -> AsyncIterator[DeadLetterBench]:
    """A broker on this directory; the state of share partitions is the persister's."""
    settings = Settings(listeners="127.0.0.1:0", http_listener="", data_dir=str(directory))
    broker = Broker(settings)
    await broker.start()
    try:
        yield DeadLetterBench(broker, persister or MemoryPersister())
    finally:
        await broker.stop()
