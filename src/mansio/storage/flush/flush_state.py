"""Flush state of one log (Kafka: recovery point): what is durable, and the jobs that make the rest durable.

`Log` reports what it did (a segment closed, segments trimmed, an epoch started); `FlushState` turns that into flush and
maintenance jobs, and records their results. The jobs are plain values, created on the loop and run on another thread;
they never touch a `Log`.

Invariants:
* `end_offset`, at `position` of `segment`, is durable, and so is everything before it.
* `FlushJob.run` syncs in the only correct order: the leader epochs, closed segments, the names in the directory, then
  the active segment. The end offset it was prepared for is durable when it returns.
* `MaintenanceJob.run` writes a checkpoint of an end that is already durable, removes segments only after the checkpoint
  no longer needs them, and only then writes what takes new space: a full disk must not keep trimmed segments.
* A job that fails ends the log's service, unless it failed on a full disk before anything could be lost: then it is due
  again (`retry_sync`, `retry_maintenance`). That is the case (`LogDiskFull`) wherever the next attempt writes the whole
  file again; a full disk reported by the sync of records is a failure (`OSError`), because the kernel may have dropped
  them.
* A job prepared before a truncation or the end of the log (another `generation`) has no effect any more.
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
from mansio.storage.segment_timestamps import (
    TIMESTAMPS_NAME,
    closed_segment_timestamps,
    encode_segment_timestamps,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from mansio.ports import Disk, DiskFile
    from mansio.storage.index import SparseIndex
    from mansio.storage.leader_epochs import LeaderEpochCache
    from mansio.storage.recovery.recovery import RecoveredLog
    from mansio.storage.segment import Segment
    from mansio.storage.segment_timestamps import SegmentTimestamp


class LogDiskFull(StorageError):
    """Raised when the disk is full, no data was lost, and the job can be repeated later.

    `checkpoint_written`: the checkpoint of the maintenance job had already been written.
    """

    def __init__(self, message: str, *, checkpoint_written: bool = False) -> None:
        super().__init__(message)
        self.checkpoint_written = checkpoint_written


@contextmanager
def translate_disk_full(what: str, *, checkpoint_written: bool = False) -> Iterator[None]:
    """Raise `LogDiskFull` for a full disk inside the block; other errors pass unchanged."""
    try:
        yield
    except OSError as error:
        if error.errno not in DISK_FULL_ERRNOS:
            raise
        raise LogDiskFull(f"no space for {what}: {error}", checkpoint_written=checkpoint_written) from error


class FlushJob(NamedTuple):
    """Makes one log durable up to `end_offset`, which is at `position` of `segment`."""

    directory: str
    closed_files: tuple[DiskFile, ...]
    active_file: DiskFile
    directory_dirty: bool
    epochs: bytes | None
    generation: int
    segment: Segment
    position: int
    end_offset: int
    closed_segment_count: int

    @property
    def file_count(self) -> int:
        """Number of syncs this takes, one by one."""
        return len(self.closed_files) + 1 + self.directory_dirty

    def run(self, disk: Disk) -> None:
        """Sync file by file. Raises `OSError`; `LogDiskFull` when nothing was synced yet."""
        self.write_epochs(disk, durable=True)
        self.sync(disk)

    def sync(self, disk: Disk) -> None:
        """Sync file by file, except the epochs. Raises `OSError`."""
        for file in self.closed_files:
            file.sync()
        if self.directory_dirty:
            disk.sync_directory(self.directory)
        self.active_file.sync()

    def write_epochs(self, disk: Disk, *, durable: bool) -> None:
        """Replace the epochs file if there are new epochs; unless `durable`, the caller syncs the file system next.

        A crash in between may leave a file that fails its checksum: recovery then reads the epochs from the batches. A
        file that is ahead of the batches does no harm: recovery uses it only below the checkpoint.
        """
        if self.epochs is None:
            return
        with translate_disk_full(f"the leader epochs of {self.directory}"):
            write_checksummed(disk, f"{self.directory}/{EPOCHS_NAME}", self.epochs, durable=durable)


class DueIndex(NamedTuple):
    """An index to be saved: of the first `covered_bytes` of `segment`, which end at `end_offset`.

    `closed`: the segment is closed; otherwise this is a snapshot of the index of a segment that still grows.
    """

    segment: Segment
    sparse_index: SparseIndex
    end_offset: int
    covered_bytes: int
    closed: bool


class MaintenanceJob(NamedTuple):
    """Work that follows a sync: no response depends on it, all of it makes the next recovery fast."""

    directory: str
    checkpoint: Checkpoint
    indexes: tuple[DueIndex, ...]
    trimmed_segments: tuple[Segment, ...]
    timestamps: tuple[SegmentTimestamp, ...] | None
    generation: int
    previous_checkpoint: Checkpoint
    index_saved_bytes: int

    @property
    def checkpoint_path(self) -> str:
        """Path of the checkpoint file."""
        return f"{self.directory}/{CHECKPOINT_NAME}"

    def run(self, disk: Disk) -> None:
        """Do all of it. Raises `OSError`, `LogDiskFull`."""
        self.write_checkpoint(disk, sync=True)
        self.run_after_checkpoint(disk)

    def write_checkpoint(self, disk: Disk, *, sync: bool) -> None:
        """Write the checkpoint; without `sync` the caller syncs the file system before `run_after_checkpoint`."""
        with translate_disk_full(f"the checkpoint of {self.directory}"):
            write_checkpoint(disk, self.checkpoint_path, self.checkpoint, sync=sync)

    def run_after_checkpoint(self, disk: Disk) -> None:
        """Do what requires a durable checkpoint: remove trimmed segments; then save indexes and timestamps."""
        trimmed = (
            bool(self.trimmed_segments)
            or self.checkpoint.start_offset > self.previous_checkpoint.start_offset
        )
        if not trimmed and not self.indexes and self.timestamps is None:
            return
        with translate_disk_full(f"the maintenance of {self.directory}", checkpoint_written=True):
            if trimmed:
                # If one slot were damaged, the other would bring back trimmed records, or require removed segments.
                older = self.checkpoint._replace(sequence=self.checkpoint.sequence - 1)
                write_checkpoint(disk, self.checkpoint_path, older)
            for segment in self.trimmed_segments:
                remove_segment_files(disk, segment)
            for due in self.indexes:
                data = due.sparse_index.encode(due.segment.base_offset, due.end_offset, due.covered_bytes)
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
                job.run_after_checkpoint(disk)
            except (OSError, LogDiskFull) as error:
                failed[number] = error
    return failed


class FlushState:
    """Flush state of one log: the log is durable up to `end_offset`, which is at byte `position` of `segment`.

    `checkpoint` is the last checkpoint that was prepared; `generation` counts truncations of the log. `epochs_dirty`:
    there are leader epochs that are not on disk. `needs_new_epoch`: a recovery truncated the log, and no leader epoch
    was started since.
    """

    __slots__ = (
        "_checkpoint_until_offset",
        "_closed",
        "_directory",
        "_directory_dirty",
        "_index_saved_at",
        "_indexes_due",
        "_slots",
        "_timestamps_due",
        "_trimmed_segments",
        "checkpoint",
        "end_offset",
        "epochs_dirty",
        "generation",
        "needs_new_epoch",
        "position",
        "segment",
    )

    def __init__(self, directory: str, recovered: RecoveredLog) -> None:
        self._directory = directory
        self.segment = recovered.segments[-1]
        self.position = self.segment.size
        self.end_offset = recovered.end_offset
        self.checkpoint = recovered.checkpoint
        self.generation = 0
        self.epochs_dirty = False
        self.needs_new_epoch = recovered.checkpoint.needs_new_epoch
        self._directory_dirty = recovered.created
        self._closed: list[Segment] = []  # not yet durable
        self._indexes_due = list(recovered.indexes_due)
        self._index_saved_at = recovered.index_saved_bytes
        self._trimmed_segments: list[Segment] = []
        self._timestamps_due = recovered.timestamps_due
        self._slots = (0, recovered.checkpoint.segment_base)
        self._checkpoint_until_offset = 0

    @property
    def lowest_checkpoint_base_offset(self) -> int:
        """Lowest segment that a checkpoint slot on disk may name; segments below it may change their size."""
        return min(self._slots)

    def request_checkpoints(self) -> None:
        """Request checkpoints (two) until `lowest_checkpoint_base_offset` is where the log is durable now."""
        self._checkpoint_until_offset = self.segment.base_offset

    @property
    def checkpoints_pending(self) -> bool:
        """Whether a requested checkpoint is still to be written."""
        return self.lowest_checkpoint_base_offset < self._checkpoint_until_offset

    def record_checkpoint(self, job: MaintenanceJob) -> None:
        """Record that the checkpoint of a job is on disk; the slot that was not written holds the previous one."""
        if job.generation == self.generation:
            self._slots = (self._slots[1], job.checkpoint.segment_base)

    def record_replaced_segments(self, old: Sequence[Segment], new: Segment) -> None:
        """Record that compaction replaced several segments by one."""
        self._indexes_due = [segment for segment in self._indexes_due if segment not in old]
        self._indexes_due.append(new)
        self._timestamps_due = True

    def record_closed_segment(self, segment: Segment) -> None:
        """Record that a segment was closed and a new file created."""
        self._closed.append(segment)
        self._indexes_due.append(segment)
        self._directory_dirty = True
        self._index_saved_at = 0

    def record_trimmed_segments(self, segments: list[Segment]) -> None:
        """Record that segments left the log; their files are removed once a checkpoint allows it."""
        self._trimmed_segments += segments
        self._indexes_due = [segment for segment in self._indexes_due if segment not in segments]

    def take_trimmed_segments(self) -> list[Segment]:
        """The trimmed segments whose files still exist; the caller removes them."""
        trimmed_segments, self._trimmed_segments = self._trimmed_segments, []
        return trimmed_segments

    def sync_closed_before(self, segment: Segment) -> None:
        """Sync the closed segments before one that a truncation makes the last. Blocks; raises `OSError`."""
        for closed in self._closed:
            if closed.base_offset < segment.base_offset and closed.file is not None:
                closed.file.sync()
                closed.file = None

    def record_truncation(self, segment: Segment, position: int, end_offset: int) -> None:
        """Record that the log ends there now, and that this is durable."""
        self.segment, self.position, self.end_offset = segment, position, end_offset
        self._closed.clear()
        self._indexes_due = [due for due in self._indexes_due if due.base_offset < segment.base_offset]
        self._directory_dirty = self.epochs_dirty = False
        self._index_saved_at = 0
        self._timestamps_due = True  # the truncation removed the file
        self._slots = (min(self._slots[0], segment.base_offset), min(self._slots[1], segment.base_offset))
        self._checkpoint_until_offset = 0

    def record_reset(self, segment: Segment) -> None:
        """Record that the log consists of this empty segment only, and that this is durable."""
        self.record_truncation(segment, 0, segment.base_offset)
        self._indexes_due.clear()

    def prepare_sync(self, active: Segment, epochs: LeaderEpochCache) -> FlushJob | None:
        """The job that makes the log durable up to the current end of its active segment; None when it is durable."""
        clean = not (self._closed or self.epochs_dirty or self._directory_dirty)
        if clean and active.end_offset == self.end_offset:
            return None
        job = FlushJob(
            directory=self._directory,
            closed_files=tuple(s.file for s in self._closed if s.file is not None) if self._closed else (),
            active_file=active.file,  # type: ignore[arg-type]  # an active segment holds its file
            directory_dirty=self._directory_dirty,
            epochs=epochs.encode() if self.epochs_dirty else None,
            generation=self.generation,
            segment=active,
            position=active.size,
            end_offset=active.end_offset,
            closed_segment_count=len(self._closed),
        )
        self._directory_dirty = self.epochs_dirty = False
        return job

    def record_sync(self, job: FlushJob) -> bool:
        """Record a successful sync. True when the durable end moved."""
        if job.generation != self.generation:
            return False
        for segment in self._closed[: job.closed_segment_count]:
            segment.file = None
        del self._closed[: job.closed_segment_count]
        self.segment, self.position = job.segment, job.position
        moved = job.end_offset > self.end_offset
        self.end_offset = job.end_offset
        return moved

    def retry_sync(self, job: FlushJob) -> None:
        """Record that a sync did nothing because the disk was full before it: all of it is due again."""
        if job.generation == self.generation:
            self._directory_dirty |= job.directory_dirty
            self.epochs_dirty |= job.epochs is not None

    @property
    def checkpoint_lag_bytes(self) -> int:
        """Durable bytes of the synced segment that the checkpoint does not cover yet."""
        if self.checkpoint.segment_base != self.segment.base_offset:
            return self.position
        return self.position - self.checkpoint.position

    def needs_maintenance(self, start_offset: int, active: Segment | None = None) -> bool:
        """Whether the checkpoint, indexes or timestamps on disk are older than the durable end of the log, or files of
        deleted segments are to be removed. With `active`, its index counts, too."""
        return (
            (active is not None and active.size != self._index_saved_at)
            or self.checkpoint.durable_end_offset != self.end_offset
            or self.checkpoint.start_offset != min(start_offset, self.end_offset)
            or self.checkpoint.needs_new_epoch != self.needs_new_epoch
            or bool(self._indexes_due)
            or self._timestamps_due
            or self.checkpoints_pending
            or any(segment.end_offset <= self.checkpoint.start_offset for segment in self._trimmed_segments)
        )

    def next_checkpoint(self, start_offset: int) -> Checkpoint:
        """The checkpoint of what is durable now."""
        start = min(start_offset, self.end_offset)
        return Checkpoint(
            self.checkpoint.sequence + 1,
            self.end_offset,
            self.segment.base_offset,
            self.position,
            start,
            self.needs_new_epoch,
        )

    def prepare_maintenance(
        self, segments: Sequence[Segment], start_offset: int, snapshot_bytes: int, *, closing: bool
    ) -> MaintenanceJob:
        """Collect a maintenance job: the checkpoint, index files that are due, and segments that may be removed.

        `segments`: all segments of the log.
        """
        active, previous, index_saved_bytes = segments[-1], self.checkpoint, self._index_saved_at
        self.checkpoint = checkpoint = self.next_checkpoint(start_offset)
        due = [segment for segment in self._indexes_due if segment.end_offset <= self.end_offset]
        self._indexes_due = [segment for segment in self._indexes_due if segment.end_offset > self.end_offset]
        indexes = [
            DueIndex(segment, segment.index, segment.end_offset, segment.size, True)  # type: ignore[arg-type]  # kept until it is saved
            for segment in due
        ]
        if closing or active.size - self._index_saved_at >= snapshot_bytes:
            self._index_saved_at = active.size
            index: SparseIndex = active.index  # type: ignore[assignment]  # an active segment holds its index
            indexes.append(DueIndex(active, index.copy(), active.end_offset, active.size, False))
        trimmed_segments = tuple(s for s in self._trimmed_segments if s.end_offset <= checkpoint.start_offset)
        self._trimmed_segments = [s for s in self._trimmed_segments if s.end_offset > checkpoint.start_offset]
        timestamps = (
            closed_segment_timestamps(segments, self.end_offset) if due or self._timestamps_due else None
        )
        self._timestamps_due = False
        return MaintenanceJob(
            self._directory,
            checkpoint,
            tuple(indexes),
            trimmed_segments,
            timestamps,
            self.generation,
            previous,
            index_saved_bytes,
        )

    def retry_maintenance(self, job: MaintenanceJob, *, checkpoint_written: bool) -> None:
        """Record that a maintenance job stopped on a full disk and has to be repeated.

        `checkpoint_written`: the job's checkpoint is on disk. Otherwise the previous checkpoint stays valid, and the
        next attempt writes the same slot, which may be damaged now.
        """
        if self.generation != job.generation:
            return
        if checkpoint_written:
            self.record_checkpoint(job)
        else:
            self.checkpoint = job.previous_checkpoint
        trimmed = set(self._trimmed_segments)
        self._indexes_due[:0] = [
            due.segment for due in job.indexes if due.closed and due.segment not in trimmed
        ]
        self._index_saved_at = min(self._index_saved_at, job.index_saved_bytes)
        self._trimmed_segments[:0] = job.trimmed_segments
        self._timestamps_due |= job.timestamps is not None

    def release(self) -> None:
        """Drop the files of closed segments: the log is closed."""
        self.generation += 1
        for segment in (*self._closed, *self._trimmed_segments):
            segment.file = None
