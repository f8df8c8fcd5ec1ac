"""Writer of dead-letter topics: it copies rejected and too often delivered records of share groups to these topics.

Each share partition led by this broker has a `DeadLetterTask`. Its `DeadLetterQueue` decides the next step: find or
create the dead-letter topic, reserve sequences in it, read the records, append the copies, store in the share state
that the copies are committed. A failed step is retried without limit, after 1 s, 2 s and so on up to 60 s, and at once
when the dead-letter topic or the settings of the group change. Each failure is reported in the log, in `/metrics` and
in the description of the group.

Invariants:
* No copy is appended before its reservation is stored, and no record is archived before its copy is committed. After
  each wait the task checks that this broker still leads the share partition.
* After any failure the same batch is sent again, and the dead-letter topic recognizes it as a repeated one.
* At most `WRITERS_MAX` share partitions have copies in memory.

Each batch costs three flushes, for which the acknowledgements of the group wait, too. So while records are rejected one
after the other, the batches of a share partition begin at least `LINGER_MS` apart, unless one is full; a single dead
letter does not wait.

Source: KIP-1191. Copies are written exactly once by means of the sequences of an idempotent producer (KIP-98): see
`state.share_partition.dead_letters`.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections import deque
from typing import TYPE_CHECKING, Any, Final, Protocol
from uuid import UUID

from mansio.backoff import grown_delay
from mansio.broker.coordinator.share import dead_letter_copies as copying
from mansio.broker.coordinator.share.dead_letter_topics import DeadLetterTopics
from mansio.config.topic_names import unified_name
from mansio.errors import (
    CoordinatorNotAvailable,
    InvalidProducerEpoch,
    InvalidProducerIdMapping,
    MansioError,
    MessageTooLarge,
    OutOfOrderSequence,
    TopicAuthorizationFailed,
    UnknownProducerId,
    UnknownTopicId,
)
from mansio.logs import fields
from mansio.state.share_partition.dead_letters import RETRY_MS_MAX, RETRY_MS_MIN, DeadLetterQueue, Phase
from mansio.tracebacks import copied

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from mansio.broker.coordinator.share.dead_letter_copies import DeadLetterCopy
    from mansio.broker.partition.partition_set import PartitionSet
    from mansio.broker.topics.topics import TopicService
    from mansio.config.settings import Settings
    from mansio.host.host_ports import HostPorts
    from mansio.metadata.model import TopicChange
    from mansio.metadata.producer_ids import ProducerIdAllocator
    from mansio.ports import Clock, Peers, Promise, Scheduler
    from mansio.state.share_partition.dead_letters import DeadLetterBatch, Reservations
    from mansio.state.share_partition.machine import SharePartition
    from mansio.state.share_partition.types import ArchivingRange, Producer, ShareKey, Update


logger = logging.getLogger(__name__)

WRITERS_MAX: Final = 16
"""Maximum number of share partitions whose dead letters are written at the same time."""

LINGER_MS: Final = 100.0
"""Time after the end of a batch for which a share partition collects records for the next one, if it is not full."""

PRODUCER_STATE_LOST: Final = (
    OutOfOrderSequence,
    UnknownProducerId,
    InvalidProducerEpoch,
    InvalidProducerIdMapping,
)
"""Errors of a dead-letter topic that lost the producer's state. The batch was not appended."""

PRODUCER_FENCED: Final = (InvalidProducerEpoch, InvalidProducerIdMapping)
"""The errors in `PRODUCER_STATE_LOST` after which a higher producer epoch is refused, too; a new producer id is needed.
"""


class DeadLetterSource(Protocol):
    """The part of `SharePartitionLeader` that dead-letter tasks use."""

    @property
    def key(self) -> ShareKey: ...

    @property
    def state_machine(self) -> SharePartition: ...

    async def persist(self, update: Update) -> None:
        """Store an update of `state_machine` and report to `state_machine` that it is stored.

        If storing fails or its outcome is unknown, this method discards `state_machine`, calls
        `DeadLetterManager.on_closed` and raises the error."""

    def end(self, error: MansioError) -> None:
        """Discard `state_machine`, so that the state is loaded again, and call `DeadLetterManager.on_closed`."""


