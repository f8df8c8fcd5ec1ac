"""Replica manager: opens, closes and removes the partition replicas of this broker, and applies their roles.

Applies each change of the metadata image. Roles of open partitions change at once; one task opens, recreates and
removes logs, topic by topic, always according to the latest image.

`UnderMinIsrLog` logs when partitions led by this broker begin or stop to reject acks=all because too few replicas are
in sync. A leader that reaches etcd and its clients but no follower stays the leader, because no other broker is known
to have all records that it acknowledged. It rejects writes with acks=all, as in Kafka, and an operator must be
informed.

Invariants:
* A partition has a role only while its log is open, and only the role in the latest image.
* A log that is missing or could not be opened is recreated only if this broker is not in the in-sync set and has
  registered, so that no acknowledged record is lost silently. The last in-sync replica is never recreated: it stays
  offline until an operator decides.
* Data is removed only for a topic that the metadata marks as being deleted, or has ceased to contain, and for a
  partition of which this broker is no replica any more.
* Roles of more than `APPLIED_AT_ONCE_MAX` partitions are applied so many at a time, and other work runs in between;
  each one according to the latest image.
* Changes of several partitions within `LOG_DELAY_MS` are logged in one line.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from mansio.broker.partition.partition import Partition
from mansio.errors import CorruptLog, MansioError, StorageError
from mansio.host.item_turns import ItemTurns, Work
from mansio.logs import fields
from mansio.ports import Backoff, complete

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Sequence
    from uuid import UUID

    from mansio.broker.partition.partition_set import PartitionSet
    from mansio.broker.replication.leadership_applier import LeadershipApplier
    from mansio.metadata.image import MetadataImage
    from mansio.metadata.model import PartitionState, Topic, TopicChange
    from mansio.ports import Promise, Scheduler


logger = logging.getLogger(__name__)

STORAGE_RETRY_MS = 1000
"""Delay before opening or removing a topic is retried after a disk error, doubled each time; also the interval of the
check for failed logs."""
STORAGE_RETRY_MS_MAX = 60_000
APPLIED_AT_ONCE_MAX: Final = 200
"""Maximum number of partitions whose roles are applied without letting other work run. Turns of a millisecond would be
too short: clients of many partitions wait for all of them, and in between the loop serves all others."""
RETRY_BACKOFF = Backoff(STORAGE_RETRY_MS, STORAGE_RETRY_MS_MAX, jitter=0)


class ReplicaManager:
    """Partition replicas of a broker and their roles. All methods run on the broker's event loop.

    `remove(topic)` closes a topic's open partitions and removes its data, `remove_replica(topic, index)` those of one
    partition. `give_up(partitions)` requests that other
    brokers lead the partitions (topic id, index) whose log failed on this broker or could not be opened.
    `has_session()` returns whether this process has registered; only then are lost logs replaced.
    `on_role_applied(partition)` is called for every applied role, `on_topics_created(revision)` after topics were
    created, with the revision of the image.
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
        remove_replica: Callable[[Topic, int], Awaitable[None]],
        give_up: Callable[[list[tuple[UUID, int]]], Awaitable[int]],
        has_session: Callable[[], bool],
        on_role_applied: Callable[[Partition], None],
        on_topics_created: Callable[[int], Awaitable[None]],
    ) -> None:
        self._node_id = node_id
        self._partitions = partitions
        self._leadership_applier = replication
        self._state = state
        self._scheduler = scheduler
        self._remove = remove
        self._remove_replica = remove_replica
        self._give_up = give_up
        self._has_session = has_session
        self._on_role_applied = on_role_applied
        self._on_topics_created = on_topics_created
        self._under_min_isr_log = UnderMinIsrLog(scheduler)
        self._has_created_topics = False
        self._topics_to_open: dict[UUID, Topic] = {}
        self._deleted_topics: dict[UUID, Topic] = {}
        self._topics_with_former_replicas: dict[UUID, Topic] = {}
        self._removals: set[tuple[UUID, int]] = set()
        """Replicas (topic id, index) whose removal has begun and is not finished; it is repeated after an error."""
        self._topics_with_removed_replicas: dict[UUID, Topic] = {}
        self._roles_due: dict[UUID, set[int]] = {}
        """Partition indexes, by topic, whose roles are applied in turns."""
        self._is_applying_roles = False
        self._failure_counts: dict[UUID, int] = {}  # consecutive failures
        self._wake: Promise[None] | None = None
        self._stopped = False

    def start(self) -> None:
        """Apply the image and all its changes. Topics deleted since the partitions were opened are removed, too."""
        for topic in self._partitions.served_topics():
            if topic.topic_id not in self._state.topics_by_id:
                self._partitions.stop_serving(topic)
                self._remove_topic(topic)
        self._state.on_change(self._on_topic_change)
        self.apply_all()
        self._scheduler.spawn(self._open_and_remove_topics(), name="open and close partitions")
        self._scheduler.call_later(STORAGE_RETRY_MS, self._check_failures)

    def stop(self) -> None:
        """Stop the task that opens and removes logs."""
        self._stopped = True
        self._wake_task()

    def lost_logs(self) -> Iterator[tuple[UUID, int]]:
        """Yield topic id and index of the replicas whose log may lack records that this broker acknowledged.

        If this broker is the only in-sync replica and its disk failed without signs of corruption, the replica is not
        included: opening its log is retried, because it may be the only copy."""
        for topic in self._state.topics.values():
            for index, opened in enumerate(self._partitions.partitions_or_errors(topic)):
                if isinstance(opened, StorageError) and not self._must_retry_open(topic, index, opened):
                    yield topic.topic_id, index

    def _must_retry_open(self, topic: Topic, index: int, opened: object) -> bool:
        unread = isinstance(opened, StorageError) and not isinstance(opened, CorruptLog)
        return unread and topic.partitions[index].isr == (self._node_id,)

    def apply_all(self) -> None:
        """Apply all roles again, because the session of this broker began or ended; at once if this broker stops."""
        topics = tuple(self._state.topics.values())
        has_many = sum(len(topic.partitions) for topic in topics) > APPLIED_AT_ONCE_MAX
        for topic in topics:
            self._partitions.serve(topic)
            indexes = range(len(topic.partitions))
            if has_many and not self._stopped:
                self._apply_in_turns(topic, indexes)
            else:
                self._apply_at_once(topic, indexes)

    # Metadata changes

    def _on_topic_change(self, change: TopicChange) -> None:
        self._partitions.apply_topic_change(change)
        before, after = change.before, change.after
        if before is not None and (after is None or after.topic_id != before.topic_id):
            self._remove_topic(before)
        if before is None:
            self._has_created_topics = True
            self._wake_task()
        if after is not None:
            if change.partitions is not None:
                self._apply_partition_states(after, change.partitions)
                return
            known = before.partitions if before is not None and before.topic_id == after.topic_id else ()
            changed = [
                index
                for index, state in enumerate(after.partitions)
                if index >= len(known) or known[index] is not state
            ]
            self._apply_partition_states(after, changed)

    def _remove_topic(self, topic: Topic) -> None:
        """Close the partitions of a deleted topic and have its data removed."""
        for partition in self._partitions.partitions_or_errors(topic):
            if isinstance(partition, Partition):
                self._leadership_applier.remove(partition)
                partition.resign()
                self._on_role_applied(partition)
                self._under_min_isr_log.check(partition)
        self._topics_to_open.pop(topic.topic_id, None)
        self._deleted_topics[topic.topic_id] = topic
        self._wake_task()

    def _serve_and_apply(self, topic: Topic) -> None:
        self._partitions.serve(topic)
        self._apply_partition_states(topic, range(len(topic.partitions)))

    def _apply_partition_states(self, topic: Topic, indexes: Collection[int]) -> None:
        """Apply the states of some partitions: the failure of a broker changes thousands one by one."""
        if len(indexes) > APPLIED_AT_ONCE_MAX:
            self._apply_in_turns(topic, indexes)
        else:
            self._apply_at_once(topic, indexes)

    def _apply_in_turns(self, topic: Topic, indexes: Iterable[int]) -> None:
        self._roles_due.setdefault(topic.topic_id, set()).update(indexes)
        if not self._is_applying_roles:
            self._is_applying_roles = True
            self._scheduler.spawn(self._apply_due_roles(), name="apply the roles of many partitions")

    async def _apply_due_roles(self) -> None:
        turns = ItemTurns(self._scheduler, Work.ROLE_CHANGES)
        try:
            while self._roles_due and not self._stopped:
                topic_id, indexes = next(iter(self._roles_due.items()))
                newest = self._state.topics_by_id.get(topic_id)
                if newest is None or not indexes:
                    del self._roles_due[topic_id]
                    continue
                chunk = [indexes.pop() for _ in range(min(len(indexes), APPLIED_AT_ONCE_MAX))]
                try:
                    self._apply_at_once(newest, [index for index in chunk if index < len(newest.partitions)])
                except Exception:  # a defect; nothing else would apply these roles
                    logger.exception(
                        "roles_not_applied", extra=fields(topic=newest.name, partitions=len(chunk))
                    )
                    self._roles_due[topic_id] = {*self._roles_due.pop(topic_id), *chunk}  # after other topics
                    await self._scheduler.sleep(STORAGE_RETRY_MS)
                await turns.pause()
        finally:
            self._is_applying_roles = False

    def _apply_at_once(self, topic: Topic, indexes: Iterable[int]) -> None:
        can_open = has_former_replica = False
        for index in indexes:
            partition, state = self._partitions.partition_or_error(topic, index), topic.partitions[index]
            if isinstance(partition, Partition):
                self._leadership_applier.apply(partition, state)
                self._on_role_applied(partition)
                self._under_min_isr_log.check(partition)
            can_open = can_open or self._can_open(topic, index, partition)
            has_former_replica = has_former_replica or self._is_former_replica(state, partition)
        if has_former_replica:
            self._topics_with_former_replicas[topic.topic_id] = topic
            self._wake_task()
        if can_open:
            self._topics_to_open[topic.topic_id] = topic
            self._wake_task()

    def _can_open(self, topic: Topic, index: int, opened: Partition | StorageError | None) -> bool:
        state = topic.partitions[index]
        if self._node_id not in state.replicas or isinstance(opened, Partition):
            return False
        if opened is None or self._must_retry_open(topic, index, opened):
            return True
        # As long as the session of an earlier process is alive, a late copy of its fetch requests can put this broker
        # back into the in-sync set. The log must be known as lost until then, also after another restart.
        return self._node_id not in state.isr and self._has_session()

    def _is_former_replica(self, state: PartitionState, opened: Partition | StorageError | None) -> bool:
        """Whether this broker has the log of a partition of which it has no replica any more."""
        return opened is not None and self._node_id not in state.replicas

    # The task

    async def _open_and_remove_topics(self) -> None:
        while not self._stopped:
            if self._deleted_topics:
                await self._process_first_topic(self._deleted_topics, self._remove_topic_data)
            elif self._topics_with_former_replicas:
                await self._process_first_topic(
                    self._topics_with_former_replicas, self._remove_former_replicas
                )
            elif self._topics_to_open:
                await self._process_first_topic(self._topics_to_open, self._open_topic)
            elif self._has_created_topics:
                self._has_created_topics = False
                await self._store_metadata_revision()
            else:
                self._wake = self._scheduler.promise()
                await self._wake

    async def _process_first_topic(
        self, topics: dict[UUID, Topic], work: Callable[[UUID, Topic], Awaitable[None]]
    ) -> None:
        """Process the first of `topics` with `work`. If that fails, retry it later, after the others."""
        topic_id, topic = next(iter(topics.items()))
        try:
            await work(topic_id, topic)
        except (MansioError, OSError) as error:
            attempts = self._failure_counts[topic_id] = self._failure_counts.get(topic_id, 0) + 1
            pause_ms = round(RETRY_BACKOFF.delay_ms(attempts))
            known = fields(topic=topic.name, reason=error, again_in_ms=pause_ms)
            logger.error("partition_maintenance_failed", extra=known)
            topics.pop(topic_id, None)
            self._scheduler.call_later(pause_ms, self._requeue, topics, topic_id, topic)
        else:
            self._failure_counts.pop(topic_id, None)

    def _requeue(self, topics: dict[UUID, Topic], topic_id: UUID, topic: Topic) -> None:
        topics.setdefault(topic_id, topic)
        self._wake_task()

    async def _remove_topic_data(self, topic_id: UUID, topic: Topic) -> None:
        if topic_id not in self._state.topics_by_id:
            await self._remove(topic)
            logger.info("partitions_removed", extra=fields(topic=topic.name, id=topic_id))
        self._deleted_topics.pop(topic_id, None)

    async def _remove_former_replicas(self, topic_id: UUID, _: Topic) -> None:
        """Remove the logs of which this broker has no replica any more, according to the newest state: one that was
        assigned again meanwhile continues with its log."""
        count = len(topic.partitions) if (topic := self._state.topics_by_id.get(topic_id)) is not None else 0
        for index in range(count):
            if (topic := self._state.topics_by_id.get(topic_id)) is None:
                break
            opened = self._partitions.partitions_or_errors(topic)[index]
            place = (topic_id, index)
            if self._node_id in topic.partitions[index].replicas:
                self._removals.discard(place)
            if not self._is_former_replica(topic.partitions[index], opened) and place not in self._removals:
                continue
            self._removals.add(place)
            if isinstance(opened, Partition):
                self._leadership_applier.remove(opened)
                opened.resign()
                self._on_role_applied(opened)
            await self._remove_replica(topic, index)
            self._removals.discard(place)
            logger.info("replica_removed", extra=fields(topic=topic.name, partition=index))
        self._topics_with_former_replicas.pop(topic_id, None)
        if (newest := self._state.topics_by_id.get(topic_id)) is not None:
            self._serve_and_apply(newest)

    async def _open_topic(self, topic_id: UUID, _: Topic) -> None:
        topic = self._state.topics_by_id.get(topic_id)
        if topic is not None:
            for index, opened in enumerate(self._partitions.partitions_or_errors(topic)):
                if not isinstance(opened, StorageError) or not self._can_open(topic, index, opened):
                    continue
                if self._node_id in topic.partitions[index].isr:
                    await self._partitions.reopen(topic, index)
                else:
                    known = fields(topic=topic.name, partition=index, reason=opened.message)
                    logger.warning("partition_recreated", extra=known)
                    await self._partitions.recreate(topic, index)
            were_open = self._partitions.partitions_or_errors(topic)
            await self._partitions.open_partitions(topic)
            if any(
                opened is None and self._node_id in state.replicas and state.partition_epoch
                for opened, state in zip(were_open, topic.partitions, strict=True)
            ):
                # Also of a partition that was moved here, before it can get in sync. Otherwise older metadata without
                # the move would later be taken for newer ones.
                self._has_created_topics = True
                await self._on_topics_created(self._state.revision)
        self._topics_to_open.pop(topic_id, None)
        if (newest := self._state.topics_by_id.get(topic_id)) is not None:
            self._serve_and_apply(newest)

    async def _store_metadata_revision(self) -> None:
        try:
            await self._on_topics_created(self._state.revision)
        except MansioError as error:
            logger.warning("metadata_revision_not_recorded", extra=fields(reason=error))
            self._scheduler.call_later(STORAGE_RETRY_MS, self._retry_store_metadata_revision)

    def _retry_store_metadata_revision(self) -> None:
        self._has_created_topics = True
        self._wake_task()

    def _wake_task(self) -> None:
        if self._wake is not None:
            complete(self._wake, None)

    # Logs that fail or cannot be opened while the broker runs

    def _check_failures(self) -> None:
        if self._stopped:
            return
        failed = [
            (partition.topic_id, partition.index)
            for partition in self._partitions
            if partition.log.failure is not None and self._is_needed(partition.topic_id, partition.index)
        ]
        failed += self._unopened_partitions()
        if failed:
            self._scheduler.spawn(self._resign_partitions(failed), name="give up failed partitions")
        self._scheduler.call_later(STORAGE_RETRY_MS, self._check_failures)

    def _unopened_partitions(self) -> Iterator[tuple[UUID, int]]:
        """Yield in-sync replicas of this broker that could not be opened at the last attempt because of the disk."""
        for topic_id in self._failure_counts:
            if (topic := self._state.topics_by_id.get(topic_id)) is not None:
                for index, opened in enumerate(self._partitions.partitions_or_errors(topic)):
                    if opened is None and self._is_needed(topic_id, index):
                        yield topic_id, index

    def _is_needed(self, topic_id: UUID, index: int) -> bool:
        topic = self._state.topics_by_id.get(topic_id)
        if topic is None or index >= len(topic.partitions):
            return False
        state = topic.partitions[index]
        return self._node_id in state.isr and len(state.isr) > 1

    async def _resign_partitions(self, partitions: list[tuple[UUID, int]]) -> None:
        try:
            await self._give_up(partitions)
        except MansioError as error:
            logger.warning("failed_partitions_not_released", extra=fields(reason=error))


