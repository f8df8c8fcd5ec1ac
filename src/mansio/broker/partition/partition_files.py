"""The files of the partitions a broker holds: made, recovered, set aside and removed.

Owns the directories under `<data>/topics/`. A directory is named after the topic *and its id* (`orders.mJ2v...`), so
that a topic created again under an old name never meets the old one's files. In a cluster it owns the list of the
partitions that were ever made here (`made`), too.

All of it waits for the disk, so it runs on the broker's file thread, but for `directory` and `close`.

Always true: what is returned as open has been noted in the list; a directory that should be there and is not, or is
empty, is a loss that is told, never a new and empty log.

Which partitions' directories this broker of a cluster has ever made: what tells a log that is lost from one that
never was.

Owns the file `partitions-made` in the data directory. A partition is written down, durably, after its directory was
made and before anybody is told that it is open here; so whatever was once confirmed from here is in the list. Missing
directories of partitions that are not in it never existed: the broker was away when they were placed on it.

Always true: there is no list before this broker is out of all in-sync sets that a lost disk had it in (`begin`);
without one nothing is concluded. What is in it of deleted topics goes from it in time.
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

    Wanted = tuple[Topic, int]  # a partition to be opened
    Opened = tuple[Log, ProducerHook]
    PartitionKey = tuple[UUID, int]  # topic and partition


NAME_BYTES_IN_DIRECTORY = 200  # a file name may have 255 bytes, a topic 249 and the id takes 23


def topic_directory(data_dir: str, topic: Topic) -> str:
    """Where the partitions of a topic are: one directory per index in there."""
    tag = base64.urlsafe_b64encode(topic.topic_id.bytes).decode().rstrip("=")
    return f"{data_dir}/topics/{topic.name[:NAME_BYTES_IN_DIRECTORY]}.{tag}"


class PartitionFiles:
    """See the module."""

    def __init__(
        self, settings: Settings, disk: Disk, clock: Clock, files: FileCache, file_thread: Background
    ) -> None:
        self._settings = settings
        self._disk = disk
        self._clock = clock
        self._files = files
        self._file_thread = file_thread
        self._root = f"{settings.data_dir}/topics"
        """Many logs are synced through it at once. The syncer uses the directory above: each of the two hears of every
        error of the file system."""
        self.made = HostedPartitions(disk, settings.data_dir) if settings.clustered else None

    def directory(self, topic: Topic) -> str:
        """Of all its partitions."""
        return topic_directory(self._settings.data_dir, topic)

    def open(
        self,
        wanted: Sequence[Wanted],
        settings: dict[UUID, LogSettings],
        is_new: Callable[[PartitionState], bool] | None,
    ) -> list[Opened | StorageError]:
        """Make the logs that are missing and recover the others. At a start (`is_new`) a directory that is missing, of
        a partition that is not new, is a loss. Raises `OSError` when there is no room for any."""
        self._disk.make_directory(self._root)
        made: dict[int, Opened | StorageError] = {}
        requests: dict[int, OpenRequest] = {}
        for number, (topic, index) in enumerate(wanted):
            directory = f"{self.directory(topic)}/{index}"
            try:
                is_lost = is_new is not None and self._is_lost(topic, index, is_new)
            except OSError as error:
                made[number] = StorageError(f"cannot look into {directory}: {error}")
                continue
            if is_lost:
                made[number] = CorruptLog(f"{directory} is missing, or empty")
            else:
                requests[number] = OpenRequest(directory, settings[topic.topic_id])
        logs = open_logs(self._disk, self._clock, self._root, list(requests.values()), self._files)
        for number, log in zip(requests, logs, strict=True):
            made[number] = self._with_producers(log) if isinstance(log, Log) else log
        self._note(wanted, made)
        return [made[number] for number in range(len(wanted))]

    def _is_lost(self, topic: Topic, index: int, is_new: Callable[[PartitionState], bool]) -> bool:
        """Was there a log that is not there, and may somebody count on it? An empty directory is none."""
        if contains_log(self._disk, f"{self.directory(topic)}/{index}"):
            return False
        state = topic.partitions[index]
        if self.made is None or not self.made.begun:
            return not is_new(state)
        return self._settings.node_id in state.isr and self.made.has(topic.topic_id, index)

    def _note(self, wanted: Sequence[Wanted], made: dict[int, Opened | StorageError]) -> None:
        """Before anybody is told that they are open. Where that cannot be noted they are not."""
        opened = {number: one[0] for number, one in made.items() if isinstance(one, tuple)}
        if self.made is None or not opened:
            return
        try:
            self.made.add((wanted[number][0].topic_id, wanted[number][1]) for number in opened)
        except OSError as error:
            for number, log in opened.items():
                log.close(save=False)
                made[number] = StorageError(f"{log.directory} cannot be noted: {error}")

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
        """All of a topic's data."""
        directory = self.directory(topic)
        if self._disk.exists(directory):
            self._disk.remove_tree(directory)

    def set_aside(self, topic: Topic, index: int) -> None:
        """Make room for a new log; what may still be of use to somebody stays until the next time."""
        directory = f"{self.directory(topic)}/{index}"
        if not self._disk.exists(directory):
            return
        aside = f"{directory}.damaged"
        if self._disk.exists(aside):
            self._disk.remove_tree(aside)
        self._disk.rename(directory, aside)
        self._disk.sync_directory(directory.rpartition("/")[0])

    def unknown(self, topics: Sequence[Topic]) -> list[str]:
        """Directories that belong to none of these topics, in full."""
        if not self._disk.exists(self._root):
            return []
        known = frozenset(self.directory(topic) for topic in topics)
        found = [f"{self._root}/{name}" for name in self._disk.list_directory(self._root)]
        return [directory for directory in found if directory not in known]

    def flush_on_shutdown(self, logs: Sequence[Log]) -> None:
        """What makes the next start quick: these logs are about to be closed."""
        flush_on_shutdown(self._disk, self._root, logs)


