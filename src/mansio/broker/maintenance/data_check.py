"""Check of a data directory that no broker uses (like fsck): metadata, partitions, views and unknown files.

Owns the order of the checks and the knowledge of all files that do not belong to a log; a log is checked by
`mansio.storage.inspection`.

Invariants:
* The lock of the directory is held during the whole check.
* Without `repair` no file in it is changed (the metadata is read from a copy, because SQLite cannot read a write-ahead
  log without modifying files). With it, only files that can be derived from others are.
* A file that cannot be read is reported, and all other files are checked.
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
from mansio.broker.maintenance.data_dir_format import (
    FORMAT_FILE_NAME,
    FORMAT_FILE_NAMES,
    read_data_dir_format,
)
from mansio.broker.maintenance.data_dir_mode import (
    CLUSTER_FILE_NAME,
    MOVED_FILE_NAME,
    PROCESSES_FILE_NAME,
    SUPERVISOR_LOCK_FILE,
)
from mansio.broker.maintenance.orphaned_directories import (
    LAST_METADATA_FILE_NAME,
    QUARANTINE_DIRECTORY,
    REMOVED_DIRECTORY,
)
from mansio.broker.partition.partition_files import topic_directory
from mansio.broker.partition.producer_hook import decode_producer_state
from mansio.config import topic_config
from mansio.errors import CorruptLog, MansioError, StorageError
from mansio.host.asyncio_loop import AsyncioScheduler
from mansio.host.atomic_file import TEMPORARY_SUFFIX
from mansio.host.clock import HostRandom
from mansio.host.threads import BackgroundThread
from mansio.metadata.image import MetadataImage
from mansio.metadata.sqlite.format import verify_store
from mansio.metadata.sqlite.store import SqliteStore
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

METADATA_FILE_NAME: Final = "metadata.sqlite3"
METADATA_FILE_SUFFIXES: Final = ("", "-wal", "-shm", "-journal", ".revision")
TOP_LEVEL_NAMES: Final = frozenset(
    {
        "lock",
        "topics",
        "views",
        CLUSTER_FILE_NAME,
        MOVED_FILE_NAME,
        PROCESSES_FILE_NAME,
        SUPERVISOR_LOCK_FILE,
        LAST_METADATA_FILE_NAME,
        "hosted-partitions",
        "etcd",
        BOOT_ID_FILE_NAME,
        f"{BOOT_ID_FILE_NAME}.new",
    }
    | {METADATA_FILE_NAME + suffix for suffix in METADATA_FILE_SUFFIXES}
    | FORMAT_FILE_NAMES
)
MOVED_DIRECTORIES: Final = {
    REMOVED_DIRECTORY: ("directories of topics that were deleted", "the next start removes them"),
    QUARANTINE_DIRECTORY: (
        "directories of topics that the metadata did not know",
        "an operator has to check them",
    ),
}
PRODUCER_SNAPSHOT_SUFFIX: Final = ".producers"
CHECKPOINT_SUFFIX: Final = ".checkpoint"
PRODUCER_EXPIRATION_MS: Final = 24 * 3600 * 1000


class PartitionReport(NamedTuple):
    """One partition and the report about its log."""

    topic: str
    partition: int
    log: LogReport


@dataclass(slots=True)
class DataCheckReport:
    """Result of a check. `findings`: all findings except those in logs; `partitions`: one report per partition."""

    data_dir: str
    findings: list[Finding] = field(default_factory=list)
    partitions: list[PartitionReport] = field(default_factory=list)

    def all_findings(self) -> Iterator[Finding]:
        """Yield all findings, those in logs last."""
        yield from self.findings
        for partition in self.partitions:
            yield from partition.log.findings

    @property
    def is_clean(self) -> bool:
        """Whether no file is damaged and no file remains to be repaired."""
        return not any(
            partition.log.has_damage or partition.log.needs_rebuild for partition in self.partitions
        ) and all(
            finding.severity is Severity.NOTE or (finding.severity is Severity.REBUILD and finding.repaired)
            for finding in self.findings
        )


class PartitionLocation(NamedTuple):
    """A partition, the directory that must contain its log, and the interval of its offset index."""

    topic: str
    partition: int
    directory: str
    index_interval_bytes: int


class ProgressCallbacks(NamedTuple):
    """Callbacks that report progress.

    `on_total_bytes` is called once with the number of bytes to read, `on_read_bytes` repeatedly with the number of
    bytes read since the last call.
    """

    on_total_bytes: Callable[[int], object] = lambda _: None
    on_read_bytes: Callable[[int], object] = lambda _: None


NO_PROGRESS: Final = ProgressCallbacks()


def check_data_directory(
    disk: Disk, data_dir: str, *, repair: bool = False, progress: ProgressCallbacks = NO_PROGRESS
) -> DataCheckReport:
    """Check all files in `data_dir`; with `repair`, also remove or rebuild files that can be derived from others.

    Raises `DataDirectoryLocked` while a broker uses it, `StorageError` if it is not a data directory or has a newer
    format.
    """
    data_dir = data_dir.rstrip("/") or "/"
    used = (METADATA_FILE_NAME, CLUSTER_FILE_NAME, "topics")
    if not any(disk.exists(f"{data_dir}/{name}") for name in used):
        if disk.exists(f"{data_dir}/{PROCESSES_FILE_NAME}"):
            raise StorageError(
                f"{data_dir} is the directory of several broker processes: check theirs, {data_dir}/0 and so on"
            )
        raise StorageError(
            f"{data_dir} is not a data directory: it has neither {METADATA_FILE_NAME} nor topics"
        )
    data_format = read_data_dir_format(disk, data_dir)
    lock = disk.lock(f"{data_dir}/lock")
    try:
        return _DataCheck(disk, data_dir, repair, progress).run(data_format)
    finally:
        lock.release()


class _DataCheck:
    """One check of a data directory."""

    def __init__(self, disk: Disk, data_dir: str, repair: bool, progress: ProgressCallbacks) -> None:
        self.disk = disk
        self.data_dir = data_dir
        self.repair = repair
        self.progress = progress
        self.report = DataCheckReport(data_dir)

    def run(self, data_format: int | None) -> DataCheckReport:
        if data_format == 0:
            path = f"{self.data_dir}/{FORMAT_FILE_NAME}"
            self._add(
                Severity.DAMAGE,
                path,
                "it is not a format marker",
                "the broker does not start; remove the file if no newer version was started here",
            )
        topics = self._check_metadata()
        locations = self._find_partitions(topics)
        self.progress.on_total_bytes(sum(self._log_size_bytes(location) for location in locations))
        for location in locations:
            self._check_partition(location)
        self._check_views()
        self._report_unknown_files()
        return self.report

    def _add(self, severity: Severity, path: str, finding: str, meaning: str, repaired: str = "") -> None:
        self.report.findings.append(Finding(severity, path, finding, meaning, repaired=repaired))

    # Metadata

    def _check_metadata(self) -> list[Topic] | None:
        """Check the metadata; return its topics, None if the metadata cannot be read."""
        path = f"{self.data_dir}/{METADATA_FILE_NAME}"
        cluster_file = f"{self.data_dir}/{CLUSTER_FILE_NAME}"
        moved_file = f"{self.data_dir}/{MOVED_FILE_NAME}"
        meaning = "the check takes topics from directory names"
        if self.disk.exists(moved_file):
            what = f"the metadata was moved to etcd; {METADATA_FILE_NAME} is not used any more"
            self._add(Severity.NOTE, moved_file, what, meaning)
            return None
        if self.disk.exists(cluster_file) and not self.disk.exists(path):
            self._add(
                Severity.NOTE,
                cluster_file,
                "the data directory of a cluster's broker; the metadata is in etcd",
                meaning,
            )
            return None
        with tempfile.TemporaryDirectory(prefix="mansio-data-check-") as directory:
            copy = f"{directory}/{METADATA_FILE_NAME}"
            for suffix in METADATA_FILE_SUFFIXES:
                if suffix != "-shm" and os.path.exists(path + suffix):
                    shutil.copyfile(path + suffix, copy + suffix)
            problems = verify_store(copy)
            for problem in problems:
                self._add(
                    Severity.DAMAGE,
                    path,
                    problem.replace(f"metadata {copy} ", "").replace("is damaged: ", ""),
                    "the broker does not start; the check takes topics from directory names",
                )
            if problems:
                return None
            try:
                return asyncio.run(_read_topics(copy))
            except MansioError as error:
                self._add(Severity.DAMAGE, path, error.message, "the broker does not start")
                return None

    # Partitions

    def _find_partitions(self, topics: list[Topic] | None) -> list[PartitionLocation]:
        root = f"{self.data_dir}/topics"
        names = self.disk.list_directory(root) if self.disk.exists(root) else []
        if topics is None:
            return [
                location
                for name in names
                for location in self._find_by_directory_name(f"{root}/{name}", name)
            ]
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

    def _find_by_directory_name(self, directory: str, name: str) -> list[PartitionLocation]:
        topic = name.rpartition(".")[0] or name
        indexes = [int(entry) for entry in self.disk.list_directory(directory) if entry.isdigit()]
        return [
            PartitionLocation(topic, index, f"{directory}/{index}", INDEX_INTERVAL_BYTES)
            for index in sorted(indexes)
        ]

    def _log_size_bytes(self, location: PartitionLocation) -> int:
        try:
            return log_size_bytes(self.disk, location.directory)
        except OSError:  # reported when the partition is checked
            return 0

    def _check_partition(self, location: PartitionLocation) -> None:
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
                on_bytes=self.progress.on_read_bytes,
            )
        except OSError as error:
            self._add(
                Severity.DAMAGE,
                location.directory,
                f"cannot be read: {error}",
                "the partition fails when it is read",
            )
            return
        for name in report.other_file_names:
            self._check_other_file(report, name)
        self.report.partitions.append(PartitionReport(location.topic, location.partition, report))

    def _check_other_file(self, report: LogReport, name: str) -> None:
        """Check a file in a partition's directory that is not part of the log."""
        path = f"{report.directory}/{name}"
        if name.endswith(PRODUCER_SNAPSHOT_SUFFIX):
            try:
                decode_producer_state(self.disk.read_file(path), expiration_ms=PRODUCER_EXPIRATION_MS)
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
            report.add(Finding(Severity.NOTE, path, "not a file of the broker", "the broker ignores it"))

    def _remove(self, path: str) -> str:
        """Remove a file that only shortens the next start, if `repair` is set. Returns "removed", or "" otherwise."""
        if not self.repair:
            return ""
        self.disk.remove(path)
        self.disk.sync_directory(path.rpartition("/")[0])
        return "removed"

    # Views and unknown files

    def _check_views(self) -> None:
        root = f"{self.data_dir}/views"
        for name in self.disk.list_directory(root) if self.disk.exists(root) else []:
            path = f"{root}/{name}"
            if name.endswith(CHECKPOINT_SUFFIX):
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
                self._add(Severity.NOTE, path, "not a file of the broker", "the broker ignores it")

    def _report_unknown_files(self) -> None:
        has_processes = self.disk.exists(f"{self.data_dir}/{PROCESSES_FILE_NAME}")
        for name in self.disk.list_directory(self.data_dir):
            if has_processes and name.isdigit():
                path = f"{self.data_dir}/{name}"
                self._add(
                    Severity.NOTE,
                    path,
                    "the data directory of another broker process",
                    "it is checked by itself",
                )
            elif name not in TOP_LEVEL_NAMES:
                what, meaning = MOVED_DIRECTORIES.get(
                    name, ("not a file of the broker", "the broker ignores it")
                )
                self._add(Severity.NOTE, f"{self.data_dir}/{name}", what, meaning)


async def _read_topics(path: str) -> list[Topic]:
    """Return all topics in a metadata file, also those whose creation or deletion is not finished."""
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
