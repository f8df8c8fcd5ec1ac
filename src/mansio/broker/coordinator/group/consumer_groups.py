"""Consumer groups (KIP-848) in the coordinator: requests to `state.consumer_group`, and conversion of groups.

`GroupActions` writes the changes. To convert a group from or to the classic protocol, one batch deletes the records of
the old group and writes those of the new one; the state machine is replaced in the same turn of the event loop.
Committed offsets do not change.

Source: KIP-848. Deviation: a member of a group that does not exist receives UNKNOWN_MEMBER_ID (Kafka:
GROUP_ID_NOT_FOUND), so that the member joins again instead of failing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mansio.broker.coordinator.group.group_actions import HeartbeatOutcome
from mansio.errors import CoordinatorNotAvailable, InconsistentGroupProtocol, UnknownMember
from mansio.state.consumer_group.group import ConsumerGroup
from mansio.state.consumer_group.types import JOIN_EPOCH
from mansio.state.share_group.group import ShareGroup
from mansio.wire.internal_records.offset_and_group_records import GroupKey, encode_group_key

if TYPE_CHECKING:
    from mansio.broker.coordinator.group.group_actions import GroupActions
    from mansio.broker.coordinator.group.group_factory import GroupFactory
    from mansio.broker.coordinator.group.group_store import GroupEntry, GroupStore
    from mansio.broker.coordinator.group.settings import GroupSettings
    from mansio.broker.coordinator.group.topic_resolver import TopicResolver
    from mansio.broker.coordinator.group.visible_topics import Viewer
    from mansio.ports import Clock, Promise
    from mansio.state.classic_group.group import ClassicGroup
    from mansio.state.classic_group.types import Join, JoinResponse, Response, Sync, SyncResponse
    from mansio.state.consumer_group.types import Heartbeat, HeartbeatResponse, Records, Topics


class ConsumerGroups:
    """The consumer groups of one coordinator."""

    def __init__(
        self,
        settings: GroupSettings,
        *,
        clock: Clock,
        factory: GroupFactory,
        store: GroupStore,
        actions: GroupActions,
        topic_resolver: TopicResolver,
        hides_topics: bool,
    ) -> None:
        """`hides_topics`: whether members may not see all topics."""
        self._hides_topics = hides_topics
        self._settings = settings
        self._clock = clock
        self._factory = factory
        self._store = store
        self._actions = actions
        self._topic_resolver = topic_resolver

    # ------------------------------------------------------------------ members of the consumer protocol

    async def heartbeat(
        self, group_id: str, request: Heartbeat, viewer: Viewer | None = None
    ) -> HeartbeatResponse:
        """Handle a heartbeat; returns once its changes are committed. `viewer`: the member, if it may not see all
        topics. Raises the errors of `ConsumerGroup.heartbeat`,
        `InvalidRegularExpression`, `InconsistentGroupProtocol` (a classic group with another protocol type), and those
        of the coordinator."""
        if request.topic_regex:
            self._topic_resolver.check(request.topic_regex)
        return await self._actions.heartbeat(
            group_id,
            lambda entry: self._heartbeat(entry, request, viewer),
            joins=request.member_epoch == JOIN_EPOCH,
        )

    def _heartbeat(self, entry: GroupEntry, request: Heartbeat, viewer: Viewer | None) -> HeartbeatOutcome:
        now_ms = self._store.monotonic_ms()
        before = entry.group
        if isinstance(before, ConsumerGroup):
            group, records, responses = before, list[Any](), list[Any]()
            topics = self._resolve_topics(entry, request, viewer)
        elif isinstance(before, ShareGroup):
            raise InconsistentGroupProtocol(f"group {before.group_id!r} is a share group")
        else:
            topics = self._topic_resolver.topics((request.topic_regex,) if request.topic_regex else ())
            if self._hides_topics:
                topics = entry.visible(topics).update(topics, request.topic_regex or "", viewer, is_new=True)
            group, records, responses = self._converted_from_classic(entry, before, request, topics, now_ms)
        response, more = self._actions.apply_change(
            entry, group, lambda: group.heartbeat(request, topics, now_ms)
        )
        if group is before and not more:
            self._actions.rearm_after_heartbeat(entry, group, now_ms)
            return HeartbeatOutcome(response, None)
        written = self._write_changes(entry, group, records + more, topics)
        self._actions.perform(entry, responses)
        return HeartbeatOutcome(response, written)

    def _converted_from_classic(
        self, entry: GroupEntry, classic: ClassicGroup, request: Heartbeat, topics: Topics, now_ms: float
    ) -> tuple[ConsumerGroup, Records, list[Response]]:
        """Create the consumer group that replaces a classic group. Returns it with its first records, and the responses
        to the parked requests of the classic group's members."""
        group_id = classic.group_id
        if entry.is_deleted:
            raise CoordinatorNotAvailable(f"group {group_id} is being deleted")
        if request.member_epoch != JOIN_EPOCH:
            raise UnknownMember(f"group {group_id!r} has no member {request.member_id!r}")
        if classic.members:
            return self._factory.converted_from_classic(classic, topics, now_ms)
        tombstone: Records = (
            [(encode_group_key(GroupKey(group_id)), None)] if entry.group_metadata_value is not None else []
        )
        return self._factory.consumer_group(group_id), tombstone, []

    # ------------------------------------------------------------------ members of the classic protocol

    def convert_to_classic(self, entry: GroupEntry) -> None:
        """Convert a consumer group without members into a classic group, which a classic member is about to join."""
        if entry.is_deleted or not entry.group.is_idle():
            return
        group_id = entry.group.group_id
        if entry.group_records:
            self._store.append(group_id, [(key, None) for key in list(entry.group_records)], atomic=True)
        entry.group = self._factory.classic_group(group_id)

    async def join(
        self, entry: GroupEntry, group: ConsumerGroup, request: Join, new_member_id: str
    ) -> JoinResponse:
        """Handle the JoinGroup of a classic member; see `ConsumerGroup.join`."""
        topics = self._resolve_topics(entry)
        now_ms = self._store.monotonic_ms()
        response, records = self._actions.apply_change(
            entry, group, lambda: group.join(request, new_member_id, topics, now_ms)
        )
        written = self._write_changes(entry, group, records, topics)
        if written is not None:
            await written
        elif not response.must_rejoin:
            await self._store.wait_until_committed(group.group_id)
        return response

    async def sync(self, entry: GroupEntry, group: ConsumerGroup, request: Sync) -> SyncResponse:
        """Return the assignment of a classic member."""
        response = group.sync(request, self._resolve_topics(entry), self._store.monotonic_ms())
        await self._store.wait_until_committed(group.group_id)
        return response

    def classic_heartbeat(
        self, entry: GroupEntry, group: ConsumerGroup, member_id: str, instance_id: str | None, epoch: int
    ) -> None:
        """Handle the Heartbeat of a classic member; see `ConsumerGroup.classic_heartbeat`."""
        try:
            group.classic_heartbeat(member_id, instance_id, epoch, self._store.monotonic_ms())
        finally:
            self._actions.arm_timer(entry)  # a member that has to rejoin has a new deadline

    def leave(self, entry: GroupEntry, group: ConsumerGroup, member_id: str, instance_id: str | None) -> None:
        """Handle the LeaveGroup of a classic member: remove the member."""
        topics = self._resolve_topics(entry)
        now_ms = self._store.monotonic_ms()
        records = self._actions.apply_change(
            entry, group, lambda: group.leave(member_id, instance_id, topics, now_ms)
        )
        self._write_changes(entry, group, records, topics)

    # ------------------------------------------------------------------ time and topics

    def expire_members(self, entry: GroupEntry, group: ConsumerGroup) -> None:
        """Remove members whose session has ended, or that did not revoke partitions or rejoin in time."""
        topics = self._resolve_topics(entry)
        now_ms = self._store.monotonic_ms()
        self._actions.remove_expired(
            entry, group, lambda: self._write_changes(entry, group, group.tick(topics, now_ms), topics)
        )

    def _resolve_topics(
        self, entry: GroupEntry, request: Heartbeat | None = None, viewer: Viewer | None = None
    ) -> Topics:
        """Return the topics, with the regular expressions of all members and of a request resolved. The members'
        expressions are collected only if the topics or the group have changed."""
        group = entry.group
        requested_regex = None if request is None else request.topic_regex
        assert isinstance(group, ConsumerGroup)
        view = self._topic_resolver.topics((requested_regex,) if requested_regex else ())
        resolved = entry.resolved_view
        if resolved is None or resolved[0] is not view or resolved[1] != group.stored.version:
            self._topic_resolver.topics(group.subscribed_regexes())
            entry.resolved_view = (view, group.stored.version)
        if not self._hides_topics:
            return view
        pattern = requested_regex
        if pattern is None and request is not None:
            member = group.stored.members.get(request.member_id)
            pattern = None if member is None else member.metadata.topic_regex
        return entry.visible(view).update(view, pattern or "", viewer, is_new=bool(requested_regex))

    def _write_changes(
        self, entry: GroupEntry, group: ConsumerGroup, records: Records, topics: Topics
    ) -> Promise[None] | None:
        """Append the changes of a group and make it the group of the entry. If only classic members are left, the group
        is converted to a classic one. Returns the promise of the commit, None if there is nothing to write. Raises the
        errors of the append."""
        if not records:
            return None
        replacement: ClassicGroup | None = None
        converted = group.to_classic(
            initial_delay_ms=self._settings.initial_rebalance_delay_ms,
            size_max=self._settings.members_max,
            topics=topics,
            now_ms=self._store.monotonic_ms(),
            wall_ms=self._clock.wall_ms(),
        )
        if converted is not None:
            replacement, more = converted
            records = records + more
        return self._actions.write(entry, group, records, replacement=replacement)
