"""Orphaned directories (Kafka stray logs): directories of topics that were deleted while this broker was down.

In a cluster a broker is not informed later of a topic that was deleted meanwhile; it only finds a directory whose topic
id is not in the metadata. It finds the same when the metadata is not the one under which the directory was created: an
etcd that was wiped, restored from a backup, or another one with the same cluster id. Therefore the broker records what
it has seen of the metadata: the value of the cluster's `format` key, which is written once with a unique token, and the
revision at which it last created a directory. If the format differs now, or the revision is lower, nothing is removed:
the directories are quarantined for an operator.

Invariants:
* A directory is removed only under the metadata under which it was created, and only if its topic id is not in it,
  neither live nor unfinished. A directory whose name is not that of a topic is kept.
* After a crash at any time a directory is at its old path, or in one of the two directories to which it is moved.
"""

from __future__ import annotations

import base64
import json
import logging
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from mansio.broker.partition.partition_files import topic_directory
from mansio.errors import StorageError
from mansio.host.atomic_file import write_file_atomically
from mansio.host.run_in_thread import run_in_thread
from mansio.logs import fields
from mansio.storage.checksummed_file import decode_checksummed, encode_checksummed

if TYPE_CHECKING:
    from collections.abc import Callable

    from mansio.metadata.image import MetadataImage
    from mansio.metadata.metadata_store import MetadataStore
    from mansio.ports import Background, Disk, Scheduler

logger = logging.getLogger(__name__)

T = TypeVar("T")

FILE: Final = "last-metadata-revision"
MAGIC: Final = b"MANSSEEN"
VERSION: Final = 1
REMOVED: Final = "removed"
"""Directories that wait for their removal; a start continues with it."""
QUARANTINED: Final = "quarantine"
"""Directories whose topic may have existed under other metadata."""
ID_BYTES: Final = 16


class SeenMetadata(NamedTuple):
    """The metadata as last seen by this broker: the cluster's `format` value, and the revision."""

    format: str
    revision: int


class OrphanedDirectories:
    """Call `scan` once, before any topic can be created or deleted; then `record_revision` and `remove`."""

    def __init__(self, disk: Disk, thread: Background, scheduler: Scheduler, data_dir: str) -> None:
        self._disk = disk
        self._thread = thread
        self._scheduler = scheduler
        self._data_dir = data_dir
        self._format = ""

    async def scan(self, store: MetadataStore, state: MetadataImage) -> None:
        """Move the directories that belong to no topic of `state`, which was just loaded from `store`. Raises
        `Unavailable`; a disk error is logged, and all directories stay unchanged."""
        entry = await store.get(state.keys.format)
        self._format = "" if entry is None else entry.value.decode()
        topics = [*state.topics.values(), *state.unfinished_topics.values()]
        known = frozenset(topic_directory(self._data_dir, topic).rpartition("/")[2] for topic in topics)
        try:
            await self._run_in_thread(partial(self._move, known, SeenMetadata(self._format, state.revision)))
        except StorageError as error:
            logger.error("orphaned_directory_scan_skipped", extra=fields(reason=error))

    async def record_revision(self, revision: int) -> None:
        """Record the revision under which directories were created. Raises `StorageError`."""
        if self._format:
            await self._run_in_thread(partial(self._write, SeenMetadata(self._format, revision)))

    async def remove(self) -> None:
        """Remove the moved directories, one at a time. Raises `StorageError`."""
        root = f"{self._data_dir}/{REMOVED}"
        for name in await self._run_in_thread(partial(self._names, root)):
            await self._run_in_thread(partial(self._disk.remove_tree, f"{root}/{name}"))
            logger.info("orphaned_directory_removed", extra=fields(directory=name))

    # On the file thread

    def _move(self, known: frozenset[str], now: SeenMetadata) -> None:
        root = f"{self._data_dir}/topics"
        unknown = [name for name in self._names(root) if name not in known]
        for name in [name for name in unknown if not _is_topic_directory(name)]:
            logger.warning("unknown_directory_kept", extra=fields(directory=f"{root}/{name}"))
        unknown = [name for name in unknown if _is_topic_directory(name)]
        mismatch = _mismatch(self._read(), now)
        for name in unknown:
            self._move_one(name, QUARANTINED if mismatch else REMOVED, mismatch)
        if unknown:
            self._disk.sync_directory(root)
        self._write(now)

    def _move_one(self, name: str, where: str, mismatch: str) -> None:
        aside = f"{self._data_dir}/{where}"
        self._disk.make_directory(aside)
        target, number = f"{aside}/{name}", 0
        while self._disk.exists(target):
            number += 1
            target = f"{aside}/{name}.{number}"
        self._disk.rename(f"{self._data_dir}/topics/{name}", target)
        self._disk.sync_directory(aside)
        if mismatch:
            known = fields(directory=target, reason=mismatch)
            logger.warning("unknown_directory_quarantined", extra=known)

    def _names(self, root: str) -> list[str]:
        return self._disk.list_directory(root) if self._disk.exists(root) else []

    def _read(self) -> SeenMetadata | None:
        path = f"{self._data_dir}/{FILE}"
        payload = (
            decode_checksummed(MAGIC, VERSION, self._disk.read_file(path))
            if self._disk.exists(path)
            else None
        )
        return None if payload is None else SeenMetadata(*json.loads(payload))

    def _write(self, seen: SeenMetadata) -> None:
        data = encode_checksummed(MAGIC, VERSION, json.dumps(seen).encode())
        write_file_atomically(self._disk, f"{self._data_dir}/{FILE}", data)

    async def _run_in_thread(self, work: Callable[[], T]) -> T:
        return await run_in_thread(self._scheduler, self._thread, work)


def _mismatch(seen: SeenMetadata | None, now: SeenMetadata) -> str:
    """Why the metadata may not be the one that was seen; empty if it is."""
    if seen is None:
        return "this broker has no record of the metadata under which the directory was created"
    if seen.format != now.format or not now.format:
        return "the cluster's metadata was created again"
    if now.revision < seen.revision:
        return "the cluster's metadata is older than before, as after a restore"
    return ""


def _is_topic_directory(name: str) -> bool:
    """Whether the name is a topic name, a dot and an id."""
    topic, _, tag = name.rpartition(".")
    try:
        return bool(topic) and len(base64.urlsafe_b64decode(f"{tag}==")) == ID_BYTES
    except ValueError:
        return False
