"""One log: an append-only sequence of record batches on disk, divided into segments.

Owns the directory of one partition: segments, their indexes, the leader epochs and the checkpoint. Only the log of the
partition's leader assigns offsets.

Invariants:
* `start_offset <= durable_end_offset <= end_offset`; all offsets between start and end are present, in order, except
  the gaps that compaction leaves below `sparse_end_offset`.
* `durable_end_offset` was the end offset when a sync started that has *finished*. It only increases, except through
  `truncate_to` and `reset_to`. `durable_start_offset` is a start offset that is on disk: recovery finds no records
  below it.
* A batch is written with one system call, at the end of the active segment. When the next segment is created, the
  active one is closed and never appended to again; its file then ends where its last batch ends. The file of the active
  segment may be longer, because it is preallocated with zeros. A sync that does not have to record a new file length
  takes a third less time.
* After a failed write that could not be undone, or a failed sync, `failure` is set and the log refuses every later
  append. After a failed fsync the page cache no longer shows which bytes are on disk, so a second fsync would report
  success for lost bytes.

All methods are called on the broker's event loop. Only `FlushJob.run` and `MaintenanceJob.run` (see `flush_state`) run
on another thread; they do not access the `Log`.
"""

from __future__ import annotations

import contextlib
import logging
import math
import struct
import weakref
from itertools import islice
from typing import TYPE_CHECKING, Final, NamedTuple

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
from mansio.ports import DISK_FULL_ERRNOS, TRANSIENT_ERRNOS
from mansio.storage import search_plan, timestamp_search
from mansio.storage.active_files import ActiveFilesInUse
from mansio.storage.checked_ranges import OPEN_RANGE_END, CheckedRange, CheckedRanges, damaged_range_error
from mansio.storage.checkpoint import CHECKPOINT_NAME, Checkpoint, write_both_slots
from mansio.storage.checksummed_file import write_checksummed
from mansio.storage.cleaner.segment_swap import SegmentSwap
from mansio.storage.compaction_state import DirectoryNotSynced, write_state
from mansio.storage.file_cache import FileCache
from mansio.storage.flush_state import FlushJob, FlushState, LogDiskFull
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
from mansio.storage.settings import RELATIVE_OFFSET_MAX, LogSettings
from mansio.storage.verification import CheckResult, CheckTask, check_batches, is_unreadable
from mansio.tracebacks import copied, without_traceback
from mansio.wire.batch.record_batch import (
    CONTROL_FLAG,
    HEADER_BYTES,
    LOG_OVERHEAD_BYTES,
    TRANSACTIONAL_FLAG,
    read_header,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence

    from mansio.ports import Buffer, Clock, Disk, DiskFile
    from mansio.storage.flush_state import MaintenanceJob
    from mansio.storage.recovery.recovery import RecoveredLog
    from mansio.storage.search_plan import SearchPlan
    from mansio.wire.batch.record_batch import BatchHeader

__all__ = ["Log", "LogSettings", "LogSlice", "SegmentInfo"]

READ_POSITIONS_MAX = 64
"""Maximum number of positions of sequential readers that one log caches."""

CHECK_BYTES_MAX = 256 << 10
"""Approximate number of bytes that a read verifies at a time on the event loop, in at most `CHECK_BATCHES_MAX` batches.
It goes on while `LogListener.may_check` allows it; another thread verifies the rest."""

CHECK_LARGE_BYTES_MAX = 1 << 20
"""The same limit for batches of at least `CHECK_LARGE_BATCH_BYTES_MIN`, which take less time to verify than a switch to
another thread."""

CHECK_LARGE_BATCH_BYTES_MIN = 64 << 10
CHECK_BATCHES_MAX = 512
LARGE_BATCH_BYTES_MIN = 1 << 20
"""A batch of at least this size is never verified on the event loop."""

_ROLL_TIME_UNKNOWN = -math.inf
"""Value of `_roll_at` after the log was opened. The first append computes the actual time."""

_PREFIX = struct.Struct(">qii")  # base offset, batch length, leader epoch: the fields that the broker sets
_MAX_TIMESTAMP = struct.Struct(">q")
_MAX_TIMESTAMP_POSITION = 35
_NEWER_ATTRIBUTES = TRANSACTIONAL_FLAG | CONTROL_FLAG
"""Attributes of batches that the first release neither accepts nor writes."""

logger = logging.getLogger(__name__)


def _ignore(*_: object) -> None:
    """Do nothing."""


def _always() -> bool:
    return True


class LogListener(NamedTuple):
    """What a log calls (`Log.listen`).

    * `on_durable(durable_end_offset)` after each sync that moved the durable end offset,
    * `on_failure(error)` once, when the log fails,
    * `on_check_due(segment, offset)` when batches from `offset` on should be verified on another thread; None: the
      reading thread verifies all batches,
    * `may_check()` whether a read may verify some batches itself, as the event loop has not been held for long,
    * `on_damage(segment, range)` for each damaged range that is found.
    """

    on_durable: Callable[[int], object] = _ignore
    on_failure: Callable[[StorageError], object] = _ignore
    on_check_due: Callable[[Segment, int], object] | None = None
    on_damage: Callable[[Segment, CheckedRange], object] = _ignore
    may_check: Callable[[], bool] = _always


_NO_LISTENER: Final = LogListener()
"""That of a log without a partition, also after it was closed."""


class Log:
    """The log of one partition. `Log.open` creates it.

    `before_newer_format()` is called before a control batch or a batch of a transaction is written, and where a hook of
    the partition is about to write a file that the first release cannot read. It may raise `OSError`; then nothing is
    written. Any thread calls it.

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
        before_newer_format: Callable[[], object],
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
        self._listener = _NO_LISTENER
        self._on_maintenance_due: Callable[[], object] | None = None
        self.before_newer_format = before_newer_format
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
        self._is_internal = False
        self._gives_up_file = False
        """Whether appends that can wait are refused, because others wait for the file of the active segment."""
        self.compaction = SegmentSwap(
            self._segments, files, self._flush_state, self._read_positions, recovery.compaction
        )

    def listen(self, listener: LogListener) -> None:
        """Call the methods of a listener from now on, in place of an earlier one."""
        self._listener = listener

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
        before_newer_format: Callable[[], object] = lambda: None,
    ) -> Log:
        """Open and recover the log in `directory`, or create one: see `mansio.storage.recovery`.

        `leader_epoch` >= 0 is the epoch of the following appends. `files` is the cache that all logs of a broker share.
        All records in the log are durable on return. Raises `CorruptLog` if durable records are damaged, `StorageError`
        if the disk fails.
        """
        settings = settings or LogSettings()
        try:
            recovered = recover(disk, directory, settings)
        except OSError as error:
            raise StorageError(f"cannot open the log {directory}: {error}") from error
        log = cls(disk, clock, directory, settings, files or FileCache(disk), recovered, before_newer_format)
        if leader_epoch > log.leader_epochs.latest_epoch:
            log.assign_leader_epoch(leader_epoch)
        return log

    # Properties

    @property
    def size_bytes(self) -> int:
        """Total size of all segments in bytes, without preallocated space."""
        return sum(segment.size for segment in self._segments.segments)

    def segments(self) -> list[SegmentInfo]:
        """Descriptions of all segments, oldest first."""
        return [*self.closed_segments(), self.active_segment()]

    def closed_segments(self) -> Iterator[SegmentInfo]:
        """Yield the descriptions of all segments except the active one, oldest first.

        The log must not change while the iterator is in use.
        """
        for segment in islice(self._segments.segments, len(self._segments.segments) - 1):
            yield segment_info(segment, self._disk, self._files)

    def active_segment(self) -> SegmentInfo:
        """Return a description of the active segment, to which batches are appended."""
        return segment_info(self._active, self._disk, self._files)

    def segment_base_offsets(self) -> list[int]:
        """Return the base offsets of all segments, oldest first."""
        return [segment.base_offset for segment in self._segments.segments]

    def on_maintenance_due(self, listener: Callable[[], object] | None) -> None:
        """Call `listener` when `prepare_maintenance` may return a job; None: call none."""
        self._on_maintenance_due = listener

    @property
    def is_maintained(self) -> bool:
        """Whether a listener is called when maintenance is due."""
        return self._on_maintenance_due is not None

    def update_settings(self, settings: LogSettings) -> None:
        """Replace the settings; the next append uses the new ones."""
        self._roll_at += (settings.segment_ms - self.settings.segment_ms) / 1000
        self._preallocation.limit(settings.segment_bytes)
        self.settings = settings

    def assign_leader_epoch(self, epoch: int) -> None:
        """Record that `epoch` starts at the current end of the log. No effect if `epoch` is not newer than the last."""
        if self.leader_epochs.assign(epoch, self.end_offset):
            self._flush_state.epochs_dirty = True

    @property
    def needs_new_epoch(self) -> bool:
        """Whether a recovery, now or at an earlier start, truncated the log and no leader epoch was started since."""
        return self._flush_state.needs_new_epoch

    def record_new_epoch(self) -> None:
        """Clear `needs_new_epoch`: the leader uses a new epoch for the following records."""
        self._flush_state.needs_new_epoch = False
        if self._on_maintenance_due is not None and self.needs_maintenance:
            self._on_maintenance_due()

    def end_offset_for_epoch(self, epoch: int) -> tuple[int, int]:
        """(largest known epoch at or below `epoch`, its end offset): see `LeaderEpochCache.end_offset_for`."""
        return self.leader_epochs.end_offset_for(epoch, self.end_offset)

    # Appending

    def append(
        self,
        batch: Buffer,
        header: BatchHeader,
        leader_epoch: int,
        *,
        rewritten_header: bytes | None = None,
        uses_reserve: bool = False,
    ) -> int:
        """Append one whole, validated batch; returns its base offset. The batch is not durable on return.

        `rewritten_header` replaces the header of the batch (for log-append time). `uses_reserve`: the caller cannot
        wait for a file (`wait_for_file`). Raises `FencedLeaderEpoch` for an older epoch, `ActiveFilesInUse`, after
        which nothing has changed, and `StorageError` if the disk fails. On a full disk the partly written batch is
        removed and the log accepts later appends; after any other disk error the log has failed (`failure`).
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
            active = self._prepare_append(position, size, leader_epoch, header, uses_reserve=uses_reserve)
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
            if header.attributes & _NEWER_ATTRIBUTES:
                self.before_newer_format()
            active.file.write_at(buffers, position)  # type: ignore[union-attr]  # an active segment holds its file
        except OSError as error:
            raise self._handle_append_error(error, position) from error
        index = active.index
        if position >= index.next_entry_position or timestamp > index.max_timestamp_ms:  # type: ignore[union-attr]  # so its index
            index.add(base_offset - active.base_offset, position, timestamp)  # type: ignore[union-attr]  # the same
        active.size = position + size
        self.end_offset = active.end_offset = base_offset + header.last_offset_delta + 1
        return base_offset

    def _prepare_append(
        self, position: int, size: int, leader_epoch: int, header: BatchHeader, *, uses_reserve: bool
    ) -> Segment:
        """Slow path of an append: validate, start an epoch, roll or preallocate. Returns the segment to write to."""
        self._check_writable()
        if self._roll_at == _ROLL_TIME_UNKNOWN:
            self._roll_at = self._clock.monotonic() - self._active_age_s() + self.settings.segment_ms / 1000
        if leader_epoch < self.leader_epochs.latest_epoch:
            raise FencedLeaderEpoch(
                f"{self.directory}: leader epoch {leader_epoch} is older than {self.leader_epochs.latest_epoch}"
            )
        self._open_active_file(uses_reserve=uses_reserve)
        now = self._clock.monotonic()
        if self.end_offset - self._active.base_offset + header.last_offset_delta > RELATIVE_OFFSET_MAX:
            self._roll(
                now, uses_reserve=uses_reserve
            )  # an empty segment, too: there may be a gap behind its base offset
        elif position == 0:
            self._roll_at = now + self.settings.segment_ms / 1000
        elif position + size > self.settings.segment_bytes or now >= self._roll_at:
            self._roll(now, uses_reserve=uses_reserve)
        if self.leader_epochs.assign(leader_epoch, self.end_offset):
            self._flush_state.epochs_dirty = True
        active = self._active
        try:
            self._preallocation.extend(self._disk, active, active.size + size, self.settings.segment_bytes)
        except OSError as error:
            raise self._handle_append_error(error, active.size) from error
        if self._gives_up_file:
            self._preallocation.limit(-1)  # the next append takes the slow path, too
        return active

    def _open_active_file(self, *, uses_reserve: bool = False) -> None:
        """Open the file of the active segment if it was closed. Raises `ActiveFilesInUse` and, without a descriptor,
        `StorageError`, after both of which nothing changed; after any other `StorageError` the log has failed."""
        active, files = self._active, self._files.active
        if active.file is not None:
            if self._gives_up_file and not uses_reserve and not self._is_internal:
                if files.has_waiting:
                    raise ActiveFilesInUse("others wait for the file of this active segment")
                self._gives_up_file = False
                files.record_kept(self)
            return
        files.make_room(self, is_internal=self._is_internal, uses_reserve=uses_reserve)
        message = f"cannot open {active.path}"
        try:
            file = self._files.open_file(lambda: self._disk.open(active.path), appending=self)
            size = file.size()
        except OSError as error:
            if error.errno in TRANSIENT_ERRNOS:
                raise StorageError(f"{message}: {error}") from error
            raise self.fail(error, message) from error
        if size < active.size:  # someone else has changed the directory
            raise self.fail(StorageError(f"it has {size} bytes instead of {active.size}"), message)
        active.file = file
        self._files.evict(active)  # readers use this file from now on
        self._preallocation.switch_segment(active.size)
        files.record_open(self, is_internal=self._is_internal)

    def wait_for_file(
        self,
        waiter: Hashable,
        attempt: Callable[[], object],
        call_after_job: Callable[[Callable[[], None]], bool],
    ) -> bool:
        """Call `attempt` when a file that was refused with `ActiveFilesInUse` may be opened (`ActiveFiles.wait`)."""
        return self._files.active.wait(waiter, attempt, call_after_job)

    def record_active_file(self, *, is_internal: bool = False) -> None:
        """Record in the file cache that the file of the active segment is open, if it is; this log or others may close
        theirs. Called when the log joins those of a broker. `is_internal`: it belongs to an internal topic."""
        self._is_internal = is_internal
        if self._active.file is not None:
            self._files.active.record_opened_log(self, is_internal=is_internal)

    def close_active_file(self) -> bool:
        """Close the file of the active segment until the next append, unless it has unflushed bytes or is in use. One
        that a response refers to stays open until it is sent; it is not closed if these are too many.

        Returns whether it is closed now.
        """
        active = self._active
        if self.failure is not None:  # nothing is written to it any more
            active.file = None
            self._flush_state.release_closed_files()
            self._files.active.record_unflushed_closed(self, 0)
            return True
        if active.file is None:
            return True
        if (
            self.closed
            or self.unfinished_job_count
            or self.repairing
            or self.compaction.is_busy
            or not self._flush_state.is_flushed(active)
        ):
            return False
        try:
            self._preallocation.release(active)
        except OSError:
            return False  # the next append gets the error
        self._preallocation.limit(-1)  # the next append takes the slow path
        reference = weakref.ref(active.file)
        active.file = None
        if (file := reference()) is not None:
            if self._files.is_limited:
                active.file = file
                return False
            self._files.record_sent(file)
        self._gives_up_file = False
        return True

    def give_up_active_file(self) -> None:
        """Refuse appends that can wait, until the file was closed or the queue is empty."""
        self._gives_up_file = True
        self._preallocation.limit(-1)  # the next append takes the slow path

    def _check_writable(self) -> None:
        if self.failure is not None:
            raise copied(self.failure)
        if self.closed:
            raise StorageError(f"the log {self.directory} is closed")

    def _active_age_s(self) -> float:
        """Age of the active segment in seconds: the time since its first batch's timestamp, as in Kafka.

        The result is at most `segment_ms`, and 0 if the timestamp is unknown.
        """
        active = self._active
        if active.size < HEADER_BYTES:
            return 0.0
        try:
            header = read_header(read_exactly(self._files.file(active), HEADER_BYTES, 0))
        except StorageError:
            return 0.0  # the next reader of the segment gets the error
        if header.max_timestamp_ms < 0:
            return 0.0
        age_ms = self._clock.wall_ms() - header.max_timestamp_ms
        return min(max(age_ms, 0), self.settings.segment_ms) / 1000

    def _handle_append_error(self, error: OSError, position: int) -> StorageError:
        """Handle a failed write at `position` and return the error to raise.

        On a full disk the partly written bytes are removed; after any other error the log has failed.
        """
        message = f"cannot write to {self._active.path}"
        if error.errno in TRANSIENT_ERRNOS:
            try:
                self._preallocation.truncate(self._active, position)
            except OSError as second:
                return self.fail(second, message)
            return StorageError(f"{message}: {error}")
        return self.fail(error, message)

    def fail(self, error: BaseException, message: str) -> StorageError:
        """Set `failure`, so that the log refuses all further writes, and call `on_failure`. Returns the error to raise.

        No effect on a log that has failed already: its first failure is returned.
        """
        if self.failure is None:
            failure = StorageError(f"{message}: {error}")
            failure.__cause__ = without_traceback(error)
            self.failure = failure
            self._listener.on_failure(failure)
        return copied(self.failure)

    def roll(self) -> bool:
        """Close the active segment now, so that retention and compaction can include it. Returns False if it is empty.

        The caller then requests a flush of the log from `GroupCommit`, which makes the new segment durable. Raises
        `ActiveFilesInUse` and `StorageError` as `append` does.
        """
        self._check_writable()
        if self.end_offset == self._active.base_offset:
            return False
        self._roll(self._clock.monotonic())
        return True

    def _roll(self, now: float, *, uses_reserve: bool = False) -> None:
        """Close the active segment and create the next one. After an error the log is unchanged, or it has failed.

        Flush jobs sync the old segment before the new one, so no end offset in the new segment is durable earlier.
        """
        self._open_active_file(uses_reserve=uses_reserve)
        segment = Segment(self.directory, self.end_offset)
        message = f"cannot create the segment {segment.path}"
        files = self._files.active
        files.make_room(self, is_internal=self._is_internal, uses_reserve=uses_reserve)
        try:
            self._preallocation.release(self._active)
            segment.file = self._files.open_file(
                lambda: self._disk.open(segment.path, create=True), appending=self
            )
        except OSError as error:
            if error.errno in TRANSIENT_ERRNOS:
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
        files.record_open(self, is_internal=self._is_internal)
        files.record_unflushed_closed(self, self._flush_state.unflushed_closed_count)
        self._preallocation.switch_segment(0)
        self._roll_at = now + self.settings.segment_ms / 1000
        if closing.end_offset <= self.start_offset:
            self._drop_trimmed()

    # Appending as a follower
    #
    # The leader has assigned the offsets and the leader epoch of each batch, and the follower keeps both. If the
    # leader's log was compacted, there are gaps between its batches and within them, and the follower's log has the
    # same gaps. They are allowed below `sparse_end_offset`, which is written to disk first, so that recovery does not
    # treat them as damage. Recovery accepts no gap between two segments, because records that are missing there may
    # have been lost in a power failure.
    #
    # A batch is appended as a whole, checked and in order, or not at all. No epoch starts at a higher offset in the
    # follower's log than in the leader's.

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
        """(count, bytes) of the batches from index `first` on that one write can append."""
        header = headers[first]
        epoch, following, size = header.leader_epoch, header.last_offset + 1, header.size
        space = self.settings.segment_bytes - self._active.size
        highest = self._active.base_offset + RELATIVE_OFFSET_MAX
        count = 1
        for header in islice(headers, first + 1, None):
            base_offset = header.base_offset
            last_offset, grown = (
                base_offset + header.last_offset_delta,
                size + header.batch_length + LOG_OVERHEAD_BYTES,
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
            self._record_gaps_allowed(max(sparse_end_offset, sparse[-1].last_offset + 1))
        if base_offset > end_before:
            self._record_gaps_allowed(sparse_end_offset)
            # Which epoch wrote the missing records is unknown: they are assigned to the new one. If the old epoch
            # appeared to reach further than it did, a replica with uncommitted records of it could keep them.
            if self.leader_epochs.assign(leader_epoch, end_before):
                self._flush_state.epochs_dirty = True
        if last.last_offset - end_before > RELATIVE_OFFSET_MAX:
            self._start_segment_after_gap(base_offset)
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
            active = self._prepare_append(position, size, leader_epoch, first, uses_reserve=True)
            position = active.size
        try:
            for header in headers:
                if header.attributes & _NEWER_ATTRIBUTES:
                    self.before_newer_format()
            active.file.write_at([run], position)  # type: ignore[union-attr]  # an active segment holds its file
        except OSError as error:
            raise self._handle_append_error(error, position) from error
        index: SparseIndex = active.index  # type: ignore[assignment]  # an active segment holds its index
        segment_base = active.base_offset
        for header in headers:
            if position >= index.next_entry_position or header.max_timestamp_ms > index.max_timestamp_ms:
                index.add(header.base_offset - segment_base, position, header.max_timestamp_ms)
            position += header.batch_length + LOG_OVERHEAD_BYTES
        active.size = position
        self.end_offset = active.end_offset = last.last_offset + 1

    def _record_gaps_allowed(self, end_offset: int) -> None:
        """Record in the compaction state, durably, that offsets below `end_offset` may be missing. Blocks."""
        if self.failure is not None:
            raise copied(self.failure)
        if end_offset > self.compaction.state.sparse_end_offset:
            if self.compaction.is_busy:
                raise ConcurrentChange(f"{self.directory} is being compacted; append when that is done")
            state = self.compaction.state._replace(sparse_end_offset=end_offset)
            try:
                write_state(self._disk, self.directory, state)
            except (OSError, DirectoryNotSynced) as error:
                message = f"cannot record the gaps of {self.directory}"
                if isinstance(error, OSError) and error.errno in TRANSIENT_ERRNOS:
                    # Nothing was appended; the next attempt may find space.
                    raise StorageError(f"{message}: {error}") from error
                raise self.fail(error, message) from error
            self.compaction.state = state
        self._segments.sparse_end_offset = max(self._segments.sparse_end_offset, end_offset)

    def _start_segment_after_gap(self, offset: int) -> None:
        """Start a new segment at `offset`, after a gap that is wider than one segment can span. Blocks.

        A checkpoint at `offset` is written first: above the checkpoint recovery treats offsets that are missing between
        two segments as lost.
        """
        self._raise_if_busy("append to")
        self.end_offset = self._active.end_offset = offset
        self._run_inline(self.prepare_flush(), self.finish_flush)
        self._run_inline(self.prepare_maintenance(), self.finish_maintenance)
        if self._flush_state.checkpoint.durable_end_offset != offset:
            raise self.fail(
                StorageError("no space for the checkpoint"), f"cannot record the gaps of {self.directory}"
            )
        self._roll(self._clock.monotonic(), uses_reserve=True)

    # Reading

    def read(self, offset: int, max_bytes: int, limit_offset: int) -> LogSlice | None:
        """Return the whole batches of one segment from the one that contains `offset` on, up to `limit_offset`.

        The slice has at most `max_bytes`, but at least one batch. Returns None if there is no batch below
        `limit_offset`. Raises `OffsetOutOfRange` if `offset` is below the start or above the end of the log,
        `DamagedRange` if its batch is damaged, `VerificationPending` if the caller has to retry after a verification or
        repair, `StorageError` if the disk fails.
        """
        end = self.end_offset
        if offset < self.start_offset or offset > end:
            raise OffsetOutOfRange(
                f"offset {offset} is not in [{self.start_offset}, {end}] of {self.directory}"
            )
        if offset >= limit_offset or offset == end:
            return None
        known = self._read_positions.get(offset)
        if known is not None and known[1] >= known[0].size and known[0] is not self._active:
            known = None  # the position was the end of the active segment, which was closed since
        segment = known[0] if known is not None else self._segments.segment_containing(offset)
        if segment.checked is not None:
            return self._read_checked(segment, offset, max_bytes, limit_offset)
        segment, position = known if known is not None else self._segments.locate(offset)
        if position >= segment.size:  # compaction removed all batches from `offset` on
            return None
        if segment.checked is not None:  # compaction removed the batch of `offset`; this is a later segment
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
        # The end of a single batch larger than `max_bytes` is known only from its own header, which may be damaged.
        if next_offset not in positions and stop - position <= max_bytes:
            if len(positions) >= READ_POSITIONS_MAX:
                del positions[next(iter(positions))]
            if stop < segment.size or segment is self._active:
                positions[next_offset] = (segment, stop)
        return LogSlice(file, position, stop - position, next_offset)

    def read_range(
        self, first_offset: int, last_offset: int, max_bytes: int, limit_offset: int
    ) -> LogSlice | None:
        """Return the whole batches of one segment that contain `first_offset` to `last_offset`. Raises as `read` does.

        The slice has at most `max_bytes`, but at least one batch, so it may end before `last_offset`; its `next_offset`
        follows its last batch. If compaction removed all records of the range, the slice is the next batch after it.
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
        """Return the headers of all batches from the one that contains `from_offset` up to the current end of the log.

        Damaged batches in closed segments are logged and skipped.
        """
        return (header for _, _, header in self._walk(from_offset, skip_damaged=True))

    def batches(self, from_offset: int) -> Iterator[bytes]:
        """Return the bytes of all batches from the one that contains `from_offset` up to the current end of the log."""
        found = self._walk(from_offset)
        return (read_exactly(file, header.batch_length + 12, position) for file, position, header in found)

    def headers_with_control_batches(
        self, from_offset: int, on_damage: Callable[[int], object] = _ignore
    ) -> Iterator[tuple[BatchHeader, bytes | None]]:
        """Return the headers that `batch_headers` returns, each with the bytes of its batch if it is a control batch,
        otherwise None.

        `on_damage` is called where damaged batches are skipped, with the end offset of the batch before them."""
        found = self._walk(from_offset, skip_damaged=True, on_damage=on_damage)
        return (
            (header, read_exactly(file, header.batch_length + 12, position) if header.is_control else None)
            for file, position, header in found
        )

    def _walk(
        self,
        from_offset: int,
        *,
        skip_damaged: bool = False,
        on_damage: Callable[[int], object] = _ignore,
    ) -> Iterator[tuple[DiskFile, int, BatchHeader]]:
        from_offset = max(from_offset, self.start_offset)
        if from_offset >= self.end_offset:
            return iter(())
        return self._segments.walk(from_offset, skip_damaged=skip_damaged, on_damage=on_damage)

    def verify(self) -> int:
        """Read and check all batches of the log; returns their number. Raises `CorruptLog` at the first damage.

        Also checks that offsets are contiguous and that the leader epochs match the leader-epoch cache, which the CRC
        of a batch does not cover. Blocks while it reads the whole log, so it must not be called on the event loop.
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
        """(offset, timestamp in ms, leader epoch) of the first record at or after `timestamp_ms`.

        Only records below `limit_offset` count. None if there is no such record.
        """
        return timestamp_search.offset_for_time(
            self._segments,
            self._files,
            timestamp_ms,
            start=self.start_offset,
            limit=min(limit_offset, self.end_offset),
        )

    def max_timestamp(self, limit_offset: int) -> tuple[int, int, int] | None:
        """(offset, timestamp in ms, leader epoch) of the first record with the largest timestamp (KIP-734).

        Only records below `limit_offset` count. None if there is no record.
        """
        return timestamp_search.max_timestamp(
            self._segments,
            self._files,
            start=self.start_offset,
            limit=min(limit_offset, self.end_offset),
        )

    def plan_search(self, offset: int, end_offset: int, files_max: int) -> SearchPlan:
        """Return the files in which a search by key or id finds the offsets from `offset` to below `end_offset`; see
        `search_plan`. `offset` must not be below the start of the log."""
        return search_plan.plan_search(self._segments, self._files, offset, end_offset, files_max)

    def bytes_between(self, offset: int, end_offset: int) -> int:
        """Return about how many bytes the batches of a range of offsets have."""
        return search_plan.bytes_between(self._segments, self._files, offset, end_offset)

    # Verification before the first delivery (see `verification`)

    def _read_checked(
        self, segment: Segment, offset: int, max_bytes: int, limit_offset: int
    ) -> LogSlice | None:
        """Implement `read` for a segment that is not completely verified: read within one intact range.

        Raises `DamagedRange`, and `VerificationPending` while another thread verifies the batch of `offset` or while a
        repair is pending.
        """
        checked = segment.checked
        assert checked is not None
        found = checked.find(offset)
        if found is None:
            found = self._check_inline(segment, checked, offset, max_bytes)
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
        if stop - position < max_bytes and next_offset < limit_offset and position < stop < segment.size:
            found = self._check_further(segment, checked, found, position + max_bytes)
            stop, next_offset = (
                min(segment.size, found.end_position),
                min(segment.end_offset, found.end_offset),
            )
        if position >= stop:  # compaction removed all batches of this segment from `offset` on
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
            and self._listener.on_check_due is not None
            and checked.find(next_offset) is None
        ):
            self._listener.on_check_due(
                segment, next_offset
            )  # the slice is short because the next batches are not verified
        positions = self._read_positions
        if next_offset not in positions and next_offset < segment.end_offset:
            if len(positions) >= READ_POSITIONS_MAX:
                del positions[next(iter(positions))]
            positions[next_offset] = (segment, stop)
        return LogSlice(file, position, stop - position, next_offset)

    def _check_inline(
        self, segment: Segment, checked: CheckedRanges, offset: int, max_bytes: int
    ) -> CheckedRange:
        """Check batches from `offset` on, within the limits for the event loop; returns the range with `offset`.

        Raises `VerificationPending` if the batch of `offset` exceeds these limits.
        """
        if checked.error is not None:
            error, checked.error = checked.error, None
            raise copied(error)
        inline = self._listener.on_check_due is None
        while (found := checked.find(offset)) is None:
            if inline or self._listener.may_check():
                self._check_some(segment, offset, max_bytes, inline=inline)
            if not inline and (found := checked.find(offset)) is None:
                self._listener.on_check_due(segment, offset)  # type: ignore[misc]  # not inline: there is a listener
                raise VerificationPending(f"{segment.path}: offset {offset} is being verified")
        return found

    def _check_further(
        self, segment: Segment, checked: CheckedRanges, found: CheckedRange, end_position: int
    ) -> CheckedRange:
        """Check batches behind an intact range up to a position, as far as the event loop may be held; return the range
        that has grown. Another thread checks the rest in advance only if this is too little for a read."""
        while (
            found.end_position < end_position
            and segment.checked is not None  # otherwise it has been verified to its end
            and self._listener.on_check_due is not None
            and checked.find(found.end_offset) is None
            and self._listener.may_check()
        ):
            self._check_some(segment, found.end_offset, end_position - found.end_position, inline=False)
            longer = checked.find(found.offset)
            if longer is None or longer.end_offset <= found.end_offset:  # a large batch, or damage
                break
            found = longer
        return found

    def _check_some(self, segment: Segment, offset: int, max_bytes: int, *, inline: bool) -> None:
        """Check batches from `offset` on; unless `inline`, within the limits of one check on the event loop."""
        file, task = self.check_task(segment, offset, with_index=inline)
        bytes_max = OPEN_RANGE_END if inline else min(max_bytes, CHECK_BYTES_MAX)
        batches_max = OPEN_RANGE_END if inline else CHECK_BATCHES_MAX
        if not inline and task.position + LARGE_BATCH_BYTES_MIN <= task.end_position:
            size = self._batch_size_at(file, task.position)
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
            result = CheckResult(
                [], task.position, task.offset, done=False
            )  # another thread repeats the check
        self.record_check(segment, result)
        if inline and not result.ranges:
            raise CorruptLog(f"{segment.path} has no batch at {task.position}, where one should begin")

    def _batch_size_at(self, file: DiskFile, position: int) -> int:
        """Size of the batch at `position` in bytes, from its header. Raises `StorageError`.

        Returns `LARGE_BATCH_BYTES_MIN` if the disk cannot read the header.
        """
        try:
            return read_header(read_exactly(file, HEADER_BYTES, position)).size
        except StorageError as error:
            if not is_unreadable(error):
                raise
            return LARGE_BATCH_BYTES_MIN  # so that another thread determines how much is unreadable

    def check_task(self, segment: Segment, offset: int, *, with_index: bool) -> tuple[DiskFile, CheckTask]:
        """Return the file of a segment, and the task that checks the batch of `offset`, which no checked range
        contains.

        `with_index`: the task includes the entries of the index, which are needed to delimit damage. Raises
        `StorageError`.
        """
        checked = segment.checked
        assert checked is not None
        index, base = self._files.index(segment), segment.base_offset
        relative, position = index.entry_before_position(index.position_before_offset(offset - base))
        start = base + relative
        if start > offset:  # the first batch of a compacted segment begins above `offset`
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
        """Record the result of a check, and call `on_damage` for each damaged range above the start of the log."""
        checked = segment.checked
        if checked is None:
            return
        for found in result.ranges:
            checked.add(found)
            if found.damage and found.end_offset > self.start_offset:
                self._listener.on_damage(segment, found)
        if checked.is_complete(segment.size, segment.end_offset):
            segment.checked = None

    def on_check_failed(self, segment: Segment, error: StorageError) -> None:
        """Record that the disk failed while a segment was checked.

        The batches that are on disk count as not verified, and the segment's next reader gets the error.
        """
        self._forget_checks(segment)
        if segment.checked is not None:
            segment.checked.error = without_traceback(error)

    def closed_segments_to_check(self) -> list[Segment]:
        """Return the closed segments, oldest first, which the scrubber checks."""
        return self._segments.segments[:-1]

    def has_segment(self, segment: Segment) -> bool:
        """Whether a segment still belongs to the log and is closed."""
        return segment is not self._active and self._segments.contains((segment,))

    def scrub_task(self, segment: Segment, position: int, offset: int, *, with_index: bool) -> CheckTask:
        """Return the task that checks a closed segment from the anchor (`position`, `offset`) to its end.

        Unlike `check_task` it ignores which ranges were checked before. `with_index`: see `check_task`. Raises
        `StorageError`.
        """
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
        """Record the result of a scrub of a closed segment."""
        if segment.checked is None:
            if not any(found.damage for found in result.ranges):
                return
            whole = CheckedRange(0, segment.size, segment.base_offset, segment.end_offset)
            segment.checked = CheckedRanges([whole])
            self._read_positions.clear()
        self.record_check(segment, result)

    # Repair of closed segments (see `repair`)

    def damaged_segments(self, offsets: Iterable[int] = ()) -> list[Segment]:
        """Return the segments with known damage, and those that contain one of `offsets`; in offset order.

        Damage and offsets below the start of the log are ignored.
        """
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
        """Return the first offset of `segment` that is known to be damaged; if there is none, the first of `offsets` in
        it.

        `segment` is one of `damaged_segments(offsets)`.
        """
        known = [found.offset for found in self._damaged_ranges(segment)] or [
            offset for offset in offsets if segment.base_offset <= offset < segment.end_offset
        ]
        return max(min(known, default=segment.base_offset), self.start_offset)

    def _damaged_ranges(self, segment: Segment) -> list[CheckedRange]:
        """Return the ranges of a segment that are known to be damaged and reach above the start of the log."""
        if segment.checked is None:
            return []
        return [found for found in segment.checked.damaged_ranges() if found.end_offset > self.start_offset]

    def is_active(self, segment: Segment) -> bool:
        """Whether `segment` is the active segment, to which batches are appended."""
        return segment is self._active

    def is_sparse(self, segment: Segment) -> bool:
        """Whether compaction may have left gaps between the offsets of a segment."""
        return segment.base_offset < self._segments.sparse_end_offset

    def segment_file(self, segment: Segment) -> DiskFile:
        """Return the open file of a segment. Raises `StorageError`."""
        return self._files.file(segment)

    def begin_repair(self, segment: Segment) -> bool:
        """Prevent other changes of a closed segment until `finish_repair`. Returns False if the caller has to retry.

        As for compaction, no checkpoint on disk may refer to the segment, because its size may change.
        """
        if segment.end_offset > self.compaction.replaceable_end_offset:
            self.request_checkpoint()
            return False
        if self.compaction.is_busy or self.maintenance_running or self.repairing:
            return False
        # Until `finish_repair` readers must use the old file, also after the copy got its name. If the old file is
        # missing, readers verify the copy as they would have verified the old one.
        with contextlib.suppress(CorruptLog):
            segment.file = self._files.file(segment)
        self.repairing = True
        return True

    def finish_repair(self, segment: Segment, size: int, index: SparseIndex | None) -> None:
        """End a repair: replace `segment` by the repaired file, which already has its name.

        `size` and `index` are those of the repaired file; `index` None: the repair failed and the segment stays.
        """
        self.repairing = False
        if index is not None and not self.closed:
            new = Segment(self.directory, segment.base_offset, size)
            new.end_offset, new.index = segment.end_offset, index
            segment.replaced = True
            self._segments.replace((segment,), new)
            self._flush_state.record_replaced_segments((segment,), new)
            self._read_positions.clear()
        self._drop_trimmed()
        if self._on_maintenance_due is not None:
            self._on_maintenance_due()

    def forget_checks(self, segment: Segment | None = None) -> None:
        """Treat the stored batches of `segment`, or of all segments, as not verified: the next read verifies them."""
        for each in self._segments.segments if segment is None else (segment,):
            self._forget_checks(each)

    def forget_checks_at(self, offset: int) -> None:
        """Call `forget_checks` for the segment that contains `offset`, unless `offset` is known to be damaged."""
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
        """Raise the log start offset to `offset`: the records below it are deleted. Raises `OffsetOutOfRange`.

        The next maintenance job writes the new start offset to disk, then removes the segments wholly below it.
        """
        if offset > self.end_offset:
            raise OffsetOutOfRange(f"cannot trim to {offset}, the log ends at {self.end_offset}")
        if offset <= self.start_offset:
            return
        self.start_offset = offset
        self._drop_trimmed()
        self._read_positions.clear()
        if self._on_maintenance_due is not None:
            self._on_maintenance_due()

    def _drop_trimmed(self) -> None:
        """Remove segments wholly below the start from the segment list, unless a swap or repair is running."""
        if not self.compaction.is_busy and not self.repairing:
            self._flush_state.record_trimmed_segments(self._segments.drop_below(self.start_offset))

    def truncate_to(self, offset: int) -> None:
        """Remove every batch with a record at or above `offset`, as a follower does after a leader change (KIP-101).

        Durable on return; blocks. Raises `OffsetOutOfRange`, `ConcurrentChange` while a flush job, compaction or repair
        of this log runs, `StorageError` if the disk fails.
        """
        if self.failure is not None:
            raise copied(self.failure)
        if offset >= self.end_offset:
            return
        if offset < self.start_offset:
            raise OffsetOutOfRange(f"cannot truncate to {offset}, the log starts at {self.start_offset}")
        self._raise_if_busy("truncate")
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
        self._record_replaced_file()

    def _record_replaced_file(self) -> None:
        """Record the file of the active segment after a truncation, which needed no room: one log at a time is
        truncated, and has nothing to flush then, so that its file is closed again if too many are open."""
        self._files.active.record_unflushed_closed(self, 0)
        self._files.active.record_opened_log(self, is_internal=self._is_internal)

    def _raise_if_busy(self, action: str) -> None:
        if self.unfinished_job_count or self.compaction.is_busy or self.repairing:
            raise ConcurrentChange(
                f"cannot {action} {self.directory} while a flush, compaction or repair runs"
            )

    def _truncate_files(self, segment: Segment, position: int, end_offset: int) -> None:
        """Truncate the log to `end_offset`, which is at `position` of `segment`; that segment becomes the active one.

        First the checkpoint is lowered (recovery would report a checkpoint ahead of the log as loss), then the later
        segments are removed, newest first, then `segment` is truncated. A log that a crash interrupts in between can be
        opened, with an end offset between the old and the new one. Blocks; raises `OSError`.
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
        file = segment.file or self._files.open_file(lambda: disk.open(segment.path), appending=self)
        file.truncate(position)
        state.sync_closed_before(segment)
        file.sync()
        disk.sync_directory(directory)
        if self.leader_epochs.truncate_to(end_offset) or state.epochs_dirty:
            write_checksummed(disk, f"{directory}/{EPOCHS_NAME}", self.leader_epochs.encode(), durable=True)
        if end_offset > state.end_offset:
            # The log was trimmed beyond its durable end, to an offset in a batch that is removed now. The checkpoint
            # shows recovery that no record is missing.
            state.checkpoint = write_both_slots(disk, f"{directory}/{CHECKPOINT_NAME}", checkpoint)
        self._segments.drop_after(segment)
        segment.file, segment.index, segment.max_timestamp_ms = file, index, None
        segment.size, segment.end_offset = position, end_offset
        segment.checked = CheckedRanges.for_active_segment(position, end_offset) if position else None
        state.record_truncation(segment, position, end_offset)

    def reset_to(self, offset: int) -> None:
        """Delete all records and start the empty log at `offset` (Kafka: truncateFullyAndStartAt).

        Durable on return; blocks. A log that a crash interrupts in between is empty, or still has its records. Raises
        `ConcurrentChange` while a flush job, compaction or repair of this log runs, and `StorageError`, after which the
        log has failed.
        """
        if self.failure is not None:
            raise copied(self.failure)
        self._raise_if_busy("reset")
        self._read_positions.clear()
        try:
            self._delete_records()
            self._restart_at(offset)
        except (OSError, DirectoryNotSynced) as error:
            raise self.fail(error, f"cannot reset {self.directory}") from error
        self._record_replaced_file()

    def _delete_records(self) -> None:
        """Delete everything except a checkpoint of an empty log at the durable end offset.

        The checkpoint is written first, because recovery would report missing segments as loss. Then the segments are
        removed in two steps: if the segment to which the checkpoint refers were removed before an earlier one, recovery
        would report the records between them as lost.
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
        """Start an empty log at `offset`: write the checkpoint, then create a segment, as for a new log."""
        disk, state = self._disk, self._flush_state
        checkpoint = Checkpoint(
            state.checkpoint.sequence + 1, offset, offset, 0, offset, state.needs_new_epoch
        )
        state.checkpoint = write_both_slots(disk, f"{self.directory}/{CHECKPOINT_NAME}", checkpoint)
        segment = Segment(self.directory, offset)
        segment.file = self._files.open_file(lambda: disk.open(segment.path, create=True), appending=self)
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

    # Flushing: the jobs that `GroupCommit` runs on its thread, and their results

    def prepare_flush(self) -> FlushJob | None:
        """Return the job that makes the log durable up to its current end; None if it is durable, closed or has
        failed."""
        if self.failure is not None or self.closed:
            return None
        job = self._flush_state.prepare_sync(self._active, self.leader_epochs)
        if job is not None:
            self.unfinished_job_count += 1
        return job

    def finish_flush(self, job: FlushJob, error: BaseException | None) -> None:
        """Record the result of a flush job and call `on_durable` or `on_failure`.

        After `LogDiskFull` nothing was synced, and the next flush job includes the same work.
        """
        self.unfinished_job_count -= 1
        if isinstance(error, LogDiskFull):
            self._flush_state.retry_sync(job)
            self._log_disk_full(error)
        elif error is not None:
            self.fail(error, f"cannot sync {self.directory}")
        elif self.failure is None:
            moved = self._flush_state.record_sync(job)
            if job.closed_segment_count:
                self._files.active.record_unflushed_closed(self, self._flush_state.unflushed_closed_count)
            if moved:
                self.durable_end_offset = job.end_offset
                self._preallocation.awaited_syncs += 1
                self._listener.on_durable(job.end_offset)

    def exclude_from_awaited_syncs(self) -> None:
        """Exclude the next sync from `Preallocation.awaited_syncs`, because no request waits for it."""
        self._preallocation.awaited_syncs -= 1

    @property
    def needs_maintenance(self) -> bool:
        """Whether `prepare_maintenance` has work: the checkpoint, an index or the timestamps file on disk is older than
        the durable part of the log, or files of deleted segments have to be removed."""
        return (
            self.failure is None
            and not self.closed
            and self._flush_state.needs_maintenance(self.start_offset)
        )

    @property
    def checkpoint_lag_bytes(self) -> int:
        """Approximate number of durable bytes above the checkpoint, which recovery would read and write again."""
        return self._flush_state.checkpoint_lag_bytes

    def prepare_maintenance(self, *, closing: bool = False) -> MaintenanceJob | None:
        """Return the job that writes the checkpoint and index files and removes trimmed segments; None if nothing is
        due.

        `closing`: the job also saves the index of the active segment. While a compaction or repair changes the segments
        the result is None, too.
        """
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
        """Record the result of a maintenance job. After `LogDiskFull` the unfinished work is due again."""
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
        # Only after the checkpoint: otherwise a crash could restore records whose leader epochs were removed.
        self.leader_epochs.trim_to(job.checkpoint.start_offset)
        for due in job.indexes:
            if due.closed:
                due.segment.max_timestamp_ms = due.sparse_index.max_timestamp_ms
                due.segment.index = None
        if self._flush_state.checkpoints_pending and self._on_maintenance_due is not None:
            self._on_maintenance_due()

    def _log_disk_full(self, error: LogDiskFull) -> None:
        """Log a warning once per period in which the disk is full or no descriptor is free."""
        if not self._disk_full_logged:
            cause = error.__cause__
            is_full = not isinstance(cause, OSError) or cause.errno in DISK_FULL_ERRNOS
            logger.warning(
                "log_disk_full" if is_full else "log_waits_for_descriptors",
                extra=fields(directory=self.directory, error=str(error)),
            )
        self._disk_full_logged = True

    def sync(self) -> None:
        """Make the log durable and write its checkpoint; blocks. A broker uses `GroupCommit` instead.

        Raises `StorageError`.
        """
        self._run_inline(self.prepare_flush(), self.finish_flush)
        self._run_inline(self.prepare_maintenance(), self.finish_maintenance)

    def _run_inline(self, job: FlushJob | MaintenanceJob | None, finish: Callable[..., None]) -> None:
        """Run a job on this thread, blocking, and finish it. Raises `StorageError`."""
        if self.failure is not None:
            raise copied(self.failure)
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
            raise copied(self.failure) if self.failure else StorageError(str(error)) from error
        finish(job, None)

    # Compaction (see `compaction_run`)

    @property
    def generation(self) -> int:
        """Number that changes with each truncation and when the log is closed. Jobs of an older generation have no
        effect."""
        return self._flush_state.generation

    def resume_after_compaction(self) -> None:
        """Allow maintenance and the removal of trimmed segments again, after a segment swap or a change of the
        compaction state."""
        self.compaction.is_busy = False
        self._drop_trimmed()
        if self._on_maintenance_due is not None:
            self._on_maintenance_due()

    def request_checkpoint(self) -> None:
        """Request a checkpoint that refers to the newest durable segment: compaction can then replace older ones."""
        self._flush_state.request_checkpoints()
        if self._on_maintenance_due is not None and self.needs_maintenance:
            self._on_maintenance_due()

    # Closing

    def close(self, *, save: bool = True) -> None:
        """Close the files. With `save` all records are made durable first, and the next recovery reads no batches.

        While a flush job of this log runs, checkpoint and indexes are not saved; the next recovery then reads some
        batches. Raises `StorageError` if saving fails; the log is closed nevertheless.
        """
        if self.closed:
            return
        try:
            if save and self.failure is None:
                self._flush_and_checkpoint()
        finally:
            self._release()

    def _flush_and_checkpoint(self) -> None:
        self._run_inline(self.prepare_flush(), self.finish_flush)
        if not self.unfinished_job_count:
            self._run_inline(self.prepare_maintenance(closing=True), self.finish_maintenance)
        try:
            self._preallocation.release(self._active)
        except OSError as error:
            raise StorageError(f"cannot shorten {self._active.path}: {error}") from error

    def _release(self) -> None:
        """Close all files and mark the log as closed, so that appends are refused."""
        self.closed = True
        self._files.active.record_closed_log(self)
        self._preallocation.limit(-1)
        self._read_positions.clear()
        self._flush_state.release()
        # The listener refers to the log; without the cycle its descriptors are closed at once.
        self._listener = _NO_LISTENER
        for segment in self._segments.segments:
            self._files.evict(segment)

    def delete(self) -> None:
        """Remove the log and its directory. Raises `StorageError`, and `ConcurrentChange` while a flush job, compaction
        or repair of this log runs."""
        self._raise_if_busy("delete")
        self._release()
        try:
            self._disk.remove_tree(self.directory)
        except OSError as error:
            raise StorageError(f"cannot remove {self.directory}: {error}") from error
