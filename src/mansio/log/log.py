"""One log: an append-only sequence of record batches on disk, cut into segments.

Owns the directory of one partition: segments, their indexes, the leader epochs and the checkpoint. Offsets are given
out here and nowhere else.

Always true:
* `start_offset <= durable_end_offset <= end_offset`; the offsets between start and end are all there, in order.
* `durable_end_offset` is an end that a *finished* sync covers, taken when that sync started. It only moves up, but for
  `truncate_to`.
* A batch is written with one system call, at the end of the newest segment. A segment is closed for good when the next
  one is made; then its file ends where its last batch ends. The newest one's file may be longer: it grows ahead of its
  batches in steps, zeros being no batch, because a sync that need not record a new length takes a third less time.
* After a failed write that could not be taken back, or a failed sync, `failure` is set and no append is taken any more
  (after a failed fsync the page cache lies: trying again would report success for lost bytes).

All methods belong to one thread (the broker's loop); only `SyncWork.run` and `Chores.run` (see `sync_work`) run on
another one, on values taken here.
"""

from __future__ import annotations

import errno
import logging
import struct
from typing import TYPE_CHECKING, NamedTuple

from mansio.errors import ConcurrentChange, FencedLeaderEpoch, OffsetOutOfRange, StorageError
from mansio.log import lookup
from mansio.log.compaction_state import NamesNotSynced
from mansio.log.compaction_swap import CompactionDesk
from mansio.log.files import FileCache, max_timestamp_of
from mansio.log.index import SparseIndex
from mansio.log.ledger import Ledger
from mansio.log.recovery import Recovered, recover, verify_segment
from mansio.log.segment import Segment, read_exactly
from mansio.log.settings import LogSettings
from mansio.log.sync_work import NO_ROOM, NoRoom, SyncWork
from mansio.log.table import SegmentTable
from mansio.log.truncation import take_back

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from mansio.log.sync_work import Chores
    from mansio.ports import Buffer, Clock, Disk, DiskFile
    from mansio.wire.records import BatchHeader

__all__ = ["Log", "LogSettings", "LogSlice", "SegmentInfo"]

PLACES_MAX = 64  # positions of sequential readers that one log remembers
RELATIVE_OFFSET_MAX = (1 << 31) - 1
_FRONT = struct.Struct(">qii")  # base offset, batch length, leader epoch: what the broker fills in
_FRONT_BYTES = 16
_MAX_TIMESTAMP = struct.Struct(">q")
_MAX_TIMESTAMP_POSITION = 35
ROOM_BYTES_MIN = 64 << 10  # how far a file grows ahead: by its own size, between these
ROOM_BYTES_MAX = 1 << 20
_NOTHING_OPENED = NO_ROOM | {errno.EMFILE, errno.ENFILE}


logger = logging.getLogger(__name__)


class LogSlice(NamedTuple):
    """Whole batches, as a stretch of one file: `length` bytes from `position`. The next read begins at `next_offset`.

    Holding the slice keeps the file's descriptor valid, even when its segment is deleted meanwhile.
    """

    file: DiskFile
    position: int
    length: int
    next_offset: int

    def read(self) -> bytes:
        """The bytes. Raises `StorageError` when the disk fails, `CorruptLog` when the file is shorter than it was."""
        return read_exactly(self.file, self.length, self.position)


class SegmentInfo(NamedTuple):
    """One segment, for retention and for people. `max_timestamp_ms` is the largest in it (`NO_TIMESTAMP`: empty).

    Where no record has a timestamp it is when the file was last written, as in Kafka.
    """

    base_offset: int
    end_offset: int
    size_bytes: int
    max_timestamp_ms: int


