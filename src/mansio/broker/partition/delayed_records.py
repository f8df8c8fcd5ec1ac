"""Pending records and schedules of one partition as a view of its log (`PartitionHook`), on leaders and followers.

The view applies the control batches of delayed records (`mansio.wire.batch.delay_control_records`) and of schedules
(`mansio.wire.batch.schedule_control_records`) in the order of the log. What the leader writes is applied as it is
appended; everything else is read from the log, in slices, until the view has reached the end of the log. Snapshots
shorten the next start.

    log start ---- applied (in the view) ---- applied_end ---- read by the next slices ---- log end

Invariants:
* The view contains the log below `applied_end` and nothing else; a part of the log that was truncated is not in it.
* A snapshot contains the state at an offset below which the log was committed when the snapshot was written. Without
  one, the view is rebuilt from the whole log.
* Retention keeps each control batch that contains a pending record or a schedule, and everything that is not applied
  yet.
* Delivered records are removed from the view, and firings applied to it, only when the batch that contains them is in
  the log: see DELIVERED and FIRED. No snapshot is taken between the two batches.
"""

from __future__ import annotations

import logging
import struct
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Final, NamedTuple

from mansio.broker.partition.snapshot_files import SNAPSHOT_INTERVAL_BYTES, SnapshotFiles
from mansio.errors import UNREADABLE_OR_DAMAGED, CorruptLog, CorruptMessage, MansioError
from mansio.logs import fields
from mansio.state.delays.pending_records import PendingRecord, PendingRecords
from mansio.state.schedules.schedules import Schedules
from mansio.storage.checksummed_file import decode_checksummed, encode_checksummed
from mansio.wire.batch.delay_control_records import (
    DelayControlType,
    decode_delay_control,
)
from mansio.wire.batch.record_batch import check_stored_batch
from mansio.wire.batch.record_reader import decompress_batch, record_bounds
from mansio.wire.batch.schedule_control_records import ScheduleControlType, decode_schedule_control

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mansio.broker.partition.partition_hook import AppendResult
    from mansio.ports import Background, Disk, Scheduler
    from mansio.state.delays.pending_records import FrozenRecords
    from mansio.state.schedules.schedules import FrozenSchedules
    from mansio.storage.log import Log
    from mansio.wire.batch.delay_control_records import DelayControlRecord
    from mansio.wire.batch.record_batch import BatchHeader
    from mansio.wire.batch.schedule_control_records import Firing, ScheduleControlRecord

logger = logging.getLogger(__name__)

SLICE_BATCHES: Final = 200
SLICE_RECORDS: Final = 500
"""Number of batches, and of ids in control batches, after which a slice of the event loop ends: about 1 ms."""

RETRY_MS: Final = 10_000
"""Time after which a part of the log that could not be read is read again."""

DAMAGE_RETRIES: Final = 6
"""How often a damaged batch is read again. After that its records are missing from the view, which is reported."""

SNAPSHOT_SUFFIX: Final = ".delays"
_MAGIC: Final = b"MDELAYS\n"
_VERSION: Final = 2
_VERSION_WITHOUT_SCHEDULES: Final = 1
_END_OFFSET: Final = struct.Struct(">q")
_SIZE: Final = struct.Struct(">I")  # of the schedules in a snapshot


class _Snapshot(NamedTuple):
    """The state at an offset, for a file that another thread writes."""

    end_offset: int
    records: FrozenRecords
    schedules: FrozenSchedules


