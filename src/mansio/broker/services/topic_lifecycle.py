"""Topic lifecycle: creates, extends and deletes topics in steps, so that a crash between any two leaves no inconsistent
topic.

A creation is first written as `creating`, then its partitions are opened on disk, then it is written as `live`; a
deletion is first written as `deleting`, then its data is removed, then its keys. So after a crash a topic is either
live with all its directories, or its deletion is completed: on a single node at the start, in a cluster by the
controller. What fails without a crash is completed by the broker that began it, as soon as the store accepts it; in a
cluster while its session lasts.

Invariant: each step is a transaction guarded by the topic's key as the step before left it, and in a cluster by this
broker's session.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

from mansio.errors import (
    ConcurrentChange,
    MansioError,
    StorageError,
    TopicAlreadyExists,
    Unavailable,
    UnknownTopicId,
)
from mansio.logs import fields
from mansio.metadata import metadata_store
from mansio.metadata.metadata_store import Compare, Delete, Put, new_uuid, new_writer_id
from mansio.metadata.model import CREATING, DELETING, LIVE, TopicCreator, partition_document, topic_document

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
    from uuid import UUID

    from mansio.metadata.image import MetadataImage
    from mansio.metadata.metadata_store import MetadataStore
    from mansio.metadata.model import PartitionState, Topic
    from mansio.ports import Random, Scheduler

logger = logging.getLogger(__name__)

CONFLICT_ATTEMPTS_MAX: Final = 5
ABANDON_AGAIN_MS: Final = 1000


class TopicLifecycle:
    """`TopicService` decides what is done; all methods run on the broker's event loop."""

    def __init__(
        self,
        *,
        store: MetadataStore,
        state: MetadataImage,
        scheduler: Scheduler,
        random: Random,
        node_id: int,
        open_partitions: Callable[[Topic], Awaitable[None]],
        close_partitions: Callable[[Topic], Awaitable[None]],
        broker_epoch: Callable[[], int] | None,
    ) -> None:
        """Parameters as of `TopicService`."""
        self.state = state
        self.opening = 0
        """Partitions that are planned but not in the metadata image yet."""
        self._store = store
        self._scheduler = scheduler
        self._random = random
        self._node_id = node_id
        self._open_partitions = open_partitions
        self._close_partitions = close_partitions
        self._broker_epoch = broker_epoch
        self._at_work: Counter[UUID] = Counter()
        """Topics that this broker is creating, deleting or abandoning now."""
        self._opened: dict[UUID, Topic] = {}
        """In a cluster: topics whose partitions were opened here to create them, and that are not known to be live."""
        if broker_epoch is not None:
            state.on_progress(self._check_remaining)

    async def create(self, planned: Topic) -> None:
        """Create a topic; it is live in the metadata image on return."""
        count = len(planned.partitions)
        self.opening += count
        try:
            topic = dataclasses.replace(planned, topic_id=new_uuid(self._random), created_by=self._owner())
            await self._abandon_on_failure(topic, self._make(topic))
        finally:
            self.opening -= count

    async def _make(self, topic: Topic) -> None:
        puts = self._partition_puts(topic, 0)
        if not await self.write(topic, with_puts=puts[: self._bytes_beside_topic]):
            self._check_session(topic.created_by)
            raise TopicAlreadyExists(f"topic {topic.name!r} already exists")
        written = self._unfinished(topic)
        await self._put_partitions(written, puts[self._bytes_beside_topic :])
        if self._broker_epoch is not None:
            self._opened[topic.topic_id] = topic
        await self._open_partitions(topic)
        created = await self.write(
            dataclasses.replace(topic, state=LIVE, mod_revision=written.mod_revision, created_by=None)
        )
        if not created:
            raise ConcurrentChange(f"topic {topic.name} was changed while it was created")
        self._opened.pop(topic.topic_id, None)

    async def delete(self, topic: Topic) -> None:
        """Delete a live topic: its data here, then its keys."""
        await self._abandon_on_failure(topic, self._mark_and_remove(topic))

    async def _mark_and_remove(self, topic: Topic) -> None:
        for _ in range(CONFLICT_ATTEMPTS_MAX):
            if await self.write(dataclasses.replace(topic, state=DELETING, created_by=self._owner())):
                await self.remove(self._unfinished(topic))
                return
            found = self.state.topics_by_id.get(topic.topic_id)
            if found is None:
                raise UnknownTopicId(f"there is no topic with id {topic.topic_id}")
            topic = found
        raise ConcurrentChange(f"topic {topic.name} is being changed concurrently")

    def _unfinished(self, topic: Topic) -> Topic:
        """The topic as this broker has just written it."""
        found = self.state.unfinished.get(topic.name)
        if found is None or found.topic_id != topic.topic_id:
            raise ConcurrentChange(f"topic {topic.name} was changed by another")
        return found

    async def grow(self, topic: Topic, added: tuple[PartitionState, ...]) -> None:
        """Add partitions; they are in the metadata image on return."""
        there = len(topic.partitions)
        grown = dataclasses.replace(topic, partitions=topic.partitions + added)
        self.opening += len(added)
        try:
            await self._open_partitions(grown)
            puts = self._partition_puts(grown, there)
            first = max(0, len(puts) - self._bytes_beside_topic)
            await self._put_partitions(topic, puts[:first])
            if not await self.write(grown, with_puts=puts[first:]):
                raise ConcurrentChange(f"topic {topic.name} was changed concurrently; read it and retry")
        finally:
            self.opening -= len(added)

    async def _abandon_on_failure(self, topic: Topic, work: Coroutine[Any, Any, None]) -> None:
        """Carry out steps of creating or deleting a topic. If one fails, what was begun is deleted: now, or as soon
        as the store accepts it; in a cluster while this session lasts (then by the controller). A single node tries
        once before it returns the error, so that an immediate retry by the client finds no remains."""
        self._at_work[topic.topic_id] += 1
        try:
            await work
        except TopicAlreadyExists:
            raise
        except MansioError:
            if self._broker_epoch is not None or not await self._is_abandoned_now(topic):
                self._begin_abandoning(topic)
            raise
        finally:
            self._end_work(topic)

    async def delete_unfinished(self, topic: Topic) -> None:
        """Delete an unfinished topic of a single node after a crash: now, or as soon as the store and the disk allow
        it, because a full disk must not prevent the start."""
        self._at_work[topic.topic_id] += 1
        try:
            if not await self._is_abandoned_now(topic):
                self._begin_abandoning(topic)
        finally:
            self._end_work(topic)

    async def _is_abandoned_now(self, topic: Topic) -> bool:
        try:
            return await self._is_abandoned(topic)
        except (Unavailable, StorageError):
            return False

    def _check_remaining(self) -> None:
        """Check abandoned topics again: a step whose response was lost may be committed long after it was abandoned,
        and while this broker's session lasts no other broker may complete what it owns."""
        own = TopicCreator(self._node_id, self.epoch())
        for topic in self.state.unfinished.values():
            if topic.created_by == own and topic.topic_id not in self._at_work:
                self._begin_abandoning(topic)
        self._close_deleted()

    def _close_deleted(self) -> None:
        """Close the partitions of topics that the controller deleted before they were live: no other event closes
        what was opened for them here."""
        if not self._opened:
            return
        unfinished = {topic.topic_id for topic in self.state.unfinished.values()}
        for topic_id, topic in tuple(self._opened.items()):
            if topic_id in self._at_work or topic_id in unfinished:
                continue
            del self._opened[topic_id]
            if topic_id not in self.state.topics_by_id:
                self._scheduler.spawn(self._close(topic), name=f"close deleted topic {topic.name}")

    async def _close(self, topic: Topic) -> None:
        try:
            await self._close_partitions(topic)
        except StorageError as error:  # the next start finds its directory
            logger.warning("topic_removal_failed", extra=fields(topic=topic.name, reason=error.message))

    def _end_work(self, topic: Topic) -> None:
        self._at_work[topic.topic_id] -= 1
        if not self._at_work[topic.topic_id]:
            del self._at_work[topic.topic_id]
            self._close_deleted()

    def _begin_abandoning(self, topic: Topic) -> None:
        self._at_work[topic.topic_id] += 1
        work = self._abandon(topic, self.epoch())
        self._scheduler.spawn(work, name=f"delete unfinished topic {topic.name}")

    async def _abandon(self, topic: Topic, epoch: int) -> None:
        try:
            await self._abandon_with_retries(topic, epoch)
        finally:
            self._end_work(topic)

    async def _abandon_with_retries(self, topic: Topic, epoch: int) -> None:
        is_reported = False
        while self.epoch() == epoch and (epoch != 0 or self._broker_epoch is None):
            try:
                if await self._is_abandoned(topic):
                    return
            except (Unavailable, StorageError) as error:
                if not is_reported:
                    known = fields(topic=topic.name, reason=error.message)
                    logger.warning("unfinished_topic_deletion_failed", extra=known)
                is_reported = True
            await self._scheduler.sleep(ABANDON_AGAIN_MS)

    async def _is_abandoned(self, topic: Topic) -> bool:
        """The state in the store decides: failed steps may have been committed all the same, also the last one."""
        key = self.state.keys.topic(topic.name)
        entry = await self._store.get(key)
        document = None if entry is None else metadata_store.decode(key, entry.value)
        if entry is None or document is None or document["uuid"] != str(topic.topic_id):
            return True
        if document["state"] == LIVE:
            return True
        await self.state.wait_for_revision(entry.mod_revision, self._scheduler)
        found = self._unfinished(topic)
        if found.state == CREATING and self._broker_epoch is not None:
            if not await self.write(dataclasses.replace(found, state=DELETING, created_by=self._owner())):
                return False
            found = self._unfinished(topic)
        await self.remove(found)
        return True

    async def remove(self, topic: Topic) -> None:
        """Remove the data, then the partitions' keys, then the topic's key."""
        await self._close_partitions(topic)
        listing = await self._store.list(f"{self.state.keys.partitions}{topic.topic_id}/")
        key = self.state.keys.topic(topic.name)
        deletes = [Delete(entry.key) for entry in listing.entries]
        guard = [Compare(key, mod_revision=topic.mod_revision)]
        for chunk in chunks(deletes, self._store.operations_max):
            await metadata_store.transact_with_retries(self._store, guard, chunk)
        done = await metadata_store.transact_with_retries(self._store, guard, [Delete(key)])
        await self.state.wait_for_revision(done.revision, self._scheduler)

    async def write(self, topic: Topic, with_puts: Sequence[Put] = ()) -> bool:
        """Write a topic's key over revision `topic.mod_revision`; returns False if another write was first. In both
        cases the metadata image has caught up."""
        key = self.state.keys.topic(topic.name)
        writer = new_writer_id(self._random)
        puts = [Put(key, metadata_store.encode(topic_document(topic), writer)), *with_puts]
        compares = [Compare(key, mod_revision=topic.mod_revision), *self._session_guard()]
        done = await metadata_store.transact_resolving_ambiguity(self._store, compares, puts, writer)
        await self.state.wait_for_revision(done.revision, self._scheduler)
        return done.succeeded

    def _owner(self) -> TopicCreator | None:
        """This broker and its session. Raises `Unavailable` if it has none; None on a single node."""
        if self._broker_epoch is None:
            return None
        epoch = self.epoch()
        if epoch == 0:
            raise Unavailable("this broker has no session in its cluster")
        return TopicCreator(self._node_id, epoch)

    def epoch(self) -> int:
        """The epoch of this broker's session; 0: none."""
        return 0 if self._broker_epoch is None else self._broker_epoch()

    def _session_guard(self) -> list[Compare]:
        """The condition that makes a write fail when this broker's session has ended."""
        created_by = self._owner()
        if created_by is None:
            return []
        return [Compare(self.state.keys.session(created_by.node_id), create_revision=created_by.epoch)]

    def _check_session(self, created_by: TopicCreator | None) -> None:
        if created_by != self._owner():
            raise Unavailable("this broker's session has ended")

    @property
    def _bytes_beside_topic(self) -> int:
        return self._store.operations_max - 1

    def _partition_puts(self, topic: Topic, start: int) -> list[Put]:
        writer = new_writer_id(self._random)
        return [
            Put(
                self.state.keys.partition(topic.topic_id, index),
                metadata_store.encode(partition_document(partition), writer),
            )
            for index, partition in enumerate(topic.partitions[start:], start)
        ]

    async def _put_partitions(self, topic: Topic, puts: Sequence[Put]) -> None:
        guard = Compare(self.state.keys.topic(topic.name), mod_revision=topic.mod_revision)
        for chunk in chunks(puts, self._store.operations_max):
            done = await metadata_store.transact_with_retries(
                self._store, [guard, *self._session_guard()], chunk
            )
            if not done.succeeded:
                raise ConcurrentChange(f"topic {topic.name} was changed by another")


def chunks(items: Sequence[Any], size: int) -> Iterable[Sequence[Any]]:
    """`items`, at most `size` at a time."""
    return (items[start : start + size] for start in range(0, len(items), size))
