"""Partition directories of a broker: creation, recovery, quarantine and removal.

Owns the directories under `<data>/topics/`. A directory is named after the topic *and its id* (`orders.mJ2v...`), so
that a topic that is created again under an old name never uses the old files. Everything except `directory` and `close`
waits for the disk and runs on the file thread.

In a cluster it also owns the file `hosted-partitions` (`HostedPartitions`): a list of the partitions whose directories
this broker has ever created, which distinguishes a lost log from one that never existed. A partition is recorded
durably after its directory was created and before it is reported as open, so that the list contains every partition in
which this broker acknowledged a record. A missing directory that is not in the list never existed: the broker was down
when the partition was assigned to it.

Invariants:
* A partition that is returned as open is recorded in the list.
* A directory that should exist and does not, or is empty, is reported as a loss; it never becomes a new and empty log.
* There is no list before this broker has left all in-sync sets that a lost disk was in (`begin`); without a list
  nothing is concluded. Deleted topics are removed from it in time.
"""

from __future__ import annotations

import base64
import logging
import struct
from typing import TYPE_CHECKING, Final
from uuid import UUID

from crc32c import crc32c

from mansio.broker.partition.producer_hook import ProducerHook
from mansio.errors import CorruptLog, StorageError
from mansio.host.atomic_file import write_file_atomically
from mansio.logs import fields
from mansio.storage.flush.group_commit import flush_on_shutdown
from mansio.storage.log import Log
from mansio.storage.recovery.parallel_recovery import OpenRequest, contains_log, open_logs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from mansio.config.settings import Settings
    from mansio.metadata.model import PartitionState, Topic
    from mansio.ports import Background, Clock, Disk
    from mansio.storage.file_cache import FileCache
    from mansio.storage.settings import LogSettings

    Wanted = tuple[Topic, int]  # a partition to open
    Opened = tuple[Log, ProducerHook]
    PartitionKey = tuple[UUID, int]  # topic id and partition


NAME_BYTES_IN_DIRECTORY = 200  # a file name may have 255 bytes, a topic 249, and the id takes 23


def topic_directory(data_dir: str, topic: Topic) -> str:
    """The directory of a topic; it has one directory per partition index."""
    tag = base64.urlsafe_b64encode(topic.topic_id.bytes).decode().rstrip("=")
    return f"{data_dir}/topics/{topic.name[:NAME_BYTES_IN_DIRECTORY]}.{tag}"


class PartitionFiles:
    """Files of the partitions of this broker."""

    def __init__(
        self, settings: Settings, disk: Disk, clock: Clock, files: FileCache, file_thread: Background
    ) -> None:
        self._settings = settings
        self._disk = disk
        self._clock = clock
        self._files = files
        self._file_thread = file_thread
        self._root = f"{settings.data_dir}/topics"
        """Group commit flushes many logs through this directory. It uses the directory above itself, so that each of
        the two descriptors reports every error of the file system."""
        self.hosted = HostedPartitions(disk, settings.data_dir) if settings.clustered else None

    def directory(self, topic: Topic) -> str:
        """The directory of all partitions of a topic."""
        return topic_directory(self._settings.data_dir, topic)

    def open(
        self,
        wanted: Sequence[Wanted],
        settings: dict[UUID, LogSettings],
        is_new: Callable[[PartitionState], bool] | None,
    ) -> list[Opened | StorageError]:
        """Create the logs that are missing and recover the others. At start (`is_new`), a missing directory of a
        partition that is not new is a loss. Raises `OSError` if the disk has no space."""
        self._disk.make_directory(self._root)
        results: dict[int, Opened | StorageError] = {}
        requests: dict[int, OpenRequest] = {}
        for number, (topic, index) in enumerate(wanted):
            directory = f"{self.directory(topic)}/{index}"
            try:
                is_lost = is_new is not None and self._is_lost(topic, index, is_new)
            except OSError as error:
                results[number] = StorageError(f"cannot look into {directory}: {error}")
                continue
            if is_lost:
                results[number] = CorruptLog(f"{directory} is missing, or empty")
            else:
                requests[number] = OpenRequest(directory, settings[topic.topic_id])
        logs = open_logs(self._disk, self._clock, self._root, list(requests.values()), self._files)
        for number, log in zip(requests, logs, strict=True):
            results[number] = self._with_producers(log) if isinstance(log, Log) else log
        self._record(wanted, results)
        return [results[number] for number in range(len(wanted))]

    def _is_lost(self, topic: Topic, index: int, is_new: Callable[[PartitionState], bool]) -> bool:
        """A log that existed is missing, and its records may be needed. An empty directory is not a log."""
        if contains_log(self._disk, f"{self.directory(topic)}/{index}"):
            return False
        state = topic.partitions[index]
        if self.hosted is None or not self.hosted.exists:
            return not is_new(state)
        return self._settings.node_id in state.isr and self.hosted.has(topic.topic_id, index)

    def _record(self, wanted: Sequence[Wanted], results: dict[int, Opened | StorageError]) -> None:
        """Record the partitions before they are reported as open. If that fails they are not open."""
        opened = {number: one[0] for number, one in results.items() if isinstance(one, tuple)}
        if self.hosted is None or not opened:
            return
        try:
            self.hosted.add((wanted[number][0].topic_id, wanted[number][1]) for number in opened)
        except OSError as error:
            for number, log in opened.items():
                log.close(save=False)
                results[number] = StorageError(f"{log.directory} cannot be recorded: {error}")

    def _with_producers(self, log: Log) -> Opened | StorageError:
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

    def remove(self, topic: Topic) -> None:
        """Remove all data of a topic."""
        directory = self.directory(topic)
        if self._disk.exists(directory):
            self._disk.remove_tree(directory)

    def quarantine(self, topic: Topic, index: int) -> None:
        """Move a directory away to replace it; the quarantined data is kept until the next quarantine."""
        directory = f"{self.directory(topic)}/{index}"
        if not self._disk.exists(directory):
            return
        quarantined = f"{directory}.damaged"
        if self._disk.exists(quarantined):
            self._disk.remove_tree(quarantined)
        self._disk.rename(directory, quarantined)
        self._disk.sync_directory(directory.rpartition("/")[0])

    def unknown(self, topics: Sequence[Topic]) -> list[str]:
        """Full paths of the directories that belong to none of these topics."""
        if not self._disk.exists(self._root):
            return []
        known = frozenset(self.directory(topic) for topic in topics)
        found = [f"{self._root}/{name}" for name in self._disk.list_directory(self._root)]
        return [directory for directory in found if directory not in known]

    def flush_on_shutdown(self, logs: Sequence[Log]) -> None:
        """Save what shortens the next start; these logs are about to be closed."""
        flush_on_shutdown(self._disk, self._root, logs)


