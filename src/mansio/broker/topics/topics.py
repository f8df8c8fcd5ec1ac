"""Topic service: create, delete, describe and configure topics, and add partitions.

`TopicService` checks which changes are valid; `TopicLifecycle` executes them in steps between which a crash is
harmless. In a cluster, the broker that receives the request creates or deletes the topic; the other brokers open and
close their replicas when their metadata images change.

Invariants:
* `state.topics` contains exactly the topics that are durably live. Clients cannot use partitions of other topics, even
  if they are open.
* Of two concurrent changes of one topic only one succeeds, because each step is a guarded transaction.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import TYPE_CHECKING, Any, Final, TypeVar
from uuid import UUID
from weakref import WeakKeyDictionary

from mansio.broker.topics.topic_lifecycle import TopicLifecycle, split_into_chunks
from mansio.config import topic_config
from mansio.config.broker_config import BrokerConfigSources
from mansio.config.config_entries import topic_entries
from mansio.config.topic_names import AUDIT_TOPIC, EVENT_TOPICS, TRACE_TOPIC
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
from mansio.metadata import metadata_store
from mansio.metadata.metadata_response import TopicEncoder
from mansio.metadata.metadata_store import CONFLICT_ATTEMPTS_MAX, Compare, Put, new_writer_id
from mansio.metadata.model import TOPIC_CREATING, Topic
from mansio.metadata.topic_plan import (
    AUDIT_TOPIC_CONFIGS,
    COMPACTED_TOPIC_CONFIGS,
    INTERNAL_TOPICS,
    PRUNED_TOPIC_CONFIGS,
    PRUNED_TOPICS,
    TRACE_TOPIC_CONFIGS,
    ClusterBrokers,
    NewTopic,
    check_internal_name,
    check_topic_name,
    collision,
    plan_growth,
    plan_partitions,
)
from mansio.ports import complete, complete_with_error
from mansio.tracebacks import copied, result_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence

    from mansio.broker.topics.mutation_quota import MutationQuota
    from mansio.config.config_def import Change
    from mansio.config.config_entries import ConfigEntry
    from mansio.config.settings import Settings
    from mansio.config.topic_config import TopicSettings
    from mansio.metadata.image import MetadataImage
    from mansio.metadata.metadata_store import MetadataStore
    from mansio.metadata.topic_plan import Partitions
    from mansio.ports import Promise, Random, Scheduler

__all__ = ["NewTopic", "TopicService"]

logger = logging.getLogger(__name__)
T = TypeVar("T")


PARTITIONS_UNLIMITED: Final = 1 << 30

NO_TOPIC_ID: Final = UUID(int=0)
"""Topic id of a topic that is not created yet."""

MISSING_TOPICS_LOGGED_MAX: Final = 100
"""Maximum number of topics that are logged as missing and not created automatically; clients may name any number."""

INTERNAL_TOPIC_CHANGEABLE_SETTINGS: Final = frozenset(
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
"""Settings of internal topics that may be changed: storage layout and compaction. Kafka allows all; a
different cleanup policy or retention would delete the offsets of groups."""

EVENT_TOPIC_CHANGEABLE_SETTINGS: Final = frozenset({"retention.bytes", "retention.ms"})
"""Settings of the topics of the audit and of the trace that may be changed, too."""


class TopicService:
    """Creates, deletes, describes and alters topics. All methods run on the broker's event loop.

    `open_partitions(topic)` creates the directories of a topic and opens its logs, as far as they are not open yet.
    `close_partitions(topic)` closes its open logs and removes all its data; it is no error if there is none. The
    effects of both are durable on return.
    """

    __slots__ = (
        "_broker_epoch",
        "_cached_settings",
        "_config_sources",
        "_has_schema_registry",
        "_lifecycle",
        "_missing_topics_logged",
        "_partitions_max",
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
        state: MetadataImage,
        settings: Settings,
        scheduler: Scheduler,
        random: Random,
        open_partitions: Callable[[Topic], Awaitable[None]],
        close_partitions: Callable[[Topic], Awaitable[None]],
        partitions_max: int = PARTITIONS_UNLIMITED,
        broker_epoch: Callable[[], int] | None = None,
        has_schema_registry: Callable[[], bool] = lambda: True,
    ) -> None:
        """`partitions_max`: partitions that the limit of descriptors allows. `broker_epoch`: None on a single node; in
        a cluster it returns the epoch of this broker's session, 0 if it has no session and therefore cannot change
        anything. `has_schema_registry`: whether topics may be checked against the schema registry."""
        self.state = state
        self.encoder = TopicEncoder()
        self._store = store
        self._config_sources = BrokerConfigSources(settings)
        self._settings = settings
        self._cached_settings: WeakKeyDictionary[Topic, TopicSettings] = WeakKeyDictionary()
        self._scheduler = scheduler
        self._random = random
        self._partitions_max = partitions_max
        self._broker_epoch = broker_epoch
        self._has_schema_registry = has_schema_registry
        self._missing_topics_logged: set[str] = set()
        self._lifecycle = TopicLifecycle(
            store=store,
            state=state,
            scheduler=scheduler,
            random=random,
            node_id=settings.node_id,
            open_partitions=open_partitions,
            close_partitions=close_partitions,
            broker_epoch=broker_epoch,
        )

    def use_settings(self, config_sources: BrokerConfigSources, effective: Settings) -> None:
        """Use new settings of the broker: the `effective` values, and the `config_sources` in which they are set."""
        self._config_sources = config_sources
        self._settings = effective
        self._cached_settings.clear()

    # Read

    def find(self, name: str) -> Topic:
        """Return the live topic with this name. Raises `UnknownTopicOrPartition`."""
        topic = self.state.topics.get(name)
        if topic is None:
            raise UnknownTopicOrPartition(f"there is no topic {name!r}")
        return topic

    def find_by_id(self, topic_id: UUID) -> Topic:
        """Return the live topic with this id. Raises `UnknownTopicId`."""
        topic = self.state.topics_by_id.get(topic_id)
        if topic is None:
            raise UnknownTopicId(f"there is no topic with id {topic_id}")
        return topic

    def settings_of(self, topic: Topic) -> TopicSettings:
        """Return the effective settings of a topic. They are cached, because publishing needs them in each call."""
        found = self._cached_settings.get(topic)
        if found is None:
            found = self._cached_settings[topic] = topic_config.resolve_topic_settings(
                topic.configs, self._settings.topic_defaults, topic.replication_factor
            )
        return found

    def describe(self, topic: Topic) -> list[ConfigEntry]:
        """Return all settings of a topic with their sources."""
        return topic_entries(topic.configs, self._config_sources, topic.replication_factor)

    # Change

    async def create(
        self,
        new: NewTopic,
        *,
        validate_only: bool = False,
        internal: bool = False,
        quota: MutationQuota | None = None,
    ) -> Topic:
        """Create a topic. On return it is durable, its partitions are open, and clients can find it.

        `quota`: that of the client; None if it has none, or for a topic that the broker needs itself. Raises
        `InvalidTopic`, `TopicAlreadyExists`, `InvalidPartitions`, `InvalidReplicationFactor`,
        `InvalidReplicaAssignment`, `InvalidConfig`, `PolicyViolation`, `ThrottlingQuotaExceeded`, `StorageError`. With
        `validate_only` nothing is created or counted, and the returned topic has no id.
        """
        topic = self._plan_topic(new, internal=internal)
        if validate_only:
            return topic
        if quota is not None:
            quota.record(len(topic.partitions))
        _warn_without_effect(topic.name, topic.configs)
        created = await self._run_uninterrupted(self._create(topic), name=f"create topic {new.name}")
        partitions = len(created.partitions)
        logger.info(
            "topic_created", extra=fields(topic=created.name, id=created.topic_id, partitions=partitions)
        )
        return created

    async def find_or_auto_create(
        self,
        name: str,
        *,
        is_allowed_by_client: bool,
        check_creation: Callable[[str], object] = lambda _: None,
        on_created: Callable[[str], object] = lambda _: None,
        quota: MutationQuota | None = None,
    ) -> Topic:
        """Return the topic for which a client requests metadata. If it does not exist, it is created if the client
        allows it and `auto_create_topics_enable` is set. `check_creation`: called with the name of a topic that is
        about to be created; raises an error if the client may not do that. `on_created`: called with the name if this
        call has created the topic. Raises the error of `check_creation`, `InvalidTopic`, `UnknownTopicOrPartition`,
        and the errors of `create`.

        Kafka creates topics by default. Programs that rely on it wait for the topic, or fail with a misleading error;
        therefore the setting is mentioned in the log, once for each topic.
        """
        topic = self.state.topics.get(name)
        if topic is not None:
            return topic
        check_topic_name(name)
        if not is_allowed_by_client or name in INTERNAL_TOPICS:
            raise UnknownTopicOrPartition(f"there is no topic {name!r}")
        if not self._settings.auto_create_topics_enable:
            self._log_missing_topic(name)
            raise UnknownTopicOrPartition(f"there is no topic {name!r}")
        check_creation(name)
        try:
            return await self.auto_create(name, quota, on_created)
        except UnknownTopicOrPartition:
            raise  # another request is creating the topic, or has deleted it meanwhile
        except MansioError as error:
            logger.warning("topic_auto_create_failed", extra=fields(topic=name, reason=error))
            raise

    async def auto_create(
        self,
        name: str,
        quota: MutationQuota | None = None,
        on_created: Callable[[str], object] = lambda _: None,
    ) -> Topic:
        """Create a topic with the broker's default settings, or return it if another request has just created it.
        `quota`: see `create`; `on_created`: see `find_or_auto_create`."""
        try:
            created = await self.create(NewTopic(name), quota=quota)
        except TopicAlreadyExists:
            return self.find(name)
        on_created(name)
        return created

    def _log_missing_topic(self, name: str) -> None:
        logged = self._missing_topics_logged
        if name in logged or len(logged) >= MISSING_TOPICS_LOGGED_MAX:
            return
        logged.add(name)
        remedy = "create the topic, or set auto_create_topics_enable=true (Kafka's default)"
        logger.warning("topic_not_auto_created", extra=fields(topic=name, remedy=remedy))

    async def delete(self, topic: Topic, *, quota: MutationQuota | None = None) -> None:
        """Delete a topic and its data. `quota`: see `create`. Raises `UnknownTopicOrPartition`, `InvalidTopic`
        (internal), `ThrottlingQuotaExceeded`, `StorageError`."""
        if topic.internal:
            raise InvalidTopic(f"{topic.name} is the broker's own and cannot be deleted")
        if quota is not None:
            quota.record(len(topic.partitions))
        await self._run_uninterrupted(self._lifecycle.delete(topic), name=f"delete topic {topic.name}")
        logger.info("topic_deleted", extra=fields(topic=topic.name, id=topic.topic_id))

    async def add_partitions(
        self,
        name: str,
        count: int,
        assignments: Sequence[Sequence[int]] | None = None,
        *,
        validate_only: bool = False,
        quota: MutationQuota | None = None,
    ) -> Topic:
        """Add partitions to a topic until it has `count`. `assignments`: the brokers of each new partition, None to let
        this broker choose them. `quota`: see `create`.

        Raises `UnknownTopicOrPartition`, `InvalidPartitions`, `InvalidReplicaAssignment`, `PolicyViolation`,
        `ThrottlingQuotaExceeded`.
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
            creatable_partition_count=self._creatable_partition_count,
            cluster_brokers=self._cluster_brokers(start=topic.topic_id.int),
        )
        self._check_descriptor_limit(len(added))
        if validate_only:
            return dataclasses.replace(topic, partitions=topic.partitions + added)
        if quota is not None:
            quota.record(len(added))
        grown = await self._run_uninterrupted(self._add_partitions(topic, added), name=f"grow topic {name}")
        known = fields(topic=name, partitions_before=len(topic.partitions), partitions=len(grown.partitions))
        logger.info("partitions_added", extra=known)
        return grown

    async def alter_configs(
        self, name: str, changes: Sequence[Change], *, replace: bool = False, validate_only: bool = False
    ) -> Topic:
        """Change settings of a topic (KIP-339). With `replace`, settings that `changes` does not name are reset to
        their defaults; settings that an internal topic requires keep their values.

        Raises `UnknownTopicOrPartition`, `InvalidConfig`,
        `InvalidRequest`, `PolicyViolation` (a required setting of an internal topic).
        """
        for _ in range(CONFLICT_ATTEMPTS_MAX):
            topic = self.find(name)
            if topic.internal:
                _check_internal_topic_changes(name, changes)
            configs = topic_config.apply_changes(
                {} if replace else topic.configs, self._settings.topic_defaults, changes
            )
            if topic.internal:
                configs = {**_internal_topic_configs(name), **configs}
            topic_config.check_combination(configs, topic.replication_factor, self._settings.topic_defaults)
            topic_config.check_change(topic.configs, configs)
            topic_config.check_schema_registry(topic.configs, configs, is_enabled=self._has_schema_registry())
            changed = dataclasses.replace(topic, configs=configs)
            if validate_only or configs == topic.configs:
                return changed
            if await self._lifecycle.write(changed):
                _warn_without_effect(
                    name, {key: value for key, value in configs.items() if topic.configs.get(key) != value}
                )
                logger.info(
                    "topic_settings_changed",
                    extra=fields(topic=name, changed=_format_changes(topic, changed)),
                )
                return self.find(name)
        raise ConcurrentChange(f"the settings of {name} are being changed concurrently")

    async def begin_leader_epochs(self, partitions: Sequence[tuple[str, int]]) -> None:
        """Start a new leader epoch of (topic, partition) pairs that this broker leads. All are changed together,
        because each change rebuilds topics in the metadata image.

        This is necessary after a recovery that truncated a torn tail, because the offsets of that tail are assigned
        again. In a cluster this does nothing: there a restarted broker has a new session, and leaders get a new epoch
        with each session.
        """
        if self._broker_epoch is not None:
            return
        for chunk in split_into_chunks(partitions, self._store.operations_max):
            await self._begin_leader_epochs(chunk)

    async def _begin_leader_epochs(self, partitions: Sequence[tuple[str, int]]) -> None:
        for _ in range(CONFLICT_ATTEMPTS_MAX):
            writer = new_writer_id(self._random)
            compares, puts = [], []
            for name, index in partitions:
                key = self.state.keys.partition(self.find(name).topic_id, index)
                entry = await self._store.get(key)
                if entry is None:
                    raise UnknownTopicOrPartition(f"there is no partition {name}-{index}")
                document = metadata_store.decode(key, entry.value)
                later = {**document, "leader_epoch": document["leader_epoch"] + 1}
                del later["schema"], later["writer"]
                compares.append(Compare(key, mod_revision=entry.mod_revision))
                puts.append(Put(key, metadata_store.encode(later, writer)))
            done = await metadata_store.transact_resolving_ambiguity(self._store, compares, puts, writer)
            await self.state.wait_for_revision(done.revision, self._scheduler)
            if done.succeeded:
                return
        raise ConcurrentChange(
            f"the leader epochs of {len(partitions)} partitions are being changed concurrently"
        )

    async def recover(self) -> None:
        """Prepare the topics at the start of the broker: delete unfinished topics (a task tries again if the disk is
        full), and add new required settings to internal topics that an earlier version created. In a cluster,
        unfinished topics are left to the controller, because other brokers may be working on them."""
        for topic in tuple(self.state.unfinished_topics.values()) if self._broker_epoch is None else ():
            logger.warning("unfinished_topic_deleted", extra=fields(topic=topic.name, state=topic.state))
            await self._lifecycle.delete_unfinished(topic)
        for topic in tuple(self.state.topics.values()):
            if topic.internal and (
                missing := _internal_topic_configs(topic.name).keys() - topic.configs.keys()
            ):
                settings = ",".join(sorted(missing))
                logger.info("topic_settings_added", extra=fields(topic=topic.name, settings=settings))
                configs = {**_internal_topic_configs(topic.name), **topic.configs}
                await self._lifecycle.write(dataclasses.replace(topic, configs=configs))

    # Plan, without effects

    def _plan_topic(self, new: NewTopic, *, internal: bool) -> Topic:
        check_topic_name(new.name)
        if not internal:
            check_internal_name(new.name)
        if new.name in self.state.topics:
            raise TopicAlreadyExists(f"topic {new.name!r} already exists")
        if (unfinished := self.state.unfinished_topics.get(new.name)) is not None:
            action = "created" if unfinished.state == TOPIC_CREATING else "deleted"
            raise TopicAlreadyExists(f"topic {new.name!r} is being {action}")
        if not internal and (others := self.state.colliding_topics(new.name)):
            raise collision(new.name, others[0].name)
        start = 0 if self._broker_epoch is None else int.from_bytes(self._random.bytes(4))
        partitions, replication_factor = plan_partitions(
            new,
            self._settings.node_id,
            self._settings.num_partitions,
            self._creatable_partition_count,
            self._cluster_brokers(start),
        )
        if not internal:
            self._check_descriptor_limit(len(partitions))
        configs = topic_config.validated_overrides(
            new.configs, replication_factor, self._settings.topic_defaults
        )
        topic_config.check_schema_registry({}, configs, is_enabled=self._has_schema_registry())
        return Topic(
            name=new.name,
            topic_id=NO_TOPIC_ID,
            partitions=partitions,
            replication_factor=replication_factor,
            configs={**_internal_topic_configs(new.name), **configs} if internal else configs,
            internal=internal,
            state=TOPIC_CREATING,
            mod_revision=0,
        )

    @property
    def _creatable_partition_count(self) -> int:
        return self._settings.partitions_max - self.state.partition_count - self._lifecycle.opening_count

    def _check_descriptor_limit(self, more: int) -> None:
        """Refuse partitions that the limit of descriptors does not allow. In a cluster nothing is refused: the replicas
        may be on brokers with another limit. Raises `PolicyViolation`."""
        count = self.state.partition_count + self._lifecycle.opening_count
        if self._broker_epoch is None and count + more > self._partitions_max:
            raise PolicyViolation(
                f"{more} more partitions: there are {count}, and the limit of file descriptors (ulimit -n) of this "
                f"broker allows {self._partitions_max}"
            )

    def _cluster_brokers(self, start: int) -> ClusterBrokers | None:
        """Return the brokers that can have replicas of new partitions; None on a single node."""
        if self._broker_epoch is None:
            return None
        brokers = {
            node_id: one for node_id, one in self.state.brokers.items() if self.state.may_lead(node_id)
        }
        known = frozenset((*self.state.registrations, *self.state.brokers))
        hosts = {node_id: self.state.host_of(node_id) for node_id in known}
        return ClusterBrokers(brokers, known, self._settings.replication_factor, start, hosts)

    # Execute

    async def _create(self, topic: Topic) -> Topic:
        await self._lifecycle.create(topic)
        return self.find(topic.name)

    async def _add_partitions(self, topic: Topic, added: Partitions) -> Topic:
        await self._lifecycle.add_partitions(topic, added)
        return self.find(topic.name)

    async def _run_uninterrupted(self, work: Coroutine[Any, Any, T], *, name: str) -> T:
        """Run `work` to its end even if the caller is cancelled; return its result."""
        promise: Promise[T] = self._scheduler.promise()

        async def run() -> None:
            try:
                result = await work
                complete(promise, result)
            except MansioError as error:
                if promise.done():
                    logger.warning("abandoned_request_failed", extra=fields(work=name, reason=error))
                else:
                    promise.set_exception(copied(error))
            finally:  # after an unexpected error, which the scheduler logs, the caller must not wait forever
                complete_with_error(promise, Unavailable(f"{name}: interrupted by an unexpected error"))

        self._scheduler.spawn(run(), name=name)
        return await result_of(promise)


