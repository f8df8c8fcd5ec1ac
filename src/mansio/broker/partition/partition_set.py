"""Open partitions of this broker, from the metadata's topics to logs on disk.

A creation has two steps: `open_partitions` recovers or creates the logs, `serve` makes them available to clients once
the metadata has the topic as live. In a cluster only the partitions assigned to this broker are opened; their roles are
applied by the replica manager.

Invariants:
* A partition is found only while its log is open and its topic is live. A partition that is not a replica here is
  distinguished from one that does not exist: in a cluster its client has to find another broker.
* Files are deleted only for a topic whose deletion is durable in the metadata. A directory that the metadata does not
  know is reported and kept.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

from mansio.broker.partition.append_validation import AppendRules
from mansio.broker.partition.batch_verifier import BatchVerifier
from mansio.broker.partition.partition import Partition
from mansio.broker.partition.partition_files import PartitionFiles
from mansio.broker.partition.recompression import Recompressor
from mansio.broker.partition.retention_holds import RetentionHoldHook, RetentionHolds
from mansio.broker.partition.storage_health import StorageHealth
from mansio.config import topic_config
from mansio.errors import (
    CorruptLog,
    LogDirNotFound,
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
from mansio.wire.batch.compression import Codec
from mansio.wire.batch.recompress import Compression
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
    from mansio.storage.log import Log, LogSlice

logger = logging.getLogger(__name__)

T = TypeVar("T")

_CODECS: Final = {
    "uncompressed": Codec.NONE,
    "gzip": Codec.GZIP,
    "snappy": Codec.SNAPPY,
    "lz4": Codec.LZ4,
    "zstd": Codec.ZSTD,
}
OPEN_BATCH_MAX = 256
"""Logs created or recovered per job of the file thread: they share their flushes, and other jobs are not delayed for
longer."""


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
        verification_thread: Background,
        recompression_thread: Background,
    ) -> None:
        self.verifier = BatchVerifier(verification_thread)
        self.recompressor = Recompressor(recompression_thread)
        self._settings = settings
        self._clustered = settings.clustered
        self._clock = clock
        self._scheduler = scheduler
        self._group_commit = group_commit
        self._sync_thread = sync_thread
        self._verification_thread = verification_thread
        self._file_thread = file_thread
        self.storage_health = StorageHealth(clock)
        self.holds = RetentionHolds()
        self._files = PartitionFiles(settings, disk, clock, files, file_thread)
        self._opening: Promise[None] | None = None
        self._by_name: dict[str, _IndexedTopic] = {}
        self._by_id: dict[bytes, _IndexedTopic] = {}
        self._opened: dict[UUID, dict[int, Partition | StorageError]] = {}

    def opened_partitions(self, topic: Topic) -> list[Partition | StorageError | None]:
        """The open partitions of a topic by index, whether or not they are served, or the errors for which they are not
        open."""
        opened = self._opened.get(topic.topic_id, {})
        return [opened.get(index) for index in range(len(topic.partitions))]

    # Index

    def find(self, topic: str | None, topic_id: bytes | None, index: int) -> Partition:
        """The partition, by topic name or by id. Raises `UnknownTopicOrPartition`, `UnknownTopicId`,
        `NotLeaderOrFollower`, `StorageError`."""
        if topic is not None:
            found = self._by_name.get(topic)
            if found is None:
                raise UnknownTopicOrPartition(f"there is no topic {topic!r}")
        else:
            found = self._by_id.get(topic_id or b"")
            if found is None:
                raise UnknownTopicId(f"no topic has the id {(topic_id or b'').hex()}")
        if not 0 <= index < len(found.partitions):
            raise UnknownTopicOrPartition(f"topic {found.topic.name!r} has no partition {index}")
        partition = found.partitions[index]
        if partition is None:
            raise NotLeaderOrFollower(f"this broker has no replica of {found.topic.name}-{index}")
        if isinstance(partition, StorageError):  # a new error, without old tracebacks
            kind = CorruptLog if isinstance(partition, CorruptLog) else StorageError
            raise kind(f"{found.topic.name}-{index} is not open: {partition.message}")
        return partition

    def check_directory(self, topic: str, index: int, directory: str) -> None:
        """Check that a replica of this broker may be in a data directory: there is one only. Raises `LogDirNotFound`,
        and as `find`."""
        if directory.rstrip("/") != self._settings.data_dir.rstrip("/"):
            raise LogDirNotFound(f"{directory}: the only data directory is {self._settings.data_dir}")
        self.find(topic, None, index)

    def get(self, topic: str, index: int) -> Partition | None:
        """The partition; None if it is not available."""
        try:
            return self.find(topic, None, index)
        except MansioError:
            return None

    def of(self, topic: str) -> list[Partition]:
        """All partitions of a topic; empty if there is no such topic. Raises the error of a partition that is not
        open."""
        found = self._by_name.get(topic)
        return (
            [] if found is None else [self.find(topic, None, index) for index in range(len(found.partitions))]
        )

    def served(self) -> list[Topic]:
        """The topics that are served."""
        return [served.topic for served in self._by_id.values()]

    def drop(self, topic: Topic) -> None:
        """Stop serving a topic."""
        self._by_id.pop(topic.topic_id.bytes, None)
        found = self._by_name.get(topic.name)
        if found is not None and found.topic.topic_id == topic.topic_id:
            del self._by_name[topic.name]

    def __iter__(self) -> Iterator[Partition]:
        """The open partitions."""
        for topic in self._by_name.values():
            for partition in topic.partitions:
                if isinstance(partition, Partition):
                    yield partition

    def __len__(self) -> int:
        return sum(
            partition is not None for topic in self._by_name.values() for partition in topic.partitions
        )

    def failures(self) -> dict[str, StorageError]:
        """Every partition that accepts no writes, by name, with the error."""
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
        """At start: open and serve the live topics. A log that cannot be opened makes only its own partition
        unavailable. `is_new`: whether a partition without a directory may never have had one; only used while there
        is no list of created partitions (`HostedPartitions`)."""
        if (hosted := self._files.hosted) is not None:
            await self._on_disk(partial(hosted.load, [topic.topic_id for topic in topics]))
        for topic, index, error in await self._open(self._local_replicas(topics), is_new):
            logger.error(
                "partition_not_served", extra=fields(topic=topic.name, partition=index, reason=error)
            )
            self._opened.setdefault(topic.topic_id, {})[index] = error
        for topic in topics:
            self._opened.setdefault(topic.topic_id, {})
            self.serve(topic)

    async def create_hosted_list(self) -> None:
        """Record from now on which partitions are opened. For a broker that has left all in-sync sets that a lost
        disk was in."""
        hosted = self._files.hosted
        if hosted is None or hosted.exists:
            return
        try:
            await self._on_disk(hosted.begin)
        except StorageError as error:
            logger.warning("hosted_partitions_not_created", extra=fields(reason=error.message))

    async def open_partitions(self, topic: Topic) -> None:
        """Create the directories and logs that are missing, and open them. They are not found before `serve`.

        Raises the first `StorageError`; partitions opened before it stay open.
        """
        for _, _, error in await self._open(self._local_replicas([topic])):
            raise error

    async def recreate(self, topic: Topic, index: int) -> None:
        """Recreate a partition whose log could not be opened: its directory is quarantined, replacing an earlier
        quarantined one. Raises `StorageError`."""
        opened = self._opened.get(topic.topic_id, {})
        if isinstance(opened.get(index), StorageError):
            await self._on_disk(partial(self._files.quarantine, topic, index))
            opened.pop(index, None)
        for _, _, error in await self._open([(topic, index)]):
            opened[index] = error
            raise error

    async def reopen(self, topic: Topic, index: int) -> None:
        """Retry to open a log whose disk did not respond. Raises `StorageError`."""
        opened = self._opened.get(topic.topic_id, {})
        if isinstance(opened.get(index), StorageError):
            opened.pop(index)
        for _, _, error in await self._open([(topic, index)], lambda _: False):
            opened[index] = error
            raise error

    async def _open(
        self, wanted: Sequence[Wanted], is_new: Callable[[PartitionState], bool] | None = None
    ) -> list[tuple[Topic, int, StorageError]]:
        """Open in batches of `OPEN_BATCH_MAX`; returns those that failed. `is_new`: see `PartitionFiles.open`."""
        while self._opening is not None:
            await self._opening
        self._opening = self._scheduler.promise()
        try:
            wanted = [one for one in wanted if one[1] not in self._opened.get(one[0].topic_id, {})]
            broker_settings = self._settings
            topics = {topic.topic_id: topic for topic, _ in wanted}
            settings = {topic_id: self._settings_of(topic) for topic_id, topic in topics.items()}
            log_settings = {topic_id: _log_settings(each) for topic_id, each in settings.items()}
            failed = []
            for first in range(0, len(wanted), OPEN_BATCH_MAX):
                part = wanted[first : first + OPEN_BATCH_MAX]
                hosted = await self._on_disk(partial(self._files.open, part, log_settings, is_new))
                for (topic, index), result in zip(part, hosted, strict=True):
                    if isinstance(result, StorageError):
                        failed.append((topic, index, result))
                        continue
                    opened = self._opened.setdefault(topic.topic_id, {})
                    opened[index] = self._create_partition(topic, index, *result, settings[topic.topic_id])
            if broker_settings is not self._settings:  # changed meanwhile
                for topic in topics.values():
                    self._apply_settings(self.opened_partitions(topic), self._settings_of(topic))
            return failed
        finally:
            opening, self._opening = self._opening, None
            opening.set_result(None)

    def serve(self, topic: Topic) -> None:
        """The topic is live (or has changed): serve its partitions with the effective settings."""
        served = _IndexedTopic(topic, self.opened_partitions(topic))
        for partition, state in zip(served.partitions, topic.partitions, strict=True):
            if isinstance(partition, Partition) and not self._clustered:
                partition.replica.leader_epoch = state.leader_epoch
        self._apply_settings(served.partitions, self._settings_of(topic))
        self._put(served)

    def _apply_settings(
        self, partitions: Iterable[Partition | StorageError | None], settings: TopicSettings
    ) -> None:
        rules, log_settings = _append_rules(settings), _log_settings(settings)
        for partition in partitions:
            if isinstance(partition, Partition):
                partition.settings = settings
                partition.rules = rules
                partition.log.update_settings(log_settings)

    def use_settings(self, settings: Settings) -> None:
        """The settings of the broker in force: apply their defaults of topics to all that are served."""
        before, self._settings = self._settings, settings
        if before.topic_defaults == settings.topic_defaults:
            return
        known: dict[tuple[tuple[tuple[str, str], ...], int], TopicSettings] = {}
        for served in self._by_id.values():
            topic = served.topic
            key = (tuple(sorted(topic.configs.items())), topic.replication_factor)
            effective = known.get(key)
            if effective is None:
                effective = known[key] = self._settings_of(topic)
            self._apply_settings(served.partitions, effective)

    def follow(self, change: TopicChange) -> None:
        """The metadata image changed: serve live topics and stop serving the others."""
        before, after = change.before, change.after
        if before is not None and (after is None or after.topic_id != before.topic_id):
            self._by_name.pop(before.name, None)
            self._by_id.pop(before.topic_id.bytes, None)
        if after is None:
            return
        if self._clustered and before is not None and _has_same_settings(before, after):
            self._put(
                _IndexedTopic(after, self.opened_partitions(after))
            )  # roles are applied by the replica manager
        else:
            self.serve(after)

    def _create_partition(
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
        self.verifier.attach(log, partition.on_verified)
        if not topic.internal:
            partition.add_hook(RetentionHoldHook(partition, self.holds, self._clock), on_data_path=False)
        if (cut := log.recovery.truncated_tail) is not None:
            self.storage_health.log_truncated(cut.size_bytes)
        if log.end_offset > log.durable_end_offset:
            self._group_commit.request_flush(log, urgent=True)
        return partition

    def _local_replicas(self, topics: Iterable[Topic]) -> list[Wanted]:
        """The replicas of this broker; on a single node all partitions."""
        node_id = self._settings.node_id
        return [
            (topic, index)
            for topic in topics
            for index, state in enumerate(topic.partitions)
            if not self._clustered or node_id in state.replicas
        ]

    def _settings_of(self, topic: Topic) -> TopicSettings:
        return topic_config.resolve_topic_settings(
            topic.configs, self._settings.topic_defaults, topic.replication_factor
        )

    def report_unreadable(self, part: LogSlice, error: OSError) -> None:
        """Report that the disk cannot read a part of a log, which was to be sent."""
        directory, _, _ = part.file.path.rpartition("/")
        failed = StorageError(f"cannot read {part.file.path} from {part.position} on: {error}")
        failed.__cause__ = error
        for partition in self:
            if partition.log.directory == directory:
                last = min(part.next_offset, partition.log.end_offset) - 1
                partition.report_damage(max(last, partition.log.start_offset), failed)

    # Close

    async def close_partitions(self, topic: Topic) -> None:
        """Close the open partitions of a topic and remove the data of all; the deletion is durable in the metadata."""
        for partition in self._opened.pop(topic.topic_id, {}).values():
            if isinstance(partition, Partition):
                partition.close(save=False)
                self._group_commit.unregister(partition.log)
                partition.log.close(save=False)
        # After this, no flush, checkpoint or repair of these logs is in progress.
        for thread in (self._sync_thread, self._verification_thread):
            await run_in_thread(self._scheduler, thread, lambda: None)
        await self._on_disk(partial(self._files.remove, topic))

    def close(self, *, save: bool) -> None:
        """Close every partition; with `save`, save what shortens the next start. The last flush has been done."""
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
        """Partitions that recovery truncated, at this start or at one that was killed before the next epoch: their next
        records need a new leader epoch."""
        return [partition for partition in self if partition.log.needs_new_epoch]

    def report_unknown_directories(self) -> None:
        """Log directories under `topics/` that belong to no topic of the metadata; they are never removed."""
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
    """Whether id, partition count, replication factor and configuration are equal. Most changes of a topic concern only
    a leader or in-sync set, and thousands may arrive at once."""
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
        compression=_compression(settings),
    )


def _compression(settings: TopicSettings) -> Compression | None:
    if settings.compression_type == topic_config.PRODUCER:
        return None
    return Compression(_CODECS[settings.compression_type], settings.compression_level)