logger = logging.getLogger(__name__)

FILE: Final = "hosted-partitions"
_KEY: Final = struct.Struct(">16sI")
_ENTRY: Final = struct.Struct(">16sII")  # and the checksum of both


class HostedPartitions:
    """List of the partitions ever created on this broker. Methods run on the file thread, except the constructor."""

    def __init__(self, disk: Disk, data_dir: str) -> None:
        self._disk = disk
        self._data_dir = data_dir
        self._path = f"{data_dir}/{FILE}"
        self._size = 0
        self._entries: set[PartitionKey] = set()
        self.exists = False
        """Whether the list exists; without it, it is unknown which partitions were created."""

    def load(self, known: Iterable[UUID]) -> None:
        """Read the list if it exists. Entries of topics that are not `known` are ignored, and removed from the file
        when they are most of it."""
        if not self._disk.exists(self._path):
            return
        data = self._disk.read_file(self._path)
        topics = {*known}
        self._entries = {partition for partition in _entries(data) if partition[0] in topics}
        self._size = len(data) // _ENTRY.size * _ENTRY.size
        self.exists = True
        if 2 * len(self._entries) * _ENTRY.size < self._size:
            try:
                self._write()
            except OSError as error:  # on a full disk the old file is sufficient
                logger.warning("hosted_partitions_not_compacted", extra=fields(path=self._path, reason=error))

    def begin(self) -> None:
        """Create the list."""
        if not self.exists:
            self._write()

    def has(self, topic_id: UUID, index: int) -> bool:
        """Whether this partition's directory was ever created here. Only valid while the list exists."""
        return (topic_id, index) in self._entries

    def add(self, partitions: Iterable[PartitionKey]) -> None:
        """Record directories that exist durably. On return they are recorded durably, if the list exists."""
        new = [partition for partition in partitions if partition not in self._entries]
        if self.exists and new:
            data = b"".join(map(_entry, new))
            file = self._disk.open(self._path)
            try:
                file.write_at([data], self._size)
                file.sync()
            finally:
                file.close()
            self._size += len(data)
        self._entries.update(new)

    def _write(self) -> None:
        """Replace the file atomically and durably."""
        data = b"".join(_entry(partition) for partition in sorted(self._entries, key=_sort_key))
        write_file_atomically(self._disk, self._path, data)
        self._size = len(data)
        self.exists = True


def _sort_key(partition: PartitionKey) -> tuple[bytes, int]:
    return partition[0].bytes, partition[1]


def _entry(partition: PartitionKey) -> bytes:
    body = _KEY.pack(partition[0].bytes, partition[1])
    return body + crc32c(body).to_bytes(4, "big")


def _entries(data: bytes) -> Iterable[PartitionKey]:
    """The valid entries. An incomplete entry at the end is omitted: its partition was not opened yet."""
    for at in range(0, len(data) - _ENTRY.size + 1, _ENTRY.size):
        topic_id, index, checksum = _ENTRY.unpack_from(data, at)
        if crc32c(data[at : at + _KEY.size]) == checksum:
            yield UUID(bytes=topic_id), index
