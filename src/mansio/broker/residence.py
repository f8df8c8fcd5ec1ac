"""Which partitions live on this broker of a cluster: opened when they are placed here, given their roles, closed and
removed when their topic is deleted.

Follows the metadata's view. Roles of partitions that are open change at once; opening, renewing and removing logs is
work for the disk and done by one task, topic by topic, always from the newest view.

Always true:
* a partition leads or follows only while its log is open, and only as the newest view says;
* a log that could not be opened, or is missing, is begun anew only where this broker is not in sync any more, so that
  nothing it once confirmed is forgotten in silence. The last replica in sync is never replaced: it stays out of
  service, for an operator to decide;
* data is removed only for a topic that the metadata says is being deleted, or does not have any more after it had it.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from mansio.broker.partition import Partition
from mansio.errors import MansioError, StorageError
from mansio.logs import fields

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Sequence
    from uuid import UUID

    from mansio.broker.partitions import PartitionSet
    from mansio.broker.replication import Replication
    from mansio.cluster.state import ClusterState, PartitionState, Topic, TopicChange
    from mansio.ports import Promise, Scheduler

logger = logging.getLogger(__name__)

TRY_AGAIN_MS = 1000
"""After the disk did not let a topic be opened or removed, then twice as long; and how often failed logs are looked
for."""
TRY_AGAIN_MS_MAX = 60_000


class Residence:
    """See the module. All methods belong to the broker's loop.

    `remove(topic)` closes what is open of a topic and removes its data. `give_up(places)` asks that others lead
    partitions (topic id, index) whose log failed here. `on_role(partition)` hears of every role that was applied.
    """

    def __init__(
        self,
        node_id: int,
        *,
        partitions: PartitionSet,
        replication: Replication,
        state: ClusterState,
        scheduler: Scheduler,
        remove: Callable[[Topic], Awaitable[None]],
        give_up: Callable[[list[tuple[UUID, int]]], Awaitable[int]],
        on_role: Callable[[Partition], None],
    ) -> None:
        self._node_id = node_id
        self._partitions = partitions
        self._replication = replication
        self._state = state
        self._scheduler = scheduler
        self._remove = remove
        self._give_up = give_up
        self._on_role = on_role
        self._waiting: dict[UUID, Topic] = {}
        self._gone: dict[UUID, Topic] = {}
        self._wake: Promise[None] | None = None
        self._stopped = False

    def start(self) -> None:
        """Follow the view from now on."""
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
        """Partitions placed here whose log cannot vouch for what this broker once confirmed."""
        for topic in self._state.topics.values():
            for index, kept in enumerate(self._partitions.kept(topic)):
                if isinstance(kept, StorageError):
                    yield topic.topic_id, index

    def apply_all(self) -> None:
        """The session of this broker began or ended: roles depend on it."""
        for topic in tuple(self._state.topics.values()):
            self._look_at(topic)

    # Following the view

    def _changed(self, change: TopicChange) -> None:
        self._partitions.follow(change)
        before, after = change.before, change.after
        if before is not None and (after is None or after.topic_id != before.topic_id):
            for partition in self._partitions.kept(before):
                if isinstance(partition, Partition):
                    self._replication.leave(partition)
                    partition.resign()
                    self._on_role(partition)
            self._waiting.pop(before.topic_id, None)
            self._gone[before.topic_id] = before
            self._woken()
        if after is not None:
            known = before.partitions if before is not None and before.topic_id == after.topic_id else ()
            self._apply(after, known)

    def _look_at(self, topic: Topic) -> None:
        self._partitions.serve(topic)
        self._apply(topic, ())

    def _apply(self, topic: Topic, known: Sequence[PartitionState]) -> None:
        """Roles of the partitions that are not as they were in `known`: a dead broker changes thousands, one by one."""
        can_open = False
        kept = self._partitions.kept(topic)
        for index, (partition, state) in enumerate(zip(kept, topic.partitions, strict=True)):
            if index < len(known) and known[index] is state:
                continue
            if isinstance(partition, Partition):
                self._replication.apply(partition, state)
                self._on_role(partition)
            can_open = can_open or self._can_open(topic, index, partition)
        if can_open:
            self._waiting[topic.topic_id] = topic
            self._woken()

    def _can_open(self, topic: Topic, index: int, kept: Partition | StorageError | None) -> bool:
        state = topic.partitions[index]
        if self._node_id not in state.replicas or isinstance(kept, Partition):
            return False
        return kept is None or self._node_id not in state.isr

    # The task

    async def _run(self) -> None:
        pause_ms = TRY_AGAIN_MS
        while not self._stopped:
            try:
                if self._gone:
                    await self._remove_one()
                elif self._waiting:
                    await self._open_one()
                else:
                    self._wake = self._scheduler.promise()
                    await self._wake
                pause_ms = TRY_AGAIN_MS
            except (MansioError, OSError) as error:
                logger.error("partitions not opened or removed", extra=fields(reason=error))
                await self._sleep(pause_ms)
                pause_ms = min(2 * pause_ms, TRY_AGAIN_MS_MAX)

    async def _remove_one(self) -> None:
        topic_id, topic = next(iter(self._gone.items()))
        if topic_id not in self._state.topics_by_id:
            await self._remove(topic)
            logger.info("partitions removed", extra=fields(topic=topic.name, id=topic_id))
        self._gone.pop(topic_id, None)

    async def _open_one(self) -> None:
        topic_id = next(iter(self._waiting))
        topic = self._state.topics_by_id.get(topic_id)
        if topic is not None:
            for index, kept in enumerate(self._partitions.kept(topic)):
                if isinstance(kept, StorageError) and self._can_open(topic, index, kept):
                    known = fields(topic=topic.name, partition=index, reason=kept.message)
                    logger.warning("partition begins anew here", extra=known)
                    await self._partitions.renew(topic, index)
            await self._partitions.open_partitions(topic)
        self._waiting.pop(topic_id, None)
        if (newest := self._state.topics_by_id.get(topic_id)) is not None:
            self._look_at(newest)

    async def _sleep(self, pause_ms: float) -> None:
        promise: Promise[None] = self._scheduler.promise()
        self._scheduler.call_later(pause_ms, _settle, promise)
        await promise

    def _woken(self) -> None:
        if self._wake is not None:
            _settle(self._wake)

    # Logs that fail while the broker runs

    def _look_for_failures(self) -> None:
        if self._stopped:
            return
        failed = [
            (partition.topic_id, partition.index)
            for partition in self._partitions
            if partition.log.failure is not None and self._is_needed(partition)
        ]
        if failed:
            self._scheduler.spawn(self._ask_others(failed), name="give up failed partitions")
        self._scheduler.call_later(TRY_AGAIN_MS, self._look_for_failures)

    def _is_needed(self, partition: Partition) -> bool:
        topic = self._state.topics_by_id.get(partition.topic_id)
        if topic is None or partition.index >= len(topic.partitions):
            return False
        state = topic.partitions[partition.index]
        return self._node_id in state.isr and len(state.isr) > 1

    async def _ask_others(self, places: list[tuple[UUID, int]]) -> None:
        try:
            await self._give_up(places)
        except MansioError as error:
            logger.warning("failed partitions not given up yet", extra=fields(reason=error))


def _settle(promise: Promise[None]) -> None:
    if not promise.done():
        promise.set_result(None)
