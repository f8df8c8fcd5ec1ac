"""Replica manager: opens, closes and removes the partition replicas of this broker, and applies their roles.

Follows the metadata image. Roles of open partitions change at once; opening, recreating and removing logs needs the
disk and is done by one task, topic by topic, always from the newest image.

Also logs, once per change, the partitions led here that reject acks=all because too few replicas are in sync, and when
that ends (`UnderMinIsrLog`). A leader that reaches etcd and its clients but no follower stays the leader, because no
other broker is known to have everything that it acknowledged; it rejects writes instead, as Kafka does, and an operator
must be informed.

Invariants:
* A partition leads or follows only while its log is open, and only as the newest image demands.
* A log that could not be opened, or is missing, is recreated only where this broker is no longer in sync, so that
  nothing it once confirmed is lost silently. The last in-sync replica is never replaced: it stays offline for an
  operator to decide.
* Data is removed only for a topic that the metadata marks as being deleted, or no longer contains after it did.
* Changes of several partitions at the same time are one log line.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from mansio.broker.partition.partition import Partition
from mansio.errors import CorruptLog, MansioError, StorageError
from mansio.logs import fields
from mansio.ports import Backoff

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Sequence
    from uuid import UUID

    from mansio.broker.partition.partition_set import PartitionSet
    from mansio.broker.replication.leadership_applier import LeadershipApplier
    from mansio.metadata.image import MetadataImage
    from mansio.metadata.model import PartitionState, Topic, TopicChange
    from mansio.ports import Promise, Scheduler


logger = logging.getLogger(__name__)

TRY_AGAIN_MS = 1000
"""Delay before opening or removing a topic is retried after a disk error, doubled each time; also the interval of the
check for failed logs."""
TRY_AGAIN_MS_MAX = 60_000
RETRY_BACKOFF = Backoff(TRY_AGAIN_MS, TRY_AGAIN_MS_MAX, jitter=0)


class ReplicaManager:
    """Partition replicas of a broker and their roles. All methods run on the broker's event loop.

    `remove(topic)` closes a topic's open partitions and removes its data. `give_up(partitions)` requests that other
    brokers lead the partitions (topic id, index) whose log failed here or could not be opened. `on_role(partition)` is
    called for every applied role, `on_made(revision)` for created topics, with the revision of the image.
    """

    def __init__(
        self,
        node_id: int,
        *,
        partitions: PartitionSet,
        replication: LeadershipApplier,
        state: MetadataImage,
        scheduler: Scheduler,
        remove: Callable[[Topic], Awaitable[None]],
        give_up: Callable[[list[tuple[UUID, int]]], Awaitable[int]],
        on_role: Callable[[Partition], None],
        on_made: Callable[[int], Awaitable[None]],
    ) -> None:
        self._node_id = node_id
        self._partitions = partitions
        self._leadership_applier = replication
        self._state = state
        self._scheduler = scheduler
        self._remove = remove
        self._give_up = give_up
        self._on_role = on_role
        self._on_made = on_made
        self._under_min_isr_log = UnderMinIsrLog(scheduler)
        self._made_any = False
        self._waiting: dict[UUID, Topic] = {}
        self._gone: dict[UUID, Topic] = {}
        self._failed: dict[UUID, int] = {}  # consecutive failures
        self._wake: Promise[None] | None = None
        self._stopped = False

    def start(self) -> None:
        """Follow the image. Topics that it has lost since the partitions were opened are removed, too."""
        for topic in self._partitions.served():
            if topic.topic_id not in self._state.topics_by_id:
                self._partitions.drop(topic)
                self._leave(topic)
        self._state.on_change(self._changed)
        for topic in self._state.topics.values():
            self._look_at(topic)
        self._scheduler.spawn(self._run(), name="open and close partitions")
        self._scheduler.call_later(TRY_AGAIN_MS, self._look_for_failures)

    def stop(self) -> None:
        """Open and close nothing any more."""
        self._stopped = True
        self._woken()

    def lost_logs(self) -> Iterator[tuple[UUID, int]]:
        """Replicas of this broker whose log cannot confirm what the broker once acknowledged. Where no other replica
        can either, a disk that only does not respond is waited for: it may have the only copy."""
        for topic in self._state.topics.values():
            for index, opened in enumerate(self._partitions.opened_partitions(topic)):
                if isinstance(opened, StorageError) and not self._is_awaited(topic, index, opened):
                    yield topic.topic_id, index

    def _is_awaited(self, topic: Topic, index: int, opened: object) -> bool:
        unread = isinstance(opened, StorageError) and not isinstance(opened, CorruptLog)
        return unread and topic.partitions[index].isr == (self._node_id,)

    def apply_all(self) -> None:
        """Apply all roles again, because the session of this broker began or ended."""
        for topic in tuple(self._state.topics.values()):
            self._look_at(topic)

    # Metadata changes

    def _changed(self, change: TopicChange) -> None:
        self._partitions.follow(change)
        before, after = change.before, change.after
        if before is not None and (after is None or after.topic_id != before.topic_id):
            self._leave(before)
        if before is None:
            self._made_any = True
            self._woken()
        if after is not None:
            known = before.partitions if before is not None and before.topic_id == after.topic_id else ()
            self._apply(after, known)

    def _leave(self, topic: Topic) -> None:
        """The topic is deleted: its partitions have no role here any more, and its data is removed."""
        for partition in self._partitions.opened_partitions(topic):
            if isinstance(partition, Partition):
                self._leadership_applier.leave(partition)
                partition.resign()
                self._on_role(partition)
                self._under_min_isr_log.look(partition)
        self._waiting.pop(topic.topic_id, None)
        self._gone[topic.topic_id] = topic
        self._woken()

    def _look_at(self, topic: Topic) -> None:
        self._partitions.serve(topic)
        self._apply(topic, ())

    def _apply(self, topic: Topic, known: Sequence[PartitionState]) -> None:
        """Apply the roles of partitions that differ from `known`: a failed broker changes thousands, one by one."""
        can_open = False
        opened_partitions = self._partitions.opened_partitions(topic)
        for index, (partition, state) in enumerate(zip(opened_partitions, topic.partitions, strict=True)):
            if index < len(known) and known[index] is state:
                continue
            if isinstance(partition, Partition):
                self._leadership_applier.apply(partition, state)
                self._on_role(partition)
                self._under_min_isr_log.look(partition)
            can_open = can_open or self._can_open(topic, index, partition)
        if can_open:
            self._waiting[topic.topic_id] = topic
            self._woken()

    def _can_open(self, topic: Topic, index: int, opened: Partition | StorageError | None) -> bool:
        state = topic.partitions[index]
        if self._node_id not in state.replicas or isinstance(opened, Partition):
            return False
        return opened is None or self._node_id not in state.isr or self._is_awaited(topic, index, opened)

    # The task

    async def _run(self) -> None:
        while not self._stopped:
            if self._gone:
                await self._tried(self._gone, self._remove_one)
            elif self._waiting:
                await self._tried(self._waiting, self._open_one)
            elif self._made_any:
                self._made_any = False
                await self._note()
            else:
                self._wake = self._scheduler.promise()
                await self._wake

    async def _tried(self, topics: dict[UUID, Topic], work: Callable[[UUID, Topic], Awaitable[None]]) -> None:
        """Process the first of `topics`. One that fails is retried later and does not block the others."""
        topic_id, topic = next(iter(topics.items()))
        try:
            await work(topic_id, topic)
        except (MansioError, OSError) as error:
            attempts = self._failed[topic_id] = self._failed.get(topic_id, 0) + 1
            pause_ms = round(RETRY_BACKOFF.delay_ms(attempts))
            known = fields(topic=topic.name, reason=error, again_in_ms=pause_ms)
            logger.error("partition_maintenance_failed", extra=known)
            topics.pop(topic_id, None)
            self._scheduler.call_later(pause_ms, self._again, topics, topic_id, topic)
        else:
            self._failed.pop(topic_id, None)

    def _again(self, topics: dict[UUID, Topic], topic_id: UUID, topic: Topic) -> None:
        topics.setdefault(topic_id, topic)
        self._woken()

    async def _remove_one(self, topic_id: UUID, topic: Topic) -> None:
        if topic_id not in self._state.topics_by_id:
            await self._remove(topic)
            logger.info("partitions_removed", extra=fields(topic=topic.name, id=topic_id))
        self._gone.pop(topic_id, None)

    async def _open_one(self, topic_id: UUID, _: Topic) -> None:
        topic = self._state.topics_by_id.get(topic_id)
        if topic is not None:
            for index, opened in enumerate(self._partitions.opened_partitions(topic)):
                if not isinstance(opened, StorageError) or not self._can_open(topic, index, opened):
                    continue
                if self._node_id in topic.partitions[index].isr:
                    await self._partitions.reopen(topic, index)
                else:
                    known = fields(topic=topic.name, partition=index, reason=opened.message)
                    logger.warning("partition_recreated", extra=known)
                    await self._partitions.recreate(topic, index)
            await self._partitions.open_partitions(topic)
        self._waiting.pop(topic_id, None)
        if (newest := self._state.topics_by_id.get(topic_id)) is not None:
            self._look_at(newest)

    async def _note(self) -> None:
        try:
            await self._on_made(self._state.revision)
        except MansioError as error:
            logger.warning("metadata_revision_not_recorded", extra=fields(reason=error))
            self._scheduler.call_later(TRY_AGAIN_MS, self._note_again)

    def _note_again(self) -> None:
        self._made_any = True
        self._woken()

    def _woken(self) -> None:
        if self._wake is not None:
            _complete(self._wake)

    # Logs that fail, or cannot be opened, while the broker runs

    def _look_for_failures(self) -> None:
        if self._stopped:
            return
        failed = [
            (partition.topic_id, partition.index)
            for partition in self._partitions
            if partition.log.failure is not None and self._is_needed(partition.topic_id, partition.index)
        ]
        failed += self._not_opened()
        if failed:
            self._scheduler.spawn(self._ask_others(failed), name="give up failed partitions")
        self._scheduler.call_later(TRY_AGAIN_MS, self._look_for_failures)

    def _not_opened(self) -> Iterator[tuple[UUID, int]]:
        """Partitions that other brokers wait for, and that could not be opened here at the last attempt because of the
        disk."""
        for topic_id in self._failed:
            if (topic := self._state.topics_by_id.get(topic_id)) is not None:
                for index, opened in enumerate(self._partitions.opened_partitions(topic)):
                    if opened is None and self._is_needed(topic_id, index):
                        yield topic_id, index

    def _is_needed(self, topic_id: UUID, index: int) -> bool:
        topic = self._state.topics_by_id.get(topic_id)
        if topic is None or index >= len(topic.partitions):
            return False
        state = topic.partitions[index]
        return self._node_id in state.isr and len(state.isr) > 1

    async def _ask_others(self, places: list[tuple[UUID, int]]) -> None:
        try:
            await self._give_up(places)
        except MansioError as error:
            logger.warning("failed_partitions_not_released", extra=fields(reason=error))


def _complete(promise: Promise[None]) -> None:
    if not promise.done():
        promise.set_result(None)


GATHER_MS: Final = 500
NAMED_MAX: Final = 5


class UnderMinIsrLog:
    """Logs partitions under min.insync.replicas. All methods run on the broker's event loop."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._logged: dict[str, None] = {}
        """Partitions last logged as short of replicas."""
        self._looked_at: dict[str, Partition] = {}

    def look(self, partition: Partition) -> None:
        """The role or the in-sync set of a partition may have changed."""
        if self._is_short(partition) == (partition.name in self._logged) or partition.name in self._looked_at:
            return
        if not self._looked_at:
            self._scheduler.call_later(GATHER_MS, self._tell)
        self._looked_at[partition.name] = partition

    def _tell(self) -> None:
        looked_at, self._looked_at = self._looked_at, {}
        now_short = [
            name for name, one in looked_at.items() if self._is_short(one) and name not in self._logged
        ]
        over = [name for name, one in looked_at.items() if not self._is_short(one) and name in self._logged]
        for name in now_short:
            self._logged[name] = None
        for name in over:
            del self._logged[name]
        if now_short:
            logger.warning("partition_under_min_isr", extra=_places(now_short))
        if over:
            logger.info("partition_min_isr_restored", extra=_places(over))

    def _is_short(self, partition: Partition) -> bool:
        replica = partition.leader_progress
        return replica is not None and replica.is_under_min_isr and not partition.closed


def _places(names: Sequence[str]) -> dict[str, object]:
    return fields(partitions=len(names), first=",".join(names[:NAMED_MAX]))