class DeadLetterCounts:
    """Numbers of copies written, of values omitted because they were too large, and of failed attempts."""

    __slots__ = ("failure_count", "omitted_count", "written_count")

    def __init__(self) -> None:
        self.written_count = 0
        self.omitted_count = 0
        self.failure_count = 0


class _TaskEnded(MansioError):
    """Raised in a task whose share partition is not led by this broker any more."""


class DeadLetterTask:
    """The dead letters of one share partition, and the state of the task that writes them.

    `has_ended`: this broker does not lead the share partition any more. `last_error`: message of the error with which
    the last attempt failed, "" after a successful one; `is_refused`: it may not write to the topic. `linger_until_ms`:
    time of the steady clock before which the next batch begins only if it is full. `failure_count`: consecutive
    failures before a batch was reserved.
    """

    __slots__ = (
        "_wake",
        "failure_count",
        "has_ended",
        "is_lingering",
        "is_refused",
        "is_working",
        "last_error",
        "linger_until_ms",
        "queue",
        "share_partition",
        "topic",
    )

    def __init__(self, share_partition: DeadLetterSource, topic: str, producer: Producer | None) -> None:
        """`topic`: name of the topic with the records; `producer`: the producer in the share state, if any."""
        self.share_partition = share_partition
        self.topic = topic
        self.queue = DeadLetterQueue(producer)
        self.has_ended = False
        self.last_error = ""
        self.is_refused = False
        self.is_working = False
        self.is_lingering = False
        self.failure_count = 0
        self.linger_until_ms = -math.inf
        self._wake: Promise[None] | None = None

    def log_fields(self) -> dict[str, Any]:
        """Return the fields that identify the share partition in log events."""
        key = self.share_partition.key
        return {"group": key.group, "topic": self.topic, "partition": key.partition}

    def ensure_not_ended(self) -> None:
        """Raise `_TaskEnded` if the task has ended; called after each wait."""
        if self.has_ended:
            raise _TaskEnded

    def end(self) -> None:
        """Let the task stop at its next step, because this broker does not lead the share partition any more."""
        self.has_ended = True
        self.wake()

    def retry_now(self) -> None:
        """End the backoff and reset it to the minimum, because the cause of the failure may be removed."""
        self.failure_count = 0
        self.queue.retry_now()
        self.wake()

    def wake(self) -> None:
        """End the current backoff, if there is one."""
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    async def back_off(self, scheduler: Scheduler, delay_ms: float) -> None:
        """Wait for the delay in milliseconds, or until `wake` is called."""
        if delay_ms <= 0 or self.has_ended:
            return
        wake = self._wake = scheduler.promise()
        timer = scheduler.call_later(delay_ms, self.wake)
        try:
            await wake
        finally:
            timer.cancel()


