"""Open partitions of this broker: opens their logs, finds them by topic, and closes them.

A topic is opened in two steps: `open_partitions` recovers or creates the logs, `serve` makes them available to clients
once the topic is live in the metadata. In a cluster only the partitions assigned to this broker are opened; the replica
manager applies their roles.

Invariants:
* A partition is found only while its log is open and its topic is live. The error for a partition without a replica on
  this broker differs from that for one that does not exist, because clients then have to find another broker.
* Files are deleted only for a topic whose deletion is durable in the metadata. A directory that belongs to no topic in
  the metadata is reported and kept.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

from mansio.broker.partition.append_validation import INLINE_CONTENT_BYTES_MAX, AppendRules
from mansio.broker.partition.batch_processing import BatchProcessor
from mansio.broker.partition.batch_verifier import BatchVerifier
from mansio.broker.partition.partition import Partition, PartitionFeature
from mansio.broker.partition.partition_files import PartitionFiles
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
from mansio.tracebacks import copied, without_traceback
from mansio.wire.batch.compression import Codec
from mansio.wire.batch.recompress import Compression
from mansio.wire.batch.record_batch import TimestampType

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from contextlib import AbstractContextManager
    from uuid import UUID

    from mansio.broker.partition.partition_files import AssignedReplica
    from mansio.broker.partition.producer_hook import ProducerHook
    from mansio.config.settings import Settings
    from mansio.config.topic_config import TopicSettings
    from mansio.metadata.model import PartitionState, Topic, TopicChange
    from mansio.ports import Background, Clock, Disk, Promise, Scheduler
    from mansio.state.trace.trace_buffer import TraceBuffer
    from mansio.storage.file_cache import FileCache
    from mansio.storage.group_commit import GroupCommit
    from mansio.storage.log import Log, LogSlice

logger = logging.getLogger(__name__)

F = TypeVar("F", bound=PartitionFeature)
T = TypeVar("T")

_CODECS: Final = {
    "uncompressed": Codec.NONE,
    "gzip": Codec.GZIP,
    "snappy": Codec.SNAPPY,
    "lz4": Codec.LZ4,
    "zstd": Codec.ZSTD,
}
PARTITIONS_OPENED_PER_JOB_MAX = 256
"""Logs created or recovered per job of the file thread: they share their flushes, and other jobs are not delayed for
longer."""


class _IndexedTopic:
    """A live topic and its partitions by index: partition, error for which it is not open, None without a replica."""

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
        batch_thread: Background,
        features: Sequence[PartitionFeature] = (),
        before_newer_format: Callable[[], object] = lambda: None,
        trace_buffer: TraceBuffer | None = None,
    ) -> None:
        """`features`: those that this broker knows, in their order; `before_newer_format`: see `Log`; `trace_buffer`:
        see `Partition`."""
        self.verifier = BatchVerifier(verification_thread, scheduler)
        self.batch_processor = BatchProcessor(batch_thread)
        self._trace_buffer = trace_buffer
        self._scratch = bytearray(INLINE_CONTENT_BYTES_MAX)
        self._disk = disk
        self._settings = settings
        self._clustered = settings.clustered
        self._clock = clock
        self._scheduler = scheduler
        self._group_commit = group_commit
        self._sync_thread = sync_thread
        self._verification_thread = verification_thread
        self._file_thread = file_thread
        self.storage_health = StorageHealth(clock)
        self._features = features
        self._files = PartitionFiles(settings, disk, clock, files, file_thread, before_newer_format)
        self._opening: Promise[None] | None = None
        self._by_name: dict[str, _IndexedTopic] = {}
        self._by_id: dict[bytes, _IndexedTopic] = {}
        self._opened: dict[UUID, dict[int, Partition | StorageError]] = {}

    def partitions_or_errors(self, topic: Topic) -> list[Partition | StorageError | None]:
        """Return for each index of a topic its open partition, served or not, the error for which it is not open, or
        None."""
        opened = self._opened.get(topic.topic_id, {})
        return [opened.get(index) for index in range(len(topic.partitions))]

    def partition_or_error(self, topic: Topic, index: int) -> Partition | StorageError | None:
        """Return one item of `partitions_or_errors`."""
        opened = self._opened.get(topic.topic_id)
        return None if opened is None else opened.get(index)

    # Index

    def find(self, topic: str | None, topic_id: bytes | None, index: int) -> Partition:
        """Return a served partition by index and topic name, or topic id if `topic` is None.

        Raises `UnknownTopicOrPartition`, `UnknownTopicId`, `NotLeaderOrFollower`, `StorageError`."""
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

    def name_of(self, topic_id: bytes | None) -> str | None:
        """Return the name of a served topic; None if none has this id."""
        found = self._by_id.get(topic_id or b"")
        return None if found is None else found.topic.name

    def check_directory(self, topic: str, index: int, directory: str) -> None:
        """Check that a directory is the only data directory of this broker, and that the partition has a replica in it.

        Raises `LogDirNotFound`, and the errors of `find`."""
        if directory.rstrip("/") != self._settings.data_dir.rstrip("/"):
            raise LogDirNotFound(f"{directory}: the only data directory is {self._settings.data_dir}")
        self.find(topic, None, index)

    def get(self, topic: str, index: int) -> Partition | None:
        """Return a served partition; None where `find` raises an error."""
        try:
            return self.find(topic, None, index)
        except MansioError:
            return None

    def partitions_of(self, topic: str) -> list[Partition]:
        """Return all partitions of a topic, none if it is not served. Raises the error of one that is not open."""
        found = self._by_name.get(topic)
        return (
            [] if found is None else [self.find(topic, None, index) for index in range(len(found.partitions))]
        )

    def open_partitions_of(self, topic: str) -> list[Partition]:
        """Return the partitions of a topic that are open on this broker, none if it is not served."""
        found = self._by_name.get(topic)
        return [] if found is None else [each for each in found.partitions if isinstance(each, Partition)]

    def served_topics(self) -> list[Topic]:
        """Return the topics that are served."""
        return [served.topic for served in self._by_id.values()]

    def stop_serving(self, topic: Topic) -> None:
        """Stop serving a topic; its partitions stay open."""
        self._by_id.pop(topic.topic_id.bytes, None)
        found = self._by_name.get(topic.name)
        if found is not None and found.topic.topic_id == topic.topic_id:
            del self._by_name[topic.name]

    def __iter__(self) -> Iterator[Partition]:
        """Iterate over the open partitions of all served topics."""
        for topic in self._by_name.values():
            for partition in topic.partitions:
                if isinstance(partition, Partition):
                    yield partition

    def __len__(self) -> int:
        return sum(
            partition is not None for topic in self._by_name.values() for partition in topic.partitions
        )

    def failures(self) -> dict[str, StorageError]:
        """Return the partitions that accept no writes because of an error: error by partition name."""
        found: dict[str, StorageError] = {}
        for served in self._by_name.values():
            for index, partition in enumerate(served.partitions):
                failure = partition.log.failure if isinstance(partition, Partition) else partition
                if failure is not None:
                    found[f"{served.topic.name}-{index}"] = failure
        return found

    def _index_topic(self, served: _IndexedTopic) -> None:
        self._by_name[served.topic.name] = served
        self._by_id[served.topic.topic_id.bytes] = served

    # Open and serve

    async def open_existing_topics(
        self, topics: Sequence[Topic], is_new: Callable[[PartitionState], bool] = lambda _: False
    ) -> None:
        """Open and serve the live topics when the broker starts. A log that cannot be opened makes only its own
        partition unavailable.

        `is_new`: returns whether a partition without a directory may never have had one; only used while there
        is no list of created partitions (`HostedPartitions`)."""
        if (hosted := self._files.hosted) is not None:
            await self._run_on_file_thread(partial(hosted.load, [topic.topic_id for topic in topics]))
        for topic, index, error in await self._open(self._local_replicas(topics), is_new):
            logger.error(
                "partition_not_served", extra=fields(topic=topic.name, partition=index, reason=error)
            )
            self._opened.setdefault(topic.topic_id, {})[index] = error
        for topic in topics:
            self._opened.setdefault(topic.topic_id, {})
            self.serve(topic)

    async def create_hosted_partitions_file(self) -> None:
        """Create the file `hosted-partitions` if it is missing. It lists the partitions that this broker has created,
        so that a missing directory is recognized as a loss of data.

        Call it only after this broker has left all in-sync sets in which it may have lost records."""
        hosted = self._files.hosted
        if hosted is None or hosted.exists:
            return
        try:
            await self._run_on_file_thread(hosted.create)
        except StorageError as error:
            logger.warning("hosted_partitions_not_created", extra=fields(reason=error.message))

    async def open_partitions(self, topic: Topic) -> None:
        """Create the directories and logs of a topic that are missing, and open all. `find` finds them after `serve`.

        Raises the first `StorageError`; partitions opened before it stay open.
        """
        for _, _, error in await self._open(self._local_replicas([topic])):
            raise copied(error)

    async def recreate(self, topic: Topic, index: int) -> None:
        """Recreate a partition whose log could not be opened: its directory is quarantined, replacing an earlier
        quarantined one. Raises `StorageError`."""
        opened = self._opened.get(topic.topic_id, {})
        if isinstance(opened.get(index), StorageError):
            await self._run_on_file_thread(partial(self._files.quarantine, topic, index))
            opened.pop(index, None)
        for _, _, error in await self._open([(topic, index)]):
            opened[index] = error
            raise copied(error)

    async def reopen(self, topic: Topic, index: int) -> None:
        """Open a partition again whose log could not be opened because of a disk error. Raises `StorageError`."""
        opened = self._opened.get(topic.topic_id, {})
        if isinstance(opened.get(index), StorageError):
            opened.pop(index)
        for _, _, error in await self._open([(topic, index)], lambda _: False):
            opened[index] = error
            raise copied(error)

    async def _open(
        self, wanted: Sequence[AssignedReplica], is_new: Callable[[PartitionState], bool] | None = None
    ) -> list[tuple[Topic, int, StorageError]]:
        """Open partitions, at most `PARTITIONS_OPENED_PER_JOB_MAX` per job of the file thread.

        Returns those that failed. `is_new`: see `PartitionFiles.open`.
        """
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
            for first in range(0, len(wanted), PARTITIONS_OPENED_PER_JOB_MAX):
                part = wanted[first : first + PARTITIONS_OPENED_PER_JOB_MAX]
                hosted = await self._run_on_file_thread(partial(self._files.open, part, log_settings, is_new))
                for (topic, index), result in zip(part, hosted, strict=True):
                    if isinstance(result, StorageError):
                        failed.append((topic, index, result))
                        continue
                    opened = self._opened.setdefault(topic.topic_id, {})
                    opened[index] = self._create_partition(topic, index, *result, settings[topic.topic_id])
            if broker_settings is not self._settings:  # changed meanwhile
                for topic in topics.values():
                    self._apply_settings(self.partitions_or_errors(topic), self._settings_of(topic))
            return failed
        finally:
            opening, self._opening = self._opening, None
            opening.set_result(None)

    def serve(self, topic: Topic) -> None:
        """Make the partitions of an existing topic available to requests, or apply the topic's changed settings."""
        served = _IndexedTopic(topic, self.partitions_or_errors(topic))
        for partition, state in zip(served.partitions, topic.partitions, strict=True):
            if self._clustered or not isinstance(partition, Partition):
                continue
            if (progress := partition.leader_progress) is not None:
                progress.continue_in_epoch(state.leader_epoch)
        self._apply_settings(served.partitions, self._settings_of(topic))
        self._index_topic(served)

    def _apply_settings(
        self, partitions: Iterable[Partition | StorageError | None], settings: TopicSettings
    ) -> None:
        rules = _append_rules(settings, self._settings, self._features)
        log_settings = _log_settings(settings)
        for partition in partitions:
            if isinstance(partition, Partition):
                partition.apply_settings(settings, rules)
                partition.log.update_settings(log_settings)

    def apply_broker_settings(self, settings: Settings) -> None:
        """Apply the default topic settings in changed broker settings to all served topics."""
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

    def apply_topic_change(self, change: TopicChange) -> None:
        """Apply a change of the metadata image: serve a topic that is live, stop serving one that is not."""
        before, after = change.before, change.after
        if before is not None and (after is None or after.topic_id != before.topic_id):
            self._by_name.pop(before.name, None)
            self._by_id.pop(before.topic_id.bytes, None)
        if after is None:
            return
        served = self._by_id.get(after.topic_id.bytes)
        if self._clustered and served is not None and change.partitions is not None:
            served.topic = after
            for index in change.partitions:
                served.partitions[index] = self.partition_or_error(after, index)
        elif self._clustered and before is not None and _has_same_settings(before, after):
            self._index_topic(
                _IndexedTopic(after, self.partitions_or_errors(after))
            )  # roles are applied by the replica manager
        else:
            self.serve(after)

    def _create_partition(
        self, topic: Topic, index: int, log: Log, producers: ProducerHook, settings: TopicSettings
    ) -> Partition:
        node_id = self._settings.node_id
        leader_epoch = topic.partitions[index].leader_epoch
        self._group_commit.register(log)
        log.record_active_file(is_internal=topic.internal)
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
            rules=_append_rules(settings, self._settings, self._features),
            clock=self._clock,
            scheduler=self._scheduler,
            settings=settings,
            internal=topic.internal,
            storage_health=self.storage_health,
            producers=producers,
            verifier=self.verifier,
            features=self._features,
            scratch=self._scratch,
            trace_buffer=self._trace_buffer,
        )
        if (cut := log.recovery.truncated_tail) is not None:
            self.storage_health.record_truncation(cut.size_bytes)
        if log.end_offset > log.durable_end_offset:
            self._group_commit.request_flush(log, urgent=True)
        return partition

    def one_flush(self) -> AbstractContextManager[None]:
        """Return a context in which appends to several partitions are flushed together, when it ends."""
        return self._group_commit.one_job()

    def feature(self, kind: type[F]) -> F:
        """Return the feature of this broker that has this class. Raises `LookupError`."""
        for feature in self._features:
            if isinstance(feature, kind):
                return feature
        raise LookupError(f"this broker does not have the feature {kind.__name__}")

    def _local_replicas(self, topics: Iterable[Topic]) -> list[AssignedReplica]:
        """Return topic and partition index of the replicas of this broker; on a single node of all partitions."""
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
        """Report a part of a log that the disk could not read when it was to be sent to a client."""
        directory, _, _ = part.file.path.rpartition("/")
        failed = StorageError(f"cannot read {part.file.path} from {part.position} on: {error}")
        failed.__cause__ = without_traceback(error)
        for partition in self:
            if partition.log.directory == directory:
                last = min(part.next_offset, partition.log.end_offset) - 1
                partition.report_damage(max(last, partition.log.start_offset), failed)

    # Close

    async def close_partitions(self, topic: Topic) -> None:
        """Close the partitions of a topic and remove their data. The deletion must be durable in the metadata."""
        await self._close_and_wait(self._opened.pop(topic.topic_id, {}).values())
        await self._run_on_file_thread(partial(self._files.remove, topic))

    def stop_partition(self, topic: Topic, index: int) -> Partition | None:
        """Stop a partition of which this broker has no replica any more: it is not found any more, and accepts nothing.
        Its log stays open, because it may be in use; see `close_stopped`."""
        opened = self._opened.get(topic.topic_id, {}).pop(index, None)
        served = self._by_id.get(topic.topic_id.bytes)
        if served is not None and served.partitions[index] is opened:
            served.partitions[index] = None
        if not isinstance(opened, Partition):
            return None
        opened.close(save=False)
        return opened

    async def close_stopped(self, partition: Partition) -> None:
        """Close the log of a stopped partition; on return its files are not in use. Its data stay."""
        await self._close_and_wait([partition])

    async def _close_and_wait(self, opened: Iterable[Partition | StorageError]) -> None:
        for partition in opened:
            if isinstance(partition, Partition):
                partition.close(save=False)
                self._group_commit.unregister(partition.log)
                partition.log.close(save=False)
        # After this, no flush, checkpoint or repair of these logs is in progress.
        for thread in (self._sync_thread, self._verification_thread):
            await run_in_thread(self._scheduler, thread, lambda: None)

    def close(self, *, save: bool) -> None:
        """Close all partitions after the last flush. With `save`, also write the files that shorten the next start."""
        partitions = [one for one in self._all_partitions_or_errors() if isinstance(one, Partition)]
        for feature in self._features:
            feature.close()
        for partition in partitions:
            self._close_step(partition, partial(partition.close, save=save))
        if save:
            self._files.flush_on_shutdown([partition.log for partition in partitions])
        for partition in partitions:
            self._close_step(partition, partial(partition.log.close, save=save))
        self._opened.clear()
        self._by_name.clear()
        self._by_id.clear()

    def _all_partitions_or_errors(self) -> Iterator[Partition | StorageError]:
        for opened in self._opened.values():
            yield from opened.values()

    def _close_step(self, partition: Partition, step: Callable[[], None]) -> None:
        try:
            step()
        except (OSError, StorageError) as error:
            logger.error(
                "partition_close_failed",
                extra=fields(topic=partition.topic, partition=partition.index, reason=error),
            )

    def truncated_partitions(self) -> list[Partition]:
        """Return the partitions whose log was truncated by recovery and therefore needs a new leader epoch before the
        next append; the truncation may have happened at an earlier start."""
        return [partition for partition in self if partition.log.needs_new_epoch]

    def report_unknown_directories(self) -> None:
        """Log the directories under `topics/` that belong to no topic in the metadata; they are never removed."""
        for directory in self._files.unknown_directories([served.topic for served in self._by_name.values()]):
            logger.warning("unknown_directory_kept", extra=fields(directory=directory))

    async def _run_on_file_thread(self, work: Callable[[], T]) -> T:
        return await run_in_thread(self._scheduler, self._file_thread, work)


