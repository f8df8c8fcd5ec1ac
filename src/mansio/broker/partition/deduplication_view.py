"""Deduplication window of one partition as a view of its log (`PartitionHook`), on leaders and followers.

The view applies the control batches with ids (`mansio.wire.batch.dedup_control_records`) in the order of the log. What
the leader writes is applied as it is appended; control batches of others are read from the log, in slices, until the
view has reached the end of the log. Snapshots shorten the next start.

    log start ---- applied (in the view) ---- applied_end ---- read by the next slices ---- log end

Invariants:
* The view contains the log below `applied_end` and nothing else; a part of the log that was truncated is not in it.
* Ids are added when the batch with their records is in the log: see IDS. No snapshot is taken between the two batches.
* A snapshot contains the state at an offset below which the log was committed when the snapshot was written. Without
  one, the view is rebuilt from the segments that were written in the longest possible window.
* Retention keeps each control batch with ids that have not expired, and everything that is not applied yet.
"""

from __future__ import annotations

import logging
import struct
from itertools import islice
from typing import TYPE_CHECKING, Final

from mansio.broker.partition.snapshot_files import SNAPSHOT_INTERVAL_BYTES, SnapshotFiles
from mansio.config.topic_config import DEDUP_MS_MAX
from mansio.errors import UNREADABLE_OR_DAMAGED, CorruptLog, MansioError
from mansio.logs import fields
from mansio.state.deduplication.window import AcceptedId, Copies, DeduplicationWindow
from mansio.storage.checksummed_file import decode_checksummed, encode_checksummed
from mansio.wire.batch.dedup_control_records import AcceptedIds, CopiedIds, decode_dedup_control
from mansio.wire.batch.record_batch import check_stored_batch

if TYPE_CHECKING:
    from collections.abc import Callable

    from mansio.broker.partition.partition_hook import AppendResult
    from mansio.ports import Background, Clock, Disk, Scheduler
    from mansio.state.deduplication.window import FrozenWindow
    from mansio.storage.log import Log
    from mansio.wire.batch.record_batch import BatchHeader

logger = logging.getLogger(__name__)

SLICE_BATCHES: Final = 200
SLICE_IDS: Final = 500
"""Number of batches, and of ids in control batches, after which a slice of the event loop ends: about 1 ms."""

RETRY_MS: Final = 10_000
"""Time after which a part of the log that could not be read is read again."""

DAMAGE_RETRIES: Final = 6
"""How often a damaged batch is read again. After that its ids are missing from the view, which is reported."""

WRITE_TIME_TOLERANCE_MS: Final = 2 * 24 * 60 * 60 * 1000
"""How much older than its last write a segment file may seem to be: file systems write times of files lazily."""

SNAPSHOT_SUFFIX: Final = ".dedup"
_MAGIC: Final = b"MDEDUP\0\n"
_VERSION: Final = 1
_END_OFFSET: Final = struct.Struct(">q")