logger = logging.getLogger(__name__)

FILE: Final = "partitions-made"
_PLACE: Final = struct.Struct(">16sI")
_ENTRY: Final = struct.Struct(">16sII")  # and the checksum of both


class HostedPartitions:
    """See the module. On the file thread, but for making it."""

    def __init__(self, disk: Disk, data_dir: str) -> None:
        self._disk = disk
        self._data_dir = data_dir
        self._path = f"{data_dir}/{FILE}"
        self._size = 0
        self._places: set[PartitionKey] = set()
        self.begun = False
        """Is there a list? Without one nobody knows what was made."""

    def load(self, known: Iterable[UUID]) -> None:
        """Read the list, if there is one. What it has of topics that are not `known` is left out, and goes from the
        file once it is most of it."""
        if not self._disk.exists(self._path):
            return
        data = self._disk.read_file(self._path)
        topics = {*known}
        self._places = {place for place in _places(data) if place[0] in topics}
        self._size = len(data) // _ENTRY.size * _ENTRY.size
        self.begun = True
        if 2 * len(self._places) * _ENTRY.size < self._size:
            try:
                self._write()
            except OSError as error:  # on a full disk the old one does as well
                logger.warning("hosted_partitions_not_compacted", extra=fields(path=self._path, reason=error))

    def begin(self) -> None:
        """From now on there is a list."""
        if not self.begun:
            self._write()

    def has(self, topic_id: UUID, index: int) -> bool:
        """Was this partition's directory ever made here? Asked only where there is a list."""
        return (topic_id, index) in self._places

    def add(self, places: Iterable[PartitionKey]) -> None:
        """These directories are there, durably; and durably noted, on return, where there is a list."""
        new = [place for place in places if place not in self._places]
        if self.begun and new:
            data = b"".join(map(_entry, new))
            file = self._disk.open(self._path)
            try:
                file.write_at([data], self._size)
                file.sync()
            finally:
                file.close()
            self._size += len(data)
        self._places.update(new)

    def _write(self) -> None:
        """All of it, whole or not at all, and durable."""
        data = b"".join(_entry(place) for place in sorted(self._places, key=_in_order))
        write_file_atomically(self._disk, self._path, data)
        self._size = len(data)
        self.begun = True


def _in_order(place: PartitionKey) -> tuple[bytes, int]:
    return place[0].bytes, place[1]


def _entry(place: PartitionKey) -> bytes:
    body = _PLACE.pack(place[0].bytes, place[1])
    return body + crc32c(body).to_bytes(4, "big")


def _places(data: bytes) -> Iterable[PartitionKey]:
    """What is whole. An entry that is torn was never relied on."""
    for at in range(0, len(data) - _ENTRY.size + 1, _ENTRY.size):
        topic_id, index, checksum = _ENTRY.unpack_from(data, at)
        if crc32c(data[at : at + _PLACE.size]) == checksum:
            yield UUID(bytes=topic_id), index
