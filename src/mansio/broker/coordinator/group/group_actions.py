"""What the state machines of groups ask for, performed: answers, records, and a timer for what is due next.

Owns the timers of the groups and the requests that wait in them.

Always true:
* A group's timer is never later than its next deadline. Heartbeats only move deadlines back, so they set no
  timer: it fires, finds nothing due, and is set again.
* A timer that fires much too late means that we stood still, not the members: before anybody's session is
  ended, the heartbeats that lie in the sockets get the chance to be read.
* A machine is told how a write of its ended once it is committed, or has failed; never within the call that asked.
"""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, Any

from mansio.broker.coordinator.group.error_mapping import as_coordinator_error
from mansio.errors import MansioError, NotCoordinator, RebalanceInProgress
from mansio.logs import fields
from mansio.state.classic_group.group import ClassicGroup
from mansio.state.classic_group.types import Response
from mansio.state.consumer_group.group import ConsumerGroup
from mansio.state.share_group.group import ShareGroup
from mansio.wire.internal_records.offset_and_group_records import (
    GroupKey,
    encode_group_key,
    encode_group_value,
)

if TYPE_CHECKING:
    from mansio.broker.coordinator.group.consumer_groups import ConsumerGroups
    from mansio.broker.coordinator.group.group_store import Group, GroupEntry, GroupStore
    from mansio.broker.coordinator.group.share_groups import ShareGroups
    from mansio.ports import Clock, Scheduler
    from mansio.state.classic_group.types import Effect, Persist

logger = logging.getLogger(__name__)


class GroupActions:
    """Of one coordinator. `modern` and `share` look after the timers of their groups themselves.

    `stall_ms`: a timer that is later than that means that we stood still.
    """

    def __init__(
        self,
        store: GroupStore,
        modern: ConsumerGroups,
        share: ShareGroups,
        *,
        clock: Clock,
        scheduler: Scheduler,
        stall_ms: int,
    ) -> None:
        self._store = store
        self._modern = modern
        self._share = share
        self._clock = clock
        self._scheduler = scheduler
        self._stall_ms = stall_ms
        self.closed = False
        self.waiting: dict[Any, GroupEntry] = {}
        """Promises of parked joins and syncs."""

    def close(self) -> None:
        """End all waits and all timers; there are no others."""
        self.closed = True
        for entry in self._store.entries.values():
            if entry.timer is not None:
                entry.timer.cancel()
                entry.timer = None
        for promise in list(self.waiting):
            _complete(promise, NotCoordinator("the broker is stopping"))

    def partition_unloaded(self, index: int) -> None:
        """In a cluster: the groups of this partition live elsewhere from now on."""
        for promise, entry in list(self.waiting.items()):
            if entry.index == index:
                _complete(promise, NotCoordinator("this broker does not coordinate the group any more"))

    async def perform_and_wait(self, entry: GroupEntry, effects: list[Effect], promise: Any) -> Any:
        """Perform them, and wait until one of them, or of those to come, keeps the promise."""
        self.waiting[promise] = entry
        if self.closed:
            _complete(promise, NotCoordinator("the broker is stopping"))
        try:
            self.perform(entry, effects)
            return await promise
        finally:
            del self.waiting[promise]

    def perform(self, entry: GroupEntry, effects: list[Effect]) -> None:
        """Answer those who waited, store what is to be stored, and see to the timer."""
        for effect in effects:
            if isinstance(effect, Response):
                _complete(effect.waiter, effect.value)
            else:
                self._persist(entry, effect)
        self.arm_timer(entry)

    def _persist(self, entry: GroupEntry, effect: Persist) -> None:
        """Store the group's record and tell the machine how it went: once it is committed, never at once."""
        group = entry.group
        group_id = group.group_id
        value = encode_group_value(effect.metadata._replace(state_ms=self._clock.wall_ms()))
        try:
            promise = self._store.append(group_id, [(encode_group_key(GroupKey(group_id)), value)])
        except MansioError as error:
            self._scheduler.call_soon(self._persisted, entry, group, effect.token, error)
            return

        def settled(kept: Any) -> None:
            try:
                kept.result()
            except MansioError as error:
                self._persisted(entry, group, effect.token, error)
            else:
                self._persisted(entry, group, effect.token, None)

        promise.add_done_callback(settled)

    def _persisted(self, entry: GroupEntry, group: Group, token: int, error: MansioError | None) -> None:
        if self.closed or entry.gone or entry.group is not group or not isinstance(group, ClassicGroup):
            return
        if error is not None:
            logger.error("group not stored", extra=fields(group=entry.group.group_id, reason=error))
            error = as_coordinator_error(error)
        self.perform(entry, group.persisted(token, error, self._store.monotonic_ms()))

    def rebuild(self, entry: GroupEntry) -> None:
        """Something of the group could not be written: make it anew of what is stored. Whoever waits in it joins
        again. Raises `CorruptLog`."""
        for promise, waits_in in list(self.waiting.items()):
            if waits_in is entry:
                _complete(promise, RebalanceInProgress())
        self._store.rebuild(entry)
        self.arm_timer(entry)

    def arm_timer(self, entry: GroupEntry) -> None:
        """Have the group woken when its next deadline has passed, or before."""
        due_ms = max(entry.group.next_deadline_ms(), entry.grace_until_ms)
        if entry.timer is not None:
            if entry.timer_due_ms <= due_ms and due_ms != math.inf:
                return
            entry.timer.cancel()
            entry.timer = None
        if due_ms != math.inf and not self.closed:
            entry.timer_due_ms = due_ms
            delay_ms = max(due_ms - self._store.monotonic_ms(), 0.0)
            entry.timer = self._scheduler.call_later(delay_ms, self.timer_expired, entry, due_ms)

    def timer_expired(self, entry: GroupEntry, due_ms: float) -> None:
        """A timer fired: end what is over, unless it fired so late that the fault is ours."""
        entry.timer = None
        now_ms = self._store.monotonic_ms()
        if now_ms - due_ms > self._stall_ms:
            late_ms = round(now_ms - due_ms)
            logger.warning("group timer late", extra=fields(group=entry.group.group_id, late_ms=late_ms))
            entry.grace_until_ms = now_ms + self._stall_ms
            self.arm_timer(entry)
            return
        if isinstance(entry.group, ConsumerGroup):
            self._modern.tick(entry, entry.group)
        elif isinstance(entry.group, ShareGroup):
            self._share.tick(entry, entry.group)
        else:
            self.perform(entry, entry.group.tick(now_ms))
        self._store.drop_if_unused(entry)


def _complete(promise: Any, value: Any) -> None:
    """Answer who waits; whoever has gone away meanwhile is not there to be answered."""
    if promise.done():
        return
    if isinstance(value, MansioError):
        promise.set_exception(value)
    else:
        promise.set_result(value)
