"""Pending records and schedules of one partition as a view of its log (`LogView`), on leaders and followers.

The view applies the control batches of delayed records (`mansio.broker.features.delays.delay_control_records`) and of
schedules (`mansio.wire.batch.schedule_control_records`). The content of a control batch is a function that applies it,
given its base offset.

Invariants:
* Retention keeps each control batch that contains a pending record or a schedule.
* Delivered records are removed from the view, and firings applied to it, only when the batch that contains them is in
  the log: see DELIVERED and FIRED. No snapshot is taken between the two batches.
* Only the view adds and removes records and schedules. Control batches have the same effect on a leader, which appends
  them with their contents, as on a follower, which decodes them.
"""

from __future__ import annotations

import struct
from functools import partial
from typing import TYPE_CHECKING, Final

from mansio.broker.features.delays.delay_control_records import (
    DelayControlType,
    decode_delay_control,
)
from mansio.broker.features.delays.pending_records import PendingRecord, PendingRecords
from mansio.broker.features.delays.schedules import Schedules
from mansio.broker.log_view.view import DecodedBatch, LogView
from mansio.errors import CorruptLog, CorruptMessage
from mansio.storage.checksummed_file import decode_checksummed, encode_checksummed
from mansio.wire.batch.record_batch import read_header
from mansio.wire.batch.record_reader import decompress_batch, record_bounds
from mansio.wire.batch.schedule_control_records import ScheduleControlType, decode_schedule_control

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from uuid import UUID

    from mansio.broker.features.delays.delay_control_records import DelayControlRecord
    from mansio.broker.features.delays.pending_records import FrozenRecords
    from mansio.broker.features.delays.schedules import FrozenSchedules
    from mansio.storage.log import Log
    from mansio.wire.batch.record_batch import BatchHeader
    from mansio.wire.batch.schedule_control_records import Firing, Schedule, ScheduleControlRecord

    ApplyAt = Callable[[int], object]
    """Applies a control batch, given its base offset."""

SNAPSHOT_SUFFIX: Final = ".delays"
_MAGIC: Final = b"MDELAYS\n"
_VERSION: Final = 2
_VERSION_WITHOUT_SCHEDULES: Final = 1
_END_OFFSET: Final = struct.Struct(">q")
_SIZE: Final = struct.Struct(">I")  # of the schedules in a snapshot


