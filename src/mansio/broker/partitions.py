"""All partitions this broker holds: from the metadata's topics to open logs on disk, and back.

Owns the directories under `<data>/topics/`. A directory is named after the topic *and its id*
(`orders.mJ2v...`), so that a topic created again under an old name never meets the old one's files.

Two steps, because a creation has two: `open_partitions` recovers or makes the logs, `serve` lets clients find them
once the metadata says the topic is live.

In a cluster only the partitions that are placed on this broker are opened; who leads them is for `residence` to apply.

Always true: a partition can be found only when its log is open and its topic live; files are deleted only for a topic
whose deletion is durable in the metadata. A directory the metadata does not know is reported and left alone.
"""

from __future__ import annotations

import base64
import logging
from functools import partial
from typing import TYPE_CHECKING

from mansio.broker.append_rules import AppendRules
from mansio.broker.hold_hook import HoldHook
from mansio.broker.holds import Holds
from mansio.broker.made import Made
from mansio.broker.off_loop import off_loop
from mansio.broker.partition import Partition
from mansio.broker.producer_hook import ProducerHook
from mansio.broker.served import ServedPartitions, ServedTopic
from mansio.broker.trouble import Trouble
from mansio.cluster import topic_config
from mansio.errors import (
    CorruptLog,
    StorageError,
)
from mansio.log.closing import keep_house
from mansio.log.log import Log
from mansio.log.opening import OpenRequest, open_logs
from mansio.log.settings import LogSettings
from mansio.logs import fields
from mansio.state.replica import NOBODY, Following, ReplicaProgress
from mansio.wire.records import TimestampType

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from uuid import UUID

    from mansio.cluster.state import PartitionState, Topic, TopicChange
    from mansio.cluster.topic_config import TopicSettings
    from mansio.config import Settings
    from mansio.log.files import FileCache
    from mansio.log.sync import Syncer
    from mansio.ports import Background, Clock, Disk, Promise, Scheduler

    Wanted = tuple[Topic, int]  # a partition to be opened

logger = logging.getLogger(__name__)

NAME_BYTES_IN_DIRECTORY = 200  # a file name may have 255 bytes, a topic 249 and the id takes 23


OPENED_TOGETHER_MAX = 256
"""Logs made or recovered in one job of the file thread: they share their syncs, and others wait no longer for them."""


def topic_directory(data_dir: str, topic: Topic) -> str:
    """Where the partitions of a topic are: one directory per index in there."""
    tag = base64.urlsafe_b64encode(topic.topic_id.bytes).decode().rstrip("=")
    return f"{data_dir}/topics/{topic.name[:NAME_BYTES_IN_DIRECTORY]}.{tag}"