def _internal_topic_configs(name: str) -> dict[str, str]:
    """Return the settings with which the internal topic of this name is created."""
    if name == AUDIT_TOPIC:
        return AUDIT_TOPIC_CONFIGS
    if name == TRACE_TOPIC:
        return TRACE_TOPIC_CONFIGS
    return PRUNED_TOPIC_CONFIGS if name in PRUNED_TOPICS else COMPACTED_TOPIC_CONFIGS


def _check_internal_topic_changes(name: str, changes: Sequence[Change]) -> None:
    changeable = INTERNAL_TOPIC_CHANGEABLE_SETTINGS
    if name in EVENT_TOPICS:
        changeable |= EVENT_TOPIC_CHANGEABLE_SETTINGS
    for change in changes:
        if change.name in topic_config.SETTINGS and change.name not in changeable:
            raise PolicyViolation(
                f"{name} is the broker's own: {change.name} cannot be changed there, only "
                f"{', '.join(sorted(changeable))}"
            )


def _warn_without_effect(name: str, configs: Mapping[str, str]) -> None:
    """Log in one line the settings among `configs` that Mansio stores without any effect."""
    ineffective = sorted(configs.keys() & topic_config.WITHOUT_EFFECT.keys())
    if ineffective:
        reasons = "; ".join(f"{each}: {topic_config.WITHOUT_EFFECT[each]}" for each in ineffective)
        logger.warning("topic_settings_without_effect", extra=fields(topic=name, settings=reasons))


def _format_changes(before: Topic, after: Topic) -> str:
    """Return the changed settings as `name=value`, separated by commas; the value is empty after a reset to the
    default."""
    names = sorted({*before.configs, *after.configs})
    return ",".join(
        f"{name}={after.configs.get(name, '')}"
        for name in names
        if before.configs.get(name) != after.configs.get(name)
    )
