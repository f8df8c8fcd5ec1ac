"""All partitions this broker holds: from the metadata's topics to open logs on disk, and back.

Owns the directories under `<data>/topics/`. A directory is named after the topic *and its id*
(`orders.mJ2v...`), so that a topic created again under an old name never meets the old one's files.

Two steps, because a creation has two: `open_partitions` recovers or makes the logs, `serve` lets clients find them
once the metadata says the topic is live.

Always true: a partition can be found only when its log is open and its topic live; files are deleted only for a topic
whose deletion is durable in the metadata. A directory the metadata does not know is reported and left alone.
"""

from __future__ import annotations

import base64
import logging
from typing import TYPE_CHECKING, TypeVar

from mansio.broker.partition import AppendRules, Partition
from mansio.broker.producer_hook import ProducerHook
from mansio.cluster import topic_config
from mansio.errors import CorruptLog, MansioError, StorageError, UnknownTopicId, UnknownTopicOrPartition
from mansio.log.log import Log
from mansio.log.settings import LogSettings
from mansio.state.replica import ReplicaProgress
from mansio.wire.records import TimestampType

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from uuid import UUID

    from mansio.cluster.state import Topic, TopicChange
    from mansio.cluster.topic_config import TopicSettings
    from mansio.config import Settings
    from mansio.log.files import FileCache
    from mansio.log.sync import Syncer
    from mansio.ports import Background, Clock, Disk, Promise, Scheduler

logger = logging.getLogger(__name__)

T = TypeVar("T")

NAME_BYTES_IN_DIRECTORY = 200  # a file name may have 255 bytes, a topic 249 and the id takes 23


class ServedTopic:
    """A live topic and its partitions, by index."""

    __slots__ = ("partitions", "topic")

    def __init__(self, topic: Topic, partitions: list[Partition | StorageError]) -> None:
        self.topic = topic
        self.partitions = partitions
        """In the place of a partition that could not be opened stands the reason."""


