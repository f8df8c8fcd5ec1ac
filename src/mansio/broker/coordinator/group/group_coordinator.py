"""Group coordinator: membership, committed offsets and inspection of consumer and share groups.

`GroupCoordinator` handles the requests of all group protocols. `GroupActions` performs the effects of the state
machines; `ConsumerGroups` and `ShareGroups` handle the groups of KIP-848 and KIP-932; `OffsetManager` manages the
committed offsets, `OffsetExpiration` expires them; `GroupInspection` describes groups. A member of the classic protocol
may belong to a classic or to a consumer group.

In a cluster, a broker coordinates the groups in those partitions of `__consumer_offsets` that it leads and has loaded.
The other brokers respond with errors that make clients look up the coordinator again.

Invariants:
* Nothing blocks, and every wait is bounded: a parked join or sync ends with the phase of the group, or when the broker
  stops leading the partition.
* The coordinator keeps the metadata of a member until its session ends, whether or not the client is alive. The total
  size of the metadata is bounded.
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
from mansio.broker.coordinator.group.group_factory import GroupFactory
from mansio.broker.coordinator.group.group_inspection import GroupInspection
from mansio.broker.coordinator.group.group_store import GroupEntry, GroupStore
from mansio.broker.coordinator.group.offset_manager import OffsetExpiration, OffsetManager, tombstones
from mansio.broker.coordinator.group.settings import GroupSettings
from mansio.broker.coordinator.group.share_groups import ShareGroups, ShareStateOperations
from mansio.broker.coordinator.group.topic_resolver import TopicResolver
from mansio.broker.coordinator.runtime import CoordinatorRuntime
from mansio.config.topic_names import OFFSETS_TOPIC
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
    from mansio.broker.coordinator.group.group_store import OffsetListener
    from mansio.broker.coordinator.group.visible_topics import Viewer
    from mansio.broker.coordinator.view import CoordinatorPartition, CoordinatorReplica, TransactionalView
    from mansio.broker.routing.routes import CoordinatorLookup
    from mansio.ports import Clock, Random, Scheduler
    from mansio.state.classic_group.types import Join, JoinResponse, Protocol, Sync, SyncResponse
    from mansio.state.consumer_group.types import Heartbeat, HeartbeatResponse
    from mansio.state.share_group.group import ShareHeartbeat

__all__ = ["GroupCoordinator", "GroupSettings"]

logger = logging.getLogger(__name__)

PROTOCOL_OVERHEAD_BYTES: Final = 200
"""Estimated memory of a member's protocol in addition to its name and metadata."""
MEMBERS_BYTES_RECOUNT_MS: Final = 1000
"""Minimum time between two counts of the memory of all members."""


