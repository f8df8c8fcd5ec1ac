"""Share groups (KIP-932) in the coordinator: requests to `state.share_group`, and creation and deletion of share state.

Members and their assignments are records of `__consumer_offsets`, which `GroupActions` writes as for other groups. The
leaders of the share partitions keep the delivery state of the records. This module knows only which topics have such
state, and requests its deletion when the group or the topic is deleted.

Invariants:
* A partition that is added to a topic which the group already reads is read from its beginning: its state is
  initialized before a member receives the partition. (`share.auto.offset.reset` applies to topics that are new to the
  group.)
* The group's records list the state that is being deleted until the deletion has finished; a new coordinator of the
  group continues the deletion.

Deviation from Kafka: a group id belongs to one type of group until the group is deleted, except that a share group
replaces a classic group without members and offsets.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from mansio.broker.coordinator.group.group_actions import HeartbeatOutcome
from mansio.errors import (
    CoordinatorNotAvailable,
    FencedStateEpoch,
    GroupIdNotFound,
    InconsistentGroupProtocol,
    MansioError,
)
from mansio.logs import fields
from mansio.state.classic_group.group import ClassicGroup
from mansio.state.consumer_group.types import JOIN_EPOCH
from mansio.state.share_group.group import ShareGroup
from mansio.state.share_partition.types import ShareKey
from mansio.wire.internal_records.offset_and_group_records import GroupKey, encode_group_key

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from mansio.broker.coordinator.group.group_actions import GroupActions
    from mansio.broker.coordinator.group.group_factory import GroupFactory
    from mansio.broker.coordinator.group.group_store import GroupEntry, GroupStore
    from mansio.broker.coordinator.group.topic_resolver import TopicResolver
    from mansio.ports import Promise, Scheduler
    from mansio.state.consumer_group.types import HeartbeatResponse, Records
    from mansio.state.share_group.group import ShareGroupMember, ShareHeartbeat

logger = logging.getLogger(__name__)


class DescribedShareGroup(NamedTuple):
    """Description of a share group."""

    group_id: str
    state: str
    group_epoch: int
    assignment_epoch: int
    members: tuple[ShareGroupMember, ...]


class ShareStateOperations(NamedTuple):
    """Operations on the delivery state of a share partition, which its share coordinator and its leader perform."""

    delete: Callable[[ShareKey], Awaitable[None]]
    wait_until_dead_lettered: Callable[[ShareKey], Awaitable[None]]
    """Wait until all records that are being archived are copied to the dead-letter topic."""
    initialize: Callable[[ShareKey, int, int], Awaitable[None]]
    """Create the state of a share partition with this state epoch and start offset."""


class ShareGroups:
    """The share groups of one group coordinator."""

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        factory: GroupFactory,
        store: GroupStore,
        actions: GroupActions,
        topic_resolver: TopicResolver,
        state: ShareStateOperations | None,
    ) -> None:
        self._scheduler = scheduler
        self._factory = factory
        self._store = store
        self._actions = actions
        self._topic_resolver = topic_resolver
        self._state = state
        self._initializing: dict[str, Promise[None]] = {}

    # ------------------------------------------------------------------ members

    async def heartbeat(self, group_id: str, request: ShareHeartbeat) -> HeartbeatResponse:
        """Handle a heartbeat; returns once its changes are committed. Raises the errors of `ShareGroup.heartbeat`,
        `InconsistentGroupProtocol` (a group of another type), and those of the coordinator."""
        response = await self._actions.heartbeat(
            group_id, lambda entry: self._heartbeat(entry, request), joins=request.member_epoch == JOIN_EPOCH
        )
        if (initialized := self._initializing.get(group_id)) is not None:
            await initialized
        return response

    def _heartbeat(self, entry: GroupEntry, request: ShareHeartbeat) -> HeartbeatOutcome:
        before, now_ms = entry.group, self._store.monotonic_ms()
        records: Records = []
        group = before if isinstance(before, ShareGroup) else self._converted_from_classic(entry, records)
        topics = self._topic_resolver.topics()
        response, more = self._actions.apply_change(
            entry, group, lambda: group.heartbeat(request, topics, now_ms)
        )
        if group is before and not more:
            self._actions.rearm_after_heartbeat(entry, group, now_ms)
            return HeartbeatOutcome(response, None)
        return HeartbeatOutcome(response, self._write_changes(entry, group, records + more))

    def _converted_from_classic(self, entry: GroupEntry, records: Records) -> ShareGroup:
        """Create the share group that replaces a classic group without members and offsets, and add the deletion of the
        classic group to `records`. Raises `CoordinatorNotAvailable` if the group is being deleted, and
        `InconsistentGroupProtocol` if it has another type, members or offsets."""
        classic = entry.group
        if entry.is_deleted:
            raise CoordinatorNotAvailable(f"group {classic.group_id} is being deleted")
        if (
            not isinstance(classic, ClassicGroup)
            or not classic.is_idle()
            or entry.offsets
            or entry.pending_offsets
        ):
            raise InconsistentGroupProtocol(f"group {classic.group_id!r} is not a share group")
        if entry.group_metadata_value is not None:
            records.append((encode_group_key(GroupKey(classic.group_id)), None))
        return self._factory.share_group(classic.group_id)

    def expire_members(self, entry: GroupEntry, group: ShareGroup) -> None:
        """Remove members whose session has ended."""
        topics, now_ms = self._topic_resolver.topics(), self._store.monotonic_ms()
        self._actions.remove_expired(
            entry, group, lambda: self._write_changes(entry, group, group.tick(topics, now_ms))
        )

    def find(self, group_id: str) -> tuple[GroupEntry, ShareGroup]:
        """Return the share group with this id and its entry. Raises `GroupIdNotFound`, and the errors of the
        coordinator."""
        entry = self._store.find(group_id)
        if entry is None or entry.is_deleted or not isinstance(entry.group, ShareGroup):
            raise GroupIdNotFound(f"there is no share group {group_id!r}")
        return entry, entry.group

    async def find_or_create(self, group_id: str) -> tuple[GroupEntry, ShareGroup]:
        """Return the share group with this id and its entry; a group that does not exist is created without members and
        stored. Raises `GroupIdNotFound` if the id belongs to a group of another type, and the errors of the
        coordinator."""
        entry = await self._store.find_or_create(group_id)
        if isinstance(entry.group, ShareGroup) and not entry.is_deleted:
            return entry, entry.group
        records: Records = []
        try:
            group = self._converted_from_classic(entry, records)
            await self._write_and_wait(entry, group, records + group.create())
        except InconsistentGroupProtocol as error:
            raise GroupIdNotFound(error.message) from error
        finally:
            self._store.remove_if_empty(entry)
        return entry, group

    def describe(self, group_id: str) -> DescribedShareGroup:
        """Describe a share group. Raises `GroupIdNotFound`, and the errors of the coordinator."""
        _, group = self.find(group_id)
        return DescribedShareGroup(
            group_id,
            str(group.state),
            group.group_epoch,
            group.assignment_epoch,
            tuple(group.members.values()),
        )

    # ------------------------------------------------------------------ state of topics

    async def add_initialized_partitions(
        self, entry: GroupEntry, group: ShareGroup, topic_id: bytes, name: str, indexes: Iterable[int]
    ) -> None:
        """Record that these partitions have share state, whether or not they were ever assigned to a member; returns
        when the record is committed."""
        await self._write_and_wait(entry, group, group.add_initialized_partitions(topic_id, name, indexes))

    async def delete_topics(self, entry: GroupEntry, group: ShareGroup, topic_ids: Iterable[bytes]) -> None:
        """Delete the share state of topics to which no member subscribes. Raises `NonEmptyGroup` if there are such
        members, and the error of a failed deletion, which is retried after the next load of the group."""
        wanted = list(topic_ids)
        indexes = {
            each.topic_id: each.partitions
            for each in group.state_partitions.initialized
            if each.topic_id in wanted
        }
        counts = self._topic_resolver.topics().partitions
        # Share state of a deleted topic cannot be initialized again, and only its initialized partitions are known.
        for topic_id in wanted:
            if topic_id not in counts:
                await self._delete(group.group_id, topic_id, indexes.get(topic_id, ()))
            for index in indexes.get(topic_id, ()) if topic_id in counts else ():
                await self._wait_for_dead_letters(ShareKey(group.group_id, topic_id, index))
        await self._write_and_wait(entry, group, group.start_state_deletion(wanted))
        for topic_id in wanted:
            if topic_id in counts:
                all_indexes = {*indexes.get(topic_id, ()), *range(counts[topic_id])}
                await self._delete(group.group_id, topic_id, sorted(all_indexes))
        if not entry.is_unloaded and entry.group is group:
            await self._write_and_wait(entry, group, group.finish_state_deletion(wanted))

    async def _delete(self, group_id: str, topic_id: bytes, indexes: Iterable[int]) -> None:
        for index in indexes:
            if self._state is not None:
                await self._state.delete(ShareKey(group_id, topic_id, index))

    async def _wait_for_dead_letters(self, key: ShareKey) -> None:
        if self._state is not None:
            await self._state.wait_until_dead_lettered(key)

    async def delete_all_topics(self, entry: GroupEntry, group: ShareGroup) -> None:
        """Delete all share state of a group without members, before the group is deleted."""
        state = group.state_partitions
        await self.delete_topics(
            entry, group, [each.topic_id for each in (*state.initialized, *state.deleting)]
        )

    def resume(self, entries: Iterable[GroupEntry]) -> None:
        """Continue interrupted deletions of share state, and start those for deleted topics. Called after groups were
        loaded or topics changed."""
        found = [(entry, entry.group) for entry in entries if isinstance(entry.group, ShareGroup)]
        if not found:
            return
        known = self._topic_resolver.topics().partitions
        for entry, group in found:
            state = group.state_partitions
            deleted = [each.topic_id for each in state.deleting]
            deleted += [each.topic_id for each in state.initialized if each.topic_id not in known]
            if deleted:
                self._scheduler.spawn(self._resume(entry, group, deleted), name="delete share state")

    async def _resume(self, entry: GroupEntry, group: ShareGroup, deleted: list[bytes]) -> None:
        try:
            if group.members:
                await self._write_and_wait(
                    entry,
                    group,
                    group.handle_topic_change(self._topic_resolver.topics(), self._store.monotonic_ms()),
                )
            await self.delete_topics(entry, group, deleted)
        except MansioError as error:  # retried by the next load or topic change
            logger.warning("share_state_not_deleted", extra=fields(group=group.group_id, reason=error))

    # ------------------------------------------------------------------ writing

    async def _write_and_wait(self, entry: GroupEntry, group: ShareGroup, records: Records) -> None:
        written = self._write_changes(entry, group, records)
        if written is not None:
            await written

    def _write_changes(self, entry: GroupEntry, group: ShareGroup, records: Records) -> Promise[None] | None:
        """Append the changes of a group and make it the group of the entry. Returns the promise of the commit, None if
        there is nothing to write. Raises the errors of the append."""
        if not records:
            return None
        written = self._actions.write(entry, group, records)
        if group.added_partitions:
            initialized = self._initializing[group.group_id] = self._scheduler.promise()
            self._scheduler.spawn(self._initialize_added(group, initialized), name="initialize share state")
        return written

    async def _initialize_added(self, group: ShareGroup, initialized: Promise[None]) -> None:
        added, group.added_partitions = group.added_partitions, []
        try:
            for topic_id, index in added:
                with suppress(FencedStateEpoch):  # an administrator has set the start offset
                    await self._initialize(ShareKey(group.group_id, topic_id, index), 0, 0)
        except MansioError as error:
            known = fields(group=group.group_id, partitions=len(added), reason=error)
            logger.warning("new_partitions_not_read_from_beginning", extra=known)
        finally:
            if self._initializing.get(group.group_id) is initialized:
                del self._initializing[group.group_id]
            initialized.set_result(None)

    async def _initialize(self, key: ShareKey, state_epoch: int, start_offset: int) -> None:
        if self._state is not None:
            await self._state.initialize(key, state_epoch, start_offset)
