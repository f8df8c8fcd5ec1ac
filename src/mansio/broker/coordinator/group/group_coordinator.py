"""The coordinator of consumer groups: what members of all kinds ask, and which groups are here to be asked about.

Every door uses this one object. `effects` performs what the state machines of groups ask for, `modern` and `share` do
so for groups of the new protocols; `offsets` holds the committed offsets, `offset_expiration` lets go of them,
`inspection` answers questions about groups. A member of the classic protocol may find its group to be of either kind.

Always true: nothing here blocks, and nothing waits without a bound: a parked join or sync ends with the group's phase,
or with this broker's leadership of the partition the group lives in; what members say of themselves, which is kept as
long as their sessions last whether or not their clients are there, is bounded for all of them together.

In a cluster (`places`) a broker coordinates the groups of those partitions of `__consumer_offsets` that it leads, from
when their view is loaded until it leads them no more. What a member is told elsewhere makes it look for the right one.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final
from uuid import UUID

from mansio.broker.coordinator.group.consumer_groups import ConsumerGroups
from mansio.broker.coordinator.group.error_mapping import (
    NAME_BYTES_MAX,
    as_coordinator_error,
    check_group_id,
    coordinator_errors,
)
from mansio.broker.coordinator.group.group_actions import GroupActions
from mansio.broker.coordinator.group.group_inspection import GroupInspection
from mansio.broker.coordinator.group.group_store import GroupEntry, GroupStore
from mansio.broker.coordinator.group.offset_expiration import OffsetExpiration
from mansio.broker.coordinator.group.offset_manager import OffsetManager, tombstones
from mansio.broker.coordinator.group.persisted_groups import PersistedGroups
from mansio.broker.coordinator.group.settings import OFFSETS_TOPIC, GroupSettings
from mansio.broker.coordinator.group.share_groups import ShareGroups
from mansio.broker.coordinator.group.topic_resolver import TopicResolver
from mansio.broker.coordinator.runtime import CoordinatorRuntime
from mansio.errors import (
    CoordinatorNotAvailable,
    GroupIdNotFound,
    InconsistentGroupProtocol,
    InvalidRequest,
    InvalidSessionTimeout,
    MansioError,
    StorageError,
    UnknownMember,
)
from mansio.logs import fields
from mansio.state.classic_group.group import ClassicGroup
from mansio.state.consumer_group.group import ConsumerGroup
from mansio.state.share_group.group import ShareGroup

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

    from mansio.broker.coordinator.checkpoint import CheckpointStorage
    from mansio.broker.coordinator.coordinator_lookup import CoordinatorLookup, OffsetsTopicPartition
    from mansio.broker.coordinator.group.group_store import OffsetListener
    from mansio.broker.coordinator.view import CoordinatorPartition
    from mansio.ports import Clock, Random, Scheduler
    from mansio.state.classic_group.types import Join, JoinResponse, Protocol, Sync, SyncResponse
    from mansio.state.consumer_group.types import Heartbeat, HeartbeatResponse
    from mansio.state.share_group.group import ShareHeartbeat

__all__ = ["OFFSETS_TOPIC", "GroupCoordinator", "GroupSettings"]

logger = logging.getLogger(__name__)

PROTOCOL_BYTES: Final = 200
"""What a protocol takes in memory beside its name and its metadata."""
MEMBERS_BYTES_RECOUNT_MS: Final = 1000


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
        create_topic: Callable[[], Awaitable[Sequence[CoordinatorPartition | StorageError]]],
        end_offset: Callable[[str, int], int | None],
        checkpoints: CheckpointStorage | None = None,
        on_offset: OffsetListener = lambda *_: None,
        places: CoordinatorLookup | None = None,
        subscriptions: TopicResolver | None = None,
        overrides: Callable[[str], Mapping[str, str]] = lambda _: {},
    ) -> None:
        self.settings = settings
        self.places = places
        self._scheduler = scheduler
        self._random = random
        self.subscriptions = subscriptions or TopicResolver({})
        self.modern = ConsumerGroups(settings, clock, self.subscriptions, overrides)
        self.share = ShareGroups(settings, scheduler, self.subscriptions, overrides)
        self.store = GroupStore(
            settings,
            clock,
            on_offset,
            consumer_group=self.modern.empty_group,
            share_group=self.share.empty_group,
        )
        self.effects = GroupActions(
            self.store,
            self.modern,
            self.share,
            clock=clock,
            scheduler=scheduler,
            stall_ms=settings.stall_ms,
        )
        persisted = PersistedGroups(
            self.store, arm_timer=self.effects.arm_timer, rebuild=self.effects.rebuild
        )
        self.modern.store, self.modern.persisted = self.store, persisted
        self.modern.perform, self.modern.arm_timer = self.effects.perform, self.effects.arm_timer
        self.share.store, self.share.persisted = self.store, persisted
        self.topic = CoordinatorRuntime(
            OFFSETS_TOPIC,
            view=self.store,
            create=create_topic,
            scheduler=scheduler,
            clock=clock,
            checkpoints=checkpoints,
            partition_count=None if places is None else places.partition_count,
        )
        self.store.topic = self.topic
        self.store.on_unloaded = self.effects.partition_unloaded
        if places is not None:
            self.store.on_loaded = self._loaded
            self.offsets = OffsetManager(self.store, settings, clock, places.has_partition)
        else:
            self.offsets = OffsetManager(
                self.store, settings, clock, lambda topic, index: end_offset(topic, index) is not None
            )
        self.offset_expiration = OffsetExpiration(
            self.store,
            self.offsets,
            interval_ms=settings.offsets_retention_check_interval_ms,
            clock=clock,
            scheduler=scheduler,
            delete=self.delete,
            places=places,
        )
        self.inspection = GroupInspection(self.store, end_offset, self.subscriptions)
        # So many at most: the first who comes has them counted.
        self._members_bytes = settings.members_bytes_max
        self._recount_due_ms = 0.0

    async def start(self, partitions: Sequence[CoordinatorPartition | StorageError]) -> None:
        """Load the groups from `__consumer_offsets`; no partitions if it has not been created yet, or in a cluster."""
        await self.topic.start(partitions)
        for entry in list(self.store.entries.values()):
            self.effects.arm_timer(entry)
        self.share.resume(list(self.store.entries.values()))
        self.offset_expiration.start()

    def role_changed(self, partition: OffsetsTopicPartition) -> None:
        """In a cluster: a partition of `__consumer_offsets` leads here, in this leader epoch, or it does not. To be
        told after each change of its role, and before it is closed; telling it again changes nothing."""
        index, leader_epoch = partition.index, partition.leader_epoch
        if self.effects.closed or not partition.is_leader or partition.closed:
            self.topic.resign(index)
        elif not self.topic.is_leader(index, partition, leader_epoch):
            self.topic.lead(index, partition, leader_epoch)

    async def ready(self) -> None:
        """Make sure that `__consumer_offsets` exists. Raises what a member is told otherwise."""
        with coordinator_errors():
            await self.topic.ready()

    def led_partitions(self, node_id: int) -> list[int]:
        """In a cluster: the partitions of `__consumer_offsets` that broker `node_id` leads by the metadata, whether or
        not it has loaded their groups."""
        if self.places is None:
            return []
        indexes = range(self.places.partition_count())
        return [index for index in indexes if self.places.leader_id(index) == node_id]

    async def close(self) -> None:
        """End all waits (clients find the coordinator again after the restart) and write the checkpoints."""
        self.offset_expiration.stop()
        self.effects.close()
        await self.topic.close()

    # ------------------------------------------------------------------ partitions come and go (in a cluster)

    def _loaded(self, index: int) -> None:
        entries = self.store.of_partition(index)
        for entry in entries:
            self.effects.arm_timer(entry)
        self.share.resume(entries)
        logger.info("groups loaded", extra=fields(partition=index, groups=len(entries)))
        self.offset_expiration.forget_topics(entries)

    # ------------------------------------------------------------------ members

    async def join(self, group_id: str, request: Join) -> JoinResponse:
        """A member joins; returns when the rebalance has ended. Raises the errors of `ClassicGroup.join`,
        `InvalidGroupId`, `InvalidSessionTimeout`, `InvalidRequest`."""
        self._check_join(group_id, request)
        if request.member_id:
            entry = self._entry(group_id)
        else:
            with coordinator_errors():  # the first group of all makes the topic it is stored in
                entry = await self.store.find_or_create(group_id)
        _check_not_shared(entry)
        new_member_id = f"{request.instance_id or request.client_id}-{self._random.bytes(16).hex()}"
        if isinstance(entry.group, ConsumerGroup):
            if not entry.group.is_idle():
                with coordinator_errors():
                    return await self.modern.join(entry, entry.group, request, new_member_id)
            with coordinator_errors():
                self.modern.convert_to_classic(entry)
        promise = self._scheduler.promise()
        try:
            effects = _classic(entry).join(request, promise, new_member_id, self.store.monotonic_ms())
        finally:
            self.store.drop_if_unused(entry)
        answer: JoinResponse = await self.effects.perform_and_wait(entry, effects, promise)
        return answer

    async def sync(self, group_id: str, request: Sync) -> SyncResponse:
        """A member asks for its assignment; returns when the leader has given it and it is stored."""
        check_group_id(group_id)
        if self.places is not None:
            await self._committed(group_id)
        entry = self._entry(group_id)
        if isinstance(entry.group, ConsumerGroup):
            with coordinator_errors():
                return await self.modern.sync(entry, entry.group, request)
        promise = self._scheduler.promise()
        effects = _classic(entry).sync(request, promise, self.store.monotonic_ms())
        answer: SyncResponse = await self.effects.perform_and_wait(entry, effects, promise)
        return answer

    async def _committed(self, group_id: str) -> None:
        """What a new leader found at the end of its log may yet be lost with it: no assignment is given out of that."""
        self._entry(group_id)
        with coordinator_errors():
            await self.store.committed(group_id)

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
            with coordinator_errors():
                self.modern.leave(entry, entry.group, member_id, instance_id)
            return
        self.effects.perform(entry, _classic(entry).leave(member_id, instance_id, self.store.monotonic_ms()))

    def new_member_id(self) -> str:
        """For a member of the new protocol that has none: a uuid, as clients make it themselves."""
        return str(UUID(bytes=self._random.bytes(16), version=4))

    async def consumer_heartbeat(self, group_id: str, request: Heartbeat) -> HeartbeatResponse:
        """A member of the new protocol joins, is alive, or leaves; see `ConsumerGroups.heartbeat`."""
        check_group_id(group_id)
        with coordinator_errors():
            return await self.modern.heartbeat(group_id, request)

    async def share_heartbeat(self, group_id: str, request: ShareHeartbeat) -> HeartbeatResponse:
        """A member of a share group joins, is alive, or leaves; see `ShareGroups.heartbeat`."""
        check_group_id(group_id)
        with coordinator_errors():
            return await self.share.heartbeat(group_id, request)

    async def delete(self, group_id: str) -> None:
        """Delete an empty group and its offsets; returns when that is committed. Raises `GroupIdNotFound`,
        `NonEmptyGroup`, `InvalidGroupId`."""
        check_group_id(group_id)
        entry = self.store.find(group_id)
        if entry is None:
            raise GroupIdNotFound(f"there is no group {group_id!r}")
        if isinstance(entry.group, ShareGroup):
            with coordinator_errors():
                await self.share.forget_all(entry, entry.group)
        entry.group.delete()
        try:
            if records := tombstones(entry, with_group=True):
                await self.store.append(group_id, records, whole=True)
        except MansioError as error:
            entry.group.undelete()
            raise as_coordinator_error(error) from error
        self.store.remove(entry)

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
        self._check_memory(group_id, _size_of(request.protocols))

    def _check_memory(self, group_id: str, size: int) -> None:
        """Of those who go nothing is subtracted: all are counted anew when there seems to be no room any more."""
        settings = self.settings
        if size > settings.member_bytes_max:
            raise InvalidRequest(
                f"a member of group {group_id!r} says {size} bytes of itself; {settings.member_bytes_max} at most"
            )
        now_ms = self.store.monotonic_ms()
        if self._members_bytes + size > settings.members_bytes_max and now_ms >= self._recount_due_ms:
            self._recount_due_ms = now_ms + MEMBERS_BYTES_RECOUNT_MS
            self._members_bytes = sum(
                _size_of(member.protocols) + len(member.assignment)
                for entry in self.store.entries.values()
                if isinstance(entry.group, ClassicGroup)
                for member in entry.group.roster.members.values()
            )
        if self._members_bytes + size > settings.members_bytes_max:
            raise CoordinatorNotAvailable("members of groups take all the memory there is for them")
        self._members_bytes += size


def _size_of(protocols: Iterable[Protocol]) -> int:
    return sum(PROTOCOL_BYTES + len(each.name) + len(each.metadata) for each in protocols)


def _classic(entry: GroupEntry) -> ClassicGroup:
    """The machine of a group that is no other. Raises `CoordinatorNotAvailable` (a group that is being deleted)."""
    if not isinstance(entry.group, ClassicGroup):
        raise CoordinatorNotAvailable(f"group {entry.group.group_id} is being deleted")
    return entry.group


def _check_not_shared(entry: GroupEntry) -> None:
    if isinstance(entry.group, ShareGroup):
        raise InconsistentGroupProtocol(f"group {entry.group.group_id!r} is a share group")
