"""Orphaned directories (Kafka stray logs): directories of topics that were deleted, and of replicas that were removed,
while this broker was down. Also removes those of replicas that are removed while it runs.

In a cluster a broker that was down when a topic was deleted only finds a directory whose topic id is not in the
metadata. It also finds such a directory if etcd was wiped, was restored from a backup, or is another one with the same
cluster id. To distinguish these cases the broker records the value of the cluster's `format` key, which is written once
with a unique token, and the metadata revision at which the broker last created a directory. If the format differs at
the next start, or the revision is lower, no directory is removed: they are quarantined for an operator.

Invariants:
* A directory is removed only if the metadata is a later version of that under which the directory was created, and does
  not contain the topic id, not even as a topic that is being created or deleted, or does not contain this broker as a
  replica of the partition. A directory whose name is not that of a topic directory is kept.
* After a crash a directory is either at its old path or in one of the two directories to which it is moved.
"""

from __future__ import annotations

import base64
import json
import logging
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from mansio.broker.partition.partition_files import DAMAGED_SUFFIX, topic_directory
from mansio.errors import StorageError
from mansio.host.atomic_file import write_file_atomically
from mansio.host.run_in_thread import run_in_thread
from mansio.logs import fields
from mansio.storage.checksummed_file import decode_checksummed, encode_checksummed

if TYPE_CHECKING:
    from collections.abc import Callable

    from mansio.metadata.image import MetadataImage
    from mansio.metadata.metadata_store import MetadataStore
    from mansio.metadata.model import Topic
    from mansio.ports import Background, Disk, Scheduler

logger = logging.getLogger(__name__)

T = TypeVar("T")

LAST_METADATA_FILE_NAME: Final = "last-metadata-revision"
MAGIC: Final = b"MANSSEEN"
VERSION: Final = 1
REMOVED_DIRECTORY: Final = "removed"
"""Directory for directories that are to be removed; an interrupted removal continues at the next start."""

QUARANTINE_DIRECTORY: Final = "quarantine"
"""Directory for directories that are kept for an operator, because their topic may exist in other metadata."""

TOPIC_ID_BYTES: Final = 16


class LastSeenMetadata(NamedTuple):
    """What this broker recorded about the metadata: the value of the cluster's `format` key, and the revision."""

    format: str
    revision: int


