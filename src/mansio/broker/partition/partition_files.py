"""Partition directories of a broker: creation, recovery, quarantine and removal.

Owns the directories under `<data>/topics/`. A directory is named after the topic *and its id* (`orders.mJ2v...`), so
that a topic that is created again under an old name never uses the old files. Everything except `directory` and `close`
waits for the disk and runs on the file thread.

In a cluster this module also owns the file `hosted-partitions` (`HostedPartitions`): a list of all partitions whose
directories this broker has created. If a directory is missing, the list shows whether its log was lost or never
existed, because the broker was down when the partition was assigned to it. A partition is recorded durably after its
directory was created and before it is reported as open, so that the list contains every partition in which this broker
acknowledged a record.

Invariants:
* A partition that is returned as open is recorded in the list.
* If a directory that should exist is missing or empty, its log is reported as lost; no empty log is created instead.
* The list is created (`HostedPartitions.create`) only after this broker has left all in-sync sets in which it may have
  lost records; without the list a missing directory is not taken for one that never existed. Partitions of deleted
  topics are removed from the list when the file is rewritten.
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
from mansio.storage.group_commit import flush_on_shutdown
from mansio.storage.log import Log
from mansio.storage.parallel_recovery import OpenRequest, contains_log, open_logs
from mansio.tracebacks import without_traceback

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from mansio.config.settings import Settings
    from mansio.metadata.model import PartitionState, Topic
    from mansio.ports import Background, Clock, Disk
    from mansio.storage.file_cache import FileCache
    from mansio.storage.settings import LogSettings

    AssignedReplica = tuple[Topic, int]  # a partition to open
    Opened = tuple[Log, ProducerHook]
    PartitionKey = tuple[UUID, int]  # topic id and partition


NAME_BYTES_IN_DIRECTORY = 200  # a file name may have 255 bytes, a topic 249, and the id takes 23
DAMAGED_SUFFIX: Final = ".damaged"
"""End of the name of a quarantined directory of a partition, after its index."""


def topic_directory(data_dir: str, topic: Topic) -> str:
    """Return the directory of a topic, which contains one directory per partition index."""
    tag = base64.urlsafe_b64encode(topic.topic_id.bytes).decode().rstrip("=")
    return f"{data_dir}/topics/{topic.name[:NAME_BYTES_IN_DIRECTORY]}.{tag}"


class PartitionFiles:
    """Files of the partitions of this broker."""

    def __init__(
        self,
        settings: Settings,
        disk: Disk,
        clock: Clock,
        files: FileCache,
        file_thread: Background,
        before_newer_format: Callable[[], object],
    ) -> None:
        """`before_newer_format`: see `Log`."""
        self._before_newer_format = before_newer_format
        self._settings = settings
        self._disk = disk
        self._clock = clock
        self._files = files
        self._file_thread = file_thread
        self._root = f"{settings.data_dir}/topics"
        """Group commit flushes many logs through a descriptor of this directory, and uses another descriptor of the
        parent directory, because the kernel reports a file system error once per descriptor."""
        self.hosted = HostedPartitions(disk, settings.data_dir) if settings.clustered else None

    def directory(self, topic: Topic) -> str:
        """Return the directory of all partitions of a topic."""
        return topic_directory(self._settings.data_dir, topic)

    def open(
        self,
        replicas: Sequence[AssignedReplica],
        settings: dict[UUID, LogSettings],
        is_new: Callable[[PartitionState], bool] | None,
    ) -> list[Opened | StorageError]:
        """Create missing logs and recover the others; return a log and its producers, or an error, for each replica.

        `is_new`: None except at start; returns whether a partition may never have had a directory. If it returns False,
        a missing directory is an error. Raises `OSError` if the disk has no space."""
        self._disk.make_directory(self._root)
        results: dict[int, Opened | StorageError] = {}
        requests: dict[int, OpenRequest] = {}
        for number, (topic, index) in enumerate(replicas):
            directory = f"{self.directory(topic)}/{index}"
            try:
                is_lost = is_new is not None and self._is_lost(topic, index, is_new)
            except OSError as error:
                results[number] = StorageError(f"cannot read the directory {directory}: {error}")
                continue
            if is_lost:
                results[number] = CorruptLog(f"{directory} is missing or empty")
            else:
                requests[number] = OpenRequest(directory, settings[topic.topic_id])
        logs = open_logs(
            self._disk,
            self._clock,
            self._root,
            list(requests.values()),
            self._files,
            self._before_newer_format,
        )
        for number, log in zip(requests, logs, strict=True):
            results[number] = self._load_producers(log) if isinstance(log, Log) else log
        self._record_hosted(replicas, results)
        return [results[number] for number in range(len(replicas))]

    def _is_lost(self, topic: Topic, index: int, is_new: Callable[[PartitionState], bool]) -> bool:
        """Return whether a log that existed is missing and may be needed. An empty directory contains no log."""
        if contains_log(self._disk, f"{self.directory(topic)}/{index}"):
            return False
        state = topic.partitions[index]
        if self.hosted is None or not self.hosted.exists:
            return not is_new(state)
        return self.hosted.contains(topic.topic_id, index)

    def _record_hosted(
        self, replicas: Sequence[AssignedReplica], results: dict[int, Opened | StorageError]
    ) -> None:
        """Record partitions in the list before they are reported as open; if that fails, close them again."""
        opened = {number: one[0] for number, one in results.items() if isinstance(one, tuple)}
        if self.hosted is None or not opened:
            return
        try:
            self.hosted.add((replicas[number][0].topic_id, replicas[number][1]) for number in opened)
        except OSError as error:
            for number, log in opened.items():
                log.close(save=False)
                results[number] = StorageError(f"{log.directory} cannot be recorded: {error}")

    def _load_producers(self, log: Log) -> Opened | StorageError:
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
            return (
                without_traceback(error)
                if isinstance(error, StorageError)
                else StorageError(f"{log.directory}: {error}")
            )

    def remove(self, topic: Topic) -> None:
        """Remove all data of a topic."""
        directory = self.directory(topic)
        if self._disk.exists(directory):
            self._disk.remove_tree(directory)

    def quarantine(self, topic: Topic, index: int) -> None:
        """Rename the directory of a partition to `<index>.damaged`, and remove an earlier directory of that name."""
        directory = f"{self.directory(topic)}/{index}"
        if not self._disk.exists(directory):
            return
        quarantined = f"{directory}{DAMAGED_SUFFIX}"
        if self._disk.exists(quarantined):
            self._disk.remove_tree(quarantined)
        self._disk.rename(directory, quarantined)
        self._disk.sync_directory(directory.rpartition("/")[0])

    def unknown_directories(self, topics: Sequence[Topic]) -> list[str]:
        """Return the full paths of the directories that belong to none of these topics."""
        if not self._disk.exists(self._root):
            return []
        known = frozenset(self.directory(topic) for topic in topics)
        found = [f"{self._root}/{name}" for name in self._disk.list_directory(self._root)]
        return [directory for directory in found if directory not in known]

    def flush_on_shutdown(self, logs: Sequence[Log]) -> None:
        """Flush logs that are about to be closed and write the files that shorten the next start."""
        flush_on_shutdown(self._disk, self._root, logs)


logger = logging.getLogger(__name__)

HOSTED_PARTITIONS_FILE_NAME: Final = "hosted-partitions"
_KEY: Final = struct.Struct(">16sI")
_ENTRY: Final = struct.Struct(">16sII")  # topic id, partition index, checksum of both


class HostedPartitions:
    """List of all partitions created on this broker. Methods run on the file thread, except the constructor."""

    def __init__(self, disk: Disk, data_dir: str) -> None:
        self._disk = disk
        self._data_dir = data_dir
        self._path = f"{data_dir}/{HOSTED_PARTITIONS_FILE_NAME}"
        self._size = 0
        self._entries: set[PartitionKey] = set()
        self.exists = False
        """Whether the list exists; without it, it is unknown which partitions were created."""

    def load(self, known: Iterable[UUID]) -> None:
        """Read the list if it exists. Entries of topics that are not in `known` are ignored; if they are more than half
        of the file, it is rewritten without them."""
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

    def create(self) -> None:
        """Create the file with the list, unless it exists."""
        if not self.exists:
            self._write()

    def contains(self, topic_id: UUID, index: int) -> bool:
        """Return whether this broker has created the directory of a partition. Only valid if the list exists."""
        return (topic_id, index) in self._entries

    def add(self, partitions: Iterable[PartitionKey]) -> None:
        """Record partitions whose directories exist durably; on return the record is durable, if the list exists."""
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
        """Rewrite the file atomically and durably."""
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
    """Yield the valid entries. An incomplete last entry is omitted, because its partition was not reported as open."""
    for at in range(0, len(data) - _ENTRY.size + 1, _ENTRY.size):
        topic_id, index, checksum = _ENTRY.unpack_from(data, at)
        if crc32c(data[at : at + _KEY.size]) == checksum:
            yield UUID(bytes=topic_id), index
