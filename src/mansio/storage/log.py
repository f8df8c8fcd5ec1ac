"""One log: an append-only sequence of record batches on disk, divided into segments.

Owns the directory of one partition: segments, their indexes, the leader epochs and the checkpoint. Offsets are assigned
here and nowhere else.

Invariants:
* `start_offset <= durable_end_offset <= end_offset`; all offsets between start and end are present, in order.
* `durable_end_offset` is an end that a *finished* sync covers, read when that sync started. It only increases, except
  through `truncate_to`. `durable_start_offset` is a start that is on disk: no recovery finds records below it.
* A batch is written with one system call, at the end of the active segment. When the next segment is created, the
  active one is closed and never appended to again; its file then ends where its last batch ends. The file of the active
  segment may be longer: it is preallocated in steps, and zeros are not a batch. A sync that does not have to record a
  new length takes a third less time.
* After a failed write that could not be undone, or a failed sync, `failure` is set and every later append is refused:
  after a failed fsync the page cache no longer shows which bytes are on disk, so a retry would report success for lost
  bytes.

All methods belong to one thread (the broker's loop); only `FlushJob.run` and `MaintenanceJob.run` (see `flush_jobs`)
run on another thread, on values taken here.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import struct
from itertools import islice
from typing import TYPE_CHECKING

from mansio.errors import (
    ConcurrentChange,
    CorruptLog,
    CorruptMessage,
    FencedLeaderEpoch,
    OffsetOutOfRange,
    StorageError,
    VerificationPending,
)
from mansio.logs import fields
from mansio.ports import DISK_FULL_ERRNOS
from mansio.storage import timestamp_search
from mansio.storage.checked_ranges import OPEN_RANGE_END, CheckedRange, CheckedRanges, damaged_range_error
from mansio.storage.checkpoint import CHECKPOINT_NAME, Checkpoint, write_both_slots
from mansio.storage.checksummed_file import write_checksummed
from mansio.storage.cleaner.compaction_state import DirectoryNotSynced, write_state
from mansio.storage.cleaner.segment_swap import SegmentSwap
from mansio.storage.file_cache import FileCache
from mansio.storage.flush.flush_state import FlushJob, FlushState, LogDiskFull
from mansio.storage.index import SparseIndex
from mansio.storage.leader_epochs import EPOCHS_NAME, LeaderEpochCache
from mansio.storage.preallocation import Preallocation
from mansio.storage.recovery.recovery import recover
from mansio.storage.scan import verify_segment
from mansio.storage.segment import (
    PREFIX_BYTES,
    WALK_CHUNK_BYTES,
    Segment,
    read_exactly,
    remove_segment_files,
    walk,
)
from mansio.storage.segment_list import (
    BatchPosition,
    LogSlice,
    ReadPositions,
    SegmentInfo,
    SegmentList,
    segment_info,
)
from mansio.storage.segment_timestamps import TIMESTAMPS_NAME
from mansio.storage.settings import LogSettings
from mansio.storage.verification import CheckResult, CheckTask, check_batches, is_unreadable
from mansio.wire.batch.record_batch import HEADER_BYTES, LENGTH_OFFSET, read_header

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from mansio.ports import Buffer, Clock, Disk, DiskFile
    from mansio.storage.flush.flush_state import MaintenanceJob
    from mansio.storage.recovery.recovery import RecoveredLog
    from mansio.wire.batch.record_batch import BatchHeader

__all__ = ["Log", "LogSettings", "LogSlice", "SegmentInfo"]

READ_POSITIONS_MAX = 64  # positions of sequential readers that one log remembers
RELATIVE_OFFSET_MAX = (1 << 31) - 1
CHECK_BYTES_MAX = 256 << 10
"""A read verifies about so many bytes itself, at most `CHECK_BATCHES_MAX` batches; the others are left to another
thread."""

CHECK_LARGE_BYTES_MAX = 1 << 20
"""The same for batches of at least `CHECK_LARGE_BATCH_BYTES_MIN`: verifying them takes less time than a hand-over."""

CHECK_LARGE_BATCH_BYTES_MIN = 64 << 10
CHECK_BATCHES_MAX = 128
LARGE_BATCH_BYTES_MIN = 1 << 20
"""A batch of this size is verified on another thread only."""

_ROLL_TIME_UNKNOWN = -math.inf
"""Roll time of the active segment of a log that was just opened: the first append determines it."""

_PREFIX = struct.Struct(">qii")  # base offset, batch length, leader epoch: what the broker fills in
_MAX_TIMESTAMP = struct.Struct(">q")
_MAX_TIMESTAMP_POSITION = 35
_NO_FILE_OPENED_ERRNOS = DISK_FULL_ERRNOS | {errno.EMFILE, errno.ENFILE}

logger = logging.getLogger(__name__)


def _no_listener(_: object) -> None:
    """Listener of a log that has none, or that is closed."""


class Log:
    """The log of one partition. `Log.open` creates it.

    The log calls these listeners:
    * `on_durable(durable_end_offset)` after each sync that moved the durable end offset,
    * `on_failure(error)` once, when the log fails,
    * `on_maintenance_due()` when `prepare_maintenance` may return a job,
    * `on_check_due(segment, offset)` when batches from `offset` on should be verified on another thread; without this
      listener the reading thread verifies all batches,
    * `on_damage(segment, range)` for each damaged range that is found.

    `recovery` is the result of opening the log. `unfinished_job_count` counts the flush and maintenance jobs that were
    prepared and have not finished. While `repair_pending` is set, readers of a damaged range get
    `VerificationPending`; while `repairing` is set, a repaired segment is replacing the damaged one.
    """

    def __init__(
        self,
        disk: Disk,
        clock: Clock,
        directory: str,
        settings: LogSettings,
        files: FileCache,
        recovery: RecoveredLog,
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
        self.on_durable: Callable[[int], object] = _no_listener
        self.on_failure: Callable[[StorageError], object] = _no_listener
        self.on_maintenance_due: Callable[[], object] | None = None
        self.on_check_due: Callable[[Segment, int], object] | None = None
        self.on_damage: Callable[[Segment, CheckedRange], object] | None = None
        self.unfinished_job_count = 0
        self.maintenance_running = False
        self.repair_pending = False
        self.repairing = False
        self._disk = disk
        self._clock = clock
        self._files = files
        self._segments = SegmentList(recovery.segments, files, recovery.compaction.sparse_end_offset)
        self._active = self._segments.active
        self._active.end_offset = recovery.end_offset
        self._prefix = bytearray(_PREFIX.size)
        self._roll_at = _ROLL_TIME_UNKNOWN
        self._preallocation = Preallocation(self._active.size)
        self._read_positions = ReadPositions()
        self._flush_state = FlushState(directory, recovery)
        self._disk_full_logged = False
        self.compaction = SegmentSwap(
            self._segments, files, self._flush_state, self._read_positions, recovery.compaction
        )

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
        """Open the log in `directory` (creating it when it is new) and recover it: see `recovery`.

        `leader_epoch` >= 0 is the epoch of the following appends. `files` is shared by all logs of a broker. Everything
        the log holds on return is durable. Raises `CorruptLog` when durable records are damaged, `StorageError` when
        the disk fails.
        """
        settings = settings or LogSettings()
        try:
            recovered = recover(disk, directory, settings)
        except OSError as error:
            raise StorageError(f"cannot open the log {directory}: {error}") from error
        log = cls(disk, clock, directory, settings, files or FileCache(disk), recovered)
        if leader_epoch > log.leader_epochs.latest_epoch:
            log.assign_leader_epoch(leader_epoch)
        return log

    # Properties

    @property
    def size_bytes(self) -> int:
        """Bytes of all segments."""
        return sum(segment.size for segment in self._segments.segments)

    def segments(self) -> list[SegmentInfo]:
        """All segments, oldest first."""
        return [*self.closed_segments(), self.active_segment()]

    def closed_segments(self) -> Iterator[SegmentInfo]:
        """All segments except the active one, oldest first, computed lazily. The log must not change meanwhile."""
        for segment in islice(self._segments.segments, len(self._segments.segments) - 1):
            yield segment_info(segment, self._disk, self._files)

    def active_segment(self) -> SegmentInfo:
        """The newest segment, the one that is written to."""
        return segment_info(self._active, self._disk, self._files)

    def segment_base_offsets(self) -> list[int]:
        """The base offsets of all segments, oldest first."""
        return [segment.base_offset for segment in self._segments.segments]

    def update_settings(self, settings: LogSettings) -> None:
        """Use other settings from the next append on."""
        self._roll_at += (settings.segment_ms - self.settings.segment_ms) / 1000
        self._preallocation.limit(settings.segment_bytes)
        self.settings = settings

    def assign_leader_epoch(self, epoch: int) -> None:
        """Use `epoch` for all records from the end of the log on. An epoch at or below the newest changes nothing."""
        if self.leader_epochs.assign(epoch, self.end_offset):
            self._flush_state.epochs_dirty = True

    @property
    def needs_new_epoch(self) -> bool:
        """Whether a recovery, this one or an earlier one, truncated the log and no leader epoch was started since."""
        return self._flush_state.needs_new_epoch

    def record_new_epoch(self) -> None:
        """Clear `needs_new_epoch`: the leader uses a new epoch for the following records."""
        self._flush_state.needs_new_epoch = False
        if self.on_maintenance_due is not None and self.needs_maintenance:
            self.on_maintenance_due()

    def end_offset_for_epoch(self, epoch: int) -> tuple[int, int]:
        """(epoch, end offset) as OffsetForLeaderEpoch requires: see `LeaderEpochCache.end_offset_for`."""
        return self.leader_epochs.end_offset_for(epoch, self.end_offset)

    # Appending

    def append(
        self, batch: Buffer, header: BatchHeader, leader_epoch: int, *, rewritten_header: bytes | None = None
    ) -> int:
        """Append one whole, validated batch at the end; returns its base offset.

        `rewritten_header` replaces the header of the batch (for log-append time). Nothing is durable yet.
        Raises `StorageError` when the disk refuses. On a full disk the bytes written so far are removed and the log
        stays in service; any other failure ends its service.
        """
        size = header.batch_length + 12
        active = self._active
        position = active.size
        if (
            self.failure is not None
            or position + size > self._preallocation.writable_bytes
            or leader_epoch != self.leader_epochs.latest_epoch
            or self._clock.monotonic() >= self._roll_at
            or self.end_offset - active.base_offset + header.last_offset_delta > RELATIVE_OFFSET_MAX
        ):
            active = self._prepare_append(position, size, leader_epoch, header)
            position = active.size
        base_offset = self.end_offset
        if rewritten_header is None:
            _PREFIX.pack_into(self._prefix, 0, base_offset, header.batch_length, leader_epoch)
            buffers: list[Buffer] = [self._prefix, memoryview(batch)[16:]]
            timestamp = header.max_timestamp_ms
        else:
            prefix = bytearray(rewritten_header)
            _PREFIX.pack_into(prefix, 0, base_offset, header.batch_length, leader_epoch)
            buffers = [prefix, memoryview(batch)[len(prefix) :]]
            timestamp = _MAX_TIMESTAMP.unpack_from(rewritten_header, _MAX_TIMESTAMP_POSITION)[0]
        try:
            active.file.write_at(buffers, position)  # type: ignore[union-attr]  # an active segment holds its file
        except OSError as error:
            raise self._append_failed(error, position) from error
        index = active.index
        if position >= index.next_entry_position or timestamp > index.max_timestamp_ms:  # type: ignore[union-attr]  # so its index
            index.add(base_offset - active.base_offset, position, timestamp)  # type: ignore[union-attr]  # the same
        active.size = position + size
        self.end_offset = active.end_offset = base_offset + header.last_offset_delta + 1
        return base_offset

    def _prepare_append(self, position: int, size: int, leader_epoch: int, header: BatchHeader) -> Segment:
        """Slow path of an append: refuse, start an epoch, roll or preallocate. Returns the segment to write to."""
        self._check_writable()
        if self._roll_at == _ROLL_TIME_UNKNOWN:
            self._roll_at = self._clock.monotonic() - self._active_age_s() + self.settings.segment_ms / 1000
        if leader_epoch < self.leader_epochs.latest_epoch:
            raise FencedLeaderEpoch(
                f"{self.directory}: leader epoch {leader_epoch} is older than {self.leader_epochs.latest_epoch}"
            )
        now = self._clock.monotonic()
        if self.end_offset - self._active.base_offset + header.last_offset_delta > RELATIVE_OFFSET_MAX:
            self._roll(now)  # an empty segment, too: there may be a gap behind its base offset
        elif position == 0:
            self._roll_at = now + self.settings.segment_ms / 1000
        elif position + size > self.settings.segment_bytes or now >= self._roll_at:
            self._roll(now)
        if self.leader_epochs.assign(leader_epoch, self.end_offset):
            self._flush_state.epochs_dirty = True
        active = self._active
        try:
            self._preallocation.extend(self._disk, active, active.size + size, self.settings.segment_bytes)
        except OSError as error:
            raise self._append_failed(error, active.size) from error
        return active

    def _check_writable(self) -> None:
        if self.failure is not None:
            raise self.failure
        if self.closed:
            raise StorageError(f"the log {self.directory} is closed")

    def _active_age_s(self) -> float:
        """Age of the active segment by its first batch's timestamp (as in Kafka); 0 where that is unknown, `segment_ms`
        at most.
        """
        active = self._active
        if active.size < HEADER_BYTES:
            return 0.0
        try:
            header = read_header(read_exactly(self._files.file(active), HEADER_BYTES, 0))
        except StorageError:
            return 0.0  # reported to the next reader of the segment
        if header.max_timestamp_ms < 0:
            return 0.0
        age_ms = self._clock.wall_ms() - header.max_timestamp_ms
        return min(max(age_ms, 0), self.settings.segment_ms) / 1000

    def _append_failed(self, error: OSError, position: int) -> StorageError:
        """The error for a failed write: on a full disk the write is undone, otherwise the log fails."""
        message = f"cannot write to {self._active.path}"
        if error.errno in DISK_FULL_ERRNOS:
            try:
                self._preallocation.truncate(self._active, position)
            except OSError as second:
                return self.fail(second, message)
            return StorageError(f"{message}: {error}")
        return self.fail(error, message)

    def fail(self, error: BaseException, message: str) -> StorageError:
        """Refuse all further writes; the listener is called once. Returns the error to raise."""
        if self.failure is None:
            failure = StorageError(f"{message}: {error}")
            failure.__cause__ = error
            self.failure = failure
            self.on_failure(failure)
        return self.failure

    def roll(self) -> bool:
        """Close the active segment now, so that retention and compaction can see it. False when it is empty.

        The new segment has to be synced: request it from `GroupCommit`. Raises `StorageError` as `append` does.
        """
        self._check_writable()
        if self.end_offset == self._active.base_offset:
            return False
        self._roll(self._clock.monotonic())
        return True

    def _roll(self, now: float) -> None:
        """Close the active segment and create the next one; on failure the log is unchanged, or its service ends.

        The old segment is synced before an end in the new one counts as durable.
        """
        segment = Segment(self.directory, self.end_offset)
        message = f"cannot create the segment {segment.path}"
        try:
            self._preallocation.release(self._active)
            segment.file = self._disk.open(segment.path, create=True)
        except OSError as error:
            if error.errno in _NO_FILE_OPENED_ERRNOS:
                raise StorageError(f"{message}: {error}") from error
            raise self.fail(error, message) from error
        try:
            segment.file.truncate(0)  # left over from an attempt before a restart
        except OSError as error:
            # The file exists: a batch appended beyond its base offset now would be lost.
            raise self.fail(error, message) from error
        segment.index = SparseIndex(self.settings.index_interval_bytes)
        closing = self._active
        self._flush_state.record_closed_segment(closing)
        self._segments.add(segment)
        self._active = segment
        self._preallocation.switch_segment(0)
        self._roll_at = now + self.settings.segment_ms / 1000
        if closing.end_offset <= self.start_offset:
            self._drop_trimmed()

    # Appending as a follower
    #
    # The leader assigned the offsets and stamped its epoch into each batch; both are kept. Where its log was compacted
    # there are gaps between its batches and within them, and the same gaps are here: they are allowed up to an end
    # offset that is written to disk first, so that recovery does not take them for damage. Between two segments
    # recovery accepts no gap: what is missing there may have been lost in a power failure.
    #
    # A batch is appended whole, checked and in order, or not at all; an epoch starts here no later than on the leader.

    def append_as_follower(
        self, records: memoryview, headers: Sequence[BatchHeader], *, sparse_end_offset: int
    ) -> int:
        """Append the leader's batches in `records`, each checked by `check_stored_batch`; returns how many were
        appended.

        The batches are not durable on return. Contiguous batches of one segment are written with one system call.
        `sparse_end_offset`: below this offset the leader's log may have gaps between batches. Raises `CorruptMessage`
        for a batch out of order, `FencedLeaderEpoch` for a batch of an older epoch, `ConcurrentChange` while a
        compaction swaps segments of this log, and `StorageError` as `append` does. After an error `end_offset` shows
        which batches were appended.
        """
        done = position = 0
        while done < len(headers):
            count, size = self._contiguous_run(headers, done)
            run = headers if count == len(headers) else headers[done : done + count]
            self._append_run(records[position : position + size], run, sparse_end_offset)
            done += count
            position += size
        return done

    def _contiguous_run(self, headers: Sequence[BatchHeader], first: int) -> tuple[int, int]:
        """(number of batches from `first` on that one write can append, their bytes)."""
        header = headers[first]
        epoch, following, size = header.leader_epoch, header.last_offset + 1, header.size
        space = self.settings.segment_bytes - self._active.size
        highest = self._active.base_offset + RELATIVE_OFFSET_MAX
        count = 1
        for header in islice(headers, first + 1, None):
            base_offset = header.base_offset
            last_offset, grown = (
                base_offset + header.last_offset_delta,
                size + header.batch_length + LENGTH_OFFSET,
            )
            if (
                base_offset != following
                or header.leader_epoch != epoch
                or grown > space
                or last_offset > highest
            ):
                break
            following = last_offset + 1
            size = grown
            count += 1
        return count, size

    def _append_run(self, run: memoryview, headers: Sequence[BatchHeader], sparse_end_offset: int) -> None:
        first, last = headers[0], headers[-1]
        end_before, base_offset, leader_epoch = self.end_offset, first.base_offset, first.leader_epoch
        if base_offset < end_before or (base_offset > end_before and base_offset > sparse_end_offset):
            raise CorruptMessage(
                f"{self.directory} ends at {end_before}, a batch from its leader begins at {base_offset}"
            )
        if leader_epoch < self.leader_epochs.latest_epoch and self.leader_epochs.truncate_to(end_before):
            # This broker was leader and wrote nothing: the leader does not know its epoch.
            self._flush_state.epochs_dirty = True
        if leader_epoch < self.leader_epochs.latest_epoch:
            raise FencedLeaderEpoch(
                f"{self.directory}: a batch of leader epoch {leader_epoch} after one of epoch "
                f"{self.leader_epochs.latest_epoch}"
            )
        sparse = [header for header in headers if header.record_count <= header.last_offset_delta]
        if sparse and sparse[-1].base_offset >= self.compaction.state.sparse_end_offset:
            self._allow_gaps(max(sparse_end_offset, sparse[-1].last_offset + 1))
        if base_offset > end_before:
            self._allow_gaps(sparse_end_offset)
            # Which epoch wrote the missing records is unknown: they are assigned to the new one. If the old epoch
            # appeared to reach further than it did, a replica with uncommitted records of it could keep them.
            if self.leader_epochs.assign(leader_epoch, end_before):
                self._flush_state.epochs_dirty = True
        if last.last_offset - end_before > RELATIVE_OFFSET_MAX:
            self._skip_to(base_offset)
        size = len(run)
        active = self._active
        position = active.size
        if (
            self.failure is not None
            or position + size > self._preallocation.writable_bytes
            or leader_epoch != self.leader_epochs.latest_epoch
            or self._clock.monotonic() >= self._roll_at
            or last.last_offset - active.base_offset > RELATIVE_OFFSET_MAX
        ):
            active = self._prepare_append(position, size, leader_epoch, first)
            position = active.size
        try:
            active.file.write_at([run], position)  # type: ignore[union-attr]  # an active segment holds its file
        except OSError as error:
            raise self._append_failed(error, position) from error
        index: SparseIndex = active.index  # type: ignore[assignment]  # an active segment holds its index
        segment_base = active.base_offset
        for header in headers:
            if position >= index.next_entry_position or header.max_timestamp_ms > index.max_timestamp_ms:
                index.add(header.base_offset - segment_base, position, header.max_timestamp_ms)
            position += header.batch_length + LENGTH_OFFSET
        active.size = position
        self.end_offset = active.end_offset = last.last_offset + 1

    def _allow_gaps(self, below: int) -> None:
        """Record on disk, unless it is recorded, that offsets below `below` may be missing. Durable on return;
        blocks.
        """
        if self.failure is not None:
            raise self.failure
        if below > self.compaction.state.sparse_end_offset:
            if self.compaction.is_busy:
                raise ConcurrentChange(f"{self.directory} is being compacted; append when that is done")
            state = self.compaction.state._replace(sparse_end_offset=below)
            try:
                write_state(self._disk, self.directory, state)
            except (OSError, DirectoryNotSynced) as error:
                message = f"cannot record the gaps of {self.directory}"
                if isinstance(error, OSError) and error.errno in DISK_FULL_ERRNOS:
                    # Nothing was appended; the next attempt may find space.
                    raise StorageError(f"{message}: {error}") from error
                raise self.fail(error, message) from error
            self.compaction.state = state
        self._segments.sparse_end_offset = max(self._segments.sparse_end_offset, below)

    def _skip_to(self, offset: int) -> None:
        """Continue at `offset`, after a gap wider than a segment may span, in a new segment that begins there. Blocks.

        The checkpoint has to record it first: above the checkpoint recovery takes offsets missing between two segments
        for lost.
        """
        self._check_idle("append")
        self.end_offset = self._active.end_offset = offset
        self._run_inline(self.prepare_flush(), self.finish_flush)
        self._run_inline(self.prepare_maintenance(), self.finish_maintenance)
        if self._flush_state.checkpoint.durable_end_offset != offset:
            raise self.fail(
                StorageError("no space for the checkpoint"), f"cannot record the gaps of {self.directory}"
            )
        self._roll(self._clock.monotonic())

    # Reading

    def read(self, offset: int, max_bytes: int, limit_offset: int) -> LogSlice | None:
        """Whole batches from the one that contains `offset` on, all below `limit_offset`, from one segment.

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
        known = self._read_positions.get(offset)
        segment = known[0] if known is not None else self._segments.segment_containing(offset)
        if segment.checked is not None:
            return self._read_checked(segment, offset, max_bytes, limit_offset)
        segment, position = known if known is not None else self._segments.locate(offset)
        if position >= segment.size:  # remembered as the end of a segment that was active then
            segment, position = self._segments.locate(offset)
            if position >= segment.size:  # compaction left nothing from here on
                return None
        if segment.checked is not None:  # a later one than that of `offset`, which compaction removed
            return self._read_checked(segment, segment.base_offset, max_bytes, limit_offset)
        segment_end, stop = segment.end_offset, segment.size
        next_offset = segment_end
        if limit_offset < segment_end:
            if limit_offset == self.durable_end_offset and segment is self._flush_state.segment:
                stop, next_offset = self._flush_state.position, limit_offset
            else:
                stop, next_offset = self._segments.batch_position(segment, limit_offset)
            if stop <= position:
                return None
        file = segment.file or self._files.file(segment)
        if stop - position > max_bytes:
            stop, next_offset = self._segments.batch_boundary(
                segment, file, position, stop, max_bytes, next_offset
            )
        positions = self._read_positions
        # One batch larger than asked for: only its own header gives its end, and it may be damaged.
        if next_offset not in positions and stop - position <= max_bytes:
            if len(positions) >= READ_POSITIONS_MAX:
                del positions[next(iter(positions))]
            if stop < segment.size or segment is self._active:
                positions[next_offset] = (segment, stop)
        return LogSlice(file, position, stop - position, next_offset)

    def read_range(
        self, first_offset: int, last_offset: int, max_bytes: int, limit_offset: int
    ) -> LogSlice | None:
        """The whole batches that contain `first_offset` to `last_offset`, from one segment; raises what `read` raises.

        At most `max_bytes`, but at least one batch; so it may end early. Its `next_offset` follows its last batch.
        Where compaction removed the whole range it is the batch that follows.
        """
        partly_read = self._read_positions.partly_read
        if partly_read is not None and partly_read.first_offset <= first_offset:
            segment, position, length, _, next_offset = partly_read
            if (
                first_offset >= self.start_offset
                and last_offset < next_offset <= limit_offset
                and segment.checked is None  # otherwise damage may have been found meanwhile
            ):
                return LogSlice(segment.file or self._files.file(segment), position, length, next_offset)
        found = self.read(first_offset, max_bytes, limit_offset)
        if found is None or found.next_offset <= last_offset + 1:
            return found
        segment = self._segments.segments_from(found.next_offset - 1)[0]
        start = max(
            self._files.index(segment).position_before_offset(last_offset - segment.base_offset),
            found.position,
        )
        end = found.position + found.length
        for position, header in walk(found.file, start, end, segment.base_offset):
            if header.base_offset + header.last_offset_delta >= last_offset:
                next_offset = header.base_offset + header.last_offset_delta + 1
                stop = position + header.batch_length + PREFIX_BYTES
                positions = self._read_positions
                if stop < end and next_offset not in positions:
                    if len(positions) >= READ_POSITIONS_MAX:
                        del positions[next(iter(positions))]
                    positions[next_offset] = (segment, stop)
                length = stop - found.position
                if position == found.position and next_offset > last_offset + 1:
                    positions.partly_read = BatchPosition(
                        segment, position, length, header.base_offset, next_offset
                    )
                return LogSlice(found.file, found.position, length, next_offset)
        return found

    def batch_headers(self, from_offset: int) -> Iterator[BatchHeader]:
        """The headers of all batches from the one that contains `from_offset` to the current end.

        Damaged batches in closed segments are logged and skipped.
        """
        return (header for _, _, header in self._walk(from_offset, skip_damaged=True))

    def batches(self, from_offset: int) -> Iterator[bytes]:
        """The bytes of all batches from the one that contains `from_offset` to the current end."""
        found = self._walk(from_offset)
        return (read_exactly(file, header.batch_length + 12, position) for file, position, header in found)

    def _walk(
        self, from_offset: int, *, skip_damaged: bool = False
    ) -> Iterator[tuple[DiskFile, int, BatchHeader]]:
        from_offset = max(from_offset, self.start_offset)
        if from_offset >= self.end_offset:
            return iter(())
        return self._segments.walk(from_offset, skip_damaged=skip_damaged)

    def verify(self) -> int:
        """Read and check everything the log holds; the number of batches. Raises `CorruptLog` at the first damage.

        It checks what a reader cannot: that offsets follow each other and that leader epochs are the known ones
        (neither is covered by a batch's CRC). It blocks for as long as reading the log takes: not for a broker's loop.
        """
        count = 0
        for segment in self._segments.segments:
            file, end = self._files.file(segment), segment.end_offset
            # All records below the start may be deleted.
            sparse_end = max(self._segments.sparse_end_offset, self.start_offset)
            count += verify_segment(
                file, segment.base_offset, segment.size, end, self.leader_epochs, sparse_end
            )
        return count

    def offset_for_time(self, timestamp_ms: int, limit_offset: int) -> tuple[int, int, int] | None:
        """(offset, timestamp in ms, leader epoch) of the first record at or after a timestamp; None when there is
        none.
        """
        return timestamp_search.offset_for_time(
            self._segments,
            self._files,
            timestamp_ms,
            start=self.start_offset,
            limit=min(limit_offset, self.end_offset),
            output_bytes_max=self.settings.decompressed_batch_bytes_max,
        )

    def max_timestamp(self, limit_offset: int) -> tuple[int, int, int] | None:
        """(offset, timestamp in ms, leader epoch) of the first record with the largest timestamp (KIP-734)."""
        return timestamp_search.max_timestamp(
            self._segments,
            self._files,
            start=self.start_offset,
            limit=min(limit_offset, self.end_offset),
            output_bytes_max=self.settings.decompressed_batch_bytes_max,
        )

    # Verification before the first delivery (see `verification`)

    def _read_checked(
        self, segment: Segment, offset: int, max_bytes: int, limit_offset: int
    ) -> LogSlice | None:
        """`read` from a segment of which not everything is verified: of the batches in one intact range.

        Raises `DamagedRange`, and `VerificationPending` while `on_check_due` has more checked than is done here, or
        while a repair is pending.
        """
        checked = segment.checked
        assert checked is not None
        found = checked.find(offset)
        if found is None:
            found = self._check_now(segment, checked, offset, max_bytes)
        if found.damage:
            if self.repair_pending:
                raise VerificationPending(f"{segment.path}: offset {offset} is being repaired")
            raise damaged_range_error(segment.path, found)
        stop, next_offset = min(segment.size, found.end_position), min(segment.end_offset, found.end_offset)
        known = self._read_positions.get(offset)
        if known is not None and known[0] is segment and found.position <= known[1] < stop:
            position = known[1]
        else:
            position, _ = self._segments.batch_position_within(
                segment, offset, found.position, stop, next_offset
            )
        if position >= stop:  # compaction left nothing from here on
            self._segments.raise_if_segments_missing(segment, offset)
            if segment is self._active:
                return None
            following = self._segments.next_segment(segment)
            return self.read(following.base_offset, max_bytes, limit_offset)
        if limit_offset < next_offset:
            if limit_offset == self.durable_end_offset and segment is self._flush_state.segment:
                stop, next_offset = self._flush_state.position, limit_offset
            else:
                stop, next_offset = self._segments.batch_position_within(
                    segment, limit_offset, position, stop, next_offset
                )
            if stop <= position:
                return None
        file = segment.file or self._files.file(segment)
        if stop - position > max_bytes:
            stop, next_offset = self._segments.batch_boundary(
                segment, file, position, stop, max_bytes, next_offset
            )
        elif (
            stop - position < max_bytes
            and stop < segment.size
            and self.on_check_due is not None
            and checked.find(next_offset) is None
        ):
            self.on_check_due(segment, next_offset)  # it would have returned more
        positions = self._read_positions
        if next_offset not in positions and next_offset < segment.end_offset:
            if len(positions) >= READ_POSITIONS_MAX:
                del positions[next(iter(positions))]
            positions[next_offset] = (segment, stop)
        return LogSlice(file, position, stop - position, next_offset)

    def _check_now(
        self, segment: Segment, checked: CheckedRanges, offset: int, max_bytes: int
    ) -> CheckedRange:
        """The checked range that contains `offset`, after a check of as much as may delay other requests."""
        if checked.error is not None:
            error, checked.error = checked.error, None
            raise error
        inline = self.on_check_due is None
        bytes_max = OPEN_RANGE_END if inline else min(max_bytes, CHECK_BYTES_MAX)
        while (found := checked.find(offset)) is None:
            file, task = self.check_task(segment, offset, with_index=inline)
            batches_max = OPEN_RANGE_END if inline else CHECK_BATCHES_MAX
            if not inline and task.position + LARGE_BATCH_BYTES_MIN <= task.end_position:
                size = self._size_at(file, task.position)
                if size >= LARGE_BATCH_BYTES_MIN:
                    batches_max = 0
                elif size >= CHECK_LARGE_BATCH_BYTES_MIN:
                    bytes_max = min(max_bytes, CHECK_LARGE_BYTES_MAX)
            try:
                result = check_batches(
                    file,
                    task,
                    bytes_max=bytes_max,
                    batches_max=batches_max,
                    delimit=inline,
                    in_pieces=inline,
                )
            except StorageError as error:
                if inline or not is_unreadable(error):
                    raise
                result = CheckResult([], task.position, task.offset, done=False)  # for the other thread
            self.record_check(segment, result)
            if inline and not result.ranges:
                raise CorruptLog(f"{segment.path} has no batch at {task.position}, where one should begin")
            if not inline and (found := checked.find(offset)) is None:
                self.on_check_due(segment, offset)  # type: ignore[misc]  # not inline: there is a listener
                raise VerificationPending(f"{segment.path}: offset {offset} is being verified")
        return found

    def _size_at(self, file: DiskFile, position: int) -> int:
        """Size of the batch at `position` according to its header; `LARGE_BATCH_BYTES_MIN` if it cannot be read. Raises
        `StorageError`."""
        try:
            return read_header(read_exactly(file, HEADER_BYTES, position)).size
        except StorageError as error:
            if not is_unreadable(error):
                raise
            return LARGE_BATCH_BYTES_MIN  # the other thread finds out how much is unreadable

    def check_task(self, segment: Segment, offset: int, *, with_index: bool) -> tuple[DiskFile, CheckTask]:
        """The file of a segment, and what to check of it for a reader at `offset`, which is not checked.

        `with_index`: with the entries of the index, which are needed to delimit damage. Raises `StorageError`.
        """
        checked = segment.checked
        assert checked is not None
        index, base = self._files.index(segment), segment.base_offset
        relative, position = index.entry_before_position(index.position_before_offset(offset - base))
        start = base + relative
        if start > offset:  # the first batch of a compacted segment begins above it
            position, start = 0, base
        before = checked.range_before(offset)
        if before is not None and before.end_offset >= start:
            position, start = before.end_position, before.end_offset
        following = checked.range_after(start)
        end_position, end_offset = segment.size, segment.end_offset
        if following is not None:
            end_position, end_offset = following.position, following.offset
        entries = [(base + each[0], each[1]) for each in index.entries()] if with_index else ()
        task = CheckTask(
            position,
            start,
            end_position,
            end_offset,
            segment.size,
            max(self._segments.sparse_end_offset, self.start_offset),
            self.leader_epochs.entries(),
            entries,
        )
        return self._files.file(segment), task

    def record_check(self, segment: Segment, result: CheckResult) -> None:
        """Record what a check found; `on_damage` is called for each damaged range that reaches above the start of the
        log."""
        checked = segment.checked
        if checked is None:
            return
        for found in result.ranges:
            checked.add(found)
            if found.damage and found.end_offset > self.start_offset and self.on_damage is not None:
                self.on_damage(segment, found)
        if checked.is_complete(segment.size, segment.end_offset):
            segment.checked = None

    def record_check_failure(self, segment: Segment, error: StorageError) -> None:
        """The disk failed while a segment was checked: nothing on disk counts as verified, and its next reader gets the
        error."""
        self._forget_checks(segment)
        if segment.checked is not None:
            segment.checked.error = error

    def closed_segments_to_check(self) -> list[Segment]:
        """The closed segments, for a scrub."""
        return self._segments.segments[:-1]

    def has_segment(self, segment: Segment) -> bool:
        """Whether a segment is in the log and closed."""
        return segment is not self._active and self._segments.contains((segment,))

    def scrub_task(self, segment: Segment, position: int, offset: int, *, with_index: bool) -> CheckTask:
        """What to check of a closed segment from an anchor on, whatever is known about it. Raises `StorageError`."""
        entries = self._files.index(segment).entries() if with_index else ()
        base = segment.base_offset
        return CheckTask(
            position,
            offset,
            segment.size,
            segment.end_offset,
            segment.size,
            max(self._segments.sparse_end_offset, self.start_offset),
            self.leader_epochs.entries(),
            [(base + each[0], each[1]) for each in entries],
        )

    def record_scrub(self, segment: Segment, result: CheckResult) -> None:
        """Record what a scrub found in a closed segment."""
        if segment.checked is None:
            if not any(found.damage for found in result.ranges):
                return
            whole = CheckedRange(0, segment.size, segment.base_offset, segment.end_offset)
            segment.checked = CheckedRanges([whole])
            self._read_positions.clear()
        self.record_check(segment, result)

    # Repair of closed segments (see `repair`)

    def damaged_segments(self, offsets: Iterable[int] = ()) -> list[Segment]:
        """The segments in which something at or above the start of the log is known to be damaged, and those that
        contain `offsets` there; in order."""
        suspects = {
            self._segments.segment_containing(offset)
            for offset in offsets
            if self.start_offset <= offset < self.end_offset
        }
        return [
            segment
            for segment in self._segments.segments
            if segment in suspects or self._damaged_ranges(segment)
        ]

    def first_damaged_offset(self, segment: Segment, offsets: Iterable[int]) -> int:
        """The first offset that is known to be damaged in one of the `damaged_segments(offsets)`; if none is, the first
        of `offsets` in it."""
        known = [found.offset for found in self._damaged_ranges(segment)] or [
            offset for offset in offsets if segment.base_offset <= offset < segment.end_offset
        ]
        return max(min(known, default=segment.base_offset), self.start_offset)

    def _damaged_ranges(self, segment: Segment) -> list[CheckedRange]:
        """What is known to be damaged of a segment, above the start of the log."""
        if segment.checked is None:
            return []
        return [found for found in segment.checked.damaged_ranges() if found.end_offset > self.start_offset]

    def is_active(self, segment: Segment) -> bool:
        """Whether appends go to this segment."""
        return segment is self._active

    def is_sparse(self, segment: Segment) -> bool:
        """Whether compaction may have left gaps in a segment."""
        return segment.base_offset < self._segments.sparse_end_offset

    def segment_file(self, segment: Segment) -> DiskFile:
        """The file of a segment. Raises `StorageError`."""
        return self._files.file(segment)

    def begin_repair(self, segment: Segment) -> bool:
        """Keep the segment in its place until `finish_repair`. False: not now; try again.

        As for compaction, no checkpoint on disk may name the segment, because its size may change.
        """
        if segment.end_offset > self.compaction.replaceable_end_offset:
            self.request_checkpoint()
            return False
        if self.compaction.is_busy or self.maintenance_running or self.repairing:
            return False
        # Until the swap is done nobody may find the new file under the name of the old one. If the old one is missing,
        # readers verify the new one as they would have verified the old one.
        with contextlib.suppress(CorruptLog):
            segment.file = self._files.file(segment)
        self.repairing = True
        return True

    def finish_repair(self, segment: Segment, size: int, index: SparseIndex | None) -> None:
        """Read the repaired file, which has the name of `segment` by now, from here on. `index` None: the repair
        failed."""
        self.repairing = False
        if index is not None and not self.closed:
            new = Segment(self.directory, segment.base_offset, size)
            new.end_offset, new.index = segment.end_offset, index
            segment.replaced = True
            self._segments.replace((segment,), new)
            self._flush_state.record_replaced_segments((segment,), new)
            self._read_positions.clear()
        self._drop_trimmed()
        if self.on_maintenance_due is not None:
            self.on_maintenance_due()

    def forget_checks(self, segment: Segment | None = None) -> None:
        """Verify a segment, or everything, again on its next read."""
        for each in self._segments.segments if segment is None else (segment,):
            self._forget_checks(each)

    def forget_checks_at(self, offset: int) -> None:
        """Verify the segment that contains `offset` again on its next read, unless damage is known there."""
        segment = self._segments.segment_containing(offset)
        known = segment.checked.find(offset) if segment.checked is not None else None
        if known is None or not known.damage:
            self._read_positions.clear()
            self._forget_checks(segment)

    def _forget_checks(self, segment: Segment) -> None:
        if not segment.size:
            return
        active = segment is self._active
        segment.checked = (
            CheckedRanges.for_active_segment(segment.size, segment.end_offset) if active else CheckedRanges()
        )

    # Trimming and truncating

    def trim_to(self, offset: int) -> None:
        """Delete the records below `offset`. Maintenance removes segments wholly below it once the start is on disk."""
        if offset > self.end_offset:
            raise OffsetOutOfRange(f"cannot trim to {offset}, the log ends at {self.end_offset}")
        if offset <= self.start_offset:
            return
        self.start_offset = offset
        self._drop_trimmed()
        self._read_positions.clear()
        if self.on_maintenance_due is not None:
            self.on_maintenance_due()

    def _drop_trimmed(self) -> None:
        """Remove segments wholly below the start from the list; while compaction swaps segments, after that swap."""
        if not self.compaction.is_busy and not self.repairing:
            self._flush_state.record_trimmed_segments(self._segments.drop_below(self.start_offset))

    def truncate_to(self, offset: int) -> None:
        """Remove every batch that reaches to `offset` or beyond, as a follower does after a leader change (KIP-101).

        Durable on return; blocks. Raises `ConcurrentChange` while a sync of this log runs (`unfinished_job_count`).
        """
        if self.failure is not None:
            raise self.failure
        if offset >= self.end_offset:
            return
        if offset < self.start_offset:
            raise OffsetOutOfRange(f"cannot truncate to {offset}, the log starts at {self.start_offset}")
        self._check_idle("truncate")
        segment, position, end = self._segments.truncation_point(offset)
        end = max(end, self.start_offset)
        self._read_positions.clear()
        try:
            self.compaction.truncate_state(self._disk, end)
            self._truncate_files(segment, position, end)
        except (OSError, DirectoryNotSynced) as error:
            raise self.fail(error, f"cannot truncate {self.directory}") from error
        self._active = segment
        self._preallocation.switch_segment(position)
        self.end_offset = self.durable_end_offset = end

    def _check_idle(self, action: str) -> None:
        if self.unfinished_job_count or self.compaction.is_busy or self.repairing:
            raise ConcurrentChange(f"{self.directory} is being synced; {action} when that is done")

    def _truncate_files(self, segment: Segment, position: int, end_offset: int) -> None:
        """Shorten the log to `position` of `segment`, where `end_offset` is; that segment becomes the active one.

        First the checkpoint is lowered (a checkpoint ahead of the log would be reported as loss by recovery), then
        segments are removed, newest first, then the last one is shortened. A crash in between leaves a log that opens
        with an earlier correct state. Blocks; raises `OSError`.
        """
        disk, directory, state = self._disk, self.directory, self._flush_state
        state.generation += 1
        sequence, start = state.checkpoint.sequence + 1, min(self.start_offset, end_offset)
        checkpoint = Checkpoint(
            sequence, end_offset, segment.base_offset, position, start, state.needs_new_epoch
        )
        if end_offset < state.end_offset:
            state.checkpoint = write_both_slots(disk, f"{directory}/{CHECKPOINT_NAME}", checkpoint)
        index = SparseIndex(self.settings.index_interval_bytes)
        for at, header in walk(self._files.file(segment), 0, position, segment.base_offset, WALK_CHUNK_BYTES):
            index.add(header.base_offset - segment.base_offset, at, header.max_timestamp_ms)
        for removed in reversed(self._segments.segments_from(segment.base_offset)[1:]):
            removed.file = None
            remove_segment_files(disk, removed)
        for path in (segment.index_path, f"{directory}/{TIMESTAMPS_NAME}"):
            if disk.exists(path):
                disk.remove(path)
        file = segment.file or disk.open(segment.path)
        file.truncate(position)
        state.sync_closed_before(segment)
        file.sync()
        disk.sync_directory(directory)
        if self.leader_epochs.truncate_to(end_offset) or state.epochs_dirty:
            write_checksummed(disk, f"{directory}/{EPOCHS_NAME}", self.leader_epochs.encode(), durable=True)
        if end_offset > state.end_offset:
            # The log was trimmed beyond its durable end, into a batch that was removed: only a checkpoint explains the
            # gap.
            state.checkpoint = write_both_slots(disk, f"{directory}/{CHECKPOINT_NAME}", checkpoint)
        self._segments.drop_after(segment)
        segment.file, segment.index, segment.max_timestamp_ms = file, index, None
        segment.size, segment.end_offset = position, end_offset
        segment.checked = CheckedRanges.for_active_segment(position, end_offset) if position else None
        state.record_truncation(segment, position, end_offset)

    def reset_to(self, offset: int) -> None:
        """Delete everything and continue at `offset`, empty (Kafka: truncateFullyAndStartAt). Durable on return;
        blocks.

        A crash in between leaves a log that opens, empty, before or at the new start. Raises `ConcurrentChange` while a
        sync of this log runs (`unfinished_job_count`), and `StorageError`, with which the log has failed.
        """
        if self.failure is not None:
            raise self.failure
        self._check_idle("reset it")
        self._read_positions.clear()
        try:
            self._delete_records()
            self._restart_at(offset)
        except (OSError, DirectoryNotSynced) as error:
            raise self.fail(error, f"cannot reset {self.directory}") from error

    def _delete_records(self) -> None:
        """Leave nothing but a checkpoint with that content: recovery creates a new log that begins where this ended.

        The checkpoint is written first, or missing segments would be loss. Then the segments, in two steps: if the one
        named by the checkpoint were gone while an earlier one is not, recovery would miss the records between them.
        """
        disk, directory, state = self._disk, self.directory, self._flush_state
        state.generation += 1
        state.checkpoint = write_both_slots(
            disk, f"{directory}/{CHECKPOINT_NAME}", state.next_checkpoint(state.end_offset)
        )
        segments = self._segments.segments
        at = segments.index(state.segment) if state.segment in segments else 0
        older = [*state.take_trimmed_segments(), *segments[:at]]
        for step in (older, segments[at:]):
            for segment in step:
                self._files.evict(segment)
                segment.file = None
                remove_segment_files(disk, segment)
            disk.sync_directory(directory)
        if disk.exists(f"{directory}/{TIMESTAMPS_NAME}"):
            disk.remove(f"{directory}/{TIMESTAMPS_NAME}")
        self.compaction.truncate_state(disk, 0)
        write_checksummed(disk, f"{directory}/{EPOCHS_NAME}", LeaderEpochCache().encode(), durable=True)

    def _restart_at(self, offset: int) -> None:
        """Give an empty log a new start: the checkpoint, then a segment, in the order in which a log is created."""
        disk, state = self._disk, self._flush_state
        checkpoint = Checkpoint(
            state.checkpoint.sequence + 1, offset, offset, 0, offset, state.needs_new_epoch
        )
        state.checkpoint = write_both_slots(disk, f"{self.directory}/{CHECKPOINT_NAME}", checkpoint)
        segment = Segment(self.directory, offset)
        segment.file = disk.open(segment.path, create=True)
        segment.file.truncate(0)
        segment.file.sync()
        disk.sync_directory(self.directory)
        segment.index = SparseIndex(self.settings.index_interval_bytes)
        self.leader_epochs.truncate_to(0)
        self._segments.reset(segment)
        state.record_reset(segment)
        self._active = segment
        self._preallocation.switch_segment(0)
        self.start_offset = self.durable_start_offset = self.end_offset = self.durable_end_offset = offset
        self._roll_at = self._clock.monotonic() + self.settings.segment_ms / 1000

    # Flushing: the values that `GroupCommit` passes to its thread, and their results

    def prepare_flush(self) -> FlushJob | None:
        """The job that makes the log durable up to its current end; None when it is durable."""
        if self.failure is not None or self.closed:
            return None
        job = self._flush_state.prepare_sync(self._active, self.leader_epochs)
        if job is not None:
            self.unfinished_job_count += 1
        return job

    def finish_flush(self, job: FlushJob, error: BaseException | None) -> None:
        """Record the result of a sync and call the listeners. `LogDiskFull`: nothing was synced, the next sync does
        it.
        """
        self.unfinished_job_count -= 1
        if isinstance(error, LogDiskFull):
            self._flush_state.retry_sync(job)
            self._log_disk_full(error)
        elif error is not None:
            self.fail(error, f"cannot sync {self.directory}")
        elif self.failure is None and self._flush_state.record_sync(job):
            self.durable_end_offset = job.end_offset
            self._preallocation.awaited_syncs += 1
            self.on_durable(job.end_offset)

    def exclude_from_awaited_syncs(self) -> None:
        """Do not count the next sync as one that a request waits for: see `Preallocation`."""
        self._preallocation.awaited_syncs -= 1

    @property
    def needs_maintenance(self) -> bool:
        """Whether the checkpoint, indexes or timestamps on disk are older than the durable end of the log, or files of
        deleted segments are to be removed."""
        return (
            self.failure is None
            and not self.closed
            and self._flush_state.needs_maintenance(self.start_offset)
        )

    @property
    def checkpoint_lag_bytes(self) -> int:
        """Approximate number of durable bytes that would be read and written again after a crash."""
        return self._flush_state.checkpoint_lag_bytes

    def prepare_maintenance(self, *, closing: bool = False) -> MaintenanceJob | None:
        """The maintenance that is due: checkpoint, index files, removal of trimmed segments. None: nothing is due."""
        if self.compaction.is_busy or self.repairing:
            return None
        if not self.needs_maintenance and not (
            closing and self._flush_state.needs_maintenance(self.start_offset, self._segments.active)
        ):
            return None
        self.unfinished_job_count += 1
        self.maintenance_running = True
        return self._flush_state.prepare_maintenance(
            self._segments.segments, self.start_offset, self.settings.index_snapshot_bytes, closing=closing
        )

    def finish_maintenance(self, job: MaintenanceJob, error: BaseException | None) -> None:
        """Record the result of maintenance. `LogDiskFull`: it is due again."""
        self.unfinished_job_count -= 1
        self.maintenance_running = False
        if isinstance(error, LogDiskFull):
            self._flush_state.retry_maintenance(job, checkpoint_written=error.checkpoint_written)
            self._log_disk_full(error)
            return
        if error is not None:
            self.fail(error, f"cannot maintain {self.directory}")
            return
        self._disk_full_logged = False
        self._flush_state.record_checkpoint(job)
        self.durable_start_offset = max(self.durable_start_offset, job.checkpoint.start_offset)
        # Only now: if the epochs were forgotten first, a crash could bring back records without theirs.
        self.leader_epochs.trim_to(job.checkpoint.start_offset)
        for due in job.indexes:
            if due.closed:
                due.segment.max_timestamp_ms = due.sparse_index.max_timestamp_ms
                due.segment.index = None
        if self._flush_state.checkpoints_pending and self.on_maintenance_due is not None:
            self.on_maintenance_due()

    def _log_disk_full(self, error: LogDiskFull) -> None:
        """One line for each period of a full disk."""
        if not self._disk_full_logged:
            logger.warning("log_disk_full", extra=fields(directory=self.directory, error=str(error)))
        self._disk_full_logged = True

    def sync(self) -> None:
        """Make the log durable, blocking. A broker uses `GroupCommit` instead. Raises `StorageError`."""
        self._run_inline(self.prepare_flush(), self.finish_flush)
        self._run_inline(self.prepare_maintenance(), self.finish_maintenance)

    def _run_inline(self, job: FlushJob | MaintenanceJob | None, finish: Callable[..., None]) -> None:
        """Run a job on this thread, blocking, and finish it. Raises `StorageError`."""
        if self.failure is not None:
            raise self.failure
        if job is None:
            return
        try:
            job.run(self._disk)
        except LogDiskFull as error:
            finish(job, error)
            if isinstance(job, FlushJob):  # the records are not durable; maintenance can wait
                raise
            return
        except OSError as error:
            finish(job, error)
            raise self.failure or StorageError(str(error)) from error
        finish(job, None)

    # Compaction (see `compaction_run`)

    @property
    def generation(self) -> int:
        """Changes with each truncation, and when the log is closed: work prepared before has no effect."""
        return self._flush_state.generation

    def resume_after_compaction(self) -> None:
        """Resume what had to wait for a segment swap, or for a change of the compaction state."""
        self.compaction.is_busy = False
        self._drop_trimmed()
        if self.on_maintenance_due is not None:
            self.on_maintenance_due()

    def request_checkpoint(self) -> None:
        """Have a checkpoint written although the log did not move: compaction needs one that names newer segments."""
        self._flush_state.request_checkpoints()
        if self.on_maintenance_due is not None and self.needs_maintenance:
            self.on_maintenance_due()

    # Closing

    def close(self, *, save: bool = True) -> None:
        """Close the files. With `save` everything is made durable first, and the next recovery reads no batches.

        Safe, but less thorough, while a sync of this log still runs. Raises `StorageError` when saving fails.
        """
        if self.closed:
            return
        try:
            if save and self.failure is None:
                self._save()
        finally:
            self._release()

    def _save(self) -> None:
        self._run_inline(self.prepare_flush(), self.finish_flush)
        if not self.unfinished_job_count:
            self._run_inline(self.prepare_maintenance(closing=True), self.finish_maintenance)
        try:
            self._preallocation.release(self._active)
        except OSError as error:
            raise StorageError(f"cannot shorten {self._active.path}: {error}") from error

    def _release(self) -> None:
        """Drop all files; an append takes the slow path, which refuses."""
        self.closed = True
        self._preallocation.limit(-1)
        self._read_positions.clear()
        self._flush_state.release()
        # They refer back to the log: descriptors must not wait for the garbage collector.
        self.on_durable = self.on_failure = _no_listener
        self.on_check_due = self.on_damage = None
        for segment in self._segments.segments:
            self._files.evict(segment)

    def delete(self) -> None:
        """Remove the log and everything in its directory. Raises `ConcurrentChange` while a sync of this log runs."""
        self._check_idle("delete it")
        self._release()
        try:
            self._disk.remove_tree(self.directory)
        except OSError as error:
            raise StorageError(f"cannot remove {self.directory}: {error}") from error
