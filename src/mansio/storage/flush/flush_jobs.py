"""The work of one log that may block: plain values, taken on the loop, run on another thread.

Always true: nothing here touches a `Log`. `FlushJob.run` syncs in the only order that is right: the leader epochs, old
segments, the names in the directory, then the newest segment; whatever end it was prepared for is durable when it
returns. `MaintenanceJob.run` writes a checkpoint of something already durable, removes segments only after the
checkpoint says that they are not needed, and only then writes what takes new room: a full disk must not keep
trimmed segments.

A full disk (`LogDiskFull`) is no failure where nothing can be lost by it, that is wherever a file is written anew
by the next attempt. It is one (`OSError`) when it comes out of the sync of records: the kernel may have dropped them.
"""

from __future__ import annotations

import errno
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from mansio.errors import StorageError
from mansio.storage.checkpoint import CHECKPOINT_NAME, Checkpoint, write_checkpoint
from mansio.storage.checksummed_file import write_checksummed
from mansio.storage.recovery.recovery import EPOCHS_NAME, remove_segment_files
from mansio.storage.segment_timestamps import TIMESTAMPS_NAME, encode_segment_timestamps

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from mansio.ports import Disk, DiskFile
    from mansio.storage.index import SparseIndex
    from mansio.storage.segment import Segment
    from mansio.storage.segment_timestamps import SegmentTimestamp

NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})


class LogDiskFull(StorageError):
    """The disk is full and nothing was lost by it: the work can be done later. `checkpointed`: that part is done."""

    def __init__(self, message: str, *, checkpointed: bool = False) -> None:
        super().__init__(message)
        self.checkpointed = checkpointed


@contextmanager
def translate_disk_full(what: str, *, checkpointed: bool = False) -> Iterator[None]:
    """A full disk in here is `LogDiskFull`; other errors go on as they are."""
    try:
        yield
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        raise LogDiskFull(f"no room for {what}: {error}", checkpointed=checkpointed) from error


class FlushJob(NamedTuple):
    """Make one log durable up to `end_offset`, which is at `position` of `segment`."""

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
        """How many syncs this takes, one by one."""
        return len(self.closing) + 1 + self.directory_dirty

    def run(self, disk: Disk) -> None:
        """Sync file by file. Raises `OSError`; `LogDiskFull` when nothing was synced yet."""
        self.write_epochs(disk, durable=True)
        self.sync(disk)

    def sync(self, disk: Disk) -> None:
        """Sync file by file, but for the epochs. Raises `OSError`."""
        for file in self.closing:
            file.sync()
        if self.directory_dirty:
            disk.sync_directory(self.directory)
        self.active.sync()

    def write_epochs(self, disk: Disk, *, durable: bool) -> None:
        """Replace the epochs file, when there is news; unless `durable`, the caller syncs the file system next.

        A crash in between may leave a file that fails its checksum: recovery then reads the epochs from the batches.
        One that is ahead of the batches does no harm: recovery believes it only below the checkpoint.
        """
        if self.epochs is None:
            return
        with translate_disk_full(f"the leader epochs of {self.directory}"):
            write_checksummed(disk, f"{self.directory}/{EPOCHS_NAME}", self.epochs, durable=durable)


class IndexDue(NamedTuple):
    """An index to be saved: of the first `covered_bytes` of `segment`, which end at `end_offset`.

    `closed`: the segment is; otherwise this is a snapshot of one that still grows.
    """

    segment: Segment
    sparse: SparseIndex
    end_offset: int
    covered_bytes: int
    closed: bool


class MaintenanceJob(NamedTuple):
    """What follows durability: none of it is needed for an answer, all of it makes the next opening quick."""

    directory: str
    checkpoint: Checkpoint
    indexes: tuple[IndexDue, ...]
    garbage: tuple[Segment, ...]
    times: tuple[SegmentTimestamp, ...] | None
    generation: int
    previous: Checkpoint
    index_saved_bytes: int

    @property
    def checkpoint_path(self) -> str:
        """The file of the checkpoint."""
        return f"{self.directory}/{CHECKPOINT_NAME}"

    def run(self, disk: Disk) -> None:
        """Do all of it. Raises `OSError`, `LogDiskFull`."""
        self.write_checkpoint(disk, sync=True)
        self.follow(disk)

    def write_checkpoint(self, disk: Disk, *, sync: bool) -> None:
        """Write the checkpoint; without `sync` the caller syncs the file system before `follow`."""
        try:
            write_checkpoint(disk, self.checkpoint_path, self.checkpoint, sync=sync)
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            raise LogDiskFull(f"no room for the checkpoint of {self.directory}: {error}") from error

    def follow(self, disk: Disk) -> None:
        """What the checkpoint, which must be durable, allows: remove trimmed segments; then save indexes and times."""
        trimmed = bool(self.garbage) or self.checkpoint.start_offset > self.previous.start_offset
        if not trimmed and not self.indexes and self.times is None:
            return
        with translate_disk_full(f"the housekeeping of {self.directory}", checkpointed=True):
            if trimmed:
                # Were one slot damaged, the other would bring back what was trimmed, or ask for segments that are gone.
                older = self.checkpoint._replace(sequence=self.checkpoint.sequence - 1)
                write_checkpoint(disk, self.checkpoint_path, older)
            for segment in self.garbage:
                remove_segment_files(disk, segment)
            for due in self.indexes:
                data = due.sparse.encode(due.segment.base_offset, due.end_offset, due.covered_bytes)
                write_checksummed(disk, due.segment.index_path, data, durable=False)
            if self.times is not None:
                path = f"{self.directory}/{TIMESTAMPS_NAME}"
                write_checksummed(disk, path, encode_segment_timestamps(self.times), durable=False)


def run_maintenance(
    disk: Disk, works: Sequence[MaintenanceJob], sync_all: Callable[[], bool] | None
) -> list[OSError | LogDiskFull | None]:
    """Do the housekeeping of several logs; for each, in their order, what it failed with.

    With `sync_all` (see `Disk.sync_all`) all checkpoints become durable at once; without it each by itself.
    """
    failed: list[OSError | LogDiskFull | None] = [None] * len(works)
    for number, work in enumerate(works):
        try:
            work.write_checkpoint(disk, sync=sync_all is None)
        except (OSError, LogDiskFull) as error:
            failed[number] = error
    written = [work for number, work in enumerate(works) if failed[number] is None]
    if sync_all is not None and written:
        try:
            with translate_disk_full("checkpoints"):
                if not sync_all():
                    for work in written:
                        disk.open(work.checkpoint_path).sync()
        except (OSError, LogDiskFull) as error:
            return [error if one is None else one for one in failed]
    for number, work in enumerate(works):
        if failed[number] is None:
            try:
                work.follow(disk)
            except (OSError, LogDiskFull) as error:
                failed[number] = error
    return failed