class DelayedRecords(LogView["ApplyAt"]):
    """The pending records and schedules of a partition."""

    __slots__ = (
        "_due_at_once",
        "_expected",
        "_log",
        "_on_due_changed",
        "_on_truncated",
        "pending",
        "schedules",
    )

    kind = "delayed_records"
    suffix = SNAPSHOT_SUFFIX

    def __init__(
        self, log: Log, on_due_changed: Callable[[], object], on_truncated: Callable[[], object]
    ) -> None:
        """`on_due_changed` is called when the view has become complete, so that the earliest due time may be earlier
        than before; `on_truncated` when a part of the log was truncated."""
        self._log = log
        self._on_due_changed = on_due_changed
        self._on_truncated = on_truncated
        self._expected: tuple[int, int, Callable[[], object]] | None = None
        """Offset and CRC of the second batch of a delivery or of firings, and what applies them if it follows."""
        self._due_at_once: list[PendingRecord] = []
        """Accepted records that are not pending, because their delivery is appended next."""
        self.pending = PendingRecords()
        self.schedules = Schedules()

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

    # Contents of control batches

    def delivery(self, ids: Sequence[int], batch_crc: int) -> ApplyAt:
        """Return the content of a control batch DELIVERED: the records are removed when the batch with this CRC, which
        contains them, follows."""
        return self._first_of_two(batch_crc, partial(self.pending.remove_delivered, ids))

    def firing(self, firings: Sequence[Firing], batch_crc: int) -> ApplyAt:
        """Return the content of a control batch FIRED: the firings are applied when the batch with this CRC follows."""
        return self._first_of_two(batch_crc, partial(self.schedules.apply_firings, firings))

    def _first_of_two(self, batch_crc: int, on_second: Callable[[], object]) -> ApplyAt:
        def apply(base_offset: int) -> None:
            self._expected = (base_offset + 1, batch_crc, on_second)

        return apply

    def cancellation(self, ids: Sequence[int]) -> ApplyAt:
        """Return the content of a control batch CANCELLED."""

        def apply(_: int) -> None:
            for record_id in ids:
                self.pending.remove(record_id)

        return apply

    def move(self, ids: Sequence[int], due_ms: Sequence[int]) -> ApplyAt:
        """Return the content of a control batch MOVED: each of the records that is still pending gets its due time."""

        def apply(_: int) -> None:
            for record_id, moved_ms in zip(ids, due_ms, strict=True):
                if (found := self.pending.find(record_id)) is not None:
                    self.pending.replace(found._replace(due_ms=moved_ms))

        return apply

    def copies(self, records: Sequence[PendingRecord], bounds: Sequence[int]) -> ApplyAt:
        """Return the content of a control batch COPIED. `bounds`: of the copies in the decoded batch."""

        def apply(base_offset: int) -> None:
            for record, begin, end in zip(records, bounds, bounds[1:], strict=False):
                self.pending.replace(record._replace(location=base_offset, position=begin, size=end - begin))

        return apply

    def definition(self, schedules: Sequence[Schedule]) -> ApplyAt:
        """Return the content of a control batch SCHEDULED."""

        def apply(base_offset: int) -> None:
            for schedule in schedules:
                self.schedules.put(schedule, base_offset)

        return apply

    def deletion(self, schedule_ids: Sequence[UUID]) -> ApplyAt:
        """Return the content of a control batch UNSCHEDULED."""

        def apply(_: int) -> None:
            for schedule_id in schedule_ids:
                self.schedules.remove(schedule_id)

        return apply

    # Delivery by the leader

    def accept(self, records: Iterable[PendingRecord], now_ms: int) -> bool:
        """Add accepted records, but for those that are due already. Return whether there are any: the caller has to
        take and deliver them (`take_due_at_once`)."""
        add = self.pending.add
        due: list[PendingRecord] = []
        for record in records:
            if record.due_ms > now_ms:
                add(record)
            else:
                due.append(record)
        if due:
            self._due_at_once = due
        return bool(due)

    def take_due_at_once(self) -> list[PendingRecord]:
        """Remove and return the records that were due when they were accepted."""
        due, self._due_at_once = self._due_at_once, []
        return due

    def take_due(self, now_ms: int, records_max: int, bytes_max: int) -> list[PendingRecord]:
        """Remove and return the earliest records that are due, as `PendingRecords.take_due`."""
        return self.pending.take_due(now_ms, records_max, bytes_max)

    def postpone(self, record: PendingRecord, until_ms: int) -> None:
        """Add a record again that was taken; it is due at this time."""
        self.pending.postpone(record, until_ms)

    def put_back(self, due: Sequence[PendingRecord], ids: Iterable[int]) -> None:
        """Add records again that were taken and not delivered. `ids`: of those that are not postponed."""
        pending, known = self.pending, {*ids}
        for record in due:
            if record.id in known or pending.find(record.id) is None:
                pending.replace(record)

    # Application of the log

    def decode(self, batch: bytes) -> DecodedBatch:
        control = decode_delay_control(batch)
        if control is None:
            of_schedules = decode_schedule_control(batch)
            if of_schedules is None:
                return DecodedBatch(None)
            count = len(of_schedules.ids) + len(of_schedules.schedules) + len(of_schedules.firings)
            return DecodedBatch(partial(self._apply_schedules, of_schedules), count)
        if control.type in (DelayControlType.ACCEPTED, DelayControlType.COPIED):
            located = _locate_records(control, read_header(batch).base_offset)
            return DecodedBatch(partial(self._apply_records, control.type, located), len(control.ids))
        return DecodedBatch(partial(self._apply_delays, control), len(control.ids))

    def apply(self, header: BatchHeader, base_offset: int, content: ApplyAt | None) -> None:
        expected, self._expected = self._expected, None
        if content is not None:
            content(base_offset)
        elif expected is not None and expected[:2] == (base_offset, header.crc):
            expected[2]()

    def _apply_records(self, kind: DelayControlType, located: Sequence[PendingRecord], _: int) -> None:
        change = self.pending.add if kind is DelayControlType.ACCEPTED else self.pending.replace
        for record in located:
            change(record)

    def _apply_delays(self, control: DelayControlRecord, base_offset: int) -> None:
        if control.type is DelayControlType.DELIVERED:
            self.delivery(control.ids, control.crc)(base_offset)
        elif control.type is DelayControlType.CANCELLED:
            self.cancellation(control.ids)(base_offset)
        else:
            self.move(control.ids, control.due_ms)(base_offset)

    def _apply_schedules(self, control: ScheduleControlRecord, base_offset: int) -> None:
        if control.type is ScheduleControlType.FIRED:
            self.firing(control.firings, control.crc)(base_offset)
        self.deletion(control.ids)(base_offset)
        self.definition(control.schedules)(base_offset)

    def skip_to(self, offset: int) -> None:
        del offset
        self._expected = None

    def truncate(self, end_offset: int, start_offset: int) -> bool:
        del end_offset, start_offset
        self._expected = None
        self.pending = PendingRecords()
        self.schedules = Schedules()
        self._on_truncated()
        return False

    def on_complete(self) -> None:
        self._on_due_changed()

    def lowest_location(self) -> int | None:
        locations = (self.pending.lowest_location(), self.schedules.lowest_location())
        return min((location for location in locations if location is not None), default=None)

    @property
    def kept_bytes(self) -> int:
        return self.pending.size_bytes + self.schedules.size_bytes

    # Snapshots

    @property
    def is_whole(self) -> bool:
        return self._expected is None and not self._due_at_once

    def begin(self) -> tuple[int, bool]:
        """Nothing is pending below the start of the log. With a snapshot, `DelayFeature.is_stored` is true for the
        directory."""
        return self._log.start_offset, True

    def freeze(self, end_offset: int) -> tuple[FrozenRecords, FrozenSchedules]:
        del end_offset
        return self.pending.freeze(), self.schedules.freeze()

    def encode_snapshot(self, end_offset: int, state: tuple[FrozenRecords, FrozenSchedules]) -> bytes:
        records, schedules = state
        encoded = schedules.to_bytes()
        parts = (_END_OFFSET.pack(end_offset), _SIZE.pack(len(encoded)), encoded, records.to_bytes())
        return encode_checksummed(_MAGIC, _VERSION, b"".join(parts))

    def decode_snapshot(self, data: bytes) -> tuple[int, tuple[PendingRecords, Schedules]]:
        payload = decode_checksummed(_MAGIC, _VERSION, data)
        position = _END_OFFSET.size
        schedules = Schedules()
        if payload is None:
            payload = decode_checksummed(_MAGIC, _VERSION_WITHOUT_SCHEDULES, data)
            if payload is None:
                raise CorruptLog("snapshot of delayed records: damaged")
        else:
            (size,) = _SIZE.unpack_from(payload, position)
            begin = position + _SIZE.size
            position = begin + size
            schedules = Schedules.from_bytes(payload[begin:position])
        (end_offset,) = _END_OFFSET.unpack_from(payload)
        return end_offset, (PendingRecords.from_bytes(payload[position:]), schedules)

    def restore(self, state: tuple[PendingRecords, Schedules]) -> None:
        self.pending, self.schedules = state


def _locate_records(control: DelayControlRecord, location: int) -> list[PendingRecord]:
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
