"""Checker of delayed records in simulated histories: what was promised of them, as clients and readers of logs see it.

* an acknowledged delayed record is delivered exactly once, unless it was cancelled;
* a cancellation that was acknowledged holds: the record is never delivered; one that was not may have happened or not;
* no record is delivered before the wall clock of the leader that delivers it has reached its due time;
* the due time is the one that the producer gave it, or that of the last acknowledged move, or of a move whose outcome
  is unknown;
* a record without delay is there, whatever happens to those beside it;
* the view of each replica is what its log says;
* the records of a schedule have consecutive numbers and increasing due times, none is early, and none comes after a
  deletion that was acknowledged; a schedule whose creation was acknowledged is there until somebody deletes it.

A record is known by its partition and id. Records of other kinds have a `DeliveryChecker` of their own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from mansio.broker.features.delays.delay_control_records import DelayControlType, decode_delay_control
from mansio.broker.features.delays.schedule_manager import DUE_HEADER, FIRING_HEADER, SCHEDULE_HEADER
from mansio.wire.batch.delay_headers import DELAYED_ID_HEADER, DUE_AT_HEADER
from mansio.wire.batch.record_batch import read_header
from mansio.wire.batch.record_reader import read_records
from sim.feature import UnreadBatches

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from mansio.broker.partition.partition import Partition
    from mansio.wire.batch.record_reader import Record

Id = tuple[int, int]
"""Partition and id of a delayed record."""
ANY_TIME = (-(1 << 62), 1 << 62)


class Sent(NamedTuple):
    """What a producer sent in one record. `due_ms`: earliest and latest due time; None without delay. `once`: the
    producer is idempotent, so that the record is there once."""

    value: bytes
    due_ms: tuple[int, int] | None
    once: bool


class Delivered(NamedTuple):
    """A record that is in a log for consumers."""

    index: int  # type: ignore[assignment]  # hides tuple.index, which is not used here
    offset: int
    record: Record

    def number(self, header: str) -> int | None:
        """Return the number in a header; None without it."""
        value = dict(self.record.headers).get(header)
        return None if value is None else int(value)


class DeliveryChecker(Protocol):
    """Checker of one more kind of records that the broker delivers by itself."""

    def owns(self, delivered: Delivered) -> bool:
        """Return whether a delivered record is of this kind."""

    def delivered(self, delivered: Delivered) -> None:
        """Called with each such record, in the order of the log, when it is committed."""

    def finish(self) -> None:
        """Called at the end of the history."""


class _ScheduleState:
    """What is known of one schedule."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.is_created = self.may_be_deleted = False
        self.deleted_end: int | None = None
        """Offset behind its deletion."""
        self.firings = 0
        self.due_ms = 0
        self.resumptions = 0
        """Resumptions after which no due time has been repeated yet."""


class ScheduleHistory:
    """`DeliveryChecker` of recurring schedules. Each name is used once, in one partition."""

    def __init__(self, broken: Callable[[str], object]) -> None:
        self._broken = broken
        self._states: dict[str, _ScheduleState] = {}

    def creates(self, index: int, name: str) -> None:
        self._states[name] = _ScheduleState(index)

    def is_created(self, name: str) -> None:
        self._states[name].is_created = True

    def resumes(self, name: str) -> None:
        """A paused schedule is resumed: by a clock that was set back, it may be due at times at which it has fired."""
        self._states[name].resumptions += 1

    def deletes(self, name: str) -> None:
        self._states[name].may_be_deleted = True

    def is_deleted(self, name: str, end_offset: int) -> None:
        self._states[name].deleted_end = end_offset

    def check_existing(self, index: int, names: Iterable[str]) -> None:
        """These are the schedules of a partition."""
        existing = {*names}
        for name, state in self._states.items():
            if state.index != index:
                continue
            if state.is_created and not state.may_be_deleted and name not in existing:
                self._broken(f"schedule {name} was created and is gone")
            if state.deleted_end is not None and name in existing:
                self._broken(f"schedule {name} was deleted and is there")

    def owns(self, delivered: Delivered) -> bool:
        return delivered.number(FIRING_HEADER) is not None

    def delivered(self, delivered: Delivered) -> None:
        name = (dict(delivered.record.headers)[SCHEDULE_HEADER] or b"").decode()
        number, due_ms = delivered.number(FIRING_HEADER) or 0, delivered.number(DUE_HEADER) or 0
        what = f"firing {number} of {name} is at {delivered.index}/{delivered.offset}"
        state = self._states.get(name)
        if state is None or state.index != delivered.index:
            self._broken(f"{what}, and nobody made this schedule")
            return
        if number != state.firings + 1:
            self._broken(f"{what} after firing {state.firings}")
        if delivered.record.timestamp_ms < due_ms:
            self._broken(f"{what} and was due at {due_ms}, after it was appended")
        if due_ms <= state.due_ms:
            if not state.resumptions:
                self._broken(f"{what} and was due at {due_ms}, after {state.due_ms}")
            state.resumptions -= 1
        if state.deleted_end is not None and delivered.offset >= state.deleted_end:
            self._broken(f"{what} and the schedule was deleted at {state.deleted_end}")
        state.firings, state.due_ms = number, due_ms

    def finish(self) -> None:
        """There is nothing that has to be there in the end."""

    def firings(self) -> int:
        return sum(state.firings for state in self._states.values())


