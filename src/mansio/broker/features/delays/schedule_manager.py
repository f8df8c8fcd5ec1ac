"""Recurring schedules of one partition on its leader: creation, changes, firing.

A schedule lives in the log of the partition to which it appends (docs/adr/0018-schedules-in-the-log.md), so the leader
of the partition owns it, and the leader epoch fences any other owner. Followers only have the view (`DelayedRecords`).

* A firing is two batches, like a delivery: a control batch with the schedule, the number of the firing, when it is due
  next, and the CRC of the second batch, which has the record. If the second one is missing, the first one is void.
* The leader computes due times; replicas read them from the log.

Invariants:
* No record is appended before the leader's wall clock has reached its due time.
* Each firing is appended once. The view changes only with what was appended.
* A name is unique in the partition.
"""

from __future__ import annotations

import heapq
import logging
import shlex
from typing import TYPE_CHECKING, Final

from mansio.broker.features.delays.recurrence import Recurrence, next_step
from mansio.broker.features.delays.schedules import record_bytes
from mansio.broker.partition.append import Following
from mansio.errors import (
    CoordinatorLoadInProgress,
    DelaysNotEnabled,
    InvalidSchedule,
    MansioError,
    MessageTooLarge,
    PolicyViolation,
    ScheduleAlreadyExists,
    ScheduleNotFound,
    TopicAuthorizationFailed,
)
from mansio.host.item_turns import ItemTurns
from mansio.logs import fields
from mansio.wire.batch.delay_headers import DELAY_HEADER, DELIVER_AT_HEADER
from mansio.wire.batch.record_batch import (
    TimestampType,
    build_batch,
    read_header,
    with_log_append_time,
)
from mansio.wire.batch.schedule_control_records import (
    NOT_DUE_MS,
    Firing,
    encode_fired,
    encode_scheduled,
    encode_unscheduled,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from uuid import UUID

    from mansio.broker.features.delays.delayed_records import DelayedRecords
    from mansio.broker.log_view.replay import ViewReplay
    from mansio.broker.partition.partition import Partition
    from mansio.broker.partition.partition_hook import Contents
    from mansio.wire.batch.record_batch import NewRecord
    from mansio.wire.batch.schedule_control_records import Schedule

logger = logging.getLogger(__name__)

SCHEDULES_MAX: Final = 1_000
"""Maximum number of schedules of a partition."""

SCHEDULES_BYTES_MAX: Final = 16 << 20
"""Maximum size of the records of a partition's schedules, which are in memory on each replica."""

NAME_LENGTH_MAX: Final = 200
TEXT_BYTES_MAX: Final = 0xFFFF

SCHEDULE_HEADER: Final = "mansio-schedule"
FIRING_HEADER: Final = "mansio-schedule-firing"
DUE_HEADER: Final = "mansio-schedule-due-ms"
RESERVED_HEADERS: Final = frozenset(
    {SCHEDULE_HEADER, FIRING_HEADER, DUE_HEADER, DELAY_HEADER, DELIVER_AT_HEADER}
)

SCHEDULE_RETRY_MS: Final = 10_000
"""Time after which a schedule whose next due time cannot be computed is tried again."""

COPIED_BYTES_MAX: Final = 512 << 10
"""Bound of one control batch with copies of schedules."""

SLICE_STEPS_MAX: Final = 128
"""Number of schedules that one slice looks at. The others that are due are later in order."""


class ScheduleManager:
    """Schedules of a partition on its leader. All methods run on the broker's event loop."""

    __slots__ = ("_errors", "_may_write", "_on_due_changed", "_partition", "_replay", "_view")

    def __init__(
        self,
        partition: Partition,
        replay: ViewReplay[DelayedRecords],
        on_due_changed: Callable[[], object],
        may_write: Callable[[str, str], bool],
    ) -> None:
        """`on_due_changed` is called when the earliest due time may be earlier than before. `may_write`: see
        `FeaturePorts`."""
        self._may_write = may_write
        self._on_due_changed = on_due_changed
        self._partition = partition
        self._replay = replay
        self._view = replay.view
        self._errors: dict[UUID, tuple[int, str]] = {}
        """Due time of a firing that is not possible at present, and why. Void once the schedule has another due time,
        for example because another broker, which was the leader in between, has fired it."""

    # Queries

    def schedules(self) -> list[Schedule]:
        """Return all schedules, by name. Raises `NotLeaderOrFollower`, `CoordinatorLoadInProgress`."""
        self._ensure_usable()
        return sorted(self._view.schedules, key=_by_name)

    def error(self, schedule: Schedule) -> str:
        """Return why a schedule cannot fire at present; "" if it can."""
        due_ms, reason = self._errors.get(schedule.id, (NOT_DUE_MS, ""))
        return reason if due_ms == schedule.next_due_ms else ""

    def failing(self) -> list[tuple[str, str]]:
        """Return name and reason of each schedule that cannot fire at present, by name."""
        if not self._errors:
            return []
        return sorted((one.name, reason) for one in self._view.schedules if (reason := self.error(one)))

    # Changes

    def create(self, schedule: Schedule) -> tuple[Schedule, int]:
        """Create a schedule; its creation time and due time are set here. A schedule with the same name and definition
        is returned unchanged. Results as of `pause`.

        Raises `InvalidSchedule`, `DelaysNotEnabled` if the topic does not accept delays, `ScheduleAlreadyExists` if one
        with this name has another definition, `MessageTooLarge`, `PolicyViolation` if there are too many, the errors
        and `LookUpRequired` of `AppendPipeline.check_later`, and the errors of `pause`."""
        self._ensure_usable()
        partition = self._partition
        if not partition.settings.accepts_delays:
            raise not_enabled_error(partition.topic)
        now_ms = partition.clock.wall_ms()
        schedule = schedule._replace(created_ms=now_ms, next_due_ms=NOT_DUE_MS, firings=0, is_paused=False)
        self._check(schedule)
        known = self._view.schedules.find(schedule.name)
        if known is not None:
            if not has_same_definition(known, schedule):
                raise ScheduleAlreadyExists(
                    f"schedule {schedule.name!r} exists with another definition:"
                    f" mansio schedule delete {shlex.quote(schedule.name)} --topic {partition.topic}"
                )
            return known, partition.end_offset
        return self._store(schedule._replace(next_due_ms=_next_due_ms(schedule, now_ms)))

    def pause(self, name: str) -> tuple[Schedule, int]:
        """Stop the firings of a schedule. Return its state, and the offset up to which the log must be committed before
        that is final.

        Raises `ScheduleNotFound`, `NotLeaderOrFollower`, `CoordinatorLoadInProgress`, and the errors of
        `Partition.append_unchanged`."""
        schedule = self._find(name)
        if schedule.is_paused:
            return schedule, self._partition.end_offset
        return self._store(schedule._replace(is_paused=True, next_due_ms=NOT_DUE_MS))

    def resume(self, name: str) -> tuple[Schedule, int]:
        """Let a paused schedule fire again, from its next due time on: firings in the pause are not caught up. Results
        and errors as of `pause`."""
        schedule = self._find(name)
        if not schedule.is_paused:
            return schedule, self._partition.end_offset
        next_due_ms = _next_due_ms(schedule, self._partition.clock.wall_ms())
        return self._store(schedule._replace(is_paused=False, next_due_ms=next_due_ms))

    def delete(self, name: str) -> tuple[Schedule, int]:
        """Delete a schedule. Results and errors as of `pause`."""
        schedule = self._find(name)
        apply = self._view.deletion([schedule.id])
        end_offset = self._append_control(encode_unscheduled([schedule.id]), apply)
        self._errors.pop(schedule.id, None)
        return schedule, end_offset

    def _check(self, schedule: Schedule) -> None:
        """Raise an error if a schedule cannot be created."""
        name, view, partition = schedule.name, self._view, self._partition
        if not name or len(name) > NAME_LENGTH_MAX or not name.isprintable():
            raise InvalidSchedule(f"a schedule's name has 1 to {NAME_LENGTH_MAX} printable characters")
        if len(schedule.timezone.encode()) > TEXT_BYTES_MAX or len(schedule.cron.encode()) > TEXT_BYTES_MAX:
            raise InvalidSchedule("the cron expression or the time zone is too long")
        reserved = next((header for header, _ in schedule.headers if header in RESERVED_HEADERS), None)
        if reserved is not None:
            raise InvalidSchedule(f"header {reserved} cannot be part of a schedule")
        Recurrence(schedule.cron, schedule.every_ms, schedule.timezone, schedule.created_ms).check()
        limit = partition.rules.message_bytes_max
        batch = build_batch([_fired_record(schedule, 1 << 62, 0, 0)])
        if len(batch) > limit:
            raise MessageTooLarge(f"the record of the schedule is larger than max.message.bytes={limit}")
        partition.pipeline.check_later(batch)
        schedules = view.schedules
        if schedules.find(name) is not None:
            return
        if schedule.id in schedules:
            raise InvalidSchedule(f"the id of the schedule {name!r} is used by another one")
        if len(schedules) >= SCHEDULES_MAX:
            raise PolicyViolation(f"{partition.name} has {SCHEDULES_MAX} schedules, which is the limit")
        if schedules.size_bytes + record_bytes(schedule) > SCHEDULES_BYTES_MAX:
            raise PolicyViolation(
                f"the records of the schedules of {partition.name} would have more than"
                f" {SCHEDULES_BYTES_MAX >> 20} MiB"
            )

    def _store(self, schedule: Schedule) -> tuple[Schedule, int]:
        """Append a new state of a schedule."""
        end_offset = self._append_states([schedule])
        self._errors.pop(schedule.id, None)
        self._on_due_changed()
        return schedule, end_offset

    def _append_states(self, schedules: Sequence[Schedule]) -> int:
        return self._append_control(encode_scheduled(schedules), self._view.definition(schedules))

    def _append_control(self, control: bytes, apply: Callable[[int], object]) -> int:
        return self._partition.append_unchanged((control,), ({self._view: apply},))

    def _find(self, name: str) -> Schedule:
        self._ensure_usable()
        found = self._view.schedules.find(name)
        if found is None:
            raise ScheduleNotFound(f"{self._partition.name} has no schedule {name!r}")
        return found

    def _ensure_usable(self) -> None:
        """Raise `NotLeaderOrFollower`, or `CoordinatorLoadInProgress` while the view is being read."""
        self._partition.ensure_leader()
        if not self._replay.is_complete:
            raise CoordinatorLoadInProgress(f"{self._partition.name}: its schedules are being loaded")

    # Firing

    def fire_due(self, until_ms: int, records_max: int, bytes_max: int) -> int:
        """Append the records of schedules that are due, up to a time that is not later than now, in the order of their
        due times, for about `TURN_S`; at most `records_max` and `bytes_max`. Missed firings are caught up as each
        schedule requires. Returns the number of records; schedules that are still due are left for the next call.

        Raises the errors of `Partition.append_unchanged`; the schedules are then due as before."""
        now_ms = self._partition.clock.wall_ms()
        steps_max = min(records_max, SLICE_STEPS_MAX)
        queue = [(one.next_due_ms, one.name, one) for one in self._view.schedules.due(until_ms, steps_max)]
        records: list[NewRecord] = []
        firings: list[Firing] = []
        skipped: list[Schedule] = []
        size = 0
        turn = ItemTurns(self._partition.scheduler, items_per_look=1)
        for step in range(steps_max):
            if not queue or size >= bytes_max or (step and turn.is_over()):
                break
            due_ms, name, schedule = heapq.heappop(queue)  # a sorted list is a heap
            try:
                self._check_owner(schedule)
                self._check_key(schedule)
                fired_ms, next_ms = next_step(_recurrence(schedule), due_ms, now_ms, schedule.catch_up)
            except (InvalidSchedule, TopicAuthorizationFailed) as error:
                self._postpone(schedule, now_ms, error)
                continue
            self._errors.pop(schedule.id, None)
            next_due_ms = NOT_DUE_MS if next_ms is None else next_ms
            if fired_ms is None:
                skipped.append(schedule._replace(next_due_ms=next_due_ms))
                size += record_bytes(schedule)
                continue
            schedule = schedule._replace(firings=schedule.firings + 1, next_due_ms=next_due_ms)
            firings.append(Firing(schedule.id, schedule.firings, next_due_ms))
            records.append(_fired_record(schedule, schedule.firings, fired_ms, now_ms))
            size += record_bytes(schedule)
            if next_due_ms != NOT_DUE_MS and next_due_ms <= until_ms:
                heapq.heappush(queue, (next_due_ms, name, schedule))
        if records:
            self._append_firings(records, firings, now_ms)
        if skipped:  # of these, none has fired in this slice
            self._append_states(skipped)
        return len(records)

    def _check_owner(self, schedule: Schedule) -> None:
        """Raise `TopicAuthorizationFailed` if who has created a schedule may not write to the topic any more. The
        schedule is tried again, and goes on when the right is back."""
        topic = self._partition.topic
        if not self._may_write(schedule.owner, topic):
            principal = schedule.owner.partition(" ")[2]
            raise TopicAuthorizationFailed(
                f"{principal}, who has created the schedule, is not allowed to WRITE the topic {topic}"
            )

    def _check_key(self, schedule: Schedule) -> None:
        """Raise `InvalidSchedule` if the record of a schedule has no key, and the topic has been compacted since the
        schedule was created."""
        partition = self._partition
        if schedule.key is None and partition.rules.requires_keys:
            raise InvalidSchedule(
                f"topic {partition.topic!r} is compacted, so its records need keys, and the schedule has none"
            )

    def _append_firings(self, records: Sequence[NewRecord], firings: Sequence[Firing], now_ms: int) -> None:
        partition = self._partition
        batch = build_batch(records)
        if partition.rules.timestamp_type is TimestampType.LOG_APPEND:
            front = with_log_append_time(batch, read_header(batch), now_ms)
            batch = front + batch[len(front) :]
        batch_crc = read_header(batch).crc
        control = encode_fired(firings, batch_crc)
        known: Contents = {self._view: self._view.firing(firings, batch_crc)}
        partition.append_unchanged((control, batch), (known, None))

    def _postpone(self, schedule: Schedule, now_ms: int, error: MansioError) -> None:
        """Try a schedule again later whose next due time cannot be computed on this broker."""
        partition = self._partition
        self._view.schedules.postpone(schedule.id, now_ms + SCHEDULE_RETRY_MS)
        found = (schedule.next_due_ms, error.message)
        if self._errors.get(schedule.id) != found:
            self._errors[schedule.id] = found
            logger.error(
                "schedule_failed",
                extra=fields(
                    topic=partition.topic,
                    partition=partition.index,
                    schedule=schedule.name,
                    reason=error.message,
                ),
            )

    def retry_soon(self) -> None:
        """Try schedules that cannot fire again after `SCHEDULE_RETRY_MS`, because the wall clock was set back."""
        self._view.schedules.limit_postponed(self._partition.clock.wall_ms() + SCHEDULE_RETRY_MS)

    # Retention

    def copies_below(self, offset: int) -> Following | None:
        """Return copies of schedules that are defined below an offset, some of them; None if there are none."""
        found = self._view.schedules.located_below(offset)
        if not found:
            return None
        copied: list[Schedule] = []
        size = 0
        for schedule in found:
            size += record_bytes(schedule)
            if copied and size > COPIED_BYTES_MAX:
                break
            copied.append(schedule)
        return Following((encode_scheduled(copied),), ({self._view: self._view.definition(copied)},))


def not_enabled_error(topic: str) -> DelaysNotEnabled:
    """Return the error for a new schedule in a topic that does not accept delays; clients word it so, too."""
    return DelaysNotEnabled(
        f"topic '{topic}' does not accept delays: mansio topic alter {topic} -c mansio.delay.enable=true"
    )


def has_same_definition(one: Schedule, other: Schedule) -> bool:
    """Whether two schedules differ only in their ids and states."""
    return one[1:9] == other[1:9]


def _by_name(schedule: Schedule) -> str:
    return schedule.name


def _recurrence(schedule: Schedule) -> Recurrence:
    return Recurrence(schedule.cron, schedule.every_ms, schedule.timezone, schedule.created_ms)


def _next_due_ms(schedule: Schedule, moment_ms: int) -> int:
    found_ms = _recurrence(schedule).next_after(moment_ms)
    return NOT_DUE_MS if found_ms is None else found_ms


def _fired_record(schedule: Schedule, number: int, due_ms: int, now_ms: int) -> NewRecord:
    """Return the record of a firing: with the time at which it is appended as timestamp."""
    headers = [
        *schedule.headers,
        (SCHEDULE_HEADER, schedule.name.encode()),
        (FIRING_HEADER, b"%d" % number),
        (DUE_HEADER, b"%d" % due_ms),
    ]
    return now_ms, schedule.key, schedule.value, headers
