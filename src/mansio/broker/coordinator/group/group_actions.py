"""Group actions: performs the effects of group state machines, which are writes, responses and timers.

A request changes the state machine of a group. The resulting records are appended in the same turn of the event loop,
and the client receives the response once the records are committed.

Invariants:
* The timer of a group fires at or before the group's next deadline. A heartbeat only postpones deadlines, so it does
  not set the timer: the timer may fire before anything is due, and is then set again.
* A timer that fires much too late shows that this process was stalled, not the members. Before a session is ended, the
  broker takes time to read the heartbeats in the socket buffers.
* The outcome of a write is reported to a classic group when the records are committed or the write has failed, never
  within the call that requested the write.
* A consumer or share group never differs from its records between two turns of the event loop. If records cannot be
  appended or committed, or a state machine raises an unexpected error, the state machine is replaced by one that is
  rebuilt from the stored records; members notice with their next heartbeat.
* Members receive committed assignments only.
* A heartbeat that changes nothing writes nothing and waits for nothing.
"""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from mansio.broker.coordinator.group.error_mapping import as_coordinator_error
from mansio.errors import (
    CoordinatorNotAvailable,
    MansioError,
    NotCoordinator,
    RebalanceInProgress,
    UnknownMember,
)
from mansio.logs import fields
from mansio.ports import complete, complete_with_error
from mansio.state.classic_group.group import ClassicGroup
from mansio.state.classic_group.types import Response
from mansio.state.share_group.group import ShareGroup
from mansio.tracebacks import result_of, without_traceback
from mansio.wire.internal_records.offset_and_group_records import (
    GroupKey,
    encode_group_key,
    encode_group_value,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from mansio.broker.coordinator.group.group_store import Group, GroupEntry, GroupStore
    from mansio.ports import Clock, Promise, Scheduler
    from mansio.state.classic_group.types import Effect, Persist
    from mansio.state.consumer_group.group import ConsumerGroup
    from mansio.state.consumer_group.types import HeartbeatResponse, Records

Result = TypeVar("Result")

logger = logging.getLogger(__name__)


class HeartbeatOutcome(NamedTuple):
    """Response to a heartbeat, and the promise that its records are committed (None if the heartbeat changed
    nothing)."""

    response: HeartbeatResponse
    committed: Promise[None] | None


class GroupActions:
    """Performs the effects of all groups of one coordinator.

    `expire_members` handles the due deadlines of a consumer or share group. `stall_ms`: a timer that fires later than
    this after its deadline shows that this process was stalled.
    """

    def __init__(
        self,
        store: GroupStore,
        *,
        clock: Clock,
        scheduler: Scheduler,
        stall_ms: int,
        expire_members: Callable[[GroupEntry], None],
    ) -> None:
        self._store = store
        self._clock = clock
        self._scheduler = scheduler
        self._stall_ms = stall_ms
        self._expire_members = expire_members
        self.closed = False
        self.waiting: dict[Any, GroupEntry] = {}
        """Group entry of each parked join or sync, by the promise of its response."""

    def close(self) -> None:
        """Complete all parked requests with an error, and cancel all timers."""
        self.closed = True
        for entry in self._store.entries.values():
            if entry.timer is not None:
                entry.timer.cancel()
                entry.timer = None
        for promise in list(self.waiting):
            _complete(promise, NotCoordinator("the broker is stopping"))

    def complete_parked_requests(self, index: int) -> None:
        """In a cluster, complete the parked requests of groups whose partition has moved to another broker, with an
        error."""
        for promise, entry in list(self.waiting.items()):
            if entry.index == index:
                _complete(promise, NotCoordinator("this broker no longer coordinates the group"))

    # ------------------------------------------------------------------ classic groups

    async def perform_and_wait(self, entry: GroupEntry, effects: list[Effect], promise: Any) -> Any:
        """Perform effects, and wait until one of them, or an effect of a later event, completes the promise."""
        self.waiting[promise] = entry
        if self.closed:
            _complete(promise, NotCoordinator("the broker is stopping"))
        try:
            self.perform(entry, effects)
            return await result_of(promise)
        finally:
            del self.waiting[promise]

    def perform(self, entry: GroupEntry, effects: list[Effect]) -> None:
        """Perform effects: complete parked requests, append records, and set the timer of the group."""
        for effect in effects:
            if isinstance(effect, Response):
                _complete(effect.waiter, effect.value)
            else:
                self._persist(entry, effect)
        self.arm_timer(entry)

    def _persist(self, entry: GroupEntry, effect: Persist) -> None:
        """Append the record of a classic group and report the outcome to the state machine, in a later turn of the
        event loop."""
        group = entry.group
        group_id = group.group_id
        value = encode_group_value(effect.metadata._replace(state_ms=self._clock.wall_ms()))
        try:
            promise = self._store.append(group_id, [(encode_group_key(GroupKey(group_id)), value)])
        except MansioError as error:
            self._scheduler.call_soon(
                self._report_persisted, entry, group, effect.token, without_traceback(error)
            )
            return

        def done(committed: Any) -> None:
            try:
                committed.result()
            except MansioError as error:
                self._report_persisted(entry, group, effect.token, error)
            else:
                self._report_persisted(entry, group, effect.token, None)

        promise.add_done_callback(done)

    def _report_persisted(
        self, entry: GroupEntry, group: Group, token: int, error: MansioError | None
    ) -> None:
        if (
            self.closed
            or entry.is_unloaded
            or entry.group is not group
            or not isinstance(group, ClassicGroup)
        ):
            return
        if error is not None:
            logger.error("group_not_stored", extra=fields(group=entry.group.group_id, reason=error))
            error = as_coordinator_error(error)
        self.perform(entry, group.handle_persisted(token, error, self._store.monotonic_ms()))

    # ------------------------------------------------------------------ consumer and share groups

    async def heartbeat(
        self, group_id: str, handle: Callable[[GroupEntry], HeartbeatOutcome], *, joins: bool
    ) -> HeartbeatResponse:
        """Apply a heartbeat to a group by `handle`, and return the response once the changes are committed. `joins`:
        create the group if it does not exist. Raises the errors of `handle`, of the commit, `UnknownMember` (no such
        group), and those of the coordinator."""
        entry = await self._store.find_or_create(group_id) if joins else self._store.find(group_id)
        if entry is None:
            raise UnknownMember(f"there is no group {group_id!r}")
        try:
            response, committed = handle(entry)
        finally:
            self._store.remove_if_empty(entry)
        if committed is not None:
            await committed
        elif response.assignment is not None:
            await self._store.wait_until_committed(group_id)
        return response

    def apply_change(self, entry: GroupEntry, group: Group, change: Callable[[], Result]) -> Result:
        """Call `change`, which changes the state machine, and return its result. Raises its `MansioError` unchanged;
        after any other exception, rebuilds the group and raises `CoordinatorNotAvailable`."""
        try:
            return change()
        except MansioError:
            raise
        except Exception as error:
            raise self._handle_unexpected_error(entry, group, error) from error

    def remove_expired(self, entry: GroupEntry, group: Group, remove: Callable[[], object]) -> None:
        """Call `remove`, which removes members whose deadlines have passed and appends the change, and set the timer.
        The errors of `remove` are logged."""
        try:
            remove()
        except MansioError as error:  # the group is already rebuilt, and the sessions start again
            logger.warning("members_not_removed", extra=fields(group=group.group_id, reason=error))
        except Exception as error:  # noqa: BLE001 - no request waits for it, and the group continues as stored
            self._handle_unexpected_error(entry, group, error)
        self.arm_timer(entry)

    def rearm_after_heartbeat(
        self, entry: GroupEntry, group: ConsumerGroup | ShareGroup, now_ms: float
    ) -> None:
        """Set the timer after a heartbeat without changes, if a shorter session timeout requires that the timer fires
        earlier."""
        if now_ms + group.settings.session_timeout_ms < entry.timer_due_ms:
            self.arm_timer(entry)

    def write(
        self, entry: GroupEntry, group: Group, records: Records, *, replacement: Group | None = None
    ) -> Promise[None]:
        """Append the changes of a state machine in one batch, and make `replacement`, or else `group`, the group of the
        entry. Returns the promise of the commit. Raises the errors of the append, after rebuilding the group of the
        entry if `group` is the one that has changed."""
        machine = replacement or group
        try:
            written = self._store.append(group.group_id, records, atomic=True)
        except MansioError as error:
            self._handle_write_failure(entry, group, error)
            raise
        if machine is not entry.group:
            protocol = _protocol_of(machine)
            logger.info("group_protocol_changed", extra=fields(group=group.group_id, protocol=protocol))
            entry.resolved_view = None
            entry.group = machine
        written.add_done_callback(lambda committed: self._check_commit(entry, machine, committed))
        self.arm_timer(entry)
        return written

    def _check_commit(self, entry: GroupEntry, machine: Group, committed: Any) -> None:
        try:
            committed.result()
        except MansioError as error:
            self._handle_write_failure(entry, machine, error)

    def _handle_write_failure(self, entry: GroupEntry, machine: Group, error: MansioError) -> None:
        if entry.is_unloaded or entry.group is not machine:
            return
        logger.error("group_not_stored", extra=fields(group=machine.group_id, reason=error))
        self._rebuild(entry)

    def _handle_unexpected_error(self, entry: GroupEntry, group: Group, error: Exception) -> MansioError:
        """Log an unexpected exception of the state machine or its assignor, and rebuild the group. Returns the error
        for the client."""
        logger.error("group_failed", extra=fields(group=group.group_id, reason=error), exc_info=error)
        if entry.group is group and not entry.is_unloaded:
            self._rebuild(entry)
        return CoordinatorNotAvailable(f"group {group.group_id} cannot process this request: {error}")

    def _rebuild(self, entry: GroupEntry) -> None:
        """Rebuild a group from its stored records; members with a parked request have to rejoin. Raises
        `CorruptLog`."""
        for promise, waits_in in list(self.waiting.items()):
            if waits_in is entry:
                _complete(promise, RebalanceInProgress())
        self._store.rebuild(entry)
        self.arm_timer(entry)

    # ------------------------------------------------------------------ timers

    def arm_timer(self, entry: GroupEntry) -> None:
        """Set the timer of a group unless it already fires at or before the group's next deadline."""
        due_ms = max(entry.group.next_deadline_ms(), entry.grace_until_ms)
        if entry.timer is not None:
            if entry.timer_due_ms <= due_ms and due_ms != math.inf:
                return
            entry.timer.cancel()
            entry.timer = None
        if due_ms != math.inf and not self.closed:
            entry.timer_due_ms = due_ms
            delay_ms = max(due_ms - self._store.monotonic_ms(), 0.0)
            entry.timer = self._scheduler.call_later(delay_ms, self.handle_timer, entry, due_ms)

    def handle_timer(self, entry: GroupEntry, due_ms: float) -> None:
        """Handle the due deadlines of a group after its timer fired. If the timer fired so late that the process must
        have been stalled, give members more time: set the timer again."""
        entry.timer = None
        now_ms = self._store.monotonic_ms()
        if now_ms - due_ms > self._stall_ms:
            late_ms = round(now_ms - due_ms)
            logger.warning("group_timer_late", extra=fields(group=entry.group.group_id, late_ms=late_ms))
            entry.grace_until_ms = now_ms + self._stall_ms
            self.arm_timer(entry)
            return
        if isinstance(entry.group, ClassicGroup):
            self.perform(entry, entry.group.tick(now_ms))
        else:
            self._expire_members(entry)
        self._store.remove_if_empty(entry)


def _complete(promise: Any, value: Any) -> None:
    """Complete a promise with a value or an error, unless it is done or cancelled."""
    if isinstance(value, MansioError):
        complete_with_error(promise, value)
    else:
        complete(promise, value)


def _protocol_of(machine: Group) -> str:
    if isinstance(machine, ClassicGroup):
        return "classic"
    return "share" if isinstance(machine, ShareGroup) else "consumer"
