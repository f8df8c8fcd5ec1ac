"""The work of one log that may block: plain values, taken on the loop, run on another thread.

Always true: nothing here touches a `Log`. `SyncWork.run` does things in the only order that is right: old segments,
the names in the directory, the leader epochs, then the newest segment; whatever end it was prepared for is durable when
it returns. `Chores.run` writes a checkpoint of something already durable, and removes segments only after the
checkpoint says that they are not needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from mansio.log.checkpoint import CHECKPOINT_NAME, Checkpoint, write_checkpoint
from mansio.log.recovery import EPOCHS_NAME, remove_segment_files
from mansio.log.sealed import write_sealed

if TYPE_CHECKING:
    from mansio.log.index import SparseIndex
    from mansio.log.segment import Segment
    from mansio.ports import Disk, DiskFile


class SyncWork(NamedTuple):
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
        """Sync file by file. Raises `OSError`."""
        for file in self.closing:
            file.sync()
        if self.directory_dirty:
            disk.sync_directory(self.directory)
        self.write_epochs(disk, durable=True)
        self.active.sync()

    def write_epochs(self, disk: Disk, *, durable: bool) -> None:
        """Replace the epochs file, when there is news; unless `durable`, the caller syncs the file system next.

        A crash in between may leave a file that fails its checksum: recovery then reads the epochs from the batches.
        """
        if self.epochs is not None:
            write_sealed(disk, f"{self.directory}/{EPOCHS_NAME}", self.epochs, durable=durable)


class IndexDue(NamedTuple):
    """An index to be saved: of the first `covered_bytes` of `segment`, which end at `end_offset`.

    `closed`: the segment is; otherwise this is a snapshot of one that still grows.
    """

    segment: Segment
    sparse: SparseIndex
    end_offset: int
    covered_bytes: int
    closed: bool


class Chores(NamedTuple):
    """What follows durability: none of it is needed for an answer, all of it makes the next opening quick."""

    directory: str
    checkpoint: Checkpoint
    indexes: tuple[IndexDue, ...]
    garbage: tuple[Segment, ...]

    @property
    def checkpoint_path(self) -> str:
        """The file of the checkpoint."""
        return f"{self.directory}/{CHECKPOINT_NAME}"

    def run(self, disk: Disk) -> None:
        """Do all of it. Raises `OSError`."""
        self.write(disk, sync=True)
        self.remove(disk)

    def write(self, disk: Disk, *, sync: bool) -> None:
        """Index files and checkpoint; without `sync` the caller syncs the file system before `remove`."""
        for due in self.indexes:
            data = due.sparse.encode(due.segment.base_offset, due.end_offset, due.covered_bytes)
            write_sealed(disk, due.segment.index_path, data, durable=False)
        write_checkpoint(disk, self.checkpoint_path, self.checkpoint, sync=sync)

    def remove(self, disk: Disk) -> None:
        """Remove the trimmed segments; the checkpoint must be durable."""
        for segment in self.garbage:
            remove_segment_files(disk, segment)
