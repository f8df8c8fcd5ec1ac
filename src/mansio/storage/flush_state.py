"""Flush state of one log (Kafka: recovery point): what is durable, and the jobs that make the rest durable.

`Log` reports each change (a closed segment, trimmed segments, a new epoch); `FlushState` prepares flush and maintenance
jobs from these changes and records their results. A job is an immutable value that is created on the event loop and run
on another thread; it does not access the `Log`.

Invariants:
* All records below `end_offset` are durable.
* `FlushJob.run` syncs in this order: leader epochs, closed segments, directory, active segment. `FlushJob.end_offset`
  is durable when it returns.
* `MaintenanceJob.run` writes a checkpoint of an end offset that is already durable, then removes segments that the
  checkpoint no longer needs, and then writes files that need new disk space, so that trimmed segments are removed even
  if the disk is full.
* After a failed job the log has failed. The exception is `LogDiskFull`: the disk was full and no data can have been
  lost, because the next attempt writes the whole file again; the work of that job is due again (`retry_sync`,
  `retry_maintenance`). If a sync of records reports a full disk, the log has failed (`OSError`), because the kernel may
  have dropped the records.
* A job that was prepared before a truncation, or before the log was closed, has an older `generation` and no effect.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from mansio.errors import StorageError
from mansio.ports import DESCRIPTOR_ERRNOS, DISK_FULL_ERRNOS, TRANSIENT_ERRNOS
from mansio.storage.checkpoint import CHECKPOINT_NAME, Checkpoint, write_checkpoint
from mansio.storage.checksummed_file import write_checksummed
from mansio.storage.leader_epochs import EPOCHS_NAME
from mansio.storage.segment import remove_segment_files
from mansio.storage.segment_timestamps import (
    TIMESTAMPS_NAME,
    closed_segment_timestamps,
    encode_segment_timestamps,
)
from mansio.tracebacks import without_traceback

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from mansio.ports import Disk, DiskFile
    from mansio.storage.index import SparseIndex
    from mansio.storage.leader_epochs import LeaderEpochCache
    from mansio.storage.recovery.recovery import RecoveredLog
    from mansio.storage.segment import Segment
    from mansio.storage.segment_timestamps import SegmentTimestamp


class LogDiskFull(StorageError):
    """Raised when the disk is full or no descriptor is free, no data was lost, and the job can be repeated later.

    `checkpoint_written`: the checkpoint of the maintenance job had already been written.
    """

    def __init__(self, message: str, *, checkpoint_written: bool = False) -> None:
        super().__init__(message)
        self.checkpoint_written = checkpoint_written


@contextmanager
def translate_disk_full(
    what: str, *, checkpoint_written: bool = False, transient: frozenset[int] = TRANSIENT_ERRNOS
) -> Iterator[None]:
    """Raise `LogDiskFull` if an `OSError` in the block reports a full disk or that no descriptor is free; of these only
    the numbers in `transient` count. `what` names the data in the message."""
    try:
        yield
    except OSError as error:
        if error.errno not in transient:
            raise
        missing = "space" if error.errno in DISK_FULL_ERRNOS else "file descriptor"
        raise LogDiskFull(
            f"no {missing} for {what}: {error}", checkpoint_written=checkpoint_written
        ) from error


class FlushJob(NamedTuple):
    """Job that makes one log durable up to `end_offset`, which is at `position` of the active segment `segment`.

    It syncs `closed_files` and `active_file` (None: closed, because it has nothing to sync), and the directory if
    `directory_dirty`. `epochs` is the new content of the epochs file; None if it is up to date. `closed_segment_count`
    is the number of closed segments that the job makes durable.
    """

    directory: str
    closed_files: tuple[DiskFile, ...]
    active_file: DiskFile | None
    directory_dirty: bool
    epochs: bytes | None
    generation: int
    segment: Segment
    position: int
    end_offset: int
    closed_segment_count: int

    @property
    def file_count(self) -> int:
        """Number of syncs that `run` performs, without that of the epochs file."""
        return len(self.closed_files) + 1 + self.directory_dirty

    def run(self, disk: Disk) -> None:
        """Write the leader epochs and sync file by file. Raises `OSError`; `LogDiskFull` before the first sync."""
        self.write_epochs(disk, durable=True)
        self.sync(disk)

    def sync(self, disk: Disk) -> None:
        """Sync the closed segments, the directory and the active segment. Raises `OSError`."""
        for file in self.closed_files:
            file.sync()
        if self.directory_dirty:
            # Without a descriptor for the directory nothing of it was synced, and everything is synced again later. Any
            # other error may be that of the sync itself, which is not repeated.
            with translate_disk_full("the sync of the directory", transient=DESCRIPTOR_ERRNOS):
                disk.sync_directory(self.directory)
        if self.active_file is not None:
            self.active_file.sync()

    def write_epochs(self, disk: Disk, *, durable: bool) -> None:
        """Replace the epochs file if there are new epochs. Unless `durable`, the caller syncs the file system next.

        A crash before that sync may leave an invalid file; recovery then reads the epochs from the batches. A file with
        epochs of batches that were lost is harmless, because recovery uses it only below the checkpoint.
        """
        if self.epochs is None:
            return
        with translate_disk_full(f"the leader epochs of {self.directory}"):
            write_checksummed(disk, f"{self.directory}/{EPOCHS_NAME}", self.epochs, durable=durable)


class DueIndex(NamedTuple):
    """An index to be saved, of the first `covered_bytes` of `segment`, which end at `end_offset`.

    `closed`: the segment is closed; otherwise the index is a snapshot of that of the active segment.
    """

    segment: Segment
    sparse_index: SparseIndex
    end_offset: int
    covered_bytes: int
    closed: bool


class MaintenanceJob(NamedTuple):
    """Job that writes the checkpoint and index files of a log and removes trimmed segments, for a fast recovery.

    `timestamps` is the new content of the timestamps file; None if it is up to date. `previous_checkpoint` and
    `previous_covered_bytes` restore the flush state if the job fails on a full disk.
    """

    directory: str
    checkpoint: Checkpoint
    indexes: tuple[DueIndex, ...]
    trimmed_segments: tuple[Segment, ...]
    timestamps: tuple[SegmentTimestamp, ...] | None
    generation: int
    previous_checkpoint: Checkpoint
    previous_covered_bytes: int
    """Number of bytes of the active segment that the saved index covers."""

    @property
    def checkpoint_path(self) -> str:
        """Path of the checkpoint file."""
        return f"{self.directory}/{CHECKPOINT_NAME}"

    def run(self, disk: Disk) -> None:
        """Write the checkpoint, then call `run_after_checkpoint`. Raises `OSError`, `LogDiskFull`."""
        self.write_checkpoint(disk, sync=True)
        self.run_after_checkpoint(disk)

    def write_checkpoint(self, disk: Disk, *, sync: bool) -> None:
        """Write the checkpoint. Without `sync` the caller syncs the file system before `run_after_checkpoint`.

        Raises `OSError`, `LogDiskFull`.
        """
        with translate_disk_full(f"the checkpoint of {self.directory}"):
            write_checkpoint(disk, self.checkpoint_path, self.checkpoint, sync=sync)

    def run_after_checkpoint(self, disk: Disk) -> None:
        """Remove trimmed segments, then save indexes and timestamps. The checkpoint must be durable.

        Raises `OSError`, `LogDiskFull`.
        """
        trimmed = (
            bool(self.trimmed_segments)
            or self.checkpoint.start_offset > self.previous_checkpoint.start_offset
        )
        if not trimmed and not self.indexes and self.timestamps is None:
            return
        with translate_disk_full(f"the maintenance of {self.directory}", checkpoint_written=True):
            if trimmed:
                # Both slots are written: an older slot would restore trimmed records, or require removed segments.
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
    """Run the maintenance jobs of several logs; returns the error of each job, None if it succeeded, in their order.

    With `sync_all` (see `Disk.sync_all`) one sync makes all checkpoints durable; otherwise each checkpoint is synced.
    """
    failed: list[OSError | LogDiskFull | None] = [None] * len(jobs)
    for number, job in enumerate(jobs):
        try:
            job.write_checkpoint(disk, sync=sync_all is None)
        except (OSError, LogDiskFull) as error:
            failed[number] = without_traceback(error)
    written = [job for number, job in enumerate(jobs) if failed[number] is None]
    if sync_all is not None and written:
        try:
            with translate_disk_full("checkpoints"):
                if not sync_all():
                    for job in written:
                        disk.open(job.checkpoint_path).sync()
        except (OSError, LogDiskFull) as error:
            return [without_traceback(error) if one is None else one for one in failed]
    for number, job in enumerate(jobs):
        if failed[number] is None:
            try:
                job.run_after_checkpoint(disk)
            except (OSError, LogDiskFull) as error:
                failed[number] = without_traceback(error)
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
        """Lowest base offset to which a checkpoint slot on disk may refer; segments below it may be replaced."""
        return min(self._slots)

    def request_checkpoints(self) -> None:
        """Request checkpoints, one per slot, that refer to the newest durable segment or a later one."""
        self._checkpoint_until_offset = self.segment.base_offset

    @property
    def checkpoints_pending(self) -> bool:
        """Whether a requested checkpoint is still to be written."""
        return self.lowest_checkpoint_base_offset < self._checkpoint_until_offset

    def record_checkpoint(self, job: MaintenanceJob) -> None:
        """Record that the checkpoint of a job is on disk. The other slot still contains the previous checkpoint."""
        if job.generation == self.generation:
            self._slots = (self._slots[1], job.checkpoint.segment_base)

    def record_replaced_segments(self, old: Sequence[Segment], new: Segment) -> None:
        """Record that compaction or a repair replaced the segments `old` by `new`."""
        self._indexes_due = [segment for segment in self._indexes_due if segment not in old]
        self._indexes_due.append(new)
        self._timestamps_due = True

    def record_closed_segment(self, segment: Segment) -> None:
        """Record that a segment was closed and a new file created."""
        self._closed.append(segment)
        self._indexes_due.append(segment)
        self._directory_dirty = True
        self._index_saved_at = 0

    @property
    def unflushed_closed_count(self) -> int:
        """Number of closed segments that are not flushed yet."""
        return len(self._closed)

    def record_trimmed_segments(self, segments: list[Segment]) -> None:
        """Record that segments were trimmed. A maintenance job removes their files after it wrote a checkpoint."""
        self._trimmed_segments += segments
        self._indexes_due = [segment for segment in self._indexes_due if segment not in segments]

    def take_trimmed_segments(self) -> list[Segment]:
        """Return the trimmed segments whose files still exist, and forget them: the caller removes the files."""
        trimmed_segments, self._trimmed_segments = self._trimmed_segments, []
        return trimmed_segments

    def sync_closed_before(self, segment: Segment) -> None:
        """Sync the closed segments before `segment`, the last one after a truncation. Blocks; raises `OSError`."""
        for closed in self._closed:
            if closed.base_offset < segment.base_offset and closed.file is not None:
                closed.file.sync()
                closed.file = None

    def record_truncation(self, segment: Segment, position: int, end_offset: int) -> None:
        """Record that the log was truncated, durably, to `end_offset`, which is at `position` of `segment`."""
        self.segment, self.position, self.end_offset = segment, position, end_offset
        self._closed.clear()
        self._indexes_due = [due for due in self._indexes_due if due.base_offset < segment.base_offset]
        self._directory_dirty = self.epochs_dirty = False
        self._index_saved_at = 0
        self._timestamps_due = True  # the truncation removed the file
        self._slots = (min(self._slots[0], segment.base_offset), min(self._slots[1], segment.base_offset))
        self._checkpoint_until_offset = 0

    def record_reset(self, segment: Segment) -> None:
        """Record that the log now consists, durably, of the empty `segment` only."""
        self.record_truncation(segment, 0, segment.base_offset)
        self._indexes_due.clear()

    def is_flushed(self, active: Segment) -> bool:
        """Whether every byte of the segments was flushed; entries of the directory and epochs may not be."""
        return active.end_offset == self.end_offset and not self._closed

    def prepare_sync(self, active: Segment, epochs: LeaderEpochCache) -> FlushJob | None:
        """Return the job that makes the log durable up to the end of its active segment; None if it is durable
        already."""
        clean = not (self._closed or self.epochs_dirty or self._directory_dirty)
        if clean and active.end_offset == self.end_offset:
            return None
        job = FlushJob(
            directory=self._directory,
            closed_files=tuple(s.file for s in self._closed if s.file is not None) if self._closed else (),
            active_file=active.file,
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
        """Record a successful flush job. Returns whether the durable end offset has increased."""
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
        """Record that a flush job stopped on a full disk before its first sync: all of its work is due again."""
        if job.generation == self.generation:
            self._directory_dirty |= job.directory_dirty
            self.epochs_dirty |= job.epochs is not None

    @property
    def checkpoint_lag_bytes(self) -> int:
        """Number of durable bytes of the newest durable segment that the checkpoint does not cover."""
        if self.checkpoint.segment_base != self.segment.base_offset:
            return self.position
        return self.position - self.checkpoint.position

    def needs_maintenance(self, start_offset: int, active: Segment | None = None) -> bool:
        """Whether `prepare_maintenance` has work: the checkpoint, an index or the timestamps file on disk is older than
        the durable part of the log, or files of deleted segments have to be removed. If `active` is given, its index
        counts, too.
        """
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
        """Return the checkpoint of the current durable state, with the log start offset `start_offset`."""
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
        self, segments: Sequence[Segment], start_offset: int, index_snapshot_bytes: int, *, closing: bool
    ) -> MaintenanceJob:
        """Return the job that writes the checkpoint and the indexes that are due, and removes trimmed segments.

        `segments` are all segments of the log. The index of the active segment is included if the segment has grown by
        `index_snapshot_bytes` since it was saved, or if `closing`.
        """
        active, previous, covered_bytes = segments[-1], self.checkpoint, self._index_saved_at
        self.checkpoint = checkpoint = self.next_checkpoint(start_offset)
        due = [segment for segment in self._indexes_due if segment.end_offset <= self.end_offset]
        self._indexes_due = [segment for segment in self._indexes_due if segment.end_offset > self.end_offset]
        indexes = [
            DueIndex(segment, segment.index, segment.end_offset, segment.size, True)  # type: ignore[arg-type]  # kept until it is saved
            for segment in due
        ]
        if closing or active.size - self._index_saved_at >= index_snapshot_bytes:
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
            covered_bytes,
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
        self._index_saved_at = min(self._index_saved_at, job.previous_covered_bytes)
        self._trimmed_segments[:0] = job.trimmed_segments
        self._timestamps_due |= job.timestamps is not None

    def release_closed_files(self) -> None:
        """Release the files of closed segments that are not flushed, because the log has failed."""
        for segment in self._closed:
            segment.file = None

    def release(self) -> None:
        """Release the files of closed segments, because the log is closed; prepared jobs have no effect any more."""
        self.generation += 1
        for segment in (*self._closed, *self._trimmed_segments):
            segment.file = None
