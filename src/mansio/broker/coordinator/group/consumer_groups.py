"""Consumer groups of the new protocol (KIP-848) in the coordinator: performs what `state.consumer_group.group` decides.

How a machine's changes are written, and what is always true of that: `persisted`. Groups change their kind in the same
way: the records that end the one and begin the other are one batch, and the machines are swapped in that turn.
Committed offsets are untouched by it.

Source: KIP-848. Ours: to a group that is not there, a member of it is UNKNOWN_MEMBER_ID (Kafka: GROUP_ID_NOT_FOUND), so
that it joins again instead of giving up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mansio.broker.coordinator.group.assignor_loading import load_assignors
from mansio.broker.coordinator.group.consumer_protocol_codec import ConsumerProtocolCodec
from mansio.broker.coordinator.group.persisted_groups import HeartbeatOutcome
from mansio.config.group_config import CONSUMER_HEARTBEAT_INTERVAL, CONSUMER_SESSION_TIMEOUT, value_of
from mansio.errors import CoordinatorNotAvailable, InconsistentGroupProtocol, UnknownMember
from mansio.state.consumer_group.group import ConsumerGroup
from mansio.state.consumer_group.types import JOIN_EPOCH, ConsumerGroupSettings
from mansio.state.share_group.group import ShareGroup
from mansio.wire.internal_records.offset_and_group_records import GroupKey, encode_group_key

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from mansio.broker.coordinator.group.group_store import GroupEntry, GroupStore
    from mansio.broker.coordinator.group.persisted_groups import PersistedGroups
    from mansio.broker.coordinator.group.settings import GroupSettings
    from mansio.broker.coordinator.group.topic_resolver import TopicResolver
    from mansio.ports import Clock, Promise
    from mansio.state.classic_group.group import ClassicGroup
    from mansio.state.classic_group.types import Effect, Join, JoinResponse, Sync, SyncResponse
    from mansio.state.consumer_group.types import Heartbeat, HeartbeatResponse, Records, Topics


class ConsumerGroups:
    """See the module. `store`, `persisted`, `perform` (effects of a classic machine) and `arm_timer` (the group's
    timer) are the coordinator's; `overrides`: the settings a group has of its own."""

    def __init__(
        self,
        settings: GroupSettings,
        clock: Clock,
        subscriptions: TopicResolver,
        overrides: Callable[[str], Mapping[str, str]],
    ) -> None:
        self.subscriptions = subscriptions
        self._settings = settings
        self._clock = clock
        self._overrides = overrides
        self._assignors = load_assignors(settings.consumer_assignors)
        self._codec = ConsumerProtocolCodec()
        self.store: GroupStore
        self.persisted: PersistedGroups
        self.perform: Callable[[GroupEntry, list[Effect]], None]
        self.arm_timer: Callable[[GroupEntry], None]

    def empty_group(self, group_id: str) -> ConsumerGroup:
        """A group without members, with the settings in force for it."""
        return ConsumerGroup(group_id, **self._parts(group_id))

    def _parts(self, group_id: str) -> dict[str, Any]:
        return {
            "assignors": self._assignors,
            "default_assignor": next(iter(self._assignors)),
            "settings": self._effective_settings(group_id),
            "codec": self._codec,
        }

    def _effective_settings(self, group_id: str) -> ConsumerGroupSettings:
        own, settings = self._overrides(group_id), self._settings
        return ConsumerGroupSettings(
            value_of(CONSUMER_SESSION_TIMEOUT, own, settings.consumer_session_timeout_ms),
            value_of(CONSUMER_HEARTBEAT_INTERVAL, own, settings.consumer_heartbeat_interval_ms),
            settings.members_max,
        )

    def settings_changed(self, group_id: str) -> None:
        """The group's own settings are others now: they hold from each member's next heartbeat on."""
        entry = self.store.entries.get(group_id)
        if entry is not None and isinstance(entry.group, ConsumerGroup):
            entry.group.settings = self._effective_settings(group_id)

    # ------------------------------------------------------------------ members of the new protocol

    async def heartbeat(self, group_id: str, request: Heartbeat) -> HeartbeatResponse:
        """A member joins, is alive, or leaves; returns once what that changed is committed. Raises the errors of
        `ConsumerGroup.heartbeat`, `InvalidRegularExpression`, `InconsistentGroupProtocol` (a classic group that is not
        one of consumers), and those of the coordinator."""
        if request.topic_regex:
            self.subscriptions.check(request.topic_regex)
        return await self.persisted.heartbeat(
            group_id, lambda entry: self._heartbeat(entry, request), joins=request.member_epoch == JOIN_EPOCH
        )

    def _heartbeat(self, entry: GroupEntry, request: Heartbeat) -> HeartbeatOutcome:
        now_ms = self.store.monotonic_ms()
        before = entry.group
        if isinstance(before, ConsumerGroup):
            group, records, effects = before, list[Any](), list[Any]()
            topics = self._topics(entry, request.topic_regex)
        elif isinstance(before, ShareGroup):
            raise InconsistentGroupProtocol(f"group {before.group_id!r} is a share group")
        else:
            topics = self.subscriptions.topics((request.topic_regex,) if request.topic_regex else ())
            group, records, effects = self._converted(entry, before, request, topics, now_ms)
        answer, more = self.persisted.step(entry, group, lambda: group.heartbeat(request, topics, now_ms))
        if group is before and not more:
            self.persisted.heartbeat_unchanged(entry, group, now_ms)
            return HeartbeatOutcome(answer, None)
        written = self._write(entry, group, records + more, topics)
        self.perform(entry, effects)
        return HeartbeatOutcome(answer, written)

    def _converted(
        self, entry: GroupEntry, classic: ClassicGroup, request: Heartbeat, topics: Topics, now_ms: float
    ) -> tuple[ConsumerGroup, Records, list[Any]]:
        """The consumer group that comes into the place of a classic one, its first records, and what the members are
        told who wait in the classic one."""
        group_id = classic.group_id
        if entry.is_deleted:
            raise CoordinatorNotAvailable(f"group {group_id} is being deleted")
        if request.member_epoch != JOIN_EPOCH:
            raise UnknownMember(f"group {group_id!r} has no member {request.member_id!r}")
        if classic.roster.members:
            return ConsumerGroup.from_classic(classic, **self._parts(group_id), topics=topics, now_ms=now_ms)
        tombstone: Records = (
            [(encode_group_key(GroupKey(group_id)), None)] if entry.stored is not None else []
        )
        return self.empty_group(group_id), tombstone, []

    # ------------------------------------------------------------------ members of the classic protocol

    def convert_to_classic(self, entry: GroupEntry) -> None:
        """A consumer group without members becomes a classic one, as whoever joins it next is classic."""
        if entry.is_deleted or not entry.group.is_idle():
            return
        if entry.modern:
            self.store.append(entry.group.group_id, [(key, None) for key in list(entry.modern)], whole=True)
        entry.group = self.store.classic_group(entry.group.group_id)

    async def join(
        self, entry: GroupEntry, group: ConsumerGroup, request: Join, new_member_id: str
    ) -> JoinResponse:
        """A classic member joins; see `ConsumerGroup.join`."""
        topics = self._topics(entry)
        now_ms = self.store.monotonic_ms()
        answer, records = self.persisted.step(
            entry, group, lambda: group.join(request, new_member_id, topics, now_ms)
        )
        written = self._write(entry, group, records, topics)
        if written is not None:
            await written
        elif not answer.must_rejoin:
            await self.store.committed(group.group_id)
        return answer

    async def sync(self, entry: GroupEntry, group: ConsumerGroup, request: Sync) -> SyncResponse:
        """A classic member asks for its assignment."""
        answer = group.sync(request, self._topics(entry), self.store.monotonic_ms())
        await self.store.committed(group.group_id)
        return answer

    def classic_heartbeat(
        self, entry: GroupEntry, group: ConsumerGroup, member_id: str, instance_id: str | None, epoch: int
    ) -> None:
        """A classic member is alive; raises what it has to do about its group."""
        try:
            group.classic_heartbeat(member_id, instance_id, epoch, self.store.monotonic_ms())
        finally:
            self.arm_timer(entry)  # a member that is told to join again has a limited time for it

    def leave(self, entry: GroupEntry, group: ConsumerGroup, member_id: str, instance_id: str | None) -> None:
        """A classic member goes."""
        topics = self._topics(entry)
        now_ms = self.store.monotonic_ms()
        records = self.persisted.step(
            entry, group, lambda: group.leave(member_id, instance_id, topics, now_ms)
        )
        self._write(entry, group, records, topics)

    def tick(self, entry: GroupEntry, group: ConsumerGroup) -> None:
        """The group's timer fired: whoever has not been heard of, or has not let go in time, is removed."""
        topics = self._topics(entry)
        now_ms = self.store.monotonic_ms()
        self.persisted.tick(
            entry, group, lambda: self._write(entry, group, group.tick(topics, now_ms), topics)
        )

    # ------------------------------------------------------------------ what both have in common

    def _topics(self, entry: GroupEntry, asked: str | None = None) -> Topics:
        """The topics, with the expressions of all members resolved, and that of a request. Looks at the members only
        when the topics or the group are not what they were."""
        group = entry.group
        assert isinstance(group, ConsumerGroup)
        view = self.subscriptions.topics((asked,) if asked else ())
        known = entry.resolved
        if known is None or known[0] is not view or known[1] != group.stored.version:
            self.subscriptions.topics(group.subscribed_regexes())
            entry.resolved = (view, group.stored.version)
        return view

    def _write(
        self, entry: GroupEntry, group: ConsumerGroup, records: Records, topics: Topics
    ) -> Promise[None] | None:
        """Append what a machine has changed and make it the group's; if only classic members are left, the group is
        theirs again. None if there is nothing to write. Raises what the append raises, the machine being revived."""
        if not records:
            return None
        becomes: ClassicGroup | None = None
        back = group.to_classic(
            initial_delay_ms=self._settings.initial_rebalance_delay_ms,
            size_max=self._settings.members_max,
            topics=topics,
            now_ms=self.store.monotonic_ms(),
            wall_ms=self._clock.wall_ms(),
        )
        if back is not None:
            becomes, more = back
            records = records + more
        return self.persisted.write(entry, group, records, becomes=becomes)
