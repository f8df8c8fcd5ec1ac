"""Dead letters of share groups: writes copies of records that were given up to the dead-letter topics.

Each share partition led here has a `DeadLetterTask` with a `DeadLetterQueue`, which decides the next step, and a
running task while there is something to do: find or create the topic, reserve sequences in it, read the records,
append their copies, store that they are committed. Failures are retried without limit, after 1 s, 2 s, up to a
minute, and at once when the target or the settings of the group change. Each failure is reported in the log, in
`/metrics` and in the description of the group.

Invariants:
* Nothing is appended before its reservation is stored, and no record is archived before its copy is committed. After
  each wait the task checks that the share partition is still led here.
* After any failure the same batch is sent again, and the target recognises it.
* At most `WRITERS_MAX` share partitions have records in memory.

Source: KIP-1191. Exactly once by the sequences of an idempotent producer (KIP-98): see
`state.share_partition.dead_letters`.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import TYPE_CHECKING, Any, Final, Protocol
from uuid import UUID

from mansio.broker.coordinator.share import dead_letter_copies as copying
from mansio.broker.coordinator.share.dead_letter_topics import DeadLetterTopics
from mansio.errors import (
    CoordinatorNotAvailable,
    InvalidProducerEpoch,
    InvalidProducerIdMapping,
    MansioError,
    MessageTooLarge,
    OutOfOrderSequence,
    UnknownProducerId,
    UnknownTopicId,
)
from mansio.logs import fields
from mansio.state.share_partition.dead_letters import RETRY_MS_MAX, RETRY_MS_MIN, DeadLetterQueue, Phase

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from mansio.broker.coordinator.share.dead_letter_copies import DeadLetterCopy
    from mansio.broker.partition.partition_set import PartitionSet
    from mansio.broker.services.producer_ids import ProducerIdAllocator
    from mansio.broker.services.topics import TopicService
    from mansio.config.settings import Settings
    from mansio.host.host_ports import HostPorts
    from mansio.metadata.model import TopicChange
    from mansio.ports import Clock, Peers, Promise, Scheduler
    from mansio.state.share_partition.dead_letters import DeadLetterBatch, Reservations
    from mansio.state.share_partition.machine import SharePartition
    from mansio.state.share_partition.types import ArchivingRange, Producer, ShareKey, Update


logger = logging.getLogger(__name__)

WRITERS_MAX: Final = 16

PRODUCER_STATE_LOST: Final = (
    OutOfOrderSequence,
    UnknownProducerId,
    InvalidProducerEpoch,
    InvalidProducerIdMapping,
)
"""Errors of a target that lost the state of the producer. The batch is not in the log."""

PRODUCER_FENCED: Final = (InvalidProducerEpoch, InvalidProducerIdMapping)
"""Of these, errors after which the next epoch would be refused as well: they need another producer id."""


class DeadLetterSource(Protocol):
    """The leader of a share partition, as used here."""

    @property
    def key(self) -> ShareKey: ...

    @property
    def state_machine(self) -> SharePartition: ...

    async def persist(self, update: Update) -> None:
        """Store an update of `state_machine` and report it. If it fails, or its outcome is unknown, it raises,
        `state_machine` is discarded and `DeadLetterManager.on_closed` is called."""

    def end(self, error: MansioError) -> None:
        """Discard `state_machine`, so that the state is loaded again; calls `DeadLetterManager.on_closed`."""


class DeadLetterCounts:
    """Numbers of records, and of failed attempts (`failures`)."""

    __slots__ = ("failures", "omitted", "written")

    def __init__(self) -> None:
        self.written = 0
        self.omitted = 0
        self.failures = 0


class _Ended(MansioError):
    """The share partition is not led here any more."""


class DeadLetterTask:
    """Dead letters of one share partition, and the state of the task that writes them.

    `ended`: the share partition is not led here any more; `last_error`: why the last attempt failed, "" for none.
    """

    __slots__ = (
        "_wake",
        "backoff_ms",
        "ended",
        "is_working",
        "last_error",
        "queue",
        "share_partition",
        "topic",
    )

    def __init__(self, share_partition: DeadLetterSource, topic: str, producer: Producer | None) -> None:
        """`topic`: name of its topic; `producer`: as stored."""
        self.share_partition = share_partition
        self.topic = topic
        self.queue = DeadLetterQueue(producer)
        self.ended = False
        self.last_error = ""
        self.is_working = False
        self.backoff_ms = RETRY_MS_MIN
        self._wake: Promise[None] | None = None

    def log_fields(self) -> dict[str, Any]:
        """Identifies the share partition in the log."""
        key = self.share_partition.key
        return {"group": key.group, "topic": self.topic, "partition": key.partition}

    def check(self) -> None:
        """Called after each wait; raises if the share partition has ended."""
        if self.ended:
            raise _Ended

    def end(self) -> None:
        """The share partition is not led here any more."""
        self.ended = True
        self.wake()

    def retry_now(self) -> None:
        """Skip the backoff: the cause of the failure may be gone."""
        self.backoff_ms = RETRY_MS_MIN
        self.queue.retry_now()
        self.wake()

    def wake(self) -> None:
        """End a backoff."""
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    async def back_off(self, scheduler: Scheduler, delay_ms: float) -> None:
        """Wait for the delay, or until `wake`."""
        if delay_ms <= 0 or self.ended:
            return
        wake = self._wake = scheduler.promise()
        timer = scheduler.call_later(delay_ms, self.wake)
        try:
            await wake
        finally:
            timer.cancel()


class DeadLetterWriter:
    """Writes the batches of a task: the steps of one batch in the order of its queue."""

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
        """Write the current batch, or the next one, to its topic."""
        copies = await self._plan(share) if share.queue.needs_reservation else None
        batch = share.queue.next_batch(self._now_ms())
        if batch is None or share.ended:
            return
        try:
            await self._send(share, batch, copies)
        except MansioError:
            if share.queue.phase is Phase.SENDING:
                share.queue.mark_failed(self._now_ms())
            raise

    async def _plan(self, share: DeadLetterTask) -> list[DeadLetterCopy]:
        """Reserve sequences for the next records, as many as the target accepts in one batch; returns their copies."""
        share_partition, queue = share.share_partition, share.queue
        source = self._topics.find_by_id(UUID(bytes=share_partition.key.topic_id))
        target = await self._targets.find(share_partition.key.group, source, share_partition.key.partition)
        if queue.needs_producer:
            queue.set_producer(await self._new_producer_id())
        share.check()
        copies = self._read(share, queue.peek(copying.RECORDS_MAX), target.bytes_max)
        await self._reserve(share, queue.reserve(target.topic_id, target.partition, len(copies)))
        return copies

    async def _reserve(self, share: DeadLetterTask, reserved: tuple[Producer, Reservations]) -> None:
        await share.share_partition.persist(share.share_partition.state_machine.reserve(*reserved))
        share.check()
        share.queue.mark_reserved()

    async def _send(
        self, share: DeadLetterTask, batch: DeadLetterBatch, copies: list[DeadLetterCopy] | None
    ) -> None:
        """Append a reserved batch unless it is in the log already, and store that its copies are committed."""
        queue, targets = share.queue, self._targets
        try:
            if not (self._may_be_unknown(batch) and await targets.holds(batch, self._clock.wall_ms())):
                await self._append(share, batch, copies)
        except PRODUCER_STATE_LOST as error:
            if not (batch.is_repeat and await targets.holds(batch, self._clock.wall_ms())):
                await self._renumber(share, error)
                return
        except UnknownTopicId as error:
            await self._move(share, batch, error)
            return
        share.check()
        await share.share_partition.persist(
            share.share_partition.state_machine.mark_archived(queue.mark_written())
        )
        share.check()
        queue.mark_finished()
        self.counts.written += batch.record_count
        if share.last_error:
            share.last_error = ""
            logger.info("dead_letters_written_again", extra=fields(**share.log_fields()))

    def _may_be_unknown(self, batch: DeadLetterBatch) -> bool:
        return batch.may_be_unrecognized(self._clock.wall_ms()) or (
            batch.is_repeat and self._targets.is_unknown_producer(batch)
        )

    async def _append(
        self, share: DeadLetterTask, batch: DeadLetterBatch, copies: list[DeadLetterCopy] | None
    ) -> None:
        target = self._targets.by_id(batch.topic_id, batch.partition)
        copies = copies or self._read(share, batch.ranges)
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
        self, share: DeadLetterTask, ranges: Sequence[ArchivingRange], bytes_max: float = float("inf")
    ) -> list[DeadLetterCopy]:
        """Copies of the records of these ranges, in their order."""
        key = share.share_partition.key
        offsets = [(each.first, each.last) for each in ranges]
        if not self._targets.copied(key.group):
            return copying.without_records(offsets, copying.NOT_ASKED)
        try:
            partition = self._partitions.find(None, key.topic_id, key.partition)
        except UnknownTopicId:
            return copying.without_records(offsets, copying.GONE)
        return copying.read_copies(partition, offsets, bytes_max)

    async def _renumber(self, share: DeadLetterTask, error: MansioError) -> None:
        """The target lost the producer state: continue in a higher epoch, or with another producer id."""
        self.note(share, error)
        taken = isinstance(error, PRODUCER_FENCED) or share.queue.needs_producer
        producer_id = await self._new_producer_id() if taken else -1
        share.check()
        await self._reserve(share, share.queue.reserve_in_new_epoch(producer_id))

    async def _move(self, share: DeadLetterTask, batch: DeadLetterBatch, error: MansioError) -> None:
        """The target topic was deleted: continue with the current one."""
        key = share.share_partition.key
        source = self._topics.find_by_id(UUID(bytes=key.topic_id))
        target = await self._targets.find(key.group, source, key.partition)
        share.check()
        if target.topic_id == batch.topic_id:  # it was missing only temporarily
            raise error
        self.note(share, error)
        await self._reserve(share, share.queue.reserve_in_new_target(target.topic_id, target.partition))

    def note(self, share: DeadLetterTask, error: MansioError) -> None:
        """Record a failed attempt."""
        self.counts.failures += 1
        share.last_error = error.message
        log = fields(**share.log_fields(), records=share.queue.waiting_record_count, reason=error)
        logger.warning("dead_letter_not_written", extra=log)

    def _now_ms(self) -> float:
        return self._clock.monotonic() * 1000


class DeadLetterManager:
    """All methods run on the broker's event loop."""

    def __init__(
        self,
        *,
        targets: DeadLetterTopics,
        topics: TopicService,
        partitions: PartitionSet,
        new_producer_id: Callable[[], Awaitable[int]],
        clock: Clock,
        scheduler: Scheduler,
    ) -> None:
        self._targets = targets
        self._topics = topics
        self._clock = clock
        self._scheduler = scheduler
        self._shares: dict[ShareKey, DeadLetterTask] = {}
        self._writers = 0
        self._turns: deque[Promise[None]] = deque()
        self._closed = False
        self._sending = DeadLetterWriter(
            targets=targets,
            topics=topics,
            partitions=partitions,
            new_producer_id=new_producer_id,
            clock=clock,
        )
        self.counts = self._sending.counts

    # ------------------------------------------------------------------ events

    def on_loaded(self, share_partition: DeadLetterSource, producer: Producer | None) -> None:
        """The share partition is led here; its archiving ranges are resumed. `producer`: as stored."""
        if (before := self._shares.get(share_partition.key)) is not None:
            before.end()
        topic = self._topics.state.topics_by_id.get(UUID(bytes=share_partition.key.topic_id))
        share = self._shares[share_partition.key] = DeadLetterTask(
            share_partition, "" if topic is None else topic.name, producer
        )
        self._add(share, share_partition.state_machine.archiving_ranges())

    def add(self, share_partition: DeadLetterSource, ranges: Sequence[ArchivingRange]) -> None:
        """Ranges to be dead-lettered, stored as such."""
        share = self._shares.get(share_partition.key)
        if share is not None and share.share_partition is share_partition:
            self._add(share, ranges)

    def _add(self, share: DeadLetterTask, ranges: Sequence[ArchivingRange]) -> None:
        for archiving_range in ranges:
            share.queue.add(archiving_range)
        if ranges and not share.is_working and not self._closed:
            share.is_working = True
            key = share.share_partition.key
            name = f"dead letters of group {key.group}, partition {key.partition}"
            self._scheduler.spawn(self._work(share), name=name)

    def on_closed(self, share_partition: DeadLetterSource) -> None:
        """The share partition is not led here any more, or its state is loaded again."""
        share = self._shares.get(share_partition.key)
        if share is not None and share.share_partition is share_partition:
            del self._shares[share_partition.key]
            share.end()
            is_deleted = UUID(bytes=share_partition.key.topic_id) not in self._topics.state.topics_by_id
            if is_deleted and share.queue.waiting_record_count:
                log = fields(**share.log_fields(), records=share.queue.waiting_record_count)
                logger.warning("dead_letters_abandoned_topic_deleted", extra=log)

    def topic_changed(self, change: TopicChange) -> None:
        """Retry failed tasks of this topic: it may exist now, have a leader, or accept the batch."""
        names = [topic.name for topic in (change.before, change.after) if topic is not None]
        for share in self._shares.values():
            if (
                share.last_error
                and self._targets.name_of(share.share_partition.key.group, share.topic) in names
            ):
                share.retry_now()

    def settings_changed(self, group: str) -> None:
        """Retry failed tasks of the group: its settings may have another target."""
        for share in self._shares.values():
            if share.last_error and share.share_partition.key.group == group:
                share.retry_now()

    def close(self) -> None:
        """Stop all tasks."""
        self._closed = True
        for share in self._shares.values():
            share.end()
        self._shares.clear()

    # ------------------------------------------------------------------ inspection

    @property
    def waiting(self) -> int:
        """Number of records without a copy, of all share partitions led here."""
        return sum(share.queue.waiting_record_count for share in self._shares.values())

    def failing(self) -> list[tuple[ShareKey, int, str]]:
        """Share partitions whose last attempt failed: number of waiting records, and the error."""
        return [
            (key, share.queue.waiting_record_count, share.last_error)
            for key, share in self._shares.items()
            if share.last_error
        ]

    def last_error_of(self, key: ShareKey) -> str:
        """The last error of a share partition; "" for none."""
        share = self._shares.get(key)
        return "" if share is None else share.last_error

    # ------------------------------------------------------------------ tasks

    async def _work(self, share: DeadLetterTask) -> None:
        try:
            while not share.ended and await self._step(share):
                pass
        except Exception as error:  # a defect: the queue is in a phase that does not continue by itself
            log = fields(**share.log_fields(), records=share.queue.waiting_record_count, reason=error)
            logger.error("dead_letters_failed", extra=log, exc_info=error)
            share.share_partition.end(CoordinatorNotAvailable(f"dead letters failed: {error!r}"))
        finally:
            share.is_working = False

    async def _step(self, share: DeadLetterTask) -> bool:
        """Do the next step. Returns False if there is none, or the share partition has ended."""
        queue = share.queue
        if queue.phase is Phase.READY:
            await share.back_off(self._scheduler, queue.retry_at_ms - self._now_ms())
        elif not queue.needs_reservation:
            return False
        try:
            await self._with_writer(share)
        except MansioError as error:
            if share.ended or queue.phase not in (Phase.OPEN, Phase.READY):
                return False  # the state could not be stored: it is loaded again, and resumed then
            self._sending.note(share, error)
            if queue.phase is Phase.OPEN:
                await share.back_off(self._scheduler, share.backoff_ms)
                share.backoff_ms = min(2 * share.backoff_ms, RETRY_MS_MAX)
        else:
            share.backoff_ms = RETRY_MS_MIN
        return True

    # Taking turns, resting

    async def _with_writer(self, share: DeadLetterTask) -> None:
        if self._writers >= WRITERS_MAX:
            turn: Promise[None] = self._scheduler.promise()
            self._turns.append(turn)
            await turn
        else:
            self._writers += 1
        try:
            if not share.ended:
                await self._sending.next_batch(share)
        finally:
            while self._turns and self._turns[0].done():  # the waiter was cancelled
                self._turns.popleft()
            if self._turns:
                self._turns.popleft().set_result(None)
            else:
                self._writers -= 1

    def _now_ms(self) -> float:
        return self._clock.monotonic() * 1000


def dead_letters(
    settings: Settings,
    host_ports: HostPorts,
    *,
    topics: TopicService,
    partitions: PartitionSet,
    producer_ids: ProducerIdAllocator,
    overrides: Callable[[str], Mapping[str, str]],
    peers: Peers | None = None,
) -> DeadLetterManager:
    """Dead letters of one broker. `overrides`: settings of a group; `peers`: connections to other brokers on which no
    request waits for long, None on a single node."""
    targets = DeadLetterTopics(
        node_id=settings.node_id,
        topics=topics,
        partitions=partitions,
        scheduler=host_ports.scheduler,
        overrides=overrides,
        prefix=settings.errors_deadletterqueue_topic_name_prefix,
        peers=peers,
    )
    return DeadLetterManager(
        targets=targets,
        topics=topics,
        partitions=partitions,
        new_producer_id=producer_ids.new_producer_id,
        clock=host_ports.clock,
        scheduler=host_ports.scheduler,
    )
