"""One log: an append-only sequence of record batches on disk, cut into segments.

Owns the directory of one partition: segments, their indexes, the leader epochs and the checkpoint. Offsets are given
out here and nowhere else.

Always true:
* `start_offset <= durable_end_offset <= end_offset`; the offsets between start and end are all there, in order.
* `durable_end_offset` is an end that a *finished* sync covers, taken when that sync started. It only moves up, but for
  `truncate_to`. `durable_start_offset` is a start that is on disk: no opening finds records below it.
* A batch is written with one system call, at the end of the newest segment. A segment is closed for good when the next
  one is made; then its file ends where its last batch ends. The newest one's file may be longer: it grows ahead of its
  batches in steps, zeros being no batch, because a sync that need not record a new length takes a third less time.
* After a failed write that could not be taken back, or a failed sync, `failure` is set and no append is taken any more
  (after a failed fsync the page cache lies: trying again would report success for lost bytes).

All methods belong to one thread (the broker's loop); only `FlushJob.run` and `MaintenanceJob.run` (see
`sync_work`) run on another one, on values taken here. The rare parts of the methods are in `turning` and `upkeep`.
"""

from __future__ import annotations

import struct
from itertools import islice
from typing import TYPE_CHECKING

from mansio.errors import OffsetOutOfRange, StorageError
from mansio.storage import maintenance, segment_roll, timestamp_search
from mansio.storage.cleaner.segment_swap import SegmentSwap
from mansio.storage.file_cache import FileCache
from mansio.storage.flush.flush_jobs import FlushJob, LogDiskFull
from mansio.storage.flush.flush_state import FlushState
from mansio.storage.log_slice import LogSlice, SegmentInfo, segment_info
from mansio.storage.preallocation import Preallocation
from mansio.storage.recovery.recovery import Recovered, recover
from mansio.storage.segment import Segment, read_exactly
from mansio.storage.segment_list import SegmentList
from mansio.storage.segment_roll import RELATIVE_OFFSET_MAX
from mansio.storage.settings import LogSettings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from mansio.ports import Buffer, Clock, Disk, DiskFile
    from mansio.storage.flush.flush_jobs import MaintenanceJob
    from mansio.wire.batch.record_batch import BatchHeader

__all__ = ["Log", "LogSettings", "LogSlice", "SegmentInfo"]

PLACES_MAX = 64  # positions of sequential readers that one log remembers
_FRONT = struct.Struct(">qii")  # base offset, batch length, leader epoch: what the broker fills in
_MAX_TIMESTAMP = struct.Struct(">q")
_MAX_TIMESTAMP_POSITION = 35


