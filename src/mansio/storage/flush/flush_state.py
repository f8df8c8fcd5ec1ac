"""What of one log is on stable storage, and what is still owed to it.

`Log` reports what it did (a segment closed, segments trimmed, an epoch begun); the ledger turns that into the work of a
sync and of the housekeeping, and takes note when they are done.

Always true: `end_offset`, at `position` of `segment`, is durable, and so is all before it. Work that fails ends the
log's service, unless it failed for want of room before anything could be lost: that is owed again (`retry_sync`). Work
prepared before a truncation or the end of the log (another `generation`) changes nothing any more.
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
    from mansio.storage.recovery.recovery import Recovered
    from mansio.storage.segment import Segment


class FlushState:
    """See the module. `epochs_dirty`: the epochs have news that are not on disk. `epoch_due`: the log was cut by an
    opening, and no leader epoch has begun since.
    """

    __slots__ = (
        "_closed",
        "_directory",
        "_directory_dirty",
        "_garbage",
        "_index_saved_at",
        "_indexes_due",
        "_settle_offset",
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
        self._settle_offset = 0

    @property
    def stable_offset(self) -> int:
        """The lowest segment that a slot of the checkpoint on disk may speak of; those below may change their size."""
        return min(self._slots)

    def settle(self) -> None:
        """Checkpoints are wanted, so that `stable_offset` moves up to where the log is durable now: two of them."""
        self._settle_offset = self.segment.base_offset

    @property
    def settling(self) -> bool:
        """Is one of them still to be written?"""
        return self.stable_offset < self._settle_offset

    def checkpointed(self, job: MaintenanceJob) -> None:
        """The checkpoint of some housekeeping is on disk: the slot that was not written is the one before."""
        if job.generation == self.generation:
            self._slots = (self._slots[1], job.checkpoint.segment_base)

    def segments_replaced(self, old: Sequence[Segment], new: Segment) -> None:
        """Compaction made one segment of several."""
        self._indexes_due = [segment for segment in self._indexes_due if segment not in old]
        self._indexes_due.append(new)
        self._timestamps_due = True

    def segment_closed(self, segment: Segment) -> None:
        """A segment was closed and a new file made."""
        self._closed.append(segment)
        self._indexes_due.append(segment)
        self._directory_dirty = True
        self._index_saved_at = 0

    def segments_trimmed(self, segments: list[Segment]) -> None:
        """Segments left the log; their files may go when a checkpoint says so."""
        self._garbage += segments
        self._indexes_due = [segment for segment in self._indexes_due if segment not in segments]

    def take_garbage(self) -> list[Segment]:
        """The trimmed segments whose files are still there: whoever takes them removes them."""
        garbage, self._garbage = self._garbage, []
        return garbage

    def sync_closed_before(self, segment: Segment) -> None:
        """Sync, here and now, the closed segments before one that a truncation makes the last. Raises `OSError`."""
        for closed in self._closed:
            if closed.base_offset < segment.base_offset and closed.file is not None:
                closed.file.sync()
                closed.file = None

    def truncated(self, segment: Segment, position: int, end_offset: int) -> None:
        """The log now ends there, and that is durable."""
        self.segment, self.position, self.end_offset = segment, position, end_offset
        self._closed.clear()
        self._indexes_due = [due for due in self._indexes_due if due.base_offset < segment.base_offset]
        self._directory_dirty = self.epochs_dirty = False
        self._index_saved_at = 0
        self._timestamps_due = True  # the file went with the truncation
        self._slots = (min(self._slots[0], segment.base_offset), min(self._slots[1], segment.base_offset))
        self._settle_offset = 0

    def begun_anew(self, segment: Segment) -> None:
        """Nothing is left of the log but this segment, which is empty, and that is durable."""
        self.truncated(segment, 0, segment.base_offset)
        self._indexes_due.clear()

    def prepare_sync(self, active: Segment, epochs: LeaderEpochCache) -> FlushJob | None:
        """What makes the log durable up to the end of its active segment as it is now; None when it is."""
        clean = not (self._closed or self.epochs_dirty or self._directory_dirty)
        if clean and active.end_offset == self.end_offset:
            return None
        work = FlushJob(
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
        return work

    def synced(self, work: FlushJob) -> bool:
        """A sync ended well. True when the durable end moved."""
        if work.generation != self.generation:
            return False
        for segment in self._closed[: work.closing_count]:
            segment.file = None
        del self._closed[: work.closing_count]
        self.segment, self.position = work.segment, work.position
        moved = work.end_offset > self.end_offset
        self.end_offset = work.end_offset
        return moved

    def retry_sync(self, work: FlushJob) -> None:
        """There was no room for what a sync had to write first, so it synced nothing: all of it is owed again."""
        if work.generation == self.generation:
            self._directory_dirty |= work.directory_dirty
            self.epochs_dirty |= work.epochs is not None

    @property
    def checkpoint_lag_bytes(self) -> int:
        """Durable bytes of the segment that is synced which the checkpoint does not speak of yet."""
        if self.checkpoint.segment_base != self.segment.base_offset:
            return self.position
        return self.position - self.checkpoint.position

    def needs_maintenance(self, start_offset: int, active: Segment | None = None) -> bool:
        """Is there something on disk that should follow what is durable by now? With `active`, its index counts too."""
        return (
            (active is not None and active.size != self._index_saved_at)
            or self.checkpoint.durable_end_offset != self.end_offset
            or self.checkpoint.start_offset != min(start_offset, self.end_offset)
            or self.checkpoint.epoch_due != self.epoch_due
            or bool(self._indexes_due)
            or self._timestamps_due
            or self.settling
            or any(segment.end_offset <= self.checkpoint.start_offset for segment in self._garbage)
        )

    def next_checkpoint(self, start_offset: int) -> Checkpoint:
        """The checkpoint that says what is durable now."""
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
        times = timestamps_of(segments, self.end_offset) if due or self._timestamps_due else None
        self._timestamps_due = False
        return MaintenanceJob(
            self._directory,
            checkpoint,
            tuple(indexes),
            garbage,
            times,
            self.generation,
            previous,
            index_saved_bytes,
        )

    def retry_maintenance(self, job: MaintenanceJob, *, checkpointed: bool) -> None:
        """There was no room for housekeeping; it is owed again. `checkpointed`: its checkpoint is on disk.

        Otherwise the one before counts on, and the next attempt writes the same slot: that one may be spoilt by now.
        """
        if job.generation != self.generation:
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
        self._timestamps_due |= job.times is not None

    def release(self) -> None:
        """The log ends: forget the files of closed segments."""
        self.generation += 1
        for segment in (*self._closed, *self._garbage):
            segment.file = None