def _ignore(_: object) -> None:
    """Nobody listens yet."""


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
        self.start_offset = recovery.start_offset
        self.end_offset = recovery.end_offset
        self.durable_end_offset = recovery.end_offset
        self.on_durable: Callable[[int], object] = _ignore
        self.on_failure: Callable[[StorageError], object] = _ignore
        self.on_chores: Callable[[], object] | None = None
        self.busy = 0
        self._disk = disk
        self._clock = clock
        self._files = files
        self._table = SegmentTable(recovery.segments, files, recovery.compaction.sparse_end_offset)
        self._active = self._table.active
        self._active.end_offset = recovery.end_offset
        self._front = bytearray(_FRONT_BYTES)
        self._roll_at = clock.monotonic() + settings.segment_ms / 1000
        self._file_bytes = self._active.size  # of the active segment's file, with the room ahead
        self._usual_bytes = self._file_bytes  # an append that ends above takes the rare path
        self._places: dict[int, tuple[Segment, int]] = {}
        self._ledger = Ledger(directory, recovery)
        self._no_room_said = False
        self.keeping_house = False
        self.compaction = CompactionDesk(self._table, files, self._ledger, self._places, recovery.compaction)

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
        return sum(segment.size for segment in self._table.segments)

    def segments(self) -> list[SegmentInfo]:
        """All segments, oldest first."""
        return [*self.closed_segments(), self.active_segment()]

    def closed_segments(self) -> Iterator[SegmentInfo]:
        """All but the newest, oldest first, one by one: who stops early does not pay for the rest.

        The log must not change meanwhile.
        """
        for at in range(len(self._table.segments) - 1):
            yield self._information(self._table.segments[at])

    def active_segment(self) -> SegmentInfo:
        """The newest segment, the one that is written to."""
        return self._information(self._active)

    def _information(self, segment: Segment) -> SegmentInfo:
        timestamp = max_timestamp_of(segment, self._files)
        if timestamp < 0 and segment.size:
            try:
                timestamp = self._disk.modified_ms(segment.path)
            except OSError as error:
                raise StorageError(f"cannot ask when {segment.path} was written: {error}") from error
        return SegmentInfo(segment.base_offset, segment.end_offset, segment.size, timestamp)

    def update_settings(self, settings: LogSettings) -> None:
        """Use other settings from the next append on."""
        self._roll_at += (settings.segment_ms - self.settings.segment_ms) / 1000
        self._usual_bytes = min(self._usual_bytes, settings.segment_bytes)
        self.settings = settings

    def assign_leader_epoch(self, epoch: int) -> None:
        """`epoch` writes from the end of the log on. An epoch at or below the newest changes nothing."""
        if self.leader_epochs.assign(epoch, self.end_offset):
            self._ledger.epochs_dirty = True

    def end_offset_for_epoch(self, epoch: int) -> tuple[int, int]:
        """(epoch, end offset) as OffsetForLeaderEpoch wants it: see `EpochList.end_offset_for`."""
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
        active = self._active
        position = active.size
        if (
            self.failure is not None
            or position + size > self._usual_bytes
            or leader_epoch != self.leader_epochs.last
            or self._clock.monotonic() >= self._roll_at
            or self.end_offset - active.base_offset + header.last_offset_delta > RELATIVE_OFFSET_MAX
        ):
            active = self._prepare_append(position, size, leader_epoch, header)
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
            raise self._append_failed(error, position) from error
        index = active.index
        if position >= index.due_position or timestamp > index.max_timestamp_ms:  # type: ignore[union-attr]  # so its index
            index.add(base_offset - active.base_offset, position, timestamp)  # type: ignore[union-attr]  # the same
        active.size = position + size
        self.end_offset = active.end_offset = base_offset + header.last_offset_delta + 1
        return base_offset

    def _prepare_append(self, position: int, size: int, leader_epoch: int, header: BatchHeader) -> Segment:
        """The rare part of `append`: refuse, begin an epoch, close the segment. The segment to write to."""
        if self.failure is not None:
            raise self.failure
        if self.closed:
            raise StorageError(f"the log {self.directory} is closed")
        if leader_epoch < self.leader_epochs.last:
            raise FencedLeaderEpoch(
                f"{self.directory}: leader epoch {leader_epoch} is older than {self.leader_epochs.last}"
            )
        now = self._clock.monotonic()
        if position == 0:
            self._roll_at = now + self.settings.segment_ms / 1000
        elif (
            position + size > self.settings.segment_bytes
            or now >= self._roll_at
            or self.end_offset - self._active.base_offset + header.last_offset_delta > RELATIVE_OFFSET_MAX
        ):
            self._roll(now)
        if self.leader_epochs.assign(leader_epoch, self.end_offset):
            self._ledger.epochs_dirty = True
        self._make_room(self._active.size + size)
        return self._active

    def _make_room(self, needed_bytes: int) -> None:
        """Let the active file grow to what is needed and some more, within the size of a segment."""
        if needed_bytes <= self._usual_bytes:
            return
        ahead = min(max(needed_bytes, ROOM_BYTES_MIN), ROOM_BYTES_MAX)
        grown = max(needed_bytes, min(needed_bytes + ahead, self.settings.segment_bytes))
        try:
            self._active.file.truncate(grown)  # type: ignore[union-attr]  # an active segment holds its file
        except OSError as error:
            raise self._append_failed(error, self._active.size) from error
        self._file_bytes = self._usual_bytes = grown

    def _give_room_back(self) -> None:
        """End the active file where its last batch ends. Raises `OSError`."""
        if self._file_bytes > self._active.size:
            self._active.file.truncate(self._active.size)  # type: ignore[union-attr]  # an active segment holds its file
            self._file_bytes = self._usual_bytes = self._active.size

    def roll(self) -> bool:
        """Close the active segment now, so that retention and compaction can see it. False when it holds nothing.

        The new segment has to be synced: ask a `Syncer` for it. Raises `StorageError` as `append` does.
        """
        if self.failure is not None:
            raise self.failure
        if self.closed:
            raise StorageError(f"the log {self.directory} is closed")
        if self.end_offset == self._active.base_offset:
            return False
        self._roll(self._clock.monotonic())
        return True

    def _roll(self, now: float) -> None:
        """Close the active segment and make the next one. The old one is synced before an end in the new one counts."""
        segment = Segment(self.directory, self.end_offset)
        try:
            self._give_room_back()
            segment.file = self._disk.open(segment.path, create=True)
        except OSError as error:
            if error.errno in _NOTHING_OPENED:
                raise StorageError(f"cannot begin the segment {segment.path}: {error}") from error
            raise self.fail(error, f"cannot begin the segment {segment.path}") from error
        try:
            segment.file.truncate(0)  # left over from an attempt before a restart
        except (
            OSError
        ) as error:  # the file is there: a batch that went beyond its base offset now would be lost
            raise self.fail(error, f"cannot begin the segment {segment.path}") from error
        segment.index = SparseIndex(self.settings.index_interval_bytes)
        closing = self._active
        self._ledger.segment_closed(closing)
        self._table.add(segment)
        self._active = segment
        self._file_bytes = self._usual_bytes = 0
        self._roll_at = now + self.settings.segment_ms / 1000
        if closing.end_offset <= self.start_offset:
            self._drop_trimmed()

    def _append_failed(self, error: OSError, position: int) -> StorageError:
        message = f"cannot write to {self._active.path}"
        if error.errno in NO_ROOM:
            try:
                self._active.file.truncate(position)  # type: ignore[union-attr]  # an active segment holds its file
            except OSError as second:
                return self.fail(second, message)
            self._file_bytes = self._usual_bytes = position
            return StorageError(f"{message}: {error}")
        return self.fail(error, message)

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
        place = self._places.get(offset)
        segment, position = place if place is not None else self._table.locate(offset)
        if position >= segment.size:  # remembered as the end of what was the newest segment then
            segment, position = self._table.locate(offset)
            if position >= segment.size:  # compaction left nothing from here on
                return None
        segment_end, stop = segment.end_offset, segment.size
        next_offset = segment_end
        if limit_offset < segment_end:
            if limit_offset == self.durable_end_offset and segment is self._ledger.segment:
                stop, next_offset = self._ledger.position, limit_offset
            else:
                stop, next_offset = self._table.place_of(segment, limit_offset)
            if stop <= position:
                return None
        file = segment.file or self._files.file(segment)
        if stop - position > max_bytes:
            stop, next_offset = lookup.cut(segment, file, self._files, position, stop, max_bytes, next_offset)
        places = self._places
        # One batch larger than asked for: only its own header says where it ends, and it may be damaged.
        if next_offset not in places and stop - position <= max_bytes:
            if len(places) >= PLACES_MAX:
                del places[next(iter(places))]
            if stop < segment.size or segment is self._active:
                places[next_offset] = (segment, stop)
        return LogSlice(file, position, stop - position, next_offset)

    def batch_headers(self, from_offset: int) -> Iterator[BatchHeader]:
        """The headers of all batches from the one that holds `from_offset` on, up to the end as it is now."""
        for _, _, header in self._walk(from_offset):
            yield header

    def batches(self, from_offset: int) -> Iterator[bytes]:
        """The bytes of all batches from the one that holds `from_offset` on, up to the end as it is now."""
        for file, position, header in self._walk(from_offset):
            yield read_exactly(file, header.batch_length + 12, position)

    def _walk(self, from_offset: int) -> Iterator[tuple[DiskFile, int, BatchHeader]]:
        from_offset = max(from_offset, self.start_offset)
        return self._table.walk(from_offset) if from_offset < self.end_offset else iter(())

    def verify(self) -> int:
        """Read and check everything the log holds; the number of batches. Raises `CorruptLog` at the first damage.

        It checks what a reader cannot: that offsets follow each other and leader epochs are the known ones (neither is
        under a batch's CRC). It blocks for as long as reading the log takes: not for a broker's loop.
        """
        count = 0
        for segment in self._table.segments:
            file, end = self._files.file(segment), segment.end_offset
            sparse_end = self._table.sparse_end_offset
            count += verify_segment(
                file, segment.base_offset, segment.size, end, self.leader_epochs, sparse_end
            )
        return count

    def offset_for_time(self, timestamp_ms: int, limit_offset: int) -> tuple[int, int, int] | None:
        """(offset, timestamp in ms, leader epoch) of the first record at or after a moment; None when there is none."""
        return lookup.offset_for_time(
            self._table,
            self._files,
            timestamp_ms,
            self.start_offset,
            min(limit_offset, self.end_offset),
            self.settings.open_batch_bytes_max,
        )

    def max_timestamp(self, limit_offset: int) -> tuple[int, int, int] | None:
        """(offset, timestamp in ms, leader epoch) of the first record with the largest timestamp (KIP-734)."""
        return lookup.max_timestamp(
            self._table,
            self._files,
            self.start_offset,
            min(limit_offset, self.end_offset),
            self.settings.open_batch_bytes_max,
        )

    # Cutting

    def trim_to(self, offset: int) -> None:
        """Records below `offset` are gone. Segments wholly below it are removed by the chores, once that is on disk."""
        if offset > self.end_offset:
            raise OffsetOutOfRange(f"cannot trim to {offset}, the log ends at {self.end_offset}")
        if offset <= self.start_offset:
            return
        self.start_offset = offset
        self._drop_trimmed()
        self._places.clear()
        if self.on_chores is not None:
            self.on_chores()

    def _drop_trimmed(self) -> None:
        """Segments wholly below the start leave the log; their files go with the next chores.

        Not while compaction swaps segments: then when it has.
        """
        if self.compaction.busy:
            return
        self._ledger.segments_trimmed(self._table.drop_below(self.start_offset))

    def truncate_to(self, offset: int) -> None:
        """Take back every batch that reaches to `offset` or beyond; a follower does that when its leader changed.

        Durable on return. Not while a sync of this log runs (`busy`): `ConcurrentChange`.
        """
        if self.failure is not None:
            raise self.failure
        if offset >= self.end_offset:
            return
        if offset < self.start_offset:
            raise OffsetOutOfRange(f"cannot truncate to {offset}, the log starts at {self.start_offset}")
        if self.busy or self.compaction.busy:
            raise ConcurrentChange(f"{self.directory} is being synced; truncate when that is done")
        segment, position, end = self._table.cut_at(offset)
        end = max(end, self.start_offset)
        self._places.clear()
        try:
            self.compaction.truncating(self._disk, end)
            take_back(
                self._disk,
                self._table,
                self._files,
                self._ledger,
                self.leader_epochs,
                segment=segment,
                position=position,
                end_offset=end,
                start_offset=self.start_offset,
                index_interval_bytes=self.settings.index_interval_bytes,
            )
        except (OSError, NamesNotSynced) as error:
            raise self.fail(error, f"cannot truncate {self.directory}") from error
        self._active = segment
        self._file_bytes = self._usual_bytes = position
        self.end_offset = self.durable_end_offset = end

    # Becoming durable: the values that `Syncer` carries to its thread, and what comes back

    def prepare_sync(self) -> SyncWork | None:
        """What a sync has to do to make the log durable up to its end as it is now; None when it is."""
        if self.failure is not None or self.closed:
            return None
        work = self._ledger.prepare_sync(self._active, self.leader_epochs)
        if work is not None:
            self.busy += 1
        return work

    def finish_sync(self, work: SyncWork, error: BaseException | None) -> None:
        """A sync ended. Its listeners are told. `NoRoom`: nothing was synced, the next sync does it all."""
        self.busy -= 1
        if isinstance(error, NoRoom):
            self._ledger.put_back(work)
            self._say_no_room(error)
        elif error is not None:
            self.fail(error, f"cannot sync {self.directory}")
        elif self.failure is None and self._ledger.synced(work):
            self.durable_end_offset = work.end_offset
            self.on_durable(work.end_offset)

    @property
    def has_chores(self) -> bool:
        """Is there something on disk that should follow what is durable by now?"""
        return self.failure is None and not self.closed and self._ledger.has_chores(self.start_offset)

    @property
    def checkpoint_lag_bytes(self) -> int:
        """About so many bytes, durable by now, would be read and written again after a crash."""
        return self._ledger.checkpoint_lag_bytes

    def prepare_chores(self, *, closing: bool = False) -> Chores | None:
        """The housekeeping that is due: checkpoint, index files, removal of trimmed segments."""
        if self.compaction.busy:
            return None
        if not self.has_chores and not (closing and self._ledger.has_chores(self.start_offset, self._active)):
            return None
        self.busy += 1
        self.keeping_house = True
        snapshot_bytes = self.settings.index_snapshot_bytes
        return self._ledger.prepare_chores(
            self._table.segments, self.start_offset, snapshot_bytes, closing=closing
        )

    def finish_chores(self, chores: Chores, error: BaseException | None) -> None:
        """The housekeeping ended. `NoRoom`: it is due again."""
        self.busy -= 1
        self.keeping_house = False
        if isinstance(error, NoRoom):
            self._ledger.put_back_chores(chores, checkpointed=error.checkpointed)
            self._say_no_room(error)
            return
        if error is not None:
            self.fail(error, f"cannot keep house in {self.directory}")
            return
        self._no_room_said = False
        self._ledger.checkpointed(chores)
        # Only now: had the epochs been forgotten first, a crash could bring back records without theirs.
        self.leader_epochs.trim_to(chores.checkpoint.start_offset)
        for due in chores.indexes:
            if due.closed:
                due.segment.max_timestamp_ms = due.sparse.max_timestamp_ms
                due.segment.index = None
        if self._ledger.settling and self.on_chores is not None:
            self.on_chores()

    def _say_no_room(self, error: NoRoom) -> None:
        """One line per spell of a full disk."""
        if not self._no_room_said:
            logger.warning("%s; tried again until there is", error)
        self._no_room_said = True

    def sync(self) -> None:
        """Make the log durable here and now, blocking. A broker uses a `Syncer` instead. Raises `StorageError`."""
        self._run_inline(self.prepare_sync(), self.finish_sync)
        self._run_inline(self.prepare_chores(), self.finish_chores)

    def _run_inline(self, work: SyncWork | Chores | None, finish: Callable[..., None]) -> None:
        if self.failure is not None:
            raise self.failure
        if work is None:
            return
        try:
            work.run(self._disk)
        except NoRoom as error:
            finish(work, error)
            if isinstance(work, SyncWork):  # the records are not durable; housekeeping can wait
                raise
            return
        except OSError as error:
            finish(work, error)
            raise self.failure or StorageError(str(error)) from error
        finish(work, None)

    # Compaction (see `compaction_run`)

    @property
    def generation(self) -> int:
        """Another one after each truncation, and when the log has ended: what was prepared before counts no more."""
        return self._ledger.generation

    def compaction_rests(self) -> None:
        """A swap, or a note about compaction, is done with: what had to wait for it goes on."""
        self.compaction.busy = False
        self._drop_trimmed()
        if self.on_chores is not None:
            self.on_chores()

    def want_checkpoint(self) -> None:
        """Have a checkpoint written although the log did not move: compaction needs one that names newer segments."""
        self._ledger.settle()
        if self.on_chores is not None and self.has_chores:
            self.on_chores()

    # Ending

    def close(self, *, save: bool = True) -> None:
        """Let go of the files. With `save` everything is made durable first, and the next opening reads nothing.

        Safe, but less thorough, while a sync of this log still runs. Raises `StorageError` when saving fails.
        """
        if self.closed:
            return
        try:
            if save and self.failure is None:
                self._run_inline(self.prepare_sync(), self.finish_sync)
                if not self.busy:
                    self._run_inline(self.prepare_chores(closing=True), self.finish_chores)
                self._give_room_back()
        except OSError as error:
            raise StorageError(f"cannot shorten {self._active.path}: {error}") from error
        finally:
            self._let_go()

    def _let_go(self) -> None:
        self.closed = True
        self._usual_bytes = -1  # an append now takes the rare path, which refuses
        self._places.clear()
        self._ledger.let_go()
        # They refer back to the log: descriptors must not wait for the collector.
        self.on_durable = self.on_failure = _ignore
        for segment in self._table.segments:
            self._files.forget(segment)

    def delete(self) -> None:
        """Remove the log and everything in its directory. Not while a sync of this log runs (`busy`)."""
        if self.busy or self.compaction.busy:
            raise ConcurrentChange(f"{self.directory} is being synced; delete it when that is done")
        self._let_go()
        try:
            self._disk.remove_tree(self.directory)
        except OSError as error:
            raise StorageError(f"cannot remove {self.directory}: {error}") from error