class Log:
    """See the module. Made by `Log.open`.

    `on_durable(durable_end_offset)` is called after each sync that moved it; `on_failure(error)` once, when the log
    fails. `recovery` says what opening found.
    """

    def __init__(
        self,
        disk: Disk,
        clock: Clock,
        directory: str,
        settings: LogSettings,
        files: FileCache,
        recovery: Recovered,
    ) -> None:
        self.directory = directory
        self.settings = settings
        self.recovery = recovery
        self.leader_epochs = recovery.epochs
        self.failure: StorageError | None = None
        self.closed = False
        self.start_offset = self.durable_start_offset = recovery.start_offset
        self.end_offset = recovery.end_offset
        self.durable_end_offset = recovery.end_offset
        self.on_durable: Callable[[int], object] = maintenance.nobody_listens
        self.on_failure: Callable[[StorageError], object] = maintenance.nobody_listens
        self.on_maintenance_due: Callable[[], object] | None = None
        self.busy = 0
        self.disk = disk
        self.clock = clock
        self.files = files
        self.table = SegmentList(recovery.segments, files, recovery.compaction.sparse_end_offset)
        self.active = self.table.active
        self.active.end_offset = recovery.end_offset
        self._front = bytearray(_FRONT.size)
        self.roll_at = segment_roll.UNKNOWN_AGE
        self.room = Preallocation(self.active.size)
        self.places: dict[int, tuple[Segment, int]] = {}
        self.flush_state = FlushState(directory, recovery)
        self.disk_full_logged = False
        self.maintenance_running = False
        self.compaction = SegmentSwap(self.table, files, self.flush_state, self.places, recovery.compaction)

    @classmethod
    def open(
        cls,
        disk: Disk,
        clock: Clock,
        directory: str,
        settings: LogSettings | None = None,
        *,
        leader_epoch: int = -1,
        files: FileCache | None = None,
    ) -> Log:
        """Open the log in `directory` (making it when it is new) and recover it: see `recovery`.

        `leader_epoch` >= 0 is the epoch that writes from now on. `files` is shared by all logs of a broker. Everything
        the log holds on return is durable. Raises `CorruptLog` when durable records are damaged, `StorageError` when
        the disk fails.
        """
        settings = settings or LogSettings()
        try:
            recovered = recover(disk, directory, settings)
        except OSError as error:
            raise StorageError(f"cannot open the log {directory}: {error}") from error
        log = cls(disk, clock, directory, settings, files or FileCache(disk), recovered)
        if leader_epoch > log.leader_epochs.last:
            log.assign_leader_epoch(leader_epoch)
        return log

    # What it is

    @property
    def size_bytes(self) -> int:
        """Bytes of all segments."""
        return sum(segment.size for segment in self.table.segments)

    def segments(self) -> list[SegmentInfo]:
        """All segments, oldest first."""
        return [*self.closed_segments(), self.active_segment()]

    def closed_segments(self) -> Iterator[SegmentInfo]:
        """All but the newest, oldest first, made one by one when asked for. The log must not change meanwhile."""
        for segment in islice(self.table.segments, len(self.table.segments) - 1):
            yield segment_info(segment, self.disk, self.files)

    def active_segment(self) -> SegmentInfo:
        """The newest segment, the one that is written to."""
        return segment_info(self.active, self.disk, self.files)

    def update_settings(self, settings: LogSettings) -> None:
        """Use other settings from the next append on."""
        self.roll_at += (settings.segment_ms - self.settings.segment_ms) / 1000
        self.room.limit(settings.segment_bytes)
        self.settings = settings

    def assign_leader_epoch(self, epoch: int) -> None:
        """`epoch` writes from the end of the log on. An epoch at or below the newest changes nothing."""
        if self.leader_epochs.assign(epoch, self.end_offset):
            self.flush_state.epochs_dirty = True

    @property
    def epoch_due(self) -> bool:
        """Was the log cut by an opening, this one or one before, and no leader epoch was begun since?"""
        return self.flush_state.epoch_due

    def epoch_started(self) -> None:
        """What is written from now on carries a leader epoch of its own, and that is known wherever it has to be."""
        self.flush_state.epoch_due = False
        if self.on_maintenance_due is not None and self.needs_maintenance:
            self.on_maintenance_due()

    def end_offset_for_epoch(self, epoch: int) -> tuple[int, int]:
        """(epoch, end offset) as OffsetForLeaderEpoch wants it: see `LeaderEpochCache.end_offset_for`."""
        return self.leader_epochs.end_offset_for(epoch, self.end_offset)

    # Writing

    def append(
        self, batch: Buffer, header: BatchHeader, leader_epoch: int, *, front: bytes | None = None
    ) -> int:
        """Append one whole, checked batch at the end; its base offset.

        `front` replaces the first bytes of the batch (a header re-written for log-append time). Nothing is durable
        yet. Raises `StorageError` when the disk refuses. Without space the bytes written so far are taken back and the
        log stays in service for when there is space again; any other failure ends its service.
        """
        size = header.batch_length + 12
        active = self.active
        position = active.size
        if (
            self.failure is not None
            or position + size > self.room.writable_bytes
            or leader_epoch != self.leader_epochs.last
            or self.clock.monotonic() >= self.roll_at
            or self.end_offset - active.base_offset + header.last_offset_delta > RELATIVE_OFFSET_MAX
        ):
            active = segment_roll.prepare_append(self, position, size, leader_epoch, header)
            position = active.size
        base_offset = self.end_offset
        if front is None:
            _FRONT.pack_into(self._front, 0, base_offset, header.batch_length, leader_epoch)
            buffers: list[Buffer] = [self._front, memoryview(batch)[16:]]
            timestamp = header.max_timestamp_ms
        else:
            rewritten = bytearray(front)
            _FRONT.pack_into(rewritten, 0, base_offset, header.batch_length, leader_epoch)
            buffers = [rewritten, memoryview(batch)[len(front) :]]
            timestamp = _MAX_TIMESTAMP.unpack_from(front, _MAX_TIMESTAMP_POSITION)[0]
        try:
            active.file.write_at(buffers, position)  # type: ignore[union-attr]  # an active segment holds its file
        except OSError as error:
            raise segment_roll.append_failed(self, error, position) from error
        index = active.index
        if position >= index.due_position or timestamp > index.max_timestamp_ms:  # type: ignore[union-attr]  # so its index
            index.add(base_offset - active.base_offset, position, timestamp)  # type: ignore[union-attr]  # the same
        active.size = position + size
        self.end_offset = active.end_offset = base_offset + header.last_offset_delta + 1
        return base_offset

    def roll(self) -> bool:
        """Close the active segment now, so that retention and compaction can see it. False when it holds nothing.

        The new segment has to be synced: ask a `GroupCommit` for it. Raises `StorageError` as `append` does.
        """
        return segment_roll.roll(self)

    def fail(self, error: BaseException, message: str) -> StorageError:
        """The log takes no more writes; its listener is told once. Returns the error to raise."""
        if self.failure is None:
            failure = StorageError(f"{message}: {error}")
            failure.__cause__ = error
            self.failure = failure
            self.on_failure(failure)
        return self.failure

    # Reading

    def read(self, offset: int, max_bytes: int, limit_offset: int) -> LogSlice | None:
        """Whole batches from the one that holds `offset` on, all below `limit_offset`, out of one segment.

        At most `max_bytes`, but at least one batch. None when nothing is below the limit. Raises `OffsetOutOfRange`
        below the start and above the end of the log.
        """
        end = self.end_offset
        if offset < self.start_offset or offset > end:
            raise OffsetOutOfRange(
                f"offset {offset} is not in [{self.start_offset}, {end}] of {self.directory}"
            )
        if offset >= limit_offset or offset == end:
            return None
        place = self.places.get(offset)
        segment, position = place if place is not None else self.table.locate(offset)
        if position >= segment.size:  # remembered as the end of what was the newest segment then
            segment, position = self.table.locate(offset)
            if position >= segment.size:  # compaction left nothing from here on
                return None
        segment_end, stop = segment.end_offset, segment.size
        next_offset = segment_end
        if limit_offset < segment_end:
            if limit_offset == self.durable_end_offset and segment is self.flush_state.segment:
                stop, next_offset = self.flush_state.position, limit_offset
            else:
                stop, next_offset = self.table.position_of(segment, limit_offset)
            if stop <= position:
                return None
        file = segment.file or self.files.file(segment)
        if stop - position > max_bytes:
            stop, next_offset = timestamp_search.cut(
                segment, file, self.files, position, stop, max_bytes, next_offset
            )
        places = self.places
        # One batch larger than asked for: only its own header says where it ends, and it may be damaged.
        if next_offset not in places and stop - position <= max_bytes:
            if len(places) >= PLACES_MAX:
                del places[next(iter(places))]
            if stop < segment.size or segment is self.active:
                places[next_offset] = (segment, stop)
        return LogSlice(file, position, stop - position, next_offset)

    def batch_headers(self, from_offset: int) -> Iterator[BatchHeader]:
        """The headers of all batches from the one that holds `from_offset` on, up to the end as it is now.

        What is damaged in a closed segment is logged and left out.
        """
        return (header for _, _, header in self._walk(from_offset, skip_damaged=True))

    def batches(self, from_offset: int) -> Iterator[bytes]:
        """The bytes of all batches from the one that holds `from_offset` on, up to the end as it is now."""
        found = self._walk(from_offset)
        return (read_exactly(file, header.batch_length + 12, position) for file, position, header in found)

    def _walk(
        self, from_offset: int, *, skip_damaged: bool = False
    ) -> Iterator[tuple[DiskFile, int, BatchHeader]]:
        from_offset = max(from_offset, self.start_offset)
        if from_offset >= self.end_offset:
            return iter(())
        return self.table.walk(from_offset, skip_damaged=skip_damaged)

    def verify(self) -> int:
        """Read and check everything the log holds; the number of batches. Raises `CorruptLog` at the first damage.

        It checks what a reader cannot: that offsets follow each other and leader epochs are the known ones (neither is
        under a batch's CRC). It blocks for as long as reading the log takes: not for a broker's loop.
        """
        return maintenance.verify(self)

    def offset_for_time(self, timestamp_ms: int, limit_offset: int) -> tuple[int, int, int] | None:
        """(offset, timestamp in ms, leader epoch) of the first record at or after a moment; None when there is none."""
        return timestamp_search.offset_for_time(self, timestamp_ms, min(limit_offset, self.end_offset))

    def max_timestamp(self, limit_offset: int) -> tuple[int, int, int] | None:
        """(offset, timestamp in ms, leader epoch) of the first record with the largest timestamp (KIP-734)."""
        return timestamp_search.max_timestamp(self, min(limit_offset, self.end_offset))

    # Cutting

    def trim_to(self, offset: int) -> None:
        """Records below `offset` are gone. Segments wholly below it are removed by the chores, once that is on disk."""
        if offset > self.end_offset:
            raise OffsetOutOfRange(f"cannot trim to {offset}, the log ends at {self.end_offset}")
        if offset <= self.start_offset:
            return
        self.start_offset = offset
        self.drop_trimmed()
        self.places.clear()
        if self.on_maintenance_due is not None:
            self.on_maintenance_due()

    def drop_trimmed(self) -> None:
        """Segments wholly below the start leave the log; when compaction swaps segments now, then when it has."""
        if not self.compaction.busy:
            self.flush_state.segments_trimmed(self.table.drop_below(self.start_offset))

    def truncate_to(self, offset: int) -> None:
        """Take back every batch that reaches to `offset` or beyond; a follower does that when its leader changed.

        Durable on return. Not while a sync of this log runs (`busy`): `ConcurrentChange`.
        """
        maintenance.truncate(self, offset)

    # Becoming durable: the values that `GroupCommit` carries to its thread, and what comes back

    def prepare_sync(self) -> FlushJob | None:
        """What a sync has to do to make the log durable up to its end as it is now; None when it is."""
        if self.failure is not None or self.closed:
            return None
        work = self.flush_state.prepare_sync(self.active, self.leader_epochs)
        if work is not None:
            self.busy += 1
        return work

    def finish_sync(self, work: FlushJob, error: BaseException | None) -> None:
        """A sync ended. Its listeners are told. `LogDiskFull`: nothing was synced, the next sync does it all."""
        self.busy -= 1
        if isinstance(error, LogDiskFull):
            self.flush_state.retry_sync(work)
            maintenance.log_disk_full(self, error)
        elif error is not None:
            self.fail(error, f"cannot sync {self.directory}")
        elif self.failure is None and self.flush_state.synced(work):
            self.durable_end_offset = work.end_offset
            self.room.awaited_syncs += 1
            self.on_durable(work.end_offset)

    @property
    def needs_maintenance(self) -> bool:
        """Is there something on disk that should follow what is durable by now?"""
        return (
            self.failure is None and not self.closed and self.flush_state.needs_maintenance(self.start_offset)
        )

    @property
    def checkpoint_lag_bytes(self) -> int:
        """About so many bytes, durable by now, would be read and written again after a crash."""
        return self.flush_state.checkpoint_lag_bytes

    def prepare_maintenance(self, *, closing: bool = False) -> MaintenanceJob | None:
        """The housekeeping that is due: checkpoint, index files, removal of trimmed segments."""
        return maintenance.prepare_maintenance(self, closing=closing)

    def finish_maintenance(self, job: MaintenanceJob, error: BaseException | None) -> None:
        """The housekeeping ended. `LogDiskFull`: it is due again."""
        maintenance.finish_maintenance(self, job, error)

    def sync(self) -> None:
        """Make the log durable here and now, blocking. A broker uses a `GroupCommit` instead. Raises `StorageError`."""
        maintenance.run_inline(self, self.prepare_sync(), self.finish_sync)
        maintenance.run_inline(self, self.prepare_maintenance(), self.finish_maintenance)

    # Compaction (see `compaction_run`)

    @property
    def generation(self) -> int:
        """Another one after each truncation, and when the log has ended: what was prepared before counts no more."""
        return self.flush_state.generation

    def resume_after_compaction(self) -> None:
        """A swap, or a note about compaction, is done with: what had to wait for it goes on."""
        self.compaction.busy = False
        self.drop_trimmed()
        if self.on_maintenance_due is not None:
            self.on_maintenance_due()

    def request_checkpoint(self) -> None:
        """Have a checkpoint written although the log did not move: compaction needs one that names newer segments."""
        self.flush_state.settle()
        if self.on_maintenance_due is not None and self.needs_maintenance:
            self.on_maintenance_due()

    def close(self, *, save: bool = True) -> None:
        """Let go of the files. With `save` everything is made durable first, and the next opening reads nothing.

        Safe, but less thorough, while a sync of this log still runs. Raises `StorageError` when saving fails.
        """
        if self.closed:
            return
        try:
            if save and self.failure is None:
                maintenance.save(self)
        finally:
            maintenance.release(self)

    def delete(self) -> None:
        """Remove the log and everything in its directory. Not while a sync of this log runs (`busy`)."""
        maintenance.delete(self)
