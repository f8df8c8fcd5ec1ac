"""Topic lifecycle: creates and deletes topics and adds partitions, in steps between which a crash is harmless.

To create a topic, the broker writes its key in state `creating`, opens its partitions on disk, and writes the key in
state `live`. To delete a topic, the broker writes its key in state `deleting`, removes the data, and deletes the keys.
So after a crash a topic is either live with all its directories, or unfinished. Unfinished topics are deleted: on a
single node at the next start, in a cluster by the controller. If a step fails without a crash, the broker that began
deletes what exists of the topic as soon as the metadata store allows; in a cluster as long as its session lasts.

Invariant: each step is a transaction of the metadata store. It succeeds only if the key of the topic is unchanged since
the previous step and, in a cluster, if the session of this broker still exists.
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
from mansio.metadata.metadata_store import (
    CONFLICT_ATTEMPTS_MAX,
    Compare,
    Delete,
    Put,
    new_uuid,
    new_writer_id,
)
from mansio.metadata.model import (
    TOPIC_CREATING,
    TOPIC_DELETING,
    TOPIC_LIVE,
    TopicCreator,
    partition_document,
    topic_document,
)
from mansio.metadata.topic_plan import collision

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
    from uuid import UUID

    from mansio.metadata.image import MetadataImage
    from mansio.metadata.metadata_store import MetadataStore
    from mansio.metadata.model import PartitionState, Topic
    from mansio.ports import Random, Scheduler

logger = logging.getLogger(__name__)


DELETION_RETRY_MS: Final = 1000
"""Interval between attempts to delete an unfinished topic."""


class TopicLifecycle:
    """Executes the changes that `TopicService` has checked. All methods run on the broker's event loop."""

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
        """Create the object. The parameters are those of `TopicService`."""
        self.state = state
        self.opening_count = 0
        """Number of partitions that are being created and are not in the metadata image yet."""
        self._store = store
        self._scheduler = scheduler
        self._random = random
        self._node_id = node_id
        self._open_partitions = open_partitions
        self._close_partitions = close_partitions
        self._broker_epoch = broker_epoch
        self._topics_in_progress: Counter[UUID] = Counter()
        """Topics that this broker is creating or deleting now, with the number of concurrent operations."""
        self._opened: dict[UUID, Topic] = {}
        """In a cluster: topics that this broker is creating, whose partitions it has opened, and that are not live
        yet."""
        if broker_epoch is not None:
            state.on_progress(self._check_remaining)

    async def create(self, planned: Topic) -> None:
        """Create a topic. It is live in the metadata image of this broker on return."""
        count = len(planned.partitions)
        self.opening_count += count
        try:
            topic = dataclasses.replace(planned, topic_id=new_uuid(self._random), created_by=self._creator())
            await self._delete_on_failure(topic, self._execute_creation(topic))
        finally:
            self.opening_count -= count

    async def _execute_creation(self, topic: Topic) -> None:
        count, writer = len(topic.partitions), new_writer_id(self._random)
        first = min(count, self._partition_puts_max)
        if not await self.write(topic, with_puts=self._partition_puts(topic, range(first), writer)):
            self._check_session(topic.created_by)
            raise TopicAlreadyExists(f"topic {topic.name!r} already exists")
        written = self._find_unfinished(topic)
        self._check_collisions(written)
        claimed = dataclasses.replace(topic, mod_revision=written.mod_revision)
        await self._write_partitions(claimed, range(first, count), writer)
        if self._broker_epoch is not None:
            self._opened[topic.topic_id] = topic
        await self._open_partitions(topic)
        created = await self.write(
            dataclasses.replace(topic, state=TOPIC_LIVE, mod_revision=written.mod_revision, created_by=None)
        )
        if not created:
            raise ConcurrentChange(f"topic {topic.name} was changed while it was created")
        self._opened.pop(topic.topic_id, None)

    def _check_collisions(self, written: Topic) -> None:
        """Raise `InvalidTopic` if another broker began to create a colliding topic before this one was written: of two
        that are created at the same time the first one stays."""
        if written.internal:
            return
        for other in self.state.colliding_topics(written.name):
            if other.state == TOPIC_LIVE or other.mod_revision < written.mod_revision:
                raise collision(written.name, other.name)

    async def delete(self, topic: Topic) -> None:
        """Delete a live topic: first its data on this broker, then its keys in the metadata store."""
        await self._delete_on_failure(topic, self._execute_deletion(topic))

    async def _execute_deletion(self, topic: Topic) -> None:
        for _ in range(CONFLICT_ATTEMPTS_MAX):
            if await self.write(dataclasses.replace(topic, state=TOPIC_DELETING, created_by=self._creator())):
                await self.remove(self._find_unfinished(topic))
                return
            found = self.state.topics_by_id.get(topic.topic_id)
            if found is None:
                raise UnknownTopicId(f"there is no topic with id {topic.topic_id}")
            topic = found
        raise ConcurrentChange(f"topic {topic.name} is being changed concurrently")

    def _find_unfinished(self, topic: Topic) -> Topic:
        """Return the unfinished topic that this broker has just written. Raises `ConcurrentChange` if it has changed
        since."""
        found = self.state.unfinished_topics.get(topic.name)
        if found is None or found.topic_id != topic.topic_id:
            raise ConcurrentChange(f"topic {topic.name} was changed by another broker")
        return found

    async def add_partitions(self, topic: Topic, added: tuple[PartitionState, ...]) -> None:
        """Add partitions to a topic. They are in the metadata image of this broker on return."""
        there = len(topic.partitions)
        grown = dataclasses.replace(topic, partitions=topic.partitions + added)
        self.opening_count += len(added)
        try:
            await self._open_partitions(grown)
            count, writer = len(grown.partitions), new_writer_id(self._random)
            last = range(max(there, count - self._partition_puts_max), count)
            await self._write_partitions(grown, range(there, last.start), writer)
            if not await self.write(grown, with_puts=self._partition_puts(grown, last, writer)):
                raise ConcurrentChange(f"topic {topic.name} was changed concurrently; read it and retry")
        finally:
            self.opening_count -= len(added)

    async def _delete_on_failure(self, topic: Topic, work: Coroutine[Any, Any, None]) -> None:
        """Run the steps that create or delete a topic. If a step fails, delete what exists of the topic.

        A single node first tries this once before it returns the error, so that the client can retry at once. Otherwise
        a task tries it until the metadata store accepts it; in a cluster only while the session of this broker lasts,
        afterwards the controller does it."""
        self._topics_in_progress[topic.topic_id] += 1
        try:
            await work
        except TopicAlreadyExists:
            raise
        except MansioError:
            if self._broker_epoch is not None or not await self._try_delete_remains(topic):
                self._begin_deleting_remains(topic)
            raise
        finally:
            self._end_work(topic)

    async def delete_unfinished(self, topic: Topic) -> None:
        """Delete an unfinished topic on a single node after a crash. If that fails, a task tries again, because a full
        disk must not prevent the start of the broker."""
        self._topics_in_progress[topic.topic_id] += 1
        try:
            if not await self._try_delete_remains(topic):
                self._begin_deleting_remains(topic)
        finally:
            self._end_work(topic)

    async def _try_delete_remains(self, topic: Topic) -> bool:
        """Call `_delete_remaining_parts` once; return False if it fails or has to be repeated."""
        try:
            return await self._delete_remaining_parts(topic)
        except (Unavailable, StorageError):
            return False

    def _check_remaining(self) -> None:
        """Delete unfinished topics of this broker that no task is working on: a step whose response was lost may be
        committed after the topic was deleted, and while the session of this broker lasts no other broker may delete
        it."""
        own = TopicCreator(self._node_id, self.epoch())
        for topic in self.state.unfinished_topics.values():
            if topic.created_by == own and topic.topic_id not in self._topics_in_progress:
                self._begin_deleting_remains(topic)
        self._close_deleted()

    def _close_deleted(self) -> None:
        """Close the partitions that this broker opened for topics that the controller deleted before they were live.
        Nothing else closes them."""
        if not self._opened:
            return
        unfinished = {topic.topic_id for topic in self.state.unfinished_topics.values()}
        for topic_id, topic in tuple(self._opened.items()):
            if topic_id in self._topics_in_progress or topic_id in unfinished:
                continue
            del self._opened[topic_id]
            if topic_id not in self.state.topics_by_id:
                self._scheduler.spawn(self._close(topic), name=f"close deleted topic {topic.name}")

    async def _close(self, topic: Topic) -> None:
        try:
            await self._close_partitions(topic)
        except StorageError as error:  # the next start finds the directory
            logger.warning("topic_removal_failed", extra=fields(topic=topic.name, reason=error.message))

    def _end_work(self, topic: Topic) -> None:
        self._topics_in_progress[topic.topic_id] -= 1
        if not self._topics_in_progress[topic.topic_id]:
            del self._topics_in_progress[topic.topic_id]
            self._close_deleted()

    def _begin_deleting_remains(self, topic: Topic) -> None:
        self._topics_in_progress[topic.topic_id] += 1
        work = self._delete_remains(topic, self.epoch())
        self._scheduler.spawn(work, name=f"delete unfinished topic {topic.name}")

    async def _delete_remains(self, topic: Topic, epoch: int) -> None:
        try:
            await self._delete_remains_with_retries(topic, epoch)
        finally:
            self._end_work(topic)

    async def _delete_remains_with_retries(self, topic: Topic, epoch: int) -> None:
        is_reported = False
        while self.epoch() == epoch and (epoch != 0 or self._broker_epoch is None):
            try:
                if await self._delete_remaining_parts(topic):
                    return
            except (Unavailable, StorageError) as error:
                if not is_reported:
                    known = fields(topic=topic.name, reason=error.message)
                    logger.warning("unfinished_topic_deletion_failed", extra=known)
                is_reported = True
            await self._scheduler.sleep(DELETION_RETRY_MS)

    async def _delete_remaining_parts(self, topic: Topic) -> bool:
        """Delete what exists of the topic according to the metadata store; return whether nothing is left to do.

        Steps that were reported as failed may have been committed nevertheless; if the topic is live, it is kept."""
        key = self.state.keys.topic(topic.name)
        entry = await self._store.get(key)
        document = None if entry is None else metadata_store.decode(key, entry.value)
        if entry is None or document is None or document["uuid"] != str(topic.topic_id):
            return True
        if document["state"] == TOPIC_LIVE:
            return True
        await self.state.wait_for_revision(entry.mod_revision, self._scheduler)
        found = self._find_unfinished(topic)
        if found.state == TOPIC_CREATING and self._broker_epoch is not None:
            if not await self.write(
                dataclasses.replace(found, state=TOPIC_DELETING, created_by=self._creator())
            ):
                return False
            found = self._find_unfinished(topic)
        await self.remove(found)
        return True

    async def remove(self, topic: Topic) -> None:
        """Remove the data of a topic on this broker, then the keys of its partitions, then the key of the topic."""
        await self._close_partitions(topic)
        listing = await self._store.list(f"{self.state.keys.partitions}{topic.topic_id}/")
        key = self.state.keys.topic(topic.name)
        deletes = [Delete(entry.key) for entry in listing.entries]
        guard = [Compare(key, mod_revision=topic.mod_revision)]
        for chunk in split_into_chunks(deletes, self._store.operations_max):
            await metadata_store.transact_with_retries(self._store, guard, chunk)
        done = await metadata_store.transact_with_retries(self._store, guard, [Delete(key)])
        await self.state.wait_for_revision(done.revision, self._scheduler)

    async def write(self, topic: Topic, with_puts: Sequence[Put] = ()) -> bool:
        """Write the key of a topic if its revision still is `topic.mod_revision`, together with `with_puts`. Return
        False if another write changed it before. In both cases the metadata image then includes the current key."""
        key = self.state.keys.topic(topic.name)
        writer = new_writer_id(self._random)
        puts = [Put(key, metadata_store.encode(topic_document(topic), writer)), *with_puts]
        compares = [Compare(key, mod_revision=topic.mod_revision), *self._session_guard()]
        done = await metadata_store.transact_resolving_ambiguity(self._store, compares, puts, writer)
        await self.state.wait_for_revision(done.revision, self._scheduler)
        return done.succeeded

    def _creator(self) -> TopicCreator | None:
        """Return this broker and its session; None on a single node. Raises `Unavailable` if it has no session."""
        if self._broker_epoch is None:
            return None
        epoch = self.epoch()
        if epoch == 0:
            raise Unavailable("this broker has no session in its cluster")
        return TopicCreator(self._node_id, epoch)

    def epoch(self) -> int:
        """Return the epoch of this broker's session; 0 if it has none."""
        return 0 if self._broker_epoch is None else self._broker_epoch()

    def _session_guard(self) -> list[Compare]:
        """Return the condition with which a write fails if the session of this broker has ended."""
        created_by = self._creator()
        if created_by is None:
            return []
        return [Compare(self.state.keys.session(created_by.node_id), create_revision=created_by.epoch)]

    def _check_session(self, created_by: TopicCreator | None) -> None:
        if created_by != self._creator():
            raise Unavailable("this broker's session has ended")

    @property
    def _partition_puts_max(self) -> int:
        """Number of partition keys that one transaction can write together with the key of the topic."""
        return self._store.operations_max - 1

    def _partition_puts(self, topic: Topic, indexes: Sequence[int], writer: str) -> list[Put]:
        keys = self.state.keys
        return [
            Put(
                keys.partition(topic.topic_id, index),
                metadata_store.encode(partition_document(topic.partitions[index]), writer),
            )
            for index in indexes
        ]

    async def _write_partitions(self, topic: Topic, indexes: Sequence[int], writer: str) -> None:
        """Write the keys of some partitions if the key of the topic is unchanged; those of one transaction are encoded
        at a time."""
        guard = Compare(self.state.keys.topic(topic.name), mod_revision=topic.mod_revision)
        for chunk in split_into_chunks(indexes, self._store.operations_max):
            puts = self._partition_puts(topic, chunk, writer)
            done = await metadata_store.transact_with_retries(
                self._store, [guard, *self._session_guard()], puts
            )
            if not done.succeeded:
                raise ConcurrentChange(f"topic {topic.name} was changed by another")


def split_into_chunks(items: Sequence[Any], size: int) -> Iterable[Sequence[Any]]:
    """Yield the items in order, in sequences of at most `size`."""
    return (items[start : start + size] for start in range(0, len(items), size))
