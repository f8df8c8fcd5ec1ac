"""Data check: examines a data directory that no broker has open: metadata, partitions, views and unknown files (fsck).

Owns the order of the check and the meaning of the files beside the logs; a log itself is checked by
`mansio.storage.inspection`.

Invariants:
* The lock of the directory is held throughout.
* Without `repair` no file in it is changed (the metadata is read from a copy, because SQLite cannot read a write-ahead
  log without modifying files). With it, only files that can be derived from others are.
* What cannot be read is reported, and everything else is checked all the same.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

from mansio.broker.coordinator.checkpoint import decode_checkpoint
from mansio.broker.coordinator.share.share_coordinator import BOOT_ID_FILE_NAME
from mansio.broker.maintenance.data_dir_mode import CLUSTERED
from mansio.broker.maintenance.orphaned_directories import FILE as SEEN_NAME
from mansio.broker.maintenance.orphaned_directories import QUARANTINED, REMOVED
from mansio.broker.partition.partition_files import topic_directory
from mansio.config import topic_config
from mansio.errors import CorruptLog, MansioError, StorageError
from mansio.host.asyncio_loop import AsyncioScheduler
from mansio.host.atomic_file import TEMPORARY_SUFFIX
from mansio.host.clock import HostRandom
from mansio.host.threads import BackgroundThread
from mansio.metadata.image import MetadataImage
from mansio.metadata.sqlite.format import verify_store
from mansio.metadata.sqlite.store import SqliteStore
from mansio.state.producers import ProducerTable
from mansio.storage.inspection import (
    INDEX_INTERVAL_BYTES,
    Finding,
    LogReport,
    Severity,
    inspect_log,
    log_size_bytes,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from mansio.metadata.model import Topic
    from mansio.ports import Disk

METADATA_NAME: Final = "metadata.sqlite3"
METADATA_SUFFIXES: Final = ("", "-wal", "-shm", "-journal", ".revision")
TOP_NAMES: Final = frozenset(
    {
        "lock",
        "topics",
        "views",
        CLUSTERED,
        SEEN_NAME,
        "hosted-partitions",
        "etcd",
        BOOT_ID_FILE_NAME,
        f"{BOOT_ID_FILE_NAME}.new",
    }
    | {METADATA_NAME + suffix for suffix in METADATA_SUFFIXES}
)
MOVED: Final = {
    REMOVED: ("directories of topics that were deleted", "the next start removes them"),
    QUARANTINED: ("directories of topics that the metadata did not know", "an operator has to check them"),
}
PRODUCERS_SUFFIX: Final = ".producers"
VIEW_SUFFIX: Final = ".checkpoint"
DAY_MS: Final = 24 * 3600 * 1000


class PartitionReport(NamedTuple):
    """One partition and the findings in its log."""

    topic: str
    partition: int
    log: LogReport


@dataclass(slots=True)
class DataCheckReport:
    """All findings. `findings` concern the directory itself; those of logs are in `partitions`."""

    data_dir: str
    findings: list[Finding] = field(default_factory=list)
    partitions: list[PartitionReport] = field(default_factory=list)

    def each_finding(self) -> Iterator[Finding]:
        """All findings, the directory's first."""
        yield from self.findings
        for partition in self.partitions:
            yield from partition.log.findings

    @property
    def clean(self) -> bool:
        """Nothing is damaged, and nothing remains to be repaired."""
        return not any(
            partition.log.has_damage or partition.log.has_rebuilds for partition in self.partitions
        ) and all(
            finding.severity is Severity.NOTE or (finding.severity is Severity.REBUILD and finding.repaired)
            for finding in self.findings
        )


class PartitionLocation(NamedTuple):
    """The directory in which a partition should be."""

    topic: str
    partition: int
    directory: str
    index_interval_bytes: int


class Progress(NamedTuple):
    """Callbacks for progress: the number of bytes to read, once, and each number of bytes read."""

    total: Callable[[int], object] = lambda _: None
    read: Callable[[int], object] = lambda _: None