class OrphanedDirectories:
    """Removal of orphaned directories and of removed replicas.

    Call `move_orphaned_directories` once, before any topic can be created or deleted; later `record_revision` and
    `remove_moved`.
    """

    def __init__(
        self, disk: Disk, thread: Background, scheduler: Scheduler, data_dir: str, node_id: int
    ) -> None:
        self._disk = disk
        self._thread = thread
        self._scheduler = scheduler
        self._data_dir = data_dir
        self._node_id = node_id
        self._format = ""

    async def move_orphaned_directories(self, store: MetadataStore, state: MetadataImage) -> None:
        """Move the directories that belong to no topic of `state`, which was just loaded from `store`.

        Raises `Unavailable` if `store` cannot be read. After a disk error, which is logged, the remaining directories
        stay in place.
        """
        entry = await store.get(state.keys.format)
        self._format = "" if entry is None else entry.value.decode()
        known = {
            self._name_of(topic): frozenset(
                str(index)
                for index, partition in enumerate(topic.partitions)
                if self._node_id not in partition.replicas
            )
            for topic in state.topics.values()
        }
        known |= {self._name_of(topic): frozenset() for topic in state.unfinished_topics.values()}
        try:
            await self._run_in_thread(
                partial(self._move_unknown_directories, known, LastSeenMetadata(self._format, state.revision))
            )
        except StorageError as error:
            logger.error("orphaned_directory_scan_skipped", extra=fields(reason=error))

    async def remove_replica(self, topic: Topic, index: int) -> None:
        """Remove the directory of a partition of which this broker has no replica any more, and a quarantined one of
        it. Raises `StorageError` if one cannot be moved; if it is moved and cannot be removed, the next start removes
        it."""
        moved = await self._run_in_thread(partial(self._move_replica, self._name_of(topic), str(index)))
        try:
            for directory in moved:
                await self._run_in_thread(partial(self._remove_tree, directory))
        except StorageError as error:
            logger.error("orphaned_directories_not_removed", extra=fields(reason=error))

    def _name_of(self, topic: Topic) -> str:
        return topic_directory(self._data_dir, topic).rpartition("/")[2]

    async def record_revision(self, revision: int) -> None:
        """Record the revision under which directories were created. Raises `StorageError`."""
        if self._format:
            await self._run_in_thread(
                partial(self._write_last_seen, LastSeenMetadata(self._format, revision))
            )

    async def remove_moved(self) -> None:
        """Remove the directories in `REMOVED_DIRECTORY`, one at a time. Raises `StorageError`."""
        root = f"{self._data_dir}/{REMOVED_DIRECTORY}"
        for name in await self._run_in_thread(partial(self._list_names, root)):
            await self._run_in_thread(partial(self._remove_tree, f"{root}/{name}"))
            logger.info("orphaned_directory_removed", extra=fields(directory=name))

    # On the file thread

    def _move_unknown_directories(self, known: dict[str, frozenset[str]], now: LastSeenMetadata) -> None:
        """`known`: by name of a topic's directory, the names of its partitions of which this broker has no replica."""
        root = f"{self._data_dir}/topics"
        unknown = [name for name in self._list_names(root) if name not in known]
        for name in [name for name in unknown if not _is_topic_directory(name)]:
            logger.warning("unknown_directory_kept", extra=fields(directory=f"{root}/{name}"))
        unknown = [name for name in unknown if _is_topic_directory(name)]
        mismatch = _mismatch(self._read_last_seen(), now)
        for name in unknown:
            self._move_directory(name, name, mismatch)
        if unknown:
            self._disk.sync_directory(root)
        for name, former_replicas in known.items():
            there = {each.removesuffix(DAMAGED_SUFFIX) for each in self._list_names(f"{root}/{name}")}
            for index in former_replicas & there:
                self._move_replica(name, index, mismatch)
        self._write_last_seen(now)

    def _move_replica(self, name: str, index: str, mismatch: str = "") -> list[str]:
        """Move the directories of a partition that exist, a quarantined one included; return where they are then."""
        directory = f"{self._data_dir}/topics/{name}"
        moved = [
            self._move_directory(f"{name}/{each}", f"{name}.{each}", mismatch)
            for each in (index, f"{index}{DAMAGED_SUFFIX}")
            if self._disk.exists(f"{directory}/{each}")
        ]
        if moved:
            self._disk.sync_directory(directory)
        return moved

    def _move_directory(self, name: str, new_name: str, mismatch: str) -> str:
        """Move a directory under `topics/`: to be removed, or, if the metadata may be older or different, for an
        operator. Returns where it is then."""
        parent = f"{self._data_dir}/{QUARANTINE_DIRECTORY if mismatch else REMOVED_DIRECTORY}"
        self._disk.make_directory(parent)
        target, number = f"{parent}/{new_name}", 0
        while self._disk.exists(target):
            number += 1
            target = f"{parent}/{new_name}.{number}"
        self._disk.rename(f"{self._data_dir}/topics/{name}", target)
        self._disk.sync_directory(parent)
        if mismatch:
            known = fields(directory=target, reason=mismatch)
            logger.warning("unknown_directory_quarantined", extra=known)
        return target

    def _remove_tree(self, directory: str) -> None:
        if self._disk.exists(directory):  # otherwise another call has removed it
            self._disk.remove_tree(directory)

    def _list_names(self, root: str) -> list[str]:
        return self._disk.list_directory(root) if self._disk.exists(root) else []

    def _read_last_seen(self) -> LastSeenMetadata | None:
        path = f"{self._data_dir}/{LAST_METADATA_FILE_NAME}"
        payload = (
            decode_checksummed(MAGIC, VERSION, self._disk.read_file(path))
            if self._disk.exists(path)
            else None
        )
        return None if payload is None else LastSeenMetadata(*json.loads(payload))

    def _write_last_seen(self, seen: LastSeenMetadata) -> None:
        data = encode_checksummed(MAGIC, VERSION, json.dumps(seen).encode())
        write_file_atomically(self._disk, f"{self._data_dir}/{LAST_METADATA_FILE_NAME}", data)

    async def _run_in_thread(self, work: Callable[[], T]) -> T:
        return await run_in_thread(self._scheduler, self._thread, work)


def _mismatch(seen: LastSeenMetadata | None, now: LastSeenMetadata) -> str:
    """Return the reason why `now` may not be a later version of the metadata in `seen`, "" if it certainly is."""
    if seen is None:
        return "this broker has no record of the metadata under which the directory was created"
    if seen.format != now.format or not now.format:
        return "the cluster's metadata was created again"
    if now.revision < seen.revision:
        return "the cluster's metadata is older than before, as after a restore"
    return ""


def _is_topic_directory(name: str) -> bool:
    """Return whether a directory name consists of a topic name, a dot and a topic id in base64."""
    topic, _, tag = name.rpartition(".")
    try:
        return bool(topic) and len(base64.urlsafe_b64decode(f"{tag}==")) == TOPIC_ID_BYTES
    except ValueError:
        return False
