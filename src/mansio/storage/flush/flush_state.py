"""What is durable of one log (Kafka: recovery point), and what has to be made durable next.

`Log` reports what it did (a segment closed, segments trimmed, an epoch started); `FlushState` turns that into flush and
maintenance jobs, and records their results.

Invariants:
* `end_offset`, at `position` of `segment`, is durable, and so is everything before it.
* A job that fails ends the log's service, unless it failed on a full disk before anything could be lost: then it is due
  again (`retry_sync`, `retry_maintenance`).
* A job prepared before a truncation or the end of the log (another `generation`) has no effect any more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mansio.storage.checkpoint import Checkpoint
from mansio.storage.flush.flush_jobs import FlushJob, IndexDue, MaintenanceJob
from mansio.storage.segment_timestamps import timestamps_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mansio.storage.index import SparseIndex
    from mansio.storage.leader_epochs import LeaderEpochCache
    from mansio.storage.recovery.result import Recovered
    from mansio.storage.segment import Segment


class FlushState:
    """Flush state of one log. `epochs_dirty`: there are leader epochs that are not on disk. `epoch_due`: a recovery
    truncated the log, and no leader epoch was started since.
    """

    __slots__ = (
        "_checkpoint_until_offset",
        "_closed",
        "_directory",
        "_directory_dirty",
        "_garbage",
        "_index_saved_at",
        "_indexes_due",
        "_slots",
        "_timestamps_due",
        "checkpoint",
        "end_offset",
        "epoch_due",
        "epochs_dirty",
        "generation",
        "position",
        "segment",
    )

    def __init__(self, directory: str, recovered: Recovered) -> None:
        self._directory = directory
        self.segment = recovered.segments[-1]
        self.position = self.segment.size
        self.end_offset = recovered.end_offset
        self.checkpoint = recovered.checkpoint
        self.generation = 0
        self.epochs_dirty = False
        self.epoch_due = recovered.checkpoint.epoch_due
        self._directory_dirty = recovered.created
        self._closed: list[Segment] = []  # not yet durable
        self._indexes_due = list(recovered.indexes_due)
        self._index_saved_at = recovered.index_saved_bytes
        self._garbage: list[Segment] = []
        self._timestamps_due = recovered.timestamps_due
        self._slots = (0, recovered.checkpoint.segment_base)
        self._checkpoint_until_offset = 0

    @property
    def stable_offset(self) -> int:
        """Lowest segment that a checkpoint slot on disk may name; segments below it may change their size."""
        return min(self._slots)

    def request_checkpoints(self) -> None:
        """Request checkpoints (two) until `stable_offset` is where the log is durable now."""
        self._checkpoint_until_offset = self.segment.base_offset

    @property
    def checkpoints_pending(self) -> bool:
        """Whether a requested checkpoint is still to be written."""
        return self.stable_offset < self._checkpoint_until_offset

    def checkpointed(self, job: MaintenanceJob) -> None:
        """Record that the checkpoint of a job is on disk; the slot that was not written holds the previous one."""
        if job.generation == self.generation:
            self._slots = (self._slots[1], job.checkpoint.segment_base)

    def segments_replaced(self, old: Sequence[Segment], new: Segment) -> None:
        """Record that compaction replaced several segments by one."""
        self._indexes_due = [segment for segment in self._indexes_due if segment not in old]
        self._indexes_due.append(new)
        self._timestamps_due = True

    def segment_closed(self, segment: Segment) -> None:
        """Record that a segment was closed and a new file created."""
        self._closed.append(segment)
        self._indexes_due.append(segment)
        self._directory_dirty = True
        self._index_saved_at = 0

    def segments_trimmed(self, segments: list[Segment]) -> None:
        """Record that segments left the log; their files are removed once a checkpoint allows it."""
        self._garbage += segments
        self._indexes_due = [segment for segment in self._indexes_due if segment not in segments]

    def take_garbage(self) -> list[Segment]:
        """The trimmed segments whose files still exist; the caller removes them."""
        garbage, self._garbage = self._garbage, []
        return garbage

    def sync_closed_before(self, segment: Segment) -> None:
        """Sync the closed segments before one that a truncation makes the last. Blocks; raises `OSError`."""
        for closed in self._closed:
            if closed.base_offset < segment.base_offset and closed.file is not None:
                closed.file.sync()
                closed.file = None

    def truncated(self, segment: Segment, position: int, end_offset: int) -> None:
        """Record that the log ends there now, and that this is durable."""
        self.segment, self.position, self.end_offset = segment, position, end_offset
        self._closed.clear()
        self._indexes_due = [due for due in self._indexes_due if due.base_offset < segment.base_offset]
        self._directory_dirty = self.epochs_dirty = False
        self._index_saved_at = 0
        self._timestamps_due = True  # the truncation removed the file
        self._slots = (min(self._slots[0], segment.base_offset), min(self._slots[1], segment.base_offset))
        self._checkpoint_until_offset = 0

    def reset(self, segment: Segment) -> None:
        """Record that the log consists of this empty segment only, and that this is durable."""
        self.truncated(segment, 0, segment.base_offset)
        self._indexes_due.clear()

    def prepare_sync(self, active: Segment, epochs: LeaderEpochCache) -> FlushJob | None:
        """The job that makes the log durable up to the current end of its active segment; None when it is durable."""
        clean = not (self._closed or self.epochs_dirty or self._directory_dirty)
        if clean and active.end_offset == self.end_offset:
            return None
        job = FlushJob(
            directory=self._directory,
            closing=tuple(s.file for s in self._closed if s.file is not None) if self._closed else (),
            active=active.file,  # type: ignore[arg-type]  # an active segment holds its file
            directory_dirty=self._directory_dirty,
            epochs=epochs.encode() if self.epochs_dirty else None,
            generation=self.generation,
            segment=active,
            position=active.size,
            end_offset=active.end_offset,
            closing_count=len(self._closed),
        )
        self._directory_dirty = self.epochs_dirty = False
        return job

    def synced(self, job: FlushJob) -> bool:
        """Record a successful sync. True when the durable end moved."""
        if job.generation != self.generation:
            return False
        for segment in self._closed[: job.closing_count]:
            segment.file = None
        del self._closed[: job.closing_count]
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
        """Whether files on disk have to follow what is durable by now. With `active`, its index counts, too."""
        return (
            (active is not None and active.size != self._index_saved_at)
            or self.checkpoint.durable_end_offset != self.end_offset
            or self.checkpoint.start_offset != min(start_offset, self.end_offset)
            or self.checkpoint.epoch_due != self.epoch_due
            or bool(self._indexes_due)
            or self._timestamps_due
            or self.checkpoints_pending
            or any(segment.end_offset <= self.checkpoint.start_offset for segment in self._garbage)
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
            self.epoch_due,
        )

    def prepare_maintenance(
        self, segments: Sequence[Segment], start_offset: int, snapshot_bytes: int, *, closing: bool
    ) -> MaintenanceJob:
        """Checkpoint, the index files that are due, the trimmed segments that may be removed. `segments`: all."""
        active, previous, index_saved_bytes = segments[-1], self.checkpoint, self._index_saved_at
        self.checkpoint = checkpoint = self.next_checkpoint(start_offset)
        due = [segment for segment in self._indexes_due if segment.end_offset <= self.end_offset]
        self._indexes_due = [segment for segment in self._indexes_due if segment.end_offset > self.end_offset]
        indexes = [
            IndexDue(segment, segment.index, segment.end_offset, segment.size, True)  # type: ignore[arg-type]  # kept until it is saved
            for segment in due
        ]
        if closing or active.size - self._index_saved_at >= snapshot_bytes:
            self._index_saved_at = active.size
            index: SparseIndex = active.index  # type: ignore[assignment]  # an active segment holds its index
            indexes.append(IndexDue(active, index.frozen(), active.end_offset, active.size, False))
        garbage = tuple(s for s in self._garbage if s.end_offset <= checkpoint.start_offset)
        self._garbage = [s for s in self._garbage if s.end_offset > checkpoint.start_offset]
        timestamps = timestamps_of(segments, self.end_offset) if due or self._timestamps_due else None
        self._timestamps_due = False
        return MaintenanceJob(
            self._directory,
            checkpoint,
            tuple(indexes),
            garbage,
            timestamps,
            self.generation,
            previous,
            index_saved_bytes,
        )

    def retry_maintenance(self, job: MaintenanceJob, *, checkpointed: bool) -> None:
        """Record that maintenance stopped on a full disk; it is due again. `checkpointed`: its checkpoint is on disk.

        Otherwise the previous checkpoint stays valid, and the next attempt writes the same slot, which may be damaged
        now.
        """
        if self.generation != job.generation:
            return
        if checkpointed:
            self.checkpointed(job)
        else:
            self.checkpoint = job.previous
        trimmed = set(self._garbage)
        self._indexes_due[:0] = [
            due.segment for due in job.indexes if due.closed and due.segment not in trimmed
        ]
        self._index_saved_at = min(self._index_saved_at, job.index_saved_bytes)
        self._garbage[:0] = job.garbage
        self._timestamps_due |= job.timestamps is not None

    def release(self) -> None:
        """Drop the files of closed segments: the log is closed."""
        self.generation += 1
        for segment in (*self._closed, *self._garbage):
            segment.file = None