class DeduplicationView:
    """`PartitionHook` with the deduplication window of a partition. All methods run on the broker's event loop."""

    __slots__ = (
        "_background",
        "_clock",
        "_closed",
        "_directory",
        "_disk",
        "_expected",
        "_failures",
        "_is_leader",
        "_is_reading",
        "_log",
        "_saved_end_offset",
        "_scheduler",
        "_snapshots",
        "_staged",
        "_unsaved_bytes",
        "_waiting_snapshot",
        "_window_ms",
        "applied_end",
        "on_damage",
        "retained_until",
        "window",
    )

    def __init__(
        self,
        disk: Disk,
        background: Background,
        scheduler: Scheduler,
        clock: Clock,
        log: Log,
        *,
        window_ms: Callable[[], int],
        is_leader: Callable[[], bool],
    ) -> None:
        """`window_ms` returns the setting mansio.dedup.ms of the topic, `is_leader` whether this broker leads the
        partition: a leader calls `stage` before it appends a control batch with ids, so none has to be read."""
        self._disk = disk
        self._background = background
        self._scheduler = scheduler
        self._clock = clock
        self._log = log
        self._window_ms = window_ms
        self._is_leader = is_leader
        self._directory = log.directory
        self._snapshots = SnapshotFiles(disk, log, SNAPSHOT_SUFFIX)
        self._closed = False
        self._is_reading = False
        self._failures = 0
        self._unsaved_bytes = 0
        self._saved_end_offset = -1
        self._waiting_snapshot: tuple[int, FrozenWindow] | None = None
        self._staged: tuple[int, AcceptedIds | CopiedIds | None] | None = None
        """CRC of a control batch that is about to be appended, and its content; None for one without ids."""
        self._expected: tuple[int, AcceptedIds] | None = None
        """Offset of the batch that has the records with these ids, if it follows."""
        self.retained_until: tuple[int, int] | None = None
        """While the log is not committed up to the first offset, retention keeps everything from the second one on."""
        self.on_damage: Callable[[int, MansioError], None] = _ignore_damage
        """Called with the offset of a batch that cannot be read."""
        self.window = DeduplicationWindow()
        self.applied_end = 0
        self._load()

    @property
    def is_complete(self) -> bool:
        """Whether the view contains the whole log."""
        return self.applied_end >= self._log.end_offset and not self._is_reading

    def stage(self, crc: int, content: AcceptedIds | CopiedIds | None) -> None:
        """Announce the content of the control batch with this CRC, so that it is not read when it is appended."""
        self._staged = (crc, content)

    # Hook methods

    def before_append(self, header: BatchHeader) -> AppendResult | None:  # noqa: ARG002 - the hook's signature
        return None

    def on_append(self, header: BatchHeader, base_offset: int) -> None:
        staged, self._staged = self._staged, None
        if self._is_reading or base_offset < self.applied_end:
            return
        if self.applied_end != base_offset:
            self._read_on()
        elif not header.is_control or self._is_expected(header.crc, base_offset):
            self._apply_other(header.crc, base_offset)
            self._on_applied(header, base_offset)
        elif self._is_leader():
            is_staged = staged is not None and staged[0] == header.crc
            self._apply(staged[1] if staged is not None and is_staged else None, base_offset)
            self._on_applied(header, base_offset)
        else:
            self._read_on()
        if self._unsaved_bytes >= SNAPSHOT_INTERVAL_BYTES and self._waiting_snapshot is None:
            self._prepare_snapshot()

    def on_committed(self, high_watermark: int) -> None:
        if self.retained_until is not None and self.retained_until[0] <= high_watermark:
            self.retained_until = None
        if self._waiting_snapshot is not None and self._waiting_snapshot[0] <= high_watermark:
            end_offset, frozen = self._waiting_snapshot
            self._waiting_snapshot = None
            self._background.submit(lambda: self._save(end_offset, frozen), self._log_save_error)

    def on_trim(self, start_offset: int) -> None:
        """Go on at the new start of the log: ids below it that have not expired were copied to a later part."""
        if self.applied_end < start_offset:
            self.applied_end = start_offset
            self._expected = None

    def on_truncate(self, end_offset: int) -> None:
        """Load the view again from the latest snapshot at or below `end_offset`, and the log."""
        self._snapshots.remove_beyond(end_offset)
        self._waiting_snapshot = self.retained_until = self._staged = self._expected = None
        self.window = DeduplicationWindow()
        self._load()

    def readable_end(self, isolation_level: int) -> int | None:  # noqa: ARG002 - the hook's signature
        return None

    def retention_floor(self) -> int | None:
        window_ms = self._window_ms()
        if not window_ms:
            return None
        floor = self.window.lowest_location(self._clock.wall_ms() - window_ms)
        if not self.is_complete and (floor is None or self.applied_end < floor):
            floor = self.applied_end
        if self.retained_until is not None and (floor is None or self.retained_until[1] < floor):
            floor = self.retained_until[1]
        return floor

    def close(self) -> None:
        self._closed = True
        log, end_offset = self._log, self.applied_end
        is_durable = end_offset == log.end_offset == log.durable_end_offset and log.failure is None
        if is_durable and self._expected is None and end_offset != self._saved_end_offset:
            self._save(end_offset, self.window.freeze())

    # Application of the log

    def _on_applied(self, header: BatchHeader, base_offset: int) -> None:
        self.applied_end = base_offset + header.last_offset_delta + 1
        self._unsaved_bytes += header.batch_length

    def _is_expected(self, crc: int, base_offset: int) -> bool:
        expected = self._expected
        return expected is not None and expected[0] == base_offset and expected[1].crc == crc

    def _apply_other(self, crc: int, base_offset: int) -> None:
        """Apply a batch that is not a control batch with ids: their records, if they are expected here."""
        expected, self._expected = self._expected, None
        if expected is None or expected[0] != base_offset or expected[1].crc != crc:
            return
        ids = expected[1]
        window = self.window
        offsets = [base_offset + position for position in ids.positions]
        window.accept(ids.keys, offsets, ids.accepted_ms, base_offset - 1)
        window.expire(window.latest_ms - self._window_ms())

    def _apply(self, content: AcceptedIds | CopiedIds | None, base_offset: int) -> None:
        """Apply a control batch of this module's kinds, or another one."""
        self._expected = None
        if isinstance(content, AcceptedIds):
            self._expected = (base_offset + 1, content)
        elif content is not None:
            rows = zip(content.keys, content.offsets, content.accepted_ms, strict=True)
            copies = Copies(content.first_copy, content.until_ms)
            self.window.restore([AcceptedId(*row) for row in rows], base_offset, copies)

    def _read_on(self) -> None:
        """Apply the log from `applied_end` on in slices, starting with the next one of the event loop: a follower
        appends many batches at once."""
        if not self._is_reading:
            self._is_reading = True
            self._scheduler.call_soon(self._read_slice)

    def _read_slice(self) -> None:
        log = self._log
        if self._closed or not self._is_reading:
            return
        try:
            ids = 0
            for header, control in islice(log.control_batches(self.applied_end), SLICE_BATCHES):
                base_offset = header.base_offset
                if base_offset > self.applied_end >= log.compaction.state.sparse_end_offset:
                    raise CorruptLog(f"{self._directory}: offset {self.applied_end} cannot be read")
                if control is None or self._is_expected(header.crc, base_offset):
                    ids += 0 if self._expected is None else len(self._expected[1].keys)
                    self._apply_other(header.crc, base_offset)
                else:
                    check_stored_batch(control)
                    content = decode_dedup_control(control)
                    ids += 0 if content is None else len(content.keys)
                    self._apply(content, base_offset)
                self._on_applied(header, base_offset)
                self._failures = 0
                if ids >= SLICE_IDS:
                    break
        except (MansioError, OSError) as error:
            self._on_read_error(error)
            return
        if self.applied_end < log.end_offset:
            self._scheduler.call_soon(self._read_slice)
            return
        self._is_reading = False

    def _on_read_error(self, error: MansioError | OSError) -> None:
        """Read again later, because a damaged batch may be repaired from a replica; finally report it and go on."""
        logger.error(
            "deduplication_ids_not_read",
            extra=fields(directory=self._directory, offset=self.applied_end, reason=error),
        )
        if isinstance(error, MansioError):
            self.on_damage(self.applied_end, error)
        self._failures += 1
        if self._failures > DAMAGE_RETRIES and isinstance(error, (CorruptLog, *UNREADABLE_OR_DAMAGED)):
            self._failures = 0
            self._expected = None
            found = next(self._log.batch_headers(self.applied_end), None)
            if found is None:
                self.applied_end = self._log.end_offset
            else:  # an intact batch after the damage, or the damaged one
                is_after = found.base_offset > self.applied_end
                self.applied_end = found.base_offset if is_after else found.last_offset + 1
        self._scheduler.call_later(RETRY_MS, self._read_slice)

    # Snapshots

    def _prepare_snapshot(self) -> None:
        if self._expected is None and not self._is_reading:
            self._unsaved_bytes = 0
            self._waiting_snapshot = (self.applied_end, self.window.freeze())

    def _load(self) -> None:
        log = self._log
        self._snapshots.remove_beyond(log.end_offset)
        self._saved_end_offset = -1
        for path in self._snapshots.paths():
            try:
                payload = decode_checksummed(_MAGIC, _VERSION, self._disk.read_file(path))
                if payload is None:
                    raise CorruptLog(f"{path} is damaged")
                (end_offset,) = _END_OFFSET.unpack_from(payload)
                if not log.start_offset <= end_offset <= log.end_offset:
                    continue  # what had not expired then was copied to a later part of the log
                self.window = DeduplicationWindow.from_bytes(memoryview(payload)[_END_OFFSET.size :])
            except (CorruptLog, OSError, struct.error) as error:
                logger.warning("deduplication_snapshot_read_failed", extra=fields(path=path, reason=error))
                continue
            self.applied_end = self._saved_end_offset = end_offset
            break
        else:
            self.applied_end = self._first_offset()
        self._is_reading = self.applied_end < log.end_offset
        if self._is_reading:
            self._scheduler.call_soon(self._read_slice)

    def _first_offset(self) -> int:
        """Return the offset from which the log can have ids that have not expired: segments that were not written for
        longer than the longest window have none. Raises `OSError`."""
        log = self._log
        oldest_ms = self._clock.wall_ms() - DEDUP_MS_MAX - WRITE_TIME_TOLERANCE_MS
        first = log.active_segment().base_offset
        for base_offset in reversed(log.segment_base_offsets()[:-1]):
            modified_ms = self._disk.modified_ms(f"{self._directory}/{base_offset:020d}.log")
            if 0 < modified_ms < oldest_ms:  # 0: the file system does not know it
                break
            first = base_offset
        return max(first, log.start_offset)

    def _save(self, end_offset: int, frozen: FrozenWindow) -> None:
        data = encode_checksummed(_MAGIC, _VERSION, frozen.to_bytes(_END_OFFSET.pack(end_offset)))
        self._snapshots.save(end_offset, data)
        self._saved_end_offset = end_offset

    def _log_save_error(self, result: None, error: BaseException | None) -> None:  # noqa: ARG002 - the port's signature
        if error is not None:  # the previous snapshot remains valid
            logger.warning(
                "deduplication_snapshot_write_failed", extra=fields(directory=self._directory, reason=error)
            )


def _ignore_damage(offset: int, error: MansioError) -> None:
    """Default of `DeduplicationView.on_damage`."""
