"""How the dead letters of one share partition get into their topic: the steps of a batch, in the order that its queue
says.

Always true: nothing is appended before its place is stored, and nothing is called archived before its copy is
committed; after each wait it is made sure that the share partition is still led here.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final, Protocol
from uuid import UUID

from mansio.broker.coordinator.share import dead_letter_copies as copying
from mansio.errors import (
    InvalidProducerEpoch,
    InvalidProducerIdMapping,
    MansioError,
    MessageTooLarge,
    OutOfOrderSequence,
    UnknownProducerId,
    UnknownTopicId,
)
from mansio.logs import fields
from mansio.state.share_partition.dead_letters import DeadLetterQueue, Phase

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from mansio.broker.coordinator.share.dead_letter_copies import DeadLetterCopy
    from mansio.broker.coordinator.share.dead_letter_topics import DeadLetterTopics
    from mansio.broker.partition.partition_set import PartitionSet
    from mansio.broker.services.topics import TopicService
    from mansio.ports import Clock
    from mansio.state.share_partition.dead_letters import Batch, Reservations
    from mansio.state.share_partition.machine import SharePartition
    from mansio.state.share_partition.types import ArchivingRange, Producer, ShareKey, Update

logger = logging.getLogger(__name__)

PRODUCER_STATE_LOST: Final = (
    OutOfOrderSequence,
    UnknownProducerId,
    InvalidProducerEpoch,
    InvalidProducerIdMapping,
)
"""What a target says that does not know how far the producer was. The batch is not there."""

PRODUCER_FENCED: Final = (InvalidProducerEpoch, InvalidProducerIdMapping)
"""Of these: the next epoch would be refused as well, so it takes another producer."""


class DeadLetterSource(Protocol):
    """A share partition that is led here, as far as dead letters go."""

    @property
    def key(self) -> ShareKey: ...

    @property
    def state_machine(self) -> SharePartition: ...

    async def persist(self, update: Update) -> None:
        """Store an update of `state_machine` and settle it. Raises when that failed, or nobody knows: then
        `state_machine` is given up, and `DeadLetterManager.on_closed` is told."""

    def end(self, error: MansioError) -> None:
        """Give `state_machine` up, for the state to be loaded anew; `DeadLetterManager.on_closed` is told."""


class DeadLetterCounts:
    """In records but for `failures`, which are attempts."""

    __slots__ = ("failures", "omitted", "written")

    def __init__(self) -> None:
        self.written = 0
        self.omitted = 0
        self.failures = 0


class DeadLetterTask:
    """Those of one share partition. `ended`: it is led here no more; `last_error`: why the last attempt failed."""

    __slots__ = ("ended", "last_error", "queue", "share_partition", "topic")

    def __init__(self, share_partition: DeadLetterSource, topic: str, producer: Producer | None) -> None:
        """`topic`: the name of the one it is a partition of; `producer`: as it is stored."""
        self.share_partition = share_partition
        self.topic = topic
        self.queue = DeadLetterQueue(producer)
        self.ended = False
        self.last_error = ""

    def known(self) -> dict[str, Any]:
        """Which ones, for the log."""
        key = self.share_partition.key
        return {"group": key.group, "topic": self.topic, "partition": key.partition}

    def check(self) -> None:
        """After each wait: are they still ours?"""
        if self.ended:
            raise _Ended


class _Ended(MansioError):
    """The share partition is not led here any more."""


class DeadLetterWriter:
    """See the module."""

    def __init__(
        self,
        *,
        targets: DeadLetterTopics,
        topics: TopicService,
        partitions: PartitionSet,
        new_producer_id: Callable[[], Awaitable[int]],
        clock: Clock,
    ) -> None:
        self._targets = targets
        self._topics = topics
        self._partitions = partitions
        self._new_producer_id = new_producer_id
        self._clock = clock
        self.counts = DeadLetterCounts()

    async def next_batch(self, share: DeadLetterTask) -> None:
        """Bring the next batch into the topic, if there is none in hand; else that one."""
        copies = await self._place(share) if share.queue.needs_reservation else None
        batch = share.queue.next_batch(self._now_ms())
        if batch is None or share.ended:
            return
        try:
            await self._send(share, batch, copies)
        except MansioError:
            if share.queue.phase is Phase.SENDING:
                share.queue.failed(self._now_ms())
            raise

    async def _place(self, share: DeadLetterTask) -> list[DeadLetterCopy]:
        """Reserve places for the next records: as many as the target takes in one batch. Gives their copies."""
        share_partition, queue = share.share_partition, share.queue
        source = self._topics.find_by_id(UUID(bytes=share_partition.key.topic_id))
        target = await self._targets.find(share_partition.key.group, source, share_partition.key.partition)
        if queue.needs_producer:
            queue.set_producer(await self._new_producer_id())
        share.check()
        copies = self._read(share, queue.head(copying.RECORDS_MAX), target.bytes_max)
        await self._reserve(share, queue.reserve(target.topic_id, target.partition, len(copies)))
        return copies

    async def _reserve(self, share: DeadLetterTask, places: tuple[Producer, Reservations]) -> None:
        await share.share_partition.persist(share.share_partition.state_machine.reserve(*places))
        share.check()
        share.queue.reserved()

    async def _send(self, share: DeadLetterTask, batch: Batch, copies: list[DeadLetterCopy] | None) -> None:
        """Append a batch that has its places, if it is not there already; then say that it is."""
        queue, targets = share.queue, self._targets
        try:
            if not (self._may_be_forgotten(batch) and await targets.holds(batch, self._clock.wall_ms())):
                await self._append(share, batch, copies)
        except PRODUCER_STATE_LOST as error:
            if not (batch.repeated and await targets.holds(batch, self._clock.wall_ms())):
                await self._renumber(share, error)
                return
        except UnknownTopicId as error:
            await self._move(share, batch, error)
            return
        share.check()
        await share.share_partition.persist(share.share_partition.state_machine.archived(queue.written()))
        share.check()
        queue.finished()
        self.counts.written += batch.records
        if share.last_error:
            share.last_error = ""
            logger.info("dead letters written again", extra=fields(**share.known()))

    def _may_be_forgotten(self, batch: Batch) -> bool:
        return batch.may_be_unknown(self._clock.wall_ms()) or (
            batch.repeated and self._targets.is_unknown_producer(batch)
        )

    async def _append(self, share: DeadLetterTask, batch: Batch, copies: list[DeadLetterCopy] | None) -> None:
        target = self._targets.by_id(batch.topic_id, batch.partition)
        copies = copies or self._read(share, batch.letters)
        data, omitted = copying.batch_bytes(
            batch, copies, share.topic, self._clock.wall_ms(), target.bytes_max
        )
        if len(data) > target.bytes_max:
            raise MessageTooLarge(
                f"{target.topic}: not even {len(copies)} dead letters without their records fit into"
                f" max.message.bytes={target.bytes_max}"
            )
        await self._targets.append(target, data)
        self.counts.omitted += omitted

    def _read(
        self, share: DeadLetterTask, letters: Sequence[ArchivingRange], bytes_max: float = float("inf")
    ) -> list[DeadLetterCopy]:
        """The records of these letters, in their order."""
        key = share.share_partition.key
        ranges = [(each.first, each.last) for each in letters]
        if not self._targets.copied(key.group):
            return copying.without_records(ranges, copying.NOT_ASKED)
        try:
            partition = self._partitions.find(None, key.topic_id, key.partition)
        except UnknownTopicId:
            return copying.without_records(ranges, copying.GONE)
        return copying.read_copies(partition, ranges, bytes_max)

    async def _renumber(self, share: DeadLetterTask, error: MansioError) -> None:
        """The target lost what it knew of the producer: go on in a higher epoch, or as another producer."""
        self.note(share, error)
        taken = isinstance(error, PRODUCER_FENCED) or share.queue.needs_producer
        producer_id = await self._new_producer_id() if taken else -1
        share.check()
        await self._reserve(share, share.queue.fenced(producer_id))

    async def _move(self, share: DeadLetterTask, batch: Batch, error: MansioError) -> None:
        """The target is gone, with what was in it: go on in the one that there is now."""
        key = share.share_partition.key
        source = self._topics.find_by_id(UUID(bytes=key.topic_id))
        target = await self._targets.find(key.group, source, key.partition)
        share.check()
        if target.topic_id == batch.topic_id:  # it was not there for a moment
            raise error
        self.note(share, error)
        await self._reserve(share, share.queue.moved(target.topic_id, target.partition))

    def note(self, share: DeadLetterTask, error: MansioError) -> None:
        """An attempt failed."""
        self.counts.failures += 1
        share.last_error = error.message
        known = fields(**share.known(), records=share.queue.waiting, reason=error)
        logger.warning("dead letter not written", extra=known)

    def _now_ms(self) -> float:
        return self._clock.monotonic() * 1000