LOG_DELAY_MS: Final = 500
"""Time for which changes are collected before they are logged in one line."""

LOGGED_NAMES_MAX: Final = 5
"""Maximum number of partition names in one log line."""


class UnderMinIsrLog:
    """Logs which partitions have fewer in-sync replicas than min.insync.replicas. All methods run on the event loop."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._logged: dict[str, None] = {}
        """Names of the partitions that were last logged as having too few in-sync replicas."""
        self._changed_partitions: dict[str, Partition] = {}

    def check(self, partition: Partition) -> None:
        """Schedule a log line if the number of in-sync replicas of a partition fell below, or reached, the minimum."""
        if (
            self._is_under_min_isr(partition) == (partition.name in self._logged)
            or partition.name in self._changed_partitions
        ):
            return
        if not self._changed_partitions:
            self._scheduler.call_later(LOG_DELAY_MS, self._log_changes)
        self._changed_partitions[partition.name] = partition

    def _log_changes(self) -> None:
        changed_partitions, self._changed_partitions = self._changed_partitions, {}
        newly_under = [
            name
            for name, one in changed_partitions.items()
            if self._is_under_min_isr(one) and name not in self._logged
        ]
        over = [
            name
            for name, one in changed_partitions.items()
            if not self._is_under_min_isr(one) and name in self._logged
        ]
        for name in newly_under:
            self._logged[name] = None
        for name in over:
            del self._logged[name]
        if newly_under:
            logger.warning("partition_under_min_isr", extra=_partition_fields(newly_under))
        if over:
            logger.info("partition_min_isr_restored", extra=_partition_fields(over))

    def _is_under_min_isr(self, partition: Partition) -> bool:
        replica = partition.leader_progress
        return replica is not None and replica.is_under_min_isr and not partition.closed


def _partition_fields(names: Sequence[str]) -> dict[str, object]:
    return fields(partitions=len(names), first=",".join(names[:LOGGED_NAMES_MAX]))
