"""The coordinator of consumer groups: performs what their state machines ask for.

Owns the timers of the groups and the requests that wait in them. `offsets` holds the committed offsets, `expiry` lets
go of them, `inspection` answers questions about groups, `modern` and `share` perform what groups of the new protocols
ask for; every door uses this one object. A member of the classic protocol may find its group to be of either kind.

Always true:
* A group's timer is never later than its next deadline. Heartbeats only move deadlines back, so they set no
  timer: it fires, finds nothing due, and is set again.
* A timer that fires much too late means that we stood still, not the members: before anybody's session is
  ended, the heartbeats that lie in the sockets get the chance to be read.
* Nothing here blocks, and nothing waits without a bound: a parked join or sync ends with the group's phase, or with
  this broker's leadership of the partition the group lives in.

In a cluster (`places`) a broker coordinates the groups of those partitions of `__consumer_offsets` that it leads, from
when their view is loaded until it leads them no more. What a member is told elsewhere makes it look for the right one.
"""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, Any, Final, TypeVar
from uuid import UUID

from mansio.broker.coordinators.expiry import OffsetExpiry
from mansio.broker.coordinators.inspection import Inspection
from mansio.broker.coordinators.modern_groups import ModernGroups
from mansio.broker.coordinators.offsets import Offsets, tombstones
from mansio.broker.coordinators.recorded import RecordedGroups
from mansio.broker.coordinators.settings import OFFSETS_TOPIC, GroupSettings
from mansio.broker.coordinators.share_groups import ShareGroups
from mansio.broker.coordinators.store import GroupEntry, GroupStore
from mansio.broker.coordinators.subscriptions import Subscriptions
from mansio.broker.internal_topic import InternalTopic
from mansio.errors import (
    CoordinatorNotAvailable,
    FencedLeaderEpoch,
    GroupIdNotFound,
    InconsistentGroupProtocol,
    InvalidGroupId,
    InvalidRequest,
    InvalidSessionTimeout,
    MansioError,
    NotCoordinator,
    NotEnoughReplicas,
    NotEnoughReplicasAfterAppend,
    NotLeaderOrFollower,
    RebalanceInProgress,
    RequestTimedOut,
    StorageError,
    UnknownMember,
    UnknownTopicOrPartition,
)
from mansio.logs import fields
from mansio.state.classic_group import ClassicGroup
from mansio.state.consumer_group import ConsumerGroup
from mansio.state.group_records import GroupKey, encode_group_key, encode_group_value
from mansio.state.group_types import Answer, Persist
from mansio.state.share_group import ShareGroup

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from mansio.broker.coordinators.places import GroupPlaces, OffsetsPartition
    from mansio.broker.coordinators.store import Machine, OffsetListener
    from mansio.broker.internal_view import InternalPartition
    from mansio.broker.view_checkpoint import CheckpointRoom
    from mansio.ports import Clock, Random, Scheduler
    from mansio.state.group_types import Effect, Join, JoinAnswer, Sync, SyncAnswer
    from mansio.state.modern_types import Heartbeat, HeartbeatAnswer
    from mansio.state.share_group import ShareHeartbeat

__all__ = ["OFFSETS_TOPIC", "GroupCoordinator", "GroupSettings"]

Answered = TypeVar("Answered")

logger = logging.getLogger(__name__)

NAME_BYTES_MAX: Final = 32_767
"""Group ids, instance ids and protocol names are stored with a 16-bit length."""