class GroupCoordinator:
    """Group coordinator of one broker. Callers call all methods on the broker's event loop.

    `create_topic` creates `__consumer_offsets` if needed and returns its open partitions. `end_offset` returns the high
    watermark of a partition, or None if this broker does not have the partition. `on_offset`: see `GroupStore`.
    `lookup`: metadata of the cluster, None on a single node. In a cluster `create_topic` only creates the topic,
    `checkpoints` is unused, and partitions are passed to `handle_role_change` instead of `start`. `topic_resolver`: the
    topics to which members can subscribe. `overrides` returns the settings of a single group. `share_state`: operations
    on the delivery state of share groups, None if share groups are unused.

    The constructor raises `ConfigError` for unknown assignors.
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
        lookup: CoordinatorLookup | None = None,
        topic_resolver: TopicResolver | None = None,
        overrides: Callable[[str], Mapping[str, str]] = lambda _: {},
        share_state: ShareStateOperations | None = None,
        hides_topics: bool = False,
    ) -> None:
        self.settings = settings
        self.lookup = lookup
        self._scheduler = scheduler
        self._random = random
        self.topic_resolver = topic_resolver or TopicResolver({})
        self._factory = GroupFactory(settings, overrides)

        def open_runtime(view: TransactionalView) -> CoordinatorRuntime:
            return CoordinatorRuntime(
                OFFSETS_TOPIC,
                view=view,
                transactions=view,
                create=create_topic,
                scheduler=scheduler,
                clock=clock,
                checkpoints=checkpoints,
                partition_count=None if lookup is None else lookup.partition_count,
            )

        self.store = GroupStore(
            settings,
            clock,
            self._factory,
            open_runtime,
            on_offset=on_offset,
            on_loaded=self._on_groups_loaded,
            on_unloaded=self._on_groups_unloaded,
        )
        self.runtime = self.store.runtime
        self.actions = GroupActions(
            self.store,
            clock=clock,
            scheduler=scheduler,
            stall_ms=settings.stall_ms,
            expire_members=self._expire_members,
        )
        self.consumer_groups = ConsumerGroups(
            settings,
            clock=clock,
            factory=self._factory,
            store=self.store,
            actions=self.actions,
            topic_resolver=self.topic_resolver,
            hides_topics=hides_topics,
        )
        self.share_groups = ShareGroups(
            scheduler=scheduler,
            factory=self._factory,
            store=self.store,
            actions=self.actions,
            topic_resolver=self.topic_resolver,
            state=share_state,
        )

        def partition_exists(topic: str, index: int) -> bool:
            return end_offset(topic, index) is not None

        exists = partition_exists if lookup is None else lookup.has_partition
        self.offsets = OffsetManager(self.store, settings, clock, exists)
        self.offset_expiration = OffsetExpiration(
            self.store,
            self.offsets,
            interval_ms=settings.offsets_retention_check_interval_ms,
            clock=clock,
            scheduler=scheduler,
            delete_group=self.delete,
            lookup=lookup,
        )
        self.inspection = GroupInspection(self.store, end_offset, self.topic_resolver)
        self._members_bytes = (
            settings.members_bytes_max
        )  # an upper bound; the first join counts the actual value
        self._recount_due_ms = 0.0

    async def start(self, partitions: Sequence[CoordinatorPartition | StorageError]) -> None:
        """Start the coordinator and load the groups from the partitions of `__consumer_offsets`; the list is empty in a
        cluster and if the topic does not exist."""
        await self.runtime.start(partitions)
        for entry in list(self.store.entries.values()):
            self.actions.arm_timer(entry)
        self.share_groups.resume(list(self.store.entries.values()))
        self.offset_expiration.start()

    def handle_role_change(self, partition: CoordinatorReplica) -> None:
        """In a cluster, load or unload the groups of a partition of `__consumer_offsets` according to its role
        (idempotent). The caller calls this after each change of the role, and before it closes the partition."""
        self.runtime.apply_role(partition, is_closed=self.actions.closed)

    async def ensure_topic_exists(self) -> None:
        """Create `__consumer_offsets` if it does not exist. Raises the errors of the coordinator."""
        with coordinator_errors():
            await self.runtime.ensure_topic_exists()

    def led_partitions(self, node_id: int) -> list[int]:
        """Return the partitions of `__consumer_offsets` that broker `node_id` leads according to the metadata, whether
        or not it has loaded their groups; empty on a single node, which leads all of them."""
        if self.lookup is None:
            return []
        indexes = range(self.lookup.partition_count())
        return [index for index in indexes if self.lookup.leader_id(index) == node_id]

    async def close(self) -> None:
        """Complete all parked requests with an error, so that clients look up the coordinator again, and write the
        checkpoints."""
        self.offset_expiration.stop()
        self.actions.close()
        await self.runtime.close()

    # ------------------------------------------------------------------ partitions, topics, settings and time

    def _on_groups_loaded(self, index: int) -> None:
        if self.lookup is None:  # `start` does the rest when all partitions are loaded
            return
        entries = self.store.entries_of_partition(index)
        for entry in entries:
            self.actions.arm_timer(entry)
        self.share_groups.resume(entries)
        logger.info("groups_loaded", extra=fields(partition=index, groups=len(entries)))
        self.offset_expiration.delete_offsets_of_missing_topics(entries)

    def _on_groups_unloaded(self, index: int) -> None:
        self.actions.complete_parked_requests(index)

    def delete_state_of_missing_topics(self) -> None:
        """Start to delete the share state of topics that do not exist any more. Called after topics were deleted."""
        self.share_groups.resume(list(self.store.entries.values()))

    def apply_settings(self, group_id: str) -> None:
        """Apply the changed settings of a group; they take effect with the next heartbeat of each member."""
        entry = self.store.entries.get(group_id)
        if entry is None:
            return
        if isinstance(entry.group, ConsumerGroup):
            entry.group.settings = self._factory.consumer_settings(group_id)
        elif isinstance(entry.group, ShareGroup):
            entry.group.settings = self._factory.share_settings(group_id)

    def _expire_members(self, entry: GroupEntry) -> None:
        if isinstance(entry.group, ConsumerGroup):
            self.consumer_groups.expire_members(entry, entry.group)
        elif isinstance(entry.group, ShareGroup):
            self.share_groups.expire_members(entry, entry.group)

    # ------------------------------------------------------------------ members

    async def join(self, group_id: str, request: Join) -> JoinResponse:
        """Handle a JoinGroup; returns at the end of the group's join phase. Raises the errors of `ClassicGroup.join`,
        `InvalidGroupId`, `InvalidSessionTimeout`, `InvalidRequest`."""
        self._check_join(group_id, request)
        if request.member_id:
            entry = self._entry(group_id)
        else:
            with coordinator_errors():  # the first group creates the topic
                entry = await self.store.find_or_create(group_id)
        _check_not_share_group(entry)
        new_member_id = f"{request.instance_id or request.client_id}-{self._random.bytes(16).hex()}"
        if isinstance(entry.group, ConsumerGroup):
            if not entry.group.is_idle():
                with coordinator_errors():
                    return await self.consumer_groups.join(entry, entry.group, request, new_member_id)
            with coordinator_errors():
                self.consumer_groups.convert_to_classic(entry)
        promise = self._scheduler.promise()
        try:
            effects = _classic_group_of(entry).join(
                request, promise, new_member_id, self.store.monotonic_ms()
            )
        finally:
            self.store.remove_if_empty(entry)
        response: JoinResponse = await self.actions.perform_and_wait(entry, effects, promise)
        return response

    async def sync(self, group_id: str, request: Sync) -> SyncResponse:
        """Handle a SyncGroup; returns when the leader's assignment is stored."""
        check_group_id(group_id)
        if self.lookup is not None:
            await self._wait_until_committed(group_id)
        entry = self._entry(group_id)
        if isinstance(entry.group, ConsumerGroup):
            with coordinator_errors():
                return await self.consumer_groups.sync(entry, entry.group, request)
        promise = self._scheduler.promise()
        effects = _classic_group_of(entry).sync(request, promise, self.store.monotonic_ms())
        response: SyncResponse = await self.actions.perform_and_wait(entry, effects, promise)
        return response

    async def _wait_until_committed(self, group_id: str) -> None:
        """Wait until the appended records of the group's partition are committed. A new leader may have found records
        at the end of its log that are not committed yet and that another leader would not have."""
        self._entry(group_id)
        with coordinator_errors():
            await self.store.wait_until_committed(group_id)

    def heartbeat(self, group_id: str, member_id: str, instance_id: str | None, generation: int) -> None:
        """Handle a Heartbeat. Raises `RebalanceInProgress` when the member has to rejoin."""
        check_group_id(group_id)
        entry = self._entry(group_id)
        if isinstance(entry.group, ConsumerGroup):
            self.consumer_groups.classic_heartbeat(entry, entry.group, member_id, instance_id, generation)
            return
        _classic_group_of(entry).heartbeat(member_id, instance_id, generation, self.store.monotonic_ms())

    def leave(self, group_id: str, member_id: str, instance_id: str | None) -> None:
        """Handle a LeaveGroup of one member."""
        check_group_id(group_id)
        entry = self._entry(group_id)
        if isinstance(entry.group, ConsumerGroup):
            with coordinator_errors():
                self.consumer_groups.leave(entry, entry.group, member_id, instance_id)
            return
        self.actions.perform(
            entry, _classic_group_of(entry).leave(member_id, instance_id, self.store.monotonic_ms())
        )

    def new_member_id(self) -> str:
        """Generate a member id for a client of the consumer protocol that sent none: a UUID, as newer clients do."""
        return str(UUID(bytes=self._random.bytes(16), version=4))

    async def consumer_heartbeat(
        self, group_id: str, request: Heartbeat, viewer: Viewer | None = None
    ) -> HeartbeatResponse:
        """Handle a ConsumerGroupHeartbeat; see `ConsumerGroups.heartbeat`."""
        check_group_id(group_id)
        with coordinator_errors():
            return await self.consumer_groups.heartbeat(group_id, request, viewer)

    async def share_heartbeat(self, group_id: str, request: ShareHeartbeat) -> HeartbeatResponse:
        """Handle a ShareGroupHeartbeat; see `ShareGroups.heartbeat`."""
        check_group_id(group_id)
        with coordinator_errors():
            return await self.share_groups.heartbeat(group_id, request)

    async def delete(self, group_id: str) -> None:
        """Delete a group without members and its committed offsets; returns when the deletion is committed. Raises
        `GroupIdNotFound`, `NonEmptyGroup`, `InvalidGroupId`, and the errors of the coordinator."""
        check_group_id(group_id)
        entry = self.store.find(group_id)
        if entry is None:
            raise GroupIdNotFound(f"there is no group {group_id!r}")
        if isinstance(entry.group, ShareGroup):
            with coordinator_errors():
                await self.share_groups.delete_all_topics(entry, entry.group)
        entry.group.delete()
        try:
            if records := tombstones(entry, with_group=True):
                await self.store.append(group_id, records, atomic=True)
        except MansioError as error:
            entry.group.undelete()
            raise as_coordinator_error(error) from error
        self.store.remove(entry)

    # ------------------------------------------------------------------ checks

    def _entry(self, group_id: str) -> GroupEntry:
        entry = self.store.find(group_id)
        if entry is None:
            raise UnknownMember(f"there is no group {group_id!r}")
        _check_not_share_group(entry)
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
        self._check_member_memory(group_id, _protocols_size_bytes(request.protocols))

    def _check_member_memory(self, group_id: str, size: int) -> None:
        """Raise an error if the metadata of a joining member exceeds the memory limit per member (`InvalidRequest`) or
        for all members (`CoordinatorNotAvailable`). Members that leave are not subtracted; all members are counted
        again when the limit seems to be reached."""
        settings = self.settings
        if size > settings.member_bytes_max:
            raise InvalidRequest(
                f"the metadata of a member of group {group_id!r} have {size} bytes;"
                f" the maximum is {settings.member_bytes_max}"
            )
        now_ms = self.store.monotonic_ms()
        if self._members_bytes + size > settings.members_bytes_max and now_ms >= self._recount_due_ms:
            self._recount_due_ms = now_ms + MEMBERS_BYTES_RECOUNT_MS
            self._members_bytes = sum(
                _protocols_size_bytes(member.protocols) + len(member.assignment)
                for entry in self.store.entries.values()
                if isinstance(entry.group, ClassicGroup)
                for member in entry.group.members.by_id.values()
            )
        if self._members_bytes + size > settings.members_bytes_max:
            raise CoordinatorNotAvailable("the memory for members of groups is exhausted")
        self._members_bytes += size


def _protocols_size_bytes(protocols: Iterable[Protocol]) -> int:
    return sum(PROTOCOL_OVERHEAD_BYTES + len(each.name) + len(each.metadata) for each in protocols)


def _classic_group_of(entry: GroupEntry) -> ClassicGroup:
    """Return the classic group of an entry. Raises `CoordinatorNotAvailable` if the entry has another type of group,
    which is being deleted."""
    if not isinstance(entry.group, ClassicGroup):
        raise CoordinatorNotAvailable(f"group {entry.group.group_id} is being deleted")
    return entry.group


def _check_not_share_group(entry: GroupEntry) -> None:
    if isinstance(entry.group, ShareGroup):
        raise InconsistentGroupProtocol(f"group {entry.group.group_id!r} is a share group")