class _Change:
    """What was done to one delayed record."""

    def __init__(self) -> None:
        self.is_cancelled = False
        self.may_be_cancelled = False
        self.moved_ms: int | None = None
        """Due time of the last acknowledged move."""
        self.may_be_moved_ms: dict[int, int] = {}
        """Number of a move that is not acknowledged -> due time."""


class DelayHistory:
    """`broken` is called with what is wrong, and raises."""

    def __init__(self, broken: Callable[[str], object]) -> None:
        self._broken = broken
        self.schedules = ScheduleHistory(broken)
        self.others: list[DeliveryChecker] = [self.schedules]
        self.sent: dict[bytes, tuple[int, Sent]] = {}
        self.accepted: dict[Id, Sent] = {}
        self.changes: dict[Id, _Change] = {}
        self.offsets: dict[Id, int] = {}
        """Where a delayed record was delivered."""
        self.values: dict[bytes, list[int]] = {}
        """Offsets of each value that consumers see."""
        self._unread = UnreadBatches(broken)
        self.cancelled = self.moved = self._changes = 0

    # Producers

    def sends(self, index: int, records: Iterable[Sent]) -> None:
        """A producer sends records; again, with the earliest and latest due times of all attempts."""
        for one in records:
            self.sent[one.value] = (index, one)

    def acknowledged(self, index: int, base_offset: int, records: Iterable[Sent]) -> None:
        """acks=all came back."""
        for record_id, one in enumerate(records, base_offset):
            known = self.accepted.setdefault((index, record_id), one)
            if known.value != one.value:
                self._broken(f"id {index}/{record_id} is that of {known.value!r} and of {one.value!r}")

    # Changes of pending records

    def cancels(self, index: int, ids: Iterable[int]) -> None:
        """A client asks to cancel."""
        for record_id in ids:
            self._change(index, record_id).may_be_cancelled = True

    def is_cancelled(self, index: int, ids: Iterable[int]) -> None:
        """The cancellation of these ids is committed."""
        for record_id in ids:
            self.cancelled += 1
            self._change(index, record_id).is_cancelled = True
            if (index, record_id) in self.offsets:
                self._broken(f"{index}/{record_id} was delivered, and then cancelled")

    def moves(self, index: int, ids: Iterable[int], due_ms: int) -> int:
        """A client asks to change due times; returns the number of this change."""
        self._changes += 1
        for record_id in ids:
            self._change(index, record_id).may_be_moved_ms[self._changes] = due_ms
        return self._changes

    def is_moved(self, index: int, ids: Iterable[int], number: int) -> None:
        """The move of these ids is committed: those before it do not count any more."""
        for record_id in ids:
            self.moved += 1
            change = self._change(index, record_id)
            change.moved_ms = change.may_be_moved_ms[number]
            change.may_be_moved_ms = {
                other: due_ms for other, due_ms in change.may_be_moved_ms.items() if other > number
            }

    def _change(self, index: int, record_id: int) -> _Change:
        return self.changes.setdefault((index, record_id), _Change())

    # The log

    def appends(self, partition: Partition, batches: Iterable[bytes]) -> None:
        """A leader appends batches of its own: those of a delivery must not be early by its clock."""
        now_ms = partition.clock.wall_ms()
        for batch in batches:
            if read_header(batch).is_control:
                continue
            for record in read_records(batch, output_bytes_max=1 << 24):
                delivered = Delivered(partition.index, -1, record)
                for due_ms in (delivered.number(DUE_AT_HEADER), delivered.number(DUE_HEADER)):
                    if due_ms is not None and due_ms > now_ms:
                        self._broken(
                            f"broker {partition.broker_id} delivers {record.value!r} {due_ms - now_ms} ms early"
                        )

    def read(self, partition: Partition) -> None:
        """Read what is committed in a replica's log and was not read before, and before it is deleted."""
        for header, batch in self._unread.of(partition):
            if header.is_control:
                continue
            for record in read_records(batch, output_bytes_max=1 << 24):
                self._delivered(Delivered(partition.index, record.offset, record))

    def _delivered(self, delivered: Delivered) -> None:
        for other in self.others:
            if other.owns(delivered):
                other.delivered(delivered)
                return
        index, offset, record = delivered
        value = (record.value or b"").strip()
        at, one = self.sent.get(value, (-1, None))
        if one is None or at != index:
            self._broken(f"{value!r} is at {index}/{offset}, and nobody sent it there")
            return
        offsets = self.values.setdefault(value, [])
        offsets.append(offset)
        if one.once and len(offsets) > 1:
            self._broken(f"{value!r} is at {offsets} of partition {index}")
        record_id = delivered.number(DELAYED_ID_HEADER)
        if record_id is None:
            if one.due_ms is not None:
                self._broken(f"{value!r} is at {index}/{offset} without its delay")
            return
        self._delivered_later(delivered, record_id, one)

    def _delivered_later(self, delivered: Delivered, record_id: int, one: Sent) -> None:
        index, offset, record = delivered
        key = (index, record_id)
        what = f"{one.value!r}, id {index}/{record_id}, is at {offset}"
        if key in self.offsets:
            self._broken(f"{what} and at {self.offsets[key]}")
        self.offsets[key] = offset
        accepted = self.accepted.get(key)
        if accepted is not None and accepted.value != one.value:
            self._broken(f"{what}, and this id is that of {accepted.value!r}")
        change = self.changes.get(key, _Change())
        if change.is_cancelled:
            self._broken(f"{what} and was cancelled")
        due_ms = delivered.number(DUE_AT_HEADER) or 0
        if record.timestamp_ms < due_ms:
            self._broken(f"{what}, {due_ms - record.timestamp_ms} ms early by its timestamp")
        earliest_ms, latest_ms = one.due_ms or ANY_TIME
        is_original = change.moved_ms is None and earliest_ms <= due_ms <= latest_ms
        if not is_original and due_ms not in (change.moved_ms, *change.may_be_moved_ms.values()):
            self._broken(
                f"{what} and was due at {due_ms}, not in {one.due_ms}; moved to {change.moved_ms},"
                f" {change.may_be_moved_ms}"
            )

    # The end

    def finish(self) -> None:
        """All that was due was delivered and read."""
        for key, one in self.accepted.items():
            index, record_id = key
            change = self.changes.get(key, _Change())
            if one.due_ms is None:
                if one.value not in self.values:
                    self._broken(f"{one.value!r} was acknowledged at {index}/{record_id} and is lost")
            elif key not in self.offsets and not change.may_be_cancelled:
                self._broken(f"{one.value!r} was accepted as {index}/{record_id} and is not delivered")
        for other in self.others:
            other.finish()

    def check_view(self, partition: Partition, view: dict[int, int]) -> None:
        """A replica's pending records, id -> due time, are those of its log."""
        expected = replay(partition)
        if view != expected:
            differ = dict(sorted(view.items() ^ expected.items())[:6])
            self._broken(f"broker {partition.broker_id}: view and log of {partition.name} differ in {differ}")

    def numbers(self) -> dict[str, int]:
        """How much there was of all."""
        return {
            "delayed records accepted": sum(one.due_ms is not None for one in self.accepted.values()),
            "delayed records delivered": len(self.offsets),
            "cancelled": self.cancelled,
            "moved": self.moved,
            "firings": self.schedules.firings(),
        }


def replay(partition: Partition) -> dict[int, int]:
    """The pending records of a log, id -> due time, by reading all of it."""
    pending: dict[int, int] = {}
    expected: tuple[int, int, Iterable[int]] | None = None
    for batch in partition.log.batches(partition.log.start_offset):
        header = read_header(batch)
        if not header.is_control:
            if expected is not None and expected[:2] == (header.base_offset, header.crc):
                for record_id in expected[2]:
                    pending.pop(record_id, None)
            expected = None
            continue
        expected = None
        control = decode_delay_control(batch)
        if control is None:
            continue
        if control.type is DelayControlType.DELIVERED:
            expected = (header.last_offset + 1, control.crc, control.ids)
        elif control.type is DelayControlType.CANCELLED:
            for record_id in control.ids:
                pending.pop(record_id, None)
        elif control.type is DelayControlType.MOVED:
            moved = dict(zip(control.ids, control.due_ms, strict=True))
            pending.update({record_id: due_ms for record_id, due_ms in moved.items() if record_id in pending})
        else:
            pending.update(zip(control.ids, control.due_ms, strict=True))
    return pending