class DelayedRecords:
    """`PartitionHook` with the pending records and schedules of a partition.

    All methods run on the broker's event loop."""

    __slots__ = (
        "_background",
        "_closed",
        "_directory",
        "_disk",
        "_expected",
        "_failures",
        "_is_reading",
        "_log",
        "_saved_end_offset",
        "_scheduler",
        "_snapshots",
        "_staged",
        "_unsaved_bytes",
        "_waiting_snapshot",
        "applied_end",
        "on_damage",
        "on_due_changed",
        "on_reset",
        "pending",
        "retained_until",
        "schedules",
    )

    def __init__(self, disk: Disk, background: Background, scheduler: Scheduler, log: Log) -> None:
        self._disk = disk
        self._background = background
        self._scheduler = scheduler
        self._log = log
        self._directory = log.directory
        self._snapshots = SnapshotFiles(disk, log, SNAPSHOT_SUFFIX)
        self._closed = False
        self._is_reading = False
        self._failures = 0
        self._unsaved_bytes = 0
        self._saved_end_offset = -1
        self._waiting_snapshot: _Snapshot | None = None
        self._staged: tuple[int, Callable[[int], None]] | None = None
        """CRC of a control batch that is about to be appended, and what applies it, given its base offset."""
        self._expected: tuple[int, int, Callable[[], object]] | None = None
        """Offset and CRC of the second batch of a delivery or of firings, and what applies them if it follows."""
        self.retained_until: tuple[int, int] | None = None
        """While the log is not committed up to the first offset, retention keeps everything from the second one on."""
        self.on_due_changed: Callable[[], None] = _do_nothing
        """Called when the earliest due time may be earlier than before, or when the view has become complete. See
        `next_wake_ms`."""
        self.on_reset: Callable[[], None] = _do_nothing
        """Called when a part of the log was truncated."""
        self.on_damage: Callable[[int, MansioError], None] = _ignore_damage
        """Called with the offset of a batch that cannot be read."""
        self.pending = PendingRecords()
        self.schedules = Schedules()
        self.applied_end = 0
        self._load()

    @property
    def is_complete(self) -> bool:
        """Whether the view contains the whole log."""
        return self.applied_end >= self._log.end_offset and not self._is_reading

    @property
    def is_empty(self) -> bool:
        """Whether no record is pending and there is no schedule."""
        return not self.pending and not self.schedules

    @property
    def next_wake_ms(self) -> int | None:
        """When the earliest pending record or schedule is due, ms since the Unix epoch; None if there is none."""
        record_ms, schedule_ms = self.pending.next_due_ms, self.schedules.next_wake_ms
        if record_ms is None or schedule_ms is None:
            return schedule_ms if record_ms is None else record_ms
        return min(record_ms, schedule_ms)

    def stage(self, crc: int, apply: Callable[[int], None]) -> None:
        """Have `apply(base_offset)` called when the control batch with this CRC is appended, instead of reading it."""
        self._staged = (crc, apply)

    def stage_delivery(self, control_crc: int, batch_crc: int) -> None:
        """Announce the two batches of a delivery of records that are not in the view any more."""
        self._stage_pair(control_crc, batch_crc, _do_nothing)

    def stage_firings(self, control_crc: int, batch_crc: int, firings: Sequence[Firing]) -> None:
        """Announce the two batches of firings. They are applied when the second one is appended."""
        self._stage_pair(control_crc, batch_crc, partial(self.schedules.apply_firings, firings))

    def _stage_pair(self, control_crc: int, batch_crc: int, on_second: Callable[[], object]) -> None:
        def apply(base_offset: int) -> None:
            self._expected = (base_offset + 1, batch_crc, on_second)

        self.stage(control_crc, apply)

    # Hook methods

    def before_append(self, header: BatchHeader) -> AppendResult | None:  # noqa: ARG002 - the hook's signature
        return None

    def on_append(self, header: BatchHeader, base_offset: int) -> None:
        staged = self._staged
        is_staged = staged is not None and staged[0] == header.crc
        if is_staged or not header.is_control:  # a control batch with deduplication ids may precede
            self._staged = None
        if self._is_reading or base_offset < self.applied_end:
            return
        if self.applied_end != base_offset or (header.is_control and not is_staged):
            self._read_on()
        else:
            self.applied_end = base_offset + header.last_offset_delta + 1
            self._unsaved_bytes += header.batch_length
            if staged is not None and is_staged:
                self._expected = None
                staged[1](base_offset)
            else:
                self._apply_data_batch(header.crc, base_offset)
        if self._unsaved_bytes >= SNAPSHOT_INTERVAL_BYTES and self._waiting_snapshot is None:
            self._prepare_snapshot()

    def on_committed(self, high_watermark: int) -> None:
        if self.retained_until is not None and self.retained_until[0] <= high_watermark:
            self.retained_until = None
        snapshot = self._waiting_snapshot
        if snapshot is not None and snapshot.end_offset <= high_watermark:
            self._waiting_snapshot = None
            self._background.submit(lambda: self._save(snapshot), self._log_save_error)

    def on_trim(self, start_offset: int) -> None:
        """Do nothing: `retention_floor` keeps what is needed."""

    def on_truncate(self, end_offset: int) -> None:
        """Load the view again from the latest snapshot at or below `end_offset`, and the log."""
        self._snapshots.remove_beyond(end_offset)
        self._waiting_snapshot = self.retained_until = self._staged = self._expected = None
        self.pending = PendingRecords()
        self.schedules = Schedules()
        self.on_reset()
        self._load()

    def readable_end(self, isolation_level: int) -> int | None:  # noqa: ARG002 - the hook's signature
        return None

    def retention_floor(self) -> int | None:
        locations = (self.pending.lowest_location(), self.schedules.lowest_location())
        floor = min((location for location in locations if location is not None), default=None)
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
            self._save(_Snapshot(end_offset, self.pending.freeze(), self.schedules.freeze()))

    # Application of the log

    def _read_on(self) -> None:
        """Apply the log from `applied_end` on in slices, starting with the first one now."""
        if not self._is_reading:
            self._is_reading = True
            self._read_slice()

    def _read_slice(self) -> None:
        log = self._log
        if self._closed or not self._is_reading:
            return
        try:
            ids_read = 0
            for header in islice(log.batch_headers(self.applied_end), SLICE_BATCHES):
                if ids_read >= SLICE_RECORDS:
                    break
                base_offset = header.base_offset
                if base_offset > self.applied_end >= log.compaction.state.sparse_end_offset:
                    raise CorruptLog(f"{self._directory}: offset {self.applied_end} cannot be read")
                if header.is_control:
                    ids_read += self._apply_control_batch(next(log.batches(base_offset)), base_offset)
                else:
                    self._apply_data_batch(header.crc, base_offset)
                self.applied_end = header.last_offset + 1
                self._unsaved_bytes += header.batch_length
                self._failures = 0
        except (MansioError, OSError) as error:
            self._on_read_error(error)
            return
        if self.applied_end < log.end_offset:
            self._scheduler.call_soon(self._read_slice)
            return
        self._is_reading = False
        self.on_due_changed()

    def _on_read_error(self, error: MansioError | OSError) -> None:
        """Read again later, because a damaged batch may be repaired from a replica; finally report it and go on."""
        logger.error(
            "delayed_records_not_read",
            extra=fields(directory=self._directory, offset=self.applied_end, reason=error),
        )
        if isinstance(error, MansioError):
            self.on_damage(self.applied_end, error)
        self._failures += 1
        if self._failures > DAMAGE_RETRIES and isinstance(error, (CorruptLog, *UNREADABLE_OR_DAMAGED)):
            self._failures = 0
            found = next(self._log.batch_headers(self.applied_end), None)
            if found is None:
                self.applied_end = self._log.end_offset
            else:  # an intact batch after the damage, or the damaged one
                is_after = found.base_offset > self.applied_end
                self.applied_end = found.base_offset if is_after else found.last_offset + 1
        self._scheduler.call_later(RETRY_MS, self._read_slice)

    def _apply_control_batch(self, batch: bytes, base_offset: int) -> int:
        """Apply a control batch; return the number of ids in it. Raises `CorruptMessage` for damage."""
        check_stored_batch(batch)
        self._expected = None
        control = decode_delay_control(batch)
        if control is None:
            of_schedules = decode_schedule_control(batch)
            return 0 if of_schedules is None else self._apply_schedules(of_schedules, base_offset)
        pending = self.pending
        if control.type is DelayControlType.DELIVERED:
            on_second = partial(pending.remove_delivered, control.ids)
            self._expected = (base_offset + 1, control.crc, on_second)
        elif control.type is DelayControlType.CANCELLED:
            for record_id in control.ids:
                pending.remove(record_id)
        elif control.type is DelayControlType.MOVED:
            for record_id, due_ms in zip(control.ids, control.due_ms, strict=True):
                found = pending.find(record_id)
                if found is not None:
                    pending.replace(found._replace(due_ms=due_ms))
        elif control.type is DelayControlType.ACCEPTED:
            for record in locate_records(control, base_offset):
                pending.add(record)
        else:
            for record in locate_records(control, base_offset):
                pending.replace(record)
        return len(control.ids)

    def _apply_schedules(self, control: ScheduleControlRecord, base_offset: int) -> int:
        """Apply a control batch of schedules; return the number of schedules and firings in it."""
        schedules = self.schedules
        if control.type is ScheduleControlType.FIRED:
            on_second = partial(schedules.apply_firings, control.firings)
            self._expected = (base_offset + 1, control.crc, on_second)
        for schedule_id in control.ids:
            schedules.remove(schedule_id)
        for schedule in control.schedules:
            schedules.put(schedule, base_offset)
        return len(control.ids) + len(control.schedules) + len(control.firings)

    def _apply_data_batch(self, crc: int, base_offset: int) -> None:
        expected, self._expected = self._expected, None
        if expected is not None and expected[:2] == (base_offset, crc):
            expected[2]()

    # Snapshots

    def _prepare_snapshot(self) -> None:
        if self._expected is None and not self._is_reading:
            self._unsaved_bytes = 0
            self._waiting_snapshot = _Snapshot(
                self.applied_end, self.pending.freeze(), self.schedules.freeze()
            )

    def _load(self) -> None:
        log = self._log
        self._snapshots.remove_beyond(log.end_offset)
        self.applied_end, self._saved_end_offset = log.start_offset, -1
        for path in self._snapshots.paths():
            try:
                data = self._disk.read_file(path)
                payload = decode_checksummed(_MAGIC, _VERSION, data)
                position = _END_OFFSET.size
                schedules = Schedules()
                if payload is None:
                    payload = decode_checksummed(_MAGIC, _VERSION_WITHOUT_SCHEDULES, data)
                    if payload is None:
                        raise CorruptLog(f"{path} is damaged")
                else:
                    (size,) = _SIZE.unpack_from(payload, position)
                    begin = position + _SIZE.size
                    position = begin + size
                    schedules = Schedules.from_bytes(payload[begin:position])
                (end_offset,) = _END_OFFSET.unpack_from(payload)
                if not log.start_offset <= end_offset <= log.end_offset:
                    continue  # what was pending then and still is was copied to a later part of the log
                self.pending = PendingRecords.from_bytes(payload[position:])
                self.schedules = schedules
            except (CorruptLog, OSError, struct.error) as error:
                logger.warning("delay_snapshot_read_failed", extra=fields(path=path, reason=error))
                continue
            self.applied_end = self._saved_end_offset = end_offset
            break
        else:
            if not self._snapshots.paths():
                # `has_delay_snapshot` is true for the directory. Nothing is pending below the log's start.
                self._save(
                    _Snapshot(log.start_offset, self.pending.freeze(), self.schedules.freeze()), durable=True
                )
        self._is_reading = self.applied_end < log.end_offset
        if self._is_reading:
            self._scheduler.call_soon(self._read_slice)

    def _save(self, snapshot: _Snapshot, *, durable: bool = False) -> None:
        end_offset, records, schedules = snapshot
        encoded = schedules.to_bytes()
        payload = b"".join(
            (_END_OFFSET.pack(end_offset), _SIZE.pack(len(encoded)), encoded, records.to_bytes())
        )
        data = encode_checksummed(_MAGIC, _VERSION, payload)
        self._snapshots.save(end_offset, data, durable=durable)
        self._saved_end_offset = end_offset

    def _log_save_error(self, result: None, error: BaseException | None) -> None:  # noqa: ARG002 - the port's signature
        if error is not None:  # the previous snapshot remains valid
            logger.warning(
                "delay_snapshot_write_failed", extra=fields(directory=self._directory, reason=error)
            )


def locate_records(control: DelayControlRecord, location: int) -> list[PendingRecord]:
    """Return the pending records of a control record ACCEPTED or COPIED at offset `location`.

    Raises `CorruptMessage`."""
    header, data = decompress_batch(control.batch)
    if header.record_count != len(control.ids):
        raise CorruptMessage(f"{header.record_count} records in a control record of {len(control.ids)} ids")
    bounds = record_bounds(data, header.record_count)
    return [
        PendingRecord(due_ms, record_id, location, begin, end - begin)
        for record_id, due_ms, begin, end in zip(
            control.ids, control.due_ms, bounds, bounds[1:], strict=False
        )
    ]


def has_delay_snapshot(disk: Disk, directory: str) -> bool:
    """Return whether the directory of a partition has a snapshot, so that its log may have pending records."""
    return any(name.endswith(SNAPSHOT_SUFFIX) for name in disk.list_directory(directory))


def _do_nothing() -> None:
    """Default of the callbacks without arguments."""


def _ignore_damage(offset: int, error: MansioError) -> None:
    """Default of `DelayedRecords.on_damage`."""
