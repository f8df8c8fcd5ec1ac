"""Schedule service: lists, creates, pauses, resumes and deletes schedules of partitions that this broker leads.

Invariants:
* A change is reported only after its control batch is committed. Each change can be repeated.
* That nothing was changed is reported, too, only after the log is committed up to its end at the time of the look-up:
  what was found there may be truncated with an uncommitted part of the log.
* A list lets other work run after each `TURN_S`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Final

from mansio.broker.features.delays.delay_manager import DelayManager
from mansio.broker.features.delays.recurrence import Recurrence
from mansio.broker.features.delays.schedule_manager import not_enabled_error
from mansio.broker.partition.partition_hook import LookUpRequired
from mansio.errors import (
    InvalidRequest,
    MansioError,
    RequestTimedOut,
    ScheduleAlreadyExists,
    ScheduleNotFound,
)
from mansio.host.item_turns import ItemTurns
from mansio.ports import result_within
from mansio.state.authorization.acls import Operation
from mansio.tracebacks import without_traceback
from mansio.wire.batch.schedule_control_records import NOT_DUE_MS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from mansio.broker.features.delays.schedule_manager import ScheduleManager
    from mansio.broker.features.feature_ports import Rights
    from mansio.broker.partition.partition import Partition
    from mansio.broker.partition.partition_set import PartitionSet
    from mansio.broker.routing.caller import Caller
    from mansio.ports import Clock, Scheduler
    from mansio.wire.batch.schedule_control_records import Schedule

QUERIES_MAX: Final = 10_000
"""Maximum number of queries in one request."""

TIMES_MAX: Final = 100
"""Maximum number of due times per schedule."""


@dataclass(frozen=True, slots=True)
class ScheduleQuery:
    """Search for the schedules of one partition; with `name` only for the one with this name."""

    topic_id: bytes
    partition: int
    name: str | None = None


@dataclass(frozen=True, slots=True)
class ListedSchedule:
    """A schedule, the due times from its next one on, and why it cannot fire at present ("" if it can)."""

    schedule: Schedule
    next_times_ms: Sequence[int]
    error: str


@dataclass(frozen=True, slots=True)
class PartitionSchedules:
    """Schedules of one partition, for metrics and health. `failing`: name of each that cannot fire at present, and why;
    `next_due_ms`: when the first is due or tried again, None if none is; `now_ms`: the wall clock."""

    count: int
    failing: Sequence[tuple[str, str]]
    next_due_ms: int | None
    now_ms: int


class ScheduleService:
    """Lists and changes schedules. All methods run on the broker's event loop.

    To list schedules, with the records that they publish, a caller needs READ for the topic, to change them WRITE. The
    caller that creates one is its owner: when it has lost WRITE, the schedule does not fire."""

    __slots__ = ("_authorization", "_clock", "_partitions", "_scheduler", "_wait_ms_max")

    def __init__(
        self,
        partitions: PartitionSet,
        *,
        clock: Clock,
        scheduler: Scheduler,
        wait_ms_max: int,
        authorization: Rights,
    ) -> None:
        """`wait_ms_max`: upper bound of the timeout of a change."""
        self._authorization = authorization
        self._partitions = partitions
        self._clock = clock
        self._scheduler = scheduler
        self._wait_ms_max = wait_ms_max

    # Queries

    def sample(self, partition: Partition) -> PartitionSchedules | None:
        """Return the schedules of a partition; None if there are none, or this broker does not lead it."""
        delays = partition.find_feature(DelayManager)
        if delays is None or not partition.is_leader or not delays.view.schedules:
            return None
        schedules = delays.view.schedules
        failing = delays.schedules.failing()
        return PartitionSchedules(len(schedules), failing, schedules.next_wake_ms, self._clock.wall_ms())

    async def list_schedules(
        self, queries: Sequence[ScheduleQuery], *, times_max: int, caller: Caller
    ) -> list[list[ListedSchedule] | MansioError]:
        """Return the result or the error of each query, with at most `times_max` due times per schedule.

        Errors: `TopicAuthorizationFailed`, `NotLeaderOrFollower`, `CoordinatorLoadInProgress`, `UnknownTopicId`,
        `UnknownTopicOrPartition`. Raises `InvalidRequest`."""
        if len(queries) > QUERIES_MAX:
            raise InvalidRequest(f"{len(queries)} queries; at most {QUERIES_MAX} per request")
        results: list[list[ListedSchedule] | MansioError] = []
        turns = ItemTurns(self._scheduler)
        for query in queries:
            await turns.next()
            try:
                self._check(caller, Operation.READ, query.topic_id)
                results.append(await self._list_one(query, min(max(0, times_max), TIMES_MAX)))
            except MansioError as error:
                results.append(without_traceback(error))
        return results

    def _check(self, caller: Caller, operation: Operation, topic_id: bytes) -> None:
        self._authorization.check_topic_id(caller, operation, topic_id, self._partitions.name_of)

    async def _list_one(self, query: ScheduleQuery, times_max: int) -> list[ListedSchedule]:
        partition = self._partitions.find(None, query.topic_id, query.partition)
        partition.ensure_leader()
        manager = self._find_manager(partition)
        if manager is None:
            return []
        found: list[ListedSchedule] = []
        turns = ItemTurns(self._scheduler, items_per_look=1)
        for schedule in manager.schedules():
            if query.name is not None and schedule.name != query.name:
                continue
            error = manager.error(schedule)
            times_ms: list[int] = []
            try:
                for due_ms in islice(_due_times_ms(schedule), times_max):
                    times_ms.append(due_ms)
                    await turns.next()
            except MansioError as failure:
                error = failure.message
            found.append(ListedSchedule(schedule, times_ms, error))
        return found

    # Changes

    async def create(
        self, topic_id: bytes, index: int, schedule: Schedule, *, timeout_ms: int, caller: Caller
    ) -> None:
        """Create a schedule in a partition, unless it exists with the same definition.

        Raises `TopicAuthorizationFailed`, the errors of `ScheduleManager.create`, and `RequestTimedOut` if the change
        was appended, but is not committed after `timeout_ms` or this broker ceased to be the leader: it is not known
        then whether it will be."""
        self._check(caller, Operation.WRITE, topic_id)
        partition = self._leader(topic_id, index)
        manager = self._find_manager(partition)
        if manager is None:
            raise not_enabled_error(partition.topic)
        owned = schedule._replace(owner=self._authorization.owner_of(caller, partition.topic))
        began_s = self._clock.monotonic()
        while True:
            try:
                await self._change(partition, partial(manager.create, owned), timeout_ms)
            except LookUpRequired as required:
                await required.look_up(began_s)
            else:
                return

    async def pause(self, topic_id: bytes, index: int, name: str, *, timeout_ms: int, caller: Caller) -> None:
        """Stop the firings of a schedule. Raises `ScheduleNotFound`, and the errors of `create`."""
        self._check(caller, Operation.WRITE, topic_id)
        partition, manager = self._existing(topic_id, index, name)
        await self._change(partition, partial(manager.pause, name), timeout_ms)

    async def resume(
        self, topic_id: bytes, index: int, name: str, *, timeout_ms: int, caller: Caller
    ) -> None:
        """Let a paused schedule fire again. Raises `ScheduleNotFound`, and the errors of `create`."""
        self._check(caller, Operation.WRITE, topic_id)
        partition, manager = self._existing(topic_id, index, name)
        await self._change(partition, partial(manager.resume, name), timeout_ms)

    async def delete(
        self, topic_id: bytes, index: int, name: str, *, timeout_ms: int, caller: Caller
    ) -> None:
        """Delete a schedule. Raises `ScheduleNotFound`, and the errors of `create`."""
        self._check(caller, Operation.WRITE, topic_id)
        partition, manager = self._existing(topic_id, index, name)
        await self._change(partition, partial(manager.delete, name), timeout_ms)

    def _leader(self, topic_id: bytes, index: int) -> Partition:
        partition = self._partitions.find(None, topic_id, index)
        partition.ensure_leader()
        return partition

    def _find_manager(self, partition: Partition) -> ScheduleManager | None:
        """Return what manages the schedules of a partition; None if its topic never accepted any."""
        delays = partition.find_feature(DelayManager)
        return None if delays is None else delays.schedules

    def _existing(self, topic_id: bytes, index: int, name: str) -> tuple[Partition, ScheduleManager]:
        partition = self._leader(topic_id, index)
        manager = self._find_manager(partition)
        if manager is None:
            raise ScheduleNotFound(f"{partition.name} has no schedule {name!r}")
        return partition, manager

    async def _change(
        self, partition: Partition, change: Callable[[], tuple[Schedule, int]], timeout_ms: int
    ) -> None:
        """Change a schedule and wait until the result is final, whether it is a success or a refusal."""
        try:
            _, end_offset = change()
        except (ScheduleAlreadyExists, ScheduleNotFound):
            await self._commit(partition, partition.end_offset, timeout_ms)
            raise
        await self._commit(partition, end_offset, timeout_ms)

    async def _commit(self, partition: Partition, end_offset: int, timeout_ms: int) -> None:
        """Wait until the log is committed up to an offset. Raises `RequestTimedOut`."""
        promise = partition.commit_promise(end_offset)
        timeout_ms = min(max(0, timeout_ms), self._wait_ms_max)
        try:
            await result_within(self._scheduler, promise, timeout_ms, f"not committed after {timeout_ms} ms")
        except MansioError as error:
            raise RequestTimedOut(
                f"{partition.name}: the change may not be committed: {error.message}"
            ) from error


def _due_times_ms(schedule: Schedule) -> Iterator[int]:
    """Yield the due times of a schedule from its next one on. Raises `InvalidSchedule`."""
    recurrence = Recurrence(schedule.cron, schedule.every_ms, schedule.timezone, schedule.created_ms)
    due_ms: int | None = None if schedule.next_due_ms == NOT_DUE_MS else schedule.next_due_ms
    while due_ms is not None:
        yield due_ms
        due_ms = recurrence.next_after(due_ms)
