"""Share groups (KIP-932) in the coordinator: performs what `state.share_group.group` decides.

Members and what they fetch are records of `__consumer_offsets`, written as those of the other kinds of groups are. What
each record of a topic is to the group is not kept here but by the share partitions' leaders; this only knows which
topics have such state, and has it deleted when the group, or the topic, is gone. How a machine's changes are written,
and what is always true of that: `persisted`.

Always true:
* A partition that is added to a topic which the group reads already is read from its beginning: state says so before a
  member is told of it. (`share.auto.offset.reset` is for topics that are new to the group.)
* State that is to be deleted is named in the group's records until it is gone; a coordinator that takes the group over
  goes on with it.

Ours: a group id belongs to one kind of group until that group is deleted; only a group of the classic kind without
members and offsets gives way.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from mansio.broker.coordinator.group.persisted_groups import HeartbeatOutcome
from mansio.config.group_config import value_of
from mansio.config.share_group_config import HEARTBEAT_INTERVAL, SESSION_TIMEOUT
from mansio.errors import (
    CoordinatorNotAvailable,
    FencedStateEpoch,
    GroupIdNotFound,
    InconsistentGroupProtocol,
    MansioError,
)
from mansio.logs import fields
from mansio.state.classic_group.group import ClassicGroup
from mansio.state.consumer_group.types import JOIN_EPOCH, ConsumerGroupSettings
from mansio.state.share_group.group import ShareGroup
from mansio.state.share_partition.types import ShareKey
from mansio.wire.internal_records.offset_and_group_records import GroupKey, encode_group_key

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping

    from mansio.broker.coordinator.group.group_store import GroupEntry, GroupStore
    from mansio.broker.coordinator.group.persisted_groups import PersistedGroups
    from mansio.broker.coordinator.group.settings import GroupSettings
    from mansio.broker.coordinator.group.topic_resolver import TopicResolver
    from mansio.ports import Promise, Scheduler
    from mansio.state.consumer_group.types import HeartbeatResponse, Records
    from mansio.state.share_group.group import ShareGroupMember, ShareHeartbeat

logger = logging.getLogger(__name__)


class DescribedShareGroup(NamedTuple):
    """A group as `ShareGroupDescribe` shows it."""

    group_id: str
    state: str
    group_epoch: int
    assignment_epoch: int
    members: tuple[ShareGroupMember, ...]


class ShareGroups:
    """See the module. `store`, `persisted`, and of one share partition `delete_state`, `wait_for_dead_letters` and
    `initialize_state`, are set by those who have them; `overrides`: the settings a group has of its own."""

    def __init__(
        self,
        settings: GroupSettings,
        scheduler: Scheduler,
        subscriptions: TopicResolver,
        overrides: Callable[[str], Mapping[str, str]],
    ) -> None:
        self.subscriptions = subscriptions
        self._settings = settings
        self._scheduler = scheduler
        self._overrides = overrides
        self.store: GroupStore
        self.persisted: PersistedGroups
        self.delete_state: Callable[[ShareKey], Awaitable[None]] = _no_state
        self.wait_for_dead_letters: Callable[[ShareKey], Awaitable[None]] = _no_state
        self.initialize_state: Callable[[ShareKey, int, int], Awaitable[None]] = _no_initialization
        self._initializing: dict[str, Promise[None]] = {}

    def empty_group(self, group_id: str) -> ShareGroup:
        """A group without members, with the settings in force for it."""
        return ShareGroup(group_id, settings=self._effective_settings(group_id))

    def _effective_settings(self, group_id: str) -> ConsumerGroupSettings:
        own, settings = self._overrides(group_id), self._settings
        return ConsumerGroupSettings(
            value_of(SESSION_TIMEOUT, own, settings.share_session_timeout_ms),
            value_of(HEARTBEAT_INTERVAL, own, settings.share_heartbeat_interval_ms),
            settings.share_members_max,
        )

    def settings_changed(self, group_id: str) -> None:
        """The group's own settings are others now: they hold from each member's next heartbeat on."""
        entry = self.store.entries.get(group_id)
        if entry is not None and isinstance(entry.group, ShareGroup):
            entry.group.settings = self._effective_settings(group_id)

    # ------------------------------------------------------------------ members

    async def heartbeat(self, group_id: str, request: ShareHeartbeat) -> HeartbeatResponse:
        """A member joins, is alive, or leaves; returns once what that changed is committed. Raises the errors of
        `ShareGroup.heartbeat`, `InconsistentGroupProtocol` (a group of another kind), those of the coordinator."""
        answer = await self.persisted.heartbeat(
            group_id, lambda entry: self._heartbeat(entry, request), joins=request.member_epoch == JOIN_EPOCH
        )
        if (begun := self._initializing.get(group_id)) is not None:
            await begun
        return answer

    def _heartbeat(self, entry: GroupEntry, request: ShareHeartbeat) -> HeartbeatOutcome:
        before, now_ms = entry.group, self.store.monotonic_ms()
        records: Records = []
        group = before if isinstance(before, ShareGroup) else self._converted(entry, records)
        topics = self.subscriptions.topics()
        answer, more = self.persisted.step(entry, group, lambda: group.heartbeat(request, topics, now_ms))
        if group is before and not more:
            self.persisted.heartbeat_unchanged(entry, group, now_ms)
            return HeartbeatOutcome(answer, None)
        return HeartbeatOutcome(answer, self._write(entry, group, records + more))

    def _converted(self, entry: GroupEntry, records: Records) -> ShareGroup:
        """The share group in the place of a classic one that holds nothing."""
        classic = entry.group
        if entry.is_deleted:
            raise CoordinatorNotAvailable(f"group {classic.group_id} is being deleted")
        if not isinstance(classic, ClassicGroup) or not classic.is_idle() or entry.offsets:
            raise InconsistentGroupProtocol(f"group {classic.group_id!r} is not a share group")
        if entry.stored is not None:
            records.append((encode_group_key(GroupKey(classic.group_id)), None))
        return self.empty_group(classic.group_id)

    def tick(self, entry: GroupEntry, group: ShareGroup) -> None:
        """The group's timer fired: whoever has not been heard of is removed."""
        topics, now_ms = self.subscriptions.topics(), self.store.monotonic_ms()
        self.persisted.tick(entry, group, lambda: self._write(entry, group, group.tick(topics, now_ms)))

    def find(self, group_id: str) -> tuple[GroupEntry, ShareGroup]:
        """The share group of that id. Raises `GroupIdNotFound`, and those of the coordinator."""
        entry = self.store.find(group_id)
        if entry is None or entry.is_deleted or not isinstance(entry.group, ShareGroup):
            raise GroupIdNotFound(f"there is no share group {group_id!r}")
        return entry, entry.group

    def describe(self, group_id: str) -> DescribedShareGroup:
        """One share group. Raises `GroupIdNotFound`."""
        _, group = self.find(group_id)
        return DescribedShareGroup(
            group_id,
            str(group.state),
            group.group_epoch,
            group.assignment_epoch,
            tuple(group.members.values()),
        )

    # ------------------------------------------------------------------ which topics have state

    async def initialized(
        self, entry: GroupEntry, group: ShareGroup, topic_id: bytes, name: str, indexes: Iterable[int]
    ) -> None:
        """These partitions have state, whether or not a member was ever given them; returns when that is committed."""
        await self._written(entry, group, group.initialized(topic_id, name, indexes))

    async def forget_topics(self, entry: GroupEntry, group: ShareGroup, topic_ids: Iterable[bytes]) -> None:
        """Delete the state of these topics, which no member fetches from. Raises `NonEmptyGroup`, and what the state
        could not be deleted for: then it is tried again when the group is loaded next."""
        wanted = list(topic_ids)
        indexes = {
            each.topic_id: each.partitions
            for each in group.state_partitions.initialized
            if each.topic_id in wanted
        }
        counts = self.subscriptions.topics().partitions
        # Of a topic that is gone nobody makes state again, and only what is initialized says how many there are.
        for topic_id in wanted:
            if topic_id not in counts:
                await self._delete(group.group_id, topic_id, indexes.get(topic_id, ()))
            for index in indexes.get(topic_id, ()) if topic_id in counts else ():
                await self.wait_for_dead_letters(ShareKey(group.group_id, topic_id, index))
        await self._written(entry, group, group.deleting(wanted))
        for topic_id in wanted:
            if topic_id in counts:
                everything = {*indexes.get(topic_id, ()), *range(counts[topic_id])}
                await self._delete(group.group_id, topic_id, sorted(everything))
        if not entry.gone and entry.group is group:
            await self._written(entry, group, group.deleted(wanted))

    async def _delete(self, group_id: str, topic_id: bytes, indexes: Iterable[int]) -> None:
        for index in indexes:
            await self.delete_state(ShareKey(group_id, topic_id, index))

    async def forget_all(self, entry: GroupEntry, group: ShareGroup) -> None:
        """Delete all state of a group without members, which is about to be deleted."""
        kept = group.state_partitions
        await self.forget_topics(
            entry, group, [each.topic_id for each in (*kept.initialized, *kept.deleting)]
        )

    def resume(self, entries: Iterable[GroupEntry]) -> None:
        """Go on with deletions that are under way, and begin those of topics that are gone: groups were loaded, or
        topics changed."""
        found = [(entry, entry.group) for entry in entries if isinstance(entry.group, ShareGroup)]
        if not found:
            return
        known = self.subscriptions.topics().partitions
        for entry, group in found:
            kept = group.state_partitions
            gone = [each.topic_id for each in kept.deleting]
            gone += [each.topic_id for each in kept.initialized if each.topic_id not in known]
            if gone:
                self._scheduler.spawn(self._resume(entry, group, gone), name="delete share state")

    async def _resume(self, entry: GroupEntry, group: ShareGroup, gone: list[bytes]) -> None:
        try:
            if group.members:
                await self._written(
                    entry, group, group.topics_changed(self.subscriptions.topics(), self.store.monotonic_ms())
                )
            await self.forget_topics(entry, group, gone)
        except MansioError as error:  # the next load, or the next look, tries again
            logger.warning("share state not deleted", extra=fields(group=group.group_id, reason=error))

    # ------------------------------------------------------------------ writing

    async def _written(self, entry: GroupEntry, group: ShareGroup, records: Records) -> None:
        written = self._write(entry, group, records)
        if written is not None:
            await written

    def _write(self, entry: GroupEntry, group: ShareGroup, records: Records) -> Promise[None] | None:
        """Append what a machine has changed and make it the group's. None if there is nothing to write. Raises what the
        append raises, the machine being revived."""
        if not records:
            return None
        written = self.persisted.write(entry, group, records)
        if group.grown:
            begun = self._initializing[group.group_id] = self._scheduler.promise()
            self._scheduler.spawn(self._initialize_grown(group, begun), name="begin share state")
        return written

    async def _initialize_grown(self, group: ShareGroup, begun: Promise[None]) -> None:
        grown, group.grown = group.grown, []
        try:
            for topic_id, index in grown:
                with suppress(FencedStateEpoch):  # an operator said where it is to begin
                    await self.initialize_state(ShareKey(group.group_id, topic_id, index), 0, 0)
        except MansioError as error:
            known = fields(group=group.group_id, partitions=len(grown), reason=error)
            logger.warning("new partitions not read from their beginning", extra=known)
        finally:
            if self._initializing.get(group.group_id) is begun:
                del self._initializing[group.group_id]
            begun.set_result(None)


async def _no_state(key: ShareKey) -> None:
    del key


async def _no_initialization(key: ShareKey, state_epoch: int, start_offset: int) -> None:
    del key, state_epoch, start_offset