class GroupCoordinator:
    """See the module. All methods belong to the broker's loop.

    `create_topic` creates `__consumer_offsets` if need be and returns its open partitions. `end_offset` is
    the high watermark of a topic's partition, or None if there is no such partition here. `on_offset`: see
    `GroupStore`.
    `places` is given in a cluster: there `create_topic` only makes the topic, nothing is ever written to `checkpoints`,
    and instead of `start` having partitions, `role_changed` tells of them. `subscriptions`: the topics members can
    subscribe to; `overrides`: the settings a group has of its own. Raises `ConfigError` for unknown assignors.
    """

    def __init__(
        self,
        *,
        settings: GroupSettings,
        clock: Clock,
        scheduler: Scheduler,
        random: Random,
        create_topic: Callable[[], Awaitable[Sequence[InternalPartition | StorageError]]],
        end_offset: Callable[[str, int], int | None],
        checkpoints: CheckpointRoom | None = None,
        on_offset: OffsetListener = lambda *_: None,
        places: GroupPlaces | None = None,
        subscriptions: Subscriptions | None = None,
        overrides: Callable[[str], Mapping[str, str]] = lambda _: {},
    ) -> None:
        self.settings = settings
        self.places = places
        self._clock = clock
        self._scheduler = scheduler
        self._random = random
        self._closed = False
        self._waiting: dict[Any, GroupEntry] = {}  # promises of parked joins and syncs
        self.subscriptions = subscriptions or Subscriptions({})
        self.modern = ModernGroups(settings, clock, self.subscriptions, overrides)
        self.share = ShareGroups(settings, scheduler, self.subscriptions, overrides)
        self.store = GroupStore(
            settings,
            clock,
            on_offset,
            consumer_group=self.modern.empty_group,
            share_group=self.share.empty_group,
        )
        recorded = RecordedGroups(self.store, arm=self._arm, revive=self.revive)
        self.modern.store, self.modern.recorded = self.store, recorded
        self.modern.perform, self.modern.arm = self._perform, self._arm
        self.share.store, self.share.recorded = self.store, recorded
        self.topic = InternalTopic(
            OFFSETS_TOPIC,
            view=self.store,
            create=create_topic,
            scheduler=scheduler,
            clock=clock,
            checkpoints=checkpoints,
            partition_count=None if places is None else places.partition_count,
        )
        self.store.topic = self.topic
        self.store.on_unloaded = self._unloaded
        if places is not None:
            self.store.on_loaded = self._loaded
            self.offsets = Offsets(self.store, settings, clock, places.has_partition)
        else:
            self.offsets = Offsets(
                self.store, settings, clock, lambda topic, index: end_offset(topic, index) is not None
            )
        self.expiry = OffsetExpiry(
            self.store,
            self.offsets,
            interval_ms=settings.offsets_retention_check_interval_ms,
            clock=clock,
            scheduler=scheduler,
            delete=self.delete,
            places=places,
        )
        self.inspection = Inspection(self.store, end_offset, self.subscriptions)

    async def start(self, partitions: Sequence[InternalPartition | StorageError]) -> None:
        """Load the groups from `__consumer_offsets`; no partitions if it has not been created yet, or in a cluster."""
        await self.topic.start(partitions)
        for entry in list(self.store.entries.values()):
            self._arm(entry)
        self.share.resume(list(self.store.entries.values()))
        self.expiry.start()

    def role_changed(self, partition: OffsetsPartition) -> None:
        """In a cluster: a partition of `__consumer_offsets` leads here, in this leader epoch, or it does not. To be
        told after each change of its role, and before it is closed; telling it again changes nothing."""
        index, leader_epoch = partition.index, partition.leader_epoch
        if self._closed or not partition.leads or partition.closed:
            self.topic.resign(index)
        elif not self.topic.leads(index, partition, leader_epoch):
            self.topic.lead(index, partition, leader_epoch)

    async def ready(self) -> None:
        """Make sure that `__consumer_offsets` exists. Raises what a member is told otherwise."""
        try:
            await self.topic.ready()
        except MansioError as error:
            raise as_coordinator_error(error) from error

    async def close(self) -> None:
        """End all waits (clients find the coordinator again after the restart) and write the checkpoints."""
        self._closed = True
        self.expiry.stop()
        for entry in self.store.entries.values():
            if entry.timer is not None:
                entry.timer.cancel()
                entry.timer = None
        for promise in list(self._waiting):
            _give(promise, NotCoordinator("the broker is stopping"))
        await self.topic.close()

    # ------------------------------------------------------------------ partitions come and go (in a cluster)

    def _loaded(self, index: int) -> None:
        entries = self.store.of_partition(index)
        for entry in entries:
            self._arm(entry)
        self.share.resume(entries)
        logger.info("groups loaded", extra=fields(partition=index, groups=len(entries)))
        self.expiry.forget_topics(entries)

    def _unloaded(self, index: int) -> None:
        for promise, entry in list(self._waiting.items()):
            if entry.index == index:
                _give(promise, NotCoordinator("this broker does not coordinate the group any more"))

    # ------------------------------------------------------------------ members

    async def join(self, group_id: str, request: Join) -> JoinAnswer:
        """A member joins; returns when the rebalance has ended. Raises the errors of `ClassicGroup.join`,
        `InvalidGroupId`, `InvalidSessionTimeout`, `InvalidRequest`."""
        self._check_join(group_id, request)
        if request.member_id:
            entry = self._entry(group_id)
        else:
            try:
                entry = await self.store.find_or_create(group_id)
            except MansioError as error:  # the first group of all makes the topic it is stored in
                raise as_coordinator_error(error) from error
        _check_not_shared(entry)
        new_member_id = f"{request.instance_id or request.client_id}-{self._random.bytes(16).hex()}"
        if isinstance(entry.group, ConsumerGroup):
            if not entry.group.is_idle():
                return await self._coordinated(self.modern.join(entry, entry.group, request, new_member_id))
            self._make_classic(entry)
        promise = self._scheduler.promise()
        try:
            effects = _classic(entry).join(request, promise, new_member_id, self.store.monotonic_ms())
        finally:
            self.store.drop_if_unused(entry)
        answer: JoinAnswer = await self._performed(entry, effects, promise)
        return answer

    async def sync(self, group_id: str, request: Sync) -> SyncAnswer:
        """A member asks for its assignment; returns when the leader has given it and it is stored."""
        check_group_id(group_id)
        if self.places is not None:
            await self._committed(group_id)
        entry = self._entry(group_id)
        if isinstance(entry.group, ConsumerGroup):
            return await self._coordinated(self.modern.sync(entry, entry.group, request))
        promise = self._scheduler.promise()
        effects = _classic(entry).sync(request, promise, self.store.monotonic_ms())
        answer: SyncAnswer = await self._performed(entry, effects, promise)
        return answer

    async def _committed(self, group_id: str) -> None:
        """What a new leader found at the end of its log may yet be lost with it: no assignment is given out of that."""
        self._entry(group_id)
        try:
            await self.store.committed(group_id)
        except MansioError as error:
            raise as_coordinator_error(error) from error

    def heartbeat(self, group_id: str, member_id: str, instance_id: str | None, generation: int) -> None:
        """A member is alive; raises what it has to do about its group."""
        check_group_id(group_id)
        entry = self._entry(group_id)
        if isinstance(entry.group, ConsumerGroup):
            self.modern.classic_heartbeat(entry, entry.group, member_id, instance_id, generation)
            return
        _classic(entry).heartbeat(member_id, instance_id, generation, self.store.monotonic_ms())

    def leave(self, group_id: str, member_id: str, instance_id: str | None) -> None:
        """A member goes."""
        check_group_id(group_id)
        entry = self._entry(group_id)
        if isinstance(entry.group, ConsumerGroup):
            try:
                self.modern.leave(entry, entry.group, member_id, instance_id)
            except MansioError as error:
                raise as_coordinator_error(error) from error
            return
        self._perform(entry, _classic(entry).leave(member_id, instance_id, self.store.monotonic_ms()))

    def new_member_id(self) -> str:
        """For a member of the new protocol that has none: a uuid, as clients make it themselves."""
        return str(UUID(bytes=self._random.bytes(16), version=4))

    async def consumer_heartbeat(self, group_id: str, request: Heartbeat) -> HeartbeatAnswer:
        """A member of the new protocol joins, is alive, or leaves; see `ModernGroups.heartbeat`."""
        check_group_id(group_id)
        return await self._coordinated(self.modern.heartbeat(group_id, request))

    async def share_heartbeat(self, group_id: str, request: ShareHeartbeat) -> HeartbeatAnswer:
        """A member of a share group joins, is alive, or leaves; see `ShareGroups.heartbeat`."""
        check_group_id(group_id)
        return await self._coordinated(self.share.heartbeat(group_id, request))

    async def _coordinated(self, work: Awaitable[Answered]) -> Answered:
        try:
            return await work
        except MansioError as error:
            raise as_coordinator_error(error) from error

    def _make_classic(self, entry: GroupEntry) -> None:
        try:
            self.modern.make_classic(entry)
        except MansioError as error:
            raise as_coordinator_error(error) from error

    async def delete(self, group_id: str) -> None:
        """Delete an empty group and its offsets; returns when that is committed. Raises `GroupIdNotFound`,
        `NonEmptyGroup`, `InvalidGroupId`."""
        check_group_id(group_id)
        entry = self.store.find(group_id)
        if entry is None:
            raise GroupIdNotFound(f"there is no group {group_id!r}")
        if isinstance(entry.group, ShareGroup):
            await self._coordinated(self.share.forget_all(entry, entry.group))
        entry.group.delete()
        try:
            if records := tombstones(entry, with_group=True):
                await self.store.append(group_id, records, whole=True)
        except MansioError as error:
            entry.group.undelete()
            raise as_coordinator_error(error) from error
        self.store.remove(entry)

    # ------------------------------------------------------------------ effects and timers

    async def _performed(self, entry: GroupEntry, effects: list[Effect], promise: Any) -> Any:
        self._waiting[promise] = entry
        if self._closed:
            _give(promise, NotCoordinator("the broker is stopping"))
        try:
            self._perform(entry, effects)
            return await promise
        finally:
            del self._waiting[promise]

    def _perform(self, entry: GroupEntry, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Answer):
                _give(effect.waiter, effect.value)
            else:
                self._persist(entry, effect)
        self._arm(entry)

    def _persist(self, entry: GroupEntry, effect: Persist) -> None:
        """Store the group's record and tell the machine how it went: once it is committed, never at once."""
        group = entry.group
        group_id = group.group_id
        value = encode_group_value(effect.metadata._replace(state_ms=self._clock.wall_ms()))
        try:
            promise = self.store.append(group_id, [(encode_group_key(GroupKey(group_id)), value)])
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

    def _persisted(self, entry: GroupEntry, group: Machine, token: int, error: MansioError | None) -> None:
        if self._closed or entry.gone or entry.group is not group or not isinstance(group, ClassicGroup):
            return
        if error is not None:
            logger.error("group not stored", extra=fields(group=entry.group.group_id, reason=error))
            error = as_coordinator_error(error)
        self._perform(entry, group.persisted(token, error, self.store.monotonic_ms()))

    def revive(self, entry: GroupEntry) -> None:
        """Something of the group could not be written: make it anew of what is stored. Whoever waits in it joins
        again. Raises `CorruptLog`."""
        for promise, waits_in in list(self._waiting.items()):
            if waits_in is entry:
                _give(promise, RebalanceInProgress())
        self.store.revive(entry)
        self._arm(entry)

    def _arm(self, entry: GroupEntry) -> None:
        due_ms = max(entry.group.next_deadline_ms(), entry.grace_until_ms)
        if entry.timer is not None:
            if entry.timer_due_ms <= due_ms and due_ms != math.inf:
                return
            entry.timer.cancel()
            entry.timer = None
        if due_ms != math.inf and not self._closed:
            entry.timer_due_ms = due_ms
            delay_ms = max(due_ms - self.store.monotonic_ms(), 0.0)
            entry.timer = self._scheduler.call_later(delay_ms, self._wake, entry, due_ms)

    def _wake(self, entry: GroupEntry, due_ms: float) -> None:
        entry.timer = None
        now_ms = self.store.monotonic_ms()
        if now_ms - due_ms > self.settings.stall_ms:
            late_ms = round(now_ms - due_ms)
            logger.warning("group timer late", extra=fields(group=entry.group.group_id, late_ms=late_ms))
            entry.grace_until_ms = now_ms + self.settings.stall_ms
            self._arm(entry)
            return
        if isinstance(entry.group, ConsumerGroup):
            self.modern.tick(entry, entry.group)
        elif isinstance(entry.group, ShareGroup):
            self.share.tick(entry, entry.group)
        else:
            self._perform(entry, entry.group.tick(now_ms))
        self.store.drop_if_unused(entry)

    # ------------------------------------------------------------------ checks

    def _entry(self, group_id: str) -> GroupEntry:
        entry = self.store.find(group_id)
        if entry is None:
            raise UnknownMember(f"there is no group {group_id!r}")
        _check_not_shared(entry)
        return entry

    def _check_join(self, group_id: str, request: Join) -> None:
        check_group_id(group_id)
        settings = self.settings
        if not (
            settings.session_timeout_ms_min <= request.session_timeout_ms <= settings.session_timeout_ms_max
        ):
            raise InvalidSessionTimeout(
                f"the session timeout of {request.session_timeout_ms} ms is not within"
                f" {settings.session_timeout_ms_min} and {settings.session_timeout_ms_max} ms"
            )
        names = [request.instance_id or "", request.protocol_type, *(each.name for each in request.protocols)]
        if any(len(name.encode()) > NAME_BYTES_MAX for name in names):
            raise InvalidRequest("an instance id or protocol name is too long")


