"""Topics: made, changed, grown, deleted. The one place that decides these, whichever door asks.

Owns the order of steps. A creation is first written as `creating`, then its partitions are opened on disk,
then it is written as `live`; a deletion is first written as `deleting`, then its data is removed, then its
keys. So a crash anywhere leaves either a live topic with all its directories, or one that `recover` finishes
deleting.

Always true: a topic is in `state.topics` only while it is live and that is durable; partitions that are open
but not in there belong to nobody yet and must not be served. Two that change the same topic cannot both win:
each step is a guarded transaction.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import TYPE_CHECKING, Any, Final, TypeVar
from uuid import UUID

from mansio.cluster import metadata, topic_config
from mansio.cluster.config_entries import topic_entries
from mansio.cluster.metadata import Compare, Delete, Put
from mansio.cluster.metadata_response import TopicEncoder
from mansio.cluster.state import (
    CREATING,
    DELETING,
    LIVE,
    Topic,
    new_uuid,
    new_writer,
    partition_document,
    topic_document,
)
from mansio.cluster.topic_plan import (
    INTERNAL_CONFIGS,
    INTERNAL_TOPICS,
    NewTopic,
    check_topic_name,
    colliding,
    plan_growth,
    plan_partitions,
)
from mansio.errors import (
    ConcurrentChange,
    InvalidTopic,
    MansioError,
    PolicyViolation,
    TopicAlreadyExists,
    Unavailable,
    UnknownTopicId,
    UnknownTopicOrPartition,
)
from mansio.logs import fields

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence

    from mansio.cluster.config_entries import ConfigEntry
    from mansio.cluster.metadata import MetadataStore
    from mansio.cluster.state import ClusterState, PartitionState
    from mansio.cluster.topic_config import Change, TopicSettings
    from mansio.config import Settings
    from mansio.ports import Promise, Random, Scheduler

__all__ = ["NewTopic", "TopicAdmin"]

logger = logging.getLogger(__name__)
T = TypeVar("T")

CONFLICT_ATTEMPTS_MAX: Final = 5
NO_TOPIC_ID: Final = UUID(int=0)

INTERNAL_CHANGEABLE: Final = frozenset(
    {
        "delete.retention.ms",
        "index.interval.bytes",
        "max.compaction.lag.ms",
        "min.cleanable.dirty.ratio",
        "min.compaction.lag.ms",
        "segment.bytes",
        "segment.ms",
    }
)
"""What may be set on the broker's own topics: how they lie on the disk, and how eagerly they are compacted. Kafka lets
anything be set; another cleanup policy or a retention would make it forget the offsets of groups."""


class TopicAdmin:
    """See the module. For every door; all methods belong to the broker's loop.

    `open_partitions(topic)` makes the directories and opens the logs of those that are not open yet;
    `close_partitions(topic)` closes those that are open and removes the data of the whole topic, also where there
    is none. Each is complete, and on disk, when it returns.
    """

    __slots__ = (
        "_close_partitions",
        "_open_partitions",
        "_opening",
        "_random",
        "_scheduler",
        "_settings",
        "_store",
        "encoder",
        "state",
    )

    def __init__(
        self,
        *,
        store: MetadataStore,
        state: ClusterState,
        settings: Settings,
        scheduler: Scheduler,
        random: Random,
        open_partitions: Callable[[Topic], Awaitable[None]],
        close_partitions: Callable[[Topic], Awaitable[None]],
    ) -> None:
        self.state = state
        self.encoder = TopicEncoder()
        self._store = store
        self._settings = settings
        self._scheduler = scheduler
        self._random = random
        self._open_partitions = open_partitions
        self._close_partitions = close_partitions
        self._opening = 0  # partitions promised but not in the view yet

    # Looking

    def find(self, name: str) -> Topic:
        """The live topic of this name. Raises `UnknownTopicOrPartition`."""
        topic = self.state.topics.get(name)
        if topic is None:
            raise UnknownTopicOrPartition(f"there is no topic {name!r}")
        return topic

    def find_by_id(self, topic_id: UUID) -> Topic:
        """The live topic with this id. Raises `UnknownTopicId`."""
        topic = self.state.topics_by_id.get(topic_id)
        if topic is None:
            raise UnknownTopicId(f"there is no topic with id {topic_id}")
        return topic

    def settings_of(self, topic: Topic) -> TopicSettings:
        """What is in force for a topic."""
        return topic_config.resolve(topic.configs, self._settings.topic_defaults, topic.replication_factor)

    def describe(self, topic: Topic) -> list[ConfigEntry]:
        """Every setting of a topic with its source."""
        return topic_entries(topic.configs, self._settings.topic_defaults, topic.replication_factor)

    # Changing

    async def create(self, new: NewTopic, *, validate_only: bool = False, internal: bool = False) -> Topic:
        """Make a topic; it is open, durable and visible when this returns.

        Raises `InvalidTopic`, `TopicAlreadyExists`, `InvalidPartitions`, `InvalidReplicationFactor`,
        `InvalidReplicaAssignment`, `InvalidConfig`, `PolicyViolation`, `StorageError`. With `validate_only`
        nothing is made and the topic returned has no id.
        """
        topic = self._plan(new, internal=internal)
        if validate_only:
            return topic
        if (other := colliding(new.name, self.state.topics)) is not None:
            logger.warning(
                "topics differ only in '.' and '_': metrics will collide",
                extra=fields(topic=new.name, other=other),
            )
        made = await self._unbroken(self._create(topic), name=f"create topic {new.name}")
        partitions = len(made.partitions)
        logger.info("topic created", extra=fields(topic=made.name, id=made.topic_id, partitions=partitions))
        return made

    async def auto_create(self, name: str) -> Topic:
        """Make a topic because a client asked for it; one that another has just made is as good."""
        try:
            return await self.create(NewTopic(name))
        except TopicAlreadyExists:
            return self.find(name)

    async def delete(self, topic: Topic) -> None:
        """Delete a topic and its data. Raises `UnknownTopicOrPartition`, `InvalidTopic` (internal),
        `StorageError`.
        """
        if topic.internal:
            raise InvalidTopic(f"{topic.name} is the broker's own and cannot be deleted")
        await self._unbroken(self._delete(topic), name=f"delete topic {topic.name}")
        logger.info("topic deleted", extra=fields(topic=topic.name, id=topic.topic_id))

    async def grow(
        self,
        name: str,
        count: int,
        assignments: Sequence[Sequence[int]] | None = None,
        *,
        validate_only: bool = False,
    ) -> Topic:
        """Give a topic more partitions, `count` in all; `assignments` names the brokers of the new ones.

        Raises `UnknownTopicOrPartition`, `InvalidPartitions`, `InvalidReplicaAssignment`, `PolicyViolation`.
        """
        topic = self.find(name)
        if topic.internal:
            raise InvalidTopic(f"{name} is the broker's own and cannot be changed")
        added = plan_growth(
            len(topic.partitions),
            count,
            assignments,
            node_id=self._settings.node_id,
            replication_factor=topic.replication_factor,
            room=self._room,
        )
        if validate_only:
            return dataclasses.replace(topic, partitions=topic.partitions + added)
        grown = await self._unbroken(self._grow(topic, added), name=f"grow topic {name}")
        known = fields(topic=name, partitions_before=len(topic.partitions), partitions=len(grown.partitions))
        logger.info("partitions added", extra=known)
        return grown

    async def alter_configs(
        self, name: str, changes: Sequence[Change], *, replace: bool = False, validate_only: bool = False
    ) -> Topic:
        """Change some settings of a topic (KIP-339); with `replace` the others go back to their defaults.

        What the broker's own topics cannot do without keeps its value. Raises `UnknownTopicOrPartition`,
        `InvalidConfig`, `InvalidRequest`, `PolicyViolation` (a setting the broker's own topic depends on).
        """
        for _ in range(CONFLICT_ATTEMPTS_MAX):
            topic = self.find(name)
            if topic.internal:
                _check_internal(name, changes)
            configs = topic_config.apply_changes(
                {} if replace else topic.configs, self._settings.topic_defaults, changes
            )
            if topic.internal:
                configs = {**INTERNAL_CONFIGS, **configs}
            topic_config.check_together(configs, topic.replication_factor, self._settings.topic_defaults)
            changed = dataclasses.replace(topic, configs=configs)
            if validate_only or configs == topic.configs:
                return changed
            if await self._write(changed):
                logger.info("topic settings changed", extra=fields(topic=name, changed=_told(topic, changed)))
                return self.find(name)
        raise ConcurrentChange(f"the settings of {name} are being changed by others")

    async def begin_leader_epochs(self, places: Sequence[tuple[str, int]]) -> None:
        """This broker leads these partitions (topic, index) anew: what it writes from now on carries a leader epoch of
        its own. One change for all of them: each would have every view of the topic made anew.

        Needed after a recovery that cut a torn tail, because the offsets of that tail are given out again.
        """
        for chunk in _chunks(places, self._store.operations_max):
            await self._begin_leader_epochs(chunk)

    async def _begin_leader_epochs(self, places: Sequence[tuple[str, int]]) -> None:
        for _ in range(CONFLICT_ATTEMPTS_MAX):
            writer = new_writer(self._random)
            compares, puts = [], []
            for name, index in places:
                key = self.state.keys.partition(self.find(name).topic_id, index)
                entry = await self._store.get(key)
                if entry is None:
                    raise UnknownTopicOrPartition(f"there is no partition {name}-{index}")
                document = metadata.decode(key, entry.value)
                later = {**document, "leader_epoch": document["leader_epoch"] + 1}
                del later["schema"], later["writer"]
                compares.append(Compare(key, mod_revision=entry.mod_revision))
                puts.append(Put(key, metadata.encode(later, writer)))
            done = await metadata.transact_surely(self._store, compares, puts, writer)
            await self.state.reached(done.revision, self._scheduler)
            if done.succeeded:
                return
        raise ConcurrentChange(f"the leader epochs of {len(places)} partitions are being changed by others")

    async def recover(self) -> None:
        """At start: finish deleting what a crash left half made or half deleted; bring the broker's own topics, if
        an earlier version made them, to the settings they are made with now."""
        for topic in tuple(self.state.unfinished.values()):
            logger.warning("unfinished topic is deleted", extra=fields(topic=topic.name, state=topic.state))
            await self._remove(topic)
        for topic in tuple(self.state.topics.values()):
            if topic.internal and (missing := INTERNAL_CONFIGS.keys() - topic.configs.keys()):
                settings = ",".join(sorted(missing))
                logger.info(
                    "topic gets the settings it lacks", extra=fields(topic=topic.name, settings=settings)
                )
                configs = {**INTERNAL_CONFIGS, **topic.configs}
                await self._write(dataclasses.replace(topic, configs=configs))

    # Planning: no effects

    def _plan(self, new: NewTopic, *, internal: bool) -> Topic:
        check_topic_name(new.name)
        if new.name in INTERNAL_TOPICS and not internal:
            raise InvalidTopic(f"{new.name} is the broker's own name")
        if new.name in self.state.topics:
            raise TopicAlreadyExists(f"topic {new.name!r} exists")
        if (unfinished := self.state.unfinished.get(new.name)) is not None:
            doing = "made" if unfinished.state == CREATING else "deleted"
            raise TopicAlreadyExists(f"topic {new.name!r} is being {doing}")
        partitions, replication_factor = plan_partitions(
            new, self._settings.node_id, self._settings.num_partitions, self._room
        )
        configs = topic_config.checked(new.configs, replication_factor, self._settings.topic_defaults)
        return Topic(
            name=new.name,
            topic_id=NO_TOPIC_ID,
            partitions=partitions,
            replication_factor=replication_factor,
            configs={**INTERNAL_CONFIGS, **configs} if internal else configs,
            internal=internal,
            state=CREATING,
            mod_revision=0,
        )

    @property
    def _room(self) -> int:
        return self._settings.partitions_max - self.state.partition_count - self._opening

    # Doing

    async def _create(self, planned: Topic) -> Topic:
        count = len(planned.partitions)
        self._opening += count
        try:
            topic = dataclasses.replace(planned, topic_id=new_uuid(self._random))
            puts = self._partition_puts(topic, 0)
            if not await self._write(topic, with_puts=puts[: self._room_beside_topic]):
                raise TopicAlreadyExists(f"topic {topic.name!r} exists")
            written = self.state.unfinished[topic.name]
            await self._put_partitions(written, puts[self._room_beside_topic :])
            try:
                await self._open_partitions(topic)
                made = await self._write(
                    dataclasses.replace(topic, state=LIVE, mod_revision=written.mod_revision)
                )
            except MansioError:
                await self._remove(written)
                raise
            if not made:
                raise ConcurrentChange(f"topic {topic.name} was changed while it was made")
            return self.find(topic.name)
        finally:
            self._opening -= count

    async def _delete(self, topic: Topic) -> None:
        for _ in range(CONFLICT_ATTEMPTS_MAX):
            if await self._write(dataclasses.replace(topic, state=DELETING)):
                await self._remove(self.state.unfinished[topic.name])
                return
            topic = self.find_by_id(topic.topic_id)
        raise ConcurrentChange(f"topic {topic.name} is being changed by others")

    async def _grow(self, topic: Topic, added: tuple[PartitionState, ...]) -> Topic:
        there = len(topic.partitions)
        grown = dataclasses.replace(topic, partitions=topic.partitions + added)
        self._opening += len(added)
        try:
            await self._open_partitions(grown)
            puts = self._partition_puts(grown, there)
            first = max(0, len(puts) - self._room_beside_topic)
            await self._put_partitions(topic, puts[:first])
            if not await self._write(grown, with_puts=puts[first:]):
                raise ConcurrentChange(f"topic {topic.name} was changed by another; look and try again")
            return self.find(topic.name)
        finally:
            self._opening -= len(added)

    async def _remove(self, topic: Topic) -> None:
        """Remove the data, then the partitions' keys, then the topic's."""
        await self._close_partitions(topic)
        listing = await self._store.list(f"{self.state.keys.partitions}{topic.topic_id}/")
        key = self.state.keys.topic(topic.name)
        deletes = [Delete(entry.key) for entry in listing.entries]
        for chunk in _chunks(deletes, self._store.operations_max):
            await self._store.transact([Compare(key, mod_revision=topic.mod_revision)], chunk)
        done = await self._store.transact([Compare(key, mod_revision=topic.mod_revision)], [Delete(key)])
        await self.state.reached(done.revision, self._scheduler)

    async def _write(self, topic: Topic, with_puts: Sequence[Put] = ()) -> bool:
        """Write a topic's key over revision `topic.mod_revision`; False when another was first. The view has
        caught up
        in either case."""
        key = self.state.keys.topic(topic.name)
        writer = new_writer(self._random)
        puts = [Put(key, metadata.encode(topic_document(topic), writer)), *with_puts]
        done = await metadata.transact_surely(
            self._store, [Compare(key, mod_revision=topic.mod_revision)], puts, writer
        )
        await self.state.reached(done.revision, self._scheduler)
        return done.succeeded

    @property
    def _room_beside_topic(self) -> int:
        return self._store.operations_max - 1

    def _partition_puts(self, topic: Topic, start: int) -> list[Put]:
        writer = new_writer(self._random)
        return [
            Put(
                self.state.keys.partition(topic.topic_id, index),
                metadata.encode(partition_document(partition), writer),
            )
            for index, partition in enumerate(topic.partitions[start:], start)
        ]

    async def _put_partitions(self, topic: Topic, puts: Sequence[Put]) -> None:
        guard = Compare(self.state.keys.topic(topic.name), mod_revision=topic.mod_revision)
        for chunk in _chunks(puts, self._store.operations_max):
            if not (await self._store.transact([guard], chunk)).succeeded:
                raise ConcurrentChange(f"topic {topic.name} was changed by another")

    async def _unbroken(self, work: Coroutine[Any, Any, T], *, name: str) -> T:
        """Carry `work` to its end even when whoever asked goes away in the middle."""
        promise: Promise[T] = self._scheduler.promise()

        async def run() -> None:
            try:
                result = await work
                if not promise.done():
                    promise.set_result(result)
            except MansioError as error:
                if promise.done():
                    logger.warning(
                        "work that nobody waits for any more failed", extra=fields(work=name, reason=error)
                    )
                else:
                    promise.set_exception(error)
            finally:  # a defect of ours is reported by the scheduler; whoever asked is not left hanging
                if not promise.done():
                    promise.set_exception(Unavailable(f"{name}: broken off"))

        self._scheduler.spawn(run(), name=name)
        return await promise


def _check_internal(name: str, changes: Sequence[Change]) -> None:
    for change in changes:
        if change.name in topic_config.SETTINGS and change.name not in INTERNAL_CHANGEABLE:
            raise PolicyViolation(
                f"{name} is the broker's own: {change.name} cannot be changed there, only "
                f"{', '.join(sorted(INTERNAL_CHANGEABLE))}"
            )


def _told(before: Topic, after: Topic) -> str:
    """What changed, as `name=value` with commas; a setting that went back to its default has no value."""
    names = sorted({*before.configs, *after.configs})
    return ",".join(
        f"{name}={after.configs.get(name, '')}"
        for name in names
        if before.configs.get(name) != after.configs.get(name)
    )


def _chunks(items: Sequence[Any], size: int) -> Iterable[Sequence[Any]]:
    return (items[start : start + size] for start in range(0, len(items), size))