class DeadLetterWriter:
    """Writes the batches of dead-letter tasks, each in the steps that the `DeadLetterQueue` of the task requires."""

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

    async def write_next_batch(self, task: DeadLetterTask) -> None:
        """Write the task's unfinished batch, or else its next batch, to the dead-letter topic."""
        copies = await self._reserve_next_batch(task) if task.queue.needs_reservation else None
        batch = task.queue.next_batch(self._now_ms())
        if batch is None or task.has_ended:
            return
        try:
            await self._send(task, batch, copies)
        except MansioError:
            if task.queue.phase is Phase.SENDING:
                task.queue.mark_failed(self._now_ms())
            raise

    async def _reserve_next_batch(self, task: DeadLetterTask) -> list[DeadLetterCopy]:
        """Reserve sequences for as many of the next records as fit into one batch; return the copies of the records."""
        share_partition, queue = task.share_partition, task.queue
        source = self._topics.find_by_id(UUID(bytes=share_partition.key.topic_id))
        target = await self._targets.find(share_partition.key.group, source, share_partition.key.partition)
        if queue.needs_producer:
            queue.set_producer(await self._new_producer_id())
        task.ensure_not_ended()
        copies = self._read(task, queue.peek(copying.COPIES_MAX), target.bytes_max)
        await self._reserve(task, queue.reserve(target.topic_id, target.partition, len(copies)))
        return copies

    async def _reserve(self, task: DeadLetterTask, reserved: tuple[Producer, Reservations]) -> None:
        await task.share_partition.persist(task.share_partition.state_machine.reserve(*reserved))
        task.ensure_not_ended()
        task.queue.mark_reserved()

    async def _send(
        self, task: DeadLetterTask, batch: DeadLetterBatch, copies: list[DeadLetterCopy] | None
    ) -> None:
        """Append a reserved batch unless the topic contains it already; store that its copies are committed."""
        queue, targets = task.queue, self._targets
        try:
            if not (
                self._may_be_unrecognized(batch) and await targets.contains(batch, self._clock.wall_ms())
            ):
                await self._append(task, batch, copies)
        except PRODUCER_STATE_LOST as error:
            if not (batch.is_repeat and await targets.contains(batch, self._clock.wall_ms())):
                await self._reserve_in_new_epoch(task, error)
                return
        except UnknownTopicId as error:
            await self._reserve_in_new_target(task, batch, error)
            return
        task.ensure_not_ended()
        await task.share_partition.persist(
            task.share_partition.state_machine.mark_archived(queue.mark_written())
        )
        task.ensure_not_ended()
        queue.mark_finished()
        task.linger_until_ms = self._now_ms() + LINGER_MS
        self.counts.written_count += batch.record_count
        task.is_refused = False
        if task.last_error:
            task.last_error = ""
            logger.info("dead_letters_written_again", extra=fields(**task.log_fields()))

    def _may_be_unrecognized(self, batch: DeadLetterBatch) -> bool:
        return batch.may_be_unrecognized(self._clock.wall_ms()) or (
            batch.is_repeat and self._targets.is_unknown_producer(batch)
        )

    async def _append(
        self, task: DeadLetterTask, batch: DeadLetterBatch, copies: list[DeadLetterCopy] | None
    ) -> None:
        target = self._targets.find_by_id(batch.topic_id, batch.partition)
        self._targets.check_owner(task.share_partition.key.group, target.topic)
        copies = copies or self._read(task, batch.ranges)
        data, omitted = copying.encode_dead_letter_batch(
            batch, copies, task.topic, self._clock.wall_ms(), target.bytes_max
        )
        if len(data) > target.bytes_max:
            raise MessageTooLarge(
                f"{target.topic}: not even {len(copies)} dead letters without their records fit into"
                f" max.message.bytes={target.bytes_max}"
            )
        await self._targets.append(target, data)
        self.counts.omitted_count += omitted

    def _read(
        self, task: DeadLetterTask, ranges: Sequence[ArchivingRange], bytes_max: float = float("inf")
    ) -> list[DeadLetterCopy]:
        """Return the copies of the records of the ranges, in order, as many as fit into `bytes_max`."""
        key = task.share_partition.key
        offsets = [(each.first, each.last) for each in ranges]
        if not self._targets.copies_records(key.group):
            return copying.copies_without_records(offsets, copying.REASON_COPY_DISABLED)
        try:
            partition = self._partitions.find(None, key.topic_id, key.partition)
        except UnknownTopicId:
            return copying.copies_without_records(offsets, copying.REASON_DELETED)
        return copying.read_copies(partition, offsets, bytes_max)

    async def _reserve_in_new_epoch(self, task: DeadLetterTask, error: MansioError) -> None:
        """Reserve a higher producer epoch or a new producer id, after the topic has lost the producer's state."""
        self.record_failure(task, error)
        taken = isinstance(error, PRODUCER_FENCED) or task.queue.needs_producer
        producer_id = await self._new_producer_id() if taken else -1
        task.ensure_not_ended()
        await self._reserve(task, task.queue.reserve_in_new_epoch(producer_id))

    async def _reserve_in_new_target(
        self, task: DeadLetterTask, batch: DeadLetterBatch, error: MansioError
    ) -> None:
        """Reserve the batch in the current dead-letter topic of the group, after the former one was deleted."""
        key = task.share_partition.key
        source = self._topics.find_by_id(UUID(bytes=key.topic_id))
        target = await self._targets.find(key.group, source, key.partition)
        task.ensure_not_ended()
        if target.topic_id == batch.topic_id:  # it was missing only temporarily
            raise copied(error)
        self.record_failure(task, error)
        await self._reserve(task, task.queue.reserve_in_new_target(target.topic_id, target.partition))

    def record_failure(self, task: DeadLetterTask, error: MansioError) -> None:
        """Count and log a failed attempt, and keep its error as `last_error` of the task."""
        self.counts.failure_count += 1
        task.last_error = error.message
        task.is_refused = isinstance(error, TopicAuthorizationFailed)
        log = fields(**task.log_fields(), records=task.queue.waiting_record_count, reason=error)
        logger.warning("dead_letter_not_written", extra=log)

    def _now_ms(self) -> float:
        return self._clock.monotonic() * 1000


