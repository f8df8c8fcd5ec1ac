"""All partitions this broker holds: from the metadata's topics to open logs on disk, and back.

Owns the open partitions, and through `partition_files` what they are on the disk.

Two steps, because a creation has two: `open_partitions` recovers or makes the logs, `serve` lets clients find them
once the metadata says the topic is live.

In a cluster only the partitions that are placed on this broker are opened; who leads them is for `replica_manager`
to apply.

Always true: a partition can be found only when its log is open and its topic live; files are deleted only for a topic
whose deletion is durable in the metadata. A directory the metadata does not know is reported and left alone.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from mansio.broker.partition.append_validation import AppendRules
from mansio.broker.partition.partition import Partition
from mansio.broker.partition.partition_files import PartitionFiles
from mansio.broker.partition.retention_holds import RetentionHoldHook, RetentionHolds
from mansio.broker.partition.storage_health import StorageHealth
from mansio.config import topic_config
from mansio.errors import (
    CorruptLog,
    MansioError,
    NotLeaderOrFollower,
    StorageError,
    UnknownTopicId,
    UnknownTopicOrPartition,
)
from mansio.host.run_in_thread import run_in_thread
from mansio.logs import fields
from mansio.state.replica import NO_LEADER, FollowerReplica, ReplicationProgress
from mansio.storage.settings import LogSettings
from mansio.wire.batch.record_batch import TimestampType

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from uuid import UUID

    from mansio.broker.partition.partition_files import Wanted
    from mansio.broker.partition.producer_hook import ProducerHook
    from mansio.config.settings import Settings
    from mansio.config.topic_config import TopicSettings
    from mansio.metadata.model import PartitionState, Topic, TopicChange
    from mansio.ports import Background, Clock, Disk, Promise, Scheduler
    from mansio.storage.file_cache import FileCache
    from mansio.storage.flush.group_commit import GroupCommit
    from mansio.storage.log import Log

logger = logging.getLogger(__name__)

T = TypeVar("T")

OPEN_BATCH_MAX = 256
"""Logs made or recovered in one job of the file thread: they share their syncs, and others wait no longer for them."""


class _IndexedTopic:
    """A live topic and its partitions, by index."""

    __slots__ = ("partitions", "topic")

    def __init__(self, topic: Topic, partitions: list[Partition | StorageError | None]) -> None:
        self.topic = topic
        self.partitions = partitions
        """A partition that could not be opened is replaced by its error; None: not a replica here (yet)."""


class PartitionSet:
    """Open partitions of this broker, found by the topic's name or id. All methods run on the broker's event loop."""

    def __init__(
        self,
        *,
        settings: Settings,
        disk: Disk,
        clock: Clock,
        scheduler: Scheduler,
        group_commit: GroupCommit,
        files: FileCache,
        sync_thread: Background,
        file_thread: Background,
    ) -> None:
        self._settings = settings
        self._clustered = settings.clustered
        self._clock = clock
        self._scheduler = scheduler
        self._group_commit = group_commit
        self._sync_thread = sync_thread
        self._file_thread = file_thread
        self.storage_health = StorageHealth(clock)
        self.holds = RetentionHolds()
        self._files = PartitionFiles(settings, disk, clock, files, file_thread)
        self._opening: Promise[None] | None = None
        self._by_name: dict[str, _IndexedTopic] = {}
        self._by_id: dict[bytes, _IndexedTopic] = {}
        self._opened: dict[UUID, dict[int, Partition | StorageError]] = {}

    def kept(self, topic: Topic) -> list[Partition | StorageError | None]:
        """What is open of a topic, by index, whether or not it is served; or why it could not be opened."""
        opened = self._opened.get(topic.topic_id, {})
        return [opened.get(index) for index in range(len(topic.partitions))]

    # Index

    def find(self, topic: str | None, topic_id: bytes | None, index: int) -> Partition:
        """By name, or by id where the request carries ids. Raises `UnknownTopicOrPartition` / `UnknownTopicId`."""
        if topic is not None:
            found = self._by_name.get(topic)
            if found is None:
                raise UnknownTopicOrPartition(f"there is no topic {topic!r} here")
        else:
            found = self._by_id.get(topic_id or b"")
            if found is None:
                raise UnknownTopicId(f"no topic here has the id {(topic_id or b'').hex()}")
        if not 0 <= index < len(found.partitions):
            raise UnknownTopicOrPartition(f"topic {found.topic.name!r} has no partition {index}")
        partition = found.partitions[index]
        if partition is None:
            raise NotLeaderOrFollower(f"this broker keeps no copy of {found.topic.name}-{index}")
        if isinstance(partition, StorageError):  # raised anew: the frames of all who meet it are not kept
            kind = CorruptLog if isinstance(partition, CorruptLog) else StorageError
            raise kind(f"{found.topic.name}-{index} is not open: {partition.message}")
        return partition

    def get(self, topic: str, index: int) -> Partition | None:
        """The partition, or None where there is none to be had."""
        try:
            return self.find(topic, None, index)
        except MansioError:
            return None

    def of(self, topic: str) -> list[Partition]:
        """All partitions of a topic, none if there is no such topic. Raises the error of one that is not open here."""
        found = self._by_name.get(topic)
        return (
            [] if found is None else [self.find(topic, None, index) for index in range(len(found.partitions))]
        )

    def served(self) -> list[Topic]:
        """The topics that can be found."""
        return [served.topic for served in self._by_id.values()]

    def drop(self, topic: Topic) -> None:
        """It cannot be found any more."""
        self._by_id.pop(topic.topic_id.bytes, None)
        found = self._by_name.get(topic.name)
        if found is not None and found.topic.topic_id == topic.topic_id:
            del self._by_name[topic.name]

    def __iter__(self) -> Iterator[Partition]:
        """The partitions that are open."""
        for topic in self._by_name.values():
            for partition in topic.partitions:
                if isinstance(partition, Partition):
                    yield partition

    def __len__(self) -> int:
        return sum(
            partition is not None for topic in self._by_name.values() for partition in topic.partitions
        )

    def failures(self) -> dict[str, StorageError]:
        """Every partition that takes no writes, by name, and why."""
        found: dict[str, StorageError] = {}
        for served in self._by_name.values():
            for index, partition in enumerate(served.partitions):
                failure = partition.log.failure if isinstance(partition, Partition) else partition
                if failure is not None:
                    found[f"{served.topic.name}-{index}"] = failure
        return found

    def _put(self, served: _IndexedTopic) -> None:
        self._by_name[served.topic.name] = served
        self._by_id[served.topic.topic_id.bytes] = served

    # Open and serve

    async def open_known(
        self, topics: Sequence[Topic], is_new: Callable[[PartitionState], bool] = lambda _: False
    ) -> None:
        """At start: open and serve the live topics. A log that cannot be opened keeps its own partition from being
        served, and nobody else's. `is_new`: may a partition of which there is no directory never have had one? Asked
        only where there is no list of those that had (`made`)."""
        if (made := self._files.made) is not None:
            await self._on_disk(partial(made.load, [topic.topic_id for topic in topics]))
        for topic, index, error in await self._open(self._kept_here(topics), is_new):
            logger.error(
                "partition_not_served", extra=fields(topic=topic.name, partition=index, reason=error)
            )
            self._opened.setdefault(topic.topic_id, {})[index] = error
        for topic in topics:
            self._opened.setdefault(topic.topic_id, {})
            self.serve(topic)

    async def create_hosted_list(self) -> None:
        """Note from now on what is opened. For a broker that is out of all in-sync sets that a lost disk had it in."""
        made = self._files.made
        if made is None or made.begun:
            return
        try:
            await self._on_disk(made.begin)
        except StorageError as error:
            logger.warning("hosted_partitions_not_created", extra=fields(reason=error.message))

    async def open_partitions(self, topic: Topic) -> None:
        """Make the directories and logs that are missing, and open them. Nobody finds them before `serve`.

        Raises the first `StorageError`; those that are open by then stay so.
        """
        for _, _, error in await self._open(self._kept_here([topic])):
            raise error

    async def renew(self, topic: Topic, index: int) -> None:
        """Begin a partition anew whose log could not be opened: its directory is set aside, replacing what was set
        aside before. Raises `StorageError`."""
        opened = self._opened.get(topic.topic_id, {})
        if isinstance(opened.get(index), StorageError):
            await self._on_disk(partial(self._files.set_aside, topic, index))
            opened.pop(index, None)
        for _, _, error in await self._open([(topic, index)]):
            opened[index] = error
            raise error

    async def reopen(self, topic: Topic, index: int) -> None:
        """Try once more to open a log whose disk did not answer. Raises `StorageError`."""
        opened = self._opened.get(topic.topic_id, {})
        if isinstance(opened.get(index), StorageError):
            opened.pop(index)
        for _, _, error in await self._open([(topic, index)], lambda _: False):
            opened[index] = error
            raise error

    async def _open(
        self, wanted: Sequence[Wanted], is_new: Callable[[PartitionState], bool] | None = None
    ) -> list[tuple[Topic, int, StorageError]]:
        """Some hundred at a time; those that failed are returned. `is_new`: see `PartitionFiles.open`."""
        while self._opening is not None:
            await self._opening
        self._opening = self._scheduler.promise()
        try:
            wanted = [one for one in wanted if one[1] not in self._opened.get(one[0].topic_id, {})]
            topics = {topic.topic_id: topic for topic, _ in wanted}
            settings = {topic_id: self._settings_of(topic) for topic_id, topic in topics.items()}
            log_settings = {topic_id: _log_settings(each) for topic_id, each in settings.items()}
            failed = []
            for first in range(0, len(wanted), OPEN_BATCH_MAX):
                part = wanted[first : first + OPEN_BATCH_MAX]
                made = await self._on_disk(partial(self._files.open, part, log_settings, is_new))
                for (topic, index), result in zip(part, made, strict=True):
                    if isinstance(result, StorageError):
                        failed.append((topic, index, result))
                        continue
                    opened = self._opened.setdefault(topic.topic_id, {})
                    opened[index] = self._partition(topic, index, *result, settings[topic.topic_id])
            return failed
        finally:
            opening, self._opening = self._opening, None
            opening.set_result(None)

    def serve(self, topic: Topic) -> None:
        """The topic is live (or has changed): its partitions can be found, under the settings now in force."""
        served = _IndexedTopic(topic, self.kept(topic))
        settings = self._settings_of(topic)
        rules, log_settings = _append_rules(settings), _log_settings(settings)
        for partition, state in zip(served.partitions, topic.partitions, strict=True):
            if isinstance(partition, Partition):
                if not self._clustered:
                    partition.replica.leader_epoch = state.leader_epoch
                partition.settings = settings
                partition.rules = rules
                partition.log.update_settings(log_settings)
        self._put(served)

    def follow(self, change: TopicChange) -> None:
        """The metadata's view changed: serve what is live, and what is not no more."""
        before, after = change.before, change.after
        if before is not None and (after is None or after.topic_id != before.topic_id):
            self._by_name.pop(before.name, None)
            self._by_id.pop(before.topic_id.bytes, None)
        if after is None:
            return
        if self._clustered and before is not None and _has_same_settings(before, after):
            self._put(_IndexedTopic(after, self.kept(after)))  # roles follow the metadata elsewhere
        else:
            self.serve(after)

    def _partition(
        self, topic: Topic, index: int, log: Log, producers: ProducerHook, settings: TopicSettings
    ) -> Partition:
        node_id = self._settings.node_id
        leader_epoch = topic.partitions[index].leader_epoch
        self._group_commit.register(log)
        replica = (
            FollowerReplica(NO_LEADER, -1, log.start_offset, log.durable_end_offset)
            if self._clustered
            else ReplicationProgress(node_id, leader_epoch, frozenset({node_id}), log.durable_end_offset)
        )
        partition = Partition(
            topic=topic.name,
            topic_id=topic.topic_id,
            index=index,
            broker_id=node_id,
            log=log,
            group_commit=self._group_commit,
            replica=replica,
            rules=_append_rules(settings),
            clock=self._clock,
            scheduler=self._scheduler,
            settings=settings,
            internal=topic.internal,
            storage_health=self.storage_health,
        )
        partition.add_hook(producers)
        if not topic.internal:
            partition.add_hook(RetentionHoldHook(partition, self.holds, self._clock), on_data_path=False)
        if (cut := log.recovery.truncated_tail) is not None:
            self.storage_health.log_truncated(cut.size_bytes)
        if log.end_offset > log.durable_end_offset:
            self._group_commit.request(log, urgent=True)
        return partition

    def _kept_here(self, topics: Iterable[Topic]) -> list[Wanted]:
        """On a single node all of them."""
        node_id = self._settings.node_id
        return [
            (topic, index)
            for topic in topics
            for index, state in enumerate(topic.partitions)
            if not self._clustered or node_id in state.replicas
        ]

    def _settings_of(self, topic: Topic) -> TopicSettings:
        return topic_config.resolve(topic.configs, self._settings.topic_defaults, topic.replication_factor)

    # Closing

    async def close_partitions(self, topic: Topic) -> None:
        """Close those that are open and remove the data of all: their deletion is durable in the metadata."""
        for partition in self._opened.pop(topic.topic_id, {}).values():
            if isinstance(partition, Partition):
                partition.close(save=False)
                self._group_commit.forget(partition.log)
                partition.log.close(save=False)
        # When this is through, a sync or checkpoint of these logs that was under way has ended.
        await run_in_thread(self._scheduler, self._sync_thread, lambda: None)
        await self._on_disk(partial(self._files.remove, topic))

    def close(self, *, save: bool) -> None:
        """Close every partition; with `save`, keep what makes the next start quick. The last sync has been done."""
        partitions = [one for one in self._all_opened() if isinstance(one, Partition)]
        for partition in partitions:
            self._closing(partition, partial(partition.close, save=save))
        if save:
            self._files.flush_on_shutdown([partition.log for partition in partitions])
        for partition in partitions:
            self._closing(partition, partial(partition.log.close, save=save))
        self._opened.clear()
        self._by_name.clear()
        self._by_id.clear()

    def _all_opened(self) -> Iterator[Partition | StorageError]:
        for opened in self._opened.values():
            yield from opened.values()

    def _closing(self, partition: Partition, step: Callable[[], None]) -> None:
        try:
            step()
        except (OSError, StorageError) as error:
            logger.error(
                "partition_close_failed",
                extra=fields(topic=partition.topic, partition=partition.index, reason=error),
            )

    def truncated_partitions(self) -> list[Partition]:
        """Partitions that a recovery cut, at this start or one that was killed before the next epoch began: their next
        records need a leader epoch of their own."""
        return [partition for partition in self if partition.log.epoch_due]

    def report_unknown_directories(self) -> None:
        """Directories under `topics/` that belong to no topic of the metadata: logged, never removed."""
        for directory in self._files.unknown([served.topic for served in self._by_name.values()]):
            logger.warning("unknown_directory_kept", extra=fields(directory=directory))

    async def _on_disk(self, work: Callable[[], T]) -> T:
        return await run_in_thread(self._scheduler, self._file_thread, work)


def _log_settings(settings: TopicSettings) -> LogSettings:
    return LogSettings(
        segment_bytes=settings.segment_bytes,
        segment_ms=settings.segment_ms,
        index_interval_bytes=settings.index_interval_bytes,
    )


def _has_same_settings(before: Topic, after: Topic) -> bool:
    """Most changes of a topic are one partition's leader or in-sync set, and there may be thousands of them at once."""
    return (before.topic_id, len(before.partitions), before.replication_factor, before.configs) == (
        after.topic_id,
        len(after.partitions),
        after.replication_factor,
        after.configs,
    )


def _append_rules(settings: TopicSettings) -> AppendRules:
    return AppendRules(
        message_bytes_max=settings.max_message_bytes,
        timestamp_type=TimestampType.LOG_APPEND if settings.log_append_time else TimestampType.CREATE,
        timestamp_before_max_ms=settings.timestamp_before_max_ms,
        timestamp_after_max_ms=settings.timestamp_after_max_ms,
        keys_needed=settings.compacts,
    )