def _classic(entry: GroupEntry) -> ClassicGroup:
    """The machine of a group that is no other. Raises `CoordinatorNotAvailable` (a group that is being deleted)."""
    if not isinstance(entry.group, ClassicGroup):
        raise CoordinatorNotAvailable(f"group {entry.group.group_id} is being deleted")
    return entry.group


def _check_not_shared(entry: GroupEntry) -> None:
    if isinstance(entry.group, ShareGroup):
        raise InconsistentGroupProtocol(f"group {entry.group.group_id!r} is a share group")


def check_group_id(group_id: str | None) -> None:
    """Raise `InvalidGroupId` for an id that group membership cannot have."""
    if not group_id or len(group_id.encode()) > NAME_BYTES_MAX:
        raise InvalidGroupId(f"{(group_id or '')[:40]!r} is not a group id")


def as_coordinator_error(error: MansioError) -> MansioError:
    """What a member is told when the internal topic fails: the errors its client knows how to handle."""
    if isinstance(error, StorageError | NotLeaderOrFollower | FencedLeaderEpoch):
        return NotCoordinator(error.message)
    if isinstance(
        error,
        NotEnoughReplicas | NotEnoughReplicasAfterAppend | RequestTimedOut | UnknownTopicOrPartition,
    ):
        return CoordinatorNotAvailable(error.message)
    return error


def _give(promise: Any, value: Any) -> None:
    """Answer who waits; whoever has gone away meanwhile is not there to be answered."""
    if promise.done():
        return
    if isinstance(value, MansioError):
        promise.set_exception(value)
    else:
        promise.set_result(value)
