"""Delayed records of one partition on its leader: acceptance, delivery, cancellation, rescheduling. Schedules of the
partition are those of its `ScheduleManager`.

Everything is written to the partition's own log as control batches, so replication, recovery and a change of leader
need nothing else (docs/adr/0017-delayed-records-in-the-log.md). Followers only have the view (`DelayedRecords`).

* A producer's batch with delayed records is stored as one control batch, with the producer's sequence and the offsets
  that the response names. Records of that batch that are not delayed, or are due already, are delivered before the
  append returns, so that a producer's undelayed records stay in order.
* A delivery is two batches: a control batch with the ids and the CRC of the second batch, which has the records. If the
  second one is missing, the first one is void and the records are still pending: they are delivered exactly once.
* Before retention deletes a control batch, its pending records are copied to the end of the log.

Invariants:
* No record is delivered before the leader's wall clock has reached its due time.
* The view changes only with what was appended; after a failed append, the records are pending as before.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

from mansio.broker.features.delays.delay_control_records import (
    decode_delay_control,
    encode_accepted,
    encode_cancelled,
    encode_copied,
    encode_delivered,
    encode_moved,
)
from mansio.broker.features.delays.pending_records import PendingRecord
from mansio.broker.features.delays.schedule_manager import ScheduleManager
from mansio.broker.partition.append import AppendFeature, Following
from mansio.broker.partition.append_validation import RecordReader, reject_delayed
from mansio.errors import (
    UNREADABLE_OR_DAMAGED,
    CoordinatorLoadInProgress,
    CorruptMessage,
    LeaderNotAvailable,
    MansioError,
    ThrottlingQuotaExceeded,
)
from mansio.wire.batch.compression import Codec
from mansio.wire.batch.delay_headers import NOT_DELAYED_MS, base_timestamp_ms, delivered_record, read_delays
from mansio.wire.batch.record_batch import (
    TimestampType,
    build_batch,
    check_stored_batch,
    read_header,
    with_log_append_time,
)
from mansio.wire.batch.record_reader import decompress_batch, read_record_at, record_bounds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from mansio.broker.features.delays.delayed_records import DelayedRecords
    from mansio.broker.log_view.replay import ViewReplay
    from mansio.broker.partition.append import Draft
    from mansio.broker.partition.partition import Partition
    from mansio.broker.partition.partition_hook import Contents
    from mansio.ports import Buffer
    from mansio.wire.batch.delay_headers import DelayedBatch
    from mansio.wire.batch.record_batch import NewRecord

CACHED_BATCHES_MAX: Final = 32
CACHED_BYTES_MAX: Final = 16 << 20
"""Bounds of the decoded control batches that are kept, because neighbouring records are often due together."""

COPIED_RECORDS_MAX: Final = 500
COPIED_BYTES_MAX: Final = 512 << 10
"""Bounds of one control batch with copies of pending records."""

UNREADABLE_RETRY_MS: Final = 10_000
"""Time after which the delivery of a record that cannot be read is tried again."""


class StoredRecords(NamedTuple):
    """The decoded batch in a control record."""

    codec: Codec
    base_timestamp_ms: int
    data: bytes


class StoredRecordsCache:
    """The stored records that were read, or appended, last, by the offset of their control batch."""

    __slots__ = ("_bytes", "_cached")

    def __init__(self) -> None:
        self._cached: dict[int, StoredRecords] = {}
        self._bytes = 0

    def find(self, location: int) -> StoredRecords | None:
        """Return the records of the control batch at an offset; None if they are not cached."""
        return self._cached.get(location)

    def add(self, location: int, stored: StoredRecords) -> None:
        """Keep the records of a control batch, in place of older ones."""
        cached = self._cached
        cached[location] = stored
        self._bytes += len(stored.data)
        while len(cached) > 1 and (len(cached) > CACHED_BATCHES_MAX or self._bytes > CACHED_BYTES_MAX):
            self._bytes -= len(cached.pop(next(iter(cached))).data)

    def clear(self) -> None:
        """Forget all: the log may be different now."""
        self._cached.clear()
        self._bytes = 0


DELAY_READER: Final = RecordReader((), read_delays)
"""It finds the headers by decoding the records."""


class DelayManager(AppendFeature):
    """Acceptance and delivery of a partition's delayed records. All methods run on the broker's event loop."""

    __slots__ = (
        "_delivered_end",
        "_on_due_changed",
        "_stored_records",
        "has_fired",
        "partition",
        "replay",
        "schedules",
        "view",
    )

    def __init__(
        self,
        partition: Partition,
        replay: ViewReplay[DelayedRecords],
        stored: StoredRecordsCache,
        on_due_changed: Callable[[], None],
        may_write: Callable[[str, str], bool],
    ) -> None:
        """Create the manager of a view. `stored`: empty, and cleared when the log is truncated. `on_due_changed` is
        called when the earliest due time may be earlier than before. `may_write`: see `FeaturePorts`."""
        self.partition = partition
        self.replay = replay
        self.view = replay.view
        self.schedules = ScheduleManager(partition, replay, on_due_changed, may_write)
        self._stored_records = stored
        self._on_due_changed = on_due_changed
        self.has_fired = False
        """Whether the last slice was one of firings, whose duration says nothing about delayed records."""
        self._delivered_end = 0

    @property
    def uncommitted_end(self) -> int:
        """End offset of the last delivery or firing, as far as it was not truncated."""
        return min(self._delivered_end, self.partition.end_offset)

    # Acceptance

    def prepare(self, draft: Draft) -> None:
        """Store a control batch instead of a client's batch with delayed records.

        Raises `InvalidRecord` in a transaction, `ThrottlingQuotaExceeded` if too many records are pending, and
        `LeaderNotAvailable` while the view is being read."""
        batch, partition = draft.batch, self.partition
        delays: DelayedBatch | None = draft.found.get(DELAY_READER)
        if batch is None or delays is None:
            return
        if not self.replay.is_complete:  # producers retry this error, unlike that of `ensure_usable`
            raise LeaderNotAvailable(f"{partition.name}: its delayed records are being loaded")
        self._check_limits(delays)
        control = encode_accepted(batch, delays.header, delays.due_ms)
        if draft.header.is_transactional:
            reject_delayed(partition.name)
        draft.replace(control)
        draft.keeps_timestamps = True
        draft.contents[self.view] = partial(self._accept, delays)

    def _check_limits(self, delays: DelayedBatch) -> None:
        pending, settings = self.view.pending, self.partition.settings
        delayed_count = len(delays.due_ms) - delays.due_ms.count(NOT_DELAYED_MS)
        if pending.count + delayed_count > settings.delayed_records_max:
            raise ThrottlingQuotaExceeded(
                f"{self.partition.name}: {pending.count} records are pending,"
                f" mansio.delay.pending.records.max={settings.delayed_records_max}"
            )
        if pending.size_bytes + delays.bounds[-1] > settings.delayed_bytes_max:
            raise ThrottlingQuotaExceeded(
                f"{self.partition.name}: {pending.size_bytes} bytes are pending,"
                f" mansio.delay.pending.bytes.max={settings.delayed_bytes_max}"
            )

    def _accept(self, delays: DelayedBatch, base_offset: int) -> None:
        """Apply an accepted batch that was appended, but for the records that are due already: they are delivered
        next."""
        view, bounds = self.view, delays.bounds
        now_ms = self.partition.clock.wall_ms()
        records: list[PendingRecord] = []
        for index, due_ms in enumerate(delays.due_ms):
            begin = bounds[index]
            record = PendingRecord(due_ms, base_offset + index, base_offset, begin, bounds[index + 1] - begin)
            records.append(record)
        if view.accept(records, now_ms):
            header = delays.header
            self._stored_records.add(
                base_offset, StoredRecords(header.codec, base_timestamp_ms(header), delays.data)
            )
        self._on_due_changed()

    def following(self) -> Following | None:
        """Return the delivery of the records that were due when they were accepted."""
        due = self.view.take_due_at_once()
        if not due:
            return None
        return self._delivery(due, self.partition.clock.wall_ms(), self._on_due_changed)

    # Delivery

    def deliver_due(self, records_max: int, bytes_max: int) -> int:
        """Deliver the records, or fire the schedules, that are due first, at most `records_max` and `bytes_max`; return
        the number of records.

        Raises the errors of `Partition.append_unchanged`; the records and the schedules are then due as before."""
        now_ms = self.partition.clock.wall_ms()
        view = self.view
        record_ms, schedule_ms = view.pending.next_due_ms, view.schedules.next_wake_ms
        self.has_fired = (
            schedule_ms is not None
            and schedule_ms <= now_ms
            and (record_ms is None or schedule_ms < record_ms)
        )
        if self.has_fired:
            until_ms = now_ms if record_ms is None else min(now_ms, record_ms - 1)
            count = self.schedules.fire_due(until_ms, records_max, bytes_max)
            self._delivered_end = self.partition.end_offset
            return count
        limit_ms = now_ms if schedule_ms is None else min(now_ms, schedule_ms)
        due = view.take_due(limit_ms, records_max, bytes_max)
        if due and (delivery := self._delivery(due, now_ms)) is not None:
            self.partition.append_following(delivery)
        return len(due)

    def _delivery(
        self, due: Sequence[PendingRecord], now_ms: int, on_failed: Callable[[], None] | None = None
    ) -> Following | None:
        """Return what delivers records that were removed from the view; None if none of them can be read. After an
        error they are in the view again."""
        partition = self.partition
        delivered: list[NewRecord] = []
        ids: list[int] = []
        codec = Codec.NONE
        try:
            for record in due:
                try:
                    stored = self._stored(record.location)
                    content = _content(stored, record)
                except MansioError as error:
                    self._postpone(record, now_ms, error)
                    continue
                codec = stored.codec
                ids.append(record.id)
                if record.due_ms != NOT_DELAYED_MS:
                    content = delivered_record(content, record.id, record.due_ms, now_ms)
                delivered.append(content)
            if not delivered:
                return None
            batch = build_batch(delivered, codec=codec)
            if partition.rules.timestamp_type is TimestampType.LOG_APPEND:
                front = with_log_append_time(batch, read_header(batch), now_ms)
                batch = front + batch[len(front) :]
            crc = read_header(batch).crc
            control = encode_delivered(ids, crc)
        except BaseException:
            self.view.put_back(due, ids)
            raise

        def done(end_offset: int) -> None:
            self._delivered_end = end_offset
            if partition.trace is not None:
                partition.trace.report_due(ids, end_offset - len(ids), now_ms)

        def failed() -> None:
            self.view.put_back(due, ids)
            if on_failed is not None:
                on_failed()

        known: Contents = {self.view: self.view.delivery((), crc)}
        return Following((control, batch), (known, None), done, failed)

    def _postpone(self, record: PendingRecord, now_ms: int, error: MansioError) -> None:
        """Keep a record that cannot be read, and go on with the others. It is tried again, because the log may be
        repaired from a replica."""
        self.partition.report_damage(record.location, error)
        self.view.postpone(record, now_ms + UNREADABLE_RETRY_MS)

    # Changes of pending records

    def cancel(self, ids: Iterable[int]) -> tuple[list[int], int]:
        """Cancel pending records. Return the ids that were pending, and the offset up to which the log must be
        committed before the result is final.

        Raises `NotLeaderOrFollower`, `CoordinatorLoadInProgress`, and the errors of `Partition.append_unchanged`."""
        found = self._find(ids)
        if not found:
            return [], 0
        known = [record.id for record in found]
        end_offset = self._append_control(encode_cancelled(known), self.view.cancellation(known))
        self._on_due_changed()
        return known, end_offset

    def reschedule(self, ids: Iterable[int], due_ms: int) -> tuple[list[int], int]:
        """Change when pending records are due, ms since the Unix epoch. Results and errors as in `cancel`."""
        found = self._find(ids)
        if not found:
            return [], 0
        known = [record.id for record in found]
        moved_ms = [due_ms] * len(known)
        apply = self.view.move(known, moved_ms)
        end_offset = self._append_control(encode_moved(known, moved_ms), apply)
        self._on_due_changed()
        return known, end_offset

    def ensure_usable(self) -> None:
        """Raise `NotLeaderOrFollower`, or `CoordinatorLoadInProgress` while the view is being read."""
        self.partition.ensure_leader()
        if not self.replay.is_complete:
            raise CoordinatorLoadInProgress(f"{self.partition.name}: its delayed records are being loaded")

    def read(self, record: PendingRecord) -> NewRecord:
        """Return the content of a pending record: (timestamp_ms, key, value, headers).

        Raises `CorruptMessage`, `StorageError`."""
        return _content(self._stored(record.location), record)

    def _find(self, ids: Iterable[int]) -> list[PendingRecord]:
        """Return the pending records with these ids. Not those without delay, whose delivery has failed for now."""
        self.ensure_usable()
        find = self.view.pending.find
        found = [record for record_id in dict.fromkeys(ids) if (record := find(record_id)) is not None]
        return [record for record in found if record.due_ms != NOT_DELAYED_MS]

    def _append_control(self, control: bytes, apply: Callable[[int], object]) -> int:
        return self.partition.append_unchanged((control,), ({self.view: apply},))

    # Retention

    def release_below(self, offset: int) -> Iterator[Following]:
        """Yield copies of the pending records and schedules below an offset: see `ReleasingFeature`. A record that
        cannot be read is reported and stays where it is, until it is repaired or cancelled."""
        unreadable: set[int] = set()
        while True:
            self.ensure_usable()
            records = self.view.pending.located_below(offset, COPIED_RECORDS_MAX, unreadable)
            if records:
                if (copies := self._copies(records, unreadable)) is not None:
                    yield copies
            elif (copies := self.schedules.copies_below(offset)) is not None:
                yield copies
            else:
                return

    def _copies(self, records: Sequence[PendingRecord], unreadable: set[int]) -> Following | None:
        """Return copies of records, at least one and at most `COPIED_BYTES_MAX`; None if none can be read. The ids of
        records that cannot be read are added to `unreadable`."""
        copied: list[PendingRecord] = []
        contents: list[NewRecord] = []
        size = 0
        for record in records:
            size += record.size
            if copied and size > COPIED_BYTES_MAX:
                break
            try:
                contents.append(self.read(record))
            except UNREADABLE_OR_DAMAGED as error:
                self.partition.report_damage(record.location, error)
                unreadable.add(record.id)
            else:
                copied.append(record)
        if not copied:
            return None
        batch = build_batch(contents)
        apply = self.view.copies(copied, record_bounds(_decode(batch).data, len(contents)))
        control = encode_copied([record.id for record in copied], [record.due_ms for record in copied], batch)
        return Following((control,), ({self.view: apply},))

    # Stored records

    def _stored(self, location: int) -> StoredRecords:
        """Read the control batch at an offset. Raises `CorruptMessage`, `StorageError`."""
        found = self._stored_records.find(location)
        if found is None:
            batch = next(self.partition.log.batches(location), b"")
            check_stored_batch(batch)
            control = decode_delay_control(batch)
            if control is None or not control.batch:
                raise CorruptMessage(f"{self.partition.name}: no delayed records at offset {location}")
            found = _decode(control.batch)
            self._stored_records.add(location, found)
        return found


def _decode(batch: Buffer) -> StoredRecords:
    header, data = decompress_batch(batch)
    return StoredRecords(header.codec, base_timestamp_ms(header), data)


def _content(stored: StoredRecords, record: PendingRecord) -> NewRecord:
    return read_record_at(
        stored.data, record.position, record.position + record.size, stored.base_timestamp_ms
    )