NO_PROGRESS: Final = Progress()


def check_data_directory(
    disk: Disk, data_dir: str, *, repair: bool = False, progress: Progress = NO_PROGRESS
) -> DataCheckReport:
    """Check everything in `data_dir`.

    Raises `DataDirectoryLocked` while a broker uses it, `StorageError` if it is not a data directory.
    """
    data_dir = data_dir.rstrip("/") or "/"
    if not disk.exists(f"{data_dir}/{METADATA_NAME}") and not disk.exists(f"{data_dir}/topics"):
        raise StorageError(f"{data_dir} is no data directory: it has neither {METADATA_NAME} nor topics")
    lock = disk.lock(f"{data_dir}/lock")
    try:
        return _Examination(disk, data_dir, repair, progress).run()
    finally:
        lock.release()


class _Examination:
    """One run."""

    def __init__(self, disk: Disk, data_dir: str, repair: bool, progress: Progress) -> None:
        self.disk = disk
        self.data_dir = data_dir
        self.repair = repair
        self.progress = progress
        self.report = DataCheckReport(data_dir)

    def run(self) -> DataCheckReport:
        topics = self._metadata()
        locations = self._locations(topics)
        self.progress.total(sum(self._bytes(location) for location in locations))
        for location in locations:
            self._partition(location)
        self._views()
        self._unknown_files()
        return self.report

    def _add(self, severity: Severity, path: str, what: str, meaning: str, repaired: str = "") -> None:
        self.report.findings.append(Finding(severity, path, what, meaning, repaired=repaired))

    # Metadata

    def _metadata(self) -> list[Topic] | None:
        """The topics; None if the metadata cannot be read."""
        path = f"{self.data_dir}/{METADATA_NAME}"
        mark = f"{self.data_dir}/{CLUSTERED}"
        if self.disk.exists(mark) and not self.disk.exists(path):
            meaning = "topics are taken from the names of directories here"
            self._add(Severity.NOTE, mark, "one of a cluster, whose metadata are in etcd", meaning)
            return None
        with tempfile.TemporaryDirectory(prefix="mansio-data-check-") as directory:
            copy = f"{directory}/{METADATA_NAME}"
            for suffix in METADATA_SUFFIXES:
                if suffix != "-shm" and os.path.exists(path + suffix):
                    shutil.copyfile(path + suffix, copy + suffix)
            problems = verify_store(copy)
            for problem in problems:
                self._add(
                    Severity.DAMAGE,
                    path,
                    problem.replace(f"metadata {copy} ", "").replace("is damaged: ", ""),
                    "the broker does not start; topics are taken from the names of directories here",
                )
            if problems:
                return None
            try:
                return asyncio.run(_read_topics(copy))
            except MansioError as error:
                self._add(Severity.DAMAGE, path, error.message, "the broker does not start")
                return None

    # Partitions

    def _locations(self, topics: list[Topic] | None) -> list[PartitionLocation]:
        root = f"{self.data_dir}/topics"
        names = self.disk.list_directory(root) if self.disk.exists(root) else []
        if topics is None:
            return [location for name in names for location in self._guessed(f"{root}/{name}", name)]
        locations = []
        known = set()
        for topic in topics:
            directory = topic_directory(self.data_dir, topic)
            known.add(directory.rpartition("/")[2])
            settings = topic_config.resolve_topic_settings(topic.configs, {}, topic.replication_factor)
            if topic.state != "live":
                self._add(
                    Severity.NOTE,
                    directory,
                    f"the topic {topic.name} is {topic.state}",
                    "the next start deletes it",
                )
                continue
            locations += [
                PartitionLocation(topic.name, index, f"{directory}/{index}", settings.index_interval_bytes)
                for index in range(len(topic.partitions))
            ]
        for name in names:
            if name not in known:
                self._add(
                    Severity.NOTE,
                    f"{root}/{name}",
                    "belongs to no topic that the metadata knows",
                    "the broker ignores it; it only uses space",
                )
        return locations

    def _guessed(self, directory: str, name: str) -> list[PartitionLocation]:
        topic = name.rpartition(".")[0] or name
        indexes = [int(entry) for entry in self.disk.list_directory(directory) if entry.isdigit()]
        return [
            PartitionLocation(topic, index, f"{directory}/{index}", INDEX_INTERVAL_BYTES)
            for index in sorted(indexes)
        ]

    def _bytes(self, location: PartitionLocation) -> int:
        try:
            return log_size_bytes(self.disk, location.directory)
        except OSError:  # reported when the partition is checked
            return 0

    def _partition(self, location: PartitionLocation) -> None:
        if not self.disk.exists(location.directory):
            self._add(
                Severity.DAMAGE,
                location.directory,
                f"partition {location.topic}-{location.partition} has no directory",
                "all its records are lost, and it is not opened",
            )
            return
        try:
            report = inspect_log(
                self.disk,
                location.directory,
                repair=self.repair,
                index_interval_bytes=location.index_interval_bytes,
                on_bytes=self.progress.read,
            )
        except OSError as error:
            self._add(
                Severity.DAMAGE,
                location.directory,
                f"cannot be read: {error}",
                "the partition fails when it is read",
            )
            return
        for name in report.other_names:
            self._other_file(report, name)
        self.report.partitions.append(PartitionReport(location.topic, location.partition, report))

    def _other_file(self, report: LogReport, name: str) -> None:
        """Check a file in a partition's directory that is not part of the log."""
        path = f"{report.directory}/{name}"
        if name.endswith(PRODUCERS_SUFFIX):
            try:
                ProducerTable.from_bytes(self.disk.read_file(path), expiration_ms=DAY_MS)
            except CorruptLog as error:
                report.add(
                    Finding(
                        Severity.REBUILD,
                        path,
                        f"a snapshot of producers: {error.message}",
                        "an older one or the log itself is read instead",
                        repaired=self._remove(path),
                    )
                )
        elif name.endswith(TEMPORARY_SUFFIX):
            report.add(Finding(Severity.NOTE, path, "an unfinished temporary file", "it is not read"))
        else:
            report.add(Finding(Severity.NOTE, path, "no file of the broker's", "it is left alone"))

    def _remove(self, path: str) -> str:
        """Remove a file that only saves time, if files are repaired; returns what was done."""
        if not self.repair:
            return ""
        self.disk.remove(path)
        self.disk.sync_directory(path.rpartition("/")[0])
        return "removed"

    # Views and unknown files

    def _views(self) -> None:
        root = f"{self.data_dir}/views"
        for name in self.disk.list_directory(root) if self.disk.exists(root) else []:
            path = f"{root}/{name}"
            if name.endswith(VIEW_SUFFIX):
                try:
                    decode_checkpoint(self.disk.read_file(path))
                except (CorruptLog, OSError) as error:
                    repaired = self._remove(path)
                    self._add(
                        Severity.REBUILD, path, str(error), "the next start reads the log instead", repaired
                    )
            elif name.endswith(TEMPORARY_SUFFIX):
                self._add(Severity.NOTE, path, "an unfinished temporary file", "it is not read")
            else:
                self._add(Severity.NOTE, path, "no file of the broker's", "it is left alone")

    def _unknown_files(self) -> None:
        for name in self.disk.list_directory(self.data_dir):
            if name not in TOP_NAMES:
                what, meaning = MOVED.get(name, ("no file of the broker's", "it is left alone"))
                self._add(Severity.NOTE, f"{self.data_dir}/{name}", what, meaning)


async def _read_topics(path: str) -> list[Topic]:
    """All topics of a metadata file, unfinished ones included."""
    scheduler = AsyncioScheduler(asyncio.get_running_loop())
    background = BackgroundThread(scheduler.call_from_thread, name="mansio-data-check")
    try:
        store = SqliteStore.open(path, background, scheduler.promise)
        try:
            state = await MetadataImage.load(store, "", HostRandom())
            return [*state.topics.values(), *state.unfinished_topics.values()]
        finally:
            await store.close()
    finally:
        background.close()
