"""Blocking work of one log: plain values, taken on the loop and run on another thread.

Invariants:
* Nothing here touches a `Log`.
* `FlushJob.run` syncs in the only correct order: the leader epochs, closed segments, the names in the directory, then
  the active segment. The end offset it was prepared for is durable when it returns.
* `MaintenanceJob.run` writes a checkpoint of an end that is already durable, removes segments only after the checkpoint
  no longer needs them, and only then writes what takes new space: a full disk must not keep trimmed segments.

A full disk (`LogDiskFull`) is no failure where nothing can be lost by it, that is wherever the next attempt writes the
whole file again. It is a failure (`OSError`) when the sync of records reports it: the kernel may have dropped them.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from mansio.errors import StorageError
from mansio.ports import DISK_FULL_ERRNOS
from mansio.storage.checkpoint import CHECKPOINT_NAME, Checkpoint, write_checkpoint
from mansio.storage.checksummed_file import write_checksummed
from mansio.storage.leader_epochs import EPOCHS_NAME
from mansio.storage.segment import remove_segment_files
from mansio.storage.segment_timestamps import TIMESTAMPS_NAME, encode_segment_timestamps

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from mansio.ports import Disk, DiskFile
    from mansio.storage.index import SparseIndex
    from mansio.storage.segment import Segment
    from mansio.storage.segment_timestamps import SegmentTimestamp


class LogDiskFull(StorageError):
    """The disk is full and nothing was lost by it: the work can be done later. `checkpointed`: that part is done."""

    def __init__(self, message: str, *, checkpointed: bool = False) -> None:
        super().__init__(message)
        self.checkpointed = checkpointed


@contextmanager
def translate_disk_full(what: str, *, checkpointed: bool = False) -> Iterator[None]:
    """Raise `LogDiskFull` for a full disk inside the block; other errors pass unchanged."""
    try:
        yield
    except OSError as error:
        if error.errno not in DISK_FULL_ERRNOS:
            raise
        raise LogDiskFull(f"no space for {what}: {error}", checkpointed=checkpointed) from error


class FlushJob(NamedTuple):
    """Makes one log durable up to `end_offset`, which is at `position` of `segment`."""

    directory: str
    closing: tuple[DiskFile, ...]
    active: DiskFile
    directory_dirty: bool
    epochs: bytes | None
    generation: int
    segment: Segment
    position: int
    end_offset: int
    closing_count: int

    @property
    def file_count(self) -> int:
        """Number of syncs this takes, one by one."""
        return len(self.closing) + 1 + self.directory_dirty

    def run(self, disk: Disk) -> None:
        """Sync file by file. Raises `OSError`; `LogDiskFull` when nothing was synced yet."""
        self.write_epochs(disk, durable=True)
        self.sync(disk)

    def sync(self, disk: Disk) -> None:
        """Sync file by file, except the epochs. Raises `OSError`."""
        for file in self.closing:
            file.sync()
        if self.directory_dirty:
            disk.sync_directory(self.directory)
        self.active.sync()

    def write_epochs(self, disk: Disk, *, durable: bool) -> None:
        """Replace the epochs file if there are new epochs; unless `durable`, the caller syncs the file system next.

        A crash in between may leave a file that fails its checksum: recovery then reads the epochs from the batches. A
        file that is ahead of the batches does no harm: recovery uses it only below the checkpoint.
        """
        if self.epochs is None:
            return
        with translate_disk_full(f"the leader epochs of {self.directory}"):
            write_checksummed(disk, f"{self.directory}/{EPOCHS_NAME}", self.epochs, durable=durable)


class IndexDue(NamedTuple):
    """An index to be saved: of the first `covered_bytes` of `segment`, which end at `end_offset`.

    `closed`: the segment is closed; otherwise this is a snapshot of the index of a segment that still grows.
    """

    segment: Segment
    sparse: SparseIndex
    end_offset: int
    covered_bytes: int
    closed: bool


class MaintenanceJob(NamedTuple):
    """Work that follows a sync: no response depends on it, all of it makes the next recovery fast."""

    directory: str
    checkpoint: Checkpoint
    indexes: tuple[IndexDue, ...]
    garbage: tuple[Segment, ...]
    timestamps: tuple[SegmentTimestamp, ...] | None
    generation: int
    previous: Checkpoint
    index_saved_bytes: int

    @property
    def checkpoint_path(self) -> str:
        """Path of the checkpoint file."""
        return f"{self.directory}/{CHECKPOINT_NAME}"

    def run(self, disk: Disk) -> None:
        """Do all of it. Raises `OSError`, `LogDiskFull`."""
        self.write_checkpoint(disk, sync=True)
        self.follow(disk)

    def write_checkpoint(self, disk: Disk, *, sync: bool) -> None:
        """Write the checkpoint; without `sync` the caller syncs the file system before `follow`."""
        with translate_disk_full(f"the checkpoint of {self.directory}"):
            write_checkpoint(disk, self.checkpoint_path, self.checkpoint, sync=sync)

    def follow(self, disk: Disk) -> None:
        """Do what requires a durable checkpoint: remove trimmed segments; then save indexes and timestamps."""
        trimmed = bool(self.garbage) or self.checkpoint.start_offset > self.previous.start_offset
        if not trimmed and not self.indexes and self.timestamps is None:
            return
        with translate_disk_full(f"the maintenance of {self.directory}", checkpointed=True):
            if trimmed:
                # If one slot were damaged, the other would bring back trimmed records, or require removed segments.
                older = self.checkpoint._replace(sequence=self.checkpoint.sequence - 1)
                write_checkpoint(disk, self.checkpoint_path, older)
            for segment in self.garbage:
                remove_segment_files(disk, segment)
            for due in self.indexes:
                data = due.sparse.encode(due.segment.base_offset, due.end_offset, due.covered_bytes)
                write_checksummed(disk, due.segment.index_path, data, durable=False)
            if self.timestamps is not None:
                path = f"{self.directory}/{TIMESTAMPS_NAME}"
                write_checksummed(disk, path, encode_segment_timestamps(self.timestamps), durable=False)


def run_maintenance(
    disk: Disk, jobs: Sequence[MaintenanceJob], sync_all: Callable[[], bool] | None
) -> list[OSError | LogDiskFull | None]:
    """Run the maintenance of several logs; returns the error of each, in their order.

    With `sync_all` (see `Disk.sync_all`) all checkpoints become durable with one sync; without it each by itself.
    """
    failed: list[OSError | LogDiskFull | None] = [None] * len(jobs)
    for number, job in enumerate(jobs):
        try:
            job.write_checkpoint(disk, sync=sync_all is None)
        except (OSError, LogDiskFull) as error:
            failed[number] = error
    written = [job for number, job in enumerate(jobs) if failed[number] is None]
    if sync_all is not None and written:
        try:
            with translate_disk_full("checkpoints"):
                if not sync_all():
                    for job in written:
                        disk.open(job.checkpoint_path).sync()
        except (OSError, LogDiskFull) as error:
            return [error if one is None else one for one in failed]
    for number, job in enumerate(jobs):
        if failed[number] is None:
            try:
                job.follow(disk)
            except (OSError, LogDiskFull) as error:
                failed[number] = error
    return failed