class DeadLetterManager:
    """Dead-letter tasks of all share partitions led by this broker. All methods run on the broker's event loop."""

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
        self._tasks: dict[ShareKey, DeadLetterTask] = {}
        self._active_writer_count = 0
        self._waiting_for_writer: deque[Promise[None]] = deque()
        self._closed = False
        self._writer = DeadLetterWriter(
            targets=targets,
            topics=topics,
            partitions=partitions,
            new_producer_id=new_producer_id,
            clock=clock,
        )
        self.counts = self._writer.counts

    # ------------------------------------------------------------------ events

    def on_loaded(self, share_partition: DeadLetterSource, producer: Producer | None) -> None:
        """Start a task that copies the ARCHIVING records of a share partition to the dead-letter topic, after this
        broker has loaded its state.

        `producer`: producer id, epoch and sequences stored in that state; None if there are none."""
        if (before := self._tasks.get(share_partition.key)) is not None:
            before.end()
        topic = self._topics.state.topics_by_id.get(UUID(bytes=share_partition.key.topic_id))
        task = self._tasks[share_partition.key] = DeadLetterTask(
            share_partition, "" if topic is None else topic.name, producer
        )
        self._add(task, share_partition.state_machine.archiving_ranges())

    def add(self, share_partition: DeadLetterSource, ranges: Sequence[ArchivingRange]) -> None:
        """Add ranges that have to be dead-lettered; the share state contains them as archiving."""
        task = self._tasks.get(share_partition.key)
        if task is not None and task.share_partition is share_partition:
            self._add(task, ranges)

    def _add(self, task: DeadLetterTask, ranges: Sequence[ArchivingRange]) -> None:
        for archiving_range in ranges:
            task.queue.add(archiving_range)
        if task.is_lingering and task.queue.unreserved_record_count >= copying.COPIES_MAX:
            task.wake()
        if ranges and not task.is_working and not self._closed:
            task.is_working = True
            key = task.share_partition.key
            name = f"dead letters of group {key.group}, partition {key.partition}"
            self._scheduler.spawn(self._run(task), name=name)

    def on_closed(self, share_partition: DeadLetterSource) -> None:
        """End the task, because this broker does not lead the share partition any more, or loads its state again."""
        task = self._tasks.get(share_partition.key)
        if task is not None and task.share_partition is share_partition:
            del self._tasks[share_partition.key]
            task.end()
            is_deleted = UUID(bytes=share_partition.key.topic_id) not in self._topics.state.topics_by_id
            if is_deleted and task.queue.waiting_record_count:
                log = fields(**task.log_fields(), records=task.queue.waiting_record_count)
                logger.warning("dead_letters_abandoned_topic_deleted", extra=log)

    def handle_topic_change(self, change: TopicChange) -> None:
        """Retry failed tasks of a dead-letter topic whose metadata or settings changed."""
        names = {unified_name(topic.name) for topic in (change.before, change.after) if topic is not None}
        for task in self._tasks.values():
            if not task.last_error:
                continue
            name = self._targets.dead_letter_topic_name(task.share_partition.key.group, task.topic)
            if unified_name(name) in names:
                task.retry_now()

    def handle_acl_change(self) -> None:
        """Retry failed tasks whose dead-letter topic was refused to its owner, if it may write to it now."""
        for task in self._tasks.values():
            if not task.is_refused:
                continue
            group = task.share_partition.key.group
            with contextlib.suppress(TopicAuthorizationFailed):
                self._targets.check_owner(group, self._targets.dead_letter_topic_name(group, task.topic))
                task.retry_now()

    def handle_settings_change(self, group: str) -> None:
        """Retry failed tasks of a group whose settings changed; they may name another dead-letter topic."""
        for task in self._tasks.values():
            if task.last_error and task.share_partition.key.group == group:
                task.retry_now()

    def close(self) -> None:
        """End all tasks."""
        self._closed = True
        for task in self._tasks.values():
            task.end()
        self._tasks.clear()

    # ------------------------------------------------------------------ inspection

    @property
    def waiting_record_count(self) -> int:
        """The number of records, of all share partitions led by this broker, whose copy is not committed yet."""
        return sum(task.queue.waiting_record_count for task in self._tasks.values())

    def failing_share_partitions(self) -> list[tuple[ShareKey, int, str]]:
        """Return key, number of waiting records and last error of share partitions whose last attempt failed."""
        return [
            (key, task.queue.waiting_record_count, task.last_error)
            for key, task in self._tasks.items()
            if task.last_error
        ]

    def last_error_of(self, key: ShareKey) -> str:
        """Return the message of the error with which the last attempt of a share partition failed, "" for none."""
        task = self._tasks.get(key)
        return "" if task is None else task.last_error

    # ------------------------------------------------------------------ tasks

    async def _run(self, task: DeadLetterTask) -> None:
        try:
            while not task.has_ended and await self._do_next_step(task):
                pass
        except Exception as error:  # a defect: the queue is in a phase that does not continue by itself
            log = fields(**task.log_fields(), records=task.queue.waiting_record_count, reason=error)
            logger.error("dead_letters_failed", extra=log, exc_info=error)
            task.share_partition.end(CoordinatorNotAvailable(f"dead letters failed: {error!r}"))
        finally:
            task.is_working = False

    async def _do_next_step(self, task: DeadLetterTask) -> bool:
        """Do the next step of a task. Returns False if there is none, or if the task has ended."""
        queue = task.queue
        if queue.phase is Phase.READY:
            await task.back_off(self._scheduler, queue.retry_at_ms - self._now_ms())
        elif not queue.needs_reservation:
            return False
        elif queue.unreserved_record_count < copying.COPIES_MAX:
            task.is_lingering = True
            await task.back_off(self._scheduler, task.linger_until_ms - self._now_ms())
            task.is_lingering = False
        try:
            await self._write_in_turn(task)
        except MansioError as error:
            if task.has_ended or queue.phase not in (Phase.OPEN, Phase.READY):
                return False  # the state could not be stored: it is loaded again, and resumed then
            self._writer.record_failure(task, error)
            if queue.phase is Phase.OPEN:
                task.failure_count += 1
                delay_ms = grown_delay(task.failure_count, RETRY_MS_MIN, RETRY_MS_MAX)
                await task.back_off(self._scheduler, delay_ms)
        else:
            task.failure_count = 0
        return True

    async def _write_in_turn(self, task: DeadLetterTask) -> None:
        """Write a batch of the task once fewer than `WRITERS_MAX` other tasks are writing."""
        if self._active_writer_count >= WRITERS_MAX:
            turn: Promise[None] = self._scheduler.promise()
            self._waiting_for_writer.append(turn)
            await turn
        else:
            self._active_writer_count += 1
        try:
            if not task.has_ended:
                await self._writer.write_next_batch(task)
        finally:
            while self._waiting_for_writer and self._waiting_for_writer[0].done():  # the waiter was cancelled
                self._waiting_for_writer.popleft()
            if self._waiting_for_writer:
                self._waiting_for_writer.popleft().set_result(None)
            else:
                self._active_writer_count -= 1

    def _now_ms(self) -> float:
        return self._clock.monotonic() * 1000


def create_dead_letter_manager(
    settings: Settings,
    host_ports: HostPorts,
    *,
    topics: TopicService,
    partitions: PartitionSet,
    producer_ids: ProducerIdAllocator,
    overrides: Callable[[str], Mapping[str, str]],
    may_write: Callable[[str, str], bool],
    peers: Peers | None = None,
) -> DeadLetterManager:
    """Return the dead-letter manager of one broker.

    `overrides`: returns the settings of a group; `may_write`: see `owner_may_write`; `peers`: connections
    to other brokers on which no request waits for long, None on a single node."""
    targets = DeadLetterTopics(
        node_id=settings.node_id,
        topics=topics,
        partitions=partitions,
        scheduler=host_ports.scheduler,
        overrides=overrides,
        topic_name_prefix=settings.errors_deadletterqueue_topic_name_prefix,
        may_write=may_write,
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