def _log_settings(settings: TopicSettings) -> LogSettings:
    return LogSettings(
        segment_bytes=settings.segment_bytes,
        segment_ms=settings.segment_ms,
        index_interval_bytes=settings.index_interval_bytes,
    )


def _has_same_settings(before: Topic, after: Topic) -> bool:
    """Return whether id, partition count, replication factor and configuration are equal. Most changes concern only
    a leader or in-sync set, and thousands may arrive at once."""
    return (before.topic_id, len(before.partitions), before.replication_factor, before.configs) == (
        after.topic_id,
        len(after.partitions),
        after.replication_factor,
        after.configs,
    )


def _append_rules(
    settings: TopicSettings, broker: Settings, features: Iterable[PartitionFeature]
) -> AppendRules:
    readers = tuple(reader for one in features if (reader := one.reader(settings)) is not None)
    return AppendRules(
        message_bytes_max=min(settings.max_message_bytes, broker.max_decompressed_bytes),
        timestamp_type=TimestampType.LOG_APPEND if settings.log_append_time else TimestampType.CREATE,
        timestamp_before_max_ms=settings.timestamp_before_max_ms,
        timestamp_after_max_ms=settings.timestamp_after_max_ms,
        requires_keys=settings.compacts,
        readers=readers,
        inspects_records=settings.compacts or bool(readers),
        decompressed_bytes_max=broker.max_decompressed_bytes,
        checks_content=broker.check_compressed_batches,
        compression=_compression(settings),
    )


def _compression(settings: TopicSettings) -> Compression | None:
    if settings.compression_type == topic_config.PRODUCER:
        return None
    return Compression(_CODECS[settings.compression_type], settings.compression_level)