class PartitionSet:
    """See the module. Everything but the work handed to the threads runs on the broker's loop."""

    def __init__(
        self,
        *,
        settings: Settings,
        disk: Disk,
        clock: Clock,
        scheduler: Scheduler,
        syncer: Syncer,
        files: FileCache,
        sync_thread: Background,
        file_thread: Background,
    ) -> None:
        self._settings = settings
        self._disk = disk
        self._clock = clock
        self._scheduler = scheduler
        self._syncer = syncer
        self._files = files
        self._sync_thread = sync_thread
        self._file_thread = file_thread
        self._opening: Promise[None] | None = None
        self._opened: dict[UUID, dict[int, Partition | StorageError]] = {}
        self._by_name: dict[str, ServedTopic] = {}
        self._by_id: dict[bytes, ServedTopic] = {}

    # Finding

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
        if isinstance(partition, StorageError):
            raise partition
        return partition

    def get(self, topic: str, index: int) -> Partition | None:
        """The partition, or None where there is none to be had."""
        try:
            return self.find(topic, None, index)
        except MansioError:
            return None

    def of(self, topic: str) -> list[Partition]:
        """All partitions of a topic, none if there is no such topic. Raises the error of one that is not open."""
        found = self._by_name.get(topic)
        return (
            [] if found is None else [self.find(topic, None, index) for index in range(len(found.partitions))]
        )

    def __iter__(self) -> Iterator[Partition]:
        """The partitions that are open."""
        for topic in self._by_name.values():
            for partition in topic.partitions:
                if isinstance(partition, Partition):
                    yield partition

    def __len__(self) -> int:
        return sum(len(topic.partitions) for topic in self._by_name.values())

    def failures(self) -> dict[str, StorageError]:
        """Every partition that takes no writes, by name, and why."""
        found: dict[str, StorageError] = {}
        for served in self._by_name.values():
            for index, partition in enumerate(served.partitions):
                failure = partition if isinstance(partition, StorageError) else partition.log.failure
                if failure is not None:
                    found[f"{served.topic.name}-{index}"] = failure
        return found

    # Opening and serving

    async def open_known(self, topic: Topic) -> None:
        """At start: open and serve a live topic. A log that cannot be opened keeps its own partition from being
        served, and nobody else's."""
        for index in range(len(topic.partitions)):
            try:
                directory = f"{self._directory(topic)}/{index}"
                if not self._disk.exists(directory):  # it was made before the topic became live
                    raise CorruptLog(f"{directory} is missing")
                await self._open(topic, index)
            except OSError as error:
                self._not_served(topic, index, StorageError(f"{self._directory(topic)}/{index}: {error}"))
            except StorageError as error:
                self._not_served(topic, index, error)
        self.serve(topic)

    def _not_served(self, topic: Topic, index: int, error: StorageError) -> None:
        logger.error("%s-%d is not served: %s", topic.name, index, error)
        self._opened.setdefault(topic.topic_id, {})[index] = error

    async def open_partitions(self, topic: Topic) -> None:
        """Make the directories and logs that are missing, and open them. Nobody finds them before `serve`."""
        for index in range(len(topic.partitions)):
            await self._open(topic, index)

    async def _open(self, topic: Topic, index: int) -> None:
        """Making and recovering a log waits for the disk, so it is done off the loop; one at a time."""
        while self._opening is not None:
            await self._opening
        opened = self._opened.setdefault(topic.topic_id, {})
        if index in opened:
            return
        self._opening = self._scheduler.promise()
        try:
            directory = f"{self._directory(topic)}/{index}"
            log = await self._off_loop(lambda: self._made(topic, directory), self._file_thread)
            opened[index] = self._partition(topic, index, directory, log)
        finally:
            opening, self._opening = self._opening, None
            opening.set_result(None)

    def _made(self, topic: Topic, directory: str) -> Log:
        """On the file thread: nothing but the disk is touched."""
        if not self._disk.exists(directory):
            self._disk.make_directory(directory)
        settings = _log_settings(self._settings_of(topic))
        return Log.open(self._disk, self._clock, directory, settings, files=self._files)

    def serve(self, topic: Topic) -> None:
        """The topic is live (or has changed): its partitions can be found, under the settings now in force."""
        opened = self._opened[topic.topic_id]
        served = ServedTopic(topic, [opened[index] for index in range(len(topic.partitions))])
        settings = self._settings_of(topic)
        for partition, state in zip(served.partitions, topic.partitions, strict=True):
            if isinstance(partition, Partition):
                partition.replica.leader_epoch = state.leader_epoch
                partition.rules = _append_rules(settings)
                partition.log.update_settings(_log_settings(settings))
        self._by_name[topic.name] = served
        self._by_id[topic.topic_id.bytes] = served

    def follow(self, change: TopicChange) -> None:
        """The metadata's view changed: serve what is live, and what is not no more."""
        before, after = change.before, change.after
        if before is not None and (after is None or after.topic_id != before.topic_id):
            self._by_name.pop(before.name, None)
            self._by_id.pop(before.topic_id.bytes, None)
        if after is not None:
            self.serve(after)

    def _partition(self, topic: Topic, index: int, directory: str, log: Log) -> Partition:
        settings = self._settings_of(topic)
        node_id = self._settings.node_id
        leader_epoch = topic.partitions[index].leader_epoch
        try:
            producers = ProducerHook(
                self._disk,
                self._clock,
                self._file_thread,
                directory,
                log,
                expiration_ms=self._settings.producer_id_expiration_ms,
            )
        except BaseException:
            log.close(save=False)
            raise
        self._syncer.register(log)
        partition = Partition(
            topic=topic.name,
            topic_id=topic.topic_id,
            index=index,
            broker_id=node_id,
            log=log,
            syncer=self._syncer,
            replica=ReplicaProgress(node_id, leader_epoch, frozenset({node_id}), log.durable_end_offset),
            rules=_append_rules(settings),
            clock=self._clock,
            scheduler=self._scheduler,
            internal=topic.internal,
        )
        partition.plug_in(producers)
        if log.end_offset > log.durable_end_offset:
            self._syncer.request(log, urgent=True)
        return partition

    def _settings_of(self, topic: Topic) -> TopicSettings:
        return topic_config.resolve(topic.configs, self._settings.topic_defaults, topic.replication_factor)

    # Closing

    async def close_partitions(self, topic: Topic) -> None:
        """Close those that are open and remove the data of all: their deletion is durable in the metadata."""
        for partition in self._opened.pop(topic.topic_id, {}).values():
            if isinstance(partition, Partition):
                partition.close(save=False)
                self._syncer.forget(partition.log)
                partition.log.close(save=False)
        await self._off_loop(
            lambda: None, self._sync_thread
        )  # a sync or checkpoint of these logs has ended now
        directory = self._directory(topic)
        if self._disk.exists(directory):
            await self._off_loop(lambda: self._disk.remove_tree(directory), self._file_thread)

    def close(self, *, save: bool) -> None:
        """Close every partition; with `save`, keep what makes the next start quick. The last sync has been done."""
        for opened in self._opened.values():
            for partition in opened.values():
                if isinstance(partition, StorageError):
                    continue
                try:
                    partition.close(save=save)
                    partition.log.close(save=save)
                except (OSError, StorageError) as error:
                    logger.error("%s: could not be closed cleanly: %s", partition.name, error)
        self._opened.clear()
        self._by_name.clear()
        self._by_id.clear()

    def shortened(self) -> list[Partition]:
        """Partitions whose recovery cut a torn tail: their next records need a leader epoch of their own."""
        return [partition for partition in self if partition.log.recovery.cut_bytes]

    def report_unknown_directories(self) -> list[str]:
        """Directories under `topics/` that belong to no topic of the metadata: logged, never removed."""
        root = f"{self._settings.data_dir}/topics"
        if not self._disk.exists(root):
            return []
        known = {self._directory(served.topic).rpartition("/")[2] for served in self._by_name.values()}
        unknown = [name for name in self._disk.list_directory(root) if name not in known]
        for name in unknown:
            logger.warning("%s/%s belongs to no topic that the metadata knows; it is left alone", root, name)
        return unknown

    def _directory(self, topic: Topic) -> str:
        tag = base64.urlsafe_b64encode(topic.topic_id.bytes).decode().rstrip("=")
        return f"{self._settings.data_dir}/topics/{topic.name[:NAME_BYTES_IN_DIRECTORY]}.{tag}"

    async def _off_loop(self, work: Callable[[], T], thread: Background) -> T:
        promise: Promise[T] = self._scheduler.promise()

        def done(result: T | None, error: BaseException | None) -> None:
            if promise.done():
                return
            if error is None:
                promise.set_result(result)  # type: ignore[arg-type]  # there is a result when there is no error
            elif isinstance(error, OSError):
                promise.set_exception(StorageError(str(error)))
            else:
                promise.set_exception(error)

        thread.submit(work, done)
        return await promise


def _log_settings(settings: TopicSettings) -> LogSettings:
    return LogSettings(
        segment_bytes=settings.segment_bytes,
        segment_ms=settings.segment_ms,
        index_interval_bytes=settings.index_interval_bytes,
    )


def _append_rules(settings: TopicSettings) -> AppendRules:
    return AppendRules(
        message_bytes_max=settings.max_message_bytes,
        timestamp_type=TimestampType.LOG_APPEND if settings.log_append_time else TimestampType.CREATE,
        timestamp_before_max_ms=settings.timestamp_before_max_ms,
        timestamp_after_max_ms=settings.timestamp_after_max_ms,
    )