class PartitionSet(ServedPartitions):
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
        super().__init__()
        self._settings = settings
        self._clustered = settings.clustered
        self._disk = disk
        self._clock = clock
        self._scheduler = scheduler
        self._syncer = syncer
        self._files = files
        self._sync_thread = sync_thread
        self._file_thread = file_thread
        self.trouble = Trouble(clock)
        self.holds = Holds()
        self._list = Made(disk, settings.data_dir) if settings.clustered else None
        self._opening: Promise[None] | None = None
        self._opened: dict[UUID, dict[int, Partition | StorageError]] = {}

    def kept(self, topic: Topic) -> list[Partition | StorageError | None]:
        """What is open of a topic, by index, whether or not it is served; or why it could not be opened."""
        opened = self._opened.get(topic.topic_id, {})
        return [opened.get(index) for index in range(len(topic.partitions))]

    # Opening and serving

    async def open_known(
        self, topics: Sequence[Topic], is_new: Callable[[PartitionState], bool] = lambda _: False
    ) -> None:
        """At start: open and serve the live topics. A log that cannot be opened keeps its own partition from being
        served, and nobody else's. `is_new`: may a partition of which there is no directory never have had one? Asked
        only where there is no list of those that had (`made`)."""
        if self._list is not None:
            await off_loop(
                self._scheduler,
                self._file_thread,
                partial(self._list.load, [topic.topic_id for topic in topics]),
            )
        for topic, index, error in await self._open(self._kept_here(topics), is_new):
            logger.error(
                "partition not served", extra=fields(topic=topic.name, partition=index, reason=error)
            )
            self._opened.setdefault(topic.topic_id, {})[index] = error
        for topic in topics:
            self._opened.setdefault(topic.topic_id, {})
            self.serve(topic)

    async def begin_list(self) -> None:
        """Note from now on what is opened. For a broker that is out of all in-sync sets that a lost disk had it in."""
        if self._list is None or self._list.begun:
            return
        try:
            await off_loop(self._scheduler, self._file_thread, self._list.begin)
        except StorageError as error:
            logger.warning("list of partitions not begun", extra=fields(reason=error.message))

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
            directory = f"{self._directory(topic)}/{index}"
            await off_loop(self._scheduler, self._file_thread, partial(_set_aside, self._disk, directory))
            opened.pop(index, None)
        for _, _, error in await self._open([(topic, index)]):
            opened[index] = error
            raise error

    async def open_again(self, topic: Topic, index: int) -> None:
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
        """Making and recovering logs waits for the disk, so it is done off the loop, some hundred at a time.

        At a start (`is_new`) a directory that is missing, of a partition that is not new, is a loss. Returns those that
        failed.
        """
        while self._opening is not None:
            await self._opening
        self._opening = self._scheduler.promise()
        try:
            wanted = [one for one in wanted if one[1] not in self._opened.get(one[0].topic_id, {})]
            topics = {topic.topic_id: topic for topic, _ in wanted}
            settings = {topic_id: self._settings_of(topic) for topic_id, topic in topics.items()}
            failed = []
            for first in range(0, len(wanted), OPENED_TOGETHER_MAX):
                part = wanted[first : first + OPENED_TOGETHER_MAX]
                made = await off_loop(
                    self._scheduler, self._file_thread, partial(self._made, part, settings, is_new)
                )
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

    def _made(
        self,
        wanted: Sequence[Wanted],
        settings: dict[UUID, TopicSettings],
        is_new: Callable[[PartitionState], bool] | None,
    ) -> list[tuple[Log, ProducerHook] | StorageError]:
        """On the file thread: nothing but the disk is touched."""
        log_settings = {topic_id: _log_settings(each) for topic_id, each in settings.items()}
        self._disk.make_directory(self._sync_root)
        made: dict[int, tuple[Log, ProducerHook] | StorageError] = {}
        requests: dict[int, OpenRequest] = {}
        for number, (topic, index) in enumerate(wanted):
            directory = f"{self._directory(topic)}/{index}"
            if (
                is_new is not None
                and not self._disk.exists(directory)
                and self._is_lost(topic, index, is_new)
            ):
                made[number] = CorruptLog(f"{directory} is missing")
            else:
                requests[number] = OpenRequest(directory, log_settings[topic.topic_id])
        logs = open_logs(self._disk, self._clock, self._sync_root, list(requests.values()), self._files)
        for number, log in zip(requests, logs, strict=True):
            made[number] = self._with_producers(log) if isinstance(log, Log) else log
        self._note(wanted, made)
        return [made[number] for number in range(len(wanted))]

    def _is_lost(self, topic: Topic, index: int, is_new: Callable[[PartitionState], bool]) -> bool:
        """Was there a directory that is not there, and may somebody count on it?"""
        state = topic.partitions[index]
        if self._list is None or not self._list.begun:
            return not is_new(state)
        return self._settings.node_id in state.isr and self._list.has(topic.topic_id, index)

    def _note(
        self, wanted: Sequence[Wanted], made: dict[int, tuple[Log, ProducerHook] | StorageError]
    ) -> None:
        """Before anybody is told that they are open. Where that cannot be noted they are not."""
        opened = {number: one[0] for number, one in made.items() if isinstance(one, tuple)}
        if self._list is None or not opened:
            return
        try:
            self._list.add((wanted[number][0].topic_id, wanted[number][1]) for number in opened)
        except OSError as error:
            for number, log in opened.items():
                log.close(save=False)
                made[number] = StorageError(f"{log.directory} cannot be noted: {error}")

    def _with_producers(self, log: Log) -> tuple[Log, ProducerHook] | StorageError:
        try:
            return log, ProducerHook(
                self._disk,
                self._clock,
                self._file_thread,
                log.directory,
                log,
                expiration_ms=self._settings.producer_id_expiration_ms,
            )
        except (OSError, StorageError) as error:
            log.close(save=False)
            return error if isinstance(error, StorageError) else StorageError(f"{log.directory}: {error}")

    def serve(self, topic: Topic) -> None:
        """The topic is live (or has changed): its partitions can be found, under the settings now in force."""
        served = ServedTopic(topic, self.kept(topic))
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
            self._put(ServedTopic(after, self.kept(after)))  # roles follow the metadata elsewhere
        else:
            self.serve(after)

    def _partition(
        self, topic: Topic, index: int, log: Log, producers: ProducerHook, settings: TopicSettings
    ) -> Partition:
        node_id = self._settings.node_id
        leader_epoch = topic.partitions[index].leader_epoch
        self._syncer.register(log)
        replica = (
            Following(NOBODY, -1, log.start_offset, log.durable_end_offset)
            if self._clustered
            else ReplicaProgress(node_id, leader_epoch, frozenset({node_id}), log.durable_end_offset)
        )
        partition = Partition(
            topic=topic.name,
            topic_id=topic.topic_id,
            index=index,
            broker_id=node_id,
            log=log,
            syncer=self._syncer,
            replica=replica,
            rules=_append_rules(settings),
            clock=self._clock,
            scheduler=self._scheduler,
            settings=settings,
            internal=topic.internal,
            trouble=self.trouble,
        )
        partition.plug_in(producers)
        if not topic.internal:
            partition.plug_in(HoldHook(partition, self.holds, self._clock), on_path=False)
        if (cut := log.recovery.cut) is not None:
            self.trouble.cut(cut.size_bytes)
        if log.end_offset > log.durable_end_offset:
            self._syncer.request(log, urgent=True)
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
                self._syncer.forget(partition.log)
                partition.log.close(save=False)
        # When this is through, a sync or checkpoint of these logs that was under way has ended.
        await off_loop(self._scheduler, self._sync_thread, lambda: None)
        await off_loop(
            self._scheduler, self._file_thread, partial(_remove, self._disk, self._directory(topic))
        )

    def close(self, *, save: bool) -> None:
        """Close every partition; with `save`, keep what makes the next start quick. The last sync has been done."""
        partitions = [one for one in self._all_opened() if isinstance(one, Partition)]
        for partition in partitions:
            self._closing(partition, partial(partition.close, save=save))
        if save:
            keep_house(self._disk, self._sync_root, [partition.log for partition in partitions])
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
                "partition not closed cleanly",
                extra=fields(topic=partition.topic, partition=partition.index, reason=error),
            )

    def shortened(self) -> list[Partition]:
        """Partitions that a recovery cut, at this start or one that was killed before the next epoch began: their next
        records need a leader epoch of their own."""
        return [partition for partition in self if partition.log.epoch_due]

    def report_unknown_directories(self) -> list[str]:
        """Directories under `topics/` that belong to no topic of the metadata: logged, never removed."""
        root = f"{self._settings.data_dir}/topics"
        if not self._disk.exists(root):
            return []
        known = {self._directory(served.topic).rpartition("/")[2] for served in self._by_name.values()}
        unknown = [name for name in self._disk.list_directory(root) if name not in known]
        for name in unknown:
            logger.warning("directory of no known topic left alone", extra=fields(directory=f"{root}/{name}"))
        return unknown

    @property
    def _sync_root(self) -> str:
        """What many logs are synced through at once. The syncer uses the directory above: each of the two hears of
        every error of the file system."""
        return f"{self._settings.data_dir}/topics"

    def _directory(self, topic: Topic) -> str:
        return topic_directory(self._settings.data_dir, topic)


def _remove(disk: Disk, directory: str) -> None:
    if disk.exists(directory):
        disk.remove_tree(directory)


def _set_aside(disk: Disk, directory: str) -> None:
    """Make room for a new log; what may still be of use to somebody stays until the next time."""
    if not disk.exists(directory):
        return
    aside = f"{directory}.damaged"
    if disk.exists(aside):
        disk.remove_tree(aside)
    disk.rename(directory, aside)
    disk.sync_directory(directory.rpartition("/")[0])


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
